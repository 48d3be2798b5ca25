//! The life of one connection: the hand-shake, its calls as they come, and what it is told when it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use impresario_node::credits::SLICE_BYTES;
use impresario_transport::{FrameReader, Guest, HelloError, Host, Pace, Side, Stream, TransportError, receive_hello};
use impresario_wire::{
    Answer, Call, Fault, Hello, KeyRole, Kind, Limits, PROTOCOL_VERSION, Pass, Welcome, frame, may_send,
};
use rustc_hash::FxHashMap;
use rustix::net::Shutdown;

use super::together::Together;
use super::{Incoming, SETTLE_MAX, Service, Settings, Shared};
use crate::connection::{self, Connection, Denied, Reply, Under};
use crate::export::Asker;
use crate::outbox::{self, Bulk, OutFrame};

/// The hand-shake must be over after this time.
pub(super) const GREETING_MAX: Duration = Duration::from_secs(5);
/// Enough for the header, body and payload of a 16 KiB write; larger payloads mostly bypass the buffer, bytes.
const BUFFER_BYTES: usize = 20 << 10;
/// How fast a peer must send a frame that it has begun.
pub(super) const PACE: Pace = Pace { stall: Duration::from_secs(10), frame: Duration::from_secs(120) };
/// How often a connection that is used is asked whether its key is still accepted.
const KEY_CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long a connection lives whose user was proved at its beginning.
const USER_PROVEN_MAX: Duration = Duration::from_secs(8 * 3600);
/// A refused peer has this time to read why.
const FAREWELL_MAX: Duration = Duration::from_millis(300);
/// Calls in a row that are served at once after which more of them are expected.
const AT_ONCE_MIN: u32 = 8;

/// A connection between two calls.
pub(super) struct Conversation<T> {
    pub(super) connection: Arc<Connection>,
    pub(super) receiver: Receiver,
    session: T,
    /// What another thread has received, and left to the connection's own.
    left: Option<Result<Received, Farewell>>,
    /// Its last calls, at most [`AT_ONCE_MIN`], that could be served at once.
    at_once: u32,
}

/// A call as it was received.
pub(super) struct Received {
    id: u64,
    payload_bytes: u32,
    pass: Option<Pass>,
    call: Call,
}

impl Shared {
    /// The whole life of a connection.
    pub(super) fn converse<S: Service>(
        &self,
        service: &Arc<S>,
        together: &Arc<Together<S>>,
        connection: &Arc<Connection>,
        stream: Arc<Stream>,
        refusal: Option<String>,
        ungreeted: Option<Arc<()>>,
    ) {
        outbox::serve_on_this_thread(Some(connection.outbox.clone()));
        let limits = Limits::of_server(self.settings.max_payload_bytes);
        let mut receiver = Receiver { stream, reader: FrameReader::new(BUFFER_BYTES), limits };
        let greeted = self.greet(&mut receiver, connection, refusal, &**service);
        drop(ungreeted);
        receiver.stream.poll_before_sleeping(Side::Listens, self.settings.poll);
        let session = greeted.and_then(|()| service.open(connection).map_err(|fault| Farewell::Fault(0, fault)));
        let session = match session {
            Ok(session) => session,
            Err(farewell) => return self.farewell(farewell, &mut receiver, connection),
        };
        let mut conversation =
            Conversation { connection: connection.clone(), receiver, session, left: None, at_once: 0 };
        let farewell = loop {
            if self.stopping.load(Ordering::Acquire) || connection.has_ended() {
                break Farewell::Silent;
            }
            if conversation.at_once == AT_ONCE_MIN && together.pays() && !conversation.receiver.reader.has_begun() {
                conversation = together.wait(self, service, conversation);
                outbox::serve_on_this_thread(Some(connection.outbox.clone()));
                connection.outbox.drain_own();
            }
            let before = conversation.at_once;
            let farewell = self.guarded(connection, || self.next_call(&**service, &mut conversation));
            together.count(before == AT_ONCE_MIN, conversation.at_once == AT_ONCE_MIN);
            if let Err(farewell) = farewell {
                break farewell;
            }
            connection.outbox.drain_own();
        };
        together.count(conversation.at_once == AT_ONCE_MIN, false);
        let Conversation { mut receiver, session, .. } = conversation;
        connection.outbox.let_go();
        if connection.outbox.was_unread() {
            connection.suspect();
            // The outbox has said why.
            self.complaints.about("peer", connection.host(), |_| {});
        }
        if self.stopping.load(Ordering::Acquire) {
            // Replies made from here on must not wait for this thread.
            outbox::serve_on_this_thread(None);
            connection.settle(Instant::now() + SETTLE_MAX);
        }
        service.close(session);
        self.farewell(farewell, &mut receiver, connection);
    }

