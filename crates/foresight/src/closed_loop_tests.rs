//! Readers that wait for what they read, in front of a disk with an order of its own, in virtual time: how long they take with
//! what is predicted.

use super::*;

/// A request at the disk.
#[derive(Clone, PartialEq, Debug)]
struct AtDisk {
    extent: Range<u64>,
    since_ns: u64,
}

/// Readers of one file, each waiting for its bytes before it asks for its next ones, in front of a disk that serves the nearest
/// request ahead of its head, or one that has waited for half a second, as the kernel's does.
struct ClosedLoop {
    /// The blocks that each reader reads, in order.
    readers: Vec<Vec<u64>>,
    len: u64,
    file_len: u64,
    random: Random,
    predictor: Predictor,
    now_ns: u64,
    /// Predictions beyond those that may be at the disk.
    held: VecDeque<Range<u64>>,
    /// The predictor cannot tell the readers of each of these apart; 0: it can tell all.
    mounts: u64,
}

const AT_DISK_MAX: usize = 16;
const EXPIRES_NS: u64 = 500 * MS;

impl ClosedLoop {
    fn new(readers: Vec<Vec<u64>>, len: u64, file_len: u64, seed: u64) -> ClosedLoop {
        let random = Random::new(seed);
        ClosedLoop {
            readers,
            len,
            file_len,
            random,
            predictor: predictor(),
            now_ns: 0,
            held: VecDeque::new(),
            mounts: 0,
        }
    }

    /// Each of these readers has every `turn`th block.
    fn in_turns(readers: u64, turn: u64, len: u64, file_len: u64, seed: u64) -> ClosedLoop {
        let blocks = |reader| (reader..file_len / len).step_by(turn as usize).collect();
        ClosedLoop::new((0..readers).map(blocks).collect(), len, file_len, seed)
    }

    /// Each has a part of the file for itself.
    fn in_segments(readers: u64, len: u64, file_len: u64, seed: u64) -> ClosedLoop {
        let each = file_len / len / readers;
        ClosedLoop::new((0..readers).map(|i| (i * each..(i + 1) * each).collect()).collect(), len, file_len, seed)
    }

    /// Reads the file once from the disk: requests there, and how long it took, ms. `pass` makes the readers others than before.
    fn pass(&mut self, pass: u64) -> (u64, u64) {
        let (len, blocks) = (self.len, self.file_len / self.len);
        let mut there = vec![false; blocks as usize];
        let readers = self.readers.len();
        let mut next: Vec<usize> = vec![0; readers];
        let mut thinking: Vec<(u64, usize)> =
            (0..readers).map(|reader| (self.now_ns + self.random.below(2 * MS), reader)).collect();
        let (mut waiting, mut queue): (Vec<usize>, Vec<(AtDisk, bool)>) = (Vec::new(), Vec::new());
        let (mut head, mut requests, began_ns) = (0, 0, self.now_ns);
        let mut busy: Option<(u64, AtDisk, bool)> = None;
        loop {
            let asks = thinking.iter().copied().min();
            let ends_ns = busy.as_ref().map(|(at_ns, ..)| *at_ns);
            let Some(now_ns) = asks.map(|(at_ns, _)| at_ns).into_iter().chain(ends_ns).min() else { break };
            self.now_ns = now_ns;
            let mut served = Vec::new();
            if ends_ns == Some(now_ns)
                && let Some((_, done, _)) = busy.take()
            {
                let extent = done.extent;
                there[(extent.start / len) as usize..extent.end.div_ceil(len).min(blocks) as usize].fill(true);
                self.predictor.arrived(1, &extent);
                waiting.retain(|reader| {
                    let is_there = there[self.readers[*reader][next[*reader]] as usize];
                    served.extend(is_there.then_some(*reader));
                    !is_there
                });
            } else if let Some((_, reader)) = asks {
                thinking.retain(|(_, other)| *other != reader);
                let block = self.readers[reader][next[reader]];
                let extent = block * len..(block + 1) * len;
                let own = pass * readers as u64 + reader as u64;
                let source = Source { file: 1, reader: own.checked_rem(self.mounts).unwrap_or(own) };
                for prediction in self.predictor.observe(source, extent.clone(), now_ns) {
                    let Range { start, end } = prediction.extent;
                    if end > self.file_len {
                        self.predictor.declined(1, start.max(self.file_len)..end);
                        self.predictor.ends_at(1, self.file_len);
                    }
                    let end = end.min(self.file_len);
                    self.held.extend((start < end).then_some(start..end));
                }
                if there[block as usize] {
                    served.push(reader);
                } else {
                    waiting.push(reader);
                    let has = |other: &AtDisk| other.extent.start <= extent.start && extent.end <= other.extent.end;
                    if !queue.iter().any(|(other, _)| has(other)) && !busy.iter().any(|(_, other, _)| has(other)) {
                        queue.push((AtDisk { extent, since_ns: now_ns }, false));
                    }
                }
            }
            for reader in served {
                next[reader] += 1;
                if next[reader] < self.readers[reader].len() {
                    thinking.push((now_ns + 50_000 + self.random.below(300_000), reader));
                }
            }
            while queue.iter().filter(|(_, ahead)| *ahead).count() < AT_DISK_MAX
                && let Some(extent) = self.held.pop_front()
            {
                queue.push((AtDisk { extent, since_ns: now_ns }, true));
            }
            let late = |one: &AtDisk| now_ns - one.since_ns >= EXPIRES_NS;
            let order = |one: &AtDisk| (!late(one), one.extent.start < head, one.extent.start);
            if busy.is_none()
                && let Some(first) = (0..queue.len()).min_by_key(|i| order(&queue[*i].0))
            {
                let (one, ahead) = queue.swap_remove(first);
                let seek_ns = if one.extent.start == head { 0 } else { 2 * MS + self.random.below(6 * MS) };
                head = one.extent.end;
                requests += 1;
                let took_ns = 100_000 + seek_ns + (one.extent.end - one.extent.start) * 7;
                busy = Some((now_ns + took_ns, one, ahead));
            }
        }
        check(&self.predictor);
        (requests, (self.now_ns - began_ns) / MS)
    }
}

