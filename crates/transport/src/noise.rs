//! The protected stream: a Noise hand-shake, then records.
//!
//! The hand-shake is `NKpsk0` of the Noise Protocol Framework (revision 34, sections 7.5 and 9), as implemented by the
//! crate `snow`: the server proves that it holds the private half of the cluster's key pair, the client that it knows
//! its role's secret, and both generate ephemeral keys. A client's key thus cannot be used to act as a server, a stolen
//! key does not decrypt recorded connections, and a replayed first message leads to keys unknown to its sender. Nothing
//! confidential is sent before the second message.
//!
//! A record is its length (two bytes, little-endian) and a Noise transport message of at most 65535 bytes. Both sides
//! number records independently, so none can be omitted, repeated or reordered. The records' content is the stream of
//! frames; under [`Protect::Headers`] the payloads of frames are excluded and follow, unencrypted, the record that ends
//! with their frame's body. Under [`Protect::Handshake`] only the first frame in each direction, the hello or its
//! reply, is in a record: it proves that its sender knows the keys.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::lock::RwLock;
use impresario_config::Protect;
use impresario_wire::{KeyOffer, KeyProof, KeyRole, PROTOCOL_VERSION};
use snow::params::NoiseParams;
use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::TransportError;
use crate::keys::{Generation, SECRET_BYTES, Secret};

const PATTERN: &str = "Noise_NKpsk0_25519_AESGCM_SHA256";
/// Maximum length of a hand-shake message without its payload, bytes.
const MESSAGE_MAX_BYTES: usize = 256;
/// Maximum content of a record that we send, bytes.
const RECORD_BYTES: usize = 32 << 10;
/// Overhead of a record: its tag, bytes.
const TAG_BYTES: usize = 16;
/// Length prefix of a record, bytes.
const LENGTH_BYTES: usize = 2;
/// Both sides rekey a direction after this many records, far below the limit of AES-GCM.
const REKEY_RECORDS: u64 = 1 << 20;

/// Why a hand-shake with keys failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mismatch;

impl From<snow::Error> for Mismatch {
    fn from(_: snow::Error) -> Mismatch {
        Mismatch
    }
}

fn builder<'a>() -> Result<Builder<'a>, snow::Error> {
    Ok(Builder::new(PATTERN.parse::<NoiseParams>()?))
}

/// A new key pair: private half, public half.
pub(crate) fn key_pair() -> io::Result<(Secret, Secret)> {
    let pair = builder().and_then(|builder| builder.generate_keypair()).map_err(io::Error::other)?;
    let half = |bytes: Vec<u8>| {
        let bytes: Result<[u8; SECRET_BYTES], _> = bytes.try_into();
        bytes.map(Secret).map_err(|_| io::Error::other("a key of another length was drawn"))
    };
    Ok((half(pair.private)?, half(pair.public)?))
}

/// The context on which both sides must agree.
fn prologue(key: u64, role: KeyRole) -> Vec<u8> {
    let mut bytes = b"impresario".to_vec();
    bytes.extend(PROTOCOL_VERSION.to_le_bytes());
    bytes.extend(key.to_le_bytes());
    bytes.extend(role.name().bytes());
    bytes
}

/// The client's side after its first message.
pub(crate) struct Offered(HandshakeState);

/// Starts a hand-shake with one of the client's keys.
pub(crate) fn offer(
    generation: &Generation,
    role: KeyRole,
    secret: &Secret,
    protect: Protect,
) -> Result<(Offered, KeyOffer), Mismatch> {
    let (key, mut noise) = (generation.id(), vec![0; MESSAGE_MAX_BYTES]);
    let prologue = prologue(key, role);
    let builder = builder()?.prologue(&prologue)?.psk(0, &secret.0)?.remote_public_key(&generation.public.0)?;
    let mut state = builder.build_initiator()?;
    let len = state.write_message(&[protect as u8], &mut noise)?;
    noise.truncate(len);
    Ok((Offered(state), KeyOffer { version: PROTOCOL_VERSION, key, role, noise }))
}

impl Offered {
    /// Completes it with the server's proof.
    pub(crate) fn conclude(mut self, proof: &KeyProof) -> Result<Channel, Mismatch> {
        let mut payload = [0; MESSAGE_MAX_BYTES];
        let len = self.0.read_message(&proof.noise, &mut payload)?;
        Channel::of(self.0, payload.get(..len))
    }
}

