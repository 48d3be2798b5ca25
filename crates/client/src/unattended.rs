//! Calls that no thread waits for: what is to be done with an answer is left with the connection.
//!
//! A server that passes requests on would need a thread for each, woken twice for every request. Instead the answer
//! goes to a [`Task`], on the thread that receives it. While such calls are outstanding one thread of the connection
//! (the *keeper*) receives when no caller does, gives up those that are late, and ends them all when the connection ends.

use std::ops::Range;
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use impresario_base::lock::MutexGuard;
use impresario_node::session::Sign;
use impresario_wire::{Answer, Call};

use crate::clock::nanos;
use crate::connection::{Connection, State, Unsent};
use crate::error::ClientError;
use crate::landing::Landing;
use crate::round;
use crate::slots::Slot;
use crate::turn::Put;

/// Stands for the keeper among the numbers of calls, of which it is none.
pub(crate) const KEEPER: u64 = 0;
/// How often the keeper looks for calls that are late, at least.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A keeper without calls ends after this time.
const LINGER: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// So long after an answer the keeper goes on receiving: to wake it for the next call costs more.
const STAY: Duration = Duration::from_millis(5);
/// The keeper calls nothing but tasks on its stack, bytes.
const STACK_BYTES: usize = 256 << 10;

/// The place of an answer to a call that no thread waits for, and what is done with it.
pub trait Task: Send {
    /// Longest payload that the answer may have, bytes: what is asked for.
    fn len_bytes(&self) -> usize;

    /// Where byte `at` of the payload goes, and those behind it as far as they have one place.
    fn place(&mut self, at: usize) -> &mut [u8];

    /// These bytes of the payload are here and in their place, which may be used for something else from now on; more will come. The
    /// job is done on a thread that receives for others, after those before it and before the call ends: it must not wait for this
    /// server.
    fn came(&mut self, _range: Range<usize>) -> Option<Job> {
        None
    }

    /// The call has ended. Runs on a thread that receives for others: it must not wait for this server.
    fn ended(self: Box<Self>, end: End);
}

/// Something that a task wants done.
pub type Job = Box<dyn FnOnce() + Send>;

/// How a call ended that no thread waited for.
#[derive(Debug)]
pub enum End {
    /// The answer, which may be a fault, and the length of its payload.
    Answered(Answer, usize),
    /// The connection was lost. The call may have been done, or be done still.
    Lost,
    /// No answer came in time.
    Late(ClientError),
}

/// The calls of a connection that no thread waits for.
#[derive(Default)]
pub(crate) struct Unattended {
    /// Those without an answer.
    outstanding: u32,
    /// What tasks want done, in order.
    jobs: Vec<Job>,
    keeper: Option<Thread>,
}

impl Unattended {
    /// The keeper, if there are calls for which somebody must receive.
    pub(crate) fn waiting_keeper(&self) -> Option<Thread> {
        self.keeper.clone().filter(|_| self.outstanding > 0)
    }
}

impl State {
    /// Ends a call that no thread waits for; its slot stays.
    pub(crate) fn end_unattended(&mut self, id: u64, end: End) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        if slot.until.take().is_some() {
            self.unattended.outstanding -= 1;
        }
        if let Some(Landing::Own(task)) = slot.landing.take() {
            self.unattended.jobs.push(Box::new(move || task.ended(end)));
        }
    }

    /// Some of the payload of a call is here, and more to come; true if its task, which no thread waits for, wants something
    /// done about it.
    pub(crate) fn tell_came(&mut self, id: u64, range: Range<usize>) -> bool {
        let slot = self.slots.get_mut(&id).filter(|slot| slot.until.is_some());
        let Some(Landing::Own(task)) = slot.and_then(|slot| slot.landing.as_mut()) else { return false };
        let job = task.came(range);
        let is_wanted = job.is_some();
        self.unattended.jobs.extend(job);
        is_wanted
    }

    /// The keeper, if it has something to do that this thread must not.
    pub(crate) fn keeper_with_jobs(&self) -> Option<Thread> {
        self.unattended.keeper.clone().filter(|_| !self.unattended.jobs.is_empty())
    }
}

