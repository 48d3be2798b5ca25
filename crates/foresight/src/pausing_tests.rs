//! Programs that compute between their reads: what is predicted when they go on.

use super::*;

const READERS: u64 = 32;
const LEN: u64 = 128 * KIB;
/// Requests of a reader in a phase, at least and at most: about 8 MiB, at 4 MiB a second.
const REQUESTS: (u64, u64) = (56, 72);

/// Readers, each with a stream of its own. What is predicted of them comes into memory.
struct Pausing {
    predictor: Predictor,
    now_ns: u64,
    random: Random,
    files: u64,
    /// Where each reader reads on.
    next: Vec<u64>,
    /// Memory has lost what was there before the pause.
    has_lost: bool,
}

impl Pausing {
    fn new(files: u64, budget_bytes: u64) -> Pausing {
        let predictor = Predictor::new(Limits { budget_bytes, ..Limits::default() });
        let next = (0..READERS).map(|who| who << 32).collect();
        Pausing { predictor, now_ns: MS, random: Random::new(files), files, next, has_lost: false }
    }

    /// Each reads on; requests that were not predicted whole, percent.
    fn phase(&mut self) -> u64 {
        let mut waiting: Vec<(u64, u64)> = Vec::new();
        for who in 0..READERS {
            waiting.push((who, REQUESTS.0 + self.random.below(REQUESTS.1 - REQUESTS.0 + 1)));
        }
        let (mut missed, mut sum) = (0, 0);
        let mut has_lost = vec![self.has_lost; READERS as usize];
        while !waiting.is_empty() {
            let (who, left) = waiting.remove(self.random.below(waiting.len().min(8) as u64) as usize);
            self.now_ns += MS;
            let (file, start) = (1 + who % self.files, self.next[who as usize]);
            let before = self.predictor.totals();
            let predictions = self.predictor.observe(Source { file, reader: who }, start..start + LEN, self.now_ns);
            if std::mem::take(&mut has_lost[who as usize]) {
                self.predictor.missed(file, &(start..start + LEN), &|at| at < start || at >= start + 64 * MIB);
            }
            predictions.iter().for_each(|prediction| self.predictor.arrived(file, &prediction.extent));
            let t = self.predictor.totals();
            assert!(t.wasted_bytes >= before.wasted_bytes, "what is counted does not fall");
            missed += u64::from(t.hit_bytes < before.hit_bytes + LEN);
            self.next[who as usize] = start + LEN;
            if left > 1 {
                waiting.push((who, left - 1));
            }
            if sum % 8 == 0 {
                check(&self.predictor);
            }
            sum += 1;
        }
        missed * 100 / sum
    }

    /// Phases with pauses of so many ms before them.
    fn phases(&mut self, pauses_ms: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let phase = |pause_ms| {
            self.now_ns += pause_ms * MS;
            self.phase()
        };
        pauses_ms.into_iter().map(phase).collect()
    }
}

/// Whether the pauses are regular or not, and longer than any patience or not.
#[test]
fn a_program_that_pauses_is_predicted_when_it_goes_on() {
    let pauses: [[u64; 4]; 3] = [[10_000; 4], [10_000, 29_000, 17_000, 24_000], [300_000, 300_000, 200_000, 100_000]];
    for ((files, budget), pauses) in [(1, 64), (1, 128), (READERS, 64), (READERS, 128)]
        .into_iter()
        .flat_map(|one| pauses.map(|pauses| (one, pauses)))
    {
        let mut load = Pausing::new(files, budget * MIB);
        let first = load.phase();
        let later = load.phases(pauses.into_iter().cycle().take(9));
        let t = load.predictor.totals();
        let told = format!("{files} files, {budget} MiB, {pauses:?}: {first} %, then {later:?}; {t:?}");
        assert!(first <= 5 && later.iter().all(|missed| *missed <= 5), "{told}");
        assert!(t.wasted_bytes == 0 && t.hit_bytes * 10 >= t.demand_bytes * 9, "{told}");
    }
}

/// Pauses of an hour: the first ones are too long, and then their period is known.
#[test]
fn regular_phases_may_be_far_apart() {
    let mut load = Pausing::new(1, 64 * MIB);
    load.phases([3_600_000; 4]);
    let learnt = load.predictor.totals();
    let later = load.phases([3_600_000; 12]);
    let t = load.predictor.totals();
    let told = format!("{later:?} {learnt:?} {t:?}");
    assert!(learnt.wasted_bytes > 0 && t.wasted_bytes == learnt.wasted_bytes, "{told}");
    assert!(later[6..].iter().all(|missed| *missed <= 5), "{told}");
}

#[test]
fn a_program_that_goes_elsewhere_after_a_pause_is_predicted_there() {
    let mut load = Pausing::new(1, 64 * MIB);
    load.phases([10_000; 6]);
    load.next.iter_mut().for_each(|next| *next += 256 * MIB);
    let missed = load.phases([10_000; 5]);
    let t = load.predictor.totals();
    assert!(missed[1..].iter().all(|missed| *missed <= 10), "{missed:?} {t:?}");
    // What nobody comes back for is wasted in the end.
    load.now_ns += 600_000 * MS;
    load.predictor.look_after_one(load.now_ns);
    load.now_ns += 600_000 * MS;
    load.predictor.look_after_one(load.now_ns);
    let t = load.predictor.totals();
    assert!(t.late_bytes == 0 && t.wasted_bytes >= 8 * MIB, "{t:?}");
    check(&load.predictor);
}

/// Memory loses in each pause what it had: accounts stop that as they stop any waste.
#[test]
fn what_memory_loses_in_a_pause_is_wasted() {
    let mut load = Pausing::new(1, 64 * MIB);
    load.has_lost = true;
    load.phases([20_000; 20]);
    let t = load.predictor.totals();
    assert!(t.wasted_bytes > 32 * MIB && t.wasted_bytes <= SLACK_BYTES + 64 * MIB + t.demand_bytes / 20, "{t:?}");
}

/// A write over what is late, and a file that is removed: nobody will read it any more.
#[test]
fn what_is_late_is_wasted_when_it_changes() {
    let mut load = Pausing::new(1, 64 * MIB);
    load.phase();
    load.now_ns += 100_000 * MS;
    load.predictor.look_after_one(load.now_ns);
    let late_bytes = load.predictor.totals().late_bytes;
    assert!(late_bytes >= MIB && load.predictor.totals().wasted_bytes == 0, "{:?}", load.predictor.totals());
    load.predictor.changed(1, 0..MIB << 32);
    let t = load.predictor.totals();
    assert_eq!((t.late_bytes, t.wasted_bytes, t.dropped_bytes), (0, late_bytes, 0));
    check(&load.predictor);
}
