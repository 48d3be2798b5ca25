//! Locks of byte ranges: the calls of clients, the records of leases, and the fencing of clients that are gone.
//!
//! The rules are in [`impresario_node::locks`]. Locks are in memory only; what is on disk is which clients have leases, one
//! empty file `lockers/<client>-<lease>` each, made durable before the first lock is given under it. After a restart these
//! clients restore their locks, and until they have, or are fenced, nobody gets a lock.
//!
//! A client whose lease has ended is fenced at all data servers, and here, and the changes that it had asked for end, before its
//! record is removed; its record is removed durably before its locks go to others. So a server that is stopped in between
//! fences it again, and one that comes after knows that the lease is over.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use impresario_base::Nanos;
use impresario_base::lock::{Condvar, Mutex, RwLock, RwLockReadGuard};
use impresario_base::machine::random_number;
use impresario_engine::now;
use impresario_node::locks::{Ended, Holder, Limits, Lock, Locks, Range, Reply, Request};
use impresario_wire::locks::RESTORED_MAX;
use impresario_wire::message::{Answer, ClientKey, FileKey, Who};
use impresario_wire::{FileLock, LockAnswer, LockCall, LockSaid, LockWish};
use rustix::io::Errno;

use super::changes::{Changes, fenced};
use super::directory::{MetaDirectory, names_in, open_dir_at};
use super::fault::{Outcome, fault};
use super::service::Meta;

/// While no lease runs, the thread looks up this often.
const LOOK_UP: Duration = Duration::from_secs(60);
/// A client that could not be fenced is fenced again after this time.
const FENCE_AGAIN: Duration = Duration::from_millis(500);

/// The locks of all clients.
pub(super) struct Locking {
    state: Mutex<State>,
    wake: Condvar,
    records: OwnedFd,
    /// Held while a client begins a lease.
    beginning: Mutex<()>,
    /// Shared by those who assign ranges to appends ([`Meta::hold_epoch`]).
    assigning: RwLock<()>,
}

struct State {
    locks: Locks,
    is_stopped: bool,
}

impl Locking {
    /// Takes up the leases of an earlier run.
    pub(super) fn open(directory: &MetaDirectory, changes: &Changes, lease: Duration) -> rustix::io::Result<Locking> {
        let records = match open_dir_at(&directory.top, "lockers") {
            Err(Errno::NOENT) => {
                directory.disk.make_dir(&directory.top, "lockers")?;
                directory.disk.sync("sync_lockers", &directory.top)?;
                open_dir_at(&directory.top, "lockers")?
            }
            opened => opened?,
        };
        let lease = Nanos(u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX));
        let mut locks = Locks::new(Limits::default(), lease, random_number().map_err(|_| Errno::IO)? >> 1);
        let mut earlier = BTreeMap::new();
        for name in names_in(&records)? {
            let name = name?;
            match lease_of(&name) {
                Some((client, number)) => drop(earlier.insert(client, number)),
                None => tracing::warn!(name = super::show(&name), "ignored an entry of lockers/: its name is no lease"),
            }
        }
        let began = now();
        for (client, number) in earlier {
            locks.restore_lease(began, client, number, changes.epoch_of(client));
        }
        let state = Mutex::new(State { locks, is_stopped: false });
        Ok(Locking {
            state,
            wake: Condvar::default(),
            records,
            beginning: Mutex::default(),
            assigning: RwLock::default(),
        })
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.wake.notify_all();
    }

    /// Locks, requests that wait, and leases; and whether locks are still to be restored.
    pub(super) fn counts(&self) -> ((usize, usize, usize), bool) {
        let state = self.state.lock();
        (state.locks.counts(), state.locks.is_restoring())
    }
}

/// The name of a lease's record.
fn record_of(client: u64, number: u64) -> String {
    format!("{client:016x}-{number:016x}")
}

/// The client and the number of a lease that a name encodes.
fn lease_of(name: &[u8]) -> Option<(u64, u64)> {
    let (client, number) = std::str::from_utf8(name).ok()?.split_once('-')?;
    let (client, number) = (u64::from_str_radix(client, 16).ok()?, u64::from_str_radix(number, 16).ok()?);
    (record_of(client, number).as_bytes() == name).then_some((client, number))
}

