//! The manager with programs over its real socket, and files on the real kernel.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::support::*;
use impresario_assist::backend::{Advice, Backends, cached_pages};
use impresario_assist::config::{BackendChoice, Budget, Entry, Hints, Limits, ReadAhead, Region, StandDown};
use impresario_assist::learn::{Files, Kind};
use impresario_assist::manager::{
    Access, Handle, Known, KnownOf, Manager, Options, Record, RecordedAccess, RecordedFile, Sink,
};
use impresario_base::lock::Mutex;
use impresario_ring::message::{ToClient, register};
use impresario_ring::{Op, SMALL_FILE_BYTES};
use impresario_testing::page_cache;

fn start(dir: &Path, hints: Hints) -> Handle {
    Manager::start(Options::new(hints), &dir.join("socket")).unwrap()
}

fn hints_that_stay(file: Vec<Entry>) -> Hints {
    Hints { stand_down: StandDown { enabled: false, ..StandDown::default() }, ..hints(file) }
}

fn cached(file: &File, from: u64, to: u64) -> u64 {
    cached_pages(file.as_fd(), from..to).map_or(u64::MAX, |pages| pages.cached)
}

/// Whether the kernel says what is in the page cache (Linux 6.5); otherwise the test is skipped.
#[track_caller]
fn has_cachestat() -> bool {
    let asked = cached_pages(tempfile::tempfile().unwrap().as_fd(), 0..4096);
    asked.inspect_err(|error| impresario_testing::skip("cachestat", error)).is_ok()
}

/// Blocks of the window.
const BLOCK: u64 = 256 * KIB;

/// Reads the beginnings of sixty blocks, each when it and the next one have come.
fn read_sixty_blocks(program: &mut Program, number: u32, file: &File) {
    for n in 0..60 {
        program.read(number, file, n * BLOCK, 64 * KIB);
        until("the block and the next one come", || cached(file, n * BLOCK, (n + 2) * BLOCK) == 2 * 64);
    }
}

#[test]
fn data_comes_before_the_program_and_goes_behind_it() {
    if !has_cachestat() {
        return;
    }
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 16 * MIB);
    // On a fast disk it would find, rightly, that nothing is gained.
    let manager = start(dir.path(), hints_that_stay(vec![window(&path)]));
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    read_sixty_blocks(&mut program, number, &file);
    until("what lies four blocks behind goes", || cached(&file, 0, 57 * BLOCK) == 0);
    assert_eq!(cached(&file, 62 * BLOCK, 16 * MIB), 0, "nothing further on came");
    drop(program);
    until("the program is forgotten", || manager.report().unwrap().programs == 0);
    let report = manager.stop().unwrap();
    let file = file_report(&report, &path);
    assert_eq!(
        (file.backend.as_str(), file.entry.as_str(), file.read_ahead),
        ("fadvise", "File[0]", ReadAhead::Random)
    );
    assert_eq!((file.programs, file.open, file.reads, file.hits), (1, 0, 60, 59));
    assert_eq!((file.prefetched_bytes, file.released_bytes), (61 * BLOCK, 57 * BLOCK));
    assert_eq!(file.used_bytes, 60 * 64 * KIB);
    assert_eq!((report.held_bytes, report.cut_off, file.errors, file.refused), (0, 0, 0, 0));
}

#[test]
fn a_file_is_there_before_the_program_that_is_expected() {
    if !has_cachestat() {
        return;
    }
    let _cache = page_cache::watched();
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 16 * MIB);
    let manager = start(dir.path(), hints_that_stay(vec![window(&path)]));
    manager.expect(vec!["--not a file".into(), dir.path().into(), path.clone()]).unwrap();
    until("its beginning comes", || cached(&file, 0, 2 * BLOCK) == 2 * 64);
    assert_eq!(manager.report().unwrap().programs_ever, 0);
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    read_sixty_blocks(&mut program, number, &file);
    until("what lies behind goes", || cached(&file, 0, 57 * BLOCK) == 0);
    drop(program);
    until("the program is forgotten", || manager.report().unwrap().programs == 0);
    let report = manager.stop().unwrap();
    let file = file_report(&report, &path);
    assert_eq!((file.programs, file.open, file.reads, file.hits), (1, 0, 60, 60), "not even the first read waits");
    assert_eq!((file.prefetched_bytes, report.held_bytes), (61 * BLOCK, 0));
}

