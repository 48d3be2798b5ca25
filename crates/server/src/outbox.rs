//! Replies on their way out of one connection: a thread that schedules never waits for a slow reader.
//!
//! The thread that makes a reply sends it at once, without blocking. What the socket does not take waits here and is
//! drained by the connection's own thread, when the reply was made on it and its client sends nothing new, or else by
//! a writer thread made on demand. The queue needs no limit of its own: every frame holds the slot of its request
//! ([`Hold`]) until its last byte has left, slots are bounded, and the frames of one request carry no more than it
//! asked for.
//!
//! Where several calls came together, small replies that their thread makes at once leave together: the peer wakes up
//! once for all. A reply is [held back](Outbox::hold_back) only while another call is there to be served, and leaves
//! before anything that may wait.

mod frame;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_node::credits::Progress;
use impresario_node::session::SIGN_EVERY;
use impresario_transport::Session;
use impresario_wire::Answer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;

use crate::payload::PayloadPool;
use crate::readiness::{Readiness, unsent_bytes};
pub use frame::Bulk;
use frame::push_together;
pub(crate) use frame::{Hold, OutFrame};
use impresario_base::lock::{Condvar, Mutex, MutexGuard};

/// How often a socket that is writable is asked how much it still holds.
const WATCH_PAUSE: Duration = Duration::from_millis(1);
/// A writer thread without work ends after this time.
const WRITER_LINGER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5_000 });
/// Stack of connection and writer threads, bytes.
pub(crate) const STACK_BYTES: usize = 256 * 1024;
/// Replies up to this length are held back, bytes.
pub(crate) const HELD_FRAME_BYTES: usize = 16 << 10;
/// Replies that are held back at a time.
const HELD_MAX: usize = 16;

/// A connection's socket.
pub(crate) type Socket = Arc<dyn AsFd + Send + Sync>;

/// Who sends what did not fit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drainer {
    Nobody,
    /// The connection's own thread, once it returns from serving.
    Owner,
    Writer,
}

struct Queue {
    frames: VecDeque<OutFrame>,
    /// What waits for the reply to the call after, by the connection's own thread; nothing while `frames` has something.
    held: Vec<OutFrame>,
    drainer: Drainer,
    /// A frame is being sent outside the lock; no other may overtake it.
    busy: bool,
    closed: bool,
    /// Length of the frames that have not left as a whole, the one being sent among them.
    waiting_bytes: u64,
}

/// The replies of one connection.
pub(crate) struct Outbox {
    socket: Socket,
    peer: String,
    /// What protects the connection.
    session: OnceLock<Arc<Session>>,
    pool: Arc<PayloadPool>,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Another call is there, of which the reply may take others along.
    holds_back: AtomicBool,
    /// The connection was closed because its client did not read while others waited for memory.
    unread: AtomicBool,
    /// When the connection's thread last waited, and when it began to or the client was last shown that the server lives.
    waits_ms: AtomicU64,
    signed_ms: AtomicU64,
    /// Reports whether the connection takes more.
    pub(crate) readiness: Readiness,
}

thread_local! {
    /// The outbox of the connection that this thread serves.
    static OWN: RefCell<Option<Arc<Outbox>>> = const { RefCell::new(None) };
}

/// Names the outbox whose connection this thread serves, or none when it stops doing so.
pub(crate) fn serve_on_this_thread(outbox: Option<Arc<Outbox>>) {
    OWN.set(outbox);
}

/// To be called before a connection's thread waits, and while it does: what its own client has not yet been sent must not wait
/// for that, and its client learns that the server lives, as nobody reads what it asks meanwhile.
pub fn hand_over_own_replies() {
    OWN.with_borrow(|own| own.iter().for_each(Outbox::give_sign));
    let_own_replies_go();
    hand_over_own_drain();
}

/// To be called before other connections' work is done on a connection's thread: another thread sends what is left of the
/// replies to its own client.
pub(crate) fn hand_over_own_drain() {
    OWN.with_borrow(|own| own.iter().for_each(Outbox::hand_over));
}

/// To be called before anything on a connection's thread that may take a while: sends what is held back for its client.
pub(crate) fn let_own_replies_go() {
    OWN.with_borrow(|own| own.iter().for_each(Outbox::let_go));
}

impl Outbox {
    /// `peer`: who gets the replies, for the log.
    pub(crate) fn new(socket: Socket, peer: String, pool: Arc<PayloadPool>) -> Arc<Outbox> {
        let queue = Queue {
            frames: VecDeque::new(),
            held: Vec::new(),
            drainer: Drainer::Nobody,
            busy: false,
            closed: false,
            waiting_bytes: 0,
        };
        Arc::new(Outbox {
            socket,
            peer,
            session: OnceLock::new(),
            pool,
            queue: Mutex::new(queue),
            wake: Condvar::new(),
            holds_back: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            waits_ms: AtomicU64::new(0),
            signed_ms: AtomicU64::new(0),
            readiness: Readiness::default(),
        })
    }

