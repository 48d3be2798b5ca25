//! Reads that pass scheduling by: nothing changes their bytes before they have ended, and what is left of them keeps its place.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use impresario_engine::{Engine, EngineConfig, Executor, Outcome, Started, Submission, Work, now};
use impresario_sched::{ConnId, LaneId, Op, PolicySpec};
use impresario_testing::{PATIENCE, until};

/// Number of the request, and where in it this begins.
type Context = (u32, u64);

fn submission(op: Op, offset: u64, len: u64) -> Submission {
    Submission {
        op,
        file: 1,
        lane: LaneId(0),
        file_offset: offset,
        lane_offset: offset,
        len,
        client: 1,
        conn: ConnId(1),
        job: 1,
        user: 0,
        naming: Default::default(),
        speculative: false,
    }
}

fn read(offset: u64, len: u64) -> Submission {
    submission(Op::Read, offset, len)
}

fn write(offset: u64, len: u64) -> Submission {
    submission(Op::Write, offset, len)
}

fn finish(work: Work<Context>) -> (Work<Context>, Outcome) {
    let (at, bytes_done) = (now(), work.batch.extent.len);
    (work, Outcome { errno: 0, bytes_done, started: at, finished: at })
}

fn complete(work: Work<Context>) {
    let (work, outcome) = finish(work);
    work.ticket.complete(outcome);
}

/// Gives everything to the test.
struct Deferred(Mutex<mpsc::Sender<Work<Context>>>);

impl Executor<Context> for Deferred {
    fn start(&self, work: Work<Context>) -> Started<Context> {
        self.0.lock().unwrap().send(work).unwrap();
        Started::Pending
    }

    fn piece(&self, context: &mut Context, from: u64, _len: u64, _last: bool) -> Context {
        (context.0, from)
    }
}

fn deferred(policy: &str) -> (Arc<Engine<Context>>, mpsc::Receiver<Work<Context>>) {
    let (to, from) = mpsc::channel();
    let spec = PolicySpec::named(policy);
    let config = EngineConfig { lane_requests: 100, pieces: true, queue_requests: 100, ..EngineConfig::new(spec) };
    (Engine::new(config, Arc::new(Deferred(Mutex::new(to)))).unwrap(), from)
}

fn started(from: &mpsc::Receiver<Work<Context>>) -> Vec<(Op, u64, u64, Vec<Context>)> {
    let of = |work: Work<Context>| {
        let (extent, op) = (work.batch.extent, work.batch.op);
        let contexts = work.parts.iter().map(|(_, context)| *context).collect();
        complete(work);
        (op, extent.lane_offset, extent.len, contexts)
    };
    let all: Vec<_> = from.try_iter().collect();
    all.into_iter().map(of).collect()
}

#[test]
fn changes_wait_for_a_read_that_passes() {
    let (engine, from) = deferred("fifo");
    for served in [true, false] {
        let passing = engine.pass(&read(4096, 4096)).expect("nothing changes it");
        assert!(engine.submit(write(8000, 1000), (1, 0)).is_ok());
        assert!(engine.submit(write(8192, 1000), (2, 0)).is_ok());
        assert_eq!(started(&from), [], "the second conflicts with the first, which waits");
        assert!(engine.pass(&read(0, 8192)).is_none(), "a change of these bytes is outstanding");
        engine.pass(&read(0, 8000)).expect("of these none is").served(8000);
        match served {
            true => passing.served(4096),
            false => drop(passing),
        }
        assert_eq!(started(&from), [(Op::Write, 8000, 1000, vec![(1, 0)])]);
        assert_eq!(started(&from), [(Op::Write, 8192, 1000, vec![(2, 0)])]);
    }
    let status = engine.status();
    assert_eq!((status.statistics.passed, status.statistics.completed), (3, 4));
    assert_eq!((status.queued, status.blocked, status.in_flight_batches), (0, 0, 0));
}

