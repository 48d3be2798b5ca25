//! The aggregation of every policy against a model that examines all queued requests.
//!
//! The model is a *component*: queued requests of one file, operation and lane that touch, directly or through others.
//! A batch is part of one component, within the batch limits, in offset order, without holes; its length is that of the
//! union of its parts, so overlapping reads share bytes. Unless a limit intervenes it is the whole component.

use std::collections::BTreeMap;

use impresario_sched::policy::POLICIES;
use impresario_sched::{
    Batch, Completion, Core, CoreConfig, Event, Extent, FileId, LaneId, Nanos, Next, Op, PolicySpec, Request, RequestId,
};
use proptest::prelude::*;

const BLOCK: u64 = 4096;

/// All policies that aggregate, with batch limits of the given requests and bytes.
fn aggregating(batch_requests: u64, batch_bytes: u64) -> Vec<PolicySpec> {
    let mut specs = Vec::new();
    for info in POLICIES {
        let has = |name: &str| info.params.iter().any(|p| p.name == name);
        if !has("batch_bytes") {
            continue;
        }
        let mut spec = PolicySpec::named(info.name).with("batch_bytes", batch_bytes);
        for (name, value) in [("merge", "on".to_string()), ("batch_requests", batch_requests.to_string())] {
            if has(name) {
                spec = spec.with(name, value);
            }
        }
        if !has("batch_requests") {
            spec = spec.with("quantum_requests", batch_requests);
        }
        if info.name == "twins" {
            specs.push(spec.clone().with("order_within", "offset"));
        }
        specs.push(spec);
    }
    assert!(specs.len() >= 10, "{specs:?}");
    specs
}

/// Policies that end a batch at the end of a turn although more requests touch.
fn cuts_at_turns(spec: &PolicySpec) -> bool {
    ["hbrr", "orr"].contains(&spec.name.as_str())
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Push { file: u32, write: bool, lane: u16, block: u64, blocks: u64 },
    Dispatch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let push = (0u32..2, 0..4u8, 0u16..2, 0u64..40, 1u64..6).prop_map(|(file, w, lane, block, blocks)| Step::Push {
        file,
        write: w == 0,
        lane,
        block,
        blocks,
    });
    let step = prop_oneof![5 => push, 1 => Just(Step::Dispatch)];
    proptest::collection::vec(step, 1..120)
}

struct Model {
    core: Core,
    now: Nanos,
    queued: BTreeMap<RequestId, Request>,
    batch_requests: u64,
    batch_bytes: u64,
}

fn same_queue(a: &Request, b: &Request) -> bool {
    a.extent.file == b.extent.file && a.op == b.op && a.extent.lane == b.extent.lane
}

impl Model {
    fn new(spec: &PolicySpec, batch_requests: u64, batch_bytes: u64) -> Model {
        let core = Core::new(CoreConfig { lanes: 2, ..CoreConfig::single_lane(256) }, spec).unwrap();
        Model { core, now: Nanos::from_millis(1), queued: BTreeMap::new(), batch_requests, batch_bytes }
    }

    fn push(&mut self, file: u32, write: bool, lane: u16, block: u64, blocks: u64) {
        // Overlapping writes are conflicts, which do not aggregate: writes go to disjoint blocks.
        let (op, blocks) = if write { (Op::Write, 1) } else { (Op::Read, blocks) };
        let file = FileId(2 * file + u32::from(write));
        let (offset, len) = (block * BLOCK, blocks * BLOCK);
        let extent = Extent { file, lane: LaneId(lane), file_offset: offset, lane_offset: offset, len };
        let request = Request { arrival: self.now, ..Request::new(op, extent) };
        if write && self.queued.values().any(|q| same_queue(q, &request) && q.extent.lane_offset == offset) {
            return;
        }
        let id = self.core.push(self.now, &request).unwrap();
        self.queued.insert(id, Request { id, ..request });
    }

    /// The next batch, or nothing if the queue is empty; advances time for policies that wait.
    fn next(&mut self) -> Option<Batch> {
        for _ in 0..1000 {
            match self.core.next(self.now) {
                Next::Dispatch(batch) => return Some(batch),
                Next::Wait { .. } if self.queued.is_empty() => return None,
                Next::Wait { until, .. } => {
                    assert!(until < Nanos::MAX, "something is queued and nothing in flight");
                    self.now = until;
                }
            }
        }
        panic!("it waits without end");
    }