    /// Hello and welcome.
    fn greet<S: Service>(
        &self,
        receiver: &mut Receiver,
        connection: &Connection,
        refusal: Option<String>,
        service: &S,
    ) -> Result<(), Farewell> {
        let settings = &self.settings;
        let keys = settings.keys.as_deref().map(|keys| (keys, settings.protect));
        let certificates = settings.certificates.as_deref();
        let Settings { name, role, membership, .. } = settings;
        let host = Host { name, role: *role, membership, keys, certificates };
        let Receiver { stream, reader, limits } = receiver;
        let received = receive_hello(stream, reader, host, limits, Instant::now() + GREETING_MAX);
        // A refusal is protected too, once both sides have keys.
        stream.session().inspect(|session| connection.outbox.protect((*session).clone()));
        let (id, hello, guest) = match received {
            Ok(hello) => hello,
            Err(HelloError::Broken(error)) => return Err(Farewell::Broken(error)),
            Err(HelloError::Refused(id, fault)) => return Err(Farewell::Fault(id, fault)),
        };
        if let Some(message) = refusal {
            return Err(Farewell::Fault(id, Fault { errno: libc::EUSERS, message }));
        }
        let under = self.rule_for(connection, &guest, &hello).map_err(|fault| Farewell::Fault(id, fault))?;
        let name: String = hello.name.chars().filter(|c| !c.is_control()).take(256).collect();
        tracing::debug!(peer = connection.peer(), name, job = hello.who.job, "connected");
        connection.introduce(name, hello.who, guest, under);
        let welcome = Welcome {
            version: PROTOCOL_VERSION,
            name: settings.name.clone(),
            incarnation: self.incarnation,
            max_payload_bytes: settings.max_payload_bytes,
            cluster: settings.membership.cluster(),
            store: settings.store,
            number: settings.number,
            keys: service.held_keys(),
        };
        let head = frame::encode(Kind::Welcome, id, &welcome, 0).map_err(TransportError::from)?;
        connection.outbox.send(OutFrame::new(head, Bulk::None, None));
        connection.outbox.drain_own();
        Ok(())
    }

    /// The rule that a peer is under; `None`: none.
    fn rule_for(&self, connection: &Connection, guest: &Guest, hello: &Hello) -> Result<Option<Under>, Fault> {
        let Settings { name, exports, keys, munge, .. } = &self.settings;
        let is_client = !matches!(guest.role, Some(KeyRole::Admin | KeyRole::Server));
        let Some(exports) = exports.as_ref().filter(|_| is_client) else { return Ok(None) };
        match exports.of_peer(connection.peer()) {
            Some(export) => {
                let user = export.user(hello, munge);
                let user =
                    user.map_err(|Fault { errno, message }| Fault { errno, message: format!("{name}: {message}") })?;
                Ok(Some(Under { export: export.clone(), keys: keys.clone(), user }))
            }
            None => {
                let host = connection.host();
                let message =
                    format!("{name}: no [[export]] is for clients at {host}; add its network, or use the admin key");
                Err(Fault { errno: libc::EACCES, message })
            }
        }
    }

