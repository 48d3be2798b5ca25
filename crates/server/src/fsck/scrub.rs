//! Reading all objects of data servers, to find what their devices have damaged.
//!
//! One piece of one object at a time is read, so a running server does at most one more read beside those of its clients,
//! and a rate bounds how often. Paths of damaged objects are looked for afterwards, among the names of the metadata server.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::time::{Duration, Instant};

use impresario_base::units::show_bytes;
use impresario_config::Config;
use impresario_store::{BLOCK_BYTES, Scrubbed};
use impresario_wire::{Examine, FileRecord, NodeKind};
use serde_json::json;

use super::{Objects, Report, folders, online};
use crate::pace::Pace;

/// Bytes of an object that are read at once.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Damaged places that are told one by one; of more, only the number.
const DAMAGE_MAX: usize = 100_000;
/// Objects of a server that fail to be read before the rest of it is given up.
const FAILURES_MAX: usize = 1000;
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
    let mut wanted = config.clone();
    wanted.data.retain(|data| is_wanted(&data.name) && !data.is_retired());
    let mut opened = Report::default();
    let mut sides = match options.online {
        true => online::connect(&wanted, &mut opened),
        false => folders::open(&wanted, &mut opened),
    };
    let mut report = ScrubReport { unchecked: opened.unchecked, ..ScrubReport::default() };
    report.unchecked.extend(opened.findings.into_iter().map(|finding| finding.what));
    let (pace, mut told) = (Pace::new(options.rate_bytes, 0), Instant::now());
    for (data, side) in wanted.data.iter().zip(&mut sides.objects) {
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
        for (key, _, _) in page.objects {
            report.objects += 1;
            let mut at = Some(0);
            while let Some(offset) = at {
                let found = match side.scrub(key, offset, PIECE_BYTES) {
                    Ok(Some(found)) => found,
                    // Removed meanwhile.
                    Ok(None) => break,
                    // The rest of a failing device is of interest all the more.
                    Err(error) if failures < FAILURES_MAX => {
                        failures += 1;
                        report.unchecked.push(format!("{server}: object {key:016x} from byte {offset} on: {error}"));
                        break;
                    }
                    Err(error) => {
                        side.end_scrub()?;
                        return Err(format!("after {failures} objects that could not be read: {error}"));
                    }
                };
                at = found.next;
                report.add(server, key, found);
                pace.wait(report.read_bytes);
                if told.elapsed() >= TELL_EVERY {
                    *told = Instant::now();
                    let (objects, bytes) = (report.objects, show_bytes(report.read_bytes as f64));
                    tell(&format!("{server}: {objects} objects, {bytes} so far"));
                }
            }
        }
        from = page.next;
    }
    side.end_scrub()
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
