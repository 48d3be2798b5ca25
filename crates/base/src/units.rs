//! Sizes and times as people type and read them: `64k`, `1m`, `2g`; `100us`, `5ms`, `2s`, `3m`.

use std::time::Duration;

/// Bytes from text: a number with an optional suffix `k`, `m`, `g` or `t` (powers of 1024, `KiB` and `KB` alike).
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let unit = lower.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number = &lower[..lower.len() - unit.len()];
    let shift = match unit.trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("{text:?} is not a size: write a number with k, m or g, such as 64k")),
    };
    let bad = || format!("{text:?} is not a size: write a number with k, m or g, such as 64k");
    if let Ok(n) = number.parse::<u64>() {
        return n.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is larger than any file can be"));
    }
    let n = number.parse::<f64>().map_err(|_| bad())? * (1u64 << shift) as f64;
    if n.fract() == 0.0 && n < u64::MAX as f64 { Ok(n as u64) } else { Err(bad()) }
}

/// A size that must be at least one byte.
pub fn parse_positive_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a size of 0 bytes makes no request: give at least 1".into()),
        n => Ok(n),
    }
}

/// A time from text: a number with `ns`, `us`, `ms`, `s`, `m` or `h`; a bare number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let lower = text.trim().to_ascii_lowercase();
    let unit = lower.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number = &lower[..lower.len() - unit.len()];
    let bad = || format!("{text:?} is not a time: write a number with us, ms, s or m, such as 500us");
    let factor = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let seconds = number.parse::<f64>().map_err(|_| bad())? * factor;
    if seconds <= 86_400.0 * 30.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{text:?} is more than thirty days"))
    }
}

/// Bytes for people: `16 KiB`, `1.5 MiB`.
pub fn show_bytes(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.abs() >= 100.0 || (value - value.round()).abs() < 0.05 {
        format!("{value:.0} {}", units[unit])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// A span in seconds for people: `43 ns`, `450 µs`, `12.0 ms`, `3.40 s`, `2 min 05 s`.
pub fn show_seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".into(),
        s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
        s if s < 1e-5 => format!("{:.1} µs", s * 1e6),
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s => {
            // Rounded before it is divided: 119.6 s is 2 min 00 s.
            let whole = s.round();
            format!("{:.0} min {:02.0} s", (whole / 60.0).floor(), whole % 60.0)
        }
    }
}

/// A span in nanoseconds for people, as [`show_seconds`] writes it.
pub fn show_ns(ns: f64) -> String {
    show_seconds(ns / 1e9)
}

/// An instant in UTC, as ISO 8601; `unix_s` counts the seconds since 1970 without leap seconds.
pub fn show_utc(unix_s: u64) -> String {
    let (mut days, second) = (unix_s / 86_400, unix_s % 86_400);
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(show_utc(unix_s), text);
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("64k", 65536),
            ("1.5K", 1536),
            ("16KiB", 16384),
            ("8MB", 8 << 20),
            ("2g", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "k", "-1", "1x", "0.3", "99999999999999t", "1e3", "64 k k"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert!(parse_positive_bytes("0").is_err());
    }

    #[test]
    fn times() {
        for (text, us) in [("100us", 100), ("5ms", 5_000), ("2s", 2_000_000), ("0.5", 500_000), ("1m", 60_000_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_micros(us)), "{text}");
        }
        for text in ["", "ms", "1d", "-1s", "1e99h", "nan"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shown() {
        assert_eq!(show_bytes(16384.0), "16 KiB");
        assert_eq!(show_bytes(1.5 * 1048576.0), "1.5 MiB");
        assert_eq!(show_bytes(10.0), "10 B");
        assert_eq!(show_bytes(-2048.0), "-2 KiB");
        assert_eq!(show_bytes(u64::MAX as f64), "16384 PiB");
        assert_eq!(show_seconds(0.0), "0 s");
        assert_eq!(show_seconds(0.000_000_43), "430 ns");
        assert_eq!(show_ns(4_300.0), "4.3 µs");
        assert_eq!(show_seconds(0.00045), "450 µs");
        assert_eq!(show_seconds(125.0), "2 min 05 s");
        assert_eq!(show_seconds(119.6), "2 min 00 s");
        assert_eq!(show_seconds(3599.7), "60 min 00 s");
    }
}
