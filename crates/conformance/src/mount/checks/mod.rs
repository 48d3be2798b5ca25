//! The checks of a mount, in the order in which they run.

mod data;
mod endings;
mod identity;
mod names;
mod order;

use impresario_base::Random;

use super::{Remote, Site, next_mark};
use crate::stamp::{CELL_BYTES, Image};
use crate::{Check, Checking, during};

/// Bytes that requests past the page cache are aligned to.
const BLOCK_BYTES: u64 = 4096;
/// Largest write of a check, bytes. File systems take writes up to this size as a whole.
const WRITE_MAX_BYTES: u64 = 64 << 10;

/// All checks.
pub(crate) const CHECKS: &[Check<Site>] = &[
    Check {
        name: "read-after-write",
        summary: "what is written is read at once by another descriptor and another process",
        run: data::read_after_write,
        repeats: true,
    },
    Check {
        name: "overlapping-writes",
        summary: "writes that overlap take effect whole, one after the other, in the order of their replies",
        run: data::overlapping_writes,
        repeats: true,
    },
    Check {
        name: "bytes",
        summary: "under many readers and writers every byte read is of a write that the read may return",
        run: data::bytes,
        repeats: true,
    },
    Check {
        name: "fsync",
        summary: "fsync beside writers ends, and contents are right behind it, past the page cache too",
        run: order::fsync,
        repeats: true,
    },
    Check {
        name: "fsync-below",
        summary: "what fsync has acknowledged is in the folder below the mount",
        run: order::fsync_below,
        repeats: true,
    },
    Check {
        name: "truncate",
        summary: "ftruncate takes effect between the writes before and behind it; cut bytes never return",
        run: order::truncate,
        repeats: true,
    },
    Check {
        name: "append",
        summary: "O_APPEND from several processes: every record once, whole, in its writer's order",
        run: names::append,
        repeats: true,
    },
    Check {
        name: "rename",
        summary: "requests on open files stay with their file when it is renamed and its name reused",
        run: names::rename,
        repeats: true,
    },
    Check {
        name: "unlink",
        summary: "requests on an open file that was removed do not reach the file that has its name now",
        run: names::unlink,
        repeats: true,
    },
    Check {
        name: "identity",
        summary: "files belong to the user who made them, and other users are refused",
        run: identity::identity,
        repeats: false,
    },
    Check {
        name: "errors",
        summary: "a request that fails gets its error; the requests beside it get none",
        run: endings::errors,
        repeats: true,
    },
    Check {
        name: "cancellation",
        summary: "processes killed, reads interrupted and files closed with requests in flight harm no others",
        run: endings::cancellation,
        repeats: true,
    },
    Check {
        name: "completion",
        summary: "every request of many small ones of all kinds is answered",
        run: endings::completion,
        repeats: true,
    },
    Check {
        name: "shutdown",
        summary: "a server that is restarted under load answers or fails what is in flight and keeps what was synced",
        run: endings::shutdown,
        repeats: false,
    },
];

const CREATE: i32 = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;

/// A random range of whole cells below `extent`, at most `max` bytes.
fn some_range(random: &mut Random, extent: u64, max: u64) -> (u64, usize) {
    let cell = CELL_BYTES as u64;
    let len = (random.below(max / cell) + 1) * cell;
    let offset = random.below((extent - len) / cell + 1) * cell;
    (offset, len as usize)
}

/// A random range of whole blocks below `extent`.
fn some_blocks(random: &mut Random, extent: u64, max_blocks: u64) -> (u64, usize) {
    let blocks = random.below(max_blocks) + 1;
    let offset = random.below(extent / BLOCK_BYTES - blocks + 1) * BLOCK_BYTES;
    (offset, (blocks * BLOCK_BYTES) as usize)
}

/// Writes a stamped range and records it.
fn write(agent: &mut Remote, slot: u32, image: &mut Image, offset: u64, len: usize) -> Checking {
    let mark = next_mark(agent);
    agent.write(slot, offset, &image.stamps.bytes(mark, offset, len))?;
    image.set(offset, len, Some(mark));
    Ok(())
}

/// Reads a range and compares it.
fn verify(agent: &mut Remote, slot: u32, image: &Image, offset: u64, len: usize) -> Checking {
    let bytes = agent.read(slot, offset, len)?;
    let what = format!("agent {}: read of {len} bytes at {offset} in {}", agent.number, agent.name(slot));
    during(&what, image.check(offset, len, &bytes))
}

/// Reads the whole file, and somewhat more, and compares it and the size.
fn verify_all(agent: &mut Remote, slot: u32, image: &Image) -> Checking {
    verify(agent, slot, image, 0, image.len() as usize + BLOCK_BYTES as usize)?;
    let size = agent.size(slot)?;
    if size != image.len() {
        return crate::fault(format!("fstat of {}: expected {} bytes, found {size}", agent.name(slot), image.len()));
    }
    Ok(())
}
