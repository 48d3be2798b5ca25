//! What is compared with what, and what is repaired.
//!
//! First the objects are listed, then the names are walked. Then:
//!
//! - An object that no name accounts for is an **orphan**. While servers run, a file may have been made, removed or renamed
//!   meanwhile, so an object counts only if it was there before the walk, is there after it, its file is not among those
//!   that lost their last name, and none of the files renamed during the walk is its file. If directories were renamed, the
//!   walk is repeated, and after some attempts the object is not judged.
//! - A file whose objects are **missing**, or say another **length**, is only suspected at first. It is confirmed when the
//!   objects still say so, and the file was the same before and after they were asked, had no writer then, and has not been
//!   changed in between.
//! - A file with another number of **links** than names is counted again in a second walk (`links`).
//!
//! Repaired is what loses nothing: orphans are set aside (or removed, when asked to); a length is taken from the objects,
//! which hold the data, if it grows; removals and writes that a stopped server left are finished when no server runs.
//! Nothing is repaired that rests on what could not be checked.

use std::time::{Duration, Instant};

use impresario_config::Config;
use impresario_wire::{Examine, Examined, FileKey, FileRecord, NodeKind};
use rustc_hash::{FxHashMap, FxHashSet};

use super::links::Links;
use super::report::Draining;
use super::{Finding, Kind, Options, Outcome, Report, Sides};
use crate::meta::{COUNT_BITS, KEYS_WITHOUT_OBJECTS};

/// Entries that are asked for at once.
const ENTRIES: u32 = 1000;
/// How often names are walked until a walk has certainly missed nothing.
const WALKS_MAX: usize = 4;
/// How often a directory is asked for again that could not be examined but is there.
const DIRECTORY_TRIES: u32 = 10;
/// How often it is told how far the check is.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Files that are suspected at once; of more, the check says so.
const SUSPECTS_MAX: usize = 1 << 20;

struct Check<'a> {
    config: &'a Config,
    options: &'a Options,
    sides: Sides,
    report: &'a mut Report,
    tell: &'a mut dyn FnMut(&str),
    told: Instant,
    /// Of each data server; `None`: not known, so nothing is said of its objects.
    objects: Vec<Option<Listed>>,
    suspects: Vec<(Vec<u8>, FileKey)>,
    /// Files with a name in `orphans/` or `writers/`, and the path at which the walk met them.
    removed: FxHashMap<FileKey, (FileRecord, bool)>,
    marked: FxHashMap<FileKey, (FileRecord, Option<Vec<u8>>)>,
    links: Links,
    /// Names in `orphans/` and `writers/` that were told.
    told_unnamed: FxHashSet<String>,
    /// A file has no record, or one that cannot be read: its objects may be any.
    is_blind: bool,
    /// The greatest key of a file, among those of the metadata folder.
    last_key: Option<u64>,
}

/// The objects of a data server, by key.
struct Listed {
    objects: Vec<Object>,
}

struct Object {
    key: u64,
    size: u64,
    is_old: bool,
    has_file: bool,
}

impl Listed {
    fn find(&mut self, key: FileKey) -> Option<&mut Object> {
        let at = self.objects.binary_search_by_key(&key.0, |object| object.key).ok()?;
        self.objects.get_mut(at)
    }
}

pub(super) fn run(config: &Config, options: &Options, sides: Sides, report: &mut Report, tell: &mut dyn FnMut(&str)) {
    let objects = config.data.iter().map(|_| None).collect();
    report.draining = Draining::of(config);
    let (suspects, removed, marked, links, told_unnamed) = Default::default();
    let told = Instant::now();
    let mut check = Check {
        config,
        options,
        sides,
        report,
        tell,
        told,
        objects,
        suspects,
        removed,
        marked,
        links,
        told_unnamed,
        is_blind: false,
        last_key: None,
    };
    for server in 0..config.data.len() {
        check.list(server);
    }
    if check.sides.names.is_none() {
        return;
    }
    match check.walk_until_sure() {
        Ok(is_sure) => {
            check.judge_keys();
            check.judge_orphans(is_sure);
        }
        // Objects without a file cannot be told from others.
        Err(why) => return check.report.unchecked.push(why),
    }
    check.judge_suspects();
    check.finish_what_was_left();
}

