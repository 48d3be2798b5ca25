//! What must outlive a connection, and a server.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::data::{after, blank, verify, verify_all, write};
use super::link::{FUA, HAS_FLUSH, HAS_FUA, Link, WRITE};
use super::{Site, below};
use crate::stamp::Image;
use crate::{Checking, Stop, during, fault, restart};

const REQUEST_MAX_BYTES: u64 = 32 << 10;
/// Connections that write during a restart.
const WRITERS: u64 = 4;

/// Writes, a flush, and the connection breaks: a new one must read what was flushed.
pub(super) fn flush(site: &mut Site) -> Checking {
    if !site.export.has(HAS_FLUSH) {
        return Err(Stop::Skip("the server does not offer flush".into()));
    }
    broken_connections(site, "flushed, and the connection had broken", |site, link, image, random| {
        for _ in 0..=random.below(8) {
            write(site, link, image, 1, site.range(random, REQUEST_MAX_BYTES), 0)?;
        }
        site.flush(link)
    })
}

/// The same with writes that are to be durable themselves.
pub(super) fn fua(site: &mut Site) -> Checking {
    if !site.export.has(HAS_FUA) {
        return Err(Stop::Skip("the server does not offer FUA".into()));
    }
    broken_connections(site, "written with FUA, and the connection had broken", |site, link, image, random| {
        let at = site.range(random, REQUEST_MAX_BYTES);
        write(site, link, image, 1, at, FUA)
    })
}

fn broken_connections(
    site: &mut Site,
    when: &str,
    work: impl Fn(&Site, &mut Link, &mut Image, &mut impresario_base::Random) -> Checking,
) -> Checking {
    let stamps = site.stamps();
    let mut image = blank(site, stamps);
    for round in 0.. {
        let mut random = site.random(round);
        for _ in 0..8 {
            let mut link = site.link()?;
            work(site, &mut link, &mut image, &mut random)?;
            if let Some(path) = below(site) {
                let mut bytes = vec![0; site.extent as usize];
                let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0));
                read.or_else(|error| fault(format!("--below {}: {error}", path.display())))?;
                during(&format!("{} when the answer had come", path.display()), image.check(0, bytes.len(), &bytes))?;
            }
            link.cut();
            let mut other = site.link()?;
            verify_all(site, &mut other, &image).map_err(|stop| after(stop, when))?;
        }
        if !site.goes_on() {
            break;
        }
    }
    Ok(())
}

/// Connections write and flush block after block until the server was restarted. What was flushed must be there.
pub(super) fn shutdown(site: &mut Site) -> Checking {
    let Some(command) = site.options.restart.clone() else {
        return Err(Stop::Skip("needs --restart COMMAND: what stops the server and starts it again".into()));
    };
    if !site.export.has(HAS_FLUSH) {
        return Err(Stop::Skip("the server does not offer flush".into()));
    }
    let stamps = site.stamps();
    let region = site.extent / WRITERS / site.grain * site.grain;
    let (begun, back, patience) = (AtomicBool::new(false), AtomicBool::new(false), site.shared.patience);
    let writers = restart::Writers::new(WRITERS as usize);
    let mut links = (0..WRITERS).map(|_| site.link()).collect::<Checking<Vec<Link>>>()?;
    let shared_site: &Site = site;
    let written: Vec<Written> = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| {
            writers.wait();
            begun.store(true, Ordering::Relaxed);
            let result = restart::run(&command, patience);
            back.store(true, Ordering::Relaxed);
            result
        });
        let running: Vec<_> = (0..WRITERS)
            .zip(links.iter_mut())
            .map(|(n, link)| {
                let (begun, back, writers) = (&begun, &back, &writers);
                scope.spawn(move || {
                    let mut waited_for = Some(restart::Ready(writers));
                    let (start, end) = (n * region, (n + 1) * region);
                    let mut written = Written { image: blank(shared_site, stamps), unknown: None, met: false };
                    let len = (region / 64 / shared_site.grain * shared_site.grain).max(shared_site.grain);
                    let mut at = start;
                    while !back.load(Ordering::Relaxed) {
                        let mark = shared_site.mark(n as u32 + 1);
                        let bytes = stamps.bytes(mark, at, len as usize);
                        let request = link.call(WRITE, 0, at, len as u32, &bytes);
                        let request = request.and_then(|_| shared_site.flush(link));
                        let under_restart = begun.load(Ordering::Relaxed);
                        written.met |= under_restart;
                        // An error or the end of the connection is an answer; the silence of a server is not.
                        match request {
                            Ok(()) => written.image.set(at, len as usize, Some(mark)),
                            Err(Stop::Fail(text)) if text.contains("no answer within") => return fault(text),
                            Err(stop) if !under_restart => return Err(stop),
                            Err(_) => {
                                written.unknown = Some((at, len));
                                break;
                            }
                        }
                        drop(waited_for.take());
                        at += len;
                        if at + len > end {
                            // The blocks before are written once, so that a loss of them is not made up for.
                            at = start + region / 2 / len * len;
                        }
                    }
                    Ok(written)
                })
            })
            .collect();
        let joined: Vec<_> = running.into_iter().map(|one| one.join()).collect();
        let written = joined.into_iter().map(|one| one.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let written = written.collect::<Checking<Vec<_>>>();
        restarting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        written
    })?;
    let deadline = Instant::now() + patience;
    let mut link = loop {
        match site.link() {
            Ok(link) => break link,
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            Err(stop) => return Err(after(stop, "after the restart")),
        }
    };
    for (n, written) in (0..).zip(&written) {
        let (start, end) = (n * region, (n + 1) * region);
        let (before, behind) = written.unknown.map_or((end, end), |(at, len)| (at, at + len));
        for (start, end) in [(start, before), (behind, end)].into_iter().filter(|(start, end)| start < end) {
            let checked = verify(&mut link, &written.image, (start, (end - start) as u32));
            checked.map_err(|stop| after(stop, "after the restart, flushed before"))?;
        }
    }
    if !written.iter().any(|written| written.met) {
        return Err(Stop::Skip(
            "no request was in flight while the server was restarted: --restart ended at once".into(),
        ));
    }
    Ok(())
}

/// What a connection wrote around a restart.
struct Written {
    image: Image,
    /// Bytes of a write that has not come to a good end: they are old or new.
    unknown: Option<(u64, u64)>,
    /// Whether one of its requests ended after the restart had begun.
    met: bool,
}
