//! Files that a cluster serves to a program under `impresario run`: what of the program's calls concerns them, and the way
//! to the agent that acts for it.
//!
//! An open file is a socket that listens and is never connected to by the program: the *placeholder*. The kernel gives it
//! a number, shares it over dup, fork and exec, and closes it with its last descriptor, which the agent sees at its end.
//! Its name says which open file of the agent it stands for, so nothing is kept here that an exec could lose; and what
//! reaches it unseen by this library fails (`read`: EINVAL, `write`: ENOTCONN, `lseek`: ESPIPE).

mod channel;
mod place;
pub mod protocol;

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8};

use channel::Channels;
pub use channel::{Got, peer_pid, peer_uid};
pub use place::{Room, Route};
use protocol::{NAME, TOKEN_BYTES};

/// Numbers whose kind is remembered; of others the kernel is asked each time.
const REMEMBERED: usize = 1 << 16;
const UNKNOWN: u8 = 0;
const FOREIGN: u8 = 1;

/// What the environment says of the run.
#[derive(Debug)]
pub(crate) struct Run {
    /// The prefix, absolute, without a slash at its end.
    pub(crate) at: Vec<u8>,
    /// The folder that stands for the root as a working directory.
    pub(crate) directories: Vec<u8>,
    /// The name of a placeholder up to its number.
    pub(crate) name: Vec<u8>,
    /// Patterns of paths that are left alone.
    pub(crate) bypass: Vec<Vec<u8>>,
}

/// A program's side of `impresario run`.
pub struct Served {
    run: OnceLock<Run>,
    channels: Channels,
    kinds: [AtomicU8; REMEMBERED],
    /// Threads have numbers of their own, so what is remembered of a number says nothing.
    are_apart: AtomicBool,
}

impl Default for Served {
    fn default() -> Self {
        Served::new()
    }
}

impl Served {
    /// One that serves nothing until it is started.
    pub const fn new() -> Served {
        Served {
            run: OnceLock::new(),
            channels: Channels::new(),
            kinds: [const { AtomicU8::new(UNKNOWN) }; REMEMBERED],
            are_apart: AtomicBool::new(false),
        }
    }

    /// Begins to serve what is below `at`, by the agent in `folder`. Called once, before the program's own code.
    pub fn start(&self, folder: &[u8], at: &[u8], token: &[u8], bypass: &[u8]) {
        let is_token = token.len() == TOKEN_BYTES && token.iter().all(u8::is_ascii_hexdigit);
        if !is_token || !at.starts_with(b"/") || at.len() < 2 || !folder.starts_with(b"/") {
            return;
        }
        let bypass = bypass.split(|b| *b == b'\n').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect();
        let run = Run {
            at: at.to_vec(),
            directories: [folder, b"/", protocol::DIRECTORIES.as_bytes()].concat(),
            name: [NAME, token, b"/"].concat(),
            bypass,
        };
        self.channels.start([folder, b"/", protocol::SOCKET.as_bytes()].concat());
        let _ = self.run.set(run);
    }

    #[inline]
    pub(crate) fn run(&self) -> Option<&Run> {
        self.run.get()
    }

