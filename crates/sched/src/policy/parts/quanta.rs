//! How quanta grow (agios-2013, III; aioli-2006, part 2): by pass, by application, by a file's history.
//!
//! Nothing is iterated: quanta are linear in the pass. The quantum of a virtual request whose n parts arrived in passes
//! p₁…pₙ is (n·p − Σpᵢ)·TTP(quantum) in pass p, so the pass from which it may be served is known when it is built.

use super::remembered::Remembered;
use super::rules::{self, Rule};
use super::runs::Run;
use crate::cost::CostModel;
use crate::names::Who;
use crate::policy::Params;
use crate::types::Op;

/// Maximum files remembered.
const FILES_MAX: usize = 16 << 10;

/// The lower limit of an adapted quantum, bytes.
const ADAPTED_MIN_BYTES: u64 = 512;

/// How the quanta of one queue grow.
#[derive(Clone, Copy)]
pub(in crate::policy) struct Growth {
    /// Each pass adds the time to process this many bytes.
    quantum_bytes: u64,
    /// The public library's rule instead: the quantum in bytes doubles with each pass.
    double: bool,
}

impl Growth {
    /// The first pass in which the quantum of a virtual request is large enough.
    #[inline]
    pub fn ready_pass(&self, cost: &CostModel, op: Op, run: &Run) -> u64 {
        let quantum_bytes = self.quantum_bytes.max(1);
        if self.double {
            // factor × n × quantum ≥ size, the factor being 2^(visits-1)
            let factor = run.len.div_ceil(quantum_bytes.saturating_mul(run.count)).max(1);
            return run.pass_sum.div_ceil(run.count) + 1 + u64::from(factor.next_power_of_two().trailing_zeros());
        }
        let passes_of_one = cost.ttp(op, run.len).0.div_ceil(cost.ttp(op, quantum_bytes).0.max(1));
        // n·p − Σpᵢ ≥ the passes that a single request of this size needs
        match run.count {
            1 => run.pass_sum + passes_of_one,
            count => (run.pass_sum + passes_of_one).div_ceil(count),
        }
    }
}

/// The quanta of a policy: the configured one, modified by rules and histories.
pub(in crate::policy) struct Quanta {
    growth: Growth,
    weights: Vec<(Rule, f64)>,
    /// Lower and upper limit of the factor, if quanta are adapted.
    adapt: Option<(f64, f64)>,
    factors: Remembered<(u64, Op), f64>,
}

impl Quanta {
    /// From the parameters `quantum_bytes`, `growth`, `weights`, `adapt` and `batch_bytes`.
    pub fn new(params: &Params) -> Result<Quanta, String> {
        let weighed = |rule: Rule| {
            rule.only(&["weight"])?;
            let weight = rule.number("weight", 1.0, 0.01..=100.0)?;
            Ok((rule, weight))
        };
        let weights = rules::parse(params.text("weights"))?.into_iter().map(weighed);
        let quantum_bytes = params.integer("quantum_bytes");
        let of_quantum = |bytes: u64| bytes as f64 / quantum_bytes as f64;
        let limits = (of_quantum(ADAPTED_MIN_BYTES).min(1.0), of_quantum(params.integer("batch_bytes")).max(1.0));
        Ok(Quanta {
            growth: Growth { quantum_bytes, double: params.text("growth") == "double" },
            weights: weights.collect::<Result<_, String>>()?,
            adapt: params.on("adapt").then_some(limits),
            factors: Remembered::new(FILES_MAX),
        })
    }

    /// The weight of an application: the first matching rule applies.
    pub fn weight(&self, who: impl FnOnce() -> Who) -> f64 {
        if self.weights.is_empty() {
            return 1.0;
        }
        let who = who();
        let found = rules::matching(self.weights.iter().map(|(rule, _)| rule), &who);
        found.map_or(1.0, |at| self.weights[at].1)
    }

    /// How quanta grow for a file (by stable key) and a weight.
    #[inline]
    pub fn growth(&self, file: u64, op: Op, weight: f64) -> Growth {
        let factor = self.adapt.and_then(|_| self.factors.get(&(file, op))).copied().unwrap_or(1.0);
        self.scaled(weight * factor)
    }

    /// The slowest possible growth.
    pub fn slowest(&self) -> Growth {
        let weight = self.weights.iter().map(|w| w.1).fold(1.0, f64::min);
        self.scaled(weight * self.adapt.map_or(1.0, |limits| limits.0))
    }

    fn scaled(&self, factor: f64) -> Growth {
        let quantum_bytes = self.growth.quantum_bytes;
        let scaled = if factor == 1.0 { quantum_bytes } else { (quantum_bytes as f64 * factor) as u64 };
        Growth { quantum_bytes: scaled, ..self.growth }
    }

