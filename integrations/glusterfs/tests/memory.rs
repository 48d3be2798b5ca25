//! A brick with little memory: what clients write and read exceeds its page cache and fills the translator's queue.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use impresario_testing::skip;
use impresario_workload::programs::{Group, Limits};

use crate::support::{Brick, Machine, PATIENCE, Place, Volume, apart, figure, on_disk, statedump, until};

const MIB: u64 = 1 << 20;
/// What the brick may use, its page cache and the kernel's memory for it included.
const LIMIT_BYTES: u64 = 96 * MIB;
/// Payload that may be queued, and requests.
const QUEUE_BYTES: u64 = 4 * MIB;
const QUEUE_REQUESTS: u64 = 24;
const WRITERS: u64 = 48;
const MOUNTS: u64 = 4;
const BLOCK: usize = 128 << 10;
/// Blocks of a writer: all together are more than twice [`LIMIT_BYTES`].
const BLOCKS: u64 = 40;
/// Times that each block is written, at least.
const ROUNDS: u64 = 3;
/// How much memory that cannot be reclaimed may grow from one brick to the next that does as much.
const GROWTH_BYTES: u64 = 8 * MIB;

/// A group of processes that share a limit of memory.
fn group() -> Option<Group> {
    // Process numbers repeat, where each test has a namespace of them.
    let now = std::time::UNIX_EPOCH.elapsed().expect("a clock after 1970");
    let name = format!("impresario-brick-{}-{}", std::process::id(), now.as_nanos());
    let made = Group::new(&name, None, Limits { memory_bytes: LIMIT_BYTES, ..Limits::default() });
    made.inspect_err(|error| skip("cgroup-memory", format!("{error:#}"))).ok()
}

/// Tells the writers that nobody waits for them any more.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn a_brick_with_little_memory_loses_nothing_and_does_not_grow() {
    apart("memory::inside_little_memory");
}

/// The file that a writer shares with one on each of the other mounts, who write its neighbours.
fn name(writer: u64) -> String {
    format!("file{}", writer / MOUNTS)
}

/// Where a writer's block is in that file.
fn place(writer: u64, block: u64) -> u64 {
    (block * MOUNTS + writer % MOUNTS) * BLOCK as u64
}

