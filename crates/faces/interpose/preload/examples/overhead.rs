//! What the library costs a warm 4 KiB pread: without it, with it and no manager, with it on a file that is not
//! monitored, and on one that is. The four are run in turn, many times; printed are medians, and the median of the paired
//! differences to the bare run with its quartiles.
//!
//! `cargo run --release -p impresario-preload --example overhead [PAIRS]`

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use impresario_ring::message::Mode;
use support::{Manager, preloaded, run};

const ROUNDS: &str = "100";
/// Fewer than the ring has places, so that accesses are stored and not dropped (where the manager gets its share of a core).
const READS: &str = "2000";

fn main() {
    let pairs: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(15).max(3);
    let dir = tempfile::tempdir().expect("no temporary folder");
    let program = dir.path().join("pread");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/pread.c");
    let made = run(Command::new("cc").args(["-O2", "-Wall", "-o"]).arg(&program).arg(&source).arg("-ldl"));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (inside, outside) = (dir.path().join("tree"), dir.path().join("outside"));
    std::fs::create_dir(&inside).expect("no folder");
    let inside = inside.join("data");
    for file in [&inside, &outside] {
        std::fs::write(file, vec![1u8; 32 << 20]).expect("no room for the data");
    }
    let manager = Manager::start(&dir.path().join("socket"), inside.parent().unwrap_or(dir.path()), Mode::Advise);
    let time = |mut command: Command, file: &Path| -> f64 {
        let output = run(command.arg(file).args([ROUNDS, READS]));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.trim().parse().unwrap_or_else(|_| panic!("{command:?}: {} {text}", output.status))
    };
    let with = |file: &Path| {
        let mut command = preloaded(&program, &manager.socket);
        command.env("EXPECT_MANAGER", "1");
        time(command, file)
    };
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..pairs {
        times[0].push(time(Command::new(&program), &outside));
        times[1].push(time(preloaded(&program, Path::new("/nowhere/socket")), &outside));
        times[2].push(with(&outside));
        times[3].push(with(&inside));
    }
    let names = ["bare", "library, no manager", "library, not monitored", "library, monitored"];
    for (name, list) in names.iter().zip(&times) {
        let added: Vec<f64> = list.iter().zip(&times[0]).map(|(a, b)| a - b).collect();
        let (low, middle, high) = (part(&added, 0.25), part(&added, 0.5), part(&added, 0.75));
        println!("{name:24} {:7.1} ns   added {middle:6.1} ns (quartiles {low:.1} to {high:.1})", part(list, 0.5));
    }
    let (dropped, told) = manager.finish_lossy();
    let seen: usize = told.iter().map(|t| t.accesses.len()).sum();
    println!("{seen} accesses told, {dropped} dropped because the ring was full");
}

fn part(list: &[f64], at: f64) -> f64 {
    let mut sorted = list.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * at).round() as usize]
}
