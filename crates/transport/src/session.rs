//! How a stream is protected once both ends have proved who they are: a sequence of records in each direction, by keys
//! (`noise`) or by certificates (`tls`).

use std::io::IoSlice;
use std::sync::Arc;

use impresario_config::Protect;

use crate::{TransportError, noise, tls};

/// The protection of a connection. Each direction is used by one thread at a time.
pub struct Session(Records);

enum Records {
    Noise(noise::Channel),
    Tls(Arc<tls::Channel>),
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("protect", &self.protect()).finish_non_exhaustive()
    }
}

impl Session {
    pub(crate) fn by_keys(channel: noise::Channel) -> Arc<Session> {
        Arc::new(Session(Records::Noise(channel)))
    }

    pub(crate) fn by_certificates(channel: Arc<tls::Channel>) -> Arc<Session> {
        Arc::new(Session(Records::Tls(channel)))
    }

    /// The protection level.
    pub fn protect(&self) -> Protect {
        match &self.0 {
            Records::Noise(channel) => channel.protect(),
            Records::Tls(_) => Protect::All,
        }
    }

    /// True if the next frame sent must be sealed.
    pub fn seals_next(&self) -> bool {
        match &self.0 {
            Records::Noise(channel) => channel.seals_next(),
            Records::Tls(_) => true,
        }
    }

    /// The records for the next bytes to send: the heads of frames, and the payload of the last one if payloads are
    /// protected too. Send them in the order in which they are sealed.
    pub fn seal(&self, head: &[u8], payload: &[IoSlice<'_>]) -> Result<Vec<u8>, TransportError> {
        match &self.0 {
            Records::Noise(channel) => channel.seal(head, payload),
            Records::Tls(channel) => channel.seal(head, payload),
        }
    }

    /// Length of the first record in `held`, prefix included; before the prefix has arrived the length of that, bytes.
    pub(crate) fn record_bytes(&self, held: &[u8]) -> usize {
        match &self.0 {
            Records::Noise(_) => noise::record_bytes(held),
            Records::Tls(_) => tls::record_bytes(held),
        }
    }

    /// Opens the next record, with its prefix, into `into`, which must be as long as the record. Returns the length of its
    /// content, which may be 0.
    pub(crate) fn open(&self, record: &[u8], into: &mut [u8]) -> Result<usize, TransportError> {
        match &self.0 {
            Records::Noise(channel) => channel.open(record, into),
            Records::Tls(channel) => channel.open(record, into),
        }
    }
}
