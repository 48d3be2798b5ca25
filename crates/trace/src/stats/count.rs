//! Counts numbers without storing them: by powers of two, and the few most frequent ones.

use impresario_base::histogram;
use serde::ser::{SerializeSeq, SerializeStruct};
use serde::{Serialize, Serializer};

/// Numbers by powers of two.
pub type Histogram = histogram::Histogram<0>;

/// As JSON: count, mean, range, approximate median, and the count of each power of two.
pub(super) fn serialize<S: Serializer>(h: &Histogram, serializer: S) -> Result<S::Ok, S::Error> {
    let known = |value: f64| (h.count() > 0).then_some(value);
    let mut s = serializer.serialize_struct("Histogram", 6)?;
    s.serialize_field("count", &h.count())?;
    s.serialize_field("mean", &known(h.mean()))?;
    s.serialize_field("min", &h.range().map(|r| r.0))?;
    s.serialize_field("median", &h.range().map(|_| h.quantile(0.5)))?;
    s.serialize_field("max", &h.range().map(|r| r.1))?;
    s.serialize_field("from", &h.steps().collect::<Vec<_>>())?;
    s.end()
}

/// The most frequent numbers. A number that is more than a 16th of all is certainly included, and its count is too low
/// by at most a 16th of all (Misra and Gries, "Finding repeated elements", 1982).
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

    /// The most frequent numbers, most frequent first, with their minimum share (0 to 1); shares below `part` are left
    /// out.
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

    proptest! {
        /// The guarantee of the algorithm, compared with full counts.
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
