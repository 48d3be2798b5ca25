//! Invalid tables are refused with a reason; observations distinguish patterns; switches follow them and are undone if
//! they yield less.

use super::table::{BUILT_IN, DecisionTable};
use super::*;
use impresario_base::Random;

use crate::{
    ClientId, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Next, Op,
    PolicySpec, Request,
};

/// Clients with one outstanding request each, in virtual time; `service` gives the device's time.
struct Load {
    /// The application of all requests; 0: each file is one.
    job: u32,
    core: Core,
    now: Nanos,
    flying: Vec<(crate::Batch, Nanos)>,
    /// Requests sent by each client.
    sent: Vec<u64>,
}

impl Load {
    fn new(spec: &PolicySpec, config: CoreConfig, clients: usize) -> Load {
        let core = Core::new(config, spec).unwrap();
        Load { job: 0, core, now: Nanos(1), flying: Vec::new(), sent: vec![0; clients] }
    }

    fn push(&mut self, client: usize, place: &dyn Fn(u64, u64) -> (u32, u64)) {
        let (file, offset) = place(client as u64, self.sent[client]);
        self.sent[client] += 1;
        let extent =
            Extent { file: FileId(file), lane: LaneId(0), file_offset: offset, lane_offset: offset, len: 4096 };
        let job = if self.job > 0 { self.job } else { file };
        let (job, client) = (JobId(job), ClientId(client as u32));
        self.core.push(self.now, &Request { client, job, ..Request::new(Op::Read, extent) }).unwrap();
    }

    /// Serves `requests` requests; the n-th of a client goes to `place(client, n)`.
    fn run(
        &mut self,
        requests: u64,
        place: &dyn Fn(u64, u64) -> (u32, u64),
        service: &dyn Fn(&str, &crate::Batch) -> u64,
    ) {
        (0..self.sent.len()).for_each(|client| self.push(client, place));
        let mut served = 0;
        while !self.core.is_empty() {
            match self.core.next(self.now) {
                Next::Dispatch(batch) => {
                    let acting = self.core.acting().0.name;
                    let begins = self.flying.iter().map(|f| f.1).max().unwrap_or(self.now);
                    let ends = begins + Nanos(service(&acting, &batch));
                    self.flying.push((batch, ends));
                    continue;
                }
                Next::Wait { until, .. } if self.flying.is_empty() => {
                    assert!(until < Nanos::MAX, "nothing would go on");
                    self.now = until;
                    continue;
                }
                Next::Wait { .. } => {}
            }
            let (batch, ends) = self.flying.remove(0);
            let clients: Vec<usize> =
                batch.parts.iter().map(|p| self.core.request(p.id).unwrap().client.0 as usize).collect();
            let begun = self.now;
            self.now = self.now.max(ends);
            self.core.event(self.now, Event::Completed(Completion::of(&batch, begun, self.now)));
            served += clients.len() as u64;
            clients.into_iter().filter(|_| served < requests).for_each(|client| self.push(client, place));
        }
    }

    fn seen(&self) -> Observation {
        self.core.chosen().unwrap().observed.unwrap()
    }
}

fn data() -> CoreConfig {
    CoreConfig::single_lane(256)
}

fn millis(ms: u64) -> impl Fn(&str, &crate::Batch) -> u64 {
    move |_, _| ms * 1_000_000
}

fn with_table(text: &str) -> PolicySpec {
    PolicySpec::named("auto").with("table", text)
}

