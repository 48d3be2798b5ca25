//! What a request costs the device: the *time to process* function TTP(size) of agios-2013, III.
//!
//! Before calibration TTP is a linear fit from the configuration: a fixed part (seek, rotation, command overhead) plus
//! a part per byte (the media rate). A calibrated device has a curve through measured points. Both can be corrected in
//! use, see [`Corrector`](crate::Corrector).

use std::borrow::Cow;
use std::sync::Arc;

use crate::types::{Nanos, Op};

/// TTP(size) = `fixed` + size × `ps_per_byte`, for one operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct LinearCost {
    /// Cost of a request of no bytes.
    pub fixed: Nanos,
    /// Cost of each byte, picoseconds.
    pub ps_per_byte: u64,
}

impl LinearCost {
    /// Time to process `len` bytes; never zero, so that quanta always grow.
    pub fn ttp(&self, len_bytes: u64) -> Nanos {
        Nanos(self.fixed.0.saturating_add(transfer_ns(len_bytes, self.ps_per_byte)).max(1))
    }
}

fn transfer_ns(len_bytes: u64, ps_per_byte: u64) -> u64 {
    match len_bytes.checked_mul(ps_per_byte) {
        Some(ps) => ps / 1000,
        None => (u128::from(len_bytes) * u128::from(ps_per_byte) / 1000).min(u128::from(u64::MAX)) as u64,
    }
}

/// TTP(size) through measured points, for one operation: linear between points, extended beyond the last by the slope
/// of the last two. It never decreases with size and is never zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostCurve {
    /// Ordered by size, starting at size 0; at least three.
    knots: Arc<[Knot]>,
}

/// One segment: a line that applies from this size on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Knot {
    size_bytes: u64,
    ns: u64,
    ps_per_byte: u64,
}

/// Why points do not make a curve.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CurveError {
    /// One point has no slope; the upper limit bounds memory.
    #[error("there are {0} points; a curve needs 2 to {max}", max = CostCurve::POINTS_MAX)]
    Count(usize),
    /// Sizes are not in order.
    #[error("the size {0} is not larger than the one before it")]
    Order(u64),
    /// A time is zero.
    #[error("the time of size {0} is zero")]
    Zero(u64),
}

impl CostCurve {
    /// Maximum points of a curve.
    pub const POINTS_MAX: usize = 256;

    /// The curve through (size in bytes, time) points ordered by size. A time below the previous one is noise and
    /// counts as equal to it.
    pub fn through(points: &[(u64, Nanos)]) -> Result<CostCurve, CurveError> {
        let [(first_size, first), (second_size, second), ..] = *points else {
            return Err(CurveError::Count(points.len()));
        };
        if points.len() > Self::POINTS_MAX {
            return Err(CurveError::Count(points.len()));
        }
        let unordered =
            std::iter::once(0).chain(points.iter().map(|p| p.0)).zip(points).find(|(before, p)| p.0 <= *before);
        if let Some((_, (size, _))) = unordered {
            return Err(CurveError::Order(*size));
        }
        if let Some((size, _)) = points.iter().find(|(_, time)| time.0 == 0) {
            return Err(CurveError::Zero(*size));
        }
        // Below the first point its line continues, but noise must not take it to zero.
        let slope = second.since(first).0 as f64 / (second_size - first_size) as f64;
        let at_zero = (first.0 as f64 - slope * first_size as f64).max(first.0 as f64 / 2.0).max(1.0) as u64;
        let mut knots = vec![Knot { size_bytes: 0, ns: at_zero, ps_per_byte: 0 }];
        for (size_bytes, time) in points {
            let ns = knots.last().map_or(1, |k| k.ns).max(time.0);
            knots.push(Knot { size_bytes: *size_bytes, ns, ps_per_byte: 0 });
        }
        for i in 1..knots.len() {
            knots[i - 1].ps_per_byte = slope_ps(&knots[i - 1], &knots[i]);
        }
        // Noise may flatten the end, which would make the largest requests free: use the overall slope instead.
        let n = knots.len();
        knots[n - 1].ps_per_byte = match knots[n - 2].ps_per_byte {
            0 => slope_ps(&knots[0], &knots[n - 1]),
            slope => slope,
        };
        Ok(CostCurve { knots: knots.into() })
    }

