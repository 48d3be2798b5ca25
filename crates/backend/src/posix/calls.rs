//! The calls of the contract on a folder: names here, attributes in [`super::metadata`], bytes in [`super::data`].

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use impresario_base::machine::path_of;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, RenameFlags, SeekFrom, StatxFlags};

use super::metadata::attr_of;
use super::{NAMING, Node, PosixTree, Shared};
use crate::losses::is_loss;
use crate::nodes::Use;
use crate::rules::{bears, checked, make_or_find, proper, wanted};
use crate::{
    Attr, Backend, Caller, DirEntry, Errno, Found, Handle, Kind, Lost, Make, Placement, Result, SetAttr, Space,
    SpaceChange,
};

/// Bytes of names that one system call lists.
const LISTING_BYTES: usize = 64 * 1024;

/// A node's attributes, unless its last name is gone and nothing holds it.
fn unless_gone(node: &Node, attr: Attr) -> Result<Attr> {
    let is_gone = attr.links == 0 && node.holds.load(Ordering::Acquire) == 0;
    if is_gone { Err(Errno(libc::ESTALE)) } else { Ok(attr) }
}

impl Shared {
    fn directory(&self, handle: &Handle) -> Result<Arc<Node>> {
        let node = self.node(handle)?;
        if node.kind == Kind::Directory { Ok(node) } else { Err(Errno(libc::ENOTDIR)) }
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        checked(name)?;
        let at = self.directory(dir)?;
        if name == b"." || name == b".." {
            return self.lookup_dots(caller, &at, name);
        }
        let fd = {
            let _acting = self.identity.act_as(caller)?;
            self.open_name(&at, name)?
        };
        let (node, attr) = self.enter(dir, name, fd)?;
        Ok((node.handle, attr))
    }

    fn lookup_dots(&self, caller: &Caller, at: &Node, name: &[u8]) -> Result<Found> {
        let up = name == b".." && at.handle != self.root;
        let fd = {
            let _acting = self.identity.act_as(caller)?;
            rustix::fs::openat(&at.fd, if up { ".." } else { "." }, NAMING | OFlags::DIRECTORY, Mode::empty())?
        };
        if up && !self.is_inside(fd.as_fd())? {
            return Err(Errno(libc::ESTALE));
        }
        let seen = self.see(fd.as_fd())?;
        let handle = if !up { at.handle } else { self.handle_of(fd.as_fd(), seen.born) };
        Ok((self.nodes.insert(handle, fd, seen.attr.fileid, seen.attr.kind).handle, seen.attr))
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        proper(name, libc::EEXIST)?;
        let at = self.directory(dir)?;
        let set = wanted(what, set);
        let make = || self.finish(caller, &at, name, self.make_new(caller, &at, name, what, set.mode)?, &set);
        make_or_find(what, make, || self.lookup(caller, dir, name), |(_, attr)| Ok(bears(attr, what)))
    }

