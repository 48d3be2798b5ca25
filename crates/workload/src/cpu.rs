//! How busy the machine and single processes were, from `/proc`.

use std::time::Duration;

/// Times of all processors together since the system started, in clock ticks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MachineTimes {
    idle: u64,
    total: u64,
}

impl MachineTimes {
    /// Now; `None` where `/proc/stat` cannot be read.
    pub fn now() -> Option<MachineTimes> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    fn parse(text: &str) -> Option<MachineTimes> {
        let line = text.lines().find(|l| l.starts_with("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|t| t.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal; guest times are already within user.
        let idle = ticks.get(3)? + ticks.get(4).unwrap_or(&0);
        Some(MachineTimes { idle, total: ticks.iter().take(8).sum() })
    }

    /// The share of processor time that was idle since `earlier`, 0 to 1; `None` when no time has passed.
    pub fn idle_since(&self, earlier: &MachineTimes) -> Option<f64> {
        let total = self.total.checked_sub(earlier.total).filter(|t| *t > 0)?;
        Some(self.idle.saturating_sub(earlier.idle) as f64 / total as f64)
    }
}

/// Processor time that a process has used so far, its ended threads included; `None` when it is gone.
pub fn process_cpu(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted from its end.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    // SAFETY: sysconf reads a constant of the system and touches no memory of ours.
    let per_second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|n| *n > 0)?;
    let whole = Duration::from_nanos(ticks.saturating_mul(1_000_000_000 / per_second));
    // The scheduler's own account is precise to the nanosecond but forgets ended threads: take the larger.
    Some(whole.max(live_threads_cpu(pid).unwrap_or_default()))
}

fn live_threads_cpu(pid: u32) -> Option<Duration> {
    let mut sum = 0u64;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let Ok(text) = std::fs::read_to_string(task.ok()?.path().join("schedstat")) else { continue };
        sum += text.split_whitespace().next().and_then(|t| t.parse::<u64>().ok()).unwrap_or(0);
    }
    Some(Duration::from_nanos(sum))
}

/// Memory of a process that is resident now, bytes; `None` when it is gone.
pub fn process_rss_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_share_of_a_known_file() {
        let a = MachineTimes::parse("cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1 1 1 1\n").unwrap();
        let b = MachineTimes::parse("cpu  50 0 20 120 10 0 0 0 0 0\n").unwrap();
        assert_eq!(b.idle_since(&a), Some(0.5));
        assert_eq!(a.idle_since(&a), None);
        assert_eq!(MachineTimes::parse("nonsense"), None);
    }

    #[test]
    fn our_own_cpu_and_memory_are_seen() {
        let pid = std::process::id();
        let before = process_cpu(pid).unwrap();
        let mut x = 1u64;
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(60) {
            x = impresario_base::random::mix(x.wrapping_add(1));
        }
        std::hint::black_box(x);
        assert!(process_cpu(pid).unwrap() > before);
        assert!(process_rss_bytes(pid).unwrap() > 100_000);
        assert_eq!(process_cpu(u32::MAX), None);
    }
}
