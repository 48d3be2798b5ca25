//! What `auto` observes about arriving requests: a few averages over a window, in some tens of kilobytes and some tens of
//! nanoseconds per request.
//!
//! A window is 64 requests, extended until 16 of them followed an earlier request of the same client in the same file
//! (at most to 256, or two for each client where that is more, and never past 512); the first window of a phase needs half
//! as many (32, 8, 128), so that short phases are recognised in time.
//! Applications, files and clients also count while they have requests queued: a scheduler that serves one application
//! at a time must not hide the others. All tables have a fixed size and entries displace one another, so nothing grows
//! with files or clients; counts are estimates (linear counting), within a tenth up to some thousand.
//!
//! A pause (nothing outstanding for 200 ms) starts a new phase: observations from before it are not mixed with later
//! ones.

use impresario_base::random::mix;
use serde::{Deserialize, Serialize};

use crate::cost::CostModel;
use crate::policy::{Done, View};
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// Requests of a window.
const WINDOW: u32 = 64;
/// … of which this many need a predecessor, or the window is extended
const FOLLOWERS: u32 = 16;
/// … up to this number of requests, or two for each client.
const WINDOW_MAX: u32 = 256;
/// A window is full after so many requests even if not every client has come twice: a first decision must not wait longer.
const WINDOW_BOUND: u32 = 512;
/// A pause that ends a phase of I/O.
const PAUSE: Nanos = Nanos::from_millis(200);
/// Requests since the phase began below which a pause does not end it.
const PHASE_MIN: u32 = 16;
/// Requests outstanding at least that make a round.
const ROUND_MIN: u32 = 8;
/// A batch faster than the cost model by this factor was served by a cache.
const HIT_DIVISOR: u64 = 8;

/// The averages over one window.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Observation {
    /// Requests in the window.
    pub requests: u32,
    /// The first window since the start or a pause.
    pub first: bool,
    /// Share of reads, 0 to 1.
    pub reads: f64,
    /// Applications with requests (estimate).
    pub jobs: f64,
    /// Files in use (estimate).
    pub files: f64,
    /// Clients with requests (estimate).
    pub clients: f64,
    /// Mean request size, bytes.
    pub request_bytes: f64,
    /// Share of requests that start where the client's previous one in the file ended, among those with a predecessor.
    pub sequential: f64,
    /// Share of requests that do not continue their client's stream but touch one of the last two rounds (twice the requests
    /// outstanding, 16 at least) in their file, whoever sent it.
    pub touching: f64,
    /// Distance of a request from the end of the client's previous one in the file, in lane offsets; geometric mean,
    /// bytes.
    pub distance_bytes: f64,
    /// Mean number of outstanding requests at an arrival.
    pub outstanding: f64,
    /// Share of batches served by the device rather than by a cache.
    pub device_share: f64,
}

/// A property of an observation that table conditions can name.
pub type Feature = (&'static str, fn(&Observation) -> f64);

/// All properties available to tables.
pub const FEATURES: [Feature; 12] = [
    ("reads", |o| o.reads),
    ("jobs", |o| o.jobs),
    ("files", |o| o.files),
    ("clients", |o| o.clients),
    ("clients_per_file", |o| o.clients / o.files.max(1.0)),
    ("clients_per_job", |o| o.clients / o.jobs.max(1.0)),
    ("request_bytes", |o| o.request_bytes),
    ("sequential", |o| o.sequential),
    ("touching", |o| o.touching),
    ("distance_bytes", |o| o.distance_bytes),
    ("outstanding", |o| o.outstanding),
    ("device_share", |o| o.device_share),
];

/// The kind of device, by the cost model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    /// A small read takes more than a millisecond: heads move.
    Disk,
    /// … more than 20 µs.
    Flash,
    /// … less.
    Memory,
}

impl DeviceClass {
    /// By the service time of a 4 KiB read.
    pub fn of(cost: &CostModel) -> DeviceClass {
        match cost.ttp(Op::Read, 4096).0 {
            1_000_000.. => DeviceClass::Disk,
            20_000.. => DeviceClass::Flash,
            _ => DeviceClass::Memory,
        }
    }
}

