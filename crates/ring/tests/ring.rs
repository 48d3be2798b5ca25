//! Both ends of a ring: with many threads, across a fork, and against hostile clients.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use impresario_ring::{
    Access, Consumer, Corrupt, HEADER_BYTES, Op, Producer, Push, SLOT_BYTES, SLOTS_MIN, STUCK_NS, Sleep, Unusable,
    ring_bytes,
};
use proptest::prelude::*;

const HEAD_AT: u64 = 128;
const TAIL_AT: u64 = 256;
const ASLEEP_AT: u64 = 512;

fn access(file: u32, offset: u64) -> Access {
    Access { file, op: Op::Read, flags: 0, thread: 7, offset, len_bytes: 4096, duration_ns: 100, start_ns: offset }
}

fn pair(slots: u32) -> (Producer, Consumer, std::fs::File) {
    let (producer, memory) = Producer::create(slots).unwrap();
    let consumer = Consumer::map(&memory).unwrap();
    (producer, consumer, std::fs::File::from(memory))
}

fn stored(push: Push) -> bool {
    matches!(push, Push::Stored | Push::Wake)
}

fn drain_all(consumer: &mut Consumer) -> Vec<Access> {
    let mut seen = Vec::new();
    while consumer.drain(u32::MAX, |a| seen.push(a)).unwrap().more {}
    seen
}

/// However many threads wait, the lull lasts until the sum of their waits.
#[test]
fn a_lull_ends_when_reads_have_waited() {
    let (producer, mut consumer, _) = pair(SLOTS_MIN);
    assert!(!producer.is_lull() && producer.may_wait(0) && !producer.may_wait(1), "there is none at first");
    consumer.set_small(4096);
    consumer.set_lull(consumer.waited_ns() + 1000);
    assert_eq!((producer.small_bytes(), producer.is_lull()), (4096, true));
    let passes = || (0..100).filter(|_| producer.may_wait(3)).count();
    let all: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(passes)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((all, producer.is_lull(), consumer.waited_ns()), (333, false, 1201));
    assert!(producer.may_wait(0), "what is read fast is never of interest");
    consumer.set_lull(u64::MAX);
    assert!(producer.is_lull() && producer.may_wait(u64::MAX / 2));
}

#[test]
fn pushed_accesses_are_drained_in_order() {
    let (producer, mut consumer, _) = pair(SLOTS_MIN);
    for lap in 0..5u64 {
        for i in 0..50 {
            assert!(stored(producer.push(access(1, lap * 50 + i))));
        }
        let seen: Vec<u64> = drain_all(&mut consumer).iter().map(|a| a.offset).collect();
        assert_eq!(seen, (lap * 50..lap * 50 + 50).collect::<Vec<_>>());
    }
    assert_eq!((consumer.dropped(), consumer.slots()), (0, SLOTS_MIN));
}

#[test]
fn a_full_ring_drops_counts_and_continues() {
    let (producer, mut consumer, _) = pair(64);
    let pushed = (0..100).filter(|i| stored(producer.push(access(1, *i)))).count();
    assert_eq!((pushed, producer.dropped(), consumer.dropped()), (64, 36, 36));
    assert_eq!(drain_all(&mut consumer).len(), 64);
    assert!(stored(producer.push(access(1, 1000))));
    assert_eq!(drain_all(&mut consumer)[0].offset, 1000);
}

#[test]
fn a_drain_visits_at_most_max_positions() {
    let (producer, mut consumer, _) = pair(64);
    (0..10).for_each(|i| assert!(stored(producer.push(access(1, i)))));
    let first = consumer.drain(4, |_| {}).unwrap();
    assert_eq!((first.accesses, first.more), (4, true));
    let rest = consumer.drain(4000, |_| {}).unwrap();
    assert_eq!((rest.accesses, rest.more), (6, false));
}

#[test]
fn one_push_wakes_a_manager_that_sleeps() {
    let (producer, mut consumer, _) = pair(64);
    // Before the manager's first drain it counts as asleep.
    assert_eq!(producer.push(access(1, 0)), Push::Wake);
    assert_eq!(producer.push(access(1, 1)), Push::Stored);
    assert_eq!(consumer.sleep(), Sleep::Pending);
    assert_eq!(producer.push(access(1, 2)), Push::Stored);
    assert_eq!(drain_all(&mut consumer).len(), 3);
    assert_eq!(consumer.sleep(), Sleep::Allowed);
    assert_eq!(producer.push(access(1, 3)), Push::Wake);
    assert_eq!(producer.push(access(1, 4)), Push::Stored);
}

#[test]
fn a_closed_ring_refuses_accesses() {
    let (producer, consumer, _) = pair(64);
    assert!(!producer.is_closed());
    drop(consumer);
    assert_eq!(producer.push(access(1, 0)), Push::Closed);
    assert!(producer.is_closed());
}

