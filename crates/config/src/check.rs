//! The checks of a configuration: ranges, names, addresses, directories, policies and device models.
//!
//! They examine values only, so they serve both files and configurations made by programs. A complaint names the key by
//! its [`KeyPath`], and the reader turns that into a line of the file.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use impresario_layout::{Layout, Skipped};
use impresario_sched::{PolicyError, PolicySpec, policy};
use impresario_toml::{KeyPath, nearest};

use crate::Address;
use crate::allocation::{NAMES_MAX, RULES_MAX};
use crate::model::{Config, DataState, META_NAME, Security, Tree, TreeBackend};
use crate::table::without_table_file;

/// A file with more servers than this is a mistake.
const SERVERS_MAX: usize = 1024;
const QUEUE_MAX: u64 = 1_000_000;
const PAYLOAD_MAX_BYTES: u64 = 64 << 30;
/// Entries of `earlier_runs`.
const RUNS_MAX: usize = 16;
/// One stream read ahead in full.
pub(crate) const READ_AHEAD_MIN_BYTES: u64 = 4 << 20;

/// The findings of the checks, each with its key.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<(KeyPath, String)>,
    /// The last policy that is one, for so many lanes.
    passed: Option<(PolicySpec, u16)>,
}

impl Findings {
    pub(crate) fn add(&mut self, path: &KeyPath, key: &str, message: impl Into<String>) {
        self.found.push((path.key(key), message.into()));
    }

    fn range(&mut self, path: &KeyPath, key: &str, value: u64, (least, most): (u64, u64), unit: &str) {
        if !(least..=most).contains(&value) {
            self.add(path, key, format!("{key} is {value}; it must be between {least} and {most}{unit}"));
        }
    }

    fn policy(&mut self, path: &KeyPath, spec: &PolicySpec, lanes: u16) {
        let wanted = (without_table_file(spec), lanes);
        // Most servers have the policy of the one before, and the check makes it, which takes `auto` a millisecond.
        if self.passed.as_ref() == Some(&wanted) {
            return;
        }
        match policy::check(&wanted.0, lanes) {
            Ok(()) => self.passed = Some(wanted),
            Err(error) => self.add(path, "policy", policy_complaint(&error)),
        }
    }
}

/// The key that the error `why` about a device model concerns: it begins with the key if so.
pub fn device_key(name: &str, why: &str) -> KeyPath {
    let device = KeyPath::default().key("device").key(name);
    why.split_once(" is ").map_or(device.clone(), |(key, _)| device.key(key))
}

/// The remedy where the device `name` is not among the `known` ones.
pub fn missing_device<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(name, known) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("add a section [device.{name}] or remove the key"),
    }
}

/// The complaint about a policy, with the closest known name.
pub fn policy_complaint(error: &PolicyError) -> String {
    let near = match error {
        PolicyError::Unknown { name, .. } => nearest(name, policy::POLICIES.iter().map(|p| p.name)),
        PolicyError::UnknownParam { policy, name, .. } => {
            let info = policy::POLICIES.iter().find(|p| p.name == *policy);
            nearest(name, info.map_or(&[][..], |p| p.params).iter().map(|p| p.name))
        }
        _ => None,
    };
    near.map_or_else(|| error.to_string(), |near| format!("{error}; did you mean {near}?"))
}

/// How a file system that is there already is described.
pub(crate) fn check_file_system(tree: &Tree, at: &KeyPath, found: &mut Findings) {
    match tree.backend {
        TreeBackend::Posix => check_folder(tree, at, found),
        TreeBackend::Glusterfs => check_volume(tree, at, found),
        TreeBackend::Cephfs => check_cephfs(tree, at, found),
    }
    let most = SERVERS_MAX as u64;
    found.range(at, "data_servers", tree.data_servers.into(), (1, most), "");
    let ssize = (u64::from(Layout::SSIZE_MIN_BYTES), u64::from(Layout::SSIZE_MAX_BYTES));
    match (tree.stripe_bytes, tree.stripe_count) {
        (Some(bytes), _) => found.range(at, "stripe_bytes", bytes.into(), ssize, " bytes"),
        (None, Some(_)) => found.add(at, "stripe_count", "stripe_count needs stripe_bytes; add it"),
        (None, None) => {}
    }
    if let Some(count) = tree.stripe_count {
        let most = u64::from(tree.data_servers);
        found.range(at, "stripe_count", count.into(), (1, most), ", the number of data servers");
    }
}

fn check_folder(tree: &Tree, at: &KeyPath, found: &mut Findings) {
    if tree.folder.as_os_str().is_empty() {
        found.add(at, "folder", "folder is missing or empty; name a folder of the file system");
    }
    check_others(tree, at, found);
}

/// Keys of other backends than the tree's.
fn check_others(tree: &Tree, at: &KeyPath, found: &mut Findings) {
    let gluster = [("volume", tree.volume.is_some()), ("server", tree.server.is_some())];
    let gluster = gluster.into_iter().chain([("volfile", tree.volfile.is_some())]);
    let ceph = [("ceph_config", tree.ceph_config.is_some()), ("user", tree.user.is_some())];
    let ceph = ceph
        .into_iter()
        .chain([("filesystem", tree.filesystem.is_some()), ("object_bytes", tree.object_bytes.is_some())]);
    let posix = [("io", tree.io.is_some()), ("direct", tree.direct.is_some())].into_iter();
    let keys = gluster
        .map(|key| (key, TreeBackend::Glusterfs, "glusterfs"))
        .chain(posix.map(|key| (key, TreeBackend::Posix, "posix")))
        .chain(ceph.map(|key| (key, TreeBackend::Cephfs, "cephfs")));
    for ((key, given), backend, called) in keys {
        if given && tree.backend != backend {
            found.add(at, key, format!("{key} is for backend = \"{called}\"; set that, or remove the key"));
        }
    }
}

