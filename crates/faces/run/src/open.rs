//! The open files of a run, each with the agent's end of its placeholder.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use impresario_base::lock::Mutex;
use impresario_base::machine::random_number;
use impresario_client::{ClientError, File};
use impresario_interpose::served::protocol::NAME;
use impresario_wire::Attr;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::locks::{Locks, OTHER_KIND};

/// Files that a run has open at most.
const OPENS_MAX: usize = 1 << 16;

/// What is open.
#[derive(Debug)]
pub(crate) enum Node {
    /// A file of the cluster.
    File(File),
    /// A directory.
    Directory,
}

fn has_set_id(mode: u32) -> bool {
    mode & (libc::S_ISUID | libc::S_ISGID) != 0
}

/// An open file: what POSIX calls an open file description.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) node: Node,
    pub(crate) ino: u64,
    /// Its position, held while a call uses it.
    pub(crate) position: Mutex<u64>,
    /// Flags of `open`.
    pub(crate) flags: Mutex<i32>,
    /// By which it was opened, from the root, kept up with renames of this run.
    pub(crate) path: Mutex<Vec<u8>>,
    /// Owners that took `fcntl` locks through it.
    pub(crate) lockers: Mutex<Vec<u64>>,
    /// Not 0: it may have set-user-id or set-group-id, which go when it is changed. Each `chmod` that gives them has its own number.
    pub(crate) set_id: AtomicU64,
    /// Hangs up when no program has a descriptor of it any more.
    hold: OwnedFd,
}

/// All of them.
pub(crate) struct Opens {
    name: Vec<u8>,
    next: AtomicU64,
    table: Mutex<FxHashMap<u64, Arc<Open>>>,
    epoll: OwnedFd,
    pub(crate) locks: Locks,
}

impl Opens {
    pub(crate) fn new(token: &str) -> std::io::Result<Opens> {
        let name = [NAME, token.as_bytes(), b"/"].concat();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Opens { name, next: AtomicU64::new(1), table: Mutex::default(), epoll, locks: Locks::default() })
    }

    /// Enters an open file; returns its placeholder for the program.
    pub(crate) fn add(&self, node: Node, attr: &Attr, flags: i32, path: Vec<u8>) -> Result<OwnedFd, i32> {
        if self.table.lock().len() >= OPENS_MAX {
            return Err(libc::ENFILE);
        }
        let number = self.next.fetch_add(1, Relaxed);
        let (placeholder, hold) = self.placeholder(number).map_err(rustix::io::Errno::raw_os_error)?;
        let open = Arc::new(Open {
            node,
            ino: attr.ino,
            set_id: AtomicU64::new(if has_set_id(attr.mode) { number } else { 0 }),
            position: Mutex::default(),
            flags: Mutex::new(flags),
            path: Mutex::new(path),
            lockers: Mutex::default(),
            hold,
        });
        self.table.lock().insert(number, open.clone());
        let watched = epoll::add(&self.epoll, &open.hold, epoll::EventData::new_u64(number), epoll::EventFlags::RDHUP);
        if let Err(error) = watched {
            self.table.lock().remove(&number);
            return Err(error.raw_os_error());
        }
        Ok(placeholder)
    }

    fn placeholder(&self, number: u64) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let socket = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        // Nobody can foresee the name, so nobody can take it before.
        let random = random_number().map_err(|_| rustix::io::Errno::IO)?;
        let rest = format!("{number:x}.{random:x}");
        let address = SocketAddrUnix::new_abstract_name(&[&self.name[..], rest.as_bytes()].concat())?;
        let placeholder = socket()?;
        rustix::net::bind(&placeholder, &address)?;
        rustix::net::listen(&placeholder, 1)?;
        let hold = socket()?;
        rustix::net::connect(&hold, &address)?;
        Ok((placeholder, hold))
    }

    pub(crate) fn get(&self, number: u64) -> Result<Arc<Open>, i32> {
        self.table.lock().get(&number).cloned().ok_or(libc::EBADF)
    }

    /// Whether nothing is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.lock().is_empty()
    }

    /// Closes a file if its last descriptor is gone, and says how that went.
    pub(crate) fn settle(&self, number: u64) -> Result<(), ClientError> {
        let Ok(open) = self.get(number) else { return Ok(()) };
        if !open.is_given_up() {
            return Ok(());
        }
        self.locks.closes(number, &open);
        drop(open);
        let Some(open) = self.table.lock().remove(&number) else { return Ok(()) };
        let _ = epoll::delete(&self.epoll, &open.hold);
        self.locks.closed(number, &open);
        // A call in another thread may still use it; then the file is closed when that ends.
        match Arc::into_inner(open).map(|open| open.node) {
            Some(Node::File(file)) => file.close(),
            _ => Ok(()),
        }
    }

    /// Tells of files that programs gave up, and of the end of programs.
    pub(crate) fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    /// Closes what programs gave up without a word, as at their end. Never returns.
    pub(crate) fn watch(&self) {
        let mut space = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 64];
        loop {
            let count = match epoll::wait(&self.epoll, &mut space[..], None) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::warn!(%error, "open files are no longer watched");
                    return;
                }
            };
            for event in space.iter().take(count) {
                let number = event.data.u64();
                if number & OTHER_KIND != 0 {
                    self.process_ended((number & !OTHER_KIND) as u32);
                    continue;
                }
                if let Err(error) = self.settle(number) {
                    tracing::warn!(%error, "closing a file that its programs gave up");
                }
            }
        }
    }

    /// A node has other permission bits now.
    pub(crate) fn note_mode(&self, ino: u64, mode: u32) {
        if has_set_id(mode) {
            let number = self.next.fetch_add(1, Relaxed);
            let table = self.table.lock();
            table.values().filter(|open| open.ino == ino).for_each(|open| open.set_id.store(number, Relaxed));
        }
    }

    /// What had a path before has another one now, and so has what is below it.
    pub(crate) fn note_moves(&self, moves: &[(&[u8], &[u8])]) {
        for open in self.table.lock().values() {
            let mut path = open.path.lock();
            let moved = moves.iter().find_map(|(from, to)| {
                let rest = path.strip_prefix(*from).filter(|rest| rest.is_empty() || rest.starts_with(b"/"))?;
                Some([to, rest].concat())
            });
            if let Some(moved) = moved {
                *path = moved;
            }
        }
    }
}

impl Open {
    fn is_given_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.hold, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0) && fds[0].revents().intersects(gone)
    }

    pub(crate) fn file(&self) -> Result<&File, i32> {
        match &self.node {
            Node::File(file) => Ok(file),
            Node::Directory => Err(libc::EISDIR),
        }
    }

    pub(crate) fn may_read(&self) -> bool {
        let flags = *self.flags.lock();
        flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    pub(crate) fn may_write(&self) -> bool {
        let flags = *self.flags.lock();
        flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}