#[test]
fn errors_in_tables_are_named() {
    let rule = |more: &str| format!("version = 1\n[[rule]]\nname = \"a\"\n{more}\n");
    for (text, says) in [
        ("version = 1\nrule = 3", "line 2: rule must be sections [[rule]]"),
        ("version = 1\nrules = []", "line 2: unknown section rules; did you mean rule?"),
        ("version = 2\nrule = []", "version 2 is not supported"),
        ("version = 1\nrule = []", "there is no [[rule]]"),
        (&*rule("choice = []"), "rule \"a\": there are 0 choices"),
        (&*rule("choice = [{ policy = \"mfl\" }]"), "there is no policy \"mfl\""),
        (&*rule("choice = [{ policy = \"auto\" }]"), "it is not for a table"),
        (&*rule("choice = [{ policy = \"twins\" }]"), "one lane only"),
        (&*rule("choice = [{ policy = \"mlf pass_us=x\" }]"), "pass_us"),
        (&*rule("choice = [{ policy = \"mlf\", depth = 0 }]"), "depth is not"),
        (&*rule("choice = [{ policy = \"mlf\", makespan = 1.5 }]"), "a gain is"),
        (&*rule("choice = [{ policy = \"mlf\", speed = 1.5 }]"), "line 4: unknown key speed in "),
        (&*rule("colour = { from = 1.0 }\nchoice = [{ policy = \"mlf\" }]"), "\"colour\" is not observed"),
        (&*rule("reads = { from = 1.0, below = 1.0 }\nchoice = [{ policy = \"mlf\" }]"), "reads: nothing lies between"),
        (&*rule("reads = { from = 0.5 }\nchoice = [{ policy = \"mlf\" }]"), "has conditions; one without any"),
    ] {
        let error = DecisionTable::parse(text).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
        let refused = Core::new(data(), &with_table(&format!("{text}\n"))).err().unwrap().to_string();
        assert!(refused.starts_with("policy auto cannot be used here: its decision table: "), "{refused}");
    }
    let refused = Core::new(data(), &with_table("mine.toml")).err().unwrap().to_string();
    assert!(refused.contains("\"mine.toml\" is not the text of a table"), "{refused}");
}

#[test]
fn the_built_in_table_parses_and_round_trips() {
    let table = DecisionTable::parse(BUILT_IN).unwrap();
    assert_eq!(DecisionTable::parse(&toml::to_string(&table).unwrap()).unwrap(), table);
    assert!(BUILT_IN.len() <= crate::policy::params::TEXT_MAX_BYTES, "it could not be given as a parameter");
}

/// Above a layer that sorts, requests are handed over at once and nothing is observed.
#[test]
fn above_a_sorting_kernel_requests_are_handed_over_at_once() {
    let mut load = Load::new(&PolicySpec::named("auto"), CoreConfig { sorted_below: true, ..data() }, 32);
    load.run(2_000, &|client, n| (0, (client * 1_000 + n) * 4096), &millis(1));
    let chosen = load.core.chosen().unwrap();
    assert_eq!((chosen.policy.name.as_str(), chosen.read_ahead, chosen.switches), ("none", true, 0));
    assert_eq!(chosen.observed, None);
    assert_eq!(load.core.status().lanes[0].limit_batches, None);
}

#[test]
fn patterns_are_distinguished() {
    let spec = with_table(
        "version = 1\n[[rule]]\nname = \"r\"\nreads = { from = 9.0 }\nchoice = [{ policy = \"fifo\" }]\n\
                           [[rule]]\nname = \"s\"\nchoice = [{ policy = \"fifo\" }]\n",
    );
    let observed = |place: &dyn Fn(u64, u64) -> (u32, u64)| {
        let mut load = Load::new(&spec, data(), 32);
        load.run(600, place, &millis(10));
        load.seen()
    };
    let contiguous = observed(&|client, n| (0, (client * 1_000 + n) * 4096));
    assert!(contiguous.sequential > 0.95 && contiguous.touching < 0.1 && contiguous.files == 1.0, "{contiguous:?}");
    assert!(contiguous.clients == 32.0 && contiguous.reads == 1.0 && contiguous.outstanding > 20.0, "{contiguous:?}");
    let strided = observed(&|client, n| (0, (n * 32 + client) * 4096));
    assert!(strided.sequential == 0.0 && strided.touching > 0.8, "{strided:?}");
    assert!((100_000.0..200_000.0).contains(&strided.distance_bytes), "31 blocks apart: {strided:?}");
    let own_files = observed(&|client, n| (client as u32, n * 4096));
    assert!(own_files.files == 32.0 && own_files.jobs == 32.0 && own_files.sequential > 0.95, "{own_files:?}");
    let random = observed(&|client, n| (0, (client * 7919 + n * 104_729) % 65_536 * 4096));
    assert!(random.sequential < 0.1 && random.touching < 0.2 && random.distance_bytes > 1e6, "{random:?}");
}

