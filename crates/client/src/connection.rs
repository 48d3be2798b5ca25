//! One connection to a server, from its hand-shake to its end: many threads' calls over one socket.
//!
//! There is no receiving thread. A thread that waits for its answer receives itself when nobody else does (it
//! *leads*), and hands other threads their answers, payloads straight into their buffers; when its own answer has
//! come it asks one of those that still wait to lead. A single caller thus pays one send and one receive, and no
//! wake-up of another thread.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_config::Address;
use impresario_wire::{Answer, Call, Hello, Kind, Limits, PROTOCOL_VERSION, Welcome, decode_body, frame};
use rustix::event::PollFlags;

use crate::error::{ClientError, Peer, TransportError};
use crate::identity::Identity;
use crate::landing::Landing;
use crate::slots::{ABANDONED_MAX, Breakage, Slot, Slots};
use crate::transport::{FrameReader, Stream, Unsent, send_frame};
use crate::turn::{Outgoing, Put, lock};

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
    /// A server that is silent for so long with calls outstanding is given up: at once with another way to go, otherwise
    /// at the deadline of a call.
    pub(crate) patience: Duration,
    /// There are other servers to turn to.
    pub(crate) has_other_ways: bool,
}

/// A connection that has been welcomed.
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) welcome: Welcome,
    /// Unique in this process: tells this connection from the one before and after it.
    pub(crate) session: u64,
    identity: Arc<Identity>,
    stream: Stream,
    limits: Limits,
    patience: Duration,
    has_other_ways: bool,
    next_id: AtomicU64,
    /// Calls outstanding whose payload is large.
    large: AtomicU32,
    slots: Mutex<State>,
    outgoing: Outgoing,
    is_broken: AtomicBool,
    /// An answer came: the server works.
    pub(crate) proven: AtomicBool,
}

/// The receiving end and the answer whose payload is coming in.
struct Receiving {
    reader: FrameReader,
    current: Option<Incoming>,
}

struct Incoming {
    id: u64,
    answer: Answer,
    len: u32,
    filled: u32,
}

type State = Slots<Receiving>;

