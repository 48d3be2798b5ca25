//! Where what was learnt is kept: one file for each program, in a folder of the user's, behind it one of the machine's that
//! its administrator fills and no other user writes.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use impresario_base::guarded_folder::{self, FolderError};
use impresario_base::machine::path_of;
use rustix::fs::{
    Access, AtFlags, CWD, Dir, FlockOperation, Mode, OFlags, accessat, fchmod, flock, fstat, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::kinds::{KIND_FILES_MAX, Kind, Observation, kinds_of};

/// The format that is written and read.
const VERSION: u32 = 1;
/// The longest file, bytes; what does not fit is dropped, the least useful first: see [`Learnt::lose_some`].
const FILE_BYTES_MAX: usize = 512 << 10;
/// So many files of a kind are enough for hints: each is predicted from the other.
const ENOUGH_FILES: usize = 2;
/// Of a file's record so many lines stay as long as that is of use.
const LINES_LEFT: usize = 16;
/// Files that are kept of one program.
const OBSERVED_MAX: usize = 128;
/// Programs in a folder; the one learnt longest ago goes first.
const PROGRAMS_MAX: usize = 256;
/// Another one that writes to the folder is waited for so long.
const LOCKED_FOR_MAX: Duration = Duration::from_secs(10);
/// And so long others that learn.
const TURN_AFTER_MAX: Duration = Duration::from_secs(60);
/// What ends the name of a program's file.
const SUFFIX: &str = ".json";
/// Where the machine's folder is. Not below `/var/lib/impresario`, which belongs to the user of the servers.
pub const SHARED: &str = "/var/lib/impresario-learnt";

/// What is known of one program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learnt {
    version: u32,
    /// The program.
    pub program: String,
    /// Recorded runs that were added.
    pub runs: u64,
    /// What it reads of which files.
    pub kinds: Vec<Kind>,
    /// The files from which that was learnt.
    pub observed: Vec<Observation>,
}

impl Learnt {
    /// Nothing yet.
    pub fn new(program: &str) -> Learnt {
        Learnt { version: VERSION, program: program.into(), runs: 0, kinds: Vec::new(), observed: Vec::new() }
    }

    /// Adds the files of a run and learns anew. A file that was observed before counts as it was read last, and where that was
    /// otherwise than before, also as it was read then: an order that two runs did not agree on is no order. Once two runs in
    /// succession agree, what was before is forgotten: the program has changed.
    pub fn add(&mut self, run: Vec<Observation>) {
        self.runs = self.runs.saturating_add(1);
        for new in run {
            let before = self.observed.iter().position(|old| old.is_same_file(&new));
            let before = before.map(|at| self.observed.remove(at)).filter(|before| !before.agrees(&new));
            self.observed.retain(|old| !old.is_same_file(&new));
            // In front of those of the same second.
            drop(self.observed.splice(0..0, [new].into_iter().chain(before)));
        }
        // The newest first; of a run with very many files the rest would be dropped one by one.
        self.observed.sort_by_key(|one| std::cmp::Reverse(one.seen_unix_s));
        self.observed.truncate(2 * OBSERVED_MAX);
        self.learn();
        while self.observed.len() > OBSERVED_MAX || self.text().len() > FILE_BYTES_MAX {
            self.lose_some();
            self.learn();
        }
    }

    /// Makes what is known shorter by what is missed least: the oldest file of which enough newer ones of its kinds are known;
    /// where there is none, the later half of the longest record, and as much of the others of its kinds, since hints for the
    /// beginning of a file are better than none; and of very many files one of which no hints come, or the oldest.
    fn lose_some(&mut self) {
        let kinds: Vec<Vec<usize>> = self.observed.iter().map(|one| self.kinds_that_hold(one)).collect();
        // The newest are first.
        let newer = |i: usize| {
            let same = self.observed[..i].iter().zip(&kinds).filter(|(_, of)| **of == kinds[i]);
            same.map(|(one, _)| one.file()).collect::<BTreeSet<_>>().len()
        };
        if let Some(oldest) = (0..kinds.len()).rev().find(|i| newer(*i) >= ENOUGH_FILES) {
            self.observed.remove(oldest);
            return;
        }
        let lines: Vec<usize> = self.observed.iter().map(|one| one.sample.series.len()).collect();
        let longest = (0..lines.len()).max_by_key(|i| lines[*i]).filter(|i| lines[*i] > LINES_LEFT);
        match longest.filter(|_| self.observed.len() <= OBSERVED_MAX) {
            Some(longest) => {
                let half = lines[longest] / 2;
                let same = self.observed.iter_mut().zip(&kinds).filter(|(_, of)| **of == kinds[longest]);
                same.for_each(|(one, _)| _ = one.cut(half));
            }
            None => drop(self.observed.remove(self.least_useful())),
        }
    }

