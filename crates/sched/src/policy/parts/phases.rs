//! The I/O phases of applications as a server sees them: when each began, what the application has received in it, and
//! how often phases occur.
//!
//! A phase begins with a request of an application that had nothing outstanding for at least the gap, and lasts until
//! the next one begins. Applications are identified by stable key and outlive their requests; at most the [`JOBS_MAX`]
//! most recent idle ones (or as many as there are busy ones, if more) are remembered.

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

use crate::policy::View;
use crate::table::Slot;
use crate::types::Nanos;

/// Maximum idle applications remembered.
const JOBS_MAX: usize = 16 << 10;

/// The mean period covers about this many recent phases.
const PERIODS: u32 = 16;

/// An application.
#[derive(Clone, Copy, Debug)]
pub(in crate::policy) struct Application {
    /// Its stable key.
    pub key: u64,
    /// When its current phase began, and that phase's number in the order of all phases.
    pub began: Nanos,
    pub order: u64,
    /// What it has received in this phase, as counted by the policy.
    pub got: u64,
    /// Requests queued or in flight, and since when there are none.
    outstanding: u32,
    idle_since: Nanos,
    pub period: Period,
}

/// The time between the starts of phases.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::policy) struct Period {
    pub mean_s: f64,
    /// Periods seen, counted up to [`PERIODS`].
    pub seen: u32,
}

impl Period {
    fn add(&mut self, period: Nanos) {
        self.seen = (self.seen + 1).min(PERIODS);
        self.mean_s += (period.as_secs_f64() - self.mean_s) / f64::from(self.seen);
    }
}

/// The applications of a policy.
pub(in crate::policy) struct Phases {
    gap: Nanos,
    by_key: FxHashMap<u64, u32>,
    jobs: Rows<Application>,
    next_order: u64,
    /// The number of applications at which idle ones are dropped.
    forget_at: usize,
}

impl Phases {
    /// A pause of `gap` separates phases.
    pub fn new(gap: Nanos) -> Phases {
        Phases { gap, by_key: FxHashMap::default(), jobs: Rows::default(), next_order: 0, forget_at: JOBS_MAX }
    }

    /// Records an arrival; returns its application.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) -> u32 {
        let key = view.names.job(view.table.job(slot));
        let at = view.table.arrival(slot).min(view.now);
        let known = self.by_key.get(&key).copied();
        let id = known.unwrap_or_else(|| self.add(key));
        let job = &mut self.jobs[id];
        if job.outstanding == 0 && (known.is_none() || at.since(job.idle_since) >= self.gap) {
            if known.is_some() {
                job.period.add(at.since(job.began));
            }
            (job.began, job.got, job.order) = (at, 0, self.next_order);
            self.next_order += 1;
        }
        job.outstanding += 1;
        id
    }

    /// Requests of an application were cancelled or completed.
    pub fn left(&mut self, id: u32, requests: u32, now: Nanos) {
        let job = &mut self.jobs[id];
        job.outstanding = job.outstanding.saturating_sub(requests);
        if job.outstanding == 0 {
            job.idle_since = now;
        }
    }

    fn add(&mut self, key: u64) -> u32 {
        if self.by_key.len() >= self.forget_at {
            self.forget();
        }
        let period = Period::default();
        let fresh =
            Application { key, began: Nanos::ZERO, order: 0, got: 0, outstanding: 0, idle_since: Nanos::ZERO, period };
        let id = self.jobs.insert(fresh);
        self.by_key.insert(key, id);
        id
    }

    /// Drops the half of the idle applications that were idle longest.
    fn forget(&mut self) {
        let idle = |id: &u32| Some(self.jobs[*id]).filter(|j| j.outstanding == 0);
        let mut idle: Vec<(Nanos, u64)> =
            self.by_key.values().filter_map(|id| idle(id).map(|j| (j.idle_since, j.key))).collect();
        idle.sort_unstable();
        for (_, key) in &idle[..idle.len().div_ceil(2)] {
            if let Some(id) = self.by_key.remove(key) {
                self.jobs.release(id);
            }
        }
        // If most are busy, do not search again before as many new ones have come.
        self.forget_at = JOBS_MAX.max(2 * (self.by_key.len() - idle.len() / 2));
    }

    /// An application.
    pub fn job(&self, id: u32) -> &Application {
        &self.jobs[id]
    }

    /// An application, mutable.
    pub fn job_mut(&mut self, id: u32) -> &mut Application {
        &mut self.jobs[id]
    }

    /// An application by key.
    pub fn find(&self, key: u64) -> Option<&Application> {
        self.by_key.get(&key).map(|id| self.job(*id))
    }

    /// Exports all applications, for a policy with changed parameters.
    pub fn export(&self) -> Vec<Application> {
        self.by_key.values().map(|id| *self.job(*id)).collect()
    }

    /// Imports applications. Their requests are queued again, so all are idle for now and no phase has ended.
    pub fn import(&mut self, known: Vec<Application>) {
        for job in known {
            let id = self.add(job.key);
            let idle_since = if job.outstanding > 0 { Nanos::MAX } else { job.idle_since };
            self.jobs[id] = Application { outstanding: 0, idle_since, ..job };
            self.next_order = self.next_order.max(job.order + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Busy applications are not searched for each new one; idle ones are dropped.
    #[test]
    fn forgetting_is_bounded_in_work_and_memory() {
        let mut phases = Phases::new(Nanos(1));
        let (mut looks, mut forget_at) = (0, phases.forget_at);
        for key in 0..4 * JOBS_MAX as u64 {
            let id = phases.add(key);
            phases.job_mut(id).outstanding = 1;
            looks += u32::from(phases.forget_at != forget_at);
            forget_at = phases.forget_at;
        }
        assert_eq!((looks, phases.by_key.len()), (2, 4 * JOBS_MAX));
        (0..phases.jobs.capacity() as u32).for_each(|id| phases.left(id, 1, Nanos(u64::from(id))));
        for key in 0..20 * JOBS_MAX as u64 {
            phases.add(key + (1 << 40));
        }
        assert!(phases.by_key.len() <= JOBS_MAX && phases.jobs.capacity() <= 4 * JOBS_MAX, "{}", phases.by_key.len());
    }
}
