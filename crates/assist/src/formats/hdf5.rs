//! HDF5: groups lead from the superblock to the headers of the data sets, each of which names its index of chunks.
//!
//! Known: superblocks 0 to 3, object headers 1 and 2, groups by symbol table and by links in the header, data sets in one
//! piece, and chunks by B-tree version 1, by fixed array and without an index. Not known, and left out: groups with their
//! links in a fractal heap (many members, `libver="latest"`), chunks by extensible array or B-tree version 2.

use std::collections::HashSet;

use super::{Fields, Format, Source, Track};
use impresario_foresight::EXTENTS_MAX;

/// The reader.
pub struct Hdf5;

const OBJECTS_MAX: usize = 1024;
const MESSAGES_MAX: usize = 512;
const DEPTH_MAX: u32 = 8;
/// Rows of a data set in one piece that are shorter share pages, and come with the kernel's read-ahead.
const ROW_BYTES_MIN: u64 = 4096;

impl Format for Hdf5 {
    fn name(&self) -> &'static str {
        "HDF5"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["h5", "hdf5", "hdf", "he5", "nc", "nc4", "h5ad", "loom", "nxs"]
    }

    /// A track for each data set: its chunks in the order of its elements.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        let start = file.up_to(0, 96)?;
        let mut fields = Fields::new(start.strip_prefix(b"\x89HDF\r\n\x1a\n")?);
        let version = fields.little(1)?;
        let sizes;
        let root;
        match version {
            0 | 1 => {
                fields.take(4)?;
                sizes = Sizes::new(fields.little(1)?, fields.little(1)?)?;
                fields.take(1 + 2 + 2 + 4 + if version == 1 { 4 } else { 0 })?;
                // Not where something else stands before the file.
                sizes.offset(&mut fields).filter(|base| *base == 0)?;
                fields.take(3 * sizes.offset)?;
                fields.take(sizes.offset)?;
                root = sizes.offset(&mut fields)?;
            }
            2 | 3 => {
                sizes = Sizes::new(fields.little(1)?, fields.little(1)?)?;
                fields.take(1)?;
                sizes.offset(&mut fields).filter(|base| *base == 0)?;
                fields.take(2 * sizes.offset)?;
                root = sizes.offset(&mut fields)?;
            }
            _ => return None,
        }
        let (mut waiting, mut seen, mut tracks) = (vec![root], HashSet::new(), Vec::new());
        while let Some(at) = waiting.pop() {
            if seen.len() >= OBJECTS_MAX || !seen.insert(at) {
                continue;
            }
            // One object that is not understood does not spoil the others.
            let Some(object) = Object::read(file, sizes, at) else { continue };
            waiting.extend(object.members);
            if let Some(layout) = object.layout {
                tracks.extend(layout.track(file, sizes, &object.sides));
            }
        }
        Some(tracks)
    }
}

/// How wide offsets and lengths are.
#[derive(Clone, Copy)]
struct Sizes {
    offset: u64,
    length: u64,
}

impl Sizes {
    fn new(offset: u64, length: u64) -> Option<Sizes> {
        let known = |size| matches!(size, 2 | 4 | 8);
        (known(offset) && known(length)).then_some(Sizes { offset, length })
    }

    fn offset(self, fields: &mut Fields<'_>) -> Option<u64> {
        fields.little(self.offset)
    }

    fn length(self, fields: &mut Fields<'_>) -> Option<u64> {
        fields.little(self.length)
    }
}

enum Layout {
    InOnePiece {
        at: u64,
        bytes: u64,
    },
    Tree {
        at: u64,
        rank: u64,
    },
    /// With the bytes of an unfiltered chunk and the sides of chunks.
    Implicit {
        at: u64,
        chunk_bytes: u64,
        chunk: Vec<u64>,
    },
    FixedArray {
        at: u64,
        chunk_bytes: u64,
    },
}

/// What is wanted of an object's header.
#[derive(Default)]
struct Object {
    /// Headers of a group's members.
    members: Vec<u64>,
    sides: Vec<u64>,
    layout: Option<Layout>,
}

