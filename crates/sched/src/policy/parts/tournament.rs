//! Finds the lowest yield while all yields change with time: a kinetic tournament.
//!
//! A yield is an amount received divided by the time since it began. As time passes, the order of two contenders
//! changes at most once, at an instant that can be computed. A tree of matches stores each match's winner and the time
//! until which all results below it hold; so the winner is found without visiting the others, and only expired matches
//! are replayed.

use crate::types::Nanos;

/// A contender with the yield `got` ÷ (present − `began`).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::policy) struct Contender {
    pub got: u64,
    pub began: Nanos,
    /// Breaks ties, lowest first; distinct.
    pub order: u64,
    /// The flow it stands for.
    pub flow: u32,
}

impl Contender {
    /// The amount received, limited (to 146 years) so that products with instants and their differences fit.
    fn got(&self) -> i128 {
        i128::from(self.got.min(1 << 62))
    }

    /// Whether it has the lower yield at an instant. Time counts from one before, so that it is never zero.
    fn beats(&self, other: &Contender, now: Nanos) -> bool {
        let elapsed = |began: Nanos| i128::from(now.since(began).0) + 1;
        let (mine, its) = (self.got() * elapsed(other.began), other.got() * elapsed(self.began));
        (mine, self.order) < (its, other.order)
    }

    /// Until when this contender wins its match.
    fn wins_until(&self, loser: &Contender, now: Nanos) -> Nanos {
        // got·(t+1−its began) − its got·(t+1−began) is not above 0 now, and linear in t.
        let slope = self.got() - loser.got();
        if slope <= 0 {
            return Nanos::MAX;
        }
        let at_zero = self.got() * i128::from(loser.began.0) - loser.got() * i128::from(self.began.0);
        let crossing = at_zero.div_euclid(slope) + i128::from(at_zero.rem_euclid(slope) > 0) - 1;
        Nanos(u64::try_from(crossing).unwrap_or(if crossing < 0 { 0 } else { u64::MAX })).max(now + Nanos(1))
    }
}

#[derive(Clone, Copy)]
struct Match {
    winner: u32,
    until: Nanos,
}

const NOBODY: u32 = u32::MAX;
const EMPTY: Match = Match { winner: NOBODY, until: Nanos::MAX };

/// The tournament; its memory is that of the most contenders so far.
#[derive(Default)]
pub(in crate::policy) struct Tournament {
    /// By position; some are free.
    contenders: Vec<Contender>,
    free: Vec<u32>,
    /// Match 1 is the final; below match i are 2i and 2i + 1; the last half is the contenders themselves.
    matches: Vec<Match>,
}

impl Tournament {
    /// Adds a contender (which has no position yet), changes it or removes it; returns its position.
    pub fn set(&mut self, place: Option<u32>, contender: Option<Contender>, now: Nanos) -> Option<u32> {
        let place = match (place, contender) {
            (Some(place), _) => place,
            (None, Some(_)) => self.free.pop().unwrap_or_else(|| self.grow(now)),
            (None, None) => return None,
        };
        let at = place as usize;
        self.contenders[at] = contender.unwrap_or(self.contenders[at]);
        let mut i = self.contenders.len() + at;
        self.matches[i].winner = if contender.is_some() { place } else { NOBODY };
        while i > 1 {
            i /= 2;
            self.play(i, now);
        }
        if contender.is_none() {
            self.free.push(place);
        }
        contender.map(|_| place)
    }

    /// Doubles the size when all positions are taken; returns a new position.
    fn grow(&mut self, now: Nanos) -> u32 {
        let had = self.contenders.len();
        let size = (2 * had).max(1);
        self.contenders.resize(size, Contender::default());
        self.matches = vec![EMPTY; 2 * size];
        (0..had).for_each(|place| self.matches[size + place].winner = place as u32);
        (1..size).rev().for_each(|i| self.play(i, now));
        self.free.extend((had as u32 + 1..size as u32).rev());
        had as u32
    }

    fn play(&mut self, i: usize, now: Nanos) {
        let (a, b) = (self.matches[2 * i], self.matches[2 * i + 1]);
        let who = |m: Match| self.contenders.get(m.winner as usize);
        let (winner, until) = match (who(a), who(b)) {
            (Some(x), Some(y)) if x.beats(y, now) => (a.winner, x.wins_until(y, now)),
            (Some(x), Some(y)) => (b.winner, y.wins_until(x, now)),
            (Some(_), None) => (a.winner, Nanos::MAX),
            _ => (b.winner, Nanos::MAX),
        };
        self.matches[i] = Match { winner, until: until.min(a.until).min(b.until) };
    }

    fn replay(&mut self, i: usize, now: Nanos) {
        if i < self.contenders.len() && self.matches[i].until <= now {
            self.replay(2 * i, now);
            self.replay(2 * i + 1, now);
            self.play(i, now);
        }
    }

    /// The contender with the lowest yield.
    pub fn winner(&mut self, now: Nanos) -> Option<u32> {
        if self.matches.is_empty() {
            return None;
        }
        self.replay(1, now);
        Some(self.contenders.get(self.matches[1].winner as usize)?.flow)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The largest possible figures do not overflow.
    #[test]
    fn extremes() {
        let mut tournament = Tournament::default();
        for (flow, began) in [(0, 0), (1, u64::MAX), (2, 0), (3, u64::MAX)] {
            let (got, order) = (if flow < 2 { u64::MAX } else { 1 }, u64::from(flow));
            tournament.set(None, Some(Contender { got, began: Nanos(began), order, flow }), Nanos::MAX);
        }
        assert_eq!((tournament.winner(Nanos::MAX), tournament.winner(Nanos(1))), (Some(2), Some(2)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn finds_the_same_winner_as_a_full_scan(
            steps in proptest::collection::vec((0u32..20, 0u64..1000, 0u64..200, proptest::bool::ANY), 1..200),
        ) {
            let (mut tournament, mut all, mut places) = (Tournament::default(), [None; 20], [None; 20]);
            let mut now = Nanos(1000);
            for (order, (flow, got, later, gone)) in steps.into_iter().enumerate() {
                now += Nanos(later);
                let began = Nanos(now.0 - got % 700);
                let contender = (!gone).then_some(Contender { got, began, order: order as u64, flow });
                let at = flow as usize;
                places[at] = tournament.set(places[at], contender, now);
                all[at] = contender;
                prop_assert!(tournament.contenders.len() <= 32);
                for at in [now, now + Nanos(later / 2)] {
                    let best = (0..20).filter(|n| all[*n].is_some()).reduce(|a, b| {
                        if all[a].unwrap().beats(&all[b].unwrap(), at) { a } else { b }
                    });
                    prop_assert_eq!(tournament.winner(at), best.map(|b| b as u32));
                    now = at;
                }
            }
        }
    }
}
