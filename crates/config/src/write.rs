//! Writes a configuration as a file for people, with every key explained at its first occurrence.

use std::fmt::Write;

use serde::Serialize;
use toml_edit::Value;

use crate::allocation::AllocationRule;
use crate::export::Export;
use crate::model::{Cluster, Config, Data, Io, Tree};

/// Keys of a section and their explanations.
type Notes = [(&'static str, &'static str)];

const CLUSTER: &Notes = &[
    ("stripe_bytes", "strip size of files whose directory sets none, bytes"),
    ("request_timeout_ms", "a request that no server has answered after this time fails with an I/O error, ms"),
    ("max_payload_bytes", "largest payload of one request on the wire, bytes"),
    ("max_connections", "connections of a server at once"),
    ("max_connections_per_address", "of them from one address"),
    ("payload_percent_per_address", "percent of a server's payload_bytes for one address"),
    ("poll_us", "a thread polls so long before it sleeps, where that pays, µs; 0: never"),
    (
        "security",
        "servers take only peers with a key: auto (those beyond loopback), key (all), tls (certificates) or none",
    ),
    ("protect", "by keys: handshake (who connects), headers (messages, not the bytes of files) or all"),
    ("key_dir", "folder of the files of keys: see `impresario key new`"),
];
const TREE: &Notes = &[
    ("data_servers", "of the file system: each is a lane of the schedulers"),
    ("stripe_bytes", "of new files (cephfs), or of files of which the file system does not tell how they are striped"),
    ("io", "which system calls move the bytes of files"),
    ("direct", "past the page cache of the I/O node"),
];
const DATA: &Notes = &[
    ("in_flight_requests", "requests in flight below the scheduler; 0: the policy's choice"),
    ("queue_requests", "capacity of the queue"),
    ("payload_bytes", "limit of the memory for payloads, bytes"),
    ("read_ahead_bytes", "read ahead of the clients, bytes at most; 0: not at all"),
    ("schedule_cached_reads", "schedule also what the page cache has, or takes"),
    ("checksums", "checksums of stored blocks"),
];
const IO: &Notes = &[
    ("in_flight_requests", "forwarded requests in flight at once"),
    ("merge", "requests that touch (contiguous), or all of a file for one data server (list)"),
    ("merge_requests", "largest number of requests merged into one forwarded request"),
    ("dispatch_requests", "length of the dispatch queue"),
    ("split", "split requests at data servers before scheduling"),
    ("queue_requests", "capacity of the queue"),
    ("payload_bytes", "limit of the memory for payloads, bytes"),
    ("read_ahead_bytes", "read ahead of the clients, bytes at most; 0: not at all"),
];
/// Keys that are written with their default too.
const ALWAYS: &[&str] = &[
    "name",
    "address",
    "dir",
    "policy",
    "nodes",
    "backend",
    "data_servers",
    "stripe_bytes",
    "request_timeout_ms",
    "max_payload_bytes",
];

impl Config {
    /// The configuration as a commented file. Reading it back gives the same configuration.
    pub fn to_toml(&self) -> String {
        let mut config = self.clone();
        // What no text can express is written with substitutes.
        config.paths_mut().for_each(|path| *path = path.to_string_lossy().into_owned().into());
        let mut out = String::new();
        config.write(&mut out).expect("the values of a configuration are those of TOML");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        *out += "# A cluster of Impresario. Every key: doc/CONFIGURATION.md; check this file with `impresario config check`.\n";
        section(out, "[cluster]", &self.cluster, Some(&Cluster::default()), CLUSTER)?;
        if self.cluster.stripe_count.is_none() {
            writeln!(out, "# stripe_count = {}    # data servers per file; without the key: all", self.data.len())?;
        }
        if let Some(tree) = &self.tree {
            write!(out, "\n# The file system that the I/O nodes serve: {}.", tree.to_string().replace('\n', " "))?;
            section(out, "[tree]", tree, Some(&Tree::default()), TREE)?;
        } else {
            *out += "\n# The metadata server. Directories are relative to this file.";
            section(out, "[meta]", &self.meta, None, &[])?;
            *out += "\n# The data servers. Their order is the order of striping: never change it once there are files.";
        }
        for (i, data) in self.data.iter().enumerate() {
            let notes = if i == 0 { DATA } else { &[] };
            section(out, "[[data]]", data, Some(&Data::new("", "", "")), notes)?;
        }
        if !self.io.is_empty() {
            *out += "\n# The I/O nodes: clients are spread over them evenly.";
        }
        for (i, io) in self.io.iter().enumerate() {
            section(out, "[[io]]", io, Some(&Io::new("", "")), if i == 0 { IO } else { &[] })?;
        }
        if !self.allocation.is_default() {
            *out += "\n# Which I/O nodes clients use. Clients look at this section again while they run.\n";
            writeln!(out, "[allocation]\nspread = {:?}", self.allocation.spread.name())?;
            for rule in &self.allocation.rules {
                section(out, "[[allocation.rule]]", rule, Some(&AllocationRule::default()), &[])?;
            }
        }
        if let Some(tls) = &self.tls {
            *out += "\n# The files of certificates; {role} stands for client, admin or server.";
            section(out, "[tls]", tls, None, &[])?;
        }
        if !self.export.is_empty() {
            *out +=
                "\n# What clients may do: the first one that names a client's network counts, and others are refused.";
        }
        for export in &self.export {
            section(out, "[[export]]", export, Some(&Export::default()), &[])?;
        }
        for (name, device) in &self.device {
            *out += "\n# A device model: its times are modelled, whatever the directory lies on.";
            section(out, &format!("[device.{}]", toml_edit::Key::new(name.as_str())), device, None, &[])?;
        }
        Ok(())
    }
}

