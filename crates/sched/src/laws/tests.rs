//! The laws over random scripts for every policy, and what each law reports about a core that breaks it.
//!
//! A failure names its seed; `LAWS_SEED=n` replays that one alone, `LAWS_SEEDS=n` runs more than the usual number.

use impresario_base::random::Random;

use super::script::{self, Load, Script, replayable, run, seeds, specs};
use super::*;
use crate::policy::{Choice, Done, Policy, Setup, View};
use crate::table::Slot;
use crate::{Completion, ConnId, Event, Extent, Part};

#[test]
fn every_policy_keeps_the_laws() {
    for (spec, lanes) in specs() {
        for seed in seeds(40) {
            let (load, steps) = match seed % 8 {
                5 => (Load::Ascending, 1_000),
                6 => (Load::Low, 1_000),
                _ => (Load::Mixed, 300),
            };
            replayable(&format!("{spec} on {lanes} lanes"), seed, || run(&spec, lanes, seed, load, steps, &[]));
        }
    }
}

/// Scripts that once broke a law: a barrier filled the server during its window; nothing ended the hold of a lane with
/// only speculations queued; a lane was full whenever a class with a limit over two lanes could go.
#[test]
fn scripts_that_broke_a_law() {
    let limits = PolicySpec::named("mclock").with("rules", script::MCLOCK_LIMITS).with("guard_batches", 7);
    let twins = |window_us| PolicySpec::named("twins").with("window_us", window_us);
    for (spec, lanes, seed) in [
        (twins(20).with("in_flight_per_server", 1).with("merge", "on"), 4, 42),
        (twins(20).with("in_flight_per_server", 1).with("merge", "on"), 4, 403),
        (twins(20), 4, 2540),
        (twins(35).with("order", "permutation"), 3, 4047),
        (twins(25).with("merge", "on").with("work_conserving", "on"), 3, 966),
        (twins(25).with("merge", "on").with("work_conserving", "on"), 3, 1842),
        (limits.clone(), 2, 219),
        (limits, 2, 480),
    ] {
        // As scripts were then.
        let script = || Script { lets_pass: false, ..Script::new(&spec, lanes, seed) };
        replayable(&spec.to_string(), seed, || script().run(Load::Mixed, 300, &[]));
    }
}

/// Connections take no data for long: what changes the bytes of their reads, or would be served while a lane idles for them,
/// waits half a second.
#[test]
fn slow_readers_keep_the_laws() {
    let minding = specs().into_iter().filter(|(spec, _)| policy::minds_connections(spec) || spec.name == "auto");
    let others: Vec<PolicySpec> = specs().into_iter().map(|(spec, _)| spec).filter(|s| s.name != "twins").collect();
    for (spec, lanes) in minding {
        for seed in seeds(30) {
            let switches = if seed % 5 == 4 { &others[..] } else { &[] };
            replayable(&format!("{spec} on {lanes} lanes"), seed, || {
                let mut script = Script::new(&spec, lanes, seed);
                for _ in 0..300 {
                    match script.below(6) {
                        0 => script.change_readiness(),
                        1 => {
                            let by = script.below(300_000_000);
                            script.advance(by);
                        }
                        _ => script.step(switches),
                    }
                    script.pump();
                }
                script.finish();
                script.judge();
            });
        }
    }
}

/// What processes read of parts of their own goes by what the drive reads on; the account for that may run empty.
#[test]
fn parts_of_files_keep_the_laws() {
    let causal = || PolicySpec::named("agios-causal").with("anticipation_us", 0);
    for (spec, dwells) in [
        (causal(), true),
        (causal().with("wait_us", 20).with("window_us", 200).with("guard_batches", 3), true),
        (causal().with("window_us", 0), true),
        (causal().with("pass_us", 10), false),
    ] {
        let mut holds = 0;
        for seed in seeds(20) {
            holds += replayable(&spec.to_string(), seed, || {
                let mut script = Script::in_parts(&spec, seed);
                for step in 0..1_500 {
                    let by = script.below(100_000);
                    script.advance(if step % 3 == 0 { by } else { 0 });
                    script.step(&[]);
                }
                script.finish();
                script.judge();
                script.holds
            });
        }
        assert!(!dwells || holds > 100, "{spec}: {holds}");
    }
}

/// A policy that chooses among others switches often while the laws are checked.
#[test]
fn automatic_switches_keep_the_laws() {
    let spec = PolicySpec::named("auto").with("table", script::AUTO_TABLE);
    let mut switches = Vec::new();
    for seed in seeds(24) {
        switches.push(replayable("auto", seed, || {
            let mut script = Script::new(&spec, 1 + 2 * (seed % 2) as u16, seed);
            (0..8_000).for_each(|_| script.step(&[]));
            script.finish();
            script.judge();
            script.core.acting().1
        }));
    }
    assert!(switches.iter().sum::<u64>() >= 3 * switches.len() as u64, "{switches:?}");
}

