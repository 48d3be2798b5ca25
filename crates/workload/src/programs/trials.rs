//! Paired runs of whole programs, each from a cold cache: time, device requests, and whether all variants printed the
//! same.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::block::{BlockDevice, Counts, drop_caches};
use super::limits::Group;
use crate::rounds::shuffled;
use crate::stats::{Interval, gains, median};
use crate::stop::Stop;
use impresario_base::Random;
use impresario_gpfs::Library;

/// Where the programs read from.
pub trait TestBed {
    /// Makes the next run start cold.
    fn cool(&self) -> Result<()>;
    /// The device's counters so far.
    fn counts(&self) -> Result<Counts>;
}

/// The whole machine drops its page cache before each run. Needs root.
#[derive(Clone, PartialEq, Debug)]
pub struct Machine {
    /// The device whose requests are counted; absent: none are.
    pub device: Option<BlockDevice>,
}

impl TestBed for Machine {
    fn cool(&self) -> Result<()> {
        drop_caches()
    }

    fn counts(&self) -> Result<Counts> {
        self.device.as_ref().map_or(Ok(Counts::default()), BlockDevice::counts)
    }
}

/// Files dropped from the page cache before each run, unless another program maps or writes them: for users without
/// root.
#[derive(Clone, PartialEq, Debug)]
pub struct Files {
    /// The files.
    pub paths: Vec<PathBuf>,
    /// The device whose requests are counted; absent: none are.
    pub device: Option<BlockDevice>,
}

impl TestBed for Files {
    fn cool(&self) -> Result<()> {
        forget(&self.paths)
    }

    fn counts(&self) -> Result<Counts> {
        self.device.as_ref().map_or(Ok(Counts::default()), BlockDevice::counts)
    }
}

/// One way to run the program.
pub struct Variant<'a> {
    /// For tables.
    pub name: String,
    /// Makes the command of the next run; several are run at the same time.
    pub commands: Box<dyn Fn() -> Vec<Command> + 'a>,
}

/// Maximum repetitions of a variant whose programs the kernel killed for lack of memory.
const KILLED_MAX: u32 = 20;

/// How the runs are made.
pub struct Trials<'a> {
    /// Runs of every variant.
    pub pairs: u32,
    /// Where the programs read from.
    pub bed: &'a dyn TestBed,
    /// Where the programs run.
    pub group: Option<&'a Group>,
    /// A run that takes longer is killed and fails, s.
    pub timeout_s: f64,
    /// Of the order within pairs.
    pub seed: u64,
}

/// One run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Index of the variant.
    pub variant: usize,
    /// Number of the pair, from 0.
    pub pair: u32,
    /// From start to end of the last program, s.
    pub wall_s: f64,
    /// Reads that reached the device.
    pub device_reads: u64,
    /// Bytes read from the device.
    pub device_bytes: u64,
}

/// All runs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Names of the variants.
    pub variants: Vec<String>,
    /// Every run.
    pub runs: Vec<Run>,
    /// Runs of each variant that the kernel killed for lack of memory and that were repeated.
    #[serde(default)]
    pub killed: Vec<u32>,
    /// It was stopped early; the unfinished pair is left out.
    pub stopped: bool,
}

impl Measured {
    /// What `of` says of the runs of a variant, in the order of the pairs.
    pub fn values(&self, variant: usize, of: impl Fn(&Run) -> f64) -> Vec<f64> {
        self.runs.iter().filter(|r| r.variant == variant).map(of).collect()
    }

    /// Median time of a variant, s.
    pub fn median_s(&self, variant: usize) -> f64 {
        median(&self.values(variant, |r| r.wall_s))
    }

    /// Median number of device reads of a variant.
    pub fn median_reads(&self, variant: usize) -> f64 {
        median(&self.values(variant, |r| r.device_reads as f64))
    }

    /// Median of the bytes that a variant read from the device.
    pub fn median_bytes(&self, variant: usize) -> f64 {
        median(&self.values(variant, |r| r.device_bytes as f64))
    }

    /// A line for each variant that was killed.
    pub fn kills(&self) -> Vec<String> {
        let line = |(name, n): (&String, &u32)| {
            format!("{name}: {n} more runs were ended by the kernel for want of memory and made again")
        };
        self.variants.iter().zip(&self.killed).filter(|(_, n)| **n > 0).map(line).collect()
    }

    /// 1 − T_new / T_base in each pair: mean and 95 % interval.
    pub fn gain(&self, new: usize, base: usize) -> Interval {
        Interval::of(&gains(&self.values(new, |r| r.wall_s), &self.values(base, |r| r.wall_s)))
    }
}