/// Writes a section: what differs from its default, and what is explained, as a comment where it is the default.
fn section<T: Serialize>(out: &mut String, head: &str, of: &T, default: Option<&T>, notes: &Notes) -> std::fmt::Result {
    let values = |of| toml_edit::ser::to_document(of).map_err(|_| std::fmt::Error);
    let defaults = default.map(values).transpose()?.unwrap_or_default();
    writeln!(out, "\n{head}")?;
    for (key, item) in values(of)?.iter() {
        let text = |item: &toml_edit::Item| Some(shown(item.clone().into_value().ok()?));
        let (Some(value), default) = (text(item), defaults.get(key).and_then(text)) else { continue };
        let is_default = default.is_some_and(|default| default == value) && !ALWAYS.contains(&key);
        match notes.iter().find(|(noted, _)| *noted == key) {
            Some((_, note)) => writeln!(out, "{}{key} = {value}    # {note}", if is_default { "# " } else { "" })?,
            None if is_default => {}
            None => writeln!(out, "{key} = {value}")?,
        }
    }
    Ok(())
}

/// A value in one line; a policy as `"mlf"`, or `{ name = "twins", window_us = 1000 }`.
fn shown(mut value: Value) -> String {
    if let Value::InlineTable(policy) = &mut value
        && let Some(name) = policy.get("name").cloned()
    {
        if policy.len() == 1 {
            value = name;
        } else {
            for (_, value) in policy.iter_mut() {
                // Integers without quotes, if they read back as the same text.
                let number = value.as_str().and_then(|text| Some((text, text.parse::<i64>().ok()?)));
                if let Some((_, number)) = number.filter(|(text, number)| number.to_string() == *text) {
                    *value = number.into();
                }
            }
        }
    }
    value.decorated("", "").to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use impresario_device::DeviceParams;
    use impresario_sched::PolicySpec;

    use super::*;
    use crate::allocation::{Allocation, Spread};
    use crate::model::{Merge, Meta, MovesTo, Security, Tls, TreeBackend, TreeIo};

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
            tls: Some(Tls {
                ca: "/etc/\"ca\".pem".into(),
                certificate: "/t/{role}.pem".into(),
                private_key: "/k".into(),
                revoked: Some("/etc/revoked.pem".into()),
            }),
            export: Vec::new(),
            device: BTreeMap::from([
                ("disk".into(), DeviceParams::default()),
                ("a disk, fast".into(), DeviceParams { rpm: 15_000, seek_average_ms: 8.25, ..DeviceParams::default() }),
            ]),
        };
        config.cluster.key_dir = "/etc/impresario/keys".into();
        config.cluster.security = Security::Tls;
        let tree = Tree {
            backend: TreeBackend::Posix,
            folder: "/mnt/a \"folder\"".into(),
            data_servers: 3,
            stripe_bytes: Some(1 << 20),
            stripe_count: Some(2),
            io: Some(TreeIo::Uring),
            direct: Some(true),
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
        let mut alone = Config { tree: Some(tree), meta, data, ..config.clone() };
        alone.io[1].read_ahead_bytes = Some(0);
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
        config.data[1].read_ahead_bytes = 256 << 20;
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
        config.meta.grace_ms = Some(5000);
        config.meta.policy = Some(PolicySpec::named("tbf").with("rules", "a: * {requests_per_s=5}"));
        config.data[1].metrics = Some("[::1]:9411".parse().unwrap());
        config.io[0].metrics = Some("0.0.0.0:9412".parse().unwrap());
        config.io[1].merge = Merge::List;
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
