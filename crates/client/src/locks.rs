//! Locks of byte ranges, kept by the metadata server for all clients.
//!
//! The client remembers what it holds, and tells the server again when that was restarted, or when the answer to a call was
//! lost. While it has a lease, a thread renews it, four times in its duration.

use std::sync::Weak;
use std::time::{Duration, Instant};

use impresario_base::lock::MutexGuard;
use impresario_wire::{Answer, Call, Fault, FileKey, FileLock, LockAnswer, LockCall, LockSaid, LockWish, MetaCall};

use crate::client::Client;
use crate::error::{ClientError, Errno};
use crate::file::File;
use crate::leases::{LeaseTime, OWNER_LOCKS_MAX, Owned, file_lock, lease_time};
use crate::striped::unexpected;

/// A lease under which nothing is locked is given up after this time.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long the server may restore locks before a question fails, beside the time of a call.
const RESTORE_MAX: Duration = Duration::from_secs(20);
/// How long the server is told that an owner does not wait any more, before that is left to the thread that renews.
const WITHDRAW_MAX: Duration = Duration::from_secs(1);
/// How long an attempt that does not wait may take while the server learns the locks of all clients again.
const RESTORE_WAIT_MAX: Duration = Duration::from_secs(30);
/// First and longest interval in which a lock is asked for again.
const ASK_EVERY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));
/// A request that has waited for long is asked for again after this part of that time.
const ASK_PART: u32 = 16;
/// How often a client asks while the server restores locks.
const RESTORE_STEP: Duration = Duration::from_millis(50);

/// What became of an attempt to lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Locked {
    /// The lock is held.
    Granted {
        /// Differs from that of the file's lock before when another client may have changed the file under an exclusive lock
        /// in between.
        version: u64,
    },
    /// This lock excludes it.
    Held(Other),
    /// It waits; ask again with the same lock.
    Waiting,
    /// The metadata server was started again and does not know the locks of all clients yet; ask again in a moment.
    Later,
}

/// A lock that excludes another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Other {
    /// The lock.
    pub lock: FileLock,
    /// Its owner is one of this client.
    pub own: bool,
}

/// A lock that a program asks for, tried until that is decided: with `wait` until it is granted, else only until the server
/// has an answer.
#[derive(Debug)]
pub struct LockAttempt {
    lock: FileLock,
    wait: bool,
    since: Instant,
    failing_since: Option<Instant>,
}

/// What came of one more try.
#[derive(Debug)]
pub enum Tried {
    /// As [`Locked::Granted`].
    Granted {
        /// As there.
        version: u64,
    },
    /// Another lock excludes it, and the program does not wait.
    Excluded,
    /// Not decided; try again after [`LockAttempt::pause`].
    Undecided,
    /// The same, and the server did not answer.
    Unanswered(ClientError),
    /// It cannot be had.
    Failed(ClientError),
}

impl LockAttempt {
    /// How long one try may take, so that who waits can be looked after in between.
    pub const TRY_MAX: Duration = Duration::from_secs(1);

    /// An attempt that begins now.
    pub fn new(lock: FileLock, wait: bool) -> LockAttempt {
        LockAttempt { lock, wait, since: Instant::now(), failing_since: None }
    }

    /// Tries once, for at most `max`.
    pub fn try_once(&mut self, file: &File, max: Duration) -> Tried {
        let began = Instant::now();
        match file.lock(self.lock, self.wait, began + max) {
            Ok(Locked::Granted { version }) => return Tried::Granted { version },
            Ok(Locked::Held(_)) if !self.wait => return Tried::Excluded,
            Ok(Locked::Later) if !self.wait && self.since.elapsed() >= RESTORE_WAIT_MAX => {
                let what = "the metadata server does not know the locks of all clients again".into();
                return Tried::Failed(ClientError::System { what, errno: Errno(libc::EIO) });
            }
            Ok(Locked::Held(_) | Locked::Waiting | Locked::Later) => self.failing_since = None,
            Err(error) => {
                let is_final = matches!(error.errno(), libc::EDEADLK | libc::ENOLCK | libc::EOPNOTSUPP);
                let since = *self.failing_since.get_or_insert(began);
                if is_final || file.is_lost() || since.elapsed() >= file.timeout() {
                    return Tried::Failed(error);
                }
                return Tried::Unanswered(error);
            }
        }
        Tried::Undecided
    }

