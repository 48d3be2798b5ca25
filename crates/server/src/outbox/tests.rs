//! Readers that are slow, read nothing, or take several replies at once.

use super::*;
use crate::payload::Slice;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;

struct Count(Arc<AtomicUsize>);
impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn pair() -> (Arc<Outbox>, UnixStream, Arc<PayloadPool>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let pool = PayloadPool::new(1 << 20);
    (Outbox::new(Arc::new(ours), "unix".into(), pool.clone()), theirs, pool)
}

fn frame(number: u8, len: usize, pool: &Arc<PayloadPool>, held: &Arc<AtomicUsize>) -> OutFrame {
    held.fetch_add(1, Ordering::SeqCst);
    let mut buffer = pool.buffer(len);
    buffer.fill(number);
    let bulk = Bulk::One(Slice::new(Arc::new(buffer), 0..len));
    OutFrame::new(vec![number; 24], bulk, Some(Arc::new(Count(held.clone()))))
}

fn wait_for(mut what: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < deadline, "waited too long");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn frames_leave_in_order_and_whole_past_a_slow_reader() {
    let (outbox, mut theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    (0..40).for_each(|n| outbox.send(frame(n, 100_000, &pool, &held)));
    assert!(started.elapsed() < Duration::from_secs(10), "sending waited for the reader");
    assert!(held.load(Ordering::SeqCst) > 30, "only what left gives up its hold");
    let mut got = vec![0; 40 * 100_024];
    theirs.read_exact(&mut got).unwrap();
    for (n, chunk) in got.chunks(100_024).enumerate() {
        assert!(chunk.iter().all(|&b| b as usize == n), "frame {n} is mixed up");
    }
    wait_for(|| held.load(Ordering::SeqCst) == 0 && outbox.is_drained());
}

#[test]
fn the_owner_drains_and_makes_way_for_requests() {
    let (outbox, mut theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    serve_on_this_thread(Some(outbox.clone()));
    outbox.send(frame(1, 1_000_000, &pool, &held));
    assert!(outbox.queue.lock().drainer == Drainer::Owner);
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; 1_000_024];
        theirs.read_exact(&mut got).unwrap();
        theirs
    });
    outbox.drain_own();
    assert!(outbox.is_drained() && held.load(Ordering::SeqCst) == 0);
    let mut theirs = reader.join().unwrap();

    // A peer that sends while it does not read gets its request read; a thread sends the rest.
    outbox.send(frame(2, 1_000_000, &pool, &held));
    std::io::Write::write_all(&mut theirs, b"request").unwrap();
    outbox.drain_own();
    assert!(outbox.queue.lock().drainer == Drainer::Writer);
    let mut got = vec![0; 1_000_024];
    theirs.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|&b| b == 2));

    // Other connections' work on this thread does not delay its own replies either.
    wait_for(|| outbox.is_drained());
    wait_for(|| outbox.queue.lock().drainer == Drainer::Nobody);
    outbox.send(frame(3, 1_000_000, &pool, &held));
    hand_over_own_replies();
    assert!(outbox.queue.lock().drainer == Drainer::Writer);
    theirs.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|&b| b == 3));
    serve_on_this_thread(None);
}

fn sign() -> Vec<u8> {
    crate::connection::encode(0, &Answer::Alive, 0).unwrap()
}

