//! Completed requests for traces: each reported once, with the stable keys of its identities and its completion.

use rustc_hash::FxHashMap;

use crate::contract::Completion;
use crate::names::Names;
use crate::table::{Slot, Table};
use crate::types::{Extent, LaneId, Nanos, Op};

/// A completed request. Identities are stable keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// When it reached the scheduler.
    pub arrival: Nanos,
    /// When the device had finished all of it.
    pub finished: Nanos,
    /// File.
    pub file: u64,
    /// Client.
    pub client: u64,
    /// Application.
    pub job: u64,
    /// First byte in the lane's space.
    pub offset: u64,
    /// Bytes asked for; `u64::MAX` on a barrier means "to the end".
    pub len: u64,
    /// Bytes moved; 0 for barriers.
    pub moved_bytes: u64,
    /// User.
    pub user: u32,
    /// 0, or the errno of the first part that failed.
    pub errno: i32,
    /// Lane.
    pub lane: LaneId,
    /// Operation.
    pub op: Op,
}

/// Receives every completed request. The driver may hold a lock: an observer must neither block nor call back.
pub trait Observer: Send + Sync {
    /// A request completed.
    fn ended(&self, request: &Ended);
}

/// Collects completed requests until the driver takes them.
#[derive(Default)]
pub(crate) struct Watch {
    pub ended: Vec<Ended>,
    /// Bytes moved and first errno of requests served in pieces; few.
    pieced: FxHashMap<Slot, (u64, i32)>,
    /// The same for the parts of the last completed batch.
    parts: Vec<(u64, i32)>,
}

impl Watch {
    /// Records a completed batch, and with it one part of each of its requests; `pieced` says which have other parts.
    ///
    /// Drivers count bytes from the start of the batch or, if parts overlap or leave holes, the sum over all parts: a
    /// batch that moved as many bytes as either is complete.
    pub fn batch(
        &mut self,
        table: &Table,
        slots: &[Slot],
        batch: (&Extent, &Completion),
        pieced: impl Fn(Slot) -> bool,
    ) {
        let (extent, completion) = batch;
        let asked: u64 = slots.iter().map(|slot| table.len_bytes(*slot)).fold(0, u64::saturating_add);
        let all = completion.bytes_done >= asked.min(extent.len);
        let done_to = extent.lane_offset.saturating_add(completion.bytes_done);
        self.parts.clear();
        for &slot in slots {
            let moved = match (table.op(slot).is_data(), slots.len()) {
                (false, _) => 0,
                // For a request served in pieces the table holds only the rest.
                (true, 1) => completion.bytes_done.min(extent.len),
                (true, _) if all => table.len_bytes(slot),
                (true, _) => done_to.saturating_sub(table.start(slot)).min(table.len_bytes(slot)),
            };
            if pieced(slot) {
                let of = self.pieced.entry(slot).or_default();
                of.0 += moved;
                of.1 = if of.1 == 0 { completion.errno } else { of.1 };
            }
            self.parts.push((moved, completion.errno));
        }
    }

    /// Reports a request, the `at`th of the batch, all parts of which have ended. Its extent is whole again.
    pub fn whole(&mut self, table: &Table, names: &Names, (at, slot): (usize, Slot), finished: Nanos) {
        let part = self.parts.get(at).copied().unwrap_or_default();
        let (moved_bytes, errno) = self.pieced.remove(&slot).unwrap_or(part);
        let request = table.request(slot);
        self.ended.push(Ended {
            arrival: request.arrival,
            finished,
            file: names.file(request.extent.file),
            client: names.client(request.client),
            job: names.job(request.job),
            offset: request.extent.lane_offset,
            len: request.extent.len,
            moved_bytes,
            user: names.user(request.user) as u32,
            errno,
            lane: request.extent.lane,
            op: request.op,
        });
    }