/// Runs every variant `pairs` times, in random order within a pair, and calls `progress` after each run. All must
/// succeed and print the same. If the group's memory is limited, a run in which the kernel kills a program for lack of
/// memory is repeated and counted.
pub fn measure(
    trials: &Trials,
    variants: &[Variant],
    stop: &Stop,
    progress: &mut dyn FnMut(&str, &Run),
) -> Result<Measured> {
    let mut random = Random::new(trials.seed);
    let mut measured = Measured {
        variants: variants.iter().map(|v| v.name.clone()).collect(),
        runs: Vec::new(),
        killed: vec![0; variants.len()],
        stopped: false,
    };
    let mut printed: Option<(u64, String)> = None;
    for pair in 0..trials.pairs {
        let mut runs = Vec::new();
        for variant in shuffled(variants.len(), &mut random) {
            let v = &variants[variant];
            let (run, output) = loop {
                match one(trials, v, variant, pair, stop)? {
                    Ended::Well(run, output) => break (run, output),
                    Ended::Stopped => {
                        measured.stopped = true;
                        return Ok(measured);
                    }
                    Ended::Killed if measured.killed[variant] == KILLED_MAX => {
                        bail!("{:?}: the kernel ended {KILLED_MAX} runs for want of memory; allow more", v.name)
                    }
                    Ended::Killed => measured.killed[variant] += 1,
                }
            };
            match &printed {
                None => printed = Some((output, v.name.clone())),
                Some((first, name)) if *first != output => {
                    bail!(
                        "the program printed something else as {:?} than as {name:?}: the runs cannot be compared",
                        v.name
                    )
                }
                Some(_) => {}
            }
            progress(&v.name, &run);
            runs.push(run);
        }
        measured.runs.extend(runs);
    }
    Ok(measured)
}

/// How a run ended.
enum Ended {
    /// The run and a fingerprint of what its programs printed.
    Well(Run, u64),
    /// The kernel killed a program because the group's memory was used up.
    Killed,
    /// The run was stopped.
    Stopped,
}

fn one(trials: &Trials, v: &Variant, variant: usize, pair: u32, stop: &Stop) -> Result<Ended> {
    if stop.is_set() {
        return Ok(Ended::Stopped);
    }
    trials.bed.cool()?;
    let before = trials.bed.counts()?;
    let kills = || trials.group.map_or(0, Group::killed_for_memory);
    let killed_before = kills();
    let started = Instant::now();
    let mut programs = Programs(Vec::new());
    for command in (v.commands)() {
        programs.start(command, trials.group)?;
    }
    let deadline = started + Duration::try_from_secs_f64(trials.timeout_s).unwrap_or(Duration::from_secs(3600));
    let mut output = DefaultHasher::new();
    for (child, printed) in &mut programs.0 {
        let Some(status) = wait(child, deadline, stop)? else { return Ok(Ended::Stopped) };
        if kills() > killed_before {
            return Ok(Ended::Killed);
        }
        if !status.success() {
            bail!("{:?}: the program ended with {}", v.name, describe(status));
        }
        printed.seek(SeekFrom::Start(0))?;
        let mut text = Vec::new();
        printed.read_to_end(&mut text)?;
        output.write(&text);
    }
    let wall_s = started.elapsed().as_secs_f64();
    let counts = trials.bed.counts()?.since(before);
    let run = Run { variant, pair, wall_s, device_reads: counts.reads, device_bytes: counts.read_bytes };
    Ok(Ended::Well(run, output.finish()))
}

/// The programs of one run with their output; killed with their children if dropped before they end.
struct Programs(Vec<(Child, File)>);

impl Programs {
    fn start(&mut self, mut command: Command, group: Option<&Group>) -> Result<()> {
        if let Some(group) = group {
            command = group.enter(&command);
        }
        let printed = tempfile::tempfile().context("making a file for what the program prints")?;
        command.stdin(Stdio::null()).stdout(printed.try_clone()?).process_group(0);
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("starting {program}"))?;
        self.0.push((child, printed));
        Ok(())
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            if matches!(child.try_wait(), Ok(None)) {
                if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
                    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                }
                let _ = child.wait();
            }
        }
    }
}

/// Waits for the end of a program; `None` if the run was stopped.
fn wait(child: &mut Child, deadline: Instant, stop: &Stop) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if stop.is_set() {
            return Ok(None);
        }
        if Instant::now() > deadline {
            bail!("the program had not ended when its time was over; give more with --timeout");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => format!("exit status {}", status.code().unwrap_or(-1)),
    }
}

