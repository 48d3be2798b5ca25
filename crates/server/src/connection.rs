//! One client's connection as a service sees it: who it is, how much it may ask for at once, how it is answered.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_engine::Engine;
use impresario_node::credits::Standing;
use impresario_node::session::SIGN_EVERY;
use impresario_sched::ConnId;
use impresario_transport::{Guest, Keyring, Proven, Stream};
use impresario_wire::{Answer, Fault, FrameError, KeyRole, Kind, Restriction, Who, frame};
use rustix::net::Shutdown;

use crate::addresses::{AddressId, Share, Tenancy};
use crate::export::{Asker, Export};
use crate::listener::{before_waiting, host_of};
use crate::outbox::{Bulk, Hold, OutFrame, Outbox};
use crate::payload::{PayloadPool, Reservation};
use crate::readiness::{Listener, MindsConnections};

/// Most calls of one connection that are accepted and whose replies have not yet left.
const CALLS_MAX: u32 = 4096;

/// Frames with bodies from this length on are counted as memory, bytes; shorter ones are bounded by [`CALLS_MAX`].
const BODY_CHARGED_BYTES: u64 = 4096;
/// So long a call waits for what others hold that are withheld, before it is looked whether it is withheld still.
const WITHHELD_FOR: Duration = Duration::from_secs(2);

/// The rule that a client is under.
pub(crate) struct Under {
    pub(crate) export: Arc<Export>,
    /// The keys of the server.
    pub(crate) keys: Option<Arc<Keyring>>,
    /// The user that the client has proved to be, where the rule asks for that.
    pub(crate) user: Option<Proven>,
}

/// A client's connection.
pub struct Connection {
    id: ConnId,
    peer: String,
    /// What the client's hello said; set once.
    hello: OnceLock<(String, Who, Guest)>,
    /// Set before that, of a client that is under a rule.
    under: OnceLock<Under>,
    pub(crate) outbox: Arc<Outbox>,
    pool: Arc<PayloadPool>,
    /// Its place among the connections of its address; `None` for one that is refused.
    tenancy: Option<Tenancy>,
    gate: Gate,
    ended: AtomicBool,
    /// Its server takes no more calls, and answers those that it has as far as it comes.
    server_stops: AtomicBool,
    made: Instant,
    /// When its last call came, milliseconds since it was made.
    active_ms: AtomicU64,
    /// Since when it owes a slice of a write's bytes, milliseconds since it was made plus one; 0: it owes none.
    owing_ms: AtomicU64,
    /// When [`Connection::is_due`] was last true, milliseconds since it was made.
    due_ms: AtomicU64,
    /// A rule withholds calls of it.
    withheld: AtomicBool,
}

/// What is under way on a connection; its limits are what bounds the outbox.
struct Gate {
    state: Mutex<Load>,
    room: Condvar,
    bytes_max: u64,
    /// The number of the call that waits for room, and behind which nothing is read; 0: none does.
    waiting_call: AtomicU64,
}

#[derive(Clone, Copy, Default)]
struct Load {
    calls: u32,
    bytes: u64,
    /// Threads that wait for a change: a signal without a waiter costs a system call too.
    waiting: u32,
}

impl Gate {
    /// Waits for a change.
    fn wait<'a>(&'a self, mut load: MutexGuard<'a, Load>, patience: Duration) -> MutexGuard<'a, Load> {
        load.waiting += 1;
        let mut load = self.room.wait_timeout(load, patience).0;
        load.waiting -= 1;
        load
    }

    /// The call waits for room until this is dropped.
    fn waits_with(&self, call: u64) -> WaitsForRoom<'_> {
        self.waiting_call.store(call, Ordering::Relaxed);
        WaitsForRoom(self)
    }

    /// Calls that are answered, and bytes that are no longer under way.
    fn give_back(&self, calls: u32, bytes: u64) {
        let mut load = self.state.lock();
        load.calls -= calls;
        load.bytes -= bytes;
        if load.waiting > 0 {
            self.room.notify_all();
        }
    }
}

