//! The basics that every crate shares. Knows nothing of requests, files or servers.

pub mod at_once;
pub mod complaints;
pub mod dirtying;
pub mod durable;
pub mod fnv;
pub mod folders;
pub mod generations;
pub mod glob;
pub mod guarded_folder;
pub mod histogram;
pub mod loader;
pub mod lock;
pub mod machine;
pub mod mounts;
pub mod page_cache;
pub mod prefetch;
pub mod presence;
pub mod random;
pub mod replace;
pub mod set_id;
pub mod siphash;
pub mod slab;
pub mod statistics;
pub mod time;
pub mod units;
pub mod unpaced;

pub use durable::Durable;
pub use histogram::Histogram;
pub use random::Random;
pub use time::Nanos;
