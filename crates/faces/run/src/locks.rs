//! Locks of programs: those of `fcntl`, which the metadata server keeps for all nodes, and those of `flock`, which hold among
//! the programs of a run.
//!
//! A process's locks of a file end when it closes any descriptor of the file, and with the process: the kernel says when it
//! has ended. Those of an open file (`F_OFD_SETLK`, `flock`) end with that.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use impresario_client::{File, LockAttempt, Tried};
use impresario_wire::{FileKey, FileLock};
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::calls::{Incoming, Stop};
use crate::open::{Open, Opens};

/// The last byte that a lock can cover.
const LOCK_END: u64 = i64::MAX as u64;
/// Distinguishes owners that are open files from processes, and events of processes from those of open files.
pub(crate) const OTHER_KIND: u64 = 1 << 63;
/// How often it is looked whether a program that waits for `flock` has given up.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Open files that are remembered when they are closed: as many as processes may be about to tell of.
const CLOSED_MAX: usize = 1024;

/// The process that asks.
pub(crate) struct Peer<'a> {
    /// Its number; `None`: it is not known, as from another namespace.
    pub(crate) pid: Option<u32>,
    pub(crate) stream: &'a UnixStream,
}

impl Peer<'_> {
    /// Waits, and says whether the process has given up its call or ended meanwhile.
    pub(crate) fn gives_up(&self, process: Option<&OwnedFd>, nap: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.stream, PollFlags::RDHUP)];
        fds.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
        let nap = Timespec { tv_sec: nap.as_secs() as i64, tv_nsec: nap.subsec_nanos().into() };
        poll(&mut fds, Some(&nap)).is_ok_and(|count| count > 0)
    }
}

/// A process that has locks, or waits for one.
#[derive(Debug)]
struct Holder {
    process: OwnedFd,
    /// Set before its locks are given up: what it is granted later is undone by the thread that took it.
    has_ended: AtomicBool,
    /// The open files through which it took locks of its own.
    opens: Mutex<Vec<u64>>,
}

/// Those of a run.
#[derive(Default)]
pub(crate) struct Locks {
    holders: Mutex<FxHashMap<u32, Arc<Holder>>>,
    flocks: Mutex<FxHashMap<u64, Vec<Flock>>>,
    changed: Condvar,
    /// The files of open files that were closed just now. A process says that it has closed a descriptor when it has, and if
    /// that was the last one this may be known before.
    closed: Mutex<VecDeque<(u64, FileKey)>>,
}

/// An open file that has a file locked as a whole.
#[derive(Clone, Copy)]
struct Flock {
    open: u64,
    exclusive: bool,
}

impl Locks {
    /// A process locks, for itself through `open`. `None`: the kernel does not say when it ends, which nothing must depend on.
    fn holder(&self, pid: u32, open: Option<u64>, ends: &OwnedFd) -> Option<Arc<Holder>> {
        let mut holders = self.holders.lock();
        let holder = match holders.get(&pid) {
            Some(holder) => holder.clone(),
            None => {
                let process = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
                let event = epoll::EventData::new_u64(OTHER_KIND | u64::from(pid));
                epoll::add(ends, &process, event, epoll::EventFlags::IN).ok()?;
                let holder = Arc::new(Holder { process, has_ended: AtomicBool::new(false), opens: Mutex::default() });
                holders.insert(pid, holder.clone());
                holder
            }
        };
        let mut opens = holder.opens.lock();
        if let Some(open) = open.filter(|open| !opens.contains(open)) {
            opens.push(open);
        }
        drop(opens);
        Some(holder)
    }

    /// The open files that a process locked through; `None`: it has locked nothing.
    fn through(&self, pid: u32) -> Option<Vec<u64>> {
        Some(self.holders.lock().get(&pid)?.opens.lock().clone())
    }

    fn key_of_closed(&self, number: u64) -> Option<FileKey> {
        self.closed.lock().iter().find(|closed| closed.0 == number).map(|closed| closed.1)
    }

