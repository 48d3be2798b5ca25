//! Restarting the server under test, by the user's command.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{Checking, fault};

/// Shortest time that a restart may take.
const RESTART_MIN: Duration = Duration::from_secs(60);

/// The writers that a restart waits for: each has something to lose, or has ended.
#[derive(Debug)]
pub(crate) struct Writers {
    waiting: AtomicUsize,
}

impl Writers {
    pub fn new(count: usize) -> Writers {
        Writers { waiting: AtomicUsize::new(count) }
    }

    /// Waits for all of them; their requests have deadlines of their own.
    pub fn wait(&self) {
        while self.waiting.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Dropped by a writer, once, when it has something to lose or ends.
pub(crate) struct Ready<'a>(pub &'a Writers);

impl Drop for Ready<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Runs the command in a shell, within bounded time.
pub(crate) fn run(command: &str, patience: Duration) -> Checking {
    run_within(command, patience.max(RESTART_MIN))
}

fn run_within(command: &str, limit: Duration) -> Checking {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = match shell.spawn() {
        Ok(child) => child,
        Err(error) => return fault(format!("--restart: sh cannot be run: {error}")),
    };
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return fault(format!("--restart {command}: {status}")),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return fault(format!("--restart {command}: not done within {} s", limit.as_secs()));
            }
            Err(error) => return fault(format!("--restart {command}: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Stop;

    #[test]
    fn a_command_that_fails_is_named() {
        assert_eq!(run("true", Duration::ZERO), Ok(()));
        let Err(Stop::Fail(said)) = run("exit 3", Duration::ZERO) else { panic!("it failed") };
        assert!(said.contains("exit 3") && said.contains('3'), "{said}");
    }

    /// So does a server that hangs while it stops.
    #[test]
    fn a_command_that_hangs_is_named() {
        let Err(Stop::Fail(said)) = run_within("exec sleep 600", Duration::from_secs(1)) else { panic!("it ended") };
        assert!(said.contains("sleep 600: not done within 1 s"), "{said}");
    }
}
