//! Runs from which something can be learnt, recorded beside the hints.
//!
//! What a manager is told of anyway goes into a trace in memory, so a program does nothing for it. A run is of all processes of one
//! program and user that were started together and overlap in time, as workers and ranks do. It begins when one of them opens a long input, and when the last
//! of them has ended it is handed over, where something is new in it: a file of a kind of which no hints come, or one that was read
//! otherwise than others of its kind. Everything is bounded: the bytes of a trace and of all, the runs at a time and in an hour, and how often
//! a program is recorded again.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustc_hash::FxHashMap;
use rustix::fs::MemfdFlags;

use super::Keep;
use super::sink::{RecordedAccess, RecordedFile, Sink};
use crate::config::Learn;
use crate::learn::{Lesson, is_input};
use crate::record::TraceSink;
use crate::report::Lessons as Tally;

/// Runs that are recorded at a time: of one user, and of all.
const RUNS_MAX: (usize, usize) = (8, 32);
/// The traces of all of them together may have the bytes of so many.
const FULL_TRACES_MAX: u64 = 16;
/// Inputs of a run, and files that it writes; of one with more nothing is learnt.
const FILES_MAX: u32 = 4096;
const OUTPUTS_MAX: usize = 1 << 16;
/// Programs of which it is known when they were recorded.
const PROGRAMS_MAX: usize = 4096;
/// A program is recorded so often at once, since a kind is known by two files. Then a pause follows, which grows with each time.
const AT_ONCE: u32 = 2;
const PAUSE_NS: u64 = 60_000_000_000;
const PAUSE_NS_MAX: u64 = 86_400_000_000_000;
const HOUR_NS: u64 = 3_600_000_000_000;

/// The program of a process, as far as it matters to who learns from it.
#[derive(Clone)]
pub(super) struct Student {
    pub(super) uid: u32,
    pub(super) program: Arc<str>,
    /// Processes of one run have the same.
    pub(super) together: u32,
    /// Runs from which something was learnt already.
    pub(super) runs: u64,
    /// Takes the trace.
    pub(super) keep: Keep,
    /// When the process connected, in nanoseconds since 1970.
    pub(super) began_unix_ns: u64,
}

/// A file that such a process opens.
pub(super) struct Opened<'a> {
    pub(super) file: &'a RecordedFile,
    /// It is open for writing, too.
    pub(super) is_written: bool,
    /// Nothing says yet what is read of it.
    pub(super) is_new: bool,
}

/// One run.
struct Run {
    student: Student,
    lesson: Lesson,
    trace: File,
    /// As far as it is counted in the sum.
    bytes: u64,
    files: u32,
    processes: u32,
    /// There is something new in it.
    is_wanted: bool,
    began_ns: u64,
}

/// When a program was recorded.
#[derive(Clone, Copy, Default)]
struct Before {
    times: u32,
    last_ns: u64,
}

/// All runs that are recorded now.
pub(super) struct Lessons {
    limits: Learn,
    runs: FxHashMap<u64, Run>,
    next: u64,
    bytes: u64,
    before: FxHashMap<(u32, Arc<str>), Before>,
    /// When runs were handed over, within the hour.
    taken_ns: VecDeque<u64>,
    tally: Tally,
}

impl Lessons {
    pub(super) fn new(limits: Learn) -> Lessons {
        let (runs, before) = (FxHashMap::default(), FxHashMap::default());
        Lessons { limits, runs, next: 0, bytes: 0, before, taken_ns: VecDeque::new(), tally: Tally::default() }
    }

    /// What became of runs.
    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    /// A process opens a file. Which run it is of from now on, if any; `of` is the one that it was of before. Where that was given up it is
    /// of none any more, and must not begin another one.
    pub(super) fn opened(
        &mut self,
        of: Option<u64>,
        student: &Student,
        opened: &Opened<'_>,
        now_ns: u64,
    ) -> Option<u64> {
        let is_teaching = opened.is_new && student.runs < self.limits.runs_per_program;
        let of = of.or_else(|| {
            let begins = !opened.is_written && is_input(opened.file, student.began_unix_ns);
            begins.then(|| self.join(student, is_teaching, now_ns)).flatten()
        })?;
        let run = self.runs.get_mut(&of)?;
        if opened.is_written {
            let is_told = run.lesson.is_output(opened.file.id) <= OUTPUTS_MAX;
            self.after(of, is_told);
        } else if is_input(opened.file, run.student.began_unix_ns) {
            run.is_wanted |= is_teaching;
            run.files += 1;
            let is_told = run.files <= FILES_MAX && run.lesson.opened(opened.file).is_ok();
            self.after(of, is_told);
        }
        Some(of)
    }

