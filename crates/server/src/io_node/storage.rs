//! What an I/O node forwards to: the data servers of its cluster, or a folder of a file system.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use impresario_client::{Striped, Task};
use impresario_layout::Layout;
use impresario_wire::{Fault, FileKey, LaneState, ObjectInfo, SeekTo, Sought, SpaceChange, Who};

use super::tree::Ahead;
use crate::payload::{Buffer, PayloadPool};

/// Where a forwarded request goes.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) who: Who,
    pub(crate) file: FileKey,
    pub(crate) layout: Layout,
    /// The objects that it is known to have.
    pub(crate) made: u64,
    /// Where requests are split: the data server, by its number in the layout, whose object the offsets mean.
    pub(crate) server: Option<u16>,
}

/// How a file is striped, and over which lanes of the scheduler.
#[derive(Clone)]
pub(crate) struct Striping {
    pub(crate) layout: Layout,
    /// The lane of each data server of the layout; `None`: they have the same numbers.
    pub(crate) lanes: Option<Arc<[u16]>>,
}

impl Striping {
    /// The lane of a data server of the layout.
    pub(crate) fn lane(&self, server: u16) -> u16 {
        self.lanes.as_ref().and_then(|lanes| lanes.get(usize::from(server)).copied()).unwrap_or(server)
    }
}

/// What an I/O node forwards to. Calls block; several run at once.
pub(crate) trait Storage: Send + Sync + 'static {
    /// How a file is striped, where its client says `claimed`.
    fn striping(&self, file: FileKey, claimed: Layout) -> Result<Striping, Fault>;

    /// Reads; short where the file ends, or the object where requests are split.
    fn read(&self, target: &Target, start: u64, into: &mut [u8]) -> Result<usize, Fault>;

    /// It takes [reads that no thread waits for](Storage::read_unattended).
    fn takes_tasks(&self) -> bool {
        false
    }

    /// What a client has given up, to have it done through another I/O node, is refused by those that do it: they know its
    /// epochs. Else this node must not begin it.
    fn is_fenced(&self) -> bool {
        false
    }

    /// Reads `len` bytes, without a thread that waits, or fewer: what is missing may be a hole. Gives the task back where that is not
    /// possible, or not now.
    fn read_unattended(&self, _: &Target, _start: u64, _len: usize, task: Box<dyn Task>) -> Result<(), Box<dyn Task>> {
        Err(task)
    }

    /// Goes on with such a read, of which `got` bytes have come: short only where the file ends.
    fn read_on(&self, _: &Target, _start: u64, _into: &mut [u8], _got: usize) -> Result<usize, Fault> {
        Err(Fault { errno: libc::EOPNOTSUPP, message: "reads are not left unattended here".into() })
    }

    /// Reads a range of the file that met the end of an object: short only where the file ends.
    fn read_file(&self, target: &Target, offset: u64, into: &mut [u8]) -> Result<usize, Fault>;

    /// Writes what several clients sent, back to back.
    fn write(&self, whos: &[Who], target: &Target, start: u64, pieces: &[&[u8]]) -> Result<Vec<LaneState>, Fault>;

    /// Reads ranges into `into`, back to back; gives how much there is of each from its start on. `None`: some are cut short by
    /// the end of the object, and which, only reads of one at a time tell.
    fn read_list(&self, target: &Target, ranges: &[Range<u64>], into: &mut [u8]) -> Result<Option<Vec<usize>>, Fault> {
        let mut rest = into;
        let got = ranges.iter().map(|range| {
            let left = std::mem::take(&mut rest);
            let (mine, later) = left.split_at_mut(((range.end - range.start) as usize).min(left.len()));
            rest = later;
            self.read(target, range.start, mine)
        });
        got.collect::<Result<_, _>>().map(Some)
    }

    /// Writes ranges, each of some of the pieces, which are back to back in this order.
    fn write_list(
        &self,
        whos: &[Who],
        target: &Target,
        ranges: &[Range<u64>],
        pieces: &[&[u8]],
    ) -> Result<Vec<LaneState>, Fault> {
        let mut lanes = Vec::new();
        let mut rest = pieces;
        for range in ranges {
            let mut bytes = 0;
            let count = rest.iter().take_while(|piece| {
                bytes += piece.len() as u64;
                bytes <= range.end - range.start
            });
            let (mine, later) = rest.split_at(count.count());
            rest = later;
            for lane in self.write(whos, target, range.start, mine)? {
                if !lanes.contains(&lane) {
                    lanes.push(lane);
                }
            }
        }
        Ok(lanes)
    }

    /// Makes a file's data durable. Gives what tells whether they may have been lost, and how the sync failed, or 0.
    fn sync(&self, target: &Target) -> Result<(Vec<LaneState>, i32), Fault>;

    /// Changes of bytes are made of one object at a time, where requests are split.
    fn splits_changes(&self) -> bool {
        false
    }

    /// Changes the space of a range (offset, length) of a file; of an object if the target has a server, and then without moving
    /// its end. Gives what a write does.
    fn change_space(&self, target: &Target, change: SpaceChange, range: (u64, u64)) -> Result<Vec<LaneState>, Fault>;

    /// Looks for data or a hole of a file that is known to have the objects `made`.
    fn seek(&self, file: FileKey, layout: &Layout, made: u64, from: u64, to: SeekTo) -> Result<Sought, Fault>;

    /// Length and times of a file.
    fn stat(&self, file: FileKey, layout: &Layout) -> Result<ObjectInfo, Fault>;

    /// Reads ahead of the clients here, not on other servers.
    fn ahead(&self) -> Option<&Arc<Ahead>> {
        None
    }

    /// Passes a hint on, where that is not [read ahead here](Storage::ahead); gives the bytes that are, or are going to be, in
    /// memory.
    fn prefetch(&self, _: &Who, _: FileKey, _: &Layout, _offset: u64, _len: u64) -> Result<u64, Fault> {
        Ok(0)
    }
}

