//! Locks of byte ranges (`fcntl`) and of files (`flock`), which the metadata server keeps for all mounts. `flock` locks all bytes.
//!
//! A lock that is granted makes the node see what others wrote before: what the kernel has cached of the file is dropped,
//! its pages only when another node may have changed them. The threads that do that serve no requests, because dropping
//! pages waits for reads of the file that are under way, perhaps from a server that hangs. What is to be done for one file is done
//! in order, and no file waits for another.
//!
//! **Waiting.** A thread of its own asks for all requests that wait, each in growing intervals. It also watches their
//! processes: the library that reads the kernel's requests does not hand on that one is interrupted, and a process that waits
//! cannot even be killed before it is answered. So the thread looks which signals are pending, and answers EINTR where the
//! process will act on one: the kernel then ends the process, or runs its handler, and repeats the call or not as the handler
//! was installed. Never without a pending signal: the kernel would hand its inner number for "repeat" to the program.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use fuser::{Errno, INodeNo, Notifier, ReplyEmpty};
use impresario_base::lock::RwLock;
use impresario_client::{Client, LockAttempt, Tried};
use impresario_engine::workers::{Workers, waiting_elsewhere};
use impresario_wire::{FileKey, FileLock};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::data::OpenFile;
use crate::face::fault;
use crate::handles::Handles;
use crate::inodes::EntryKey;
use crate::signals::{self, Signals};

/// Requests that wait at a time.
const WAITING_MAX: usize = 1024;
/// How often the processes of requests that wait are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Threads that bring the kernel's cache up to date, beside those that wait for reads.
const SETTLERS_MAX: usize = 4;
/// Files whose neighbours' names are not kept.
const BESIDE_MAX: usize = 1024;

/// The locks of a mount.
#[derive(Debug)]
pub(crate) struct LockService {
    waits: Sender<Waiting>,
    settler: Arc<Settler>,
    waiting: Arc<AtomicUsize>,
    pub(crate) beside: Beside,
}

/// The names beside locked files that programs go by while they have a lock, as SQLite does by that of its journal: those
/// that begin with a locked file's own. The kernel keeps none of them, so what another node did to them before it gave up a
/// lock is seen.
#[derive(Default, Debug)]
pub(crate) struct Beside {
    is_used: AtomicBool,
    known: RwLock<Known>,
}

#[derive(Default, Debug)]
struct Known {
    numbers: FxHashSet<u64>,
    /// Names of locked files by directory.
    names: FxHashMap<u64, Vec<Arc<[u8]>>>,
}

impl Beside {
    /// A file of these names is locked.
    pub(crate) fn note(&self, number: u64, entries: impl FnOnce() -> Vec<EntryKey>) {
        if self.known.read().numbers.contains(&number) {
            return;
        }
        let entries = entries();
        let mut known = self.known.write();
        if known.numbers.len() >= BESIDE_MAX {
            *known = Known::default();
        }
        known.numbers.insert(number);
        for (parent, name) in entries {
            let names = known.names.entry(parent).or_default();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        self.is_used.store(true, Ordering::Release);
    }

    /// Whether a name in a directory is beside a locked file.
    pub(crate) fn has(&self, parent: u64, name: &[u8]) -> bool {
        let is_beside = |file: &Arc<[u8]>| name.len() > file.len() && name.starts_with(file);
        self.is_used.load(Ordering::Acquire)
            && self.known.read().names.get(&parent).is_some_and(|names| names.iter().any(is_beside))
    }
}

/// A request that waits for a lock.
#[derive(Debug)]
struct Waiting {
    reply: ReplyEmpty,
    open: Arc<OpenFile>,
    attempt: LockAttempt,
    /// The thread that waits, if it can be watched.
    thread: Option<u32>,
    signals: Signals,
    next_ask: Instant,
    next_look: Instant,
}

/// Brings the kernel's cache up to date.
struct Settler {
    workers: Workers,
    notifier: Arc<OnceLock<Notifier>>,
}

impl std::fmt::Debug for Settler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Settler")
    }
}