    /// How long to wait before the next try: longer the longer it has lasted.
    pub fn pause(&self) -> Duration {
        (self.since.elapsed() / ASK_PART).clamp(ASK_EVERY.0, ASK_EVERY.1)
    }

    /// Ends the attempt.
    pub fn give_up(self, file: &File) {
        if self.wait {
            file.withdraw(self.lock.owner);
        }
    }
}

impl File {
    /// Takes a lock, or changes what its owner has on those bytes. With `wait` it waits at the server when it cannot be had,
    /// in order of arrival, as long as it is asked for again at least once in the time of a lease; [`withdraw`](Self::withdraw)
    /// ends that.
    pub fn lock(&self, lock: FileLock, wait: bool, deadline: Instant) -> Result<Locked, ClientError> {
        let (client, owned) = (self.client(), (self.key(), lock.owner));
        let leases = &client.identity().leases;
        let deadline = deadline.max(Instant::now());
        loop {
            let ending = leases.state.lock();
            if ending.is_ending() {
                drop(leases.wait(ending, deadline));
            } else {
                drop(ending);
            }
            if leases.is_lost(owned.0, self.losses()) {
                return Err(ClientError::LocksLost { file: owned.0 });
            }
            let order = client.lock_orders.of(owned.0.0);
            if leases.of(owned).len() >= OWNER_LOCKS_MAX {
                return Err(too_many());
            }
            let wish = LockWish::Set { file: owned.0, lock, wait };
            let until = deadline.max(Instant::now() + Duration::from_millis(100));
            let answer = client.ask_locks(wish, true, until).inspect_err(|error| {
                // It may have been granted nevertheless.
                if !is_told(error) {
                    leases.doubt(owned);
                }
            })?;
            match answer.said {
                LockSaid::Granted { version } if leases.take(owned.0, &lock, answer.lease) => {
                    return Ok(Locked::Granted { version });
                }
                LockSaid::Held { lock, own } => return Ok(Locked::Held(Other { lock, own })),
                LockSaid::Waiting => return Ok(Locked::Waiting),
                LockSaid::Granted { .. } | LockSaid::Lost | LockSaid::Restore | LockSaid::Later => {}
                said => return Err(client.unexpected_lock(said)),
            }
            drop(order);
            if answer.said != LockSaid::Lost || Instant::now() >= deadline {
                return Ok(Locked::Later);
            }
        }
    }

    /// Gives up what an owner has in a range, the last byte included. When this returns, the owner has it no more as far as
    /// this client is concerned; if the server could not be told, it will be.
    pub fn unlock(&self, owner: u64, start: u64, end: u64) -> Result<(), ClientError> {
        let (client, owned) = (self.client(), (self.key(), owner));
        let leases = &client.identity().leases;
        let _order = client.lock_orders.of(owned.0.0);
        let before = leases.of(owned);
        if before.is_empty() {
            return Ok(());
        }
        leases.give_up(owned, start, end);
        if leases.of(owned).len() > OWNER_LOCKS_MAX {
            leases.set(owned, before);
            return Err(too_many());
        }
        match client.ask_locks(LockWish::Unlock { file: owned.0, owner, start, end }, false, client.deadline()) {
            Ok(LockAnswer { said: LockSaid::Done | LockSaid::Lost, .. }) => Ok(()),
            // Nothing was done: one more lock would be one too many.
            Err(error) if error.errno() == libc::ENOLCK => {
                leases.set(owned, before);
                Err(error)
            }
            told => {
                tracing::debug!(?told, "the server will be told of an unlock");
                leases.doubt(owned);
                Ok(())
            }
        }
    }

    /// The lock that excludes this one, if there is one.
    pub fn test_lock(&self, lock: FileLock) -> Result<Option<Other>, ClientError> {
        let client = self.client();
        let until = client.deadline() + RESTORE_MAX;
        loop {
            let answer = client.ask_locks(LockWish::Test { file: self.key(), lock }, false, client.deadline())?;
            match answer.said {
                LockSaid::Held { lock, own } => return Ok(Some(Other { lock, own })),
                LockSaid::Free => return Ok(None),
                LockSaid::Lost | LockSaid::Restore | LockSaid::Later if Instant::now() < until => {
                    std::thread::sleep(RESTORE_STEP);
                }
                said => return Err(client.unexpected_lock(said)),
            }
        }
    }

