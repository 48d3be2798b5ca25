//! Limits over several servers: which portion of each rate a server may grant.
//!
//! The servers ask one another at short intervals what they granted so far and how many requests a limit withholds. From
//! that each computes its own portion; there is no leader, and no server waits for a message.
//!
//! - **Nothing is granted twice.** Each server keeps for every limit the level of a bucket that stands for the whole
//!   limit: it fills at the rate and loses what all servers report. Below its middle the portions shrink, above it they
//!   grow, so the sum over all servers follows the rate, however much the portions of a moment were wrong.
//! - **A server that is silent keeps its even part.** It takes no more than that itself while it hears from no peer, so
//!   a limit holds through a partition; what it granted meanwhile is settled when it answers again.
//! - **What is left goes where it is wanted**: servers without waiting requests keep what they use, the others share the
//!   rest by the requests that wait.

use std::collections::BTreeMap;

use impresario_sched::Nanos;
use impresario_sched::limited::{Limited, Portions};

/// A server that has not answered for this long is silent.
pub const SILENT_AFTER: Nanos = Nanos::from_millis(1000);
/// A level is brought back to the middle in about this time.
const SETTLE_S: f64 = 1.0;
/// A level is at most this far above the middle, seconds of the rate: what was not used is lost.
const UNUSED_MAX_S: f64 = 0.3;
/// A level is at most this far below the middle, seconds of the rate: what was granted too much.
const EXCEEDED_MAX_S: f64 = 2.0;
/// Portions are computed from what was granted over about this time.
const RECENT_S: f64 = 0.5;
/// A limit unused for this long is forgotten.
const FORGET_AFTER: Nanos = Nanos::from_millis(60_000);
/// Maximum limits known; what is beyond keeps its even part.
const LIMITS_MAX: usize = 16 << 10;

/// What one server says of a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Name of the rule.
    pub rule: String,
    /// The job, user, client or file that it is about; `None`: the whole rule.
    pub key: Option<u64>,
    /// Granted so far, in units of the limit; a smaller number than before is one that began anew.
    pub granted: u64,
    /// Requests that the limit withholds.
    pub waiting: u32,
}

/// What a server granted of one limit, as far as it is known.
#[derive(Clone, Copy, Default, Debug)]
struct Share {
    /// The last report; `None` before the first.
    granted: Option<u64>,
    waiting: u32,
    /// Units per second, lately.
    pace: f64,
    /// Of a silent server: what it was taken to grant since its last report.
    supposed: f64,
}

#[derive(Debug)]
struct Whole {
    /// Units per second.
    rate: f64,
    /// Units above (below: less than 0) the middle.
    level: f64,
    /// By server.
    shares: Vec<Share>,
    used: Nanos,
}

#[derive(Clone, Copy, Debug, Default)]
struct Server {
    heard: Option<Nanos>,
    /// Its last report named all its limits.
    is_whole: bool,
}

/// The limits over all servers as one of them knows them.
#[derive(Debug)]
pub struct Grants {
    me: usize,
    servers: Vec<Server>,
    wholes: BTreeMap<(String, Option<u64>), Whole>,
    stepped: Option<Nanos>,
}

impl Grants {
    /// For the server `me` of `servers` (at least 1).
    pub fn new(me: usize, servers: usize) -> Grants {
        Grants { me, servers: vec![Server::default(); servers.max(me + 1)], wholes: BTreeMap::new(), stepped: None }
    }

    /// The portions before anything is known: an even part.
    pub fn even(&self) -> Portions {
        Portions { others: 1.0 / self.servers.len() as f64, listed: Vec::new() }
    }

    fn is_heard(&self, server: usize, now: Nanos) -> bool {
        server == self.me || self.servers[server].heard.is_some_and(|at| now.since(at) < SILENT_AFTER)
    }

    /// Another server answered; `is_whole`: with all its limits that are in use.
    pub fn heard(&mut self, now: Nanos, server: usize, grants: Vec<Grant>, is_whole: bool) {
        if server == self.me || server >= self.servers.len() {
            return;
        }
        self.servers[server] = Server { heard: Some(now), is_whole };
        if is_whole {
            self.wholes.values_mut().for_each(|whole| whole.shares[server].waiting = 0);
        }
        for Grant { rule, key, granted, waiting } in grants {
            // Of limits that are not in use here nothing need be known until they are.
            if let Some(whole) = self.wholes.get_mut(&(rule, key)) {
                whole.report(server, granted, waiting);
                whole.used = now;
            }
        }
    }

