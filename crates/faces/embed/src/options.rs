//! Options of a scheduler, in code or as TOML text.

use std::time::Duration;

use impresario_engine::EngineConfig;
use impresario_foresight::ALONE_MAX;
use impresario_sched::{CostCurve, CostModel, LinearCost, Nanos, OpCost, PolicySpec, Table, policy};
use serde::Deserialize;

/// The threads that run callbacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dispatch {
    /// Threads of the library, 1 to [`Options::DISPATCH_THREADS_MAX`].
    Threads(u32),
    /// One thread per lane, at most [`Options::DISPATCH_THREADS_AUTO`]: a lane with a blocking callback does not delay
    /// others.
    Auto,
    /// The threads that submit and complete, without a thread switch; for callbacks that do not block.
    Inline,
}

/// Options of a scheduler.
#[derive(Clone, Debug)]
pub struct Options {
    /// The policy with its parameters.
    pub policy: PolicySpec,
    /// Devices or data servers below the scheduler, 1 to 65,535.
    pub lanes: u16,
    /// Lanes address one space: requests are not split at lanes, and conflicts are judged across them.
    pub shared_space: bool,
    /// Largest number of batches with the program per lane (the hand-off depth).
    pub lane_requests: u32,
    /// Bytes with the program per lane at which delivery to it stops.
    pub lane_bytes: u64,
    /// Largest number of batches with the program over all lanes.
    pub total_requests: u32,
    /// Largest number of requests in the scheduler, queued and with the program, 1 to 1,048,576.
    pub queue_requests: u32,
    /// Index of this node among its peers, from 0.
    pub node_rank: u32,
    /// How long `submit` waits while the scheduler is full.
    pub submit_timeout: Duration,
    /// The threads that run callbacks.
    pub dispatch: Dispatch,
    /// Time to process, for the policies that use it.
    pub cost: CostModel,
    /// What is below the program sorts requests itself: the kernel's scheduler, a page cache.
    pub sorted_below: bool,
    /// Bytes read ahead of the clients and not yet requested, at most; 0: nothing is read ahead. Needs
    /// [`Ahead`](crate::Ahead).
    pub read_ahead_bytes: u64,
    /// Speculations with the program at a time per lane that continue no request, at most: requests wait for these.
    pub lane_speculations: u32,
}

impl Default for Options {
    fn default() -> Self {
        let engine = EngineConfig::new(PolicySpec::named("fifo"));
        Options {
            policy: engine.policy,
            lanes: engine.lanes,
            shared_space: engine.shared_space,
            lane_requests: EngineConfig::LANE_REQUESTS,
            lane_bytes: engine.lane_bytes,
            total_requests: engine.total_requests,
            queue_requests: engine.queue_requests,
            node_rank: engine.node_rank,
            submit_timeout: engine.submit_timeout,
            dispatch: Dispatch::Auto,
            cost: engine.cost,
            sorted_below: engine.sorted_below,
            read_ahead_bytes: 0,
            lane_speculations: ALONE_MAX,
        }
    }
}

impl Options {
    /// Largest number of dispatcher threads.
    pub const DISPATCH_THREADS_MAX: u32 = 256;
    /// Largest default number of dispatcher threads.
    pub const DISPATCH_THREADS_AUTO: u32 = 8;

    /// Number of threads to start.
    pub fn dispatch_threads(&self) -> u32 {
        match self.dispatch {
            Dispatch::Threads(n) => n.clamp(1, Self::DISPATCH_THREADS_MAX),
            Dispatch::Auto => u32::from(self.lanes).clamp(1, Self::DISPATCH_THREADS_AUTO),
            // For batches released by time, when no thread of the program is inside the library.
            Dispatch::Inline => 1,
        }
    }

    /// Reports in one line what is out of range.
    pub fn check(&self) -> Result<(), String> {
        if self.lanes == 0 {
            return Err("lanes = 0: give 1 to 65535".into());
        }
        if !(1..=Table::CAPACITY_MAX).contains(&self.queue_requests) {
            return Err(format!("queue_requests = {}: give 1 to {}", self.queue_requests, Table::CAPACITY_MAX));
        }
        if let Dispatch::Threads(n) = self.dispatch
            && !(1..=Self::DISPATCH_THREADS_MAX).contains(&n)
        {
            let max = Self::DISPATCH_THREADS_MAX;
            return Err(format!("dispatch_threads = {n}: give 1 to {max}, or leave it unset"));
        }
        for (name, value) in [("lane_requests", self.lane_requests), ("total_requests", self.total_requests)] {
            if value == 0 {
                return Err(format!("{name} = 0 would let nothing through: give at least 1, or leave it unset"));
            }
        }
        if self.lane_bytes == 0 {
            return Err("lane_bytes = 0 would let nothing through: give at least 1, or leave it unset".into());
        }
        if self.lane_speculations == 0 {
            return Err("lane_speculations = 0 would let none through: set read_ahead_bytes = 0 instead".into());
        }
        check_read_ahead(self.read_ahead_bytes)?;
        policy::check(&self.policy, self.lanes).map_err(|e| e.to_string())
    }

