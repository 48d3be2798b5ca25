//! The device under a folder, measured with an unnamed scratch file that disappears however the program ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use impresario_base::machine::{is_in_memory, random_number};
use impresario_base::mounts::{Mount, device_below_path, mounts};
use impresario_config::calibration::{Described, Scope};

use super::{BLOCK_BYTES, Device, Plan, Region, Stream, host, region_of, utc_now};
use crate::stop::Stop;
use impresario_base::Random;
use impresario_base::units::show_bytes;

/// Default scratch space: on a device, and in memory. At most a quarter of what is free.
const REGION_BYTES: u64 = 1 << 30;
const REGION_MEMORY_BYTES: u64 = 256 << 20;
/// The scratch space leaves this part of what is free.
const FREE_SHARE_MAX: f64 = 0.9;
const FILL_BYTES: usize = 1 << 20;

/// A folder whose device is measured.
pub struct Folder {
    dir: PathBuf,
    plan: Plan,
    file: File,
    /// The file for writes: the same, possibly opened so that each write is durable.
    written: File,
    synchronous: bool,
    direct: bool,
    memory: bool,
    wanted_bytes: u64,
    region: Region,
    notes: Vec<String>,
}

impl Folder {
    /// Opens a folder: `size_bytes` of scratch space, or a default; `synchronous` makes each write durable (`O_DSYNC`).
    pub fn open(dir: &Path, plan: &Plan, size_bytes: Option<u64>, synchronous: bool) -> Result<Folder> {
        let shown = dir.display();
        let meta =
            std::fs::metadata(dir).with_context(|| format!("{shown}: name a folder on the device to be measured"))?;
        if !meta.is_dir() {
            bail!("{shown} is not a folder: name a folder on the device to be measured");
        }
        let dir = std::fs::canonicalize(dir).with_context(|| format!("{shown}"))?;
        let space = rustix::fs::statfs(&dir).with_context(|| format!("{shown}: asking for its file system"))?;
        let memory = is_in_memory(space.f_type as u64);
        let free_bytes = (space.f_bavail as u64).saturating_mul(space.f_bsize as u64);
        let default = if memory { REGION_MEMORY_BYTES } else { REGION_BYTES };
        let wanted_bytes = size_bytes.unwrap_or(default.min(free_bytes / 4)) / FILL_BYTES as u64 * FILL_BYTES as u64;
        if wanted_bytes as f64 > free_bytes as f64 * FREE_SHARE_MAX {
            bail!(
                "{shown} has {} free, too little for {} of scratch space: give less with --size",
                show_bytes(free_bytes as f64),
                show_bytes(wanted_bytes as f64)
            );
        }
        let region = region_of(wanted_bytes, plan)?;
        let (file, written, direct) = scratch(&dir, synchronous)?;
        let plan = plan.clone();
        Ok(Folder { dir, plan, file, written, synchronous, direct, memory, wanted_bytes, region, notes: Vec::new() })
    }

    fn scope(&self) -> Scope {
        match (self.memory, self.direct) {
            (true, _) => Scope::Memory,
            (false, true) => Scope::Device,
            (false, false) => Scope::PageCache,
        }
    }
}

/// An unnamed file, bypassing the page cache if the file system allows it: for reading, for writing, and whether it
/// bypasses.
fn scratch(dir: &Path, synchronous: bool) -> Result<(File, File, bool)> {
    let path = dir.join(format!(".impresario-calibrate-{:016x}", random_number()?));
    let shown = path.display();
    let open = |flags: i32, new: bool| {
        OpenOptions::new().read(true).write(true).create_new(new).mode(0o600).custom_flags(flags).open(&path)
    };
    let plain = open(0, true).with_context(|| format!("{}: making a scratch file", dir.display()))?;
    let sync = if synchronous { libc::O_DSYNC } else { 0 };
    let (written, direct) = (open(sync, false), open(libc::O_DIRECT, false));
    let direct_written = open(libc::O_DIRECT | sync, false);
    // Nothing is written while it has a name: no bytes remain however the program ends.
    std::fs::remove_file(&path).with_context(|| format!("{shown}: taking the scratch file's name away; remove it"))?;
    let written = written.with_context(|| format!("{shown}: opening the scratch file"))?;
    let block = Aligned::random(BLOCK_BYTES as usize, 1);
    match (direct, direct_written) {
        // Some file systems accept the flag and then refuse the requests.
        (Ok(direct), Ok(direct_written)) if direct.write_all_at(block.bytes(), 0).is_ok() => {
            Ok((direct, direct_written, true))
        }
        _ => Ok((plain, written, false)),
    }
}

