//! The manager's socket: listening, and messages with descriptors.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use impresario_base::machine::random_bytes;
use impresario_ring::message::{MESSAGE_BYTES_MAX, Malformed, ToClient, ToManager};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};

use super::Access;

/// Programs that may wait to be taken; the kernel bounds it further (`somaxconn`).
const BACKLOG: i32 = 4096;

/// How often a place is tried that others make and remove at the same time.
const PLACE_TRIES: usize = 100;

/// Descriptors that one packet can have (`SCM_MAX_FD`).
const SENT_MAX: usize = 253;

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Whether a socket is there that a manager left behind and no process listens at.
pub fn is_abandoned(path: &Path) -> bool {
    matches!(ask(path), Ok(There::Abandoned))
}

/// What is known of a socket that is there.
enum There {
    /// A process listens at it, or has as many programs waiting as it may.
    Listens,
    /// Nobody listens any more.
    Abandoned,
    /// It cannot be asked.
    Unknown(rustix::io::Errno),
}

fn ask(path: &Path) -> io::Result<There> {
    let address = SocketAddrUnix::new(path)?;
    Ok(match connect(new_socket()?, &address) {
        Ok(()) | Err(rustix::io::Errno::AGAIN) => There::Listens,
        Err(rustix::io::Errno::CONNREFUSED) => There::Abandoned,
        Err(errno) => There::Unknown(errno),
    })
}

/// The file of a socket, removed when this is dropped.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Keeps its number from being another file's.
    file: OwnedFd,
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let file_of = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let (there, ours) = (rustix::fs::lstat(&self.path).map(file_of), rustix::fs::fstat(&self.file).map(file_of));
        // Another manager may have its own there by now.
        if there.is_err() || there != ours {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(socket = %self.path.display(), %error, "the socket stays behind");
        }
    }
}

/// A socket that listens at a name of its own, removed when this is dropped.
struct Aside {
    folder: OwnedFd,
    name: String,
}

impl Aside {
    /// By a way that is short enough for an address, however long the folder's is.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}/{}", self.folder.as_raw_fd(), self.name).into()
    }

    /// Moves it to `name`, where nothing may be.
    fn place(&self, name: &OsStr) -> rustix::io::Result<()> {
        rustix::fs::linkat(&self.folder, &self.name, &self.folder, name, AtFlags::empty())
    }

    /// Moves it to `name` in place of a socket at which nobody listens; false when somebody does.
    fn replace(&self, name: &OsStr) -> io::Result<bool> {
        let exchange =
            || rustix::fs::renameat_with(&self.folder, &self.name, &self.folder, name, RenameFlags::EXCHANGE);
        exchange()?;
        // Another manager may have done the same since the old one was looked at.
        let is_abandoned = matches!(ask(&self.path()), Ok(There::Abandoned));
        if !is_abandoned {
            exchange()?;
        }
        Ok(is_abandoned)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty());
    }
}

/// Listens at a path, in place of a socket that no process listens at any more. It listens before it is at the path: until then
/// another manager would take it for one that was left behind.
pub(super) fn listen(path: &Path, access: Access) -> io::Result<(OwnedFd, SocketFile)> {
    let told = |e: io::Error, what: &str| io::Error::new(e.kind(), format!("{}: {what}: {e}", path.display()));
    let taken = || told(io::ErrorKind::AddrInUse.into(), "another manager listens there; stop it or name another path");
    SocketAddrUnix::new(path).map_err(|e| told(e.into(), "is no path for a socket (at most 107 bytes)"))?;
    if let Ok(meta) = std::fs::symlink_metadata(path)
        && !meta.file_type().is_socket()
    {
        return Err(told(io::ErrorKind::AlreadyExists.into(), "is there and is no socket; name another path"));
    }
    let no_name = || told(io::ErrorKind::InvalidInput.into(), "is no path for a socket");
    let name = path.file_name().ok_or_else(no_name)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(parent, flags, Mode::empty()).map_err(|e| told(e.into(), "cannot be made"))?;
    let mine: [u8; 8] = random_bytes()?;
    let aside = Aside { folder, name: format!(".impresario-{:016x}", u64::from_le_bytes(mine)) };
    let listener = new_socket()?;
    let address = SocketAddrUnix::new(aside.path())?;
    rustix::net::bind(&listener, &address).map_err(|e| told(e.into(), "cannot be made"))?;
    let mode = match access {
        Access::Owner => Mode::from_raw_mode(0o600),
        Access::Everyone => Mode::from_raw_mode(0o666),
    };
    rustix::fs::chmod(aside.path(), mode).map_err(|e| told(e.into(), "its access cannot be set"))?;
    rustix::net::listen(&listener, BACKLOG).map_err(|e| told(e.into(), "cannot be listened at"))?;
    let pin = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&aside.folder, &aside.name, pin, Mode::empty())?;
    for _ in 0..PLACE_TRIES {
        match aside.place(name) {
            Ok(()) => return Ok((listener, SocketFile { path: path.into(), file })),
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(told(error.into(), "cannot be made")),
        }
        let is_replaced = match ask(path)? {
            There::Listens => return Err(taken()),
            There::Abandoned => match aside.replace(name) {
                Ok(is_replaced) => is_replaced,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(told(error, "an old socket cannot be replaced")),
            },
            There::Unknown(rustix::io::Errno::NOENT) => continue,
            There::Unknown(errno) => {
                let what =
                    "a socket is there, and whether anybody listens cannot be asked; remove it or name another path";
                return Err(told(errno.into(), what));
            }
        };
        return if is_replaced { Ok((listener, SocketFile { path: path.into(), file })) } else { Err(taken()) };
    }
    Err(taken())
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
        let (listener, first) = listen(&path, Access::Owner).unwrap();
        // It has ended, but for its file; the number of that is not used again while it may be looked for.
        drop(listener);
        let second = listen(&path, Access::Owner).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
