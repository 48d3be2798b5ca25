//! Reads and writes of shared files.

use super::{BLOCK_BYTES, CREATE, WRITE_MAX_BYTES, some_blocks, some_range, verify, verify_all, write};
use crate::history::{History, Seen, Written};
use crate::mount::{Site, next_mark, teams};
use crate::stamp::{CELL_BYTES, Image, Mark};
use crate::{Checking, fault};

/// Bytes of a file of these checks.
const EXTENT_BYTES: u64 = 256 << 10;
/// Requests of each agent in a round.
const ROUND_REQUESTS: u64 = 40;

/// Teams of a writer and a reader, each with a file: after each write the writer reads it through a second descriptor and
/// the reader in its own process, with and without the page cache.
pub(super) fn read_after_write(site: &mut Site) -> Checking {
    let files: Vec<_> = (0..3).map(|n| (site.name(&format!("file-{n}")), site.stamps(), site.random(n))).collect();
    let (mut crew, direct) = (std::mem::take(&mut site.crew), site.direct);
    let result = teams(&mut crew, 2, |n, team| {
        let [writer, reader] = team else { return Ok(()) };
        let (name, stamps, mut random) = files[n].clone();
        let slot = writer.open(&name, CREATE)?;
        let again = writer.open(&name, libc::O_RDONLY)?;
        let mut readers = vec![reader.open(&name, libc::O_RDONLY)?];
        if direct {
            readers.push(reader.open_as(&name, libc::O_RDONLY, true)?);
        }
        let mut image = Image::new(stamps);
        loop {
            for _ in 0..ROUND_REQUESTS {
                let (offset, len) = some_blocks(&mut random, EXTENT_BYTES, 8);
                write(writer, slot, &mut image, offset, len)?;
                verify(writer, again, &image, offset, len)?;
                for &slot in &readers {
                    verify(reader, slot, &image, offset, len)?;
                }
                let (offset, len) = some_blocks(&mut random, EXTENT_BYTES, 8);
                verify(reader, readers[0], &image, offset, len)?;
            }
            verify_all(reader, readers[0], &image)?;
            if !site.goes_on() {
                return Ok(());
            }
        }
    });
    site.crew = crew;
    result.map(drop)
}

/// All agents write ranges around one common range at the same time. Afterwards all of them must read the same bytes, and
/// the common range must be of one write. Then each overwrites a part of what the one before it has written.
pub(super) fn overlapping_writes(site: &mut Site) -> Checking {
    let (file, stamps, mut random) = (site.name("file"), site.stamps(), site.random(0));
    let mut crew = std::mem::take(&mut site.crew);
    let result = (|| {
        let mut slots = vec![crew[0].open(&file, CREATE)?];
        for agent in &mut crew[1..] {
            slots.push(agent.open(&file, libc::O_RDWR)?);
        }
        let mut image = Image::new(stamps);
        write(&mut crew[0], slots[0], &mut image, 0, EXTENT_BYTES as usize)?;
        loop {
            let cell = CELL_BYTES as u64;
            let margin = 8 << 10;
            let (start, len) = some_range(&mut random, EXTENT_BYTES - 2 * margin, WRITE_MAX_BYTES - 2 * margin);
            let core = (start + margin, len);
            let ranges: Vec<(u64, usize)> = crew
                .iter()
                .map(|_| {
                    let (left, right) = (random.below(margin / cell) * cell, random.below(margin / cell) * cell);
                    (core.0 - left, core.1 + (left + right) as usize)
                })
                .collect();
            let marks = teams(&mut crew, 1, |n, team| {
                let (mark, (offset, len)) = (next_mark(&team[0]), ranges[n]);
                team[0].write(slots[n], offset, &stamps.bytes(mark, offset, len))?;
                Ok(mark)
            })?;
            let window = (start, len + 2 * margin as usize);
            let reads = teams(&mut crew, 1, |n, team| team[0].read(slots[n], window.0, window.1))?;
            for (n, bytes) in reads.iter().enumerate() {
                if let Some(at) = (0..bytes.len().max(reads[0].len())).find(|&i| bytes.get(i) != reads[0].get(i)) {
                    let (one, other) = (crew[0].number, crew[n].number);
                    return fault(format!(
                        "offset {}: after all writes had been answered agents {one} and {other} read different bytes",
                        window.0 + at as u64
                    ));
                }
            }
            settle(&mut image, window.0, &reads[0], &ranges, &marks, core)?;

            // One after the other: the last reply wins.
            for (n, agent) in crew.iter_mut().enumerate() {
                let cut = random.below(core.1 as u64 / cell) * cell;
                write(agent, slots[n], &mut image, core.0 + cut, core.1 - cut as usize)?;
            }
            for (n, agent) in crew.iter_mut().enumerate() {
                verify(agent, slots[n], &image, window.0, window.1)?;
            }
            if !site.goes_on() {
                return verify_all(&mut crew[0], slots[0], &image);
            }
        }
    })();
    site.crew = crew;
    result
}