    /// From the next frame on the connection is protected.
    pub(crate) fn protect(&self, session: Arc<Session>) {
        let _ = self.session.set(session);
    }

    /// Sends a frame or queues it; never blocks for the peer. On a closed connection it is dropped.
    pub(crate) fn send(self: &Arc<Self>, mut frame: OutFrame) {
        let asked = self.readiness.is_asked(&self.socket);
        let mut queue = self.queue.lock();
        if queue.closed {
            drop(queue);
            return;
        }
        let is_free = queue.frames.is_empty() && !queue.busy;
        if self.holds_back.load(Ordering::Relaxed)
            && (is_free && !asked && queue.held.len() < HELD_MAX)
            && frame.len <= HELD_FRAME_BYTES
            && self.is_own()
        {
            return queue.held.push(frame);
        }
        if !queue.held.is_empty() {
            queue.held.push(frame);
            return self.push_held(queue, asked);
        }
        if is_free {
            match frame.push(self.socket.as_fd(), self.session.get()) {
                Ok(true) => {
                    drop(queue);
                    if asked {
                        self.watch();
                    }
                    return;
                }
                Ok(false) => {}
                Err(_) => {
                    drop(queue);
                    self.close();
                    return;
                }
            }
        }
        queue.waiting_bytes += frame.len as u64;
        queue.frames.push_back(frame);
        self.find_drainer(queue);
        self.report();
    }

    /// The connection's thread waits, or goes on waiting: shows the client after each [`SIGN_EVERY`] of that that the server lives.
    /// Anything else that is to be sent shows it as well.
    pub(crate) fn give_sign(self: &Arc<Self>) {
        self.give_sign_at(impresario_engine::now().0 / 1_000_000);
    }

    fn give_sign_at(self: &Arc<Self>, now_ms: u64) {
        let every_ms = SIGN_EVERY.as_millis() as u64;
        let waited_ms = now_ms.saturating_sub(self.waits_ms.swap(now_ms, Ordering::Relaxed));
        let begins = waited_ms > 2 * every_ms;
        let is_due = now_ms.saturating_sub(self.signed_ms.load(Ordering::Relaxed)) >= every_ms;
        if begins || is_due {
            self.signed_ms.store(now_ms, Ordering::Relaxed);
        }
        if begins || !is_due {
            return;
        }
        self.send_if_free(&Answer::Alive);
    }

    /// Sends what answers no call, unless something else is to be sent: nothing is queued for a client that does not read.
    pub(crate) fn send_if_free(self: &Arc<Self>, answer: &Answer) {
        let is_free = {
            let queue = self.queue.lock();
            queue.frames.is_empty() && !queue.busy
        };
        if is_free && let Ok(head) = crate::connection::encode(0, answer, 0) {
            self.send(OutFrame::new(head, Bulk::None, None));
        }
    }

    /// Says on the connection's thread whether another call is there to be served at once: a small reply may wait for that of
    /// the other one. Whoever says so lets go what is held back before the thread does anything else.
    pub(crate) fn hold_back(&self, is_another_there: bool) {
        self.holds_back.store(is_another_there, Ordering::Relaxed);
    }

    /// Sends what is held back.
    pub(crate) fn let_go(self: &Arc<Self>) {
        let asked = self.readiness.is_asked(&self.socket);
        let queue = self.queue.lock();
        if !queue.held.is_empty() {
            self.push_held(queue, asked);
        }
    }

    fn push_held(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>, asked: bool) {
        let mut frames = std::mem::take(&mut queue.held);
        let mut left = 0;
        if queue.frames.is_empty() && !queue.busy {
            match push_together(&mut frames, self.socket.as_fd(), self.session.get()) {
                Ok(count) if count == frames.len() => {
                    drop(queue);
                    if asked {
                        self.watch();
                    }
                    return;
                }
                Ok(count) => left = count,
                Err(_) => {
                    drop(queue);
                    self.close();
                    return;
                }
            }
        }
        let rest = frames.split_off(left);
        queue.waiting_bytes += rest.iter().map(|frame| frame.len as u64).sum::<u64>();
        queue.frames.extend(rest);
        self.find_drainer(queue);
        drop(frames); // their holds are given up outside the lock
        self.report();
    }

