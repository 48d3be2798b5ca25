//! Reads and writes of blocks.

use std::collections::HashMap;

use super::link::{
    HAS_TRIM, HAS_WRITE_ZEROES, Link, MULTI_CONN, READ, Reply, TRIM, WRITE, WRITE_ZEROES, describe, succeeded,
};
use super::{EXTENT_BYTES, FILL_BYTES, Site};
use crate::history::{History, Seen, Written};
use crate::stamp::{CELL_BYTES, Image, Mark, Stamps};
use crate::{Checking, Stop, during, fault};

/// Largest request, bytes.
const REQUEST_MAX_BYTES: u64 = 64 << 10;
/// Largest request among many in flight, bytes. The replies to a window of them fit a socket's buffers, so that a server
/// that replies before it receives the next request and a client that sends before it receives do not wait for each other.
pub(super) const PIPELINED_MAX_BYTES: u64 = 4096;
/// Requests in a round.
const ROUND_REQUESTS: u64 = 60;
/// Requests in flight on a connection.
const WINDOW: usize = 16;
/// Connections of the checks with several, where the server coordinates them.
const LINKS: u32 = 4;

/// A write that is recorded, with its reply.
pub(super) fn write(
    site: &Site,
    link: &mut Link,
    image: &mut Image,
    writer: u32,
    at: (u64, u32),
    flags: u16,
) -> Checking {
    let (mark, (offset, len)) = (site.mark(writer), at);
    link.call(WRITE, flags, offset, len, &image.stamps.bytes(mark, offset, len as usize))?;
    image.set(offset, len as usize, Some(mark));
    Ok(())
}

/// A read that is compared.
pub(super) fn verify(link: &mut Link, image: &Image, at: (u64, u32)) -> Checking {
    let bytes = link.call(READ, 0, at.0, at.1, &[])?;
    during(&describe(READ, at.0, at.1), image.check(at.0, at.1 as usize, &bytes))
}

/// Compares the whole extent.
pub(super) fn verify_all(site: &Site, link: &mut Link, image: &Image) -> Checking {
    (0..site.extent).step_by(FILL_BYTES as usize).try_for_each(|offset| {
        let len = FILL_BYTES.min(site.extent - offset) as u32;
        verify(link, image, (offset, len))
    })
}

/// Zeros as a check finds them.
pub(super) fn blank(site: &Site, stamps: Stamps) -> Image {
    let mut image = Image::new(stamps);
    image.resize(site.extent);
    image
}

