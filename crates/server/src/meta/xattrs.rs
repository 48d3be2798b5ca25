//! Extended attributes of users: how they are kept beside the server's own.
//!
//! Each is an attribute of the local node, with a prefix before its name, so that none can hide or change a record. It is
//! set and removed with one system call, moves with its node and goes with it. `Fsync` and `FsyncDir` make it durable.
//!
//! ext4 has one block for all attributes of a node, and takes at most [`XATTR_EACH_BYTES`] for each besides its name and
//! value. [`XATTRS_MAX_BYTES`] leaves room for a record there, and holds on every local file system.

use std::os::fd::{AsFd, BorrowedFd};

use impresario_wire::message::{NodeKind, Target, XATTR_EACH_BYTES, XATTRS_MAX_BYTES, XattrMode};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::disk::PATH_FLAGS;
use super::fault::{Explain, Outcome, fault, show};
use super::opens::Session;
use super::service::Meta;
use super::tree::kind_of;

/// Before each name on the local node.
const PREFIX: &[u8] = b"user.impresario.x.";
/// The one name space that is kept.
const NAME_SPACE: &[u8] = b"user.";
/// Longest name: the local file system takes 255 bytes.
const NAME_MAX_BYTES: usize = 255 - PREFIX.len();

impl Meta {
    /// The value of an attribute.
    pub(super) fn get_xattr(&self, session: &Session, target: &Target, name: &[u8]) -> Outcome<Vec<u8>> {
        self.at_node(session, target, "read an extended attribute of", |node| {
            let name = local_name(name)?;
            if !may_have(node)? {
                return Err(Errno::NODATA);
            }
            let mut value = vec![0; XATTRS_MAX_BYTES];
            let len = self.dir.disk.attribute(node, name.as_slice(), &mut value)?;
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

    /// Sets an attribute; `None` removes it.
    pub(super) fn set_xattr(
        &self,
        session: &Session,
        target: &Target,
        name: &[u8],
        value: Option<&[u8]>,
        mode: XattrMode,
    ) -> Outcome<()> {
        let doing = if value.is_some() { "set an extended attribute of" } else { "remove an extended attribute of" };
        self.at_node(session, target, doing, |node| {
            let local = local_name(name)?;
            if !may_have(node)? {
                return Err(Errno::PERM);
            }
            let Some(value) = value else { return self.dir.disk.remove_xattr(node, &local) };
            // The room that there is does not change meanwhile.
            let _alone = self.xattrs.lock();
            let (mut taken, mut room) = (XATTR_EACH_BYTES + name.len() + value.len(), [0; XATTRS_MAX_BYTES]);
            for other in self.xattrs_of(node)?.into_iter().filter(|other| other != name) {
                let len = self.dir.disk.attribute(node, local_name(&other)?.as_slice(), &mut room)?;
                taken += XATTR_EACH_BYTES + other.len() + len;
            }
            if taken > XATTRS_MAX_BYTES {
                return Err(Errno::NOSPC);
            }
            let flags = match mode {
                XattrMode::Any => XattrFlags::empty(),
                XattrMode::Create => XattrFlags::CREATE,
                XattrMode::Replace => XattrFlags::REPLACE,
            };
            self.dir.disk.set_xattr(node, &local, value, flags)
        })
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

/// Linux has attributes of users on files and directories only.
fn may_have(node: impl AsFd) -> rustix::io::Result<bool> {
    Ok(matches!(kind_of(&rustix::fs::fstat(node)?), Some(NodeKind::File | NodeKind::Dir)))
}

/// The name on the local node.
fn local_name(name: &[u8]) -> rustix::io::Result<Vec<u8>> {
    match name.strip_prefix(NAME_SPACE) {
        None => Err(Errno::OPNOTSUPP),
        Some([]) => Err(Errno::INVAL),
        Some(_) if name.len() > NAME_MAX_BYTES => Err(Errno::RANGE),
        Some(_) => Ok([PREFIX, name].concat()),
    }
}

fn refuse<T>(errno: Errno, doing: &str, path: &[u8]) -> Outcome<T> {
    let why = match errno {
        Errno::OPNOTSUPP => "only attributes whose names begin with `user.` are kept".to_string(),
        Errno::RANGE => format!("its name is longer than {NAME_MAX_BYTES} bytes"),
        Errno::PERM => "only files and directories have attributes of users".to_string(),
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
        assert_eq!(local(b"security.capability"), Err(Errno::OPNOTSUPP));
        assert_eq!(local(b""), Err(Errno::OPNOTSUPP));
        let longest = [b"user.".to_vec(), vec![b'x'; NAME_MAX_BYTES - 5]].concat();
        assert_eq!(local(&longest).unwrap().len(), 255);
        assert_eq!(local(&[&longest[..], b"x"].concat()), Err(Errno::RANGE));
    }
}
