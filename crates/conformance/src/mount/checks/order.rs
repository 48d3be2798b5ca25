//! The order of fsync and ftruncate among the writes that they cover.

use super::super::Op;
use super::{BLOCK_BYTES, CREATE, some_blocks, verify, verify_all, write};
use crate::mount::{Remote, Site, next_mark, teams};
use crate::stamp::{CELL_BYTES, Image};
use crate::{Checking, Stop, during, fault};

/// Bytes that each writer of a shared file has to itself.
const REGION_BYTES: u64 = 128 << 10;

/// Writers with regions of one file and a process that overwrites one block and syncs all the time; each writer syncs
/// after some writes, and another descriptor must then read them.
pub(super) fn fsync(site: &mut Site) -> Checking {
    let (file, stamps) = (site.name("file"), site.stamps());
    let mut crew = std::mem::take(&mut site.crew);
    let result = (|| {
        let slot = crew[0].open(&file, CREATE)?;
        // One region more than writers, so that none ends with the file.
        let len = REGION_BYTES * (crew.len() as u64 + 1);
        crew[0].call(&Op::Truncate { slot, len }, &[])?;
        let direct = site.direct;
        teams(&mut crew, 1, |n, team| {
            let (agent, mut random) = (&mut team[0], site.random(n as u64));
            let slot = agent.open(&file, libc::O_RDWR)?;
            let reading = agent.open_as(&file, libc::O_RDONLY, direct)?;
            let base = n as u64 * REGION_BYTES;
            let mut image = Image::new(stamps);
            image.set(base, REGION_BYTES as usize, None);
            loop {
                for round in 0..10 {
                    for _ in 0..=random.below(3) {
                        let (offset, len) = match n {
                            0 => (0, BLOCK_BYTES as usize),
                            _ => some_blocks(&mut random, REGION_BYTES, 8),
                        };
                        write(agent, slot, &mut image, base + offset, len)?;
                    }
                    agent.call(&Op::Sync { slot, data_only: round % 2 == 1 }, &[])?;
                    verify(agent, reading, &image, base, REGION_BYTES as usize)?;
                }
                if !site.goes_on() {
                    return Ok(());
                }
            }
        })
    })();
    site.crew = crew;
    result.map(drop)
}

/// Each agent writes a file of its own, syncs it, and reads the file of that name below the mount.
pub(super) fn fsync_below(site: &mut Site) -> Checking {
    let files: Vec<_> = (0..site.crew.len() as u64)
        .map(|n| {
            let name = format!("file-{n}");
            (site.name(&name), site.below(&name), site.stamps(), site.random(n))
        })
        .collect();
    if files.iter().any(|file| file.1.is_none()) {
        return Err(Stop::Skip("needs --below FOLDER: where the server keeps the same files".into()));
    }
    let mut crew = std::mem::take(&mut site.crew);
    let result = teams(&mut crew, 1, |n, team| {
        let agent = &mut team[0];
        let (name, below, stamps, mut random) = files[n].clone();
        let slot = agent.open(&name, CREATE)?;
        let mut image = Image::new(stamps);
        loop {
            for _ in 0..10 {
                let (offset, len) = some_blocks(&mut random, REGION_BYTES, 8);
                write(agent, slot, &mut image, offset, len)?;
                agent.call(&Op::Sync { slot, data_only: false }, &[])?;
                let lower = agent.open(below.as_deref().unwrap_or_default(), libc::O_RDONLY).map_err(behind_fsync)?;
                verify_all(agent, lower, &image).map_err(behind_fsync)?;
                agent.close(lower)?;
            }
            if !site.goes_on() {
                return Ok(());
            }
        }
    });
    site.crew = crew;
    result.map(drop)
}

fn behind_fsync(stop: Stop) -> Stop {
    match stop {
        Stop::Fail(text) => Stop::Fail(format!("after fsync had been answered, {text}")),
        skip => skip,
    }
}

/// Teams of two on a file each: a writes, b cuts, a writes behind the cut; then a write and a cut at the same time, which
/// may take effect in either order, but whole.
pub(super) fn truncate(site: &mut Site) -> Checking {
    let files: Vec<_> = (0..3).map(|n| (site.name(&format!("file-{n}")), site.stamps(), site.random(n))).collect();
    let mut crew = std::mem::take(&mut site.crew);
    let result = teams(&mut crew, 2, |n, team| {
        let [a, b] = team else { return Ok(()) };
        let (name, stamps, mut random) = files[n].clone();
        let (on_a, on_b) = (a.open(&name, CREATE)?, b.open(&name, libc::O_RDWR)?);
        let mut image = Image::new(stamps);
        let cell = CELL_BYTES as u64;
        loop {
            for _ in 0..10 {
                let len = (random.below(15) + 1) * BLOCK_BYTES;
                write(a, on_a, &mut image, 0, len as usize)?;
                let cut = random.below(len / cell) * cell;
                cut_to(b, on_b, &mut image, cut)?;
                verify_all(a, on_a, &image)?;
                let behind = cut + random.below(256) * cell;
                write(a, on_a, &mut image, behind, BLOCK_BYTES as usize)?;
                verify_all(b, on_b, &image)?;
                together(a, on_a, b, on_b, &mut image, &mut random)?;
                // What was cut must not return with the length.
                let longer = image.len() + 2 * BLOCK_BYTES;
                cut_to(b, on_b, &mut image, longer)?;
                verify_all(a, on_a, &image)?;
            }
            if !site.goes_on() {
                return Ok(());
            }
        }
    });
    site.crew = crew;
    result.map(drop)
}

fn cut_to(agent: &mut Remote, slot: u32, image: &mut Image, len: u64) -> Checking {
    agent.call(&Op::Truncate { slot, len }, &[])?;
    image.resize(len);
    Ok(())
}

/// A write over the end of the file and a cut in its middle, at the same time.
fn together(
    a: &mut Remote,
    on_a: u32,
    b: &mut Remote,
    on_b: u32,
    image: &mut Image,
    random: &mut impresario_base::Random,
) -> Checking {
    let cell = CELL_BYTES as u64;
    let offset = random.below(image.len() / cell + 1) * cell;
    let len = 4 * BLOCK_BYTES;
    let cut = offset + (random.below(len / cell - 1) + 1) * cell;
    let mark = next_mark(a);
    let bytes = image.stamps.bytes(mark, offset, len as usize);
    let (wrote, cuts) = std::thread::scope(|scope| {
        let cutting = scope.spawn(|| b.call(&Op::Truncate { slot: on_b, len: cut }, &[]));
        let wrote = a.write(on_a, offset, &bytes);
        (wrote, cutting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    wrote?;
    cuts?;
    let size = b.size(on_b)?;
    let mut cut_last = image.clone();
    cut_last.set(offset, len as usize, Some(mark));
    cut_last.resize(cut);
    let mut written_last = image.clone();
    written_last.resize(cut);
    written_last.set(offset, len as usize, Some(mark));
    *image = match size {
        size if size == cut_last.len() => cut_last,
        size if size == written_last.len() => written_last,
        size => {
            let (name, behind) = (b.name(on_b), written_last.len());
            return fault(format!(
                "{name}: after a write of {len} bytes at {offset} beside a cut to {cut} expected {cut} or {behind} bytes, found {size}"
            ));
        }
    };
    let what = format!("a write of {len} bytes at {offset} beside a cut to {cut}");
    let read = a.read(on_a, 0, image.len() as usize)?;
    during(&what, image.check(0, image.len() as usize, &read))
}
