//! Bounded payload memory: how many bytes of requests and replies a server holds, and where they lie.
//!
//! Two things are kept apart. A [`Reservation`] is *permission*: [`impresario_node::credits`] says who has it, and here
//! threads wait for it. A [`Buffer`] is *storage*, recycled by size so that the data path neither faults in fresh pages nor
//! zeroes memory for each request.

use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_node::credits::{CREDIT_MIN_BYTES, Credit, Credits, Standing, Ticket};
use impresario_node::session::SIGN_EVERY;
use rustc_hash::FxHashMap;

/// Smallest recycled buffer, bytes.
const CLASS_MIN_BYTES: usize = CREDIT_MIN_BYTES as usize;
/// Number of size classes: 512 B, 1 KiB … 64 MiB.
const CLASSES: usize = 18;

/// The payload memory of one server.
pub struct PayloadPool {
    limit_bytes: u64,
    /// Who has no more under way is modest.
    modest_bytes: u64,
    /// Called now and then while requests wait: connections that hold memory without using it are to be closed.
    relief: OnceLock<Box<dyn Fn() + Send + Sync>>,
    account: Mutex<Account>,
    idle: Mutex<Idle>,
}

struct Account {
    credits: Credits,
    /// The threads of requests that wait.
    waiting: FxHashMap<Ticket, Arc<Waiter>>,
}

struct Waiter {
    /// What it waits for, once it has it.
    credit: Mutex<Option<Credit>>,
    thread: Thread,
}

/// Buffers that nobody uses, by size class.
#[derive(Default)]
struct Idle {
    classes: [Class; CLASSES],
    bytes: u64,
    /// How often a buffer was asked for: tells which class was not asked for longest.
    asked: u64,
}

#[derive(Default)]
struct Class {
    buffers: Vec<Vec<u8>>,
    last_asked: u64,
}

impl Idle {
    /// A buffer of this class, if one is idle.
    fn take(&mut self, class: usize) -> Option<Vec<u8>> {
        self.asked += 1;
        let class = self.classes.get_mut(class)?;
        class.last_asked = self.asked;
        let buffer = class.buffers.pop()?;
        self.bytes -= buffer.len() as u64;
        Some(buffer)
    }

    /// Keeps a buffer of this class within `room` bytes, in the place of buffers of classes that were not asked for since:
    /// what one load left idle must not keep the next one, whose requests have another size, from recycling its own.
    /// Returns what is to be given back to the system, out of the lock.
    fn keep(&mut self, class: usize, buffer: Vec<u8>, room: u64) -> Vec<Vec<u8>> {
        let mut given_back = Vec::new();
        let len = buffer.len() as u64;
        let Some(last_asked) = self.classes.get(class).map(|own| own.last_asked) else { return vec![buffer] };
        while self.bytes + len > room {
            let older = self.classes.iter_mut().filter(|c| !c.buffers.is_empty() && c.last_asked < last_asked);
            let Some(stale) = older.min_by_key(|c| c.last_asked).and_then(|c| c.buffers.pop()) else { break };
            self.bytes -= stale.len() as u64;
            given_back.push(stale);
        }
        match self.classes.get_mut(class).filter(|_| self.bytes + len <= room) {
            Some(own) => {
                self.bytes += len;
                own.buffers.push(buffer);
            }
            None => given_back.push(buffer),
        }
        given_back
    }
}

impl PayloadPool {
    /// A pool that admits `limit_bytes` at once.
    pub fn new(limit_bytes: u64) -> Arc<PayloadPool> {
        PayloadPool::with_headroom(limit_bytes, 0)
    }

    /// A pool with a headroom for a write of at most `write_max_bytes`, if it is large enough for one.
    pub fn with_headroom(limit_bytes: u64, write_max_bytes: u64) -> Arc<PayloadPool> {
        let credits = Credits::new(limit_bytes, write_max_bytes);
        let modest_bytes = credits.modest_bytes();
        let account = Mutex::new(Account { credits, waiting: FxHashMap::default() });
        let (idle, relief) = Default::default();
        Arc::new(PayloadPool { limit_bytes, modest_bytes, relief, account, idle })
    }

    /// Names what closes connections that hold memory without using it, once.
    pub(crate) fn relieve_by(&self, relief: impl Fn() + Send + Sync + 'static) {
        let _ = self.relief.set(Box::new(relief));
    }

    /// The bytes of a write that are to be reserved first; the rest as they come.
    pub(crate) fn first_slice_bytes(&self, len: u64) -> u64 {
        self.account.lock().credits.first_slice_bytes(len)
    }

