//! What a device costs, as far as planning needs it: a request somewhere, a request that goes on where the last one
//! ended, how many at a time, and how the kernel cuts.

use std::path::Path;

use impresario_base::mounts::device_below_path;
use impresario_config::Calibration;
use impresario_config::calibration::{Pattern, PointOp};
use impresario_sched::{CostCurve, CostModel, LinearCost, Nanos, Op, OpCost};

use crate::config::DeviceCost;

/// A device that is read from.
#[derive(Clone, PartialEq, Debug)]
pub struct Device {
    /// A read that begins anywhere.
    pub random: OpCost,
    /// A read that begins where the last one ended.
    pub sequential: OpCost,
    /// Reads that it serves at a time, at least 1.
    pub parallel: u32,
    /// How far the kernel reads ahead by itself, bytes (`read_ahead_kb`).
    pub read_ahead_bytes: u64,
    /// The largest request that reaches the device, bytes (`max_sectors_kb`).
    pub request_bytes_max: u64,
    /// Where this comes from, for people.
    pub source: String,
}

impl Device {
    /// A 7200 rpm disk: the assumption of [`CostModel::default`]; a read that goes on costs its transfer alone.
    pub fn disk() -> Device {
        let OpCost::Linear(line) = CostModel::default().read else { return Device::limited(120, 130) };
        let sequential = LinearCost { fixed: Nanos(150_000), ..line };
        Device::of(line.into(), sequential.into(), "assumed: a 7200 rpm disk")
    }

    /// A device with a limit on requests and bytes a second, such as a cloud volume: where a read lies does not matter.
    pub fn limited(iops: u64, mib_per_s: u64) -> Device {
        let (iops, mib_per_s) = (iops.clamp(1, 100_000_000), mib_per_s.clamp(1, 1 << 20));
        let each = 1_000_000_000 / iops;
        let bytes_ns = |bytes: u64| bytes.saturating_mul(1_000_000_000) / (mib_per_s << 20);
        // Requests and bytes are counted side by side: a request costs the dearer of the two.
        let even = (each as u128 * (mib_per_s << 20) as u128 / 1_000_000_000) as u64;
        let even = even.clamp(8192, 1 << 40);
        let points = [(4096, Nanos(each.max(1))), (even, Nanos(each.max(bytes_ns(even)).max(1)))];
        let beyond = (even * 2, Nanos(bytes_ns(even * 2).max(each + 1)));
        let line = LinearCost { fixed: Nanos(each), ps_per_byte: 1_000_000_000_000 / (mib_per_s << 20) };
        let cost = CostCurve::through(&[points[0], points[1], beyond]).map_or(line.into(), OpCost::from);
        let source = format!("assumed: {iops} requests and {mib_per_s} MiB a second at most");
        Device::of(cost.clone(), cost, source)
    }

    /// A solid-state disk: 90 µs a request, 2 GB/s, eight at a time.
    pub fn flash() -> Device {
        let line = LinearCost { fixed: Nanos(90_000), ps_per_byte: 500 };
        Device { parallel: 8, ..Device::of(line.into(), line.into(), "assumed: a solid-state disk") }
    }

    /// By the points of a calibration. What the kernel does is not in it: see [`Device::with_kernel`].
    pub fn calibrated(calibration: &Calibration, name: &str) -> Result<Device, String> {
        let model = calibration.cost_model(name)?;
        let points = calibration.curve(PointOp::Read, Pattern::Sequential, 1);
        let points: Vec<_> = points.iter().map(|p| (p.size_bytes, Nanos(p.median_ns))).collect();
        let random = model.of(Op::Read).clone();
        let sequential = CostCurve::through(&points).map_or_else(|_| random.clone(), OpCost::from);
        Ok(Device::of(random, sequential, model.source.into_owned()))
    }

    /// A device of these costs, one request at a time, with the kernel's defaults.
    pub fn of(random: OpCost, sequential: OpCost, source: impl Into<String>) -> Device {
        Device {
            random,
            sequential,
            parallel: 1,
            read_ahead_bytes: 128 << 10,
            request_bytes_max: 1280 << 10,
            source: source.into(),
        }
    }

    /// The same with what the kernel says of the device under a file or folder, as far as it says anything.
    pub fn with_kernel(mut self, path: &Path) -> Device {
        let Some((major, minor)) = device_below_path(path) else { return self };
        let number = |file: &str| -> Option<u64> {
            std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok().filter(|kb| (4..=1 << 22).contains(kb))
        };
        if let Some(kb) = number(&format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")) {
            self.read_ahead_bytes = kb << 10;
        }
        // A partition has its queue a folder above.
        let queue = |up: &str| number(&format!("/sys/dev/block/{major}:{minor}/{up}queue/max_sectors_kb"));
        if let Some(kb) = queue("").or_else(|| queue("../")) {
            self.request_bytes_max = kb << 10;
        }
        self
    }

    /// What one `WILLNEED` call brings in at most, bytes: the kernel cuts it to the greater of the two.
    pub fn hint_bytes_max(&self) -> u64 {
        self.read_ahead_bytes.max(self.request_bytes_max)
    }

    /// The least time in which `bytes` can be read, ns: in the best size of request, all channels busy.
    pub fn streaming_ns(&self, bytes: u64) -> u64 {
        let largest = self.request_bytes_max.max(4096);
        let halves = std::iter::successors(Some(largest), |n| Some(n / 2).filter(|n| *n >= 4096));
        // Measured curves need not be cheapest at their end.
        let each = |n: u64| self.sequential.ttp(n).0.min(self.random.ttp(n).0) as f64 / n as f64;
        let best = halves.map(each).fold(f64::INFINITY, f64::min);
        (best * bytes as f64 / f64::from(self.parallel.max(1))) as u64
    }

    /// The same as a hints file has it.
    pub fn cost(&self) -> DeviceCost {
        let (small, large) = (self.random.ttp(4096).0, self.random.ttp(8 << 20).0);
        let ns_per_mib = large.saturating_sub(small).max(1) as f64 / (8.0 - 1.0 / 256.0);
        DeviceCost {
            request_us: (small / 1000).clamp(0, 10_000_000),
            mib_per_s: ((1e9 / ns_per_mib) as u64).clamp(1, 1 << 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_device_counts_requests_and_bytes() {
        let d = Device::limited(200, 200);
        assert_eq!(d.random.ttp(4096).0, 5_000_000);
        assert_eq!(d.random.ttp(256 << 10).0, 5_000_000);
        assert_eq!(d.random.ttp(1 << 20).0 / 1000, 5_000);
        let eight = d.random.ttp(8 << 20).0;
        assert!((39_000_000..41_000_000).contains(&eight), "{eight}");
        assert!(d.streaming_ns(200 << 20).abs_diff(1_000_000_000) < 20_000_000);
        let cost = d.cost();
        assert_eq!(cost.request_us, 5_000);
        assert!((150..260).contains(&cost.mib_per_s), "{cost:?}");
        for odd in [Device::limited(0, 0), Device::limited(u64::MAX, u64::MAX), Device::limited(1, u64::MAX)] {
            assert!(odd.random.ttp(1).0 > 0 && odd.cost().mib_per_s >= 1);
        }
    }

    #[test]
    fn the_kernel_is_asked() {
        let d = Device::disk().with_kernel(Path::new("/"));
        assert!(d.read_ahead_bytes >= 4096 && d.hint_bytes_max() >= d.read_ahead_bytes);
        assert_eq!(Device::disk().with_kernel(Path::new("/does/not/exist")), Device::disk());
    }
}