#[test]
fn programs_on_one_file_share() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 8 * MIB);
    let manager = start(dir.path(), hints_that_stay(vec![window(&path)]));
    let mut programs: Vec<(Program, u32)> = (0..8)
        .map(|_| {
            let mut program = Program::start(manager.socket());
            let number = program.register(&file);
            (program, number)
        })
        .collect();
    for n in 0..32 {
        for (i, (program, number)) in programs.iter_mut().enumerate() {
            program.read(*number, &file, n * 256 * KIB, 1000);
            let told = n * 8 + i as u64 + 1;
            until("it is told", || file_report(&manager.report().unwrap(), &path).reads == told);
        }
    }
    let report = file_report(&manager.report().unwrap(), &path);
    assert_eq!(report.prefetched_bytes, 8 * MIB, "as much as for one");
    assert_eq!((report.programs, report.open), (8, 8));
}

#[test]
fn a_thousand_programs_come_and_go() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let manager = start(dir.path(), hints(vec![window(&path)]));
    let programs: Vec<Program> = (0..1000)
        .map(|n| {
            let mut program = Program::start(manager.socket());
            let number = program.register(&file);
            program.tell(number, n % 4 * 256 * KIB, 4096);
            program
        })
        .collect();
    until("all are heard", || file_report(&manager.report().unwrap(), &path).reads == 1000);
    let report = manager.report().unwrap();
    assert_eq!((report.programs, file_report(&report, &path).open), (1000, 1000));
    assert_eq!(descriptors_of(&path), 1001);
    drop(programs);
    until("all are forgotten", || manager.report().unwrap().programs == 0);
    until("nothing stays open", || descriptors_of(&path) == 1);
    let report = manager.stop().unwrap();
    assert_eq!((report.held_bytes, report.programs_ever, report.cut_off), (0, 1000, 0));
}

#[test]
fn ten_thousand_files_in_one_program() {
    impresario_base::machine::raise_file_limit(0);
    let dir = folder();
    let real = dir.path().canonicalize().unwrap();
    let directory = vec![Entry { will_need: vec![Region::WHOLE], ..Entry::new(&real) }];
    let manager = start(dir.path(), Hints { directory, ..Hints::default() });
    let mut program = Program::start(manager.socket());
    for n in 0..10_000u64 {
        let path = real.join(format!("{n}"));
        std::fs::write(&path, [7; 5000]).unwrap();
        let number = program.register(&File::open(&path).unwrap());
        assert_eq!(u64::from(number), n + 1);
        program.tell(number, 0, 100);
        if n % 1000 == 0 {
            until("the manager keeps up", || manager.report().unwrap().total().reads == n + 1);
        }
    }
    until("all are heard", || manager.report().unwrap().total().reads == 10_000);
    let total = manager.report().unwrap().total();
    assert_eq!((total.open, total.prefetched_bytes), (10_000, 50_000_000));
    drop(program);
    until("all are let go", || manager.report().unwrap().total().open == 0);
    assert_eq!(manager.stop().unwrap().held_bytes, 0);
}