struct WaitsForRoom<'a>(&'a Gate);

impl Drop for WaitsForRoom<'_> {
    fn drop(&mut self) {
        self.0.waiting_call.store(0, Ordering::Relaxed);
    }
}

impl Connection {
    pub(crate) fn new(
        id: ConnId,
        peer: String,
        outbox: Arc<Outbox>,
        pool: Arc<PayloadPool>,
        bytes_max: u64,
        tenancy: Option<Tenancy>,
    ) -> Arc<Connection> {
        let gate = Gate { state: Mutex::default(), room: Condvar::new(), bytes_max, waiting_call: AtomicU64::new(0) };
        let (made, hello, under) = (Instant::now(), OnceLock::new(), OnceLock::new());
        let (ended, server_stops, active_ms, owing_ms, due_ms, withheld) = Default::default();
        Arc::new(Connection {
            id,
            peer,
            hello,
            under,
            outbox,
            pool,
            tenancy,
            gate,
            ended,
            server_stops,
            made,
            active_ms,
            owing_ms,
            due_ms,
            withheld,
        })
    }

    fn age_ms(&self) -> u64 {
        self.age().as_millis() as u64
    }

    /// How long ago it was made.
    pub(crate) fn age(&self) -> Duration {
        self.made.elapsed()
    }

    /// A call came.
    pub(crate) fn note_call(&self) {
        self.active_ms.store(self.age_ms(), Ordering::Relaxed);
    }

    /// True once in this time, for what need not be asked at every call. For the connection's own thread.
    pub(crate) fn is_due(&self, every: Duration) -> bool {
        let now = self.age_ms();
        let due = now.saturating_sub(self.due_ms.load(Ordering::Relaxed)) >= every.as_millis() as u64;
        if due {
            self.due_ms.store(now, Ordering::Relaxed);
        }
        due
    }

    /// How long it has had no call under way; `None` when it has one.
    pub(crate) fn idle_for(&self) -> Option<Duration> {
        let idle_ms = self.age_ms().saturating_sub(self.active_ms.load(Ordering::Relaxed));
        (self.calls_under_way() == 0).then(|| Duration::from_millis(idle_ms))
    }

    /// It has said hello.
    pub(crate) fn is_greeted(&self) -> bool {
        self.hello.get().is_some()
    }

    /// The bytes of a write, or a slice of them, are to come from now on; or have come.
    pub(crate) fn note_owing(&self, owes: bool) {
        self.owing_ms.store(if owes { self.age_ms() + 1 } else { 0 }, Ordering::Relaxed);
    }