    /// An open file is about to be closed.
    pub(crate) fn closes(&self, number: u64, open: &Open) {
        if let Ok(file) = open.file()
            && !self.holders.lock().is_empty()
        {
            let mut closed = self.closed.lock();
            closed.push_back((number, file.key()));
            if closed.len() > CLOSED_MAX {
                closed.pop_front();
            }
        }
    }

    /// A process has ended; what it locked through is returned.
    pub(crate) fn ended(&self, pid: u32, ends: &OwnedFd) -> Vec<u64> {
        let Some(holder) = self.holders.lock().remove(&pid) else { return Vec::new() };
        let _ = epoll::delete(ends, &holder.process);
        holder.has_ended.store(true, SeqCst);
        std::mem::take(&mut *holder.opens.lock())
    }

    /// An open file is closed. A call in another thread may still wait for a lock through it: what it is granted from now on, it
    /// does not keep.
    pub(crate) fn closed(&self, number: u64, open: &Open) {
        let mut flocks = self.flocks.lock();
        open.is_closed.store(true, SeqCst);
        self.give_up(&mut flocks, number, open.ino);
        drop(flocks);
        for owner in std::mem::take(&mut *open.lockers.lock()) {
            release(open, owner);
            if let Ok(pid) = u32::try_from(owner)
                && let Some(holder) = self.holders.lock().get(&pid)
            {
                holder.opens.lock().retain(|open| *open != number);
            }
        }
    }

    fn unflock(&self, number: u64, ino: u64) {
        self.give_up(&mut self.flocks.lock(), number, ino);
    }

    fn give_up(&self, all: &mut FxHashMap<u64, Vec<Flock>>, number: u64, ino: u64) {
        if let Some(flocks) = all.get_mut(&ino) {
            flocks.retain(|flock| flock.open != number);
            if flocks.is_empty() {
                all.remove(&ino);
            }
            self.changed.notify_all();
        }
    }

    /// `flock`.
    pub(crate) fn flock(&self, asked: &Incoming<'_>, open: &Open) -> Result<i64, Stop> {
        let (number, operation) = (asked.numbers.open, asked.numbers.a as i32);
        let wanted = match operation & !libc::LOCK_NB {
            libc::LOCK_UN => {
                self.unflock(number, open.ino);
                return Ok(0);
            }
            libc::LOCK_SH => Flock { open: number, exclusive: false },
            libc::LOCK_EX => Flock { open: number, exclusive: true },
            _ => return Err(libc::EINVAL.into()),
        };
        let mut all = self.flocks.lock();
        // As in Linux, a lock that is changed is given up first, also if the new one is then refused: two that share a file and
        // both want it for themselves would wait for one another.
        self.give_up(&mut all, number, open.ino);
        loop {
            let flocks = all.entry(open.ino).or_default();
            let excludes = |held: &Flock| held.open != number && (held.exclusive || wanted.exclusive);
            if !flocks.iter().any(excludes) {
                // What another thread has got through the same open file meanwhile.
                flocks.retain(|held| held.open != number);
                // As in Linux, who waited while another thread closed the last descriptor gets the lock, which ends with the call.
                if !open.is_closed.load(SeqCst) {
                    flocks.push(wanted);
                }
                if flocks.is_empty() {
                    all.remove(&open.ino);
                }
                self.changed.notify_all();
                return Ok(0);
            }
            if operation & libc::LOCK_NB != 0 {
                return Err(libc::EWOULDBLOCK.into());
            }
            all = self.changed.wait_timeout(all, LOOK_EVERY).0;
            drop(all);
            if asked.peer.gives_up(None, Duration::ZERO) {
                return Err(libc::EINTR.into());
            }
            all = self.flocks.lock();
        }
    }
}

fn release(open: &Open, owner: u64) {
    if let Ok(file) = open.file()
        && let Err(error) = file.unlock(owner, 0, LOCK_END)
    {
        tracing::warn!(%error, "unlocking a file");
    }
}

