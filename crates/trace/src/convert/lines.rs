//! Numbered lines of a text that may contain any bytes, limited in length.

use std::io::{BufRead, Read};
use std::path::Path;

use crate::TraceError;

/// No format has longer lines.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Reads lines one after the other.
pub struct Lines<'p, R> {
    input: R,
    path: &'p Path,
    line: Vec<u8>,
    number: u64,
}

impl<'p, R: BufRead> Lines<'p, R> {
    pub fn new(input: R, path: &'p Path) -> Lines<'p, R> {
        Lines { input, path, line: Vec::new(), number: 0 }
    }

    /// The next line without its end, and its number from 1.
    pub fn next_line(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        self.line.clear();
        let limit = LINE_BYTES_MAX as u64 + 1;
        let read = self.input.by_ref().take(limit).read_until(b'\n', &mut self.line);
        if read.map_err(|e| TraceError::io(self.path, e))? == 0 {
            return Ok(None);
        }
        self.number += 1;
        if self.line.len() > LINE_BYTES_MAX {
            let reason = format!("the line has more than {LINE_BYTES_MAX} bytes; this is not such a text");
            return Err(TraceError::line(self.path, self.number, reason));
        }
        let mut line = self.line.as_slice();
        line = line.strip_suffix(b"\n").unwrap_or(line);
        line = line.strip_suffix(b"\r").unwrap_or(line);
        Ok(Some((self.number, line)))
    }

    /// An error about a line.
    pub fn refuse(&self, number: u64, reason: impl Into<String>) -> TraceError {
        TraceError::line(self.path, number, reason)
    }
}

/// A whole number at `at` of a line, for messages named `what`.
pub fn whole(text: Option<&str>, what: &str) -> Result<u64, String> {
    let text = text.ok_or_else(|| format!("the {what} is missing"))?;
    text.parse().map_err(|_| format!("{} is not a valid {what}: write a whole number from 0 to 2^64-1", show(text)))
}

/// Decimal seconds as nanoseconds, without the rounding of floating point.
pub fn seconds_ns(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    let mut nanos = 0u64;
    for i in 0..9 {
        nanos = nanos * 10 + u64::from(fraction.as_bytes().get(i).map_or(0, |b| b - b'0'));
    }
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(nanos)
}

/// A piece of a line for a message.
pub fn show(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_exact() {
        assert_eq!(seconds_ns("1795295294.824964"), Some(1_795_295_294_824_964_000));
        assert_eq!(seconds_ns("0.0001"), Some(100_000));
        assert_eq!(seconds_ns("7"), Some(7_000_000_000));
        for bad in ["", ".", "x", "1.2.3", "-1", "1e5", "99999999999999"] {
            assert_eq!(seconds_ns(bad), None, "{bad}");
        }
    }

    #[test]
    fn lines_are_counted_and_bounded() {
        let mut lines = Lines::new(&b"a\r\n\nb"[..], Path::new("x"));
        assert_eq!(lines.next_line().unwrap(), Some((1, &b"a"[..])));
        assert_eq!(lines.next_line().unwrap(), Some((2, &b""[..])));
        assert_eq!(lines.next_line().unwrap(), Some((3, &b"b"[..])));
        assert_eq!(lines.next_line().unwrap(), None);
        let long = vec![b'x'; LINE_BYTES_MAX + 10];
        let error = Lines::new(&long[..], Path::new("x")).next_line().unwrap_err().to_string();
        assert!(error.starts_with("x:1: "), "{error}");
    }
}