/// A file that was read ahead much gives way to reads of others, and its own reads wait with it.
#[test]
fn giving_way_keeps_the_laws() {
    let mut waits = 0;
    for seed in seeds(40) {
        waits += replayable("auto above a layer that sorts", seed, || {
            let (lanes, switches) = (1 + 2 * (seed % 2) as u16, ["auto", "mlf", "none"].map(PolicySpec::named));
            let config = CoreConfig { lanes, lane_speculations: 2, sorted_below: true, ..CoreConfig::single_lane(64) };
            let core = Core::new(config.clone(), &switches[0]).unwrap();
            let mut script = Script { long_ahead: true, ..Script::on(core, &config, Random::new(seed)) };
            let mut waits = 0;
            for _ in 0..2_000 {
                script.step(if seed % 3 == 0 { &switches } else { &[] });
                waits += script.laws.held.len();
            }
            script.finish();
            script.judge();
            waits
        });
    }
    assert!(waits > 100, "{waits}");
}

/// Nodes and servers come and go, now or at an instant to come, also across switches: nothing is lost and no wait is longer.
#[test]
fn members_come_and_go() {
    let twins: Vec<_> = specs().into_iter().filter(|(spec, _)| spec.name == "twins").collect();
    assert!(twins.len() > 5);
    for (spec, lanes) in twins {
        let switches = [spec.clone(), PolicySpec::named("mlf"), spec.clone().with("window_us", 15)];
        for seed in seeds(30) {
            replayable(&format!("{spec} on {lanes} lanes"), seed, || {
                let mut script = Script::new(&spec, lanes, seed);
                for _ in 0..400 {
                    if script.below(12) == 0 {
                        script.change_members();
                    }
                    script.step(if seed % 3 == 0 { &switches } else { &[] });
                }
                script.finish();
                script.judge();
            });
        }
    }
}

/// Law 5.
#[test]
fn the_same_seed_gives_the_same_schedule() {
    for (spec, lanes) in specs() {
        let log = || run(&spec, lanes, 4711, Load::Mixed, 400, &[]);
        let (first, second) = (log(), log());
        assert!(first.len() > 10 && first == second, "{spec}");
    }
}

/// Law 6: a live switch between any two policies loses and repeats nothing.
#[test]
fn live_switches_between_every_ordered_pair() {
    for (from, from_lanes) in specs() {
        for (to, to_lanes) in specs() {
            let lanes = from_lanes.max(to_lanes);
            for seed in seeds(1) {
                let switch = || run(&from, lanes, seed, Load::Mixed, 300, std::slice::from_ref(&to));
                replayable(&format!("{from} → {to}"), seed, switch);
            }
        }
    }
}

/// Acts by one policy but promises the bounds of another: a broken guard.
struct Broken {
    acts: Box<dyn Policy>,
    promises: Box<dyn Policy>,
}

