//! Calls of clients: a change is done once, whatever copies of it come, and a copy is told what became of it.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use impresario_base::lock::Mutex;
use impresario_node::session::{Admission, Replies, Stamp};
use impresario_wire::message::{Answer, ClientKey, Fault, FileKey, LaneState, MetaCall, SetAttr, Target, Who};
use rustix::io::Errno;

use super::notes::{BEGUN, DONE, FAILED, Note, OPENED};
use super::{Begun, By, Known, digest, fenced, hidden, not_noted};
use crate::meta::fault::{Explain, Outcome, data_fault, fault};
use crate::meta::labels::is_acl;
use crate::meta::opens::SessionId;
use crate::meta::service::{Meta, MetaService};
use crate::meta::tree::{Absent, check_path};
/// Ends a change however its service ends.
struct UnderWay<'a> {
    service: &'a MetaService,
    who: Who,
    known: Option<Known>,
    /// What was noted of it last. A change that failed before it was noted that it begins has left nothing to be noted.
    noted: Cell<Option<(u32, u64)>>,
    /// It may cut a file.
    cuts: bool,
}

impl UnderWay<'_> {
    /// Of a change that an earlier run had begun.
    fn end(service: &MetaService, who: Who, known: Option<Known>) {
        drop(UnderWay { service, who, known, noted: Cell::new(Some((BEGUN, 0))), cuts: false });
    }

    /// A truncation that has cut the objects, and failed then, is not to be done again.
    fn is_cut(&self) -> Option<Known> {
        let node = self.noted.get().filter(|(kind, node)| self.cuts && *kind == BEGUN && *node != 0)?.1;
        // Others may change its names from now on.
        self.service.meta.changes.open.fetch_add(1, Ordering::AcqRel);
        Some(Known::Begun(Begun { node, is_of_last_run: true }))
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let changes = &self.service.meta.changes;
        let known = self.known.take().or_else(|| self.is_cut());
        let (kind, key) = match &known {
            None => (FAILED, 0),
            Some(Known::Begun(begun)) => (BEGUN, begun.node),
            Some(Known::Opened(key)) => (OPENED, key.0),
            Some(known) => (DONE, known.digest()),
        };
        let directory = &self.service.meta.dir;
        let is_noted = self.noted.get().is_some();
        let is_over = self.noted.get() == Some((kind, key));
        let mut file = changes.file.lock();
        let noted = match (is_noted || known.is_some()) && !is_over {
            true => changes.append(directory, &mut file, Note { kind, who: self.who, key: FileKey(key) }),
            false => Ok(()),
        };
        changes.replies.lock().end(self.who.client.0, self.who.sequence, known);
        if noted.is_err() {
            changes.write_anew(directory, &mut file);
        }
        drop(file);
        if is_noted {
            changes.begun.lock().remove(&(self.who.client.0, self.who.sequence));
        }
    }
}

/// A change of an earlier run that is being ended.
struct Resumed<'a> {
    replies: &'a Mutex<Replies<Known>>,
    who: Who,
}

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.replies.lock().leave(self.who.client.0, self.who.sequence);
    }
}

impl MetaService {
    /// Serves one call of a client: a change once, whatever copies of it come. A client without a key is served
    /// without that.
    pub fn call_from(&self, session: SessionId, who: Who, call: MetaCall) -> Answer {
        self.call_at(session, who, call, None)
    }

