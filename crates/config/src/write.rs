//! Writes a configuration as a file for people, with every key explained at its first occurrence.

use std::fmt::Write;
use std::path::Path;

use impresario_sched::PolicySpec;

use crate::allocation::{Allocation, AllocationRule};
use crate::model::{Config, Data, Io, Protect, Security, Tree, TreeBackend};

impl Config {
    /// The configuration as a commented file. Reading it back gives the same configuration.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a String cannot fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let cluster = &self.cluster;
        writeln!(
            out,
            "# A cluster of Impresario. Every key: doc/CONFIGURATION.md; check this file with `impresario config check`."
        )?;
        writeln!(out, "\n[cluster]")?;
        writeln!(out, "name = {}", text(&cluster.name))?;
        writeln!(out, "# Strip size of files whose directory sets none, bytes.")?;
        writeln!(out, "stripe_bytes = {}", cluster.stripe_bytes)?;
        writeln!(out, "# Data servers per file; without the key: all.")?;
        match cluster.stripe_count {
            Some(count) => writeln!(out, "stripe_count = {count}")?,
            None => writeln!(out, "# stripe_count = {}", self.data.len())?,
        }
        writeln!(out, "# A request that no server has answered after this time fails with an I/O error, ms.")?;
        writeln!(out, "request_timeout_ms = {}", cluster.request_timeout_ms)?;
        writeln!(out, "# Largest payload of one request on the wire, bytes.")?;
        writeln!(out, "max_payload_bytes = {}", cluster.max_payload_bytes)?;

        let default = crate::model::Cluster::default();
        let limits = [
            ("max_connections", cluster.max_connections, default.max_connections, "connections of a server at once"),
            (
                "max_connections_per_address",
                cluster.max_connections_per_address,
                default.max_connections_per_address,
                "of them from one address",
            ),
            (
                "payload_percent_per_address",
                cluster.payload_percent_per_address,
                default.payload_percent_per_address,
                "percent of a server's payload_bytes for one address",
            ),
        ];
        for (key, value, default, what) in limits {
            optional(out, (key, value, default), Some(what))?;
        }
        writeln!(out, "# Servers take only peers with a key: auto (those beyond loopback), key (all) or none.")?;
        writeln!(out, "{}security = {:?}", comment(cluster.security == default.security), security(cluster.security))?;
        writeln!(
            out,
            "# What keys protect: handshake (who connects), headers (messages, not the bytes of files) or all."
        )?;
        writeln!(out, "{}protect = {:?}", comment(cluster.protect == default.protect), protect(cluster.protect))?;
        writeln!(out, "# Folder of the files of keys: see `impresario key new`.")?;
        writeln!(out, "{}key_dir = {}", comment(cluster.key_dir == default.key_dir), path(&cluster.key_dir))?;

        match &self.tree {
            Some(tree) => write_tree(out, tree)?,
            None => {
                writeln!(out, "\n# The metadata server. Directories are relative to this file.")?;
                writeln!(out, "[meta]\naddress = {}\ndir = {}", text(&self.meta.address), path(&self.meta.dir))?;
                if let Some(lease_ms) = self.meta.lock_lease_ms {
                    writeln!(out, "lock_lease_ms = {lease_ms}")?;
                }
                write_metrics(out, self.meta.metrics)?;
                writeln!(
                    out,
                    "\n# The data servers. Their order is the order of striping: never change it once there are files."
                )?;
            }
        }
        for (i, data) in self.data.iter().enumerate() {
            write_data(out, data, i == 0)?;
        }
        if !self.io.is_empty() {
            writeln!(out, "\n# The I/O nodes: clients are spread over them evenly.")?;
        }
        for (i, io) in self.io.iter().enumerate() {
            write_io(out, io, i == 0)?;
        }
        if !self.allocation.is_default() {
            write_allocation(out, &self.allocation)?;
        }
        for (name, device) in &self.device {
            writeln!(out, "\n# A device model: its times are modelled, whatever the directory lies on.")?;
            writeln!(out, "[device.{}]", toml_edit::Key::new(name.as_str()))?;
            out.push_str(&toml::to_string(device).map_err(|_| std::fmt::Error)?);
        }
        Ok(())
    }
}

fn write_allocation(out: &mut String, allocation: &Allocation) -> std::fmt::Result {
    writeln!(out, "\n# Which I/O nodes clients use. Clients look at this section again while they run.")?;
    writeln!(out, "[allocation]\nspread = {:?}", allocation.spread.name())?;
    let list = |texts: Vec<String>| texts.join(", ");
    for AllocationRule { jobs, hosts, nodes } in &allocation.rules {
        writeln!(out, "\n[[allocation.rule]]")?;
        if !jobs.is_empty() {
            writeln!(out, "jobs = [{}]", list(jobs.iter().map(u64::to_string).collect()))?;
        }
        if !hosts.is_empty() {
            writeln!(out, "hosts = [{}]", list(hosts.iter().map(|host| text(host)).collect()))?;
        }
        writeln!(out, "nodes = [{}]", list(nodes.iter().map(|node| text(node)).collect()))?;
    }
    Ok(())
}

