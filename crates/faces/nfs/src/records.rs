//! Records of calls out of a stream of bytes (record marking; RFC 5531, 11).
//!
//! A record comes in fragments, each after its length. Space is taken as bytes come, not as lengths promise them, and from
//! the server's budget; a record that is too long, or in too many fragments, ends its connection.

use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::budget::{Budget, Reservation};
use std::sync::Arc;

/// Space for small records, bytes; longer ones are received in place.
const BUFFER_BYTES: usize = 32 << 10;
/// What a record's space grows by at least, bytes.
const STEP_BYTES: usize = 64 << 10;
/// Fragments of one record at most.
const FRAGMENTS_MAX: u32 = 256;

/// What came of receiving.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Some bytes.
    Bytes,
    /// Nothing at present.
    Nothing,
    /// The peer has closed.
    End,
}

/// Why a stream makes no sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadStream {
    /// Of this length, bytes.
    #[error("a record of {0} bytes or more is too long")]
    TooLong(u64),
    /// In too many fragments.
    #[error("a record comes in more than {FRAGMENTS_MAX} fragments")]
    TooManyFragments,
    /// The connection failed.
    #[error("{0}")]
    Broken(Errno),
}

/// A whole record and the memory that it holds.
#[derive(Debug)]
pub struct Record {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// What they take of the budget.
    pub held: Reservation,
}

/// The receiving side of a connection.
pub struct Records {
    record_max_bytes: usize,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    /// The record so far.
    record: Vec<u8>,
    held: Reservation,
    /// Of the current fragment.
    missing_bytes: usize,
    last_fragment: bool,
    fragments: u32,
    /// A fragment's length has come, its bytes have not all.
    in_fragment: bool,
    /// There was no memory for what has come.
    short: bool,
}

impl Records {
    /// Of one connection; no record is longer than `record_max_bytes`.
    pub fn new(record_max_bytes: usize, budget: Arc<Budget>) -> Records {
        Records {
            record_max_bytes,
            buffer: vec![0; BUFFER_BYTES].into(),
            at: 0,
            end: 0,
            held: Reservation::nothing(budget),
            record: Vec::new(),
            missing_bytes: 0,
            last_fragment: false,
            fragments: 0,
            in_fragment: false,
            short: false,
        }
    }

    /// True when bytes have come that there was no memory for; taking again may find some.
    pub fn is_short(&self) -> bool {
        self.short
    }

    /// True when a record has begun to come.
    pub fn has_begun(&self) -> bool {
        self.in_fragment || self.fragments > 0 || self.at < self.end
    }

    /// Receives what is there, without waiting.
    pub fn receive(&mut self, socket: impl AsFd) -> Result<Received, BadStream> {
        let got = if self.in_fragment && self.at == self.end && self.missing_bytes >= BUFFER_BYTES / 2 {
            if self.record.len() == self.record.capacity() && !self.make_space() {
                return Ok(Received::Nothing);
            }
            self.receive_in_place(&socket)
        } else {
            if self.at == self.end {
                (self.at, self.end) = (0, 0);
            } else if self.end == self.buffer.len() {
                self.buffer.copy_within(self.at..self.end, 0);
                (self.at, self.end) = (0, self.end - self.at);
                if self.end == self.buffer.len() {
                    // Full of what could not be taken yet.
                    return Ok(Received::Nothing);
                }
            }
            rustix::io::read(&socket, &mut self.buffer[self.end..]).inspect(|got| self.end += got)
        };
        match got {
            Ok(0) => Ok(Received::End),
            Ok(_) => Ok(Received::Bytes),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
            // Many programs end so, with an answer that they do not wait for.
            Err(Errno::CONNRESET | Errno::PIPE) => Ok(Received::End),
            Err(error) => Err(BadStream::Broken(error)),
        }
    }

    fn receive_in_place(&mut self, socket: &impl AsFd) -> Result<usize, Errno> {
        let before = self.record.len();
        let space = (self.record.capacity() - before).min(self.missing_bytes);
        // Into the space behind the record; no more than belongs to the fragment.
        let (got, _) = rustix::io::read(socket, &mut self.record.spare_capacity_mut()[..space])?;
        let got = got.len();
        // SAFETY: the call has written that many bytes behind the record's end, within its capacity.
        unsafe { self.record.set_len(before + got) };
        self.missing_bytes -= got;
        Ok(got)
    }

    /// More space for the record: as much as it has, but no more than the fragment needs.
    fn make_space(&mut self) -> bool {
        let more = self.missing_bytes.min(self.record.capacity().max(STEP_BYTES));
        self.short = !self.held.grow(more as u64);
        if !self.short {
            self.record.reserve_exact(more);
        }
        !self.short
    }

