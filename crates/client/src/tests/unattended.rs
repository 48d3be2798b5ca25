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
    fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn place(&mut self, at: usize) -> &mut [u8] {
        self.bytes.get_mut(at..).unwrap_or_default()
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
        fn len_bytes(&self) -> usize {
            self.2.len()
        }
        fn place(&mut self, at: usize) -> &mut [u8] {
            self.2.get_mut(at..).unwrap_or_default()
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
        fn len_bytes(&self) -> usize {
            self.0.len()
        }
        fn place(&mut self, at: usize) -> &mut [u8] {
            self.0.get_mut(at..).unwrap_or_default()
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
    let (holds, is_held) = channel();
    let server = server(move |connection, call| {
        let Call::Read { lane_offset, len, .. } = call.call else { return Flow::Close };
        match lane_offset >> 20 {
            // Answered behind the call that comes next, which is answered later.
            1 => {
                held = Some((call.id, lane_offset, len));
                let _ = holds.send(()); // the test may have ended
            }
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
            // Sent after this one, the other call cannot overtake it.
            is_held.recv_timeout(Duration::from_secs(10)).expect("the server has the first call");
            // It receives by then, at least once in ten times.
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

/// What has come of an answer without a gap is told and may be used, before the rest is there.
#[test]
fn what_has_come_of_an_answer_is_told_before_its_end() {
    const PART: usize = 50_000;
    /// Gives its parts away as they come.
    struct InParts {
        parts: Vec<Option<Vec<u8>>>,
        to: Sender<(usize, Vec<u8>)>,
        ended: Sender<(Vec<Option<Vec<u8>>>, End)>,
    }
    impl Task for InParts {
        fn len_bytes(&self) -> usize {
            self.parts.len() * PART
        }
        fn place(&mut self, at: usize) -> &mut [u8] {
            let part = self.parts.get_mut(at / PART).and_then(Option::as_mut);
            part.and_then(|part| part.get_mut(at % PART..)).unwrap_or_default()
        }
        fn came(&mut self, range: std::ops::Range<usize>) -> Option<crate::Job> {
            let (nth, to) = (range.start / PART, self.to.clone());
            let part = self.parts.get_mut(nth).filter(|_| range.len() == PART)?.take()?;
            Some(Box::new(move || _ = to.send((nth, part))))
        }
        fn ended(self: Box<Self>, end: End) {
            let _ = self.ended.send((self.parts, end)); // the test may have ended
        }
    }
    let piece = |at: usize, missing: usize| Answer::Piece { at: at as u32, missing: missing as u32 };
    let server = server(move |connection, call| {
        let Call::Read { lane_offset, .. } = call.call else { return Flow::Close };
        let part = |at: usize, len: usize| content(lane_offset + at as u64, len);
        connection.answer(call.id, &piece(0, 0), &part(0, PART));
        connection.answer(call.id, &piece(2 * PART, 0), &part(2 * PART, PART));
        match lane_offset >> 20 {
            // Over the border of two places, then to the end of the object.
            1 => {
                connection.answer(call.id, &piece(PART, 0), &part(PART, 10));
                connection.answer(call.id, &piece(PART + 10, 0), &part(PART + 10, PART - 10));
                connection.answer(call.id, &piece(3 * PART, PART - 7), &part(3 * PART, 7));
            }
            2 => connection.answer(call.id, &Answer::Fault(Fault { errno: 5, message: "broken".into() }), &[]),
            // What has come and been given away comes again.
            3 => connection.answer(call.id, &piece(PART - 10, 0), &part(PART - 10, 20)),
            _ => return Flow::Close,
        }
        Flow::Continue
    });
    for case in 1..=4u64 {
        let link = link_to(&[server.address()], Duration::from_secs(10));
        link.session(in_ms(10_000)).unwrap();
        let ((to, came), (ended, end)) = (channel(), channel());
        let parts = (0..4).map(|_| Some(vec![0xee; PART])).collect();
        let call = read_call(&link, case << 20, 4 * PART as u32);
        let task = Box::new(InParts { parts, to, ended });
        assert!(link.start_unattended(&call, 4 * PART as u32, task, in_ms(10_000)).is_ok());
        let (parts, end) = end.recv_timeout(Duration::from_secs(30)).unwrap();
        let told: Vec<_> = came.try_iter().collect();
        let right = |nth: usize, part: &[u8]| part == content((case << 20) + (nth * PART) as u64, PART);
        assert_eq!(told.iter().map(|(nth, _)| *nth).collect::<Vec<_>>(), [0, 2], "{case}: {end:?}");
        assert!(told.iter().all(|(nth, part)| right(*nth, part)), "{case}");
        match case {
            1 => {
                assert!(matches!(end, End::Answered(Answer::Data, len) if len == 3 * PART + 7), "{end:?}");
                assert!(right(1, parts[1].as_ref().unwrap()));
                let last = parts[3].as_ref().unwrap();
                assert!(last[..7] == content((1 << 20) + 3 * PART as u64, 7) && last[7..].iter().all(|b| *b == 0));
            }
            2 => assert!(matches!(end, End::Answered(Answer::Fault(_), 0)), "{end:?}"),
            _ => assert!(matches!(end, End::Lost), "{case}: {end:?}"),
        }
    }
}

#[test]
fn the_calls_of_a_round_leave_at_its_end() {
    let got = Arc::new(AtomicU32::new(0));
    let counted = got.clone();
    let server = server(move |connection, call| {
        counted.fetch_add(1, Ordering::SeqCst);
        serve(connection, call)
    });
    let link = link_to(&[server.address()], Duration::from_secs(10));
    link.session(in_ms(10_000)).unwrap();
    let (to, from) = channel();
    for round in 1..=3 {
        crate::begin_round(|| panic!("the server takes what it is sent"));
        (0..5).for_each(|number| assert!(start(&link, number, 10, 10_000, &to)));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(got.load(Ordering::SeqCst), 5 * (round - 1), "they wait");
        crate::end_round();
        let mut numbers: Vec<u64> = (0..5).map(|_| next(&from).0).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
    }
    // What is sent on the connection meanwhile takes along what waits.
    crate::begin_round(|| {});
    assert!(start(&link, 1, 10, 10_000, &to));
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(start(&link, 2, 10, 10_000, &to)));
    });
    let mut numbers = [next(&from).0, next(&from).0];
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2]);
    crate::end_round();
    // A connection that ends ends what waits.
    crate::begin_round(|| {});
    assert!(start(&link, 3, 10, 60_000, &to));
    link.disconnect();
    crate::end_round();
    assert!(matches!(next(&from), (3, _, End::Lost)));
}
