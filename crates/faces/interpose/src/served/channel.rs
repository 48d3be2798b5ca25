//! Connections to the agent: one for each thread that is asking just now, kept for the next. They are high numbers of the
//! process, closed on exec and hidden from the program as far as it goes through the C library.
//!
//! Every wait is the agent's, which answers within the cluster's time; when it ends, its connections do. A signal handler may
//! leave a call by a jump (`siglongjmp`), after which its connection is of no use: the thread's next call gives it up.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};
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
/// How often a call looks for a connection that is free, and between how many of these looks it only yields: about a second.
const LOOKS: u32 = 5000;
const YIELDS: u32 = 100;
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// How much longer it looks when the process has no number left for one more connection.
const LAST_LOOKS: u32 = 60 * LOOKS;
/// Less than what the kernel puts on the stack for a signal handler, bytes.
const HANDLER_FRAME_MIN: usize = 512;
/// How much of one stack a call may be above another one at most for that to be said of them, bytes: other stacks are
/// mostly further away.
const SAME_STACK_MAX: usize = 1 << 20;

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
    /// Where on its stack the call is that uses this; 0: it is free.
    frame: AtomicUsize,
    /// The thread of that call; 0: not known.
    thread: AtomicUsize,
}

/// Tells this thread from the others of the process. One that begins when another one has ended may get the number of that.
fn this_thread() -> usize {
    // SAFETY: the address of this thread's errno; nothing is read.
    unsafe { libc::__errno_location() }.addr()
}

/// The stack for signal handlers on which this thread runs just now.
fn handler_stack() -> Option<Range<usize>> {
    let mut stack = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: changes nothing, and the kernel writes one structure.
    let result = unsafe { libc::sigaltstack(std::ptr::null(), &raw mut stack) };
    let begin = stack.ss_sp.addr();
    (result == 0 && stack.ss_flags & libc::SS_ONSTACK != 0).then(|| begin..begin.saturating_add(stack.ss_size))
}

/// Whether a call of this thread, at `frame` on its stack, is over though it has not returned: a signal handler has left it by
/// a jump. Then this one, at `here`, is not below it, as that of a handler is in the middle of a call. Between two stacks
/// nothing is known.
fn was_left(frame: usize, here: usize) -> bool {
    here.saturating_add(HANDLER_FRAME_MIN) >= frame
        && here.saturating_sub(frame) <= SAME_STACK_MAX
        && handler_stack().is_none_or(|stack| stack.contains(&frame))
}

impl Channel {
    const fn new() -> Channel {
        Channel { own: Own::new(), frame: AtomicUsize::new(0), thread: AtomicUsize::new(0) }
    }

    /// Takes it for a call of `thread` at `here`, if it is free or that thread's own from a call that was left. Signal handlers
    /// may come between any two steps and make calls: such a call is below `here`.
    fn take(&self, thread: usize, here: usize) -> bool {
        if self.frame.compare_exchange(0, here, Acquire, Relaxed).is_ok() {
            self.thread.store(thread, Relaxed);
            return true;
        }
        let frame = self.frame.load(Relaxed);
        let may_take = self.thread.load(Relaxed) == thread && frame != 0 && was_left(frame, here);
        if !may_take || self.frame.compare_exchange(frame, here, Acquire, Relaxed).is_err() {
            return false;
        }
        // The reply to that call may be under way yet.
        self.own.forget_users();
        self.own.close();
        true
    }

    fn free(&self) {
        self.thread.store(0, Relaxed);
        self.frame.store(0, Release);
    }
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

/// A connection for one call: one that waits for other programs, or for which none of the others became free. Or one of a
/// process that is not the one that began here: a child of `vfork`, which runs in its parent's memory, or of a system call that
/// no handler of `fork` saw, which has a copy of it. Or of a process that became another user, for the agent to refuse.
struct Stranger(Own);

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Frees a connection for the next, also when its user is unwound.
struct Busy<'a>(&'a Channel);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// Why there is no reply.
enum Lost {
    /// The agent had given up the connection before it got all of the request, and will not do it.
    Unasked,
    /// The call may have been done.
    Unanswered,
}

impl Channels {
    pub(super) const fn new() -> Channels {
        Channels { socket: OnceLock::new(), places: [const { Channel::new() }; CHANNELS], owner: AtomicU64::new(0) }
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
            place.free();
        }
        self.owner.store(who(), Release);
    }

    /// One that is free, or becomes so within `looks`.
    fn free(&self, here: usize, looks: u32) -> Option<Busy<'_>> {
        let thread = this_thread();
        for look in 0..looks {
            if let Some(place) = self.places.iter().find(|place| place.take(thread, here)) {
                return Some(Busy(place));
            }
            // Each of the others ends within the agent's time, but for those that a jump has left.
            if look < YIELDS {
                rustix::thread::sched_yield();
            } else {
                std::thread::sleep(LOOK_EVERY);
            }
        }
        None
    }

    /// One of the process's connections for the call at `here`, or `None`, and `stranger` is one for this call.
    fn channel(&self, here: usize, stranger: &Own) -> Result<Option<Busy<'_>>, i32> {
        let free = self.free(here, LOOKS);
        if free.is_some() {
            return Ok(free);
        }
        match self.connect().and_then(|fd| stranger.put(fd).ok_or(libc::EMFILE)) {
            Ok(()) => Ok(None),
            Err(libc::EMFILE | libc::ENFILE) => self.free(here, LAST_LOOKS).ok_or(libc::EMFILE).map(Some),
            Err(errno) => Err(errno),
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
        let parts = [&head[..], path, other, data];
        let stranger = Stranger(Own::new());
        let is_shared = who() == self.owner.load(Acquire) && !request.may_wait();
        let here = (&raw const stranger).addr();
        let busy = if is_shared { self.channel(here, &stranger.0)? } else { None };
        let own = busy.as_ref().map_or(&stranger.0, |busy| &busy.0.own);
        let mut done = own.with(|fd| exchange(fd, &request, parts, into));
        // The program may have closed the connection behind the C library's back, or the agent while it was idle: then a new one
        // is made.
        if matches!(done, None | Some(Err(Lost::Unasked))) {
            own.put(self.connect()?).ok_or(libc::EMFILE)?;
            done = own.with(|fd| exchange(fd, &request, parts, into));
        }
        let Some(Ok((reply, fd))) = done else {
            own.close();
            return Err(libc::EIO);
        };
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
    parts: [&[u8]; 4],
    into: &mut [u8],
) -> Result<(Reply, Option<OwnedFd>), Lost> {
    let mut parts = &mut parts.map(IoSlice::new)[..];
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match rustix::net::sendmsg(fd, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
            Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
            Err(Errno::INTR) => {}
            // It does nothing before it has the whole request.
            Err(_) => return Err(Lost::Unasked),
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
            _ => return Err(Lost::Unanswered),
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
                return Err(Lost::Unanswered);
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
