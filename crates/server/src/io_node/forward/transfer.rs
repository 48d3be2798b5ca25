//! What is forwarded, as one request for several where they go together, and the answers to their clients.

use std::sync::Arc;

use impresario_engine::{Ticket, now};
use impresario_sched::{Extent, Op, Request, RequestId};
use impresario_wire::{Answer, SpaceChange};
use smallvec::SmallVec;

use super::super::family::{Complete, Short};
use super::super::storage::Target;
use super::super::{Answering, Item};
use super::Forwarder;
use super::batches::{
    Forwarded, Places, Taken, answer_change, complete, fail_all, is_of_one, len_bytes, ranges_of, senders,
};
use crate::outbox::Bulk;
use crate::owed::Came;
use crate::payload::{Buffer, Slice};
use crate::workers::waiting_elsewhere;

impl Forwarder {
    /// Forwards parts of one file and operation as one request, and answers them.
    ///
    /// It travels under the name of its first member; a write names the others too, so that the data servers' fence
    /// judges every client's epoch.
    pub(super) fn forward_group(&self, mut parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        if !self.storage.is_fenced() {
            let before = parts.len();
            // A node that hung, with its clients gone on through another, must not undo what they have done there since.
            parts.retain(|(_, item)| !item.answer.client_is_gone());
            if parts.len() < before {
                // Those that are left may not touch any more.
                return self.forward_each(parts, forwarded);
            }
        }
        self.forward_together(parts, forwarded);
    }

    /// Forwards each part alone. The client of each is looked for again: what was forwarded before may have taken its time.
    fn forward_each(&self, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        parts.into_iter().for_each(|part| self.forward_group(vec![part], forwarded));
    }

    fn forward_together(&self, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        let Some((request, item)) = parts.first() else { return };
        let target = self.target(item, &parts);
        let requests: SmallVec<[RequestId; 4]> = parts.iter().map(|(request, _)| request.id).collect();
        let failed = match request.op {
            Op::Read => self.read(&target, parts, forwarded),
            Op::Write => self.write(&target, parts, forwarded),
            Op::Truncate => self.change_space(&target, parts),
            _ => self.sync(&target, parts),
        };
        if let Some(errno) = failed {
            forwarded.failed.extend(requests.into_iter().map(|request| (request, errno)));
            self.has_failed();
        }
    }