    /// Of a kind with a record that was cut, none is longer: what is missing there would count as not read. Whether one was.
    fn level(&mut self) -> bool {
        let kinds: Vec<Vec<usize>> = self.observed.iter().map(|one| self.kinds_that_hold(one)).collect();
        let cut = self.observed.iter().zip(&kinds).filter(|(one, _)| one.is_cut);
        let cut: Vec<(Vec<usize>, usize)> = cut.map(|(one, of)| (of.clone(), one.sample.series.len())).collect();
        let mut was_longer = false;
        for (one, of) in self.observed.iter_mut().zip(&kinds) {
            let least = cut.iter().filter(|(same, _)| same == of).map(|(_, lines)| *lines).min();
            was_longer |= least.is_some_and(|lines| one.cut(lines));
        }
        was_longer
    }

    /// The kinds of which a file is, used or not.
    fn kinds_that_hold(&self, one: &Observation) -> Vec<usize> {
        (0..self.kinds.len()).filter(|kind| self.kinds[*kind].files.hold(&one.facts())).collect()
    }

    fn learn(&mut self) {
        self.kinds = kinds_of(&self.observed);
        if self.level() {
            self.kinds = kinds_of(&self.observed);
        }
        // Of a kind the newest files count; older ones are of no use to it.
        type OfKinds<'a> = (Vec<usize>, BTreeSet<(&'a Path, u64)>);
        let mut newest: Vec<OfKinds<'_>> = Vec::new();
        let mut order: Vec<usize> = (0..self.observed.len()).collect();
        order.sort_by_key(|i| std::cmp::Reverse(self.observed[*i].seen_unix_s));
        let mut keep = vec![false; self.observed.len()];
        for i in order {
            let kinds = self.kinds_that_hold(&self.observed[i]);
            let place = newest.iter().position(|(of, _)| *of == kinds).unwrap_or_else(|| {
                newest.push((kinds, BTreeSet::new()));
                newest.len() - 1
            });
            let (files, file) = (&mut newest[place].1, self.observed[i].file());
            keep[i] = files.contains(&file) || files.len() < KIND_FILES_MAX && files.insert(file);
        }
        drop(newest);
        let mut keep = keep.into_iter();
        self.observed.retain(|_| keep.next().unwrap_or(true));
    }

    /// The file whose loss costs least: the oldest of those of which no hints come, else the oldest.
    fn least_useful(&self) -> usize {
        let is_used = |one: &Observation| super::kinds::find(&self.kinds, &one.facts()).is_some();
        let rank = |i: &usize| (is_used(&self.observed[*i]), self.observed[*i].seen_unix_s);
        (0..self.observed.len()).min_by_key(rank).unwrap_or(0)
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// What cannot be read or written, and the remedy.
#[derive(Debug)]
pub struct StoreError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong with it, and what helps.
    pub message: String,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.message)
    }
}

impl std::error::Error for StoreError {}

impl From<FolderError> for StoreError {
    fn from(FolderError { path, message }: FolderError) -> StoreError {
        StoreError { path, message }
    }
}

fn failed(path: &Path, what: &str) -> impl Fn(io::Error) -> StoreError {
    let (path, what) = (path.to_path_buf(), what.to_string());
    move |error| StoreError { path: path.clone(), message: format!("{what}: {error}") }
}

/// Lets all users read a file of the folder. Others may write to it: a link that one of them has put there, of either kind, leads to a
/// file that is not theirs to open.
fn open_to_all(dir: &OwnedFd, name: &OsStr) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let named = match openat(dir, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        named => File::from(named?),
    };
    let meta = named.metadata()?;
    if !meta.is_file() || meta.nlink() > 1 || meta.permissions().mode() & 0o444 == 0o444 {
        return Ok(());
    }
    // Through what is held, in whose place nothing else can be put.
    std::fs::set_permissions(path_of(&named), Permissions::from_mode(0o644))
}

/// The names of programs' files in a folder.
fn names(dir: &OwnedFd) -> Vec<OsString> {
    let entries = Dir::read_from(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
    names.filter(|name| name.as_bytes().ends_with(SUFFIX.as_bytes()) && !name.as_bytes().starts_with(b".")).collect()
}

/// The name of a program's file.
fn name_of(program: &str) -> OsString {
    let mut name = String::new();
    for (i, byte) in program.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => name.push(byte.into()),
            b'.' if i > 0 => name.push('.'),
            _ => name += &format!("%{byte:02x}"),
        }
        // Too long for a name of a file is too long for a program.
        if name.len() > 200 {
            break;
        }
    }
    (name + SUFFIX).into()
}

/// One folder of what was learnt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Store {
    folder: PathBuf,
    /// Whether others than its owner are to read it.
    for_all: bool,
}

impl Store {
    /// In this folder, which need not be there.
    pub fn at(folder: impl Into<PathBuf>) -> Store {
        Store { folder: folder.into(), for_all: false }
    }

    /// In this folder, for all users to read, whatever the umask.
    pub fn of_machine(folder: impl Into<PathBuf>) -> Store {
        Store { for_all: true, ..Store::at(folder) }
    }

