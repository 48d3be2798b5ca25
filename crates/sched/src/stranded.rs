//! One space for all lanes: the oldest queued request of each lane.
//!
//! Where requests are not split at lanes, a policy keeps one set of queues for all of them, so the request whose turn
//! it is may be for a busy lane while another lane idles. The core then asks the policy to serve the idle lane
//! ([`Policy::serve_lane`](crate::policy::Policy::serve_lane)), and shows it where to begin. Policies that look at lanes
//! themselves never come to that: the order of arrival at lanes is kept from the first time on that one does.

use crate::policy::parts::arrivals::Arrivals;
use crate::policy::{Choice, Policy, View, WaitReason};
use crate::table::{Slot, State, Table};

/// The order of arrival at each lane; lanes take turns.
#[derive(Default)]
pub(crate) struct Stranded {
    /// `None` until it is asked for.
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

    /// Another policy may not ask.
    pub fn forget(&mut self) {
        self.arrivals = None;
    }

    /// Has the policy serve one of the lanes that have room and requests, or returns its shortest wait.
    pub fn serve(&mut self, view: &View<'_>, policy: &mut dyn Policy, batch: &mut Vec<Slot>) -> Choice {
        let mut wait = Choice::until_event(WaitReason::LanesBusy);
        for lane in view.open_lanes(self.next) {
            let arrivals = self.arrivals.get_or_insert_with(|| arrivals_of_queued(view));
            let Some(oldest) = arrivals.oldest(view.table, lane) else { continue };
            match policy.serve_lane(view, oldest.slot(), batch) {
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
    let mut arrivals = Arrivals::new(view.lanes.len(), view.table.capacity());
    let queued = view.table.in_state(|state| state == State::Queued).into_iter();
    for slot in queued.filter(|slot| view.table.op(*slot).is_data()) {
        arrivals.insert(view.table, view.table.lane(slot).index(), slot);
    }
    arrivals
}
