//! Connections to the agent: one for each thread that is asking just now, kept for the next. They are high numbers of the
//! process, closed on exec and hidden from the program as far as it goes through the C library.
//!
//! Every wait is the agent's, which answers within the cluster's time; when it ends, its connections do.
//!
//! A signal handler may leave a call by a jump (`siglongjmp`). Its connection is of no use then: a later call of the thread that
//! finds no other one free takes it. A lock that was waited for so is not waited for any more when the thread next asks. That
//! a call was left is told by where it is on the stack, which is wrong of programs that change stacks in a signal handler
//! (`swapcontext`, `SS_AUTODISARM`) and ask on both, when the other one is near: the call that goes on fails then (EIO), or waits
//! on for a reply that it does not get if the kernel restarted it.

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

/// Connections of a process: threads that ask at the same time; further ones wait for a turn. And those of calls that wait
/// for locks: further ones are not known to have been left.
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
/// Where no call is: the connection is that of one that was left, and is shut down.
const LEFT: usize = 1;

pub(super) struct Channels {
    socket: OnceLock<Vec<u8>>,
    places: [Channel; CHANNELS],
    /// Each made for one call that may wait for a lock, and closed with it.
    waiting: [Channel; CHANNELS],
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
    /// Where on its stack the call is that uses this, or [`LEFT`]; 0: it is free.
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

    /// Takes it for a call of `thread` at `here`, if it is free. Signal handlers may come between any two steps and make calls:
    /// such a call is below `here`.
    fn take(&self, thread: usize, here: usize) -> bool {
        let is_free = self.frame.compare_exchange(0, here, Acquire, Relaxed).is_ok();
        if is_free {
            self.thread.store(thread, Relaxed);
        }
        is_free
    }

    /// Where the call is that a jump has left, if `thread` is known to have done so when it is at `here`.
    fn left(&self, thread: usize, here: usize) -> Option<usize> {
        let frame = self.frame.load(Relaxed);
        let is_call = frame != 0 && frame != LEFT;
        (is_call && self.thread.load(Relaxed) == thread && was_left(frame, here)).then_some(frame)
    }

    /// Takes it if it is that of a call that was left.
    fn take_over(&self, thread: usize, here: usize) -> bool {
        let frame = self.left(thread, here).unwrap_or(LEFT);
        if self.frame.compare_exchange(frame, here, Acquire, Relaxed).is_err() {
            return false;
        }
        self.thread.store(thread, Relaxed);
        // The reply to that call may be under way yet.
        self.own.forget_users();
        self.own.close();
        true
    }

