//! The dispatch queue, over a storage that answers writes and syncs only.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use impresario_engine::{EngineConfig, Submission};
use impresario_layout::Layout;
use impresario_sched::{ConnId, Naming, PolicySpec};
use impresario_testing::until;
use impresario_trace::Space;
use impresario_wire::{FileKey, LaneState, ObjectInfo, Role, SeekTo, Sought, SpaceChange, Who};

use super::super::storage::Striping;
use super::*;
use crate::connection::{Connection, Reply};
use crate::listener::{Server, Settings};
use crate::outbox::{Bulk, Outbox};
use crate::peers::Peers;
use crate::request_trace::TraceSettings;

/// Writes are answered, or panic, and syncs are, of files from [`WAITS`] on when they may; there is nothing else.
#[derive(Default)]
struct Writes {
    panic: AtomicBool,
    written: AtomicUsize,
    syncs_wait: AtomicBool,
    syncs: AtomicUsize,
    synced: AtomicUsize,
}

/// Syncs of files with at least this key wait.
const WAITS: u64 = 100;

fn never<T>() -> Result<T, Fault> {
    Err(Fault { errno: libc::EOPNOTSUPP, message: "only writes".into() })
}

impl Storage for Writes {
    fn striping(&self, _: FileKey, layout: Layout) -> Result<Striping, Fault> {
        Ok(Striping { layout, lanes: None })
    }
    fn is_fenced(&self) -> bool {
        true
    }
    fn read(&self, _: &Target, _: u64, _: &mut [u8]) -> Result<usize, Fault> {
        never()
    }
    fn read_file(&self, _: &Target, _: u64, _: &mut [u8]) -> Result<usize, Fault> {
        never()
    }
    fn write(&self, _: &[Who], _: &Target, _: u64, _: &[&[u8]]) -> Result<Vec<LaneState>, Fault> {
        assert!(!self.panic.load(Ordering::SeqCst), "a deliberate panic");
        self.written.fetch_add(1, Ordering::SeqCst);
        Ok(Vec::new())
    }
    fn sync(&self, target: &Target) -> Result<(Vec<LaneState>, i32), Fault> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        until("syncs may end", || target.file.0 < WAITS || !self.syncs_wait.load(Ordering::SeqCst));
        self.synced.fetch_add(1, Ordering::SeqCst);
        Ok((Vec::new(), 0))
    }
    fn change_space(&self, _: &Target, _: SpaceChange, _: (u64, u64)) -> Result<Vec<LaneState>, Fault> {
        never()
    }
    fn seek(&self, _: FileKey, _: &Layout, _: u64, _: u64, _: SeekTo) -> Result<Sought, Fault> {
        never()
    }
    fn stat(&self, _: FileKey, _: &Layout) -> Result<ObjectInfo, Fault> {
        never()
    }
}

/// A forwarder that sends two requests at a time, with a client.
struct Node {
    storage: Arc<Writes>,
    forwarder: Arc<Forwarder>,
    engine: Arc<Engine<Item>>,
    client: Arc<Connection>,
    _front: Server,
    _theirs: UnixStream,
}

impl Node {
    fn start() -> Node {
        let config = impresario_config::Config::default();
        let settings = Settings::new("io.0", Role::Io, &config.cluster, 1 << 20);
        let front = Server::bind("127.0.0.1:0", settings).unwrap();
        let settings = IoSettings {
            engine: EngineConfig { lane_syncs: SYNCS_MAX, ..EngineConfig::new(PolicySpec::named("fifo")) },
            in_flight_requests: 2,
            merging: Merging::Contiguous,
            merge_requests: 1,
            merge_bytes: 1 << 20,
            split: false,
            trace: TraceSettings { folder: None, at_start: false, space: Space::File },
            earlier_runs: Vec::new(),
            peers: Peers::io(&config, 0, Arc::default()),
            timeout: Duration::from_secs(10),
        };
        let (storage, identity) = (Arc::new(Writes::default()), Arc::new(Identity::of(Who::default())));
        let forwarder = Forwarder::new(front.vitals(), storage.clone(), identity, &settings, &Bell::default()).unwrap();
        let engine = Engine::new(settings.engine, forwarder.clone()).unwrap();
        forwarder.serve(&engine);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pool = front.vitals().pool().clone();
        let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
        let client = Connection::new(ConnId(1), "unix".into(), outbox, pool, 1 << 20, None);
        Node { storage, forwarder, engine, client, _front: front, _theirs: theirs }
    }