    /// Makes a node that must not exist. Gives a new file's descriptor.
    fn make_new(
        &self,
        caller: &Caller,
        dir: &Node,
        name: &[u8],
        what: Make<'_>,
        mode: Option<u32>,
    ) -> Result<Option<OwnedFd>> {
        let name = OsStr::from_bytes(name);
        let default = if what == Make::Directory { 0o755 } else { 0o644 };
        let mode = Mode::from_raw_mode(mode.unwrap_or(default) & 0o7777);
        let _acting = self.identity.act_as(caller)?;
        let node = |kind, device| rustix::fs::mknodat(&dir.fd, name, kind, mode, device);
        match what {
            Make::File | Make::FileIfNone | Make::FileOnce(_) => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                return Ok(Some(rustix::fs::openat(&dir.fd, name, flags, mode)?));
            }
            Make::Directory => rustix::fs::mkdirat(&dir.fd, name, mode)?,
            Make::Symlink([]) => return Err(Errno(libc::ENOENT)),
            Make::Symlink(text) => rustix::fs::symlinkat(text, &dir.fd, name)?,
            Make::Fifo => node(FileType::Fifo, 0)?,
            Make::Socket => node(FileType::Socket, 0)?,
            Make::Block(major, minor) => node(FileType::BlockDevice, rustix::fs::makedev(major, minor))?,
            Make::Character(major, minor) => node(FileType::CharacterDevice, rustix::fs::makedev(major, minor))?,
        }
        Ok(None)
    }

    /// Gives a new node the attributes that its making did not, or removes it again.
    fn finish(
        &self,
        caller: &Caller,
        dir: &Node,
        name: &[u8],
        opened: Option<OwnedFd>,
        set: &SetAttr,
    ) -> Result<Found> {
        let fd = match &opened {
            Some(file) => rustix::fs::open(path_of(file), NAMING - OFlags::NOFOLLOW, Mode::empty())?,
            None => {
                let _acting = self.identity.act_as(caller)?;
                self.open_name(dir, name)?
            }
        };
        let (node, attr) = self.enter(&dir.handle, name, fd)?;
        if let Some(file) = opened {
            self.add_open(&node, file, self.callers.number(caller), (true, true), 0);
        }
        let (uid, gid) = (set.uid.filter(|uid| *uid != attr.uid), set.gid.filter(|gid| *gid != attr.gid));
        let mode = set.mode.map(|mode| mode & 0o7777).filter(|_| attr.kind != Kind::Symlink);
        // Where the folder has no default list of rights. The process's own mask is none of the caller's.
        let is_masked = |mode: &u32| attr.mode & 0o777 == mode & !self.umask & 0o777;
        let masked = mode.filter(is_masked).map_or(0, |mode| mode & self.umask & 0o777 & !attr.mode);
        let lacking = SetAttr {
            // Making a directory gives no set-group-id but its folder's, and a change of the owner takes it.
            mode: mode.filter(|mode| {
                let taken = (uid.is_some() || gid.is_some()) && mode & 0o6000 != 0;
                taken || is_masked(mode) && mode & !attr.mode & 0o7000 != 0
            }),
            takes: 0,
            uid,
            gid,
            size_bytes: set.size_bytes.filter(|size| *size != 0 && attr.kind == Kind::File),
            ..set.clone()
        };
        if masked == 0 && lacking == SetAttr::default() {
            return Ok((node.handle, attr));
        }
        let finished = self.unmask(caller, &node, &attr, masked).and_then(|()| self.change(caller, &node, &lacking));
        if let Err(error) = finished {
            let flags = if attr.kind == Kind::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            // As the caller: the name may be another's by now. The first error is told.
            let removed = self
                .identity
                .act_as(caller)
                .map(|_acting| rustix::fs::unlinkat(&dir.fd, OsStr::from_bytes(name), flags).is_ok());
            if removed == Ok(true) {
                self.nodes.set_gone(node.fileid);
            }
            return Err(error);
        }
        Ok((node.handle, self.see(node.fd.as_fd())?.attr))
    }

    /// Gives a new node the rights that the process's mask took from it.
    fn unmask(&self, caller: &Caller, node: &Node, attr: &Attr, masked: u32) -> Result<()> {
        if masked == 0 {
            return Ok(());
        }
        // Somebody may have put another node under the name meanwhile: the caller must have the right to change it. The
        // server does it only for a directory of the caller's own, of which the caller would lose an inherited set-group-id.
        let is_members = caller.gid == attr.gid || caller.groups.contains(&attr.gid);
        let loses_set_group_id = attr.mode & libc::S_ISGID != 0 && !is_members;
        let is_own_directory = attr.kind == Kind::Directory && attr.uid == caller.uid;
        let by_server = is_own_directory && loses_set_group_id && self.identity.sets_modes();
        let mode = Mode::from_raw_mode(attr.mode & 0o7777 | masked);
        let set = || rustix::fs::chmodat(CWD, path_of(&node.fd), mode, AtFlags::empty());
        // A server below may not take this one for root.
        if by_server {
            match set() {
                Err(rustix::io::Errno::PERM) => {}
                set => return Ok(set?),
            }
        }
        let _acting = self.identity.act_as(caller)?;
        Ok(set()?)
    }

    /// The number of a node that is about to lose its last name.
    fn last_name(&self, dir: &Node, name: &OsStr) -> Option<u64> {
        let stat = rustix::fs::statat(&dir.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
        (directory || stat.st_nlink == 1).then_some(stat.st_ino)
    }

    fn unlink(&self, caller: &Caller, dir: &Handle, name: &[u8], flags: AtFlags) -> Result<()> {
        let name = proper(name, libc::EINVAL)?;
        let dir = self.directory(dir)?;
        let _acting = self.identity.act_as(caller)?;
        let last = self.last_name(&dir, name);
        rustix::fs::unlinkat(&dir.fd, name, flags)?;
        drop(_acting);
        if let Some(fileid) = last {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8]), flags: RenameFlags) -> Result<()> {
        let (old, new) = (proper(from.1, libc::EINVAL)?, proper(to.1, libc::EINVAL)?);
        let (from_dir, to_dir) = (self.directory(from.0)?, self.directory(to.0)?);
        let acting = self.identity.act_as(caller)?;
        let is_exchange = flags.contains(RenameFlags::EXCHANGE);
        let last = if is_exchange { None } else { self.last_name(&to_dir, new) };
        if flags.is_empty() {
            rustix::fs::renameat(&from_dir.fd, old, &to_dir.fd, new)?;
        } else {
            rustix::fs::renameat_with(&from_dir.fd, old, &to_dir.fd, new, flags)?;
        }
        let moved = |dir: &Node, name| self.key.is_none().then(|| self.open_name(dir, name).ok()).flatten();
        let (there, here) = (moved(&to_dir, to.1), if is_exchange { moved(&from_dir, from.1) } else { None });
        drop(acting);
        // The table learns the new names.
        for (at, fd) in [(to, there), (from, here)] {
            let _ = fd.map(|fd| self.enter(at.0, at.1, fd));
        }
        let replaced = last.filter(|fileid| {
            // Two names of one node may have been given: then nothing happened.
            let now = rustix::fs::statat(&to_dir.fd, new, AtFlags::SYMLINK_NOFOLLOW);
            now.map_or(true, |stat| stat.st_ino != *fileid)
        });
        if let Some(fileid) = replaced {
            self.nodes.set_gone(fileid);
        }
        Ok(())
    }

    fn list(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        let node = self.directory(dir)?;
        let open = self.open_for(caller, &node, Use::List)?;
        let mut position = open.position.lock();
        // Room for one entry at least, whatever its name.
        let mut buffer = vec![MaybeUninit::uninit(); most.saturating_mul(64).clamp(4096, LISTING_BYTES)];
        let mut entries = Vec::new();
        // Unknown, should a call below fail.
        let at = std::mem::replace(&mut *position, u64::MAX);
        // A new listing starts over: what the kernel keeps of the directory may be old.
        if at != cookie || cookie == 0 {
            rustix::fs::seek(&open.fd, SeekFrom::Start(cookie))?;
        }
        let mut listing = RawDir::new(&open.fd, &mut buffer);
        while entries.len() < most {
            let Some(entry) = listing.next() else { return Ok((entries, true)) };
            let entry = entry?;
            let name = entry.file_name().to_bytes().to_vec();
            let up = name == b".." && node.handle == self.root;
            let fileid = if up { self.root_id } else { entry.ino() };
            entries.push(DirEntry { name, fileid, cookie: entry.next_entry_cookie() });
        }
        // More was read from the kernel than is told here: the next call starts where this one ends.
        if let Some(last) = entries.last() {
            rustix::fs::seek(&open.fd, SeekFrom::Start(last.cookie))?;
            *position = last.cookie;
        }
        Ok((entries, false))
    }
}

