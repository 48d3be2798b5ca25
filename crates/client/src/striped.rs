//! Files over data servers: every call cut by striping, all its parts sent before any answer is awaited.

mod grown;
mod list;
mod mtime;
mod space;

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_layout::Layout;
use impresario_wire::{Answer, Call, Extents, FileKey, LIST_EXTENTS_MAX, LaneState, ObjectInfo, Sender, Who};

use crate::cut::{Cut, cut};
use crate::error::{ClientError, Peer};
use crate::link::Link;
use crate::pending::{Op, Reply, exchange};
use crate::unattended::Task;
use crate::unsynced::Unsynced;
pub(crate) use grown::Growth;
use grown::Servers;
pub(crate) use list::check_list;
use mtime::joint_mtime;

/// A request of an application is served in rounds of this many bytes, which bounds what is in flight for it.
pub(crate) const ROUND_BYTES: usize = 64 << 20;
/// Longest extent in which a hint is told, bytes; with as many as a list may have, a hint reaches 2 TiB of an object.
const HINT_EXTENT_BYTES: u32 = 2 << 30;

/// What became of a write.
#[derive(Debug)]
pub(crate) struct Written {
    /// That many bytes from its start on are with the data servers.
    pub(crate) bytes: usize,
    /// Why it is not all. Of the bytes behind some may have been written, too.
    pub(crate) error: Option<ClientError>,
}

/// The data servers of a cluster.
pub struct Striped {
    servers: Servers,
    /// Finds servers that were added.
    growth: Option<Box<Growth>>,
    timeout: Duration,
    call_max_bytes: usize,
    piece_max_bytes: Option<usize>,
    unsynced: Arc<Unsynced>,
}

impl Striped {
    /// Over one link per data server, in the order of the configuration. A call fails after `timeout`.
    pub fn new(servers: Vec<Arc<Link>>, timeout: Duration) -> Striped {
        let call_max_bytes = servers.iter().map(|link| link.options().max_payload_bytes).min().unwrap_or(1);
        let call_max_bytes = (call_max_bytes as usize).max(1);
        let (servers, growth, piece_max_bytes, unsynced) = (Servers::new(servers), None, None, Arc::default());
        Striped { servers, growth, timeout, call_max_bytes, piece_max_bytes, unsynced }
    }

    /// With servers that are added to the cluster while it is used: `growth` is asked for them when a file lies on more than are
    /// known.
    pub(crate) fn with_growth(mut self, growth: Box<Growth>) -> Striped {
        self.growth = Some(growth);
        self
    }

    /// With requests cut into pieces of at most `bytes` before they are dealt to servers, all sent at once, as
    /// clients of other file systems do.
    pub fn with_piece_max(mut self, bytes: Option<u32>) -> Striped {
        self.piece_max_bytes = bytes.map(|bytes| (bytes as usize).max(1));
        self
    }

    /// With the records of a client that also writes on other ways.
    pub(crate) fn with_unsynced(mut self, unsynced: &Arc<Unsynced>) -> Striped {
        self.unsynced = unsynced.clone();
        self
    }

    /// The link to each data server that was known from the start.
    pub fn servers(&self) -> &[Arc<Link>] {
        self.servers.first()
    }

