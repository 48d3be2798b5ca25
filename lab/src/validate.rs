//! Compares the simulator with real runs: the demonstration's cluster on modelled disks, and its simulation with the
//! same files at the same addresses.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use impresario_base::lock::{Condvar, Mutex};
use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use impresario_sim::model::{
    Application, Clients, Device, FileAt, IoNodes, Network, Operation as SimOperation, Pattern as SimPattern,
    RankPlacement, Scenario, Servers,
};
use serde::{Deserialize, Serialize};

use impresario_workload::compare::{Outcome, Trial};
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Placement, Think, Workload};
use impresario_workload::result::RunResult;
use impresario_workload::stats::{Interval, Verdict, mean, within};
use impresario_workload::system::DiskOrder;

/// Maximum relative difference of makespans.
pub const MAKESPAN_SHARE_MAX: f64 = 0.15;
/// Maximum relative difference of mean batches.
pub const BATCH_SHARE_MAX: f64 = 0.10;
/// Seeds over which the simulation of one live run is averaged.
pub const SEEDS: u64 = 8;

/// The cluster of the live runs.
#[derive(Clone, PartialEq, Debug)]
pub struct Cluster {
    /// I/O nodes.
    pub io_nodes: u16,
    /// Data servers.
    pub data_servers: u16,
    /// Strip size, bytes.
    pub stripe_bytes: u32,
    /// The disks.
    pub device: DeviceParams,
    /// Measurements of the machine.
    pub waits: Waits,
}

/// This machine's communication and scheduling delays, as measured before the live runs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Waits {
    /// One-way message time between two processes, µs.
    pub one_way_us: f64,
    /// Processor wait of an I/O node's threads during one request, µs: see [`handover_us`].
    pub handover_us: f64,
    /// Variation in the lateness of timers, µs: see [`timer_spread_us`].
    pub timer_spread_us: f64,
}

/// Processor time of a server for a request in the simulation, µs.
const CPU_US: f64 = 10.0;

/// The cost of handing requests over between threads, µs, from one process that runs alone and its time in flight: the
/// rest of its latency after the disk, four one-way times between two processes, and the processors.
pub fn handover_us(alone: &RunResult, one_way_us: f64) -> f64 {
    let served_us = alone.servers.device.as_ref().map_or(0.0, |d| d.mean_service_us);
    (alone.latency.mean_us - served_us - 4.0 * one_way_us - 2.0 * CPU_US).max(0.0)
}

/// The variation in the lateness of this machine's timed waits, µs: of 200 consecutive waits of 3 ms, the middle four
/// fifths, as the width of a uniform distribution. All are some 50 µs late, since the kernel coalesces timers; that has
/// no effect, but it matters which of two timers set to the same instant fires first.
pub fn timer_spread_us() -> f64 {
    const WAIT: Duration = Duration::from_millis(3);
    let never = (Mutex::new(()), Condvar::new());
    let wait = || {
        let begun = Instant::now();
        let held = never.0.lock();
        drop(never.1.wait_timeout(held, WAIT));
        begun.elapsed().as_secs_f64() * 1e6
    };
    let mut took: Vec<f64> = (0..200).map(|_| wait()).collect();
    took.sort_by(f64::total_cmp);
    (took[180] - took[20]) / 0.8
}

/// One process that writes alone, one small request after another: the workload for [`handover_us`].
pub fn alone() -> Workload {
    let (request_bytes, process_bytes) = (16 << 10, 1 << 20);
    let pattern = Pattern { shape: Shape::Contiguous, request_bytes, process_bytes, processes: 1, seed: 1 };
    Workload::uniform(1, pattern, Operation::Write)
}

