//! Chance under a seed: numbers, waiting times and permutations that a run can repeat.

/// A number that nobody has had before: true chance, for what must not repeat.
pub fn nonce() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("the system gives no random numbers: {e}"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Stirs 64 bits so that near inputs give far outputs. Its only fixed point of note is 0.
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^ (z >> 32)
}

/// A sequence of random numbers under a seed.
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
}

impl Dice {
    /// The sequence of that seed.
    pub fn new(seed: u64) -> Dice {
        Dice { state: mix(seed ^ 0x6469_6365) }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Evenly between 0 (inclusive) and 1 (exclusive).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Evenly below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// Exponentially distributed with the given mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Puts a slice in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// A permutation of `0 .. n` in constant memory: a four-round Feistel network over the next even power of
/// two, walked until it lands below `n` (less than four steps on average).
#[derive(Clone, Copy, Debug)]
pub struct Shuffle {
    n: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Shuffle {
    /// The permutation of `0 .. n` under a seed; `n` is at least 1 and at most 2^62.
    pub fn new(n: u64, seed: u64) -> Shuffle {
        let n = n.clamp(1, 1 << 62);
        let bits = 64 - (n - 1).leading_zeros();
        let mut dice = Dice::new(seed);
        Shuffle { n, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| dice.bits()) }
    }

    fn round(&self, value: u64, key: u64) -> u64 {
        mix(value ^ key) & ((1 << self.half_bits) - 1)
    }

    /// Where `i` goes; `i` is below `n`.
    pub fn forward(&self, i: u64) -> u64 {
        let mut value = i;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & ((1 << self.half_bits) - 1));
            for key in self.keys {
                (left, right) = (right, left ^ self.round(right, key));
            }
            value = left << self.half_bits | right;
            if value < self.n {
                return value;
            }
        }
    }

    /// What goes to `i`; `i` is below `n`.
    pub fn backward(&self, i: u64) -> u64 {
        let mut value = i;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & ((1 << self.half_bits) - 1));
            for key in self.keys.into_iter().rev() {
                (left, right) = (right ^ self.round(left, key), left);
            }
            value = left << self.half_bits | right;
            if value < self.n {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_shuffle_is_a_permutation(n in 1u64..600, seed in any::<u64>()) {
            let shuffle = Shuffle::new(n, seed);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let j = shuffle.forward(i);
                prop_assert!(!std::mem::replace(&mut seen[j as usize], true));
                prop_assert_eq!(shuffle.backward(j), i);
            }
        }
    }

    #[test]
    fn a_shuffle_scatters() {
        let shuffle = Shuffle::new(4096, 1);
        let neighbours = (1..4096).filter(|&i| shuffle.forward(i).abs_diff(shuffle.forward(i - 1)) <= 8).count();
        assert!(neighbours < 60, "{neighbours} of 4095 neighbours stayed near; by chance 16 do");
    }

    #[test]
    fn waiting_times_have_their_mean() {
        let mut dice = Dice::new(3);
        let mean = (0..100_000).map(|_| dice.exponential(2.0)).sum::<f64>() / 1e5;
        assert!((mean - 2.0).abs() < 0.05, "{mean}");
        let mean = (0..100_000).map(|_| dice.unit()).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let mut order: Vec<u32> = (0..100).collect();
        dice.shuffle(&mut order);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
