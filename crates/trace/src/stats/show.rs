//! Statistics as text.

use std::fmt::Write;

use impresario_base::units::{show_bytes, show_ns};

use super::{Common, Histogram, Stats};
use crate::TraceOp;

pub fn text(s: &Stats) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    _ = write(&mut out, s);
    out
}

fn write(out: &mut String, s: &Stats) -> std::fmt::Result {
    let ops: Vec<String> =
        TraceOp::ALL.iter().zip(s.ops).filter(|(_, n)| *n > 0).map(|(op, n)| format!("{n} {}", op.name())).collect();
    writeln!(out, "  requests           {}", ops.join(", "))?;
    if s.failed + s.short > 0 {
        writeln!(out, "                     {} failed, {} moved fewer bytes than asked", s.failed, s.short)?;
    }
    let data = s.data_requests();
    if data > 0 {
        writeln!(
            out,
            "  data               {} read, {} written",
            show_bytes(s.read_bytes as f64),
            show_bytes(s.written_bytes as f64)
        )?;
        writeln!(out, "  threads            {}", s.threads)?;
        writeln!(
            out,
            "  sizes              {}{}",
            spread(&s.sizes, |n| show_bytes(n as f64)),
            common(&s.common_sizes)
        )?;
    }
    if let Some(sequential) = s.sequentiality() {
        let backward = 100.0 * s.backward as f64 / s.followed as f64;
        writeln!(
            out,
            "  in each thread     {:.1} % sequential, {backward:.1} % backward; strides{}",
            100.0 * sequential,
            common(&s.common_strides),
        )?;
    }
    if let Some(distance) = s.offset_distance_bytes {
        writeln!(out, "  offset distance    {}", show_bytes(distance))?;
    }
    writeln!(out, "  between arrivals   {}", spread(&s.gaps_ns, |n| show_ns(n as f64)))?;
    writeln!(out, "  time               {}", show_ns(s.last_ns.saturating_sub(s.first_ns) as f64))?;
    if s.waited_ns > 0 {
        let busy = 100.0 * s.busy_ns as f64 / (s.last_ns - s.first_ns).max(1) as f64;
        writeln!(
            out,
            "  waited             {} in all; something in flight {busy:.1} % of the time, {:.2} at once in the mean, {} at most",
            show_ns(s.waited_ns as f64),
            s.in_flight_mean,
            s.in_flight_max
        )?;
    }
    if let (true, Some(over_all)) = (data > 0, s.bandwidth()) {
        let busy = s.busy_bandwidth().map(|b| format!(", {}/s while something was in flight", show_bytes(b)));
        writeln!(out, "  bandwidth          {}/s{}", show_bytes(over_all), busy.unwrap_or_default())?;
    }
    if s.open_ended > 0 {
        writeln!(out, "  unknown ends       {} requests: times of waiting are of the others", s.open_ended)?;
    }
    Ok(())
}

fn spread(h: &Histogram, show: impl Fn(u64) -> String) -> String {
    match h.range() {
        Some((min, max)) if min == max => format!("all {}", show(min)),
        Some((min, max)) => format!("{} to {}, median about {}", show(min), show(max), show(h.quantile(0.5))),
        None => "none".into(),
    }
}

fn common(c: &Common) -> String {
    let known: Vec<String> =
        c.above(0.1).iter().take(3).map(|(n, share)| format!("{} {:.0} %", signed(*n), 100.0 * share)).collect();
    if known.is_empty() { "; none is frequent".into() } else { format!("; mostly {}", known.join(", ")) }
}

fn signed(n: i64) -> String {
    if n < 0 { format!("−{}", show_bytes(n.unsigned_abs() as f64)) } else { show_bytes(n as f64) }
}