    /// Time to process `len` bytes; never zero.
    pub fn ttp(&self, len_bytes: u64) -> Nanos {
        let from = self.knots.partition_point(|k| k.size_bytes <= len_bytes) - 1;
        let knot = &self.knots[from];
        Nanos(knot.ns.saturating_add(transfer_ns(len_bytes - knot.size_bytes, knot.ps_per_byte)))
    }

    /// The sizes of the points, bytes.
    pub fn sizes(&self) -> impl Iterator<Item = u64> {
        self.knots.iter().skip(1).map(|k| k.size_bytes)
    }
}

fn slope_ps(a: &Knot, b: &Knot) -> u64 {
    let (ns, bytes) = (b.ns - a.ns, b.size_bytes - a.size_bytes);
    (u128::from(ns) * 1000 / u128::from(bytes)).min(u128::from(u64::MAX)) as u64
}

/// TTP for one operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OpCost {
    /// A line.
    Linear(LinearCost),
    /// Measured points.
    Curve(CostCurve),
}

impl OpCost {
    /// Time to process `len` bytes; never zero.
    pub fn ttp(&self, len_bytes: u64) -> Nanos {
        match self {
            OpCost::Linear(line) => line.ttp(len_bytes),
            OpCost::Curve(curve) => curve.ttp(len_bytes),
        }
    }
}

impl From<LinearCost> for OpCost {
    fn from(line: LinearCost) -> OpCost {
        OpCost::Linear(line)
    }
}

impl From<CostCurve> for OpCost {
    fn from(curve: CostCurve) -> OpCost {
        OpCost::Curve(curve)
    }
}

/// TTP for reads and writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Reads.
    pub read: OpCost,
    /// Writes and all other operations.
    pub write: OpCost,
    /// Where the model comes from, for people.
    pub source: Cow<'static, str>,
    /// The core corrects this model by observed service times (default false).
    pub correct: bool,
}

impl CostModel {
    /// A model without correction.
    pub fn new(read: impl Into<OpCost>, write: impl Into<OpCost>) -> CostModel {
        CostModel { read: read.into(), write: write.into(), source: "configured".into(), correct: false }
    }

    /// The same, with the source `source`.
    pub fn from_source(self, source: impl Into<Cow<'static, str>>) -> CostModel {
        CostModel { source: source.into(), ..self }
    }

    /// The same, with correction on or off.
    pub fn corrected(self, correct: bool) -> CostModel {
        CostModel { correct, ..self }
    }

    /// The cost of one operation.
    pub fn of(&self, op: Op) -> &OpCost {
        if op == Op::Read { &self.read } else { &self.write }
    }

    /// Time to process `len_bytes` by `op`.
    pub fn ttp(&self, op: Op, len_bytes: u64) -> Nanos {
        self.of(op).ttp(len_bytes)
    }
}

