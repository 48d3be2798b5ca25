//! Reading all objects of data servers, to find what their devices have damaged.
//!
//! One piece of one object at a time is read, so a running server does at most one more read beside those of its clients,
//! and a rate bounds how often. Paths of damaged objects are looked for afterwards, among the names of the metadata server.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::time::{Duration, Instant};

use impresario_base::units::show_bytes;
use impresario_config::{Config, Data};
use impresario_store::{BLOCK_BYTES, Scrubbed, piece_end};
use impresario_wire::{Examine, FileRecord, NodeKind};
use serde_json::json;

use super::{Objects, Report, Unscrubbed, folders, online};
use crate::pace::Pace;

/// Bytes of an object that are read at once.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Damaged places that are told one by one; of more, only the number.
const DAMAGE_MAX: usize = 100_000;
/// Places of a server's objects that fail to be read before the rest of it is given up.
const FAILURES_MAX: usize = 1000;
/// Pieces that fail one after the other before the rest of an object is given up: four pages of checksums, or their beginning, without
/// which nothing of it can be checked.
const GAP_PIECES_MAX: u32 = 16;
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Entries of a directory that are asked for at once.
const ENTRIES: u32 = 1000;

/// How objects are scrubbed.
#[derive(Clone, Debug)]
pub struct ScrubOptions {
    /// Ask the running servers instead of reading folders on this machine.
    pub online: bool,
    /// The data servers; empty: all.
    pub servers: Vec<String>,
    /// Bytes that are read in a second, over all servers; 0: without a limit.
    pub rate_bytes: u64,
}

/// A damaged place of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// Whose object it is.
    pub server: String,
    /// The object.
    pub key: u64,
    /// Which bytes of the object.
    pub bytes: Range<u64>,
    /// The file, as a path from the root of the name space, and which byte of it is the first; `None`: it is not known.
    pub file: Option<(String, u64)>,
}

/// What was found.
#[derive(Clone, Default, Debug)]
pub struct ScrubReport {
    /// What is damaged.
    pub damage: Vec<Damage>,
    /// Further damaged places.
    pub more: u64,
    /// What could not be read, and why.
    pub unchecked: Vec<String>,
    /// Objects.
    pub objects: u64,
    /// What the blocks were.
    pub read_bytes: u64,
    /// Blocks that fit their checksums.
    pub good_blocks: u64,
    /// Blocks that have a checksum from now on.
    pub learnt_blocks: u64,
    /// Blocks without a checksum.
    pub unknown_blocks: u64,
}

/// Scrubs data servers of a cluster. `tell` hears now and then how far it is. An error is a server that the configuration
/// does not name.
pub fn scrub(config: &Config, options: &ScrubOptions, tell: &mut dyn FnMut(&str)) -> Result<ScrubReport, String> {
    let is_wanted = |name: &String| options.servers.is_empty() || options.servers.contains(name);
    if let Some(other) = options.servers.iter().find(|name| !config.data.iter().any(|data| data.name == **name)) {
        return Err(format!("the configuration has no data server {other}"));
    }
    let wants = |data: &Data| is_wanted(&data.name);
    let mut opened = Report::default();
    let mut sides = match options.online {
        true => online::connect(config, wants, &mut opened),
        false => folders::open(config, wants, &mut opened),
    };
    let mut report = ScrubReport { unchecked: opened.unchecked, ..ScrubReport::default() };
    report.unchecked.extend(opened.findings.into_iter().map(|finding| finding.what));
    let (pace, mut told) = (Pace::new(options.rate_bytes, 0), Instant::now());
    for (data, side) in config.data.iter().zip(&mut sides.objects) {
        let Some(side) = side else { continue };
        if let Err(error) = all_of(&data.name, side.as_mut(), &mut report, (&pace, &mut told), tell) {
            report.unchecked.push(format!("{}: {error}", data.name));
        }
    }
    if let (Some(names), false) = (&mut sides.names, report.damage.is_empty()) {
        tell("looking for the files of damaged objects");
        let examine = |what| names.examine(what).map(|looked| looked.entries);
        if let Err(error) = name_files(config, &mut report.damage, examine) {
            report.unchecked.push(format!("the files of some damaged objects are not known: {error}"));
        }
    }
    Ok(report)
}