/// A run and its simulation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Side {
    /// The case.
    pub case: String,
    /// The system.
    pub system: String,
    /// Mean makespan of the counting live runs, s.
    pub live_s: f64,
    /// Number of counting live runs.
    pub live_runs: usize,
    /// Mean makespan of the simulations, s.
    pub simulated_s: f64,
    /// Mean size of a request at the disk, live, bytes.
    pub live_batch_bytes: f64,
    /// The same, simulated.
    pub simulated_batch_bytes: f64,
    /// Relative error of the simulated makespan (negative: shorter): over the live runs, each with its own simulations.
    pub makespan_error: Interval,
    /// Relative error of the simulated batches.
    pub batch_error: Interval,
}

impl Side {
    /// `live` and `simulated` of one run each: makespan in s, bytes of a request at the disk.
    fn of(case: &str, system: &str, live: &[(f64, f64)], simulated: &[(f64, f64)]) -> Side {
        type Of = fn(&(f64, f64)) -> f64;
        let all = |runs: &[(f64, f64)], of: Of| mean(&runs.iter().map(of).collect::<Vec<_>>());
        let error = |of: Of| {
            let base = all(live, of);
            Interval::of(&live.iter().zip(simulated).map(|(l, s)| (of(s) - of(l)) / base).collect::<Vec<_>>())
        };
        let (time, batch): (Of, Of) = (|r| r.0, |r| r.1);
        Side {
            case: case.into(),
            system: system.into(),
            live_s: all(live, time),
            live_runs: live.len(),
            simulated_s: all(simulated, time),
            live_batch_bytes: all(live, batch),
            simulated_batch_bytes: all(simulated, batch),
            makespan_error: error(time),
            batch_error: error(batch),
        }
    }

    /// Whether both are within their limits.
    pub fn verdict(&self) -> Verdict {
        Verdict::of_all([within(self.makespan_error, MAKESPAN_SHARE_MAX), within(self.batch_error, BATCH_SHARE_MAX)])
    }
}

/// Two systems of a case whose live makespans differ clearly and whose simulated ones are in the opposite order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Swapped {
    /// The case.
    pub case: String,
    /// The system that is faster live.
    pub faster_live: String,
    /// The system that is faster in the simulation.
    pub faster_simulated: String,
}

/// Simulates every case and system of an experiment that ran live.
pub fn sides(outcome: &Outcome, cluster: &Cluster) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for (c, case) in outcome.experiment.cases.iter().enumerate() {
        for (s, system) in outcome.experiment.systems.iter().enumerate() {
            let live = outcome.counted(c, s);
            let mut runs = (Vec::new(), Vec::new());
            for trial in &live {
                let (mut times, mut batches) = (Vec::new(), Vec::new());
                for seed in 1..=SEEDS {
                    let (scenario, begin_s) = scenario(outcome, trial, cluster, seed)?;
                    let one = impresario_sim::run(&scenario)?;
                    if !one.violations.is_empty() || one.failed > 0 {
                        bail!("{} under {}: the simulation is wrong: {:?}", case.name, system.name, one.violations);
                    }
                    times.push(one.makespan_s - begin_s);
                    batches.push(one.layers.device.mean_bytes());
                }
                let batch_bytes = trial.result.servers.at_disk.mean_bytes().unwrap_or(0.0);
                runs.0.push((trial.result.makespan_s, batch_bytes));
                runs.1.push((mean(&times), mean(&batches)));
            }
            sides.push(Side::of(&case.name, &system.name, &runs.0, &runs.1));
        }
    }
    Ok(sides)
}

/// Pairs of systems in the wrong order: live they differ by more than `share`, and the simulation orders them
/// oppositely.
pub fn swapped(sides: &[Side], share: f64) -> Vec<Swapped> {
    let mut wrong = Vec::new();
    for (i, a) in sides.iter().enumerate() {
        for b in &sides[i + 1..] {
            if a.case != b.case || a.live_runs == 0 || b.live_runs == 0 {
                continue;
            }
            let (fast, slow) = if a.live_s < b.live_s { (a, b) } else { (b, a) };
            if slow.live_s > fast.live_s * (1.0 + share) && fast.simulated_s > slow.simulated_s {
                wrong.push(Swapped {
                    case: a.case.clone(),
                    faster_live: fast.system.clone(),
                    faster_simulated: slow.system.clone(),
                });
            }
        }
    }
    wrong
}

