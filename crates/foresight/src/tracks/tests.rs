//! What is predicted of the extents of tracks, and what that costs.

use proptest::prelude::*;

use super::*;

const KIB: u64 = 1024;

/// Row groups of eight columns of 64 KiB each, by column.
fn columns(groups: u64) -> Vec<Vec<Range<u64>>> {
    let at = |g: u64, c: u64| (g * 8 + c) * 64 * KIB;
    (0..8).map(|c| (0..groups).map(|g| at(g, c)..at(g, c) + 64 * KIB).collect()).collect()
}

fn sum(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

#[test]
fn the_wanted_columns_are_found_and_the_others_left_alone() {
    let mut tracks = Tracks::new(columns(40), 1 << 30);
    let (mut hits, mut predicted, mut used) = (0, 0, 0);
    for group in 0..40 {
        for column in [1, 4, 6] {
            let read = columns(40)[column][group].clone();
            let next = tracks.read(1, &read, &mut |_| true).unwrap();
            hits += u64::from(next.was_predicted);
            (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
        }
    }
    assert_eq!((hits, predicted, used), (39 * 3, 39 * 3 * 64 * KIB, 39 * 3 * 64 * KIB));
    assert_eq!(tracks.depart(1), 0);
}

/// What is predicted is asked for in the order in which it will be read, whichever column shows it.
#[test]
fn columns_read_in_turn_come_in_turn() {
    let mut tracks = Tracks::new(columns(400), 1 << 30);
    let mut predicted = Vec::new();
    for group in 0..400 {
        for column in [1, 6, 4] {
            let read = columns(400)[column][group].clone();
            // As with a device that is not known yet, little is granted in the beginning.
            let mut left = (group as u64 + 1) * 3 * 64 * KIB;
            let mut may = |bytes| {
                left = left.saturating_sub(bytes);
                left > 0
            };
            predicted.extend(tracks.read(1, &read, &mut may).unwrap().next);
        }
    }
    let read = (0..400).flat_map(|group| [1, 6, 4].map(|column| columns(400)[column][group].clone()));
    let missed = read.filter(|read| !predicted.contains(read)).count();
    assert!(missed <= 3, "{missed}");
    let place = |range: &Range<u64>| {
        let (group, column) = (range.start / (8 * 64 * KIB), range.start / (64 * KIB) % 8);
        group * 3 + [1, 6, 4].iter().position(|c| *c == column).unwrap() as u64
    };
    let places: Vec<u64> = predicted.iter().map(place).collect();
    assert!(places.is_sorted(), "{places:?}");
}

/// Pages of different lengths, each with a sum that the reader passes over.
#[test]
fn a_sum_at_the_end_that_is_not_read_makes_no_difference() {
    let page = |i: u64| i * 64 * KIB..i * 64 * KIB + 20 * KIB + i * i % 1000;
    let mut tracks = Tracks::new([(0..40).map(page).collect()], 1 << 30);
    let reads = (0..40).map(|i| page(i).start..page(i).end - 8);
    let hits = reads.filter(|read| tracks.read(1, read, &mut |_| true).is_some_and(|next| next.was_predicted));
    assert_eq!(hits.count(), 39);
}

/// A reader fills a buffer that is longer than the columns of a group: what it reads for one column is not meant for the
/// next ones, and comes as a whole, so that no second request fetches its rest.
#[test]
fn of_a_buffer_that_is_filled_all_is_predicted_and_other_columns_are_not() {
    let column = |c: u64, g: u64| {
        let at = g * 1000 * KIB + c * 46 * KIB;
        at..at + 45 * KIB + g * g % 1000
    };
    let buffer = 128 * KIB;
    let mut tracks = Tracks::new((0..8).map(|c| (0..40).map(|g| column(c, g)).collect()), 40_000 * KIB);
    let (mut hits, mut predicted): (u64, Vec<Range<u64>>) = (0, Vec::new());
    for group in 0..40 {
        for c in [1, 5] {
            let start = column(c, group).start;
            let read = start..start + buffer;
            let next = tracks.read(1, &read, &mut |_| true).unwrap();
            assert_eq!(next.was_predicted, predicted.iter().any(|r| r.start <= read.start && read.end <= r.end));
            hits += u64::from(next.was_predicted);
            predicted.extend(next.next);
        }
    }
    assert_eq!((hits, predicted.len() as u64), (39 * 2, 39 * 2));
    assert_eq!(tracks.depart(1), 0);
}

#[test]
fn buffers_that_overlap_are_brought_in_once() {
    const LEN: u64 = 45 * KIB;
    let mut tracks = Tracks::new([(0..200).map(|i| i * LEN..(i + 1) * LEN).collect()], 200 * LEN);
    let (mut hits, mut predicted) = (0, 0);
    for i in 0..200 {
        let read = i * LEN..(i * LEN + 128 * KIB).min(200 * LEN);
        let next = tracks.read(1, &read, &mut |_| true).unwrap();
        hits += u64::from(next.was_predicted);
        predicted += sum(&next.next);
    }
    assert!(hits >= 197, "all but the first one, and the last ones, which come with those before: {hits}");
    assert_eq!(predicted, 200 * LEN - 128 * KIB, "all but what the first read had");
}

#[test]
fn a_second_pass_is_predicted_like_the_first() {
    let mut tracks = Tracks::new(columns(40), 1 << 30);
    for pass in 0..3 {
        let (mut hits, mut predicted) = (0, 0);
        for read in &columns(40)[2] {
            let next = tracks.read(1, read, &mut |_| true).unwrap_or_default();
            hits += u64::from(next.was_predicted);
            predicted += sum(&next.next);
        }
        assert_eq!((hits, predicted), (39, 39 * 64 * KIB), "pass {pass}");
    }
    // Another program begins when the first one is at the end, whose pages may be gone.
    let longer: Vec<_> = (0..1000).map(|i| i * KIB..(i + 1) * KIB).collect();
    let mut tracks = Tracks::new([longer.clone()], 1 << 30);
    longer.iter().for_each(|read| drop(tracks.read(1, read, &mut |_| true)));
    let next = tracks.read(2, &longer[0], &mut |_| true).unwrap();
    assert!(!next.was_predicted && next.next.len() == 1, "{next:?}");
}

#[test]
fn programs_that_read_the_same_at_the_same_time_bring_it_in_once() {
    let mut tracks = Tracks::new(columns(40), 1 << 30);
    let (mut hits, mut predicted) = (0, 0);
    for at in 0..40 + 5 {
        for (reader, group) in [(1, Some(at)), (2, usize::checked_sub(at, 5))] {
            let Some(read) = group.and_then(|group| columns(40)[2].get(group).cloned()) else { continue };
            let next = tracks.read(reader, &read, &mut |_| true).unwrap_or_default();
            hits += u64::from(next.was_predicted);
            predicted += sum(&next.next);
        }
    }
    assert_eq!((hits, predicted), (2 * 39, 39 * 64 * KIB));
}

#[test]
fn extents_in_any_order_of_the_file_are_read_in_the_order_of_the_data() {
    // Chunks scattered over the file, of a table of 10 x 10; a column is read, upward and downward.
    let extents: Vec<_> = (0..100u64).map(|i| (i * 37 % 100) * 10_000).map(|at| at..at + 9_000).collect();
    for backward in [false, true] {
        let mut tracks = Tracks::new([extents.clone()], 1 << 30);
        let mut order: Vec<usize> = (0..10).map(|row| row * 10 + 3).collect();
        if backward {
            order.reverse();
        }
        let hits: Vec<bool> = order
            .iter()
            .map(|i| tracks.read(1, &extents[*i].clone(), &mut |_| true).is_some_and(|next| next.was_predicted))
            .collect();
        assert_eq!(hits.iter().filter(|hit| **hit).count(), 7, "{hits:?}");
        assert_eq!(tracks.depart(1), 9_000, "the first guess was wrong, and nothing beyond the table");
    }
}

#[test]
fn what_is_read_at_once_comes_at_once() {
    let mut tracks = Tracks::new([(0..64).map(|i| i * KIB..(i + 1) * KIB).collect()], 1 << 20);
    let next = tracks.read(1, &(0..8 * KIB), &mut |_| true).unwrap();
    assert_eq!((next.next.len(), next.next[0].clone()), (1, 8 * KIB..16 * KIB));
    let next = tracks.read(1, &(8 * KIB..16 * KIB), &mut |_| true).unwrap();
    assert!(next.was_predicted && next.next.len() == 1 && next.next[0] == (16 * KIB..32 * KIB), "{next:?}");
}

#[test]
fn neighbours_in_the_file_that_are_far_apart_in_the_data_predict_nothing() {
    // The first and the last extent of the data stand side by side.
    let mut extents: Vec<_> = (0..1000).map(|i| i * KIB..(i + 1) * KIB).collect();
    extents.insert(0, 1000 * KIB..1001 * KIB);
    let mut tracks = Tracks::new([extents], 1 << 30);
    assert_eq!(tracks.read(1, &(999 * KIB..1001 * KIB), &mut |_| true), None);
    assert_eq!(tracks.clear(), 0);
}

#[test]
fn a_read_predicts_a_bounded_number_of_bytes_and_extents() {
    let long: Vec<_> = (0..64).map(|i| (i * 4) << 20..(i * 4 + 4) << 20).collect();
    let mut tracks = Tracks::new([long], 1 << 30);
    assert_eq!(tracks.read(1, &(0..128 << 20), &mut |_| true).map(|next| sum(&next.next)), Some(0));
    let short: Vec<_> = (0..60_000).map(|i| i * KIB..(i + 1) * KIB).collect();
    let mut tracks = Tracks::new([short], 1 << 30);
    for i in 0..10 {
        let read = i * 200 * KIB..(i + 1) * 200 * KIB;
        let mut asked = 0;
        let next = tracks
            .read(1, &read, &mut |_| {
                asked += 1;
                true
            })
            .unwrap();
        assert!(sum(&next.next) <= LOOKED_AT_MAX as u64 * KIB && asked <= 5, "{next:?}");
    }
}

/// A table of 16 x 32 chunks: of every fourth column the upper 12 rows, downward.
#[test]
fn columns_one_after_the_other_are_foreseen_beyond_their_ends() {
    let chunks: Vec<_> = (0..512u64).map(|i| i * 64 * KIB..(i + 1) * 64 * KIB).collect();
    let mut tracks = Tracks::new([chunks.clone()], 1 << 30);
    let (mut missed, mut predicted, mut used) = (Vec::new(), 0, 0);
    for column in (0..32).step_by(4) {
        let mut of_column = 0;
        for row in 0..12 {
            let read = &chunks[row * 32 + column];
            let next = tracks.read(1, read, &mut |_| true).unwrap_or_default();
            of_column += usize::from(!next.was_predicted);
            (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
        }
        missed.push(of_column);
    }
    assert_eq!(missed, [3, 2, 1, 0, 0, 0, 0, 0], "after one column its length is known, after two the next one");
    // The first guess, four below the first column, and what would follow the last one.
    assert!((predicted - used) / (64 * KIB) <= 12, "{}", predicted - used);
    assert_eq!(tracks.depart(1), predicted - used);
}

#[test]
fn of_rows_read_in_part_only_that_part_comes() {
    let rows: Vec<_> = (0..20u64).map(|i| i * 256 * KIB..(i + 1) * 256 * KIB).collect();
    let mut tracks = Tracks::new([rows], 1 << 30);
    let read = |i: u64| i * 256 * KIB + 64 * KIB..i * 256 * KIB + 192 * KIB;
    assert!(tracks.read(1, &read(0), &mut |_| true).is_none(), "what is read of it is not known before it is left");
    assert_eq!(tracks.read(1, &read(1), &mut |_| true).unwrap().next, [read(2), read(3)]);
    let next = tracks.read(1, &read(2), &mut |_| true).unwrap();
    assert!(next.was_predicted && next.used_bytes == 128 * KIB);
}

#[test]
fn whole_extents_of_different_lengths_are_followed() {
    let extents: Vec<_> = (0..40u64).map(|i| i * 100 * KIB..i * 100 * KIB + (20 + i * 7 % 60) * KIB).collect();
    let mut tracks = Tracks::new([extents.clone()], 1 << 30);
    let mut reads = extents.iter().step_by(2);
    let hits = reads.by_ref().filter(|read| tracks.read(1, read, &mut |_| true).is_some_and(|n| n.was_predicted));
    assert_eq!(hits.count(), 17);
}

#[test]
fn extents_read_in_pieces_come_as_a_whole() {
    let mut tracks = Tracks::new(columns(20), 1 << 30);
    let pieces = |group: usize| {
        let extent = columns(20)[2][group].clone();
        (0..8).map(move |i| extent.start + i * 8 * KIB..extent.start + (i + 1) * 8 * KIB)
    };
    let mut hits = 0;
    for read in (0..20).flat_map(pieces) {
        hits += u32::from(tracks.read(1, &read, &mut |_| true).is_some_and(|next| next.was_predicted));
    }
    assert_eq!(hits, 18 * 8);
    assert_eq!(tracks.depart(1), 0);
}

#[test]
fn single_reads_in_many_tracks_cost_little() {
    let extent = |t: u64, i: u64| (t * 10 + i) * KIB..(t * 10 + i + 1) * KIB;
    let many: Vec<Vec<Range<u64>>> = (0..1000).map(|t| (0..10).map(|i| extent(t, i)).collect()).collect();
    let mut tracks = Tracks::new(many.clone(), 1 << 30);
    let predicted: u64 = many.iter().filter_map(|t| tracks.read(1, &t[0], &mut |_| true)).map(|n| sum(&n.next)).sum();
    assert_eq!(predicted, UNPROVEN_MAX * KIB);
    assert_eq!(tracks.depart(1), predicted);
}

#[test]
fn an_extent_takes_little_memory() {
    assert_eq!(size_of::<Extent>(), 24);
}

#[test]
fn nothing_is_predicted_without_leave_or_beyond_the_file() {
    let mut tracks = Tracks::new(columns(40), 1 << 30);
    assert_eq!(tracks.read(1, &(0..64 * KIB), &mut |_| false).unwrap().next, []);
    assert!(Tracks::new([vec![0..10, 90..101]], 100).is_empty(), "one extent has no successor");
    assert!(tracks.read(1, &(1 << 29..(1 << 29) + 1), &mut |_| true).is_none());
}

proptest! {
    /// Whatever the index says and the program reads, each extent is predicted at most once while it is not read, and
    /// what is predicted is used or unread.
    #[test]
    fn nothing_is_predicted_twice(
        tracks in prop::collection::vec(prop::collection::vec((0u64..5000, 0u64..300), 0..40), 0..6),
        reads in prop::collection::vec((0u64..3, 0u64..5000, 1u64..600), 0..200),
    ) {
        let tracks = tracks.into_iter().map(|t| t.into_iter().map(|(at, len)| at..at + len).collect::<Vec<_>>());
        let mut tracks = Tracks::new(tracks, 5000);
        let (mut predicted, mut used) = (0, 0);
        for (reader, at, len) in reads {
            if let Some(next) = tracks.read(reader, &(at..at + len), &mut |bytes| bytes < 1000) {
                prop_assert!(next.next.iter().all(|r| r.start < r.end && r.end <= 5000));
                (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
            }
        }
        let unread = tracks.clear();
        prop_assert!(used + unread <= predicted, "{} {} {}", used, unread, predicted);
    }
}
