//! The manager's socket: listening, and messages with descriptors.

use std::fs::{File, Metadata};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use impresario_ring::message::{MESSAGE_BYTES_MAX, Malformed, ToClient, ToManager};
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};

use super::Access;

/// Programs that may wait to be taken; the kernel bounds it further (`somaxconn`).
const BACKLOG: i32 = 4096;

/// Descriptors that one packet can have (`SCM_MAX_FD`).
const SENT_MAX: usize = 253;

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Whether a socket is there that a manager left behind and no process listens at.
pub fn is_abandoned(path: &Path) -> bool {
    let (Ok(socket), Ok(address)) = (new_socket(), SocketAddrUnix::new(path)) else { return false };
    connect(socket, &address) == Err(rustix::io::Errno::CONNREFUSED)
}

/// How long another manager may take to begin to listen at the same path.
const TURN_PATIENCE: Duration = Duration::from_secs(5);

/// Who may make a socket at a path, or replace one that was left behind there: one process at a time. Between its making and its
/// listening a socket looks like one that was left behind.
struct Turn {
    path: PathBuf,
    _lock: File,
}

impl Turn {
    fn of(socket: &Path) -> io::Result<Turn> {
        let mut name = socket.as_os_str().to_os_string();
        name.push(".lock");
        let path = PathBuf::from(name);
        let deadline = Instant::now() + TURN_PATIENCE;
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(0o600);
            let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(&path)?;
            match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
                // The one before may have removed it meanwhile.
                Ok(()) if Some(file_of(&file.metadata()?)) == found(&path) => return Ok(Turn { path, _lock: file }),
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Which file it is: device and inode.
fn file_of(about: &Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}

/// Which file is there, if any.
fn found(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|about| file_of(&about))
}

/// The file of a socket, removed when this is dropped.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    file: Option<(u64, u64)>,
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another manager may have its own there by now.
        if self.file.is_none() || found(&self.path) != self.file {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(socket = %self.path.display(), %error, "the socket stays behind");
        }
    }
}

/// Listens at a path, in place of a socket that no process listens at any more.
pub(super) fn listen(path: &Path, access: Access) -> io::Result<(OwnedFd, SocketFile)> {
    let told = |e: io::Error, what: &str| io::Error::new(e.kind(), format!("{}: {what}: {e}", path.display()));
    let address =
        SocketAddrUnix::new(path).map_err(|e| told(e.into(), "is no path for a socket (at most 107 bytes)"))?;
    let _turn = Turn::of(path).map_err(|e| told(e, "cannot be made, as its lock file cannot be had"))?;
    if let Ok(meta) = std::fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(told(io::ErrorKind::AlreadyExists.into(), "is there and is no socket; name another path"));
        }
        // One that is stopped, or has as many programs waiting as it may, does not answer and is there all the same.
        if !is_abandoned(path) {
            return Err(told(
                io::ErrorKind::AddrInUse.into(),
                "another manager listens there; stop it or name another path",
            ));
        }
        std::fs::remove_file(path).map_err(|e| told(e, "an old socket cannot be replaced"))?;
    }
    let listener = new_socket()?;
    rustix::net::bind(&listener, &address).map_err(|e| told(e.into(), "cannot be made"))?;
    let file = SocketFile { path: path.into(), file: found(path) };
    let mode = match access {
        Access::Owner => Mode::from_raw_mode(0o600),
        Access::Everyone => Mode::from_raw_mode(0o666),
    };
    rustix::fs::chmod(path, mode).map_err(|e| told(e.into(), "its access cannot be set"))?;
    // No program can connect before this.
    rustix::net::listen(&listener, BACKLOG).map_err(|e| told(e.into(), "cannot be listened at"))?;
    Ok((listener, file))
}

/// One packet from a client.
pub(super) enum Received {
    Message(ToManager, Vec<OwnedFd>),
    /// A message whose descriptors found no place in this process.
    Lost(Vec<OwnedFd>),
    Malformed(Malformed, Vec<OwnedFd>),
    /// There is none now.
    Nothing,
    /// The client is gone.
    End,
}