/// The scenario of one live run and the time at which the run begins, s: its files at their addresses, its processes
/// starting when they actually ran, the platters at their actual angle. The clocks of the I/O nodes, which turn windows
/// follow, are ahead by `seed` turns of the platters.
fn scenario(outcome: &Outcome, trial: &Trial, cluster: &Cluster, seed: u64) -> Result<(Scenario, f64)> {
    let case = trial.case;
    let (workload, system) = (&outcome.experiment.cases[case].workload, &outcome.experiment.systems[trial.system]);
    let policy = |spec: &Option<PolicySpec>| spec.clone().unwrap_or_else(|| PolicySpec::named("none"));
    let mut device = cluster.device.clone();
    device.order = system.disk_order.unwrap_or(DiskOrder::Arrival);
    let turn_ns = 60_000_000_000 / u64::from(device.rpm.max(1));
    let begin_us = (trial.result.began_ns % turn_ns + seed * turn_ns) as f64 / 1e3;
    let mut applications = Vec::new();
    for (index, a) in workload.applications.iter().enumerate() {
        let p = a.pattern;
        if p.process_bytes % p.request_bytes != 0 {
            bail!("a process's bytes must be a multiple of its request size to be simulated");
        }
        let places = outcome.places.get(case).and_then(|c| c.get(index)).cloned().unwrap_or_default();
        applications.push(Application {
            name: format!("application {index}"),
            processes: p.processes,
            starts_us: trial.result.applications[index].came_s.iter().map(|s| begin_us + s * 1e6).collect(),
            op: match a.operation {
                Operation::Read => SimOperation::Read,
                Operation::Write => SimOperation::Write,
            },
            pattern: match p.shape {
                Shape::Contiguous => SimPattern::Contiguous,
                Shape::Strided => SimPattern::Strided,
                Shape::FilePerProcess => SimPattern::FilePerProcess,
                Shape::Random => SimPattern::Random,
            },
            request_bytes: p.request_bytes,
            requests: p.process_bytes / p.request_bytes * u64::from(a.loops),
            queue_depth: a.queue_depth,
            jitter_us: match a.think {
                Think::None => 0.0,
                Think::Uniform(us) => us,
                Think::Exponential(mean_us) => 2.0 * mean_us,
            },
            files: places.iter().map(|f| FileAt { key: f.key, server: f.base }).collect(),
            ..Application::default()
        });
    }
    let Waits { one_way_us, handover_us, timer_spread_us } = cluster.waits;
    let scenario = Scenario {
        seed,
        title: format!("{} under {}", outcome.experiment.cases[case].name, system.name),
        // A single connection leads from an I/O node to a data server, so its messages keep their order.
        network: Network { latency_us: one_way_us, jitter_us: one_way_us, in_order: true, ..Network::default() },
        clients: Clients {
            request_bytes_max: workload.wire_max_bytes.map_or(0, u64::from),
            placement: match workload.placement {
                Placement::Block => RankPlacement::Block,
                Placement::Cyclic => RankPlacement::Cyclic,
            },
            ..Clients::default()
        },
        io_nodes: (cluster.io_nodes > 0).then(|| IoNodes {
            count: cluster.io_nodes,
            policy: policy(&system.io_policy),
            handover_us,
            timer_late_us: timer_spread_us,
            cpu_us: CPU_US,
            ..IoNodes::default()
        }),
        servers: Servers {
            count: cluster.data_servers,
            stripe_bytes: cluster.stripe_bytes,
            cpu_us: CPU_US,
            timer_late_us: timer_spread_us,
            policy: policy(&system.data_policy),
            in_flight: trial.depth.unwrap_or(0),
            device: "disk".into(),
            ..Servers::default()
        },
        device: [("disk".to_string(), Device::Disk(device))].into(),
        application: applications,
        ..Scenario::default()
    };
    Ok((scenario, begin_us / 1e6))
}

