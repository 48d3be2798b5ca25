//! What one address may have of a server: connections, and bytes of requests and answers under way. All clients on Unix
//! sockets are one address.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use rustc_hash::FxHashMap;

/// Addresses without connections are forgotten when there are more than this, and twice as many as are in use.
const IDLE_ADDRESSES: usize = 64;
/// Addresses that are suspect are forgotten so late, and only so many of them are remembered without connections.
pub(crate) const SUSPECT_FOR: Duration = Duration::from_secs(300);
const IDLE_SUSPECTS: usize = 4096;

/// The accounts of all addresses that have connections.
pub(crate) struct Addresses {
    bytes_max: u64,
    accounts: Mutex<Accounts>,
}

#[derive(Default)]
struct Accounts {
    by_host: FxHashMap<String, Arc<Account>>,
    prune_at: usize,
}

/// The account of an address.
pub(crate) struct Account {
    bytes_max: u64,
    /// What its times count from.
    began: Instant,
    /// It is suspect until then, ms; 0: it never was.
    suspect_until_ms: AtomicU64,
    bytes: AtomicU64,
    connections: AtomicU32,
    /// Of these, servers.
    servers: AtomicU32,
    /// Threads that wait for bytes.
    waiting: AtomicU32,
    lock: Mutex<()>,
    freed: Condvar,
}

/// Tells addresses apart that have connections.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct AddressId(usize);

/// A connection's entry; counts as long as it lives.
pub(crate) struct Tenancy(Arc<Account>, AtomicBool);

/// Bytes that a call has of its address's share; given back when dropped.
pub(crate) struct Share {
    account: Arc<Account>,
    bytes: u64,
}

impl Addresses {
    /// Each address has at most `bytes_max` under way, or one request.
    pub(crate) fn new(bytes_max: u64) -> Addresses {
        Addresses { bytes_max, accounts: Mutex::default() }
    }

    /// An entry for a connection from this host. The error is how many it has beside those of servers, which are
    /// `connections_max` or more.
    pub(crate) fn enter(&self, host: &str, connections_max: u32) -> Result<Tenancy, u32> {
        let mut accounts = self.accounts.lock();
        if accounts.by_host.len() >= accounts.prune_at.max(IDLE_ADDRESSES) {
            let mut suspects = 0;
            accounts.by_host.retain(|_, account| {
                let is_suspect = account.is_suspect();
                suspects += usize::from(is_suspect);
                account.connections.load(Ordering::Acquire) > 0 || is_suspect && suspects <= IDLE_SUSPECTS
            });
            accounts.prune_at = accounts.by_host.len() * 2;
        }
        let account = match accounts.by_host.get(host) {
            Some(account) => account.clone(),
            None => {
                let account = Arc::new(Account::new(self.bytes_max));
                accounts.by_host.insert(host.into(), account.clone());
                account
            }
        };
        // Under the lock, so that an account with a connection is never forgotten.
        let servers = account.servers.load(Ordering::Acquire);
        let has = account.connections.load(Ordering::Acquire).saturating_sub(servers);
        if has >= connections_max {
            return Err(has);
        }
        account.connections.fetch_add(1, Ordering::AcqRel);
        Ok(Tenancy(account, AtomicBool::default()))
    }
}

impl Account {
    fn new(bytes_max: u64) -> Account {
        let (suspect_until_ms, bytes, connections, servers, waiting, lock, freed) = Default::default();
        Account {
            bytes_max,
            began: Instant::now(),
            suspect_until_ms,
            bytes,
            connections,
            servers,
            waiting,
            lock,
            freed,
        }
    }

    fn is_suspect(&self) -> bool {
        let until = self.suspect_until_ms.load(Ordering::Relaxed);
        until > 0 && (self.began.elapsed().as_millis() as u64) < until
    }

    fn suspect(&self, lasting: Duration) {
        let until = self.began.elapsed() + lasting;
        self.suspect_until_ms.fetch_max(until.as_millis() as u64, Ordering::Relaxed);
    }

    /// Takes the bytes if they fit, or nothing else is under way.
    fn take(&self, bytes: u64) -> bool {
        let fits = |has: u64| (has == 0 || has + bytes <= self.bytes_max).then_some(has + bytes);
        self.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).is_ok()
    }
}

impl Tenancy {
    /// Of which address it is.
    pub(crate) fn address(&self) -> AddressId {
        AddressId(Arc::as_ptr(&self.0) as usize)
    }

