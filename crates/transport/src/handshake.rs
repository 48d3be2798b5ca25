//! The hand-shake: with keys or certificates, both sides first prove theirs; then a client sends a hello, and the server
//! replies with a welcome or a refusal.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use impresario_base::machine::random_bytes;
use impresario_config::{Address, Protect};
use impresario_wire::{
    Answer, ClusterId, Fault, FrameError, Hello, KeyOffer, KeyProof, KeyRole, Kind, Limits, PROTOCOL_VERSION, Role,
    Welcome, decode_body, frame,
};

use crate::access::Proof;
use crate::keys::{GENERATIONS_MAX, Keys};
use crate::{
    Access, Certificates, FrameReader, Keyring, PeerCertificate, Session, Stream, TransportError, noise, send_frame,
    tls,
};

/// The cluster of a program: known from its folder, or learnt from the first server that welcomes it.
#[derive(Debug, Default)]
pub struct Membership(AtomicU64);

impl Membership {
    /// For a program that knows its cluster.
    pub fn of(cluster: ClusterId) -> Membership {
        Membership(AtomicU64::new(cluster.0))
    }

    /// The cluster; 0 while unknown.
    pub fn cluster(&self) -> ClusterId {
        ClusterId(self.0.load(Ordering::Acquire))
    }

    /// Adopts a peer's cluster if unknown; the error is the peer's different cluster.
    fn learn(&self, cluster: ClusterId) -> Result<(), ClusterId> {
        if cluster.0 == 0 {
            return Ok(());
        }
        match self.0.compare_exchange(0, cluster.0, Ordering::AcqRel, Ordering::Acquire) {
            Err(ours) if ours != cluster.0 => Err(ClusterId(ours)),
            _ => Ok(()),
        }
    }

    /// True unless both are known and differ.
    fn admits(&self, cluster: ClusterId) -> bool {
        let ours = self.cluster();
        ours.0 == 0 || cluster.0 == 0 || ours == cluster
    }
}

/// Why a client was not welcomed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The server refused, for this reason.
    #[error("{}", .0.message)]
    Refused(Fault),
    /// The keys or certificates do not match.
    #[error("{0}")]
    Key(String),
    /// The server does not speak our protocol, or is not the expected one.
    #[error("{0}")]
    Protocol(String),
}