    fn read(&self, target: &Target, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) -> Option<i32> {
        let ranges = ranges_of(&parts, forwarded.is_list);
        let mut buffer = self.vitals.pool().buffer(len_bytes(&ranges) as usize);
        self.counts.out_of(&ranges);
        let began = now();
        let got = match &ranges[..] {
            [range] => self.storage.read(target, range.start, &mut buffer).map(|got| Some(vec![got])),
            ranges => self.storage.read_list(target, ranges, &mut buffer),
        };
        let got = match got {
            Ok(Some(got)) => got,
            Ok(None) => {
                drop(buffer);
                self.forward_each(parts, forwarded);
                return None;
            }
            Err(fault) if is_of_one(&fault, began, &parts) => {
                drop(buffer);
                self.forward_each(parts, forwarded);
                return None;
            }
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        let mut at = 0;
        let came = ranges.into_iter().zip(got).map(|(range, got)| {
            let place = at;
            at += (range.end - range.start) as usize;
            (range, place..place + got)
        });
        self.answer_reads(target, parts, (buffer, came.collect()), forwarded);
        None
    }

    /// Answers reads with what came of ranges of `target`: of each, so much from its start on, at these places of a buffer.
    pub(in super::super) fn answer_reads(
        &self,
        target: &Target,
        parts: Vec<(Request, Item)>,
        (buffer, came): (Buffer, Places),
        forwarded: &mut Forwarded,
    ) {
        let buffer = Arc::new(buffer);
        for (request, item) in parts {
            let start = request.extent.lane_offset;
            let Some((range, place)) = came.get(came.partition_point(|(range, _)| range.end <= start)) else {
                continue;
            };
            let from = place.start + start.saturating_sub(range.start) as usize;
            let (from, to) = (from.min(place.end), (from + request.extent.len as usize).min(place.end));
            let slice = Slice::new(buffer.clone(), from..to);
            match item.answer {
                Answering::Read(owed) if self.split && slice.len() as u64 != request.extent.len => {
                    let Extent { file_offset: offset, len, .. } = request.extent;
                    let target = Target { who: item.who, made: item.made, ..*target };
                    forwarded.shorts.push((target, Short { offset, len, owed }));
                }
                Answering::Read(owed) => owed.fulfil(Came::Read(slice)),
                // Of no read.
                Answering::Whole(reply) => reply.send_data(Bulk::One(slice)),
                Answering::Nobody(_) => {}
                Answering::Part(ref family, index) => {
                    if let Complete::Short(short) = family.part_read(index, slice) {
                        let target = Target { who: item.who, made: item.made, ..*target };
                        forwarded.shorts.push((target, short));
                    }
                }
            }
        }
    }

    fn write(&self, target: &Target, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) -> Option<i32> {
        let ranges = ranges_of(&parts, forwarded.is_list);
        self.counts.out_of(&ranges);
        let whos = senders(&parts);
        // In offset order, and none overlaps: so they are back to back, also those of a list.
        let pieces: Vec<&[u8]> =
            parts.iter().flat_map(|(_, item)| item.payload.slices()).map(|slice| &**slice).collect();
        let began = now();
        let written = match &ranges[..] {
            [range] => self.storage.write(&whos, target, range.start, &pieces),
            ranges => self.storage.write_list(&whos, target, ranges, &pieces),
        };
        drop(pieces);
        let lanes = match written {
            Ok(lanes) => lanes,
            Err(fault) if is_of_one(&fault, began, &parts) => {
                self.forward_each(parts, forwarded);
                return None;
            }
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (request, mut item) in parts {
            // Before the reply, with which the permission to hold it goes.
            item.payload = Bulk::None;
            match item.answer {
                Answering::Whole(reply) => {
                    reply.send(&Answer::FileWritten { bytes: request.extent.len as u32, lanes: lanes.clone() })
                }
                Answering::Part(family, _) => drop(family.part_written(request.extent.len, &lanes)),
                // Of no write.
                Answering::Read(_) | Answering::Nobody(_) => {}
            }
        }
        None
    }

    /// What moves no data is never merged: there is one part.
    fn change_space(&self, target: &Target, parts: Vec<(Request, Item)>) -> Option<i32> {
        let mut failed = None;
        let whole = Target { server: None, ..*target };
        for (request, item) in parts {
            let Some((change, range)) = item.change else { continue };
            let of_object = (request.extent.lane_offset, request.extent.len);
            let answered = match item.answer {
                Answering::Part(family, _) => match self.storage.change_space(target, change, of_object) {
                    Ok(lanes) => match family.part_written(0, &lanes) {
                        Complete::Extend(reply, lanes) => {
                            // The zeros are there; what others have written since stays.
                            let change = SpaceChange::Allocate { keep_size: false };
                            answer_change(reply, lanes, self.storage.change_space(&whole, change, range))
                        }
                        _ => 0,
                    },
                    Err(fault) => {
                        family.part_failed(&fault);
                        fault.errno
                    }
                },
                Answering::Whole(reply) => {
                    answer_change(reply, Vec::new(), self.storage.change_space(&whole, change, range))
                }
                // Of no change.
                Answering::Read(_) | Answering::Nobody(_) => 0,
            };
            failed = failed.or((answered != 0).then_some(answered));
        }
        failed
    }

    fn sync(&self, target: &Target, parts: Vec<(Request, Item)>) -> Option<i32> {
        let (lanes, errno) = match self.storage.sync(target) {
            Ok(synced) => synced,
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (_, item) in parts {
            if let Answering::Whole(reply) = item.answer {
                reply.send(&Answer::FileSynced { lanes: lanes.clone(), errno });
            }
        }
        (errno != 0).then_some(errno)
    }

    /// Forwards a sync, whose writes are done. A server that hangs holds no thread of the pool.
    pub(super) fn sync_later(&self, parts: Vec<(Request, Item)>, ticket: Ticket<Item>) {
        let Some(this) = self.this.upgrade() else { return };
        let watched = self.below.watch(parts.iter());
        self.sync_threads.run(Box::new(move || {
            let (started, mut forwarded) = (now(), Forwarded::default());
            waiting_elsewhere(|| watched.attend(|| this.forward_group(parts, &mut forwarded)));
            let errno = forwarded.failed.first().map_or(0, |(_, errno)| *errno);
            let taken = Taken { ticket, len: 0, requests: SmallVec::new() };
            complete(vec![taken], |_| errno, started);
        }));
    }
}
