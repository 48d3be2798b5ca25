//! A call that was sent: waiting for its answer, and repeating it when its connection is lost.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_node::session::{self, Failure, Rights, Step, Verdict};
use impresario_transport::Proven;
use impresario_wire::frame::FrameError;
use impresario_wire::{Answer, Call, Fault, FileKey, MetaCall, Target};

use crate::caller::Caller;
use crate::clock::{instant, nanos};
use crate::connection::{Connection, NotStarted, Outcome, Waited};
use crate::error::{ClientError, Errno, Peer};
use crate::landing::Lender;
use crate::link::Link;
use crate::slots::Breakage;

/// How often a call's user is proved before the call fails: the server forgets users, and connections end.
const PROOFS_MAX: u32 = 4;

/// Buffers for the payload of an answer, filled back to back.
pub type Buffers<'a, 'b> = Option<&'a mut [IoSliceMut<'b>]>;

/// An answer, other than a fault.
#[derive(Clone, PartialEq, Debug)]
pub struct Reply {
    /// The answer.
    pub answer: Answer,
    /// Bytes of payload that came with it.
    pub len: usize,
    /// The server's incarnation.
    pub incarnation: u64,
    /// Number of the connection it came on.
    pub session: u64,
    /// The call was sent again after it, or its answer, was lost: its first copy may have been applied before.
    pub repeated: bool,
    /// Who answered.
    pub peer: Peer,
}

/// A call under way. Dropped, it is abandoned: the server may still do it, unless it hears of the client's next epoch first.
pub struct Pending<'a> {
    link: &'a Link,
    call: Call,
    payload: &'a [IoSlice<'a>],
    want_bytes: u32,
    session: Option<u64>,
    /// The file that it reads or writes.
    under: Option<FileKey>,
    started: Instant,
    under_way: Option<(Arc<Connection>, u64)>,
    /// Where the payload of the answer goes.
    lender: Option<Lender>,
    /// It could not be sent, for good.
    failed: Option<ClientError>,
    /// What is to be done when an answer does not come.
    attempts: session::Call,
    /// How often its user was proved.
    proofs: u32,
    /// How long it may take, but for what a limit withholds it.
    span: Option<Duration>,
    /// Its new deadline, after a limit has withheld it.
    until: Option<Instant>,
}

