//! Whether a thread that waits for bytes polls for a short time before it sleeps.
//!
//! A thread that sleeps must be woken, which takes tens of microseconds on an idle processor: longer than a small call. Where
//! each side waits for the other, a round trip costs two such wake-ups. Polling avoids them, but takes a processor from other
//! work, and is of no use where the bytes come late. So it happens only where it pays:
//!
//! - [`Account`] learns for each connection whether bytes come in time. Polls in vain cost it credit, which grows with time,
//!   and several in a row a pause, which doubles. A connection that is idle or slow thus costs next to nothing.
//! - [`Crowd`] limits the process: half of its processors poll at once, none of a single one, and none while more
//!   connections than that are in use.
//! - [`Poller`] polls. It yields the processor between two looks, and stops when another thread took it.
//!
//! The first two have no clock and no socket.

use std::num::NonZero;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::Nanos;
use impresario_base::lock::Mutex;

/// Polls in a row that may be in vain before the connection pauses, and again after each pause.
const TRIES: u32 = 4;
/// First and longest pause.
const PAUSE: (Nanos, Nanos) = (Nanos::from_millis(1), Nanos::from_millis(1_000));
/// One in so many nanoseconds of a connection's time may be spent in vain.
const VAIN_ONE_IN: u64 = 8;
/// Credit is saved for so many polls in vain at most.
const CREDIT_POLLS: u64 = 8;
/// A yield that takes longer gave the processor to another thread.
const AWAY_MAX: Duration = Duration::from_micros(20);
/// A connection whose thread was away pauses so many times as long: where processors are busy, a yield gives away a whole time
/// slice, some milliseconds, and wake-ups are fast.
const AWAY_TIMES: u64 = 64;
/// Longest pause for that.
const AWAY_PAUSE_MAX: Nanos = Nanos::from_millis(10_000);
/// A connection counts as in use for one to two spans of 2^22 ns, some 4 ms each.
const SPAN_SHIFT: u32 = 22;

/// How a poll ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// The bytes came.
    Paid,
    /// They did not.
    InVain,
    /// Another thread wanted the processor, and had it for so long.
    Displaced { away: Nanos },
}

/// What a connection has learnt about polling.
#[derive(Debug)]
struct Account {
    /// Longest poll.
    longest: Nanos,
    /// Time that may be spent in vain, as of `credited`.
    credit: Nanos,
    credited: Nanos,
    /// Polls in vain since one that paid.
    misses: u32,
    /// No poll before.
    not_before: Nanos,
}

impl Account {
    fn new(longest: Nanos, now: Nanos) -> Account {
        let credit = Nanos(longest.0.saturating_mul(CREDIT_POLLS));
        Account { longest, credit, credited: now, misses: 0, not_before: now }
    }

    /// Whether to poll now.
    fn may_poll(&mut self, now: Nanos) -> bool {
        let earned = now.since(self.credited).0 / VAIN_ONE_IN;
        let most = self.longest.0.saturating_mul(CREDIT_POLLS);
        self.credit = Nanos(self.credit.0.saturating_add(earned).min(most));
        // What is left over from the division is lost, which only makes it spend less.
        self.credited = now;
        now >= self.not_before && self.credit >= self.longest && self.longest > Nanos::ZERO
    }

    /// A poll has ended, on which so much time was spent.
    fn book(&mut self, now: Nanos, spent: Nanos, end: End) {
        self.misses = match end {
            End::Paid => {
                self.misses = 0;
                return;
            }
            End::InVain => self.misses.saturating_add(1),
            End::Displaced { .. } => (self.misses / TRIES).saturating_add(1).saturating_mul(TRIES),
        };
        self.credit = self.credit.since(spent);
        if self.misses.is_multiple_of(TRIES) {
            let doublings = (self.misses / TRIES - 1).min(32);
            let pause = Nanos(PAUSE.0.0 << doublings).min(PAUSE.1);
            self.not_before = now + pause;
        }
        if let End::Displaced { away } = end {
            let pause = Nanos(away.0.saturating_mul(AWAY_TIMES)).min(AWAY_PAUSE_MAX);
            self.not_before = self.not_before.max(now + pause);
        }
    }
}

