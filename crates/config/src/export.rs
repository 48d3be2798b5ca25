//! Who may use files, and how: the rules of exports, of clusters (`[[export]]`) and of NFS servers (`[[nfs.export]]`).

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use impresario_toml::KeyPath;
use serde::{Deserialize, Serialize};

use crate::model::Config;

/// Maximum exports of a cluster, or of an NFS server.
pub(crate) const EXPORTS_MAX: usize = 1024;
/// Maximum ranges of users that an export names.
const UIDS_MAX: usize = 256;

/// What the clients of some networks may do with a cluster's files. Of several exports the first one counts that names a
/// client's network.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Export {
    /// Networks of the clients; clients on Unix sockets count as 127.0.0.1.
    pub networks: Vec<String>,
    /// The folder that these clients see as the root: a path from the root of the name space, without leading slash; empty:
    /// all.
    pub folder: String,
    /// Refuse every change.
    pub read_only: bool,
    /// Which users are mapped to the anonymous user.
    pub squash: Squash,
    /// The anonymous user.
    pub anonymous_uid: u32,
    /// The anonymous group.
    pub anonymous_gid: u32,
    /// Who says which user a client's is.
    pub users: Users,
    /// The users other than root that clients may prove to be, such as `1000` and `2000-2999`; empty: all.
    pub uids: Vec<String>,
}

impl Default for Export {
    fn default() -> Export {
        Export {
            networks: loopback(),
            folder: String::new(),
            read_only: false,
            squash: Squash::Root,
            anonymous_uid: NOBODY,
            anonymous_gid: NOBODY,
            users: Users::Machine,
            uids: Vec::new(),
        }
    }
}

/// Who says which user a client's is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Users {
    /// The client's machine is believed.
    #[default]
    Machine,
    /// Each client proves its user with a credential of MUNGE.
    Munge,
}

/// Number of the anonymous user and group unless the configuration says otherwise.
pub(crate) const NOBODY: u32 = 65534;

/// The networks of an export that names none.
pub(crate) fn loopback() -> Vec<String> {
    Network::loopback().iter().map(Network::to_string).collect()
}

/// Which users are mapped to the anonymous user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Squash {
    /// User and group 0.
    #[default]
    Root,
    /// All.
    All,
    /// None: root on a client is root here.
    None,
}

/// The rules of an export that a server enforces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessRules {
    /// Networks of the clients that may use it.
    pub networks: Vec<Network>,
    /// Nothing can be changed through it.
    pub read_only: bool,
    /// Which users act as the anonymous one.
    pub squash: Squash,
    /// The anonymous user, also for calls without a user.
    pub anonymous_uid: u32,
    /// The anonymous group.
    pub anonymous_gid: u32,
}

impl Default for AccessRules {
    fn default() -> AccessRules {
        AccessRules {
            networks: Network::loopback(),
            read_only: false,
            squash: Squash::Root,
            anonymous_uid: NOBODY,
            anonymous_gid: NOBODY,
        }
    }
}

impl AccessRules {
    /// True when a client at this address may use the export.
    pub fn admits(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }

    /// As whom a client's user acts: user and group.
    pub fn acts_as(&self, uid: u32, gid: u32) -> (u32, u32) {
        match self.squash {
            Squash::All => (self.anonymous_uid, self.anonymous_gid),
            Squash::None => (uid, gid),
            Squash::Root => {
                (if uid == 0 { self.anonymous_uid } else { uid }, if gid == 0 { self.anonymous_gid } else { gid })
            }
        }
    }

    /// The further groups that a client's user may be in.
    pub fn groups(&self, groups: &[u32]) -> Vec<u32> {
        match self.squash {
            Squash::All => Vec::new(),
            Squash::None => groups.to_vec(),
            // A user may rightly be in group 0, but who says so is the client.
            Squash::Root => groups.iter().copied().filter(|group| *group != 0).collect(),
        }
    }
}

impl Export {
    /// The rules, as a server enforces them; the error names what is wrong with a network.
    pub fn rules(&self) -> Result<AccessRules, String> {
        let networks = self.networks.iter().map(|network| network.parse()).collect::<Result<_, String>>()?;
        let Export { read_only, squash, anonymous_uid, anonymous_gid, .. } = *self;
        Ok(AccessRules { networks, read_only, squash, anonymous_uid, anonymous_gid })
    }

    /// The users that clients may prove to be, as ranges of numbers, first and last; empty: all. The error names what is wrong.
    pub fn uid_ranges(&self) -> Result<Vec<(u32, u32)>, String> {
        self.uids.iter().map(|text| uid_range(text)).collect()
    }
}

