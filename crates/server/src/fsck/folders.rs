//! Names and objects of folders that no server serves. Each folder is locked while it is checked.

use std::path::Path;
use std::time::Duration;

use impresario_config::{Config, Data, META_NAME};
use impresario_store::{FileSystem, ObjectStore, Scrubbed, StoreError, StoreOptions};
use impresario_wire::{Examine, FileKey, FileRecord};

use super::{Finding, Kind, Looked, Names, Objects, Outcome, Page, Report, Sides, Unscrubbed};
use crate::folders::{Folder, State, place_of, survey};
use crate::meta::{IdleFolder, Stores};

/// Objects that are looked at together.
const PAGE_OBJECTS: usize = 4096;

/// Opens the folders of a configuration that are on this machine; of data servers, of those that are wanted.
pub(super) fn open(config: &Config, wants: impl Fn(&Data) -> bool, report: &mut Report) -> Sides {
    let mut folders = survey(config);
    let mut take = |name: &str, dir: &Path| {
        let at = folders.iter().position(|folder| folder.name == name && folder.dir == dir)?;
        Some(folders.swap_remove(at))
    };
    let meta = take(META_NAME, &config.meta.dir).and_then(|folder| usable(folder, report));
    let known = meta.as_ref().and_then(|_| Stores::open(&config.meta.dir).ok());
    let cluster =
        meta.as_ref().and_then(|state| if let State::Made { cluster, .. } = state { Some(*cluster) } else { None });
    let names = meta.and_then(|_| match IdleFolder::open(&config.meta.dir) {
        Ok(folder) => Some(Box::new(folder) as Box<dyn Names>),
        Err(error) => {
            report.unchecked.push(format!("{error}; or check the running servers with --online"));
            None
        }
    });
    let mut open = |number: usize, folder: Folder| {
        let (name, dir) = (folder.name.clone(), folder.dir.clone());
        let State::Made { cluster: its, server, store } = usable(folder, report)? else { return None };
        let wanted = known.as_ref().and_then(|known| known.known().get(&name).copied());
        let is_ours = server == name && cluster.is_none_or(|cluster| cluster == its);
        if !is_ours || wanted.is_some_and(|wanted| Some(wanted) != store) {
            let what = format!(
                "the folder {} is not the one that the cluster knows of this server: is the right disk mounted?",
                dir.display()
            );
            report.add(finding(Kind::Identity, &name, what));
            return None;
        }
        match ObjectStore::open(&dir, &name, StoreOptions::default()) {
            Ok(store) if !has_place(&store, number) => {
                let what = "its section [[data]] has another place in the configuration than its folder says: write the sections in \
                            the order that they had";
                report.add(finding(Kind::Identity, &name, what.into()));
                None
            }
            Ok(store) => Some(Box::new(store) as Box<dyn Objects>),
            Err(error) => {
                let remedy = match error {
                    StoreError::InUse { .. } => "; or check the running servers with --online",
                    _ => "",
                };
                report.unchecked.push(format!("{name}: {error}{remedy}"));
                None
            }
        }
    };
    // Of a server that moves there may be two: the one that it serves from counts.
    let serving = |data: &Data| place_of(data).map_or_else(|_| data.dir.clone(), |place| place.dir);
    let objects = config.data.iter().enumerate();
    let objects = objects.map(|(number, data)| match wants(data) {
        true => open(number, take(&data.name, &serving(data))?),
        false => None,
    });
    let objects = objects.collect();
    Sides { names, objects }
}

/// Whether a folder is that of the data server with this number, or says nothing of it.
fn has_place(store: &ObjectStore, number: usize) -> bool {
    !matches!(store.number(), Ok(Some(noted)) if usize::from(noted) != number)
}

fn finding(kind: Kind, server: &str, what: String) -> Finding {
    Finding { kind, outcome: Outcome::Left, server: Some(server.into()), path: None, key: None, what }
}