    /// How long a call takes at most.
    pub fn timeout(&self) -> Duration {
        self.client().timeout()
    }

    /// Whether locks of the file were lost since it was opened: then it can only be closed.
    pub fn is_lost(&self) -> bool {
        self.client().identity().leases.is_lost(self.key(), self.losses())
    }

    /// An owner does not wait for a lock of the file any more. Takes a second at most; a server that does not answer is told
    /// later.
    pub fn withdraw(&self, owner: u64) {
        let (client, owned) = (self.client(), (self.key(), owner));
        let _order = client.lock_orders.of(owned.0.0);
        if !client.restore(owned, Instant::now() + WITHDRAW_MAX) {
            client.identity().leases.doubt(owned);
        }
    }
}

impl Client {
    /// Whether the metadata server keeps locks for all clients; an I/O node in front of a folder does not.
    pub fn serves_locks(&self) -> Result<bool, ClientError> {
        match self.ask_locks(LockWish::Renew { whole: false }, false, self.deadline()) {
            Ok(_) => Ok(true),
            Err(error) if error.errno() == libc::EOPNOTSUPP => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Has `tell` called with the files when locks are lost or the lease has run out, once for each time: what is cached of
    /// them is not to be used. Only the first to ask is told.
    pub fn when_locks_are_lost(&self, tell: impl Fn(&[FileKey]) + Send + Sync + 'static) {
        self.identity().leases.when_lost(Box::new(tell));
    }

    /// For how long at most a node may go by what it was told of files, and not longer than `most`: while it has locks, others
    /// may get them when its lease has run out.
    pub fn keeps(&self, most: Duration) -> Duration {
        self.identity().leases.keeps(most)
    }

    /// One call about locks. `begins`: it may begin a lease.
    fn ask_locks(&self, wish: LockWish, begins: bool, deadline: Instant) -> Result<LockAnswer, ClientError> {
        let leases = &self.identity().leases;
        let (mut sent, epoch) = (lease_time(), self.identity().epoch());
        let mut number = leases.used(begins, sent);
        // Two must not begin a lease at a time: the second would end the first.
        let _beginning = if begins && number == 0 {
            let beginning = self.beginning_lease.lock();
            sent = lease_time();
            number = leases.used(begins, sent);
            Some(beginning)
        } else {
            None
        };
        let call = MetaCall::Lock(LockCall { lease: number, wish });
        let call = Call::Meta { who: self.identity().who(), call };
        let reply = self.meta_link().call(call, &[], None, deadline)?;
        let Answer::Lock(answer) = reply.answer else { return Err(unexpected(&reply)) };
        match answer.said {
            LockSaid::Lost if number != 0 => leases.lose(number),
            LockSaid::Lost => {}
            _ if answer.lease != 0 && (number == answer.lease || (number == 0 && begins)) => {
                leases.renewed(number, answer.lease, Duration::from_millis(answer.lease_ms.into()), sent, epoch);
                self.keep_lease();
            }
            _ => {}
        }
        if answer.said == LockSaid::Restore {
            leases.state.lock().restores = true;
            leases.changed.notify_all();
        }
        Ok(answer)
    }

    fn unexpected_lock(&self, said: LockSaid) -> ClientError {
        let what = format!("its answer does not belong to the call: {said:?}");
        ClientError::Protocol { peer: self.meta_link().peer(), what }
    }

    /// Tells the server what an owner has; false when that did not succeed. Call with the file's order held.
    fn restore(&self, owned: Owned, deadline: Instant) -> bool {
        let leases = &self.identity().leases;
        leases.state.lock().doubts.remove(&owned);
        let locks: Vec<FileLock> = leases.of(owned).iter().map(file_lock).collect();
        let wish = LockWish::Restore { file: owned.0, owner: owned.1, locks };
        match self.ask_locks(wish, false, deadline) {
            Ok(LockAnswer { said: LockSaid::Done | LockSaid::Lost, .. }) => true,
            told => {
                tracing::debug!(?told, "locks could not be restored");
                false
            }
        }
    }

    fn keep_lease(&self) {
        let mut state = self.identity().leases.state.lock();
        if !state.is_kept {
            let client = self.own.clone();
            let keeper = std::thread::Builder::new().name("locks".into()).stack_size(128 << 10);
            // Without it the lease runs out, which is safe.
            state.is_kept = keeper.spawn(move || keep(&client)).is_ok();
        }
    }

    /// One round of the thread that renews the lease; false when there is none any more.
    fn keep_round(&self) -> bool {
        let leases = &self.identity().leases;
        leases.note_lapse();
        if !leases.finish_ending() {
            return true;
        }
        let is_due = {
            let mut state = leases.state.lock();
            if state.number == 0 {
                state.is_kept = false;
                return false;
            }
            let since = |at: Option<LeaseTime>| at.map_or(Duration::MAX, |at| lease_time().saturating_sub(at));
            std::mem::take(&mut state.hurries) || since(state.renewed) >= state.lease / 4
        };
        // Held until the server has answered: a lease that begins meanwhile must not meet the end of this one.
        if let Some(_beginning) = self.beginning_lease.try_lock()
            && let Some(number) = leases.give_up_idle(IDLE_MAX)
        {
            let call = MetaCall::Lock(LockCall { lease: number, wish: LockWish::End });
            let call = Call::Meta { who: self.identity().who(), call };
            if let Err(error) = self.meta_link().call(call, &[], None, self.deadline()) {
                tracing::debug!(%error, "a lease runs out by itself");
            }
            return true;
        }
        let patience = Instant::now() + self.timeout().min(Duration::from_secs(2));
        if is_due && let Err(error) = self.ask_locks(LockWish::Renew { whole: false }, false, patience) {
            tracing::debug!(%error, "the lease of locks could not be renewed");
            return true;
        }
        let (restores, owners): (bool, Vec<Owned>) = {
            let mut state = leases.state.lock();
            let restores = std::mem::take(&mut state.restores);
            let owners = state.doubts.iter().copied();
            (restores, if restores { owners.chain(state.held.keys().copied()).collect() } else { owners.collect() })
        };
        let mut is_whole = true;
        for owned in owners {
            let _order = self.lock_orders.of(owned.0.0);
            if !self.restore(owned, self.deadline()) {
                leases.doubt(owned);
                is_whole = false;
                break;
            }
        }
        if restores && (!is_whole || self.ask_locks(LockWish::Renew { whole: true }, false, patience).is_err()) {
            leases.state.lock().restores = true;
        }
        true
    }
}

/// The server has answered, and done nothing.
fn is_told(error: &ClientError) -> bool {
    let refused = |fault: &Fault| matches!(fault.errno, libc::EDEADLK | libc::ENOLCK | libc::EOPNOTSUPP | libc::EINVAL);
    matches!(error, ClientError::Fault { fault, .. } if refused(fault))
}

fn too_many() -> ClientError {
    ClientError::System {
        what: format!("locking: a process has at most {OWNER_LOCKS_MAX} locks of one file"),
        errno: Errno(libc::ENOLCK),
    }
}

/// Calls about the same locks are made one after the other, so that the server does them in the order in which they are
/// noted here.
#[derive(Default)]
pub(crate) struct Orders([impresario_base::lock::Mutex<()>; 32]);

impl Orders {
    fn of(&self, file: u64) -> Option<MutexGuard<'_, ()>> {
        self.0.get((file % 32) as usize).map(|order| order.lock())
    }
}

/// Ends with the lease, or with the client.
fn keep(client: &Weak<Client>) {
    loop {
        let nap = {
            let Some(client) = client.upgrade() else { return };
            if !client.keep_round() {
                return;
            }
            let leases = &client.identity().leases;
            let state = leases.state.lock();
            let is_pressed = state.hurries || state.restores || !state.doubts.is_empty() || state.is_ending();
            let nap = if is_pressed { Duration::from_millis(20) } else { state.lease / 16 };
            nap.clamp(Duration::from_millis(5), Duration::from_millis(500))
        };
        // Not on the condition: the client may be gone meanwhile.
        std::thread::sleep(nap);
    }
}
