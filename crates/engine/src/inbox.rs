//! A queue of messages from many threads to the one thread that owns some state, for example a scheduling core. The
//! owner works without a lock; sending costs one short lock and, only while the owner sleeps, a wake-up.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};

/// Capacity kept for messages after the owner has read them.
const KEPT: usize = 4096;

struct Queue<M> {
    messages: Vec<M>,
    /// Items sent so far.
    sent: u64,
    /// The owner is asleep or about to sleep.
    asleep: bool,
    closed: bool,
}

/// Why an item was refused; it is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotSent<M> {
    /// There was no room, at once or within the patience.
    Full(M),
    /// The inbox is closed.
    Closed(M),
}

/// An inbox. Its *items* are counted against a capacity until the owner retires them; other messages are not.
pub struct Inbox<M> {
    queue: Mutex<Queue<M>>,
    /// The queue may hold messages; lets the owner check without the lock.
    filled: AtomicBool,
    owner: OnceLock<Thread>,
    capacity: u64,
    retired: AtomicU64,
    room: Condvar,
    /// Threads waiting for room.
    waiting: AtomicU32,
}

impl<M> Inbox<M> {
    /// An inbox for `capacity` items.
    pub fn new(capacity: u32) -> Inbox<M> {
        Inbox {
            queue: Mutex::new(Queue { messages: Vec::new(), sent: 0, asleep: false, closed: false }),
            filled: AtomicBool::new(false),
            owner: OnceLock::new(),
            capacity: capacity.into(),
            retired: AtomicU64::new(0),
            room: Condvar::new(),
            waiting: AtomicU32::new(0),
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
        let mut queue = self.queue.lock_spinning();
        if queue.sent - self.retired.load(Ordering::Relaxed) >= self.capacity {
            drop(queue);
            return self.send_late(item, if self.is_owner() { Duration::ZERO } else { patience });
        }
        if queue.closed {
            return Err(NotSent::Closed(item));
        }
        queue.sent += 1;
        self.put(queue, item);
        Ok(())
    }

    #[cold]
    fn send_late(&self, item: M, patience: Duration) -> Result<(), NotSent<M>> {
        let until = Instant::now() + patience;
        let mut queue = self.queue.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while !queue.closed && queue.sent - self.retired.load(Ordering::SeqCst) >= self.capacity {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Err(NotSent::Full(item));
            }
            queue = self.room.wait_timeout(queue, left).0;
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if queue.closed {
            return Err(NotSent::Closed(item));
        }
        queue.sent += 1;
        self.put(queue, item);
        Ok(())
    }

    /// Sends a message that takes no room: there are never more of them than items. Works on a closed inbox too.
    pub fn tell(&self, message: M) {
        self.put(self.queue.lock_spinning(), message);
    }

    fn put(&self, mut queue: impresario_base::lock::MutexGuard<'_, Queue<M>>, message: M) {
        queue.messages.push(message);
        let wake = std::mem::take(&mut queue.asleep);
        if !self.filled.load(Ordering::Relaxed) {
            self.filled.store(true, Ordering::Relaxed);
        }
        drop(queue);
        if wake && let Some(owner) = self.owner.get() {
            owner.unpark();
        }
    }

    /// Refuses further items.
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.room.notify_all();
    }

    /// True if there may be messages to read.
    #[inline]
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Relaxed)
    }

    /// Reads all messages, in the order in which they were sent, into `into`, which must be empty.
    pub fn read(&self, into: &mut Vec<M>) {
        debug_assert!(into.is_empty());
        if into.capacity() > KEPT {
            *into = Vec::new();
        }
        let mut queue = self.queue.lock_spinning();
        std::mem::swap(&mut queue.messages, into);
        self.filled.store(false, Ordering::Relaxed);
    }

    /// Frees the room of `items` processed items.
    pub fn retire(&self, items: u64) {
        // Only the owner writes.
        self.retired.store(self.retired.load(Ordering::Relaxed) + items, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Take the lock, so that a sender that has just seen a full inbox is waiting by now.
            drop(self.queue.lock());
            self.room.notify_all();
        }
    }

    /// Sleeps until a message arrives or `most` has passed (`None`: no limit). Only for the owner.
    pub fn sleep(&self, most: Option<Duration>) {
        {
            let mut queue = self.queue.lock();
            if !queue.messages.is_empty() {
                return;
            }
            queue.asleep = true;
        }
        match most {
            Some(most) => std::thread::park_timeout(most),
            None => std::thread::park(),
        }
        self.queue.lock().asleep = false;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn every_message_is_read_once_in_sender_order() {
        const SENDERS: u64 = 4;
        const EACH: u64 = 20_000;
        let inbox = Arc::new(Inbox::new(1000));
        let reader = std::thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                inbox.own();
                let (mut next, mut mail, mut left) = ([0; SENDERS as usize], Vec::new(), SENDERS * EACH);
                while left > 0 {
                    inbox.sleep(None);
                    inbox.read(&mut mail);
                    left -= mail.len() as u64;
                    inbox.retire(mail.len() as u64);
                    for (sender, n) in mail.drain(..) {
                        assert_eq!(next[sender as usize], n);
                        next[sender as usize] += 1;
                    }
                }
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

    #[test]
    fn room_is_bounded_and_waits_end() {
        let inbox = Inbox::new(2);
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
        let mut mail = Vec::new();
        inbox.read(&mut mail);
        assert_eq!(mail, [1, 2, 0, 4, 6]);
        assert!(!inbox.is_filled());
        inbox.sleep(Some(Duration::from_millis(1)));
    }
}