/// Bytes in memory that begin at a multiple of [`BLOCK_BYTES`], as `O_DIRECT` wants them.
pub(super) struct Aligned {
    all: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    /// Random bytes, which a device can neither compress nor deduplicate.
    pub(super) fn random(len: usize, seed: u64) -> Aligned {
        let mut all = vec![0; len + BLOCK_BYTES as usize];
        let mut random = Random::new(seed);
        all.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next_u64().to_le_bytes()[..word.len()]));
        // The vector is never grown, so its bytes stay where they are.
        let from = all.as_ptr().align_offset(BLOCK_BYTES as usize).min(BLOCK_BYTES as usize);
        Aligned { all, from, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.all[self.from..self.from + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.all[self.from..self.from + self.len]
    }

    /// Makes the first `len` bytes differ from those written before, block by block.
    pub(super) fn stamp(&mut self, stamp: u64, len: usize) -> &[u8] {
        for (nth, block) in self.bytes_mut()[..len].chunks_mut(BLOCK_BYTES as usize).enumerate() {
            let word = impresario_base::random::mix(stamp.wrapping_add(nth as u64)).to_le_bytes();
            block.iter_mut().zip(word).for_each(|(byte, new)| *byte = new);
        }
        &self.bytes()[..len]
    }
}

impl Device for Folder {
    fn described(&self) -> Described {
        let below = Below::of(&self.dir);
        Described {
            what: self.dir.display().to_string(),
            scope: self.scope(),
            file_system: below.file_system,
            block_device: below.block_device,
            model: below.model,
            rotational: below.rotational,
            host: host(),
            measured_at: utc_now(),
        }
    }

    /// Writes the whole file, so that reads find blocks on the device; stops when the time is over.
    fn prepare(&mut self, until: Instant, stop: &Stop, share: &mut dyn FnMut(f64)) -> Result<()> {
        let shown = self.dir.display().to_string();
        let fill = |e: io::Error| match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => anyhow!("{shown} is full: give less scratch space with --size"),
            Some(libc::EFBIG) => anyhow!("{shown} does not take such large files: give less scratch space with --size"),
            _ => anyhow!(e).context(format!("{shown}: filling the scratch file")),
        };
        let mut content = Aligned::random(FILL_BYTES, random_number()?);
        let mut filled = 0;
        while filled < self.wanted_bytes && (Instant::now() < until || filled == 0) {
            stop.check()?;
            self.file.write_all_at(content.stamp(filled, FILL_BYTES), filled).map_err(fill)?;
            filled += FILL_BYTES as u64;
            if filled % (16 << 20) == 0 {
                share(filled as f64 / self.wanted_bytes as f64);
            }
        }
        self.file.sync_all().map_err(fill)?;
        if filled < self.wanted_bytes {
            self.region = region_of(filled, &self.plan)
                .context("the device is too slow to fill more in the time allowed (--max-seconds)")?;
            self.notes.push(format!(
                "only {} of {} could be filled in a quarter of the time allowed",
                show_bytes(filled as f64),
                show_bytes(self.wanted_bytes as f64)
            ));
        }
        Ok(())
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn stream(&self, size_max_bytes: u64) -> Result<Box<dyn Stream + '_>> {
        let seed = random_number()?;
        let buffer = Aligned::random(size_max_bytes as usize, seed);
        Ok(Box::new(FolderStream { folder: self, buffer, stamp: seed }))
    }

    fn flush(&self) -> Result<()> {
        self.written.sync_data().with_context(|| format!("{}: making the scratch file durable", self.dir.display()))
    }

    fn synchronous(&self) -> bool {
        self.synchronous
    }

    fn flush_tells(&self) -> bool {
        self.scope() == Scope::Device
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.notes.clone();
        if self.scope() == Scope::PageCache {
            notes.push("this file system does not do O_DIRECT: the page cache was measured, not the device".into());
        }
        if self.scope() == Scope::Device && !self.synchronous {
            notes.push("writes end when the device reports them; --sync measures them until they are durable".into());
        }
        notes
    }
}

struct FolderStream<'a> {
    folder: &'a Folder,
    buffer: Aligned,
    stamp: u64,
}