/// In a file of which most has been moved every request touches an earlier one; that is not a common pattern of clients.
#[test]
fn random_order_does_not_look_strided_once_the_file_has_been_covered() {
    let (clients, each) = (32, 24);
    let mut blocks: Vec<u64> = (0..clients * each).collect();
    Random::new(7).shuffle(&mut blocks);
    let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), clients as usize);
    let place = |client: u64, n: u64| (0, blocks[(client * each + n % each) as usize] * 4096);
    load.run(clients * each, &place, &millis(10));
    let seen = load.seen();
    assert!(!seen.first && seen.touching < 0.35, "{seen:?}");
}

/// A window without a second request of any client says nothing about the order of theirs.
#[test]
fn a_window_waits_until_some_of_many_clients_go_on() {
    let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 200);
    load.run(40, &stream, &millis(10));
    let seen = load.seen();
    assert!(seen.first && seen.sequential == 1.0, "{seen:?}");
    assert_eq!(load.core.acting().0.name, "sjf");
}

/// Nor does it wait for more than two requests of each client, or 512, where none goes on.
#[test]
fn the_first_window_is_bounded_whatever_the_number_of_clients() {
    for (clients, window) in [(182, 364), (200, 400), (256, 512), (400, 512)] {
        let mut load = Load::new(&with_table(NEAR_AND_FAR), CoreConfig::single_lane(1024), clients as usize);
        // The first `clients` requests come at once, and all but the last of those served bring another.
        // The number of clients is an estimate.
        load.run(window * 11 / 10 - clients + 1, &|client, n| ((n * clients + client) as u32, 0), &millis(10));
        let seen = load.seen();
        let near = window * 9 / 10..=512.min(window * 11 / 10);
        assert!(seen.first && near.contains(&u64::from(seen.requests)), "{clients} clients: {seen:?}");
    }
}

/// Cache hits do not count as device time.
#[test]
fn cache_hits_are_distinguished_from_device_time() {
    let line = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 1_000 };
    let config = CoreConfig { cost: CostModel::new(line, line), ..data() };
    let mut load = Load::new(&with_table(NEAR_AND_FAR), config, 8);
    load.run(600, &|client, n| (0, (client * 1_000 + n) * 4096), &|_, batch| {
        if batch.extent.lane_offset / 4096 % 2 == 0 { 10_000_000 } else { 50_000 }
    });
    let seen = load.seen();
    assert!((0.3..0.7).contains(&seen.device_share), "{seen:?}");
    assert_eq!(load.core.chosen().unwrap().device, Some(DeviceClass::Disk));
}

const NEAR_AND_FAR: &str = "version = 1\n\
    [[rule]]\nname = \"streams\"\nsequential = { from = 0.5 }\n\
    choice = [{ policy = \"hbrr\", makespan = 0.4 }, { policy = \"sjf\", makespan = 0.6 }, { policy = \"fifo\" }]\n\
    [[rule]]\nname = \"others\"\nchoice = [{ policy = \"fifo\" }]\n";

fn stream(client: u64, n: u64) -> (u32, u64) {
    (0, (client * 100_000 + n) * 4096)
}

fn scattered(client: u64, n: u64) -> (u32, u64) {
    (0, (client * 7919 + n * 104_729) % 65_536 * 4096)
}

