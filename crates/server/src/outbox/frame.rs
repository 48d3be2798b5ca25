//! A frame to send: its pieces, its protection, and what of it has left.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use impresario_config::Protect;
use impresario_transport::Session;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::payload::Slice;
/// The kernel takes at most this many pieces at once.
const IOV_MAX: usize = 1024;

/// What a frame keeps until it has left or its connection is gone; the pieces of one answer share it.
pub(crate) type Hold = Arc<dyn Send + Sync>;

/// The bulk part of a reply.
#[derive(Default)]
pub enum Bulk {
    /// Nothing.
    #[default]
    None,
    /// One run of bytes.
    One(Slice),
    /// Several, back to back.
    Many(Vec<Slice>),
}

impl Bulk {
    /// The pieces, in order.
    pub fn slices(&self) -> &[Slice] {
        match self {
            Bulk::None => &[],
            Bulk::One(slice) => std::slice::from_ref(slice),
            Bulk::Many(slices) => slices,
        }
    }

    /// Bytes in all.
    pub fn len_bytes(&self) -> usize {
        self.slices().iter().map(|s| s.len()).sum()
    }
}

/// One frame to send.
pub(crate) struct OutFrame {
    head: Vec<u8>,
    pub(super) bulk: Bulk,
    /// As it was made, bytes: what counts as waiting.
    pub(super) len: usize,
    /// As it leaves, bytes.
    pub(super) wire_len: usize,
    pub(super) sent: usize,
    sealed: bool,
    _hold: Option<Hold>,
}

impl OutFrame {
    /// `head`: the frame's header and body; `bulk`: its payload.
    pub(crate) fn new(head: Vec<u8>, bulk: Bulk, hold: Option<Hold>) -> OutFrame {
        let len = head.len() + bulk.len_bytes();
        OutFrame { len, wire_len: len, head, bulk, sent: 0, sealed: false, _hold: hold }
    }

    /// Its bytes, in order.
    fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.head.as_slice()).chain(self.bulk.slices().iter().map(|slice| &**slice))
    }

    /// Has the frame protected, once: frames must leave in the order in which they are sealed.
    pub(super) fn seal(&mut self, session: &Session) -> io::Result<()> {
        if self.sealed || !session.seals_next() {
            self.sealed = true;
            return Ok(());
        }
        let pieces: Vec<IoSlice<'_>> = self.bulk.slices().iter().map(|slice| IoSlice::new(slice)).collect();
        let head = session.seal(&self.head, &pieces).map_err(io::Error::other)?;
        self.head = head;
        if session.protect() == Protect::All {
            self.bulk = Bulk::None;
        }
        self.wire_len = self.head.len() + self.bulk.len_bytes();
        self.sealed = true;
        Ok(())
    }

    /// Sends what the socket takes without blocking; true when the frame has left entirely.
    pub(super) fn push(&mut self, socket: BorrowedFd<'_>, session: Option<&Arc<Session>>) -> io::Result<bool> {
        session.map_or(Ok(()), |session| self.seal(session))?;
        while self.sent < self.wire_len {
            let mut skip = self.sent;
            let mut pieces = [IoSlice::new(&[]); 8];
            let mut many = Vec::new();
            let unsent = self.bytes().filter_map(|bytes| {
                let rest = bytes.get(skip..);
                skip = skip.saturating_sub(bytes.len());
                rest.filter(|r| !r.is_empty()).map(IoSlice::new)
            });
            let pieces = if self.bulk.slices().len() < pieces.len() {
                let mut count = 0;
                pieces.iter_mut().zip(unsent).for_each(|(slot, piece)| {
                    *slot = piece;
                    count += 1;
                });
                pieces.get(..count).unwrap_or(&[])
            } else {
                many.extend(unsent.take(IOV_MAX));
                &many[..]
            };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => self.sent += sent,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }
}

/// Sends what the socket takes of several frames, without blocking and with one system call; gives how many have left
/// entirely.
pub(super) fn push_together(
    frames: &mut [OutFrame],
    socket: BorrowedFd<'_>,
    session: Option<&Arc<Session>>,
) -> io::Result<usize> {
    session.map_or(Ok(()), |session| frames.iter_mut().try_for_each(|frame| frame.seal(session)))?;
    let pieces = frames.iter().flat_map(OutFrame::bytes).filter(|bytes| !bytes.is_empty()).map(IoSlice::new);
    let pieces: Vec<IoSlice<'_>> = pieces.take(IOV_MAX).collect();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut sent = match rustix::net::sendmsg(socket, &pieces, &mut SendAncillaryBuffer::default(), flags) {
        Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
        Ok(sent) => sent,
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => 0,
        Err(errno) => return Err(errno.into()),
    };
    let mut left = 0;
    for frame in frames {
        frame.sent = sent.min(frame.wire_len);
        sent -= frame.sent;
        left += usize::from(frame.sent == frame.wire_len);
    }
    Ok(left)
}
