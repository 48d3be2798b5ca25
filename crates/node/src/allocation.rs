//! Which I/O nodes a job's clients use, so that all jobs together are served fastest.
//!
//! Each job has a *curve*: its bandwidth with no I/O node (its clients talk to the data servers themselves) and with 1, 2,
//! 4 or more. How many nodes each job gets is then the multiple-choice knapsack problem: exactly one choice for each job,
//! no more nodes than there are, the largest sum of bandwidths. The sum is what Bez et al. maximise in "Arbitration
//! Policies for On-Demand User-Level I/O Forwarding on HPC Platforms" (IPDPS 2021). Dynamic programming over jobs and
//! nodes is exact and takes jobs × nodes × choices steps, which bounds on both keep below 10^8.

/// Most jobs that are weighed at once.
pub const JOBS_MAX: usize = 4096;
/// Most I/O nodes.
pub const NODES_MAX: usize = 1024;

/// What a job gains from a number of I/O nodes of its own.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// I/O nodes; 0: none, its clients talk to the data servers themselves.
    pub nodes: usize,
    /// Its bandwidth with them, bytes/s or any other unit that all jobs share; finite and not negative.
    pub bandwidth: f64,
}

/// A job that shares the I/O nodes with others.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Job<'a> {
    /// Its choices, at least one.
    pub curve: &'a [Choice],
    /// How many nodes it has now, if it is running.
    pub has: Option<usize>,
}

/// Why there is no allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unsolvable {
    /// More jobs than [`JOBS_MAX`] or more nodes than [`NODES_MAX`].
    #[error("at most {JOBS_MAX} jobs and {NODES_MAX} I/O nodes are weighed")]
    TooMany,
    /// A bandwidth is negative or not finite.
    #[error("the bandwidth of job number {job} is negative or not finite")]
    Bandwidth {
        /// Index of the job.
        job: usize,
    },
    /// Even the smallest choices need more nodes than there are.
    #[error("the smallest choices of all jobs need more I/O nodes than there are")]
    TooFewNodes,
}

