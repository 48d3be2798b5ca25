//! When hints are stopped, and when they come back.

use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

fn judge() -> Judge {
    Judge::new(StandDown::default(), false)
}

/// Reads with hints take `with`, reads without `without`; how many reads until it stood down, and why.
fn run(judge: &mut Judge, with: u64, without: u64, reads: u64) -> (u64, Option<Why>, u64) {
    let mut unadvised = 0;
    for n in 0..reads {
        let advised = judge.may_hint(n * MS) && n > 0;
        unadvised += u64::from(!advised);
        judge.read(advised, 4096, if advised { with } else { without }, n * MS);
        if let Some(why) = judge.why() {
            judge.may_hint(n * MS);
            return (n, Some(why), unadvised);
        }
    }
    (reads, None, unadvised)
}

#[test]
fn hints_that_help_go_on_and_probes_are_few() {
    let (reads, why, unadvised) = run(&mut judge(), MS / 10, 5 * MS, 20_000);
    assert_eq!((reads, why), (20_000, None));
    assert!((9..60).contains(&unadvised), "{unadvised}");
}

#[test]
fn hints_that_do_not_help_stop_soon() {
    let (reads, why, _) = run(&mut judge(), MS, MS, 20_000);
    assert_eq!(why, Some(Why::NoGain(0)));
    assert!(reads < 100, "{reads}");
    let (_, why, _) = run(&mut judge(), 3 * MS, MS, 20_000);
    assert_eq!(why, Some(Why::NoGain(-200)));
    assert_eq!(why.unwrap().to_string(), "reads took 200 % longer with hints");
}

#[test]
fn reads_as_fast_as_memory_are_not_probed() {
    let mut j = judge();
    for n in 0..10_000 {
        j.read(true, 250_000, 90_000, n * MS);
        assert!(j.may_hint(n * MS));
    }
}

#[test]
fn a_device_that_saved_up_for_a_burst_does_not_fool_it() {
    // Without hints 20 reads are fast after every pause, the others slow; with hints all are in between.
    let mut j = judge();
    let mut burst = 20;
    let mut unadvised = 0;
    for n in 0..2000 {
        let advised = j.may_hint(n * MS) && n > 0;
        let duration = match advised {
            true => 2 * MS,
            false if burst > 0 => MS / 4,
            false => 5 * MS,
        };
        burst = if advised { 20 } else { burst - i32::from(burst > 0) };
        unadvised += u32::from(!advised);
        j.read(advised, 250_000, duration, n * MS);
    }
    // A long probe of 32 sees 20 fast reads and 12 slow ones, 2.0 ms on average: a close call. It comes back.
    assert!(unadvised < 200, "{unadvised}");
    assert!(j.why().is_none());
}

#[test]
fn a_file_that_is_in_memory_at_its_beginning_only_comes_back() {
    let mut j = judge();
    j.hinted(16 << 20, 16 << 20, 0);
    for n in 0..100 {
        j.read(false, 250_000, 50_000, n * MS);
    }
    j.read(false, 250_000, 100 * MS, 100 * MS);
    (0..15).for_each(|_| j.read(false, 250_000, 50_000, 100 * MS));
    assert!(!j.may_hint(101 * MS), "fast reads need no hints, and one slow read is nothing");
    for n in 100..116 {
        j.read(false, 250_000, 5 * MS, n * MS);
    }
    assert!(j.may_hint(120 * MS));
}

#[test]
fn it_is_tried_again_each_time_later() {
    let mut j = judge();
    let mut now = 0;
    let mut waits = Vec::new();
    for _ in 0..9 {
        j.hinted(16 << 20, 16 << 20, now);
        assert_eq!(j.why(), Some(Why::InMemory(100)));
        let down = now;
        while !j.may_hint(now) {
            now += S;
        }
        waits.push((now - down) / S);
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 320, 600, 600]);
    assert_eq!(j.stood_down(), 9);
}

#[test]
fn waste_is_judged_over_a_stretch() {
    let mut j = judge();
    let mib = |wasted: u64, gone: u64| Tally { wasted_bytes: wasted << 20, gone_bytes: gone << 20, ..Tally::default() };
    j.tally(mib(20, 20), 0);
    assert_eq!(j.why(), None, "too little to judge");
    j.tally(mib(30, 40), 0);
    assert_eq!(j.why(), None, "75 % are allowed");
    j.tally(mib(69, 80), 0);
    assert_eq!(j.why(), Some(Why::Wasted(97)));
    j.may_hint(u64::MAX);
    j.start_over(mib(169, 180));
    j.tally(mib(189, 240), 0);
    assert_eq!(j.why(), None, "what was given up between is not judged");
}

