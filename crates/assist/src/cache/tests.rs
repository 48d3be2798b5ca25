//! The block cache against a model that is obvious and slow, and the paper's cases one by one.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::config::{Entry, Region};
use crate::regions::RegionMap;

const BLOCK: u64 = 100;

fn map(will_need: &[(u64, u64)], no_reuse: &[(u64, u64)]) -> RegionMap {
    let regions = |rs: &[(u64, u64)]| rs.iter().map(|&(offset, length)| Region { offset, length }).collect();
    RegionMap::of(&Entry { will_need: regions(will_need), no_reuse: regions(no_reuse), ..Entry::new("/f") })
}

fn cache(cache_blocks: u64, read_ahead_blocks: u64, size: u64) -> BlockCache {
    let geometry = Geometry { block_bytes: BLOCK, cache_blocks, read_ahead_blocks, batch_blocks: 1 };
    BlockCache::new(geometry, size)
}

fn read(cache: &mut BlockCache, reader: Reader, bytes: Range<u64>, map: &RegionMap) -> Vec<Action> {
    cache.access(reader, bytes, map, &mut |_| true)
}

use Action::{Prefetch, Release, Renew, Try};

#[test]
fn the_window_moves_with_the_program() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(4, 3, 10_000));
    assert_eq!(read(&mut c, 1, 0..10, &whole), [Prefetch(0..300)]);
    assert_eq!(read(&mut c, 1, 20..30, &whole), [], "within the block nothing changes");
    assert_eq!(read(&mut c, 1, 150..160, &whole), [Prefetch(300..400)]);
    assert_eq!(read(&mut c, 1, 210..220, &whole), [Prefetch(400..500), Release(0..100)]);
    assert_eq!(read(&mut c, 1, 130..140, &whole), [], "a jump back within the cache costs nothing");
    assert_eq!(c.held_bytes(), 400);
    assert_eq!((c.tally().hits, c.tally().misses), (4, 1));
}

#[test]
fn the_end_of_the_file_is_the_end() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(8, 4, 250));
    assert_eq!(read(&mut c, 1, 0..10, &whole), [Prefetch(0..250)]);
    assert_eq!(read(&mut c, 1, 240..250, &whole), []);
    assert_eq!(read(&mut c, 1, 250..250, &whole), [], "a read at the end reads nothing");
    c.set_size(1000);
    assert_eq!(read(&mut c, 1, 240..260, &whole), [Prefetch(300..600)], "it has grown");
}

#[test]
fn a_block_read_whole_is_not_brought_in() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(8, 2, 10_000));
    assert_eq!(read(&mut c, 1, 0..300, &whole), [Prefetch(300..400)]);
    assert_eq!(c.tally().prefetched_bytes, 100);
}

#[test]
fn a_huge_read_takes_no_more_than_the_window() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(4, 2, u64::MAX / 2));
    let actions = read(&mut c, 1, 50..1 << 50, &whole);
    assert!(actions.len() <= 2 && c.held_bytes() <= 400, "{actions:?}");
}

#[test]
fn only_regions_that_ask_for_it_are_brought_in() {
    let (pieces, mut c) = (map(&[(10, 20), (550, 100), (2000, 10)], &[]), cache(8, 4, 10_000));
    let expected = [Prefetch(10..30), Prefetch(550..650), Prefetch(2000..2010)];
    assert_eq!(read(&mut c, 1, 0..5, &pieces), expected, "the next blocks are those that hold pieces");
    assert_eq!(read(&mut c, 1, 300..350, &pieces), [], "a read elsewhere is not followed");
}

#[test]
fn what_is_read_once_goes_at_once() {
    let (once, mut c) = (map(&[], &[(0, 0)]), cache(8, 4, 10_000));
    assert_eq!(read(&mut c, 1, 0..50, &once), []);
    assert_eq!(read(&mut c, 1, 50..100, &once), []);
    assert_eq!(read(&mut c, 1, 100..150, &once), [Release(0..100)]);
    assert_eq!(c.depart(1), [Release(100..200)]);
}

