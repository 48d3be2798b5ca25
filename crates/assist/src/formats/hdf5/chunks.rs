//! Where the chunks of a data set lie: the five kinds of index that HDF5 keeps for them.

use super::super::{Fields, Source, Track};
use super::trees::{Records, node};
use super::{DEPTH_MAX, Sizes, Space};
use impresario_foresight::EXTENTS_MAX;

/// An index of chunks.
pub(super) enum Index {
    /// A B-tree of version 1, with keys of so many dimensions.
    Tree {
        rank: u64,
    },
    /// One chunk behind the other.
    Implicit,
    FixedArray,
    ExtensibleArray,
    /// A B-tree of version 2.
    Records,
}

/// A data set in chunks.
pub(super) struct Chunks {
    pub(super) index: Index,
    pub(super) at: u64,
    /// Of one that no filter has changed.
    pub(super) chunk_bytes: u64,
    /// The sides of a chunk.
    pub(super) sides: Vec<u64>,
}

impl Chunks {
    /// The chunks in the order of the elements; those never written have no place and are left out.
    pub(super) fn track(&self, file: &mut Source<'_>, sizes: Sizes, space: &Space) -> Option<Track> {
        match self.index {
            Index::Tree { rank } => {
                let mut track = Track::new();
                tree(file, sizes, self.at, rank, DEPTH_MAX, &mut track)?;
                Some(track)
            }
            Index::Implicit => {
                Some(file.series(self.at, self.chunk_bytes, self.chunk_bytes, self.count(&space.sides)?))
            }
            Index::FixedArray => self.fixed_array(file, sizes),
            Index::ExtensibleArray => self.extensible_array(file, sizes, space),
            Index::Records => self.records(file, sizes, space),
        }
    }

    /// How many chunks it takes for these sides.
    fn count(&self, sides: &[u64]) -> Option<u64> {
        let along = |(side, chunk): (&u64, &u64)| (*chunk > 0).then(|| side.div_ceil(*chunk));
        sides.iter().zip(&self.sides).map(along).try_fold(1u64, |n, along| n.checked_mul(along?))
    }

    fn fixed_array(&self, file: &mut Source<'_>, sizes: Sizes) -> Option<Track> {
        let head = file.bytes(self.at, 8 + sizes.length + sizes.offset)?;
        let mut fields = Fields::new(head.strip_prefix(b"FAHD")?);
        let entry = Entry::of_array(&mut fields, sizes, self.chunk_bytes)?;
        let page_bits = fields.little(1).filter(|bits| *bits <= 20)?;
        let (entries, block) = (sizes.length(&mut fields)?, sizes.address(&mut fields)?);
        let of_page = 1 << page_bits;
        let (is_paged, pages) = (entries > of_page, entries.div_ceil(of_page));
        let entries = entries.min(EXTENTS_MAX as u64);
        let head_bytes = 6 + sizes.offset;
        let map_bytes = if is_paged { pages.div_ceil(8) } else { 0 };
        let head = file.bytes(block, head_bytes.checked_add(map_bytes)?)?;
        let mut written = Fields::new(head.strip_prefix(b"FADB")?);
        let written = { written.take(head_bytes - 4).map(|_| written.rest())? };
        let mut at = block + head_bytes + map_bytes + if is_paged { 4 } else { 0 };
        let is_written = |page: u64| written.get((page / 8) as usize).map(|bits| bits & 0x80 >> (page % 8) != 0);
        if is_paged {
            let page_bytes = of_page * entry.bytes;
            let pages = (0..entries.div_ceil(of_page)).filter(|page| is_written(*page) == Some(true));
            file.ahead(pages.map(|page| (at + page * (page_bytes + 4), page_bytes)));
        }
        let (mut track, mut left, mut page) = (Track::new(), entries, 0);
        while left > 0 {
            let count = if is_paged { left.min(of_page) } else { left };
            // Of a page without a bit nothing was ever written, not even that its chunks have no place.
            if !is_paged || is_written(page)? {
                let bytes = file.bytes(at, count * entry.bytes)?;
                track.extend(bytes.chunks_exact(entry.bytes as usize).filter_map(|bytes| entry.extent(sizes, bytes)));
            }
            (at, left, page) = (at + count * entry.bytes + 4, left - count, page + 1);
        }
        Some(track)
    }