#[test]
fn switches_follow_what_is_observed() {
    let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 16);
    assert_eq!(load.core.acting().0.name, "fifo", "before anything is observed");
    load.run(400, &stream, &millis(1));
    let chosen = load.core.chosen().unwrap();
    assert_eq!((chosen.policy.name.as_str(), chosen.rule.as_str(), chosen.switches), ("sjf", "streams", 1));
    assert_eq!(chosen.expected_gain, 0.6);
    let others: Vec<_> = chosen.alternatives.iter().map(|a| a.policy.as_str()).collect();
    assert_eq!(others, ["hbrr", "fifo"]);
    // One different window is not enough.
    load.run(70, &scattered, &millis(1));
    assert_eq!((load.core.acting().0.name.as_str(), load.core.acting().1), ("sjf", 1));
    load.run(400, &scattered, &millis(1));
    assert_eq!((load.core.acting().0.name.as_str(), load.core.acting().1), ("fifo", 2));
    // After a pause, the first window is.
    load.now += Nanos::from_millis(1_000);
    load.run(160, &stream, &millis(1));
    assert_eq!((load.core.acting().0.name.as_str(), load.core.acting().1), ("sjf", 3));
}

/// However few requests the last window of a phase had, the first window of the next one decides.
#[test]
fn a_phase_is_recognised_wherever_a_pause_cuts_a_window() {
    for more in (0..64).step_by(4) {
        let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 16);
        load.run(300 + more, &scattered, &millis(1));
        assert_eq!(load.core.acting().0.name, "fifo");
        load.now += Nanos::from_millis(1_000);
        load.run(40, &stream, &millis(1));
        assert_eq!(load.core.acting().0.name, "sjf", "after {more} more requests");
    }
}

/// After a pause nothing is known of the new phase, unless the last two were alike.
#[test]
fn after_a_pause_the_rule_for_nothing_observed_acts() {
    let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 16);
    for (phase, expected) in ["fifo", "fifo", "sjf", "sjf"].into_iter().enumerate() {
        load.run(10, &stream, &millis(1));
        assert_eq!(load.core.acting().0.name, expected, "at the start of phase {phase}");
        load.run(400, &stream, &millis(1));
        assert_eq!(load.core.acting().0.name, "sjf", "in phase {phase}");
        load.now += Nanos::from_millis(1_000);
    }
    // A different phase ends under another rule, and then nothing is known again.
    load.run(400, &scattered, &millis(1));
    load.now += Nanos::from_millis(1_000);
    load.run(400, &stream, &millis(1));
    load.now += Nanos::from_millis(1_000);
    load.run(10, &stream, &millis(1));
    assert_eq!(load.core.acting().0.name, "fifo");
}

/// Applications whose phases take turns find what theirs ended under, from the first request on.
#[test]
fn a_phase_begins_under_what_the_last_one_of_the_application_ended_under() {
    for named in [true, false] {
        let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 16);
        let key = |job: u32| if named { 1000 + u64::from(job) } else { 0 };
        (1..=3).for_each(|job| load.core.names_mut().name_job(JobId(job), key(job)));
        for phase in 0..8 {
            let streams = phase % 2 == 0;
            load.job = 1 + u32::from(!streams);
            let place: &dyn Fn(u64, u64) -> (u32, u64) = if streams { &stream } else { &scattered };
            load.run(10, place, &millis(1));
            // `fifo` is what nothing observed asks for, too.
            let expected = if named && streams && phase >= 2 { "sjf" } else { "fifo" };
            assert_eq!(load.core.acting().0.name, expected, "{named}: at the start of phase {phase}");
            load.run(400, place, &millis(1));
            assert_eq!(load.core.acting().0.name, if streams { "sjf" } else { "fifo" }, "{named}: in phase {phase}");
            load.now += Nanos::from_millis(1_000);
        }
        // Nothing is known of another.
        load.job = 3;
        load.run(10, &stream, &millis(1));
        assert_eq!(load.core.acting().0.name, "fifo");
    }
}

