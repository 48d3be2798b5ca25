//! What a C program does is what the manager is told: nothing less, nothing more, nothing twice.

use std::path::{Path, PathBuf};

use crate::support::{Manager, Told, compile, preloaded, run};
use impresario_ring::message::{Mode, register};
use impresario_ring::{Op, SMALL_FILE_BYTES, Unseen, flag};

struct Stage {
    dir: tempfile::TempDir,
    program: PathBuf,
    /// How long the program waits for the manager.
    wait_ms: Option<&'static str>,
}

impl Stage {
    fn new(flags: &[&str]) -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), "cases", flags);
        std::fs::create_dir(dir.path().join("data")).unwrap();
        std::fs::write(dir.path().join("data/bytes"), (0..100_000u32).map(|i| (i % 251) as u8).collect::<Vec<_>>())
            .unwrap();
        let lines: String = (0..500).map(|i| format!("line {i}\n")).collect();
        std::fs::write(dir.path().join("data/lines"), lines).unwrap();
        Stage { dir, program, wait_ms: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("data").join(name)
    }

    /// Makes "bytes" longer than what is passed over as small.
    fn lengthen(&self) {
        let bytes = (0..SMALL_FILE_BYTES + 1000).map(|i| (i % 251) as u8);
        std::fs::write(self.path("bytes"), bytes.collect::<Vec<_>>()).unwrap();
    }

    fn run(&self, case: &str, socket: &Path, manager: bool) {
        let text = self.said(case, socket, manager);
        assert!(!text.is_empty() && text.lines().all(|line| line == "ok"), "{case}: {text}");
    }

    /// What a case prints; it must end well.
    fn said(&self, case: &str, socket: &Path, manager: bool) -> String {
        let mut command = preloaded(&self.program, socket);
        if manager {
            command.env("EXPECT_MANAGER", "1");
        }
        if let Some(wait_ms) = self.wait_ms {
            command.env("IMPRESARIO_ASSIST_WAIT_MS", wait_ms);
        }
        let output = run(command.arg(case).arg(self.path("bytes")).arg(self.path("lines")));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{case}: {} {text}", output.status);
        assert!(output.stderr.is_empty(), "{case}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// What the manager is told of a case with io_uring, and how many accesses were missed; `None` where the kernel gives no
    /// ring.
    fn rings_lossy(&self, case: &str) -> Option<(Vec<Told>, u64, Unseen)> {
        let manager = Manager::start(&self.dir.path().join("socket"), &self.path(""), Mode::Advise);
        let text = self.said(case, &manager.socket, true);
        if text == "no ring\n" {
            impresario_testing::skip("io_uring", "the kernel refuses io_uring");
            return None;
        }
        assert_eq!(text, "ok\n");
        let unseen = manager.unseen();
        let (missed, told) = manager.finish_lossy();
        Some((told, missed, *unseen.lock().unwrap()))
    }

    /// The same, and nothing is missed.
    fn rings(&self, case: &str) -> Option<(Vec<Told>, Unseen)> {
        let (told, missed, unseen) = self.rings_lossy(case)?;
        assert_eq!(missed, 0);
        Some((told, unseen))
    }

    /// What the manager is told of a case.
    fn told(&self, case: &str, mode: Mode) -> Vec<Told> {
        let manager = Manager::start(&self.dir.path().join("socket"), &self.path(""), mode);
        self.run(case, &manager.socket, true);
        manager.finish()
    }
}

/// The accesses of all open files of one name, in order, without the closing.
fn of<'a>(told: &'a [Told], path: &'a Path) -> impl Iterator<Item = Vec<(Op, u64, u32)>> + 'a {
    told.iter().filter(move |t| t.path == path).map(accesses)
}

/// The accesses of an open file, in order, without the closing.
fn accesses(told: &Told) -> Vec<(Op, u64, u32)> {
    let mut ranges = told.ranges();
    if told.unregistered {
        assert_eq!(ranges.pop().map(|r| r.0), Some(Op::Close));
    }
    ranges
}

fn reads(ranges: &[(u64, u32)]) -> Vec<(Op, u64, u32)> {
    ranges.iter().map(|(offset, len)| (Op::Read, *offset, *len)).collect()
}

const READS: [(u64, u32); 9] = [
    (0, 1000),
    (1000, 500),
    (8192, 4096),
    (1500, 300),
    (20000, 300),
    (30000, 300),
    (1800, 300),
    (50000, 10),
    (99990, 10),
];

#[test]
fn every_way_to_read_is_told_with_its_range() {
    let stage = Stage::new(&[]);
    let told = stage.told("reads", Mode::Advise);
    assert_eq!(told.len(), 1);
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), reads(&READS));
    let file = &told[0];
    assert!(file.unregistered && file.flags == register::READ);
    assert_eq!(file.accesses.iter().map(|a| a.flags & flag::SHORT).filter(|f| *f != 0).count(), 1);
    let starts: Vec<u64> = file.accesses.iter().map(|a| a.start_ns).collect();
    assert!(starts.is_sorted() && starts[0] > 0);
    assert!(file.accesses[..9].iter().all(|a| a.duration_ns > 0 && a.thread == file.accesses[0].thread));
}

