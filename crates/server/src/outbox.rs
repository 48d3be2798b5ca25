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

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_config::Protect;
use impresario_node::credits::Progress;
use impresario_node::session::SIGN_EVERY;
use impresario_transport::Session;
use impresario_wire::Answer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown};

use crate::payload::{PayloadPool, Slice};
use crate::readiness::{Readiness, unsent_bytes};
use impresario_base::lock::{Condvar, Mutex, MutexGuard};

/// How often a socket that is writable is asked how much it still holds.
const WATCH_PAUSE: Duration = Duration::from_millis(1);
/// A writer thread without work ends after this time.
const WRITER_LINGER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5_000 });
/// Stack of connection and writer threads, bytes.
pub(crate) const STACK_BYTES: usize = 256 * 1024;
/// The kernel takes at most this many pieces at once.
const IOV_MAX: usize = 1024;
/// Replies up to this length are held back, bytes.
pub(crate) const HELD_FRAME_BYTES: usize = 16 << 10;
/// Replies that are held back at a time.
const HELD_MAX: usize = 16;

/// A connection's socket.
pub(crate) type Socket = Arc<dyn AsFd + Send + Sync>;

/// What a frame keeps until it has left or its connection is gone; the pieces of one answer share it.
pub(crate) type Hold = Arc<dyn Send + Sync>;

/// The bulk part of a reply.
#[derive(Default)]
pub enum Bulk {
    /// Nothing.
    #[default]
    None,
    /// One run of bytes.
    One(Slice),
    /// Several, back to back.
    Many(Vec<Slice>),
}

impl Bulk {
    /// The pieces, in order.
    pub fn slices(&self) -> &[Slice] {
        match self {
            Bulk::None => &[],
            Bulk::One(slice) => std::slice::from_ref(slice),
            Bulk::Many(slices) => slices,
        }
    }

    /// Bytes in all.
    pub fn len_bytes(&self) -> usize {
        self.slices().iter().map(|s| s.len()).sum()
    }
}

/// One frame to send.
pub(crate) struct OutFrame {
    head: Vec<u8>,
    bulk: Bulk,
    /// As it was made, bytes: what counts as waiting.
    len: usize,
    /// As it leaves, bytes.
    wire_len: usize,
    sent: usize,
    sealed: bool,
    _hold: Option<Hold>,
}

impl OutFrame {
    /// `head`: the frame's header and body; `bulk`: its payload.
    pub(crate) fn new(head: Vec<u8>, bulk: Bulk, hold: Option<Hold>) -> OutFrame {
        let len = head.len() + bulk.len_bytes();
        OutFrame { len, wire_len: len, head, bulk, sent: 0, sealed: false, _hold: hold }
    }

    /// Its bytes, in order.
    fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.head.as_slice()).chain(self.bulk.slices().iter().map(|slice| &**slice))
    }

    /// Has the frame protected, once: frames must leave in the order in which they are sealed.
    fn seal(&mut self, session: &Session) -> io::Result<()> {
        if self.sealed || !session.seals_next() {
            self.sealed = true;
            return Ok(());
        }
        let pieces: Vec<IoSlice<'_>> = self.bulk.slices().iter().map(|slice| IoSlice::new(slice)).collect();
        let head = session.seal(&self.head, &pieces).map_err(io::Error::other)?;
        self.head = head;
        if session.protect() == Protect::All {
            self.bulk = Bulk::None;
        }
        self.wire_len = self.head.len() + self.bulk.len_bytes();
        self.sealed = true;
        Ok(())
    }

    /// Sends what the socket takes without blocking; true when the frame has left entirely.
    fn push(&mut self, socket: BorrowedFd<'_>, session: Option<&Arc<Session>>) -> io::Result<bool> {
        session.map_or(Ok(()), |session| self.seal(session))?;
        while self.sent < self.wire_len {
            let mut skip = self.sent;
            let mut pieces = [IoSlice::new(&[]); 8];
            let mut many = Vec::new();
            let unsent = self.bytes().filter_map(|bytes| {
                let rest = bytes.get(skip..);
                skip = skip.saturating_sub(bytes.len());
                rest.filter(|r| !r.is_empty()).map(IoSlice::new)
            });
            let pieces = if self.bulk.slices().len() < pieces.len() {
                let mut count = 0;
                pieces.iter_mut().zip(unsent).for_each(|(slot, piece)| {
                    *slot = piece;
                    count += 1;
                });
                pieces.get(..count).unwrap_or(&[])
            } else {
                many.extend(unsent.take(IOV_MAX));
                &many[..]
            };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => self.sent += sent,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }
}