/// A write passes what waits for the device, and nothing that it conflicts with: neither before it nor after it.
#[test]
fn a_write_passes_what_it_does_not_conflict_with() {
    let config = EngineConfig { lane_requests: 1, lane_syncs: 1, ..EngineConfig::new(PolicySpec::named("mlf")) };
    let (to, from) = mpsc::channel();
    let engine = Engine::new(config, Arc::new(Deferred(Mutex::new(to)))).unwrap();
    assert!(engine.submit(read(0, 4096), (1, 0)).is_ok());
    assert!(engine.submit(read(8192, 4096), (2, 0)).is_ok());
    assert!(engine.pass(&write(4000, 100)).is_none(), "of bytes that are being read");
    assert!(engine.pass(&write(12_000, 1000)).is_none(), "of bytes that are to be read");
    let passing = engine.pass(&write(4096, 4096)).expect("the lane is full, and nobody wants these bytes");
    assert!(engine.pass(&write(8000, 192)).is_none(), "of bytes that are being written");
    assert!(engine.submit(submission(Op::Sync, 0, u64::MAX), (3, 0)).is_ok());
    assert!(engine.submit(read(8000, 100), (4, 0)).is_ok());
    let device: Vec<_> = from.try_iter().collect();
    assert_eq!(device.iter().map(|work| work.batch.op).collect::<Vec<_>>(), [Op::Read], "the others wait");
    passing.served(4096);
    let sync = from.try_recv().expect("it waits for no write any more");
    assert_eq!(sync.batch.op, Op::Sync);
    // A younger write does not wait for the sync.
    engine.pass(&write(1 << 20, 10)).expect("it need not be durable with it").served(10);
    complete(sync);
    device.into_iter().for_each(complete);
    let mut left = Vec::new();
    until("both reads are done", || {
        left.extend(started(&from));
        left.len() == 2
    });
    let statistics = engine.status().statistics;
    assert_eq!((statistics.passed, statistics.write_bytes, statistics.failed), (2, 4106, 0));
    assert_eq!(statistics.completed, 6, "whose the bytes are is counted");
}

#[test]
fn the_rest_of_a_read_keeps_its_place() {
    let (engine, from) = deferred("fifo");
    let passing = engine.pass(&read(100, 60_000)).unwrap();
    assert!(engine.submit(write(50_000, 100), (2, 0)).is_ok());
    assert!(passing.schedule_rest(16_384, (1, 0), []).is_none());
    assert_eq!(started(&from), [(Op::Read, 16_484, 43_616, vec![(1, 16_384)])]);
    assert_eq!(started(&from), [(Op::Write, 50_000, 100, vec![(2, 0)])]);
    // So does one whose front a younger write changes, which goes on first.
    let passing = engine.pass(&read(0, 60_000)).unwrap();
    assert!(engine.submit(write(0, 100), (2, 0)).is_ok());
    assert!(passing.schedule_rest(100, (1, 0), []).is_none());
    assert_eq!(started(&from), [(Op::Read, 100, 59_900, vec![(1, 100)])]);
    assert_eq!(started(&from).len(), 1);
    // Its connection ends before the rest was started.
    assert!(engine.submit(read(1 << 20, 10), (3, 0)).is_ok());
    let busy: Vec<_> = from.try_iter().collect();
    engine.ready(ConnId(1), true);
    let passing = engine.pass(&read(0, 60_000)).unwrap();
    assert!(engine.submit(write(0, 100), (2, 0)).is_ok());
    assert_eq!(engine.cancel_connection(ConnId(1)), [(2, 0)]);
    drop(passing);
    busy.into_iter().for_each(complete);
    // The engine ends meanwhile: the context comes back.
    let passing = engine.pass(&read(0, 60_000)).unwrap();
    assert!(engine.shutdown(Duration::from_secs(1)).is_empty());
    assert_eq!(passing.schedule_rest(100, (9, 0), []).map(|refused| refused.context()), Some((9, 0)));
    assert!(engine.pass(&read(0, 10)).is_none());
    let status = engine.status();
    assert_eq!((status.queued, status.blocked, status.in_flight_batches), (0, 0, 0));
}

