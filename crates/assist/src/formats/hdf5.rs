//! HDF5: groups lead from the superblock to the headers of the data sets, each of which names its index of chunks.
//!
//! Known: superblocks 0 to 3, also behind a block of the user's, object headers 1 and 2, groups by symbol table and by
//! links, data sets in one piece, and chunks by every index that the library has. Not known, and left out: virtual data
//! sets, and data in other files.

mod chunks;
mod links;
mod trees;

use std::collections::HashSet;

use super::{Fields, Format, Source, Track};
use chunks::{Chunks, Index};
use impresario_foresight::EXTENTS_MAX;

/// The reader.
pub struct Hdf5;

const SIGNATURE: &[u8] = b"\x89HDF\r\n\x1a\n";
const OBJECTS_MAX: usize = 1024;
const MESSAGES_MAX: usize = 512;
/// Of an object's header: most are shorter.
const OBJECT_BYTES: u64 = 1024;
const DEPTH_MAX: u32 = 8;
/// Rows of a data set in one piece that are shorter share pages, and come with the kernel's read-ahead.
const ROW_BYTES_MIN: u64 = 4096;
/// Where the superblock may be: what stands before it is the user's. MATLAB puts 512 bytes there.
const SUPERBLOCKS_AT: [u64; 4] = [0, 512, 1024, 2048];

impl Format for Hdf5 {
    fn name(&self) -> &'static str {
        "HDF5"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["h5", "hdf5", "hdf", "he5", "nc", "nc4", "h5ad", "loom", "nxs", "mat"]
    }

    /// A track for each data set: its chunks in the order of its elements.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        file.beginning();
        let (base, start) = SUPERBLOCKS_AT.into_iter().find_map(|at| {
            let start = file.up_to(at, 96)?;
            start.starts_with(SIGNATURE).then_some((at, start))
        })?;
        let mut fields = Fields::new(start.strip_prefix(SIGNATURE)?);
        let version = fields.little(1)?;
        let sizes;
        match version {
            0 | 1 => {
                fields.take(4)?;
                sizes = Sizes::new(fields.little(1)?, fields.little(1)?, base)?;
                fields.take(1 + 2 + 2 + 4 + if version == 1 { 4 } else { 0 })?;
                fields.take(5 * sizes.offset)?;
            }
            2 | 3 => {
                sizes = Sizes::new(fields.little(1)?, fields.little(1)?, base)?;
                fields.take(1 + 3 * sizes.offset)?;
            }
            _ => return None,
        }
        let root = sizes.address(&mut fields)?;
        let (mut waiting, mut seen, mut sets) = (vec![root], HashSet::new(), Vec::new());
        while !waiting.is_empty() {
            waiting.retain(|at| seen.len() < OBJECTS_MAX && seen.insert(*at));
            let objects = file.each(&waiting, |file, at| Object::read(file, sizes, *at));
            waiting.clear();
            // One object that is not understood does not spoil the others.
            for object in objects.into_iter().flatten() {
                waiting.extend(object.members);
                sets.extend(object.layout.map(|layout| (layout, object.space)));
            }
        }
        // Tables of chunks lie far apart. Who reads a data set in one piece needs none of them.
        let in_one_piece = |layout: &Layout| match layout {
            Layout::InOnePiece { at, bytes } => Some(*at..at.saturating_add(*bytes)),
            Layout::InChunks(_) => None,
        };
        if file.is_enough(sets.iter().filter_map(|(layout, _)| in_one_piece(layout))) {
            sets.retain(|(layout, _)| in_one_piece(layout).is_some());
        }
        let tracks = file.each(&sets, |file, (layout, space)| layout.track(file, sizes, space));
        Some(tracks.into_iter().flatten().collect())
    }
}

/// How wide offsets and lengths are, and where offsets count from.
#[derive(Clone, Copy)]
struct Sizes {
    offset: u64,
    length: u64,
    base: u64,
}

impl Sizes {
    fn new(offset: u64, length: u64, base: u64) -> Option<Sizes> {
        let known = |size| matches!(size, 2 | 4 | 8);
        (known(offset) && known(length)).then_some(Sizes { offset, length, base })
    }

    /// A place in the file; `u64::MAX` for none.
    fn address(self, fields: &mut Fields<'_>) -> Option<u64> {
        let offset = fields.little(self.offset)?;
        Some(if offset == all_ones(self.offset) { u64::MAX } else { offset.saturating_add(self.base) })
    }

    fn length(self, fields: &mut Fields<'_>) -> Option<u64> {
        fields.little(self.length)
    }
}

fn all_ones(bytes: u64) -> u64 {
    u64::MAX >> (64 - 8 * bytes)
}

/// The sides of a data set, and how far they may grow: `u64::MAX` for without end.
#[derive(Default)]
struct Space {
    sides: Vec<u64>,
    sides_max: Vec<u64>,
}

enum Layout {
    InOnePiece { at: u64, bytes: u64 },
    InChunks(Chunks),
}

/// What is wanted of an object's header.
#[derive(Default)]
struct Object {
    /// Headers of a group's members.
    members: Vec<u64>,
    space: Space,
    layout: Option<Layout>,
}

