//! What guided I/O did for the jobs of a site: reports of many runs and nodes, added up by job and program, for people and
//! for Prometheus.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use impresario_base::units::show_bytes;
use serde::{Deserialize, Serialize};

use crate::report::{FileReport, Report};

/// Series of Prometheus at most: the jobs that gained or wasted most, all others together.
const SERIES_MAX: usize = 256;

/// Whose run a report tells of.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The batch system's number of the job; empty outside of one.
    pub job: String,
    /// The program that was started; empty for a manager that served several.
    pub program: String,
    /// The name of the node.
    pub node: String,
}

impl Origin {
    /// Of this process: the job that it runs in, by what batch systems tell their jobs.
    pub fn here(program: &str, node: &str, variable: impl Fn(&str) -> Option<String>) -> Origin {
        const JOBS: [&str; 5] = ["IMPRESARIO_ASSIST_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"];
        let job = JOBS.into_iter().find_map(|name| variable(name).filter(|job| !job.is_empty()));
        Origin { job: job.unwrap_or_default(), program: program.into(), node: node.into() }
    }
}

/// A program in a job, on all its nodes.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Job {
    /// The batch system's number; empty outside of one.
    pub job: String,
    /// The program that was started.
    pub program: String,
    /// Reports, one of each node and run.
    pub reports: u64,
    /// The sum over all their files.
    pub files: FileReport,
    /// Time of reads that hints have saved, as far as measured; negative where they cost time.
    pub saved_ns: i64,
}

/// The jobs of many reports, those that gained most first.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Jobs {
    /// The jobs.
    pub jobs: Vec<Job>,
}

impl Jobs {
    /// Adds reports up.
    pub fn of(reports: impl IntoIterator<Item = Report>) -> Jobs {
        let mut jobs: BTreeMap<(String, String), Job> = BTreeMap::new();
        for report in reports {
            let Origin { job, program, .. } = report.origin.clone();
            let into = jobs.entry((job, program)).or_insert_with_key(|(job, program)| Job {
                job: job.clone(),
                program: program.clone(),
                ..Job::default()
            });
            into.reports += 1;
            into.files.add(&report.total());
            into.saved_ns = into.saved_ns.saturating_add(report.files.iter().map(FileReport::saved_ns).sum());
        }
        let mut jobs: Vec<Job> = jobs.into_values().collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(job.saved_ns));
        Jobs { jobs }
    }

    /// In Prometheus' text format.
    pub fn to_prometheus(&self) -> String {
        let mut listed: Vec<&Job> = self.jobs.iter().collect();
        listed.sort_by_key(|job| std::cmp::Reverse(job.saved_ns.unsigned_abs().max(job.files.wasted_bytes)));
        let mut others = Job { job: "others".into(), ..Job::default() };
        for job in listed.drain(SERIES_MAX.min(listed.len())..) {
            others.reports += job.reports;
            others.files.add(&job.files);
            others.saved_ns = others.saved_ns.saturating_add(job.saved_ns);
        }
        if others.reports > 0 {
            listed.push(&others);
        }
        let mut text = String::new();
        for (name, kind, help, value) in METRICS {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for job in &listed {
                let (id, program) = (escaped(&job.job), escaped(&job.program));
                let _ = writeln!(text, "{name}{{job=\"{id}\",program=\"{program}\"}} {}", value(job));
            }
        }
        text
    }
}

