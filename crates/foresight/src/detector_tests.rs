//! What the detector predicts of the patterns that programs read in.

use proptest::prelude::*;

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GAP: u64 = 400 * KIB;
const BLOCK: u64 = 512 * KIB;

fn reads(detector: &mut Detector, starts: impl IntoIterator<Item = u64>, len: u64) -> Option<Forecast> {
    let mut last = None;
    for start in starts {
        last = detector.observe(&(start..start + len), GAP).forecast.cloned();
    }
    last
}

#[test]
fn a_small_gap_is_read_along() {
    let mut d = Detector::default();
    assert_eq!(reads(&mut d, [0, 500 * KIB, 1000 * KIB], 250 * KIB), None, "two strides prove nothing");
    let f = reads(&mut d, (3..10).map(|i| i * 500 * KIB), 250 * KIB).unwrap();
    assert!(f.is_dense() && f.stride_bytes() == 500 * KIB as i64);
    assert_eq!(f.blocks_ahead((9, 9), 3, BLOCK, 1 << 40), [10, 11, 12]);
    assert_eq!(f.within(5 * MIB..6 * MIB).first(), Some(&(5 * MIB..6 * MIB)));
}

#[test]
fn pieces_are_still_foreseen_when_gaps_are_not_worth_reading() {
    for stride in [500 * KIB as i64, -500 * KIB as i64] {
        let mut d = Detector::default();
        let at = |i: i64| (100 * MIB as i64 + i * stride) as u64;
        assert!(reads(&mut d, (0..9).map(at), 100 * KIB).unwrap().is_dense());
        d.regard_gaps(32 * KIB);
        let f = reads(&mut d, [at(9)], 100 * KIB).expect("no read is needed to see them anew");
        assert!(!f.is_dense() && f.stride_bytes() == stride);
        let pieces = f.within(at(10) - MIB / 8..at(10) + MIB / 8);
        assert_eq!((pieces.len(), pieces.first()), (1, Some(&(at(10)..at(10) + 100 * KIB))));
    }
    // Where nothing but small gaps is agreed on, nothing is foreseen.
    let mut d = Detector::default();
    let uneven = (0..40u64).map(|i| i * i % 7 * 10 * KIB + i * 300 * KIB);
    assert!(reads(&mut d, uneven, 100 * KIB).unwrap().is_dense());
    d.regard_gaps(32 * KIB);
    assert_eq!(d.streams[0].forecast(), None);
}

#[test]
fn of_a_large_gap_only_the_pieces_are_brought_in() {
    let mut d = Detector::default();
    let f = reads(&mut d, (0..10).map(|i| i * 8 * MIB), 100 * KIB).unwrap();
    assert!(!f.is_dense());
    assert_eq!(f.blocks_ahead((144, 144), 3, BLOCK, 1 << 40), [160, 176, 192]);
    let pieces = f.within(80 * MIB..81 * MIB);
    assert_eq!((pieces.len(), pieces.first()), (1, Some(&(80 * MIB..80 * MIB + 100 * KIB))));
    assert_eq!(f.within(81 * MIB..88 * MIB), [], "nothing in between");
    assert_eq!(f.blocks_ahead((144, 144), 3, BLOCK, 81 * MIB), [160], "the file ends");
}

#[test]
fn backwards_is_a_stride_too() {
    let mut d = Detector::default();
    let f = reads(&mut d, (40..50).rev().map(|i| i * 8 * MIB), 100 * KIB).unwrap();
    assert_eq!(f.stride_bytes(), -8 * MIB as i64);
    assert_eq!(f.blocks_ahead((640, 640), 2, BLOCK, 1 << 40), [624, 608]);
    let mut d = Detector::default();
    let f = reads(&mut d, (40..50).rev().map(|i| i * 512 * KIB), 256 * KIB).unwrap();
    assert!(f.is_dense());
    assert_eq!(f.blocks_ahead((40, 40), 9, BLOCK, 1 << 40), [39, 38, 37, 36, 35, 34, 33, 32, 31]);
    assert_eq!(f.blocks_ahead((2, 2), 9, BLOCK, 1 << 40), [1, 0]);
}

#[test]
fn a_few_jumps_back_do_not_end_a_stream() {
    let mut d = Detector::default();
    reads(&mut d, (0..20).map(|i| i * 8 * MIB), 100 * KIB).unwrap();
    for n in 0..10 {
        let f = reads(&mut d, [16 * MIB, 8 * MIB, (20 + n) * 8 * MIB], 100 * KIB).unwrap();
        assert_eq!(f.stride_bytes(), 8 * MIB as i64);
    }
    assert!(d.streams.len() <= 3, "{d:?}");
}

#[test]
fn streams_far_apart_are_told_apart() {
    let mut d = Detector::default();
    let base = [0, 10 << 30, 20 << 30];
    for i in 0..12 {
        for (n, at) in base.into_iter().enumerate() {
            let stride = (n as u64 + 1) * 3 * MIB;
            let seen = d.observe(&(at + i * stride..at + i * stride + 64 * KIB), GAP);
            assert_eq!((seen.stream, seen.fresh), (n, i == 0));
            if i > 5 {
                assert_eq!(seen.forecast.unwrap().stride_bytes(), stride as i64);
            }
        }
    }
}

