//! The calls of the contract on a file system: names and attributes here, bytes in [`super::data`].

use std::sync::Arc;

use super::mount::Inode;
use super::{CephTree, Node, Shared, api, outward, stale};
use crate::nodes::Use;
use crate::rules::{
    bears, change_mode, check_range, check_removal, check_replacement, checked, goes_with_a_name, lacking,
    make_or_find, may_by_mode, mode_for_writer, new_node, proper, seconds_of, space_of, wanted,
};
use crate::{
    Attr, Backend, Caller, DirEntry, Errno, Found, Handle, Kind, Lost, Make, Placement, Result, SetAttr, SetTime,
    Space, SpaceChange,
};

/// Hard links that a node may have: Ceph counts them in 32 bits and sets no limit.
const LINKS_MAX: u32 = i32::MAX as u32;

/// A directory, and its node in the mount of now.
type Dir = (Arc<Node>, Arc<Inode>);

impl Shared {
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        checked(name)?;
        let at = self.directory(dir)?;
        if name == b"." || name == b".." {
            return self.lookup_dots(caller, &at, name);
        }
        if name == at.1.mount().snapshots() {
            return Err(Errno(libc::ENOENT));
        }
        let (inode, stat) = self.below(&at, at.1.lookup(caller, name))?;
        let (node, attr) = self.enter(Arc::new(inode), &stat, Some((&at.0, name)))?;
        Ok((node.handle, attr))
    }

    /// What was found in a directory. Nothing is found in one that is gone.
    fn below<T>(&self, dir: &Dir, found: Result<T>) -> Result<T> {
        match found {
            Err(Errno(libc::ENOENT)) if self.is_removed(dir) => Err(Errno(libc::ESTALE)),
            found => found,
        }
    }

    fn is_removed(&self, dir: &Dir) -> bool {
        match dir.1.stat() {
            Ok(stat) => stat.links == 0,
            Err(Errno(errno)) => errno == libc::ENOENT || errno == libc::ESTALE,
        }
    }

    fn lookup_dots(&self, caller: &Caller, at: &Dir, name: &[u8]) -> Result<Found> {
        let attr = self.see(&at.0)?;
        if !may_by_mode(caller, &attr, libc::X_OK) {
            return Err(Errno(libc::EACCES));
        }
        if name == b"." || at.0.handle == self.root {
            return Ok((at.0.handle, attr));
        }
        let (inode, stat) = at.1.lookup(at.1.mount().own(), b"..").map_err(stale)?;
        let (node, attr) = self.enter(Arc::new(inode), &stat, None)?;
        Ok((node.handle, attr))
    }

    /// A name that may be given in a directory.
    fn givable(&self, dir: &Dir, name: &[u8], dots: i32) -> Result<()> {
        proper(name, dots)?;
        if name == dir.1.mount().snapshots() { Err(Errno(libc::EPERM)) } else { Ok(()) }
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        proper(name, libc::EEXIST)?;
        let at = self.directory(dir)?;
        self.givable(&at, name, libc::EEXIST)?;
        let set = wanted(what, set);
        let mode = set.mode.unwrap_or(if what == Make::Directory { 0o755 } else { 0o644 }) & 0o7777;
        let new = new_node(caller, what)?;
        let make = || {
            let (inode, stat, open) = self.below(&at, at.1.make(caller, name, &new, mode))?;
            // Before the first byte: a file that has some keeps its striping.
            let striping = self.options.striping.filter(|_| open.is_some());
            let striped = striping.map_or(Ok(()), |striping| striping.give(&inode));
            let (node, attr) = self.enter(inode, &stat, Some((&at.0, name)))?;
            if let Err(error) = striped {
                tracing::warn!(%error, "a new file cannot be striped as the configuration says, and is removed");
                self.unmake(&at, name, &node);
                return Err(error);
            }
            // Of a file that loses set-user-id with the first write, that is for who opens it.
            if let Some(open) = open.filter(|_| mode_for_writer(caller, &attr).is_none()) {
                self.nodes.add_open(&node, open, self.callers.number(caller), (true, true), 0);
            }
            self.finish(caller, (&at, name), &node, attr, mode, &set)
        };
        make_or_find(what, make, || self.lookup(caller, dir, name), |(_, attr)| Ok(bears(attr, what)))
    }

    /// Removes a node that was just made and could not be made as wanted.
    fn unmake(&self, dir: &Dir, name: &[u8], node: &Node) {
        let _ = dir.1.unlink(dir.1.mount().own(), name, node.kind == Kind::Directory); // the first error is told
        self.nodes.set_gone(node.fileid);
    }

    /// Gives a new node the attributes that its making did not, or removes it again.
    fn finish(
        &self,
        caller: &Caller,
        (dir, name): (&Dir, &[u8]),
        node: &Node,
        attr: Attr,
        mode: u32,
        set: &SetAttr,
    ) -> Result<Found> {
        let lacking = lacking(&attr, mode, set);
        if lacking == SetAttr::default() {
            return Ok((node.handle, attr));
        }
        if let Err(error) = self.set(caller, node, &lacking) {
            self.unmake(dir, name, node);
            return Err(error);
        }
        Ok((node.handle, self.see(node)?))
    }

    /// Changes attributes as the caller. First what is most likely to be refused, last the times, which the others change.
    fn set(&self, caller: &Caller, node: &Node, set: &SetAttr) -> Result<()> {
        if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
            return Err(Errno(libc::EINVAL)); // chown(2) takes it for "as it is"
        }
        let inode = self.inode(node)?;
        let flag = |given: bool, flag: i32| if given { flag } else { 0 };
        let owner = flag(set.uid.is_some(), api::SET_UID) | flag(set.gid.is_some(), api::SET_GID);
        if owner != 0 {
            let (uid, gid) = (set.uid.unwrap_or(0), set.gid.unwrap_or(0));
            inode.set_stat(caller, owner, |stat| (stat.uid, stat.gid) = (uid, gid)).map_err(stale)?;
        }
        let set_mode = |mode| inode.set_mode(caller, mode & 0o7777);
        change_mode(caller, set, || self.see(node), || inode.take_set_id(caller), set_mode).map_err(stale)?;
        if owner != 0 || set.mode.is_some() || set.takes != 0 {
            // Who has the file open must have the rights that it gives now.
            self.nodes.close_opens(node);
        }
        if let Some(size_bytes) = set.size_bytes {
            self.truncate(caller, node, size_bytes)?;
        }
        let time = |time: Option<SetTime>, at: i32, now: i32| match time {
            None => (0, (0, 0)),
            Some(SetTime::Now) => (at | now, seconds_of(std::time::SystemTime::now())),
            Some(SetTime::To(time)) => (at, seconds_of(time)),
        };
        let (atime, accessed) = time(set.atime, api::SET_ATIME, api::SET_ATIME_NOW);
        let (mtime, modified) = time(set.mtime, api::SET_MTIME, api::SET_MTIME_NOW);
        if atime | mtime != 0 {
            let spec = |(tv_sec, tv_nsec): (i64, i64)| libc::timespec { tv_sec, tv_nsec };
            let times = |stat: &mut api::Statx| (stat.atime, stat.mtime) = (spec(accessed), spec(modified));
            inode.set_stat(caller, atime | mtime, times).map_err(stale)?;
        }
        Ok(())
    }

    /// What has a name of a directory, and its number if that is its last name.
    fn named(&self, caller: &Caller, dir: &Dir, name: &[u8]) -> Result<(Attr, Option<u64>)> {
        if name == dir.1.mount().snapshots() {
            return Err(Errno(libc::ENOENT));
        }
        let (_, stat) = self.below(dir, dir.1.lookup(caller, name))?;
        let attr = self.attr_of(&stat)?;
        let fileid = goes_with_a_name(&attr);
        Ok((attr, fileid))
    }

    fn unlink(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Result<()> {
        proper(name, libc::EINVAL)?;
        let dir = self.directory(dir)?;
        let (attr, last) = self.named(caller, &dir, name)?;
        check_removal(attr.kind, directory)?;
        dir.1.unlink(caller, name, directory)?;
        if let Some(fileid) = last {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        let ((from_dir, _), (to_dir, _)) = (self.directory(from.0)?, self.directory(to.0)?);
        let (from_at, to_at) = self.both(&from_dir, &to_dir)?;
        let (from, to) = (((from_dir, from_at), from.1), ((to_dir, to_at), to.1));
        self.givable(&to.0, to.1, libc::EINVAL)?;
        let (moved, _) = self.named(caller, &from.0, from.1)?;
        let replaced = match self.named(caller, &to.0, to.1) {
            Err(Errno(libc::ENOENT)) => None,
            named => Some(named?),
        };
        if let Some((there, _)) = &replaced {
            if there.fileid == moved.fileid {
                return Ok(()); // two names of one node, or one
            }
            check_replacement(moved.kind, there.kind)?;
        }
        from.0.1.rename(caller, from.1, &to.0.1, to.1)?;
        if let Some(fileid) = replaced.and_then(|(_, last)| last) {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr> {
        proper(name, libc::EEXIST)?;
        let (node, (dir, _)) = (self.node(node)?, self.directory(dir)?);
        let (inode, dir) = self.both(&node, &dir).map(|(inode, at)| (inode, (dir, at)))?;
        self.givable(&dir, name, libc::EEXIST)?;
        if node.kind == Kind::Directory {
            return Err(Errno(libc::EPERM));
        }
        self.below(&dir, inode.link(caller, &dir.1, name))?;
        self.see(&node)
    }

    fn list(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        let (node, inode) = self.directory(dir)?;
        let open = self.open_for(caller, &node, Use::List)?;
        let mut position = open.position.lock();
        let mut entries = Vec::new();
        // Unknown, should a call below fail.
        let at = std::mem::replace(&mut *position, u64::MAX);
        // A new listing starts over: what the library keeps of the directory may be old.
        if at != cookie || cookie == 0 {
            open.fd.seek(cookie)?;
        }
        while entries.len() < most {
            let Some(entry) = open.fd.next()? else { return Ok((entries, true)) };
            let fileid = match &entry.name[..] {
                b"." => node.fileid,
                b".." if node.handle == self.root => node.fileid,
                b".." => inode.lookup(inode.mount().own(), b"..").map_or(entry.fileid, |(_, stat)| stat.ino),
                _ => entry.fileid,
            };
            entries.push(DirEntry { name: entry.name, fileid, cookie: entry.cookie });
        }
        if let Some(last) = entries.last() {
            *position = last.cookie;
        }
        Ok((entries, false))
    }

    fn space(&self, node: &Handle) -> Result<Space> {
        let space = self.inode(&*self.node(node)?)?.space().map_err(stale)?;
        Ok(space_of(&space, LINKS_MAX))
    }
}

impl Backend for CephTree {
    fn root(&self) -> Result<Handle> {
        Ok(self.shared.root)
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        self.shared.look(|| self.shared.lookup(caller, dir, name))
    }

    fn attr(&self, node: &Handle) -> Result<Attr> {
        self.shared.look(|| self.shared.see(&*self.shared.node(node)?))
    }

    fn set_attr(&self, caller: &Caller, node: &Handle, set: &SetAttr) -> Result<Attr> {
        self.shared.change(|| {
            let node = self.shared.node(node)?;
            self.shared.set(caller, &node, set)?;
            self.shared.see(&node)
        })
    }

    fn access(&self, caller: &Caller, node: &Handle, wanted: u32) -> Result<u32> {
        let attr = self.attr(node)?;
        let granted =
            [libc::R_OK, libc::W_OK, libc::X_OK].into_iter().filter(|right| may_by_mode(caller, &attr, *right));
        Ok(granted.map(|right| right as u32).sum::<u32>() & wanted)
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        self.shared.change(|| self.shared.make(caller, dir, name, what, set))
    }

    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr> {
        self.shared.change(|| self.shared.link(caller, node, dir, name))
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.change(|| self.shared.unlink(caller, dir, name, false))
    }

    fn remove_dir(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.change(|| self.shared.unlink(caller, dir, name, true))
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        proper(from.1, libc::EINVAL)?;
        proper(to.1, libc::EINVAL)?;
        self.shared.change(|| self.shared.rename(caller, from, to))
    }

    fn rename_new(&self, _caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        proper(from.1, libc::EINVAL)?;
        proper(to.1, libc::EINVAL)?;
        Err(Errno(libc::EINVAL)) // the library has no such call
    }

    fn read_link(&self, caller: &Caller, node: &Handle) -> Result<Vec<u8>> {
        self.shared.look(|| {
            let node = self.shared.node(node)?;
            if node.kind != Kind::Symlink {
                return Err(Errno(libc::EINVAL));
            }
            self.shared.inode(&node)?.read_link(caller).map_err(stale)
        })
    }

    fn read_dir(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        self.shared.look(|| self.shared.list(caller, dir, cookie, most))
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Result<usize> {
        let node = self.shared.node_in_use(file)?;
        self.shared.read(caller, &node, offset, into)
    }

    fn write(&self, caller: &Caller, file: &Handle, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        let node = self.shared.node_in_use(file)?;
        self.shared.write(caller, &node, offset, bytes, stable).map_err(outward)
    }

    /// CephFS allocates nothing ahead, and holes are not punched here.
    fn change_space(&self, _: &Caller, file: &Handle, _: SpaceChange, offset: u64, len_bytes: u64) -> Result<()> {
        check_range(offset, len_bytes)?;
        match self.attr(file)?.kind {
            Kind::Directory => Err(Errno(libc::EISDIR)),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// The library knows of no holes.
    fn seek(&self, _: &Caller, file: &Handle, from: u64, data: bool) -> Result<Option<u64>> {
        let size_bytes = self.attr(file)?.size_bytes;
        Ok((from < size_bytes).then_some(if data { from } else { size_bytes }))
    }

    fn sync(&self, file: &Handle) -> Result<()> {
        self.shared.change(|| self.shared.sync(&*self.shared.node(file)?))
    }

    fn sync_all(&self) -> Result<Lost> {
        self.shared.change(|| self.shared.nodes.sync_all())
    }

    /// What is held is known to the library, which keeps it at the metadata servers also without a name.
    fn hold(&self, node: &Handle) -> Result<()> {
        self.shared.look(|| {
            self.shared.nodes.hold(&self.shared.node(node)?);
            Ok(())
        })
    }

    fn release(&self, handle: &Handle) {
        self.shared.nodes.release(handle);
    }

    fn space(&self, node: &Handle) -> Result<Space> {
        self.shared.look(|| self.shared.space(node))
    }

    fn placement(&self, file: &Handle) -> Result<Placement> {
        self.shared.look(|| {
            let node = self.shared.node(file)?;
            if node.kind != Kind::File {
                return Err(Errno(libc::EINVAL));
            }
            self.shared.placed(&node)
        })
    }
}
