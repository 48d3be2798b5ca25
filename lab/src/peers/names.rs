//! Metadata rates: clients that create, stat and unlink files, each in a folder of its own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use impresario_base::machine::random_number;
use impresario_workload::access::{Identity, Process, Target};
use impresario_workload::cpu::process_cpu;
use impresario_workload::gate::{Broken, Gate};
use impresario_workload::stop::Stop;

/// What is done to every file, one after the other; all clients wait for one another in between.
pub const PHASES: [&str; 3] = ["create", "stat", "unlink"];
/// How long clients wait for one another. Answers have limits of their own.
const PATIENCE: Duration = Duration::from_secs(120);

/// How one of the [`PHASES`] went.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Phase {
    /// Operations of all clients; each was checked.
    pub operations: u64,
    /// From the common start to the last answer, s.
    pub time_s: f64,
    /// Processor time of the servers, s.
    pub server_cpu_s: f64,
    /// Processor time of this process, the clients, s.
    pub client_cpu_s: f64,
}

/// Where clients and the one that takes the time meet: before and after each phase.
struct Gates(Vec<[Gate; 2]>);

impl Gates {
    fn break_open(&self) {
        self.0.iter().flatten().for_each(Gate::break_open);
    }
}

/// Measures `clients` with `files` each.
///
/// Made is what stat finds, empty; removed is what it does not find afterwards, outside of the timed parts.
pub fn measure(target: &dyn Target, clients: u32, files: u32, stop: &Stop) -> Result<[Phase; PHASES.len()]> {
    let nonce = random_number()?;
    let gates = Gates(PHASES.iter().map(|_| [0, 1].map(|_| Gate::new(clients as usize + 1))).collect());
    let pids = target.pids();
    let cpu = || {
        let servers: Duration = pids.iter().filter_map(|pid| process_cpu(*pid)).sum();
        (servers.as_secs_f64(), process_cpu(std::process::id()).unwrap_or_default().as_secs_f64())
    };
    std::thread::scope(|scope| {
        let started = (0..clients).map(|number| {
            let (folder, gates) = (format!("names-{nonce:016x}-{number}"), &gates);
            let node = (number as usize).checked_rem(target.nodes());
            let work = move || {
                let result = client(target, node, &folder, files, gates, stop);
                if result.is_err() {
                    gates.break_open();
                }
                result
            };
            std::thread::Builder::new().name(format!("names {number}")).spawn_scoped(scope, work)
        });
        let started = started.collect::<std::io::Result<Vec<_>>>().inspect_err(|_| gates.break_open())?;
        let watch = || -> Result<Vec<_>> {
            let phase = |[begin, end]: &[Gate; 2]| -> Result<_> {
                let before = cpu();
                let began = begin.wait(PATIENCE)?;
                end.wait(PATIENCE)?;
                let after = cpu();
                Ok((began, after.0 - before.0, after.1 - before.1))
            };
            gates.0.iter().map(phase).collect()
        };
        let watched = watch().inspect_err(|_| gates.break_open());
        let (mut ends, mut errors) = (Vec::new(), Vec::new());
        for thread in started {
            match thread.join() {
                Ok(Ok(end)) => ends.push(end),
                Ok(Err(error)) => errors.push(error),
                Err(_) => errors.push(anyhow::anyhow!("a client panicked")),
            }
        }
        // Not the errors of those that waited for one that failed.
        let cause = errors.iter().position(|error| !error.is::<Broken>());
        if let Some(error) = cause.map(|at| errors.swap_remove(at)).or(errors.pop()) {
            return Err(error);
        }
        let watched = watched?;
        let mut phases = [Phase { operations: 0, time_s: 0.0, server_cpu_s: 0.0, client_cpu_s: 0.0 }; PHASES.len()];
        for (nth, (phase, (began, server_cpu_s, client_cpu_s))) in phases.iter_mut().zip(watched).enumerate() {
            let last = ends.iter().filter_map(|ends: &[Instant; PHASES.len()]| ends.get(nth)).max();
            let time_s = last.map_or(0.0, |last| last.duration_since(began).as_secs_f64()).max(1e-9);
            let operations = u64::from(clients) * u64::from(files);
            *phase = Phase { operations, time_s, server_cpu_s, client_cpu_s };
        }
        Ok(phases)
    })
}

