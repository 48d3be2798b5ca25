//! The advice manager: takes accesses from programs and gives hints for their files.
//!
//! One thread waits for everything: new programs, their messages, their rings. It decides and never blocks; calls that
//! may block are made by a bounded pool of workers, which also close the programs' files. Programs are not trusted: what
//! they send is checked, what they may hold is limited by user, and one that breaks the rules is cut off with one line
//! in the log. The manager gives hints only on open files that a program passed to it, so that no program
//! gains access to anything.
//!
//! A manager that is started again finds its programs coming back by themselves: the library connects anew.

mod client;
mod files;
mod lessons;
mod lull;
mod memory;
mod pool;
mod programs;
mod registration;
mod service;
mod siblings;
mod sink;
mod socket;
mod users;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use impresario_ring::SMALL_FILE_BYTES;
use impresario_ring::patterns::Kind as PatternKind;

use crate::backend::Backends;
use crate::config::{Hints, Paths};
use crate::learn::Kind;
use crate::report::Report;
pub(crate) use registration::is_removed;
pub use sink::{RecordedAccess, RecordedFile, Sink};
use socket::SocketFile;
pub use socket::is_abandoned;

/// How long [`Handle::stop`] and [`Handle::report`] wait.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Who may connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Access {
    /// Programs of the user who started the manager (and root's).
    #[default]
    Owner,
    /// Programs of all users.
    Everyone,
}

/// A record of what programs do.
pub struct Record {
    /// Where it goes.
    pub sink: Box<dyn Sink>,
    /// Of which files: canonical paths or patterns of them.
    pub patterns: Vec<(PatternKind, Vec<u8>)>,
    /// Of files of at most so many bytes, some that are read from memory may be missing; 0: all are there.
    pub small_bytes: u32,
}

impl Record {
    /// Of all regular files.
    pub fn of_everything(sink: Box<dyn Sink>) -> Record {
        Record { sink, patterns: vec![(PatternKind::Tree, b"/".to_vec())], small_bytes: 0 }
    }

    /// Of the regular files from which something can be learnt beside the hints: not of small ones, so that a program whose files are in
    /// memory need not tell of them.
    pub fn to_learn_from(sink: Box<dyn Sink>) -> Record {
        Record { small_bytes: SMALL_FILE_BYTES, ..Record::of_everything(sink) }
    }
}

/// The program of which it is asked what is known.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Whose it is.
    pub uid: u32,
    /// The process that reads.
    pub pid: u32,
    /// The program's name.
    pub program: &'a str,
}

/// What is known of a program.
#[derive(Clone, Default)]
pub struct Known {
    /// What it reads of kinds of files.
    pub kinds: Vec<Kind>,
    /// From how many runs of it was learnt.
    pub runs: u64,
    /// Takes runs of it that something can be learnt from; `None` where nothing would be kept.
    pub keep: Option<Keep>,
}

/// Takes the trace of a run, to have it learnt from; false where there are too many. It is called by the manager's thread, and must not
/// wait.
pub type Keep = Arc<dyn Fn(File) -> bool + Send + Sync>;

