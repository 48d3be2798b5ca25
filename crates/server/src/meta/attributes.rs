//! Changes of attributes, by path or by handle. Files go through the table, so that their sizes and times stay right;
//! all other nodes are changed directly.

use std::os::fd::{AsFd, BorrowedFd};

use impresario_base::set_id;
use impresario_wire::message::{Answer, NodeKind, SetAttr, SetTime};
use rustix::fs::Stat;
use rustix::io::Errno;

use super::changes::By;
use super::disk::PATH_FLAGS;
use super::fault::{Explain, Outcome};
use super::opens::Pin;
use super::permissions::{Asker, User};
use super::service::Meta;
use super::tree::kind_of;

impl Meta {
    /// Changes attributes of the node at a path; gives them.
    pub(super) fn set_attr_at(&self, by: By<'_>, path: &[u8], set: &SetAttr, user: Option<&User>) -> Outcome<Answer> {
        let doing = "change";
        let entry = self.entry_for(user, path, doing)?;
        let node = self.dir.open_at(entry.as_ref(), PATH_FLAGS).explain(doing, path)?;
        let stat = rustix::fs::fstat(&node).explain(doing, path)?;
        let kind = kind_of(&stat).ok_or(Errno::OPNOTSUPP).explain(doing, path)?;
        let through_table = set.size.is_some() || self.opens.mark_of(stat.st_ino).is_some();
        if kind == NodeKind::File && through_table {
            let entry = entry.ok_or(Errno::ISDIR).explain(doing, path)?;
            let pin = self.pin_at(&entry, doing)?;
            user.map_or(Ok(()), |user| self.permit_pinned(user, &pin, set, path))?;
            if set.size.is_some() {
                // It is no open, but changes what those who have it open for writing know of its length.
                self.opens.note_other_writer(pin.ino);
            }
            return self.set_attr_of(by, &pin, set, path, user.map(|user| (user, None)));
        }
        if set.size.is_some() {
            let errno = match kind {
                NodeKind::Dir => Errno::ISDIR,
                NodeKind::Symlink => Errno::LOOP,
                _ => Errno::INVAL,
            };
            return Err(errno).explain("set the length of", path);
        }
        if set.takes != 0 && kind == NodeKind::Symlink {
            return Err(Errno::INVAL).explain("take permission bits of the link", path);
        }
        if kind == NodeKind::Symlink && set.mode.is_some() {
            return Err(Errno::OPNOTSUPP).explain("set the mode of the link", path);
        }
        let asker = user.map(|user| (user, None));
        asker.map_or(Ok(()), |asker| self.permit_node(asker, &node, set, path))?;
        if kind == NodeKind::File {
            self.before_plain(&node, set).explain(doing, path)?;
        }
        self.set_plain(&node, set, path, asker)?;
        self.attr_by(path, || rustix::fs::fstat(&node), |_| self.noted_of(&node)).map(Answer::Attr)
    }

    /// Changes attributes of a pinned file; gives them.
    pub(super) fn set_attr_of(
        &self,
        by: By<'_>,
        pin: &Pin<'_>,
        set: &SetAttr,
        path: &[u8],
        asker: Option<Asker<'_>>,
    ) -> Outcome<Answer> {
        self.before_plain(&pin.fd, set).explain("change", path)?;
        let lanes = set.size.map_or(Ok(Vec::new()), |len_bytes| self.truncate(by, pin, len_bytes, path))?;
        if set.mtime.is_some() {
            self.note_before_times(pin, path)?;
        }
        self.set_plain(&pin.fd, set, path, asker)?;
        let attr = self.attr_of(pin, path)?;
        Ok(if lanes.is_empty() { Answer::Attr(attr) } else { Answer::Cut { attr, file: pin.key, lanes } })
    }

    /// A file that is cut, or given to another, has no capabilities any more. This goes first: a crash must not leave them.
    fn before_plain(&self, node: impl AsFd, set: &SetAttr) -> rustix::io::Result<()> {
        let is_other = set.size.is_some() || set.uid.is_some() || set.gid.is_some();
        if is_other { self.drop_capability(node) } else { Ok(()) }
    }

