//! What a program does itself for the manager, by a thread of the library in it: hints, because GPFS follows those of one
//! file for each process only, and reads that are to be charged to the program. Each call is an [order](impresario_ring::order) with the program's own open file; what came of
//! it is known as for a call of our own. A program that is stopped, or does not answer for other reasons, is asked no
//! more.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_ring::order::{self, ANSWER_BYTES, Answer, Task};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// A program answers within this time; until then a worker waits, as for a file system.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The way to one program's thread that gives hints.
#[derive(Debug, Default)]
pub struct Inside {
    socket: Mutex<Option<Arc<OwnedFd>>>,
    /// One order at a time.
    turn: Mutex<()>,
    wanted: AtomicBool,
    came: Condvar,
    /// It was waited for once.
    awaited: AtomicBool,
}

impl Inside {
    /// Whether the program can be asked.
    pub fn is_there(&self) -> bool {
        self.socket.lock().is_some()
    }

    /// Whether it could not be asked when it should have been.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed) && !self.is_there()
    }

    pub(in crate::backend) fn want(&self) {
        self.wanted.store(true, Relaxed);
    }

    /// Whether the program can be asked, now or, when that is wanted for the first time, within `most`.
    pub(in crate::backend) fn comes_within(&self, most: Duration) -> bool {
        let mut socket = self.socket.lock();
        if socket.is_none() {
            self.want();
            let end = Instant::now() + most;
            let waits = !self.awaited.swap(true, Relaxed);
            while waits && socket.is_none() {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                socket = self.came.wait_timeout(socket, left).0;
            }
        }
        socket.is_some()
    }

    /// The program's thread is at the other end of this socket.
    pub fn connected(&self, socket: OwnedFd) {
        self.wanted.store(false, Relaxed);
        *self.socket.lock() = Some(Arc::new(socket));
        self.came.notify_all();
    }

    /// The program is asked no more; its thread notices. The connection, if no one else has it any more.
    pub fn hang_up(&self) -> Option<OwnedFd> {
        let socket = self.socket.lock().take()?;
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        Arc::into_inner(socket)
    }

    /// What the program's thread answers; it is asked no more when it does not answer in time.
    pub(in crate::backend) fn ask(&self, fd: BorrowedFd<'_>, task: &Task) -> io::Result<u32> {
        let _turn = self.turn.lock();
        let socket = self.socket.lock().clone().ok_or(io::ErrorKind::NotConnected)?;
        match ask(&socket, fd, task) {
            Ok(Answer { errno: 0, accepted }) => Ok(accepted),
            Ok(Answer { errno, .. }) => Err(io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(libc::EIO))),
            Err(e) => {
                tracing::debug!(error = %e, "a program gives no hints itself any more");
                drop(self.hang_up());
                Err(e)
            }
        }
    }
}

fn ask(socket: &OwnedFd, fd: BorrowedFd<'_>, task: &Task) -> io::Result<Answer> {
    let order = order::encode(task);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let file = [fd];
    control.push(SendAncillaryMessage::ScmRights(&file));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(order.as_bytes())], &mut control, flags)?;
    let end = Instant::now() + ANSWER_WITHIN;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Err(rustix::io::Errno::INTR) => continue,
            ready => ready?,
        };
        let mut bytes = [0; ANSWER_BYTES + 1];
        return match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((len, _)) => Answer::decode(bytes.get(..len).unwrap_or(&[])).map_err(io::Error::other),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(e) => Err(e.into()),
        };
    }
}