/// Proves a key or certificate if the server's `address` requires one, sends a hello and waits for the welcome until `deadline`. The
/// server must be named `server`, unless that is empty, and belong to the same cluster, unless that is unknown: one
/// server's data must not be mistaken for another's.
#[allow(clippy::too_many_arguments)]
pub fn say_hello(
    stream: &Stream,
    reader: &mut FrameReader,
    hello: &Hello,
    (server, address): (&str, &Address),
    access: &Access,
    membership: &Membership,
    limits: &Limits,
    deadline: Instant,
) -> Result<Welcome, HandshakeError> {
    match access.proof_for(address).map_err(HandshakeError::Key)? {
        Some(Proof::Keys(keys)) => show_key(stream, reader, keys, access.protect, limits, deadline)?,
        Some(Proof::Certificates(certificates)) => tls::connect(stream, reader, certificates, limits, deadline)?,
        None => {}
    }
    // Whether one is needed is the server's to say.
    let (credential, lacking) = match access.credential(hello) {
        Ok(credential) => (credential, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let hello = Hello { cluster: membership.cluster(), credential, ..hello.clone() };
    let head = frame::encode(Kind::Hello, 0, &hello, 0).map_err(TransportError::from)?;
    // A server that refuses may close before reading our hello; its reason can still be read.
    let sent = send_frame(stream, &head, &[], deadline);
    let (header, body) = match (reader.next_frame(stream, limits, deadline), sent) {
        (Ok(frame), _) => frame,
        (Err(TransportError::Closed), Err(error)) | (Err(error), _) => return Err(protocol_or_transport(error)),
    };
    let bad = |error: FrameError| HandshakeError::Protocol(error.to_string());
    let welcome: Welcome = match header.kind {
        Kind::Welcome => match frame::decode_version(body).map_err(bad)? {
            PROTOCOL_VERSION => decode_body(body).map_err(bad)?,
            other => {
                return Err(HandshakeError::Protocol(format!(
                    "it speaks version {other} of the protocol, this program version {PROTOCOL_VERSION}; \
                     use the same release on both sides"
                )));
            }
        },
        Kind::Answer => match decode_body(body).map_err(bad)? {
            Answer::Fault(mut fault) => {
                lacking.iter().for_each(|why| fault.message += &format!(" (this program could make none: {why})"));
                return Err(HandshakeError::Refused(fault));
            }
            other => return Err(HandshakeError::Protocol(format!("it answered a hello with {other:?}"))),
        },
        other => return Err(HandshakeError::Protocol(format!("it answered a hello with a {other:?} frame"))),
    };
    if !server.is_empty() && welcome.name != server {
        return Err(HandshakeError::Protocol(format!(
            "the server there calls itself {:?}; correct the address in the configuration",
            welcome.name
        )));
    }
    membership.learn(welcome.cluster).map_err(|ours| {
        HandshakeError::Protocol(format!(
            "it belongs to cluster {}, not to {ours}; correct the address in the configuration, or `dir` at the server \
             (`impresario store show` tells what a folder belongs to)",
            welcome.cluster
        ))
    })?;
    Ok(welcome)
}

/// Proves one of the program's keys, the current one first, and verifies the server's.
fn show_key(
    stream: &Stream,
    reader: &mut FrameReader,
    ring: &Keyring,
    protect: Protect,
    limits: &Limits,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let keys = ring.keys();
    let file = ring.file().display();
    let mut show = |keys: &Keys| show_generations(stream, reader, (keys, &file), protect, limits, deadline);
    let Some(mut unknown) = show(&keys)? else { return Ok(()) };
    // What was replaced since it was read, or while the server took its time, is tried once more.
    ring.refresh();
    let now = ring.keys();
    if !Arc::ptr_eq(&now, &keys) {
        match show(&now)? {
            None => return Ok(()),
            Some(again) => unknown = again,
        }
    }
    Err(HandshakeError::Key(format!("{unknown} (ours is {file})")))
}

/// Proves one of these keys; what the server says if it knows none of them.
fn show_generations(
    stream: &Stream,
    reader: &mut FrameReader,
    (keys, file): (&Keys, &dyn fmt::Display),
    protect: Protect,
    limits: &Limits,
    deadline: Instant,
) -> Result<Option<String>, HandshakeError> {
    let mut unknown = String::new();
    for generation in &keys.generations {
        let role = keys.role();
        let secret = generation.secret(role).ok_or_else(|| HandshakeError::Key(format!("{file} has no {role} key")))?;
        let broken = |_| HandshakeError::Key(format!("{file}: key {} cannot be used", generation.number));
        let (offered, offer) = noise::offer(generation, role, secret, protect).map_err(broken)?;
        let head = frame::encode(Kind::Key, 0, &offer, 0).map_err(TransportError::from)?;
        let sent = send_frame(stream, &head, &[], deadline);
        let (header, body) = match (reader.next_frame(stream, limits, deadline), sent) {
            (Ok(frame), _) => frame,
            (Err(TransportError::Closed), Err(error)) | (Err(error), _) => {
                return Err(protocol_or_transport(error));
            }
        };
        let bad = |error: FrameError| HandshakeError::Protocol(error.to_string());
        match header.kind {
            Kind::Key => {
                let proof: KeyProof = decode_body(body).map_err(bad)?;
                let session = offered.conclude(&proof).map_err(|_| {
                    HandshakeError::Key(format!(
                        "the server there does not hold the private half of key {} in {file}: it is not of this cluster, \
                         or another program answers in its place",
                        generation.number
                    ))
                })?;
                let session = Session::by_keys(session);
                reader.protect(session.clone());
                stream.protect(session);
                return Ok(None);
            }
            Kind::Answer => match decode_body(body).map_err(bad)? {
                Answer::Fault(fault) if fault.errno == libc::ENOKEY => unknown = fault.message,
                Answer::Fault(fault) if fault.errno == libc::EKEYREJECTED => {
                    return Err(HandshakeError::Key(format!("{} (ours is {file})", fault.message)));
                }
                Answer::Fault(fault) => return Err(HandshakeError::Refused(fault)),
                other => return Err(HandshakeError::Protocol(format!("it answered a key with {other:?}"))),
            },
            other => return Err(HandshakeError::Protocol(format!("it answered a key with a {other:?} frame"))),
        }
    }
    Ok(Some(unknown))
}

fn protocol_or_transport(error: TransportError) -> HandshakeError {
    match error {
        TransportError::Frame(error) => HandshakeError::Protocol(error.to_string()),
        TransportError::Tls(why) => HandshakeError::Key(why),
        other => HandshakeError::Transport(other),
    }
}

/// Why a server closes a connection instead of welcoming it.
#[derive(Debug)]
pub enum HelloError {
    /// No hello arrived.
    Broken(TransportError),
    /// The hello with this id was refused.
    Refused(u64, Fault),
}

/// The server against which hellos are checked.
#[derive(Clone, Copy, Debug)]
pub struct Host<'a> {
    /// Its name in the configuration, for messages.
    pub name: &'a str,
    /// Its role.
    pub role: Role,
    /// Its cluster.
    pub membership: &'a Membership,
    /// Its keys, if it requires proof of one.
    pub keys: Option<(&'a Keyring, Protect)>,
    /// Its certificates, if it requires those; keys are then not asked for.
    pub certificates: Option<&'a Certificates>,
}

/// What a server learns about a peer in the hand-shake.
#[derive(Debug, Default)]
pub struct Guest {
    /// The permitted role; `None`: unrestricted, because nothing has to be proved here.
    pub role: Option<KeyRole>,
    /// The number of the key that it proved.
    pub key: Option<u64>,
    /// The certificate that it proved.
    pub certificate: Option<PeerCertificate>,
}

impl Guest {
    /// It has proved a key or a certificate.
    pub fn is_proven(&self) -> bool {
        self.key.is_some() || self.certificate.is_some()
    }
}

/// Waits for a hello until `deadline` and checks that its sender has a key or certificate if required, speaks this version, wants this
/// kind of server and is not of another cluster. Returns the id to answer.
pub fn receive_hello(
    stream: &Stream,
    reader: &mut FrameReader,
    host: Host<'_>,
    limits: &Limits,
    deadline: Instant,
) -> Result<(u64, Hello, Guest), HelloError> {
    let limits = &limits.in_handshake();
    let speaks_tls = reader.first_byte(stream, deadline).map_err(HelloError::Broken)? == tls::HANDSHAKE;
    let guest = match (host.certificates, host.keys) {
        (Some(certificates), _) if speaks_tls => {
            let peer = tls::accept(stream, reader, certificates, deadline).map_err(HelloError::Broken)?;
            Guest { role: Some(peer.role), certificate: Some(peer), ..Guest::default() }
        }
        (None, _) if speaks_tls => {
            let wanted = if host.keys.is_some() { "a key" } else { "none" };
            let message = format!(
                "{}: a certificate was shown by TLS, but this server asks for {wanted} (`security`); use the same \
                 configuration on both sides",
                host.name
            );
            return Err(HelloError::Refused(0, Fault { errno: libc::EKEYREJECTED, message }));
        }
        (Some(_), _) => {
            let (header, _) = reader.next_frame(stream, limits, deadline).map_err(HelloError::Broken)?;
            let message = format!(
                "{}: this server takes only peers that show a certificate by TLS (`security`), and none was shown; use the \
                 same configuration on both sides",
                host.name
            );
            return Err(HelloError::Refused(header.id, Fault { errno: libc::EKEYREJECTED, message }));
        }
        (None, Some((ring, protect))) => receive_key(stream, reader, host, ring, protect, limits, deadline)?,
        (None, None) => Guest { role: role_by_user(stream), ..Guest::default() },
    };
    let (header, body) = reader.next_frame(stream, limits, deadline).map_err(HelloError::Broken)?;
    let refuse = |message: String| {
        let fault = Fault { errno: libc::EPROTO, message: format!("{}: {message}", host.name) };
        HelloError::Refused(header.id, fault)
    };
    if header.kind == Kind::Key {
        return Err(refuse(
            "a key was shown, but this server asks for none (`security`); use the same configuration on both sides"
                .into(),
        ));
    }
    if header.kind != Kind::Hello {
        return Err(refuse(format!("a connection begins with a hello, not with {:?}", header.kind)));
    }
    let broken = |error: FrameError| HelloError::Broken(error.into());
    let version = frame::decode_version(body).map_err(broken)?;
    if version != PROTOCOL_VERSION {
        return Err(refuse(format!(
            "version {version} of the protocol was offered, version {PROTOCOL_VERSION} is spoken here; \
             use the same release on both sides"
        )));
    }
    let hello: Hello = decode_body(body).map_err(broken)?;
    if !host.role.serves(hello.role) {
        return Err(refuse(format!(
            "this is a server of role {:?}, the caller wants {:?}; correct the address in its configuration",
            host.role, hello.role
        )));
    }
    if !host.membership.admits(hello.cluster) {
        return Err(refuse(format!(
            "this server belongs to cluster {}, the caller to {}; correct the address in the caller's configuration, or \
             `dir` of this server (`impresario store show` tells what a folder belongs to)",
            host.membership.cluster(),
            hello.cluster
        )));
    }
    Ok((header.id, hello, guest))
}

/// The role of a peer without keys: on a Unix socket, root and the server's own user may do everything, other users
/// what clients may. Other sockets are unrestricted.
fn role_by_user(stream: &Stream) -> Option<KeyRole> {
    let user = stream.peer_user()?;
    (user != 0 && user != rustix::process::geteuid().as_raw()).then_some(KeyRole::Client)
}

/// Verifies a peer's key and protects the stream. A peer may offer another key if one is unknown.
fn receive_key(
    stream: &Stream,
    reader: &mut FrameReader,
    host: Host<'_>,
    ring: &Keyring,
    protect: Protect,
    limits: &Limits,
    deadline: Instant,
) -> Result<Guest, HelloError> {
    let refused = |id, errno, message: String| {
        HelloError::Refused(id, Fault { errno, message: format!("{}: {message}", host.name) })
    };
    let mut tries = 0;
    loop {
        let (header, body) = reader.next_frame(stream, limits, deadline).map_err(HelloError::Broken)?;
        let id = header.id;
        match header.kind {
            Kind::Key => {}
            Kind::Hello => {
                let message = "this server takes only peers that show a key (`security`), and none was shown; use the \
                               same configuration on both sides, and `impresario key new` where there are no keys yet";
                return Err(refused(id, libc::EKEYREJECTED, message.into()));
            }
            other => {
                return Err(refused(
                    id,
                    libc::EPROTO,
                    format!("a connection begins with a key here, not with {other:?}"),
                ));
            }
        }
        let version = frame::decode_version(body).map_err(|error| HelloError::Broken(error.into()))?;
        if version != PROTOCOL_VERSION {
            let message = format!(
                "version {version} of the protocol was offered, version {PROTOCOL_VERSION} is spoken here; \
                 use the same release on both sides"
            );
            return Err(refused(id, libc::EPROTO, message));
        }
        let offer: KeyOffer = decode_body(body).map_err(|error| HelloError::Broken(error.into()))?;
        let mut keys = ring.keys();
        if keys.generation(offer.key).is_none() && ring.refresh() {
            keys = ring.keys();
        }
        let Some(generation) = keys.generation(offer.key).filter(|generation| generation.is_accepted()) else {
            let known = match keys.generation(offer.key) {
                Some(_) => "is no longer accepted here, as it was replaced",
                None => "is not known here",
            };
            let present = keys.generations.first().map_or("", |generation| &generation.number);
            let message = format!(
                "key {:016x} {known}; the present one is {present}: copy the {} key file anew from where the keys were made",
                offer.key, offer.role
            );
            tries += 1;
            let HelloError::Refused(_, fault) = refused(id, libc::ENOKEY, message) else { continue };
            if tries >= GENERATIONS_MAX {
                return Err(HelloError::Refused(id, fault));
            }
            let head = frame::encode(Kind::Answer, id, &Answer::Fault(fault), 0);
            let head = head.map_err(|error| HelloError::Broken(error.into()))?;
            send_frame(stream, &head, &[], deadline).map_err(HelloError::Broken)?;
            continue;
        };
        let (proof, session) = noise::accept(generation, &offer, protect).map_err(|_| {
            let message = format!(
                "the peer does not hold the {} key {} as it claims; copy the key file anew from where the keys were made",
                offer.role, generation.number
            );
            refused(id, libc::EKEYREJECTED, message)
        })?;
        let head = frame::encode(Kind::Key, id, &proof, 0).map_err(|error| HelloError::Broken(error.into()))?;
        send_frame(stream, &head, &[], deadline).map_err(HelloError::Broken)?;
        let session = Session::by_keys(session);
        reader.protect(session.clone());
        stream.protect(session);
        return Ok(Guest { role: Some(offer.role), key: Some(offer.key), certificate: None });
    }
}

/// A unique identity of this server run for its [`Welcome`](impresario_wire::Welcome): the machine's boot in the upper
/// 32 bits, random in the lower.
pub fn new_incarnation() -> io::Result<u64> {
    let boot = impresario_base::machine::boot()?;
    Ok((boot ^ boot << 32) & !0xffff_ffff | u64::from(u32::from_le_bytes(random_bytes()?)))
}
