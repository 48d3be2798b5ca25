//! What the file system says of the paths in hints. Threads beside ask it, since a file system that hangs answers nobody.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::FileType;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_base::mounts::mounts;
use rustc_hash::{FxHashMap, FxHashSet};

use super::load::Hints;

/// Threads that ask at the same time. With as many paths that hang on different mounts, those behind them are not asked for.
const THREADS: usize = 16;
/// The longest time without an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Paths that this process may be without an answer for at a time.
const UNANSWERED_MAX: usize = 64;

/// Paths that threads of this process were left behind with.
static UNANSWERED: Mutex<Vec<Weak<PathBuf>>> = Mutex::new(Vec::new());

/// The paths of some hints.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    answers: FxHashMap<PathBuf, Answer>,
    silent: Vec<PathBuf>,
    /// Those of them that were not asked for: so many others are without an answer.
    unasked: FxHashSet<PathBuf>,
}

#[derive(Clone, Debug)]
struct Answer {
    true_path: PathBuf,
    there: Result<FileType, String>,
}

/// Where file systems are mounted: what hangs is one of them, most likely.
pub(crate) struct MountPoints(Vec<PathBuf>);

impl MountPoints {
    /// As the kernel tells now. No file system is asked.
    pub(crate) fn now() -> MountPoints {
        MountPoints(mounts().into_iter().map(|mount| mount.point).collect())
    }

    /// The number of the one on which a path lies, links aside.
    pub(crate) fn of(&self, path: &Path) -> usize {
        let above = |(_, point): &(usize, &PathBuf)| path.starts_with(point);
        let found = self.0.iter().enumerate().filter(above).max_by_key(|(_, point)| point.as_os_str().len());
        found.map_or(usize::MAX, |(number, _)| number)
    }
}

/// What is still to be asked for in a folder.
struct Folder {
    mount: usize,
    left: Vec<PathBuf>,
}

/// What is still to be asked for, by its folder, and what is being asked for. Several threads take from it.
pub(crate) struct Questions {
    left: BTreeMap<PathBuf, Folder>,
    /// Each with its mount.
    asked: Vec<(Weak<PathBuf>, usize)>,
}

impl Questions {
    /// Of these paths, while others are asked for already.
    pub(crate) fn new(
        paths: impl IntoIterator<Item = PathBuf>,
        asked: &[Arc<PathBuf>],
        mounts: &MountPoints,
    ) -> Questions {
        let asked = asked.iter().map(|path| (Arc::downgrade(path), mounts.of(path))).collect();
        let mut questions = Questions { left: BTreeMap::new(), asked };
        for path in paths {
            let folder = folder_of(&path);
            let new = || Folder { mount: mounts.of(&path), left: Vec::new() };
            questions.left.entry(folder.into()).or_insert_with(new).left.push(path);
        }
        questions
    }