/// Default values are written as comments.
fn comment(is_default: bool) -> &'static str {
    if is_default { "# " } else { "" }
}

fn security(security: Security) -> &'static str {
    match security {
        Security::Auto => "auto",
        Security::Key => "key",
        Security::None => "none",
    }
}

fn protect(protect: Protect) -> &'static str {
    match protect {
        Protect::Handshake => "handshake",
        Protect::Headers => "headers",
        Protect::All => "all",
    }
}

/// Writes a key that differs from its default, and a comment with the default where the key is explained.
fn optional<T: PartialEq + std::fmt::Display>(
    out: &mut String,
    (key, value, default): (&str, T, T),
    comment: Option<&str>,
) -> std::fmt::Result {
    match comment {
        _ if value != default => writeln!(out, "{key} = {value}"),
        Some(comment) => writeln!(out, "# {key} = {value}    # {comment}"),
        None => Ok(()),
    }
}

fn write_tree(out: &mut String, tree: &Tree) -> std::fmt::Result {
    let Tree { backend, folder, volume, server, volfile, ceph_config, user, filesystem, .. } = tree;
    let Tree { data_servers, stripe_bytes, stripe_count, object_bytes, .. } = tree;
    match backend {
        TreeBackend::Posix => {
            writeln!(out, "\n# A folder of a file system that every I/O node has mounted.")?;
            writeln!(out, "[tree]\nbackend = \"posix\"\nfolder = {}", path(folder))?;
        }
        TreeBackend::Glusterfs => {
            writeln!(out, "\n# A GlusterFS volume.\n[tree]\nbackend = \"glusterfs\"")?;
            for (key, value) in [("volume", volume), ("server", server)] {
                if let Some(value) = value {
                    writeln!(out, "{key} = {}", path(Path::new(value)))?;
                }
            }
            if let Some(file) = volfile {
                writeln!(out, "volfile = {}", path(file))?;
            }
        }
        TreeBackend::Cephfs => {
            writeln!(out, "\n# A CephFS file system.\n[tree]\nbackend = \"cephfs\"")?;
            if let Some(file) = ceph_config {
                writeln!(out, "ceph_config = {}", path(file))?;
            }
            for (key, value) in [("user", user), ("filesystem", filesystem)] {
                if let Some(value) = value {
                    writeln!(out, "{key} = {}", path(Path::new(value)))?;
                }
            }
            if !folder.as_os_str().is_empty() {
                writeln!(out, "folder = {}", path(folder))?;
            }
        }
    }
    writeln!(
        out,
        "# Data servers of the file system: each is a lane of the schedulers.\ndata_servers = {data_servers}"
    )?;
    if let Some(bytes) = stripe_bytes {
        let which = match backend {
            TreeBackend::Cephfs => "# Of new files.",
            _ => "# Of files of which the file system does not tell how they are striped.",
        };
        writeln!(out, "{which}\nstripe_bytes = {bytes}")?;
    }
    if let Some(count) = stripe_count {
        writeln!(out, "stripe_count = {count}")?;
    }
    match object_bytes {
        Some(bytes) => writeln!(out, "object_bytes = {bytes}"),
        None => Ok(()),
    }
}

fn write_data(out: &mut String, data: &Data, explain: bool) -> std::fmt::Result {
    let default = Data::new("", "", "");
    let note = |text| explain.then_some(text);
    writeln!(out, "\n[[data]]\nname = {}\naddress = {}", text(&data.name), text(&data.address))?;
    writeln!(out, "dir = {}", path(&data.dir))?;
    if data.state != default.state {
        writeln!(out, "state = {:?}", data.state.name())?;
    }
    if let Some(to) = &data.moves_to {
        writeln!(out, "moves_to = {{ address = {}, dir = {} }}", text(&to.address), path(&to.dir))?;
    }
    writeln!(out, "policy = {}", policy(&data.policy))?;
    let depth = ("in_flight_requests", data.in_flight_requests, default.in_flight_requests);
    optional(out, depth, note("requests in flight below the scheduler; 0: the policy's choice"))?;
    optional(out, ("queue_requests", data.queue_requests, default.queue_requests), note("capacity of the queue"))?;
    let payload = ("payload_bytes", data.payload_bytes, default.payload_bytes);
    optional(out, payload, note("limit of the memory for payloads, bytes"))?;
    let ahead = ("read_ahead_bytes", data.read_ahead_bytes, default.read_ahead_bytes);
    optional(out, ahead, note("read ahead of the clients, bytes at most; 0: not at all"))?;
    let cached = ("schedule_cached_reads", data.schedule_cached_reads, default.schedule_cached_reads);
    optional(out, cached, note("schedule also what the page cache has"))?;
    optional(out, ("checksums", data.checksums, default.checksums), note("checksums of stored blocks"))?;
    if let Some(device) = &data.device {
        writeln!(out, "device = {}", text(device))?;
    }
    write_cost(out, data.cost.as_deref(), data.correct_cost)?;
    write_trace(out, data.trace.as_deref(), data.trace_at_start, &data.earlier_runs)?;
    write_metrics(out, data.metrics)
}

