//! Connections to the agent: one for each thread that is asking just now, kept for the next. They are high numbers of the
//! process, closed on exec and hidden from the program as far as it goes through the C library.
//!
//! Every wait is the agent's, which answers within the cluster's time; when it ends, its connections do.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

use super::protocol::{Op, REPLY_BYTES, Reply, Request};
use crate::own::{Own, close_raw};

/// Connections of a process: threads that ask at the same time; further ones wait for a turn.
const CHANNELS: usize = 32;

pub(super) struct Channels {
    socket: OnceLock<Vec<u8>>,
    places: [Channel; CHANNELS],
    /// The process and user whose connections these are, as [`who`] says it.
    owner: AtomicU64,
}

/// This process and its user.
fn who() -> u64 {
    let pid = rustix::process::getpid().as_raw_nonzero().get() as u32;
    u64::from(pid) << 32 | u64::from(rustix::process::geteuid().as_raw())
}

struct Channel {
    own: Own,
    is_busy: AtomicBool,
}

/// What the agent replied.
#[derive(Debug)]
pub struct Got {
    /// The result, not negative.
    pub result: i64,
    /// Bytes of data.
    pub len: usize,
    /// The path leads out of the cluster, to that in the data.
    pub is_outside: bool,
    /// The descriptor of an opened file.
    pub fd: Option<OwnedFd>,
}

/// A connection for one call: of one that waits for other programs, of a process that is not the one that began here: a child of `vfork`, which runs in its
/// parent's memory, or of a system call that no handler of `fork` saw, which has a copy of it. Or of a process that became
/// another user, for the agent to refuse.
struct Stranger(Own);

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Frees a connection for the next, also when its user is unwound.
struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

impl Channels {
    pub(super) const fn new() -> Channels {
        Channels {
            socket: OnceLock::new(),
            places: [const { Channel { own: Own::new(), is_busy: AtomicBool::new(false) } }; CHANNELS],
            owner: AtomicU64::new(0),
        }
    }

    pub(super) fn start(&self, socket: Vec<u8>) {
        let _ = self.socket.set(socket);
        self.owner.store(who(), Release);
    }

