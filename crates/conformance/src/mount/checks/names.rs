//! Which file a request belongs to: appends, renamed and removed files.

use std::collections::HashMap;

use super::super::Op;
use super::{BLOCK_BYTES, CREATE, some_blocks, verify_all, write};
use crate::mount::{Site, next_mark, teams};
use crate::stamp::{CELL_BYTES, Image, Mark};
use crate::{Checking, fault};

const EXTENT_BYTES: u64 = 64 << 10;
/// Records that each agent appends in a round.
const RECORDS: u64 = 25;
/// Cells of the longest record.
const RECORD_CELLS_MAX: u64 = 16;

/// All agents append records; stamps count the cells of a record, so that its parts are known wherever it lands.
pub(super) fn append(site: &mut Site) -> Checking {
    let mut crew = std::mem::take(&mut site.crew);
    let result = (|| {
        for round in 0.. {
            let (file, stamps) = (site.name(&format!("file-{round}")), site.stamps());
            let slot = crew[0].open(&file, CREATE)?;
            let written = teams(&mut crew, 1, |n, team| {
                let (agent, mut random) = (&mut team[0], site.random(round * 64 + n as u64));
                let slot = agent.open(&file, libc::O_WRONLY | libc::O_APPEND)?;
                let mut records = Vec::new();
                for _ in 0..RECORDS {
                    let (mark, len) = (next_mark(agent), (random.below(RECORD_CELLS_MAX) + 1) as usize * CELL_BYTES);
                    let (got, _) = agent.call(&Op::Append { slot }, &stamps.bytes(mark, 0, len))?;
                    if got != len as u64 {
                        return fault(format!("append of {len} bytes to {file}: wrote {got}"));
                    }
                    records.push((mark, len));
                }
                Ok(records)
            })?;
            let expected: HashMap<Mark, usize> = written.into_iter().flatten().collect();
            let total: usize = expected.values().sum();
            let bytes = crew[0].read(slot, 0, total + BLOCK_BYTES as usize)?;
            records_are_whole(&bytes, expected, |cell, place| stamps.read(cell, place), &file)?;
            if !site.goes_on() {
                break;
            }
        }
        Ok(())
    })();
    site.crew = crew;
    result
}

fn records_are_whole(
    bytes: &[u8],
    mut expected: HashMap<Mark, usize>,
    read: impl Fn(&[u8], u64) -> Result<Option<Mark>, String>,
    file: &str,
) -> Checking {
    let mut latest: HashMap<u32, u64> = HashMap::new();
    let mut at = 0;
    while at < bytes.len() {
        let first = bytes[at..].chunks(CELL_BYTES).next().unwrap_or_default();
        let mark = match read(first, 0) {
            Ok(Some(mark)) => mark,
            Ok(None) => return fault(format!("{file}: offset {at}: expected the start of a record, found zeros")),
            Err(found) => return fault(format!("{file}: offset {at}: expected the start of a record, found {found}")),
        };
        let Some(len) = expected.remove(&mark) else {
            return fault(format!("{file}: offset {at}: {mark} is there twice, or was never made"));
        };
        if latest.insert(mark.writer, mark.sequence).is_some_and(|before| before > mark.sequence) {
            return fault(format!("{file}: offset {at}: {mark} stands behind a later one of its writer"));
        }
        for place in (0..len).step_by(CELL_BYTES) {
            let end = (at + place + CELL_BYTES).min(bytes.len());
            let cell = &bytes[(at + place).min(end)..end];
            if read(cell, place as u64) != Ok(Some(mark)) {
                return fault(format!("{file}: offset {}: {mark} is cut off by other bytes", at + place));
            }
        }
        at += len;
    }
    match expected.keys().next() {
        Some(mark) => fault(format!("{file}: {mark} was acknowledged and is missing; {} records are", expected.len())),
        None => Ok(()),
    }
}

/// Teams of two: while a writes through its descriptor, b renames the file and makes a new one of its name; then a file is
/// renamed over another one that is open.
pub(super) fn rename(site: &mut Site) -> Checking {
    change_names(site, |old, new| vec![Op::Rename { from: old.into(), to: new.into() }])
}

/// The same with a file that is removed.
pub(super) fn unlink(site: &mut Site) -> Checking {
    change_names(site, |old, _| vec![Op::Unlink { name: old.into() }])
}

