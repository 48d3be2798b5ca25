//! Reads and writes through io_uring, by memory that is registered with the kernel.
//!
//! The registered memory is one region, divided into pieces: its pages are pinned once, not for every transfer. A long
//! call has several pieces under way at once. One thread takes completions from the kernel; each call waits for its own
//! pieces. A call that finds no free piece does not wait for one: its caller goes on with plain system calls.
//!
//! The kernel never has memory of a caller's, so a call may leave a read that does not come back (a mounted file system
//! whose server is gone): the piece stays taken until it does. A write is never left: it could still change the file
//! after its caller was told that it failed.
//!
//! Entries name files by descriptors. Where the kernel does not take an entry in time, no call ever gives it another one: its
//! descriptor may be another file's by then.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, RwLock};
use io_uring::{IoUring, opcode, squeue, types};

use super::region::Region;
use crate::{Errno, Result};

/// Length of a piece, bytes: a multiple of every alignment that direct transfers need.
pub(super) const PIECE_BYTES: usize = 256 << 10;
/// Pieces, where the limit of locked memory (`ulimit -l`) allows them.
const PIECES_MAX: usize = 64;
/// With fewer a ring is not worth having.
const PIECES_MIN: usize = 4;
/// Pieces of one call that are under way at a time.
const AT_ONCE_MAX: usize = 8;
/// What the entry that ends the reaping thread is called.
const STOP: u64 = u64::MAX;
/// For how long the kernel may refuse to take entries, for want of memory.
const SUBMIT_MAX: Duration = Duration::from_secs(10);
const ENTRIES: u32 = PIECES_MAX as u32 * 2;
/// `IORING_ENTER_GETEVENTS`.
const GET_EVENTS: u32 = 1;
const PAUSE: Duration = Duration::from_millis(1);

/// A ring and its memory.
pub(super) struct Ring {
    shared: Arc<Shared>,
    reaper: Option<JoinHandle<()>>,
    /// How long a read may take.
    patience: Duration,
}

struct Shared {
    ring: IoUring,
    region: Region,
    /// Held for reading while entries are given to the kernel, and before `state`.
    submitting: RwLock<()>,
    /// Also held while entries are put into the submission queue.
    state: Mutex<State>,
    /// One for each piece.
    ended: Vec<Condvar>,
    /// The kernel is given no entries any more; changed with `state` locked.
    is_broken: AtomicBool,
    /// For how long the kernel may refuse to take entries.
    submit_max: Duration,
    transfers: AtomicU64,
    unserved: AtomicU64,
    left: AtomicU64,
}

struct State {
    pieces: Vec<Piece>,
    free: Vec<usize>,
    /// The last entries of the submission queue, by what they are called: at least all that the kernel has not taken.
    queued: VecDeque<u64>,
}

/// What a piece of the memory is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Piece {
    Free,
    /// A call's.
    Held,
    /// The kernel's.
    UnderWay {
        is_awaited: bool,
    },
    /// A call's again, with what the kernel said.
    Ended(i32),
    /// The kernel's, and no call's.
    Left,
}

/// What a ring has done, for `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingStatus {
    /// Pieces of its memory.
    pub pieces: usize,
    /// Pieces that nothing uses.
    pub free_pieces: usize,
    /// Length of a piece, bytes.
    pub piece_bytes: usize,
    /// Transfers of a piece that have ended.
    pub transfers: u64,
    /// Calls that found no free piece for all of their bytes.
    pub unserved: u64,
    /// Reads that were left because they did not end in time.
    pub left: u64,
}

/// A transfer of one piece; the piece is given back when this is dropped.
struct Transfer<'a> {
    shared: &'a Shared,
    piece: usize,
    /// Where the bytes are in the piece.
    from: usize,
    len: usize,
    /// Where they are in the file.
    at: u64,
}

impl Ring {
    /// A ring whose reads may take as long as `patience`; why the kernel gives none.
    pub(super) fn start(patience: Duration) -> std::io::Result<Ring> {
        // Room for every piece and for the entry that ends the thread.
        Ring::over(IoUring::new(ENTRIES)?, patience, SUBMIT_MAX)
    }