    /// An array that grows: the first entries stand in its index block, then follow data blocks, which come in groups
    /// ("super blocks") that become larger in turn by number and by length.
    fn extensible_array(&self, file: &mut Source<'_>, sizes: Sizes, space: &Space) -> Option<Track> {
        let head = file.bytes(self.at, 12 + 6 * sizes.length + sizes.offset)?;
        let mut fields = Fields::new(head.strip_prefix(b"EAHD")?);
        let entry = Entry::of_array(&mut fields, sizes, self.chunk_bytes)?;
        let (bits, in_index) = (fields.little(1)?, fields.little(1)?);
        let log2 = |bytes: u64| bytes.is_power_of_two().then(|| u64::from(bytes.ilog2()));
        let (of_block, pointers) = (fields.little(1)?, fields.little(1)?);
        let page_bits = fields.little(1)?;
        fields.take(4 * sizes.length)?;
        let used = sizes.length(&mut fields)?.min(EXTENTS_MAX as u64);
        fields.take(sizes.length)?;
        let index = sizes.address(&mut fields)?;
        if bits > 64 || page_bits > 20 {
            return None;
        }
        let groups = (1 + bits).checked_sub(log2(of_block)?)?;
        let groups_in_index = 2 * log2(pointers)?;
        let data_blocks = 2 * (pointers - 1);
        let pointers = data_blocks + groups.checked_sub(groups_in_index)?;
        let head_bytes = 6 + sizes.offset;
        let index = file.bytes(index, head_bytes + in_index * entry.bytes + pointers * sizes.offset)?;
        let mut fields = Fields::new(index.strip_prefix(b"EAIB")?);
        fields.take(head_bytes - 4)?;
        let mut found = Found { entry, sizes, place: 0, used, extents: Vec::new() };
        found.take(fields.take(in_index * found.entry.bytes)?);
        // A block's place in the array stands before its entries.
        let head_bytes = head_bytes + bits.div_ceil(8);
        // The super blocks' addresses stand behind those of the first data blocks; they are read together.
        let mut addresses = fields;
        if addresses.take(data_blocks * sizes.offset).is_some() {
            let groups = (groups_in_index..groups).take_while(|group| of_block << group.div_ceil(2) <= 1 << page_bits);
            let block =
                |group: u64| Some((sizes.address(&mut addresses)?, head_bytes + sizes.offset * (1 << (group / 2))));
            let super_blocks: Vec<(u64, u64)> = groups.map_while(block).collect();
            file.ahead(super_blocks.into_iter().filter(|(at, _)| *at != u64::MAX));
        }
        for group in 0..groups {
            let (blocks, of_block) = (1u64 << (group / 2), of_block << group.div_ceil(2));
            // Longer blocks are divided into pages. With what the library chooses they begin at 131,072 entries, which
            // are more than are kept.
            if found.is_full() || of_block > 1 << page_bits {
                break;
            }
            let of_group;
            let mut addresses = match group < groups_in_index {
                true => Fields::new(fields.take(blocks * sizes.offset)?),
                false => match sizes.address(&mut fields)? {
                    u64::MAX => {
                        found.skip(blocks.checked_mul(of_block)?);
                        continue;
                    }
                    at => {
                        of_group = file.bytes(at, head_bytes + blocks * sizes.offset)?;
                        let mut fields = Fields::new(of_group.strip_prefix(b"EASB")?);
                        fields.take(head_bytes - 4)?;
                        fields
                    }
                },
            };
            let block_bytes = head_bytes + of_block * found.entry.bytes;
            let mut ahead = addresses;
            file.ahead((0..blocks).map_while(|_| Some((sizes.address(&mut ahead)?, block_bytes))));
            for _ in 0..blocks {
                match sizes.address(&mut addresses)? {
                    _ if found.is_full() => break,
                    u64::MAX => found.skip(of_block),
                    at => {
                        let block = file.bytes(at, block_bytes)?;
                        found.take(block.strip_prefix(b"EADB")?.get(head_bytes as usize - 4..)?);
                    }
                }
            }
        }
        Some(self.in_order_of_elements(found.extents, space))
    }

    /// The array counts along the unlimited dimension slowest, whichever that is.
    fn in_order_of_elements(&self, mut extents: Vec<(u64, std::ops::Range<u64>)>, space: &Space) -> Track {
        let unlimited = space.sides_max.iter().position(|side| *side == u64::MAX);
        let about = |at: usize| {
            let others: Vec<u64> =
                space.sides_max.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, n)| *n).collect();
            let chunks: Vec<u64> = self.sides.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, n)| *n).collect();
            let along = |(side, chunk): (&u64, &u64)| side.checked_div(*chunk).map(|n| n + u64::from(side % chunk > 0));
            let counts: Vec<u64> = others.iter().zip(&chunks).map(along).collect::<Option<_>>()?;
            let product = |counts: &[u64]| counts.iter().try_fold(1u64, |n, count| n.checked_mul(*count));
            Some((product(&counts)?, product(counts.get(at..)?)?))
        };
        if let Some((all, inner)) =
            unlimited.filter(|at| *at > 0).and_then(about).filter(|(all, inner)| *all.min(inner) > 0)
        {
            extents.sort_by_key(|(place, _)| {
                let (slow, rest) = (place / all, place % all);
                (rest / inner, slow, rest % inner)
            });
        }
        extents.into_iter().map(|(_, extent)| extent).collect()
    }

    fn records(&self, file: &mut Source<'_>, sizes: Sizes, space: &Space) -> Option<Track> {
        let records = Records::read(file, sizes, self.at)?;
        let is_filtered = match records.kind {
            10 => false,
            11 => true,
            _ => return None,
        };
        let place_bytes = 8 * space.sides.len() as u64;
        let bytes = records.record_bytes.checked_sub(place_bytes)?;
        let entry = Entry::new(is_filtered, bytes, sizes, self.chunk_bytes)?;
        let extent = |mut record: Fields<'_>| entry.extent(sizes, record.take(bytes)?);
        Some(records.iter().take(EXTENTS_MAX).filter_map(extent).collect())
    }
}