    /// How long a slice of a write's bytes has been on its way.
    pub(crate) fn owes_for(&self) -> Duration {
        match self.owing_ms.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => Duration::from_millis((self.age_ms() + 1).saturating_sub(since)),
        }
    }

    /// The machine that the client speaks from; all clients on Unix sockets are one.
    pub(crate) fn host(&self) -> &str {
        host_of(&self.peer)
    }

    /// The address that it counts for; `None` for one that is refused.
    pub(crate) fn address(&self) -> Option<AddressId> {
        self.tenancy.as_ref().map(Tenancy::address)
    }

    /// It has held memory without progress while others waited for it: so that its machine does not do so again at once, that
    /// has little of it for a while.
    pub(crate) fn suspect(&self) {
        self.tenancy.iter().for_each(Tenancy::suspect);
    }

    /// Its machine is suspect.
    pub(crate) fn is_suspect(&self) -> bool {
        self.tenancy.as_ref().is_some_and(Tenancy::is_suspect)
    }

    /// Bytes of requests and answers under way.
    pub(crate) fn bytes_under_way(&self) -> u64 {
        self.gate.state.lock().bytes
    }

    pub(crate) fn introduce(&self, name: String, who: Who, guest: Guest, under: Option<Under>) {
        if let Some(under) = under {
            let _ = self.under.set(under);
        }
        if guest.role == Some(KeyRole::Server) && guest.is_proven() {
            self.tenancy.iter().for_each(Tenancy::is_of_a_server);
        }
        let _ = self.hello.set((name, who, guest));
    }

    /// The rule that the client is under.
    pub(crate) fn under(&self) -> Option<&Under> {
        self.under.get()
    }

    /// What the client's users are to servers of names; `None`: what its calls say.
    pub(crate) fn restriction(&self) -> Option<Restriction> {
        self.under().and_then(|under| under.export.restriction(under.user))
    }

    /// What the hand-shake proved of the client.
    pub(crate) fn guest(&self) -> Option<&Guest> {
        self.hello.get().map(|(_, _, guest)| guest)
    }

    /// Lets the policies that go by connections know from now on whether this one can take data.
    pub(crate) fn report_readiness<T: Send + 'static>(&self, engine: &Arc<Engine<T>>, asked: &Arc<MindsConnections>) {
        let listener = Scheduler { engine: Arc::downgrade(engine), conn: self.id };
        self.outbox.readiness.listen(asked.clone(), Box::new(listener));
    }

    /// An outbox for calls that are passed on in the client's name.
    pub(crate) fn outbox_to(&self, stream: Arc<Stream>) -> Arc<Outbox> {
        let peer = format!("the metadata server, for {}", self.peer);
        let outbox = Outbox::new(stream.clone(), peer, self.pool.clone());
        stream.session().inspect(|session| outbox.protect((*session).clone()));
        outbox
    }

    /// Number of the connection, unique while the server runs (until four thousand million have come).
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// Where the client speaks from.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What the client calls itself, for logs.
    pub fn name(&self) -> &str {
        self.hello.get().map_or("", |(name, ..)| name)
    }

    /// What the client said of itself in its hello.
    pub fn who(&self) -> Who {
        self.hello.get().map(|(_, who, _)| *who).unwrap_or_default()
    }

    /// Ends the connection now, in both directions. Its queued requests are cancelled by its thread.
    pub fn close(&self) {
        self.ended.store(true, Ordering::Release);
        self.outbox.close();
        self.gate.room.notify_all();
    }

    /// The server stops: no further call is received.
    pub(crate) fn receive_no_more(&self) {
        self.server_stops.store(true, Ordering::Release);
        self.outbox.shutdown(Shutdown::Read);
    }

    /// True once the connection has ended: answers go nowhere.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Waits until the connection may have the call of that number with `bytes` of payload or reply under way;
    /// the error says why not.
    /// More of it may be asked for later only unless `is_whole`. A rule withholds calls like it that are under way if
    /// `is_limited`: then it waits as these do, however long.
    pub(crate) fn admit(
        self: &Arc<Self>,
        call: u64,
        bytes: u64,
        (is_whole, is_limited): (bool, bool),
        patience: Duration,
    ) -> Result<Slot, Denied> {
        let deadline = Instant::now() + patience;
        self.enter(call, bytes).ok_or(Denied::Ended)?;
        let mut slot = Slot { connection: self.clone(), bytes, booked_body: false, reservation: None, share: None };
        // At once or, with nothing held back from the client meanwhile, later.
        if let Some(tenancy) = &self.tenancy {
            let mut share = tenancy.share(bytes, Duration::ZERO);
            let waits = (share.is_none() && is_limited).then(|| self.gate.waits_with(call));
            while share.is_none() && (Instant::now() < deadline || is_limited && self.is_withheld()) {
                if self.has_ended() || self.outbox.peer_is_gone() {
                    return Err(Denied::Ended);
                }
                self.waits();
                share = tenancy.share(bytes, SIGN_EVERY);
            }
            drop(waits);
            slot.share = Some(share.ok_or(Denied::Address)?);
        }
        // Also a call without payload waits for those that have too much: its answer may be long.
        if is_limited && bytes > 0 {
            slot.reservation = self.reserve_limited(call, bytes)?;
        }
        if slot.reservation.is_none() && (bytes > 0 || self.pool.is_over()) {
            let standing = match self.tenancy.as_ref().filter(|_| is_whole) {
                Some(tenancy) if tenancy.is_suspect() => Standing::Suspect,
                Some(tenancy) => self.pool.standing(tenancy.bytes_under_way()),
                None => Standing::Usual,
            };
            let reservation = self.pool.reserve_for(standing, bytes, Duration::ZERO, &|| {}).or_else(|| {
                let left = deadline.saturating_duration_since(Instant::now());
                self.pool.reserve_for(standing, bytes, left.max(patience / 2), &|| self.waits())
            });
            slot.reservation = Some(reservation.ok_or(Denied::Memory)?);
        }
        Ok(slot)
    }

    /// Waits for memory for a call that is withheld, as long as it may be; `None` when that is over and it gets memory as others do.
    fn reserve_limited(&self, call: u64, bytes: u64) -> Result<Option<Reservation>, Denied> {
        let mut waits = None;
        let mut patience = Duration::ZERO;
        while self.is_withheld() {
            let reservation = self.pool.reserve_for(Standing::Withheld, bytes, patience, &|| self.waits());
            if reservation.is_some() {
                return Ok(reservation);
            }
            if self.has_ended() || self.outbox.peer_is_gone() {
                return Err(Denied::Ended);
            }
            // Its client is told that neither this call nor what comes after it has been read.
            waits.get_or_insert_with(|| self.gate.waits_with(call));
            patience = WITHHELD_FOR;
        }
        Ok(None)
    }

    /// A rule of the policy withholds calls of this connection, or did until a moment ago.
    pub(crate) fn is_withheld(&self) -> bool {
        self.withheld.load(Ordering::Relaxed)
    }

    /// Notes whether it does; gives what was noted before.
    pub(crate) fn note_withheld(&self, is_withheld: bool) -> bool {
        self.withheld.swap(is_withheld, Ordering::Relaxed)
    }

    /// The call is the client's own: those of others, which an I/O node passes on, must not wait for one another.
    pub(crate) fn is_own(&self, who: Option<&Who>) -> bool {
        let client = self.hello.get().map(|(_, who, _)| who.client);
        client.is_some() && who.map(|who| who.client) == client
    }

    /// Counts a call in, as soon as the connection's limits allow it; `None` when the connection ended meanwhile.
    fn enter(&self, call: u64, bytes: u64) -> Option<()> {
        let mut load = self.gate.state.lock();
        let mut waits = None;
        // One call is always allowed, whatever its size: it was checked against the largest payload.
        while load.calls > 0 && (load.calls >= CALLS_MAX || load.bytes + bytes > self.gate.bytes_max) {
            // How long depends on this client alone (it does not read its replies, or its requests are
            // slow): it is not failed for that. The writer gives up on one that never reads.
            if self.has_ended() || self.outbox.peer_is_gone() {
                return None;
            }
            waits.get_or_insert_with(|| self.gate.waits_with(call));
            drop(load);
            self.waits();
            load = self.gate.state.lock();
            if load.calls > 0 && (load.calls >= CALLS_MAX || load.bytes + bytes > self.gate.bytes_max) {
                load = self.gate.wait(load, SIGN_EVERY);
            }
        }
        load.calls += 1;
        load.bytes += bytes;
        Some(())
    }

    /// The first of the calls that are not read before others of the connection are done; `None`: all are read as they come.
    pub(crate) fn unread_from(&self) -> Option<u64> {
        Some(self.gate.waiting_call.load(Ordering::Relaxed)).filter(|call| *call > 0)
    }

    /// The thread that receives is about to wait for room, or goes on waiting.
    fn waits(&self) {
        // It may be that of another connection.
        self.outbox.give_sign();
        before_waiting();
    }

    /// A slot for an answer to a call that is not served; `None` when the connection ended meanwhile. Needs no memory.
    pub(crate) fn admit_answer(self: &Arc<Self>) -> Option<Slot> {
        self.enter(0, 0)?;
        Some(Slot { connection: self.clone(), bytes: 0, booked_body: false, reservation: None, share: None })
    }

    /// Waits until every accepted call is answered and the answers have left; false when time ran out.
    pub(crate) fn settle(&self, deadline: Instant) -> bool {
        let mut load = self.gate.state.lock();
        while load.calls > 0 && !self.has_ended() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            load = self.gate.wait(load, left);
        }
        true
    }

    pub(crate) fn calls_under_way(&self) -> u32 {
        self.gate.state.lock().calls
    }
}