    /// Takes what this server granted, and computes its portions. To be called at short intervals (50 to 500 ms).
    pub fn step(&mut self, now: Nanos, limited: &[Limited]) -> Portions {
        let elapsed_s = self.stepped.replace(now).map_or(0.0, |last| now.since(last).as_secs_f64());
        let (me, servers) = (self.me, self.servers.len());
        for limit in limited.iter().filter(|limit| limit.over_all && limit.rate > 0.0) {
            let name = (limit.rule.clone(), limit.key);
            if self.wholes.len() >= LIMITS_MAX && !self.wholes.contains_key(&name) {
                continue;
            }
            let new = || Whole { rate: limit.rate, level: 0.0, shares: vec![Share::default(); servers], used: now };
            let whole = self.wholes.entry(name).or_insert_with(new);
            whole.rate = limit.rate;
            whole.used = now;
            whole.report(me, limit.granted, limit.waiting);
        }
        let heard: Vec<bool> = (0..servers).map(|server| self.is_heard(server, now)).collect();
        let is_whole: Vec<bool> = (0..servers).map(|s| s == me || self.servers[s].is_whole).collect();
        self.wholes.retain(|_, whole| now.since(whole.used) < FORGET_AFTER);
        let listed = self.wholes.iter_mut().map(|((rule, key), whole)| {
            let known: Vec<bool> =
                (0..servers).map(|s| heard[s] && (is_whole[s] || whole.shares[s].granted.is_some())).collect();
            (rule.clone(), *key, whole.portion(me, elapsed_s, &known))
        });
        let listed = listed.collect();
        Portions { listed, ..self.even() }
    }
}

impl Whole {
    /// A server reports what it granted.
    fn report(&mut self, server: usize, granted: u64, waiting: u32) {
        let share = &mut self.shares[server];
        let more = match share.granted.replace(granted) {
            Some(before) if granted >= before => (granted - before) as f64,
            // It began anew: since then it granted this much.
            Some(_) => granted as f64,
            // What it granted before this limit was known here is over.
            None => 0.0,
        };
        share.waiting = waiting;
        // Settled: what it was taken to grant against what it granted.
        self.level -= more - share.supposed;
        share.supposed = 0.0;
        share.pace += more / RECENT_S;
    }

    /// This server's portion of the rate, after `elapsed_s` since the last step.
    fn portion(&mut self, me: usize, elapsed_s: f64, known: &[bool]) -> f64 {
        let even = self.rate / self.shares.len() as f64;
        let decay = (-elapsed_s / RECENT_S).exp();
        self.level += self.rate * elapsed_s;
        for (share, known) in self.shares.iter_mut().zip(known) {
            share.pace *= decay;
            if !known {
                share.supposed += even * elapsed_s;
                self.level -= even * elapsed_s;
            }
        }
        self.level = self.level.clamp(-self.rate * EXCEEDED_MAX_S, self.rate * UNUSED_MAX_S);
        // The whole that is to be granted now: the rate, corrected towards the middle of the level.
        let correction = (self.level / (self.rate * SETTLE_S)).clamp(-0.5, 0.25);
        let whole = self.rate * (1.0 + correction);
        let silent = known.iter().filter(|known| !**known).count() as f64;
        let others = || self.shares.iter().zip(known).enumerate().filter(|(s, (_, known))| *s != me && **known);
        let content = others().filter(|(_, (share, _))| share.waiting == 0).map(|(_, (share, _))| share.pace);
        let rest = (whole - silent * even - content.sum::<f64>()).max(0.0);
        let waiting = others().map(|(_, (share, _))| f64::from(share.waiting)).sum::<f64>();
        let mine = f64::from(self.shares[me].waiting.max(1));
        // Without waiting requests of its own it may begin with what it would have once some wait. A server that gets
        // requests can always grant a little at once.
        let granted = (rest * mine / (mine + waiting)).max(even / 8.0);
        (granted / self.rate).min(1.25)
    }
}

#[cfg(test)]
mod tests {
    use impresario_base::Random;
    use impresario_sched::limited::LimitUnit;
    use impresario_sched::{
        Batch, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Next, Op,
        PolicySpec, Request,
    };

    use super::*;

    const RATE: f64 = 1e6;
    const STEP_MS: u64 = 100;

