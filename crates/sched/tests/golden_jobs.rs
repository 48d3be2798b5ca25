//! Tables 1 to 4 of server-side-scheduling-2002, round by round, and cases that the tables omit.
//!
//! Five jobs read one file; a row of a table says which connections are ready and at which offset their next access is.
//! Each takes one access, then no more until a later row. Offsets are in KiB.

use impresario_sched::{
    Batch, Completion, ConnId, Core, CoreConfig, Event, Extent, FileId, LaneId, Nanos, Next, Op, PolicySpec, Request,
    WaitReason,
};

struct Bench {
    core: Core,
    now: Nanos,
}

impl Bench {
    /// A core that takes pieces, after an access at offset 100 by a tenth connection: the tables' O_last.
    fn new(spec: PolicySpec) -> Bench {
        let config = CoreConfig { pieces: true, ..CoreConfig::single_lane(64) };
        let mut b = Bench { core: Core::new(config, &spec).unwrap(), now: Nanos::ZERO };
        b.push(9, 1, 100, 1);
        assert_eq!(b.next(), Ok((9, 100, 1)));
        b
    }

    fn push(&mut self, conn: u32, file: u32, offset_kib: u64, len_kib: u64) {
        let (offset, len) = (offset_kib << 10, len_kib << 10);
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        let request = Request { conn: ConnId(conn), arrival: self.now, ..Request::new(Op::Read, extent) };
        self.core.push(self.now, &request).unwrap();
    }

    fn ready(&mut self, conn: u32, ready: bool) {
        self.core.event(self.now, Event::Ready { connection: ConnId(conn), ready });
    }

    fn batch(&mut self) -> Result<Batch, (Nanos, WaitReason)> {
        match self.core.next(self.now) {
            Next::Dispatch(batch) => Ok(batch),
            Next::Wait { until, reason } => Err((until, reason)),
        }
    }

    fn done(&mut self, batch: &Batch) {
        let end = self.now + Nanos::from_millis(1);
        self.core.event(end, Event::Completed(Completion::of(batch, self.now, end)));
        self.now = end;
    }

    /// The next batch, served in a millisecond: connection, offset and length in KiB.
    fn next(&mut self) -> Result<(u32, u64, u64), (Nanos, WaitReason)> {
        let batch = self.batch()?;
        let conn = self.core.request(batch.parts[0].id).unwrap().conn.0;
        self.done(&batch);
        Ok((conn, batch.extent.lane_offset >> 10, batch.extent.len >> 10))
    }

    /// The tables' jobs, none of them ready. Without sieving, which would read J2's two accesses together.
    fn tables(spec: PolicySpec) -> Bench {
        let mut b = Bench::new(spec.with("sieve", "off"));
        (0..5).for_each(|job| b.ready(job, false));
        for (job, offset) in [(0, 900), (1, 100), (2, 400), (3, 200), (4, 300), (0, 1000), (1, 300), (2, 500), (4, 400)]
        {
            b.push(job, 1, offset, 1);
        }
        b
    }

    /// A round: these connections become ready (others stay as they are), and the scheduled jobs are served in order,
    /// one access each.
    fn round(&mut self, ready: &[u32], schedule: &[(u32, u64)]) {
        ready.iter().for_each(|job| self.ready(*job, true));
        for &(job, offset) in schedule {
            let batch = self.batch().unwrap();
            let conn = self.core.request(batch.parts[0].id).unwrap().conn.0;
            self.ready(conn, false);
            assert_eq!((conn, batch.extent.lane_offset >> 10), (job, offset));
            self.done(&batch);
        }
    }
}

fn named(name: &str) -> PolicySpec {
    PolicySpec::named(name)
}

#[test]
fn table_1_stream() {
    let mut b = Bench::tables(named("stream"));
    b.round(&[1, 2, 4], &[(1, 100), (2, 400), (4, 300)]);
    b.round(&[0, 2, 3], &[(0, 900), (2, 500), (3, 200)]);
    b.round(&[0, 1, 4], &[(0, 1000), (1, 300), (4, 400)]);
}

