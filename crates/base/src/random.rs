//! The seeded generator: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
//! 2014). Its sequence is part of the contract: simulations and run plans replay from their seed on every machine.

/// A sequence of pseudo-random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        finish(self.0)
    }

    /// Uniform below `n`; 0 if `n` is 0.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform between 0 (exclusive) and 1 (inclusive).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Exponentially distributed with the given mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -self.unit().ln() * mean
    }

    /// Shuffles a slice (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
const fn finish(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A bijection of 64-bit numbers that separates neighbours: the first number of the sequence of seed `n`.
#[inline]
pub const fn mix(n: u64) -> u64 {
    finish(n.wrapping_add(STEP))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published reference values for seed 1234567.
    #[test]
    fn the_sequence_is_splitmix64() {
        let mut random = Random::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| random.next_u64());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        assert_eq!(mix(1_234_567), first[0]);
    }

    #[test]
    fn distributions_have_their_means_and_bounds() {
        let mut random = Random::new(3);
        let mean = (0..100_000).map(|_| random.exponential(2.0)).sum::<f64>() / 1e5;
        assert!((mean - 2.0).abs() < 0.05, "{mean}");
        let units: Vec<f64> = (0..100_000).map(|_| random.unit()).collect();
        assert!(units.iter().all(|u| (f64::MIN_POSITIVE..=1.0).contains(u)));
        assert!((units.iter().sum::<f64>() / 1e5 - 0.5).abs() < 0.01);
        let mut seen = [0; 7];
        (0..7_000).for_each(|_| seen[random.below(7) as usize] += 1);
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn a_shuffled_slice_holds_the_same_items() {
        let mut order: Vec<u32> = (0..100).collect();
        Random::new(3).shuffle(&mut order);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
