use std::collections::HashSet;

use super::*;
use crate::predicted::Recorded;
use crate::predictor::{Limits, Predictor, Source};
use impresario_base::Random;

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

/// A run that reads these blocks of 16 KiB, one a millisecond.
fn follower(blocks: &[u64]) -> Follower {
    let read = |(n, block): (usize, &u64)| Recorded {
        file: 7,
        write: false,
        offset: block * 16 * KIB,
        len: 16 * KIB,
        arrival_ns: n as u64 * MS,
        completed_ns: None,
        source: 0,
    };
    let queues = PredictedQueues::new(blocks.iter().enumerate().map(read));
    let earlier = EarlierReads::of(&queues);
    assert!(earlier.file(8).is_none());
    Follower::new(Arc::clone(earlier.file(7).unwrap()))
}

fn block(number: u64) -> Range<u64> {
    number * 16 * KIB..(number + 1) * 16 * KIB
}

/// Blocks of the extents foretold.
fn blocks(foretold: &[Foretold]) -> Vec<Range<u64>> {
    foretold.iter().map(|f| f.extent.start / 16 / KIB..f.extent.end / 16 / KIB).collect()
}

/// 64 blocks in a shuffled order, far apart.
fn shuffled() -> Vec<u64> {
    (0..64).map(|n| n * 37 % 64 * 100).collect()
}

#[test]
fn what_the_run_read_next_comes_by_offset() {
    let run = shuffled();
    let mut follower = follower(&run);
    for (n, b) in run[..8].iter().enumerate() {
        assert_eq!(follower.read(&block(*b), (n as u64 * MS, false), false), n + 1 >= COMPARED_MIN.0 as usize, "{n}");
    }
    let mut wanted: Vec<u64> = run[8..16].to_vec();
    wanted.sort_unstable();
    let next = follower.next((9 * 16 * KIB, 9 * 16 * KIB / 2), u64::MAX, u64::MAX);
    assert_eq!(blocks(&next), wanted.iter().map(|b| *b..b + 1).collect::<Vec<_>>());
    assert!(next.iter().all(|f| f.late_ns > 4_000 * MS && f.late_ns < 5_000 * MS));
    assert!(
        follower.read(&block(run[9]), (9 * MS, false), false) && follower.read(&block(run[8]), (10 * MS, false), false),
        "in any order"
    );
    let next = blocks(&follower.next((17 * 16 * KIB, 17 * 16 * KIB / 2), 16 * KIB, 0));
    assert_eq!((next.len(), next[0].start), (1, run[16]));
}

#[test]
fn small_gaps_that_are_read_later_are_read_along() {
    // Even blocks first, then odd ones but 5; block 40 is far away.
    let run: Vec<u64> = (1..9).map(|n| n * 1000).chain((0..8).map(|n| n * 2)).chain([40, 1, 3, 7, 9, 11, 13]).collect();
    let mut follower = follower(&run);
    run[..8].iter().for_each(|b| _ = follower.read(&block(*b), (1, false), false));
    assert_eq!(blocks(&follower.next((10 * 16 * KIB, 10 * 16 * KIB / 2), u64::MAX, u64::MAX)), [0..5, 6..15, 40..41]);
    assert!(follower.next((u64::MAX, u64::MAX / 2), u64::MAX, 0).is_empty(), "the others were read along");
}

#[test]
fn another_run_is_not_followed() {
    let run = shuffled();
    let mut follower = follower(&run);
    for n in 0..100 {
        // Every second read is of the run.
        let b = if n % 2 == 0 { run[n / 2] } else { 50 + n as u64 };
        assert!(!follower.read(&block(b), (1, false), false), "{n}");
    }
    assert!(!follower.read(&(0..4 * KIB), (1, false), false), "another length");
}