fn lock_of(client: u64, lock: &FileLock) -> Outcome<Lock> {
    if lock.start > lock.end {
        return Err(fault(Errno::INVAL, format!("a lock from byte {} to byte {}", lock.start, lock.end)));
    }
    let holder = Holder { client, owner: lock.owner };
    let range = Range { start: lock.start, end: lock.end };
    Ok(Lock { holder, pid: lock.pid, range, exclusive: lock.exclusive })
}

fn request_of(client: u64, wish: &LockWish) -> Outcome<Request> {
    Ok(match wish {
        LockWish::Set { file, lock, wait } => Request::Set { file: file.0, lock: lock_of(client, lock)?, wait: *wait },
        LockWish::Unlock { file, owner, start, end } => {
            let range = Range { start: *start, end: (*end).max(*start) };
            Request::Unlock { file: file.0, holder: Holder { client, owner: *owner }, range }
        }
        LockWish::Test { file, lock } => Request::Test { file: file.0, lock: lock_of(client, lock)? },
        LockWish::Restore { file, owner, locks } => {
            if locks.len() > RESTORED_MAX || locks.iter().any(|lock| lock.owner != *owner) {
                return Err(fault(
                    Errno::INVAL,
                    format!("at most {RESTORED_MAX} locks of one owner are restored at once"),
                ));
            }
            let locks = locks.iter().map(|lock| lock_of(client, lock)).collect::<Outcome<_>>()?;
            Request::Restore { file: file.0, holder: Holder { client, owner: *owner }, locks }
        }
        LockWish::Renew { whole } => Request::Renew { whole: *whole },
        LockWish::End => Request::End,
    })
}

impl Meta {
    /// Serves a call about locks.
    pub(super) fn lock(&self, who: &Who, call: &LockCall) -> Outcome<Answer> {
        let client = who.client.0;
        if client == 0 {
            return Err(fault(Errno::INVAL, "a client without a key has no locks"));
        }
        let request = request_of(client, &call.wish)?;
        let ask = |number| {
            let mut state = self.locks.state.lock();
            let reply = state.locks.call(now(), client, who.epoch, number, &request);
            // With the lock: the client may begin another lease, which is not to end with this one.
            if request == Request::End && reply == Reply::Done && number != 0 {
                state.locks.end(client);
            }
            (reply, state.locks.lease_of(client), state.locks.lease())
        };
        let mut asked = ask(call.lease);
        if asked.0 == Reply::Begin {
            asked = ask(self.begin_lease(who)?);
        }
        let (reply, lease, lease_time) = asked;
        let said = match reply {
            Reply::Granted(version) => LockSaid::Granted { version },
            Reply::Held(Lock { holder, pid, range, exclusive }) => LockSaid::Held {
                lock: FileLock { owner: holder.owner, pid, start: range.start, end: range.end, exclusive },
                own: holder.client == client,
            },
            Reply::Free => LockSaid::Free,
            Reply::Waiting => LockSaid::Waiting,
            Reply::Done => LockSaid::Done,
            Reply::Restore => LockSaid::Restore,
            Reply::Lost => LockSaid::Lost,
            Reply::Later | Reply::Begin => LockSaid::Later,
            Reply::Deadlock => {
                return Err(fault(Errno::DEADLK, "the lock would wait for a process that waits for its own"));
            }
            Reply::Full => {
                return Err(fault(Errno::NOLCK, "there are too many locks of this file, this client or in all"));
            }
        };
        let is_over = call.wish == LockWish::End && reply == Reply::Done && call.lease != 0;
        if is_over {
            self.forget_lease(client, call.lease);
        }
        let lease_ms = u32::try_from(lease_time.0 / 1_000_000).unwrap_or(u32::MAX);
        Ok(Answer::Lock(LockAnswer { lease: if is_over { 0 } else { lease }, lease_ms, said }))
    }

