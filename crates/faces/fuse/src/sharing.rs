//! Which programs write parts of a file in turns with others.
//!
//! Where the kernel keeps a file's pages, it lets one program at a time write to the file, and none while one syncs it. The ranks of
//! a parallel program that write one file spend most of their time on that lock. An open without pages has no such lock, but all
//! that it reads comes from the servers, and whether a program will read nobody knows when it opens the file to read *and* write.
//! So it is learnt from what the program did with such opens before: one that has written in turns with others, and has neither
//! read nor locked, gets no pages the next time. One that has read or locked keeps them from then on, whatever else it does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use impresario_base::lock::Mutex;

/// Writes by turns with another open of the file, since it was first seen, that make a program one that shares.
const TURNS: u32 = 16;
/// A program reads if an open of it has one read for so many writes, and more than [`FEW_READS`].
const WRITES_A_READ: u64 = 8;
/// Reads that show nothing: what a program looks up in a file before it writes.
const FEW_READS: u64 = 4;
/// Programs whose habits are kept; of more, those that were seen first are forgotten.
const PROGRAMS_MAX: usize = 256;

/// A user's program, by the name that the kernel has of it, at most 15 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Program {
    uid: u32,
    name: Vec<u8>,
}

/// What a program does with files that it opens to read and write.
#[derive(Debug, Default)]
pub(crate) struct Habit {
    turns: AtomicU32,
    keeps_pages: AtomicBool,
}

impl Habit {
    /// Whether its next open has more of no pages than of pages.
    fn passes_pages_by(&self) -> bool {
        self.turns.load(Relaxed) >= TURNS && !self.keeps_pages.load(Relaxed)
    }

    /// It reads or locks.
    fn keep_pages(&self) {
        self.keeps_pages.store(true, Relaxed);
    }
}

/// The programs of one mount.
#[derive(Debug, Default)]
pub(crate) struct Habits(Mutex<VecDeque<(Program, Arc<Habit>)>>);

impl Habits {
    /// That of the program of a thread; `None` if that is gone or of another name space.
    pub(crate) fn of(&self, uid: u32, thread: u32) -> Option<Arc<Habit>> {
        let name = std::fs::read(format!("/proc/{thread}/comm")).ok()?;
        Some(self.of_program(Program { uid, name }))
    }

    fn of_program(&self, program: Program) -> Arc<Habit> {
        let mut known = self.0.lock();
        if let Some((_, habit)) = known.iter().find(|(of, _)| *of == program) {
            return habit.clone();
        }
        if known.len() >= PROGRAMS_MAX {
            known.pop_front();
        }
        let habit = Arc::<Habit>::default();
        known.push_back((program, habit.clone()));
        habit
    }
}

/// An open to read and write, of a program whose habit is learnt.
#[derive(Debug)]
pub(crate) struct Sharer {
    habit: Arc<Habit>,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Sharer {
    pub(crate) fn new(habit: Arc<Habit>) -> Sharer {
        Sharer { habit, reads: AtomicU64::new(0), writes: AtomicU64::new(0) }
    }

    /// Whether it is better off without pages.
    pub(crate) fn passes_pages_by(&self) -> bool {
        self.habit.passes_pages_by()
    }

    /// It reads from the servers.
    pub(crate) fn reads(&self) {
        let reads = self.reads.fetch_add(1, Relaxed) + 1;
        if reads > FEW_READS && reads.saturating_mul(WRITES_A_READ) > self.writes.load(Relaxed) {
            self.habit.keep_pages();
        }
    }

    /// It writes; `in_turn`: another open of the file wrote last.
    pub(crate) fn writes(&self, in_turn: bool) {
        self.writes.fetch_add(1, Relaxed);
        if in_turn && self.habit.turns.load(Relaxed) < TURNS {
            self.habit.turns.fetch_add(1, Relaxed);
        }
    }

    /// It locks: what it reads under a lock it reads several times, and waits for others anyway.
    pub(crate) fn locks(&self) {
        self.habit.keep_pages();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn habit(habits: &Habits, uid: u32, name: &str) -> Arc<Habit> {
        habits.of_program(Program { uid, name: name.as_bytes().to_vec() })
    }

    #[test]
    fn a_program_that_writes_in_turns_has_no_pages_until_it_reads_or_locks() {
        let habits = Habits::default();
        let open = || Sharer::new(habit(&habits, 1, "ior"));
        let first = open();
        (0..100).for_each(|_| first.writes(false));
        assert!(!open().passes_pages_by(), "alone it has no lock to wait for");
        (0..TURNS - 1).for_each(|_| first.writes(true));
        assert!(!open().passes_pages_by());
        first.writes(true);
        assert!(open().passes_pages_by());
        assert!(!Sharer::new(habit(&habits, 2, "ior")).passes_pages_by(), "another user's");
        assert!(!Sharer::new(habit(&habits, 1, "cp")).passes_pages_by(), "another program");
        // A header that is looked at, and few reads among many writes.
        let next = open();
        (0..FEW_READS).for_each(|_| next.reads());
        (0..1000).for_each(|_| next.writes(true));
        (0..100).for_each(|_| next.reads());
        assert!(open().passes_pages_by());
        (0..100).for_each(|_| next.reads());
        assert!(!open().passes_pages_by());
        (0..1000).for_each(|_| next.writes(true));
        assert!(!open().passes_pages_by(), "for good");

        let locks = Sharer::new(habit(&habits, 1, "db"));
        (0..100).for_each(|_| locks.writes(true));
        assert!(locks.passes_pages_by());
        locks.locks();
        assert!(!locks.passes_pages_by());
    }

    #[test]
    fn a_bounded_number_of_programs_is_known() {
        let habits = Habits::default();
        let first = habit(&habits, 1, "first");
        for n in 0..PROGRAMS_MAX {
            habit(&habits, 1, &n.to_string());
        }
        assert_eq!(habits.0.lock().len(), PROGRAMS_MAX);
        assert!(!Arc::ptr_eq(&first, &habit(&habits, 1, "first")), "the first was forgotten");
        let last = habit(&habits, 1, "255");
        assert!(Arc::ptr_eq(&last, &habit(&habits, 1, "255")));
    }

    #[test]
    fn a_thread_s_program_is_found() {
        let habits = Habits::default();
        let own = habits.of(1, std::process::id()).unwrap();
        assert!(Arc::ptr_eq(&own, &habits.of(1, std::process::id()).unwrap()));
        assert!(habits.of(1, 0).is_none());
    }
}
