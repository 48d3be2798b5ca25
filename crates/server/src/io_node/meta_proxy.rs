//! Metadata calls on their way through an I/O node: each client has its own connection to the metadata server,
//! so that its opens are closed there when it goes; its calls pass in order, beside its data.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use impresario_client::transport::{FrameReader, Stream, TransportError, send_frame};
use impresario_wire::{
    Answer, Call, FrameError, Hello, Kind, Limits, MetaCall, PROTOCOL_VERSION, Role, Welcome, frame,
};

use crate::connection::{Connection, Reply};
use crate::outbox::STACK_BYTES;
use crate::payload::lock;

/// First and longest pause between attempts to connect.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How often a wait looks at its deadline.
const TICK: Duration = Duration::from_millis(500);
/// Metadata carry no payload.
const NO_PAYLOAD: Limits = Limits { max_payload_bytes: 0 };

/// Where the metadata server is.
pub(crate) struct Upstream {
    /// `host:port` or `unix:/path`.
    pub(crate) address: String,
    /// A call that it has not answered after this time fails.
    pub(crate) timeout: Duration,
    /// Name of this I/O node, for the metadata server's log.
    pub(crate) via: String,
}

/// A client's way to the metadata server. Dropping it ends its thread and its connection.
pub(super) struct MetaProxy {
    calls: Option<Sender<(MetaCall, Reply)>>,
    link: Arc<Mutex<Link>>,
}

/// The connection, for whoever ends the proxy while its thread waits on it.
#[derive(Default)]
struct Link {
    stream: Option<Arc<Stream>>,
    ended: bool,
}

impl MetaProxy {
    /// Starts the proxy of a client's connection; it connects when there is something to pass on.
    pub(super) fn new(upstream: &Arc<Upstream>, client: &Arc<Connection>) -> MetaProxy {
        let (sender, inbox) = channel();
        let link = Arc::new(Mutex::new(Link::default()));
        let passing = Passing { upstream: upstream.clone(), client: client.clone(), link: link.clone(), session: None };
        let thread = std::thread::Builder::new().name("metadata".into()).stack_size(STACK_BYTES);
        // Without a thread the inbox is dropped here, and calls are answered with EIO.
        if let Err(error) = thread.spawn(move || passing.run(&inbox)) {
            tracing::warn!(%error, "no thread to pass a client's metadata calls on; raise its limit (ulimit -u)");
        }
        MetaProxy { calls: Some(sender), link }
    }

    /// Passes a call on, after those before it. How many may wait is bounded by the connection's slots.
    pub(super) fn pass_on(&self, call: MetaCall, reply: Reply) {
        if let Some(calls) = &self.calls {
            // When the thread has ended the reply is dropped unanswered, which is EIO.
            let _ = calls.send((call, reply));
        }
    }
}

impl Drop for MetaProxy {
    fn drop(&mut self) {
        self.calls = None;
        let mut link = lock(&self.link);
        link.ended = true;
        link.stream.iter().for_each(|stream| stream.shut_down());
    }
}

/// The proxy's thread.
struct Passing {
    upstream: Arc<Upstream>,
    client: Arc<Connection>,
    link: Arc<Mutex<Link>>,
    session: Option<Session>,
}

/// A greeted connection to the metadata server.
struct Session {
    stream: Arc<Stream>,
    reader: FrameReader,
    next_id: u64,
}

impl Passing {
    fn run(mut self, inbox: &Receiver<(MetaCall, Reply)>) {
        while let Ok((call, reply)) = inbox.recv() {
            if self.client.has_ended() {
                reply.forget();
                continue;
            }
            self.pass(call, reply);
        }
    }

    fn pass(&mut self, call: MetaCall, reply: Reply) {
        let deadline = Instant::now() + self.upstream.timeout;
        if self.session.is_none() {
            match self.connect(deadline) {
                Ok(session) => self.session = Some(session),
                Err(reason) => return reply.fault(libc::EIO, self.complaint(&reason)),
            }
        }
        let Some(session) = &mut self.session else { return };
        match session.call(call, deadline) {
            Ok(answer) => reply.send(&answer),
            Err(broken) => {
                // The metadata server has forgotten what this client had open. The client learns it in the
                // same way as if it had been connected there directly: its connection ends.
                tracing::warn!(client = self.client.peer(), reason = %broken, "lost the metadata server; the client must reconnect");
                self.session = None;
                lock(&self.link).stream = None;
                reply.forget();
                self.client.close();
            }
        }
    }

    fn complaint(&self, reason: &str) -> String {
        let Upstream { address, timeout, via } = &*self.upstream;
        format!("{via} did not reach the metadata server at {address} within {} ms: {reason}", timeout.as_millis())
    }

    /// Connects and greets, again and again until the deadline.
    fn connect(&self, deadline: Instant) -> Result<Session, String> {
        let mut pause = BACK_OFF.0;
        loop {
            let reason = match self.connect_once(deadline) {
                Ok(session) => {
                    let mut link = lock(&self.link);
                    link.stream = Some(session.stream.clone());
                    return if link.ended { Err("the client has gone".into()) } else { Ok(session) };
                }
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

    fn connect_once(&self, deadline: Instant) -> Result<Session, String> {
        let address = self.upstream.address.parse()?;
        let left = deadline.saturating_duration_since(Instant::now());
        let stream = Stream::connect(&address, left, TICK).map_err(|e| e.to_string())?;
        let mut session = Session { stream: Arc::new(stream), reader: FrameReader::default(), next_id: 1 };
        let name: String = format!("{} via {}", self.client.name(), self.upstream.via).chars().take(256).collect();
        let hello = Hello { version: PROTOCOL_VERSION, who: self.client.who(), role: Role::Meta, name };
        let greeting = frame::encode(Kind::Hello, 0, &hello, 0).map_err(|e| e.to_string())?;
        send_frame(&session.stream, &greeting, &[], deadline).map_err(|e| e.to_string())?;
        match session.receive(deadline).map_err(|e| e.to_string())? {
            Received::Welcome => Ok(session),
            Received::Answer(_, Answer::Fault(fault)) => Err(fault.message),
            Received::Answer(..) => Err("it answers before it greets; check its address and version".into()),
        }
    }
}

enum Received {
    Welcome,
    Answer(u64, Answer),
}

impl Session {
    fn call(&mut self, call: MetaCall, deadline: Instant) -> Result<Answer, TransportError> {
        let id = self.next_id;
        self.next_id += 1;
        send_frame(&self.stream, &frame::encode(Kind::Call, id, &Call::Meta(call), 0)?, &[], deadline)?;
        loop {
            match self.receive(deadline)? {
                Received::Answer(answered, answer) if answered == id => return Ok(answer),
                // A fault that answers no call is the server's farewell.
                Received::Answer(_, Answer::Fault(fault)) => return Err(io::Error::other(fault.message).into()),
                Received::Answer(..) | Received::Welcome => {}
            }
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<Received, TransportError> {
        let (header, body) = self.reader.next_frame(&self.stream, &NO_PAYLOAD, deadline)?;
        let received = match header.kind {
            Kind::Welcome => frame::decode_body::<Welcome>(body).map(|_| Received::Welcome),
            Kind::Answer => frame::decode_body(body).map(|answer| Received::Answer(header.id, answer)),
            found => Err(FrameError::UnexpectedKind { expected: Kind::Answer, found }),
        };
        Ok(received?)
    }
}
