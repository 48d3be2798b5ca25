//! The demonstration's cases in virtual time: each policy against arrival order and the elevator.
//!
//! `cargo run --release -p impresario-sim --example goals [seeds]`

use impresario_device::{DeviceParams, Order};
use impresario_layout::Layout;
use impresario_sched::{Nanos, Op, PolicySpec};
use impresario_sim::{Application, IoNodes, Outcome, Pattern, Scenario, run};

fn scenario(pattern: Pattern, op: Op, wire: u64, seed: u64) -> Scenario {
    let request_bytes = if pattern == Pattern::Strided { 16 << 10 } else { 256 << 10 };
    let bytes_per_process = std::env::var("KIB_PER_PROCESS").ok().and_then(|v| v.parse::<u64>().ok());
    let requests = match (bytes_per_process, pattern) {
        (Some(kib), _) => (kib << 10) / request_bytes,
        (None, Pattern::Strided) => 64,
        (None, _) => 8,
    };
    let application = Application { processes: 8, pattern, op, request_bytes, requests, start: Nanos::ZERO };
    Scenario {
        applications: vec![application; 4],
        layout: Layout::over_all(4).expect("four servers"),
        data_policy: PolicySpec::named("none"),
        data_in_flight: 1,
        device: DeviceParams::default(),
        io_nodes: None,
        wire_max_bytes: wire,
        latency: Nanos::from_micros(50),
        jitter: micros("JITTER_US", 100),
        message_jitter: micros("MESSAGE_JITTER_US", 200),
        seed,
    }
}

fn micros(variable: &str, default: u64) -> Nanos {
    Nanos::from_micros(std::env::var(variable).ok().and_then(|v| v.parse().ok()).unwrap_or(default))
}

fn mean(seeds: u64, make: impl Fn(u64) -> Scenario) -> (f64, Outcome) {
    let outcomes: Vec<Outcome> = (0..seeds).map(|seed| run(&make(seed)).expect("known policies")).collect();
    let makespan = outcomes.iter().map(|o| o.makespan.as_secs_f64()).sum::<f64>() / seeds as f64;
    (makespan, outcomes[0].clone())
}

/// What the disks did.
fn disks(o: &Outcome) -> String {
    format!("busy {:.0} %, {} accesses of {}", o.busy * 100.0, o.accesses, o.mean_access)
}

fn main() {
    let seeds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(5);
    let p = PolicySpec::named;
    let extra = std::env::var("MLF").unwrap_or_default();
    let mut mlf = p("mlf");
    for kv in extra.split_whitespace() {
        if let Some((k, v)) = kv.split_once('=') {
            mlf = mlf.with(k, v);
        }
    }
    for io in [0u16, 2] {
        for wire in [u64::MAX, 8 << 10] {
            let mut gains = vec![(0.0, 0.0); 3];
            println!("\nI/O nodes {io}, wire {}", if wire == u64::MAX { "as is" } else { "8 KiB" });
            for pattern in [Pattern::Strided, Pattern::Contiguous] {
                for op in [Op::Write, Op::Read] {
                    let with = |policy: &PolicySpec, order: Order| {
                        mean(seeds, |seed| {
                            let mut s = scenario(pattern, op, wire, seed);
                            s.data_policy = policy.clone();
                            s.device.order = order;
                            if io > 0 {
                                s.io_nodes = Some(IoNodes {
                                    count: io,
                                    policy: p("fifo"),
                                    in_flight: 16,
                                    merge_requests: 16,
                                    dispatch_requests: 256,
                                    split: false,
                                    block_placement: false,
                                });
                            }
                            s
                        })
                    };
                    let (base, out) = with(&p("none"), Order::Arrival);
                    let (elevator, of_elevator) = with(&p("none"), Order::Elevator);
                    print!(
                        "{pattern:?} {op:?}: arrival {base:.2} s ({:.0} KiB), elevator {elevator:.2} s;",
                        out.mean_batch_bytes / 1024.0
                    );
                    let mut last = None;
                    for (i, spec) in [p("fifo").with("merge", "on"), p("hbrr"), mlf.clone()].iter().enumerate() {
                        let (t, out) = with(spec, Order::Arrival);
                        let g = (1.0 - t / base, 1.0 - t / elevator);
                        gains[i].0 += g.0 / 4.0;
                        gains[i].1 += g.1 / 4.0;
                        print!(
                            "  {} {t:.2} s ({:.0} KiB) {:+.0} % {:+.0} %",
                            spec.name,
                            out.mean_batch_bytes / 1024.0,
                            g.0 * 100.0,
                            g.1 * 100.0
                        );
                        last = Some(out);
                    }
                    println!();
                    println!("    elevator: {}", disks(&of_elevator));
                    last.iter().for_each(|of_mlf| println!("    mlf: {}", disks(of_mlf)));
                }
            }
            for (name, g) in ["control", "hbrr", "mlf"].iter().zip(gains) {
                println!(
                    "  {name}: mean gain over arrival {:+.1} %, over the elevator {:+.1} %",
                    g.0 * 100.0,
                    g.1 * 100.0
                );
            }
        }
    }
    println!("\ntwins on the I/O nodes, shared strided reads, servers in arrival order");
    for (apps, processes, size) in [(4, 8, 16 << 10), (4, 8, 32 << 10), (1, 64, 32 << 10), (1, 128, 32 << 10)] {
        for nodes in [2u16, 4] {
            for block in [false, true] {
                print!("{apps} × {processes} × {} KiB, {nodes} nodes, block placement {block}:", size >> 10);
                let twins = |us: u64| p("twins").with("window_us", us);
                let mut base = 0.0;
                for spec in [
                    p("fifo"),
                    p("hbrr"),
                    twins(1000),
                    twins(2000),
                    twins(4000),
                    twins(8000),
                    twins(16000),
                    twins(32000),
                    twins(64000),
                ] {
                    let (t, out) = mean(seeds, |seed| {
                        let mut s = scenario(Pattern::Strided, Op::Read, u64::MAX, seed);
                        s.applications.truncate(apps);
                        for a in &mut s.applications {
                            (a.processes, a.request_bytes, a.requests) = (processes, size, 64);
                        }
                        s.io_nodes = Some(IoNodes {
                            count: nodes,
                            policy: spec.clone(),
                            in_flight: 16,
                            merge_requests: 16,
                            dispatch_requests: std::env::var("DISPATCH")
                                .ok()
                                .and_then(|v| v.parse().ok())
                                .unwrap_or(256),
                            split: false,
                            block_placement: block,
                        });
                        s
                    });
                    if base == 0.0 {
                        base = t;
                    }
                    let w = spec.params.get("window_us").cloned().unwrap_or_default();
                    print!(
                        "  {}{w} {t:.2} ({:.0}K) {:+.0}%",
                        spec.name,
                        out.mean_batch_bytes / 1024.0,
                        (1.0 - t / base) * 100.0
                    );
                }
                println!();
            }
        }
    }
}
