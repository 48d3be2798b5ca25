//! Metadata calls through an I/O node. Each client has its own connection to the metadata server, so that its opens are
//! closed there when it disconnects.
//!
//! Calls leave in the order in which they came, and each is answered when the metadata server answers it: a call that
//! waits there, for a data server that hangs, delays no other call of its client, and no renewal of its lease. What of
//! their order matters, epochs and sequences decide at the metadata server, as for a client that is connected to it
//! directly.
//!
//! Bounds: a client has as many calls under way as its connection has slots, and the bytes of long ones count as its
//! payload until they have left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_config::META_NAME;
use impresario_node::session::{Patience, Sign, Silence};
use impresario_sched::Nanos;
use impresario_transport::{Access, FrameReader, Membership, Side, Stream, TransportError, say_hello, send_frame};
use impresario_wire::{Answer, Call, ClusterId, Hello, Kind, Limits, PROTOCOL_VERSION, Restriction, Role, frame};
use rustc_hash::FxHashMap;

use crate::connection::{Connection, Reply};
use crate::export::restricting;
use crate::outbox::{Bulk, OutFrame, Outbox, STACK_BYTES};
use crate::withheld::GivenUp;

/// First and longest pause between attempts to connect.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// Shortest and longest time between two looks at the clock of a thread that receives.
const TICK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// Metadata calls carry no payload.
const NO_PAYLOAD: Limits = Limits::of_client(0);

/// How to reach the metadata server.
pub(crate) struct Upstream {
    /// `host:port` or `unix:/path`.
    pub(crate) address: String,
    /// How long a metadata server that cannot be reached, or says nothing, is waited for.
    pub(crate) timeout: Duration,
    /// How long the thread that waits for answers may poll before it sleeps; zero: never.
    pub(crate) poll: Duration,
    /// Name of this I/O node, for the metadata server's log.
    pub(crate) via: String,
    /// The cluster that both belong to.
    pub(crate) membership: Arc<Membership>,
    /// The keys of this I/O node.
    pub(crate) access: Access,
}

/// A client's connection to the metadata server. Dropping it ends its thread and closes the connection.
pub(super) struct MetaProxy(Arc<Passing>);

/// What the client's own thread, which sends, and the proxy's thread, which connects and receives, share.
struct Passing {
    upstream: Arc<Upstream>,
    client: Arc<Connection>,
    last_id: AtomicU64,
    state: Mutex<State>,
    /// A call waits for a connection, or the proxy has ended.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Where calls leave, once there is a connection.
    outbox: Option<Arc<Outbox>>,
    /// Calls that came before.
    unsent: Vec<(u64, OutFrame)>,
    /// The calls that have no answer yet.
    waiting: FxHashMap<u64, Waiting>,
    ended: bool,
    has_thread: bool,
}

struct Waiting {
    reply: Reply,
    since: Nanos,
}

impl MetaProxy {
    /// Starts the proxy of a client's connection; it connects at the first call.
    pub(super) fn new(upstream: &Arc<Upstream>, client: &Arc<Connection>) -> MetaProxy {
        let (upstream, client) = (upstream.clone(), client.clone());
        let (last_id, changed) = Default::default();
        let state = Mutex::new(State { has_thread: true, ..State::default() });
        let passing = Arc::new(Passing { upstream, client, last_id, state, changed });
        let here = passing.clone();
        let thread = std::thread::Builder::new().name("metadata".into()).stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(move || here.run()) {
            tracing::warn!(%error, "no thread to forward a client's metadata calls; raise its limit (ulimit -u)");
            let mut state = passing.state.lock();
            (state.ended, state.has_thread) = (true, false);
        }
        MetaProxy(passing)
    }

    /// Sends a call on, and answers it when its answer comes. Never waits.
    pub(super) fn pass_on(&self, call: &Call, reply: Reply) {
        self.0.pass_on(call, reply);
    }

    /// Passes on that the client gives calls up. Never waits.
    pub(super) fn give_up(&self, given_up: &GivenUp) {
        self.0.give_up(given_up);
    }
}

impl Drop for MetaProxy {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Passing {
    fn pass_on(&self, call: &Call, reply: Reply) {
        let (id, frame) = match self.frame(call, &reply) {
            Ok(framed) => framed,
            Err(error) => return reply.fault(libc::EMSGSIZE, format!("{}: {error}", self.upstream.via)),
        };
        let mut state = self.state.lock();
        if state.ended {
            // Without a thread the reply is dropped, which is EIO. Else the client's connection has ended or is about to, and
            // the call was not sent on: the client repeats it.
            if state.has_thread {
                drop(state);
                reply.forget();
            }
            return;
        }
        state.waiting.insert(id, Waiting { reply, since: impresario_engine::now() });
        match &state.outbox {
            Some(outbox) => {
                let outbox = outbox.clone();
                drop(state);
                outbox.send(frame);
            }
            None => {
                state.unsent.push((id, frame));
                drop(state);
                self.changed.notify_one();
            }
        }
    }

