//! Rules of POSIX that backends apply themselves: names and ranges that may be asked for, exclusive creates, what a new node
//! still lacks, which kinds replace which, rights by mode.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use impresario_base::set_id;

use crate::{Attr, Caller, Errno, Found, Kind, Make, Result, SetAttr, SetTime, Space};

/// A name that comes and goes while it is being made is tried again so often.
const MAKE_TRIES: usize = 16;

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
fn once_times(verifier: [u8; 8]) -> (SystemTime, SystemTime) {
    let half = |at: usize| u32::from_be_bytes(std::array::from_fn(|n| verifier[at + n])) & 0x7fff_ffff;
    let time = |secs: u32| SystemTime::UNIX_EPOCH + Duration::from_secs(secs.into());
    (time(half(0)), time(half(4)))
}

/// The attributes that a node is made with; after an exclusive create it [`bears`] the verifier.
pub(crate) fn wanted(what: Make<'_>, set: &SetAttr) -> SetAttr {
    let Make::FileOnce(verifier) = what else { return set.clone() };
    let (atime, mtime) = once_times(verifier);
    let (atime, mtime) = (Some(SetTime::To(atime)), Some(SetTime::To(mtime)));
    SetAttr { atime, mtime, mode: Some(0o600), ..SetAttr::default() }
}

/// Whether a file has the times that this exclusive create leaves in it.
pub(crate) fn bears(attr: &Attr, what: Make<'_>) -> bool {
    matches!(what, Make::FileOnce(verifier) if (attr.atime, attr.mtime) == once_times(verifier))
}

/// Makes a node or, where the name is taken, finds the one that is meant: any file, or after an exclusive create the empty
/// one that `is_same` knows again.
pub(crate) fn make_or_find(
    what: Make<'_>,
    make: impl Fn() -> Result<Found>,
    find: impl Fn() -> Result<Found>,
    is_same: impl Fn(&Found) -> Result<bool>,
) -> Result<Found> {
    let once = matches!(what, Make::FileOnce(_));
    for _ in 0..MAKE_TRIES {
        match make() {
            Err(Errno(libc::EEXIST)) if once || what == Make::FileIfNone => {}
            made => return made,
        }
        let found = match find() {
            Err(Errno(libc::ENOENT)) => continue,
            found => found?,
        };
        return match found.1.kind {
            Kind::File if !once || found.1.size_bytes == 0 && is_same(&found)? => Ok(found),
            Kind::Directory if !once => Err(Errno(libc::EISDIR)),
            _ => Err(Errno(libc::EEXIST)),
        };
    }
    Err(Errno(libc::EEXIST))
}

/// A range that no file can have is `EFBIG`.
pub(crate) fn check_range(offset: u64, len_bytes: u64) -> Result<()> {
    let end = offset.checked_add(len_bytes).filter(|end| i64::try_from(*end).is_ok());
    end.map(drop).ok_or(Errno(libc::EFBIG))
}

/// What a new node is, for a client library.
pub(crate) enum New<'a> {
    File,
    Directory,
    Symlink(&'a [u8]),
    /// Kind (`S_IFIFO` and so on) and device number.
    Special(u32, u64),
}

/// What is to be made; devices are for root alone, at which client libraries and their servers do not look.
pub(crate) fn new_node<'a>(caller: &Caller, what: Make<'a>) -> Result<New<'a>> {
    Ok(match what {
        Make::File | Make::FileIfNone | Make::FileOnce(_) => New::File,
        Make::Directory => New::Directory,
        Make::Symlink([]) => return Err(Errno(libc::ENOENT)),
        Make::Symlink(text) => New::Symlink(text),
        Make::Fifo => New::Special(libc::S_IFIFO, 0),
        Make::Socket => New::Special(libc::S_IFSOCK, 0),
        Make::Block(..) | Make::Character(..) if caller.uid != 0 => return Err(Errno(libc::EPERM)),
        Make::Block(major, minor) => New::Special(libc::S_IFBLK, libc::makedev(major, minor)),
        Make::Character(major, minor) => New::Special(libc::S_IFCHR, libc::makedev(major, minor)),
    })
}

