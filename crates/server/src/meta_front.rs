//! The metadata server on the network: a connection is a session, and its end closes what it had open.

use std::sync::Arc;
use std::time::Duration;

use impresario_sched::{ConnId, PolicySpec};
use impresario_wire::{Answer, Call, Fault};

use crate::connection::{Connection, Reply};
use crate::failures::Failures;
use crate::listener::{Incoming, Service, Vitals};
use crate::meta::{Absent, Answered, MetaService, SessionId, Stores, answer_bytes_max, is_local};
use crate::name_limits::{NameCall, NameLimits, ServesNames, Withheld};
use crate::withheld::GivenUp;
use crate::workers::{PATIENCE, Workers};

/// Threads for calls that may wait for a disk or for data servers.
const THREADS: usize = 16;

/// The metadata server's service.
pub struct MetaFront {
    names: Arc<Names>,
    stores: Arc<Stores>,
    answered: Arc<Answered>,
    limits: NameLimits<Names>,
}

/// What answers metadata calls.
struct Names {
    vitals: Vitals,
    meta: Arc<MetaService>,
    threads: Workers,
}

/// A connection.
pub struct Session {
    id: SessionId,
    conn: ConnId,
    withheld: Withheld,
}

impl MetaFront {
    pub(crate) fn new(
        vitals: Vitals,
        meta: MetaService,
        stores: Arc<Stores>,
        answered: Arc<Answered>,
        (policy, timeout): (&PolicySpec, Duration),
    ) -> Result<Arc<MetaFront>, String> {
        let threads = Workers::new("metadata", THREADS);
        let names = Arc::new(Names { vitals, meta: Arc::new(meta), threads });
        let limits = NameLimits::new(names.clone(), policy, timeout)?;
        Ok(Arc::new(MetaFront { names, stores, answered, limits }))
    }

    pub(crate) fn stop(&self) {
        self.limits.stop();
        self.answered.stop();
        self.names.threads.stop(PATIENCE);
    }
}

impl ServesNames for Names {
    type Session = SessionId;

    fn serve_here(&self, call: NameCall<SessionId>) {
        let absent = self.meta.absent(&call.who, &call.call);
        if absent.is_some() || !self.meta.may_wait(call.session, &call.who, &call.call) {
            return answer(&self.meta, &self.vitals, call, absent);
        }
        self.serve_elsewhere(call);
    }

    fn serve_elsewhere(&self, call: NameCall<SessionId>) {
        let (meta, vitals) = (self.meta.clone(), self.vitals.clone());
        self.threads.run(Box::new(move || answer(&meta, &vitals, call, None)));
    }
}

/// `absent`: where a file that the call makes is known to be missing.
fn answer(meta: &MetaService, vitals: &Vitals, call: NameCall<SessionId>, absent: Option<Absent>) {
    let NameCall { session, who, call, reply } = call;
    let answer = meta.call_at(session, who, call, absent);
    if let Answer::Fault(fault) = &answer
        && Failures::has_kind(fault.errno)
        && is_local(fault)
    {
        vitals.failures().note(fault.errno, &fault.message);
    }
    reply.send(&answer);
}

impl Service for MetaFront {
    type Session = Session;

    fn open(&self, connection: &Arc<Connection>) -> Result<Session, Fault> {
        let meta = &self.names.meta;
        let id = meta.open_session(connection.who())?;
        connection.restriction().map_or(Ok(()), |restriction| meta.restrict(id, restriction))?;
        Ok(Session { id, conn: connection.id(), withheld: Withheld::default() })
    }

    fn serve(&self, session: &mut Session, request: Incoming, reply: Reply) {
        match request.call {
            Call::Meta { who, call } => {
                let op = self.limits.concern(&call);
                let call = NameCall { session: session.id, who, call, reply };
                match op {
                    None => self.names.serve_here(call),
                    Some(op) => self.limits.take(op, session.conn, &session.withheld, call),
                }
            }
            Call::SetPolicy { name, params, at_shared_ns } => {
                let spec = PolicySpec { name, params: params.into_iter().collect() };
                self.limits.set_policy(&spec, at_shared_ns, reply);
            }
            Call::GiveUp { calls } => {
                self.limits.give_up(&GivenUp { conn: session.conn, calls });
                reply.send(&Answer::Done);
            }
            call @ Call::Explain { .. } => self.limits.explain(&call, reply),
            Call::Status => reply.send(&Answer::Text(self.status().to_string())),
            _ => reply.fault(libc::EOPNOTSUPP, "the metadata server does not support this call"),
        }
    }

    fn body_bytes_max(&self, call: &Call) -> u64 {
        match call {
            // One that may wait for a limit holds no memory meanwhile, which others need.
            Call::Meta { call, .. } if self.limits.concern(call).is_none() => answer_bytes_max(call),
            _ => 0,
        }
    }

    fn close(&self, session: Session) {
        self.limits.forget(session.conn);
        self.names.meta.close_session(session.id);
    }

    fn status(&self) -> serde_json::Value {
        let Names { vitals, meta, .. } = &*self.names;
        let mut status = vitals.status();
        status.insert("meta".into(), meta.status());
        self.limits.describe(&mut status);
        let number = |(name, number): (String, u64)| (name, format!("{number:016x}").into());
        let stores: serde_json::Map<_, _> = self.stores.known().into_iter().map(number).collect();
        status.insert("stores".into(), stores.into());
        status.insert("key_prefix".into(), format!("{:06x}", meta.key_prefix()).into());
        serde_json::Value::Object(status)
    }
}
