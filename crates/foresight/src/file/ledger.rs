//! What is known of one stream's predictions: how many came true, how far it is predicted, its pace.

use crate::account::Account;

/// The least that a stream predicts at a time, bytes.
pub(super) const WINDOW_BYTES_MIN: u64 = 1 << 20;

/// What is known of one stream's predictions.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    pub(super) account: Account,
    pub(super) outstanding_bytes: u64,
    /// Not read in time, and not given up.
    pub(super) late_bytes: u64,
    /// Bytes to be predicted beyond the reader; doubled as they are hit.
    pub(super) window_bytes: u64,
    pub(super) hit_in_window: u64,
    pub(super) last_ns: u64,
    /// The interval in which it was counted last, and one more; 0: none.
    pub(super) lives: u64,
    /// Nothing but the beginning of the file speaks for it so far.
    pub(super) opening: bool,
    /// A moving average of the time between requests by their bytes, ps a byte.
    pub(super) ps_per_byte: u64,
}

impl Ledger {
    /// How long the stream takes to read so much.
    pub(super) fn time_ns(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.ps_per_byte) / 1000).min(1 << 60) as u64
    }

    pub(super) fn request(&mut self, bytes: u64, at_ns: u64) {
        if self.last_ns > 0 {
            let ps =
                (u128::from(at_ns.saturating_sub(self.last_ns)) * 1000 / u128::from(bytes.max(1))).min(1 << 50) as u64;
            self.ps_per_byte = if self.ps_per_byte == 0 { ps } else { (self.ps_per_byte * 7 + ps) / 8 };
        }
        self.last_ns = at_ns;
        self.window_bytes = self.window_bytes.max((4 * bytes).max(WINDOW_BYTES_MIN));
    }
}
