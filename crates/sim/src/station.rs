//! A core with its driver's state: who waits for each request, how much of it was dispatched, which connections can
//! take data, and the byte accounts.

use std::sync::Arc;

use impresario_base::prefetch::fetch;
use impresario_foresight::PredictedQueues;
use impresario_node::Readiness;
use impresario_sched::laws::Laws;
use impresario_sched::{
    Batch, ConnId, Core, CoreConfig, Ended, Event, Members, Nanos, Next, Part, PolicyError, PolicySpec, Request,
    RequestId, policy,
};
use rustc_hash::FxHashMap;

use impresario_base::slab::Key;

/// What waits for a request of a core.
#[derive(Clone, Copy)]
pub(crate) struct Waiter {
    /// The call; stale if its sender gave it up.
    pub(crate) call: Key,
    pub(crate) process: u32,
    pub(crate) conn: u32,
    pub(crate) arrived: u64,
    /// A speculation, for which nothing waits.
    ahead: bool,
    /// Bytes not yet given to the device, and bytes not yet completed.
    pub(crate) undispatched: u64,
    pub(crate) undelivered: u64,
}

/// Byte totals of a core.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Books {
    pub(crate) accepted: u64,
    pub(crate) dispatched: u64,
    pub(crate) cancelled: u64,
    pub(crate) lost: u64,
    /// Requests.
    pub(crate) requests: u64,
}

/// Replies in flight to a connection.
#[derive(Clone, Copy)]
struct Outbound {
    bytes: u64,
    rule: Readiness,
}

pub(crate) struct Station {
    pub(crate) core: Core,
    config: CoreConfig,
    spec: PolicySpec,
    clock_offset_ns: i64,
    /// By slot of the core.
    waiters: Vec<Waiter>,
    /// When the core must be asked again, if that is scheduled.
    pub(crate) alarm: u64,
    /// Queued requests as last reported to the recorder.
    pub(crate) queued: u32,
    pub(crate) books: Books,
    pub(crate) wait_max: u64,
    /// Incremented when the node loses its memory.
    pub(crate) incarnation: u32,
    /// Its policy checks whether connections can take data.
    pub(crate) minds_connections: bool,
    outbound: FxHashMap<u32, Outbound>,
    laws: Option<Box<Laws>>,
    /// The prediction from earlier runs.
    foretold: Option<Arc<PredictedQueues>>,
    /// Completed requests, if recording.
    recorded: Option<Vec<Ended>>,
}

/// The decision of a core.
pub(crate) enum Decision {
    /// The requests to serve, if any, and the speculation that goes along or alone.
    Batch(Batch, Option<Part>),
    /// Nothing; ask again then.
    Wait(u64),
}

impl Station {
    pub(crate) fn new(
        config: CoreConfig,
        spec: &PolicySpec,
        clock_offset_ns: i64,
        checked: bool,
    ) -> Result<Station, PolicyError> {
        let mut core = Core::new(config.clone(), spec)?;
        if clock_offset_ns != 0 {
            core.event(Nanos::ZERO, Event::SharedClock { offset_ns: clock_offset_ns });
        }
        let laws = checked.then(|| Box::new(Laws::new(&config, &core)));
        Ok(Station {
            core,
            config,
            spec: spec.clone(),
            clock_offset_ns,
            waiters: Vec::new(),
            alarm: u64::MAX,
            queued: 0,
            books: Books::default(),
            wait_max: 0,
            incarnation: 0,
            minds_connections: policy::minds_connections(spec),
            outbound: FxHashMap::default(),
            laws,
            foretold: None,
            recorded: None,
        })
    }

    /// The node loses its memory; the totals are kept.
    pub(crate) fn restart(&mut self, now: u64) -> Result<(), PolicyError> {
        let checked = self.laws.is_some();
        self.config.started = Nanos(now);
        let fresh = Station::new(self.config.clone(), &self.spec, self.clock_offset_ns, checked)?;
        let old = std::mem::replace(self, fresh);
        self.foresee(old.foretold);
        if let Some(recorded) = old.recorded {
            self.core.watch(true);
            self.recorded = Some(recorded);
        }
        self.books = old.books;
        self.books.lost += old.books.accepted - old.books.dispatched - old.books.cancelled - old.books.lost;
        self.wait_max = old.wait_max;
        self.incarnation = old.incarnation + 1;
        self.queued = old.queued; // until the recorder is updated
        Ok(())
    }