impl<'a> Pending<'a> {
    pub(crate) fn new(link: &'a Link, call: Call, payload: &'a [IoSlice<'a>], session: Option<u64>) -> Pending<'a> {
        let want_bytes = call.answer_bytes().and_then(|bytes| u32::try_from(bytes).ok()).unwrap_or(0);
        let mut attempts = session::Call::new(rights(&call, link, session.is_some()), nanos(Instant::now()));
        if let Some(who) = call.who().filter(|who| who.is_copy()) {
            attempts.repeats(who.since);
        }
        let under = match &call {
            Call::Write { file, .. } | Call::FileWrite { file, .. } => Some(*file),
            Call::Read { file, .. } | Call::ReadList { file, .. } | Call::FileRead { file, .. } => Some(*file),
            Call::ChangeSpace { file, .. } | Call::FileChangeSpace { file, .. } => Some(*file),
            _ => None,
        };
        Pending {
            link,
            call,
            payload,
            want_bytes,
            session,
            under,
            started: Instant::now(),
            under_way: None,
            lender: None,
            failed: None,
            attempts,
            proofs: 0,
            span: None,
            until: None,
        }
    }

    /// It changes this file, and is not sent when the locks of that are lost.
    pub(crate) fn under(mut self, file: Option<FileKey>) -> Pending<'a> {
        self.under = file.or(self.under);
        self
    }

    /// Waits for the answer, at most until `deadline`; its payload goes into `into`, which must hold what was asked for.
    /// A fault is an error.
    pub fn wait(mut self, into: Buffers<'_, '_>, deadline: Instant) -> Result<Reply, ClientError> {
        if let Some(into) = into {
            // SAFETY: a landing is dropped when its call goes off its connection's books, which `finish` sees to
            // however it returns, and `drop` if it unwinds: both before this function ends. Until then `into` is
            // borrowed and not touched, and a call is sent again only after that.
            let lender = unsafe { Lender::new(into) };
            if let Some((connection, id)) = &self.under_way {
                self.check_room(&lender)?;
                connection.lend(*id, lender.lend());
            }
            self.lender = Some(lender);
        }
        self.finish(deadline)
    }

    /// Sends the call, unless it was sent. Does not fail: see [`finish`](Self::finish).
    pub(crate) fn launch(&mut self, deadline: Instant) {
        self.span.get_or_insert(deadline.saturating_duration_since(self.started));
        while self.under_way.is_none() && self.failed.is_none() {
            if let Err(error) = self.send(deadline) {
                self.failed = Some(error);
            }
        }
    }

    /// Waits for the answer; repeats the call where that is allowed. The time for which a limit withholds it does not count.
    fn finish(&mut self, mut deadline: Instant) -> Result<Reply, ClientError> {
        loop {
            self.launch(deadline);
            if let Some(error) = self.failed.take() {
                return Err(error);
            }
            let Some((connection, id)) = &self.under_way else { continue };
            let Waited { outcome, was_withheld } = connection.wait(*id, deadline);
            let Some((connection, _)) = self.under_way.take() else { continue };
            // A server that had no room for it, because of those of this connection that are withheld, is asked again.
            if was_withheld || connection.is_withholding().is_some() {
                deadline = deadline.max(Instant::now() + self.span.unwrap_or_default());
                self.until = Some(deadline);
                self.attempts.set_deadline(nanos(deadline));
            }
            match outcome {
                Outcome::Answered(Answer::Fault(fault), ..) => self.after_fault(&connection, fault, deadline)?,
                Outcome::Answered(answer, len, spill) => {
                    if let Some(lender) = &self.lender
                        && !spill.is_empty()
                    {
                        lender.lend().put(0, &spill);
                    }
                    return Ok(Reply {
                        answer,
                        len: len as usize,
                        incarnation: connection.welcome.incarnation,
                        session: connection.session,
                        repeated: self.attempts.is_repeated(),
                        peer: connection.peer.clone(),
                    });
                }
                Outcome::Broken(broken) => self.after_loss(&connection.peer, &broken)?,
                Outcome::Late => {
                    self.attempts.given_up(self.link.identity().epochs());
                    return Err(self.link.late(&connection.peer, self.started, "no answer came"));
                }
            }
        }
    }

    fn send(&mut self, deadline: Instant) -> Result<(), ClientError> {
        self.attempts.set_deadline(nanos(deadline));
        let connection = match self.session {
            Some(session) => self.link.connection_in(session)?,
            None => self.link.connection(self.started, deadline)?,
        };
        let epoch = self.attempts.stamp(self.link.identity().epochs());
        if self.attempts.is_ours()
            && let Some(who) = self.call.who_mut()
        {
            (who.epoch, who.since) = (epoch, self.attempts.since());
        }
        if self.attempts.is_ours()
            && let Some(file) = self.under
        {
            self.link.identity().leases.check(file, epoch, deadline)?;
        }
        if let Some(lender) = &self.lender {
            self.check_room(lender)?;
        }
        let landing = self.lender.map(|lender| lender.lend());
        match connection.start(&self.call, self.payload, self.want_bytes, landing, deadline) {
            Ok(id) => {
                self.count();
                self.under_way = Some((connection, id));
                Ok(())
            }
            Err(NotStarted::Unsent) if self.session.is_some() => {
                Err(ClientError::SessionEnded { peer: connection.peer.clone() })
            }
            Err(NotStarted::Unsent) => Ok(()),
            Err(NotStarted::Sent(broken)) => self.after_loss(&connection.peer, &broken),
            Err(NotStarted::Late) => Err(self.link.late(&connection.peer, self.started, "it takes no more requests")),
            Err(NotStarted::Impossible(error)) => {
                let what = format!("{}: the call cannot be sent: {error}", connection.peer);
                Err(match error {
                    // Of what a call says only its paths are not bounded before.
                    FrameError::BodyTooLong { .. } => ClientError::System { what, errno: Errno(libc::ENAMETOOLONG) },
                    _ => ClientError::invalid(what),
                })
            }
        }
    }

    /// The connection was lost with the call outstanding. An error ends the call; otherwise it is sent again.
    fn after_loss(&mut self, peer: &Peer, broken: &Breakage) -> Result<(), ClientError> {
        match self.attempts.lost(nanos(Instant::now()), broken.protocol) {
            Step::Fail(Failure::Protocol) => {
                Err(ClientError::Protocol { peer: peer.clone(), what: broken.cause.to_string() })
            }
            Step::Fail(Failure::Lost) => {
                let (cause, was_withheld) = (broken.cause.to_string(), self.until.is_some());
                Err(ClientError::Lost { peer: peer.clone(), cause, was_withheld })
            }
            Step::Fail(Failure::Late) => Err(self.link.late(peer, self.started, &broken.cause)),
            Step::Again { .. } | Step::Answer => Ok(()),
        }
    }

    /// A server answered with a fault. An error ends the call; otherwise it is sent again.
    fn after_fault(&mut self, connection: &Connection, fault: Fault, deadline: Instant) -> Result<(), ClientError> {
        if fault.errno == Fault::UNPROVEN && self.proofs < PROOFS_MAX {
            self.proofs += 1;
            return self.prove_user(connection, &fault, deadline);
        }
        let now = nanos(Instant::now());
        match self.attempts.answered(now, verdict(&fault), self.link.identity().epochs()) {
            Step::Again { at, elsewhere } => {
                if elsewhere {
                    connection.break_off(&fault.message, false);
                }
                std::thread::sleep(Duration::from_nanos(at.0.saturating_sub(now.0)));
                if instant(at) < deadline {
                    return Ok(());
                }
                Err(self.link.late(&connection.peer, self.started, &fault.message))
            }
            Step::Answer | Step::Fail(_) => Err(ClientError::Fault { peer: connection.peer.clone(), fault }),
        }
    }

    /// Proves the user of the call, which was not done and is to be sent again.
    fn prove_user(&self, connection: &Connection, wanted: &Fault, deadline: Instant) -> Result<(), ClientError> {
        let refused = |why: &str| {
            let message = format!("{} (this program could not do it: {why})", wanted.message);
            ClientError::Fault { peer: connection.peer.clone(), fault: Fault { errno: libc::EACCES, message } }
        };
        let user = self.call.who().map_or(0, |who| who.user);
        let caller = Caller::now().filter(|caller| caller.uid == user);
        let gid = caller.map_or(user, |caller| caller.gid);
        let identity = self.link.identity();
        let credential = self.link.options().access.credential_of(Proven { uid: user, gid }, identity.client());
        let call = MetaCall::Prove { credential: credential.map_err(|why| refused(&why))? };
        let call = Call::Meta { who: identity.asker(), call };
        // On another connection, made meanwhile, the call itself asks again.
        let proof = connection.start(&call, &[], 0, None, deadline).ok();
        let proof = proof.map(|id| connection.wait(id, deadline).outcome);
        match proof {
            Some(Outcome::Answered(Answer::Fault(fault), ..)) => Err(refused(&fault.message)),
            Some(Outcome::Answered(..) | Outcome::Broken(_)) | None => Ok(()),
            Some(Outcome::Late) => Err(self.link.late(&connection.peer, self.started, "its user is not proved yet")),
        }
    }

    fn check_room(&self, lender: &Lender) -> Result<(), ClientError> {
        if lender.len_bytes() < self.want_bytes as usize {
            return Err(ClientError::invalid("the buffers are smaller than what the call asks for"));
        }
        Ok(())
    }

    fn count(&self) {
        let traffic = &self.link.identity().traffic;
        match &self.call {
            Call::Read { .. } | Call::ReadList { .. } | Call::FileRead { .. } => {
                traffic.count_read(self.want_bytes.into());
            }
            Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. } | Call::FileWrite { .. } => {
                traffic.count_write(self.payload.iter().map(|piece| piece.len() as u64).sum());
            }
            _ => {}
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if let Some((connection, id)) = self.under_way.take() {
            connection.abandon(id);
            self.attempts.given_up(self.link.identity().epochs());
        }
    }
}

/// What a server's fault means for the repetition of a call.
pub fn verdict(fault: &Fault) -> Verdict {
    match fault.errno {
        Fault::FENCED => Verdict::Fenced,
        Fault::PATH_LOST => Verdict::PathLost,
        libc::ESHUTDOWN => Verdict::Stopping,
        libc::EBUSY => Verdict::Busy,
        libc::EIO => Verdict::Doubtful,
        _ => Verdict::Final,
    }
}

fn rights(call: &Call, link: &Link, bound: bool) -> Rights {
    let ours = call.who().is_some_and(|who| who.client == link.identity().client());
    let again_when_busy = matches!(
        call,
        Call::Read { .. }
            | Call::ReadList { .. }
            | Call::Write { .. }
            | Call::WriteMerged { .. }
            | Call::WriteList { .. }
            | Call::FileRead { .. }
            | Call::FileWrite { .. }
            | Call::ChangeSpace { .. }
            | Call::FileChangeSpace { .. }
            | Call::Meta { .. }
    );
    let changes = match call {
        Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. } | Call::FileWrite { .. } => true,
        Call::ChangeSpace { .. } | Call::FileChangeSpace { .. } => true,
        Call::Truncate { .. } | Call::Unlink { .. } | Call::SetAside { .. } => true,
        // A copy that comes late would take or give up what its client has asked for anew.
        Call::Meta { call, .. } => call.is_change() || matches!(call, MetaCall::Lock(_)),
        _ => false,
    };
    Rights { repeat: !bound && may_repeat(call, ours), ours, bound, again_when_busy, changes }
}

