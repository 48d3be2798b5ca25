//! What Linux tells a process of its machine and of itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The name of this machine.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// The way to what a descriptor is open on that follows no name.
pub fn path_of(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// The type of ext4 (and of ext2 and ext3), as statfs(2) tells it.
pub const EXT4_MAGIC: u64 = 0xef53;
/// The type of XFS.
pub const XFS_MAGIC: u64 = 0x5846_5342;
/// The type of overlayfs.
pub const OVERLAY_MAGIC: u64 = 0x794c_7630;
/// The type of tmpfs.
pub const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Whether a file system of this type, as statfs(2) tells it, is in memory: tmpfs or ramfs.
pub fn is_in_memory(f_type: u64) -> bool {
    // Where the kernel's word is a signed one, the upper half is its sign.
    matches!(f_type & 0xffff_ffff, TMPFS_MAGIC | 0x8584_58f6)
}

/// How many files a process may have open; `None`: as many as it likes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileLimit {
    /// Before it was raised: what programs started from here should have.
    pub before: Option<u64>,
    /// Now.
    pub now: Option<u64>,
}

/// Lets this process have as many open files as the system allows, and `wanted` of them where it may allow that itself. A limit that
/// cannot be changed stays.
pub fn raise_file_limit(wanted: u64) -> FileLimit {
    let limited = |limit: libc::rlim_t| (limit != libc::RLIM_INFINITY).then_some(limit);
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a place for the limits.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let before = limited(limit.rlim_cur);
    for maximum in [limit.rlim_max.max(wanted), limit.rlim_max] {
        let raised = libc::rlimit { rlim_cur: maximum, rlim_max: maximum };
        // SAFETY: limits to be read.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
            return FileLimit { before, now: limited(maximum) };
        }
    }
    FileLimit { before, now: before }
}

/// Makes a write beyond the limit of the sizes of files (`ulimit -f`) an error, EFBIG, where it would end the process. Programs that
/// are executed from here inherit that.
pub fn survive_file_size_limit() {
    // SAFETY: ignoring a signal runs no code in a handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// The signals that end a program in order: SIGINT, SIGTERM, and SIGHUP unless the program was started to ignore it, as by
/// `nohup`. To be asked before a handler is set.
pub fn ending_signals() -> Vec<i32> {
    let mut signals = vec![libc::SIGINT, libc::SIGTERM];
    if !is_ignored(libc::SIGHUP) {
        signals.push(libc::SIGHUP);
    }
    signals
}

/// Whether this process ignores a signal, which programs that it starts would do as well. To be asked before a handler is set.
pub fn is_ignored(signal: i32) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action the call only writes the present one to its place, of which all bytes are set before.
    let found = unsafe {
        libc::sigaction(signal, std::ptr::null(), found.as_mut_ptr());
        found.assume_init()
    };
    found.sa_sigaction == libc::SIG_IGN
}

/// Random bytes that nobody can foresee.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(format!("the system gives no random numbers: {error}")),
    })?;
    Ok(bytes)
}

/// A random number that nobody can foresee; never 0.
pub fn random_number() -> io::Result<u64> {
    random_bytes().map(|bytes| u64::from_le_bytes(bytes).max(1))
}

/// A number of the machine's present boot, drawn from the kernel's `boot_id`.
pub fn boot() -> io::Result<u64> {
    std::fs::read("/proc/sys/kernel/random/boot_id").map(|id| crate::fnv::hash(&id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_was_raised_is_not_raised_again() {
        let first = raise_file_limit(0);
        assert!(first.now.is_none() || first.now >= first.before);
        assert_eq!(raise_file_limit(0), FileLimit { before: first.now, now: first.now });
    }

    #[test]
    fn what_is_ignored_ends_nothing() {
        let signals = ending_signals();
        assert_eq!(signals[..2], [libc::SIGINT, libc::SIGTERM]);
        assert_ne!(signals.contains(&libc::SIGHUP), is_ignored(libc::SIGHUP), "{signals:?}");
        // What Rust ignores from the start of each program.
        assert!(is_ignored(libc::SIGPIPE) && !is_ignored(libc::SIGTERM) && !is_ignored(-1));
    }

    #[test]
    fn the_machine_tells() {
        assert!(!host_name().is_empty() && !host_name().contains('\n'));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let seen = std::fs::read_link(path_of(&file)).unwrap();
        assert_eq!(seen, std::env::current_exe().unwrap());
        assert!(is_in_memory(0x0102_1994) && is_in_memory(0x8584_58f6_u32 as i32 as u64) && !is_in_memory(0xef53));
        assert_ne!(random_number().unwrap(), random_number().unwrap());
    }
}
