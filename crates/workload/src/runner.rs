//! Runs a workload once: processes as threads with their own clients, timed from the barrier to the last reply.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_base::Histogram;
use impresario_base::lock::Mutex;
use impresario_store::monotonic_ns;

use crate::access::{Fault, Faulty, FileIo, Identity, Moved, Process, Target};
use crate::cpu::{MachineTimes, process_cpu};
use crate::dataset::{DataSet, Verification};
use crate::gate::{Broken, Gate};
use crate::plan::{Application, Operation, Workload};
use crate::result::{AppResult, Measured, RunResult};
use crate::stop::Stop;
use impresario_base::random::{Random, mix};

/// Up to this many bytes over all processes, content is generated before and checked after the timed part; beyond it,
/// between the requests of the timed part.
const ARENA_BYTES_MAX: u64 = 2 << 30;
/// How long processes wait for each other to connect.
const READY_PATIENCE: Duration = Duration::from_secs(120);
/// No run takes longer. Requests have their own timeouts; this only bounds every wait.
const RUN_PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// How a workload is run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Injects a fault into the writer of rank 0 of the first application.
    pub fault: Option<Fault>,
    /// Compares everything after the run. Without it nothing is compared, and the result says so.
    pub verify: bool,
    /// Number of the pair: determines the order in which processes start, unless all start at once.
    pub pair: u32,
    /// Run every application alone first and report its interference factor.
    pub alone: bool,
}

/// Runs a workload over its prepared files, compares everything after the run, and fails where that is wrong.
pub fn run_verified(
    target: &dyn Target,
    set: &mut DataSet,
    workload: &Workload,
    options: &RunOptions,
    stop: &Stop,
) -> Result<RunResult> {
    let result = run(target, set, workload, &RunOptions { verify: true, ..options.clone() }, stop)?;
    let first = || result.verification.first.first().map_or("nothing was compared".into(), ToString::to_string);
    anyhow::ensure!(result.verification.passed(), "the data are wrong: {}", first());
    Ok(result)
}

/// Runs a workload over its prepared files.
pub fn run(
    target: &dyn Target,
    set: &mut DataSet,
    workload: &Workload,
    options: &RunOptions,
    stop: &Stop,
) -> Result<RunResult> {
    workload.check().map_err(anyhow::Error::msg)?;
    let mut alone_s = Vec::new();
    if options.alone && workload.applications.len() > 1 {
        for index in 0..workload.applications.len() {
            let timing = timed(target, set, workload, &[index], options, stop)?;
            alone_s.push(timing.applications.first().map_or(0.0, |a| a.time_s));
        }
    }
    let everyone: Vec<usize> = (0..workload.applications.len()).collect();
    let mut result = timed(target, set, workload, &everyone, options, stop)?;
    for (application, alone) in result.applications.iter_mut().zip(&alone_s) {
        application.interference = (*alone > 0.0).then(|| application.time_s / alone);
    }
    if options.verify {
        // Reads verified on arrival are sufficient; writes are read back by fresh clients.
        if workload.applications.iter().any(|a| a.operation == Operation::Write) || !result.verification.passed() {
            result.verification.merge(set.verify(target, stop)?);
        }
    } else {
        result.verification = Verification::default();
    }
    Ok(result)
}

/// Rendezvous of processes and runner: the runner reads the clocks while no process works.
struct Gates {
    /// Connections are made and buffers are filled.
    ready: Gate,
    /// The timed part begins.
    start: Gate,
    /// All processes have finished.
    done: Gate,
    /// The runner has read the clocks; comparing may begin.
    release: Gate,
}

impl Gates {
    fn new(processes: usize) -> Gates {
        let gate = || Gate::new(processes + 1);
        Gates { ready: gate(), start: gate(), done: gate(), release: gate() }
    }

    fn break_open(&self) {
        [&self.ready, &self.start, &self.done, &self.release].into_iter().for_each(Gate::break_open);
    }
}

/// CPU times at one instant.
struct CpuTimes {
    machine: Option<MachineTimes>,
    /// Absent where the servers' processes are not known.
    servers: Option<Duration>,
    clients: Duration,
}