impl Object {
    fn read(file: &mut Source<'_>, sizes: Sizes, at: u64) -> Option<Object> {
        let mut object = Object::default();
        let start = file.up_to(at, 512)?;
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
                let (at, bytes) = (sizes.offset(&mut body)?, sizes.length(&mut body)?);
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
                let (version, rank) = (fields.little(1)?, fields.little(1)?);
                fields.take(if version == 1 { 6 } else { 2 })?;
                self.sides = (0..rank).map(|_| sizes.length(&mut fields)).collect::<Option<_>>()?;
            }
            0x06 => {
                fields.take(1)?;
                let flags = fields.little(1)?;
                let is_hard = flags & 8 == 0 || fields.little(1)? == 0;
                fields.take(if flags & 4 != 0 { 8 } else { 0 } + if flags & 0x10 != 0 { 1 } else { 0 })?;
                let name = fields.little(1 << (flags & 3))?;
                fields.take(name)?;
                if is_hard {
                    self.members.push(sizes.offset(&mut fields)?);
                }
            }
            0x08 => self.layout = layout(&mut fields, sizes),
            0x11 => group_members(file, sizes, sizes.offset(&mut fields)?, DEPTH_MAX, &mut self.members)?,
            _ => {}
        }
        Some(())
    }
}

fn layout(fields: &mut Fields<'_>, sizes: Sizes) -> Option<Layout> {
    let (version, class) = (fields.little(1)?, fields.little(1)?);
    match (version, class) {
        (3 | 4, 1) => Some(Layout::InOnePiece { at: sizes.offset(fields)?, bytes: sizes.length(fields)? }),
        (3, 2) => {
            let rank = fields.little(1)?;
            Some(Layout::Tree { at: sizes.offset(fields)?, rank })
        }
        (4, 2) => {
            fields.take(1)?;
            let (rank, width) = (fields.little(1)?, fields.little(1)?);
            let mut chunk: Vec<u64> = (0..rank).map(|_| fields.little(width)).collect::<Option<_>>()?;
            let chunk_bytes = chunk.iter().try_fold(1u64, |bytes, side| bytes.checked_mul(*side))?;
            // The last one is the size of an element.
            chunk.pop()?;
            match fields.little(1)? {
                2 => Some(Layout::Implicit { at: sizes.offset(fields)?, chunk_bytes, chunk }),
                3 => {
                    fields.take(1)?;
                    Some(Layout::FixedArray { at: sizes.offset(fields)?, chunk_bytes })
                }
                _ => None,
            }
        }
        _ => None,
    }
}

impl Layout {
    fn track(&self, file: &mut Source<'_>, sizes: Sizes, sides: &[u64]) -> Option<Track> {
        match self {
            Layout::InOnePiece { at, bytes } => {
                let rows = *sides.first().filter(|rows| sides.len() > 1 && **rows <= EXTENTS_MAX as u64)?;
                let row_bytes = bytes.checked_div(rows).filter(|bytes| *bytes >= ROW_BYTES_MIN)?;
                Some(file.series(*at, row_bytes, row_bytes, rows))
            }
            Layout::Tree { at, rank } => {
                let mut track = Track::new();
                chunks(file, sizes, *at, *rank, DEPTH_MAX, &mut track)?;
                Some(track)
            }
            Layout::Implicit { at, chunk_bytes, chunk } => {
                let along = |(side, chunk): (&u64, &u64)| (*chunk > 0).then(|| side.div_ceil(*chunk));
                let count = sides.iter().zip(chunk).map(along).try_fold(1u64, |n, along| n.checked_mul(along?))?;
                Some(file.series(*at, *chunk_bytes, *chunk_bytes, count))
            }
            Layout::FixedArray { at, chunk_bytes } => fixed_array(file, sizes, *at, *chunk_bytes),
        }
    }
}

/// A node of a B-tree of version 1 of this type: its level, and the key and the child of each entry.
fn node(file: &mut Source<'_>, sizes: Sizes, at: u64, kind: u8, key_bytes: u64) -> Option<(u64, Vec<u8>, u64)> {
    let head_bytes = 8 + 2 * sizes.offset;
    let head = file.bytes(at, head_bytes)?;
    let mut fields = Fields::new(head.strip_prefix(b"TREE")?);
    if fields.little(1)? != u64::from(kind) {
        return None;
    }
    let (level, used) = (fields.little(1)?, fields.little(2)?);
    Some((level, file.bytes(at + head_bytes, used * (key_bytes + sizes.offset))?, used))
}