impl Settler {
    /// Does it for a file after what was put in for that file before.
    fn run(&self, number: u64, settle: impl FnOnce(&dyn Fn(bool)) + Send + 'static) {
        let notifier = self.notifier.clone();
        let drop_cached = move |pages: bool| {
            // A negative offset leaves the pages.
            let (offset, len) = if pages { (0, 0) } else { (-1, 0) };
            let dropped = || notifier.get().map(|to| to.inval_inode(INodeNo(number), offset, len));
            if let Some(Err(error)) = if pages { waiting_elsewhere(dropped) } else { dropped() } {
                tracing::debug!(%error, number, "the kernel did not drop what it has cached of a file");
            }
        };
        self.workers.run_for(number, Box::new(move || settle(&drop_cached)));
    }

    /// A lock was granted: the cache is brought up to date, then it is answered.
    fn granted(&self, reply: ReplyEmpty, open: Arc<OpenFile>, version: u64) {
        // Dropped when the mount ends, which is EIO.
        self.run(open.number(), move |drop_cached| {
            let is_known = open.fresh().locked(version);
            drop_cached(!is_known);
            // Before the answer: once answered, the kernel may close the file at any moment, and the thread that drops the last
            // reference waits for the server.
            drop(open);
            reply.ok();
        });
    }

    /// Locks of a file were lost: reads have to come to us.
    fn lost(&self, number: u64) {
        self.run(number, |drop_cached| drop_cached(true));
    }
}

/// The numbers that the kernel has for these files, as far as they are open: others have no locks.
fn numbers(files: &[FileKey], opens: &Handles<OpenFile>) -> FxHashSet<u64> {
    let files: FxHashSet<&FileKey> = files.iter().collect();
    let number = |open: &OpenFile| open.file().ok().filter(|file| files.contains(&file.key())).map(|_| open.number());
    opens.find(number).into_iter().collect()
}

impl LockService {
    /// For a mount of this client with these open files; `notifier` is set when it is served. Its threads end when it is dropped.
    pub(crate) fn start(
        client: &Arc<Client>,
        opens: &Arc<Handles<OpenFile>>,
        notifier: Arc<OnceLock<Notifier>>,
    ) -> std::io::Result<LockService> {
        let (waits, inbox) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        // What these threads do must not be lost: a lock that is granted would be kept for nobody, and stale pages be read on.
        let workers = Workers::fair("lock-grants", SETTLERS_MAX, 1).kept()?;
        let settler = Arc::new(Settler { workers, notifier });
        let waiter = Waiter { inbox, settler: settler.clone(), count: waiting.clone() };
        let thread = std::thread::Builder::new().name("lock-waits".into()).stack_size(256 << 10);
        thread.spawn(move || waiter.run())?;
        // The client keeps what is called, and open files keep the client.
        let (opens, settle): (Weak<_>, Weak<_>) = (Arc::downgrade(opens), Arc::downgrade(&settler));
        client.when_locks_are_lost(move |files| {
            if let (Some(opens), Some(settler)) = (opens.upgrade(), settle.upgrade()) {
                numbers(files, &opens).into_iter().for_each(|number| settler.lost(number));
            }
        });
        Ok(LockService { waits, settler, waiting, beside: Beside::default() })
    }

    /// Takes a lock for a thread of a program, and answers when that is decided.
    pub(crate) fn set(&self, open: Arc<OpenFile>, lock: FileLock, wait: bool, thread: u32, reply: ReplyEmpty) {
        let file = match open.file() {
            Ok(file) => file,
            Err(errno) => return reply.error(errno),
        };
        let now = Instant::now();
        open.note_locker(lock.owner);
        let mut attempt = LockAttempt::new(lock, wait);
        match attempt.try_once(file, file.timeout()) {
            Tried::Granted { version } => self.settler.granted(reply, open, version),
            Tried::Excluded => reply.error(Errno::EAGAIN),
            Tried::Undecided => {
                if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                    reply.error(Errno::ENOLCK);
                    return attempt.give_up(file);
                }
                let thread = (thread != 0 && signals::is_seen(thread)).then_some(thread);
                let (next_ask, next_look) = (Instant::now() + attempt.pause(), now);
                let waiting =
                    Waiting { reply, open, attempt, thread, signals: Signals::default(), next_ask, next_look };
                let _ = self.waits.send(waiting);
            }
            Tried::Unanswered(error) | Tried::Failed(error) => reply.error(fault(error)),
        }
    }
}

