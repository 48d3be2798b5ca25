//! `impresario assist selftest`: what guided I/O does on a site's own file system, in numbers that can be sent.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_assist::backend::{Backends, FileId, HintedFile, is_cached};
use impresario_assist::config::BackendChoice;
use impresario_assist::report::Report;
use impresario_base::machine::host_name;
use impresario_base::mounts::{Mount, mounts};
use impresario_base::units::{parse_positive_bytes, show_bytes};
use impresario_gpfs::{Hint, Library};
use impresario_workload::programs::{BlockDevice, Files, Trials, Variant, cool, measure};
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json};
use impresario_workload::stats::{Interval, no_worse_than};
use impresario_workload::stop::Stop;
use serde::Serialize;

use crate::front::command_file;
use crate::{print, usage};

/// Test guided I/O on a mounted file system: which ways of prefetching work there, and what they gain
///
/// Writes a file into a folder of its own on the mount, which it removes again, and tells: the kind of file system; whether
/// pages can be let go; by which calls data come into memory; a program's time with guided I/O and without, for strided and
/// backward reads, reads straight on and a memory map, each byte checked; and whether anything stays behind. Nothing but that
/// folder is touched, no root is needed. With --json all of it is written to a file: please send it in where a file system does
/// not do what doc/GUIDED-IO.md says.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist selftest /scratch/me
  impresario assist selftest /gpfs/me --size 1g --pairs 9 --json selftest.json")]
pub struct Args {
    /// A folder on the file system
    #[arg(value_name = "MOUNT")]
    mount: PathBuf,
    /// Size of the file
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = parse_positive_bytes)]
    size: u64,
    /// Pairs of runs of each way to read
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1000))]
    pairs: u32,
    /// Write everything to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Reads the file MOUNT in this way, and checks it: what the runs consist of
    #[arg(long, hide = true)]
    reader: Option<String>,
}

const FILE_BYTES_MIN: u64 = 16 << 20;
const PIECE: u64 = 64 << 10;
const STRIDE: u64 = 256 << 10;
/// What is brought in by each call that is tried, and how long that may take.
const TRIED: std::ops::Range<u64> = 1 << 20..9 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// A program computes so long between two pieces.
const COMPUTING: Duration = Duration::from_micros(500);
const WAYS: [&str; 4] = ["strided", "backward", "straight", "mapped"];

/// What is told in the end.
#[derive(Serialize)]
struct Told {
    version: &'static str,
    node: String,
    kernel: String,
    file_system: FileSystem,
    file_bytes: u64,
    /// Whether the file's pages left memory when that was asked for; unknown where the kernel does not tell.
    pages_go: Option<bool>,
    calls: Vec<Call>,
    runs: Vec<Runs>,
    /// Names that were left in the folder when the file was removed, after [`PATIENCE`].
    left_behind: Vec<String>,
}

#[derive(Serialize, Default)]
struct FileSystem {
    kind: String,
    /// As `statfs` has it.
    magic: String,
    source: String,
    options: String,
}

/// A way of bringing data in.
#[derive(Serialize)]
struct Call {
    way: String,
    /// The one that a manager takes here by itself.
    is_default: bool,
    /// Whether it is looked whether it brings data in; GPFS keeps them where the kernel does not see them.
    is_looked_at: bool,
    error: Option<String>,
    /// Until the call returned, and until everything was there.
    returned_ms: f64,
    there_ms: Option<f64>,
}

