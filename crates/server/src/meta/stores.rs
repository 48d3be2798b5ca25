//! Which data servers' folders belong to the cluster: the file `stores` of the metadata directory, a line `name number` each.
//! And which data servers were emptied, so that they may be retired: the file `emptied`, a name in each line. And in which order
//! they are: the file `order`, a name in each line. Layouts of files name data servers by their numbers in it.
//!
//! A folder is noted when it is made together with the metadata directory, or else when its server first welcomes the
//! metadata server. From then on the server of that name must come with that folder: another one, made anew on an empty
//! disk, would have none of the cluster's objects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use impresario_base::lock::Mutex;
use impresario_wire::{ClusterId, Welcome};
use rustix::io::Errno;

use super::directory::{open_dir_at, read_format, read_text, write_durably};
use super::{StartError, directory};

pub(super) const FILE: &str = "stores";
const EMPTIED: &str = "emptied";
const ORDER: &str = "order";
/// Of a cluster of 1024 servers with the longest names.
const FILE_MAX_BYTES: usize = 128 << 10;

/// The folders of the data servers that belong to the cluster.
#[derive(Debug)]
pub struct Stores {
    dir: PathBuf,
    cluster: ClusterId,
    known: Mutex<BTreeMap<String, u64>>,
    /// Over these no file is striped.
    emptied: Mutex<BTreeSet<String>>,
}

impl Stores {
    /// Reads them out of a metadata directory, whether or not its server runs.
    pub fn open(dir: &Path) -> Result<Stores, StartError> {
        let cluster = read_format(dir)?;
        let unusable = |what| move |errno: Errno| directory::unusable(dir, what, errno);
        let top = open_dir_at(rustix::fs::CWD, dir).map_err(unusable("it cannot be opened"))?;
        let text = read_text(&top, FILE, FILE_MAX_BYTES)
            .map_err(unusable("its file `stores` cannot be read"))?
            .unwrap_or_default();
        let known = parse(&text).ok_or_else(|| StartError::Unknown {
            file: dir.join(FILE),
            found: super::fault::show(text.trim_end().as_bytes().get(..100).unwrap_or(text.as_bytes())),
            wanted: "a line `name number` for each data server",
        })?;
        let emptied =
            read_text(&top, EMPTIED, FILE_MAX_BYTES).map_err(unusable("its file `emptied` cannot be read"))?;
        let emptied = emptied.unwrap_or_default().lines().map(String::from).collect();
        Ok(Stores { dir: dir.into(), cluster, known: Mutex::new(known), emptied: Mutex::new(emptied) })
    }

    /// Whether a data server was emptied, and has got no files since.
    pub fn is_emptied(&self, name: &str) -> bool {
        self.emptied.lock().contains(name)
    }

    /// Notes, durably, that no file is striped over a data server, or that new ones may be.
    pub(crate) fn note_emptied(&self, name: &str, is_emptied: bool) -> rustix::io::Result<()> {
        let mut emptied = self.emptied.lock();
        let mut now = emptied.clone();
        let has_changed = if is_emptied { now.insert(name.into()) } else { now.remove(name) };
        if has_changed {
            let text: String = now.iter().map(|name| format!("{name}\n")).collect();
            write_durably(&open_dir_at(rustix::fs::CWD, &self.dir)?, EMPTIED, &text)?;
            *emptied = now;
        }
        Ok(())
    }

