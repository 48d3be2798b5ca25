//! A note of the file `changes`, and its 32 bytes.

use impresario_wire::message::{ClientKey, FileKey, Who};

/// Length of a note.
pub(super) const NOTE_BYTES: usize = 32;

/// A note in the file.
#[derive(Clone, Copy)]
pub(super) struct Note {
    pub(super) kind: u32,
    pub(super) who: Who,
    /// Of [`OPENED`] and [`CUTTING`]; of [`BEGUN`] and [`EXCHANGING`], [`Begun::node`](super::Begun::node); of [`DONE`], [`Known::Done`](super::Known::Done).
    pub(super) key: FileKey,
}

pub(super) const BEGUN: u32 = 1;
pub(super) const DONE: u32 = 2;
pub(super) const OPENED: u32 = 3;
/// It failed without having changed anything.
pub(super) const FAILED: u32 = 4;
/// No change: a client has begun this epoch, and changes up to this sequence were forgotten.
pub(super) const CLIENT: u32 = 5;
/// No change: the epoch of clients that are not remembered.
pub(super) const BASE: u32 = 6;
/// No change: changes were forgotten, of this epoch at the latest.
pub(super) const FORGOT: u32 = 7;
/// An exchange of two names begins.
pub(super) const EXCHANGING: u32 = 8;
/// No change: the objects of a file are being cut, to the length that is in the place of the client.
pub(super) const CUTTING: u32 = 9;
/// No change: that has ended.
pub(super) const CUT: u32 = 10;
/// No change: the append with this sequence was assigned the range at the offset that is in the place of the key; its length is in
/// that of the epoch.
pub(super) const ASSIGNED: u32 = 11;
/// With [`BEGUN`] or [`EXCHANGING`]: not by the run that has written the note, but by one before.
pub(super) const BEFORE: u32 = 16;

impl Note {
    pub(super) fn of_cut(kind: u32, key: FileKey, len_bytes: u64) -> Note {
        Note { kind, who: Who { client: ClientKey(len_bytes), ..Who::default() }, key }
    }

    /// Nothing if it is longer than a note can say.
    pub(super) fn of_range(who: &Who, offset: u64, len_bytes: u64) -> Option<Note> {
        let who = Who { epoch: u32::try_from(len_bytes).ok()?, ..*who };
        Some(Note { kind: ASSIGNED, who, key: FileKey(offset) })
    }

    pub(super) fn encode(&self) -> [u8; NOTE_BYTES] {
        let mut bytes = [0; NOTE_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.who.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.who.client.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.who.sequence.to_le_bytes());
        bytes[24..].copy_from_slice(&self.key.0.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Note> {
        let [k0, k1, k2, k3, e0, e1, e2, e3, rest @ ..] = bytes.first_chunk::<NOTE_BYTES>()?;
        let (client, rest) = rest.split_first_chunk::<8>()?;
        let (sequence, key) = rest.split_first_chunk::<8>()?;
        let who = Who {
            client: ClientKey(u64::from_le_bytes(*client)),
            epoch: u32::from_le_bytes([*e0, *e1, *e2, *e3]),
            sequence: u64::from_le_bytes(*sequence),
            ..Who::default()
        };
        let kind = u32::from_le_bytes([*k0, *k1, *k2, *k3]);
        let key = FileKey(u64::from_le_bytes(*key.first_chunk::<8>()?));
        let is_known = (BEGUN..=ASSIGNED).contains(&kind) || [BEFORE | BEGUN, BEFORE | EXCHANGING].contains(&kind);
        is_known.then_some(Note { kind, who, key })
    }
}
