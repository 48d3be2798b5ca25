//! `auto`: the rule that suits what is below the scheduler.
//!
//! - Where that sorts by itself (a kernel with a page cache and an I/O scheduler, a file system of its own), every request
//!   is handed over at once: a queue above would only hide requests from it. What is to be gained there is knowing
//!   what comes next, and that is not a matter of order: speculations are started as with every policy but `none`.
//! - Where single requests are served as they come, `mlf` with its defaults puts them in order.
//!
//! Which of the two it is, is known when the policy is built ([`Setup::sorted_below`](super::Setup::sorted_below)). The wait
//! of a request is bounded as that rule bounds it.

use std::any::Any;

use super::{Choice, Conduct, Done, Policy, PolicyInfo, View, WaitBound, build, mlf, none};
use crate::names::Who;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{ConnId, Nanos};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "auto",
    summary: "Hand over at once where what is below sorts by itself; else as mlf.",
    source: "measured above both kinds of storage; the papers leave the choice to future work (agios-2013, VI)",
    // By mlf's defaults it may wait for the next request of a stream.
    conduct: Conduct { idles: |_| true, ..mlf::INFO.conduct },
    params: &[],
    build: |_, setup| {
        let rule = if setup.sorted_below { none::INFO.name } else { mlf::INFO.name };
        Ok(Box::new(Auto { rule: build(&PolicySpec::named(rule), setup)? }))
    },
};

struct Auto {
    rule: Box<dyn Policy>,
}

impl Policy for Auto {
    fn spec(&self) -> PolicySpec {
        PolicySpec::named(INFO.name)
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.rule.enqueue(view, slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.rule.dequeue(view, slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        self.rule.select(view, batch)
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.rule.serve_lane(view, oldest, batch)
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        self.rule.wait_bound(view, slot)
    }

    fn is_withheld(&self, view: &View<'_>, slot: Slot) -> bool {
        self.rule.is_withheld(view, slot)
    }

    fn unlimited(&self) -> bool {
        self.rule.unlimited()
    }

    fn lane_requests(&self) -> Option<u32> {
        self.rule.lane_requests()
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.rule.completed(view, done);
    }

    fn readiness(&mut self, view: &View<'_>, conn: ConnId) {
        self.rule.readiness(view, conn);
    }

    fn explain(&self, _: &Who, _: Nanos) -> Option<String> {
        Some(match self.unlimited() {
            true => {
                "auto hands every request over at once: the storage below has a page cache and sorts by itself".into()
            }
            false => format!("auto schedules as {}: the storage below serves requests as they come", self.rule.spec()),
        })
    }

    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        let old = match old.downcast::<Auto>() {
            Ok(auto) => auto.rule as Box<dyn Any>,
            Err(old) => old,
        };
        self.rule.take_over(view, old);
    }
}