impl Stream for FolderStream<'_> {
    fn read(&mut self, offset: u64, len: u64) -> Result<()> {
        let into = self.buffer.bytes_mut().get_mut(..len as usize).context("a request larger than the buffer")?;
        Ok(self.folder.file.read_exact_at(into, offset)?)
    }

    fn write(&mut self, offset: u64, len: u64) -> Result<()> {
        // Changing one block is enough against deduplication.
        self.stamp = self.stamp.wrapping_add(1);
        self.buffer.stamp(self.stamp, (BLOCK_BYTES as usize).min(len as usize));
        let from = self.buffer.bytes().get(..len as usize).context("a request larger than the buffer")?;
        Ok(self.folder.written.write_all_at(from, offset)?)
    }
}

/// What the system reports about the device under a folder; what it does not report is absent.
#[derive(Default)]
struct Below {
    file_system: Option<String>,
    block_device: Option<String>,
    model: Option<String>,
    rotational: Option<bool>,
}

impl Below {
    fn of(dir: &Path) -> Below {
        let file_system = file_system(mounts(), dir);
        let Some((major, minor)) = device_below_path(dir) else { return Below { file_system, ..Below::default() } };
        let Ok(block) = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else {
            return Below { file_system, ..Below::default() };
        };
        // A partition has no queue of its own; its disk is the folder around it.
        let disk = if block.join("queue").is_dir() { Some(block.as_path()) } else { block.parent() };
        let read = |name: &str| {
            let text = std::fs::read_to_string(disk?.join(name)).ok()?;
            Some(text.trim().to_string()).filter(|t| !t.is_empty())
        };
        Below {
            file_system,
            block_device: block.file_name().map(|n| n.to_string_lossy().into_owned()),
            model: read("device/model"),
            rotational: read("queue/rotational").map(|flag| flag == "1"),
        }
    }
}

/// The type of the file system mounted nearest above a folder.
fn file_system(mounts: Vec<Mount>, dir: &Path) -> Option<String> {
    let above = mounts.into_iter().filter(|mount| dir.starts_with(&mount.point));
    // Of mounts at the same place the last one is seen.
    above.max_by_key(|mount| mount.point.components().count()).map(|mount| mount.kind)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_nearest_mount_tells_the_file_system() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      30 22 0:24 / /mnt/a\\040b rw shared:1 - xfs /dev/vdb rw\n\
                      31 22 0:25 / /mnt rw - tmpfs none rw\n";
        let at = |dir: &str| file_system(impresario_base::mounts::parse(mounts.as_bytes()), Path::new(dir));
        assert_eq!(at("/mnt/a b/c").as_deref(), Some("xfs"));
        assert_eq!(at("/mnt/ab").as_deref(), Some("tmpfs"));
        assert_eq!(at("/mntx").as_deref(), Some("ext4"));
        assert_eq!(file_system(Vec::new(), Path::new("/")), None);
    }

    #[test]
    fn a_scratch_file_has_no_name_and_aligned_buffers() {
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan { sizes: vec![4096, 65_536], max: Duration::from_secs(4), ..Plan::default() };
        let mut folder = Folder::open(dir.path(), &plan, Some(8 << 20), false).unwrap();
        let mut told = 0.0;
        folder.prepare(Instant::now() + Duration::from_secs(60), &Stop::new(), &mut |share| told = share).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the scratch file has a name");
        let mut stream = folder.stream(65_536).unwrap();
        stream.write(4096, 65_536).unwrap();
        stream.read((8 << 20) - 65_536, 65_536).unwrap();
        assert!(stream.read((8 << 20) - 4096, 65_536).is_err(), "behind the end");
        assert!(stream.read(0, 1 << 20).is_err(), "larger than its buffer");
        folder.flush().unwrap();
        let described = folder.described();
        assert!(described.file_system.is_some() && described.host.contains("Linux"), "{described:?}");
        let buffer = Aligned::random(8192, 1);
        assert_eq!((buffer.bytes().as_ptr() as usize % 4096, buffer.bytes().len()), (0, 8192));
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let refused = |path: &Path, size| {
            let plan = Plan::default();
            format!("{:#}", Folder::open(path, &plan, size, false).err().expect("it was opened"))
        };
        assert!(refused(&file, None).contains("is not a folder"));
        assert!(refused(Path::new("/nonexistent"), None).contains("name a folder on the device"));
        assert!(refused(dir.path(), Some(1 << 60)).contains("give less with --size"));
        let small = refused(dir.path(), Some(32 << 20));
        assert!(small.contains("32 MiB is too small for requests of 16 MiB: allow 64 MiB with --size"), "{small}");
    }
}
