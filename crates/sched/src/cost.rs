//! What a request costs the device: the *time to process* function TTP(size) of agios-2013, III.
//!
//! Until a device has been calibrated, TTP is a linear fit given by configuration: a fixed part (seek,
//! rotation, command overhead) and a part per byte (the media rate).

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
        let transfer_ns =
            (u128::from(len_bytes) * u128::from(self.ps_per_byte) / 1000).min(u128::from(u64::MAX)) as u64;
        Nanos((self.fixed + Nanos(transfer_ns)).0.max(1))
    }
}

/// TTP for reads and writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct CostModel {
    /// Of reads.
    pub read: LinearCost,
    /// Of writes and everything else.
    pub write: LinearCost,
}

impl CostModel {
    /// Time to process `len_bytes` by `op`.
    pub fn ttp(&self, op: Op, len_bytes: u64) -> Nanos {
        match op {
            Op::Read => self.read.ttp(len_bytes),
            _ => self.write.ttp(len_bytes),
        }
    }
}

impl Default for CostModel {
    /// A 7200 rpm disk: 8.5 ms average seek and half a turn (4.17 ms), then 130 MB/s.
    fn default() -> Self {
        let disk = LinearCost { fixed: Nanos(12_670_000), ps_per_byte: 7_692 };
        CostModel { read: disk, write: disk }
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
}