fn check_cephfs(tree: &Tree, at: &KeyPath, found: &mut Findings) {
    check_others(tree, at, found);
    for (key, value) in [("user", &tree.user), ("filesystem", &tree.filesystem)] {
        if value.as_ref().is_some_and(|value| value.is_empty()) {
            found.add(at, key, format!("{key} is empty; name it, or remove the key"));
        }
    }
    if tree.user.as_ref().is_some_and(|user| user.starts_with("client.")) {
        found.add(at, "user", "user is given without \"client.\"");
    }
    const UNIT_BYTES: u32 = 64 << 10;
    let Some(unit) = tree.stripe_bytes.filter(|unit| *unit > 0) else {
        if tree.object_bytes.is_some() {
            found.add(at, "object_bytes", "object_bytes needs stripe_bytes; add it");
        }
        return;
    };
    if !unit.is_multiple_of(UNIT_BYTES) {
        found.add(at, "stripe_bytes", format!("Ceph wants a multiple of {UNIT_BYTES} for stripe_bytes, not {unit}"));
    }
    let object = tree.object_bytes.unwrap_or(Tree::OBJECT_DEFAULT_BYTES);
    if object == 0 || !object.is_multiple_of(unit) {
        let message = format!("object_bytes, {object}, is not a multiple of stripe_bytes, {unit}");
        found.add(at, "object_bytes", message);
    }
}

fn check_volume(tree: &Tree, at: &KeyPath, found: &mut Findings) {
    if tree.volume.as_deref().unwrap_or_default().is_empty() {
        found.add(at, "volume", "volume is missing or empty; name the volume, as `gluster volume list` does");
    }
    match (&tree.server, &tree.volfile) {
        (None, None) => {
            found.add(at, "server", "there is no server; name a host that runs glusterd, or a volfile on this machine")
        }
        (Some(_), Some(_)) => found.add(at, "volfile", "there is a server, too; remove one of them"),
        (Some(server), None) if tree.volume_server().is_none() => {
            found.add(at, "server", format!("server {server:?} is not a host or host:port"));
        }
        (None, Some(file)) if file.as_os_str().is_empty() => {
            found.add(at, "volfile", "volfile is empty; name a volume file");
        }
        _ => {}
    }
    check_others(tree, at, found);
    if !tree.folder.as_os_str().is_empty() {
        found.add(at, "folder", "folder is for backend = \"posix\"; a volume is served as a whole: remove the key");
    }
    if tree.stripe_bytes.is_some() {
        found.add(at, "stripe_bytes", "a volume tells itself where files are; remove stripe_bytes");
    }
}

impl Config {
    /// All invalid values, each with its key; empty if the configuration is valid.
    pub fn check(&self) -> Vec<(KeyPath, String)> {
        let mut found = Findings::default();
        self.check_cluster(&mut found);
        self.check_tree(&mut found);
        self.check_data(&mut found);
        self.check_io(&mut found);
        self.check_allocation(&mut found);
        self.check_apart(&mut found);
        self.check_moves(&mut found);
        found.found.extend(self.check_exports());
        found.found
    }

    fn check_cluster(&self, found: &mut Findings) {
        let (at, cluster) = (KeyPath::default().key("cluster"), &self.cluster);
        if cluster.name.chars().any(char::is_control) || cluster.name.len() > 256 {
            found.add(&at, "name", "name must be one line of at most 256 bytes");
        }
        let ssize = (u64::from(Layout::SSIZE_MIN_BYTES), u64::from(Layout::SSIZE_MAX_BYTES));
        found.range(&at, "stripe_bytes", cluster.stripe_bytes.into(), ssize, " bytes");
        found.range(&at, "request_timeout_ms", cluster.request_timeout_ms, (100, 600_000), " ms");
        found.range(&at, "max_payload_bytes", cluster.max_payload_bytes.into(), (4096, 64 << 20), " bytes");
        let most = (1, 65_536);
        found.range(&at, "max_connections", cluster.max_connections.into(), (16, 65_536), "");
        found.range(&at, "max_connections_per_address", cluster.max_connections_per_address.into(), most, "");
        let percent = cluster.payload_percent_per_address.into();
        found.range(&at, "payload_percent_per_address", percent, (1, 100), " percent");
        found.range(&at, "poll_us", cluster.poll_us.into(), (0, 1000), " µs");
        if cluster.key_dir.as_os_str().is_empty() {
            found.add(&at, "key_dir", "key_dir is empty; name a folder for the files of keys, or remove the key");
        }
        self.check_tls(found);
        for (key, ms) in [("lock_lease_ms", self.meta.lock_lease_ms), ("grace_ms", self.meta.grace_ms)] {
            if let Some(ms) = ms {
                found.range(&KeyPath::default().key("meta"), key, ms, (500, 600_000), " ms");
            }
        }
        if let Some(Err(error)) = self.meta.policy.as_ref().map(policy::check_for_names) {
            found.add(&KeyPath::default().key("meta"), "policy", policy_complaint(&error));
        }
        if let Some(count) = cluster.stripe_count.filter(|_| !self.data.is_empty()) {
            let most = self.data.len() as u64;
            found.range(&at, "stripe_count", count.into(), (1, most), ", the number of data servers");
        }
    }

