//! The library as cargo builds it, C programs to load it into, and a manager that writes down what it is told.
#![allow(dead_code)] // each test uses its part

use std::collections::HashMap;
use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use impresario_ring::message::{Mode, ToClient, ToManager};
use impresario_ring::patterns::{Builder, Kind};
use impresario_ring::{Access, Consumer, Op, Unseen};
use impresario_testing::until;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

mod library;
#[path = "../../../../capi/tests/support/mod.rs"]
pub mod programs;
pub use library::library;
pub use programs::run;

/// Compiles a C program of `tests/c`; warnings are errors.
pub fn compile(dir: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let program = dir.join(name);
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-D_GNU_SOURCE"]).args(flags);
    cc.arg("-o").arg(&program);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c"))).arg("-ldl");
    let made = cc.output().unwrap();
    assert!(made.status.success(), "{cc:?}:\n{}", String::from_utf8_lossy(&made.stderr));
    program
}

/// A command with the library, and a socket that may or may not be there.
pub fn preloaded(program: impl AsRef<std::ffi::OsStr>, socket: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).env("IMPRESARIO_ASSIST_SOCKET", socket);
    command
}

/// An open file that a program registered, and what it did with it.
#[derive(Clone, Debug)]
pub struct Told {
    pub client: usize,
    pub path: PathBuf,
    pub flags: u32,
    pub unregistered: bool,
    pub accesses: Vec<Access>,
}

impl Told {
    /// Operation, offset and length of every access.
    pub fn ranges(&self) -> Vec<(Op, u64, u32)> {
        self.accesses.iter().map(|a| (a.op, a.offset, a.len_bytes)).collect()
    }
}

struct Client {
    socket: OwnedFd,
    ring: Option<Consumer>,
    event: Option<OwnedFd>,
    files: HashMap<u32, usize>,
    early: Vec<Access>,
}

/// A manager in a thread.
pub struct Manager {
    pub socket: PathBuf,
    stop: Arc<AtomicBool>,
    pause: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
    unseen: Arc<Mutex<Unseen>>,
    /// What files are small, in bytes, and how long their reads wait in a lull from the beginning, in nanoseconds.
    small: Arc<Mutex<(u32, u64)>>,
    passed_over: Arc<AtomicU64>,
    told: Arc<Mutex<Vec<Told>>>,
    errors: Arc<Mutex<Vec<String>>>,
    clients: Arc<Mutex<(usize, usize)>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Manager {
    /// Serves at `socket`, for everything below `tree`.
    pub fn start(socket: &Path, tree: &Path, mode: Mode) -> Manager {
        Manager::start_with_plan(socket, tree, None, mode)
    }

    /// The same; one file is told of however small it is.
    pub fn start_with_plan(socket: &Path, tree: &Path, planned: Option<&Path>, mode: Mode) -> Manager {
        let path = |path: &Path| path.canonicalize().unwrap().into_os_string().into_encoded_bytes();
        let mut builder = Builder::new();
        planned.into_iter().for_each(|file| builder.add(Kind::File, &path(file)).unwrap());
        builder.of_small_files();
        builder.add(Kind::Tree, &path(tree)).unwrap();
        let _ = std::fs::remove_file(socket);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 1000).unwrap();
        let mut manager = Manager {
            socket: socket.to_path_buf(),
            stop: Arc::default(),
            pause: Arc::default(),
            dropped: Arc::default(),
            unseen: Arc::default(),
            small: Arc::default(),
            passed_over: Arc::default(),
            told: Arc::default(),
            errors: Arc::default(),
            clients: Arc::default(),
            thread: None,
        };
        let (stop, told, errors) = (manager.stop.clone(), manager.told.clone(), manager.errors.clone());
        let counts = manager.clients.clone();
        let (pause, dropped, unseen) = (manager.pause.clone(), manager.dropped.clone(), manager.unseen.clone());
        let (small, passed_over) = (manager.small.clone(), manager.passed_over.clone());
        let patterns = builder.finish();
        let serve = move || {
            let mut clients: Vec<Option<Client>> = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                if pause.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
                while let Ok(socket) = rustix::net::accept_with(&listener, flags) {
                    let client = Client { socket, ring: None, event: None, files: HashMap::new(), early: Vec::new() };
                    clients.push(Some(client));
                }
                let mut told = told.lock().unwrap();
                for (number, place) in clients.iter_mut().enumerate() {
                    let Some(client) = place else { continue };
                    match client.serve(number, &patterns, (mode, *small.lock().unwrap()), &mut told) {
                        Ok(true) => {}
                        Ok(false) => {
                            dropped.fetch_add(client.ring.as_ref().map_or(0, Consumer::dropped), Ordering::SeqCst);
                            let passed = client.ring.as_ref().map_or(0, Consumer::passed_over_bytes);
                            passed_over.fetch_add(passed, Ordering::SeqCst);
                            let mut all = unseen.lock().unwrap();
                            *all = all.and(client.ring.as_ref().map(Consumer::unseen).unwrap_or_default());
                            *place = None;
                        }
                        Err(e) => {
                            errors.lock().unwrap().push(e);
                            *place = None;
                        }
                    }
                }
                *counts.lock().unwrap() = (clients.len(), clients.iter().flatten().count());
                drop(told);
                std::thread::sleep(Duration::from_micros(500));
            }
        };
        manager.thread = Some(std::thread::spawn(serve));
        manager
    }

    /// Programs that come from now on may pass over files of so many bytes: all until their reads have waited so long, and those that
    /// are empty. What they pass over is complete once it has finished, in bytes.
    pub fn small(&self, bytes: u32, until_waited_ns: u64) -> Arc<AtomicU64> {
        *self.small.lock().unwrap() = (bytes, until_waited_ns);
        self.passed_over.clone()
    }

    /// Waits until all programs have gone, stops, and gives what was told, in the order of registration.
    pub fn finish(self) -> Vec<Told> {
        let (dropped, told) = self.finish_lossy();
        assert_eq!(dropped, 0);
        told
    }

    /// Serves nobody, or again.
    pub fn pause(&self, pause: bool) {
        self.pause.store(pause, Ordering::SeqCst);
        // Until a round that had begun is over.
        std::thread::sleep(Duration::from_millis(5));
        drop(self.told.lock().unwrap());
    }

    /// As [`Manager::finish`], with the number of accesses that were dropped.
    pub fn finish_lossy(mut self) -> (u64, Vec<Told>) {
        until("all programs hang up", || self.clients.lock().unwrap().1 == 0);
        // Two rounds after the last client went: one may have been connected meanwhile.
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(self.clients.lock().unwrap().1, 0, "a program did not hang up");
        self.halt();
        let errors = self.errors.lock().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        drop(errors);
        (self.dropped.load(Ordering::SeqCst), std::mem::take(&mut self.told.lock().unwrap()))
    }

    /// What programs that have gone could not tell; complete once it has finished.
    pub fn unseen(&self) -> Arc<Mutex<Unseen>> {
        self.unseen.clone()
    }

    /// What was told so far.
    pub fn so_far(&self) -> Vec<Told> {
        self.told.lock().unwrap().clone()
    }

    /// Programs that connected so far.
    pub fn connected(&self) -> usize {
        self.clients.lock().unwrap().0
    }

    fn halt(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let joined = thread.join();
            assert!(joined.is_ok() || std::thread::panicking());
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.halt();
    }
}

