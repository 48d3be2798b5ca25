//! Metadata calls through an I/O node. Each client has its own connection to the metadata server, so that its opens are
//! closed there when it disconnects. Its calls pass in order, beside its data.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_config::META_NAME;
use impresario_transport::{Access, FrameReader, Membership, Stream, TransportError, say_hello, send_frame};
use impresario_wire::{Answer, Call, ClusterId, Hello, Kind, Limits, PROTOCOL_VERSION, Role, frame};

use crate::connection::{Connection, Reply};
use crate::outbox::STACK_BYTES;

/// First and longest pause between attempts to connect.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How often a waiting thread checks its deadline.
const TICK: Duration = Duration::from_millis(500);
/// Metadata calls carry no payload.
const NO_PAYLOAD: Limits = Limits { max_payload_bytes: 0 };

/// How to reach the metadata server.
pub(crate) struct Upstream {
    /// `host:port` or `unix:/path`.
    pub(crate) address: String,
    /// A call without an answer after this time fails.
    pub(crate) timeout: Duration,
    /// Name of this I/O node, for the metadata server's log.
    pub(crate) via: String,
    /// The cluster that both belong to.
    pub(crate) membership: Arc<Membership>,
    /// The keys of this I/O node.
    pub(crate) access: Access,
}

/// A client's connection to the metadata server. Dropping it ends its thread and closes the connection.
pub(super) struct MetaProxy {
    calls: Option<Sender<(Call, Reply)>>,
    link: Arc<Mutex<Link>>,
}

/// The connection, so that the owner can end the proxy while its thread waits on it.
#[derive(Default)]
struct Link {
    stream: Option<Arc<Stream>>,
    ended: bool,
}

impl MetaProxy {
    /// Starts the proxy of a client's connection; it connects at the first call.
    pub(super) fn new(upstream: &Arc<Upstream>, client: &Arc<Connection>) -> MetaProxy {
        let (sender, inbox) = channel();
        let link = Arc::new(Mutex::new(Link::default()));
        let passing = Passing { upstream: upstream.clone(), client: client.clone(), link: link.clone(), session: None };
        let thread = std::thread::Builder::new().name("metadata".into()).stack_size(STACK_BYTES);
        // Without a thread the inbox is dropped here, and calls are answered with EIO.
        if let Err(error) = thread.spawn(move || passing.run(&inbox)) {
            tracing::warn!(%error, "no thread to forward a client's metadata calls; raise its limit (ulimit -u)");
        }
        MetaProxy { calls: Some(sender), link }
    }

    /// Forwards a call after those before it. The connection's slots bound the number that wait.
    pub(super) fn pass_on(&self, call: Call, reply: Reply) {
        if let Some(calls) = &self.calls {
            // When the thread has ended the reply is dropped unanswered, which is EIO.
            let _ = calls.send((call, reply));
        }
    }
}

impl Drop for MetaProxy {
    fn drop(&mut self) {
        self.calls = None;
        let mut link = self.link.lock();
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

/// A connection to the metadata server after its handshake.
struct Session {
    stream: Arc<Stream>,
    reader: FrameReader,
    next_id: u64,
}

impl Passing {
    fn run(mut self, inbox: &Receiver<(Call, Reply)>) {
        while let Ok((call, reply)) = inbox.recv() {
            if self.client.has_ended() {
                reply.forget();
                continue;
            }
            self.pass(call, reply);
        }
    }

    fn pass(&mut self, call: Call, reply: Reply) {
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
                // The metadata server has forgotten what this client had open. The client learns it as if it were
                // connected there directly: its connection ends.
                tracing::warn!(client = self.client.peer(), reason = %broken, "lost the metadata server; the client must reconnect");
                self.session = None;
                self.link.lock().stream = None;
                reply.forget();
                self.client.close();
            }
        }
    }

    fn complaint(&self, reason: &str) -> String {
        let Upstream { address, timeout, via, .. } = &*self.upstream;
        format!("{via} did not reach the metadata server at {address} within {} ms: {reason}", timeout.as_millis())
    }

    /// Connects and shakes hands, with retries until the deadline.
    fn connect(&self, deadline: Instant) -> Result<Session, String> {
        let mut pause = BACK_OFF.0;
        loop {
            let reason = match self.connect_once(deadline) {
                Ok(session) => {
                    let mut link = self.link.lock();
                    link.stream = Some(session.stream.clone());
                    return if link.ended { Err("the client has disconnected".into()) } else { Ok(session) };
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
        let mut reader = FrameReader::default();
        let name: String = format!("{} via {}", self.client.name(), self.upstream.via).chars().take(256).collect();
        let hello =
            Hello { version: PROTOCOL_VERSION, who: self.client.who(), role: Role::Meta, name, cluster: ClusterId(0) };
        let Upstream { membership, access, .. } = &*self.upstream;
        let server = (META_NAME, &address);
        say_hello(&stream, &mut reader, &hello, server, access, membership, &NO_PAYLOAD, deadline)
            .map_err(|e| e.to_string())?;
        Ok(Session { stream: Arc::new(stream), reader, next_id: 1 })
    }
}

impl Session {
    fn call(&mut self, call: Call, deadline: Instant) -> Result<Answer, TransportError> {
        let id = self.next_id;
        self.next_id += 1;
        send_frame(&self.stream, &frame::encode(Kind::Call, id, &call, 0)?, &[], deadline)?;
        loop {
            let (header, body) = self.reader.next_frame(&self.stream, &NO_PAYLOAD, deadline)?;
            match (header.expect(Kind::Answer)?.id, frame::decode_body(body)?) {
                (answered, answer) if answered == id => return Ok(answer),
                // A fault that answers no call is the reason for which the server closes the connection.
                (_, Answer::Fault(fault)) => return Err(TransportError::Farewell(fault)),
                _ => {}
            }
        }
    }
}