    /// Drops what was recorded of a cancelled request.
    pub fn forget(&mut self, slot: Slot) {
        self.pieced.remove(&slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ClientId, Core, CoreConfig, Event, FileId, JobId, Next, PolicySpec, Request, RequestId, UserId, types::Batch,
    };

    fn core(policy: PolicySpec) -> Core {
        let mut core = Core::new(CoreConfig { pieces: true, ..CoreConfig::single_lane(64) }, &policy).unwrap();
        core.names_mut().name_file(FileId(0), 0xf00d);
        core.names_mut().name_client(ClientId(0), 0xc);
        core.names_mut().name_job(JobId(0), 17);
        core.names_mut().name_user(UserId(0), 1000);
        core.watch(true);
        core
    }

    fn push(core: &mut Core, at: u64, op: Op, offset: u64, len: u64) -> RequestId {
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        core.push(Nanos(at), &Request { arrival: Nanos(at), ..Request::new(op, extent) }).unwrap()
    }

    fn next(core: &mut Core, at: u64) -> Batch {
        let Next::Dispatch(batch) = core.next(Nanos(at)) else { panic!("something is queued") };
        batch
    }

    fn end(core: &mut Core, at: u64, batch: &Batch, errno: i32, bytes_done: u64) {
        let completion = Completion { batch: batch.id, errno, bytes_done, started: Nanos(at - 1), finished: Nanos(at) };
        core.event(Nanos(at), Event::Completed(completion));
    }

    #[test]
    fn every_request_is_reported_once_with_keys_bytes_and_errno() {
        let mut core = core(PolicySpec::named("to-agg"));
        for i in 0..3 {
            push(&mut core, i, Op::Read, i * 100, 100);
        }
        let batch = next(&mut core, 5);
        assert_eq!(batch.parts.len(), 3);
        assert_eq!(core.take_ended().count(), 0);
        end(&mut core, 9, &batch, 0, 150);
        let told: Vec<Ended> = core.take_ended().collect();
        assert_eq!(told.iter().map(|e| (e.offset, e.moved_bytes)).collect::<Vec<_>>(), [(0, 100), (100, 50), (200, 0)]);
        let first = told[0];
        assert_eq!((first.file, first.client, first.job, first.user), (0xf00d, 0xc, 17, 1000));
        assert_eq!((first.arrival, first.finished, told[2].arrival), (Nanos(0), Nanos(9), Nanos(2)));
        push(&mut core, 10, Op::Write, 0, 10);
        let batch = next(&mut core, 11);
        end(&mut core, 12, &batch, 28, 0);
        push(&mut core, 13, Op::Sync, 0, u64::MAX);
        let batch = next(&mut core, 14);
        end(&mut core, 15, &batch, 0, 0);
        let told: Vec<Ended> = core.take_ended().collect();
        let shown: Vec<_> = told.iter().map(|e| (e.op, e.errno, e.moved_bytes)).collect();
        assert_eq!(shown, [(Op::Write, 28, 0), (Op::Sync, 0, 0)]);
        // Overlapping reads are complete whether the driver counts bytes of the batch or of its parts.
        for bytes_done in [150, 200] {
            push(&mut core, 16, Op::Read, 0, 100);
            push(&mut core, 16, Op::Read, 50, 100);
            let batch = next(&mut core, 17);
            assert_eq!(batch.parts.len(), 2);
            end(&mut core, 18, &batch, 0, bytes_done);
            assert!(core.take_ended().all(|e| e.moved_bytes == 100));
        }
        core.watch(false);
        push(&mut core, 20, Op::Read, 0, 10);
        let batch = next(&mut core, 21);
        end(&mut core, 22, &batch, 0, 10);
        assert_eq!(core.take_ended().count(), 0);
    }

    /// A request served in pieces is reported with its last piece, with the bytes of all.
    #[test]
    fn pieces_are_reported_as_one_request() {
        let mut core = core(PolicySpec::named("stream").with("turn_bytes", 4096));
        let id = push(&mut core, 1, Op::Read, 1000, 10_000);
        let mut moved = 0;
        while core.request(id).is_some() {
            assert_eq!(core.take_ended().count(), 0);
            let batch = next(&mut core, 10);
            let got = batch.extent.len.min(9000 - moved);
            moved += got;
            end(&mut core, 20 + moved, &batch, 0, got);
        }
        let told: Vec<Ended> = core.take_ended().collect();
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].offset, told[0].len, told[0].moved_bytes), (1000, 10_000, 9000));
    }
}
