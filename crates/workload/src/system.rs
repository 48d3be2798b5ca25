//! The systems compared: policies on data servers and I/O nodes, and the order in which modelled disks serve.

use std::path::PathBuf;

use anyhow::Result;
pub use impresario_device::Order as DiskOrder;
use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

use crate::access::Target;

/// On which servers the policies that are compared run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// The data servers.
    #[default]
    Data,
    /// The I/O nodes.
    Io,
}

impl std::str::FromStr for Layer {
    type Err = String;
    fn from_str(text: &str) -> Result<Layer, String> {
        match text {
            "data" => Ok(Layer::Data),
            "io" => Ok(Layer::Io),
            _ => Err(format!("there are no servers {text:?}: data or io")),
        }
    }
}

/// A cluster in one configuration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct System {
    /// What is compared, as the user wrote it: `none`, `mlf`, `none@elevator`, `twins+window_us=2000`.
    pub name: String,
    /// Policy of the data servers; absent: unchanged.
    pub data_policy: Option<PolicySpec>,
    /// Policy of the I/O nodes; absent: unchanged.
    pub io_policy: Option<PolicySpec>,
    /// Order of the modelled disks; absent: unchanged.
    pub disk_order: Option<DiskOrder>,
    /// The data servers use an earlier recording of the same case.
    #[serde(default)]
    pub recorded: bool,
}

/// What comparing systems changes on a server.
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    /// The server's name.
    pub server: String,
    /// Its policy.
    pub policy: PolicySpec,
    /// The order of its modelled disk, if it has one.
    pub disk_order: Option<DiskOrder>,
    /// The traces of earlier runs that it uses.
    pub earlier_runs: Vec<PathBuf>,
    /// It records its requests.
    pub is_recording: bool,
}

/// A target whose policies can be switched while it runs.
pub trait Switch: Target {
    /// What the other calls change, as it is now.
    fn settings(&self) -> Result<Vec<Settings>> {
        Ok(Vec::new())
    }

    /// Sets back what differs from `before`.
    fn set_back(&self, before: &[Settings]) -> Result<()> {
        _ = before;
        Ok(())
    }

    /// Applies a system. Called only while nothing is outstanding.
    fn switch(&self, system: &System) -> Result<()>;

    /// Data servers start recording their requests, and use no recorded run.
    fn begin_recording(&self) -> Result<()>;

    /// Data servers end their traces; returns the paths.
    fn end_recording(&self) -> Result<Vec<PathBuf>>;

    /// Data servers use the predictions from these traces, one each, or none.
    fn foretell(&self, traces: &[PathBuf]) -> Result<()>;

    /// Batches that a data server hands to its disk at once under the current policy; `None`: no limit.
    fn depth(&self) -> Result<Option<u32>>;
}

/// The policy that a comparison names: `control` is `fifo` that only merges neighbours.
pub fn policy(text: &str) -> Result<PolicySpec, String> {
    let mut words = text.split('+');
    let spec = match words.next().unwrap_or_default() {
        "control" => PolicySpec::named("fifo").with("merge", "on"),
        name => PolicySpec::named(name),
    };
    words.try_fold(spec, PolicySpec::with_word).map_err(|e| format!("{text:?}: {e}"))
}

impl System {
    /// Reads `name[+key=value…][@arrival|@elevator][@recorded]`, a policy for one layer; the other layer keeps `other`.
    pub fn parse(text: &str, on: Layer, other: &PolicySpec) -> Result<System, String> {
        let mut words = text.split('@');
        let name = words.next().unwrap_or_default();
        let (mut order, mut recorded) = (None, false);
        for word in words {
            match word {
                "recorded" => recorded = true,
                _ => order = Some(word.parse().map_err(|why| format!("{why}, or recorded"))?),
            }
        }
        let (own, other) = (Some(policy(name)?), Some(other.clone()));
        let (data_policy, io_policy) = match on {
            Layer::Data => (own, other),
            Layer::Io => (other, own),
        };
        // The default is arrival: a comparison must not depend on earlier runs.
        let disk_order = Some(order.unwrap_or_default());
        Ok(System { name: text.into(), data_policy, io_policy, disk_order, recorded })
    }

    /// Checks the policies against the list of those that exist, before anything is started.
    pub fn check(&self, data_servers: usize) -> Result<(), String> {
        let lanes = data_servers.clamp(1, usize::from(u16::MAX)) as u16;
        for (spec, lanes) in [(&self.data_policy, 1), (&self.io_policy, lanes)] {
            if let Some(spec) = spec {
                impresario_sched::policy::check(spec, lanes).map_err(|e| format!("{}: {e}", self.name))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systems_read_as_people_write_them() {
        let fifo = PolicySpec::named("fifo");
        let s = System::parse("none@elevator", Layer::Data, &fifo).unwrap();
        assert_eq!(s.data_policy, Some(PolicySpec::named("none")));
        assert_eq!((s.io_policy.clone(), s.disk_order), (Some(fifo.clone()), Some(DiskOrder::Elevator)));
        s.check(4).unwrap();
        let s = System::parse("twins+window_us=2000", Layer::Io, &fifo).unwrap();
        assert_eq!(s.io_policy.as_ref().unwrap().to_string(), "twins window_us=2000");
        assert_eq!((s.data_policy.clone(), s.disk_order), (Some(fifo.clone()), Some(DiskOrder::Arrival)));
        s.check(4).unwrap();
        assert!(!s.recorded);
        let s = System::parse("auto@elevator@recorded", Layer::Data, &fifo).unwrap();
        assert_eq!((s.recorded, s.disk_order), (true, Some(DiskOrder::Elevator)));
        assert_eq!(
            System::parse("control", Layer::Data, &fifo).unwrap().data_policy.unwrap().to_string(),
            "fifo merge=on"
        );
    }

    #[test]
    fn mistakes_are_named_before_anything_starts() {
        let fifo = PolicySpec::named("fifo");
        let parse = |text: &str| System::parse(text, Layer::Data, &fifo);
        assert!(parse("none@random").unwrap_err().contains("random"));
        assert!(parse("mlf+fast").unwrap_err().contains("key=value"));
        assert!(parse("best").unwrap().check(4).unwrap_err().contains("no policy \"best\""));
        assert!(parse("twins").unwrap().check(4).is_err(), "a data server has one lane");
        assert!(System::parse("twins", Layer::Io, &fifo).unwrap().check(4).is_ok());
    }
}