    /// Applies `text` (TOML); `doc/EMBEDDING.md` documents every key. Missing keys leave the options unchanged.
    pub fn read(mut self, text: &str) -> Result<Options, String> {
        let file: File = impresario_toml::parse_text(text)?;
        if let Some(policy) = file.policy {
            self.policy = match policy {
                PolicyText::Text(text) => parse_policy(&text)?,
                PolicyText::Table(spec) => spec,
            };
        }
        let set = |to: &mut u32, from: Option<u32>| *to = from.unwrap_or(*to);
        self.lanes = file.lanes.unwrap_or(self.lanes);
        self.shared_space = file.shared_space.unwrap_or(self.shared_space);
        set(&mut self.lane_requests, file.lane_requests);
        self.lane_bytes = file.lane_bytes.unwrap_or(self.lane_bytes);
        set(&mut self.total_requests, file.total_requests);
        set(&mut self.queue_requests, file.queue_requests);
        set(&mut self.node_rank, file.node_rank);
        if let Some(ms) = file.submit_timeout_ms {
            self.submit_timeout = Duration::from_millis(u64::from(ms));
        }
        self.dispatch = match file.dispatch_threads {
            None => self.dispatch,
            Some(Threads::Number(n)) => Dispatch::Threads(n),
            Some(Threads::Word(word)) if word == "inline" => Dispatch::Inline,
            Some(Threads::Word(word)) if word == "auto" => Dispatch::Auto,
            Some(Threads::Word(word)) => {
                return Err(format!("dispatch_threads = \"{word}\": give a number, \"auto\" or \"inline\""));
            }
        };
        if let Some(cost) = file.read_cost {
            self.cost.read = cost.model("read_cost")?;
            self.cost.source = "configured".into();
        }
        if let Some(cost) = file.write_cost {
            self.cost.write = cost.model("write_cost")?;
            self.cost.source = "configured".into();
        }
        self.sorted_below = file.sorted_below.unwrap_or(self.sorted_below);
        self.read_ahead_bytes = file.read_ahead_bytes.unwrap_or(self.read_ahead_bytes);
        set(&mut self.lane_speculations, file.lane_speculations);
        self.cost.correct = file.correct_cost.unwrap_or(self.cost.correct);
        Ok(self)
    }
}

/// The least that is worth having.
const READ_AHEAD_MIN_BYTES: u64 = 4 << 20;
const READ_AHEAD_MAX_BYTES: u64 = 64 << 30;

/// Reports a budget for reading ahead that is out of range.
pub(crate) fn check_read_ahead(bytes: u64) -> Result<(), String> {
    if bytes == 0 || (READ_AHEAD_MIN_BYTES..=READ_AHEAD_MAX_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(format!("read_ahead_bytes = {bytes}: give {READ_AHEAD_MIN_BYTES} to {READ_AHEAD_MAX_BYTES}, or 0 for none"))
}

/// A policy from text such as `mlf quantum_bytes=65536`, as [`PolicySpec`] reads it.
pub fn parse_policy(text: &str) -> Result<PolicySpec, String> {
    text.parse().map_err(|e| format!("policy '{text}': {e}"))
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be text such as \"mlf\", or a table with name and parameters")]
enum PolicyText {
    Text(String),
    Table(PolicySpec),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a number, \"auto\" or \"inline\"")]
