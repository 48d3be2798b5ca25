//! Whether programs that have nothing to do leave the processor alone.

use std::fs;
use std::time::{Duration, Instant};

/// How long is looked at.
const SPAN: Duration = Duration::from_secs(2);
/// How often: what was made on demand may linger, longer on a busy machine, and one span that is idle is enough.
const SPANS: usize = 15;

/// Waits until all threads of these processes together have woken up fewer than `wakeups_per_s` times a second for a while, and
/// none has kept a processor busy. What a wake-up takes of the processor depends on the machine, so that there is no limit for
/// it but one that only a thread that spins exceeds.
///
/// # Panics
/// With what was seen, when they were not idle in any span of half a minute.
#[track_caller]
pub fn until_idle(pids: &[u32], wakeups_per_s: f64) {
    let mut spans = Vec::new();
    for _ in 0..SPANS {
        let (before, began) = (used(pids), Instant::now());
        std::thread::sleep(SPAN);
        let (after, span_s) = (used(pids), began.elapsed().as_secs_f64());
        let share = (after.0 - before.0) / span_s;
        let wakeups = after.1.saturating_sub(before.1) as f64 / span_s;
        spans.push(format!("{wakeups:.0} a second, {:.1} % of a processor", share * 100.0));
        if wakeups < wakeups_per_s && share < 0.2 {
            println!("wake-ups: {spans:?}");
            return;
        }
    }
    panic!("idle programs woke up {wakeups_per_s} times a second or more, or one spins: {spans:?}");
}

/// Seconds of the processor that the processes have used, and how often their threads have slept.
fn used(pids: &[u32]) -> (f64, u64) {
    let ticks_per_s = rustix::param::clock_ticks_per_second() as f64;
    pids.iter()
        .fold((0.0, 0), |(seconds, sleeps), pid| (seconds + ticks(*pid) as f64 / ticks_per_s, sleeps + slept(*pid)))
}

/// Fields 14 and 15 of `/proc/PID/stat`; the name before them may have blanks.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    let after_name = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

fn slept(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let of = |task: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    };
    tasks.filter_map(of).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_process_that_wakes_up_or_spins_is_told_from_one_that_is_idle() {
        let me = [std::process::id()];
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waking = scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let (before, began) = (used(&me), Instant::now());
            crate::until("a thread has slept a hundred times", || used(&me).1 >= before.1 + 100);
            ended.store(true, Ordering::Relaxed);
            waking.join().unwrap();
            while used(&me).0 < before.0 + 0.05 {
                assert!(began.elapsed() < crate::PATIENCE, "what a thread spins for is not counted");
            }
        });
    }
}
