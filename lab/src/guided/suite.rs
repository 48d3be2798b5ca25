//! The experiments of guided I/O: what `impresario-lab guided` runs. Each records a program once, plans hints from
//! that run, and then compares runs with and without them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use impresario_trace::{Record, Trace, TraceOp};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::beds::SLOW;
use super::modelled::ModelledDisk;
use super::slow_mount::{SlowMount, Slowness};
use impresario_workload::kernel_disk::{LoopDisk, tool};
use impresario_workload::programs::{
    BlockDevice, Group, Limits, Machine, Measured, Run, TestBed, Trials, Variant, measure,
};
use impresario_workload::stats::{Interval, Verdict, at_least, no_worse_than};
use impresario_workload::stop::Stop;

/// Pairs of runs of each experiment where nothing is said, and of `sizes`: the paper has three runs.
pub const PAIRS: [u32; 2] = [9, 3];

/// The paper's input files, GB (§IV.C: from 5 to 95), and the memory of its clients, GB (§IV.A).
const PAPER_FILES_GB: [u64; 5] = [5, 15, 35, 55, 95];
const PAPER_MEMORY_GB: u64 = 16;
/// What a gigabyte of the paper's is here, of files and of memory: one 128th.
const SCALED_GB_BYTES: u64 = 1_000_000_000 / 128;
/// The paper's hints for its input file (§IV.C). Blocks have the size that they have there: what a request costs is not scaled.
const PAPER_HINTS: &str =
    r#""BlockSize": 4194304, "CacheSize": 8, "ReadAheadSize": 4, "WillNeed": [{"Offset": 0, "Length": 0}]"#;

/// What the paper says of some of the experiments. Its text has these figures; those of the single bars are in images only.
pub const PAPER: [(&str, &str); 3] = [
    (
        "sizes",
        "up to about 50 % less time on ext4 and Lustre, on average up to 10 % on GPFS (Figs. 6a–c), and substantially fewer \
         reads (Figs. 7a–c)",
    ),
    ("instances", "less time on each file system, the less the more programs except on ext4 (Figs. 6d–f)"),
    (
        "strategies",
        "one hint for the whole file is of less use than MERCURY where it is larger than the cache (Fig. 5)",
    ),
];

/// What to run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Experiments by name; empty: all.
    pub only: Vec<String>,
    /// Pairs of runs of each; absent: [`PAIRS`].
    pub pairs: Option<u32>,
    /// The Python with uproot and h5py; absent: experiments that need it are left out, and said to be.
    pub python: Option<PathBuf>,
    /// Where the disks of the measurements are made.
    pub folder: PathBuf,
}

/// What an experiment claims.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Claim {
    /// The time falls by at least this share.
    FasterBy(f64),
    /// The time grows by no more than this share.
    NoSlowerThan(f64),
    /// Device reads fall to at most this share.
    ReadsAtMost(f64),
    /// Bytes read from the device are at most this many times those of the first row of the same experiment.
    BytesAtMost(f64),
}

/// A comparison.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Experiment it belongs to.
    pub experiment: String,
    /// In words: program, file, disk.
    pub title: String,
    /// Programs that ran at the same time.
    pub instances: u32,
    /// The runs.
    pub measured: Measured,
    /// Gain of the last variant over the first.
    pub gain: Interval,
    /// What the planner said.
    pub plan: String,
    /// The recorded run's reads of the file that it read most of.
    #[serde(default)]
    pub profile: Profile,
    /// Claims and verdicts.
    pub claims: Vec<(String, Verdict)>,
}

/// Reads of one file over time.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Profile {
    /// How many there were, and their bytes.
    pub reads: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// When each began and how long it took, s, and its place in the file; at most [`PROFILE_READS_MAX`], evenly chosen.
    pub at: Vec<(f64, f64, u64)>,
}

/// Reads of a profile that are kept.
pub const PROFILE_READS_MAX: usize = 4000;

