//! Programs that guided I/O was not developed with, on files that no plan was made from: what `impresario-lab guided
//! --held-out` runs, on the latency-bound mount and on the machine's own disk unless other devices are named.
//!
//! Each program runs without guided I/O, with it and no plan, and with a plan that was recorded on another file of the same
//! kind, in pairs from a cold cache. All must print the same. Time waiting is the time of a run above that of a run from
//! memory; the least time is that of a run from memory, or of the bytes on the device's line if that is longer. A program that
//! reads all of its input before it computes waits for the line whoever asks for the bytes: what it reads by calls must have
//! passed before it goes on, in the order in which it reads.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_trace::{Record, Trace, TraceOp};
use impresario_workload::kernel_disk::tool;
use impresario_workload::programs::{Measured, TestBed, Trials, Variant, measure};
use impresario_workload::stats::{Interval, Looks, Verdict, at_least, median, no_worse_than};
use impresario_workload::stop::Stop;
use serde::Serialize;

use super::beds::{Bed, Device};
use super::slow_mount::Slowness;

/// The Python of the system, with Debian's python3-numpy and python3-h5py.
pub const PYTHON: &str = "/usr/bin/python3";
/// Before the name of a module that a program's Python must have.
const MODULE: &str = "python:";
/// A run with guided I/O may be slower by this share and this time, s.
const SLOWER_MAX: (f64, f64) = (0.01, 0.02);
/// A run that takes longer is killed, s.
pub const TIMEOUT_S: f64 = 120.0;
/// Where the device allows to save a share of the time waiting, and what must be saved of it then.
const REACH: [(f64, f64); 2] = [(0.6, 0.5), (0.4, 0.3)];

/// What to run.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Programs by name; empty: all.
    pub only: Vec<String>,
    /// Pairs of runs of each.
    pub pairs: u32,
    /// Where the files are made.
    pub folder: PathBuf,
    /// With NumPy, h5py, and where their programs are to run, uproot and pyarrow.
    pub python: PathBuf,
    /// The latency-bound mount.
    pub slowness: Slowness,
    /// Where they run.
    pub devices: Vec<Device>,
}

/// A program: its name, the kind of its files, and what it is given to a shell as. `$D` is the folder of the files, `$S` one
/// to write to, `$T` that of our scripts and programs.
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// The kind of its files, which is the folder that they are in.
    pub files: &'static str,
    script: &'static str,
    /// Programs without which it cannot run.
    needs: &'static [&'static str],
}

const fn program(
    name: &'static str,
    files: &'static str,
    script: &'static str,
    needs: &'static [&'static str],
) -> Program {
    Program { name, files, script, needs }
}

