//! Which I/O nodes a client uses: those of its job, of its machine, or all of them.

mod edit;

use impresario_base::glob;
use serde::{Deserialize, Serialize};

use crate::Config;

/// Most rules of a file.
pub(crate) const RULES_MAX: usize = 4096;
/// Most jobs or machines of a rule.
pub(crate) const NAMES_MAX: usize = 4096;
/// The key of the hashes: clients on all machines must agree, and nothing is secret.
const HASH_KEY: &[u8; 16] = b"impresario nodes";

/// How I/O nodes are given to clients.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Allocation {
    /// Which of the I/O nodes that it may use a client uses.
    pub spread: Spread,
    /// Who may use which. The first rule that applies to a client counts; without one it may use all.
    #[serde(rename = "rule", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<AllocationRule>,
}

/// By what clients are spread over the I/O nodes that they may use.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spread {
    /// Each client by its own number: evenly, as clients come.
    #[default]
    Client,
    /// By a hash of the machine's name: all clients of a machine use one node, always the same.
    Host,
    /// By a hash of the job's number: all clients of a job use one node.
    Job,
}

impl Spread {
    /// Its name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Spread::Client => "client",
            Spread::Host => "host",
            Spread::Job => "job",
        }
    }
}

/// The I/O nodes of some jobs, or of some machines.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllocationRule {
    /// The numbers of the jobs; empty: of any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<u64>,
    /// The names of the machines, as `uname -n` prints them, or patterns as of a shell. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// The names of the I/O nodes; empty: none, the clients speak to the data servers themselves.
    pub nodes: Vec<String>,
}

/// A client, as far as it matters for its I/O nodes.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    /// Its job; 0: unknown.
    pub job: u64,
    /// Its machine.
    pub host: &'a str,
    /// Its own number; consecutive ones go to consecutive nodes.
    pub number: u64,
}

impl AllocationRule {
    /// Whether the rule is about this client.
    fn applies_to(&self, client: &Placed<'_>) -> bool {
        let (jobs, hosts) = (&self.jobs, &self.hosts);
        (jobs.is_empty() || jobs.contains(&client.job))
            && (hosts.is_empty()
                || hosts.iter().any(|pattern| glob::matches(pattern.as_bytes(), client.host.as_bytes())))
    }
}

impl Allocation {
    pub(crate) fn is_default(&self) -> bool {
        *self == Allocation::default()
    }

    fn key(&self, client: &Placed<'_>) -> u64 {
        match self.spread {
            Spread::Client => client.number,
            Spread::Host => impresario_base::siphash::siphash(HASH_KEY, client.host.as_bytes()),
            Spread::Job => impresario_base::siphash::siphash(HASH_KEY, &client.job.to_le_bytes()),
        }
    }
}

impl Config {
    /// The I/O nodes of a client by their index, in the order in which it tries them: the one that it uses, the others that
    /// it may use, and at last, so that the loss of its own nodes does not stop it, all that remain. Empty: none, it speaks to
    /// the data servers itself.
    pub fn io_nodes_of(&self, client: &Placed<'_>) -> Vec<usize> {
        let mut nodes = self.own_io_nodes_of(client);
        if !nodes.is_empty() {
            let others: Vec<usize> = (0..self.io.len()).filter(|index| !nodes.contains(index)).collect();
            nodes.extend(others);
        }
        nodes
    }

    /// The I/O nodes that a client may use by their index, the one that it uses first.
    pub fn own_io_nodes_of(&self, client: &Placed<'_>) -> Vec<usize> {
        let allocation = &self.allocation;
        let rule = allocation.rules.iter().find(|rule| rule.applies_to(client));
        let mut own: Vec<usize> = match rule {
            None => (0..self.io.len()).collect(),
            Some(rule) => rule.nodes.iter().filter_map(|name| self.io.iter().position(|io| io.name == *name)).collect(),
        };
        let first = (allocation.key(client) % own.len().max(1) as u64) as usize;
        own.rotate_left(first);
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Io;

    fn config(nodes: usize, spread: Spread, rules: &[(&[u64], &[&str], &[&str])]) -> Config {
        let strings = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
        let rule = |&(jobs, hosts, nodes): &(&[u64], &[&str], &[&str])| AllocationRule {
            jobs: jobs.to_vec(),
            hosts: strings(hosts),
            nodes: strings(nodes),
        };
        Config {
            io: (0..nodes).map(|i| Io::new(format!("io.{i}"), format!("127.0.0.1:72{i:02}"))).collect(),
            allocation: Allocation { spread, rules: rules.iter().map(rule).collect() },
            ..Config::default()
        }
    }

    fn of(config: &Config, job: u64, host: &str, number: u64) -> Vec<usize> {
        config.io_nodes_of(&Placed { job, host, number })
    }

    #[test]
    fn without_rules_clients_are_spread_over_all_nodes() {
        let config = config(3, Spread::Client, &[]);
        assert_eq!([0, 1, 2, 3].map(|number| of(&config, 0, "n", number)[0]), [0, 1, 2, 0]);
        assert_eq!(of(&config, 0, "n", 1), [1, 2, 0], "the others follow, for failover");
        assert_eq!(of(&Config { io: Vec::new(), ..config }, 0, "n", 1), [0; 0]);
    }

    #[test]
    fn the_first_rule_that_applies_counts() {
        let rules: &[(&[u64], &[&str], &[&str])] = &[
            (&[7], &["login*"], &["io.3"]),
            (&[7, 8], &[], &["io.1", "io.2"]),
            (&[], &["rack1-*", "gpu"], &["io.0"]),
            (&[9], &[], &[]),
        ];
        let config = config(4, Spread::Client, rules);
        assert_eq!(of(&config, 7, "login3", 5), [3, 0, 1, 2]);
        assert_eq!(of(&config, 8, "login3", 5), [2, 1, 0, 3], "its own nodes before others");
        assert_eq!(of(&config, 3, "rack1-17", 5)[0], 0);
        assert_eq!(of(&config, 3, "gpu", 5)[0], 0);
        assert_eq!(of(&config, 9, "n", 5), [0; 0], "straight to the data servers");
        assert_eq!(of(&config, 3, "n", 5), [1, 2, 3, 0], "no rule: all");
    }

    #[test]
    fn hashes_are_stable_and_spread() {
        let hosts = config(4, Spread::Host, &[]);
        let first = |host: &str, number| of(&hosts, number, host, number)[0];
        let mut used = [0; 4];
        for n in 0..400 {
            let host = format!("node{n}");
            assert_eq!(first(&host, 1), first(&host, 2), "neither job nor number matter");
            used[first(&host, 1)] += 1;
        }
        assert!(used.iter().all(|count| (60..140).contains(count)), "{used:?}");
        let jobs = config(4, Spread::Job, &[(&[], &[], &["io.2", "io.3"])]);
        let first = |job, number| of(&jobs, job, "n", number)[0];
        assert!((0..100).all(|job| first(job, 1) == first(job, 2) && first(job, 1) >= 2));
        assert!((0..100).any(|job| first(job, 1) == 2) && (0..100).any(|job| first(job, 1) == 3));
    }
}
