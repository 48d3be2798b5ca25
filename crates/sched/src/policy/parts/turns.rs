//! Lane groups take turns: each decision begins with the group after the one that was served last.

use crate::policy::{Choice, View, WaitReason};

/// Whose turn it is.
#[derive(Default)]
pub(crate) struct Turns {
    next: usize,
}

impl Turns {
    /// Asks one group that can start something after the other what it would do, until one serves; `None` from a group that can
    /// do nothing. Else the wait that ends first.
    pub fn go_round(&mut self, view: &View<'_>, mut ask: impl FnMut(usize) -> Option<Choice>) -> Choice {
        let groups = view.groups();
        let mut wait = Choice::until_event(WaitReason::Empty);
        let first = if self.next < groups { self.next } else { 0 };
        for group in view.startable_groups(first) {
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
