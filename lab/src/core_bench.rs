//! The cost of a scheduling decision: nanoseconds per request and bytes per queued request, for every policy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_sched::{
    ClientId, Completion, ConnId, Core, CoreConfig, Event, Extent, FileId, LaneId, Nanos, Next, Op, PolicySpec, Request,
};
use serde::{Deserialize, Serialize};

use impresario_base::Random;
use impresario_base::statistics::Interval;
use impresario_foresight::{PredictedQueues, Recorded};
use impresario_workload::rounds::Rounds;
use impresario_workload::stats::Verdict;
use impresario_workload::stop::Stop;

/// Largest cost of a request with 10,000 queued, ns.
pub const NS_MAX: f64 = 1000.0;
/// … and largest factor by which it grows with 100,000.
pub const GROWTH_MAX: f64 = 2.0;
/// Maximum memory of a queued request, bytes.
pub const BYTES_MAX: f64 = 160.0;

/// The mix of queued requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mix {
    /// 8 KiB at random places of 100 files: little to merge.
    Scattered,
    /// 32 clients reading 16 KiB in turn through 4 shared files: everything touches.
    Streams,
    /// A file of its own for every request, up to 10,000 files.
    ManyFiles,
}

impl Mix {
    /// All mixes.
    pub const ALL: [Mix; 3] = [Mix::Scattered, Mix::Streams, Mix::ManyFiles];

    fn requests(self, count: usize, lanes: u16) -> Vec<Request> {
        let mut random = Random::new(11);
        let make = |i: usize| {
            let n = i as u64;
            let (file, offset, len) = match self {
                Mix::Scattered => (random.below(100), random.below(1 << 20) * 8192, 8192),
                Mix::Streams => (n % 4, n / 4 * 16384, 16384),
                Mix::ManyFiles => (n % 10_000, n / 10_000 * 65536 + random.below(4) * 8192, 8192),
            };
            let lane = LaneId((offset / 65536 % u64::from(lanes)) as u16);
            let op = if random.below(2) == 0 { Op::Read } else { Op::Write };
            // All streams read, so that the policy decides rather than conflicts.
            let op = if self == Mix::Streams { Op::Read } else { op };
            let extent = Extent { file: FileId(file as u32), lane, file_offset: offset, lane_offset: offset, len };
            let client = (n % 32) as u32;
            Request { client: ClientId(client), conn: ConnId(client), ..Request::new(op, extent) }
        };
        (0..count).map(make).collect()
    }
}

/// One measurement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CoreResult {
    /// The policy with its parameters.
    pub policy: String,
    /// The mix.
    pub mix: Mix,
    /// Requests that stay queued.
    pub queued: usize,
    /// Push + next + completion, ns per request.
    pub ns_per_request: f64,
    /// Memory of the core, bytes per queued request; absent if the allocator does not report it.
    pub bytes_per_request: Option<f64>,
    /// Requests per batch.
    pub requests_per_batch: f64,
}

/// Memory allocated by this process, bytes, including the allocator's overhead.
#[cfg(target_env = "gnu")]
fn allocated_bytes() -> Option<u64> {
    // SAFETY: mallinfo2 only fills the structure that it returns.
    let info = unsafe { libc::mallinfo2() };
    Some(info.uordblks as u64 + info.hblkhd as u64)
}

#[cfg(not(target_env = "gnu"))]
fn allocated_bytes() -> Option<u64> {
    None
}

/// A recorded run of the maximum size that matches no request of any mix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unrelated {
    /// Of other files.
    Files,
    /// Of the same files at other offsets.
    Offsets,
}

impl Unrelated {
    fn run(self) -> Arc<PredictedQueues> {
        let files = if self == Unrelated::Files { 1 << 40 } else { 0 };
        let request = |i: u64| Recorded {
            file: files + i % 10_000,
            write: (i / 10_000).is_multiple_of(2),
            offset: (i / 20_000) * 8192 + 512,
            len: 8192,
            arrival_ns: i * 1000,
            completed_ns: Some(i * 1000 + 100_000),
            source: 0,
        };
        Arc::new(PredictedQueues::new((0..PredictedQueues::REQUESTS_MAX as u64).map(request)))
    }
}

