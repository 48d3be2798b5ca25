//! Locks of byte ranges for several clients, with leases: what the metadata server decides, without I/O.
//!
//! - [`LockTable`]: who holds what, and who waits.
//! - [`Locks`]: the same, and the leases of the clients.
//! - [`put`] and [`carve`]: the rule for the locks of one holder, which clients keep too.
//!
//! **Leases.** A client that takes a lock gets a lease with a number, and renews it. A lease that is not renewed in time ends:
//! the server *fences* the client (no data server takes from it any more what it sent under the lease), and only then gives
//! its locks to others. The client counts from when it asked, the server from when it was asked and longer, so the client
//! stops first. Every call names the lease under which its client believes to hold locks; the client of another lease, or of
//! none, is told that it has lost them.
//!
//! **Epochs.** A request is fenced by its client's epoch. The server knows the epoch of the last renewal; the client may have
//! begun others since, and sends nothing under a lock in an epoch that is more than [`EPOCHS_AHEAD`] newer. The server
//! fences all up to there.
//!
//! **Restarts.** The server notes durably which leases there are before their first lock. When it starts again, all of them
//! are to be *restored*: until each client has said what it holds, or its time is up and it is fenced, no lock is given to
//! anyone.

mod ranges;
mod table;

use impresario_base::Nanos;
use rustc_hash::FxHashMap;

pub use ranges::{Holder, Lock, Range, carve, put};
pub use table::{Limits, LockTable, Taken};

/// How many epochs a client may begin between two renewals of its lease.
pub const EPOCHS_AHEAD: u32 = 1 << 16;

/// Leases at once.
const LEASES_MAX: usize = 65_536;

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    /// Takes or changes a lock.
    Set {
        /// File.
        file: u64,
        /// The lock.
        lock: Lock,
        /// Wait for it.
        wait: bool,
    },
    /// Gives up a range.
    Unlock {
        /// File.
        file: u64,
        /// Whose.
        holder: Holder,
        /// The range.
        range: Range,
    },
    /// Asks what excludes a lock.
    Test {
        /// File.
        file: u64,
        /// The lock.
        lock: Lock,
    },
    /// A holder has exactly these locks of a file, and waits for none.
    Restore {
        /// File.
        file: u64,
        /// Whose.
        holder: Holder,
        /// All of them.
        locks: Vec<Lock>,
    },
    /// Renews the lease.
    Renew {
        /// After a restart of the server: everything was restored.
        whole: bool,
    },
    /// Ends the lease.
    End,
}

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// The lock is held; the version of the file for this client.
    Granted(u64),
    /// This one excludes it.
    Held(Lock),
    /// Nothing excludes it.
    Free,
    /// It waits.
    Waiting,
    /// It would wait for itself.
    Deadlock,
    /// A limit is reached.
    Full,
    /// Done.
    Done,
    /// The server was started again: the client is to restore its locks.
    Restore,
    /// The lease has ended, and with it all locks under it.
    Lost,
    /// Locks of others are still to be restored: ask again.
    Later,
    /// The client is to begin a lease: note it, call [`Locks::begin`], and ask again under it.
    Begin,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Active,
    /// Of an earlier run of the server, and not restored yet.
    Earlier,
    /// It has ended, and its client is being fenced.
    Fencing {
        /// It was of an earlier run: what its client holds is unknown.
        unknown: bool,
    },
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    number: u64,
    until: Nanos,
    epoch: u32,
    state: State,
}

impl Lease {
    /// It is not known what its client holds.
    fn is_unknown(&self) -> bool {
        matches!(self.state, State::Earlier | State::Fencing { unknown: true })
    }
}

/// A lease that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Its client.
    pub client: u64,
    /// Its number.
    pub number: u64,
    /// All epochs up to this one are to be fenced; `None`: the client held nothing, and need not be fenced.
    pub fence: Option<u32>,
}

/// The locks of a cluster, and the leases of its clients.
pub struct Locks {
    table: LockTable,
    leases: FxHashMap<u64, Lease>,
    /// Leases of an earlier run of which it is not known what their clients hold.
    unknown: usize,
    lease: Nanos,
}

impl Locks {
    /// No locks; leases last for `lease` without renewal. `first` differs with every run of the server.
    pub fn new(limits: Limits, lease: Nanos, first: u64) -> Locks {
        Locks { table: LockTable::new(limits, first), leases: FxHashMap::default(), unknown: 0, lease }
    }

    /// A lease that an earlier run noted, of a client whose epoch was at least `epoch`.
    pub fn restore_lease(&mut self, now: Nanos, client: u64, number: u64, epoch: u32) {
        let until = self.end_of_lease(now);
        if self.leases.insert(client, Lease { number, until, epoch, state: State::Earlier }).is_none() {
            self.unknown += 1;
        }
    }

    /// How long a lease lasts after a renewal, as its client is told.
    pub fn lease(&self) -> Nanos {
        self.lease
    }

    /// Locks, requests that wait, and leases.
    pub fn counts(&self) -> (usize, usize, usize) {
        let (locks, waiting) = self.table.counts();
        (locks, waiting, self.leases.len())
    }