/// The threads of a process that poll or wait, and its connections in use.
#[derive(Debug)]
struct Crowd {
    /// Threads that may poll at once.
    polling_max: u32,
    polling: AtomicU32,
    /// Threads that wait for the answer to a call.
    asking: AtomicU32,
    /// Connections on which calls came: the number of a span, the count of the span before, the count of this one.
    in_use: AtomicU64,
    paid: AtomicU64,
    in_vain: AtomicU64,
}

/// The process.
static CROWD: LazyLock<Crowd> =
    LazyLock::new(|| Crowd::new(std::thread::available_parallelism().map_or(1, NonZero::get)));

impl Crowd {
    fn new(processors: usize) -> Crowd {
        let polling_max = (processors / 2).min(u16::MAX.into()) as u32;
        let (polling, asking, in_use) = Default::default();
        Crowd { polling_max, polling, asking, in_use, paid: AtomicU64::new(0), in_vain: AtomicU64::new(0) }
    }

    /// The span of a time.
    fn span(now: Nanos) -> u32 {
        (now.0 >> SPAN_SHIFT) as u32
    }

    /// A connection is in use that was not yet counted in this span.
    fn count(&self, span: u32) {
        let counted = |word: u64| {
            let (before, here) = Crowd::counts(word, span);
            Some(u64::from(span) << 32 | u64::from(before) << 16 | u64::from(here.saturating_add(1)))
        };
        let _ = self.in_use.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
    }

    /// How many connections were in use in the span before this one, and in this one.
    fn counts(word: u64, span: u32) -> (u16, u16) {
        let (of, before, here) = ((word >> 32) as u32, (word >> 16) as u16, word as u16);
        match span.wrapping_sub(of) {
            0 => (before, here),
            1 => (here, 0),
            _ => (0, 0),
        }
    }

    /// A place among the threads that poll; `None` if there is none, or too much else to do.
    fn enter(&self, now: Nanos) -> Option<PollingThread<'_>> {
        let (before, here) = Crowd::counts(self.in_use.load(Ordering::Relaxed), Crowd::span(now));
        let others = self.asking.load(Ordering::Relaxed).max(before.max(here).into());
        if others > self.polling_max {
            return None;
        }
        let more = |polling| (polling < self.polling_max).then(|| polling + 1);
        self.polling.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| PollingThread(self))
    }

    fn tally(&self, end: End) {
        let of = if end == End::Paid { &self.paid } else { &self.in_vain };
        of.fetch_add(1, Ordering::Relaxed);
    }
}

/// What a poll goes by: the clock, the processor and the others of the process.
trait Surroundings: Send + Sync {
    fn now(&self) -> Instant;
    /// Lets other threads have the processor.
    fn give_way(&self);
    fn crowd(&self) -> &Crowd;
}

/// Those of this process.
struct ThisProcess;

impl Surroundings for ThisProcess {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn give_way(&self) {
        std::thread::yield_now();
    }

    fn crowd(&self) -> &Crowd {
        &CROWD
    }
}

/// A thread that polls.
struct PollingThread<'a>(&'a Crowd);

impl Drop for PollingThread<'_> {
    fn drop(&mut self) {
        self.0.polling.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Polls of this process: how many paid, and how many were in vain.
pub fn polls() -> (u64, u64) {
    (CROWD.paid.load(Ordering::Relaxed), CROWD.in_vain.load(Ordering::Relaxed))
}

/// When threads wait for a connection's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// While an answer is owed.
    Asks,
    /// Always: for calls, which may come at any time.
    Listens,
    /// Always: for answers to the calls that came on another connection, which counts for both.
    Relays,
}

/// The polling for one connection.
pub(crate) struct Poller {
    surroundings: &'static dyn Surroundings,
    side: Side,
    account: Mutex<Account>,
    /// The last span in which it was counted as in use.
    span: AtomicU32,
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poller").field("side", &self.side).field("account", &self.account).finish_non_exhaustive()
    }
}