fn write_cost(out: &mut String, cost: Option<&Path>, correct: Option<bool>) -> std::fmt::Result {
    if let Some(cost) = cost {
        writeln!(out, "cost = {}", path(cost))?;
    }
    match correct {
        Some(correct) => writeln!(out, "correct_cost = {correct}"),
        None => Ok(()),
    }
}

fn write_io(out: &mut String, io: &Io, explain: bool) -> std::fmt::Result {
    let default = Io::new("", "");
    let note = |text| explain.then_some(text);
    writeln!(out, "\n[[io]]\nname = {}\naddress = {}", text(&io.name), text(&io.address))?;
    writeln!(out, "policy = {}", policy(&io.policy))?;
    let in_flight = ("in_flight_requests", io.in_flight_requests, default.in_flight_requests);
    optional(out, in_flight, note("forwarded requests in flight at once"))?;
    let merge = ("merge_requests", io.merge_requests, default.merge_requests);
    optional(out, merge, note("largest number of neighbours merged into one forwarded request"))?;
    let dispatch = ("dispatch_requests", io.dispatch_requests, default.dispatch_requests);
    optional(out, dispatch, note("length of the dispatch queue"))?;
    optional(out, ("split", io.split, default.split), note("split requests at data servers before scheduling"))?;
    optional(out, ("queue_requests", io.queue_requests, default.queue_requests), note("capacity of the queue"))?;
    let payload = ("payload_bytes", io.payload_bytes, default.payload_bytes);
    optional(out, payload, note("limit of the memory for payloads, bytes"))?;
    write_cost(out, io.cost.as_deref(), io.correct_cost)?;
    write_trace(out, io.trace.as_deref(), io.trace_at_start, &io.earlier_runs)?;
    write_metrics(out, io.metrics)
}

fn write_metrics(out: &mut String, address: Option<std::net::SocketAddr>) -> std::fmt::Result {
    match address {
        Some(address) => writeln!(out, "metrics = {}", text(&address.to_string())),
        None => Ok(()),
    }
}

fn write_trace(
    out: &mut String,
    folder: Option<&Path>,
    at_start: bool,
    earlier_runs: &[std::path::PathBuf],
) -> std::fmt::Result {
    if let Some(folder) = folder {
        writeln!(out, "trace = {}", path(folder))?;
    }
    optional(out, ("trace_at_start", at_start, true), None)?;
    if !earlier_runs.is_empty() {
        let runs: Vec<String> = earlier_runs.iter().map(|run| path(run)).collect();
        writeln!(out, "earlier_runs = [{}]", runs.join(", "))?;
    }
    Ok(())
}

fn text(text: &str) -> String {
    toml_edit::Value::from(text).to_string()
}

fn path(path: &Path) -> String {
    text(&path.to_string_lossy())
}

