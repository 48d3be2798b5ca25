//! What was measured, as a table with verdicts.

use impresario_base::statistics::{Interval, mean};
use impresario_workload::result::Latency;
use impresario_workload::stats::{Verdict, at_least, show};
use serde::{Deserialize, Serialize};

use super::subject::Subject;

/// One run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Name of the row.
    pub row: String,
    /// What was measured.
    pub subject: Subject,
    /// Repetition, from 0.
    pub repetition: u32,
    /// Requests or operations per second.
    pub per_s: f64,
    /// Their bytes, MiB/s; none of metadata.
    pub mib_per_s: Option<f64>,
    /// Processor time of the servers per request, µs.
    pub server_cpu_us: f64,
    /// Processor time of the clients per request, µs.
    pub client_cpu_us: f64,
    /// Of the requests for data.
    pub latency: Option<Latency>,
    /// Requests or operations.
    pub operations: u64,
    /// Bytes, or operations on metadata, that were checked.
    pub verified: u64,
}

/// A row in which a subject has no figure.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Lost {
    /// Name of the row.
    pub row: String,
    /// Which one.
    pub subject: Subject,
    /// Why.
    pub reason: String,
}

/// How many times as fast ours is as another.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Ratio {
    /// Name of the row.
    pub row: String,
    /// Ours, directly or through an I/O node.
    pub ours: Subject,
    /// The other.
    pub other: Subject,
    /// Rate of ours over that of the other, repetition by repetition.
    pub ratio: Interval,
    /// Whether ours is ahead.
    pub verdict: Verdict,
}

/// All that was measured.
pub struct Report {
    subjects: Vec<Subject>,
    /// Runs, in their order.
    pub samples: Vec<Sample>,
    /// What has no figure.
    pub lost: Vec<Lost>,
}

impl Report {
    /// Nothing yet.
    pub fn of(subjects: &[Subject]) -> Report {
        Report { subjects: subjects.to_vec(), samples: Vec::new(), lost: Vec::new() }
    }

