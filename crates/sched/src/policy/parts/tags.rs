//! The tags of `mclock`'s classes, and its flows in their order on each lane.

use super::flows::refile;
use super::shares::{Share, span};
use crate::sorted::SortedSet;
use crate::types::Nanos;

/// The base of the next request's tags of a class.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::policy) struct Tags {
    pub reservation: Nanos,
    /// Virtual time, ns; 64 bits would overflow within days.
    pub weight: u128,
    pub limit: Nanos,
}

impl Tags {
    /// Charges a batch to the limit and, in the constraint phase, to the reservation, whose tag was due at `due`.
    pub fn charge(&mut self, share: &Share, cost: f64, now: Nanos, due: Option<Nanos>) {
        if let Some(due) = due {
            self.reservation = due.max(self.reservation) + span(cost, share.reservation);
        }
        if share.limit > 0.0 {
            self.limit = self.limit.max(now) + span(cost, share.limit);
        }
    }

    /// Device time proved to be `more` or `less` than estimated.
    pub fn correct(&mut self, share: &Share, more: Nanos, less: Nanos, by_reservation: bool) {
        let at_rate = |span: Nanos, rate: f64| Nanos::from_secs_f64(span.as_secs_f64() / rate);
        let correct = |tag: &mut Nanos, rate: f64| {
            if rate > 0.0 {
                *tag = (*tag + at_rate(more, rate)).since(at_rate(less, rate));
            }
        };
        let [more_v, less_v] = [more, less].map(|span| u128::from(at_rate(span, share.weight).0));
        self.weight = (self.weight + more_v).saturating_sub(less_v);
        correct(&mut self.limit, share.limit);
        if by_reservation {
            correct(&mut self.reservation, share.reservation);
        }
    }
}

/// Breaks ties by arrival.
type Tag<T = Nanos> = (T, u64);

const NO_TAG: Tag = (Nanos::MAX, u64::MAX);
const NO_WEIGHT: Tag<u128> = (u128::MAX, u64::MAX);

/// The sets of its lane that contain a flow, and its keys there.
pub(in crate::policy) struct Filed {
    reservation: Tag,
    weight: Tag<u128>,
    limit: Tag,
    /// The oldest request, if the class has a limit and is within it.
    allowed: u64,
}

impl Default for Filed {
    fn default() -> Self {
        Filed { reservation: NO_TAG, weight: NO_WEIGHT, limit: NO_TAG, allowed: u64::MAX }
    }
}

/// The tags by which a flow sends.
pub(in crate::policy) struct Due {
    pub reservation: Nanos,
    weight: Option<u128>,
}

/// The two phases of mClock.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::policy) enum Phase {
    Constraint,
    #[default]
    Weight,
}

#[derive(Default)]
struct Group {
    reservations: SortedSet<(Tag, u32)>,
    /// Within their limits.
    weights: SortedSet<(Tag<u128>, u32)>,
    /// At their limits.
    limited: SortedSet<(Tag, u32)>,
    /// Flows of limited classes within their limit, by oldest request; and the batches that passed over the first.
    allowed: SortedSet<(u64, u32)>,
    left_out: u64,
    /// The last weight tag served.
    virtual_now: u128,
    /// Consecutive batches by reservation while a flow within its limit waited.
    reserved_run: u64,
}

/// The flows of all lanes in order of their tags.
pub(in crate::policy) struct TagOrder {
    groups: Vec<Group>,
}

impl TagOrder {
    /// No flows yet.
    pub fn new(lanes: u16) -> TagOrder {
        TagOrder { groups: (0..lanes).map(|_| Group::default()).collect() }
    }

