//! Open files: open, read, write, fsync, close.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use fuser::{Errno, FopenFlags, INodeNo, WriteFlags};
use impresario_base::lock::Mutex;
use impresario_base::set_id;
use impresario_client::{ClientError, File};
use impresario_wire::{Attr, FileLock, SetAttr, XattrMode};

use crate::face::{COMPLAINTS, Face, Outcome, fault};
use crate::freshness::{Freshness, Mark, Verdict};
use crate::handles::Handles;
use crate::inodes::{Entered, EntryKey};
use crate::names::{Maker, Setter};
use crate::sharing::Sharer;

/// Largest read served, bytes; the kernel asks for at most 1 MiB.
const READ_MAX_BYTES: usize = 16 << 20;

/// What a file may do that root may; a change of its bytes takes it away.
const CAPABILITY: &[u8] = b"security.capability";

/// The last byte that a lock can cover.
const LOCK_END: u64 = i64::MAX as u64;

/// Where the bytes of reads arrive. The buffer used last is the next one's: it is in the processor's cache, which the buffers
/// of all threads, whom the kernel wakes in turn, would not fit into.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(Mutex<Vec<Vec<u8>>>);

impl Arrivals {
    /// Lends a buffer of this length. There are as many as were ever lent at once, of the largest length that the kernel asked for.
    fn lend<R>(&self, len_bytes: usize, to: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut buffer = self.0.lock().pop().unwrap_or_default();
        if buffer.len() < len_bytes {
            buffer.resize(len_bytes, 0);
        }
        let done = to(buffer.get_mut(..len_bytes).unwrap_or_default());
        self.0.lock().push(buffer);
        done
    }
}

/// An open file. It is closed at the server when the last request that uses it has ended.
#[derive(Debug)]
pub(crate) struct OpenFile {
    /// `None` only during drop.
    file: Option<File>,
    number: u64,
    fresh: Arc<Freshness>,
    /// Not the file that the inode number means, but the one that has its name now.
    instead: bool,
    /// The kernel keeps no pages of what is written through it, and does not sync what is to be synced when a write returns.
    direct: bool,
    /// It was opened with `O_APPEND`: the kernel keeps no pages of what is written, so it may go elsewhere than the kernel
    /// believes.
    appends: AtomicBool,
    /// Owners that locked through it and have not closed it.
    lockers: Mutex<Vec<u64>>,
    /// Whose habit is learnt.
    sharer: Option<Sharer>,
}

impl OpenFile {
    /// Whether this is another file than the inode number means.
    pub(crate) fn is_instead(&self) -> bool {
        self.instead
    }

    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// An owner locks through it.
    pub(crate) fn note_locker(&self, owner: u64) {
        if let Some(sharer) = &self.sharer {
            sharer.locks();
        }
        let mut lockers = self.lockers.lock();
        if !lockers.contains(&owner) {
            lockers.push(owner);
        }
    }

    /// The kernel's view of the file.
    pub(crate) fn fresh(&self) -> &Freshness {
        &self.fresh
    }

    pub(crate) fn file(&self) -> Outcome<&File> {
        self.file.as_ref().ok_or(Errno::EBADF)
    }
}

/// How long an open waits for a move of its file by this mount, which takes one call to the server.
const MOVE_WAIT: Duration = Duration::from_millis(100);

/// How often an open follows a file that is given other names by this mount all the time.
const MOVED_TRIES: u32 = 8;

impl OpenFile {
    /// Writes; returns where and how many bytes. `cached`: pages of the kernel, which does not look at the number: all or none.
    fn write(
        &self,
        file: &File,
        offset: u64,
        bytes: &[u8],
        append: bool,
        cached: bool,
    ) -> Result<(u64, usize), ClientError> {
        if cached {
            return file.write_at(bytes, offset).map(|written| (offset, written));
        }
        let appended = match append && self.appends.load(Relaxed) {
            true => file.append(bytes)?,
            false => None,
        };
        if append && appended.is_none() {
            // It is not asked in vain again.
            self.appends.store(false, Relaxed);
        }
        let (at, written) = match appended {
            Some(appended) => appended,
            None => (offset, file.write_some_at(bytes, offset)?),
        };
        Ok((at, written.min(bytes.len())))
    }
}

/// What the kernel does with an open.
fn open_flags(direct: bool, keep_pages: bool) -> FopenFlags {
    if direct {
        FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
    } else if keep_pages {
        FopenFlags::FOPEN_KEEP_CACHE
    } else {
        FopenFlags::empty()
    }
}

/// Of the flags of an open.
fn appends(flags: i32) -> AtomicBool {
    AtomicBool::new(flags & libc::O_APPEND != 0)
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.file.take().map(File::close) {
            // No data is lost: every write was acknowledged, and the server ends the open when the connection ends.
            COMPLAINTS.about("close", &error.sort(), |files| tracing::warn!(files, %error, "closing a file"));
        }
    }
}