#[test]
fn readers_share_what_is_brought_in() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(4, 2, 100_000));
    for reader in 0..8 {
        let brought = read(&mut c, reader, 0..10, &whole);
        assert_eq!(brought.is_empty(), reader > 0, "the first one brings it in for all");
    }
    for block in 1..100 {
        for reader in 0..8 {
            let actions = read(&mut c, reader, block * BLOCK..block * BLOCK + 10, &whole);
            assert_eq!(actions.iter().filter(|a| matches!(a, Prefetch(_))).count(), usize::from(reader == 0));
            assert!(reader == 7 || !actions.iter().any(|a| matches!(a, Release(_))), "the last one releases");
        }
    }
    assert_eq!(c.tally().prefetched_bytes, 101 * BLOCK, "as much as for one");
}

#[test]
fn a_follower_finds_what_the_leader_left() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(4, 2, 100_000));
    read(&mut c, 2, 0..10, &whole);
    for block in 0..10 {
        let actions = read(&mut c, 1, block * BLOCK..block * BLOCK + 10, &whole);
        assert!(!actions.iter().any(|a| matches!(a, Release(_))), "the follower needs them: {actions:?}");
    }
    let before = c.tally().prefetched_bytes;
    let actions = read(&mut c, 2, 250..260, &whole);
    assert!(actions.iter().all(|a| matches!(a, Renew(_) | Release(_))), "{actions:?}");
    assert_eq!(c.tally().prefetched_bytes, before);
    // The follower stops; the leader goes on: what lingers is bounded.
    for block in 10..200 {
        read(&mut c, 1, block * BLOCK..block * BLOCK + 10, &whole);
    }
    assert!(c.held_bytes() <= (4 + 4 + 4 * LINGER_WINDOWS) * BLOCK, "{}", c.held_bytes());
    c.depart(2);
    c.depart(1);
    assert_eq!(c.held_bytes(), 0);
    assert_eq!(c.tally().used_bytes + c.tally().wasted_bytes, c.tally().prefetched_bytes);
}

#[test]
fn what_was_there_before_us_stays() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(2, 1, 10_000));
    read(&mut c, 1, 0..10, &whole);
    c.found_cached(0..100);
    read(&mut c, 1, 100..110, &whole);
    assert_eq!(read(&mut c, 1, 200..210, &whole), [Prefetch(200..300)], "block 0 is not released");
    assert_eq!(read(&mut c, 1, 300..310, &whole), [Prefetch(300..400), Release(100..200)]);
}

#[test]
fn refused_blocks_are_asked_for_again() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(4, 2, 10_000));
    assert_eq!(c.access(1, 0..10, &whole, &mut |_| false), []);
    assert_eq!(c.held_bytes(), 0);
    assert_eq!(c.access(1, 20..30, &whole, &mut |_| true), [Prefetch(0..200)]);
    // Nor does anything make room for them while nothing is to be brought in.
    assert_eq!(c.access(1, 300..310, &whole, &mut |_| false), []);
    assert_eq!(c.held_bytes(), 200);
}

/// A program may hold less than its window: in a job with little memory, beside others. It stopped for good where that was full.
#[test]
fn a_window_larger_than_what_may_be_held_moves_on() {
    let whole = map(&[(0, 0)], &[]);
    for (readers, budget_blocks) in [(1, 3), (1, 7), (3, 5)] {
        let mut c = cache(8, 4, 100_000);
        for block in 0..900 {
            for reader in 0..readers {
                let held = c.held_bytes();
                let mut granted = 0;
                let mut may = |bytes: u64| {
                    let fits = held + granted + bytes <= budget_blocks * BLOCK;
                    granted += if fits { bytes } else { 0 };
                    fits
                };
                c.access(reader, block * BLOCK..block * BLOCK + 10, &whole, &mut may);
                assert!(c.held_bytes() <= budget_blocks * BLOCK, "{readers} readers hold {}", c.held_bytes());
            }
        }
        assert!(c.tally().hits * 100 >= 99 * 900 * readers, "{readers} readers: {:?}", c.tally());
    }
}

