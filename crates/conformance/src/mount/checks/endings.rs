//! Requests that fail, are given up, or must at least be answered.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use impresario_base::Random;

use super::super::Op;
use super::{BLOCK_BYTES, CREATE, some_blocks, some_range, verify, verify_all, write};
use crate::mount::{Remote, Site, next_mark, teams};
use crate::stamp::{CELL_BYTES, Image, Stamps};
use crate::{Checking, Stop, during, errno_text, fault, restart};

const EXTENT_BYTES: u64 = 128 << 10;
/// Requests of an agent in a round.
const ROUND_REQUESTS: u64 = 30;
/// Threads of an agent that is killed.
const STORM_THREADS: u32 = 8;
/// Blocks that each agent writes around a restart, at most.
const BLOCKS_MAX: u64 = 16 << 10;

/// Half of the agents make requests that must fail; the others' must not.
pub(super) fn errors(site: &mut Site) -> Checking {
    let files: Vec<_> = (0..3).map(|n| (site.name(&format!("file-{n}")), site.stamps(), site.random(n))).collect();
    let [folder, full, missing, plain] = ["folder", "full", "missing", "plain"].map(|name| site.name(name));
    let mut crew = std::mem::take(&mut site.crew);
    let result = (|| {
        for op in [&folder, &full, &format!("{full}/folder")].map(|name| Op::MakeFolder { name: name.clone() }) {
            crew[0].call(&op, &[])?;
        }
        let slot = crew[0].open(&plain, CREATE)?;
        crew[0].close(slot)?;
        teams(&mut crew, 2, |n, team| {
            let [good, bad] = team else { return Ok(()) };
            let (file, stamps, mut random) = files[n].clone();
            let slot = good.open(&file, CREATE)?;
            let mut image = Image::new(stamps);
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let failing = scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        fail_in_every_way(bad, &folder, &full, &missing, &plain)?;
                    }
                    Ok(())
                });
                let served = loop {
                    let round = (0..ROUND_REQUESTS).try_for_each(|_| {
                        let (offset, len) = some_blocks(&mut random, EXTENT_BYTES, 4);
                        write(good, slot, &mut image, offset, len)?;
                        good.call(&Op::Sync { slot, data_only: true }, &[])?;
                        verify(good, slot, &image, offset, len)
                    });
                    let round = round.and_then(|()| verify_all(good, slot, &image));
                    if round.is_err() || !site.goes_on() {
                        break round;
                    }
                };
                ended.store(true, Ordering::Relaxed);
                let failed = failing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                served.map_err(beside_failing)?;
                failed
            })
        })
    })();
    site.crew = crew;
    result.map(drop)
}

fn beside_failing(stop: Stop) -> Stop {
    match stop {
        Stop::Fail(text) => Stop::Fail(format!("beside requests that fail, {text}")),
        skip => skip,
    }
}

fn fail_in_every_way(agent: &mut Remote, folder: &str, full: &str, missing: &str, plain: &str) -> Checking {
    let open = |name: String, flags| Op::Open { slot: 1 << 20, name, flags, direct: false };
    agent.refused(&open(missing.into(), libc::O_RDWR), &[], &[libc::ENOENT])?;
    agent.refused(&open(plain.into(), CREATE), &[], &[libc::EEXIST])?;
    agent.refused(&open(folder.into(), libc::O_RDWR), &[], &[libc::EISDIR])?;
    agent.refused(&open(format!("{plain}/x"), libc::O_RDWR), &[], &[libc::ENOTDIR])?;
    agent.refused(&Op::MakeFolder { name: folder.into() }, &[], &[libc::EEXIST])?;
    agent.refused(&Op::RemoveFolder { name: full.into() }, &[], &[libc::ENOTEMPTY, libc::EEXIST])?;
    agent.refused(&Op::Unlink { name: missing.into() }, &[], &[libc::ENOENT])?;
    agent.refused(&Op::Rename { from: missing.into(), to: plain.into() }, &[], &[libc::ENOENT])?;
    agent.refused(&Op::Rename { from: folder.into(), to: full.into() }, &[], &[libc::ENOTEMPTY, libc::EEXIST])?;
    agent.refused(&open("x".repeat(300), libc::O_RDWR), &[], &[libc::ENAMETOOLONG])?;
    let slot = agent.open(plain, libc::O_RDONLY)?;
    if !agent.read(slot, 1 << 30, 4096)?.is_empty() {
        return fault(format!("{plain}: a read behind the end returned bytes"));
    }
    agent.close(slot)
}

