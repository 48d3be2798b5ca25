//! One connection to a server, from its hand-shake to its end: many threads' calls over one socket.
//!
//! There is no receiving thread. A thread that waits for its answer receives itself when no other does (it
//! *leads*), and hands other threads their answers, payloads straight into their buffers; when its own answer has
//! come it asks one of those that still wait to lead. A single caller thus pays one send and one receive, and no
//! wake-up of another thread.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_base::lock::{Mutex, MutexGuard};
use impresario_config::Address;
use impresario_node::session::{Patience, Sign};
use impresario_sched::Nanos;
use impresario_transport::{Access, FrameReader, HandshakeError, OnStream, Side, Stream, TransportError, say_hello};
use impresario_wire::{Answer, Call, Hello, Kind, Limits, Welcome, decode_body, frame};
use rustix::event::PollFlags;

use crate::clock::nanos;
use crate::error::{ClientError, Peer};
use crate::identity::Identity;
use crate::landing::Landing;
use crate::link::{ServerPosition, Vet};
use crate::round;
use crate::slots::{ABANDONED_MAX, Breakage, Slot, Slots};
use crate::turn::{Outgoing, Put};
use crate::unattended::{End, KEEPER};
use crate::watch;

/// A payload from this size on goes straight to its place rather than through the reader's buffer, bytes.
const LARGE_BYTES: u32 = 32 << 10;
/// A parked thread looks up at least so often.
const PARK_MAX: Duration = Duration::from_millis(500);

/// What a connection is made with.
pub(crate) struct Greeting<'a> {
    pub(crate) peer: &'a Peer,
    pub(crate) hello: &'a Hello,
    pub(crate) deadline: Instant,
    pub(crate) tick: Duration,
    /// Longest payload that is ever asked for, bytes.
    pub(crate) max_payload_bytes: u32,
    pub(crate) poll: Duration,
    pub(crate) patience: Patience,
    pub(crate) waits_for_limits: bool,
    pub(crate) vet: Option<&'a Vet>,
    pub(crate) place: Option<&'a ServerPosition>,
    pub(crate) access: &'a Access,
}

/// A connection that has been welcomed.
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) welcome: Welcome,
    /// Unique in this process: distinguishes this connection from the ones before and after it.
    pub(crate) session: u64,
    identity: Arc<Identity>,
    stream: Stream,
    limits: Limits,
    pub(crate) patience: Patience,
    /// 0 is no call's, see [`KEEPER`].
    next_id: AtomicU64,
    /// Calls outstanding whose payload is large.
    large: AtomicU32,
    pub(crate) slots: Mutex<State>,
    pub(crate) outgoing: Outgoing,
    is_broken: AtomicBool,
    /// A frame is being sent that the server does not take.
    is_clogged: AtomicBool,
    /// The server has once said that a limit withholds calls: only then anybody looks at what it said last.
    has_withheld: AtomicBool,
    /// An answer came: the server works.
    pub(crate) proven: AtomicBool,
}

/// The receiving end and the answer whose payload is coming in.
pub(crate) struct Receiving {
    reader: FrameReader,
    current: Option<Incoming>,
}

struct Incoming {
    id: u64,
    answer: Answer,
    /// Where the payload belongs in the answer's bytes.
    at: u32,
    len: u32,
    filled: u32,
}

pub(crate) type State = Slots<Receiving>;

/// How waiting for an answer ended.
pub(crate) enum Outcome {
    /// The answer and its payload's length.
    Answered(Answer, u32, Vec<u8>),
    /// The connection ended first.
    Broken(Breakage),
    /// The deadline came first.
    Late,
}

/// The end of a call that was waited for.
pub(crate) struct Waited {
    pub(crate) outcome: Outcome,
    /// The server said of it that a limit withholds it, so what it took says nothing about the server.
    pub(crate) was_withheld: bool,
}

