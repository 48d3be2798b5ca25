//! Turns measured costs into rules: a tree whose leaves are the rules of the table.
//!
//! A sample is an observation window with the cost of every policy in its situation. A leaf uses one policy for its
//! samples; its loss is the sum over its samples of ln(cost of that policy / cost of the best policy for the sample). A
//! node is split where that reduces the loss most (greedily, as classification trees are grown: Breiman et al.,
//! *Classification and Regression Trees*, 1984, with costs of choices in place of classes).

use impresario_sched::policy::auto::table::Bounds;
use impresario_sched::policy::auto::{FEATURES, Observation};

/// A window of observations.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What was observed.
    pub seen: Observation,
    /// Number of the situation.
    pub situation: usize,
    /// The samples of a situation together have weight 1.
    pub weight: f64,
}

/// Limits of the tree's growth.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Maximum conditions on the path to a leaf.
    pub depth_max: u32,
    /// Minimum samples in a leaf, in situations.
    pub leaf_min: f64,
    /// Minimum loss reduction by a split, as a mean over all samples.
    pub gain_min: f64,
}

/// A leaf.
#[derive(Clone, PartialEq, Debug)]
pub struct Leaf {
    /// By index in [`FEATURES`]; features without bounds are omitted.
    pub conditions: Vec<(usize, Bounds)>,
    /// Numbers of the situations of its samples and their weights.
    pub situations: Vec<(usize, f64)>,
    /// The policy, by number.
    pub choice: usize,
    /// Mean of ln(cost/best).
    pub loss: f64,
}

/// Grows a tree over samples; `regrets[situation][policy]` is ln(cost/best).
pub fn grow(samples: &[Sample], regrets: &[Vec<f64>], growth: Growth) -> Vec<Leaf> {
    let total = samples.iter().map(|s| s.weight).sum::<f64>();
    let mut leaves = Vec::new();
    let all: Vec<usize> = (0..samples.len()).collect();
    Grower { samples, regrets, growth, total, leaves: &mut leaves }.node(all, Vec::new());
    leaves
}

struct Grower<'a> {
    samples: &'a [Sample],
    regrets: &'a [Vec<f64>],
    growth: Growth,
    total: f64,
    leaves: &'a mut Vec<Leaf>,
}

/// The costs of every policy over some samples.
#[derive(Clone)]
struct Sums(Vec<f64>, f64);

impl Sums {
    fn new(policies: usize) -> Sums {
        Sums(vec![0.0; policies], 0.0)
    }

    fn add(&mut self, regrets: &[f64], weight: f64) {
        self.0.iter_mut().zip(regrets).for_each(|(sum, regret)| *sum += regret * weight);
        self.1 += weight;
    }

    fn best(&self) -> (usize, f64) {
        let least = |a: (usize, f64), b: (usize, f64)| if b.1 < a.1 { b } else { a };
        self.0.iter().copied().enumerate().reduce(least).unwrap_or((0, 0.0))
    }
}

impl Grower<'_> {
    fn sums<'b>(&self, members: impl Iterator<Item = &'b usize>) -> Sums {
        let mut sums = Sums::new(self.regrets.first().map_or(0, Vec::len));
        for &at in members {
            let s = &self.samples[at];
            sums.add(&self.regrets[s.situation], s.weight);
        }
        sums
    }

    fn node(&mut self, members: Vec<usize>, conditions: Vec<(usize, Bounds)>) {
        let sums = self.sums(members.iter());
        let (choice, loss) = sums.best();
        let cut = if (conditions.len() as u32) < self.growth.depth_max { self.best_cut(&members, loss) } else { None };
        let Some((feature, at)) = cut else {
            let mut situations = std::collections::BTreeMap::new();
            for member in &members {
                let s = &self.samples[*member];
                *situations.entry(s.situation).or_insert(0.0) += s.weight;
            }
            let situations = situations.into_iter().collect();
            return self.leaves.push(Leaf { conditions, situations, choice, loss: loss / sums.1.max(1e-9) });
        };
        let value = |member: &usize| (FEATURES[feature].1)(&self.samples[*member].seen);
        let (low, high): (Vec<usize>, Vec<usize>) = members.iter().partition(|member| value(member) < at);
        self.node(low, bounded(&conditions, feature, Bounds { from: None, below: Some(at) }));
        self.node(high, bounded(&conditions, feature, Bounds { from: Some(at), below: None }));
    }

    /// The feature and value at which a split reduces the loss most, if it suffices.
    fn best_cut(&self, members: &[usize], loss: f64) -> Option<(usize, f64)> {
        let mut best: Option<(f64, usize, f64)> = None;
        let all = self.sums(members.iter());
        for (feature, (_, value)) in FEATURES.iter().enumerate() {
            let mut sorted: Vec<(f64, usize)> =
                members.iter().map(|member| (value(&self.samples[*member].seen), *member)).collect();
            sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut low = Sums::new(all.0.len());
            for pair in sorted.windows(2) {
                let s = &self.samples[pair[0].1];
                low.add(&self.regrets[s.situation], s.weight);
                let at = rounded(pair[0].0, pair[1].0);
                let (Some(at), true) = (at, low.1 >= self.growth.leaf_min && all.1 - low.1 >= self.growth.leaf_min)
                else {
                    continue;
                };
                let high = Sums(all.0.iter().zip(&low.0).map(|(a, l)| a - l).collect(), all.1 - low.1);
                let after = low.best().1 + high.best().1;
                if best.is_none_or(|(least, ..)| after < least) {
                    best = Some((after, feature, at));
                }
            }
        }
        let (after, feature, at) = best?;
        (loss - after >= self.growth.gain_min * self.total).then_some((feature, at))
    }
}

