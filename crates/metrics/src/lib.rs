//! A server's status as metrics in Prometheus' text format, and the HTTP endpoint that serves them.
//!
//! [`FAMILIES`] is the list of all metrics: each says where in the status its values are. [`text`] writes those that a
//! status has; [`Endpoint`] answers `GET /metrics` with it. `doc/METRICS.md` describes every metric.

mod endpoint;
mod families;
mod text;

pub use endpoint::{Endpoint, OpenError};
pub use families::{FAMILIES, Family, Kind};
pub use text::text;