/// An agent of many threads is killed in the middle of its requests, reads are interrupted by signals, and files are closed
/// while they are written. Neighbours verify their own files all the time.
pub(super) fn cancellation(site: &mut Site) -> Checking {
    for round in 0.. {
        let shared_file = (site.name(&format!("shared-{round}")), site.stamps());
        let own: Vec<_> = (0..site.crew.len() as u64)
            .map(|n| (site.name(&format!("own-{round}-{n}")), site.stamps(), site.random(round * 64 + n)))
            .collect();
        let mut victim = site.agent()?;
        let mut crew = std::mem::take(&mut site.crew);
        let result = cancelled(&mut crew, &mut victim, &shared_file, &own);
        site.crew = crew;
        result?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// A file of one agent: name, stamps, random choices.
type Own = (String, Stamps, Random);

fn cancelled(crew: &mut [Remote], victim: &mut Remote, shared: &(String, Stamps), own: &[Own]) -> Checking {
    let (file, stamps) = shared;
    let slot = crew[0].open(file, CREATE)?;
    crew[0].call(&Op::Truncate { slot, len: EXTENT_BYTES }, &[])?;
    let (run, writer) = (stamps.run, victim.number);
    let (name, threads, extent) = (file.clone(), STORM_THREADS, EXTENT_BYTES);
    victim.call(&Op::Storm { name, threads, extent, run, file: stamps.file, writer }, &[])?;
    let served = AtomicUsize::new(0);
    let neighbours = crew.len();
    std::thread::scope(|scope| {
        let killing = scope.spawn(|| {
            // In the middle of its own work and of everybody's; a neighbour that fails has an end, too.
            while served.load(Ordering::Relaxed) < neighbours {
                std::thread::sleep(Duration::from_millis(1));
            }
            victim.kill()
        });
        let result = teams(crew, 1, |n, team| {
            let done = neighbour(&mut team[0], n, &own[n], file, &served);
            // Failed or not: the killer waits for as many as there are neighbours.
            done.inspect_err(|_| {
                served.fetch_add(neighbours, Ordering::Relaxed);
            })
        });
        let gone = killing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result?;
        if gone {
            return Ok(());
        }
        fault(format!("agent {writer} was killed and does not end: a request that it made is not answered"))
    })?;
    // What is left is of the victim, and nothing comes later.
    let bytes = crew[0].read(slot, 0, EXTENT_BYTES as usize)?;
    for (cell, place) in bytes.chunks(CELL_BYTES).zip((0u64..).step_by(CELL_BYTES)) {
        match stamps.read(cell, place) {
            Ok(mark) if mark.is_none_or(|mark| mark.writer == writer) => {}
            Ok(mark) => return fault(format!("{file}: offset {place}: found {}", crate::stamp::name(mark))),
            Err(found) => return fault(format!("{file}: offset {place}: found {found} after its writer was killed")),
        }
    }
    let mut image = Image::new(*stamps);
    write(&mut crew[0], slot, &mut image, 0, EXTENT_BYTES as usize)?;
    for agent in crew.iter_mut() {
        let slot = agent.open(file, libc::O_RDONLY)?;
        verify_all(agent, slot, &image)?;
        agent.call(&Op::CloseAll, &[])?;
    }
    Ok(())
}

/// What goes on beside a killed process: ordinary requests, interrupted reads, files closed while they are written.
fn neighbour(agent: &mut Remote, n: usize, own: &Own, shared: &str, served: &AtomicUsize) -> Checking {
    let (name, stamps, mut random) = own.clone();
    let mut slot = agent.open(&name, CREATE)?;
    let on_shared = agent.open(shared, libc::O_RDONLY)?;
    let mut image = Image::new(stamps);
    write(agent, slot, &mut image, 0, EXTENT_BYTES as usize)?;
    for request in 0..ROUND_REQUESTS {
        let (offset, len) = some_blocks(&mut random, EXTENT_BYTES, 4);
        match (request + n as u64) % 3 {
            0 => {
                let bytes = agent.call(&Op::Interrupted { slot, offset, len: len as u32 }, &[])?.1;
                let what = format!("{name}: an interrupted read of {len} bytes at {offset}");
                during(&what, image.check(offset, len, &bytes))?;
                agent.read(on_shared, offset, len)?;
            }
            1 => {
                // The answer of a write is a promise even if the file is closed at once.
                write(agent, slot, &mut image, offset, len)?;
                agent.close(slot)?;
                slot = agent.open(&name, libc::O_RDWR)?;
                verify(agent, slot, &image, offset, len)?;
            }
            _ => {
                let mark = next_mark(agent);
                let op = Op::CloseDuring { slot, offset };
                match agent.attempt(&op, &stamps.bytes(mark, offset, len))? {
                    Ok((written, _)) if written == len as u64 => image.set(offset, len, Some(mark)),
                    // Closed before the write began.
                    Err(libc::EBADF) => {}
                    Ok((written, _)) => {
                        return fault(format!("{name}: closed during a write of {len} bytes: {written} written"));
                    }
                    Err(errno) => return fault(format!("{name}: closed during a write: {}", errno_text(errno))),
                }
                slot = agent.open(&name, libc::O_RDWR)?;
                verify(agent, slot, &image, offset, len)?;
            }
        }
        if request == ROUND_REQUESTS / 2 {
            served.fetch_add(1, Ordering::Relaxed);
        }
    }
    verify_all(agent, slot, &image)
}

/// Small requests of all kinds on a few files, beside an agent of many threads; only answers matter.
pub(super) fn completion(site: &mut Site) -> Checking {
    let names: Vec<String> = (0..3).map(|n| site.name(&format!("file-{n}"))).collect();
    let storm = (site.name("storm"), site.stamps());
    let mut busy = site.agent()?;
    let slot = busy.open(&storm.0, CREATE)?;
    busy.call(&Op::Truncate { slot, len: EXTENT_BYTES }, &[])?;
    for name in &names {
        let slot = busy.open(name, CREATE)?;
        busy.close(slot)?;
    }
    let (name, threads, writer) = (storm.0, STORM_THREADS, busy.number);
    let Stamps { run, file } = storm.1;
    busy.call(&Op::Storm { name, threads, extent: EXTENT_BYTES, run, file, writer }, &[])?;
    let mut crew = std::mem::take(&mut site.crew);
    let result = teams(&mut crew, 1, |n, team| {
        let (agent, mut random) = (&mut team[0], site.random(n as u64));
        loop {
            let name = &names[random.below(names.len() as u64) as usize];
            let slot = agent.open(name, libc::O_RDWR)?;
            for _ in 0..ROUND_REQUESTS {
                let (offset, len) = some_range(&mut random, EXTENT_BYTES, 2 * BLOCK_BYTES);
                match random.below(8) {
                    0 => drop(agent.call(&Op::Sync { slot, data_only: false }, &[])?),
                    1 => drop(agent.call(&Op::Truncate { slot, len: offset }, &[])?),
                    2 => drop(agent.size(slot)?),
                    3 | 4 => agent.write(slot, offset, &vec![1; len])?,
                    _ => drop(agent.read(slot, offset, len)?),
                }
            }
            agent.close(slot)?;
            if !site.goes_on() {
                return Ok(());
            }
        }
    });
    site.crew = crew;
    let gone = busy.kill();
    result?;
    if gone {
        return Ok(());
    }
    fault(format!("agent {writer} was killed and does not end: a request that it made is not answered"))
}

/// Each agent writes and syncs block after block while the server is restarted, until one request fails or the server is
/// back. Then every block that was synced must be there.
pub(super) fn shutdown(site: &mut Site) -> Checking {
    let Some(command) = site.restart().map(String::from) else {
        return Err(Stop::Skip("needs --restart COMMAND: what stops the server and starts it again".into()));
    };
    let files: Vec<_> = (0..site.crew.len()).map(|n| (site.name(&format!("file-{n}")), site.stamps())).collect();
    let mut crew = std::mem::take(&mut site.crew);
    let (back, patience) = (AtomicBool::new(false), site.shared.patience);
    let writers = restart::Writers::new(crew.len());
    let result = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| {
            writers.wait();
            let result = restart::run(&command, patience);
            back.store(true, Ordering::Relaxed);
            result
        });
        let synced = teams(&mut crew, 1, |n, team| {
            let ready = restart::Ready(&writers);
            let (name, stamps) = &files[n];
            let mut image = Image::new(*stamps);
            // The restart waits for the first block: what goes wrong until then is not its doing.
            let slot = team[0].open(name, CREATE)?;
            write(&mut team[0], slot, &mut image, 0, BLOCK_BYTES as usize)?;
            team[0].call(&Op::Sync { slot, data_only: false }, &[])?;
            drop(ready);
            for block in 1..BLOCKS_MAX {
                let (mark, offset) = (next_mark(&team[0]), block * BLOCK_BYTES);
                let bytes = stamps.bytes(mark, offset, BLOCK_BYTES as usize);
                let done = team[0].attempt(&Op::Write { slot, offset }, &bytes)? == Ok((BLOCK_BYTES, Vec::new()))
                    && team[0].attempt(&Op::Sync { slot, data_only: false }, &[])?.is_ok();
                if done {
                    image.set(offset, BLOCK_BYTES as usize, Some(mark));
                }
                if !done || back.load(Ordering::Relaxed) {
                    break;
                }
            }
            Ok(image)
        });
        restarting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        synced
    });
    site.crew = crew;
    let images = result?;
    // Descriptors of before may be dead; new processes see the server as it is now.
    for (image, (name, _)) in images.iter().zip(&files) {
        let mut agent = site.agent()?;
        let deadline = Instant::now() + patience;
        let flags = libc::O_RDONLY;
        let slot = loop {
            let op = Op::Open { slot: 1 << 20, name: name.clone(), flags, direct: false };
            match agent.attempt(&op, &[])? {
                Ok(_) => break 1 << 20,
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
                Err(errno) => {
                    return fault(format!(
                        "{name}: {} bytes were synced before the restart; behind it: {}",
                        image.len(),
                        errno_text(errno)
                    ));
                }
            }
        };
        let bytes = agent.read(slot, 0, image.len() as usize)?;
        let what = format!("{name} after the restart, synced before");
        during(&what, image.check(0, image.len() as usize, &bytes))?;
    }
    Ok(())
}
