//! One call of a client: repeated until it is answered, has failed permanently, or has timed out.

use impresario_sched::Nanos;

use super::{Epoch, pause};

/// A call is repeated at once after this many refusals: a client that a server has forgotten begins new epochs until
/// one is accepted.
const EPOCHS_AT_ONCE: u32 = 64;

/// What may be done about a call without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Rights {
    /// It may be repeated after a copy was sent: it only reads, or servers recognise its copies.
    pub repeat: bool,
    /// It is sent in the name of this client, which may begin new epochs.
    pub ours: bool,
    /// It is valid on one connection only.
    pub bound: bool,
    /// It may be repeated to a server that was too busy to begin it.
    pub again_when_busy: bool,
    /// It changes something: once given up, it must not be applied later.
    pub changes: bool,
}

/// A server's answer, as far as repetition is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The call was done, or failed for its own reasons.
    Final,
    /// It failed because a server further along did not answer and may still apply it.
    Doubtful,
    /// It arrived under an epoch that its client has left; it was not applied.
    Fenced,
    /// An I/O node lost its path to the data server; the call may have been applied.
    PathLost,
    /// The server is stopping and has not begun it.
    Stopping,
    /// The server had no room and has not begun it.
    Busy,
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Give the caller the answer.
    Answer,
    /// Repeat it.
    Again {
        /// Not before this instant.
        at: Nanos,
        /// On a different connection.
        elsewhere: bool,
    },
    /// Give the caller an error.
    Fail(Failure),
}

/// Why a call failed without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// It timed out.
    Late,
    /// Its connection was lost and it may not be repeated: it may have been applied.
    Lost,
    /// The peer violated the protocol; repeating would not help.
    Protocol,
}

/// A call in progress.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    rights: Rights,
    /// By when it must have ended.
    deadline: Nanos,
    /// The epoch of the current copy.
    epoch: u32,
    /// The oldest epoch of a copy that may have been applied.
    since: u32,
    /// Answers that asked for another copy.
    refusals: u32,
    repeated: bool,
}

impl Call {
    /// A call that ends by `deadline`.
    pub fn new(rights: Rights, deadline: Nanos) -> Call {
        Call { rights, deadline, epoch: 0, since: 0, refusals: 0, repeated: false }
    }

    /// By when it must have ended.
    pub fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Moves the deadline.
    pub fn set_deadline(&mut self, deadline: Nanos) {
        self.deadline = deadline;
    }

    /// It is sent in the name of this client.
    pub fn is_ours(&self) -> bool {
        self.rights.ours
    }

    /// An earlier copy may have been applied.
    pub fn is_repeated(&self) -> bool {
        self.repeated
    }

    /// The epoch of the current copy.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The oldest epoch of a copy that may have been applied; that of the current copy if there is no other.
    pub fn since(&self) -> u32 {
        self.since
    }

    /// Copies may have been applied since this epoch, before this state was created.
    pub fn repeats(&mut self, since: u32) {
        self.repeated = true;
        self.since = since;
    }

    /// A copy is sent under this epoch.
    pub fn stamp(&mut self, epoch: &Epoch) -> u32 {
        self.epoch = epoch.now();
        if !self.repeated {
            self.since = self.epoch;
        }
        self.epoch
    }

    /// An answer arrived. If another copy must be sent under a newer epoch, that epoch has begun.
    pub fn answered(&mut self, now: Nanos, verdict: Verdict, epoch: &Epoch) -> Step {
        let elsewhere = match verdict {
            Verdict::Fenced | Verdict::PathLost if self.rights.ours => {
                epoch.leave_after(self.epoch, if verdict == Verdict::Fenced { self.refusals } else { 0 });
                self.repeated |= verdict == Verdict::PathLost;
                false
            }
            Verdict::Stopping if !self.rights.bound => true,
            Verdict::Doubtful => {
                self.given_up(epoch);
                return Step::Answer;
            }
            Verdict::Busy if self.rights.again_when_busy => false,
            _ => return Step::Answer,
        };
        self.refusals = self.refusals.saturating_add(1);
        // Another thread has just begun an epoch, or the server has forgotten this client: no reason to wait.
        let at_once = if verdict == Verdict::Fenced { EPOCHS_AT_ONCE } else { 1 };
        let wait = self.refusals.checked_sub(at_once + 1).map_or(Nanos(0), pause);
        Step::Again { at: Nanos(now.0.saturating_add(wait.0)).min(self.deadline), elsewhere }
    }