fn uid_range(text: &str) -> Result<(u32, u32), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok((first, last)),
        _ => Err(format!("{text:?} names no users other than root; write 1000 or 2000-2999")),
    }
}

impl Config {
    /// Invalid values of the exports, each with its key.
    pub(crate) fn check_exports(&self) -> Vec<(KeyPath, String)> {
        let (root, mut found) = (KeyPath::default().key("export"), Vec::new());
        if self.export.is_empty() {
            return found;
        }
        if self.export.len() > EXPORTS_MAX {
            found.push((root.clone(), format!("there are more than {EXPORTS_MAX} exports")));
        }
        // Without keys a client cannot be told from a server, which is under no rule.
        if let Some(open) = self.servers().find(|server| !self.cluster.security.needs_key(server.address())) {
            let (name, address) = (open.name(), open.address());
            let why = format!(
                "exports tell clients from servers by their keys, and {name} at {address} takes peers without one; set \
                 security = \"key\" or \"tls\" in [cluster]"
            );
            found.push((root.index(0), why));
        }
        for (i, export) in self.export.iter().enumerate() {
            let at = root.index(i);
            if export.networks.is_empty() {
                found.push((at.key("networks"), "networks is empty; name the networks of the clients".into()));
            }
            found.extend(check_networks(&export.networks, &at));
            let folder = &export.folder;
            let is_path = folder.split('/').all(|name| !matches!(name, "" | "." | "..")) && !folder.contains('\0');
            if !folder.is_empty() && (!is_path || folder.len() > 1000) {
                let why = format!("{folder:?} is no folder of the name space; write a path such as \"projects/a\"");
                found.push((at.key("folder"), why));
            }
            if export.squash != Squash::None && self.tree.is_some() {
                let why = "the I/O nodes of a [tree] act as one user for all; write squash = \"none\"";
                found.push((at.key("squash"), why.into()));
            }
            if export.users == Users::Munge && self.tree.is_some() {
                let why = "the I/O nodes of a [tree] act as one user for all; remove the key";
                found.push((at.key("users"), why.into()));
            }
            let complaint =
                |(k, text): (usize, &String)| uid_range(text).err().map(|why| (at.key("uids").index(k), why));
            found.extend(export.uids.iter().enumerate().filter_map(complaint));
            let is_of_use = export.users == Users::Munge && export.squash != Squash::None;
            if !export.uids.is_empty() && (!is_of_use || export.uids.len() > UIDS_MAX) {
                let why = format!("uids takes users = \"munge\", root squashed, and at most {UIDS_MAX} ranges");
                found.push((at.key("uids"), why));
            }
            if export.squash != Squash::None && (export.anonymous_uid == 0 || export.anonymous_gid == 0) {
                let why = "the anonymous user and group may not be root's; name others, or write squash = \"none\"";
                found.push((at.key("anonymous_uid"), why.into()));
            }
        }
        found
    }
}

/// What is wrong with an export's networks.
pub(crate) fn check_networks(networks: &[String], export: &KeyPath) -> Vec<(KeyPath, String)> {
    let complaint = |(k, network): (usize, &String)| {
        network.parse::<Network>().err().map(|why| (export.key("networks").index(k), why))
    };
    networks.iter().enumerate().filter_map(complaint).collect()
}

/// A network: an address and how many of its leading bits count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    address: IpAddr,
    prefix_bits: u8,
}

impl Network {
    /// True for addresses inside. An IPv4 address counts as itself also where it is mapped into IPv6.
    pub fn contains(&self, client: IpAddr) -> bool {
        let differs = match (self.address, client.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => u128::from(a.to_bits() ^ b.to_bits()) << 96,
            (IpAddr::V6(a), IpAddr::V6(b)) => a.to_bits() ^ b.to_bits(),
            _ => return false,
        };
        differs.leading_zeros() >= u32::from(self.prefix_bits)
    }

