//! Replays recorded requests: the same operations, offsets and sizes in the same order by as many processes, at the
//! recorded or other times, on its own files.
//!
//! A process of the trace (an origin) is a client here. Its concurrent requests are made by several threads, each of
//! which issues its requests in sequence. Writes write what the file already holds, a function of file and offset, so
//! that all reads can be verified.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::Histogram;
use impresario_base::units::{show_bytes, show_seconds};
use impresario_trace::{Outcome, Space, Trace, TraceOp};
use rustc_hash::FxHashMap;

use crate::access::{FileIo, Identity, Process, Target};
use crate::content::Source;
use crate::dataset::Verification;
use crate::gate::Gate;
use crate::result::Latency;
use crate::stop::Stop;

/// Maximum threads and clients; more concurrent requests wait for a thread.
pub const THREADS_MAX: usize = 256;
/// Maximum open files of all clients together.
pub const OPEN_MAX: usize = 16_384;
/// Maximum length of a request, bytes.
pub const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// Buffers of all threads together, bytes.
const BUFFER_BYTES_MAX: u64 = 2 << 30;
/// Files are filled in pieces of this size, bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// How long threads wait for one another before the start.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// From the last thread's readiness to the first instant.
const START_MARGIN: Duration = Duration::from_millis(5);

/// When requests are made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Timing {
    /// At the recorded times, with all intervals scaled by this factor; later if the thread's previous request has not
    /// ended.
    At(f64),
    /// As long after the thread's previous request as in the trace.
    Think,
    /// As soon as the thread's previous request has ended.
    Fast,
}

impl std::str::FromStr for Timing {
    type Err = String;
    fn from_str(text: &str) -> Result<Timing, String> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("original", "") => Ok(Timing::At(1.0)),
            ("think", "") => Ok(Timing::Think),
            ("fast", "") => Ok(Timing::Fast),
            ("scaled", factor) => match factor.parse::<f64>() {
                Ok(factor) if (0.001..=1000.0).contains(&factor) => Ok(Timing::At(factor)),
                _ => {
                    Err(format!("{factor:?} is not a valid factor: write scaled:0.5 for half the time, 0.001 to 1000"))
                }
            },
            _ => Err(format!("there is no timing {text:?}: original, scaled:FACTOR, think or fast")),
        }
    }
}

#[derive(Clone, Copy)]
enum Op {
    Read,
    Write,
    Sync,
}

#[derive(Clone, Copy)]
struct Step {
    /// Since the first request of the trace, ns.
    at_ns: u64,
    /// Since the end of the thread's request before, ns.
    think_ns: u64,
    offset: u64,
    len: u32,
    file: u32,
    op: Op,
}

/// The requests of one thread.
struct Lane {
    origin: usize,
    steps: Vec<Step>,
    /// When the last of them had ended, ns.
    free_ns: u64,
    /// Its longest request.
    buffer_bytes: u32,
}

/// What to replay.
pub struct Plan {
    /// Bytes of each file.
    sizes: Vec<u64>,
    lanes: Vec<Lane>,
    origins: usize,
    /// How long the recorded run took, ns.
    span_ns: u64,
    /// Latencies there, ns.
    latency_ns: Histogram<5>,
    /// Records that are not replayed, such as opening and truncating.
    left_out: u64,
}

/// A file of the trace. Several servers' parts of one file are separate files, because their offsets are separate.
#[derive(PartialEq, Eq, Hash)]
struct FileName {
    path: Vec<u8>,
    key: u64,
    part: Option<(String, u16)>,
}

