//! The geometry of a rotating disk, and how long the arm and the platter take to reach an address.
//!
//! This file is based on the *path*: the head's way over the whole disk, in nanoseconds. A track takes one turn of the
//! path, followed by the skew to the next track. Two points of the path that differ by a whole number of turns are
//! under the head at the same angle, so the wait for a byte is a subtraction and a remainder, and a transfer over many
//! tracks is a subtraction. Everything is in integers: a request that continues another exactly in time loses nothing
//! to rounding.

use crate::params::DeviceParams;

/// Seek time by distance: a + b·√x up to the knee, then c + e·x, where x is a fraction of the full stroke.
#[derive(Clone, Debug)]
pub(crate) struct SeekCurve {
    a_ns: f64,
    b_ns: f64,
    c_ns: f64,
    e_ns: f64,
    knee: f64,
    /// 1 / (cylinders - 1).
    stroke: f64,
}

impl SeekCurve {
    /// The curve with the configured times for one cylinder, for the full stroke and on average over random pairs,
    /// whose distance x has the density 2(1 - x); continuous at the knee. Four equations, linear in a, b, c and e.
    fn new(params: &DeviceParams) -> SeekCurve {
        let terms = Terms::new(params);
        let (track, full, k) = (params.seek_track_ms, params.seek_full_ms, params.seek_knee);
        let e = (terms.most_ms - params.seek_average_ms) / terms.e_weight;
        let b = (full - track - e * (1.0 - k)) / terms.rise;
        let ns = |ms: f64| ms * 1e6;
        SeekCurve {
            a_ns: ns(track - b * terms.first.sqrt()),
            b_ns: ns(b),
            c_ns: ns(full - e),
            e_ns: ns(e),
            knee: k,
            stroke: terms.first,
        }
    }

    /// The means that such a curve can have with positive b and e, ms.
    pub(crate) fn average_range_ms(params: &DeviceParams) -> (f64, f64) {
        let terms = Terms::new(params);
        let steepest = (params.seek_full_ms - params.seek_track_ms) / (1.0 - params.seek_knee);
        (terms.most_ms - steepest * terms.e_weight, terms.most_ms)
    }

    fn ns(&self, cylinders: u64) -> u64 {
        if cylinders == 0 {
            return 0;
        }
        let x = cylinders as f64 * self.stroke;
        let ns = if x <= self.knee { self.a_ns + self.b_ns * x.sqrt() } else { self.c_ns + self.e_ns * x };
        ns as u64
    }
}

/// Common terms of the equations.
struct Terms {
    /// Distance of one cylinder, as a fraction of the stroke.
    first: f64,
    /// √knee - √first.
    rise: f64,
    /// The mean for e = 0.
    most_ms: f64,
    /// How much the mean falls per unit of e.
    e_weight: f64,
}

impl Terms {
    fn new(params: &DeviceParams) -> Terms {
        let (track, full, k) = (params.seek_track_ms, params.seek_full_ms, params.seek_knee);
        let first = 1.0 / (params.cylinders() - 1) as f64;
        let rise = k.sqrt() - first.sqrt();
        // Integrals of 1, √x below the knee and of 1, x above it, each times the density.
        let (below_1, below_root) = (2.0 * k - k * k, 4.0 / 3.0 * k.powf(1.5) - 0.8 * k.powf(2.5));
        let (above_1, above_x) = ((1.0 - k).powi(2), 1.0 / 3.0 - k * k + 2.0 / 3.0 * k.powi(3));
        let g = (below_root - first.sqrt() * below_1) / rise;
        Terms {
            first,
            rise,
            most_ms: track * below_1 + g * (full - track) + full * above_1,
            e_weight: g * (1.0 - k) + above_1 - above_x,
        }
    }
}

/// The disk's geometry in whole nanoseconds and bytes.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    pub(crate) capacity_bytes: u64,
    pub(crate) turn_ns: u64,
    skew_ns: u64,
    pub(crate) track_bytes: u64,
    heads: u64,
    curve: SeekCurve,
}

impl Geometry {
    pub(crate) fn new(params: &DeviceParams) -> Geometry {
        Geometry {
            capacity_bytes: params.capacity_bytes,
            turn_ns: 60_000_000_000 / u64::from(params.rpm),
            skew_ns: (params.track_skew_ms * 1e6) as u64,
            track_bytes: params.track_bytes,
            heads: u64::from(params.heads),
            curve: SeekCurve::new(params),
        }
    }

    /// The point of the path at which the byte at `address` starts to pass.
    pub(crate) fn path_to(&self, address: u64) -> u64 {
        let (track, offset) = (address / self.track_bytes, address % self.track_bytes);
        track * (self.turn_ns + self.skew_ns) + offset * self.turn_ns / self.track_bytes
    }

