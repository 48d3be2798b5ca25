//! Cost of the core per request (push + next + completion) and memory per queued request, per policy.
//!
//! `cargo run --release -p impresario-sched --example core_cost`

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

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

fn main() {
    println!("{:40} {:>8} {:>6} {:>9} {:>12}", "policy", "queued", "files", "ns/req", "bytes/queued");
    for (spec, lanes) in [
        (PolicySpec::named("none"), 1),
        (PolicySpec::named("fifo"), 1),
        (PolicySpec::named("fifo").with("merge", "on"), 1),
        (PolicySpec::named("hbrr"), 1),
        (PolicySpec::named("mlf"), 1),
        (PolicySpec::named("twins").with("window_us", 10), 4),
    ] {
        for op in [Op::Read, Op::Write] {
            for queued in [1_000u32, 10_000, 100_000] {
                let (ns, bytes) = measure(&spec, lanes, queued, 64, op);
                println!("{:40} {queued:8} {:6} {ns:9.0} {bytes:12.1}", format!("{spec} {op:?}"), 64);
            }
        }
    }
}

fn request(i: u64, files: u64, lanes: u16, op: Op) -> Request {
    // Blocks of 4 KiB in a scattered order, a hole after each second one.
    let block = (i / files).wrapping_mul(0x9e37_79b1) & 0xf_ffff;
    let offset = block * 4096 + block / 2 * 4096;
    let file = FileId((i % files) as u32);
    let lane = LaneId((i % u64::from(lanes)) as u16);
    let mut r = Request::new(op, Extent { file, lane, file_offset: offset, lane_offset: offset, len: 4096 });
    r.arrival = Nanos(i);
    r
}

fn measure(spec: &PolicySpec, lanes: u16, queued: u32, files: u64, op: Op) -> (f64, f64) {
    let before = HEAP.load(Ordering::Relaxed);
    let config = CoreConfig { lanes, lane_requests: 1, ..CoreConfig::single_lane(queued + 64) };
    let mut core = Core::new(config, spec).unwrap();
    let mut now = Nanos(0);
    for i in 0..u64::from(queued) {
        core.push(now, &request(i, files, lanes, op)).unwrap();
    }
    let bytes = (HEAP.load(Ordering::Relaxed) - before) as f64 / f64::from(queued);
    let rounds = 400_000u64;
    let (mut pushed, mut served) = (u64::from(queued), 0);
    let start = Instant::now();
    while served < rounds {
        match core.next(now) {
            Next::Dispatch(batch) => {
                served += batch.parts.len() as u64;
                let n = batch.parts.len();
                core.event(now, Event::Completed(Completion::of(&batch, now, now)));
                for _ in 0..n {
                    core.push(now, &request(pushed, files, lanes, op)).unwrap();
                    pushed += 1;
                }
            }
            Next::Wait { until, .. } => now = until,
        }
        now += Nanos(100);
    }
    (start.elapsed().as_nanos() as f64 / served as f64, bytes)
}
