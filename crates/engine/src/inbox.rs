//! A queue of messages from many threads to the one thread that owns some state, for example a scheduling core. The
//! owner works without a lock.
//!
//! Each thread sends on a *lane*, whose lock other senders seldom use: senders neither wait for nor wake one another, and
//! wake the owner only while it sleeps. A message is numbered before it is put on its lane. The owner first looks how many
//! numbers were given, then reads all lanes, and takes the messages below that number in their order. So a message that a
//! thread sent after learning of another is taken after it, and a sender that is interrupted delays only its own.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_base::lock::{Apart, Condvar, Mutex};

/// Threads beyond this number share lanes.
const LANES: usize = 8;

/// Capacity that a lane keeps after its messages have been read.
const KEPT: usize = 1024;

/// Set in the count of numbers when the inbox is closed.
const CLOSED: u64 = 1 << 63;

thread_local! {
    /// The lane on which this thread sends.
    static LANE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % LANES
    };
}

struct Lane<M> {
    /// With their numbers.
    messages: Mutex<VecDeque<(u64, M)>>,
    /// There may be messages; changes under the lock.
    filled: AtomicBool,
}

impl<M> Default for Lane<M> {
    fn default() -> Self {
        Lane { messages: Mutex::default(), filled: AtomicBool::new(false) }
    }
}

/// Why an item was refused; it is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotSent<M> {
    /// There was no room, at once or within the patience.
    Full(M),
    /// The inbox is closed.
    Closed(M),
}

/// What the owner has read and not taken yet.
pub struct Mail<M> {
    lanes: [VecDeque<(u64, M)>; LANES],
}

impl<M> Default for Mail<M> {
    fn default() -> Self {
        Mail { lanes: Default::default() }
    }
}

/// The lane with the lowest number, and the lowest number on the others; at most `limit`.
fn first<M>(lanes: &[VecDeque<(u64, M)>], limit: u64) -> (usize, u64) {
    let (mut first, mut lowest, mut next) = (0, u64::MAX, limit);
    for (lane, messages) in lanes.iter().enumerate() {
        let Some(&(number, _)) = messages.front() else { continue };
        next = next.min(number.max(lowest));
        if number < lowest {
            (first, lowest) = (lane, number);
        }
    }
    (first, next)
}

/// An inbox. Messages take room until the owner retires them; only *items* wait for room.
pub struct Inbox<M> {
    lanes: [Apart<Lane<M>>; LANES],
    /// Numbers given, and whether the inbox is closed.
    numbers: Apart<AtomicU64>,
    /// Messages taken by the owner.
    taken: Apart<AtomicU64>,
    retired: Apart<AtomicU64>,
    /// The owner is asleep or about to sleep.
    asleep: AtomicBool,
    owner: OnceLock<Thread>,
    capacity: u64,
    /// Threads waiting for room.
    waiting: AtomicU32,
    crowd: Mutex<()>,
    room: Condvar,
}

impl<M> Inbox<M> {
    /// An inbox for `capacity` messages.
    pub fn new(capacity: u32) -> Inbox<M> {
        Inbox {
            lanes: Default::default(),
            numbers: Apart::default(),
            taken: Apart::default(),
            retired: Apart::default(),
            asleep: AtomicBool::new(false),
            owner: OnceLock::new(),
            capacity: capacity.into(),
            waiting: AtomicU32::new(0),
            crowd: Mutex::new(()),
            room: Condvar::new(),
        }
    }

    /// Makes the calling thread the owner, unless there is one already.
    pub fn own(&self) {
        let _ = self.owner.set(std::thread::current());
    }

    /// True on the owner's thread.
    pub fn is_owner(&self) -> bool {
        self.owner.get().is_some_and(|owner| owner.id() == std::thread::current().id())
    }

    /// Sends an item; waits for room for at most `patience`, but never on the owner's thread.
    pub fn send(&self, item: M, patience: Duration) -> Result<(), NotSent<M>> {
        let number = match self.number() {
            Some(number) => number,
            None if self.is_owner() => return Err(self.refuse(item)),
            None => match self.number_late(patience) {
                Some(number) => number,
                None => return Err(self.refuse(item)),
            },
        };
        self.put(number, item);
        Ok(())
    }