/// The table for the terminal, or as Markdown for the documentation.
pub fn table(sides: &[Side], markdown: bool) -> String {
    let mut out = String::new();
    let head = ["case", "system", "live", "simulated", "error", "at the disk, live", "simulated", "error", ""];
    let row = |cells: &[String]| {
        if markdown {
            format!("| {} |\n", cells.join(" | "))
        } else {
            let mut line = format!("{:<26} {:<26}", cells[0], cells[1]);
            let widths = [8, 10, 16, 18, 10, 16];
            cells[2..].iter().zip(widths).for_each(|(cell, width)| line += &format!(" {cell:>width$}"));
            format!("{line} {}\n", cells[8])
        }
    };
    out += &row(&head.map(String::from));
    if markdown {
        out += &row(&head.map(|_| "---".to_string()));
    }
    for s in sides {
        let kib = |bytes: f64| format!("{:.1} KiB", bytes / 1024.0);
        let percent = |error: Interval| match (error.high - error.low) * 50.0 {
            half if half.is_finite() => format!("{:+.1} ± {half:.1} %", error.mean * 100.0),
            _ => format!("{:+.1} %", error.mean * 100.0),
        };
        let live = if s.live_runs == 0 { "none counts".into() } else { format!("{:.2} s", s.live_s) };
        out += &row(&[
            s.case.clone(),
            s.system.clone(),
            live,
            format!("{:.2} s", s.simulated_s),
            percent(s.makespan_error),
            kib(s.live_batch_bytes),
            kib(s.simulated_batch_bytes),
            percent(s.batch_error),
            s.verdict().to_string(),
        ]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(system: &str, live_s: f64, simulated_s: f64, batch: f64) -> Side {
        let live = [0.99, 1.0, 1.01].map(|f| (live_s * f, 65536.0));
        let simulated = [0.99, 1.0, 1.01].map(|f| (simulated_s * f, 65536.0 * batch));
        Side::of("a", system, &live, &simulated)
    }

    #[test]
    fn errors_are_told_by_their_share() {
        for (simulated_s, batch, verdict) in [
            (2.29, 1.05, Verdict::Holds),
            (2.31, 1.05, Verdict::DoesNotHold),
            (1.69, 1.05, Verdict::DoesNotHold),
            (2.0, 1.11, Verdict::DoesNotHold),
            (2.0, 0.91, Verdict::Holds),
        ] {
            let side = side("x", 2.0, simulated_s, batch);
            assert_eq!(side.verdict(), verdict, "{simulated_s} {batch}: {side:?}");
        }
        let noisy = Side::of("a", "x", &[(1.0, 1.0), (3.0, 1.0), (2.0, 1.0)], &[(2.0, 1.0); 3]);
        assert_eq!(noisy.verdict(), Verdict::Unresolved, "{noisy:?}");
        let alone = Side::of("a", "x", &[(2.0, 1.0)], &[(2.0, 1.0)]);
        assert_eq!(alone.verdict(), Verdict::Unresolved, "one run says nothing about the spread");
        let text = table(&[side("x", 2.0, 2.5, 1.0)], false);
        assert!(text.contains("+25.0 ± ") && text.contains("+0.0 ± 0.0 %") && text.contains("does not hold"), "{text}");
        assert!(table(&[side("x", 2.0, 2.5, 1.0)], true).starts_with("| case |"));
    }

    #[test]
    fn an_order_counts_as_wrong_only_where_the_live_runs_differ() {
        let sides = [side("slow", 4.0, 2.0, 1.0), side("fast", 2.0, 2.5, 1.0), side("like fast", 2.01, 2.2, 1.0)];
        let wrong = swapped(&sides, 0.05);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong.iter().all(|w| w.faster_simulated == "slow"));
        assert!(swapped(&[side("a", 1.0, 2.0, 1.0), side("b", 1.01, 1.0, 1.0)], 0.05).is_empty());
    }
}
