//! The throughput of a scheduler's device: bytes per time with something outstanding.

use crate::types::Nanos;

/// Requests needed for a rate.
const ENOUGH: u32 = 48;

#[derive(Default)]
pub(super) struct Meter {
    bytes: u64,
    busy: Nanos,
    requests: u32,
    /// Requests still to be ignored.
    skip: u32,
    /// Time is counted up to here.
    mark: Nanos,
}

impl Meter {
    /// Restarts the measurement; the next `skip` requests to end are ignored.
    pub fn begin(&mut self, skip: u32) {
        *self = Meter { skip, mark: self.mark, ..Meter::default() };
    }

    /// A request arrived; `idle`: nothing was outstanding before it.
    pub fn arrived(&mut self, now: Nanos, idle: bool) {
        if idle {
            self.mark = now;
        }
    }

    /// A batch ended.
    pub fn ended(&mut self, now: Nanos, bytes: u64, requests: u32) {
        let passed = now.since(self.mark);
        self.mark = now;
        if self.skip > 0 {
            self.skip = self.skip.saturating_sub(requests);
            return;
        }
        self.busy += passed;
        self.bytes = self.bytes.saturating_add(bytes);
        self.requests = self.requests.saturating_add(requests);
    }

    /// Bytes per second; `None` while there are too few measurements.
    pub fn rate(&self) -> Option<f64> {
        (self.requests >= ENOUGH && self.busy.0 > 0).then(|| self.bytes as f64 * 1e9 / self.busy.0 as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_requests_does_not_count() {
        let mut meter = Meter::default();
        meter.begin(1);
        for i in 0..=u64::from(ENOUGH) {
            // One request a second, served in 10 ms.
            let now = Nanos::from_millis(1000 * (i + 1));
            meter.arrived(now, true);
            assert_eq!(meter.rate(), None);
            meter.ended(now + Nanos::from_millis(10), 10_000, 1);
        }
        assert_eq!(meter.rate(), Some(1e6));
        meter.begin(0);
        assert_eq!(meter.rate(), None);
    }
}