    /// The user's own, by the environment; `None` where that names no home.
    pub fn of_user(variable: impl Fn(&str) -> Option<OsString>) -> Option<Store> {
        let path = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let data = path("XDG_DATA_HOME").or_else(|| Some(path("HOME")?.join(".local/share")))?;
        Some(Store::at(data.join("impresario/assist")))
    }

    /// The folder that must be there for anything to be kept in [`of_user`](Store::of_user) by a program that nobody asked to: the user's
    /// home, or the one of data where that lies elsewhere.
    pub fn home_of_user(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
        let path = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        match (path("XDG_DATA_HOME"), path("HOME")) {
            (Some(data), Some(home)) => Some(if data.starts_with(&home) { home } else { data }),
            (data, home) => data.or(home),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of a program.
    pub fn path_of(&self, program: &str) -> PathBuf {
        self.folder.join(name_of(program))
    }

    /// What is known of a program; `None` when nothing was learnt.
    pub fn load(&self, program: &str) -> Result<Option<Learnt>, StoreError> {
        let dir = openat(CWD, &self.folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        match dir {
            Ok(dir) => self.load_in(&dir, program),
            Err(error) if self.is_missing(error) => Ok(None),
            Err(error) => Err(failed(&self.path_of(program), "cannot be read")(error.into())),
        }
    }

    fn load_in(&self, dir: &OwnedFd, program: &str) -> Result<Option<Learnt>, StoreError> {
        let name = name_of(program);
        if statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW).is_err_and(|error| self.is_missing(error)) {
            return Ok(None);
        }
        // Two long names may begin alike.
        Ok(Some(self.read(dir, &name)?).filter(|learnt| learnt.program == program))
    }

    /// Whether an error says that nothing was learnt.
    fn is_missing(&self, error: Errno) -> bool {
        match error {
            Errno::NOENT | Errno::NOTDIR => true,
            // A folder above is closed to this user: nothing was shared with it, and no run is to say so.
            Errno::ACCESS => self.for_all,
            _ => false,
        }
    }

    fn read(&self, dir: &OwnedFd, name: &OsStr) -> Result<Learnt, StoreError> {
        let path = &*self.folder.join(name);
        let refuse = |message: String| {
            let message = format!(
                "{message}; nothing that was learnt is used. `impresario assist learn --forget PROGRAM` removes it"
            );
            StoreError { path: path.into(), message }
        };
        // A pipe is not waited for, and in a folder to which others may write no link leads to what only its reader may read.
        let no_link = if self.for_all { OFlags::NOFOLLOW } else { OFlags::empty() };
        let file = openat(dir, name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | no_link, Mode::empty());
        let file = File::from(file.map_err(|error| failed(path, "cannot be read")(error.into()))?);
        let mut text = Vec::new();
        file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut text).map_err(failed(path, "cannot be read"))?;
        if text.len() > FILE_BYTES_MAX {
            return Err(refuse(format!("has more than the {FILE_BYTES_MAX} bytes of such a file")));
        }
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        match serde_json::from_slice::<Versioned>(&text) {
            Ok(Versioned { version: VERSION }) => {}
            Ok(Versioned { version }) => {
                return Err(refuse(format!(
                    "is of format {version}, written by another release; this one reads {VERSION}"
                )));
            }
            Err(error) => return Err(refuse(format!("is damaged: {error}"))),
        }
        serde_json::from_slice(&text).map_err(|error| refuse(format!("is damaged: {error}")))
    }

    /// All programs of which something is known, by name, and the files that cannot be read.
    pub fn all(&self) -> (Vec<Learnt>, Vec<StoreError>) {
        let (mut learnt, mut errors) = (Vec::new(), Vec::new());
        let Ok(dir) = open(&self.folder) else { return (learnt, errors) };
        for name in names(&dir) {
            match self.read(&dir, &name) {
                Ok(one) => learnt.push(one),
                Err(error) => errors.push(error),
            }
        }
        learnt.sort_by(|a, b| a.program.cmp(&b.program));
        (learnt, errors)
    }

    /// The programs of which was learnt last, with how long ago that was, and of how many programs something is known. What cannot be read
    /// is left out.
    pub fn newest(&self, most: usize) -> (Vec<(Learnt, Duration)>, usize) {
        let Ok(dir) = open(&self.folder) else { return Default::default() };
        let now = SystemTime::now();
        let mut files: Vec<_> =
            names(&dir).into_iter().filter_map(|name| Some((learnt_at(&dir, &name)?, name))).collect();
        files.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        let read = |(at, name): &(SystemTime, OsString)| {
            Some((self.read(&dir, name).ok()?, now.duration_since(*at).unwrap_or_default()))
        };
        (files.iter().filter_map(read).take(most).collect(), files.len())
    }

    /// Adds a run of a program to what is known of it, in a folder that was [prepared](Store::prepare). What cannot be read is not
    /// overwritten.
    pub fn add(&self, program: &str, run: Vec<Observation>) -> Result<Learnt, StoreError> {
        let dir = self.open()?;
        let _lock = self.lock(&dir, LOCK, LOCKED_FOR_MAX)?;
        let mut learnt = self.load_in(&dir, program)?.unwrap_or_else(|| Learnt::new(program));
        learnt.add(run);
        let name = name_of(program);
        make_room(&dir, &name);
        self.write(&dir, &name, learnt.text().as_bytes())?;
        Ok(learnt)
    }

    /// Removes what is known of a program; whether there was anything.
    pub fn forget(&self, program: &str) -> Result<bool, StoreError> {
        let path = self.path_of(program);
        if path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(false);
        }
        match unlinkat(self.open()?, name_of(program), AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(failed(&path, "cannot be removed")(error.into())),
        }
    }