    /// Sets the prediction from earlier runs.
    pub(crate) fn foresee(&mut self, foretold: Option<Arc<PredictedQueues>>) {
        self.core.foresee(foretold.clone());
        self.foretold = foretold;
    }

    /// Starts recording completed requests.
    pub(crate) fn record(&mut self) {
        self.core.watch(true);
        self.recorded = Some(Vec::new());
    }

    /// The recorded requests.
    pub(crate) fn take_recorded(&mut self) -> Vec<Ended> {
        self.recorded.take().unwrap_or_default()
    }

    /// Accepts a request; false if the core is full.
    pub(crate) fn push(&mut self, now: u64, request: &Request, call: Key, process: u32) -> bool {
        let Ok(id) = self.core.push(Nanos(now), request) else { return false };
        // A barrier moves nothing.
        let len = if request.op.is_data() { request.extent.len } else { 0 };
        let conn = request.conn.0;
        let waiter = Waiter { call, process, conn, arrived: now, ahead: false, undispatched: len, undelivered: len };
        self.remember(id, waiter);
        self.books.accepted += len;
        self.books.requests += 1;
        if let Some(laws) = &mut self.laws {
            laws.pushed(now, &self.core, id, request);
        }
        self.forget_given_up(now);
        true
    }

    /// Offers a speculation to the core.
    pub(crate) fn speculate(&mut self, now: u64, request: &Request) {
        let Some(id) = self.core.speculate(request) else { return };
        let (conn, process) = (request.conn.0, request.client.0);
        let waiter =
            Waiter { call: Key::NONE, process, conn, arrived: now, ahead: true, undispatched: 0, undelivered: 0 };
        self.remember(id, waiter);
        if let Some(laws) = &mut self.laws {
            laws.speculated(now, id, request);
        }
    }

    fn remember(&mut self, id: RequestId, waiter: Waiter) {
        let slot = id.0 as u32 as usize;
        if slot < self.waiters.len() {
            self.waiters[slot] = waiter;
        } else {
            debug_assert_eq!(slot, self.waiters.len());
            self.waiters.push(waiter);
        }
    }

    /// Removes the waiters of dropped speculations.
    fn forget_given_up(&mut self, now: u64) {
        while let Some(id) = self.core.take_given_up() {
            if let Some(laws) = &mut self.laws {
                laws.given_up(now, id);
            }
        }
    }

    /// Asks the core for the next batch.
    pub(crate) fn next(&mut self, now: u64) -> Decision {
        let said = self.core.next(Nanos(now));
        if let Some(laws) = &mut self.laws {
            laws.decided(now, &self.core, &said);
        }
        self.forget_given_up(now);
        match said {
            Next::Dispatch(mut batch) => {
                let ahead = batch.parts.last().copied();
                let ahead = ahead.filter(|part| self.waiters[part.id.0 as u32 as usize].ahead);
                if let Some(part) = ahead {
                    batch.parts.pop();
                    batch.extent.len -= part.len;
                }
                for part in &batch.parts {
                    let waiter = &mut self.waiters[part.id.0 as u32 as usize];
                    let len = if batch.op.is_data() { part.len } else { 0 };
                    waiter.undispatched -= len;
                    self.wait_max = self.wait_max.max(now - waiter.arrived);
                    self.books.dispatched += len;
                }
                Decision::Batch(batch, ahead)
            }
            Next::Wait { until, .. } => Decision::Wait(until.0),
        }
    }

    /// The present by the clock that the nodes share, as far as this one's agrees.
    pub(crate) fn shared_time(&self, now: u64) -> Nanos {
        Nanos(now.saturating_add_signed(self.clock_offset_ns))
    }

    /// Other nodes or lanes are there from an instant of shared time on.
    pub(crate) fn members(&mut self, now: u64, members: Members) {
        let from = members.from_shared.0.saturating_add_signed(-self.clock_offset_ns);
        self.core.event(Nanos(now), Event::Members(members));
        if let Some(laws) = &mut self.laws {
            laws.members(now, from);
        }
    }

