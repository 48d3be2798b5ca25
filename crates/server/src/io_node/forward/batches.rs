//! What the dispatch queue holds and what leaves it: batches of the policy, joined into what is forwarded as one.

use std::ops::Range;

use impresario_engine::{Outcome, Ticket, Work, now};
use impresario_node::{Entry, Party, covered};
use impresario_sched::{Nanos, Op, Request, RequestId};
use impresario_wire::{Answer, Fault, LaneState, Sender, Who};
use smallvec::SmallVec;

use super::super::family::Short;
use super::super::hung::{Lanes, add_lanes};
use super::super::storage::Target;
use super::super::tree::Foreseen;
use super::super::{Answering, Item};
use super::ANSWERED_IN;
use crate::connection::Reply;

/// A batch that the policy released.
pub(in super::super) struct Load {
    pub(super) parts: Vec<(Request, Item)>,
    pub(super) ticket: Ticket<Item>,
    /// What continues it and nobody has asked for.
    pub(super) along: Option<Foreseen>,
}

impl Load {
    /// The lanes of the data servers that it needs.
    pub(super) fn needs(&self, split: bool) -> Lanes {
        let mut lanes = Lanes::new();
        self.parts.iter().for_each(|(request, item)| add_lanes(&mut lanes, request, item, split));
        lanes
    }

    /// The lane that it was scheduled on.
    pub(super) fn lane(&self) -> u16 {
        self.parts.first().map_or(0, |(request, _)| request.extent.lane.0)
    }
}

/// A batch that was taken out of the queue.
pub(in super::super) struct Taken {
    pub(super) ticket: Ticket<Item>,
    pub(super) len: u64,
    pub(super) requests: SmallVec<[RequestId; 1]>,
}

/// The batches of one forwarded request.
pub(in super::super) struct Joined {
    pub(in super::super) tickets: Vec<Taken>,
    pub(in super::super) parts: Vec<(Request, Item)>,
    pub(super) along: Vec<Foreseen>,
}

impl Joined {
    pub(super) fn of(entries: Vec<Entry<Load>>) -> Joined {
        let (mut tickets, mut parts, mut along) = (Vec::with_capacity(entries.len()), Vec::new(), Vec::new());
        for entry in entries {
            let requests = entry.token.parts.iter().map(|(request, _)| request.id).collect();
            tickets.push(Taken { ticket: entry.token.ticket, len: entry.len, requests });
            along.extend(entry.token.along);
            match parts.is_empty() {
                true => parts = entry.token.parts,
                false => parts.extend(entry.token.parts),
            }
        }
        Joined { tickets, parts, along }
    }
}

/// Takes what no client has requested out of a batch; it is the last part.
pub(super) fn take_ahead(work: &mut Work<Item>) -> Option<Foreseen> {
    let (request, item) = work.parts.pop_if(|(_, item)| matches!(item.answer, Answering::Nobody(_)))?;
    let extent = request.extent.lane_offset..request.extent.end();
    work.batch.extent.len = extent.start.saturating_sub(work.batch.extent.lane_offset);
    match item.answer {
        Answering::Nobody(file) => Some(Foreseen { file, extent }),
        _ => None,
    }
}

/// Whose an item is: the data servers schedule, count and charge by it.
pub(super) fn party(item: &Item) -> Party {
    (item.who.job, item.who.user)
}

/// Whether a part may be forwarded in one request with another of its file and operation. A file has one layout; a client that says
/// otherwise is served apart. The request goes under one name, so what it is for is all of one user and one job: another's would be
/// paid for by the first. A batch of the policy may have parts of several. A copy of a write goes alone: the data
/// servers look whether it was done.
pub(super) fn goes_with((request, item): &(Request, Item), (_, other): &(Request, Item)) -> bool {
    let is_copy = request.op != Op::Read && [item, other].iter().any(|item| item.who.is_copy());
    item.striping.layout == other.striping.layout && party(item) == party(other) && !is_copy
}

