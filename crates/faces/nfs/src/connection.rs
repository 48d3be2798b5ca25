//! One connection: its thread receives calls and sends what other threads could not send at once; its peer must keep up.
//!
//! An answer is sent by the thread that has it, as far as the socket takes it without waiting. The rest is left to the
//! connection's thread, so no thread of the server ever waits for a peer. A connection with too many calls or bytes under
//! way is not read from until some are answered: the peer waits, and no call is lost.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::unpaced;
use impresario_engine::CachedReads;
use impresario_node::Readiness;
use impresario_node::credits::Progress;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg};

use crate::budget::{Budget, Reservation};
use crate::records::{BadStream, Received, Record, Records};

/// Calls of one connection under way at most.
const CALLS_MAX: u32 = 128;
/// A call that has begun to come must go on within this time, and be whole within [`RECORD_MAX`].
const STALL_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
const RECORD_MAX: Duration = Duration::from_secs(120);
/// A new connection must bring a call within this time.
const FIRST_CALL_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether a peer takes its answers.
const PROGRESS_LOOK: Duration = Duration::from_secs(1);
/// How often a connection looks for memory that it waits for.
const MEMORY_LOOK: Duration = Duration::from_millis(10);
/// A call for whose answer there is no memory for longer is answered with NFS3ERR_JUKEBOX: its client asks again later.
const MEMORY_PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of answers under way that make a connection busy for the scheduler.
const BUSY_BYTES: u64 = 64 << 10;
/// Parts of answers that leave in one call.
const PARTS_MAX: usize = 32;

/// What is done with what a connection brings.
pub trait Receiver: Send + Sync {
    /// A record came. Given back where there is no memory for its answer, to be brought again a little later, unless it has
    /// waited for long (`patient` is false).
    fn record(&self, connection: &Arc<Connection>, record: Record, patient: bool) -> Option<Record>;
    /// The connection takes data again, or does not. Called with a lock held: nothing may be sent.
    fn readiness(&self, connection: &Connection, ready: bool);
    /// After a change to ready, without a lock.
    fn go_on(&self);
    /// The peer did something that should be logged.
    fn complain(&self, connection: &Connection, what: &str);
}

/// An answer as it leaves.
pub struct Frame {
    /// Record mark and results, up to the payload.
    pub head: Vec<u8>,
    /// Bytes of a file, with what fills their last unit of four.
    pub payload: Option<(Arc<Vec<u8>>, Range<usize>)>,
    /// The memory that it holds.
    pub held: Reservation,
}

impl Frame {
    fn parts(&self) -> [&[u8]; 3] {
        let payload = self.payload.as_ref().map_or(&[][..], |(bytes, range)| bytes.get(range.clone()).unwrap_or(&[]));
        [&self.head, payload, crate::xdr::filling(payload.len())]
    }

    /// Its length, bytes.
    pub fn len(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }
}

#[derive(Default)]
struct Out {
    frames: VecDeque<Frame>,
    /// Of the first frame.
    sent_bytes: usize,
    unsent_bytes: u64,
    /// Sent since it began.
    all_sent_bytes: u64,
    /// How fast the peer takes what it asked for, while anything is unsent.
    progress: Option<Progress>,
    closed: bool,
    readiness: Readiness,
}

/// Limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest call, bytes.
    pub record_max_bytes: usize,
    /// Calls and answers under way at most, bytes.
    pub bytes_max: u64,
    /// A connection without calls is closed after this time.
    pub idle_max: Duration,
}

/// A connection.
pub struct Connection {
    /// Its number.
    pub id: u32,
    /// The client.
    pub peer: SocketAddr,
    socket: TcpStream,
    wake: OwnedFd,
    limits: Limits,
    out: Mutex<Out>,
    calls_under_way: AtomicU32,
    bytes_under_way: AtomicU64,
    /// The thread waits for calls to end.
    paused: AtomicBool,
    /// No more calls are taken; it ends when those under way are answered.
    closing: AtomicBool,
    /// Milliseconds since it began at which it had a call last.
    last_call_ms: AtomicU64,
    began: Instant,
    receiver: Arc<dyn Receiver>,
    /// Whether its reads that the page cache may have are worth looking for before they wait for a thread.
    pub cached: CachedReads,
}

