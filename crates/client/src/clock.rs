//! The clock of the session machines: nanoseconds since this program first looked at it.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use impresario_sched::Nanos;

static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// An instant as the machines count it.
pub(crate) fn nanos(at: Instant) -> Nanos {
    span(at.saturating_duration_since(*ORIGIN))
}

/// A span as the machines count it.
pub(crate) fn span(duration: Duration) -> Nanos {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// The reverse of [`nanos`].
pub(crate) fn instant(at: Nanos) -> Instant {
    let origin = *ORIGIN;
    origin.checked_add(Duration::from_nanos(at.0)).unwrap_or(origin + Duration::from_secs(1 << 31))
}
