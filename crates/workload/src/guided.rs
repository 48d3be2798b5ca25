//! Measures programs whose reads are guided: real runs from a cold cache, on a disk and in a memory of limited size,
//! with the kernel's own count of what reached the device.

mod block;
mod disk;
mod limits;
mod modelled;
pub mod page;
pub mod suite;
mod trials;

pub use block::{BlockDevice, Counts, drop_caches};
pub use disk::LoopDisk;
pub use limits::{Group, Limits};
pub use modelled::ModelledDisk;
pub use trials::{Files, Machine, Measured, Place, Run, Trials, Variant, measure};