impl Policy for Broken {
    fn spec(&self) -> PolicySpec {
        self.promises.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.acts.enqueue(view, slot);
        self.promises.enqueue(view, slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.acts.dequeue(view, slot);
        self.promises.dequeue(view, slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let choice = self.acts.select(view, batch);
        if matches!(choice, Choice::Serve | Choice::ServeThrough) {
            batch.iter().for_each(|slot| self.promises.dequeue(view, *slot));
        }
        choice
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.acts.completed(view, done);
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        self.promises.wait_bound(view, slot)
    }
}

/// Eight requests, then an endless stream that the policy prefers, with the bounds of `promised` and the decisions of
/// `acts`.
fn starve(promised: &PolicySpec, acts: &PolicySpec, lanes: u16, load: Load) -> Vec<String> {
    starve_for(6_000, promised, acts, lanes, load)
}

fn starve_for(steps: u32, promised: &PolicySpec, acts: &PolicySpec, lanes: u16, load: Load) -> Vec<String> {
    let config = CoreConfig { lanes, pieces: false, ..CoreConfig::single_lane(64) };
    let mut core = Core::new(config.clone(), promised).unwrap();
    let setup = Setup::of(lanes, 64);
    let build = |spec| policy::build(spec, &setup).unwrap();
    core.install(Box::new(Broken { acts: build(acts), promises: build(promised) }));
    let mut script = Script::on(core, &config, Random::new(7));
    script.flood(&[(Load::Victims, 4), (load, steps)]);
    script.finish();
    script.laws.take_violations()
}

/// Law 3 is not vacuous: a policy with a deliberately broken guard exceeds its bound within some thousand steps, one
/// with a working guard does not.
#[test]
fn a_broken_guard_is_found() {
    let p = PolicySpec::named;
    let tbf = p("tbf").with("rules", "v: job=0 {requests_per_s=0.01, borrow=on}; s: * {requests_per_s=1e9, borrow=on}");
    let mclock = p("mclock").with("rules", "v: job=0 {weight=0.001}; s: * {reservation=1e9}");
    let limited = p("mclock").with("rules", "v: job=0 {limit=1e6, weight=0.001}; s: * {reservation=1e9}");
    let twins = p("twins").with("window_us", 20).with("order_within", "offset");
    for (spec, lanes, load) in [
        (p("mlf").with("window_us", 0).with("batch_requests", 1), 1, Load::Low),
        (p("aioli").with("window_us", 0).with("batch_requests", 1), 1, Load::Low),
        (tbf, 1, Load::Ascending),
        (mclock, 1, Load::Ascending),
        (limited, 1, Load::Ascending),
        (twins.clone(), 2, Load::Ascending),
        (p("sstf"), 1, Load::Ascending),
        (p("wscan").with("window_bytes", 4096), 1, Load::Ascending),
        (p("sjf").with("merge", "off"), 1, Load::Low),
        (p("srtf").with("merge", "off"), 1, Load::Low),
        (p("deadline").with("sweep_batches", 1), 1, Load::Ascending),
    ] {
        let guarded = |batches: u32| spec.clone().with("guard_batches", batches);
        assert_eq!(starve(&guarded(1), &guarded(1), lanes, load), Vec::<String>::new(), "{spec}");
        let found = starve(&guarded(1), &guarded(0), lanes, load);
        assert!(found.iter().any(|v| v.contains("law 3") && v.contains("batches before it")), "{spec}: {found:?}");
    }
    // Also with the default guard: the bound of the oldest request lies within the script.
    let shipped = p("mlf").with("window_us", 0).with("batch_requests", 1);
    assert_eq!(starve_for(40_000, &shipped, &shipped, 1, Load::LowAlone), Vec::<String>::new());
    let found = starve_for(40_000, &shipped, &shipped.clone().with("guard_batches", 0), 1, Load::LowAlone);
    assert!(found.iter().any(|v| v.contains("law 3") && v.contains("batches before it")), "{found:?}");
    // Idle-time bounds too: windows longer, or rates lower, than stated. Without barriers, after which idle time counts anew.
    let found = starve(&twins, &twins.clone().with("window_us", 5_000), 2, Load::LowAlone);
    assert!(found.iter().any(|v| v.contains("law 3: the lane idled")), "{found:?}");
    let rate = |rate| p("tbf").with("rules", format!("all: * {{requests_per_s={rate}}}"));
    let found = starve(&rate("100000"), &rate("1000"), 1, Load::LowAlone);
    assert!(found.iter().any(|v| v.contains("law 3: the lane idled")), "{found:?}");
}

/// `sstf patience_us=0` waits without limit and says so; its other bounds hold while a connection is not ready.
#[test]
fn unlimited_patience_is_stated() {
    for (patience, idle) in [(0, Nanos::MAX), (5, Nanos::from_micros(5 * (257 + 1)))] {
        let spec = PolicySpec::named("sstf").with("patience_us", patience);
        let mut core = Core::new(CoreConfig::single_lane(8), &spec).unwrap();
        core.event(Nanos(0), Event::Ready { connection: ConnId(1), ready: false });
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 10 };
        let mut read = |conn| {
            let request = Request { conn: ConnId(conn), ..Request::new(Op::Read, extent) };
            core.push(Nanos(0), &request).unwrap()
        };
        let (id, _) = (read(2), read(1));
        assert_eq!(core.wait_bound(Nanos(0), id).unwrap().idle, idle);
    }
}

/// Several connections that take no data are waited for together: `patience_us` between two batches, not for each.
#[test]
fn patience_covers_all_connections_between_two_batches() {
    let spec = PolicySpec::named("sstf").with("patience_us", 5);
    let mut core = Core::new(CoreConfig::single_lane(8), &spec).unwrap();
    for conn in 0..4 {
        core.event(Nanos(0), Event::Ready { connection: ConnId(conn), ready: conn == 3 });
        let at = u64::from(conn) * 100;
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: at, lane_offset: at, len: 10 };
        core.push(Nanos(0), &Request { conn: ConnId(conn), ..Request::new(Op::Read, extent) }).unwrap();
    }
    let wait = Next::Wait { until: Nanos(5_000), reason: WaitReason::Connection };
    assert_eq!(core.next(Nanos(0)), wait);
    assert_eq!(core.next(Nanos(4_000)), wait);
    let Next::Dispatch(batch) = core.next(Nanos(5_000)) else { panic!("three were waited for") };
    assert_eq!(batch.extent.lane_offset, 300);
}

