//! The files of `lab/papers`, compiled into the program.

use anyhow::{Context, Result};

use super::figure::Figure;

/// Names of the papers that are reproduced.
pub const PAPERS: [&str; 4] = ["server-side-scheduling-2002", "aioli-2006", "agios-2013", "twins-2017"];

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// Name and text of every figure, in the order of the papers.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../papers/", $name, ".toml")))),*];
    };
}

files!(
    "server-side-scheduling-2002-fig8",
    "server-side-scheduling-2002-fig9",
    "server-side-scheduling-2002-fig10",
    "aioli-2006-decomposition",
    "aioli-2006-cat",
    "aioli-2006-ten",
    "agios-2013-fig3",
    "agios-2013-fig5",
    "agios-2013-fig6",
    "agios-2013-fig7",
    "twins-2017-fig3",
    "twins-2017-fig4",
    "twins-2017-tables",
    "twins-2017-arrivals",
    "twins-2017-fig5",
    "twins-2017-fig6",
);

/// The machines of the papers.
#[cfg(test)]
const DEVICES: &str = include_str!("../../papers/devices.toml");

/// All figures, in the order of the papers.
pub fn figures() -> Result<Vec<Figure>> {
    let read = |&(id, text): &(&'static str, &str)| {
        let paper = PAPERS.into_iter().find(|p| id.starts_with(p)).with_context(|| format!("{id} is of no paper"))?;
        Figure::read(id, paper, text)
    };
    FILES.iter().map(read).collect()
}

/// One figure by its name.
pub fn figure(id: &str) -> Result<Figure> {
    figures()?.into_iter().find(|f| f.id == id).with_context(|| format!("there is no figure {id}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use impresario_sim::model::Device;

    use super::*;
    use crate::reproduce::Effort;

    #[test]
    fn every_scenario_file_is_read_and_every_cell_passes_the_checks() {
        let mut used = BTreeSet::new();
        for figure in figures().unwrap_or_else(|e| panic!("{e:#}")) {
            assert!(!figure.base.assumptions.is_empty(), "{}: a paper that leaves nothing out?", figure.id);
            for effort in [Effort::default(), Effort { divide: 64, ..Effort::default() }] {
                let cells = figure.cells(&effort).unwrap_or_else(|e| panic!("{e:#}"));
                let keys: BTreeSet<_> = cells.iter().map(|c| &c.key).collect();
                assert_eq!(keys.len(), cells.len(), "{}: two cells of one name", figure.id);
            }
            used.insert(format!("{}.toml", figure.id));
        }
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("papers");
        let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
        let files: BTreeSet<String> = files.filter(|f| f.ends_with(".toml") && f != "devices.toml").collect();
        assert_eq!(used, files, "files on the left are used, those on the right are there");
    }

    /// `impresario sim run` reads the files as they are.
    #[test]
    fn the_simulator_reads_the_files_too() {
        for ((file, text), figure) in FILES.iter().zip(figures().unwrap()) {
            let overrides = impresario_sim::file::Overrides::default();
            let study =
                impresario_sim::file::Study::read(text, Path::new(file), &overrides, &mut |_| Err("none".into()));
            assert_eq!(*study.unwrap_or_else(|e| panic!("{e}")).first(), figure.base, "{file}");
        }
    }

    /// No parameter is tuned to a result: each file uses its generation's device and network unchanged.
    #[test]
    fn machines_are_those_of_the_devices_file() {
        let machines: toml::Table = toml::from_str(DEVICES).unwrap();
        let networks: Vec<_> = machines["networks"].as_table().unwrap().values().collect();
        for (name, text) in FILES {
            let file: toml::Table = toml::from_str(text).unwrap();
            for (device_name, device) in file["device"].as_table().unwrap() {
                assert_eq!(machines["device"][device_name], *device, "{name}");
            }
            assert!(networks.contains(&&file["network"]), "{name}");
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
        let all: Vec<String> =
            figures().unwrap().iter().flat_map(|f| &f.metadata.claims).map(|c| c.id.clone()).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert!(all.len() > 80, "{}", all.len());
    }
}
