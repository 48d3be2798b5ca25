//! Reads a configuration file and reports every unknown key and bad value by line and column, all at once.

use std::path::{Path, PathBuf};

use impresario_toml::{Complaint, FileErrors, KeyPath, Mistakes, Tree, read, text_of};
use toml::{Table, Value};

use crate::Calibration;
use crate::model::Config;
use crate::policies::policies;
use crate::seen::FileSeen;
use crate::table::set_base;

/// Size limit of a configuration, bytes.
pub(crate) const FILE_MAX_BYTES: u64 = 4 << 20;

impl Config {
    /// Reads and checks a file. Relative paths in it are resolved against its directory.
    pub fn load(path: &Path) -> Result<Config, FileErrors> {
        load(path).map(|(config, _)| config)
    }

    /// Like [`Config::load`], and also reads the calibrations that servers name by `cost`. These are on the servers'
    /// machines, so other machines cannot check them.
    pub fn load_with_calibrations(path: &Path) -> Result<Config, FileErrors> {
        let (config, tree) = load(path)?;
        let root = KeyPath::default();
        let data = config.data.iter().enumerate().map(|(i, data)| (root.key("data").index(i), &data.cost));
        let io = config.io.iter().enumerate().map(|(i, io)| (root.key("io").index(i), &io.cost));
        let complaint = |(at, cost): (KeyPath, &Option<PathBuf>)| {
            let errors = Calibration::load(cost.as_ref()?).err()?;
            Some(tree.complaint(tree.place(&at.key("cost")), format!("cost: {errors}")))
        };
        let complaints: Vec<Complaint> = data.chain(io).filter_map(complaint).collect();
        if complaints.is_empty() { Ok(config) } else { Err(FileErrors::new(path, complaints)) }
    }

    /// Reads and checks the text of the file `file`, which need not exist.
    pub fn parse(text: &str, file: &Path) -> Result<Config, FileErrors> {
        parse(text, file).map(|(config, _)| config)
    }
}

/// The configuration, and its text's values with their positions.
fn load(path: &Path) -> Result<(Config, Tree), FileErrors> {
    // An absolute path, so that servers and clients use the same directories wherever they are started.
    let full = std::path::absolute(path).map_err(|e| FileErrors::whole(path, format!("cannot be found: {e}")))?;
    let seen = FileSeen::now(&full);
    let text = text_of(path, FILE_MAX_BYTES, "a configuration", "`impresario up --dir D` writes D/impresario.toml")?;
    match parse(&text, &full) {
        Ok((mut config, tree)) => {
            config.cluster.file = seen;
            Ok((config, tree))
        }
        Err(errors) => Err(FileErrors { file: path.into(), ..errors }),
    }
}

fn parse(text: &str, file: &Path) -> Result<(Config, Tree), FileErrors> {
    let tree = Tree::parse(text, file)?;
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
            let is_of_model = path.0.last().is_some_and(|key| key == "device");
            if (devices_read || !is_of_model) && !goes_by_a_guess(&path, &mistakes) {
                mistakes.add(path, message);
            }
        }
    }
    let mut config = mistakes.settle(config, file, &tree)?;
    let base = file.parent().unwrap_or(Path::new(""));
    config.data.iter_mut().for_each(|data| set_base(&mut data.policy, base));
    config.io.iter_mut().for_each(|io| set_base(&mut io.policy, base));
    config.paths_mut().for_each(|path| *path = base.join(&*path));
    Ok((config, tree))
}

/// Whether a check of this key goes by the default `backend`, since the one that is named there is none: it would mislead.
pub(crate) fn goes_by_a_guess(path: &KeyPath, mistakes: &Mistakes) -> bool {
    mistakes.0.iter().any(|mistake| match mistake.path.0.split_last() {
        Some((key, tree)) => key == "backend" && path.0.starts_with(tree),
        None => false,
    })
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