    /// The folder, for writing to it.
    fn open(&self) -> Result<OwnedFd, StoreError> {
        match self.for_all {
            true => Ok(guarded_folder::open(&self.folder, false)?),
            false => open(&self.folder).map_err(failed(&self.folder, "cannot be opened")),
        }
    }

    /// Makes the folder if it is not there, and finds out whether it can be written to. Nothing else makes it, so that one that is
    /// removed stays removed. One for all users is an error where another user could lead the writer elsewhere.
    pub fn prepare(&self) -> Result<(), StoreError> {
        if !self.for_all {
            std::fs::create_dir_all(&self.folder).map_err(failed(&self.folder, "cannot be made"))?;
            return self.lock_file(&self.open()?, LOCK).map(drop);
        }
        let dir = guarded_folder::open(&self.folder, true)?;
        let closed = |error: Errno| failed(&self.folder, "cannot be opened to all users")(error.into());
        // One of an earlier release may have been made for its owner alone.
        if fstat(&dir).map_err(closed)?.st_mode & 0o055 != 0o055 {
            fchmod(&dir, Mode::from_raw_mode(0o755)).map_err(closed)?;
        }
        // So may what was learnt. What another user has learnt here cannot be changed, and need not be.
        for name in names(&dir) {
            let opened = open_to_all(&dir, &name);
            opened.map_err(failed(&self.folder.join(name), "cannot be opened to all users"))?;
        }
        for above in self.folder.ancestors() {
            let mode = above.metadata().map_err(failed(above, "cannot be looked at"))?.permissions().mode();
            if mode & 0o001 == 0 {
                let mode = mode & 0o7777;
                let message =
                    format!("other users cannot reach it: {} has mode {mode:o}; chmod o+x lets them", above.display());
                return Err(StoreError { path: self.folder.clone(), message });
            }
        }
        drop(self.lock_file(&dir, LOCK)?);
        // Whatever the umask, other administrators are to lock it, too. One of theirs could be opened just now.
        let _ = open_to_all(&dir, LOCK.as_ref());
        Ok(())
    }

    /// The turn to learn from a run behind its user's back, until what is returned is dropped. One has it at a time, so that many
    /// short runs do not load all their traces at once; an error where others take longer than a minute.
    pub fn turn_to_learn(&self) -> Result<File, StoreError> {
        self.lock(&self.open()?, LEARNING, TURN_AFTER_MAX)
    }

    fn lock_file(&self, dir: &OwnedFd, name: &str) -> Result<File, StoreError> {
        // No link that another user has put there makes a file elsewhere, and no pipe is waited for.
        let open = |how| openat(dir, name, how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC, NEW);
        let file = match open(OFlags::CREATE | OFlags::WRONLY) {
            // Another administrator's may be locked by all who may write to the folder: a lock takes no right to write to its file.
            Err(Errno::ACCESS) if accessat(dir, ".", Access::WRITE_OK, AtFlags::EACCESS).is_ok() => {
                open(OFlags::RDONLY)
            }
            file => file,
        };
        let file = file.map_err(|error| failed(&self.folder.join(name), "cannot be written")(error.into()));
        Ok(File::from(file?))
    }

    /// A file that only its holder has locked; waits for it as long as `patience`.
    fn lock(&self, dir: &OwnedFd, name: &str, patience: Duration) -> Result<File, StoreError> {
        let file = self.lock_file(dir, name)?;
        let end = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    let path = self.folder.join(name);
                    return Err(failed(&path, "another one writes here and does not end")(error.into()));
                }
            }
        }
    }

    /// Replaces a file as a whole. The folder is locked.
    fn write(&self, dir: &OwnedFd, name: &OsStr, text: &[u8]) -> Result<(), StoreError> {
        let write = || {
            let how = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let mut file = File::from(openat(dir, TEMPORARY, how, NEW)?);
            if self.for_all {
                file.set_permissions(Permissions::from_mode(0o644))?;
            }
            file.write_all(text)?;
            file.sync_all()?;
            Ok(renameat(dir, TEMPORARY, dir, name)?)
        };
        write().map_err(failed(&self.folder.join(name), "cannot be written"))
    }
}

