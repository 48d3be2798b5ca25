//! The locks that a client holds, and until when: nothing is read or written under a lock after its lease has run out.
//!
//! The metadata server gives a client's locks to others when it has not heard of the client for the time of a lease, and has
//! the data servers refuse what the client sent before. What the client would send *after* that it must hold back itself: the
//! check is made with every copy of a write, after the copy has its epoch and before it is sent. So a copy that is sent late
//! is of an epoch that the data servers refuse, and a new one is not sent.
//!
//! Reads are checked the same way, and once more when they have come: a client that was stopped in between may have been
//! given what others wrote since.
//!
//! A file of which locks were lost is not to be used through the descriptors that were open then: they give EIO.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_node::locks::{EPOCHS_AHEAD, Holder, Lock, Range, carve, put};
use impresario_wire::{FileKey, FileLock};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::error::ClientError;

/// Files of which losses are remembered; beyond it all open files count as concerned.
const LOST_FILES_MAX: usize = 4096;
/// Locks of one owner in one file: what one call can restore.
pub(crate) const OWNER_LOCKS_MAX: usize = 1000;

/// An instant of a lease: since the machine started. Unlike an [`Instant`] it goes on while the machine is suspended, and so do
/// the leases that the metadata server counts.
pub(crate) type LeaseTime = Duration;

/// The present one.
pub(crate) fn lease_time() -> LeaseTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// The locks of an owner of a file.
pub(crate) type Owned = (FileKey, u64);

/// What a client has locked.
#[derive(Default, Debug)]
pub(crate) struct Leases {
    /// Some file is locked, or was and is being given up: else there is nothing to check.
    is_used: AtomicBool,
    /// Counts losses.
    losses: AtomicU64,
    /// Is told of losses, and of files whose lease has run out.
    listener: Listener,
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
}

#[derive(Default)]
struct Listener(OnceLock<Tell>);

type Tell = Box<dyn Fn(&[FileKey]) + Send + Sync>;

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

#[derive(Default, Debug)]
pub(crate) struct State {
    /// Number of the lease; 0: none.
    pub(crate) number: u64,
    valid_until: Option<LeaseTime>,
    /// It is known, and was told, that the lease has run out.
    is_lapsed: bool,
    pub(crate) lease: Duration,
    /// When the lease was renewed last.
    pub(crate) renewed: Option<LeaseTime>,
    /// When a lock was asked for last.
    pub(crate) used: Option<LeaseTime>,
    /// The epoch that the server knew then, at least.
    epoch: u32,
    pub(crate) held: FxHashMap<Owned, Vec<Lock>>,
    /// Owners with locks, by file.
    files: FxHashMap<FileKey, usize>,
    /// Owners of whom it is not certain that the server knows what they have.
    pub(crate) doubts: FxHashSet<Owned>,
    /// The server was started again, and has not been told of all locks yet.
    pub(crate) restores: bool,
    /// The lease is to be renewed at once.
    pub(crate) hurries: bool,
    /// Locked files whose locks were lost while writes may be under way.
    ending: FxHashSet<FileKey>,
    /// Writes under way on locked files.
    writing: usize,
    /// The last loss of a file.
    lost: FxHashMap<FileKey, u64>,
    forgotten: u64,
    /// The thread that renews the lease runs.
    pub(crate) is_kept: bool,
}

impl State {
    /// All locks are given up and all is told.
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.doubts.is_empty() && self.ending.is_empty()
    }

    /// Locks were lost, and writes that began under them have not ended.
    pub(crate) fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    fn is_lost(&self, file: FileKey, since: u64) -> bool {
        self.lost.get(&file).copied().unwrap_or(self.forgotten) > since
    }

    fn is_valid(&self) -> bool {
        self.valid_until.is_some_and(|until| lease_time() < until)
    }
}

/// A write on a locked file is under way.
pub(crate) struct Entered<'a>(&'a Leases);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.writing -= 1;
        if !state.ending.is_empty() {
            self.0.changed.notify_all();
        }
    }
}