#[test]
fn a_renewed_ring_is_empty_and_independent() {
    let (producer, mut old, _) = pair(64);
    assert!(stored(producer.push(access(1, 1))));
    let memory = producer.renew().unwrap();
    let mut new = Consumer::map(&memory).unwrap();
    assert!(stored(producer.push(access(2, 2))));
    assert_eq!(drain_all(&mut old).iter().map(|a| a.file).collect::<Vec<_>>(), [1]);
    assert_eq!(drain_all(&mut new).iter().map(|a| a.file).collect::<Vec<_>>(), [2]);
    assert!(new.started_ns() > old.started_ns());
}

/// Several threads push while one drains and sleeps: only counted accesses are lost, none is repeated, each thread's
/// accesses keep their order, and a sleeping manager is always woken.
#[test]
fn threads_push_while_the_manager_drains() {
    const THREADS: u32 = 4;
    const EACH: u64 = 30_000;
    let (producer, mut consumer, _) = pair(256);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let done = AtomicBool::new(false);
    let mut seen: Vec<Vec<u64>> = vec![Vec::new(); THREADS as usize];
    let stuck = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|file| {
                let (producer, event) = (&producer, &event);
                scope.spawn(move || {
                    for i in 0..EACH {
                        loop {
                            match producer.push(access(file, i)) {
                                Push::Stored => break,
                                Push::Wake => {
                                    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
                                    break;
                                }
                                Push::Full => std::thread::yield_now(),
                                Push::Closed => panic!("closed"),
                            }
                        }
                    }
                })
            })
            .collect();
        let watcher = scope.spawn(|| {
            workers.into_iter().for_each(|w| w.join().unwrap());
            done.store(true, Ordering::SeqCst);
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        });
        let mut stuck = false;
        loop {
            let finished = done.load(Ordering::SeqCst);
            let drained = consumer.drain(100, |a| seen[a.file as usize].push(a.offset)).unwrap();
            assert_eq!((drained.invalid, drained.skipped), (0, 0));
            if drained.more {
                continue;
            }
            if finished {
                break;
            }
            if consumer.sleep() == Sleep::Allowed {
                let mut poll = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
                let limit = rustix::time::Timespec { tv_sec: 20, tv_nsec: 0 };
                if rustix::event::poll(&mut poll, Some(&limit)).unwrap() == 0 {
                    stuck = true;
                    break;
                }
                let _ = rustix::io::read(&event, &mut [0; 8]);
            }
        }
        watcher.join().unwrap();
        stuck
    });
    assert!(!stuck, "a push did not wake the manager");
    for offsets in &seen {
        assert_eq!(offsets, &(0..EACH).collect::<Vec<_>>());
    }
}