impl Object {
    fn read(file: &mut Source<'_>, sizes: Sizes, at: u64) -> Option<Object> {
        let mut object = Object::default();
        let start = file.up_to(at, OBJECT_BYTES)?;
        let mut fields = Fields::new(&start);
        // Blocks of messages: place, length.
        let mut blocks = Vec::new();
        let mut prefix_bytes = 8;
        if start.starts_with(b"OHDR") {
            fields.take(5)?;
            let flags = fields.little(1)?;
            fields.take(if flags & 0x20 != 0 { 16 } else { 0 } + if flags & 0x10 != 0 { 4 } else { 0 })?;
            let bytes = fields.little(1 << (flags & 3))?;
            prefix_bytes = 4 + if flags & 4 != 0 { 2 } else { 0 };
            blocks.push((at + (start.len() - fields.rest().len()) as u64, bytes));
        } else {
            if fields.little(1)? != 1 {
                return None;
            }
            fields.take(1 + 2 + 4)?;
            blocks.push((at + 16, fields.little(4)?));
        }
        let (is_new, mut messages) = (prefix_bytes != 8, 0);
        let mut done = 0;
        while let Some((at, bytes)) = blocks.get(done).copied() {
            done += 1;
            let block = file.bytes(at, bytes)?;
            let mut fields = Fields::new(&block);
            while fields.rest().len() > prefix_bytes && messages < MESSAGES_MAX {
                messages += 1;
                let kind = fields.little(if is_new { 1 } else { 2 })?;
                let len = fields.little(2)?;
                fields.take(prefix_bytes as u64 - if is_new { 3 } else { 4 })?;
                let Some(body) = fields.take(len) else { break };
                if kind != 0x10 {
                    object.message(file, sizes, kind, body);
                    continue;
                }
                let mut body = Fields::new(body);
                let (at, bytes) = (sizes.address(&mut body)?, sizes.length(&mut body)?);
                // A new block has a signature before its messages and a sum behind them.
                blocks.push(if is_new { (at.checked_add(4)?, bytes.checked_sub(8)?) } else { (at, bytes) });
            }
        }
        Some(object)
    }

    /// `None` where the message is not understood, which leaves out what it says.
    fn message(&mut self, file: &mut Source<'_>, sizes: Sizes, kind: u64, body: &[u8]) -> Option<()> {
        let mut fields = Fields::new(body);
        match kind {
            0x01 => {
                let (version, rank, flags) = (fields.little(1)?, fields.little(1)?, fields.little(1)?);
                fields.take(if version == 1 { 5 } else { 1 })?;
                let mut sides = || (0..rank).map(|_| sizes.length(&mut fields)).collect::<Option<Vec<u64>>>();
                self.space.sides = sides()?;
                self.space.sides_max = if flags & 1 == 0 { self.space.sides.clone() } else { sides()? };
                for side in self.space.sides_max.iter_mut().filter(|side| **side == all_ones(sizes.length)) {
                    *side = u64::MAX;
                }
            }
            0x02 => {
                fields.take(1)?;
                let flags = fields.little(1)?;
                fields.take(if flags & 1 == 0 { 0 } else { 8 })?;
                let (heap, names) = (sizes.address(&mut fields)?, sizes.address(&mut fields)?);
                // A group of a few members has its links in its header.
                if heap != u64::MAX {
                    links::of_heap(file, sizes, heap, names, &mut self.members)?;
                }
            }
            0x06 => self.members.extend(links::of_link(sizes, body)),
            0x08 => self.layout = layout(&mut fields, sizes),
            0x11 => {
                let tree = sizes.address(&mut fields)?;
                links::of_symbol_table(file, sizes, tree, DEPTH_MAX, &mut self.members)?;
            }
            _ => {}
        }
        Some(())
    }
}

fn layout(fields: &mut Fields<'_>, sizes: Sizes) -> Option<Layout> {
    let (version, class) = (fields.little(1)?, fields.little(1)?);
    match (version, class) {
        (3 | 4, 1) => Some(Layout::InOnePiece { at: sizes.address(fields)?, bytes: sizes.length(fields)? }),
        (3, 2) => {
            let rank = fields.little(1)?;
            let at = sizes.address(fields)?;
            Some(Layout::InChunks(Chunks { index: Index::Tree { rank }, at, chunk_bytes: 0, sides: Vec::new() }))
        }
        (4, 2) => {
            fields.take(1)?;
            let (rank, width) = (fields.little(1)?, fields.little(1)?);
            let mut sides: Vec<u64> = (0..rank).map(|_| fields.little(width)).collect::<Option<_>>()?;
            let chunk_bytes = sides.iter().try_fold(1u64, |bytes, side| bytes.checked_mul(*side))?;
            // The last one is the size of an element.
            sides.pop()?;
            // With what each was made with, which its own header repeats.
            let (index, made_with_bytes) = match fields.little(1)? {
                2 => (Index::Implicit, 0),
                3 => (Index::FixedArray, 1),
                4 => (Index::ExtensibleArray, 5),
                5 => (Index::Records, 6),
                // A single chunk is no track.
                _ => return None,
            };
            fields.take(made_with_bytes)?;
            Some(Layout::InChunks(Chunks { index, at: sizes.address(fields)?, chunk_bytes, sides }))
        }
        _ => None,
    }
}

impl Layout {
    fn track(&self, file: &mut Source<'_>, sizes: Sizes, space: &Space) -> Option<Track> {
        match self {
            Layout::InOnePiece { at, bytes } => {
                let rows = *space.sides.first().filter(|rows| space.sides.len() > 1 && **rows <= EXTENTS_MAX as u64)?;
                let row_bytes = bytes.checked_div(rows).filter(|bytes| *bytes >= ROW_BYTES_MIN)?;
                Some(file.series(*at, row_bytes, row_bytes, rows))
            }
            Layout::InChunks(chunks) => chunks.track(file, sizes, space),
        }
    }
}
