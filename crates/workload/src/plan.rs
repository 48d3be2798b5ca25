//! A benchmark run: applications, their processes, when they start and how they issue requests.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::pattern::Pattern;
use crate::random::Shuffle;
use impresario_base::random::{Random, mix};
use impresario_base::units::{show_bytes, show_seconds};

/// What the timed part does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// Reads what was prepared.
    Read,
    /// Overwrites what was prepared.
    Write,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Operation::Read => "read",
            Operation::Write => "write",
        })
    }
}

impl std::str::FromStr for Operation {
    type Err = String;
    fn from_str(text: &str) -> Result<Operation, String> {
        match text {
            "read" => Ok(Operation::Read),
            "write" => Ok(Operation::Write),
            _ => Err(format!("there is no operation {text:?}: read or write")),
        }
    }
}

/// What a process does between two requests (and before its first): arrival jitter.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Think {
    /// Nothing: the next request follows at once.
    #[default]
    None,
    /// Waits a time drawn evenly from 0 to this many microseconds.
    Uniform(f64),
    /// Waits a time drawn exponentially with this mean in microseconds.
    Exponential(f64),
}

impl Think {
    /// The next waiting time.
    pub fn draw(self, random: &mut Random) -> Duration {
        let us = match self {
            Think::None => return Duration::ZERO,
            Think::Uniform(max) => random.unit() * max,
            Think::Exponential(mean) => random.exponential(mean),
        };
        Duration::from_nanos((us.max(0.0) * 1e3) as u64)
    }
}

impl std::str::FromStr for Think {
    type Err = String;
    fn from_str(text: &str) -> Result<Think, String> {
        let us = |t: &str| impresario_base::units::parse_duration(t).map(|d| d.as_secs_f64() * 1e6);
        match text.split_once(':') {
            None if text == "none" => Ok(Think::None),
            Some(("uniform", time)) => us(time).map(Think::Uniform),
            Some(("exponential", time)) => us(time).map(Think::Exponential),
            _ => Err(format!("{text:?} is not a valid jitter: none, uniform:100us or exponential:100us")),
        }
    }
}

/// Which I/O node a rank speaks to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Neighbouring ranks of an application on the same I/O node.
    #[default]
    Block,
    /// Neighbouring ranks on different I/O nodes, round robin.
    Cyclic,
}

impl Placement {
    /// The I/O node, below `nodes`, of a rank. Applications with fewer ranks than there are I/O nodes are
    /// spread by their own number.
    pub fn node(self, application: usize, rank: u32, processes: u32, nodes: usize) -> usize {
        let (rank, processes) = (rank as usize, processes.max(1) as usize);
        let nodes = nodes.max(1);
        if processes < nodes {
            return (application * processes + rank) % nodes;
        }
        match self {
            Placement::Block => rank * nodes / processes,
            Placement::Cyclic => rank % nodes,
        }
    }
}

impl std::str::FromStr for Placement {
    type Err = String;
    fn from_str(text: &str) -> Result<Placement, String> {
        match text {
            "block" => Ok(Placement::Block),
            "cyclic" => Ok(Placement::Cyclic),
            _ => Err(format!("there is no placement {text:?}: block or cyclic")),
        }
    }
}

/// One application: processes that share files.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Application {
    /// Which bytes its ranks touch.
    pub pattern: Pattern,
    /// Read or write.
    pub operation: Operation,
    /// When it starts after the first application, microseconds.
    pub start_us: u64,
    /// Requests that a process keeps outstanding; 1: synchronous.
    pub queue_depth: u32,
    /// Waiting times of its processes.
    pub think: Think,
    /// How often every process goes through its requests.
    pub loops: u32,
    /// How long every process computes after each quarter of its requests but the last, µs.
    #[serde(default)]
    pub pause_us: u64,
}

/// Of a process's requests, with pauses between them.
const PARTS: u64 = 4;

impl Application {
    /// The parts of a process's requests, in all its loops, between which it pauses; none is empty.
    pub fn parts(&self) -> impl Iterator<Item = Range<u64>> {
        let requests = self.pattern.requests() * u64::from(self.loops);
        let parts = if self.pause_us > 0 { PARTS } else { 1 };
        let begins = move |part| requests / parts * part + requests % parts * part / parts;
        (0..parts).map(move |part| begins(part)..begins(part + 1)).filter(|part| !part.is_empty())
    }

    /// Bytes that it moves in the timed part.
    pub fn bytes(&self) -> u64 {
        self.pattern.total_bytes() * u64::from(self.loops)
    }

    /// Requests that it makes in the timed part.
    pub fn requests(&self) -> u64 {
        self.pattern.requests() * u64::from(self.pattern.processes) * u64::from(self.loops)
    }