    /// The standing of a peer that is not suspect, for a request whose credit is asked for at once and that makes
    /// `under_way_bytes` of its address. A peer that has little does not wait for those that have much.
    pub(crate) fn standing(&self, under_way_bytes: u64) -> Standing {
        if under_way_bytes <= self.modest_bytes { Standing::Modest } else { Standing::Usual }
    }

    /// Permission for `len` bytes; waits its turn, at most `patience`.
    pub fn reserve(self: &Arc<Self>, len: u64, patience: Duration) -> Option<Reservation> {
        self.reserve_for(Standing::Usual, len, patience, &|| {})
    }

    /// The same for a peer of this standing; [`Standing::Usual`] where `len` is a part of what is to come. Calls `waits` before
    /// it waits, and every [`SIGN_EVERY`] while it does.
    pub(crate) fn reserve_for(
        self: &Arc<Self>,
        standing: Standing,
        len: u64,
        patience: Duration,
        waits: &dyn Fn(),
    ) -> Option<Reservation> {
        let mut account = self.account.lock();
        let bytes = account.credits.bytes_for(len);
        let credit = match account.credits.ask(bytes, standing) {
            Ok(credit) => credit,
            Err(ticket) => {
                let waiter = account.enter(ticket);
                drop(account);
                self.wait_for(ticket, &waiter, patience, waits)?
            }
        };
        Some(Reservation { pool: self.clone(), credit })
    }

    /// Permission for bytes that are here already: it may exceed the limit, and then others wait.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Reservation {
        let credit = self.account.lock().credits.charge(bytes);
        Reservation { pool: self.clone(), credit }
    }

    /// Waits for credit, at most `patience`. Who waits for long asks for relief.
    fn wait_for(&self, ticket: Ticket, waiter: &Waiter, patience: Duration, waits: &dyn Fn()) -> Option<Credit> {
        let deadline = Instant::now() + patience;
        loop {
            let credit = waiter.credit.lock().take();
            if credit.is_some() {
                return credit;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let mut account = self.account.lock();
                if account.waiting.remove(&ticket).is_some() {
                    account.credits.give_up(ticket);
                    account.grant();
                }
                return waiter.credit.lock().take();
            }
            waits();
            if waiter.credit.lock().is_none() {
                std::thread::park_timeout(left.min(SIGN_EVERY));
            }
            if waiter.credit.lock().is_none()
                && self.is_short()
                && let Some(relief) = self.relief.get()
            {
                relief();
            }
        }
    }

    /// Storage for `len` bytes. Its content is unspecified (what an earlier request left there).
    pub fn buffer(self: &Arc<Self>, len: usize) -> Buffer {
        let Some(class) = class_of(len) else {
            return Buffer { pool: self.clone(), bytes: vec![0; len], len };
        };
        let recycled = self.idle.lock().take(class);
        let bytes = recycled.unwrap_or_else(|| {
            self.make_room();
            vec![0; CLASS_MIN_BYTES << class]
        });
        Buffer { pool: self.clone(), bytes, len }
    }

    /// Bytes reserved now, most ever, limit.
    pub fn usage_bytes(&self) -> (u64, u64, u64) {
        self.account.lock().credits.usage_bytes()
    }

    /// True when answers that were not reserved beforehand have exceeded the limit.
    pub(crate) fn is_over(&self) -> bool {
        self.account.lock().credits.is_over()
    }

    /// True while a request waits for memory: then no peer may hold memory without progress.
    pub fn is_short(&self) -> bool {
        self.account.lock().credits.is_short()
    }

    /// Gives idle buffers of other sizes back to the system when, with what is in use, they would exceed the limit.
    fn make_room(&self) {
        let used_bytes = self.usage_bytes().0;
        let mut idle = self.idle.lock();
        if idle.bytes + used_bytes > self.limit_bytes {
            let given_back = std::mem::take(&mut *idle);
            drop(idle);
            drop(given_back);
        }
    }

    fn recycle(&self, bytes: Vec<u8>) {
        // At most a quarter of the limit is kept for reuse, and nothing when what is in use comes near the limit
        // anyway.
        let room = self.limit_bytes.saturating_sub(self.usage_bytes().0).min(self.limit_bytes / 4);
        let Some(class) = class_of(bytes.len()).filter(|class| CLASS_MIN_BYTES << class == bytes.len()) else { return };
        let given_back = self.idle.lock().keep(class, bytes, room);
        drop(given_back);
    }
}

