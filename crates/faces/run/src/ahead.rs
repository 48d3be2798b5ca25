//! What programs will read, foreseen beside them: a thread hears what they open and read, and has the data servers asked for what
//! comes next. No program waits for it. What it cannot keep up with it does not hear.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_client::File;
use rustc_hash::FxHashMap;

use crate::open::Open;

/// Messages that wait for the thread at most.
const WAITING_MAX: usize = 1024;
/// Files that are followed at a time.
const FILES_MAX: usize = 1024;
/// How often is looked which of them were closed.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// A file that a program has opened to read it.
#[derive(Debug)]
pub struct Opened {
    /// Its number in this run, used once.
    pub number: u64,
    /// The program's process; `None` of one in another namespace.
    pub pid: Option<u32>,
    /// As programs know it.
    pub path: PathBuf,
    /// Its length.
    pub size_bytes: u64,
}

/// What a program has read of such a file.
#[derive(Debug)]
pub struct HasRead {
    /// The file's number.
    pub number: u64,
    /// The program's process.
    pub pid: Option<u32>,
    /// Not empty.
    pub bytes: Range<u64>,
    /// How long it took.
    pub took: Duration,
    /// When it had ended.
    pub ended: Instant,
}

/// Foresees what programs read, and asks for it ([`File::prefetch`]). One thread calls it, which may wait for servers.
pub trait Foresees: Send {
    /// A program opened a file.
    fn opened(&mut self, file: &File, opened: &Opened);
    /// A program read a file that it opened.
    fn read(&mut self, file: &File, read: &HasRead);
    /// A file is closed; this is said later.
    fn closed(&mut self, number: u64);
}

enum Told {
    Opened(Weak<Open>, Opened),
    Read(HasRead),
}

/// Tells the thread.
pub(crate) struct Ahead(SyncSender<Told>);

impl Ahead {
    /// Starts the thread, which ends with this.
    pub(crate) fn start(foresees: Box<dyn Foresees>) -> std::io::Result<Ahead> {
        let (tell, told) = sync_channel(WAITING_MAX);
        std::thread::Builder::new().name("ahead".into()).spawn(move || Followed::new(foresees).follow(&told))?;
        Ok(Ahead(tell))
    }

    pub(crate) fn opened(&self, open: &Arc<Open>, opened: Opened) {
        let _ = self.0.try_send(Told::Opened(Arc::downgrade(open), opened));
    }

    pub(crate) fn read(&self, read: HasRead) {
        let _ = self.0.try_send(Told::Read(read));
    }
}

/// The files that are followed.
struct Followed {
    foresees: Box<dyn Foresees>,
    files: FxHashMap<u64, Weak<Open>>,
}

impl Followed {
    fn new(foresees: Box<dyn Foresees>) -> Followed {
        Followed { foresees, files: FxHashMap::default() }
    }

    fn follow(mut self, told: &Receiver<Told>) {
        let mut swept = Instant::now();
        loop {
            let next = match self.files.is_empty() {
                true => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => told.recv_timeout(SWEEP_EVERY),
            };
            match next {
                Ok(Told::Opened(open, opened)) => self.opened(open, &opened),
                Ok(Told::Read(read)) => {
                    let open = self.files.get(&read.number).and_then(Weak::upgrade);
                    if let Some(file) = open.as_deref().and_then(|open| open.file().ok()) {
                        self.foresees.read(file, &read);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if swept.elapsed() >= SWEEP_EVERY {
                self.sweep();
                swept = Instant::now();
            }
        }
    }

    fn opened(&mut self, open: Weak<Open>, opened: &Opened) {
        if self.files.len() >= FILES_MAX {
            self.sweep();
        }
        let Some(there) = open.upgrade().filter(|_| self.files.len() < FILES_MAX) else { return };
        if let Ok(file) = there.file() {
            self.files.insert(opened.number, open);
            self.foresees.opened(file, opened);
        }
    }

    /// Forgets files that are closed.
    fn sweep(&mut self) {
        let closed = |open: &Weak<Open>| open.strong_count() == 0;
        let gone: Vec<u64> = self.files.iter().filter(|(_, open)| closed(open)).map(|(number, _)| *number).collect();
        for number in gone {
            self.files.remove(&number);
            self.foresees.closed(number);
        }
    }
}