impl CpuTimes {
    fn now(servers: &[u32]) -> CpuTimes {
        CpuTimes {
            machine: MachineTimes::now(),
            servers: (!servers.is_empty()).then(|| servers.iter().filter_map(|pid| process_cpu(*pid)).sum()),
            clients: process_cpu(std::process::id()).unwrap_or_default(),
        }
    }
}

/// The report of a process.
struct Finished {
    rank: u32,
    started: Instant,
    /// When it started to run: the machine wakes one process after another.
    came: Instant,
    ended: Instant,
    sent: Moved,
    verification: Verification,
}

/// The timed part over some of the applications.
fn timed(
    target: &dyn Target,
    set: &mut DataSet,
    workload: &Workload,
    chosen: &[usize],
    options: &RunOptions,
    stop: &Stop,
) -> Result<RunResult> {
    let apps: Vec<(usize, &Application)> = chosen.iter().map(|&i| (i, &workload.applications[i])).collect();
    let processes: usize = apps.iter().map(|(_, a)| a.pattern.processes as usize).sum();
    let in_arena = apps.iter().map(|(_, a)| a.pattern.total_bytes()).sum::<u64>() <= ARENA_BYTES_MAX;
    let gates = Gates::new(processes);
    let pids = target.pids();
    let delays = workload.start_delays(options.pair);
    let first_start_us = apps.iter().map(|(_, a)| a.start_us).min().unwrap_or(0);

    let latencies_ns: Vec<Mutex<Histogram<5>>> = apps.iter().map(|_| Mutex::default()).collect();
    let (finished, opened, before, after, servers) = std::thread::scope(|scope| -> Result<_> {
        let mut threads = Vec::new();
        for (&(index, application), latency_ns) in apps.iter().zip(&latencies_ns) {
            for rank in 0..application.pattern.processes {
                let job = Job {
                    target,
                    set,
                    workload,
                    index,
                    application,
                    rank,
                    in_arena,
                    options,
                    first_start_us,
                    start_delay: delays[index][rank as usize],
                    latency_ns,
                    stop,
                };
                let gates = &gates;
                let thread = std::thread::Builder::new()
                    .name(format!("app{index}.{rank}"))
                    .spawn_scoped(scope, move || {
                        let result = job.run(gates);
                        if result.is_err() {
                            gates.break_open();
                        }
                        result
                    })
                    .context("starting a process of the benchmark")?;
                threads.push((index, thread));
            }
        }
        let watch = || -> Result<_> {
            gates.ready.wait(READY_PATIENCE)?;
            target.cool()?;
            // From here on the servers count the timed part.
            target.reset()?;
            let before = CpuTimes::now(&pids);
            let opened = gates.start.wait(READY_PATIENCE)?;
            gates.done.wait(RUN_PATIENCE)?;
            let after = CpuTimes::now(&pids);
            let servers = target.observe()?;
            gates.release.wait(READY_PATIENCE)?;
            Ok((opened, before, after, servers))
        };
        let watched = watch().inspect_err(|_| gates.break_open());
        let mut finished = Vec::new();
        let mut errors = Vec::new();
        for (index, thread) in threads {
            match thread.join() {
                Ok(Ok(f)) => finished.push((index, f)),
                Ok(Err(e)) => errors.push(e),
                Err(_) => errors.push(anyhow::anyhow!("a process of application {index} panicked")),
            }
        }
        match watched {
            Ok((opened, before, after, servers)) if errors.is_empty() => Ok((finished, opened, before, after, servers)),
            Ok(_) => Err(cause(errors)),
            Err(error) => {
                errors.push(error);
                Err(cause(errors))
            }
        }
    })?;
    // From here on the files hold what was written.
    for &(index, application) in &apps {
        if application.operation == Operation::Write {
            set.advance(index, set.generation(index) + 1);
        }
    }

    let end = finished.iter().map(|(_, f)| f.ended).max().unwrap_or(opened);
    let start = finished.iter().map(|(_, f)| f.started).min().unwrap_or(opened);
    let mut applications = Vec::new();
    let mut latency_ns = Histogram::<5>::default();
    for (&(index, _), latency) in apps.iter().zip(latencies_ns) {
        let latency = latency.into_inner();
        latency_ns.merge(&latency);
        let latency = (latency.count() > 0).then(|| latency.summary().into());
        let mut own: Vec<&Finished> = finished.iter().filter(|(i, _)| *i == index).map(|(_, f)| f).collect();
        own.sort_by_key(|f| f.rank);
        let app_start = own.iter().map(|f| f.started).min().unwrap_or(start);
        let app_end = own.iter().map(|f| f.ended).max().unwrap_or(app_start);
        let times = own.iter().map(|f| f.ended.duration_since(f.started).as_secs_f64()).collect();
        let start_s = app_start.duration_since(start).as_secs_f64();
        let came = own.iter().map(|f| f.came.duration_since(start).as_secs_f64()).collect();
        let time_s = app_end.duration_since(app_start).as_secs_f64();
        applications.push(AppResult { came_s: came, latency, ..AppResult::new(index, start_s, time_s, times) });
    }
    let mut measured = Measured {
        began_ns: monotonic_ns().saturating_sub(start.elapsed().as_nanos() as u64),
        bytes: apps.iter().map(|(_, a)| a.bytes()).sum(),
        requests: apps.iter().map(|(_, a)| a.requests()).sum(),
        latency_ns: latency_ns.summary(),
        leaving_clients: Moved::default(),
        servers,
        idle_cpu: before.machine.zip(after.machine).and_then(|(b, a)| a.idle_since(&b)),
        server_cpu_s: before.servers.zip(after.servers).map(|(b, a)| a.saturating_sub(b).as_secs_f64()),
        client_cpu_s: after.clients.saturating_sub(before.clients).as_secs_f64(),
        verification: Verification::default(),
        checked_in_line: !in_arena,
    };
    for (_, f) in finished {
        measured.leaving_clients = measured.leaving_clients.plus(f.sent);
        measured.verification.merge(f.verification);
    }
    Ok(RunResult::new(end.duration_since(start).as_secs_f64(), applications, measured))
}