/// A number with few digits above `low` and not above `high`, near their middle; `None` if they are too close for one.
fn rounded(low: f64, high: f64) -> Option<f64> {
    if high - low <= 1e-9 {
        return None;
    }
    let middle = if low > 10.0 { (low * high).sqrt() } else { f64::midpoint(low, high) };
    (0..12).find_map(|digits| {
        let unit = 10f64.powi(middle.abs().max(1e-9).log10().floor() as i32 - digits);
        let value = (middle / unit).round() * unit;
        // As it is written.
        let value: f64 = format!("{value:.6}").parse().ok()?;
        (value > low && value <= high).then_some(value)
    })
}

fn bounded(conditions: &[(usize, Bounds)], feature: usize, more: Bounds) -> Vec<(usize, Bounds)> {
    let mut all = conditions.to_vec();
    match all.iter_mut().find(|(f, _)| *f == feature) {
        Some((_, bounds)) => {
            bounds.from = more.from.or(bounds.from);
            bounds.below = more.below.or(bounds.below);
        }
        None => all.push((feature, more)),
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(reads: f64, jobs: f64) -> Observation {
        Observation {
            requests: 64,
            first: false,
            reads,
            jobs,
            files: 1.0,
            clients: 8.0,
            request_bytes: 4096.0,
            sequential: 0.0,
            touching: 0.0,
            distance_bytes: 0.0,
            outstanding: 8.0,
            device_share: 1.0,
        }
    }

    /// Reads of one job want policy 0, of several policy 1, writes policy 2.
    #[test]
    fn a_tree_finds_what_decides() {
        let (mut samples, mut regrets) = (Vec::new(), Vec::new());
        for (reads, jobs, best) in [(1.0, 1.0, 0), (1.0, 4.0, 1), (0.0, 1.0, 2), (0.0, 4.0, 2), (1.0, 6.0, 1)] {
            for _ in 0..4 {
                regrets.push((0..3).map(|policy| if policy == best { 0.0 } else { 1.0 }).collect());
                samples.push(Sample { seen: seen(reads, jobs), situation: regrets.len() - 1, weight: 1.0 });
            }
        }
        let growth = Growth { depth_max: 4, leaf_min: 2.0, gain_min: 0.01 };
        let leaves = grow(&samples, &regrets, growth);
        assert_eq!(leaves.len(), 3, "{leaves:?}");
        assert!(leaves.iter().all(|leaf| leaf.loss == 0.0));
        let of = |choice| leaves.iter().find(|leaf| leaf.choice == choice).unwrap();
        assert_eq!(of(0).situations.len(), 4);
        assert_eq!(of(1).situations.len(), 8);
        let bounds = |choice: usize, name: &str| {
            of(choice).conditions.iter().find(|(f, _)| FEATURES[*f].0 == name).map(|(_, bounds)| *bounds)
        };
        assert_eq!(bounds(1, "jobs"), Some(Bounds { from: Some(3.0), below: None }), "2.5, with one digit");
        assert_eq!(bounds(2, "reads").unwrap().below, Some(0.5));
        assert_eq!(grow(&samples, &regrets, Growth { depth_max: 0, ..growth }).len(), 1);
    }

    #[test]
    fn cuts_have_few_digits_and_cut() {
        for (low, high) in [(1.0, 4.0), (0.0, 1.0), (0.412, 0.4121), (4096.0, 16384.0), (1e6, 1.000001e6)] {
            let at = rounded(low, high).unwrap();
            assert!(low < at && at <= high, "{low} {at} {high}");
        }
        assert_eq!(rounded(1.0, 1.0), None);
        assert_eq!(rounded(0.0, 1.0), Some(0.5));
    }
}
