//! The manager's socket: listening, and messages with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

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

/// Listens at a path, in place of a socket that no process listens at any more.
pub(super) fn listen(path: &Path, access: Access) -> io::Result<OwnedFd> {
    let told = |e: io::Error, what: &str| io::Error::new(e.kind(), format!("{}: {what}: {e}", path.display()));
    let address =
        SocketAddrUnix::new(path).map_err(|e| told(e.into(), "is no path for a socket (at most 107 bytes)"))?;
    if let Ok(meta) = std::fs::symlink_metadata(path) {
        use std::os::unix::fs::FileTypeExt;
        if !meta.file_type().is_socket() {
            return Err(told(io::ErrorKind::AlreadyExists.into(), "is there and is no socket; name another path"));
        }
        if connect(new_socket()?, &address).is_ok() {
            return Err(told(
                io::ErrorKind::AddrInUse.into(),
                "another manager answers there; stop it or name another path",
            ));
        }
        std::fs::remove_file(path).map_err(|e| told(e, "an old socket cannot be replaced"))?;
    }
    let listener = new_socket()?;
    rustix::net::bind(&listener, &address).map_err(|e| told(e.into(), "cannot be made"))?;
    let mode = match access {
        Access::Owner => Mode::from_raw_mode(0o600),
        Access::Everyone => Mode::from_raw_mode(0o666),
    };
    rustix::fs::chmod(path, mode).map_err(|e| told(e.into(), "its access cannot be set"))?;
    // No program can connect before this.
    rustix::net::listen(&listener, BACKLOG).map_err(|e| told(e.into(), "cannot be listened at"))?;
    Ok(listener)
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
        drop(listen(&path, Access::Owner).unwrap());
        let live = listen(&path, Access::Everyone).unwrap();
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let said = listen(&path, Access::Owner).unwrap_err().to_string();
        assert!(said.contains("another manager answers there"), "{said}");
        drop(live);
        let file = dir.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        let said = listen(&file, Access::Owner).unwrap_err().to_string();
        assert!(said.contains("is no socket") && std::fs::read(&file).unwrap() == b"mine", "{said}");
        let said = listen(&dir.path().join("x".repeat(200)), Access::Owner).unwrap_err().to_string();
        assert!(said.contains("107 bytes"), "{said}");
        let said = listen(&dir.path().join("no/s"), Access::Owner).unwrap_err().to_string();
        assert!(said.contains("cannot be made"), "{said}");
    }
}
