//! Which requests wait for a rule of the policy rather than for a device: their clients are told to wait on.

use rustc_hash::FxHashMap;

use super::Core;
use crate::table::{Slot, State};
use crate::types::{Nanos, RequestId};

impl Core {
    /// The policy has rules that may withhold requests.
    pub fn may_withhold(&self) -> bool {
        self.policy.may_withhold()
    }

    /// Shows the requests that wait for a rule: those that the policy withholds at present, and those that an older one of these
    /// blocks, or one in flight that is withheld `below` this core.
    pub fn each_withheld(&self, now: Nanos, below: &dyn Fn(RequestId) -> bool, mut look: impl FnMut(RequestId)) {
        let table = &self.shared.table;
        let mut known = FxHashMap::default();
        for slot in table.in_state(|state| matches!(state, State::Queued | State::Blocked)) {
            if self.waits_for_a_rule(now, below, slot, &mut known) {
                look(table.id(slot));
            }
        }
    }

    /// Whether the request at the root of those that block one another is withheld. Each slot is visited once: `known` has what was
    /// found out.
    fn waits_for_a_rule(
        &self,
        now: Nanos,
        below: &dyn Fn(RequestId) -> bool,
        slot: Slot,
        known: &mut FxHashMap<Slot, bool>,
    ) -> bool {
        let table = &self.shared.table;
        let (mut at, mut path) = (slot, Vec::new());
        let is_withheld = loop {
            if let Some(known) = known.get(&at) {
                break *known;
            }
            path.push(at);
            match table.state(at) {
                State::Queued => break self.policy.is_withheld(&self.shared.view(now), at),
                State::InFlight => break below(table.id(at)),
                // A blocker is older, so this ends.
                State::Blocked => match self.conflicts.blocker(table, at) {
                    Some(older) => at = older,
                    None => break false,
                },
                State::Free | State::Speculative | State::Passing => break false,
            }
        };
        known.extend(path.into_iter().map(|slot| (slot, is_withheld)));
        is_withheld
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{CoreConfig, Next};
    use crate::spec::PolicySpec;
    use crate::types::{Extent, FileId, JobId, LaneId, Op, Request};

    fn request(job: u32, op: Op, (offset, len): (u64, u64)) -> Request {
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        Request { job: JobId(job), ..Request::new(op, extent) }
    }

    #[test]
    fn what_waits_behind_a_withheld_request_waits_for_the_rule_too() {
        let rules = "slow: job=1 {bytes_per_s=1, burst=1}";
        let spec = PolicySpec::named("tbf").with("rules", rules);
        let mut core = Core::new(CoreConfig::single_lane(64), &spec).unwrap();
        assert!(core.may_withhold());
        core.names_mut().name_job(JobId(0), 7);
        core.names_mut().name_job(JobId(1), 1);
        let push = |core: &mut Core, request: &Request| core.push(Nanos(0), request).unwrap();
        let first = push(&mut core, &request(1, Op::Write, (0, 4096)));
        assert!(matches!(core.next(Nanos(0)), Next::Dispatch(_)), "it takes the whole bucket");
        let withheld = push(&mut core, &request(1, Op::Write, (8192, 4096)));
        // Of another job: behind the withheld write, behind that again, behind what is in flight, behind nothing.
        let over = push(&mut core, &request(0, Op::Read, (8192, 4096)));
        let sync = push(&mut core, &request(0, Op::Sync, (0, u64::MAX)));
        let behind = push(&mut core, &request(0, Op::Read, (0, 4096)));
        let free = push(&mut core, &request(0, Op::Write, (1 << 20, 4096)));
        let told = |core: &Core, below: &dyn Fn(RequestId) -> bool| {
            let mut told = Vec::new();
            core.each_withheld(Nanos(1000), below, |id| told.push(id));
            told
        };
        let seen = told(&core, &|_| false);
        assert!(seen.contains(&withheld) && seen.contains(&over), "{seen:?}");
        assert!(!seen.contains(&behind) && !seen.contains(&free) && !seen.contains(&first), "{seen:?}");
        let seen = told(&core, &|id| id == first);
        assert!([withheld, over, sync, behind].iter().all(|id| seen.contains(id)) && !seen.contains(&free), "{seen:?}");
        core.reconfigure(Nanos(2000), &PolicySpec::named("fifo")).unwrap();
        assert!(!core.may_withhold() && told(&core, &|_| false).is_empty());
    }
}
