//! The table of a program's descriptors: which are of interest, under which number. Lock-free; a look at a descriptor
//! that is known takes two loads.
//!
//! An entry holds the generation in which its consumer spoke and what it said. An entry of another generation is as good
//! as empty: after a reconnection every descriptor is asked about again at its next use, and in a forked child too.
//! Descriptors beyond [`DESCRIPTORS`] are not observed.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use impresario_ring::Op;
use rustix::fs::Stat;

use crate::consumer::{Claim, Consumer, Event, Occasion};
use crate::process::{coarse_ns, quietly};

/// Descriptors below this number are observed.
pub const DESCRIPTORS: usize = 65_536;

/// How long an entry is trusted before the descriptor's identity is looked at again, in nanoseconds: programs can close
/// descriptors in ways that cannot be observed.
const TRUST_NS: u64 = 100_000_000;

const IGNORED: u32 = 1;
/// Of [`Claim::PassOver`].
const PASSED_OVER: u32 = u32::MAX;

struct Entry {
    /// Generation in the upper half; in the lower 0 for unknown, [`IGNORED`], [`PASSED_OVER`], or the file's number.
    word: AtomicU64,
    /// The file behind the descriptor when it was claimed.
    identity: AtomicU64,
    /// When the identity was last looked at.
    seen_ns: AtomicU64,
    /// Where the descriptor's position was last seen, for streams that move it unseen.
    position: AtomicU64,
}

impl Entry {
    const fn new() -> Entry {
        Entry {
            word: AtomicU64::new(0),
            identity: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
            position: AtomicU64::new(0),
        }
    }
}

/// The table. It is large (2 MiB of zeros): make it static.
pub struct Table<C> {
    consumer: C,
    highest: AtomicU64,
    entries: [Entry; DESCRIPTORS],
}

/// A descriptor of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    fd: i32,
    generation: u32,
    file: u32,
}

impl Watched {
    /// The descriptor.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// The number that the consumer gave.
    pub fn file(&self) -> u32 {
        self.file
    }

    /// All of it in one number that is not 0, for [`Table::recall`].
    pub fn token(&self) -> u64 {
        // Descriptors of the table have 16 bits.
        u64::from(self.generation as u16) << 48 | u64::from(self.fd as u16) << 32 | u64::from(self.file)
    }
}

const _: () = assert!(DESCRIPTORS <= 1 << 16);

impl<C: Consumer> Table<C> {
    /// An empty table.
    pub const fn new(consumer: C) -> Table<C> {
        let entries = [const { Entry::new() }; DESCRIPTORS];
        Table { consumer, highest: AtomicU64::new(0), entries }
    }

    /// Who is told.
    pub fn consumer(&self) -> &C {
        &self.consumer
    }

    /// Whether the descriptor is of interest now. Asks the consumer at the first use.
    #[inline]
    pub fn watch(&self, fd: i32) -> Option<Watched> {
        let generation = self.consumer.generation();
        let word = self.entries.get(fd as usize)?.word.load(Acquire);
        Self::known(word, fd, generation).unwrap_or_else(|| self.ask(fd, generation, Occasion::Used))
    }

    /// The descriptor of a [token](Watched::token), unless it was closed or became another file since. For files that are
    /// used by another way than their descriptor.
    pub fn recall(&self, token: u64) -> Option<Watched> {
        let fd = i32::from((token >> 32) as u16);
        let word = self.entries.get(fd as usize)?.word.load(Acquire);
        Self::known(word, fd, self.consumer.generation())?.filter(|watched| watched.token() == token)
    }

    /// Whether the consumer has said in this generation what it wants of the descriptor.
    pub fn is_known(&self, fd: i32) -> bool {
        let word = self.entries.get(fd as usize).map_or(0, |entry| entry.word.load(Acquire));
        Self::known(word, fd, self.consumer.generation()).is_some()
    }

