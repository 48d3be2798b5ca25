//! aioli-2006: an NFS server with and without aIOLi.

use impresario_sim::model::{Collective, Pattern, Scenario};

use super::{Series, file};
use crate::reproduce::campaign::{Effort, Run};
use crate::reproduce::claim::{Claim, Ours, Table};
use crate::reproduce::figure::{Cell, Figure, Plot, policy};
use crate::reproduce::verdict::Says;

const PAPER: &str = "aioli-2006";
const GRANULARITIES_KIB: [u64; 5] = [8, 32, 128, 512, 2048];
/// Server and interface: `nfs/posix` is what the paper starts from.
const SYSTEMS: [&str; 4] = ["nfs/posix", "nfs/mpi-io", "aioli/posix", "aioli/mpi-io"];

/// The figures.
pub(super) fn figures() -> Vec<Figure> {
    let series = |repetitions| Series { paper: PAPER, repetitions, confidence: 0.95 };
    vec![
        series(8).figure(
            "aioli-2006-decomposition",
            "One parallel application: 4 GB by 32 processes at several granularities",
            file!("aioli-2006-decomposition.toml"),
            decomposition,
            decomposition_claims,
            decomposition_plots,
        ),
        series(8).figure(
            "aioli-2006-cat",
            "Two applications: cat of 16 MB beside the decomposition",
            file!("aioli-2006-cat.toml"),
            cat,
            cat_claims,
            cat_plots,
        ),
        series(5).figure(
            "aioli-2006-ten",
            "Ten applications on 96 nodes, 6 GB",
            file!("aioli-2006-ten.toml"),
            ten,
            ten_claims,
            ten_plots,
        ),
    ]
}

/// Puts the server and the interface in place: with MPI-IO what takes a file apart is one collective call.
fn system(s: &mut Scenario, name: &str) {
    if name.starts_with("aioli") {
        s.servers.policy = policy("aioli");
        s.servers.in_flight = 1;
    }
    if name.ends_with("mpi-io") {
        for a in s.application.iter_mut().filter(|a| a.pattern == Pattern::Strided) {
            a.collective = Some(Collective::default());
        }
    }
}

fn decomposition(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    let mut all = Vec::new();
    for kib in GRANULARITIES_KIB {
        for name in SYSTEMS {
            let mut s = base.clone();
            let a = &mut s.application[0];
            let share = a.request_bytes * a.requests;
            (a.request_bytes, a.requests) = (kib << 10, share / (kib << 10));
            system(&mut s, name);
            effort.thin(&mut s);
            all.push(Cell::new(format!("{kib} KiB/{name}"), s));
        }
    }
    all
}

fn decomposition_claims() -> Vec<Claim> {
    let mut all = Vec::new();
    for (base, id, says) in
        [("nfs/posix", "posix", Says::Ratio(11.0, 50.0)), ("nfs/mpi-io", "mpi-io", Says::Ratio(3.5, 6.5))]
    {
        for kib in GRANULARITIES_KIB {
            let keys = (format!("{kib} KiB/{base}"), format!("{kib} KiB/aioli/posix"));
            let text = format!("granularity {kib} KiB: {base} takes so many times as long as POSIX calls with aIOLi");
            all.push(Claim::new(format!("aioli.decomposition.{id}.{kib}k"), text, says, move |t| {
                Some(t.ratio(&keys.0, &keys.1, Run::makespan_s)?.noted(seconds(t, &keys.0, &keys.1, Run::makespan_s)?))
            }));
        }
    }
    all
}

/// The absolute times behind a ratio.
fn seconds(t: &Table<'_>, base: &str, new: &str, metric: impl Fn(&Run) -> f64 + Copy) -> Option<String> {
    Some(format!("{:.1} → {:.1} s", t.mean(base, metric)?, t.mean(new, metric)?))
}

fn decomposition_plots() -> Vec<Plot> {
    let curves =
        SYSTEMS.iter().map(|n| (n.to_string(), GRANULARITIES_KIB.iter().map(|k| format!("{k} KiB/{n}")).collect()));
    vec![Plot::Lines {
        what: "completion time, s (logarithmic), over granularity, KiB".into(),
        axis: GRANULARITIES_KIB.iter().map(u64::to_string).collect(),
        curves: curves.collect(),
        metric: Run::makespan_s,
        log: true,
    }]
}

fn cat(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    let with = |name: &&str| {
        let mut s = base.clone();
        system(&mut s, name);
        effort.thin(&mut s);
        Cell::and_alone(*name, s)
    };
    SYSTEMS.iter().map(with).collect()
}

fn cat_claims() -> Vec<Claim> {
    let cat = |r: &Run| r.time_s(1);
    let whole = |r: &Run| r.time_s(0);
    vec![
        Claim::new("aioli.cat.seconds", "without aIOLi the cat takes 100 s", Says::Seconds(100.0), move |t| {
            Some(Ours::of(t.values("nfs/posix", cat)?))
        }),
        Claim::new(
            "aioli.cat.mpi-io",
            "MPI-IO instead of POSIX reduces the load: the cat is faster",
            Says::Better,
            move |t| Some(t.gain("nfs/posix", "nfs/mpi-io", cat)?.noted(seconds(t, "nfs/posix", "nfs/mpi-io", cat)?)),
        ),
        Claim::new("aioli.cat.faster", "aIOLi improves the cat", Says::Better, move |t| {
            Some(t.gain("nfs/posix", "aioli/posix", cat)?.noted(seconds(t, "nfs/posix", "aioli/posix", cat)?))
        }),
        Claim::new("aioli.cat.both", "aIOLi improves the decomposition beside it", Says::Better, move |t| {
            Some(t.gain("nfs/posix", "aioli/posix", whole)?.noted(seconds(t, "nfs/posix", "aioli/posix", whole)?))
        }),
    ]
}

