//! How files are striped over objects, and which OSD serves each of them.
//!
//! Ceph cuts a file into units that go round `stripe_count` objects until these are full, then round the next ones. The OSD
//! of an object follows from its name by a calculation that the library makes from its map of the cluster: asking for one
//! takes a microsecond and no message.

use std::ops::Range;

use super::mount::Inode;
use super::{Node, Shared, api};
use crate::{Errno, Placement, Result};
use impresario_base::machine::random_number;
use impresario_layout::Layout;

/// Units and objects are multiples of this (`CEPH_MIN_STRIPE_UNIT`).
pub(super) const UNIT_BYTES: u32 = 64 << 10;
/// Blocks whose OSDs are asked for at most; the file's first ones stand for those beyond.
const BLOCKS_MAX: u64 = 1024;
/// And at least, where a file may grow.
const BLOCKS_MIN: u64 = 64;
/// Names of a path at most.
const DEPTH_MAX: usize = 256;

/// How new files are striped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Striping {
    /// Bytes of a unit.
    pub unit_bytes: u32,
    /// Objects that units go round.
    pub count: u16,
    /// Bytes of an object; a multiple of the unit.
    pub object_bytes: u32,
}

impl Striping {
    /// Checks it; the error says what Ceph wants.
    pub fn check(&self) -> std::result::Result<(), String> {
        let Striping { unit_bytes, count, object_bytes } = *self;
        if unit_bytes == 0 || !unit_bytes.is_multiple_of(UNIT_BYTES) {
            return Err(format!("a stripe unit of {unit_bytes} bytes is not a multiple of {UNIT_BYTES}"));
        }
        if count == 0 {
            return Err("files cannot be striped over no object; give at least 1".into());
        }
        if object_bytes == 0 || !object_bytes.is_multiple_of(unit_bytes) {
            return Err(format!("objects of {object_bytes} bytes are not a multiple of the stripe unit, {unit_bytes}"));
        }
        Ok(())
    }

    fn text(&self) -> String {
        let Striping { unit_bytes, count, object_bytes } = self;
        format!("stripe_unit={unit_bytes} stripe_count={count} object_size={object_bytes}")
    }

    /// Gives it to a new file.
    pub(super) fn give(&self, file: &Inode) -> Result<()> {
        file.set_attribute(c"ceph.file.layout", self.text().as_bytes())?;
        // The metadata server withholds the right to write the file until its journal has the striping, which it writes every
        // few seconds unless somebody waits for it.
        file.sync()
    }
}

/// Makes a file of this striping and removes it again: what is refused is refused when the server starts.
pub(super) fn try_striping(root: &Inode, striping: &Striping) -> std::result::Result<(), String> {
    let own = root.mount().own().clone();
    let name = format!(".impresario-striping-{:016x}", random());
    let made = root.make(&own, name.as_bytes(), &crate::rules::New::File, 0o600);
    let (file, ..) = made.map_err(|error| format!("no file can be made in it: {error}"))?;
    let given = striping.give(&file);
    let _ = root.unlink(&own, name.as_bytes(), false); // what matters is the answer above
    given.map_err(|error| match error.0 {
        libc::EPERM | libc::EACCES => {
            "its files cannot be striped: the user lacks the right; give it the flag p (ceph auth caps … mds 'allow rwp')"
                .to_string()
        }
        _ => format!("its files cannot be striped by {}: {error}", striping.text()),
    })
}

/// Without the generator the process' number tells runs apart.
fn random() -> u64 {
    random_number().unwrap_or_else(|_| std::process::id().into())
}

/// Length of the blocks of a file that each lie in one object; `None` where the layout makes no sense.
pub(super) fn block_bytes(layout: &api::FileLayout) -> Option<u32> {
    let (unit, count, object) = (layout.stripe_unit, layout.stripe_count, layout.object_size);
    if unit == 0 || count == 0 || object == 0 || !object.is_multiple_of(unit) {
        return None;
    }
    // With one object at a time, it is the objects that follow one another.
    Some(if count == 1 { object } else { unit })
}

/// The parts of a range of a file that lie in different blocks: the offset of each, and its place in the range.
pub(super) fn pieces(block_bytes: u64, offset: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset.checked_add(done as u64).filter(|_| done < len)?;
        let piece = usize::try_from(block_bytes - at % block_bytes).unwrap_or(usize::MAX).min(len - done);
        done += piece;
        Some((at, done - piece..done))
    })
}

/// Bytes and number of the blocks whose OSDs tell where a file of this length lies.
fn blocks(layout: &api::FileLayout, size_bytes: u64) -> Option<(u32, u16)> {
    let block = block_bytes(layout)?.min(Layout::SSIZE_MAX_BYTES);
    let (unit, count, object) = (layout.stripe_unit, layout.stripe_count, layout.object_size);
    let blocks = |number: u64| u16::try_from(number).ok();
    if count == 1 {
        return Some((block, blocks(size_bytes.div_ceil(block.into()).clamp(BLOCKS_MIN, BLOCKS_MAX))?));
    }
    let count = u64::from(count);
    let set_bytes = count * u64::from(object);
    let all = size_bytes.div_ceil(set_bytes).max(1).saturating_mul(count * u64::from(object / unit));
    // Within the first objects the units go round them exactly.
    let exact = size_bytes <= set_bytes || all > BLOCKS_MAX;
    Some((unit, blocks(if exact { count.min(BLOCKS_MAX) } else { all })?))
}

