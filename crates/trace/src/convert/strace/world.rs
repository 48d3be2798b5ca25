//! The open files of the traced processes, and their positions.

use std::cell::RefCell;
use std::rc::Rc;

use impresario_sched::{FileId, Nanos};
use rustc_hash::FxHashMap;

use super::call::{Call, Returned, annotated, unescape};
use crate::{Builder, Origin, OriginId, Outcome, Record, TraceOp};

/// An open file description: a file and a position, shared by dup and fork.
struct Open {
    file: Option<FileId>,
    path: Vec<u8>,
    position: u64,
}

/// The descriptors of a process: the open file, and whether exec closes it.
type Table = FxHashMap<i32, (Rc<RefCell<Open>>, bool)>;

#[derive(Clone)]
struct Thread {
    process: u32,
    table: Rc<RefCell<Table>>,
    cwd: Rc<RefCell<Option<Vec<u8>>>>,
    origin: Option<OriginId>,
    /// Created by its first line, its parent being unknown so far.
    adopted: bool,
}

/// All traced threads.
#[derive(Default)]
pub struct World {
    threads: FxHashMap<u32, Thread>,
    /// Threads that are creating another one, in order.
    making: Vec<(u32, bool, bool)>,
    unknown_descriptors: u64,
    unknown_positions: u64,
}

impl World {
    /// A call has begun: its child may appear before it ends.
    pub fn begins(&mut self, thread: u32, text: &[u8]) {
        let text = String::from_utf8_lossy(text);
        if ["clone", "fork", "vfork"].iter().any(|name| text.starts_with(name)) {
            self.making.push((thread, text.contains("CLONE_FILES"), text.contains("CLONE_THREAD")));
        }
    }

    pub fn exited(&mut self, thread: u32) {
        self.threads.remove(&thread);
        self.making.retain(|(t, ..)| *t != thread);
    }

    fn thread(&mut self, id: u32) -> &mut Thread {
        if !self.threads.contains_key(&id) {
            let parent = if self.making.is_empty() { None } else { Some(self.making.remove(0)) };
            let new = match parent {
                Some((parent, files, thread)) => {
                    let child = self.child(parent, id, files, thread);
                    Thread { adopted: true, ..child }
                }
                None => Thread { process: id, table: Rc::default(), cwd: Rc::default(), origin: None, adopted: false },
            };
            self.threads.insert(id, new);
        }
        // It was just inserted.
        self.threads.entry(id).or_insert_with(|| Thread {
            process: id,
            table: Rc::default(),
            cwd: Rc::default(),
            origin: None,
            adopted: false,
        })
    }

    fn child(&mut self, parent: u32, id: u32, shares_files: bool, is_thread: bool) -> Thread {
        let parent = self.thread(parent).clone();
        let copy = |t: &Rc<RefCell<Table>>| Rc::new(RefCell::new(t.borrow().clone()));
        Thread {
            process: if is_thread { parent.process } else { id },
            table: if shares_files { parent.table.clone() } else { copy(&parent.table) },
            cwd: if is_thread { parent.cwd } else { Rc::new(RefCell::new(parent.cwd.borrow().clone())) },
            origin: None,
            adopted: false,
        }
    }

    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.unknown_descriptors > 0 {
            notes.push(format!(
                "{} requests are left out: of pipes and sockets, or of descriptors whose open was not recorded (strace -y \
                 gives their paths)",
                self.unknown_descriptors
            ));
        }
        if self.unknown_positions > 0 {
            notes.push(format!(
                "{} files were open before the recording began: positions in them are counted from 0",
                self.unknown_positions
            ));
        }
        notes
    }

    /// Applies the effect of a call.
    pub fn call(&mut self, builder: &mut Builder, id: u32, at_ns: u64, call: &Call) -> Result<(), String> {
        let returned = match call.result {
            Returned::Number(n, _) => Some(n),
            _ => None,
        };
        match call.name {
            "clone" | "clone3" | "fork" | "vfork" => {
                self.making.retain(|(t, ..)| *t != id);
                let Some(child) = returned.filter(|n| *n > 0).and_then(|n| u32::try_from(n).ok()) else {
                    return Ok(());
                };
                if !self.threads.get(&child).is_some_and(|t| t.adopted) {
                    let new = self.child(id, child, call.mentions("CLONE_FILES"), call.mentions("CLONE_THREAD"));
                    self.threads.insert(child, new);
                }
                return Ok(());
            }
            "execve" | "execveat" => {
                if returned == Some(0) {
                    let thread = self.thread(id);
                    let mut kept = thread.table.borrow().clone();
                    kept.retain(|_, (_, close_on_exec)| !*close_on_exec);
                    thread.table = Rc::new(RefCell::new(kept));
                }
                return Ok(());
            }
            _ => {}
        }
        let mut at = Moment { world: self, builder, id, at_ns, call, returned };
        at.take()
    }
}