fn cat_plots() -> Vec<Plot> {
    let bars = |what: &str, metric| Plot::Bars {
        what: what.into(),
        bars: SYSTEMS.iter().map(|n| (n.to_string(), n.to_string(), n.starts_with("nfs"))).collect(),
        metric,
    };
    vec![bars("cat of 16 MB, s", |r| r.time_s(1)), bars("decomposition of 4 GB, s", |r| r.time_s(0))]
}

fn ten(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    cat(base, effort)
}

/// Short name and the paper's seconds: NFS POSIX, NFS MPI-IO, aIOLi POSIX, aIOLi MPI-IO; in the order of the file.
const TEN: [(&str, [f64; 4]); 10] = [
    ("read-2g", [490.0, 840.0, 134.0, 500.0]),
    ("write-2g", [409.0, 815.0, 107.0, 604.0]),
    ("read-256m", [595.0, 728.0, 104.0, 415.0]),
    ("write-128m", [51.0, 257.0, 14.5, 247.0]),
    ("seq-read-1g", [558.0, 59.0, 143.0, 54.0]),
    ("seq-write-512m", [192.0, 71.0, 84.0, 61.5]),
    ("seq-read-32m", [531.0, 9.0, 48.5, 3.0]),
    ("seq-write-32m", [208.0, 9.0, 47.0, 6.0]),
    ("seq-read-4m", [57.0, 1.5, 6.0, 1.0]),
    ("seq-write-4m", [39.0, 2.0, 19.0, 2.0]),
];

fn ten_claims() -> Vec<Claim> {
    let mut all = Vec::new();
    for (at, (row, paper)) in TEN.iter().enumerate() {
        for (base, new, id, times) in [
            ("nfs/posix", "aioli/posix", "posix", (paper[0], paper[2])),
            ("nfs/mpi-io", "aioli/mpi-io", "mpi-io", (paper[1], paper[3])),
        ] {
            let time = move |r: &Run| r.time_s(at);
            let gain = 1.0 - times.1 / times.0;
            let says = if gain == 0.0 { Says::Same(0.05) } else { Says::Gain(gain) };
            let text = format!("{row}, {id}: {} → {} s with aIOLi", times.0, times.1);
            all.push(Claim::new(format!("aioli.ten.{row}.{id}"), text, says, move |t| {
                Some(t.gain(base, new, time)?.noted(seconds(t, base, new, time)?))
            }));
        }
    }
    for (id, key, value) in [
        ("nfs.posix", "nfs/posix", 595.0),
        ("nfs.mpi-io", "nfs/mpi-io", 840.0),
        ("aioli.posix", "aioli/posix", 143.0),
        ("aioli.mpi-io", "aioli/mpi-io", 604.0),
    ] {
        all.push(Claim::new(
            format!("aioli.ten.all.{id}"),
            format!("all ten, {key}: {value} s"),
            Says::Seconds(value),
            move |t| Some(Ours::of(t.values(key, Run::makespan_s)?)),
        ));
    }
    all
}

fn ten_plots() -> Vec<Plot> {
    let one = |(at, metric): (usize, fn(&Run) -> f64)| Plot::Bars {
        what: format!("{}, s", TEN[at].0),
        bars: SYSTEMS.iter().map(|n| (n.to_string(), n.to_string(), n.starts_with("nfs"))).collect(),
        metric,
    };
    let times: [fn(&Run) -> f64; 4] = [|r| r.time_s(0), |r| r.time_s(2), |r| r.time_s(4), |r| r.time_s(6)];
    let all = Plot::Bars {
        what: "all ten, s".into(),
        bars: SYSTEMS.iter().map(|n| (n.to_string(), n.to_string(), n.starts_with("nfs"))).collect(),
        metric: Run::makespan_s,
    };
    [0, 2, 4, 6].into_iter().zip(times).map(one).chain([all]).collect()
}

#[cfg(test)]
mod tests {
    use impresario_sim::model::Operation;

    use super::*;

    #[test]
    fn the_rows_are_those_of_the_file() {
        let file = figures().into_iter().find(|f| f.id == "aioli-2006-ten").unwrap();
        let apps = file.base().unwrap().application;
        assert_eq!(apps.len(), TEN.len());
        for (app, (row, _)) in apps.iter().zip(TEN) {
            assert_eq!(app.op == Operation::Read, row.contains("read"), "{row}");
            assert_eq!(app.pattern == Pattern::Contiguous, row.contains("seq"), "{row}");
            let bytes = app.request_bytes * app.requests * u64::from(app.processes);
            let size = if bytes >= 1 << 30 { format!("{}g", bytes >> 30) } else { format!("{}m", bytes >> 20) };
            assert!(row.ends_with(&size), "{row} {size}");
        }
    }
}
