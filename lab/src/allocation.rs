//! What I/O nodes are worth when jobs get them by measured benefit, over bandwidths that others measured and published: 189
//! write patterns through 0, 1, 2, 4 and 8 I/O nodes (`data/forwarding-marenostrum4.csv`, where its source is).
//!
//! The experiment is that of "Arbitration Policies for On-Demand User-Level I/O Forwarding on HPC Platforms" (Bez et al.,
//! IPDPS 2021), 3.2: sets of 16 random patterns are jobs that run at once on 512 compute nodes, and what an allocation is
//! worth is the sum of their bandwidths. Added here: how often jobs are moved when one ends and another begins.

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use impresario_base::Random;
use impresario_base::statistics::{mean, median};
use impresario_node::allocation::{Choice, Job, allocate};

use crate::{print, usage};

/// Measure what I/O nodes gain when jobs get them by measured benefit, over published bandwidths of 189 patterns
///
/// Each set is 16 random patterns that run at once. Compared: no I/O nodes, one for each job, by compute nodes of the
/// machine (static), by share of the compute nodes in use (size), and by benefit: the exact solution of the
/// multiple-choice knapsack.
#[derive(clap::Args)]
pub struct Args {
    /// Random sets of jobs
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    sets: u32,
    /// Numbers of I/O nodes
    #[arg(long, value_delimiter = ',', default_values_t = [0, 8, 16, 24, 32, 48, 56, 64, 96, 128], value_name = "N")]
    nodes: Vec<usize>,
    /// Seed of the sets
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
}

const TABLE: &str = include_str!("../data/forwarding-marenostrum4.csv");
/// I/O nodes that a job can have: the columns of the table.
const CHOICES: [usize; 5] = [0, 1, 2, 4, 8];
/// Jobs that run at once.
const JOBS: usize = 16;
/// Compute nodes of the machine.
const COMPUTE_NODES: usize = 512;
/// Margins over which jobs are moved.
const MARGINS: [f64; 4] = [0.0, 0.02, 0.05, 0.2];
/// I/O nodes while jobs come and go, and how often one does.
const CHANGING: (usize, u32) = (24, 2000);

/// A pattern of the table.
struct Pattern {
    compute_nodes: usize,
    curve: Vec<Choice>,
}

impl Pattern {
    fn with(&self, nodes: usize) -> f64 {
        self.curve.iter().find(|choice| choice.nodes == nodes).map_or(0.0, |choice| choice.bandwidth)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.sets == 0 || args.nodes.iter().any(|nodes| *nodes > 1024) {
        return Err(usage("give at least one set, and at most 1024 I/O nodes"));
    }
    let patterns = patterns(TABLE)?;
    let mut text = compare(&patterns, args)?;
    text += &changes(&patterns, args.seed)?;
    print(text.as_bytes())
}

fn patterns(table: &str) -> Result<Vec<Pattern>> {
    let lines = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| pattern(line).with_context(|| format!("the line {line:?} of the table"))).collect()
}

fn pattern(line: &str) -> Result<Pattern> {
    let fields: Vec<&str> = line.split(',').collect();
    ensure!(fields.len() == 5 + CHOICES.len(), "it has {} fields", fields.len());
    let bandwidths = fields.iter().skip(5).zip(CHOICES);
    let curve = bandwidths.map(|(field, nodes)| Ok(Choice { nodes, bandwidth: field.parse()? }));
    Ok(Pattern { compute_nodes: fields.first().context("no nodes")?.parse()?, curve: curve.collect::<Result<_>>()? })
}

/// The largest choice that is not above `nodes`.
fn not_above(nodes: usize) -> usize {
    CHOICES.into_iter().rfind(|choice| *choice <= nodes).unwrap_or(0)
}

/// A set of random jobs, no pattern twice.
fn draw<'a>(patterns: &'a [Pattern], random: &mut Random) -> Vec<&'a Pattern> {
    let mut all: Vec<&Pattern> = patterns.iter().collect();
    random.shuffle(&mut all);
    all.truncate(JOBS);
    all
}

