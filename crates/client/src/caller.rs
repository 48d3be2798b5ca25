//! For which user of its machine a thread asks, in a program of root that serves several users, as a mount does.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
}

/// A user of this machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Caller {
    /// Number of the user.
    pub uid: u32,
    /// Number of its group.
    pub gid: u32,
}

impl Caller {
    /// What this thread asks of the metadata server it asks for this user, until the guard is dropped. Where users have to prove
    /// themselves (`users = "munge"` in an `[[export]]`), the user is proved when the server asks for it.
    #[must_use]
    pub fn enter(self) -> Acting {
        Acting::of(Some(self))
    }

    /// The user for whom this thread asks; `None`: the program's own.
    pub(crate) fn now() -> Option<Caller> {
        CALLER.get()
    }
}

/// While it lives, its thread asks for a [`Caller`].
#[derive(Debug)]
pub struct Acting {
    before: Option<Caller>,
    /// It stays on its thread.
    _own: PhantomData<*const ()>,
}

impl Acting {
    pub(crate) fn of(caller: Option<Caller>) -> Acting {
        Acting { before: CALLER.replace(caller), _own: PhantomData }
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        CALLER.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_asks_for_a_user_until_the_guard_is_dropped() {
        let (alice, bob) = (Caller { uid: 1, gid: 2 }, Caller { uid: 3, gid: 4 });
        assert_eq!(Caller::now(), None);
        let acting = alice.enter();
        {
            let _acting = bob.enter();
            assert_eq!(Caller::now(), Some(bob));
            assert_eq!(std::thread::spawn(Caller::now).join().unwrap(), None);
            let _own = Acting::of(None);
            assert_eq!(Caller::now(), None);
        }
        assert_eq!(Caller::now(), Some(alice));
        drop(acting);
        assert_eq!(Caller::now(), None);
    }
}
