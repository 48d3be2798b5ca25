//! A modelled device in real time: each request takes as long as the model says, and not longer because the host
//! was slow.
//!
//! One thread serves one transfer at a time. A transfer starts at the end of the one before, or at its submission if that
//! is later, and its end is a deadline on the monotonic clock that the thread sleeps until. Only then it runs
//! what was submitted with the request, which does the actual work on the store and reports the completion. The model's
//! timeline does not depend on when the thread really woke up or how long that work took: the next
//! transfer is chosen and its deadline set at the modelled end, before that work. How late the work began is the
//! *lateness*; it is measured and reported, because results with much of it are worthless.
//!
//! **Grace.** A scheduler that keeps one request in flight submits the next one when it hears of a completion, that is, when
//! the host has woken up and done the work, while a real host with a real disk would have been told at once. So a
//! request that is submitted on the device's thread by what a completion runs, within `late_grace_us` after that
//! completion's modelled end, counts as submitted at that end. How often that happened is reported. Requests from
//! other threads always count from when they came.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};

use impresario_device::{DeviceParams, DeviceQueue, Disk, Io, Op, Order, Placement, Served, Taken};
use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::time::Timespec;
use serde::Serialize;

use crate::histogram::Histogram;

/// When a request was served on the modelled device, on the clock of [`monotonic_ns`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// The device took it up (the first of its transfers).
    pub started_ns: u64,
    /// The device was done with it (the last of its transfers).
    pub finished_ns: u64,
    /// How much later than that this is told.
    pub lateness_ns: u64,
}

/// A request to the device.
pub struct Job {
    /// Its transfers. None, and no flush: it costs nothing but is run in turn by the device's thread.
    pub ios: Vec<Io>,
    /// Bring the drive's write cache to the platter, after the transfers.
    pub flush: bool,
    /// Run once on the device's thread when the device is done; never under a lock. Dropped without being run when
    /// the device stops before. What it does delays other completions, not the model.
    pub run: Box<dyn FnOnce(Timing) + Send>,
}

/// What the device has done since it started or since [`ModelledDevice::reset`]. Times are the model's.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceStatus {
    /// The order in force.
    pub order: Order,
    /// Requests done.
    pub requests: u64,
    /// Transfers done: more than requests where these span chunks, fewer where the elevator merged.
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
    /// Time in which the device was busy, s.
    pub busy_s: f64,
    /// Moving the head, s.
    pub seek_s: f64,
    /// Waiting for the platter, s.
    pub rotation_s: f64,
    /// Moving data, s.
    pub transfer_s: f64,
    /// Transfers served from the drive's memory.
    pub cached: u64,
    /// Transfers outstanding, the one being served included.
    pub queue_now: usize,
    /// Mean of those outstanding whenever a transfer was taken up, itself included.
    pub queue_mean: f64,
    /// How late the host was to report ends.
    pub lateness: Lateness,
    /// Requests that counted as submitted at the end that set them off (see `late_grace_us`).
    pub grace_requests: u64,
    /// Time since the start or reset, s.
    pub measured_s: f64,
}

/// Quantiles of lateness, µs; to within a sixteenth.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Lateness {
    /// Half were reported less late.
    pub p50_us: f64,
    /// 99 of 100 were.
    pub p99_us: f64,
    /// The worst.
    pub max_us: f64,
}

/// Now, ns of `CLOCK_MONOTONIC`: the clock of all times here.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A modelled device and its thread, which ends when this is dropped.
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
    /// Requests without transfers left: flushes and those that cost nothing; served before the queue.
    barriers: VecDeque<usize>,
    jobs: Vec<Option<Waiting>>,
    free: Vec<usize>,
    /// The modelled end whose completions are being run.
    reporting_ns: Option<u64>,
    serving: bool,
    closed: bool,
    statistics: Statistics,
}

/// One transfer's request and when it was submitted.
#[derive(Clone, Copy)]
struct Ticket {
    job: usize,
    submitted_ns: u64,
}

struct Waiting {
    transfers_left: usize,
    flush: bool,
    submitted_ns: u64,
    started_ns: u64,
    run: Box<dyn FnOnce(Timing) + Send>,
}

/// What the device does now.
struct Service {
    end_ns: u64,
    work: Work,
}

enum Work {
    Transfer(Taken<Ticket>),
    Barrier { job: usize },
}

type Report = (Box<dyn FnOnce(Timing) + Send>, Timing);

impl ModelledDevice {
    /// Starts the device. An error when the parameters are out of range, or no thread can be had.
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

