//! How a hints file is read and written: what is wrong by line, column and key.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use super::entry::Entry;
use super::limits::{Budget, DeviceCost, Learn, Limits, StandDown};

/// The whole hints file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct Hints {
    /// Where the schema of this file lies, for editors.
    #[serde(rename = "$schema", skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// What this file is for, for the reader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Hints for single files.
    #[serde(deserialize_with = "plain", skip_serializing_if = "Vec::is_empty")]
    pub file: Vec<Entry>,
    /// Hints for the files of directories.
    #[serde(deserialize_with = "directories", skip_serializing_if = "Vec::is_empty")]
    pub directory: Vec<Entry>,
    /// Hints for the files that patterns match.
    #[serde(deserialize_with = "plain", skip_serializing_if = "Vec::is_empty")]
    pub glob: Vec<Entry>,
    /// Bytes that may be prefetched and not yet released.
    #[serde(skip_serializing_if = "is_default")]
    pub budget: Budget,
    /// What programs and users may hold.
    #[serde(skip_serializing_if = "is_default")]
    pub limits: Limits,
    /// When hints stop.
    #[serde(skip_serializing_if = "is_default")]
    pub stand_down: StandDown,
    /// What a read costs.
    #[serde(skip_serializing_if = "is_default")]
    pub device: DeviceCost,
    /// What a node's manager learns from.
    #[serde(skip_serializing_if = "is_default")]
    pub learn: Learn,
}

impl Hints {
    /// Without a plan: what the programs read next is found while they run, for all files.
    pub fn online() -> Hints {
        Hints::default().and_online()
    }

    /// The same, and what [`Hints::online`] does for files of which these hints say nothing. An entry of theirs for `/` and
    /// all below says something of each file.
    pub fn and_online(mut self) -> Hints {
        // Of two entries for one directory the first counts.
        self.directory.push(Entry { recursive: true, online: true, ..Entry::new("/") });
        self
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn plain<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Entry>, D::Error> {
    let entries = directories(d)?;
    match entries.iter().find(|e| e.recursive) {
        Some(e) => Err(D::Error::custom(format!(
            "{}: `Recursive` is for entries of `Directory`; move this entry there or remove the key",
            e.path.display()
        ))),
        None => Ok(entries),
    }
}

fn directories<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Entry>, D::Error> {
    let entries = Vec::<Entry>::deserialize(d)?;
    for entry in &entries {
        if !entry.path.is_absolute() {
            return Err(D::Error::custom(format!(
                "`{}` is not an absolute path; write it in full, from `/`",
                entry.path.display()
            )));
        }
        if entry.path.as_os_str().len() > 4096 {
            return Err(D::Error::custom("a path longer than the 4096 bytes that the kernel takes"));
        }
    }
    Ok(entries)
}

/// A hints file that cannot be used: one line that says where and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// The file, as it was named.
    pub file: PathBuf,
    /// Line and column, from 1; `None` when it is about the file as a whole.
    pub at: Option<(usize, usize)>,
    /// The key, such as `File[0].BlockSize`; empty at the top.
    pub key: String,
    /// What is wrong, and the remedy.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some((line, column)) = self.at {
            write!(f, "{line}:{column}:")?;
        }
        if !self.key.is_empty() {
            write!(f, " {}:", self.key)?;
        }
        write!(f, " {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

/// No hints file is longer; a larger one is not one.
const FILE_MAX_BYTES: u64 = 64 << 20;

impl Hints {
    /// Reads and checks a file.
    pub fn load(file: &Path) -> Result<Hints, ConfigError> {
        let refuse = |message: String| ConfigError { file: file.into(), at: None, key: String::new(), message };
        let meta = std::fs::metadata(file)
            .map_err(|e| refuse(format!("cannot be read: {e}; `impresario assist plan` writes one from a trace")))?;
        if meta.len() > FILE_MAX_BYTES {
            return Err(refuse(format!("has {} bytes; a hints file has at most {FILE_MAX_BYTES}", meta.len())));
        }
        let text = std::fs::read_to_string(file).map_err(|e| refuse(format!("cannot be read: {e}")))?;
        Hints::parse(&text, file)
    }

    /// Reads and checks the text of a file that lies, or would lie, at `file`.
    pub fn parse(text: &str, file: &Path) -> Result<Hints, ConfigError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let read = serde_path_to_error::deserialize(&mut json);
        let refuse = |key: String, e: &serde_json::Error| ConfigError {
            file: file.into(),
            at: (e.line() > 0).then(|| (e.line(), e.column())),
            key,
            message: message(e),
        };
        let hints = read.map_err(|e| {
            let key = e.path().to_string();
            refuse(if key == "." { String::new() } else { key }, e.inner())
        })?;
        json.end().map_err(|e| refuse(String::new(), &e))?;
        Ok(hints)
    }

    /// The text of the file, for people and programs. Refused: a path that is not UTF-8, which JSON cannot write down.
    pub fn to_json(&self) -> Result<String, ConfigError> {
        match serde_json::to_string_pretty(self) {
            Ok(text) => Ok(text + "\n"),
            Err(e) => Err(made(e.to_string())),
        }
    }

    /// Whether hints that a program made up would be accepted from a file.
    pub fn check(&self) -> Result<(), ConfigError> {
        let text = serde_json::to_string(self).map_err(|e| made(e.to_string()))?;
        Hints::parse(&text, Path::new(MADE)).map(|_| ())
    }
}

/// What stands for the file's name in complaints of hints that came from no file.
const MADE: &str = "(hints made by a program)";

fn made(message: String) -> ConfigError {
    ConfigError { file: MADE.into(), at: None, key: String::new(), message }
}

/// The reader's message without the place, which is said in front, and with a remedy where it has none.
fn message(e: &serde_json::Error) -> String {
    let mut text = e.to_string();
    if let Some(place) = text.rfind(" at line ") {
        text.truncate(place);
    }
    match e.classify() {
        serde_json::error::Category::Syntax | serde_json::error::Category::Eof => format!("not JSON: {text}"),
        _ => text,
    }
}
