//! What is changed and asked of a running engine: policy, limits, predictions, status.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use impresario_sched::limited::{Limited, Portions};
use impresario_sched::loads::WhoLoads;
use impresario_sched::{
    Event, LaneId, Members, Nanos, Observer, PolicyError, PolicySpec, PredictedQueues, RequestId, Status, Who,
};

use crate::state::State;
use crate::{Engine, now};

/// How far ahead a change may be planned. An instant further off means that the clocks of two machines differ.
pub(crate) const AGREED_MAX: Nanos = Nanos(60_000_000_000);

impl<T: Send + 'static> Engine<T> {
    /// How the policy treats such requests, in words; `None` if it does not depend on the requester.
    pub fn explain(&self, who: &Who) -> Option<String> {
        self.shared.lock().core.explain(now(), who)
    }

    /// Switches the policy at once. An error changes nothing. Drops a planned change.
    pub fn set_policy(&self, spec: &PolicySpec) -> Result<(), PolicyError> {
        let mut state = self.shared.lock();
        let at = now();
        state.core.reconfigure(at, spec)?;
        state.planned = None;
        self.shared.pump(state, at);
        Ok(())
    }

    /// Switches the policy at an instant of shared time, nanoseconds since 1970, so that nodes configured one after the
    /// other switch together: windows that follow shared time stay coordinated. An instant in the past means now. An
    /// error is returned at once and changes nothing; a later change replaces this one.
    pub fn set_policy_at(&self, spec: &PolicySpec, shared_ns: i64) -> Result<(), PolicyError> {
        let mut state = self.shared.lock();
        state.core.check(spec)?;
        let at = now();
        state.clock_due = at;
        self.shared.keep_shared_time(&mut state, at);
        let ahead_ns = shared_ns.saturating_sub(state.shared_time.at(at));
        if ahead_ns > AGREED_MAX.0 as i64 {
            return Err(PolicyError::Unsuitable {
                policy: "switch",
                why: format!(
                    "the agreed instant is {} s ahead of this machine's clock; synchronise the clocks",
                    ahead_ns / 1_000_000_000
                ),
            });
        }
        state.planned = Some((spec.clone(), shared_ns));
        state.clock_due = at;
        self.shared.timer.notify_one();
        self.shared.pump(state, at);
        Ok(())
    }

    /// Dispatches nothing to a lane before an instant; an instant in the past ends a hold.
    pub fn hold(&self, lane: LaneId, until: Nanos) {
        let mut state = self.shared.lock();
        state.core.hold(lane, until);
        self.shared.pump(state, now()); // sets the alarm for the end of the hold, or starts batches now
    }

    /// Tells how many of the batches in flight on each of these lanes wait for a device that hangs: see
    /// [`impresario_sched::Core::set_stuck`].
    pub fn set_stuck(&self, lanes: impl IntoIterator<Item = (LaneId, u32)>) {
        let mut state = self.shared.lock();
        lanes.into_iter().for_each(|(lane, batches)| state.core.set_stuck(lane, batches));
        self.shared.pump(state, now());
    }

    /// Changes the limits of batches and bytes in flight per lane; 0 keeps a limit.
    pub fn set_depth(&self, lane_requests: u32, lane_bytes: u64) {
        let mut state = self.shared.lock();
        state.core.set_depth(lane_requests, lane_bytes);
        self.shared.pump(state, now()); // starts what a higher limit allows
    }

    /// Sets the observer of requests that end, or none. Returns the previous one, which receives nothing more.
    pub fn observe(&self, observer: Option<Arc<dyn Observer>>) -> Option<Arc<dyn Observer>> {
        let mut state = self.shared.lock();
        state.core.watch(observer.is_some());
        std::mem::replace(&mut state.observer, observer)
    }

    /// Sets the prediction from a recorded run for policies that use one; `None` clears it.
    pub fn foresee(&self, queues: Option<Arc<PredictedQueues>>) {
        // Before the lock is held: policies ask for them.
        queues.iter().for_each(|queues| drop(queues.triggers()));
        let mut state = self.shared.lock();
        // It may be large: drop it after releasing the lock.
        let before = state.core.foresee(queues);
        self.shared.pump(state, now());
        drop(before);
    }

    /// The policy with all its parameters.
    pub fn policy(&self) -> PolicySpec {
        self.shared.lock().core.policy()
    }

    /// Policy, queue lengths, statistics.
    pub fn status(&self) -> Status {
        self.shared.lock().core.status()
    }

    /// The applications and users whose requests took most time recently.
    pub fn who_loads(&self) -> WhoLoads {
        self.shared.lock().core.who_loads(now())
    }

    /// The classes of requests with limits, as far as they are in use, and whether these are all.
    pub fn limited(&self) -> (Vec<Limited>, bool) {
        let state = self.shared.lock();
        state.core.limited(now())
    }

    /// The policy may withhold requests by a rule. Saves the lock under most policies; what it says of a switch that was just made
    /// counts from its next decision on.
    pub fn may_withhold(&self) -> bool {
        self.shared.may_withhold.load(Ordering::Relaxed)
    }

    /// Shows the contexts of the requests that wait for a rule of the policy, or for one in flight that is withheld `below`; see
    /// [`impresario_sched::Core::each_withheld`]. With the engine's lock held: both must be quick.
    pub fn for_each_withheld(&self, below: &dyn Fn(RequestId) -> bool, mut look: impl FnMut(&T)) {
        let state = self.shared.lock();
        let State { core, held, .. } = &*state;
        core.each_withheld(now(), below, |id| {
            held.get(id.0 as u32 as usize).into_iter().flatten().for_each(|held| look(&held.context));
        });
    }

    /// Sets the portions of limits over all servers that this one may grant, and starts what they allow.
    pub fn set_portions(&self, portions: Portions) {
        let mut state = self.shared.lock();
        state.core.set_portions(now(), portions);
        self.shared.pump(state, now());
    }

    /// Says which nodes and lanes there are from an instant of shared time on; see [`Event::Members`].
    pub fn set_members(&self, members: Members) {
        let mut state = self.shared.lock();
        let at = now();
        state.core.event(at, Event::Members(members));
        self.shared.pump(state, at);
    }

    /// The present in shared time.
    pub fn shared_now(&self) -> Nanos {
        let mut state = self.shared.lock();
        let at = now();
        self.shared.keep_shared_time(&mut state, at);
        Nanos(u64::try_from(state.shared_time.at(at)).unwrap_or(0))
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&self) {
        self.shared.lock().core.reset_statistics();
    }
}
