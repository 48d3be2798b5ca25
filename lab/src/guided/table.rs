//! The table of programs and devices: whether any program is slower with everything switched on, its first run included. What
//! `impresario-lab guided --table` runs.
//!
//! Each program runs without guided I/O, with `assist run --learn` as if for the first time, and with what was learnt of runs
//! before, in pairs from a cold cache. Where a claim is unresolved, pairs are added up to a limit ([`Looks`]). Cells are kept in a file as
//! they are measured, and those in it are not measured again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_base::replace::replace;
use impresario_workload::kernel_disk::tool;
use impresario_workload::programs::{Measured, Run, Trials, Variant, measure};
use impresario_workload::stats::{Looks, Verdict};
use impresario_workload::stop::Stop;
use serde::{Deserialize, Serialize};

use super::beds::{Bed, Device};
use super::held_out::{Bench, Program, TIMEOUT_S, assist, command, loss_max_s, not_slower, programs, saved_s};
use super::slow_mount::Slowness;

/// What to run.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Programs by name; empty: all.
    pub only: Vec<String>,
    /// Where they run.
    pub devices: Vec<Device>,
    /// Where the files are made.
    pub folder: PathBuf,
    /// With NumPy, h5py, and where their programs are to run, uproot and pyarrow.
    pub python: PathBuf,
    /// Where cells are kept; absent: nowhere.
    pub kept_in: Option<PathBuf>,
    /// How cells are measured.
    pub settings: Settings,
}

/// How cells are measured. Cells of other settings are not those of one table.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Pairs of runs of each cell.
    pub pairs: u32,
    /// Pairs of a cell whose claims are unresolved, at most.
    pub pairs_max: u32,
    /// The latency-bound mount.
    pub slowness: Slowness,
    /// Programs run under the manager of a node, too.
    #[serde(default)]
    pub node: bool,
}

/// One program on one device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Its name.
    pub program: String,
    /// The device.
    pub device: Device,
    /// Runs without guided I/O, for the first time with it, with what was learnt, and under the manager of a node.
    pub measured: Measured,
    /// Claims and verdicts.
    pub claims: Vec<(String, Verdict)>,
    /// What measuring it took, s.
    pub took_s: f64,
}

impl Settings {
    fn looks(&self) -> Looks {
        Looks::new(self.pairs, self.pairs_max)
    }
}

fn claims(measured: &Measured, looks: Looks) -> Vec<(String, Verdict)> {
    (1..measured.variants.len()).map(|variant| not_slower(measured, variant, looks)).collect()
}

impl Cell {
    fn new(program: &str, device: Device, measured: Measured, took_s: f64, looks: Looks) -> Cell {
        let claims = claims(&measured, looks);
        Cell { program: program.into(), device, measured, claims, took_s }
    }

    /// The worst of its verdicts.
    pub fn verdict(&self) -> Verdict {
        Verdict::of_all(self.claims.iter().map(|(_, verdict)| *verdict))
    }
}

/// The cells, and how they were measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Table {
    /// How.
    pub settings: Settings,
    /// The cells, as they were measured.
    pub cells: Vec<Cell>,
}

impl Table {
    /// What was measured before, if anything.
    ///
    /// # Errors
    /// A file that is no such table, or one of other settings: it is left alone.
    fn kept(kept_in: Option<&Path>, settings: &Settings) -> Result<Table> {
        let empty = Table { settings: settings.clone(), cells: Vec::new() };
        let Some(path) = kept_in.filter(|path| path.exists()) else { return Ok(empty) };
        let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let mut table: Table = serde_json::from_slice(&text)
            .with_context(|| format!("{} holds no such table; name another file", path.display()))?;
        if table.settings != *settings {
            bail!(
                "the cells in {} were measured otherwise ({:?}; now {settings:?}); name another file, or give the same options",
                path.display(),
                table.settings
            );
        }
        // Runs are kept, verdicts are of the rule of today.
        table.cells.iter_mut().for_each(|cell| cell.claims = claims(&cell.measured, settings.looks()));
        Ok(table)
    }

    fn keep(&self, kept_in: Option<&Path>) -> Result<()> {
        let Some(path) = kept_in else { return Ok(()) };
        let text = serde_json::to_string_pretty(self)? + "\n";
        replace(path, 0o644, text.as_bytes()).with_context(|| format!("writing {}", path.display()))
    }

