//! The members of a group: by symbol table, as old files have them, or by links in a fractal heap, which groups of more than
//! a few members have in files of NetCDF-4 and of `libver="latest"`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::super::{Fields, Source};
use super::trees::{Records, node};
use super::{OBJECT_BYTES, OBJECTS_MAX, Sizes};

/// A heap's blocks at most; with their sizes doubling that is plenty.
const BLOCKS_MAX: usize = 1024;
const INDIRECT_DEPTH_MAX: u32 = 4;

/// The headers of a group's members, from the tree of its symbol table.
pub(super) fn of_symbol_table(
    file: &mut Source<'_>,
    sizes: Sizes,
    at: u64,
    depth: u32,
    members: &mut Vec<u64>,
) -> Option<()> {
    let deeper = depth.checked_sub(1)?;
    let (level, entries, used) = node(file, sizes, at, 0, sizes.length)?;
    let mut fields = Fields::new(&entries);
    let mut child = || {
        fields.take(sizes.length)?;
        sizes.address(&mut fields)
    };
    let children: Vec<u64> = (0..used).map(|_| child()).collect::<Option<_>>()?;
    file.ahead(children.iter().map(|at| (*at, OBJECT_BYTES)));
    for child in children {
        if members.len() > OBJECTS_MAX {
            return Some(());
        }
        if level > 0 {
            of_symbol_table(file, sizes, child, deeper, members)?;
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
            members.push(sizes.address(&mut symbols)?);
            symbols.take(24)?;
        }
    }
    Some(())
}

/// The header that a link message leads to; `None` for soft and external links.
pub(super) fn of_link(sizes: Sizes, message: &[u8]) -> Option<u64> {
    let mut fields = Fields::new(message);
    fields.take(1)?;
    let flags = fields.little(1)?;
    let is_hard = flags & 8 == 0 || fields.little(1)? == 0;
    fields.take(if flags & 4 != 0 { 8 } else { 0 } + if flags & 0x10 != 0 { 1 } else { 0 })?;
    let name_bytes = fields.little(1 << (flags & 3))?;
    fields.take(name_bytes)?;
    is_hard.then(|| sizes.address(&mut fields))?
}

/// The headers that the links in a heap lead to, by the tree of their names.
pub(super) fn of_heap(
    file: &mut Source<'_>,
    sizes: Sizes,
    heap: u64,
    names: u64,
    members: &mut Vec<u64>,
) -> Option<()> {
    let records = Records::read(file, sizes, names)?;
    // The names of links, by a hash of four bytes.
    if records.kind != 5 || records.record_bytes <= 4 {
        return None;
    }
    let mut heap = Heap::read(file, sizes, heap)?;
    file.ahead(heap.blocks.iter().map(|(_, at, len)| (*at, *len)));
    for mut record in records.iter().take(OBJECTS_MAX) {
        record.take(4)?;
        members.extend(heap.object(file, record).and_then(|message| of_link(sizes, message)));
    }
    Some(())
}

/// A fractal heap: objects by their place in a space of its own, which blocks of growing sizes make up.
struct Heap {
    offset_bytes: u64,
    length_bytes: u64,
    /// The direct blocks: first place, address, length.
    blocks: Vec<(u64, u64, u64)>,
    read: HashMap<u64, Vec<u8>>,
}

/// How the blocks of a heap grow.
struct Growth {
    width: u64,
    first_bytes: u64,
    direct_bytes_max: u64,
    offset_bytes: u64,
}

