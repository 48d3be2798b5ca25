//! The metadata server's directory: its contents, its creation, check and claim at start, and file keys.
//!
//! ```text
//! format    version, identity of the keys, cluster; written last when the directory is created
//! stores    the folders of the cluster's data servers
//! keys      file keys below this count may be in use
//! labels    there may be access control lists, or attributes `security.*`
//! changes   changes of the name space that were done, for their clients that ask again
//! lock      held while a server runs here
//! lockers/  <client>-<lease>: a client that has locks of byte ranges
//! names/    the name space
//! writers/  <key>: another name of a file whose objects may be newer
//! orphans/  <key>: another name of a file that lost its last name in the name space
//! staging/  directories and links on their way into the name space; emptied at start
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use impresario_base::lock::Mutex;
use impresario_base::machine::random_bytes;
use impresario_base::presence::Presence;
use impresario_store::Claim;
use impresario_wire::message::{ClusterId, FileKey};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, XattrFlags};
use rustix::io::Errno;

use super::disk::{Disk, PATH_FLAGS, StepHook};

const FORMAT: u32 = 2;
/// The file that is locked by who makes the directory, or serves it; the first in it.
pub(crate) const LOCK: &str = "lock";
/// Keys are reserved on disk in blocks of this many.
const KEYS_PER_RESERVATION: u64 = 1 << 16;
/// Keys that files may have had after the last one of which a data server has an object.
pub(crate) const KEYS_WITHOUT_OBJECTS: u64 = 1 << 24;
/// A key is the directory's identity, shifted left by this many bits, plus a count.
pub const COUNT_BITS: u32 = impresario_store::COUNT_BITS;
const MEMBERS: [&str; 19] = [
    "changes",
    "changes.new",
    "emptied",
    "emptied.new",
    "format",
    "keys",
    "keys.new",
    "labels",
    "labels.new",
    "lock",
    "lockers",
    "names",
    "order",
    "order.new",
    "writers",
    "orphans",
    "staging",
    "stores",
    "stores.new",
];

/// Why the metadata server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The directory cannot be created, read or written.
    #[error(
        "the metadata directory {dir} cannot be used: {what}: {source}; give [meta] dir a directory that this user can write"
    )]
    Unusable {
        /// The directory.
        dir: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The directory belongs to something else.
    #[error(
        "the metadata directory {dir} is not empty and is not a metadata directory (it has {found}); give [meta] dir an empty \
         one and make it with `impresario store init`"
    )]
    Foreign {
        /// The directory.
        dir: PathBuf,
        /// A name found in it.
        found: String,
    },
    /// The directory is missing or holds nothing.
    #[error(
        "the metadata directory {dir} is empty: it was not made for a cluster; mount its disk or correct [meta] dir; for a new \
         cluster make it with `impresario store init`"
    )]
    Blank {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory was made by a version without the identity of the cluster.
    #[error(
        "the metadata directory {dir} was made by an older version and does not say of which cluster it is; give it an \
         identity with `impresario store adopt`"
    )]
    Older {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory was made for a cluster already.
    #[error("the metadata directory {dir} is that of cluster {cluster}; name another one")]
    Made {
        /// The directory.
        dir: PathBuf,
        /// The cluster.
        cluster: ClusterId,
    },
    /// Another server uses it.
    #[error(
        "the metadata directory {dir} is in use by another server; stop that one, or give [meta] dir another directory"
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
    },
    /// A file of the directory has unexpected content.
    #[error(
        "{file} says {found:?}; this program understands {wanted}; use the program that made the directory, or restore the file"
    )]
    Unknown {
        /// The file.
        file: PathBuf,
        /// Its content, truncated.
        found: String,
        /// What this program understands.
        wanted: &'static str,
    },
    /// The count of issued keys is damaged.
    #[error(
        "{file} says {found:?}, which is no count of issued keys: it is damaged; `impresario fsck --repair` counts them anew"
    )]
    Keys {
        /// The file.
        file: PathBuf,
        /// Its content, truncated.
        found: String,
    },
    /// The file system or the kernel lacks a feature.
    #[error("the metadata directory {dir} cannot be used: {what} ({source}); {remedy}")]
    Lacking {
        /// The directory.
        dir: PathBuf,
        /// The missing feature.
        what: &'static str,
        /// The error that showed it.
        source: io::Error,
        /// The remedy.
        remedy: &'static str,
    },
    /// The default striping is impossible.
    #[error("the default striping cannot be: {0}")]
    Striping(#[from] impresario_layout::LayoutError),
}

