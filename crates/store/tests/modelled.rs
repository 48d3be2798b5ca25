//! The modelled device in real time. No test depends on the speed of the host: they check order, sums and what must
//! hold however late it wakes up.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use impresario_device::{DeviceParams, Io, Order};
use impresario_store::{Job, ModelledDevice, Timing, monotonic_ns};

const PATIENCE: Duration = Duration::from_secs(20);

type Done = (u32, Timing, u64);

fn job(name: u32, ios: Vec<Io>, done: &Sender<Done>) -> Job {
    let done = done.clone();
    let run = Box::new(move |timing| {
        let _ = done.send((name, timing, monotonic_ns()));
    });
    Job { ios, flush: false, run }
}

fn collect(done: &Receiver<Done>, count: usize) -> Vec<Done> {
    (0..count).map(|_| done.recv_timeout(PATIENCE).expect("every request is reported")).collect()
}

/// A disk that is quick enough for tests and slow enough for a queue to form.
fn quick() -> DeviceParams {
    DeviceParams {
        rpm: 30_000,
        seek_track_ms: 0.1,
        seek_average_ms: 0.5,
        seek_full_ms: 1.0,
        track_skew_ms: 0.2,
        ..DeviceParams::default()
    }
}

/// Half a second.
const LONG: Io = Io::read(0, 256 << 20);

fn far(i: u64) -> Io {
    Io::read(i * 7_919_000_000 % 900_000_000_000, 4096)
}

#[test]
fn requests_are_served_one_at_a_time_in_arrival_order_and_never_early() {
    let device = ModelledDevice::start(&quick()).unwrap();
    let (send, done) = channel();
    let before = monotonic_ns();
    (0..50).for_each(|i| device.submit(job(i, vec![far(u64::from(i))], &send)));
    let reports = collect(&done, 50);
    assert_eq!(reports.iter().map(|r| r.0).collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
    assert!(reports[0].1.started_ns >= before);
    for (_, timing, reported_ns) in &reports {
        assert!(timing.started_ns < timing.finished_ns);
        assert!(*reported_ns >= timing.finished_ns + timing.lateness_ns, "never reported early");
    }
    for pair in reports.windows(2) {
        assert!(pair[1].1.started_ns >= pair[0].1.finished_ns);
    }
    let status = device.status();
    assert_eq!((status.requests, status.transfers, status.read_bytes), (50, 50, 50 * 4096));
    let busy_ns: u64 = reports.iter().map(|r| r.1.finished_ns - r.1.started_ns).sum();
    assert!((status.busy_s - busy_ns as f64 / 1e9).abs() < 1e-6, "{status:?}");
    assert!(status.seek_s + status.rotation_s + status.transfer_s <= status.busy_s);
    assert!(status.lateness.p50_us <= status.lateness.p99_us && status.lateness.p99_us <= status.lateness.max_us);
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["order"], "arrival");
    device.reset();
    assert_eq!((device.status().requests, device.status().lateness.max_us), (0, 0.0));
}

#[test]
fn what_a_completion_does_is_not_charged_to_the_model() {
    let device = ModelledDevice::start(&quick()).unwrap();
    let (send, done) = channel();
    // Keeps the device busy until all are submitted.
    device.submit(job(99, vec![LONG], &send));
    for i in 0..20 {
        let send = send.clone();
        let run = Box::new(move |timing| {
            std::thread::sleep(Duration::from_millis(5));
            let _ = send.send((i, timing, monotonic_ns()));
        });
        device.submit(Job { ios: vec![far(u64::from(i))], flush: false, run });
    }
    // The queue is never empty, so each starts at the modelled end of the one before, however late the host is.
    let reports = collect(&done, 21);
    for pair in reports.windows(2) {
        assert_eq!(pair[1].1.started_ns, pair[0].1.finished_ns);
    }
    assert!(device.status().lateness.max_us > 1000.0, "and the lateness is reported: {:?}", device.status());
}

#[test]
fn the_elevator_sorts_and_merges() {
    let params = DeviceParams { order: Order::Elevator, ..quick() };
    let device = ModelledDevice::start(&params).unwrap();
    let (send, done) = channel();
    // The first starts at once; the others are outstanding together, in the worst order, two and two neighbours.
    device.submit(job(0, vec![LONG], &send));
    for (name, address) in [(1, 900), (2, 901), (3, 700), (4, 701), (5, 500)] {
        device.submit(job(name, vec![Io::read(address * 65536, 65536)], &send));
    }
    device.submit(job(6, vec![Io::write(899 * 65536, 65536)], &send));
    let reports = collect(&done, 7);
    assert_eq!(reports[0].0, 0);
    // All lie below the end of the first transfer: C-SCAN starts again from the lowest.
    assert_eq!(reports[1..].iter().map(|r| r.0).collect::<Vec<_>>(), [5, 3, 4, 6, 1, 2]);
    assert_eq!(reports[2].1, reports[3].1, "neighbours are one transfer");
    let status = device.status();
    assert_eq!((status.requests, status.transfers), (7, 5));
}

