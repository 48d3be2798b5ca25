//! Models of storage: the service time of a disk, the order in which it takes requests, the placement of files on it;
//! and the page cache and read-ahead of the kernel above it.
//!
//! Everything is a pure function of its arguments and its own state: no clock, no thread, no randomness. Instants and
//! spans are nanoseconds (`_ns`) on the driver's clock; a store drives the model in real time, the simulator in virtual
//! time, and both see the same disk.

mod cache;
mod disk;
mod flash;
mod geometry;
mod limits;
mod page_cache;
mod params;
mod placement;
mod queue;
mod read_ahead;

pub use disk::{Disk, LinearCost, Served};
pub use flash::{Flash, FlashParams};
pub use limits::{DeviceLimits, device_limits, device_limits_of};
pub use page_cache::{CHUNK_BYTES, PAGE_BYTES, PageCache, State};
pub use params::{DeviceParams, Order};
pub use placement::{Placed, Placement};
pub use queue::{DeviceQueue, Taken};
pub use read_ahead::{ReadAhead, ReadAheadLimits};

/// The operations of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// One request to a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Io {
    /// Reads or writes.
    pub op: Op,
    /// First byte on the device.
    pub address: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Io {
    /// First byte after it.
    pub const fn end(&self) -> u64 {
        self.address.saturating_add(self.len)
    }
}