fn open(folder: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// When something was learnt of a program last.
fn learnt_at(dir: &OwnedFd, name: &OsStr) -> Option<SystemTime> {
    let state = statat(dir, name, AtFlags::empty()).ok()?;
    let (seconds, nanos) = (u64::try_from(state.st_mtime).ok()?, u32::try_from(state.st_mtime_nsec).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos.min(999_999_999)))
}

/// Drops what was learnt longest ago until one more program has room, and what a killed writer left.
fn make_room(dir: &OwnedFd, name: &OsStr) {
    let mut others: Vec<_> = names(dir).into_iter().filter(|other| other != name).collect();
    others.sort_by_cached_key(|name| std::cmp::Reverse(learnt_at(dir, name)));
    for old in others.get(PROGRAMS_MAX - 1..).unwrap_or_default() {
        let _ = unlinkat(dir, old, AtFlags::empty());
    }
    let _ = unlinkat(dir, TEMPORARY, AtFlags::empty());
}

/// The mode of new files, from which the umask takes.
const NEW: Mode = Mode::from_raw_mode(0o644);
/// Who writes to the folder has this file locked.
const LOCK: &str = ".lock";
/// And who learns from a run without being waited for, this one.
const LEARNING: &str = ".learning";
/// What becomes a program's file when it is whole.
const TEMPORARY: &str = ".new";

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_foresight::Sample;

    const MIB: u64 = 1 << 20;

    fn observed(path: &str, size: u64, pieces: u64, seen: u64) -> Observation {
        // Pieces of their own length each, so that each takes its place.
        let reads = (0..pieces).map(|i| i * 10_000..i * 10_000 + 5000 + i % 977);
        let sample = Sample::of(size, reads).unwrap();
        Observation::new(Path::new(path), None, seen, sample)
    }

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path().join("share/impresario"));
        store.prepare().unwrap();
        (folder, store)
    }

    /// As root has it on hardened machines.
    #[test]
    fn what_is_shared_is_for_all_whatever_the_umask() {
        // SAFETY: changes the umask of this thread alone, which no other shares from then on.
        unsafe {
            assert_eq!(libc::unshare(libc::CLONE_FS), 0);
            libc::umask(0o077);
        }
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let folder = dir.path().join("lib/impresario/assist");
        for (store, modes) in [
            (Store::of_machine(&folder), [0o755, 0o755, 0o644]),
            (Store::at(folder.join("own")), [0o755, 0o700, 0o600]),
        ] {
            // Others may go through it.
            std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711)).unwrap();
            store.prepare().unwrap();
            store.add("a.py", vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
            let parent = store.folder().parent().unwrap();
            assert_eq!([parent, store.folder(), &store.path_of("a.py")].map(mode), modes);
            assert_eq!(mode(&store.folder().join(LOCK)), modes[2]);
        }
        // One that was made otherwise is mended, and one that cannot be is told of.
        let learnt = Store::of_machine(&folder).path_of("a.py");
        std::fs::set_permissions(&learnt, Permissions::from_mode(0o600)).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        Store::of_machine(&folder).prepare().unwrap();
        assert_eq!([&folder, &learnt].map(|path| mode(path)), [0o755, 0o644]);
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
        let error = Store::of_machine(&folder).prepare().unwrap_err().to_string();
        assert!(error.contains(&format!("{} has mode 700", dir.path().display())), "{error}");
    }

    /// Whoever may write to the folder would have the administrator open any file to all users.
    #[test]
    fn no_link_in_a_shared_folder_opens_what_it_leads_to() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of_machine(dir.path().join("assist"));
        store.prepare().unwrap();
        let set = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        set(dir.path(), 0o711);
        let secrets = ["linked", "hard"].map(|name| dir.path().join(name));
        for secret in &secrets {
            std::fs::write(secret, "secret").unwrap();
            set(secret, 0o600);
        }
        std::os::unix::fs::symlink(&secrets[0], store.path_of("a.py")).unwrap();
        std::fs::hard_link(&secrets[1], store.path_of("b.py")).unwrap();
        store.prepare().unwrap();
        let mode = |path: &PathBuf| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(secrets.each_ref().map(mode), [0o600; 2]);
    }

    /// Root would make files in any folder of another user's choice, open it to all, or remove files there.
    #[test]
    fn a_link_in_the_place_of_a_shared_folder_leads_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let set = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let elsewhere = Store::at(dir.path().join("elsewhere"));
        elsewhere.prepare().unwrap();
        elsewhere.add("a.py", Vec::new()).unwrap();
        std::fs::remove_file(elsewhere.folder().join(LOCK)).unwrap();
        set(elsewhere.folder(), 0o700);
        set(dir.path(), 0o711);
        let store = Store::of_machine(dir.path().join("assist"));
        std::os::unix::fs::symlink(elsewhere.folder(), store.folder()).unwrap();
        let errors = [
            store.prepare().map_err(|error| error.to_string()),
            store.add("a.py", Vec::new()).map(drop).map_err(|error| error.to_string()),
            store.forget("a.py").map(drop).map_err(|error| error.to_string()),
            store.turn_to_learn().map(drop).map_err(|error| error.to_string()),
        ];
        for error in errors.map(|done| done.expect_err("a link was followed")) {
            assert!(error.contains("is a symbolic link"), "{error}");
        }
        let left: Vec<_> = std::fs::read_dir(elsewhere.folder()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["a.py.json"]);
        assert_eq!(elsewhere.folder().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    /// Several administrators may learn for all users.
    #[test]
    fn what_another_user_has_learnt_for_all_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of_machine(dir.path().join("assist"));
        store.prepare().unwrap();
        store.add("a.py", vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
        // Removed a moment after it was listed.
        std::os::unix::fs::symlink("nowhere", store.path_of("b.py")).unwrap();
        let set = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        set(dir.path(), 0o711);
        set(store.folder(), 0o777);
        // As another user than root. SAFETY: this thread alone is it, and takes no pointer.
        let become_user = |uid: u32| unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, -1) };
        let is_another = become_user(65534) == 0;
        let done = store.prepare().and_then(|()| store.add("c.py", Vec::new()));
        become_user(0);
        done.unwrap();
        assert_eq!(store.folder().metadata().unwrap().permissions().mode() & 0o777, 0o777);
        if !is_another {
            return impresario_testing::skip("root", "only root becomes another user");
        }
        // Who may not write to the folder hears of it before anything is learnt.
        set(store.folder(), 0o755);
        become_user(65534);
        let prepared = store.prepare();
        become_user(0);
        let error = prepared.unwrap_err().to_string();
        assert!(error.contains(LOCK) && error.contains("cannot be written"), "{error}");
    }

    /// Whoever may write to the folder would have the administrator make any file.
    #[test]
    fn the_lock_of_a_shared_folder_makes_no_file_elsewhere() {
        let (folder, store) = store();
        let elsewhere = folder.path().join("elsewhere");
        std::fs::remove_file(store.folder().join(LOCK)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, store.folder().join(LOCK)).unwrap();
        assert!(store.prepare().is_err() && store.add("a.py", Vec::new()).is_err());
        assert!(!elsewhere.exists());
    }

    #[test]
    fn only_what_is_not_there_is_nothing_learnt() {
        let (folder, store) = store();
        assert_eq!(store.load("a.py").unwrap(), None);
        assert_eq!(Store::at(folder.path().join("none")).load("a.py").unwrap(), None);
        assert_eq!(Store::at("/dev/null/none").load("a.py").unwrap(), None, "as where HOME is none");
        // A folder that leads in a circle stands for every other error, which root is spared.
        std::os::unix::fs::symlink("circle", folder.path().join("circle")).unwrap();
        let error = Store::at(folder.path().join("circle")).load("a.py").unwrap_err().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn a_machines_folder_that_a_user_cannot_reach_is_nothing_learnt() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("impresario");
        let (shared, own) = (Store::of_machine(above.join("assist")), Store::at(above.join("assist")));
        std::fs::create_dir_all(shared.folder()).unwrap();
        std::fs::write(shared.path_of("a.py"), "{}").unwrap();
        let set = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        for path in [dir.path(), &above, shared.folder()] {
            set(path, 0o755);
        }
        set(&shared.path_of("a.py"), 0);
        // As another user than root. SAFETY: this thread alone is it, and takes no pointer.
        let become_user = |uid: u32| unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
        let me = become_user(65534) as u32;
        let seen = shared.load("a.py").unwrap_err().to_string();
        become_user(me);
        set(&above, 0);
        become_user(65534);
        let loaded = [shared.load("a.py"), own.load("a.py")];
        become_user(me);
        set(&above, 0o755);
        assert!(seen.contains("cannot be read"), "{seen}");
        let [shared, own] = loaded;
        assert_eq!(shared.unwrap(), None);
        own.unwrap_err();
    }

    #[test]
    fn one_learns_at_a_time_and_none_where_the_folder_was_removed() {
        let (_folder, store) = store();
        let turn = store.turn_to_learn().unwrap();
        assert!(store.lock(&store.open().unwrap(), LEARNING, Duration::ZERO).is_err());
        store.add("a.py", Vec::new()).unwrap(); // `assist learn` needs no turn
        drop(turn);
        store.lock(&store.open().unwrap(), LEARNING, Duration::ZERO).unwrap();
        std::fs::remove_dir_all(store.folder()).unwrap();
        assert!(store.turn_to_learn().is_err() && store.add("a.py", Vec::new()).is_err());
        assert!(!store.folder().exists());
    }

    #[test]
    fn what_is_learnt_is_found_again_and_forgotten() {
        let (_folder, store) = store();
        assert_eq!(store.load("a.py").unwrap(), None);
        let first = store.add("a.py", vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
        assert!(first.runs == 1 && !first.kinds[0].is_used());
        let second = store.add("a.py", vec![observed("/d/2.h5", 20 * MIB, 3, 2)]).unwrap();
        assert!(second.runs == 2 && second.kinds[0].is_used(), "{second:?}");
        assert_eq!(store.load("a.py").unwrap(), Some(second));
        // The same file once more is no second file.
        let again = store.add("b.py", vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
        let again = store.add(&again.program, vec![observed("/d/1.h5", 10 * MIB, 3, 5)]).unwrap();
        assert!((again.runs, again.observed.len()) == (2, 1) && !again.kinds[0].is_used());
        let old = File::options().write(true).open(store.path_of("a.py")).unwrap();
        old.set_modified(std::time::UNIX_EPOCH).unwrap();
        let (newest, programs) = store.newest(1);
        assert_eq!((newest[0].0.program.as_str(), newest.len(), programs), ("b.py", 1, 2));
        let names: Vec<String> = store.all().0.into_iter().map(|learnt| learnt.program).collect();
        assert_eq!(names, ["a.py", "b.py"]);
        assert!(store.forget("a.py").unwrap() && !store.forget("a.py").unwrap());
        assert_eq!(store.load("a.py").unwrap(), None);
    }

    #[test]
    fn names_of_programs_stay_in_the_folder() {
        let (_folder, store) = store();
        for program in ["../x", ".hidden", "a b", "ä", "/", "", "%41", &"x".repeat(3000)] {
            let path = store.path_of(program);
            assert_eq!(path.parent(), Some(store.folder()), "{program}");
            store.add(program, vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
            assert!(store.load(program).unwrap().is_some(), "{program}");
        }
        assert_ne!(store.path_of("%41"), store.path_of("A"));
    }

    /// Of one file a run showed an order, which counted although an earlier run had shown another.
    #[test]
    fn an_order_that_runs_of_one_file_do_not_share_is_none() {
        let read = |path: &str, seen, from: u64| {
            let reads = (0..40).map(|i| (from + i * 37 % 40) * MIB..(from + i * 37 % 40) * MIB + 5000);
            Observation::new(Path::new(path), None, seen, Sample::of(90 * MIB, reads).unwrap())
        };
        let is_used = |learnt: &Learnt| learnt.kinds.iter().any(Kind::is_used);
        let mut learnt = Learnt::new("a");
        // Files have the same length, so that an order can be one of absolute places.
        learnt.add(vec![read("/d/1.h5", 1, 45)]);
        learnt.add(vec![read("/d/1.h5", 2, 0), read("/d/2.h5", 2, 0)]);
        assert!(!is_used(&learnt) && learnt.observed.len() == 3, "{:?}", learnt.kinds);
        assert_eq!((learnt.kinds[0].learnt_from, learnt.kinds[0].held_out.map(|score| score.files)), (2, Some(3)));
        // The program reads so from now on.
        learnt.add(vec![read("/d/1.h5", 3, 0)]);
        assert!(is_used(&learnt) && learnt.observed.len() == 2, "{:?}", learnt.kinds);
        assert_eq!(learnt.kinds[0].held_out.map(|score| score.files), Some(2));
        // And both runs of one file are no two files.
        let mut learnt = Learnt::new("b");
        [45, 0, 45].into_iter().zip(1..).for_each(|(from, seen)| learnt.add(vec![read("/d/1.h5", seen, from)]));
        assert_eq!((learnt.observed.len(), learnt.kinds[0].learnt_from), (2, 1));
        assert!(learnt.kinds[0].why_unused().unwrap().contains("one file only"));
    }

    #[test]
    fn damage_is_told_and_left_alone() {
        let (_folder, store) = store();
        store.add("a", vec![observed("/d/1.h5", 10 * MIB, 3, 1)]).unwrap();
        let good = std::fs::read_to_string(store.path_of("a")).unwrap();
        let long = " ".repeat(FILE_BYTES_MAX + 1);
        let future = good.replace("\"version\":1", "\"version\":9");
        let strange = good.replace("\"runs\":1", "\"runs\":\"many\"");
        for (text, told) in [
            ("", "damaged"),
            (&good[..good.len() / 2], "damaged"),
            ("{}", "damaged"),
            (&long, "more than"),
            (&future, "format 9"),
            (&strange, "damaged"),
        ] {
            std::fs::write(store.path_of("a"), text).unwrap();
            let error = store.load("a").unwrap_err().to_string();
            assert!(error.contains(told) && error.contains("--forget") && error.lines().count() == 1, "{error}");
            assert!(store.add("a", Vec::new()).is_err());
            assert_eq!(std::fs::read_to_string(store.path_of("a")).unwrap(), text, "it is not overwritten");
            assert_eq!((store.all().0.len(), store.all().1.len()), (0, 1));
        }
        std::os::unix::fs::symlink("/nowhere/at/all", store.path_of("link")).unwrap();
        assert!(store.load("link").is_err());
    }

    #[test]
    fn it_does_not_grow_without_a_bound() {
        let (_folder, store) = store();
        let mut learnt = Learnt::new("a");
        for run in 0..20 {
            learnt.add((0..20).map(|i| observed(&format!("/d/{run}-{i}.{}", i % 5), 100 * MIB, 400, run)).collect());
        }
        assert!(learnt.text().len() <= FILE_BYTES_MAX && learnt.observed.len() <= OBSERVED_MAX);
        assert!(learnt.observed.iter().any(|one| one.seen_unix_s == 19), "the newest stay");
        for i in 0..PROGRAMS_MAX + 10 {
            store.add(&format!("p{i}"), vec![observed("/d/1.h5", MIB, 1, 1)]).unwrap();
        }
        assert_eq!(names(&store.open().unwrap()).len(), PROGRAMS_MAX);
        assert!(store.load(&format!("p{}", PROGRAMS_MAX + 9)).unwrap().is_some());
    }

    /// Programs that read several kinds in many pieces: a whole file dropped would leave one file of its kind, and no hints.
    #[test]
    fn what_does_not_fit_costs_detail_and_no_kind() {
        let mut learnt = Learnt::new("a");
        for run in 0..2 {
            let sizes = [100 * MIB, 90 * MIB, 80 * MIB].map(|size| size + run * MIB);
            let of = |(i, size): (usize, u64)| observed(&format!("/d/{run}.kind{i}"), size, 1000, run);
            learnt.add(sizes.into_iter().enumerate().map(of).collect());
        }
        assert!(learnt.text().len() <= FILE_BYTES_MAX, "{}", learnt.text().len());
        assert_eq!((learnt.observed.len(), learnt.kinds.len()), (6, 3));
        for kind in &learnt.kinds {
            assert!(kind.is_used(), "{:?}", kind.why_unused());
            let predicted = kind.shape.predict(60 * MIB);
            assert!(predicted.len() >= 250, "{} pieces are left of {:?}", predicted.len(), kind.files);
            assert_eq!(predicted.first(), Some(&(0..5000)), "the last ones are lost");
        }
        // Where older files of a kind can go, the record of the newer ones stays whole.
        let mut learnt = Learnt::new("b");
        for run in 0..12 {
            learnt.add(vec![observed(&format!("/d/{run}.h5"), (100 + run) * MIB, 1000, run)]);
        }
        assert!(learnt.text().len() <= FILE_BYTES_MAX && learnt.kinds[0].is_used());
        assert!(learnt.observed.iter().all(|one| one.sample.series.len() == 1000), "{}", learnt.observed.len());
        assert!((ENOUGH_FILES..KIND_FILES_MAX).contains(&learnt.observed.len()));
        assert!(learnt.observed.iter().any(|one| one.seen_unix_s == 11), "the newest stay");
    }

    #[test]
    fn the_users_folder_follows_the_environment() {
        let of = |set: &[(&str, &str)]| {
            let variable = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
            Store::of_user(variable).map(|store| store.folder)
        };
        assert_eq!(of(&[("XDG_DATA_HOME", "/x"), ("HOME", "/h")]), Some("/x/impresario/assist".into()));
        assert_eq!(
            of(&[("XDG_DATA_HOME", "relative"), ("HOME", "/h")]),
            Some("/h/.local/share/impresario/assist".into())
        );
        assert_eq!(of(&[]), None);
        let home = |set: &[(&str, &str)]| {
            Store::home_of_user(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        for (set, folder) in [
            (&[("XDG_DATA_HOME", "/x"), ("HOME", "/h")][..], Some("/x")),
            (&[("XDG_DATA_HOME", "/h/data"), ("HOME", "/h")], Some("/h")),
            (&[("XDG_DATA_HOME", "relative"), ("HOME", "/h")], Some("/h")),
            (&[("XDG_DATA_HOME", "/x")], Some("/x")),
            (&[], None),
        ] {
            assert_eq!(home(set), folder.map(PathBuf::from), "{set:?}");
        }
    }

    /// A folder of servers belongs to their user, who could put a link in the place of any name in it.
    #[test]
    fn the_machines_folder_is_in_no_state_folder_of_a_service() {
        let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
        let mut folders = 0;
        for unit in std::fs::read_dir(units).unwrap().map(|unit| unit.unwrap().path()) {
            if unit.extension() != Some(OsStr::new("service")) {
                continue;
            }
            let text = std::fs::read_to_string(&unit).unwrap();
            for state in text.lines().filter_map(|line| line.strip_prefix("StateDirectory=")) {
                for folder in state.split_whitespace().map(|name| Path::new("/var/lib").join(name)) {
                    folders += 1;
                    assert!(!Path::new(SHARED).starts_with(&folder), "{}", unit.display());
                }
            }
        }
        assert!(folders >= 2, "{folders}");
    }
}
