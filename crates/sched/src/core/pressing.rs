//! Changes that wait for clients which read their answers slowly.
//!
//! The policies that mind connections ([`Conduct::minds_connections`](crate::policy::Conduct::minds_connections)) leave the
//! reads of a connection that takes no data alone, or wait for them. A write, truncate or unlink then waits, too: for a
//! conflicting read that no policy serves, or on a lane that idles. After [`PRESSING_AFTER`] it is *pressing*, and so is the
//! read that holds it up: that one goes although its connection takes no data, and a lane that would idle for a connection
//! serves what presses instead. Nothing changes while connections drain.

use std::collections::VecDeque;

use super::Core;
use crate::policy::{Choice, WaitReason};
use crate::table::{Slot, State, Table};
use crate::types::{Nanos, Op, RequestId};

/// How long a change waits for connections that take no data.
pub(crate) const PRESSING_AFTER: Nanos = Nanos::from_millis(500);
/// Changes that are looked at in one decision, oldest first.
const LOOKED_AT: usize = 256;

/// Requests in order of arrival, each with the instant from which it presses. Those that ended are forgotten by and by.
#[derive(Default)]
struct Waiting(VecDeque<(RequestId, Nanos)>);

impl Waiting {
    fn push(&mut self, table: &Table, slot: Slot, now: Nanos) {
        let waits = |(id, _): &(RequestId, Nanos)| table.find(*id).is_some_and(|slot| table.state(slot).may_go());
        while self.0.front().is_some_and(|first| !waits(first)) {
            self.0.pop_front();
        }
        if self.0.len() > 2 * table.len() + 64 {
            self.0.retain(waits);
        }
        self.0.push_back((table.id(slot), now + PRESSING_AFTER));
    }

    /// Those in this state that press.
    fn pressing(&self, table: &Table, now: Nanos, state: State) -> impl Iterator<Item = Slot> {
        let due = self.0.iter().take_while(move |(_, from)| *from <= now).take(LOOKED_AT);
        due.filter_map(|(id, _)| table.find(*id)).filter(move |slot| table.state(*slot) == state)
    }

    /// When the next one begins to press; [`Nanos::MAX`]: none waits.
    fn next_after(&self, now: Nanos) -> Nanos {
        let first = self.0.partition_point(|(_, from)| *from <= now);
        self.0.get(first).map_or(Nanos::MAX, |(_, from)| *from)
    }
}

/// The changes that may become pressing; none unless the policy minds connections.
#[derive(Default)]
pub(super) struct Pressing {
    /// Writes, queued or blocked.
    writes: Waiting,
    /// Changes that an older request blocked when they came.
    blocked: Waiting,
}

impl Pressing {
    fn arrived(&mut self, table: &Table, slot: Slot, now: Nanos) {
        let op = table.op(slot);
        if op == Op::Write {
            self.writes.push(table, slot, now);
        }
        if !matches!(op, Op::Read | Op::Sync) && table.state(slot) == State::Blocked {
            self.blocked.push(table, slot, now);
        }
    }
}

impl Core {
    /// A request was accepted, and is queued or blocked.
    pub(super) fn may_press(&mut self, now: Nanos, slot: Slot) {
        if self.shared.minds_connections {
            self.pressing.arrived(&self.shared.table, slot, now);
        }
    }

    /// Another policy acts: waits for connections begin anew.
    pub(super) fn press_anew(&mut self, now: Nanos) {
        self.pressing = Pressing::default();
        if self.shared.minds_connections {
            let slots = self.shared.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
            slots.into_iter().for_each(|slot| self.pressing.arrived(&self.shared.table, slot, now));
        }
    }

    /// Selects a request that presses and can start, and says how to serve it. If the policy `idles` for a connection that is
    /// any read in the way of a change, or a write; otherwise a read that the policy leaves alone.
    pub(super) fn press(&mut self, now: Nanos, idles: bool) -> Option<Choice> {
        if self.shared.not_ready.is_empty() {
            return None;
        }
        let (view, table) = (self.shared.view(now), &self.shared.table);
        let is_left_alone = |slot: &Slot| {
            let waits = table.state(*slot) == State::Queued && table.op(*slot) == Op::Read;
            waits && (idles || !view.ready(table.conn(*slot)))
        };
        let blocked = self.pressing.blocked.pressing(table, now, State::Blocked);
        let in_the_way = blocked.filter_map(|slot| self.conflicts.blocker(table, slot)).filter(is_left_alone);
        let writes = self.pressing.writes.pressing(table, now, State::Queued).filter(|_| idles);
        let mut choices =
            in_the_way.chain(writes).map(|slot| self.policy.serve_pressing(&view, slot, &mut self.selected));
        choices.find(|choice| !matches!(choice, Choice::Wait { .. }))
    }

