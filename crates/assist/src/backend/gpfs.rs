//! GPFS (IBM Storage Scale): hints through its library, loaded at run time, here or [inside](super::inside) the program.
//!
//! The *multiple access range* hint takes up to 8 ranges to bring in, each within one block of the file system, and up
//! to 8 to give back. GPFS takes on a prefix of the ranges and says how many; each one taken on must be given back
//! later, or GPFS stops taking any. So this backend remembers for each open file what was taken on, gives it back when
//! it is released, and asks again later for what was not taken on.
//!
//! It has not been tried on a real GPFS; tests load a recorder in the place of the library. GPFS has been seen to follow
//! the hints of one file for each process only (Congiu et al., 2014, IV.C).

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_gpfs::{BlockRange, Hint, Library};
use impresario_ring::order::Task;
use rustc_hash::FxHashMap;

use super::{Brought, FileId, HintBackend, HintedFile, Inside, blocks};
use crate::config::ReadAhead;

/// Ranges of an open file that wait to be taken on; more are dropped, oldest first.
const WAITING_MAX: usize = 64;

/// Who makes the calls.
trait Giver: Send + Sync + Debug {
    /// How many ranges were taken on: a prefix.
    fn give(&self, fd: BorrowedFd<'_>, hint: &Hint) -> io::Result<u32>;

    /// Whether it cannot make any now. Then what GPFS holds by its calls is unknown, and forgotten here.
    fn is_gone(&self) -> bool {
        false
    }
}

impl Giver for Library {
    fn give(&self, fd: BorrowedFd<'_>, hint: &Hint) -> io::Result<u32> {
        Library::give(self, fd, hint)
    }
}

impl Giver for Inside {
    fn is_gone(&self) -> bool {
        !self.is_there()
    }

    fn give(&self, fd: BorrowedFd<'_>, hint: &Hint) -> io::Result<u32> {
        self.ask(fd, &Task::Hint(*hint))
    }
}

/// What GPFS holds for an open file on our behalf.
#[derive(Debug)]
struct Held {
    /// The number of our descriptor of it, while the program has it open.
    number: RawFd,
    /// The same open file: others who read the file may let go what this one holds.
    fd: OwnedFd,
    giver: Arc<dyn Giver>,
    block_bytes: u64,
    taken_on: VecDeque<BlockRange>,
    to_give_back: VecDeque<BlockRange>,
    waiting: VecDeque<BlockRange>,
}

/// All open files of a file.
type Opens = Arc<Mutex<Vec<Held>>>;

/// Hints of GPFS.
#[derive(Debug)]
pub struct Gpfs {
    name: &'static str,
    /// `None`: the program is asked.
    here: Option<Arc<Library>>,
    files: Mutex<FxHashMap<FileId, Opens>>,
}

impl Gpfs {
    /// Loads the library, which stays loaded. Fails with the loader's own words.
    pub fn load(library: &CStr) -> Result<Gpfs, String> {
        Ok(Gpfs { name: "gpfs", here: Some(Arc::new(Library::load(library)?)), files: Mutex::default() })
    }

    /// For files whose programs are [asked](HintedFile::inside).
    pub fn inside() -> Gpfs {
        Gpfs { name: "gpfs-inside", here: None, files: Mutex::default() }
    }