    /// The same of a call of which the name was looked for ([`MetaService::absent`]).
    pub fn call_at(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Answer {
        if who.client == ClientKey::default() {
            return self.call(session, call);
        }
        // Before the change is noted: a call of a user who is not known yet is not done.
        if self.meta.options.squashes
            && let Err(fault) = self.meta.sessions.get(session).and_then(|session| session.user_of(&who, &call))
        {
            return Answer::Fault(fault);
        }
        self.admit_from(session, who, call, absent).unwrap_or_else(Answer::Fault)
    }

    fn admit_from(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Outcome<Answer> {
        let (changes, client) = (&self.meta.changes, who.client.0);
        let is_current = changes.note_epoch(&self.meta.dir, who).map_err(|errno| match who.is_copy() {
            // A copy of it may have been done: this is no answer to that.
            true => Fault { errno: libc::EIO, ..not_noted(errno) },
            false => not_noted(errno),
        })?;
        if !call.is_change() {
            return if is_current || only_looks(&call) {
                Ok(self.call_as(session, By::unnoted(&who), call))
            } else {
                Err(fenced(who))
            };
        }
        let exchanging = matches!(call, MetaCall::Exchange { .. }).then(|| changes.ending.lock());
        let stamp = Stamp { client, epoch: who.epoch, since: who.since, sequence: who.sequence };
        // Not in the `match`: its lock would be held through it.
        let begin = || changes.replies.lock().begin(stamp);
        let admission = begin();
        let is_open = matches!(admission, Admission::Done(Known::Begun(_))) && exchanging.is_none();
        let ending = is_open.then(|| changes.ending.lock());
        // Another copy may have ended it meanwhile.
        let admission = if ending.is_some() { begin() } else { admission };
        match admission {
            Admission::New => self.change(session, who, call, absent),
            Admission::Done(Known::Answered(answer)) => Ok(answer),
            Admission::Done(Known::Opened(file)) => match call {
                MetaCall::Create { path, .. } => self.look(session, &who, MetaCall::Reopen { path, file, write: true }),
                other => Ok(self.call_as(session, By::unnoted(&who), other)),
            },
            Admission::Done(Known::Done(digest)) => self.answer_again(session, &who, call, digest),
            Admission::Done(Known::Begun(begun)) => self.resume(who, || self.finish(session, who, call, begun)),
            Admission::Done(Known::Exchanging(begun)) => {
                self.resume(who, || self.finish_exchange(session, who, call, begun))
            }
            Admission::Busy => {
                Err(fault(Errno::BUSY, "an earlier copy of this change, or one given up before it, is being served"))
            }
            Admission::Fenced => Err(fenced(who)),
            Admission::Forgotten => Err(fault(
                Errno::IO,
                "a copy of this change may have been done before, too long ago for the metadata server to know; look",
            )),
        }
    }

    fn change(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Outcome<Answer> {
        let mut under_way = UnderWay { service: self, who, known: None, noted: Cell::new(None), cuts: may_cut(&call) };
        let by = By { who: &who, noted: Some(&under_way.noted), absent: absent.as_ref() };
        // Others look at what they are about anyway, and are noted then.
        let is_noted_later = match &call {
            MetaCall::Exchange { .. } => true,
            MetaCall::SetXattr { name, .. } => !is_acl(name),
            call => deciding_name(call).is_some(),
        };
        if !is_noted_later {
            self.meta.changes.begin(&self.meta.dir, by, 0)?.goes_on();
        }
        self.meta.changes.touch(|| self.names_of(session, &call));
        let answer = self.call_as(session, by, call);
        under_way.known = Known::of(&answer);
        Ok(answer)
    }

    /// The answer to a change that an earlier run of the server did; `digest`: see [`Known::Done`].
    fn answer_again(&self, session: SessionId, who: &Who, call: MetaCall, digest: u64) -> Outcome<Answer> {
        let target = match call {
            MetaCall::SetAttr { target, .. } if digest != 0 => {
                let (file, lanes) = self.meta.states_since(session, &target, digest).map_err(untold)?;
                return Ok(match self.look(session, who, MetaCall::GetAttr { target })? {
                    Answer::Attr(attr) if !lanes.is_empty() => Answer::Cut { attr, file, lanes },
                    answer => answer,
                });
            }
            MetaCall::SetAttr { target, .. } => target,
            MetaCall::Mkdir { path, .. }
            | MetaCall::Symlink { path, .. }
            | MetaCall::Mknod { path, .. }
            | MetaCall::Link { to: path, .. } => Target::Path(path),
            _ => return Ok(Answer::Done),
        };
        self.look(session, who, MetaCall::GetAttr { target })
    }

    /// What a change that was done has to answer, by a call that looks. Where it cannot, because others have changed the name
    /// since or a disk is full, its failure is not that of the change, which must not seem not to have been done.
    fn look(&self, session: SessionId, who: &Who, call: MetaCall) -> Outcome<Answer> {
        match self.call_as(session, By::unnoted(who), call) {
            Answer::Fault(why) => Err(untold(why)),
            answer => Ok(answer),
        }
    }

    /// The names that a change is about; of an extended attribute of an open file, that of the file.
    fn names_of(&self, session: SessionId, call: &MetaCall) -> Vec<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = call.paths().cloned().collect();
        if let MetaCall::SetXattr { target: Target::Handle(handle), .. } = call
            && let Some((file, _)) = self.meta.held_by(session, *handle)
        {
            names.push(self.meta.opens.path_of(file.ino));
        }
        names
    }

    /// The number of the node by which it is seen whether a change was done: that of the name that it takes away, or gives. 0 if
    /// there is none.
    fn deciding_node(&self, call: &MetaCall) -> u64 {
        let Some(path) = deciding_name(call) else { return 0 };
        let entry = check_path(path).ok().and_then(|()| self.meta.dir.entry(path).ok().flatten());
        entry.and_then(|entry| entry.stat().ok()).map_or(0, |stat| stat.st_ino)
    }

    /// Has a change ended that an earlier run had begun. It is under way meanwhile: neither its client nor who gets what that client
    /// had locked must take it for over.
    fn resume(&self, who: Who, end: impl FnOnce() -> Outcome<Answer>) -> Outcome<Answer> {
        let replies = &self.meta.changes.replies;
        if !replies.lock().resume(who.client.0, who.epoch, who.sequence) {
            return Err(fenced(who));
        }
        // Also when it panics, which the server outlives.
        let _resumed = Resumed { replies, who };
        end()
    }

    /// Ends a change that an earlier run of the server had begun: does it, unless the name space shows that it was done.
    fn finish(&self, session: SessionId, who: Who, call: MetaCall, begun: Begun) -> Outcome<Answer> {
        let now = self.deciding_node(&call);
        let is_done = match &call {
            MetaCall::Unlink { .. } | MetaCall::Rmdir { .. } | MetaCall::Rename { .. } => {
                begun.node != 0 && now != begun.node
            }
            // A list is set in more than one step, and set again it is the same.
            MetaCall::SetXattr { target, name, value, .. } if !is_acl(name) => {
                let is_there =
                    self.meta.sessions.get(session).and_then(|session| self.meta.get_xattr(&session, target, name));
                match is_there {
                    Ok(_) => value.is_some() && begun.node == 0,
                    Err(fault) => fault.errno == libc::ENODATA && value.is_none() && begun.node != 0,
                }
            }
            call if may_cut(call) => begun.node != 0,
            // An older version did not note which node it was making.
            call if deciding_name(call).is_some() && begun.node == 0 && now != 0 => return Err(hidden()),
            call => deciding_name(call).is_some() && begun.node != 0 && now == begun.node,
        };
        // After the look: who has changed a name before it is known by now.
        let names = self.names_of(session, &call);
        self.meta.changes.check_hidden(begun, &names)?;
        let (noted, cuts) = (Cell::new(Some((BEGUN, begun.node))), may_cut(&call));
        let answer = match call {
            MetaCall::Create { path, .. } if is_done => {
                self.look(session, &who, MetaCall::Open { path, write: true })?
            }
            MetaCall::SetAttr { target, set } if is_done => {
                // It is cut. What else it sets may be missing.
                let rest = MetaCall::SetAttr { target, set: SetAttr { size: None, ..set } };
                let states = if begun.node == digest(&[]) { 0 } else { begun.node };
                match self.call_as(session, By::unnoted(&who), rest.clone()) {
                    // What was noted stays: its client may ask again, and others have written to the file since it was cut.
                    Answer::Fault(why) => return Err(why),
                    _ => self.answer_again(session, &who, rest, states)?,
                }
            }
            _ if is_done => self.answer_again(session, &who, call, 0)?,
            _ => {
                let is_shown = shows(&call);
                let noted = cuts.then_some(&noted);
                let answer = self.call_as(session, By { who: &who, noted, absent: None }, call);
                match answer {
                    // The earlier run may have done it all the same: it stays begun, and fails once others have changed its names.
                    Answer::Fault(why) if !is_shown => return Err(why),
                    answer => {
                        // No other change of an earlier run is ended meanwhile. A truncation changes none, and would hide itself if
                        // it has to be ended once more.
                        if !cuts {
                            self.meta.changes.touch(|| names);
                        }
                        answer
                    }
                }
            }
        };
        drop(UnderWay { service: self, who, known: Known::of(&answer), noted, cuts });
        self.meta.changes.ended();
        Ok(answer)
    }

    /// Ends an exchange that an earlier run had begun.
    fn finish_exchange(&self, session: SessionId, who: Who, call: MetaCall, begun: Begun) -> Outcome<Answer> {
        let MetaCall::Exchange { from, to } = &call else {
            return Err(fault(Errno::INVAL, "an exchange of names had this number before"));
        };
        // Not by the attributes of files, which only data servers may know.
        let is_at = |path: &[u8]| {
            let stat = self.meta.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)?.stat());
            match stat {
                Ok(stat) => Ok(stat.st_ino == begun.node),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Ok(false),
                Err(errno) => Err(errno).explain("look where an exchange of names left", path),
            }
        };
        let (is_at_first, is_at_second) = (is_at(from)?, is_at(to)?);
        self.meta.changes.check_hidden(begun, &[from.clone(), to.clone()])?;
        match (is_at_first, is_at_second) {
            (false, true) => {
                UnderWay::end(self, who, Known::of(&Answer::Done));
                self.meta.changes.ended();
                Ok(Answer::Done)
            }
            (true, false) => {
                self.meta.changes.touch(|| self.names_of(session, &call));
                let noted = Cell::new(None);
                let answer = self.call_as(session, By { who: &who, noted: Some(&noted), absent: None }, call);
                UnderWay::end(self, who, Known::of(&answer));
                self.meta.changes.ended();
                Ok(answer)
            }
            _ => Err(fault(
                Errno::IO,
                "the metadata server was restarted during this exchange of names, and others changed them since; look",
            )),
        }
    }
}