    /// The run of a process's program: one that is recorded already, or a new one.
    fn join(&mut self, student: &Student, is_teaching: bool, now_ns: u64) -> Option<u64> {
        let same = |run: &Run| run.student.uid == student.uid && run.student.program == student.program;
        if let Some((number, run)) = self.runs.iter_mut().find(|(_, run)| same(run)) {
            // One at a time of a program: of others that run side by side nothing more would be learnt.
            let is_of_it = run.student.together == student.together;
            run.processes += u32::from(is_of_it);
            return is_of_it.then_some(*number);
        }
        if !self.limits.enabled
            || !self.may_record(student, now_ns)
            || !self.make_room(student.uid, is_teaching, now_ns)
        {
            return None;
        }
        let memory = rustix::fs::memfd_create("impresario-lesson", MemfdFlags::CLOEXEC);
        let begun = memory.map_err(std::io::Error::from).and_then(|memory| {
            let trace = File::from(memory);
            let sink = TraceSink::into_file(
                trace.try_clone()?,
                Path::new("lesson"),
                &student.program,
                self.limits.trace_bytes,
            );
            Ok((trace, Lesson::since(sink.map_err(std::io::Error::other)?, student.began_unix_ns)))
        });
        let (trace, lesson) = begun.inspect_err(|error| tracing::debug!(%error, "a run cannot be recorded")).ok()?;
        self.next += 1;
        let run = Run {
            student: student.clone(),
            lesson,
            trace,
            bytes: 0,
            files: 0,
            processes: 1,
            is_wanted: false,
            began_ns: now_ns,
        };
        self.runs.insert(self.next, run);
        Some(self.next)
    }

    /// Whether it is long enough ago that a program was recorded.
    fn may_record(&self, student: &Student, now_ns: u64) -> bool {
        self.before.get(&(student.uid, student.program.clone())).is_none_or(|before| {
            let doubled = 1u64.checked_shl(before.times.saturating_sub(AT_ONCE)).unwrap_or(u64::MAX);
            let pause_ns = PAUSE_NS.saturating_mul(doubled).min(PAUSE_NS_MAX);
            before.times < AT_ONCE || now_ns.saturating_sub(before.last_ns) >= pause_ns
        })
    }

    /// Whether there is room for one more run. For one in which something is new make way those in which nothing is so far, and then the
    /// oldest one that is an hour old: programs that never end would leave no room.
    fn make_room(&mut self, uid: u32, is_teaching: bool, now_ns: u64) -> bool {
        let of_user = self.runs.values().filter(|run| run.student.uid == uid).count();
        let is_full = (of_user >= RUNS_MAX.0, self.runs.len() >= RUNS_MAX.1);
        if is_full == (false, false) {
            return true;
        }
        let is_old = |run: &Run| now_ns.saturating_sub(run.began_ns) >= HOUR_NS;
        let may_go = |run: &Run| (!run.is_wanted || is_old(run)) && (!is_full.0 || run.student.uid == uid);
        let others = self.runs.iter().filter(|(_, run)| is_teaching && may_go(run));
        let gone = others.min_by_key(|(_, run)| (run.is_wanted, run.began_ns)).map(|(number, _)| *number);
        let dropped = gone.and_then(|number| self.drop_run(number));
        let is_lost = dropped.as_ref().map_or(is_teaching, |run| run.is_wanted);
        self.tally.left_out += u64::from(is_lost);
        dropped.is_some()
    }

    fn drop_run(&mut self, number: u64) -> Option<Run> {
        let run = self.runs.remove(&number)?;
        self.bytes -= run.bytes;
        Some(run)
    }

