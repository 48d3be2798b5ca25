//! The decision logic of I/O nodes and data servers, without sockets, files or clocks.

pub mod acl;
pub mod allocation;
pub mod append;
pub mod credits;
mod dispatch;
pub mod grants;
pub mod locks;
pub mod members;
mod parent;
pub mod pieces;
mod readiness;
pub mod session;
mod split;

pub use dispatch::{DispatchQueue, Entry, Merging, Party, covered};
pub use parent::Parent;
pub use readiness::{READY_MAX_BYTES, Readiness};
pub use split::{core_requests, pieces_of, whole_request};