impl Check<'_> {
    fn tell(&mut self) {
        if self.told.elapsed() >= TELL_EVERY {
            self.told = Instant::now();
            let Report { objects, files, directories, .. } = self.report;
            (self.tell)(&format!("{objects} objects, {files} files in {directories} directories so far"));
        }
    }

    fn name_of(&self, server: usize) -> String {
        self.config.data.get(server).map(|data| data.name.clone()).unwrap_or_default()
    }

    fn add(&mut self, kind: Kind, outcome: Outcome, server: Option<usize>, key: Option<u64>, what: String) {
        let server = server.map(|server| self.name_of(server));
        self.report.add(Finding { kind, outcome, server, path: None, key, what });
    }

    fn add_file(&mut self, kind: Kind, outcome: Outcome, path: &[u8], key: Option<FileKey>, what: String) {
        let path = Some(String::from_utf8_lossy(path).into_owned());
        self.report.add(Finding { kind, outcome, server: None, path, key: key.map(|key| key.0), what });
    }

    /// Lists the objects of a data server.
    fn list(&mut self, server: usize) {
        let mut objects = Vec::new();
        let mut from = Some(0);
        while let Some(key) = from {
            let Some(Some(side)) = self.sides.objects.get_mut(server) else { return };
            let page = match side.page(key) {
                Ok(page) => page,
                Err(error) => return self.report.unchecked.push(format!("{}: {error}", self.name_of(server))),
            };
            let young_s = self.options.min_age.as_secs();
            for (key, size, age_s) in page.objects {
                self.report.objects += 1;
                self.report.object_bytes += size;
                objects.push(Object { key, size, is_old: age_s >= young_s, has_file: false });
            }
            for name in page.foreign {
                let what = format!("{name} in its folder is not its own; look what it is and move it away");
                self.add(Kind::ForeignFile, Outcome::Left, Some(server), None, what);
            }
            from = page.next;
            self.tell();
        }
        objects.sort_unstable_by_key(|object| object.key);
        if let Some(draining) = self.report.draining.iter_mut().find(|draining| draining.number == server) {
            draining.objects = Some((objects.len() as u64, objects.iter().map(|object| object.size).sum()));
        }
        if let Some(listed) = self.objects.get_mut(server) {
            *listed = Some(Listed { objects });
        }
    }

    fn examine(&mut self, what: Examine) -> Result<super::Looked, String> {
        self.sides.names.as_mut().ok_or("there are no names")?.examine(what)
    }

    /// Walks the names until a walk has certainly missed nothing; false if none has.
    fn walk_until_sure(&mut self) -> Result<bool, String> {
        let mut is_sure = false;
        for attempt in 0..WALKS_MAX {
            self.links.begin_walk();
            let walk = self.examine(Examine::BeginWalk)?.walk;
            self.look_at_unnamed()?;
            self.walk(attempt == 0)?;
            self.look_at_unnamed()?;
            let ended = self.examine(Examine::EndWalk { walk })?;
            ended.renamed.iter().for_each(|key| self.has_file(*key));
            is_sure |= ended.is_sure;
            if attempt == 0 {
                self.report.counts_all_draining = ended.is_sure && ended.renamed.is_empty();
            }
            for wrong in self.links.end_walk(&ended.renamed, ended.is_sure) {
                if self.record_of(&wrong.path, wrong.key)?.is_some_and(|record| wrong.is_still(&record)) {
                    self.add_file(Kind::Links, Outcome::Left, &wrong.path, Some(wrong.key), wrong.what);
                }
            }
            if is_sure && self.links.suspects() == 0 {
                return Ok(true);
            }
        }
        self.report.uncounted = self.links.suspects() as u64;
        Ok(is_sure)
    }

    /// Notes that the objects of this key are a file's.
    fn has_file(&mut self, key: FileKey) {
        let prefix = self.sides.names.as_ref().and_then(|names| names.key_prefix());
        if prefix == Some(key.0 >> COUNT_BITS) {
            self.last_key = self.last_key.max(Some(key.0));
        }
        for listed in self.objects.iter_mut().flatten() {
            listed.find(key).into_iter().for_each(|object| object.has_file = true);
        }
    }

    fn look_at_unnamed(&mut self) -> Result<(), String> {
        for removed in [true, false] {
            let mut after = Vec::new();
            loop {
                let entries = self.examine(Examine::Unnamed { removed, after: after.clone(), max: ENTRIES })?.entries;
                let Some(last) = entries.last() else { break };
                after.clone_from(&last.name);
                for entry in entries {
                    self.note_unnamed(removed, entry);
                }
                self.tell();
            }
        }
        Ok(())
    }

    fn note_unnamed(&mut self, removed: bool, entry: Examined) {
        let folder = if removed { "orphans/" } else { "writers/" };
        let name = format!("{folder}{}", String::from_utf8_lossy(&entry.name));
        match entry.file {
            Some(Ok(record)) if entry.kind == Some(NodeKind::File) => {
                self.has_file(record.file);
                match removed {
                    true => drop(self.removed.entry(record.file).or_insert((record, false))),
                    false => drop(self.marked.entry(record.file).or_insert((record, None))),
                }
            }
            // Its making got no further than this; it has no objects.
            Some(Err(_)) if entry.kind.is_none() => {}
            _ if !self.told_unnamed.insert(name.clone()) => {}
            Some(Err(why)) => {
                self.is_blind = true;
                self.add(Kind::Record, Outcome::Left, None, None, format!("{name}: {why}"));
            }
            _ => {
                let what = format!("{name} in the metadata folder is not its own; look what it is and move it away");
                self.add(Kind::ForeignFile, Outcome::Left, None, None, what);
            }
        }
    }

    /// Walks all directories. The first walk also judges the files.
    fn walk(&mut self, judges: bool) -> Result<(), String> {
        let mut directories = vec![Vec::new()];
        while let Some(directory) = directories.pop() {
            self.report.directories += u64::from(judges);
            let mut after = Vec::new();
            let mut tries = 0..DIRECTORY_TRIES;
            loop {
                let what = Examine::Directory { path: directory.clone(), after: after.clone(), max: ENTRIES };
                let entries = match self.examine(what) {
                    Ok(looked) => looked.entries,
                    // Removed or renamed meanwhile: the next walk, or the list of renamed files, knows.
                    Err(_) if self.options.online && !self.is_there(&directory)? => break,
                    // Renamed away and back between the two questions.
                    Err(_) if self.options.online && tries.next().is_some() => continue,
                    Err(error) => return Err(error),
                };
                let Some(last) = entries.last() else { break };
                after.clone_from(&last.name);
                for entry in entries {
                    let mut path = directory.clone();
                    path.extend((!path.is_empty()).then_some(b'/'));
                    path.extend(&entry.name);
                    match (entry.kind, entry.file) {
                        (Some(NodeKind::Dir), _) => directories.push(path),
                        (_, Some(Ok(record))) => self.met(path, &record, judges),
                        (_, Some(Err(why))) => {
                            self.is_blind = true;
                            if judges {
                                self.add_file(Kind::Record, Outcome::Left, &path, None, why);
                            }
                        }
                        // Links, pipes, sockets and devices have no objects.
                        (Some(_), None) => {}
                        (None, None) => {
                            if judges {
                                let what = "it is nothing that a name space has; remove it in the metadata folder";
                                self.add_file(Kind::ForeignFile, Outcome::Left, &path, None, what.into());
                            }
                        }
                    }
                }
                self.tell();
            }
        }
        Ok(())
    }

    fn is_there(&mut self, directory: &[u8]) -> Result<bool, String> {
        if directory.is_empty() {
            return Ok(true);
        }
        let entries = self.examine(Examine::File { path: directory.into() })?.entries;
        Ok(entries.first().is_some_and(|entry| entry.kind == Some(NodeKind::Dir)))
    }

    /// The walk has met a file.
    fn met(&mut self, path: Vec<u8>, record: &FileRecord, judges: bool) {
        self.has_file(record.file);
        if let Some((_, has_name)) = self.removed.get_mut(&record.file) {
            *has_name = true;
        }
        if let Some((_, named)) = self.marked.get_mut(&record.file) {
            *named = Some(path.clone());
        }
        let is_first = self.links.met(&path, record);
        if !judges || !is_first {
            return;
        }
        self.report.files += 1;
        // A file of a time when there were fewer servers keeps them.
        if usize::from(record.layout.servers) > self.config.data.len() {
            let what = format!(
                "it is striped in a cluster of {} data servers; the configuration has {}",
                record.layout.servers,
                self.config.data.len()
            );
            return self.add_file(Kind::Record, Outcome::Left, &path, Some(record.file), what);
        }
        let mut size = Some(0);
        let (mut is_missing, mut retired) = (false, None);
        for k in 0..record.layout.pcount {
            let server = usize::from(record.layout.server_at(k));
            if let Some(draining) = self.report.draining.iter_mut().find(|draining| draining.number == server) {
                draining.files += 1;
            }
            retired = retired.or(self.config.data.get(server).filter(|data| data.is_retired()));
            let Some(Some(listed)) = self.objects.get_mut(server) else {
                size = None;
                continue;
            };
            match listed.find(record.file) {
                Some(object) => size = size.map(|size: u64| size.max(record.layout.file_len(k, object.size))),
                None => is_missing |= has(record, k),
            }
        }
        if let Some(data) = retired {
            let what =
                format!("it is striped over {}, which is retired: make it draining again, and start it", data.name);
            return self.add_file(Kind::Missing, Outcome::Left, &path, Some(record.file), what);
        }
        let is_other = !record.is_marked && size.is_some_and(|size| size != record.size);
        if (is_missing || is_other) && self.suspects.len() < SUSPECTS_MAX {
            self.suspects.push((path, record.file));
            if self.suspects.len() == SUSPECTS_MAX {
                let why = "more files are suspected than are looked at in one check; check again after this";
                self.report.unchecked.push(why.into());
            }
        }
    }

    /// A metadata folder that was restored from a copy would give new files the keys, and so the objects, of files that were made
    /// after the copy; one whose count of keys is damaged gives none.
    fn judge_keys(&mut self) {
        let Some(names) = &mut self.sides.names else { return };
        let (Some(prefix), Some(issued)) = (names.key_prefix(), names.keys_issued()) else { return };
        let keys = self.objects.iter().flatten().flat_map(|listed| &listed.objects).map(|object| object.key);
        let keys = keys.filter(|key| key >> COUNT_BITS == prefix).chain(self.last_key);
        let last = keys.max().map(|key| key & ((1 << COUNT_BITS) - 1));
        let is_damaged = names.are_keys_damaged();
        let last = match last.filter(|last| *last >= issued) {
            Some(last) => last,
            None if is_damaged => 0,
            None => return,
        };
        let what = match is_damaged {
            true => {
                "the file `keys` of the metadata folder is damaged: how many keys were issued is not known, and its server does not start"
            }
            false => {
                "the metadata folder is older than the data servers' objects, as one that was restored from a copy is: new files would get \
                      objects of lost ones"
            }
        };
        let mut what = what.to_string();
        let outcome = match self.options.repair {
            true => match names.count_keys(last + KEYS_WITHOUT_OBJECTS) {
                Ok(()) => Outcome::Repaired,
                Err(error) => {
                    what += &format!("; {error}");
                    Outcome::Left
                }
            },
            false => Outcome::Repairable,
        };
        self.add(Kind::Keys, outcome, None, None, what);
    }

    fn judge_orphans(&mut self, is_sure: bool) {
        let prefix = self.sides.names.as_ref().and_then(|names| names.key_prefix());
        for server in 0..self.objects.len() {
            let Some(Some(listed)) = self.objects.get(server) else { continue };
            let without = listed.objects.iter().filter(|object| !object.has_file);
            let without: Vec<(u64, u64, bool)> =
                without.map(|object| (object.key, object.size, object.is_old)).collect();
            for (key, size, is_old) in without {
                self.judge_orphan(server, (key, size, is_old), prefix, is_sure);
                self.tell();
            }
        }
    }

    fn judge_orphan(
        &mut self,
        server: usize,
        (key, size, is_old): (u64, u64, bool),
        prefix: Option<u64>,
        is_sure: bool,
    ) {
        let Some(Some(side)) = self.sides.objects.get_mut(server) else { return };
        match side.look(key) {
            Ok(Some(_)) => {}
            // Its file was removed meanwhile.
            Ok(None) => return,
            Err(error) => return self.report.unchecked.push(format!("{}: {error}", self.name_of(server))),
        }
        if prefix.is_some_and(|prefix| key >> COUNT_BITS != prefix) {
            let what = format!("its key is of another cluster ({size} bytes); was its disk mounted here?");
            return self.add(Kind::ForeignObject, Outcome::Left, Some(server), Some(key), what);
        }
        if !is_old {
            self.report.young += 1;
            return;
        }
        if !is_sure {
            self.report.in_doubt += 1;
            return;
        }
        if self.is_blind {
            let what = format!(
                "no file is known to have it ({size} bytes), but some files' records are missing or cannot be read"
            );
            return self.add(Kind::Orphan, Outcome::Left, Some(server), Some(key), what);
        }
        let is_for_good = self.options.delete_orphans;
        let mut what = format!("it belongs to no file ({size} bytes)");
        let outcome = match (self.options.repair, self.sides.objects.get_mut(server)) {
            (true, Some(Some(side))) => match side.remove(key, is_for_good) {
                Ok(()) => {
                    what +=
                        if is_for_good { "; removed" } else { "; moved to `set-aside` in the folder of its server" };
                    Outcome::Repaired
                }
                Err(error) => {
                    what += &format!("; it cannot be moved: {error}");
                    Outcome::Left
                }
            },
            _ => Outcome::Repairable,
        };
        self.add(Kind::Orphan, outcome, Some(server), Some(key), what);
    }

    fn judge_suspects(&mut self) {
        for (path, key) in std::mem::take(&mut self.suspects) {
            if let Err(error) = self.judge_suspect(&path, key) {
                self.report.unchecked.push(format!("{}: {error}", String::from_utf8_lossy(&path)));
            }
            self.tell();
        }
    }

    /// What is kept of a file, if it is still the one of that key.
    fn record_of(&mut self, path: &[u8], key: FileKey) -> Result<Option<FileRecord>, String> {
        let entry = self.examine(Examine::File { path: path.into() })?.entries.pop();
        let record = entry.and_then(|entry| entry.file.and_then(Result::ok));
        Ok(record.filter(|record| record.file == key))
    }

    /// The lengths of the objects of a file, by position; an error if one of its data servers cannot be asked.
    fn lens_of(&mut self, record: &FileRecord) -> Result<Vec<Option<u64>>, String> {
        let lens = (0..record.layout.pcount).map(|k| {
            let server = usize::from(record.layout.server_at(k));
            let side = self.sides.objects.get_mut(server).and_then(Option::as_mut);
            side.ok_or_else(|| "one of its data servers cannot be asked".to_string())?.look(record.file.0)
        });
        lens.collect()
    }

    fn judge_suspect(&mut self, path: &[u8], key: FileKey) -> Result<(), String> {
        let Some(before) = self.record_of(path, key)? else { return Ok(()) };
        // A data server that cannot be asked hides the length, but not what others have lost.
        let mut lost = Vec::new();
        let (mut size, mut is_whole) = (0, true);
        for k in 0..before.layout.pcount {
            let server = usize::from(before.layout.server_at(k));
            let Some(Some(side)) = self.sides.objects.get_mut(server) else {
                is_whole = false;
                continue;
            };
            match side.look(key.0)? {
                Some(len) => size = size.max(before.layout.file_len(k, len)),
                None if has(&before, k) => lost.push((k, server)),
                None => {}
            }
        }
        let Some(after) = self.record_of(path, key)? else { return Ok(()) };
        let is_still = |k| has(&after, k);
        lost.retain(|(k, _)| is_still(*k));
        if !lost.is_empty() {
            let names: Vec<String> = lost.iter().map(|(_, server)| self.name_of(*server)).collect();
            let what = format!(
                "its object on {} is lost: of {} bytes, those in {} of {} strips of {} bytes cannot be read; restore the file \
                 from a copy, or remove it",
                names.join(", "),
                before.size,
                lost.len(),
                before.layout.pcount,
                before.layout.ssize_bytes
            );
            self.add_file(Kind::Missing, Outcome::Left, path, Some(key), what);
            return Ok(());
        }
        let is_quiet = !before.is_marked && before == after;
        if !is_quiet || !is_whole || size == before.size {
            return Ok(());
        }
        if size < before.size {
            let what = format!(
                "its objects end at {size} of {} bytes: what was behind is lost; restore the file from a copy, or cut it there",
                before.size
            );
            self.add_file(Kind::Size, Outcome::Left, path, Some(key), what);
            return Ok(());
        }
        let mut what = format!("its length is {}, but its objects have {size} bytes", before.size);
        let outcome = match (self.options.repair, self.sides.names.as_mut()) {
            (true, Some(names)) => match names.settle(path, size, key) {
                Ok(()) => Outcome::Repaired,
                Err(error) => {
                    what += &format!("; it cannot be set: {error}");
                    Outcome::Left
                }
            },
            _ => Outcome::Repairable,
        };
        self.add_file(Kind::Size, outcome, path, Some(key), what);
        Ok(())
    }

    /// What a stopped server had begun. A running one sees to it itself.
    fn finish_what_was_left(&mut self) {
        let removed = std::mem::take(&mut self.removed);
        let is_removed: FxHashSet<FileKey> = removed.keys().copied().collect();
        for (key, (record, has_name)) in removed {
            let what = "its removal was begun and not finished; the metadata server goes on with it".to_string();
            let finished = self.repairs_offline().then(|| self.finish_removal(&record, has_name));
            self.add_left(Kind::Removal, key, None, what, finished);
        }
        for (key, (record, path)) in std::mem::take(&mut self.marked) {
            if is_removed.contains(&key) || self.options.online {
                continue;
            }
            let what = match path {
                Some(_) => {
                    "it was being written when its server stopped; the metadata server takes its length from its objects"
                }
                None => "its making was begun and not finished; the metadata server removes it",
            };
            let finished = self.repairs_offline().then(|| match &path {
                Some(path) => self.settle(path, &record),
                None => self.finish_removal(&record, false),
            });
            self.add_left(Kind::Mark, key, path, what.into(), finished);
        }
    }

    fn repairs_offline(&self) -> bool {
        self.options.repair && !self.options.online
    }

    fn add_left(
        &mut self,
        kind: Kind,
        key: FileKey,
        path: Option<Vec<u8>>,
        mut what: String,
        finished: Option<Result<(), String>>,
    ) {
        let outcome = match finished {
            None => Outcome::Noted,
            Some(Ok(())) => Outcome::Repaired,
            Some(Err(error)) => {
                what += &format!(" ({error})");
                Outcome::Noted
            }
        };
        match path {
            Some(path) => self.add_file(kind, outcome, &path, Some(key), what),
            None => self.add(kind, outcome, None, Some(key.0), what),
        }
    }

    fn finish_removal(&mut self, record: &FileRecord, has_name: bool) -> Result<(), String> {
        if !has_name {
            if self.is_blind {
                return Err("left: it may be the file of a record that is missing or cannot be read".into());
            }
            // First all are asked, so that nothing is begun that cannot be finished.
            self.lens_of(record)?;
            for k in 0..record.layout.pcount {
                let server = usize::from(record.layout.server_at(k));
                if let Some(Some(side)) = self.sides.objects.get_mut(server) {
                    side.remove(record.file.0, true)?;
                }
            }
        }
        let names = self.sides.names.as_mut().ok_or("there are no names")?;
        names.finish_removal(record, has_name).map(drop)
    }

    fn settle(&mut self, path: &[u8], record: &FileRecord) -> Result<(), String> {
        let lens = self.lens_of(record)?;
        if (0..).zip(&lens).any(|(k, len)| len.is_none() && has(record, k)) {
            return Err("an object of it is missing".into());
        }
        let len = |(k, len): (u16, &Option<u64>)| len.map_or(0, |len| record.layout.file_len(k, len));
        let size = (0..).zip(&lens).map(len).max().unwrap_or(0);
        self.sides.names.as_mut().ok_or("there are no names")?.settle(path, size, record.file)
    }
}