    /// A line was added to a run, or could not be. One that is too long is given up, and so is one that finds no room beside the others.
    fn after(&mut self, number: u64, is_told: bool) {
        let Some(run) = self.runs.get_mut(&number) else { return };
        let bytes = run.lesson.bytes();
        self.bytes = self.bytes - run.bytes + bytes;
        run.bytes = bytes;
        if !is_told || self.bytes > FULL_TRACES_MAX.saturating_mul(self.limits.trace_bytes) {
            tracing::debug!(uid = run.student.uid, program = %run.student.program, "a run is too long to learn from");
            self.tally.left_out += u64::from(run.is_wanted);
            if let Some(run) = self.drop_run(number) {
                self.note(run.student, run.began_ns);
            }
        }
    }

    /// A process of a run did something with a file.
    pub(super) fn access(&mut self, number: u64, access: &RecordedAccess) {
        if let Some(run) = self.runs.get_mut(&number) {
            let is_told = run.lesson.access(access).is_ok();
            self.after(number, is_told);
        }
    }

    /// A file was read otherwise than others of its kind.
    pub(super) fn strayed(&mut self, number: u64) {
        if let Some(run) = self.runs.get_mut(&number) {
            run.is_wanted = true;
        }
    }

    /// Something that a process did was not told of: nothing is learnt from a part of a run.
    pub(super) fn lost(&mut self, number: u64) {
        self.drop_run(number);
    }

    /// A process of a run has ended. With the last one the run is over.
    pub(super) fn left(&mut self, number: u64, now_ns: u64) {
        let Some(run) = self.runs.get_mut(&number) else { return };
        run.processes -= 1;
        if run.processes > 0 {
            return;
        }
        let Some(Run { student, mut lesson, trace, is_wanted, .. }) = self.drop_run(number) else { return };
        let is_whole = lesson.finish().is_ok();
        if !is_wanted || !is_whole || !lesson.worth().load(Relaxed) {
            return;
        }
        while self.taken_ns.front().is_some_and(|taken| now_ns.saturating_sub(*taken) >= HOUR_NS) {
            self.taken_ns.pop_front();
        }
        if self.taken_ns.len() as u64 >= self.limits.runs_per_hour || !(student.keep)(trace) {
            self.tally.left_out += 1;
            return;
        }
        self.taken_ns.push_back(now_ns);
        self.tally.taken += 1;
        self.note(student, now_ns);
    }

    /// Remembers when a program was recorded, also in vain: each of its runs may be too long.
    fn note(&mut self, student: Student, now_ns: u64) {
        if self.before.len() >= PROGRAMS_MAX
            && let Some(oldest) =
                self.before.iter().min_by_key(|(_, before)| before.last_ns).map(|(key, _)| key.clone())
        {
            self.before.remove(&oldest);
        }
        let before = self.before.entry((student.uid, student.program)).or_default();
        *before = Before { times: before.times.saturating_add(1), last_ns: now_ns };
    }
}

#[cfg(test)]
mod tests {
    use impresario_base::lock::Mutex;
    use impresario_ring::Op;
    use impresario_trace::Trace;

    use super::*;
    use crate::backend::FileId;

    const LONG: u64 = 10 << 20;

    /// Takes what is handed over.
    #[derive(Default)]
    struct Taken(Arc<Mutex<Vec<File>>>);

    impl Taken {
        fn student(&self, uid: u32, program: &str, together: u32) -> Student {
            let taken = self.0.clone();
            let keep: Keep = Arc::new(move |trace| {
                taken.lock().push(trace);
                true
            });
            Student { uid, program: program.into(), together, runs: 0, keep, began_unix_ns: 5000 }
        }

        /// The reads of each run.
        fn reads(&self) -> Vec<usize> {
            let all = self.0.lock();
            let path = |file: &File| impresario_base::machine::path_of(file);
            all.iter().map(|file| Trace::load(path(file)).unwrap().records.len()).collect()
        }
    }

    fn file(number: u64, student: &Student) -> RecordedFile {
        RecordedFile {
            number,
            path: format!("/data/{number}").into(),
            id: FileId { dev: 1, ino: number },
            size_bytes: LONG,
            changed_unix_ns: 5000,
            pid: 1,
            uid: student.uid,
            program: student.program.clone(),
        }
    }