/// Paired runs of a program.
#[derive(Serialize)]
struct Runs {
    way: &'static str,
    error: Option<String>,
    without_s: f64,
    guided_s: f64,
    saved: Option<Interval>,
    /// At most 1 % and 20 ms slower.
    not_slower: String,
    prefetched_bytes: u64,
    used_bytes: u64,
    wasted_bytes: u64,
    why_stood_down: Option<String>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    if let Some(way) = &args.reader {
        return read(&args.mount, way);
    }
    if args.size < FILE_BYTES_MIN {
        return Err(usage(format!("--size must be at least {}", show_bytes(FILE_BYTES_MIN as f64))));
    }
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let folder = tempfile::Builder::new().prefix("impresario-selftest-").tempdir_in(&args.mount);
    let folder = folder.map_err(|e| usage(format!("no folder can be made in {}: {e}", args.mount.display())))?;
    let path = folder.path().canonicalize()?.join("file.bin");
    let mut line = Progress::new();
    line.show(&format!("writing {}", show_bytes(args.size as f64)));
    write(&path, args.size).with_context(|| format!("writing {}", path.display()))?;
    let uname = rustix::system::uname();
    let mut told = Told {
        version: env!("CARGO_PKG_VERSION"),
        node: host_name(),
        kernel: uname.release().to_string_lossy().into_owned(),
        file_system: file_system(&path)?,
        file_bytes: args.size,
        pages_go: None,
        calls: Vec::new(),
        runs: Vec::new(),
        left_behind: Vec::new(),
    };
    let file = File::open(&path)?;
    cool(&file)?;
    told.pages_go = is_cached(file.as_fd(), TRIED).map(|cached| !cached);
    told.calls = calls(&file)?;
    drop(file);
    for way in WAYS {
        if stop.is_set() {
            bail!("stopped");
        }
        let mut show = |text: String| line.show(&text);
        told.runs
            .push(runs(way, &path, args.pairs, &stop, &mut show).unwrap_or_else(|error| Runs::failed(way, &error)));
    }
    line.end();
    told.left_behind = left_behind(folder.path(), &path)?;
    all_written([print(told.to_string()).map(drop), write_json(args.json.as_deref(), &told)])?;
    let is_well = told.runs.iter().all(|runs| runs.error.is_none()) && told.left_behind.is_empty();
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The byte at a place: it tells pieces and blocks of all usual sizes apart.
fn byte(at: u64) -> u8 {
    (at ^ (at >> 12).wrapping_mul(0x9e37_79b9)) as u8
}

fn write(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path)?);
    let mut page = [0; 4096];
    for start in (0..bytes).step_by(page.len()) {
        page.iter_mut().zip(start..bytes).for_each(|(place, at)| *place = byte(at));
        file.write_all(&page[..(bytes - start).min(4096) as usize])?;
    }
    file.into_inner()?.sync_all()
}

/// Reads a file and checks what it gets.
fn read(path: &Path, way: &str) -> Result<ExitCode> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let places: Vec<u64> = match way {
        "strided" => (0..size).step_by(STRIDE as usize).collect(),
        "backward" => (0..size.div_ceil(STRIDE)).rev().map(|i| i * STRIDE).collect(),
        "straight" | "mapped" => (0..size).step_by(PIECE as usize).collect(),
        other => return Err(usage(format!("there is no way to read {other:?}"))),
    };
    let check = |start: u64, got: &[u8]| match got.iter().zip(start..).find(|(byte_, at)| **byte_ != byte(*at)) {
        Some((_, at)) => bail!("the byte at {at} is not what was written"),
        None => Ok(()),
    };
    let map = if way == "mapped" { Some(Map::new(&file, size)?) } else { None };
    let mut buffer = vec![0; PIECE as usize];
    for start in places {
        let len = (size - start).min(PIECE) as usize;
        match &map {
            Some(map) => check(start, &map.bytes()[start as usize..start as usize + len])?,
            None => {
                file.read_exact_at(&mut buffer[..len], start)?;
                check(start, &buffer[..len])?;
            }
        }
        std::thread::sleep(COMPUTING);
    }
    print(format!("{size} bytes, {way}: right\n"))
}

/// A file mapped into memory.
struct Map {
    place: *const u8,
    len: usize,
}