    /// All queued requests that touch a request, directly or through others.
    fn component(&self, first: &Request) -> Vec<RequestId> {
        let (mut start, mut end) = (first.extent.lane_offset, first.extent.end());
        let mut inside = vec![first.id];
        loop {
            let more: Vec<&Request> = self
                .queued
                .values()
                .filter(|q| same_queue(q, first) && q.extent.lane_offset <= end && q.extent.end() >= start)
                .collect();
            if more.len() == inside.len() {
                return inside;
            }
            inside = more.iter().map(|q| q.id).collect();
            start = more.iter().map(|q| q.extent.lane_offset).min().unwrap();
            end = more.iter().map(|q| q.extent.end()).max().unwrap();
        }
    }

    /// Checks a batch and completes it; `whole` if it must be the whole component.
    fn check(&mut self, batch: &Batch, whole: bool) {
        let parts: Vec<Request> = batch.parts.iter().map(|p| self.queued[&p.id]).collect();
        let component = self.component(&parts[0]);
        let mut end = parts[0].extent.lane_offset;
        assert_eq!(batch.extent.lane_offset, end, "it begins with its first part");
        for (request, part) in parts.iter().zip(&batch.parts) {
            assert!(same_queue(request, &parts[0]) && component.contains(&request.id));
            assert_eq!((part.from, part.len, part.lane_offset), (0, request.extent.len, request.extent.lane_offset));
            assert!(part.lane_offset <= end, "a hole");
            end = end.max(request.extent.end());
        }
        assert!(parts.windows(2).all(|w| w[0].extent.lane_offset <= w[1].extent.lane_offset), "offset order");
        let mut bytes: Vec<u64> =
            parts.iter().flat_map(|r| r.extent.lane_offset / BLOCK..r.extent.end() / BLOCK).collect();
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(batch.extent.len, bytes.len() as u64 * BLOCK, "shared bytes are moved once");
        assert!(parts.len() == 1 || parts.len() as u64 <= self.batch_requests && batch.extent.len <= self.batch_bytes);
        if whole {
            let mut ids: Vec<RequestId> = parts.iter().map(|r| r.id).collect();
            ids.sort();
            assert_eq!(ids, component, "everything that touches goes along");
        }
        parts.iter().for_each(|r| {
            self.queued.remove(&r.id);
        });
        self.now += Nanos(1000);
        self.core.event(self.now, Event::Completed(Completion::of(batch, self.now, self.now)));
    }

    fn run(mut self, steps: &[Step], mut each: impl FnMut(&mut Model, Batch)) {
        for step in steps {
            match *step {
                Step::Push { file, write, lane, block, blocks } => self.push(file, write, lane, block, blocks),
                Step::Dispatch => {
                    if let Some(batch) = self.next() {
                        each(&mut self, batch);
                    }
                }
            }
        }
        while let Some(batch) = self.next() {
            each(&mut self, batch);
        }
        assert!(self.core.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn batches_are_parts_of_components_within_limits(steps in steps(), requests in 1u64..9, blocks in 1u64..9) {
        for spec in aggregating(requests, blocks * BLOCK) {
            Model::new(&spec, requests, blocks * BLOCK).run(&steps, |model, batch| model.check(&batch, false));
        }
    }

    #[test]
    fn without_limits_batches_are_whole_components(steps in steps()) {
        for spec in aggregating(1000, 1 << 30) {
            let whole = !cuts_at_turns(&spec);
            Model::new(&spec, 1000, 1 << 30).run(&steps, |model, batch| model.check(&batch, whole));
        }
    }

    /// Without overlaps, two requests that touch and fit one batch never go in two.
    #[test]
    fn neighbours_that_fit_go_together(places in proptest::collection::btree_set(0u64..60, 1..60), limit in 2u64..9) {
        let mut order: Vec<u64> = places.iter().copied().collect();
        // Scattered, but deterministic.
        order.sort_by_key(|b| b.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for spec in aggregating(limit, limit * BLOCK).iter().filter(|s| !cuts_at_turns(s)) {
            let mut model = Model::new(spec, limit, limit * BLOCK);
            order.iter().for_each(|block| model.push(0, false, 0, *block, 1));
            let mut served: Vec<(u64, u64)> = Vec::new();
            while let Some(batch) = model.next() {
                served.push((batch.extent.lane_offset / BLOCK, batch.extent.len / BLOCK));
                model.check(&batch, false);
            }
            served.sort_unstable();
            for pair in served.windows(2) {
                let [(a, n), (b, m)] = [pair[0], pair[1]];
                prop_assert!(a + n < b || n + m > limit, "{spec}: {served:?}");
            }
            prop_assert_eq!(served.iter().map(|s| s.1).sum::<u64>(), places.len() as u64);
        }
    }
}