    /// Has the queue drained, or the kernel's buffer watched, by the thread that is to do it.
    fn find_drainer(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
        let begins = queue.drainer == Drainer::Nobody && !self.is_own();
        match queue.drainer {
            Drainer::Nobody => queue.drainer = if begins { Drainer::Writer } else { Drainer::Owner },
            Drainer::Owner => {}
            Drainer::Writer => self.wake.notify_one(),
        }
        drop(queue);
        if begins {
            self.start_writer();
        }
    }

    /// Reports to the scheduler whether the connection can take more.
    fn report(&self) {
        self.readiness.changed(|| {
            let (closed, waiting_bytes) = {
                let queue = self.queue.lock();
                (queue.closed, queue.waiting_bytes)
            };
            match (closed, self.readiness.is_asked(&self.socket)) {
                (true, _) => 0,
                (false, false) => waiting_bytes,
                (false, true) => waiting_bytes + unsent_bytes(&self.socket),
            }
        });
    }

    /// After the kernel took a frame as a whole: while it holds too much of it, a thread waits until it holds less.
    fn watch(self: &Arc<Self>) {
        self.report();
        if !self.readiness.is_ready() {
            self.find_drainer(self.queue.lock());
        }
    }

    /// Waits until the kernel has sent enough for the connection to be ready. False when the connection has ended, or
    /// its client sends something and `yield_to_requests` is set. It does not wait forever: a policy holds the client's reads back
    /// meanwhile, and with them what others want to change there.
    fn wait_until_ready(&self, yield_to_requests: bool) -> bool {
        let wanted = if yield_to_requests { PollFlags::OUT | PollFlags::IN } else { PollFlags::OUT };
        let began = Instant::now();
        let mut progress = Progress::new(0, Duration::ZERO);
        let (mut taken_bytes, mut held_bytes) = (0, unsent_bytes(&self.socket));
        loop {
            self.report();
            if self.readiness.is_ready() || !self.readiness.is_asked(&self.socket) {
                return true;
            }
            let mut fds = [PollFd::new(&self.socket, wanted)];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
            let [fd] = &fds;
            let signs = fd.revents();
            if signs.intersects(PollFlags::HUP | PollFlags::ERR) || self.queue.lock().closed {
                return false;
            }
            if yield_to_requests && signs.contains(PollFlags::IN) {
                return false;
            }
            if !self.queue.lock().frames.is_empty() {
                return true;
            }
            let now_bytes = unsent_bytes(&self.socket);
            taken_bytes += held_bytes.saturating_sub(now_bytes);
            held_bytes = now_bytes;
            if self.is_given_up(&mut progress, taken_bytes, began.elapsed()) {
                return false;
            }
            if signs.contains(PollFlags::OUT) {
                // A socket may be writable long before enough has left it, and says nothing when that is so.
                let pause = Timespec { tv_sec: 0, tv_nsec: WATCH_PAUSE.as_nanos() as i64 };
                let _ = poll(&mut [], Some(&pause));
            }
        }
    }

    /// On the connection's own thread, after serving: sends what is left of its replies, unless its
    /// client sends something new meanwhile.
    pub(crate) fn drain_own(self: &Arc<Self>) {
        loop {
            let mut queue = self.queue.lock();
            if queue.drainer != Drainer::Owner {
                return;
            }
            let Some(frame) = queue.frames.pop_front() else {
                drop(queue);
                let settled = self.wait_until_ready(true);
                let mut queue = self.queue.lock();
                if settled && !queue.frames.is_empty() {
                    continue;
                }
                let goes_on = !settled && !queue.closed;
                queue.drainer = if goes_on { Drainer::Writer } else { Drainer::Nobody };
                drop(queue);
                if goes_on {
                    self.start_writer();
                }
                return;
            };
            queue.busy = true;
            drop(queue);
            let len = frame.len as u64;
            let unsent = self.finish(frame, true);
            let mut queue = self.queue.lock();
            queue.busy = false;
            if let Some(frame) = unsent {
                queue.frames.push_front(frame);
                queue.drainer = Drainer::Writer;
                drop(queue);
                self.start_writer();
                return;
            }
            queue.waiting_bytes = queue.waiting_bytes.saturating_sub(len);
        }
    }

    /// Drops what is unsent and ends the connection in both directions.
    pub(crate) fn close(&self) {
        let unsent = {
            let mut queue = self.queue.lock();
            queue.closed = true;
            queue.waiting_bytes = 0;
            (std::mem::take(&mut queue.frames), std::mem::take(&mut queue.held))
        };
        drop(unsent);
        let _ = rustix::net::shutdown(self.socket.as_fd(), Shutdown::Both);
        self.wake.notify_all();
        self.report();
    }