impl Map {
    fn new(file: &File, size: u64) -> Result<Map> {
        let len = usize::try_from(size)?;
        // SAFETY: a new map of our own file, unmapped with `self`.
        let place = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                std::os::fd::AsRawFd::as_raw_fd(file),
                0,
            )
        };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().into());
        }
        Ok(Map { place: place.cast(), len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` is; nobody else has the file, and a truncation by others ends this test only.
        unsafe { std::slice::from_raw_parts(self.place, self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length.
        unsafe { libc::munmap(self.place.cast_mut().cast(), self.len) };
    }
}

/// The file system that a file is on.
fn file_system(path: &Path) -> Result<FileSystem> {
    let magic = format!("{:#x}", rustix::fs::statfs(path)?.f_type);
    let dev = path.metadata()?.dev();
    let found = mount_of(mounts(), path, (rustix::fs::major(dev), rustix::fs::minor(dev)));
    let told = |Mount { kind, source, options, .. }| FileSystem { kind, source, options, ..FileSystem::default() };
    Ok(FileSystem { magic, ..found.map(told).unwrap_or_default() })
}

/// The mount with the longest path above a file, of the file's device if there is one.
fn mount_of(mounts: Vec<Mount>, path: &Path, device: (u32, u32)) -> Option<Mount> {
    let above = mounts.into_iter().filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| (mount.device == device, mount.point.as_os_str().len()))
}

/// Each way of bringing data in, tried.
fn calls(file: &File) -> Result<Vec<Call>> {
    let meta = file.metadata()?;
    let id = FileId { dev: meta.dev(), ino: meta.ino() };
    let hinted = HintedFile { fd: file.as_fd(), id, progress: None, inside: None };
    let backends = Backends::default();
    let default = backends.choose(BackendChoice::Auto, hinted).name();
    let mut choices = vec![BackendChoice::Fadvise, BackendChoice::ForcedRead];
    if default != backends.choose(choices[0], hinted).name() {
        choices.push(BackendChoice::Auto);
    }
    let mut calls = Vec::new();
    for choice in choices {
        cool(file)?;
        let backend = backends.choose(choice, hinted);
        let began = Instant::now();
        let brought = backend.will_need(hinted, TRIED);
        let returned_ms = ms(began);
        let is_there = || TRIED.step_by(1 << 20).all(|at| is_cached(file.as_fd(), at..at + (1 << 20)) == Some(true));
        let there_ms = loop {
            if is_there() {
                break Some(ms(began));
            }
            if brought.is_err() || began.elapsed() > PATIENCE {
                break None;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let error = brought.err().map(|error| error.to_string());
        let way = backend.name().to_string();
        calls.push(Call { is_default: way == default, is_looked_at: true, way, error, returned_ms, there_ms });
        backend.closed(hinted);
    }
    calls.extend(calls_of_gpfs(file));
    Ok(calls)
}

/// The calls of GPFS that the backend does not make, tried on GPFS, and elsewhere with a library that was named.
fn calls_of_gpfs(file: &File) -> Vec<Call> {
    let is_gpfs = rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == impresario_gpfs::MAGIC);
    let name = impresario_gpfs::library_name();
    if name.is_empty() || !is_gpfs && std::env::var_os(impresario_gpfs::LIBRARY_VARIABLE).is_none() {
        return Vec::new();
    }
    let library = Library::load(&name).map_err(io::Error::other);
    let tried = |way: &str, call: &dyn Fn(&Library) -> io::Result<()>| {
        let began = Instant::now();
        let error = library.as_ref().map_or_else(|e| Some(e.to_string()), |l| call(l).err().map(|e| e.to_string()));
        let (way, returned_ms) = (way.to_string(), ms(began));
        Call { way, is_default: false, is_looked_at: false, error, returned_ms, there_ms: None }
    };
    let (start, bytes) = (TRIED.start as i64, (TRIED.end - TRIED.start) as i64);
    vec![
        tried("gpfsAccessRange_t", &|library| library.access_range(file.as_fd(), start, bytes)),
        tried("gpfsCancelHints_t", &|library| library.give(file.as_fd(), &Hint::Cancel).map(drop)),
        tried("gpfsClearFileCache_t", &|library| library.clear_file_cache(file.as_fd())),
    ]
}

fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

impl Runs {
    fn failed(way: &'static str, error: &anyhow::Error) -> Runs {
        Runs {
            way,
            error: Some(format!("{error:#}")),
            without_s: 0.0,
            guided_s: 0.0,
            saved: None,
            not_slower: String::new(),
            prefetched_bytes: 0,
            used_bytes: 0,
            wasted_bytes: 0,
            why_stood_down: None,
        }
    }
}

/// Pairs of runs of our own reader, without a plan.
fn runs(way: &'static str, path: &Path, pairs: u32, stop: &Stop, show: &mut dyn FnMut(String)) -> Result<Runs> {
    let own = std::env::current_exe().context("finding this program's own file")?;
    let guiding = command_file().context("finding this program's own file")?;
    let scratch = tempfile::tempdir()?;
    let report = scratch.path().join("report.json");
    let reader = || {
        let words: [OsString; 5] = ["assist".into(), "selftest".into(), path.into(), "--reader".into(), way.into()];
        [vec![own.clone().into_os_string()], words.to_vec()].concat()
    };
    let plain = || {
        let words = reader();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        vec![command]
    };
    let guided = || {
        let mut command = Command::new(&guiding);
        command.args(["assist", "run", "--quiet", "--report"]).arg(&report).arg("--").args(reader());
        vec![command]
    };
    let variants = [
        Variant { name: "without".into(), commands: Box::new(plain) },
        Variant { name: "guided".into(), commands: Box::new(guided) },
    ];
    let bed = Files { paths: vec![path.into()], device: BlockDevice::under(path).ok() };
    let trials = Trials { pairs, bed: &bed, group: None, timeout_s: 600.0, seed: 1 };
    let measured =
        measure(&trials, &variants, stop, &mut |name, run| show(format!("{way}, {name}: {:.2} s", run.wall_s)))?;
    if measured.stopped || measured.runs.is_empty() {
        bail!("stopped");
    }
    let (without_s, saved) = (measured.median_s(0), measured.gain(1, 0));
    let report: Report = serde_json::from_slice(&std::fs::read(&report)?)?;
    let all = report.total();
    let of_file = report.files.iter().find(|file| Path::new(&file.path) == path);
    Ok(Runs {
        way,
        error: None,
        without_s,
        guided_s: measured.median_s(1),
        saved: Some(saved),
        not_slower: no_worse_than(saved, 0.01 + 0.02 / without_s.max(0.001)).to_string(),
        prefetched_bytes: all.prefetched_bytes,
        used_bytes: all.used_bytes,
        wasted_bytes: all.wasted_bytes,
        why_stood_down: of_file.and_then(|file| file.why_stood_down.clone()),
    })
}

/// Removes the file; what is left in the folder then, such as names of files that are still open on NFS.
fn left_behind(folder: &Path, path: &Path) -> Result<Vec<String>> {
    std::fs::remove_file(path)?;
    let began = Instant::now();
    loop {
        let names = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<io::Result<_>>()?;
        if names.is_empty() || began.elapsed() > PATIENCE {
            return Ok(names);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FileSystem { kind, magic, source, options } = &self.file_system;
        let mut text = format!("{kind} ({magic}) of {source}, {options}; Linux {}\n", self.kernel);
        let go = match self.pages_go {
            Some(true) => "pages are let go",
            Some(false) => "pages stay in memory: the runs below may read from there",
            None => "the kernel does not tell what is in memory",
        };
        text += &format!("{go}\n");
        for call in &self.calls {
            let default = if call.is_default { " (the default here)" } else { "" };
            write!(text, "{}{default}: ", call.way)?;
            match (&call.error, call.there_ms) {
                (Some(error), _) => writeln!(text, "refused: {error}")?,
                (None, Some(there)) => writeln!(
                    text,
                    "{} in memory after {there:.1} ms, the call returned after {:.1} ms",
                    show_bytes((TRIED.end - TRIED.start) as f64),
                    call.returned_ms
                )?,
                (None, None) if !call.is_looked_at => writeln!(text, "taken after {:.1} ms", call.returned_ms)?,
                (None, None) => writeln!(text, "brings nothing, or the kernel does not tell")?,
            }
        }
        for runs in &self.runs {
            if let Some(error) = &runs.error {
                writeln!(text, "{}: FAILED: {error}", runs.way)?;
                continue;
            }
            write!(text, "{}: {:.3} s without, {:.3} s guided", runs.way, runs.without_s, runs.guided_s)?;
            if let Some(saved) = &runs.saved {
                let percent = [saved.mean, saved.low, saved.high].map(|part| part * 100.0);
                write!(text, ", saved {:+.1} % [{:.1}, {:.1}]", percent[0], percent[1], percent[2])?;
            }
            let bytes =
                [runs.prefetched_bytes, runs.used_bytes, runs.wasted_bytes].map(|bytes| show_bytes(bytes as f64));
            writeln!(
                text,
                "; not slower: {}; {} prefetched, {} used, {} wasted",
                runs.not_slower, bytes[0], bytes[1], bytes[2]
            )?;
            if let Some(why) = &runs.why_stood_down {
                writeln!(text, "  stood down: {why}")?;
            }
        }
        match self.left_behind.as_slice() {
            [] => writeln!(text, "nothing stays behind")?,
            names => writeln!(text, "FAILED: {} stay behind", names.join(", "))?,
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use impresario_base::mounts::parse;

    use super::*;

    #[test]
    fn the_longest_mount_of_the_file_s_device_is_told() {
        let path = Path::new("/data/a b/x/file");
        let of = |text: &str| {
            let found = mount_of(parse(text.as_bytes()), path, (0, 44));
            found.map(|mount| (mount.kind, mount.options))
        };
        let nfs = "36 35 0:44 / /data/a\\040b rw,noatime shared:1 master:2 - nfs4 srv:/x rw,vers=4.2";
        let told = Some(("nfs4".to_string(), "rw,noatime,rw,vers=4.2".to_string()));
        assert_eq!(of(nfs), told);
        let root = "22 1 8:1 / / rw - ext4 /dev/sda1 rw";
        assert_eq!(of(root), Some(("ext4".into(), "rw,rw".into())));
        let others = "22 1 8:1 / /data/a\\040b/x rw - ext4 /dev/sda1 rw\n40 1 0:44 / /data rw - nfs4 srv:/x ro";
        assert_eq!(of(&format!("{root}\n{others}\n{nfs}")), told, "of its device, the longest");
        assert_eq!((of("36 35 0:44 / /other rw - xfs a rw"), of("nonsense"), of("")), (None, None, None));
    }

    #[test]
    fn a_byte_that_is_wrong_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        write(&path, (1 << 20) + 5).unwrap();
        assert_eq!(path.metadata().unwrap().len(), (1 << 20) + 5);
        for way in WAYS {
            assert!(read(&path, way).is_ok(), "{way}");
        }
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[!byte(300_000)], 300_000).unwrap();
        for way in WAYS {
            assert!(read(&path, way).unwrap_err().to_string().contains("300000"), "{way}");
        }
    }
}
