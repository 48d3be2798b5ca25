//! Checking a cluster: do its names and its objects fit together, and what can be mended?
//!
//! | file | question |
//! |---|---|
//! | `check` | what is compared with what, and what is repaired |
//! | `links` | has a file as many names as its link count says |
//! | `folders` | names and objects of folders that no server serves |
//! | `online` | names and objects of running servers |
//! | `report` | what was found, and what is said of it |
//! | `scrub` | what have devices damaged |

mod check;
mod folders;
mod links;
mod online;
mod report;
mod scrub;

use std::collections::BTreeMap;
use std::time::Duration;

use impresario_config::Config;
use impresario_store::Scrubbed;
use impresario_wire::{Examine, Examined, FileKey, FileRecord};

pub use report::{Draining, Finding, Kind, Outcome, Report};
pub(crate) use scrub::PIECE_BYTES;
pub use scrub::{Damage, ScrubOptions, ScrubReport, scrub};

/// How a cluster is checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ask the running servers instead of looking into folders on this machine.
    pub online: bool,
    /// Repair what is safe.
    pub repair: bool,
    /// Remove objects that belong to no file instead of setting them aside.
    pub delete_orphans: bool,
    /// Objects that changed more recently are not taken for orphans.
    pub min_age: Duration,
}

/// A page of a data server's objects: key, length in bytes and age in seconds of each.
pub(crate) struct Page {
    objects: Vec<(u64, u64, u64)>,
    foreign: Vec<String>,
    next: Option<u64>,
}

/// What was examined, as in [`Answer::Examined`](impresario_wire::Answer::Examined).
#[derive(Default)]
pub(crate) struct Looked {
    entries: Vec<Examined>,
    walk: u64,
    renamed: Vec<FileKey>,
    is_sure: bool,
}

/// The names of a cluster. Errors are one line.
pub(crate) trait Names {
    /// The upper bits of its keys.
    fn key_prefix(&self) -> Option<u64>;
    /// How many keys count as issued; `None`: a running server counts by itself.
    fn keys_issued(&self) -> Option<u64> {
        None
    }
    /// How many keys were issued cannot be read.
    fn are_keys_damaged(&self) -> bool {
        false
    }
    /// Has at least so many keys count as issued.
    fn count_keys(&mut self, _issued: u64) -> Result<(), String> {
        Err("a running server counts its keys by itself".into())
    }
    /// Looks at something.
    fn examine(&mut self, what: Examine) -> Result<Looked, String>;
    /// Has the length of a file taken from its objects, which is `size`.
    fn settle(&mut self, path: &[u8], size: u64, file: FileKey) -> Result<(), String>;
    /// Forgets a file without names whose objects are removed; false if a running server does that itself.
    fn finish_removal(&mut self, file: &FileRecord, has_name: bool) -> Result<bool, String>;
}

/// The objects of a data server. Errors are one line.
pub(crate) trait Objects {
    /// The objects from a key on, as [`ObjectStore::page`](impresario_store::ObjectStore::page).
    fn page(&mut self, from: u64) -> Result<Page, String>;
    /// Length of an object, bytes; `None` if there is none.
    fn look(&mut self, key: u64) -> Result<Option<u64>, String>;
    /// Sets an object aside, or removes it for good.
    fn remove(&mut self, key: u64, for_good: bool) -> Result<(), String>;
    /// Reads a piece of an object, as [`ObjectStore::scrub`](impresario_store::ObjectStore::scrub).
    fn scrub(&mut self, key: u64, offset: u64, max_bytes: u64) -> Result<Option<Scrubbed>, Unscrubbed>;
    /// All objects were scrubbed: what was learnt of them is kept.
    fn end_scrub(&mut self) -> Result<(), String>;
}

/// Why a piece of an object was not scrubbed.
pub(crate) struct Unscrubbed {
    /// One line.
    why: String,
    /// The device failed: it may be able to read what is behind the piece.
    is_of_piece: bool,
}

/// The two sides of a cluster, as far as they can be had.
pub(crate) struct Sides {
    names: Option<Box<dyn Names>>,
    /// In the order of the configuration; `None` of those that are retired, not wanted, or not to be had.
    objects: Vec<Option<Box<dyn Objects>>>,
}

/// Checks the cluster of a configuration. `tell` hears now and then how far it is. Needs memory for 24 bytes an object.
pub fn run(config: &Config, options: &Options, tell: &mut dyn FnMut(&str)) -> Report {
    let mut report = Report::default();
    let sides = match options.online {
        true => online::connect(config, |_| true, &mut report),
        false => folders::open(config, |_| true, &mut report),
    };
    check::run(config, options, sides, &mut report, tell);
    report
}

/// The numbers of the folders that the metadata server knows.
type Known = BTreeMap<String, u64>;