impl Backend for PosixTree {
    fn root(&self) -> Result<Handle> {
        Ok(self.shared.root)
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        self.shared.lookup(caller, dir, name)
    }

    fn attr(&self, node: &Handle) -> Result<Attr> {
        let node = self.shared.node(node)?;
        unless_gone(&node, self.shared.see(node.fd.as_fd())?.attr)
    }

    fn known_attr(&self, node: &Handle) -> Option<Attr> {
        let node = self.shared.known(node)?.ok()?;
        let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&node.fd, "", how, StatxFlags::BASIC_STATS).ok()?;
        unless_gone(&node, attr_of(&stat, self.shared.fsid).ok()?).ok()
    }

    fn set_attr(&self, caller: &Caller, node: &Handle, set: &SetAttr) -> Result<Attr> {
        let node = self.shared.node(node)?;
        self.shared.change(caller, &node, set)?;
        Ok(self.shared.see(node.fd.as_fd())?.attr)
    }

    fn access(&self, caller: &Caller, node: &Handle, wanted: u32) -> Result<u32> {
        let node = self.shared.node(node)?;
        self.shared.rights(caller, &node, wanted)
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        self.shared.make(caller, dir, name, what, set)
    }

    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr> {
        let name = proper(name, libc::EEXIST)?;
        let shared = &self.shared;
        let (node, dir) = (shared.node(node)?, shared.directory(dir)?);
        {
            let _acting = shared.identity.act_as(caller)?;
            rustix::fs::linkat(CWD, path_of(&node.fd), &dir.fd, name, AtFlags::SYMLINK_FOLLOW)?;
        }
        Ok(shared.see(node.fd.as_fd())?.attr)
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.unlink(caller, dir, name, AtFlags::empty())
    }

    fn remove_dir(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        self.shared.unlink(caller, dir, name, AtFlags::REMOVEDIR)
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        self.shared.rename(caller, from, to, RenameFlags::empty())
    }

    fn rename_new(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        self.shared.rename(caller, from, to, RenameFlags::NOREPLACE)
    }

    fn exchange(&self, caller: &Caller, one: (&Handle, &[u8]), other: (&Handle, &[u8])) -> Result<()> {
        self.shared.rename(caller, one, other, RenameFlags::EXCHANGE)
    }

    fn read_link(&self, _caller: &Caller, node: &Handle) -> Result<Vec<u8>> {
        let node = self.shared.node(node)?;
        if node.kind != Kind::Symlink {
            return Err(Errno(libc::EINVAL));
        }
        Ok(rustix::fs::readlinkat(&node.fd, "", Vec::new())?.into_bytes())
    }

    fn read_dir(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        self.shared.list(caller, dir, cookie, most)
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Result<usize> {
        let node = self.shared.node(file)?;
        self.shared.read(caller, &node, offset, into)
    }

    fn read_cached(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Option<Result<usize>> {
        let node = self.shared.known(file)?.ok()?;
        self.shared.read_cached(caller, &node, offset, into)
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
        // All at once, and what descriptors that were closed have written. Kernels before 5.17 may tell of no failure here: there
        // each descriptor was synced before it was closed.
        match self.shared.sync_file_system() {
            Err(error) if !is_loss(error) => return Err(error),
            // It is noted.
            Ok(()) | Err(_) => {}
        }
        self.shared.nodes.sync_all()
    }

    fn hold(&self, node: &Handle) -> Result<()> {
        let node = self.shared.node(node)?;
        self.shared.nodes.hold(&node);
        Ok(())
    }

    fn release(&self, node: &Handle) {
        self.shared.nodes.release(node);
    }

    fn space(&self, node: &Handle) -> Result<Space> {
        let node = self.shared.node(node)?;
        let fs = rustix::fs::fstatvfs(&node.fd)?;
        // SAFETY: fpathconf takes a descriptor that is open and a number.
        let links_max = unsafe { libc::fpathconf(std::os::fd::AsRawFd::as_raw_fd(&node.fd), libc::_PC_LINK_MAX) };
        let bytes = |blocks: u64| blocks.saturating_mul(fs.f_frsize);
        Ok(Space {
            total_bytes: bytes(fs.f_blocks),
            free_bytes: bytes(fs.f_bfree),
            available_bytes: bytes(fs.f_bavail),
            total_files: fs.f_files,
            free_files: fs.f_ffree,
            name_max_bytes: u32::try_from(fs.f_namemax).unwrap_or(u32::MAX),
            links_max: u32::try_from(links_max).unwrap_or(1),
        })
    }

    fn placement(&self, file: &Handle) -> Result<Placement> {
        let node = self.shared.node(file)?;
        if node.kind != Kind::File {
            return Err(Errno(libc::EINVAL));
        }
        let told = self.shared.placements.ask(&path_of(&node.fd));
        let configured = || self.shared.options.striping.map(Placement::striped);
        Ok(told.or_else(configured).unwrap_or_else(|| Placement::one(0)))
    }

    fn will_read(&self, file: &Handle, offset: u64, len_bytes: u64) {
        // A hint: a file that is gone is missed by the read that comes.
        if let Ok(node) = self.shared.node(file) {
            self.shared.will_read(&node, offset..offset.saturating_add(len_bytes));
        }
    }

    fn has_page_cache(&self) -> bool {
        !self.shared.in_memory && self.shared.paging.is_kept()
    }

    fn is_in_memory(&self, caller: &Caller, file: &Handle, at: u64) -> bool {
        let node = self.shared.known(file).and_then(Result::ok);
        node.is_some_and(|node| self.shared.is_in_memory(caller, &node, at))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

    use super::super::Options;
    use super::*;

    /// Another node may be put under a new name before the server finishes what it made there.
    #[test]
    fn what_others_put_under_a_new_name_stays_as_it_is() {
        if !impresario_testing::require("root") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        // Everybody makes names here, and removes only their own.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        let shared = Shared { umask: 0o022, ..Shared::open(folder.path(), Options::default()).unwrap() };
        let caller = Caller { uid: 7001, gid: 7001, groups: Vec::new() };
        let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
        let (at, path) = (shared.directory(&shared.root).unwrap(), folder.path().join("new"));
        for what in [Make::Directory, Make::Fifo, Make::Socket] {
            for (is_directory, uid, mode) in
                [(true, 7002, 0o755), (true, 7002, 0o2755), (false, 7002, 0o755), (false, 0, 0o4755)]
            {
                assert!(shared.make_new(&caller, &at, b"new", what, set.mode).unwrap().is_none());
                let mine = folder.path().join("mine");
                std::fs::rename(&path, &mine).unwrap();
                if is_directory { std::fs::create_dir(&path) } else { std::fs::write(&path, "bytes") }.unwrap();
                chown(&path, Some(uid), Some(7003)).unwrap();
                std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
                let refused = shared.finish(&caller, &at, b"new", None, &set).err();
                assert_eq!(refused, Some(Errno(libc::EPERM)), "{what:?} {mode:o}");
                assert_eq!(std::fs::symlink_metadata(&path).unwrap().mode() & 0o7777, mode, "{what:?}");
                for path in [&path, &mine] {
                    std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path)).unwrap();
                }
            }
        }
    }
}
