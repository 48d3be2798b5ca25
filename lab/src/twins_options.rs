//! What the options of `twins` are worth in virtual time: makespan on the disk model, each against `fifo`.
//!
//! Two I/O nodes that split requests at server boundaries, four data servers whose disks serve in order of arrival, four
//! applications of eight processes. Further options are added to every variant of `twins`.

use std::process::ExitCode;

use anyhow::Result;
use impresario_sched::PolicySpec;
use impresario_sim::Scenario;
use impresario_sim::model::{Application, IoNodes, Network, Pattern, RankPlacement, Servers};

/// Variants by name: each line of options on top of the window.
const VARIANTS: &[(&str, &[(&str, &str)])] = &[
    ("paper", &[]),
    ("one in flight", &[("in_flight_per_server", "1")]),
    ("+ merge", &[("in_flight_per_server", "1"), ("merge", "on")]),
    ("+ offset order", ORDERED),
    ("+ others while idle", &[ORDERED[0], ORDERED[1], ORDERED[2], ("work_conserving", "idle")]),
    (
        "  + anticipation",
        &[ORDERED[0], ORDERED[1], ORDERED[2], ("work_conserving", "idle"), ("anticipation_us", "800")],
    ),
    ("+ others always", &[ORDERED[0], ORDERED[1], ORDERED[2], ("work_conserving", "on")]),
    ("  + anticipation", &[ORDERED[0], ORDERED[1], ORDERED[2], ("work_conserving", "on"), ("anticipation_us", "800")]),
];

const ORDERED: &[(&str, &str)] = &[("in_flight_per_server", "1"), ("merge", "on"), ("order_within", "offset")];

fn makespan(policy: &PolicySpec, case: (Pattern, u64, u64, bool), seeds: u64) -> Result<f64> {
    let (pattern, request_bytes, requests, block_placement) = case;
    let one = |seed| {
        let mut scenario = Scenario {
            seed,
            network: Network { jitter_us: 200.0, ..Network::default() },
            servers: Servers { cpu_us: 0.0, ..Servers::default() },
            io_nodes: Some(IoNodes {
                count: 2,
                policy: policy.clone(),
                split: true,
                cpu_us: 0.0,
                ..IoNodes::default()
            }),
            application: vec![Application {
                copies: 4,
                processes: 8,
                pattern,
                request_bytes,
                requests,
                ..Application::default()
            }],
            ..Scenario::default()
        };
        scenario.clients.placement = if block_placement { RankPlacement::Block } else { RankPlacement::Cyclic };
        Ok(impresario_sim::run(&scenario)?.makespan_s)
    };
    Ok((0..seeds).map(one).sum::<Result<f64>>()? / seeds as f64)
}

/// Measure in virtual time what each option of twins is worth over fifo
#[derive(clap::Args)]
pub struct Args {
    /// Seeds of each case
    #[arg(default_value_t = 4, value_name = "SEEDS", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Options of twins for every variant, as KEY=VALUE
    #[arg(value_name = "KEY=VALUE")]
    options: Vec<String>,
}

/// Prints a table for each access pattern and placement of ranks.
pub fn run(args: &Args) -> Result<ExitCode> {
    let seeds = args.seeds;
    let mut extra = Vec::new();
    for option in &args.options {
        extra.push(option.split_once('=').ok_or_else(|| crate::usage(format!("{option} is not KEY=VALUE")))?);
    }
    let with = |window_us: u64, options: &[(&str, &str)]| {
        let spec = PolicySpec::named("twins").with("window_us", window_us);
        let spec = options.iter().fold(spec, |spec, (key, value)| spec.with(key, value));
        extra.iter().fold(spec, |spec, &(key, value)| spec.with(key, value))
    };
    for (what, pattern, bytes, requests) in [
        ("16 KiB strided, shared file", Pattern::Strided, 16 << 10, 64),
        ("256 KiB contiguous segments, shared file", Pattern::Contiguous, 256 << 10, 8),
        ("64 KiB, a file per process", Pattern::FilePerProcess, 64 << 10, 24),
    ] {
        for block in [true, false] {
            let case = (pattern, bytes, requests, block);
            let base = makespan(&PolicySpec::named("fifo"), case, seeds)?;
            let placed = if block { "neighbouring ranks on one node" } else { "ranks dealt round robin" };
            println!("\n{what}, {placed}: fifo {base:.2} s ({seeds} seeds)");
            println!("{:22} {:>8} {:>8} {:>8} {:>8}", "gain by window", "2 ms", "8 ms", "16 ms", "64 ms");
            for (name, options) in VARIANTS {
                print!("{name:22}");
                for window_us in [2_000, 8_000, 16_000, 64_000] {
                    let gain = 1.0 - makespan(&with(window_us, options), case, seeds)? / base;
                    print!(" {:+7.0}%", gain * 100.0);
                }
                println!();
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