/// The directory, open and claimed.
pub(super) struct MetaDirectory {
    pub(super) dir: PathBuf,
    pub(super) disk: Disk,
    pub(super) names: OwnedFd,
    pub(super) writers: OwnedFd,
    pub(super) orphans: OwnedFd,
    pub(super) staging: OwnedFd,
    pub(super) top: OwnedFd,
    presence: Presence,
    /// Holds the claim.
    _lock: Claim,
    /// What keys begin with.
    pub(super) identity: u64,
    keys: Mutex<Keys>,
    /// The count of issued keys cannot be read; none are given.
    pub(super) are_keys_damaged: bool,
}

/// Counts for new keys: from `next` up to but not including `end`.
struct Keys {
    next: u64,
    end: u64,
}

impl MetaDirectory {
    /// Whether somebody has removed it: what it says then says nothing.
    pub(super) fn is_removed(&self) -> bool {
        self.presence.is_over(&self.names)
    }

    /// Claims the directory, which must have been made ([`make`]), for a server.
    pub(super) fn open(dir: &Path, hook: Option<StepHook>) -> Result<MetaDirectory, StartError> {
        let unusable = |what| move |errno: Errno| unusable(dir, what, errno);
        let directory = MetaDirectory::claimed(dir, hook, false)?;
        keep_private(dir, &directory.top).map_err(unusable("it cannot be kept from other users"))?;
        directory.clear_staging().map_err(unusable("its directory `staging` cannot be emptied"))?;
        directory.probe()?;
        Ok(directory)
    }

    /// Claims the directory for a check, and changes nothing in it. A damaged count of keys is for the check to see.
    pub(super) fn open_idle(dir: &Path) -> Result<MetaDirectory, StartError> {
        MetaDirectory::claimed(dir, None, true)
    }

    fn claimed(dir: &Path, hook: Option<StepHook>, is_checked: bool) -> Result<MetaDirectory, StartError> {
        let unusable = |what| move |errno: Errno| unusable(dir, what, errno);
        let identity = match look(dir)? {
            Format::Blank => return Err(StartError::Blank { dir: dir.into() }),
            Format::Older { .. } => return Err(StartError::Older { dir: dir.into() }),
            Format::Made { identity, .. } => identity,
        };
        let top = open_dir_at(CWD, dir).map_err(unusable("it cannot be opened"))?;
        let claim = claim(dir, &top)?;
        let disk = Disk::new(&top, hook).map_err(unusable("its file system cannot be asked"))?;
        let member = |name: &str| open_dir_at(&top, name);
        let (count, are_keys_damaged) = match first_count(dir, &top) {
            Err(StartError::Keys { .. }) if is_checked => (0, true),
            count => (count?, false),
        };
        let names = member("names").map_err(unusable("its directory `names` cannot be opened"))?;
        Ok(MetaDirectory {
            presence: Presence::of(&names),
            names,
            writers: member("writers").map_err(unusable("its directory `writers` cannot be opened"))?,
            orphans: member("orphans").map_err(unusable("its directory `orphans` cannot be opened"))?,
            staging: member("staging").map_err(unusable("its directory `staging` cannot be opened"))?,
            // What was reserved earlier counts as used. Nothing is reserved until the first file is created.
            keys: Mutex::new(Keys { next: count, end: count }),
            are_keys_damaged,
            dir: dir.into(),
            disk,
            top,
            _lock: claim,
            identity,
        })
    }

