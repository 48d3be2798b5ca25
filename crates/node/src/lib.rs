//! What I/O nodes and data servers decide, without sockets, files or clocks.

mod dispatch;
mod fence;
mod parent;
mod split;

pub use dispatch::{DispatchQueue, Entry};
pub use fence::Fence;
pub use parent::Parent;
pub use split::pieces_of;
