//! Attributes: what statx(2) says in the contract's terms, and changes of them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::SystemTime;

use impresario_base::machine::path_of;
use impresario_base::set_id;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
};

use super::{Node, Shared};
use crate::rules::{kind_of, may_by_mode, seconds_of};
use crate::{Attr, Caller, Errno, Kind, Result, SetAttr, SetTime};

pub(super) fn attr_of(stat: &Statx, fsid: u64) -> Result<Attr> {
    Ok(Attr {
        kind: kind_of(stat.stx_mode.into())?,
        mode: u32::from(stat.stx_mode) & 0o7777,
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size_bytes: stat.stx_size,
        used_bytes: stat.stx_blocks.saturating_mul(512),
        device: (stat.stx_rdev_major, stat.stx_rdev_minor),
        fsid,
        fileid: stat.stx_ino,
        atime: time_of(&stat.stx_atime),
        mtime: time_of(&stat.stx_mtime),
        ctime: time_of(&stat.stx_ctime),
    })
}

fn time_of(time: &StatxTimestamp) -> SystemTime {
    crate::rules::time_of(time.tv_sec, time.tv_nsec.into())
}

fn timespec_of(set: Option<SetTime>) -> Timespec {
    let time = match set {
        None => return Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => return Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::To(time)) => time,
    };
    let (tv_sec, tv_nsec) = seconds_of(time);
    Timespec { tv_sec, tv_nsec }
}

/// Whether the thread, as it is to the file system now, has this right (`R_OK`, `W_OK`, `X_OK`). Not what access(2)
/// says, which is the right of the process's real user.
pub(super) fn may(node: BorrowedFd<'_>, right: i32) -> Result<()> {
    let flags = libc::AT_EACCESS | libc::AT_EMPTY_PATH;
    // SAFETY: the path is an empty C string, the rest are numbers.
    let answer = unsafe { libc::syscall(libc::SYS_faccessat2, node.as_raw_fd(), c"".as_ptr(), right, flags) };
    if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

impl Shared {
    /// Which of the rights the caller has.
    pub(super) fn rights(&self, caller: &Caller, node: &Node, wanted: u32) -> Result<u32> {
        let acting = self.identity.act_as(caller)?;
        let mut granted = 0;
        for right in [libc::R_OK, libc::W_OK, libc::X_OK] {
            let may = match may(node.fd.as_fd(), right) {
                Err(Errno(libc::ENOSYS)) => may_by_mode(caller, &self.see(node.fd.as_fd())?.attr, right),
                Err(Errno(libc::ESTALE)) => return Err(Errno(libc::ESTALE)),
                may => may.is_ok(),
            };
            if may && wanted & right as u32 != 0 {
                granted |= right as u32;
            }
        }
        drop(acting);
        Ok(granted)
    }

    /// Changes attributes as the caller. First what is most likely to be refused, last the times, which the others change.
    pub(super) fn change(&self, caller: &Caller, node: &Node, set: &SetAttr) -> Result<()> {
        let path = path_of(&node.fd);
        let rights = set.uid.is_some() || set.gid.is_some() || set.mode.is_some() || set.takes != 0;
        if set.takes != 0 && (set.mode.is_some() || node.kind != Kind::File) {
            return Err(Errno(libc::EINVAL));
        }
        if rights {
            let _acting = self.identity.act_as(caller)?;
            if set.uid.is_some() || set.gid.is_some() {
                let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
                if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
                    return Err(Errno(libc::EINVAL)); // chown(2) takes it for "as it is"
                }
                rustix::fs::chownat(&node.fd, "", uid, gid, AtFlags::EMPTY_PATH)?;
            }
            if let Some(mode) = set.mode {
                rustix::fs::chmodat(CWD, &path, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())?;
            }
            if set.takes != 0 {
                let mode = || -> Result<u32> {
                    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                    Ok(rustix::fs::statx(&node.fd, "", how, StatxFlags::MODE)?.stx_mode.into())
                };
                let seen = mode()?;
                if seen & set.takes != 0 {
                    // The kernel must take no others.
                    let at_once = set_id::taken(seen, || true) & !set.takes == 0;
                    take_bits(node.fd.as_fd(), at_once, || Ok(set_id::without(mode()?, set.takes)))?;
                }
            }
        }
        if rights {
            // Who has the file open must have the rights that it gives now.
            self.nodes.close_opens(node);
        }
        if let Some(size_bytes) = set.size_bytes {
            self.truncate(caller, node, size_bytes)?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let _acting = self.identity.act_as(caller)?;
            let times = Timestamps { last_access: timespec_of(set.atime), last_modification: timespec_of(set.mtime) };
            rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())?;
        }
        Ok(())
    }
}

/// Takes permission bits of a file. `left`: what of its mode is left without them, as its server says now; `None`: it has none of
/// them. `at_once`: they are at least the set-id bits that a write takes.
pub(super) fn take_bits(fd: BorrowedFd<'_>, at_once: bool, left: impl FnOnce() -> Result<Option<u32>>) -> Result<()> {
    if at_once {
        // A change of the owner that changes none has the kernel take them in one step, so that rights that the owner sets at this
        // moment stay. Other servers do nothing then, and a set-group-id without execution by the group stays for privileged ones.
        let _ = rustix::fs::chownat(fd, "", None, None, AtFlags::EMPTY_PATH); // what comes of it is looked at
    }
    let Some(mode) = left()? else { return Ok(()) };
    Ok(rustix::fs::chmodat(CWD, path_of(fd), Mode::from_raw_mode(mode), AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_were_set() {
        for (tv_sec, tv_nsec) in [(0, 0), (1, 999_999_999), (-1, 0), (-1, 1), (-5, 999_999_999), (1 << 33, 7)] {
            let mut stamp = zero();
            (stamp.tv_sec, stamp.tv_nsec) = (tv_sec, tv_nsec);
            let back = timespec_of(Some(SetTime::To(time_of(&stamp))));
            assert_eq!((back.tv_sec, back.tv_nsec), (tv_sec, tv_nsec.into()));
        }
    }

    fn zero() -> StatxTimestamp {
        // SAFETY: the structure is plain numbers.
        unsafe { std::mem::zeroed() }
    }
}