enum Threads {
    Number(u32),
    Word(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    policy: Option<PolicyText>,
    lanes: Option<u16>,
    shared_space: Option<bool>,
    lane_requests: Option<u32>,
    lane_bytes: Option<u64>,
    total_requests: Option<u32>,
    queue_requests: Option<u32>,
    node_rank: Option<u32>,
    submit_timeout_ms: Option<u32>,
    dispatch_threads: Option<Threads>,
    read_cost: Option<Cost>,
    write_cost: Option<Cost>,
    correct_cost: Option<bool>,
    sorted_below: Option<bool>,
    read_ahead_bytes: Option<u64>,
    lane_speculations: Option<u32>,
}

/// A line, or measured points (size in bytes, nanoseconds).
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cost {
    fixed_ns: Option<u64>,
    ps_per_byte: Option<u64>,
    points_ns: Option<Vec<(u64, u64)>>,
}

impl Cost {
    fn model(&self, key: &str) -> Result<OpCost, String> {
        match (self.fixed_ns, self.ps_per_byte, &self.points_ns) {
            (Some(fixed_ns), Some(ps_per_byte), None) => Ok(LinearCost { fixed: Nanos(fixed_ns), ps_per_byte }.into()),
            (None, None, Some(points)) => {
                let points: Vec<_> = points.iter().map(|(size, ns)| (*size, Nanos(*ns))).collect();
                CostCurve::through(&points).map(Into::into).map_err(|e| format!("{key}: {e}"))
            }
            _ => Err(format!("{key} needs either fixed_ns and ps_per_byte, or points_ns = [[bytes, ns], …]")),
        }
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::Op;

    use super::*;

    #[test]
    fn every_key_is_read_and_the_rest_stays() {
        let text = "policy = 'mlf quantum_bytes=65536'\nlanes = 3\nshared_space = true\nlane_requests = 4\n\
                    lane_bytes = 1000000\ntotal_requests = 9\nqueue_requests = 77\nnode_rank = 2\n\
                    submit_timeout_ms = 0\ndispatch_threads = 'inline'\n\
                    correct_cost = true\nsorted_below = true\nread_ahead_bytes = 8388608\n\
                    lane_speculations = 2\n[read_cost]\nfixed_ns = 5\nps_per_byte = 0\n\
                    [write_cost]\npoints_ns = [[4096, 1000], [8192, 2000]]\n";
        let o = Options::default().read(text).unwrap();
        assert_eq!(o.policy, PolicySpec::named("mlf").with("quantum_bytes", 65536));
        assert_eq!((o.lanes, o.shared_space, o.lane_requests, o.lane_bytes), (3, true, 4, 1_000_000));
        assert_eq!((o.total_requests, o.queue_requests, o.node_rank), (9, 77, 2));
        assert_eq!((o.submit_timeout, o.dispatch), (Duration::ZERO, Dispatch::Inline));
        assert_eq!((o.cost.ttp(Op::Read, 999), o.cost.ttp(Op::Write, 4096)), (Nanos(5), Nanos(1000)));
        assert!(o.cost.correct && !Options::default().cost.correct);
        assert_eq!((o.sorted_below, o.read_ahead_bytes, o.lane_speculations), (true, 8 << 20, 2));
        let again = o.clone().read("lanes = 4").unwrap();
        assert_eq!((again.lanes, again.queue_requests), (4, 77));
        let table = Options::default().read("policy = { name = 'fifo', merge = true }").unwrap();
        assert_eq!(table.policy, PolicySpec::named("fifo").with("merge", "on"));
    }

    #[test]
    fn the_example_in_the_documents_has_every_key() {
        let document = include_str!("../../../../doc/EMBEDDING.md");
        let example = document.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
        Options::default().read(example).unwrap();
        let error = Options::default().read("qzxjvk0qzxjvk = 1").unwrap_err();
        let (_, known) = error.split_once("known are ").unwrap();
        let missing: Vec<&str> = known
            .split(", ")
            .filter(|key| !example.lines().any(|line| line.starts_with(&format!("{key} = "))))
            .collect();
        assert!(missing.is_empty(), "doc/EMBEDDING.md does not name {missing:?}");
    }

    #[test]
    fn values_with_spaces_are_quoted() {
        let spec = parse_policy(r#" wfq  rules="a: job=1 {quantum_bytes=1024}; b: * {}" merge=on "#).unwrap();
        let rules = "a: job=1 {quantum_bytes=1024}; b: * {}";
        assert_eq!(spec, PolicySpec::named("wfq").with("rules", rules).with("merge", "on"));
        assert!(parse_policy("wfq rules=\"a").unwrap_err().contains("not closed"));
        assert!(parse_policy("  ").unwrap_err().contains("no name"));
    }

    #[test]
    fn mistakes_are_one_line_that_names_them() {
        for (text, wants) in [
            ("lanes = 1\nlans = 2", &["line 2", "lans", "did you mean lanes"][..]),
            ("node_rank = -1\nlans = 2", &["line 1: node_rank", "; line 2: unknown"]),
            ("lanes = 70000", &["line 1", "70000"]),
            ("lanes = ", &["line 1"]),
            ("policy = 3", &["policy: must be text"]),
            ("policy = 'mlf quantum'", &["\"quantum\"", "key=value"]),
            ("dispatch_threads = 'many'", &["\"many\"", "inline"]),
            ("[read_cost]\nfixed_ns = 1", &["read_cost", "ps_per_byte"]),
            ("[write_cost]\npoints_ns = [[1, 1]]", &["write_cost", "1 points"]),
        ] {
            let message = Options::default().read(text).unwrap_err();
            assert!(wants.iter().all(|w| message.contains(w)), "{text}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
        for (text, wants) in [
            ("lanes = 0", "lanes = 0"),
            ("queue_requests = 0", "queue_requests"),
            ("dispatch_threads = 0", "dispatch_threads"),
            ("lane_requests = 0", "lane_requests"),
            ("lane_speculations = 0", "lane_speculations"),
            ("read_ahead_bytes = 4096", "read_ahead_bytes = 4096"),
            ("policy = 'nosuch'", "nosuch"),
            ("policy = 'mlf quantum_bytes=1'", "quantum_bytes"),
            ("policy = 'twins'", "two data servers"),
        ] {
            let message = Options::default().read(text).unwrap().check().unwrap_err();
            assert!(message.contains(wants), "{text}: {message}");
        }
        assert_eq!(Options::default().check(), Ok(()));
    }
}
