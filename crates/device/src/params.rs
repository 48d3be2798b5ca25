//! The parameters of a device: every key of a `[device.<name>]` section with its unit, range, default and source.

use serde::{Deserialize, Serialize};

use crate::geometry::SeekCurve;

/// The order in which a device serves outstanding requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// In order of arrival, never merged: the papers' baseline.
    #[default]
    Arrival,
    /// C-SCAN over the oldest outstanding, neighbours merged: a kernel's elevator or a drive's command queue.
    Elevator,
}

impl Order {
    /// Its configuration value: `arrival` or `elevator`.
    pub const fn name(self) -> &'static str {
        match self {
            Order::Arrival => "arrival",
            Order::Elevator => "elevator",
        }
    }
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Order {
    type Err = String;
    fn from_str(text: &str) -> Result<Order, String> {
        match text {
            "arrival" => Ok(Order::Arrival),
            "elevator" => Ok(Order::Elevator),
            other => Err(format!("there is no disk order {other:?}; it must be arrival or elevator")),
        }
    }
}

/// A disk with rotating platters. The defaults are a 1 TB, 7200 rpm SATA drive.
///
/// Sources: the form of the seek curve, skew, caches and overhead follow C. Ruemmler and J. Wilkes, *An introduction to
/// disk drive modeling*, IEEE Computer 27(3), 1994. (sheet): the specification of the Hitachi Deskstar 7K1000.C, 1 TB
/// on two platters, section 4.5.2. (class): typical data sheets of 7200 rpm drives of about 2008 to 2013, which differ
/// by some 10 to 20 % (Hitachi 7K320: 1.0 ms to the next track, 20 ms full stroke). (ours): our estimate where data
/// sheets are silent.
///
/// Simplifications: one zone (the same rate on all tracks, the mean of a real drive); no defects, retries or thermal
/// recalibration; the interface transfer overlaps that from the platter.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceParams {
    /// Capacity, bytes (1 GB to 100 TB; default 1 TB).
    pub capacity_bytes: u64,
    /// Rotational speed, revolutions a minute (1000 to 30000; default 7200).
    pub rpm: u32,
    /// Bytes per track (64 KiB to 16 MiB; default 1212416: 145 MB/s within a track, 130 MB/s over many, (class)).
    pub track_bytes: u64,
    /// Tracks per cylinder, i.e. surfaces used (1 to 64; default 4: two platters, (class)).
    pub heads: u32,
    /// Offset of a track's start behind the previous one's, ms (at least `seek_track_ms`, less than a turn; default
    /// 1.0, (ours)). A sequential transfer loses it at each track's end; it is also the head-switch time.
    pub track_skew_ms: f64,
    /// Seek to the next cylinder, ms (0.05 to 20; default 0.8, (class): 0.6 to 1.0).
    pub seek_track_ms: f64,
    /// Mean seek between two random addresses, ms (more than `seek_track_ms`; default 8.5, (sheet)).
    pub seek_average_ms: f64,
    /// Seek from the first cylinder to the last, ms (more than `seek_average_ms`, at most 100; default 18, (class): 17 to 20).
    pub seek_full_ms: f64,
    /// Distance at which the seek curve changes from a + b·√d (the arm accelerates) to c + e·d (it coasts), as a
    /// fraction of the full stroke (0.01 to 0.9; default 0.3, (ours)). a, b, c and e follow from this and the three
    /// times.
    pub seek_knee: f64,
    /// Extra settling time of a write after a seek or head switch, ms (0 to 10; default 1.0, (sheet): an average write
    /// seek takes 9.5 ms).
    pub write_settle_ms: f64,
    /// Electronics overhead per command, µs (0 to 10000; default 100, (ours)).
    pub overhead_us: u32,
    /// Transfer rate of the drive's memory, bytes a second (1 MB/s to 10 GB/s; default 300 MB/s: SATA 3 Gbit/s).
    pub interface_bytes_per_s: u64,
    /// How far the drive reads ahead after a read while nothing else moves its head, bytes (0: off, and no read is
    /// served from the drive's memory; at most 64 MiB; default 1 MiB, about a track, (ours)).
    pub read_ahead_bytes: u64,
    /// Segments of the drive's read cache (1 to 256; default 16, (ours)).
    pub read_ahead_segments: u32,
    /// Report a write as done when it is in the drive's memory (default false: when it is on the platter).
    pub write_cache: bool,
    /// Memory for written data with `write_cache = true`, bytes (64 KiB to 1 GiB; default 16 MiB, (ours): half of a 32
    /// MiB drive).
    pub write_cache_bytes: u64,
    /// `arrival` (default) or `elevator`; can be changed on a running server.
    pub order: Order,
    /// The elevator chooses among this many oldest requests (1 to 1024; default 32: a SATA drive's queue).
    pub elevator_depth: u32,
    /// Maximum size of an elevator's merged transfer, bytes (4 KiB to 64 MiB; default 1 MiB).
    pub elevator_merge_bytes: u64,
    /// Files are placed on the disk in chunks of this size, bytes (1 MiB to 1 TiB, at most the span; default 256 MiB).
    pub placement_chunk_bytes: u64,
    /// The fraction of the disk, from its start, over which chunks are spread (0.001 to 1; default 1).
    pub placement_span: f64,
    /// In real time only: a request triggered by the end of another counts as sent at that end if it arrives within
    /// this time, µs (0 to 100000; default 1000), so that a late wake-up of the host is not charged to the disk.
    pub late_grace_us: u32,
}

