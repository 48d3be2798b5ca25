//! Requests that fail, connections that end, and answers that must come.

use std::collections::HashMap;

use super::data::{PIPELINED_MAX_BYTES, after, blank, verify, verify_all, write};
use super::link::{DISC, Link, READ, WRITE, describe, succeeded};
use super::{FILL_BYTES, Site};
use crate::stamp::{CELL_BYTES, Stamps};
use crate::{Checking, fault};

const REQUEST_MAX_BYTES: u64 = 32 << 10;
const ROUND_REQUESTS: u64 = 40;
/// Requests in flight when a connection ends.
const IN_FLIGHT: u64 = 16;
/// Connections of the check of completion, and requests in flight on each.
const LINKS: u64 = 4;
const WINDOW: usize = 32;
/// A command that the protocol does not have.
const UNKNOWN_COMMAND: u16 = 999;
/// A length that no server takes in one request: 2 GiB and some.
const OVERSIZE_BYTES: u32 = (2 << 30) + 4096;

/// Requests that must fail among those that must not, on one connection; and sizes and magic numbers after which a server
/// may only close the connection, beside another that goes on.
pub(super) fn errors(site: &mut Site) -> Checking {
    let stamps = site.stamps();
    let mut image = blank(site, stamps);
    let (size, grain) = (site.export.size, site.grain as u32);
    let mut link = site.link()?;
    for round in 0.. {
        let mut random = site.random(round);
        for _ in 0..ROUND_REQUESTS / 4 {
            let mut good: HashMap<u64, String> = HashMap::new();
            let mut bad: HashMap<u64, String> = HashMap::new();
            let wrong = [
                (READ, size, grain),
                (READ, size - u64::from(grain), 2 * grain),
                (WRITE, size, grain),
                (WRITE, u64::MAX - u64::from(grain), grain),
                (UNKNOWN_COMMAND, 0, 0),
            ];
            for (command, offset, len) in wrong {
                let (place, bytes) = site.range(&mut random, REQUEST_MAX_BYTES);
                let mark = site.mark(1);
                let cookie = link.send(WRITE, 0, place, bytes, &stamps.bytes(mark, place, bytes as usize))?;
                image.set(place, bytes as usize, Some(mark));
                good.insert(cookie, describe(WRITE, place, bytes));
                let payload = vec![9; if command == WRITE { len as usize } else { 0 }];
                bad.insert(link.send(command, 0, offset, len, &payload)?, describe(command, offset, len));
            }
            while link.in_flight() > 0 {
                let reply = link.receive()?;
                match (good.get(&reply.cookie), bad.get(&reply.cookie)) {
                    (Some(what), _) => succeeded(&reply, &format!("beside requests that fail, {what}"))?,
                    (_, Some(what)) if reply.error == 0 => {
                        return fault(format!(
                            "{what}, in an export of {size} bytes: expected an error, found success"
                        ));
                    }
                    _ => {}
                }
            }
        }
        verify_all(site, &mut link, &image).map_err(|stop| after(stop, "after requests that failed"))?;
        unanswerable(site, &mut link, &mut image)?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// Requests that end a connection, or get an error; the other connection must not notice.
fn unanswerable(site: &Site, link: &mut Link, image: &mut crate::stamp::Image) -> Checking {
    for (command, what) in [(READ, "an oversize read"), (WRITE, "an oversize write"), (DISC + 100, "a damaged request")]
    {
        let mut victim = site.link()?;
        // The server may have closed the connection already: what counts is the other one.
        let sent = match command {
            READ => victim.send(READ, 0, 0, OVERSIZE_BYTES, &[]).map(drop),
            WRITE => victim.send(WRITE, 0, 0, OVERSIZE_BYTES, &[1; 4096]).map(drop),
            _ => victim.send_raw(&[0xa5; 256]),
        };
        let noticed = write(site, link, image, 1, (0, site.grain as u32), 0)
            .and_then(|()| verify(link, image, (0, site.grain as u32)));
        noticed.map_err(|stop| after(stop, &format!("beside {what} on another connection")))?;
        if command == READ && sent.is_ok() && victim.receive().is_ok_and(|reply| reply.error == 0) {
            return fault(format!("a read of {OVERSIZE_BYTES} bytes in an export of {}: succeeded", site.export.size));
        }
        victim.cut();
    }
    Ok(())
}

/// Connections that break or end politely with writes in flight, beside one that goes on.
pub(super) fn disconnect(site: &mut Site) -> Checking {
    let stamps = site.stamps();
    let half = site.extent / 2 / site.grain * site.grain;
    let mut image = blank(site, stamps);
    let mut link = site.link()?;
    for round in 0.. {
        let mut random = site.random(round);
        // Their writes go to the upper half.
        let piece = (half / IN_FLIGHT / site.grain).clamp(1, 512) * site.grain;
        // Reads that nobody waits for any more.
        let mut victim = site.link()?;
        for n in 0..IN_FLIGHT {
            victim.send(READ, 0, n * piece, piece as u32, &[])?;
        }
        victim.cut();
        for polite in [false, true] {
            let mut victim = site.link()?;
            let mark = site.mark(2);
            for n in 0..IN_FLIGHT {
                let offset = half + n * piece;
                let bytes = stamps.bytes(mark, offset, piece as usize);
                victim.send(WRITE, 0, offset, piece as u32, &bytes)?;
            }
            for _ in 0..4 {
                let offset = random.below(half / site.grain) * site.grain;
                write(site, &mut link, &mut image, 1, (offset, site.grain as u32), 0)?;
            }
            if polite {
                victim.send(DISC, 0, 0, 0, &[])?;
            } else {
                victim.end();
            }
            if !victim.is_closed() {
                let how = if polite { "NBD_CMD_DISC" } else { "the end of the client's stream" };
                return fault(format!("after {how} the server does not close the connection"));
            }
            let at = (half, (IN_FLIGHT * piece) as u32);
            if polite {
                (0..IN_FLIGHT).for_each(|n| image.set(half + n * piece, piece as usize, Some(mark)));
                let checked = verify(&mut site.link()?, &image, at);
                checked.map_err(|stop| after(stop, "in flight before NBD_CMD_DISC and handled before the end"))?;
            } else {
                // Each has happened or not. The server is done with them: nothing comes later.
                whole(&mut link, stamps, at)?;
                write(site, &mut link, &mut image, 1, at, 0)?;
                verify(&mut link, &image, at)?;
            }
        }
        verify(&mut link, &image, (0, half.min(FILL_BYTES) as u32))?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// Whether every cell is of some write.
fn whole(link: &mut Link, stamps: Stamps, at: (u64, u32)) -> Checking {
    let bytes = link.call(READ, 0, at.0, at.1, &[])?;
    for (cell, place) in bytes.chunks(CELL_BYTES).zip((at.0..).step_by(CELL_BYTES)) {
        if let Err(found) = stamps.read(cell, place) {
            return fault(format!("offset {place}: found {found} after a connection had broken during a write"));
        }
    }
    Ok(())
}

/// Many requests of all kinds in flight on several connections; only answers matter.
pub(super) fn completion(site: &mut Site) -> Checking {
    let shared_site: &Site = site;
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..LINKS)
            .map(|n| {
                scope.spawn(move || {
                    let (mut link, mut random) = (shared_site.link()?, shared_site.random(n));
                    loop {
                        for _ in 0..ROUND_REQUESTS * 4 {
                            let (offset, len) = shared_site.range(&mut random, PIPELINED_MAX_BYTES / 2);
                            match random.below(8) {
                                0 if shared_site.export.has(super::link::HAS_FLUSH) => {
                                    link.send(super::link::FLUSH, 0, 0, 0, &[])?
                                }
                                0..4 => link.send(WRITE, 0, offset, len, &vec![1; len as usize])?,
                                _ => link.send(READ, 0, offset, len, &[])?,
                            };
                            if link.in_flight() >= WINDOW {
                                let reply = link.receive()?;
                                succeeded(&reply, "a request among many")?;
                            }
                        }
                        while link.in_flight() > 0 {
                            let reply = link.receive()?;
                            succeeded(&reply, "a request among many")?;
                        }
                        if !shared_site.goes_on() {
                            return Ok(());
                        }
                    }
                })
            })
            .collect();
        let joined: Vec<_> = running.into_iter().map(|one| one.join()).collect();
        joined.into_iter().try_for_each(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