    /// Checks that the data servers of the configuration, by name, have the numbers that they had; notes those that have come.
    /// With another order every file would be read from, and written to, servers that have other parts of it. One that was
    /// renamed keeps its number, and one that never had a folder has no part of any file.
    pub fn vet_order(&self, names: &[impl AsRef<str>]) -> Result<(), String> {
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        let top = open_dir_at(rustix::fs::CWD, &self.dir);
        let text = top.as_ref().map_err(|errno| *errno).and_then(|top| read_text(top, ORDER, FILE_MAX_BYTES));
        let file = self.dir.join(ORDER);
        let text = text.map_err(|errno| format!("{} cannot be read: {errno}", file.display()))?.unwrap_or_default();
        let noted: Vec<&str> = text.lines().collect();
        let known = self.known();
        let fits = |at: usize, name: &str| match names.get(at) {
            Some(now) if *now == name => true,
            _ if !known.contains_key(name) => true,
            Some(now) => !names.contains(&name) && !noted.contains(now),
            None => false,
        };
        if let Some(name) = noted.iter().enumerate().find(|(at, name)| !fits(*at, name)).map(|(_, name)| name) {
            return Err(format!(
                "files are striped over the data servers in the order {}, and {name} is not at its place in the configuration: \
                 write the sections [[data]] in this order, new ones behind them; that of a server that does not run any more \
                 stays (`state`)",
                noted.join(", ")
            ));
        }
        if noted != names {
            let text: String = names.iter().map(|name| format!("{name}\n")).collect();
            if let Err(error) = top.and_then(|top| write_durably(&top, ORDER, &text)) {
                // A full disk, say: it is noted at another start.
                tracing::warn!(%error, file = %file.display(), "the order of the data servers cannot be noted");
            }
        }
        Ok(())
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The number of each data server's folder.
    pub fn known(&self) -> BTreeMap<String, u64> {
        self.known.lock().clone()
    }

    /// Checks the folder that a data server serves; notes it, durably, when it is the first of that name.
    pub fn vet(&self, welcome: &Welcome) -> Result<(), String> {
        let Welcome { name, store, .. } = welcome;
        let mut known = self.known.lock();
        match known.get(name) {
            Some(number) if number == store => Ok(()),
            Some(number) => Err(format!(
                "it serves folder {store:016x}, but {name} of this cluster has folder {number:016x}; give it that one back \
                 (is its disk mounted?), or see `impresario store init --replace`"
            )),
            // A server without a folder of its own is none that could lose one.
            None if *store == 0 => Ok(()),
            None => {
                let mut more = known.clone();
                more.insert(name.clone(), *store);
                let top = open_dir_at(rustix::fs::CWD, &self.dir);
                top.and_then(|top| write_durably(&top, FILE, &text_of(&more))).map_err(|errno| {
                    format!("its folder cannot be noted in {}: {errno}", self.dir.join(FILE).display())
                })?;
                *known = more;
                Ok(())
            }
        }
    }
}

/// The content of the file.
pub(super) fn text_of(known: &BTreeMap<String, u64>) -> String {
    known.iter().map(|(name, number)| format!("{name} {number:016x}\n")).collect()
}

fn parse(text: &str) -> Option<BTreeMap<String, u64>> {
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_string(), u64::from_str_radix(number, 16).ok().filter(|number| *number != 0)?))
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn welcome(name: &str, store: u64) -> Welcome {
        let (version, cluster) = (impresario_wire::PROTOCOL_VERSION, ClusterId(7));
        let (number, keys) = (None, Default::default());
        Welcome { version, name: name.into(), incarnation: 1, max_payload_bytes: 1, cluster, store, number, keys }
    }

    #[test]
    fn a_folder_once_noted_is_the_only_one_of_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let known = BTreeMap::from([("data.0".to_string(), 5)]);
        super::super::make(dir.path(), ClusterId(7), &known).unwrap();
        let stores = Stores::open(dir.path()).unwrap();
        assert_eq!((stores.cluster(), stores.known()), (ClusterId(7), known));
        stores.vet(&welcome("data.0", 5)).unwrap();
        let refused = stores.vet(&welcome("data.0", 6)).unwrap_err();
        assert!(refused.contains("has folder 0000000000000005") && refused.contains("mounted"), "{refused}");
        stores.vet(&welcome("data.1", 8)).unwrap();
        stores.vet(&welcome("data.2", 0)).unwrap();
        let again = Stores::open(dir.path()).unwrap();
        assert!(again.vet(&welcome("data.1", 9)).is_err(), "noted over a restart");
        again.vet(&welcome("data.1", 8)).unwrap();
        std::fs::write(dir.path().join(FILE), "data.0\n").unwrap();
        assert!(matches!(Stores::open(dir.path()), Err(StartError::Unknown { .. })));
    }

    #[test]
    fn data_servers_keep_their_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let known = ["a", "b", "c"].map(|name| (name.to_string(), 5)).into();
        super::super::make(dir.path(), ClusterId(7), &known).unwrap();
        let stores = Stores::open(dir.path()).unwrap();
        let vet = |names: &[&str]| stores.vet_order(names);
        vet(&["b", "a"]).unwrap(); // what counts is noted here
        for wrong in [&["a", "b"][..], &["b"], &["a"], &[], &["c", "b", "a"], &["b", "c", "a"]] {
            let refused = vet(wrong).unwrap_err();
            assert!(refused.contains("in the order b, a,") && refused.contains("[[data]]"), "{refused}");
        }
        vet(&["b", "a", "c", "new"]).unwrap();
        assert!(vet(&["b", "a", "new", "c"]).is_err());
        // Renamed; and one that was never there, taken away again.
        vet(&["b", "other", "c", "new"]).unwrap();
        vet(&["b", "other", "c"]).unwrap();
        assert!(vet(&["b", "other"]).is_err());
        std::fs::create_dir(dir.path().join("order.new")).unwrap();
        vet(&["b", "other", "c", "more"]).unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join(ORDER)).unwrap(), "b\nother\nc\n", "it could not be noted");
    }

    #[test]
    fn what_was_emptied_is_remembered_until_it_gets_files() {
        let dir = tempfile::tempdir().unwrap();
        super::super::make(dir.path(), ClusterId(7), &BTreeMap::new()).unwrap();
        let stores = Stores::open(dir.path()).unwrap();
        assert!(!stores.is_emptied("data.1"));
        for name in ["data.1", "data.2", "data.1"] {
            stores.note_emptied(name, true).unwrap();
        }
        stores.note_emptied("data.2", false).unwrap();
        let again = Stores::open(dir.path()).unwrap();
        assert!(again.is_emptied("data.1") && !again.is_emptied("data.2"));
        // A note that cannot be made does not count.
        std::fs::create_dir(dir.path().join("emptied.new")).unwrap();
        assert!(again.note_emptied("data.1", false).is_err() && again.is_emptied("data.1"));
    }
}
