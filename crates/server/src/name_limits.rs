//! Limits of calls on names: how many the metadata server serves in a second, by the rules of `tbf`.
//!
//! The scheduling core decides when a call goes, as it does for data; a call that it lets go leaves the core at once,
//! because there is no device for which calls compete. While the policy is `none` no call comes here.
//!
//! A call that waits holds no thread. Its client is told of it ([`Answer::Withheld`]), and waits on beyond the time in which a
//! server must answer. What ends something, or keeps it alive, is not limited: closing and syncing files, locks, coming back
//! after a restart.
//!
//! Bounds: [`WITHHELD_MAX`] calls of one connection and [`QUEUE_REQUESTS`] of all wait; what is beyond is told to come again.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use impresario_base::folders;
use impresario_engine::{Engine, EngineConfig, Executor, Outcome, Refused, Started, Submission, Work, now};
use impresario_sched::{ConnId, LaneId, NameOp, Naming, Op, PolicySpec, policy};
use impresario_wire::{Answer, MetaCall, Who};
use serde_json::{Map, Value, json};

use crate::connection::Reply;
use crate::grants::LISTED_MAX;
use crate::withheld::{Bell, GivenUp, Teller};

/// Calls that wait at most.
const QUEUE_REQUESTS: u32 = 1 << 16;
/// Of one connection: fewer than it may have under way, so that what is not limited still comes through.
pub(crate) const WITHHELD_MAX: u32 = 1024;
/// How long calls that are let go may take when the server stops.
const DRAIN_MAX: Duration = Duration::from_secs(1);

thread_local! {
    /// This thread is a connection's own, and hands a call in.
    static HANDS_IN: Cell<bool> = const { Cell::new(false) };
}

/// What a call does to names; `None`: it is not limited.
pub(crate) fn does(call: &MetaCall) -> Option<NameOp> {
    match call {
        MetaCall::GetAttr { .. }
        | MetaCall::Readlink { .. }
        | MetaCall::GetXattr { .. }
        | MetaCall::ListXattr { .. }
        | MetaCall::Statfs => Some(NameOp::Stat),
        MetaCall::Open { .. } => Some(NameOp::Open),
        MetaCall::Readdir { .. } => Some(NameOp::List),
        MetaCall::Create { .. }
        | MetaCall::Mkdir { .. }
        | MetaCall::Symlink { .. }
        | MetaCall::Mknod { .. }
        | MetaCall::Link { .. } => Some(NameOp::Create),
        MetaCall::Unlink { .. } | MetaCall::Rmdir { .. } => Some(NameOp::Remove),
        MetaCall::Rename { .. } | MetaCall::Exchange { .. } => Some(NameOp::Rename),
        MetaCall::SetAttr { .. } | MetaCall::SetXattr { .. } | MetaCall::SetLayout { .. } => Some(NameOp::Change),
        // They end something, keep it alive, or bring it back.
        MetaCall::Close { .. }
        | MetaCall::Reopen { .. }
        | MetaCall::Fsync { .. }
        | MetaCall::FsyncDir { .. }
        | MetaCall::SyncAll
        | MetaCall::CutBack { .. }
        | MetaCall::Lock(_)
        | MetaCall::Restrict(_)
        | MetaCall::Prove { .. } => None,
        // The bytes of an append are limited where they go. The others are an administrator's.
        MetaCall::Append { .. } | MetaCall::Examine(_) | MetaCall::Relay(_) => None,
    }
}

/// A call and its reply.
pub(crate) struct NameCall<S> {
    pub(crate) session: S,
    pub(crate) who: Who,
    pub(crate) call: MetaCall,
    pub(crate) reply: Reply,
}

/// Serves calls on names.
pub(crate) trait ServesNames: Send + Sync + 'static {
    /// What is kept of a connection.
    type Session: Send + 'static;

    /// On the thread of a connection.
    fn serve_here(&self, call: NameCall<Self::Session>);

    /// On another thread, which must not be kept.
    fn serve_elsewhere(&self, call: NameCall<Self::Session>);
}