const PROGRAMS: [Program; 45] = [
    program("memmap", "numpy", "exec $PYTHON $T/held_out.py read memmap $D", &[]),
    program("memmap-some", "numpy", "exec $PYTHON $T/held_out.py read memmap-some $D", &[]),
    program("model", "model", "exec $PYTHON $T/held_out.py read model $D", &[]),
    program("uproot", "root", "exec $PYTHON $T/held_out.py read root $D", &["python:uproot"]),
    program("parquet", "parquet", "exec $PYTHON $T/held_out.py read parquet $D", &["python:pyarrow"]),
    program("npload", "numpy", "exec $PYTHON $T/held_out.py read npload $D", &[]),
    program("h5-slices", "hdf5", "exec $PYTHON $T/held_out.py read steps $D", &[]),
    program("h5-chunks", "hdf5", "exec $PYTHON $T/held_out.py read chunks $D", &[]),
    program("h5-scattered", "scattered", "exec $PYTHON $T/held_out.py read scattered $D", &[]),
    program("tar", "tree", "tar -cf - -C $D tree | cksum", &["tar"]),
    program(
        "cp",
        "tree",
        "rm -rf $S/out; cp -r $D/tree $S/out; cd $S/out; find . -type f | sort | xargs cat | cksum",
        &["cp"],
    ),
    program("grep", "tree", "grep -rc abcd $D/tree | sort | cut -d: -f2 | cksum", &["grep"]),
    program("md5sum", "tree", "cd $D/tree; find . -type f | xargs md5sum | cksum", &["md5sum"]),
    program(
        "fsck",
        "git",
        "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' git -C $D/tree fsck --full \
         --no-progress",
        &["git"],
    ),
    program(
        "sql-scan",
        "sqlite",
        "sqlite3 \"file:$D/events.db?mode=ro&immutable=1\" 'select sum(value) from events'",
        &["sqlite3"],
    ),
    program("sql-index", "sqlite", "exec $PYTHON $T/held_out.py read lookup $D", &[]),
    program("zstd", "zstd", "zstd -dc $D/lines.txt.zst | cksum", &["zstd"]),
    program("sort", "text", "sort -S 200M $D/lines.txt | cksum", &["sort"]),
    program("wc", "text", "wc < $D/lines.txt", &["wc"]),
    program("mmap", "block", "exec $T/held_out mmap $D/block", &["cc"]),
    program("mmap-random", "block", "exec $T/held_out mmap-random $D/block", &["cc"]),
    program("backward", "block", "exec $T/held_out backward $D/block", &["cc"]),
    program("strided", "block", "exec $T/held_out strided $D/block", &["cc"]),
    program("random", "block", "exec $T/held_out random $D/block", &["cc"]),
    program(
        "fio",
        "block",
        "fio --name=r --filename=$D/block --readonly --rw=read:192k --bs=64k --ioengine=io_uring --iodepth=2 --size=48M \
         --io_size=12M --invalidate=0 --output=/dev/null && echo read",
        &["fio"],
    ),
    program("java", "block", "exec java -Xshare:auto -cp $T HeldOut $D/block", &["java", "javac"]),
    program("xrootd", "block", "exec sh $T/xrootd.sh $D $S $T/held_out block", &["cc", "xrootd", "xrdcp", "unshare"]),
    program("cat", "block", "cat $D/block | cksum", &["cat"]),
    program("dd", "block", "dd if=$D/block bs=64k skip=200 count=300 status=none | cksum", &["dd"]),
    program("cmp", "twins", "cmp $D/one $D/other && echo same", &["cmp"]),
    program("tac", "records", "tac $D/records.csv | cksum", &["tac"]),
    program("awk", "text", "awk '{ sum += $2 } END { print sum }' $D/lines.txt", &["awk"]),
    program("perl", "text", "perl -ne '$n++ if /77/; END { print \"$n\\n\" }' $D/lines.txt", &["perl"]),
    program("json", "records", "exec $PYTHON $T/held_out.py read json $D", &[]),
    program("csv", "records", "exec $PYTHON $T/held_out.py read csv $D", &[]),
    program("gunzip", "gzip", "gzip -dc $D/lines.txt.gz | cksum", &["gzip"]),
    program("xz", "xz", "xz -dc $D/lines.txt.xz | cksum", &["xz"]),
    program("unzip", "zip", "unzip -p $D/archive.zip | cksum", &["unzip"]),
    program("zip-some", "zip", "exec $PYTHON $T/held_out.py read zip $D", &[]),
    program("untar", "tarball", "tar -xOf $D/archive.tar | cksum", &["tar"]),
    program("tar-list", "tarball", "tar -tf $D/archive.tar | cksum", &["tar"]),
    program("heads", "tree", "head -q -c 100 $D/tree/*/* | cksum", &["head"]),
    program(
        "rsync",
        "tree",
        "rm -rf $S/out; rsync -r $D/tree/ $S/out; cd $S/out; find . -type f | sort | xargs cat | cksum",
        &["rsync"],
    ),
    program("objdump", "binary", "objdump -s -j .rodata $D/program | tail -n +3 | cksum", &["objdump"]),
    program(
        "sql-range",
        "sqlite",
        "sqlite3 \"file:$D/events.db?mode=ro&immutable=1\" \"select sum(value) from events where name between '40' and '402'\"",
        &["sqlite3"],
    ),
];