    /// The next whole record, if it has come. `Ok(None)` also where there is no memory for it at present.
    pub fn take(&mut self) -> Result<Option<Record>, BadStream> {
        loop {
            if !self.in_fragment {
                let Some(mark) = self.buffer[self.at..self.end].first_chunk::<4>() else { return Ok(None) };
                let mark = u32::from_be_bytes(*mark);
                self.at += 4;
                let len = (mark & 0x7fff_ffff) as usize;
                self.fragments += 1;
                if self.record.len() + len > self.record_max_bytes {
                    return Err(BadStream::TooLong((self.record.len() + len) as u64));
                }
                if self.fragments > FRAGMENTS_MAX {
                    return Err(BadStream::TooManyFragments);
                }
                (self.in_fragment, self.missing_bytes, self.last_fragment) = (true, len, mark >> 31 == 1);
            }
            let here = (self.end - self.at).min(self.missing_bytes);
            // Also where only the socket has the rest, so that a shortage ends.
            while self.record.capacity() - self.record.len() < here || self.short && here == 0 {
                if !self.make_space() {
                    return Ok(None);
                }
            }
            self.record.extend_from_slice(&self.buffer[self.at..self.at + here]);
            self.at += here;
            self.missing_bytes -= here;
            if self.missing_bytes > 0 {
                return Ok(None);
            }
            self.in_fragment = false;
            if self.last_fragment {
                self.fragments = 0;
                let bytes = std::mem::take(&mut self.record);
                let held = self.held.take();
                return Ok(Some(Record { bytes, held }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::budget;
    use proptest::prelude::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const MAX: usize = 200_000;

    fn marked(bytes: &[u8], cuts: &[usize]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut from = 0;
        for cut in cuts.iter().map(|cut| cut % (bytes.len() + 1)).filter(|cut| *cut > 0) {
            if cut > from {
                out.extend(((cut - from) as u32).to_be_bytes());
                out.extend(&bytes[from..cut]);
                from = cut;
            }
        }
        out.extend(((bytes.len() - from) as u32 | 1 << 31).to_be_bytes());
        out.extend(&bytes[from..]);
        out
    }

    fn receive_all(stream: &[u8], budget: &Arc<Budget>, chunk: usize) -> Result<Vec<Vec<u8>>, BadStream> {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let mut records = Records::new(MAX, budget.clone());
        let (mut all, mut sent) = (Vec::new(), 0);
        loop {
            if sent < stream.len() {
                let to = (sent + chunk).min(stream.len());
                sent += here.write(&stream[sent..to]).unwrap_or(0);
            }
            let received = records.receive(&there)?;
            while let Some(record) = records.take()? {
                assert!(record.held.bytes() >= record.bytes.len() as u64);
                all.push(record.bytes);
            }
            if sent == stream.len() && received == Received::Nothing {
                return Ok(all);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn records_come_out_as_they_went_in(
            lens in proptest::collection::vec(0usize..150_000, 1..4),
            cuts in proptest::collection::vec(any::<usize>(), 0..5),
            chunk in 1usize..100_000,
        ) {
            let sent: Vec<Vec<u8>> = lens.iter().map(|len| (0..*len).map(|n| (n * 7 + len) as u8).collect()).collect();
            let stream: Vec<u8> = sent.iter().flat_map(|bytes| marked(bytes, &cuts)).collect();
            let budget = budget(1 << 30);
            prop_assert_eq!(receive_all(&stream, &budget, chunk.max(stream.len() / 500)).unwrap(), sent);
            prop_assert_eq!(budget.lock().usage_bytes().0, 0);
        }

        #[test]
        fn any_bytes_end_in_records_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = receive_all(&bytes, &budget(1 << 20), 300);
        }
    }

    #[test]
    fn what_is_too_long_or_in_crumbs_is_refused_before_it_comes() {
        let budget = budget(1 << 20);
        let long = ((MAX + 1) as u32 | 1 << 31).to_be_bytes();
        assert_eq!(receive_all(&long, &budget, 4), Err(BadStream::TooLong(MAX as u64 + 1)));
        let crumbs = [0u8; 4 * (FRAGMENTS_MAX as usize + 1)];
        assert_eq!(receive_all(&crumbs, &budget, 4096), Err(BadStream::TooManyFragments));
    }

    /// A length alone takes no space.
    #[test]
    fn space_is_taken_when_bytes_come() {
        let budget = budget(1 << 20);
        let (mut here, there) = UnixStream::pair().unwrap();
        there.set_nonblocking(true).unwrap();
        let mut records = Records::new(MAX, budget.clone());
        here.write_all(&(MAX as u32 | 1 << 31).to_be_bytes()).unwrap();
        assert_eq!(records.receive(&there), Ok(Received::Bytes));
        assert!(records.take().unwrap().is_none() && records.has_begun());
        assert_eq!(budget.lock().usage_bytes().0, 0);
        here.write_all(&[1; 1000]).unwrap();
        assert_eq!(records.receive(&there), Ok(Received::Bytes));
        assert!(records.take().unwrap().is_none());
        assert!((1000..=STEP_BYTES as u64).contains(&budget.lock().usage_bytes().0));
    }

    #[test]
    fn without_memory_it_waits() {
        let budget = budget(1000);
        let mut other = Reservation::nothing(budget.clone());
        assert!(other.grow(2000));
        let (mut here, there) = UnixStream::pair().unwrap();
        there.set_nonblocking(true).unwrap();
        let mut records = Records::new(MAX, budget.clone());
        here.write_all(&marked(&[5; 40], &[])).unwrap();
        assert_eq!(records.receive(&there), Ok(Received::Bytes));
        assert!(records.take().unwrap().is_none() && records.is_short());
        drop(other);
        assert_eq!(records.take().unwrap().unwrap().bytes, [5; 40]);
        assert!(!records.is_short());
    }
}
