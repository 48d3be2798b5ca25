//! `impresario-lab peers`: the hop without disks, beside diod, nfs-ganesha, a minimal server and the folder without a server.
//!
//! The same clients, loopback, folders in memory, one request outstanding each, the same verification. Subjects run in random
//! order within each repetition, and ratios are taken within it. One that fails loses the row in which it fails; it is
//! started anew for the next.

mod connection;
mod names;
mod nfs3;
mod ninep;
mod report;
mod session;
mod subject;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_base::Random;
use impresario_workload::children::Children;
use impresario_workload::cluster::folder;
use impresario_workload::dataset::DataSet;
use impresario_workload::pattern::Shape;
use impresario_workload::plan::Operation;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::runner::{RunOptions, run_verified};
use impresario_workload::stop::Stop;
use serde_json::json;

use crate::datapath::{Load, clients, load, loads};
use crate::server_bench::own_network;
use crate::{named, nfs_ganesha};
use report::{Lost, Report, Sample};
use subject::{Running, Subject};

/// Measure the data path and metadata beside diod, nfs-ganesha, a minimal server and the folder without a server
///
/// No disks: folders in memory, loopback, one request outstanding per client, the same clients and verification for all.
/// Rows are contiguous reads and rewrites of 1 MiB, strided reads of 64 KiB, random reads of 4 KiB, and creating, asking for
/// attributes and removing files, with 1 and 16 clients each. Clients speak 9P2000.L to diod and NFS version 3 to nfs-ganesha;
/// they keep nothing but what folders are called there. A server that is not installed, fails, or does not answer for 10 s
/// has no figure in that row. nfs-ganesha needs root, rpcbind, and a network of its own, in which all run then.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab peers
  impresario-lab peers --scale 0.1 --repetitions 3
  impresario-lab peers --rows 'random;create, 16;stat, 16' --peers diod --json peers.json")]
pub struct Args {
    /// Repetitions of every row, each with every subject once
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a run: 1 is some gigabytes, or some thousand files
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", value_parser = positive)]
    scale: f64,
    /// Only rows whose name contains one of these, separated by ";", such as "1 MiB" or "create, 16"
    #[arg(long, visible_alias = "loads", value_delimiter = ';', value_name = "TEXT")]
    rows: Vec<String>,
    /// What is measured beside ours
    #[arg(long, value_delimiter = ',', value_enum, value_name = "SUBJECT",
        default_values = ["minimal", "diod", "nfs-ganesha", "direct"])]
    peers: Vec<Subject>,
    /// Policy of our data server
    #[arg(long, default_value = "auto", value_name = "NAME")]
    policy: String,
    /// Write every run to a file
    #[arg(long, visible_alias = "output", value_name = "FILE")]
    json: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| (1e-6..=1e3).contains(number));
    number.ok_or_else(|| format!("{text:?} is not a number from 0.000001 to 1000"))
}

/// What runs at once and gives one row, or those of the phases that it has.
enum Work {
    Data(Box<Load>),
    Names { clients: u32, files: u32 },
}

impl Work {
    fn rows(&self) -> Vec<String> {
        match self {
            Work::Data(load) => vec![load.name.clone()],
            Work::Names { clients: number, .. } => {
                names::PHASES.iter().map(|phase| format!("{phase}, {}", clients(*number))).collect()
            }
        }
    }

    fn suits(&self, subject: Subject) -> bool {
        matches!(self, Work::Data(_)) || subject.has_names()
    }
}