    /// The waiter of a request in flight.
    pub(crate) fn waiter(&mut self, id: RequestId) -> &mut Waiter {
        &mut self.waiters[id.0 as u32 as usize]
    }

    /// Prefetches a request.
    pub(crate) fn fetch(&self, id: RequestId) {
        self.waiters.get(id.0 as u32 as usize).inspect(|waiter| fetch(*waiter));
        self.core.fetch(id);
    }

    /// The call that a request in flight is part of.
    pub(crate) fn call(&self, id: RequestId) -> Option<Key> {
        self.waiters.get(id.0 as u32 as usize).map(|waiter| waiter.call)
    }

    /// Reports a completion to the core.
    pub(crate) fn completed(&mut self, now: u64, completion: impresario_sched::Completion) {
        self.core.event(Nanos(now), Event::Completed(completion));
        if let Some(recorded) = &mut self.recorded {
            recorded.extend(self.core.take_ended());
        }
        if let Some(laws) = &mut self.laws {
            laws.completed(now, completion.batch);
        }
    }

    /// The peer of a connection is gone: cancels its queued requests and returns them.
    pub(crate) fn cancel_connection(&mut self, now: u64, conn: u32) -> Vec<RequestId> {
        let ids = self.core.cancel_connection(Nanos(now), ConnId(conn));
        for id in &ids {
            let waiter = &mut self.waiters[id.0 as u32 as usize];
            let left = std::mem::take(&mut waiter.undispatched);
            waiter.undelivered -= left;
            self.books.cancelled += left;
        }
        self.outbound.remove(&conn);
        if let Some(laws) = &mut self.laws {
            laws.disconnected(now, conn, &ids);
        }
        ids
    }

    /// More bytes of replies are in flight to a connection.
    pub(crate) fn sending(&mut self, now: u64, conn: u32, bytes: u64, socket_bytes: u64) {
        let out = self.outbound.entry(conn).or_insert(Outbound { bytes: 0, rule: Readiness::default() });
        out.bytes += bytes;
        if let Some(ready) = out.rule.observe(out.bytes, socket_bytes) {
            self.report_readiness(now, conn, ready);
        }
    }

    /// Some of them have arrived or are lost; true if the connection can take data again.
    pub(crate) fn sent(&mut self, now: u64, conn: u32, bytes: u64, socket_bytes: u64) -> bool {
        let Some(out) = self.outbound.get_mut(&conn) else { return false };
        out.bytes = out.bytes.saturating_sub(bytes);
        let again = out.rule.observe(out.bytes, socket_bytes).is_some();
        if out.bytes == 0 {
            self.outbound.remove(&conn);
        }
        if again {
            self.report_readiness(now, conn, true);
        }
        again
    }

    fn report_readiness(&mut self, now: u64, conn: u32, ready: bool) {
        self.core.event(Nanos(now), Event::Ready { connection: ConnId(conn), ready });
        if let Some(laws) = &mut self.laws {
            laws.readiness(now, conn, ready);
        }
    }

    /// The violations of the laws.
    pub(crate) fn violations(&mut self) -> Vec<String> {
        self.laws.as_mut().map(|l| l.take_violations()).unwrap_or_default()
    }

    /// Checks that every accepted byte was accounted for and nothing is left; the error says what is not.
    pub(crate) fn balance(&self) -> Result<(), String> {
        let status = self.core.status();
        let left = (status.queued, status.blocked, status.in_flight_batches);
        if left != (0, 0, 0) || !self.core.is_empty() {
            let (queued, blocked, in_flight) = left;
            return Err(format!(
                "{queued} requests queued, {blocked} blocked and {in_flight} batches in flight are left"
            ));
        }
        if self.laws.as_ref().is_some_and(|laws| !laws.is_empty()) {
            return Err("law 1: requests that were accepted never ended".into());
        }
        let Books { accepted, dispatched, cancelled, lost, .. } = self.books;
        if accepted != dispatched + cancelled + lost {
            return Err(format!(
                "{accepted} bytes accepted are not the {dispatched} dispatched, {cancelled} cancelled and {lost} lost"
            ));
        }
        Ok(())
    }
}
