//! Options of a mount.

use std::time::Duration;

/// Options of a mount; [`MountOptions::default`] suits most uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountOptions {
    /// Give access to other users than the one who mounts (permissions are checked). Needs root, or `user_allow_other`
    /// in `/etc/fuse.conf`.
    pub allow_other: bool,
    /// Refuse every change.
    pub read_only: bool,
    /// Threads that serve the kernel, 1 to 256, which is also the number of concurrent requests. `None`: four for each
    /// processor, at least 16, at most 64.
    pub threads: Option<usize>,
    /// How long the kernel may cache attributes and names. An open always sees what was written and closed before,
    /// whatever the value.
    pub cache_time: Duration,
    /// Bypass the page cache: every read and write of a program goes to the servers as it is, and several writers of
    /// one file run in parallel. For programs with large requests.
    pub direct_io: bool,
    /// Keep `fcntl` locks at the metadata server, for all nodes, where there is one. Otherwise the kernel keeps them, for the
    /// programs of this mount.
    pub shared_locks: bool,
    /// Largest read or write that the kernel sends, bytes, 4 KiB to 1 MiB.
    pub request_max_bytes: u32,
    /// How far the kernel reads ahead of a sequential reader, bytes. More than 128 KiB needs root.
    pub read_ahead_bytes: u32,
    /// The source shown by `df` and `/proc/mounts`, for example the configuration's path.
    pub source: String,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            allow_other: false,
            read_only: false,
            threads: None,
            cache_time: Duration::from_secs(1),
            direct_io: false,
            shared_locks: true,
            request_max_bytes: 1 << 20,
            read_ahead_bytes: 4 << 20,
            source: "impresario".to_owned(),
        }
    }
}

impl MountOptions {
    /// The resolved number of threads.
    pub(crate) fn thread_count(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
        self.threads.unwrap_or((cores * 4).clamp(16, 64)).clamp(1, 256)
    }

    /// The largest request, within the kernel's limits.
    pub(crate) fn request_bytes(&self) -> u32 {
        self.request_max_bytes.clamp(4096, 1 << 20)
    }

    /// The source without characters that would start another mount option.
    pub(crate) fn source_name(&self) -> String {
        self.source.chars().map(|c| if c == ',' || c == '\\' || c.is_control() { '_' } else { c }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_in_range() {
        let with = |threads, request_max_bytes| MountOptions { threads, request_max_bytes, ..Default::default() };
        assert_eq!((with(Some(0), 0).thread_count(), with(Some(9999), 0).thread_count()), (1, 256));
        assert!((16..=64).contains(&with(None, 0).thread_count()));
        assert_eq!((with(None, 0).request_bytes(), with(None, u32::MAX).request_bytes()), (4096, 1 << 20));
    }

    #[test]
    fn a_source_adds_no_mount_option() {
        let options = MountOptions { source: "/a b/x,suid\\,dev\n.toml".to_owned(), ..Default::default() };
        assert_eq!(options.source_name(), "/a b/x_suid__dev_.toml");
    }
}