    /// Reads from `offset` on. Short only at the end of the file; holes are zeros. Of a file that is known to have the
    /// objects `made` ([`ObjectInfo::made`]; 0: none is), one of which is missing, what looks like a hole or the end of the file
    /// is [`ClientError::ObjectLost`].
    pub fn read(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, ClientError> {
        self.check(layout, offset, into.len())?;
        let mut done = 0;
        for part in into.chunks_mut(ROUND_BYTES) {
            let len = part.len();
            let got = self.read_round(who, file, layout, made, offset + done as u64, part)?;
            done += got;
            if got < len {
                break;
            }
        }
        Ok(done)
    }

    /// Writes all bytes at `offset`. When it fails, some of them may have been written.
    pub fn write(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        offset: u64,
        bytes: &[u8],
    ) -> Result<usize, ClientError> {
        let written = self.write_some(who, file, layout, offset, bytes)?;
        written.error.map_or(Ok(written.bytes), Err)
    }

    /// The same; tells how many bytes are good. When a data server fails, others may have written bytes behind these.
    pub(crate) fn write_some(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Written, ClientError> {
        let (lanes, written) = self.write_rounds(std::slice::from_ref(who), file, layout, offset, bytes)?;
        lanes.into_iter().for_each(|lane| self.unsynced.note_write(file, lane));
        Ok(written)
    }

    /// Writes touching bytes of several clients, which are sent in the name of the first. Gives the states of the data
    /// servers that hold them; who syncs them later compares.
    pub fn write_merged(
        &self,
        whos: &[Who],
        file: FileKey,
        layout: &Layout,
        offset: u64,
        bytes: &[u8],
    ) -> Result<Vec<LaneState>, ClientError> {
        let (lanes, written) = self.write_rounds(whos, file, layout, offset, bytes)?;
        written.error.map_or(Ok(lanes), Err)
    }

    /// Writes round by round until one fails.
    fn write_rounds(
        &self,
        whos: &[Who],
        file: FileKey,
        layout: &Layout,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(Vec<LaneState>, Written), ClientError> {
        self.check(layout, offset, bytes.len())?;
        let mut at = offset;
        let mut lanes = Vec::with_capacity(1);
        for part in bytes.chunks(ROUND_BYTES) {
            let deadline = self.deadline();
            let cuts = cut(layout, at, part, self.call_max_bytes, self.piece_max_bytes);
            let mut ops = Vec::with_capacity(cuts.len());
            for Cut { server, lane_offset, slices, .. } in &cuts {
                let call = write_call(whos, file, *lane_offset);
                ops.push(Op { link: self.server(*server)?, call, payload: slices, into: None });
            }
            // Every answer is taken: what was written is to be synced, whatever became of the rest.
            let mut failed: Option<(u64, ClientError)> = None;
            for (reply, cut) in exchange(ops, deadline).into_iter().zip(&cuts) {
                match self.written(cut.server, reply, cut.len) {
                    Ok(lane) if lanes.contains(&lane) => {}
                    Ok(lane) => lanes.push(lane),
                    Err(error) => {
                        let start = layout.file_offset(layout.position_of(cut.server).unwrap_or(0), cut.lane_offset);
                        if failed.as_ref().is_none_or(|(first, _)| start < *first) {
                            failed = Some((start, error));
                        }
                    }
                }
            }
            if let Some((start, error)) = failed {
                return Ok((lanes, Written { bytes: (start - offset) as usize, error: Some(error) }));
            }
            at += part.len() as u64;
        }
        Ok((lanes, Written { bytes: bytes.len(), error: None }))
    }

    /// Tells the data servers that a range of a file will be read, as far as there is a file. Returns how many bytes they
    /// have, or are going to have, in memory.
    pub fn prefetch(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        offset: u64,
        len: u64,
    ) -> Result<u64, ClientError> {
        self.check(layout, offset, 0)?;
        let len = len.min(i64::MAX as u64 - offset);
        let mut ops = Vec::new();
        for range in layout.lane_ranges(offset, len) {
            let starts = (range.lane_offset..range.lane_offset + range.len).step_by(HINT_EXTENT_BYTES as usize);
            let end = range.lane_offset + range.len;
            let extent = |start: u64| (start, (end - start).min(HINT_EXTENT_BYTES.into()) as u32);
            let extents: Vec<_> = starts.take(LIST_EXTENTS_MAX).map(extent).collect();
            let call = Call::Prefetch { who: *who, file, extents: Extents::of(&extents) };
            ops.push(Op { link: self.server(range.server)?, call, payload: &[], into: None });
        }
        exchange(ops, self.deadline()).into_iter().map(|reply| accepted(&reply?)).sum()
    }

    /// Makes a file's objects durable on all its data servers.
    pub fn sync(&self, who: &Who, file: FileKey, layout: &Layout) -> Result<(), ClientError> {
        let mark = self.unsynced.writes();
        let (lanes, errno) = self.sync_lanes(who, file, layout)?;
        self.unsynced.judge(file, mark, &lanes, errno, |server| self.server(server).map(Link::peer))
    }

    /// The same without judging what may have been lost before: gives the states of all data servers of the file, and how
    /// one of them failed, or 0.
    pub fn sync_lanes(&self, who: &Who, file: FileKey, layout: &Layout) -> Result<(Vec<LaneState>, i32), ClientError> {
        let replies = self.on_all_lanes(layout, |_| Call::Sync { who: *who, file })?;
        let mut failed = 0;
        let lanes = replies.into_iter().map(|(server, reply)| {
            let loss = match reply.answer {
                Answer::Done => 0,
                Answer::AfterLoss { loss, errno, .. } => {
                    failed = if errno == 0 { failed } else { errno };
                    loss
                }
                _ => return Err(unexpected(&reply)),
            };
            Ok(LaneState::new(server, reply.incarnation, loss))
        });
        let lanes = lanes.collect::<Result<_, _>>()?;
        Ok((lanes, failed))
    }

    /// Length, last modification and storage used of a file, as its objects tell them.
    pub fn stat(&self, file: FileKey, layout: &Layout) -> Result<ObjectInfo, ClientError> {
        let mut objects = Vec::with_capacity(usize::from(layout.pcount));
        for (_, reply) in self.on_all_lanes(layout, |_| Call::ObjectStat { file })? {
            let Answer::Object(info) = reply.answer else { return Err(unexpected(&reply)) };
            objects.push(info);
        }
        Ok(file_info(layout, &objects))
    }

    /// The same of a file that is known to have the objects `made`.
    pub fn stat_made(&self, file: FileKey, layout: &Layout, made: u64) -> Result<ObjectInfo, ClientError> {
        self.none_lost(file, layout, made, self.stat(file, layout)?)
    }

    /// Checks that a file in this state has the objects that it is known to have.
    fn none_lost(
        &self,
        file: FileKey,
        layout: &Layout,
        made: u64,
        info: ObjectInfo,
    ) -> Result<ObjectInfo, ClientError> {
        match made & !info.made {
            0 => Ok(info),
            lost => {
                let server = layout.server_at((lost.trailing_zeros() as u16).min(layout.pcount.saturating_sub(1)));
                Err(ClientError::ObjectLost { peer: self.server(server)?.peer(), file })
            }
        }
    }

    /// Cuts or extends a file to `len` bytes. Gives the states of its data servers; who syncs it later compares.
    pub fn truncate(&self, who: &Who, file: FileKey, layout: &Layout, len: u64) -> Result<Vec<LaneState>, ClientError> {
        self.check(layout, len, 0)?;
        let lane_len = |k| layout.lane_len(k, len);
        let replies = self.on_all_lanes(layout, |k| Call::Truncate { who: *who, file, len: lane_len(k) })?;
        let lanes = replies.into_iter().map(|(server, reply)| {
            let loss = match reply.answer {
                Answer::Done => 0,
                Answer::AfterLoss { loss, .. } => loss,
                _ => return Err(unexpected(&reply)),
            };
            Ok(LaneState::new(server, reply.incarnation, loss))
        });
        lanes.collect()
    }

    /// Removes a file's objects; no error when there are none.
    pub fn unlink(&self, who: &Who, file: FileKey, layout: &Layout) -> Result<(), ClientError> {
        self.unlink_all(&[(*who, file, *layout)]).pop().unwrap_or(Ok(()))
    }

    /// The same for several files, all calls sent before any answer is awaited; a result for each.
    pub fn unlink_all(&self, files: &[(Who, FileKey, Layout)]) -> Vec<Result<(), ClientError>> {
        let mut ops = Vec::new();
        let mut sent = Vec::with_capacity(files.len());
        for (who, file, layout) in files {
            let lanes: Result<Vec<(u16, &Link)>, ClientError> = self.check(layout, 0, 0).and_then(|()| {
                (0..layout.pcount).map(|k| Ok((layout.server_at(k), self.server(layout.server_at(k))?))).collect()
            });
            for (_, link) in lanes.iter().flatten() {
                ops.push(Op { link, call: Call::Unlink { who: *who, file: *file }, payload: &[], into: None });
            }
            sent.push(lanes);
        }
        let mut replies = exchange(ops, self.deadline()).into_iter();
        let results = sent.into_iter().zip(files).map(|(lanes, (_, file, _))| {
            // Every reply of a file is taken, whatever the first of them says.
            let mut result = Ok(());
            for ((server, _), reply) in lanes?.into_iter().zip(&mut replies) {
                match reply.and_then(|reply| expect_done(&reply)) {
                    Ok(()) => self.unsynced.forget(server, *file),
                    Err(error) => result = result.and(Err(error)),
                }
            }
            result
        });
        results.collect()
    }

    /// Reads a range of one server's object, at most a call's payload; short where the object ends, which need not be
    /// the end of the file: a short answer says nothing about the bytes behind it. [`Striped::read`] settles what they
    /// are.
    pub fn lane_read(
        &self,
        who: &Who,
        server: u16,
        file: FileKey,
        lane_offset: u64,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, ClientError> {
        let len = self.call_len(into.iter().map(|piece| piece.len()).sum())?;
        let call = Call::Read { who: *who, file, lane_offset, len };
        let reply = self.server(server)?.call(call, &[], Some(into), self.deadline())?;
        read(&reply)
    }

    /// The same, answered to a task instead of a thread that waits: once, as the server answers. Gives the task back when it
    /// cannot be sent at once, or is too long for one call.
    pub fn lane_read_unattended(
        &self,
        who: &Who,
        server: u16,
        file: FileKey,
        (lane_offset, len): (u64, usize),
        task: Box<dyn Task>,
    ) -> Result<(), Box<dyn Task>> {
        let (Ok(len), Ok(link)) = (self.call_len(len), self.server(server)) else { return Err(task) };
        link.start_unattended(&Call::Read { who: *who, file, lane_offset, len }, len, task, self.deadline())?;
        link.identity().traffic.count_read(len.into());
        Ok(())
    }

    /// Writes a range of one server's object, at most a call's payload, for one client or several. Gives the server's
    /// state, as [`write_merged`](Striped::write_merged) does.
    pub fn lane_write(
        &self,
        whos: &[Who],
        server: u16,
        file: FileKey,
        lane_offset: u64,
        from: &[IoSlice<'_>],
    ) -> Result<Vec<LaneState>, ClientError> {
        let len = from.iter().map(|piece| piece.len()).sum();
        self.call_len(len)?;
        let call = write_call(whos, file, lane_offset);
        let lane = self.written(server, self.server(server)?.call(call, from, None, self.deadline()), len)?;
        Ok(vec![lane])
    }

    fn read_round(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize, ClientError> {
        let len = into.len();
        let mut cuts = cut(layout, offset, into, self.call_max_bytes, self.piece_max_bytes);
        if !self.read_cuts(who, file, &mut cuts, self.deadline())? {
            return Ok(len);
        }
        self.settle(who, file, layout, made, cuts, offset..offset + len as u64)
    }

    /// Some object ended early: at the end of the file, or before a hole. Only the whole file's length tells. `cuts`: what is missing
    /// of these bytes of the file.
    fn settle(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        mut cuts: Vec<Cut<IoSliceMut<'_>>>,
        bytes: Range<u64>,
    ) -> Result<usize, ClientError> {
        let file_len = self.stat_made(file, layout, made)?.size;
        let missing = cuts.iter().filter(|cut| {
            let k = layout.position_of(cut.server).unwrap_or(0);
            cut.len > 0 && layout.file_offset(k, cut.lane_offset) < file_len
        });
        // What looks like a hole may have been written since it was read and before the length was learnt. It is a
        // hole only if it is still missing now.
        if missing.count() > 0 {
            self.read_cuts(who, file, &mut cuts, self.deadline())?;
            cuts.iter_mut().flat_map(|cut| &mut cut.slices).for_each(|piece| piece.fill(0));
        }
        Ok(file_len.saturating_sub(bytes.start).min(bytes.end - bytes.start) as usize)
    }

    /// As [`Striped::read`] of bytes that lie on one server, of which that has given the first `got` and has no more.
    pub fn read_on(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        offset: u64,
        (into, mut got): (&mut [u8], usize),
    ) -> Result<usize, ClientError> {
        self.check(layout, offset, into.len())?;
        let bytes = offset..offset + into.len() as u64;
        let mut cuts = cut(layout, offset, into, self.call_max_bytes, self.piece_max_bytes);
        for cut in &mut cuts {
            let here = got.min(cut.len);
            cut.advance(here);
            got -= here;
        }
        self.settle(who, file, layout, made, cuts, bytes)
    }

    /// Reads what is left of each cut and takes it off; true when something is still missing.
    fn read_cuts(
        &self,
        who: &Who,
        file: FileKey,
        cuts: &mut [Cut<IoSliceMut<'_>>],
        deadline: Instant,
    ) -> Result<bool, ClientError> {
        let mut ops = Vec::with_capacity(cuts.len());
        for Cut { server, lane_offset, len, slices } in cuts.iter_mut().filter(|cut| cut.len > 0) {
            let call = Call::Read { who: *who, file, lane_offset: *lane_offset, len: *len as u32 };
            ops.push(Op { link: self.server(*server)?, call, payload: &[], into: Some(slices) });
        }
        let replies = exchange(ops, deadline);
        let mut is_short = false;
        for (reply, cut) in replies.into_iter().zip(cuts.iter_mut().filter(|cut| cut.len > 0)) {
            let got = read(&reply?)?;
            cut.advance(got);
            is_short |= cut.len > 0;
        }
        Ok(is_short)
    }

    fn on_all_lanes(&self, layout: &Layout, call: impl Fn(u16) -> Call) -> Result<Vec<(u16, Reply)>, ClientError> {
        self.check(layout, 0, 0)?;
        let mut ops = Vec::with_capacity(layout.pcount.into());
        for k in 0..layout.pcount {
            ops.push(Op { link: self.server(layout.server_at(k))?, call: call(k), payload: &[], into: None });
        }
        let replies = exchange(ops, self.deadline()).into_iter().zip(0..);
        replies.map(|(reply, k)| reply.map(|reply| (layout.server_at(k), reply))).collect()
    }

    fn written(&self, server: u16, reply: Result<Reply, ClientError>, len: usize) -> Result<LaneState, ClientError> {
        let reply = reply?;
        let (written, loss) = match reply.answer {
            Answer::Written(written) => (written, 0),
            Answer::AfterLoss { written, loss, .. } => (written, loss),
            _ => return Err(unexpected(&reply)),
        };
        match written as usize == len {
            true => Ok(LaneState::new(server, reply.incarnation, loss)),
            false => Err(ClientError::Protocol {
                peer: reply.peer,
                what: format!("it wrote {written} of {len} bytes and gave no reason; is its disk full?"),
            }),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn call_len(&self, len: usize) -> Result<u32, ClientError> {
        u32::try_from(len).ok().filter(|_| len <= self.call_max_bytes).ok_or_else(|| {
            let max = self.call_max_bytes;
            ClientError::invalid(format!("{len} bytes are too many for one call; the limit is {max}"))
        })
    }

    fn server(&self, server: u16) -> Result<&Link, ClientError> {
        self.servers.get(usize::from(server)).ok_or_else(|| {
            let count = self.servers.len();
            ClientError::invalid(format!("data server {server} is not in the configuration, which has {count}"))
        })
    }

    fn check(&self, layout: &Layout, offset: u64, len: usize) -> Result<(), ClientError> {
        layout.check().map_err(|error| ClientError::invalid(format!("the file's layout is damaged: {error}")))?;
        check_range(offset, len)?;
        let wanted = usize::from(layout.servers);
        if wanted > self.servers.len()
            && let Some(growth) = &self.growth
        {
            self.servers.grow(wanted, growth)?;
        }
        if wanted > self.servers.len() {
            return Err(ClientError::invalid(format!(
                "the file was made for {} data servers, the configuration here has {}; where servers were added, copy the present \
                 configuration to this machine, and none must be taken out of it",
                layout.servers,
                self.servers.len()
            )));
        }
        Ok(())
    }
}

/// File offsets are signed 64-bit numbers on this system.
pub(crate) fn check_range(offset: u64, len: usize) -> Result<(), ClientError> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(ClientError::System {
            what: format!("{len} bytes at offset {offset} go beyond the longest file"),
            errno: crate::error::Errno(libc::EFBIG),
        }),
    }
}

impl Cut<IoSliceMut<'_>> {
    /// Takes the first `got` bytes off.
    fn advance(&mut self, got: usize) {
        let mut rest = std::mem::take(&mut self.slices);
        let mut window = rest.as_mut_slice();
        let before = window.len();
        IoSliceMut::advance_slices(&mut window, got.min(self.len));
        let used = before - window.len();
        rest.drain(..used);
        self.slices = rest;
        self.lane_offset += got as u64;
        self.len -= got.min(self.len);
    }
}

/// The state of a file with these objects, in the order of its ring.
fn file_info(layout: &Layout, objects: &[ObjectInfo]) -> ObjectInfo {
    let (mut all, mut missing) = (ObjectInfo::default(), 0);
    let mut mtimes = Vec::with_capacity(objects.len());
    for (info, k) in objects.iter().zip(0u16..) {
        all.size = all.size.max(layout.file_len(k, info.size));
        *(if info.made == 0 { &mut missing } else { &mut all.made }) |= 1 << (k % 64);
        mtimes.push(info.mtime);
        all.used_bytes += info.used_bytes;
    }
    all.made &= !missing;
    all.mtime = joint_mtime(&mtimes);
    all
}

fn read(reply: &Reply) -> Result<usize, ClientError> {
    if reply.answer == Answer::Data { Ok(reply.len) } else { Err(unexpected(reply)) }
}

pub(crate) fn expect_done(reply: &Reply) -> Result<(), ClientError> {
    if reply.answer == Answer::Done { Ok(()) } else { Err(unexpected(reply)) }
}

/// What a server took of a hint, bytes.
pub(crate) fn accepted(reply: &Reply) -> Result<u64, ClientError> {
    match reply.answer {
        Answer::Accepted(bytes) => Ok(bytes),
        _ => Err(unexpected(reply)),
    }
}

/// The error for an answer that does not belong to its call.
pub(crate) fn unexpected(reply: &Reply) -> ClientError {
    unasked(reply.peer.clone(), &reply.answer)
}

/// The same, of a server.
pub(crate) fn unasked(peer: Peer, answer: &Answer) -> ClientError {
    let mut what = format!("its answer does not belong to the call: {answer:?}");
    what.truncate((0..=200.min(what.len())).rev().find(|at| what.is_char_boundary(*at)).unwrap_or(0));
    ClientError::Protocol { peer, what }
}

/// A write of bytes that these clients sent.
fn write_call(whos: &[Who], file: FileKey, lane_offset: u64) -> Call {
    match whos {
        [who] => Call::Write { who: *who, file, lane_offset },
        several => {
            let who = several.first().copied().unwrap_or_default();
            let others = several.iter().skip(1).map(Sender::from).collect();
            Call::WriteMerged { who, others, file, lane_offset }
        }
    }
}
