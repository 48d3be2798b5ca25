//! Unique random numbers, and seeded permutations.

use impresario_base::random::{Random, mix};

/// A permutation of `0 .. n` in constant memory: a four-round Feistel network over the next even power of two, repeated
/// until it is below `n` (less than four steps on average).
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
        let mut random = Random::new(seed);
        Shuffle { n, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| random.next_u64()) }
    }

    fn round(&self, value: u64, key: u64) -> u64 {
        mix(value ^ key) & ((1 << self.half_bits) - 1)
    }

    /// The image of `i`; `i` is below `n`.
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

    /// The preimage of `i`; `i` is below `n`.
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
}