impl Plan {
    /// From the traces of one run; several are related by their wall clocks.
    pub fn new(traces: &[Trace]) -> Result<Plan, String> {
        let clock = |t: &Trace| t.header.clock_unix_ns;
        if traces.len() > 1 && traces.iter().any(|t| clock(t).is_none()) {
            return Err(
                "a trace does not know its wall clock, so that several do not belong together; replay each alone, \
                        or their mean (impresario trace merge)"
                    .into(),
            );
        }
        let zero = traces.iter().filter_map(clock).min().unwrap_or(0);
        let mut records: Vec<(u64, usize, usize)> = Vec::new();
        let mut left_out = 0;
        for (number, trace) in traces.iter().enumerate() {
            let shift = clock(trace).map_or(0, |c| c - zero);
            for (at, record) in trace.records.iter().enumerate() {
                let replayed =
                    matches!(record.op, TraceOp::Read | TraceOp::Write) && record.len > 0 || record.op == TraceOp::Sync;
                match replayed {
                    true => records.push((record.arrival.0.saturating_add(shift), number, at)),
                    false => left_out += 1,
                }
            }
        }
        records.sort_unstable();
        let Some(first_ns) = records.first().map(|r| r.0) else {
            return Err("there are no reads, writes or syncs to replay".into());
        };
        let mut plan = Plan {
            sizes: Vec::new(),
            lanes: Vec::new(),
            origins: 0,
            span_ns: 0,
            latency_ns: Histogram::default(),
            left_out,
        };
        let mut files: FxHashMap<FileName, u32> = FxHashMap::default();
        let mut origins: FxHashMap<(usize, u32), (usize, Vec<usize>)> = FxHashMap::default();
        for (arrival_ns, number, at) in records {
            let (trace, at_ns) = (&traces[number], arrival_ns - first_ns);
            let record = &trace.records[at];
            let info = trace.file(record.file);
            let apart = trace.header.space == Space::Lane;
            let part = apart.then(|| (trace.header.command.clone(), record.lane.0));
            let next = files.len() as u32;
            let file = *files.entry(FileName { path: info.path.clone(), key: info.key, part }).or_insert(next);
            if file == next {
                plan.sizes.push(0);
            }
            let (op, len) = match record.op {
                TraceOp::Read => (Op::Read, record.len),
                TraceOp::Write => (Op::Write, record.len),
                _ => (Op::Sync, 0),
            };
            if len > REQUEST_BYTES_MAX {
                let (len, most) = (show_bytes(len as f64), show_bytes(REQUEST_BYTES_MAX as f64));
                return Err(format!("the trace has a request of {len}; at most {most} can be replayed"));
            }
            // A short read shows where its file ended.
            let there = match (op, record.outcome) {
                (Op::Read, Outcome::Short(bytes)) => bytes,
                (Op::Read, Outcome::Failed(_)) => 0,
                _ => len,
            };
            let end = record.offset.checked_add(len).filter(|end| *end <= i64::MAX as u64);
            end.ok_or("the trace has a request beyond the end of any file")?;
            let size = &mut plan.sizes[file as usize];
            *size = (*size).max(if there > 0 { record.offset + there } else { 0 });
            let duration_ns = record.duration.map_or(0, |d| d.0);
            if record.duration.is_some() {
                plan.latency_ns.record(duration_ns);
            }
            let end_ns = at_ns.saturating_add(duration_ns);
            plan.span_ns = plan.span_ns.max(end_ns);
            let known = origins.len();
            let (origin, own) = origins.entry((number, record.origin.0)).or_insert((known % THREADS_MAX, Vec::new()));
            plan.origins = plan.origins.max(*origin + 1);
            let lane = plan.lane(*origin, own, at_ns);
            let lane = &mut plan.lanes[lane];
            let think_ns = at_ns.saturating_sub(lane.free_ns);
            lane.steps.push(Step { at_ns, think_ns, offset: record.offset, len: len as u32, file, op });
            lane.free_ns = lane.free_ns.max(end_ns);
            lane.buffer_bytes = lane.buffer_bytes.max(len as u32);
        }
        let buffers: u64 = plan.lanes.iter().map(|lane| u64::from(lane.buffer_bytes)).sum();
        if buffers > BUFFER_BYTES_MAX {
            return Err(format!(
                "this many concurrent requests of this length need {} of memory",
                show_bytes(buffers as f64)
            ));
        }
        Ok(plan)
    }

