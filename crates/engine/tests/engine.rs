//! The engine with threads: no request is lost, limits hold, idling costs nothing, shutdown is clean.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use impresario_engine::{Clocks, Engine, EngineConfig, Executor, Outcome, Refused, Started, Submission, Work, now};
use impresario_sched::policy::POLICIES;
use impresario_sched::{ConnId, LaneId, Nanos, Op, PolicySpec};
use impresario_testing::{PATIENCE, until};

fn submission(file: u64, offset: u64, op: Op) -> Submission {
    Submission {
        op,
        file,
        lane: LaneId(0),
        file_offset: offset,
        lane_offset: offset,
        len: 4096,
        client: 1,
        conn: ConnId(offset as u32 % 7),
        job: 1,
        user: 0,
        naming: Default::default(),
        speculative: false,
    }
}

fn done(errno: i32) -> Outcome {
    let at = now();
    Outcome { errno, bytes_done: 4096, started: at, finished: at }
}

/// Finishes at once on the pumping thread; counts how often each context was served.
struct Inline {
    served: Vec<AtomicU64>,
}

impl Executor<usize> for Inline {
    fn start(&self, work: Work<usize>) -> Started<usize> {
        for (_, context) in &work.parts {
            self.served[*context].fetch_add(1, Ordering::Relaxed);
        }
        Started::Finished(work.ticket, done(0))
    }
}

/// Under load, every policy is switched live to every other.
#[test]
fn every_request_is_served_once_by_many_threads_and_switches_between_every_ordered_pair() {
    const THREADS: usize = 4;
    const EACH: usize = 200_000;
    let executor = Arc::new(Inline { served: (0..THREADS * EACH).map(|_| AtomicU64::new(0)).collect() });
    let spec = PolicySpec::named("mlf");
    let config = EngineConfig { lanes: 2, lane_requests: 3, queue_requests: 50, ..EngineConfig::new(spec.clone()) };
    let engine = Engine::new(config, executor.clone()).unwrap();
    let stop = AtomicBool::new(false);
    let submitted: usize = std::thread::scope(|s| {
        let submitters: Vec<_> = (0..THREADS)
            .map(|t| {
                let (engine, stop) = (&engine, &stop);
                s.spawn(move || {
                    let mut i = 0;
                    while i < EACH && !stop.load(Ordering::Relaxed) {
                        let op = if i % 3 == 0 { Op::Write } else { Op::Read };
                        let sub = submission((i % 5) as u64, (i % 40) as u64 * 4096, op);
                        assert!(engine.submit(sub, t * EACH + i).is_ok());
                        i += 1;
                        if i % 50 == 0 {
                            std::thread::yield_now();
                        }
                    }
                    i
                })
            })
            .collect();
        for from in POLICIES {
            for to in POLICIES {
                engine.set_policy(&PolicySpec::named(from.name)).unwrap();
                std::thread::sleep(Duration::from_micros(100));
                engine.set_policy(&PolicySpec::named(to.name)).unwrap();
            }
        }
        engine.set_policy(&spec).unwrap();
        stop.store(true, Ordering::Relaxed);
        submitters.into_iter().map(|s| s.join().unwrap()).sum()
    });
    assert!(submitted > 1_000, "{submitted} requests are no load");
    // mlf may hold the last ones briefly for a reader that it expects to return.
    until("nothing is queued", || engine.status().queued == 0);
    assert!(engine.shutdown(Duration::from_secs(10)).is_empty(), "inline work leaves nothing queued");
    let served: u64 = executor.served.iter().map(|n| n.load(Ordering::Relaxed)).sum();
    assert_eq!(served, submitted as u64);
    assert!(executor.served.iter().all(|n| n.load(Ordering::Relaxed) <= 1));
    let status = engine.status();
    assert_eq!(status.statistics.completed, submitted as u64);
    assert_eq!((status.queued, status.blocked, status.in_flight_batches), (0, 0, 0));
}

/// Sends every batch to a channel; the receiver completes it.
struct Deferred(Mutex<mpsc::Sender<Work<u32>>>);

impl Executor<u32> for Deferred {
    fn start(&self, work: Work<u32>) -> Started<u32> {
        let _ = self.0.lock().unwrap().send(work);
        Started::Pending
    }
}

fn deferred(config: EngineConfig) -> (Arc<Engine<u32>>, mpsc::Receiver<Work<u32>>) {
    let (tx, rx) = mpsc::channel();
    (Engine::new(config, Arc::new(Deferred(Mutex::new(tx)))).unwrap(), rx)
}

