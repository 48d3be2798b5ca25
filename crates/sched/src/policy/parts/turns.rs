//! Turns of lane groups: each decision begins with the group after the one served last.

use crate::policy::{Choice, View, WaitReason};

/// The group whose turn it is.
#[derive(Default)]
pub(crate) struct Turns {
    next: usize,
}

impl Turns {
    /// Asks the groups that can start something in turn until one dispatches; a group that can do nothing returns
    /// `None`. Otherwise returns the wait that ends first.
    pub fn round_robin(&mut self, view: &View<'_>, ask: impl FnMut(usize) -> Option<Choice>) -> Choice {
        let first = if self.next < view.groups() { self.next } else { 0 };
        self.round(view.startable_groups(first), ask)
    }

    /// The same over lanes, although they share one space.
    pub fn round_robin_lanes(&mut self, view: &View<'_>, ask: impl FnMut(usize) -> Option<Choice>) -> Choice {
        self.round(view.open_lanes(if self.next < view.lanes.len() { self.next } else { 0 }), ask)
    }

    fn round(&mut self, groups: impl Iterator<Item = usize>, mut ask: impl FnMut(usize) -> Option<Choice>) -> Choice {
        let mut wait = Choice::until_event(WaitReason::Empty);
        for group in groups {
            match ask(group) {
                None => {}
                Some(choice @ Choice::Wait { .. }) => wait = choice.sooner(wait),
                Some(serve) => {
                    self.next = group + 1;
                    return serve;
                }
            }
        }
        wait
    }
}
