//! The metadata server on the network: a connection is a session, and its end closes what it had open.

use std::sync::Arc;

use impresario_wire::{Answer, Call, Fault};

use crate::connection::{Connection, Reply};
use crate::failures::Failures;
use crate::listener::{Incoming, Service, Vitals};
use crate::meta::{Answered, MetaService, SessionId, Stores, is_local};
use crate::workers::{PATIENCE, Workers};

/// Threads for calls that may wait for a disk or for data servers.
const THREADS: usize = 16;

/// The metadata server's service.
pub struct MetaFront {
    vitals: Vitals,
    meta: Arc<MetaService>,
    stores: Arc<Stores>,
    answered: Arc<Answered>,
    threads: Workers,
}

impl MetaFront {
    pub(crate) fn new(
        vitals: Vitals,
        meta: MetaService,
        stores: Arc<Stores>,
        answered: Arc<Answered>,
    ) -> Arc<MetaFront> {
        let threads = Workers::new("metadata", THREADS);
        Arc::new(MetaFront { vitals, meta: Arc::new(meta), stores, answered, threads })
    }

    pub(crate) fn stop(&self) {
        self.answered.stop();
        self.threads.stop(PATIENCE);
    }
}

impl Service for MetaFront {
    type Session = SessionId;

    fn open(&self, connection: &Arc<Connection>) -> Result<SessionId, Fault> {
        let session = self.meta.open_session(connection.who())?;
        connection.restriction().map_or(Ok(()), |restriction| self.meta.restrict(session, restriction))?;
        Ok(session)
    }

    fn serve(&self, session: &mut SessionId, request: Incoming, reply: Reply) {
        let session = *session;
        match request.call {
            Call::Meta { who, call } => {
                let absent = self.meta.absent(&who, &call);
                let is_at_once = absent.is_some() || !self.meta.may_wait(session, &who, &call);
                let (meta, vitals) = (self.meta.clone(), self.vitals.clone());
                let answer = move |absent| {
                    let answer = meta.call_at(session, who, call, absent);
                    if let Answer::Fault(fault) = &answer
                        && Failures::has_kind(fault.errno)
                        && is_local(fault)
                    {
                        vitals.failures().note(fault.errno, &fault.message);
                    }
                    reply.send(&answer);
                };
                if is_at_once {
                    return answer(absent);
                }
                self.threads.run(Box::new(move || answer(None)));
            }
            Call::Status => reply.send(&Answer::Text(self.status().to_string())),
            _ => reply.fault(libc::EOPNOTSUPP, "the metadata server does not support this call"),
        }
    }

    fn close(&self, session: SessionId) {
        self.meta.close_session(session);
    }

    fn status(&self) -> serde_json::Value {
        let mut status = self.vitals.status();
        status.insert("meta".into(), self.meta.status());
        let number = |(name, number): (String, u64)| (name, format!("{number:016x}").into());
        let stores: serde_json::Map<_, _> = self.stores.known().into_iter().map(number).collect();
        status.insert("stores".into(), stores.into());
        status.insert("key_prefix".into(), format!("{:06x}", self.meta.key_prefix()).into());
        serde_json::Value::Object(status)
    }
}