#[test]
fn what_is_partly_in_memory_is_no_reason() {
    let mut j = judge();
    for _ in 0..100 {
        j.hinted(1 << 20, 900 << 10, 0);
    }
    assert_eq!(j.why(), None);
}

#[test]
fn switched_off_it_never_stops() {
    let mut j = Judge::new(StandDown { enabled: false, ..StandDown::default() }, false);
    j.hinted(1 << 40, 1 << 40, 0);
    j.tally(Tally { wasted_bytes: 1 << 40, gone_bytes: 1 << 40, ..Tally::default() }, 0);
    assert_eq!(run(&mut j, MS, MS, 5000), (5000, None, 1));
}

#[test]
fn reads_of_different_length_are_compared_by_byte() {
    let with = Sample { reads: 10, bytes: 10 << 20, ns: 10 * MS, ns_squared: 0.0 };
    let without = Sample { reads: 1000, bytes: 1000 << 10, ns: 100 * MS, ns_squared: 0.0 };
    assert_eq!(gain_percent(&with, &without), Some(100), "read by read it would be ten times as long");
    assert_eq!(gain_percent(&with, &Sample::default()), None);
}

#[test]
fn what_varies_much_is_not_judged_in_haste() {
    let sample = |durations: &[u64]| {
        let mut sample = Sample::default();
        durations.iter().for_each(|d| sample.add(1000, *d));
        sample
    };
    let even = sample(&[MS; 40]);
    let uneven = sample(&[MS / 10, 3 * MS].repeat(20));
    assert!(clearly_less(5, &even, &even));
    assert!(!clearly_less(5, &even, &sample(&[2 * MS; 40])));
    assert!(!clearly_less(5, &uneven, &uneven), "as good as equal, but who knows");
    assert!(clearly_less(5, &sample(&[9 * MS, 11 * MS].repeat(20)), &uneven));
}

#[test]
fn any_numbers_are_survived() {
    let mut j = judge();
    for i in 0..10_000u64 {
        j.read(i % 3 == 0, u64::MAX / (i + 1), u64::MAX >> (i % 60), i);
        j.hinted(u64::MAX, i, i);
        j.may_hint(u64::MAX);
    }
}

/// Brings in a mebibyte after another, nine tenths for nothing; reads take `with` or `without`. How many were brought
/// in, and why it stopped.
fn run_wasteful(judge: &mut Judge, with: u64, without: u64, reads: u64) -> (u64, Option<Why>) {
    let mut brought_in = 0;
    for n in 0..reads {
        let advised = judge.may_hint(n * MS);
        judge.read(advised, 4096, if advised { with } else { without }, n * MS);
        if advised {
            brought_in += 1 << 20;
            judge.tally(
                Tally { wasted_bytes: brought_in - brought_in / 10, gone_bytes: brought_in, ..Tally::default() },
                n * MS,
            );
        }
        if judge.why().is_some() {
            break;
        }
    }
    (brought_in >> 20, judge.why())
}

#[test]
fn waste_is_borne_where_reads_are_plainly_faster_and_only_there() {
    let (brought_in, why) = run_wasteful(&mut judge(), MS, 5 * MS, 4000);
    assert_eq!(why, None);
    assert!(brought_in > 3900, "probes are few: {brought_in}");
    let (brought_in, why) = run_wasteful(&mut judge(), 4 * MS, 5 * MS, 4000);
    assert_eq!(why, Some(Why::Wasted(90)), "a fifth faster is not worth ten times the bytes");
    assert!(brought_in <= 64, "{brought_in}");
}

#[test]
fn waste_ends_hints_where_durations_are_not_known() {
    let mut j = judge();
    j.tally(Tally { wasted_bytes: 40 << 20, gone_bytes: 40 << 20, ..Tally::default() }, 0);
    assert_eq!(j.why(), Some(Why::Wasted(100)));
}

/// While hints are withheld, what lies in blocks still held is a hit; of the rest, an index that stays in memory would
/// speak for the device.
#[test]
fn reads_that_were_in_memory_anyway_do_not_speak_for_the_device() {
    let mut j = judge();
    for n in 0..4000u64 {
        let advised = j.may_hint(n * MS);
        match n % 4 {
            3 => j.read(false, 4096, 5_000, n * MS),
            _ => j.read(advised, 65536, if advised { MS } else { 5 * MS }, n * MS),
        }
    }
    assert_eq!((j.why(), j.stood_down()), (None, 0), "{:?}", j.judged_gain_percent());
}
