//! What the core reports about itself.

use super::{Core, PRESSING_AFTER};
use crate::contract::{LaneStatus, PredictionStatus, Status};
use crate::limited::Limited;
use crate::loads::WhoLoads;
use crate::names::Who;
use crate::policy::{self, PolicyError, WaitBound};
use crate::spec::PolicySpec;
use crate::table::State;
use crate::types::{FileId, Nanos, Op, Request, RequestId};

impl Core {
    /// The configured policy with all its parameters.
    pub fn policy(&self) -> PolicySpec {
        self.policy.spec()
    }

    /// The policy that currently decides, if the configured one chooses among others, and how often that changed.
    pub fn acting(&self) -> (PolicySpec, u64) {
        (self.policy.acting(), self.own_switches)
    }

    /// The configured policy's choice and its reason; `None` if it does not choose.
    pub fn chosen(&self) -> Option<policy::Chosen> {
        self.policy.chosen()
    }

    /// Checks whether [`Core::reconfigure`] would accept this policy.
    pub fn check(&self, spec: &PolicySpec) -> Result<(), PolicyError> {
        policy::build(spec, &self.shared.setup()).map(drop)
    }

    /// The worst-case wait of a queued request from now; `None` when it is blocked, in flight or gone.
    pub fn wait_bound(&self, now: Nanos, id: RequestId) -> Option<WaitBound> {
        let slot = self.shared.table.find(id)?;
        if self.shared.table.state(slot) != State::Queued || !self.shared.table.op(slot).is_data() {
            return None;
        }
        let mut bound = self.policy.wait_bound(&self.shared.view(now), slot);
        if self.shared.minds_connections && self.shared.table.op(slot) == Op::Write {
            bound.idle = bound.idle.min(PRESSING_AFTER);
        }
        Some(bound)
    }

    /// Whether a rule of the policy currently withholds a queued request.
    pub fn is_withheld(&self, now: Nanos, id: RequestId) -> bool {
        let slot = self.shared.table.find(id).filter(|s| self.shared.table.state(*s) == State::Queued);
        slot.is_some_and(|slot| self.policy.is_withheld(&self.shared.view(now), slot))
    }

    /// An outstanding request with its whole extent.
    pub fn request(&self, id: RequestId) -> Option<Request> {
        let slot = self.shared.table.find(id)?;
        let mut request = self.shared.table.request(slot);
        if let Some(pieced) = self.pieced.get(&slot) {
            request.extent = pieced.whole;
        }
        Some(request)
    }

    /// The youngest queued or blocked request with exactly these bytes of a file; on lane 0 if lanes have separate
    /// spaces.
    pub fn youngest_queued(&self, file: FileId, op: Op, start: u64, len: u64) -> Option<RequestId> {
        let waits = |slot| matches!(self.shared.table.state(slot), State::Queued | State::Blocked);
        let slot = self.conflicts.youngest(&self.shared.table, file, op, (start, len), waits)?;
        Some(self.shared.table.id(slot))
    }

    /// How the policy currently treats requests of this kind, in words; `None` if all are treated alike.
    pub fn explain(&self, now: Nanos, who: &Who) -> Option<String> {
        self.policy.explain(who, now)
    }

    /// True if nothing is queued, blocked or in flight.
    pub fn is_empty(&self) -> bool {
        self.shared.table.is_empty()
    }

    /// Requests queued, including blocked ones.
    pub fn queued(&self) -> u32 {
        self.queued + self.blocked
    }

    /// Free slots for further requests.
    pub fn room(&self) -> usize {
        self.shared.table.capacity() as usize - self.shared.table.len()
    }

    /// The applications and users whose requests took most time recently; empty without statistics.
    pub fn who_loads(&mut self, now: Nanos) -> WhoLoads {
        self.statistics.as_mut().map(|s| s.who_loads(now)).unwrap_or_default()
    }

    /// The classes of requests with limits, as far as they are in use: at most [`Limited::LISTED_MAX`], those that wait
    /// first; and whether these are all.
    pub fn limited(&self, now: Nanos) -> (Vec<Limited>, bool) {
        let mut limited = self.policy.limited(now);
        limited.sort_by_key(|l| std::cmp::Reverse(l.waiting));
        let is_all = limited.len() <= Limited::LISTED_MAX;
        limited.truncate(Limited::LISTED_MAX);
        (limited, is_all)
    }

    /// Policy, queues and statistics.
    pub fn status(&self) -> Status {
        Status {
            policy: self.policy.spec(),
            chosen: self.policy.chosen(),
            capacity: self.shared.table.capacity(),
            queued: self.queued,
            blocked: self.blocked,
            in_flight_batches: self.shared.in_flight_batches
                + self.shared.lanes.iter().map(|l| l.in_flight_syncs).sum::<u32>(),
            speculated_bytes: self.speculations.started_bytes(),
            lanes: self
                .shared
                .lanes
                .iter()
                .map(|l| LaneStatus {
                    in_flight_batches: l.in_flight_requests + l.in_flight_syncs,
                    in_flight_bytes: l.in_flight_bytes,
                    limit_batches: (l.limit_requests != u32::MAX).then_some(l.limit_requests),
                })
                .collect(),
            cost: self.corrector.status(),
            foretold: self
                .foreseen
                .as_ref()
                .map(|run| PredictionStatus { requests: run.len() as u64, linked: self.policy.linked() }),
            statistics: self.statistics.as_ref().map(|s| s.report()).unwrap_or_default(),
            histograms: self.statistics.as_ref().map(|s| s.histograms()).unwrap_or_default(),
        }
    }
}
