//! Frames on a stream: sending one without copying its payload, receiving them through one buffer.

use std::borrow::Cow;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_config::Protect;
use impresario_wire::{FrameHeader, HEADER_BYTES, Limits};
use rustix::event::PollFlags;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::opener::Opener;
use crate::{PIECES_MAX, Session, Stream, TransportError};

/// Size of a client's receive buffer, bytes: header, body and payload of a small reply arrive with one system call.
const BUFFER_BYTES: usize = 64 << 10;
/// Size of a buffer before its peer has filled it once, bytes: enough for the hand-shake and for small calls one by one. Many
/// connections never need more.
const FIRST_BYTES: usize = 1 << 10;
/// How much of a large payload is read into the buffer, bytes; the rest goes straight to its destination.
const GLANCE_BYTES: usize = 4 << 10;
/// Size of a buffer for sealed payloads, bytes: two records.
const SEALED_BUFFER_BYTES: usize = 72 << 10;
/// Longest single wait without a deadline.
const IDLE_MAX: Duration = Duration::from_secs(3600);

/// How long a server waits for a frame after its first byte.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Longest pause between two bytes; the tick of the stream.
    pub stall: Duration,
    /// Maximum time for the whole frame, however slowly it arrives.
    pub frame: Duration,
}

impl Pace {
    fn stalled(&self) -> TransportError {
        TransportError::Stalled { stall_s: self.stall.as_secs(), frame_s: self.frame.as_secs() }
    }
}

/// Sends a frame: `head` (header and body), then `payload`. Waits until the deadline if the peer does not read.
pub fn send_frame(
    stream: &Stream,
    head: &[u8],
    payload: &[IoSlice<'_>],
    deadline: Instant,
) -> Result<(), TransportError> {
    let frame = OnStream::new(stream, head, payload)?;
    let mut unsent = frame.unsent();
    while !unsent.push(stream)? {
        stream.wait(PollFlags::OUT, deadline)?;
    }
    Ok(())
}

/// A frame as sent, sealed if the stream is protected; or several frames, of which only the last has a payload. Frames
/// must be sent in the order in which these are created.
pub struct OnStream<'a> {
    head: Cow<'a, [u8]>,
    payload: &'a [IoSlice<'a>],
}

impl<'a> OnStream<'a> {
    /// `head` (header and body), then `payload`.
    pub fn new(stream: &Stream, head: &'a [u8], payload: &'a [IoSlice<'a>]) -> Result<OnStream<'a>, TransportError> {
        let Some(session) = stream.session().filter(|session| session.seals_next()) else {
            return Ok(OnStream { head: Cow::Borrowed(head), payload });
        };
        let payload_apart = if session.protect() == Protect::All { &[] } else { payload };
        Ok(OnStream { head: Cow::Owned(session.seal(head, payload)?), payload: payload_apart })
    }

    /// All of its bytes.
    pub fn unsent(&self) -> Unsent<'_> {
        Unsent::new(&self.head, self.payload)
    }
}

/// The unsent rest of a frame.
pub struct Unsent<'a> {
    head: &'a [u8],
    payload: &'a [IoSlice<'a>],
    /// Bytes already sent of the payload's first piece.
    skip: usize,
}