/// The file is known to have an object at this position.
fn has(record: &FileRecord, k: u16) -> bool {
    record.made & 1 << (k % 64) != 0
}

#[cfg(test)]
mod tests {
    use super::super::{Looked, Names};
    use super::*;

    /// Names with one directory, which repeatedly cannot be examined though it is there.
    struct Flickering {
        failures: u32,
    }

    impl Names for Flickering {
        fn key_prefix(&self) -> Option<u64> {
            None
        }

        fn examine(&mut self, what: Examine) -> Result<Looked, String> {
            let directory = || Examined { name: b"d".into(), kind: Some(NodeKind::Dir), file: None };
            let entries = match what {
                Examine::Directory { path, .. } if !path.is_empty() && self.failures > 0 => {
                    self.failures -= 1;
                    return Err("cannot examine d: no such file or directory".into());
                }
                Examine::Directory { path, after, .. } if path.is_empty() && after.is_empty() => vec![directory()],
                Examine::File { .. } => vec![directory()],
                _ => Vec::new(),
            };
            Ok(Looked { entries, is_sure: true, ..Looked::default() })
        }

        fn settle(&mut self, _: &[u8], _: u64, _: FileKey) -> Result<(), String> {
            Err("nothing to settle".into())
        }

        fn finish_removal(&mut self, _: &FileRecord, _: bool) -> Result<bool, String> {
            Err("nothing to finish".into())
        }
    }

    fn unchecked(online: bool, failures: u32) -> Vec<String> {
        let options = Options { online, repair: false, delete_orphans: false, min_age: Duration::ZERO };
        let sides = Sides { names: Some(Box::new(Flickering { failures })), objects: Vec::new() };
        let text = "[meta]\naddress = \"127.0.0.1:7000\"\ndir = \"/m\"
            [[data]]\nname = \"a\"\naddress = \"127.0.0.1:7100\"\ndir = \"/a\"";
        let config = Config::parse(text, "c.toml".as_ref()).unwrap();
        let mut report = Report::default();
        run(&config, &options, sides, &mut report, &mut |_| ());
        report.unchecked
    }

    #[test]
    fn a_directory_renamed_and_back_meanwhile_is_examined_again() {
        assert_eq!(unchecked(true, 1), [""; 0]);
        assert_eq!(unchecked(true, DIRECTORY_TRIES), [""; 0]);
        assert_eq!(unchecked(true, u32::MAX).len(), 1);
        assert_eq!(unchecked(false, 1), ["cannot examine d: no such file or directory"]);
    }
}