#[test]
fn small_blocks_come_in_batches() {
    let whole = map(&[(0, 0)], &[]);
    let geometry = Geometry { block_bytes: BLOCK, cache_blocks: 20, read_ahead_blocks: 9, batch_blocks: 4 };
    let mut c = BlockCache::new(geometry, 10_000);
    assert_eq!(read(&mut c, 1, 0..10, &whole), [Prefetch(0..900)]);
    for n in 1..4 {
        assert_eq!(read(&mut c, 1, n * BLOCK..n * BLOCK + 10, &whole), []);
    }
    assert_eq!(read(&mut c, 1, 400..410, &whole), [Prefetch(900..1300)]);
    assert_eq!(read(&mut c, 1, 5000..5010, &whole), [Prefetch(5000..5900), Release(0..200)], "a jump does not wait");
}

#[test]
fn use_is_counted_once() {
    let (whole, mut c) = (map(&[(0, 0)], &[]), cache(2, 2, 10_000));
    read(&mut c, 1, 0..40, &whole);
    read(&mut c, 1, 20..60, &whole);
    read(&mut c, 1, 100..110, &whole);
    let t = c.tally();
    assert_eq!((t.prefetched_bytes, t.used_bytes, t.wasted_bytes), (300, 70, 40), "block 0 was left with 40 unread");
    c.clear();
    assert_eq!(c.tally().wasted_bytes, 230);
    assert_eq!(c.held_bytes(), 0);
}

/// The rules once more, with sets and lists only, for a whole-file `WillNeed`.
#[derive(Default)]
struct Model {
    /// Each reader's blocks, most recently used last.
    windows: BTreeMap<Reader, Vec<u64>>,
    positions: BTreeMap<Reader, u64>,
    lingering: Vec<u64>,
}

impl Model {
    fn held(&self) -> BTreeSet<u64> {
        self.windows.values().flatten().chain(&self.lingering).copied().collect()
    }

    fn awaited(&self, block: u64, cap: u64) -> bool {
        self.positions.values().any(|&p| p < block && block - p <= cap * LINGER_WINDOWS)
    }

    /// Blocks brought in and released, in no order.
    fn access(
        &mut self,
        reader: Reader,
        first: u64,
        last: u64,
        cap: u64,
        ahead: u64,
        blocks: u64,
    ) -> (BTreeSet<u64>, BTreeSet<u64>) {
        let before = self.held();
        self.positions.insert(reader, last);
        let ahead = ahead.min(cap).saturating_sub(1);
        let room = (cap - ahead).max(1);
        let wanted = (first.max((last + 1).saturating_sub(room))..=last)
            .chain((last + 1..=last + ahead).filter(|b| *b < blocks));
        for block in wanted {
            let window = self.windows.entry(reader).or_default();
            window.retain(|b| *b != block);
            window.push(block);
            self.lingering.retain(|b| *b != block);
        }
        let held = self.held();
        let brought = &held - &before;
        let window = self.windows.get_mut(&reader).unwrap();
        let gone: Vec<u64> = window.drain(..window.len().saturating_sub(cap as usize)).collect();
        self.leave(gone, cap);
        let released = &held - &self.held();
        (brought, released)
    }

    fn leave(&mut self, gone: Vec<u64>, cap: u64) {
        for block in gone {
            if !self.windows.values().flatten().any(|b| *b == block) && self.awaited(block, cap) {
                self.lingering.push(block);
            }
        }
        let excess = self.lingering.len().saturating_sub((cap * LINGER_WINDOWS) as usize);
        self.lingering.drain(..excess);
        let kept = self.lingering.iter().copied().filter(|b| self.awaited(*b, cap)).collect();
        self.lingering = kept;
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read(Reader, u64, u64),
    Depart(Reader),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let read = (0u64..4, 0u64..5000, 1u64..700).prop_map(|(r, at, len)| Step::Read(r, at, len));
    let depart = (0u64..4).prop_map(Step::Depart);
    prop::collection::vec(prop_oneof![12 => read, 1 => depart], 1..120)
}

fn blocks_of<'a>(actions: impl IntoIterator<Item = &'a Range<u64>>) -> BTreeSet<u64> {
    actions.into_iter().flat_map(|r| r.start / BLOCK..r.end.div_ceil(BLOCK)).collect()
}