    /// Certificates are named where they are used, and only there.
    fn check_tls(&self, found: &mut Findings) {
        let root = KeyPath::default();
        let at = root.key("tls");
        match (&self.tls, self.cluster.security) {
            (None, Security::Tls) => {
                let why =
                    "security is \"tls\", and there is no section [tls]; add one, with ca, certificate and private_key";
                found.add(&root.key("cluster"), "security", why);
            }
            (Some(_), Security::Auto | Security::Key | Security::None) => {
                let why = "there is a section [tls], but certificates are not used; write security = \"tls\" in [cluster], \
                           or remove the section";
                found.add(&root, "tls", why);
            }
            _ => {}
        }
        for (key, path) in self.tls.iter().flat_map(|tls| {
            let files = [("ca", &tls.ca), ("certificate", &tls.certificate), ("private_key", &tls.private_key)];
            files.into_iter().chain(tls.revoked.as_ref().map(|file| ("revoked", file)))
        }) {
            if path.as_os_str().is_empty() {
                found.add(&at, key, format!("{key} is empty; name the file, or remove the key"));
            }
        }
    }

    /// A tree replaces the other servers; without one they are required.
    fn check_tree(&self, found: &mut Findings) {
        let root = KeyPath::default();
        let Some(tree) = &self.tree else {
            if self.meta.is_none() {
                found.add(&root, "meta", "there is no section [meta]; add one");
            }
            return;
        };
        let at = root.key("tree");
        let instead = "[tree] stands in its place; remove one of them";
        if !self.meta.is_none() {
            found.add(&root, "meta", format!("there is a section [meta], but {instead}"));
        }
        if !self.data.is_empty() {
            found.add(&root, "data", format!("there are sections [[data]], but {instead}"));
        }
        if self.io.is_empty() {
            found.add(&at, "backend", "there is no section [[io]]; add one for each I/O node: they serve it");
        }
        check_file_system(tree, &at, found);
    }

    fn check_data(&self, found: &mut Findings) {
        let root = KeyPath::default();
        match self.data.len() {
            0 if self.tree.is_some() => {}
            0 => found.add(&root, "data", "there is no section [[data]]; add one for each server"),
            1..=SERVERS_MAX => {}
            n => found.add(&root, "data", format!("there are {n} data servers; at most {SERVERS_MAX} are allowed")),
        }
        let away = self.data.iter().filter(|data| data.state != DataState::Active).count();
        if away > 0 && away == self.data.len() {
            found.add(&root, "data", "every data server is draining or retired; leave one for the files");
        } else if away > Skipped::MAX {
            let most = Skipped::MAX;
            found.add(
                &root,
                "data",
                format!("{away} data servers are draining or retired; at most {most} may be at once"),
            );
        }
        for (i, data) in self.data.iter().enumerate() {
            let at = root.key("data").index(i);
            if data.state != DataState::Active && data.moves_to.is_some() {
                let why = format!("a server that is {} does not move; remove moves_to", data.state.name());
                found.add(&at, "state", why);
            }
            found.range(
                &at,
                "in_flight_requests",
                data.in_flight_requests.into(),
                (0, 4096),
                " (0: the policy's choice)",
            );
            found.range(&at, "queue_requests", data.queue_requests.into(), (1, QUEUE_MAX), " requests");
            self.check_payload(&at, data.payload_bytes, found);
            check_read_ahead(&at, data.read_ahead_bytes, found);
            check_cost(&at, data.cost.as_deref(), found);
            check_trace(&at, data.trace.as_deref(), found);
            check_runs(&at, &data.earlier_runs, found);
            // A data server schedules for one lane: its own device.
            found.policy(&at, &data.policy, 1);
            if let Some(device) = data.device.as_ref().filter(|d| !self.device.contains_key(*d)) {
                let remedy = missing_device(device, self.device.keys().map(String::as_str));
                found.add(&at, "device", format!("there is no device model {device:?}; {remedy}"));
            }
        }
        for (name, device) in &self.device {
            if let Err(why) = device.check() {
                found.found.push((device_key(name, &why), why));
            }
        }
    }

    fn check_io(&self, found: &mut Findings) {
        let root = KeyPath::default();
        if self.io.len() > SERVERS_MAX {
            found.add(&root, "io", format!("there are {} I/O nodes; at most {SERVERS_MAX} are allowed", self.io.len()));
        }
        let lanes = self.lanes();
        for (i, io) in self.io.iter().enumerate() {
            let at = root.key("io").index(i);
            found.range(&at, "in_flight_requests", io.in_flight_requests.into(), (1, 256), " requests");
            found.range(&at, "merge_requests", io.merge_requests.into(), (1, 1024), " requests");
            found.range(&at, "dispatch_requests", io.dispatch_requests.into(), (1, 100_000), " requests");
            found.range(&at, "queue_requests", io.queue_requests.into(), (1, QUEUE_MAX), " requests");
            self.check_payload(&at, io.payload_bytes, found);
            let read_ahead_bytes = io.read_ahead_bytes.unwrap_or(0);
            check_read_ahead(&at, read_ahead_bytes, found);
            if read_ahead_bytes != 0 && !self.reads_through_page_cache() {
                let where_not = "only in front of a mounted folder ([tree] with backend = \"posix\" and not direct) is \
                                 there memory to read ahead into; remove read_ahead_bytes";
                found.add(&at, "read_ahead_bytes", where_not);
            }
            check_cost(&at, io.cost.as_deref(), found);
            check_trace(&at, io.trace.as_deref(), found);
            check_runs(&at, &io.earlier_runs, found);
            if lanes > 0 {
                found.policy(&at, &io.policy, lanes);
            }
        }
    }