    /// The thread for an origin's request: a free one, a new one, or the one that is free soonest.
    fn lane(&mut self, origin: usize, own: &mut Vec<usize>, at_ns: u64) -> usize {
        let free = |lane: &&usize| self.lanes[**lane].free_ns <= at_ns;
        if let Some(lane) = own.iter().find(free) {
            return *lane;
        }
        if self.lanes.len() < THREADS_MAX {
            self.lanes.push(Lane { origin, steps: Vec::new(), free_ns: 0, buffer_bytes: 0 });
            own.push(self.lanes.len() - 1);
            return self.lanes.len() - 1;
        }
        let soonest = own.iter().copied().min_by_key(|lane| self.lanes[*lane].free_ns);
        soonest.unwrap_or_else(|| {
            // There are more origins than threads: this one shares a thread permanently.
            let shared = origin % self.lanes.len();
            own.push(shared);
            shared
        })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.sizes.iter().fold(0, |sum, size| sum.saturating_add(*size))
    }

    /// How many files there are.
    pub fn files(&self) -> usize {
        self.sizes.len()
    }

    fn requests(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.steps.len() as u64).sum()
    }

    /// The files that each client uses, by its number.
    fn opened(&self) -> Result<Vec<Files>> {
        let mut all: Vec<Files> = Vec::new();
        all.resize_with(self.origins, FxHashMap::default);
        for lane in &self.lanes {
            for step in &lane.steps {
                all[lane.origin].entry(step.file).or_insert(None);
            }
        }
        let open: usize = all.iter().map(FxHashMap::len).sum();
        ensure!(open <= OPEN_MAX, "its processes have {open} files open, of which at most {OPEN_MAX} can be replayed");
        Ok(all)
    }
}

/// Where and how a plan is replayed.
#[derive(Clone, Debug)]
pub struct Options {
    /// When requests are made.
    pub timing: Timing,
    /// The folder on the target that the files are in.
    pub folder: String,
    /// The folder may exist, with files of an earlier replay, which are reused.
    pub overwrite: bool,
    /// Keep the files.
    pub keep: bool,
    /// Bytes of all files at most.
    pub bytes_max: u64,
}

/// The result of a replay.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Replayed {
    /// Requests made.
    pub requests: u64,
    /// Of them reads.
    pub reads: u64,
    /// Of them writes.
    pub writes: u64,
    /// Of them syncs.
    pub syncs: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Requests that failed or transferred less than they had to, and the first error.
    pub failed: u64,
    /// The first error.
    pub failure: Option<String>,
    /// Records that were not replayed, such as opening and truncating.
    pub left_out: u64,
    /// Files.
    pub files: usize,
    /// Clients.
    pub clients: usize,
    /// Threads of theirs.
    pub threads: usize,
    /// From the first request's instant to the last answer, s.
    pub time_s: f64,
    /// The same in the trace, s.
    pub recorded_s: f64,
    /// Of requests.
    pub latency: Option<Latency>,
    /// The same in the trace.
    pub recorded_latency: Option<Latency>,
    /// How late requests were issued; absent if they are issued as soon as possible.
    pub lateness: Option<Latency>,
    /// The result of comparing what was read.
    pub verification: Verification,
}

/// The work of one thread.
#[derive(Default)]
struct Done {
    reads: u64,
    writes: u64,
    syncs: u64,
    bytes: u64,
    failed: u64,
    failure: Option<String>,
    latency_ns: Histogram<5>,
    lateness_ns: Histogram<5>,
    verification: Verification,
    ended: Option<Instant>,
}

