//! Changes of names are done once for each of their numbers, as long as this node runs.
//!
//! What was done through another node, or before a restart, is not known here. A change of which a copy may have been done
//! there is done unless the folder shows that it was: made names are there, removed ones are gone. That is right as long as
//! no other call makes or removes the same name meanwhile.

use impresario_backend::Handle;
use impresario_base::lock::Mutex;
use impresario_node::session::{Admission, Replies, Stamp};
use impresario_wire::{Answer, ClientKey, Fault, MetaCall, Target, Who};

use super::{Tree, TreeSession};

/// Clients and changes that are remembered at least.
const CLIENTS_MAX: usize = 16 << 10;
const REPLIES_MAX: usize = 16 << 10;

type Outcome = Result<Answer, Fault>;

/// What is known of a change that was done.
#[derive(Clone)]
enum Done {
    Answered(Answer),
    /// It opened this file.
    Opened(Handle),
}

/// The changes that were done lately.
pub(super) struct Once(Mutex<Replies<Done>>);

impl Default for Once {
    fn default() -> Once {
        Once(Mutex::new(Replies::new(CLIENTS_MAX, REPLIES_MAX)))
    }
}

/// Ends a change however its service ends.
struct UnderWay<'a> {
    once: &'a Once,
    who: Who,
    done: Option<Done>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.once.0.lock().end(self.who.client.0, self.who.sequence, self.done.take());
    }
}

impl Tree {
    /// Answers a metadata call: a change once, whatever copies of it come.
    pub(super) fn answer(&self, session: &TreeSession, who: Who, call: MetaCall) -> Outcome {
        if who.client == ClientKey::default() {
            return self.serve(session, call);
        }
        let current = self.once.0.lock().note(who.client.0, who.epoch);
        if !call.is_change() {
            let looks = matches!(
                call,
                MetaCall::GetAttr { .. }
                    | MetaCall::Readlink { .. }
                    | MetaCall::Readdir { .. }
                    | MetaCall::GetXattr { .. }
                    | MetaCall::ListXattr { .. }
                    | MetaCall::Statfs
            );
            return if current || looks { self.serve(session, call) } else { Err(fenced(who)) };
        }
        let stamp = Stamp { client: who.client.0, epoch: who.epoch, since: who.since, sequence: who.sequence };
        let admission = self.once.0.lock().begin(stamp);
        match admission {
            Admission::New => self.change(session, who, call),
            Admission::Done(Done::Answered(answer)) => Ok(answer),
            Admission::Done(Done::Opened(handle)) => self.open(session, handle).map(Answer::Opened),
            Admission::Busy => Err(Fault {
                errno: libc::EBUSY,
                message: "an earlier copy of this change, or one given up before it, is being served".into(),
            }),
            Admission::Fenced => Err(fenced(who)),
            Admission::Forgotten => Err(Fault {
                errno: libc::EIO,
                message: "a copy of this change may have been done before, too long ago to know; look".into(),
            }),
        }
    }

    fn change(&self, session: &TreeSession, who: Who, call: MetaCall) -> Outcome {
        let mut under_way = UnderWay { once: &self.once, who, done: None };
        if who.is_copy() && matches!(call, MetaCall::Exchange { .. }) {
            // Done a second time, it would be undone.
            return Err(Fault {
                errno: libc::EIO,
                message: "another I/O node may have done this exchange of names; look".into(),
            });
        }
        let answer = match self.serve(session, call.clone()) {
            // Another node may have done it.
            Err(fault) if who.is_copy() => self.unless_done(session, call, fault),
            answer => answer,
        };
        under_way.done = match &answer {
            Err(_) => None,
            Ok(Answer::Opened(opened)) => session.opened(opened.handle).ok().map(|file| Done::Opened(file.handle)),
            Ok(answer) => Some(Done::Answered(answer.clone())),
        };
        answer
    }

    /// What says that the change was done before; else the fault.
    fn unless_done(&self, session: &TreeSession, call: MetaCall, fault: Fault) -> Outcome {
        let look = |path: &[u8]| self.serve(session, MetaCall::GetAttr { target: Target::Path(path.into()) });
        match (fault.errno, call) {
            (libc::ENOENT, MetaCall::Unlink { .. } | MetaCall::Rmdir { .. }) => Ok(Answer::Done),
            (libc::ENOENT, MetaCall::Rename { to, .. }) if look(&to).is_ok() => Ok(Answer::Done),
            (libc::EEXIST, MetaCall::Create { path, .. }) => {
                self.serve(session, MetaCall::Open { path, write: true }).map_err(|_| fault)
            }
            (libc::EEXIST, MetaCall::Link { from, to }) => match (look(&from), look(&to)) {
                (Ok(Answer::Attr(from)), Ok(Answer::Attr(to))) if from.ino == to.ino => Ok(Answer::Attr(to)),
                _ => Err(fault),
            },
            (
                libc::EEXIST,
                MetaCall::Mkdir { path, .. } | MetaCall::Symlink { path, .. } | MetaCall::Mknod { path, .. },
            ) => look(&path).map_err(|_| fault),
            _ => Err(fault),
        }
    }
}

fn fenced(who: Who) -> Fault {
    let epoch = who.epoch;
    let message = format!("a call of epoch {epoch} came after the client had begun a newer one; it was not done");
    Fault { errno: Fault::FENCED, message }
}