impl Account {
    /// This thread waits.
    fn enter(&mut self, ticket: Ticket) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter { credit: Mutex::default(), thread: std::thread::current() });
        self.waiting.insert(ticket, waiter.clone());
        self.grant();
        waiter
    }

    /// Wakes those that need not wait any longer.
    fn grant(&mut self) {
        while let Some(grant) = self.credits.next_grant() {
            let Some(waiter) = self.waiting.remove(&grant.ticket) else { continue };
            *waiter.credit.lock() = Some(grant.credit);
            waiter.thread.unpark();
        }
    }
}

/// The class whose buffers hold `len` bytes; none for an empty one or one beyond all classes.
fn class_of(len: usize) -> Option<usize> {
    let size = len.max(CLASS_MIN_BYTES).checked_next_power_of_two()?;
    let class = (size / CLASS_MIN_BYTES).trailing_zeros() as usize;
    (len > 0 && class < CLASSES).then_some(class)
}

/// Permission to hold some bytes; given back when dropped.
pub struct Reservation {
    pool: Arc<PayloadPool>,
    credit: Credit,
}

impl Reservation {
    /// Permission for `more` bytes of a write of which this is a part; waits its turn, at most `patience`. False when time
    /// was up: then the write is to be given up, with what it has. `waits` as in [`PayloadPool::reserve_for`].
    pub(crate) fn grow(&mut self, more: u64, patience: Duration, waits: &dyn Fn()) -> bool {
        let mut account = self.pool.account.lock();
        let credit = match account.credits.grow(more, &self.credit) {
            Ok(credit) => Some(credit),
            Err(ticket) => {
                let waiter = account.enter(ticket);
                drop(account);
                self.pool.wait_for(ticket, &waiter, patience, waits)
            }
        };
        credit.map(|credit| self.credit.add(credit)).is_some()
    }

    /// Gives back what it has beyond `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let mut account = self.pool.account.lock();
        account.credits.give_back(self.credit.beyond(bytes));
        account.grant();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut account = self.pool.account.lock();
        account.credits.give_back(std::mem::take(&mut self.credit));
        account.grant();
    }
}

/// Recycled storage.
pub struct Buffer {
    pool: Arc<PayloadPool>,
    bytes: Vec<u8>,
    len: usize,
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..self.len).unwrap_or(&mut [])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.recycle(std::mem::take(&mut self.bytes));
    }
}

/// A range of a buffer that several replies may share.
#[derive(Clone)]
pub struct Slice {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl Slice {
    /// Bytes `range` of a buffer, cut to what it has.
    pub fn new(buffer: Arc<Buffer>, range: Range<usize>) -> Slice {
        let end = range.end.min(buffer.len());
        Slice { range: range.start.min(end)..end, buffer }
    }

    /// Bytes `range` of this slice, cut to what it has.
    pub fn part(&self, range: Range<usize>) -> Slice {
        let end = self.range.start.saturating_add(range.end).min(self.range.end);
        Slice { range: self.range.start.saturating_add(range.start).min(end)..end, buffer: self.buffer.clone() }
    }
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer.get(self.range.clone()).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_node::credits::SLICE_BYTES;

    #[test]
    fn the_limit_holds_and_waiters_are_served_in_order() {
        let pool = PayloadPool::new(4096);
        let first = pool.reserve(3000, Duration::ZERO).unwrap();
        assert!(pool.reserve(2000, Duration::ZERO).is_none(), "3000 + 2000 exceed the limit");
        let (tx, rx) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for bytes in [4000u64, 600] {
                let (pool, tx) = (&pool, tx.clone());
                scope.spawn(move || {
                    let reservation = pool.reserve(bytes, Duration::from_secs(10)).unwrap();
                    tx.send(bytes).unwrap();
                    drop(reservation);
                });
                while pool.account.lock().waiting.len() < if bytes == 4000 { 1 } else { 2 } {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            assert!(pool.is_short());
            assert!(rx.recv_timeout(Duration::from_millis(50)).is_err(), "600 would fit but is not first");
            drop(first);
            assert_eq!(rx.recv().unwrap(), 4000);
            assert_eq!(rx.recv().unwrap(), 600);
        });
        assert_eq!(pool.usage_bytes().0, 0);
        assert!(pool.usage_bytes().1 <= 4096);
    }