/// Creates the files, replays, and removes the files. Reports to `progress`.
pub fn replay(
    target: &dyn Target,
    plan: &Plan,
    options: &Options,
    stop: &Stop,
    mut progress: impl FnMut(&str),
) -> Result<Replayed> {
    let (bytes, most) = (plan.bytes(), options.bytes_max);
    if bytes > most {
        let (bytes, most) = (show_bytes(bytes as f64), show_bytes(most as f64));
        bail!("the trace's files have {bytes} in all, more than {most}: raise --size-max if there is room for them");
    }
    let mut open = plan.opened()?;
    let client = target.connect(identity(0))?;
    let folder = &options.folder;
    if !client.make_dir(folder)? && !options.overwrite {
        bail!("{folder} is there already: name another folder, or add --overwrite if it is of an earlier replay");
    }
    let outcome = (|| {
        prepare(client.as_ref(), plan, folder, stop, &mut progress)?;
        let mut clients = Vec::new();
        for (number, files) in open.iter_mut().enumerate() {
            stop.check()?;
            let client = target.connect(identity(number + 1))?;
            for (file, handle) in files.iter_mut() {
                *handle = Some(client.open(&path(folder, *file), true).context("opening a file of the trace")?);
            }
            clients.push(client);
        }
        run(plan, &open, options.timing, stop, &mut progress)
    })();
    open.clear();
    if !options.keep {
        progress("removing the files");
        let removed = (0..plan.files()).try_for_each(|file| match client.remove(&path(folder, file as u32)) {
            // After an early end, some may not exist.
            Err(e) if outcome.is_ok() => Err(e),
            _ => Ok(()),
        });
        let removed = removed.and_then(|()| client.remove_dir(folder));
        if outcome.is_ok() && !options.overwrite {
            removed.with_context(|| format!("removing {folder}"))?;
        }
    }
    outcome
}

fn identity(client: usize) -> Identity {
    let name = if client == 0 { "replay".into() } else { format!("replay client {client}") };
    Identity { job: 0, node: None, wire_max_bytes: None, name }
}

fn path(folder: &str, file: u32) -> String {
    format!("{folder}/{file:05}")
}

fn source(file: u32) -> Source {
    Source { nonce: 0, file: u64::from(file), writer: 0, generation: 0 }
}

/// Files of the needed size, on the device.
fn prepare(
    client: &dyn Process,
    plan: &Plan,
    folder: &str,
    stop: &Stop,
    progress: &mut impl FnMut(&str),
) -> Result<()> {
    let (mut buffer, mut done) = (Vec::new(), 0);
    let all = show_bytes(plan.bytes() as f64);
    for (file, &size) in plan.sizes.iter().enumerate() {
        let path = path(folder, file as u32);
        let io = client.create(&path).with_context(|| format!("making {path}"))?;
        let mut at = 0;
        while at < size {
            stop.check()?;
            progress(&format!("making {} files: {} of {all}", plan.files(), show_bytes(done as f64)));
            let len = CHUNK_BYTES.min(size - at);
            buffer.resize(len as usize, 0);
            source(file as u32).fill(at, &mut buffer);
            let mut from = 0;
            while from < buffer.len() {
                let n = io.write_at(&buffer[from..], at + from as u64).with_context(|| format!("filling {path}"))?;
                ensure!(n > 0, "filling {path}: nothing more is taken");
                from += n;
            }
            (at, done) = (at + len, done + len);
        }
        io.sync().with_context(|| format!("syncing {path}"))?;
        io.forget();
    }
    Ok(())
}

/// The files that a client has open, by their numbers in the plan.
type Files = FxHashMap<u32, Option<Box<dyn FileIo>>>;