/// One program on one device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub program: String,
    /// The device.
    pub bed: Device,
    /// From memory, s.
    pub warm_s: f64,
    /// No run can be faster, s; on a disk whose speed is not known, that from memory.
    pub least_s: f64,
    /// Runs without guided I/O, without a plan, and with a plan of another file.
    pub measured: Measured,
    /// Time waiting saved without a plan, and with one; absent where it waits for nothing.
    pub waiting_saved: Option<[Interval; 2]>,
    /// What could be saved of the time waiting; absent where it waits for nothing.
    pub allowed: Option<f64>,
    /// How much of the last guided run was seen.
    pub coverage: String,
    /// Claims and verdicts.
    pub claims: Vec<(String, Verdict)>,
}

/// Names of the programs.
pub fn names() -> Vec<&'static str> {
    PROGRAMS.iter().map(|p| p.name).collect()
}

/// Runs the programs; `say` gets lines of progress. Returns the rows, and programs that are missing with the reason.
pub fn run(options: &Options, stop: &Stop, say: &mut dyn FnMut(&str)) -> Result<(Vec<Row>, Vec<String>)> {
    let (programs, mut missing) = programs(&options.only, &options.python)?;
    let folder = tempfile::Builder::new().prefix("held-out-").tempdir_in(&options.folder)?;
    let bench = Bench { python: &options.python, folder: folder.path().canonicalize()?, stop };
    bench.prepare(&programs, say)?;
    let mut rows = Vec::new();
    for device in &options.devices {
        let bed = Bed::new(*device, &bench.folder.join("files"), &options.folder, options.slowness, stop)?;
        for program in &programs {
            stop.check()?;
            match bench.compare(program, *device, &bed, options, say) {
                Ok(row) => {
                    say(&line(&row));
                    rows.push(row);
                }
                Err(error) if stop.is_set() => return Err(error),
                Err(error) => missing.push(format!("{} on the {}: {error:#}", program.name, device.name())),
            }
        }
    }
    Ok((rows, missing))
}

/// The programs of these names, or all: those that can run here, and of the others why not.
///
/// # Errors
/// A name that no program has.
pub fn programs(only: &[String], python: &Path) -> Result<(Vec<&'static Program>, Vec<String>)> {
    if let Some(name) = only.iter().find(|name| !names().contains(&name.as_str())) {
        bail!("there is no program {name:?}; there are: {}", names().join(", "));
    }
    let wanted = |p: &&Program| only.is_empty() || only.iter().any(|name| name == p.name);
    let (mut runnable, mut missing) = (Vec::new(), Vec::new());
    for program in PROGRAMS.iter().filter(wanted) {
        match program.needs.iter().find(|need| !present(need, python)) {
            Some(need) => missing.push(format!("{}: there is no {need} here", program.name)),
            None => runnable.push(program),
        }
    }
    Ok((runnable, missing))
}