    fn write(&self, offset: u64) {
        self.submit(Op::Write, FileKey(1), (offset, 4096));
    }

    fn submit(&self, op: Op, file: FileKey, (offset, len): (u64, u64)) {
        let slot = self.client.admit(1, 0, (true, false), Duration::from_secs(1)).expect("room");
        let (who, layout) = (Who::default(), Layout::new(0, 1, 1 << 20, 1).unwrap());
        let striping = Striping { layout, lanes: None };
        let answer = Answering::Whole(Reply::new(offset, slot));
        let payload = Bulk::None;
        let item = Item { who, file, striping, server: 0, made: 0, change: None, payload, answer };
        let submission = Submission {
            op,
            file: file.0,
            lane: LaneId(0),
            file_offset: offset,
            lane_offset: offset,
            len,
            client: 1,
            conn: ConnId(1),
            job: 1,
            user: 0,
            naming: Naming::default(),
            speculative: false,
        };
        assert!(self.engine.submit(submission, item).is_ok());
    }

    /// All is answered, and nothing keeps a place.
    fn settles(&self) {
        assert!(self.client.settle(Instant::now() + Duration::from_secs(20)), "a write is never answered");
        let state = || {
            let dispatch = self.forwarder.dispatch.lock();
            (dispatch.queue.len(), dispatch.queue.in_flight())
        };
        until("all places are given back", || state() == (0, 0));
    }
}

#[test]
fn writes_are_answered_though_no_thread_can_be_started() {
    let node = Node::start();
    node.forwarder.threads.refuse_threads(true);
    node.write(0);
    node.forwarder.threads.refuse_threads(false);
    node.settles();
}

#[test]
fn syncs_that_take_long_hold_up_no_write_and_no_other_sync() {
    const WAITING: u64 = 64;
    let node = Node::start();
    node.storage.syncs_wait.store(true, Ordering::SeqCst);
    (0..WAITING).for_each(|n| node.submit(Op::Sync, FileKey(WAITS + n), (0, u64::MAX)));
    until("syncs are under way", || node.storage.syncs.load(Ordering::SeqCst) > 0);
    (0..4).for_each(|n| node.write(n << 20));
    until("writes are done", || node.storage.written.load(Ordering::SeqCst) == 4);
    node.submit(Op::Sync, FileKey(1), (0, u64::MAX));
    until("a sync that has not to wait is done", || node.storage.synced.load(Ordering::SeqCst) == 1);
    node.storage.syncs_wait.store(false, Ordering::SeqCst);
    node.settles();
    assert_eq!(node.storage.synced.load(Ordering::SeqCst), WAITING as usize + 1);
}

/// It may be all that its lane may have in flight, however much the node may.
#[test]
fn what_is_read_ahead_by_itself_is_watched() {
    let node = Node::start();
    let mut dispatch = node.forwarder.dispatch.lock();
    assert!(!node.forwarder.matters(&dispatch));
    let key = dispatch.alone.insert((LaneId(0), now()));
    assert!(node.forwarder.matters(&dispatch), "it would hang unnoticed");
    dispatch.alone.remove(key);
    assert!(!node.forwarder.matters(&dispatch));
}

#[test]
fn a_lane_has_as_many_threads_for_syncs_as_requests_in_flight() {
    let threads = [(2, 1), (2, 3), (64, 1), (64, 4), (256, 1000), (1, 0)]
        .map(|(in_flight, lanes)| sync_threads(in_flight, lanes));
    assert_eq!(threads, [16, 48, 64, 256, 512, 16]);
}

#[test]
fn requests_that_panic_keep_no_place() {
    let node = Node::start();
    node.storage.panic.store(true, Ordering::SeqCst);
    (0..4).for_each(|n| node.write(n << 20));
    node.settles();
    node.storage.panic.store(false, Ordering::SeqCst);
    node.write(9 << 20);
    node.settles();
}