impl Profile {
    fn of(trace: &Trace) -> Profile {
        let read = |r: &&Record| r.op == TraceOp::Read && r.moved_bytes() > 0;
        let mut bytes = vec![0u64; trace.files.len()];
        for r in trace.records.iter().filter(read) {
            bytes[r.file.0 as usize] += r.moved_bytes();
        }
        let Some((file, bytes)) = bytes.into_iter().enumerate().max_by_key(|(_, bytes)| *bytes) else {
            return Profile::default();
        };
        let own: Vec<&Record> = trace.records.iter().filter(read).filter(|r| r.file.0 as usize == file).collect();
        let begin = own.first().map_or(0, |r| r.arrival.0);
        let seconds = |ns: u64| ns as f64 / 1e9;
        let at = |r: &&Record| (seconds(r.arrival.0 - begin), seconds(r.duration.map_or(0, |d| d.0)), r.offset);
        let step = own.len().div_ceil(PROFILE_READS_MAX).max(1);
        Profile { reads: own.len() as u64, bytes, at: own.iter().step_by(step).map(at).collect() }
    }
}

/// Names of the experiments with what they show.
pub const EXPERIMENTS: [(&str, &str); 9] = [
    ("strided", "512 MB, 250 KiB reads with gaps of 250 KiB, 0.5 ms of computing, slow disk"),
    ("root", "a ROOT file of 512 MB in baskets of 64 kB read by uproot, one branch of eight, slow disk"),
    ("root-shuffled", "the same with baskets out of order"),
    ("hdf5", "an HDF5 file of 512 MiB in chunks of 64 KiB read by h5py, one column of four, slow disk"),
    ("fast", "the same programs on the bare disk of this machine"),
    ("instances", "1 to 8 programs on the same file, slow disk"),
    ("modelled", "the ROOT file on the modelled 7200 rpm disk, mounted: two branches out of order, one, one in order"),
    ("strategies", "a file larger than the memory allowed: no hint, one for the whole file, ours; slow disk"),
    (
        "sizes",
        "strided files as long as the paper's of 5 to 95 GB beside 16 GB of memory, at 1:128, on the modelled disk and the \
         latency-bound mount: no hint, the paper's hints, ours",
    ),
];

/// The ROOT file: branches, baskets of each, bytes of a basket.
const ROOT: [&str; 3] = ["8", "1000", "64000"];

struct Program {
    name: &'static str,
    words: Vec<String>,
}

impl Program {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command
    }

    /// The same under `impresario assist`, with what comes before the program.
    fn assisted(&self, words: &[&str]) -> Result<Command> {
        let mut command = Command::new(crate::impresario()?);
        command.arg("assist").args(words).arg("--").args(&self.words);
        Ok(command)
    }
}

/// Runs the experiments; `say` gets lines of progress. Returns the rows, and how many are missing because a program did not
/// get through: those of others are not lost for it.
pub fn run(options: &Options, stop: &Stop, say: &mut dyn FnMut(&str)) -> Result<(Vec<Row>, usize)> {
    for name in &options.only {
        if !EXPERIMENTS.iter().any(|(known, _)| known == name) {
            let names: Vec<_> = EXPERIMENTS.iter().map(|(n, _)| *n).collect();
            bail!("there is no experiment {name:?}; there are: {}", names.join(", "));
        }
    }
    if !rustix::process::geteuid().is_root() {
        bail!("these measurements make a disk of their own and empty the page cache: run them as root");
    }
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|n| n == name);
    let mut suite =
        Suite { options, stop, say, folder: tempfile::tempdir_in(&options.folder)?, rows: Vec::new(), missing: 0 };
    if ["strided", "instances", "strategies", "sizes", "fast"].into_iter().any(wanted) {
        suite.strided(&wanted)?;
    }
    if ["root", "root-shuffled", "hdf5", "modelled", "fast"].into_iter().any(wanted) {
        suite.python(&wanted)?;
    }
    Ok((suite.rows, suite.missing))
}

/// One program on one bed.
#[derive(Clone, Copy)]
struct Case<'a> {
    experiment: &'static str,
    program: &'a Program,
    bed: &'a dyn TestBed,
    group: Option<&'a Group>,
    /// Programs at a time.
    instances: u32,
}