#[test]
fn refusals_say_why_and_change_nothing() {
    let mut core = Core::new(CoreConfig::single_lane(8), &PolicySpec::named("fifo")).unwrap();
    let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 10 };
    let id = core.push(Nanos(0), &Request::new(Op::Read, extent)).unwrap();
    let p = PolicySpec::named;
    for (spec, says) in [
        (p("twins"), "one lane only"),
        (p("fastest"), "there is no policy \"fastest\"; there are: auto, none, fifo, hbrr, mlf, "),
        (p("mlf").with("quantum", 1), "no parameter \"quantum\"; it has: quantum_bytes"),
        (p("mlf").with("quantum_bytes", 0), "\"0\" is not a whole number from 512"),
        (p("fifo").with("merge", "maybe"), "\"maybe\" is not one of on, off"),
    ] {
        let error = core.reconfigure(Nanos(1), &spec).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(core.status().policy.name, "fifo");
    }
    let Next::Dispatch(batch) = core.next(Nanos(2)) else { panic!() };
    assert_eq!(batch.parts[0].id, id);
}

fn request(op: Op, offset: u64) -> Request {
    let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len: 100 };
    Request::new(op, extent)
}

fn watched(spec: &PolicySpec) -> (Core, Laws) {
    let config = CoreConfig::single_lane(100);
    let core = Core::new(config.clone(), spec).unwrap();
    let laws = Laws::new(&config, &core);
    (core, laws)
}

#[test]
fn a_correct_core_has_no_violations() {
    let (mut core, mut laws) = watched(&PolicySpec::named("fifo").with("merge", "on"));
    for i in 0..20 {
        let r = request(if i % 3 == 0 { Op::Write } else { Op::Read }, i % 7 * 100);
        let id = core.push(Nanos(i), &r).unwrap();
        laws.pushed(i, &core, id, &r);
    }
    for now in 20.. {
        let decision = core.next(Nanos(now));
        laws.decided(now, &core, &decision);
        let Next::Dispatch(batch) = decision else { break };
        core.event(Nanos(now), Event::Completed(Completion::of(&batch, Nanos(now), Nanos(now))));
        laws.completed(now, batch.id);
    }
    assert!(core.is_empty() && laws.is_empty());
    assert_eq!(laws.take_violations(), Vec::<String>::new());
}

/// Feeds the laws what a broken core would report.
#[test]
fn each_violation_is_reported() {
    let (mut core, mut laws) = watched(&PolicySpec::named("fifo"));
    let (first, second) = (request(Op::Write, 0), request(Op::Write, 50));
    let a = core.push(Nanos(0), &first).unwrap();
    laws.pushed(0, &core, a, &first);
    let b = core.push(Nanos(0), &second).unwrap();
    laws.pushed(0, &core, b, &second);
    let batch = |id, offset, from| Batch {
        id: BatchId(9),
        extent: Extent { lane_offset: offset, ..first.extent },
        op: Op::Write,
        parts: [Part { id, from, len: 100, lane_offset: offset }].into_iter().collect(),
        window: 0,
    };
    let mut accused = |decision: Next, what: &str| {
        laws.decided(5, &core, &decision);
        let violations = laws.take_violations();
        assert!(violations.iter().any(|v| v.contains(what)), "{what}: {violations:?}");
    };
    accused(Next::Wait { until: Nanos(9), reason: WaitReason::Quantum }, "law 4");
    accused(Next::Wait { until: Nanos(5), reason: WaitReason::Quantum }, "which is past");
    accused(Next::Dispatch(batch(b, 50, 0)), "law 2");
    accused(Next::Dispatch(batch(a, 10, 10)), "law 1: dispatched twice or out of order");
    accused(Next::Dispatch(batch(a, 0, 0)), "law 1: dispatched twice");
    accused(Next::Dispatch(batch(a, 0, 0)), "no room");
    accused(Next::Dispatch(batch(RequestId(77), 0, 0)), "law 1: a request that is not outstanding");
}

