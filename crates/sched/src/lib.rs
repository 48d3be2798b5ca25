//! placeholder
pub mod spec;
pub mod types;
pub use spec::PolicySpec;
pub use types::*;
/// placeholder
#[derive(Clone, Debug, serde::Serialize)]
pub struct Status {}