fn present(program: &str, python: &Path) -> bool {
    if let Some(module) = program.strip_prefix(MODULE) {
        let imports = Command::new(python).args(["-c", &format!("import {module}")]).output();
        return imports.is_ok_and(|ran| ran.status.success());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The programs' files, below a folder: those that are measured in `files/new`, others of the same kinds in `files/learn`.
pub struct Bench<'a> {
    /// Makes them.
    pub python: &'a Path,
    /// Where they are.
    pub folder: PathBuf,
    /// Stops the making.
    pub stop: &'a Stop,
}

impl Bench<'_> {
    /// The files that are measured, a folder for each kind.
    pub fn new_files(&self) -> PathBuf {
        self.folder.join("files/new")
    }

    /// The others of the same kinds.
    pub fn learn_files(&self) -> PathBuf {
        self.folder.join("files/learn")
    }

    /// Makes the files of all programs, twice: those of `learn` are recorded, those of `new` are measured.
    pub fn prepare(&self, programs: &[&Program], say: &mut dyn FnMut(&str)) -> Result<()> {
        let tools = self.folder.join("tools");
        fs::create_dir(&tools)?;
        fs::write(tools.join("held_out.py"), include_str!("programs/held_out.py"))?;
        fs::write(tools.join("xrootd.sh"), include_str!("programs/xrootd.sh"))?;
        let (c, java) = (tools.join("held_out.c"), tools.join("HeldOut.java"));
        fs::write(&c, include_str!("programs/held_out.c"))?;
        fs::write(&java, include_str!("programs/HeldOut.java"))?;
        if programs.iter().any(|p| p.needs.contains(&"cc")) {
            tool(Command::new("cc").args(["-O2", "-o"]).arg(tools.join("held_out")).arg(&c))?;
        }
        if programs.iter().any(|p| p.needs.contains(&"javac")) {
            tool(Command::new("javac").arg("-d").arg(&tools).arg(&java))?;
        }
        let kinds: BTreeSet<&str> = programs.iter().map(|p| p.files).collect();
        for (set, seed) in [("learn", "11"), ("new", "12")] {
            for kind in &kinds {
                self.stop.check()?;
                say(&format!("making files: {kind} to {set}"));
                let folder = self.folder.join("files").join(set).join(kind);
                fs::create_dir_all(&folder)?;
                let make = Command::new(self.python)
                    .arg(tools.join("held_out.py"))
                    .args(["make", kind])
                    .arg(&folder)
                    .arg(seed)
                    .status();
                let made = make.with_context(|| format!("starting {}", self.python.display()))?;
                if !made.success() {
                    bail!(
                        "making files of kind {kind} failed; scripts/setup.sh installs what {} needs",
                        self.python.display()
                    );
                }
            }
        }
        Ok(())
    }

    /// The program on the files of a set, which are in this folder.
    pub fn words(&self, program: &Program, set: &Path) -> Result<Vec<String>> {
        let scratch = self.folder.join("scratch");
        fs::create_dir_all(&scratch)?;
        let (python, data) = (self.python.to_path_buf(), set.join(program.files));
        let set = [("PYTHON", python), ("D", data), ("S", scratch), ("T", self.folder.join("tools"))];
        let assigned: String = set.iter().map(|(name, value)| format!("{name}='{}'; ", value.display())).collect();
        Ok(vec!["/bin/sh".into(), "-c".into(), assigned + program.script])
    }

    fn compare(
        &self,
        program: &Program,
        device: Device,
        on: &Bed,
        options: &Options,
        say: &mut dyn FnMut(&str),
    ) -> Result<Row> {
        say(&format!("{} on the {}", program.name, device.name()));
        let sets = ["learn", "new"].map(|set| on.data().join(set));
        let (learn, new) = (self.words(program, &sets[0])?, self.words(program, &sets[1])?);
        let bed = on.cold(&sets.map(|set| set.join(program.files)))?;
        let (trace, hints) = (self.folder.join("trace.imt"), self.folder.join("hints.json"));
        let record = |words: &[String]| {
            let mut command = assist(&["record", "--force", "-o"])?;
            command.arg(&trace).arg("--").args(words);
            tool(&mut on.inside(command))
        };
        bed.cool()?;
        record(&learn)?;
        // A run without a file that is large enough to be planned for has an empty plan.
        let mut plan = assist(&["plan"])?;
        plan.arg(&trace).arg("-o").arg(&hints);
        if let Err(error) = tool(&mut on.inside(plan)) {
            say(&format!("{} is not planned: {error:#}", program.name));
            fs::write(&hints, "{}")?;
        }
        let report = self.folder.join("report.json");
        let plain = || vec![command(&new)];
        let guided = |plan: bool| {
            let mut command = assist(&["run", "--quiet", "--report"]).into_iter().collect::<Vec<_>>();
            for command in &mut command {
                command.arg(&report);
                if plan {
                    command.arg(&hints);
                }
                command.arg("--").args(&new);
            }
            command
        };
        let variants = [
            Variant { name: "without".into(), commands: Box::new(plain) },
            Variant { name: "no plan".into(), commands: Box::new(|| guided(false)) },
            Variant { name: "plan".into(), commands: Box::new(|| guided(true)) },
        ];
        let trials = Trials { pairs: options.pairs, bed: &bed, group: on.group(), timeout_s: TIMEOUT_S, seed: 1 };
        let warm_s = warm(&new)?;
        let measured = measure(&trials, &variants, self.stop, &mut |_, _| ())?;
        if measured.runs.is_empty() {
            bail!("stopped before the first pair was complete");
        }
        // The last word of a guided run of its own.
        bed.cool()?;
        let mut run = assist(&["run"])?;
        run.arg("--").args(&new);
        let told = on.inside(run).output()?;
        let told = String::from_utf8_lossy(&told.stderr).into_owned();
        let coverage = told.lines().rev().find_map(|line| line.strip_prefix("impresario: Saw ")).unwrap_or("unknown");
        let line_s = if device == Device::Mount {
            let bytes = measured.median_bytes(0).min(measured.median_bytes(1));
            let line_s = options.slowness.shortest(bytes as u64).as_secs_f64();
            // From memory, since the program ran just now.
            record(&new)?;
            line_s.max(warm_s + delay(&Trace::load(&trace)?, options.slowness).as_secs_f64())
        } else {
            0.0
        };
        Ok(row(program.name, device, (warm_s, line_s), measured, coverage))
    }
}