    /// What is asked for next: as long as there is another, nothing in a folder that is asked about already, and then where the
    /// fewest questions are open on a mount. What hangs there would take one thread after the other.
    pub(crate) fn next(&mut self) -> Option<Arc<PathBuf>> {
        self.asked.retain(|(asked, _)| asked.strong_count() > 0);
        let asked: Vec<(Arc<PathBuf>, usize)> =
            self.asked.iter().filter_map(|(asked, mount)| Some((asked.upgrade()?, *mount))).collect();
        let rank = |(folder, of): &(&PathBuf, &Folder)| {
            let is_asked = asked.iter().any(|(path, _)| folder_of(path) == folder.as_path());
            (is_asked, asked.iter().filter(|(_, mount)| *mount == of.mount).count())
        };
        let folder = self.left.iter().min_by_key(rank).map(|(folder, _)| folder.clone())?;
        let inside = self.left.get_mut(&folder)?;
        let (path, mount) = (inside.left.pop().map(Arc::new), inside.mount);
        if inside.left.is_empty() {
            self.left.remove(&folder);
        }
        self.asked.extend(path.as_ref().map(|path| (Arc::downgrade(path), mount)));
        path
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

impl Paths {
    /// Asks for all paths of these hints, and goes on without what is not answered within five seconds of the last answer. Nothing is
    /// asked while an earlier question for one of them has no answer.
    pub fn of(hints: &Hints) -> Paths {
        Paths::asked(hints, PATIENCE, ask)
    }

    fn asked(hints: &Hints, patience: Duration, ask: fn(&Path) -> Answer) -> Paths {
        let named = hints.file.iter().chain(&hints.directory).map(|entry| entry.path.clone());
        let mut all: Vec<PathBuf> =
            named.chain(hints.glob.iter().filter_map(|entry| plain_part(&entry.path))).collect();
        all.sort_unstable();
        all.dedup();
        let mut paths = Paths::default();
        // Hints without a plan have no other, and need no thread.
        if let Ok(root) = all.binary_search_by(|path| path.as_path().cmp(Path::new("/"))) {
            let root = all.remove(root);
            paths.answers.insert(root.clone(), ask(&root));
        }
        let are_too_many;
        (paths.silent, are_too_many) = unanswered(&all);
        if !paths.silent.is_empty() {
            paths.unasked.extend(paths.silent.iter().filter(|_| are_too_many).cloned());
            return paths;
        }
        let questions = Arc::new(Mutex::new(Questions::new(all.iter().cloned(), &[], &MountPoints::now())));
        let (answer, answers) = mpsc::channel();
        for _ in 0..THREADS.min(all.len()) {
            let (questions, answer) = (questions.clone(), answer.clone());
            let asking = move || {
                loop {
                    let Some(path) = questions.lock().next() else { return };
                    let said = ask(&path);
                    if answer.send((path.to_path_buf(), said)).is_err() {
                        return;
                    }
                }
            };
            // Without any, all paths are taken as they are written.
            if let Err(error) = std::thread::Builder::new().name("assist-paths".into()).spawn(asking) {
                tracing::warn!(%error, "no thread can ask for the paths of hints");
            }
        }
        drop(answer);
        while let Ok((path, said)) = answers.recv_timeout(patience) {
            paths.answers.insert(path, said);
        }
        let mut questions = questions.lock();
        paths.unasked.extend(std::mem::take(&mut questions.left).into_values().flat_map(|folder| folder.left));
        UNANSWERED.lock().extend(questions.asked.drain(..).map(|(path, _)| path));
        paths.silent = all.into_iter().filter(|path| !paths.answers.contains_key(path)).collect();
        paths
    }

    /// The paths that had no answer.
    pub fn silent(&self) -> &[PathBuf] {
        &self.silent
    }

    /// Why there was none from one of these.
    pub fn why_silent(&self, path: &Path) -> &'static str {
        match self.unasked.contains(path) {
            true => "it is not asked for: too many paths are without an answer",
            false => "its file system does not answer",
        }
    }

    /// A path with its links resolved as far as it exists; as it is where nothing was answered.
    pub(super) fn true_path(&self, path: &Path) -> PathBuf {
        self.answers.get(path).map_or_else(|| path.into(), |answer| answer.true_path.clone())
    }

    /// What is at a path, or the error; `None` where nothing was answered.
    pub(super) fn there(&self, path: &Path) -> Option<&Result<FileType, String>> {
        Some(&self.answers.get(path)?.there)
    }
}

/// Which of these paths are without an answer from before; all of them, and true, where too many others are.
fn unanswered(of: &[PathBuf]) -> (Vec<PathBuf>, bool) {
    let mut unanswered = UNANSWERED.lock();
    unanswered.retain(|path| path.strong_count() > 0);
    let before: Vec<Arc<PathBuf>> = unanswered.iter().filter_map(Weak::upgrade).collect();
    among(of, &before)
}

fn among(of: &[PathBuf], before: &[Arc<PathBuf>]) -> (Vec<PathBuf>, bool) {
    let named = of.iter().filter(|path| before.iter().any(|before| before.as_path() == path.as_path()));
    let named: Vec<PathBuf> = named.cloned().collect();
    let are_too_many = named.is_empty() && before.len() >= UNANSWERED_MAX;
    (if are_too_many { of.to_vec() } else { named }, are_too_many)
}

fn ask(path: &Path) -> Answer {
    let there = std::fs::metadata(path).map(|meta| meta.file_type()).map_err(|error| error.to_string());
    Answer { true_path: canonical(path), there }
}

/// The path with links resolved, as far as it exists.
fn canonical(path: &Path) -> PathBuf {
    if let Ok(whole) = path.canonicalize() {
        return whole;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => canonical(parent).join(name),
        _ => path.into(),
    }
}

/// The folder of a pattern that lies before its first special character; `None` where that is the root.
pub(super) fn plain_part(pattern: &Path) -> Option<PathBuf> {
    let bytes = pattern.as_os_str().as_bytes();
    let special = bytes.iter().position(|b| b"*?[\\".contains(b)).unwrap_or(bytes.len());
    let slash = bytes[..special].iter().rposition(|b| *b == b'/').filter(|slash| *slash > 0)?;
    Some(PathBuf::from(OsString::from_vec(bytes[..slash].into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Entry, Lookup};

    #[test]
    fn what_is_not_answered_is_taken_as_it_is_written_and_not_asked_for_again() {
        static HANGS: Mutex<bool> = Mutex::new(true);
        let hanging = |path: &Path| {
            while path.ends_with("hangs") && *HANGS.lock() {
                std::thread::sleep(Duration::from_millis(1));
            }
            ask(path)
        };
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::fs::write(real.join("file"), "").unwrap();
        let link = real.join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let hangs = link.join("hangs");
        let hints = Hints {
            file: vec![Entry::new(&hangs), Entry::new(link.join("file"))],
            directory: vec![Entry::new("/")],
            glob: vec![Entry::new(link.join("*.h5")), Entry::new("/*.h5")],
            ..Hints::default()
        };
        let paths = Paths::asked(&hints, Duration::from_secs(1), hanging);
        assert_eq!(paths.silent(), std::slice::from_ref(&hangs));
        let said: Vec<String> = hints.warnings(&paths).iter().map(|warning| warning.to_string()).collect();
        assert!(
            said.len() == 1 && said[0].starts_with("File[0].Path: ") && said[0].contains("does not answer"),
            "{said:?}"
        );
        let lookup = Lookup::new(&hints, &paths);
        for (path, key) in [(&hangs, "File[0]"), (&real.join("file"), "File[1]"), (&real.join("a.h5"), "Glob[0]")] {
            assert_eq!(lookup.find(path).map(|found| found.key.as_str()), Some(key), "{}", path.display());
        }
        let again = Paths::asked(&hints, Duration::from_secs(600), hanging);
        assert_eq!((again.silent(), again.answers.len()), (std::slice::from_ref(&hangs), 1), "at once");
        let others = Hints { file: hints.file[1..].to_vec(), ..hints.clone() };
        assert!(Paths::asked(&others, Duration::from_secs(600), hanging).silent().is_empty());
        *HANGS.lock() = false;
        impresario_testing::until("it is answered at last", || unanswered(std::slice::from_ref(&hangs)).0.is_empty());
        assert!(Paths::of(&hints).silent().is_empty());
    }

    #[test]
    fn paths_that_are_not_asked_for_since_others_hang_are_not_said_to_hang() {
        let before: Vec<_> = (0..UNANSWERED_MAX).map(|n| Arc::new(PathBuf::from(format!("/{n}")))).collect();
        let (hangs, other) = (PathBuf::from("/3"), PathBuf::from("/other"));
        let why = |of: &[PathBuf]| among(of, &before);
        assert_eq!(why(&[hangs.clone(), other.clone()]), (vec![hangs], false));
        assert_eq!(why(std::slice::from_ref(&other)), (vec![other], true));
    }

    /// More folders of a mount hang than there are threads: what is on other mounts is asked for all the same, and first.
    #[test]
    fn a_mount_that_hangs_takes_no_other_ones_turn() {
        let mounts = MountPoints(["/", "/hung", "/good", "/good/hung"].map(PathBuf::from).to_vec());
        for (path, number) in [("/x", 0), ("/hungry", 0), ("/hung/x", 1), ("/good/x/y", 2), ("/good/hung/x", 3)] {
            assert_eq!(mounts.of(Path::new(path)), number, "{path}");
        }
        let hung = (0..500).map(|n| PathBuf::from(format!("/{}hung/{n}/file", ["", "good/"][n % 2])));
        let good: Vec<PathBuf> = (0..50).map(|n| PathBuf::from(format!("/good/{}/{n}", n % 5))).collect();
        let mut questions = Questions::new(hung.chain(good.clone()), &[], &mounts);
        // Each thread that asks for what hangs is lost.
        let (mut lost, mut answered) = (Vec::new(), Vec::new());
        while lost.len() < THREADS {
            let path = questions.next().unwrap();
            if path.to_str().unwrap().contains("hung/") {
                lost.push(path);
            } else {
                answered.push(path.to_path_buf());
            }
        }
        answered.sort_unstable();
        let mut all = good;
        all.sort_unstable();
        assert_eq!(answered, all);
        // With more mounts that hang than threads, it is the others that are not asked for.
        let many: Vec<PathBuf> = (0..=THREADS).map(|n| PathBuf::from(format!("/{n}"))).collect();
        let mut questions =
            Questions::new(many.iter().map(|mount| mount.join("x/file")), &[], &MountPoints(many.clone()));
        let lost: Vec<_> = (0..THREADS).filter_map(|_| questions.next()).collect();
        assert_eq!((lost.len(), questions.left.len()), (THREADS, 1));
    }

    /// More files of a folder hang than there are threads: what is elsewhere is asked for all the same.
    #[test]
    fn a_folder_that_hangs_takes_no_other_ones_turn() {
        static HANGS: Mutex<bool> = Mutex::new(true);
        let hanging = |path: &Path| {
            while path.starts_with("/of-a-folder-that-hangs") && *HANGS.lock() {
                std::thread::sleep(Duration::from_millis(1));
            }
            ask(path)
        };
        let dir = tempfile::tempdir().unwrap();
        let good = dir.path().canonicalize().unwrap().join("zlocal");
        std::fs::write(&good, "").unwrap();
        let hung = (0..=THREADS).map(|n| Entry::new(format!("/of-a-folder-that-hangs/{n}")));
        let hints = Hints { file: hung.chain([Entry::new(&good)]).collect(), ..Hints::default() };
        let paths = Paths::asked(&hints, Duration::from_secs(1), hanging);
        *HANGS.lock() = false;
        assert!(paths.there(&good).is_some_and(|there| there.is_ok()), "{paths:?}");
        let (unasked, hang): (Vec<_>, Vec<_>) =
            paths.silent().iter().partition(|path| paths.why_silent(path).contains("too many paths"));
        assert_eq!((unasked.len(), hang.len()), (1, THREADS), "{paths:?}");
    }
}