#[test]
fn recording_tells_moves_too() {
    let stage = Stage::new(&[]);
    let told = stage.told("reads", Mode::Record);
    let mut expected = reads(&READS);
    expected.insert(7, (Op::Seek, 50000, 0));
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), expected);
}

#[test]
fn in_a_lull_small_files_are_passed_over() {
    const OPENED: u64 = 64;
    let stage = Stage::new(&[]);
    stage.lengthen();
    let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), Mode::Advise);
    let passed_over = manager.small(SMALL_FILE_BYTES, u64::MAX);
    stage.run("lull", &manager.socket, true);
    let told = manager.finish();
    assert_eq!(of(&told, &stage.path("bytes")).next(), Some(reads(&[(0, 1000)])), "it is large");
    let small: Vec<_> = of(&told, &stage.path("lines")).collect();
    assert_eq!(small, [[(Op::Mmap, 0, 4096), (Op::Read, 0, 7)]], "the last one was mapped");
    assert_eq!(passed_over.load(std::sync::atomic::Ordering::SeqCst), 2 * OPENED * 7);
}

#[test]
fn a_small_file_with_a_plan_is_told_of_in_a_lull() {
    let stage = Stage::new(&[]);
    stage.lengthen();
    let (socket, lines) = (stage.dir.path().join("socket"), stage.path("lines"));
    let manager = Manager::start_with_plan(&socket, &stage.path(""), Some(&lines), Mode::Advise);
    let passed_over = manager.small(SMALL_FILE_BYTES, u64::MAX);
    stage.run("lull", &manager.socket, true);
    let (_, told) = manager.finish_lossy();
    assert!(told.iter().filter(|t| t.path == lines).count() > 64, "{told:?}");
    assert_eq!(passed_over.load(std::sync::atomic::Ordering::SeqCst), 0);
}

/// A read that waits is told of, and so are all files from then on.
#[test]
fn a_lull_ends_when_a_read_waits() {
    let stage = Stage::new(&[]);
    let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), Mode::Advise);
    manager.small(SMALL_FILE_BYTES, 1);
    stage.run("lull_ends", &manager.socket, true);
    // Some of the reads and closes until then may find no room.
    let (_, told) = manager.finish_lossy();
    let small: Vec<_> = told.iter().filter(|t| t.path == stage.path("lines")).collect();
    assert!(small.len() > 3, "{}", small.len());
    let last: Vec<_> = small[small.len() - 3..].iter().map(|t| accesses(t)).collect();
    assert_eq!(last, [1, 2, 3].map(|i| reads(&[(7 * i, 7)])));
    let lines = told.iter().find(|t| t.path == stage.path("lines")).expect("one at least");
    assert!(lines.accesses[0].duration_ns >= 40_000, "that which waited is the first: {:?}", lines.accesses[0]);
}

/// What a program puts into a new file is in memory when it reads it. Who learns from a run hears of one that becomes long.
#[test]
fn a_new_file_is_passed_over_but_for_a_record() {
    for (mode, small_bytes, expected) in
        [(Mode::Advise, 4, 0), (Mode::Record, 5, 0), (Mode::Record, 4, 1), (Mode::Record, 0, 2)]
    {
        let stage = Stage::new(&[]);
        let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), mode);
        manager.small(small_bytes, 0);
        stage.run("opens", &manager.socket, true);
        let told = manager.finish();
        let made: Vec<_> = told.iter().filter(|t| t.path.to_str().unwrap().contains("made")).collect();
        assert_eq!(made.len(), expected, "{mode:?}, {small_bytes} bytes: {told:?}");
        assert!(made.iter().all(|t| t.ranges().iter().any(|(op, ..)| *op == Op::Write)), "{made:?}");
        assert_eq!(of(&told, &stage.path("bytes")).count(), 8, "others are told of");
    }
}

