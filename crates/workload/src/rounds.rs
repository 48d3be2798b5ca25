//! Rounds of trials: in each, every subject has its turn once, in random order, so that whatever else the machine does meets
//! all subjects alike. Subjects are compared within a round.

use anyhow::Result;
use impresario_base::Random;

use crate::stats::{Interval, gains, mean};
use crate::stop::Stop;

/// Indices below `count` in random order.
pub fn shuffled(count: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    random.shuffle(&mut order);
    order
}

/// Makes a trial until it counts, `tries` times at most; all that were made, the last one last.
pub fn tried<T>(tries: u32, counts: impl Fn(&T) -> bool, mut trial: impl FnMut() -> Result<T>) -> Result<Vec<T>> {
    let mut made = Vec::new();
    loop {
        made.push(trial()?);
        if made.len() >= tries as usize || made.last().is_some_and(&counts) {
            return Ok(made);
        }
    }
}

/// How many rounds there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rounds {
    /// Rounds that are kept.
    pub kept: u32,
    /// One more is made before them, whose trials warm up and are dropped.
    pub warm_up: bool,
}

impl Rounds {
    /// At least two, so that there is an interval, after one that warms up.
    pub fn warmed_up(rounds: u32) -> Rounds {
        Rounds { kept: rounds.max(2), warm_up: true }
    }

    /// At least one.
    pub fn cold(rounds: u32) -> Rounds {
        Rounds { kept: rounds.max(1), warm_up: false }
    }

    /// Makes all trials; `trial` is given the round, from 0, and the subject.
    ///
    /// # Errors
    /// When a trial fails, or it is stopped.
    pub fn measure<T>(
        self,
        subjects: usize,
        random: &mut Random,
        stop: &Stop,
        mut trial: impl FnMut(u32, usize) -> Result<T>,
    ) -> Result<Paired<T>> {
        let mut rounds = Vec::new();
        for round in 0..self.kept + u32::from(self.warm_up) {
            let mut made = Vec::new();
            for subject in shuffled(subjects, random) {
                stop.check()?;
                made.push((subject, trial(round, subject)?));
            }
            made.sort_by_key(|(subject, _)| *subject);
            if round > 0 || !self.warm_up {
                rounds.push(made.into_iter().map(|(_, trial)| trial).collect());
            }
        }
        Ok(Paired { rounds })
    }
}

/// Trials by round and subject.
#[derive(Clone, PartialEq, Debug)]
pub struct Paired<T> {
    /// The trials of each round, in the order of the subjects.
    pub rounds: Vec<Vec<T>>,
}

impl<T> Paired<T> {
    /// What `of` says of a subject, round by round.
    pub fn values(&self, subject: usize, of: impl Fn(&T) -> f64) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.get(subject)).map(of).collect()
    }

    /// The mean of that.
    pub fn mean(&self, subject: usize, of: impl Fn(&T) -> f64) -> f64 {
        mean(&self.values(subject, of))
    }

    /// A subject's value over another's, round by round.
    pub fn ratio(&self, new: usize, base: usize, of: impl Fn(&T) -> f64) -> Interval {
        let (new, base) = (self.values(new, &of), self.values(base, &of));
        Interval::of(&new.iter().zip(&base).map(|(new, base)| new / base).collect::<Vec<_>>())
    }

    /// By which share of the other's value a subject's is less: of times a gain, of rates a loss.
    pub fn less(&self, new: usize, base: usize, of: impl Fn(&T) -> f64) -> Interval {
        Interval::of(&gains(&self.values(new, &of), &self.values(base, &of)))
    }

    /// By which share it is more.
    pub fn more(&self, new: usize, base: usize, of: impl Fn(&T) -> f64) -> Interval {
        let Interval { mean, low, high, n } = self.less(new, base, of);
        Interval { mean: -mean, low: -high, high: -low, n }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn every_subject_has_its_turn_in_each_round_and_the_first_round_may_warm_up() {
        let (mut random, mut turns) = (Random::new(1), Vec::new());
        let paired = Rounds::warmed_up(20)
            .measure(3, &mut random, &Stop::new(), |round, subject| {
                turns.push(subject);
                Ok(f64::from(round) * [1.0, 2.0, 3.0][subject])
            })
            .unwrap();
        assert_eq!((turns.len(), paired.rounds.len()), (63, 20));
        assert!(turns.chunks(3).all(|round| (0..3).all(|subject| round.contains(&subject))));
        assert!(turns.chunks(3).any(|round| round[0] != turns[0]), "the order is random");
        assert_eq!(paired.rounds[0], [1.0, 2.0, 3.0]);
        assert_eq!(paired.mean(1, |v| *v), 21.0);
        let ratio = paired.ratio(1, 0, |v| *v);
        assert_eq!((ratio.mean, ratio.low, ratio.high, ratio.n), (2.0, 2.0, 2.0, 20));
        assert_eq!((paired.more(2, 0, |v| *v).mean, paired.less(0, 1, |v| *v).mean), (2.0, 0.5));
        let two = Paired { rounds: vec![vec![1.0, 1.0], vec![1.0, 2.0]] };
        let (more, less) = (two.more(1, 0, |v| *v), two.less(1, 0, |v| *v));
        assert_eq!((less.mean, less.low, less.high), (-more.mean, -more.high, -more.low));
        assert!(less.low < less.mean && less.mean < less.high);
        assert_eq!((Rounds::cold(0).kept, Rounds::warmed_up(0).kept), (1, 2));
    }

    #[test]
    fn it_ends_where_it_is_stopped_or_a_trial_fails() {
        let stop = Stop::new();
        let mut made = 0;
        let ended = Rounds::cold(9).measure(2, &mut Random::new(1), &stop, |_, _| {
            made += 1;
            if made == 3 {
                stop.set();
            }
            Ok(())
        });
        assert!(ended.is_err() && made == 3);
        let failed = Rounds::cold(9).measure(2, &mut Random::new(1), &Stop::new(), |round, _| match round {
            0 => Ok(()),
            _ => bail!("it is gone"),
        });
        assert_eq!(failed.unwrap_err().to_string(), "it is gone");
    }

    #[test]
    fn a_trial_that_does_not_count_is_made_again() {
        let tries = |counts_from: u32| {
            let mut made = 0;
            let all = tried(
                3,
                |trial| *trial >= counts_from,
                || {
                    made += 1;
                    Ok(made)
                },
            );
            all.unwrap()
        };
        assert_eq!((tries(1), tries(2), tries(9)), (vec![1], vec![1, 2], vec![1, 2, 3]));
        assert!(tried(3, |()| false, || bail!("it is gone")).is_err());
    }
}
