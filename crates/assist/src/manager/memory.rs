//! How much memory the manager may fill with data brought in, when the configuration does not say.

use std::path::{Path, PathBuf};

/// Where nothing can be found out.
const DEFAULT_BYTES: u64 = 256 << 20;
/// Never less, or nothing could be brought in.
const LEAST_BYTES: u64 = 8 << 20;

/// A quarter of the memory available to this process: of the machine, or of its memory control group if that has less.
pub(super) fn node_budget_bytes() -> u64 {
    let available = available_bytes(Path::new("/proc"), Path::new("/sys/fs/cgroup"));
    (available.unwrap_or(DEFAULT_BYTES * 4) / 4).max(LEAST_BYTES)
}

fn available_bytes(proc: &Path, cgroups: &Path) -> Option<u64> {
    let machine = named_number(&read(proc.join("meminfo"))?, "MemAvailable:").map(|kib| kib << 10);
    let group = group_bytes(&read(proc.join("self/cgroup")).unwrap_or_default(), cgroups);
    [machine, group].into_iter().flatten().min()
}

/// What the memory control group, or one above it, still leaves to the page cache: its limit without what programs hold.
fn group_bytes(groups: &str, cgroups: &Path) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit, held) = match controllers {
            "" => (cgroups.to_path_buf(), "memory.max", "anon"),
            c if c.split(',').any(|c| c == "memory") => (cgroups.join("memory"), "memory.limit_in_bytes", "total_rss"),
            _ => continue,
        };
        let own = root.join(path.trim_start_matches('/'));
        for group in own.ancestors().take_while(|g| g.starts_with(&root)) {
            // "max", and on version 1 a number near 2⁶³, mean no limit.
            let Some(bytes) = read(group.join(limit)).and_then(|t| t.trim().parse::<u64>().ok()) else { continue };
            let stat = read(group.join("memory.stat")).unwrap_or_default();
            let left = bytes.saturating_sub(named_number(&stat, held).unwrap_or(0));
            least = Some(least.unwrap_or(u64::MAX).min(left));
        }
    }
    least
}

fn read(path: PathBuf) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The number after a name at the beginning of a line.
fn named_number(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_tightest_group_counts() {
        let dir = tempfile::tempdir().unwrap();
        let (proc, groups) = (dir.path().join("proc"), dir.path().join("cg"));
        put(&proc, "meminfo", "MemTotal: 999 kB\nMemAvailable:    8388608 kB\n");
        assert_eq!(available_bytes(&proc, &groups), Some(8 << 30));
        put(&proc, "self/cgroup", "0::/user/job\n3:cpu:/x\n");
        put(&groups, "user/job/memory.max", "max\n");
        put(&groups, "user/memory.max", "1073741824\n");
        put(&groups, "user/memory.stat", "file 5\nanon 73741824\n");
        assert_eq!(available_bytes(&proc, &groups), Some(1_000_000_000));
        put(&proc, "self/cgroup", "4:memory,hugetlb:/job\n0::/\n");
        put(&groups, "memory/job/memory.limit_in_bytes", "536870912\n");
        put(&groups, "memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(available_bytes(&proc, &groups), Some(512 << 20));
    }

    #[test]
    fn there_is_always_some() {
        assert!(node_budget_bytes() >= LEAST_BYTES);
    }
}