/// The thread that asks for requests that wait.
struct Waiter {
    inbox: Receiver<Waiting>,
    settler: Arc<Settler>,
    count: Arc<AtomicUsize>,
}

/// What became of a request that waits.
enum Turn {
    Waits,
    /// The same, and the server did not answer.
    Unanswered,
    Granted(u64),
    Failed(Errno),
    /// Its process is to go on without it.
    Interrupted,
}

impl Waiter {
    fn run(self) {
        let mut waiting: Vec<Waiting> = Vec::new();
        // Before that nothing is asked: the server does not answer, and processes are to be watched meanwhile.
        let mut ask_from = Instant::now();
        loop {
            let due = waiting.iter().map(|wait| wait.next_ask.max(ask_from).min(wait.next_look)).min();
            let come = match due {
                None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => self.inbox.recv_timeout(due.saturating_duration_since(Instant::now())),
            };
            match come {
                Ok(come) => waiting.push(come),
                Err(RecvTimeoutError::Timeout) => {}
                // The mount is gone, and with it all who wait.
                Err(RecvTimeoutError::Disconnected) => {
                    return waiting.into_iter().for_each(|wait| wait.withdraw(Errno::ENODEV));
                }
            }
            waiting.extend(self.inbox.try_iter());
            let mut at = 0;
            while let Some(wait) = waiting.get_mut(at) {
                let now = Instant::now();
                let turn = wait.turn(now, now >= ask_from);
                if matches!(turn, Turn::Unanswered) {
                    ask_from = Instant::now() + LockAttempt::TRY_MAX;
                }
                if matches!(turn, Turn::Waits | Turn::Unanswered) {
                    at += 1;
                    continue;
                }
                let wait = waiting.swap_remove(at);
                self.count.fetch_sub(1, Ordering::Relaxed);
                match turn {
                    Turn::Waits | Turn::Unanswered => {}
                    Turn::Granted(version) => self.settler.granted(wait.reply, wait.open, version),
                    Turn::Failed(errno) => wait.withdraw(errno),
                    Turn::Interrupted => wait.withdraw(Errno::EINTR),
                }
            }
        }
    }
}

impl Waiting {
    fn turn(&mut self, now: Instant, may_ask: bool) -> Turn {
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            if self.thread.is_some_and(|thread| self.signals.interrupt(thread)) {
                return Turn::Interrupted;
            }
        }
        if now < self.next_ask || !may_ask {
            return Turn::Waits;
        }
        let Ok(file) = self.open.file() else { return Turn::Failed(Errno::EBADF) };
        let tried = self.attempt.try_once(file, LockAttempt::TRY_MAX);
        self.next_ask = Instant::now() + self.attempt.pause();
        match tried {
            Tried::Granted { version } => Turn::Granted(version),
            Tried::Excluded => Turn::Failed(Errno::EAGAIN),
            Tried::Undecided => Turn::Waits,
            Tried::Unanswered(_) => Turn::Unanswered,
            Tried::Failed(error) => Turn::Failed(fault(error)),
        }
    }

    fn withdraw(self, errno: Errno) {
        let Waiting { reply, open, attempt, .. } = self;
        reply.error(errno);
        if let Ok(file) = open.file() {
            attempt.give_up(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside_a_locked_file_begin_with_its_own() {
        let beside = Beside::default();
        assert!(!beside.has(1, b"data.db-journal"));
        beside.note(9, || vec![(1, b"data.db"[..].into()), (2, b"link"[..].into())]);
        beside.note(9, || panic!("it is known"));
        assert!(beside.has(1, b"data.db-journal") && beside.has(2, b"link-journal"));
        assert!(!beside.has(1, b"data.db") && !beside.has(2, b"data.db-journal") && !beside.has(1, b"data"));
        (10..10_000).for_each(|number| beside.note(number, || vec![(number, b"f"[..].into())]));
        assert!(beside.known.read().names.len() <= BESIDE_MAX);
    }
}
