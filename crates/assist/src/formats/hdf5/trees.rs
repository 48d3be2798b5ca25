//! The two kinds of B-tree that HDF5 has: version 1, with keys beside children, and version 2, with records in every node.

use super::super::{Fields, Source};
use super::{DEPTH_MAX, Sizes};

/// A node of a tree of version 1 of this type: its level, the key and the child of each entry, and how many there are.
pub(super) fn node(
    file: &mut Source<'_>,
    sizes: Sizes,
    at: u64,
    kind: u8,
    key_bytes: u64,
) -> Option<(u64, Vec<u8>, u64)> {
    let head_bytes = 8 + 2 * sizes.offset;
    let head = file.bytes(at, head_bytes)?;
    let mut fields = Fields::new(head.strip_prefix(b"TREE")?);
    if fields.little(1)? != u64::from(kind) {
        return None;
    }
    let (level, used) = (fields.little(1)?, fields.little(2)?);
    Some((level, file.bytes(at + head_bytes, used * (key_bytes + sizes.offset))?, used))
}

/// The records of a tree of version 2, in its order.
pub(super) struct Records {
    pub(super) kind: u64,
    pub(super) record_bytes: u64,
    node_bytes: u64,
    bytes: Vec<u8>,
}

impl Records {
    pub(super) fn iter(&self) -> impl Iterator<Item = Fields<'_>> {
        self.bytes.chunks_exact(self.record_bytes as usize).map(Fields::new)
    }

    /// `None` where a node is damaged. The source bounds how much is read, so a tree that leads to itself ends.
    pub(super) fn read(file: &mut Source<'_>, sizes: Sizes, at: u64) -> Option<Records> {
        let head = file.bytes(at, 18 + sizes.offset)?;
        let mut fields = Fields::new(head.strip_prefix(b"BTHD")?);
        fields.take(1)?;
        let (kind, node_bytes) = (fields.little(1)?, fields.little(4)?);
        let (record_bytes, depth) = (fields.little(2)?, fields.little(2)?);
        fields.take(2)?;
        let (root, count) = (sizes.address(&mut fields)?, fields.little(2)?);
        if record_bytes == 0 || depth > u64::from(DEPTH_MAX) {
            return None;
        }
        let widths = widths(node_bytes, record_bytes, sizes.offset, depth)?;
        let mut records = Records { kind, record_bytes, node_bytes, bytes: Vec::new() };
        if count > 0 {
            records.node(file, sizes, &widths, root, count)?;
        }
        Some(records)
    }

    /// One node of so many records and all below it; `widths` are those of the levels below.
    fn node(&mut self, file: &mut Source<'_>, sizes: Sizes, widths: &[Widths], at: u64, count: u64) -> Option<()> {
        let Some((of_child, below)) = widths.split_last() else {
            let leaf = file.bytes(at, 6 + count * self.record_bytes)?;
            self.bytes.extend(leaf.strip_prefix(b"BTLF")?.get(2..)?);
            return Some(());
        };
        let pointer_bytes = sizes.offset + of_child.count + of_child.total;
        let node = file.bytes(at, 6 + count * self.record_bytes + (count + 1) * pointer_bytes)?;
        let mut records = Fields::new(node.strip_prefix(b"BTIN")?);
        records.take(2)?;
        let mut children = records;
        children.take(count * self.record_bytes)?;
        let mut child = || {
            let (at, count) = (sizes.address(&mut children)?, children.little(of_child.count)?);
            children.take(of_child.total)?;
            Some((at, count))
        };
        let children: Vec<(u64, u64)> = (0..=count).map(|_| child()).collect::<Option<_>>()?;
        file.ahead(children.iter().map(|(at, _)| (*at, self.node_bytes)));
        for (child, (at, of_child_count)) in (0..).zip(children) {
            self.node(file, sizes, below, at, of_child_count)?;
            if child < count {
                self.bytes.extend(records.take(self.record_bytes)?);
            }
        }
        Some(())
    }
}

/// How wide the counts beside a pointer are: the records of the child, and with those below it.
struct Widths {
    count: u64,
    total: u64,
}

/// Of the pointers to each level below the root, the leaves first. A count is as wide as the most that its node can hold.
fn widths(node_bytes: u64, record_bytes: u64, offset_bytes: u64, depth: u64) -> Option<Vec<Widths>> {
    let wide = |most: u64| u64::from(most.max(1).ilog2() / 8 + 1);
    // A signature, a version, a type and a sum.
    let room = node_bytes.checked_sub(10)?;
    let of_leaf = room / record_bytes;
    let (mut most_below, mut widths) = (of_leaf, Vec::new());
    for level in 0..depth {
        let this = Widths { count: wide(of_leaf), total: if level == 0 { 0 } else { wide(most_below) } };
        let pointer_bytes = offset_bytes + this.count + this.total;
        let most = room.checked_sub(pointer_bytes)? / (record_bytes + pointer_bytes);
        most_below = most_below.checked_mul(most + 1)?.checked_add(most)?;
        widths.push(this);
    }
    Some(widths)
}