/// A thread that waits for an answer.
pub(crate) struct Asking(&'static Crowd);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Poller {
    /// For a connection, with polls of at most `longest`.
    pub(crate) fn new(side: Side, longest: Duration) -> Poller {
        Poller::within(&ThisProcess, side, longest)
    }

    fn within(surroundings: &'static dyn Surroundings, side: Side, longest: Duration) -> Poller {
        let longest = Nanos(longest.as_nanos().try_into().unwrap_or(u64::MAX));
        let account = Mutex::new(Account::new(longest, nanos(surroundings.now())));
        Poller { surroundings, side, account, span: AtomicU32::new(0) }
    }

    /// To be held while a thread waits.
    pub(crate) fn waits(&self) -> Option<Asking> {
        (self.side == Side::Asks).then(|| {
            let crowd = self.surroundings.crowd();
            crowd.asking.fetch_add(1, Ordering::Relaxed);
            Asking(crowd)
        })
    }

    /// Bytes came.
    pub(crate) fn came(&self) {
        if self.side != Side::Listens {
            return;
        }
        let span = Crowd::span(nanos(self.surroundings.now()));
        if self.span.swap(span, Ordering::Relaxed) != span {
            self.surroundings.crowd().count(span);
        }
    }

    /// Looks until it finds something, where that is worth while, and not after the deadline. `None`: the thread should
    /// sleep.
    pub(crate) fn poll<T>(&self, now: Instant, deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let longest = {
            let mut account = self.account.lock();
            account.may_poll(nanos(now)).then_some(account.longest)?
        };
        let place = self.surroundings.crowd().enter(nanos(now))?;
        let mut found = look();
        if found.is_some() {
            // It did not have to wait.
            return found;
        }
        let until = deadline.min(now + Duration::from_nanos(longest.0));
        let mut looked = self.surroundings.now();
        let end = loop {
            if looked >= until {
                break End::InVain;
            }
            self.surroundings.give_way();
            let back = self.surroundings.now();
            found = look();
            let away = back.saturating_duration_since(looked);
            if away > AWAY_MAX {
                break End::Displaced { away: nanos(back).since(nanos(looked)) };
            }
            looked = back;
            if found.is_some() {
                break End::Paid;
            }
        };
        drop(place);
        self.surroundings.crowd().tally(end);
        let (ended, spent) = (nanos(self.surroundings.now()), nanos(looked).since(nanos(now)));
        self.account.lock().book(ended, spent, end);
        found
    }
}

