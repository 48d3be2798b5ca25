//! The oldest queued request of each lane, for lanes that share one space.
//!
//! If requests are not split at lanes, a policy keeps a single set of queues, so the request whose turn it is may be
//! for a busy lane while another lane idles. The core then asks the policy to serve the idle lane
//! ([`Policy::serve_lane`](crate::policy::Policy::serve_lane)) and passes that lane's oldest request. Policies that
//! handle lanes themselves never get there: the per-lane order of arrival is kept only from its first use.

use crate::policy::parts::arrivals::Arrivals;
use crate::policy::{Choice, Policy, View, WaitReason};
use crate::table::{Slot, State, Table};

/// The order of arrival per lane; lanes take turns.
#[derive(Default)]
pub(crate) struct Stranded {
    /// `None` until first used.
    arrivals: Option<Arrivals>,
    next: usize,
}

impl Stranded {
    /// The policy gets a request.
    pub fn insert(&mut self, table: &Table, slot: Slot) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.insert(table, table.lane(slot).index(), slot);
        }
    }

    /// Requests were dispatched or cancelled.
    pub fn remove(&mut self, table: &Table, slots: &[Slot]) {
        if let Some(arrivals) = &mut self.arrivals {
            slots.iter().for_each(|slot| arrivals.remove(table, table.lane(*slot).index(), *slot));
        }
    }

    /// A new policy may never use it.
    pub fn forget(&mut self) {
        self.arrivals = None;
    }

    /// Lets the policy serve one of the lanes with room and requests; otherwise returns its shortest wait.
    pub fn serve(&mut self, view: &View<'_>, policy: &mut dyn Policy, batch: &mut Vec<Slot>) -> Choice {
        let mut wait = Choice::until_event(WaitReason::LanesBusy);
        for lane in view.open_lanes(self.next) {
            let arrivals = self.arrivals.get_or_insert_with(|| arrivals_of_queued(view));
            let Some(oldest) = arrivals.oldest(view.table, lane) else { continue };
            match policy.serve_lane(view, oldest, batch) {
                choice @ Choice::Wait { .. } => wait = choice.sooner(wait),
                serve => {
                    self.next = (lane + 1) % view.lanes.len();
                    return serve;
                }
            }
        }
        wait
    }
}

fn arrivals_of_queued(view: &View<'_>) -> Arrivals {
    let mut arrivals = Arrivals::new(view.lanes.len());
    let queued = view.table.in_state(|state| state == State::Queued).into_iter();
    for slot in queued.filter(|slot| view.table.op(*slot).is_data()) {
        arrivals.insert(view.table, view.table.lane(slot).index(), slot);
    }
    arrivals
}