/// The error to report: the original one, not one that merely refers to another.
fn cause(mut errors: Vec<anyhow::Error>) -> anyhow::Error {
    let at = errors.iter().position(|e| !e.is::<Broken>()).unwrap_or(0);
    errors.swap_remove(at)
}

/// One process of an application.
struct Job<'a> {
    target: &'a dyn Target,
    set: &'a DataSet,
    workload: &'a Workload,
    index: usize,
    application: &'a Application,
    rank: u32,
    in_arena: bool,
    options: &'a RunOptions,
    first_start_us: u64,
    start_delay: Duration,
    latency_ns: &'a Mutex<Histogram<5>>,
    stop: &'a Stop,
}

impl Job<'_> {
    fn run(&self, gates: &Gates) -> Result<Finished> {
        // Microsecond waits need a microsecond timer: the kernel's default slack is 50 µs.
        // SAFETY: PR_SET_TIMERSLACK takes a number and changes only this thread's timers.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
        let pattern = &self.application.pattern;
        let write = self.application.operation == Operation::Write;
        let nodes = self.target.nodes();
        let node = (nodes > 0).then(|| self.workload.placement.node(self.index, self.rank, pattern.processes, nodes));
        let client = self.target.connect(Identity {
            job: self.index as u64 + 1,
            node,
            wire_max_bytes: self.workload.wire_max_bytes,
            name: format!("bench app {} rank {}", self.index, self.rank),
        })?;
        // A rank touches one file in every pattern.
        let file_index = pattern.access(self.rank, 0).file;
        let path = self.set.path(self.index, file_index);
        let mut file = client.open(&path, write).with_context(|| format!("opening {path}"))?;
        let generation = self.set.generation(self.index);
        let source = self.set.source(self.index, file_index, self.rank, generation + u32::from(write));
        if let Some(fault) = self.options.fault.filter(|_| write && self.index == 0 && self.rank == 0) {
            file = Box::new(Faulty::new(file, fault, source));
        }

        let arena_len = if self.in_arena { pattern.process_bytes } else { 0 };
        let mut arena = vec![0u8; usize::try_from(arena_len).context("a process's data do not fit into memory")?];
        let chunk = usize::try_from(pattern.request_bytes).context("a request does not fit into memory")?;
        for (access, slot) in pattern.accesses(self.rank).zip(arena.chunks_mut(chunk)) {
            // Fill readers' buffers too, with the wrong generation: the pages then exist, and a missing reply is
            // detected.
            source_for_slot(source, write).fill(access.offset, slot);
        }
        let slots: Vec<Mutex<&mut [u8]>> = arena.chunks_mut(chunk).map(Mutex::new).collect();

        let sent_before = client.sent();
        gates.ready.wait(READY_PATIENCE)?;
        let opened = gates.start.wait(READY_PATIENCE)?;
        // Without a barrier a process's time begins when it starts to run, not when the last one was ready.
        let opened = if self.workload.barrier { opened } else { Instant::now() };
        let started = opened + Duration::from_micros(self.application.start_us - self.first_start_us);
        self.stop.sleep_until(started + self.start_delay)?;
        let came = Instant::now();

        let outcome = self.application.parts().try_fold(Verification::default(), |mut sum, part| {
            if part.start > 0 {
                self.stop.sleep_until(Instant::now() + Duration::from_micros(self.application.pause_us))?;
            }
            let next = AtomicU64::new(part.start);
            let worker = |lane: u32| {
                let random = chance(self.workload.seed, [self.index as u64, self.rank.into(), lane.into(), part.start]);
                self.requests(random, file.as_ref(), &slots, (&next, part.end), source)
            };
            if self.application.queue_depth == 1 {
                sum.merge(worker(0)?);
                return Ok(sum);
            }
            std::thread::scope(|scope| {
                let lanes: Vec<_> =
                    (0..self.application.queue_depth).map(|lane| scope.spawn(move || worker(lane))).collect();
                for lane in lanes {
                    let Ok(result) = lane.join() else { bail!("a thread of {path} panicked") };
                    sum.merge(result?);
                }
                Ok(sum)
            })
        });
        let outcome = outcome.and_then(|o| if write && self.workload.sync { file.sync().map(|()| o) } else { Ok(o) });
        let ended = Instant::now();
        let mut verification =
            outcome.with_context(|| format!("application {}, rank {}, {path}", self.index, self.rank))?;
        let sent = moved_since(client.as_ref(), sent_before);
        // Comparing costs CPU: wait until all have finished and the clocks were read.
        gates.done.wait(RUN_PATIENCE)?;
        gates.release.wait(RUN_PATIENCE)?;
        if !write && self.in_arena && self.options.verify {
            for (access, slot) in pattern.accesses(self.rank).zip(&slots) {
                let slot = slot.lock();
                verification.record(access.len, source.check(access.offset, &slot));
            }
        }
        Ok(Finished { rank: self.rank, started, came, ended, sent, verification })
    }

    /// Issues requests up to the `end`th; several lanes of one process share the list.
    fn requests(
        &self,
        mut random: Random,
        file: &dyn FileIo,
        slots: &[Mutex<&mut [u8]>],
        (next, end): (&AtomicU64, u64),
        source: crate::content::Source,
    ) -> Result<Verification> {
        let pattern = &self.application.pattern;
        let write = self.application.operation == Operation::Write;
        let per_loop = pattern.requests();
        let mut own = if slots.is_empty() { vec![0; pattern.request_bytes as usize] } else { Vec::new() };
        // Add latencies to the shared histogram by the thousand: a lock per latency would cost more than counting it.
        let mut recent_ns: Vec<u64> = Vec::with_capacity(1024);
        let mut verification = Verification::default();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= end || recent_ns.len() == recent_ns.capacity() {
                let mut histogram = self.latency_ns.lock();
                recent_ns.drain(..).for_each(|ns| histogram.record(ns));
            }
            if index >= end {
                return Ok(verification);
            }
            self.stop.check()?;
            let think = self.application.think.draw(&mut random);
            if !think.is_zero() {
                std::thread::sleep(think);
            }
            let access = pattern.access(self.rank, index % per_loop);
            let mut guard;
            let buffer: &mut [u8] = match slots.get((index % per_loop) as usize) {
                Some(slot) => {
                    guard = slot.lock();
                    &mut guard
                }
                None => {
                    let buffer = &mut own[..access.len as usize];
                    source_for_slot(source, write).fill(access.offset, buffer);
                    buffer
                }
            };
            let begin = Instant::now();
            let moved =
                if write { file.write_at(buffer, access.offset)? } else { file.read_at(buffer, access.offset)? };
            recent_ns.push(begin.elapsed().as_nanos() as u64);
            if moved as u64 != access.len {
                bail!("only {moved} of {} bytes were moved at offset {}", access.len, access.offset);
            }
            if !write && slots.is_empty() && self.options.verify {
                verification.record(access.len, source.check(access.offset, buffer));
            }
        }
    }
}