/// Nothing is learnt from where a program goes.
#[test]
fn a_lesson_has_no_moves() {
    let stage = Stage::new(&[]);
    let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), Mode::Record);
    manager.small(4, 0);
    stage.run("reads", &manager.socket, true);
    assert_eq!(of(&manager.finish(), &stage.path("bytes")).next().unwrap(), reads(&READS));
}

#[test]
fn every_way_to_open_is_seen_by_the_canonical_path() {
    for flags in [&["-D_FORTIFY_SOURCE=2"][..], &["-D_FILE_OFFSET_BITS=64", "-U_FORTIFY_SOURCE"]] {
        let stage = Stage::new(flags);
        let told = stage.told("opens", Mode::Record);
        let mut expected: Vec<_> = (0..7).map(|i| reads(&[(i * 10, 10)])).collect();
        expected.push(reads(&[(0, 7)]));
        assert_eq!(of(&told, &stage.path("bytes")).collect::<Vec<_>>(), expected);
        let made: Vec<_> = told.iter().filter(|t| t.path.to_str().unwrap().contains("made")).collect();
        assert_eq!(made.len(), 2);
        assert!(made.iter().all(|t| t.flags & (register::WRITE | register::REOPENED) == 10));
        assert_eq!(made[0].ranges()[..2], [(Op::Write, 0, 5), (Op::Write, 0, 1)]);
        assert_eq!(made[1].ranges()[..1], [(Op::Write, 0, 1)]);
        // Advice is for readers.
        let told = stage.told("opens", Mode::Advise);
        let made: Vec<_> = told.iter().filter(|t| t.path.to_str().unwrap().contains("made")).collect();
        assert_eq!(made.len(), 1);
        assert_eq!(made[0].ranges().iter().map(|r| r.0).collect::<Vec<_>>(), [Op::Close]);
    }
}

#[test]
fn fortified_reads_are_seen() {
    let stage = Stage::new(&["-D_FORTIFY_SOURCE=2"]);
    let symbols = run(std::process::Command::new("nm").arg("-D").arg(&stage.program));
    let symbols = String::from_utf8_lossy(&symbols.stdout).into_owned();
    for name in ["__read_chk", "__pread_chk", "__fread_chk", "__open_2", "__openat_2"] {
        assert!(symbols.contains(name), "the compiler did not use {name}");
    }
    let told = stage.told("chk", Mode::Advise);
    let expected = [reads(&[(0, 100), (5000, 100)]), reads(&[(0, 4096)])];
    assert_eq!(of(&told, &stage.path("bytes")).collect::<Vec<_>>(), expected);
}

#[test]
fn what_streams_read_and_write_inside_is_told() {
    let stage = Stage::new(&[]);
    let told = stage.told("streams", Mode::Record);
    let bytes: Vec<_> = of(&told, &stage.path("bytes")).collect();
    // To the block before 50000, which fills the buffer.
    let first = [(Op::Read, 0, 4096), (Op::Read, 4096, 4096), (Op::Seek, 49152, 0), (Op::Read, 49152, 4096)];
    assert_eq!(bytes[0], first);
    assert_eq!(bytes[1], reads(&[(0, 4096)]));
    let len = std::fs::metadata(stage.path("lines")).unwrap().len() as u32;
    let lines: Vec<_> = of(&told, &stage.path("lines")).collect();
    assert_eq!(lines[0], reads(&[(0, 4096), (4096, len - 4096)]));
    assert_eq!(lines[1], reads(&[(0, 4096)]));
    let out: Vec<_> = told.iter().filter(|t| t.path.to_str().unwrap().contains(".out")).collect();
    assert_eq!(out.len(), 1);
    let written: u64 = out[0].accesses.iter().filter(|a| a.op == Op::Write).map(|a| u64::from(a.len_bytes)).sum();
    assert_eq!(written, 10003);
    assert!(
        out[0]
            .accesses
            .windows(2)
            .all(|w| w[1].op == Op::Close || w[0].offset + u64::from(w[0].len_bytes) == w[1].offset)
    );
    assert!(told.iter().flat_map(|t| &t.accesses).all(|a| a.op == Op::Close || a.flags & flag::STREAM != 0));
}