/// How much later a program goes on than from memory, of which this is recorded, at the least: nothing is brought in before its
/// first read, no byte passes twice, and what it has read must have passed.
fn delay(warm: &Trace, slowness: Slowness) -> Duration {
    const PAGE_BYTES: u64 = 4096;
    let read = |r: &&Record| r.op == TraceOp::Read && r.moved_bytes() > 0;
    let mut reads: Vec<&Record> = warm.records.iter().filter(read).collect();
    reads.sort_by_key(|r| r.arrival.0);
    let Some(first_ns) = reads.first().map(|r| r.arrival.0) else { return Duration::ZERO };
    let mut passed = HashSet::new();
    let mut late = Duration::ZERO;
    for r in reads {
        let pages = r.offset / PAGE_BYTES..(r.offset + r.moved_bytes()).div_ceil(PAGE_BYTES);
        passed.extend(pages.map(|page| (r.file, page)));
        let end_ns = r.arrival.0 + r.duration.map_or(0, |took| took.0);
        let there = slowness.shortest(passed.len() as u64 * PAGE_BYTES);
        late = late.max(there.saturating_sub(Duration::from_nanos(end_ns - first_ns)));
    }
    late
}

fn row(program: &str, bed: Device, (warm_s, line_s): (f64, f64), measured: Measured, coverage: &str) -> Row {
    let without = measured.values(0, |r| r.wall_s);
    let usual_s = median(&without);
    let least_s = warm_s.max(line_s).min(usual_s);
    // A share of a wait that is no longer than what a run may lose anyway says nothing.
    let waits_s = Some(usual_s - warm_s).filter(|waits_s| *waits_s >= SLOWER_MAX.1);
    let allowed = waits_s.map(|waits_s| 1.0 - (least_s - warm_s) / waits_s);
    let saved = |variant: usize| waits_s.map(|waits_s| share(saved_s(&measured, variant), waits_s));
    let waiting_saved = saved(1).zip(saved(2)).map(|(no_plan, plan)| [no_plan, plan]);
    let pairs = without.len() as u32;
    let mut claims = Vec::new();
    for variant in [1, 2] {
        claims.push(not_slower(&measured, variant, Looks::new(pairs, pairs)));
        // Where hardly anything is waited for, nothing can be said of it; a plan's gain is told without a claim.
        if let Some((allowed, [saved, _])) = allowed.zip(waiting_saved)
            && let Some((_, share)) = REACH.iter().find(|(allows, _)| allowed >= *allows)
            && variant == 1
            && bed == Device::Mount
        {
            let claim = format!("{}: waits {:.0} % less", measured.variants[variant], share * 100.0);
            claims.push((claim, at_least(saved, *share)));
        }
    }
    Row {
        program: program.into(),
        bed,
        warm_s,
        least_s,
        measured,
        waiting_saved,
        allowed,
        coverage: coverage.into(),
        claims,
    }
}

fn share(of: Interval, whole: f64) -> Interval {
    Interval { mean: of.mean / whole, low: of.low / whole, high: of.high / whole, n: of.n }
}

/// What a variant saves of the time of the first: mean and 95 % interval, s.
pub fn saved_s(measured: &Measured, variant: usize) -> Interval {
    Interval::of(&all_saved_s(measured, variant))
}