    /// A key that no file ever had. Data servers may have objects of those with a count below `from`.
    pub(super) fn new_key(&self, from: u64) -> rustix::io::Result<FileKey> {
        let mut keys = self.keys.lock();
        if keys.next < from {
            let (given, dir) = (keys.next, self.dir.display());
            tracing::warn!(
                %dir,
                given,
                from,
                "the metadata folder is older than objects of the data servers, as one that was restored from a copy is; new \
                 files get keys behind theirs. `impresario fsck` finds what was lost"
            );
            keys.next = from + KEYS_WITHOUT_OBJECTS;
        }
        if keys.next >= keys.end {
            // In the steps in which data servers note what they have.
            let end = (keys.next / KEYS_PER_RESERVATION + 1) * KEYS_PER_RESERVATION;
            if end >> COUNT_BITS != 0 {
                return Err(Errno::NOSPC);
            }
            self.disk.write_durably(&self.top, "keys", &format!("{end}\n"))?;
            keys.end = end;
        }
        let count = keys.next;
        keys.next += 1;
        Ok(FileKey(self.identity << COUNT_BITS | count))
    }

    /// Counts of keys that were issued, or may have been.
    pub(super) fn keys_issued(&self) -> u64 {
        self.keys.lock().end
    }

    /// Counts at least so many as issued.
    pub(super) fn count_keys(&self, issued: u64) -> rustix::io::Result<()> {
        let mut keys = self.keys.lock();
        let end = keys.end.max(issued);
        if end >> COUNT_BITS != 0 {
            return Err(Errno::NOSPC);
        }
        self.disk.write_durably(&self.top, "keys", &format!("{end}\n"))?;
        *keys = Keys { next: end, end };
        Ok(())
    }

    fn clear_staging(&self) -> rustix::io::Result<()> {
        for name in names_in(&self.staging)? {
            let name = name?;
            if self.disk.unlink(&self.staging, &name) == Err(Errno::ISDIR) {
                self.disk.remove_dir(&self.staging, &name)?;
            }
        }
        Ok(())
    }

    /// Tries every needed feature, so that a missing one shows at start and not in the middle of a create. A full disk is no
    /// reason not to start: names can still be read and removed.
    fn probe(&self) -> Result<(), StartError> {
        match self.try_features() {
            Err(StartError::Lacking { source, .. })
                if matches!(Errno::from_io_error(&source), Some(Errno::NOSPC | Errno::DQUOT)) =>
            {
                let dir = self.dir.display();
                tracing::warn!(%dir, "the metadata directory has no space or no inodes left; nothing can be created in it");
                let _ = self.clear_staging(); // the next start does it
                Ok(())
            }
            tried => tried,
        }
    }

    fn try_features(&self) -> Result<(), StartError> {
        let lacking = |what, remedy| {
            move |errno: Errno| StartError::Lacking { dir: self.dir.clone(), what, source: errno.into(), remedy }
        };
        let write = "give [meta] dir a directory on a writable local file system with free space";
        let file =
            self.disk.make_file(&self.staging, "probe").map_err(lacking("no file can be created in it", write))?;
        rustix::fs::fsetxattr(&file, "user.impresario.probe", b"1", XattrFlags::empty()).map_err(lacking(
            "its file system keeps no user extended attributes",
            "use ext4, XFS or btrfs, or tmpfs from Linux 6.6 on",
        ))?;
        rustix::fs::openat2(&self.staging, "probe", PATH_FLAGS, Mode::empty(), BENEATH)
            .map_err(lacking("the kernel lacks openat2", "use Linux 5.10 or later"))?;
        self.disk
            .link_open(&file, &self.staging, "probe.2")
            .map_err(lacking("no second name can be given to a file", "use a local file system, and mount /proc"))?;
        let (from, to) = (b"probe", b"probe.3");
        self.disk
            .rename(&self.staging, from, &self.staging, to, true)
            .map_err(lacking("it lacks renameat2 with RENAME_NOREPLACE", "use ext4, XFS, btrfs or tmpfs"))?;
        self.clear_staging().map_err(lacking("no file can be removed from it", write))
    }
}