/// By the rule in the text (start at the last offset, ascend, then the smaller ones) the second round, after 400, is
/// 500, 900, 200: J2, J0, J3. The printed second row, J2, J3, J0, follows from no last offset (500, 200, 900 descends,
/// then ascends beyond its start). The printed third row, J0, J1, J4, does follow from the end of the printed second at
/// 900. We follow the text, so our third round starts after 200: 300, 400, 1000, which is J1, J4, J0.
#[test]
fn table_2_scan_by_the_rule_of_the_text() {
    let mut b = Bench::tables(named("scan"));
    b.round(&[1, 2, 4], &[(1, 100), (4, 300), (2, 400)]);
    b.round(&[0, 2, 3], &[(2, 500), (0, 900), (3, 200)]);
    b.round(&[0, 1, 4], &[(1, 300), (4, 400), (0, 1000)]);
}

#[test]
fn table_3_wscan() {
    let mut b = Bench::tables(named("wscan").with("window_bytes", 600 << 10));
    b.round(&[1, 2, 4], &[(1, 100), (4, 300), (2, 400)]);
    b.round(&[0, 2, 3], &[(3, 200), (2, 500)]); // J0 at 900 is outside 100 to 700
    b.round(&[1, 4], &[(1, 300), (4, 400)]); // and outside 200 to 800
    b.round(&[], &[(0, 900)]); // nothing within 100 to 700: the nearest
    b.round(&[0], &[(0, 1000)]);
}

#[test]
fn table_4_sstf() {
    let mut b = Bench::tables(named("sstf"));
    let schedule = [(1, 100), (3, 200), (1, 300), (4, 300), (2, 400), (4, 400), (2, 500), (0, 900), (0, 1000)];
    for (job, offset) in schedule {
        b.round(&[0, 1, 2, 3, 4], &[(job, offset)]);
    }
}

/// Not in the tables: the job whose turn it is cannot take data, and the lane waits for it although others are ready.
#[test]
fn sstf_waits_for_a_connection_that_is_not_ready() {
    let mut b = Bench::new(named("sstf"));
    b.push(1, 1, 200, 1);
    b.push(2, 1, 300, 1);
    b.ready(1, false);
    let until = b.now + Nanos::from_millis(50);
    assert_eq!(b.next(), Err((until, WaitReason::Connection)));
    b.now += Nanos::from_millis(20);
    b.ready(1, true);
    assert_eq!(b.next(), Ok((1, 200, 1)));
    assert_eq!(b.next(), Ok((2, 300, 1)));
}

/// Its patience ends: the job is skipped, and gets its turn when it is ready again.
#[test]
fn sstf_passes_over_a_connection_that_stays_away() {
    let mut b = Bench::new(named("sstf"));
    b.push(1, 1, 200, 1);
    b.push(2, 1, 300, 1);
    b.push(2, 1, 150, 1);
    b.ready(1, false);
    let Err((until, WaitReason::Connection)) = b.next() else { panic!("it waits") };
    b.now = until;
    assert_eq!(b.next(), Ok((2, 300, 1)));
    b.ready(1, true);
    assert_eq!(b.next(), Ok((2, 150, 1)), "wrapped to the lowest");
    assert_eq!(b.next(), Ok((1, 200, 1)));
    let mut patient = Bench::new(named("sstf").with("patience_us", 0));
    patient.push(1, 1, 200, 1);
    patient.ready(1, false);
    assert_eq!(patient.next(), Err((Nanos::MAX, WaitReason::Connection)), "the paper's rule has no end of it");
}

/// The starvation that the paper warns about: a distant job under a stream of near ones; the guard ends it.
#[test]
fn the_guard_serves_a_distant_job() {
    for (name, guard, served) in [("wscan", 3, Some(3)), ("wscan", 0, None), ("sstf", 3, Some(3)), ("sstf", 0, None)] {
        let spec = named(name).with("guard_batches", guard);
        let spec = if name == "wscan" { spec.with("window_bytes", 64 << 10) } else { spec };
        let mut b = Bench::new(spec);
        b.push(1, 1, if name == "wscan" { 9000 } else { 50 }, 1);
        let mut order = Vec::new();
        for i in 0..20 {
            b.push(2 + i, 1, 101 + u64::from(i), 1);
            order.push(b.next().unwrap().0);
        }
        assert_eq!(order.iter().position(|conn| *conn == 1), served, "{name} guard {guard}: {order:?}");
    }
}