/// The bytes that a write puts into a block: which writer, which write.
fn content(writer: u64, n: u64) -> Vec<u8> {
    let word = (writer << 48 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().repeat(BLOCK / 8)
}

/// Whatever a brick is at when it is killed, and however little memory it has: what was answered is there, and what it takes
/// stays the same.
#[test]
#[ignore = "run by another test as a process"]
fn inside_little_memory() {
    let machine = Machine::new();
    let Some(_disk) = on_disk(&machine, "memory") else { return };
    let Some(group) = group() else { return };
    let (bytes, requests) = (QUEUE_BYTES.to_string(), QUEUE_REQUESTS.to_string());
    let options = [
        ("policy", "mlf"),
        ("depth", "2"),
        ("merge", "file"),
        ("queue-bytes", bytes.as_str()),
        ("queue-requests", requests.as_str()),
        // Each call of the storage takes so long that a queue forms.
        ("delay.delay-duration", "2000"),
    ];
    let mut volume = Volume::start(&machine, "memory", 1, Place::Above, &options);
    let mounts: Vec<_> = (0..MOUNTS).map(|_| volume.mount_uncached()).collect();
    let front = group.front();
    let front: Vec<&str> = front.iter().map(String::as_str).collect();
    let renew = |volume: &mut Volume| {
        let brick = &mut volume.bricks[0];
        brick.process.signal("KILL");
        brick.process.end(PATIENCE).expect("the brick is killed");
        let accepted = |brick: &Brick| brick.log().matches("accepted client from").count() as u64;
        let before = accepted(brick);
        brick.restart(&front);
        // GlusterFS 10.3 crashes (SIGFPE) where it is to dump its state right after its start.
        until("the brick's clients", || accepted(brick) >= before + MOUNTS);
    };
    renew(&mut volume);

    let (ended, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let end = Instant::now() + 3 * PATIENCE;
    // Repeats a block until it is answered, and goes round its blocks until the last brick has done its part.
    let write = |writer: u64| {
        let path = mounts[(writer % MOUNTS) as usize].path.join(name(writer));
        let (mut file, mut n) = (None, 0);
        loop {
            let open = || File::options().create(true).truncate(false).read(true).write(true).open(&path);
            let opened: std::io::Result<File> = file.take().map_or_else(open, Ok);
            let done = opened.and_then(|file| {
                file.write_all_at(&content(writer, n), place(writer, n % BLOCKS))?;
                // Reads compete for the same memory, and see what was written.
                let behind = (n + 7) % BLOCKS;
                if let Some(last) = (n + 7).checked_sub(BLOCKS) {
                    let mut read = vec![0; BLOCK];
                    file.read_exact_at(&mut read, place(writer, behind))?;
                    assert!(read == content(writer, last), "writer {writer}, block {behind}: not of write {last}");
                }
                Ok(file)
            });
            match done {
                Ok(open) => {
                    (file, n) = (Some(open), n + 1);
                    answered.fetch_add(1, SeqCst);
                    if n >= ROUNDS * BLOCKS && ended.load(SeqCst) {
                        return n;
                    }
                }
                Err(error) => {
                    assert!(Instant::now() < end && !ended.load(SeqCst), "{}: {error}", path.display());
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    };
    let written: Vec<u64> = std::thread::scope(|s| {
        let writers: Vec<_> = (0..WRITERS).map(|writer| s.spawn(move || write(writer))).collect();
        // Whatever fails here: the writers need not wait for it.
        let _end = Ended(&ended);
        // As much through one brick as through the next, which is killed with its queue full.
        let part = WRITERS * BLOCKS * ROUNDS / 4;
        let mut peaks: Vec<u64> = Vec::new();
        for brick in 0..3 {
            let (reclaims, from, mut peak) = (group.reclaims(), answered.load(SeqCst), 0);
            let (mut queued, mut unscheduled, mut merged) = (0, 0, 0);
            until("the brick's part, with little page cache, a full queue and merged writes", || {
                peak = peak.max(group.anonymous_bytes());
                assert!(volume.bricks[0].process.0.try_wait().unwrap().is_none(), "no memory for the brick");
                let report = statedump(volume.bricks[0].process.0.id());
                queued = queued.max(figure(&report, "queued_write_bytes"));
                (unscheduled, merged) = (figure(&report, "unscheduled_requests"), figure(&report, "merged_calls"));
                assert!(figure(&report, "queued_requests") <= QUEUE_REQUESTS, "{report:?}");
                // The writers go on until all of it was seen: how soon that is depends on what else the machine does.
                let was_short = group.reclaims() > reclaims && queued > 0 && unscheduled > 0 && merged > 0;
                answered.load(SeqCst) >= from + part && was_short
            });
            println!(
                "brick {brick}: {} reclaims, {} MiB, {} KiB queued, {unscheduled} passed on",
                group.reclaims() - reclaims,
                peak / MIB,
                queued >> 10
            );
            assert!(queued <= QUEUE_BYTES, "{queued} bytes were queued");
            peaks.push(peak);
            if brick < 2 {
                renew(&mut volume);
            }
        }
        ended.store(true, SeqCst);
        let written = writers.into_iter().map(|w| w.join().unwrap()).collect();
        // The last one has gone on to the end: what it took for as much again is no more.
        peaks.push(group.anonymous_bytes());
        let first = peaks[0];
        assert!(peaks.iter().all(|peak| *peak < first + GROWTH_BYTES), "{peaks:?}");
        written
    });
    until("the end of all requests", || volume.sum("open_requests") == 0);
    assert_eq!(volume.sum("queued_write_bytes"), 0);
    drop(mounts);
    let fresh = volume.mount_uncached();
    for (writer, written) in (0..WRITERS).zip(written) {
        let file = File::open(fresh.path.join(name(writer))).unwrap();
        assert_eq!(file.metadata().unwrap().len(), BLOCKS * MOUNTS * BLOCK as u64, "{}", name(writer));
        let mut read = vec![0; BLOCK];
        for block in 0..BLOCKS {
            let last = (written - 1 - block) / BLOCKS * BLOCKS + block;
            file.read_exact_at(&mut read, place(writer, block)).unwrap();
            assert!(read == content(writer, last), "writer {writer}, block {block}: not of write {last}");
        }
    }
}
