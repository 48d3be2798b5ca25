//! Looks for data servers that hang, and for requests that they withhold: these hold no places.

use std::sync::Weak;

use impresario_engine::now;
use impresario_node::Entry;
use impresario_sched::LaneId;

use super::super::hung::SILENCE;
use super::batches::Load;
use super::{CALM_MAX, Dispatch, Forwarder, WATCH_EVERY};
use crate::outbox::STACK_BYTES;

impl Forwarder {
    /// It matters whether a server hangs, and no thread looks yet: one is to be started.
    pub(super) fn must_watch(&self, dispatch: &mut Dispatch) -> bool {
        let watches = !dispatch.is_watched && self.matters(dispatch);
        dispatch.is_watched |= watches;
        watches
    }

    /// Starts the thread that looks for servers that hang; it is noted already.
    pub(super) fn watch(&self) {
        let this = self.this.clone();
        let thread = std::thread::Builder::new().name("forward-watch".into()).stack_size(STACK_BYTES);
        let watching = move || {
            let mut calm = 0;
            while calm < CALM_MAX {
                std::thread::sleep(WATCH_EVERY);
                let Some(this) = this.upgrade() else { return };
                calm = if this.look_for_hung() { 0 } else { calm + 1 };
                if calm >= CALM_MAX && !this.rest() {
                    calm = 0;
                }
            }
        };
        if thread.spawn(watching).is_err() {
            // The next batch tries again.
            self.dispatch.lock().is_watched = false;
        }
    }

    /// It matters whether a server hangs: requests wait for places, or for a server that does, or something is read ahead by itself,
    /// which takes a place of its lane, of which the policy may allow a single one.
    pub(super) fn matters(&self, dispatch: &Dispatch) -> bool {
        let Dispatch { queue, hung, alone, .. } = dispatch;
        let (taken, waiting) = (queue.in_flight() - hung.stuck().min(queue.in_flight()), queue.len());
        (waiting > 0 && taken >= self.in_flight_max)
            || waiting + taken >= self.dispatch_max
            || !alone.is_empty()
            || ((hung.any() || hung.stuck() > 0) && (waiting > 0 || queue.in_flight() > 0))
    }

    /// The watching thread ends, unless it matters again.
    fn rest(&self) -> bool {
        let mut dispatch = self.dispatch.lock();
        dispatch.is_watched = self.matters(&dispatch);
        !dispatch.is_watched
    }

    /// Looks for servers that hang and takes what is stuck at them out of the limits; whether that mattered.
    fn look_for_hung(&self) -> bool {
        let mut dispatch = self.dispatch.lock();
        let matters = self.matters(&dispatch);
        let Dispatch { queue, hung, alone, .. } = &mut *dispatch;
        let at = now();
        let told = hung.look(at);
        queue.set_stuck(hung.stuck());
        let mut batches = vec![0; self.lanes.into()];
        hung.count_batches(&mut batches);
        for (_, (lane, since)) in alone.iter() {
            if let Some(count) = batches.get_mut(lane.index()) {
                *count += u32::from(at.since(*since) >= SILENCE);
            }
        }
        if hung.stuck() > 0 || hung.any() {
            let is_stuck = |entry: &&Entry<Load>| {
                let needs = entry.token.needs(self.split);
                hung.hangs(&needs) || hung.is_hopeless(&needs, entry.party)
            };
            for entry in queue.waiting().filter(is_stuck) {
                if let Some(count) = batches.get_mut(usize::from(entry.token.lane())) {
                    *count += 1;
                }
            }
        }
        let (stuck, calls) = (hung.stuck(), dispatch.calls());
        drop(dispatch);
        for lane in told {
            self.complaints.about("hung", &lane.to_string(), |_| {
                tracing::warn!(lane, "a data server does not answer; requests for others go on")
            });
        }
        self.threads.allow(stuck);
        self.call(calls);
        if let Some(engine) = self.engine.get().and_then(Weak::upgrade) {
            engine.set_stuck((0..).map(LaneId).zip(batches));
        }
        matters
    }
}