    /// True when it was closed because the peer did not read while others waited for memory. The log has it.
    pub(crate) fn was_unread(&self) -> bool {
        self.unread.load(Ordering::Acquire)
    }

    /// True when the peer has closed or the connection is lost, as far as this machine knows.
    pub(crate) fn peer_is_gone(&self) -> bool {
        let signs = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut fds = [PollFd::new(&self.socket, signs)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Ends one direction of the connection.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        let _ = rustix::net::shutdown(self.socket.as_fd(), how);
    }

    /// True when nothing waits to be sent.
    #[cfg(test)]
    pub(crate) fn is_drained(&self) -> bool {
        let queue = self.queue.lock();
        queue.closed || (queue.frames.is_empty() && queue.held.is_empty() && !queue.busy)
    }

    /// The connection's own thread is to send what is left of its replies.
    pub(crate) fn is_for_owner(&self) -> bool {
        self.queue.lock().drainer == Drainer::Owner
    }

    fn is_own(self: &Arc<Self>) -> bool {
        OWN.with_borrow(|own| own.as_ref().is_some_and(|own| Arc::ptr_eq(own, self)))
    }

    /// Has a writer thread do what the owner was to do.
    fn hand_over(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        if queue.drainer == Drainer::Owner {
            queue.drainer = Drainer::Writer;
            drop(queue);
            self.start_writer();
        }
    }

    fn start_writer(self: &Arc<Self>) {
        let outbox = self.clone();
        let writer = std::thread::Builder::new().name("replies".into()).stack_size(STACK_BYTES);
        if let Err(error) = writer.spawn(move || outbox.write()) {
            tracing::warn!(%error, "no thread for a slow reader's replies; its connection is closed");
            self.close();
        }
    }

    /// The writer thread.
    fn write(self: Arc<Self>) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(frame) = queue.frames.pop_front() {
                queue.busy = true;
                drop(queue);
                let len = frame.len as u64;
                // Not stopped by anything but an end of the connection, so nothing comes back.
                drop(self.finish(frame, false));
                queue = self.queue.lock();
                queue.busy = false;
                queue.waiting_bytes = queue.waiting_bytes.saturating_sub(len);
                continue;
            }
            if queue.closed {
                return;
            }
            drop(queue);
            let settled = self.wait_until_ready(false);
            queue = self.queue.lock();
            if !queue.frames.is_empty() {
                continue;
            }
            if !settled && !queue.closed {
                // The connection has ended and its own thread will notice; there is nothing to wait for here.
                queue.drainer = Drainer::Nobody;
                return;
            }
            let (next, timed_out) = self.wake.wait_timeout(queue, WRITER_LINGER);
            queue = next;
            if timed_out && queue.frames.is_empty() {
                queue.drainer = Drainer::Nobody;
                return;
            }
        }
    }

    /// Sends a whole frame, waiting for the peer as long as is fair. A frame comes back when
    /// `yield_to_requests` is set and the peer sends something before it has read it all.
    fn finish(&self, mut frame: OutFrame, yield_to_requests: bool) -> Option<OutFrame> {
        let began = Instant::now();
        let mut progress = Progress::new(frame.sent as u64, Duration::ZERO);
        loop {
            match frame.push(self.socket.as_fd(), self.session.get()) {
                Ok(true) => return None,
                Ok(false) => {}
                Err(_) => {
                    self.close();
                    return None;
                }
            }
            if self.is_given_up(&mut progress, frame.sent as u64, began.elapsed()) {
                return None;
            }
            let wanted = if yield_to_requests { PollFlags::OUT | PollFlags::IN } else { PollFlags::OUT };
            let mut fds = [PollFd::new(&self.socket, wanted)];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
            let [fd] = &fds;
            if yield_to_requests && fd.revents().contains(PollFlags::IN) && !fd.revents().contains(PollFlags::OUT) {
                return Some(frame);
            }
        }
    }

    /// Ends the connection if its client, of which this many bytes have been taken so far, reads too slowly.
    fn is_given_up(&self, progress: &mut Progress, taken_bytes: u64, waited: Duration) -> bool {
        let others_wait = self.pool.is_short();
        if !progress.is_too_slow(taken_bytes, waited, others_wait) {
            return false;
        }
        let meanwhile = if others_wait { " while others wait for memory" } else { "" };
        let peer = &self.peer;
        tracing::warn!(peer, "a client reads its replies too slowly{meanwhile}; its connection is closed");
        self.unread.store(others_wait, Ordering::Release);
        self.close();
        true
    }
}

#[cfg(test)]
mod tests;
