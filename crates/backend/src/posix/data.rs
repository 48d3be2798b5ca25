//! The bytes of files: reading, writing, cutting, syncing.

use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::machine::path_of;
use impresario_base::page_cache;
use impresario_base::set_id;
use rustix::fs::{Advice, AtFlags, FallocateFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::{Errno as Number, ReadWriteFlags};

use super::metadata::{may, take_bits};
use super::{Files, Node, Open, Shared};
use crate::nodes::{Descriptors, Use};
use crate::rules::check_range;
use crate::{Caller, Errno, Kind, Result, SpaceChange};

/// Threads that wait for leases to be given up, each for another file.
const LEASE_WAITS_MAX: usize = 4;
/// So long each of them waits at most.
const LEASE_WAIT_MAX: Duration = Duration::from_secs(2);
const LEASE_LOOK_EVERY: Duration = Duration::from_millis(10);

impl Shared {
    /// A descriptor of a node for this use, opened as the caller unless there is one.
    pub(super) fn open_for(&self, caller: &Caller, node: &Node, what: Use) -> Result<Arc<Open>> {
        let number = self.callers.number(caller);
        if let Some(open) = node.open_for(number, what, self.nodes.now_ms()) {
            return Ok(open);
        }
        node.check_use(what)?;
        let checked = node.rights();
        let (fd, rights) = self.open_checked(caller, node, what)?;
        Ok(self.add_open(node, fd, number, rights, checked))
    }

    /// Adds a descriptor to a node, with these rights to read and write; see [`crate::nodes::Nodes::add_open`].
    pub(super) fn add_open(
        &self,
        node: &Node,
        fd: std::os::fd::OwnedFd,
        caller: u64,
        rights: (bool, bool),
        checked: u64,
    ) -> Arc<Open> {
        let file = self.io.open(fd, rights, node.kind == Kind::File);
        self.nodes.add_open(node, file, caller, rights, checked)
    }

    /// Opens a file of which another server has a lease, once that has given it up: it has been told to by the open that failed. A thread
    /// that waits cannot serve other files, so few do, and not for long; else it is EAGAIN.
    fn await_lease<T>(&self, fileid: u64, open: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
        {
            let mut waits = self.lease_waits.lock();
            if waits.len() >= LEASE_WAITS_MAX || waits.contains(&fileid) {
                return Err(Number::AGAIN);
            }
            waits.push(fileid);
        }
        let until = Instant::now() + LEASE_WAIT_MAX;
        let opened = loop {
            std::thread::sleep(LEASE_LOOK_EVERY);
            match open() {
                Err(Number::AGAIN) if Instant::now() < until => {}
                opened => break opened,
            }
        };
        self.lease_waits.lock().retain(|waited| *waited != fileid);
        opened
    }

    fn open_checked(&self, caller: &Caller, node: &Node, what: Use) -> Result<(std::os::fd::OwnedFd, (bool, bool))> {
        let path = path_of(&node.fd);
        let open = |flags: OFlags| {
            let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
            let open = || rustix::fs::open(&path, flags, Mode::empty());
            match open() {
                Err(Number::AGAIN) => self.await_lease(node.fileid, open),
                opened => opened,
            }
        };
        let tries: &[(OFlags, (bool, bool))] = match what {
            Use::List => &[(OFlags::RDONLY.union(OFlags::DIRECTORY), (true, false))],
            Use::Read => &[(OFlags::RDONLY, (true, false))],
            Use::Write => &[(OFlags::RDWR, (true, true)), (OFlags::WRONLY, (false, true))],
        };
        let acting = self.identity.act_as(caller)?;
        let mut refused = Number::ACCESS;
        for (flags, rights) in tries {
            match open(*flags) {
                Ok(fd) => return Ok((fd, *rights)),
                Err(error) => refused = error,
            }
            if refused != Number::ACCESS {
                break;
            }
        }
        if refused != Number::ACCESS || what == Use::List {
            return Err(refused.into());
        }
        let executes = what == Use::Read && may(node.fd.as_fd(), libc::X_OK).is_ok();
        drop(acting);
        // The owner opened it when its mode allowed that, or a program is about to be run: the server opens it.
        let owns = self.see(node.fd.as_fd())?.attr.uid == caller.uid;
        match (owns || executes, what) {
            (true, Use::Write) => Ok((open(OFlags::RDWR)?, (owns, true))),
            (true, _) => Ok((open(OFlags::RDONLY)?, (true, false))),
            (false, _) => Err(refused.into()),
        }
    }

    pub(super) fn read(&self, caller: &Caller, node: &Node, offset: u64, into: &mut [u8]) -> Result<usize> {
        let open = self.open_for(caller, node, Use::Read)?;
        let got = self.io.read(&open.fd, offset, into)?;
        if got > 0 && !self.io.is_direct() {
            self.paging.read(&open.fd, offset + got as u64 - 1);
        }
        Ok(got)
    }

    /// Reads what the page cache has, through a descriptor that the caller has already.
    pub(super) fn read_cached(
        &self,
        caller: &Caller,
        node: &Node,
        offset: u64,
        into: &mut [u8],
    ) -> Option<Result<usize>> {
        if self.io.is_direct() || self.paging.never_at_once() {
            return None;
        }
        let open = node.open_for(self.callers.number(caller), Use::Read, self.nodes.now_ms())?;
        i64::try_from(offset).ok()?;
        let (wanted, mut slices) = (into.len(), [IoSliceMut::new(into)]);
        if page_cache::is_missing(open.fd.as_fd(), offset..offset.saturating_add(wanted as u64)) {
            return None;
        }
        let read =
            rustix::io::retry_on_intr(|| rustix::io::preadv2(&open.fd, &mut slices, offset, ReadWriteFlags::NOWAIT));
        match read {
            Ok(count) if count == wanted => Some(Ok(count)),
            // Short: because the file ends there, or because the rest is not in memory.
            Ok(count) => {
                let size = page_cache::known_len_bytes(open.fd.as_fd())?;
                (size <= offset.saturating_add(count as u64)).then_some(Ok(count))
            }
            // Nor does any other file of this file system.
            Err(Number::OPNOTSUPP) => {
                self.paging.reads_wait();
                None
            }
            // Not in memory, or not to be told; an error is the business of a read that may wait.
            Err(_) => None,
        }
    }

    /// Whether memory has a byte, as far as the caller's descriptor tells; the file system may be asked, as by a read.
    pub(super) fn is_in_memory(&self, caller: &Caller, node: &Node, at: u64) -> bool {
        if self.io.is_direct() || self.paging.is_past() {
            return false;
        }
        let Some(open) = node.open_for(self.callers.number(caller), Use::Read, self.nodes.now_ms()) else {
            return false;
        };
        let (fd, range) = (open.fd.as_fd(), at..at.saturating_add(1));
        if page_cache::reads_at_once(fd) {
            return page_cache::has_byte(fd, at) == Some(true);
        }
        // Elsewhere only a mapping tells what has come; NFS may ask its server for it, as for the read of what is there. That nothing is
        // there the kernel knows, but of overlayfs.
        let is_missing =
            !self.is_overlay && page_cache::cached_pages(fd, range.clone()).is_ok_and(|pages| !pages.complete());
        !is_missing
            && page_cache::known_len_bytes(fd).is_some_and(|len_bytes| at < len_bytes)
            && page_cache::mapped_pages(fd, range).is_some_and(|pages| pages.complete())
    }

    /// Has the kernel begin to read a range. Which descriptor says so makes no difference to the page cache; a caller without
    /// the right to read learns nothing by it.
    pub(super) fn will_read(&self, node: &Node, range: Range<u64>) {
        let open = match node.any_reading() {
            Some(open) => Ok(open),
            None => self.open_for(self.identity.own(), node, Use::Read),
        };
        let Ok(open) = open else { return };
        if self.paging.is_unknown() {
            // Hints may come before the first read.
            let mut byte = [0_u8];
            let got = rustix::io::retry_on_intr(|| rustix::io::pread(&open.fd, &mut byte, range.start));
            if got == Ok(1) {
                self.paging.read(&open.fd, range.start);
            }
        }
        if self.paging.is_past() {
            return;
        }
        let mut range = range;
        if range.end.saturating_sub(range.start) > self.advice_max_bytes {
            // The rest of a hint that goes beyond the end is none.
            let Some(len_bytes) = page_cache::known_len_bytes(open.fd.as_fd()) else { return };
            range.end = range.end.min(len_bytes);
        }
        for at in range.clone().step_by(self.advice_max_bytes as usize) {
            let len = NonZeroU64::new((range.end - at).min(self.advice_max_bytes));
            let _ = rustix::fs::fadvise(&open.fd, at, len, Advice::WillNeed); // a hint
        }
    }

    /// Changes the bytes of a file. Its set-user-id and set-group-id go before, as the kernel has it for a user that changes
    /// them itself, and again after it: its owner may have given them to the former bytes meanwhile.
    fn change_bytes(&self, caller: &Caller, open: &Open, change: impl FnOnce() -> Result<()>) -> Result<()> {
        self.take_set_id(caller, open)?;
        let changing = open.changing();
        let changed = change();
        drop(changing);
        let taken = self.take_set_id(caller, open);
        changed.and(taken)
    }

    fn take_set_id(&self, caller: &Caller, open: &Open) -> Result<()> {
        if caller.uid == 0 || !self.identity.leaves_set_id() {
            return Ok(());
        }
        // First by what is known of another server's file: to ask for it would sync its bytes with each write. Rights are set by
        // what that server says now: it may have taken others since.
        let left = |how: AtFlags| -> Result<Option<u32>> {
            let stat = rustix::fs::statx(&open.fd, "", AtFlags::EMPTY_PATH | how, StatxFlags::MODE | StatxFlags::GID)?;
            let by_member = || caller.gid == stat.stx_gid || caller.groups.contains(&stat.stx_gid);
            let mode = u32::from(stat.stx_mode);
            Ok(set_id::without(mode, set_id::taken(mode, by_member)))
        };
        if left(AtFlags::STATX_DONT_SYNC)?.is_none() {
            return Ok(());
        }
        match take_bits(open.fd.as_fd(), true, || left(AtFlags::STATX_FORCE_SYNC)) {
            // A server below does not take this one for root; it sees to the writes of users itself.
            Err(Errno(libc::EPERM)) if self.identity.sets_modes() => Ok(()),
            taken => taken,
        }
    }

    pub(super) fn write(&self, caller: &Caller, node: &Node, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        check_range(offset, bytes.len() as u64)?;
        let open = self.open_for(caller, node, Use::Write)?;
        if !bytes.is_empty() {
            self.change_bytes(caller, &open, || self.io.write(&open.fd, offset, bytes))?;
        }
        if !stable {
            return Ok(());
        }
        let sync = || rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&open.fd)).map_err(Errno::from);
        node.sync_stable(&open, &self.losses, sync)
    }

    pub(super) fn truncate(&self, caller: &Caller, node: &Node, size_bytes: u64) -> Result<()> {
        i64::try_from(size_bytes).map_err(|_| Errno(libc::EFBIG))?;
        let open = self.open_for(caller, node, Use::Write)?;
        let cut = || Ok(rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&open.fd, size_bytes))?);
        self.change_bytes(caller, &open, cut)
    }

    pub(super) fn change_space(
        &self,
        caller: &Caller,
        node: &Node,
        change: SpaceChange,
        (offset, len_bytes): (u64, u64),
    ) -> Result<()> {
        check_range(offset, len_bytes)?;
        let open = self.open_for(caller, node, Use::Write)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let change_as = |flags: FallocateFlags| {
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&open.fd, flags, offset, len_bytes))
        };
        let keeps = |keep_size| if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let changed = || match change {
            SpaceChange::Allocate { keep_size } => change_as(keeps(keep_size)),
            SpaceChange::Punch => change_as(punch),
            // In its two halves: tmpfs does not have it as one, and a mount of GlusterFS takes it for an allocation.
            SpaceChange::Zero { keep_size } => change_as(punch).and_then(|()| change_as(keeps(keep_size))),
        };
        self.change_bytes(caller, &open, || Ok(changed()?))
    }

    pub(super) fn seek(&self, caller: &Caller, node: &Node, from: u64, data: bool) -> Result<Option<u64>> {
        let open = self.open_for(caller, node, Use::Read)?;
        let size = rustix::fs::fstat(&open.fd)?.st_size as u64;
        if from >= size {
            return Ok(None);
        }
        // Nobody else goes by the position of the descriptor.
        match rustix::fs::seek(&open.fd, if data { SeekFrom::Data(from) } else { SeekFrom::Hole(from) }) {
            Ok(at) => Ok(Some(at)),
            Err(Number::NXIO) => Ok(None),
            // The file system knows of no holes.
            Err(Number::INVAL | Number::OPNOTSUPP) => Ok(Some(if data { from } else { size })),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn sync(&self, node: &Node) -> Result<()> {
        node.share_sync(|| self.sync_now(node))
    }

    /// Syncs all that the file system has, in one call.
    pub(super) fn sync_file_system(&self) -> Result<()> {
        self.losses.sync_file_system(|| {
            rustix::fs::syncfs(&self.folder).map_err(read_only_lost)?;
            // Where a failure made the file system read-only, syncfs may have done nothing, and say that all is well: this does not.
            match rustix::io::retry_on_intr(|| rustix::fs::fsync(&self.folder)) {
                // The file system has no such call for folders.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => Ok(()),
                synced => synced.map_err(read_only_lost),
            }
        })
    }

    fn sync_now(&self, node: &Node) -> Result<()> {
        let _syncing = node.syncing.lock();
        if node.sync_written(&self.losses)? {
            return Ok(());
        }
        // Others' writes, the attributes, the names of a directory.
        let what = if node.kind == Kind::Directory { Use::List } else { Use::Read };
        let opened = node.any_open().map_or_else(|| self.open_for(self.identity.own(), node, what), Ok);
        let open = match opened {
            // Links, pipes and devices are not opened, nor what the server may not read: they are stable when all is.
            Err(Errno(libc::EINVAL | libc::EACCES)) => return self.sync_file_system(),
            opened => opened?,
        };
        match node.sync_others(&self.losses, || Files::sync(&open.fd)) {
            // The file system has no such call: names are as stable as it makes them.
            Err(Errno(libc::EINVAL)) if node.kind == Kind::Directory => Ok(()),
            synced => synced,
        }
    }
}

/// Of a sync of what was written: a file system that has become read-only meanwhile has lost it.
pub(super) fn read_only_lost(error: rustix::io::Errno) -> Errno {
    if error == rustix::io::Errno::ROFS { Errno(libc::EIO) } else { error.into() }
}
