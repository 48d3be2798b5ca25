//! A modelled device in real time: each request takes as long as the model says, and no longer because the host was
//! slow.
//!
//! One thread serves one transfer at a time. A transfer starts at the end of the previous one, or at its submission if
//! that is later. Its end is a deadline on the monotonic clock, and the thread sleeps until then. Only then does it run
//! the work submitted with the request, which accesses the store and reports the completion. The model's timeline does
//! not depend on when the thread woke up or how long that work took: the next transfer is chosen and its deadline set
//! at the modelled end, before that work. How late the work began is the *lateness*. It is measured and reported,
//! because results with much lateness are worthless.
//!
//! **Grace.** A scheduler that keeps one request in flight submits the next one when it learns of a completion, that
//! is, after the host has woken up and done the work. A real host with a real disk would have learned of it at once. So
//! a request that a completion submits on the device's thread within `late_grace_us` after that completion's modelled
//! end counts as submitted at that end. The number of such requests is reported. Requests from other threads always
//! count from their actual submission.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle, ThreadId};

use impresario_base::Histogram;
use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_base::slab::{Key, Slab};
use impresario_device::{DeviceParams, DeviceQueue, Disk, Io, Op, Order, Placement, Served, Taken};
use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::time::Timespec;
use serde::Serialize;

/// When the modelled device served a request, on the clock of [`monotonic_ns`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Start of the first transfer of the request.
    pub started_ns: u64,
    /// End of the last transfer of the request.
    pub finished_ns: u64,
    /// Delay of this report after `finished_ns`.
    pub lateness_ns: u64,
}

/// A request to the device.
pub struct Job {
    /// Its transfers. If empty and without a flush, the request costs nothing, but the device's thread runs it in turn.
    pub ios: Vec<Io>,
    /// Write the drive's write cache to the platter after the transfers.
    pub flush: bool,
    /// Run once on the device's thread when the request is done; never under a lock. Dropped without being run if the
    /// device stops before. Its duration delays other completions, not the model.
    pub run: Box<dyn FnOnce(Timing) + Send>,
}

/// Statistics since the start or [`ModelledDevice::reset`]. Times are the model's.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceStatus {
    /// The current order.
    pub order: Order,
    /// Completed requests.
    pub requests: u64,
    /// Completed transfers: more than requests where these span chunks, fewer where the elevator merged.
    pub transfers: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Flushes of the write cache.
    pub flushes: u64,
    /// Mean length of a transfer, bytes.
    pub transfer_mean_bytes: f64,
    /// Mean time of a transfer, ms.
    pub service_mean_ms: f64,
    /// Time for which the device was busy, s.
    pub busy_s: f64,
    /// Time spent moving the head, s.
    pub seek_s: f64,
    /// Time spent waiting for the platter, s.
    pub rotation_s: f64,
    /// Time spent moving data, s.
    pub transfer_s: f64,
    /// Transfers served from the drive's memory.
    pub cached: u64,
    /// Outstanding transfers, including the one in service.
    pub queue_now: usize,
    /// Mean number of outstanding transfers when a transfer starts, including it.
    pub queue_mean: f64,
    /// How late the host reported completions.
    pub lateness: Lateness,
    /// Requests that counted as submitted at the end of the request that caused them (see `late_grace_us`).
    pub grace_requests: u64,
    /// Time since the start or reset, s.
    pub measured_s: f64,
}

/// Quantiles of lateness, µs; accurate to one sixteenth.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Lateness {
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Maximum.
    pub max_us: f64,
}

/// The current time, ns of `CLOCK_MONOTONIC`: the clock of all times in this module.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A modelled device and its thread, which ends when the value is dropped.
pub struct ModelledDevice {
    shared: Arc<Shared>,
    placement: Placement,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
}

struct Shared {
    state: Mutex<State>,
    submitted: Condvar,
    grace_ns: u64,
}

struct State {
    disk: Disk,
    queue: DeviceQueue<Ticket>,
    /// Requests without remaining transfers: flushes and those that cost nothing; served before the queue.
    barriers: VecDeque<Key>,
    jobs: Slab<Waiting>,
    /// The modelled end whose completions are running.
    reporting_ns: Option<u64>,
    serving: bool,
    closed: bool,
    statistics: Statistics,
}