impl Face {
    /// Opens the file `number`.
    ///
    /// The kernel looked a name up before and opens what it found. By now the name may mean another file, or the file
    /// may have another size than the kernel believes. ESTALE makes the kernel look the name up again and retry the
    /// open, but only once. So a name that is replaced all the time must be opened as it is on the second attempt.
    pub(crate) fn open_file(&self, number: u64, flags: i32, write: bool, setter: Setter) -> Outcome<(u64, FopenFlags)> {
        for left in (0..MOVED_TRIES).rev() {
            // The kernel does not say which of several names it means: the latest, or the one that it looks up next.
            let entries = self.inodes.entries(number);
            let entry = entries.first().ok_or(Errno::ESTALE)?;
            let spared = self.inodes.is_spared(setter.thread, &entries);
            match self.open_as_found(number, entry, spared, flags, write, setter) {
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE) if !spared => {
                    // The kernel need not learn of what moved here meanwhile: the file has another name now.
                    if left == 0 || !self.inodes.has_moved(number, &entries, MOVE_WAIT) {
                        self.inodes.spare(setter.thread, entries);
                        break;
                    }
                }
                opened => return opened,
            }
        }
        Err(Errno::ESTALE)
    }

    fn open_as_found(
        &self,
        number: u64,
        entry: &EntryKey,
        spared: bool,
        flags: i32,
        write: bool,
        setter: Setter,
    ) -> Outcome<(u64, FopenFlags)> {
        let fresh = self.inodes.fresh(number).ok_or(Errno::ESTALE)?;
        let mark = fresh.mark();
        let (file, attr) = self.at_name(entry.0, &entry.1, |path| self.client.open_with_attr(path, write))?;
        let handle = Handles::<OpenFile>::draw();
        let is_meant = self.inodes.number_for(attr.ino) == number && self.inodes.opened(number, file.key(), handle);
        if !is_meant {
            // Only where the kernel has checked the same permissions and nothing depends on its view of the size, as
            // the position of an append does.
            if !spared || flags & libc::O_APPEND != 0 || !fresh.has_permissions_of(&attr) {
                return Err(Errno::ESTALE);
            }
            self.inodes.opened_instead(number, handle);
        }
        let (appends, lockers) = (appends(flags), Mutex::default());
        let sharer = self.sharer(flags, setter.uid, setter.thread);
        // The kernel's pages belong to another file where it is not the one that is meant.
        let direct = !is_meant || self.is_direct(flags, sharer.as_ref());
        let mut open =
            OpenFile { file: Some(file), number, fresh, instead: !is_meant, direct, appends, lockers, sharer };
        let flags = self
            .begin(&mut open, flags, &attr, mark, spared, setter)
            .inspect_err(|_| self.inodes.closed(number, handle))?;
        self.files.put(handle, open);
        Ok((handle, flags))
    }

    /// Decides what an open that found `attr` does, and what the kernel may keep.
    fn begin(
        &self,
        open: &mut OpenFile,
        flags: i32,
        attr: &Attr,
        mark: Mark,
        spared: bool,
        setter: Setter,
    ) -> Outcome<FopenFlags> {
        let file = open.file()?;
        if flags & libc::O_TRUNC != 0 {
            let takes = taken_set_id(setter, attr.mode, attr.gid);
            let set = SetAttr { size: Some(0), takes, ..SetAttr::default() };
            file.set_attr(&set).map_err(fault)?;
            open.fresh.emptied();
            if takes != 0 {
                self.show_attributes_anew(open.number);
            }
        } else if !open.instead {
            return match open.fresh.judge(file.key(), attr, mark, spared, SystemTime::now()) {
                Verdict::LookUpAgain => Err(Errno::ESTALE),
                Verdict::Open { keep_pages } => Ok(open_flags(open.direct, keep_pages)),
                Verdict::OpenPastTheKernel => {
                    open.direct = true;
                    self.show_attributes_anew(open.number);
                    Ok(open_flags(true, false))
                }
            };
        }
        Ok(open_flags(open.direct, false))
    }

    /// Creates the file `name` in `parent` and opens it.
    ///
    /// The kernel creates only where it found nothing, and has checked no permission on a file. If one exists by now,
    /// the kernel must look again (ESTALE), unless the program asked for exclusive creation.
    pub(crate) fn create_file(
        &self,
        parent: u64,
        name: &[u8],
        mode: u32,
        flags: i32,
        maker: Maker,
        thread: u32,
    ) -> Outcome<(Entered, Attr, u64, FopenFlags)> {
        let (file, entered, attr) = match self.make_file(parent, name, mode, maker) {
            Err(Errno::EEXIST) if flags & libc::O_EXCL == 0 => {
                self.inodes.spare(thread, vec![(parent, name.into())]);
                return Err(Errno::ESTALE);
            }
            made => made?,
        };
        let handle = Handles::<OpenFile>::draw();
        let sharer = self.sharer(flags, maker.uid, thread);
        let (key, direct) = (file.key(), self.is_direct(flags, sharer.as_ref()));
        let open = OpenFile {
            file: Some(file),
            number: entered.number,
            fresh: entered.fresh.clone(),
            instead: false,
            direct,
            appends: appends(flags),
            lockers: Mutex::default(),
            sharer,
        };
        if !self.inodes.opened(entered.number, key, handle) {
            self.inodes.forget(entered.number, 1);
            return Err(Errno::ESTALE);
        }
        self.files.put(handle, open);
        Ok((entered, attr, handle, open_flags(direct, false)))
    }

    /// Whether the kernel keeps no pages of what is written through an open with these flags.
    ///
    /// Where it keeps them it lets one program at a time write to the file, and none while one syncs it. Programs that write parts of a
    /// shared file side by side spend most of their time, and of the processors', on that lock. An open that cannot read has
    /// nothing of the pages, which do not outlast the next open of a file that was written ([`Freshness::judge`]).
    fn is_direct(&self, flags: i32, sharer: Option<&Sharer>) -> bool {
        let mode = flags & libc::O_ACCMODE;
        let may_append = flags & libc::O_APPEND != 0 && mode != libc::O_RDONLY;
        self.options.direct_io
            || flags & libc::O_DIRECT != 0
            || may_append
            || mode == libc::O_WRONLY
            || sharer.is_some_and(Sharer::passes_pages_by)
    }

    /// To be told what an open with these flags does. Where files that have no pages cannot be mapped, nothing is learnt: every
    /// program may map what it can read.
    fn sharer(&self, flags: i32, uid: u32, thread: u32) -> Option<Sharer> {
        let may_read = flags & libc::O_ACCMODE == libc::O_RDWR && !self.is_direct(flags, None);
        (may_read && self.maps_direct).then(|| self.habits.of(uid, thread).map(Sharer::new)).flatten()
    }

    /// The open file with `handle`.
    pub(crate) fn open_by(&self, handle: u64) -> Outcome<Arc<OpenFile>> {
        self.files.get(handle).ok_or(Errno::EBADF)
    }

    /// Reads and passes the bytes to `answer`; short only at the end of the file.
    pub(crate) fn read_file(&self, handle: u64, offset: u64, len_bytes: u32, answer: impl FnOnce(Outcome<&[u8]>)) {
        self.arrivals.lend((len_bytes as usize).min(READ_MAX_BYTES), |arrival| {
            // The reference to the open is dropped before the answer. Once answered, the kernel may close the file at
            // any moment, and the thread that drops the last reference waits for the server.
            let read = self.open_by(handle).and_then(|open| {
                open.sharer.iter().for_each(Sharer::reads);
                open.file()?.read_at(arrival, offset).map_err(fault)
            });
            answer(read.map(|read| arrival.get(..read).unwrap_or(arrival)));
        });
    }

    /// Writes; returns the number of bytes that the data servers hold.
    /// `flags`: of the open file, and of the write. `O_APPEND`: behind the end, whatever the kernel believes that to be.
    pub(crate) fn write_file(
        &self,
        handle: u64,
        offset: u64,
        bytes: &[u8],
        (flags, write_flags): (i32, WriteFlags),
        setter: Setter,
    ) -> Outcome<u32> {
        let open = self.open_by(handle)?;
        let file = open.file()?;
        open.fresh.write_begins();
        let in_turn = open.fresh.changes_writer(handle);
        open.sharer.iter().for_each(|sharer| sharer.writes(in_turn));
        let (append, cached) = (flags & libc::O_APPEND != 0, write_flags.contains(WriteFlags::FUSE_WRITE_CACHE));
        let written = open.write(file, offset, bytes, append, cached);
        let end = |at: u64, written: usize| at.saturating_add(written as u64);
        match &written {
            Ok((at, written)) if *at == offset => open.fresh.write_ended(Some(end(offset, *written))),
            Ok((_, written)) => open.fresh.append_ended(end(offset, *written)),
            Err(_) => open.fresh.write_ended(None),
        }
        let (_, written) = written.map_err(fault)?;
        // The kernel does it only where it keeps pages of what is written.
        if open.fresh.takes_capability() {
            match file.set_xattr(CAPABILITY, None, XattrMode::Any) {
                Err(error) if ![libc::ENODATA, libc::EOPNOTSUPP].contains(&error.errno()) => return Err(fault(error)),
                _ => {}
            }
        }
        // The kernel leaves it to us to clear set-id bits when an unprivileged user writes.
        if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.take_from_open(&open, set_id::taken(open.fresh.mode(), || setter.is_in(open.fresh.gid())))?;
        }
        // As above: O_SYNC, which has this bit, too, O_DSYNC and RWF_DSYNC.
        if open.direct && written > 0 && flags & libc::O_DSYNC != 0 {
            file.sync().map_err(fault)?;
        }
        u32::try_from(written).map_err(|_| Errno::EIO)
    }

    /// Takes permission bits of an open file because it was written. The kernel does not know of it. The others are left as they
    /// are at the server: its owner may have changed them on another node.
    pub(crate) fn take_from_open(&self, open: &OpenFile, takes: u32) -> Outcome<()> {
        if takes == 0 {
            return Ok(());
        }
        let attr = open.file()?.set_attr(&SetAttr { takes, ..SetAttr::default() }).map_err(fault)?;
        open.fresh.set_mode(attr.mode);
        self.show_attributes_anew(open.number);
        Ok(())
    }

    /// The kernel asks for the attributes of a file the next time that they are wanted. It drops no pages, so this waits for nothing.
    fn show_attributes_anew(&self, number: u64) {
        if let Some(Err(error)) = self.notifier.get().map(|kernel| kernel.inval_inode(INodeNo(number), -1, 0)) {
            tracing::debug!(%error, number, "the kernel did not drop the attributes of a file");
        }
    }

    /// When this returns, the file's data, size and name are on the devices.
    /// `data_only`: as fdatasync(2).
    pub(crate) fn sync_file(&self, handle: u64, data_only: bool) -> Outcome<()> {
        let open = self.open_by(handle)?;
        let file = open.file()?;
        if data_only { file.sync_data() } else { file.sync() }.map_err(fault)
    }

    /// Ends an open.
    pub(crate) fn close_file(&self, handle: u64) {
        if let Some(open) = self.files.take(handle) {
            self.inodes.closed(open.number, handle);
            // Those of an open file description (`flock`, F_OFD_SETLK) end with it. Those of processes ended when they closed it.
            for owner in std::mem::take(&mut *open.lockers.lock()) {
                if let Ok(file) = open.file()
                    && let Err(error) = file.unlock(owner, 0, LOCK_END)
                {
                    tracing::warn!(%error, "unlocking a closed file");
                }
            }
        }
    }

    /// A process closes one of its descriptors of a file: its locks of the file end.
    pub(crate) fn drop_locks(&self, handle: u64, owner: u64) -> Outcome<()> {
        let open = self.open_by(handle)?;
        open.lockers.lock().retain(|locker| *locker != owner);
        open.file()?.unlock(owner, 0, LOCK_END).map_err(fault)
    }

    pub(crate) fn unlock(&self, handle: u64, lock: &FileLock) -> Outcome<()> {
        self.open_by(handle)?.file()?.unlock(lock.owner, lock.start, lock.end).map_err(fault)
    }

    /// The lock that excludes this one. Processes of other nodes have no number here.
    pub(crate) fn test_lock(&self, handle: u64, lock: FileLock) -> Outcome<Option<FileLock>> {
        let held = self.open_by(handle)?.file()?.test_lock(lock).map_err(fault)?;
        Ok(held.map(|held| FileLock { pid: if held.own { held.lock.pid } else { 0 }, ..held.lock }))
    }
}