fn lost(file: FileKey) -> ClientError {
    ClientError::LocksLost { file }
}

impl Leases {
    /// The losses so far: what an open file that is opened now has nothing to do with.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    pub(crate) fn when_lost(&self, tell: Tell) {
        let _ = self.listener.0.set(tell);
    }

    /// Whether locks of the file were lost since it was opened.
    pub(crate) fn is_lost(&self, file: FileKey, since: u64) -> bool {
        self.losses() != since && self.state.lock().is_lost(file, since)
    }

    /// Before a read through a file that was opened when there had been `since` losses.
    pub(crate) fn may_read(&self, file: FileKey, since: u64) -> Result<(), ClientError> {
        if !self.is_used.load(Ordering::Acquire) && self.losses() == since {
            return Ok(());
        }
        let state = self.state.lock();
        let lapsed = state.files.contains_key(&file) && !state.is_valid();
        if lapsed || state.is_lost(file, since) { Err(lost(file)) } else { Ok(()) }
    }

    /// The same before a write, which is under way until the result is dropped.
    pub(crate) fn enter(&self, file: FileKey, since: u64, until: Instant) -> Result<Option<Entered<'_>>, ClientError> {
        if !self.is_used.load(Ordering::Acquire) && self.losses() == since {
            return Ok(None);
        }
        let mut state = self.state.lock();
        while state.ending.contains(&file) && !state.is_lost(file, since) && Instant::now() < until {
            state = self.wait(state, until);
        }
        if state.is_lost(file, since) {
            return Err(lost(file));
        }
        if !state.files.contains_key(&file) {
            return Ok(None);
        }
        state.writing += 1;
        Ok(Some(Entered(self)))
    }

    /// Before a copy of a read or write is sent that has this epoch already.
    pub(crate) fn check(&self, file: FileKey, epoch: u32, until: Instant) -> Result<(), ClientError> {
        if !self.is_used.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut state = self.state.lock();
        loop {
            if state.ending.contains(&file) {
                return Err(lost(file));
            }
            if !state.files.contains_key(&file) {
                return Ok(());
            }
            if !state.is_valid() || Instant::now() >= until {
                return Err(lost(file));
            }
            if epoch <= state.epoch.saturating_add(EPOCHS_AHEAD) {
                return Ok(());
            }
            // The server must hear of the epoch first.
            state.hurries = true;
            self.changed.notify_all();
            state = self.wait(state, until);
        }
    }

    /// For how long, at most `most`, what a server said of any file may be gone by: others may get the locks when the lease
    /// has run out, whether or not this client runs then.
    pub(crate) fn keeps(&self, most: Duration) -> Duration {
        if !self.is_used.load(Ordering::Acquire) {
            return most;
        }
        let valid_until = self.state.lock().valid_until.unwrap_or_default();
        most.min(valid_until.saturating_sub(lease_time()))
    }

    /// Tells the listener, once, when the lease has run out: what is cached of locked files is not to be used.
    pub(crate) fn note_lapse(&self) {
        let mut state = self.state.lock();
        if state.number == 0 || state.is_lapsed || state.is_valid() {
            return;
        }
        state.is_lapsed = true;
        let files: Vec<FileKey> = state.files.keys().copied().collect();
        drop(state);
        self.tell(&files);
    }

    fn tell(&self, files: &[FileKey]) {
        if let Some(tell) = self.listener.0.get() {
            tell(files);
        }
    }

    /// Waits for a change.
    pub(crate) fn wait<'a>(&'a self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left.min(Duration::from_millis(500))).0
    }

    /// The lease that a call is to name, which is sent at this instant; 0: none. `begins`: it may begin a lease, and is the use of
    /// one that keeps it from being given up.
    pub(crate) fn used(&self, begins: bool, sent: LeaseTime) -> u64 {
        let mut state = self.state.lock();
        if begins {
            state.used = Some(sent);
        }
        state.number
    }

    /// The server has begun a lease, or renewed it, by a call that named the lease `known` and was sent at an instant in an
    /// epoch. The answer counts for nothing when that lease has ended meanwhile.
    pub(crate) fn renewed(&self, known: u64, number: u64, lease: Duration, sent: LeaseTime, epoch: u32) {
        let mut state = self.state.lock();
        if !state.ending.is_empty() || state.number != known {
            return;
        }
        state.number = number;
        state.lease = lease;
        state.renewed = Some(state.renewed.map_or(sent, |before| before.max(sent)));
        let until = sent + lease;
        state.valid_until = Some(state.valid_until.map_or(until, |before| before.max(until)));
        state.is_lapsed = false;
        state.epoch = state.epoch.max(epoch);
        drop(state);
        self.changed.notify_all();
    }

    /// The lease has ended, and its locks went to others.
    pub(crate) fn lose(&self, number: u64) {
        let mut state = self.state.lock();
        if number == 0 || state.number != number {
            return;
        }
        let files: Vec<FileKey> = state.files.drain().map(|(file, _)| file).collect();
        state.held.clear();
        state.doubts.clear();
        (state.number, state.valid_until, state.restores) = (0, None, false);
        if files.is_empty() {
            return;
        }
        tracing::warn!(
            files = files.len(),
            "file locks were lost: the metadata server did not hear of this client in time"
        );
        let loss = self.losses.fetch_add(1, Ordering::AcqRel) + 1;
        if state.lost.len() + files.len() > LOST_FILES_MAX {
            state.lost.clear();
            state.forgotten = loss;
        }
        state.lost.extend(files.iter().take(LOST_FILES_MAX).map(|file| (*file, loss)));
        state.ending.extend(files.iter().copied());
        drop(state);
        self.tell(&files);
        self.finish_ending();
        self.changed.notify_all();
    }

    /// Ends what was lost, when no write that began under it is under way; true when it has ended.
    pub(crate) fn finish_ending(&self) -> bool {
        let mut state = self.state.lock();
        if state.writing > 0 && !state.ending.is_empty() {
            return false;
        }
        state.ending.clear();
        self.is_used.store(!state.files.is_empty(), Ordering::Release);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Gives up a lease under which nothing is locked, and was not asked for in this time; its number. In one step, so that a
    /// call names the lease either before, which keeps it, or not at all.
    pub(crate) fn give_up_idle(&self, idle: Duration) -> Option<u64> {
        let mut state = self.state.lock();
        let is_used = state.used.is_some_and(|at| lease_time().saturating_sub(at) < idle);
        if state.number == 0 || is_used || !state.is_idle() {
            return None;
        }
        let number = std::mem::take(&mut state.number);
        state.valid_until = None;
        Some(number)
    }

    /// Changes what an owner has.
    fn change(&self, owned: Owned, change: impl FnOnce(&mut Vec<Lock>)) {
        let mut state = self.state.lock();
        let State { held, files, .. } = &mut *state;
        let locks = held.entry(owned).or_default();
        let before = locks.is_empty();
        change(locks);
        let after = locks.is_empty();
        if after {
            held.remove(&owned);
        }
        match (before, after) {
            (true, false) => *files.entry(owned.0).or_default() += 1,
            (false, true) => {
                if let Some(owners) = files.get_mut(&owned.0) {
                    *owners -= 1;
                    if *owners == 0 {
                        files.remove(&owned.0);
                    }
                }
            }
            _ => {}
        }
        self.is_used.store(!state.files.is_empty() || !state.ending.is_empty(), Ordering::Release);
    }

    /// An owner has a lock, under this lease; false when the lease is over.
    pub(crate) fn take(&self, file: FileKey, lock: &FileLock, number: u64) -> bool {
        if self.state.lock().number != number {
            return false;
        }
        self.change((file, lock.owner), |held| {
            put(held, lock_of(lock));
        });
        // It may have been lost in between.
        let is_held = self.state.lock().number == number;
        if !is_held {
            self.change((file, lock.owner), Vec::clear);
        }
        is_held
    }

    /// An owner gives up a range.
    pub(crate) fn give_up(&self, owned: Owned, start: u64, end: u64) {
        self.change(owned, |held| {
            carve(held, holder(owned.1), Range { start, end });
        });
    }

    /// An owner has these locks.
    pub(crate) fn set(&self, owned: Owned, locks: Vec<Lock>) {
        self.change(owned, |held| *held = locks);
    }

    /// What an owner has.
    pub(crate) fn of(&self, owned: Owned) -> Vec<Lock> {
        self.state.lock().held.get(&owned).cloned().unwrap_or_default()
    }

    /// The server may not know what an owner has: it will be told.
    pub(crate) fn doubt(&self, owned: Owned) {
        let mut state = self.state.lock();
        if state.number != 0 {
            state.doubts.insert(owned);
            drop(state);
            self.changed.notify_all();
        }
    }
}