/// A large access goes in pieces of 128 KiB and keeps its turn while its connection takes them; then the next job.
#[test]
fn large_accesses_go_in_pieces() {
    let mut b = Bench::new(named("stream"));
    b.push(1, 1, 0, 300);
    b.push(2, 1, 5000, 1);
    let pieces = [(1, 0, 128), (1, 128, 128), (1, 256, 44), (2, 5000, 1)];
    assert_eq!(std::array::from_fn(|_| b.next().unwrap()), pieces);
    let mut b = Bench::new(named("stream").with("turn_bytes", 128 << 10));
    b.push(1, 1, 0, 300);
    b.push(2, 1, 5000, 1);
    let pieces = [(1, 0, 128), (2, 5000, 1), (1, 128, 128), (1, 256, 44)];
    assert_eq!(std::array::from_fn(|_| b.next().unwrap()), pieces, "a turn is over after 128 KiB");
}

/// In byte order a connection's later, nearer access waits for its earlier one; with `job_order=free` it does not.
#[test]
fn the_order_within_a_job_may_be_free() {
    for (order, served) in [("byte", [(1, 900, 1), (1, 200, 1)]), ("free", [(1, 200, 1), (1, 900, 1)])] {
        let mut b = Bench::new(named("scan").with("job_order", order));
        b.push(1, 1, 900, 1);
        b.push(1, 1, 200, 1);
        assert_eq!(std::array::from_fn(|_| b.next().unwrap()), served, "{order}");
    }
}

/// Files are ordered by first use, and the scan wraps after the last.
#[test]
fn a_scan_goes_through_the_files_in_turn() {
    let mut b = Bench::new(named("scan"));
    for (conn, file, offset) in [(1, 2, 10), (2, 0, 500), (3, 1, 99), (4, 1, 300), (5, 2, 5)] {
        b.push(conn, file, offset, 1);
    }
    let order: [u32; 5] = std::array::from_fn(|_| b.next().unwrap().0);
    assert_eq!(order, [4, 5, 1, 2, 3]);
}

/// Holes of 4 KiB cost 31 µs to read and an access costs 12.67 ms: eight accesses of a list are read at once, up to
/// 128 KiB with their holes; a hole of 2 MiB is skipped.
#[test]
fn lists_are_sieved_where_holes_are_cheap() {
    let mut b = Bench::new(named("stream"));
    (0..8).for_each(|i| b.push(1, 1, 1000 + i * 8, 4));
    b.push(1, 1, 4000, 4);
    let batch = b.batch().unwrap();
    assert_eq!((batch.parts.len(), batch.extent.len), (8, 60 << 10));
    assert!(batch.parts.iter().zip(0..).all(|(p, i)| (p.lane_offset >> 10, p.len >> 10) == (1000 + i * 8, 4)));
    b.done(&batch);
    assert_eq!(b.next(), Ok((1, 4000, 4)));
    let mut b = Bench::new(named("stream").with("sieve", "off"));
    (0..2).for_each(|i| b.push(1, 1, 1000 + i * 8, 4));
    assert_eq!(b.next(), Ok((1, 1000, 4)));
}

/// The job is chosen at dispatch: arrivals while the device is busy are among the candidates, even if `next` was called
/// meanwhile.
#[test]
fn nothing_is_chosen_while_the_lane_is_busy() {
    for policy in ["scan", "wscan", "sstf"] {
        let mut b = Bench::new(named(policy));
        b.push(1, 1, 100, 1);
        let batch = b.batch().unwrap();
        b.push(2, 1, 900, 1);
        assert_eq!(b.batch(), Err((Nanos::MAX, WaitReason::LanesBusy)), "{policy}");
        b.push(3, 1, 200, 1);
        b.done(&batch);
        assert_eq!([b.next(), b.next()], [Ok((3, 200, 1)), Ok((2, 900, 1))], "{policy}");
    }
}