#[test]
fn a_run_that_begins_again_is_followed_again() {
    let run = shuffled();
    let mut follower = follower(&run);
    for pass in 0..3 {
        let mut predicted = 0;
        for (n, b) in run.iter().enumerate() {
            if follower.read(&block(*b), ((pass * 64 + n as u64) * MS, false), false) {
                predicted += follower.next((8 * 16 * KIB, 8 * 16 * KIB / 2), 4 * 16 * KIB, 0).len();
            }
        }
        assert!(predicted >= 40, "{pass}: {predicted}");
    }
}

#[test]
fn what_was_not_predicted_comes_another_time() {
    let run = shuffled();
    let mut follower = follower(&run);
    run[..8].iter().for_each(|b| _ = follower.read(&block(*b), (1, false), false));
    let next = follower.next((5 * 16 * KIB, 5 * 16 * KIB / 2), u64::MAX, 0);
    follower.not_predicted(&next[3].extent);
    assert_eq!(follower.next((16 * 16 * KIB, 16 * 16 * KIB / 2), 16 * KIB, 0), next[3..]);
}

/// From its middle on: what the run read long before is not predicted.
#[test]
fn a_run_may_begin_anywhere() {
    let run: Vec<u64> = (0..4096).map(|n| n * 37 % 4096 * 100).collect();
    let mut follower = follower(&run);
    run[2000..2008].iter().for_each(|b| _ = follower.read(&block(*b), (1, false), false));
    let next = follower.next((u64::MAX, u64::MAX / 2), 1024 * 16 * KIB, 0);
    let early: HashSet<u64> = run[..2000 - BEHIND as usize].iter().copied().collect();
    assert!(next.len() == 1024 && blocks(&next).iter().all(|b| !early.contains(&b.start)));
}

const BLOCK: u64 = 16 * KIB;
const BLOCKS: u64 = 1024;

/// Four files, each read once by 8 processes: a shuffle deals its blocks to them, and they take turns by chance.
fn job(turns: u64) -> Vec<(u64, u64, u64)> {
    let (mut shuffle, mut turns) = (Random::new(5), Random::new(turns));
    let mut lists: Vec<(u64, u64, Vec<u64>)> = Vec::new();
    for file in 1..=4 {
        let mut blocks: Vec<u64> = (0..BLOCKS).collect();
        shuffle.shuffle(&mut blocks);
        let part = (BLOCKS / 8) as usize;
        lists.extend(blocks.chunks(part).enumerate().map(|(reader, part)| (file, reader as u64, part.to_vec())));
    }
    let mut reads = Vec::new();
    while !lists.is_empty() {
        let at = turns.below(lists.len() as u64) as usize;
        let (file, reader, list) = &mut lists[at];
        reads.extend(list.pop().map(|block| (*file, *reader, block)));
        lists.retain(|(_, _, list)| !list.is_empty());
    }
    reads
}

/// What a run of these reads foretells, one every 4 ms.
fn recorded(reads: &[(u64, u64, u64)]) -> Arc<EarlierReads> {
    let read = |(n, (file, _, block)): (usize, &(u64, u64, u64))| Recorded {
        file: *file,
        write: false,
        offset: block * BLOCK,
        len: BLOCK,
        arrival_ns: n as u64 * 4 * MS,
        completed_ns: None,
        source: 0,
    };
    Arc::new(EarlierReads::of(&PredictedQueues::new(reads.iter().enumerate().map(read))))
}

/// Lets a predictor see reads, one each `step_ns`; how many were not predicted.
fn missed(p: &mut Predictor, reads: &[(u64, u64, u64)], clock_ns: &mut u64, step_ns: u64) -> usize {
    let mut missed = 0;
    for &(file, reader, block) in reads {
        *clock_ns += step_ns;
        let hits = p.totals().hit_bytes;
        let made = p.observe(Source { file, reader }, block * BLOCK..(block + 1) * BLOCK, *clock_ns);
        made.iter().filter(|made| made.extent.end > BLOCKS * BLOCK).for_each(|made| {
            p.declined(file, made.extent.start.max(BLOCKS * BLOCK)..made.extent.end);
        });
        missed += usize::from(p.totals().hit_bytes - hits < BLOCK);
    }
    missed
}