#[test]
fn limits_hold_and_a_full_queue_pushes_back() {
    let config = EngineConfig {
        lane_requests: 2,
        queue_requests: 4,
        submit_timeout: Duration::from_millis(50),
        ..EngineConfig::new(PolicySpec::named("fifo"))
    };
    let (engine, work) = deferred(config);
    for i in 0..4 {
        assert!(engine.submit(submission(i, 0, Op::Read), i as u32).is_ok());
    }
    let first = work.try_recv().unwrap();
    let second = work.try_recv().unwrap();
    assert!(work.try_recv().is_err(), "the limit is two in flight");
    assert!(matches!(engine.submit(submission(9, 0, Op::Read), 9), Err(Refused::Busy(9))));
    first.ticket.complete(done(0));
    let third = work.try_recv().unwrap();
    assert_eq!(third.parts[0].1, 2);
    assert!(engine.submit(submission(9, 0, Op::Read), 9).is_ok(), "room again");
    drop(second); // never reported: the engine must not wait forever
    let fourth = work.try_recv().unwrap();
    assert_eq!(fourth.parts[0].1, 3);
    assert_eq!(engine.status().statistics.failed, 1, "it counts as failed");
    drop((third, fourth));
}

#[test]
fn a_lost_connection_cancels_its_queued_requests_and_unblocks_others() {
    let (engine, work) = deferred(EngineConfig { lane_requests: 1, ..EngineConfig::new(PolicySpec::named("fifo")) });
    let from = |conn, op, context| {
        let s = Submission { conn: ConnId(conn), ..submission(1, 0, op) };
        assert!(engine.submit(s, context).is_ok());
    };
    from(1, Op::Write, 10);
    from(2, Op::Write, 20);
    from(3, Op::Read, 30);
    assert_eq!(engine.cancel_connection(ConnId(2)), [20]);
    work.try_recv().unwrap().ticket.complete(done(0));
    let next = work.try_recv().unwrap();
    assert_eq!(next.parts[0].1, 30, "the read waited for the cancelled write only through the first");
    next.ticket.complete(done(0));
}

#[test]
fn shutdown_returns_what_was_queued_and_waits_for_what_is_in_flight() {
    let (engine, work) = deferred(EngineConfig { lane_requests: 1, ..EngineConfig::new(PolicySpec::named("mlf")) });
    for i in 0..5u32 {
        assert!(engine.submit(submission(u64::from(i), 0, Op::Read), i).is_ok());
    }
    let flying = work.recv().unwrap();
    let finisher = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        flying.ticket.complete(done(0));
    });
    let mut queued = engine.shutdown(Duration::from_secs(5));
    queued.sort();
    assert_eq!(queued, [1, 2, 3, 4]);
    assert_eq!(engine.status().in_flight_batches, 0);
    assert!(matches!(engine.submit(submission(0, 0, Op::Read), 7), Err(Refused::Closed(7))));
    finisher.join().unwrap();
}

#[test]
fn shutdown_is_bounded_when_a_device_never_answers() {
    let (engine, work) = deferred(EngineConfig::new(PolicySpec::named("fifo")));
    assert!(engine.submit(submission(0, 0, Op::Read), 0).is_ok());
    let stuck = work.recv().unwrap();
    let start = Instant::now();
    engine.shutdown(Duration::from_millis(20));
    assert!(start.elapsed() < Duration::from_secs(10));
    drop(stuck);
}

/// twins releases requests at its windows: the timer must wake for them, and only for them.
#[test]
fn the_timer_serves_windows_and_sleeps_otherwise() {
    let served = Arc::new(AtomicUsize::new(0));
    struct Count(Arc<AtomicUsize>);
    impl Executor<u32> for Count {
        fn start(&self, work: Work<u32>) -> Started<u32> {
            self.0.fetch_add(work.parts.len(), Ordering::Relaxed);
            Started::Finished(work.ticket, done(0))
        }
    }
    let spec = PolicySpec::named("twins").with("window_us", 500);
    let config = EngineConfig { lanes: 4, ..EngineConfig::new(spec) };
    let engine = Engine::new(config, Arc::new(Count(served.clone()))).unwrap();
    for i in 0..40u16 {
        let s = Submission { lane: LaneId(i % 4), ..submission(u64::from(i), 0, Op::Read) };
        assert!(engine.submit(s, 0).is_ok());
    }
    until("all are served", || served.load(Ordering::Relaxed) == 40);
    // With nothing queued the engine may use next to no CPU. Other tests run beside it, so look at its thread.
    let timers = || -> BTreeMap<PathBuf, u64> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks
            .filter_map(|t| {
                let path = t.ok()?.path();
                let name = std::fs::read_to_string(path.join("comm")).ok()?;
                let stat = std::fs::read_to_string(path.join("schedstat")).ok()?;
                let ns = stat.split(' ').next()?.parse().ok()?;
                (name.trim() == "engine-timer").then_some((path, ns))
            })
            .collect()
    };
    assert!(!timers().is_empty());
    // Timers of the tests beside it may be busy for a while: one of several spans must be idle.
    until("the timers are idle", || {
        let before = timers();
        std::thread::sleep(Duration::from_millis(200));
        timers().iter().map(|(path, ns)| ns - before.get(path).unwrap_or(ns)).sum::<u64>() < 20_000_000
    });
}

