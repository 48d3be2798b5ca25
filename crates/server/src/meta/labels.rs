//! Access control lists and attributes `security.*`: how a list goes together with permission bits, what new nodes inherit,
//! and which nodes may have some.
//!
//! A list is kept beside the local node as a client's kernel gave it, where it says more than permission bits do. What bits
//! and list both say is read from the bits alone, so a change of them needs no change of the list.
//!
//! Most clusters have none of these attributes, and must not pay for them. The file `labels` says that there may be some: it is
//! made before the first one. Without it no node is looked at for them, and clients are told with each node's attributes that
//! they need not ask.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use impresario_node::acl::Acl;
use impresario_wire::message::{ACL_ACCESS, ACL_DEFAULT, Answer, Attr, Entry, NodeKind, masked_mode};
use rustix::fs::{AtFlags, Mode, Stat, XattrFlags};
use rustix::io::{Errno, Result};

use super::directory::MetaDirectory;
use super::disk::PATH_FLAGS;
use super::opens::Session;
use super::service::Meta;
use super::tree::kind_of;
use super::xattrs::{PREFIX, local_name};

/// Says that there are, or were, such attributes.
const FILE: &str = "labels";
/// With which the names of attributes begin that say what security modules and capabilities a file has.
pub(super) const SECURITY: &[u8] = b"security.";
/// What a file may do that root may; it goes when the file changes.
const CAPABILITY: &[u8] = b"security.capability";

/// Whether there are such attributes.
pub(super) struct Labels(AtomicBool);