    /// The connection was lost with the call outstanding; the thread that closed it has begun a new epoch.
    pub fn lost(&mut self, now: Nanos, broke_protocol: bool) -> Step {
        if broke_protocol {
            return Step::Fail(Failure::Protocol);
        }
        if !self.rights.repeat {
            return Step::Fail(Failure::Lost);
        }
        self.repeated = true;
        self.again(now)
    }

    /// The caller has stopped waiting, and the current copy may still be in flight: it must not be applied after the
    /// client's next operations.
    pub fn given_up(&self, epoch: &Epoch) {
        if self.rights.ours && self.rights.changes {
            epoch.leave(self.epoch);
        }
    }

    /// Whether another copy may be sent, if there is still time.
    pub fn again(&self, now: Nanos) -> Step {
        if now >= self.deadline { Step::Fail(Failure::Late) } else { Step::Again { at: now, elsewhere: false } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Rights = Rights { repeat: true, ours: true, bound: false, again_when_busy: true, changes: true };
    const END: Nanos = Nanos(1_000_000_000);

    #[test]
    fn refusals_are_answered_with_a_new_epoch_and_growing_pauses() {
        let (epoch, mut call) = (Epoch::new(7), Call::new(WRITE, END));
        let mut now = Nanos(0);
        for round in 0..EPOCHS_AT_ONCE + 5 {
            let sent = call.stamp(&epoch);
            let Step::Again { at, elsewhere: false } = call.answered(now, Verdict::Fenced, &epoch) else { panic!() };
            let wait_ms = round.checked_sub(EPOCHS_AT_ONCE).map_or(0, |late| 20 << late);
            assert_eq!(epoch.now(), sent + (1u32 << round.saturating_sub(3).min(16)));
            assert_eq!(at.0 - now.0, wait_ms * 1_000_000, "round {round}");
            now = at;
        }
        assert!(!call.is_repeated(), "a fenced copy was not applied");
        let sent = call.stamp(&epoch);
        assert_eq!(call.since(), sent);
        assert_eq!(call.answered(now, Verdict::PathLost, &epoch), Step::Again { at: END, elsewhere: false });
        assert!(call.is_repeated());
        assert_eq!((call.stamp(&epoch), call.since()), (sent + 1, sent));
        assert_eq!(call.again(END), Step::Fail(Failure::Late));
    }

    #[test]
    fn an_epoch_that_was_left_meanwhile_is_not_left_again() {
        let (epoch, mut call) = (Epoch::new(0), Call::new(WRITE, END));
        call.stamp(&epoch);
        epoch.give_up();
        call.answered(Nanos(0), Verdict::Fenced, &epoch);
        assert_eq!(epoch.now(), 1);
    }

    #[test]
    fn a_change_that_was_given_up_is_revoked() {
        let (epoch, mut write) = (Epoch::new(4), Call::new(WRITE, END));
        write.stamp(&epoch);
        let mut read = Call::new(Rights { changes: false, ..WRITE }, END);
        read.stamp(&epoch);
        read.given_up(&epoch);
        assert_eq!(epoch.now(), 4, "it changes nothing");
        write.given_up(&epoch);
        write.given_up(&epoch);
        assert_eq!(epoch.now(), 5);
        write.stamp(&epoch);
        assert_eq!((write.answered(Nanos(0), Verdict::Doubtful, &epoch), epoch.now()), (Step::Answer, 6));
    }

    #[test]
    fn what_is_not_ours_is_passed_on_as_it_is() {
        let (epoch, mut call) = (Epoch::new(0), Call::new(Rights::default(), END));
        call.stamp(&epoch);
        for verdict in [Verdict::Final, Verdict::Fenced, Verdict::PathLost, Verdict::Busy] {
            assert_eq!(call.answered(Nanos(0), verdict, &epoch), Step::Answer, "{verdict:?}");
        }
        assert_eq!(epoch.now(), 0);
        assert_eq!(call.lost(Nanos(0), false), Step::Fail(Failure::Lost));
        assert_eq!(call.lost(Nanos(0), true), Step::Fail(Failure::Protocol));
    }

    #[test]
    fn a_stopping_server_sends_calls_elsewhere_unless_they_are_bound_to_it() {
        let epoch = Epoch::new(0);
        let mut call = Call::new(WRITE, END);
        assert_eq!(call.answered(Nanos(3), Verdict::Stopping, &epoch), Step::Again { at: Nanos(3), elsewhere: true });
        let mut bound = Call::new(Rights { bound: true, ..WRITE }, END);
        assert_eq!(bound.answered(Nanos(3), Verdict::Stopping, &epoch), Step::Answer);
        assert_eq!(call.lost(Nanos(5), false), Step::Again { at: Nanos(5), elsewhere: false });
        assert_eq!(call.lost(END, false), Step::Fail(Failure::Late));
    }
}
