//! Paired runs of whole programs, each from a cold cache, with the kernel's own count of what reached the device: what
//! `impresario assist compare` measures.

mod block;
mod limits;
mod trials;

pub use block::{BlockDevice, Counts, drop_caches};
pub use limits::{Group, Limits};
pub use trials::{Files, Machine, Measured, Run, TestBed, Trials, Variant, cool, measure};