    /// Gives a client a lease that outlasts this run; its number.
    fn begin_lease(&self, who: &Who) -> Outcome<u64> {
        let _one = self.locks.beginning.lock();
        let client = who.client.0;
        // It may have waited for that while the client began a newer epoch, and a lease there.
        if self.changes.epoch_of(client) > who.epoch {
            return Err(fenced(*who));
        }
        let older = {
            let mut state = self.locks.state.lock();
            let older = state.locks.lease_of(client);
            state.locks.end(client);
            older
        };
        if older != 0 {
            self.forget_lease(client, older);
        }
        let noted = || {
            let number = random_number().map_err(|_| Errno::IO)?;
            drop(self.dir.disk.make_file(&self.locks.records, &record_of(client, number))?);
            let synced = self.dir.disk.sync("sync_lease", &self.locks.records);
            // Nothing is locked under it, and nobody is to wait for it after a restart.
            synced.inspect_err(|_| self.forget_lease(client, number))?;
            Ok(number)
        };
        let number = noted().map_err(|errno: Errno| {
            fault(Errno::NOLCK, format!("the lease of a client cannot be noted in the metadata directory: {errno}"))
        })?;
        if !self.locks.state.lock().locks.begin(now(), client, who.epoch, number) {
            self.forget_lease(client, number);
            return Err(fault(Errno::NOLCK, "too many clients have locks"));
        }
        self.locks.wake.notify_all();
        Ok(number)
    }

    /// Refuses what its client has given up meanwhile, or was fenced from. Who has been told of that, or has got a lock of that
    /// client, finds done what others do while they hold this; nothing that may take long is.
    pub(super) fn hold_epoch(&self, who: &Who) -> Outcome<RwLockReadGuard<'_, ()>> {
        let held = self.locks.assigning.read();
        if self.changes.epoch_of(who.client.0) > who.epoch { Err(fenced(*who)) } else { Ok(held) }
    }

    /// Removes the record of a lease under which nothing is locked.
    fn forget_lease(&self, client: u64, number: u64) {
        match self.dir.disk.unlink(&self.locks.records, record_of(client, number).as_bytes()) {
            Ok(()) | Err(Errno::NOENT) => {}
            // After a restart its client has to be waited for.
            Err(error) => tracing::warn!(%error, "the record of a lease that is over cannot be removed"),
        }
    }

    /// The body of the thread that ends leases.
    pub(super) fn keep_leases(&self) {
        // The client that could not be fenced last; others come first.
        let mut last = 0;
        loop {
            let mut state = self.locks.state.lock();
            if state.is_stopped {
                return;
            }
            let mut ended = state.locks.take_ended(now());
            let nap = state.locks.next_end().map(|end| Duration::from_nanos(end.0.saturating_sub(now().0)));
            if ended.is_empty() {
                drop(
                    self.locks
                        .wake
                        .wait_timeout(state, nap.unwrap_or(LOOK_UP).clamp(Duration::from_millis(1), LOOK_UP)),
                );
                continue;
            }
            drop(state);
            // Those that need no fence have ended, and are not told of again.
            ended.sort_unstable_by_key(|ended| (ended.fence.is_some(), ended.client <= last, ended.client));
            let mut failed = false;
            for ended in &ended {
                if ended.fence.is_some() && self.locks.state.lock().is_stopped {
                    return;
                }
                match self.end_lease(ended) {
                    Ok(()) => {}
                    // Whoever cannot be fenced holds up no other.
                    Err(Unended::ByItself) => failed = true,
                    // Of the others a try would take as long, and a stop waits for all of them. They come first the next time.
                    Err(Unended::DataServers) => {
                        (failed, last) = (true, ended.client);
                        break;
                    }
                }
            }
            let state = self.locks.state.lock();
            if failed && !state.is_stopped {
                drop(self.locks.wake.wait_timeout(state, FENCE_AGAIN));
            }
        }
    }

    /// Fences a client whose lease has ended, and gives its locks to others; an error if that has to be tried again.
    fn end_lease(&self, ended: &Ended) -> Result<(), Unended> {
        let Ended { client, number, fence } = *ended;
        let Some(epoch) = fence else {
            self.forget_lease(client, number);
            return Ok(());
        };
        let shown = format!("{client:016x}");
        let complaints = &self.background.complaints;
        complaints.about("lease", &shown, |times| {
            tracing::warn!(client = shown, times, "a client did not renew its locks in time; fencing it");
        });
        let who = Who { client: ClientKey(client), epoch: epoch.saturating_add(1), ..Who::default() };
        // What it asked the metadata server for, and what the data servers were to do for it. A change that was admitted before may
        // still be done: then it is fenced again later, and meanwhile holds up no other.
        let mut why = Unended::ByItself;
        let fenced = self
            .changes
            .note_epoch(&self.dir, who)
            .and_then(|_| self.changes.sync(&self.dir))
            .map_err(std::io::Error::from)
            .and_then(|()| {
                // Those who came before it was noted end what they do.
                drop(self.locks.assigning.write());
                self.objects.fence(&who).inspect_err(|_| why = Unended::DataServers)
            })
            .and_then(|()| match self.changes.is_any_before(client, who.epoch) {
                true => Err(std::io::Error::other("the metadata server is still doing a change for it")),
                false => Ok(()),
            })
            .and_then(|()| {
                let unlinked = self.dir.disk.unlink(&self.locks.records, record_of(client, number).as_bytes());
                unlinked.or_else(|errno| if errno == Errno::NOENT { Ok(()) } else { Err(errno) })?;
                Ok(self.dir.disk.sync("sync_end_of_lease", &self.locks.records)?)
            });
        match fenced {
            Ok(()) => {
                self.locks.state.lock().locks.fenced(client);
                Ok(())
            }
            Err(error) => {
                complaints.counted("locks", |tries| {
                    let what = "its locks stay until nothing that it has sent can be done any more";
                    tracing::warn!(client = shown, tries, %error, "{what}");
                });
                Err(why)
            }
        }
    }
}

