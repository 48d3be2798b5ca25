//! Tells the scheduler which connections can take data: those whose outbox is empty.

use std::sync::{Mutex, OnceLock};

use crate::payload::lock;

/// Who is told of changes.
pub(crate) type Listener = Box<dyn Fn(bool) + Send + Sync>;

/// Tells a listener of changes, the last one last, whoever notices them.
#[derive(Default)]
pub(crate) struct Readiness {
    listener: OnceLock<Listener>,
    telling: Mutex<Telling>,
}

struct Telling {
    /// What the listener knows.
    ready: bool,
    /// A thread is telling; it looks again before it leaves.
    busy: bool,
    again: bool,
}

impl Default for Telling {
    fn default() -> Self {
        Telling { ready: true, busy: false, again: false }
    }
}

impl Readiness {
    /// Names the listener, once.
    pub(crate) fn listen(&self, listener: Listener) {
        let _ = self.listener.set(listener);
    }

    /// Something may have changed; `look` says what is so now. The listener may send on this very connection, so it is
    /// called without a lock.
    pub(crate) fn changed(&self, look: impl Fn() -> bool) {
        let Some(listener) = self.listener.get() else { return };
        let mut state = lock(&self.telling);
        if state.busy {
            state.again = true;
            return;
        }
        state.busy = true;
        loop {
            state.again = false;
            let known = state.ready;
            drop(state);
            let ready = look();
            if ready != known {
                listener(ready);
            }
            state = lock(&self.telling);
            state.ready = ready;
            if !state.again {
                state.busy = false;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whatever threads notice in whatever order, the listener ends with the truth.
    #[test]
    fn the_last_word_is_the_truth() {
        let (truth, told) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
        let readiness = Arc::new(Readiness::default());
        let heard = told.clone();
        readiness.listen(Box::new(move |ready| heard.store(ready, Ordering::SeqCst)));
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let (truth, readiness) = (truth.clone(), readiness.clone());
                std::thread::spawn(move || {
                    for i in 0..2_000 {
                        truth.store((i + t) % 3 == 0, Ordering::SeqCst);
                        readiness.changed(|| truth.load(Ordering::SeqCst));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        readiness.changed(|| truth.load(Ordering::SeqCst));
        assert_eq!(told.load(Ordering::SeqCst), truth.load(Ordering::SeqCst));
    }
}
