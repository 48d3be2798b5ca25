//! How a configuration file is read: every unknown key and bad value by line and column, all in one go.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use impresario_device::DeviceParams;
use serde::Deserialize;
use toml_edit::{Document, Item};

use crate::Calibration;
use crate::check::KeyPath;
use crate::model::{Cluster, Config, Data, Io, Meta};
use crate::section::{Reader, Section};

/// One thing that is wrong with a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    /// Line and column, from 1; `None` when it is about the file as a whole.
    pub at: Option<(usize, usize)>,
    /// What is wrong, and the remedy.
    pub message: String,
}

/// Everything that is wrong with a file; never empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigErrors {
    /// The file, as it was named.
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

/// No cluster's description is longer; a larger file is not one.
const FILE_MAX_BYTES: u64 = 4 << 20;

impl Config {
    /// Reads and checks a file. Folders in it are resolved against the folder it lies in.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        load(path).map(|(config, ..)| config)
    }

    /// The same, and reads the calibrations that servers are given by `cost`. These lie on the servers' machines, so
    /// that others cannot judge them.
    pub fn load_with_calibrations(path: &Path) -> Result<Config, ConfigErrors> {
        let (config, reader, text) = load(path)?;
        let root = KeyPath::default();
        let data = config.data.iter().enumerate().map(|(i, data)| (root.key("data").index(i), &data.cost));
        let io = config.io.iter().enumerate().map(|(i, io)| (root.key("io").index(i), &io.cost));
        let complaint = |(at, cost): (KeyPath, &Option<PathBuf>)| {
            let errors = Calibration::load(cost.as_ref()?).err()?;
            let place = reader.place_of(&at.key("cost"));
            Some(Complaint { at: Some(line_column(&text, place)), message: format!("cost: {errors}") })
        };
        let complaints: Vec<Complaint> = data.chain(io).filter_map(complaint).collect();
        if complaints.is_empty() { Ok(config) } else { Err(ConfigErrors { file: path.into(), complaints }) }
    }

    /// Reads and checks the text of a file that lies, or would lie, at `file`.
    pub fn parse(text: &str, file: &Path) -> Result<Config, ConfigErrors> {
        parse(text, file).map(|(config, _)| config)
    }
}

