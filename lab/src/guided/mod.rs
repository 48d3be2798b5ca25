//! Measures programs whose reads are guided: real runs from a cold cache, on a disk and in a memory of limited size.

pub mod beds;
pub mod held_out;
pub mod maps;
mod modelled;
pub mod page;
pub mod slow_mount;
pub mod suite;
pub mod table;
