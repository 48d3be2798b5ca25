//! The section `[nfs]` of a configuration: an NFS server's addresses, limits and exports. It may be in a cluster's file
//! or in a separate one: the server needs nothing else of a cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use impresario_sched::{PolicySpec, policy};
use impresario_toml::{FileErrors, KeyPath, Mistakes, read, text_of};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::check::{Findings, READ_AHEAD_MIN_BYTES, check_file_system, policy_complaint, takes};
use crate::export::{AccessRules, EXPORTS_MAX, Export, NOBODY, Squash, check_networks, loopback};
use crate::load::{FILE_MAX_BYTES, goes_by_a_guess};
use crate::model::{Data, Tree, TreeBackend, is_empty};
use crate::policies::policies;
use crate::table::{set_base, without_table_file};

/// An NFS server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Nfs {
    /// Addresses, each `ip:port`; port 0: any free one.
    pub listen: Vec<String>,
    /// Scheduling policy of reads and writes.
    pub policy: PolicySpec,
    /// Maximum batches in flight to each file system below the exports (1 to 256).
    pub in_flight_requests: u32,
    /// Bytes that the server reads ahead of its clients at most (4 MiB to 64 GiB; 0: not at all). Only from folders on a device: not from memory.
    pub read_ahead_bytes: u64,
    /// Unstable writes that the server answers before they are done, bytes, at most (0 to half of `memory_bytes`; 0: none). Only
    /// of files without a page cache.
    pub gather_bytes: u64,
    /// Also schedule reads that the page cache has; else they are answered at once, unless the policy is about who gets how
    /// much.
    pub schedule_cached_reads: bool,
    /// Threads for calls on names and attributes (2 to 256).
    pub name_threads: u32,
    /// Connections at once (1 to 65536).
    pub max_connections: u32,
    /// Memory for calls and answers, bytes (2 MiB to 64 GiB).
    pub memory_bytes: u64,
    /// A connection without calls is closed after this time, s (10 to 86400).
    pub idle_s: u64,
    /// The file with the secret of handles, created if missing; relative to the configuration file. Absent: in the
    /// state folder of the system or user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// A socket at which `impresario status` finds the server; relative to the configuration file. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<PathBuf>,
    /// Address of its metrics for Prometheus, `ip:port`: `http://ip:port/metrics`. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// Register the server with this machine's portmapper.
    pub register: bool,
    /// The exports.
    pub export: Vec<NfsExport>,
}

/// An export, and who may use it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NfsExport {
    /// The path that clients mount, e.g. `/data`.
    pub name: String,
    /// The folder; relative to the configuration file. Empty: `tree` is exported.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub dir: PathBuf,
    /// In the place of `dir`: a file system with the keys of the section `[tree]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<Tree>,
    /// The folder below that clients see as the root; empty: all of it.
    #[serde(default)]
    pub folder: String,
    /// Networks of clients that may use it; other clients do not see it.
    #[serde(default = "loopback")]
    pub networks: Vec<String>,
    /// Refuse every change.
    #[serde(default)]
    pub read_only: bool,
    /// Which users are mapped to the anonymous user.
    #[serde(default)]
    pub squash: Squash,
    /// The anonymous user.
    #[serde(default = "nobody")]
    pub anonymous_uid: u32,
    /// The anonymous group.
    #[serde(default = "nobody")]
    pub anonymous_gid: u32,
    /// Clients must use a source port below 1024.
    #[serde(default = "yes")]
    pub privileged_ports: bool,
    /// Put changes of names and attributes on stable storage before they are answered.
    #[serde(default = "yes")]
    pub stable_names: bool,
}

fn nobody() -> u32 {
    NOBODY
}
fn yes() -> bool {
    true
}

