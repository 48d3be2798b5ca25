//! Policies that keep an account per class of requests: `tbf` and `mclock`. A rule decides which flow sends and what that
//! costs its class; [`ByClass`] makes a policy of it.

use std::any::Any;

use smallvec::SmallVec;

use super::class_flows::{ClassFlows, Flight};
use super::classes::{Class, Classes};
use super::limits::Cost;
use super::turns::Turns;
use crate::limited::{Limited, Portions};
use crate::names::Who;
use crate::policy::{Choice, Done, Params, Policy, PolicyError, Setup, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

/// The queues of a rule.
pub(in crate::policy) type Queues<R> = ClassFlows<<R as ClassRule>::Account, <R as ClassRule>::Filed>;

/// A rule over classes.
pub(in crate::policy) trait ClassRule: Sized + Send + 'static {
    /// What a class has.
    type Account: Default + Send;
    /// Where a flow is in the rule's orders.
    type Filed: Default + Send;
    /// How a flow sends; the default if the guard demands it.
    type Phase: Default;
    /// The settings of the text rules, besides `each`.
    const SETTINGS: &[&str];

    /// For these classes; refuses settings in words.
    fn new(params: &Params, setup: &Setup, classes: &Classes<Self::Account>) -> Result<Self, String>;

    /// Accounts also change when nothing is sent.
    fn corrects(&self) -> bool;

    /// An account is as good as new.
    fn is_new(&self, account: &Self::Account, now: Nanos) -> bool;

    /// No setting withholds requests of a class, so the guard applies to them.
    fn is_guarded(&self, class: &Class<Self::Account>) -> bool;

    /// Until when its settings withhold the requests of a class.
    fn withheld_until(&self, classes: &Classes<Self::Account>, class: u32) -> Nanos;

    /// Moves a flow to its position by its class and its oldest request; out of all orders if there is none.
    fn file(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, oldest: Option<Slot>);

    /// The flow of a lane that sends next, or when there will be one.
    fn next(&mut self, queues: &mut Queues<Self>, view: &View<'_>, lane: usize) -> Result<(u32, Self::Phase), Nanos>;

    /// Charges a flow's batch to its class; says whether to the account that completions correct.
    fn charge(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, phase: Self::Phase, cost: Cost)
    -> bool;

    /// A batch ended whose share of its lane is `device_time`. Returns the classes whose requests may now go earlier.
    fn correct(
        &mut self,
        queues: &mut Queues<Self>,
        now: Nanos,
        flight: Flight,
        device_time: Nanos,
    ) -> SmallVec<[u32; 2]>;

    /// The worst-case wait of a queued request of a class.
    fn wait_bound(&self, queues: &Queues<Self>, view: &View<'_>, slot: Slot, class: u32) -> WaitBound;

    /// How it treats such a request, in words.
    fn explain(&self, classes: &Classes<Self::Account>, who: &Who, now: Nanos) -> String;

    /// See [`Policy::limited`].
    fn limited(&self, _classes: &Classes<Self::Account>, _now: Nanos) -> Vec<Limited> {
        Vec::new()
    }

    /// See [`Policy::set_portions`]. Returns the classes for which that changes anything.
    fn set_portions(&mut self, _: &mut Classes<Self::Account>, _: &Portions, _now: Nanos) -> Vec<u32> {
        Vec::new()
    }

    /// Takes over the accounts of an earlier instance.
    fn take_over(&mut self, mine: &mut Classes<Self::Account>, old: &Self, theirs: &Classes<Self::Account>, now: Nanos);

    /// Moves a flow after its class's account or its oldest request changed, or closes it.
    fn refile(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32) {
        let oldest = queues.flows.oldest(view, flow);
        self.file(queues, view, flow, oldest);
        if oldest.is_none() {
            queues.flows.close(flow);
        }
    }

    /// Moves a flow whose class has sent on another lane; its oldest request is the same.
    fn settle(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32) {
        self.refile(queues, view, flow);
    }

    /// The first flow of an order. Flows move only when they send: one that `is_late`, since its class sent on another
    /// lane, moves now.
    fn first<T: Copy>(
        &mut self,
        queues: &mut Queues<Self>,
        view: &View<'_>,
        order: impl Fn(&Self) -> Option<(T, u32)>,
        is_late: impl Fn(&Self, &Class<Self::Account>, T) -> bool,
    ) -> Option<(T, u32)> {
        loop {
            let (at, flow) = order(self)?;
            if !is_late(self, queues.class_of_flow(flow), at) {
                return Some((at, flow));
            }
            self.settle(queues, view, flow);
        }
    }
}

/// The policy of a rule.
pub(in crate::policy) struct ByClass<R: ClassRule> {
    params: Params,
    queues: Queues<R>,
    rule: R,
    turns: Turns,
}

impl<R: ClassRule> ByClass<R> {
    /// By the parameter `rules`.
    pub fn build(params: &Params, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
        let classes = Classes::parse(params, "rules", R::SETTINGS);
        let built = classes.and_then(|classes| Ok((R::new(params, setup, &classes)?, classes)));
        let (rule, classes) = built.map_err(|why| params.refuse("rules", why))?;
        let queues = ClassFlows::new(params, setup, classes, rule.corrects());
        Ok(Box::new(ByClass { params: params.clone(), queues, rule, turns: Turns::default() }))
    }

    fn refile(&mut self, view: &View<'_>, flow: u32) {
        self.rule.refile(&mut self.queues, view, flow);
    }

    /// Refiles the flows of classes that may go earlier.
    fn refile_all(&mut self, view: &View<'_>, classes: impl IntoIterator<Item = u32>) {
        for class in classes {
            for flow in self.queues.flows.of_party(class) {
                self.refile(view, flow);
            }
        }
    }

    /// Sends a flow's next batch.
    fn serve(&mut self, view: &View<'_>, flow: u32, phase: R::Phase, batch: &mut Vec<Slot>) -> Option<Choice> {
        let first = self.queues.flows.first(view, flow)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        let class = self.queues.flows.key(flow).1;
        let cost = self.queues.take(view, class, first, batch);
        let on_account = self.rule.charge(&mut self.queues, view, flow, phase, cost);
        self.queues.flows.depart(batch[0], Flight { class, on_account, estimate: cost.device });
        self.refile(view, flow);
        Some(Choice::Serve)
    }
}

impl<R: ClassRule> Policy for ByClass<R> {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let class = self.queues.class_of(view, slot, |class| self.rule.is_new(&class.account, view.now));
        let is_guarded = self.rule.is_guarded(self.queues.classes.get(class));
        if let Some(flow) = self.queues.push(view, class, slot, is_guarded) {
            self.refile(view, flow);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(flow) = self.queues.remove(view, slot) {
            self.refile(view, flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin_lanes(view, |lane| {
            if let Some(flow) = self.queues.flows.due(view, lane) {
                return self.serve(view, flow, R::Phase::default(), batch);
            }
            match self.rule.next(&mut self.queues, view, lane) {
                Ok((flow, phase)) => self.serve(view, flow, phase, batch),
                Err(until) => (until < Nanos::MAX).then_some(Choice::Wait { until, reason: WaitReason::Rate }),
            }
        });
        self.turns = turns;
        choice
    }

    fn is_withheld(&self, view: &View<'_>, slot: Slot) -> bool {
        let withheld = |class| self.rule.withheld_until(&self.queues.classes, class) > view.now;
        self.queues.class(slot).is_some_and(withheld)
    }

    fn may_withhold(&self) -> bool {
        true
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let bound = |class| self.rule.wait_bound(&self.queues, view, slot, class);
        self.queues.class(slot).map_or(WaitBound::of_batches(0), bound)
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        let Some(flight) = self.queues.returned(done) else { return };
        let earlier = self.rule.correct(&mut self.queues, view.now, flight, done.device_time);
        self.refile_all(view, earlier);
    }

    fn reads_device_time(&self) -> bool {
        self.rule.corrects()
    }

    fn explain(&self, who: &Who, now: Nanos) -> Option<String> {
        Some(self.rule.explain(&self.queues.classes, who, now))
    }

    fn limited(&self, now: Nanos) -> Vec<Limited> {
        self.rule.limited(&self.queues.classes, now)
    }

    fn set_portions(&mut self, view: &View<'_>, portions: &Portions) {
        let changed = self.rule.set_portions(&mut self.queues.classes, portions, view.now);
        self.refile_all(view, changed);
    }

    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        if let Ok(old) = old.downcast::<ByClass<R>>() {
            self.rule.take_over(&mut self.queues.classes, &old.rule, &old.queues.classes, view.now);
        }
    }
}
