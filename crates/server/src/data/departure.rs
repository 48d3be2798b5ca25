//! The server's own part in its move to another folder or machine: it tells what changes, lets clients wait while the last of
//! it is copied, and leaves.
//!
//! Clients that wait are not answered; their connections end when the server has left, and they repeat their calls at the new
//! place, as after a restart. A hold ends by itself: a copier that is killed stops nobody for longer. The mark that the server
//! has left is written while clients wait, so either it is written and no client was let in since, or the move has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_sched::ConnId;
use impresario_store::{Departed, Note};
use impresario_wire::{Answer, Fault, FileKey, MoveAnswer, MoveCall};

use super::DataServer;
use crate::listener::before_waiting;

/// Ranges of changes, or entries of the state, in one answer: half of what fits.
const PART_MAX: usize = 16_384;
/// Longest address that is taken.
const ADDRESS_MAX_BYTES: usize = 512;

/// Whether clients are served.
pub(crate) struct Departure {
    /// Clients wait, or the server has left: looked at for each call.
    is_closed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Called once, when the server has left.
    on_leaving: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// How long clients may wait: less than they wait for an answer.
    hold_max: Duration,
}

enum State {
    Serving,
    /// Clients wait for the copier on this connection.
    Held {
        number: u64,
        copier: ConnId,
        until: Instant,
        /// Nothing changes any more.
        is_quiet: bool,
    },
    Left(Departed),
}

impl Departure {
    pub(super) fn new(hold_max: Duration) -> Departure {
        Departure {
            is_closed: AtomicBool::new(false),
            state: Mutex::new(State::Serving),
            changed: Condvar::new(),
            on_leaving: Mutex::new(None),
            hold_max,
        }
    }

    /// Has this called when the server has left.
    pub(crate) fn on_leaving(&self, then: impl FnOnce() + Send + 'static) {
        *self.on_leaving.lock() = Some(Box::new(then));
    }

    /// Whether calls of this connection are not to be served now.
    pub(super) fn holds(&self, conn: ConnId) -> bool {
        self.is_closed.load(Ordering::SeqCst)
            && match &*self.state.lock() {
                State::Serving => false,
                State::Held { copier, .. } => *copier != conn,
                State::Left(_) => true,
            }
    }