impl Default for Nfs {
    fn default() -> Nfs {
        Nfs {
            listen: vec!["127.0.0.1:2049".into()],
            policy: PolicySpec::named("auto"),
            in_flight_requests: 16,
            read_ahead_bytes: Data::READ_AHEAD_BYTES,
            gather_bytes: 0,
            schedule_cached_reads: false,
            name_threads: 16,
            max_connections: 1024,
            memory_bytes: 256 << 20,
            idle_s: 600,
            key_file: None,
            status: None,
            metrics: None,
            register: false,
            export: Vec::new(),
        }
    }
}

impl NfsExport {
    /// The rules of access, as a server enforces them; the error names what is wrong with a network.
    pub fn rules(&self) -> Result<AccessRules, String> {
        let NfsExport { networks, read_only, squash, anonymous_uid, anonymous_gid, .. } = self.clone();
        Export { networks, read_only, squash, anonymous_uid, anonymous_gid, ..Export::default() }.rules()
    }

    /// The file system that is exported.
    pub fn file_system(&self) -> Tree {
        self.tree.clone().unwrap_or_else(|| Tree::of_folder(&self.dir))
    }

    /// A folder under a name, with the default of every other key.
    pub fn new(name: impl Into<String>, dir: impl Into<PathBuf>) -> NfsExport {
        NfsExport {
            name: name.into(),
            dir: dir.into(),
            tree: None,
            folder: String::new(),
            networks: loopback(),
            read_only: false,
            squash: Squash::Root,
            anonymous_uid: nobody(),
            anonymous_gid: nobody(),
            privileged_ports: true,
            stable_names: true,
        }
    }
}

impl Nfs {
    /// Reads and checks the section of a file, ignoring the rest. Relative paths in it are resolved against the file's
    /// directory.
    pub fn load(file: &Path) -> Result<Nfs, FileErrors> {
        let remedy = "doc/NFS.md has an example";
        let text = text_of(file, FILE_MAX_BYTES, "a configuration", remedy)?;
        let full = std::path::absolute(file).map_err(|e| FileErrors::whole(file, format!("cannot be found: {e}")))?;
        let tree = impresario_toml::Tree::parse(&text, file)?;
        let (mut values, mut mistakes) = (tree.values.clone(), Mistakes::default());
        policies(&mut values, &KeyPath::default(), &mut mistakes);
        let Some(section) = take_section(&mut values) else {
            return Err(FileErrors::whole(file, format!("there is no section [nfs]; add one: {remedy}")));
        };
        let nfs = read_section(section, &mut mistakes);
        let mut nfs = mistakes.settle(nfs, file, &tree)?;
        nfs.resolve(full.parent().unwrap_or(Path::new("")));
        Ok(nfs)
    }

    /// Whether a file has this section and nothing else, so that it describes no cluster.
    pub fn stands_alone(file: &Path) -> bool {
        let text = text_of(file, FILE_MAX_BYTES, "a configuration", "");
        let tree = text.ok().and_then(|text| impresario_toml::Tree::parse(&text, file).ok());
        tree.is_some_and(|tree| tree.values.len() == 1 && tree.values.contains_key("nfs"))
    }

    /// The section as a file, with every default filled in.
    pub fn to_toml(&self) -> String {
        let mut full = self.clone();
        full.export.iter_mut().filter_map(|export| export.tree.as_mut()).for_each(Tree::fill);
        let section =
            Table::from_iter([("nfs".to_string(), Value::try_from(full).unwrap_or(Value::Table(Table::new())))]);
        toml::to_string(&section).unwrap_or_default()
    }

    fn resolve(&mut self, base: &Path) {
        set_base(&mut self.policy, base);
        let own = self.key_file.iter_mut().chain(&mut self.status);
        let exported = self.export.iter_mut().flat_map(|export| {
            let dir = Some(&mut export.dir).filter(|dir| !is_empty(dir));
            dir.into_iter().chain(export.tree.iter_mut().flat_map(Tree::paths_mut))
        });
        own.chain(exported).for_each(|path| *path = base.join(&*path));
    }