type Metric = (&'static str, &'static str, &'static str, fn(&Job) -> f64);

/// What is told of each job. `doc/METRICS.md` has the same.
const METRICS: [Metric; 9] = [
    ("impresario_assist_opens_total", "counter", "Files with hints that programs opened.", |job| {
        job.files.programs as f64
    }),
    ("impresario_assist_read_seconds_total", "counter", "Time that reads of files with hints took.", |job| {
        job.files.read_ns as f64 / 1e9
    }),
    ("impresario_assist_saved_seconds", "gauge", "Time of reads that hints saved, as last measured.", |job| {
        job.saved_ns as f64 / 1e9
    }),
    ("impresario_assist_read_bytes_total", "counter", "Bytes read from files with hints.", |job| {
        job.files.read_bytes as f64
    }),
    ("impresario_assist_prefetched_bytes_total", "counter", "Bytes prefetched.", |job| {
        job.files.prefetched_bytes as f64
    }),
    ("impresario_assist_used_bytes_total", "counter", "Prefetched bytes that were read.", |job| {
        job.files.used_bytes as f64
    }),
    ("impresario_assist_wasted_bytes_total", "counter", "Prefetched bytes that were let go unread.", |job| {
        job.files.wasted_bytes as f64
    }),
    ("impresario_assist_stood_down_total", "counter", "How often hints for a file were stopped.", |job| {
        job.files.stood_down as f64
    }),
    ("impresario_assist_errors_total", "counter", "Hints that the system refused.", |job| job.files.errors as f64),
];

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl fmt::Display for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |word: &str| if word.is_empty() { "-".into() } else { word.to_string() };
        let width = |of: fn(&Job) -> &str, title: &str| {
            self.jobs.iter().map(|job| of(job).chars().count()).max().unwrap_or(0).max(title.len())
        };
        let (id, program) = (width(|job| &job.job, "job"), width(|job| &job.program, "program"));
        writeln!(
            f,
            "{:<id$}  {:<program$} {:>7} {:>10} {:>10} {:>11} {:>11} {:>11}",
            "job", "program", "reports", "waited s", "saved s", "prefetched", "used", "wasted"
        )?;
        for job in &self.jobs {
            let files = &job.files;
            let [brought, used, wasted] =
                [files.prefetched_bytes, files.used_bytes, files.wasted_bytes].map(|bytes| show_bytes(bytes as f64));
            writeln!(
                f,
                "{:<id$}  {:<program$} {:>7} {:>10.2} {:>10.2} {brought:>11} {used:>11} {wasted:>11}",
                word(&job.job),
                word(&job.program),
                job.reports,
                files.read_ns as f64 / 1e9,
                job.saved_ns as f64 / 1e9
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(job: &str, node: &str, gains: &[Option<i64>]) -> Report {
        let file = |gain_percent: &Option<i64>| FileReport {
            read_ns: 1_000_000_000,
            prefetched_bytes: 4 << 20,
            used_bytes: 3 << 20,
            wasted_bytes: 1 << 20,
            gain_percent: *gain_percent,
            ..FileReport::default()
        };
        let origin = Origin { job: job.into(), program: "solver".into(), node: node.into() };
        Report { origin, files: gains.iter().map(file).collect(), ..Report::default() }
    }

    #[test]
    fn reports_of_all_nodes_come_to_one_line_a_job() {
        let reports = [
            report("12", "a", &[Some(50), None]),
            report("13", "a", &[Some(90)]),
            report("12", "b", &[Some(-25)]),
            report("", "c", &[]),
        ];
        let jobs = Jobs::of(reports);
        let told: Vec<_> = jobs.jobs.iter().map(|j| (j.job.as_str(), j.reports, j.saved_ns / 1_000_000)).collect();
        // Half the time saved is as much again; nine tenths nine times as much; a quarter more is a fifth of it lost.
        assert_eq!(told, [("13", 1, 9000), ("12", 2, 800), ("", 1, 0)]);
        assert_eq!(jobs.jobs[1].files.wasted_bytes, 3 << 20);
        let text = jobs.to_string();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.lines().nth(2).unwrap().starts_with("12   solver        2       3.00       0.80"), "{text}");
        assert!(text.lines().nth(3).unwrap().starts_with("-  "), "{text}");
    }

    #[test]
    fn prometheus_gets_valid_lines_and_no_more_than_it_should() {
        let odd = report("a\"b\\c\nd", "n", &[Some(50)]);
        let many = (0..1000).map(|i| report(&i.to_string(), "n", &[Some(10)]));
        let jobs = Jobs::of(many.chain([odd]));
        let text = jobs.to_prometheus();
        assert!(
            text.contains("impresario_assist_saved_seconds{job=\"a\\\"b\\\\c\\nd\",program=\"solver\"} 1\n"),
            "{text}"
        );
        let of = |name: &str| text.lines().filter(|l| l.starts_with(&format!("{name}{{"))).count();
        assert!(METRICS.iter().all(|(name, ..)| of(name) == SERIES_MAX + 1));
        let values = text.lines().filter(|l| l.starts_with("impresario_assist_wasted_bytes_total{"));
        let sum: f64 = values.map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
        assert_eq!(sum, 1001.0 * f64::from(1 << 20), "nothing is lost");
        assert_eq!(Jobs::default().to_prometheus().lines().count(), 2 * METRICS.len());
        for (name, kind, ..) in METRICS {
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        }
    }

    #[test]
    fn every_metric_is_documented_and_no_other() {
        let document = include_str!("../../../doc/METRICS.md").split("\n## Guided I/O").nth(1).unwrap();
        let rows: Vec<&str> = document.lines().filter(|line| line.starts_with("| `impresario_")).collect();
        assert_eq!(rows.len(), METRICS.len());
        for (name, kind, help, _) in METRICS {
            let (row, help) = (format!("| `{name}` | {kind} | "), help.trim_end_matches('.'));
            assert!(rows.iter().any(|line| line.starts_with(&row) && line.contains(help)), "{row}{help}");
        }
    }

    #[test]
    fn a_job_is_known_by_what_its_batch_system_says() {
        let of = |set: &[(&str, &str)]| {
            let variable =
                |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
            Origin::here("p", "n", variable).job
        };
        assert_eq!(of(&[("SLURM_JOB_ID", "7"), ("JOB_ID", "8")]), "7");
        assert_eq!(of(&[("SLURM_JOB_ID", ""), ("PBS_JOBID", "8.head")]), "8.head");
        assert_eq!((of(&[("IMPRESARIO_ASSIST_JOB", "x"), ("SLURM_JOB_ID", "7")]), of(&[])), ("x".into(), "".into()));
    }
}