    fn check_allocation(&self, found: &mut Findings) {
        let (at, rules) = (KeyPath::default().key("allocation"), &self.allocation.rules);
        if rules.len() > RULES_MAX {
            found.add(&at, "rule", format!("there are {} rules; at most {RULES_MAX} are allowed", rules.len()));
        }
        for (i, rule) in rules.iter().enumerate().take(RULES_MAX) {
            let at = at.key("rule").index(i);
            for (key, count) in [("jobs", rule.jobs.len()), ("hosts", rule.hosts.len())] {
                if count > NAMES_MAX {
                    found.add(&at, key, format!("there are {count} {key}; at most {NAMES_MAX} are allowed in a rule"));
                }
            }
            if rule.hosts.iter().any(String::is_empty) {
                found.add(&at, "hosts", "a machine has no name; write \"*\" for any");
            }
            if rule.nodes.is_empty() && self.tree.is_some() {
                let why =
                    "nodes is empty: without I/O nodes a folder of a file system is not reached; name at least one";
                found.add(&at, "nodes", why);
            }
            for (nth, name) in rule.nodes.iter().enumerate() {
                if rule.nodes.iter().take(nth).any(|other| other == name) {
                    found.add(&at, "nodes", format!("{name:?} is named twice"));
                } else if !self.io.iter().any(|io| io.name == *name) {
                    let near = nearest(name, self.io.iter().map(|io| io.name.as_str()));
                    let remedy =
                        near.map_or("add a section [[io]] or remove it".into(), |n| format!("did you mean {n}?"));
                    found.add(&at, "nodes", format!("there is no I/O node {name:?}; {remedy}"));
                }
            }
        }
    }

    fn check_payload(&self, at: &KeyPath, payload_bytes: u64, found: &mut Findings) {
        let least = u64::from(self.cluster.max_payload_bytes);
        if payload_bytes < least {
            let why = format!(
                "payload_bytes is {payload_bytes}; it must hold at least one request of max_payload_bytes, {least} bytes"
            );
            found.add(at, "payload_bytes", why);
        } else if payload_bytes > PAYLOAD_MAX_BYTES {
            let why = format!("payload_bytes is {payload_bytes}; it must be at most {PAYLOAD_MAX_BYTES} bytes");
            found.add(at, "payload_bytes", why);
        }
    }

    /// A server moves to a place of its own, which may have its present address or its present directory but not both.
    fn check_moves(&self, found: &mut Findings) {
        for (i, data) in self.data.iter().enumerate() {
            let Some(to) = &data.moves_to else { continue };
            let at = KeyPath::default().key("data").index(i).key("moves_to");
            match to.address.parse::<Address>() {
                Err(why) => found.add(&at, "address", format!("{:?} is not an address: {why}", to.address)),
                Ok(_) => {
                    let mut others = self.sections().filter(|server| server.name() != data.name);
                    if let Some(other) = others.find(|server| server.address() == to.address) {
                        let why = format!("{} is already the address of {}", to.address, other.name());
                        found.add(&at, "address", why);
                    }
                }
            }
            if to.dir.as_os_str().is_empty() {
                found.add(&at, "dir", "dir is empty; name a directory for the server's objects");
            }
            let mut others = self.sections().filter(|server| server.name() != data.name);
            if let Some(other) = others.find(|server| server.dir() == Some(&*to.dir)) {
                let why = format!("{} is already the directory of {}", to.dir.display(), other.name());
                found.add(&at, "dir", why);
            }
            let mut earlier = self.data[..i].iter().filter_map(|other| Some((other, other.moves_to.as_ref()?)));
            if let Some((other, theirs)) =
                earlier.find(|(_, theirs)| theirs.address == to.address || theirs.dir == to.dir)
            {
                let (key, what) = match theirs.dir == to.dir {
                    true => ("dir", format!("{} moves to {} already", other.name, to.dir.display())),
                    false => ("address", format!("{} moves to {} already", other.name, to.address)),
                };
                found.add(&at, key, format!("{what}; name a place of its own for {}", data.name));
            }
            if (&to.address, &to.dir) == (&data.address, &data.dir) {
                found.add(&at, "dir", format!("{} is there already; name another directory or address", data.name));
            }
        }
    }