/// (from, length) of the pieces so far.
type Ranges = Vec<(u64, u64)>;

/// Splits its contexts: a piece records its range.
struct Pieces(Mutex<mpsc::Sender<Work<Ranges>>>);

impl Executor<Ranges> for Pieces {
    fn start(&self, work: Work<Ranges>) -> Started<Ranges> {
        let _ = self.0.lock().unwrap().send(work);
        Started::Pending
    }

    fn piece(&self, context: &mut Ranges, from: u64, len: u64, last: bool) -> Ranges {
        context.push((from, len));
        assert_eq!(last, from + len == 4096);
        context.clone()
    }
}

/// A request of 4096 bytes goes in pieces of 1500, two at a time; a connection that is not ready gets none.
#[test]
fn pieces_of_a_request_reach_the_executor_as_separate_requests() {
    let (tx, work) = mpsc::channel();
    let spec = PolicySpec::named("stream").with("piece_bytes", 1500);
    let config = EngineConfig { pieces: true, lane_requests: 2, ..EngineConfig::new(spec) };
    let engine = Engine::new(config, Arc::new(Pieces(Mutex::new(tx)))).unwrap();
    let conn = submission(9, 0, Op::Read).conn;
    engine.ready(conn, false);
    engine.submit(submission(9, 0, Op::Read), Vec::new()).ok().unwrap();
    assert!(work.recv_timeout(Duration::from_millis(50)).is_err(), "the connection cannot take data");
    engine.ready(conn, true);
    let (first, second) = (work.recv().unwrap(), work.recv().unwrap());
    assert!(work.try_recv().is_err(), "two at a time");
    assert_eq!((first.parts[0].0.extent.lane_offset, first.parts[0].0.extent.len), (0, 1500));
    assert_eq!((second.parts[0].0.extent.lane_offset, second.parts[0].0.extent.len), (1500, 1500));
    assert_eq!(second.parts[0].1, [(0, 1500), (1500, 1500)]);
    first.ticket.complete(done(0));
    let third = work.recv().unwrap();
    assert_eq!((third.parts[0].0.extent.lane_offset, third.parts[0].0.extent.len), (3000, 1096));
    assert_eq!(engine.status().statistics.completed, 0, "not before all pieces have completed");
    third.ticket.complete(done(0));
    second.ticket.complete(done(0));
    let status = engine.status();
    assert_eq!((status.statistics.completed, status.queued, status.in_flight_batches), (1, 0, 0));
}

/// Cancelling removes the rest of a request; its pieces in flight complete as usual.
#[test]
fn the_rest_of_a_request_can_be_cancelled() {
    let (tx, work) = mpsc::channel();
    let spec = PolicySpec::named("stream").with("piece_bytes", 1000);
    let config = EngineConfig { pieces: true, lane_requests: 1, ..EngineConfig::new(spec) };
    let engine = Engine::new(config, Arc::new(Pieces(Mutex::new(tx)))).unwrap();
    let sub = submission(9, 0, Op::Read);
    let id = engine.submit(sub, Vec::new()).ok().unwrap();
    let piece = work.recv().unwrap();
    assert_eq!(engine.cancel(id), Some(vec![(0, 1000)]), "the context of the rest");
    assert_eq!(engine.cancel(id), None, "once");
    piece.ticket.complete(done(0));
    assert!(work.try_recv().is_err());
    let status = engine.status();
    assert_eq!((status.queued, status.in_flight_batches, status.statistics.cancelled), (0, 0, 1));
    engine.submit(sub, Vec::new()).ok().unwrap();
    work.recv().unwrap().ticket.complete(done(0));
    assert_eq!(engine.cancel_connection(sub.conn).len(), 1);
    assert!(engine.shutdown(Duration::from_millis(100)).is_empty());
}

/// The system's monotonic clock, and a wall clock set by the test.
#[derive(Clone)]
struct Wall(Arc<AtomicI64>);