    /// This machine only.
    pub fn loopback() -> Vec<Network> {
        vec![
            Network { address: Ipv4Addr::new(127, 0, 0, 0).into(), prefix_bits: 8 },
            Network { address: Ipv6Addr::LOCALHOST.into(), prefix_bits: 128 },
        ]
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Network, String> {
        let refuse = || format!("{text:?} is not a network; write 10.1.0.0/16, 192.168.3.4, fd00::/8 or 0.0.0.0/0");
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| refuse())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix_bits = bits.map_or(Ok(most), |bits| bits.parse().map_err(|_| refuse()))?;
        if prefix_bits > most { Err(refuse()) } else { Ok(Network { address, prefix_bits }) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn networks_contain_what_shares_their_bits() {
        let inside = |network: &str, client: &str| {
            network.parse::<Network>().unwrap().contains(client.parse::<IpAddr>().unwrap())
        };
        assert!(inside("10.1.0.0/16", "10.1.255.3") && !inside("10.1.0.0/16", "10.2.0.1"));
        assert!(inside("10.1.2.3", "10.1.2.3") && !inside("10.1.2.3", "10.1.2.4"));
        assert!(inside("0.0.0.0/0", "1.2.3.4") && !inside("0.0.0.0/0", "fd00::1"));
        assert!(inside("10.0.0.0/8", "::ffff:10.9.9.9"));
        assert!(inside("fd00::/8", "fdab::1") && !inside("fd00::/8", "fe80::1"));
        for bad in ["", "10.1.0.0/33", "10.1/16", "fd00::/129", "host", "any", "10.0.0.1/-1"] {
            bad.parse::<Network>().unwrap_err();
        }
    }

    #[test]
    fn users_are_squashed_as_the_rules_say() {
        let rules = |squash| AccessRules { squash, ..AccessRules::default() };
        let (root, all, none) = (rules(Squash::Root), rules(Squash::All), rules(Squash::None));
        assert_eq!((root.acts_as(0, 0), root.acts_as(7, 0), root.acts_as(7, 8)), ((65534, 65534), (7, 65534), (7, 8)));
        assert_eq!((all.acts_as(7, 8), none.acts_as(0, 0)), ((65534, 65534), (0, 0)));
        assert_eq!((root.groups(&[0, 4]), all.groups(&[4]), none.groups(&[0])), (vec![4], vec![], vec![0]));
    }

    const CLUSTER: &str = "[cluster]\nsecurity = \"key\"\n[meta]\naddress = \"127.0.0.1:1\"\ndir = \"m\"\n[[data]]\n\
                           name = \"data.0\"\naddress = \"127.0.0.1:2\"\ndir = \"d\"\n";

    #[test]
    fn the_exports_of_a_cluster_are_read_written_and_checked() {
        let text = format!(
            "{CLUSTER}[[export]]\nnetworks = [\"10.0.0.0/8\", \"fd00::/8\"]\nfolder = \"a/b\"\nread_only = true\n\
             [[export]]\nsquash = \"all\"\nanonymous_uid = 99\n\
             [[export]]\nusers = \"munge\"\nuids = [\"1000\", \"2000-2999\"]\n"
        );
        let config = Config::parse(&text, Path::new("/c.toml")).unwrap();
        assert_eq!((config.export[0].squash, config.export[1].networks.len()), (Squash::Root, 2));
        assert_eq!(Config::parse(&config.to_toml(), Path::new("/c.toml")).unwrap().export, config.export);
        assert_eq!(config.export[2].uid_ranges(), Ok(vec![(1000, 1000), (2000, 2999)]));
        let rules = config.export[0].rules().unwrap();
        assert!(rules.admits("10.2.3.4".parse().unwrap()) && !rules.admits("11.2.3.4".parse().unwrap()));
        for (from, to, line, what) in [
            ("security = \"key\"", "", 10, "security = \"key\""),
            ("10.0.0.0/8", "10.0.0/8", 11, "not a network"),
            ("\"a/b\"", "\"../b\"", 12, "no folder"),
            ("\"a/b\"", "\"/b\"", 12, "no folder"),
            ("= 99", "= 0", 16, "may not be root's"),
            ("\"1000\"", "\"0\"", 19, "no users other than root"),
            ("2000-2999", "2000-1999", 19, "no users other than root"),
            ("2000-2999", "alice", 19, "no users other than root"),
            ("users = \"munge\"", "", 19, "users = \"munge\""),
            ("users = \"munge\"", "users = \"munge\"\nsquash = \"none\"", 20, "root squashed"),
            ("\"10.0.0.0/8\", \"fd00::/8\"", "", 11, "networks is empty"),
            ("read_only", "readonly", 13, "read_only"),
        ] {
            let errors = Config::parse(&text.replace(from, to), Path::new("/c.toml")).unwrap_err().to_string();
            let found = errors.lines().any(|error| error.contains(&format!(":{line}:")) && error.contains(what));
            assert!(found, "{what}: {errors}");
        }
    }
}
