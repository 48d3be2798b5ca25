//! What the engine's lock guards: the core, and of each outstanding request its context and its identities.

use std::sync::Arc;

use impresario_base::slab::extend;
use impresario_sched::{
    Batch, ClientId, Core, Extent, FileId, JobId, Nanos, Observer, PolicySpec, Request, RequestId, UserId,
};

use crate::clock::SharedTime;
use crate::interface::{Executor, Refused, Submission};
use crate::intern::Interner;

/// The interned identities of an outstanding request.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub(crate) file: u32,
    pub(crate) client: u32,
    pub(crate) job: u32,
    pub(crate) user: u32,
}

pub(crate) struct Held<T> {
    pub(crate) context: T,
    pub(crate) names: Names,
}

pub(crate) struct State<T> {
    pub(crate) core: Core,
    /// Indexed by the slot in the request's identity.
    pub(crate) held: Vec<Option<Held<T>>>,
    pub(crate) files: Interner,
    pub(crate) clients: Interner,
    pub(crate) jobs: Interner,
    pub(crate) users: Interner,
    pub(crate) spare: Vec<Vec<Names>>,
    pub(crate) in_flight: usize,
    /// Threads waiting for room.
    pub(crate) waiting: usize,
    pub(crate) closed: bool,
    /// When the timer wakes; `Nanos::MAX`: never.
    pub(crate) alarm: Nanos,
    /// A pumping thread left work to the timer.
    pub(crate) handed_over: bool,
    pub(crate) shared_time: SharedTime,
    /// When the next pump reads the clocks again and checks the planned change.
    pub(crate) clock_due: Nanos,
    /// A planned change of policy and its instant in shared time, nanoseconds since 1970.
    pub(crate) planned: Option<(PolicySpec, i64)>,
    /// Receives requests that end.
    pub(crate) observer: Option<Arc<dyn Observer>>,
}

impl<T: Send + 'static> State<T> {
    pub(crate) fn intern(&mut self, s: &Submission) -> Names {
        let n = Names {
            file: self.files.take(s.file),
            client: self.clients.take(s.client),
            job: self.jobs.take(s.job),
            user: self.users.take(u64::from(s.user)),
        };
        let keys = self.core.names_mut();
        keys.name_file(FileId(n.file), s.file);
        keys.name_client(ClientId(n.client), s.client);
        keys.name_job(JobId(n.job), s.job);
        keys.name_user(UserId(n.user), u64::from(s.user));
        n
    }

    /// Queues a request with its context.
    pub(crate) fn take_in(&mut self, at: Nanos, submission: &Submission, context: T) -> Result<RequestId, Refused<T>> {
        if self.closed {
            return Err(Refused::Closed(context));
        }
        let (names, request) = self.request(at, submission);
        let taken = match submission.speculative {
            true => self.core.speculate(&request),
            false => self.core.push(at, &request).ok(),
        };
        let Some(id) = taken else {
            self.release(names);
            return Err(Refused::Busy(context));
        };
        self.hold(id, Held { context, names });
        Ok(id)
    }

    /// Queues speculations with their contexts; hands back those that are not accepted.
    pub(crate) fn take_in_ahead(
        &mut self,
        at: Nanos,
        ahead: impl IntoIterator<Item = (Submission, T)>,
        executor: &dyn Executor<T>,
    ) {
        for (speculation, context) in ahead {
            if let Err(refused) = self.take_in(at, &speculation, context) {
                executor.given_up(refused.context());
            }
        }
    }

    /// A request as the core knows it, with its identities.
    pub(crate) fn request(&mut self, arrival: Nanos, submission: &Submission) -> (Names, Request) {
        let names = self.intern(submission);
        let request = Request {
            id: RequestId(0),
            extent: Extent {
                file: FileId(names.file),
                lane: submission.lane,
                file_offset: submission.file_offset,
                lane_offset: submission.lane_offset,
                len: submission.len,
            },
            arrival,
            client: ClientId(names.client),
            conn: submission.conn,
            job: JobId(names.job),
            user: UserId(names.user),
            op: submission.op,
            naming: submission.naming,
        };
        (names, request)
    }

    /// Keeps what belongs to a request that the core has.
    pub(crate) fn hold(&mut self, id: RequestId, held: Held<T>) {
        let slot = id.0 as u32 as usize;
        if self.held.len() <= slot {
            extend(&mut self.held, slot + 1, || None);
        }
        self.held[slot] = Some(held);
    }

    /// Reports ended requests to the observer, if there is one.
    pub(crate) fn tell_ended(&mut self) {
        if let Some(observer) = &self.observer {
            self.core.take_ended().for_each(|request| observer.ended(&request));
        }
    }

    /// Adds a reference to each.
    pub(crate) fn again(&mut self, n: Names) {
        self.files.again(n.file);
        self.clients.again(n.client);
        self.jobs.again(n.job);
        self.users.again(n.user);
    }

    pub(crate) fn release(&mut self, n: Names) {
        self.files.release(n.file);
        self.clients.release(n.client);
        self.jobs.release(n.job);
        self.users.release(n.user);
    }

    /// Hands back the contexts of dropped speculations.
    pub(crate) fn forget_given_up(&mut self, executor: &dyn Executor<T>) {
        while let Some(id) = self.core.take_given_up() {
            if let Some(held) = self.take_held(id) {
                self.release(held.names);
                executor.given_up(held.context);
            }
        }
    }

    pub(crate) fn take_held(&mut self, id: RequestId) -> Option<Held<T>> {
        self.held.get_mut(id.0 as u32 as usize)?.take()
    }

    /// Collects the contexts of a dispatched batch. Every part was submitted with a context.
    pub(crate) fn gather(&mut self, batch: &Batch, executor: &dyn Executor<T>) -> (Vec<(Request, T)>, Vec<Names>) {
        let mut names = self.spare.pop().unwrap_or_default();
        let mut parts = Vec::with_capacity(batch.parts.len());
        for part in &batch.parts {
            let Some(mut request) = self.core.request(part.id) else { continue };
            let (whole, last) = (request.extent.len, part.from.saturating_add(part.len) >= request.extent.len);
            if part.len == whole {
                let Some(held) = self.take_held(part.id) else { continue };
                names.push(held.names);
                parts.push((request, held.context));
                continue;
            }
            let Some(held) = self.held.get_mut(part.id.0 as u32 as usize).and_then(Option::as_mut) else { continue };
            let piece = executor.piece(&mut held.context, part.from, part.len, last);
            let of = held.names;
            if last {
                self.take_held(part.id);
            } else {
                self.again(of);
            }
            names.push(of);
            request.extent.advance(part.from);
            request.extent.len = part.len;
            parts.push((request, piece));
        }
        debug_assert_eq!(parts.len(), batch.parts.len());
        (parts, names)
    }
}