impl Shared {
    /// Where a file lies. Without a way to ask it counts as lying on one server, which its number chooses.
    pub(super) fn placed(&self, node: &Node) -> Result<Placement> {
        let (inode, size_bytes) = (self.inode(node)?, self.see(node)?.size_bytes);
        let anywhere = Placement::one(node.fileid as u32);
        let Some((block, count)) = blocks(&inode.layout()?, size_bytes) else { return Ok(anywhere) };
        let Some(path) = self.path(node) else { return Ok(anywhere) };
        let offsets = (0..u64::from(count)).map(|n| n * u64::from(block));
        let osds = match inode.mount().osds(&path, node.fileid, offsets) {
            Ok(osds) => osds,
            // It was renamed by another client, or removed.
            Err(Errno(libc::ENOENT | libc::ESTALE | libc::ENOTDIR | libc::ELOOP)) => return Ok(anywhere),
            Err(error) => return Err(error),
        };
        let Some(first) = osds.iter().find_map(|osd| *osd) else { return Ok(anywhere) };
        let Ok(layout) = Layout::new(0, count, block, count) else { return Ok(anywhere) };
        Ok(Placement { layout, servers: osds.into_iter().map(|osd| osd.unwrap_or(first)).collect() })
    }

    /// The path from the root by which a node was last found, while the directories on it are in use.
    fn path(&self, node: &Node) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = node.fd.at.lock().clone()?;
        for _ in 0..DEPTH_MAX {
            names.push(at.1);
            if at.0 == self.root {
                names.reverse();
                return Some(names.iter().flat_map(|name| [b"/", &name[..]].concat()).collect());
            }
            at = self.nodes.get(&at.0)?.fd.at.lock().clone()?;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(stripe_unit: u32, stripe_count: u32, object_size: u32) -> api::FileLayout {
        api::FileLayout { stripe_unit, stripe_count, object_size, ..Default::default() }
    }

    #[test]
    fn blocks_are_objects_or_units() {
        const MIB: u32 = 1 << 20;
        let whole = layout(4 * MIB, 1, 4 * MIB);
        assert_eq!(blocks(&whole, 0), Some((4 * MIB, 64)));
        assert_eq!(blocks(&whole, 1 << 30), Some((4 * MIB, 256)));
        assert_eq!(blocks(&whole, u64::MAX), Some((4 * MIB, 1024)));
        // A unit smaller than the object changes nothing where there is one object at a time.
        assert_eq!(blocks(&layout(MIB, 1, 4 * MIB), 0), Some((4 * MIB, 64)));
        let striped = layout(64 << 10, 4, MIB);
        assert_eq!(blocks(&striped, 0), Some((64 << 10, 4)));
        assert_eq!(blocks(&striped, 4 << 20), Some((64 << 10, 4)));
        assert_eq!(blocks(&striped, (4 << 20) + 1), Some((64 << 10, 128)));
        assert_eq!(blocks(&striped, 64 << 20), Some((64 << 10, 1024)));
        assert_eq!(blocks(&striped, 65 << 20), Some((64 << 10, 4)));
        assert_eq!(blocks(&striped, u64::MAX), Some((64 << 10, 4)));
        for bad in [layout(0, 1, 1), layout(1, 0, 1), layout(1, 1, 0), layout(3, 1, 4)] {
            assert_eq!(blocks(&bad, 5), None);
        }
        for (unit, count, object) in [(u32::MAX, u32::MAX, u32::MAX), (1, u32::MAX, u32::MAX), (1 << 31, 2, 1 << 31)] {
            let _ = blocks(&layout(unit, count, object), u64::MAX);
        }
    }

    #[test]
    fn pieces_end_where_blocks_do() {
        let of = |offset, len| pieces(100, offset, len).collect::<Vec<_>>();
        assert_eq!(of(250, 0), []);
        assert_eq!(of(250, 50), [(250, 0..50)]);
        assert_eq!(of(250, 51), [(250, 0..50), (300, 50..51)]);
        assert_eq!(of(0, 300), [(0, 0..100), (100, 100..200), (200, 200..300)]);
        assert_eq!(pieces(u64::MAX, 5, 7).collect::<Vec<_>>(), [(5, 0..7)]);
    }

    #[test]
    fn a_striping_is_checked_as_ceph_would() {
        let striping = |unit_bytes, count, object_bytes| Striping { unit_bytes, count, object_bytes }.check();
        assert_eq!(striping(65_536, 4, 1 << 20), Ok(()));
        assert!(striping(4096, 4, 1 << 20).unwrap_err().contains("multiple of 65536"));
        assert!(striping(0, 4, 1 << 20).is_err() && striping(65_536, 0, 1 << 20).is_err());
        assert!(striping(1 << 20, 1, 3 << 19).unwrap_err().contains("multiple of the stripe unit"));
    }
}