fn sum(jobs: &[&Pattern], nodes: &[usize]) -> f64 {
    jobs.iter().zip(nodes).map(|(job, nodes)| job.with(*nodes)).sum()
}

fn best(jobs: &[&Pattern], has: Option<&[usize]>, nodes: usize, margin: f64) -> Result<Vec<usize>> {
    let has = |index: usize| has.and_then(|has| has.get(index).copied());
    let jobs: Vec<_> = jobs.iter().enumerate().map(|(index, job)| Job { curve: &job.curve, has: has(index) }).collect();
    Ok(allocate(&jobs, nodes, margin)?)
}

/// The policies beside each other, for each number of I/O nodes.
fn compare(patterns: &[Pattern], args: &Args) -> Result<String> {
    let mut text = format!(
        "Sum of the bandwidths of {JOBS} jobs, GB/s: median of {} sets (seed {}). benefit/static: median (least to most)\n\n\
         I/O nodes  direct  one each    size  static  benefit  in use  benefit/static          benefit/direct\n",
        args.sets, args.seed
    );
    for &nodes in &args.nodes {
        let mut random = Random::new(args.seed);
        let mut sums: [Vec<f64>; 5] = Default::default();
        let [mut over_static, mut over_direct, mut used] = [const { Vec::new() }; 3];
        for _ in 0..args.sets {
            let jobs = draw(patterns, &mut random);
            let in_use: usize = jobs.iter().map(|job| job.compute_nodes).sum();
            let of_static = |job: &&Pattern| not_above((job.compute_nodes * nodes).div_ceil(COMPUTE_NODES));
            let of_size = |job: &&Pattern| not_above((2 * job.compute_nodes * nodes + in_use) / (2 * in_use));
            let benefit = best(&jobs, None, nodes, 0.0)?;
            let found = [
                sum(&jobs, &[0; JOBS]),
                sum(&jobs, &[1; JOBS]),
                sum(&jobs, &jobs.iter().map(of_size).collect::<Vec<_>>()),
                sum(&jobs, &jobs.iter().map(of_static).collect::<Vec<_>>()),
                sum(&jobs, &benefit),
            ];
            over_static.push(found[4] / found[3]);
            over_direct.push(found[4] / found[0]);
            used.push(benefit.iter().sum::<usize>() as f64);
            sums.iter_mut().zip(found).for_each(|(sums, found)| sums.push(found / 1e3));
        }
        let [direct, one, size, fixed, benefit] = sums.map(|sums| median(&sums));
        let one = if nodes < JOBS { "-".into() } else { format!("{one:.2}") };
        let range = |ratios: &[f64]| {
            let (least, most) = ratios.iter().fold((f64::MAX, 0.0f64), |(l, m), r| (l.min(*r), m.max(*r)));
            format!("{:.2} ({least:.2} to {most:.2})", median(ratios))
        };
        writeln!(
            text,
            "{nodes:>9}  {direct:>6.2}  {one:>8}  {size:>6.2}  {fixed:>6.2}  {benefit:>7.2}  {:>6.0}  {:<22}  {}",
            median(&used),
            range(&over_static),
            range(&over_direct)
        )?;
    }
    Ok(text)
}

