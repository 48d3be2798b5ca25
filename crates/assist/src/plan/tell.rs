//! A plan in plain words.

use std::fmt::Write;

use impresario_base::units::{show_bytes, show_ns, show_seconds};

use impresario_foresight::{Kind, Pattern};

use super::candidates::Way;
use super::device::Device;
use super::{Expected, Plan, Purpose};
use crate::config::Entry;

/// How it is read, as the beginning of a sentence.
fn reading(p: &Pattern) -> String {
    let mut out = format!("{} reads of about {}", p.reads, show_bytes(p.read_bytes_median as f64));
    match (p.kind(), p.stride) {
        (Kind::Sequential, _) => out += " in order",
        (Kind::Forward, Some((stride, share))) if stride > 0 => {
            out += &format!(", {:.0} % of them {} after the one before", 100.0 * share, show_bytes(stride as f64));
        }
        (Kind::Forward, _) => out += " forward with gaps",
        (Kind::Random, _) => out += " in no order",
    }
    if p.backward > 0 && p.kind() != Kind::Random {
        out += &format!(", {} of them backward, by up to {}", p.backward, show_bytes(p.back_bytes as f64));
    }
    if p.streams > 1 && p.kind() != Kind::Random {
        out += &format!(", at {} places in turn", p.streams);
    }
    if p.processes > 1 {
        out += &format!(", by {} processes", p.processes);
    }
    if p.passes > 1 {
        out += &format!(", {} times over", p.passes);
    }
    out
}

fn gain(e: &Expected) -> String {
    format!(
        "expected {} instead of {} (−{:.0} %), {} device requests instead of {}",
        show_seconds(e.with_s),
        show_seconds(e.without_s),
        100.0 * e.gain(),
        e.requests_with,
        e.requests_without
    )
}

/// Why a hint.
pub fn hint(way: Way, entry: &Entry, p: &Pattern, e: &Expected, device: &Device) -> String {
    let does = match way {
        Way::Window => format!(
            "blocks of {} are brought in {} ahead while the program computes{}",
            show_bytes(entry.block_size as f64),
            entry.read_ahead_size,
            if p.backward > 0 { ", and enough are kept for its jumps back" } else { "" }
        ),
        Way::Region => {
            let region = entry.will_need.first().map_or(0, |r| r.length);
            format!("the {} where they fall are brought in at once, in large requests", show_bytes(region as f64))
        }
        Way::NoReadAhead => {
            format!("the kernel is told not to read {} ahead for nothing", show_bytes(device.read_ahead_bytes as f64))
        }
        Way::Index(format) => {
            format!("the file's own index ({format}) tells which pieces come next, in any file like it")
        }
        Way::Online => "the pieces to come are foreseen from the strides while the program runs".into(),
        Way::Order => {
            "the pieces are brought in ahead in the order of the recorded run, which the next run is taken to \
                       repeat"
                .into()
        }
    };
    format!("{}: {does}; {}.", reading(p), gain(e))
}

/// Why none, though something was tried.
pub fn not_worth(p: &Pattern, e: &Expected, device: &Device) -> String {
    let reason = match () {
        () if p.kind() == Kind::Sequential => {
            format!(
                "the kernel's own read-ahead of {} does for that what can be done",
                show_bytes(device.read_ahead_bytes as f64)
            )
        }
        () if e.without_s - e.bound_s < 0.05 * e.without_s => "the device is busy all the time already".to_string(),
        () => "no hint that was tried helps".to_string(),
    };
    let saves = 1000.0 * (e.without_s - e.with_s).max(0.0);
    format!("{}: {reason} (the best would save {saves:.0} ms, {:.1} %).", reading(p), 100.0 * e.gain())
}

/// Why none, when nothing could be tried.
pub fn nothing_suits(p: &Pattern) -> String {
    format!("{}: no hint suits that.", reading(p))
}

/// What the whole plan is for.
pub fn whole(e: &Expected, device: &str) -> String {
    format!("Whole run: {}; at best {}. Device: {device}.", gain(e), show_seconds(e.bound_s))
}

pub fn text(plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    _ = write(&mut out, plan);
    out
}

/// Files without hints that are told of; the others are only counted.
const PLAIN_FILES_TOLD: usize = 3;

fn write(out: &mut String, plan: &Plan) -> std::fmt::Result {
    let (mut plain, mut untold) = (0, 0);
    for f in &plan.files {
        if f.purpose == Purpose::Program {
            continue;
        }
        if f.entry.is_none() {
            plain += 1;
            if plain > PLAIN_FILES_TOLD {
                untold += 1;
                continue;
            }
        }
        writeln!(out, "{}", f.path)?;
        let p = &f.pattern;
        writeln!(
            out,
            "  {} of {} read, {:.1} times over",
            show_bytes(p.unique_bytes as f64),
            show_bytes(p.size_bytes as f64),
            p.reuse()
        )?;
        if p.parts.len() > 1 {
            for part in &p.parts {
                let (from, to) = (show_bytes(part.bytes.start as f64), show_bytes(part.bytes.end as f64));
                writeln!(out, "  {from} to {to}: {} reads {}", part.reads, part.kind.words())?;
            }
        }
        if p.phases.len() > 1 {
            let times: Vec<String> = p
                .phases
                .iter()
                .map(|ph| format!("region {} from {}", ph.part + 1, show_ns(ph.from_ns as f64)))
                .collect();
            writeln!(out, "  phases: {}", times.join(", "))?;
        }
        let verdict = if f.entry.is_some() { "hint" } else { "no hint" };
        if plan.refused.as_ref() != Some(&f.why) {
            writeln!(out, "  {verdict}: {}", f.why)?;
        }
    }
    if untold > 0 {
        writeln!(out, "{untold} other files: no hint (--json tells of all)")?;
    }
    match (&plan.refused, &plan.expected) {
        (Some(reason), _) => writeln!(out, "No hints: {reason}"),
        (None, Some(expected)) => writeln!(out, "{}", whole(expected, &plan.device)),
        (None, None) => Ok(()),
    }
}