/// Path resolution stays within the directory and follows no symbolic link.
pub(super) const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// The name of a file in `writers/` and `orphans/`.
pub(super) fn key_name(key: FileKey) -> String {
    format!("{:016x}", key.0)
}

/// The key that a name in `writers/` or `orphans/` encodes.
pub(super) fn key_of(name: &[u8]) -> Option<FileKey> {
    let text = std::str::from_utf8(name).ok().filter(|text| text.len() == 16)?;
    u64::from_str_radix(text, 16).ok().map(FileKey).filter(|key| key_name(*key).as_bytes() == name)
}

/// The names in a directory, unordered, without `.` and `..`.
pub(super) fn names_in(directory: impl AsFd) -> rustix::io::Result<impl Iterator<Item = rustix::io::Result<Vec<u8>>>> {
    let entries = rustix::fs::Dir::read_from(directory)?;
    Ok(entries.filter_map(|entry| match entry {
        Ok(entry) => {
            let name = entry.file_name().to_bytes();
            (name != b"." && name != b"..").then(|| Ok(name.to_vec()))
        }
        Err(errno) => Some(Err(errno)),
    }))
}

pub(super) fn open_dir_at(at: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(at, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Reads a small text file of the directory; `None` if it is missing.
fn read_file(top: &OwnedFd, name: &str) -> rustix::io::Result<Option<String>> {
    read_text(top, name, 256)
}

/// The same, of up to `max` bytes.
pub(super) fn read_text(top: &OwnedFd, name: &str, max: usize) -> rustix::io::Result<Option<String>> {
    let file = match rustix::fs::openat(top, name, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        other => other?,
    };
    let mut bytes = vec![0; max];
    let len = rustix::io::read(file, &mut bytes[..])?;
    Ok(Some(String::from_utf8_lossy(bytes.get(..len).unwrap_or_default()).into_owned()))
}

/// Replaces a small file as a whole and makes it durable.
pub(super) fn write_durably(top: &OwnedFd, name: &str, text: &str) -> rustix::io::Result<()> {
    Disk::new(top, None)?.write_durably(top, name, text)
}

/// A directory without `format` must be empty, or left by an interrupted first start. It may be the root of a file system.
fn refuse_foreign(dir: &Path, top: &OwnedFd) -> Result<(), StartError> {
    let unusable =
        |errno: Errno| StartError::Unusable { dir: dir.into(), what: "it cannot be listed", source: errno.into() };
    for name in names_in(top).map_err(unusable)? {
        let name = name.map_err(unusable)?;
        let ours = MEMBERS.iter().any(|member| member.as_bytes() == name)
            || matches!(&name[..], b"format.new" | b"lost+found");
        let fresh = name != b"names"
            || open_dir_at(top, "names").and_then(|names| Ok(names_in(names)?.next().is_none())).map_err(unusable)?;
        if !ours || !fresh {
            return Err(StartError::Foreign { dir: dir.into(), found: super::fault::show(&name) });
        }
    }
    Ok(())
}

fn claim(dir: &Path, top: &OwnedFd) -> Result<Claim, StartError> {
    let unusable =
        |errno: Errno| StartError::Unusable { dir: dir.into(), what: "it cannot be written", source: errno.into() };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(top, LOCK, flags, Mode::RUSR | Mode::WUSR).map_err(unusable)?;
    Claim::take(file).map_err(|errno| match errno {
        Errno::WOULDBLOCK => StartError::InUse { dir: dir.into() },
        errno => unusable(errno),
    })
}

/// What the file `format` says.
enum Format {
    /// The directory is missing or empty, or its making was interrupted.
    Blank,
    /// Version 1, without a cluster.
    Older {
        identity: u64,
    },
    Made {
        identity: u64,
        cluster: ClusterId,
    },
}

/// What a metadata directory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FolderState {
    /// There is none, or it is empty, or its making was interrupted.
    Blank,
    /// Of a version without the identity of the cluster.
    Older,
    /// Made for a cluster.
    Made(ClusterId),
}

/// Finds out what a directory is, and changes nothing. An error is a directory of something else.
pub fn examine(dir: &Path) -> Result<FolderState, StartError> {
    Ok(match look(dir)? {
        Format::Blank => FolderState::Blank,
        Format::Older { .. } => FolderState::Older,
        Format::Made { cluster, .. } => FolderState::Made(cluster),
    })
}

/// The number that the keys of this directory's files begin with: their upper 24 bits.
pub fn key_prefix(dir: &Path) -> Result<u64, StartError> {
    match look(dir)? {
        Format::Blank => Err(StartError::Blank { dir: dir.into() }),
        Format::Older { identity } | Format::Made { identity, .. } => Ok(identity),
    }
}

/// The cluster that a directory was made for.
pub(super) fn read_format(dir: &Path) -> Result<ClusterId, StartError> {
    match look(dir)? {
        Format::Blank => Err(StartError::Blank { dir: dir.into() }),
        Format::Older { .. } => Err(StartError::Older { dir: dir.into() }),
        Format::Made { cluster, .. } => Ok(cluster),
    }
}

/// Makes a missing or empty directory, or one whose making was interrupted, the metadata directory of a cluster whose data
/// servers have these folders.
pub fn make(dir: &Path, cluster: ClusterId, stores: &BTreeMap<String, u64>) -> Result<(), StartError> {
    // Before the claim, which leaves a file.
    refuse_made(dir)?;
    Claimed::take(dir)?.make(cluster, stores)
}

fn refuse_made(dir: &Path) -> Result<(), StartError> {
    match look(dir)? {
        Format::Blank => Ok(()),
        Format::Older { .. } => Err(StartError::Older { dir: dir.into() }),
        Format::Made { cluster, .. } => Err(StartError::Made { dir: dir.into(), cluster }),
    }
}

/// Whether somebody has begun to make a directory the metadata directory of a cluster, or has made it.
pub fn is_begun(dir: &Path) -> bool {
    dir.join(LOCK).exists()
}

/// A directory that this process alone may make the metadata directory of a cluster, until the value is dropped.
pub struct Claimed {
    dir: PathBuf,
    top: OwnedFd,
    _claim: Claim,
}

impl Claimed {
    /// Claims a directory, which is created where it is missing. Within 2 s, else [`StartError::InUse`].
    pub fn take(dir: &Path) -> Result<Claimed, StartError> {
        let what = "it cannot be created";
        std::fs::create_dir_all(dir).map_err(|source| StartError::Unusable { dir: dir.into(), what, source })?;
        let top = open_dir_at(CWD, dir).map_err(|errno| unusable(dir, "it cannot be opened", errno))?;
        let claim = claim(dir, &top)?;
        Ok(Claimed { dir: dir.into(), top, _claim: claim })
    }

    /// Makes it the metadata directory of a cluster whose data servers have these folders. [`StartError::Made`] if it is one.
    pub fn make(&self, cluster: ClusterId, stores: &BTreeMap<String, u64>) -> Result<(), StartError> {
        // Another process may have made it just before this one claimed it.
        refuse_made(&self.dir)?;
        let made = keep_private(&self.dir, &self.top).and_then(|()| found(&self.top, cluster, stores));
        made.map_err(|errno| unusable(&self.dir, "it cannot be written", errno))
    }
}

/// Gives a directory of an older version an identity. Names and files stay as they are.
pub fn adopt(dir: &Path, cluster: ClusterId, stores: &BTreeMap<String, u64>) -> Result<(), StartError> {
    let identity = match look(dir)? {
        Format::Blank => return Err(StartError::Blank { dir: dir.into() }),
        Format::Older { identity } => identity,
        Format::Made { cluster, .. } => return Err(StartError::Made { dir: dir.into(), cluster }),
    };
    let top = open_dir_at(CWD, dir).map_err(|errno| unusable(dir, "it cannot be opened", errno))?;
    let _claim = claim(dir, &top)?;
    let written = write_durably(&top, super::stores::FILE, &super::stores::text_of(stores))
        .and_then(|()| write_durably(&top, "format", &format_text(identity, cluster)));
    written.map_err(|errno| unusable(dir, "it cannot be written", errno))
}

pub(super) fn unusable(dir: &Path, what: &'static str, errno: Errno) -> StartError {
    StartError::Unusable { dir: dir.into(), what, source: errno.into() }
}

fn look(dir: &Path) -> Result<Format, StartError> {
    let top = match open_dir_at(CWD, dir) {
        Err(Errno::NOENT) => return Ok(Format::Blank),
        other => other.map_err(|errno| unusable(dir, "it cannot be opened", errno))?,
    };
    match read_file(&top, "format").map_err(|errno| unusable(dir, "its file `format` cannot be read", errno))? {
        Some(text) => parse_format(dir, &text),
        None => refuse_foreign(dir, &top).map(|()| Format::Blank),
    }
}

/// Names below the directory have their users' owners and modes: a local user must not reach them past the server, nor the
/// attributes in which it keeps its records.
fn keep_private(dir: &Path, top: &OwnedFd) -> rustix::io::Result<()> {
    let mode = rustix::fs::fstat(top)?.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        tracing::info!(dir = %dir.display(), "other users of this machine may not enter the metadata directory any more");
        rustix::fs::fchmod(top, Mode::from_raw_mode(mode & !0o077))?;
    }
    Ok(())
}

