//! Extended attributes: how they are kept beside the server's own.
//!
//! Each is an attribute of the local node, with a prefix before its name, so that none can hide or change a record. It is
//! set and removed with one system call, moves with its node and goes with it. `Fsync` and `FsyncDir` make it durable.
//!
//! ext4 has one block for all attributes of a node, and takes at most [`XATTR_EACH_BYTES`] for each besides its name and
//! value. [`XATTRS_MAX_BYTES`] leaves room for a record there, and holds on every local file system.

use std::os::fd::{AsFd, BorrowedFd};

use impresario_node::acl::Acl;
use impresario_wire::message::{ACL_DEFAULT, NodeKind, Target, XATTR_EACH_BYTES, XATTRS_MAX_BYTES, XattrMode};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::attributes::unless_so;
use super::changes::By;
use super::disk::PATH_FLAGS;
use super::fault::{Explain, Outcome, fault, show};
use super::labels::{SECURITY, is_acl, may_have};
use super::opens::Session;
use super::permissions::{ACL_CHANGE, User, denied, not_owned, path_of};
use super::service::Meta;
use super::tree::kind_of;

/// Before each name on the local node.
pub(super) const PREFIX: &[u8] = b"user.impresario.x.";
/// The name spaces that are kept, beside access control lists.
const NAME_SPACES: [&[u8]; 2] = [USER, SECURITY];
/// That of users.
const USER: &[u8] = b"user.";
/// Longest name: the local file system takes 255 bytes.
const NAME_MAX_BYTES: usize = 255 - PREFIX.len();

impl Meta {
    /// The value of an attribute.
    pub(super) fn get_xattr(&self, session: &Session, target: &Target, name: &[u8]) -> Outcome<Vec<u8>> {
        self.at_node(session, target, "read an extended attribute of", |node| {
            let local = local_name(name)?;
            if !may_have(node)? {
                return Err(Errno::NODATA);
            }
            if is_acl(name) {
                return self.acl_of(node, name)?.map(|acl| acl.encode()).ok_or(Errno::NODATA);
            }
            let mut value = vec![0; XATTRS_MAX_BYTES];
            let len = self.dir.disk.attribute(node, local.as_slice(), &mut value)?;
            value.truncate(len);
            Ok(value)
        })
    }

    /// The names of all attributes, each with a NUL byte behind it.
    pub(super) fn list_xattr(&self, session: &Session, target: &Target) -> Outcome<Vec<u8>> {
        self.at_node(session, target, "list the extended attributes of", |node| {
            let mut names = Vec::new();
            for name in self.xattrs_of(node)? {
                names.extend_from_slice(&name);
                names.push(0);
            }
            Ok(names)
        })
    }