    fn over(ring: IoUring, patience: Duration, submit_max: Duration) -> std::io::Result<Ring> {
        let (region, pieces) = register(&ring)?;
        let state = State { pieces: vec![Piece::Free; pieces], free: (0..pieces).collect(), queued: VecDeque::new() };
        let shared = Arc::new(Shared {
            ring,
            region,
            submitting: RwLock::new(()),
            state: Mutex::new(state),
            ended: (0..pieces).map(|_| Condvar::new()).collect(),
            is_broken: AtomicBool::new(false),
            submit_max,
            transfers: AtomicU64::new(0),
            unserved: AtomicU64::new(0),
            left: AtomicU64::new(0),
        });
        let reaper = std::thread::Builder::new().name("tree ring".into()).spawn({
            let shared = shared.clone();
            move || shared.reap()
        })?;
        Ok(Ring { shared, reaper: Some(reaper), patience })
    }

    pub(super) fn status(&self) -> RingStatus {
        let (pieces, free_pieces) = {
            let state = self.shared.state.lock();
            (state.pieces.len(), state.free.len())
        };
        RingStatus {
            pieces,
            free_pieces,
            piece_bytes: PIECE_BYTES,
            transfers: self.shared.transfers.load(Relaxed),
            unserved: self.shared.unserved.load(Relaxed),
            left: self.shared.left.load(Relaxed),
        }
    }

    /// Reads into `into` from `offset` on; every transfer begins at a multiple of `granule` and has such a length. Gives
    /// the bytes that came, and whether those after them are still to be read, by other means. `EIO` where the file system
    /// does not answer in time.
    pub(super) fn read(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        into: &mut [u8],
        granule: usize,
    ) -> Result<(usize, bool)> {
        let (shared, granule) = (&*self.shared, granule as u64);
        let wanted_end = offset + into.len() as u64;
        let end = wanted_end.next_multiple_of(granule);
        let (mut next, mut came) = (offset - offset % granule, offset);
        let mut under_way: VecDeque<Transfer<'_>> = VecDeque::new();
        let deadline = Instant::now() + self.patience;
        loop {
            let mut begun = false;
            while next < end && under_way.len() < AT_ONCE_MAX {
                let Some(transfer) = shared.take(next, (end - next) as usize) else { break };
                next += transfer.len as u64;
                shared.begin(file, &transfer, false);
                under_way.push_back(transfer);
                begun = true;
            }
            if begun {
                shared.submit();
            }
            let Some(transfer) = under_way.pop_front() else {
                let is_left = came < wanted_end;
                shared.unserved.fetch_add(u64::from(is_left), Relaxed);
                return Ok(((came - offset) as usize, is_left));
            };
            let got = match shared.wait(&transfer, Some(deadline)) {
                Err(error) if is_cut_short(error) => return Ok(((came - offset) as usize, true)),
                got => got? as u64,
            };
            let to = (transfer.at + got).min(wanted_end);
            if came < to {
                let from = (came - transfer.at) as usize;
                let bytes = &transfer.bytes()[from..(to - transfer.at) as usize];
                into[(came - offset) as usize..(to - offset) as usize].copy_from_slice(bytes);
                came = to;
            }
            if got == 0 || !got.is_multiple_of(granule) {
                return Ok(((came - offset) as usize, false)); // the file's end
            }
            if got < transfer.len as u64 {
                // In the middle, or at an end that is a multiple: the next read tells.
                next = transfer.at + got;
                under_way.clear();
            }
        }
    }