fn change_names(site: &mut Site, change: impl Fn(&str, &str) -> Vec<Op> + Sync) -> Checking {
    let mut stamps: Vec<[_; 2]> = Vec::new();
    let mut crew = std::mem::take(&mut site.crew);
    let mut rounds = 0;
    let result = loop {
        stamps.clear();
        stamps.extend((0..3).map(|_| [site.stamps(), site.stamps()]));
        let name = |n: u64, what: &str| site.name(&format!("{what}-{n}-{rounds}"));
        let result = teams(&mut crew, 2, |n, team| {
            let [a, b] = team else { return Ok(()) };
            let mut random = site.random(rounds * 64 + n as u64);
            let (file, moved) = (name(n as u64, "file"), name(n as u64, "moved"));
            let (mut first, mut second) = (Image::new(stamps[n][0]), Image::new(stamps[n][1]));
            let on_first = a.open(&file, CREATE)?;
            write(a, on_first, &mut first, 0, EXTENT_BYTES as usize)?;
            // One in flight all the time while names change.
            let mut writing = random.clone();
            let second_slot = std::thread::scope(|scope| {
                let changing = scope.spawn(|| {
                    for op in change(&file, &moved) {
                        b.call(&op, &[])?;
                    }
                    let slot = b.open(&file, CREATE)?;
                    write(b, slot, &mut second, 0, EXTENT_BYTES as usize / 2)?;
                    Ok(slot)
                });
                let wrote = (0..20).try_for_each(|_| {
                    let (offset, len) = some_blocks(&mut writing, EXTENT_BYTES, 4);
                    write(a, on_first, &mut first, offset, len)
                });
                let slot = changing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                wrote.and(slot)
            })?;
            // Both again, with the new names in place.
            for _ in 0..5 {
                let (offset, len) = some_blocks(&mut random, EXTENT_BYTES, 4);
                write(a, on_first, &mut first, offset, len)?;
                let (offset, len) = some_blocks(&mut random, EXTENT_BYTES / 2, 4);
                write(b, second_slot, &mut second, offset, len)?;
            }
            a.call(&Op::Sync { slot: on_first, data_only: false }, &[])?;
            verify_all(a, on_first, &first)?;
            verify_all(b, second_slot, &second)?;
            let by_name = a.open(&file, libc::O_RDONLY)?;
            verify_all(a, by_name, &second)?;
            if matches!(change(&file, &moved).first(), Some(Op::Rename { .. })) {
                let by_name = b.open(&moved, libc::O_RDWR)?;
                verify_all(b, by_name, &first)?;
                // Over an open file: its descriptor keeps its contents.
                a.call(&Op::Rename { from: file.clone(), to: moved.clone() }, &[])?;
                write(a, on_first, &mut first, 0, BLOCK_BYTES as usize)?;
                verify_all(b, by_name, &first)?;
                let now = a.open(&moved, libc::O_RDONLY)?;
                verify_all(a, now, &second)?;
                a.refused(&Op::Stat { name: file }, &[], &[libc::ENOENT])?;
            }
            for agent in [a, b] {
                agent.call(&Op::CloseAll, &[])?;
            }
            Ok(())
        });
        rounds += 1;
        if result.is_err() || !site.goes_on() {
            break result;
        }
    };
    site.crew = crew;
    result.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Stop;
    use crate::stamp::Stamps;

    #[test]
    fn appended_records_must_be_whole_once_and_in_order() {
        let stamps = Stamps { run: 1, file: 1 };
        let marks = [(1, 1), (1, 2), (2, 3)].map(|(writer, sequence)| Mark { writer, sequence });
        let record = |n: usize| stamps.bytes(marks[n], 0, 64);
        let said = |order: &[usize], cut: usize| {
            let mut bytes: Vec<u8> = order.iter().flat_map(|&n| record(n)).collect();
            bytes.truncate(bytes.len() - cut);
            let expected = marks.iter().map(|&mark| (mark, 64)).collect();
            match records_are_whole(&bytes, expected, |cell, place| stamps.read(cell, place), "f") {
                Err(Stop::Fail(text)) => text,
                other => format!("{other:?}"),
            }
        };
        assert_eq!(said(&[0, 2, 1], 0), "Ok(())");
        assert!(said(&[1, 2, 0], 0).contains("behind a later one"));
        assert!(said(&[0, 2], 0).contains("missing"));
        assert!(said(&[0, 2, 1, 1], 0).contains("twice"));
        assert!(said(&[0, 2, 1], 24).contains("cut off"));
    }
}