/// What is known of programs.
pub type KnownOf = Arc<dyn Fn(&Asked<'_>) -> Known + Send + Sync>;

/// What a manager is to do.
pub struct Options {
    /// The hints, with budgets and limits.
    pub hints: Hints,
    /// What the file system says of their paths, where it was asked already.
    pub paths: Option<Paths>,
    /// Whether hints are given at all; without, programs are only recorded.
    pub advise: bool,
    /// Who may connect.
    pub access: Access,
    /// Records accesses; without, only reads of files with hints are told of.
    pub record: Option<Record>,
    /// Threads for calls that may block, at least 2.
    pub workers: u32,
    /// Ways of giving hints.
    pub backends: Backends,
    /// The name of the program that is started, where it cannot be asked of the process that reads.
    pub program: Option<String>,
    /// What is known of a program: what it reads of kinds of files, for files without a plan, and where runs of it are kept. Called
    /// beside the manager's thread, for one user one call after the other: one that takes long delays that user's programs, by two
    /// seconds at most.
    pub known: Option<KnownOf>,
}

impl Options {
    /// Hints for this user's programs, nothing recorded.
    pub fn new(hints: Hints) -> Options {
        Options {
            hints,
            paths: None,
            advise: true,
            access: Access::Owner,
            record: None,
            workers: 8,
            backends: Backends::default(),
            program: None,
            known: None,
        }
    }

    /// Nothing but a record of all regular files.
    pub fn record(sink: Box<dyn Sink>) -> Options {
        Options { advise: false, record: Some(Record::of_everything(sink)), ..Options::new(Hints::default()) }
    }
}

/// What the service's thread is asked to do.
enum Command {
    Expect(OwnedFd),
    Report(Sender<Report>),
    Stop(Sender<Report>),
}

/// The way to the service's thread.
struct Control {
    commands: Receiver<Command>,
    event: Arc<OwnedFd>,
}

/// Starts managers.
pub struct Manager;

impl Manager {
    /// Starts a manager that listens at `socket`. A socket that a manager left behind is replaced; one at which a
    /// manager still answers is an error.
    pub fn start(options: Options, socket: &Path) -> io::Result<Handle> {
        Manager::listen(socket, options.access)?.start(options)
    }

    /// The same in two steps, so that a program can load while its manager is made.
    pub fn listen(socket: &Path, access: Access) -> io::Result<Listening> {
        let (listener, socket) = socket::listen(socket, access)?;
        Ok(Listening { listener, access, socket })
    }
}

/// The socket of a manager that is to be started: programs can connect, and are answered once it runs.
#[derive(Debug)]
pub struct Listening {
    listener: OwnedFd,
    access: Access,
    socket: SocketFile,
}

impl Listening {
    /// Where it listens.
    pub fn socket(&self) -> &Path {
        self.socket.path()
    }

    /// Starts the manager. Who may connect is settled; what the options say of it does not count.
    pub fn start(self, options: Options) -> io::Result<Handle> {
        let Listening { listener, access, socket } = self;
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event = Arc::new(rustix::event::eventfd(0, flags)?);
        let (send, commands) = mpsc::channel();
        let control = Control { commands, event: event.clone() };
        let service = service::Service::new(Options { access, ..options }, listener, control)?;
        std::thread::Builder::new().name("assist-manager".into()).spawn(move || service.run())?;
        Ok(Handle { commands: send, event, socket, stopped: false })
    }
}

/// A running manager. Dropping it stops it.
#[derive(Debug)]
pub struct Handle {
    commands: Sender<Command>,
    event: Arc<OwnedFd>,
    socket: SocketFile,
    stopped: bool,
}

impl Handle {
    /// Where it listens.
    pub fn socket(&self) -> &Path {
        self.socket.path()
    }

    /// A program that is being started will read these files: the beginnings of those that have hints are brought in while
    /// it loads. Files that cannot be opened are the program's affair. Returns at once; a file system that hangs holds
    /// nobody up.
    pub fn expect(&self, paths: Vec<PathBuf>) -> io::Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        let (commands, event) = (self.commands.clone(), self.event.clone());
        let opening = move || {
            for path in paths {
                // Opening a device may do something; a pipe that takes its place meanwhile is not waited for.
                if !path.is_file() {
                    continue;
                }
                let file = std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
                let Ok(file) = file else { continue };
                if commands.send(Command::Expect(file.into())).is_err() {
                    return;
                }
                let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
            }
        };
        std::thread::Builder::new().name("assist-expect".into()).spawn(opening).map(drop)
    }

    /// What it did so far. Fails when it does not answer within five seconds, or has ended.
    pub fn report(&self) -> io::Result<Report> {
        self.ask(Command::Report)
    }

    /// Ends it: programs are let go, everything recorded is written out. What it did, as far as it could still say. What
    /// workers are in the middle of is not waited for.
    pub fn stop(mut self) -> io::Result<Report> {
        self.end()
    }

    fn end(&mut self) -> io::Result<Report> {
        self.stopped = true;
        self.ask(Command::Stop)
    }

    fn ask(&self, command: impl FnOnce(Sender<Report>) -> Command) -> io::Result<Report> {
        let (send, answer) = mpsc::channel();
        let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the manager has ended");
        self.commands.send(command(send)).map_err(|_| gone())?;
        rustix::io::write(&*self.event, &1u64.to_ne_bytes())?;
        answer.recv_timeout(ANSWER_WITHIN).map_err(|e| match e {
            mpsc::RecvTimeoutError::Timeout => io::Error::new(io::ErrorKind::TimedOut, "the manager does not answer"),
            mpsc::RecvTimeoutError::Disconnected => gone(),
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.stopped
            && let Err(e) = self.end()
        {
            tracing::warn!(error = %e, "the manager did not end in order");
        }
    }
}
