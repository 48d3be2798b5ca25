//! What a check has found, for people and for programs.

use std::fmt::Write;

use impresario_base::units::show_bytes;
use impresario_config::{Config, DataState};
use serde_json::json;

/// Findings that are told one by one; of more, only the number.
const FINDINGS_MAX: usize = 100_000;

/// What a finding is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A folder is not that of its server.
    Identity,
    /// A file in a folder that no server has made.
    ForeignFile,
    /// An object of another cluster.
    ForeignObject,
    /// An object that belongs to no file.
    Orphan,
    /// A file has lost an object.
    Missing,
    /// The length of a file is not what its objects say.
    Size,
    /// A file has another number of names than its link count says.
    Links,
    /// The record of a file cannot be used.
    Record,
    /// A removal was begun and not finished.
    Removal,
    /// A file was being written when its server stopped.
    Mark,
    /// The metadata folder is older than objects of the data servers.
    Keys,
}

impl Kind {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Identity => "identity",
            Kind::ForeignFile => "foreign-file",
            Kind::ForeignObject => "foreign-object",
            Kind::Orphan => "orphan",
            Kind::Missing => "missing",
            Kind::Size => "size",
            Kind::Links => "links",
            Kind::Record => "record",
            Kind::Removal => "removal",
            Kind::Mark => "mark",
            Kind::Keys => "keys",
        }
    }
}

/// What has become of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Nothing is wrong: the servers see to it themselves.
    Noted,
    /// It was repaired.
    Repaired,
    /// It can be repaired with `--repair`.
    Repairable,
    /// It cannot be repaired safely.
    Left,
}

impl Outcome {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Noted => "noted",
            Outcome::Repaired => "repaired",
            Outcome::Repairable => "repairable",
            Outcome::Left => "left",
        }
    }
}

/// Something that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What it is about.
    pub kind: Kind,
    /// What has become of it.
    pub outcome: Outcome,
    /// The server that it was found at.
    pub server: Option<String>,
    /// The file, as a path from the root of the name space.
    pub path: Option<String>,
    /// The key of file and object.
    pub key: Option<u64>,
    /// What is wrong, and the remedy.
    pub what: String,
}

/// What a data server still has that is to be emptied.
#[derive(Clone, Default, Debug)]
pub struct Draining {
    /// Its name.
    pub server: String,
    pub(super) number: usize,
    /// Files that are striped over it, whether or not they have bytes there.
    pub files: u64,
    /// Objects, and their bytes; `None`: not known.
    pub objects: Option<(u64, u64)>,
}

impl Draining {
    pub(super) fn of(config: &Config) -> Vec<Draining> {
        let draining = config.data.iter().enumerate().filter(|(_, data)| data.state == DataState::Draining);
        draining.map(|(number, data)| Draining { server: data.name.clone(), number, ..Draining::default() }).collect()
    }

    /// `is_all`: no file was missed.
    fn text(&self, is_all: bool) -> String {
        let Draining { server, files, .. } = self;
        let (objects, bytes) = match self.objects {
            Some((0, _)) if *files == 0 && is_all => {
                return format!(
                    "{server} is draining and empty; it may be retired when `impresario store drain` says so"
                );
            }
            Some((objects, bytes)) => (objects.to_string(), show_bytes(bytes as f64)),
            None => ("unknown".into(), "unknown".into()),
        };
        let least = if is_all { "" } else { "at least " };
        let files = if *files == 1 { "1 file is".into() } else { format!("{files} files are") };
        format!("{server} is draining: {least}{files} striped over it; objects there: {objects}, bytes: {bytes}")
    }
}

/// The result of a check.
#[derive(Clone, Default, Debug)]
pub struct Report {
    /// What was found.
    pub findings: Vec<Finding>,
    /// Further findings by outcome, which are only counted: noted, repaired, others.
    more: [u64; 3],
    /// What could not be checked, and why.
    pub unchecked: Vec<String>,
    /// Directories and files that were examined.
    pub directories: u64,
    /// Files.
    pub files: u64,
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub object_bytes: u64,
    /// Data servers that are to be emptied.
    pub draining: Vec<Draining>,
    /// Their files were all counted: none can have been missed.
    pub counts_all_draining: bool,
    /// Objects without a file that changed too recently to be judged.
    pub young: u64,
    /// Objects without a file that could not be judged, because directories were renamed all the time.
    pub in_doubt: u64,
    /// Files whose names could not be counted for the same reason.
    pub uncounted: u64,
}