    /// A few words for people.
    pub fn describe(&self) -> String {
        let p = &self.pattern;
        let mut text = format!(
            "{} processes, {} {} of {}, {} each",
            p.processes,
            p.shape,
            self.operation,
            show_bytes(p.request_bytes as f64),
            show_bytes(p.process_bytes as f64 * f64::from(self.loops)),
        );
        if self.queue_depth > 1 {
            text += &format!(", queue depth {}", self.queue_depth);
        }
        if self.pause_us > 0 {
            text += &format!(", pauses of {}", show_seconds(self.pause_us as f64 / 1e6));
        }
        text
    }
}

/// A whole run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Workload {
    /// The applications.
    pub applications: Vec<Application>,
    /// Rank placement on the I/O nodes.
    pub placement: Placement,
    /// The client's largest request on the wire, bytes; absent: as large as the servers take.
    pub wire_max_bytes: Option<u32>,
    /// All processes wait for each other before they start.
    pub barrier: bool,
    /// The processes start one after another within this time, evenly and in a random order, µs (0: all at once). Those
    /// of a real job never start together, and synchronous ones permanently keep the order in which they first reach
    /// the disks: without a spread, the host's scheduler decides it.
    #[serde(default)]
    pub start_spread_us: u64,
    /// Writers end with a sync, inside the timed part.
    pub sync: bool,
    /// Of all chance in the run.
    pub seed: u64,
}

impl Workload {
    /// Equal applications that start together, synchronous, with a barrier.
    pub fn uniform(applications: u32, pattern: Pattern, operation: Operation) -> Workload {
        let (queue_depth, loops) = (1, 1);
        let one = Application { pattern, operation, start_us: 0, queue_depth, think: Think::None, loops, pause_us: 0 };
        let applications = (0..applications)
            .map(|i| Application {
                pattern: Pattern { seed: pattern.seed.wrapping_add(u64::from(i)), ..pattern },
                ..one.clone()
            })
            .collect();
        Workload {
            applications,
            placement: Placement::Block,
            wire_max_bytes: None,
            barrier: true,
            start_spread_us: 0,
            sync: false,
            seed: pattern.seed,
        }
    }

    /// Bytes of the timed part.
    pub fn bytes(&self) -> u64 {
        self.applications.iter().map(Application::bytes).sum()
    }

    /// Requests of the timed part.
    pub fn requests(&self) -> u64 {
        self.applications.iter().map(Application::requests).sum()
    }

    /// How long after its application each process sets out: application by application, by rank. Different for every
    /// `pair` and the same for all that run in it.
    pub fn start_delays(&self, pair: u32) -> Vec<Vec<Duration>> {
        let processes = u64::from(self.processes()).max(1);
        let order = Shuffle::new(processes, self.seed ^ mix(u64::from(pair) + 1));
        let slot_ns = self.start_spread_us as f64 * 1e3 / processes as f64;
        let mut numbers = 0..processes;
        let delay = |number| Duration::from_nanos((slot_ns * order.forward(number) as f64) as u64);
        let of = |a: &Application| numbers.by_ref().take(a.pattern.processes as usize).map(delay).collect();
        self.applications.iter().map(of).collect()
    }

    /// Processes over all applications.
    pub fn processes(&self) -> u32 {
        self.applications.iter().map(|a| a.pattern.processes).sum()
    }

    /// Why it cannot be run, if it cannot.
    pub fn check(&self) -> Result<(), String> {
        if self.applications.is_empty() {
            return Err("a workload needs at least one application".into());
        }
        let processes: u64 = self.applications.iter().map(|a| u64::from(a.pattern.processes)).sum();
        if processes > 4096 {
            return Err(format!("{processes} processes are more than the 4096 that one run starts"));
        }
        for application in &self.applications {
            let p = &application.pattern;
            if p.request_bytes == 0 || p.process_bytes == 0 || p.processes == 0 {
                return Err("request size, bytes per process and processes must all be at least 1".into());
            }
            if p.request_bytes > 1 << 30 {
                return Err(format!("a request of {} is larger than 1 GiB", show_bytes(p.request_bytes as f64)));
            }
            if p.process_bytes.checked_mul(u64::from(p.processes)).is_none_or(|bytes| bytes > 1 << 50) {
                return Err("the application's files would be larger than 1 PiB".into());
            }
            if application.queue_depth == 0 || application.queue_depth > 256 {
                return Err(format!("queue depth {} is not between 1 and 256", application.queue_depth));
            }
            if application.loops == 0 {
                return Err("loops must be at least 1".into());
            }
        }
        match self.wire_max_bytes {
            Some(bytes) if bytes < 512 => Err(format!("the largest request on the wire, {bytes} bytes, is below 512")),
            _ => Ok(()),
        }
    }