    /// Keeps rows.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.samples.retain(|sample| keep(&sample.row));
        self.lost.retain(|lost| keep(&lost.row));
    }

    fn rows(&self) -> Vec<&str> {
        let mut rows: Vec<&str> = Vec::new();
        let all = self.samples.iter().map(|sample| &sample.row).chain(self.lost.iter().map(|lost| &lost.row));
        all.for_each(|row| {
            if !rows.contains(&row.as_str()) {
                rows.push(row);
            }
        });
        rows
    }

    fn lost(&self, row: &str, subject: Subject) -> Option<&Lost> {
        self.lost.iter().find(|lost| lost.row == row && lost.subject == subject)
    }

    /// The runs of a subject in a row in which it did not fail.
    fn of_row(&self, row: &str, subject: Subject) -> Vec<&Sample> {
        let own = self.samples.iter().filter(|sample| sample.row == row && sample.subject == subject);
        if self.lost(row, subject).is_some() { Vec::new() } else { own.collect() }
    }

    fn ratio(&self, row: &str, ours: Subject, other: Subject) -> Option<Ratio> {
        let others = self.of_row(row, other);
        let over = |own: &&Sample| {
            let pair = others.iter().find(|other| other.repetition == own.repetition)?;
            Some(own.per_s / pair.per_s)
        };
        let ratios: Vec<f64> = self.of_row(row, ours).iter().filter_map(over).collect();
        let ratio = Interval::of(&ratios);
        (ratio.n > 0).then(|| Ratio { row: row.into(), ours, other, ratio, verdict: at_least(ratio, 1.0) })
    }

    /// Both ways of ours over all others, where both have figures.
    pub fn ratios(&self) -> Vec<Ratio> {
        let mut ratios = Vec::new();
        for row in self.rows() {
            for ours in [Subject::Ours, Subject::IoNode] {
                ratios.extend(self.subjects.iter().filter(|o| **o != ours).filter_map(|o| self.ratio(row, ours, *o)));
            }
        }
        ratios
    }

    /// A table for people.
    pub fn text(&self) -> String {
        let mut out = String::from(
            "× is the rate of ours over that of the line, repetition by repetition, with its 95 % interval\n",
        );
        for row in self.rows() {
            out += &format!(
                "\n{row}\n  {:<12} {:>10} {:>8} {:>12} {:>12}  {:<36} {}\n",
                "", "per second", "MiB/s", "server µs/op", "client µs/op", "ours ×", "through an I/O node ×"
            );
            for subject in &self.subjects {
                let runs = self.of_row(row, *subject);
                let over =
                    |value: &dyn Fn(&Sample) -> f64| mean(&runs.iter().map(|run| value(run)).collect::<Vec<_>>());
                if let Some(lost) = self.lost(row, *subject) {
                    out += &format!("  {:<12} no figure: {}\n", subject.name(), lost.reason);
                } else if !runs.is_empty() {
                    let bytes = runs.iter().all(|run| run.mib_per_s.is_some());
                    let mib = over(&|run| run.mib_per_s.unwrap_or_default());
                    out += &format!(
                        "  {:<12} {:>10.0} {:>8} {:>12.1} {:>12.1}  {:<36} {}\n",
                        subject.name(),
                        over(&|run| run.per_s),
                        if bytes { format!("{mib:.0}") } else { "–".into() },
                        over(&|run| run.server_cpu_us),
                        over(&|run| run.client_cpu_us),
                        self.show_ratio(row, Subject::Ours, *subject),
                        self.show_ratio(row, Subject::IoNode, *subject),
                    );
                }
            }
        }
        out + &self.summary()
    }

    fn show_ratio(&self, row: &str, ours: Subject, other: Subject) -> String {
        let Some(Ratio { ratio, verdict, .. }) = self.ratio(row, ours, other).filter(|_| other != ours) else {
            return "–".into();
        };
        let verdict = if other.is_peer() { format!(" {}", verdict.place()) } else { String::new() };
        show(&ratio, "", |ratio| format!("{ratio:.2}")) + &verdict
    }

    /// In how many rows ours is ahead of the peers.
    fn summary(&self) -> String {
        let (ratios, rows) = (self.ratios(), self.rows().len());
        let mut out = String::new();
        for ours in [Subject::Ours, Subject::IoNode] {
            for peer in self.subjects.iter().filter(|subject| subject.is_peer()) {
                let of = |verdict: Verdict| {
                    let own = ratios.iter().filter(|r| r.ours == ours && r.other == *peer && r.verdict == verdict);
                    own.count()
                };
                let counts = [Verdict::Holds, Verdict::DoesNotHold, Verdict::Unresolved].map(of);
                out += &format!(
                    "\n{} against {}: ahead in {}, behind in {}, unresolved in {}, no figure in {} of {rows} rows",
                    ours.name(),
                    peer.name(),
                    counts[0],
                    counts[1],
                    counts[2],
                    rows - counts.iter().sum::<usize>().min(rows)
                );
            }
        }
        out + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let subjects = [Subject::Ours, Subject::IoNode, Subject::Minimal, Subject::Diod, Subject::NfsGanesha];
        let mut report = Report::of(&subjects);
        let mut add = |row: &str, subject, rates: [f64; 3]| {
            report.samples.extend(rates.into_iter().zip(0..).map(|(per_s, repetition)| Sample {
                row: row.into(),
                subject,
                repetition,
                per_s,
                mib_per_s: None,
                server_cpu_us: 1.0,
                client_cpu_us: 2.0,
                latency: None,
                operations: 10,
                verified: 10,
            }));
        };
        add("read", Subject::Ours, [100.0, 110.0, 90.0]);
        add("read", Subject::IoNode, [50.0, 55.0, 45.0]);
        // Twice as slow in each repetition, whatever the machine did meanwhile.
        add("read", Subject::Diod, [50.0, 55.0, 45.0]);
        add("read", Subject::NfsGanesha, [200.0, 221.0, 180.0]);
        add("read", Subject::Minimal, [100.0, 100.0, 100.0]);
        add("stat", Subject::Ours, [100.0, 110.0, 90.0]);
        add("stat", Subject::Diod, [10.0, 10.0, 10.0]);
        report.lost.push(Lost { row: "stat".into(), subject: Subject::Diod, reason: "no answer within 10 s".into() });
        report
    }

    #[test]
    fn ratios_are_taken_within_repetitions_and_judged() {
        let report = report();
        let of = |ours, other| report.ratio("read", ours, other).unwrap();
        let diod = of(Subject::Ours, Subject::Diod);
        assert_eq!((diod.ratio.mean, diod.ratio.low, diod.ratio.n, diod.verdict), (2.0, 2.0, 3, Verdict::Holds));
        assert_eq!(of(Subject::Ours, Subject::NfsGanesha).verdict, Verdict::DoesNotHold);
        assert_eq!(of(Subject::IoNode, Subject::Diod).verdict, Verdict::Holds);
        assert_eq!(of(Subject::Ours, Subject::Minimal).verdict, Verdict::Unresolved);
        // What failed in a row has no figure in it, though some runs had ended.
        assert_eq!(report.ratio("stat", Subject::Ours, Subject::Diod), None);
        assert_eq!(report.ratios().len(), 8);
    }

    #[test]
    fn the_table_says_who_is_ahead_and_what_has_no_figure() {
        let mut report = report();
        let text = report.text();
        let line = |start: &str| text.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        assert!(line("diod").contains("2.00 [2.00, 2.00] n=3 ahead"), "{text}");
        assert!(line("nfs-ganesha").contains("behind"), "{text}");
        assert!(!line("minimal").contains("unresolved"), "{text}");
        assert!(text.contains("  diod         no figure: no answer within 10 s\n"), "{text}");
        assert!(
            text.contains("ours against diod: ahead in 1, behind in 0, unresolved in 0, no figure in 1 of 2 rows"),
            "{text}"
        );
        assert!(
            text.contains("io-node against nfs-ganesha: ahead in 0, behind in 1, unresolved in 0, no figure in 1"),
            "{text}"
        );
        report.retain(|row| row == "read");
        assert!(!report.text().contains("stat"));
    }
}