fn all_of(
    server: &str,
    side: &mut dyn Objects,
    report: &mut ScrubReport,
    (pace, told): (&Pace, &mut Instant),
    tell: &mut dyn FnMut(&str),
) -> Result<(), String> {
    let mut failures = 0;
    let mut from = Some(0);
    while let Some(key) = from {
        let page = side.page(key)?;
        for (key, size, _) in page.objects {
            report.objects += 1;
            let (mut at, mut gap) = (Some(0), None::<Gap>);
            while let Some(offset) = at {
                match side.scrub(key, offset, PIECE_BYTES) {
                    Ok(found) => {
                        gap.take().into_iter().for_each(|gap| gap.tell(server, key, report));
                        // Or removed meanwhile.
                        let Some(found) = found else { break };
                        at = found.next;
                        report.add(server, key, found);
                    }
                    Err(Unscrubbed { why, .. }) if failures >= FAILURES_MAX && gap.is_none() => {
                        side.end_scrub()?;
                        return Err(format!("after {failures} places that could not be read: {why}"));
                    }
                    // The rest of a failing device is of interest all the more.
                    Err(Unscrubbed { why, is_of_piece }) => {
                        failures += usize::from(gap.is_none());
                        let gap = gap.get_or_insert(Gap { start: offset, end: None, pieces: 0, why });
                        gap.pieces += 1;
                        let end = piece_end(offset, PIECE_BYTES);
                        let goes_on = is_of_piece && gap.pieces < GAP_PIECES_MAX;
                        // Checksums behind the end tell of bytes that are missing.
                        gap.end = goes_on.then_some(if offset < size { end.min(size) } else { end });
                        at = goes_on.then_some(end);
                    }
                }
                pace.wait(report.read_bytes);
                if told.elapsed() >= TELL_EVERY {
                    *told = Instant::now();
                    let (objects, bytes) = (report.objects, show_bytes(report.read_bytes as f64));
                    tell(&format!("{server}: {objects} objects, {bytes} so far"));
                }
            }
            gap.into_iter().for_each(|gap| gap.tell(server, key, report));
        }
        from = page.next;
    }
    side.end_scrub()
}

/// A part of an object that could not be checked.
struct Gap {
    start: u64,
    /// `None`: nor could what is behind it.
    end: Option<u64>,
    /// Of which it consists.
    pieces: u32,
    /// Of its first piece.
    why: String,
}

impl Gap {
    fn tell(self, server: &str, key: u64, report: &mut ScrubReport) {
        let Gap { start, end, why, .. } = self;
        let len = end.map_or_else(String::new, |end| format!("{} bytes ", end.saturating_sub(start)));
        report.unchecked.push(format!("{server}: object {key:016x}, {len}from byte {start} on: {why}"));
    }
}