    /// A file used this many bytes in a batch. Its next quantum follows how much of the current one that is: 175 % or
    /// more doubles it, 125 % or more adds half, below 75 % halves it (the public library's steps; facts from its
    /// code).
    pub fn used(&mut self, file: u64, op: Op, batch_bytes: u64) {
        let Some((least, greatest)) = self.adapt else { return };
        let factor = self.factors.of((file, op), || 1.0);
        let step = match batch_bytes as f64 / (self.growth.quantum_bytes as f64 * *factor) {
            used if used >= 1.75 => 2.0,
            used if used >= 1.25 => 1.5,
            used if used >= 0.75 => 1.0,
            _ => 0.5,
        };
        *factor = (*factor * step).clamp(least, greatest);
    }

    /// Takes over another instance's history. Factors are rescaled, so that a file keeps its quantum in bytes.
    pub fn take_over(&mut self, other: Quanta) {
        let ratio = other.growth.quantum_bytes as f64 / self.growth.quantum_bytes as f64;
        self.factors = other.factors;
        let Some((least, greatest)) = self.adapt else { return };
        self.factors.for_each(|factor| *factor = (*factor * ratio).clamp(least, greatest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::LinearCost;
    use crate::policy::POLICIES;
    use crate::types::Nanos;

    fn quanta(given: &[(&str, &str)]) -> Quanta {
        let info = POLICIES.iter().find(|p| p.name == "mlf").unwrap();
        let given = given.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Quanta::new(&Params::new("mlf", info.params, &given).unwrap()).unwrap()
    }

    /// Worked by hand: TTP(x) = 10 ms + 8 µs/KiB, quantum 8 KiB, so a pass adds 10.064 ms.
    #[test]
    fn quanta_by_hand() {
        let linear = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 7812 };
        let cost = CostModel::new(linear, linear);
        let growth = quanta(&[]).growth(0, Op::Read, 1.0);
        let ready = |count, len, pass_sum| growth.ready_pass(&cost, Op::Read, &Run { count, len, pass_sum });
        assert_eq!(ready(1, 8192, 0), 1, "one pass pays for one request of the quantum's size");
        assert_eq!(ready(1, 262_144, 0), 2, "12.05 ms need two passes");
        assert_eq!(ready(2, 16_384, 0), 1, "two parts earn twice as much");
        assert_eq!(ready(2, 16_384, 5 + 6), 7, "2p − 11 ≥ 2, p = 6.5");
        assert_eq!(ready(64, 1 << 20, 0), 1);
    }

    #[test]
    fn doubling_as_in_the_public_library() {
        let growth = quanta(&[("growth", "double")]).growth(0, Op::Read, 1.0);
        let cost = CostModel::default();
        let ready = |count, len, pass_sum| growth.ready_pass(&cost, Op::Read, &Run { count, len, pass_sum });
        assert_eq!(ready(1, 8192, 0), 1, "factor 1 at the first visit");
        assert_eq!(ready(1, 8193, 0), 2, "factor 2 at the second");
        assert_eq!(ready(1, 65_536, 0), 4, "factor 8 at the fourth");
        assert_eq!(ready(8, 65_536, 80), 11);
    }

    #[test]
    fn the_quantum_follows_use() {
        let mut q = quanta(&[("adapt", "on"), ("batch_bytes", "65536")]);
        for (bytes, quantum_bytes) in
            [(65_536, 16), (65_536, 32), (65_536, 64), (65_536, 64), (4_096, 32), (40_960, 48)]
        {
            q.used(3, Op::Read, bytes);
            assert_eq!(q.growth(3, Op::Read, 1.0).quantum_bytes, quantum_bytes << 10);
        }
        (0..9).for_each(|_| q.used(3, Op::Read, 1));
        assert_eq!(q.growth(3, Op::Read, 1.0).quantum_bytes, 512);
        assert_eq!(q.growth(4, Op::Read, 1.0).quantum_bytes, 8192);
    }

    /// The lowest weight combined with the lowest adapted quantum.
    #[test]
    fn the_slowest_growth_is_the_least_weight_of_the_least_quantum() {
        let weights = "a: job=1 {weight=0.01}; b: job=2 {weight=50}";
        let mut q = quanta(&[("quantum_bytes", "65536"), ("adapt", "on"), ("weights", weights)]);
        (0..20).for_each(|_| q.used(3, Op::Read, 1));
        assert_eq!(q.growth(3, Op::Read, 0.01).quantum_bytes, q.slowest().quantum_bytes);
        assert_eq!(q.slowest().quantum_bytes, 5, "512 bytes × 0.01, not 65536 / 100");
    }
}