/// The headers of a group's members, from the tree of its symbol table.
fn group_members(file: &mut Source<'_>, sizes: Sizes, at: u64, depth: u32, members: &mut Vec<u64>) -> Option<()> {
    let deeper = depth.checked_sub(1)?;
    let (level, entries, used) = node(file, sizes, at, 0, sizes.length)?;
    let mut fields = Fields::new(&entries);
    for _ in 0..used {
        fields.take(sizes.length)?;
        let child = sizes.offset(&mut fields)?;
        if members.len() > OBJECTS_MAX {
            return Some(());
        }
        if level > 0 {
            group_members(file, sizes, child, deeper, members)?;
            continue;
        }
        let entry_bytes = 2 * sizes.offset + 24;
        let head = file.bytes(child, 8)?;
        let mut symbols = Fields::new(head.strip_prefix(b"SNOD")?);
        symbols.take(2)?;
        let count = symbols.little(2)?;
        let symbols = file.bytes(child.checked_add(8)?, count * entry_bytes)?;
        let mut symbols = Fields::new(&symbols);
        for _ in 0..count {
            symbols.take(sizes.offset)?;
            members.push(sizes.offset(&mut symbols)?);
            symbols.take(24)?;
        }
    }
    Some(())
}

/// The chunks of a data set, from their tree.
fn chunks(file: &mut Source<'_>, sizes: Sizes, at: u64, rank: u64, depth: u32, track: &mut Track) -> Option<()> {
    let deeper = depth.checked_sub(1)?;
    let (level, entries, used) = node(file, sizes, at, 1, 8 + 8 * rank)?;
    let mut fields = Fields::new(&entries);
    for _ in 0..used {
        if track.len() >= EXTENTS_MAX {
            break;
        }
        let bytes = fields.little(4)?;
        fields.take(4 + 8 * rank)?;
        let child = sizes.offset(&mut fields)?;
        match level {
            0 => track.push(child..child.checked_add(bytes)?),
            _ => chunks(file, sizes, child, rank, deeper, track)?,
        }
    }
    Some(())
}

fn fixed_array(file: &mut Source<'_>, sizes: Sizes, at: u64, chunk_bytes: u64) -> Option<Track> {
    let head = file.bytes(at, 8 + sizes.length + sizes.offset)?;
    let mut fields = Fields::new(head.strip_prefix(b"FAHD")?);
    fields.take(1)?;
    let (is_filtered, entry_bytes, page_bits) = (fields.little(1)? == 1, fields.little(1)?, fields.little(1)?);
    let (entries, block) = (sizes.length(&mut fields)?, sizes.offset(&mut fields)?);
    let entries = entries.min(EXTENTS_MAX as u64);
    if entry_bytes < sizes.offset || page_bits > 20 {
        return None;
    }
    let block_head_bytes = 6 + sizes.offset;
    file.bytes(block, block_head_bytes)?.strip_prefix(b"FADB")?;
    let (mut at, of_page) = (block + block_head_bytes, 1 << page_bits);
    let is_paged = entries > of_page;
    if is_paged {
        at += entries.div_ceil(of_page).div_ceil(8) + 4;
    }
    let mut track = Track::new();
    let mut left = entries;
    while left > 0 {
        let count = if is_paged { left.min(of_page) } else { left };
        let page = file.bytes(at, count * entry_bytes)?;
        let mut fields = Fields::new(&page);
        for _ in 0..count {
            let mut entry = Fields::new(fields.take(entry_bytes)?);
            let start = sizes.offset(&mut entry)?;
            let bytes =
                if is_filtered { entry.little((entry_bytes - sizes.offset).checked_sub(4)?)? } else { chunk_bytes };
            // A chunk that was never written has no place.
            track.extend(start.checked_add(bytes).map(|end| start..end));
        }
        (at, left) = (at + count * entry_bytes + 4, left - count);
    }
    Some(track)
}
