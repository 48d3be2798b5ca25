//! placeholder
/// placeholder
#[derive(Clone, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct DeviceParams {}