    /// Sets an attribute; `None` removes it. `user`: who asks, if a client's own kernel is not believed.
    pub(super) fn set_xattr(
        &self,
        (session, by): (&Session, By<'_>),
        target: &Target,
        name: &[u8],
        value: Option<&[u8]>,
        mode: XattrMode,
        user: Option<&User>,
    ) -> Outcome<()> {
        let doing = if value.is_some() { "set an extended attribute of" } else { "remove an extended attribute of" };
        let mut lost = None;
        let done = self.at_node(session, target, doing, |node| {
            let local = local_name(name)?;
            if !may_have(node)? {
                return Err(if is_acl(name) { Errno::OPNOTSUPP } else { Errno::PERM });
            }
            // The room that there is does not change meanwhile.
            let _alone = self.xattrs.lock();
            if is_acl(name) {
                // As Linux has it, no bytes are no list.
                let given = value.filter(|value| !value.is_empty());
                let acl = given.map(Acl::decode).transpose().map_err(|_| Errno::INVAL)?.flatten();
                if name == ACL_DEFAULT && kind_of(&rustix::fs::fstat(node)?) != Some(NodeKind::Dir) {
                    return if acl.is_some() { Err(Errno::ACCESS) } else { Ok(()) };
                }
                self.check_room(node, name, acl.as_ref().map_or(0, |acl| acl.encode().len()))?;
                // Neither the owner nor the mode changes from here on: the user may have lost the node since the call was permitted.
                let _modes = self.dir.disk.modes.lock();
                if let Some(user) = user
                    && !self.is_owned_by(user, node)?
                {
                    lost = Some(not_owned(user, ACL_CHANGE, path_of(target)));
                    return Err(Errno::PERM);
                }
                return self.set_acl(node, name, acl.as_ref());
            }
            if let Some(value) = value {
                self.check_room(node, name, value.len())?;
            }
            // As above. What is open was opened for that, and who has no user here may change it anyhow.
            let _modes = match (user, target) {
                (Some(user), Target::Path(path)) => {
                    let modes = self.dir.disk.modes.lock();
                    if !self.may_write(user, node)? {
                        lost = Some(denied(user, doing, path));
                        return Err(Errno::ACCESS);
                    }
                    Some(modes)
                }
                _ => None,
            };
            let mut room = [0; XATTRS_MAX_BYTES];
            let is_there = match self.dir.disk.attribute(node, local.as_slice(), &mut room) {
                Ok(_) => true,
                Err(Errno::NODATA) => false,
                Err(errno) => return Err(errno),
            };
            match (value, mode) {
                (Some(_), XattrMode::Create) if is_there => return Err(Errno::EXIST),
                (None, _) | (Some(_), XattrMode::Replace) if !is_there => return Err(Errno::NODATA),
                _ => {}
            }
            // Nobody else sets it until it is noted how this ends.
            let undone = self.changes.begin(&self.dir, by, is_there.into()).map_err(|fault| {
                let errno = Errno::from_raw_os_error(fault.errno);
                lost = Some(fault);
                errno
            })?;
            match value {
                None => self.dir.disk.remove_xattr(node, &local)?,
                Some(value) => {
                    if name.starts_with(SECURITY) {
                        self.labels.begin(&self.dir)?;
                    }
                    let done = self.dir.disk.set_xattr(node, &local, value, XattrFlags::empty());
                    unless_so(done, || {
                        let len = self.dir.disk.attribute(node, local.as_slice(), &mut room)?;
                        Ok(room.get(..len) == Some(value))
                    })?;
                }
            }
            undone.done();
            Ok(())
        });
        done.map_err(|fault| lost.unwrap_or(fault))
    }

    /// Refuses an attribute for which there is no room beside the node's others.
    fn check_room(&self, node: BorrowedFd<'_>, name: &[u8], len_bytes: usize) -> rustix::io::Result<()> {
        let (mut taken, mut room) = (XATTR_EACH_BYTES + name.len() + len_bytes, [0; XATTRS_MAX_BYTES]);
        for other in self.xattrs_of(node)?.into_iter().filter(|other| other != name) {
            let len = self.dir.disk.attribute(node, local_name(&other)?.as_slice(), &mut room)?;
            taken += XATTR_EACH_BYTES + other.len() + len;
        }
        if taken > XATTRS_MAX_BYTES { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// The names of a node's attributes.
    fn xattrs_of(&self, node: BorrowedFd<'_>) -> rustix::io::Result<Vec<Vec<u8>>> {
        let all = if may_have(node)? { self.dir.disk.attributes(node)? } else { Vec::new() };
        Ok(all.split(|byte| *byte == 0).filter_map(|name| name.strip_prefix(PREFIX)).map(<[u8]>::to_vec).collect())
    }

    /// Acts on the node that is meant.
    fn at_node<T>(
        &self,
        session: &Session,
        target: &Target,
        doing: &str,
        act: impl FnOnce(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> Outcome<T> {
        match target {
            Target::Path(path) => {
                let node = self.dir.walk(path, PATH_FLAGS).explain(doing, path)?;
                act(node.as_fd()).or_else(|errno| refuse(errno, doing, path))
            }
            Target::Handle(handle) => {
                let pin = self.pin_handle(session, *handle)?;
                act(pin.fd.as_fd()).or_else(|errno| refuse(errno, doing, &self.opens.path_of(pin.ino)))
            }
        }
    }
}

/// The name on the local node.
pub(super) fn local_name(name: &[u8]) -> rustix::io::Result<Vec<u8>> {
    match NAME_SPACES.iter().find_map(|space| name.strip_prefix(*space)) {
        None if is_acl(name) => Ok([PREFIX, name].concat()),
        None => Err(Errno::OPNOTSUPP),
        Some([]) => Err(Errno::INVAL),
        Some(_) if name.len() > NAME_MAX_BYTES => Err(Errno::RANGE),
        Some(_) => Ok([PREFIX, name].concat()),
    }
}

fn refuse<T>(errno: Errno, doing: &str, path: &[u8]) -> Outcome<T> {
    let why = match errno {
        Errno::OPNOTSUPP => {
            "only access control lists, of files and directories, and attributes whose names begin with `user.` \
                             or `security.` are kept"
                .to_string()
        }
        Errno::INVAL => "that is no name or no access control list".to_string(),
        Errno::ACCESS => "only directories have a default access control list".to_string(),
        Errno::RANGE => format!("its name is longer than {NAME_MAX_BYTES} bytes"),
        Errno::PERM => "only files and directories have extended attributes".to_string(),
        Errno::NODATA => "there is no such attribute".to_string(),
        Errno::NOSPC => format!(
            "there is no room for it: names and values of one node may take {XATTRS_MAX_BYTES} bytes, {XATTR_EACH_BYTES} of them for \
             each attribute; or the metadata server's file system is full"
        ),
        _ => return Err(errno).explain(doing, path),
    };
    Err(fault(errno, format!("cannot {doing} {}: {why}", show(path))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_users_stay_apart_from_our_own() {
        let local = |name: &[u8]| local_name(name).map(|name| String::from_utf8(name).unwrap());
        assert_eq!(local(b"user.impresario.file"), Ok("user.impresario.x.user.impresario.file".into()));
        assert_eq!(local(b"user."), Err(Errno::INVAL));
        assert_eq!(local(b"security.capability"), Ok("user.impresario.x.security.capability".into()));
        assert_eq!(local(b"system.posix_acl_default"), Ok("user.impresario.x.system.posix_acl_default".into()));
        assert_eq!(local(b"security."), Err(Errno::INVAL));
        for other in [&b"trusted.x"[..], b"system.posix_acl", b"system.posix_acl_access2", b"system.nfs4_acl"] {
            assert_eq!(local(other), Err(Errno::OPNOTSUPP));
        }
        assert_eq!(local(b""), Err(Errno::OPNOTSUPP));
        let longest = [b"user.".to_vec(), vec![b'x'; NAME_MAX_BYTES - 5]].concat();
        assert_eq!(local(&longest).unwrap().len(), 255);
        assert_eq!(local(&[&longest[..], b"x"].concat()), Err(Errno::RANGE));
    }
}