    /// Has the agent end the call here if it was left. The number stays, so that nothing else has it should that call go on
    /// all the same.
    fn end_left(&self, thread: usize, here: usize) {
        let left = self.left(thread, here);
        if left.is_some_and(|frame| self.frame.compare_exchange(frame, here, Acquire, Relaxed).is_ok()) {
            let _ = self.own.with(|fd| rustix::net::shutdown(fd, rustix::net::Shutdown::Both));
            self.thread.store(0, Relaxed);
            self.frame.store(LEFT, Release);
        }
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

/// A connection for one call: one for which none of the others is free, or became so. Or one of a process that is not the one
/// that began here: a child of `vfork`, which runs in its parent's memory, or of a system call that no handler of `fork` saw,
/// which has a copy of it. Or of a process that became another user, for the agent to refuse.
struct Stranger(Own);

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A connection in use by the call at `frame`. Frees it for the next, also when its user is unwound.
struct Busy<'a> {
    place: &'a Channel,
    frame: usize,
    /// Whether the connection is kept.
    is_kept: bool,
}

impl Busy<'_> {
    /// Whether no other call has taken it, or ended this one, as it was thought to have been left.
    fn is_own(&self) -> bool {
        self.place.frame.load(Acquire) == self.frame
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        if !self.is_kept {
            self.place.own.close();
        }
        self.place.free();
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
        Channels {
            socket: OnceLock::new(),
            places: [const { Channel::new() }; CHANNELS],
            waiting: [const { Channel::new() }; CHANNELS],
            owner: AtomicU64::new(0),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Channel> {
        self.places.iter().chain(&self.waiting)
    }

    pub(super) fn start(&self, socket: Vec<u8>) {
        let _ = self.socket.set(socket);
        self.owner.store(who(), Release);
    }

    pub(super) fn own(&self, fd: i32) -> bool {
        self.all().any(|place| place.own.is(fd))
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = i32> {
        self.all().filter_map(|place| place.own.number())
    }

    pub(super) fn step_aside(&self, fd: i32) {
        self.all().for_each(|place| place.own.step_aside(fd));
    }

    /// Whether this is the process, and the user, whose connections these are.
    pub(super) fn is_own_process(&self) -> bool {
        who() == self.owner.load(Acquire)
    }

    pub(super) fn forked(&self) {
        for place in self.all() {
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
            if let Some(place) = take(&self.places, thread, here) {
                return Some(Busy { place, frame: here, is_kept: true });
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
        let here = (&raw const stranger).addr();
        let busy = if !self.is_own_process() {
            None
        } else {
            let thread = this_thread();
            self.waiting.iter().for_each(|place| place.end_left(thread, here));
            if request.may_wait() {
                take(&self.waiting, thread, here).map(|place| Busy { place, frame: here, is_kept: false })
            } else {
                self.channel(here, &stranger.0)?
            }
        };
        let own = busy.as_ref().map_or(&stranger.0, |busy| &busy.place.own);
        let is_own = || busy.as_ref().is_none_or(Busy::is_own);
        let mut done = own.with(|fd| exchange(fd, &request, parts, into, is_own));
        // The program may have closed the connection behind the C library's back, or the agent while it was idle: then a new one
        // is made.
        if matches!(done, None | Some(Err(Lost::Unasked))) && is_own() {
            own.put(self.connect()?).ok_or(libc::EMFILE)?;
            done = own.with(|fd| exchange(fd, &request, parts, into, is_own));
        }
        if !is_own() {
            // What came may be another call's.
            if let Some(Ok((_, Some(fd)))) = done {
                close_raw(fd);
            }
            return Err(libc::EIO);
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

/// One of `places` that is free; if none is, that of a call that was left: it might yet go on, so as late as possible.
fn take(places: &[Channel], thread: usize, here: usize) -> Option<&Channel> {
    let free = places.iter().find(|place| place.take(thread, here));
    free.or_else(|| places.iter().find(|place| place.take_over(thread, here)))
}

/// One request and its reply, while the connection `is_own`.
fn exchange(
    fd: BorrowedFd<'_>,
    request: &Request,
    parts: [&[u8]; 4],
    into: &mut [u8],
    is_own: impl Fn() -> bool,
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
                if !is_own() {
                    return Err(Lost::Unanswered);
                }
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

    /// A call that was thought to have been left may go on: what it would get then is another call's.
    #[test]
    fn connections_of_calls_that_were_left_are_used_when_no_other_is_free_and_not_by_these_calls_any_more() {
        let (places, mark) = ([const { Channel::new() }; 2], 0u64);
        let (thread, here) = (this_thread(), (&raw const mark).addr());
        let busy = |frame| take(&places, thread, frame).map(|place| Busy { place, frame, is_kept: true });
        let [left, lower] = [here - 4096, here - 8192].map(|frame| busy(frame).unwrap());
        assert!(!std::ptr::eq(left.place, lower.place), "one is free");
        assert!(busy(here - 16384).is_none(), "it may be that of a handler, below both");
        let (first, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        left.place.own.put(first.into()).unwrap();
        let next = busy(here).unwrap();
        assert!(std::ptr::eq(next.place, left.place) && next.place.own.number().is_none());
        assert!(next.is_own() && lower.is_own() && !left.is_own());
        drop(left);
        assert!(next.is_own(), "not freed by a call whose it is not");
        drop((next, lower));
        assert!(places.iter().all(|place| place.take(thread, here)), "both are free again");
    }

    #[test]
    fn what_a_call_waited_for_is_ended_when_it_was_left() {
        let (places, mark) = ([const { Channel::new() }; 1], 0u64);
        let (thread, here) = (this_thread(), (&raw const mark).addr());
        let place = take(&places, thread, here).unwrap();
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        place.own.put(ours.into()).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut read = || std::io::Read::read(&mut theirs, &mut [0]).map_err(|error| error.kind());
        for (thread, here) in [(thread + 8, here), (thread, here - 4096)] {
            place.end_left(thread, here);
            assert_eq!(read(), Err(std::io::ErrorKind::WouldBlock), "another thread's, or a handler's");
        }
        place.end_left(thread, here);
        assert_eq!(read(), Ok(0));
        assert!(place.own.number().is_some(), "nothing else gets its number");
        let next = take(&places, thread + 8, here - 4096).unwrap();
        assert!(next.own.number().is_none());
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