    /// All invalid values, each with its key; empty if the section is valid.
    pub fn check(&self) -> Vec<(KeyPath, String)> {
        let at = KeyPath::default().key("nfs");
        let mut found = Vec::new();
        let mut range = |key: &str, value: u64, least: u64, most: u64, unit: &str| {
            if !(least..=most).contains(&value) {
                found.push((at.key(key), format!("{key} is {value}; it must be between {least} and {most}{unit}")));
            }
        };
        range("in_flight_requests", self.in_flight_requests.into(), 1, 256, " batches");
        if self.read_ahead_bytes != 0 {
            range("read_ahead_bytes", self.read_ahead_bytes, READ_AHEAD_MIN_BYTES, 64 << 30, " bytes (0: not at all)");
        }
        range("name_threads", self.name_threads.into(), 2, 256, " threads");
        range("max_connections", self.max_connections.into(), 1, 65536, " connections");
        range("memory_bytes", self.memory_bytes, 2 << 20, 64 << 30, " bytes");
        range("gather_bytes", self.gather_bytes, 0, self.memory_bytes / 2, " bytes, half of memory_bytes");
        range("idle_s", self.idle_s, 10, 86400, " s");
        if self.listen.is_empty() {
            found.push((at.key("listen"), "listen is empty; name an address such as \"0.0.0.0:2049\"".into()));
        }
        for (i, address) in self.listen.iter().enumerate() {
            if address.parse::<std::net::SocketAddr>().is_err() {
                let why =
                    format!("{address:?} is not an address; write ip:port, such as \"0.0.0.0:2049\" or \"[::]:2049\"");
                found.push((at.key("listen").index(i), why));
            }
        }
        if let Some((metrics, listen)) =
            self.metrics.and_then(|metrics| Some((metrics, self.listen.iter().find(|listen| takes(listen, metrics))?)))
        {
            let why = format!("{metrics} takes the port of {listen} in listen; give the metrics a port of their own");
            found.push((at.key("metrics"), why));
        }
        if let Err(error) = policy::check(&without_table_file(&self.policy), 1) {
            found.push((at.key("policy"), policy_complaint(&error)));
        }
        if self.export.len() > EXPORTS_MAX {
            found.push((at.key("export"), format!("there are more than {EXPORTS_MAX} exports")));
        }
        for (i, export) in self.export.iter().enumerate() {
            let at = at.key("export").index(i);
            let (name, others) = (&export.name, &self.export[..i]);
            if !name.starts_with('/')
                || name.len() > 1 && name.ends_with('/')
                || name.contains("//")
                || name.len() > 1000
            {
                let why = format!("{name:?} is not the name of an export; write a path such as \"/data\"");
                found.push((at.key("name"), why));
            } else if others.iter().any(|other| other.name == *name) {
                found.push((at.key("name"), format!("{name:?} is exported twice; give each export its own name")));
            }
            if export.folder.split('/').any(|name| name == ".." || name == ".") {
                found.push((
                    at.key("folder"),
                    "folder may not contain . or ..; name a folder below the export's".into(),
                ));
            }
            match (&export.tree, is_empty(&export.dir)) {
                (None, true) => {
                    let why =
                        "there is neither a dir nor a tree; add dir = \"/srv/data\", or a tree with the keys of [tree]";
                    found.push((at.key("dir"), why.into()));
                }
                (None, false) => {}
                (Some(_), false) => {
                    found.push((at.key("tree"), "there is a dir, too; remove one of them".into()));
                }
                (Some(tree), true) => found.extend(check_tree(tree, &at.key("tree"))),
            }
            found.extend(check_networks(&export.networks, &at));
        }
        found
    }
}