#[test]
fn reads_in_no_order_are_predicted_after_a_recorded_run() {
    let (mut p, mut clock_ns) = (Predictor::new(Limits::default()), 0);
    let blind = missed(&mut p, &job(1), &mut clock_ns, MS);
    assert!(blind > 2500, "nothing foretells them: {blind}");
    let (mut p, mut clock_ns) = (Predictor::new(Limits::default()), 0);
    p.foretell(Some(recorded(&job(1))));
    // Faster than the recorded run, and much slower; other turns than in the recorded run; again and again, also at once, while
    // all has been read a moment ago.
    for (turns, step_ns, pause_ns) in [
        (1, MS, 0),
        (2, MS, 10_000 * MS),
        (3, 40 * MS, 10_000 * MS),
        (4, MS / 10, 10_000 * MS),
        (6, MS / 10, 0),
        (7, MS / 10, 0),
    ] {
        clock_ns += pause_ns;
        let before = p.totals();
        let missed = missed(&mut p, &job(turns), &mut clock_ns, step_ns);
        assert!(missed < 300, "turns {turns}: {missed} of 4096; {:?}", p.totals());
        assert!(p.totals().wasted_bytes - before.wasted_bytes < 64 * BLOCK, "turns {turns}: {:?}", p.totals());
    }
    p.foretell(None);
    clock_ns += 10_000 * MS;
    let blind = missed(&mut p, &job(5), &mut clock_ns, MS);
    assert!(blind > 2500, "{blind}");
}

/// The run is loaded where the job has just been made, and is made again at once.
#[test]
fn what_was_just_read_is_predicted_where_it_is_read_again() {
    let (mut p, mut clock_ns) = (Predictor::new(Limits::default()), 0);
    missed(&mut p, &job(1), &mut clock_ns, MS / 10);
    p.foretell(Some(recorded(&job(1))));
    let before = p.totals();
    let missed = missed(&mut p, &job(2), &mut clock_ns, MS / 10);
    assert!(missed < 300, "{missed} of 4096; {:?}", p.totals());
    assert!(p.totals().wasted_bytes - before.wasted_bytes < 64 * BLOCK, "{:?}", p.totals());
}

/// A job that does as the recorded one for a while and then something else, many times.
#[test]
fn a_run_that_is_left_wastes_little() {
    let (mut p, mut clock_ns) = (Predictor::new(Limits::default()), 0);
    p.foretell(Some(recorded(&job(1))));
    let mut random = Random::new(9);
    for round in 0..40 {
        let known = job(round);
        let elsewhere: Vec<_> = (0..4096).map(|_| (1 + random.below(4), 1, BLOCKS + random.below(1 << 20))).collect();
        clock_ns += 10_000 * MS;
        missed(&mut p, &known[..400], &mut clock_ns, MS);
        missed(&mut p, &elsewhere, &mut clock_ns, MS);
    }
    let t = p.totals();
    assert!(t.wasted_bytes < (32 << 20) + t.demand_bytes / 20, "{t:?}");
}

/// Files that follow share the budget, and are counted out when they are forgotten.
#[test]
fn the_budget_bounds_all_that_follow() {
    let (mut p, mut clock_ns) = (Predictor::new(Limits { budget_bytes: MIB, files: 3, ..Limits::default() }), 0);
    p.foretell(Some(recorded(&job(1))));
    for &(file, reader, block) in &job(2) {
        clock_ns += MS;
        p.observe(Source { file, reader }, block * BLOCK..(block + 1) * BLOCK, clock_ns);
        assert!(p.totals().outstanding_bytes <= MIB);
    }
    (1..=4).for_each(|file| p.forget(file));
    assert_eq!(p.totals().outstanding_bytes, 0);
    assert!(p.observe(Source { file: 1, reader: 1 }, 0..BLOCK, clock_ns).len() <= 1);
}
