//! Counting numbers without keeping them: by powers of two, and the few most frequent ones.

use serde::ser::{SerializeSeq, SerializeStruct};
use serde::{Serialize, Serializer};

/// Numbers by powers of two.
#[derive(Clone, PartialEq, Debug)]
pub struct Histogram {
    /// Of 0, then of [1, 2), [2, 4), …
    buckets: [u64; 65],
    sum: f64,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: [0; 65], sum: 0.0, min: u64::MAX, max: 0 }
    }
}

impl Histogram {
    /// Counts a number.
    pub fn add(&mut self, n: u64) {
        self.buckets[64 - n.leading_zeros() as usize] += 1;
        self.sum += n as f64;
        (self.min, self.max) = (self.min.min(n), self.max.max(n));
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Their mean, if there are any.
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.sum / self.count() as f64)
    }

    /// The least and the greatest, if there are any.
    pub fn range(&self) -> Option<(u64, u64)> {
        (self.count() > 0).then_some((self.min, self.max))
    }

    /// About where `part` (0 to 1) of them are below: within its power of two by proportion.
    pub fn quantile(&self, part: f64) -> Option<u64> {
        if part >= 1.0 {
            return self.range().map(|r| r.1);
        }
        let wanted = part.clamp(0.0, 1.0) * self.count().checked_sub(1)? as f64;
        let mut before = 0u64;
        for (i, n) in self.buckets.iter().enumerate().filter(|(_, n)| **n > 0) {
            if (before + n) as f64 > wanted {
                let (low, high) = bounds(i);
                let inside = (wanted - before as f64 + 0.5) / *n as f64;
                let value = low as f64 + inside * (high as f64 - low as f64);
                return Some((value as u64).clamp(self.min, self.max));
            }
            before += n;
        }
        Some(self.max)
    }

    /// Of each power of two that has any: its least number, and how many.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        self.buckets.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| (bounds(i).0, *n))
    }
}

fn bounds(bucket: usize) -> (u64, u64) {
    match bucket {
        0 => (0, 0),
        64 => (1 << 63, u64::MAX),
        i => (1 << (i - 1), 1 << i),
    }
}

impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("Histogram", 6)?;
        s.serialize_field("count", &self.count())?;
        s.serialize_field("mean", &self.mean())?;
        s.serialize_field("min", &self.range().map(|r| r.0))?;
        s.serialize_field("median", &self.quantile(0.5))?;
        s.serialize_field("max", &self.range().map(|r| r.1))?;
        s.serialize_field("from", &self.buckets().collect::<Vec<_>>())?;
        s.end()
    }
}

/// The most frequent numbers. One that is more than a 16th of all is among them for certain, and its count is at most
/// a 16th of all too low (Misra and Gries, "Finding repeated elements", 1982).
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Common {
    counts: Vec<(i64, u64)>,
    total: u64,
}

impl Common {
    const KEPT: usize = 15;

    /// Counts a number.
    pub fn add(&mut self, n: i64) {
        self.total += 1;
        if let Some((_, count)) = self.counts.iter_mut().find(|(known, _)| *known == n) {
            *count += 1;
        } else if self.counts.len() < Self::KEPT {
            self.counts.push((n, 1));
        } else {
            self.counts.iter_mut().for_each(|(_, count)| *count -= 1);
            self.counts.retain(|(_, count)| *count > 0);
        }
    }

    /// The most frequent first, with the part of all that they are at least (0 to 1); those below `part` are left out.
    pub fn above(&self, part: f64) -> Vec<(i64, f64)> {
        let mut found: Vec<(i64, f64)> = self
            .counts
            .iter()
            .map(|(n, count)| (*n, *count as f64 / self.total as f64))
            .filter(|(_, share)| *share >= part)
            .collect();
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        found
    }
}

impl Serialize for Common {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let common = self.above(0.02);
        let mut seq = serializer.serialize_seq(Some(common.len()))?;
        for entry in common {
            seq.serialize_element(&entry)?;
        }
        seq.end()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantiles_are_near() {
        let mut h = Histogram::default();
        assert_eq!((h.quantile(0.5), h.mean(), h.range()), (None, None, None));
        (0..1000).for_each(|n| h.add(n));
        assert_eq!((h.count(), h.mean(), h.range()), (1000, Some(499.5), Some((0, 999))));
        let median = h.quantile(0.5).unwrap();
        assert!((400..600).contains(&median), "{median}");
        h.add(u64::MAX);
        assert_eq!(h.quantile(1.0), Some(u64::MAX));
    }

    proptest! {
        /// The guarantee of the algorithm, against counting all.
        #[test]
        fn frequent_numbers_are_found(numbers in prop::collection::vec(-9i64..40, 1..400)) {
            let mut common = Common::default();
            numbers.iter().for_each(|n| common.add(*n));
            let found = common.above(0.0);
            for n in -9..40 {
                let share = numbers.iter().filter(|m| **m == n).count() as f64 / numbers.len() as f64;
                let told = found.iter().find(|(m, _)| *m == n).map(|(_, s)| *s);
                prop_assert!(share <= 1.0 / 16.0 || told.is_some());
                if let Some(told) = told {
                    prop_assert!(told <= share + 1e-9 && told >= share - 1.0 / 16.0 - 1e-9);
                }
            }
        }
    }
}