/// May a call be sent again though a copy of it was sent before?
fn may_repeat(call: &Call, ours: bool) -> bool {
    match call {
        Call::Write { .. } | Call::FileWrite { .. } | Call::Truncate { .. } => ours,
        Call::Unlink { .. } | Call::SetAside { .. } => ours,
        Call::ChangeSpace { .. } | Call::FileChangeSpace { .. } => ours,
        // Its other senders decide for themselves.
        Call::WriteMerged { .. } | Call::WriteList { .. } => false,
        // The metadata server recognises the copies by their sequence.
        Call::Meta { .. } if ours => true,
        Call::Meta { call, .. } => match call {
            MetaCall::GetAttr { target } | MetaCall::SetAttr { target, .. } => matches!(target, Target::Path(_)),
            MetaCall::GetXattr { target, .. } | MetaCall::ListXattr { target } => matches!(target, Target::Path(_)),
            MetaCall::SetXattr { .. } => false,
            // An open whose answer was lost ends with its connection.
            MetaCall::Open { .. } | MetaCall::Reopen { .. } => true,
            MetaCall::Create { exclusive, .. } => !exclusive,
            MetaCall::Readlink { .. } | MetaCall::Readdir { .. } | MetaCall::Statfs | MetaCall::Examine(_) => true,
            MetaCall::SyncAll => true,
            MetaCall::Lock(_) | MetaCall::Relay(_) | MetaCall::Restrict(_) | MetaCall::Prove { .. } => false,
            MetaCall::FsyncDir { .. } | MetaCall::SetLayout { .. } => true,
            MetaCall::Close { .. } | MetaCall::Fsync { .. } | MetaCall::Append { .. } => false,
            MetaCall::Mkdir { .. } | MetaCall::Rmdir { .. } | MetaCall::Unlink { .. } => false,
            MetaCall::Rename { .. } | MetaCall::Symlink { .. } | MetaCall::Mknod { .. } => false,
            MetaCall::Link { .. } | MetaCall::Exchange { .. } | MetaCall::CutBack { .. } => false,
        },
        Call::Read { .. } | Call::ReadList { .. } | Call::FileRead { .. } => true,
        Call::ObjectSeek { .. } | Call::FileSeek { .. } => true,
        Call::ObjectStat { .. } | Call::FileStat { .. } | Call::ListObjects { .. } | Call::Scrub { .. } => true,
        Call::Prefetch { .. } | Call::FilePrefetch { .. } => true,
        Call::Sync { .. } | Call::FileSync { .. } => true,
        Call::Status
        | Call::Grants
        | Call::Members
        | Call::Explain { .. }
        | Call::SetPolicy { .. }
        | Call::ResetStatistics
        | Call::SetDiskOrder { .. } => true,
        // Begun or ended already, the second copy would be refused.
        Call::Trace { .. } | Call::EarlierRuns { .. } => false,
        // Who moves a server decides itself. Calls are given up on their connection.
        Call::Move(_) | Call::GiveUp { .. } => false,
    }
}