/// The configuration, where its keys stand, and its text.
fn load(path: &Path) -> Result<(Config, Reader, String), ConfigErrors> {
    let refuse =
        |message: String| ConfigErrors { file: path.into(), complaints: vec![Complaint { at: None, message }] };
    let meta = std::fs::metadata(path)
        .map_err(|e| refuse(format!("cannot be read: {e}; `impresario up --dir D` writes D/impresario.toml")))?;
    if meta.len() > FILE_MAX_BYTES {
        return Err(refuse(format!("has {} bytes; a configuration has at most {FILE_MAX_BYTES}", meta.len())));
    }
    let text = std::fs::read_to_string(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
    // A full path, so that servers and clients mean the same folders wherever they are started.
    let full = std::path::absolute(path).map_err(|e| refuse(format!("cannot be found: {e}")))?;
    match parse(&text, &full) {
        Ok((config, reader)) => Ok((config, reader, text)),
        Err(errors) => Err(ConfigErrors { file: path.into(), ..errors }),
    }
}

fn parse(text: &str, file: &Path) -> Result<(Config, Reader), ConfigErrors> {
    let failed = |complaints| ConfigErrors { file: file.into(), complaints };
    let document = Document::parse(text).map_err(|e| {
        let message = e.message().trim().replace('\n', "; ");
        failed(vec![Complaint { at: e.span().map(|s| line_column(text, s.start)), message }])
    })?;
    let mut reader = Reader::default();
    let mut config = config(&mut reader, document.as_item());
    config.device = devices(&mut reader, text, config.data.len());
    for (path, message) in config.check() {
        if !reader.blamed.contains(&path) {
            reader.found.push((reader.place_of(&path), message));
        }
    }
    if reader.found.is_empty() {
        let base = file.parent().unwrap_or(Path::new(""));
        config.meta.dir = base.join(&config.meta.dir);
        config.data.iter_mut().for_each(|data| data.dir = base.join(&data.dir));
        config.costs_mut().for_each(|cost| *cost = base.join(&*cost));
        return Ok((config, reader));
    }
    reader.found.sort_by_key(|(place, _)| *place);
    let at = |place: usize| Some(line_column(text, place));
    Err(failed(reader.found.into_iter().map(|(p, message)| Complaint { at: at(p), message }).collect()))
}

/// Line and column, from 1 and in characters, of a byte of the text.
pub fn line_column(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |n| n + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

fn config(reader: &mut Reader, root: &Item) -> Config {
    let mut top = Section::new(reader, root.as_table_like(), KeyPath::default());
    let config = Config {
        cluster: top.section("cluster", false, cluster),
        meta: top.section("meta", true, meta),
        data: top.sections("data", true, data),
        io: top.sections("io", false, io),
        device: BTreeMap::new(),
    };
    top.known.push("device");
    top.finish();
    config
}

/// The `[device.…]` sections. Their keys belong to the device crate, whose `Deserialize` judges them;
/// it stops at the first mistake, so each bad key is blanked out and the rest read again.
fn devices(reader: &mut Reader, text: &str, data_servers: usize) -> BTreeMap<String, DeviceParams> {
    #[derive(Deserialize)]
    struct Devices {
        #[serde(default)]
        device: BTreeMap<String, DeviceParams>,
    }
    const MISTAKES_MAX: usize = 100;
    let mut text = text.to_string();
    for _ in 0..MISTAKES_MAX {
        let error = match toml_edit::de::from_str::<Devices>(&text) {
            Ok(read) => {
                note_devices(reader, &text);
                return read.device;
            }
            Err(error) => error,
        };
        let message = error.message().trim().replace('\n', "; ");
        let place = error.span().map_or(0, |span| span.start);
        reader.found.push((place, message));
        match entry_around(&text, place) {
            Some(entry) => text.replace_range(entry.clone(), &" ".repeat(entry.len())),
            None => break,
        }
    }
    // A model that could not be read is not a model that is missing.
    let data = KeyPath::default().key("data");
    reader.blamed.extend((0..data_servers).map(|i| data.index(i).key("device")));
    BTreeMap::new()
}

/// Remembers where the device sections stand.
fn note_devices(reader: &mut Reader, text: &str) {
    let Ok(document) = Document::parse(text) else { return };
    let Some(devices) = document.get("device").and_then(Item::as_table_like) else { return };
    for (name, item) in devices.iter() {
        let path = KeyPath::default().key("device").key(name);
        reader.places.insert(path, item.span().map_or(0, |span| span.start));
    }
}

/// The `key = value` of a device section that a byte of the text lies in.
fn entry_around(text: &str, place: usize) -> Option<Range<usize>> {
    let document = Document::parse(text).ok()?;
    let devices = document.get("device")?.as_table_like()?;
    devices.iter().filter_map(|(_, item)| item.as_table_like()).find_map(|table| {
        table.iter().find_map(|(name, _)| {
            let (key, item) = table.get_key_value(name)?;
            let entry = key.span()?.start..item.span()?.end;
            entry.contains(&place).then_some(entry)
        })
    })
}

fn cluster(section: &mut Section<'_, '_>) -> Cluster {
    let default = Cluster::default();
    Cluster {
        name: section.text("name").unwrap_or(default.name),
        stripe_bytes: section.number("stripe_bytes", "bytes").unwrap_or(default.stripe_bytes),
        stripe_count: section.number("stripe_count", "data servers"),
        request_timeout_ms: section.number("request_timeout_ms", "milliseconds").unwrap_or(default.request_timeout_ms),
        max_payload_bytes: section.number("max_payload_bytes", "bytes").unwrap_or(default.max_payload_bytes),
    }
}

fn meta(section: &mut Section<'_, '_>) -> Meta {
    Meta {
        address: section.needed_text("address", "\"127.0.0.1:7000\""),
        dir: section.needed_text("dir", "\"meta\"").into(),
    }
}

fn data(section: &mut Section<'_, '_>) -> Data {
    let name = section.needed_text("name", "\"data.0\"");
    let address = section.needed_text("address", "\"127.0.0.1:7100\"");
    let dir = section.needed_text("dir", "\"data.0\"");
    let default = Data::new(name, address, dir);
    Data {
        policy: section.policy("policy").unwrap_or(default.policy),
        in_flight_requests: section.number("in_flight_requests", "requests").unwrap_or(default.in_flight_requests),
        queue_requests: section.number("queue_requests", "requests").unwrap_or(default.queue_requests),
        payload_bytes: section.number("payload_bytes", "bytes").unwrap_or(default.payload_bytes),
        device: section.text("device"),
        cost: section.text("cost").map(Into::into),
        correct_cost: section.flag("correct_cost"),
        ..default
    }
}

fn io(section: &mut Section<'_, '_>) -> Io {
    let name = section.needed_text("name", "\"io.0\"");
    let address = section.needed_text("address", "\"127.0.0.1:7200\"");
    let default = Io::new(name, address);
    Io {
        policy: section.policy("policy").unwrap_or(default.policy),
        in_flight_requests: section.number("in_flight_requests", "requests").unwrap_or(default.in_flight_requests),
        merge_requests: section.number("merge_requests", "requests").unwrap_or(default.merge_requests),
        dispatch_requests: section.number("dispatch_requests", "requests").unwrap_or(default.dispatch_requests),
        split: section.flag("split").unwrap_or(default.split),
        cost: section.text("cost").map(Into::into),
        correct_cost: section.flag("correct_cost"),
        queue_requests: section.number("queue_requests", "requests").unwrap_or(default.queue_requests),
        payload_bytes: section.number("payload_bytes", "bytes").unwrap_or(default.payload_bytes),
        ..default
    }
}