#[test]
fn a_file_closed_and_another_opened_at_once_are_not_mixed_up() {
    let dir = folder();
    let (a, file_a) = cold_file(dir.path(), "a", MIB);
    let (b, file_b) = cold_file(dir.path(), "b", MIB);
    let manager = start(dir.path(), hints(vec![window(&a), window(&b)]));
    let mut program = Program::start(manager.socket());
    for n in 0..200u64 {
        let file = if n % 2 == 0 { &file_a } else { &file_b };
        let number = program.register(file);
        (0..n % 5 + 1).for_each(|i| program.tell(number, i * 100_000, 1000));
        if n % 3 > 0 {
            program.push(access(number, Op::Close, 0, 0, 0));
        }
        if n % 3 < 2 {
            program.unregister(number);
        }
    }
    let told = |parity: u64| (0..200u64).filter(|n| n % 2 == parity).map(|n| n % 5 + 1).sum::<u64>();
    until("all is heard", || manager.report().unwrap().total().reads == 600);
    until("all are closed", || manager.report().unwrap().total().open == 0);
    let report = manager.report().unwrap();
    assert_eq!((file_report(&report, &a).reads, file_report(&report, &b).reads), (told(0), told(1)));
}

#[test]
fn files_that_shrink_grow_and_vanish() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 4 * MIB);
    let manager = start(dir.path(), hints_that_stay(vec![window(&path)]));
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    program.tell(number, 0, 1000);
    let writable = File::options().write(true).open(&path).unwrap();
    writable.set_len(0).unwrap();
    (0..16).for_each(|n| program.tell(number, n * 256 * KIB, 1000));
    writable.set_len(64 * MIB).unwrap();
    (16..200).for_each(|n| program.tell(number, n * 256 * KIB, 1000));
    std::fs::remove_file(&path).unwrap();
    drop(writable);
    (200..250).for_each(|n| program.tell(number, n * 256 * KIB, 1000));
    program.tell(number, i64::MAX as u64 - 1000, 1000);
    until("all is heard", || manager.report().unwrap().total().reads == 252);
    let report = manager.report().unwrap().total();
    assert_eq!(report.errors, 0);
    assert!(
        report.prefetched_bytes > 40 * MIB && report.prefetched_bytes <= 64 * MIB,
        "it followed the growth: {report}"
    );
    drop((program, file));
    until("it is let go", || manager.report().unwrap().total().open == 0);
}

#[test]
fn a_file_that_was_removed_before_the_manager_heard_of_it_has_hints_all_the_same() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 4 * MIB);
    let manager = start(dir.path(), hints_that_stay(vec![window(&path)]));
    let mut program = Program::start(manager.socket());
    std::fs::remove_file(&path).unwrap();
    let number = program.register(&file);
    (0..16).for_each(|n| program.tell(number, n * 256 * KIB, 1000));
    until("all is heard", || file_report(&manager.report().unwrap(), &path).reads == 16);
    assert!(file_report(&manager.report().unwrap(), &path).prefetched_bytes > 0);
}

#[test]
fn budgets_and_limits_hold() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 8 * MIB);
    let budget = Budget { per_node: 600 * KIB, ..Budget::default() };
    let limits = Limits { programs_per_user: 2, files_per_program: 3, ..Limits::default() };
    let manager = start(dir.path(), Hints { budget, limits, ..hints(vec![window(&path)]) });
    let mut first = Program::start(manager.socket());
    let _second = Program::start(manager.socket());
    let third = connect(manager.socket()).unwrap();
    let refused = answer(&third).map(|(said, _)| said);
    assert_eq!(refused, Some(ToClient::Refused { errno: libc::EUSERS as u32 }));
    assert!(answer(&third).is_none());
    let numbers: Vec<u32> = (0..5).map(|_| first.register(&file)).collect();
    numbers.iter().for_each(|n| first.tell(*n, 0, 100));
    (1..32).for_each(|n| first.tell(numbers[0], n * 256 * KIB, 100));
    until("it is heard", || manager.report().unwrap().total().reads == 3 + 31);
    let report = manager.report().unwrap();
    assert!(report.held_bytes <= 300 * KIB, "half of the node's for one user: {report}");
    assert!(report.total().refused > 0);
    assert_eq!((report.budget_bytes, report.cut_off), (600 * KIB, 1));
}

