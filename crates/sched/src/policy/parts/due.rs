//! Waiting for requests of a recorded run that are due: our rule for shallow hand-offs, after agios-2013, IV.
//!
//! A recorded run says what each request followed: the reply to an earlier request of its process, or another request
//! sent with it ([`Triggers`]). When that happens again, the request is *due*: it should arrive within 1.5 × the
//! recorded time and [`MARGIN`]. Nothing is due that depends on a request still queued, so a scheduler never waits for
//! what its own waiting delays. A lane is kept for requests that are due
//!
//! - [`Wait::Stay`]: behind the last batch, before the lane turns from a stream with nothing queued to another;
//! - [`Wait::Next`]: where the last batch ended, before others of the stream go; and
//! - [`Wait::Neighbour`]: beside the virtual request that goes next, so that it goes whole,
//!
//! if such waits pay (`worth.rs`), and for at most `longest` before each batch. While the lane's device is busy nothing
//! waits.
//!
//! Processes that read a file together are kept in step (`paces.rs`): one that is behind goes first, and is waited for
//! while its request is due. Where each reads a part of its own, what the drive has read on goes first (`segments.rs`).

use std::sync::Arc;

use impresario_foresight::{PredictedId, PredictedQueues, Triggers};

use super::anticipation::Stream;
use super::levels::Levels;
use super::matched::Matched;
use super::paces::Paces;
use super::runs::{Run, Runs};
use super::segments::{Present, Segments};
use super::worth::{Wait, Worths};
use crate::contract::Linked;
use crate::policy::{Done, View};
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// A wait lasts this much longer than 1.5 × the recorded time.
const MARGIN: Nanos = Nanos(300_000);
/// Requests in offset order that one decision looks at, on either side of a virtual request.
const LOOKED_AT_MAX: usize = 64;
/// The same behind the last batch when its queue is empty.
const AHEAD_MAX: usize = 16;

/// What has been seen of a predicted request.
#[derive(Clone, Copy)]
struct Seen {
    arrived: Nanos,
    completed: Nanos,
    /// It was due beside a virtual request that did not wait for it.
    missed: bool,
}

const NEVER: Nanos = Nanos::MAX;
const UNSEEN: Seen = Seen { arrived: NEVER, completed: NEVER, missed: false };

/// A queued or dispatched request.
#[derive(Clone, Copy, Default)]
struct Link {
    prediction: Option<PredictedId>,
    /// A virtual request did not wait for it.
    late: bool,
    /// The lane waited for it before others of its stream.
    awaited: bool,
    /// It was the first of its stream after the queue had been empty and the lane had stayed; and whether it went on
    /// where the last batch had ended.
    stayed: Option<bool>,
}

/// A wait in progress.
#[derive(Clone, Copy)]
struct Held {
    kind: Wait,
    stream: Stream,
    since: Nanos,
    /// The first request waited for, and how many are.
    awaited: PredictedId,
    expected: u64,
    /// Requests that could have gone at once.
    requests: u64,
}

/// Service of one stream by a lane until its queue is empty.
#[derive(Clone, Copy)]
struct Visit {
    stream: Stream,
    /// It follows another one of the same stream.
    stayed: bool,
    bytes: u64,
    /// Device time and waits.
    spent: Nanos,
}

#[derive(Clone, Copy, Default)]
struct Lane {
    /// The last request sent, if it was predicted, and where its batch ended.
    last: Option<PredictedId>,
    end: u64,
    visit: Option<Visit>,
    /// The queue of the visit's stream has been empty since.
    emptied: bool,
    /// Whether to wait for the stream, which has nothing queued; `None`: as `mlf` does.
    stay: Option<bool>,
    /// Since when it idles, if it has waited since its last batch.
    idle_since: Option<Nanos>,
    held: Option<Held>,
    /// What the time of the batch in flight is the price of.
    price: Option<Wait>,
}

pub(in crate::policy) struct Due {
    /// Longest wait before a batch.
    longest: Nanos,
    batch_requests: u64,
    matched: Matched,
    triggers: Arc<Triggers>,
    /// By predicted request.
    seen: Vec<Seen>,
    /// By slot; absent for requests that never matched.
    links: Vec<Link>,
    lanes: Vec<Lane>,
    worths: Worths,
    paces: Paces,
    /// Longest dwell of `segments`; zero: that processes have parts of their own does not count.
    dwell: Nanos,
    segments: Segments,
    /// Requests missed by the present decision; empty between decisions.
    looked_at: Vec<PredictedId>,
}