/// Ranges as (offset, length).
fn extents(ranges: &[Range<u64>]) -> Vec<(u64, usize)> {
    ranges.iter().map(|range| (range.start, (range.end - range.start) as usize)).collect()
}

/// Pieces of a write back to back.
pub(super) fn joined(pool: &Arc<PayloadPool>, pieces: &[&[u8]]) -> Buffer {
    let mut joined = pool.buffer(pieces.iter().map(|piece| piece.len()).sum());
    let mut rest = &mut *joined;
    for piece in pieces {
        let (front, back) = rest.split_at_mut(piece.len());
        front.copy_from_slice(piece);
        rest = back;
    }
    joined
}

/// The data servers of a cluster.
pub(super) struct Cluster {
    pub(super) name: String,
    pub(super) striped: Arc<Striped>,
    pub(super) servers: u16,
    pub(super) pool: Arc<PayloadPool>,
}

impl Storage for Cluster {
    fn striping(&self, _: FileKey, layout: Layout) -> Result<Striping, Fault> {
        let fault = |message| Fault { errno: libc::EINVAL, message };
        layout.check().map_err(|e| fault(format!("the file's layout is damaged: {e}")))?;
        // A file of a time when there were fewer keeps its servers.
        if layout.servers > self.servers {
            let (theirs, ours) = (layout.servers, self.servers);
            return Err(fault(format!(
                "the file is striped in a cluster of {theirs} data servers, {} knows {ours}; \
                 restart it with the present configuration",
                self.name
            )));
        }
        Ok(Striping { layout, lanes: None })
    }

    fn read(&self, target: &Target, start: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let Target { who, file, layout, made, server } = target;
        let got = match server {
            Some(server) => self.striped.lane_read(who, *server, *file, start, &mut [IoSliceMut::new(into)]),
            None => self.striped.read(who, *file, layout, *made, start, into),
        };
        got.map_err(|error| error.to_fault())
    }

    fn takes_tasks(&self) -> bool {
        true
    }

    fn is_fenced(&self) -> bool {
        true
    }