/// The cost of a recorded run that does not match, with 1,000 queued: additional time per request as a share, over
/// pairs of measurements without and with it.
pub fn cost_of_unrelated(
    spec: &PolicySpec,
    (mix, run): (Mix, Unrelated),
    pairs: u32,
    patience: Duration,
    stop: &Stop,
) -> Result<Interval> {
    let run = run.run();
    let measured = Rounds::warmed_up(pairs).measure(2, &mut Random::new(3), stop, |_, with| {
        measure_with(spec, (mix, 1000), patience, (with == 1).then(|| run.clone()))
    })?;
    Ok(measured.more(1, 0, |result| result.ns_per_request))
}

/// Measures one policy with one mix. Nothing else may allocate memory in this process meanwhile.
pub fn measure(spec: &PolicySpec, mix: Mix, queued: usize, patience: Duration) -> Result<CoreResult> {
    measure_with(spec, (mix, queued), patience, None)
}

fn measure_with(
    spec: &PolicySpec,
    (mix, queued): (Mix, usize),
    patience: Duration,
    foretold: Option<Arc<PredictedQueues>>,
) -> Result<CoreResult> {
    // Lanes of an I/O node, since `twins` needs several; requests are not split, as in the papers. `auto` is measured in
    // front of a disk, where it observes: of data servers that have an order of their own an I/O node observes nothing.
    let lanes = if spec.name == "auto" { 1 } else { 4 };
    let pool = mix.requests(queued * 2, lanes);
    let before = allocated_bytes();
    let single = CoreConfig::single_lane(queued as u32 + 64);
    let config = CoreConfig { lanes, shared_space: lanes > 1, lane_requests: 1, ..single };
    let mut core = Core::new(config, spec).with_context(|| format!("policy {spec}"))?;
    core.foresee(foretold);
    let mut now = Nanos::ZERO;
    for request in &pool[..queued] {
        core.push(now, &Request { arrival: now, ..*request })?;
        now += Nanos(1000);
    }
    let after = allocated_bytes();
    let bytes_per_request = before.zip(after).map(|(b, a)| a.saturating_sub(b) as f64 / queued as f64);

    // Every dispatched request is replaced by a new one, so that `queued` stay queued.
    let (mut served, mut batches, mut next_request) = (0u64, 0u64, queued);
    let enough = (queued as u64 * 2).max(100_000);
    let start = Instant::now();
    let mut spent = Duration::ZERO;
    while served < enough && spent < patience {
        for _ in 0..256 {
            match core.next(now) {
                Next::Dispatch(batch) => {
                    now += Nanos(1000);
                    served += batch.parts.len() as u64;
                    batches += 1;
                    core.event(now, Event::Completed(Completion::of(&batch, now, now)));
                    for _ in 0..batch.parts.len() {
                        let request = &pool[next_request % pool.len()];
                        core.push(now, &Request { arrival: now, ..*request })?;
                        next_request += 1;
                    }
                }
                Next::Wait { until, reason } => {
                    anyhow::ensure!(until < Nanos::MAX, "{spec} waits for nothing ({reason:?}) with {queued} queued");
                    now = until;
                }
            }
        }
        spent = start.elapsed();
    }
    anyhow::ensure!(served > 0, "{spec} served nothing in {patience:?}");
    Ok(CoreResult {
        policy: spec.to_string(),
        mix,
        queued,
        ns_per_request: spent.as_nanos() as f64 / served as f64,
        bytes_per_request,
        requests_per_batch: served as f64 / batches as f64,
    })
}

/// Measures policies with all mixes and 1,000, 10,000 and 100,000 queued; reports each to `progress`.
pub fn measure_all(
    policies: &[PolicySpec],
    sizes: &[usize],
    patience: Duration,
    stop: &Stop,
    mut progress: impl FnMut(&CoreResult),
) -> Result<Vec<CoreResult>> {
    let mut results = Vec::new();
    for spec in policies {
        for mix in Mix::ALL {
            for &queued in sizes {
                stop.check()?;
                let result = measure(spec, mix, queued, patience)?;
                progress(&result);
                results.push(result);
            }
        }
    }
    Ok(results)
}