/// Answers a change of space, which `lanes` have a part of; gives its errno, or 0.
pub(super) fn answer_change(reply: Reply, mut lanes: Vec<LaneState>, changed: Result<Vec<LaneState>, Fault>) -> i32 {
    match changed {
        Ok(more) => {
            lanes.extend(more);
            reply.send(&Answer::FileWritten { bytes: 0, lanes });
            0
        }
        Err(fault) => {
            reply.send(&Answer::Fault(fault.clone()));
            fault.errno
        }
    }
}

/// What was taken out of the queue is answered; `errno_of` tells how the requests of a batch failed, or 0.
pub(in super::super) fn complete(tickets: Vec<Taken>, errno_of: impl Fn(&[RequestId]) -> i32, started: Nanos) {
    let finished = now();
    for Taken { ticket, len, requests } in tickets {
        let errno = errno_of(&requests);
        ticket.complete(Outcome { errno, bytes_done: if errno == 0 { len } else { 0 }, started, finished });
    }
}

/// What came of ranges: of each, so much from its start on, in these bytes of a buffer.
pub(in super::super) type Places = SmallVec<[(Range<u64>, Range<usize>); 1]>;

/// From the first byte of the parts to the last.
pub(super) fn range_of(parts: &[(Request, Item)]) -> Range<u64> {
    let start = parts.iter().map(|(r, _)| r.extent.lane_offset).min().unwrap_or_default();
    start..parts.iter().map(|(r, _)| r.extent.end()).max().unwrap_or_default()
}

/// The ranges that parts cover: of a list as they lie, else one, from the first byte to the last.
pub(super) fn ranges_of(parts: &[(Request, Item)], is_list: bool) -> Vec<Range<u64>> {
    match is_list {
        true => covered(parts.iter().map(|(request, _)| (request.extent.lane_offset, request.extent.len))),
        false => vec![range_of(parts)],
    }
}

pub(super) fn len_bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// What became of forwarded batches.
#[derive(Default)]
pub(in super::super) struct Forwarded {
    /// They need not touch.
    pub(super) is_list: bool,
    /// The requests that failed.
    pub(super) failed: Vec<(RequestId, i32)>,
    /// Reads that met the end of an object.
    pub(in super::super) shorts: Vec<(Target, Short)>,
}

impl Forwarded {
    /// How the first of these requests that failed did, or 0.
    pub(super) fn errno_of(&self, requests: &[RequestId]) -> i32 {
        self.failed.iter().find(|(failed, _)| requests.contains(failed)).map_or(0, |(_, errno)| *errno)
    }
}

/// The requests whose bytes are sent together; parts of one request that follow one another are one.
pub(super) fn senders(parts: &[(Request, Item)]) -> Vec<Who> {
    let mut whos: Vec<Who> = parts.iter().map(|(_, item)| item.who).collect();
    whos.dedup_by_key(|who| Sender::from(&*who));
    whos
}

/// Whether a failure may be of one of several requests that were sent together, which are then sent alone: its client has
/// left the epoch that it was sent under, or its bytes cannot be read or written, or there is no space for them where others
/// only overwrite. A failure that took its time is of a server that does not answer, or of a node that hung: to ask again for each
/// would multiply the wait, and write bytes over those that clients have written through another node since.
pub(in super::super) fn is_of_one(fault: &Fault, began: Nanos, parts: &[(Request, Item)]) -> bool {
    match fault.errno {
        Fault::FENCED => {
            let mut whos = parts.iter().map(|(_, item)| (item.who.client, item.who.epoch));
            whos.next().is_some_and(|first| whos.any(|who| who != first))
        }
        libc::EIO | libc::ENOSPC | libc::EDQUOT | libc::EFBIG => parts.len() > 1 && now().since(began) < ANSWERED_IN,
        _ => false,
    }
}

/// Answers all parts with the failure; gives its errno.
pub(in super::super) fn fail_all(parts: Vec<(Request, Item)>, fault: &Fault) -> i32 {
    parts.into_iter().for_each(|(_, item)| item.answer.fail(fault));
    fault.errno
}