/// `"mlf"`, or `{ name = "twins", window_us = 1000 }`.
fn policy(spec: &PolicySpec) -> String {
    if spec.params.is_empty() {
        return text(&spec.name);
    }
    let mut table = toml_edit::InlineTable::new();
    table.insert("name", spec.name.as_str().into());
    for (key, value) in &spec.params {
        // Integers without quotes, if they read back as the same text.
        let number = value.parse::<i64>().ok().filter(|n| n.to_string() == *value);
        table.insert(key, number.map_or_else(|| value.as_str().into(), toml_edit::Value::from));
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use impresario_device::DeviceParams;

    use super::*;
    use crate::allocation::Spread;
    use crate::model::{Cluster, Meta, MovesTo};

    #[test]
    fn what_is_written_reads_back_the_same() {
        let data = |i: usize| Data::new(format!("data.{i}"), format!("127.0.0.1:710{i}"), format!("data.{i}"));
        let io = |i: usize| Io::new(format!("io.{i}"), format!("unix:/run/io \"{i}\""));
        let mut config = Config {
            cluster: Cluster { name: "a \"quoted\" # näme \\".into(), stripe_count: Some(1), ..Cluster::default() },
            tree: None,
            meta: Meta { address: "[::1]:7000".into(), dir: "meta".into(), ..Meta::default() },
            data: (0..3).map(data).collect(),
            io: (0..2).map(io).collect(),
            allocation: Allocation::default(),
            device: BTreeMap::from([
                ("disk".into(), DeviceParams::default()),
                ("a disk, fast".into(), DeviceParams { rpm: 15_000, seek_average_ms: 8.25, ..DeviceParams::default() }),
            ]),
        };
        config.cluster.key_dir = "/etc/impresario/keys".into();
        let tree = Tree {
            backend: TreeBackend::Posix,
            folder: "/mnt/a \"folder\"".into(),
            data_servers: 3,
            stripe_bytes: Some(1 << 20),
            stripe_count: Some(2),
            ..Tree::default()
        };
        let volume = Tree {
            backend: TreeBackend::Glusterfs,
            volume: Some("a \"volume\"".into()),
            server: Some("gluster1:24007".into()),
            data_servers: 4,
            ..Tree::default()
        };
        let file = Tree { server: None, volfile: Some("/etc/scratch.vol".into()), ..volume.clone() };
        let (meta, data) = (Meta::default(), Vec::new());
        let alone = Config { tree: Some(tree), meta, data, ..config.clone() };
        assert_eq!(Config::parse(&alone.to_toml(), Path::new("/c.toml")).unwrap(), alone);
        let ceph = Tree {
            backend: TreeBackend::Cephfs,
            ceph_config: Some("/etc/ceph/\"b\".conf".into()),
            user: Some("scratch".into()),
            filesystem: Some("fs".into()),
            folder: "/projects".into(),
            data_servers: 4,
            stripe_bytes: Some(1 << 20),
            stripe_count: Some(4),
            object_bytes: Some(8 << 20),
            ..Tree::default()
        };
        let least = Tree { backend: TreeBackend::Cephfs, ..Tree::default() };
        for tree in [volume, file, ceph, least] {
            let alone = Config { tree: Some(tree), ..alone.clone() };
            assert_eq!(Config::parse(&alone.to_toml(), Path::new("/c.toml")).unwrap(), alone);
        }

        config.data[2].device = Some("a disk, fast".into());
        config.data[1].queue_requests = 77;
        config.data[1].state = crate::DataState::Draining;
        config.data[2].moves_to = Some(MovesTo { address: "127.0.0.1:7999".into(), dir: "moved \"2\"".into() });
        config.data[1].policy = PolicySpec::named("hbrr");
        config.data[2].in_flight_requests = 3;
        config.data[2].payload_bytes = 64 << 20;
        config.data[1].read_ahead_bytes = 128 << 20;
        config.data[1].schedule_cached_reads = true;
        config.data[0].checksums = true;
        config.data[0].cost = Some("/etc/impresario/cal \"0\".toml".into());
        config.io[1].correct_cost = Some(true);
        config.data[0].trace = Some("/var/traces \"0\"".into());
        config.io[1].trace = Some("/var/traces".into());
        config.io[1].trace_at_start = false;
        config.data[0].earlier_runs = vec!["/var/traces \"0\"".into(), "/runs/mean.imt".into()];
        config.io[0].earlier_runs = vec!["/var/traces".into()];
        config.io[0].policy = PolicySpec::named("twins").with("window_us", 1500).with("order", "permutation");
        config.io[1].split = true;
        config.meta.metrics = Some("127.0.0.1:9410".parse().unwrap());
        config.meta.lock_lease_ms = Some(2500);
        config.data[1].metrics = Some("[::1]:9411".parse().unwrap());
        config.io[0].metrics = Some("0.0.0.0:9412".parse().unwrap());
        config.io[1].merge_requests = 2;
        config.io[1].dispatch_requests = 9;
        config.io[1].in_flight_requests = 8;
        config.allocation = Allocation {
            spread: Spread::Host,
            rules: vec![
                AllocationRule { jobs: vec![7, 8], hosts: vec!["n*".into()], nodes: vec!["io.1".into()] },
                AllocationRule { nodes: vec!["io.0".into(), "io.1".into()], ..AllocationRule::default() },
            ],
        };
        let written = config.to_toml();
        let base = Path::new("/etc/impresario/impresario.toml");
        let read = Config::parse(&written, base).unwrap_or_else(|e| panic!("{e}\n{written}"));
        // Directories come back resolved against the file.
        config.meta.dir = "/etc/impresario/meta".into();
        for (i, data) in config.data.iter_mut().enumerate() {
            data.dir = format!("/etc/impresario/data.{i}").into();
            data.moves_to.iter_mut().for_each(|to| to.dir = "/etc/impresario/moved \"2\"".into());
        }
        assert_eq!(read, config, "{written}");
        // The comments name every optional key once.
        for key in ["queue_requests", "payload_bytes", "merge_requests", "dispatch_requests", "stripe_count"] {
            assert!(written.contains(key), "{key} is not explained:\n{written}");
        }
    }
}