/// Hashes two words; the upper half of the product is well mixed.
pub(super) fn hash(a: u64, b: u64) -> u64 {
    (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        >> 16
}

/// Buckets of a census.
const BUCKETS: usize = 2048;

/// Counts distinct identities that have requests queued, or had one in the window.
struct Census {
    queued: [u32; BUCKETS],
    /// The window of the last arrival, per bucket.
    seen: [u32; BUCKETS],
    window: u32,
    /// Buckets with requests queued.
    busy: usize,
    /// … or with an arrival in the window.
    occupied: usize,
}

impl Census {
    fn new() -> Census {
        Census { queued: [0; BUCKETS], seen: [0; BUCKETS], window: 1, busy: 0, occupied: 0 }
    }

    fn bucket(id: u32) -> usize {
        // Linear counting takes it for granted that identities, which are interned one after the other, meet at random.
        mix(u64::from(id)) as usize % BUCKETS
    }

    fn arrived(&mut self, id: u32) {
        let at = Census::bucket(id);
        self.occupied += usize::from(self.queued[at] == 0 && self.seen[at] != self.window);
        self.busy += usize::from(self.queued[at] == 0);
        self.queued[at] += 1;
        self.seen[at] = self.window;
    }

    fn left(&mut self, id: u32) {
        let at = Census::bucket(id);
        if self.queued[at] == 1 {
            self.busy -= 1;
            self.occupied -= usize::from(self.seen[at] != self.window);
        }
        self.queued[at] = self.queued[at].saturating_sub(1);
    }

    /// Only what is queued remains of the window.
    fn next_window(&mut self) {
        self.window = self.window.wrapping_add(1);
        self.occupied = self.busy;
    }

    /// The number of identities by linear counting (Whang et al., ACM TODS 1990). Few are as good as never in one bucket.
    fn count(&self) -> f64 {
        match BUCKETS - self.occupied {
            _ if self.occupied <= BUCKETS / 32 => self.occupied as f64,
            free => BUCKETS as f64 * (BUCKETS as f64 / free.max(1) as f64).ln(),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Predecessor {
    end: u64,
    tag: u64,
}

/// A start or an end.
#[derive(Clone, Copy, Default)]
struct Edge {
    tag: u32,
    /// The number of its request.
    at: u32,
}

/// Entries of the stream and edge tables.
const STREAMS: usize = 512;
const EDGES: usize = 1024;

/// Boxed, so that a policy without observations does not carry them.
struct Tables {
    jobs: Census,
    files: Census,
    clients: Census,
    /// By client, file and lane.
    streams: [Predecessor; STREAMS],
    /// Starts and ends of requests.
    edges: [Edge; EDGES],
}

/// Computes the observations of `auto`.
pub(super) struct Sampler {
    tables: Box<Tables>,
    first: bool,
    /// Requests since the phase began, whatever windows they were in.
    phase: u32,
    /// All requests so far; wraps.
    arrivals: u32,
    requests: u32,
    reads: u32,
    followers: u32,
    sequential: u32,
    touching: u32,
    bytes: u64,
    distance_log2: f64,
    outstanding: u64,
    batches: u32,
    hits: u32,
    /// Time of the last arrival or completion.
    last: Nanos,
}

impl Sampler {
    pub fn new() -> Sampler {
        let tables = Tables {
            jobs: Census::new(),
            files: Census::new(),
            clients: Census::new(),
            streams: [Predecessor::default(); STREAMS],
            edges: [Edge::default(); EDGES],
        };
        Sampler {
            tables: Box::new(tables),
            first: true,
            phase: 0,
            arrivals: 0,
            requests: 0,
            reads: 0,
            followers: 0,
            sequential: 0,
            touching: 0,
            bytes: 0,
            distance_log2: 0.0,
            outstanding: 0,
            batches: 0,
            hits: 0,
            last: Nanos::ZERO,
        }
    }

    /// Records an arrival. Returns the observation when a window is full, and whether a pause ended a phase.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) -> (Option<Observation>, bool) {
        let table = view.table;
        let pause = table.len() <= 1 && view.now.since(self.last) >= PAUSE && self.phase >= PHASE_MIN;
        self.last = view.now;
        self.phase = if pause { 1 } else { self.phase.saturating_add(1) };
        let before = pause.then(|| self.close(true)).filter(|seen| seen.requests >= WINDOW / 2);
        let (file, client, lane) = (table.file(slot).0, table.client(slot).0, table.lane(slot).0);
        let (start, end) = (table.start(slot), table.end(slot));
        let t = &mut *self.tables;
        t.jobs.arrived(table.job(slot).0);
        t.files.arrived(file);
        t.clients.arrived(client);
        self.requests += 1;
        self.reads += u32::from(table.op(slot) == Op::Read);
        self.bytes = self.bytes.saturating_add(end - start);
        self.outstanding += table.len() as u64;
        let place = u64::from(file) << 16 | u64::from(lane);
        let tag = hash(place, u64::from(client) + 1) | 1;
        let stream = &mut t.streams[tag as usize / 2 % STREAMS];
        let (known, continues) = (stream.tag == tag, stream.tag == tag && stream.end == start);
        if known {
            self.followers += 1;
            self.sequential += u32::from(continues);
            self.distance_log2 += f64::from(64 - start.abs_diff(stream.end).leading_zeros());
        }
        *stream = Predecessor { end, tag };
        // A start of one request is an end of its neighbour: both are marked, distinguished by the lowest bit.
        let edge = |offset: u64, is_end: bool| (hash(place, offset) as u32) << 1 | u32::from(is_end);
        let at = |edge: u32| (edge >> 1) as usize % EDGES;
        let (begins, ends) = (edge(start, true), edge(end, false));
        // Of a file of which much has been moved, any request touches an earlier one: only those of the last rounds count.
        self.arrivals = self.arrivals.wrapping_add(1);
        let recent = 2 * (table.len() as u32).max(ROUND_MIN);
        if !continues {
            let touches = |tag: u32| {
                let edge = t.edges[at(tag)];
                edge.tag == tag && self.arrivals.wrapping_sub(edge.at) <= recent
            };
            self.touching += u32::from(touches(begins) || touches(ends));
        }
        for tag in [begins, ends] {
            t.edges[at(tag)] = Edge { tag: tag ^ 1, at: self.arrivals };
        }
        let part = if self.first { 2 } else { 1 };
        let followed =
            self.followers >= FOLLOWERS / part || self.requests >= WINDOW_MAX / part && self.has_gone_round();
        let full = self.requests >= WINDOW / part && followed;
        (if full { Some(self.close(false)) } else { before }, pause)
    }

    /// Records that a request left the queue.
    pub fn left(&mut self, view: &View<'_>, slot: Slot) {
        let (table, t) = (view.table, &mut *self.tables);
        t.jobs.left(table.job(slot).0);
        t.files.left(table.file(slot).0);
        t.clients.left(table.client(slot).0);
    }

    /// Records a completed batch.
    pub fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.last = view.now;
        self.batches += 1;
        // A driver that reports no times says nothing about caches.
        let hit = done.service.0 > 0 && done.service.0 < view.cost.ttp(done.op, done.len_bytes).0 / HIT_DIVISOR;
        self.hits += u32::from(hit);
    }

    /// Whether every client could have come twice: before that, that few requests follow another says nothing.
    fn has_gone_round(&self) -> bool {
        f64::from(self.requests) >= f64::from(WINDOW_BOUND).min(2.0 * self.tables.clients.count())
    }

    fn close(&mut self, pause: bool) -> Observation {
        let (n, followers) = (f64::from(self.requests.max(1)), f64::from(self.followers.max(1)));
        let t = &mut *self.tables;
        let seen = Observation {
            requests: self.requests,
            first: self.first,
            reads: f64::from(self.reads) / n,
            jobs: t.jobs.count(),
            files: t.files.count(),
            clients: t.clients.count(),
            request_bytes: self.bytes as f64 / n,
            sequential: f64::from(self.sequential) / followers,
            touching: f64::from(self.touching) / n,
            // The sum is over log2 + 1, 0 for no distance.
            distance_bytes: (self.distance_log2 / followers).exp2() - 1.0,
            outstanding: self.outstanding as f64 / n,
            device_share: match self.batches {
                0 => 1.0,
                batches => 1.0 - f64::from(self.hits) / f64::from(batches),
            },
        };
        [&mut t.jobs, &mut t.files, &mut t.clients].into_iter().for_each(Census::next_window);
        self.first = pause;
        (self.requests, self.reads, self.followers, self.sequential, self.touching) = (0, 0, 0, 0, 0);
        (self.bytes, self.distance_log2, self.outstanding, self.batches, self.hits) = (0, 0.0, 0, 0, 0);
        seen
    }
}

#[cfg(test)]
mod tests {
    use impresario_base::Random;

    use super::*;

    /// Identities that are interned one after the other, and some of many.
    #[test]
    fn up_to_some_thousand_identities_are_counted_to_a_tenth() {
        let mut random = Random::new(5);
        for count in [1, 12, 64, 100, 182, 300, 1000, 2000, 4000] {
            for scattered in [false, true] {
                let (mut census, mut ids) = (Census::new(), std::collections::BTreeSet::new());
                while ids.len() < count {
                    ids.insert(if scattered { random.below(1 << 32) as u32 } else { ids.len() as u32 });
                }
                ids.iter().for_each(|id| census.arrived(*id));
                let off = census.count() / count as f64 - 1.0;
                assert!(off.abs() <= 0.1, "{count} (scattered: {scattered}): {off}");
                ids.iter().for_each(|id| census.left(*id));
                census.next_window();
                assert_eq!(census.count(), 0.0);
            }
        }
    }

    /// The running counts are what a look through all buckets finds.
    #[test]
    fn occupied_buckets_are_counted_as_requests_come_and_go() {
        let (mut census, mut random, mut queued) = (Census::new(), Random::new(3), Vec::new());
        for _ in 0..20_000 {
            match random.below(40) {
                0 => census.next_window(),
                1..=20 if !queued.is_empty() => {
                    census.left(queued.swap_remove(random.below(queued.len() as u64) as usize));
                }
                _ => {
                    queued.push(random.below(700) as u32);
                    census.arrived(queued[queued.len() - 1]);
                }
            }
            let busy = (0..BUCKETS).filter(|at| census.queued[*at] > 0).count();
            let seen = (0..BUCKETS).filter(|at| census.queued[*at] > 0 || census.seen[*at] == census.window).count();
            assert_eq!((census.busy, census.occupied), (busy, seen));
        }
    }
}