impl Default for CostModel {
    /// A 7200 rpm disk: 8.5 ms average seek and half a turn (4.17 ms), then 130 MB/s.
    fn default() -> Self {
        let disk = LinearCost { fixed: Nanos(12_670_000), ps_per_byte: 7_692 };
        CostModel::new(disk, disk).from_source("assumed 7200 rpm disk")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttp_is_linear_and_never_zero() {
        let disk = CostModel::default();
        assert_eq!(disk.ttp(Op::Read, 0), Nanos(12_670_000));
        assert_eq!(disk.ttp(Op::Write, 1_000_000), Nanos(12_670_000 + 7_692_000));
        assert_eq!(LinearCost { fixed: Nanos::ZERO, ps_per_byte: 0 }.ttp(4096), Nanos(1));
        assert!(disk.ttp(Op::Sync, u64::MAX) > disk.ttp(Op::Sync, 1 << 40));
    }

    fn curve(points: &[(u64, u64)]) -> CostCurve {
        CostCurve::through(&points.iter().map(|p| (p.0, Nanos(p.1))).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_curve_goes_through_its_points_and_straight_between_them() {
        let c = curve(&[(4096, 10_000), (8192, 12_000), (16384, 20_000)]);
        let told: Vec<u64> = [4096, 6144, 8192, 12288, 16384].map(|len| c.ttp(len).0).to_vec();
        // Slopes are whole picoseconds a byte: a few nanoseconds may be lost between points.
        for (told, exact) in told.iter().zip([10_000, 11_000, 12_000, 16_000, 20_000]) {
            assert!(exact - told <= 4, "{told} {exact}");
        }
        // Before the first point its line continues; after the last, the last slope, 976 ps a byte.
        assert_eq!(c.ttp(0), Nanos(8_000));
        assert_eq!(c.ttp(16384 + 8_000_000), Nanos(20_000 + 976 * 8_000));
        assert!(c.ttp(u64::MAX) > c.ttp(1 << 60));
        assert_eq!(c.sizes().collect::<Vec<_>>(), [4096, 8192, 16384]);
    }

    #[test]
    fn noise_never_makes_a_curve_decrease_or_reach_zero() {
        let c = curve(&[(4096, 10_000), (8192, 9_000), (16384, 30_000), (32768, 29_000)]);
        let mut last = Nanos::ZERO;
        for len in (0..100_000).step_by(64) {
            assert!(c.ttp(len) >= last && c.ttp(len).0 > 0, "{len}");
            last = c.ttp(len);
        }
        assert!(c.ttp(1 << 30) > c.ttp(1 << 29), "a flat end does not make bytes free");
        // Proportional to the size: the line would reach zero.
        assert_eq!(curve(&[(4096, 4), (8192, 8)]).ttp(0), Nanos(2));
        assert_eq!(curve(&[(1, 1), (2, 1)]).ttp(0), Nanos(1));
    }

    #[test]
    fn unusable_points_are_refused() {
        let through = |points: &[(u64, u64)]| {
            CostCurve::through(&points.iter().map(|p| (p.0, Nanos(p.1))).collect::<Vec<_>>()).unwrap_err()
        };
        assert_eq!(through(&[]), CurveError::Count(0));
        assert_eq!(through(&[(4096, 1)]), CurveError::Count(1));
        assert_eq!(through(&vec![(1, 1); 257]), CurveError::Count(257));
        assert_eq!(through(&[(4096, 1), (4096, 2)]), CurveError::Order(4096));
        assert_eq!(through(&[(0, 1), (4096, 2)]), CurveError::Order(0));
        assert_eq!(through(&[(1, 1), (4096, 0)]), CurveError::Zero(4096));
        assert_eq!(through(&[(1, 1)]).to_string(), "there are 1 points; a curve needs 2 to 256");
    }

    /// `cargo test --release -p impresario-sched -- --ignored ttp_costs --nocapture` prints it.
    #[test]
    #[ignore = "a measurement"]
    fn ttp_costs_a_few_nanoseconds() {
        let points: Vec<(u64, u64)> = (0..13).map(|i| (4096 << i, 13_000_000 + (4096 << i) * 8)).collect();
        let curved = CostModel::new(curve(&points), curve(&points));
        for (name, model) in [("linear", CostModel::default()), ("curve of 13 points", curved)] {
            let start = std::time::Instant::now();
            let mut sum = 0;
            for i in 0..20_000_000_u64 {
                sum += model.ttp(Op::Read, std::hint::black_box((i.wrapping_mul(0x9e37_79b9) & 0xff_ffff) + 1)).0 & 1;
            }
            std::hint::black_box(sum);
            println!("{name}: {:.1} ns", start.elapsed().as_secs_f64() * 1e9 / 2e7);
        }
    }
}