fn holder(owner: u64) -> Holder {
    Holder { client: 0, owner }
}

fn lock_of(lock: &FileLock) -> Lock {
    let range = Range { start: lock.start, end: lock.end };
    Lock { holder: holder(lock.owner), pid: lock.pid, range, exclusive: lock.exclusive }
}

/// A lock for the wire.
pub(crate) fn file_lock(lock: &Lock) -> FileLock {
    let Lock { holder, pid, range, exclusive } = *lock;
    FileLock { owner: holder.owner, pid, start: range.start, end: range.end, exclusive }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileKey = FileKey(5);

    fn lock(owner: u64, start: u64, end: u64) -> FileLock {
        FileLock { owner, pid: 1, start, end, exclusive: true }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn leases(lease: Duration) -> Leases {
        let leases = Leases::default();
        leases.renewed(0, 7, lease, lease_time(), 3);
        assert!(leases.take(FILE, &lock(1, 0, 9), 7));
        leases
    }

    #[test]
    fn nothing_is_sent_under_a_lease_that_has_run_out() {
        let leases = leases(Duration::from_millis(30));
        assert!(leases.check(FILE, 3, soon()).is_ok() && leases.may_read(FILE, 0).is_ok());
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(leases.check(FILE, 3, soon()).unwrap_err().errno(), libc::EIO);
        assert!(leases.may_read(FILE, 0).is_err());
        assert!(leases.check(FileKey(6), 3, soon()).is_ok(), "a file without locks");
        assert_eq!(leases.keeps(Duration::MAX), Duration::ZERO);
        leases.renewed(7, 7, Duration::from_secs(9), lease_time(), 3);
        assert!(leases.check(FILE, 3, soon()).is_ok(), "nobody else had it");
        assert_eq!(leases.keeps(Duration::from_secs(1)), Duration::from_secs(1));
        assert!((5..9).contains(&leases.keeps(Duration::MAX).as_secs()));
        leases.give_up((FILE, 1), 0, u64::MAX);
        assert!(!leases.is_used.load(Ordering::Relaxed));
    }

    #[test]
    fn a_lease_that_has_run_out_is_told_once_until_it_is_renewed() {
        let (leases, told) = (leases(Duration::from_millis(30)), std::sync::Arc::new(Mutex::new(Vec::new())));
        let here = told.clone();
        leases.when_lost(Box::new(move |files| here.lock().extend_from_slice(files)));
        leases.note_lapse();
        assert!(told.lock().is_empty());
        for round in 1..3 {
            std::thread::sleep(Duration::from_millis(40));
            (0..3).for_each(|_| leases.note_lapse());
            assert_eq!(*told.lock(), vec![FILE; round]);
            leases.renewed(7, 7, Duration::from_millis(30), lease_time(), 3);
        }
        leases.give_up((FILE, 1), 0, u64::MAX);
        assert_eq!(leases.keeps(Duration::MAX), Duration::MAX);
    }

    /// A suspended machine's [`Instant`]s stand still.
    #[test]
    fn leases_run_by_the_clock_that_goes_on_while_the_machine_is_suspended() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let since_start: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        assert!((lease_time().as_secs_f64() - since_start).abs() < 5.0, "{uptime}");
    }

    #[test]
    fn an_epoch_that_the_server_may_not_know_has_to_wait_for_a_renewal() {
        let leases = leases(Duration::from_secs(9));
        assert!(leases.check(FILE, 3 + EPOCHS_AHEAD, soon()).is_ok());
        assert!(leases.check(FILE, 4 + EPOCHS_AHEAD, soon()).is_err());
        assert!(leases.state.lock().hurries);
        leases.renewed(7, 7, Duration::from_secs(9), lease_time(), 4);
        assert!(leases.check(FILE, 4 + EPOCHS_AHEAD, soon()).is_ok());
    }

    #[test]
    fn files_that_were_open_when_locks_were_lost_are_told_and_writes_under_way_end_first() {
        let leases = leases(Duration::from_secs(9));
        let entered = leases.enter(FILE, 0, soon()).unwrap();
        assert!(entered.is_some());
        leases.lose(6);
        assert!(leases.check(FILE, 3, soon()).is_ok(), "another lease");
        leases.lose(7);
        assert!(leases.state.lock().is_ending());
        assert!(leases.check(FILE, 3, soon()).is_err(), "the retry of a write that is under way");
        assert!(leases.enter(FILE, 0, soon()).is_err() && leases.may_read(FILE, 0).is_err());
        let since = leases.losses();
        assert!(leases.may_read(FILE, since).is_ok(), "opened anew");
        leases.renewed(0, 8, Duration::from_secs(9), lease_time(), 3);
        assert_eq!(leases.state.lock().number, 0, "not before they have ended");
        drop(entered);
        assert!(leases.finish_ending());
        leases.renewed(0, 8, Duration::from_secs(9), lease_time(), 3);
        assert!(!leases.take(FILE, &lock(1, 0, 9), 7), "granted under the lease that is over");
        assert!(leases.take(FILE, &lock(1, 0, 9), 8));
        assert!(leases.check(FILE, 3, soon()).is_ok() && leases.enter(FILE, since, soon()).is_ok());
        assert!(leases.enter(FILE, 0, soon()).is_err());
        assert!(!leases.is_lost(FileKey(6), 0));
    }

    #[test]
    fn an_idle_lease_that_is_given_up_does_not_come_back_with_a_late_answer() {
        let leases = leases(Duration::from_secs(9));
        assert_eq!(leases.give_up_idle(Duration::ZERO), None, "something is locked");
        leases.give_up((FILE, 1), 0, u64::MAX);
        let number = leases.used(true, lease_time());
        assert_eq!(
            (number, leases.give_up_idle(Duration::from_secs(3600))),
            (7, None),
            "a call under it was just sent"
        );
        assert_eq!(leases.give_up_idle(Duration::ZERO), Some(7));
        // The lock was granted before the server heard of the end.
        leases.renewed(number, 7, Duration::from_secs(9), lease_time(), 3);
        assert_eq!(leases.used(true, lease_time()), 0);
        assert!(!leases.take(FILE, &lock(1, 0, 9), 7), "others may get it");
        leases.renewed(0, 8, Duration::from_secs(9), lease_time(), 3);
        assert!(leases.take(FILE, &lock(1, 0, 9), 8));
    }

    #[test]
    fn losses_that_are_forgotten_concern_all_files() {
        let leases = Leases::default();
        for number in 1..4 {
            leases.renewed(0, number, Duration::from_secs(9), lease_time(), 0);
            for file in 0..2000 {
                assert!(leases.take(FileKey(number * 10_000 + file), &lock(1, 0, 9), number));
            }
            leases.lose(number);
        }
        assert!(leases.is_lost(FileKey(10_000), 0) && leases.is_lost(FileKey(3), 0) && !leases.is_lost(FileKey(3), 3));
        assert!(leases.state.lock().lost.len() <= LOST_FILES_MAX);
    }
}
