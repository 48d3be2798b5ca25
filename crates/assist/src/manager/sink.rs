//! Where accesses go when programs are recorded.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use impresario_ring::Op;

use crate::backend::FileId;

/// A file that a program opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedFile {
    /// Number of this open file, used once.
    pub number: u64,
    /// Its path as the manager sees it.
    pub path: PathBuf,
    /// Device and inode.
    pub id: FileId,
    /// Its length when it was registered.
    pub size_bytes: u64,
    /// When its contents, or what is known about it, had changed last by then, in nanoseconds since 1970; 0 for earlier times.
    pub changed_unix_ns: u64,
    /// The program's process.
    pub pid: u32,
    /// The program's user.
    pub uid: u32,
    /// The program's name; empty when it is not known.
    pub program: Arc<str>,
}

/// One access of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedAccess {
    /// Number of the open file.
    pub file: u64,
    /// The program's process.
    pub pid: u32,
    /// Low bits of its thread's number.
    pub thread: u16,
    /// What was done.
    pub op: Op,
    /// Bits of [`impresario_ring::flag`].
    pub flags: u8,
    /// First byte.
    pub offset: u64,
    /// Bytes; at most 2³² − 1.
    pub len_bytes: u32,
    /// When it began, in nanoseconds of the program's monotonic clock.
    pub start_ns: u64,
    /// How long it took, in nanoseconds; at most 2³² − 1.
    pub duration_ns: u32,
}

/// Takes what programs do, from one thread, in the order in which each program did it. After an error nothing more is
/// recorded.
pub trait Sink: Send {
    /// A program opened a file.
    fn opened(&mut self, file: &RecordedFile) -> io::Result<()>;

    /// A program read, wrote, mapped, moved in or closed a file that was opened before.
    fn access(&mut self, access: &RecordedAccess) -> io::Result<()>;

    /// Nothing follows: write out what is held back.
    fn finish(&mut self) -> io::Result<()>;
}

/// A sink that stops at its first error.
pub(super) struct Recorder {
    sink: Option<Box<dyn Sink>>,
}

impl Recorder {
    pub(super) fn new(sink: Option<Box<dyn Sink>>) -> Recorder {
        Recorder { sink }
    }

    pub(super) fn tell(&mut self, tell: impl FnOnce(&mut dyn Sink) -> io::Result<()>) {
        if let Some(sink) = &mut self.sink
            && let Err(e) = tell(&mut **sink)
        {
            tracing::error!(error = %e, "recording ends here");
            self.sink = None;
        }
    }
}
