//! The files of an experiment: created before it, verified after every run by fresh clients, removed at the end.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::access::{FileIo, FilePlace, Identity, Process, Target};
use crate::content::{Mismatch, Source};
use crate::pattern::Pattern;
use crate::plan::Workload;
use crate::stop::Stop;
use impresario_base::lock::Mutex;
use impresario_base::machine::random_number;
use impresario_client::ClientError;

/// Size of the requests that prepare and verify: large, because they are not measured.
const CHUNK_BYTES: u64 = 4 << 20;
/// Threads, each with its own client, that prepare and verify.
const WORKERS: u32 = 4;
/// Mismatches reported in full; all are counted.
const TOLD: usize = 4;

/// The files of a workload and their current content.
pub struct DataSet {
    nonce: u64,
    patterns: Vec<Pattern>,
    /// Generation of the content of each application's files; 0: not prepared.
    generations: Vec<u32>,
    directory: String,
    /// The directory was made.
    is_made: bool,
}

/// The result of verification.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Verification {
    /// Bytes compared with what they must be.
    pub checked_bytes: u64,
    /// Requests or stretches that differed.
    pub mismatches: u64,
    /// The first of them.
    pub first: Vec<Mismatch>,
}

impl Verification {
    /// True if something was compared and nothing differed.
    pub fn passed(&self) -> bool {
        self.mismatches == 0 && self.checked_bytes > 0
    }

    /// Counts one comparison.
    pub fn record(&mut self, bytes: u64, result: Result<(), Mismatch>) {
        self.checked_bytes += bytes;
        if let Err(mismatch) = result {
            self.mismatches += 1;
            if self.first.len() < TOLD {
                self.first.push(mismatch);
            }
        }
    }

    /// Adds another result.
    pub fn merge(&mut self, other: Verification) {
        self.checked_bytes += other.checked_bytes;
        self.mismatches += other.mismatches;
        self.first.extend(other.first);
        self.first.truncate(TOLD);
    }
}

/// Why files could not be removed.
struct Left {
    error: anyhow::Error,
    /// The storage does not answer.
    is_silent: bool,
}

impl DataSet {
    /// The files of a workload, not yet created. The nonce is new: no two data sets share content.
    pub fn new(workload: &Workload) -> Result<DataSet> {
        let nonce = random_number()?;
        Ok(DataSet {
            nonce,
            patterns: workload.applications.iter().map(|a| a.pattern).collect(),
            generations: vec![0; workload.applications.len()],
            directory: format!("bench-{nonce:016x}"),
            is_made: false,
        })
    }

    /// Path of a file.
    pub fn path(&self, application: usize, file: u32) -> String {
        format!("{}/a{application}.f{file}", self.directory)
    }

    /// The content of a rank's bytes in a file for a generation.
    pub fn source(&self, application: usize, file: u32, rank: u32, generation: u32) -> Source {
        Source { nonce: self.nonce, file: (application as u64) << 32 | u64::from(file), writer: rank, generation }
    }

    /// The generation that an application's files hold.
    pub fn generation(&self, application: usize) -> u32 {
        self.generations.get(application).copied().unwrap_or(0)
    }

    /// The application's files now hold this generation.
    pub fn advance(&mut self, application: usize, generation: u32) {
        if let Some(slot) = self.generations.get_mut(application) {
            *slot = generation;
        }
    }

    /// Creates the files and writes their first generation. On a modelled disk this also fixes their placement.
    pub fn prepare(&mut self, target: &dyn Target, stop: &Stop) -> Result<()> {
        let client = target.connect(worker_identity("prepare"))?;
        client.make_dir(&self.directory)?;
        self.is_made = true;
        // One client creates one file after the other, so their order on the disks is always the same.
        for (application, file) in self.files() {
            client.create(&self.path(application, file)).with_context(|| format!("making a{application}.f{file}"))?;
        }
        let next_generation = 1;
        self.each_file(target, stop, "prepare", |set, client, application, file| {
            let io = client.open(&set.path(application, file), true)?;
            let pattern = &set.patterns[application];
            let mut buffer = vec![0; CHUNK_BYTES.min(pattern.file_bytes()) as usize];
            let mut offset = 0;
            while offset < pattern.file_bytes() {
                stop.check()?;
                let len = CHUNK_BYTES.min(pattern.file_bytes() - offset);
                let chunk = &mut buffer[..len as usize];
                for owned in pattern.owners(file, offset, len) {
                    let from = (owned.offset - offset) as usize;
                    set.source(application, file, owned.rank, next_generation)
                        .fill(owned.offset, &mut chunk[from..from + owned.len as usize]);
                }
                write_all(io.as_ref(), chunk, offset)?;
                offset += len;
            }
            io.sync()
        })?;
        self.generations.fill(next_generation);
        Ok(())
    }

    /// Reads every file whole through fresh clients and compares every byte.
    pub fn verify(&self, target: &dyn Target, stop: &Stop) -> Result<Verification> {
        let found = Mutex::new(Verification::default());
        self.each_file(target, stop, "verify", |set, client, application, file| {
            let mut verification = Verification::default();
            let io = client.open(&set.path(application, file), false)?;
            let pattern = &set.patterns[application];
            let generation = set.generation(application);
            let mut buffer = vec![0; CHUNK_BYTES.min(pattern.file_bytes()) as usize];
            let mut offset = 0;
            while offset < pattern.file_bytes() {
                stop.check()?;
                let len = CHUNK_BYTES.min(pattern.file_bytes() - offset);
                let chunk = &mut buffer[..len as usize];
                // The part that a short read leaves out must not match because the previous chunk did.
                chunk.fill(0);
                io.read_at(chunk, offset)?;
                for owned in pattern.owners(file, offset, len) {
                    let from = (owned.offset - offset) as usize;
                    let part = &chunk[from..from + owned.len as usize];
                    let source = set.source(application, file, owned.rank, generation);
                    verification.record(owned.len, source.check(owned.offset, part));
                }
                offset += len;
            }
            found.lock().merge(verification);
            Ok(())
        })?;
        Ok(found.into_inner())
    }

