//! Where the bytes of a file lie: on which brick the file is, or each of its shards.
//!
//! The brick of a shard follows from a hash of its name, so that nothing but asking tells it. Shards are hidden from the
//! volume's clients; they are asked for through a second client of the same volume, without the translator that hides them.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use impresario_layout::Layout;

use super::graph::{self, Caches};
use super::pathinfo;
use super::volume::{Gfid, Source, Volume};
use crate::{Errno, Placement, Result};

/// Attribute of a file in shards: their length, a number of 8 bytes with the highest first.
const BLOCK_SIZE: &std::ffi::CStr = c"trusted.glusterfs.shard.block-size";
/// Shards of one file that are asked for at most; those beyond count as lying like the first ones.
const SHARDS_MAX: u64 = 256;

/// What is known of the bricks.
pub(super) struct Bricks {
    /// All of them when the volume was opened, in the order of their numbers.
    names: Vec<String>,
    /// Files are in shards.
    pub(super) sharded: bool,
    /// A client that sees shards; made when it is first needed.
    plain: OnceLock<Option<Arc<Volume>>>,
}

impl Bricks {
    pub(super) fn of(volume: &Arc<Volume>) -> Bricks {
        // Of a directory, which is on every brick, all are told, as they happen to answer.
        let told = volume.root().and_then(|(root, _)| root.attribute(pathinfo::NAME));
        let mut names = told.map(|value| pathinfo::bricks(&value)).unwrap_or_default();
        // Every I/O node must give a brick the same number.
        names.sort_unstable();
        names.dedup();
        let sharded = volume.describe().is_some_and(|text| graph::without_shards(&text).is_some());
        Bricks { names, sharded, plain: OnceLock::new() }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// The number of the brick that an answer names first: of replicas, that one stands for all.
    fn number(&self, told: &[u8]) -> Option<u32> {
        let brick = pathinfo::bricks(told).into_iter().next()?;
        // One that was added since has a number by its name.
        Some(self.names.iter().position(|name| *name == brick).map_or_else(|| pathinfo::number(&brick), |n| n as u32))
    }

    /// Where a file of this size lies.
    pub(super) fn placement(&self, volume: &Arc<Volume>, gfid: Gfid, size_bytes: u64) -> Result<Placement> {
        let plain = match self.sharded {
            true => self.plain.get_or_init(|| without_shards(volume)).as_ref(),
            false => None,
        };
        let (file, _) = plain.unwrap_or(volume).by_gfid(gfid)?;
        let first = self.number(&file.attribute(pathinfo::NAME)?).unwrap_or(0);
        let block = plain.and_then(|_| {
            let bytes = file.attribute(BLOCK_SIZE).ok()?;
            u32::try_from(u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?)).ok()
        });
        let Some((plain, block)) = plain.zip(block.filter(|block| *block > 0)) else {
            return Ok(Placement::one(first));
        };
        let count = size_bytes.div_ceil(u64::from(block)).clamp(1, SHARDS_MAX) as u16;
        let Ok(layout) = Layout::new(0, count, block, count) else { return Ok(Placement::one(first)) };
        let name = hyphenated(gfid);
        let shard = |n: u16| {
            let told = plain.attribute_of_path(&format!("/.shard/{name}.{n}"), pathinfo::NAME);
            // Of a hole there is no shard.
            told.ok().and_then(|value| self.number(&value)).unwrap_or(first)
        };
        Ok(Placement { layout, servers: std::iter::once(first).chain((1..count).map(shard)).collect() })
    }
}

/// A client of the same volume that sees shards; `None` where there are none, or it cannot be had.
fn without_shards(volume: &Volume) -> Option<Arc<Volume>> {
    let text = graph::without_shards(&volume.describe()?)?;
    let opened = memory_file(&text).and_then(|file| {
        let source = Source::File(format!("/proc/self/fd/{}", file.as_raw_fd()).into());
        Volume::open("shards", &source, &Caches::of(&text), volume.own().clone())
    });
    match opened {
        Ok(plain) => Some(Arc::new(plain)),
        Err(why) => {
            tracing::warn!(
                why,
                "on which bricks shards are cannot be asked: a file counts as lying where its first is"
            );
            None
        }
    }
}

/// A file in memory with this text.
fn memory_file(text: &str) -> std::result::Result<OwnedFd, String> {
    // SAFETY: a terminated name.
    let fd = unsafe { libc::memfd_create(c"volume".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Errno::from(std::io::Error::last_os_error()).to_string());
    }
    // SAFETY: the kernel just gave this descriptor to us alone.
    let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all(text.as_bytes()).map_err(|error| error.to_string())?;
    Ok(file.into())
}

/// As GlusterFS writes it in names.
fn hyphenated(gfid: Gfid) -> String {
    let hex: String = gfid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_shards_are_those_of_glusterfs() {
        let gfid = std::array::from_fn(|n| n as u8 * 17);
        assert_eq!(hyphenated(gfid), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn bricks_have_the_numbers_of_their_order() {
        let names = ["h:/b0", "h:/b1"].map(String::from).into();
        let bricks = Bricks { names, sharded: false, plain: OnceLock::new() };
        assert_eq!(bricks.number(b"(<DISTRIBUTE:d> <POSIX(/b1):h:/b1/dir/file>)"), Some(1));
        let added = bricks.number(b"(<DISTRIBUTE:d> <POSIX(/b2):h:/b2/file>)");
        assert_eq!(added, Some(pathinfo::number("h:/b2")));
        assert_eq!(bricks.number(b"nothing"), None);
    }
}