/// A table for people with a verdict for each policy and mix.
pub fn table(results: &[CoreResult]) -> String {
    let mut out = format!(
        "{:<28} {:<11} {:>8} {:>10} {:>13} {:>9}\n",
        "policy", "requests", "queued", "ns/request", "bytes/request", "per batch"
    );
    for r in results {
        out += &format!(
            "{:<28} {:<11} {:>8} {:>10.0} {:>13} {:>9.1}\n",
            r.policy,
            format!("{:?}", r.mix).to_lowercase(),
            r.queued,
            r.ns_per_request,
            r.bytes_per_request.map_or("–".into(), |b| format!("{b:.0}")),
            r.requests_per_batch
        );
    }
    for r in results.iter().filter(|r| r.queued == 10_000) {
        let large = results.iter().find(|l| l.queued == 100_000 && l.policy == r.policy && l.mix == r.mix);
        let mut bad = Vec::new();
        if r.ns_per_request > NS_MAX {
            bad.push(format!("{:.0} ns with 10,000 queued is more than {NS_MAX:.0} ns", r.ns_per_request));
        }
        if let Some(l) = large.filter(|l| l.ns_per_request > GROWTH_MAX * r.ns_per_request) {
            bad.push(format!("100,000 queued cost {:.1} × that", l.ns_per_request / r.ns_per_request));
        }
        if let Some(b) =
            [Some(r), large].into_iter().flatten().filter_map(|r| r.bytes_per_request).find(|b| *b > BYTES_MAX)
        {
            bad.push(format!("{b:.0} bytes a request are more than {BYTES_MAX:.0}"));
        }
        let (verdict, colon) = (Verdict::of(bad.is_empty()), if bad.is_empty() { "" } else { ": " });
        out += &format!("{} {:?}: at most 1 µs, ×2, 160 bytes: {verdict}{colon}{}\n", r.policy, r.mix, bad.join("; "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_measured() {
        for info in impresario_sched::policy::POLICIES {
            for mix in Mix::ALL {
                let spec = PolicySpec::named(info.name);
                let result = measure(&spec, mix, 500, Duration::from_millis(200)).unwrap();
                assert!(result.ns_per_request > 0.0);
                assert!(result.requests_per_batch >= 1.0);
            }
        }
    }

    /// What is measured of `auto` includes what it observes, and what it changes.
    #[test]
    fn auto_is_measured_where_it_observes() {
        let never = "version = 1\n[[rule]]\nname = \"never\"\nreads = { from = 9.0 }\nchoice = [{ policy = \"fifo\" }]\n\
                     [[rule]]\nname = \"seen\"\nreads = { below = 9.0 }\nchoice = [{ policy = \"fifo merge=on\" }]\n\
                     [[rule]]\nname = \"unseen\"\nchoice = [{ policy = \"fifo\" }]\n";
        let auto = PolicySpec::named("auto").with("table", never);
        let batches = |spec: &PolicySpec| {
            measure(spec, Mix::Streams, 500, Duration::from_millis(200)).unwrap().requests_per_batch
        };
        assert!(batches(&PolicySpec::named("fifo")) < 1.01 && batches(&auto) > 2.0, "it merges once it has observed");
    }

    #[test]
    fn the_table_judges() {
        let result = |queued, ns_per_request, bytes| CoreResult {
            policy: "mlf".into(),
            mix: Mix::Streams,
            queued,
            ns_per_request,
            bytes_per_request: Some(bytes),
            requests_per_batch: 3.0,
        };
        assert!(table(&[result(10_000, 900.0, 100.0), result(100_000, 1700.0, 150.0)]).contains(": holds"));
        let text = table(&[result(10_000, 1100.0, 100.0), result(100_000, 2300.0, 170.0)]);
        assert!(text.contains("1100 ns") && text.contains("2.1 ×") && text.contains("170 bytes"), "{text}");
    }
}