#[test]
fn signs_of_life_are_few_and_none_is_kept_for_a_client_that_does_not_read() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let pool = PayloadPool::new(64 << 20);
    let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
    let mut got = vec![0; 1 << 20];
    let mut signs = |times_ms: &[u64]| {
        times_ms.iter().for_each(|at_ms| outbox.give_sign_at(*at_ms));
        let got = theirs.read(&mut got).map_or(Vec::new(), |len| got[..len].to_vec());
        assert!(got.chunks(sign().len()).all(|frame| frame == sign()));
        got.len() / sign().len()
    };
    assert_eq!(signs(&[10_000, 10_010, 10_399]), 0, "not yet");
    assert_eq!(signs(&[10_400, 10_500, 10_799]), 1);
    assert_eq!(signs(&[10_800, 11_200, 11_600]), 3);
    assert_eq!(signs(&[20_000, 20_100]), 0, "another wait");
    let held = Arc::new(AtomicUsize::new(0));
    outbox.send(frame(1, 8 << 20, &pool, &held));
    (0..100).for_each(|n| outbox.give_sign_at(30_000 + 400 * n));
    let queue = outbox.queue.lock();
    assert_eq!(queue.frames.len() + usize::from(queue.busy), 1);
    drop(queue);
    outbox.close();
}