/// Sequential requests of one connection; after a flush a new one reads the same.
pub(super) fn read_after_write(site: &mut Site) -> Checking {
    let stamps = site.stamps();
    let mut image = blank(site, stamps);
    let mut link = site.link()?;
    for round in 0.. {
        let mut random = site.random(round);
        for _ in 0..ROUND_REQUESTS {
            let at = site.range(&mut random, REQUEST_MAX_BYTES);
            write(site, &mut link, &mut image, 1, at, 0)?;
            verify(&mut link, &image, at)?;
            verify(&mut link, &image, site.range(&mut random, REQUEST_MAX_BYTES))?;
        }
        site.flush(&mut link)?;
        let mut other = site.link()?;
        verify_all(site, &mut other, &image).map_err(|stop| after(stop, "on a new connection after a flush"))?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

pub(super) fn after(stop: Stop, when: &str) -> Stop {
    match stop {
        Stop::Fail(text) => Stop::Fail(format!("{when}, {text}")),
        skip => skip,
    }
}

/// A request in flight, with what its reply must be.
enum Expected {
    Done(String),
    /// A read: where, and the contents at the time of sending.
    Bytes(u64, u32, Image),
}

/// Sends a batch of requests around one place without waiting, and takes the replies as they come. Each read must return
/// what the requests sent before it have left.
fn in_order(
    site: &Site,
    link: &mut Link,
    image: &mut Image,
    random: &mut impresario_base::Random,
    zeroes: bool,
) -> Checking {
    let (core, len) = site.range(random, PIPELINED_MAX_BYTES);
    let mut expected: HashMap<u64, Expected> = HashMap::new();
    for _ in 0..WINDOW {
        let cut = random.below(u64::from(len) / site.grain) * site.grain;
        let (offset, len) = (core + cut, len - cut as u32);
        let kind = random.below(if zeroes { 6 } else { 4 });
        let (cookie, wanted) = match kind {
            0..=2 => {
                let mark = site.mark(1);
                let bytes = image.stamps.bytes(mark, offset, len as usize);
                image.set(offset, len as usize, Some(mark));
                (link.send(WRITE, 0, offset, len, &bytes)?, Expected::Done(describe(WRITE, offset, len)))
            }
            4 if site.export.has(HAS_WRITE_ZEROES) => {
                image.set(offset, len as usize, None);
                let cookie = link.send(WRITE_ZEROES, 0, offset, len, &[])?;
                (cookie, Expected::Done(describe(WRITE_ZEROES, offset, len)))
            }
            5 if site.export.has(HAS_TRIM) => {
                // What a trim leaves is the server's choice, until the write that follows.
                let first = link.send(TRIM, 0, offset, len, &[])?;
                expected.insert(first, Expected::Done(describe(TRIM, offset, len)));
                let mark = site.mark(1);
                let bytes = image.stamps.bytes(mark, offset, len as usize);
                image.set(offset, len as usize, Some(mark));
                (link.send(WRITE, 0, offset, len, &bytes)?, Expected::Done(describe(WRITE, offset, len)))
            }
            _ => (link.send(READ, 0, offset, len, &[])?, Expected::Bytes(offset, len, image.clone())),
        };
        expected.insert(cookie, wanted);
    }
    while link.in_flight() > 0 {
        let reply = link.receive()?;
        match expected.remove(&reply.cookie) {
            Some(Expected::Done(what)) => succeeded(&reply, &what)?,
            Some(Expected::Bytes(offset, len, then)) => {
                let what = describe(READ, offset, len);
                succeeded(&reply, &what)?;
                during(
                    &format!("{what}, in flight with writes sent before"),
                    then.check(offset, len as usize, &reply.data),
                )?;
            }
            None => return fault("a reply to no request"),
        }
    }
    verify(link, image, (core, len)).map_err(|stop| after(stop, "after all had been answered"))
}

/// Overlapping writes and reads in flight on one connection.
pub(super) fn overlapping_writes(site: &mut Site) -> Checking {
    rounds_in_order(site, false)
}

/// The same with write-zeroes and trims.
pub(super) fn zeroes(site: &mut Site) -> Checking {
    if !site.export.has(HAS_WRITE_ZEROES | HAS_TRIM) {
        return Err(Stop::Skip("the server offers neither write-zeroes nor trim".into()));
    }
    rounds_in_order(site, true)
}

fn rounds_in_order(site: &mut Site, zeroes: bool) -> Checking {
    let stamps = site.stamps();
    let mut image = blank(site, stamps);
    let mut link = site.link()?;
    for round in 0.. {
        let mut random = site.random(round);
        for _ in 0..10 {
            in_order(site, &mut link, &mut image, &mut random, zeroes)?;
        }
        verify_all(site, &mut link, &image)?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// Many reads of different blocks in flight at once: each reply has its own block.
pub(super) fn replies(site: &mut Site) -> Checking {
    let stamps = site.stamps();
    let mut image = blank(site, stamps);
    let mut link = site.link()?;
    for offset in (0..site.extent).step_by(FILL_BYTES as usize) {
        write(site, &mut link, &mut image, 1, (offset, FILL_BYTES.min(site.extent - offset) as u32), 0)?;
    }
    for round in 0.. {
        let mut random = site.random(round);
        let mut reads: HashMap<u64, (u64, u32)> = HashMap::new();
        for _ in 0..ROUND_REQUESTS {
            let at = site.range(&mut random, PIPELINED_MAX_BYTES);
            reads.insert(link.send(READ, 0, at.0, at.1, &[])?, at);
            if link.in_flight() >= WINDOW {
                one_of(&mut link, &mut reads, &image)?;
            }
        }
        while link.in_flight() > 0 {
            one_of(&mut link, &mut reads, &image)?;
        }
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

fn one_of(link: &mut Link, reads: &mut HashMap<u64, (u64, u32)>, image: &Image) -> Checking {
    let reply = link.receive()?;
    let Some((offset, len)) = reads.remove(&reply.cookie) else { return fault("a reply to no request") };
    let what = describe(READ, offset, len);
    succeeded(&reply, &what)?;
    during(&format!("the reply to a {what}"), image.check(offset, len as usize, &reply.data))
}

/// What a connection has done in a round.
#[derive(Default)]
struct Log {
    writes: Vec<Written>,
    reads: Vec<Seen>,
}

/// Random requests in flight on several connections; one, where the server does not coordinate them.
pub(super) fn bytes(site: &mut Site) -> Checking {
    let stamps = site.stamps();
    let links = if site.export.has(MULTI_CONN) { LINKS } else { 1 };
    let mut open = (0..links).map(|_| site.link()).collect::<Checking<Vec<Link>>>()?;
    let mut before: Vec<Option<Mark>> = vec![None; site.extent as usize / CELL_BYTES];
    for round in 0.. {
        let shared_site: &Site = site;
        let logs = std::thread::scope(|scope| {
            let running: Vec<_> = (0u32..)
                .zip(open.iter_mut())
                .map(|(n, link)| scope.spawn(move || busy(shared_site, link, stamps, n + 1, round)))
                .collect();
            let joined: Vec<_> = running.into_iter().map(|one| one.join()).collect();
            let logs = joined.into_iter().map(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            logs.collect::<Checking<Vec<Log>>>()
        })?;
        let (mut writes, mut reads) = (Vec::new(), Vec::new());
        for log in logs {
            writes.extend(log.writes);
            reads.extend(log.reads);
        }
        let history = History { stamps, before, writes };
        let mut bytes = Vec::new();
        let invoked = site.shared.tick();
        for offset in (0..site.extent).step_by(FILL_BYTES as usize) {
            bytes.extend(open[0].call(READ, 0, offset, FILL_BYTES.min(site.extent - offset) as u32, &[])?);
        }
        let last = Seen { reader: 1, offset: 0, bytes, invoked, ended: site.shared.tick() };
        for seen in reads.iter().chain([&last]) {
            history.check(seen).or_else(|text| fault(format!("connection {}: {text}", seen.reader)))?;
        }
        let cells = last.bytes.chunks(CELL_BYTES).zip((0..EXTENT_BYTES).step_by(CELL_BYTES));
        before = cells
            .map(|(cell, place)| stamps.read(cell, place))
            .collect::<Result<_, _>>()
            .or_else(|found| fault(format!("with no write in flight a cell is mixed: {found}")))?;
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// A connection's random requests of a round.
fn busy(site: &Site, link: &mut Link, stamps: Stamps, writer: u32, round: u64) -> Checking<Log> {
    let mut random = site.random(round * 64 + u64::from(writer));
    let mut log = Log::default();
    let mut sent: HashMap<u64, (u64, u32, u64, Option<Mark>)> = HashMap::new();
    for n in 0..ROUND_REQUESTS + WINDOW as u64 {
        if n < ROUND_REQUESTS {
            let (offset, len) = site.range(&mut random, PIPELINED_MAX_BYTES);
            let (mark, invoked) = (site.mark(writer), site.shared.tick());
            let write = random.below(2) == 0;
            let cookie = match write {
                true => link.send(WRITE, 0, offset, len, &stamps.bytes(mark, offset, len as usize))?,
                false => link.send(READ, 0, offset, len, &[])?,
            };
            sent.insert(cookie, (offset, len, invoked, write.then_some(mark)));
        }
        if link.in_flight() >= WINDOW || (n >= ROUND_REQUESTS && link.in_flight() > 0) {
            let reply = link.receive()?;
            record(site, &mut log, reply, &mut sent, writer)?;
        }
    }
    Ok(log)
}

fn record(
    site: &Site,
    log: &mut Log,
    reply: Reply,
    sent: &mut HashMap<u64, (u64, u32, u64, Option<Mark>)>,
    writer: u32,
) -> Checking {
    let Some((offset, len, invoked, mark)) = sent.remove(&reply.cookie) else { return fault("a reply to no request") };
    succeeded(&reply, &describe(if mark.is_some() { WRITE } else { READ }, offset, len))?;
    let ended = site.shared.tick();
    match mark {
        Some(_) => {
            log.writes.push(Written { mark, offset, len: len as usize, invoked, acknowledged: Some(ended) });
        }
        None => log.reads.push(Seen { reader: writer, offset, bytes: reply.data, invoked, ended }),
    }
    Ok(())
}