/// The same for speculations.
#[test]
fn each_violation_by_a_speculation_is_reported() {
    let config = CoreConfig { lane_requests: 9, lane_speculations: 1, ..CoreConfig::single_lane(100) };
    let mut core = Core::new(config.clone(), &PolicySpec::named("fifo")).unwrap();
    let mut laws = Laws::new(&config, &core);
    let mut next = 0;
    let mut ahead = |core: &mut Core, laws: &mut Laws, offset| {
        let r = request(Op::Read, offset);
        let id = core.speculate(&r).unwrap();
        laws.speculated(5, id, &r);
        next += 1;
        (id, BatchId(next), r.extent)
    };
    let batch = |(id, batch, extent): (RequestId, BatchId, Extent), from: u64| Batch {
        id: batch,
        extent,
        op: Op::Read,
        parts: [Part { id, from, len: 100, lane_offset: extent.lane_offset + from }].into_iter().collect(),
        window: 0,
    };
    let accused = |core: &Core, laws: &mut Laws, batch: Batch, what: &str| {
        laws.decided(5, core, &Next::Dispatch(batch));
        let violations = laws.take_violations();
        assert_eq!(violations.len(), usize::from(!what.is_empty()), "{what}: {violations:?}");
        assert!(violations.iter().all(|v| v.contains(what)), "{what}: {violations:?}");
    };
    let (first, second, third) =
        (ahead(&mut core, &mut laws, 0), ahead(&mut core, &mut laws, 1000), ahead(&mut core, &mut laws, 2000));
    assert!(!laws.is_empty());
    accused(&core, &mut laws, batch(first, 0), "");
    accused(&core, &mut laws, batch(second, 0), "too many are under way alone");
    laws.completed(5, first.1);
    laws.completed(5, second.1);
    laws.given_up(5, second.0);
    assert!(laws.take_violations().concat().contains("not a speculation that waits"));
    let write = request(Op::Write, 2050);
    let id = core.push(Nanos(5), &write).unwrap();
    laws.pushed(5, &core, id, &write);
    accused(&core, &mut laws, batch(third, 0), "a change covers it");
    laws.completed(5, third.1);
    let fourth = ahead(&mut core, &mut laws, 3000);
    accused(&core, &mut laws, batch(fourth, 0), "a request could start instead");
    laws.completed(5, fourth.1);
    let Next::Dispatch(written) = core.next(Nanos(5)) else { panic!() };
    accused(&core, &mut laws, written, "");
    let fifth = ahead(&mut core, &mut laws, 4000);
    let mut moved = batch(fifth, 0);
    moved.parts[0].lane_offset += 50;
    moved.extent.len += 50;
    accused(&core, &mut laws, moved, "not the rest of what was accepted");
}

/// A change on one lane reaches speculations on the other lanes of the same space.
#[test]
fn a_change_drops_overlapping_speculations_on_every_lane_of_one_space() {
    let config = CoreConfig { lanes: 3, shared_space: true, lane_speculations: 1, ..CoreConfig::single_lane(100) };
    let mut core = Core::new(config, &PolicySpec::named("fifo")).unwrap();
    let at = |lane: u16, op| {
        let r = request(op, 100);
        Request { extent: Extent { lane: LaneId(lane), ..r.extent }, ..r }
    };
    let ahead = core.speculate(&at(2, Op::Read)).unwrap();
    core.push(Nanos(0), &at(0, Op::Write)).unwrap();
    assert_eq!(core.take_given_up(), Some(ahead));
}

/// One batch in flight at a time over all lanes.
#[test]
fn a_node_that_sends_one_batch_at_a_time() {
    for (spec, _) in specs().into_iter().filter(|s| s.1 == 1) {
        for seed in 0..4 {
            let config = CoreConfig { lanes: 4, shared_space: true, total_requests: 1, ..CoreConfig::single_lane(64) };
            let core = Core::new(config.clone(), &spec).unwrap();
            let mut script = Script::on(core, &config, Random::new(seed));
            (0..300).for_each(|_| script.step(&[]));
            script.finish();
            script.judge();
        }
    }
}

/// Syncs that count against a limit of their own only, beside one or two batches in flight.
#[test]
fn syncs_have_a_limit_of_their_own() {
    for (spec, lanes) in specs() {
        for seed in 0..4 {
            let config = CoreConfig {
                lanes,
                shared_space: lanes > 1 && seed % 2 == 0,
                lane_syncs: 1 + seed as u32 / 2,
                total_requests: 2,
                ..CoreConfig::single_lane(64)
            };
            let core = Core::new(config.clone(), &spec).unwrap();
            let mut script = Script::on(core, &config, Random::new(seed));
            script.syncs = true;
            (0..300).for_each(|_| script.step(&[]));
            script.finish();
            script.judge();
        }
    }
}