impl Connection {
    /// On an accepted socket.
    pub fn new(
        id: u32,
        socket: TcpStream,
        peer: SocketAddr,
        limits: Limits,
        receiver: Arc<dyn Receiver>,
    ) -> std::io::Result<Arc<Connection>> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        unpaced::settle(&socket);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Connection {
            id,
            peer,
            socket,
            wake,
            limits,
            out: Mutex::default(),
            calls_under_way: AtomicU32::new(0),
            bytes_under_way: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            last_call_ms: AtomicU64::new(0),
            began: Instant::now(),
            receiver,
            cached: CachedReads::default(),
        }))
    }

    /// Calls that are not answered yet.
    pub fn calls_under_way(&self) -> u32 {
        self.calls_under_way.load(Ordering::Relaxed)
    }

    /// For how long it has had no call; `None` while one is under way.
    pub fn idle(&self) -> Option<Duration> {
        let last = Duration::from_millis(self.last_call_ms.load(Ordering::Relaxed));
        (self.calls_under_way() == 0 && self.unsent_bytes() == 0).then(|| self.began.elapsed().saturating_sub(last))
    }

    /// True when nothing more can be sent to the peer.
    pub fn is_closed(&self) -> bool {
        self.out.lock().closed
    }

    /// Answers that wait for the peer, bytes.
    pub fn unsent_bytes(&self) -> u64 {
        self.out.lock().unsent_bytes
    }

    /// A call begins, with what it and its answer take.
    pub fn begin(&self, bytes: u64) {
        self.calls_under_way.fetch_add(1, Ordering::AcqRel);
        self.bytes_under_way.fetch_add(bytes, Ordering::AcqRel);
    }

    /// A call that began with so many bytes has ended, answered or not.
    pub fn ended(&self, bytes: u64) {
        self.bytes_under_way.fetch_sub(bytes, Ordering::AcqRel);
        let calls = self.calls_under_way.fetch_sub(1, Ordering::AcqRel);
        let since = self.began.elapsed().as_millis() as u64;
        self.last_call_ms.store(since, Ordering::Relaxed);
        if self.paused.load(Ordering::Acquire) || calls == 1 && self.closing.load(Ordering::Acquire) {
            self.wake();
        }
    }

    /// Sends an answer, or leaves it to be sent.
    pub fn send(&self, frame: Frame) {
        let mut out = self.out.lock();
        if out.closed {
            return;
        }
        let waits = !out.frames.is_empty();
        out.unsent_bytes += frame.len() as u64;
        out.frames.push_back(frame);
        if !waits {
            out.progress = Some(Progress::new(out.all_sent_bytes, self.began.elapsed()));
            self.push(&mut out);
            if !out.frames.is_empty() || out.closed {
                self.wake();
            }
        }
        self.report(out);
    }

    /// Takes no more calls; ends when those under way are answered.
    pub fn finish(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    /// Ends at once.
    pub fn close(&self) {
        self.close_out();
        self.wake();
    }

    fn close_out(&self) {
        let frames = {
            let mut out = self.out.lock();
            out.closed = true;
            out.unsent_bytes = 0;
            out.progress = None;
            let frames = std::mem::take(&mut out.frames);
            // What of its calls is queued need not wait for it.
            self.report(out);
            frames
        };
        drop(frames);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sends what the socket takes.
    fn push(&self, out: &mut Out) {
        while !out.frames.is_empty() {
            let mut skip = out.sent_bytes;
            let mut parts = Vec::with_capacity(PARTS_MAX);
            'frames: for frame in &out.frames {
                for part in frame.parts() {
                    let from = skip.min(part.len());
                    skip -= from;
                    if from < part.len() {
                        parts.push(IoSlice::new(&part[from..]));
                    }
                    if parts.len() >= PARTS_MAX {
                        break 'frames;
                    }
                }
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = sendmsg(&self.socket, &parts, &mut SendAncillaryBuffer::default(), flags);
            match sent {
                Ok(sent) => {
                    out.all_sent_bytes += sent as u64;
                    out.unsent_bytes -= sent as u64;
                    out.sent_bytes += sent;
                    while let Some(len) = out.frames.front().map(Frame::len).filter(|len| *len <= out.sent_bytes) {
                        out.sent_bytes -= len;
                        out.frames.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => {
                    out.closed = true;
                    out.frames.clear();
                    out.unsent_bytes = 0;
                }
            }
        }
        out.progress = None;
    }

    /// Reports a change of readiness in the order in which it came about.
    fn report(&self, mut out: impresario_base::lock::MutexGuard<'_, Out>) {
        let unsent = out.unsent_bytes;
        let changed = out.readiness.observe(unsent, BUSY_BYTES);
        if let Some(ready) = changed {
            self.receiver.readiness(self, ready);
        }
        drop(out);
        if changed == Some(true) {
            self.receiver.go_on();
        }
    }

    /// True while no more may be taken in.
    fn is_full(&self) -> bool {
        self.calls_under_way.load(Ordering::Acquire) >= CALLS_MAX
            || self.bytes_under_way.load(Ordering::Acquire) + self.unsent_bytes() >= self.limits.bytes_max
    }

    /// Serves it, on a thread of its own, until it ends.
    pub fn serve(self: &Arc<Connection>, budget: &Arc<Budget>) {
        let mut records = Records::new(self.limits.record_max_bytes, budget.clone());
        if let Err(why) = self.converse(&mut records, budget)
            && !matches!(why, Ended::Peer)
        {
            self.receiver.complain(self, &why.to_string());
        }
        self.close_out();
    }

    fn converse(self: &Arc<Connection>, records: &mut Records, budget: &Budget) -> Result<(), Ended> {
        let (mut called, mut input_over) = (false, false);
        // Since when this side does not read, so that what the peer sends lies in the socket, and whether for want of memory.
        let mut unread_since = None;
        // When the record that is coming began to, and when bytes came last.
        let (mut record_began, mut last_bytes) = (None, Instant::now());
        // A call that waits for memory.
        let mut parked: Option<(Record, Instant)> = None;
        loop {
            // Before it is looked how much is under way: an answer that leaves afterwards wakes this thread.
            self.paused.store(true, Ordering::Release);
            let closing = self.closing.load(Ordering::Acquire);
            while !closing && !self.is_full() {
                let (record, since) = match parked.take() {
                    Some(parked) => parked,
                    None => match records.take()? {
                        Some(record) => (record, Instant::now()),
                        None => break,
                    },
                };
                (called, record_began) = (true, None);
                let patient = since.elapsed() < MEMORY_PATIENCE;
                parked = self.receiver.record(self, record, patient).map(|record| (record, since));
                if parked.is_some() {
                    break;
                }
            }
            let full = self.is_full();
            self.paused.store(full || closing || input_over, Ordering::Release);
            let takes = !full && !closing && !input_over && parked.is_none();
            let (unsent, out_closed, is_too_slow) = {
                let (mut out, is_short) = (self.out.lock(), budget.is_short());
                let sent_bytes = out.all_sent_bytes;
                let too_slow =
                    |progress: &mut Progress| progress.is_too_slow(sent_bytes, self.began.elapsed(), is_short);
                let is_too_slow = out.progress.as_mut().is_some_and(too_slow);
                (!out.frames.is_empty(), out.closed, is_too_slow)
            };
            if out_closed {
                return Err(Ended::Peer);
            }
            if (closing || input_over && !full && parked.is_none()) && !unsent && self.calls_under_way() == 0 {
                return Ok(());
            }
            if is_too_slow {
                return Err(Ended::Unsent);
            }
            let now = Instant::now();
            // The peer's time stands still as long as it is not read from. What holds memory for a call and waits for more ends all the same,
            // or many such could hold all of it.
            if let Some((since, is_short)) = unread_since.replace((now, takes)) {
                let unread = now.saturating_duration_since(since);
                last_bytes += unread;
                record_began = record_began.map(|began| if is_short { began } else { began + unread });
            }
            if takes && !records.is_short() {
                unread_since = None;
            }
            record_began = if records.has_begun() { record_began.or(Some(now)) } else { None };
            // Until the nearest of the times at which something is too late.
            let mut wait = self.limits.idle_max;
            if unsent {
                wait = wait.min(PROGRESS_LOOK);
            }
            match record_began {
                _ if parked.is_some() => wait = wait.min(MEMORY_LOOK),
                _ if !takes => {}
                Some(began) => {
                    wait = wait.min(left(began, RECORD_MAX, now).ok_or(Ended::Stalled)?);
                    wait = match records.is_short() {
                        true => wait.min(MEMORY_LOOK),
                        false => wait.min(left(last_bytes, STALL_MAX, now).ok_or(Ended::Stalled)?),
                    };
                }
                None if !called => wait = wait.min(left(self.began, FIRST_CALL_MAX, now).ok_or(Ended::Silent)?),
                None => {
                    if let Some(idle) = self.idle() {
                        wait = wait.min(self.limits.idle_max.checked_sub(idle).ok_or(Ended::Peer)?);
                    }
                }
            }
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::IN, takes && !records.is_short());
            interest.set(PollFlags::OUT, unsent);
            let got = self.wait(interest, wait)?;
            if got.contains(PollFlags::OUT) {
                let mut out = self.out.lock();
                self.push(&mut out);
                self.report(out);
            }
            if got.contains(PollFlags::IN) {
                match records.receive(&self.socket)? {
                    Received::Bytes => last_bytes = Instant::now(),
                    Received::Nothing => {}
                    Received::End => input_over = true,
                }
            } else if got.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
                // Both directions are gone: there is nobody to answer.
                return Err(Ended::Peer);
            }
        }
    }

    /// Waits for the socket, or for another thread to wake this one.
    fn wait(&self, interest: PollFlags, most: Duration) -> Result<PollFlags, Ended> {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.socket, interest)];
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        match poll(&mut fds, Some(&most)) {
            Ok(_) | Err(Errno::INTR) => {
                let [wake, socket] = fds;
                if !wake.revents().is_empty() {
                    let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
                }
                Ok(socket.revents())
            }
            Err(error) => Err(Ended::System(error)),
        }
    }
}