impl Due {
    /// Waits for at most `longest` before each batch; `in_parts`: processes that each read or write a part of a file
    /// go by that (`segments.rs`).
    pub fn new(longest: Nanos, batch_requests: u64, bound_part: f64, lanes: usize, in_parts: bool) -> Due {
        let dwell = if in_parts { longest } else { Nanos::ZERO };
        Due {
            longest,
            batch_requests,
            matched: Matched::new(bound_part),
            triggers: Arc::default(),
            seen: Vec::new(),
            links: Vec::new(),
            lanes: vec![Lane::default(); lanes],
            worths: Worths::new(longest),
            paces: Paces::default(),
            dwell,
            segments: Segments::new(dwell, lanes),
            looked_at: Vec::new(),
        }
    }

    /// Longest wait before a batch.
    pub fn longest(&self) -> Nanos {
        self.longest
    }

    /// Sets or clears the recorded run. Setting the same run again changes nothing.
    pub fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        if self.matched.set(queues) {
            self.triggers = self.matched.run().map(PredictedQueues::triggers).unwrap_or_default();
            self.seen = vec![UNSEEN; self.triggers.len()];
            self.links.clear();
            self.paces.clear();
            self.segments = Segments::new(self.dwell, self.lanes.len());
            self.lanes.fill(Lane::default());
        }
    }

    /// Requests since the run was set, and how many of them matched it.
    pub fn linked(&self) -> Linked {
        self.matched.linked()
    }

    /// Whether `mlf` may hold a lane whose queue is empty.
    pub fn may_stay(&self, lane: usize) -> bool {
        self.lanes[lane].stay != Some(false)
    }

    /// `mlf` holds a lane.
    pub fn idles(&mut self, view: &View<'_>, lane: usize) {
        self.lanes[lane].idle_since.get_or_insert(view.now);
    }

    /// A request was queued; `new`: its queue was empty.
    pub fn arrived(&mut self, view: &View<'_>, stream: Stream, new: bool, slot: Slot) {
        self.forget(slot);
        let prediction = self.matched.arrived(view, slot).map(|(_, id)| id);
        let mut link = Link { prediction, ..Link::default() };
        if let Some(id) = prediction {
            let seen = &mut self.seen[id.index()];
            seen.arrived = view.table.arrival(slot);
            link.late = std::mem::take(&mut seen.missed);
            if self.triggers.together(id) {
                self.paces.arrived(stream, self.triggers.step(id), id, slot);
            }
            if stream.2 == Op::Read && self.triggers.own_bytes(id).is_some() {
                self.segments.arrived(stream.0.index(), stream.1, view.table.start(slot), slot);
            }
        }
        let lane = &mut self.lanes[stream.0.index()];
        lane.emptied |= new && lane.visit.is_some_and(|visit| visit.stream == stream);
        if let Some(held) = lane.held
            && held.stream == stream
            && (held.kind == Wait::Stay || held.kind == Wait::Next && prediction == Some(held.awaited))
        {
            link.awaited = held.kind == Wait::Next;
            self.settle(view, stream.0.index(), 1);
        }
        if link.prediction.is_some() || link.awaited {
            if self.links.len() <= slot.index() {
                self.links.resize(slot.index() + 1, Link::default());
            }
            self.links[slot.index()] = link;
        }
    }

    fn link(&self, slot: Slot) -> Link {
        self.links.get(slot.index()).copied().unwrap_or_default()
    }

    fn forget(&mut self, slot: Slot) {
        if let Some(link) = self.links.get_mut(slot.index()) {
            *link = Link::default();
        }
    }

    /// A queued request was cancelled.
    pub fn cancelled(&mut self, view: &View<'_>, stream: Stream, slot: Slot) {
        self.left(view, stream, slot);
        self.forget(slot);
    }

    fn left(&mut self, view: &View<'_>, stream: Stream, slot: Slot) {
        if let Some(id) = self.link(slot).prediction {
            if stream.2 == Op::Read && self.triggers.own_bytes(id).is_some() {
                self.segments.left(stream.0.index(), stream.1, view.table.start(slot), slot);
            }
            self.paces.left(stream, self.triggers.step(id), slot);
        }
    }

    /// What a stream sends in place of the virtual request that begins at `head`, so that its processes stay in step, or
    /// until when it waits for one that is behind.
    pub fn in_step(
        &mut self,
        view: &View<'_>,
        levels: &mut Levels,
        stream: Stream,
        (head, guarded): (Slot, bool),
    ) -> Result<Slot, Nanos> {
        let lane = stream.0.index();
        if view.shared_space || view.lanes[lane].in_flight_requests > 0 {
            return Ok(head);
        }
        if self.own_bytes(view, head).is_some() {
            if stream.2 == Op::Write {
                return Ok(head);
            }
            let idle_since = &mut self.lanes[lane].idle_since;
            return self.segments.choose(view, levels, lane, (head, guarded), idle_since);
        }
        let Some(id) = self.link(head).prediction.filter(|id| !guarded && self.triggers.together(*id)) else {
            return Ok(head);
        };
        let step = self.triggers.step(id);
        if let Some(behind) = self.paces.behind(stream, step) {
            return Ok(levels.head_of(behind));
        }
        while let Some(behind) = self.paces.expected_behind(stream, step) {
            if let Some(until) = self.due(view.now, behind) {
                let idle_since = self.lanes[lane].idle_since.unwrap_or(view.now);
                let until = until.min(idle_since + self.longest);
                if until > view.now {
                    self.lanes[lane].idle_since = Some(idle_since);
                    self.paces.waits(stream, behind);
                    return Err(until);
                }
            }
            self.paces.give_up(stream, self.triggers.step(behind), behind);
        }
        Ok(head)
    }

    /// Whether a request has arrived since the one that it follows did: with several in flight, before that one was done.
    fn has_come(&self, id: PredictedId, cause: PredictedId) -> bool {
        let (arrived, since) = (self.seen[id.index()].arrived, self.seen[cause.index()].arrived);
        arrived != NEVER && arrived >= since
    }

    /// Until when a request should have arrived, if it is due.
    fn due(&self, now: Nanos, id: PredictedId) -> Option<Nanos> {
        let trigger = self.triggers.of(id)?;
        let before = self.seen[trigger.of.index()];
        let since = if trigger.completion { before.completed } else { before.arrived };
        if since == NEVER || trigger.after_ns > self.longest.0 || self.has_come(id, trigger.of) {
            return None;
        }
        let until = since + Nanos(trigger.after_ns + trigger.after_ns / 2) + MARGIN;
        (until > now).then_some(until)
    }

    /// Until when a lane in the window of `stream` waits for a request behind its last batch; `empty`: nothing of the
    /// stream is queued.
    pub fn next(&mut self, view: &View<'_>, stream: Stream, empty: bool) -> Option<Nanos> {
        let lane = stream.0.index();
        let Lane { last, visit, stay, .. } = self.lanes[lane];
        let mut at = last?;
        if visit?.stream != stream || view.shared_space || view.lanes[lane].in_flight_requests > 0 {
            return None;
        }
        let (kind, many) = if empty { (Wait::Stay, AHEAD_MAX) } else { (Wait::Next, 1) };
        if empty && stay != Some(true) {
            return None;
        }
        for _ in 0..many {
            at = self.triggers.next(at)?;
            if let Some(until) = self.due(view.now, at) {
                let held = Held { kind, stream, since: view.now, awaited: at, expected: 1, requests: 0 };
                return self.decide(view, held, until);
            }
        }
        None
    }

    /// Until when the virtual request that begins at `head` waits for its neighbours.
    pub fn neighbours(&mut self, view: &View<'_>, runs: &Runs, stream: Stream, head: Slot) -> Option<Nanos> {
        let lane = stream.0.index();
        if view.shared_space || view.lanes[lane].in_flight_requests > 0 {
            return None;
        }
        if self.own_bytes(view, head).is_some() && (stream.2 == Op::Write || self.segments.acts(lane)) {
            return None;
        }
        let first = self.link(head).prediction?;
        let last = runs.members(head).last().and_then(|slot| self.link(slot).prediction)?;
        let Run { count, .. } = runs.run(head);
        let room = (self.batch_requests.saturating_sub(count) as usize).min(LOOKED_AT_MAX);
        let mut looked_at = std::mem::take(&mut self.looked_at);
        let mut until = view.now;
        let after = |at: &PredictedId| self.triggers.next(*at);
        let before = |at: &PredictedId| self.triggers.before(*at);
        let due = |id: PredictedId| Some((id, self.due(view.now, id)?));
        let behind = std::iter::successors(after(&last), after).map_while(due);
        let ahead = std::iter::successors(before(&first), before).map_while(due);
        for (id, by) in behind.chain(ahead).take(room) {
            until = until.max(by);
            looked_at.push(id);
        }
        self.looked_at = looked_at;
        let awaited = *self.looked_at.first()?;
        let expected = self.looked_at.len() as u64;
        let held = Held { kind: Wait::Neighbour, stream, since: view.now, awaited, expected, requests: count };
        self.decide(view, held, until)
    }

    /// Whether to begin a wait, or to go on with it.
    fn decide(&mut self, view: &View<'_>, held: Held, until: Nanos) -> Option<Nanos> {
        let lane = held.stream.0.index();
        let idle_since = self.lanes[lane].idle_since.unwrap_or(view.now);
        let until = until.min(idle_since + self.longest);
        let goes_on = self.lanes[lane].held.is_some_and(|now| (now.kind, now.stream) == (held.kind, held.stream));
        let waits =
            until > view.now && (goes_on || self.worths.pays(held.stream, held.kind, held.expected, until - view.now));
        if waits && !goes_on {
            self.settle(view, lane, 0);
            self.lanes[lane].idle_since = Some(idle_since);
            self.lanes[lane].held = Some(held);
        }
        for id in self.looked_at.drain(..).filter(|_| !waits) {
            self.seen[id.index()].missed = true;
        }
        waits.then_some(until)
    }

    /// Ends the wait of a lane, if there is one, which gained so many requests.
    fn settle(&mut self, view: &View<'_>, lane: usize, gained: u64) {
        let Some(held) = self.lanes[lane].held.take() else { return };
        self.worths.settle(held.stream, held.kind, (gained, held.expected), view.now.since(held.since));
    }

    /// Requests of a stream were sent.
    pub fn sent(&mut self, view: &View<'_>, stream: Stream, batch: &[Slot]) {
        let at = stream.0.index();
        if self.matched.run().is_none() {
            return;
        }
        if let Some(held) = self.lanes[at].held {
            let grown = (held.kind, held.stream) == (Wait::Neighbour, stream);
            let gained = if grown { (batch.len() as u64).saturating_sub(held.requests) } else { 0 };
            self.settle(view, at, gained);
        }
        batch.iter().for_each(|slot| self.left(view, stream, *slot));
        let alone = view.lanes[at].in_flight_requests == 0;
        let own = batch.last().and_then(|slot| self.own_bytes(view, *slot));
        let goes_by_parts = match own.filter(|_| stream.2 == Op::Read) {
            Some(own_bytes) => {
                let ends = batch.first().zip(batch.last()).map(|(a, b)| (view.table.start(*a), view.table.end(*b)));
                self.segments.sent(&Present::of(view), at, stream.1, ends.unwrap_or_default(), own_bytes, alone);
                self.segments.acts(at)
            }
            None => {
                self.segments.moved(&Present::of(view), at);
                // A write that follows a pause waits for the platter wherever it is: there is nothing to wait for.
                own.is_some()
            }
        };
        if alone && goes_by_parts {
            self.lanes[at] = Lane { stay: Some(false), ..Lane::default() };
        } else {
            self.sent_in_turn(view, stream, batch);
        }
    }

    /// As [`Triggers::own_bytes`], if parts count, on lanes that hand over one batch at a time: with more the drive has its
    /// own order.
    fn own_bytes(&self, view: &View<'_>, slot: Slot) -> Option<u64> {
        let counts = self.dwell > Nanos::ZERO && view.lanes[view.table.lane(slot).index()].limit_requests == 1;
        self.link(slot).prediction.filter(|_| counts).and_then(|id| self.triggers.own_bytes(id))
    }

    fn sent_in_turn(&mut self, view: &View<'_>, stream: Stream, batch: &[Slot]) {
        let at = stream.0.index();
        if batch.first().is_none_or(|slot| self.link(*slot).prediction.is_none()) {
            // Nothing is known of what follows.
            self.lanes[at] = Lane::default();
            return;
        }
        let Lane { visit, emptied, idle_since, end, .. } = self.lanes[at];
        let waited = idle_since.map_or(Nanos::ZERO, |since| view.now.since(since));
        let (first, last) = (batch.first(), batch.last());
        let goes_on = first.is_some_and(|slot| view.table.start(*slot) == end);
        if emptied && let Some(link) = first.and_then(|slot| self.links.get_mut(slot.index())) {
            link.stayed = visit.filter(|visit| visit.stream == stream).map(|_| goes_on);
        }
        let (visit, price) = match visit {
            Some(visit) if visit.stream == stream && !emptied => {
                (Visit { spent: visit.spent + waited, ..visit }, (!goes_on).then_some(Wait::Next))
            }
            before => {
                let stayed = before.is_some_and(|visit| visit.stream == stream);
                if let Some(Visit { stream, stayed, bytes, spent }) = before {
                    self.worths.visited(stream, stayed, bytes, spent);
                }
                if let Some(left) = before.filter(|_| !stayed && waited > Nanos::ZERO) {
                    self.worths.visited(left.stream, true, 0, waited);
                }
                let spent = if stayed { waited } else { Nanos::ZERO };
                (Visit { stream, stayed, bytes: 0, spent }, (!stayed).then_some(Wait::Stay))
            }
        };
        if price == Some(Wait::Stay) {
            // The lane has turned to this stream: its time says nothing about the order within.
            for slot in batch {
                if let Some(link) = self.links.get_mut(slot.index()) {
                    link.late = false;
                }
            }
        }
        let alone = view.lanes[at].in_flight_requests == 0;
        self.lanes[at] = Lane {
            last: last.and_then(|slot| self.link(*slot).prediction),
            end: last.map_or(0, |slot| view.table.end(*slot)),
            visit: Some(visit),
            price: price.filter(|_| alone),
            ..Lane::default()
        };
    }

    /// A batch ended; `empty`: nothing of its stream is queued.
    pub fn completed(&mut self, view: &View<'_>, stream: Stream, empty: bool, done: &Done<'_>) {
        if self.matched.run().is_none() {
            return;
        }
        self.worths.busy(stream, done.service);
        self.segments.completed(view.now, stream.0.index(), done.service, done.errno != 0);
        let lane = &mut self.lanes[stream.0.index()];
        let price = lane.price.take().filter(|_| done.errno == 0);
        if let Some(visit) = lane.visit.as_mut().filter(|visit| visit.stream == stream) {
            visit.bytes = visit.bytes.saturating_add(done.len_bytes);
            visit.spent += done.service;
            lane.stay = if empty { self.worths.stays(stream) } else { None };
        }
        if let Some(kind) = price {
            self.worths.late(stream, kind, done.service);
        }
        let requests = done.slots.len().max(1) as u64;
        for &slot in done.slots {
            let link = self.link(slot);
            self.forget(slot);
            if let Some(id) = link.prediction {
                self.seen[id.index()].completed = view.now;
                let next = self.triggers.follower(id).filter(|next| self.triggers.together(*next));
                if let Some(next) = next.filter(|next| !self.has_come(*next, id)) {
                    // Only reads go together; what they follow may be a write.
                    let reads = (stream.0, stream.1, Op::Read);
                    self.paces.expect(reads, self.triggers.step(next), next);
                }
            }
            if done.errno != 0 {
                continue;
            }
            if link.late {
                self.worths.late(stream, Wait::Neighbour, Nanos(done.service.0 / requests));
            }
            if link.stayed.is_some() {
                self.worths.joined(stream, Wait::Stay, done.service);
            }
            if link.awaited || link.stayed == Some(true) {
                self.worths.joined(stream, Wait::Next, done.service);
            }
        }
    }

    /// Takes over the run and the measurements of another instance after a change of parameters.
    pub fn take_over(&mut self, other: Due) {
        if self.lanes.len() == other.lanes.len() {
            self.matched.take_over(other.matched);
            (self.triggers, self.seen, self.worths) = (other.triggers, other.seen, other.worths);
            self.worths.set_longest(self.longest);
        }
    }
}