impl Report {
    pub(super) fn add(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
            return;
        }
        let more = match finding.outcome {
            Outcome::Noted => 0,
            Outcome::Repaired => 1,
            Outcome::Repairable | Outcome::Left => 2,
        };
        self.more[more] += 1;
    }

    /// The exit status of a check: 0 clean, else the sum of 1 (something was repaired), 4 (something is left that is wrong)
    /// and 8 (something could not be checked).
    pub fn status(&self) -> u8 {
        let has = |outcome| self.findings.iter().any(|finding| finding.outcome == outcome);
        let repaired = has(Outcome::Repaired) || self.more[1] > 0;
        let left = has(Outcome::Repairable) || has(Outcome::Left) || self.more[2] > 0;
        u8::from(repaired) | u8::from(left) << 2 | u8::from(!self.unchecked.is_empty()) << 3
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { kind, outcome, server, path, key, what } in &self.findings {
            let place = match (path, server, key) {
                (Some(path), _, _) => path.clone(),
                (None, Some(server), Some(key)) => format!("{server}: object {key:016x}"),
                (None, Some(server), None) => server.clone(),
                (None, None, Some(key)) => format!("file {key:016x}"),
                (None, None, None) => "cluster".into(),
            };
            let outcome = match outcome {
                Outcome::Noted => "",
                Outcome::Repaired => " [repaired]",
                Outcome::Repairable => " [--repair mends it]",
                Outcome::Left => " [left as it is]",
            };
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}: {place}: {what}{outcome}", kind.name());
        }
        let more: u64 = self.more.iter().sum();
        if more > 0 {
            let _ = writeln!(text, "and {more} more findings");
        }
        for why in &self.unchecked {
            let _ = writeln!(text, "not checked: {why}");
        }
        if self.young > 0 {
            let _ = writeln!(text, "{} objects without a file are too young to be judged (--min-age)", self.young);
        }
        if self.in_doubt > 0 {
            let doubt = self.in_doubt;
            let _ = writeln!(text, "{doubt} objects were not judged: directories were renamed meanwhile; check again");
        }
        if self.uncounted > 0 {
            let count = self.uncounted;
            let _ = writeln!(
                text,
                "the names of {count} files were not counted: directories were renamed meanwhile; check again"
            );
        }
        for draining in &self.draining {
            let _ = writeln!(text, "{}", draining.text(self.counts_all_draining));
        }
        let Report { directories, files, objects, .. } = self;
        let bytes = show_bytes(self.object_bytes as f64);
        let verdict = match self.status() {
            0 => "clean",
            1 => "repaired",
            status if status & 4 != 0 => "not clean",
            _ => "not fully checked",
        };
        let _ = writeln!(text, "{files} files in {directories} directories, {objects} objects of {bytes}: {verdict}");
        text
    }

    /// For programs.
    pub fn json(&self) -> serde_json::Value {
        let finding = |f: &Finding| {
            json!({
                "kind": f.kind.name(),
                "outcome": f.outcome.name(),
                "server": f.server,
                "path": f.path,
                "key": f.key.map(|key| format!("{key:016x}")),
                "what": f.what,
            })
        };
        let draining = |d: &Draining| {
            json!({
                "server": d.server,
                "files": d.files,
                "files_is_all": self.counts_all_draining,
                "objects": d.objects.map(|(objects, _)| objects),
                "object_bytes": d.objects.map(|(_, bytes)| bytes),
            })
        };
        json!({
            "draining": self.draining.iter().map(draining).collect::<Vec<_>>(),
            "status": self.status(),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "more_findings": self.more.iter().sum::<u64>(),
            "unchecked": self.unchecked,
            "directories": self.directories,
            "files": self.files,
            "objects": self.objects,
            "object_bytes": self.object_bytes,
            "young": self.young,
            "in_doubt": self.in_doubt,
            "uncounted": self.uncounted,
        })
    }
}