    /// Whether the consumer wants the accesses of the descriptor; it is not asked.
    pub fn is_watched(&self, fd: i32) -> bool {
        let word = self.entries.get(fd as usize).map_or(0, |entry| entry.word.load(Acquire));
        Self::known(word, fd, self.consumer.generation()).flatten().is_some()
    }

    /// What a word of the table says of a descriptor; `None` when it says nothing in this generation.
    #[inline]
    fn known(word: u64, fd: i32, generation: u32) -> Option<Option<Watched>> {
        let file = word as u32;
        let says = (word >> 32) as u32 == generation && file != 0;
        says.then(|| (file != IGNORED).then_some(Watched { fd, generation, file }))
    }

    /// Whether the consumer gave this number to a file.
    fn is_number(value: u32) -> bool {
        (Claim::FIRST..PASSED_OVER).contains(&value)
    }

    #[cold]
    #[inline(never)]
    fn ask(&self, fd: i32, generation: u32, occasion: Occasion) -> Option<Watched> {
        quietly(|| {
            if generation == 0 {
                self.consumer.idle();
                // Just connected: what is asked about now is of the new generation at the next use.
                return None;
            }
            if !self.consumer.answers() || !self.consumer.here() {
                return None;
            }
            let entry = self.entries.get(fd as usize)?;
            let before = entry.word.load(Acquire);
            if let Some(known) = Self::known(before, fd, generation) {
                // Another thread has asked since the caller looked: a second claim would replace the first unreleased.
                return known;
            }
            let stat = stat(fd)?;
            let value = match self.consumer.claim(fd, &stat, occasion) {
                Claim::Ignore => IGNORED,
                Claim::Watch(file) => file,
                Claim::PassOver if occasion == Occasion::Opened => PASSED_OVER,
                Claim::PassOver | Claim::Later => return None,
            };
            let after = u64::from(generation) << 32 | u64::from(value);
            self.highest.fetch_max(fd as u64, Relaxed);
            if entry.word.compare_exchange(before, after, AcqRel, Acquire).is_err() {
                // Another thread was faster, or the descriptor was closed meanwhile.
                if Self::is_number(value) {
                    self.consumer.release(generation, value);
                }
                return Self::known(entry.word.load(Acquire), fd, generation).flatten();
            }
            entry.identity.store(identity(&stat), Relaxed);
            entry.seen_ns.store(coarse_ns(), Relaxed);
            if value != IGNORED {
                // What is passed over is at its beginning, or its position is of no interest.
                let position = if Self::is_number(value) { position(fd) } else { None };
                entry.position.store(position.unwrap_or(0), Relaxed);
            }
            (value != IGNORED).then_some(Watched { fd, generation, file: value })
        })
    }

    /// The program has just opened this descriptor.
    #[inline]
    pub fn opened(&self, fd: i32) {
        if fd < 0 {
            return;
        }
        let generation = self.consumer.generation();
        self.forget(fd);
        // With no generation, too: an open is an occasion to connect.
        self.ask(fd, generation, Occasion::Opened);
    }

    /// The program got this descriptor in another way, or it is about to be closed: what was known of it is void.
    #[inline]
    pub fn forget(&self, fd: i32) {
        let Some(entry) = self.entries.get(fd as usize) else { return };
        if entry.word.load(Relaxed) != 0 {
            self.forget_known(entry);
        }
    }

    #[cold]
    #[inline(never)]
    fn forget_known(&self, entry: &Entry) {
        quietly(|| {
            if self.consumer.here() {
                self.replace(entry, 0);
            }
        });
    }

    /// What was known is void.
    fn replace(&self, entry: &Entry, by: u64) {
        let word = entry.word.swap(by, AcqRel);
        let (generation, value) = ((word >> 32) as u32, word as u32);
        if Self::is_number(value) && generation == self.consumer.generation() {
            self.consumer.release(generation, value);
        }
    }