fn format_text(identity: u64, cluster: ClusterId) -> String {
    format!("impresario-meta {FORMAT} {identity:06x} {cluster}\n")
}

/// Creates the contents of a new directory; `format` last, as the sign that it is complete.
fn found(top: &OwnedFd, cluster: ClusterId, stores: &BTreeMap<String, u64>) -> rustix::io::Result<()> {
    for (name, mode) in [("names", 0o755), ("writers", 0o700), ("orphans", 0o700), ("staging", 0o700)] {
        match rustix::fs::mkdirat(top, name, Mode::RWXU) {
            Err(Errno::EXIST) => {}
            other => other?,
        }
        rustix::fs::fchmod(open_dir_at(top, name)?, Mode::from_raw_mode(mode))?;
    }
    // Above the count, keys carry a random number of this directory, so that data servers with leftover objects of an
    // earlier metadata directory never see those keys again.
    let drawn = u32::from_le_bytes(random_bytes().map_err(|_| Errno::IO)?);
    let identity = u64::from(drawn) >> (32 - (u64::BITS - COUNT_BITS)) | 1;
    write_durably(top, "keys", "0\n")?;
    write_durably(top, super::stores::FILE, &super::stores::text_of(stores))?;
    write_durably(top, "format", &format_text(identity, cluster))
}