    pub(super) fn own(&self, fd: i32) -> bool {
        self.places.iter().any(|place| place.own.is(fd))
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = i32> {
        self.places.iter().filter_map(|place| place.own.number())
    }

    pub(super) fn step_aside(&self, fd: i32) {
        self.places.iter().for_each(|place| place.own.step_aside(fd));
    }

    pub(super) fn forked(&self) {
        for place in &self.places {
            place.own.forget_users();
            place.own.close();
            place.is_busy.store(false, Release);
        }
        self.owner.store(who(), Release);
    }

    fn free(&self) -> (&Own, Busy<'_>) {
        let mut turns = 0u32;
        loop {
            for place in &self.places {
                if place.is_busy.compare_exchange(false, true, Acquire, std::sync::atomic::Ordering::Relaxed).is_ok() {
                    return (&place.own, Busy(&place.is_busy));
                }
            }
            // Each of the others ends within the agent's time.
            turns += 1;
            if turns < 100 {
                rustix::thread::sched_yield();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    pub(super) fn call(
        &self,
        request: Request,
        path: &[u8],
        other: &[u8],
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Got, i32> {
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(|_| libc::EINVAL);
        let request =
            Request { path_len: len(path)?, other_len: len(other)?, data_len: len(data)?, room: len(into)?, ..request };
        let head = request.encode();
        let stranger = Stranger(Own::new());
        let (own, _busy) = if who() == self.owner.load(Acquire) && !request.may_wait() {
            let (own, busy) = self.free();
            (own, Some(busy))
        } else {
            (&stranger.0, None)
        };
        // The program may have closed the connection behind the C library's back: then a new one is made.
        let mut parts = [IoSlice::new(&head), IoSlice::new(path), IoSlice::new(other), IoSlice::new(data)];
        let done = match own.with(|fd| exchange(fd, &request, &mut parts, into)) {
            Some(done) => done,
            None => {
                own.put(self.connect()?).ok_or(libc::EMFILE)?;
                own.with(|fd| exchange(fd, &request, &mut parts, into)).ok_or(libc::EIO)?
            }
        };
        let (reply, fd) = done.inspect_err(|_| own.close())?;
        if reply.result < 0 {
            return Err(i32::try_from(-reply.result).unwrap_or(libc::EIO));
        }
        if request.op == Op::Open && !reply.is_outside && fd.is_none() {
            // The agent has opened it, and the process has no number left.
            return Err(libc::EMFILE);
        }
        Ok(Got { result: reply.result, len: reply.data_len as usize, is_outside: reply.is_outside, fd })
    }

    fn connect(&self) -> Result<OwnedFd, i32> {
        let path = self.socket.get().ok_or(libc::EIO)?;
        let address = SocketAddrUnix::new(&path[..]).map_err(|_| libc::EIO)?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(Errno::raw_os_error)?;
        // A signal may end the wait for a place in the agent's queue.
        let refused = match rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            // The agent serves its own user alone, so another one's is none, whatever the folder of a run that is over
            // has become.
            Ok(()) if peer_uid(&socket) == Some(rustix::process::geteuid().as_raw()) => return Ok(socket),
            Ok(()) | Err(Errno::ACCESS | Errno::PERM) => libc::EACCES,
            // The run is over.
            Err(_) => libc::EIO,
        };
        close_raw(socket);
        Err(refused)
    }
}

/// The user of the process at the other end of a Unix socket; `None`: the kernel does not say.
pub fn peer_uid(socket: impl AsFd) -> Option<u32> {
    peer(socket).map(|peer| peer.uid)
}

/// The number of the process at the other end of a Unix socket; `None`: the kernel does not say.
pub fn peer_pid(socket: impl AsFd) -> Option<u32> {
    peer(socket).and_then(|peer| u32::try_from(peer.pid).ok()).filter(|pid| *pid != 0)
}

fn peer(socket: impl AsFd) -> Option<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of a structure of numbers.
    let result = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(socket.as_fd().as_raw_fd(), level, option, (&raw mut peer).cast(), &raw mut len)
    };
    // Of a socket without a peer it gives -1.
    (result == 0 && len as usize == size_of::<libc::ucred>() && peer.uid != u32::MAX).then_some(peer)
}

/// One request and its reply.
fn exchange(
    fd: BorrowedFd<'_>,
    request: &Request,
    mut parts: &mut [IoSlice<'_>],
    into: &mut [u8],
) -> Result<(Reply, Option<OwnedFd>), i32> {
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match rustix::net::sendmsg(fd, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
            Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
            Err(Errno::INTR) => {}
            Err(_) => return Err(libc::EIO),
        }
    }
    let mut head = [0; REPLY_BYTES];
    let mut opened = None;
    let mut got = 0;
    let mut len = REPLY_BYTES;
    let mut may_end = request.may_wait();
    while got < len {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (head_rest, data_rest) = (&mut head[got.min(REPLY_BYTES)..], &mut into[got.saturating_sub(REPLY_BYTES)..]);
        let mut places = [IoSliceMut::new(head_rest), IoSliceMut::new(data_rest)];
        match rustix::net::recvmsg(fd, &mut places, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes > 0 => got += message.bytes,
            // The kernel goes on by itself where the signal's handler was installed so.
            Err(Errno::INTR) => {
                if std::mem::take(&mut may_end) {
                    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
                }
                continue;
            }
            _ => return Err(libc::EIO),
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fds.for_each(|fd| {
                    if let Some(before) = opened.replace(fd) {
                        close_raw(before);
                    }
                });
            }
        }
        if got >= REPLY_BYTES {
            let reply = Reply::decode(&head);
            if reply.data_len as usize > into.len() {
                return Err(libc::EIO);
            }
            len = REPLY_BYTES + reply.data_len as usize;
        }
    }
    Ok((Reply::decode(&head), opened))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    #[test]
    fn the_peer_of_a_connection_is_known() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&ours), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(peer_uid(UnixDatagram::unbound().unwrap()), None, "without a peer");
        assert_eq!(peer_uid(std::fs::File::open("/dev/null").unwrap()), None, "no socket");
    }

    /// Only root can be another user.
    #[test]
    fn an_agent_of_another_user_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let channels = Channels::new();
        use std::os::unix::ffi::OsStrExt;
        channels.start(path.as_os_str().as_bytes().to_vec());
        let _listener = UnixListener::bind(&path).unwrap();
        channels.connect().unwrap();
        if !impresario_testing::require("root") {
            return;
        }
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        // A thread of its own becomes another user, as system calls alone do it.
        let refused = std::thread::spawn(move || {
            // SAFETY: changes the ids of this thread only.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
            channels.connect().map(drop)
        });
        assert_eq!(refused.join().unwrap(), Err(libc::EACCES));
    }
}
