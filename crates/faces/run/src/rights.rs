//! Whether the user may: what the kernel checks for a mount is checked here for a run.

use impresario_base::set_id;
use impresario_client::{Client, ClientError};
use impresario_node::acl::Acl;
use impresario_wire::{ACL_ACCESS, Attr, NodeKind};

/// The user of the run.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    groups: Vec<u32>,
    /// Whether this machine protects hard links.
    protects_links: bool,
}

impl User {
    pub(crate) fn new() -> std::io::Result<User> {
        let groups = rustix::process::getgroups()?.into_iter().map(|group| group.as_raw()).collect();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let protected = std::fs::read("/proc/sys/fs/protected_hardlinks");
        Ok(User { uid, gid, groups, protects_links: protected.is_ok_and(|text| text.starts_with(b"1")) })
    }

    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0
    }

    fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Whether the user may do all of `wanted` (`R_OK`, `W_OK`, `X_OK`) with the node at a path.
    pub(crate) fn may_at(&self, client: &Client, path: &[u8], attr: &Attr, wanted: i32) -> Result<(), i32> {
        self.may(attr, || client.xattr(path, ACL_ACCESS), wanted)
    }

    /// The same; `read_acl` reads the access control list of the node, which it may have none of.
    pub(crate) fn may(
        &self,
        attr: &Attr,
        read_acl: impl FnOnce() -> Result<Vec<u8>, ClientError>,
        wanted: i32,
    ) -> Result<(), i32> {
        let wanted = wanted as u32 & 7;
        if self.is_root() {
            // A file that nobody may execute is not executed by root either.
            let runs = attr.kind == NodeKind::Dir || attr.mode & 0o111 != 0 || wanted & 1 == 0;
            return if runs { Ok(()) } else { Err(libc::EACCES) };
        }
        let acl = match attr.labelled && attr.uid != self.uid {
            true => match read_acl() {
                Ok(bytes) => Acl::decode(&bytes).map_err(|_| libc::EIO)?,
                Err(error) if error.errno() == libc::ENODATA => None,
                Err(error) => return Err(error.errno()),
            },
            false => None,
        };
        let acl = acl.unwrap_or_else(|| Acl::of_mode(attr.mode));
        let is_user = |uid| uid == self.uid;
        match acl.permits((attr.uid, attr.gid), is_user, |gid| self.is_in(gid), wanted) {
            true => Ok(()),
            false => Err(libc::EACCES),
        }
    }

    /// Whether the user may remove or rename `node` in a directory that the user may change.
    pub(crate) fn may_remove(&self, directory: &Attr, node: &Attr) -> Result<(), i32> {
        let is_sticky = directory.mode & libc::S_ISVTX != 0;
        if is_sticky && !self.is_root() && self.uid != node.uid && self.uid != directory.uid {
            return Err(libc::EPERM);
        }
        Ok(())
    }

    /// Whether the user may give a node a further name; `may_change` says whether it may read and write it. As a kernel that protects
    /// hard links has it: not what others own, unless the user may read and change it anyway.
    pub(crate) fn may_link(&self, attr: &Attr, may_change: impl FnOnce() -> bool) -> Result<(), i32> {
        if self.is_root() || self.uid == attr.uid || !self.protects_links {
            return Ok(());
        }
        const RUNS_AS_GROUP: u32 = libc::S_ISGID | libc::S_IXGRP;
        let gives_rights = attr.mode & libc::S_ISUID != 0 || attr.mode & RUNS_AS_GROUP == RUNS_AS_GROUP;
        if attr.kind == NodeKind::File && !gives_rights && may_change() { Ok(()) } else { Err(libc::EPERM) }
    }

    /// The permission bits that go when this user changes the bytes of a file: set-user-id and set-group-id, but for a
    /// set-group-id bit without execution by the group, if the user is in that.
    pub(crate) fn takes_by_change(&self, attr: &Attr) -> u32 {
        if self.is_root() { 0 } else { set_id::taken(attr.mode, || self.is_in(attr.gid)) }
    }

    /// The mode that a node gets where this user asks for `mode`: set-group-id only of a group that the user is in.
    pub(crate) fn mode_to_set(&self, attr: &Attr, mode: u32) -> u32 {
        if self.is_root() || self.is_in(attr.gid) { mode } else { mode & !libc::S_ISGID }
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
        Attr { ino: 1, kind, mode, nlink: 1, uid, gid, size: 0, used_bytes: 0, atime, mtime, ctime, labelled: false }
    }

    /// Of a node without a list.
    fn may(user: &User, attr: &Attr, wanted: i32) -> Result<(), i32> {
        user.may(attr, || panic!("it has none"), wanted)
    }

    #[test]
    fn a_list_counts_where_there_is_one() {
        let user = User { uid: 5, gid: 6, groups: vec![7], protects_links: true };
        let mut list = vec![2, 0, 0, 0];
        for (tag, rights, id) in [(1, 7, u32::MAX), (2, 4, 5), (4, 7, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)] {
            list.extend([tag, 0, rights, 0]);
            list.extend(u32::to_le_bytes(id));
        }
        let labelled = |uid, gid| Attr { labelled: true, ..node(NodeKind::File, 0o770, uid, gid) };
        assert_eq!(user.may(&labelled(9, 7), || Ok(list.clone()), libc::R_OK), Ok(()));
        assert_eq!(user.may(&labelled(9, 7), || Ok(list.clone()), libc::W_OK), Err(libc::EACCES), "its own entry");
        assert_eq!(user.may(&labelled(5, 9), || panic!("not asked"), libc::W_OK), Ok(()), "the owner");
        assert_eq!(user.may(&labelled(9, 7), || Ok(vec![1]), libc::R_OK), Err(libc::EIO));
        let peer = impresario_client::Peer { name: "meta".into(), address: String::new() };
        let fault = impresario_wire::Fault { errno: libc::ENODATA, message: String::new() };
        let none = || Err(ClientError::Fault { peer, fault });
        assert_eq!(user.may(&labelled(9, 7), none, libc::W_OK), Ok(()), "the bits");
    }

    #[test]
    fn the_first_class_that_fits_counts() {
        let user = User { uid: 5, gid: 6, groups: vec![7], protects_links: true };
        let file = |mode, uid, gid| node(NodeKind::File, mode, uid, gid);
        assert_eq!(may(&user, &file(0o077, 5, 6), libc::R_OK), Err(libc::EACCES));
        assert_eq!(may(&user, &file(0o600, 5, 9), libc::R_OK | libc::W_OK), Ok(()));
        assert_eq!(may(&user, &file(0o607, 9, 7), libc::R_OK), Err(libc::EACCES));
        assert_eq!(may(&user, &file(0o640, 9, 7), libc::R_OK), Ok(()));
        assert_eq!(may(&user, &file(0o604, 9, 9), libc::R_OK), Ok(()));
        assert_eq!(may(&user, &file(0o604, 9, 9), libc::W_OK), Err(libc::EACCES));
        let root = User { uid: 0, gid: 0, groups: vec![], protects_links: true };
        assert_eq!(may(&root, &file(0, 9, 9), libc::R_OK | libc::W_OK), Ok(()));
        assert_eq!(may(&root, &file(0o600, 9, 9), libc::X_OK), Err(libc::EACCES));
        assert_eq!(may(&root, &node(NodeKind::Dir, 0, 9, 9), libc::X_OK), Ok(()));
    }

    #[test]
    fn in_a_sticky_directory_one_removes_ones_own() {
        let user = User { uid: 5, gid: 6, groups: vec![], protects_links: true };
        let folder = |mode| node(NodeKind::Dir, mode, 1, 1);
        let (mine, other) = (node(NodeKind::File, 0o600, 5, 6), node(NodeKind::File, 0o666, 8, 8));
        assert_eq!(user.may_remove(&folder(0o1777), &mine), Ok(()));
        assert_eq!(user.may_remove(&folder(0o1777), &other), Err(libc::EPERM));
        assert_eq!(user.may_remove(&folder(0o777), &other), Ok(()));
    }

    #[test]
    fn what_is_given_away_is_roots_to_give() {
        let user = User { uid: 5, gid: 6, groups: vec![7], protects_links: true };
        let mine = node(NodeKind::File, 0o600, 5, 6);
        assert_eq!(user.may_give(&mine, Some(5), Some(7)), Ok(()));
        assert_eq!(user.may_give(&mine, None, Some(8)), Err(libc::EPERM));
        assert_eq!(user.may_give(&mine, Some(4), None), Err(libc::EPERM));
        assert_eq!((user.owns(&mine), user.owns(&node(NodeKind::File, 0o777, 1, 6))), (Ok(()), Err(libc::EPERM)));
    }

    #[test]
    fn links_of_others_files_are_protected() {
        let user = User { uid: 5, gid: 6, groups: vec![7], protects_links: true };
        let file = |mode, uid| node(NodeKind::File, mode, uid, 9);
        assert_eq!(user.may_link(&file(0o4755, 5), || panic!("it is the owner")), Ok(()));
        assert_eq!(user.may_link(&file(0o666, 8), || true), Ok(()));
        assert_eq!(user.may_link(&file(0o644, 8), || false), Err(libc::EPERM));
        assert_eq!(user.may_link(&file(0o4777, 8), || true), Err(libc::EPERM));
        assert_eq!(user.may_link(&file(0o2777, 8), || true), Err(libc::EPERM));
        assert_eq!(user.may_link(&node(NodeKind::Fifo, 0o666, 8, 9), || true), Err(libc::EPERM));
        let user = User { protects_links: false, ..user };
        assert_eq!(user.may_link(&file(0o600, 8), || false), Ok(()));
    }

    #[test]
    fn set_id_bits_go_when_a_file_is_changed() {
        let user = User { uid: 5, gid: 6, groups: vec![7], protects_links: true };
        let after = |mode, gid| user.takes_by_change(&node(NodeKind::File, mode, 5, gid));
        assert_eq!((after(0o6755, 6), after(0o4644, 9), after(0o755, 6)), (0o6000, 0o4000, 0));
        assert_eq!((after(0o2644, 7), after(0o2644, 9)), (0, 0o2000), "a lock bit stays for members");
        let root = User { uid: 0, ..user };
        assert_eq!(root.takes_by_change(&node(NodeKind::File, 0o6755, 5, 6)), 0);
    }
}