/// Why a lease has not ended yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unended {
    /// Something here.
    ByItself,
    /// Data servers did not do it, perhaps after a long time.
    DataServers,
}

/// No file: data servers order what concerns it, and have no object of it.
pub(crate) const NO_FILE: FileKey = FileKey(0);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use impresario_wire::message::{ClusterId, Fault, MetaCall};

    use super::*;
    use crate::meta::{MemoryObjects, MetaOptions, MetaService, make};

    /// A call waits while another client's lease is noted; its client gives it up meanwhile and has another lease by then.
    #[test]
    fn a_call_that_was_given_up_ends_no_newer_lease() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let service = MetaService::open(MetaOptions::new(dir.path(), 4), Arc::<MemoryObjects>::default()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let who = |epoch| Who { client: ClientKey(7), epoch, since: epoch, sequence: 1, ..Who::default() };
        let ask = |lease| {
            let lock = FileLock { owner: 1, pid: 2, start: 0, end: 9, exclusive: true };
            let wish = LockWish::Set { file: FileKey(77), lock, wait: false };
            match service.call_from(session, who(6), MetaCall::Lock(LockCall { lease, wish })) {
                Answer::Lock(answer) => answer,
                other => panic!("{other:?}"),
            }
        };
        let lease = ask(0).lease;
        assert_ne!(lease, 0);
        let late = service.meta.begin_lease(&who(5));
        assert!(late.as_ref().is_err_and(|fault| fault.errno == Fault::FENCED), "{late:?}");
        let again = ask(lease);
        assert!(again.lease == lease && matches!(again.said, LockSaid::Granted { .. }), "{again:?}");
    }

    #[test]
    fn a_lease_is_read_back_from_its_record_and_nothing_else_is() {
        let name = record_of(7, u64::MAX);
        assert_eq!(lease_of(name.as_bytes()), Some((7, u64::MAX)));
        for bad in ["", "-", "7-8", "000000000000000G-0000000000000001", "+000000000000007-0000000000000001"] {
            assert_eq!(lease_of(bad.as_bytes()), None, "{bad}");
        }
    }

    /// The data servers are slow with an append, and meanwhile the lease of its client ends.
    #[test]
    fn no_range_is_assigned_for_a_client_whose_lease_has_ended() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::<MemoryObjects>::default());
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let service = MetaService::open(MetaOptions::new(dir.path(), 4), objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let who = |client, sequence| Who { client: ClientKey(client), epoch: 5, since: 5, sequence, ..Who::default() };
        let path = b"f".to_vec();
        let create = MetaCall::Create { path, mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        let Answer::Opened(opened) = service.call_from(session, who(7, 1), create) else { panic!("not made") };
        let lock = FileLock { owner: 1, pid: 2, start: 0, end: 9, exclusive: true };
        let wish = LockWish::Set { file: opened.file, lock, wait: false };
        let set = MetaCall::Lock(LockCall { lease: 0, wish });
        let Answer::Lock(locked) = service.call_from(session, who(7, 2), set) else { panic!("not locked") };
        let ended = Ended { client: 7, number: locked.lease, fence: Some(5) };
        let meta = service.meta.clone();
        objects.before_next_answer(move || assert_eq!(meta.end_lease(&ended), Ok(())));
        let append = || MetaCall::Append { handle: opened.handle, len_bytes: 100 };
        match service.call_from(session, who(7, 3), append()) {
            Answer::Fault(fault) => assert_eq!(fault.errno, Fault::FENCED),
            other => panic!("{other:?}"),
        }
        assert!(objects.has_answered(), "nobody has asked the data servers");
        let next = service.call_from(session, who(8, 1), append());
        assert!(matches!(next, Answer::Assigned { offset: 0 }), "{next:?}");
        // A range that is just being assigned ends before.
        let held = service.meta.hold_epoch(&who(8, 2)).unwrap();
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| service.meta.end_lease(&Ended { client: 8, number: 1, fence: Some(5) }));
            while service.meta.changes.epoch_of(8) == 5 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(50));
            let is_waiting = !ending.is_finished();
            drop(held);
            assert!(ending.join().unwrap().is_ok() && is_waiting);
        });
    }

    /// A data server is away, and many clients have gone: a stop waits for one attempt, not for one of each client.
    #[test]
    fn a_stop_waits_for_no_more_than_one_data_server_that_is_away() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::<MemoryObjects>::default());
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let lock_lease = Duration::from_millis(200);
        let options = MetaOptions { lock_lease, ..MetaOptions::new(dir.path(), 4) };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        objects.set_away(true);
        objects.set_delay(Duration::from_secs(1));
        for client in 1..=20 {
            let who = Who { client: ClientKey(client), epoch: 5, since: 5, sequence: 1, ..Who::default() };
            let lock = FileLock { owner: 1, pid: 2, start: client, end: client, exclusive: true };
            let wish = LockWish::Set { file: FileKey(77), lock, wait: false };
            let answer = service.call_from(session, who, MetaCall::Lock(LockCall { lease: 0, wish }));
            assert!(matches!(&answer, Answer::Lock(of) if matches!(of.said, LockSaid::Granted { .. })), "{answer:?}");
        }
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while objects.calls() == 0 && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // All of them have ended by then.
        std::thread::sleep(Duration::from_millis(2500));
        let began = std::time::Instant::now();
        let (before, meta) = (objects.calls(), service.meta.clone());
        drop(service);
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        assert!(objects.calls() <= before + 2, "{} after {before}", objects.calls());
        assert_eq!(meta.locks.counts().0.2, 20, "the next run fences them");
        // Once it is back, all are fenced, and none of them in vain holds up the others.
        objects.set_away(false);
        objects.set_delay(Duration::ZERO);
        meta.locks.state.lock().is_stopped = false;
        std::thread::scope(|scope| {
            scope.spawn(|| meta.keep_leases());
            let until = std::time::Instant::now() + Duration::from_secs(20);
            while meta.locks.counts().0.2 > 0 && std::time::Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            meta.locks.stop();
        });
        assert_eq!(meta.locks.counts().0.2, 0);
    }
}
