//! The demonstration's cases in virtual time: each policy against arrival order and the elevator.
//!
//! `impresario-lab policies`

use std::collections::BTreeMap;
use std::process::ExitCode;

use impresario_device::{DeviceParams, Order};
use impresario_sched::PolicySpec;
use impresario_sim::model::{
    Application, Clients, Device, IoNodes, Network, Operation, Pattern, RankPlacement, Servers,
};
use impresario_sim::{Outcome, Scenario};

/// `wire`: the clients' largest request, bytes; 0: any.
fn scenario(args: &Args, pattern: Pattern, op: Operation, wire: u64, seed: u64) -> Scenario {
    let request_bytes = if pattern == Pattern::Strided { 16 << 10 } else { 256 << 10 };
    let requests = match (args.kib_per_process, pattern) {
        (Some(kib), _) => (kib << 10) / request_bytes,
        (None, Pattern::Strided) => 64,
        (None, _) => 8,
    };
    let jitter_us = args.jitter_us;
    Scenario {
        seed,
        network: Network { jitter_us: args.message_jitter_us, ..Network::default() },
        clients: Clients { request_bytes_max: wire, ..Clients::default() },
        servers: Servers { device: "disk".into(), cpu_us: 0.0, ..Servers::default() },
        application: vec![Application {
            copies: 4,
            processes: 8,
            pattern,
            op,
            request_bytes,
            requests,
            jitter_us,
            ..Application::default()
        }],
        ..with_disk(Order::Arrival)
    }
}

fn with_disk(order: Order) -> Scenario {
    let disk = Device::Disk(DeviceParams { order, ..DeviceParams::default() });
    Scenario { device: BTreeMap::from([("disk".into(), disk)]), ..Scenario::default() }
}

fn forwarding(count: u16, policy: PolicySpec) -> IoNodes {
    IoNodes { count, policy, cpu_us: 0.0, ..IoNodes::default() }
}

fn mean(seeds: u64, make: impl Fn(u64) -> Scenario) -> (f64, Outcome) {
    let outcomes: Vec<Outcome> =
        (0..seeds).map(|seed| impresario_sim::run(&make(seed)).expect("known policies")).collect();
    let makespan = outcomes.iter().map(|o| o.makespan_s).sum::<f64>() / seeds as f64;
    (makespan, outcomes[0].clone())
}

/// What the disks did.
fn disks(o: &Outcome) -> String {
    let l = &o.layers;
    format!("busy {:.0} %, {} accesses of {:.3} ms", l.device_busy * 100.0, l.device.requests, l.access_mean_ms)
}

/// Mean size of the servers' batches, KiB.
fn batch_kib(o: &Outcome) -> f64 {
    o.layers.batches.mean_bytes() / 1024.0
}

/// Measure in virtual time what mlf, hbrr and twins gain over arrival order and over the elevator
#[derive(clap::Args)]
pub struct Args {
    /// Seeds of each case
    #[arg(default_value_t = 5, value_name = "SEEDS", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The policy of the data servers that is compared, with parameters as in mlf+window_us=1000
    #[arg(long, default_value = "mlf", value_name = "POLICY")]
    policy: String,
    /// Volume of each process, KiB [default: 1024 strided, 2048 contiguous]
    #[arg(long, value_name = "KIB")]
    kib_per_process: Option<u64>,
    /// Jitter of each request's start, µs
    #[arg(long, default_value_t = 100.0, value_name = "MICROSECONDS")]
    jitter_us: f64,
    /// Jitter of each message, µs
    #[arg(long, default_value_t = 200.0, value_name = "MICROSECONDS")]
    message_jitter_us: f64,
    /// Requests that each I/O node dispatches at once, under twins
    #[arg(long, default_value_t = 256, value_name = "N")]
    dispatch: u32,
}

/// Prints a line for each case and the mean gains.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let seeds = args.seeds;
    let p = PolicySpec::named;
    let mlf = impresario_workload::system::policy(&args.policy).map_err(crate::usage)?;
    for io in [0u16, 2] {
        for wire in [0, 8 << 10] {
            let mut gains = vec![(0.0, 0.0); 3];
            println!("\nI/O nodes {io}, wire {}", if wire == 0 { "as is" } else { "8 KiB" });
            for pattern in [Pattern::Strided, Pattern::Contiguous] {
                for op in [Operation::Write, Operation::Read] {
                    let with = |policy: &PolicySpec, order: Order| {
                        mean(seeds, |seed| {
                            let mut s = scenario(args, pattern, op, wire, seed);
                            s.servers.policy = policy.clone();
                            s.device = with_disk(order).device;
                            s.clients.placement = RankPlacement::Cyclic;
                            if io > 0 {
                                s.io_nodes = Some(forwarding(io, p("fifo")));
                            }
                            s
                        })
                    };
                    let (base, out) = with(&p("none"), Order::Arrival);
                    let (elevator, of_elevator) = with(&p("none"), Order::Elevator);
                    print!(
                        "{pattern:?} {op:?}: arrival {base:.2} s ({:.0} KiB), elevator {elevator:.2} s;",
                        batch_kib(&out)
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
                            batch_kib(&out),
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
                        let mut s = scenario(args, Pattern::Strided, Operation::Read, 0, seed);
                        let a = &mut s.application[0];
                        (a.copies, a.processes, a.request_bytes, a.requests) = (apps, processes, size, 64);
                        s.io_nodes =
                            Some(IoNodes { dispatch_requests: args.dispatch, ..forwarding(nodes, spec.clone()) });
                        s.clients.placement = if block { RankPlacement::Block } else { RankPlacement::Cyclic };
                        s
                    });
                    if base == 0.0 {
                        base = t;
                    }
                    let w = spec.params.get("window_us").cloned().unwrap_or_default();
                    print!("  {}{w} {t:.2} ({:.0}K) {:+.0}%", spec.name, batch_kib(&out), (1.0 - t / base) * 100.0);
                }
                println!();
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
