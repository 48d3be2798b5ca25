//! What the core costs per request (push + next + completion) and per queued request in memory, for every policy.
//!
//! `cargo run --release -p impresario-sched --example core_cost [POLICY[,key=value…]…]`
//!
//! Each figure is the best of three runs, and the worse of reads and writes. Growth is the ratio of the last column to the
//! first of its group. The targets (issue: scheduling library): at least 2 million requests a second for
//! policies in order of arrival and 1 million for the others with 10,000 queued; growth at most 2; 160 bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use impresario_sched::policy::POLICIES;
use impresario_sched::*;

struct Counting;
static HEAP: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system's allocator unchanged; only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Policies in order of arrival: 500 ns a request, the others 1000.
const FIFO_LIKE: &[&str] = &["none", "fifo", "to"];
const ROUNDS: u64 = 200_000;
const RUNS: usize = 3;

/// All policies as they are by default, and some with options that change the work.
fn all() -> Vec<PolicySpec> {
    let twins = || PolicySpec::named("twins").with("window_us", 10);
    let mut specs: Vec<PolicySpec> =
        POLICIES.iter().filter(|p| p.name != "twins").map(|p| PolicySpec::named(p.name)).collect();
    specs.push(PolicySpec::named("fifo").with("merge", "on"));
    specs.push(twins());
    specs.push(twins().with("order_within", "offset").with("merge", "on").with("work_conserving", "on"));
    specs
}

/// `name,key=value,key=value`
fn parse(text: &str) -> PolicySpec {
    let mut words = text.split(',');
    let spec = PolicySpec::named(words.next().unwrap_or_default());
    words.filter_map(|w| w.split_once('=')).fold(spec, |spec, (key, value)| spec.with(key, value))
}

fn main() {
    let named: Vec<PolicySpec> = std::env::args().skip(1).map(|a| parse(&a)).collect();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load before: {}", load.trim());
    println!(
        "{:34} {:^29}   {:^29}   {:^13}",
        "", "ns/request by queued, 64 files", "by files, 10k queued", "bytes/queued"
    );
    println!(
        "{:34} {:>6} {:>6} {:>6} {:>8}   {:>6} {:>6} {:>6} {:>8}   {:>6} {:>6}",
        "policy", "1k", "10k", "100k", "growth", "10", "1k", "10k", "growth", "64 f.", "10k f."
    );
    for spec in if named.is_empty() { all() } else { named } {
        let lanes = if spec.name == "twins" { 4 } else { 1 };
        let cost = |queued, files| measure(&spec, lanes, queued, files);
        let queued = [cost(1_000, 64), cost(10_000, 64), cost(100_000, 64)];
        let files = [cost(10_000, 10), cost(10_000, 1_000), cost(10_000, 10_000)];
        let growth = |c: &[(f64, f64); 3]| c[2].0 / c[0].0;
        let most = if FIFO_LIKE.contains(&spec.name.as_str()) { 500.0 } else { 1000.0 };
        let missed = [
            (queued[1].0 > most).then(|| format!("over {most:.0} ns")),
            (growth(&queued) > 2.0).then(|| "grows with the queue".into()),
            (growth(&files) > 2.0).then(|| "grows with the files".into()),
            (queued[1].1 > 160.0).then(|| "over 160 bytes".into()),
        ];
        let missed: Vec<String> = missed.into_iter().flatten().collect();
        let [a, b, c] = queued;
        let [d, e, f] = files;
        println!(
            "{:34} {:6.0} {:6.0} {:6.0} {:7.2}×   {:6.0} {:6.0} {:6.0} {:7.2}×   {:6.0} {:6.0}  {}",
            spec.to_string(),
            a.0,
            b.0,
            c.0,
            growth(&queued),
            d.0,
            e.0,
            f.0,
            growth(&files),
            b.1,
            f.1,
            if missed.is_empty() { "holds".into() } else { missed.join(", ") },
        );
    }
}

fn request(i: u64, files: u64, lanes: u16, op: Op) -> Request {
    // Blocks of 4 KiB in a scattered order, a hole after each second one.
    let block = (i / files).wrapping_mul(0x9e37_79b1) & 0xf_ffff;
    let offset = block * 4096 + block / 2 * 4096;
    let file = FileId((i % files) as u32);
    let lane = LaneId((i % u64::from(lanes)) as u16);
    Request {
        arrival: Nanos(i),
        client: ClientId((i % 64) as u32),
        conn: ConnId((i % 64) as u32),
        job: JobId((i % 16) as u32),
        user: UserId((i % 4) as u32),
        ..Request::new(op, Extent { file, lane, file_offset: offset, lane_offset: offset, len: 4096 })
    }
}

/// (nanoseconds per request, bytes per queued request)
fn measure(spec: &PolicySpec, lanes: u16, queued: u32, files: u64) -> (f64, f64) {
    let (mut ns, mut bytes) = (0f64, 0f64);
    for op in [Op::Read, Op::Write] {
        let runs: Vec<(f64, f64)> = (0..RUNS).map(|_| run(spec, lanes, queued, files, op)).collect();
        ns = ns.max(runs.iter().map(|r| r.0).fold(f64::MAX, f64::min));
        bytes = bytes.max(runs[0].1);
    }
    (ns, bytes)
}

fn run(spec: &PolicySpec, lanes: u16, queued: u32, files: u64, op: Op) -> (f64, f64) {
    let before = HEAP.load(Ordering::Relaxed);
    let config = CoreConfig { lanes, ..CoreConfig::single_lane(queued + 64) };
    let mut core = match Core::new(config, spec) {
        Ok(core) => core,
        Err(error) => {
            eprintln!("core_cost: {error}");
            std::process::exit(2);
        }
    };
    let mut now = Nanos(0);
    for i in 0..u64::from(queued) {
        core.push(now, &request(i, files, lanes, op)).expect("room");
    }
    let bytes = (HEAP.load(Ordering::Relaxed) - before) as f64 / f64::from(queued);
    let (mut pushed, mut served) = (u64::from(queued), 0);
    let start = Instant::now();
    while served < ROUNDS {
        match core.next(now) {
            Next::Dispatch(batch) => {
                let whole = |p: &&Part| core.request(p.id).is_none_or(|r| p.from + p.len >= r.extent.len);
                let ended = batch.parts.iter().filter(whole).count() as u64;
                served += ended;
                core.event(now, Event::Completed(Completion::of(&batch, now, now)));
                for _ in 0..ended {
                    core.push(now, &request(pushed, files, lanes, op)).expect("room");
                    pushed += 1;
                }
            }
            Next::Wait { until: Nanos::MAX, reason } => {
                panic!("{spec} waits for an event that never comes: {reason:?}")
            }
            Next::Wait { until, .. } => now = until,
        }
        now += Nanos(100);
    }
    (start.elapsed().as_nanos() as f64 / served as f64, bytes)
}