/// A call that is waited for.
#[allow(clippy::large_enum_variant, reason = "it is taken apart where it is returned")]
enum Progress {
    Ended(Outcome),
    /// Ask the server for a sign of life.
    Ping,
    Wait,
}

/// A call that could not be started.
pub(crate) enum NotStarted {
    /// Nothing of it was sent.
    Unsent,
    /// Some of it may have arrived.
    Sent(Breakage),
    /// The deadline came first; nothing was sent.
    Late,
    /// It fits in no frame.
    Impossible(frame::FrameError),
}

/// Why a call was not sent.
pub(crate) enum Unsent {
    /// The deadline came first; nothing was sent.
    Late,
    /// The connection has ended over it.
    Broken(Breakage),
}

impl Connection {
    /// Connects and shakes hands.
    pub(crate) fn open(
        address: &Address,
        greeting: &Greeting<'_>,
        identity: &Arc<Identity>,
    ) -> Result<Connection, ClientError> {
        static SESSIONS: AtomicU64 = AtomicU64::new(1);
        let Greeting { peer, hello, deadline, .. } = *greeting;
        let started = Instant::now();
        let failed = |error: HandshakeError| match error {
            HandshakeError::Refused(fault) => ClientError::Refused { peer: peer.clone(), fault },
            HandshakeError::Key(what) => ClientError::Key { peer: peer.clone(), what },
            HandshakeError::Protocol(what) => ClientError::Protocol { peer: peer.clone(), what },
            HandshakeError::Transport(error) => ClientError::Unreachable {
                server: peer.name.clone(),
                address: peer.address.clone(),
                waited: started.elapsed(),
                cause: match error {
                    TransportError::TimedOut => {
                        "it accepted the connection but sent no welcome; is it overloaded?".into()
                    }
                    TransportError::Io(error) if is_not_listening(&error) => {
                        format!("{error}: no server listens there; is it running?")
                    }
                    other => other.to_string(),
                },
            },
        };
        let left = deadline.saturating_duration_since(started).max(Duration::from_millis(1));
        let stream = Stream::connect(address, left, greeting.tick)
            .map_err(|error| failed(TransportError::from(error).into()))?;
        let limits = Limits::of_client(greeting.max_payload_bytes);
        let mut reader = FrameReader::default();
        let (server, membership) = ((peer.name.as_str(), address), identity.membership());
        let welcome = say_hello(&stream, &mut reader, hello, server, greeting.access, membership, &limits, deadline)
            .map_err(failed)?;
        let unfit = |what| ClientError::Protocol { peer: peer.clone(), what };
        greeting.place.map_or(Ok(()), |place| place.check(&welcome)).map_err(unfit)?;
        greeting.vet.map_or(Ok(()), |vet| (vet.0)(&welcome)).map_err(unfit)?;
        stream.poll_before_sleeping(Side::Asks, greeting.poll);
        Ok(Connection {
            peer: peer.clone(),
            welcome,
            session: SESSIONS.fetch_add(1, Ordering::Relaxed),
            identity: identity.clone(),
            stream,
            limits,
            patience: greeting.patience,
            next_id: AtomicU64::new(1),
            large: AtomicU32::new(0),
            slots: Mutex::new(Slots::new(
                Receiving { reader, current: None },
                nanos(Instant::now()),
                greeting.waits_for_limits,
            )),
            outgoing: Outgoing::default(),
            is_broken: AtomicBool::new(false),
            is_clogged: AtomicBool::new(false),
            has_withheld: AtomicBool::new(false),
            proven: AtomicBool::new(false),
        })
    }

