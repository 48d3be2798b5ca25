//! The simulation replays, finishes everything, and shows what the policies are for.

use impresario_device::{DeviceParams, Order};
use impresario_layout::Layout;
use impresario_sched::{Nanos, Op, PolicySpec};
use impresario_sim::{Application, IoNodes, Outcome, Pattern, Scenario, run};

fn scenario(pattern: Pattern, op: Op, seed: u64) -> Scenario {
    let (request_bytes, requests) = if pattern == Pattern::Strided { (16 << 10, 32) } else { (256 << 10, 4) };
    let application = Application { processes: 8, pattern, op, request_bytes, requests, start: Nanos::ZERO };
    Scenario {
        applications: vec![application; 4],
        layout: Layout::over_all(4).unwrap(),
        data_policy: PolicySpec::named("none"),
        data_in_flight: 1,
        device: DeviceParams::default(),
        io_nodes: None,
        wire_max_bytes: u64::MAX,
        latency: Nanos::from_micros(50),
        jitter: Nanos::from_micros(100),
        message_jitter: Nanos::ZERO,
        seed,
    }
}

fn outcome(s: &Scenario) -> Outcome {
    let o = run(s).unwrap();
    let moved: u64 = s.applications.iter().map(|a| u64::from(a.processes) * a.requests * a.request_bytes).sum();
    assert_eq!(o.bytes, moved);
    assert!(o.makespan < Nanos::MAX && o.makespan > Nanos::ZERO, "every process ends");
    o
}

fn forwarding(policy: &str) -> IoNodes {
    IoNodes {
        count: 2,
        policy: PolicySpec::named(policy),
        in_flight: 16,
        merge_requests: 16,
        dispatch_requests: 256,
        split: false,
        block_placement: true,
    }
}

#[test]
fn a_seed_replays_byte_for_byte_and_another_differs() {
    for policy in ["none", "fifo", "hbrr", "mlf"] {
        let mut s = scenario(Pattern::Strided, Op::Read, 7);
        s.data_policy = PolicySpec::named(policy);
        s.io_nodes = Some(forwarding("twins"));
        assert_eq!(outcome(&s), outcome(&s), "{policy}");
        let other = Scenario { seed: 8, ..s.clone() };
        assert_ne!(outcome(&s).makespan, outcome(&other).makespan);
    }
}

#[test]
fn every_layer_and_policy_finishes_all_work() {
    for pattern in [Pattern::Contiguous, Pattern::Strided, Pattern::FilePerProcess] {
        for op in [Op::Read, Op::Write] {
            for io in [None, Some("none"), Some("fifo"), Some("hbrr"), Some("mlf"), Some("twins")] {
                for split in [false, true] {
                    for order in [Order::Arrival, Order::Elevator] {
                        let mut s = scenario(pattern, op, 1);
                        s.applications.truncate(2);
                        s.wire_max_bytes = 8 << 10;
                        s.data_policy = PolicySpec::named("mlf");
                        s.device.order = order;
                        s.io_nodes = io.map(|p| IoNodes { split, ..forwarding(p) });
                        outcome(&s);
                    }
                }
            }
        }
    }
}

/// The model is deterministic, so this is a fact about the model and not a timed test: on a 7200 rpm disk in
/// arrival order, mlf is faster than no scheduler in each of the demonstration's cases.
#[test]
fn mlf_beats_arrival_order_on_the_modelled_disk() {
    for pattern in [Pattern::Strided, Pattern::Contiguous] {
        for op in [Op::Read, Op::Write] {
            let base = scenario(pattern, op, 3);
            let mlf = Scenario { data_policy: PolicySpec::named("mlf"), ..base.clone() };
            let (t_base, t_mlf) = (outcome(&base).makespan, outcome(&mlf).makespan);
            let gain = 1.0 - t_mlf.as_secs_f64() / t_base.as_secs_f64();
            assert!(gain > 0.2, "{pattern:?} {op:?}: {t_base} → {t_mlf}");
        }
    }
}

#[test]
fn a_bad_policy_is_refused_in_words() {
    let mut s = scenario(Pattern::Strided, Op::Read, 1);
    s.data_policy = PolicySpec::named("twins");
    assert!(run(&s).unwrap_err().to_string().contains("one lane"));
}