/// The server's side: its proof, and the new session. The stricter of the two protection levels applies.
pub(crate) fn accept(
    generation: &Generation,
    offer: &KeyOffer,
    protect: Protect,
) -> Result<(KeyProof, Channel), Mismatch> {
    let (Some(secret), Some(private)) = (generation.secret(offer.role), &generation.private) else {
        return Err(Mismatch);
    };
    let prologue = prologue(offer.key, offer.role);
    let builder = builder()?.prologue(&prologue)?.psk(0, &secret.0)?.local_private_key(&private.0)?;
    let mut state = builder.build_responder()?;
    let mut payload = [0; MESSAGE_MAX_BYTES];
    // The library needs more room than the message.
    if offer.noise.len() > MESSAGE_MAX_BYTES {
        return Err(Mismatch);
    }
    let len = state.read_message(&offer.noise, &mut payload)?;
    let wish = protect_of(payload.get(..len)).ok_or(Mismatch)?;
    let chosen = [protect.max(wish) as u8];
    let mut noise = vec![0; MESSAGE_MAX_BYTES];
    let len = state.write_message(&chosen, &mut noise)?;
    noise.truncate(len);
    Ok((KeyProof { noise }, Channel::of(state, Some(&chosen))?))
}

fn protect_of(payload: Option<&[u8]>) -> Option<Protect> {
    let [byte] = payload? else { return None };
    [Protect::Handshake, Protect::Headers, Protect::All].into_iter().find(|protect| *protect as u8 == *byte)
}

/// Length of the first record in `held`, prefix included; before the prefix has arrived the length of that, bytes.
pub(crate) fn record_bytes(held: &[u8]) -> usize {
    match held {
        [a, b, ..] => LENGTH_BYTES + usize::from(u16::from_le_bytes([*a, *b])),
        _ => LENGTH_BYTES,
    }
}

/// The keys of a connection. Each direction is used by one thread at a time.
pub(crate) struct Channel {
    noise: RwLock<StatelessTransportState>,
    sent: AtomicU64,
    received: AtomicU64,
    protect: Protect,
}

impl Channel {
    fn of(state: HandshakeState, chosen: Option<&[u8]>) -> Result<Channel, Mismatch> {
        let protect = protect_of(chosen).ok_or(Mismatch)?;
        let noise = RwLock::new(state.into_stateless_transport_mode()?);
        Ok(Channel { noise, sent: AtomicU64::new(0), received: AtomicU64::new(0), protect })
    }

    /// The protection level.
    pub(crate) fn protect(&self) -> Protect {
        self.protect
    }

    /// True if the next frame sent must be sealed.
    pub(crate) fn seals_next(&self) -> bool {
        self.protect != Protect::Handshake || self.sent.load(Ordering::Relaxed) == 0
    }

