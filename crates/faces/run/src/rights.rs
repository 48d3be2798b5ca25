//! Whether the user may: what the kernel checks for a mount is checked here for a run.

use impresario_wire::{Attr, NodeKind};

/// The user of the run.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    groups: Vec<u32>,
}

impl User {
    pub(crate) fn new() -> std::io::Result<User> {
        let groups = rustix::process::getgroups()?.into_iter().map(|group| group.as_raw()).collect();
        Ok(User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), groups })
    }

    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0
    }

    fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether the user may do all of `wanted` (`R_OK`, `W_OK`, `X_OK`) with a node.
    pub(crate) fn may(&self, attr: &Attr, wanted: i32) -> Result<(), i32> {
        let wanted = wanted as u32 & 7;
        if self.is_root() {
            // A file that nobody may execute is not executed by root either.
            let runs = attr.kind == NodeKind::Dir || attr.mode & 0o111 != 0 || wanted & 1 == 0;
            return if runs { Ok(()) } else { Err(libc::EACCES) };
        }
        let class = match attr {
            _ if attr.uid == self.uid => 6,
            _ if self.is_in(attr.gid) => 3,
            _ => 0,
        };
        if attr.mode >> class & wanted == wanted { Ok(()) } else { Err(libc::EACCES) }
    }

    /// Whether the user may remove or rename `node` in a directory.
    pub(crate) fn may_remove(&self, directory: &Attr, node: &Attr) -> Result<(), i32> {
        self.may(directory, libc::W_OK | libc::X_OK)?;
        let is_sticky = directory.mode & libc::S_ISVTX != 0;
        if is_sticky && !self.is_root() && self.uid != node.uid && self.uid != directory.uid {
            return Err(libc::EPERM);
        }
        Ok(())
    }

    /// Whether the user may change a node's mode and times.
    pub(crate) fn owns(&self, attr: &Attr) -> Result<(), i32> {
        if self.is_root() || self.uid == attr.uid { Ok(()) } else { Err(libc::EPERM) }
    }

    /// Whether the user may give a node to that owner and group, where these are to change.
    pub(crate) fn may_give(&self, attr: &Attr, uid: Option<u32>, gid: Option<u32>) -> Result<(), i32> {
        let uid_stays = uid.is_none_or(|uid| uid == attr.uid);
        let gid_fits = gid.is_none_or(|gid| gid == attr.gid || self.is_in(gid));
        if self.is_root() || (attr.uid == self.uid && uid_stays && gid_fits) { Ok(()) } else { Err(libc::EPERM) }
    }

    /// The group of a node made in a directory, and the mode of a directory made there.
    pub(crate) fn inherited(&self, directory: &Attr, mode: u32) -> (u32, u32) {
        match directory.mode & libc::S_ISGID {
            0 => (self.gid, mode),
            bit => (directory.gid, mode | bit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(kind: NodeKind, mode: u32, uid: u32, gid: u32) -> Attr {
        let (atime, mtime, ctime) = Default::default();
        Attr { ino: 1, kind, mode, nlink: 1, uid, gid, size: 0, used_bytes: 0, atime, mtime, ctime }
    }

    #[test]
    fn the_first_class_that_fits_counts() {
        let user = User { uid: 5, gid: 6, groups: vec![7] };
        let file = |mode, uid, gid| node(NodeKind::File, mode, uid, gid);
        assert_eq!(user.may(&file(0o077, 5, 6), libc::R_OK), Err(libc::EACCES));
        assert_eq!(user.may(&file(0o600, 5, 9), libc::R_OK | libc::W_OK), Ok(()));
        assert_eq!(user.may(&file(0o607, 9, 7), libc::R_OK), Err(libc::EACCES));
        assert_eq!(user.may(&file(0o640, 9, 7), libc::R_OK), Ok(()));
        assert_eq!(user.may(&file(0o604, 9, 9), libc::R_OK), Ok(()));
        assert_eq!(user.may(&file(0o604, 9, 9), libc::W_OK), Err(libc::EACCES));
        let root = User { uid: 0, gid: 0, groups: vec![] };
        assert_eq!(root.may(&file(0, 9, 9), libc::R_OK | libc::W_OK), Ok(()));
        assert_eq!(root.may(&file(0o600, 9, 9), libc::X_OK), Err(libc::EACCES));
        assert_eq!(root.may(&node(NodeKind::Dir, 0, 9, 9), libc::X_OK), Ok(()));
    }

    #[test]
    fn in_a_sticky_directory_one_removes_ones_own() {
        let user = User { uid: 5, gid: 6, groups: vec![] };
        let folder = |mode| node(NodeKind::Dir, mode, 1, 1);
        let (mine, other) = (node(NodeKind::File, 0o600, 5, 6), node(NodeKind::File, 0o666, 8, 8));
        assert_eq!(user.may_remove(&folder(0o1777), &mine), Ok(()));
        assert_eq!(user.may_remove(&folder(0o1777), &other), Err(libc::EPERM));
        assert_eq!(user.may_remove(&folder(0o777), &other), Ok(()));
        assert_eq!(user.may_remove(&folder(0o755), &mine), Err(libc::EACCES));
    }

    #[test]
    fn what_is_given_away_is_roots_to_give() {
        let user = User { uid: 5, gid: 6, groups: vec![7] };
        let mine = node(NodeKind::File, 0o600, 5, 6);
        assert_eq!(user.may_give(&mine, Some(5), Some(7)), Ok(()));
        assert_eq!(user.may_give(&mine, None, Some(8)), Err(libc::EPERM));
        assert_eq!(user.may_give(&mine, Some(4), None), Err(libc::EPERM));
        assert_eq!((user.owns(&mine), user.owns(&node(NodeKind::File, 0o777, 1, 6))), (Ok(()), Err(libc::EPERM)));
    }
}