/// How many calls of a connection wait.
#[derive(Clone, Default)]
pub(crate) struct Withheld(Arc<AtomicU32>);

/// One of them.
struct Place(Withheld);

impl Withheld {
    fn take(&self) -> Option<Place> {
        let place = Place(self.clone());
        (self.0.fetch_add(1, Relaxed) < WITHHELD_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Relaxed);
    }
}

struct Waiting<S> {
    call: NameCall<S>,
    _place: Place,
}

/// Serves what the core lets go.
struct LetGo<N>(Arc<N>);

impl<N: ServesNames> Executor<Waiting<N::Session>> for LetGo<N> {
    fn start(&self, work: Work<Waiting<N::Session>>) -> Started<Waiting<N::Session>> {
        for (_, Waiting { call, _place }) in work.parts {
            drop(_place);
            match HANDS_IN.get() {
                true => self.0.serve_here(call),
                false => self.0.serve_elsewhere(call),
            }
        }
        let at = now();
        let outcome = Outcome { errno: 0, bytes_done: work.batch.extent.len, started: at, finished: at };
        Started::Finished(work.ticket, outcome)
    }
}

/// The limits.
pub(crate) struct NameLimits<N: ServesNames> {
    engine: Arc<Engine<Waiting<N::Session>>>,
    /// A policy that limits is in force, or will be.
    are_any: AtomicBool,
    /// Numbers calls: none concerns the bytes of another.
    last: AtomicU64,
    teller: Teller,
}

impl<N: ServesNames> NameLimits<N> {
    /// Under a policy that [suits](policy::check_for_names); clients whose calls wait are told so often that none waits in vain for
    /// `timeout`, after which a call without an answer fails.
    pub(crate) fn new(names: Arc<N>, spec: &PolicySpec, timeout: Duration) -> Result<NameLimits<N>, String> {
        policy::check_for_names(spec).map_err(|refusal| refusal.to_string())?;
        let engine = EngineConfig {
            queue_requests: QUEUE_REQUESTS,
            lane_requests: QUEUE_REQUESTS,
            ..EngineConfig::new(spec.clone())
        };
        let engine = Engine::new(engine, Arc::new(LetGo(names))).map_err(|refusal| refusal.to_string())?;
        let teller = Teller::start(Bell::default(), timeout, {
            let engine = engine.clone();
            move |waiting| {
                engine.for_each_withheld(&|_| false, |Waiting { call, .. }| waiting.add(&call.reply));
            }
        })?;
        let are_any = AtomicBool::new(*spec != policy::unlimited());
        Ok(NameLimits { engine, are_any, last: AtomicU64::new(0), teller })
    }

    /// What a call does, if it may be limited.
    pub(crate) fn concern(&self, call: &MetaCall) -> Option<NameOp> {
        if self.are_any.load(Relaxed) { does(call) } else { None }
    }

    /// Serves a call as soon as the limits allow it.
    pub(crate) fn take(&self, op: NameOp, conn: ConnId, withheld: &Withheld, call: NameCall<N::Session>) {
        let Some(place) = withheld.take() else {
            return call.reply.fault(libc::EBUSY, "too many calls of this client wait for a limit; try again");
        };
        let (who, number) = (call.who, self.last.fetch_add(1, Relaxed));
        let folders = call.call.paths().next().map_or(who.folders, |path| folders::of(path));
        let submission = Submission {
            op: Op::Read,
            file: 0,
            lane: LaneId(0),
            file_offset: number,
            lane_offset: number,
            len: 1,
            client: who.client.0,
            conn,
            job: who.job,
            user: who.user,
            naming: Naming { call: Some(op), folders },
            speculative: false,
        };
        HANDS_IN.set(true);
        let refused = self.engine.try_submit_ahead(submission, Waiting { call, _place: place }, []);
        HANDS_IN.set(false);
        match refused {
            Ok(_) => self.teller.ask(),
            Err(Refused::Busy(waiting)) => {
                waiting.call.reply.fault(libc::EBUSY, "too many calls wait for limits; try again");
            }
            Err(Refused::Closed(waiting)) => waiting.call.reply.fault(libc::ESHUTDOWN, "the server is stopping"),
        }
    }