/// What is left of a time that began; `None` when it is over.
fn left(since: Instant, most: Duration, now: Instant) -> Option<Duration> {
    most.checked_sub(now.saturating_duration_since(since)).filter(|left| !left.is_zero())
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("it has closed the connection, or was idle")]
    Peer,
    #[error("it stopped in the middle of a call")]
    Stalled,
    #[error("it sent nothing")]
    Silent,
    #[error("it did not take its answers")]
    Unsent,
    #[error("{0}")]
    Stream(#[from] BadStream),
    #[error("waiting failed: {0}")]
    System(Errno),
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;
    use crate::budget::budget;

    /// Has taken these records; all but the last remain under way.
    struct Takes(Mutex<mpsc::Sender<Arc<Connection>>>);

    impl Receiver for Takes {
        fn record(&self, connection: &Arc<Connection>, _: Record, _: bool) -> Option<Record> {
            connection.begin(1);
            let _ = self.0.lock().send(connection.clone());
            None
        }

        fn readiness(&self, _: &Connection, _: bool) {}

        fn go_on(&self) {}

        fn complain(&self, _: &Connection, _: &str) {}
    }

    const PATIENCE: Duration = Duration::from_secs(30);

    /// A connection that is served, with one byte under way at most: its peer's end, and the calls that come.
    fn served(budget: Arc<Budget>) -> (TcpStream, mpsc::Receiver<Arc<Connection>>, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, address) = listener.accept().unwrap();
        let limits = Limits { record_max_bytes: 4096, bytes_max: 1, idle_max: PATIENCE };
        let (told, calls) = mpsc::channel();
        let connection = Connection::new(0, socket, address, limits, Arc::new(Takes(Mutex::new(told)))).unwrap();
        (peer, calls, std::thread::spawn(move || connection.serve(&budget)))
    }

    const CALL: [u8; 8] = [0x80, 0, 0, 4, 1, 2, 3, 4];

    #[test]
    fn a_peer_is_not_late_while_it_is_not_read_from() {
        let (mut peer, calls, serving) = served(budget(1 << 20));
        peer.write_all(&[&CALL[..], &CALL[..5]].concat()).unwrap();
        let connection = calls.recv_timeout(PATIENCE).unwrap();
        // The server takes its time; the rest of the second call has come meanwhile.
        std::thread::sleep(STALL_MAX * 3 / 2);
        peer.write_all(&CALL[5..]).unwrap();
        connection.ended(1);
        calls.recv_timeout(PATIENCE).expect("it was cut off").ended(1);
        drop(peer);
        serving.join().unwrap();
    }

    #[test]
    fn a_peer_that_takes_a_byte_now_and_then_holds_no_memory_that_others_wait_for() {
        let budget = budget(1 << 20);
        let (mut peer, calls, serving) = served(budget.clone());
        peer.write_all(&CALL).unwrap();
        let connection = calls.recv_timeout(PATIENCE).unwrap();
        let mut held = Reservation::nothing(budget.clone());
        // More than the sockets take, and the whole budget.
        assert!(held.grow(32 << 20));
        connection.send(Frame { head: vec![0; 32 << 20], payload: None, held });
        connection.ended(1);
        // Sooner than one that nobody else waits for.
        let until = Instant::now() + Duration::from_secs(20);
        while !serving.is_finished() {
            assert!(Instant::now() < until, "it goes on");
            let found_some = Reservation::nothing(budget.clone()).grow(1);
            assert!(!found_some || connection.is_closed());
            let _ = peer.read(&mut [0; 1]);
            std::thread::sleep(Duration::from_millis(50));
        }
        serving.join().unwrap();
        assert!(Reservation::nothing(budget).grow(1));
    }
}
