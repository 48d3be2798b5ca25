//! The files of `lab/studies`, compiled into the program: the project's own questions, in the form of the papers'
//! figures but without claims; and the tables that answer them.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use impresario_base::statistics::Interval;
use impresario_workload::stats::gains;

use super::campaign::Run;
use super::figure::{Figure, STUDY};
use super::report::{self, CellRow};
use super::text::short;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../studies/", $name, ".toml")))),*];
    };
}

files!("policies", "twins-windows", "twins-options", "twins-timer", "io-nodes");

/// Names of all studies.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

/// One study by its name.
pub fn study(name: &str) -> Result<Figure> {
    let (id, text) = FILES
        .iter()
        .find(|(id, _)| *id == name)
        .with_context(|| format!("there is no study {name}; there are {}", names().collect::<Vec<_>>().join(", ")))?;
    Figure::read(id, STUDY, text)
}

/// For each situation (the levels of all axes but the last) a table of the systems (those of the last): makespan, its gain
/// over the first system, run by run of the same seed, and what servers and devices did.
pub fn markdown(study: &Figure, runs: &BTreeMap<String, Vec<Run>>, repetitions: u32) -> String {
    let axes = &study.metadata.axes;
    let (systems, situations) = axes.split_last().map_or((&[][..], &[][..]), |(last, others)| (&last[..], others));
    // Each with its heading: the name of a level may contain what separates them in a key.
    let mut keys = vec![(String::new(), String::new())];
    for axis in situations {
        let with = |(key, heading): &(String, String), name: &str| {
            (format!("{key}{name}/"), if heading.is_empty() { name.into() } else { format!("{heading}, {name}") })
        };
        keys = keys.iter().flat_map(|before| axis.iter().map(|level| with(before, &level.name))).collect();
    }
    let mut out = format!("# {}\n\n{repetitions} runs each, in virtual time, on modelled devices.\n", study.base.title);
    for (key, heading) in keys {
        _ = writeln!(out, "\n## {heading}\n");
        out += "| system | makespan, s | gain | batch | device busy | accesses | of |\n|---|---|---|---|---|---|---|\n";
        let of = |name: &str| runs.get(&format!("{key}{name}")).map_or(&[][..], |runs| &runs[..]);
        let base = systems.first().map_or(&[][..], |first| of(&first.name));
        for (nth, system) in systems.iter().enumerate() {
            let own = of(&system.name);
            let row = report::cell(&system.name, own, study.metadata.confidence);
            let gain = (nth > 0).then(|| gain(base, own, study.metadata.confidence));
            _ = writeln!(out, "{}", line(&row, gain.as_ref()));
        }
    }
    out
}

/// Of a makespan over the baseline's of the same seed.
fn gain(base: &[Run], own: &[Run], confidence: f64) -> Interval {
    let [own, base] = [own, base].map(|runs| runs.iter().map(Run::makespan_s).collect::<Vec<_>>());
    Interval::with_confidence(&gains(&own, &base), confidence)
}

fn line(row: &CellRow, gain: Option<&Interval>) -> String {
    let percent = |v: f64| if v.is_finite() { format!("{:+.0}", v * 100.0) } else { "–".into() };
    let gain = gain.map(|g| format!("{} % [{}, {}]", percent(g.mean), percent(g.low), percent(g.high)));
    format!(
        "| {} | {} | {} | {:.0} KiB | {:.0} % | {:.0} | {} ms |",
        row.key,
        short(row.makespan_s.mean),
        gain.unwrap_or_else(|| "–".into()),
        row.inside.batch_bytes / 1024.0,
        row.inside.busy * 100.0,
        row.inside.accesses,
        short(row.inside.access_ms),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::reproduce::Effort;

    #[test]
    fn every_study_is_read_and_every_cell_passes_the_checks() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("studies");
        let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
        let known: BTreeSet<String> = names().map(|name| format!("{name}.toml")).collect();
        assert_eq!(files.collect::<BTreeSet<_>>(), known, "files on the left are there, those on the right are read");
        for name in names() {
            let study = study(name).unwrap_or_else(|e| panic!("{e:#}"));
            let cells = study.cells(&Effort::default()).unwrap_or_else(|e| panic!("{e:#}"));
            let keys: BTreeSet<_> = cells.iter().map(|c| &c.key).collect();
            assert_eq!(keys.len(), cells.len(), "{name}: two cells of one name");
        }
        let headed = markdown(&study("twins-windows").unwrap(), &BTreeMap::new(), 0);
        let headings: Vec<_> = headed.lines().filter(|line| line.starts_with("## ")).collect();
        assert!(headings.iter().any(|line| line.contains("2 I/O nodes")), "{headings:?}");
        assert!(study("nonsense").err().is_some_and(|e| format!("{e:#}").contains("twins-windows")));
    }
}
