//! The open files of a run, each with the agent's end of its placeholder.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::machine::random_number;
use impresario_client::{ClientError, Errno, File};
use impresario_interpose::served::protocol::NAME;
use impresario_wire::Attr;
use rustc_hash::{FxHashMap, FxHashSet};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::locks::{Locks, OTHER_KIND};

/// Files that a run has open at most.
const OPENS_MAX: usize = 1 << 16;
/// Files whose failed close is remembered until the program asks: those of programs that have ended are never asked for.
const FAILED_MAX: usize = 64;

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
    /// Its last descriptor is gone: set before its locks are given up.
    pub(crate) is_closed: AtomicBool,
    /// Not 0: it may have set-user-id or set-group-id, which go when it is changed. Each `chmod` that gives them has its own number.
    pub(crate) set_id: AtomicU64,
    /// What is read of it is told to who foresees that.
    pub(crate) is_foreseen: AtomicBool,
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
    closing: Mutex<Closing>,
    closed: Condvar,
}

/// What is no longer in the table and not closed yet, or was closed before its program asked how that went.
#[derive(Default)]
struct Closing {
    under_way: FxHashSet<u64>,
    failed: VecDeque<(u64, ClientError)>,
}

/// A close that is under way until this goes, by a panic too: nobody waits for it then.
struct UnderWay<'a> {
    opens: &'a Opens,
    number: u64,
    /// For the program that asks later.
    failed: Option<ClientError>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.failed = Some(ClientError::System { what: "closing a file".into(), errno: Errno(libc::EIO) });
        }
        let mut closing = self.opens.closing.lock();
        closing.under_way.remove(&self.number);
        closing.failed.extend(self.failed.take().map(|error| (self.number, error)));
        if closing.failed.len() > FAILED_MAX {
            closing.failed.pop_front();
        }
        drop(closing);
        self.opens.closed.notify_all();
    }
}

impl Opens {
    pub(crate) fn new(token: &str) -> std::io::Result<Opens> {
        let name = [NAME, token.as_bytes(), b"/"].concat();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Opens {
            name,
            next: AtomicU64::new(1),
            table: Mutex::default(),
            epoll,
            locks: Locks::default(),
            closing: Mutex::default(),
            closed: Condvar::new(),
        })
    }

    /// Enters an open file; returns its placeholder for the program, and its number.
    pub(crate) fn add(
        &self,
        node: Node,
        attr: &Attr,
        flags: i32,
        path: Vec<u8>,
    ) -> Result<(OwnedFd, u64, Arc<Open>), i32> {
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
            is_closed: AtomicBool::new(false),
            is_foreseen: AtomicBool::new(false),
            hold,
        });
        self.table.lock().insert(number, open.clone());
        let watched = epoll::add(&self.epoll, &open.hold, epoll::EventData::new_u64(number), epoll::EventFlags::RDHUP);
        if let Err(error) = watched {
            self.table.lock().remove(&number);
            return Err(error.raw_os_error());
        }
        Ok((placeholder, number, open))
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

    /// Looks at an open file, which stays the only reference to it; `None` if it is not in the table.
    pub(crate) fn with<T>(&self, number: u64, look: impl FnOnce(&Open) -> T) -> Option<T> {
        self.table.lock().get(&number).map(|open| look(open))
    }

    /// Whether nothing is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.lock().is_empty()
    }

    /// Closes a file if its last descriptor is gone, and says how that went. The thread that watches learns of it too, and mostly
    /// before the program has asked: then that one is waited for, since a program whose `close` has returned relies on it.
    pub(crate) fn settle(&self, number: u64) -> Result<(), ClientError> {
        if let Some((open, _under_way)) = self.take_given_up(number) {
            return self.close(number, open);
        }
        let under_way = |closing: &mut Closing| closing.under_way.contains(&number);
        let mut closing = self.closed.wait_while(self.closing.lock(), under_way);
        let failed = closing.failed.iter().position(|failed| failed.0 == number);
        failed.and_then(|at| closing.failed.remove(at)).map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Closes a file if its last descriptor is gone, before a program asks for that or because none will.
    fn settle_early(&self, number: u64) {
        let Some((open, mut under_way)) = self.take_given_up(number) else { return };
        under_way.failed = self.close(number, open).err();
        if let Some(error) = &under_way.failed {
            tracing::warn!(%error, "closing a file that its programs gave up");
        }
    }

    /// Takes a file without descriptors out of the table: it is being closed from then on. All under the table's lock: another
    /// thread that asks at the same moment has no reference to the file, so its end is the taker's to see, and finds it either
    /// in the table or under way.
    fn take_given_up(&self, number: u64) -> Option<(Arc<Open>, UnderWay<'_>)> {
        let mut table = self.table.lock();
        let Entry::Occupied(entry) = table.entry(number) else { return None };
        if !entry.get().is_given_up() {
            return None;
        }
        self.locks.closes(number, entry.get());
        self.closing.lock().under_way.insert(number);
        Some((entry.remove(), UnderWay { opens: self, number, failed: None }))
    }

    fn close(&self, number: u64, open: Arc<Open>) -> Result<(), ClientError> {
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
                self.settle_early(number);
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

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use impresario_wire::{Attr, NodeKind, Time};

    use super::*;

    fn opens() -> Opens {
        Opens::new(&format!("{:x}", random_number().unwrap())).unwrap()
    }

    /// Opens and gives up something; its number.
    fn given_up(opens: &Opens) -> u64 {
        let (at, kind) = (Time::default(), NodeKind::Dir);
        let (nlink, uid, gid, size, used_bytes) = (1, 0, 0, 0, 0);
        let attr = Attr {
            ino: 1,
            kind,
            mode: 0o755,
            nlink,
            uid,
            gid,
            size,
            used_bytes,
            atime: at,
            mtime: at,
            ctime: at,
            labelled: false,
        };
        drop(opens.add(Node::Directory, &attr, 0, Vec::new()).unwrap());
        opens.next.load(Relaxed) - 1
    }

    /// Only then does the close of the file itself take place there, and its error reach the program.
    #[test]
    fn of_threads_that_learn_of_a_close_together_one_gets_the_file_to_itself() {
        let opens = opens();
        let start = Barrier::new(2);
        for _ in 0..2000 {
            let number = given_up(&opens);
            let take = || {
                start.wait();
                // As often as lets the threads meet.
                for _ in 0..20 {
                    opens.key_of(number);
                }
                let taken = opens.take_given_up(number);
                let alone = taken.as_ref().map(|(open, _)| Arc::strong_count(open) == 1);
                start.wait();
                alone
            };
            let took = std::thread::scope(|scope| {
                let other = scope.spawn(take);
                [take(), other.join().unwrap()]
            });
            assert!(matches!(took, [Some(true), None] | [None, Some(true)]), "{took:?}");
        }
    }

    #[test]
    fn a_close_that_panics_is_one_that_failed() {
        let opens = opens();
        let number = given_up(&opens);
        let closes = || {
            let _taken = opens.take_given_up(number).expect("it is given up");
            panic!("on purpose: the file's close fails so");
        };
        std::thread::scope(|scope| assert!(scope.spawn(closes).join().is_err()));
        assert!(!opens.closing.lock().under_way.contains(&number), "its program would wait for ever");
        assert_eq!(opens.settle(number).unwrap_err().errno(), libc::EIO);
        assert!(opens.settle(number).is_ok());
    }
}
