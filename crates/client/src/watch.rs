//! What is heard of calls while they are under way: that a limit withholds them; and that they are to be given up.
//!
//! A thread that does something for somebody else says so ([`Watch::attend`]): all calls that it starts meanwhile are watched.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::clock::nanos;

thread_local! {
    static WATCH: RefCell<Option<Arc<Watch>>> = const { RefCell::new(None) };
}

/// A watch over calls. Its user may be told when a server says that a limit withholds one, and may give them up.
#[derive(Default)]
pub struct Watch {
    /// Until when a server's last word of it counts, on the client's clock; 0: there was none.
    withheld_until: AtomicU64,
    is_given_up: AtomicBool,
    told: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("is_withheld", &self.is_withheld()).finish_non_exhaustive()
    }
}

impl Watch {
    /// One that calls `told` whenever a server says that a call is withheld: on a thread that receives for others, which must not
    /// wait.
    pub fn telling(told: Arc<dyn Fn() + Send + Sync>) -> Watch {
        Watch { told: Some(told), ..Watch::default() }
    }

    /// Calls that this thread starts in `work` are watched.
    pub fn attend<R>(self: &Arc<Self>, work: impl FnOnce() -> R) -> R {
        let _attending = self.enter();
        work()
    }

    /// Calls that this thread starts are watched until the guard is dropped.
    pub fn enter(self: &Arc<Self>) -> Attending {
        Attending { before: WATCH.replace(Some(self.clone())), _of_this_thread: PhantomData }
    }

    /// A limit withholds one of the calls, as far as is known.
    pub fn is_withheld(&self) -> bool {
        self.withheld_until.load(Ordering::Relaxed) > nanos(Instant::now()).0
    }

    /// Calls that a limit withholds are given up: the server is asked to forget them, and they fail with EINTR. Those that it has
    /// begun are waited for as others are.
    pub fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// A server said that a call is withheld; its word counts until then.
    pub(crate) fn tell_withheld(&self, until: Instant) {
        self.withheld_until.store(nanos(until).0, Ordering::Relaxed);
        self.told.iter().for_each(|told| told());
    }
}

/// While it exists, what its thread starts is watched.
#[derive(Debug)]
pub struct Attending {
    before: Option<Arc<Watch>>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Attending {
    fn drop(&mut self) {
        WATCH.set(self.before.take());
    }
}

/// The watch over what this thread starts, if there is one.
pub(crate) fn present() -> Option<Arc<Watch>> {
    WATCH.with_borrow(Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_over_what_its_thread_starts_and_no_longer() {
        let (outer, inner) = (Arc::new(Watch::default()), Arc::new(Watch::default()));
        let is = |watch: &Arc<Watch>| present().is_some_and(|present| Arc::ptr_eq(&present, watch));
        outer.attend(|| {
            assert!(is(&outer));
            inner.attend(|| assert!(is(&inner)));
            assert!(is(&outer));
            assert!(std::thread::scope(|scope| scope.spawn(|| present().is_none()).join().unwrap()));
        });
        assert!(present().is_none());
    }
}
