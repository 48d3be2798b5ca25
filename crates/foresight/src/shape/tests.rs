use std::ops::Range;

use impresario_base::random::Random;
use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn sample(size: u64, reads: impl IntoIterator<Item = (u64, u64)>) -> Sample {
    Sample::of(size, reads.into_iter().map(|(start, len)| start..start + len)).unwrap()
}

/// Learns from files of these sizes and asks about one of another size; the shape's words and its score there.
#[track_caller]
fn generalises(sizes: &[u64], new: u64, read: impl Fn(u64) -> Vec<(u64, u64)>) -> (String, Score) {
    let samples: Vec<Sample> = sizes.iter().map(|size| sample(*size, read(*size))).collect();
    let shape = Shape::learn(&samples.iter().collect::<Vec<_>>());
    (shape.to_string(), shape.score(&sample(new, read(new))))
}

#[track_caller]
fn is_right((words, score): (String, Score), told: &str) {
    assert_eq!(words, told);
    assert_eq!((score.precision(), score.recall()), (1.0, 1.0), "{words}: {score:?}");
}

fn whole(size: u64) -> Vec<(u64, u64)> {
    (0..size.div_ceil(MIB)).map(|i| (i * MIB, MIB)).collect()
}

fn strided(from: u64, len: u64, stride: u64, size: u64) -> Vec<(u64, u64)> {
    (0..).map(|i| (from + i * stride, len)).take_while(|(at, _)| *at < size).collect()
}

#[test]
fn whole_files_are_read_whole_at_any_size() {
    is_right(generalises(&[5 * MIB, 17 * MIB + 123], 9 * MIB + 7, whole), "all of it");
    let twice = |size| [whole(size), whole(size)].concat();
    is_right(generalises(&[50 * MIB, 170 * MIB], 90 * MIB, twice), "all of it, then all of it");
}

#[test]
fn a_footer_comes_first() {
    let read = |size| [vec![(size - 8, 8), (size - 5000, 4992), (0, 4)], whole(size)].concat();
    let told = "8 bytes at the end -8, then 4992 bytes at the end -5000, then all of it";
    // Four bytes in front of a piece that goes on with them belong to it.
    let samples = [20 * MIB, 31 * MIB].map(|size| sample(size, read(size)));
    assert_eq!(samples[0].series.len(), 3);
    is_right(generalises(&[20 * MIB, 31 * MIB], 70 * MIB + 11, read), told);
}

#[test]
fn strides_go_on_to_the_end() {
    let read = |size| [vec![(0, 512)], strided(4096, 65_536, 262_144, size)].concat();
    let told = "512 bytes at 0, then 65536 bytes of every 262144 from 4096 to the end";
    is_right(generalises(&[16 * MIB, 20 * MIB], 133 * MIB + 5000, read), told);
    let backward = |size: u64| {
        let last = size / 262_144;
        (0..last).map(|i| ((last - 1 - i) * 262_144, 65_536)).collect()
    };
    let (_, score) = generalises(&[16 * MIB, 20 * MIB], 64 * MIB, backward);
    assert_eq!((score.precision(), score.recall()), (1.0, 1.0));
}

#[test]
fn columns_lie_at_shares_of_the_size() {
    // Eight columns, one after the other, of which the third and the last are read.
    let read = |size: u64| vec![(2 * (size / 8), size / 8), (7 * (size / 8), size / 8)];
    let told = "1/8 of the size from 1/4 of the size, then 1/8 of the size from 7/8 of the size";
    is_right(generalises(&[8 * MIB, 24 * MIB], 80 * MIB, read), told);
    // Three of several columns within each group of rows.
    let rows = |size: u64| {
        let group = |i: u64| [(i * MIB, 8192), (i * MIB + 65_536, 16_384), (i * MIB + 524_288, 4096)];
        (0..size / MIB).flat_map(group).collect()
    };
    is_right(generalises(&[8 * MIB, 24 * MIB], 80 * MIB, rows), "3 pieces of every 1048576 bytes from 0 to the end");
}

#[test]
fn what_differs_from_file_to_file_is_left_out() {
    // A footer, then pieces whose places only the footer tells.
    let read = |size: u64| {
        let mut random = Random::new(size);
        let piece = |_| (random.below(size - MIB) / 8192 * 8192, 4096 + size % 7 * 1000);
        [vec![(size - 8, 8), (size - 65_544, 65_536)], (0..50).map(piece).collect()].concat()
    };
    let (words, score) = generalises(&[40 * MIB, 53 * MIB + 8192], 81 * MIB, read);
    assert_eq!(words, "8 bytes at the end -8, then 65536 bytes at the end -65544");
    assert!(score.precision() == 1.0 && score.recall() < 0.5, "{score:?}");
    // Nearly all of it, in an order of its own.
    let shuffled = |size: u64| (0..size / MIB).map(|i| (i * (size % 97 + 7) % (size / MIB) * MIB, MIB)).collect();
    let (words, score) = generalises(&[61 * MIB, 83 * MIB], 101 * MIB, shuffled);
    assert_eq!((words.as_str(), score.recall()), ("all of it", 1.0));
    // Nothing at all.
    let other = |size: u64| vec![(size / 3 / 4096 * 4096 + size % 11 * 4096, 4096 + size % 5 * 4096)];
    let samples = [40 * MIB, 53 * MIB + 3, 71 * MIB + 9].map(|size| sample(size, other(size)));
    let shape = Shape::learn(&samples.iter().collect::<Vec<_>>());
    assert_eq!((shape.to_string().as_str(), shape.predict(90 * MIB).len()), ("nothing in common", 0));
}