/// One client: when it had done each of the phases.
fn client(
    target: &dyn Target,
    node: Option<usize>,
    folder: &str,
    files: u32,
    gates: &Gates,
    stop: &Stop,
) -> Result<[Instant; PHASES.len()]> {
    let identity = Identity { job: 1, node, wire_max_bytes: None, name: "names".into() };
    let process = target.connect(identity)?;
    ensure!(process.make_dir(folder)?, "{folder} is there already");
    let paths: Vec<String> = (0..files).map(|n| format!("{folder}/f{n}")).collect();
    // No server finds what was not made.
    let lost = || process.size(&format!("{folder}/none")).map(|size| size.is_none());
    ensure!(lost()?, "a file that nobody made is there");
    let mut ends = [Instant::now(); PHASES.len()];
    for (nth, (phase, [begin, end])) in PHASES.iter().zip(&gates.0).enumerate() {
        begin.wait(PATIENCE)?;
        for path in &paths {
            stop.check()?;
            act(process.as_ref(), nth, path).with_context(|| format!("{phase} {path}"))?;
        }
        ends[nth] = Instant::now();
        end.wait(PATIENCE)?;
    }
    for path in &paths {
        ensure!(process.size(path)?.is_none(), "{path} is there after it was removed");
    }
    process.remove_dir(folder)?;
    Ok(ends)
}

fn act(process: &dyn Process, phase: usize, path: &str) -> Result<()> {
    match phase {
        0 => process.create(path).map(drop),
        1 => {
            let size = process.size(path)?;
            ensure!(size == Some(0), "an empty file was made, and there is {size:?}");
            Ok(())
        }
        _ => process.remove(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_workload::access::{FileIo, Moved};
    use impresario_workload::folder::Folder;
    use impresario_workload::memory::Memory;

    #[test]
    fn files_come_and_go_and_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path()).unwrap();
        for target in [&folder as &dyn Target, &Memory::default()] {
            for clients in [1, 4] {
                let phases = measure(target, clients, 30, &Stop::new()).unwrap();
                assert!(
                    phases.iter().all(|p| p.operations == u64::from(clients) * 30 && p.time_s > 1e-9),
                    "{phases:?}"
                );
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// A server that says that it did what it did not.
    #[derive(Clone, Copy, PartialEq)]
    enum Liar {
        MakesNothing,
        RemovesNothing,
        FindsAnything,
    }

    struct Lying(Liar, Memory);
    struct LyingProcess(Liar, Box<dyn Process>);

    impl Target for Lying {
        fn connect(&self, identity: Identity) -> Result<Box<dyn Process>> {
            Ok(Box::new(LyingProcess(self.0, self.1.connect(identity)?)))
        }
    }

    impl Process for LyingProcess {
        fn make_dir(&self, path: &str) -> Result<bool> {
            self.1.make_dir(path)
        }
        fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
            self.1.create(if self.0 == Liar::MakesNothing { "elsewhere" } else { path })
        }
        fn open(&self, path: &str, write: bool) -> Result<Box<dyn FileIo>> {
            self.1.open(path, write)
        }
        fn size(&self, path: &str) -> Result<Option<u64>> {
            if self.0 == Liar::FindsAnything { Ok(Some(0)) } else { self.1.size(path) }
        }
        fn remove(&self, path: &str) -> Result<()> {
            if self.0 == Liar::RemovesNothing { Ok(()) } else { self.1.remove(path) }
        }
        fn remove_dir(&self, path: &str) -> Result<()> {
            self.1.remove_dir(path)
        }
        fn sent(&self) -> Moved {
            self.1.sent()
        }
    }

    #[test]
    fn a_server_that_does_not_do_what_it_says_is_found_out() {
        for (liar, why) in [
            (Liar::MakesNothing, "there is None"),
            (Liar::RemovesNothing, "after it was removed"),
            (Liar::FindsAnything, "nobody made"),
        ] {
            for clients in [1, 3] {
                let error = measure(&Lying(liar, Memory::default()), clients, 5, &Stop::new()).unwrap_err();
                assert!(format!("{error:#}").contains(why), "{error:#}");
            }
        }
        let stop = Stop::new();
        stop.set();
        assert!(measure(&Memory::default(), 2, 5, &stop).is_err());
    }
}