    fn open(
        lessons: &mut Lessons,
        of: Option<u64>,
        student: &Student,
        number: u64,
        is_new: bool,
        now_ns: u64,
    ) -> Option<u64> {
        let file = file(number, student);
        lessons.opened(of, student, &Opened { file: &file, is_written: false, is_new }, now_ns)
    }

    fn read(lessons: &mut Lessons, run: u64, number: u64, offset: u64) {
        let access = RecordedAccess {
            file: number,
            pid: 1,
            thread: 1,
            op: Op::Read,
            flags: 0,
            offset,
            len_bytes: 4096,
            start_ns: impresario_ring::now_ns(),
            duration_ns: 1,
        };
        lessons.access(run, &access);
    }

    /// A whole run on one file; whether it was handed over.
    fn run(lessons: &mut Lessons, student: &Student, is_new: bool, now_ns: u64) -> bool {
        let before = lessons.tally().taken;
        if let Some(run) = open(lessons, None, student, 1, is_new, now_ns) {
            read(lessons, run, 1, 0);
            lessons.left(run, now_ns);
        }
        lessons.tally().taken > before
    }

    #[test]
    fn processes_that_overlap_are_one_run() {
        let (taken, mut lessons) = (Taken::default(), Lessons::new(Learn::default()));
        let student = taken.student(7, "solver", 100);
        let first = open(&mut lessons, None, &student, 1, true, 0).unwrap();
        assert_eq!(open(&mut lessons, None, &student, 2, true, 0), Some(first), "another process");
        let other = taken.student(7, "solver", 101);
        assert_eq!(open(&mut lessons, None, &other, 3, true, 0), None, "another run at the same time");
        let other = open(&mut lessons, None, &taken.student(8, "solver", 100), 4, true, 0).unwrap();
        assert_ne!(other, first, "another user's");
        for (run, number) in [(first, 1), (first, 2), (first, 3), (other, 4)] {
            read(&mut lessons, run, number, 0);
        }
        lessons.left(first, 0);
        assert!(taken.reads().is_empty());
        lessons.left(other, 0);
        lessons.left(first, 0);
        assert_eq!(taken.reads(), [1, 2], "what is of no file of the run is not in it");
        assert_eq!((lessons.runs.len(), lessons.bytes), (0, 0));
    }

    #[test]
    fn a_run_without_anything_new_is_not_learnt_from() {
        let (taken, mut lessons) = (Taken::default(), Lessons::new(Learn::default()));
        let student = taken.student(7, "solver", 1);
        assert!(!run(&mut lessons, &student, false, 0), "its kinds are known");
        let strayed = open(&mut lessons, None, &student, 1, false, 0).unwrap();
        read(&mut lessons, strayed, 1, 0);
        lessons.strayed(strayed);
        lessons.left(strayed, 0);
        assert_eq!(lessons.tally(), Tally { taken: 1, left_out: 0 });
        let unread = open(&mut lessons, None, &student, 1, true, 0).unwrap();
        lessons.left(unread, 0);
        let lost = open(&mut lessons, None, &student, 1, true, 0).unwrap();
        read(&mut lessons, lost, 1, 0);
        lessons.lost(lost);
        lessons.left(lost, 0);
        // What it writes, and what it has written, is no input.
        let of = |lessons: &mut Lessons, file: &RecordedFile, is_written| {
            lessons.opened(None, &student, &Opened { file, is_written, is_new: true }, 0)
        };
        assert_eq!(of(&mut lessons, &file(1, &student), true), None);
        assert_eq!(of(&mut lessons, &RecordedFile { changed_unix_ns: 5001, ..file(1, &student) }, false), None);
        assert_eq!(of(&mut lessons, &RecordedFile { size_bytes: 1000, ..file(1, &student) }, false), None);
        assert_eq!(lessons.tally().taken, 1);
        // A program from which nothing can be learnt, however often.
        let hopeless = Student { runs: Learn::default().runs_per_program, ..taken.student(7, "cp", 1) };
        assert!(!run(&mut lessons, &hopeless, true, 0));
    }