#[test]
fn small_replies_wait_for_the_next_one_and_leave_in_order() {
    // A socket that keeps the bounds of messages shows what left together.
    let (ours, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let pool = PayloadPool::new(1 << 20);
    let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
    let held = Arc::new(AtomicUsize::new(0));
    let next = || {
        let (mut buffer, flags) = (vec![0; 64 << 10], rustix::net::RecvFlags::DONTWAIT);
        let (got, _) = rustix::net::recv(&theirs, &mut buffer[..], flags).ok()?;
        // A sign of life may leave with them.
        assert!([0, sign().len()].contains(&(got % 124)), "{got} bytes");
        // The numbers of the frames, each of 24 bytes and 100 of its payload.
        Some(buffer[..got].chunks_exact(124).map(|frame| frame[0]).collect::<Vec<_>>())
    };
    let send = |number| outbox.send(frame(number, 100, &pool, &held));
    serve_on_this_thread(Some(outbox.clone()));
    send(0);
    assert_eq!(next(), Some(vec![0]));
    outbox.hold_back(true);
    send(1);
    send(2);
    assert_eq!((next(), held.load(Ordering::SeqCst)), (None, 2));
    outbox.hold_back(false);
    send(3);
    assert_eq!((next(), held.load(Ordering::SeqCst)), (Some(vec![1, 2, 3]), 0));

    // Before the thread waits.
    outbox.hold_back(true);
    send(4);
    let_own_replies_go();
    assert_eq!(next(), Some(vec![4]));
    send(5);
    hand_over_own_replies();
    assert_eq!(next(), Some(vec![5]));

    // Replies of other threads go at once, and overtake nothing.
    send(6);
    std::thread::scope(|scope| {
        scope.spawn(|| send(7));
    });
    assert_eq!(next(), Some(vec![6, 7]));

    // Neither many nor long ones wait.
    (0..=HELD_MAX as u8).for_each(&send);
    assert_eq!(next(), Some((0..=HELD_MAX as u8).collect()));
    send(8);
    outbox.send(OutFrame::new(vec![9; 124], frame(9, 124 * 200, &pool, &held).bulk, None));
    assert_eq!(next().map(|numbers| numbers[..2].to_vec()), Some(vec![8, 9]));

    // What is held back ends with the connection.
    send(10);
    assert_eq!(held.load(Ordering::SeqCst), 1);
    outbox.close();
    assert_eq!(held.load(Ordering::SeqCst), 0);
    serve_on_this_thread(None);
}

#[test]
fn replies_that_leave_together_wait_together_for_a_slow_reader() {
    let (outbox, mut theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    serve_on_this_thread(Some(outbox.clone()));
    let mut number = 0_u8;
    while outbox.queue.lock().frames.is_empty() {
        outbox.hold_back(true);
        for _ in 0..7 {
            outbox.send(frame(number, 5000, &pool, &held));
            number += 1;
        }
        outbox.let_go();
    }
    // These join the end.
    outbox.send(frame(number, 5000, &pool, &held));
    serve_on_this_thread(None);
    outbox.hand_over();
    let mut got = vec![0; (usize::from(number) + 1) * 5024];
    theirs.read_exact(&mut got).unwrap();
    for (n, chunk) in got.chunks(5024).enumerate() {
        assert!(chunk.iter().all(|&b| usize::from(b) == n), "frame {n} is mixed up");
    }
    wait_for(|| held.load(Ordering::SeqCst) == 0 && outbox.is_drained());
    assert_eq!(outbox.queue.lock().waiting_bytes, 0);
}

#[test]
fn a_reply_of_many_pieces_keeps_their_order() {
    let (outbox, mut theirs, pool) = pair();
    let mut buffer = pool.buffer(3000);
    buffer.iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
    let buffer = Arc::new(buffer);
    let pieces = (0..3000).rev().map(|i| Slice::new(buffer.clone(), i..i + 1)).collect();
    outbox.send(OutFrame::new(vec![9; 24], Bulk::Many(pieces), None));
    let mut got = vec![0; 3024];
    theirs.read_exact(&mut got).unwrap();
    assert!(got[24..].iter().enumerate().all(|(i, &b)| b == ((2999 - i) % 251) as u8));
}

#[test]
fn closing_gives_up_every_hold() {
    let (outbox, theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    (0..10).for_each(|n| outbox.send(frame(n, 100_000, &pool, &held)));
    outbox.close();
    outbox.send(frame(11, 10, &pool, &held));
    wait_for(|| held.load(Ordering::SeqCst) == 0);
    drop(theirs);
    // A peer that is gone is noticed when sending, without a signal.
    let (outbox, theirs, pool) = pair();
    drop(theirs);
    outbox.send(frame(1, 10, &pool, &held));
    assert!(outbox.is_drained() && held.load(Ordering::SeqCst) == 0);
    assert!(outbox.peer_is_gone());
    let (outbox, theirs, _pool) = pair();
    assert!(!outbox.peer_is_gone());
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(outbox.peer_is_gone());
}

#[test]
fn a_reader_that_takes_a_byte_now_and_then_is_given_up_when_memory_is_short() {
    let (outbox, mut theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
    outbox.send(frame(1, 1_000_000, &pool, &held));
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.reserve(10, Duration::from_secs(60)).is_some()
    });
    wait_for(|| {
        // A socket gives room for more when a page of it was read.
        let _ = theirs.read(&mut [0; 5000]);
        std::thread::sleep(Duration::from_millis(400));
        held.load(Ordering::SeqCst) == 0
    });
    drop(all);
    assert!(waiter.join().unwrap());
}

struct Deaf;
impl crate::readiness::Listener for Deaf {
    fn changed(&self, _: bool) {}
    fn go_on(&self) {}
}

/// As long as it is not ready a policy holds its reads back, so that is bounded where nothing waits here, too.
#[test]
fn a_reader_that_takes_nothing_of_what_the_kernel_holds_is_given_up() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1 << 20).unwrap();
    let pool = PayloadPool::new(1 << 20);
    let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
    let asked = crate::readiness::MindsConnections::new(&impresario_sched::PolicySpec::named("stream"));
    outbox.readiness.listen(asked, Box::new(Deaf));
    let held = Arc::new(AtomicUsize::new(0));
    while outbox.readiness.is_ready() {
        outbox.send(frame(1, 20_000, &pool, &held));
    }
    assert_eq!(held.load(Ordering::SeqCst), 0, "the kernel has it all");
    let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.reserve(10, Duration::from_secs(60)).is_some()
    });
    wait_for(|| outbox.queue.lock().closed);
    drop(all);
    assert!(waiter.join().unwrap());
}

#[test]
fn a_reader_that_takes_nothing_is_given_up_when_memory_is_short() {
    let (outbox, _theirs, pool) = pair();
    let held = Arc::new(AtomicUsize::new(0));
    let all = pool.reserve(1 << 20, Duration::ZERO).unwrap();
    outbox.send(frame(1, 1_000_000, &pool, &held));
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.reserve(10, Duration::from_secs(60)).is_some()
    });
    wait_for(|| held.load(Ordering::SeqCst) == 0);
    drop(all);
    assert!(waiter.join().unwrap());
}