impl Opens {
    /// The file of an open file that a process has closed a descriptor of; `None` also of a directory.
    pub(crate) fn key_of(&self, number: u64) -> Option<FileKey> {
        let there = self.with(number, |open| open.file().ok().map(File::key));
        there.unwrap_or_else(|| self.locks.key_of_closed(number))
    }

    /// A process has closed one of its descriptors of a file: its locks of the file end.
    pub(crate) fn drop_locks(&self, key: Option<FileKey>, pid: Option<u32>) {
        let through = pid.and_then(|pid| Some((pid, self.locks.through(pid)?)));
        let (Some(key), Some((pid, opens))) = (key, through) else { return };
        for number in opens {
            if self.key_of(number) == Some(key)
                && let Ok(open) = self.get(number)
            {
                release(&open, pid.into());
            }
        }
    }

    /// A process has ended, and with it its locks.
    pub(crate) fn process_ended(&self, pid: u32) {
        for open in self.locks.ended(pid, self.epoll()) {
            if let Ok(open) = self.get(open) {
                release(&open, pid.into());
                open.lockers.lock().retain(|owner| *owner != u64::from(pid));
                if let Ok(file) = open.file() {
                    file.withdraw(pid.into());
                }
            }
        }
    }

    /// What `fcntl` does with locks.
    pub(crate) fn lock(&self, asked: &Incoming<'_>, out: &mut Vec<u8>) -> Result<i64, Stop> {
        let number = asked.numbers.open;
        let open = self.get(number)?;
        let file = open.file().map_err(|_| libc::EINVAL)?;
        let command = asked.numbers.c as i32;
        let is_of_open = matches!(command, libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW);
        let pid = asked.peer.pid.ok_or(libc::ENOLCK)?;
        let owner = if is_of_open { OTHER_KIND | number } else { pid.into() };
        let (kind, start, end) = range(asked, &open, file)?;
        let lock = FileLock { owner, pid, start, end, exclusive: kind == libc::F_WRLCK };
        match command {
            libc::F_GETLK | libc::F_OFD_GETLK if kind == libc::F_UNLCK => Err(libc::EINVAL.into()),
            libc::F_GETLK | libc::F_OFD_GETLK => {
                if let Some(held) = file.test_lock(lock).map_err(refused)? {
                    let kind = if held.lock.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
                    let len = if held.lock.end == LOCK_END { 0 } else { held.lock.end - held.lock.start + 1 };
                    let pid = match held.lock.owner & OTHER_KIND {
                        0 if held.own => i64::from(held.lock.pid),
                        _ if held.own => -1,
                        // Processes of other nodes have no number here.
                        _ => 0,
                    };
                    let words = [i64::from(kind), held.lock.start as i64, len as i64, pid];
                    words.iter().for_each(|word| out.extend(word.to_ne_bytes()));
                }
                Ok(0)
            }
            _ if kind == libc::F_UNLCK => {
                file.unlock(owner, start, end)?;
                Ok(0)
            }
            _ => {
                let may = if lock.exclusive { open.may_write() } else { open.may_read() };
                if !may {
                    return Err(libc::EBADF.into());
                }
                let holder =
                    self.locks.holder(pid, (!is_of_open).then_some(number), self.epoll()).ok_or(libc::ENOLCK)?;
                let mut lockers = open.lockers.lock();
                if !lockers.contains(&owner) {
                    lockers.push(owner);
                }
                drop(lockers);
                let taken = take(file, lock, asked, &holder);
                // The locks of the open file, or of the process, may have been given up before this one was granted.
                let is_closed = open.is_closed.load(SeqCst);
                if is_closed {
                    holder.opens.lock().retain(|open| *open != number);
                }
                taken?;
                let is_orphan = is_closed || !is_of_open && holder.has_ended.load(SeqCst);
                if is_orphan && file.unlock(owner, start, end).is_err() {
                    release(&open, owner);
                }
                // As in Linux, a process keeps no lock without a descriptor, and one of the open file ends with the call.
                if is_orphan && !is_of_open { Err(libc::EBADF.into()) } else { Ok(0) }
            }
        }
    }
}

