//! placeholder
#[derive(Debug)]
#[allow(missing_docs)]
pub struct FrameError;
#[allow(missing_docs)]
pub struct FrameHeader;
#[allow(missing_docs)]
pub enum Kind {}
