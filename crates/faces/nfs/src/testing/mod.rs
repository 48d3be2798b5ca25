//! What tests and load generators need: a file system in memory whose faults are injected, and a client of NFSv3.

mod client;
mod memory;
mod pages;

pub use client::{Client, ClientError, ReadBack, Reply, handle, name_in, read_back, skip_change};
pub use memory::{Calls, Faults, MemoryTree};
