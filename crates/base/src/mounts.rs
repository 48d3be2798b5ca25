//! The mounts that a process sees: lines of `/proc/self/mountinfo`, proc(5).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Its number, which `mnt_id` of a descriptor names.
    pub id: u64,
    /// Major and minor number of the device of its files.
    pub device: (u32, u32),
    /// Where it is mounted.
    pub point: PathBuf,
    /// Type of the file system, with its subtype.
    pub kind: String,
    /// What is mounted, such as a device or a server.
    pub source: String,
    /// Options of the mount, then those of the file system, separated by commas.
    pub options: String,
}

/// The mounts of this process in their order: of two at one place the later one is seen. None where the kernel tells none.
pub fn mounts() -> Vec<Mount> {
    parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

impl Mount {
    /// Major and minor number of the block device that is mounted, if it is one. A file system may give its files other numbers.
    pub fn block_device(&self) -> Option<(u32, u32)> {
        // What else a source may be is not looked at, so that no file system is waited for.
        let meta = Some(&self.source).filter(|source| source.starts_with("/dev/"))?;
        let meta = std::fs::metadata(meta).ok().filter(|meta| meta.file_type().is_block_device())?;
        Some((libc::major(meta.rdev()), libc::minor(meta.rdev())))
    }
}

/// The one of these mounts by which a file was opened.
pub fn mount_of(open: impl AsFd, mounts: &[Mount]) -> Option<&Mount> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", open.as_fd().as_raw_fd())).ok()?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse::<u64>().ok()?;
    mounts.iter().find(|mount| mount.id == id)
}

/// Major and minor number of the device below an open file or folder, as sysfs names it: that of its mount, or where this is none,
/// as on btrfs, that of what is mounted. Its file system is not asked.
pub fn device_below(open: impl AsFd) -> Option<(u32, u32)> {
    let mounts = mounts();
    let mount = mount_of(open, &mounts)?;
    let block = if mount.device.0 == 0 { mount.block_device() } else { None };
    Some(block.unwrap_or(mount.device))
}

/// The same of a file or folder at a place.
pub fn device_below_path(path: &Path) -> Option<(u32, u32)> {
    let open = File::options().read(true).custom_flags(libc::O_PATH).open(path).ok()?;
    // One that another name space mounted is in no list.
    device_below(&open).or_else(|| {
        let dev = open.metadata().ok()?.dev();
        Some((libc::major(dev), libc::minor(dev)))
    })
}

/// The mounts in a text; lines that are none are left out.
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let id = text(fields.next()?).parse().ok()?;
    let device = text(fields.nth(1)?);
    let (major, minor) = device.split_once(':')?;
    let point = unescape(fields.nth(1)?).into();
    let of_mount = text(fields.next()?);
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1).map(text);
    let (kind, source) = (fields.next()?, fields.next()?);
    let options = format!("{of_mount},{}", fields.next().unwrap_or_default());
    Some(Mount { id, device: (major.parse().ok()?, minor.parse().ok()?), point, kind, source, options })
}

/// Decodes octal escapes (`\040`).
fn unescape(field: &[u8]) -> OsString {
    let mut out = OsString::new();
    let mut parts = field.split(|byte| *byte == b'\\');
    out.push(OsStr::from_bytes(parts.next().unwrap_or_default()));
    for part in parts {
        let octal = |digits: &[u8]| digits.iter().try_fold(0u32, |n, d| char::from(*d).to_digit(8).map(|d| n * 8 + d));
        match part.split_at_checked(3).and_then(|(digits, rest)| Some((octal(digits)?, rest))) {
            Some((code, rest)) => out.push(OsString::from_vec([&[code as u8], rest].concat())),
            None => out.push(OsString::from_vec([b"\\", part].concat())),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_proc_5_describes_them() {
        let text = b"22 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw\nnonsense\n\
                     36 22 0:31 / /mnt/a\\040b\\134c rw - fuse.impresario x rw\n37 22 0:3 / /x\\9 rw - tmpfs - rw\n";
        let told: Vec<_> = parse(text).into_iter().map(|m| (m.id, m.device, m.point, m.kind)).collect();
        let wanted = [
            (22, (254, 0), PathBuf::from("/"), "ext4".to_string()),
            (36, (0, 31), "/mnt/a b\\c".into(), "fuse.impresario".into()),
            (37, (0, 3), "/x\\9".into(), "tmpfs".into()),
        ];
        assert_eq!(told, wanted);
        let first = parse(text).swap_remove(0);
        assert_eq!((first.source.as_str(), first.options.as_str()), ("/dev/vda", "rw,noatime,rw"));
        assert!(mounts().iter().any(|mount| mount.point == *"/"));
    }

    #[test]
    fn a_files_mount_tells_its_device() {
        let file = File::open("/proc/self/status").unwrap();
        let mounts = mounts();
        assert_eq!(mount_of(&file, &mounts).unwrap().kind, "proc");
        assert_eq!(mount_of(&file, &[]), None);
        let dev = file.metadata().unwrap().dev();
        assert_eq!(device_below_path(Path::new("/proc/self/status")), Some((libc::major(dev), libc::minor(dev))));
        assert_eq!(device_below_path(Path::new("/nowhere")), None);
        let mut mount = mounts[0].clone();
        for source in ["none", "/dev/null", "/dev/does-not-exist", "/etc", "server:/dev/sda"] {
            mount.source = source.into();
            assert_eq!(mount.block_device(), None, "{source}");
        }
    }
}
