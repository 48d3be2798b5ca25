//! Reads of programs that carry no library of ours, told by the kernel.

mod fanotify;
mod follower;
mod line;
mod tracefs;

pub use fanotify::Fanotify;
pub use follower::{FILES_MAX, Follower, Means};
pub use line::Seen;
pub use tracefs::Tracefs;
