//! Predicted queues: the requests of a recorded run as a scheduler would queue them, the aggregations that it could make
//! of them, and the link from a request that arrives to its prediction (agios-2013, IV).
//!
//! In offset order, two at a time, R1 and R2 are aggregated if TTP(S1) + TTP(S2) > TTP(S1 + S2) + |AT2 − AT1| × (1 − α),
//! where α is the part of a wait that other queues use (IV.B). The result is a virtual request that is compared with the
//! next neighbour. Its arrival is that of its last part (the paper does not say): until then it cannot be complete.
//!
//! A run that reads a range several times has several requests of one place. They are told apart by *round*: the nth
//! request of a place is in round n, and only requests of one round are aggregated.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::earlier::EarlierRead;
use crate::triggers::Triggers;

/// A request of a recorded run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// The file's stable key; of what one of several servers holds of it, its [`part_key`].
    pub file: u64,
    /// A write; else a read.
    pub write: bool,
    /// First byte, where the scheduler judges contiguity.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// When it arrived, by the run's clock.
    pub arrival_ns: u64,
    /// When it was done; `None` where that is not known.
    pub completed_ns: Option<u64>,
    /// Its process, client or thread; 0 where that is not known.
    pub source: u32,
}

/// The key of what one lane (a server) holds of a file, where each lane has offsets of its own. That of lane 0 is the
/// file's.
pub fn part_key(file: u64, lane: u16) -> u64 {
    file ^ u64::from(lane).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A predicted request, by its place in the predicted queues.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PredictedId(pub(crate) u32);

impl PredictedId {
    /// Its place among all predicted requests, from 0.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Limits of a virtual request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupLimits {
    /// Requests.
    pub requests: u32,
    /// Bytes.
    pub bytes: u64,
    /// From the first arrival to the last, ns.
    pub span_ns: u64,
}

/// A predicted aggregation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    /// Its first request, and with `requests` its members: they stand next to one another.
    first: u32,
    /// Requests in it.
    pub requests: u32,
    /// Its bytes.
    pub bytes: u64,
    /// When its first request arrived, ns since the first of its file.
    pub first_ns: u64,
    /// When its last one arrived, on the same clock.
    pub last_ns: u64,
    /// First byte after it.
    end: u64,
}

impl Group {
    /// Its identity.
    pub fn id(&self) -> u32 {
        self.first
    }

    /// From its first arrival to its last, ns.
    pub fn span_ns(&self) -> u64 {
        self.last_ns - self.first_ns
    }
}

/// An event of a recorded run: ns since the first of the file, the request, and whether it completed then; else it arrived.
pub(crate) type RunEvent = (u64, u32, bool);

#[derive(Clone, Copy, Debug)]
struct Predicted {
    offset: u64,
    len: u64,
    since_first_ns: u64,
    /// `u64::MAX`: not known.
    completed_ns: u64,
    round: u32,
    source: u32,
}

/// A predicted queue.
#[derive(Debug)]
struct Queue {
    /// Its requests.
    range: Range<u32>,
    bytes: u64,
}

/// The predicted queues of a recorded run.
#[derive(Debug, Default)]
pub struct PredictedQueues {
    /// By queue, round, offset.
    requests: Vec<Predicted>,
    queues: FxHashMap<(u64, bool), Queue>,
    /// The requests of a place, in order of rounds: `places[range]`.
    by_place: FxHashMap<(u64, bool, u64, u64), Range<u32>>,
    places: Vec<u32>,
    triggers: OnceLock<Arc<Triggers>>,
}

impl PredictedQueues {
    /// Requests at most, some 130 bytes of memory each; later ones of a run are left out.
    pub const REQUESTS_MAX: usize = 1 << 20;