    /// Waits until calls of this connection may be served; false: never again.
    pub(super) fn wait(&self, conn: ConnId) -> bool {
        // What this connection is owed already must not wait.
        before_waiting();
        let mut state = self.state.lock();
        loop {
            match &*state {
                State::Serving => return true,
                State::Held { copier, .. } if *copier == conn => return true,
                State::Held { until, .. } => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        self.release(&mut state, "the copier did not finish in time");
                        return true;
                    }
                    state = self.changed.wait_timeout(state, left).0;
                }
                State::Left(_) => return false,
            }
        }
    }

    /// Why a client is refused, if the server has left.
    pub(super) fn refusal(&self, name: &str) -> Option<Fault> {
        if !self.is_closed.load(Ordering::SeqCst) {
            return None;
        }
        match &*self.state.lock() {
            State::Left(departed) => Some(has_moved(name, departed)),
            _ => None,
        }
    }

    /// Ends a hold for another copier, whose call to leave may still be on its way and must fail then. An error if the server
    /// has left, also if it is leaving just now.
    fn end_other_hold(&self, conn: ConnId, name: &str) -> Result<(), Fault> {
        let mut state = self.state.lock();
        match &*state {
            State::Left(departed) => Err(has_moved(name, departed)),
            State::Held { copier, .. } if *copier != conn => {
                self.release(&mut state, "there is another copier");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn release(&self, state: &mut State, why: &str) {
        *state = State::Serving;
        self.is_closed.store(false, Ordering::SeqCst);
        self.changed.notify_all();
        tracing::info!("clients go on: {why}");
    }

    /// What `status` tells.
    pub(super) fn describe(&self) -> &'static str {
        match &*self.state.lock() {
            State::Serving => "serving",
            State::Held { .. } => "clients wait for the end of a move",
            State::Left(_) => "moved away",
        }
    }
}

impl DataServer {
    /// A step of a move.
    pub(super) fn step_of_move(&self, conn: ConnId, call: MoveCall) -> Answer {
        match self.try_step(conn, call) {
            Ok(answer) => Answer::Move(answer),
            Err(fault) => Answer::Fault(fault),
        }
    }

    fn try_step(&self, conn: ConnId, call: MoveCall) -> Result<MoveAnswer, Fault> {
        let store = self.disk.store();
        let unknown = || Fault { errno: libc::ESRCH, message: format!("{} knows of no such move", self.vitals.name()) };
        match call {
            MoveCall::Begin { number: 0 } => Err(unknown()),
            MoveCall::Begin { number } => {
                self.departure.end_other_hold(conn, self.vitals.name())?;
                // The other machine cannot find out.
                self.disk.losses().settle_doubts(store).map_err(|error| Fault {
                    errno: error.raw_os_error().unwrap_or(libc::EIO),
                    message: format!("whether {} has lost data cannot be noted: {error}", self.vitals.name()),
                })?;
                let batch = store.watch(number);
                tracing::info!(number, goes_on = batch.is_some(), "a copy for a move begins");
                Ok(MoveAnswer::Begun { batch })
            }
            MoveCall::Changes { number, batch, skip } => {
                let changed = store.watched(number, batch, skip as usize, PART_MAX).ok_or_else(unknown)?;
                let range = |(key, range): (u64, std::ops::Range<u64>)| (FileKey(key), range.start, range.end);
                let (is_all, has_more) = (changed.is_all, changed.has_more);
                Ok(MoveAnswer::Changed { ranges: changed.ranges.into_iter().map(range).collect(), is_all, has_more })
            }
            MoveCall::Hold { number } => {
                // Any batch that exists proves that the move does.
                if store.watch_number() != Some(number) {
                    return Err(unknown());
                }
                self.hold(conn, number)
            }
            MoveCall::Release { number } => {
                let mut state = self.departure.state.lock();
                if matches!(&*state, State::Held { number: held, .. } if *held == number) {
                    self.departure.release(&mut state, "the copier wants it");
                }
                Ok(MoveAnswer::Done)
            }
            MoveCall::State { number, skip } => {
                self.check_quiet(number)?;
                self.state_for_move(skip as usize)
            }
            MoveCall::Leave { number, address } => self.leave(conn, number, address),
            MoveCall::End { number } => {
                self.departure.end_other_hold(conn, self.vitals.name())?;
                store.end_watch(number);
                Ok(MoveAnswer::Done)
            }
        }
    }

    /// Lets clients wait, and waits itself until what they have sent before has ended.
    fn hold(&self, conn: ConnId, number: u64) -> Result<MoveAnswer, Fault> {
        let departure = &self.departure;
        let until = Instant::now() + departure.hold_max;
        {
            let mut state = departure.state.lock();
            match &*state {
                State::Left(_) => return Err(too_late()),
                State::Held { until, number: held, .. } if *held != number && *until > Instant::now() => {
                    let message = "clients wait for another copier already".into();
                    return Err(Fault { errno: libc::EBUSY, message });
                }
                _ => {}
            }
            *state = State::Held { number, copier: conn, until, is_quiet: false };
            departure.is_closed.store(true, Ordering::SeqCst);
        }
        // Who was admitted before is with the scheduler after this, and who is admitted later sees that clients wait.
        self.ledger.barrier();
        // The copier's own reads have been answered.
        let is_quiet = loop {
            let status = self.engine.status();
            let under_way = status.queued + status.blocked + status.in_flight_batches;
            if under_way == 0 && !self.disk.is_setting_aside() {
                break true;
            }
            if Instant::now() >= until {
                break false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let mut state = departure.state.lock();
        let is_ours = match &mut *state {
            State::Held { number: held, is_quiet: quiet, .. } if *held == number => {
                *quiet = is_quiet;
                true
            }
            _ => false,
        };
        if !(is_ours && is_quiet) {
            if is_ours {
                departure.release(&mut state, "requests under way did not end in time");
            }
            let message = format!("{}: requests under way did not end in time", self.vitals.name());
            return Err(Fault { errno: libc::EBUSY, message });
        }
        drop(state);
        let for_ms = until.saturating_duration_since(Instant::now()).as_millis() as u32;
        tracing::info!(number, for_ms, "clients wait for the end of a move");
        Ok(MoveAnswer::Held { for_ms })
    }

    fn check_quiet(&self, number: u64) -> Result<(), Fault> {
        match &*self.departure.state.lock() {
            State::Held { number: held, until, is_quiet: true, .. } if *held == number && *until > Instant::now() => {
                Ok(())
            }
            _ => Err(too_late()),
        }
    }

    fn state_for_move(&self, skip: usize) -> Result<MoveAnswer, Fault> {
        let store = self.disk.store();
        let notes = store.all_notes().map_err(|error| Fault {
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            message: format!("the notes of {} cannot be read: {error}", self.vitals.name()),
        })?;
        let mut removed = store.removed_keys();
        removed.sort_unstable();
        let total = notes.len() + removed.len();
        let end = total.min(skip.saturating_add(PART_MAX));
        let note = |Note { kind, key, value }: &Note| (*kind, *key, *value);
        let notes_part = notes.get(skip.min(notes.len())..end.min(notes.len())).unwrap_or_default();
        let (first, last) = (skip.saturating_sub(notes.len()), end.saturating_sub(notes.len()));
        let removed = removed.get(first.min(removed.len())..last).unwrap_or_default().to_vec();
        Ok(MoveAnswer::State { notes: notes_part.iter().map(note).collect(), removed, has_more: end < total })
    }

    /// Marks the folder while clients wait, and ends all connections but the copier's.
    fn leave(&self, conn: ConnId, number: u64, address: String) -> Result<MoveAnswer, Fault> {
        if address.is_empty() || address.len() > ADDRESS_MAX_BYTES || address.chars().any(char::is_control) {
            return Err(Fault { errno: libc::EINVAL, message: format!("{address:?} is no address") });
        }
        let (departure, store) = (&self.departure, self.disk.store());
        let mut state = departure.state.lock();
        match &*state {
            State::Held { number: held, until, is_quiet: true, .. } if *held == number && *until > Instant::now() => {}
            State::Left(departed) if departed.number == number => return Ok(MoveAnswer::Done),
            _ => return Err(too_late()),
        }
        let departed = Departed { number, address };
        if let Err(error) = store.depart(&departed) {
            let message = format!("{} cannot mark its folder as left: {error}", self.vitals.name());
            if let Err(worse) = store.stay() {
                // The mark may be there: serving on would be serving twice. A restart finds out.
                tracing::error!(%error, %worse, "the mark of a move cannot be written or removed; the server ends");
                *state = State::Left(departed);
                drop(state);
                self.gone(conn);
            } else {
                departure.release(&mut state, "the folder cannot be marked");
            }
            return Err(Fault { errno: error.raw_os_error().unwrap_or(libc::EIO), message });
        }
        tracing::info!(number, address = departed.address, "the server has moved away");
        *state = State::Left(departed);
        drop(state);
        self.gone(conn);
        Ok(MoveAnswer::Done)
    }

    fn gone(&self, copier: ConnId) {
        // Before those that wait are woken: nothing is to reach their clients but the end of the connection.
        self.callers.end_all_but(copier);
        self.departure.changed.notify_all();
        if let Some(then) = self.departure.on_leaving.lock().take() {
            then();
        }
    }

    /// What is called when the server has left.
    pub(crate) fn departure(&self) -> &Arc<Departure> {
        &self.departure
    }
}

fn has_moved(name: &str, Departed { address, .. }: &Departed) -> Fault {
    Fault { errno: libc::ESHUTDOWN, message: format!("{name} has moved to {address}") }
}

fn too_late() -> Fault {
    Fault { errno: libc::ETIME, message: "clients do not wait any more, and may have changed something since".into() }
}
