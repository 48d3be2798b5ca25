//! Reading or writing several extents of a file at once: one list request to each data server, all sent before any answer
//! is awaited.

use std::io::{IoSlice, IoSliceMut};
use std::time::Instant;

use impresario_layout::Layout;
use impresario_wire::{Answer, Call, Extents, FileKey, LIST_EXTENTS_MAX, LaneState, Sender, Who};

use super::{ROUND_BYTES, Striped, check_range, unexpected};
use crate::cut::Divide;
use crate::error::ClientError;
use crate::pending::{Op, exchange};

/// Extents of one server's object, and the buffers that they fill, or come from, one after the other.
struct ListCall<S> {
    server: u16,
    extents: Vec<(u64, u32)>,
    slices: Vec<S>,
    len: usize,
    /// Where the first of them begins in the file, bytes.
    file_offset: u64,
}

/// An extent or a part of one: its index in the list, its place in the file, and where its bytes go.
struct Chunk<'a> {
    index: usize,
    offset: u64,
    into: &'a mut [u8],
}

impl Striped {
    /// Reads extents (offset, length) of a file into `into`, back to back. They may overlap and come in any order.
    /// Returns the bytes of each that lie before the end of the file; holes are zeros.
    /// `made` as for [`Striped::read`].
    pub fn read_list(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        extents: &[(u64, usize)],
        into: &mut [u8],
    ) -> Result<Vec<usize>, ClientError> {
        self.check(layout, 0, 0)?;
        check_list(extents, into.len())?;
        let mut got = vec![0; extents.len()];
        let mut chunks = chunks(extents, into).into_iter().peekable();
        while chunks.peek().is_some() {
            let mut left = ROUND_BYTES;
            let mut round = Vec::new();
            while let Some(chunk) = chunks.next_if(|chunk| chunk.into.len() <= left) {
                left -= chunk.into.len();
                round.push(chunk);
            }
            let places: Vec<_> = round.iter().map(|chunk| (chunk.index, chunk.offset, chunk.into.len())).collect();
            let file_len = self.read_chunks(who, file, layout, made, round)?;
            for (index, offset, len) in places {
                if let Some(got) = got.get_mut(index) {
                    *got += file_len.saturating_sub(offset).min(len as u64) as usize;
                }
            }
        }
        Ok(got)
    }