/// A stream's pointers are read while other threads move them: what is told is in the file all the same, and all of it.
#[test]
fn a_stream_that_threads_share_is_told_within_the_file() {
    let stage = Stage::new(&[]);
    let told = stage.told("shared_stream", Mode::Record);
    let size = std::fs::metadata(stage.path("bytes")).unwrap().len();
    let reads = told.iter().flat_map(|t| &t.accesses).filter(|a| a.op == Op::Read);
    let mut ranges: Vec<_> = reads.map(|a| (a.offset, a.offset + u64::from(a.len_bytes))).collect();
    ranges.sort_unstable();
    let covered = ranges.iter().fold(0, |to, (from, end)| if *from <= to { to.max(*end) } else { to });
    assert_eq!((covered, ranges.iter().map(|r| r.1).max()), (size, Some(size)));
}

#[test]
fn threads_are_told_apart() {
    let stage = Stage::new(&[]);
    let told = stage.told("threads", Mode::Advise);
    assert_eq!(told.len(), 4);
    let mut ids = std::collections::HashSet::new();
    for file in &told {
        let me = file.accesses[0].offset / 20000;
        let expected: Vec<_> = (0..500).map(|i| (me * 20000 + i * 16, 16)).collect();
        assert_eq!(file.ranges()[..500], reads(&expected)[..]);
        ids.extend(file.accesses.iter().map(|a| a.thread));
    }
    assert_eq!(ids.len(), 4);
}

#[test]
fn children_speak_for_themselves() {
    let stage = Stage::new(&[]);
    let told = stage.told("forks", Mode::Advise);
    let by_client = |client| told.iter().filter(move |t: &&Told| t.client == client && t.path == stage.path("bytes"));
    let parent: Vec<_> = by_client(told[0].client).collect();
    assert_eq!(parent.len(), 1);
    assert_eq!(parent[0].ranges()[..3], reads(&[(0, 100), (150, 10), (172, 7)])[..]);
    let others: Vec<_> = told.iter().filter(|t| t.client != told[0].client).collect();
    let mut ranges: Vec<_> = others.iter().map(|t| t.ranges()[0]).collect();
    ranges.sort_by_key(|r| r.1);
    // The forked child, and the executed one, which met its standard input open.
    assert_eq!(ranges, reads(&[(100, 50), (160, 12)]));
    assert!(others.iter().all(|t| t.flags & register::FOUND != 0));
}

/// Recorded programs wait for the manager at their start, and their forked children do.
#[test]
fn children_that_are_recorded_miss_nothing() {
    let stage = Stage { wait_ms: Some("5000"), ..Stage::new(&[]) };
    let told = stage.told("hasty", Mode::Record);
    let mut first: Vec<_> = told.iter().filter(|t| t.client != told[0].client).map(|t| t.ranges()[0]).collect();
    first.sort_by_key(|r| r.1);
    assert_eq!(first, reads(&std::array::from_fn::<_, 20, _>(|i| (1000 + 50 * i as u64, 50))));
}

#[test]
fn numbers_that_change_hands_are_not_mixed_up() {
    let stage = Stage::new(&[]);
    let told = stage.told("dups", Mode::Advise);
    let mut bytes: Vec<_> = of(&told, &stage.path("bytes")).flatten().map(|r| (r.1, r.2)).collect();
    let lines: Vec<_> = of(&told, &stage.path("lines")).flatten().map(|r| (r.1, r.2)).collect();
    bytes.sort();
    assert_eq!(bytes, [(0, 10), (0, 10), (1, 20), (3, 20), (10, 10), (20, 10), (30, 10), (40, 10)]);
    assert_eq!(lines, [(0, 6), (0, 4), (0, 20), (2, 20), (4, 20)]);
}

#[test]
fn a_signal_handler_may_read() {
    let stage = Stage::new(&[]);
    let told = stage.told("signals", Mode::Advise);
    let seen: Vec<_> = of(&told, &stage.path("bytes")).collect();
    assert_eq!(seen, [reads(&[(640, 32), (640, 32), (640, 32)])]);
}

#[test]
fn copies_in_the_kernel_and_maps_are_told() {
    let stage = Stage::new(&[]);
    let told = stage.told("copies", Mode::Record);
    let mut expected = reads(&[(1000, 500), (0, 200), (3000, 600), (200, 100)]);
    expected.push((Op::Mmap, 4096, 8192));
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), expected);
    let copy = told.iter().find(|t| t.path.to_str().unwrap().contains(".copy")).unwrap();
    assert_eq!(copy.ranges()[0], (Op::Write, 0, 600));
    assert_eq!(copy.accesses[0].flags, flag::IN_KERNEL);
}

