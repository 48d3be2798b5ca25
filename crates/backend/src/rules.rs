//! Rules of POSIX that backends apply themselves: names that may be asked for, exclusive creates, rights by mode.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use crate::{Attr, Caller, Errno, Kind, Result};

/// A name that comes and goes while it is being made is tried again so often.
pub(crate) const MAKE_TRIES: usize = 16;

/// A name that a system call takes.
pub(crate) fn checked(name: &[u8]) -> Result<&OsStr> {
    let bad = name.is_empty() || name.contains(&b'/') || name.contains(&0);
    if bad { Err(Errno(libc::EINVAL)) } else { Ok(OsStr::from_bytes(name)) }
}

/// The same, of a name that is to be made (`dots` is `EEXIST`) or removed (`EINVAL`).
pub(crate) fn proper(name: &[u8], dots: i32) -> Result<&OsStr> {
    if name == b"." || name == b".." { Err(Errno(dots)) } else { checked(name) }
}

/// The times that an exclusive create leaves in the file: the verifier, in numbers that every file system keeps. Linux's
/// own server does the same.
pub(crate) fn once_times(verifier: [u8; 8]) -> (SystemTime, SystemTime) {
    let half = |at: usize| u32::from_be_bytes(std::array::from_fn(|n| verifier[at + n])) & 0x7fff_ffff;
    let time = |secs: u32| SystemTime::UNIX_EPOCH + Duration::from_secs(secs.into());
    (time(half(0)), time(half(4)))
}

/// Kind of a node by its mode.
pub(crate) fn kind_of(mode: u32) -> Result<Kind> {
    Ok(match mode & libc::S_IFMT {
        libc::S_IFREG => Kind::File,
        libc::S_IFDIR => Kind::Directory,
        libc::S_IFLNK => Kind::Symlink,
        libc::S_IFBLK => Kind::Block,
        libc::S_IFCHR => Kind::Character,
        libc::S_IFIFO => Kind::Fifo,
        libc::S_IFSOCK => Kind::Socket,
        _ => return Err(Errno(libc::EIO)),
    })
}

/// Whether the caller has this right (`R_OK`, `W_OK`, `X_OK`) by owner, group and mode alone, where the file system
/// cannot be asked.
pub(crate) fn may_by_mode(caller: &Caller, attr: &Attr, right: i32) -> bool {
    let class = if caller.uid == attr.uid {
        6
    } else if caller.gid == attr.gid || caller.groups.contains(&attr.gid) {
        3
    } else {
        0
    };
    let everything = caller.uid == 0 && (right != libc::X_OK || attr.mode & 0o111 != 0);
    everything || attr.mode >> class & right as u32 == right as u32
}

/// The time of so many seconds, and nanoseconds from there on.
pub(crate) fn time_of(secs: i64, nanos: i64) -> SystemTime {
    let (whole, nanos) = (Duration::from_secs(secs.unsigned_abs()), Duration::from_nanos(nanos.unsigned_abs()));
    let whole =
        if secs < 0 { SystemTime::UNIX_EPOCH.checked_sub(whole) } else { SystemTime::UNIX_EPOCH.checked_add(whole) };
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The seconds of a time, rounded down, and nanoseconds from there on.
pub(crate) fn seconds_of(time: SystemTime) -> (i64, i64) {
    let secs = |since: Duration| i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => (secs(since), since.subsec_nanos().into()),
        Err(before) => match before.duration() {
            until if until.subsec_nanos() == 0 => (-secs(until), 0),
            until => (-secs(until) - 1, i64::from(1_000_000_000 - until.subsec_nanos())),
        },
    }
}