    /// Removes what there is of the files, at whatever point making or measuring them ended. An error names the directory.
    pub fn remove(&self, target: &dyn Target) -> Result<()> {
        self.try_remove(target).map_err(|left| left.error)
    }

    fn try_remove(&self, target: &dyn Target) -> Result<(), Left> {
        if !self.is_made {
            return Ok(());
        }
        let left = |error: anyhow::Error, is_silent| Left {
            error: error.context(format!("files are left in {}", self.directory)),
            is_silent,
        };
        let client = target.connect(worker_identity("remove")).map_err(|error| left(error, true))?;
        let mut removed = Ok(());
        for (application, file) in self.files() {
            let path = self.path(application, file);
            let Err(error) = client.remove(&path) else { continue };
            match client.size(&path) {
                // It was not made before an early end.
                Ok(None) => {}
                Ok(Some(_)) => removed = removed.and(Err(error)),
                // The storage does not answer: each further file would take its patience.
                Err(_) => return Err(left(error, true)),
            }
        }
        removed.and_then(|()| client.remove_dir(&self.directory)).map_err(|error| left(error, false))
    }

    /// Removes the files of all sets; returns what is left, and why. Once the storage does not answer, the other directories are
    /// named only: each would take its patience.
    fn remove_all(sets: &[DataSet], target: &dyn Target) -> Vec<String> {
        let mut all_left = Vec::new();
        for (at, set) in sets.iter().enumerate() {
            let Err(left) = set.try_remove(target) else { continue };
            all_left.push(format!("{:#}", left.error));
            if left.is_silent {
                let others = sets[at + 1..].iter().filter(|set| set.is_made);
                all_left.extend(others.map(|set| format!("files are left in {}", set.directory)));
                break;
            }
        }
        all_left
    }

    /// Has files made and measured, and removes them however that ends. Besides the result: what is left, and why.
    pub fn measured<T>(
        target: &dyn Target,
        sets: &mut [DataSet],
        measure: impl FnOnce(&mut [DataSet]) -> Result<T>,
    ) -> (Result<T>, Vec<String>) {
        // Who may not do this cannot measure: better refused before the files are written.
        let allowed = target.reset().map_err(|error| {
            let remedy = match error.downcast_ref::<ClientError>().map(ClientError::errno) {
                Some(libc::EACCES | libc::EPERM) => ", which takes the admin key or certificate",
                _ => "",
            };
            error.context(format!("measuring sets the statistics of all servers to zero{remedy}; nothing was written"))
        });
        let result = allowed.and_then(|()| measure(sets));
        let left = DataSet::remove_all(sets, target);
        (result, left)
    }

    /// The placement of each application's files, if the storage reports it.
    pub fn places(&self, target: &dyn Target) -> Result<Vec<Vec<FilePlace>>> {
        let client = target.connect(worker_identity("places"))?;
        let mut places = vec![Vec::new(); self.patterns.len()];
        for (application, file) in self.files() {
            places[application].extend(client.open(&self.path(application, file), false)?.place());
        }
        Ok(places)
    }

    fn files(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.patterns.iter().enumerate().flat_map(|(a, p)| (0..p.files()).map(move |f| (a, f)))
    }

    /// Runs an action for every file, on a few threads with a fresh client each. The first error ends it.
    fn each_file(
        &self,
        target: &dyn Target,
        stop: &Stop,
        what: &str,
        act: impl Fn(&DataSet, &dyn Process, usize, u32) -> Result<()> + Sync,
    ) -> Result<()> {
        let files: Vec<(usize, u32)> = self.files().collect();
        let next = AtomicU64::new(0);
        let failed = AtomicU32::new(0);
        let worker = || -> Result<()> {
            let client = target.connect(worker_identity(what))?;
            while failed.load(Ordering::Relaxed) == 0 {
                stop.check()?;
                let index = next.fetch_add(1, Ordering::Relaxed) as usize;
                let Some(&(application, file)) = files.get(index) else { break };
                act(self, client.as_ref(), application, file)
                    .with_context(|| format!("{what} {}", self.path(application, file)))?;
            }
            Ok(())
        };
        let run = || worker().inspect_err(|_| _ = failed.fetch_add(1, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..WORKERS.min(files.len() as u32)).map(|_| scope.spawn(run)).collect();
            workers.into_iter().try_for_each(|w| match w.join() {
                Ok(result) => result,
                Err(_) => bail!("a thread that was to {what} panicked"),
            })
        })
    }
}

/// Writes all of a buffer or fails.
pub fn write_all(io: &dyn FileIo, data: &[u8], offset: u64) -> Result<()> {
    match io.write_at(data, offset)? {
        n if n == data.len() => Ok(()),
        n => bail!("only {n} of {} bytes were written at {offset}", data.len()),
    }
}

fn worker_identity(what: &str) -> Identity {
    Identity { job: 0, node: None, wire_max_bytes: None, name: format!("bench {what}") }
}
