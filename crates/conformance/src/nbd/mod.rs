//! The checks of a server that speaks the NBD protocol.

mod data;
mod durable;
mod endings;
mod handshake;
mod link;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use impresario_base::Random;
use impresario_base::random::mix;

use crate::stamp::{CELL_BYTES, Mark, Stamps};
use crate::target::Address;
use crate::{Check, Checking, Error, Options, Report, Shared, Stop, chosen, run_checks};
use link::{Export, Link, WRITE};

/// Bytes of the export that the checks use, from its start.
const EXTENT_BYTES: u64 = 1 << 20;
/// Smallest export that can be checked.
const EXTENT_MIN_BYTES: u64 = 256 << 10;
/// Largest smallest block that can be checked.
const BLOCK_MAX_BYTES: u64 = 4096;
/// Bytes of one write that fills.
const FILL_BYTES: u64 = 128 << 10;

pub(crate) const CHECKS: &[Check<Site>] = &[
    Check {
        name: "handshake",
        summary: "unknown and damaged options are answered with errors or the end, and others are served meanwhile",
        run: handshake::handshake,
        repeats: false,
    },
    Check {
        name: "read-after-write",
        summary: "what is written is read at once, and from other connections after a flush",
        run: data::read_after_write,
        repeats: true,
    },
    Check {
        name: "overlapping-writes",
        summary: "overlapping requests in flight on one connection take effect in the order in which they were sent",
        run: data::overlapping_writes,
        repeats: true,
    },
    Check {
        name: "zeroes",
        summary: "write-zeroes and trim keep their place among the writes that they overlap",
        run: data::zeroes,
        repeats: true,
    },
    Check {
        name: "replies",
        summary: "every request gets one reply, with its own cookie and its own data",
        run: data::replies,
        repeats: true,
    },
    Check {
        name: "bytes",
        summary: "under many requests in flight every byte read is of a write that the read may return",
        run: data::bytes,
        repeats: true,
    },
    Check {
        name: "flush",
        summary: "what was written before a flush is there for a new connection when the old one breaks",
        run: durable::flush,
        repeats: true,
    },
    Check {
        name: "fua",
        summary: "a write with FUA is there for a new connection when the old one breaks",
        run: durable::fua,
        repeats: true,
    },
    Check {
        name: "errors",
        summary: "requests beyond the end, of unknown kinds or sizes get errors; those beside them get none",
        run: endings::errors,
        repeats: true,
    },
    Check {
        name: "disconnect",
        summary: "connections that end with requests in flight harm no others, and a polite end loses no request",
        run: endings::disconnect,
        repeats: true,
    },
    Check {
        name: "completion",
        summary: "every request of many in flight on several connections is answered",
        run: endings::completion,
        repeats: true,
    },
    Check {
        name: "shutdown",
        summary: "a server that is restarted under load answers or fails what is in flight and keeps what was flushed",
        run: durable::shutdown,
        repeats: false,
    },
];

/// What the checks of a server work with.
pub(crate) struct Site {
    options: Options,
    address: Address,
    shared: Arc<Shared>,
    check: &'static str,
    until: Instant,
    export: Export,
    /// Bytes that the checks use.
    extent: u64,
    /// Ranges are multiples of this.
    grain: u64,
    files: u32,
    run: u64,
    notes: Vec<String>,
}

impl Site {
    fn link(&self) -> Checking<Link> {
        Link::open(&self.address, &self.options.export, &self.shared)
    }

    fn goes_on(&self) -> bool {
        Instant::now() < self.until && !self.shared.stopped()
    }

    fn random(&self, part: u64) -> Random {
        let check = self.check.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Random::new(mix(self.options.seed ^ check).wrapping_add(part.wrapping_mul(0x1_0001)))
    }

    /// Stamps for a check's contents.
    fn stamps(&mut self) -> Stamps {
        self.files += 1;
        Stamps { run: self.run, file: self.files }
    }

    fn mark(&self, writer: u32) -> Mark {
        Mark { writer, sequence: self.shared.tick() }
    }