    /// The predicted queues of a run. Order does not matter; of more than [`PredictedQueues::REQUESTS_MAX`] the first are
    /// taken.
    pub fn new(run: impl IntoIterator<Item = Recorded>) -> PredictedQueues {
        let mut run: Vec<Recorded> = run.into_iter().filter(|r| r.len > 0).collect();
        run.sort_by_key(|r| r.arrival_ns);
        run.truncate(PredictedQueues::REQUESTS_MAX);
        let mut begun: FxHashMap<u64, u64> = FxHashMap::default();
        let mut rounds: FxHashMap<(u64, bool, u64, u64), u32> = FxHashMap::default();
        let mut all: Vec<((u64, bool), Predicted)> = Vec::with_capacity(run.len());
        for r in run {
            let first_ns = *begun.entry(r.file).or_insert(r.arrival_ns);
            let round = rounds.entry((r.file, r.write, r.offset, r.len)).or_default();
            let completed_ns = r.completed_ns.map_or(u64::MAX, |c| c.max(r.arrival_ns) - first_ns);
            let since_first_ns = r.arrival_ns - first_ns;
            all.push((
                (r.file, r.write),
                Predicted {
                    offset: r.offset,
                    len: r.len,
                    since_first_ns,
                    completed_ns,
                    round: *round,
                    source: r.source,
                },
            ));
            *round += 1;
        }
        all.sort_by_key(|(queue, p)| (*queue, p.round, p.offset, p.len));
        let mut predicted = PredictedQueues::default();
        let mut places: Vec<((u64, bool, u64, u64), u32)> = Vec::with_capacity(all.len());
        for (at, ((file, write), p)) in all.into_iter().enumerate() {
            let at = at as u32;
            let queue = predicted.queues.entry((file, write)).or_insert(Queue { range: at..at, bytes: 0 });
            (queue.range.end, queue.bytes) = (at + 1, queue.bytes.saturating_add(p.len));
            places.push(((file, write, p.offset, p.len), at));
            predicted.requests.push(p);
        }
        // Stable: of one place in order of rounds, which is that of arrivals.
        places.sort_by_key(|(place, _)| *place);
        for (n, (place, at)) in places.into_iter().enumerate() {
            predicted.by_place.entry(place).or_insert(n as u32..n as u32).end = n as u32 + 1;
            predicted.places.push(at);
        }
        predicted
    }

    /// How many requests are predicted.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Nothing is predicted.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Of how many files something is predicted; on several lanes, of how many parts of files.
    pub fn files(&self) -> usize {
        self.queues.keys().map(|(file, _)| file).collect::<FxHashSet<_>>().len()
    }

    /// Whether something is predicted of a queue.
    pub fn knows(&self, file: u64, write: bool) -> bool {
        self.queues.contains_key(&(file, write))
    }

    /// Bytes of all requests of a queue; `None`: nothing is predicted of it.
    pub fn bytes(&self, file: u64, write: bool) -> Option<u64> {
        self.queues.get(&(file, write)).map(|queue| queue.bytes)
    }

    /// The prediction of a request that arrives `since_first_ns` after the first one of its file: of the same file,
    /// operation, offset and length, and not further from the predicted instant than `bound_ns` and the part
    /// `bound_part` of the predicted time. Of several the nearest.
    pub fn find(
        &self,
        (file, write): (u64, bool),
        (offset, len): (u64, u64),
        since_first_ns: u64,
        (bound_ns, bound_part): (u64, f64),
    ) -> Option<PredictedId> {
        let places = self.by_place.get(&(file, write, offset, len))?;
        let places = &self.places[places.start as usize..places.end as usize];
        let when = |at: &u32| self.requests[*at as usize].since_first_ns;
        let after = places.partition_point(|at| when(at) < since_first_ns);
        let near = places[after.saturating_sub(1)..].iter().take(2);
        let nearest = near.min_by_key(|at| when(at).abs_diff(since_first_ns))?;
        let within = bound_ns.saturating_add((when(nearest) as f64 * bound_part) as u64);
        (when(nearest).abs_diff(since_first_ns) <= within).then_some(PredictedId(*nearest))
    }

    /// What each request followed. Found out once, which takes long.
    pub fn triggers(&self) -> Arc<Triggers> {
        self.triggers.get_or_init(|| Arc::new(Triggers::new(self))).clone()
    }

    /// The reads of each file, in no particular order.
    pub(crate) fn reads(&self) -> impl Iterator<Item = (u64, Vec<EarlierRead>)> {
        let read =
            |p: &Predicted| EarlierRead { offset: p.offset, len: p.len, at_ns: p.since_first_ns, before_bytes: 0 };
        self.queues.iter().filter(|((_, write), _)| !write).map(move |((file, _), queue)| {
            let requests = &self.requests[queue.range.start as usize..queue.range.end as usize];
            (*file, requests.iter().map(read).collect())
        })
    }