/// A file system in the place of a folder.
fn check_tree(tree: &Tree, at: &KeyPath) -> Vec<(KeyPath, String)> {
    let mut found = Findings::default();
    check_file_system(tree, at, &mut found);
    // Where the bytes of files lie is of no matter here; of CephFS these keys say how new files are striped.
    let given = [
        ("data_servers", tree.data_servers != Tree::default().data_servers),
        ("stripe_bytes", tree.stripe_bytes.is_some()),
        ("stripe_count", tree.stripe_count.is_some()),
    ];
    for (key, given) in given {
        if given && (tree.backend != TreeBackend::Cephfs || tree.stripe_bytes.is_none()) {
            let why = "an NFS server schedules a file system as a whole; remove it";
            found.found.retain(|(path, _)| *path != at.key(key));
            found.add(at, key, format!("{key} is for I/O nodes, and for new files of cephfs with stripe_bytes: {why}"));
        }
    }
    found.found
}

/// Takes the section out of a file's values.
pub(crate) fn take_section(values: &mut Table) -> Option<Table> {
    match values.remove("nfs")? {
        Value::Table(section) => Some(section),
        other => Some(Table::from_iter([("nfs".to_string(), other)])),
    }
}

/// Reads the section and notes its mistakes.
pub(crate) fn read_section(section: Table, mistakes: &mut Mistakes) -> Option<Nfs> {
    let nfs: Nfs = read(section, &KeyPath::default().key("nfs"), missing, mistakes)?;
    for (path, message) in nfs.check() {
        if !goes_by_a_guess(&path, mistakes) {
            mistakes.add(path, message);
        }
    }
    Some(nfs)
}