    /// A random range of the extent, at most `max` bytes.
    fn range(&self, random: &mut Random, max: u64) -> (u64, u32) {
        let len = (random.below(max / self.grain) + 1) * self.grain;
        (random.below((self.extent - len) / self.grain + 1) * self.grain, len as u32)
    }

    /// Zeros in the whole extent, for every connection.
    fn zero(&self) -> Checking {
        let mut link = self.link()?;
        let zeros = vec![0; FILL_BYTES as usize];
        for offset in (0..self.extent).step_by(FILL_BYTES as usize) {
            let len = FILL_BYTES.min(self.extent - offset);
            link.call(WRITE, 0, offset, len as u32, &zeros[..len as usize])?;
        }
        self.flush(&mut link)
    }

    /// A flush, where the server knows it.
    fn flush(&self, link: &mut Link) -> Checking {
        if self.export.has(link::HAS_FLUSH) {
            link.call(link::FLUSH, 0, 0, 0, &[])?;
        }
        Ok(())
    }
}

/// Checks an NBD server.
pub(crate) fn run(options: &Options, address: &Address, progress: &mut dyn FnMut(&str)) -> Result<Report, Error> {
    let checks = chosen(CHECKS, &options.only)?;
    let target = options.target.to_string_lossy().into_owned();
    if let Some(below) = options.below.as_ref().filter(|below| below.is_dir()) {
        return Err(Error::Usage(format!("--below {}: is a folder; give the file behind the export", below.display())));
    }
    let shared = Shared::new(options);
    let mut site = Site {
        options: options.clone(),
        address: address.clone(),
        shared: shared.clone(),
        check: "",
        until: Instant::now(),
        export: Export::default(),
        extent: 0,
        grain: CELL_BYTES as u64,
        files: 0,
        run: mix(options.seed ^ mix(u64::from(std::process::id()))) | 1,
        notes: Vec::new(),
    };
    begin(&mut site, &target)?;
    let before = |site: &mut Site, name, until| {
        (site.check, site.until) = (name, until);
        site.zero()
    };
    let checked = run_checks(options, &shared, &checks, &mut site, progress, before, |_| {});
    if let Err(Stop::Fail(reason) | Stop::Skip(reason)) = site.zero() {
        site.notes.push(format!("{target}: the first {} bytes could not be zeroed: {reason}", site.extent));
    }
    Ok(Report { target, seed: options.seed, checks: checked, notes: site.notes })
}

/// Learns what the export is, and refuses one that must not or cannot be overwritten.
fn begin(site: &mut Site, target: &str) -> Result<(), Error> {
    let unusable = |stop| match stop {
        Stop::Fail(reason) | Stop::Skip(reason) => Error::Target(format!("{target}: {reason}")),
    };
    let mut link = site.link().map_err(unusable)?;
    let export = link.export;
    if export.has(link::READ_ONLY) {
        return Err(Error::Usage(format!("{target}: the export is read-only; the checks write")));
    }
    if export.size < EXTENT_MIN_BYTES || u64::from(export.block) > BLOCK_MAX_BYTES {
        return Err(Error::Usage(format!(
            "{target}: the export has {} bytes in blocks of {}; at least {EXTENT_MIN_BYTES} bytes in blocks of at most {BLOCK_MAX_BYTES} are needed",
            export.size, export.block
        )));
    }
    site.grain = u64::from(export.block).max(CELL_BYTES as u64);
    // Whole large blocks, so that fills are aligned too; the end of the export stays out of it.
    site.extent = export.size.min(EXTENT_BYTES) / FILL_BYTES * FILL_BYTES;
    site.export = export;
    for offset in (0..site.extent).step_by(FILL_BYTES as usize) {
        if site.options.overwrite {
            break;
        }
        let bytes = link.call(link::READ, 0, offset, FILL_BYTES as u32, &[]).map_err(unusable)?;
        if let Some(at) = bytes.iter().position(|&byte| byte != 0) {
            return Err(Error::Usage(format!(
                "{target}: the export contains data at {}, and the checks overwrite its first {} KiB; give --overwrite if that may be lost",
                offset + at as u64,
                site.extent >> 10
            )));
        }
    }
    Ok(())
}

/// The file behind the export, which `--below` names.
fn below(site: &Site) -> Option<PathBuf> {
    site.options.below.clone()
}