    /// Moves a flow to where its class's share and tags, and the arrival and order of its oldest request, want it.
    pub fn refile(
        &mut self,
        now: Nanos,
        group: usize,
        flow: u32,
        filed: &mut Filed,
        (share, tags): (&Share, &Tags),
        oldest: Option<(Nanos, u64)>,
    ) {
        let g = &mut self.groups[group];
        let mut fresh = Filed::default();
        if let Some((arrival, seq)) = oldest {
            if share.reservation > 0.0 {
                fresh.reservation = (tags.reservation.max(arrival.min(now)), seq);
            }
            match share.limit > 0.0 && tags.limit > now {
                true => fresh.limit = (tags.limit, seq),
                false => fresh.weight = (tags.weight.max(g.virtual_now), seq),
            }
            if share.limit > 0.0 && fresh.limit == NO_TAG {
                fresh.allowed = seq;
            }
        }
        refile(&mut g.reservations, flow, filed.reservation, fresh.reservation, NO_TAG);
        refile(&mut g.weights, flow, filed.weight, fresh.weight, NO_WEIGHT);
        refile(&mut g.limited, flow, filed.limit, fresh.limit, NO_TAG);
        refile(&mut g.allowed, flow, filed.allowed, fresh.allowed, u64::MAX);
        *filed = fresh;
    }

    /// The flow at its limit that drops below it first, and when.
    pub fn first_limited(&self, group: usize) -> Option<(Nanos, u32)> {
        self.groups[group].limited.first().map(|((tag, _), flow)| (tag, flow))
    }

    /// The flow with the oldest request among limited classes within their limits, if `guard` batches passed over it;
    /// and that request.
    pub fn first_left_out(&self, group: usize, guard: u64) -> Option<(u64, u32)> {
        let g = &self.groups[group];
        g.allowed.first().filter(|_| guard > 0 && g.left_out >= guard)
    }

    /// The flow with the earliest reservation tag.
    pub fn first_reservation(&self, group: usize) -> Option<(Nanos, u32)> {
        self.groups[group].reservations.first().map(|((tag, _), flow)| (tag, flow))
    }

    /// The flow with the lowest weight tag.
    pub fn first_weight(&self, group: usize) -> Option<(u128, u32)> {
        self.groups[group].weights.first().map(|((tag, _), flow)| (tag, flow))
    }

    /// Whether flows in order of weight have waited for `guard` batches by reservation.
    pub fn weights_are_due(&self, group: usize, guard: u64) -> bool {
        let g = &self.groups[group];
        guard > 0 && g.reserved_run >= guard && !g.weights.is_empty()
    }

    /// The tags by which a flow sends now.
    pub fn due(&self, filed: &Filed, now: Nanos) -> Due {
        let reservation = if filed.reservation == NO_TAG { now } else { filed.reservation.0 };
        Due { reservation, weight: Some(filed.weight).filter(|w| *w != NO_WEIGHT).map(|w| w.0) }
    }

    /// A flow, still filed, sends a batch; returns its weight tag, at least that of its class.
    pub fn sent(&mut self, group: usize, flow: u32, phase: Phase, due: &Due, weight: u128) -> u128 {
        let g = &mut self.groups[group];
        g.left_out = if g.allowed.first().is_none_or(|first| first.1 == flow) { 0 } else { g.left_out + 1 };
        let start = due.weight.unwrap_or(g.virtual_now).max(weight);
        match phase {
            Phase::Weight => (g.virtual_now, g.reserved_run) = (g.virtual_now.max(start), 0),
            // Other flows in the weight order are waiting.
            Phase::Constraint if g.weights.len() > usize::from(due.weight.is_some()) => g.reserved_run += 1,
            Phase::Constraint => {}
        }
        start
    }

    /// Whether a weight tag is in the past on some lane.
    pub fn is_past(&self, weight: u128) -> bool {
        self.groups.iter().any(|g| weight <= g.virtual_now)
    }

    /// Takes over another instance's virtual times after a change of parameters.
    pub fn take_over(&mut self, other: &TagOrder) {
        for (group, other) in self.groups.iter_mut().zip(&other.groups) {
            group.virtual_now = other.virtual_now;
        }
    }
}
