//! The papers: a file each, with its figures, systems and claims.

mod agios;
mod aioli;
mod server_side;
mod twins;
mod twins_more;

use impresario_sim::Scenario;

use super::campaign::Effort;
use super::claim::Claim;
use super::figure::{Cell, Figure, Plot};

/// What figures of a paper have in common.
struct Series {
    paper: &'static str,
    repetitions: u32,
    confidence: f64,
}

impl Series {
    /// One of them.
    fn figure(
        &self,
        id: &'static str,
        title: &'static str,
        (file, text): (&'static str, &'static str),
        cells: fn(&Scenario, &Effort) -> Vec<Cell>,
        claims: fn() -> Vec<Claim>,
        plots: fn() -> Vec<Plot>,
    ) -> Figure {
        let Series { paper, repetitions, confidence } = *self;
        Figure { id, paper, title, file, text, repetitions, confidence, cells, claims, plots }
    }
}

/// Names of the papers that are reproduced.
pub const PAPERS: [&str; 4] = ["server-side-scheduling-2002", "aioli-2006", "agios-2013", "twins-2017"];

/// All figures, in the order of the papers.
pub fn figures() -> Vec<Figure> {
    let mut all = server_side::figures();
    all.extend(aioli::figures());
    all.extend(agios::figures());
    all.extend(twins::figures());
    all.extend(twins_more::figures());
    all
}

/// The machines of the papers.
pub const DEVICES: &str = include_str!("../../../../../scenarios/papers/devices.toml");

/// A scenario file of the papers: name and text.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../../../scenarios/papers/", $name)))
    };
}
pub(crate) use file;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use impresario_sim::model::Device;

    use super::*;

    #[test]
    fn every_scenario_file_is_read_and_every_cell_passes_the_checks() {
        let mut used = BTreeSet::new();
        for figure in figures() {
            assert!(PAPERS.contains(&figure.paper), "{}", figure.id);
            assert!(figure.id.starts_with(figure.paper), "{}", figure.id);
            let base = figure.base().unwrap_or_else(|e| panic!("{e:#}"));
            assert!(!base.assumptions.is_empty(), "{}: a paper that leaves nothing out?", figure.file);
            for effort in [Effort::default(), Effort { divide: 64, ..Effort::default() }] {
                let cells = figure.checked_cells(&effort).unwrap_or_else(|e| panic!("{e:#}"));
                let keys: BTreeSet<_> = cells.iter().map(|c| &c.key).collect();
                assert_eq!(keys.len(), cells.len(), "{}: two cells of one name", figure.id);
            }
            used.insert(figure.file.to_string());
        }
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/papers");
        let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
        let files: BTreeSet<String> = files.filter(|f| f != "devices.toml").collect();
        assert_eq!(used, files, "files on the left are used, those on the right are there");
    }

    /// What `impresario sim run` makes of the files is what is reproduced.
    #[test]
    fn the_simulator_reads_the_files_too() {
        for figure in figures() {
            let path = Path::new(figure.file);
            let overrides = impresario_sim::file::Overrides::default();
            let study = impresario_sim::file::Study::read(figure.text, path, &overrides, &mut |_| Err("none".into()));
            let study = study.unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(*study.first(), figure.base().unwrap(), "{}", figure.file);
        }
    }

    /// No parameter is bent for a result: each file has its generation's device and network as they are.
    #[test]
    fn machines_are_those_of_the_devices_file() {
        let machines: toml::Table = toml::from_str(DEVICES).unwrap();
        let networks: Vec<_> = machines["networks"].as_table().unwrap().values().collect();
        for figure in figures() {
            let file: toml::Table = toml::from_str(figure.text).unwrap();
            for (name, device) in file["device"].as_table().unwrap() {
                assert_eq!(machines["device"][name], *device, "{}: {name}", figure.file);
            }
            assert!(networks.contains(&&file["network"]), "{}", figure.file);
        }
    }

    #[test]
    fn disks_are_disks_and_as_fast_as_their_sources_say() {
        let machines: toml::Table = toml::from_str(DEVICES).unwrap();
        let device = |name: &str| -> Device { machines["device"][name].clone().try_into().unwrap() };
        // MB/s of a long sequential transfer.
        for (name, mb_s) in [("ide-1998", 4.2), ("ide-2006", 48.0), ("sata-2013", 130.0), ("sas-2014", 147.0)] {
            let Device::Disk(disk) = device(name) else { panic!("{name} is no disk") };
            assert_eq!(disk.check(), Ok(()), "{name}");
            let rate = disk.sustained_bytes_per_s() as f64 / 1e6;
            assert!((rate / mb_s - 1.0).abs() < 0.01, "{name}: {rate} MB/s");
        }
    }

    #[test]
    fn claims_have_names_of_their_own() {
        let all: Vec<String> = figures().iter().flat_map(|f| (f.claims)()).map(|c| c.id).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(all.len() > 80, "{}", all.len());
    }
}