/// Time since this program first asked.
fn nanos(at: Instant) -> Nanos {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Nanos(at.saturating_duration_since(*ORIGIN).as_nanos().try_into().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONGEST: Nanos = Nanos::from_micros(50);

    /// A connection that waits for bytes that come after these times, one wait after another: time in vain, polls that paid,
    /// polls in vain, and when it ends.
    fn waits(account: &mut Account, start: Nanos, after: impl IntoIterator<Item = Nanos>) -> (Nanos, u32, u32, Nanos) {
        let (mut now, mut lost, mut paid, mut in_vain) = (start, Nanos::ZERO, 0, 0);
        for after in after {
            if account.may_poll(now) {
                if after <= LONGEST {
                    account.book(now + after, after, End::Paid);
                    paid += 1;
                } else {
                    account.book(now + LONGEST, LONGEST, End::InVain);
                    lost += LONGEST;
                    in_vain += 1;
                }
            }
            now += after;
        }
        (lost, paid, in_vain, now)
    }

    #[test]
    fn a_connection_whose_bytes_come_in_time_polls_each_time() {
        let mut account = Account::new(LONGEST, Nanos::ZERO);
        let (lost, paid, in_vain, _) = waits(&mut account, Nanos::ZERO, [Nanos::from_micros(12); 1000]);
        assert_eq!((lost, paid, in_vain), (Nanos::ZERO, 1000, 0));
    }

    #[test]
    fn one_that_is_late_now_and_then_goes_on_polling() {
        let mut account = Account::new(LONGEST, Nanos::ZERO);
        let after = (1..=2000).map(|at| Nanos::from_micros(if at % 40 == 0 { 200 } else { 12 }));
        let (_, paid, in_vain, _) = waits(&mut account, Nanos::ZERO, after);
        assert_eq!((paid, in_vain), (1950, 50));
    }

    #[test]
    fn a_slow_one_costs_nothing_measurable_and_one_that_becomes_fast_is_found_out() {
        let mut account = Account::new(LONGEST, Nanos::ZERO);
        let (_, _, first, now) = waits(&mut account, Nanos::ZERO, [Nanos::from_millis(2); 1000]);
        let (lost, paid, in_vain, end) = waits(&mut account, now, [Nanos::from_millis(2); 10_000]);
        assert_eq!(paid, 0);
        assert!(first < 50 && in_vain < 90, "{first} and {in_vain} polls");
        assert!(lost.0 * 4000 < end.since(now).0, "{lost:?} of {end:?}");
        // After the longest pause at most.
        let at_first = waits(&mut account, end, std::iter::repeat_n(Nanos::from_micros(12), 100_000));
        assert!(at_first.1 > 10_000 && at_first.2 == 0, "{at_first:?}");
    }

    #[test]
    fn one_that_was_displaced_pauses_at_once() {
        let mut account = Account::new(LONGEST, Nanos::ZERO);
        assert!(account.may_poll(Nanos::ZERO));
        let end = End::Displaced { away: Nanos::ZERO };
        account.book(Nanos(7_000), Nanos(7_000), end);
        assert!(!account.may_poll(PAUSE.0));
        assert!(account.may_poll(PAUSE.0 + Nanos(7_000)));
        account.book(PAUSE.0, Nanos(7_000), end);
        assert!(!account.may_poll(PAUSE.0 + PAUSE.0 + PAUSE.0 - Nanos(1)));
        assert!(account.may_poll(PAUSE.0 + PAUSE.0 + PAUSE.0));
    }

    /// Polls that pay in between do not shorten its pauses.
    #[test]
    fn the_time_for_which_one_is_away_is_a_small_share() {
        let (mut account, mut now, mut lost) = (Account::new(LONGEST, Nanos::ZERO), Nanos::ZERO, Nanos::ZERO);
        let away = Nanos::from_millis(3);
        for call in 0..1_000_000 {
            if account.may_poll(now) && call % 10 == 0 {
                now += away;
                lost += away;
                account.book(now, Nanos(5_000), End::Displaced { away });
            } else if account.may_poll(now) {
                account.book(now, Nanos(5_000), End::Paid);
            }
            now += Nanos::from_micros(10);
        }
        assert!(lost > Nanos::ZERO && lost.0 * AWAY_TIMES <= now.0 + away.0 * AWAY_TIMES, "{lost:?} of {now:?}");
        account.book(now, Nanos(5_000), End::Displaced { away: Nanos::MAX });
        assert!(account.may_poll(now + AWAY_PAUSE_MAX));
    }

    #[test]
    fn with_a_longest_time_of_zero_it_never_polls() {
        let mut account = Account::new(Nanos::ZERO, Nanos::ZERO);
        assert!((0..1000).all(|ms| !account.may_poll(Nanos::from_millis(ms))));
    }

    #[test]
    fn half_the_processors_poll_and_none_of_a_single_one() {
        for (processors, most) in [(1, 0), (2, 1), (3, 1), (8, 4)] {
            let crowd = Crowd::new(processors);
            let places: Vec<_> = std::iter::from_fn(|| crowd.enter(Nanos::ZERO)).collect();
            assert_eq!(places.len(), most);
            drop(places);
            assert_eq!(crowd.enter(Nanos::ZERO).is_some(), most > 0, "places are given back");
        }
    }

    #[test]
    fn nothing_polls_while_more_connections_are_in_use_than_may() {
        let crowd = Crowd::new(4);
        let span = |number: u64| Nanos(number << SPAN_SHIFT);
        for used in 1..=3 {
            crowd.count(7);
            assert_eq!(crowd.enter(span(7)).is_some(), used <= 2, "{used} in use");
        }
        assert!(crowd.enter(span(8)).is_none(), "they count for one span more");
        assert!(crowd.enter(span(9)).is_some());
        (0..100_000).for_each(|_| crowd.count(9));
        assert!(crowd.enter(span(9)).is_none(), "their number does not wrap");
        assert!(crowd.enter(span(1000)).is_some());
        crowd.asking.store(3, Ordering::Relaxed);
        assert!(crowd.enter(span(1000)).is_none());
        crowd.asking.store(2, Ordering::Relaxed);
        assert!(crowd.enter(span(1000)).is_some());
    }

    /// A clock that the test moves, two processors of which one may poll, and what happens when a poll gives way.
    struct Staged<F> {
        clock: Mutex<Instant>,
        crowd: Crowd,
        on_give_way: F,
    }

    impl<F: Fn(&Mutex<Instant>) + Send + Sync> Surroundings for Staged<F> {
        fn now(&self) -> Instant {
            *self.clock.lock()
        }

        fn give_way(&self) {
            (self.on_give_way)(&self.clock);
        }

        fn crowd(&self) -> &Crowd {
            &self.crowd
        }
    }

    fn staged<F: Fn(&Mutex<Instant>) + Send + Sync + 'static>(on_give_way: F) -> &'static Staged<F> {
        // No instant of the clock is before the first that was asked for: it would count as that.
        nanos(Instant::now());
        Box::leak(Box::new(Staged { clock: Mutex::new(Instant::now()), crowd: Crowd::new(2), on_give_way }))
    }

    impl<F> Staged<F> {
        fn polls(&self) -> (u64, u64) {
            (self.crowd.paid.load(Ordering::Relaxed), self.crowd.in_vain.load(Ordering::Relaxed))
        }
    }

    fn advances(clock: &Mutex<Instant>, by: Duration) {
        *clock.lock() += by;
    }

    #[test]
    fn a_poller_finds_what_comes_in_time_and_gives_up_otherwise() {
        let around = staged(|clock| advances(clock, Duration::from_micros(5)));
        let far = around.now() + Duration::from_secs(10);
        // It looks at once, and then after each time that it gave way.
        let looks_until = |poller: &Poller, deadline, comes_at: u32| {
            let mut looks = 0;
            let found = poller.poll(around.now(), deadline, || {
                looks += 1;
                (looks >= comes_at).then_some(())
            });
            (found.is_some(), looks)
        };
        let poller = Poller::within(around, Side::Asks, Duration::from_micros(50));
        assert_eq!(looks_until(&poller, far, 1), (true, 1));
        assert_eq!(around.polls(), (0, 0), "one that need not wait is no poll");
        assert_eq!(looks_until(&poller, far, 3), (true, 3));
        assert_eq!(around.polls(), (1, 0));
        assert_eq!(looks_until(&poller, far, 11), (true, 11), "as late as may be");
        for late in 1..=u64::from(TRIES) {
            assert_eq!(looks_until(&poller, far, 12), (false, 11));
            assert_eq!(around.polls(), (2, late));
        }
        assert_eq!(looks_until(&poller, far, 1), (false, 0), "it pauses");
        advances(&around.clock, Duration::from_millis(1));
        assert_eq!(looks_until(&poller, far, 2), (true, 2));
        // Not after the deadline.
        let patient = Poller::within(around, Side::Asks, Duration::from_secs(5));
        assert_eq!(looks_until(&patient, around.now() + Duration::from_micros(20), u32::MAX), (false, 5));
        // While another thread polls there is no place.
        let place = around.crowd.enter(nanos(around.now()));
        assert_eq!(looks_until(&poller, far, 1), (false, 0));
        drop(place);
        assert_eq!(looks_until(&poller, far, 1), (true, 1));
    }

    #[test]
    fn a_poll_ends_when_another_thread_had_the_processor() {
        let around = staged(|clock| advances(clock, Duration::from_millis(3)));
        let far = around.now() + Duration::from_secs(100);
        let poller = Poller::within(around, Side::Listens, Duration::from_millis(50));
        let mut looks = 0;
        let found = poller.poll(around.now(), far, || {
            looks += 1;
            (looks == 2).then_some(())
        });
        assert_eq!((found, looks, around.polls()), (Some(()), 2, (0, 1)), "what came meanwhile is taken");
        advances(&around.clock, Duration::from_millis(3) * AWAY_TIMES as u32 - Duration::from_nanos(1));
        assert_eq!(poller.poll(around.now(), far, || Some(())), None);
        advances(&around.clock, Duration::from_nanos(1));
        assert_eq!(poller.poll(around.now(), far, || Some(())), Some(()));
    }

    /// Each answer comes while the stream polls for it: the other end sends when the poll gives way.
    #[test]
    fn a_stream_that_polls_receives_what_comes_and_keeps_its_deadlines() {
        use std::io::IoSliceMut;
        use std::os::unix::net::UnixStream;
        use std::sync::mpsc::sync_channel;

        use crate::{Stream, TransportError};

        const ROUNDS: u64 = 200;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let [ours, theirs] = [ours, theirs].map(|end| Stream::from_unix(end, Duration::from_secs(1)).unwrap());
        let (gave_way, polled) = sync_channel(0);
        let (sent, is_there) = sync_channel(0);
        let is_there = Mutex::new(is_there);
        let around = staged(move |_| {
            // Where nothing is to be sent any more, a poll in vain.
            if gave_way.send(()).is_ok() {
                is_there.lock().recv().unwrap();
            }
        });
        ours.poll_with(Poller::within(around, Side::Asks, Duration::from_millis(1)));
        let far = || Instant::now() + Duration::from_secs(60);
        let send = |stream: &Stream, bytes: &[u8]| {
            assert_eq!(rustix::net::send(stream, bytes, rustix::net::SendFlags::empty()).unwrap(), bytes.len());
        };
        std::thread::scope(|scope| {
            let theirs = &theirs;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let mut bytes = [0; 64];
                    let got = theirs.receive(&mut [IoSliceMut::new(&mut bytes)], far()).unwrap();
                    polled.recv().unwrap();
                    send(theirs, &bytes[..got]);
                    sent.send(()).unwrap();
                }
            });
            for round in 0..ROUNDS {
                send(&ours, &round.to_ne_bytes());
                let (mut head, mut rest) = ([0; 3], [0; 64]);
                let mut both = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut rest)];
                assert_eq!(ours.receive(&mut both, far()).unwrap(), 8);
                assert_eq!([&head[..], &rest[..5]].concat(), round.to_ne_bytes());
            }
        });
        assert_eq!(around.polls(), (ROUNDS, 0), "each poll paid");
        // The clock that polls go by stands: they end by the deadline, which is real for the sleep that follows.
        advances(&around.clock, Duration::from_secs(60));
        let started = Instant::now();
        let mut byte = [0];
        let late = ours.receive(&mut [IoSliceMut::new(&mut byte)], started + Duration::from_millis(20));
        assert!(matches!(late, Err(TransportError::TimedOut)) && started.elapsed() >= Duration::from_millis(20));
        theirs.shut_down();
        let ended = ours.receive(&mut [IoSliceMut::new(&mut byte)], far());
        assert!(matches!(ended, Err(TransportError::Closed)), "{ended:?}");
    }

    /// On the real clock and processors, whatever else they do.
    #[test]
    fn a_poller_of_this_process_keeps_its_deadlines() {
        let poller = Poller::new(Side::Asks, Duration::from_secs(5));
        let started = Instant::now();
        assert_eq!(poller.poll(started, started + Duration::from_millis(1), || None::<()>), None);
        assert!(started.elapsed() < Duration::from_secs(5), "not for as long as it may");
    }

    proptest! {
        /// Whatever the arrivals: not more than the share, and what a new connection begins with.
        #[test]
        fn the_time_in_vain_is_a_share_of_the_time(
            after in prop_oneof![
                // In time now and then, which ends its pauses, and else just too late.
                prop::collection::vec(prop_oneof![0u64..100, Just(50_001u64)], 1..2000),
                prop::collection::vec(0u64..60_000, 1..2000),
                prop::collection::vec(0u64..2_000_000, 1..2000),
            ]
        ) {
            let mut account = Account::new(LONGEST, Nanos::ZERO);
            let (lost, _, _, end) = waits(&mut account, Nanos::ZERO, after.into_iter().map(Nanos));
            prop_assert!(lost.0 <= end.0 / VAIN_ONE_IN + CREDIT_POLLS * LONGEST.0, "{lost:?} of {end:?}");
        }
    }
}