impl Client {
    /// False when the program has gone.
    fn serve(
        &mut self,
        number: usize,
        patterns: &[u8],
        (mode, (small_bytes, until_waited_ns)): (Mode, (u32, u64)),
        told: &mut Vec<Told>,
    ) -> Result<bool, String> {
        loop {
            let mut bytes = [0u8; 64];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
            let mut parts = [rustix::io::IoSliceMut::new(&mut bytes)];
            let got = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
            let len = match got {
                Ok(message) => message.bytes,
                Err(rustix::io::Errno::AGAIN) => {
                    self.drain(told, false)?;
                    return Ok(true);
                }
                Err(_) => 0,
            };
            if len == 0 {
                self.drain(told, true)?;
                return Ok(false);
            }
            let mut descriptors: Vec<OwnedFd> = Vec::new();
            for message in control.drain() {
                if let rustix::net::RecvAncillaryMessage::ScmRights(fds) = message {
                    descriptors.extend(fds);
                }
            }
            let message = ToManager::decode(&bytes[..len]).map_err(|e| e.to_string())?;
            if descriptors.len() != message.descriptors() {
                return Err(format!("{message:?} with {} descriptors", descriptors.len()));
            }
            let mut descriptors = descriptors.into_iter();
            match message {
                ToManager::Hello { .. } => {
                    let mut ring = Consumer::map(descriptors.next().unwrap()).map_err(|e| e.to_string())?;
                    ring.set_small(small_bytes);
                    ring.set_lull(until_waited_ns);
                    self.ring = Some(ring);
                    self.event = descriptors.next();
                    self.welcome(patterns, mode);
                }
                ToManager::Register { file, flags } => {
                    let fd = descriptors.next().unwrap();
                    let link = rustix::fs::readlink(
                        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd)),
                        Vec::new(),
                    );
                    let path = PathBuf::from(OsString::from_vec(link.unwrap().into_bytes()));
                    if self.files.insert(file, told.len()).is_some() {
                        return Err(format!("file {file} twice"));
                    }
                    told.push(Told { client: number, path, flags, unregistered: false, accesses: Vec::new() });
                    for access in std::mem::take(&mut self.early) {
                        self.note(access, told);
                    }
                }
                ToManager::Helper { .. } => return Err("it was not asked to give hints".into()),
                ToManager::Unregister { file } => {
                    self.drain(told, false)?;
                    let at = self.files.get(&file).ok_or(format!("file {file} is not registered"))?;
                    told[*at].unregistered = true;
                }
            }
        }
    }

    fn welcome(&self, patterns: &[u8], mode: Mode) {
        let memory = rustix::fs::memfd_create("patterns", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&memory, patterns).unwrap();
        let packet = ToClient::Welcome { mode, patterns_len: patterns.len() as u32 }.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds = [memory.as_fd()];
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
        let parts = [rustix::io::IoSlice::new(packet.as_bytes())];
        let _ = rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL);
    }

    fn note(&mut self, access: Access, told: &mut [Told]) {
        match self.files.get(&access.file) {
            Some(at) => {
                told[*at].unregistered |= access.op == Op::Close;
                told[*at].accesses.push(access);
            }
            // Its registration is still on the way.
            None => self.early.push(access),
        }
    }

    fn drain(&mut self, told: &mut [Told], ended: bool) -> Result<(), String> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let mut seen = Vec::new();
        let drained = if ended { ring.drain_ended(|a| seen.push(a)) } else { ring.drain(u32::MAX, |a| seen.push(a)) };
        let drained = drained.map_err(|e| e.to_string())?;
        if drained.invalid + drained.skipped > 0 {
            return Err(format!("{drained:?}"));
        }
        for access in seen {
            self.note(access, told);
        }
        Ok(())
    }
}
