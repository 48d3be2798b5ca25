//! Frames coming in on one connection: small ones with one system call, payloads straight to where they stay.
//!
//! Nothing is allocated from a length that the peer claims before it was checked; a peer that stops in the
//! middle of a frame is given up, one that is silent between frames may stay.

use std::io;
use std::time::{Duration, Instant};

use impresario_wire::frame::{FrameError, FrameHeader, HEADER_BYTES, Limits, check_start};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::outbox::Socket;

/// Enough for the header, body and payload of a 16 KiB write; larger payloads mostly bypass it.
const BUFFER_BYTES: usize = 20 * 1024;
/// A peer that sends nothing for so long in the middle of a frame is given up.
const STALL_MAX: Duration = Duration::from_secs(10);
/// A whole frame may take so long, however slowly it trickles.
const FRAME_TIME_MAX: Duration = Duration::from_secs(120);

/// Why no further frame can be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The peer closed between two frames.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed within a frame.
    #[error("the connection ended in the middle of a frame")]
    Truncated,
    /// The peer stopped within a frame, or did not begin in time.
    #[error("nothing came for {0} s in the middle of a frame")]
    Stalled(u64),
    /// Not our protocol, or not within its limits.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The socket failed.
    #[error("receiving failed: {0}")]
    Io(#[from] io::Error),
}

/// Receives frames.
pub(crate) struct Receiver {
    socket: Socket,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    limits: Limits,
    /// By when the present frame, or the hand-shake, must be complete.
    deadline: Option<Instant>,
}

impl Receiver {
    /// For a socket in blocking mode. `limits` bound what a frame may claim.
    pub(crate) fn new(socket: Socket, limits: Limits) -> io::Result<Receiver> {
        set_socket_timeout(&socket, Timeout::Recv, Some(STALL_MAX))?;
        let buffer = vec![0; BUFFER_BYTES];
        Ok(Receiver { socket, buffer, start: 0, end: 0, limits, deadline: None })
    }

    /// The next frame's header; waits for it as long as it takes, or until `deadline`.
    pub(crate) fn header(&mut self, deadline: Option<Instant>) -> Result<FrameHeader, Broken> {
        self.deadline = deadline;
        while self.end - self.start < HEADER_BYTES {
            // Judged by its first bytes: nonsense is refused even when it is shorter than a header.
            check_start(self.held())?;
            match self.fill(HEADER_BYTES) {
                Err(Broken::Stalled(_)) if deadline.is_none() && self.start == self.end => {}
                Err(Broken::Truncated) if self.start == self.end => return Err(Broken::Closed),
                other => other?,
            }
        }
        let header = FrameHeader::decode(self.held(), &self.limits)?;
        self.start += HEADER_BYTES;
        self.deadline = deadline.or_else(|| Some(Instant::now() + FRAME_TIME_MAX));
        Ok(header)
    }

    /// The frame's body, of the length that its (checked) header says.
    pub(crate) fn body(&mut self, len: u32) -> Result<&[u8], Broken> {
        let len = len as usize;
        while self.end - self.start < len {
            self.fill(len)?;
        }
        let from = self.start;
        self.start += len;
        Ok(self.buffer.get(from..from + len).unwrap_or(&[]))
    }

    /// The frame's payload, into its final place.
    pub(crate) fn payload(&mut self, mut into: &mut [u8]) -> Result<(), Broken> {
        let held = self.held();
        let have = held.len().min(into.len());
        let (front, rest) = std::mem::take(&mut into).split_at_mut(have);
        front.copy_from_slice(held.get(..have).unwrap_or(&[]));
        self.start += have;
        into = rest;
        while !into.is_empty() {
            let got = self.receive(|socket| rustix::io::read(socket, &mut *into))?;
            into = into.split_at_mut(got).1;
        }
        Ok(())
    }

    /// Throws away what would have been the payload, so that the next frame can be read.
    pub(crate) fn skip(&mut self, mut len: u64) -> Result<(), Broken> {
        while len > 0 {
            if self.start == self.end {
                self.fill(1)?;
            }
            let step = ((self.end - self.start) as u64).min(len);
            self.start += step as usize;
            len -= step;
        }
        Ok(())
    }

    /// Reads on without caring what, until the peer closes or a moment has passed: a socket closed with
    /// unread data in it would be reset, and the peer could not read why.
    pub(crate) fn drain(&mut self) {
        let moment = Duration::from_millis(300);
        self.deadline = Some(Instant::now() + moment);
        let _ = self.set_patience(Some(moment));
        for _ in 0..64 {
            (self.start, self.end) = (0, 0);
            if self.fill(1).is_err() {
                return;
            }
        }
    }

    fn held(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or(&[])
    }

    /// Receives at least one byte behind what is held, making room for `need` bytes in all.
    fn fill(&mut self, need: usize) -> Result<(), Broken> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start + need > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if need > self.buffer.len() {
                // A large body; `need` is at most the checked limit of bodies.
                self.buffer.resize(need, 0);
            }
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let end = self.end;
        let got = self.receive(|socket| rustix::io::read(socket, buffer.get_mut(end..).unwrap_or(&mut [])));
        self.buffer = buffer;
        self.end += got?;
        Ok(())
    }

    fn receive(&self, mut read: impl FnMut(&Socket) -> rustix::io::Result<usize>) -> Result<usize, Broken> {
        loop {
            match read(&self.socket) {
                Ok(0) => return Err(Broken::Truncated),
                Ok(got) => return self.in_time().map(|()| got),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(Broken::Stalled(STALL_MAX.as_secs())),
                Err(errno) => return Err(Broken::Io(errno.into())),
            }
        }
    }

    fn in_time(&self) -> Result<(), Broken> {
        match self.deadline {
            Some(deadline) if Instant::now() > deadline => Err(Broken::Stalled(FRAME_TIME_MAX.as_secs())),
            _ => Ok(()),
        }
    }

    /// Bounds each further wait for the peer: during the hand-shake it is shorter.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        Ok(set_socket_timeout(&self.socket, Timeout::Recv, Some(patience.unwrap_or(STALL_MAX)))?)
    }
}