    /// A server in the simulation: a source of requests, and a bucket of a tenth of a second at its portion.
    struct Node {
        grants: Grants,
        portion: f64,
        tokens: f64,
        /// Bytes that wait.
        backlog: f64,
        /// Bytes per second that arrive.
        demand: f64,
        granted: u64,
        /// It cannot be asked, and cannot ask.
        silent: bool,
    }

    struct World {
        nodes: Vec<Node>,
        random: Random,
        now_ms: u64,
        /// One question in this many is lost.
        lost_one_in: u64,
    }

    const REQUEST: f64 = 4096.0;

    impl World {
        fn new(nodes: usize, seed: u64) -> World {
            let node = |me| {
                let grants = Grants::new(me, nodes);
                let portion = grants.even().others;
                Node { grants, portion, tokens: 0.0, backlog: 0.0, demand: 0.0, granted: 0, silent: false }
            };
            World { nodes: (0..nodes).map(node).collect(), random: Random::new(seed), now_ms: 0, lost_one_in: 0 }
        }

        fn limited(node: &Node) -> Vec<Limited> {
            let waiting =
                if node.backlog >= REQUEST && node.tokens <= 0.0 { (node.backlog / REQUEST) as u32 } else { 0 };
            vec![Limited {
                rule: "r".into(),
                key: None,
                unit: LimitUnit::Bytes,
                rate: RATE,
                over_all: true,
                fraction: node.portion,
                granted: node.granted,
                waiting: waiting.min(64),
            }]
        }

        /// Runs for some time; returns what was granted by each.
        fn run(&mut self, ms: u64) -> Vec<u64> {
            let before: Vec<u64> = self.nodes.iter().map(|node| node.granted).collect();
            for _ in 0..ms {
                self.now_ms += 1;
                for node in &mut self.nodes {
                    // Synchronous clients: what waits is bounded.
                    node.backlog = (node.backlog + node.demand / 1e3).min(64.0 * REQUEST);
                    node.tokens = (node.tokens + RATE * node.portion / 1e3).min(RATE * node.portion / 10.0);
                    while node.backlog >= REQUEST && node.tokens > 0.0 {
                        node.tokens -= REQUEST;
                        node.backlog -= REQUEST;
                        node.granted += REQUEST as u64;
                    }
                }
                // The servers' steps are not at the same time.
                for me in 0..self.nodes.len() {
                    if self.now_ms % STEP_MS == (me as u64 * 37) % STEP_MS {
                        self.step(me);
                    }
                }
            }
            self.nodes.iter().zip(before).map(|(node, before)| node.granted - before).collect()
        }

        fn step(&mut self, me: usize) {
            let now = Nanos::from_millis(self.now_ms);
            for peer in 0..self.nodes.len() {
                let lost = self.lost_one_in > 0 && self.random.below(self.lost_one_in) == 0;
                if peer == me || self.nodes[peer].silent || self.nodes[me].silent || lost {
                    continue;
                }
                let limited = World::limited(&self.nodes[peer]);
                let grants = limited.into_iter().map(|Limited { rule, key, granted, waiting, .. }| Grant {
                    rule,
                    key,
                    granted,
                    waiting,
                });
                let grants = grants.collect();
                self.nodes[me].grants.heard(now, peer, grants, true);
            }
            let limited = World::limited(&self.nodes[me]);
            let node = &mut self.nodes[me];
            let portions = node.grants.step(now, &limited);
            node.portion = portions.listed.first().map_or(portions.others, |(_, _, portion)| *portion);
        }
    }

    fn within(granted: &[u64], s: f64, low: f64, high: f64, what: &str) {
        let rate = granted.iter().sum::<u64>() as f64 / s / RATE;
        assert!((low..=high).contains(&rate), "{what}: {rate:.3} of the rate; {granted:?}");
    }

    #[test]
    fn the_whole_rate_is_granted_wherever_the_requests_are() {
        for nodes in [1, 2, 4, 16] {
            let mut world = World::new(nodes, 7);
            // All on one server.
            world.nodes[0].demand = 5.0 * RATE;
            world.run(3_000);
            within(&world.run(10_000), 10.0, 0.95, 1.05, "one server");
            // Then on all.
            world.nodes.iter_mut().for_each(|node| node.demand = 5.0 * RATE);
            within(&world.run(10_000), 10.0, 0.9, 1.1, "the change to all");
            let granted = world.run(10_000);
            within(&granted, 10.0, 0.95, 1.05, "all servers");
            let (least, most) = (granted.iter().min().unwrap(), granted.iter().max().unwrap());
            assert!(most * 10 <= least * 13, "{nodes} servers with equal demand: {granted:?}");
            // A server that asks for less than its part gets it.
            if nodes > 1 {
                world.nodes[0].demand = RATE / nodes as f64 / 2.0;
                world.run(3_000);
                let granted = world.run(10_000);
                within(&granted, 10.0, 0.95, 1.05, "one with less");
                let asked = world.nodes[0].demand * 10.0;
                assert!(granted[0] as f64 >= 0.95 * asked, "{nodes} servers, the modest one: {granted:?} of {asked}");
            }
        }
    }

