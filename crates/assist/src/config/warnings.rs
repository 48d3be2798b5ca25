//! What in a hints file is legal and most likely not meant.

use std::fmt;

use super::entry::Entry;
use super::load::Hints;
use super::paths::{Paths, plain_part};
use super::region::Region;

/// One thing worth a look; the hints are used all the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The key, such as `File[0].WillNeed[1]`.
    pub key: String,
    /// What is odd, and what is done about it.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

impl Hints {
    /// What is legal and most likely not meant, in the order of the file, also by what there is at its paths.
    pub fn warnings(&self, paths: &Paths) -> Vec<Warning> {
        let mut found = Vec::new();
        for (list, entries) in [("File", &self.file), ("Directory", &self.directory), ("Glob", &self.glob)] {
            for (i, entry) in entries.iter().enumerate() {
                let key = format!("{list}[{i}]");
                let mut say = |sub: &str, message: String| found.push(Warning { key: format!("{key}{sub}"), message });
                if entries.iter().take(i).any(|earlier| earlier.path == entry.path) {
                    say(".Path", format!("{} is there twice; the first entry counts", entry.path.display()));
                }
                missing(list, entry, paths, &mut say);
                sizes(entry, &mut say);
                overlaps(entry, &mut say);
            }
        }
        let budget = &self.budget;
        if budget.per_node > 0 && budget.per_file.max(budget.per_user) > budget.per_node {
            found.push(Warning {
                key: "Budget".into(),
                message: "PerFile and PerUser above PerNode have no effect beyond it".into(),
            });
        }
        found
    }
}

fn missing(list: &str, entry: &Entry, paths: &Paths, say: &mut dyn FnMut(&str, String)) {
    let asked = if list == "Glob" { plain_part(&entry.path) } else { Some(entry.path.clone()) };
    let Some(asked) = asked else { return };
    let path = asked.display();
    match paths.there(&asked) {
        None => say(".Path", format!("{path}: {}; the path is taken as it is written", paths.why_silent(&asked))),
        Some(_) if list == "Glob" => {}
        Some(Err(e)) => say(".Path", format!("{path}: {e}; the hints apply once it is there")),
        Some(Ok(there)) if list == "File" && !there.is_file() => {
            say(
                ".Path",
                format!("{path} is not a regular file and gets no hints; directories belong under `Directory`"),
            );
        }
        Some(Ok(there)) if list == "Directory" && !there.is_dir() => {
            say(".Path", format!("{path} is not a directory; files belong under `File`"));
        }
        Some(Ok(_)) => {}
    }
}

fn sizes(entry: &Entry, say: &mut dyn FnMut(&str, String)) {
    if entry.read_ahead_size > entry.cache_size {
        let message = format!(
            "{} blocks are more than CacheSize holds; {} are read ahead",
            entry.read_ahead_size, entry.cache_size
        );
        say(".ReadAheadSize", message);
    }
    let window = u128::from(entry.block_size) * u128::from(entry.cache_size);
    if window > 1 << 40 {
        say(".CacheSize", format!("BlockSize × CacheSize is {} GiB; the budget will bound it", window >> 30));
    }
    if entry.read_ahead_size == 0 && !entry.will_need.is_empty() {
        say(".ReadAheadSize", "0 blocks are read ahead; only the block being read is brought in".into());
    }
    if !entry.sequence.is_empty() && (entry.online || !entry.will_need.is_empty()) {
        say(".Sequence", "goes before WillNeed and Online, which are not used for this file".into());
    } else if entry.online && !entry.will_need.is_empty() {
        say(".Online", "WillNeed goes first; strides are not detected for this file".into());
    }
}

/// The first overlap within each side; regions are compared in order of their first bytes.
fn overlaps(entry: &Entry, say: &mut dyn FnMut(&str, String)) {
    let read_ahead = [("Random", &entry.random), ("Sequential", &entry.sequential), ("Normal", &entry.normal)];
    let movement = [("DontNeed", &entry.dont_need), ("WillNeed", &entry.will_need)];
    for side in [&read_ahead[..], &movement[..]] {
        let mut all: Vec<(&Region, String)> = Vec::new();
        for (name, regions) in side {
            all.extend(regions.iter().enumerate().map(|(i, r)| (r, format!(".{name}[{i}]"))));
        }
        all.sort_by_key(|(r, _)| r.offset);
        let mut furthest: Option<(&Region, &str)> = None;
        for (region, name) in &all {
            if let Some((earlier, other)) = furthest
                && region.offset < earlier.bytes().end
            {
                say(name, format!("overlaps {}; the shorter of the two holds there", &other[1..]));
                break;
            }
            if furthest.is_none_or(|(earlier, _)| region.bytes().end > earlier.bytes().end) {
                furthest = Some((region, name));
            }
        }
    }
}
