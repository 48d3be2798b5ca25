//! What programs of the run have changed and nobody has synced: what `sync` and `syncfs` have to make durable, also when it
//! was closed since and its programs have ended.

use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_client::{Client, ClientError, File};
use impresario_layout::Layout;
use impresario_wire::FileKey;
use rustc_hash::FxHashMap;

use crate::open::{Moves, moved};

/// Files, and directories, that are remembered. For each one more, another is synced at once.
const CHANGED_MAX: usize = 16_384;
/// Syncs at a time.
const AT_ONCE: usize = 8;

/// What was changed.
#[derive(Default)]
pub(crate) struct Unsynced {
    changed: Mutex<Changed>,
}

#[derive(Default)]
struct Changed {
    /// By the number of the inode.
    files: FxHashMap<u64, ChangedFile>,
    /// The last change of each directory, by its path.
    directories: FxHashMap<Vec<u8>, u64>,
    /// Counts changes.
    changes: u64,
    /// What had to make room and could not be synced.
    failed: Option<ClientError>,
}

/// A file with bytes or attributes that are not synced.
#[derive(Clone)]
struct ChangedFile {
    path: Vec<u8>,
    /// Which file it is; `None`: it was changed by its path.
    file: Option<(FileKey, Layout)>,
    last_change: u64,
}

/// Something to be synced, as it was when the sync began.
enum Task {
    File(u64, ChangedFile),
    Directory(Vec<u8>, u64),
}

impl Changed {
    fn count(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    /// It is durable, but for what was changed since.
    fn settle(&mut self, task: &Task) {
        match task {
            Task::File(ino, synced) => self.settle_file(*ino, synced.last_change),
            Task::Directory(path, last_change) if self.directories.get(path) == Some(last_change) => {
                self.directories.remove(path);
            }
            Task::Directory(..) => {}
        }
    }

    fn settle_file(&mut self, ino: u64, last_change: u64) {
        if self.files.get(&ino).is_some_and(|file| file.last_change == last_change) {
            self.files.remove(&ino);
        }
    }
}

impl Unsynced {
    /// A file was changed.
    pub(crate) fn note_file(&self, client: &Arc<Client>, ino: u64, path: &[u8], file: Option<&File>) {
        let mut changed = self.changed.lock();
        let last_change = changed.count();
        let file = file.map(|file| (file.key(), file.layout()));
        if let Some(known) = changed.files.get_mut(&ino) {
            known.last_change = last_change;
            known.file = file.or(known.file);
            return;
        }
        let over = changed.files.len() >= CHANGED_MAX;
        let over = if over { changed.files.keys().next().copied() } else { None };
        let over = over.and_then(|ino| changed.files.remove(&ino).map(|file| Task::File(ino, file)));
        changed.files.insert(ino, ChangedFile { path: path.to_vec(), file, last_change });
        drop(changed);
        self.make_room(client, over);
    }

    /// Names in a directory were changed, or its attributes.
    pub(crate) fn note_directory(&self, client: &Arc<Client>, path: &[u8]) {
        let mut changed = self.changed.lock();
        let last_change = changed.count();
        if let Some(known) = changed.directories.get_mut(path) {
            *known = last_change;
            return;
        }
        let over = changed.directories.len() >= CHANGED_MAX;
        let over = if over { changed.directories.keys().next().cloned() } else { None };
        let over =
            over.and_then(|path| changed.directories.remove_entry(&path)).map(|(path, at)| Task::Directory(path, at));
        changed.directories.insert(path.to_vec(), last_change);
        drop(changed);
        self.make_room(client, over);
    }

    fn make_room(&self, client: &Arc<Client>, task: Option<Task>) {
        if let Some(Err(error)) = task.map(|task| task.sync(client)) {
            tracing::warn!(%error, "a sync of what was changed long ago");
            self.changed.lock().failed = Some(error);
        }
    }

    /// A file is gone: nothing of it is left to do.
    pub(crate) fn forget(&self, ino: u64) {
        self.changed.lock().files.remove(&ino);
    }

    /// What had a path before has another one now.
    pub(crate) fn note_moves(&self, moves: Moves<'_>) {
        let mut changed = self.changed.lock();
        for file in changed.files.values_mut() {
            if let Some(to) = moved(moves, &file.path) {
                file.path = to;
            }
        }
        let directories = std::mem::take(&mut changed.directories);
        let now = directories.into_iter().map(|(path, at)| (moved(moves, &path).unwrap_or(path), at));
        changed.directories = now.collect();
    }

    /// Syncs an open file.
    pub(crate) fn sync_file(&self, ino: u64, file: &File) -> Result<(), ClientError> {
        let last_change = self.changed.lock().files.get(&ino).map(|file| file.last_change);
        file.sync()?;
        if let Some(last_change) = last_change {
            self.changed.lock().settle_file(ino, last_change);
        }
        Ok(())
    }

    /// Makes everything durable that was changed before.
    ///
    /// # Errors
    /// The first failure. Where data were lost, the rest is synced all the same; when a server does not answer, it is not waited
    /// for again and again. What was not synced is left to the next one.
    pub(crate) fn sync(&self, client: &Arc<Client>) -> Result<(), ClientError> {
        let mut changed = self.changed.lock();
        let first = changed.failed.take();
        let files = changed.files.iter().map(|(ino, file)| Task::File(*ino, file.clone()));
        let directories = changed.directories.iter().map(|(path, at)| Task::Directory(path.clone(), *at));
        let tasks: Vec<Task> = directories.chain(files).collect();
        drop(changed);
        let (threads, tasks, failed) = (AT_ONCE.min(tasks.len()), Mutex::new(tasks), Mutex::new(first));
        let work = || {
            loop {
                if failed.lock().as_ref().is_some_and(|error| !is_loss(error)) {
                    return;
                }
                let Some(task) = tasks.lock().pop() else { return };
                match task.sync(client) {
                    Ok(()) => self.changed.lock().settle(&task),
                    Err(error) => {
                        let mut failed = failed.lock();
                        if failed.as_ref().is_none_or(|first| is_loss(first) && !is_loss(&error)) {
                            *failed = Some(error);
                        }
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // Without a thread, the others and this one do the work.
                let _ = std::thread::Builder::new().name("sync".into()).spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().map_or(Ok(()), Err)
    }
}

impl Task {
    fn sync(&self, client: &Arc<Client>) -> Result<(), ClientError> {
        let synced = match self {
            Task::Directory(path, _) => client.sync_dir(path),
            Task::File(_, changed) => changed.sync(client),
        };
        // What was removed has nothing to be made durable.
        synced.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })
    }
}

impl ChangedFile {
    fn sync(&self, client: &Arc<Client>) -> Result<(), ClientError> {
        match client.open(&self.path, false) {
            Ok(file) if self.file.is_none_or(|(key, _)| key == file.key()) => {
                let synced = file.sync();
                file.close()?;
                synced
            }
            Err(error) if !is_gone(&error) => Err(error),
            // Others have moved or removed it: its bytes can be synced all the same.
            _ => self.file.map_or(Ok(()), |(key, layout)| client.sync_data(key, &layout)),
        }
    }
}

fn is_gone(error: &ClientError) -> bool {
    matches!(error.errno(), libc::ENOENT | libc::ENOTDIR | libc::EISDIR | libc::ELOOP | libc::ESTALE)
}

fn is_loss(error: &ClientError) -> bool {
    matches!(error, ClientError::UnsyncedLost { .. })
}
