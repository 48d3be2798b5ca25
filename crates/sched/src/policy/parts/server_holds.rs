//! Holding the server whose window it is for the next request of its stream, for `twins`.

use super::anticipation::{Anticipation, Stream};
use super::server_queues::ServerQueues;
use crate::policy::{Done, Params, Setup, View};
use crate::table::Slot;
use crate::types::{LaneId, Nanos};

/// The holds of all servers; none with `anticipation_us=0`.
pub(in crate::policy) struct ServerHolds {
    anticipation: Option<Anticipation>,
    /// A request that starts at most this far behind the last one continues its stream.
    reach_bytes: u64,
}

impl ServerHolds {
    /// From the parameters of `twins`.
    pub fn new(params: &Params, setup: &Setup) -> ServerHolds {
        let longest = Nanos::from_micros(params.integer("anticipation_us"));
        ServerHolds {
            anticipation: (longest > Nanos::ZERO).then(|| Anticipation::new(longest, false, setup.lanes)),
            reach_bytes: params.integer("batch_bytes"),
        }
    }

    /// Whether servers are held at all.
    pub fn any(&self) -> bool {
        self.anticipation.is_some()
    }

    /// How long a server is held, if at all. No hold is needed for a stream that is continued by a queued request.
    pub fn until(&mut self, view: &View<'_>, queues: &ServerQueues, server: LaneId) -> Option<Nanos> {
        let anticipation = self.anticipation.as_mut()?;
        let (stream, start) = anticipation.expected(server)?;
        if queues.continues(view, stream, start, start.saturating_add(self.reach_bytes)) {
            anticipation.give_up(view.now, server);
            return None;
        }
        anticipation.hold(view.now, server)
    }

    /// A request was queued.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) {
        let Some(anticipation) = &mut self.anticipation else { return };
        if let Some((stream, start)) = anticipation.expected(view.table.lane(slot))
            && stream == stream_of(view, slot)
            && (start..=start.saturating_add(self.reach_bytes)).contains(&view.table.start(slot))
        {
            // The fixed part of the cost is the price of turning elsewhere.
            anticipation.fulfilled(view.now, stream.0, view.cost.ttp(stream.2, 0));
        }
    }

    /// A batch ended while it is `home`'s window, until `end`: if the batch was its last, its next request is expected.
    pub fn completed(&mut self, view: &View<'_>, (home, end): (LaneId, Nanos), done: &Done<'_>) {
        let (Some(anticipation), Some(&slot)) = (&mut self.anticipation, done.slots.first()) else { return };
        let stream = stream_of(view, slot);
        let idle = view.lanes[stream.0.index()].in_flight_requests == 0;
        if done.errno == 0 && idle && home == stream.0 {
            anticipation.expect(view.now, stream, done.end, end);
        }
    }

    /// Takes over another instance's accounts of streams after a change of parameters.
    pub fn take_over(&mut self, other: ServerHolds) {
        if let (Some(mine), Some(theirs)) = (&mut self.anticipation, other.anticipation) {
            mine.take_over(theirs);
        }
    }
}

fn stream_of(view: &View<'_>, slot: Slot) -> Stream {
    (view.table.lane(slot), view.names.file(view.table.file(slot)), view.table.op(slot))
}