/// Within a phase a small expected gain is worth no switch; after a pause the better one acts.
#[test]
fn a_small_expected_gain_decides_at_the_start_of_a_phase_only() {
    let table = "version = 1\n[[rule]]\nname = \"streams\"\nsequential = { from = 0.5 }\n\
        choice = [{ policy = \"sjf\", makespan = 0.50 }, { policy = \"hbrr\", makespan = 0.48 }]\n\
        [[rule]]\nname = \"others\"\nchoice = [{ policy = \"hbrr\" }]\n";
    let mut load = Load::new(&with_table(table), data(), 16);
    load.run(300, &scattered, &millis(1));
    load.run(600, &stream, &millis(1));
    assert_eq!((load.core.acting().0.name.as_str(), load.core.acting().1), ("hbrr", 0));
    load.now += Nanos::from_millis(1_000);
    load.run(100, &stream, &millis(1));
    assert_eq!((load.core.acting().0.name.as_str(), load.core.acting().1), ("sjf", 1));
}

/// `sjf` is expected to gain but measures worse than its predecessor.
#[test]
fn a_choice_that_yields_less_is_undone_and_remembered() {
    let mut load = Load::new(&with_table(NEAR_AND_FAR), data(), 16);
    let service = |acting: &str, _: &crate::Batch| if acting == "sjf" { 3_000_000 } else { 1_000_000 };
    // No pause before it, so that there is a rate to compare with.
    load.run(300, &scattered, &service);
    load.run(2_000, &stream, &service);
    let chosen = load.core.chosen().unwrap();
    assert_eq!((chosen.policy.name.as_str(), chosen.undone), ("fifo", vec!["sjf".to_string()]));
    assert_eq!(chosen.switches, 2);
    // A minute later it is tried again, and undone again.
    load.run(70_000, &stream, &service);
    let chosen = load.core.chosen().unwrap();
    assert_eq!((chosen.policy.name.as_str(), chosen.switches), ("fifo", 4));
}

/// The same table under the same load chooses by objective.
#[test]
fn the_objective_decides() {
    let table = NEAR_AND_FAR.replace("makespan = 0.4", "makespan = 0.4, share = 0.9");
    let mut load = Load::new(&with_table(&table).with("objective", "share"), data(), 16);
    load.run(400, &stream, &millis(1));
    assert_eq!(load.core.acting().0.name, "hbrr");
}

/// `cargo test --release -p impresario-sched -- --ignored choosing_costs --nocapture` prints it.
#[test]
#[ignore = "a measurement"]
fn choosing_costs_some_tens_of_nanoseconds() {
    let never = "version = 1\n[[rule]]\nname = \"never\"\nreads = { from = 9.0 }\nchoice = [{ policy = \"fifo\" }]\n\
                 [[rule]]\nname = \"always\"\nchoice = [{ policy = \"fifo\" }]\n";
    let ns = |spec: &PolicySpec| {
        let mut core = Core::new(CoreConfig { statistics: false, ..data() }, spec).unwrap();
        let (requests, start) = (4_000_000_u64, std::time::Instant::now());
        for n in 0..requests {
            let (now, client) = (Nanos(n * 100_000), (n % 64) as u32);
            let offset = n.wrapping_mul(0x9e37_79b9) % (1 << 20) * 4096;
            let extent = Extent {
                file: FileId(client / 8),
                lane: LaneId(0),
                file_offset: offset,
                lane_offset: offset,
                len: 4096,
            };
            core.push(now, &Request { client: ClientId(client), ..Request::new(Op::Read, extent) }).unwrap();
            let Next::Dispatch(batch) = core.next(now) else { panic!("a lone request goes at once") };
            core.event(now, Event::Completed(Completion::of(&batch, now, now + Nanos(50_000))));
        }
        start.elapsed().as_secs_f64() * 1e9 / requests as f64
    };
    let fifo = PolicySpec::named("fifo");
    for _ in 0..3 {
        let (without, with) = (ns(&fifo), ns(&with_table(never)));
        println!(
            "{without:.1} ns a request under fifo, {with:.1} ns under auto that acts as fifo: {:.1} ns",
            with - without
        );
    }
}