    fn read_unattended(
        &self,
        target: &Target,
        start: u64,
        len: usize,
        task: Box<dyn Task>,
    ) -> Result<(), Box<dyn Task>> {
        let Target { who, file, layout, server, .. } = target;
        let (server, lane_offset) = match server {
            Some(server) => (*server, start),
            None => {
                let ranges = layout.lane_ranges(start, len as u64);
                let [range] = &*ranges else { return Err(task) };
                (range.server, range.lane_offset)
            }
        };
        self.striped.lane_read_unattended(who, server, *file, (lane_offset, len), task)
    }

    fn read_on(&self, target: &Target, start: u64, into: &mut [u8], got: usize) -> Result<usize, Fault> {
        let Target { who, file, layout, made, .. } = target;
        self.striped.read_on(who, *file, layout, *made, start, (into, got)).map_err(|error| error.to_fault())
    }

    fn read_file(&self, target: &Target, offset: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let Target { who, file, layout, made, .. } = target;
        self.striped.read(who, *file, layout, *made, offset, into).map_err(|error| error.to_fault())
    }

    fn write(&self, whos: &[Who], target: &Target, start: u64, pieces: &[&[u8]]) -> Result<Vec<LaneState>, Fault> {
        let written = match (target.server, pieces) {
            (Some(server), pieces) => {
                let pieces: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                self.striped.lane_write(whos, server, target.file, start, &pieces)
            }
            (None, [whole]) => self.striped.write_merged(whos, target.file, &target.layout, start, whole),
            (None, pieces) => {
                let merged = joined(&self.pool, pieces);
                self.striped.write_merged(whos, target.file, &target.layout, start, &merged)
            }
        };
        written.map_err(|error| error.to_fault())
    }

    fn read_list(&self, target: &Target, ranges: &[Range<u64>], into: &mut [u8]) -> Result<Option<Vec<usize>>, Fault> {
        let Target { who, file, layout, made, server } = target;
        let extents = extents(ranges);
        let got = match server {
            Some(server) => self
                .striped
                .lane_read_list(who, *server, *file, &extents, into)
                .map(|all| all.then(|| extents.iter().map(|extent| extent.1).collect())),
            None => self.striped.read_list(who, *file, layout, *made, &extents, into).map(Some),
        };
        got.map_err(|error| error.to_fault())
    }

    fn write_list(
        &self,
        whos: &[Who],
        target: &Target,
        ranges: &[Range<u64>],
        pieces: &[&[u8]],
    ) -> Result<Vec<LaneState>, Fault> {
        let extents = extents(ranges);
        let written = match target.server {
            Some(server) => {
                let pieces: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
                self.striped.lane_write_list(whos, server, target.file, &extents, &pieces)
            }
            None => {
                let merged = joined(&self.pool, pieces);
                self.striped.write_list(whos, target.file, &target.layout, &extents, &merged)
            }
        };
        written.map_err(|error| error.to_fault())
    }

    fn sync(&self, target: &Target) -> Result<(Vec<LaneState>, i32), Fault> {
        self.striped.sync_lanes(&target.who, target.file, &target.layout).map_err(|error| error.to_fault())
    }

    fn splits_changes(&self) -> bool {
        true
    }

    fn change_space(&self, target: &Target, change: SpaceChange, range: (u64, u64)) -> Result<Vec<LaneState>, Fault> {
        let Target { who, file, layout, server, .. } = target;
        let changed = match server {
            Some(server) => self.striped.lane_change_space(who, *server, *file, change, range),
            None => self.striped.change_space(who, *file, layout, change, range),
        };
        changed.map_err(|error| error.to_fault())
    }

    fn seek(&self, file: FileKey, layout: &Layout, made: u64, from: u64, to: SeekTo) -> Result<Sought, Fault> {
        self.striped.seek(file, layout, made, from, to).map_err(|error| error.to_fault())
    }

    fn stat(&self, file: FileKey, layout: &Layout) -> Result<ObjectInfo, Fault> {
        self.striped.stat(file, layout).map_err(|error| error.to_fault())
    }

    fn prefetch(&self, who: &Who, file: FileKey, layout: &Layout, offset: u64, len: u64) -> Result<u64, Fault> {
        self.striped.prefetch(who, file, layout, offset, len).map_err(|error| error.to_fault())
    }
}