#[test]
fn a_file_in_memory_is_left_alone_soon() {
    if !has_cachestat() {
        return;
    }
    let _cache = page_cache::watched();
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 32 * MIB);
    std::fs::read(&path).unwrap();
    let entry = Entry { will_need: vec![Region::WHOLE], ..Entry::new(&path) };
    let manager = start(dir.path(), hints(vec![entry]));
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    let quick = |offset, len| program.push(access(number, Op::Read, offset, len, 20_000));
    quick(0, 4096);
    until("it stands down", || file_report(&manager.report().unwrap(), &path).why_stood_down.is_some());
    (0..100).for_each(|n| quick(n * 250_000, 1000));
    until("it is heard", || file_report(&manager.report().unwrap(), &path).reads == 101);
    let report = file_report(&manager.report().unwrap(), &path);
    assert_eq!(report.why_stood_down.as_deref(), Some("100 % was in memory already"));
    assert_eq!((report.prefetched_bytes, report.found_bytes, report.calls), (16 * MIB, 16 * MIB, 0));
    assert_eq!(cached(&file, 0, 32 * MIB), 8192, "what others brought in stays");
}

/// A program passes small files over from its start on, and again when it has told of some in vain.
#[test]
fn small_files_are_passed_over_in_lulls() {
    let dir = folder();
    let (_, file) = cold_file(dir.path(), "f", 8192);
    let online = Entry { online: true, ..Entry::new(dir.path()) };
    // Of that one it tells all the same.
    let planned = Entry { will_need: vec![Region::WHOLE], ..Entry::new(dir.path().join("planned")) };
    let (_, planned_file) = cold_file(dir.path(), "planned", 8192);
    // A program whose files are in memory tells of none, whether or not it is learnt from or known.
    let known = Kind {
        files: Files { suffix: "h5".into(), ..Files::default() },
        shape: Arc::default(),
        learnt_from: 2,
        held_out: None,
    };
    let (plain, learns, knows) = ((false, vec![]), (true, vec![]), (false, vec![known]));
    for (planned, (learns, kinds)) in
        [(vec![], plain.clone()), (vec![planned], plain), (vec![], learns), (vec![], knows)]
    {
        let is_planned = !planned.is_empty();
        let hints = Hints { directory: vec![online.clone()], ..hints(planned) };
        let record = learns.then(|| Record::to_learn_from(Box::new(Into(Arc::default()))));
        let known: Option<KnownOf> = Some(Arc::new(move |_| Known { kinds: kinds.clone(), ..Known::default() }));
        let options = Options { record, known, ..Options::new(hints) };
        let manager = Manager::start(options, &dir.path().join("socket")).unwrap();
        let mut program = Program::start(manager.socket());
        assert_eq!((program.ring.small_bytes(), program.ring.is_lull()), (SMALL_FILE_BYTES, true));
        program.ring.add_passed_over(1000);
        let seen = |bytes| until("it is heard", || manager.report().unwrap().seen_bytes == bytes);
        seen(1000);
        assert!(!program.ring.may_wait(1_000_000_000) && !program.ring.is_lull(), "it ends when something waits");
        let mut bytes = 1000;
        let mut read = |program: &mut Program, file: &File| {
            let number = program.register(file);
            program.push(access(number, Op::Read, 0, 8192, 5_000_000));
            program.push(access(number, Op::Close, 0, 0, 0));
            bytes += 8192;
            program.ring.is_lull()
        };
        assert!(!is_planned || (0..40).all(|_| !read(&mut program, &planned_file)), "those with a plan are told of");
        until("no file comes before it is opened", || read(&mut program, &file));
        seen(bytes);
        assert!(program.ring.is_lull());
        drop(program);
        until("it is gone", || manager.report().unwrap().programs == 0);
        seen(bytes);
    }
}

