//! One file's advisor: which engine an entry gets, and when it falls silent.

#![allow(clippy::single_range_in_vec_init, reason = "one range is a list, too")]

use super::*;
use crate::config::{Entry, Region};
use crate::formats::Spent;
use crate::regions::RegionMap;
use impresario_foresight::Tracks;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn advisor(entry: Entry, size: u64, budget: Budget) -> Advisor {
    let regions = RegionMap::of(&entry);
    let monitored = Arc::new(Monitored { key: "File[0]".into(), entry, regions, learnt: None });
    let stand_down = StandDown { trial: false, ..StandDown::default() };
    Advisor::new(monitored, size, &budget, stand_down, &DeviceCost::default())
}

fn read(a: &mut Advisor, program: u64, bytes: Range<u64>, duration_ns: u64, now_ns: u64) -> Vec<Action> {
    let actions = a.read(Reader { program, thread: 1 }, &Read { bytes, duration_ns, now_ns }, &mut |_| true);
    // What is to be tried is answered by the tests themselves.
    for action in &actions {
        if let Action::Prefetch(range) | Action::Renew(range) = action {
            a.hinted(range.clone(), 0, false, now_ns);
        }
    }
    actions
}

fn prefetched(actions: &[Action]) -> u64 {
    actions.iter().map(|a| if let Action::Prefetch(r) = a { r.end - r.start } else { 0 }).sum()
}

#[test]
fn the_paper_s_window() {
    let mut a = advisor(Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") }, 512 * MIB, Budget::default());
    assert_eq!(read(&mut a, 1, 0..250 * KIB, 0, 0), [Action::Prefetch(0..16 * MIB)]);
    let mut total = 16 * MIB;
    for i in 1..1024 {
        total += prefetched(&read(&mut a, 1, i * 500 * KIB..i * 500 * KIB + 250 * KIB, 0, i));
    }
    assert!(total <= 512 * MIB && a.held_bytes() <= 32 * MIB, "{total} {}", a.held_bytes());
    assert!(a.tally().used_bytes * 2 > a.tally().prefetched_bytes * 9 / 10);
}

#[test]
fn the_window_is_bounded_by_the_budget() {
    let entry = Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") };
    let mut a = advisor(entry, 512 * MIB, Budget { per_file: 8 * MIB, ..Budget::default() });
    assert_eq!(read(&mut a, 1, 0..1, 0, 0), [Action::Prefetch(0..8 * MIB)]);
}

#[test]
fn a_known_order_is_followed() {
    let pieces: Vec<Region> =
        (0..100).map(|i| Region { offset: (i * 37 % 100) * 10 * MIB, length: 100 * KIB }).collect();
    let entry = Entry { block_size: 200 * KIB, read_ahead_size: 2, sequence: pieces.clone(), ..Entry::new("/f") };
    let mut a = advisor(entry, 1000 * MIB, Budget::default());
    let next = |i: usize| pieces[i].bytes();
    let actions = read(&mut a, 1, next(0), 0, 0);
    assert_eq!(actions, [0, 1, 2, 3].map(|i| Action::Prefetch(next(i))));
    assert_eq!(read(&mut a, 1, next(1), 0, 0), []);
    assert_eq!(read(&mut a, 1, next(2), 0, 0), [4, 5].map(|i| Action::Prefetch(next(i))));
    assert_eq!(read(&mut a, 2, next(0), 0, 0), [], "another program shares what is there");
    assert_eq!(read(&mut a, 1, 5 * MIB..6 * MIB, 0, 0), [], "a read that is not in the order");
}

#[test]
fn strides_are_found_and_nothing_is_released() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f") }, 4096 * MIB, Budget::default());
    let mut total = 0;
    for i in 0..500 {
        let at = i * 8 * MIB;
        let actions = read(&mut a, 1, at..at + 100 * KIB, 0, i);
        assert!(!actions.iter().any(|a| matches!(a, Action::Release(_))));
        total += prefetched(&actions);
    }
    let tally = a.tally();
    assert!(total <= 520 * 100 * KIB, "only the pieces: {total}");
    assert!(tally.hits > 480, "{tally:?}");
    assert!(a.depart(1).is_empty());
    assert_eq!(a.held_bytes(), 0);
}