    /// The consumer is to have nothing more of this descriptor's open file, nor ask for it.
    pub fn leave(&self, fd: i32) {
        let generation = self.consumer.generation();
        let Some(entry) = self.entries.get(fd as usize).filter(|_| generation != 0) else { return };
        if self.consumer.here() {
            self.highest.fetch_max(fd as u64, Relaxed);
            self.replace(entry, u64::from(generation) << 32 | u64::from(IGNORED));
        }
    }

    /// [`forget`](Table::forget) for every descriptor from `first` to `last`.
    pub fn forget_range(&self, first: u32, last: u32) {
        let highest = self.highest.load(Relaxed).min(DESCRIPTORS as u64 - 1);
        for fd in u64::from(first)..=u64::from(last).min(highest) {
            self.forget(fd as i32);
        }
    }

    /// The open file of this descriptor must not be shared from now on: the consumer claims it apart, or wants nothing
    /// more of it.
    pub fn set_apart(&self, watched: Watched) {
        let is_apart = Self::is_number(watched.file) && self.consumer.is_apart(watched.file);
        if is_apart || !self.consumer.here() {
            return;
        }
        let Some(entry) = self.entries.get(watched.fd as usize) else { return };
        let value = match self.consumer.claim_apart(watched.fd) {
            Claim::Watch(file) => file,
            Claim::Ignore | Claim::PassOver | Claim::Later => IGNORED,
        };
        let (word, left) = (u64::from(watched.generation) << 32, u64::from(value));
        if entry.word.compare_exchange(word | u64::from(watched.file), word | left, AcqRel, Acquire).is_ok() {
            if Self::is_number(watched.file) {
                self.consumer.release(watched.generation, watched.file);
            }
        } else if value != IGNORED {
            // Closed, or claimed by another thread meanwhile.
            self.consumer.release(watched.generation, value);
        }
    }

    /// Tells what the program did, unless it is [passed over](Table::passes_over).
    #[inline]
    pub fn tell(&self, watched: Watched, event: Event) {
        if !self.passes_over(watched, event) {
            self.tell_for_certain(watched, event);
        }
    }

    /// Whether what the program did need not be told, since the descriptor was passed over when it was opened. It is counted then. Where
    /// a read is in the file does not matter: its place need not be found out before.
    #[inline]
    pub fn passes_over(&self, watched: Watched, event: Event) -> bool {
        watched.file == PASSED_OVER && self.consumer.passes_over(event)
    }

    /// Tells what the program did and is not passed over. Now and then makes sure that the descriptor is still the file that was claimed.
    #[inline]
    pub fn tell_for_certain(&self, watched: Watched, event: Event) {
        let Some(entry) = self.entries.get(watched.fd as usize) else { return };
        if watched.file == PASSED_OVER {
            return self.claim_and_tell(watched, entry, event);
        }
        if event.start_ns.saturating_sub(entry.seen_ns.load(Relaxed)) > TRUST_NS && !self.same(watched, entry, event) {
            return;
        }
        self.consumer.tell(watched.generation, watched.file, event);
    }

    /// A descriptor that was passed over when it was opened is asked about now. Of an output one write says enough.
    #[cold]
    #[inline(never)]
    fn claim_and_tell(&self, watched: Watched, entry: &Entry, event: Event) {
        if !self.consumer.here() {
            return;
        }
        if event.op == Op::Write {
            return quietly(|| self.tell_of_output(watched, entry, event));
        }
        let word = u64::from(watched.generation) << 32;
        let _ = entry.word.compare_exchange(word | u64::from(PASSED_OVER), 0, AcqRel, Acquire);
        // Unless it is closed, or there is no answer now.
        if let Some(claimed) = self.watch(watched.fd).filter(|claimed| Self::is_number(claimed.file)) {
            self.consumer.tell(claimed.generation, claimed.file, event);
        }
    }

