//! Hints that may suit a file, by how it is read. Which of them pays, the replay decides.

use impresario_foresight::{Kind, Part, Pattern, Run};

use crate::config::{Entry, Region};

use super::Options;

/// Pieces of a `Sequence` at most: the hints file must stay readable.
const PIECES_MAX: usize = 20_000;

/// What kind of hints a candidate is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// A window of blocks moves ahead of the program.
    Window,
    /// A region that is read in no order is brought in as a whole.
    Region,
    /// The kernel is told not to read ahead.
    NoReadAhead,
    /// The pieces, in the order of this run.
    Order,
    /// The manager finds the strides by itself.
    Online,
    /// The manager reads the file's own index, which is of this format.
    Index(&'static str),
}

/// Hints to be tried.
pub struct Candidate {
    pub way: Way,
    pub entry: Entry,
}

/// All that may suit. `index` is the format of the file's own index, if it has one.
pub fn candidates(
    path: &str,
    run: &Run,
    file: usize,
    pattern: &Pattern,
    index: Option<&'static str>,
    options: &Options,
) -> Vec<Candidate> {
    let (device, window_bytes_max) = (&options.device, options.window_bytes_max);
    let mut found = Vec::new();
    let of = |want: &dyn Fn(&Part) -> bool| -> Vec<Region> {
        let all = pattern.parts.iter().all(want);
        if all && !pattern.parts.is_empty() {
            return vec![Region::WHOLE];
        }
        pattern.parts.iter().filter(|p| want(p)).map(|p| Region::of(p.bytes.clone())).collect()
    };
    let forward = of(&|p| p.kind != Kind::Random);
    let random = of(&|p| p.kind == Kind::Random);
    let new = || Entry::new(path);
    // Blocks of a size that the kernel takes in one call are not split.
    let mut blocks = vec![256 << 10, 1 << 20, 4 << 20, 16 << 20];
    let whole_call = device.hint_bytes_max() / 4096 * 4096;
    if (64 << 10..=16 << 20).contains(&whole_call) && !blocks.contains(&whole_call) {
        blocks.push(whole_call);
    }
    blocks.retain(|b| *b <= window_bytes_max / 2 && (*b <= pattern.size_bytes.max(1 << 20)));
    // Nor is what the program reads in one piece.
    if blocks.iter().any(|b| *b >= pattern.read_bytes_median) {
        blocks.retain(|b| *b >= pattern.read_bytes_median);
    }
    for moving in [&forward, &vec![Region::WHOLE]] {
        if moving.is_empty() || moving == &vec![Region::WHOLE] && forward.is_empty() && pattern.parts.len() > 1 {
            continue;
        }
        for &block_size in &blocks {
            for ahead_bytes in [2u64 << 20, 8 << 20, 32 << 20] {
                let read_ahead_size = (ahead_bytes / block_size).clamp(2, 1 << 10);
                // Room for what lies behind, so that jumps back cost nothing, and for each stream.
                let behind = pattern.back_bytes.min(window_bytes_max) / block_size + 2;
                let each = read_ahead_size + behind;
                let cache_size = (each * pattern.streams.clamp(1, 8)).min(window_bytes_max / block_size);
                if cache_size < read_ahead_size + 1 {
                    continue;
                }
                let entry = Entry { block_size, cache_size, read_ahead_size, will_need: moving.clone(), ..new() };
                found.push(Candidate { way: Way::Window, entry });
            }
        }
        if moving == &vec![Region::WHOLE] {
            break;
        }
    }
    // A hot region that fits: from the first read in it on, all of it is brought in.
    for part in pattern.parts.iter().filter(|p| p.kind == Kind::Random) {
        let len = part.bytes.end - part.bytes.start;
        let block_size = 4u64 << 20;
        let count = len.div_ceil(block_size) + 1;
        if len > window_bytes_max || count > 1 << 15 {
            continue;
        }
        let will_need = vec![Region::of(part.bytes.clone())];
        let entry = Entry { block_size, cache_size: 2 * count, read_ahead_size: count, will_need, ..new() };
        found.push(Candidate { way: Way::Region, entry });
    }
    if !random.is_empty() {
        found.push(Candidate { way: Way::NoReadAhead, entry: Entry { random: random.clone(), ..new() } });
    }
    // Where most of the file is passed over, blocks bring in too much: the pieces alone, foreseen from their strides.
    let sparse = pattern.unique_bytes < pattern.size_bytes / 2;
    let is_sparse_forward = sparse && pattern.kind() == Kind::Forward;
    if is_sparse_forward || index.is_some() {
        let way = index.map_or(Way::Online, Way::Index);
        found.push(Candidate { way, entry: Entry { online: true, ..new() } });
    }
    // The order of this run, where the file's order says nothing or little is read of it, and one thread reads it.
    if (pattern.kind() == Kind::Random || sparse)
        && pattern.processes == 1
        && let Some(sequence) = order(run, file)
    {
        let block_size = (pattern.read_bytes_median.next_power_of_two()).clamp(256 << 10, 1 << 20);
        let entry = Entry { block_size, cache_size: 24, read_ahead_size: 16, sequence, ..new() };
        found.push(Candidate { way: Way::Order, entry });
    }
    found
}

/// The pieces in the order of reading; `None` when they are too many.
fn order(run: &Run, file: usize) -> Option<Vec<Region>> {
    let mut reading = run.threads.iter().filter(|t| t.reads.iter().any(|a| a.file == file));
    let thread = reading.next()?;
    if reading.next().is_some() {
        return None;
    }
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for access in thread.reads.iter().filter(|a| a.file == file) {
        let (start, end) = (access.bytes.start, access.bytes.end);
        match pieces.last_mut() {
            Some((_, last_end)) if *last_end == start => *last_end = end,
            _ => pieces.push((start, end)),
        }
        if pieces.len() > PIECES_MAX {
            return None;
        }
    }
    Some(pieces.into_iter().map(|(start, end)| Region::of(start..end)).collect())
}