#[test]
fn asynchronous_reads_are_told_when_submitted() {
    let stage = Stage::new(&[]);
    let told = stage.told("aio", Mode::Advise);
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), reads(&[(700, 100), (900, 50)]));
    assert!(told[0].accesses[..2].iter().all(|a| a.flags & flag::ASYNC != 0));
}

#[test]
fn libaio_is_told_even_when_it_was_loaded_out_of_sight() {
    let stage = Stage::new(&[]);
    let told = stage.told("libaio", Mode::Advise);
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), reads(&[(300, 100), (5000, 70)]));
}

/// What a ring of the program's own is given, by its system calls.
#[test]
#[cfg(target_arch = "x86_64")]
fn what_is_put_into_a_ring_is_told_when_the_kernel_has_taken_it() {
    let stage = Stage::new(&[]);
    let Some((told, unseen)) = stage.rings("urings") else { return };
    let bytes: Vec<_> = of(&told, &stage.path("bytes")).collect();
    let wanted = [(300, 100), (5000, 70), (700, 50), (40, 10), (600, 123), (650, 30), (800, 8)];
    assert_eq!(bytes, [reads(&wanted), reads(&[(900, 20)])]);
    assert_eq!(of(&told, &stage.path("lines")).next().unwrap(), reads(&[(0, 7)]));
    let is_async = |a: &&impresario_ring::Access| a.op == Op::Read && a.flags & flag::ASYNC != 0;
    assert_eq!(told.iter().flat_map(|t| &t.accesses).filter(is_async).count(), 9);
    assert_eq!(unseen, Unseen { bytes: 14, rings: 0 }, "of two places in the ring's table whose file is not known");
}

/// Rings that are fed in ways that pass nothing that could be interposed are looked into: each read is told, or counted as missed.
#[cfg(target_arch = "x86_64")]
fn looked_into(case: &str) {
    let stage = Stage::new(&[]);
    let Some((told, missed, unseen)) = stage.rings_lossy(case) else { return };
    assert_eq!(unseen, Unseen::default());
    let mut bytes = of(&told, &stage.path("bytes")).next().unwrap();
    let waited_for = (0..3).flat_map(|i| [(1000 * i, 100), (1000 * i + 500, 10)]).collect::<Vec<_>>();
    let hasty = bytes.split_off(waited_for.len());
    assert_eq!(bytes, reads(&waited_for));
    assert_eq!(hasty.len() as u64 + missed, 101, "{} told, {missed} missed", hasty.len());
    assert!(hasty.is_sorted_by_key(|r| r.1) && hasty.iter().all(|r| r.1 >= 10_000 && r.1 % 100 == 0 && r.2 == 50));
    assert_eq!(of(&told, &stage.path("lines")).next().unwrap(), reads(&[(0, 7)]));
    let mut all = told.iter().flat_map(|t| &t.accesses).filter(|a| a.op == Op::Read);
    assert!(all.all(|a| a.flags & flag::ASYNC != 0));
}

#[test]
#[cfg(target_arch = "x86_64")]
fn what_a_program_hands_over_by_instructions_of_its_own_is_seen_in_its_ring() {
    looked_into("inline");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn what_the_kernel_takes_by_itself_is_seen_in_the_ring() {
    looked_into("polled");
}

/// A program that restricts its system calls while its rings are looked into is not ended by that.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_program_that_restricts_itself_is_looked_into_no_more() {
    let stage = Stage::new(&[]);
    if let Some((told, ..)) = stage.rings_lossy("restricted_ring") {
        assert!(told.iter().all(|t| t.accesses.iter().all(|a| a.op == Op::Close)), "{told:?}");
    }
}

/// A ring of one entry, used again every few microseconds.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_ring_that_is_too_fast_to_be_looked_into_is_said_to_be() {
    let stage = Stage::new(&[]);
    let Some((_, _, unseen)) = stage.rings_lossy("too_fast") else { return };
    assert_eq!(unseen, Unseen { bytes: 0, rings: 1 });
}

/// And by liburing, whose system calls pass nothing that could be interposed.
#[test]
fn what_liburing_submits_is_told() {
    if !Path::new("/usr/include/liburing.h").exists() {
        return impresario_testing::skip("liburing", "liburing.h is not installed");
    }
    let mut stage = Stage::new(&[]);
    stage.program = compile(stage.dir.path(), "liburing", &["-Wl,--no-as-needed", "-luring"]);
    let Some((told, unseen)) = stage.rings("") else { return };
    assert_eq!(unseen, Unseen::default());
    let wanted =
        [(300, 100), (500, 20), (700, 30), (900, 11), (1000, 40), (2000, 10), (2100, 10), (2200, 10), (2300, 10)];
    assert_eq!(of(&told, &stage.path("bytes")).next().unwrap(), reads(&wanted));
}