#[test]
fn streams_close_together_agree_on_a_round() {
    let mut d = Detector::default();
    let starts = (0..12).flat_map(|i| [0, MIB, 5 * MIB].map(|column| column + i * 12 * MIB));
    let f = reads(&mut d, starts, 64 * KIB).unwrap();
    assert_eq!((f.stride_bytes(), f.round.len(), f.is_dense()), (12 * MIB as i64, 3, false));
    let next = f.within(144 * MIB..156 * MIB);
    assert_eq!(next, [0, MIB, 5 * MIB].map(|c| 144 * MIB + c..144 * MIB + c + 64 * KIB));
}

#[test]
fn uneven_gaps_are_read_along() {
    let mut d = Detector::default();
    let mut at = 0;
    let starts = (0..40u64).map(|i| {
        at += 250 * KIB + (i * 7919 % 311) * KIB;
        at
    });
    let f = reads(&mut d, starts.collect::<Vec<_>>(), 240 * KIB).unwrap();
    assert!(f.is_dense() && f.stride_bytes() > 0 && f.rounds > ROUNDS_AT_FIRST);
}

const ROUNDS_AT_FIRST: u64 = 4;

#[test]
fn chaos_is_not_foreseen() {
    let mut d = Detector::default();
    let mut x = 88172645463325252u64;
    let mut foreseen = 0;
    for _ in 0..500 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let at = x % (1 << 40);
        foreseen += u32::from(d.observe(&(at..at + 4096), GAP).forecast.is_some());
    }
    assert_eq!(foreseen, 0);
}

proptest! {
    /// Whatever is read, nothing panics, streams stay few, and what is wanted lies where it was asked for, in order.
    #[test]
    fn any_reads(steps in prop::collection::vec((any::<u64>(), 1u64..10_000_000, 0u8..4), 1..200)) {
        let mut d = Detector::default();
        let mut at = 0u64;
        for (jump, len, kind) in steps {
            at = match kind { 0 => jump % (i64::MAX as u64), 1 => at.saturating_sub(len), _ => at.saturating_add(len) };
            let end = at.saturating_add(len).min(i64::MAX as u64);
            if at >= end { continue; }
            let seen = d.observe(&(at..end), GAP);
            prop_assert!(seen.stream < STREAMS_MAX);
            if let Some(f) = seen.forecast {
                let block = at / BLOCK;
                let ahead = f.blocks_ahead((block, block), 31, BLOCK, i64::MAX as u64);
                prop_assert!(ahead.len() <= 31);
                let distinct: std::collections::BTreeSet<_> = ahead.iter().collect();
                prop_assert_eq!(distinct.len(), ahead.len());
                for block in ahead {
                    prop_assert!((block > at / BLOCK) == (f.stride_bytes() > 0));
                    let bytes = block * BLOCK..(block + 1) * BLOCK;
                    prop_assert!(f.touches(&bytes));
                    let pieces = f.within(bytes.clone());
                    prop_assert!(!pieces.is_empty());
                    prop_assert!(pieces.iter().all(|p| p.start < p.end && bytes.start <= p.start && p.end <= bytes.end));
                    prop_assert!(pieces.windows(2).all(|w| w[0].end < w[1].start));
                }
            }
        }
    }

    /// The pieces of a forecast are those of counting on, round by round.
    #[test]
    fn pieces_are_those_of_counting(start in 0u64..1000, len in 1u64..50, stride in -70i64..70, from in 0u64..1500, ask in 1u64..300) {
        prop_assume!(stride != 0);
        let round: Vec<_> = std::iter::once(start..start + len).collect();
        let f = Forecast { round, stride, dense: false, regular: true, rounds: 9 };
        let counted: std::collections::BTreeSet<u64> = (0..=9)
            .flat_map(|n| (start as i64 + n * stride..start as i64 + n * stride + len as i64).filter(|b| *b >= 0).map(|b| b as u64))
            .filter(|b| (from..from + ask).contains(b))
            .collect();
        let pieces: Vec<u64> = f.within(from..from + ask).into_iter().flatten().collect();
        prop_assert_eq!(pieces, counted.into_iter().collect::<Vec<_>>());
    }
}

/// Of reads at equal distances only two are seen after all that were foreseen, as of a ring that is looked into from time to time.
#[test]
fn reads_that_are_not_seen_do_not_end_a_stride() {
    for (len, stride) in [(64 * KIB, 256 * KIB), (64 * KIB, 448 * KIB)] {
        let mut detector = Detector::default();
        let (mut at, mut seen) = (0, 0);
        let mut foreseen = 0;
        while at < 40 << 20 {
            let (read, skips) = (at..at + len, seen % 2 == 1);
            let rounds = detector.observe(&read, 32 * KIB).forecast.map_or(0, Forecast::rounds);
            assert!(rounds >= foreseen, "{rounds} after {foreseen}, at {at}");
            foreseen = rounds;
            at += stride * if skips { 1 + rounds.min((16 << 20) / stride - 1) } else { 1 };
            seen += 1;
        }
        assert!(foreseen >= 256, "{foreseen}");
    }
}