/// Changes the mode of a node as `set` says, by `set_mode` and, see [`take_bits`], `at_once`, which need not check whether the caller may.
/// `attr` asks for its attributes.
pub(crate) fn change_mode(
    caller: &Caller,
    set: &SetAttr,
    attr: impl Fn() -> Result<Attr>,
    at_once: impl FnOnce() -> Result<()>,
    set_mode: impl FnOnce(u32) -> Result<()>,
) -> Result<()> {
    if set.takes == 0 {
        return set.mode.map_or(Ok(()), set_mode);
    }
    let left = || match attr()? {
        attr if attr.kind == Kind::File && set.mode.is_none() => Ok(set_id::without(attr.mode, set.takes)),
        _ => Err(Errno(libc::EINVAL)),
    };
    let at_once = || match set.takes & 0o6000 != 0 && (caller.uid == 0 || caller.uid == attr()?.uid) {
        true => at_once(),
        false => Err(Errno(libc::EPERM)),
    };
    take_bits(left, at_once, set_mode)
}

/// Takes permission bits of a file. `left` asks for its mode, and says what of it is left without them; `None`: it has none of them.
/// `at_once` has the server take set-user-id and set-group-id in one step, so that rights that the owner sets at this moment stay, and
/// may fail or take less: what it leaves is taken by setting what is left.
pub(crate) fn take_bits(
    left: impl Fn() -> Result<Option<u32>>,
    at_once: impl FnOnce() -> Result<()>,
    set_mode: impl FnOnce(u32) -> Result<()>,
) -> Result<()> {
    let Some(mut mode) = left()? else { return Ok(()) };
    // Not where one of them stays: servers take both.
    if mode & 0o6000 == 0 {
        let _ = at_once(); // what comes of it is looked at
        let Some(now) = left()? else { return Ok(()) };
        mode = now;
    }
    set_mode(mode)
}

/// The mode that a file has before this caller changes its bytes, where it loses set-user-id or set-group-id by that.
pub(crate) fn mode_for_writer(caller: &Caller, attr: &Attr) -> Option<u32> {
    let by_member = || caller.gid == attr.gid || caller.groups.contains(&attr.gid);
    let taken = if caller.uid == 0 { 0 } else { set_id::taken(attr.mode, by_member) };
    set_id::without(attr.mode, taken)
}

/// What of `set` the making of a node with `mode` did not give it; the default if nothing.
pub(crate) fn lacking(attr: &Attr, mode: u32, set: &SetAttr) -> SetAttr {
    let (uid, gid) = (set.uid.filter(|uid| *uid != attr.uid), set.gid.filter(|gid| *gid != attr.gid));
    // A change of the owner takes set-user and set-group.
    let taken = (uid.is_some() || gid.is_some()) && mode & 0o6000 != 0;
    let lacks = attr.kind != Kind::Symlink && (attr.mode & mode != mode || attr.mode & 0o777 != mode & 0o777);
    SetAttr {
        mode: (lacks || taken).then_some(mode),
        takes: 0,
        uid,
        gid,
        size_bytes: set.size_bytes.filter(|size| *size != 0 && attr.kind == Kind::File),
        ..set.clone()
    }
}

/// Whether a node may be removed by the call for directories, or by the one for all others.
pub(crate) fn check_removal(kind: Kind, directory: bool) -> Result<()> {
    match (kind == Kind::Directory, directory) {
        (true, false) => Err(Errno(libc::EISDIR)),
        (false, true) => Err(Errno(libc::ENOTDIR)),
        _ => Ok(()),
    }
}

/// Whether a node may take another's name.
pub(crate) fn check_replacement(moved: Kind, there: Kind) -> Result<()> {
    match (moved == Kind::Directory, there == Kind::Directory) {
        (true, false) => Err(Errno(libc::ENOTDIR)),
        (false, true) => Err(Errno(libc::EISDIR)),
        _ => Ok(()),
    }
}

/// The number of a node that goes with one more of its names; `None` if it has others.
pub(crate) fn goes_with_a_name(attr: &Attr) -> Option<u64> {
    (attr.kind == Kind::Directory || attr.links == 1).then_some(attr.fileid)
}

/// Space as a client library tells it.
pub(crate) fn space_of(space: &libc::statvfs, links_max: u32) -> Space {
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    Space {
        total_bytes: bytes(space.f_blocks),
        free_bytes: bytes(space.f_bfree),
        available_bytes: bytes(space.f_bavail),
        total_files: space.f_files,
        free_files: space.f_ffree,
        name_max_bytes: u32::try_from(space.f_namemax).unwrap_or(u32::MAX),
        links_max,
    }
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