#[test]
fn a_file_that_gains_nothing_falls_silent_and_is_tried_again() {
    let mut a = advisor(Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") }, 1 << 40, Budget::default());
    let mut silent_at = None;
    for i in 0..2000 {
        read(&mut a, 1, i * 250 * KIB..(i + 1) * 250 * KIB, 1_000_000, i * 1_000_000);
        if a.why_down().is_some() {
            silent_at = Some(i);
            break;
        }
    }
    assert!(silent_at.is_some_and(|at| at < 500), "{silent_at:?}");
    let at = 2000 * 250 * KIB;
    assert_eq!(read(&mut a, 1, at..at + 1, 1_000_000, 3_000_000_000), []);
    assert_eq!(a.held_bytes(), 0);
    assert!(prefetched(&read(&mut a, 1, at + 9 * MIB..at + 10 * MIB, 1_000_000, 60_000_000_000)) > 0);
}

#[test]
fn what_is_in_memory_already_is_not_hinted_for_long() {
    let mut a = advisor(Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") }, 1 << 40, Budget::default());
    for action in read(&mut a, 1, 0..1, 0, 0) {
        let Action::Prefetch(range) = action else { panic!() };
        let bytes = range.end - range.start;
        a.hinted(range, bytes, true, 0);
    }
    assert_eq!(a.why_down(), Some(Why::InMemory(100)));
}

#[test]
fn modes_alone_move_nothing() {
    let mut a = advisor(Entry { random: vec![Region::WHOLE], ..Entry::new("/f") }, 1 << 40, Budget::default());
    assert_eq!(read(&mut a, 1, 0..1 << 30, 1, 1), []);
    assert_eq!(a.depart(1), []);
}

#[test]
fn a_program_that_is_expected_finds_its_beginning_there() {
    let entry = Entry { will_need: vec![Region { offset: 100 * MIB, length: 0 }], ..Entry::new("/f") };
    let mut a = advisor(entry, 512 * MIB, Budget::default());
    assert_eq!(a.expect(0, 1000, &mut |_| true), [Action::Prefetch(100 * MIB..116 * MIB)]);
    assert_eq!(a.tally().used_bytes, 0);
    assert_eq!(read(&mut a, 1, 0..4096, 0, 1), [], "the header, which is not in the plan");
    assert_eq!(read(&mut a, 1, 100 * MIB..101 * MIB, 0, 2), [], "nothing is brought in twice");
    assert_eq!((a.tally().hits, a.tally().used_bytes, a.held_bytes()), (1, MIB, 16 * MIB));
    for n in 1..64 {
        read(&mut a, 1, (100 + n) * MIB..(101 + n) * MIB, 0, 2);
    }
    assert!(a.held_bytes() <= 32 * MIB, "nobody else holds anything: {}", a.held_bytes());
    assert_eq!(a.unexpect(), []);

    let mut late = advisor(Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") }, 512 * MIB, Budget::default());
    assert_eq!(late.expect(0, 1000, &mut |_| false), [], "without leave nothing moves");
    assert_eq!(late.expect(0, 1000, &mut |_| true), [Action::Prefetch(0..16 * MIB)]);
    read(&mut late, 1, 400 * MIB..401 * MIB, 0, 999);
    assert_eq!(late.held_bytes(), 32 * MIB);
    read(&mut late, 1, 401 * MIB..402 * MIB, 0, 1000);
    assert_eq!(
        (late.held_bytes(), late.tally().wasted_bytes),
        (16 * MIB, 16 * MIB),
        "read from elsewhere for too long"
    );
}

#[test]
fn a_known_order_is_expected_from_its_first_piece() {
    let pieces = [(500, 10), (0, 10), (300, 10)].map(|(at, len)| Region { offset: at * MIB, length: len * KIB });
    let entry = Entry { block_size: 10 * KIB, read_ahead_size: 2, sequence: pieces.to_vec(), ..Entry::new("/f") };
    let mut a = advisor(entry, 1000 * MIB, Budget::default());
    assert_eq!(a.expect(0, 1000, &mut |_| true), [0, 1].map(|i| Action::Prefetch(pieces[i].bytes())));
    assert_eq!(read(&mut a, 1, pieces[0].bytes(), 0, 1), []);
    assert_eq!(read(&mut a, 1, pieces[1].bytes(), 0, 2), [Action::Prefetch(pieces[2].bytes())]);
}

/// 20 KB of each 150 KB: on a fast disk a short program is left alone, on a distant one the first reads suffice.
#[test]
fn without_a_plan_something_must_be_at_stake() {
    let entry = Entry { online: true, ..Entry::new("/f.parquet") };
    let monitored = Arc::new(Monitored { key: "*".into(), regions: RegionMap::of(&entry), entry, learnt: None });
    // How many reads until something is brought in, and until the index is wanted.
    let first = |read_ns: u64| {
        let new = || {
            Advisor::new(monitored.clone(), 512 * MIB, &Budget::default(), StandDown::default(), &DeviceCost::default())
        };
        let (mut a, mut brought, mut wished) = (new(), None, None);
        a.may_be(crate::formats::by_name(std::path::Path::new("/f.parquet")));
        for i in 1..400u64 {
            let actions = read(&mut a, 1, i * 150_000..i * 150_000 + 20_000, read_ns, i * read_ns);
            let tried = answer_trials(&mut a, &actions, 2 * read_ns, i * read_ns);
            let asked = prefetched(&actions) + tried;
            brought = brought.or((asked > 0).then_some(i));
            wished = wished.or(a.take_index_wish().map(|_| i));
        }
        (brought, wished)
    };
    let (brought, wished) = first(5_000_000);
    assert!(brought.is_some_and(|at| at < 10) && wished == Some(2), "{brought:?} {wished:?}");
    assert_eq!(first(125_000), (Some(80), Some(80)), "8 ms, beside what reads from memory take");
    assert_eq!(first(20_000), (None, None), "from memory");
    let unknown = first(0);
    assert!(unknown.0.is_some_and(|at| at < 10) && unknown.1 == Some(1), "{unknown:?}");
}

/// What is to be tried takes so long. How much it is.
fn answer_trials(a: &mut Advisor, actions: &[Action], took_ns: u64, now_ns: u64) -> u64 {
    let extents = actions.iter().filter_map(|action| match action {
        Action::Try(extent) => Some(extent.clone()),
        _ => None,
    });
    extents
        .map(|extent| {
            a.tried(&extent, 0, took_ns, now_ns + took_ns);
            extent.end - extent.start
        })
        .sum()
}

fn online(size: u64) -> Advisor {
    advisor(Entry { online: true, ..Entry::new("/f") }, size, Budget::default())
}

#[test]
fn a_file_read_without_a_pattern_is_brought_in_when_that_costs_no_more() {
    let mut a = online(64 * MIB);
    let (mut asked, mut tried) = (0, 0);
    for i in 0..200u64 {
        let at = i * i * 7_919 * KIB % (63 * MIB);
        for action in read(&mut a, 1, at..at + 4 * KIB, 5_000_000, i * 5_000_000) {
            match action {
                Action::Try(extent) => {
                    tried += extent.end - extent.start;
                    let took_ns = (extent.end - extent.start) * 25_000_000 / (4 * MIB);
                    a.tried(&extent, 0, took_ns, i * 5_000_000);
                }
                Action::Prefetch(range) => {
                    asked += range.end - range.start;
                    a.hinted(range, 0, true, i * 5_000_000);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(tried < 16 * MIB && tried + asked == 64 * MIB, "{tried} {asked}");
    assert!(a.held_bytes() >= 64 * MIB);
    // One that reads from memory waits for nothing.
    let mut a = online(64 * MIB);
    let tried = (0..2000u64).any(|i| {
        let at = i * i * 7_919 * KIB % (63 * MIB);
        read(&mut a, 1, at..at + 4 * KIB, 2_000, i * 1000).iter().any(|action| matches!(action, Action::Try(_)))
    });
    assert!(!tried);
}

#[test]
fn one_long_read_is_seen_in_the_page_cache() {
    let (mut a, ms) = (online(64 * MIB), 1_000_000);
    a.is_heard_of(0, None);
    assert_eq!(a.look_at_map_ns(), Some(5 * ms), "not before it is quiet");
    // The kernel reads ahead for it, 128 KiB in 5 ms.
    let mut brought = Vec::new();
    for step in 1..20u64 {
        let there = step * 128 * KIB;
        let mut cached = |range: Range<u64>| Some(there.clamp(range.start, range.end) - range.start);
        brought.extend(a.look_at_map(step * 5 * ms, &mut cached, &mut |_| true));
    }
    let Some(Action::Exactly(first)) = brought.first() else { panic!("{brought:?}") };
    assert!(first.start < MIB && first.end - first.start >= MIB, "{brought:?}");
    let held = a.held_bytes();
    assert!(held > 0);
    // A read that is told of ends it; what it brought in stays on the account.
    read(&mut a, 1, 0..4 * KIB, 5 * ms, 100 * ms);
    assert_eq!((a.look_at_map_ns(), a.held_bytes()), (Some(105 * ms), held));
    assert_eq!(online(MIB).look_at_map_ns(), None, "a small file is not looked at");
    // With a plan it is known what comes.
    let mut planned =
        advisor(Entry { will_need: vec![Region::WHOLE], ..Entry::new("/f") }, 64 * MIB, Budget::default());
    planned.is_heard_of(0, None);
    assert_eq!(planned.look_at_map_ns(), None);
}

/// A page cache in parts of 256 KiB, and a program that reads the file in long calls, computes 10 ms after each, and does not go on
/// after `end`. What is not in memory comes part by part, 6 ms each; what is brought in passes at 200 MB/s after 5 ms. How long it
/// waited in all, and what was brought in.
fn long_reads(read_bytes: u64, end: u64) -> (u64, u64) {
    const PART: u64 = 256 * KIB;
    let ms = 1_000_000;
    let (mut a, mut there, mut line_ns, mut now_ns, mut brought) = (online(64 * MIB), vec![u64::MAX; 256], 0, 0, 0);
    a.is_heard_of(0, None);
    // What the manager does until then.
    let mut until = |a: &mut Advisor, there: &mut Vec<u64>, until_ns: u64| {
        while let Some(at_ns) = a.look_at_map_ns().filter(|at| *at <= until_ns) {
            let mut cached = |range: Range<u64>| {
                let part_of = |part: &u64| (part * PART).max(range.start)..((part + 1) * PART).min(range.end);
                let parts =
                    (range.start / PART..range.end.div_ceil(PART)).filter(|part| there[*part as usize] <= at_ns);
                Some(parts.map(|part| part_of(&part)).map(|r| r.end - r.start).sum())
            };
            for action in a.look_at_map(at_ns, &mut cached, &mut |_| true) {
                let Some(range) = action.asked() else { continue };
                brought += range.end - range.start;
                for part in range.start / PART..range.end.div_ceil(PART) {
                    // A part with a hole in it is the program's to read.
                    let is_whole = range.start <= part * PART && (part + 1) * PART <= range.end;
                    if is_whole && there[part as usize] == u64::MAX {
                        line_ns = line_ns.max(at_ns + 5 * ms) + PART * 5;
                        there[part as usize] = line_ns;
                    }
                }
                a.hinted(range.clone(), 0, true, at_ns + 5 * ms);
            }
        }
    };
    let mut waited_ns = 0;
    for start in (0..end).step_by(read_bytes as usize) {
        let (began_ns, read_end) = (now_ns, (start + read_bytes).min(end));
        for part in start / PART..read_end.div_ceil(PART) {
            let ready_ns = match there[part as usize] {
                u64::MAX => now_ns + 6 * ms,
                at => at,
            };
            until(&mut a, &mut there, ready_ns.max(now_ns));
            there[part as usize] = there[part as usize].min(ready_ns);
            waited_ns += ready_ns.saturating_sub(now_ns);
            now_ns = now_ns.max(ready_ns) + PART / 8;
        }
        read(&mut a, 1, start..read_end, now_ns - began_ns, now_ns);
        now_ns += 10 * ms;
        until(&mut a, &mut there, now_ns);
    }
    (waited_ns, brought)
}

/// As `sort` reads: as much as half a second is waited for by such a program, of which the line needs a fifth.
#[test]
fn long_reads_one_after_the_other_are_brought_in_as_one() {
    let alone_ns = 24 * 4 * 6_000_000;
    let (waited_ns, brought) = long_reads(6 * MIB, 24 * MIB);
    assert!(waited_ns * 3 < alone_ns, "{waited_ns} of {alone_ns}");
    // It may stop at any time: there is not much that nobody reads.
    assert!(brought <= (24 + 2 * 12) * MIB, "{brought}");
    let (_, brought) = long_reads(6 * MIB, 6 * MIB);
    assert!(brought <= 18 * MIB, "{brought}");
}

/// A file whose kind is read like this in files of 10 MiB and 70 MiB.
fn of_a_kind(size: u64, reads: impl Fn(u64) -> Vec<Range<u64>>) -> Advisor {
    use impresario_foresight::{Sample, Shape};
    let sample = |size: u64| Sample::of(size, reads(size)).unwrap();
    let learnt = Some(Arc::new(Shape::learn(&[&sample(10 * MIB), &sample(70 * MIB)])));
    let entry = Entry { online: true, ..Entry::new("/f.parquet") };
    let monitored = Arc::new(Monitored { key: "*".into(), regions: RegionMap::of(&entry), entry, learnt });
    let stand_down = StandDown { trial: false, ..StandDown::default() };
    Advisor::new(monitored, size, &Budget::default(), stand_down, &DeviceCost::default())
}

/// On a device that serves one request after the other, hints by a kind may cost more than they save. They end, and the pattern that
/// the program goes over to is followed: it is not judged by reads that waited for others.
#[test]
fn hints_that_gave_way_are_not_held_against_those_that_follow() {
    // In an order that shows no pattern.
    let piece = |i: u64| u64::from((i as u8).reverse_bits() >> 2) * 150 * KIB;
    let pieces = || (0..64).map(|i| piece(i)..piece(i) + 50 * KIB).collect::<Vec<_>>();
    let mut a = of_a_kind(64 * MIB, |_| pieces());
    let (ms, mut now_ns) = (1_000_000, 0);
    // What reads take by themselves.
    for i in 0..8 {
        now_ns += 5 * ms;
        read(&mut a, 1, (50 - i * i / 2) * MIB..(50 - i * i / 2) * MIB + 50 * KIB, ms, now_ns);
    }
    a.opened(2, now_ns, &mut |_| true);
    let mut late = 0;
    for bytes in pieces() {
        now_ns += 5 * ms;
        read(&mut a, 2, bytes, ms + ms * 28 / 100, now_ns);
        late += 1;
        if !a.learnt.as_ref().unwrap().is_followed() {
            break;
        }
    }
    assert!((24..64).contains(&late), "{late} reads were hit and slow");
    let (mut asked, mut brought) = (0, Vec::new());
    for i in 0..200 {
        now_ns += 5 * ms;
        let bytes = 11 * MIB + i * 150 * KIB..11 * MIB + i * 150 * KIB + 50 * KIB;
        let is_there = brought.iter().any(|r: &Range<u64>| r.start <= bytes.start && bytes.end <= r.end);
        let actions = read(&mut a, 2, bytes, if is_there { 20_000 } else { ms }, now_ns);
        asked += prefetched(&actions);
        brought.extend(actions.iter().filter_map(Action::asked).cloned());
    }
    assert_eq!((a.stood_down(), a.why_down()), (0, None), "after {late} late reads");
    assert!(asked > 180 * 50 * KIB, "{asked}");
}

#[test]
fn what_a_kind_costs_is_not_charged_to_the_index() {
    let mut a = of_a_kind(64 * MIB, |_| vec![4 * MIB..8 * MIB, 0..4 * MIB]);
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.parquet")));
    let (ms, mut now_ns) = (1_000_000, 0);
    for i in 0..8 {
        now_ns += 5 * ms;
        read(&mut a, 1, (50 - i * i / 2) * MIB..(50 - i * i / 2) * MIB + 50 * KIB, ms, now_ns);
    }
    assert!(a.take_index_wish().is_some());
    let extents = (0..16).map(|i| (16 + i * 2) * MIB..(17 + i * 2) * MIB).collect();
    a.index_is_known(index(Tracks::new([extents], 64 * MIB), 64 * MIB), 0);
    let mut late = 0;
    while a.learnt.as_ref().unwrap().is_followed() {
        now_ns += 5 * ms;
        read(&mut a, 1, late * 100 * KIB..(late + 1) * 100 * KIB, 3 * ms, now_ns);
        late += 1;
        assert!(late < 40, "it cost more than it saved");
    }
    assert!(a.goes_by_index());
    // And it is granted what it asks for, though the kind was late.
    let mut asked = 0;
    for i in 0..8 {
        now_ns += 5 * ms;
        asked += prefetched(&read(&mut a, 1, (16 + i * 2) * MIB..(17 + i * 2) * MIB, 20_000, now_ns));
    }
    assert!(asked >= 7 * MIB, "{asked}");
}

fn index(tracks: Tracks, size_bytes: u64) -> Index {
    Index { format: "Parquet", tracks, size_bytes, is_partial: false, spent: Spent::default() }
}

#[test]
fn what_is_granted_is_asked_for_where_kind_and_index_both_know_the_file() {
    let mut a = of_a_kind(64 * MIB, |size| vec![size / 2..size, 0..size / 2]);
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.parquet")));
    // Not straight on, and where the kind knows nothing: the index is wanted.
    read(&mut a, 1, 60 * MIB..60 * MIB + 10, 0, 0);
    assert!(a.take_index_wish().is_some());
    let extents = (0..16).map(|i| i * 2 * MIB..i * 2 * MIB + MIB).collect();
    a.index_is_known(index(Tracks::new([extents], 64 * MIB), 64 * MIB), 0);
    let (mut granted, mut asked) = (0, 0);
    for i in 0..4 {
        let bytes = i * 2 * MIB..i * 2 * MIB + MIB;
        let read = Read { bytes, duration_ns: 0, now_ns: 1 + i };
        let mut may = |bytes: u64| {
            granted += bytes;
            true
        };
        asked += prefetched(&a.read(Reader { program: 1, thread: 1 }, &read, &mut may));
    }
    assert!(granted > 0 && asked == granted, "{granted} {asked}");
}

/// On a device that serves one request after the other the index itself delays the program, and so do hints that were given before it
/// was known. That is spent: the index is followed.
#[test]
fn what_an_index_has_cost_before_its_first_hint_is_not_held_against_it() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    let (ms, mut now_ns) = (1_000_000, 0);
    let chunk = |i: u64| (1 + i) * MIB..(1 + i) * MIB + 64 * KIB;
    let mut asked = |a: &mut Advisor, bytes: Range<u64>, took_ms: u64| {
        now_ns += took_ms * ms;
        let read = Read { bytes, duration_ns: took_ms * ms, now_ns };
        a.read(Reader { program: 1, thread: 1 }, &read, &mut |_| true)
    };
    // A pattern is followed meanwhile, and what it asks for stays under way.
    (0..8).for_each(|i| _ = asked(&mut a, chunk(4 * i), 7));
    assert!(a.take_index_wish().is_some());
    let extents = (0..60).map(chunk).collect();
    a.index_is_known(index(Tracks::new([extents], 64 * MIB), 64 * MIB), 0);
    asked(&mut a, chunk(57), 31);
    assert!(a.goes_by_index(), "that read was delayed before there was any hint by the index");
    // Delays by its own hints count.
    let mut is_late = |a: &mut Advisor| {
        (0..40).any(|i| {
            asked(a, chunk(i), 31);
            !a.goes_by_index()
        })
    };
    assert!(is_late(&mut a));
}

/// A table of chunks, and between them looks at the index itself, which is in memory since it was read: the next ones are not foretold.
#[test]
fn looks_at_the_index_between_chunks_are_no_pattern() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    let chunk = |i: u64| (1 + i) * MIB..(1 + i) * MIB + 64 * KIB;
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    assert!(a.take_index_wish().is_some());
    a.index_is_known(index(Tracks::new([(0..60).map(chunk).collect()], 64 * MIB), 64 * MIB), 0);
    let mut asked = Vec::new();
    for i in 0..40 {
        let took_ns = if asked.iter().any(|r: &Range<u64>| r.contains(&chunk(i).start)) { 20_000 } else { 7_000_000 };
        let node = chunk(i).start + 512 * KIB..chunk(i).start + 516 * KIB;
        for (bytes, took_ns) in [(chunk(i), took_ns), (node, 10_000)] {
            let actions = read(&mut a, 1, bytes, took_ns, (i + 1) * 10_000_000);
            asked.extend(actions.iter().filter_map(Action::asked).cloned());
        }
    }
    assert!(a.goes_by_index() && asked.len() > 30, "{asked:?}");
    let beside = asked.iter().find(|r| !(0..60).any(|i| r.start < chunk(i).end && chunk(i).start < r.end));
    assert_eq!(beside, None);
}

/// Reads in no order while an index is on its way: it may tell the order of those that follow.
#[test]
fn a_file_is_not_brought_in_while_its_index_is_on_its_way() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    let (mut now_ns, mut i) = (0, 0u64);
    let mut tries = |a: &mut Advisor| {
        (0..40).any(|_| {
            (now_ns, i) = (now_ns + 5_000_000, i + 1);
            let at = i * i * 7_919 * KIB % (63 * MIB);
            let actions = read(a, 1, at..at + 4 * KIB, 5_000_000, now_ns);
            actions.iter().any(|action| matches!(action, Action::Try(_)))
        })
    };
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    assert!(a.take_index_wish().is_some());
    assert!(!tries(&mut a));
    a.has_no_index(200_000_000);
    let at = 63 * MIB + 4 * KIB;
    let actions = read(&mut a, 1, at..at + 4 * KIB, 5_000_000, 210_000_000);
    assert!(
        actions.iter().any(|action| matches!(action, Action::Try(_))),
        "what was waited until then counts: {actions:?}"
    );
}

/// The same where what is read is seen in the page cache: of a long read, or one that is not told of.
#[test]
fn a_map_is_not_brought_in_while_an_index_is_on_its_way() {
    let ms = 1_000_000;
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    let mut there = std::collections::BTreeSet::new();
    let mut tries = |a: &mut Advisor, steps: Range<u64>| {
        let seen = |step: u64| {
            let mut cached = |range: Range<u64>| {
                let held = there.range(range.start / (128 * KIB)..range.end.div_ceil(128 * KIB)).count() as u64;
                Some(held * 128 * KIB)
            };
            let actions = a.look_at_map(step * 10 * ms, &mut cached, &mut |_| true);
            there.insert(step * 197 % 512);
            actions.iter().any(|action| matches!(action, Action::Try(_)))
        };
        steps.map(seen).filter(|tries| *tries).count()
    };
    // It is quiet, and looked at for the first time. Then the index is asked for.
    assert_eq!(tries(&mut a, 1..3), 0);
    assert!(a.take_index_wish().is_some());
    assert_eq!(tries(&mut a, 3..60), 0, "it is awaited");
    a.has_no_index(600 * ms);
    assert!(tries(&mut a, 60..70) > 0, "what was waited until then counts");
}

/// Reads beside those of the index take longer by them.
#[test]
fn an_index_on_its_way_makes_no_reads_look_slow() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    assert!(a.take_index_wish().is_some());
    read(&mut a, 1, 9 * MIB..9 * MIB + 4 * KIB, 50_000_000, 60_000_000);
    assert_eq!(a.unaided.usual_ns(4 * KIB), None, "behind the index");
    a.has_no_index(70_000_000);
    read(&mut a, 1, 19 * MIB..19 * MIB + 4 * KIB, 5_000_000, 80_000_000);
    assert_eq!(a.unaided.usual_ns(4 * KIB), Some(5_000_000));
}

/// Of what was left out the rest of the index is asked, once, and then it tells of all.
#[test]
fn the_rest_of_an_index_is_asked_for_when_it_is_needed() {
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    let wish = |a: &mut Advisor| a.take_index_wish().map(|(formats, place)| (formats.len(), place));
    // It looks at the index itself first.
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    assert_eq!(wish(&mut a), Some((1, Some(MIB))));
    a.index_is_known(Index { is_partial: true, ..index(Tracks::new([], 64 * MIB), 64 * MIB) }, 0);
    assert!(!a.goes_by_index());
    read(&mut a, 1, 2 * MIB..2 * MIB + 10, 0, 0);
    assert_eq!(wish(&mut a), Some((1, Some(2 * MIB))));
    let near = || (0..16).map(|i| (2 + i) * MIB..(3 + i) * MIB).collect::<Vec<_>>();
    let far = || (0..16).map(|i| (32 + i) * MIB..(33 + i) * MIB).collect::<Vec<_>>();
    a.index_is_known(Index { is_partial: true, ..index(Tracks::new([near()], 64 * MIB), 64 * MIB) }, 0);
    read(&mut a, 1, 4 * MIB..5 * MIB, 0, 1);
    assert!(a.take_index_wish().is_none(), "that is known");
    read(&mut a, 1, 40 * MIB..41 * MIB, 0, 2);
    assert_eq!(wish(&mut a), Some((1, None)));
    read(&mut a, 1, 60 * MIB..61 * MIB, 0, 3);
    assert!(a.take_index_wish().is_none(), "it is on its way");
    a.index_is_known(index(Tracks::new([near(), far()], 64 * MIB), 64 * MIB), 0);
    assert_eq!(a.index_extents(), 32);
    read(&mut a, 1, 60 * MIB..61 * MIB, 0, 4);
    assert!(a.take_index_wish().is_none(), "there is no more");
    // One that could not be read is not waited for.
    let mut a = advisor(Entry { online: true, ..Entry::new("/f.h5") }, 64 * MIB, Budget::default());
    a.may_be(crate::formats::by_name(std::path::Path::new("/f.h5")));
    read(&mut a, 1, MIB..MIB + 10, 0, 0);
    assert!(a.take_index_wish().is_some());
    a.has_no_index(0);
    a.index_is_known(index(Tracks::new([near()], 64 * MIB), 64 * MIB), 0);
    assert_eq!(a.index_extents(), 0);
}

#[test]
fn an_index_is_believed_only_of_the_file_that_it_was_asked_of() {
    let path = std::path::Path::new("/f.parquet");
    let tracks = || Tracks::new([vec![0..10, 20..30]], 4 * MIB);
    let wanted = || {
        let mut a = advisor(Entry { online: true, ..Entry::new("/f.parquet") }, 4 * MIB, Budget::default());
        a.index_is_known(index(tracks(), 4 * MIB), 0);
        assert_eq!(a.index_format(), None, "not asked for");
        a.may_be(crate::formats::by_name(path));
        read(&mut a, 1, 2 * MIB..2 * MIB + 10, 0, 0);
        assert!(a.take_index_wish().is_some());
        a
    };
    let mut a = wanted();
    a.index_is_known(index(tracks(), 3 * MIB), 0);
    assert!(a.index_format().is_none() && !a.goes_by_index(), "of another length, and not waited for");
    let mut a = wanted();
    a.set_size(5 * MIB);
    a.set_size(4 * MIB);
    a.index_is_known(index(tracks(), 4 * MIB), 0);
    assert_eq!(a.index_format(), None, "changed meanwhile");
    let mut a = wanted();
    a.index_is_known(index(tracks(), 4 * MIB), 0);
    assert_eq!((a.index_format(), a.index_extents()), (Some("Parquet"), 2));
}
