//! What `strace -f -ttt -T` prints: requests with times and durations. Best recorded as
//! `strace -f -ttt -T -y -e trace=desc,file,process -o FILE PROGRAM`.
//!
//! Descriptors are followed through open, dup, fork, exec and close, and positions through reads, writes and seeks, so
//! that calls without an offset get theirs. With `-y`, paths are also known for descriptors opened before the
//! recording.

mod call;
mod errno;
mod world;

use std::io::BufRead;
use std::path::Path;

use rustc_hash::FxHashMap;

use super::lines::{Lines, seconds_ns, show};
use crate::{Builder, Header, Trace, TraceError};
use call::Call;
use world::World;

/// Maximum calls in progress; a program has one per thread.
const UNFINISHED_MAX: usize = 1 << 16;

/// One line, split into what precedes the call and the call.
struct Line<'a> {
    thread: u32,
    /// Since 1970.
    at_ns: u64,
    rest: &'a [u8],
}

pub fn read(input: impl BufRead, path: &Path, notes: &mut Vec<String>) -> Result<Trace, TraceError> {
    let mut builder = Builder::new(Header { source: "strace".into(), ..Header::default() });
    let mut world = World::default();
    let mut lines = Lines::new(input, path);
    let mut unfinished: FxHashMap<u32, (u64, Vec<u8>)> = FxHashMap::default();
    while let Some((number, line)) = lines.next_line()? {
        if line.is_empty() {
            continue;
        }
        let mut take = || -> Result<(), String> {
            let Line { thread, at_ns, rest } = split(line)?;
            // The first line's; no call begins before it.
            let zero = *builder.header.clock_unix_ns.get_or_insert(at_ns);
            let at_ns = at_ns.saturating_sub(zero);
            if rest.starts_with(b"---") {
                return Ok(());
            }
            if rest.starts_with(b"+++") {
                unfinished.remove(&thread);
                world.exited(thread);
                return Ok(());
            }
            if let Some(begun) = rest.strip_suffix(b"<unfinished ...>") {
                if unfinished.len() >= UNFINISHED_MAX {
                    return Err(format!("more than {UNFINISHED_MAX} calls have begun and not ended"));
                }
                world.begins(thread, begun);
                unfinished.insert(thread, (at_ns, begun.to_vec()));
                return Ok(());
            }
            let (at_ns, whole) = match resumed(rest) {
                None => (at_ns, None),
                Some(tail) => match unfinished.remove(&thread) {
                    Some((begun_ns, mut whole)) => {
                        whole.extend_from_slice(tail);
                        (begun_ns, Some(whole))
                    }
                    // It began before the recording.
                    None => return Ok(()),
                },
            };
            let call = Call::parse(whole.as_deref().unwrap_or(rest))?;
            world.call(&mut builder, thread, at_ns, &call)
        };
        let told = take();
        told.map_err(|reason| TraceError::line(path, number, reason))?;
    }
    if builder.is_empty() {
        let reason = "it holds no read or write of a file; record with strace -f -ttt -T -y -e trace=desc,file,process";
        return Err(TraceError::file(path, reason));
    }
    notes.extend(world.notes());
    Ok(builder.build())
}

/// A line that strace could have written.
pub fn is_line(line: &str) -> bool {
    split(line.as_bytes()).is_ok()
}

fn split(line: &[u8]) -> Result<Line<'_>, String> {
    let shown = || show(&String::from_utf8_lossy(line));
    let word = |line: &[u8]| -> (Vec<u8>, usize) {
        let begin = line.iter().take_while(|b| **b == b' ').count();
        let len = line[begin..].iter().take_while(|b| **b != b' ').count();
        (line[begin..begin + len].to_vec(), begin + len)
    };
    let mut rest = line;
    let mut thread = 0;
    // "[pid 123] " on a terminal, "123 " in a file, nothing without -f.
    if let Some(after) = rest.strip_prefix(b"[pid") {
        let close = after.iter().position(|b| *b == b']').ok_or_else(|| format!("{} has no ]", shown()))?;
        let pid = String::from_utf8_lossy(&after[..close]).trim().to_string();
        thread = pid.parse().map_err(|_| format!("{} is not a valid process", show(&pid)))?;
        rest = &after[close + 1..];
    } else {
        let (first, used) = word(rest);
        if first.iter().all(u8::is_ascii_digit) {
            let first = String::from_utf8_lossy(&first).into_owned();
            thread = first.parse().map_err(|_| format!("{} is not a valid process or time", show(&first)))?;
            rest = &rest[used..];
        }
    }
    let (time, used) = word(rest);
    let time = String::from_utf8_lossy(&time).into_owned();
    let at_ns = seconds_ns(&time).filter(|_| time.contains('.')).ok_or_else(|| {
        format!("{} is not a valid time in seconds since 1970; record with strace -ttt -T", show(&time))
    })?;
    let rest = &rest[used..];
    let spaces = rest.iter().take_while(|b| **b == b' ').count();
    Ok(Line { thread, at_ns, rest: rest[spaces..].trim_ascii_end() })
}

/// What follows `<... name resumed>`.
fn resumed(rest: &[u8]) -> Option<&[u8]> {
    let after = rest.strip_prefix(b"<... ")?;
    let end = after.windows(9).position(|w| w == b" resumed>")?;
    Some(&after[end + 9..])
}