/// One job ends and another begins, again and again: what margins cost, and how many running jobs are moved.
fn changes(patterns: &[Pattern], seed: u64) -> Result<String> {
    let (nodes, count) = CHANGING;
    let mut text = format!(
        "\nOne of the {JOBS} jobs ends and another begins, {count} times, with {nodes} I/O nodes\n\n\
         margin  bandwidth, GB/s  running jobs moved at each change\n"
    );
    for margin in MARGINS {
        let mut random = Random::new(seed);
        let mut jobs = draw(patterns, &mut random);
        let mut has = best(&jobs, None, nodes, margin)?;
        let (mut sums, mut moved) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let gone = random.below(JOBS as u64) as usize;
            jobs.remove(gone);
            has.remove(gone);
            let next = loop {
                let index = random.below(patterns.len() as u64) as usize;
                match patterns.get(index) {
                    Some(next) if !jobs.iter().any(|job| std::ptr::eq(*job, next)) => break next,
                    _ => {}
                }
            };
            jobs.push(next);
            let chosen = best(&jobs, Some(&has), nodes, margin)?;
            moved.push(chosen.iter().zip(&has).filter(|(now, before)| now != before).count() as f64);
            sums.push(sum(&jobs, &chosen) / 1e3);
            has = chosen;
        }
        writeln!(text, "{:>4.0} %  {:>15.2}  {:>33.2}", margin * 100.0, mean(&sums), mean(&moved))?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The best sum with exactly each number of nodes, by trying all combinations.
    fn all_combinations(jobs: &[&Pattern], used: usize, sum: f64, best: &mut [f64]) {
        let Some((job, others)) = jobs.split_first() else {
            best[used] = best[used].max(sum);
            return;
        };
        let room = best.len() - used;
        for choice in job.curve.iter().filter(|choice| choice.nodes < room) {
            all_combinations(others, used + choice.nodes, sum + choice.bandwidth, best);
        }
    }

    #[test]
    fn the_table_is_whole_and_no_number_of_nodes_suits_all() {
        let patterns = patterns(TABLE).unwrap();
        assert_eq!(patterns.len(), 189);
        let most = |p: &Pattern| p.curve.iter().max_by(|a, b| a.bandwidth.total_cmp(&b.bandwidth)).unwrap().nodes;
        let best = CHOICES.map(|nodes| patterns.iter().filter(|p| most(p) == nodes).count());
        assert_eq!(best, [19, 12, 89, 16, 53]);
        assert!(super::patterns("h\n1,2,3").is_err() && super::patterns("h\n1,2,3,4,5,x,1,1,1,1").is_err());
    }

    /// Nine jobs have two million allocations.
    #[test]
    fn nine_jobs_get_what_is_best_of_all_combinations() {
        let patterns = patterns(TABLE).unwrap();
        let mut random = Random::new(9);
        let mut jobs = draw(&patterns, &mut random);
        jobs.truncate(9);
        let mut exactly = vec![f64::NEG_INFINITY; 73];
        all_combinations(&jobs, 0, 0.0, &mut exactly);
        let mut most = 0.0f64;
        for (nodes, sum_exactly) in exactly.iter().enumerate() {
            most = most.max(*sum_exactly);
            let chosen = best(&jobs, None, nodes, 0.0).unwrap();
            assert!(chosen.iter().sum::<usize>() <= nodes);
            assert!((sum(&jobs, &chosen) - most).abs() < 1e-6 * most, "{nodes} I/O nodes: {chosen:?}");
        }
    }

    #[test]
    fn benefit_is_never_below_the_others_and_a_margin_saves_moves() {
        let patterns = patterns(TABLE).unwrap();
        let mut random = Random::new(3);
        for nodes in [0, 24, 128] {
            let jobs = draw(&patterns, &mut random);
            let benefit = sum(&jobs, &best(&jobs, None, nodes, 0.0).unwrap());
            assert!(benefit >= sum(&jobs, &[0; JOBS]));
            assert!(nodes < JOBS || benefit >= sum(&jobs, &[1; JOBS]));
        }
        let text = changes(&patterns, 1).unwrap();
        let moved: Vec<f64> = text
            .lines()
            .rev()
            .take(MARGINS.len())
            .map(|line| line.split_whitespace().last().unwrap().parse().unwrap())
            .collect();
        assert!(moved.first() < moved.last(), "{text}");
    }

    #[test]
    fn shares_are_the_largest_choice_below() {
        assert_eq!([0, 1, 3, 7, 8, 100].map(not_above), [0, 1, 2, 4, 8, 8]);
    }
}
