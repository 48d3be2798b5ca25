//! The calls of the contract on a volume: names and attributes here, bytes in [`super::data`].

use std::sync::Arc;
use std::time::SystemTime;

use super::volume::Object;
use super::{GlusterVolume, Node, Shared, api, stale};
use crate::nodes::Use;
use crate::rules::{
    change_mode, check_removal, check_replacement, checked, goes_with_a_name, lacking, make_or_find, new_node, proper,
    seconds_of, space_of,
};
use crate::{
    Attr, Backend, Caller, DirEntry, Errno, Found, Handle, Kind, Lost, Make, Placement, Result, SetAttr, SetTime,
    Space, SpaceChange,
};

/// The way from the root to a directory, as its brick tells it.
const ANCESTRY: &std::ffi::CStr = c"glusterfs.ancestry.path";
/// The verifier of an exclusive create. Times cannot keep it: those of a file in shards only ever grow.
const ONCE: &std::ffi::CStr = c"trusted.impresario.once";
/// Hard links that a volume allows unless it is told otherwise (`storage.max-hardlinks`).
const LINKS_MAX: u32 = 100;

impl Shared {
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        checked(name)?;
        let at = self.directory(dir)?;
        if name == b"." || name == b".." {
            return self.lookup_dots(caller, &at, name);
        }
        let (object, stat) = self.below(&at, at.fd.object.lookup(caller, name))?;
        let (node, attr) = self.enter(object, &stat)?;
        Ok((node.handle, attr))
    }

    /// What was found in a directory. Nothing is found in one that is gone.
    fn below<T>(&self, dir: &Node, found: Result<T>) -> Result<T> {
        match found {
            Err(Errno(libc::ENOENT)) if self.see(dir) == Err(Errno(libc::ESTALE)) => Err(Errno(libc::ESTALE)),
            found => found,
        }
    }

    fn lookup_dots(&self, caller: &Caller, at: &Arc<Node>, name: &[u8]) -> Result<Found> {
        at.fd.object.access(caller, libc::X_OK).map_err(stale)?;
        if name == b"." || at.handle == self.root {
            return Ok((at.handle, self.see(at)?));
        }
        let (object, stat) = self.above(&at.fd.object)?;
        let (node, attr) = self.enter(object, &stat)?;
        Ok((node.handle, attr))
    }

    /// The directory that a directory is in.
    fn above(&self, dir: &Object) -> Result<(Object, libc::stat)> {
        let way = dir.attribute(ANCESTRY).map_err(stale)?;
        let names: Vec<&[u8]> =
            way.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b"\0").collect();
        let mut at = self.volume.root()?;
        let above = names.len().saturating_sub(1);
        for name in &names[..above] {
            at = at.0.lookup(self.volume.own(), name).map_err(stale)?;
        }
        Ok(at)
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        proper(name, libc::EEXIST)?;
        let at = self.directory(dir)?;
        let once = if let Make::FileOnce(verifier) = what { Some(verifier) } else { None };
        let set = match once {
            Some(_) => SetAttr { mode: Some(0o600), ..SetAttr::default() },
            None => set.clone(),
        };
        let mode = set.mode.unwrap_or(if what == Make::Directory { 0o755 } else { 0o644 }) & 0o7777;
        let new = new_node(caller, what)?;
        let make = || {
            let made = self.below(&at, at.fd.object.make(caller, name, &new, mode)).map_err(|error| match error {
                // Where the directory is there, this is what a brick says of too long a way.
                Errno(libc::ENOENT) => Errno(libc::ENAMETOOLONG),
                error => error,
            });
            let (object, stat) = made?;
            let (node, attr) = self.enter(object, &stat)?;
            if let Some(Err(error)) = once.map(|verifier| node.fd.object.set_attribute(ONCE, &verifier)) {
                // Else a repetition of the call would find a file that it did not make.
                self.unmake(&at, name, &node);
                return Err(error);
            }
            self.finish(caller, (&at, name), &node, attr, mode, &set)
        };
        let is_same = |(handle, _): &Found| {
            let found = self.node(handle)?.fd.object.attribute(ONCE);
            Ok(found.is_ok_and(|found| once.is_some_and(|once| found == once)))
        };
        make_or_find(what, make, || self.lookup(caller, dir, name), is_same)
    }

    /// Removes a node that was just made and could not be made as wanted.
    fn unmake(&self, dir: &Node, name: &[u8], node: &Node) {
        let _ = dir.fd.object.unlink(self.volume.own(), name); // the first error is told
        self.nodes.set_gone(node.fileid);
    }

    /// Gives a new node the attributes that its making did not, or removes it again.
    fn finish(
        &self,
        caller: &Caller,
        (dir, name): (&Node, &[u8]),
        node: &Node,
        attr: Attr,
        mode: u32,
        set: &SetAttr,
    ) -> Result<Found> {
        let lacking = lacking(&attr, mode, set);
        if lacking == SetAttr::default() {
            return Ok((node.handle, attr));
        }
        if let Err(error) = self.change(caller, node, &lacking) {
            self.unmake(dir, name, node);
            return Err(error);
        }
        Ok((node.handle, self.see(node)?))
    }

    /// Changes attributes as the caller. First what is most likely to be refused, last the times, which the others change.
    fn change(&self, caller: &Caller, node: &Node, set: &SetAttr) -> Result<()> {
        let object = &node.fd.object;
        // SAFETY: a structure of numbers, of which zero is one.
        let mut stat = unsafe { std::mem::MaybeUninit::<libc::stat>::zeroed().assume_init() };
        let (mut owner, mut times) = (0, 0);
        if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
            return Err(Errno(libc::EINVAL)); // chown(2) takes it for "as it is"
        }
        if let Some(uid) = set.uid {
            (stat.st_uid, owner) = (uid, owner | api::SET_UID);
        }
        if let Some(gid) = set.gid {
            (stat.st_gid, owner) = (gid, owner | api::SET_GID);
        }
        if owner != 0 {
            object.set_stat(caller, stat, owner).map_err(stale)?;
        }
        let set_mode = |mode| object.set_mode(caller, mode & 0o7777);
        change_mode(caller, set, || self.see(node), || object.take_set_id(caller), set_mode).map_err(stale)?;
        if owner != 0 || set.mode.is_some() || set.takes != 0 {
            // Who has the file open must have the rights that it gives now.
            self.nodes.close_opens(node);
        }
        if let Some(size_bytes) = set.size_bytes {
            self.truncate(caller, node, size_bytes)?;
        }
        let mut time = |set: Option<SetTime>, which: i32| {
            let time = match set? {
                SetTime::Now => SystemTime::now(),
                SetTime::To(time) => time,
            };
            times |= which;
            Some(seconds_of(time))
        };
        if let Some((secs, nanos)) = time(set.atime, api::SET_ATIME) {
            (stat.st_atime, stat.st_atime_nsec) = (secs, nanos);
        }
        if let Some((secs, nanos)) = time(set.mtime, api::SET_MTIME) {
            (stat.st_mtime, stat.st_mtime_nsec) = (secs, nanos);
        }
        if times != 0 {
            // Bricks let everyone who may write set any time; only the owner may set another than the present.
            let other = [set.atime, set.mtime].iter().any(|time| matches!(time, Some(SetTime::To(_))));
            if caller.uid != 0 && self.see(node)?.uid != caller.uid {
                if other {
                    return Err(Errno(libc::EPERM));
                }
                object.access(caller, libc::W_OK).map_err(stale)?;
            }
            object.set_stat(caller, stat, times).map_err(stale)?;
        }
        Ok(())
    }

    /// What has a name of a directory, and its number if that is its last name.
    fn named(&self, caller: &Caller, dir: &Node, name: &[u8]) -> Result<(Attr, Option<u64>)> {
        let (_, stat) = self.below(dir, dir.fd.object.lookup(caller, name))?;
        let attr = self.attr_of(&stat)?;
        let fileid = goes_with_a_name(&attr);
        Ok((attr, fileid))
    }

    fn unlink(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Result<()> {
        proper(name, libc::EINVAL)?;
        let dir = self.directory(dir)?;
        let (attr, last) = self.named(caller, &dir, name)?;
        // The library removes whatever has the name.
        check_removal(attr.kind, directory)?;
        dir.fd.object.unlink(caller, name).map_err(|error| self.sticky(caller, &dir, error))?;
        if let Some(fileid) = last {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    /// Why a name of a directory could not be removed: bricks do not say that it is because of the directory's sticky bit.
    fn sticky(&self, caller: &Caller, dir: &Node, error: Errno) -> Errno {
        let may = || dir.fd.object.access(caller, libc::W_OK).is_ok();
        let is_sticky = || self.see(dir).is_ok_and(|attr| attr.mode & 0o1000 != 0);
        if error == Errno(libc::EACCES) && is_sticky() && may() { Errno(libc::EPERM) } else { error }
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        let (from, to) = ((self.directory(from.0)?, from.1), (self.directory(to.0)?, to.1));
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
        let renamed = from.0.fd.object.rename(caller, from.1, &to.0.fd.object, to.1);
        renamed.map_err(|error| self.sticky(caller, &from.0, self.sticky(caller, &to.0, error)))?;
        if let Some(fileid) = replaced.and_then(|(_, last)| last) {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    fn list(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        let node = self.directory(dir)?;
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
                b".." => self.above(&node.fd.object).map_or(entry.fileid, |(_, stat)| stat.st_ino),
                _ => entry.fileid,
            };
            entries.push(DirEntry { name: entry.name, fileid, cookie: entry.cookie });
        }
        if let Some(last) = entries.last() {
            *position = last.cookie;
        }
        Ok((entries, false))
    }
}

impl Backend for GlusterVolume {
    fn root(&self) -> Result<Handle> {
        Ok(self.shared.root)
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        self.shared.lookup(caller, dir, name)
    }

    fn attr(&self, node: &Handle) -> Result<Attr> {
        self.shared.see(&*self.shared.node(node)?)
    }

    fn set_attr(&self, caller: &Caller, node: &Handle, set: &SetAttr) -> Result<Attr> {
        let node = self.shared.node(node)?;
        self.shared.change(caller, &node, set)?;
        self.shared.see(&node)
    }

    fn access(&self, caller: &Caller, node: &Handle, wanted: u32) -> Result<u32> {
        let node = self.shared.node(node)?;
        let mut granted = 0;
        for right in [libc::R_OK, libc::W_OK, libc::X_OK] {
            if wanted & right as u32 == 0 {
                continue;
            }
            match node.fd.object.access(caller, right).map_err(stale) {
                Ok(()) => granted |= right as u32,
                Err(Errno(libc::EACCES | libc::EPERM)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(granted)
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        self.shared.make(caller, dir, name, what, set)
    }

    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr> {
        proper(name, libc::EEXIST)?;
        let (node, dir) = (self.shared.node(node)?, self.shared.directory(dir)?);
        if node.kind == Kind::Directory {
            return Err(Errno(libc::EPERM));
        }
        self.shared.below(&dir, node.fd.object.link(caller, &dir.fd.object, name))?;
        self.shared.see(&node)
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.unlink(caller, dir, name, false)
    }

    fn remove_dir(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.unlink(caller, dir, name, true)
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        proper(from.1, libc::EINVAL)?;
        proper(to.1, libc::EINVAL)?;
        self.shared.rename(caller, from, to)
    }

    fn rename_new(&self, _caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        proper(from.1, libc::EINVAL)?;
        proper(to.1, libc::EINVAL)?;
        Err(Errno(libc::EINVAL)) // GlusterFS has no such call
    }

    fn read_link(&self, caller: &Caller, node: &Handle) -> Result<Vec<u8>> {
        let node = self.shared.node(node)?;
        if node.kind != Kind::Symlink {
            return Err(Errno(libc::EINVAL));
        }
        node.fd.object.read_link(caller).map_err(stale)
    }

    fn read_dir(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        self.shared.list(caller, dir, cookie, most)
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Result<usize> {
        let node = self.shared.node(file)?;
        self.shared.read(caller, &node, offset, into)
    }

    fn write(&self, caller: &Caller, file: &Handle, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        let node = self.shared.node(file)?;
        self.shared.write(caller, &node, offset, bytes, stable)
    }

    fn change_space(
        &self,
        caller: &Caller,
        file: &Handle,
        change: SpaceChange,
        offset: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let node = self.shared.node(file)?;
        self.shared.change_space(caller, &node, change, (offset, len_bytes))
    }

    fn seek(&self, caller: &Caller, file: &Handle, from: u64, data: bool) -> Result<Option<u64>> {
        let node = self.shared.node(file)?;
        self.shared.seek(caller, &node, from, data)
    }

    fn sync(&self, file: &Handle) -> Result<()> {
        let node = self.shared.node(file)?;
        self.shared.sync(&node)
    }

    fn sync_all(&self) -> Result<Lost> {
        self.shared.nodes.sync_all()
    }

    fn hold(&self, node: &Handle) -> Result<()> {
        let node = self.shared.nodes.hold(&self.shared.node(node)?);
        self.shared.keep(&node).inspect_err(|_| self.release(&node.handle))
    }

    fn release(&self, handle: &Handle) {
        let node = self.shared.nodes.get(handle);
        self.shared.nodes.release(handle);
        if let Some(node) = node {
            self.shared.let_go(&node);
        }
    }

    fn space(&self, node: &Handle) -> Result<Space> {
        let node = self.shared.node(node)?;
        let space = node.fd.object.space().map_err(stale)?;
        Ok(space_of(&space, LINKS_MAX))
    }

    fn placement(&self, file: &Handle) -> Result<Placement> {
        let node = self.shared.node(file)?;
        if node.kind != Kind::File {
            return Err(Errno(libc::EINVAL));
        }
        let size_bytes = self.shared.see(&node)?.size_bytes;
        self.shared.bricks.placement(&self.shared.volume, node.fd.gfid, size_bytes).map_err(stale)
    }
}