/// Each pass takes hardly longer than the disk needs for one sequential read, whatever the order in which it lets the readers go on,
/// and hardly anything is read for nothing.
#[test]
fn readers_in_turns_are_served_in_one_sweep() {
    for seed in 1..4 {
        for (readers, len) in [(32, 8), (32, 64), (32, 128), (8, 64), (4, 256), (8, 16), (48, 32)] {
            let mut load = ClosedLoop::in_turns(readers, readers, len * KIB, 64 * MIB, seed);
            let sequential_ms = load.file_len * 7 / MS;
            let pass = |pass| {
                load.now_ns += 2_000 * MS;
                load.pass(pass)
            };
            let passes: Vec<(u64, u64)> = (0..5).map(pass).collect();
            let told = format!("{readers} × {len} KiB, seed {seed}: {passes:?}");
            // The first one must see the turns, and the others have seen them.
            assert!(passes[0].1 <= sequential_ms * 2, "{told}");
            assert!(passes[1..].iter().all(|(_, ms)| *ms <= sequential_ms * 5 / 4), "{told}");
            let t = load.predictor.totals();
            assert!(t.wasted_bytes * 100 <= t.demand_bytes, "{told} {t:?}");
        }
    }
}

/// Of what eight readers leave out, every other eight blocks, little is read, and what they want is still predicted.
#[test]
fn what_readers_in_turns_leave_out_is_found() {
    for seed in 1..4 {
        let mut load = ClosedLoop::in_turns(8, 16, 64 * KIB, 256 * MIB, seed);
        let pass = |pass| {
            load.now_ns += 2_000 * MS;
            load.pass(pass)
        };
        let passes: Vec<(u64, u64)> = (0..4).map(pass).collect();
        let t = load.predictor.totals();
        assert!(t.wasted_bytes * 10 <= t.demand_bytes, "{passes:?} {t:?}");
        assert!(t.hit_bytes * 10 >= t.demand_bytes * 7, "{passes:?} {t:?}");
    }
}

/// Other patterns under the same disk: each pass takes so many quarters of one sequential read at most.
#[test]
fn readers_wait_little_whatever_the_order_in_which_the_disk_serves_them() {
    for seed in 1..4 {
        let in_segments = |readers, len| ClosedLoop::in_segments(readers, len * KIB, 128 * MIB, seed);
        // A matrix in four bands; the tiles of a band are read row by row by a reader each.
        let tile = |reader: u64| (0..256).map(|row| (reader / 4 * 256 + row) * 4 + reader % 4).collect();
        // Two parts of the file, a block of each in turn.
        let two = |reader: u64| (0..64).flat_map(|i| [reader * 64 + i, 1024 + reader * 64 + i]).collect();
        let loads = [
            ("8 segments", in_segments(8, 256), 6),
            ("32 segments", in_segments(32, 64), 11),
            ("16 segments in small requests", in_segments(16, 16), 8),
            ("tiles", ClosedLoop::new((0..16).map(tile).collect(), 32 * KIB, 128 * MIB, seed), 8),
            ("two streams a reader", ClosedLoop::new((0..16).map(two).collect(), 64 * KIB, 128 * MIB, seed), 13),
        ];
        for (name, mut load, quarters) in loads {
            let pass = |pass| {
                load.now_ns += 2_000 * MS;
                load.pass(pass)
            };
            let passes: Vec<(u64, u64)> = (0..5).map(pass).collect();
            let sequential_ms = load.file_len * 7 / MS;
            assert!(passes.iter().all(|(_, ms)| ms * 4 <= sequential_ms * quarters), "{name}, seed {seed}: {passes:?}");
            let t = load.predictor.totals();
            assert!(t.wasted_bytes * 50 <= t.demand_bytes, "{name}: {t:?}");
        }
    }
}

/// The same where the readers are processes behind one, two or four mounts and cannot be told apart: how long passes over the file take
/// on average, and what is read for nothing.
#[test]
fn readers_behind_mounts_are_predicted_together() {
    for (mounts, most_ms) in [(1, 750), (2, 850), (4, 1150)] {
        let loads =
            [(32, 32, 8), (32, 32, 64), (32, 32, 128), (8, 8, 64), (8, 8, 16), (48, 48, 32), (8, 16, 64), (16, 24, 32)];
        let (mut passes, mut took_ms) = (0, 0);
        for (readers, turn, len) in loads {
            for seed in 11..14 {
                let mut load = ClosedLoop::in_turns(readers, turn, len * KIB, 64 * MIB, seed);
                load.mounts = mounts;
                for pass in 0..4 {
                    load.now_ns += 2_000 * MS;
                    took_ms += load.pass(pass).1;
                    passes += 1;
                }
                let t = load.predictor.totals();
                let told = format!("{mounts} mounts, {readers} of {turn} × {len} KiB, seed {seed}: {t:?}");
                assert!(t.wasted_bytes * 5 <= t.demand_bytes, "{told}");
            }
        }
        // The disk alone needs 470 ms for all of a file.
        assert!(took_ms / passes <= most_ms, "{mounts} mounts: {} ms", took_ms / passes);
    }
}