impl Labels {
    pub(super) fn open(directory: &MetaDirectory) -> Result<Labels> {
        match rustix::fs::statat(&directory.top, FILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(Labels(AtomicBool::new(true))),
            Err(Errno::NOENT) => Ok(Labels(AtomicBool::new(false))),
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn are_any(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// To be called before one is set, by one caller at a time.
    pub(super) fn begin(&self, directory: &MetaDirectory) -> Result<()> {
        if !self.are_any() {
            directory.disk.write_durably(&directory.top, FILE, "1\n")?;
            self.0.store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// Whether the name is that of an access control list.
pub(super) fn is_acl(name: &[u8]) -> bool {
    name == ACL_ACCESS || name == ACL_DEFAULT
}

/// What a new node gets.
pub(super) struct Inherited {
    /// Its permission bits.
    pub(super) mode: u32,
    /// Its list, where it says more than they do.
    access: Option<Acl>,
    /// Of a directory, that of what will be made in it.
    default: Option<Acl>,
}

impl Meta {
    /// A list of a node, which may be open with `O_PATH` only: `None` where it has none that says more than permission bits.
    pub(super) fn acl_of(&self, node: impl AsFd, name: &[u8]) -> Result<Option<Acl>> {
        if !self.labels.are_any() {
            return Ok(None);
        }
        let mut value = [0; impresario_wire::message::XATTRS_MAX_BYTES];
        let len = match self.dir.disk.attribute(&node, local_name(name)?.as_slice(), &mut value) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            other => other?,
        };
        // What is no list was not written here.
        let acl = Acl::decode(value.get(..len).unwrap_or_default()).map_err(|_| Errno::IO)?;
        if name != ACL_ACCESS {
            return Ok(acl);
        }
        let mode = rustix::fs::fstat(node)?.st_mode;
        Ok(acl.map(|acl| acl.with_mode(mode)))
    }

    /// Sets or removes a list, and the permission bits that a list says. Call while `xattrs` and then `modes` are held.
    pub(super) fn set_acl(&self, node: impl AsFd, name: &[u8], acl: Option<&Acl>) -> Result<()> {
        let (disk, node) = (&self.dir.disk, node.as_fd());
        let stored = acl.filter(|acl| name == ACL_DEFAULT || !acl.is_mode());
        let change = || match stored {
            Some(acl) => {
                self.labels.begin(&self.dir)?;
                disk.set_xattr(node, &local_name(name)?, &acl.encode(), XattrFlags::empty())
            }
            None => match disk.remove_xattr(node, &local_name(name)?) {
                Err(Errno::NODATA) => Ok(()),
                other => other,
            },
        };
        let Some(acl) = acl.filter(|_| name == ACL_ACCESS) else { return change() };
        let old = rustix::fs::fstat(node)?.st_mode & 0o7777;
        let new = old & !0o777 | acl.mode();
        // In between, and after a crash there, nobody may do what neither the old list nor the new one allows.
        let between = old & (new | !0o777);
        if between != old {
            disk.set_mode(node, between)?;
        }
        change().inspect_err(|_| {
            if between != old {
                let _ = disk.set_mode(node, old);
            }
        })?;
        if new != between { disk.set_mode(node, new) } else { Ok(()) }
    }

    /// What a node that is made in a directory gets; `mode` with what the umask takes off it.
    pub(super) fn inherited(&self, directory: impl AsFd, kind: NodeKind, mode: u32) -> Result<Inherited> {
        let Some(default) = self.acl_of(directory, ACL_DEFAULT)? else {
            return Ok(Inherited { mode: masked_mode(mode), access: None, default: None });
        };
        let access = default.clone().inherited(mode);
        let bits = mode & 0o7000 | access.mode();
        if !may_have_acl(kind) {
            // Its group's bits must not become those of all whom the list names.
            let group = access.group_rights() & bits >> 3;
            return Ok(Inherited { mode: bits & !0o070 | group << 3, access: None, default: None });
        }
        let default = (kind == NodeKind::Dir).then_some(default);
        Ok(Inherited { mode: bits, access: Some(access).filter(|acl| !acl.is_mode()), default })
    }

    /// Gives a new node its lists; its permission bits are those of [`Inherited`].
    pub(super) fn set_inherited(&self, node: impl AsFd, inherited: &Inherited) -> Result<()> {
        let lists = [(ACL_ACCESS, &inherited.access), (ACL_DEFAULT, &inherited.default)];
        lists.into_iter().try_for_each(|(name, acl)| match acl {
            Some(acl) => self.dir.disk.set_xattr(&node, &local_name(name)?, &acl.encode(), XattrFlags::empty()),
            None => Ok(()),
        })
    }

    /// Takes a file's capabilities away: it has changed, or its owner has.
    pub(super) fn drop_capability(&self, node: impl AsFd) -> Result<()> {
        if !self.labels.are_any() {
            return Ok(());
        }
        match self.dir.disk.remove_xattr(node, &local_name(CAPABILITY)?) {
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
            other => other,
        }
    }

    /// Says of the nodes in an answer whether they may have lists or labels; `path` is what the call was about, or its new name.
    pub(super) fn label(&self, session: &Session, path: Option<&[u8]>, handle: Option<u64>, answer: &mut Answer) {
        if !self.labels.are_any() {
            return;
        }
        match answer {
            Answer::Attr(attr) | Answer::Cut { attr, .. } => {
                attr.labelled = self.is_labelled(session, path, handle, attr)
            }
            Answer::Opened(opened) => {
                opened.attr.labelled = self.is_labelled(session, None, Some(opened.handle), &opened.attr);
            }
            Answer::Entries(entries) => {
                let directory = path.and_then(|path| self.dir.walk(path, PATH_FLAGS).ok());
                for Entry { name, attr } in entries {
                    let open = |directory| rustix::fs::openat(directory, name.as_slice(), PATH_FLAGS, Mode::empty());
                    let node = directory.as_ref().and_then(|directory| open(directory).ok());
                    attr.labelled = node.is_none_or(|node| self.has_labels(node, attr));
                }
            }
            _ => {}
        }
    }

    fn is_labelled(&self, session: &Session, path: Option<&[u8]>, handle: Option<u64>, attr: &Attr) -> bool {
        match (path, handle) {
            (Some(path), _) => self.dir.walk(path, PATH_FLAGS).map_or(true, |node| self.has_labels(node, attr)),
            (None, Some(handle)) => self.pin_handle(session, handle).map_or(true, |pin| self.has_labels(&pin.fd, attr)),
            (None, None) => true,
        }
    }

    /// Whether a node has any. True also when it is not the one with these attributes, or cannot be looked at.
    fn has_labels(&self, node: impl AsFd, attr: &Attr) -> bool {
        let is_same = |stat: Stat| stat.st_ino == attr.ino;
        let are_some = || {
            let names = self.dir.disk.attributes(&node)?;
            let mut theirs = names.split(|byte| *byte == 0).filter_map(|name| name.strip_prefix(PREFIX));
            Ok::<bool, Errno>(theirs.any(|name| is_acl(name) || name.starts_with(SECURITY)))
        };
        let looked = rustix::fs::fstat(&node);
        !looked.is_ok_and(is_same) || may_have_acl(attr.kind) && are_some().unwrap_or(true)
    }
}

/// The local file system has attributes of files and directories only.
pub(super) fn may_have_acl(kind: NodeKind) -> bool {
    matches!(kind, NodeKind::File | NodeKind::Dir)
}

/// The same of an open node.
pub(super) fn may_have(node: impl AsFd) -> Result<bool> {
    Ok(kind_of(&rustix::fs::fstat(node)?).is_some_and(may_have_acl))
}