/// The request of a transfer and its time of submission.
#[derive(Clone, Copy)]
struct Ticket {
    job: Key,
    submitted_ns: u64,
}

struct Waiting {
    transfers_left: usize,
    flush: bool,
    submitted_ns: u64,
    started_ns: u64,
    run: Box<dyn FnOnce(Timing) + Send>,
}

/// The current activity of the device.
struct Service {
    end_ns: u64,
    work: Work,
}

enum Work {
    Transfer(Taken<Ticket>),
    Barrier { job: Key },
}

type Report = (Box<dyn FnOnce(Timing) + Send>, Timing);

impl ModelledDevice {
    /// Starts the device. Fails if the parameters are out of range or no thread can be created.
    pub fn start(params: &DeviceParams) -> io::Result<Arc<ModelledDevice>> {
        params.check().map_err(|message| io::Error::new(io::ErrorKind::InvalidInput, message))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(params)),
            submitted: Condvar::new(),
            grace_ns: u64::from(params.late_grace_us) * 1000,
        });
        let serving = Arc::clone(&shared);
        let thread = thread::Builder::new().name("disk-model".into()).spawn(move || serving.serve())?;
        let thread_id = thread.thread().id();
        let thread = Mutex::new(Some(thread));
        Ok(Arc::new(ModelledDevice { shared, placement: Placement::new(params), thread, thread_id }))
    }

    /// The placement of files on this device.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Submits a request and returns at once. The caller bounds the number outstanding. After [`ModelledDevice::stop`]
    /// the request is dropped.
    pub fn submit(&self, job: Job) {
        let mut state = self.shared.lock();
        if state.closed {
            drop(state);
            return drop(job);
        }
        let now_ns = monotonic_ns();
        let reporting_ns = state.reporting_ns.filter(|_| thread::current().id() == self.thread_id);
        let graced = reporting_ns.filter(|end_ns| now_ns.saturating_sub(*end_ns) <= self.shared.grace_ns);
        state.statistics.grace_requests += u64::from(graced.is_some());
        state.add(job, graced.unwrap_or(now_ns));
        drop(state);
        self.shared.submitted.notify_one();
    }

    /// Changes the order of outstanding and future requests.
    pub fn set_order(&self, order: Order) {
        self.shared.lock().queue.set_order(order);
    }

    /// Statistics of the device.
    pub fn status(&self) -> DeviceStatus {
        let state = self.shared.lock();
        state.statistics.status(state.queue.order(), state.queue.len() + usize::from(state.serving))
    }

    /// Zeroes the statistics and clears the drive's read cache, so that the next measurement begins cold.
    pub fn reset(&self) {
        let mut state = self.shared.lock();
        state.statistics = Statistics::new();
        state.disk.forget_reads(monotonic_ns());
    }

    /// Stops the device (stop its submitters first): outstanding requests are dropped without being run. Waits for the
    /// thread, at most until the transfer in progress ends; on the device's own thread it does not wait.
    pub fn stop(&self) {
        self.shared.lock().closed = true;
        self.shared.submitted.notify_one();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread::current().id() != self.thread_id
            && thread.join().is_err()
        {
            tracing::error!("the thread of the modelled device panicked");
        }
    }
}

impl Drop for ModelledDevice {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn serve(&self) {
        // By default the kernel may delay each wake-up by 50 µs.
        if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
            tracing::warn!(%error, "cannot set precise timers; the modelled device will report completions later");
        }
        if !ask_for_priority() {
            tracing::debug!("no privilege to raise the priority of the modelled device's thread");
        }
        let mut next = None;
        while let Some(service) = next.take().or_else(|| self.wait_for_work()) {
            sleep_until(service.end_ns);
            let end_ns = service.end_ns;
            let mut state = self.lock();
            let reports = state.finish(service, monotonic_ns());
            // The device goes on at once, however late the host learns of the end.
            next = if state.closed { None } else { state.begin() };
            state.reporting_ns = Some(end_ns);
            drop(state);
            for (run, timing) in reports {
                if catch_unwind(AssertUnwindSafe(|| run(timing))).is_err() {
                    tracing::error!("the completion of a request to the modelled device panicked");
                }
            }
            self.lock().reporting_ns = None;
        }
        let outstanding = std::mem::take(&mut self.lock().jobs);
        drop(outstanding);
    }

    /// The next service; `None` when the device is stopped.
    fn wait_for_work(&self) -> Option<Service> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(service) = state.begin() {
                return Some(service);
            }
            state = self.submitted.wait(state);
        }
    }
}