/// A call being processed.
struct Moment<'w, 'c> {
    world: &'w mut World,
    builder: &'w mut Builder,
    id: u32,
    at_ns: u64,
    call: &'c Call<'c>,
    returned: Option<i64>,
}

impl Moment<'_, '_> {
    fn take(&mut self) -> Result<(), String> {
        let call = self.call;
        match call.name {
            "open" => self.opened(0, 1, None),
            "creat" => self.opened(0, 1, None),
            "openat" | "openat2" => self.opened(1, 2, Some(0)),
            "close" => self.closed(),
            "close_range" => {
                if let (Some(first), Some(last), Some(0)) = (call.number(0), call.number(1), self.returned) {
                    // `last` is often ~0U.
                    let last = if last < 0 { i64::MAX } else { last };
                    let inside = |fd: &i32| (first..=last).contains(&i64::from(*fd));
                    if !call.mentions("CLOEXEC") {
                        self.world.thread(self.id).table.borrow_mut().retain(|fd, _| !inside(fd));
                    }
                }
                Ok(())
            }
            "dup" | "dup2" | "dup3" => self.copied(0, call.mentions("O_CLOEXEC")),
            "fcntl" | "fcntl64" if call.raw(1).starts_with(b"F_DUPFD") => {
                self.copied(0, call.raw(1) == b"F_DUPFD_CLOEXEC")
            }
            "chdir" => {
                if let (Some(path), Some(0)) = (call.string(0), self.returned) {
                    let path = self.resolved(path, None);
                    *self.world.thread(self.id).cwd.borrow_mut() = Some(path);
                }
                Ok(())
            }
            "read" | "write" => self.moved(call.number(2).unwrap_or(0) as u64, None),
            "readv" | "writev" => self.moved(call.iov_bytes(1), None),
            "pread64" | "pwrite64" | "pread" | "pwrite" => {
                self.moved(call.number(2).unwrap_or(0) as u64, call.number(3))
            }
            "preadv" | "pwritev" | "preadv2" | "pwritev2" => {
                // Offset -1 means the position.
                self.moved(call.iov_bytes(1), call.number(3).filter(|n| *n >= 0))
            }
            "lseek" | "_llseek" => self.sought(),
            "sendfile" | "sendfile64" => {
                let offset = bracketed(call.raw(2));
                self.transferred(1, TraceOp::Read, offset, call.number(3).unwrap_or(0) as u64)
            }
            "copy_file_range" => {
                let len = call.number(4).unwrap_or(0) as u64;
                self.transferred(0, TraceOp::Read, bracketed(call.raw(1)), len)?;
                self.transferred(2, TraceOp::Write, bracketed(call.raw(3)), len)
            }
            "mmap" | "mmap2" => match (call.descriptor(4), self.returned) {
                (Some((fd, path)), Some(_)) if fd >= 0 => {
                    let unit = if call.name == "mmap2" { 4096 } else { 1 };
                    let offset = (call.number(5).unwrap_or(0) as u64).saturating_mul(unit);
                    let len = call.number(1).unwrap_or(0) as u64;
                    self.of_descriptor(fd, path, |_| (TraceOp::Map, offset, len))
                }
                _ => Ok(()),
            },
            "fsync" | "fdatasync" => self.of_first(|_| (TraceOp::Sync, 0, 0)),
            "ftruncate" | "ftruncate64" => {
                let size = call.number(1).unwrap_or(0) as u64;
                self.of_first(|_| (TraceOp::Truncate, size, 0))
            }
            "truncate" | "truncate64" => self.of_path(0, None, TraceOp::Truncate, call.number(1).unwrap_or(0) as u64),
            "unlink" => self.of_path(0, None, TraceOp::Unlink, 0),
            "unlinkat" if !call.mentions("AT_REMOVEDIR") => self.of_path(1, Some(0), TraceOp::Unlink, 0),
            // Other calls that create descriptors reuse numbers: an older file with that number is closed.
            "socket" | "accept" | "accept4" | "epoll_create" | "epoll_create1" | "eventfd" | "eventfd2"
            | "timerfd_create" | "signalfd" | "signalfd4" | "memfd_create" | "inotify_init" | "inotify_init1"
            | "pidfd_open" | "perf_event_open" | "io_uring_setup" => {
                if let Some(fd) = self.returned.and_then(|n| i32::try_from(n).ok()) {
                    self.world.thread(self.id).table.borrow_mut().remove(&fd);
                }
                Ok(())
            }
            "pipe" | "pipe2" | "socketpair" => {
                let text = String::from_utf8_lossy(call.raw(if call.name == "socketpair" { 3 } else { 0 }));
                for word in text.trim_matches(|c| c == '[' || c == ']').split(',') {
                    let digits: String = word.trim().chars().take_while(char::is_ascii_digit).collect();
                    if let Ok(fd) = digits.parse::<i32>() {
                        self.world.thread(self.id).table.borrow_mut().remove(&fd);
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The absolute path, if it can be determined.
    fn resolved(&mut self, path: Vec<u8>, dir: Option<usize>) -> Vec<u8> {
        if path.starts_with(b"/") {
            return path;
        }
        let base = match dir {
            Some(at) => {
                let told = annotated(self.call.raw(at)).map(unescape);
                let fd = self.call.descriptor(at).map(|(fd, _)| fd);
                let table = self.world.thread(self.id).table.clone();
                let of_fd = fd.and_then(|fd| table.borrow().get(&fd).map(|(open, _)| open.borrow().path.clone()));
                told.or(of_fd).or_else(|| self.world.thread(self.id).cwd.borrow().clone())
            }
            None => self.world.thread(self.id).cwd.borrow().clone(),
        };
        match base {
            Some(mut base) => {
                if !base.ends_with(b"/") {
                    base.push(b'/');
                }
                base.extend_from_slice(path.strip_prefix(b"./").unwrap_or(&path));
                base
            }
            None => path,
        }
    }

    fn opened(&mut self, path: usize, flags: usize, dir: Option<usize>) -> Result<(), String> {
        let Returned::Number(fd, told) = self.call.result else { return Ok(()) };
        let Ok(fd) = i32::try_from(fd) else { return Ok(()) };
        let Some(name) = self.call.string(path) else { return Ok(()) };
        let name = match told {
            Some(told) if told.starts_with(b"/") => unescape(told),
            _ => self.resolved(name, dir),
        };
        let flags = String::from_utf8_lossy(self.call.raw(flags)).into_owned();
        let is_directory = flags.contains("O_DIRECTORY");
        let file = if is_directory { None } else { Some(self.builder.path(&name)?) };
        let open = Open { file, path: name, position: 0 };
        let entry = (Rc::new(RefCell::new(open)), flags.contains("O_CLOEXEC"));
        self.world.thread(self.id).table.borrow_mut().insert(fd, entry);
        match file {
            Some(file) => self.push(TraceOp::Open, file, 0, 0),
            None => Ok(()),
        }
    }

    fn closed(&mut self) -> Result<(), String> {
        let Some((fd, _)) = self.call.descriptor(0) else { return Ok(()) };
        let gone = self.world.thread(self.id).table.borrow_mut().remove(&fd);
        match gone.and_then(|(open, _)| open.borrow().file) {
            Some(file) => self.push(TraceOp::Close, file, 0, 0),
            None => Ok(()),
        }
    }

    fn copied(&mut self, from: usize, close_on_exec: bool) -> Result<(), String> {
        let (Some((fd, _)), Some(new)) = (self.call.descriptor(from), self.returned) else { return Ok(()) };
        let Ok(new) = i32::try_from(new) else { return Ok(()) };
        let table = self.world.thread(self.id).table.clone();
        let open = table.borrow().get(&fd).map(|(open, _)| open.clone());
        match open {
            Some(open) => table.borrow_mut().insert(new, (open, close_on_exec)),
            None => table.borrow_mut().remove(&new),
        };
        Ok(())
    }

    /// The open file of a descriptor; with `-y` even if its open was not seen.
    fn open_of(&mut self, fd: i32, told: Option<&[u8]>) -> Result<Option<Rc<RefCell<Open>>>, String> {
        let table = self.world.thread(self.id).table.clone();
        let known = table.borrow().get(&fd).map(|(open, _)| open.clone());
        if known.is_some() {
            return Ok(known);
        }
        match told {
            Some(path) if path.starts_with(b"/") && !path.starts_with(b"/dev/") => {
                let path = unescape(path);
                let file = Some(self.builder.path(&path)?);
                let open = Rc::new(RefCell::new(Open { file, path, position: 0 }));
                table.borrow_mut().insert(fd, (open.clone(), false));
                self.world.unknown_positions += 1;
                Ok(Some(open))
            }
            _ => Ok(None),
        }
    }

    fn op(&self) -> TraceOp {
        if self.call.name.contains("write") { TraceOp::Write } else { TraceOp::Read }
    }

    fn moved(&mut self, len: u64, offset: Option<i64>) -> Result<(), String> {
        let op = self.op();
        self.transferred(0, op, offset.map(|n| n as u64), len)
    }

    /// A transfer at an offset, or at the position, which it advances.
    fn transferred(&mut self, arg: usize, op: TraceOp, offset: Option<u64>, len: u64) -> Result<(), String> {
        let Some((fd, told)) = self.call.descriptor(arg) else { return Ok(()) };
        let moved = self.returned.map_or(0, |n| n.max(0) as u64);
        let open = self.open_of(fd, told)?;
        let Some((file, open)) = open.and_then(|o| {
            let file = o.borrow().file?;
            Some((file, o))
        }) else {
            self.world.unknown_descriptors += 1;
            return Ok(());
        };
        let at = offset.unwrap_or_else(|| open.borrow().position);
        if offset.is_none() {
            open.borrow_mut().position = at.saturating_add(moved);
        }
        self.push(op, file, at, len)
    }

    fn sought(&mut self) -> Result<(), String> {
        let (Some((fd, told)), Some(to)) = (self.call.descriptor(0), self.returned) else { return Ok(()) };
        // _llseek returns the new position as [n].
        let to = if self.call.name == "_llseek" { bracketed(self.call.raw(2)) } else { u64::try_from(to).ok() };
        let (Some(to), Some(open)) = (to, self.open_of(fd, told)?) else { return Ok(()) };
        open.borrow_mut().position = to;
        let file = open.borrow().file;
        match file {
            Some(file) => self.push(TraceOp::Seek, file, to, 0),
            None => Ok(()),
        }
    }

    fn of_first(&mut self, what: impl FnOnce(&Open) -> (TraceOp, u64, u64)) -> Result<(), String> {
        match self.call.descriptor(0) {
            Some((fd, told)) => self.of_descriptor(fd, told, what),
            None => Ok(()),
        }
    }

    fn of_descriptor(
        &mut self,
        fd: i32,
        told: Option<&[u8]>,
        what: impl FnOnce(&Open) -> (TraceOp, u64, u64),
    ) -> Result<(), String> {
        let Some(open) = self.open_of(fd, told)? else { return Ok(()) };
        let (file, (op, offset, len)) = (open.borrow().file, what(&open.borrow()));
        match file {
            Some(file) => self.push(op, file, offset, len),
            None => Ok(()),
        }
    }

    fn of_path(&mut self, arg: usize, dir: Option<usize>, op: TraceOp, offset: u64) -> Result<(), String> {
        let Some(path) = self.call.string(arg) else { return Ok(()) };
        let path = self.resolved(path, dir);
        let file = self.builder.path(&path)?;
        self.push(op, file, offset, 0)
    }

    fn push(&mut self, op: TraceOp, file: FileId, offset: u64, len: u64) -> Result<(), String> {
        let id = self.id;
        let process = self.world.thread(id).process;
        let origin = match self.world.thread(id).origin {
            Some(origin) => origin,
            None => {
                let origin = self.builder.origin(Origin { process, thread: id, ..Origin::default() })?;
                self.world.thread(id).origin = Some(origin);
                origin
            }
        };
        let outcome = match self.call.result {
            Returned::Error(errno) => Outcome::Failed(errno),
            Returned::Number(n, _) if op.is_data() && (n.max(0) as u64) < len => Outcome::Short(n.max(0) as u64),
            _ => Outcome::Whole,
        };
        let mut record = Record::new(op, file, offset, len, Nanos(self.at_ns));
        (record.origin, record.outcome) = (origin, outcome);
        record.duration = self.call.duration_ns.map(Nanos);
        self.builder.push(record)
    }
}

/// `[123]` or `[123 => 456]`: the number before the call.
fn bracketed(arg: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(arg).ok()?.strip_prefix('[')?;
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text[..digits].parse().ok()
}