/// The one key without default.
fn missing(_: &KeyPath) -> Option<(&'static str, Value)> {
    Some(("\"/data\"", Value::String("/".into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    /// What a posix tree lacks is not told of one that is to be of another kind.
    #[test]
    fn a_misspelt_backend_is_the_only_mistake() {
        let text = "[nfs]\n[[nfs.export]]\nname = \"/data\"\ntree = { backend = \"glusterf\", volume = \"v\" }\n";
        let told = load(text).unwrap_err();
        assert!(told.contains("did you mean glusterfs?") && told.lines().count() == 1, "{told}");
    }

    const GOOD: &str = "[nfs]\npolicy = \"mlf\"\nkey_file = \"key\"\n[[nfs.export]]\nname = \"/data\"\ndir = \"d\"\n\
                        networks = [\"10.0.0.0/8\"]\nsquash = \"none\"\n";

    fn load(text: &str) -> Result<Nfs, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("n.toml");
        std::fs::write(&file, text).unwrap();
        let base = folder.path().display().to_string();
        Nfs::load(&file).map_err(|errors| errors.to_string().replace(&format!("{base}/"), ""))
    }

    #[test]
    fn a_file_of_its_own_is_read_with_defaults_and_folders_resolved() {
        let nfs = load(GOOD).unwrap();
        assert_eq!((nfs.policy.name.as_str(), nfs.listen[0].as_str()), ("mlf", "127.0.0.1:2049"));
        assert!(nfs.export[0].dir.is_absolute() && nfs.key_file.is_some_and(|file| file.ends_with("key")));
        assert_eq!((nfs.export[0].squash, nfs.export[0].privileged_ports), (Squash::None, true));
        assert!(load("[cluster]\n").unwrap_err().contains("no section [nfs]"));
        let taken = load(&GOOD.replace("key_file", "metrics = \"127.0.0.1:2049\"\nkey_file")).unwrap_err();
        assert!(taken.contains(":3:") && taken.contains("give the metrics a port of their own"), "{taken}");
    }

    #[test]
    fn every_mistake_is_told_with_its_place() {
        let text = GOOD.replace("\"mlf\"", "\"mfl\"\nidle_s = 1\nlissten = []");
        let text = text.replace("10.0.0.0/8", "10.0.0/8").replace("\"none\"", "\"nobody\"\nfolder = \"../x\"");
        let errors = load(&text).unwrap_err();
        for (line, what) in
            [(2, "mlf"), (3, "idle_s is 1"), (4, "lissten"), (9, "10.0.0/8"), (10, "squash"), (11, "folder")]
        {
            let found =
                errors.lines().any(|error| error.starts_with(&format!("n.toml:{line}:")) && error.contains(what));
            assert!(found, "{what}: {errors}");
        }
        assert!(load("[nfs]\n[[nfs.export]]\ndir = \"d\"\n").unwrap_err().contains("no name"));
        assert!(load("nfs = 3\n").is_err());
    }

    #[test]
    fn a_file_system_may_stand_in_the_place_of_a_folder() {
        let with = |tree: &str| GOOD.replace("dir = \"d\"", &format!("tree = {{ {tree} }}"));
        let nfs = load(&with("backend = \"glusterfs\", volume = \"v\", volfile = \"v.vol\"")).unwrap();
        let tree = nfs.export[0].file_system();
        assert!(tree.backend == TreeBackend::Glusterfs && tree.volfile.is_some_and(|file| file.is_absolute()));
        // A folder of CephFS is none of this machine.
        let ceph = "backend = \"cephfs\", folder = \"/a\", stripe_bytes = 65536, data_servers = 4, stripe_count = 2";
        let nfs = load(&with(ceph)).unwrap();
        assert_eq!(nfs.export[0].file_system().folder, Path::new("/a"));
        assert!(nfs.to_toml().contains("user = \"admin\"") && !nfs.to_toml().contains("dir = "), "{}", nfs.to_toml());
        assert_eq!(load(GOOD).unwrap().export[0].file_system().folder.file_name(), Some("d".as_ref()));
        assert!(load(&with("folder = \"d\", direct = true")).unwrap().export[0].file_system().folder.is_absolute());
        let refused = |text: &str, line: u32, what: &str| {
            let errors = load(text).unwrap_err();
            assert!(errors.starts_with(&format!("n.toml:{line}:")) && errors.contains(what), "{what}: {errors}");
            assert_eq!(errors.lines().count(), 1, "{errors}");
        };
        refused(&with("backend = \"glusterfs\", volume = \"v\""), 6, "there is no server");
        refused(&with("backend = \"glusterfs\", server = \"h\""), 6, "name the volume");
        refused(&with("backend = \"gluster\", folder = \"/f\""), 6, "glusterfs");
        refused(&with("folder = \"/f\", volum = \"v\""), 6, "volume");
        refused(&with("folder = \"/f\", data_servers = 2"), 6, "data_servers is for I/O nodes");
        refused(&with("folder = \"/f\", stripe_bytes = 65536"), 6, "stripe_bytes is for I/O nodes");
        refused(&with("backend = \"cephfs\", stripe_count = 1"), 6, "stripe_count is for I/O nodes");
        refused(&GOOD.replace("dir = \"d\"", "dir = \"d\"\ntree = { folder = \"/f\" }"), 7, "remove one of them");
        refused(&GOOD.replace("dir = \"d\"\n", ""), 4, "neither a dir nor a tree");
    }

    /// In the file of a cluster it is checked with the rest, and hides nothing.
    #[test]
    fn the_section_may_stand_in_the_file_of_a_cluster() {
        let cluster = "[meta]\naddress = \"127.0.0.1:1\"\ndir = \"m\"\n[[data]]\nname = \"data.0\"\n\
                       address = \"127.0.0.1:2\"\ndir = \"d\"\n";
        let text = format!("{cluster}{GOOD}");
        assert_eq!(Config::parse(&text, Path::new("/c.toml")).unwrap().data.len(), 1);
        load(&text).unwrap();
        let bad = text.replace("\"none\"", "\"nobody\"");
        let errors = Config::parse(&bad, Path::new("/c.toml")).unwrap_err().to_string();
        assert!(errors.contains("/c.toml:15:") && errors.contains("squash"), "{errors}");
    }
}