/// Of two programs of a user one goes through a folder, and what comes next is brought in for it. The other one has no order.
#[test]
fn what_is_of_use_to_one_program_has_no_other_tell_of_small_files() {
    let (dir, apart) = (folder(), folder());
    let tree = dir.path().join("a/b");
    std::fs::create_dir_all(&tree).unwrap();
    let cold: Vec<File> = (0..400).map(|n| cold_file(&tree, &format!("{n:03}"), 4096).1).collect();
    let (_, file) = cold_file(apart.path(), "alone", 4096);
    let online = [tree.as_path(), apart.path()].map(|folder| Entry { online: true, ..Entry::new(folder) });
    let options = Options::new(Hints { directory: online.into(), ..hints(vec![]) });
    let manager = Manager::start(options, &dir.path().join("socket")).unwrap();
    let (mut walks, mut other) = (Program::start(manager.socket()), Program::start(manager.socket()));
    let open = |program: &mut Program, file: &File| {
        let number = program.register(file);
        program.push(access(number, Op::Close, 0, 0, 0));
    };
    for program in [&walks, &other] {
        assert!(!program.ring.may_wait(1_000_000_000));
    }
    // A file system may keep what it is asked to drop.
    if cold.iter().any(|file| cached(file, 0, 4096) > 0) {
        return impresario_testing::skip("cachestat", "memory cannot be looked into, or files do not leave it");
    }
    let mut cold = cold.iter();
    until("what comes next is brought in for the one", || {
        cold.next().into_iter().for_each(|next| open(&mut walks, next));
        manager.report().unwrap().siblings_bytes > 0
    });
    until("the other one has told in vain", || {
        cold.next().into_iter().for_each(|next| open(&mut walks, next));
        open(&mut other, &file);
        other.ring.is_lull()
    });
}

/// Of a program that is recorded beside its hints all files are known, also those that it only writes.
#[test]
fn a_file_that_is_only_written_gets_no_hints() {
    let dir = folder();
    let online = Entry { online: true, ..Entry::new(dir.path()) };
    let recorded = Arc::new(Mutex::new(Recorded::default()));
    let record = Some(Record::to_learn_from(Box::new(Into(recorded.clone()))));
    let options = Options { record, ..Options::new(Hints { directory: vec![online], ..hints(vec![]) }) };
    let manager = Manager::start(options, &dir.path().join("socket")).unwrap();
    let mut program = Program::start(manager.socket());
    let (written, file) = cold_file(dir.path(), "written", MIB);
    program.register_as(&file, register::WRITE | register::REOPENED);
    let (read, file) = cold_file(dir.path(), "read", MIB);
    program.register(&file);
    until("both are recorded", || recorded.lock().opened.len() == 2);
    let files: Vec<_> = manager.report().unwrap().files.into_iter().map(|file| file.path).collect();
    assert_eq!(files, [read.to_str().unwrap()]);
    assert_eq!(recorded.lock().opened[0].path, written);
}

#[test]
fn what_is_mapped_is_brought_in_as_far_as_there_is_room() {
    if !has_cachestat() {
        return;
    }
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", 32 * MIB);
    for (budget, part) in [(0, 32 * MIB), (12 * MIB, 12 * MIB)] {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let entry = Entry { will_need: vec![Region::WHOLE], ..Entry::new(&path) };
        let hints = Hints { budget: Budget { per_file: budget, ..Budget::default() }, ..hints(vec![entry]) };
        let manager = start(dir.path(), hints);
        let mut program = Program::start(manager.socket());
        let map = Map::of(&file, 32 * MIB);
        let number = program.register(&file);
        program.push(access(number, Op::Mmap, 0, 32 * MIB, 1000));
        // As programs do: the map outlives the descriptor.
        program.push(access(number, Op::Close, 0, 0, 0));
        program.unregister(number);
        until("it is in memory", || cached(&file, 0, part) == part / 4096);
        let report = manager.report().unwrap();
        assert_eq!((report.held_bytes, report.total().open), (part, 1), "{report:?}");
        drop((program, map));
        until("it is let go", || manager.report().unwrap().total().open == 0);
        assert_eq!(manager.report().unwrap().held_bytes, 0);
    }
}

