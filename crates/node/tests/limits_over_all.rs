//! A limit over several servers, by real schedulers and the real exchange of what they granted, in virtual time: its error.

use impresario_base::random::Random;
use impresario_node::grants::{Grant, Grants};
use impresario_sched::limited::Limited;
use impresario_sched::{
    Batch, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Nanos, Next, Op,
    PolicySpec, Request,
};

/// Bytes per second of the job, over all servers.
const RATE: f64 = 20e6;
const REQUEST_BYTES: u64 = 64 << 10;
/// How long a request takes, so that each server could grant four times the whole limit.
const SERVICE: Nanos = Nanos::from_micros(800);
/// Requests that clients keep at a server that they use.
const QUEUED: u32 = 16;
const EXCHANGE_MS: u64 = 100;
/// The largest error of the limit that is allowed.
const ERROR_MAX: f64 = 0.05;

struct Server {
    core: Core,
    grants: Grants,
    flying: Option<(Nanos, Batch)>,
    queued: u32,
    next: u64,
    served_bytes: u64,
    /// Clients use it at present.
    is_used: bool,
}

impl Server {
    fn new(me: usize, servers: usize, spec: &PolicySpec) -> Server {
        let line = LinearCost { fixed: SERVICE, ps_per_byte: 0 };
        let config = CoreConfig { cost: CostModel::new(line, line), ..CoreConfig::single_lane(64) };
        let (core, grants) = (Core::new(config, spec).unwrap(), Grants::new(me, servers));
        Server { core, grants, flying: None, queued: 0, next: 0, served_bytes: 0, is_used: false }
    }

    fn go(&mut self, now: Nanos) {
        if let Some((finished, batch)) = self.flying.take_if(|(finished, _)| *finished <= now) {
            self.served_bytes += batch.extent.len;
            let completion = Completion::of(&batch, Nanos(finished.0 - SERVICE.0), finished);
            self.core.event(now, Event::Completed(completion));
        }
        while self.is_used && self.queued < QUEUED {
            let lane_offset = self.next * 2 * REQUEST_BYTES;
            let (file, lane) = (FileId(1), LaneId(0));
            let extent = Extent { file, lane, file_offset: lane_offset, lane_offset, len: REQUEST_BYTES };
            let request = Request { job: JobId(1), arrival: now, ..Request::new(Op::Read, extent) };
            self.core.push(now, &request).unwrap();
            (self.queued, self.next) = (self.queued + 1, self.next + 1);
        }
        if self.flying.is_none()
            && let Next::Dispatch(batch) = self.core.next(now)
        {
            self.queued -= batch.parts.len() as u32;
            self.flying = Some((now + SERVICE, batch));
        }
    }

    fn report(&mut self, now: Nanos) -> Vec<Grant> {
        let grant = |Limited { rule, key, granted, waiting, .. }| Grant { rule, key, granted, waiting };
        self.core.limited(now).0.into_iter().map(grant).collect()
    }
}

/// Servers whose clients come and go, but are always at one of them at least; and a network that loses some reports.
struct World {
    servers: Vec<Server>,
    random: Random,
    lost_one_in: u64,
    /// How long clients stay, s.
    change_s: u64,
}

impl World {
    fn new(count: usize, seed: u64, lost_one_in: u64, change_s: u64) -> World {
        let rules = format!("r: job=1 {{bytes_per_s={RATE}, over=all}}");
        let spec = PolicySpec::named("tbf").with("rules", rules);
        let servers = (0..count).map(|me| Server::new(me, count, &spec)).collect();
        World { servers, random: Random::new(seed), lost_one_in, change_s }
    }

    fn served(&self) -> f64 {
        self.servers.iter().map(|server| server.served_bytes as f64).sum()
    }

    fn change_clients(&mut self) {
        let count = self.servers.len() as u64;
        self.servers.iter_mut().for_each(|server| server.is_used = self.random.below(2) == 0);
        let one = self.random.below(count) as usize;
        self.servers[one].is_used = true;
    }

    fn exchange(&mut self, now: Nanos, me: usize) {
        for other in (0..self.servers.len()).filter(|other| *other != me) {
            if self.lost_one_in == 0 || self.random.below(self.lost_one_in) > 0 {
                let report = self.servers[other].report(now);
                self.servers[me].grants.heard(now, other, report, true);
            }
        }
        let server = &mut self.servers[me];
        let portions = server.grants.step(now, &server.core.limited(now).0);
        server.core.set_portions(now, portions);
    }

    /// Runs for so many seconds; gives the part of the limit that was granted in each window of that length, after the first.
    fn windows(&mut self, seconds: u64, window_s: u64) -> Vec<f64> {
        let (mut windows, mut before) = (Vec::new(), 0.0);
        for step in 0..seconds * 10_000 {
            // Steps of a tenth of a millisecond.
            let now = Nanos(step * 100_000);
            if step % (self.change_s * 10_000) == 0 {
                self.change_clients();
            }
            self.servers.iter_mut().for_each(|server| server.go(now));
            for me in 0..self.servers.len() {
                // Their steps are not at the same time.
                if step % (EXCHANGE_MS * 10) == (me as u64 * 370) % (EXCHANGE_MS * 10) {
                    self.exchange(now, me);
                }
            }
            if step > 0 && step % (window_s * 10_000) == 0 {
                let served = self.served();
                windows.push((served - before) / RATE / window_s as f64);
                before = served;
            }
        }
        windows.drain(..1);
        windows
    }
}

#[test]
fn the_error_of_a_limit_over_all_servers_is_below_five_percent() {
    let (mut least, mut most) = (f64::MAX, 0.0_f64);
    for (seed, (servers, lost_one_in, change_s)) in
        [(2, 0, 7), (2, 3, 7), (4, 0, 7), (4, 5, 7), (8, 3, 11), (16, 0, 11)].into_iter().enumerate()
    {
        let mut world = World::new(servers, seed as u64 + 1, lost_one_in, change_s);
        for (n, part) in world.windows(100, 20).into_iter().enumerate() {
            (least, most) = (least.min(part), most.max(part));
            let is_exact = (1.0 - ERROR_MAX..=1.0 + ERROR_MAX).contains(&part);
            assert!(is_exact, "{servers} servers, one report of {lost_one_in} lost, window {n}: {part:.4}");
        }
    }
    println!("the limit was granted to {least:.4} to {most:.4} in windows of 20 s");
}