/// Sends what the socket takes of several frames, without blocking and with one system call; gives how many have left
/// entirely.
fn push_together(frames: &mut [OutFrame], socket: BorrowedFd<'_>, session: Option<&Arc<Session>>) -> io::Result<usize> {
    session.map_or(Ok(()), |session| frames.iter_mut().try_for_each(|frame| frame.seal(session)))?;
    let pieces = frames.iter().flat_map(OutFrame::bytes).filter(|bytes| !bytes.is_empty()).map(IoSlice::new);
    let pieces: Vec<IoSlice<'_>> = pieces.take(IOV_MAX).collect();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut sent = match rustix::net::sendmsg(socket, &pieces, &mut SendAncillaryBuffer::default(), flags) {
        Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
        Ok(sent) => sent,
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => 0,
        Err(errno) => return Err(errno.into()),
    };
    let mut left = 0;
    for frame in frames {
        frame.sent = sent.min(frame.wire_len);
        sent -= frame.sent;
        left += usize::from(frame.sent == frame.wire_len);
    }
    Ok(left)
}

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
        let is_free = {
            let queue = self.queue.lock();
            queue.frames.is_empty() && !queue.busy
        };
        // Nothing is queued for a client that does not read.
        if is_free && let Ok(head) = crate::connection::encode(0, &Answer::Alive, 0) {
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
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicUsize;

    struct Count(Arc<AtomicUsize>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn pair() -> (Arc<Outbox>, UnixStream, Arc<PayloadPool>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pool = PayloadPool::new(1 << 20);
        (Outbox::new(Arc::new(ours), "unix".into(), pool.clone()), theirs, pool)
    }

    fn frame(number: u8, len: usize, pool: &Arc<PayloadPool>, held: &Arc<AtomicUsize>) -> OutFrame {
        held.fetch_add(1, Ordering::SeqCst);
        let mut buffer = pool.buffer(len);
        buffer.fill(number);
        let bulk = Bulk::One(Slice::new(Arc::new(buffer), 0..len));
        OutFrame::new(vec![number; 24], bulk, Some(Arc::new(Count(held.clone()))))
    }

    fn wait_for(mut what: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < deadline, "waited too long");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn frames_leave_in_order_and_whole_past_a_slow_reader() {
        let (outbox, mut theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        let started = Instant::now();
        (0..40).for_each(|n| outbox.send(frame(n, 100_000, &pool, &held)));
        assert!(started.elapsed() < Duration::from_secs(10), "sending waited for the reader");
        assert!(held.load(Ordering::SeqCst) > 30, "only what left gives up its hold");
        let mut got = vec![0; 40 * 100_024];
        theirs.read_exact(&mut got).unwrap();
        for (n, chunk) in got.chunks(100_024).enumerate() {
            assert!(chunk.iter().all(|&b| b as usize == n), "frame {n} is mixed up");
        }
        wait_for(|| held.load(Ordering::SeqCst) == 0 && outbox.is_drained());
    }

    #[test]
    fn the_owner_drains_and_makes_way_for_requests() {
        let (outbox, mut theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        serve_on_this_thread(Some(outbox.clone()));
        outbox.send(frame(1, 1_000_000, &pool, &held));
        assert!(outbox.queue.lock().drainer == Drainer::Owner);
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; 1_000_024];
            theirs.read_exact(&mut got).unwrap();
            theirs
        });
        outbox.drain_own();
        assert!(outbox.is_drained() && held.load(Ordering::SeqCst) == 0);
        let mut theirs = reader.join().unwrap();

        // A peer that sends while it does not read gets its request read; a thread sends the rest.
        outbox.send(frame(2, 1_000_000, &pool, &held));
        std::io::Write::write_all(&mut theirs, b"request").unwrap();
        outbox.drain_own();
        assert!(outbox.queue.lock().drainer == Drainer::Writer);
        let mut got = vec![0; 1_000_024];
        theirs.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|&b| b == 2));

        // Other connections' work on this thread does not delay its own replies either.
        wait_for(|| outbox.is_drained());
        wait_for(|| outbox.queue.lock().drainer == Drainer::Nobody);
        outbox.send(frame(3, 1_000_000, &pool, &held));
        hand_over_own_replies();
        assert!(outbox.queue.lock().drainer == Drainer::Writer);
        theirs.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|&b| b == 3));
        serve_on_this_thread(None);
    }

    fn sign() -> Vec<u8> {
        crate::connection::encode(0, &Answer::Alive, 0).unwrap()
    }

    #[test]
    fn signs_of_life_are_few_and_none_is_kept_for_a_client_that_does_not_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let pool = PayloadPool::new(64 << 20);
        let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
        let mut got = vec![0; 1 << 20];
        let mut signs = |times_ms: &[u64]| {
            times_ms.iter().for_each(|at_ms| outbox.give_sign_at(*at_ms));
            let got = theirs.read(&mut got).map_or(Vec::new(), |len| got[..len].to_vec());
            assert!(got.chunks(sign().len()).all(|frame| frame == sign()));
            got.len() / sign().len()
        };
        assert_eq!(signs(&[10_000, 10_010, 10_399]), 0, "not yet");
        assert_eq!(signs(&[10_400, 10_500, 10_799]), 1);
        assert_eq!(signs(&[10_800, 11_200, 11_600]), 3);
        assert_eq!(signs(&[20_000, 20_100]), 0, "another wait");
        let held = Arc::new(AtomicUsize::new(0));
        outbox.send(frame(1, 8 << 20, &pool, &held));
        (0..100).for_each(|n| outbox.give_sign_at(30_000 + 400 * n));
        let queue = outbox.queue.lock();
        assert_eq!(queue.frames.len() + usize::from(queue.busy), 1);
        drop(queue);
        outbox.close();
    }

    #[test]
    fn small_replies_wait_for_the_next_one_and_leave_in_order() {
        // A socket that keeps the bounds of messages shows what left together.
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let pool = PayloadPool::new(1 << 20);
        let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
        let held = Arc::new(AtomicUsize::new(0));
        let next = || {
            let (mut buffer, flags) = (vec![0; 64 << 10], rustix::net::RecvFlags::DONTWAIT);
            let (got, _) = rustix::net::recv(&theirs, &mut buffer[..], flags).ok()?;
            // A sign of life may leave with them.
            assert!([0, sign().len()].contains(&(got % 124)), "{got} bytes");
            // The numbers of the frames, each of 24 bytes and 100 of its payload.
            Some(buffer[..got].chunks_exact(124).map(|frame| frame[0]).collect::<Vec<_>>())
        };
        let send = |number| outbox.send(frame(number, 100, &pool, &held));
        serve_on_this_thread(Some(outbox.clone()));
        send(0);
        assert_eq!(next(), Some(vec![0]));
        outbox.hold_back(true);
        send(1);
        send(2);
        assert_eq!((next(), held.load(Ordering::SeqCst)), (None, 2));
        outbox.hold_back(false);
        send(3);
        assert_eq!((next(), held.load(Ordering::SeqCst)), (Some(vec![1, 2, 3]), 0));

        // Before the thread waits.
        outbox.hold_back(true);
        send(4);
        let_own_replies_go();
        assert_eq!(next(), Some(vec![4]));
        send(5);
        hand_over_own_replies();
        assert_eq!(next(), Some(vec![5]));

        // Replies of other threads go at once, and overtake nothing.
        send(6);
        std::thread::scope(|scope| {
            scope.spawn(|| send(7));
        });
        assert_eq!(next(), Some(vec![6, 7]));

        // Neither many nor long ones wait.
        (0..=HELD_MAX as u8).for_each(&send);
        assert_eq!(next(), Some((0..=HELD_MAX as u8).collect()));
        send(8);
        outbox.send(OutFrame::new(vec![9; 124], frame(9, 124 * 200, &pool, &held).bulk, None));
        assert_eq!(next().map(|numbers| numbers[..2].to_vec()), Some(vec![8, 9]));

        // What is held back ends with the connection.
        send(10);
        assert_eq!(held.load(Ordering::SeqCst), 1);
        outbox.close();
        assert_eq!(held.load(Ordering::SeqCst), 0);
        serve_on_this_thread(None);
    }

    #[test]
    fn replies_that_leave_together_wait_together_for_a_slow_reader() {
        let (outbox, mut theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        serve_on_this_thread(Some(outbox.clone()));
        let mut number = 0_u8;
        while outbox.queue.lock().frames.is_empty() {
            outbox.hold_back(true);
            for _ in 0..7 {
                outbox.send(frame(number, 5000, &pool, &held));
                number += 1;
            }
            outbox.let_go();
        }
        // These join the end.
        outbox.send(frame(number, 5000, &pool, &held));
        serve_on_this_thread(None);
        outbox.hand_over();
        let mut got = vec![0; (usize::from(number) + 1) * 5024];
        theirs.read_exact(&mut got).unwrap();
        for (n, chunk) in got.chunks(5024).enumerate() {
            assert!(chunk.iter().all(|&b| usize::from(b) == n), "frame {n} is mixed up");
        }
        wait_for(|| held.load(Ordering::SeqCst) == 0 && outbox.is_drained());
        assert_eq!(outbox.queue.lock().waiting_bytes, 0);
    }

    #[test]
    fn a_reply_of_many_pieces_keeps_their_order() {
        let (outbox, mut theirs, pool) = pair();
        let mut buffer = pool.buffer(3000);
        buffer.iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
        let buffer = Arc::new(buffer);
        let pieces = (0..3000).rev().map(|i| Slice::new(buffer.clone(), i..i + 1)).collect();
        outbox.send(OutFrame::new(vec![9; 24], Bulk::Many(pieces), None));
        let mut got = vec![0; 3024];
        theirs.read_exact(&mut got).unwrap();
        assert!(got[24..].iter().enumerate().all(|(i, &b)| b == ((2999 - i) % 251) as u8));
    }

    #[test]
    fn closing_gives_up_every_hold() {
        let (outbox, theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        (0..10).for_each(|n| outbox.send(frame(n, 100_000, &pool, &held)));
        outbox.close();
        outbox.send(frame(11, 10, &pool, &held));
        wait_for(|| held.load(Ordering::SeqCst) == 0);
        drop(theirs);
        // A peer that is gone is noticed when sending, without a signal.
        let (outbox, theirs, pool) = pair();
        drop(theirs);
        outbox.send(frame(1, 10, &pool, &held));
        assert!(outbox.is_drained() && held.load(Ordering::SeqCst) == 0);
        assert!(outbox.peer_is_gone());
        let (outbox, theirs, _pool) = pair();
        assert!(!outbox.peer_is_gone());
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(outbox.peer_is_gone());
    }

    #[test]
    fn a_reader_that_takes_a_byte_now_and_then_is_given_up_when_memory_is_short() {
        let (outbox, mut theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
        outbox.send(frame(1, 1_000_000, &pool, &held));
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.reserve(10, Duration::from_secs(60)).is_some()
        });
        wait_for(|| {
            // A socket gives room for more when a page of it was read.
            let _ = theirs.read(&mut [0; 5000]);
            std::thread::sleep(Duration::from_millis(400));
            held.load(Ordering::SeqCst) == 0
        });
        drop(all);
        assert!(waiter.join().unwrap());
    }

    struct Deaf;
    impl crate::readiness::Listener for Deaf {
        fn changed(&self, _: bool) {}
        fn go_on(&self) {}
    }

    /// As long as it is not ready a policy holds its reads back, so that is bounded where nothing waits here, too.
    #[test]
    fn a_reader_that_takes_nothing_of_what_the_kernel_holds_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1 << 20).unwrap();
        let pool = PayloadPool::new(1 << 20);
        let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
        let asked = crate::readiness::MindsConnections::new(&impresario_sched::PolicySpec::named("stream"));
        outbox.readiness.listen(asked, Box::new(Deaf));
        let held = Arc::new(AtomicUsize::new(0));
        while outbox.readiness.is_ready() {
            outbox.send(frame(1, 20_000, &pool, &held));
        }
        assert_eq!(held.load(Ordering::SeqCst), 0, "the kernel has it all");
        let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.reserve(10, Duration::from_secs(60)).is_some()
        });
        wait_for(|| outbox.queue.lock().closed);
        drop(all);
        assert!(waiter.join().unwrap());
    }

    #[test]
    fn a_reader_that_takes_nothing_is_given_up_when_memory_is_short() {
        let (outbox, _theirs, pool) = pair();
        let held = Arc::new(AtomicUsize::new(0));
        let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
        outbox.send(frame(1, 1_000_000, &pool, &held));
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.reserve(10, Duration::from_secs(60)).is_some()
        });
        wait_for(|| held.load(Ordering::SeqCst) == 0);
        drop(all);
        assert!(waiter.join().unwrap());
    }
}