    /// The client does not want these calls any more: the metadata server forgets those that it withholds.
    fn give_up(&self, given_up: &GivenUp) {
        let (outbox, calls) = {
            let state = self.state.lock();
            let mine = state.waiting.iter().filter(|(_, waiting)| given_up.has(&waiting.reply));
            (state.outbox.clone(), mine.map(|(id, _)| *id).collect::<Vec<_>>())
        };
        if let Some(outbox) = outbox.filter(|_| !calls.is_empty()) {
            self.send_unasked(&outbox, &Call::GiveUp { calls });
        }
    }

    fn frame(&self, call: &Call, reply: &Reply) -> Result<(u64, OutFrame), frame::FrameError> {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let head = frame::encode(Kind::Call, id, call, 0)?;
        let hold = reply.hold(head.len());
        Ok((id, OutFrame::new(head, Bulk::None, hold)))
    }

    /// The proxy's thread.
    fn run(&self) {
        while let Some(since) = self.wait_for_a_call() {
            match self.connect(since) {
                Ok(link) => return self.serve(link),
                Err(_) if self.client.has_ended() => return self.end(),
                Err(reason) => self.refuse_late(&reason),
            }
        }
    }

    /// Since when the oldest call waits; `None` once the proxy has ended.
    fn wait_for_a_call(&self) -> Option<Nanos> {
        let state = self.state.lock();
        let state = self.changed.wait_while(state, |state| state.waiting.is_empty() && !state.ended);
        state.oldest().filter(|_| !state.ended)
    }

    /// Answers the calls whose time is up.
    fn refuse_late(&self, reason: &str) {
        let now = impresario_engine::now();
        let late: Vec<Waiting> = {
            let mut state = self.state.lock();
            let timeout = self.upstream.timeout;
            let is_late = |waiting: &Waiting| Duration::from_nanos(now.since(waiting.since).0) + BACK_OFF.1 >= timeout;
            let late: Vec<u64> =
                state.waiting.iter().filter(|(_, waiting)| is_late(waiting)).map(|(id, _)| *id).collect();
            state.unsent.retain(|(id, _)| !late.contains(id));
            late.iter().filter_map(|id| state.waiting.remove(id)).collect()
        };
        late.into_iter().for_each(|waiting| waiting.reply.fault(libc::EIO, self.complaint(reason)));
    }

    /// Serves the client over a connection, until that ends. The metadata server has then forgotten what the client had
    /// open, and the client learns it as if it were connected there directly: its connection ends.
    fn serve(&self, link: Link) {
        let Link { stream, mut reader } = link;
        let outbox = self.client.outbox_to(stream.clone());
        {
            let mut state = self.state.lock();
            if state.ended {
                return stream.shut_down();
            }
            std::mem::take(&mut state.unsent).into_iter().for_each(|(_, frame)| outbox.send(frame));
            state.outbox = Some(outbox.clone());
        }
        let broken = self.receive(&stream, &mut reader, &outbox);
        if !self.state.lock().ended {
            let client = self.client.peer();
            tracing::warn!(client, reason = %broken, "lost the metadata server; the client must reconnect");
        }
        self.end();
        self.client.close();
    }

    /// Hands out answers; why there are no more.
    fn receive(&self, stream: &Stream, reader: &mut FrameReader, outbox: &Arc<Outbox>) -> TransportError {
        let timeout = self.upstream.timeout;
        // The metadata server answers a status call at once, whatever its other calls wait for.
        let patience = Patience { silence: span(timeout), has_other_ways: true };
        let mut silence = Silence::new(impresario_engine::now());
        loop {
            // Silence means nothing before half the timeout: while no call waits, fewer looks will do.
            let looks = if self.state.lock().waiting.is_empty() { 8 } else { 2 };
            match reader.next_frame(stream, &NO_PAYLOAD, Instant::now() + looks * tick(timeout)) {
                Ok((header, body)) => {
                    silence.heard(impresario_engine::now());
                    let answer =
                        header.expect(Kind::Answer).and_then(|header| Ok((header.id, frame::decode_body(body)?)));
                    let handed =
                        answer.map_err(TransportError::from).and_then(|(id, answer)| self.hand_out(id, &answer));
                    if let Err(broken) = handed {
                        return broken;
                    }
                }
                Err(TransportError::TimedOut) => {
                    let Some(since) = self.state.lock().oldest() else { continue };
                    match silence.judge(impresario_engine::now(), since, false, &patience) {
                        Sign::Wait => {}
                        Sign::Ping => self.send_unasked(outbox, &Call::Status),
                        Sign::GiveUp(_) => return TransportError::TimedOut,
                    }
                }
                Err(broken) => return broken,
            }
        }
    }