/// Requests a higher priority for this thread: it sleeps nearly always, and a disk does not compete with the host's
/// processes for a processor. Needs a privilege (root, or `ulimit -r`); without it the lateness on a busy host is some
/// milliseconds larger, and reported.
fn ask_for_priority() -> bool {
    let param = libc::sched_param { sched_priority: 1 };
    // Threads that a completion starts do not inherit the priority.
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` lives through the call, which only reads it; 0 names the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const param) == 0 }
}

/// Sleeps until the given time; returns at once if it is past.
fn sleep_until(end_ns: u64) {
    let request = Timespec { tv_sec: (end_ns / 1_000_000_000) as i64, tv_nsec: (end_ns % 1_000_000_000) as _ };
    while rustix::thread::clock_nanosleep_absolute(ClockId::Monotonic, &request) == Err(Errno::INTR) {}
}

impl State {
    fn new(params: &DeviceParams) -> State {
        State {
            disk: Disk::new(params),
            queue: DeviceQueue::new(params),
            barriers: VecDeque::new(),
            jobs: Slab::default(),
            reporting_ns: None,
            serving: false,
            closed: false,
            statistics: Statistics::new(),
        }
    }

    fn add(&mut self, job: Job, submitted_ns: u64) {
        let Job { ios, flush, run } = job;
        let waiting = Waiting { transfers_left: ios.len(), flush, submitted_ns, started_ns: u64::MAX, run };
        let job = self.jobs.insert(waiting);
        if ios.is_empty() {
            self.barriers.push_back(job);
        }
        for io in ios {
            self.queue.push(io, Ticket { job, submitted_ns });
        }
    }

    /// Starts the next service.
    fn begin(&mut self) -> Option<Service> {
        let service = match self.barriers.pop_front() {
            Some(job) => self.begin_barrier(job),
            None => {
                let outstanding = self.queue.len();
                let taken = self.queue.pop(self.disk.head_address())?;
                self.begin_transfer(taken, outstanding)
            }
        };
        self.serving = true;
        Some(service)
    }

    fn begin_barrier(&mut self, job: Key) -> Service {
        let (mut end_ns, mut flush) = (self.disk.busy_until_ns(), false);
        if let Some(waiting) = self.jobs.get_mut(job) {
            let start_ns = waiting.submitted_ns.max(end_ns);
            (end_ns, flush) = (start_ns, waiting.flush);
            waiting.started_ns = waiting.started_ns.min(start_ns);
        }
        if flush {
            let start_ns = end_ns;
            end_ns = self.disk.flush(start_ns);
            self.statistics.flushes += 1;
            self.statistics.busy_ns += end_ns - start_ns;
        }
        Service { end_ns, work: Work::Barrier { job } }
    }

    fn begin_transfer(&mut self, taken: Taken<Ticket>, outstanding: usize) -> Service {
        let submitted_ns = taken.parts.iter().map(|(_, ticket)| ticket.submitted_ns).max().unwrap_or(0);
        let start_ns = submitted_ns.max(self.disk.busy_until_ns());
        let served = self.disk.serve(start_ns, &taken.io);
        for (_, ticket) in &taken.parts {
            if let Some(waiting) = self.jobs.get_mut(ticket.job) {
                waiting.started_ns = waiting.started_ns.min(start_ns);
            }
        }
        self.statistics.transfer(&taken.io, start_ns, &served, outstanding);
        Service { end_ns: served.end_ns, work: Work::Transfer(taken) }
    }

    /// Ends a service; returns the work to run.
    fn finish(&mut self, service: Service, now_ns: u64) -> Vec<Report> {
        self.serving = false;
        let Service { end_ns, work } = service;
        let lateness_ns = now_ns.saturating_sub(end_ns);
        match work {
            Work::Barrier { job } => {
                // A request without transfers says nothing about the host's lateness.
                if self.jobs.get(job).is_some_and(|waiting| waiting.flush) {
                    self.statistics.lateness.record(lateness_ns);
                }
                self.report(job, end_ns, lateness_ns).into_iter().collect()
            }
            Work::Transfer(taken) => {
                self.statistics.lateness.record(lateness_ns);
                let parts = taken.parts.into_iter();
                parts.filter_map(|(_, ticket)| self.end_transfer(ticket.job, end_ns, lateness_ns)).collect()
            }
        }
    }

    /// Counts off one transfer of the request; returns its report after the last.
    fn end_transfer(&mut self, job: Key, end_ns: u64, lateness_ns: u64) -> Option<Report> {
        let waiting = self.jobs.get_mut(job)?;
        waiting.transfers_left -= 1;
        match (waiting.transfers_left, waiting.flush) {
            (0, false) => self.report(job, end_ns, lateness_ns),
            (0, true) => {
                self.barriers.push_back(job);
                None
            }
            _ => None,
        }
    }

    fn report(&mut self, job: Key, end_ns: u64, lateness_ns: u64) -> Option<Report> {
        let waiting = self.jobs.remove(job)?;
        self.statistics.requests += 1;
        Some((waiting.run, Timing { started_ns: waiting.started_ns, finished_ns: end_ns, lateness_ns }))
    }
}

struct Statistics {
    since_ns: u64,
    requests: u64,
    transfers: u64,
    read_bytes: u64,
    write_bytes: u64,
    flushes: u64,
    service_ns: u64,
    busy_ns: u64,
    seek_ns: u64,
    rotation_ns: u64,
    transfer_ns: u64,
    cached: u64,
    outstanding_sum: u64,
    grace_requests: u64,
    lateness: Histogram<4>,
}

impl Statistics {
    fn new() -> Statistics {
        Statistics {
            since_ns: monotonic_ns(),
            requests: 0,
            transfers: 0,
            read_bytes: 0,
            write_bytes: 0,
            flushes: 0,
            service_ns: 0,
            busy_ns: 0,
            seek_ns: 0,
            rotation_ns: 0,
            transfer_ns: 0,
            cached: 0,
            outstanding_sum: 0,
            grace_requests: 0,
            lateness: Histogram::default(),
        }
    }

    fn transfer(&mut self, io: &Io, start_ns: u64, served: &Served, outstanding: usize) {
        self.transfers += 1;
        match io.op {
            Op::Read => self.read_bytes += io.len,
            Op::Write => self.write_bytes += io.len,
        }
        self.service_ns += served.end_ns - start_ns;
        self.busy_ns += served.end_ns - start_ns;
        self.seek_ns += served.seek_ns;
        self.rotation_ns += served.rotation_ns;
        self.transfer_ns += served.transfer_ns;
        self.cached += u64::from(served.cached);
        self.outstanding_sum += outstanding as u64;
    }

    fn status(&self, order: Order, queue_now: usize) -> DeviceStatus {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let mean = |sum: u64| sum as f64 / self.transfers.max(1) as f64;
        let late_us = |ns: u64| ns as f64 / 1e3;
        DeviceStatus {
            order,
            requests: self.requests,
            transfers: self.transfers,
            read_bytes: self.read_bytes,
            write_bytes: self.write_bytes,
            flushes: self.flushes,
            transfer_mean_bytes: mean(self.read_bytes + self.write_bytes),
            service_mean_ms: mean(self.service_ns) / 1e6,
            busy_s: seconds(self.busy_ns),
            seek_s: seconds(self.seek_ns),
            rotation_s: seconds(self.rotation_ns),
            transfer_s: seconds(self.transfer_ns),
            cached: self.cached,
            queue_now,
            queue_mean: mean(self.outstanding_sum),
            lateness: Lateness {
                p50_us: late_us(self.lateness.quantile(0.5)),
                p99_us: late_us(self.lateness.quantile(0.99)),
                max_us: late_us(self.lateness.max()),
            },
            grace_requests: self.grace_requests,
            measured_s: seconds(monotonic_ns().saturating_sub(self.since_ns)),
        }
    }
}
