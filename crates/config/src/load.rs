//! Reads a configuration file and reports every unknown key and bad value by line and column, all at once.

use std::fmt;
use std::path::{Path, PathBuf};

use impresario_base::place::line_column;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::Calibration;
use crate::document::{KeyPath, Tree};
use crate::mistake::{Mistakes, policies, read};
use crate::model::Config;
use crate::seen::FileSeen;
use crate::table::set_base;

/// One mistake in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    /// Line and column, from 1; `None` if it concerns the whole file.
    pub at: Option<(usize, usize)>,
    /// The mistake and its remedy.
    pub message: String,
}

/// All mistakes of a file; never empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigErrors {
    /// The file as named by the caller.
    pub file: PathBuf,
    /// In the order of the file.
    pub complaints: Vec<Complaint>,
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, complaint) in self.complaints.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            match complaint.at {
                Some((line, column)) => write!(f, "{newline}{}:{line}:{column}: ", self.file.display())?,
                None => write!(f, "{newline}{}: ", self.file.display())?,
            }
            f.write_str(&complaint.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

impl ConfigErrors {
    /// One complaint about the whole file.
    pub(crate) fn whole(file: &Path, message: String) -> ConfigErrors {
        ConfigErrors { file: file.into(), complaints: vec![Complaint { at: None, message }] }
    }

    /// The mistakes at their positions in the text.
    pub(crate) fn of(file: &Path, text: &str, tree: &Tree, mistakes: Mistakes) -> ConfigErrors {
        let placed = mistakes.0.into_iter().map(|mistake| (mistake.place(tree), mistake.message));
        let mut placed: Vec<(usize, String)> = placed.collect();
        placed.sort_by_key(|(place, _)| *place);
        let complaint = |(place, message)| Complaint { at: Some(line_column(text, place)), message };
        ConfigErrors { file: file.into(), complaints: placed.into_iter().map(complaint).collect() }
    }
}

/// Size limit of a configuration, bytes.
pub(crate) const FILE_MAX_BYTES: u64 = 4 << 20;

impl Config {
    /// Reads and checks a file. Relative paths in it are resolved against its directory.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        load(path).map(|(config, ..)| config)
    }

    /// Like [`Config::load`], and also reads the calibrations that servers name by `cost`. These are on the servers'
    /// machines, so other machines cannot check them.
    pub fn load_with_calibrations(path: &Path) -> Result<Config, ConfigErrors> {
        let (config, tree, text) = load(path)?;
        let root = KeyPath::default();
        let data = config.data.iter().enumerate().map(|(i, data)| (root.key("data").index(i), &data.cost));
        let io = config.io.iter().enumerate().map(|(i, io)| (root.key("io").index(i), &io.cost));
        let complaint = |(at, cost): (KeyPath, &Option<PathBuf>)| {
            let errors = Calibration::load(cost.as_ref()?).err()?;
            let place = tree.place(&at.key("cost")).unwrap_or(0);
            Some(Complaint { at: Some(line_column(&text, place)), message: format!("cost: {errors}") })
        };
        let complaints: Vec<Complaint> = data.chain(io).filter_map(complaint).collect();
        if complaints.is_empty() { Ok(config) } else { Err(ConfigErrors { file: path.into(), complaints }) }
    }

    /// Reads and checks the text of the file `file`, which need not exist.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigErrors> {
        parse(text, file).map(|(config, _)| config)
    }
}

/// The configuration, and its text for positions.
fn load(path: &Path) -> Result<(Config, Tree, String), ConfigErrors> {
    // An absolute path, so that servers and clients use the same directories wherever they are started.
    let full = std::path::absolute(path).map_err(|e| ConfigErrors::whole(path, format!("cannot be found: {e}")))?;
    let seen = FileSeen::now(&full);
    let text = text_of(path, FILE_MAX_BYTES, "a configuration", "`impresario up --dir D` writes D/impresario.toml")?;
    match parse(&text, &full) {
        Ok((mut config, tree)) => {
            config.cluster.file = seen;
            Ok((config, tree, text))
        }
        Err(errors) => Err(ConfigErrors { file: path.into(), ..errors }),
    }
}

/// The text of a file of limited size.
pub(crate) fn text_of(path: &Path, max_bytes: u64, what: &str, remedy: &str) -> Result<String, ConfigErrors> {
    let refuse = |message: String| ConfigErrors::whole(path, message);
    let meta = std::fs::metadata(path).map_err(|e| refuse(format!("cannot be read: {e}; {remedy}")))?;
    if meta.len() > max_bytes {
        return Err(refuse(format!("has {} bytes; the limit of {what} is {max_bytes}", meta.len())));
    }
    std::fs::read_to_string(path).map_err(|e| refuse(format!("cannot be read: {e}")))
}

/// Reads a text that belongs to no file; the error is one line with all mistakes, each with its line.
pub fn read_text<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let one = |complaint: Complaint| match complaint.at {
        Some((line, _)) => format!("line {line}: {}", complaint.message),
        None => complaint.message,
    };
    let tree = Tree::parse(text).map_err(one)?;
    let mut mistakes = Mistakes::default();
    match read(tree.values.clone(), &KeyPath::default(), |_| None, &mut mistakes) {
        Some(read) if mistakes.0.is_empty() => Ok(read),
        _ => {
            let complaints = ConfigErrors::of(Path::new(""), text, &tree, mistakes).complaints;
            Err(complaints.into_iter().map(one).collect::<Vec<_>>().join("; "))
        }
    }
}

fn parse(text: &str, file: &Path) -> Result<(Config, Tree), ConfigErrors> {
    let tree =
        Tree::parse(text).map_err(|complaint| ConfigErrors { file: file.into(), complaints: vec![complaint] })?;
    let (mut values, mut mistakes, root) = (tree.values.clone(), Mistakes::default(), KeyPath::default());
    policies(&mut values, &root, &mut mistakes);
    if let Some(section) = crate::nfs::take_section(&mut values) {
        crate::nfs::read_section(section, &mut mistakes);
    }
    let config = read::<Config>(values, &root, missing, &mut mistakes);
    if let Some(config) = &config {
        // A device model with a mistake is not a missing model.
        let devices = root.key("device");
        let devices_read = !mistakes.0.iter().any(|mistake| mistake.path.touches(&devices));
        for (path, message) in config.check() {
            if devices_read || path.0.last().is_none_or(|key| key != "device") {
                mistakes.add(path, message);
            }
        }
    }
    match config {
        Some(mut config) if mistakes.0.is_empty() => {
            let base = file.parent().unwrap_or(Path::new(""));
            config.data.iter_mut().for_each(|data| set_base(&mut data.policy, base));
            config.io.iter_mut().for_each(|io| set_base(&mut io.policy, base));
            config.paths_mut().for_each(|path| *path = base.join(&*path));
            Ok((config, tree))
        }
        _ => Err(ConfigErrors::of(file, text, &tree, mistakes)),
    }
}

/// The keys without default: all are texts.
fn missing(path: &KeyPath) -> Option<(&'static str, Value)> {
    let (section, key) = (path.0.first()?.as_str(), path.0.last()?.as_str());
    let example = match (section, key) {
        ("io", "name") => "\"io.0\"",
        ("io", "address") => "\"127.0.0.1:7200\"",
        ("data", "name" | "dir") => "\"data.0\"",
        ("data", "address") => "\"127.0.0.1:7100\"",
        ("meta", "address") => "\"127.0.0.1:7000\"",
        ("meta", "dir") => "\"meta\"",
        _ => return Some(("", Value::Table(Table::new()))),
    };
    Some((example, Value::String(String::new())))
}