impl Meta {
    /// Makes what a truncation has cut durable. Gives the file, and what its client has to compare with at its next sync: nothing if
    /// the states of its data servers are those of this digest, and what differs from every state otherwise.
    fn states_since(&self, session: SessionId, target: &Target, before: u64) -> Outcome<(FileKey, Vec<LaneState>)> {
        let doing = "sync what was cut of";
        let session = self.sessions.get(session)?;
        let (pin, path) = match target {
            Target::Handle(handle) => (self.pin_handle(&session, *handle)?, Vec::new()),
            Target::Path(path) => {
                let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)).explain(doing, path)?;
                (self.pin_at(&entry, doing)?, path.clone())
            }
        };
        let now = self.note_answer(&pin, self.objects.sync(pin.key, &pin.layout));
        let mut lanes = now.map_err(|error| data_fault(&error, doing, &path))?;
        if digest(&lanes) == before {
            return Ok((pin.key, Vec::new()));
        }
        lanes.iter_mut().for_each(|lane| *lane = LaneState::unknown(lane.server));
        Ok((pin.key, lanes))
    }
}

/// Whether a change may cut a file: then it is noted when it has.
fn may_cut(call: &MetaCall) -> bool {
    matches!(call, MetaCall::SetAttr { .. } | MetaCall::CutBack { .. })
}