/// The number of I/O nodes of each job for which the sum of bandwidths is largest, of `nodes` in all.
///
/// What a running job has counts `margin` more (0.05: 5 %), so that it is moved only for a gain above that. Of equally good
/// allocations one with the fewest nodes is chosen.
pub fn allocate(jobs: &[Job<'_>], nodes: usize, margin: f64) -> Result<Vec<usize>, Unsolvable> {
    if jobs.len() > JOBS_MAX || nodes > NODES_MAX {
        return Err(Unsolvable::TooMany);
    }
    let is_sound = |choice: &Choice| choice.bandwidth.is_finite() && choice.bandwidth >= 0.0;
    if let Some(job) = jobs.iter().position(|job| !job.curve.iter().all(is_sound)) {
        return Err(Unsolvable::Bandwidth { job });
    }
    // The best sum of the jobs so far with exactly `n` nodes, and what each job has in it.
    let mut best = vec![None; nodes + 1];
    best[0] = Some(0.0);
    let mut taken: Vec<Vec<u16>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        let mut next: Vec<Option<f64>> = vec![None; nodes + 1];
        let mut with = vec![0; nodes + 1];
        for choice in job.curve.iter().filter(|choice| choice.nodes <= nodes) {
            let held = if job.has == Some(choice.nodes) { 1.0 + margin } else { 1.0 };
            let worth = choice.bandwidth * held;
            for (before, sum) in best.iter().take(nodes + 1 - choice.nodes).enumerate() {
                let Some(sum) = sum else { continue };
                let total = before + choice.nodes;
                if next[total].is_none_or(|known| sum + worth > known) {
                    next[total] = Some(sum + worth);
                    with[total] = choice.nodes as u16;
                }
            }
        }
        best = next;
        taken.push(with);
    }
    let mut at = None;
    for (total, sum) in best.iter().enumerate() {
        if let Some(sum) = *sum
            && at.is_none_or(|(_, most)| sum > most)
        {
            at = Some((total, sum));
        }
    }
    let (mut left, _) = at.ok_or(Unsolvable::TooFewNodes)?;
    let mut chosen = vec![0; jobs.len()];
    for (chosen, with) in chosen.iter_mut().zip(&taken).rev() {
        *chosen = usize::from(with[left]);
        left -= *chosen;
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn curve(points: &[(usize, f64)]) -> Vec<Choice> {
        points.iter().map(|&(nodes, bandwidth)| Choice { nodes, bandwidth }).collect()
    }

    fn solve(curves: &[Vec<Choice>], nodes: usize) -> Result<Vec<usize>, Unsolvable> {
        let jobs: Vec<_> = curves.iter().map(|curve| Job { curve, has: None }).collect();
        allocate(&jobs, nodes, 0.0)
    }

    /// Sum of the bandwidths, and of the nodes.
    fn total(curves: &[Vec<Choice>], chosen: &[usize]) -> (f64, usize) {
        let of = |(curve, nodes): (&Vec<Choice>, &usize)| {
            curve.iter().filter(|c| c.nodes == *nodes).map(|c| c.bandwidth).fold(f64::NAN, f64::max)
        };
        (curves.iter().zip(chosen).map(of).sum(), chosen.iter().sum())
    }

    /// All combinations: the best sum, and the fewest nodes that reach it.
    fn brute_force(curves: &[Vec<Choice>], nodes: usize) -> Option<(f64, usize)> {
        let Some((first, others)) = curves.split_first() else { return Some((0.0, 0)) };
        let mut best: Option<(f64, usize)> = None;
        for choice in first.iter().filter(|choice| choice.nodes <= nodes) {
            let Some((sum, used)) = brute_force(others, nodes - choice.nodes) else { continue };
            let (sum, used) = (sum + choice.bandwidth, used + choice.nodes);
            if best.is_none_or(|(most, least)| sum > most || (sum == most && used < least)) {
                best = Some((sum, used));
            }
        }
        best
    }

    /// The six applications of table 4 of the paper, as far as the table has their bandwidths (MB/s), with 12 I/O nodes.
    #[test]
    fn the_published_decision_is_found() {
        let curves = [
            curve(&[(0, 195.7), (1, 77.6)]),
            curve(&[(1, 597.2), (2, 594.2)]),
            curve(&[(1, 268.4), (8, 5089.9)]),
            curve(&[(2, 411.9)]),
            curve(&[(0, 255.9), (1, 77.8)]),
            curve(&[(0, 241.3), (2, 48.1)]),
        ];
        let chosen = solve(&curves, 12).unwrap();
        assert_eq!(chosen, [0, 1, 8, 2, 0, 0]);
        // By the number of compute nodes it is 1477.9 MB/s: the paper gives a factor of 4.59.
        let (sum, _) = total(&curves, &chosen);
        assert!((sum / (77.6 + 594.2 + 268.4 + 411.9 + 77.8 + 48.1) - 4.59).abs() < 0.01, "{sum}");
    }

    #[test]
    fn what_cannot_be_solved_is_said() {
        assert_eq!(solve(&[], 0), Ok(vec![]));
        assert_eq!(solve(&[curve(&[(1, 1.0)]), curve(&[(1, 1.0)])], 1), Err(Unsolvable::TooFewNodes));
        assert_eq!(solve(&[curve(&[])], 1), Err(Unsolvable::TooFewNodes));
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(solve(&[curve(&[(0, 1.0)]), curve(&[(0, bad)])], 1), Err(Unsolvable::Bandwidth { job: 1 }));
        }
        assert_eq!(solve(&[], NODES_MAX + 1), Err(Unsolvable::TooMany));
        assert_eq!(solve(&vec![curve(&[(0, 1.0)]); JOBS_MAX + 1], 0), Err(Unsolvable::TooMany));
        // The caller adds the remedy; the reasons are sentences.
        assert!(Unsolvable::Bandwidth { job: 3 }.to_string().contains("number 3"));
    }

    #[test]
    fn a_running_job_is_moved_only_for_more_than_the_margin() {
        let curve = curve(&[(0, 100.0), (2, 104.0), (4, 110.0)]);
        let chosen = |has, margin| allocate(&[Job { curve: &curve, has }], 4, margin).unwrap()[0];
        assert_eq!(chosen(None, 0.05), 4);
        assert_eq!(chosen(Some(2), 0.0), 4);
        assert_eq!(chosen(Some(2), 0.06), 2);
        assert_eq!(chosen(Some(0), 0.06), 4);
        assert_eq!(chosen(Some(0), 0.2), 0);
        // It must move when what it has is gone.
        assert_eq!(allocate(&[Job { curve: &curve, has: Some(4) }], 3, 9.0), Ok(vec![2]));
    }

    /// Whole numbers: their sums are exact in any order.
    fn curves() -> impl Strategy<Value = Vec<Vec<Choice>>> {
        let point = (prop::sample::select(vec![0usize, 1, 2, 3, 4, 8]), 0u32..50);
        let curve = prop::collection::vec(point, 1..6);
        let curve = curve.prop_map(|points| {
            points.into_iter().map(|(nodes, bandwidth)| Choice { nodes, bandwidth: bandwidth.into() }).collect()
        });
        prop::collection::vec(curve, 0..6)
    }

    proptest! {
        #[test]
        fn it_is_as_good_as_all_combinations_tried(curves in curves(), nodes in 0usize..24) {
            let found = solve(&curves, nodes).ok().map(|chosen| total(&curves, &chosen));
            prop_assert_eq!(found, brute_force(&curves, nodes));
        }

        #[test]
        fn what_is_held_stays_and_the_margin_bounds_the_loss(
            curves in curves(), nodes in 0usize..24, fewer in 0usize..8, margin in 0.0f64..0.5,
        ) {
            let Ok(first) = solve(&curves, nodes) else { return Ok(()) };
            let again = |nodes| {
                let jobs = curves.iter().zip(&first).map(|(curve, has)| Job { curve, has: Some(*has) });
                allocate(&jobs.collect::<Vec<_>>(), nodes, margin)
            };
            let unchanged = again(nodes).unwrap();
            prop_assert_eq!(total(&curves, &unchanged), total(&curves, &first));
            // Nodes were lost: what is chosen is within the margin of the best.
            if let (Ok(chosen), Some((best, _))) = (again(nodes.saturating_sub(fewer)), brute_force(&curves, nodes.saturating_sub(fewer))) {
                let (sum, used) = total(&curves, &chosen);
                prop_assert!(used <= nodes.saturating_sub(fewer));
                prop_assert!(sum * (1.0 + margin) >= best - 1e-9, "{} {}", sum, best);
            }
        }
    }
}