/// How waiting for an answer ended.
pub(crate) enum Outcome {
    /// The answer and its payload's length.
    Answered(Answer, u32, Vec<u8>),
    /// The connection ended first.
    Broken(Breakage),
    /// The deadline came first.
    Late,
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
        let failed = |error: TransportError| match error {
            TransportError::Frame(error) => ClientError::Protocol { peer: peer.clone(), what: error.to_string() },
            other => ClientError::Unreachable {
                server: peer.name.clone(),
                address: peer.address.clone(),
                waited: started.elapsed(),
                cause: match other {
                    TransportError::TimedOut => {
                        "it accepted the connection but sent no welcome; is it overloaded?".into()
                    }
                    TransportError::Io(error) if is_nobody(&error) => {
                        format!("{error}: nobody listens there; is it running?")
                    }
                    other => other.to_string(),
                },
            },
        };
        let left = deadline.saturating_duration_since(started).max(Duration::from_millis(1));
        let stream = Stream::connect(address, left, greeting.tick).map_err(|error| failed(error.into()))?;
        let limits = Limits { max_payload_bytes: greeting.max_payload_bytes };
        let mut reader = FrameReader::default();
        let head = frame::encode(Kind::Hello, 0, hello, 0).map_err(|error| failed(error.into()))?;
        // A server that refuses may close before it has read us; its reason is still there to be read.
        let sent = send_frame(&stream, &head, &[], deadline);
        let (header, body) = match (reader.next_frame(&stream, &limits, deadline), sent) {
            (Ok(frame), _) => frame,
            (Err(TransportError::Closed), Err(error)) | (Err(error), _) => return Err(failed(error)),
        };
        let protocol = |what: String| ClientError::Protocol { peer: peer.clone(), what };
        let welcome: Welcome = match header.kind {
            Kind::Welcome => decode_body(body).map_err(|error| protocol(error.to_string()))?,
            Kind::Answer => match decode_body(body).map_err(|error| protocol(error.to_string()))? {
                Answer::Fault(fault) => return Err(ClientError::Refused { peer: peer.clone(), fault }),
                other => return Err(protocol(format!("it answered a hello with {other:?}"))),
            },
            other => return Err(protocol(format!("it answered a hello with a {other:?} frame"))),
        };
        if welcome.version != PROTOCOL_VERSION {
            return Err(protocol(format!(
                "it speaks version {} of the protocol, this program version {PROTOCOL_VERSION}; \
                 use the same release on both sides",
                welcome.version
            )));
        }
        // Data of one server must not be taken for another's.
        if !peer.name.is_empty() && welcome.name != peer.name {
            return Err(protocol(format!(
                "the server there calls itself {:?}; correct the address in the configuration",
                welcome.name
            )));
        }
        Ok(Connection {
            peer: peer.clone(),
            welcome,
            session: SESSIONS.fetch_add(1, Ordering::Relaxed),
            identity: identity.clone(),
            stream,
            limits,
            patience: greeting.patience,
            has_other_ways: greeting.has_other_ways,
            next_id: AtomicU64::new(1),
            large: AtomicU32::new(0),
            slots: Mutex::new(Slots::new(Receiving { reader, current: None })),
            outgoing: Outgoing::default(),
            is_broken: AtomicBool::new(false),
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
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let head = frame::encode(Kind::Call, id, call, payload_len).map_err(NotStarted::Impossible)?;
        let turn = if payload_len > 0 { Some(self.outgoing.take(deadline).ok_or(NotStarted::Late)?) } else { None };
        {
            let mut state = lock(&self.slots);
            if state.broken.is_some() {
                return Err(NotStarted::Unsent);
            }
            state.slots.insert(id, Slot::new(want_bytes, landing));
        }
        if want_bytes >= LARGE_BYTES {
            self.large.fetch_add(1, Ordering::Relaxed);
        }
        let (mut turn, sent) = match turn.map_or_else(|| self.outgoing.put(&head, deadline), Put::Turn) {
            Put::Queued => return Ok(id),
            Put::Late => {
                self.withdraw(id);
                return Err(NotStarted::Late);
            }
            Put::Turn(turn) if payload_len > 0 => (turn, self.send(&head, payload, deadline)),
            Put::Turn(turn) => {
                let sent = self.send(&turn.batch, &[], deadline);
                (turn, sent)
            }
        };
        let mut sent = sent;
        while sent.is_ok() && turn.next() {
            sent = self.send(&turn.batch, &[], deadline);
        }
        let Err(error) = sent else { return Ok(id) };
        let broken = match error {
            TransportError::TimedOut => self.break_off("it takes no more requests", false),
            error => self.break_off(&error.to_string(), false),
        };
        drop(turn);
        self.withdraw(id);
        Err(NotStarted::Sent(broken))
    }

    /// Sends a frame. While the server does not take it, what it sends meanwhile is received: it may be waiting for
    /// exactly that.
    fn send(&self, head: &[u8], payload: &[IoSlice<'_>], deadline: Instant) -> Result<(), TransportError> {
        let mut unsent = Unsent::new(head, payload);
        while !unsent.push(&self.stream)? {
            let now = Instant::now();
            if now >= deadline {
                return Err(TransportError::TimedOut);
            }
            // Whoever receives now may stop doing so at any time: then it is up to us.
            let until = deadline.min(now + Duration::from_millis(50));
            let Some(mut receiving) = lock(&self.slots).reader.take() else {
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
            let mut state = lock(&self.slots);
            self.stop_leading(&mut state, receiving, received.map(drop));
            let (successor, broken) = (state.successor(), state.broken.clone());
            drop(state);
            successor.inspect(Thread::unpark);
            if let Some(broken) = broken {
                return Err(TransportError::Io(std::io::Error::other(broken.cause.to_string())));
            }
        }
        Ok(())
    }

    /// Waits for the answer to a call and takes it off the books. At the deadline the call is abandoned.
    pub(crate) fn wait(&self, id: u64, deadline: Instant) -> Outcome {
        let mut state = lock(&self.slots);
        loop {
            let now = Instant::now();
            if let Some(outcome) = self.outcome(&mut state, id, now, deadline) {
                let successor = state.successor();
                drop(state);
                successor.inspect(Thread::unpark);
                return outcome;
            }
            if self.should_ping(&mut state, id, now) {
                drop(state);
                self.ping(now);
                state = lock(&self.slots);
                continue;
            }
            if let Some(receiving) = state.reader.take() {
                state = self.lead(state, receiving, id, deadline);
                continue;
            }
            state.park(id);
            drop(state);
            // Late only while the buffers are lent; whoever has them wakes us.
            let left = if now < deadline { deadline - now } else { PARK_MAX };
            std::thread::park_timeout(left.min(PARK_MAX));
            state = lock(&self.slots);
            state.unpark(id);
        }
    }

    /// Lends buffers for the payload of a call that was started without. What has come of it already is copied.
    pub(crate) fn lend(&self, id: u64, mut landing: Landing) {
        let mut state = lock(&self.slots);
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
        // A wait that is late at once.
        if lock(&self.slots).slots.contains_key(&id) {
            self.wait(id, Instant::now());
        }
    }

    /// Takes a call that was not sent off the books; not before its buffers are given back, because a peer may have
    /// answered what it had not yet got.
    fn withdraw(&self, id: u64) {
        self.abandon(id);
        let mut state = lock(&self.slots);
        if state.slots.contains_key(&id) {
            state.abandoned -= 1;
            self.remove(&mut state, id);
        }
    }

    /// Ends the connection; every call on it fails.
    pub(crate) fn break_off(&self, cause: &str, protocol: bool) -> Breakage {
        self.break_locked(&mut lock(&self.slots), cause, protocol)
    }

    /// Why the connection has ended, if it has.
    pub(crate) fn broken(&self) -> Option<Breakage> {
        if !self.is_broken.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.slots).broken.clone()
    }

    /// Looks whether the server has closed an idle connection. Never waits.
    pub(crate) fn check_idle(&self) -> Option<Breakage> {
        let broken = self.broken();
        if broken.is_none() && self.stream.has_hung_up() {
            return Some(self.break_off("the server closed the connection", false));
        }
        broken
    }

    /// How the call has ended, if it has.
    fn outcome(&self, state: &mut State, id: u64, now: Instant, deadline: Instant) -> Option<Outcome> {
        let is_late = now >= deadline;
        let (broken, last_heard) = (state.broken.clone(), state.last_heard);
        let Some(slot) = state.slots.get_mut(&id) else {
            return Some(Outcome::Broken(Breakage { cause: "the call is not under way".into(), protocol: false }));
        };
        if slot.lent {
            slot.leaving = is_late || broken.is_some();
            return None;
        }
        if let Some((answer, len)) = slot.done.take() {
            let spill = std::mem::take(&mut slot.spill);
            self.remove(state, id);
            return Some(Outcome::Answered(answer, len, spill));
        }
        if let Some(broken) = broken {
            self.remove(state, id);
            return Some(Outcome::Broken(broken));
        }
        let silent_for = now - last_heard.max(slot.started).min(now);
        if silent_for >= self.patience && (is_late || self.has_other_ways) {
            let broken = self.break_locked(state, &format!("no answer for {:.1} s", silent_for.as_secs_f64()), false);
            self.remove(state, id);
            return Some(if is_late { Outcome::Late } else { Outcome::Broken(broken) });
        }
        if is_late {
            slot.landing = None;
            slot.spill = Vec::new();
            slot.abandoned = true;
            state.abandoned += 1;
            if state.abandoned > ABANDONED_MAX {
                self.break_locked(state, "too many calls were not answered in time", false);
            }
            return Some(Outcome::Late);
        }
        None
    }

    /// True once when the server has been silent for half as long as it may be.
    fn should_ping(&self, state: &mut State, id: u64, now: Instant) -> bool {
        let since = state.slots.get(&id).map_or(now, |slot| slot.started.max(state.last_heard));
        let is_long = now.saturating_duration_since(since) >= self.patience / 2;
        let is_due = is_long && self.has_other_ways && !state.pinged;
        state.pinged |= is_due;
        is_due
    }

    /// Asks for a sign of life, which every server gives at once: a slow server is not a dead one.
    fn ping(&self, now: Instant) {
        if let Ok(id) = self.start(&Call::Status, &[], 0, None, now + self.patience / 2) {
            let mut state = lock(&self.slots);
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

    /// Receives for everybody until the own answer is here, the time is up or the connection ends.
    fn lead<'s>(
        &'s self,
        state: MutexGuard<'s, State>,
        mut receiving: Receiving,
        id: u64,
        deadline: Instant,
    ) -> MutexGuard<'s, State> {
        drop(state);
        let received = loop {
            match self.step(&mut receiving, deadline) {
                Ok(finished) if finished == Some(id) || Instant::now() >= deadline => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        let mut state = lock(&self.slots);
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

    /// Receives at most once, or delivers an answer that is here already; tells whose.
    fn step(&self, receiving: &mut Receiving, deadline: Instant) -> Result<Option<u64>, TransportError> {
        if receiving.current.is_none() {
            let Some((header, body)) = receiving.reader.take_frame(&self.limits)? else {
                let large = self.large.load(Ordering::Relaxed) > 0;
                return receiving.reader.fill(&self.stream, large, deadline).map(|()| None);
            };
            let header = header.expect(Kind::Answer)?;
            let answer: Answer = decode_body(body)?;
            let mut state = lock(&self.slots);
            (state.last_heard, state.pinged) = (Instant::now(), false);
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
            if len == 0 {
                return Ok(Some(self.finish(state, header.id, answer, 0)));
            }
            receiving.current = Some(Incoming { id: header.id, answer, len, filled: 0 });
        }
        self.step_payload(receiving, deadline)
    }

    /// Receives some of the payload of the present answer.
    fn step_payload(&self, receiving: &mut Receiving, deadline: Instant) -> Result<Option<u64>, TransportError> {
        let Some(Incoming { id, len, filled, .. }) = &mut receiving.current else { return Ok(None) };
        let held = receiving.reader.take_payload((*len - *filled) as usize);
        let mut state = lock(&self.slots);
        let mut landing = None;
        if let Some(slot) = state.slots.get_mut(id).filter(|slot| !slot.abandoned) {
            match &mut slot.landing {
                Some(landing) => landing.put(*filled as usize, held),
                None => slot.spill.extend_from_slice(held),
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
                    let got = landing.with_rest(*filled as usize, rest, |rest| self.stream.receive(rest, deadline));
                    got.map(|got| *filled += got as u32)
                }
                None => receiving.reader.fill(&self.stream, false, deadline),
            };
            state = lock(&self.slots);
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
            state.last_heard = Instant::now();
        }
        if filled >= len
            && let Some(Incoming { id, answer, len, .. }) = receiving.current.take()
        {
            return Ok(Some(self.finish(state, id, answer, len)));
        }
        Ok(None)
    }

    /// Books an answer and wakes its caller, with the lock released so that it does not wake in vain.
    fn finish(&self, mut state: MutexGuard<'_, State>, id: u64, answer: Answer, len: u32) -> u64 {
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

    fn remove(&self, state: &mut State, id: u64) {
        if let Some(slot) = state.slots.remove(&id)
            && slot.want_bytes >= LARGE_BYTES
        {
            self.large.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn break_locked(&self, state: &mut State, cause: &str, protocol: bool) -> Breakage {
        if let Some(broken) = &state.broken {
            return broken.clone();
        }
        let broken = Breakage { cause: cause.into(), protocol };
        if state.unanswered() > 0 {
            // Before anybody can see that the connection is gone: whoever repeats a call must do it in a new epoch.
            self.identity.raise_epoch();
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

fn is_nobody(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound)
}
