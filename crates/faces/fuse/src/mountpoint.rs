//! Facts about a mount point that are known without touching the mounted file system: `/proc/self/mountinfo`, the
//! processes that keep it busy, and its read-ahead.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Largest number of holders of a busy mount that are named.
const HOLDERS_MAX: usize = 5;

/// A line of mountinfo.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MountLine {
    /// `major:minor` of its device.
    pub device: String,
    /// File system type, with its subtype.
    pub kind: String,
}

/// The topmost mount at exactly `path` (absolute, without symbolic links), if any.
pub(crate) fn mounted_at(path: &Path) -> Option<MountLine> {
    let text = std::fs::read("/proc/self/mountinfo").ok()?;
    find(&text, path)
}

fn find(mountinfo: &[u8], path: &Path) -> Option<MountLine> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(|line| parse(line, path)).next_back()
}

fn parse(line: &[u8], path: &Path) -> Option<MountLine> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = fields.nth(2)?;
    let point = unescape(fields.nth(1)?);
    if point.as_bytes() != path.as_os_str().as_bytes() {
        return None;
    }
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Some(MountLine { device: text(device), kind: text(kind) })
}

/// Decodes the octal escapes (`\040`) of mountinfo.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = |digits: &[u8]| digits.iter().try_fold(0u32, |n, d| char::from(*d).to_digit(8).map(|d| n * 8 + d));
        match (byte, after.get(..3).and_then(octal)) {
            (b'\\', Some(code)) => {
                out.push(code as u8);
                rest = after.get(3..).unwrap_or_default();
            }
            _ => {
                out.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(out)
}

/// Lets the kernel read further ahead on the mount at `path`. Needs root: the file system itself can only ask for less
/// than the kernel's 128 KiB.
pub(crate) fn set_read_ahead(path: &Path, bytes: u32) -> io::Result<()> {
    let line = mounted_at(path).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    std::fs::write(format!("/sys/class/bdi/{}/read_ahead_kb", line.device), (bytes / 1024).to_string())
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

    const MOUNTINFO: &[u8] = b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
        40 22 0:41 / /mnt/a\\040b rw,nosuid - fuse.impresario /x/impresario.toml rw,user_id=0\n\
        41 22 0:42 / /mnt/c rw - tmpfs tmpfs rw\n\
        42 22 0:43 / /mnt/c rw shared:5 master:2 - fuse.sshfs host: rw\n\
        garbage\n\n";

    #[test]
    fn finds_the_topmost_mount_at_a_path() {
        let at = |path: &str| find(MOUNTINFO, Path::new(path));
        assert_eq!(at("/mnt/a b"), Some(MountLine { device: "0:41".into(), kind: "fuse.impresario".into() }));
        assert_eq!(at("/mnt/c").unwrap().kind, "fuse.sshfs");
        assert_eq!(at("/mnt"), None);
        assert_eq!(mounted_at(Path::new("/proc")).unwrap().kind, "proc");
    }

    #[test]
    fn broken_escapes_are_taken_as_they_are() {
        assert_eq!(unescape(b"a\\04"), "a\\04");
        assert_eq!(unescape(b"\\134\\999"), "\\\\999");
    }

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
