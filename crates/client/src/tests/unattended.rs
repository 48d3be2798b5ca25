//! Calls that no thread waits for.

use std::io::IoSliceMut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use impresario_testing::until;
use impresario_wire::{Answer, Fault};

use super::*;
use crate::testing::{FakeCall, FakeConnection};
use crate::{End, Task};

/// Sends what it hears to a test.
struct Told {
    number: u64,
    bytes: Vec<u8>,
    to: Sender<(u64, Vec<u8>, End)>,
}

impl Task for Told {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn ended(self: Box<Self>, end: End) {
        let Told { number, bytes, to } = *self;
        let _ = to.send((number, bytes, end)); // the test may have ended
    }
}

fn told(number: u64, len: usize, to: &Sender<(u64, Vec<u8>, End)>) -> Box<Told> {
    Box::new(Told { number, bytes: vec![0xee; len], to: to.clone() })
}

fn start(link: &Link, number: u64, len: usize, ms: u64, to: &Sender<(u64, Vec<u8>, End)>) -> bool {
    let call = read_call(link, number << 20, len as u32);
    link.start_unattended(&call, len as u32, told(number, len, to), in_ms(ms)).is_ok()
}

fn next(from: &Receiver<(u64, Vec<u8>, End)>) -> (u64, Vec<u8>, End) {
    from.recv_timeout(Duration::from_secs(30)).expect("a task that hears nothing")
}

/// Answers what the offset says: content, a fault, nothing, or the end of the connection.
fn serve(connection: &FakeConnection, call: FakeCall) -> Flow {
    match call.call {
        Call::Read { lane_offset, len, .. } => match lane_offset >> 20 {
            7777 => connection.answer(call.id, &Answer::Fault(Fault { errno: 5, message: "broken".into() }), &[]),
            8888 => {}
            9999 => return Flow::Close,
            _ => connection.answer(call.id, &Answer::Data, &content(lane_offset, len as usize)),
        },
        Call::Status => connection.answer(call.id, &Answer::Text("{}".into()), &[]),
        _ => return Flow::Close,
    }
    Flow::Continue
}

#[test]
fn answers_reach_their_tasks_beside_threads_that_wait() {
    let server = server(serve);
    let link = link_to(&[server.address()], Duration::from_secs(10));
    let (to, from) = channel();
    assert!(!start(&link, 1, 100, 10_000, &to), "there is no connection yet, and none is waited for");
    link.session(in_ms(10_000)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (link, to) = (&link, to.clone());
            scope.spawn(move || {
                for round in 0..200 {
                    let number = thread << 10 | round;
                    let len = [1, 4096, 40_000, 70_000][(round % 4) as usize];
                    assert!(start(link, number, len, 10_000, &to));
                    if thread % 2 == 0 {
                        let mut bytes = vec![0; len];
                        let call = read_call(link, number << 20, len as u32);
                        link.call(call, &[], Some(&mut [IoSliceMut::new(&mut bytes)]), in_ms(10_000)).unwrap();
                        assert!(bytes == content(number << 20, len));
                    }
                }
            });
        }
        let mut seen = std::collections::HashSet::new();
        while seen.len() < 800 {
            let (number, bytes, end) = next(&from);
            assert!(matches!(end, End::Answered(Answer::Data, len) if len == bytes.len()), "{end:?}");
            assert!(bytes == content(number << 20, bytes.len()) && seen.insert(number));
        }
    });
    assert_eq!(server.accepted(), 1);
}

#[test]
fn a_fault_a_late_answer_and_a_lost_connection_are_told_once() {
    let server = server(serve);
    let link = link_to(&[server.address()], Duration::from_secs(10));
    link.session(in_ms(10_000)).unwrap();
    let (to, from) = channel();
    assert!(start(&link, 7777, 10, 10_000, &to));
    assert!(matches!(next(&from), (7777, _, End::Answered(Answer::Fault(Fault { errno: 5, .. }), 0))));
    assert!(start(&link, 8888, 10, 100, &to));
    let (number, _, End::Late(error)) = next(&from) else { panic!("it was answered") };
    assert!(number == 8888 && error.to_string().contains("data.0"), "{error}");
    assert!(start(&link, 1, 10, 10_000, &to), "the connection is as good as before");
    assert!(matches!(next(&from), (1, _, End::Answered(Answer::Data, 10))));
    assert!(start(&link, 8888, 10, 10_000, &to) && start(&link, 9999, 10, 10_000, &to));
    let mut lost = [next(&from), next(&from)].map(|(number, _, end)| {
        assert!(matches!(end, End::Lost), "{end:?}");
        number
    });
    lost.sort_unstable();
    assert_eq!(lost, [8888, 9999]);
    assert!(!start(&link, 1, 10, 10_000, &to), "nobody waits for a new connection");
    link.session(in_ms(10_000)).unwrap();
    assert!(start(&link, 2, 10, 10_000, &to));
}

