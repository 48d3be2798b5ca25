//! Models of storage devices: how long a disk takes for a request, in what order it takes requests, and where
//! on it a file lies.
//!
//! Everything here is a pure function of its arguments and its own state: no clock, no thread, no randomness.
//! Instants and spans are nanoseconds (`_ns`) on whatever clock the driver keeps; a store drives the model in
//! real time, the simulator in virtual time, and both see the same disk.

mod cache;
mod disk;
mod flash;
mod geometry;
mod params;
mod placement;
mod queue;

pub use disk::{Disk, LinearCost, Served};
pub use flash::{Flash, FlashParams};
pub use params::{DeviceParams, Order};
pub use placement::{Placed, Placement};
pub use queue::{DeviceQueue, Taken};

/// What a device is asked to do.
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