/// What an index keeps of each chunk: its address, and of filtered ones the length and which filters were passed over.
struct Entry {
    bytes: u64,
    /// How wide the length is; `None` where all chunks have the same.
    length: Option<u64>,
    chunk_bytes: u64,
}

impl Entry {
    fn new(is_filtered: bool, bytes: u64, sizes: Sizes, chunk_bytes: u64) -> Option<Entry> {
        let more = bytes.checked_sub(sizes.offset)?;
        let length = if is_filtered { Some(more.checked_sub(4).filter(|len| *len <= 8)?) } else { None };
        Some(Entry { bytes, length, chunk_bytes })
    }

    /// As the header of an array says, after its signature.
    fn of_array(fields: &mut Fields<'_>, sizes: Sizes, chunk_bytes: u64) -> Option<Entry> {
        fields.take(1)?;
        let (is_filtered, bytes) = (fields.little(1)? == 1, fields.little(1)?);
        Entry::new(is_filtered, bytes, sizes, chunk_bytes)
    }

    /// `None` for a chunk that was never written.
    fn extent(&self, sizes: Sizes, bytes: &[u8]) -> Option<std::ops::Range<u64>> {
        let mut fields = Fields::new(bytes);
        let start = sizes.address(&mut fields)?;
        let bytes = self.length.map_or(Some(self.chunk_bytes), |len| fields.little(len))?;
        Some(start..start.checked_add(bytes)?)
    }
}

/// What was found of an array so far.
struct Found {
    entry: Entry,
    sizes: Sizes,
    place: u64,
    used: u64,
    extents: Vec<(u64, std::ops::Range<u64>)>,
}

impl Found {
    fn is_full(&self) -> bool {
        self.place >= self.used
    }

    fn skip(&mut self, entries: u64) {
        self.place = self.place.saturating_add(entries);
    }

    fn take(&mut self, entries: &[u8]) {
        for bytes in entries.chunks_exact(self.entry.bytes as usize) {
            if !self.is_full() {
                self.extents.extend(self.entry.extent(self.sizes, bytes).map(|extent| (self.place, extent)));
            }
            self.skip(1);
        }
    }
}

/// Keys of a node of a tree of version 1, which files tell only where it is another number.
const TREE_CHILDREN: u64 = 64;

/// The key before each child: the chunk's length, which filters it passed over, its place, an element's size.
fn tree_key_bytes(rank: u64) -> u64 {
    8 + 8 * rank
}

fn tree_node_bytes(rank: u64) -> u64 {
    24 + TREE_CHILDREN * (tree_key_bytes(rank) + 8) + tree_key_bytes(rank)
}

/// The chunks of a data set, from their tree of version 1.
fn tree(file: &mut Source<'_>, sizes: Sizes, at: u64, rank: u64, depth: u32, track: &mut Track) -> Option<()> {
    let deeper = depth.checked_sub(1)?;
    let (level, entries, used) = node(file, sizes, at, 1, tree_key_bytes(rank))?;
    let mut fields = Fields::new(&entries);
    let mut child = || {
        let bytes = fields.little(4)?;
        fields.take(tree_key_bytes(rank) - 4)?;
        Some((sizes.address(&mut fields)?, bytes))
    };
    let children: Vec<(u64, u64)> = (0..used).map(|_| child()).collect::<Option<_>>()?;
    if level > 0 {
        file.ahead(children.iter().map(|(at, _)| (*at, tree_node_bytes(rank))));
    }
    for (at, bytes) in children {
        if track.len() >= EXTENTS_MAX {
            break;
        }
        match level {
            0 => track.push(at..at.checked_add(bytes)?),
            _ => tree(file, sizes, at, rank, deeper, track)?,
        }
    }
    Some(())
}
