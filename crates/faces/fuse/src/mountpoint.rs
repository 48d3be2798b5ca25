//! Facts about a mount point that are known without touching the mounted file system: its line in mountinfo, the
//! processes that keep it busy, and its read-ahead.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use impresario_base::mounts::{Mount, mounts};

/// Largest number of holders of a busy mount that are named.
const HOLDERS_MAX: usize = 5;

/// The topmost mount at exactly `path` (absolute, without symbolic links), if any.
pub(crate) fn mounted_at(path: &Path) -> Option<Mount> {
    mounts().into_iter().rfind(|mount| mount.point == path)
}

/// Lets the kernel read further ahead on the mount at `path`. Needs root: the file system itself can only ask for less
/// than the kernel's 128 KiB.
pub(crate) fn set_read_ahead(path: &Path, bytes: u32) -> io::Result<()> {
    let line = mounted_at(path).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    let (major, minor) = line.device;
    std::fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), (bytes / 1024).to_string())
}

/// Processes with a file or their working directory below `path`, as `pid (name)`, as far as permissions show.
pub(crate) fn holders(path: &Path) -> Vec<String> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .map(|process| process.path())
        .filter(|process| process.file_name().is_some_and(|pid| pid.as_bytes().iter().all(u8::is_ascii_digit)))
        .filter(|process| holds(process, path))
        .take(HOLDERS_MAX)
        .map(|process| {
            let pid = process.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            format!("{pid} ({})", name.trim())
        })
        .collect()
}

fn holds(process: &Path, path: &Path) -> bool {
    // Only the links are read: their targets are on the mount, which may not answer.
    let below = |link: PathBuf| std::fs::read_link(link).is_ok_and(|target| target.starts_with(path));
    if ["cwd", "root", "exe"].iter().any(|link| below(process.join(link))) {
        return true;
    }
    ["fd", "map_files"].iter().any(|directory| {
        std::fs::read_dir(process.join(directory)).is_ok_and(|links| links.flatten().any(|link| below(link.path())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_are_seen_to_hold_our_own_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        assert!(holders(&path).is_empty());
        let _file = std::fs::File::create(path.join("open")).unwrap();
        let us = std::process::id().to_string();
        assert!(holders(&path).iter().any(|holder| holder.starts_with(&us)), "{:?}", holders(&path));
    }
}
