//! Means, medians, Student's interval of a mean, and Jain's fairness index.

use serde::{Deserialize, Serialize};

/// Arithmetic mean; 0 if empty.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Sample variance (divided by n − 1); 0 for fewer than two values.
pub fn variance(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let m = mean(values);
    values.iter().map(|v| (v - m) * (v - m)).sum::<f64>() / (values.len() - 1) as f64
}

/// The middle value, or the mean of the two middle ones; 0 if empty.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Jain's fairness index of the given shares: 1 if all are equal or there is nothing to compare, 1/n if one of n has
/// everything (R. Jain, D. Chiu and W. Hawe, DEC TR-301, 1984).
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|s| s * s).sum();
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

/// A mean and its two-sided confidence interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// Lower end; minus infinity (`null` in JSON) with fewer than two values.
    #[serde(with = "maybe_infinite::low")]
    pub low: f64,
    /// Upper end; infinity (`null` in JSON) with fewer than two values.
    #[serde(with = "maybe_infinite::high")]
    pub high: f64,
    /// Number of values.
    pub n: usize,
}

impl Interval {
    /// Student's 95 % interval of the mean of independent values: for paired gains, one value per pair.
    pub fn of(values: &[f64]) -> Interval {
        Interval::with_confidence(values, 0.95)
    }

    /// The same with another confidence level, between 0 and 1 exclusive.
    pub fn with_confidence(values: &[f64], confidence: f64) -> Interval {
        let (n, m) = (values.len(), mean(values));
        if n < 2 {
            return Interval { mean: m, low: f64::NEG_INFINITY, high: f64::INFINITY, n };
        }
        let half = t_quantile(0.5 + confidence / 2.0, (n - 1) as f64) * (variance(values) / n as f64).sqrt();
        Interval { mean: m, low: m - half, high: m + half, n }
    }
}

/// JSON has no infinity: an open end is `null`.
mod maybe_infinite {
    macro_rules! end {
        ($name:ident, $open:expr) => {
            pub mod $name {
                use serde::{Deserialize, Deserializer, Serialize, Serializer};
                pub fn serialize<S: Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
                    value.is_finite().then_some(*value).serialize(s)
                }
                pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
                    Ok(Option::<f64>::deserialize(d)?.unwrap_or($open))
                }
            }
        };
    }
    end!(low, f64::NEG_INFINITY);
    end!(high, f64::INFINITY);
}

/// The value below which Student's t with `df` degrees of freedom lies with probability `p`, 0 < p < 1.
pub fn t_quantile(p: f64, df: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1e4);
    let tail = p.max(1.0 - p);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if t_cdf(middle, df) < tail {
            low = middle;
        } else {
            high = middle;
        }
    }
    if p < 0.5 { -high } else { high }
}

/// P(T ≤ t) for t ≥ 0.
fn t_cdf(t: f64, df: f64) -> f64 {
    1.0 - 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
}

/// The regularised incomplete beta function I_x(a, b), by its continued fraction (modified Lentz).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    // The fraction converges quickly below the mean; use the symmetry above it.
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = (a * x.ln() + b * (1.0 - x).ln() - ln_beta(a, b)).exp() / a;
    let guard = |v: f64| if v.abs() < 1e-300 { 1e-300 } else { v };
    let mut c = 1.0;
    let mut d = 1.0 / guard(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = d;
    for i in 1..500 {
        let m = f64::from(i);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut step = 1.0;
        for term in [even, odd] {
            d = 1.0 / guard(1.0 + term * d);
            c = guard(1.0 + term / c);
            step = c * d;
            fraction *= step;
        }
        if (step - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * fraction
}

fn ln_beta(a: f64, b: f64) -> f64 {
    ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b)
}

/// ln Γ(x) for x > 0: Stirling's series after raising the argument above 10.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 0.0);
    while x < 10.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = (1.0 / 12.0
        - inverse * (1.0 / 360.0 - inverse * (1.0 / 1260.0 - inverse * (1.0 / 1680.0 - inverse / 1188.0))))
        / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the printed tables of Student's t.
    #[test]
    fn t_quantiles_are_those_of_the_tables() {
        for (p, df, want) in [
            (0.975, 1.0, 12.7062),
            (0.975, 2.0, 4.3027),
            (0.975, 4.0, 2.7764),
            (0.975, 9.0, 2.2622),
            (0.975, 30.0, 2.0423),
            (0.975, 1e6, 1.95997),
            (0.95, 10.0, 1.8125),
            (0.995, 5.0, 4.0321),
            (0.025, 9.0, -2.2622),
        ] {
            assert!((t_quantile(p, df) - want).abs() < 1e-4, "{p} {df}: {}", t_quantile(p, df));
        }
    }

    #[test]
    fn gamma_of_known_arguments() {
        for (x, want) in [(1.0, 1.0), (5.0, 24.0), (0.5, std::f64::consts::PI.sqrt())] {
            assert!((ln_gamma(x).exp() / want - 1.0f64).abs() < 1e-10, "{x}");
        }
    }

    #[test]
    fn interval_of_a_worked_example() {
        // mean 3, s = sqrt(2.5), half width 2.7764 · sqrt(2.5 / 5)
        let i = Interval::of(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!((i.mean, i.n), (3.0, 5));
        assert!((i.low - 1.03676).abs() < 1e-4 && (i.high - 4.96324).abs() < 1e-4, "{i:?}");
        assert_eq!(Interval::of(&[1.0]).low, f64::NEG_INFINITY);
        let text = serde_json::to_string(&Interval::of(&[1.0])).unwrap();
        assert!(text.contains(r#""low":null"#));
        assert_eq!(serde_json::from_str::<Interval>(&text).unwrap(), Interval::of(&[1.0]));
    }

    #[test]
    fn fairness_mean_median_variance() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(jain(&[3.0, 0.0, 0.0]), 1.0 / 3.0);
        assert_eq!(jain(&[]), 1.0);
        assert_eq!((mean(&[1.0, 3.0]), variance(&[1.0, 3.0])), (2.0, 2.0));
        assert_eq!((median(&[5.0, 1.0, 3.0]), median(&[4.0, 1.0])), (3.0, 2.5));
        assert_eq!((mean(&[]), median(&[]), variance(&[1.0])), (0.0, 0.0, 0.0));
    }
}