/// The timed part.
fn run(plan: &Plan, open: &[Files], timing: Timing, stop: &Stop, progress: &mut impl FnMut(&str)) -> Result<Replayed> {
    let gate = Gate::new(plan.lanes.len() + 1);
    let (made, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let all = plan.requests();
    let (opened, lanes) = std::thread::scope(|scope| -> Result<_> {
        let mut threads = Vec::new();
        for (number, lane) in plan.lanes.iter().enumerate() {
            let (gate, made, ended, files) = (&gate, &made, &ended, (&open[lane.origin], plan.sizes.as_slice()));
            let thread = std::thread::Builder::new().name(format!("replay.{number}")).spawn_scoped(scope, move || {
                let done = lane.run(files, timing, (gate, stop), made);
                ended.fetch_add(1, Relaxed);
                done
            });
            threads.push(thread.context("starting a thread of the replay").inspect_err(|_| gate.break_open())?);
        }
        let opened = gate.wait(READY_PATIENCE)?;
        while ended.load(Relaxed) < plan.lanes.len() as u64 {
            std::thread::sleep(Duration::from_millis(20).min(opened.elapsed().max(Duration::from_millis(1))));
            let (made, at) = (made.load(Relaxed), show_seconds(opened.elapsed().as_secs_f64()));
            progress(&format!(
                "{made} of {all} requests after {at} (recorded: {})",
                show_seconds(plan.span_ns as f64 / 1e9)
            ));
        }
        let mut lanes = Vec::new();
        for thread in threads {
            match thread.join() {
                Ok(done) => lanes.push(done?),
                Err(_) => bail!("a thread of the replay panicked"),
            }
        }
        Ok((opened, lanes))
    })?;
    let mut whole = Replayed {
        left_out: plan.left_out,
        files: plan.files(),
        clients: plan.origins,
        threads: plan.lanes.len(),
        recorded_s: plan.span_ns as f64 / 1e9,
        ..Replayed::default()
    };
    let (mut latency_ns, mut lateness_ns) = (Histogram::<5>::default(), Histogram::<5>::default());
    for done in lanes {
        whole.reads += done.reads;
        whole.writes += done.writes;
        whole.syncs += done.syncs;
        whole.bytes += done.bytes;
        whole.failed += done.failed;
        whole.failure = whole.failure.or(done.failure);
        latency_ns.merge(&done.latency_ns);
        lateness_ns.merge(&done.lateness_ns);
        whole.verification.merge(done.verification);
        let time = done.ended.map_or(0.0, |end| end.duration_since(opened + START_MARGIN).as_secs_f64());
        whole.time_s = whole.time_s.max(time);
    }
    whole.requests = whole.reads + whole.writes + whole.syncs;
    let told = |h: &Histogram<5>| (h.count() > 0).then(|| h.summary().into());
    (whole.latency, whole.recorded_latency) = (told(&latency_ns), told(&plan.latency_ns));
    whole.lateness = told(&lateness_ns);
    Ok(whole)
}

impl Lane {
    fn run(
        &self,
        (files, sizes): (&Files, &[u64]),
        timing: Timing,
        (gate, stop): (&Gate, &Stop),
        made: &AtomicU64,
    ) -> Result<Done> {
        // Microsecond waits need a microsecond timer: the kernel's default slack is 50 µs.
        // SAFETY: PR_SET_TIMERSLACK takes a number and changes only this thread's timers.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
        let mut done = Done::default();
        let mut buffer = vec![0u8; self.buffer_bytes as usize];
        // All threads begin at one instant, whatever the timing: times are counted from there.
        let start = gate.wait(READY_PATIENCE)? + START_MARGIN;
        stop.sleep_until(start)?;
        let mut free = start;
        for step in &self.steps {
            let due = match timing {
                Timing::At(factor) => Some(start + Duration::from_nanos((step.at_ns as f64 * factor) as u64)),
                Timing::Think => Some(free + Duration::from_nanos(step.think_ns)),
                Timing::Fast => None,
            };
            match due {
                Some(due) => stop.sleep_until(due)?,
                None => stop.check()?,
            }
            let io = files.get(&step.file).and_then(Option::as_ref).context("a file of the trace is not open")?;
            let data = &mut buffer[..step.len as usize];
            if matches!(step.op, Op::Write) {
                source(step.file).fill(step.offset, data);
            }
            let begun = Instant::now();
            if let Some(due) = due {
                done.lateness_ns.record(begun.saturating_duration_since(due).as_nanos() as u64);
            }
            let outcome = match step.op {
                Op::Read => io.read_at(data, step.offset),
                Op::Write => io.write_at(data, step.offset),
                Op::Sync => io.sync().map(|()| 0),
            };
            free = Instant::now();
            done.latency_ns.record((free - begun).as_nanos() as u64);
            match step.op {
                Op::Read => done.reads += 1,
                Op::Write => done.writes += 1,
                Op::Sync => done.syncs += 1,
            }
            let wanted = match step.op {
                // The recorded read may have ended behind the file's end.
                Op::Read => u64::from(step.len).min(sizes[step.file as usize].saturating_sub(step.offset)),
                Op::Write => u64::from(step.len),
                Op::Sync => 0,
            };
            let failure = match &outcome {
                Ok(moved) => {
                    done.bytes += *moved as u64;
                    let (op, offset) = (if matches!(step.op, Op::Read) { "read" } else { "written" }, step.offset);
                    ((*moved as u64) < wanted).then(|| format!("only {moved} of {wanted} bytes {op} at {offset}"))
                }
                Err(error) => Some(format!("{error:#}")),
            };
            done.failed += u64::from(failure.is_some());
            done.failure = done.failure.or(failure);
            if let (Op::Read, Ok(moved)) = (step.op, &outcome) {
                let data = &data[..(*moved).min(step.len as usize)];
                done.verification.record(data.len() as u64, source(step.file).check(step.offset, data));
            }
            made.fetch_add(1, Relaxed);
        }
        done.ended = Some(free);
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::{FileId, Nanos};
    use impresario_trace::{Builder, FileInfo, Header, Origin, OriginId, Record};

    use super::*;
    use crate::folder::Folder;
    use crate::memory::Memory;

    const MS: u64 = 1_000_000;

    /// (origin, operation, file, offset, bytes, arrival in ms, how long it took in ms)
    type Row = (u32, TraceOp, u64, u64, u64, u64, u64);

    fn trace(rows: &[Row]) -> Trace {
        let mut builder = Builder::new(Header { clock_unix_ns: Some(5), ..Header::default() });
        for &(process, op, key, offset, len, at_ms, took_ms) in rows {
            let file = builder.file(FileInfo { key, ..FileInfo::default() }).unwrap();
            let origin = builder.origin(Origin { process, ..Origin::default() }).unwrap();
            let record = Record::new(op, file, offset, len, Nanos(at_ms * MS));
            builder.push(Record { origin, duration: Some(Nanos(took_ms * MS)), ..record }).unwrap();
        }
        builder.build()
    }

    fn options(timing: Timing) -> Options {
        Options { timing, folder: "replay".into(), overwrite: false, keep: false, bytes_max: 1 << 30 }
    }

    fn some() -> Trace {
        use TraceOp::{Open, Read, Sync, Write};
        trace(&[
            (1, Open, 7, 0, 0, 0, 0),
            (1, Read, 7, 0, 4096, 10, 2),
            (2, Write, 7, 4096, 10_000, 11, 5),
            (1, Read, 7, 50_000, 4096, 20, 30),
            // Beside the one before: another thread of the same client.
            (1, Read, 8, 100, 300, 25, 5),
            (2, Sync, 7, 0, 0, 60, 1),
            (1, Read, 7, 8192, 4096, 110, 0),
        ])
    }

    #[test]
    fn a_plan_has_a_thread_for_each_request_under_way() {
        let plan = Plan::new(&[some()]).unwrap();
        assert_eq!((plan.origins, plan.lanes.len(), plan.requests(), plan.left_out), (2, 3, 6, 1));
        assert_eq!(plan.sizes, [54_096, 400]);
        assert_eq!(plan.span_ns, 100 * MS);
        let steps =
            |lane: usize| plan.lanes[lane].steps.iter().map(|s| (s.at_ns / MS, s.think_ns / MS)).collect::<Vec<_>>();
        assert_eq!(steps(0), [(0, 0), (10, 8), (100, 60)]);
        assert_eq!((steps(1), steps(2)), (vec![(1, 1), (50, 44)], vec![(15, 15)]));
        // More concurrent requests than threads: all are made, each thread's in order.
        let many: Vec<Row> = (0..2000).map(|i| (i as u32 % 700, TraceOp::Read, 1, i * 10, 10, i / 100, 1000)).collect();
        let plan = Plan::new(&[trace(&many)]).unwrap();
        assert_eq!((plan.requests(), plan.lanes.len()), (2000, THREADS_MAX));
        assert!(plan.origins <= THREADS_MAX && plan.lanes.iter().all(|l| l.steps.is_sorted_by_key(|s| s.at_ns)));
    }

    #[test]
    fn what_is_replayed_is_what_was_recorded() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("mine"), "untouched").unwrap();
        let (memory, real) = (Memory::default(), Folder::new(folder.path()).unwrap());
        let plan = Plan::new(&[some()]).unwrap();
        for target in [&memory as &dyn Target, &real] {
            for (timing, least_s) in
                [(Timing::At(1.0), 0.1), (Timing::At(0.5), 0.05), (Timing::Think, 0.068), (Timing::Fast, 0.0)]
            {
                let done = replay(target, &plan, &options(timing), &Stop::new(), |_| {}).unwrap();
                assert_eq!((done.reads, done.writes, done.syncs, done.failed), (4, 1, 1, 0), "{timing:?}");
                assert_eq!((done.bytes, done.verification.mismatches), (3 * 4096 + 300 + 10_000, 0));
                assert!(done.time_s >= least_s * 0.999, "{timing:?}: {}", done.time_s);
                assert_eq!(done.lateness.is_none(), timing == Timing::Fast);
                assert!((done.recorded_s - 0.1).abs() < 1e-9 && done.latency.is_some());
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing stays");
        assert_eq!(std::fs::read_to_string(folder.path().join("mine")).unwrap(), "untouched");
    }

    /// A file system that loses the ends of files answers reads with fewer bytes, and no error.
    #[test]
    fn requests_that_come_back_short_have_failed() {
        let plan = Plan::new(&[some()]).unwrap();
        for (reads, writes, failed, told) in [
            (Some(0), None, 4, "only 0 of"),
            (Some(300), None, 3, "only 300 of 4096 bytes read"),
            (None, Some(5000), 1, "only 5000 of 10000"),
        ] {
            let memory = Memory { read_bytes_max: reads, write_bytes_max: writes, ..Memory::default() };
            let done = replay(&memory, &plan, &options(Timing::Fast), &Stop::new(), |_| {}).unwrap();
            assert_eq!((done.requests, done.failed), (6, failed), "{reads:?} {writes:?}");
            assert!(done.failure.as_ref().unwrap().starts_with(told), "{:?}", done.failure);
        }
        // What a recorded read did not get either is not missed.
        let mut behind_the_end = some();
        behind_the_end.records.iter_mut().filter(|r| r.offset == 50_000).for_each(|r| r.outcome = Outcome::Short(96));
        let plan = Plan::new(&[behind_the_end]).unwrap();
        assert_eq!(plan.sizes[0], 50_096);
        let done = replay(&Memory::default(), &plan, &options(Timing::Fast), &Stop::new(), |_| {}).unwrap();
        assert_eq!((done.failed, done.bytes), (0, 2 * 4096 + 96 + 300 + 10_000));
    }

    #[test]
    fn a_replay_takes_as_long_as_its_requests_do() {
        let reads: Vec<Row> = (0..3).map(|n| (1, TraceOp::Read, 7, n * 4096, 4096, n, 1)).collect();
        for (count, delay_ms) in [(1, 2), (3, 10)] {
            let plan = Plan::new(&[trace(&reads[..count])]).unwrap();
            let memory = Memory::default();
            *memory.delay.lock() = Duration::from_millis(delay_ms);
            let done = replay(&memory, &plan, &options(Timing::Fast), &Stop::new(), |_| {}).unwrap();
            assert!(
                done.time_s >= (count as u64 * delay_ms) as f64 / 1e3,
                "{count} of {delay_ms} ms: {} s",
                done.time_s
            );
        }
    }

    /// Other files are not touched, and those of an earlier replay only if requested.
    #[test]
    fn a_folder_that_is_there_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let target = Folder::new(folder.path()).unwrap();
        let plan = Plan::new(&[some()]).unwrap();
        let file = folder.path().join("replay/00000");
        let once = |o: &Options| replay(&target, &plan, o, &Stop::new(), |_| {});
        let fast = options(Timing::Fast);
        std::fs::create_dir(folder.path().join("replay")).unwrap();
        std::fs::write(&file, "mine").unwrap();
        let refused = once(&fast).unwrap_err().to_string();
        assert!(refused.contains("replay is there already"), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
        std::fs::remove_dir_all(folder.path().join("replay")).unwrap();
        once(&Options { keep: true, ..fast.clone() }).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 54_096);
        assert!(once(&fast).is_err());
        assert_eq!(once(&Options { keep: true, overwrite: true, ..fast.clone() }).unwrap().requests, 6);
        assert!(file.exists());
        let stop = Stop::new();
        stop.set();
        let stopped = replay(&target, &plan, &Options { overwrite: true, ..fast.clone() }, &stop, |_| {}).unwrap_err();
        assert!(format!("{stopped:#}").contains("stopped"), "{stopped:#}");
        let small = Options { bytes_max: 1000, folder: "other".into(), ..fast };
        assert!(once(&small).unwrap_err().to_string().contains("--size-max"));
        assert!(!folder.path().join("other").exists());
    }

    #[test]
    fn traces_that_cannot_be_replayed_are_refused() {
        let refused = |traces: &[Trace]| Plan::new(traces).err().unwrap();
        assert!(refused(&[trace(&[])]).contains("no reads"));
        assert!(refused(&[trace(&[(1, TraceOp::Read, 1, 0, 1 << 40, 0, 1)])]).contains("1 TiB"));
        assert!(refused(&[trace(&[(1, TraceOp::Read, 1, u64::MAX - 5, 10, 0, 1)])]).contains("beyond the end"));
        let mut blind = some();
        blind.header.clock_unix_ns = None;
        assert!(refused(&[blind, some()]).contains("wall clock"));
        // Several servers' parts of a file are separate files; the same file of several nodes is one.
        let mut parts = [some(), some()];
        assert_eq!(Plan::new(&parts).unwrap().files(), 2);
        for (part, name) in parts.iter_mut().zip(["data.0", "data.1"]) {
            part.header.space = Space::Lane;
            part.header.command = name.into();
        }
        let plan = Plan::new(&parts).unwrap();
        assert_eq!((plan.files(), plan.requests()), (4, 12));
        // Undefined numbers are not an error.
        let mut odd = some();
        odd.records.iter_mut().for_each(|r| (r.file, r.origin) = (FileId(99), OriginId(77)));
        assert_eq!(Plan::new(&[odd]).unwrap().files(), 1);
        for (text, wanted) in
            [("original", Ok(Timing::At(1.0))), ("scaled:2", Ok(Timing::At(2.0))), ("think", Ok(Timing::Think))]
        {
            assert_eq!(text.parse::<Timing>(), wanted);
        }
        for text in ["scaled:0", "scaled:x", "slow", "scaled:NaN", ""] {
            assert!(text.parse::<Timing>().is_err(), "{text}");
        }
    }
}