    #[test]
    fn demand_that_comes_and_goes_does_not_exceed_the_rate() {
        for seed in 0..40 {
            let mut world = World::new(2 + seed as usize % 5, seed);
            world.lost_one_in = [0, 3, 10][seed as usize % 3];
            let (mut total, mut last, mut enough) = (0, 0, 0);
            for second in 0..120 {
                for n in 0..world.nodes.len() {
                    if world.random.below(4) == 0 {
                        world.nodes[n].demand = [0.0, 0.1, 1.0, 4.0][world.random.below(4) as usize] * RATE;
                    }
                }
                let asked: f64 = world.nodes.iter().map(|node| node.demand).sum();
                let granted: u64 = world.run(1_000).iter().sum();
                total += granted;
                // Over any ten seconds, at the ends of seconds: never much more than the rate.
                last = if second % 10 == 0 { granted } else { last + granted };
                assert!(last as f64 <= 10.0 * RATE * 1.05 + 0.3 * RATE, "seed {seed}: {last} in ten seconds");
                enough += u64::from(asked >= RATE);
            }
            assert!(total as f64 <= 120.0 * RATE * 1.01, "seed {seed}: {total} in two minutes");
            assert!(total as f64 >= 0.9 * enough as f64 * RATE, "seed {seed}: {total} with demand in {enough} seconds");
        }
    }

    #[test]
    fn a_limit_holds_while_servers_are_silent_and_afterwards() {
        let mut world = World::new(4, 1);
        world.nodes.iter_mut().for_each(|node| node.demand = 5.0 * RATE);
        world.run(5_000);
        world.nodes[3].silent = true;
        world.run(2_000);
        let granted = world.run(20_000);
        within(&granted, 20.0, 0.95, 1.05, "a partition");
        assert!((granted[3] as f64 / 20.0 / RATE - 0.25).abs() < 0.02, "it keeps its even part: {granted:?}");
        // Dead, its part is kept for it.
        world.nodes[3].demand = 0.0;
        world.run(2_000);
        within(&world.run(20_000), 20.0, 0.7, 0.8, "a dead server");
        world.nodes[3].silent = false;
        world.run(5_000);
        within(&world.run(10_000), 10.0, 0.95, 1.05, "it is back");
        // All alone.
        world.nodes.iter_mut().for_each(|node| (node.silent, node.demand) = (true, 5.0 * RATE));
        world.run(2_000);
        within(&world.run(20_000), 20.0, 0.95, 1.05, "no server hears another");
    }

    #[test]
    fn a_server_that_begins_anew_does_not_confuse_the_others() {
        let mut world = World::new(3, 2);
        world.nodes.iter_mut().for_each(|node| node.demand = 5.0 * RATE);
        world.run(5_000);
        for _ in 0..5 {
            let grants = Grants::new(1, 3);
            let node = &mut world.nodes[1];
            (node.portion, node.granted, node.tokens) = (grants.even().others, 0, 0.0);
            node.grants = grants;
            world.run(2_000);
        }
        within(&world.run(10_000), 10.0, 0.95, 1.05, "after restarts");
    }

    /// A server with a policy, above a device that answers late and takes much less time than estimated.
    struct Estimating {
        core: Core,
        grants: Grants,
        flying: Option<(Nanos, Batch)>,
        queued: u32,
        served: u32,
    }

    const SERVICE: Nanos = Nanos::from_millis(4);

    impl Estimating {
        fn new(me: usize, spec: &PolicySpec) -> Estimating {
            let line = LinearCost { fixed: Nanos::from_millis(18), ps_per_byte: 0 };
            let config = CoreConfig { cost: CostModel::new(line, line), ..CoreConfig::single_lane(16) };
            let core = Core::new(config, spec).unwrap();
            Estimating { core, grants: Grants::new(me, 2), flying: None, queued: 0, served: 0 }
        }

