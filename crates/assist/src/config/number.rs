//! Whole numbers of the hints file: one clear refusal for negative, fractional, huge and wrongly typed ones.

use std::fmt;

use serde::Deserializer;
use serde::de::{Error, Unexpected, Visitor};

struct Between {
    min: u64,
    max: u64,
    what: &'static str,
}

impl fmt::Display for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number of {} from {} to {}", self.what, self.min, self.max)
    }
}

impl Visitor<'_> for Between {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<u64, E> {
        if (self.min..=self.max).contains(&value) {
            return Ok(value);
        }
        Err(E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<u64, E> {
        match u64::try_from(value) {
            Ok(value) => self.visit_u64(value),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(value), &self)),
        }
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<u64, E> {
        Err(E::invalid_value(Unexpected::Float(value), &self))
    }
}

fn between<'de, D: Deserializer<'de>>(d: D, min: u64, max: u64, what: &'static str) -> Result<u64, D::Error> {
    d.deserialize_any(Between { min, max, what })
}

/// A file offset or length: what the kernel takes, 0 to 2⁶³ − 1.
pub(super) fn file_bytes<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 0, i64::MAX as u64, "bytes")
}

pub(super) fn block_bytes<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, super::BLOCK_SIZE_BYTES_MIN, super::BLOCK_SIZE_BYTES_MAX, "bytes")
}

pub(super) fn trace_bytes<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 64 << 10, 256 << 20, "bytes")
}

pub(super) fn cache_blocks<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 1, super::CACHE_BLOCKS_MAX, "blocks")
}

pub(super) fn read_ahead_blocks<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 0, super::CACHE_BLOCKS_MAX, "blocks")
}

pub(super) fn percent<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 1, 100, "percent")
}

/// Seconds, up to a day.
pub(super) fn seconds<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 1, 86_400, "seconds")
}

pub(super) fn count<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 1, 1 << 20, "things")
}

/// Microseconds, up to ten seconds.
pub(super) fn micros<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 0, 10_000_000, "microseconds")
}

pub(super) fn mib_per_s<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    between(d, 1, 1 << 20, "MiB/s")
}