    fn has(&self, program: &str, device: Device) -> bool {
        self.cells.iter().any(|cell| cell.program == program && cell.device == device)
    }
}

/// Measures the cells that are not there yet; `say` gets lines of progress. Returns all, and what is missing with the reason.
pub fn run(options: &Options, stop: &Stop, say: &mut dyn FnMut(&str)) -> Result<(Table, Vec<String>)> {
    let mut table = Table::kept(options.kept_in.as_deref(), &options.settings)?;
    let (programs, mut missing) = programs(&options.only, &options.python)?;
    let cells = options.devices.iter().flat_map(|device| programs.iter().map(move |program| (*device, *program)));
    let cells: Vec<(Device, &Program)> = cells.filter(|(device, p)| !table.has(p.name, *device)).collect();
    say(&format!("{} cells are to be measured, {} are there already", cells.len(), table.cells.len()));
    if cells.is_empty() {
        return Ok((table, missing));
    }
    let folder = tempfile::Builder::new().prefix("programs-").tempdir_in(&options.folder)?;
    let bench = Bench { python: &options.python, folder: folder.path().canonicalize()?, stop };
    let needed: Vec<&Program> =
        programs.iter().copied().filter(|p| cells.iter().any(|(_, c)| c.name == p.name)).collect();
    bench.prepare(&needed, say)?;
    let began = Instant::now();
    let mut measured = 0;
    for device in &options.devices {
        let of_device: Vec<&Program> = cells.iter().filter(|(d, _)| d == device).map(|(_, program)| *program).collect();
        if of_device.is_empty() {
            continue;
        }
        let bed = match Bed::new(*device, &bench.new_files(), &options.folder, options.settings.slowness, stop) {
            Ok(bed) => bed,
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => {
                missing.push(format!("{}: {error:#}", device.name()));
                continue;
            }
        };
        for program in of_device {
            stop.check()?;
            match cell(&bench, program, *device, &bed, &options.settings) {
                Ok(cell) => {
                    measured += 1;
                    let left_s = began.elapsed().as_secs_f64() / f64::from(measured)
                        * (cells.len() as f64 - f64::from(measured));
                    say(&format!(
                        "{measured} of {}, about {:.0} min left: {}",
                        cells.len(),
                        left_s / 60.0,
                        line(&cell)
                    ));
                    table.cells.push(cell);
                    table.keep(options.kept_in.as_deref())?;
                }
                Err(error) if stop.is_set() => return Err(error),
                Err(error) => missing.push(format!("{} on the {}: {error:#}", program.name, device.name())),
            }
        }
    }
    Ok((table, missing))
}

fn cell(bench: &Bench<'_>, program: &Program, device: Device, on: &Bed, settings: &Settings) -> Result<Cell> {
    let began = Instant::now();
    let bed = on.cold(&[on.data().join(program.files)])?;
    let words = bench.words(program, on.data())?;
    let stores = tempfile::tempdir_in(&bench.folder)?;
    let known = stores.path().join("known");
    // Two files, so that there is something to be known: the others of their kind, and these.
    for words in [bench.words(program, &bench.learn_files())?, bench.words(program, &bench.new_files())?] {
        let trace = stores.path().join("run.imt");
        tool(assist(&["record", "--force", "-o"])?.arg(&trace).arg("--").args(words))?;
        tool(assist(&["learn"])?.arg(&trace).env(STORE, &known))?;
    }
    let learns = |store: PathBuf| {
        let mut command: Vec<Command> = assist(&["run", "--quiet", "--learn"]).into_iter().collect();
        command.iter_mut().for_each(|command| _ = command.arg("--").args(&words).env(STORE, &store));
        command
    };
    let runs = AtomicU64::new(0);
    // Each first run has a store that is not there yet.
    let first = || learns(stores.path().join(runs.fetch_add(1, Relaxed).to_string()));
    let manager = settings.node.then(|| NodeManager::start(stores.path())).transpose()?;
    let mut variants = vec![
        Variant { name: "without".into(), commands: Box::new(|| vec![command(&words)]) },
        Variant { name: "first run".into(), commands: Box::new(first) },
        Variant { name: "known".into(), commands: Box::new(|| learns(known.clone())) },
    ];
    if let Some(manager) = &manager {
        variants.push(Variant { name: "node".into(), commands: Box::new(|| vec![manager.guides(&words)]) });
    }
    let mut all: Option<Measured> = None;
    let looks = settings.looks();
    loop {
        let done = all.as_ref().map_or(0, pairs_of);
        let pairs = looks.next(done).context("a look at no pairs")? - done;
        let trials = Trials { pairs, bed: &bed, group: on.group(), timeout_s: TIMEOUT_S, seed: 1 + u64::from(done) };
        let more = measure(&trials, &variants, bench.stop, &mut |_, _| learners_end(bench.stop))?;
        bench.stop.check()?;
        let measured = match all.take() {
            Some(before) => added(before, more),
            None => more,
        };
        let cell = Cell::new(program.name, device, measured, began.elapsed().as_secs_f64(), looks);
        if cell.verdict() != Verdict::Unresolved || looks.next(pairs_of(&cell.measured)).is_none() {
            return Ok(cell);
        }
        all = Some(cell.measured);
    }
}