    /// The applications do not all do the same.
    pub fn is_mixed(&self) -> bool {
        let does =
            |a: &Application| (Pattern { seed: 0, ..a.pattern }, a.operation, a.queue_depth, a.loops, a.pause_us);
        self.applications.windows(2).any(|two| does(&two[0]) != does(&two[1]))
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        let Some(first) = self.applications.first() else { return "nothing".into() };
        let mut text = match self.is_mixed() {
            true => self.applications.iter().map(Application::describe).collect::<Vec<_>>().join("; "),
            false => format!("{} × {}", self.applications.len(), first.describe()),
        };
        if let Some(bytes) = self.wire_max_bytes {
            text += &format!(", {} on the wire", show_bytes(f64::from(bytes)));
        }
        if let Some(last) = self.applications.last().filter(|a| a.start_us > 0) {
            text += &format!(", last start after {}", show_seconds(last.start_us as f64 / 1e6));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Shape;

    fn pattern() -> Pattern {
        Pattern { shape: Shape::Strided, request_bytes: 16384, process_bytes: 1 << 21, processes: 8, seed: 1 }
    }

    #[test]
    fn placement_keeps_neighbours_together_or_apart() {
        let nodes = |placement: Placement| (0..8).map(|r| placement.node(0, r, 8, 2)).collect::<Vec<_>>();
        assert_eq!(nodes(Placement::Block), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(nodes(Placement::Cyclic), [0, 1, 0, 1, 0, 1, 0, 1]);
        // One process each: the applications are spread instead.
        assert_eq!((0..4).map(|a| Placement::Block.node(a, 0, 1, 2)).collect::<Vec<_>>(), [0, 1, 0, 1]);
    }

    #[test]
    fn counts_and_text() {
        let w = Workload::uniform(4, pattern(), Operation::Read);
        assert_eq!((w.bytes(), w.requests(), w.processes()), (64 << 20, 4096, 32));
        assert_eq!(w.describe(), "4 × 8 processes, strided read of 16 KiB, 2 MiB each");
        assert_eq!(w.check(), Ok(()));
        assert_ne!(w.applications[0].pattern.seed, w.applications[1].pattern.seed);
        assert!(!w.is_mixed());
        let mut mixed = Workload { applications: w.applications[..2].to_vec(), ..w };
        (mixed.applications[1].operation, mixed.applications[1].queue_depth) = (Operation::Write, 4);
        let text = "8 processes, strided read of 16 KiB, 2 MiB each; 8 processes, strided write of 16 KiB, 2 MiB each, queue depth 4";
        assert_eq!((mixed.describe().as_str(), mixed.is_mixed(), mixed.check()), (text, true, Ok(())));
    }

    #[test]
    fn pauses_are_between_quarters() {
        let mut app = Workload::uniform(1, pattern(), Operation::Read).applications.remove(0);
        let ends = |app: &Application| app.parts().map(|part| part.end).collect::<Vec<_>>();
        assert_eq!(ends(&app), [128]);
        (app.pause_us, app.loops) = (2_500_000, 3);
        assert_eq!(ends(&app), [96, 192, 288, 384]);
        assert!(app.describe().ends_with("6 MiB each, pauses of 2.50 s"), "{}", app.describe());
        (app.pattern.process_bytes, app.loops) = (3 * 16384, 1);
        assert_eq!(ends(&app), [1, 2, 3], "fewer requests than parts");
    }

    #[test]
    fn bad_workloads_say_why() {
        let good = Workload::uniform(2, pattern(), Operation::Read);
        let mut w = good.clone();
        w.applications[0].pattern.request_bytes = 0;
        assert!(w.check().unwrap_err().contains("at least 1"));
        let mut w = good.clone();
        w.applications[0].pattern.processes = 5000;
        assert!(w.check().unwrap_err().contains("4096"));
        let mut w = good;
        w.applications.clear();
        assert!(w.check().is_err());
    }

    #[test]
    fn jitter_reads() {
        assert_eq!("uniform:100us".parse(), Ok(Think::Uniform(100.0)));
        assert_eq!("exponential:1ms".parse(), Ok(Think::Exponential(1000.0)));
        assert!("sometimes".parse::<Think>().is_err());
        let mut random = Random::new(1);
        assert_eq!(Think::None.draw(&mut random), Duration::ZERO);
        assert!(Think::Uniform(100.0).draw(&mut random) < Duration::from_micros(100));
    }
}