/// Whether the name space, or a note, shows that a change was done. What makes a name or takes what is there, or sets what may be
/// so already, is not to be seen.
fn shows(call: &MetaCall) -> bool {
    match call {
        MetaCall::Create { exclusive, .. } => *exclusive,
        MetaCall::SetAttr { set, .. } => set.size.is_some(),
        MetaCall::SetXattr { name, .. } => !is_acl(name),
        _ => true,
    }
}

/// The name whose node shows whether a change was done: that which it takes away, or gives.
fn deciding_name(call: &MetaCall) -> Option<&[u8]> {
    match call {
        MetaCall::Create { path, exclusive: true, .. }
        | MetaCall::Mkdir { path, .. }
        | MetaCall::Symlink { path, .. }
        | MetaCall::Mknod { path, .. }
        | MetaCall::Unlink { path }
        | MetaCall::Rmdir { path }
        | MetaCall::Rename { from: path, .. }
        | MetaCall::Link { to: path, .. } => Some(path),
        _ => None,
    }
}

/// Of a change that was done and whose answer fails so: the change must not seem not to have been done.
fn untold(why: Fault) -> Fault {
    match why.errno {
        libc::EBUSY => why,
        _ => fault(Errno::IO, format!("this was done, and what it made cannot be told again: {}", why.message)),
    }
}

/// True for calls that are of no harm whenever they come.
fn only_looks(call: &MetaCall) -> bool {
    matches!(
        call,
        MetaCall::GetAttr { .. }
            | MetaCall::Readlink { .. }
            | MetaCall::Readdir { .. }
            | MetaCall::GetXattr { .. }
            | MetaCall::ListXattr { .. }
            | MetaCall::Statfs
    )
}