impl Wall {
    /// Starts at an instant of shared time, nanoseconds.
    fn at(shared_ns: i64) -> Wall {
        Wall(Arc::new(AtomicI64::new(shared_ns - now().0 as i64)))
    }

    fn step(&self, ns: i64) {
        self.0.fetch_add(ns, Ordering::Relaxed);
    }
}

impl Clocks for Wall {
    fn monotonic(&self) -> Nanos {
        now()
    }

    fn wall_ns(&self) -> i64 {
        now().0 as i64 + self.0.load(Ordering::Relaxed)
    }
}

const SECOND_NS: i64 = 1_000_000_000;

/// Windows of 2 s on 64 servers: server 40's comes after 80 s, or when the wall clock is set forward by that.
#[test]
fn windows_follow_a_wall_clock_that_is_set() {
    let (tx, work) = mpsc::channel();
    let wall = Wall::at(SECOND_NS / 2);
    let config =
        EngineConfig { lanes: 64, ..EngineConfig::new(PolicySpec::named("twins").with("window_us", 2_000_000)) };
    let engine = Engine::with_clocks(config, Arc::new(Pieces(Mutex::new(tx))), Box::new(wall.clone())).unwrap();
    engine.submit(Submission { lane: LaneId(40), ..submission(1, 0, Op::Read) }, Vec::new()).ok().unwrap();
    assert!(work.recv_timeout(Duration::from_millis(50)).is_err(), "another server's window");
    wall.step(80 * SECOND_NS);
    let served = work.recv_timeout(PATIENCE).expect("the window of server 40");
    served.ticket.complete(done(0));
}

/// Two nodes configured one after the other switch together, at an instant of shared time.
#[test]
fn nodes_change_their_policy_at_an_agreed_instant() {
    let begin = 1_000 * SECOND_NS;
    let executor = || Arc::new(Inline { served: Vec::new() });
    let node = |wall: &Wall| {
        let config = EngineConfig { lanes: 2, ..EngineConfig::new(PolicySpec::named("twins")) };
        Engine::with_clocks(config, executor(), Box::new(wall.clone())).unwrap()
    };
    let walls = [Wall::at(begin), Wall::at(begin)];
    let nodes = walls.each_ref().map(node);
    let window = |engine: &Engine<usize>| engine.status().policy.params.get("window_us").cloned();
    let wider = PolicySpec::named("twins").with("window_us", 8_000);
    let at = begin + 40 * SECOND_NS;
    nodes[0].set_policy_at(&wider, at).unwrap();
    assert_eq!(window(&nodes[0]).as_deref(), Some("2000"), "not before the instant");
    nodes[1].set_policy_at(&wider, at).unwrap();
    // Time passes on both machines at once. Nothing is submitted: the timers notice.
    walls.iter().for_each(|wall| wall.step(40 * SECOND_NS));
    for (engine, wall) in nodes.iter().zip(&walls) {
        until("the change", || window(engine).as_deref() == Some("8000"));
        assert!(wall.wall_ns() >= at);
    }

    // An instant in the past means now; a change without an instant drops a planned one.
    let fifo = PolicySpec::named("fifo");
    nodes[0].set_policy_at(&fifo, at).unwrap();
    assert_eq!(nodes[0].status().policy.name, "fifo");
    nodes[1].set_policy_at(&fifo, walls[1].wall_ns() + 30 * SECOND_NS).unwrap();
    nodes[1].set_policy(&PolicySpec::named("mlf")).unwrap();
    walls[1].step(30 * SECOND_NS);
    // Refused, but the call samples the clock.
    nodes[1].set_policy_at(&fifo, walls[1].wall_ns() + 3_600 * SECOND_NS).unwrap_err();
    assert_eq!(nodes[1].status().policy.name, "mlf");

    // A clock that is set back delays a planned change by no hours.
    nodes[1].set_policy_at(&fifo, walls[1].wall_ns() + 30 * SECOND_NS).unwrap();
    walls[1].step(-3_600 * SECOND_NS);
    until("the change", || nodes[1].status().policy.name == "fifo");

    // Invalid changes are refused when requested.
    let error = nodes[0].set_policy_at(&PolicySpec::named("twins").with("window_us", 1), i64::MAX).unwrap_err();
    assert!(error.to_string().contains("window_us"), "{error}");
    let error = nodes[0].set_policy_at(&wider, walls[0].wall_ns() + 3_600 * SECOND_NS).unwrap_err();
    assert!(error.to_string().contains("synchronise the clocks"), "{error}");
    assert_eq!(nodes[0].status().policy.name, "fifo");
}
