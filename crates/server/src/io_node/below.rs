//! What was forwarded, and whether the data servers withhold it by their limits: its clients are told, as of what this node
//! withholds itself. What none of its clients waits for any more is given up there.

use std::cell::Cell;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_base::slab::{Key, Slab};
use impresario_client::Watch;
use impresario_sched::{Request, RequestId};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::Item;
use crate::connection::{Connection, Reply};
use crate::withheld::{Bell, CallKey, GivenUp, Waiting};

/// What is under way.
pub(super) struct Below {
    under_way: Mutex<Slab<UnderWay>>,
    /// Called when a server says that it withholds something.
    told: Arc<dyn Fn() + Send + Sync>,
}

struct UnderWay {
    watch: Arc<Watch>,
    requests: SmallVec<[RequestId; 1]>,
    calls: SmallVec<[Caller; 1]>,
}

/// A call that waits for it.
struct Caller {
    call: CallKey,
    is_given_up: Cell<bool>,
}

impl Caller {
    fn of((connection, number): (&Arc<Connection>, u64)) -> Caller {
        Caller { call: (connection.clone(), number), is_given_up: Cell::new(false) }
    }

    fn waits(&self) -> bool {
        let (connection, _) = &self.call;
        !self.is_given_up.get() && !connection.has_ended() && !connection.outbox.peer_is_gone()
    }
}

/// Something under way, until this is dropped.
pub(super) struct Watched {
    below: Arc<Below>,
    key: Key,
    pub(super) watch: Arc<Watch>,
}

impl Watched {
    /// The calls to data servers that are made for it.
    pub(super) fn attend<R>(&self, work: impl FnOnce() -> R) -> R {
        self.watch.attend(work)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.below.under_way.lock().remove(self.key);
    }
}

impl Below {
    pub(super) fn new(bell: &Bell) -> Arc<Below> {
        let bell = bell.clone();
        Arc::new(Below { under_way: Mutex::default(), told: Arc::new(move || bell.ring()) })
    }

    /// These requests are about to be forwarded.
    pub(super) fn watch<'a>(self: &Arc<Self>, parts: impl Iterator<Item = &'a (Request, Item)>) -> Watched {
        let (mut requests, mut calls) = (SmallVec::new(), SmallVec::new());
        for (request, item) in parts {
            requests.push(request.id);
            calls.extend(item.answer.call().map(Caller::of));
        }
        self.enter(requests, calls)
    }

    /// The same for the rest of a request that the scheduler has done with.
    pub(super) fn watch_reply(self: &Arc<Self>, reply: Option<&Reply>) -> Watched {
        self.enter(SmallVec::new(), reply.and_then(Reply::call).into_iter().map(Caller::of).collect())
    }

    fn enter(self: &Arc<Self>, requests: SmallVec<[RequestId; 1]>, calls: SmallVec<[Caller; 1]>) -> Watched {
        let watch = Arc::new(Watch::telling(self.told.clone()));
        let key = self.under_way.lock().insert(UnderWay { watch: watch.clone(), requests, calls });
        Watched { below: self.clone(), key, watch }
    }

    /// Adds the calls that data servers withhold; gives their requests. What nobody waits for is given up.
    pub(super) fn find(&self, waiting: &mut Waiting) -> FxHashSet<RequestId> {
        let mut withheld = FxHashSet::default();
        for (_, UnderWay { watch, requests, calls }) in self.under_way.lock().iter() {
            if !watch.is_withheld() {
                continue;
            }
            if !calls.is_empty() && !calls.iter().any(Caller::waits) {
                watch.give_up();
            }
            withheld.extend(requests.iter().copied());
            calls.iter().for_each(|caller| waiting.add_call(&caller.call.0, caller.call.1));
        }
        withheld
    }

    /// A client gives calls up.
    pub(super) fn give_up(&self, given_up: &GivenUp) {
        for (_, UnderWay { watch, calls, .. }) in self.under_way.lock().iter() {
            for caller in calls.iter().filter(|caller| given_up.has_call(&caller.call.0, caller.call.1)) {
                caller.is_given_up.set(true);
            }
            if !calls.is_empty() && !calls.iter().any(Caller::waits) {
                watch.give_up();
            }
        }
    }
}