/// A program that runs long unmaps a file that it has closed, or removes it: then its file system can be unmounted, and its space is free.
#[test]
fn a_mapped_file_is_let_go_while_its_program_runs() {
    let dir = folder();
    let files = ["stays", "removed", "unmapped"].map(|name| cold_file(dir.path(), name, MIB));
    let manager = start(dir.path(), hints(files.iter().map(|(path, _)| window(path)).collect()));
    let mut program = Program::start(manager.socket());
    let maps = files.each_ref().map(|(_, file)| {
        let map = Map::of(file, MIB);
        let number = program.register(file);
        program.push(access(number, Op::Mmap, 0, MIB, 1000));
        program.push(access(number, Op::Close, 0, 0, 0));
        map
    });
    let open = || files.each_ref().map(|(path, _)| file_report(&manager.report().unwrap(), path).open);
    until("all are mapped", || manager.report().unwrap().mapped_bytes == 3 * MIB && open() == [1, 1, 1]);
    std::fs::remove_file(&files[1].0).unwrap();
    until("the removed one is let go", || open() == [1, 0, 1]);
    let [stays, removed, unmapped] = maps;
    drop(unmapped);
    until("the unmapped one is let go", || open() == [1, 0, 0]);
    until("its descriptor is closed", || descriptors_of(&files[2].0) == 1);
    drop((stays, removed));
    until("none is kept", || open() == [0, 0, 0]);
    assert_eq!(manager.report().unwrap().programs, 1);
}

/// Python's shared memory, and the batches of PyTorch: what is removed there would be memory that nobody can use.
#[test]
fn files_in_memory_get_no_hints_and_are_not_kept() {
    let dir = folder();
    let shared = match tempfile::NamedTempFile::new_in("/dev/shm") {
        Ok(shared) => shared,
        Err(error) => return impresario_testing::skip("/dev/shm", error),
    };
    shared.as_file().set_len(MIB).unwrap();
    let nameless = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&nameless, MIB).unwrap();
    let manager = start(dir.path(), Hints::online());
    let mut program = Program::start(manager.socket());
    for file in [shared.as_file().as_fd(), nameless.as_fd()] {
        let number = program.register(&file);
        program.push(access(number, Op::Mmap, 0, MIB, 1000));
        program.push(access(number, Op::Close, 0, 0, 0));
    }
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let number = program.register(&file);
    program.tell(number, 0, 10);
    until("it is heard", || file_report(&manager.report().unwrap(), &path).reads == 1);
    assert_eq!(manager.report().unwrap().total().programs, 1, "{:?}", manager.report());
    until("they are not kept", || descriptors_of(shared.path()) == 1);
}

#[derive(Default)]
struct Recorded {
    opened: Vec<RecordedFile>,
    accesses: Vec<RecordedAccess>,
    finished: bool,
}

struct Into(Arc<Mutex<Recorded>>);

impl Sink for Into {
    fn opened(&mut self, file: &RecordedFile) -> io::Result<()> {
        self.0.lock().opened.push(file.clone());
        Ok(())
    }

    fn access(&mut self, access: &RecordedAccess) -> io::Result<()> {
        self.0.lock().accesses.push(*access);
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.0.lock().finished = true;
        Ok(())
    }
}