    /// Changes what the local file system stores itself, for this user if a client's own kernel is not believed.
    fn set_plain(&self, node: impl AsFd, set: &SetAttr, path: &[u8], by: Option<Asker<'_>>) -> Outcome<()> {
        let node = node.as_fd();
        let sets_owner = set.uid.is_some() || set.gid.is_some();
        // Changes of the owner, too: who has just lost a file must not give it the rights of the next one, and bits that
        // the change took must not come back.
        let _alone = (sets_owner || set.mode.is_some() || set.takes != 0).then(|| self.dir.disk.modes.lock());
        by.map_or(Ok(()), |by| self.permit_node(by, node, set, path))?;
        self.set_permitted(node, set).explain("change", path)
    }

    /// The same of a change that is permitted. The owner goes first: changing it clears set-id bits.
    fn set_permitted(&self, node: BorrowedFd<'_>, set: &SetAttr) -> rustix::io::Result<()> {
        let disk = &self.dir.disk;
        let stat = || rustix::fs::fstat(node);
        if set.uid.is_some() || set.gid.is_some() {
            let done = disk.set_owner(node, set.uid, set.gid);
            let is = |wanted: Option<u32>, there| wanted.is_none_or(|wanted| wanted == there);
            unless_so(done, || stat().map(|stat| is(set.uid, stat.st_uid) && is(set.gid, stat.st_gid)))?;
        }
        let left = match set.takes {
            0 => set.mode,
            takes => set_id::without(stat()?.st_mode, takes),
        };
        if let Some(mode) = left {
            unless_so(disk.set_mode(node, mode), || stat().map(|stat| stat.st_mode & 0o7777 == mode & 0o7777))?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let done = disk.set_times(node, set.atime, set.mtime);
            let is = |wanted: Option<SetTime>, secs, nanos| match wanted {
                None => true,
                Some(SetTime::At(time)) => (time.secs, i64::from(time.nanos)) == (secs, nanos),
                Some(SetTime::Now) => false,
            };
            let are_so = |stat: Stat| {
                is(set.atime, stat.st_atime, stat.st_atime_nsec as i64)
                    && is(set.mtime, stat.st_mtime, stat.st_mtime_nsec as i64)
            };
            unless_so(done, || stat().map(are_so))?;
        }
        Ok(())
    }
}

/// A change that fails is done if what it asks for is so already: one in whose middle the server was killed is asked for again,
/// and must not fail when it has changed something.
pub(super) fn unless_so(
    done: rustix::io::Result<()>,
    is_so: impl FnOnce() -> rustix::io::Result<bool>,
) -> rustix::io::Result<()> {
    done.or_else(|error| if is_so().unwrap_or(false) { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::disk::Disk;
    use crate::meta::tree::local_attr;

    #[test]
    fn what_fails_is_done_if_it_is_so_already() {
        let full = || Err(Errno::NOSPC);
        assert_eq!(unless_so(full(), || Ok(true)), Ok(()));
        assert_eq!(unless_so(full(), || Ok(false)), full());
        assert_eq!(unless_so(full(), || Err(Errno::IO)), full());
        assert_eq!(unless_so(Ok(()), || Ok(false)), Ok(()));
    }

    #[test]
    fn an_o_path_descriptor_is_enough_to_change_plain_attributes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "").unwrap();
        let directory = std::fs::File::open(dir.path()).unwrap();
        let disk = Disk::new(&directory, None).unwrap();
        let node = rustix::fs::openat(&directory, "f", PATH_FLAGS, rustix::fs::Mode::empty()).unwrap();
        disk.set_mode(&node, 0o4640).unwrap();
        let at = impresario_wire::message::Time { secs: 981_173_106, nanos: 5 };
        disk.set_times(&node, None, Some(impresario_wire::message::SetTime::At(at))).unwrap();
        let attr = local_attr(&rustix::fs::fstat(&node).unwrap()).unwrap();
        assert_eq!((attr.mode, attr.mtime), (0o4640, at));
    }
}