/// An engine whose policy may ask whether a connection can take data.
struct Scheduler<T: Send + 'static> {
    engine: Weak<Engine<T>>,
    conn: ConnId,
}

impl<T: Send + 'static> Listener for Scheduler<T> {
    fn changed(&self, ready: bool) {
        self.engine.upgrade().inspect(|engine| engine.note_readiness(self.conn, ready));
    }

    fn go_on(&self) {
        self.engine.upgrade().inspect(|engine| engine.go_on());
    }
}

/// Why a call is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denied {
    /// The connection ended meanwhile.
    Ended,
    /// The server's payload memory stayed full.
    Memory,
    /// The client's address has its share under way.
    Address,
}

/// A call's share of its connection's limits and of the server's payload memory.
pub(crate) struct Slot {
    connection: Arc<Connection>,
    bytes: u64,
    /// All of it is for the body of the answer.
    booked_body: bool,
    reservation: Option<Reservation>,
    share: Option<Share>,
}

impl Slot {
    /// Permission for more bytes of the call's payload, which come in slices; false when memory stayed short.
    pub(crate) fn grow(&mut self, bytes: u64, patience: Duration) -> bool {
        self.connection.gate.state.lock().bytes += bytes;
        self.bytes += bytes;
        self.share.iter_mut().for_each(|share| share.grow(bytes));
        let connection = &self.connection;
        self.reservation.as_mut().is_none_or(|reservation| reservation.grow(bytes, patience, &|| connection.waits()))
    }

