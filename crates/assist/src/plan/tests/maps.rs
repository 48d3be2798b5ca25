//! Programs that map their file and touch it in no order: nothing is told of what they touch.

use super::super::replay::maps::replay_mapped;
use super::*;

/// So many touches of 4 KiB anywhere in a file, with so many µs of computing between.
fn touches(n: u64, size: u64, us: u64) -> Vec<Step> {
    let mut random = Random::new(n);
    (0..n).map(|_| (1, 0, random.below(size - 4 * KIB), 4 * KIB, us)).collect()
}

fn programs() -> Vec<(&'static str, u64, Vec<Step>)> {
    // Each time the same few places after the first ones.
    let hot = |n: u64| {
        let places = touches(12, 47 * MIB, 20);
        (0..n as usize).map(|i| places[if i < 12 { i } else { i % 4 }]).collect()
    };
    vec![
        ("600 touches of 47 MiB", 47 * MIB, touches(600, 47 * MIB, 10)),
        ("12 touches of 47 MiB", 47 * MIB, touches(12, 47 * MIB, 10)),
        ("60 touches of 47 MiB", 47 * MIB, touches(60, 47 * MIB, 10)),
        ("150 touches of 47 MiB, computing", 47 * MIB, touches(150, 47 * MIB, 3000)),
        ("4000 touches of 47 MiB", 47 * MIB, touches(4000, 47 * MIB, 10)),
        ("500 touches of 1 GiB", 1 << 30, touches(500, 1 << 30, 10)),
        ("60 touches of 8 MiB", 8 * MIB, touches(60, 8 * MIB, 10)),
        ("12 places of 47 MiB, then 4 of them again and again", 47 * MIB, hot(10_000)),
    ]
}

struct Result {
    row: String,
    without: Outcome,
    with: Outcome,
}

fn replayed((name, size, steps): &(&'static str, u64, Vec<Step>), device: &Device) -> Result {
    let entry = Entry { online: true, ..Entry::new("/data/f0") };
    let entries: Entries = [(0, Hinted { entry: &entry, index: None, learnt: None })].into_iter().collect();
    let run = run_of(&record(&[*size], steps, device), device, |_| true, usize::MAX);
    let without = replay_mapped(&run, device, 2 << 30, &Entries::default());
    let with = replay_mapped(&run, device, 2 << 30, &entries);
    let ms = [without, with].map(|outcome| outcome.run_ns / 1_000_000);
    let mib = [without, with].map(|outcome| outcome.device_bytes >> 20);
    let row = format!("{name}, on {}: {} → {} ms, {} → {} MiB", device.source, ms[0], ms[1], mib[0], mib[1]);
    println!("{row}");
    Result { row, without, with }
}

/// Where requests are late and served side by side, the file comes in as touches of what is there save time.
#[test]
fn a_map_touched_in_no_order_gains_on_a_distant_device() {
    for (device, most_percent) in [(&devices()[5], [20, 20]), (&other_devices()[3], [60, 60])] {
        for (program, most_percent) in [0, 4].into_iter().zip(most_percent) {
            let Result { row, without, with } = replayed(&programs()[program], device);
            assert!(with.run_ns <= without.run_ns / 100 * most_percent, "{row}");
        }
    }
}

#[test]
fn a_map_costs_next_to_nothing_on_any_device() {
    let mut bad = Vec::new();
    for device in devices().iter().chain(&other_devices()) {
        for program in &programs() {
            let Result { row, without, with } = replayed(program, device);
            if with.run_ns > without.run_ns + without.run_ns / 100 + 20_000_000 {
                bad.push(row);
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// Where the program touches what is in memory already again and again, or stops, nothing is saved, and the file is not read.
#[test]
fn a_map_touched_a_few_times_is_not_read_whole() {
    for device in devices().iter().chain(&other_devices()) {
        for program in [1, 7] {
            let Result { row, without, with } = replayed(&programs()[program], device);
            assert!(with.device_bytes <= without.device_bytes + 6 * MIB, "{row}");
        }
    }
}
