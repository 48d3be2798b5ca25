//! A model of flash: requests are spread over parallel channels; all addresses are equally near.
//!
//! A request takes the first free channel, waits there for the access time of its operation, and then uses the drive's
//! bandwidth, which all channels share in the order in which they are ready. A single request at a time takes access
//! time plus transfer; many together reach `channels` over the access time, or the bandwidth, whichever is less. Not
//! modelled: garbage collection, wear, erase blocks, and caching in the drive's memory.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::{Deserialize, Serialize};

use crate::disk::{LinearCost, Served};
use crate::{Io, Op};

/// A flash drive. The defaults are a data-centre NVMe drive of about 2020 (our estimate from such data sheets).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlashParams {
    /// Requests served in parallel (1 to 1024; default 32).
    pub channels: u32,
    /// Time before a read's first byte, µs (0 to 1e6; default 80).
    pub read_us: f64,
    /// Time before a write's first byte, µs (0 to 1e6; default 20: it ends in the drive's protected memory).
    pub write_us: f64,
    /// Read bandwidth of the whole drive, bytes a second (1e6 to 1e12; default 3.2e9).
    pub read_bytes_per_s: f64,
    /// Write bandwidth of the whole drive, bytes a second (1e6 to 1e12; default 2.0e9).
    pub write_bytes_per_s: f64,
}

impl Default for FlashParams {
    fn default() -> Self {
        FlashParams { channels: 32, read_us: 80.0, write_us: 20.0, read_bytes_per_s: 3.2e9, write_bytes_per_s: 2.0e9 }
    }
}

impl FlashParams {
    /// Validates the values; the error names the key and its range.
    pub fn check(&self) -> Result<(), String> {
        // Written so that NaN is refused too.
        let real = |key: &str, value: f64, least: f64, most: f64, unit: &str| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(format!("{key} is {value}; it must be between {least} and {most}{unit}"))
        };
        if !(1..=1024).contains(&self.channels) {
            return Err(format!("channels is {}; it must be between 1 and 1024", self.channels));
        }
        real("read_us", self.read_us, 0.0, 1e6, " us")?;
        real("write_us", self.write_us, 0.0, 1e6, " us")?;
        real("read_bytes_per_s", self.read_bytes_per_s, 1e6, 1e12, "")?;
        real("write_bytes_per_s", self.write_bytes_per_s, 1e6, 1e12, "")
    }

    fn of(&self, op: Op) -> (f64, f64) {
        match op {
            Op::Read => (self.read_us, self.read_bytes_per_s),
            Op::Write => (self.write_us, self.write_bytes_per_s),
        }
    }

    /// The linear fit for schedulers: access time and transfer of a request that has the drive to itself.
    pub fn cost(&self, op: Op) -> LinearCost {
        let (access_us, rate) = self.of(op);
        LinearCost { fixed_ns: (access_us * 1e3) as u64, ns_per_kib: (1024e9 / rate).ceil() as u64 }
    }
}

/// The state of a drive. It accepts requests while others are in flight.
#[derive(Clone, Debug)]
pub struct Flash {
    params: FlashParams,
    /// When each channel is free.
    channels: BinaryHeap<Reverse<u64>>,
    /// When the shared bandwidth is free.
    bus_free_ns: u64,
    slowness: f64,
}

impl Flash {
    /// An idle drive with validated parameters.
    pub fn new(params: &FlashParams) -> Flash {
        let channels = (0..params.channels.max(1)).map(|_| Reverse(0)).collect();
        Flash { params: params.clone(), channels, bus_free_ns: 0, slowness: 1.0 }
    }

    /// Slows everything down by a factor from now on; 1 ends that.
    pub fn slow_down(&mut self, factor: f64) {
        self.slowness = factor.max(0.0);
    }

    /// Serves a request submitted at `start_ns`, which must not be before that of the previous call.
    pub fn serve(&mut self, start_ns: u64, io: &Io) -> Served {
        let (access_us, rate) = self.params.of(io.op);
        let access_ns = (access_us * 1e3 * self.slowness) as u64;
        let transfer_ns = (io.len as f64 * 1e9 / rate * self.slowness) as u64;
        let Reverse(free_ns) = self.channels.pop().unwrap_or(Reverse(0));
        let accessed_ns = free_ns.max(start_ns) + access_ns;
        let end_ns = accessed_ns.max(self.bus_free_ns) + transfer_ns;
        self.bus_free_ns = end_ns;
        self.channels.push(Reverse(end_ns));
        Served { end_ns, seek_ns: 0, rotation_ns: 0, transfer_ns, cached: false }
    }

    /// When the last request so far ends.
    pub fn busy_until_ns(&self) -> u64 {
        self.bus_free_ns
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drive() -> FlashParams {
        FlashParams { channels: 4, read_us: 100.0, write_us: 20.0, read_bytes_per_s: 1e9, write_bytes_per_s: 5e8 }
    }

    #[test]
    fn one_request_takes_access_and_transfer() {
        let mut flash = Flash::new(&drive());
        assert_eq!(flash.serve(0, &Io::read(0, 10_000)).end_ns, 100_000 + 10_000);
        assert_eq!(flash.serve(1_000_000, &Io::write(1 << 40, 10_000)).end_ns, 1_000_000 + 20_000 + 20_000);
        flash.slow_down(3.0);
        assert_eq!(flash.serve(2_000_000, &Io::read(0, 10_000)).end_ns, 2_000_000 + 330_000);
    }

    #[test]
    fn channels_work_in_parallel_up_to_the_bandwidth() {
        let mut flash = Flash::new(&drive());
        let ends: Vec<u64> = (0..8).map(|_| flash.serve(0, &Io::read(0, 1000)).end_ns).collect();
        // Four at once, a microsecond of transfer each; then the next four.
        assert_eq!(ends, [101_000, 102_000, 103_000, 104_000, 202_000, 203_000, 204_000, 205_000]);
        let mut flash = Flash::new(&drive());
        let last = (0..1000).map(|_| flash.serve(0, &Io::read(0, 1_000_000)).end_ns).max();
        assert_eq!(last, Some(1_000_000_000 + 100_000), "1 GB at 1 GB/s");
    }

    #[test]
    fn the_fit_is_that_of_a_lone_request() {
        let cost = drive().cost(Op::Read);
        assert_eq!((cost.fixed_ns, cost.ns(10 << 10)), (100_000, 100_000 + 10_240));
    }

    #[test]
    fn errors_name_key_and_range() {
        assert_eq!(FlashParams::default().check(), Ok(()));
        let bad = FlashParams { channels: 0, ..drive() };
        assert_eq!(bad.check().unwrap_err(), "channels is 0; it must be between 1 and 1024");
        let bad = FlashParams { read_us: f64::NAN, ..drive() };
        assert!(bad.check().unwrap_err().starts_with("read_us is NaN; it must be between 0 and"));
    }

    proptest! {
        /// Never faster than the bandwidth or the channels allow, never slower than one after the other.
        #[test]
        fn stays_within_its_limits(ios in prop::collection::vec((0u64..50_000, 1u64..100_000), 1..100)) {
            let mut flash = Flash::new(&drive());
            let (mut now, mut bytes, mut alone) = (0, 0u64, 0);
            for (gap, len) in ios {
                now += gap;
                let end = flash.serve(now, &Io::read(0, len)).end_ns;
                bytes += len;
                alone = now.max(alone) + 100_000 + len;
                prop_assert!(end >= now + 100_000 + len && end >= bytes && end <= alone, "{} {}", end, alone);
            }
        }
    }
}