    /// The point of the path at which the byte before `address` has passed: at a track's end, before the skew.
    pub(crate) fn path_past(&self, address: u64) -> u64 {
        if address.is_multiple_of(self.track_bytes) && address > 0 {
            return self.path_to(address) - self.skew_ns;
        }
        self.path_to(address)
    }

    /// The first byte that has not completely passed at a point of the path.
    pub(crate) fn address_at(&self, path: u64) -> u64 {
        let (track, rest) = (path / (self.turn_ns + self.skew_ns), path % (self.turn_ns + self.skew_ns));
        let offset = (rest.min(self.turn_ns) * self.track_bytes / self.turn_ns).min(self.track_bytes);
        track * self.track_bytes + offset
    }

    /// Time from `now_ns` until a point of the path is under the head. The angle depends only on time.
    pub(crate) fn rotation_ns(&self, now_ns: u64, path: u64) -> u64 {
        let (now, wanted) = (now_ns % self.turn_ns, path % self.turn_ns);
        if wanted >= now { wanted - now } else { wanted + self.turn_ns - now }
    }

    /// Time to move the head between the tracks of two addresses: nothing on the same track, a head switch within the
    /// cylinder, otherwise a seek.
    pub(crate) fn seek_ns(&self, from: u64, to: u64) -> u64 {
        let (from, to) = (from / self.track_bytes, to / self.track_bytes);
        if from == to {
            return 0;
        }
        match (from / self.heads).abs_diff(to / self.heads) {
            0 => self.skew_ns,
            cylinders => self.curve.ns(cylinders),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry::new(&DeviceParams::default())
    }

    #[test]
    fn the_seek_curve_has_the_times_of_the_data_sheet() {
        let (params, curve) = (DeviceParams::default(), geometry().curve);
        let ms = |cylinders: u64| curve.ns(cylinders) as f64 / 1e6;
        let last = params.cylinders() - 1;
        assert_eq!(curve.ns(0), 0);
        assert!((ms(1) - 0.8).abs() < 1e-5, "{}", ms(1));
        assert!((ms(last) - 18.0).abs() < 1e-5, "{}", ms(last));
        // The mean over random pairs, summed over all distances.
        let n = (last + 1) as f64;
        let mean: f64 = (1..=last).map(|d| ms(d) * 2.0 * (n - d as f64) / (n * n)).sum();
        assert!((mean - 8.5).abs() < 0.01, "{mean}");
        // Non-decreasing, and continuous at the knee.
        let knee = (params.seek_knee * last as f64) as u64;
        assert!((ms(knee + 1) - ms(knee)).abs() < 1e-3);
        assert!((1..=last).step_by(97).all(|d| curve.ns(d) <= curve.ns(d + 1)));
    }

    #[test]
    fn the_path_is_a_turn_and_a_skew_for_each_track() {
        let g = geometry();
        assert_eq!((g.turn_ns, g.skew_ns), (8_333_333, 1_000_000));
        assert_eq!(g.path_to(0), 0);
        assert_eq!(g.path_to(606_208), 4_166_666, "half a track, half a turn");
        assert_eq!(g.path_to(1_212_416), 9_333_333, "the second track, behind the skew");
        assert_eq!(g.path_past(1_212_416), 8_333_333, "the end of the first, before it");
        assert_eq!(g.address_at(8_900_000), 1_212_416, "in the skew");
        for address in [1, 4096, 1_212_415, 1_212_417, 999_999_999_999] {
            let back = g.address_at(g.path_to(address));
            assert!(back == address || back + 1 == address, "{address} {back}");
        }
    }

    #[test]
    fn the_wait_for_a_sector_is_less_than_a_turn() {
        let g = geometry();
        assert_eq!(g.rotation_ns(0, g.path_to(606_208)), 4_166_666);
        assert_eq!(g.rotation_ns(4_166_667, g.path_to(606_208)), 8_333_332, "just missed");
        // The second track starts 1 ms later than the first.
        assert_eq!(g.rotation_ns(8_333_333 * 5, g.path_to(1_212_416)), 1_000_000);
    }

    #[test]
    fn seeks_count_cylinders() {
        let g = geometry();
        assert_eq!(g.seek_ns(0, 1_000_000), 0);
        assert_eq!(g.seek_ns(0, 1_212_416), 1_000_000, "another head of the cylinder");
        assert_eq!(g.seek_ns(0, 4 * 1_212_416) / 1000, 800, "the next cylinder");
        assert_eq!(g.seek_ns(0, 1 << 36), g.seek_ns(1 << 36, 0));
    }
}