        fn go(&mut self, now: Nanos) {
            if let Some((finished, batch)) = self.flying.take_if(|(finished, _)| *finished <= now) {
                let completion = Completion::of(&batch, finished.since(SERVICE), finished);
                self.core.event(now, Event::Completed(completion));
                self.served += 1;
            }
            while self.queued < 4 {
                let lane_offset = now.0 << 8 | u64::from(self.queued) << 13;
                let extent =
                    Extent { file: FileId(1), lane: LaneId(0), file_offset: lane_offset, lane_offset, len: 4096 };
                let request = Request { job: JobId(1), arrival: now, ..Request::new(Op::Read, extent) };
                self.core.push(now, &request).unwrap();
                self.queued += 1;
            }
            if self.flying.is_none()
                && let Next::Dispatch(batch) = self.core.next(now)
            {
                self.queued -= batch.parts.len() as u32;
                self.flying = Some((now + Nanos::from_millis(60), batch));
            }
        }
    }

    /// Estimates of device time are corrected when batches end. That is no restart, and the whole limit is granted.
    #[test]
    fn corrected_estimates_do_not_cost_a_limit() {
        const DEVICE: f64 = 0.05;
        let spec = PolicySpec::named("tbf").with("rules", format!("r: job=1 {{device={DEVICE}, over=all}}"));
        let mut servers: Vec<Estimating> = (0..2).map(|me| Estimating::new(me, &spec)).collect();
        let mut before = 0;
        for ms in 0..40_000 {
            let now = Nanos::from_millis(ms);
            servers.iter_mut().for_each(|server| server.go(now));
            for me in (0..2).filter(|me| ms % STEP_MS == *me as u64 * 37) {
                let grant = |Limited { rule, key, granted, waiting, .. }| Grant { rule, key, granted, waiting };
                let others = servers[1 - me].core.limited(now).0.into_iter().map(grant).collect();
                let server = &mut servers[me];
                server.grants.heard(now, 1 - me, others, true);
                let portions = server.grants.step(now, &server.core.limited(now).0);
                server.core.set_portions(now, portions);
            }
            if ms == 10_000 {
                before = servers.iter().map(|server| server.served).sum();
            }
        }
        let served = servers.iter().map(|server| server.served).sum::<u32>() - before;
        let rate = f64::from(served) * SERVICE.as_secs_f64() / 30.0 / DEVICE;
        assert!((0.9..=1.1).contains(&rate), "{rate:.3} of the rate; {served} requests");
    }

    #[test]
    fn reports_that_are_cut_off_or_nonsense_keep_even_parts_and_bounds() {
        let mut grants = Grants::new(0, 2);
        let now = Nanos::from_millis(1_000);
        let limit = |granted| Limited {
            rule: "r".into(),
            key: Some(7),
            unit: LimitUnit::Requests,
            rate: 100.0,
            over_all: true,
            fraction: 1.0,
            granted,
            waiting: 5,
        };
        assert_eq!(grants.step(now, &[]).listed, []);
        grants.step(now, &[limit(0)]);
        // Its report does not name the limit and is not whole: the other one may use its part.
        for ms in 1..30 {
            grants.heard(Nanos::from_millis(1000 + ms * 100), 1, Vec::new(), false);
            let portions = grants.step(Nanos::from_millis(1000 + ms * 100), &[limit(ms * 5)]);
            assert!((0.4..0.6).contains(&portions.listed[0].2), "{portions:?}");
        }
        // Nonsense is bounded.
        for granted in [u64::MAX, 0, u64::MAX] {
            let report = Grant { rule: "r".into(), key: Some(7), granted, waiting: u32::MAX };
            grants.heard(now, 1, vec![report; 3], true);
            grants.heard(now, 99, Vec::new(), true);
            let portion = grants.step(Nanos(0), &[limit(u64::MAX)]).listed[0].2;
            assert!(portion > 0.0 && portion <= 1.25, "{portion}");
        }
        let unknown = (0..100_000).map(|key| Grant { rule: "x".into(), key: Some(key), granted: 1, waiting: 1 });
        grants.heard(now, 1, unknown.collect(), true);
        assert_eq!(grants.wholes.len(), 1, "limits that are not in use here are not kept");
        grants.step(Nanos::from_millis(200_000), &[]);
        assert!(grants.wholes.is_empty(), "unused limits are forgotten");
    }
}