/// Ten thousand files open at once, faster than any manager takes them: those that it could not take are not told, and
/// the program reads all of them.
#[test]
fn many_open_files() {
    let stage = Stage::new(&[]);
    let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), Mode::Advise);
    stage.run("many", &manager.socket, true);
    let (_, told) = manager.finish_lossy();
    assert!(told.len() > 200, "{} registered", told.len());
    for file in told.iter().filter(|t| !t.accesses.is_empty()) {
        assert!(file.accesses.iter().filter(|a| a.op == Op::Read).count() <= 1);
    }
}

/// A recorded program waits for a manager that is slower than it, so that the record is whole.
#[test]
fn everything_is_recorded_however_fast_files_are_opened() {
    let mut stage = Stage::new(&[]);
    stage.wait_ms = Some("10000");
    let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), Mode::Record);
    stage.run("many", &manager.socket, true);
    let (dropped, told) = manager.finish_lossy();
    let reads = told.iter().flat_map(|t| &t.accesses).filter(|a| a.op == Op::Read).count();
    let opened = told.iter().filter(|t| t.unregistered).count();
    assert!(told.len() > 1000, "{} registered", told.len());
    assert_eq!((dropped, opened, reads), (0, told.len(), told.len()));
}

#[test]
fn the_librarys_descriptors_are_out_of_the_programs_reach() {
    let stage = Stage::new(&[]);
    let told = stage.told("closes", Mode::Advise);
    let first = of(&told, &stage.path("bytes")).next().unwrap();
    assert_eq!(first, reads(&[(0, 10), (10, 10), (20, 10), (30, 10), (40, 10)]));
    // One connection throughout.
    assert!(told.iter().all(|t| t.client == told[0].client));
}

/// A child of `vfork` that gives up rights runs in its parent's memory; the parent is served on.
#[test]
fn a_restricted_child_does_not_switch_its_parent_off() {
    let stage = Stage::new(&[]);
    let told = stage.told("restricted_child", Mode::Advise);
    let first = of(&told, &stage.path("bytes")).next().unwrap();
    assert_eq!(first, reads(&[(0, 10), (10, 7)]));
}

/// The first open file that it locks was shared with the manager until then; later ones are not, so that none is locked any longer than
/// the program has it.
#[test]
fn a_program_that_locks_open_files_shares_no_more_of_them() {
    let stage = Stage::new(&[]);
    let told = stage.told("locks_open_files", Mode::Advise);
    let shared = |name: &str| {
        let of_it = told.iter().filter(|t| t.path == stage.path(name));
        of_it.map(|t| t.flags & register::REOPENED == 0).collect::<Vec<_>>()
    };
    assert_eq!((shared("bytes"), shared("lines")), (vec![true, false], vec![false]), "{told:?}");
}

/// To open a file once more would end its program's write lease, and the program.
#[test]
fn a_file_with_a_lease_is_left_alone() {
    let stage = Stage::new(&[]);
    for mode in [Mode::Advise, Mode::Record] {
        let manager = Manager::start(&stage.dir.path().join("socket"), &stage.path(""), mode);
        let said = stage.said("leases", &manager.socket, true);
        if said == "no lease\n" {
            return impresario_testing::skip("leases", "this file system has none");
        }
        assert_eq!(said, "ok\n");
        let told = manager.finish();
        assert!(told.len() == 2 && told.iter().all(|of| of.unregistered), "{told:?}");
        assert!(told.iter().all(|of| of.ranges().iter().all(|range| *range != (Op::Read, 2, 4))), "{told:?}");
    }
}

/// Whether there is a manager or not, programs behave as without the library.
#[test]
fn edges_with_and_without_a_manager() {
    let stage = Stage::new(&[]);
    let cases = [
        "limits",
        "cancels",
        "executes",
        "locks",
        "sandboxed",
        "reads",
        "opens",
        "streams",
        "forks",
        "dups",
        "signals",
    ];
    for case in cases.into_iter().chain(["copies", "aio", "libaio", "closes", "threads", "many"]) {
        stage.run(case, Path::new("/nowhere/socket"), false);
    }
    for case in &cases[..5] {
        for mode in [Mode::Advise, Mode::Record] {
            stage.told(case, mode);
        }
    }
}
