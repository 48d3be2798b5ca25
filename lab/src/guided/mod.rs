//! Measures programs whose reads are guided: real runs from a cold cache, on a disk and in a memory of limited size.

mod modelled;
pub mod page;
pub mod suite;