    /// It is the connection of a server, which has proved that: it takes none of those that its address may have. An I/O node
    /// brings the connections of all its clients.
    pub(crate) fn is_of_a_server(&self) {
        if !self.1.swap(true, Ordering::AcqRel) {
            self.0.servers.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The address has held memory without progress while others waited for it.
    pub(crate) fn suspect(&self) {
        self.0.suspect(SUSPECT_FOR);
    }

    /// It did so lately.
    pub(crate) fn is_suspect(&self) -> bool {
        self.0.is_suspect()
    }

    /// Bytes that the address has under way.
    pub(crate) fn bytes_under_way(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Connections that the address has, this one and those that are about to end included.
    pub(crate) fn connections(&self) -> u32 {
        self.0.connections.load(Ordering::Acquire)
    }

    /// A share of this size; waits for it at most `patience`. Calls without bytes have one always.
    pub(crate) fn share(&self, bytes: u64, patience: Duration) -> Option<Share> {
        let account = &self.0;
        let share = || Share { account: account.clone(), bytes };
        if bytes == 0 || account.take(bytes) {
            return Some(share());
        }
        let deadline = Instant::now() + patience;
        let mut guard = account.lock.lock();
        account.waiting.fetch_add(1, Ordering::SeqCst);
        let taken = loop {
            if account.take(bytes) {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            guard = account.freed.wait_timeout(guard, left).0;
        };
        account.waiting.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        taken.then(share)
    }
}

impl Share {
    /// More bytes of the same request, which do not wait: what was begun is to be completed.
    pub(crate) fn grow(&mut self, bytes: u64) {
        self.account.bytes.fetch_add(bytes, Ordering::SeqCst);
        self.bytes += bytes;
    }

    /// Gives back what it has beyond `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let spare = self.bytes.saturating_sub(bytes);
        if spare == 0 {
            return;
        }
        self.bytes -= spare;
        self.account.bytes.fetch_sub(spare, Ordering::SeqCst);
        if self.account.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.account.lock.lock());
            self.account.freed.notify_all();
        }
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
        if *self.1.get_mut() {
            self.0.servers.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_share_and_no_more() {
        let addresses = Addresses::new(1000);
        let (here, there) = (addresses.enter("a", 2).unwrap(), addresses.enter("b", 2).unwrap());
        let also_here = addresses.enter("a", 2).unwrap();
        assert_eq!(addresses.enter("a", 2).err(), Some(2));
        let first = here.share(600, Duration::ZERO).unwrap();
        assert!(also_here.share(600, Duration::ZERO).is_none() && also_here.share(0, Duration::ZERO).is_some());
        let large = there.share(5000, Duration::ZERO).expect("one request always");
        assert!(there.share(1, Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| also_here.share(600, Duration::from_secs(60)).is_some());
            while also_here.0.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            drop(first);
            assert!(waiting.join().unwrap());
        });
        drop(large);
        assert_eq!((here.0.bytes.load(Ordering::SeqCst), there.0.bytes.load(Ordering::SeqCst)), (0, 0));
        drop((here, also_here));
        let server = addresses.enter("a", 1).expect("its connections have ended");
        server.is_of_a_server();
        server.is_of_a_server();
        let client = addresses.enter("a", 1).expect("a server's connection is beside them");
        assert_eq!(addresses.enter("a", 1).err(), Some(1));
        drop(server);
        assert_eq!(addresses.enter("a", 1).err(), Some(1));
        drop(client);
        addresses.enter("a", 1).expect("all have ended");
    }

    #[test]
    fn addresses_that_left_are_forgotten() {
        let addresses = Addresses::new(1000);
        let stays = addresses.enter("stays", 1).unwrap();
        for i in 0..10_000 {
            addresses.enter(&i.to_string(), 1).unwrap();
        }
        assert!(addresses.accounts.lock().by_host.len() <= 2 * IDLE_ADDRESSES);
        assert_eq!(addresses.enter("stays", 1).err(), Some(1));
        drop(stays);
        // It cannot become a stranger by leaving, until it is trusted again, nor can very many.
        addresses.enter("suspect", 1).unwrap().suspect();
        addresses.enter("trusted", 1).unwrap().0.suspect(Duration::ZERO);
        for i in 0..2 * IDLE_SUSPECTS {
            let is_suspect = addresses.enter(&i.to_string(), 1).unwrap();
            if i > 2 * IDLE_ADDRESSES {
                is_suspect.suspect();
            } else if i == 2 * IDLE_ADDRESSES {
                assert!(addresses.enter("suspect", 1).unwrap().is_suspect());
                assert!(!addresses.enter("trusted", 1).unwrap().is_suspect());
            }
        }
        assert!(addresses.accounts.lock().by_host.len() <= 2 * IDLE_SUSPECTS + 1);
    }
}
