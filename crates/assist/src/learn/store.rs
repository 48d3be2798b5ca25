//! Where what was learnt is kept: one file for each program, in a folder of the user's, behind it one of the machine's that
//! its administrator fills and no other user writes.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use impresario_base::machine::path_of;
use rustix::fs::{Access, FlockOperation, Mode, OFlags, access, flock};
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
/// Where the machine's folder is.
pub const SHARED: &str = "/var/lib/impresario/assist";

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

fn failed(path: &Path, what: &str) -> impl Fn(io::Error) -> StoreError {
    let (path, what) = (path.to_path_buf(), what.to_string());
    move |error| StoreError { path: path.clone(), message: format!("{what}: {error}") }
}

/// Lets all users read a file of the folder. Others may write to it: a link that one of them has put there, of either kind, leads to a
/// file that is not theirs to open.
fn open_to_all(file: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let named = match rustix::fs::open(file, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        named => File::from(named?),
    };
    let meta = named.metadata()?;
    if !meta.is_file() || meta.nlink() > 1 || meta.permissions().mode() & 0o444 == 0o444 {
        return Ok(());
    }
    // Through what is held, in whose place nothing else can be put.
    std::fs::set_permissions(path_of(&named), Permissions::from_mode(0o644))
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
    pub fn of_user(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<Store> {
        let path = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let data = path("XDG_DATA_HOME").or_else(|| Some(path("HOME")?.join(".local/share")))?;
        Some(Store::at(data.join("impresario/assist")))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The file of a program.
    pub fn path_of(&self, program: &str) -> PathBuf {
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
        self.folder.join(name + SUFFIX)
    }

    /// What is known of a program; `None` when nothing was learnt.
    pub fn load(&self, program: &str) -> Result<Option<Learnt>, StoreError> {
        let path = self.path_of(program);
        let is_missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => true,
            // A folder above is closed to this user: nothing was shared with it, and no run is to say so.
            io::ErrorKind::PermissionDenied => self.for_all,
            _ => false,
        };
        if path.symlink_metadata().is_err_and(is_missing) {
            return Ok(None);
        }
        // Two long names may begin alike.
        Ok(Some(self.read(&path)?).filter(|learnt| learnt.program == program))
    }

    fn read(&self, path: &Path) -> Result<Learnt, StoreError> {
        let refuse = |message: String| {
            let message = format!(
                "{message}; nothing that was learnt is used. `impresario assist learn --forget PROGRAM` removes it"
            );
            StoreError { path: path.into(), message }
        };
        // A pipe is not waited for.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(failed(path, "cannot be read"))?;
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
        for path in self.files() {
            match self.read(&path) {
                Ok(one) => learnt.push(one),
                Err(error) => errors.push(error),
            }
        }
        learnt.sort_by(|a, b| a.program.cmp(&b.program));
        (learnt, errors)
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.as_encoded_bytes()).unwrap_or_default();
            name.ends_with(SUFFIX.as_bytes()) && !name.starts_with(b".")
        };
        entries.map(|entry| entry.path()).filter(is_ours).collect()
    }

    /// Adds a run of a program to what is known of it, in a folder that was [prepared](Store::prepare). What cannot be read is not
    /// overwritten.
    pub fn add(&self, program: &str, run: Vec<Observation>) -> Result<Learnt, StoreError> {
        let _lock = self.lock(LOCK, LOCKED_FOR_MAX)?;
        let mut learnt = self.load(program)?.unwrap_or_else(|| Learnt::new(program));
        learnt.add(run);
        self.make_room(program);
        self.write(&self.path_of(program), learnt.text().as_bytes())?;
        Ok(learnt)
    }

    /// Removes what is known of a program; whether there was anything.
    pub fn forget(&self, program: &str) -> Result<bool, StoreError> {
        let path = self.path_of(program);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failed(&path, "cannot be removed")(e)),
        }
    }

    /// Makes the folder if it is not there, and finds out whether it can be written to. Nothing else makes it, so that one that is
    /// removed stays removed.
    pub fn prepare(&self) -> Result<(), StoreError> {
        let missing: Vec<&Path> = self.folder.ancestors().take_while(|folder| !folder.exists()).collect();
        std::fs::create_dir_all(&self.folder).map_err(failed(&self.folder, "cannot be made"))?;
        if self.for_all {
            // One of an earlier release may have been made for its owner alone.
            for folder in missing.iter().copied().chain([&*self.folder]) {
                let open = || {
                    let opened = File::open(folder)?;
                    let is_open = missing.is_empty() && opened.metadata()?.permissions().mode() & 0o055 == 0o055;
                    if is_open { Ok(()) } else { opened.set_permissions(Permissions::from_mode(0o755)) }
                };
                open().map_err(failed(folder, "cannot be opened to all users"))?;
            }
            // So may what was learnt. What another user has learnt here cannot be changed, and need not be.
            for file in self.files() {
                open_to_all(&file).map_err(failed(&file, "cannot be opened to all users"))?;
            }
            for above in self.folder.ancestors() {
                let mode = above.metadata().map_err(failed(above, "cannot be looked at"))?.permissions().mode();
                if mode & 0o001 == 0 {
                    let mode = mode & 0o7777;
                    let message = format!(
                        "other users cannot reach it: {} has mode {mode:o}; chmod o+x lets them",
                        above.display()
                    );
                    return Err(StoreError { path: self.folder.clone(), message });
                }
            }
        }
        drop(self.lock_file(LOCK)?);
        if self.for_all {
            // Whatever the umask, other administrators are to lock it, too. One of theirs could be opened just now.
            let _ = open_to_all(&self.folder.join(LOCK));
        }
        Ok(())
    }

    /// The turn to learn from a run behind its user's back, until what is returned is dropped. One has it at a time, so that many
    /// short runs do not load all their traces at once; an error where others take longer than a minute.
    pub fn turn_to_learn(&self) -> Result<File, StoreError> {
        self.lock(LEARNING, TURN_AFTER_MAX)
    }

    fn lock_file(&self, name: &str) -> Result<File, StoreError> {
        let path = self.folder.join(name);
        // No link that another user has put there makes a file elsewhere, and no pipe is waited for.
        let open = |how: &mut OpenOptions| how.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
        let file = open(File::options().create(true).write(true).truncate(false).mode(0o644));
        // Another administrator's may be locked by all who may write to the folder: a lock takes no right to write to its file.
        let file = file.or_else(|error| match error.kind() {
            io::ErrorKind::PermissionDenied if access(&self.folder, Access::WRITE_OK).is_ok() => {
                open(File::options().read(true))
            }
            _ => Err(error),
        });
        file.map_err(failed(&path, "cannot be written"))
    }

    /// A file that only its holder has locked; waits for it as long as `patience`.
    fn lock(&self, name: &str, patience: Duration) -> Result<File, StoreError> {
        let file = self.lock_file(name)?;
        let end = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    let path = self.folder.join(name);
                    return Err(failed(&path, "another one writes here and does not end")(error.into()));
                }
            }
        }
    }

    /// Drops what was learnt longest ago until one more program has room, and what a killed writer left.
    fn make_room(&self, program: &str) {
        let path = self.path_of(program);
        let mut others: Vec<_> = self.files().into_iter().filter(|other| *other != path).collect();
        let learnt_at = |path: &PathBuf| path.metadata().and_then(|meta| meta.modified()).ok();
        others.sort_by_key(|path| std::cmp::Reverse(learnt_at(path)));
        for old in others.get(PROGRAMS_MAX - 1..).unwrap_or_default() {
            let _ = std::fs::remove_file(old);
        }
        let _ = std::fs::remove_file(self.folder.join(TEMPORARY));
    }

    /// Replaces a file as a whole. The folder is locked.
    fn write(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        let temporary = self.folder.join(TEMPORARY);
        let write = || {
            let mut file = File::options().create_new(true).write(true).mode(0o644).open(&temporary)?;
            if self.for_all {
                file.set_permissions(Permissions::from_mode(0o644))?;
            }
            file.write_all(text)?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(failed(path, "cannot be written"))
    }
}

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
        assert!(store.lock(LEARNING, Duration::ZERO).is_err());
        store.add("a.py", Vec::new()).unwrap(); // `assist learn` needs no turn
        drop(turn);
        store.lock(LEARNING, Duration::ZERO).unwrap();
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
        assert_eq!(store.files().len(), PROGRAMS_MAX);
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
    }
}