    /// By file and source: arrivals and completions in order of time.
    pub(crate) fn events(&self) -> FxHashMap<(u64, u32), Vec<RunEvent>> {
        let mut all: FxHashMap<(u64, u32), Vec<RunEvent>> = FxHashMap::default();
        for ((file, _), queue) in &self.queues {
            for at in queue.range.clone() {
                let p = &self.requests[at as usize];
                let events = all.entry((*file, p.source)).or_default();
                events.push((p.since_first_ns, at, false));
                if p.completed_ns < u64::MAX {
                    events.push((p.completed_ns, at, true));
                }
            }
        }
        // Of two events at one instant the completion is the cause.
        all.values_mut().for_each(|events| events.sort_unstable_by_key(|(at, id, completed)| (*at, !completed, *id)));
        all
    }

    /// By request: whether the one after it is of the same queue and round and begins where it ends.
    pub(crate) fn continued(&self) -> Vec<bool> {
        let mut continued = vec![false; self.requests.len()];
        for Queue { range, .. } in self.queues.values() {
            let range = range.start as usize..range.end as usize;
            for (pair, continued) in self.requests[range.clone()].windows(2).zip(&mut continued[range]) {
                let (a, b) = (&pair[0], &pair[1]);
                *continued = a.round == b.round && a.offset.saturating_add(a.len) == b.offset;
            }
        }
        continued
    }

    /// The places of each file's reads and of its writes (true), in offset order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (bool, Range<usize>)> {
        self.queues.iter().map(|((_, write), queue)| (*write, queue.range.start as usize..queue.range.end as usize))
    }

    /// The source of the request at a place.
    pub(crate) fn source(&self, at: usize) -> u32 {
        self.requests[at].source
    }

    /// The length of the request at a place.
    pub(crate) fn len_bytes(&self, at: usize) -> u64 {
        self.requests[at].len
    }

    /// When a predicted request arrived, ns since the first of its file.
    pub fn arrival_ns(&self, id: PredictedId) -> u64 {
        self.requests[id.0 as usize].since_first_ns
    }
}

/// The aggregations of predicted queues for one α, computed queue by queue when they are asked for.
#[derive(Debug)]
pub struct Aggregations {
    limits: GroupLimits,
    /// α, 0 to 1.
    overlap: f64,
    /// Raised with each change of α.
    generation: u32,
    /// By queue: with which α its groups were made.
    made: FxHashMap<(u64, bool), u32>,
    /// By predicted request: its group's place in `groups` + 1.
    group_of: Vec<u32>,
    groups: Vec<Group>,
}

impl Aggregations {
    /// For predicted queues.
    pub fn new(queues: &PredictedQueues, overlap: f64, limits: GroupLimits) -> Aggregations {
        Aggregations {
            limits,
            overlap,
            generation: 1,
            made: FxHashMap::default(),
            group_of: vec![0; queues.len()],
            groups: Vec::new(),
        }
    }

    /// Another α.
    pub fn set_overlap(&mut self, overlap: f64) {
        if overlap != self.overlap {
            self.overlap = overlap;
            self.generation += 1;
            self.groups.clear();
            self.made.clear();
        }
    }

    /// α.
    pub fn overlap(&self) -> f64 {
        self.overlap
    }

    /// The aggregation that a predicted request is part of; a group of one when it is better served alone. `ttp_ns` is the
    /// time to process of so many bytes of the queue's operation.
    pub fn group(
        &mut self,
        queues: &PredictedQueues,
        queue: (u64, bool),
        id: PredictedId,
        ttp_ns: impl Fn(u64) -> u64,
    ) -> Group {
        if self.made.get(&queue) != Some(&self.generation) {
            self.aggregate(queues, queue, ttp_ns);
            self.made.insert(queue, self.generation);
        }
        self.groups[self.group_of[id.0 as usize] as usize - 1]
    }

    fn aggregate(&mut self, queues: &PredictedQueues, queue: (u64, bool), ttp_ns: impl Fn(u64) -> u64) {
        let Some(Queue { range, .. }) = queues.queues.get(&queue) else { return };
        let alone = |at: u32| {
            let p = &queues.requests[at as usize];
            Group {
                first: at,
                requests: 1,
                bytes: p.len,
                first_ns: p.since_first_ns,
                last_ns: p.since_first_ns,
                end: p.offset.saturating_add(p.len),
            }
        };
        let mut current: Option<Group> = None;
        for at in range.clone() {
            let next = alone(at);
            current = Some(match current {
                Some(group) if self.belong(queues, &group, &next, at, &ttp_ns) => Group {
                    requests: group.requests + 1,
                    bytes: next.end.max(group.end) - (group.end - group.bytes),
                    first_ns: group.first_ns.min(next.first_ns),
                    last_ns: group.last_ns.max(next.last_ns),
                    end: group.end.max(next.end),
                    ..group
                },
                other => {
                    self.close(other);
                    next
                }
            });
        }
        self.close(current);
    }