#[test]
fn one_size_says_nothing_of_others_unless_the_ends_do() {
    let samples = |read: &dyn Fn(u64) -> Vec<(u64, u64)>| [16 * MIB; 2].map(|size| sample(size, read(size)));
    let shape = |of: [Sample; 2]| Shape::learn(&of.iter().collect::<Vec<_>>());
    let headed = shape(samples(&|_| vec![(0, 4096), (8 * MIB, MIB)]));
    assert_eq!(headed.only_size_bytes, Some(16 * MIB));
    assert!(headed.predict(17 * MIB).is_empty() && headed.predict(16 * MIB).len() == 2);
    let all = shape(samples(&whole));
    let seventeen = 0..17 * MIB;
    assert_eq!((all.only_size_bytes, all.predict(17 * MIB)), (None, vec![seventeen]));
}

#[test]
fn files_are_held_out_one_after_the_other() {
    let good: Vec<Sample> = [16, 20, 31].map(|m| sample(m * MIB, strided(0, 65_536, 262_144, m * MIB))).into();
    let all: Vec<Vec<&Sample>> = good.iter().map(|one| vec![one]).collect();
    let score = held_out(&all).unwrap();
    assert_eq!((score.files, score.precision(), score.recall()), (3, 1.0, 1.0));
    assert_eq!(held_out(&all[..1]), None);
    // One that is read otherwise shows.
    let odd = sample(24 * MIB, strided(100_000, 4096, 1_000_000, 24 * MIB));
    let mixed = [all.clone(), vec![vec![&odd]]].concat();
    assert!(held_out(&mixed).unwrap().both() < 0.5, "{:?}", held_out(&mixed));
    // Runs of one file predict no other file, and another run of it that read otherwise shows, too.
    assert_eq!(held_out(&[vec![&good[0], &good[0]]]), None);
    let other_run = sample(16 * MIB, strided(100_000, 4096, 1_000_000, 16 * MIB));
    let differ = held_out(&[vec![&good[0], &other_run], vec![&good[1]]]).unwrap();
    assert_eq!((differ.files, differ.precision() < 0.9), (3, true), "{differ:?}");
}

fn anchors() -> impl Strategy<Value = Anchor> {
    let bytes = prop_oneof![any::<i64>(), -100_000i64..100_000];
    (0u32..20, 0u32..20, bytes).prop_map(|(num, den, bytes)| Anchor { num, den, bytes })
}

fn steps() -> impl Strategy<Value = ShapeStep> {
    let group = prop::collection::vec((anchors(), anchors()).prop_map(|(at, len)| ShapePiece { at, len }), 0..5);
    let repeat = prop_oneof![any::<u64>().prop_map(Repeat::Times), anchors().prop_map(Repeat::Until)];
    (anchors(), group, anchors(), repeat).prop_map(|(start, group, stride, repeat)| ShapeStep {
        start,
        group,
        stride,
        repeat,
    })
}

fn within(pieces: &[Range<u64>], size: u64) -> bool {
    pieces.len() <= PREDICTED_MAX && pieces.iter().all(|p| p.start < p.end && p.end <= size)
}

proptest! {
    /// Whatever a shape says, what it predicts lies within the file and is bounded.
    #[test]
    fn predictions_lie_within_the_file(steps in prop::collection::vec(steps(), 0..6), size in prop_oneof![0u64..1 << 20, any::<u64>()]) {
        let shape = Shape { steps, only_size_bytes: None };
        prop_assert!(within(&shape.predict(size), size));
    }

    /// Whatever was read: what is learnt from it is mostly right of it, and lies within files of any size.
    #[test]
    fn what_is_learnt_is_right_of_what_it_was_learnt_from(
        files in prop::collection::vec((1u64..1 << 22, prop::collection::vec((0u64..1 << 22, 1u64..1 << 18), 1..40)), 1..5),
        size in any::<u64>(),
    ) {
        let of = |(size, reads): &(u64, Vec<(u64, u64)>)| Sample::of(*size, reads.iter().map(|&(at, len)| at..at + len));
        let samples: Vec<Sample> = files.iter().filter_map(of).collect();
        let samples: Vec<&Sample> = samples.iter().collect();
        let shape = Shape::learn(&samples);
        let score = shape.score_all(&samples);
        prop_assert!(shape.steps.is_empty() || score.precision() >= 0.9, "{} {:?}", shape, score);
        prop_assert!(score.right_bytes <= score.predicted_bytes.min(score.read_bytes));
        prop_assert!(within(&shape.predict(size), size));
        held_out(&samples.iter().map(|one| vec![*one]).collect::<Vec<_>>());
    }
}