/// The same in each pair.
fn all_saved_s(measured: &Measured, variant: usize) -> Vec<f64> {
    let times = [0, variant].map(|v| measured.values(v, |r| r.wall_s));
    times[0].iter().zip(&times[1]).map(|(without, guided)| without - guided).collect()
}

/// What a variant may lose against the first, s.
pub fn loss_max_s(measured: &Measured) -> f64 {
    SLOWER_MAX.0 * measured.median_s(0) + SLOWER_MAX.1
}

/// The claim that a variant is no slower than the first, and whether it holds after so many looks at most.
pub fn not_slower(measured: &Measured, variant: usize, looks: Looks) -> (String, Verdict) {
    let judged_by = looks.interval(&all_saved_s(measured, variant));
    let mut claim = format!("{}: not slower", measured.variants[variant]);
    if looks.count() > 1 {
        let lost = Interval { low: -judged_by.high, high: -judged_by.low, ..judged_by };
        claim += &format!(", by {}", looks.show(&lost, |s| format!("{:+.0} ms", s * 1e3)));
    }
    (claim, no_worse_than(judged_by, loss_max_s(measured)))
}

/// The shortest of three runs with everything in memory, s.
fn warm(words: &[String]) -> Result<f64> {
    let mut shortest_s = f64::INFINITY;
    for _ in 0..3 {
        let started = Instant::now();
        tool(&mut command(words))?;
        shortest_s = shortest_s.min(started.elapsed().as_secs_f64());
    }
    Ok(shortest_s)
}