    fn hand_out(&self, id: u64, answer: &Answer) -> Result<(), TransportError> {
        if let (0, Answer::Withheld { calls, unread_from }) = (id, answer) {
            let state = self.state.lock();
            let is_unread = |id: u64| unread_from.is_some_and(|from| id >= from);
            let unread = state.waiting.keys().filter(|id| is_unread(**id));
            let number = |id| state.waiting.get(id).and_then(|waiting| Some(waiting.reply.call()?.1));
            let calls = calls.iter().chain(unread).filter_map(number).collect();
            drop(state);
            let unread_from = self.client.unread_from();
            self.client.outbox.send_if_free(&Answer::Withheld { calls, unread_from });
            return Ok(());
        }
        let waiting = self.state.lock().waiting.remove(&id);
        match (waiting, answer) {
            (Some(waiting), answer) => waiting.reply.send(answer),
            // A fault that answers no call is the reason for which the server closes the connection.
            (None, Answer::Fault(fault)) if id == 0 => return Err(TransportError::Farewell(fault.clone())),
            // Of a ping.
            (None, _) => {}
        }
        Ok(())
    }

    /// Sends a call whose answer tells nothing but that the metadata server is there.
    fn send_unasked(&self, outbox: &Arc<Outbox>, call: &Call) {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        if let Ok(head) = frame::encode(Kind::Call, id, call, 0) {
            outbox.send(OutFrame::new(head, Bulk::None, None));
        }
    }

    /// Ends the connection, and forgets the calls: the client's connection has ended, or is about to.
    fn end(&self) {
        let (outbox, waiting, unsent) = {
            let mut state = self.state.lock();
            state.ended = true;
            (state.outbox.take(), std::mem::take(&mut state.waiting), std::mem::take(&mut state.unsent))
        };
        drop(unsent);
        outbox.iter().for_each(|outbox| outbox.close());
        waiting.into_values().for_each(|waiting| waiting.reply.forget());
        self.changed.notify_all();
    }

    fn complaint(&self, reason: &str) -> String {
        let Upstream { address, timeout, via, .. } = &*self.upstream;
        format!("{via} did not reach the metadata server at {address} within {} ms: {reason}", timeout.as_millis())
    }

    /// Connects and shakes hands, with retries until the time of the call that waits since then is up.
    fn connect(&self, since: Nanos) -> Result<Link, String> {
        let spent = Duration::from_nanos(impresario_engine::now().since(since).0);
        let deadline = Instant::now() + self.upstream.timeout.saturating_sub(spent);
        let mut pause = BACK_OFF.0;
        loop {
            let reason = match self.connect_once(deadline) {
                Ok(link) => return Ok(link),
                Err(reason) => reason,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left < pause || self.client.has_ended() {
                return Err(reason);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(BACK_OFF.1);
        }
    }

    fn connect_once(&self, deadline: Instant) -> Result<Link, String> {
        let address = self.upstream.address.parse()?;
        let left = deadline.saturating_duration_since(Instant::now());
        let stream = Stream::connect(&address, left, tick(self.upstream.timeout)).map_err(|e| e.to_string())?;
        let mut reader = FrameReader::default();
        let name: String = format!("{} via {}", self.client.name(), self.upstream.via).chars().take(256).collect();
        let (version, who, cluster) = (PROTOCOL_VERSION, self.client.who(), ClusterId(0));
        // Whose users this node has made sure of itself.
        let hello = Hello { version, who, role: Role::Meta, name, cluster, credential: Vec::new() };
        let Upstream { membership, access, .. } = &*self.upstream;
        let server = (META_NAME, &address);
        say_hello(&stream, &mut reader, &hello, server, access, membership, &NO_PAYLOAD, deadline)
            .map_err(|e| e.to_string())?;
        if let Some(restriction) = self.client.restriction() {
            restrict(&stream, &mut reader, restriction, deadline).map_err(|e| e.to_string())?;
        }
        stream.poll_before_sleeping(Side::Relays, self.upstream.poll);
        Ok(Link { stream: Arc::new(stream), reader })
    }
}

impl State {
    /// Since when the oldest call waits.
    fn oldest(&self) -> Option<Nanos> {
        self.waiting.values().map(|waiting| waiting.since).min()
    }
}

/// A connection to the metadata server after its handshake.
struct Link {
    stream: Arc<Stream>,
    reader: FrameReader,
}

/// Has the metadata server know, before anything else, what the client's users are to it.
fn restrict(
    stream: &Stream,
    reader: &mut FrameReader,
    restriction: Restriction,
    deadline: Instant,
) -> Result<(), TransportError> {
    let head = frame::encode(Kind::Call, 0, &restricting(restriction), 0)?;
    send_frame(stream, &head, &[], deadline)?;
    loop {
        let (header, body) = reader.next_frame(stream, &NO_PAYLOAD, deadline)?;
        let header = header.expect(Kind::Answer)?;
        match frame::decode_body(body)? {
            Answer::Done => return Ok(()),
            Answer::Alive => {}
            Answer::Fault(fault) => return Err(TransportError::Farewell(fault)),
            _ => return Err(TransportError::Unasked(header.id)),
        }
    }
}

/// How often a receiving thread looks at the clock.
fn tick(timeout: Duration) -> Duration {
    (timeout / 20).clamp(TICK.0, TICK.1)
}

fn span(duration: Duration) -> Nanos {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