/// One of several calls that are sent together.
pub struct Op<'a, 'b> {
    /// Where it goes.
    pub link: &'a Link,
    /// The call.
    pub call: Call,
    /// What a write carries.
    pub payload: &'a [IoSlice<'a>],
    /// Where the payload of the answer goes.
    pub into: Buffers<'a, 'b>,
}

/// Sends all calls before any answer is awaited, and waits for all answers, at most until `deadline`.
pub fn exchange(ops: Vec<Op<'_, '_>>, deadline: Instant) -> Vec<Result<Reply, ClientError>> {
    let mut under_way = Vec::with_capacity(ops.len());
    for Op { link, call, payload, into } in ops {
        let mut pending = Pending::new(link, call, payload, None);
        // SAFETY: as in `Pending::wait`: every pending call is dropped before this function ends, however it does; the
        // buffers are borrowed for longer than that and not touched here.
        pending.lender = into.map(|into| unsafe { Lender::new(into) });
        pending.launch(deadline);
        under_way.push(pending);
    }
    let mut deadline = deadline;
    let finish = |pending: &mut Pending<'_>| {
        // One dead server may have used up all the time; what others answered meanwhile has not been received yet.
        let collected = (Instant::now() + COLLECT).min(deadline + COLLECT_MAX);
        let finished = pending.finish(deadline.max(collected));
        // Of what a limit has withheld for hours, the rest has its time yet.
        deadline = pending.until.map_or(deadline, |until| deadline.max(until));
        finished
    };
    under_way.iter_mut().map(finish).collect()
}

/// How long past the deadline one call of several may take to receive an answer that has come, and all of them.
const COLLECT: Duration = Duration::from_millis(100);
const COLLECT_MAX: Duration = Duration::from_secs(1);