/// Takes one packet without waiting.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Received {
    // Room for all that can come: what does not fit the kernel closes on this thread, and a file system may make it wait.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let packet = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(packet) => break packet,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Received::Nothing,
            Err(_) => return Received::End,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if packet.bytes == 0 && descriptors.is_empty() {
        return Received::End;
    }
    if packet.flags.contains(ReturnFlags::TRUNC) {
        return Received::Malformed(Malformed::Length(packet.bytes), descriptors);
    }
    match ToManager::decode(&bytes[..packet.bytes]) {
        Err(e) => Received::Malformed(e, descriptors),
        Ok(message) if packet.flags.contains(ReturnFlags::CTRUNC) && descriptors.len() < message.descriptors() => {
            Received::Lost(descriptors)
        }
        Ok(message) if descriptors.len() != message.descriptors() => {
            Received::Malformed(Malformed::Value(descriptors.len() as u32), descriptors)
        }
        Ok(message) => Received::Message(message, descriptors),
    }
}

/// Sends one message without waiting, with a descriptor or none.
pub(super) fn send(socket: BorrowedFd<'_>, message: ToClient, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let packet = message.encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(packet.as_bytes())], &mut control, flags)?;
    Ok(())
}

/// Who connected, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    /// 0 for a process in a process name space that is not seen from here.
    pub(super) pid: u32,
    pub(super) uid: u32,
}

/// Asks the kernel who is at the other end. By hand, since 0 is a valid answer for the process here.
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let place = (&raw mut who).cast();
    // SAFETY: the place and its length are those of a `ucred`.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &mut len) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { pid: who.pid.max(0) as u32, uid: who.uid })
}

/// Memory with the patterns, sealed, for all clients.
pub(super) fn patterns_memory(patterns: &[u8]) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let memory = rustix::fs::memfd_create(c"impresario-patterns", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = patterns;
    while !rest.is_empty() {
        let n = rustix::io::write(memory.as_fd(), rest)?;
        rest = &rest[n..];
    }
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(is_abandoned(&path));
        let live = listen(&path, Access::Everyone).unwrap();
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let said = listen(&path, Access::Owner).unwrap_err().to_string();
        assert!(said.contains("another manager listens there"), "{said}");
        drop(live);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let file = dir.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        let said = listen(&file, Access::Owner).unwrap_err().to_string();
        assert!(said.contains("is no socket") && std::fs::read(&file).unwrap() == b"mine", "{said}");
        let said = listen(&dir.path().join("x".repeat(200)), Access::Owner).unwrap_err().to_string();
        assert!(said.contains("107 bytes"), "{said}");
        let said = listen(&dir.path().join("no/s"), Access::Owner).unwrap_err().to_string();
        assert!(said.contains("cannot be made"), "{said}");
    }
    /// A manager that is stopped takes no programs; what waits for it is its own.
    #[test]
    fn a_manager_that_takes_nobody_at_the_moment_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = SocketAddrUnix::new(&path).unwrap();
        let stopped = new_socket().unwrap();
        rustix::net::bind(&stopped, &address).unwrap();
        rustix::net::listen(&stopped, 0).unwrap();
        let waits = || new_socket().map(|socket| (connect(&socket, &address), socket)).unwrap();
        let waiting: Vec<_> = std::iter::repeat_with(waits).take_while(|(result, _)| result.is_ok()).take(10).collect();
        assert!(waiting.len() < 10);
        let said = listen(&path, Access::Owner).unwrap_err().to_string();
        assert!(said.contains("another manager listens there"), "{said}");
    }

    #[test]
    fn of_two_that_start_at_once_one_listens_and_its_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        for round in 0..100 {
            let one = || listen(&path, Access::Owner);
            let (a, b) = std::thread::scope(|scope| {
                let other = scope.spawn(one);
                (one(), other.join().unwrap())
            });
            assert_eq!([&a, &b].iter().filter(|result| result.is_ok()).count(), 1, "round {round}: {a:?} {b:?}");
            assert!(connect(new_socket().unwrap(), &SocketAddrUnix::new(&path).unwrap()).is_ok(), "round {round}");
        }
    }

    #[test]
    fn the_end_of_a_manager_leaves_the_socket_of_another_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = listen(&path, Access::Owner).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = listen(&path, Access::Owner).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
