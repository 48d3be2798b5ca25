//! What is behind `libagios`: the interface of AGIOS, in its three generations, on this scheduler.
//!
//! Functions of the generations check their arguments and find the running [`library`]; the library's own thread
//! ([`owner`]) schedules and calls back; [`requests`] has what was delivered until it is released.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("identifiers and pointers of the oldest interface share 64-bit words");

pub mod calls;
mod config;
mod exports;
mod files;
mod foretold;
pub mod generation1;
pub mod generation2;
pub mod generation3;
mod library;
mod metrics;
mod owner;
mod requests;
mod sink;
mod syntax;

pub use metrics::MetricsC;
pub use sink::{IdentifierFn, IdentifiersFn, OwnFn};

/// Prints one line on stderr. A full or closed stderr is not an error.
macro_rules! say {
    ($($text:tt)*) => {
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("agios: {}\n", format_args!($($text)*)));
    };
}
pub(crate) use say;