    /// Whether locks of an earlier run are still to be restored.
    pub fn is_restoring(&self) -> bool {
        self.unknown > 0
    }

    /// Longer than the client counts: clocks do not run alike.
    fn end_of_lease(&self, now: Nanos) -> Nanos {
        Nanos(now.0.saturating_add(self.lease.0).saturating_add(self.lease.0 / 8))
    }

    /// A client without locks begins a lease; false when there are too many.
    pub fn begin(&mut self, now: Nanos, client: u64, epoch: u32, number: u64) -> bool {
        if self.leases.len() >= LEASES_MAX || self.leases.contains_key(&client) {
            return false;
        }
        let until = self.end_of_lease(now);
        self.leases.insert(client, Lease { number, until, epoch, state: State::Active });
        true
    }

    /// A request of a client that is in `epoch` and believes to have this lease; 0: none.
    pub fn call(&mut self, now: Nanos, client: u64, epoch: u32, number: u64, request: &Request) -> Reply {
        let until = self.end_of_lease(now);
        let is_restoring = self.is_restoring();
        let known = self.leases.get_mut(&client);
        let (needs_lease, ends) = match request {
            Request::Set { .. } => (true, false),
            Request::Restore { locks, .. } => (!locks.is_empty(), false),
            Request::End => (false, true),
            _ => (false, false),
        };
        match known {
            Some(lease) if lease.state != State::Active && number != lease.number => return Reply::Later,
            Some(lease) if matches!(lease.state, State::Fencing { .. }) => return Reply::Lost,
            Some(lease) if number == lease.number => {
                (lease.until, lease.epoch) = (until, lease.epoch.max(epoch));
                if lease.state == State::Earlier {
                    match request {
                        Request::Restore { .. } => {}
                        Request::Renew { whole: true } => {
                            lease.state = State::Active;
                            self.unknown -= 1;
                            return Reply::Done;
                        }
                        Request::End => {}
                        _ => return Reply::Restore,
                    }
                }
                if ends {
                    return Reply::Done;
                }
            }
            // Its client has forgotten it, and what was locked under it.
            Some(_) if number == 0 && needs_lease => return Reply::Begin,
            None if number == 0 && needs_lease => return Reply::Begin,
            _ if number != 0 => return Reply::Lost,
            _ => {}
        }
        match request {
            Request::Set { .. } if is_restoring => Reply::Later,
            Request::Set { file, lock, wait } => match self.table.set(*file, *lock, *wait) {
                Taken::Granted => Reply::Granted(self.table.version(*file, client)),
                Taken::Held(held) => Reply::Held(held),
                Taken::Waiting => Reply::Waiting,
                Taken::Deadlock => Reply::Deadlock,
                Taken::Full => Reply::Full,
            },
            Request::Unlock { file, holder, range } => match self.table.unlock(*file, *holder, *range) {
                true => Reply::Done,
                false => Reply::Full,
            },
            Request::Test { .. } if is_restoring => Reply::Later,
            Request::Test { file, lock } => self.table.test(*file, lock).map_or(Reply::Free, Reply::Held),
            Request::Restore { file, holder, locks } => match self.table.restore(*file, *holder, locks) {
                true => Reply::Done,
                false => Reply::Lost,
            },
            Request::Renew { .. } | Request::End => Reply::Done,
        }
    }

    /// The lease of a client; 0: none.
    pub fn lease_of(&self, client: u64) -> u64 {
        self.leases.get(&client).map_or(0, |lease| lease.number)
    }

    /// The client itself has given up its lease, and everything under it.
    pub fn end(&mut self, client: u64) {
        if self.leases.remove(&client).is_some_and(|lease| lease.is_unknown()) {
            self.unknown -= 1;
        }
        self.table.remove_client(client);
    }

    /// The leases that have ended. Those that are to be fenced end with [`Locks::fenced`], the others have ended.
    pub fn take_ended(&mut self, now: Nanos) -> Vec<Ended> {
        let over = self.leases.iter().filter(|(_, lease)| lease.until <= now);
        let over: Vec<(u64, Lease)> = over.map(|(client, lease)| (*client, *lease)).collect();
        let mut ended = Vec::with_capacity(over.len());
        for (client, lease) in over {
            let unknown = lease.is_unknown();
            let fence = (unknown || self.table.has_any(client)).then(|| lease.epoch.saturating_add(EPOCHS_AHEAD));
            match (self.leases.get_mut(&client), fence) {
                (Some(lease), Some(_)) => lease.state = State::Fencing { unknown },
                _ => drop(self.leases.remove(&client)),
            }
            ended.push(Ended { client, number: lease.number, fence });
        }
        ended
    }

    /// A client is fenced: what it held goes to others.
    pub fn fenced(&mut self, client: u64) {
        if self.leases.get(&client).is_some_and(|lease| matches!(lease.state, State::Fencing { .. })) {
            self.end(client);
        }
    }

    /// When the next lease ends that is not renewed.
    pub fn next_end(&self) -> Option<Nanos> {
        self.leases.values().map(|lease| lease.until).min()
    }
}

#[cfg(test)]
mod tests;