impl Connection {
    /// Sends a call that no thread waits for; gives the task back when it cannot be sent. Its answer may be on its way then,
    /// though not from a server that keeps to the protocol.
    pub(crate) fn start_unattended(
        self: &Arc<Self>,
        call: &Call,
        want_bytes: u32,
        task: Box<dyn Task>,
        deadline: Instant,
    ) -> Result<(), Box<dyn Task>> {
        let id = self.next_id();
        let has_room = task.len_bytes() >= want_bytes as usize;
        let Some(head) = self.encode(id, call, 0).ok().filter(|_| has_room) else { return Err(task) };
        let mut state = self.slots.lock();
        if state.broken.is_some() {
            return Err(task);
        }
        if state.unattended.keeper.is_none() {
            let Some(keeper) = self.start_keeper() else { return Err(task) };
            state.unattended.keeper = Some(keeper);
        }
        let mut slot = Slot::new(want_bytes, Some(Landing::Own(task)), nanos(Instant::now()));
        slot.until = Some(nanos(deadline));
        self.enter(&mut state, id, slot);
        state.unattended.outstanding += 1;
        drop(state);
        if round::is_open() && self.outgoing.queue(&head) {
            round::hold(self, deadline);
            return Ok(());
        }
        // No thread is to wait for its turn here.
        let put = self.outgoing.put(&head, Instant::now());
        let sent = self.put_on_wire(&head, &[], put, deadline);
        let mut state = self.slots.lock();
        if let Err(Unsent::Late) = sent
            && let Some(slot) = state.slots.get_mut(&id)
            && !slot.lent
        {
            slot.until = None;
            let task = slot.landing.take().and_then(Landing::into_task);
            state.unattended.outstanding -= 1;
            self.remove(&mut state, id);
            return task.map_or(Ok(()), Err);
        }
        self.call_keeper(state);
        Ok(())
    }

    /// Sends the calls that are queued, in time.
    pub(crate) fn send_queued(&self, deadline: Instant) {
        if let Some(turn) = self.outgoing.take_queued() {
            // Failed, it has ended the connection.
            let _ = self.put_on_wire(&[], &[], Put::Turn(turn), deadline);
        }
        self.call_keeper(self.slots.lock());
    }

    /// Where no thread receives the keeper must; where the connection has ended, it ends the calls.
    fn call_keeper(&self, state: MutexGuard<'_, State>) {
        let keeper = state.unattended.keeper.clone().filter(|_| state.reader.is_some() || state.broken.is_some());
        drop(state);
        keeper.inspect(Thread::unpark);
    }