#[test]
fn a_recorded_program_is_recorded_whole_and_gets_no_hints() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let recorded = Arc::new(Mutex::new(Recorded::default()));
    let options = Options::record(Box::new(Into(recorded.clone())));
    let manager = Manager::start(options, &dir.path().join("socket")).unwrap();
    let mut program = Program::start(manager.socket());
    let patterns = impresario_ring::patterns::Patterns::parse(&program.patterns).unwrap();
    assert!(patterns.matches(b"/any/file"));
    let number = program.register(&file);
    let ops = [Op::Read, Op::Write, Op::Seek, Op::Mmap];
    // More than a turn takes, and the file is closed before they are taken.
    for n in 0..4000u64 {
        program.push(access(number, ops[n as usize % 4], n, 10, 7));
    }
    program.push(access(number, Op::Close, 0, 0, 0));
    program.unregister(number);
    drop(program);
    until("it is gone", || manager.report().unwrap().programs == 0);
    manager.stop().unwrap();
    let recorded = recorded.lock();
    assert!(recorded.finished);
    assert_eq!(recorded.opened.iter().map(|f| (&f.path, f.size_bytes)).collect::<Vec<_>>(), [(&path, MIB)]);
    assert_eq!(recorded.accesses.len(), 4001);
    for (n, access) in recorded.accesses.iter().take(4000).enumerate() {
        assert_eq!((access.offset, access.op, access.len_bytes, access.duration_ns), (n as u64, ops[n % 4], 10, 7));
        assert_eq!((access.file, access.pid), (recorded.opened[0].number, std::process::id()));
    }
}

/// A program that is started before its manager is served when that is there.
#[test]
fn a_program_may_come_before_its_manager() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let listening = Manager::listen(&dir.path().join("socket"), Access::Owner).unwrap();
    let early = listening.socket().to_path_buf();
    let early = std::thread::spawn(move || Program::start(&early));
    let manager = listening.start(Options::new(hints(vec![window(&path)]))).unwrap();
    let mut program = early.join().unwrap();
    let number = program.register(&file);
    program.tell(number, 0, 10);
    until("it is heard", || manager.report().unwrap().total().reads == 1);
    // One that is never started leaves nothing behind.
    let socket = dir.path().join("other");
    drop(Manager::listen(&socket, Access::Owner).unwrap());
    assert!(!socket.exists());
}

/// A worker in a call that takes long is not waited for: the program has ended, and its user waits for us.
#[test]
fn who_stops_a_manager_does_not_wait_for_its_workers() {
    // Its own patience with workers is two seconds. On a busy machine all may take long, but not each time.
    let patience = Duration::from_secs(2);
    assert!((0..5).any(|_| stopping_with_a_worker_that_hangs() < patience));
}

/// How long it takes.
fn stopping_with_a_worker_that_hangs() -> Duration {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    let (let_go, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let hangs = move |_: BorrowedFd<'_>, _: &mut Advice| {
        let _ = held.lock().recv();
        Ok(())
    };
    let backends = Backends::new(c"/nowhere", Box::new(hangs));
    let entry = Entry { backend: BackendChoice::Lustre, ..window(&path) };
    let options = Options { backends, ..Options::new(hints(vec![entry])) };
    let manager = Manager::start(options, &dir.path().join("socket")).unwrap();
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    program.tell(number, 0, 10);
    until("it is hinted", || file_report(&manager.report().unwrap(), &path).hints > 0);
    let began = Instant::now();
    let report = manager.stop().unwrap();
    let took = began.elapsed();
    assert_eq!(report.programs_ever, 1);
    drop(let_go);
    took
}

#[test]
fn started_again_it_serves_again() {
    let dir = folder();
    let (path, file) = cold_file(dir.path(), "f", MIB);
    for _ in 0..3 {
        let manager = start(dir.path(), hints(vec![window(&path)]));
        let mut program = Program::start(manager.socket());
        let number = program.register(&file);
        program.tell(number, 0, 10);
        until("it is heard", || manager.report().unwrap().total().reads == 1);
        manager.stop().unwrap();
        assert!(answer(&program.socket).is_none(), "the program sees that the manager is gone");
        assert!(program.ring.is_closed());
        assert!(!dir.path().join("socket").exists());
    }
}
