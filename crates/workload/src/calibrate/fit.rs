//! Fits a line to the points of one curve, and reports their distance from it.

use impresario_config::calibration::{Fit, Pattern, Point, PointOp};

use crate::stats::median;

/// Rounds of reweighting; the line converges well before.
const ROUNDS: u32 = 100;
/// A point closer to the line than this, relative to its time, gains no more weight.
const NEAR: f64 = 1e-4;

/// The line with the lowest sum of *relative* errors: sizes span a factor of thousands, and a microsecond matters for 4
/// KiB, not for 16 MiB. Absolute values rather than squares, so that one bad point does not bend it. Neither part is
/// negative. `None` for fewer than two sizes.
pub fn fit(op: PointOp, pattern: Pattern, points: &[Point]) -> Option<Fit> {
    let xy: Vec<(f64, f64)> = points.iter().map(|p| (p.size_bytes as f64, p.median_ns as f64)).collect();
    if xy.windows(2).all(|pair| pair[0].0 == pair[1].0) {
        return None;
    }
    let (fixed_ns, ns_per_byte) = line(&xy);
    let mut fit = Fit {
        op,
        pattern,
        fixed_ns: fixed_ns.round() as u64,
        ps_per_byte: (ns_per_byte * 1000.0).round() as u64,
        error_median_percent: 0.0,
        error_max_percent: 0.0,
    };
    let errors: Vec<f64> =
        points.iter().map(|p| 100.0 * (fit.ns(p.size_bytes) / p.median_ns as f64 - 1.0).abs()).collect();
    let rounded = |percent: f64| (percent * 100.0).round() / 100.0;
    fit.error_median_percent = rounded(median(&errors));
    fit.error_max_percent = rounded(errors.iter().copied().fold(0.0, f64::max));
    Some(fit)
}

/// Lowest absolute relative errors, by least squares reweighted with the errors of the previous round.
fn line(xy: &[(f64, f64)]) -> (f64, f64) {
    let mut weights: Vec<f64> = xy.iter().map(|(_, y)| 1.0 / (y * y)).collect();
    let mut best = (0.0, 0.0);
    for _ in 0..ROUNDS {
        best = weighted(xy, &weights);
        for ((x, y), weight) in xy.iter().zip(&mut weights) {
            let error = ((best.0 + best.1 * x) / y - 1.0).abs();
            *weight = 1.0 / (y * y * error.max(NEAR));
        }
    }
    best
}

/// (fixed, per unit) of the weighted least squares with neither part negative.
fn weighted(xy: &[(f64, f64)], weights: &[f64]) -> (f64, f64) {
    let sum = |f: &dyn Fn(f64, f64) -> f64| xy.iter().zip(weights).map(|((x, y), w)| w * f(*x, *y)).sum::<f64>();
    let (n, x, y) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|_, y| y));
    let (xx, xy_) = (sum(&|x, _| x * x), sum(&|x, y| x * y));
    let slope = (n * xy_ - x * y) / (n * xx - x * x);
    let fixed = (y - slope * x) / n;
    match (fixed, slope) {
        (_, slope) if slope < 0.0 => (y / n, 0.0),
        (fixed, _) if fixed < 0.0 => (0.0, xy_ / xx),
        both => both,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_base::Random;

    fn points(times: impl Fn(f64) -> f64) -> Vec<Point> {
        let point = |i: u32| {
            let size_bytes = 4096_u64 << i;
            let median_ns = times(size_bytes as f64) as u64;
            Point {
                op: PointOp::Read,
                pattern: Pattern::Random,
                streams: 1,
                size_bytes,
                median_ns,
                mean_ns: median_ns,
                spread_percent: 1.0,
                samples: 9,
            }
        };
        (0..13).map(point).collect()
    }

    fn fitted(points: &[Point]) -> Fit {
        fit(PointOp::Read, Pattern::Random, points).unwrap()
    }

    #[track_caller]
    fn near(value: u64, wanted: f64, tolerance: f64) {
        assert!((value as f64 / wanted - 1.0).abs() < tolerance, "{value} is not within {tolerance} of {wanted}");
    }

    #[test]
    fn an_exact_line_is_found() {
        let fit = fitted(&points(|x| 12_670_000.0 + x * 7.692));
        near(fit.fixed_ns, 12_670_000.0, 1e-3);
        near(fit.ps_per_byte, 7692.0, 1e-3);
        assert!(fit.error_max_percent < 0.1, "{fit:?}");
    }

    #[test]
    fn a_known_line_is_recovered_from_noisy_points() {
        for seed in 0..20 {
            let random = std::cell::RefCell::new(Random::new(seed));
            let noise = || 1.0 + 0.05 * (2.0 * random.borrow_mut().unit() - 1.0);
            let fit = fitted(&points(|x| (12_670_000.0 + x * 7.692) * noise()));
            near(fit.fixed_ns, 12_670_000.0, 0.05);
            near(fit.ps_per_byte, 7692.0, 0.15);
            assert!(fit.error_max_percent < 15.0 && fit.error_median_percent < 5.0, "{fit:?}");
        }
    }

    #[test]
    fn bad_points_do_not_bend_it_but_show_in_the_error() {
        let mut points = points(|x| 100_000.0 + x * 0.5);
        points[2].median_ns *= 4;
        points[9].median_ns *= 3;
        let fit = fitted(&points);
        near(fit.fixed_ns, 100_000.0, 0.02);
        near(fit.ps_per_byte, 500.0, 0.02);
        assert!((fit.error_max_percent - 75.0).abs() < 1.0 && fit.error_median_percent < 1.0, "{fit:?}");
    }

    #[test]
    fn neither_part_is_negative() {
        let falling = fitted(&points(|x| 1e6 - x / 1e3));
        assert_eq!(falling.ps_per_byte, 0);
        let steep = fitted(&points(|x| (x * 2.0 - 4000.0).max(1.0)));
        assert!(steep.ps_per_byte > 1000);
        let one = points(|_| 5.0)[..1].to_vec();
        assert_eq!(fit(PointOp::Read, Pattern::Random, &one), None);
        assert_eq!(fit(PointOp::Read, Pattern::Random, &[]), None);
    }
}