    fn tell_of_output(&self, watched: Watched, entry: &Entry, event: Event) {
        let word = |value: u32| u64::from(watched.generation) << 32 | u64::from(value);
        let turn = |from, to| entry.word.compare_exchange(word(from), word(to), AcqRel, Acquire).is_ok();
        // Threads that write to it meanwhile find it left already.
        if !turn(PASSED_OVER, IGNORED) {
            return;
        }
        match stat(watched.fd).map(|stat| self.consumer.claim(watched.fd, &stat, Occasion::Written)) {
            Some(Claim::Watch(file)) => {
                // A descriptor closed meanwhile may be another file's, which is not written to.
                if entry.word.load(Acquire) == word(IGNORED) {
                    self.consumer.tell(watched.generation, file, event);
                }
                self.consumer.release(watched.generation, file);
            }
            Some(Claim::Ignore) => {}
            // The next write tries again.
            Some(Claim::PassOver | Claim::Later) | None => _ = turn(IGNORED, PASSED_OVER),
        }
    }

    #[cold]
    #[inline(never)]
    fn same(&self, watched: Watched, entry: &Entry, event: Event) -> bool {
        let same = quietly(|| stat(watched.fd)).as_ref().map(identity) == Some(entry.identity.load(Relaxed));
        if same {
            entry.seen_ns.store(event.start_ns, Relaxed);
        } else {
            self.forget(watched.fd);
        }
        same
    }

    /// Where the descriptor's position was last seen.
    pub fn position(&self, watched: Watched) -> u64 {
        self.entries.get(watched.fd as usize).map_or(0, |e| e.position.load(Acquire))
    }

    /// Notes where the descriptor's position is.
    pub fn set_position(&self, watched: Watched, position: u64) {
        if let Some(entry) = self.entries.get(watched.fd as usize) {
            entry.position.store(position, Release);
        }
    }
}

/// Tells one open file from another as long as both exist.
fn identity(stat: &Stat) -> u64 {
    stat.st_dev.rotate_left(40) ^ stat.st_ino ^ u64::from(stat.st_mode) << 47
}

fn stat(fd: i32) -> Option<Stat> {
    rustix::fs::fstat(borrow(fd)?).ok()
}

fn position(fd: i32) -> Option<u64> {
    rustix::fs::seek(borrow(fd)?, rustix::fs::SeekFrom::Current(0)).ok()
}