    /// Gives up the calls of a connection that has ended.
    pub(crate) fn forget(&self, conn: ConnId) {
        if self.are_any.load(Relaxed) {
            drop(self.engine.cancel_connection(conn));
        }
    }

    /// A client does not want calls any more that wait.
    pub(crate) fn give_up(&self, given_up: &GivenUp) {
        if self.are_any.load(Relaxed) {
            let calls = self.engine.cancel_where(|waiting| given_up.has(&waiting.call.reply));
            calls.into_iter().for_each(|waiting| waiting.call.reply.send(&Answer::Fault(GivenUp::fault())));
        }
    }

    /// Switches the policy, now or at an instant of shared time; what waits goes by the new one.
    pub(crate) fn set_policy(&self, spec: &PolicySpec, at_shared_ns: i64, reply: Reply) {
        if let Err(refusal) = policy::check_for_names(spec) {
            return reply.fault(libc::EINVAL, refusal.to_string());
        }
        let before = self.are_any.swap(true, Relaxed);
        match self.engine.set_policy_at(spec, at_shared_ns) {
            Ok(()) => {
                // The old limits hold until the instant; a policy that limits nothing lets calls go at once.
                if *spec == policy::unlimited() && self.engine.policy() == *spec {
                    self.are_any.store(false, Relaxed);
                }
                tracing::info!(policy = %spec, at_shared_ns, "switch accepted");
                reply.send(&Answer::Done);
            }
            Err(refusal) => {
                self.are_any.store(before, Relaxed);
                reply.fault(libc::EINVAL, refusal.to_string());
            }
        }
    }

    /// What the limits do with the calls that the question describes.
    pub(crate) fn explain(&self, call: &impresario_wire::Call, reply: Reply) {
        crate::data::explain(&self.engine, call, reply);
    }

    /// Adds to a server's status, as the other servers have it, its policy and its limits, those that withhold calls first.
    pub(crate) fn describe(&self, status: &mut Map<String, Value>) {
        if !self.are_any.load(Relaxed) {
            return;
        }
        let (mut limited, _) = self.engine.limited();
        limited.truncate(LISTED_MAX);
        status.insert("engine".into(), crate::json(&self.engine.status()));
        status.insert("limits".into(), json!({ "classes": crate::json(&limited), "peers": [] }));
    }

    /// Refuses calls from now on, and gives up those that wait.
    pub(crate) fn stop(&self) {
        self.teller.stop();
        drop(self.engine.shutdown(DRAIN_MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_wire::{LockCall, LockWish, Target};

    #[test]
    fn what_ends_something_or_keeps_it_alive_is_not_limited() {
        let free = [
            MetaCall::Close { handle: 1, wrote: true },
            MetaCall::Fsync { handle: 1 },
            MetaCall::FsyncDir { path: vec![] },
            MetaCall::Reopen { path: vec![], file: Default::default(), write: true },
            MetaCall::Lock(LockCall { lease: 1, wish: LockWish::Renew { whole: true } }),
        ];
        free.iter().for_each(|call| assert_eq!(does(call), None, "{call:?}"));
        let stat = MetaCall::GetAttr { target: Target::Path(vec![]) };
        assert_eq!((does(&stat), does(&MetaCall::Statfs)), (Some(NameOp::Stat), Some(NameOp::Stat)));
        assert_eq!(does(&MetaCall::Unlink { path: vec![] }), Some(NameOp::Remove));
    }

    #[test]
    fn a_connection_has_a_bounded_number_of_calls_waiting() {
        let withheld = Withheld::default();
        let places: Vec<Place> = (0..WITHHELD_MAX).map(|_| withheld.take().unwrap()).collect();
        assert!(withheld.take().is_none() && withheld.take().is_none());
        drop(places);
        assert_eq!(withheld.0.load(Relaxed), 0);
        assert!(withheld.take().is_some());
    }
}
