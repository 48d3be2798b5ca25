//! A program as the interposed library would make it appear, for tests of the manager.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use impresario_assist::config::{Entry, Hints, Region, StandDown};
use impresario_assist::report::{FileReport, Report};
use impresario_ring::message::{MESSAGE_BYTES_MAX, ToClient, ToManager, register};
use impresario_ring::{Access, Op, Producer, Push, SLOTS};
pub use impresario_testing::{PATIENCE, until};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

pub struct Program {
    pub socket: OwnedFd,
    pub ring: Producer,
    pub event: OwnedFd,
    pub patterns: Vec<u8>,
    next: u32,
}

pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

pub fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What the manager says; `None` when it closed the connection.
pub fn answer(socket: &OwnedFd) -> Option<(ToClient, Option<OwnedFd>)> {
    let timeout = Some(PATIENCE);
    rustix::net::sockopt::set_socket_timeout(socket, rustix::net::sockopt::Timeout::Recv, timeout).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let bytes = match got {
        Ok(packet) if packet.bytes > 0 => &bytes[..packet.bytes],
        Ok(_) | Err(rustix::io::Errno::CONNRESET) => return None,
        Err(e) => panic!("the manager says nothing: {e}"),
    };
    let rights = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    Some((ToClient::decode(bytes).unwrap(), rights))
}

pub fn eventfd() -> OwnedFd {
    use rustix::event::EventfdFlags;
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub fn hello() -> ToManager {
    ToManager::Hello { pid: std::process::id(), ring_bytes: impresario_ring::ring_bytes(SLOTS) as u32 }
}

impl Program {
    pub fn start(path: &Path) -> Program {
        let socket = connect(path).unwrap();
        let (ring, memory) = Producer::create(SLOTS).unwrap();
        let event = eventfd();
        send(&socket, hello().encode().as_bytes(), &[memory.as_fd(), event.as_fd()]).unwrap();
        let Some((ToClient::Welcome { patterns_len, .. }, Some(memory))) = answer(&socket) else {
            panic!("no welcome")
        };
        let mut patterns = vec![0; patterns_len as usize];
        assert_eq!(rustix::io::pread(&memory, &mut patterns, 0).unwrap(), patterns.len());
        Program { socket, ring, event, patterns, next: 1 }
    }

    pub fn register(&mut self, file: &impl AsFd) -> u32 {
        self.register_as(file, register::READ)
    }

    pub fn register_as(&mut self, file: &impl AsFd, flags: u32) -> u32 {
        let number = self.next;
        self.next += 1;
        let message = ToManager::Register { file: number, flags };
        send(&self.socket, message.encode().as_bytes(), &[file.as_fd()]).unwrap();
        number
    }

    pub fn unregister(&mut self, file: u32) {
        send(&self.socket, ToManager::Unregister { file }.encode().as_bytes(), &[]).unwrap();
    }

    pub fn push(&self, access: Access) {
        match self.ring.push(access) {
            Push::Wake => {
                rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
            }
            Push::Stored => {}
            other => panic!("{other:?}"),
        }
    }

    /// Tells of a read that took a millisecond.
    pub fn tell(&self, file: u32, offset: u64, len: u64) {
        self.push(access(file, Op::Read, offset, len, 1_000_000));
    }

    /// Reads and tells of it, as a program does.
    pub fn read(&self, file: u32, open: &File, offset: u64, len: u64) {
        let mut bytes = vec![0; len as usize];
        let start = Instant::now();
        std::os::unix::fs::FileExt::read_at(open, &mut bytes, offset).unwrap();
        self.push(access(file, Op::Read, offset, len, start.elapsed().as_nanos().max(1) as u32));
    }
}

pub fn access(file: u32, op: Op, offset: u64, len: u64, duration_ns: u32) -> Access {
    let start_ns = impresario_ring::now_ns();
    Access { file, op, flags: 0, thread: 1, offset, len_bytes: len as u32, duration_ns, start_ns }
}

/// A folder on the disk (the system's temporary folder may be in memory).
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file whose pages are not in memory.
pub fn cold_file(dir: &Path, name: &str, bytes: u64) -> (PathBuf, File) {
    let path = dir.canonicalize().unwrap().join(name);
    let mut file = File::create(&path).unwrap();
    file.write_all(&vec![9; bytes as usize]).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    (path.clone(), File::open(&path).unwrap())
}

/// An entry with a small window.
pub fn window(path: &Path) -> Entry {
    Entry {
        block_size: 256 * KIB,
        cache_size: 4,
        read_ahead_size: 2,
        will_need: vec![Region::WHOLE],
        random: vec![Region::WHOLE],
        ..Entry::new(path)
    }
}

pub fn hints(file: Vec<Entry>) -> Hints {
    Hints { file, stand_down: StandDown { trial: false, ..StandDown::default() }, ..Hints::default() }
}

/// A map of the beginning of a file, which nobody touches.
pub struct Map {
    place: *mut libc::c_void,
    len: usize,
}

impl Map {
    pub fn of(file: &File, len: u64) -> Map {
        let (len, fd) = (len as usize, file.as_raw_fd());
        // SAFETY: a new map of an open file at a place that the kernel chooses.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        assert_ne!(place, libc::MAP_FAILED);
        Map { place, len }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped above with this length.
        unsafe { libc::munmap(self.place, self.len) };
    }
}

/// Descriptors of this process that are open on a file.
pub fn descriptors_of(path: &Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == path)).count()
}

pub fn file_report(report: &Report, path: &Path) -> FileReport {
    report.files.iter().find(|f| Path::new(&f.path) == path).cloned().unwrap_or_default()
}