    fn giver(&self, file: HintedFile<'_>) -> io::Result<Arc<dyn Giver>> {
        match (&self.here, file.inside) {
            (Some(library), _) => Ok(library.clone()),
            (None, Some(inside)) => Ok(inside.clone()),
            (None, None) => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn opens(&self, id: FileId) -> Option<Opens> {
        self.files.lock().get(&id).cloned()
    }

    fn begin(&self, file: HintedFile<'_>) -> io::Result<Held> {
        let giver = self.giver(file)?;
        if self.here.is_none() {
            // A manager that was killed may have left ranges taken on, and no other thread of the program gives hints.
            giver.give(file.fd, &Hint::Cancel)?;
        }
        Ok(Held {
            number: file.fd.as_raw_fd(),
            fd: file.fd.try_clone_to_owned()?,
            giver,
            block_bytes: rustix::fs::fstat(file.fd)?.st_blksize.clamp(4096, 1 << 30) as u64,
            taken_on: VecDeque::new(),
            to_give_back: VecDeque::new(),
            waiting: VecDeque::new(),
        })
    }
}

impl Held {
    fn bytes(&self, range: &BlockRange) -> Range<u64> {
        let start = range.block as u64 * self.block_bytes + range.start as u64;
        start..start + range.length as u64
    }

    /// Asks for what waits and gives back what is done with, until all is said or GPFS takes no more.
    fn settle(&mut self) -> io::Result<Brought> {
        let mut brought = Brought::default();
        while !(self.waiting.is_empty() && self.to_give_back.is_empty()) {
            let access: impresario_gpfs::Ranges = self.waiting.iter().copied().collect();
            let release: impresario_gpfs::Ranges = self.to_give_back.iter().copied().collect();
            let accepted = self.giver.give(self.fd.as_fd(), &Hint::Ranges { access, release })?;
            let accepted = (accepted as usize).min(access.len());
            self.to_give_back.drain(..release.len());
            brought.calls += 1;
            for range in self.waiting.drain(..accepted) {
                brought.asked_bytes += range.length as u64;
                self.taken_on.push_back(range);
            }
            if accepted == 0 && !access.is_empty() && self.to_give_back.is_empty() {
                break;
            }
        }
        Ok(brought)
    }

    fn release(&mut self, range: &Range<u64>) -> io::Result<Brought> {
        let inside = |held: &Held, r: &BlockRange| {
            let bytes = held.bytes(r);
            range.start <= bytes.start && bytes.end <= range.end
        };
        let (back, keep): (VecDeque<_>, _) = self.taken_on.iter().copied().partition(|r| inside(self, r));
        let waiting = self.waiting.iter().copied().filter(|r| !inside(self, r)).collect();
        (self.taken_on, self.waiting) = (keep, waiting);
        self.to_give_back.extend(back);
        self.settle()
    }

    fn give_all_back(mut self) {
        self.waiting.clear();
        self.to_give_back.extend(std::mem::take(&mut self.taken_on));
        if let Err(e) = self.settle() {
            tracing::debug!(error = %e, "GPFS did not take ranges back");
        }
    }
}

impl HintBackend for Gpfs {
    fn name(&self) -> &'static str {
        self.name
    }

    fn waits(&self) -> bool {
        false
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let shared = self.files.lock().entry(file.id).or_default().clone();
        let opens = &mut *shared.lock();
        let number = file.fd.as_raw_fd();
        let at = match opens.iter().position(|held| held.number == number) {
            Some(at) => at,
            None => {
                opens.push(self.begin(file)?);
                opens.len() - 1
            }
        };
        let held = &mut opens[at];
        for piece in blocks(range, held.block_bytes) {
            let (block, start) = (piece.start / held.block_bytes, piece.start % held.block_bytes);
            held.waiting.push_back(BlockRange::new(block as i64, start as i32, (piece.end - piece.start) as i32));
        }
        let too_many = held.waiting.len().saturating_sub(WAITING_MAX);
        held.waiting.drain(..too_many);
        let settled = held.settle();
        opens.retain(|held| !held.giver.is_gone());
        settled
    }

    fn dont_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(()); // a length of 0 would mean the rest of the file
        }
        if let Some(shared) = self.opens(file.id) {
            // Whichever program's read brought it in.
            let mut opens = shared.lock();
            opens.retain(|held| !held.giver.is_gone());
            let released = opens.iter_mut().map(|held| held.release(&range)).collect::<Vec<_>>();
            released.into_iter().collect::<io::Result<Vec<_>>>()?;
        }
        let start = range.start.min(i64::MAX as u64) as i64;
        let bytes = range.end.saturating_sub(range.start).min(i64::MAX as u64) as i64;
        self.giver(file)?.give(file.fd, &Hint::Free { start, bytes }).map(|_| ())
    }

    fn read_ahead(&self, _: HintedFile<'_>, _: ReadAhead) -> io::Result<()> {
        // GPFS finds sequential and strided patterns by itself and has no such advice.
        Ok(())
    }

    fn left(&self, file: HintedFile<'_>) {
        let Some(shared) = self.opens(file.id) else { return };
        let number = file.fd.as_raw_fd();
        let gone: Vec<Held> = shared.lock().extract_if(.., |held| held.number == number).collect();
        gone.into_iter().for_each(Held::give_all_back);
    }

    fn closed(&self, file: HintedFile<'_>) {
        let Some(shared) = self.files.lock().remove(&file.id) else { return };
        let gone = std::mem::take(&mut *shared.lock());
        gone.into_iter().for_each(Held::give_all_back);
    }
}