    /// What it was admitted with is for the body of the answer, of which that is the most.
    pub(crate) fn book_body(&mut self) {
        self.booked_body = true;
    }

    /// The body of the answer has this length. True if it was booked; what was booked beyond it is given back.
    fn keeps_body(&mut self, bytes: u64) -> bool {
        let spare = self.bytes.saturating_sub(bytes);
        if !self.booked_body || bytes > self.bytes {
            return false;
        }
        self.bytes = bytes;
        self.share.iter_mut().for_each(|share| share.shrink_to(bytes));
        self.reservation.iter_mut().for_each(|reservation| reservation.shrink_to(bytes));
        self.connection.gate.give_back(0, spare);
        true
    }
}

/// The memory of an answer's body, or of a call's that is passed on, until it has left, where none was booked beforehand
/// ([`Slot::book_body`]): a connection with many of them unread is given no further call, and a server with many of them admits no
/// more payload.
struct Body {
    slot: Arc<Slot>,
    bytes: u64,
    _reservation: Reservation,
}

impl Body {
    fn new(slot: Arc<Slot>, bytes: u64) -> Body {
        slot.connection.gate.state.lock().bytes += bytes;
        let _reservation = slot.connection.pool.charge(bytes);
        Body { slot, bytes, _reservation }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.slot.connection.gate.state.lock().bytes -= self.bytes;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop(self.reservation.take());
        self.connection.gate.give_back(1, self.bytes);
    }
}

/// The answer that one call is owed, from any thread. Dropped unanswered it answers with EIO.
pub struct Reply {
    id: u64,
    slot: Option<Arc<Slot>>,
    /// The call is to open a file for writing.
    opens_to_write: bool,
}

impl Reply {
    pub(crate) fn new(id: u64, slot: Slot) -> Reply {
        Reply { id, slot: Some(Arc::new(slot)), opens_to_write: false }
    }

    /// The same to a call that needs the right to write.
    pub(crate) fn for_writer(self, needs_write: bool) -> Reply {
        let mut reply = self;
        reply.opens_to_write = needs_write;
        reply
    }

    /// Answers without bulk data.
    pub fn send(self, answer: &Answer) {
        self.send_bulk(answer, Bulk::None);
    }