    fn close(&mut self, group: Option<Group>) {
        let Some(group) = group else { return };
        self.groups.push(group);
        let at = self.groups.len() as u32;
        self.group_of[group.first as usize..][..group.requests as usize].fill(at);
    }

    /// Whether the next request in offset order belongs to a group.
    fn belong(
        &self,
        queues: &PredictedQueues,
        group: &Group,
        next: &Group,
        at: u32,
        ttp_ns: impl Fn(u64) -> u64,
    ) -> bool {
        let (p, q) = (&queues.requests[group.first as usize], &queues.requests[at as usize]);
        let bytes = next.end.max(group.end) - (group.end - group.bytes);
        let span = group.last_ns.max(next.last_ns) - group.first_ns.min(next.first_ns);
        if p.round != q.round
            || q.offset > group.end
            || group.requests >= self.limits.requests
            || bytes > self.limits.bytes
            || span > self.limits.span_ns
        {
            return false;
        }
        let apart = ttp_ns(group.bytes).saturating_add(ttp_ns(next.bytes));
        let together = ttp_ns(bytes);
        let wait = next.first_ns.abs_diff(group.last_ns) as f64 * (1.0 - self.overlap);
        apart as f64 > together as f64 + wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;
    const MS: u64 = 1_000_000;
    const LIMITS: GroupLimits = GroupLimits { requests: 64, bytes: 1 << 20, span_ns: u64::MAX };
    /// For any request: of one place in any time.
    const ANY: (u64, f64) = (u64::MAX, 0.0);

    /// 10 ms and 1 ms for each 64 KiB.
    fn ttp(bytes: u64) -> u64 {
        10 * MS + bytes * MS / (64 * KIB)
    }

    fn recorded(offset_kib: u64, arrival_ms: u64, completed_ms: u64) -> Recorded {
        Recorded {
            file: 1,
            write: false,
            offset: offset_kib * KIB,
            len: 8 * KIB,
            arrival_ns: arrival_ms * MS,
            completed_ns: Some(completed_ms * MS),
            source: 0,
        }
    }

    /// The groups of file 1's reads as (first KiB, KiB).
    fn groups(run: &[Recorded], overlap: f64, limits: GroupLimits) -> Vec<(u64, u64)> {
        let queues = PredictedQueues::new(run.iter().copied());
        let mut all = Aggregations::new(&queues, overlap, limits);
        let start = run.iter().map(|r| r.arrival_ns).min().unwrap();
        let mut seen: Vec<(u64, u64, u64)> = Vec::new();
        for r in run {
            let id = queues.find((1, false), (r.offset, r.len), r.arrival_ns - start, (0, 0.0)).unwrap();
            let group = all.group(&queues, (1, false), id, ttp);
            seen.push((group.first_ns, (group.end - group.bytes) / KIB, group.bytes / KIB));
        }
        seen.sort_unstable();
        seen.dedup();
        seen.into_iter().map(|g| (g.1, g.2)).collect()
    }

    /// Worked by hand: two requests of 8 KiB take 10.125 ms each and 10.25 ms together: worth a wait below 10 ms.
    #[test]
    fn neighbours_are_aggregated_while_that_is_worth_the_wait() {
        let run = |apart_ms| [recorded(0, 0, 50), recorded(8, apart_ms, 50), recorded(24, 1, 50)];
        assert_eq!(groups(&run(9), 0.0, LIMITS), [(0, 16), (24, 8)], "a hole is no neighbour");
        assert_eq!(groups(&run(10), 0.0, LIMITS), [(0, 8), (24, 8), (8, 8)]);
        assert_eq!(groups(&run(19), 0.5, LIMITS), [(0, 16), (24, 8)], "half of the wait is used by others");
        assert_eq!(groups(&run(21), 0.5, LIMITS), [(0, 8), (24, 8), (8, 8)]);
        assert_eq!(groups(&run(9000), 1.0, LIMITS), [(0, 16), (24, 8)]);
        // A virtual request goes on with the next; where it is refused, the refused one goes on.
        let chain: Vec<_> = (0..8).map(|i| recorded(i * 8, if i < 4 { i } else { 100 + i }, 500)).collect();
        assert_eq!(groups(&chain, 0.0, LIMITS), [(0, 32), (32, 32)]);
        let few = GroupLimits { requests: 3, ..LIMITS };
        assert_eq!(groups(&chain[..4], 0.0, few), [(0, 24), (24, 8)]);
        let small = GroupLimits { bytes: 16 * KIB, ..LIMITS };
        assert_eq!(groups(&chain[..4], 0.0, small), [(0, 16), (16, 16)]);
    }

    /// A file that is read twice: the second time's requests are not aggregated with the first one's.
    #[test]
    fn rounds_are_kept_apart() {
        let twice: Vec<_> =
            (0..2).flat_map(|n| (0..4).map(move |i| recorded(i * 8, n * 1000 + i, n * 1000 + 50))).collect();
        assert_eq!(groups(&twice, 0.0, LIMITS), [(0, 32), (0, 32)]);
    }

    #[test]
    fn a_request_finds_the_nearest_prediction_within_the_bound() {
        let queues = PredictedQueues::new([
            recorded(0, 100, 101),
            recorded(8, 150, 151),
            recorded(8, 400, 401),
            Recorded { write: true, ..recorded(8, 110, 120) },
        ]);
        let find = |kib: u64, since_ms: u64, bound: (u64, f64)| {
            let id = queues.find((1, false), (kib * KIB, 8 * KIB), since_ms * MS, bound)?;
            Some(queues.arrival_ns(id) / MS)
        };
        assert_eq!(find(0, 0, (0, 0.0)), Some(0));
        assert_eq!((find(8, 60, ANY), find(8, 170, ANY), find(8, 180, ANY)), (Some(50), Some(50), Some(300)));
        assert_eq!((find(8, 60, (9 * MS, 0.0)), find(8, 60, (10 * MS, 0.0))), (None, Some(50)));
        assert_eq!((find(8, 60, (5 * MS, 0.1)), find(8, 60, (4 * MS, 0.1))), (Some(50), None));
        assert_eq!(find(9, 60, ANY), None, "another offset");
        assert_eq!(queues.find((2, false), (0, 8 * KIB), 0, ANY), None, "another file");
        assert_eq!(queues.find((1, false), (0, 4 * KIB), 0, ANY), None, "another length");
        assert!(queues.knows(1, true) && !queues.knows(2, false) && queues.len() == 4);
    }

    /// Whatever a run is, every request is in exactly one group, and groups are contiguous and within the limits.
    #[test]
    fn groups_partition_the_queues() {
        use proptest::prelude::*;
        let request = (0u64..3, any::<bool>(), 0u64..64, 1u64..4, 0u64..1000, 0u64..100);
        let run = proptest::collection::vec(request, 1..200);
        proptest!(|(run in run, overlap in 0.0..1.0f64)| {
            let run: Vec<Recorded> = run
                .into_iter()
                .map(|(file, write, block, blocks, at, took)| Recorded {
                    file,
                    write,
                    offset: block * 4096,
                    len: blocks * 4096,
                    arrival_ns: at * MS / 10,
                    completed_ns: (took > 5).then_some((at + took) * MS / 10),
                    source: 0,
                })
                .collect();
            let queues = PredictedQueues::new(run.iter().copied());
            prop_assert_eq!(queues.len(), run.len());
            let limits = GroupLimits { requests: 5, bytes: 32 * KIB, span_ns: 20 * MS };
            let mut all = Aggregations::new(&queues, overlap, limits);
            for (queue, Queue { range, bytes }) in &queues.queues {
                let requests = &queues.requests[range.start as usize..range.end as usize];
                prop_assert_eq!(*bytes, requests.iter().map(|r| r.len).sum::<u64>());
                let mut at = range.start;
                while at < range.end {
                    let group = all.group(&queues, *queue, PredictedId(at), ttp);
                    prop_assert_eq!(group.first, at);
                    prop_assert!(group.requests == 1 || (group.requests <= 5 && group.bytes <= 32 * KIB));
                    prop_assert!(group.span_ns() <= 20 * MS);
                    let members = &queues.requests[at as usize..][..group.requests as usize];
                    let mut end = members[0].offset;
                    for m in members {
                        prop_assert!(m.offset <= end, "no holes");
                        end = end.max(m.offset + m.len);
                    }
                    at += group.requests;
                }
                prop_assert_eq!(at, range.end);
            }
        });
    }
}