/// Drops files from the page cache as far as the kernel allows.
fn forget(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        cool(&file).with_context(|| format!("taking {} out of the page cache", path.display()))?;
    }
    Ok(())
}

/// Lets a file's data leave memory, as far as the kernel allows, and on GPFS its library, if it can be loaded: GPFS keeps data
/// in memory of its own.
///
/// # Errors
/// Where the kernel or GPFS refuses.
pub fn cool(file: &File) -> io::Result<()> {
    let _ = file.sync_data(); // dirty pages would stay; a file system that cannot sync still lets go of clean ones
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    static GPFS: OnceLock<Option<Library>> = OnceLock::new();
    let is_gpfs = rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type as u64 == impresario_gpfs::MAGIC);
    if !is_gpfs {
        return Ok(());
    }
    let library = GPFS.get_or_init(|| {
        let name = impresario_gpfs::library_name();
        if name.is_empty() { None } else { Library::load(&name).ok() }
    });
    library.as_ref().map_or(Ok(()), |library| library.clear_file_cache(file.as_fd()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::limits::Limits;
    use super::*;

    fn variant<'a>(name: &str, script: &'a str) -> Variant<'a> {
        let commands = move || {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            vec![command]
        };
        Variant { name: name.into(), commands: Box::new(commands) }
    }

    static NOWHERE: Files = Files { paths: Vec::new(), device: None };

    fn trials(pairs: u32, timeout_s: f64) -> Trials<'static> {
        Trials { pairs, bed: &NOWHERE, group: None, timeout_s, seed: 1 }
    }

    #[test]
    fn pairs_are_complete_and_gains_are_taken_within_them() {
        let variants = [variant("slow", "sleep 0.05; echo 1"), variant("fast", "echo 1")];
        let mut calls = 0;
        let m = measure(&trials(3, 10.0), &variants, &Stop::new(), &mut |_, _| calls += 1).unwrap();
        assert_eq!((calls, m.runs.len(), m.stopped), (6, 6, false));
        assert_eq!(m.values(0, |_| 0.0).len(), 3);
        assert_eq!(m.gain(1, 0).n, 3);
    }

    #[test]
    fn failures_and_other_output_are_errors() {
        let fail = |a: &str, b: &str| {
            let stop = Stop::new();
            measure(&trials(2, 0.3), &[variant("a", a), variant("b", b)], &stop, &mut |_, _| ())
                .unwrap_err()
                .to_string()
        };
        assert!(fail("echo 1", "echo 2").contains("something else"));
        assert!(fail("exit 3", "exit 3").contains("exit status 3"));
        assert!(fail("kill -9 $$", "kill -9 $$").contains("signal 9"));
        assert!(fail("sleep 30", "sleep 30").contains("had not ended"));
    }

    #[test]
    fn runs_killed_for_want_of_memory_are_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let limits = Limits { memory_bytes: 48 << 20, ..Limits::default() };
        let name = format!("impresario-test-{}", std::process::id());
        let device = BlockDevice::under(Path::new(env!("CARGO_MANIFEST_DIR"))).ok();
        let Some(group) = device.and_then(|device| Group::new(&name, Some(&device), limits).ok()) else {
            return impresario_testing::skip("cgroups", "no control group with a limit of memory can be made here");
        };
        let script = format!(
            "if mkdir '{}/first' 2> /dev/null; then text=$(head -c 200000000 /dev/zero | tr '\\0' a); fi; echo 1",
            dir.path().display()
        );
        let stop = Stop::new();
        let trials = Trials { group: Some(&group), ..trials(2, 30.0) };
        let m =
            measure(&trials, &[variant("large", &script), variant("small", "echo 1")], &stop, &mut |_, _| ()).unwrap();
        assert_eq!((m.killed.as_slice(), m.runs.len()), (&[1, 0][..], 4));
        assert!(m.kills()[0].starts_with("large: 1 more"), "{:?}", m.kills());
    }

    #[test]
    fn a_wish_to_stop_leaves_the_whole_pairs() {
        let stop = Stop::new();
        let variants = [variant("a", "true"), variant("b", "true")];
        let mut runs = 0;
        let m = measure(&trials(100, 10.0), &variants, &stop, &mut |_, _| {
            runs += 1;
            if runs == 3 {
                stop.set();
            }
        });
        let m = m.unwrap();
        assert!(m.stopped);
        assert_eq!(m.runs.len(), 2);
    }
}