#[test]
fn a_task_may_start_the_next_call() {
    /// Reads on until it has done so often enough.
    struct Chain(Arc<Link>, u32, Vec<u8>, Sender<u32>);
    impl Task for Chain {
        fn bytes(&mut self) -> &mut [u8] {
            &mut self.2
        }
        fn ended(self: Box<Self>, end: End) {
            let Chain(link, left, bytes, to) = *self;
            assert!(matches!(end, End::Answered(Answer::Data, 64)));
            if left == 0 {
                to.send(left).unwrap();
                return;
            }
            let call = read_call(&link, u64::from(left) << 20, 64);
            let next = Box::new(Chain(link.clone(), left - 1, bytes, to));
            assert!(link.start_unattended(&call, 64, next, in_ms(10_000)).is_ok());
        }
    }
    let server = server(serve);
    let link = Arc::new(link_to(&[server.address()], Duration::from_secs(10)));
    link.session(in_ms(10_000)).unwrap();
    let (to, from) = channel();
    for _ in 0..8 {
        let call = read_call(&link, 0, 64);
        let chain = Box::new(Chain(link.clone(), 500, vec![0; 64], to.clone()));
        assert!(link.start_unattended(&call, 64, chain, in_ms(10_000)).is_ok());
    }
    (0..8).for_each(|_| assert_eq!(from.recv_timeout(Duration::from_secs(30)), Ok(0)));
}

#[test]
fn a_link_that_is_dropped_ends_its_calls() {
    static DROPPED: AtomicU32 = AtomicU32::new(0);
    struct Counted(Vec<u8>);
    impl Task for Counted {
        fn bytes(&mut self) -> &mut [u8] {
            &mut self.0
        }
        fn ended(self: Box<Self>, end: End) {
            assert!(matches!(end, End::Lost), "{end:?}");
            DROPPED.fetch_add(1, Ordering::SeqCst);
        }
    }
    let server = server(serve);
    let link = link_to(&[server.address()], Duration::from_secs(10));
    link.session(in_ms(10_000)).unwrap();
    for _ in 0..3 {
        let call = read_call(&link, 8888 << 20, 10);
        assert!(link.start_unattended(&call, 10, Box::new(Counted(vec![0; 10])), in_ms(60_000)).is_ok());
    }
    drop(link);
    until("three calls end", || DROPPED.load(Ordering::SeqCst) == 3);
}

/// The keeper rests while another thread receives: that one must wake it when it leaves, or the answer lies there until the
/// keeper looks up by itself.
#[test]
fn an_answer_that_comes_after_the_receiving_thread_has_left_is_received_at_once() {
    let mut held = None;
    let server = server(move |connection, call| {
        let Call::Read { lane_offset, len, .. } = call.call else { return Flow::Close };
        match lane_offset >> 20 {
            // Answered behind the call that comes next, which is answered later.
            1 => held = Some((call.id, lane_offset, len)),
            _ => {
                if let Some((id, offset, len)) = held.take() {
                    connection.answer(id, &Answer::Data, &content(offset, len as usize));
                    std::thread::sleep(Duration::from_millis(20));
                }
                connection.answer(call.id, &Answer::Data, &content(lane_offset, len as usize));
            }
        }
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(10));
    link.session(in_ms(10_000)).unwrap();
    let (to, from) = channel();
    assert!(start(&link, 2, 10, 10_000, &to));
    next(&from);
    let took = (0..10).map(|_| {
        // Longer than the keeper stays.
        std::thread::sleep(Duration::from_millis(30));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let mut bytes = [0; 10];
                let call = read_call(&link, 1 << 20, 10);
                link.call(call, &[], Some(&mut [IoSliceMut::new(&mut bytes)]), in_ms(10_000)).unwrap();
            });
            // It receives by then.
            std::thread::sleep(Duration::from_millis(10));
            let began = Instant::now();
            assert!(start(&link, 2, 10, 10_000, &to));
            assert!(matches!(next(&from), (2, _, End::Answered(Answer::Data, 10))));
            waits.join().unwrap();
            began.elapsed()
        })
    });
    let fastest = took.min().unwrap();
    assert!(fastest < Duration::from_millis(120), "{fastest:?}");
}