    /// Names, addresses and directories must be unique.
    fn check_apart(&self, found: &mut Findings) {
        let root = KeyPath::default();
        let data = (0..self.data.len()).map(|i| root.key("data").index(i));
        let meta = self.tree.is_none().then(|| root.key("meta"));
        let paths = data.chain(meta).chain((0..self.io.len()).map(|i| root.key("io").index(i)));
        let mut names: BTreeMap<&str, KeyPath> = BTreeMap::new();
        let mut addresses: BTreeMap<String, KeyPath> = BTreeMap::new();
        let mut dirs: BTreeMap<&Path, KeyPath> = BTreeMap::new();
        for (server, at) in self.sections().zip(paths) {
            let name = server.name();
            if at != root.key("meta") {
                if let Err(why) = check_name(name) {
                    found.add(&at, "name", why);
                } else if let Some(other) = names.insert(name, at.clone()) {
                    found.add(
                        &at,
                        "name",
                        format!("{name:?} is already the name of {other}; give each server its own"),
                    );
                }
            }
            match server.address().parse::<Address>() {
                Err(why) => found.add(&at, "address", format!("{:?} is not an address: {why}", server.address())),
                Ok(address) => {
                    if let Some(other) = addresses.insert(address.to_string(), at.clone()) {
                        let why = format!("{address} is already the address of {other}; give each server its own");
                        found.add(&at, "address", why);
                    }
                }
            }
            if let Some(metrics) = server.metrics() {
                let mut others =
                    self.sections().filter(|other| other.name() == name || other.address() == metrics.to_string());
                if let Some(other) = others.find(|other| takes(other.address(), metrics)) {
                    let (address, other) = (other.address(), other.name());
                    let why = format!(
                        "{metrics} takes the port of {address}, the address of {other}; give the metrics a port of their own"
                    );
                    found.add(&at, "metrics", why);
                }
            }
            let Some(dir) = server.dir() else { continue };
            if dir.as_os_str().is_empty() {
                found.add(&at, "dir", "dir is empty; name a directory for this server");
            } else if let Some(other) = dirs.insert(dir, at.clone()) {
                let why = format!("{} is already the directory of {other}; give each server its own", dir.display());
                found.add(&at, "dir", why);
            }
        }
    }
}

/// Whether a server that listens at `address` leaves no room for metrics, on the same machine.
pub(crate) fn takes(address: &str, metrics: SocketAddr) -> bool {
    let Ok(Address::Tcp { host, port }) = address.parse() else { return false };
    let host = if host == "localhost" { Ok(Ipv4Addr::LOCALHOST.into()) } else { host.parse::<IpAddr>() };
    let all = |ip: IpAddr| ip.is_unspecified();
    // What other names resolve to is not asked.
    port == metrics.port() && host.is_ok_and(|host| host == metrics.ip() || all(host) || all(metrics.ip()))
}

/// Only the server sees whether it can write there; it starts without a trace too.
fn check_trace(at: &KeyPath, folder: Option<&Path>, found: &mut Findings) {
    if folder.is_some_and(|folder| folder.as_os_str().is_empty()) {
        found.add(at, "trace", "trace is empty; name a folder for the traces, or remove the key");
    }
}

/// Only the server can see whether such traces exist; it starts without them too.
fn check_runs(at: &KeyPath, runs: &[PathBuf], found: &mut Findings) {
    if runs.len() > RUNS_MAX {
        let why =
            format!("{} runs are named, at most {RUNS_MAX} are taken; merge some (impresario trace merge)", runs.len());
        found.add(at, "earlier_runs", why);
    }
    if runs.iter().any(|run| run.as_os_str().is_empty()) {
        found.add(at, "earlier_runs", "a run in earlier_runs is empty; name a trace, or a folder of traces");
    }
}

fn check_read_ahead(at: &KeyPath, bytes: u64, found: &mut Findings) {
    if bytes != 0 {
        let range = (READ_AHEAD_MIN_BYTES, PAYLOAD_MAX_BYTES);
        found.range(at, "read_ahead_bytes", bytes, range, " bytes (0: not at all)");
    }
}

