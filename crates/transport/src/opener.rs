//! Opens the records of a protected stream and returns the bytes of its frames.

use std::io::IoSliceMut;
use std::sync::Arc;

use impresario_config::Protect;
use impresario_wire::{FrameError, FrameHeader, HEADER_BYTES, Limits};

use crate::{Session, TransportError};

/// Memory kept for the next records, bytes; a long body enlarges it temporarily.
const KEPT_MAX_BYTES: usize = 40 << 10;

/// The receiving end of a session.
pub(crate) struct Opener {
    session: Arc<Session>,
    /// `start..end` is opened and not yet taken.
    plain: Vec<u8>,
    start: usize,
    end: usize,
    /// Unprotected payload bytes that precede the next record.
    clear_left: usize,
    /// A frame was taken.
    begun: bool,
}

impl Opener {
    pub(crate) fn new(session: Arc<Session>) -> Opener {
        Opener { session, plain: Vec::new(), start: 0, end: 0, clear_left: 0, begun: false }
    }

    /// True if payloads are in records too.
    pub(crate) fn seals_payloads(&self) -> bool {
        self.session.protect() == Protect::All
    }

    /// True if no more records follow.
    pub(crate) fn is_over(&self) -> bool {
        self.begun && self.session.protect() == Protect::Handshake
    }

    /// Opened bytes not yet taken.
    pub(crate) fn held(&self) -> &[u8] {
        self.plain.get(self.start..self.end).unwrap_or(&[])
    }

    /// Bytes that must arrive, including the `held` ones, before anything can be done.
    pub(crate) fn need(&self, held: &[u8]) -> usize {
        if self.clear_left > 0 { 1 } else { self.session.record_bytes(held) }
    }

    /// Takes the header of the next frame, if it has arrived.
    pub(crate) fn take_header(&mut self, limits: &Limits) -> Result<Option<FrameHeader>, TransportError> {
        impresario_wire::frame::check_start(self.held())?;
        if self.held().len() < HEADER_BYTES {
            return Ok(None);
        }
        let header = FrameHeader::decode(self.held(), limits)?;
        self.start += HEADER_BYTES;
        Ok(Some(header))
    }

    /// Takes the body of a frame, which has arrived.
    pub(crate) fn take_body(&mut self, header: &FrameHeader) -> Result<&[u8], TransportError> {
        let from = self.start;
        self.start += header.body_len as usize;
        self.begun = true;
        if (header.payload_len > 0 && !self.seals_payloads()) || self.is_over() {
            // The payload, or an unprotected frame, follows the record, which must contain nothing else.
            if self.start != self.end {
                return Err(FrameError::TrailingBytes { extra: self.end.saturating_sub(self.start) }.into());
            }
            self.clear_left = header.payload_len as usize;
        }
        Ok(self.plain.get(from..self.start).unwrap_or(&[]))
    }

    /// Counts bytes of an unprotected payload as taken; returns how many of `len` belong to it.
    pub(crate) fn pass(&mut self, len: usize) -> usize {
        let len = len.min(self.clear_left);
        self.clear_left -= len;
        len
    }

    /// Takes at most `len` opened bytes.
    pub(crate) fn take(&mut self, len: usize) -> &[u8] {
        let from = self.start;
        self.start += len.min(self.end - self.start);
        self.plain.get(from..self.start).unwrap_or(&[])
    }

    /// Copies opened bytes into `into`; returns how many.
    pub(crate) fn put(&mut self, into: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for piece in into {
            let bytes = self.take(piece.len());
            piece.split_at_mut(bytes.len()).0.copy_from_slice(bytes);
        }
        self.start - before
    }

    /// Opens the first record of `bytes` if complete; returns its length, or 0.
    pub(crate) fn open(&mut self, bytes: &[u8]) -> Result<usize, TransportError> {
        let Some(record) = self.record(bytes) else { return Ok(0) };
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.plain.len() > KEPT_MAX_BYTES.max(record.len()) {
                self.plain = Vec::new();
            }
        } else if self.end + record.len() > self.plain.len() {
            self.plain.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end + record.len() > self.plain.len() {
            self.plain.resize(self.end + record.len(), 0);
        }
        let room = self.plain.get_mut(self.end..).unwrap_or(&mut []);
        self.end += self.session.open(record, room)?;
        Ok(record.len())
    }

    /// The same for a payload: straight into the first piece of `into` if it fits, otherwise to be taken. Returns the
    /// record's length and the bytes put into `into`.
    pub(crate) fn open_into(
        &mut self,
        bytes: &[u8],
        into: &mut [IoSliceMut<'_>],
    ) -> Result<Option<(usize, usize)>, TransportError> {
        let Some(record) = self.record(bytes) else { return Ok(None) };
        match into.first_mut() {
            Some(piece) if piece.len() >= record.len() => {
                let got = self.session.open(record, piece)?;
                Ok(Some((record.len(), got)))
            }
            _ => self.open(bytes).map(|used| Some((used, 0))),
        }
    }

    fn record<'b>(&self, bytes: &'b [u8]) -> Option<&'b [u8]> {
        if self.clear_left > 0 { None } else { bytes.get(..self.need(bytes)) }
    }
}
