//! A stream that TLS 1.3 protects: the hand-shake, in which both ends show certificates, and the records after it.
//!
//! The protocol is that of the crate `rustls`; this file only moves its bytes. All bytes of frames, payloads too, are in
//! records.

use std::io::{IoSlice, Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use impresario_base::lock::Mutex;
use impresario_wire::{Answer, Kind, Limits, decode_body};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, Error, ServerConnection};

use crate::certificates::Files;
use crate::{Certificates, FrameReader, HandshakeError, PeerCertificate, Session, Stream, TransportError, send_frame};

/// First byte of a record of the hand-shake, and of one that says that it failed.
pub(crate) const HANDSHAKE: u8 = 22;
const ALERT: u8 = 21;
/// What precedes the content of a record: type, version and length.
const PREFIX_BYTES: usize = 5;
/// Maximum length of a record's content as TLS 1.3 allows it, bytes.
const RECORD_MAX_BYTES: usize = (16 << 10) + 256;
/// Bytes of a hand-shake that are taken from a peer at most.
const HANDSHAKE_MAX_BYTES: usize = 64 << 10;
/// How much is sealed before a thread that receives has its turn, bytes.
const TURN_BYTES: usize = 64 << 10;

/// Both directions of a protected stream. Each is used by one thread at a time.
pub(crate) struct Channel {
    connection: Mutex<Connection>,
    files: Arc<Files>,
    /// Who is at the other end, for messages.
    peer: &'static str,
}

impl Channel {
    fn new(mut connection: Connection, files: &Arc<Files>, peer: &'static str) -> Arc<Channel> {
        // What is sealed is taken away at once.
        connection.set_buffer_limit(None);
        Arc::new(Channel { connection: Mutex::new(connection), files: files.clone(), peer })
    }