/// Names the folder below which what was learnt is kept.
const STORE: &str = "XDG_DATA_HOME";
/// Processes that learn are waited for no longer than this.
const LEARNING_MAX: Duration = Duration::from_secs(60);

/// Waits until nobody on this machine learns from a run any more: `assist run --learn` leaves that to a process that would take its time from
/// the next run.
fn learners_end(stop: &Stop) {
    let end = Instant::now() + LEARNING_MAX;
    while somebody_learns() && !stop.is_set() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn somebody_learns() -> bool {
    let words = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
    let mut processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    // A process of the manager of a node has more words behind these.
    const LEARNS: &[u8] = b"\0assist\0remember\0";
    processes.any(|entry| words(entry).windows(LEARNS.len()).any(|part| part == LEARNS))
}

/// How long a manager may take to start.
const STARTING_MAX: Duration = Duration::from_secs(20);

/// The manager of a node as users have it (`assist on`, `assist daemon`): it was there before the program, which has the library by its
/// environment and nothing else, and it learns by itself from the runs of a cell.
struct NodeManager {
    process: Child,
    socket: PathBuf,
    store: PathBuf,
    library: PathBuf,
}

impl NodeManager {
    fn start(folder: &Path) -> Result<NodeManager> {
        let (socket, store) = (folder.join("node.sock"), folder.join("node"));
        // It makes no home of a user.
        fs::create_dir(&store)?;
        let named = std::env::var_os("IMPRESARIO_ASSIST_LIBRARY").map(PathBuf::from);
        let beside = || Ok::<_, anyhow::Error>(crate::impresario()?.with_file_name("libimpresario_assist.so"));
        let library = named.map_or_else(beside, Ok)?;
        if !library.exists() {
            bail!("there is no {}; name the library in IMPRESARIO_ASSIST_LIBRARY", library.display());
        }
        let mut command = assist(&["daemon", "--socket"])?;
        let process = command.arg(&socket).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut manager =
            NodeManager { process: process.context("starting the manager of the node")?, socket, store, library };
        let end = Instant::now() + STARTING_MAX;
        while !manager.socket.exists() {
            if let Some(status) = manager.process.try_wait()? {
                bail!("the manager of the node ended at once: {status}");
            }
            if Instant::now() >= end {
                bail!("the manager of the node does not start");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(manager)
    }

    /// The program as in a login with guided I/O switched on.
    fn guides(&self, words: &[String]) -> Command {
        let mut command = command(words);
        command.env("LD_PRELOAD", &self.library).env("IMPRESARIO_ASSIST_SOCKET", &self.socket).env(STORE, &self.store);
        command
    }
}

impl Drop for NodeManager {
    fn drop(&mut self) {
        // Programs do without it from then on, and none is left here.
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

fn pairs_of(measured: &Measured) -> u32 {
    measured.runs.iter().map(|run| run.pair + 1).max().unwrap_or(0)
}

/// The runs of both, those of `more` after the others.
fn added(mut all: Measured, more: Measured) -> Measured {
    let before = pairs_of(&all);
    all.runs.extend(more.runs.into_iter().map(|run| Run { pair: run.pair + before, ..run }));
    all.killed.iter_mut().zip(more.killed).for_each(|(all, more)| *all += more);
    all
}

/// Medians of a cell, s.
fn medians(cell: &Cell) -> Vec<String> {
    (0..cell.measured.variants.len()).map(|variant| format!("{:.3}", cell.measured.median_s(variant))).collect()
}

/// One cell for the terminal.
fn line(cell: &Cell) -> String {
    let medians = medians(cell);
    let (without, guided) = medians.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
    let guided = guided.iter().enumerate().map(|(at, median)| {
        let variant = at + 1;
        let saved = saved_s(&cell.measured, variant);
        let name = cell.measured.variants[variant].trim_end_matches(" run");
        let [mean, low, high] = [saved.mean, saved.high, saved.low].map(|s| -s * 1e3);
        format!(", {name} {median} s ({mean:+.0} ms [{low:+.0}, {high:+.0}])")
    });
    let verdicts: String = cell.claims.iter().map(|(claim, verdict)| format!("; {claim}: {verdict}")).collect();
    format!(
        "{} on the {}: {without} s{}, {:.0} ms more allowed, {} pairs{verdicts}",
        cell.program,
        cell.device.name(),
        guided.collect::<String>(),
        loss_max_s(&cell.measured) * 1e3,
        pairs_of(&cell.measured)
    )
}

/// The table for people: a line for each program, a column for each device; then the cells in which a claim does not hold or is
/// unresolved, and what is missing.
pub fn text(table: &Table, missing: &[String]) -> String {
    let devices: Vec<Device> =
        Device::ALL.into_iter().filter(|device| table.cells.iter().any(|cell| cell.device == *device)).collect();
    let mut names: Vec<&str> = Vec::new();
    table.cells.iter().for_each(|cell| {
        if !names.contains(&cell.program.as_str()) {
            names.push(&cell.program);
        }
    });
    let (width, node) = if table.settings.node { (30, ", under the manager of a node") } else { (24, "") };
    let mut out = format!("s without, first run, known{node}; = not slower, ? unresolved, ! slower\n");
    let row = |name: &str, columns: Vec<String>| {
        let columns: String = columns.iter().map(|column| format!(" {column:<width$}")).collect();
        format!("{name:<13}{}\n", columns.trim_end())
    };
    out += &row("program", devices.iter().map(|device| device.name().into()).collect());
    for name in &names {
        let column = |device: &Device| {
            let cell = table.cells.iter().find(|cell| cell.program == *name && cell.device == *device);
            cell.map_or("-".into(), |cell| {
                let sign = match cell.verdict() {
                    Verdict::Holds => '=',
                    Verdict::Unresolved => '?',
                    Verdict::DoesNotHold => '!',
                };
                format!("{} {sign}", medians(cell).join(" "))
            })
        };
        out += &row(name, devices.iter().map(column).collect());
    }
    for verdict in [Verdict::Holds, Verdict::Unresolved, Verdict::DoesNotHold] {
        let count = |device: &Device| {
            let of = table.cells.iter().filter(|cell| cell.device == *device && cell.verdict() == verdict);
            of.count().to_string()
        };
        out += &row(&verdict.to_string(), devices.iter().map(count).collect());
    }
    let cells = |wanted| table.cells.iter().filter(move |cell| cell.verdict() == wanted).map(line);
    cells(Verdict::DoesNotHold).chain(cells(Verdict::Unresolved)).for_each(|line| out += &(line + "\n"));
    missing.iter().for_each(|line| out += &format!("missing: {line}\n"));
    out += &format!("{} programs, {} cells\n", names.len(), table.cells.len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings { pairs: 3, pairs_max: 9, slowness: Slowness::default(), node: false }
    }

    fn measured(times: &[[f64; 3]]) -> Measured {
        let run = |variant, pair, wall_s| Run { variant, pair, wall_s, device_reads: 10, device_bytes: 100 };
        let pairs = times.iter().enumerate();
        let runs = pairs.flat_map(|(pair, t)| (0..3).map(move |v| run(v, pair as u32, t[v]))).collect();
        let variants = ["without", "first run", "known"].map(String::from).to_vec();
        Measured { variants, runs, killed: vec![0; 3], stopped: false }
    }

    fn table() -> Table {
        let cell =
            |program, device, times: &[[f64; 3]]| Cell::new(program, device, measured(times), 1.0, settings().looks());
        let fast = [[2.0, 0.5, 0.4], [2.1, 0.5, 0.4], [2.0, 0.6, 0.4]];
        let slow = [[0.1, 0.1, 0.15], [0.1, 0.1, 0.151], [0.1, 0.1, 0.152]];
        let wide = [[0.1, 0.1, 0.15], [0.1, 0.2, 0.1], [0.2, 0.1, 0.1]];
        let cells =
            vec![cell("tar", Device::Mount, &fast), cell("tar", Device::Disk, &slow), cell("wc", Device::Mount, &wide)];
        Table { settings: settings(), cells }
    }

    #[test]
    fn a_cell_is_as_good_as_the_worst_of_its_claims() {
        let verdicts: Vec<Verdict> = table().cells.iter().map(Cell::verdict).collect();
        assert_eq!(verdicts, [Verdict::Holds, Verdict::DoesNotHold, Verdict::Unresolved]);
        let text = text(&table(), &["fsck: there is no git here".into()]);
        let row = text.lines().find(|line| line.starts_with("tar ")).unwrap();
        assert!(row.contains("2.000 0.500 0.400 =") && row.contains("0.100 0.100 0.151 !"), "{text}");
        assert!(text.contains("missing: fsck") && text.contains("2 programs, 3 cells"), "{text}");
        let slower = text.lines().find(|line| line.starts_with("tar on the disk")).unwrap();
        assert!(slower.contains("known 0.151 s (+51 ms") && slower.contains("21 ms more allowed"), "{slower}");
        assert!(!text.contains("tar on the mount"), "what holds is in the table only: {text}");
    }

    #[test]
    fn a_process_that_learns_is_seen_as_long_as_it_does() {
        let mut command = Command::new("sh");
        command.args(["-c", "read line", "assist", "remember"]).stdin(std::process::Stdio::piped());
        let mut learner = command.spawn().unwrap();
        // The kernel says that it has started a moment before its words can be read.
        impresario_testing::until("it is seen", somebody_learns);
        drop(learner.stdin.take());
        learner.wait().unwrap();
        learners_end(&Stop::default());
    }

    #[test]
    fn a_run_under_the_manager_of_a_node_has_a_claim_of_its_own() {
        let mut measured = measured(&[[2.0, 0.5, 0.4], [2.1, 0.5, 0.4], [2.0, 0.6, 0.4]]);
        measured.variants.push("node".into());
        for pair in 0..3 {
            measured.runs.push(Run { variant: 3, pair, wall_s: 2.5, device_reads: 10, device_bytes: 100 });
        }
        let cell = Cell::new("tar", Device::Mount, measured, 1.0, settings().looks());
        assert_eq!((cell.claims.len(), cell.verdict()), (3, Verdict::DoesNotHold));
        let table = Table { settings: Settings { node: true, ..settings() }, cells: vec![cell] };
        let text = text(&table, &[]);
        assert!(text.contains("2.000 0.500 0.400 2.500 !") && text.contains("node 2.500 s (+467 ms"), "{text}");
        // Cells that were kept before there was such a run.
        let kept = serde_json::to_string(&settings()).unwrap().replace(",\"node\":false", "");
        assert_eq!(serde_json::from_str::<Settings>(&kept).unwrap(), settings());
    }

    #[test]
    fn pairs_are_added() {
        let all = added(measured(&[[1.0; 3]; 3]), measured(&[[2.0; 3]; 2]));
        assert_eq!((pairs_of(&all), all.runs.len()), (5, 15));
        assert_eq!(all.values(1, |r| r.wall_s), [1.0, 1.0, 1.0, 2.0, 2.0]);
        assert_eq!(pairs_of(&measured(&[])), 0);
    }

    #[test]
    fn what_was_measured_is_kept_and_only_under_its_settings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.json");
        assert_eq!(Table::kept(Some(&path), &settings()).unwrap().cells.len(), 0);
        table().keep(Some(&path)).unwrap();
        let kept = Table::kept(Some(&path), &settings()).unwrap();
        assert_eq!(kept, table());
        assert!(kept.has("tar", Device::Disk) && !kept.has("wc", Device::Disk));
        let other = Settings { pairs: 9, ..settings() };
        assert!(Table::kept(Some(&path), &other).unwrap_err().to_string().contains("otherwise"));
        fs::write(&path, "[1, 2").unwrap();
        assert!(Table::kept(Some(&path), &settings()).unwrap_err().to_string().contains("no such table"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "[1, 2", "it is left alone");
    }
}