    /// Whether the program runs under `impresario run`.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.run.get().is_some()
    }

    /// The agent's number of the open file that a descriptor stands for; `None`: the file is not the cluster's.
    #[inline]
    pub fn open_file(&self, fd: i32) -> Option<u64> {
        let run = self.run.get()?;
        let kind = usize::try_from(fd).ok().map(|at| self.kinds.get(at));
        match kind? {
            Some(kind) if kind.load(Relaxed) == FOREIGN && !self.are_apart.load(Relaxed) => None,
            kind => self.ask(run, fd, kind),
        }
    }

    fn ask(&self, run: &Run, fd: i32, kind: Option<&AtomicU8>) -> Option<u64> {
        // SAFETY: used for one system call, which fails cleanly when the number is not open.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let number = match rustix::net::getsockname(file) {
            Err(rustix::io::Errno::BADF) => return None,
            Err(_) => None,
            Ok(address) => rustix::net::SocketAddrUnix::try_from(address)
                .ok()
                .and_then(|address| number(address.abstract_name()?.strip_prefix(&run.name[..])?)),
        };
        // A child of vfork has descriptors of its own, but this memory is its parent's.
        if let (None, Some(kind)) = (number, kind)
            && self.channels.is_own_process()
        {
            kind.store(FOREIGN, Relaxed);
        }
        number
    }

    /// A thread is about to have descriptors of its own.
    pub fn part(&self) {
        if self.is_active() {
            self.are_apart.store(true, Relaxed);
        }
    }

    /// The number is, or becomes, another file.
    #[inline]
    pub fn forget(&self, fd: i32) {
        if let Some(kind) = usize::try_from(fd).ok().and_then(|at| self.kinds.get(at)) {
            kind.store(UNKNOWN, Relaxed);
        }
    }

    /// The same of all from `first` to `last`.
    pub fn forget_range(&self, first: u32, last: u32) {
        if !self.is_active() {
            return;
        }
        let last = (last as usize).min(REMEMBERED - 1);
        self.kinds.get(first as usize..=last).into_iter().flatten().for_each(|kind| kind.store(UNKNOWN, Relaxed));
    }

    /// Whether the number is one of the library's own connections.
    #[inline]
    pub fn owns(&self, fd: i32) -> bool {
        self.is_active() && self.channels.own(fd)
    }

    /// The numbers of the library's own connections.
    pub fn own_numbers(&self) -> impl Iterator<Item = i32> {
        self.channels.numbers()
    }

    /// Leaves a number that the program wants for itself.
    pub fn step_aside(&self, fd: i32) {
        if self.owns(fd) {
            self.channels.step_aside(fd);
        }
    }

    /// In a forked child: its parent's connections are not its own.
    pub fn forked(&self) {
        if self.is_active() {
            self.channels.forked();
        }
    }

    /// Asks the agent. Paths and data are sent with the request; data of the reply go into `into`. The error is an errno.
    pub fn call(
        &self,
        request: protocol::Request,
        path: &[u8],
        other: &[u8],
        data: &[u8],
        into: &mut [u8],
    ) -> Result<Got, i32> {
        self.channels.call(request, path, other, data, into)
    }
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served").field("run", &self.run).finish_non_exhaustive()
    }
}

/// The file's number in what follows the token: hexadecimal digits, a dot and a random word.
fn number(rest: &[u8]) -> Option<u64> {
    let (digits, _) = std::str::from_utf8(rest).ok()?.split_once('.')?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn named(name: &[u8]) -> std::os::fd::OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrUnix::new_abstract_name(name).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        socket
    }

    #[test]
    fn a_placeholder_is_known_by_its_name_alone() {
        let token = format!("{:016x}", std::process::id());
        let served = Served::new();
        let ours = named(format!("impresario-run/{token}/1f.a7").as_bytes());
        assert_eq!(served.open_file(ours.as_raw_fd()), None, "not started");
        served.start(b"/nowhere", b"/prefix", token.as_bytes(), b"");
        assert_eq!(served.open_file(ours.as_raw_fd()), Some(0x1f));
        let copy = ours.try_clone().unwrap();
        assert_eq!(served.open_file(copy.as_raw_fd()), Some(0x1f));
        let other = named(format!("impresario-run/{token}x/1.2").as_bytes());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!([other.as_raw_fd(), file.as_raw_fd(), -1, 1 << 20].map(|fd| served.open_file(fd)), [None; 4]);
        // A number that was another file's is asked about again once it is given up.
        let fd = file.as_raw_fd();
        rustix::io::dup2(&ours, &mut std::mem::ManuallyDrop::new(std::os::fd::OwnedFd::from(file))).unwrap();
        assert_eq!(served.open_file(fd), None);
        served.forget(fd);
        assert_eq!(served.open_file(fd), Some(0x1f));
    }
}