    /// Where files lie on this device.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Hands a request over; returns at once. The caller bounds how many are outstanding. After
    /// [`ModelledDevice::stop`] the request is dropped.
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

    /// Changes the order of what is outstanding and of what comes.
    pub fn set_order(&self, order: Order) {
        self.shared.lock().queue.set_order(order);
    }

    /// What the device has done.
    pub fn status(&self) -> DeviceStatus {
        let state = self.shared.lock();
        state.statistics.status(state.queue.order(), state.queue.len() + usize::from(state.serving))
    }

    /// Zeroes the statistics and empties the drive's memory of what it read, so that the next measurement begins cold.
    pub fn reset(&self) {
        let mut state = self.shared.lock();
        state.statistics = Statistics::new();
        state.disk.forget_reads(monotonic_ns());
    }

    /// Ends the device (stop what submits first): what is outstanding is dropped without being run. Waits for the thread, at most until the
    /// transfer in progress is over; called on the device's own thread it does not wait.
    pub fn stop(&self) {
        self.shared.lock().closed = true;
        self.shared.submitted.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        // Without this the kernel may round each deadline up by 50 µs.
        if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
            tracing::warn!(%error, "cannot ask for precise timers; the modelled device will report later");
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
            // The device goes on at once, whenever the host hears of the end.
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

    /// The next service, when there is one; `None` when the device is stopped.
    fn wait_for_work(&self) -> Option<Service> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(service) = state.begin() {
                return Some(service);
            }
            state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Asks that this thread be woken before those that compute: it sleeps nearly always, and a disk does not compete with
/// the host's processes for a processor. It needs a privilege (root, or `ulimit -r`); without it the lateness on a busy host
/// is some milliseconds larger, and told.
fn ask_for_priority() -> bool {
    let param = libc::sched_param { sched_priority: 1 };
    // Not for threads that a completion may start.
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` lives through the call, which only reads it; 0 names the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const param) == 0 }
}

/// Returns at the given time or, if that is past, at once.
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
            jobs: Vec::new(),
            free: Vec::new(),
            reporting_ns: None,
            serving: false,
            closed: false,
            statistics: Statistics::new(),
        }
    }

    fn add(&mut self, job: Job, submitted_ns: u64) {
        let Job { ios, flush, run } = job;
        let waiting = Waiting { transfers_left: ios.len(), flush, submitted_ns, started_ns: u64::MAX, run };
        let index = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() - 1
        });
        self.jobs[index] = Some(waiting);
        if ios.is_empty() {
            self.barriers.push_back(index);
        }
        for io in ios {
            self.queue.push(io, Ticket { job: index, submitted_ns });
        }
    }

    /// Takes up what comes next.
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

    fn begin_barrier(&mut self, job: usize) -> Service {
        let (mut end_ns, mut flush) = (self.disk.busy_until_ns(), false);
        if let Some(waiting) = &mut self.jobs[job] {
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
            if let Some(waiting) = &mut self.jobs[ticket.job] {
                waiting.started_ns = waiting.started_ns.min(start_ns);
            }
        }
        self.statistics.transfer(&taken.io, start_ns, &served, outstanding);
        Service { end_ns: served.end_ns, work: Work::Transfer(taken) }
    }

    /// Ends a service; returns what is to be run.
    fn finish(&mut self, service: Service, now_ns: u64) -> Vec<Report> {
        self.serving = false;
        let Service { end_ns, work } = service;
        let lateness_ns = now_ns.saturating_sub(end_ns);
        match work {
            Work::Barrier { job } => {
                // One that costs nothing says nothing about how punctual the host is.
                if self.jobs[job].as_ref().is_some_and(|waiting| waiting.flush) {
                    self.statistics.lateness.add(lateness_ns);
                }
                self.report(job, end_ns, lateness_ns).into_iter().collect()
            }
            Work::Transfer(taken) => {
                self.statistics.lateness.add(lateness_ns);
                let parts = taken.parts.into_iter();
                parts.filter_map(|(_, ticket)| self.end_transfer(ticket.job, end_ns, lateness_ns)).collect()
            }
        }
    }

    /// One transfer less for the request; the report when that was the last.
    fn end_transfer(&mut self, job: usize, end_ns: u64, lateness_ns: u64) -> Option<Report> {
        let waiting = self.jobs[job].as_mut()?;
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

    fn report(&mut self, job: usize, end_ns: u64, lateness_ns: u64) -> Option<Report> {
        let waiting = self.jobs[job].take()?;
        self.free.push(job);
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
    lateness: Histogram,
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
            lateness: Histogram::new(),
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