/// Takes a lock, and waits for it if the program wants that.
fn take(file: &File, lock: FileLock, asked: &Incoming<'_>, holder: &Holder) -> Result<(), Stop> {
    let mut attempt = LockAttempt::new(lock, asked.numbers.may_wait());
    let stop = loop {
        match attempt.try_once(file, LockAttempt::TRY_MAX) {
            Tried::Granted { .. } => return Ok(()),
            Tried::Excluded => return Err(libc::EAGAIN.into()),
            Tried::Failed(error) => break refused(error),
            Tried::Undecided | Tried::Unanswered(_) => {}
        }
        if asked.peer.gives_up(Some(&holder.process), attempt.pause()) {
            break Stop::Errno(libc::EINTR);
        }
    };
    attempt.give_up(file);
    Err(stop)
}

/// What programs are told where no locks are kept for nodes.
fn refused(error: impresario_client::ClientError) -> Stop {
    match error.errno() {
        libc::EOPNOTSUPP => Stop::Errno(libc::ENOLCK),
        _ => error.into(),
    }
}

/// Kind, first and last byte of what a call is about.
fn range(asked: &Incoming<'_>, open: &Open, file: &File) -> Result<(i32, u64, u64), Stop> {
    let word = |at: usize| asked.data.get(at * 8..at * 8 + 8)?.try_into().ok().map(i64::from_ne_bytes);
    let (Some(kind), Some(whence)) = (word(0), word(1)) else { return Err(libc::EINVAL.into()) };
    let kind = i32::try_from(kind).map_err(|_| libc::EINVAL)?;
    if !matches!(kind, libc::F_RDLCK | libc::F_WRLCK | libc::F_UNLCK) {
        return Err(libc::EINVAL.into());
    }
    let from = match whence as i32 {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => *open.position.lock() as i64,
        libc::SEEK_END => file.attr()?.size as i64,
        _ => return Err(libc::EINVAL.into()),
    };
    let (start, end) = bytes(from, asked.numbers.a, asked.numbers.b)?;
    Ok((kind, start, end))
}

/// First and last byte of `len` bytes from `start` behind `from`; backwards if negative, to the end of all files if 0.
fn bytes(from: i64, start: i64, len: i64) -> Result<(u64, u64), i32> {
    let start = from.checked_add(start).ok_or(libc::EOVERFLOW)?;
    let (first, last) = match len {
        0 => (start, LOCK_END as i64),
        1.. => (start, start.checked_add(len - 1).ok_or(libc::EOVERFLOW)?),
        _ => (start.checked_add(len).ok_or(libc::EINVAL)?, start.checked_sub(1).ok_or(libc::EINVAL)?),
    };
    match (u64::try_from(first), u64::try_from(last)) {
        (Ok(first), Ok(last)) => Ok((first, last)),
        _ => Err(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_as_posix_has_them() {
        assert_eq!(bytes(0, 0, 0), Ok((0, LOCK_END)));
        assert_eq!(bytes(10, 5, 7), Ok((15, 21)));
        assert_eq!(bytes(10, 0, -10), Ok((0, 9)));
        assert_eq!(bytes(10, 0, -11), Err(libc::EINVAL));
        assert_eq!(bytes(10, -11, 1), Err(libc::EINVAL));
        assert_eq!(bytes(0, i64::MAX, 1), Ok((LOCK_END, LOCK_END)));
        assert_eq!(bytes(0, i64::MAX, 2), Err(libc::EOVERFLOW));
        assert_eq!(bytes(i64::MAX, 1, 1), Err(libc::EOVERFLOW));
        assert_eq!(bytes(0, i64::MIN, i64::MIN), Err(libc::EINVAL));
    }
}