fn works(scale: f64) -> Vec<Work> {
    let mut data = loads(scale);
    let one = load(scale, Shape::Strided, Operation::Read, 64 << 10, 1, 64 << 20, 20.0);
    let at = data.iter().position(|load| load.name.starts_with("64 KiB")).unwrap_or(data.len());
    data.insert(at, one);
    let files = |number: f64| ((number * scale) as u32).max(1);
    let names = [(1, files(3000.0)), (16, files(500.0))].map(|(clients, files)| Work::Names { clients, files });
    data.into_iter().map(|load| Work::Data(Box::new(load))).chain(names).collect()
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let wanted = |row: &String| args.rows.is_empty() || args.rows.iter().any(|text| row.contains(text.as_str()));
    let works = named(works(args.scale), |work| work.rows().join("; "), &args.rows)?;
    let mut subjects = vec![Subject::Ours, Subject::IoNode];
    args.peers.iter().for_each(|peer| {
        if !subjects.contains(peer) {
            subjects.push(*peer);
        }
    });
    let stop = catch_signals()?;
    let dir = folder(None)?;
    let mut missing: HashMap<Subject, String> = HashMap::new();
    subjects.iter().for_each(|subject| missing.extend(subject.missing().map(|why| (*subject, why))));
    let mut portmapper = Children::default();
    if subjects.contains(&Subject::NfsGanesha) && !missing.contains_key(&Subject::NfsGanesha) {
        let prepared = own_network().and_then(|()| nfs_ganesha::portmapper(&mut portmapper, dir.path()));
        missing.extend(prepared.err().map(|why| (Subject::NfsGanesha, format!("{why:#}"))));
    }
    let start = |subject: Subject| match missing.get(&subject) {
        Some(why) => Err(anyhow::Error::msg(why.clone())),
        None => subject.start(&args.policy, &stop),
    };
    let mut line = Progress::new();
    let mut measurement = Measurement::new(&subjects, &start, args.repetitions, &stop);
    let ended = measurement.all(&works, &mut |text| line.show(text));
    line.end();
    let mut report = measurement.report;
    report.retain(|row| wanted(&row.to_string()));
    let told = json!({ "scale": args.scale, "policy": args.policy, "samples": report.samples, "no_figure": report.lost,
                       "ratios": report.ratios() });
    crate::report(&report.text(), args.json.as_deref(), &told)?;
    // What was measured until it was stopped is there all the same.
    ended.map(|()| ExitCode::SUCCESS)
}

/// What was measured, and what runs.
struct Measurement<'a> {
    subjects: &'a [Subject],
    running: HashMap<Subject, Running>,
    start: &'a dyn Fn(Subject) -> Result<Running>,
    repetitions: u32,
    stop: &'a Stop,
    random: Random,
    report: Report,
}

/// What a subject has for a row, until the row ends or it fails.
struct Contender {
    subject: Subject,
    set: Option<DataSet>,
}