/// The permission bits that go when `setter` changes the bytes of a file of group `gid`.
pub(crate) fn taken_set_id(setter: Setter, mode: u32, gid: u32) -> u32 {
    if setter.uid == 0 { 0 } else { set_id::taken(mode, || setter.is_in(gid)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_used_last_is_lent_next() {
        let arrivals = Arrivals::default();
        let at = |buffer: &mut [u8]| buffer.as_ptr();
        let (outer, inner) = arrivals.lend(8192, |outer| (outer.as_ptr(), arrivals.lend(4096, at)));
        assert_ne!(outer, inner, "one is lent twice at once");
        assert_eq!([arrivals.lend(100, at), arrivals.lend(8192, at)], [outer; 2]);
        assert_eq!(arrivals.0.lock().len(), 2, "as many as were lent at once");
        assert_eq!(arrivals.lend(0, |nothing| nothing.len()), 0);
    }

    #[test]
    fn set_id_bits_go_as_the_kernel_takes_them() {
        let by = |uid, gid| Setter { uid, gid, thread: 0 };
        assert_eq!((taken_set_id(by(0, 0), 0o4755, 5), taken_set_id(by(1000, 5), 0o4755, 5)), (0, 0o4000));
        assert_eq!((taken_set_id(by(1000, 5), 0o2745, 5), taken_set_id(by(1000, 6), 0o2745, 5)), (0, 0o2000));
    }
}