fn check_cost(at: &KeyPath, cost: Option<&Path>, found: &mut Findings) {
    if cost.is_some_and(|cost| cost.as_os_str().is_empty()) {
        found.add(at, "cost", "cost is empty; name a file that `impresario calibrate` wrote, or remove the key");
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name == META_NAME {
        return Err(format!("{META_NAME:?} is the name of the metadata server; give this one another"));
    }
    if name.is_empty() || name.len() > 64 || !name.chars().all(fits) {
        return Err(format!("{name:?} is not a name: use 1 to 64 letters, digits, '.', '-' and '_'"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use impresario_device::DeviceParams;

    use super::*;
    use crate::model::{Data, Io, Meta, MovesTo, Tls};

    fn good() -> Config {
        Config {
            meta: Meta { address: "127.0.0.1:7000".into(), dir: "/c/meta".into(), ..Meta::default() },
            data: (0..4).map(|i| Data::new(format!("data.{i}"), format!("h:710{i}"), format!("/c/data.{i}"))).collect(),
            io: (0..2).map(|i| Io::new(format!("io.{i}"), format!("h:720{i}"))).collect(),
            ..Config::default()
        }
    }

    /// Changes a valid configuration and expects exactly one complaint, at `path`, that says `what`.
    #[track_caller]
    fn refused(change: impl FnOnce(&mut Config), path: &str, what: &str) {
        let mut config = good();
        change(&mut config);
        let found = config.check();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0.to_string(), path, "{found:?}");
        assert!(found[0].1.contains(what), "{found:?}");
    }

    #[test]
    fn a_good_one_passes() {
        assert_eq!(good().check(), []);
    }

    #[test]
    fn a_thousand_servers_take_little_longer_than_one() {
        let took = |count: usize| {
            let mut config = good();
            let data = |i| Data::new(format!("data.{i}"), format!("h{i}:7100"), format!("/c/data.{i}"));
            config.data = (0..count).map(data).collect();
            config.io.clear();
            let once = || {
                let began = std::time::Instant::now();
                assert_eq!(config.check(), []);
                began.elapsed()
            };
            (0..3).map(|_| once()).min().unwrap()
        };
        let (one, all) = (took(1), took(SERVERS_MAX));
        assert!(all < one * 200, "{one:?}, and {all:?} for {SERVERS_MAX}");
    }

    #[test]
    fn a_server_moves_to_a_place_of_its_own() {
        let to = |address: &str, dir: &str| Some(MovesTo { address: address.into(), dir: dir.into() });
        for (address, dir) in [("h:7101", "/d/data.1"), ("other:7101", "/c/data.1"), ("other:1", "/d")] {
            let mut config = good();
            config.data[1].moves_to = to(address, dir);
            assert_eq!(config.check(), [], "{address} {dir}");
            let known = config.addresses("data.1");
            assert_eq!((known[0].as_str(), known.last().unwrap().as_str()), ("h:7101", address));
        }
        let (at_address, at_dir) = ("data[1].moves_to.address", "data[1].moves_to.dir");
        refused(|c| c.data[1].moves_to = to("h:7101", "/c/data.1"), at_dir, "data.1 is there already");
        refused(|c| c.data[1].moves_to = to("h", "/d"), at_address, "is not an address");
        refused(|c| c.data[1].moves_to = to("h:7102", "/d"), at_address, "already the address of data.2");
        refused(|c| c.data[1].moves_to = to("other:1", "/c/meta"), at_dir, "already the directory of meta");
        refused(|c| c.data[1].moves_to = to("other:1", ""), at_dir, "name a directory");
    }

    #[test]
    fn metrics_have_a_port_of_their_own() {
        let at = |text: &str| text.parse().ok();
        let what = "give the metrics a port of their own";
        refused(|c| c.meta.metrics = at("127.0.0.1:7000"), "meta.metrics", what);
        refused(|c| c.meta.metrics = at("0.0.0.0:7000"), "meta.metrics", what);
        refused(|c| (c.data[1].address, c.data[1].metrics) = ("[::]:9".into(), at("[::1]:9")), "data[1].metrics", what);
        refused(
            |c| (c.io[1].address, c.io[1].metrics) = ("localhost:9".into(), at("127.0.0.1:9")),
            "io[1].metrics",
            what,
        );
        refused(|c| c.io[0].metrics = at("127.0.0.1:7000"), "io[0].metrics", "the address of meta");
        let mut config = good();
        // Of other machines, or of another port.
        (config.data[0].metrics, config.data[1].metrics) = (at("10.0.0.1:7000"), at("0.0.0.0:7000"));
        (config.meta.metrics, config.io[0].metrics) = (at("127.0.0.1:7001"), at("0.0.0.0:9400"));
        assert_eq!(config.check(), []);
    }

    #[test]
    fn ranges_are_kept() {
        refused(|c| c.cluster.name = "two\nlines".into(), "cluster.name", "one line");
        refused(|c| c.cluster.max_connections = 15, "cluster.max_connections", "between 16 and");
        let percent = "cluster.payload_percent_per_address";
        refused(|c| c.cluster.payload_percent_per_address = 101, percent, "between 1 and 100 percent");
        refused(|c| c.cluster.poll_us = 1001, "cluster.poll_us", "between 0 and 1000 µs");
        let each = "cluster.max_connections_per_address";
        refused(|c| c.cluster.max_connections_per_address = 0, each, "between 1 and");
        refused(|c| c.meta.lock_lease_ms = Some(499), "meta.lock_lease_ms", "between 500 and 600000 ms");
        refused(|c| c.meta.policy = Some(PolicySpec::named("fifo")), "meta.policy", "tbf and none only");
        let bytes = PolicySpec::named("tbf").with("rules", "a: * {bytes_per_s=1}");
        refused(|c| c.meta.policy = Some(bytes), "meta.policy", "rule a must have requests_per_s");
        refused(|c| c.meta.grace_ms = Some(600_001), "meta.grace_ms", "between 500 and 600000 ms");
        refused(|c| c.cluster.key_dir = "".into(), "cluster.key_dir", "name a folder");
        refused(|c| c.cluster.security = Security::Tls, "cluster.security", "no section [tls]");
        refused(|c| c.tls = Some(Tls::default()), "tls", "certificates are not used");
        let nameless = |c: &mut Config| {
            c.cluster.security = Security::Tls;
            c.tls = Some(Tls { ca: "".into(), ..Tls::default() });
        };
        refused(nameless, "tls.ca", "name the file");
        refused(|c| c.cluster.stripe_bytes = 511, "cluster.stripe_bytes", "between 512 and 1073741824 bytes");
        refused(|c| c.cluster.request_timeout_ms = 99, "cluster.request_timeout_ms", "between 100 and 600000 ms");
        refused(|c| c.cluster.max_payload_bytes = 1, "cluster.max_payload_bytes", "between 4096 and 67108864 bytes");
        refused(|c| c.cluster.stripe_count = Some(5), "cluster.stripe_count", "between 1 and 4, the number of data");
        refused(|c| c.cluster.stripe_count = Some(0), "cluster.stripe_count", "between 1 and 4");
        refused(|c| c.data.iter_mut().for_each(|d| d.state = DataState::Draining), "data", "leave one for the files");
        let moving = |c: &mut Config| {
            c.data[1].state = DataState::Retired;
            c.data[1].moves_to = Some(MovesTo { address: "h:9000".into(), dir: "/d".into() });
        };
        refused(moving, "data[1].state", "does not move");
        let many = |c: &mut Config| {
            c.data =
                (0..20).map(|i| Data::new(format!("d.{i}"), format!("h:{}", 8000 + i), format!("/d/{i}"))).collect();
            c.data.iter_mut().skip(1).for_each(|d| d.state = DataState::Retired);
        };
        refused(many, "data", "at most 16 may be at once");
        refused(|c| c.data[1].in_flight_requests = 5000, "data[1].in_flight_requests", "between 0 and 4096");
        refused(|c| c.data[1].queue_requests = 0, "data[1].queue_requests", "between 1 and 1000000");
        refused(|c| c.data[1].payload_bytes = 4096, "data[1].payload_bytes", "at least one request");
        refused(|c| c.data[1].payload_bytes = 1 << 40, "data[1].payload_bytes", "at most");
        refused(|c| c.data[1].read_ahead_bytes = 4096, "data[1].read_ahead_bytes", "0: not at all");
        refused(|c| c.data[0].read_ahead_bytes = 1 << 40, "data[0].read_ahead_bytes", "between");
        refused(|c| c.io[1].read_ahead_bytes = Some(4 << 20), "io[1].read_ahead_bytes", "remove read_ahead_bytes");
        refused(|c| c.io[1].in_flight_requests = 0, "io[1].in_flight_requests", "between 1 and 256");
        refused(|c| c.io[1].merge_requests = 1025, "io[1].merge_requests", "between 1 and 1024");
        refused(|c| c.io[1].dispatch_requests = 0, "io[1].dispatch_requests", "between 1 and 100000");
        refused(|c| c.io[1].queue_requests = 0, "io[1].queue_requests", "between 1 and 1000000");
        refused(|c| c.io[1].payload_bytes = 0, "io[1].payload_bytes", "at least one request");
        refused(|c| c.data.clear(), "data", "no section [[data]]");
        refused(
            |c| c.io = (0..1025).map(|i| Io::new(format!("io.{i}"), format!("h:{}", 10_000 + i))).collect(),
            "io",
            "at most 1024",
        );
    }

    #[test]
    fn a_tree_stands_alone() {
        let tree = || Tree {
            backend: TreeBackend::Posix,
            folder: "/scratch".into(),
            data_servers: 4,
            stripe_bytes: Some(1 << 20),
            stripe_count: Some(2),
            ..Tree::default()
        };
        let alone = |c: &mut Config| {
            (c.meta, c.data) = (Meta::default(), Vec::new());
            c.tree = Some(tree());
        };
        let mut config = good();
        alone(&mut config);
        config.io[1].read_ahead_bytes = Some(0);
        assert_eq!(config.check(), []);
        let ahead = |config: &Config| [0, 1].map(|node| config.read_ahead_bytes(&config.io[node]));
        assert_eq!((ahead(&config), ahead(&good())), ([Data::READ_AHEAD_BYTES, 0], [0, 0]));
        assert_eq!(config.clone().with_defaults().io[0].read_ahead_bytes, Some(Data::READ_AHEAD_BYTES));
        assert_eq!(config.servers().map(|server| server.name()).collect::<Vec<_>>(), ["io.0", "io.1"]);
        let with = |change: fn(&mut Config)| {
            move |c: &mut Config| {
                alone(c);
                change(c);
            }
        };
        refused(with(|c| c.meta = good().meta), "meta", "[tree] stands in its place");
        refused(with(|c| c.data = good().data), "data", "[tree] stands in its place");
        refused(with(|c| c.io.clear()), "tree.backend", "no section [[io]]");
        refused(with(|c| c.tree.as_mut().unwrap().folder = "".into()), "tree.folder", "folder is missing or empty");
        refused(with(|c| c.tree.as_mut().unwrap().server = Some("h".into())), "tree.server", "glusterfs");
        let ceph = |c: &mut Config| {
            c.tree = Some(Tree { backend: TreeBackend::Cephfs, direct: Some(true), ..Tree::default() });
        };
        refused(with(ceph), "tree.direct", "posix");
        let past = |c: &mut Config| {
            c.tree.as_mut().unwrap().direct = Some(true);
            c.io[0].read_ahead_bytes = Some(8 << 20);
        };
        refused(with(past), "io[0].read_ahead_bytes", "not direct");
        refused(with(|c| c.io[0].read_ahead_bytes = Some(4096)), "io[0].read_ahead_bytes", "0: not at all");
        let none = |c: &mut Config| {
            let tree = c.tree.as_mut().unwrap();
            (tree.data_servers, tree.stripe_count) = (0, None);
        };
        refused(with(none), "tree.data_servers", "between 1 and 1024");
        refused(with(|c| c.tree.as_mut().unwrap().stripe_bytes = Some(1)), "tree.stripe_bytes", "between 512");
        refused(with(|c| c.tree.as_mut().unwrap().stripe_bytes = None), "tree.stripe_count", "needs stripe_bytes");
        refused(with(|c| c.tree.as_mut().unwrap().stripe_count = Some(5)), "tree.stripe_count", "between 1 and 4");
    }

    #[test]
    fn a_volume_is_described_in_one_place() {
        let volume = |change: fn(&mut Tree)| {
            move |c: &mut Config| {
                let mut tree = Tree {
                    backend: TreeBackend::Glusterfs,
                    volume: Some("scratch".into()),
                    server: Some("gluster1".into()),
                    ..Tree::default()
                };
                change(&mut tree);
                (c.meta, c.data, c.tree) = (Meta::default(), Vec::new(), Some(tree));
            }
        };
        let mut config = good();
        volume(|_| {})(&mut config);
        assert_eq!(config.check(), []);
        volume(|tree| (tree.server, tree.volfile) = (None, Some("/etc/scratch.vol".into())))(&mut config);
        assert_eq!(config.check(), []);
        refused(volume(|tree| tree.volume = None), "tree.volume", "name the volume");
        refused(volume(|tree| tree.server = None), "tree.server", "there is no server");
        refused(volume(|tree| tree.volfile = Some("/v".into())), "tree.volfile", "remove one of them");
        refused(volume(|tree| tree.server = Some("h:x".into())), "tree.server", "is not a host or host:port");
        refused(volume(|tree| tree.folder = "/mnt".into()), "tree.folder", "backend = \"posix\"");
        refused(volume(|tree| tree.stripe_bytes = Some(65_536)), "tree.stripe_bytes", "tells itself");
        let server = |text: &str| Tree { server: Some(text.into()), ..Tree::default() };
        assert_eq!(server("h").volume_server(), Some(("h", 0)));
        assert_eq!(server("h:24007").volume_server(), Some(("h", 24_007)));
        assert_eq!(server("fe80::1").volume_server(), Some(("fe80::1", 0)));
        for bad in ["", ":1", "h:", "h:0", "h:65536"] {
            assert_eq!(server(bad).volume_server(), None, "{bad}");
        }
    }

    #[test]
    fn a_ceph_file_system_is_described() {
        let ceph = |change: fn(&mut Tree)| {
            move |c: &mut Config| {
                let mut tree = Tree { backend: TreeBackend::Cephfs, data_servers: 4, ..Tree::default() };
                change(&mut tree);
                (c.meta, c.data, c.tree) = (Meta::default(), Vec::new(), Some(tree));
            }
        };
        let mut config = good();
        ceph(|_| {})(&mut config);
        assert_eq!(config.check(), []);
        let all = |tree: &mut Tree| {
            (tree.ceph_config, tree.folder) = (Some("/etc/ceph/b.conf".into()), "/scratch".into());
            (tree.user, tree.filesystem) = (Some("scratch".into()), Some("fs".into()));
            (tree.stripe_bytes, tree.stripe_count, tree.object_bytes) = (Some(1 << 20), Some(4), Some(8 << 20));
        };
        ceph(all)(&mut config);
        assert_eq!(config.check(), []);
        refused(ceph(|tree| tree.volume = Some("v".into())), "tree.volume", "glusterfs");
        refused(ceph(|tree| tree.user = Some("client.x".into())), "tree.user", "without");
        refused(ceph(|tree| tree.filesystem = Some("".into())), "tree.filesystem", "is empty");
        refused(ceph(|tree| tree.object_bytes = Some(1 << 22)), "tree.object_bytes", "needs stripe_bytes");
        refused(ceph(|tree| tree.stripe_bytes = Some(1 << 15)), "tree.stripe_bytes", "multiple of 65536");
        refused(ceph(|tree| tree.stripe_bytes = Some(3 << 16)), "tree.object_bytes", "multiple of stripe_bytes");
        let folder = |c: &mut Config| {
            ceph(|tree| (tree.backend, tree.folder) = (TreeBackend::Posix, "/mnt".into()))(c);
            c.tree.as_mut().unwrap().user = Some("x".into());
        };
        refused(folder, "tree.user", "cephfs");
    }

    #[test]
    fn servers_are_apart() {
        refused(|c| c.data[2].name = "data.0".into(), "data[2].name", "already the name of data[0]");
        refused(|c| c.io[1].name = "data.0".into(), "io[1].name", "already the name of data[0]");
        refused(|c| c.io[0].name = "meta".into(), "io[0].name", "name of the metadata server");
        refused(|c| c.io[0].name = "a/b".into(), "io[0].name", "is not a name");
        refused(|c| c.data[3].address = "h:7100".into(), "data[3].address", "already the address of data[0]");
        refused(|c| c.meta.address = "nowhere".into(), "meta.address", "host:port");
        refused(|c| c.meta.dir = "/c/data.3".into(), "meta.dir", "already the directory of data[3]");
        refused(|c| c.meta.dir = "".into(), "meta.dir", "dir is empty");
    }

    #[test]
    fn policies_and_devices_exist() {
        refused(|c| c.data[0].policy = PolicySpec::named("mfl"), "data[0].policy", "mlf");
        refused(|c| c.data[0].policy = PolicySpec::named("twins"), "data[0].policy", "lane");
        refused(|c| c.io[0].policy = PolicySpec::named("twins").with("window_us", "x"), "io[0].policy", "window_us");
        refused(|c| c.data[0].device = Some("disk".into()), "data[0].device", "add a section [device.disk]");
        let disk = |rpm| DeviceParams { rpm, ..DeviceParams::default() };
        refused(
            |c| c.device = BTreeMap::from([("disk".into(), disk(1))]),
            "device.disk.rpm",
            "rpm is 1; it must be between",
        );
        let near = |c: &mut Config| {
            c.device = BTreeMap::from([("disk".into(), disk(7200))]);
            c.data[0].device = Some("disc".into());
        };
        refused(near, "data[0].device", "did you mean \"disk\"?");
    }
}