/// What a folder is, if it can be checked.
fn usable(folder: Folder, report: &mut Report) -> Option<State> {
    let Folder { name, dir, state } = folder;
    let why = match state {
        Ok(state @ State::Made { .. }) => return Some(state),
        Ok(State::Blank) => {
            "is empty or not on this machine; check it where it is, or all servers with --online".into()
        }
        Ok(State::Older) => "is of an older version; see `impresario store adopt`".into(),
        Err(error) => format!("cannot be used: {error}"),
    };
    report.unchecked.push(format!("{name}: the folder {} {why}", dir.display()));
    None
}

impl Names for IdleFolder {
    fn key_prefix(&self) -> Option<u64> {
        Some(IdleFolder::key_prefix(self))
    }

    fn keys_issued(&self) -> Option<u64> {
        Some(IdleFolder::keys_issued(self))
    }

    fn are_keys_damaged(&self) -> bool {
        IdleFolder::are_keys_damaged(self)
    }

    fn count_keys(&mut self, issued: u64) -> Result<(), String> {
        IdleFolder::count_keys(self, issued).map_err(|fault| fault.message)
    }

    fn examine(&mut self, what: Examine) -> Result<Looked, String> {
        let entries = IdleFolder::examine(self, &what).map_err(|fault| fault.message)?;
        let renamed = match what {
            Examine::EndWalk { .. } => self.spares().map_err(|fault| fault.message)?,
            _ => Vec::new(),
        };
        Ok(Looked { entries, renamed, is_sure: true, ..Looked::default() })
    }

    fn settle(&mut self, path: &[u8], size: u64, file: FileKey) -> Result<(), String> {
        IdleFolder::settle(self, path, size, file).map_err(|fault| fault.message)
    }

    fn finish_removal(&mut self, file: &FileRecord, has_name: bool) -> Result<bool, String> {
        let done = match has_name {
            true => self.cancel_removal(file.file),
            false => IdleFolder::finish_removal(self, file.file),
        };
        done.map(|()| true).map_err(|fault| fault.message)
    }
}

impl<F: FileSystem> Objects for ObjectStore<F> {
    fn page(&mut self, from: u64) -> Result<Page, String> {
        let page = ObjectStore::page(self, from, PAGE_OBJECTS).map_err(|error| error.to_string())?;
        let mut foreign = page.foreign;
        if from == 0 {
            foreign.extend(self.foreign_at_top().map_err(|error| error.to_string())?);
        }
        let objects = page.objects.into_iter().map(|(key, state)| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
            (key, state.size, now.saturating_sub(u64::try_from(state.mtime_secs).unwrap_or(0)))
        });
        Ok(Page { objects: objects.collect(), foreign, next: page.next })
    }

    fn look(&mut self, key: u64) -> Result<Option<u64>, String> {
        let state = ObjectStore::look(self, key).map_err(|error| error.to_string())?;
        Ok(state.map(|state| state.size))
    }

    fn remove(&mut self, key: u64, for_good: bool) -> Result<(), String> {
        let removed = if for_good { self.unlink(key) } else { self.set_aside(key) };
        removed.map_err(|error| error.to_string())
    }

    fn scrub(&mut self, key: u64, offset: u64, max_bytes: u64) -> Result<Option<Scrubbed>, Unscrubbed> {
        let found = ObjectStore::scrub(self, key, offset, max_bytes).map_err(|error| Unscrubbed {
            is_of_piece: error.raw_os_error() == Some(libc::EIO),
            why: error.to_string(),
        })?;
        let mut relieved = Ok(());
        self.relieve(|key, error| {
            relieved =
                Err(Unscrubbed { why: format!("object {key:016x} cannot be synced: {error}"), is_of_piece: false });
        });
        relieved.map(|()| found)
    }

    fn end_scrub(&mut self) -> Result<(), String> {
        let mut ended = Ok(());
        self.settle_older(Duration::ZERO, |key, error| {
            ended = Err(format!("object {key:016x} cannot be synced: {error}"));
        });
        ended
    }
}