fn borrow(fd: i32) -> Option<std::os::fd::BorrowedFd<'static>> {
    // SAFETY: used for one system call, which fails cleanly when the program closes the number meanwhile.
    (fd >= 0).then(|| unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32};

    /// Watches everything, in writing.
    struct Notes {
        generation: AtomicU32,
        next: AtomicU32,
        here: AtomicBool,
        ignore: AtomicBool,
        /// What is opened is passed over, as long as it takes no time.
        pass_over: AtomicBool,
        /// Happens while a claim is under way.
        meanwhile: Mutex<Option<fn()>>,
        lines: Mutex<Vec<String>>,
    }

    impl Notes {
        const fn new() -> Notes {
            Notes {
                generation: AtomicU32::new(1),
                next: AtomicU32::new(Claim::FIRST),
                here: AtomicBool::new(true),
                ignore: AtomicBool::new(false),
                pass_over: AtomicBool::new(false),
                meanwhile: Mutex::new(None),
                lines: Mutex::new(Vec::new()),
            }
        }

        fn note(&self, line: String) {
            self.lines.lock().unwrap().push(line);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.lines.lock().unwrap())
        }
    }

    impl Consumer for Notes {
        fn generation(&self) -> u32 {
            self.generation.load(Relaxed)
        }
        fn idle(&self) {
            self.note("idle".into());
        }
        fn wants(&self, _: Op) -> bool {
            true
        }
        fn answers(&self) -> bool {
            true
        }
        fn claim(&self, _: i32, _: &Stat, occasion: Occasion) -> Claim {
            if self.ignore.load(Relaxed) {
                return Claim::Ignore;
            }
            if self.pass_over.load(Relaxed) {
                return Claim::PassOver;
            }
            let file = self.next.fetch_add(1, Relaxed);
            if let Some(meanwhile) = *self.meanwhile.lock().unwrap() {
                meanwhile();
            }
            self.note(match occasion {
                Occasion::Opened => format!("claim {file} opened"),
                Occasion::Used => format!("claim {file}"),
                Occasion::Written => format!("claim {file} written"),
            });
            Claim::Watch(file)
        }
        fn claim_apart(&self, _: i32) -> Claim {
            if self.ignore.load(Relaxed) {
                return Claim::Ignore;
            }
            let file = self.next.fetch_add(1, Relaxed);
            self.note(format!("claim {file} apart"));
            Claim::Watch(file)
        }
        fn tell(&self, generation: u32, file: u32, event: Event) {
            self.note(format!("tell {generation} {file} {}+{}", event.offset, event.len_bytes));
        }
        fn passes_over(&self, event: Event) -> bool {
            self.note(format!("pass over {}", event.offset));
            event.duration_ns == 0
        }
        fn release(&self, _: u32, file: u32) {
            self.note(format!("release {file}"));
        }
        fn here(&self) -> bool {
            self.here.load(Relaxed)
        }
    }

    fn read(offset: u64, start_ns: u64) -> Event {
        Event { op: Op::Read, flags: 0, offset, len_bytes: 10, start_ns, duration_ns: 1 }
    }

    #[test]
    fn descriptors_are_asked_about_once_and_released_when_closed() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        TABLE.opened(fd);
        let watched = TABLE.watch(fd).unwrap();
        assert_eq!((watched.fd(), watched.file()), (fd, 2));
        TABLE.tell(watched, read(5, 1));
        TABLE.forget(fd);
        assert_eq!(TABLE.consumer().take(), ["claim 2 opened", "tell 1 2 5+10", "release 2"]);
        // Unknown again: met at its next use.
        assert_eq!(TABLE.watch(fd).unwrap().file(), 3);
        TABLE.forget_range(0, u32::MAX);
        assert_eq!(TABLE.consumer().take(), ["claim 3", "release 3"]);
    }

    #[test]
    fn what_is_passed_over_is_asked_about_when_it_takes_time() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        let fast = |offset| Event { duration_ns: 0, ..read(offset, 1) };
        notes.pass_over.store(true, Relaxed);
        assert_eq!(TABLE.watch(fd), None, "only what was just opened");
        TABLE.opened(fd);
        let passed_over = TABLE.watch(fd).unwrap();
        TABLE.tell(passed_over, fast(0));
        TABLE.tell(passed_over, read(10, 1));
        assert_eq!(TABLE.watch(fd), None, "there is no answer now");
        TABLE.forget(fd);
        TABLE.opened(fd);
        let passed_over = TABLE.watch(fd).unwrap();
        notes.pass_over.store(false, Relaxed);
        TABLE.tell(passed_over, fast(20));
        TABLE.tell(passed_over, read(30, 1));
        TABLE.tell(TABLE.watch(fd).unwrap(), fast(40));
        // By a thread that looked before it was claimed.
        TABLE.tell(passed_over, read(50, 1));
        let claimed = ["pass over 20", "pass over 30", "claim 2", "tell 1 2 30+10", "tell 1 2 40+10"];
        let all = [&["pass over 0", "pass over 10"][..], &claimed, &["pass over 50", "tell 1 2 50+10"]].concat();
        assert_eq!(notes.take(), all);
        TABLE.forget(fd);
        notes.pass_over.store(true, Relaxed);
        TABLE.opened(fd);
        TABLE.forget(fd);
        TABLE.opened(fd);
        notes.pass_over.store(false, Relaxed);
        TABLE.set_apart(TABLE.watch(fd).unwrap());
        TABLE.forget(fd);
        assert_eq!(notes.take(), ["release 2", "claim 3 apart", "release 3"], "there is nothing to release of them");
    }

    /// To tell of each write would cost a program that copies as much as the copying.
    #[test]
    fn an_output_is_told_of_once() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        let write = |offset| Event { op: Op::Write, ..read(offset, 1) };
        notes.pass_over.store(true, Relaxed);
        TABLE.opened(fd);
        let passed_over = TABLE.watch(fd).unwrap();
        TABLE.tell(passed_over, write(0));
        assert_eq!(TABLE.watch(fd), Some(passed_over), "there was no answer: the next write asks again");
        notes.pass_over.store(false, Relaxed);
        TABLE.tell(passed_over, write(10));
        assert_eq!(TABLE.watch(fd), None);
        // By a thread that looked before.
        TABLE.tell(passed_over, write(20));
        TABLE.forget(fd);
        let asked = ["pass over 0", "pass over 10", "claim 2 written", "tell 1 2 10+10", "release 2", "pass over 20"];
        assert_eq!(notes.take(), asked);
    }

    /// Another thread may close the descriptor while the output is asked about; its number may be another file's then.
    #[test]
    fn a_write_is_not_told_of_a_file_that_took_its_number() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        static FD: AtomicI32 = AtomicI32::new(-1);
        FD.store(file.as_raw_fd(), Relaxed);
        notes.pass_over.store(true, Relaxed);
        TABLE.opened(file.as_raw_fd());
        let passed_over = TABLE.watch(file.as_raw_fd()).unwrap();
        notes.pass_over.store(false, Relaxed);
        *notes.meanwhile.lock().unwrap() = Some(|| TABLE.forget(FD.load(Relaxed)));
        TABLE.tell(passed_over, Event { op: Op::Write, ..read(0, 1) });
        assert_eq!(notes.take(), ["pass over 0", "claim 2 written", "release 2"]);
    }

    #[test]
    fn what_must_not_be_shared_is_claimed_apart_or_left() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        TABLE.opened(fd);
        let shared = TABLE.watch(fd).unwrap();
        TABLE.set_apart(shared);
        assert_eq!(notes.take(), ["claim 2 opened", "claim 3 apart", "release 2"]);
        let apart = TABLE.watch(fd).unwrap();
        assert_eq!(apart.file(), 3);
        TABLE.set_apart(shared);
        assert_eq!(notes.take(), ["claim 4 apart", "release 4"], "the descriptor is another file by now");
        notes.ignore.store(true, Relaxed);
        TABLE.set_apart(apart);
        assert_eq!(notes.take(), ["release 3"]);
        assert!(TABLE.watch(fd).is_none());
    }

    #[test]
    fn another_generation_asks_again_and_none_only_knocks() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        let old = TABLE.watch(fd).unwrap();
        notes.generation.store(0, Relaxed);
        assert_eq!(TABLE.watch(fd), None);
        notes.generation.store(2, Relaxed);
        let new = TABLE.watch(fd).unwrap();
        assert!(old.file() != new.file());
        TABLE.forget(fd);
        assert_eq!(notes.take(), ["claim 2", "idle", "claim 3", "release 3"]);
    }

    #[test]
    fn a_number_that_became_another_file_unseen_is_noticed() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let (one, two) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let fd = one.as_raw_fd();
        let watched = TABLE.watch(fd).unwrap();
        let began_ns = coarse_ns();
        TABLE.tell(watched, read(0, began_ns + TRUST_NS + 1));
        let mut place = std::os::fd::OwnedFd::from(one);
        rustix::io::dup2(&two, &mut place).unwrap();
        TABLE.tell(watched, read(20, began_ns + TRUST_NS + 2));
        TABLE.tell(watched, read(40, began_ns + 3 * TRUST_NS));
        assert_eq!(TABLE.consumer().take(), ["claim 2", "tell 1 2 0+10", "tell 1 2 20+10", "release 2"]);
        assert_eq!(TABLE.watch(fd).unwrap().file(), 3);
    }

    #[test]
    fn a_token_is_of_the_file_that_it_was_made_of_and_no_other() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let file = tempfile::tempfile().unwrap();
        let watched = TABLE.watch(file.as_raw_fd()).unwrap();
        assert_eq!((TABLE.recall(watched.token()), TABLE.recall(0)), (Some(watched), None));
        // Closed, and open again under the same number.
        TABLE.forget(file.as_raw_fd());
        assert_eq!(TABLE.recall(watched.token()), None);
        let again = TABLE.watch(file.as_raw_fd()).unwrap();
        assert_eq!((TABLE.recall(watched.token()), TABLE.recall(again.token())), (None, Some(again)));
        TABLE.consumer().generation.store(2, Relaxed);
        assert_eq!(TABLE.recall(again.token()), None);
    }

    #[test]
    fn what_a_child_in_the_same_memory_does_is_not_noted() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let watched = TABLE.watch(file.as_raw_fd()).unwrap();
        notes.here.store(false, Relaxed);
        TABLE.forget(file.as_raw_fd());
        TABLE.opened(file.as_raw_fd());
        notes.here.store(true, Relaxed);
        assert_eq!(TABLE.watch(file.as_raw_fd()), Some(watched));
        assert_eq!(notes.take(), ["claim 2"]);
    }

    #[test]
    fn a_descriptor_left_stays_ignored_until_it_is_closed() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let notes = TABLE.consumer();
        let file = tempfile::tempfile().unwrap();
        let watched = TABLE.watch(file.as_raw_fd()).unwrap();
        notes.ignore.store(true, Relaxed);
        TABLE.set_apart(watched);
        assert_eq!((TABLE.watch(file.as_raw_fd()), TABLE.watch(file.as_raw_fd())), (None, None));
        let other = tempfile::tempfile().unwrap();
        TABLE.leave(other.as_raw_fd());
        assert_eq!(TABLE.watch(other.as_raw_fd()), None, "it was not even asked about");
        notes.ignore.store(false, Relaxed);
        TABLE.forget(file.as_raw_fd());
        assert!(TABLE.watch(file.as_raw_fd()).is_some());
        TABLE.leave(file.as_raw_fd());
        assert_eq!(TABLE.watch(file.as_raw_fd()), None);
        notes.ignore.store(true, Relaxed);
        TABLE.opened(file.as_raw_fd());
        assert_eq!(TABLE.watch(file.as_raw_fd()), None);
        assert_eq!(notes.take(), ["claim 2", "release 2", "claim 3", "release 3"]);
    }

    #[test]
    fn numbers_outside_the_table_and_closed_ones_are_not_observed() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        for fd in [-1, -100, i32::MIN, i32::MAX, DESCRIPTORS as i32, DESCRIPTORS as i32 - 1] {
            TABLE.opened(fd);
            TABLE.forget(fd);
            assert_eq!(TABLE.watch(fd), None);
        }
        assert_eq!(TABLE.consumer().take(), Vec::<String>::new());
    }

    #[test]
    fn threads_that_meet_a_descriptor_together_agree_on_its_number() {
        static TABLE: Table<Notes> = Table::new(Notes::new());
        let file = tempfile::tempfile().unwrap();
        for _ in 0..200 {
            let fd = file.as_raw_fd();
            let numbers: Vec<u32> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(move || TABLE.watch(fd).map(|w| w.file()))).collect();
                threads.into_iter().filter_map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(numbers.len(), 4);
            assert!(numbers.windows(2).all(|w| w[0] == w[1]), "{numbers:?}");
            TABLE.forget(fd);
        }
        let lines = TABLE.consumer().take();
        let count = |what: &str| lines.iter().filter(|l| l.starts_with(what)).count();
        assert_eq!(count("claim"), count("release"));
    }
}