proptest! {
    #[test]
    fn does_what_the_model_does(steps in steps(), cap in 1u64..7, ahead in 0u64..9) {
        const SIZE: u64 = 6000;
        let whole = map(&[(0, 0)], &[]);
        let (mut real, mut model) = (cache(cap, ahead, SIZE), Model::default());
        for step in steps {
            match step {
                Step::Read(reader, at, len) => {
                    let bytes = at..at + len;
                    let (first, last) = (bytes.start / BLOCK, (bytes.end - 1) / BLOCK);
                    let actions = read(&mut real, reader, bytes.clone(), &whole);
                    let (brought, released) = model.access(reader, first, last, cap, ahead, SIZE / BLOCK);
                    // What the read itself read whole needs no bringing in.
                    let itself: BTreeSet<u64> =
                        (first..=last).filter(|b| bytes.start <= b * BLOCK && (b + 1) * BLOCK <= bytes.end).collect();
                    let prefetched = blocks_of(actions.iter().filter_map(|a| match a { Prefetch(r) => Some(r), _ => None }));
                    let freed = blocks_of(actions.iter().filter_map(|a| match a { Release(r) => Some(r), _ => None }));
                    prop_assert_eq!(prefetched, &brought - &itself);
                    prop_assert_eq!(freed, released);
                }
                Step::Depart(reader) => {
                    let actions = real.depart(reader);
                    let gone = model.windows.remove(&reader);
                    model.positions.remove(&reader);
                    model.leave(gone.unwrap_or_default(), cap);
                    // Departing gives up what lingered for the reader; the rest is left to the kernel.
                    prop_assert!(actions.iter().all(|a| matches!(a, Release(_))));
                }
            }
            let held: BTreeSet<u64> = real.blocks.keys().copied().collect();
            prop_assert_eq!(held, model.held());
            let tally = real.tally();
            prop_assert!(tally.used_bytes + tally.wasted_bytes <= tally.prefetched_bytes);
            prop_assert!(real.held_bytes() <= tally.prefetched_bytes);
        }
        for reader in 0..4 {
            real.depart(reader);
        }
        let tally = real.tally();
        prop_assert_eq!((real.blocks.len(), real.held_bytes(), real.positions.len()), (0, 0, 0));
        prop_assert_eq!(tally.used_bytes + tally.wasted_bytes, tally.prefetched_bytes);
    }

    /// With regions of every kind: nothing held is released, nothing held is brought in again, nothing outside a region.
    #[test]
    fn never_releases_what_is_held(
        steps in steps(), cap in 1u64..7, ahead in 0u64..9,
        needs in prop::collection::vec((0u64..5000, 1u64..900), 0..5), once in prop::collection::vec((0u64..5000, 1u64..900), 0..3),
    ) {
        let regions = map(&needs, &once);
        let mut c = cache(cap, ahead, 5500);
        for step in steps {
            let held: BTreeSet<u64> = c.blocks.keys().copied().collect();
            let actions = match step {
                Step::Read(reader, at, len) => read(&mut c, reader, at..at + len, &regions),
                Step::Depart(reader) => c.depart(reader),
            };
            let now: BTreeSet<u64> = c.blocks.keys().copied().collect();
            for action in &actions {
                match action {
                    Prefetch(r) => {
                        prop_assert!(blocks_of([r]).iter().all(|b| !held.contains(b)));
                        prop_assert_eq!(regions.will_need_in(r.clone()), std::slice::from_ref(r));
                    }
                    Renew(r) => prop_assert!(blocks_of([r]).iter().all(|b| held.contains(b) && now.contains(b))),
                    Release(r) => prop_assert!(blocks_of([r]).iter().all(|b| !now.contains(b))),
                    Try(_) | Action::Exactly(_) => prop_assert!(false, "that is the advisor's matter"),
                }
            }
        }
    }
}