    /// Writes extents (offset, length) of a file, none of which overlap, from `bytes`, in which they are back to back, as
    /// [`Striped::write_merged`] does. When it fails, some of them may have been written.
    pub fn write_list(
        &self,
        whos: &[Who],
        file: FileKey,
        layout: &Layout,
        extents: &[(u64, usize)],
        bytes: &[u8],
    ) -> Result<Vec<LaneState>, ClientError> {
        self.check(layout, 0, 0)?;
        check_list(extents, bytes.len())?;
        let mut rest = bytes;
        let parts = extents.iter().map(|(offset, len)| {
            let (mine, later) = rest.split_at((*len).min(rest.len()));
            rest = later;
            (*offset, mine)
        });
        let calls = self.list_calls(layout, parts);
        let mut ops = Vec::with_capacity(calls.len());
        for ListCall { server, extents, slices, .. } in &calls {
            let call = write_list_call(whos, file, extents);
            ops.push(Op { link: self.server(*server)?, call, payload: slices, into: None });
        }
        // Every answer is taken: what was written is to be synced, whatever became of the rest.
        let replies = exchange(ops, self.deadline()).into_iter().zip(&calls);
        let mut lanes: Vec<LaneState> = Vec::with_capacity(1);
        let mut failed = Ok(());
        for (reply, call) in replies {
            match self.written(call.server, reply, call.len) {
                Ok(lane) if lanes.contains(&lane) => {}
                Ok(lane) => lanes.push(lane),
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        failed.map(|()| lanes)
    }

    /// Reads extents (offset, length) of one server's object into `into`, back to back. False: the object ends before the
    /// end of one of them; then `into` does not tell which, nor what that has. All of it in one call, as far as the limits allow.
    pub fn lane_read_list(
        &self,
        who: &Who,
        server: u16,
        file: FileKey,
        extents: &[(u64, usize)],
        into: &mut [u8],
    ) -> Result<bool, ClientError> {
        check_list(extents, into.len())?;
        let mut calls: Vec<ListCall<IoSliceMut<'_>>> = Vec::with_capacity(1);
        let mut rest = into;
        for (offset, len) in extents {
            self.call_len(*len)?;
            let (slice, later) = rest.divide(*len);
            rest = later;
            let last = calls.last_mut().filter(|call| call.takes(*offset, *len, self.call_max_bytes));
            match last {
                Some(call) => call.push(*offset, *offset, *len, slice.into_slice()),
                None => calls.push(ListCall::of(server, *offset, *offset, *len, slice.into_slice())),
            }
        }
        let short = self.send_lists(who, file, calls.iter_mut(), self.deadline())?;
        Ok(!short.contains(&true))
    }

    /// Writes extents (offset, length) of one server's object, of at most a call's payload together, from `from`, in which they
    /// are back to back. Gives the server's state, as [`Striped::write_merged`] does.
    pub fn lane_write_list(
        &self,
        whos: &[Who],
        server: u16,
        file: FileKey,
        extents: &[(u64, usize)],
        from: &[IoSlice<'_>],
    ) -> Result<Vec<LaneState>, ClientError> {
        let len = from.iter().map(|piece| piece.len()).sum();
        check_list(extents, len)?;
        self.call_len(len)?;
        let extents: Vec<_> = extents.iter().map(|(offset, len)| (*offset, *len as u32)).collect();
        let call = write_list_call(whos, file, &extents);
        let reply = self.server(server)?.call(call, from, None, self.deadline());
        Ok(vec![self.written(server, reply, len)?])
    }

    /// Fills all chunks; returns the length of the file as far as it mattered.
    fn read_chunks(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        made: u64,
        chunks: Vec<Chunk<'_>>,
    ) -> Result<u64, ClientError> {
        let deadline = self.deadline();
        let mut calls = self.list_calls(layout, chunks.into_iter().map(|chunk| (chunk.offset, chunk.into)));
        let short = self.send_lists(who, file, calls.iter_mut(), deadline)?;
        if !short.contains(&true) {
            return Ok(u64::MAX);
        }
        // As in a read of one range: only the whole file's length says whether bytes that an object does not have are a
        // hole, and they are one only if they are still missing now.
        let file_len = self.stat_made(file, layout, made)?.size;
        let again = calls.iter_mut().zip(short).filter(|(call, short)| *short && call.file_offset < file_len);
        let again: Vec<_> = again.map(|(call, _)| call).collect();
        self.send_lists(who, file, again.into_iter(), deadline)?;
        Ok(file_len)
    }

    /// One call for each data server, more where one cannot take all, for ranges of a file with their bytes.
    fn list_calls<B: Divide>(
        &self,
        layout: &Layout,
        ranges: impl Iterator<Item = (u64, B)>,
    ) -> Vec<ListCall<B::Slice>> {
        let mut calls: Vec<ListCall<B::Slice>> = Vec::new();
        // The present call of each server.
        let mut open = vec![None; usize::from(layout.servers)];
        for (offset, bytes) in ranges {
            let mut rest = bytes;
            for strip in layout.pieces(offset, rest.size() as u64) {
                let (mut lane_offset, mut file_offset, mut left) =
                    (strip.lane_offset, strip.file_offset, strip.len as usize);
                while left > 0 {
                    let present: Option<usize> = open.get(usize::from(strip.server)).copied().flatten();
                    let room = present.and_then(|at| calls.get(at)).map_or(0, |call| {
                        if call.extents.len() < LIST_EXTENTS_MAX { self.call_max_bytes - call.len } else { 0 }
                    });
                    let len = left.min(if room > 0 { room } else { self.call_max_bytes });
                    let (slice, later) = rest.divide(len);
                    rest = later;
                    let slice = slice.into_slice();
                    match present.and_then(|at| calls.get_mut(at)).filter(|_| room > 0) {
                        Some(call) => call.push(lane_offset, file_offset, len, slice),
                        None => {
                            if let Some(open) = open.get_mut(usize::from(strip.server)) {
                                *open = Some(calls.len());
                            }
                            calls.push(ListCall::of(strip.server, lane_offset, file_offset, len, slice));
                        }
                    }
                    lane_offset += len as u64;
                    file_offset += len as u64;
                    left -= len;
                }
            }
        }
        calls
    }

    /// Sends the calls and waits for all answers. Says of each whether its object has not all the bytes; those are
    /// zeros then.
    fn send_lists<'c, 'a: 'c>(
        &self,
        who: &Who,
        file: FileKey,
        calls: impl Iterator<Item = &'c mut ListCall<IoSliceMut<'a>>>,
        deadline: Instant,
    ) -> Result<Vec<bool>, ClientError> {
        let (mut ops, mut lens) = (Vec::new(), Vec::new());
        for ListCall { server, extents, slices, len, .. } in calls {
            let call = Call::ReadList { who: *who, file, extents: Extents::of(extents) };
            ops.push(Op { link: self.server(*server)?, call, payload: &[], into: Some(slices) });
            lens.push(*len);
        }
        let short = exchange(ops, deadline).into_iter().zip(lens).map(|(reply, len)| {
            let reply = reply?;
            if reply.answer == Answer::Data { Ok(reply.len < len) } else { Err(unexpected(&reply)) }
        });
        short.collect()
    }
}

impl<S> ListCall<S> {
    fn of(server: u16, lane_offset: u64, file_offset: u64, len: usize, slice: S) -> ListCall<S> {
        let mut call = ListCall { server, extents: Vec::new(), slices: Vec::new(), len: 0, file_offset };
        call.push(lane_offset, file_offset, len, slice);
        call
    }

    /// One more extent fits in.
    fn takes(&self, lane_offset: u64, len: usize, max_bytes: usize) -> bool {
        let touches = self.extents.last().is_some_and(|(offset, before)| offset + u64::from(*before) == lane_offset);
        (touches || self.extents.len() < LIST_EXTENTS_MAX) && len <= max_bytes.saturating_sub(self.len)
    }

    fn push(&mut self, lane_offset: u64, file_offset: u64, len: usize, slice: S) {
        self.file_offset = self.file_offset.min(file_offset);
        match self.extents.last_mut() {
            // Strips of one extent that follow one another on their server.
            Some((offset, before)) if *offset + u64::from(*before) == lane_offset => *before += len as u32,
            _ => self.extents.push((lane_offset, len as u32)),
        }
        self.len += len;
        self.slices.push(slice);
    }
}

/// A write of bytes that these clients sent.
fn write_list_call(whos: &[Who], file: FileKey, extents: &[(u64, u32)]) -> Call {
    let who = whos.first().copied().unwrap_or_default();
    let others = whos.iter().skip(1).map(Sender::from).collect();
    Call::WriteList { who, others, file, extents: Extents::of(extents) }
}

/// Checks the extents of a list whose bytes are to fill a buffer of `buffer_len` bytes.
pub(crate) fn check_list(extents: &[(u64, usize)], buffer_len: usize) -> Result<(), ClientError> {
    let mut bytes = 0usize;
    for (offset, len) in extents {
        check_range(*offset, *len)?;
        bytes = bytes.saturating_add(*len);
    }
    if bytes != buffer_len {
        return Err(ClientError::invalid(format!(
            "the extents of the list have {bytes} bytes, the buffer {buffer_len}; give a buffer of the same size"
        )));
    }
    Ok(())
}

/// The extents with their parts of the buffer, none longer than a round.
fn chunks<'a>(extents: &[(u64, usize)], into: &'a mut [u8]) -> Vec<Chunk<'a>> {
    let mut rest = into;
    let mut chunks = Vec::with_capacity(extents.len());
    for (index, (offset, len)) in extents.iter().enumerate() {
        let (mine, later) = rest.split_at_mut((*len).min(rest.len()));
        rest = later;
        let mut offset = *offset;
        for into in mine.chunks_mut(ROUND_BYTES) {
            let len = into.len() as u64;
            chunks.push(Chunk { index, offset, into });
            offset += len;
        }
    }
    chunks
}