    /// Sends a call. `want_bytes` bounds the payload of its answer, which goes into `landing`.
    pub(crate) fn start(
        &self,
        call: &Call,
        payload: &[IoSlice<'_>],
        want_bytes: u32,
        landing: Option<Landing>,
        deadline: Instant,
    ) -> Result<u64, NotStarted> {
        let payload_len: usize = payload.iter().map(|piece| piece.len()).sum();
        let limit = self.welcome.max_payload_bytes.min(self.limits.max_payload_bytes);
        let payload_len = u32::try_from(payload_len).ok().filter(|len| *len <= limit).ok_or_else(|| {
            let (kind, claimed) = (Kind::Call, payload_len as u64);
            NotStarted::Impossible(frame::FrameError::PayloadTooLong { kind, claimed, limit })
        })?;
        let id = self.next_id();
        let head = self.encode(id, call, payload_len).map_err(NotStarted::Impossible)?;
        let payload = if payload_len > 0 { payload } else { &[] };
        let turn = match payload_len {
            0 => None,
            _ => Some(self.patiently(deadline, |until| self.outgoing.take(until)).ok_or(NotStarted::Late)?),
        };
        {
            let mut state = self.slots.lock();
            if state.broken.is_some() {
                return Err(NotStarted::Unsent);
            }
            self.enter(&mut state, id, Slot::new(want_bytes, landing, nanos(Instant::now())));
        }
        let put = |until| match self.outgoing.put(&head, until) {
            Put::Late => None,
            put => Some(put),
        };
        let put = turn.map(Put::Turn).or_else(|| self.patiently(deadline, put)).unwrap_or(Put::Late);
        match self.put_on_wire(&head, payload, put, deadline) {
            Ok(()) => Ok(id),
            Err(Unsent::Late) => {
                self.withdraw(id);
                Err(NotStarted::Late)
            }
            Err(Unsent::Broken(broken)) => {
                self.withdraw(id);
                Err(NotStarted::Sent(broken))
            }
        }
    }

    /// Tries until the deadline, and beyond it while the server says that limits withhold calls of this connection: it reads no others
    /// when it has too many of these.
    fn patiently<T>(&self, deadline: Instant, mut attempt: impl FnMut(Instant) -> Option<T>) -> Option<T> {
        let (mut until, watch) = (deadline, watch::present());
        loop {
            if let Some(done) = attempt(until) {
                return Some(done);
            }
            let is_given_up = watch.as_ref().is_some_and(|watch| watch.is_given_up());
            until = self.is_withholding().filter(|_| !is_given_up)?.min(Instant::now() + PARK_MAX);
        }
    }

    /// The server has said that limits withhold calls of this connection, and its word counts until then.
    pub(crate) fn is_withholding(&self) -> Option<Instant> {
        if !self.has_withheld.load(Ordering::Relaxed) {
            return None;
        }
        self.slots.lock().withheld_until.filter(|until| *until > Instant::now())
    }

    /// The header and body of a call, with the pass that it takes, if any.
    pub(crate) fn encode(&self, id: u64, call: &Call, payload_len: u32) -> Result<Vec<u8>, frame::FrameError> {
        match self.identity.passes.of(call.file(), call.needs_write()) {
            None => frame::encode(Kind::Call, id, call, payload_len),
            Some(pass) => frame::encode(Kind::PassedCall, id, &(pass, call), payload_len),
        }
    }

    /// The number of a new call.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Puts a call on the books of a connection that has not ended.
    pub(crate) fn enter(&self, state: &mut State, id: u64, slot: Slot) {
        if slot.want_bytes >= LARGE_BYTES {
            self.large.fetch_add(1, Ordering::Relaxed);
        }
        state.slots.insert(id, slot);
    }

    /// Sends a call, if it is this thread's turn.
    pub(crate) fn put_on_wire(
        &self,
        head: &[u8],
        payload: &[IoSlice<'_>],
        put: Put<'_>,
        deadline: Instant,
    ) -> Result<(), Unsent> {
        let (mut turn, mut sent) = match put {
            Put::Queued => return Ok(()),
            Put::Late => return Err(Unsent::Late),
            Put::Turn(turn) if payload.is_empty() => {
                let sent = self.send(&turn.batch, &[], deadline);
                (turn, sent)
            }
            Put::Turn(turn) => (turn, self.send(head, payload, deadline)),
        };
        while sent.is_ok() && turn.next() {
            sent = self.send(&turn.batch, &[], deadline);
        }
        let Err(error) = sent else { return Ok(()) };
        Err(Unsent::Broken(match error {
            TransportError::TimedOut => self.break_off("it takes no more requests", false),
            error => self.break_off(&error.to_string(), false),
        }))
    }

    /// Sends a frame. While the server does not take it, what it sends meanwhile is received: it may be waiting for
    /// exactly that.
    fn send(&self, head: &[u8], payload: &[IoSlice<'_>], deadline: Instant) -> Result<(), TransportError> {
        let frame = OnStream::new(&self.stream, head, payload)?;
        let mut unsent = frame.unsent();
        let mut clog = None;
        while !unsent.push(&self.stream)? {
            clog.get_or_insert_with(|| Clog::new(self));
            let now = Instant::now();
            if now >= deadline && self.is_withholding().is_none() {
                return Err(TransportError::TimedOut);
            }
            round::before_waiting();
            // The thread that receives now may stop at any time; then this one must receive.
            let until = now + Duration::from_millis(50);
            let Some(mut receiving) = self.slots.lock().reader.take() else {
                match self.stream.wait(PollFlags::OUT, until) {
                    Ok(_) | Err(TransportError::TimedOut) => continue,
                    Err(error) => return Err(error),
                }
            };
            let ready = self.stream.wait(PollFlags::OUT | PollFlags::IN, until);
            let received = match &ready {
                Ok(ready) if ready.contains(PollFlags::IN) => self.step(&mut receiving, Instant::now()),
                _ => Ok(None),
            };
            let mut state = self.slots.lock();
            self.stop_leading(&mut state, receiving, received.map(drop));
            let (successor, keeper, broken) = (state.successor(), state.keeper_with_jobs(), state.broken.clone());
            drop(state);
            successor.inspect(Thread::unpark);
            keeper.inspect(Thread::unpark);
            if let Some(broken) = broken {
                return Err(TransportError::Io(std::io::Error::other(broken.cause.to_string())));
            }
        }
        Ok(())
    }

    /// Waits for the answer to a call and takes it off the books. At the deadline the call is abandoned, unless the server has
    /// said since that a limit withholds it.
    pub(crate) fn wait(&self, id: u64, deadline: Instant) -> Waited {
        self.wait_while(id, deadline, true)
    }

    /// The same; without `waits_on` it is given up when it is `due` in any case.
    fn wait_while(&self, id: u64, mut due: Instant, mut waits_on: bool) -> Waited {
        let mut was_withheld = false;
        let mut state = self.slots.lock();
        loop {
            let now = Instant::now();
            // Looked at by every wait: else it costs nothing.
            let may_be_withheld = state.withheld_until.is_some();
            if waits_on && may_be_withheld && state.slots.get_mut(&id).is_some_and(Slot::revoke) {
                // Either it is not done at all, or it is under way and ends as others do.
                (waits_on, due) = (false, now + self.withheld_for());
                drop(state);
                self.post(&Call::GiveUp { calls: vec![id] }, now);
                state = self.slots.lock();
            }
            let is_looked_at = waits_on && may_be_withheld;
            let withheld_until = if is_looked_at { self.withheld_until(&state, id) } else { None };
            was_withheld |= withheld_until.is_some();
            let deadline = withheld_until.map_or(due, |until| due.max(until));
            match self.progress(&mut state, id, now, deadline) {
                Progress::Ended(outcome) => {
                    let successor = state.successor();
                    drop(state);
                    successor.inspect(Thread::unpark);
                    return Waited { outcome, was_withheld };
                }
                Progress::Ping => {
                    drop(state);
                    self.ping(now);
                    state = self.slots.lock();
                    continue;
                }
                Progress::Wait => {}
            }
            if let Some(receiving) = state.reader.take() {
                state = self.lead(state, receiving, id, deadline);
                state = self.tell(state);
                continue;
            }
            state.park(id);
            drop(state);
            // Late only while the buffers are lent; the thread that holds them wakes this one.
            let left = if now < deadline { deadline - now } else { PARK_MAX };
            std::thread::park_timeout(left.min(PARK_MAX));
            state = self.slots.lock();
            state.unpark(id);
        }
    }

    /// Until when a call is waited for because a limit withholds it, or those for which the server does not read it.
    fn withheld_until(&self, state: &State, id: u64) -> Option<Instant> {
        let own = state.slots.get(&id).and_then(|slot| slot.withheld_until);
        let others = state.withheld_until.filter(|_| self.is_clogged.load(Ordering::Relaxed));
        own.max(others)
    }

    /// So long counts a server's word that it withholds a call: it says so several times in it.
    pub(crate) fn withheld_for(&self) -> Duration {
        2 * Duration::from_nanos(self.patience.silence.0)
    }

    /// How a call without payload has ended, taken off the books; `None`: not yet. Does not wait.
    pub(crate) fn answer_of(&self, id: u64) -> Option<Outcome> {
        let mut state = self.slots.lock();
        let answer = state.slots.get_mut(&id).and_then(|slot| slot.done.take());
        let outcome = match (answer, state.broken.clone()) {
            (Some((answer, len)), _) => Outcome::Answered(answer, len, Vec::new()),
            (None, Some(broken)) => Outcome::Broken(broken),
            (None, None) => return None,
        };
        self.remove(&mut state, id);
        Some(outcome)
    }

    /// Lends buffers for the payload of a call that was started without. What has come of it already is copied.
    pub(crate) fn lend(&self, id: u64, mut landing: Landing) {
        let mut state = self.slots.lock();
        if let Some(slot) = state.slots.get_mut(&id)
            && slot.landing.is_none()
            && !slot.lent
        {
            landing.put(0, &std::mem::take(&mut slot.spill));
            slot.landing = Some(landing);
        }
    }

    /// Gives a call up. Returns when its buffers are no longer written.
    pub(crate) fn abandon(&self, id: u64) {
        let Some(is_withheld) = self.slots.lock().slots.get(&id).map(Slot::is_withheld) else { return };
        if is_withheld {
            // Else the server would do it some day.
            self.post(&Call::GiveUp { calls: vec![id] }, Instant::now());
        }
        // A wait that is late at once.
        self.wait_while(id, Instant::now(), false);
    }

    /// Takes a call that was not sent off the books; not before its buffers are given back, because a peer may have
    /// answered what it had not yet got.
    fn withdraw(&self, id: u64) {
        self.abandon(id);
        let mut state = self.slots.lock();
        if state.slots.contains_key(&id) {
            state.abandoned -= 1;
            self.remove(&mut state, id);
        }
    }

    /// Ends the connection; every call on it fails.
    pub(crate) fn break_off(&self, cause: &str, protocol: bool) -> Breakage {
        self.break_locked(&mut self.slots.lock(), cause, protocol)
    }

    /// Why the connection has ended, if it has.
    pub(crate) fn broken(&self) -> Option<Breakage> {
        if !self.is_broken.load(Ordering::Acquire) {
            return None;
        }
        self.slots.lock().broken.clone()
    }

    /// Looks whether the server has closed an idle connection. Never waits.
    pub(crate) fn check_idle(&self) -> Option<Breakage> {
        let broken = self.broken();
        if broken.is_none() && self.stream.has_hung_up() {
            return Some(self.break_off("the server closed the connection", false));
        }
        broken
    }

    /// How the call has ended, if it has; or what its thread should do while it waits.
    fn progress(&self, state: &mut State, id: u64, now: Instant, deadline: Instant) -> Progress {
        let is_late = now >= deadline;
        let broken = state.broken.clone();
        let Some(slot) = state.slots.get_mut(&id) else {
            let broken = Breakage { cause: "the call is not under way".into(), protocol: false };
            return Progress::Ended(Outcome::Broken(broken));
        };
        if slot.lent {
            slot.leaving = is_late || broken.is_some();
            return Progress::Wait;
        }
        if let Some((answer, len)) = slot.done.take() {
            let spill = std::mem::take(&mut slot.spill);
            self.remove(state, id);
            return Progress::Ended(Outcome::Answered(answer, len, spill));
        }
        if let Some(broken) = broken {
            self.remove(state, id);
            return Progress::Ended(Outcome::Broken(broken));
        }
        match state.silence.judge(nanos(now), slot.sent, is_late, &self.patience) {
            Sign::GiveUp(silent) => {
                let broken = self.break_silent(state, silent);
                self.remove(state, id);
                return Progress::Ended(if is_late { Outcome::Late } else { Outcome::Broken(broken) });
            }
            Sign::Ping => return Progress::Ping,
            Sign::Wait => {}
        }
        if !is_late {
            return Progress::Wait;
        }
        slot.landing = None;
        slot.spill = Vec::new();
        self.leave_unanswered(state, id);
        Progress::Ended(Outcome::Late)
    }

    /// Nobody wants the answer of a call any more; it stays on the books for when that comes.
    pub(crate) fn leave_unanswered(&self, state: &mut State, id: u64) {
        let Some(slot) = state.slots.get_mut(&id) else { return };
        slot.abandoned = true;
        state.abandoned += 1;
        if state.abandoned > ABANDONED_MAX {
            self.break_locked(state, "too many calls were not answered in time", false);
        }
    }

    /// The server has been silent for too long.
    pub(crate) fn break_silent(&self, state: &mut State, silent: Nanos) -> Breakage {
        let cause = format!("no answer for {:.1} s", Duration::from_nanos(silent.0).as_secs_f64());
        self.break_locked(state, &cause, false)
    }

    /// Asks for a sign of life, which every server gives at once: a slow server is not a dead one.
    pub(crate) fn ping(&self, now: Instant) {
        self.post(&Call::Status, now);
    }

    /// Sends a call of whose answer nobody wants to know.
    pub(crate) fn post(&self, call: &Call, now: Instant) {
        if let Ok(id) = self.start(call, &[], 0, None, now + Duration::from_nanos(self.patience.silence.0 / 2)) {
            let mut state = self.slots.lock();
            if let Some(slot) = state.slots.get_mut(&id)
                && slot.done.is_none()
            {
                slot.abandoned = true;
                state.abandoned += 1;
            } else {
                self.remove(&mut state, id);
            }
        }
    }

    /// Receives for everybody until the own answer is here, one that no thread waits for, the time is up or the connection ends.
    pub(crate) fn lead<'s>(
        &'s self,
        state: MutexGuard<'s, State>,
        mut receiving: Receiving,
        id: u64,
        deadline: Instant,
    ) -> MutexGuard<'s, State> {
        drop(state);
        let received = loop {
            match self.step(&mut receiving, deadline) {
                Ok(Some(finished)) if finished == id || finished == KEEPER => break Ok(()),
                Ok(_) if Instant::now() >= deadline => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        let mut state = self.slots.lock();
        self.stop_leading(&mut state, receiving, received);
        state
    }

    fn stop_leading(&self, state: &mut State, receiving: Receiving, received: Result<(), TransportError>) {
        match received {
            Ok(()) | Err(TransportError::TimedOut) => {}
            Err(error) => {
                let protocol = match &error {
                    TransportError::Frame(_) | TransportError::Unasked(_) => true,
                    TransportError::Farewell(fault) => fault.errno == libc::EPROTO,
                    _ => false,
                };
                self.break_locked(state, &error.to_string(), protocol);
            }
        }
        if state.broken.is_none() {
            state.reader = Some(receiving);
        }
    }

    /// Receives at most once, or delivers an answer that is here already; returns its call.
    fn step(&self, receiving: &mut Receiving, deadline: Instant) -> Result<Option<u64>, TransportError> {
        if receiving.current.is_none() {
            let Some((header, body)) = receiving.reader.take_frame(&self.limits)? else {
                let large = self.large.load(Ordering::Relaxed) > 0;
                return receiving.reader.fill(&self.stream, large, deadline).map(|()| None);
            };
            let header = header.expect(Kind::Answer)?;
            let answer = match decode_body(body)? {
                Answer::Admitted { opened, write, pass } => {
                    self.identity.passes.keep(opened.file, write, pass);
                    Answer::Opened(*opened)
                }
                answer => answer,
            };
            let mut state = self.slots.lock();
            state.silence.heard(nanos(Instant::now()));
            match (header.id, &answer) {
                (0, Answer::Alive) => return Ok(None),
                (0, Answer::Withheld { calls, unread_from }) => {
                    self.has_withheld.store(true, Ordering::Relaxed);
                    let is_given_up = state.withhold(calls, *unread_from, Instant::now() + self.withheld_for());
                    // Whoever waits for a call that is given up is to say so to the server.
                    return Ok(is_given_up.then_some(KEEPER));
                }
                _ => {}
            }
            let Some(slot) = state.slots.get_mut(&header.id).filter(|slot| slot.done.is_none()) else {
                return Err(match answer {
                    Answer::Fault(fault) => TransportError::Farewell(fault),
                    _ => TransportError::Unasked(header.id),
                });
            };
            self.proven.store(true, Ordering::Relaxed);
            let len = header.payload_len;
            if len > slot.want_bytes {
                let limit = slot.want_bytes;
                return Err(frame::FrameError::PayloadTooLong { kind: Kind::Answer, claimed: len.into(), limit }.into());
            }
            let mut at = 0;
            if let Answer::Piece { at: place, missing } = answer {
                slot.gathering.piece(place.into(), len.into(), missing.into()).map_err(|_| misplaced(place, len))?;
                at = place;
            }
            if len == 0 {
                return Ok(self.take_in(state, header.id, answer, 0));
            }
            receiving.current = Some(Incoming { id: header.id, answer, at, len, filled: 0 });
        }
        self.step_payload(receiving, deadline)
    }

    /// Receives some of the payload of the present answer.
    fn step_payload(&self, receiving: &mut Receiving, deadline: Instant) -> Result<Option<u64>, TransportError> {
        let Some(Incoming { id, at, len, filled, .. }) = &mut receiving.current else { return Ok(None) };
        let at = *at as usize;
        let held = receiving.reader.take_payload((*len - *filled) as usize);
        let mut state = self.slots.lock();
        let mut landing = None;
        if let Some(slot) = state.slots.get_mut(id).filter(|slot| !slot.abandoned) {
            match &mut slot.landing {
                Some(landing) => landing.put(at + *filled as usize, held),
                None => slot.keep(at + *filled as usize, held),
            }
            *filled += held.len() as u32;
            if filled < len {
                landing = slot.landing.take();
                slot.lent = landing.is_some();
            }
        } else {
            *filled += held.len() as u32;
        }
        if filled < len {
            drop(state);
            let rest = (*len - *filled) as usize;
            let received = match &mut landing {
                Some(landing) => {
                    let got = landing.with_rest(at + *filled as usize, rest, |rest| {
                        receiving.reader.receive_payload(&self.stream, rest, deadline)
                    });
                    got.map(|got| *filled += got as u32)
                }
                None => receiving.reader.fill_payload(&self.stream, deadline),
            };
            state = self.slots.lock();
            if let Some(landing) = landing
                && let Some(slot) = state.slots.get_mut(id)
            {
                slot.landing = Some(landing);
                slot.lent = false;
                if std::mem::take(&mut slot.leaving)
                    && let Some(waiter) = &slot.waiter
                {
                    waiter.unpark();
                }
            }
            match received {
                Err(TransportError::Closed) => return Err(TransportError::Truncated),
                other => other?,
            }
            state.silence.heard(nanos(Instant::now()));
        }
        if filled >= len
            && let Some(Incoming { id, answer, len, .. }) = receiving.current.take()
        {
            return Ok(self.take_in(state, id, answer, len));
        }
        Ok(None)
    }

    /// A frame is here as a whole: books the answer if it is complete; returns its call.
    fn take_in(&self, mut state: MutexGuard<'_, State>, id: u64, answer: Answer, len: u32) -> Option<u64> {
        let Answer::Piece { at, missing } = answer else { return Some(self.finish(state, id, answer, len)) };
        let slot = state.slots.get_mut(&id)?;
        slot.zero((at + len) as usize, missing as usize);
        let gathering = slot.gathering;
        if gathering.is_complete() {
            return Some(self.finish(state, id, Answer::Data, gathering.whole_bytes() as u32));
        }
        state.tell_came(id, at as usize..(at + len) as usize).then_some(KEEPER)
    }

    /// Books an answer and wakes its caller, with the lock released so that it does not wake in vain. Gives the call, or
    /// [`KEEPER`] for one that no thread waits for.
    fn finish(&self, mut state: MutexGuard<'_, State>, id: u64, answer: Answer, len: u32) -> u64 {
        if state.slots.get(&id).is_some_and(|slot| slot.until.is_some()) {
            state.end_unattended(id, End::Answered(answer, len as usize));
            self.remove(&mut state, id);
            return KEEPER;
        }
        let waiter = match state.slots.get_mut(&id) {
            Some(slot) if slot.abandoned => {
                state.abandoned -= 1;
                self.remove(&mut state, id);
                None
            }
            Some(slot) => {
                slot.done = Some((answer, len));
                slot.waiter.clone()
            }
            None => None,
        };
        drop(state);
        waiter.inspect(Thread::unpark);
        id
    }

    pub(crate) fn remove(&self, state: &mut State, id: u64) {
        if let Some(slot) = state.slots.remove(&id)
            && slot.want_bytes >= LARGE_BYTES
        {
            self.large.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn break_locked(&self, state: &mut State, cause: &str, protocol: bool) -> Breakage {
        if let Some(broken) = &state.broken {
            return broken.clone();
        }
        let broken = Breakage { cause: cause.into(), protocol };
        if state.unanswered() > 0 {
            // Before any thread can see that the connection is gone: a call is repeated in a new epoch only.
            self.identity.epochs().give_up();
        }
        tracing::debug!(server = %self.peer, session = self.session, cause, "connection given up");
        state.broken = Some(broken.clone());
        self.is_broken.store(true, Ordering::Release);
        self.stream.shut_down();
        state.reader = None;
        state.wake_all();
        broken
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.stream.shut_down();
    }
}

/// While it exists, a frame is being sent that the server does not take: what is queued behind it has not left either.
struct Clog<'a>(&'a Connection);

impl Clog<'_> {
    fn new(connection: &Connection) -> Clog<'_> {
        connection.is_clogged.store(true, Ordering::Relaxed);
        Clog(connection)
    }
}

impl Drop for Clog<'_> {
    fn drop(&mut self) {
        self.0.is_clogged.store(false, Ordering::Relaxed);
    }
}

/// The error for a piece of an answer that does not fit into what is left of it.
fn misplaced(at: u32, len: u32) -> TransportError {
    frame::FrameError::BadBody { what: format!("a piece of {len} bytes at {at} has no place in its answer") }.into()
}

fn is_not_listening(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound)
}