    #[test]
    fn writes_that_wait_for_each_other_are_completed_one_by_one() {
        const WRITE: u64 = 4 * SLICE_BYTES;
        let pool = PayloadPool::with_headroom(3 * WRITE, WRITE);
        // Six writes have a slice each: all but the headroom and what is kept. Each needs three more.
        let mut parts: Vec<_> =
            (0..6).map(|_| pool.reserve(pool.first_slice_bytes(WRITE), Duration::ZERO).unwrap()).collect();
        assert!(pool.reserve(SLICE_BYTES, Duration::ZERO).is_none(), "the headroom is not for new ones");
        let mut second = parts.pop().unwrap();
        let mut first = parts.pop().unwrap();
        assert!((0..3).all(|_| first.grow(SLICE_BYTES, Duration::ZERO, &|| {})));
        assert!(!second.grow(SLICE_BYTES, Duration::ZERO, &|| {}), "one at a time");
        std::thread::scope(|scope| {
            for mut part in std::iter::once(second).chain(parts) {
                scope.spawn(move || assert!((0..3).all(|_| part.grow(SLICE_BYTES, Duration::from_secs(60), &|| {}))));
            }
            drop(first);
        });
        let (used, peak, limit) = pool.usage_bytes();
        assert!(used == 0 && peak <= limit, "{used} {peak}");
        assert_eq!(PayloadPool::new(WRITE).first_slice_bytes(WRITE), WRITE, "too small for slices");
    }

    #[test]
    fn a_peer_with_little_under_way_does_not_wait_for_those_with_all() {
        let pool = PayloadPool::with_headroom(32 << 20, 4 << 20);
        let all = pool.reserve(u64::MAX, Duration::ZERO).unwrap();
        assert!(pool.reserve_for(pool.standing(256 << 10), 4096, Duration::ZERO, &|| {}).is_none(), "it has much");
        let little = pool.reserve_for(pool.standing(64 << 10), 4096, Duration::ZERO, &|| {}).unwrap();
        drop((all, little));
        let (used, peak, limit) = pool.usage_bytes();
        assert!(used == 0 && peak <= limit, "{used} {peak}");
    }

    #[test]
    fn one_that_waits_asks_for_relief() {
        let pool = PayloadPool::new(4096);
        let held = Arc::new(Mutex::new(Some(pool.reserve(4096, Duration::ZERO).unwrap())));
        pool.relieve_by({
            let held = held.clone();
            move || drop(held.lock().take())
        });
        assert!(pool.reserve(600, Duration::from_secs(60)).is_some());
    }

    #[test]
    fn a_load_of_another_size_recycles_its_own_buffers() {
        // Reads in pieces of 256 KiB fill what may be idle; then writes of 1 MiB come, four at a time.
        let pool = PayloadPool::new(64 << 20);
        drop((0..100).map(|_| pool.buffer(256 << 10)).collect::<Vec<_>>());
        assert_eq!(pool.idle.lock().bytes, 16 << 20);
        for round in 0..3 {
            let mut writes: Vec<Buffer> = (0..4).map(|_| pool.buffer(1 << 20)).collect();
            let recycled = writes.iter().filter(|write| write[0] == 1).count();
            assert_eq!(recycled, if round == 0 { 0 } else { 4 });
            writes.iter_mut().for_each(|write| write.fill(1));
        }
        assert_eq!(pool.idle.lock().bytes, 16 << 20, "no more than had to go went");
    }

    #[test]
    fn buffers_are_recycled_up_to_a_quarter_of_the_limit() {
        let pool = PayloadPool::new(64 << 10);
        let mut a = pool.buffer(5000);
        assert_eq!(a.len(), 5000);
        a.fill(7);
        drop(a);
        assert_eq!(pool.idle.lock().bytes, 8192);
        let b = pool.buffer(8000);
        assert_eq!((b.len(), b[0], pool.idle.lock().bytes), (8000, 7, 0));
        let many: Vec<Buffer> = (0..10).map(|_| pool.buffer(4096)).collect();
        drop((b, many));
        assert!(pool.idle.lock().bytes <= 16 << 10);
        assert_eq!(pool.buffer(0).len(), 0);
        let _all = pool.reserve(64 << 10, Duration::ZERO).unwrap();
        let _other = pool.buffer(30_000);
        assert_eq!(pool.idle.lock().bytes, 0, "what is idle makes room");
        let slice = Slice::new(Arc::new(pool.buffer(10)), 4..100);
        assert_eq!((slice.len(), slice.part(2..4).len(), slice.part(5..9).len(), slice.part(8..9).len()), (6, 2, 1, 0));
    }

    #[test]
    fn size_classes() {
        assert_eq!((class_of(0), class_of(1), class_of(512), class_of(513)), (None, Some(0), Some(0), Some(1)));
        assert_eq!((class_of(64 << 20), class_of((64 << 20) + 1)), (Some(17), None));
    }
}