/// Finds the paths of damaged objects.
fn name_files(
    config: &Config,
    damage: &mut [Damage],
    mut examine: impl FnMut(Examine) -> Result<Vec<impresario_wire::Examined>, String>,
) -> Result<(), String> {
    let mut places: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    damage.iter().enumerate().for_each(|(i, damage)| places.entry(damage.key).or_default().push(i));
    let mut directories = vec![Vec::new()];
    while let Some(directory) = directories.pop() {
        let mut after = Vec::new();
        loop {
            let entries = match examine(Examine::Directory { path: directory.clone(), after, max: ENTRIES }) {
                Ok(entries) => entries,
                // Removed or renamed meanwhile.
                Err(_) if !directory.is_empty() => break,
                Err(error) => return Err(error),
            };
            let Some(last) = entries.last() else { break };
            after = last.name.clone();
            for entry in entries {
                let mut path = directory.clone();
                path.extend((!path.is_empty()).then_some(b'/'));
                path.extend(&entry.name);
                match (entry.kind, entry.file) {
                    (Some(NodeKind::Dir), _) => directories.push(path),
                    (_, Some(Ok(record))) => {
                        for place in places.remove(&record.file.0).into_iter().flatten() {
                            let Some(damage) = damage.get_mut(place) else { continue };
                            let path = String::from_utf8_lossy(&path).into_owned();
                            damage.file = first_byte(config, &record, damage).map(|byte| (path, byte));
                        }
                    }
                    _ => {}
                }
            }
            if places.is_empty() {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Which byte of a file the first damaged one is.
fn first_byte(config: &Config, record: &FileRecord, damage: &Damage) -> Option<u64> {
    let server = config.data.iter().position(|data| data.name == damage.server)?;
    let k = record.layout.position_of(u16::try_from(server).ok()?)?;
    Some(record.layout.file_offset(k, damage.bytes.start))
}

impl ScrubReport {
    fn add(&mut self, server: &str, key: u64, found: Scrubbed) {
        self.read_bytes += found.read_bytes;
        self.good_blocks += found.good_blocks;
        self.learnt_blocks += found.learnt_blocks;
        self.unknown_blocks += found.unknown_blocks;
        for start in found.corrupt {
            let end = start + BLOCK_BYTES;
            let is_full = self.damage.len() >= DAMAGE_MAX;
            match self.damage.last_mut() {
                Some(last) if last.server == server && last.key == key && last.bytes.end == start => {
                    last.bytes.end = end;
                }
                _ if is_full => self.more += 1,
                _ => self.damage.push(Damage { server: server.into(), key, bytes: start..end, file: None }),
            }
        }
    }

    /// The exit status: 0 nothing is damaged, else the sum of 4 (something is) and 8 (something could not be read).
    pub fn status(&self) -> u8 {
        u8::from(!self.damage.is_empty()) << 2 | u8::from(!self.unchecked.is_empty()) << 3
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Damage { server, key, bytes, file } in &self.damage {
            let place = match file {
                Some((path, byte)) => format!("{path}, byte {byte}: "),
                None => String::new(),
            };
            let (start, len) = (bytes.start, bytes.end - bytes.start);
            // Writing to a string does not fail.
            let _ = writeln!(text, "damaged: {place}{server}: object {key:016x}, {len} bytes from byte {start} on");
        }
        if self.more > 0 {
            let _ = writeln!(text, "and {} more places", self.more);
        }
        for why in &self.unchecked {
            let _ = writeln!(text, "not checked: {why}");
        }
        let ScrubReport { objects, good_blocks, learnt_blocks, unknown_blocks, .. } = self;
        let bytes = show_bytes(self.read_bytes as f64);
        let verdict = match self.status() {
            0 => "no damage",
            status if status & 4 != 0 => "damaged",
            _ => "not fully read",
        };
        let _ = writeln!(
            text,
            "{objects} objects of {bytes}; {good_blocks} blocks good, {learnt_blocks} checked from now on, \
             {unknown_blocks} without a checksum: {verdict}"
        );
        text
    }

    /// For programs.
    pub fn json(&self) -> serde_json::Value {
        let damage = |damage: &Damage| {
            json!({
                "server": damage.server,
                "key": format!("{:016x}", damage.key),
                "offset": damage.bytes.start,
                "len": damage.bytes.end - damage.bytes.start,
                "path": damage.file.as_ref().map(|(path, _)| path),
                "file_offset": damage.file.as_ref().map(|(_, byte)| byte),
            })
        };
        json!({
            "status": self.status(),
            "damage": self.damage.iter().map(damage).collect::<Vec<_>>(),
            "more_damage": self.more,
            "unchecked": self.unchecked,
            "objects": self.objects,
            "read_bytes": self.read_bytes,
            "good_blocks": self.good_blocks,
            "learnt_blocks": self.learnt_blocks,
            "unknown_blocks": self.unknown_blocks,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use impresario_store::testing::Forgetful;
    use impresario_store::{FolderIdentity, ObjectStore, StoreOptions, make_over};

    const KEY: u64 = 7;
    const MIB: u64 = 1 << 20;

    fn opened(fs: &Forgetful) -> ObjectStore<Forgetful> {
        let options = StoreOptions { checksums: Some(true), ..StoreOptions::default() };
        ObjectStore::over(fs.clone(), Path::new("forgetful"), "data.0", options).unwrap()
    }

    /// A store with an object.
    fn store(len: u64) -> (Forgetful, ObjectStore<Forgetful>) {
        let fs = Forgetful::new(1 << 30);
        make_over(&fs, Path::new("forgetful"), &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() })
            .unwrap();
        let store = opened(&fs);
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8 + 1).collect();
        store.write_vectored(KEY, 0, &[std::io::IoSlice::new(&bytes)]).unwrap();
        store.sync(KEY).unwrap();
        (fs, store)
    }

    fn scrubbed(store: &mut ObjectStore<Forgetful>) -> ScrubReport {
        let mut report = ScrubReport::default();
        let pace = Pace::new(0, 0);
        all_of("data.0", store, &mut report, (&pace, &mut Instant::now()), &mut |_| {}).unwrap();
        report
    }

    fn path(end: &str) -> String {
        format!("objects/{KEY:02x}/{KEY:016x}{end}")
    }

    /// 4 MiB cannot be verified; what is before and behind them is.
    #[test]
    fn an_unreadable_page_of_checksums_leaves_only_its_blocks_unchecked() {
        let (fs, mut store) = store(12 * MIB);
        assert_eq!(scrubbed(&mut store).status(), 0);
        for at in [MIB, 9 * MIB] {
            assert!(fs.rot(&path(""), at + 5, 1));
        }
        fs.break_page(&path(".sums"), 4096);
        let report = scrubbed(&mut store);
        let places: Vec<_> = report.damage.iter().map(|damage| damage.bytes.start).collect();
        assert_eq!(places, [MIB, 9 * MIB], "{}", report.text());
        assert_eq!(report.unchecked.len(), 1, "{}", report.text());
        let start = (4096 - 32) / 4 * BLOCK_BYTES;
        let place = format!("object {KEY:016x}, {} bytes from byte {start} on: ", 4 * MIB);
        assert!(report.unchecked[0].contains(&place), "{}", report.text());
        assert_eq!((report.status(), report.good_blocks), (4 + 8, (8 * MIB) / BLOCK_BYTES - 2));
    }

    /// Nothing of the object can be checked, and the device is not asked for each piece of it.
    #[test]
    fn checksums_without_a_beginning_are_given_up() {
        let (fs, store) = store(24 * MIB);
        drop(store);
        fs.break_page(&path(".sums"), 0);
        let report = scrubbed(&mut opened(&fs));
        assert_eq!((report.status(), report.unchecked.len(), report.good_blocks), (8, 1, 0), "{}", report.text());
        let place = format!("object {KEY:016x}, from byte 0 on: ");
        assert!(report.unchecked[0].contains(&place), "{}", report.text());
    }
}
