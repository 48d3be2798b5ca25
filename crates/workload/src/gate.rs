//! A barrier that cannot hang: it opens when all have arrived, and breaks when one fails or time runs out.

use impresario_base::lock::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// The gate did not open, because a process failed or was late.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not all processes became ready: {arrived} of {wanted}")]
pub struct Broken {
    arrived: usize,
    wanted: usize,
}

/// Where the processes of a run wait for each other.
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    wanted: usize,
}

#[derive(Default)]
struct State {
    arrived: usize,
    opened: Option<Instant>,
    broken: bool,
}

impl Gate {
    /// A gate that opens when `wanted` have arrived.
    pub fn new(wanted: usize) -> Gate {
        Gate { state: Mutex::default(), changed: Condvar::new(), wanted }
    }

    /// Waits for all; returns the instant at which the gate opened, the same for all.
    pub fn wait(&self, patience: Duration) -> Result<Instant, Broken> {
        let mut state = self.state.lock();
        state.arrived += 1;
        if state.arrived == self.wanted {
            state.opened = Some(Instant::now());
            self.changed.notify_all();
        }
        let deadline = Instant::now() + patience;
        loop {
            if let Some(at) = state.opened {
                return Ok(at);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.broken || left.is_zero() {
                state.broken = true;
                self.changed.notify_all();
                return Err(Broken { arrived: state.arrived, wanted: self.wanted });
            }
            state = self.changed.wait_timeout(state, left).0;
        }
    }

    /// Breaks the gate and ends every wait. Does nothing once it is open.
    pub fn break_open(&self) {
        self.state.lock().broken = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pass_at_one_instant() {
        let gate = Gate::new(4);
        let at: Vec<Instant> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..4).map(|_| s.spawn(|| gate.wait(Duration::from_secs(30)).unwrap())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(at.iter().all(|t| *t == at[0]));
    }

    #[test]
    fn one_missing_breaks_it_in_time() {
        assert!(Gate::new(2).wait(Duration::from_millis(20)).unwrap_err().to_string().contains("1 of 2"));
        let gate = Gate::new(2);
        std::thread::scope(|s| {
            let waiting = s.spawn(|| gate.wait(Duration::from_secs(60)));
            gate.break_open();
            assert!(waiting.join().unwrap().is_err());
        });
    }
}
