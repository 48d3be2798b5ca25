//! Where the bytes of a file lie: on which brick the file is, or each of its shards.
//!
//! The brick of a shard follows from a hash of its name, so that nothing but asking tells it. Shards are hidden from the
//! volume's clients; they are asked for through a second client of the same volume, without the translator that hides them.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::machine::path_of;
use impresario_layout::Layout;

use super::graph::{self, Caches};
use super::pathinfo;
use super::volume::{Gfid, Source, Volume};
use crate::{Errno, Placement, Result};

/// Attribute of a file in shards: their length, a number of 8 bytes with the highest first.
const BLOCK_SIZE: &std::ffi::CStr = c"trusted.glusterfs.shard.block-size";
/// Shards of one file that are asked for at most; those beyond count as lying like the first ones.
const SHARDS_MAX: u64 = 256;

/// They are asked for until then; those beyond count as lying where the first is.
const ASKING_MAX: Duration = Duration::from_secs(2);
/// A second client that could not be had is tried again after so long.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// What is known of the bricks.
pub(super) struct Bricks {
    /// All of them when the volume was opened, in the order of their numbers.
    names: Vec<String>,
    /// Files are in shards, or may be.
    in_shards: AtomicBool,
    /// Whether they are was told once.
    is_known: AtomicBool,
    /// A client that sees shards; made when it is first needed.
    plain: Mutex<Retried<Arc<Volume>>>,
}

/// What is made when it is needed, and may fail.
struct Retried<T> {
    made: Option<T>,
    failed: Option<Instant>,
}

impl<T: Clone> Retried<T> {
    fn get(&mut self, now: Instant, make: impl FnOnce() -> Option<T>) -> Option<T> {
        let waits = self.failed.is_some_and(|failed| now.saturating_duration_since(failed) < AGAIN_AFTER);
        if self.made.is_none() && !waits {
            self.made = make();
            self.failed = self.made.is_none().then_some(now);
        }
        self.made.clone()
    }
}

impl Bricks {
    pub(super) fn of(volume: &Arc<Volume>, description: Option<&str>) -> Bricks {
        // Of a directory, which is on every brick, all are told, as they happen to answer.
        let told = volume.root().and_then(|(root, _)| root.attribute(pathinfo::NAME));
        let mut names = told.map(|value| pathinfo::bricks(&value)).unwrap_or_default();
        // Every I/O node must give a brick the same number.
        names.sort_unstable();
        names.dedup();
        let bricks = Bricks::named(names);
        bricks.is_described(description);
        bricks
    }

    fn named(names: Vec<String>) -> Bricks {
        let (in_shards, is_known) = (AtomicBool::new(true), AtomicBool::new(false));
        Bricks { names, in_shards, is_known, plain: Mutex::new(Retried { made: None, failed: None }) }
    }

    /// The volume's description now, where it can be had. A volume may be changed to keep new files in shards; those that
    /// are in shards remain so.
    pub(super) fn is_described(&self, text: Option<&str>) {
        match text.map(|text| graph::without_shards(text).is_some()) {
            Some(false) if !self.is_known.swap(true, Ordering::Relaxed) => {
                self.in_shards.store(false, Ordering::Release)
            }
            Some(true) => {
                self.is_known.store(true, Ordering::Relaxed);
                self.in_shards.store(true, Ordering::Release);
            }
            _ => {}
        }
    }

    /// Whether files are in shards; what is not known counts so, for then writes are made one after the other.
    pub(super) fn in_shards(&self) -> bool {
        self.in_shards.load(Ordering::Acquire)
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
        let plain = match self.in_shards() {
            true => self.plain.lock().get(Instant::now(), || without_shards(volume)),
            false => None,
        };
        let plain = plain.as_ref();
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
        Ok(Placement { layout, servers: asked(first, count, Instant::now() + ASKING_MAX, shard).into() })
    }
}

/// The bricks of all shards, the first of which is known.
fn asked(first: u32, count: u16, until: Instant, shard: impl Fn(u16) -> u32) -> Vec<u32> {
    let ask = |n: u16| if Instant::now() < until { shard(n) } else { first };
    std::iter::once(first).chain((1..count).map(ask)).collect()
}

/// A client of the same volume that sees shards; `None` where there are none, or it cannot be had.
fn without_shards(volume: &Volume) -> Option<Arc<Volume>> {
    let text = graph::without_shards(&volume.describe()?)?;
    let opened = memory_file(&text).and_then(|file| {
        let source = Source::File(path_of(&file).into());
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
        let bricks = Bricks::named(names);
        assert_eq!(bricks.number(b"(<DISTRIBUTE:d> <POSIX(/b1):h:/b1/dir/file>)"), Some(1));
        let added = bricks.number(b"(<DISTRIBUTE:d> <POSIX(/b2):h:/b2/file>)");
        assert_eq!(added, Some(pathinfo::number("h:/b2")));
        assert_eq!(bricks.number(b"nothing"), None);
    }

    #[test]
    fn what_is_not_known_counts_as_in_shards() {
        let plain = "volume d\n type cluster/distribute\nend-volume\n";
        let sharded = format!("{plain}volume s\n type features/shard\n subvolumes d\nend-volume\n");
        let bricks = Bricks::named(Vec::new());
        assert!(bricks.in_shards());
        bricks.is_described(None);
        assert!(bricks.in_shards());
        bricks.is_described(Some(plain));
        assert!(!bricks.in_shards());
        bricks.is_described(None);
        assert!(!bricks.in_shards());
        bricks.is_described(Some(&sharded));
        assert!(bricks.in_shards());
        bricks.is_described(Some(plain));
        assert!(bricks.in_shards(), "files that are in shards remain so");
    }

    #[test]
    fn a_second_client_is_tried_again_after_a_while() {
        let mut client = Retried { made: None, failed: None };
        let start = Instant::now();
        assert_eq!(client.get(start, || None), None);
        assert_eq!(client.get(start + AGAIN_AFTER / 2, || Some(1)), None);
        assert_eq!(client.get(start + AGAIN_AFTER, || Some(2)), Some(2));
        assert_eq!(client.get(start + 3 * AGAIN_AFTER, || Some(3)), Some(2));
    }

    #[test]
    fn shards_are_asked_for_only_so_long() {
        let now = Instant::now();
        assert_eq!(asked(7, 3, now + Duration::from_secs(600), u32::from), [7, 1, 2]);
        assert_eq!(asked(7, 3, now, u32::from), [7, 7, 7]);
    }
}
