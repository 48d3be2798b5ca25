//! The hand-shake: a client says hello, a server answers with a welcome or with the reason why not.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use impresario_wire::{
    Answer, ClusterId, Fault, FrameError, Hello, Kind, Limits, PROTOCOL_VERSION, Role, Welcome, decode_body, frame,
};

use crate::{FrameReader, Stream, TransportError, send_frame};

/// The cluster that a program belongs to: known from its folder, or learnt from the first server that welcomes it.
#[derive(Debug, Default)]
pub struct Membership(AtomicU64);

impl Membership {
    /// Of a program that knows its cluster.
    pub fn of(cluster: ClusterId) -> Membership {
        Membership(AtomicU64::new(cluster.0))
    }

    /// The cluster; 0 while it is not known.
    pub fn cluster(&self) -> ClusterId {
        ClusterId(self.0.load(Ordering::Acquire))
    }

    /// Takes a peer's word for it when nothing was known; otherwise the error is the cluster that the peer is not of.
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
    /// The connection failed first.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The server refused, in its own words.
    #[error("{}", .0.message)]
    Refused(Fault),
    /// The server does not speak our protocol, or is another one than expected.
    #[error("{0}")]
    Protocol(String),
}

/// Says hello and waits for the welcome until `deadline`. A server must call itself `server`, unless that is empty, and
/// be of the same cluster, unless that is not known: data of one server must not be taken for another's.
pub fn say_hello(
    stream: &Stream,
    reader: &mut FrameReader,
    hello: &Hello,
    server: &str,
    membership: &Membership,
    limits: &Limits,
    deadline: Instant,
) -> Result<Welcome, HandshakeError> {
    let hello = Hello { cluster: membership.cluster(), ..hello.clone() };
    let head = frame::encode(Kind::Hello, 0, &hello, 0).map_err(TransportError::from)?;
    // A server that refuses may close before it has read us; its reason is still there to be read.
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
            Answer::Fault(fault) => return Err(HandshakeError::Refused(fault)),
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

fn protocol_or_transport(error: TransportError) -> HandshakeError {
    match error {
        TransportError::Frame(error) => HandshakeError::Protocol(error.to_string()),
        other => HandshakeError::Transport(other),
    }
}

/// Why a server ends a connection instead of welcoming it.
#[derive(Debug)]
pub enum HelloError {
    /// No hello came.
    Broken(TransportError),
    /// The hello with this id is refused.
    Refused(u64, Fault),
}

/// A server as hellos are checked against it.
#[derive(Clone, Copy, Debug)]
pub struct Host<'a> {
    /// Its name in the configuration, for messages.
    pub name: &'a str,
    /// Its role.
    pub role: Role,
    /// Its cluster.
    pub membership: &'a Membership,
}

/// Waits for a hello until `deadline` and checks that its sender speaks this version, wants this kind of server and is not
/// of another cluster.
/// Returns the id to answer.
pub fn receive_hello(
    stream: &Stream,
    reader: &mut FrameReader,
    host: Host<'_>,
    limits: &Limits,
    deadline: Instant,
) -> Result<(u64, Hello), HelloError> {
    let (header, body) = reader.next_frame(stream, limits, deadline).map_err(HelloError::Broken)?;
    let refuse = |message: String| {
        let fault = Fault { errno: libc::EPROTO, message: format!("{}: {message}", host.name) };
        HelloError::Refused(header.id, fault)
    };
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
    Ok((header.id, hello))
}

/// Identity of a server's start for its [`Welcome`](impresario_wire::Welcome): the boot of this machine in the upper
/// 32 bits, chance in the lower.
pub fn new_incarnation() -> io::Result<u64> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    let boot = boot
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let mut chance = [0; 4];
    getrandom::fill(&mut chance).map_err(io::Error::other)?;
    Ok((boot ^ boot << 32) & !0xffff_ffff | u64::from(u32::from_le_bytes(chance)))
}