    /// The records for the next bytes to send. Send them in the order in which they are sealed.
    pub(crate) fn seal(&self, head: &[u8], payload: &[IoSlice<'_>]) -> Result<Vec<u8>, TransportError> {
        let bytes = head.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        let mut out = Vec::with_capacity(bytes + bytes / 512 + 64);
        for piece in std::iter::once(head).chain(payload.iter().map(|piece| &**piece)) {
            for part in piece.chunks(TURN_BYTES) {
                let mut connection = self.connection.lock();
                connection.writer().write_all(part)?;
                take_records(&mut connection, &mut out)?;
            }
        }
        Ok(out)
    }

    /// Opens a whole record into `into`, which must be as long as the record. Returns the length of its content.
    pub(crate) fn open(&self, record: &[u8], into: &mut [u8]) -> Result<usize, TransportError> {
        let mut connection = self.connection.lock();
        take_in(&mut connection, record, into).map_err(|error| match error {
            Error::DecryptError => TransportError::Forged,
            other => TransportError::Tls(self.files.explain(&other, self.peer)),
        })
    }
}

fn take_in(connection: &mut Connection, mut record: &[u8], into: &mut [u8]) -> Result<usize, Error> {
    let mut at = 0;
    while !record.is_empty() {
        match connection.read_tls(&mut record) {
            Ok(1..) => {}
            // The peer has said that nothing follows.
            Ok(0) => break,
            Err(error) => return Err(Error::General(error.to_string())),
        }
        connection.process_new_packets()?;
        while let Some(room) = into.get_mut(at..).filter(|room| !room.is_empty()) {
            match connection.reader().read(room) {
                Ok(got @ 1..) => at += got,
                _ => break,
            }
        }
    }
    Ok(at)
}

/// Length of the first record in `held`, prefix included; before the prefix has arrived the length of that, bytes.
pub(crate) fn record_bytes(held: &[u8]) -> usize {
    match held {
        // A record that claims to be longer is refused for its prefix.
        [_, _, _, high, low, ..] => PREFIX_BYTES + usize::from(u16::from_be_bytes([*high, *low])).min(RECORD_MAX_BYTES),
        _ => PREFIX_BYTES,
    }
}

/// The records that are to be sent.
fn take_records(connection: &mut Connection, out: &mut Vec<u8>) -> Result<(), TransportError> {
    while connection.wants_write() {
        connection.write_tls(out)?;
    }
    Ok(())
}

/// The client's side of the hand-shake: the stream is protected after it.
pub(crate) fn connect(
    stream: &Stream,
    reader: &mut FrameReader,
    certificates: &Certificates,
    limits: &Limits,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let (loaded, files) = (certificates.get(), certificates.files());
    // Servers are known by their role, not by a name: this one is neither sent nor checked.
    let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
    let failed = |error: Error| HandshakeError::Key(files.explain(&error, "the server there"));
    let connection = ClientConnection::new(loaded.client.clone(), name).map_err(failed)?;
    let channel = Channel::new(connection.into(), files, "the server there");
    let mut hello = Vec::new();
    take_records(&mut channel.connection.lock(), &mut hello)?;
    // A server that refuses may close before reading our hello; its reason can still be read.
    let sent = send_frame(stream, &hello, &[], deadline);
    match (reader.first_byte(stream, deadline), sent) {
        (Ok(HANDSHAKE | ALERT), _) => {}
        (Ok(_), _) => return Err(refused_in_clear(stream, reader, files, limits, deadline)),
        (Err(TransportError::Closed), Err(error)) | (Err(error), _) => return Err(error.into()),
    }
    shake_hands(stream, reader, &channel, deadline).map_err(|error| match error {
        TransportError::Tls(why) => HandshakeError::Key(why),
        other => HandshakeError::Transport(other),
    })
}

/// Why a server that does not speak TLS has ended the connection.
fn refused_in_clear(
    stream: &Stream,
    reader: &mut FrameReader,
    files: &Files,
    limits: &Limits,
    deadline: Instant,
) -> HandshakeError {
    let own = files.certificate();
    match reader.next_frame(stream, limits, deadline) {
        Ok((header, body)) => match decode_body(body) {
            Ok(Answer::Fault(fault)) if header.kind == Kind::Answer => {
                HandshakeError::Key(format!("{} (ours is the certificate in {own})", fault.message))
            }
            _ => HandshakeError::Protocol("it answered a TLS hello with another frame than a refusal".into()),
        },
        Err(TransportError::Frame(_)) => HandshakeError::Protocol(
            "what answers there speaks no TLS and is no server of Impresario; correct the address in the configuration"
                .into(),
        ),
        Err(error) => error.into(),
    }
}

/// The server's side of the hand-shake, of which the first byte has come: the stream is protected after it.
pub(crate) fn accept(
    stream: &Stream,
    reader: &mut FrameReader,
    certificates: &Certificates,
    deadline: Instant,
) -> Result<PeerCertificate, TransportError> {
    let (loaded, files) = (certificates.get(), certificates.files());
    let failed = |error: Error| TransportError::Tls(files.explain(&error, "the client"));
    let connection = ServerConnection::new(loaded.server.clone()).map_err(failed)?;
    let channel = Channel::new(connection.into(), files, "the client");
    shake_hands(stream, reader, &channel, deadline)?;
    let connection = channel.connection.lock();
    certificates.peer(&loaded, connection.peer_certificates()).map_err(TransportError::Tls)
}

fn shake_hands(
    stream: &Stream,
    reader: &mut FrameReader,
    tls: &Arc<Channel>,
    deadline: Instant,
) -> Result<(), TransportError> {
    let session = Session::by_certificates(tls.clone());
    reader.protect(session.clone());
    let mut taken = 0;
    loop {
        let (mut out, is_over) = (Vec::new(), !tls.connection.lock().is_handshaking());
        take_records(&mut tls.connection.lock(), &mut out)?;
        send_frame(stream, &out, &[], deadline)?;
        if is_over {
            stream.protect(session);
            return Ok(());
        }
        match reader.receive_record(stream, deadline) {
            Ok(bytes) if taken + bytes <= HANDSHAKE_MAX_BYTES => taken += bytes,
            Ok(_) => return Err(TransportError::Tls(format!("{} sends an endless TLS hand-shake", tls.peer))),
            Err(error) => {
                // The alert that says why.
                let mut alert = Vec::new();
                let _ = take_records(&mut tls.connection.lock(), &mut alert);
                let _ = send_frame(stream, &alert, &[], deadline);
                return Err(error);
            }
        }
    }
}