impl Default for DeviceParams {
    fn default() -> Self {
        DeviceParams {
            capacity_bytes: 1_000_000_000_000,
            rpm: 7200,
            track_bytes: 1_212_416,
            heads: 4,
            track_skew_ms: 1.0,
            seek_track_ms: 0.8,
            seek_average_ms: 8.5,
            seek_full_ms: 18.0,
            seek_knee: 0.3,
            write_settle_ms: 1.0,
            overhead_us: 100,
            interface_bytes_per_s: 300_000_000,
            read_ahead_bytes: 1 << 20,
            read_ahead_segments: 16,
            write_cache: false,
            write_cache_bytes: 16 << 20,
            order: Order::Arrival,
            elevator_depth: 32,
            elevator_merge_bytes: 1 << 20,
            placement_chunk_bytes: 256 << 20,
            placement_span: 1.0,
            late_grace_us: 1000,
        }
    }
}

impl DeviceParams {
    /// Validates the values; the error names the key and its range.
    pub fn check(&self) -> Result<(), String> {
        let whole = |key: &str, value: u64, least: u64, most: u64, unit: &str| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(format!("{key} is {value}; it must be between {least} and {most}{unit}"))
        };
        // Written so that NaN is refused too.
        let real = |key: &str, value: f64, least: f64, most: f64, unit: &str| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(format!("{key} is {value}; it must be between {least} and {most}{unit}"))
        };
        whole("capacity_bytes", self.capacity_bytes, 1_000_000_000, 100_000_000_000_000, "")?;
        whole("rpm", self.rpm.into(), 1000, 30_000, "")?;
        whole("track_bytes", self.track_bytes, 64 << 10, 16 << 20, "")?;
        whole("heads", self.heads.into(), 1, 64, "")?;
        real("seek_track_ms", self.seek_track_ms, 0.05, 20.0, " ms")?;
        real("seek_full_ms", self.seek_full_ms, self.seek_track_ms, 100.0, " ms")?;
        real("seek_knee", self.seek_knee, 0.01, 0.9, "")?;
        let (least, most) = SeekCurve::average_range_ms(self);
        real("seek_average_ms", self.seek_average_ms, least, most, " ms for the other seek times given")?;
        let turn_ms = 60_000.0 / f64::from(self.rpm);
        real("track_skew_ms", self.track_skew_ms, self.seek_track_ms, turn_ms, " ms (seek_track_ms to one turn)")?;
        real("write_settle_ms", self.write_settle_ms, 0.0, 10.0, " ms")?;
        whole("overhead_us", self.overhead_us.into(), 0, 10_000, " us")?;
        whole("interface_bytes_per_s", self.interface_bytes_per_s, 1_000_000, 10_000_000_000, "")?;
        whole("read_ahead_bytes", self.read_ahead_bytes, 0, 64 << 20, "")?;
        whole("read_ahead_segments", self.read_ahead_segments.into(), 1, 256, "")?;
        whole("write_cache_bytes", self.write_cache_bytes, 64 << 10, 1 << 30, "")?;
        whole("elevator_depth", self.elevator_depth.into(), 1, 1024, "")?;
        whole("elevator_merge_bytes", self.elevator_merge_bytes, 4 << 10, 64 << 20, "")?;
        real("placement_span", self.placement_span, 0.001, 1.0, "")?;
        whole("placement_chunk_bytes", self.placement_chunk_bytes, 1 << 20, self.span_bytes().min(1 << 40), "")?;
        whole("late_grace_us", self.late_grace_us.into(), 0, 100_000, " us")
    }

    /// Cylinders, from the capacity.
    pub fn cylinders(&self) -> u64 {
        self.capacity_bytes.div_ceil(self.track_bytes.max(1)).div_ceil(u64::from(self.heads.max(1))).max(2)
    }

    /// Bytes a second of a long sequential transfer, including track switches.
    pub fn sustained_bytes_per_s(&self) -> u64 {
        let track_s = 60.0 / f64::from(self.rpm) + self.track_skew_ms / 1e3;
        (self.track_bytes as f64 / track_s) as u64
    }

    /// Size of the area over which files are spread, from the start of the disk, bytes.
    pub(crate) fn span_bytes(&self) -> u64 {
        (self.capacity_bytes as f64 * self.placement_span) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_a_disk_of_130_mb_a_second() {
        let params = DeviceParams::default();
        assert_eq!(params.check(), Ok(()));
        assert_eq!(params.cylinders(), 206_200);
        // 1212416 bytes in 8.333 ms + 1 ms.
        assert_eq!(params.sustained_bytes_per_s() / 100_000, 1299);
    }

    #[test]
    fn errors_name_key_and_range() {
        type Change = fn(&mut DeviceParams);
        let cases: [(Change, &str); 9] = [
            (|p| p.rpm = 0, "rpm is 0; it must be between 1000 and 30000"),
            (|p| p.capacity_bytes = 5, "capacity_bytes is 5"),
            (|p| p.seek_knee = f64::NAN, "seek_knee is NaN; it must be between 0.01 and 0.9"),
            (|p| p.seek_average_ms = 17.0, "seek_average_ms is 17; it must be between"),
            (|p| p.seek_average_ms = 1.0, "seek_average_ms is 1; it must be between"),
            (|p| p.track_skew_ms = 0.5, "track_skew_ms is 0.5; it must be between 0.8 and 8.33"),
            (|p| p.placement_chunk_bytes = 2_000_000_000_000, "placement_chunk_bytes is 2000000000000"),
            (|p| p.placement_span = 0.0, "placement_span is 0"),
            (|p| p.elevator_depth = 0, "elevator_depth is 0; it must be between 1 and 1024"),
        ];
        for (change, complaint) in cases {
            let mut params = DeviceParams::default();
            change(&mut params);
            let said = params.check().expect_err(complaint);
            assert!(said.starts_with(complaint), "{said:?} should start with {complaint:?}");
        }
    }

    #[test]
    fn orders_are_words() {
        for order in [Order::Arrival, Order::Elevator] {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        assert!("scan".parse::<Order>().unwrap_err().contains("\"scan\""));
    }
}