    /// Does what may panic for a connection.
    fn guarded(&self, connection: &Connection, serve: impl FnOnce() -> Result<(), Farewell>) -> Result<(), Farewell> {
        catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| {
            tracing::error!(peer = connection.peer(), "serving a call panicked; its connection is closed");
            Err(Farewell::Silent)
        })
    }

    /// Reads one call and has it served.
    fn next_call<S: Service>(&self, service: &S, conversation: &mut Conversation<S::Session>) -> Result<(), Farewell> {
        let received = match conversation.left.take() {
            Some(received) => received?,
            None => self.receive(conversation)?,
        };
        let is_at_once = received.payload_bytes == 0 && service.serves_at_once(&received.call);
        conversation.at_once = if is_at_once { AT_ONCE_MIN.min(conversation.at_once + 1) } else { 0 };
        self.serve(service, conversation, received)
    }

    /// On a thread that receives for several connections, when something has come on this one: serves the calls that take no
    /// time. True when the connection's own thread is to go on: with anything else, or with the end of the connection.
    pub(super) fn serve_at_once<S: Service>(&self, service: &S, conversation: &mut Conversation<S::Session>) -> bool {
        let Receiver { stream, reader, limits } = &mut conversation.receiver;
        // Bytes are there, so this does not wait; what went wrong the next attempt meets too.
        if reader.fill(stream, false, Instant::now() + 2 * PACE.stall).is_err() {
            return true;
        }
        let limits = *limits;
        let connection = conversation.connection.clone();
        while conversation.receiver.reader.has_frame(&limits) {
            let served = match self.receive(conversation) {
                Ok(received) if received.payload_bytes == 0 && service.serves_at_once(&received.call) => {
                    self.guarded(&connection, || self.serve(service, conversation, received))
                }
                other => {
                    conversation.left = Some(other);
                    return true;
                }
            };
            if let Err(farewell) = served {
                conversation.left = Some(Err(farewell));
                return true;
            }
        }
        conversation.receiver.reader.has_begun() || connection.outbox.is_for_owner()
    }

    /// Reads one call, without its payload.
    fn receive<T>(&self, conversation: &mut Conversation<T>) -> Result<Received, Farewell> {
        let Receiver { stream, reader, limits } = &mut conversation.receiver;
        let (header, body) = reader.next_frame_paced(stream, limits, &PACE)?;
        let refuse = |message: String| Farewell::Fault(header.id, Fault { errno: libc::EPROTO, message });
        let decoded = match header.kind {
            Kind::Call => frame::decode_body(body).map(|call| (None, call)),
            Kind::PassedCall => frame::decode_body(body).map(|(pass, call)| (Some(pass), call)),
            other => return Err(refuse(format!("only calls are expected here, not {other:?}"))),
        };
        let (pass, call) =
            decoded.map_err(|e| refuse(format!("this is no call that version {PROTOCOL_VERSION} knows: {e}")))?;
        Ok(Received { id: header.id, payload_bytes: header.payload_len, pass, call })
    }

    /// Has a call served, for which its payload is read.
    fn serve<S: Service>(
        &self,
        service: &S,
        conversation: &mut Conversation<S::Session>,
        received: Received,
    ) -> Result<(), Farewell> {
        let Conversation { connection, receiver: Receiver { stream, reader, limits }, session, .. } = conversation;
        let Received { id, payload_bytes, pass, mut call } = received;
        connection.outbox.hold_back(false);
        if payload_bytes > 0 {
            // Which may be long in coming.
            connection.outbox.let_go();
        }
        let refuse = |errno, message: String| Farewell::Fault(id, Fault { errno, message });
        self.check_key(connection)?;
        let needs_write = call.needs_write();
        let permitted = self.check_right(connection, &call).and_then(|()| self.check_folder(&call));
        let permitted = permitted.and_then(|()| self.apply_rule(connection, &mut call, pass));
        if let Err(fault) = permitted {
            reader.skip_payload_paced(stream, payload_bytes as usize, &PACE)?;
            return self.refuse(connection, id, &fault);
        }
        let bytes = match &call {
            call if is_write(call) => u64::from(payload_bytes),
            _ if payload_bytes > 0 => {
                return Err(refuse(libc::EPROTO, "only writes carry a payload".into()));
            }
            Call::ReadList { extents, .. } => match extents.check(self.settings.max_payload_bytes.into()) {
                Ok(bytes) => bytes,
                Err(bad) => {
                    let fault = Fault { errno: libc::EINVAL, message: bad.to_string() };
                    return self.refuse(connection, id, &fault);
                }
            },
            call => call.answer_bytes().unwrap_or(0),
        };
        let max = self.settings.max_payload_bytes;
        if bytes > u64::from(max) {
            let message = format!("{bytes} bytes were asked for at once; at most {max} (max_payload_bytes) are given");
            return self.refuse(connection, id, &Fault { errno: libc::EINVAL, message });
        }
        let body_bytes = service.body_bytes_max(&call);
        let bytes = bytes + body_bytes;
        self.calls.fetch_add(1, Ordering::Relaxed);
        connection.note_call();
        let patience = self.settings.payload_patience;
        let is_write = is_write(&call);
        // A suspect would have its slices while others wait for more of theirs.
        let is_limited = connection.is_withheld() && connection.is_own(call.who());
        let in_slices = is_write && !connection.is_suspect() && !is_limited;
        let first = if in_slices { self.pool.first_slice_bytes(bytes) } else { bytes };
        let admitted = connection.admit(id, first, (first == bytes, is_limited), patience);
        let mut slot = match admitted {
            Ok(slot) => slot,
            Err(_) if connection.has_ended() || connection.outbox.peer_is_gone() => return Err(Farewell::Silent),
            Err(denied) => {
                reader.skip_payload_paced(stream, payload_bytes as usize, &PACE)?;
                let fault = if denied == Denied::Address { self.busy_with(connection.host()) } else { self.busy() };
                return self.refuse(connection, id, &fault);
            }
        };
        if body_bytes > 0 {
            slot.book_body();
        }
        let mut payload = None;
        if is_write {
            let mut buffer = self.pool.buffer(payload_bytes as usize);
            let (mut from, mut to) = (0, first as usize);
            loop {
                connection.note_owing(true);
                let slice = buffer.get_mut(from..to).unwrap_or(&mut []);
                let received = reader.read_payload_paced(stream, slice, &PACE);
                connection.note_owing(false);
                received?;
                if to == buffer.len() {
                    break;
                }
                (from, to) = (to, buffer.len().min(to + SLICE_BYTES as usize));
                if !slot.grow((to - from) as u64, patience) {
                    let left = buffer.len() - from;
                    drop((buffer, slot));
                    reader.skip_payload_paced(stream, left, &PACE)?;
                    return self.refuse(connection, id, &self.busy());
                }
            }
            payload = Some(buffer);
        }
        let is_another_there = S::ANSWERS_TOGETHER && !is_write && reader.has_frame(limits);
        connection.outbox.hold_back(is_another_there);
        let reply = Reply::new(id, slot).for_writer(needs_write);
        service.serve(session, Incoming { call, payload }, reply);
        if !is_another_there {
            connection.outbox.let_go();
        }
        Ok(())
    }

    /// Ends a connection whose key has been replaced and is no longer accepted, or whose certificate is no longer good. Its
    /// client comes back with the present one.
    fn check_key(&self, connection: &Connection) -> Result<(), Farewell> {
        let Settings { name, keys, certificates, .. } = &self.settings;
        let Some(guest) = connection.guest().filter(|guest| guest.is_proven()) else { return Ok(()) };
        if !connection.is_due(KEY_CHECK_EVERY) {
            return Ok(());
        }
        if connection.under().is_some_and(|under| under.user.is_some()) && connection.age() > USER_PROVEN_MAX {
            let message = format!("{name}: the user was proved long ago; it has to be proved again");
            return Err(Farewell::Fault(0, Fault { errno: libc::EKEYEXPIRED, message }));
        }
        let why = match (guest.key, keys, &guest.certificate, certificates) {
            (Some(key), Some(ring), ..) if !ring.accepts(key) => {
                format!("key {key:016x} was replaced and is no longer accepted; use the present key file")
            }
            (_, _, Some(certificate), Some(certificates)) => match certificates.check(certificate) {
                Ok(()) => return Ok(()),
                Err(why) => why,
            },
            _ => return Ok(()),
        };
        Err(Farewell::Fault(0, Fault { errno: libc::EKEYEXPIRED, message: format!("{name}: {why}") }))
    }

    /// Whether the peer may send the call.
    fn check_right(&self, connection: &Connection, call: &Call) -> Result<(), Fault> {
        let Some(guest) = connection.guest() else { return Ok(()) };
        if let Some(role) = guest.role {
            may_send(role, connection.who().client, call).map_err(|why| {
                let name = &self.settings.name;
                let message = match guest.is_proven() {
                    true => format!("{name}: {why}"),
                    false => format!("{name}: {why}, as its user is neither the server's nor root"),
                };
                Fault { errno: libc::EPERM, message }
            })?;
        }
        Ok(())
    }

    /// Whether the server's folder is where it was. What is written to another place nobody would find.
    fn check_folder(&self, call: &Call) -> Result<(), Fault> {
        match self.folder_lost.get() {
            Some(why) if !matches!(call, Call::Status) => Err(Fault { errno: libc::EIO, message: why.clone() }),
            _ => Ok(()),
        }
    }

    /// Makes of a call what it is under the rule of its client.
    fn apply_rule(&self, connection: &Connection, call: &mut Call, pass: Option<Pass>) -> Result<(), Fault> {
        let Some(under) = connection.under() else { return Ok(()) };
        let asker = Asker { client: connection.who().client, pass, keys: under.keys.as_deref() };
        under.export.apply(call, &asker).map_err(|Fault { errno, message }| {
            let message = format!("{}: {message}", self.settings.name);
            Fault { errno, message }
        })
    }

    /// Answers a call that is not served. The answer takes a slot as every other does: a peer that reads none of them is
    /// given no further call.
    fn refuse(&self, connection: &Arc<Connection>, id: u64, fault: &Fault) -> Result<(), Farewell> {
        let Some(slot) = connection.admit_answer() else { return Err(Farewell::Silent) };
        Reply::new(id, slot).send(&Answer::Fault(fault.clone()));
        Ok(())
    }

    /// The last words to a peer.
    fn answer_unadmitted(&self, connection: &Connection, id: u64, fault: Fault) {
        if let Ok(head) = connection::encode(id, &Answer::Fault(fault), 0) {
            connection.outbox.send(OutFrame::new(head, Bulk::None, None));
        }
    }

    /// Says why, where that is possible, and closes.
    fn farewell(&self, farewell: Farewell, receiver: &mut Receiver, connection: &Connection) {
        let (id, fault) = match farewell {
            Farewell::Silent | Farewell::Broken(TransportError::Closed | TransportError::Io(_)) => {
                return connection.close();
            }
            Farewell::Broken(broken) => {
                (0, Fault { errno: libc::EPROTO, message: format!("{}: {broken}", self.settings.name) })
            }
            Farewell::Fault(id, fault) => (id, fault),
        };
        let peer = connection.peer();
        self.complaints.about("peer", connection.host(), |_| {
            tracing::warn!(peer, name = connection.name(), reason = fault.message, "closing a connection");
        });
        self.answer_unadmitted(connection, id, fault);
        connection.outbox.drain_own();
        connection.outbox.shutdown(Shutdown::Write);
        receiver.reader.drain(&receiver.stream, Instant::now() + FAREWELL_MAX);
        connection.close();
    }

    /// Why a request is not taken: memory is short, and whose requests hold most of it.
    fn busy(&self) -> Fault {
        let connections: Vec<_> = self.connections.lock().values().cloned().collect();
        let mut held: FxHashMap<&str, (u64, u32)> = FxHashMap::default();
        for connection in &connections {
            let (bytes, count) = held.entry(connection.host()).or_default();
            *bytes += connection.bytes_under_way();
            *count += 1;
        }
        let most = held.iter().max_by_key(|(_, held)| **held);
        let whose = most.map_or_else(String::new, |(host, (bytes, count))| {
            format!("; {host} with {count} connections has {} KiB of it", bytes / 1024)
        });
        let name = &self.settings.name;
        let message = format!("{name} is busy: it has no memory for this request{whose}; raise payload_bytes");
        Fault { errno: libc::EBUSY, message }
    }

    /// The same where the peer's address has its share.
    fn busy_with(&self, host: &str) -> Fault {
        let Settings { name, payload_bytes_per_address, .. } = &self.settings;
        let message = format!(
            "{name} is busy: {host} has the {} KiB of requests and answers under way that an address may have \
             (payload_percent_per_address)",
            payload_bytes_per_address / 1024
        );
        Fault { errno: libc::EBUSY, message }
    }
}

/// Calls with the bytes to be written.
fn is_write(call: &Call) -> bool {
    matches!(call, Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. } | Call::FileWrite { .. })
}

/// The receiving end of a connection.
pub(super) struct Receiver {
    pub(super) stream: Arc<Stream>,
    reader: FrameReader,
    limits: Limits,
}

/// Why a connection is ended by us.
pub(super) enum Farewell {
    /// Without a message.
    Silent,
    /// Receiving failed.
    Broken(TransportError),
    /// With a message to the peer.
    Fault(u64, Fault),
}

impl From<TransportError> for Farewell {
    fn from(broken: TransportError) -> Farewell {
        Farewell::Broken(broken)
    }
}
