//! Every interleaving of threads that send on one connection, with the code of [`crate::turn`] and locks of the model: each
//! frame leaves once and whole, those of a thread in their order, and no thread waits for a turn that is free.

use std::time::{Duration, Instant};

use loom::sync::Arc;
use loom::thread;

use self::lock::Mutex;
use self::turn::{Outgoing, Put};

/// What `impresario_base::lock` has, made of the model's locks. A wait ends when it is notified and not before, so that a
/// wake-up that is lost is found as threads that stand still.
mod lock {
    use std::time::Duration;

    pub(super) use loom::sync::MutexGuard;

    #[derive(Default)]
    pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(super) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    #[derive(Default)]
    pub(super) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(super) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(super) fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, _: Duration) -> (MutexGuard<'a, T>, bool) {
            (self.0.wait(guard).unwrap(), false)
        }
    }
}

#[allow(clippy::duplicate_mod, reason = "this one has the locks of the model")]
#[path = "turn.rs"]
mod turn;

/// A connection: what threads want to send, and what has left.
#[derive(Default)]
struct Wire {
    outgoing: Outgoing,
    sent: Mutex<Vec<u8>>,
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

impl Wire {
    /// As [`crate::connection::Connection`] sends a small frame.
    fn put(&self, frame: &[u8]) {
        match self.outgoing.put(frame, later()) {
            Put::Queued => {}
            Put::Turn(turn) => self.send(turn),
            Put::Late => panic!("nothing is late"),
        }
    }

    fn send(&self, mut turn: turn::Turn<'_>) {
        loop {
            self.sent.lock().extend_from_slice(&turn.batch);
            if !turn.next() {
                return;
            }
        }
    }

    /// As a thread does that starts several calls and then sends them.
    fn put_together(&self, frames: &[&[u8]]) {
        frames.iter().for_each(|frame| assert!(self.outgoing.queue(frame)));
        self.outgoing.take_queued().into_iter().for_each(|turn| self.send(turn));
    }

    /// A frame with a payload: it waits for its turn.
    fn put_long(&self, frame: &[u8]) {
        let mut turn = self.outgoing.take(later()).expect("a turn");
        turn.batch.extend_from_slice(frame);
        self.send(turn);
    }
}

fn explore(check: fn()) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(check);
}

/// That all has left, each once, and that what follows finds nothing waiting.
fn all_left(wire: &Wire, frames: &str) {
    let mut sent = std::mem::take(&mut *wire.sent.lock());
    let order = String::from_utf8(sent.clone()).unwrap();
    sent.sort_unstable();
    assert_eq!(String::from_utf8(sent).unwrap(), frames, "{order}");
    assert!(order.find('a') < order.find('b'), "{order}: those of a thread keep their order");
    wire.put(b"z");
    assert_eq!(*wire.sent.lock(), b"z");
}

#[test]
fn small_frames_leave_once_and_in_order() {
    explore(|| {
        let wire = Arc::new(Wire::default());
        let others = [&b"c"[..], b"d"].map(|frame| {
            let wire = wire.clone();
            thread::spawn(move || wire.put(frame))
        });
        wire.put(b"a");
        wire.put(b"b");
        others.into_iter().for_each(|other| other.join().unwrap());
        all_left(&wire, "abcd");
    });
}

#[test]
fn who_waits_for_a_turn_gets_one() {
    explore(|| {
        let wire = Arc::new(Wire::default());
        let others = [&b"c"[..], b"d"].map(|frame| {
            let wire = wire.clone();
            thread::spawn(move || wire.put_long(frame))
        });
        wire.put(b"a");
        wire.put(b"b");
        others.into_iter().for_each(|other| other.join().unwrap());
        all_left(&wire, "abcd");
    });
}

#[test]
fn frames_that_leave_together_do_so_beside_others() {
    explore(|| {
        let wire = Arc::new(Wire::default());
        let (together, long) = (wire.clone(), wire.clone());
        let together = thread::spawn(move || together.put_together(&[b"c", b"d"]));
        let long = thread::spawn(move || long.put_long(b"e"));
        wire.put_together(&[b"a", b"b"]);
        [together, long].into_iter().for_each(|other| other.join().unwrap());
        all_left(&wire, "abcde");
    });
}

#[test]
fn a_turn_that_fails_takes_the_queue_with_it_and_holds_up_nobody() {
    explore(|| {
        let wire = Arc::new(Wire::default());
        let (long, failing) = (wire.clone(), wire.clone());
        let long = thread::spawn(move || long.put_long(b"c"));
        // The connection breaks over what it sends.
        let failing = thread::spawn(move || drop(failing.outgoing.take(later())));
        wire.put(b"a");
        wire.put(b"b");
        [long, failing].into_iter().for_each(|other| other.join().unwrap());
        let sent = std::mem::take(&mut *wire.sent.lock());
        assert!(sent.contains(&b'c') && sent.len() <= 3, "{sent:?}");
        wire.put(b"z");
        assert_eq!(*wire.sent.lock(), b"z");
    });
}
