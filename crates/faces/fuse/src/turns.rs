//! Which reads are served at once.
//!
//! The kernel reads up to 64 pieces ahead at a time, and what it wants next, a look-up or a close that a program waits for,
//! comes behind them. So reads take at most three quarters of the threads. The others wait here, and the thread that ends a
//! read serves the next one: reads need no threads of their own, and begin in the order in which they came.

use std::collections::VecDeque;

use impresario_base::lock::Mutex;

/// The turns of one mount, `T` being what is to be served.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    at_once: usize,
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    under_way: usize,
    /// As many as the kernel has sent: it bounds them.
    waiting: VecDeque<T>,
}

impl<T> Turns<T> {
    /// For a mount of so many threads.
    pub(crate) fn new(threads: usize) -> Turns<T> {
        let state = State { under_way: 0, waiting: VecDeque::new() };
        Turns { at_once: (threads - threads.div_ceil(4)).max(1), state: Mutex::new(state) }
    }

    /// Serves this one and those that have waited since, of which `serve` is told so, or leaves it to a thread that does so
    /// already.
    pub(crate) fn take(&self, one: T, mut serve: impl FnMut(T, bool)) {
        {
            let mut state = self.state.lock();
            if state.under_way >= self.at_once {
                state.waiting.push_back(one);
                return;
            }
            state.under_way += 1;
        }
        let (mut next, mut has_waited) = (Some(one), false);
        while let Some(one) = next {
            let turn = Turn(self); // it is under way already
            serve(one, has_waited);
            (next, has_waited) = (turn.over(), true);
        }
    }
}

/// A read under way.
struct Turn<'a, T>(&'a Turns<T>);

impl<T> Turn<'_, T> {
    /// The next one to be served, which takes this one's place.
    fn over(self) -> Option<T> {
        let mut state = self.0.state.lock();
        let next = state.waiting.pop_front();
        // Under one lock: what comes in between would wait for a thread that looks no more.
        state.under_way -= usize::from(next.is_none());
        drop(state);
        std::mem::forget(self);
        next
    }
}

/// Where serving one panics. Those for which nobody is left are dropped, as that one is: their answer is an error.
impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.under_way -= 1;
        let left = if state.under_way == 0 { std::mem::take(&mut state.waiting) } else { VecDeque::new() };
        drop(state);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_quarter_of_the_threads_is_left() {
        let at_once = [1, 2, 4, 16, 256].map(|threads| Turns::<()>::new(threads).at_once);
        assert_eq!(at_once, [1, 1, 3, 12, 192]);
    }

    #[test]
    fn what_finds_no_turn_is_served_in_order_by_those_who_have_one() {
        let turns = Turns::new(2);
        let (go, wait) = channel();
        let (told, served) = channel();
        std::thread::scope(|scope| {
            let turns = &turns;
            scope.spawn(move || {
                turns.take(0, |n, has_waited| {
                    assert_eq!(has_waited, n > 0);
                    told.send(n).unwrap();
                    if n == 0 {
                        wait.recv().unwrap();
                    }
                });
            });
            assert_eq!(served.recv(), Ok(0));
            (1..5).for_each(|n| turns.take(n, |_, _| panic!("there is no turn")));
            go.send(()).unwrap();
            assert_eq!(served.iter().collect::<Vec<_>>(), [1, 2, 3, 4]);
        });
        assert_eq!(turns.state.lock().under_way, 0);
    }

    #[test]
    fn none_is_left_over_and_never_are_more_served_at_once() {
        const EACH: usize = 10_000;
        let turns = Turns::new(4);
        let [now, most, served] = [const { AtomicUsize::new(0) }; 3];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        turns.take((), |(), _| {
                            most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                            served.fetch_add(1, SeqCst);
                            now.fetch_sub(1, SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(served.into_inner(), 4 * EACH);
        assert!(most.into_inner() <= 3);
        let state = turns.state.lock();
        assert_eq!((state.under_way, state.waiting.len()), (0, 0));
    }

    #[test]
    fn a_panic_takes_no_turn_away_and_lets_nobody_wait() {
        let turns = Turns::new(1);
        let waits = std::sync::Arc::new(());
        let panics = || {
            turns.take(waits.clone(), |_, _| {
                turns.take(waits.clone(), |_, _| ());
                panic!("as expected")
            });
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(std::sync::Arc::strong_count(&waits), 1, "the one that waited is dropped");
        let mut served = 0;
        turns.take(waits, |_, _| served += 1);
        assert_eq!(served, 1);
    }
}