/// After `renew` the child pushes to its own ring, and the parent's ring is unaffected.
#[test]
fn a_forked_child_renews() {
    let (producer, mut consumer, _) = pair(64);
    assert!(stored(producer.push(access(1, 0))));
    // SAFETY: the child only makes system calls and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let good = producer.renew().is_ok() && stored(producer.push(access(2, 0)));
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(if good { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(stored(producer.push(access(1, 1))));
    assert_eq!(drain_all(&mut consumer).iter().map(|a| (a.file, a.offset)).collect::<Vec<_>>(), [(1, 0), (1, 1)]);
}

fn write_u64(file: &std::fs::File, at: u64, value: u64) {
    file.write_all_at(&value.to_ne_bytes(), at).unwrap();
}

fn read_u64(file: &std::fs::File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_ne_bytes(bytes)
}

#[test]
fn a_thread_that_dies_during_a_push_delays_others_only_briefly() {
    let (producer, mut consumer, file) = pair(64);
    assert!(stored(producer.push(access(1, 0))));
    // Three positions claimed but never completed, then three valid ones.
    write_u64(&file, HEAD_AT, read_u64(&file, HEAD_AT) + 3);
    (10..13).for_each(|i| assert!(stored(producer.push(access(1, i)))));
    let at = 1_000_000;
    let first = consumer.drain_at(at, 100, |a| assert_eq!(a.offset, 0)).unwrap();
    assert_eq!((first.accesses, first.skipped, first.more), (1, 0, true));
    assert_eq!(consumer.drain_at(at + STUCK_NS, 100, |_| panic!()).unwrap().accesses, 0);
    // Claimed later than the others, so it has its own timeout.
    write_u64(&file, HEAD_AT, read_u64(&file, HEAD_AT) + 1);
    let mut seen = Vec::new();
    let late = consumer.drain_at(at + STUCK_NS + 1, 100, |a| seen.push(a.offset)).unwrap();
    assert_eq!((seen.as_slice(), late.skipped, late.more), (&[10, 11, 12][..], 3, true));
    assert!(!consumer.drain_at(at + 3 * STUCK_NS, 100, |_| panic!()).unwrap().more);
    assert!(stored(producer.push(access(1, 20))));
    assert_eq!(drain_all(&mut consumer)[0].offset, 20);
}

#[test]
fn complete_accesses_of_a_dead_program_are_drained_at_once() {
    let (producer, mut consumer, file) = pair(64);
    assert!(stored(producer.push(access(1, 1))));
    write_u64(&file, HEAD_AT, read_u64(&file, HEAD_AT) + 1);
    assert!(stored(producer.push(access(1, 2))));
    drop(producer);
    let mut seen = Vec::new();
    let ended = consumer.drain_ended(|a| seen.push(a.offset)).unwrap();
    assert_eq!((seen.as_slice(), ended.skipped, ended.more), (&[1, 2][..], 1, false));
}

#[test]
fn impossible_positions_are_corrupt() {
    for head in [u64::MAX, 0, 1 << 63] {
        let (producer, mut consumer, file) = pair(64);
        assert!(stored(producer.push(access(1, 0))));
        write_u64(&file, HEAD_AT, head);
        assert_eq!(consumer.drain(100, |_| panic!()), Err(Corrupt));
        assert_eq!(consumer.drain_ended(|_| panic!()), Err(Corrupt));
        let _ = consumer.sleep();
        let _ = producer.push(access(1, 0));
    }
    // The shared tail only informs the client; its later values are ignored.
    let (producer, mut consumer, file) = pair(64);
    assert!(stored(producer.push(access(1, 5))));
    write_u64(&file, TAIL_AT, 3);
    assert_eq!(drain_all(&mut consumer).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    /// Whatever the other side writes, draining and pushing terminate within their limits.
    #[test]
    fn a_hostile_ring_is_bounded(writes in proptest::collection::vec((0..ring_bytes(64) as u64 / 8, any::<u64>()), 1..200),
                                 near in proptest::collection::vec(-70i64..70, 1..20), max in 0u32..200) {
        let (producer, mut consumer, file) = pair(64);
        for (word, value) in writes {
            write_u64(&file, word * 8, value);
            let _ = producer.push(access(1, 1));
            let mut taken = 0;
            if let Ok(d) = consumer.drain_at(word, max, |_| taken += 1) {
                prop_assert_eq!(d.accesses, taken);
                prop_assert!(d.accesses + d.skipped + d.invalid <= max.min(64));
            }
            let _ = consumer.sleep();
        }
        for step in near {
            write_u64(&file, HEAD_AT, read_u64(&file, TAIL_AT).wrapping_add_signed(step));
            write_u64(&file, ASLEEP_AT, step as u64);
            let _ = producer.push(access(1, 1));
            let mut taken = 0u32;
            if consumer.drain_ended(|_| taken += 1).is_ok() {
                prop_assert!(taken <= 64);
            }
        }
    }
}

fn memory(bytes: u64, seal: bool) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, bytes).unwrap();
    if seal {
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    }
    memory
}

#[test]
fn invalid_rings_are_not_mapped() {
    let good = ring_bytes(64) as u64;
    assert!(matches!(Consumer::map(memory(good, false)), Err(Unusable::NotSealed)));
    assert!(matches!(Consumer::map(memory(good, true)), Err(Unusable::Header)));
    for bytes in [0, 1, good - 1, good + SLOT_BYTES as u64, HEADER_BYTES as u64, 1 << 50] {
        assert!(matches!(Consumer::map(memory(bytes, true)), Err(Unusable::Size(b)) if b == bytes), "{bytes}");
    }
    assert!(matches!(Consumer::map(std::fs::File::open("/proc/self/status").unwrap()), Err(Unusable::NotMemory)));
    let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(Consumer::map(&a), Err(Unusable::NotMemory)));
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    assert!(matches!(Consumer::map(&event), Err(Unusable::NotMemory)));
    // Another version, and a header with more slots than there are.
    for (at, value) in [(8u64, 2u32), (12, 128), (0, 0)] {
        let (_producer, _consumer, file) = pair(64);
        file.write_all_at(&value.to_ne_bytes(), at).unwrap();
        assert!(matches!(Consumer::map(&file), Err(Unusable::Header)));
    }
    // A read-only file cannot be a ring.
    let (_producer, memory) = Producer::create(64).unwrap();
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    assert!(matches!(Consumer::map(std::fs::File::open(path).unwrap()), Err(Unusable::Io(_))));
}

#[test]
fn the_descriptor_is_sealed_and_closed_on_exec() {
    let (producer, memory) = Producer::create(64).unwrap();
    for memory in [memory, producer.renew().unwrap()] {
        assert!(rustix::fs::ftruncate(&memory, 0).is_err() && rustix::fs::ftruncate(&memory, 1 << 20).is_err());
        let flags = rustix::io::fcntl_getfd(memory.as_fd()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
    assert!(Producer::create(100).is_err() && Producer::create(0).is_err() && Producer::create(1 << 31).is_err());
}