    /// A number, if there is room and the inbox is open.
    #[inline]
    fn number(&self) -> Option<u64> {
        let next = |n: u64| {
            let room = n.saturating_sub(self.retired.0.load(Ordering::SeqCst)) < self.capacity;
            (n & CLOSED == 0 && room).then_some(n + 1)
        };
        self.numbers.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, next).ok()
    }

    /// The same, waiting for room.
    #[cold]
    fn number_late(&self, patience: Duration) -> Option<u64> {
        let until = Instant::now() + patience;
        let mut crowd = self.crowd.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut number = self.number();
        while number.is_none() && !self.is_closed() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            crowd = self.room.wait_timeout(crowd, left).0;
            number = self.number();
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        number
    }

    #[cold]
    fn refuse(&self, item: M) -> NotSent<M> {
        if self.is_closed() { NotSent::Closed(item) } else { NotSent::Full(item) }
    }

    fn is_closed(&self) -> bool {
        self.numbers.0.load(Ordering::SeqCst) & CLOSED != 0
    }

    /// Sends a message without waiting for room; at most a few of them for each item. Works on a closed inbox too.
    pub fn tell(&self, message: M) {
        self.put(self.numbers.0.fetch_add(1, Ordering::SeqCst) & !CLOSED, message);
    }

    #[inline]
    fn put(&self, number: u64, message: M) {
        let lane = &self.lanes[LANE.with(|lane| *lane)].0;
        let mut messages = lane.messages.lock_spinning();
        messages.push_back((number, message));
        if !lane.filled.load(Ordering::Relaxed) {
            lane.filled.store(true, Ordering::Relaxed);
        }
        drop(messages);
        // The number was given before this look, and the owner looks at numbers after it has set this.
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::SeqCst)
            && let Some(owner) = self.owner.get()
        {
            owner.unpark();
        }
    }

    /// Refuses further items.
    pub fn close(&self) {
        self.numbers.0.fetch_or(CLOSED, Ordering::SeqCst);
        drop(self.crowd.lock());
        self.room.notify_all();
    }

    /// True if messages were sent, or are being sent, that the owner has not taken.
    #[inline]
    pub fn is_filled(&self) -> bool {
        self.numbers.0.load(Ordering::SeqCst) & !CLOSED != self.taken.0.load(Ordering::Relaxed)
    }

    /// Takes the messages sent before, in their order; one thread at a time, always with the same `mail`. If a sender is
    /// interrupted on its lane, waits for it or, not `patient`, takes nothing.
    pub fn read(&self, mail: &mut Mail<M>, patient: bool, mut take: impl FnMut(M)) {
        let limit = self.numbers.0.load(Ordering::SeqCst) & !CLOSED;
        for (Apart(lane), mine) in self.lanes.iter().zip(&mut mail.lanes) {
            if !lane.filled.load(Ordering::Relaxed) {
                continue;
            }
            let mut theirs = match lane.messages.try_lock() {
                Some(theirs) => theirs,
                None if patient => lane.messages.lock_spinning(),
                None => return,
            };
            if mine.is_empty() {
                std::mem::swap(&mut *theirs, mine);
            } else {
                mine.append(&mut theirs);
            }
            lane.filled.store(false, Ordering::Relaxed);
        }
        let Some(last) = mail.lanes.iter().rposition(|lane| !lane.is_empty()) else { return };
        let lanes = &mut mail.lanes[..=last];
        let mut taken = self.taken.0.load(Ordering::Relaxed);
        loop {
            let (first, next) = first(lanes, limit);
            let lane = &mut lanes[first];
            let before = taken;
            while lane.front().is_some_and(|(number, _)| *number < next)
                && let Some((_, message)) = lane.pop_front()
            {
                take(message);
                taken += 1;
            }
            if taken == before {
                break;
            }
            if lane.is_empty() && lane.capacity() > KEPT {
                *lane = VecDeque::new();
            }
        }
        self.taken.0.store(taken, Ordering::Relaxed);
    }

    /// Frees the room of `messages` processed messages. One thread at a time.
    pub fn retire(&self, messages: u64) {
        self.retired.0.store(self.retired.0.load(Ordering::Relaxed) + messages, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Take the lock, so that a sender that has just seen a full inbox is waiting by now.
            drop(self.crowd.lock());
            self.room.notify_all();
        }
    }

    /// Sleeps until a message arrives or `most` has passed (`None`: no limit). Only for the owner.
    pub fn sleep(&self, most: Option<Duration>) {
        self.asleep.store(true, Ordering::SeqCst);
        if !self.is_filled() {
            match most {
                Some(most) => std::thread::park_timeout(most),
                None => std::thread::park(),
            }
        } else if !self.lanes.iter().any(|lane| lane.0.filled.load(Ordering::Relaxed)) {
            std::thread::yield_now(); // to the sender that has a number and was interrupted
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn every_message_is_taken_once_in_sender_order() {
        const SENDERS: u64 = 11;
        const EACH: u64 = 5_000;
        let inbox = Arc::new(Inbox::new(1000));
        let reader = std::thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                inbox.own();
                let (mut next, mut mail, mut left) = ([0; SENDERS as usize], Mail::default(), SENDERS * EACH);
                while left > 0 {
                    inbox.sleep(None);
                    let mut taken = 0;
                    inbox.read(&mut mail, left % 2 == 0, |(sender, n)| {
                        assert_eq!(next[sender as usize], n);
                        next[sender as usize] += 1;
                        taken += 1;
                    });
                    left -= taken;
                    inbox.retire(taken);
                }
                assert!(!inbox.is_filled());
            }
        });
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let inbox = Arc::clone(&inbox);
                std::thread::spawn(move || {
                    (0..EACH).for_each(|n| inbox.send((sender, n), Duration::from_secs(60)).unwrap())
                })
            })
            .collect();
        senders.into_iter().for_each(|s| s.join().unwrap());
        reader.join().unwrap();
    }

    /// A message sent after its sender learnt of another thread's message is taken after it, whatever their lanes.
    #[test]
    fn what_follows_from_a_message_is_taken_after_it() {
        const SENDERS: u64 = 4;
        const MESSAGES: u64 = 4_000;
        let (inbox, turn) = (Inbox::new(u32::MAX), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for sender in 0..SENDERS {
                let (inbox, turn) = (&inbox, &turn);
                scope.spawn(move || {
                    for n in (sender..MESSAGES).step_by(SENDERS as usize) {
                        while turn.load(Ordering::Acquire) != n {
                            std::thread::yield_now();
                        }
                        inbox.send(n, Duration::ZERO).unwrap();
                        turn.store(n + 1, Ordering::Release);
                    }
                });
            }
            let (mut mail, mut next) = (Mail::default(), 0);
            while next < MESSAGES {
                inbox.read(&mut mail, next % 2 == 0, |n| {
                    assert_eq!(n, next);
                    next += 1;
                });
            }
        });
    }

    #[test]
    fn room_is_bounded_and_waits_end() {
        let inbox = Inbox::new(3);
        inbox.own();
        assert_eq!(inbox.send(1, Duration::ZERO), Ok(()));
        assert_eq!(inbox.send(2, Duration::ZERO), Ok(()));
        inbox.tell(0);
        // The owner would wait for itself: refused at once, whatever the patience.
        assert_eq!(inbox.send(3, Duration::from_secs(3600)), Err(NotSent::Full(3)));
        std::thread::scope(|scope| {
            let late = scope.spawn(|| inbox.send(4, Duration::from_secs(60)));
            while inbox.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            inbox.retire(1);
            assert_eq!(late.join().unwrap(), Ok(()));
            let closed = scope.spawn(|| inbox.send(5, Duration::from_secs(60)));
            while inbox.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            inbox.close();
            assert_eq!(closed.join().unwrap(), Err(NotSent::Closed(5)));
        });
        inbox.tell(6);
        let (mut mail, mut taken) = (Mail::default(), Vec::new());
        inbox.read(&mut mail, true, |message| taken.push(message));
        assert_eq!(taken, [1, 2, 0, 4, 6]);
        assert!(!inbox.is_filled());
        inbox.sleep(Some(Duration::from_millis(1)));
    }

    /// A sender that is interrupted on its lane delays its own message, not the owner.
    #[test]
    fn an_interrupted_sender_is_not_waited_for() {
        let inbox = Inbox::new(9);
        inbox.send(1, Duration::ZERO).unwrap();
        let (mut mail, mut taken) = (Mail::default(), Vec::new());
        let held: Vec<_> = inbox.lanes.iter().map(|lane| lane.0.messages.lock()).collect();
        inbox.read(&mut mail, false, |message| taken.push(message));
        assert!(taken.is_empty() && inbox.is_filled());
        drop(held);
        inbox.read(&mut mail, false, |message| taken.push(message));
        assert_eq!(taken, [1]);
    }
}