impl<'a> Measurement<'a> {
    fn new(
        subjects: &'a [Subject],
        start: &'a dyn Fn(Subject) -> Result<Running>,
        repetitions: u32,
        stop: &'a Stop,
    ) -> Measurement<'a> {
        let report = Report::of(subjects);
        Measurement { subjects, running: HashMap::new(), start, repetitions, stop, random: Random::new(1), report }
    }

    /// Fails only when it is stopped.
    fn all(&mut self, works: &[Work], show: &mut dyn FnMut(&str)) -> Result<()> {
        for (nth, work) in works.iter().enumerate() {
            let name = work.rows().join("; ");
            let suited = self.subjects.iter().filter(|subject| work.suits(**subject));
            let mut contenders: Vec<Contender> =
                suited.map(|subject| Contender { subject: *subject, set: None }).collect();
            self.each(&mut contenders, work, |this, contender| {
                show(&format!("{} of {}: {name}, {} gets ready", nth + 1, works.len(), contender.subject.name()));
                this.prepare(contender, work)
            })?;
            for repetition in 0..self.repetitions {
                self.random.shuffle(&mut contenders);
                self.each(&mut contenders, work, |this, contender| {
                    let (nth, subject) = (nth + 1, contender.subject.name());
                    show(&format!("{nth} of {}: {name}, repetition {repetition}, {subject}", works.len()));
                    this.one(contender, work, repetition)
                })?;
            }
            for Contender { subject, set } in contenders {
                let Some((server, set)) = self.running.get(&subject).zip(set) else { continue };
                // The row has its figures: what cannot be removed goes with the server.
                if set.remove(server.target.as_ref()).is_err() {
                    self.running.remove(&subject);
                }
            }
        }
        Ok(())
    }

    /// Lets each of them act. One that fails is out of the row, and its server ends.
    fn each(
        &mut self,
        contenders: &mut Vec<Contender>,
        work: &Work,
        mut act: impl FnMut(&mut Self, &mut Contender) -> Result<()>,
    ) -> Result<()> {
        let mut failed = None;
        contenders.retain_mut(|contender| {
            if failed.is_some() {
                return true;
            }
            let result = self.stop.check().map_err(anyhow::Error::from).and_then(|()| act(self, contender));
            match result {
                Ok(()) => true,
                Err(error) if self.stop.is_set() => {
                    failed = Some(error);
                    true
                }
                Err(error) => {
                    self.running.remove(&contender.subject);
                    let reason = format!("{error:#}");
                    let lost = |row| Lost { row, subject: contender.subject, reason: reason.clone() };
                    self.report.lost.extend(work.rows().into_iter().map(lost));
                    false
                }
            }
        });
        failed.map_or(Ok(()), Err)
    }

    fn prepare(&mut self, contender: &mut Contender, work: &Work) -> Result<()> {
        if !self.running.contains_key(&contender.subject) {
            let server = (self.start)(contender.subject)?;
            self.running.insert(contender.subject, server);
        }
        if let Work::Data(load) = work {
            let mut set = DataSet::new(&load.workload)?;
            set.prepare(self.server(contender.subject)?.target.as_ref(), self.stop)?;
            contender.set = Some(set);
        }
        Ok(())
    }

    fn server(&self, subject: Subject) -> Result<&Running> {
        self.running.get(&subject).context("it does not run")
    }

    fn one(&mut self, contender: &mut Contender, work: &Work, repetition: u32) -> Result<()> {
        let subject = contender.subject;
        let target = self.server(subject)?.target.as_ref();
        let mut samples = Vec::new();
        match (work, &mut contender.set) {
            (Work::Data(load), Some(set)) => {
                let result = run_verified(target, set, &load.workload, &RunOptions::default(), self.stop)?;
                let each_us = |seconds: f64| seconds * 1e6 / result.requests as f64;
                samples.push(Sample {
                    row: load.name.clone(),
                    subject,
                    repetition,
                    per_s: result.requests_per_s,
                    mib_per_s: Some(result.bandwidth_mib_s),
                    server_cpu_us: each_us(result.server_cpu_s.unwrap_or_default()),
                    client_cpu_us: each_us(result.client_cpu_s),
                    latency: Some(result.latency),
                    operations: result.requests,
                    verified: result.verification.checked_bytes,
                });
            }
            (Work::Names { clients, files }, _) => {
                let phases = names::measure(target, *clients, *files, self.stop)?;
                samples.extend(work.rows().into_iter().zip(phases).map(|(row, phase)| {
                    let each_us = |seconds: f64| seconds * 1e6 / phase.operations as f64;
                    Sample {
                        row,
                        subject,
                        repetition,
                        per_s: phase.operations as f64 / phase.time_s,
                        mib_per_s: None,
                        server_cpu_us: each_us(phase.server_cpu_s),
                        client_cpu_us: each_us(phase.client_cpu_s),
                        latency: None,
                        operations: phase.operations,
                        verified: phase.operations,
                    }
                }));
            }
            (Work::Data(_), None) => anyhow::bail!("its files were not made"),
        }
        self.report.samples.extend(samples);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use impresario_workload::access::{Identity, Process, Target};
    use impresario_workload::folder::Folder;
    use impresario_workload::memory::Memory;

    use super::*;

    /// Runs all of it at this target.
    pub fn every_work_is_verified(target: &dyn Target, works: Vec<Work>) {
        let stop = Stop::new();
        for work in works {
            match &work {
                Work::Data(load) => {
                    let mut set = DataSet::new(&load.workload).unwrap();
                    set.prepare(target, &stop).unwrap();
                    run_verified(target, &mut set, &load.workload, &RunOptions::default(), &stop).unwrap();
                    set.remove(target).unwrap();
                }
                Work::Names { clients, files } => {
                    let phases = names::measure(target, *clients, *files, &stop).unwrap();
                    assert!(phases.iter().all(|phase| phase.operations == u64::from(clients * files)));
                }
            }
        }
    }

    #[test]
    fn rows_are_those_of_the_comparison() {
        let rows: Vec<String> = works(1.0).iter().flat_map(Work::rows).collect();
        assert_eq!(rows.len(), 14, "{rows:?}");
        for what in [
            "1 MiB contiguous read",
            "1 MiB contiguous write",
            "64 KiB strided read",
            "4 KiB random read",
            "create",
            "stat",
            "unlink",
        ] {
            for clients in ["1 client", "16 clients"] {
                assert!(rows.contains(&format!("{what}, {clients}")), "{what}, {clients}: {rows:?}");
            }
        }
        for work in works(1.0) {
            if let Work::Data(load) = work {
                load.workload.check().unwrap();
            }
        }
    }

    /// Storage to which nobody can connect any more after some connections.
    struct Dying(Memory, Arc<AtomicU32>);

    impl Target for Dying {
        fn connect(&self, identity: Identity) -> Result<Box<dyn Process>> {
            let left = self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            left.map_err(|_| anyhow::anyhow!("it has died"))?;
            self.0.connect(identity)
        }
    }

    #[test]
    fn a_subject_that_fails_loses_its_row_and_is_started_anew() {
        let dir = tempfile::tempdir().unwrap();
        let subjects = [Subject::Ours, Subject::Minimal, Subject::Diod, Subject::NfsGanesha];
        let starts = AtomicU32::new(0);
        let start = |subject| {
            Ok(Running::of(match subject {
                Subject::Diod => {
                    // The first one dies in the second repetition of its second row.
                    let connections = if starts.fetch_add(1, Ordering::Relaxed) == 0 { 11 } else { u32::MAX };
                    Box::new(Dying(Memory::default(), Arc::new(connections.into())))
                }
                Subject::NfsGanesha => anyhow::bail!("it is not installed"),
                Subject::Ours => Box::new(Folder::new(dir.path())?),
                _ => Box::<Memory>::default(),
            }))
        };
        let stop = Stop::new();
        let mut measurement = Measurement::new(&subjects, &start, 3, &stop);
        let mut works = works(0.001);
        // With one client each.
        works.retain(|work| work.rows()[0].ends_with(", 1 client"));
        measurement.all(&works, &mut |_| ()).unwrap();
        let report = measurement.report;
        let rows: Vec<String> = works.iter().flat_map(Work::rows).collect();
        assert_eq!(starts.into_inner(), 2);
        let failed = |subject| report.lost.iter().filter(move |lost| lost.subject == subject);
        let lost: Vec<&Lost> = failed(Subject::Diod).collect();
        assert!(lost.len() == 1 && lost[0].row == rows[1] && lost[0].reason.contains("it has died"), "{lost:?}");
        assert_eq!(failed(Subject::NfsGanesha).count(), rows.len());
        assert_eq!(failed(Subject::Ours).count() + failed(Subject::Minimal).count(), 0);
        for row in &rows {
            let runs = |subject| report.samples.iter().filter(|s| s.row == *row && s.subject == subject).count();
            assert_eq!(runs(Subject::Ours), 3, "{row}");
            assert_eq!(runs(Subject::Diod), if *row == rows[1] { 1 } else { 3 }, "{row}");
            let names = names::PHASES.iter().any(|phase| row.starts_with(phase));
            assert_eq!(runs(Subject::Minimal), if names { 0 } else { 3 }, "{row}");
        }
        assert!(report.samples.iter().all(|sample| sample.verified > 0 && sample.operations > 0));
    }

    #[test]
    fn what_was_measured_until_it_is_stopped_is_kept() {
        let (stop, subjects) = (Stop::new(), [Subject::Ours]);
        let start = |_| Ok(Running::of(Box::<Memory>::default()));
        let mut measurement = Measurement::new(&subjects, &start, 3, &stop);
        let mut shown = 0;
        let error = measurement.all(&works(0.001), &mut |_| {
            shown += 1;
            if shown == 4 {
                stop.set();
            }
        });
        assert!(error.unwrap_err().to_string().contains("stopped"));
        assert_eq!((measurement.report.samples.len(), measurement.report.lost.len()), (2, 0));
    }
}
