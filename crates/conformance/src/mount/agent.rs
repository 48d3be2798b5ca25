//! An agent: a process that makes one request at a time of the file system under test. The checker runs several, so that
//! it can kill one, let one be another user, and give up one that hangs: a thread that waits in the kernel for an answer
//! of a server cannot be ended otherwise, and would keep the checker from ending too.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::thread::JoinHandleExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use impresario_base::Random;

use super::protocol::{Answer, Found, Op, PAYLOAD_MAX_BYTES, receive, send};
use crate::stamp::{Mark, Stamps};

/// O_DIRECT needs buffers, offsets and lengths in multiples of this at most.
const ALIGN: usize = 4096;
/// Signals that an interrupted read gets, at most; then it may end in peace.
const SIGNALS_MAX: u32 = 50;
const SIGNAL_INTERVAL: Duration = Duration::from_micros(200);
/// Bytes of one write of a storm.
const STORM_BYTES: u64 = 16 << 10;

/// Serves the checker on `socket` in `folder`; returns when the checker closes it.
pub(crate) fn serve(mut socket: UnixStream, folder: &Path) -> io::Result<()> {
    set_signals();
    rustix::process::umask(rustix::fs::Mode::empty());
    let mut agent = Agent { folder: folder.to_owned(), files: HashMap::new() };
    loop {
        let (op, payload) = match receive::<Op>(&mut socket) {
            Ok(asked) => asked,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let (answer, payload): (Answer, Vec<u8>) = match agent.perform(op, payload) {
            Ok((number, payload)) => (Ok(number), payload),
            Err(error) => (Err(error.raw_os_error().unwrap_or(libc::EIO)), Vec::new()),
        };
        send(&mut socket, &answer, &payload)?;
    }
}

fn set_signals() {
    // Ctrl-C reaches the whole process group: the checker decides, and cleans up with the agents' help.
    // SAFETY: signal(2) with SIG_IGN and sigaction(2) with a handler that does nothing; an agent uses no other signals.
    unsafe {
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as libc::sighandler_t;
        // Without SA_RESTART, so that system calls end with EINTR.
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

extern "C" fn ignore(_: libc::c_int) {}

struct Agent {
    folder: PathBuf,
    files: HashMap<u32, File>,
}

type Performed = io::Result<(u64, Vec<u8>)>;

fn done(number: u64) -> Performed {
    Ok((number, Vec::new()))
}

fn bad_slot() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

impl Agent {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn file(&self, slot: u32) -> io::Result<&File> {
        self.files.get(&slot).ok_or_else(bad_slot)
    }

    fn perform(&mut self, op: Op, payload: Vec<u8>) -> Performed {
        match op {
            Op::Open { slot, name, flags, direct } => {
                let file = open(&self.path(&name), flags | if direct { libc::O_DIRECT } else { 0 })?;
                self.files.insert(slot, file);
                done(0)
            }
            Op::Close { slot } => {
                let file = self.files.remove(&slot).ok_or_else(bad_slot)?;
                // SAFETY: the descriptor is the file's and nobody else has it.
                check(i64::from(unsafe { libc::close(file.into_raw_fd()) })).and_then(|_| done(0))
            }
            Op::Read { slot, offset, len } => {
                let bytes = read(self.file(slot)?, offset, len as usize)?;
                Ok((bytes.len() as u64, bytes))
            }
            Op::Write { slot, offset } => {
                let buffer = Aligned::new(&payload);
                done(self.file(slot)?.write_at(buffer.bytes(), offset)? as u64)
            }
            Op::Append { slot } => done(io::Write::write(&mut self.file(slot)?, &payload)? as u64),
            Op::Sync { slot, data_only } => {
                let file = self.file(slot)?;
                if data_only {
                    file.sync_data()?
                } else {
                    file.sync_all()?
                }
                done(0)
            }
            Op::Truncate { slot, len } => self.file(slot)?.set_len(len).and_then(|()| done(0)),
            Op::Size { slot } => done(self.file(slot)?.metadata()?.len()),
            Op::Stat { name } => {
                let found = fs::metadata(self.path(&name))?;
                let found = Found { size: found.len(), uid: found.uid(), mode: found.mode(), ino: found.ino() };
                Ok((0, postcard::to_allocvec(&found).map_err(io::Error::other)?))
            }
            Op::Mode { name, mode } => {
                fs::set_permissions(self.path(&name), fs::Permissions::from_mode(mode)).and_then(|()| done(0))
            }
            Op::Unlink { name } => fs::remove_file(self.path(&name)).and_then(|()| done(0)),
            Op::Rename { from, to } => fs::rename(self.path(&from), self.path(&to)).and_then(|()| done(0)),
            Op::MakeFolder { name } => fs::create_dir(self.path(&name)).and_then(|()| done(0)),
            Op::RemoveFolder { name } => fs::remove_dir(self.path(&name)).and_then(|()| done(0)),
            Op::RemoveAll { name } => fs::remove_dir_all(self.path(&name)).and_then(|()| done(0)),
            Op::Become { uid, gid } => become_user(uid, gid).and_then(|()| done(0)),
            Op::CloseAll => {
                self.files.clear();
                done(0)
            }
            Op::Interrupted { slot, offset, len } => interrupted(self.file(slot)?.try_clone()?, offset, len),
            Op::CloseDuring { slot, offset } => {
                close_during(self.files.remove(&slot).ok_or_else(bad_slot)?, offset, payload)
            }
            Op::Storm { name, threads, extent, run, file, writer } => {
                let path = self.path(&name);
                storm(&path, threads, extent, Stamps { run, file }, writer).and_then(|()| done(0))
            }
        }
    }
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    let access = flags & libc::O_ACCMODE;
    let mut options = OpenOptions::new();
    options.read(access != libc::O_WRONLY).write(access != libc::O_RDONLY).mode(0o666);
    let creates = flags & (libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_APPEND | libc::O_DIRECT);
    options.custom_flags(creates).open(path)
}

/// A copy of bytes, or room for them, at an address that O_DIRECT takes.
struct Aligned {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Aligned {
        let room = vec![0; len + ALIGN];
        let start = room.as_ptr().align_offset(ALIGN);
        Aligned { room, start, len }
    }

    fn new(bytes: &[u8]) -> Aligned {
        let mut aligned = Aligned::zeros(bytes.len());
        aligned.bytes_mut().copy_from_slice(bytes);
        aligned
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }
}

/// All bytes up to the end of the file; an interrupted call is repeated.
fn read(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut buffer = Aligned::zeros(len.min(PAYLOAD_MAX_BYTES));
    let mut got = 0;
    while got < buffer.len {
        match file.read_at(&mut buffer.bytes_mut()[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer.bytes()[..got].to_vec())
}

fn check(result: i64) -> io::Result<u64> {
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: plain system calls; the groups go first, while the process may still drop them.
    unsafe {
        check(i64::from(libc::setgroups(0, std::ptr::null())))?;
        check(i64::from(libc::setresgid(gid, gid, gid)))?;
        check(i64::from(libc::setresuid(uid, uid, uid)))?;
    }
    Ok(())
}

fn interrupted(file: File, offset: u64, len: u32) -> Performed {
    let ended = Arc::new(AtomicBool::new(false));
    let ends = ended.clone();
    let reader = std::thread::spawn(move || {
        let bytes = read(&file, offset, len as usize);
        ends.store(true, Ordering::Release);
        bytes
    });
    let thread = reader.as_pthread_t();
    for _ in 0..SIGNALS_MAX {
        if ended.load(Ordering::Acquire) {
            break;
        }
        // SAFETY: the thread is not joined yet, so its identifier is valid even when it has ended.
        unsafe { libc::pthread_kill(thread as libc::pthread_t, libc::SIGUSR1) };
        std::thread::sleep(SIGNAL_INTERVAL);
    }
    let bytes = reader.join().map_err(|_| io::Error::other("the reader panicked"))??;
    Ok((bytes.len() as u64, bytes))
}

fn close_during(file: File, offset: u64, payload: Vec<u8>) -> Performed {
    let fd: RawFd = file.into_raw_fd();
    let started = Arc::new(AtomicBool::new(false));
    let starts = started.clone();
    let writer = std::thread::spawn(move || {
        starts.store(true, Ordering::Release);
        // SAFETY: the bytes live through the call. The descriptor may be closed meanwhile, which is the point; no other
        // thread of an agent opens files, so its number means nothing else.
        check(unsafe { libc::pwrite(fd, payload.as_ptr().cast(), payload.len(), offset as libc::off_t) } as i64)
    });
    while !started.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    // SAFETY: the descriptor was taken from its file above; it is closed once.
    unsafe { libc::close(fd) };
    let written = writer.join().map_err(|_| io::Error::other("the writer panicked"))?;
    done(written?)
}

fn storm(path: &Path, threads: u32, extent: u64, stamps: Stamps, writer: u32) -> io::Result<()> {
    let firsts: Vec<_> = (0..u64::from(threads.min(64)))
        .map(|number| {
            let file = open(path, libc::O_RDWR)?;
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let mut random = Random::new(stamps.run ^ number);
                for sequence in 1.. {
                    let offset = random.below((extent / STORM_BYTES).max(1)) * STORM_BYTES;
                    // Sequence numbers differ between the threads of the agent.
                    let mark = Mark { writer, sequence: sequence * 64 + number };
                    let bytes = stamps.bytes(mark, offset, STORM_BYTES as usize);
                    let first = file.write_at(&bytes, offset).and_then(|_| read(&file, offset, bytes.len()));
                    if sequence == 1 {
                        let _ = tell.send(first.map(drop));
                    }
                }
            });
            Ok(told)
        })
        .collect::<io::Result<_>>()?;
    for first in firsts {
        first.recv().map_err(|_| io::Error::other("a thread ended"))??;
    }
    Ok(())
}

/// Whether a path names a folder, a socket or something else, for the checker's first look.
pub(crate) fn kind(mode: u32) -> Kind {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => Kind::Folder,
        libc::S_IFSOCK => Kind::Socket,
        _ => Kind::Other,
    }
}

/// What a path is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Folder,
    Socket,
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_does_what_it_is_asked() {
        set_signals();
        let dir = tempfile::tempdir().unwrap();
        let mut agent = Agent { folder: dir.path().to_owned(), files: HashMap::new() };
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        let open = |slot, flags| Op::Open { slot, name: "f".into(), flags, direct: false };
        assert_eq!(agent.perform(open(1, flags), vec![]).unwrap().0, 0);
        assert_eq!(agent.perform(open(2, flags), vec![]).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        assert_eq!(agent.perform(Op::Write { slot: 1, offset: 3 }, b"abc".to_vec()).unwrap().0, 3);
        let read = Op::Read { slot: 1, offset: 2, len: 100 };
        assert_eq!(agent.perform(read, vec![]).unwrap().1, b"\0abc");
        let read = Op::Interrupted { slot: 1, offset: 3, len: 3 };
        assert_eq!(agent.perform(read, vec![]).unwrap().1, b"abc");
        let (_, found) = agent.perform(Op::Stat { name: "f".into() }, vec![]).unwrap();
        assert_eq!(postcard::from_bytes::<Found>(&found).unwrap().size, 6);
        let closed = agent.perform(Op::CloseDuring { slot: 1, offset: 0 }, vec![7; 4096]);
        assert!(matches!(closed.map(|(n, _)| n).map_err(|e| e.raw_os_error()), Ok(4096) | Err(Some(libc::EBADF))));
        assert_eq!(agent.perform(Op::Close { slot: 1 }, vec![]).unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(kind(fs::metadata(dir.path()).unwrap().mode()), Kind::Folder);
    }
}