    /// The records for the next bytes to send: the heads of frames, and the payload of the last one if payloads are
    /// protected too. Send them in the order in which they are sealed.
    pub(crate) fn seal(&self, head: &[u8], payload: &[IoSlice<'_>]) -> Result<Vec<u8>, TransportError> {
        let payload = if self.protect == Protect::All { payload } else { &[] };
        let bytes = head.len() + payload.iter().map(|piece| piece.len()).sum::<usize>();
        let records = bytes / RECORD_BYTES + 1 + payload.len();
        let mut out = Vec::with_capacity(bytes + records * (LENGTH_BYTES + TAG_BYTES));
        for piece in std::iter::once(head).chain(payload.iter().map(|piece| &**piece)) {
            piece.chunks(RECORD_BYTES).try_for_each(|part| self.seal_record(part, &mut out))?;
        }
        Ok(out)
    }

    fn seal_record(&self, part: &[u8], out: &mut Vec<u8>) -> Result<(), TransportError> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed);
        if number > 0 && number.is_multiple_of(REKEY_RECORDS) {
            self.noise.write().rekey_outgoing();
        }
        let len = part.len() + TAG_BYTES;
        out.extend_from_slice(&(len as u16).to_le_bytes());
        let at = out.len();
        out.resize(at + len, 0);
        let room = out.get_mut(at..).unwrap_or(&mut []);
        self.noise.read().write_message(number, part, room).map(drop).map_err(|_| TransportError::Forged)
    }

    /// Opens the next record, with its prefix, into `into`, which must be as long as the record. Returns the length of its
    /// content.
    pub(crate) fn open(&self, record: &[u8], into: &mut [u8]) -> Result<usize, TransportError> {
        let number = self.received.fetch_add(1, Ordering::Relaxed);
        if number > 0 && number.is_multiple_of(REKEY_RECORDS) {
            self.noise.write().rekey_incoming();
        }
        let message = record.get(LENGTH_BYTES..).unwrap_or(&[]);
        self.noise.read().read_message(number, message, into).map_err(|_| TransportError::Forged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Keys;

    fn pair(protect: Protect) -> (Channel, Channel) {
        let keys = Keys::draw().unwrap();
        let generation = &keys.generations[0];
        let secret = generation.secret(KeyRole::Client).unwrap();
        let (offered, offer) = offer(generation, KeyRole::Client, secret, Protect::Headers).unwrap();
        let (proof, server) = accept(generation, &offer, protect).unwrap();
        (offered.conclude(&proof).unwrap(), server)
    }

    fn open_all(session: &Channel, mut bytes: &[u8]) -> Result<Vec<u8>, TransportError> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let (record, later) = bytes.split_at(record_bytes(bytes));
            let mut plain = vec![0; record.len()];
            let len = session.open(record, &mut plain)?;
            all.extend_from_slice(&plain[..len]);
            bytes = later;
        }
        Ok(all)
    }

    #[test]
    fn what_is_sealed_on_one_side_opens_on_the_other_once_and_in_order() {
        let (client, server) = pair(Protect::All);
        let long = vec![7u8; 100_000];
        let first = client.seal(b"head", &[IoSlice::new(&long), IoSlice::new(b"end")]).unwrap();
        assert_eq!(open_all(&server, &first).unwrap(), [&b"head"[..], &long, b"end"].concat());
        assert!(open_all(&server, &first).is_err(), "a replay");
        let (client, server) = pair(Protect::Headers);
        let first = client.seal(b"head", &[IoSlice::new(&long)]).unwrap();
        let second = client.seal(b"next", &[]).unwrap();
        assert!(first.len() < 100, "payloads are left out");
        assert!(open_all(&server, &second).is_err(), "one was left out");
        let (client, server) = pair(Protect::Headers);
        let mut altered = client.seal(b"head", &[]).unwrap();
        *altered.last_mut().unwrap() ^= 1;
        assert!(open_all(&server, &altered).is_err());
    }

    #[test]
    fn both_sides_change_keys_together() {
        let (client, server) = pair(Protect::Headers);
        let near = REKEY_RECORDS - 2;
        client.sent.store(near, Ordering::Relaxed);
        server.received.store(near, Ordering::Relaxed);
        for _ in 0..4 {
            assert_eq!(open_all(&server, &client.seal(b"head", &[]).unwrap()).unwrap(), b"head");
        }
        assert_eq!(open_all(&client, &server.seal(b"back", &[]).unwrap()).unwrap(), b"back");
    }

    #[test]
    fn a_client_key_serves_neither_as_another_role_nor_as_a_server() {
        let (keys, foreign) = (Keys::draw().unwrap(), Keys::draw().unwrap());
        let (all, client) = (&keys.generations[0], &keys.for_role(KeyRole::Client).generations[0]);
        let secret = client.secret(KeyRole::Client).unwrap();
        for role in [KeyRole::Admin, KeyRole::Server] {
            assert!(client.secret(role).is_none());
            let (_, claimed) = offer(client, role, secret, Protect::All).unwrap();
            assert_eq!(accept(all, &claimed, Protect::All).err(), Some(Mismatch), "{role}");
            // The role in the clear part cannot be changed either.
            let (_, honest) = offer(client, KeyRole::Client, secret, Protect::All).unwrap();
            assert!(accept(all, &KeyOffer { role, ..honest }, Protect::All).is_err());
        }
        let (_, honest) = offer(client, KeyRole::Client, secret, Protect::All).unwrap();
        assert!(accept(client, &honest, Protect::All).is_err(), "no private half");
        let mut other_pair = all.clone();
        other_pair.private = foreign.generations[0].private.clone();
        let (offered, honest) = offer(client, KeyRole::Client, secret, Protect::All).unwrap();
        assert!(accept(&other_pair, &honest, Protect::All).is_err(), "another private half");
        let (proof, _) = accept(all, &honest, Protect::All).unwrap();
        let mut altered = proof.clone();
        altered.noise[0] ^= 1;
        assert!(offered.conclude(&altered).is_err());
    }

    #[test]
    fn a_replayed_offer_leads_to_keys_unknown_to_its_sender() {
        let keys = Keys::draw().unwrap();
        let generation = &keys.generations[0];
        let secret = generation.secret(KeyRole::Client).unwrap();
        let (offered, offer) = offer(generation, KeyRole::Client, secret, Protect::All).unwrap();
        let (proof, _) = accept(generation, &offer, Protect::All).unwrap();
        let client = offered.conclude(&proof).unwrap();
        let recorded = client.seal(b"hello", &[]).unwrap();
        let (_, again) = accept(generation, &offer, Protect::All).unwrap();
        assert!(open_all(&again, &recorded).is_err());
    }
}