struct Suite<'a> {
    options: &'a Options,
    stop: &'a Stop,
    say: &'a mut dyn FnMut(&str),
    folder: TempDir,
    rows: Vec<Row>,
    missing: usize,
}

impl Suite<'_> {
    fn strided(&mut self, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let source = self.folder.path().join("strided.c");
        let binary = self.folder.path().join("strided");
        fs::write(&source, include_str!("programs/strided.c"))?;
        tool(Command::new("cc").args(["-O2", "-o"]).arg(&binary).arg(&source))?;
        let program = |file: &Path| Program {
            name: "strided",
            words: [binary.to_string_lossy(), file.to_string_lossy(), "256000".into(), "256000".into(), "500".into()]
                .map(|word| word.into_owned())
                .to_vec(),
        };
        if wanted("strided") || wanted("instances") || wanted("strategies") {
            let disk = LoopDisk::new(&self.options.folder, 800_000_000)?;
            let file = disk.path().join("data");
            fill(&file, 512_000_000)?;
            let p = program(&file);
            if wanted("strided") {
                let claims = [Claim::FasterBy(0.45), Claim::ReadsAtMost(0.5)];
                let group = group(Some(&disk.device()?), SLOW)?;
                let bed = machine(disk.device()?);
                let case = Case { experiment: "strided", program: &p, bed: &bed, group: Some(&group), instances: 1 };
                self.compare(&case, &claims)?;
            }
            if wanted("instances") {
                for instances in [1, 2, 4, 8] {
                    let claims: &[Claim] = &[Claim::FasterBy(0.0), Claim::BytesAtMost(1.1)];
                    let group = group(Some(&disk.device()?), SLOW)?;
                    let bed = machine(disk.device()?);
                    let case = Case { experiment: "instances", program: &p, bed: &bed, group: Some(&group), instances };
                    self.compare(&case, claims)?;
                }
            }
            if wanted("strategies") {
                let limits = Limits { memory_bytes: 256 << 20, ..SLOW };
                let done = self.strategies(&p, &file, &disk.device()?, limits);
                self.kept("strategies", done)?;
            }
        }
        if wanted("sizes") {
            let done = self.sizes(&program);
            self.kept("sizes", done)?;
        }
        if wanted("fast") {
            let file = self.folder.path().join("data");
            fill(&file, 512_000_000)?;
            let device = BlockDevice::under(&file)?;
            let (program, bed) = (program(&file), machine(device));
            let case = Case { experiment: "fast", program: &program, bed: &bed, group: None, instances: 1 };
            self.compare(&case, &[Claim::NoSlowerThan(0.02)])?;
        }
        Ok(())
    }

    fn python(&mut self, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let Some(python) = self.options.python.clone() else {
            (self.say)("without --python the experiments root, root-shuffled, hdf5 and modelled are left out");
            return Ok(());
        };
        let scripts = [
            ("root_write.py", include_str!("programs/root_write.py")),
            ("root_read.py", include_str!("programs/root_read.py")),
            ("hdf5_write.py", include_str!("programs/hdf5_write.py")),
            ("hdf5_read.py", include_str!("programs/hdf5_read.py")),
        ];
        for (name, text) in scripts {
            fs::write(self.folder.path().join(name), text)?;
        }
        let scripts = self.folder.path().to_path_buf();
        let words = |script: &str, file: &Path, more: &[&str]| {
            let script = scripts.join(script);
            let mut words = vec![python.to_string_lossy().into_owned(), script.to_string_lossy().into_owned()];
            words.push(file.to_string_lossy().into_owned());
            words.extend(more.iter().map(|word| word.to_string()));
            words
        };
        let slow = if wanted("root") || wanted("root-shuffled") || wanted("hdf5") {
            Some(LoopDisk::new(&self.options.folder, 2_400_000_000)?)
        } else {
            None
        };
        if wanted("modelled") {
            let disk = ModelledDisk::new(self.stop)?;
            let (local, file) = (self.folder.path().join("events.root"), disk.path().join("events.root"));
            (self.say)("writing a ROOT file to the modelled disk");
            tool(&mut Program { name: "root", words: words("root_write.py", &local, &ROOT) }.command())?;
            copy(&local, &file, fs::metadata(&local)?.len())?;
            // A drive passes over gaps as fast as it reads: only what is out of order costs it more than the whole file.
            let two: (&[&str], &[Claim]) = (&["shuffled", "x0,x4"], &[Claim::FasterBy(0.5)]);
            let one: (&[&str], &[Claim]) = (&["shuffled"], &[Claim::FasterBy(0.0)]);
            let forward: (&[&str], &[Claim]) = (&["forward"], &[Claim::NoSlowerThan(0.02)]);
            for (of_reader, claims) in [two, one, forward] {
                let program = Program { name: "root", words: words("root_read.py", &file, of_reader) };
                let case = Case { experiment: "modelled", program: &program, bed: &disk, group: None, instances: 1 };
                self.compare(&case, claims)?;
            }
        }
        for fast in [false, true] {
            if fast && !wanted("fast") {
                continue;
            }
            let folder = match &slow {
                Some(disk) if !fast => disk.path().to_path_buf(),
                None if !fast => continue,
                _ => self.folder.path().to_path_buf(),
            };
            let (root, hdf5) = (folder.join("events.root"), folder.join("field.h5"));
            let cases = [
                ("root", "root_write.py", "root_read.py", &root, &ROOT[..], &[][..]),
                ("root-shuffled", "root_write.py", "root_read.py", &root, &ROOT, &["shuffled"]),
                ("hdf5", "hdf5_write.py", "hdf5_read.py", &hdf5, &["2048", "4", "65536"], &[]),
            ];
            for (name, writer, reader, file, of_writer, of_reader) in cases {
                if !fast && !wanted(name) {
                    continue;
                }
                if !file.exists() {
                    (self.say)(&format!("writing {}", file.display()));
                    tool(&mut Program { name, words: words(writer, file, of_writer) }.command())?;
                }
                let program = Program { name, words: words(reader, file, of_reader) };
                let claims = if fast { [Claim::NoSlowerThan(0.02)] } else { [Claim::FasterBy(0.40)] };
                let device = BlockDevice::under(file)?;
                let group = if fast { None } else { Some(group(Some(&device), SLOW)?) };
                let (experiment, bed) = (if fast { "fast" } else { name }, machine(device));
                let case = Case { experiment, program: &program, bed: &bed, group: group.as_ref(), instances: 1 };
                self.compare(&case, &claims)?;
            }
        }
        Ok(())
    }

    /// Reports an experiment that failed and leaves it out, unless all are to stop.
    fn kept(&mut self, experiment: &str, done: Result<()>) -> Result<()> {
        let Err(error) = done else { return Ok(()) };
        if self.stop.is_set() {
            return Err(error);
        }
        self.missing += 1;
        (self.say)(&format!("{experiment}: {error:#}; its row is missing"));
        Ok(())
    }

    /// Records and plans, then compares runs without hints and with them. A failure costs only its row.
    fn compare(&mut self, case: &Case<'_>, claims: &[Claim]) -> Result<()> {
        let Case { experiment, program, instances, .. } = *case;
        let first = self.rows.iter().find(|r| r.experiment == experiment).map(|r| r.measured.median_bytes(1));
        let without = Variant {
            name: "without".into(),
            commands: Box::new(move || (0..instances).map(|_| program.command()).collect()),
        };
        let judge_all = |measured: &Measured| {
            let gain = measured.gain(1, 0);
            claims.iter().map(|claim| judge(*claim, measured, gain, first)).collect()
        };
        let done = self.measure(case, vec![without], program.words.join(" "), judge_all);
        self.kept(experiment, done)
    }

    /// One recorded run and the plan from it; then `others` against the guided program, a row.
    fn measure<'c>(
        &mut self,
        case: &Case<'c>,
        others: Vec<Variant<'c>>,
        title: String,
        judge: impl FnOnce(&Measured) -> Vec<(String, Verdict)>,
    ) -> Result<()> {
        self.stop.check()?;
        let Case { experiment, program, bed, group, instances } = *case;
        let (hints, plan, profile) = self.plan(program, bed, group)?;
        let hints = hints.to_string_lossy().into_owned();
        // All instances share one advice manager, as on a node: it starts them.
        let commands = move || program.assisted(&["run", &hints, "--instances", &instances.to_string()]).into_iter();
        let guided = Variant { name: "guided".into(), commands: Box::new(move || commands().collect()) };
        let variants: Vec<Variant<'_>> = others.into_iter().chain([guided]).collect();
        let pairs = self.options.pairs.unwrap_or(PAIRS[usize::from(experiment == "sizes")]);
        let trials = Trials { pairs, bed, group, timeout_s: 600.0, seed: 1 };
        let say = &mut *self.say;
        say(&format!("{experiment}, {}, {instances} at a time: {pairs} pairs", program.name));
        let measured = measure(&trials, &variants, self.stop, &mut |name, run| say(&line(name, run)))?;
        let (gain, claims) = (measured.gain(variants.len() - 1, 0), judge(&measured));
        self.rows.push(Row { experiment: experiment.into(), title, instances, measured, gain, plan, profile, claims });
        Ok(())
    }

    /// One recorded run, the hints that follow from it with their explanation, and how it read.
    fn plan(
        &mut self,
        program: &Program,
        bed: &dyn TestBed,
        group: Option<&Group>,
    ) -> Result<(PathBuf, String, Profile)> {
        let inside = |command: Command| match group {
            Some(group) => group.enter(&command),
            None => command,
        };
        let (trace, hints) = (self.folder.path().join("trace.imt"), self.folder.path().join("hints.json"));
        bed.cool()?;
        (self.say)(&format!("{}: recording one run", program.name));
        let (trace_word, hints_word) = (trace.to_string_lossy(), hints.to_string_lossy());
        tool(&mut inside(program.assisted(&["record", "--force", "-o", &trace_word])?))?;
        let mut command = Command::new(crate::impresario()?);
        command.args(["assist", "plan", &trace_word, "-o", &hints_word]);
        let plan = tool(&mut inside(command))?;
        Ok((hints, plan, Profile::of(&Trace::load(&trace)?)))
    }

    /// Fig. 5 of mercury-2014.
    fn strategies(&mut self, program: &Program, file: &Path, device: &BlockDevice, limits: Limits) -> Result<()> {
        let (group, bed) = (group(Some(device), limits)?, machine(device.clone()));
        let source = self.folder.path().join("whole.c");
        let whole = self.folder.path().join("whole");
        fs::write(&source, include_str!("programs/whole.c"))?;
        tool(Command::new("cc").args(["-O2", "-o"]).arg(&whole).arg(&source))?;
        let whole_file = || {
            let mut command = Command::new(&whole);
            command.arg(file).args(&program.words);
            vec![command]
        };
        let others = vec![
            Variant { name: "no advice".into(), commands: Box::new(|| vec![program.command()]) },
            Variant { name: "WILLNEED for the whole file".into(), commands: Box::new(whole_file) },
        ];
        let memory = impresario_base::units::show_bytes(limits.memory_bytes as f64);
        let title = format!("{}, {memory} of memory", program.words.join(" "));
        let judge = |measured: &Measured| {
            vec![
                ("guided is faster than no advice".to_string(), at_least(measured.gain(2, 0), 0.0)),
                ("guided is faster than one hint for the whole file".to_string(), at_least(measured.gain(2, 1), 0.0)),
            ]
        };
        let case = Case { experiment: "strategies", program, bed: &bed, group: Some(&group), instances: 1 };
        self.measure(&case, others, title, judge)
    }

    /// Figs. 6a–c and 7a–c of mercury-2014: files shorter and longer than the memory that the program and its hints share.
    fn sizes(&mut self, program: &dyn Fn(&Path) -> Program) -> Result<()> {
        let memory_bytes = PAPER_MEMORY_GB * SCALED_GB_BYTES;
        {
            let disk = ModelledDisk::new(self.stop)?;
            // A drive passes over gaps as fast as it reads: hints can only hide the computing.
            let claim = |gain| ("time at most 2 % more".to_string(), no_worse_than(gain, 0.02));
            self.sizes_on("disk", (disk.path(), disk.path()), &disk, memory_bytes, program, &claim)?;
        }
        let folder = self.folder.path().join("far");
        fs::create_dir(&folder)?;
        let mount = SlowMount::new(&folder, &self.options.folder, Slowness::default())?;
        let claim = |gain| ("time at least 45 % less".to_string(), at_least(gain, 0.45));
        self.sizes_on("mount", (&folder, mount.path()), &mount, memory_bytes, program, &claim)
    }

    /// The same on one bed, whose files are made at one place and read at another. `claim` judges a gain.
    fn sizes_on(
        &mut self,
        bed_name: &str,
        (made_in, read_in): (&Path, &Path),
        bed: &dyn TestBed,
        memory_bytes: u64,
        program: &dyn Fn(&Path) -> Program,
        claim: &dyn Fn(Interval) -> (String, Verdict),
    ) -> Result<()> {
        let group = group(None, Limits { memory_bytes, ..Limits::default() })?;
        let hints = self.folder.path().join("paper.json");
        for gb in PAPER_FILES_GB {
            let (name, len_bytes) = (format!("data-{gb}"), gb * SCALED_GB_BYTES);
            (self.say)(&format!("sizes, {bed_name}: making a file of {} MB", len_bytes / 1_000_000));
            fill(&made_in.join(&name), len_bytes)?;
            let file = read_in.join(&name);
            let program = program(&file);
            let text = serde_json::json!(file.to_string_lossy());
            fs::write(&hints, format!(r#"{{"File": [{{"Path": {text}, {PAPER_HINTS}}}]}}"#))?;
            let hints = hints.to_string_lossy().into_owned();
            let paper = || program.assisted(&["run", "--quiet", &hints]).into_iter().collect();
            let others = vec![
                Variant { name: "without".into(), commands: Box::new(|| vec![program.command()]) },
                Variant { name: "the paper's hints".into(), commands: Box::new(paper) },
            ];
            let title = format!(
                "{gb} GB of the paper's, {bed_name}: {} MB, {:.1} × the memory of {} MB",
                len_bytes / 1_000_000,
                len_bytes as f64 / memory_bytes as f64,
                memory_bytes / 1_000_000
            );
            let judge = |measured: &Measured| {
                let mut claims = Vec::new();
                for (variant, name) in [(1, "the paper's hints"), (2, "guided")] {
                    let (text, verdict) = claim(measured.gain(variant, 0));
                    claims.push((format!("{name}: {text}"), verdict));
                    // What is read twice was let go too early.
                    let times = measured.median_bytes(variant) / len_bytes as f64;
                    let text = format!("{name}: no byte is read twice ({times:.2} × the file were read)");
                    claims.push((text, Verdict::of(times <= 1.05)));
                }
                claims
            };
            let case = Case { experiment: "sizes", program: &program, bed, group: Some(&group), instances: 1 };
            self.measure(&case, others, title, judge)?;
            fs::remove_file(made_in.join(&name))?;
        }
        Ok(())
    }
}

fn machine(device: BlockDevice) -> Machine {
    Machine { device: Some(device) }
}

fn group(device: Option<&BlockDevice>, limits: Limits) -> Result<Group> {
    Group::new(&format!("impresario-{}", std::process::id()), device, limits)
}

fn line(name: &str, run: &Run) -> String {
    let mb = run.device_bytes as f64 / 1e6;
    format!("  {name}: {:.2} s, {} device reads, {mb:.0} MB", run.wall_s, run.device_reads)
}

fn judge(claim: Claim, measured: &Measured, gain: Interval, first_bytes: Option<f64>) -> (String, Verdict) {
    match claim {
        Claim::FasterBy(0.0) => ("faster".into(), at_least(gain, 0.0)),
        Claim::FasterBy(by) => (format!("time at least {:.0} % less", by * 100.0), at_least(gain, by)),
        Claim::NoSlowerThan(by) => (format!("time at most {:.0} % more", by * 100.0), no_worse_than(gain, by)),
        Claim::ReadsAtMost(share) => {
            let now = measured.median_reads(1) / measured.median_reads(0).max(1.0);
            (
                format!("device reads at most {:.0} % (they are {:.0} %)", share * 100.0, now * 100.0),
                Verdict::of(now <= share),
            )
        }
        Claim::BytesAtMost(times) => {
            let now = first_bytes.map_or(1.0, |first| measured.median_bytes(1) / first.max(1.0));
            let text = format!("bytes read at most {times} × those of one program (they are {now:.2} ×)");
            (text, Verdict::of(now <= times))
        }
    }
}

/// A file of random bytes, so that no layer below can shorten it.
fn fill(path: &Path, len_bytes: u64) -> Result<()> {
    copy(Path::new("/dev/urandom"), path, len_bytes)
}

/// The first bytes of a file in another one.
fn copy(from: &Path, path: &Path, len_bytes: u64) -> Result<()> {
    let mut from = fs::File::open(from).with_context(|| format!("opening {}", from.display()))?;
    let mut file = fs::File::create(path).with_context(|| format!("making {}", path.display()))?;
    // In large pieces: on the modelled disk each write pays for its turn.
    let mut buffer = vec![0; 4 << 20];
    let mut left = len_bytes;
    while left > 0 {
        let piece = left.min(buffer.len() as u64) as usize;
        std::io::Read::read_exact(&mut from, &mut buffer[..piece])?;
        std::io::Write::write_all(&mut file, &buffer[..piece])?;
        left -= piece as u64;
    }
    file.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(times: &[(f64, f64)], reads: (u64, u64), bytes: (u64, u64)) -> Measured {
        let mut runs = Vec::new();
        for (pair, (without, guided)) in times.iter().enumerate() {
            for (variant, wall_s) in [(0, *without), (1, *guided)] {
                let (device_reads, device_bytes) = if variant == 0 { (reads.0, bytes.0) } else { (reads.1, bytes.1) };
                runs.push(Run { variant, pair: pair as u32, wall_s, device_reads, device_bytes });
            }
        }
        Measured { variants: vec!["without".into(), "guided".into()], runs, killed: vec![0; 2], stopped: false }
    }

    #[test]
    fn claims_are_judged_by_the_whole_interval() {
        let half = measured(&[(4.0, 2.0), (4.0, 2.1), (4.0, 2.05)], (1000, 480), (10, 10));
        let same = measured(&[(4.0, 4.0), (4.0, 4.3), (4.0, 3.8)], (1000, 501), (10, 12));
        let of = |claim, m: &Measured, first| judge(claim, m, m.gain(1, 0), first).1;
        assert_eq!(of(Claim::FasterBy(0.45), &half, None), Verdict::Holds);
        assert_eq!(of(Claim::FasterBy(0.45), &same, None), Verdict::DoesNotHold);
        assert_eq!(of(Claim::NoSlowerThan(0.02), &same, None), Verdict::Unresolved);
        assert_eq!(of(Claim::NoSlowerThan(0.02), &half, None), Verdict::Holds);
        assert_eq!(of(Claim::ReadsAtMost(0.5), &half, None), Verdict::Holds);
        assert_eq!(of(Claim::ReadsAtMost(0.5), &same, None), Verdict::DoesNotHold);
        assert_eq!(of(Claim::BytesAtMost(1.1), &same, Some(10.0)), Verdict::DoesNotHold);
        assert_eq!(of(Claim::BytesAtMost(1.1), &half, Some(10.0)), Verdict::Holds);
    }

    #[test]
    fn an_unknown_experiment_is_named() {
        let options =
            Options { only: vec!["stridden".into()], pairs: None, python: None, folder: std::env::temp_dir() };
        let error = run(&options, &Stop::new(), &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains("stridden") && error.contains("strided"), "{error}");
    }
}