    /// Does what tasks want done, with the lock released.
    pub(crate) fn tell<'s>(&'s self, mut state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        while !state.unattended.jobs.is_empty() {
            let jobs = std::mem::take(&mut state.unattended.jobs);
            drop(state);
            jobs.into_iter().for_each(|job| job());
            state = self.slots.lock();
        }
        state
    }

    /// Starts the keeper, which finds the lock held until it is noted.
    fn start_keeper(self: &Arc<Self>) -> Option<Thread> {
        let connection = self.clone();
        let thread = std::thread::Builder::new().name("answers".into()).stack_size(STACK_BYTES);
        match thread.spawn(move || connection.keep()) {
            Ok(handle) => Some(handle.thread().clone()),
            Err(error) => {
                tracing::warn!(%error, "no thread for a connection's answers; raise ulimit -u");
                None
            }
        }
    }

    /// The keeper.
    fn keep(&self) {
        let (mut state, mut looked, mut busy) = (self.slots.lock(), Instant::now(), Instant::now());
        loop {
            state = self.tell(state);
            let now = Instant::now();
            if state.broken.is_some() || now.duration_since(looked) >= LOOK_EVERY {
                looked = now;
                let Looked { wants_sign, revoked } = self.end_hopeless(&mut state, now);
                if wants_sign || !revoked.is_empty() {
                    drop(state);
                    if wants_sign {
                        self.ping(now);
                    }
                    if !revoked.is_empty() {
                        self.post(&Call::GiveUp { calls: revoked }, now);
                    }
                    state = self.slots.lock();
                }
                if !state.unattended.jobs.is_empty() {
                    continue;
                }
            }
            let is_needed = state.unattended.outstanding > 0;
            if is_needed {
                busy = now;
            } else if state.broken.is_some() || now.duration_since(busy) >= LINGER {
                state.unattended.keeper = None;
                let successor = state.successor();
                drop(state);
                return successor.into_iter().for_each(|thread| thread.unpark());
            }
            // For a while after the last of its calls, the next is waited for where that takes nobody's turn.
            let stays = now.duration_since(busy) < STAY && !state.has_followers();
            if (is_needed || stays)
                && let Some(receiving) = state.reader.take()
            {
                state = self.lead(state, receiving, KEEPER, now + LOOK_EVERY);
                continue;
            }
            // Whom it was woken to relieve, others must.
            let successor = state.successor();
            if is_needed {
                state.park(KEEPER);
            }
            drop(state);
            successor.inspect(Thread::unpark);
            std::thread::park_timeout(LOOK_EVERY);
            state = self.slots.lock();
            state.unpark(KEEPER);
        }
    }

    /// Ends the calls that are late, and all when the connection has ended. What the server is to be told.
    fn end_hopeless(&self, state: &mut State, now: Instant) -> Looked {
        let mut revoked = Vec::new();
        for (id, slot) in state.slots.iter_mut().filter(|(_, slot)| slot.until.is_some()) {
            if slot.revoke() {
                slot.until = Some(nanos(now + self.withheld_for()));
                revoked.push(*id);
            } else if let Some(until) = slot.withheld_until.filter(|_| !slot.is_revoked) {
                slot.until = slot.until.max(Some(nanos(until)));
            }
        }
        let calls = state.slots.iter().filter_map(|(id, slot)| Some((*id, slot.sent, slot.until?, slot.lent)));
        let (mut wants_sign, mut silent_for, mut late) = (false, None, Vec::new());
        for (id, sent, until, lent) in calls {
            let is_late = nanos(now) >= until;
            match state.silence.judge(nanos(now), sent, is_late, &self.patience) {
                Sign::GiveUp(silent) => silent_for = Some(silent),
                Sign::Ping => wants_sign = true,
                Sign::Wait => {}
            }
            if is_late && !lent {
                late.push(id);
            }
        }
        if let Some(silent) = silent_for {
            self.break_silent(state, silent);
        }
        for id in late {
            let Some(slot) = state.slots.get(&id) else { continue };
            let error = ClientError::Unreachable {
                server: self.peer.name.clone(),
                address: self.peer.address.clone(),
                waited: Duration::from_nanos(nanos(now).0.saturating_sub(slot.sent.0)),
                cause: "no answer came".into(),
            };
            state.end_unattended(id, End::Late(error));
            self.leave_unanswered(state, id);
        }
        if state.broken.is_none() {
            return Looked { wants_sign, revoked };
        }
        // Of a buffer that is lent, the thread that receives into it gives it back first.
        let lost = state.slots.iter().filter(|(_, slot)| slot.until.is_some() && !slot.lent).map(|(id, _)| *id);
        for id in lost.collect::<Vec<_>>() {
            state.end_unattended(id, End::Lost);
            self.remove(state, id);
        }
        Looked { wants_sign: false, revoked: Vec::new() }
    }
}

/// What the keeper found that the server is to be told.
struct Looked {
    /// A sign of life of it is wanted.
    wants_sign: bool,
    /// Calls that were given up.
    revoked: Vec<u64>,
}