    /// Answers with bulk data, which may not be more than the call asked for.
    pub fn send_bulk(mut self, answer: &Answer, bulk: Bulk) {
        if let Some(slot) = self.slot.take() {
            let ruled = slot.connection.under().and_then(|under| {
                let asker = Asker { client: slot.connection.who().client, pass: None, keys: under.keys.as_deref() };
                under.export.answer(answer, self.opens_to_write, &asker)
            });
            post(self.id, ruled.as_ref().unwrap_or(answer), bulk, slot);
        }
    }

    /// Answers with the bytes read.
    pub fn send_data(self, bulk: Bulk) {
        self.send_bulk(&Answer::Data, bulk);
    }

    /// Answers that it failed.
    pub fn fault(self, errno: i32, message: impl Into<String>) {
        self.send(&Answer::Fault(Fault { errno, message: message.into() }));
    }

    /// Sends one frame of an answer that has several; the call stays under way until [`Reply::settle`].
    pub(crate) fn send_frame(&self, answer: &Answer, bulk: Bulk) {
        if let Some(slot) = &self.slot {
            post(self.id, answer, bulk, slot.clone());
        }
    }

    /// What a copy of its call holds, which is passed on, until it has left.
    pub(crate) fn hold(&self, bytes: usize) -> Option<Hold> {
        self.slot.clone().map(|slot| hold(slot, bytes))
    }

    /// Takes the answer over; what is left behind says nothing.
    pub(crate) fn take(&mut self) -> Reply {
        Reply { id: self.id, slot: self.slot.take(), opens_to_write: self.opens_to_write }
    }

    /// The last frame was sent.
    pub(crate) fn settle(&mut self) {
        self.slot = None;
    }

    /// The connection that its call came on, and the call's number there; `None` once it is answered.
    pub(crate) fn call(&self) -> Option<(&Arc<Connection>, u64)> {
        self.slot.as_ref().map(|slot| (&slot.connection, self.id))
    }

    /// The client has closed the connection, as far as this machine knows.
    pub(crate) fn client_is_gone(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.connection.outbox.peer_is_gone())
    }

    /// Says nothing: for a client that is gone.
    pub fn forget(mut self) {
        self.settle();
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            // Of a server that stops nobody knows whether it was done, and its client may ask another one.
            let (errno, message) = match slot.connection.server_stops.load(Ordering::Acquire) {
                true => (Fault::PATH_LOST, "the server stops, and has not finished the request"),
                false => (libc::EIO, "the server gave the request up; try again or see its log"),
            };
            post(self.id, &Answer::Fault(Fault { errno, message: message.into() }), Bulk::None, slot);
        }
    }
}

fn post(id: u64, answer: &Answer, bulk: Bulk, slot: Arc<Slot>) {
    let outbox = slot.connection.outbox.clone();
    let (head, bulk) = match encode(id, answer, bulk.len_bytes()) {
        Ok(head) => (head, bulk),
        Err(error) => {
            let message = format!("the answer does not fit into a frame: {error}; ask for less at once");
            let fault = Answer::Fault(Fault { errno: libc::EMSGSIZE, message });
            (encode(id, &fault, 0).unwrap_or_default(), Bulk::None)
        }
    };
    let hold = hold(slot, head.len());
    outbox.send(OutFrame::new(head, bulk, Some(hold)));
}

/// What a frame with a body of this length holds.
fn hold(mut slot: Arc<Slot>, bytes: usize) -> Hold {
    let bytes = bytes as u64;
    if Arc::get_mut(&mut slot).is_some_and(|slot| slot.keeps_body(bytes)) {
        return slot;
    }
    match bytes {
        0..BODY_CHARGED_BYTES => slot,
        bytes => Arc::new(Body::new(slot, bytes)),
    }
}

/// The header and body of an answer.
pub(crate) fn encode(id: u64, answer: &Answer, payload_bytes: usize) -> Result<Vec<u8>, FrameError> {
    // Never more than was asked for, which fits; a wrong length would only get the connection closed.
    frame::encode(Kind::Answer, id, answer, payload_bytes as u32)
}
