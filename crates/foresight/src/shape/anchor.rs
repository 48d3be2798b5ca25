//! A place or a length in files of any size: a share of the size and a number of bytes.

use serde::{Deserialize, Serialize};

/// Shares of the size are fractions with denominators up to here.
const DENOMINATOR_MAX: u32 = 16;
/// Places at a share of the size, other than none or all of it, are at most this many bytes beside it.
const BESIDE_BYTES_MAX: i64 = 64 << 10;

/// `size × num ÷ den + bytes`: with a share of 0 a distance from the beginning, with one of 1 a distance from the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Anchor {
    /// The share's numerator.
    pub num: u32,
    /// The share's denominator; 0 counts as 1.
    pub den: u32,
    /// Bytes to add.
    pub bytes: i64,
}

impl Anchor {
    /// The beginning of a file.
    pub const START: Anchor = Anchor { num: 0, den: 1, bytes: 0 };
    /// The end of a file.
    pub const END: Anchor = Anchor { num: 1, den: 1, bytes: 0 };

    /// Its value in a file of this size; may be negative or beyond the end.
    pub fn at(&self, size_bytes: u64) -> i64 {
        share(self.num, self.den, size_bytes).saturating_add(self.bytes)
    }
}

fn share(num: u32, den: u32, size_bytes: u64) -> i64 {
    let share = u128::from(size_bytes) * u128::from(num) / u128::from(den.max(1));
    i64::try_from(share).unwrap_or(i64::MAX)
}

/// What is known of a value in one file: it lies in `low..=high`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Known {
    pub(super) size_bytes: u64,
    pub(super) low: i64,
    pub(super) high: i64,
}

impl Known {
    /// A value that is known exactly.
    pub(super) fn exactly(size_bytes: u64, value: i64) -> Known {
        Known { size_bytes, low: value, high: value }
    }
}

/// An anchor that agrees with what is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fit {
    pub(super) anchor: Anchor,
    /// No other anchor agrees as well, so it holds for files of other sizes.
    pub(super) is_certain: bool,
}

/// The anchor that agrees with all that is known; `None` when there is none. Of a distance from the beginning and one from
/// the end that both agree, which happens with files of one size, the shorter one.
pub(super) fn fit(known: &[Known]) -> Option<Fit> {
    let ends = [(0, 1), (1, 1)].map(|(num, den)| fit_share(num, den, known));
    let is_only = ends.iter().flatten().count() == 1;
    if let Some(anchor) = ends.into_iter().flatten().min_by_key(|anchor| anchor.bytes.unsigned_abs()) {
        return Some(Fit { anchor, is_certain: is_only || anchor.bytes == 0 });
    }
    let shares = (2..=DENOMINATOR_MAX).flat_map(|den| (1..den).map(move |num| (num, den)));
    let mut fits = shares.filter_map(|(num, den)| fit_share(num, den, known));
    let anchor = fits.find(|anchor| anchor.bytes.abs() <= BESIDE_BYTES_MAX)?;
    Some(Fit { anchor, is_certain: true })
}

/// As [`fit`]; where nothing agrees, a distance from the beginning or from the end that differs by at most `slack_bytes` from
/// file to file: the longest of them if `up`, else the shortest.
pub(super) fn fit_loosely(known: &[Known], slack_bytes: u64, up: bool) -> Option<Fit> {
    if let Some(fit) = fit(known) {
        return Some(fit);
    }
    let loose = |num: u32| {
        let values = || known.iter().map(|k| k.low.saturating_sub(share(num, 1, k.size_bytes)));
        let (least, most) = (values().min()?, values().max()?);
        let spread = most.abs_diff(least);
        let anchor = Anchor { num, den: 1, bytes: if up { most } else { least } };
        (spread <= slack_bytes).then_some((spread, anchor))
    };
    let (_, anchor) = [loose(0), loose(1)].into_iter().flatten().min_by_key(|(spread, _)| *spread)?;
    Some(Fit { anchor, is_certain: true })
}

fn fit_share(num: u32, den: u32, known: &[Known]) -> Option<Anchor> {
    let bounds = |k: &Known| {
        let share = share(num, den, k.size_bytes);
        (k.low.saturating_sub(share), k.high.saturating_sub(share))
    };
    let low = known.iter().map(|k| bounds(k).0).max()?;
    let high = known.iter().map(|k| bounds(k).1).min()?;
    // `clamp` panics when the bounds contradict one another.
    (low <= high).then(|| Anchor { num, den, bytes: 0i64.clamp(low, high) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(of: &[(u64, i64)]) -> Option<(u32, u32, i64, bool)> {
        let known: Vec<_> = of.iter().map(|(size, value)| Known::exactly(*size, *value)).collect();
        fit(&known).map(|f| (f.anchor.num, f.anchor.den, f.anchor.bytes, f.is_certain))
    }

    #[test]
    fn places_are_fixed_to_the_beginning_the_end_or_a_share() {
        assert_eq!(values(&[(1000, 64), (5000, 64)]), Some((0, 1, 64, true)));
        assert_eq!(values(&[(1000, 992), (5000, 4992)]), Some((1, 1, -8, true)));
        assert_eq!(values(&[(1000, 516), (5000, 2516)]), Some((1, 2, 16, true)));
        assert_eq!(values(&[(1000, 516), (5000, 3333)]), None);
        // One size shows one of the ends only where nothing is added to it.
        assert_eq!(values(&[(1000, 64), (1000, 64)]), Some((0, 1, 64, false)));
        assert_eq!(values(&[(1000, 990)]), Some((1, 1, -10, false)));
        assert_eq!((values(&[(1000, 0)]), values(&[(1000, 1000)])), (Some((0, 1, 0, true)), Some((1, 1, 0, true))));
        assert_eq!(values(&[]), None);
    }

    #[test]
    fn bounds_leave_room_for_the_plainest_value() {
        let known = |size_bytes, low, high| Known { size_bytes, low, high };
        let fit = fit(&[known(1000, 950, 1050), known(5000, 4990, 5090)]).unwrap();
        assert_eq!(fit, Fit { anchor: Anchor::END, is_certain: true });
    }

    #[test]
    fn a_footer_of_varying_length_is_taken_at_its_longest() {
        let known = [(10_000, 9_000), (50_000, 48_700)].map(|(size, value)| Known::exactly(size, value));
        let from = fit_loosely(&known, 4096, false).unwrap().anchor;
        assert_eq!((from.at(10_000), from.at(50_000)), (8_700, 48_700));
        assert!(fit_loosely(&known, 100, false).is_none());
    }

    #[test]
    fn nothing_overflows() {
        let anchor = Anchor { num: u32::MAX, den: 0, bytes: i64::MAX };
        assert_eq!(anchor.at(u64::MAX), i64::MAX);
        let known = [Known { size_bytes: u64::MAX, low: i64::MIN, high: i64::MAX }];
        assert!(fit(&known).is_some());
    }
}
