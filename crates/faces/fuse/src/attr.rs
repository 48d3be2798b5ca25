//! Translation of attributes and times between the wire and the kernel.

use std::time::{Duration, SystemTime};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use impresario_wire::{Attr, Device, NodeKind, SetTime, Time};

/// The preferred request size that `stat` reports, bytes. Copy programs use it as their buffer. With a larger value, a
/// program that seeks in a buffered stream would read that much after every seek.
const BLOCK_BYTES: u32 = 128 * 1024;

/// The kernel's type of a node.
pub(crate) fn file_type(kind: NodeKind) -> FileType {
    match kind {
        NodeKind::File => FileType::RegularFile,
        NodeKind::Dir => FileType::Directory,
        NodeKind::Symlink => FileType::Symlink,
        NodeKind::Fifo => FileType::NamedPipe,
        NodeKind::Socket => FileType::Socket,
        NodeKind::Character(_) => FileType::CharDevice,
        NodeKind::Block(_) => FileType::BlockDevice,
    }
}

/// What `mknod` is to make, by the file type in its mode; `None` for what it does not make. The device's number is in the
/// kernel's 32-bit form: 12 bits for the major number from the 8th on, 8 bits of the minor one below and 12 above.
pub(crate) fn special_kind(mode: u32, number: u32) -> Option<NodeKind> {
    let device = Device { major: number >> 8 & 0xfff, minor: number & 0xff | number >> 12 & 0xfff00 };
    match mode & libc::S_IFMT {
        libc::S_IFIFO => Some(NodeKind::Fifo),
        libc::S_IFSOCK => Some(NodeKind::Socket),
        libc::S_IFCHR => Some(NodeKind::Character(device)),
        libc::S_IFBLK => Some(NodeKind::Block(device)),
        _ => None,
    }
}

/// The number of a device in the same form; 0 for other nodes, and for devices whose number does not fit.
fn device_number(kind: NodeKind) -> u32 {
    match kind {
        NodeKind::Character(Device { major: major @ 0..=0xfff, minor: minor @ 0..=0xf_ffff })
        | NodeKind::Block(Device { major: major @ 0..=0xfff, minor: minor @ 0..=0xf_ffff }) => {
            minor & 0xff | major << 8 | (minor & !0xff) << 12
        }
        _ => 0,
    }
}

/// Attributes of inode `number` for the kernel.
pub(crate) fn file_attr(number: u64, attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: attr.size,
        blocks: attr.used_bytes.div_ceil(512),
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: SystemTime::UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: device_number(attr.kind),
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// A time from the wire; an invalid one becomes the epoch.
pub(crate) fn system_time(time: Time) -> SystemTime {
    let (secs, nanos) = (time.secs.unsigned_abs(), Duration::from_nanos(u64::from(time.nanos.min(999_999_999))));
    let whole = Duration::from_secs(secs);
    let moved = match time.secs {
        0.. => SystemTime::UNIX_EPOCH.checked_add(whole),
        _ => SystemTime::UNIX_EPOCH.checked_sub(whole),
    };
    moved.and_then(|moved| moved.checked_add(nanos)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// A time that a program sets, for the wire.
///
/// The kernel's seconds are rounded down and its nanoseconds count from there, before 1970 too. The FUSE library counts the
/// nanoseconds of a time before 1970 backwards (`fuser` 0.18, `system_time_from_time`): what reaches us is as many seconds
/// and nanoseconds *before* 1970. It is right about times after 1970, and about all that we send.
fn kernel_time(time: SystemTime) -> Time {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => Time { secs: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nanos: after.subsec_nanos() },
        Err(error) => {
            let before = error.duration();
            Time { secs: 0i64.saturating_sub_unsigned(before.as_secs()), nanos: before.subsec_nanos() }
        }
    }
}

/// A time to set, for the wire.
pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(at) => SetTime::At(kernel_time(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the FUSE library makes of the kernel's time.
    fn from_the_library(Time { secs, nanos }: Time) -> SystemTime {
        let distance = Duration::new(secs.unsigned_abs(), nanos);
        if secs >= 0 { SystemTime::UNIX_EPOCH + distance } else { SystemTime::UNIX_EPOCH - distance }
    }

    #[test]
    fn times_are_those_of_the_kernel() {
        for (secs, nanos) in [
            (0, 0),
            (0, 1),
            (1, 999_999_999),
            (1_700_000_000, 5),
            (-1, 1),
            (-1, 0),
            (-1, 999_999_999),
            (-86_400, 500),
            (1 << 33, 7),
        ] {
            let time = Time { secs, nanos };
            assert_eq!(kernel_time(from_the_library(time)), time);
            let shown = system_time(time);
            let (whole, part) = match shown.duration_since(SystemTime::UNIX_EPOCH) {
                Ok(after) => (i128::from(after.as_secs()), i128::from(after.subsec_nanos())),
                Err(before) => {
                    (-i128::from(before.duration().as_secs()), -i128::from(before.duration().subsec_nanos()))
                }
            };
            assert_eq!(whole * 1_000_000_000 + part, i128::from(secs) * 1_000_000_000 + i128::from(nanos));
        }
    }

    #[test]
    fn numbers_of_devices_go_there_and_back() {
        for (major, minor) in [(0, 0), (1, 3), (8, 255), (8, 256), (0xfff, 0xf_ffff), (259, 70_000)] {
            for (mode, kind) in
                [(libc::S_IFCHR, NodeKind::Character as fn(Device) -> NodeKind), (libc::S_IFBLK, NodeKind::Block)]
            {
                let kind = kind(Device { major, minor });
                assert_eq!(special_kind(mode | 0o644, device_number(kind)), Some(kind));
            }
        }
        assert_eq!(device_number(NodeKind::Block(Device { major: 8, minor: 1 })), 0x801);
        assert_eq!(device_number(NodeKind::Block(Device { major: 0x1000, minor: 1 })), 0, "of a foreign folder");
        for mode in [libc::S_IFREG, libc::S_IFDIR, libc::S_IFLNK, 0] {
            assert_eq!(special_kind(mode, 0), None);
        }
    }

    #[test]
    fn strange_times_do_no_harm() {
        for secs in [i64::MAX, i64::MIN] {
            system_time(Time { secs, nanos: u32::MAX });
            kernel_time(system_time(Time { secs, nanos: 0 }));
        }
    }

    #[test]
    fn permission_bits_keep_set_id_and_sticky_and_nothing_else() {
        let attr = Attr {
            ino: 9,
            kind: NodeKind::File,
            mode: 0o107_755,
            nlink: 1,
            uid: 3,
            gid: 4,
            size: 513,
            used_bytes: 1000,
            atime: Time::default(),
            mtime: Time { secs: 12, nanos: 34 },
            ctime: Time::default(),
            labelled: false,
        };
        let shown = file_attr(42, &attr);
        assert_eq!((shown.perm, shown.blocks, shown.ino.0), (0o7755, 2, 42));
        assert_eq!(shown.mtime, SystemTime::UNIX_EPOCH + Duration::new(12, 34));
    }
}