    /// Writes from `offset` on; gives how many bytes are written. Where these are not all, the rest is still to be written,
    /// by other means.
    pub(super) fn write(&self, file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<usize> {
        let shared = &*self.shared;
        let (mut next, mut failed) = (0, None);
        let mut cut_short = None;
        let mut under_way: VecDeque<Transfer<'_>> = VecDeque::new();
        loop {
            let mut begun = false;
            while next < bytes.len() && failed.is_none() && cut_short.is_none() && under_way.len() < AT_ONCE_MAX {
                let Some(mut transfer) = shared.take(offset + next as u64, bytes.len() - next) else { break };
                let end = next + transfer.len;
                transfer.bytes_mut().copy_from_slice(&bytes[next..end]);
                next = end;
                shared.begin(file, &transfer, true);
                under_way.push_back(transfer);
                begun = true;
            }
            if begun {
                shared.submit();
            }
            let Some(mut transfer) = under_way.pop_front() else { break };
            match shared.wait(&transfer, None) {
                Ok(got) if got == transfer.len => {}
                Ok(0) => failed = failed.or(Some(Errno(libc::EIO))),
                Ok(got) => {
                    transfer.advance(got);
                    shared.begin(file, &transfer, true);
                    under_way.push_front(transfer);
                    shared.submit();
                }
                // Nothing of it happens any more, so its bytes, and those behind it, may be written again.
                Err(error) if is_cut_short(error) => cut_short = cut_short.or(Some((transfer.at - offset) as usize)),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let next = cut_short.unwrap_or(next);
        shared.unserved.fetch_add(u64::from(next < bytes.len() && failed.is_none()), Relaxed);
        failed.map_or(Ok(next), Err)
    }
}

impl Drop for Ring {
    /// Ends the thread. No call is under way any more; reads that were left end with the ring, or in memory that is theirs.
    fn drop(&mut self) {
        self.shared.queue(opcode::Nop::new().build(), STOP);
        self.shared.submit();
        if !self.shared.is_broken.load(Relaxed) {
            let _ = self.reaper.take().map(JoinHandle::join); // it has ended, whichever way
        }
    }
}

/// Whether a transfer ended so that its caller goes on by other means: the kernel cancels what a thread has submitted, for itself or
/// for others, when that thread ends. So do we with what the kernel does not take.
fn is_cut_short(error: Errno) -> bool {
    matches!(error.0, libc::EAGAIN | libc::EINTR | libc::ECANCELED)
}

/// Registers as much memory as the process may have locked; gives it with its number of pieces.
fn register(ring: &IoUring) -> std::io::Result<(Region, usize)> {
    let mut pieces = PIECES_MAX;
    loop {
        let region =
            Region::new(pieces * PIECE_BYTES).map_err(|Errno(errno)| std::io::Error::from_raw_os_error(errno))?;
        // SAFETY: the region is unmapped only after the ring is closed: it is the later field of what has both. The kernel
        // keeps the pages that it has pinned for what is still under way then.
        match unsafe { ring.submitter().register_buffers(&[region.as_iovec()]) } {
            Ok(()) => return Ok((region, pieces)),
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && pieces > PIECES_MIN => pieces /= 2,
            Err(error) => return Err(error),
        }
    }
}

impl Shared {
    /// A free piece, for at most so many bytes of the file from `at` on.
    fn take(&self, at: u64, len: usize) -> Option<Transfer<'_>> {
        if self.is_broken.load(Relaxed) {
            return None;
        }
        let mut state = self.state.lock();
        let piece = state.free.pop()?;
        state.pieces[piece] = Piece::Held;
        Some(Transfer { shared: self, piece, from: 0, len: len.min(PIECE_BYTES), at })
    }

    /// Gives a transfer to the kernel, which looks at it when it is [told](Shared::submit).
    fn begin(&self, file: BorrowedFd<'_>, transfer: &Transfer<'_>, writes: bool) {
        let file = types::Fd(file.as_raw_fd());
        let (start, len) = (self.region.as_iovec().iov_base.cast::<u8>(), transfer.len as u32);
        let start = start.wrapping_add(transfer.piece * PIECE_BYTES + transfer.from);
        let entry = match writes {
            false => opcode::ReadFixed::new(file, start, len, 0).offset(transfer.at).build(),
            true => opcode::WriteFixed::new(file, start, len, 0).offset(transfer.at).build(),
        };
        self.state.lock().pieces[transfer.piece] = Piece::UnderWay { is_awaited: false };
        self.queue(entry, transfer.piece as u64);
    }

    fn queue(&self, entry: squeue::Entry, called: u64) {
        let mut state = self.state.lock();
        if self.is_broken.load(Relaxed) {
            return self.cancel(&mut state, called);
        }
        // SAFETY: who puts entries into the queue holds the lock. What an entry says is valid until its completion: the
        // memory is the region's and the kernel's until then; the descriptor is its caller's until it is submitted, when the
        // kernel takes the file itself.
        let mut queue = unsafe { self.ring.submission_shared() };
        // SAFETY: as above.
        let pushed = unsafe { queue.push(&entry.user_data(called)) };
        // There is room for an entry of every piece, and for the last one.
        assert!(pushed.is_ok(), "the submission queue is full");
        state.queued.push_back(called);
        let taken = state.queued.len().saturating_sub(queue.len());
        state.queued.drain(..taken);
    }

    /// Tells the kernel of new entries; when this returns, it has taken those of the caller, or they are cancelled.
    fn submit(&self) {
        let until = Instant::now() + self.submit_max;
        loop {
            let submitted = {
                let _submitting = self.submitting.read();
                if self.is_broken.load(Relaxed) {
                    return;
                }
                self.ring.submit()
            };
            match submitted {
                Ok(_) if self.not_taken(&self.state.lock()) == 0 => return,
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if Instant::now() > until => return self.give_up(&error),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Gives the kernel nothing any more, and cancels what it has not taken.
    fn give_up(&self, error: &std::io::Error) {
        // No other thread's call takes entries from now on.
        let _alone = self.submitting.write();
        let mut state = self.state.lock();
        let count = self.not_taken(&state);
        if count == 0 || self.is_broken.swap(true, Relaxed) {
            return;
        }
        tracing::error!(%error, "io_uring takes no requests; reads and writes go on by system calls");
        let first = state.queued.len().saturating_sub(count);
        for called in state.queued.split_off(first) {
            self.cancel(&mut state, called);
        }
    }

    /// An entry that the kernel never sees ends as one that it has cancelled.
    fn cancel(&self, state: &mut State, called: u64) {
        if let Some(piece) = usize::try_from(called).ok().filter(|piece| *piece < state.pieces.len()) {
            self.end(state, piece, -libc::ECANCELED);
        }
    }

    /// Entries that the kernel has not taken.
    fn not_taken(&self, _state: &State) -> usize {
        // SAFETY: the lock is held, as for every use of this queue.
        unsafe { self.ring.submission_shared() }.len()
    }

    fn end(&self, state: &mut State, piece: usize, result: i32) {
        match state.pieces[piece] {
            Piece::UnderWay { is_awaited } => {
                state.pieces[piece] = Piece::Ended(result);
                self.transfers.fetch_add(1, Relaxed);
                if is_awaited {
                    self.ended[piece].notify_one();
                }
            }
            Piece::Left => state.release(piece),
            Piece::Free | Piece::Held | Piece::Ended(_) => {}
        }
    }

    /// Waits for the end of a transfer, at most until the deadline; gives its bytes.
    fn wait(&self, transfer: &Transfer<'_>, deadline: Option<Instant>) -> Result<usize> {
        let (piece, mut state) = (transfer.piece, self.state.lock());
        loop {
            if let Piece::Ended(result) = state.pieces[piece] {
                state.pieces[piece] = Piece::Held;
                return usize::try_from(result).map_err(|_| Errno(-result));
            }
            state.pieces[piece] = Piece::UnderWay { is_awaited: true };
            let ended = &self.ended[piece];
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => ended.wait(state),
                Some(Duration::ZERO) => {
                    self.left.fetch_add(1, Relaxed);
                    return Err(Errno(libc::EIO));
                }
                Some(left) => ended.wait_timeout(state, left).0,
            };
        }
    }

    /// The thread that takes completions.
    fn reap(&self) {
        loop {
            // SAFETY: it has no argument and gives the kernel no entries, which is for callers to do: they know whose descriptors are
            // still open.
            match unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, GET_EVENTS, None) } {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(_) => std::thread::sleep(PAUSE),
            }
            let mut stops = false;
            let mut state = self.state.lock();
            // SAFETY: this thread alone takes completions.
            for completion in unsafe { self.ring.completion_shared() } {
                let Ok(piece) = usize::try_from(completion.user_data()) else { continue };
                match piece < state.pieces.len() {
                    true => self.end(&mut state, piece, completion.result()),
                    false => stops |= completion.user_data() == STOP,
                }
            }
            drop(state);
            if stops {
                return;
            }
        }
    }
}

impl State {
    fn release(&mut self, piece: usize) {
        self.pieces[piece] = Piece::Free;
        self.free.push(piece);
    }
}

impl Transfer<'_> {
    fn range(&self) -> std::ops::Range<usize> {
        let start = self.piece * PIECE_BYTES + self.from;
        start..start + self.len
    }

    /// Its bytes, while they are the caller's.
    fn bytes(&self) -> &[u8] {
        // SAFETY: the piece is this transfer's alone, and the kernel's only between `begin` and the end of `wait`.
        unsafe { self.shared.region.bytes_of(self.range()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { self.shared.region.bytes_of(self.range()) }
    }

    /// So many of its bytes are done.
    fn advance(&mut self, done: usize) {
        self.from += done;
        self.len -= done;
        self.at += done as u64;
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        match state.pieces[self.piece] {
            Piece::UnderWay { .. } => state.pieces[self.piece] = Piece::Left,
            _ => state.release(self.piece),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    /// A ring, where this machine gives one.
    fn ring(patience: Duration) -> Option<Ring> {
        match Ring::start(patience) {
            Ok(ring) => Some(ring),
            Err(error) => {
                impresario_testing::skip("io_uring", error);
                None
            }
        }
    }

    fn odd_bytes(len: usize) -> Vec<u8> {
        (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    #[test]
    fn bytes_come_back_whatever_the_range() {
        let Some(ring) = ring(Duration::from_secs(60)) else { return };
        let file = tempfile::tempfile().unwrap();
        // More pieces than one call has under way, and no multiple of anything.
        let bytes = odd_bytes(AT_ONCE_MAX * 2 * PIECE_BYTES + 12_345);
        assert_eq!(ring.write(file.as_fd(), 0, &bytes), Ok(bytes.len()));
        for (offset, len) in [(0, bytes.len()), (1, 100), (4095, 4098), (PIECE_BYTES - 1, PIECE_BYTES + 2)] {
            for granule in [1, 4096] {
                let mut back = vec![0; len];
                assert_eq!(ring.read(file.as_fd(), offset as u64, &mut back, granule), Ok((len, false)));
                assert!(back == bytes[offset..offset + len], "{len} bytes from {offset} in units of {granule}");
            }
        }
        // Beyond the end.
        let mut back = vec![0; 1 << 20];
        assert_eq!(ring.read(file.as_fd(), bytes.len() as u64 - 5, &mut back, 4096), Ok((5, false)));
        assert_eq!(back[..5], bytes[bytes.len() - 5..]);
        assert_eq!(ring.read(file.as_fd(), 1 << 40, &mut back, 4096), Ok((0, false)));
        assert_eq!(ring.read(file.as_fd(), 7, &mut [], 4096).map(|read| read.0), Ok(0));
        // An end that is a multiple of the granule.
        file.set_len(8192).unwrap();
        assert_eq!(ring.read(file.as_fd(), 0, &mut back, 4096), Ok((8192, false)));
        let status = ring.status();
        assert_eq!((status.free_pieces, status.unserved), (status.pieces, 0));
    }

    #[test]
    fn calls_of_many_threads_do_not_mix() {
        let Some(ring) = ring(Duration::from_secs(60)) else { return };
        let file = tempfile::tempfile().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..16_u64 {
                let (ring, file) = (&ring, file.as_fd());
                scope.spawn(move || {
                    let bytes = vec![thread as u8 + 1; 3 * PIECE_BYTES + 100];
                    let at = thread * bytes.len() as u64;
                    (0..10).for_each(|_| write_and_read(ring, file, at, &bytes));
                });
            }
        });
        assert_eq!(ring.status().free_pieces, ring.status().pieces);
    }

    fn write_and_read(ring: &Ring, file: BorrowedFd<'_>, at: u64, bytes: &[u8]) {
        let written = ring.write(file, at, bytes).unwrap();
        rustix::io::pwrite(file, &bytes[written..], at + written as u64).unwrap();
        let mut back = vec![0; bytes.len()];
        let (got, _) = ring.read(file, at, &mut back, 1).unwrap();
        assert!(back[..got] == bytes[..got]);
    }

    /// As the kernel cancels what waits for a thread that ends.
    #[test]
    fn a_write_that_is_cancelled_says_how_far_it_came() {
        let Some(ring) = ring(Duration::from_secs(60)) else { return };
        let (reader, pipe) = std::io::pipe().unwrap();
        std::thread::scope(|scope| {
            // More than a pipe holds: the rest waits.
            let writer = scope.spawn(|| ring.write(pipe.as_fd(), 0, &odd_bytes(PIECE_BYTES)));
            let in_pipe = || rustix::io::ioctl_fionread(&reader).unwrap();
            impresario_testing::until("it ends", || {
                let is_under_way = |piece: &Piece| matches!(piece, Piece::UnderWay { .. });
                let under_way = ring.shared.state.lock().pieces.iter().position(is_under_way);
                if let Some(piece) = under_way.filter(|_| in_pipe() > 0) {
                    ring.shared.queue(opcode::AsyncCancel::new(piece as u64).build(), STOP - 1);
                    ring.shared.submit();
                }
                writer.is_finished()
            });
            let written = in_pipe() as usize;
            drop(reader); // as when the above fails, so that the writer ends
            assert_eq!(writer.join().unwrap(), Ok(written));
        });
        assert_eq!(ring.status().free_pieces, ring.status().pieces);
    }

    #[test]
    fn a_read_that_does_not_end_is_left_and_its_piece_comes_back_with_it() {
        let Some(ring) = ring(Duration::from_millis(30)) else { return };
        let (pipe, mut writer) = std::io::pipe().unwrap();
        let mut back = [0; 10];
        assert_eq!(ring.read(pipe.as_fd(), 0, &mut back, 1), Err(Errno(libc::EIO)));
        let status = ring.status();
        assert_eq!((status.left, status.free_pieces), (1, status.pieces - 1));
        writer.write_all(b"late").unwrap();
        impresario_testing::until("the piece is free", || ring.status().free_pieces == status.pieces);
        assert_eq!(back, [0; 10], "what came late is nobody's");
    }

    #[test]
    fn without_free_pieces_a_call_is_sent_elsewhere() {
        let Some(ring) = ring(Duration::from_millis(1)) else { return };
        let (pipe, _writer) = std::io::pipe().unwrap();
        let pieces = ring.status().pieces;
        for _ in 0..pieces {
            assert_eq!(ring.read(pipe.as_fd(), 0, &mut [0], 1), Err(Errno(libc::EIO)));
        }
        let file = tempfile::tempfile().unwrap();
        assert_eq!(ring.write(file.as_fd(), 0, b"bytes"), Ok(0));
        assert_eq!(ring.read(file.as_fd(), 0, &mut [0; 5], 1), Ok((0, true)));
        assert_eq!(ring.status().unserved, 2);
        // With all of that under way the ring can still be ended.
        drop(ring);
    }

    /// As where the kernel has no memory for entries, until its caller has given up and closed the file.
    #[test]
    fn what_the_kernel_did_not_take_in_time_it_never_does() {
        let Ok(refusing) = IoUring::builder().setup_r_disabled().build(ENTRIES) else {
            return impresario_testing::skip("io_uring", "it gives no ring that takes no entries yet");
        };
        let Ok(ring) = Ring::over(refusing, Duration::from_secs(60), Duration::from_millis(20)) else {
            return impresario_testing::skip("io_uring", "it gives no memory");
        };
        let folder = tempfile::tempdir().unwrap();
        let create = |name| std::fs::File::create(folder.path().join(name)).unwrap();
        let (mut number, another) = (std::os::fd::OwnedFd::from(create("file")), create("another"));
        let written = ring.write(number.as_fd(), 0, &odd_bytes(2 * PIECE_BYTES));
        let mut back = [0; 10];
        let read = ring.read(number.as_fd(), 0, &mut back, 1);
        // Closed, and its number given to another file.
        rustix::io::dup2(&another, &mut number).unwrap();
        ring.shared.ring.submitter().register_enable_rings().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(another.metadata().unwrap().len(), 0, "written by a call that was given up");
        assert_eq!((written, read), (Ok(0), Ok((0, true))), "callers go on by other means");
        assert_eq!(ring.status().free_pieces, ring.status().pieces);
    }

    #[test]
    fn errors_are_those_of_the_file_system() {
        let Some(ring) = ring(Duration::from_secs(60)) else { return };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, odd_bytes(3 * PIECE_BYTES)).unwrap();
        let reading = std::fs::File::open(&path).unwrap();
        assert_eq!(ring.write(reading.as_fd(), 0, &odd_bytes(3 * PIECE_BYTES)), Err(Errno(libc::EBADF)));
        let directory = std::fs::File::open(folder.path()).unwrap();
        assert!(ring.read(directory.as_fd(), 0, &mut [0; 10], 1).is_err());
        assert_eq!(ring.status().free_pieces, ring.status().pieces);
    }
}