    #[test]
    fn a_program_is_recorded_again_and_again_ever_more_rarely() {
        let (taken, mut lessons) = (Taken::default(), Lessons::new(Learn::default()));
        let student = taken.student(7, "solver", 1);
        let minute = PAUSE_NS;
        let times: Vec<u64> = (0..60).filter(|n| run(&mut lessons, &student, true, n * minute)).collect();
        assert_eq!(times, [0, 1, 2, 4, 8, 16, 32]);
        assert!(run(&mut lessons, &taken.student(8, "solver", 1), true, 60 * minute), "another user's");
    }

    /// Whoever was recorded in vain is so ever more rarely, too, and programs that never end leave room for others.
    #[test]
    fn what_cannot_be_learnt_from_is_given_up() {
        let (taken, mut lessons) = (Taken::default(), Lessons::new(Learn::default()));
        let writer = taken.student(7, "writer", 1);
        for time in 0..AT_ONCE {
            let run = open(&mut lessons, None, &writer, 1, true, 0).unwrap();
            let mut write = |number| {
                let file = file(number, &writer);
                lessons.opened(Some(run), &writer, &Opened { file: &file, is_written: true, is_new: true }, 0)
            };
            let outputs = OUTPUTS_MAX as u64;
            assert!((0..outputs).chain(0..9).all(|n| write(n).is_some()), "{time}: the same ones again are no more");
            write(outputs);
            assert_eq!(write(outputs), None);
            assert!(lessons.runs.is_empty());
        }
        assert_eq!(open(&mut lessons, None, &writer, 1, true, PAUSE_NS - 1), None);
        assert!(open(&mut lessons, None, &writer, 1, true, PAUSE_NS).is_some());

        let mut lessons = Lessons::new(Learn::default());
        let endless: Vec<Student> = (0..RUNS_MAX.0).map(|n| taken.student(7, &n.to_string(), 1)).collect();
        for (n, student) in endless.iter().enumerate() {
            open(&mut lessons, None, student, 1, true, n as u64).unwrap();
        }
        let new = taken.student(7, "new", 1);
        assert_eq!(open(&mut lessons, None, &new, 1, true, HOUR_NS - 1), None);
        assert!(open(&mut lessons, None, &new, 1, true, HOUR_NS).is_some());
        assert!(lessons.runs.values().all(|run| &*run.student.program != "0"), "the oldest one");
        assert_eq!(lessons.tally().left_out, 2);
    }

    #[test]
    fn no_more_is_kept_or_handed_over_than_there_is_room_for() {
        let limits = Learn { trace_bytes: 1 << 20, runs_per_hour: 3, ..Learn::default() };
        let (taken, mut lessons) = (Taken::default(), Lessons::new(limits));
        let programs: Vec<Student> = (0..100).map(|n| taken.student(7, &n.to_string(), 1)).collect();
        // One that reads without end.
        let long = open(&mut lessons, None, &programs[99], 1, true, 0).unwrap();
        (0..1 << 18).for_each(|n| read(&mut lessons, long, 1, n * 7919 * 4096));
        assert!(lessons.runs.is_empty() && lessons.bytes == 0 && lessons.tally().left_out == 1);
        lessons.left(long, 0);
        // Runs in which nothing is new make way.
        let known: Vec<_> = programs.iter().map_while(|one| open(&mut lessons, None, one, 1, false, 0)).collect();
        assert_eq!(known.len(), RUNS_MAX.0);
        let new: Vec<_> = programs[50..].iter().map_while(|one| open(&mut lessons, None, one, 1, true, 0)).collect();
        assert_eq!((new.len(), lessons.runs.len()), (RUNS_MAX.0, RUNS_MAX.0));
        let others = (100..200).filter(|uid| {
            let student = taken.student(*uid, "x", 1);
            open(&mut lessons, None, &student, 1, true, 0).is_some()
        });
        assert_eq!(others.count(), RUNS_MAX.1 - RUNS_MAX.0);
        for number in new {
            read(&mut lessons, number, 1, 0);
            lessons.left(number, 0);
        }
        assert_eq!((taken.reads().len() as u64, lessons.tally().taken), (limits.runs_per_hour, limits.runs_per_hour));
        assert!(run(&mut lessons, &programs[0], true, HOUR_NS), "an hour later");
        let mut off = Lessons::new(Learn { enabled: false, ..Learn::default() });
        assert!(!run(&mut off, &programs[0], true, 0));
    }
}