/// A command of these words.
pub fn command(words: &[String]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// `impresario assist` with these words.
pub fn assist(words: &[&str]) -> Result<Command> {
    let mut command = Command::new(crate::impresario()?);
    command.arg("assist").args(words);
    Ok(command)
}

/// One row for the terminal.
pub fn line(row: &Row) -> String {
    let m = &row.measured;
    let times = [0, 1, 2].map(|v| format!("{:.2} s {:.0} r", m.median_s(v), m.median_reads(v))).join(" | ");
    let percent = |i: Interval| format!("{:+.0} % [{:.0}, {:.0}]", i.mean * 100.0, i.low * 100.0, i.high * 100.0);
    let waiting = match row.allowed.zip(row.waiting_saved) {
        Some((allowed, saved)) => {
            let [no_plan, plan] = saved.map(percent);
            format!("allowed {:.0} % | waiting saved {no_plan}, plan {plan}", allowed * 100.0)
        }
        None => "waits for nothing".into(),
    };
    let claims: String = row.claims.iter().map(|(claim, verdict)| format!("; {claim}: {verdict}")).collect();
    format!(
        "{:<12} {:<11} {times} | memory {:.2} s, least {:.2} s, {waiting}{claims}; saw {}",
        row.program,
        row.bed.name(),
        row.warm_s,
        row.least_s,
        row.coverage
    )
}

/// All rows, and what they come to.
pub fn table(rows: &[Row], missing: &[String]) -> String {
    let mut out = String::from("program, device: time and requests without | no plan | plan of another file\n");
    rows.iter().for_each(|row| out += &(line(row) + "\n"));
    for verdict in [Verdict::Holds, Verdict::Unresolved, Verdict::DoesNotHold] {
        let count = rows.iter().flat_map(|r| &r.claims).filter(|(_, v)| *v == verdict).count();
        out += &format!("{verdict}: {count} claims\n");
    }
    missing.iter().for_each(|line| out += &format!("missing: {line}\n"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_workload::programs::Run;

    fn measured(times: [[f64; 3]; 3]) -> Measured {
        let run = |variant, pair, wall_s| Run { variant, pair, wall_s, device_reads: 10, device_bytes: 100 };
        let pairs = times.iter().enumerate();
        let runs = pairs.flat_map(|(pair, t)| (0..3).map(move |v| run(v, pair as u32, t[v]))).collect();
        let variants = ["without", "no plan", "plan"].map(String::from).to_vec();
        Measured { variants, runs, killed: vec![0; 3], stopped: false }
    }

    #[test]
    fn waiting_is_judged_beside_what_the_device_allows() {
        let times = [[2.0, 0.6, 2.0], [2.02, 0.61, 2.5], [1.98, 0.6, 3.0]];
        let row = row("p", Device::Mount, (0.2, 0.3), measured(times), "1 of 1");
        assert!((row.allowed.unwrap() - 17.0 / 18.0).abs() < 0.01, "{:?}", row.allowed);
        assert!((row.waiting_saved.unwrap()[0].mean - 0.777).abs() < 0.01, "{:?}", row.waiting_saved);
        let verdicts: Vec<Verdict> = row.claims.iter().map(|(_, v)| *v).collect();
        assert_eq!(verdicts, [Verdict::Holds, Verdict::Holds, Verdict::Unresolved]);
        let slower = super::row("p", Device::Disk, (0.2, 0.0), measured([[1.0, 1.2, 1.0]; 3]), "1 of 1");
        assert_eq!(slower.claims[0].1, Verdict::DoesNotHold);
        assert!(table(&[row, slower], &["x: no y".into()]).contains("missing: x"));
    }

    /// A share of almost nothing is any number: −864947 % was told of a program that waited for 0.1 ms.
    #[test]
    fn nothing_is_told_of_the_waiting_of_a_program_that_waits_for_nothing() {
        let times = [[0.1701, 0.18, 0.17], [0.1699, 0.17, 0.175], [0.1705, 0.175, 0.16]];
        let row = row("p", Device::Mount, (0.17, 0.17), measured(times), "1 of 1");
        assert!(row.waiting_saved.is_none() && row.allowed.is_none());
        let told = line(&row);
        assert!(told.contains("waits for nothing") && !told.contains("waiting saved"), "{told}");
        let claims: Vec<&str> = row.claims.iter().map(|(claim, _)| claim.as_str()).collect();
        assert_eq!(claims, ["no plan: not slower", "plan: not slower"]);
        // One pair in which it hardly waited does not decide.
        let times = [[0.3, 0.18, 0.3], [0.3, 0.18, 0.3], [0.1701, 0.18, 0.3]];
        let saved = super::row("p", Device::Mount, (0.17, 0.17), measured(times), "1 of 1").waiting_saved.unwrap();
        assert!(saved[0].mean > 0.0 && saved[0].mean < 1.0, "{saved:?}");
    }

    #[test]
    fn what_is_read_before_it_is_computed_waits_for_the_line() {
        use impresario_sched::Nanos;
        use impresario_trace::{Builder, FileInfo, Header};
        let slowness = Slowness { bytes_per_s: 4_096_000, ..Slowness::default() };
        let ms = |n: u64| Nanos(n * 1_000_000);
        // A page takes 1 ms on the line.
        let of = |reads: &[(u64, u64, u64)]| {
            let mut builder = Builder::new(Header::default());
            let file = builder.file(FileInfo { path: "/f".into(), key: 0, size_bytes: Some(1 << 20) }).unwrap();
            for (at_ms, page, pages) in reads {
                let record = Record::new(TraceOp::Read, file, page * 4096, pages * 4096, ms(*at_ms));
                builder.push(Record { duration: Some(ms(0)), ..record }).unwrap();
            }
            delay(&builder.build(), slowness)
        };
        assert_eq!(of(&[]), Duration::ZERO);
        assert_eq!(of(&[(50, 0, 100)]), Duration::from_millis(105), "in one go");
        assert_eq!(of(&[(0, 0, 50), (0, 25, 50)]), Duration::from_millis(80), "no page passes twice");
        let slowly: Vec<_> = (0..100).map(|i| (i * 10, i, 1)).collect();
        assert_eq!(of(&slowly), Duration::from_millis(6), "it computes longer than the line takes");
    }

    #[test]
    fn an_unknown_program_is_named() {
        let options = Options {
            only: vec!["tarr".into()],
            pairs: 2,
            folder: std::env::temp_dir(),
            python: PYTHON.into(),
            slowness: Slowness::default(),
            devices: Device::ALL.to_vec(),
        };
        let error = run(&options, &Stop::new(), &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains("tarr") && error.contains("md5sum"), "{error}");
    }
}
