//! The space of striped files: changes of a range on the data servers that hold it, and the search for data and holes.

use impresario_layout::Layout;
use impresario_wire::{Answer, Call, FileKey, LaneState, SeekTo, Sought, SpaceChange, Who};

use super::{Striped, check_range, file_info, unexpected};
use crate::error::ClientError;
use crate::pending::{Op, exchange};

impl Striped {
    /// Changes the space of `len` bytes from `offset` on, on all data servers that have some of them. What moves the end
    /// does so last: when it fails, for want of space for example, the file is as long as before. Gives the states of the data
    /// servers, as a write does.
    pub fn change_space(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        change: SpaceChange,
        (offset, len): (u64, u64),
    ) -> Result<Vec<LaneState>, ClientError> {
        self.check(layout, offset, 0)?;
        check_range(offset, usize::try_from(len).unwrap_or(usize::MAX))?;
        if len == 0 {
            return Ok(Vec::new());
        }
        let mut lanes = self.change_lanes(who, file, layout, change.keeping_size(), (offset, len))?;
        if change.extends() {
            // There is storage by now. Every object gets its length: file systems keep what lies behind an end when it is
            // punched, and a read that meets the end of an object has to ask for that of the file.
            let change = SpaceChange::Allocate { keep_size: false };
            lanes.extend(self.change_lanes(who, file, layout, change, (offset, len))?);
        }
        Ok(lanes)
    }

    /// Changes the space of one server's object within its range (offset, length), without moving its end.
    pub fn lane_change_space(
        &self,
        who: &Who,
        server: u16,
        file: FileKey,
        change: SpaceChange,
        (lane_offset, len): (u64, u64),
    ) -> Result<Vec<LaneState>, ClientError> {
        let call = Call::ChangeSpace { who: *who, file, change: change.keeping_size(), lane_offset, len };
        let lane = self.written(server, self.server(server)?.call(call, &[], None, self.deadline()), 0)?;
        Ok(vec![lane])
    }

    fn change_lanes(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        change: SpaceChange,
        (offset, len): (u64, u64),
    ) -> Result<Vec<LaneState>, ClientError> {
        let ranges = layout.lane_ranges(offset, len);
        let mut ops = Vec::with_capacity(ranges.len());
        for range in &ranges {
            let call = Call::ChangeSpace { who: *who, file, change, lane_offset: range.lane_offset, len: range.len };
            ops.push(Op { link: self.server(range.server)?, call, payload: &[], into: None });
        }
        let replies = exchange(ops, self.deadline()).into_iter().zip(&ranges);
        replies.map(|(reply, range)| self.written(range.server, reply, 0)).collect()
    }

    /// As [`change_space`](Striped::change_space), for this process's own writes: the next sync of the file covers it.
    pub fn change_own_space(
        &self,
        who: &Who,
        file: FileKey,
        layout: &Layout,
        change: SpaceChange,
        range: (u64, u64),
    ) -> Result<(), ClientError> {
        let lanes = self.change_space(who, file, layout, change, range)?;
        lanes.into_iter().for_each(|lane| self.unsynced.note_write(file, lane));
        Ok(())
    }

    /// Looks from `from` on for the first byte that is data, or in a hole, of which the end is one. Nothing is found behind
    /// the end of the file, which has the objects `made` ([`ObjectInfo::made`](impresario_wire::ObjectInfo::made)).
    pub fn seek(
        &self,
        file: FileKey,
        layout: &Layout,
        made: u64,
        from: u64,
        to: SeekTo,
    ) -> Result<Sought, ClientError> {
        let mut found = Vec::new();
        let mut objects = Vec::with_capacity(usize::from(layout.pcount));
        // As many bytes of an object lie before `from` as a file of that length would have there.
        let first = |k| layout.lane_len(k, from);
        for ((_, reply), k) in
            self.on_all_lanes(layout, |k| Call::ObjectSeek { file, from: first(k), to })?.into_iter().zip(0u16..)
        {
            let Answer::Sought(Sought { at, object }) = reply.answer else { return Err(unexpected(&reply)) };
            found.extend(at.map(|at| layout.file_offset(k, at)));
            objects.push(object);
        }
        let object = self.none_lost(file, layout, made, file_info(layout, &objects))?;
        let end = match to {
            SeekTo::Data => None,
            SeekTo::Hole => Some(object.size),
        };
        let at = found.into_iter().chain(end).min().filter(|_| from < object.size);
        let at = at.filter(|at| to == SeekTo::Hole || *at < object.size);
        Ok(Sought { at: at.map(|at| at.max(from)), object })
    }
}