impl Heap {
    fn read(file: &mut Source<'_>, sizes: Sizes, at: u64) -> Option<Heap> {
        let head = file.bytes(at, 22 + 12 * sizes.length + 3 * sizes.offset)?;
        let mut fields = Fields::new(head.strip_prefix(b"FRHP")?);
        fields.take(1 + 2)?;
        // Filtered blocks are not known here; the library filters no links.
        fields.little(2).filter(|filter_bytes| *filter_bytes == 0)?;
        fields.take(1)?;
        let object_bytes_max = fields.little(4)?;
        fields.take(sizes.length + sizes.offset + sizes.length + sizes.offset + 8 * sizes.length)?;
        let width = fields.little(2)?;
        let (first_bytes, direct_bytes_max) = (sizes.length(&mut fields)?, sizes.length(&mut fields)?);
        let offset_bits = fields.little(2)?;
        fields.take(2)?;
        let (root, rows) = (sizes.address(&mut fields)?, fields.little(2)?);
        let is_size = |bytes: u64| bytes.is_power_of_two() && bytes <= 1 << 32;
        if width == 0 || offset_bits > 64 || !is_size(first_bytes) || !is_size(direct_bytes_max) {
            return None;
        }
        let growth = Growth { width, first_bytes, direct_bytes_max, offset_bytes: offset_bits.div_ceil(8) };
        let wide = |most: u64| u64::from(most.max(1).ilog2() / 8 + 1);
        let mut heap = Heap {
            offset_bytes: growth.offset_bytes,
            length_bytes: wide(object_bytes_max.min(direct_bytes_max)),
            blocks: Vec::new(),
            read: HashMap::new(),
        };
        match rows {
            0 => heap.blocks.push((0, root, first_bytes)),
            _ => heap.indirect(file, sizes, &growth, (root, 0, rows), INDIRECT_DEPTH_MAX)?,
        }
        Some(heap)
    }

    /// The blocks that an indirect block of so many rows lists, from this place on.
    fn indirect(
        &mut self,
        file: &mut Source<'_>,
        sizes: Sizes,
        growth: &Growth,
        (at, mut place, rows): (u64, u64, u64),
        depth: u32,
    ) -> Option<()> {
        let deeper = depth.checked_sub(1)?;
        let head_bytes = 5 + sizes.offset + growth.offset_bytes;
        let block_bytes =
            |rows: u64| head_bytes.checked_add(rows.checked_mul(growth.width)?.checked_mul(sizes.offset)?);
        let block = file.bytes(at, block_bytes(rows)?)?;
        let mut fields = Fields::new(block.strip_prefix(b"FHIB")?);
        fields.take(head_bytes - 4)?;
        // Indirect blocks below: address, first place, rows.
        let mut below = Vec::new();
        for row in 0..rows {
            // The first two rows have blocks of the first size, each further one twice that of the one before.
            let bytes = growth.first_bytes.checked_shl(u32::try_from(row.saturating_sub(1)).ok()?)?;
            for _ in 0..growth.width {
                let child = sizes.address(&mut fields)?;
                if child != u64::MAX && self.blocks.len() + below.len() < BLOCKS_MAX {
                    if bytes <= growth.direct_bytes_max {
                        self.blocks.push((place, child, bytes));
                    } else {
                        let rows = (bytes / growth.first_bytes.checked_mul(growth.width)?).checked_ilog2()? + 1;
                        below.push((child, place, u64::from(rows)));
                    }
                }
                place = place.checked_add(bytes)?;
            }
        }
        file.ahead(below.iter().filter_map(|(at, _, rows)| Some((*at, block_bytes(*rows)?))));
        below.into_iter().try_for_each(|block| self.indirect(file, sizes, growth, block, deeper))
    }

    /// An object that is kept in a block, by its number.
    fn object(&mut self, file: &mut Source<'_>, mut number: Fields<'_>) -> Option<&[u8]> {
        // Huge and tiny objects are kept elsewhere; links are neither.
        number.little(1).filter(|kind| *kind == 0)?;
        let (place, bytes) = (number.little(self.offset_bytes)?, number.little(self.length_bytes)?);
        let block = self.blocks.iter().find(|(first, _, len)| (*first..first.saturating_add(*len)).contains(&place))?;
        let (first, at, len) = *block;
        let block = match self.read.entry(at) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(file.bytes(at, len)?),
        };
        let mut fields = Fields::new(block);
        fields.take(place - first)?;
        fields.take(bytes)
    }
}
