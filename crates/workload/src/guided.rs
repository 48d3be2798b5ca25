//! Measures programs whose reads are guided: real runs from a cold cache, on a disk and in a memory of limited size,
//! with the kernel's own count of what reached the device.

mod block;
mod disk;
mod limits;
mod modelled;
pub mod page;
pub mod suite;
mod trials;

use std::process::Command;

use anyhow::{Context, Result, bail};

pub use block::{BlockDevice, Counts, drop_caches};
pub use disk::LoopDisk;
pub use limits::{Group, Limits};
pub use modelled::ModelledDisk;
pub use trials::{Files, Machine, Measured, Place, Run, Trials, Variant, measure};

/// Runs a program to its end; what it printed, or an error with what it complained of.
fn tool(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {name}; is its package installed?"))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