/// Chance in the waiting times of one application, rank, lane and part of its requests: different for each.
fn chance(seed: u64, of: [u64; 4]) -> Random {
    Random::new(of.into_iter().fold(seed, |sum, number| mix(sum.wrapping_add(number))))
}

/// The initial content of a buffer: the data of a write; for a read, something that must be overwritten.
fn source_for_slot(source: crate::content::Source, write: bool) -> crate::content::Source {
    let generation = if write { source.generation } else { source.generation.wrapping_add(1) };
    crate::content::Source { generation, ..source }
}

fn moved_since(client: &dyn Process, before: Moved) -> Moved {
    let after = client.sent();
    Moved { requests: after.requests.saturating_sub(before.requests), bytes: after.bytes.saturating_sub(before.bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::pattern::{Pattern, Shape};
    use crate::plan::{Placement, Think};

    fn workload(shape: Shape, operation: Operation) -> Workload {
        Workload::uniform(
            2,
            Pattern { shape, request_bytes: 1000, process_bytes: 4500, processes: 3, seed: 5 },
            operation,
        )
    }

    fn checked() -> RunOptions {
        RunOptions { verify: true, ..RunOptions::default() }
    }

    #[test]
    fn every_shape_and_operation_runs_and_verifies() {
        for shape in Shape::ALL {
            for operation in [Operation::Write, Operation::Read] {
                for queue_depth in [1, 3] {
                    let memory = Memory::default();
                    let mut w = workload(shape, operation);
                    w.applications.iter_mut().for_each(|a| (a.queue_depth, a.loops) = (queue_depth, 2));
                    let mut set = DataSet::new(&w).unwrap();
                    set.prepare(&memory, &Stop::new()).unwrap();
                    let result = run(&memory, &mut set, &w, &checked(), &Stop::new()).unwrap();
                    assert!(result.verification.passed(), "{shape} {operation}: {:?}", result.verification);
                    assert_eq!(result.verification.checked_bytes, 2 * 3 * 4500);
                    assert_eq!((result.bytes, result.requests), (2 * 2 * 3 * 4500, 2 * 2 * 3 * 5));
                    assert_eq!(result.leaving_clients, Moved { requests: 60, bytes: 54_000 });
                    assert_eq!(result.applications.len(), 2);
                    assert!(result.applications.iter().all(|a| a.process_s.len() == 3));
                    assert!(result.makespan_s > 0.0);
                    set.remove(&memory).unwrap();
                }
            }
        }
    }

    #[test]
    fn injected_faults_make_verification_fail() {
        for fault in [Fault::Drop, Fault::Swap, Fault::Stale] {
            for shape in Shape::ALL {
                let memory = Memory::default();
                let w = workload(shape, Operation::Write);
                let mut set = DataSet::new(&w).unwrap();
                set.prepare(&memory, &Stop::new()).unwrap();
                let options = RunOptions { fault: Some(fault), ..checked() };
                let result = run(&memory, &mut set, &w, &options, &Stop::new()).unwrap();
                assert!(!result.verification.passed(), "{fault:?} in {shape} was not seen");
                let first = result.verification.first[0];
                assert_eq!((first.writer, first.generation), (0, 2), "{fault:?}: {first}");
                // The same files are valid again after a write without the fault.
                let result = run(&memory, &mut set, &w, &checked(), &Stop::new()).unwrap();
                assert!(result.verification.passed(), "{fault:?} in {shape}: {:?}", result.verification);
            }
        }
    }

    /// A reader that gets nothing, or old data, must not pass because its buffer happened to match.
    #[test]
    fn a_read_of_wrong_data_is_seen() {
        let memory = Memory::default();
        let w = workload(Shape::Strided, Operation::Read);
        let mut set = DataSet::new(&w).unwrap();
        set.prepare(&memory, &Stop::new()).unwrap();
        let file = memory.connect(Identity { job: 0, node: None, wire_max_bytes: None, name: String::new() }).unwrap();
        let file = file.open(&set.path(1, 0), true).unwrap();
        let mut byte = [0];
        file.read_at(&mut byte, 777).unwrap();
        file.write_at(&[!byte[0]], 777).unwrap();
        let result = run(&memory, &mut set, &w, &checked(), &Stop::new()).unwrap();
        assert_eq!(result.verification.first[0].offset, 777);
    }

    #[test]
    fn start_offsets_thinking_and_alone() {
        let memory = Memory::default();
        *memory.delay.lock() = Duration::from_millis(2);
        let mut w = workload(Shape::Contiguous, Operation::Read);
        w.placement = Placement::Cyclic;
        w.applications[1].start_us = 30_000;
        w.applications[0].think = Think::Uniform(100.0);
        let mut set = DataSet::new(&w).unwrap();
        set.prepare(&memory, &Stop::new()).unwrap();
        let result = run(&memory, &mut set, &w, &RunOptions { alone: true, ..checked() }, &Stop::new()).unwrap();
        let start_s = result.applications[1].start_s;
        assert!((0.0299..0.5).contains(&start_s), "{start_s}");
        assert!(result.makespan_s >= 0.04);
        assert!(result.applications.iter().all(|a| a.interference.is_some_and(|i| i > 0.1)));
        assert!(result.latency.mean_us >= 2000.0);
    }

    #[test]
    fn chance_repeats_in_no_part_lane_rank_or_application() {
        // Each of these three ways: the parts begin with the 1st, 97th and 193rd request.
        let of = |n: u64| [n / 27, n / 9 % 3, n / 3 % 3, n % 3 * 96];
        let drawn: std::collections::BTreeSet<u64> = (0..81).map(|n| chance(5, of(n)).next_u64()).collect();
        assert_eq!(drawn.len(), 81);
    }

    #[test]
    fn processes_pause_between_the_quarters_of_their_requests() {
        for queue_depth in [1, 3] {
            let memory = Memory::default();
            let mut w = workload(Shape::Contiguous, Operation::Read);
            w.applications.iter_mut().for_each(|a| (a.queue_depth, a.loops) = (queue_depth, 2));
            w.applications[1].pause_us = 100_000;
            let mut set = DataSet::new(&w).unwrap();
            set.prepare(&memory, &Stop::new()).unwrap();
            let result = run(&memory, &mut set, &w, &checked(), &Stop::new()).unwrap();
            assert!(result.verification.passed(), "{:?}", result.verification);
            assert_eq!((result.requests, result.verification.checked_bytes), (2 * 2 * 3 * 5, 2 * 3 * 4500));
            let [without, with] = [0, 1].map(|app| result.applications[app].time_s);
            assert!(with >= 0.3 && without < with, "{without} {with}");
        }
    }

    #[test]
    fn what_fails_ends_the_run_with_its_reason() {
        let memory = Memory::default();
        let w = workload(Shape::Strided, Operation::Read);
        let mut set = DataSet::new(&w).unwrap();
        let error = run(&memory, &mut set, &w, &checked(), &Stop::new()).unwrap_err();
        assert!(format!("{error:#}").contains("no such file"), "{error:#}");
        set.prepare(&memory, &Stop::new()).unwrap();
        let stop = Stop::new();
        stop.set();
        let error = run(&memory, &mut set, &w, &checked(), &stop).unwrap_err();
        assert!(format!("{error:#}").contains("stopped"), "{error:#}");
    }
}