/// Takes over what concurrent writes have left, if they may leave it.
fn settle(
    image: &mut Image,
    start: u64,
    bytes: &[u8],
    ranges: &[(u64, usize)],
    marks: &[Mark],
    core: (u64, usize),
) -> Checking {
    let (stamps, mut first) = (image.stamps, None);
    for (n, cell) in bytes.chunks(CELL_BYTES).enumerate() {
        let place = start + (n * CELL_BYTES) as u64;
        let covers = |range: &(u64, usize)| range.0 <= place && place < range.0 + range.1 as u64;
        let candidates: Vec<Mark> =
            ranges.iter().zip(marks).filter(|(range, _)| covers(range)).map(|(_, &mark)| mark).collect();
        if candidates.is_empty() {
            image.check(place, cell.len(), cell).or_else(|text| fault(format!("beside the writes: {text}")))?;
            continue;
        }
        let allowed = || candidates.iter().map(Mark::to_string).collect::<Vec<_>>().join(" or ");
        let found = stamps.read(cell, place).ok().flatten().filter(|mark| candidates.contains(mark));
        let Some(found) = found else {
            let seen = stamps.describe(cell, place);
            return fault(format!("offset {place}: expected {}, found {seen}", allowed()));
        };
        if covers(&core) {
            let first = *first.get_or_insert(found);
            if first != found {
                return fault(format!(
                    "offset {place}: {found}, but {first} at {}: writes of both whole ranges are mixed",
                    core.0
                ));
            }
        }
        image.set(place, CELL_BYTES, Some(found));
    }
    Ok(())
}

/// All agents read and write random ranges of one file; each read is compared with the writes that it may return.
pub(super) fn bytes(site: &mut Site) -> Checking {
    let (file, stamps) = (site.name("file"), site.stamps());
    let mut crew = std::mem::take(&mut site.crew);
    let shared = site.shared.clone();
    let result = (|| {
        let first = crew[0].open(&file, CREATE)?;
        crew[0].call(&super::super::Op::Truncate { slot: first, len: EXTENT_BYTES }, &[])?;
        let mut slots = Vec::new();
        for agent in &mut crew {
            slots.push(agent.open(&file, libc::O_RDWR)?);
        }
        let mut before = vec![None; EXTENT_BYTES as usize / CELL_BYTES];
        for round in 0.. {
            let logs = teams(&mut crew, 1, |n, team| {
                let mut random = site.random(round * 64 + n as u64);
                let (mut writes, mut reads) = (Vec::new(), Vec::new());
                for _ in 0..ROUND_REQUESTS {
                    let (offset, len) = some_range(&mut random, EXTENT_BYTES, WRITE_MAX_BYTES / 2);
                    if random.below(2) == 0 {
                        let mark = next_mark(&team[0]);
                        let invoked = shared.tick();
                        team[0].write(slots[n], offset, &stamps.bytes(mark, offset, len))?;
                        let acknowledged = Some(shared.tick());
                        writes.push(Written { mark: Some(mark), offset, len, invoked, acknowledged });
                    } else {
                        let invoked = shared.tick();
                        let bytes = team[0].read(slots[n], offset, len)?;
                        if bytes.len() != len {
                            return fault(format!("read of {len} bytes at {offset}: found {}", bytes.len()));
                        }
                        reads.push(Seen { reader: team[0].number, offset, bytes, invoked, ended: shared.tick() });
                    }
                }
                Ok((writes, reads))
            })?;
            let (mut writes, mut reads) = (Vec::new(), Vec::new());
            logs.into_iter().for_each(|(w, r)| {
                writes.extend(w);
                reads.extend(r);
            });
            let history = History { stamps, before, writes };
            let invoked = shared.tick();
            let bytes = crew[0].read(slots[0], 0, EXTENT_BYTES as usize + BLOCK_BYTES as usize)?;
            if bytes.len() as u64 != EXTENT_BYTES {
                return fault(format!("{file}: expected {EXTENT_BYTES} bytes, found {}", bytes.len()));
            }
            let last = Seen { reader: crew[0].number, offset: 0, bytes, invoked, ended: shared.tick() };
            for seen in reads.iter().chain([&last]) {
                history.check(seen).or_else(|text| fault(format!("agent {}: {text}", seen.reader)))?;
            }
            before = last
                .bytes
                .chunks(CELL_BYTES)
                .zip((0..).step_by(CELL_BYTES))
                .map(|(cell, place)| stamps.read(cell, place))
                .collect::<Result<_, _>>()
                .or_else(|found| fault(format!("with no write in flight a cell is mixed: {found}")))?;
            if !site.goes_on() {
                break;
            }
        }
        Ok(())
    })();
    site.crew = crew;
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Stop;
    use crate::stamp::Stamps;

    #[test]
    fn mixed_writes_are_told_from_whole_ones() {
        let stamps = Stamps { run: 1, file: 1 };
        let [one, two] = [1, 2].map(|writer| Mark { writer, sequence: 1 });
        let ranges = [(0, 256), (64, 192)];
        let settled = |bytes: &[u8]| {
            let mut image = Image::new(stamps);
            image.set(0, 256, None);
            settle(&mut image, 0, bytes, &ranges, &[one, two], (64, 192)).map(|()| image)
        };
        let mut bytes = stamps.bytes(one, 0, 256);
        assert!(settled(&bytes).is_ok());
        bytes[64..].copy_from_slice(&stamps.bytes(two, 64, 192));
        assert_eq!(settled(&bytes).unwrap().check(0, 256, &bytes), Ok(()));
        bytes[128..160].copy_from_slice(&stamps.cell(Some(one), 128));
        let Err(Stop::Fail(said)) = settled(&bytes) else { panic!("mixed") };
        assert!(said.contains("offset 128: writer 1's write 1, but writer 2's write 1 at 64"), "{said}");
        bytes[0] ^= 1;
        assert!(settled(&bytes).is_err());
    }
}
