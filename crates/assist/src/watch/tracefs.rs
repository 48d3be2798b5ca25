//! Reads of chosen files, seen by the kernel: no library in the program, no delay for it. For static programs, Go and
//! those that run already. Needs root and tracefs.
//!
//! An instance of the kernel's trace of our own carries `mm_filemap_get_pages` and `mm_filemap_fault`, filtered in the
//! kernel by device and inode. Its buffer is bounded; when we are slow the oldest events are lost, never a program held.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::line::{Seen, parse};
use crate::backend::FileId;

const ROOT: &str = "/sys/kernel/tracing";
const EVENTS: [&str; 2] = ["mm_filemap_get_pages", "mm_filemap_fault"];
/// Buffer of each processor, KiB.
const BUFFER_KIB: u32 = 1024;
/// More files than this are not told apart in the kernel: their devices are watched whole.
const FILES_MAX: usize = 32;
/// A line is never longer; what is longer is not ours.
const LINE_BYTES: usize = 4096;

/// The kernel's trace of the reads of some files. Removed from the kernel when dropped.
#[derive(Debug)]
pub struct Tracefs {
    folder: PathBuf,
    pipe: File,
    rest: Vec<u8>,
    page_bytes: u64,
}

impl Tracefs {
    /// Begins to watch.
    pub fn new(files: &[FileId]) -> io::Result<Tracefs> {
        let root = Path::new(ROOT);
        if !root.join("instances").is_dir() {
            return Err(io::Error::new(
                ErrorKind::NotFound,
                format!("{ROOT} holds no tracefs: mount it with `mount -t tracefs nodev {ROOT}` as root"),
            ));
        }
        sweep(root);
        let folder = root.join("instances").join(format!("impresario-{}", std::process::id()));
        fs::create_dir(&folder).or_else(|e| if e.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })?;
        let made = Tracefs::arm(&folder, files);
        if made.is_err() {
            let _ = fs::remove_dir(&folder);
        }
        made
    }

    fn arm(folder: &Path, files: &[FileId]) -> io::Result<Tracefs> {
        fs::write(folder.join("buffer_size_kb"), BUFFER_KIB.to_string())?;
        let pipe = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(folder.join("trace_pipe"))?;
        let trace =
            Tracefs { folder: folder.into(), pipe, rest: Vec::new(), page_bytes: rustix::param::page_size() as u64 };
        trace.watch(files)?;
        Ok(trace)
    }

    /// Watches these files from now on, and no others.
    pub fn watch(&self, files: &[FileId]) -> io::Result<()> {
        for event in EVENTS {
            let folder = self.folder.join("events/filemap").join(event);
            fs::write(folder.join("enable"), "0")?;
            if files.is_empty() {
                continue;
            }
            fs::write(folder.join("filter"), filter(files))?;
            fs::write(folder.join("enable"), "1")?;
        }
        Ok(())
    }

    /// Tells of everything that was seen since the last call, without waiting; at most `events_max` events.
    pub fn drain(&mut self, events_max: usize, mut tell: impl FnMut(Seen)) -> io::Result<usize> {
        let mut buffer = [0; 16 << 10];
        let mut told = 0;
        while told < events_max {
            let n = match self.pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            for piece in buffer[..n].split_inclusive(|byte| *byte == b'\n') {
                self.rest.extend_from_slice(piece);
                if piece.ends_with(b"\n") {
                    if let Some(seen) =
                        std::str::from_utf8(&self.rest).ok().and_then(|l| parse(l.trim_end(), self.page_bytes))
                    {
                        told += 1;
                        tell(seen);
                    }
                    self.rest.clear();
                } else if self.rest.len() > LINE_BYTES {
                    self.rest.clear();
                }
            }
        }
        Ok(told)
    }
}

impl AsFd for Tracefs {
    /// Becomes readable when something was seen.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl Drop for Tracefs {
    fn drop(&mut self) {
        let _ = self.watch(&[]);
        // The pipe is still open here, which keeps the instance busy: the next manager sweeps it, or now by a
        // reopened null.
        if let Ok(null) = File::open("/dev/null") {
            self.pipe = null;
        }
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Instances of managers that were killed.
fn sweep(root: &Path) {
    let Ok(entries) = fs::read_dir(root.join("instances")) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|n| n.strip_prefix("impresario-")).and_then(|n| n.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            for event in EVENTS {
                let _ = fs::write(entry.path().join("events/filemap").join(event).join("enable"), "0");
            }
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The kernel's filter for some files.
fn filter(files: &[FileId]) -> String {
    // The kernel's own device number: 12 bits of major above 20 bits of minor.
    let device = |f: &FileId| u64::from(libc::major(f.dev)) << 20 | u64::from(libc::minor(f.dev));
    let mut terms: Vec<String> = if files.len() <= FILES_MAX {
        files.iter().map(|f| format!("(s_dev == {} && i_ino == {})", device(f), f.ino)).collect()
    } else {
        files.iter().map(|f| format!("s_dev == {}", device(f))).collect()
    };
    terms.sort();
    terms.dedup();
    terms.join(" || ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(major: u32, minor: u32, inode: u64) -> FileId {
        FileId { dev: libc::makedev(major, minor), ino: inode }
    }

    #[test]
    fn the_filter_names_files_and_beyond_a_number_their_devices() {
        assert_eq!(filter(&[number(7, 1, 12)]), "(s_dev == 7340033 && i_ino == 12)");
        assert_eq!(
            filter(&[number(7, 1, 12), number(0, 5, 3)]),
            "(s_dev == 5 && i_ino == 3) || (s_dev == 7340033 && i_ino == 12)"
        );
        let many: Vec<_> = (0..100).map(|inode| number(8, 0, inode)).collect();
        assert_eq!(filter(&many), "s_dev == 8388608");
    }
}