#[test]
fn what_may_not_pass_is_scheduled() {
    for (policy, passes) in [("fifo", true), ("mlf", true), ("sstf", true), ("none", false), ("mclock", false)] {
        let (engine, _from) = deferred(policy);
        assert_eq!(engine.pass(&read(0, 10)).is_some(), passes, "{policy}");
        assert_eq!(engine.lets_pass(), passes, "{policy}");
    }
    let (engine, _from) = deferred("fifo");
    assert!(engine.pass(&submission(Op::Sync, 0, u64::MAX)).is_none());
    engine.ready(ConnId(1), false);
    assert!(engine.pass(&read(0, 10)).is_none(), "its connection takes no data");
    assert!(engine.pass(&write(0, 10)).is_some(), "it gives some");
    engine.ready(ConnId(1), true);
    let all: Vec<_> = (0..200).map_while(|n| engine.pass(&read(n, 10))).collect();
    assert_eq!(all.len(), 100, "they take room in the queue");
    drop(all);
    assert!(engine.pass(&read(0, 10)).is_some());
}

/// Words that each write makes equal: a write that comes while a read passes changes none of them, however much of it passes.
#[test]
fn no_read_is_torn_however_much_of_it_passes() {
    const WORDS: u64 = 16;
    struct Memory {
        words: Vec<AtomicU64>,
        rests: Mutex<mpsc::Sender<Vec<u64>>>,
    }
    impl Memory {
        fn load(&self, range: std::ops::Range<u64>) -> Vec<u64> {
            range.map(|at| self.words[at as usize].load(Ordering::SeqCst)).collect()
        }
    }
    impl Executor<Context> for Memory {
        fn start(&self, work: Work<Context>) -> Started<Context> {
            for (request, (number, _)) in &work.parts {
                let range = request.extent.lane_offset..request.extent.end();
                match request.op {
                    Op::Write => range.for_each(|at| self.words[at as usize].store((*number).into(), Ordering::SeqCst)),
                    _ => self.rests.lock().unwrap().send(self.load(range)).unwrap(),
                }
            }
            let (work, outcome) = finish(work);
            Started::Finished(work.ticket, outcome)
        }
        fn piece(&self, context: &mut Context, from: u64, _len: u64, _last: bool) -> Context {
            (context.0, from)
        }
    }
    let (rests, came) = mpsc::channel();
    let memory = Arc::new(Memory { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), rests: Mutex::new(rests) });
    for policy in ["fifo", "scan", "sstf", "hbrr"] {
        let config = EngineConfig { pieces: true, ..EngineConfig::new(PolicySpec::named(policy)) };
        let engine = Engine::new(config, memory.clone()).unwrap();
        for number in 1..=200u32 {
            let split = u64::from(number) * 7 % (WORDS + 1);
            let passing = engine.pass(&read(0, WORDS)).expect("nothing is outstanding");
            let mut got = memory.load(0..split);
            assert!(engine.submit(write(0, WORDS), (number, 0)).is_ok());
            match split {
                0 => drop(passing),
                WORDS => passing.served(WORDS),
                _ => {
                    assert!(passing.schedule_rest(split, (0, 0), []).is_none());
                    got.extend(came.recv_timeout(PATIENCE).unwrap());
                }
            }
            assert!(got.iter().all(|word| *word == got[0]), "{policy}, {number}: {got:?}");
            until("the write is done", || memory.load(0..WORDS) == [u64::from(number); WORDS as usize]);
            until("all is done", || engine.status().in_flight_batches == 0);
        }
        engine.shutdown(Duration::from_secs(10));
    }
}