#[test]
fn the_order_can_be_changed_while_requests_wait() {
    let device = ModelledDevice::start(&quick()).unwrap();
    let (send, done) = channel();
    for i in 0..40 {
        device.submit(job(i, vec![far(u64::from(i))], &send));
        device.set_order(if i % 2 == 0 { Order::Elevator } else { Order::Arrival });
    }
    let mut names: Vec<u32> = collect(&done, 40).iter().map(|r| r.0).collect();
    names.sort_unstable();
    assert_eq!(names, (0..40).collect::<Vec<_>>());
    assert_eq!(device.status().order, Order::Arrival);
}

#[test]
fn a_request_is_reported_once_after_its_last_transfer_and_its_flush() {
    let params = DeviceParams { write_cache: true, ..quick() };
    let device = ModelledDevice::start(&params).unwrap();
    let (send, done) = channel();
    let spread = vec![Io::write(0, 4096), Io::write(800_000_000_000, 4096), Io::write(400_000_000_000, 4096)];
    device.submit(job(0, spread, &send));
    device.submit(Job { flush: true, ..job(1, vec![Io::write(1 << 30, 4096)], &send) });
    device.submit(Job { flush: true, ..job(2, Vec::new(), &send) });
    device.submit(job(3, Vec::new(), &send));
    let reports = collect(&done, 4);
    assert!(done.try_recv().is_err());
    let status = device.status();
    assert_eq!((status.requests, status.transfers, status.flushes, status.write_bytes), (4, 4, 2, 4 * 4096));
    let timing = |name| reports.iter().find(|r| r.0 == name).map(|r| r.1).unwrap();
    // The flush of 1 or that of 2 had to write some of the four ranges to the platter.
    let flushed_ns = timing(1).finished_ns.max(timing(2).finished_ns) - timing(0).started_ns;
    assert!(flushed_ns > 1_000_000, "{flushed_ns}");
}

#[test]
fn what_a_completion_submits_soon_counts_as_sent_at_its_end() {
    let params = DeviceParams { late_grace_us: 100_000, ..quick() };
    let device = ModelledDevice::start(&params).unwrap();
    let (send, done) = channel();
    let next = job(1, vec![far(5)], &send);
    let (again, report) = (Arc::downgrade(&device), send.clone());
    let run = Box::new(move |timing| {
        if let Some(device) = again.upgrade() {
            device.submit(next);
        }
        let _ = report.send((0, timing, monotonic_ns()));
    });
    device.submit(Job { ios: vec![far(3)], flush: false, run });
    let reports = collect(&done, 2);
    let (first, second) = (reports[0].1, reports[1].1);
    match device.status().grace_requests {
        1 => assert_eq!(second.started_ns, first.finished_ns, "no time passed on the device"),
        0 => assert!(first.lateness_ns > 0 && second.started_ns > first.finished_ns, "the host was slower than 100 ms"),
        more => panic!("{more} requests within the grace"),
    }
    // From another thread there is no grace.
    let after_ns = monotonic_ns();
    device.submit(job(2, vec![far(9)], &send));
    assert!(collect(&done, 1)[0].1.started_ns >= after_ns);
    assert!(device.status().grace_requests <= 1);
}

#[test]
fn a_panic_in_a_completion_stops_nothing() {
    let device = ModelledDevice::start(&quick()).unwrap();
    let (send, done) = channel();
    device.submit(Job { ios: vec![far(1)], flush: false, run: Box::new(|_| panic!("on purpose")) });
    device.submit(job(1, vec![far(2)], &send));
    assert_eq!(collect(&done, 1)[0].0, 1);
}

#[test]
fn stopping_drops_what_is_outstanding() {
    struct DropReport(Sender<&'static str>);
    impl Drop for DropReport {
        fn drop(&mut self) {
            let _ = self.0.send("dropped");
        }
    }
    let device = ModelledDevice::start(&DeviceParams::default()).unwrap();
    let (send, report) = channel();
    for i in 0..100 {
        let report = DropReport(send.clone());
        let run = Box::new(move |_| drop(report));
        device.submit(Job { ios: vec![far(i)], flush: false, run });
    }
    device.stop();
    let late = DropReport(send.clone());
    device.submit(Job { ios: vec![far(1)], flush: false, run: Box::new(move |_| drop(late)) });
    assert_eq!((0..101).filter(|_| report.recv_timeout(PATIENCE).is_ok()).count(), 101);
    assert!(device.status().requests < 100);
    device.stop();
}

#[test]
fn the_last_owner_may_be_a_completion() {
    let device = ModelledDevice::start(&quick()).unwrap();
    let (send, done) = channel();
    let held: Arc<Mutex<Option<Arc<ModelledDevice>>>> = Arc::default();
    let owner = Arc::clone(&held);
    let run = Box::new(move |timing| {
        drop(owner.lock().unwrap().take());
        let _ = send.send((0, timing, monotonic_ns()));
    });
    let mut guard = held.lock().unwrap();
    device.submit(Job { ios: vec![far(1)], flush: false, run });
    *guard = Some(device);
    drop(guard);
    collect(&done, 1);
}

#[test]
fn bad_parameters_are_refused() {
    let error = ModelledDevice::start(&DeviceParams { rpm: 0, ..DeviceParams::default() }).err().unwrap();
    assert!(error.to_string().contains("rpm is 0"), "{error}");
}