impl<'a> Unsent<'a> {
    /// A whole frame.
    pub fn new(head: &'a [u8], payload: &'a [IoSlice<'a>]) -> Unsent<'a> {
        Unsent { head, payload, skip: 0 }
    }

    /// Sends what the socket accepts without waiting; true once everything is sent.
    pub fn push(&mut self, stream: &Stream) -> Result<bool, TransportError> {
        while !self.head.is_empty() || !self.payload.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = if self.payload.is_empty() {
                rustix::net::send(stream, self.head, flags)
            } else {
                let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
                let count = self.fill(&mut pieces);
                let none = &mut SendAncillaryBuffer::default();
                rustix::net::sendmsg(stream, pieces.get(..count).unwrap_or(&[]), none, flags)
            };
            match sent {
                Ok(sent) => self.advance(sent),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(TransportError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    fn fill<'p>(&self, pieces: &mut [IoSlice<'p>; PIECES_MAX]) -> usize
    where
        'a: 'p,
    {
        let first = self.payload.first().and_then(|piece| piece.get(self.skip..)).unwrap_or(&[]);
        let rest = self.payload.iter().skip(1).map(|piece| &**piece);
        let unsent = [self.head, first].into_iter().chain(rest).filter(|piece| !piece.is_empty());
        let mut count = 0;
        for (slot, piece) in pieces.iter_mut().zip(unsent) {
            *slot = IoSlice::new(piece);
            count += 1;
        }
        count
    }

    fn advance(&mut self, sent: usize) {
        let of_head = sent.min(self.head.len());
        self.head = self.head.get(of_head..).unwrap_or(&[]);
        self.skip += sent - of_head;
        while let Some((first, rest)) = self.payload.split_first()
            && self.skip >= first.len()
        {
            self.skip -= first.len();
            self.payload = rest;
        }
    }
}

/// Splits a stream into frames.
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// A header whose body has not arrived yet.
    header: Option<FrameHeader>,
    /// Default size of the buffer, bytes.
    buffer_bytes: usize,
    /// Deadline of the current frame, if frames are paced.
    frame_until: Option<Instant>,
    /// Opens records if the stream is protected; `buffer` then holds records.
    opener: Option<Box<Opener>>,
}

impl Default for FrameReader {
    fn default() -> Self {
        FrameReader::new(BUFFER_BYTES)
    }
}

impl FrameReader {
    /// A reader with this buffer size; longer bodies enlarge it temporarily.
    pub fn new(buffer_bytes: usize) -> FrameReader {
        let buffer_bytes = buffer_bytes.max(HEADER_BYTES);
        FrameReader {
            buffer: vec![0; buffer_bytes.min(FIRST_BYTES)],
            start: 0,
            end: 0,
            header: None,
            buffer_bytes,
            frame_until: None,
            opener: None,
        }
    }

    /// Protects the stream from the next byte on.
    pub(crate) fn protect(&mut self, session: Arc<Session>) {
        if session.protect() == Protect::All {
            self.buffer_bytes = self.buffer_bytes.max(SEALED_BUFFER_BYTES);
        }
        self.opener = Some(Box::new(Opener::new(session)));
    }

    /// Waits until the deadline for the first byte of what comes next, and leaves it there.
    pub(crate) fn first_byte(&mut self, stream: &Stream, deadline: Instant) -> Result<u8, TransportError> {
        loop {
            if let Some(byte) = self.held().first() {
                return Ok(*byte);
            }
            self.fill_until(stream, deadline)?;
        }
    }

    /// Waits until the deadline for a record of a protected stream, and opens it. Returns its length, bytes.
    pub(crate) fn receive_record(&mut self, stream: &Stream, deadline: Instant) -> Result<usize, TransportError> {
        loop {
            let held = self.buffer.get(self.start..self.end).unwrap_or(&[]);
            let used = self.opener.as_mut().map_or(Ok(0), |opener| opener.open(held))?;
            self.start += used;
            if used > 0 {
                return Ok(used);
            }
            self.fill_until(stream, deadline)?;
        }
    }

    /// The next frame's header and body, once both have arrived. Take its payload before the next frame.
    pub fn take_frame(&mut self, limits: &Limits) -> Result<Option<(FrameHeader, &[u8])>, TransportError> {
        if !self.is_complete(limits)? {
            return Ok(None);
        }
        let Some(header) = self.header.take() else { return Ok(None) };
        if let Some(opener) = &mut self.opener {
            return opener.take_body(&header).map(|body| Some((header, body)));
        }
        let from = self.start;
        self.start += header.body_len as usize;
        Ok(Some((header, self.buffer.get(from..self.start).unwrap_or(&[]))))
    }

    /// Whether the header and body of another frame have been received already. To be asked once the present frame has been
    /// taken with its payload.
    pub fn has_frame(&mut self, limits: &Limits) -> bool {
        // What is wrong with it is told by whatever takes it.
        self.is_complete(limits).unwrap_or(false)
    }

    /// Takes at most `len` payload bytes that were received with the frame.
    pub fn take_payload(&mut self, mut len: usize) -> &[u8] {
        if let Some(opener) = &mut self.opener {
            if opener.seals_payloads() {
                return opener.take(len);
            }
            len = opener.pass(len.min(self.end - self.start));
        }
        let from = self.start;
        self.start += len.min(self.end - self.start);
        self.buffer.get(from..self.start).unwrap_or(&[])
    }

    /// Receives more bytes with one system call. `large` announces a large payload: then little more than a header is
    /// buffered.
    pub fn fill(&mut self, stream: &Stream, large: bool, deadline: Instant) -> Result<(), TransportError> {
        if self.end == self.buffer.len() && self.buffer.len() < self.buffer_bytes {
            self.buffer.resize(self.buffer_bytes, 0);
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // The validated body length bounds the buffer.
        let need = match &self.opener {
            None => self.header.map_or(HEADER_BYTES, |header| header.body_len as usize),
            Some(opener) => opener.need(self.held()),
        };
        if self.start + need > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            self.buffer.resize(need.max(self.buffer_bytes), 0);
        } else if self.buffer.len() > self.buffer_bytes
            && self.end <= self.buffer_bytes
            && self.start + need <= self.buffer_bytes
        {
            self.buffer.truncate(self.buffer_bytes);
            self.buffer.shrink_to_fit();
        }
        let to = if large { (self.start + need).max(self.end + 1).max(GLANCE_BYTES) } else { self.buffer.len() };
        let to = to.min(self.buffer.len());
        let room = self.buffer.get_mut(self.end..to).unwrap_or(&mut []);
        match stream.receive(&mut [IoSliceMut::new(room)], deadline) {
            Ok(got) => self.end += got,
            Err(TransportError::Closed) if self.has_begun() => {
                return Err(TransportError::Truncated);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits for the next frame until the deadline.
    pub fn next_frame(
        &mut self,
        stream: &Stream,
        limits: &Limits,
        deadline: Instant,
    ) -> Result<(FrameHeader, &[u8]), TransportError> {
        while !self.is_complete(limits)? {
            self.fill_until(stream, deadline)?;
        }
        self.take_frame(limits)?.ok_or(TransportError::Truncated)
    }

    /// Receives a payload, or as much of it as fits `into`.
    pub fn read_payload(&mut self, stream: &Stream, into: &mut [u8], deadline: Instant) -> Result<(), TransportError> {
        let held = self.take_payload(into.len());
        let mut at = held.len();
        into.split_at_mut(at).0.copy_from_slice(held);
        while at < into.len() {
            let rest = into.get_mut(at..).unwrap_or(&mut []);
            match self.receive_payload(stream, &mut [IoSliceMut::new(rest)], deadline) {
                Ok(got) => at += got,
                Err(TransportError::TimedOut) if Instant::now() < deadline => {}
                Err(TransportError::Closed) => return Err(TransportError::Truncated),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for the next frame without limit, but no longer than `pace` allows once it has begun.
    pub fn next_frame_paced(
        &mut self,
        stream: &Stream,
        limits: &Limits,
        pace: &Pace,
    ) -> Result<(FrameHeader, &[u8]), TransportError> {
        self.frame_until = None;
        while !self.is_complete(limits)? {
            if self.has_begun() {
                self.fill_paced(stream, pace)?;
                continue;
            }
            match self.fill(stream, false, Instant::now() + IDLE_MAX) {
                Err(TransportError::TimedOut) => {}
                other => other?,
            }
        }
        self.take_frame(limits)?.ok_or(TransportError::Truncated)
    }

    /// Receives the payload of a paced frame, or as much of it as fits `into`.
    pub fn read_payload_paced(&mut self, stream: &Stream, into: &mut [u8], pace: &Pace) -> Result<(), TransportError> {
        let held = self.take_payload(into.len());
        let mut at = held.len();
        into.split_at_mut(at).0.copy_from_slice(held);
        while at < into.len() {
            let rest = into.get_mut(at..).unwrap_or(&mut []);
            let until = self.paced_until(pace)?;
            match self.receive_payload(stream, &mut [IoSliceMut::new(rest)], until) {
                Ok(got) => at += got,
                Err(TransportError::TimedOut) => return Err(pace.stalled()),
                Err(TransportError::Closed) => return Err(TransportError::Truncated),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Discards the payload of a paced frame, so that the next frame can be read.
    pub fn skip_payload_paced(&mut self, stream: &Stream, mut len: usize, pace: &Pace) -> Result<(), TransportError> {
        loop {
            len -= self.take_payload(len).len();
            if len == 0 {
                return Ok(());
            }
            if self.open_sealed_payload()? {
                continue;
            }
            match self.fill_paced(stream, pace) {
                Err(TransportError::Closed) => return Err(TransportError::Truncated),
                other => other?,
            }
        }
    }

    /// Receives more of a payload with at most one system call; [`FrameReader::take_payload`] returns it.
    pub fn fill_payload(&mut self, stream: &Stream, deadline: Instant) -> Result<(), TransportError> {
        if self.open_sealed_payload()? { Ok(()) } else { self.fill(stream, false, deadline) }
    }

    /// Receives available payload bytes, at least one, into `into`, which is not longer than the missing rest. Take
    /// what [`FrameReader::take_payload`] returns first.
    pub fn receive_payload(
        &mut self,
        stream: &Stream,
        into: &mut [IoSliceMut<'_>],
        deadline: Instant,
    ) -> Result<usize, TransportError> {
        let Some(opener) = &mut self.opener else { return stream.receive(into, deadline) };
        if !opener.seals_payloads() {
            let got = stream.receive(into, deadline)?;
            opener.pass(got);
            return Ok(got);
        }
        loop {
            let Some(opener) = &mut self.opener else { return Ok(0) };
            let got = opener.put(into);
            if got > 0 {
                return Ok(got);
            }
            let held = self.buffer.get(self.start..self.end).unwrap_or(&[]);
            match opener.open_into(held, into)? {
                Some((used, 0)) => self.start += used,
                Some((used, got)) => {
                    self.start += used;
                    return Ok(got);
                }
                None => self.fill(stream, false, deadline)?,
            }
        }
    }

    /// Opens one complete record of a sealed payload; false if there is none.
    fn open_sealed_payload(&mut self) -> Result<bool, TransportError> {
        let Some(opener) = self.opener.as_mut().filter(|opener| opener.seals_payloads()) else { return Ok(false) };
        let used = opener.open(self.buffer.get(self.start..self.end).unwrap_or(&[]))?;
        self.start += used;
        Ok(used > 0)
    }

    /// Part of a frame has arrived, or more of it, and was not taken.
    pub fn has_begun(&self) -> bool {
        self.start < self.end || self.header.is_some() || self.opener.as_ref().is_some_and(|o| !o.held().is_empty())
    }

    /// Reads and discards until the peer closes or `deadline`: closing a socket with unread data would reset it, and
    /// the peer could not read why.
    pub fn drain(&mut self, stream: &Stream, deadline: Instant) {
        for _ in 0..64 {
            (self.start, self.end) = (0, 0);
            if self.fill(stream, false, deadline).is_err() {
                return;
            }
        }
    }

    fn fill_paced(&mut self, stream: &Stream, pace: &Pace) -> Result<(), TransportError> {
        let until = self.paced_until(pace)?;
        match self.fill(stream, false, until) {
            Err(TransportError::TimedOut) => Err(pace.stalled()),
            other => other,
        }
    }

    /// Deadline of the current frame.
    fn paced_until(&mut self, pace: &Pace) -> Result<Instant, TransportError> {
        let now = Instant::now();
        let until = *self.frame_until.get_or_insert(now + pace.frame);
        if now >= until { Err(pace.stalled()) } else { Ok(until) }
    }

    fn fill_until(&mut self, stream: &Stream, deadline: Instant) -> Result<(), TransportError> {
        loop {
            match self.fill(stream, false, deadline) {
                // One receive waits for a tick. Who waits long need not wake up at each.
                Err(TransportError::TimedOut) if Instant::now() < deadline => {
                    stream.await_bytes(deadline)?;
                }
                other => return other,
            }
        }
    }

    fn is_complete(&mut self, limits: &Limits) -> Result<bool, TransportError> {
        if self.opener.as_ref().is_some_and(|opener| opener.is_over()) {
            self.opener = None;
        }
        while let Some(opener) = &mut self.opener {
            if self.header.is_none() {
                self.header = opener.take_header(limits)?;
            }
            if self.header.is_some_and(|header| opener.held().len() >= header.body_len as usize) {
                return Ok(true);
            }
            let used = opener.open(self.buffer.get(self.start..self.end).unwrap_or(&[]))?;
            if used == 0 {
                return Ok(false);
            }
            self.start += used;
        }
        if self.header.is_none() {
            impresario_wire::frame::check_start(self.held())?;
            if self.held().len() >= HEADER_BYTES {
                self.header = Some(FrameHeader::decode(self.held(), limits)?);
                self.start += HEADER_BYTES;
            }
        }
        Ok(self.header.is_some_and(|header| self.held().len() >= header.body_len as usize))
    }

    fn held(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HelloError, Host, Membership, receive_hello};
    use impresario_wire::{Answer, FrameError, Kind, Role, frame};
    use std::os::unix::net::UnixStream;

    const LIMITS: Limits = Limits::of_server(4096);
    const TICK: Duration = Duration::from_millis(50);

    fn pair(tick: Duration) -> (Stream, Stream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Stream::from_unix(ours, tick).unwrap(), Stream::from_unix(theirs, tick).unwrap())
    }

    fn in_s(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    fn call(id: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = frame::encode(Kind::Answer, id, &Answer::Written(7), payload.len() as u32).unwrap();
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn paced_frames_arrive_whole_through_a_small_buffer() {
        let (ours, theirs) = pair(TICK);
        let pace = Pace { stall: TICK, frame: Duration::from_secs(60) };
        let all = [call(1, &[1; 1000]), call(2, &[2; 1000]), call(3, b""), call(4, b"x")].concat();
        send_frame(&theirs, &all, &[], in_s(10)).unwrap();
        let mut reader = FrameReader::new(100);
        let mut payload = vec![0; 1000];
        assert_eq!(reader.next_frame_paced(&ours, &LIMITS, &pace).unwrap().0.id, 1);
        reader.read_payload_paced(&ours, &mut payload, &pace).unwrap();
        assert!(payload.iter().all(|byte| *byte == 1));
        assert_eq!(reader.next_frame_paced(&ours, &LIMITS, &pace).unwrap().0.id, 2);
        reader.skip_payload_paced(&ours, 1000, &pace).unwrap();
        assert_eq!(reader.next_frame_paced(&ours, &LIMITS, &pace).unwrap().0.id, 3);
        assert_eq!(reader.next_frame_paced(&ours, &LIMITS, &pace).unwrap().0.payload_len, 1);
        reader.skip_payload_paced(&ours, 1, &pace).unwrap();
        drop(theirs);
        assert!(matches!(reader.next_frame_paced(&ours, &LIMITS, &pace), Err(TransportError::Closed)));
    }

    #[test]
    fn a_peer_may_be_silent_between_frames_and_not_within_one() {
        let (ours, theirs) = pair(TICK);
        let pace = Pace { stall: TICK, frame: Duration::from_secs(60) };
        let frame = call(1, &[1; 10]);
        let (most, rest) = frame.split_at(frame.len() - 3);
        let mut reader = FrameReader::new(100);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(TICK * 4);
                send_frame(&theirs, most, &[], in_s(10)).unwrap();
            });
            // Several ticks of silence before the frame do not matter.
            reader.next_frame_paced(&ours, &LIMITS, &pace).unwrap();
        });
        let broken = reader.read_payload_paced(&ours, &mut [0; 10], &pace);
        assert!(matches!(broken, Err(TransportError::Stalled { .. })), "{broken:?}");
        send_frame(&theirs, rest, &[], in_s(10)).unwrap();
    }

    #[test]
    fn a_frame_that_trickles_is_given_up_in_the_end() {
        let (ours, theirs) = pair(TICK * 100);
        let pace = Pace { stall: TICK * 100, frame: TICK * 4 };
        let frame = call(1, &[]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for byte in frame.chunks(1) {
                    if send_frame(&theirs, byte, &[], in_s(10)).is_err() {
                        return;
                    }
                    std::thread::sleep(TICK);
                }
            });
            let broken = FrameReader::new(100).next_frame_paced(&ours, &LIMITS, &pace).map(|(header, _)| header);
            assert!(matches!(broken, Err(TransportError::Stalled { .. })), "{broken:?}");
            ours.shut_down();
        });
    }

    /// A peer that has proved nothing costs little, whatever it claims; and a server awaits no long answers even later.
    #[test]
    fn a_header_that_claims_a_long_body_costs_a_server_no_memory() {
        let (ours, theirs) = pair(TICK);
        let header = FrameHeader { kind: Kind::Answer, id: 1, body_len: 1 << 20, payload_len: 0 }.encode();
        send_frame(&theirs, &header, &[], in_s(10)).unwrap();
        let mut reader = FrameReader::default();
        let membership = Membership::default();
        let host = Host { name: "data.0", role: Role::Data, membership: &membership, keys: None, certificates: None };
        let received = receive_hello(&ours, &mut reader, host, &LIMITS, in_s(2)).map(drop);
        assert!(
            matches!(received, Err(HelloError::Broken(TransportError::Frame(FrameError::BodyTooLong { .. })))),
            "{received:?}"
        );
        assert!(reader.buffer.capacity() < 8 << 10, "{}", reader.buffer.capacity());

        let mut reader = FrameReader::default();
        let pace = Pace { stall: TICK, frame: Duration::from_secs(2) };
        send_frame(&theirs, &header, &[], in_s(10)).unwrap();
        let received = reader.next_frame_paced(&ours, &LIMITS, &pace).map(drop);
        assert!(matches!(received, Err(TransportError::Frame(FrameError::BodyTooLong { .. }))), "{received:?}");
        assert!(reader.buffer.capacity() < 8 << 10, "{}", reader.buffer.capacity());
    }
}