    /// When a decision to wait is to be made again because a change may begin to press; [`Nanos::MAX`]: it is not.
    pub(super) fn next_press(&self, now: Nanos, reason: WaitReason) -> Nanos {
        let Pressing { writes, blocked } = &self.pressing;
        match reason {
            _ if self.shared.not_ready.is_empty() => Nanos::MAX,
            WaitReason::Connection => blocked.next_after(now).min(writes.next_after(now)),
            _ => blocked.next_after(now),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Batch, Completion, ConnId, Core, CoreConfig, Event, Extent, FileId, LaneId, Nanos, Next, Op};
    use crate::{PolicySpec, Request};

    const MS: u64 = 1_000_000;
    const POLICIES: [&str; 4] = ["stream", "scan", "wscan", "sstf"];

    fn core(policy: &PolicySpec) -> Core {
        Core::new(CoreConfig { pieces: true, lane_syncs: 1, ..CoreConfig::single_lane(64) }, policy).unwrap()
    }

    fn push(core: &mut Core, now: u64, conn: u32, op: Op, file: u32, len: u64) {
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len };
        core.push(Nanos(now), &Request { conn: ConnId(conn), ..Request::new(op, extent) }).unwrap();
    }

    fn ready(core: &mut Core, now: u64, conn: u32, ready: bool) {
        core.event(Nanos(now), Event::Ready { connection: ConnId(conn), ready });
    }

    /// Has the core decide; what is dispatched ends at once.
    fn serve(core: &mut Core, now: u64) -> Option<Batch> {
        let Next::Dispatch(batch) = core.next(Nanos(now)) else { return None };
        core.event(Nanos(now), Event::Completed(Completion::of(&batch, Nanos(now), Nanos(now))));
        Some(batch)
    }

    /// What is served from now on, and when the core next wants to be asked.
    fn serve_all(core: &mut Core, now: u64) -> (Vec<Op>, u64) {
        let ops = std::iter::from_fn(|| serve(core, now)).map(|batch| batch.op).collect();
        let Next::Wait { until, .. } = core.next(Nanos(now)) else { panic!("all was served") };
        (ops, until.0)
    }

    #[test]
    fn a_read_that_nobody_takes_holds_up_changes_for_half_a_second() {
        for (policy, change) in POLICIES.iter().flat_map(|p| [Op::Write, Op::Truncate, Op::Unlink].map(|op| (p, op))) {
            let mut core = core(&PolicySpec::named(policy).with("piece_bytes", 4096));
            ready(&mut core, 0, 1, false);
            push(&mut core, 0, 1, Op::Read, 1, 8192);
            // Of the same connection, and in nobody's way.
            push(&mut core, 0, 1, Op::Read, 2, 4096);
            push(&mut core, MS, 2, change, 1, 4096);
            push(&mut core, 2 * MS, 3, Op::Sync, 1, u64::MAX);
            let mut at = 2 * MS;
            while at < 501 * MS {
                let (ops, until) = serve_all(&mut core, at);
                assert_eq!(ops, [], "{policy}: {change:?} after {at} ns");
                // Half a second after the change came; `sstf` looks before that, when its patience ends.
                assert!(until <= 501 * MS, "{policy}: {until} ns");
                at = until;
            }
            let (ops, until) = serve_all(&mut core, at);
            assert_eq!(ops, [Op::Read, Op::Read, change, Op::Sync], "{policy}");
            assert_eq!((core.queued(), until), (1, u64::MAX), "{policy}: the other read waits on");
        }
    }

    #[test]
    fn a_job_that_drains_slowly_does_not_keep_the_lane() {
        for patience_us in [0, 50_000] {
            let mut core = core(&PolicySpec::named("sstf").with("patience_us", patience_us).with("guard_batches", 0));
            push(&mut core, 0, 1, Op::Read, 1, 1 << 30);
            serve(&mut core, 0).unwrap();
            push(&mut core, 0, 2, Op::Write, 2, 4096);
            push(&mut core, 0, 3, Op::Sync, 2, u64::MAX);
            // A piece is taken every 40 ms, and the policy stays with the job.
            for at in (0..500).step_by(40).map(|ms| ms * MS) {
                ready(&mut core, at, 1, true);
                assert_eq!(serve(&mut core, at).unwrap().op, Op::Read);
                ready(&mut core, at, 1, false);
                let Next::Wait { until, .. } = core.next(Nanos(at)) else { panic!("it waits for the connection") };
                assert!(until.0 <= 500 * MS, "{until}");
            }
            assert_eq!(serve_all(&mut core, 500 * MS).0, [Op::Write, Op::Sync]);
        }
    }

    /// A policy that is switched to waits for half a second itself; connections that drain are served in its order.
    #[test]
    fn waits_for_connections_that_drain_are_the_policy_s() {
        for policy in POLICIES {
            let mut core = core(&PolicySpec::named("fifo"));
            ready(&mut core, 0, 1, false);
            push(&mut core, 0, 3, Op::Read, 3, 4096);
            let Next::Dispatch(first) = core.next(Nanos(0)) else { panic!() };
            push(&mut core, 0, 1, Op::Read, 1, 4096);
            push(&mut core, 0, 2, Op::Write, 1, 4096);
            core.reconfigure(Nanos(400 * MS), &PolicySpec::named(policy)).unwrap();
            core.event(Nanos(0), Event::Completed(Completion::of(&first, Nanos(0), Nanos(0))));
            let at = 899 * MS;
            assert_eq!(serve_all(&mut core, at).1.min(900 * MS), if policy == "sstf" { at + MS } else { 900 * MS });
            ready(&mut core, at, 1, true);
            assert_eq!(serve_all(&mut core, at), (vec![Op::Read, Op::Write], u64::MAX), "{policy}");
        }
    }
}