fn parse_format(dir: &Path, text: &str) -> Result<Format, StartError> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let number = |text| u64::from_str_radix(text, 16).ok().filter(|number| number >> (u64::BITS - COUNT_BITS) == 0);
    let format = match words[..] {
        ["impresario-meta", "1", identity] => number(identity).map(|identity| Format::Older { identity }),
        ["impresario-meta", version, identity, cluster] if version == FORMAT.to_string() => {
            number(identity).zip(cluster.parse().ok()).map(|(identity, cluster)| Format::Made { identity, cluster })
        }
        _ => None,
    };
    format.ok_or_else(|| StartError::Unknown {
        file: dir.join("format"),
        found: super::fault::show(text.trim_end().as_bytes()),
        wanted: "version 2 (`impresario-meta 2 <identity> <cluster>`)",
    })
}

/// The count of issued keys. Without the end of its line it may lack digits, and smaller counts were issued.
fn first_count(dir: &Path, top: &OwnedFd) -> Result<u64, StartError> {
    let text = read_file(top, "keys").map_err(|errno| unusable(dir, "its file `keys` cannot be read", errno))?;
    let count = text.as_deref().and_then(|text| text.strip_suffix('\n')?.parse::<u64>().ok());
    count.filter(|count| count >> COUNT_BITS == 0).ok_or_else(|| {
        let found = text.filter(|text| !text.is_empty());
        let found = found.map_or_else(|| "nothing".into(), |text| super::fault::show(text.as_bytes()));
        StartError::Keys { file: dir.join("keys"), found }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a directory, made if need be.
    fn start(dir: &Path) -> Result<MetaDirectory, StartError> {
        if examine(dir)? == FolderState::Blank {
            make(dir, ClusterId(1), &BTreeMap::new())?;
        }
        MetaDirectory::open(dir, None)
    }

    #[test]
    fn only_a_directory_that_was_made_is_served() {
        let dir = tempfile::tempdir().unwrap();
        for blank in [dir.path().to_path_buf(), dir.path().join("missing")] {
            let refused = MetaDirectory::open(&blank, None).err().unwrap().to_string();
            assert!(refused.contains("is empty") && refused.contains("impresario store init"), "{refused}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        make(dir.path(), ClusterId(7), &BTreeMap::new()).unwrap();
        assert_eq!(examine(dir.path()).unwrap(), FolderState::Made(ClusterId(7)));
        assert!(matches!(make(dir.path(), ClusterId(8), &BTreeMap::new()), Err(StartError::Made { .. })));
        let late = Claimed::take(dir.path()).unwrap().make(ClusterId(8), &BTreeMap::new());
        assert!(matches!(late, Err(StartError::Made { cluster: ClusterId(7), .. })));
        // Of a version without the cluster.
        let key = start(dir.path()).unwrap().new_key(0).unwrap();
        let format = std::fs::read_to_string(dir.path().join("format")).unwrap();
        let old = format!("impresario-meta 1 {}\n", format.split(' ').nth(2).unwrap());
        std::fs::write(dir.path().join("format"), old).unwrap();
        let refused = start(dir.path()).err().unwrap().to_string();
        assert!(refused.contains("older version") && refused.contains("impresario store adopt"), "{refused}");
        adopt(dir.path(), ClusterId(9), &BTreeMap::new()).unwrap();
        let after = start(dir.path()).unwrap();
        assert_eq!(after.new_key(0).unwrap().0 >> COUNT_BITS, key.0 >> COUNT_BITS);
        assert_eq!(examine(dir.path()).unwrap(), FolderState::Made(ClusterId(9)));
    }

    #[test]
    fn other_users_may_not_enter() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = || std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777;
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        drop(start(dir.path()).unwrap());
        assert_eq!(mode(), 0o700);
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        drop(start(dir.path()).unwrap());
        assert_eq!(mode(), 0o700, "also one that an earlier version made");
    }

    #[test]
    fn keys_are_never_issued_twice() {
        let dir = tempfile::tempdir().unwrap();
        let mut last = FileKey(0);
        for _ in 0..3 {
            let dir = start(dir.path()).unwrap();
            for _ in 0..10 {
                let key = dir.new_key(0).unwrap();
                assert!(key > last, "{key:?} after {last:?}");
                last = key;
            }
        }
        let dir = start(dir.path()).unwrap();
        let many: std::collections::BTreeSet<_> =
            (0..2 * KEYS_PER_RESERVATION).map(|_| dir.new_key(0).unwrap()).collect();
        assert_eq!(many.len() as u64, 2 * KEYS_PER_RESERVATION);
        assert!(*many.first().unwrap() > last);
    }

    #[test]
    fn keys_that_data_servers_have_had_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let count = |key: FileKey| key.0 & ((1 << COUNT_BITS) - 1);
        let given = start(dir.path()).unwrap();
        assert_eq!(
            [0, 1, 2].map(|from| count(given.new_key(from).unwrap())),
            [0, 1, 2],
            "it has given those below itself"
        );
        let first = count(given.new_key(KEYS_PER_RESERVATION).unwrap());
        assert!(first > KEYS_PER_RESERVATION);
        assert_eq!(count(given.new_key(KEYS_PER_RESERVATION).unwrap()), first + 1);
        drop(given);
        assert!(count(start(dir.path()).unwrap().new_key(0).unwrap()) > first + 1, "also after a restart");
        assert_eq!(start(dir.path()).unwrap().new_key(1 << COUNT_BITS), Err(Errno::NOSPC));
    }

    #[test]
    fn one_server_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = start(dir.path()).unwrap();
        let refused = start(dir.path()).err().unwrap().to_string();
        assert!(refused.contains("in use by another server") && refused.contains("stop that one"), "{refused}");
        drop(first);
        start(dir.path()).unwrap();
    }

    #[test]
    fn a_foreign_directory_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        let refused = start(dir.path()).err().unwrap().to_string();
        assert!(refused.contains("thesis.tex") && refused.contains("give [meta] dir an empty one"), "{refused}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_root_of_a_file_system_of_its_own_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("lost+found")).unwrap();
        drop(start(dir.path()).unwrap());
        assert!(dir.path().join("lost+found").exists());
        drop(start(dir.path()).unwrap());
    }

    #[test]
    fn an_interrupted_first_start_is_resumed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["names", "writers"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("keys.new"), "").unwrap();
        start(dir.path()).unwrap().new_key(0).unwrap();
        std::fs::remove_file(dir.path().join("format")).unwrap();
        std::fs::write(dir.path().join("names/a"), "").unwrap();
        assert!(
            matches!(start(dir.path()), Err(StartError::Foreign { .. })),
            "names without a format belong to something else"
        );
    }

    #[test]
    fn unknown_versions_and_broken_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        drop(start(dir.path()).unwrap());
        // Also one that was cut off: a smaller count would give keys of other files again.
        for broken in ["many\n", "131072", "13107", "", "\0\0\0\0\0\0\0", "-1\n", "99999999999999\n"] {
            std::fs::write(dir.path().join("keys"), broken).unwrap();
            let refused = start(dir.path()).err().unwrap().to_string();
            assert!(refused.contains("/keys says \"") && refused.contains("fsck --repair"), "{broken:?}: {refused}");
        }
        std::fs::write(dir.path().join("format"), "impresario-meta 3 000001\n").unwrap();
        let refused = start(dir.path()).err().unwrap().to_string();
        assert!(refused.contains("impresario-meta 3") && refused.contains("version 2"), "{refused}");
    }

    #[test]
    fn missing_attributes_or_permissions_are_reported_at_start() {
        let refused = start(Path::new("/proc/impresario")).err().unwrap().to_string();
        assert!(refused.contains("/proc/impresario") && refused.contains("[meta] dir"), "{refused}");
        let refused = start(Path::new("/dev/null/x")).err().unwrap().to_string();
        assert!(refused.contains("/dev/null/x"), "{refused}");
    }

    #[test]
    fn key_names_are_read_back_and_others_are_not() {
        assert_eq!(key_of(key_name(FileKey(0xabc)).as_bytes()), Some(FileKey(0xabc)));
        for bad in ["abc", "0000000000000ABC", "+00000000000000a", "zzzzzzzzzzzzzzzz", ""] {
            assert_eq!(key_of(bad.as_bytes()), None, "{bad}");
        }
    }
}
