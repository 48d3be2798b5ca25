//! Reads by the program itself: a thread of the library in it reads what the manager orders, so that memory and I/O are
//! charged to the program's control group, and to its job where the file system accounts by job.
//!
//! The manager decides, looks into the page cache first, and makes no read in the program's place: where the program has
//! no such thread, nothing is brought in.

use std::io;
use std::ops::Range;
use std::time::Duration;

use impresario_ring::order::{READ_BYTES_MAX, Task};

use super::forced_read::overtaken;
use super::{Brought, HintBackend, HintedFile, pieces};

/// The first hint of a program waits so long for its thread, which is started at its next read.
const STARTS_WITHIN: Duration = Duration::from_millis(200);

/// Reads by the program.
#[derive(Debug)]
pub(super) struct ByProgram;

impl HintBackend for ByProgram {
    fn name(&self) -> &'static str {
        "program"
    }

    fn waits(&self) -> bool {
        true
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let mut brought = Brought::default();
        let Some(inside) = file.inside.filter(|inside| inside.comes_within(STARTS_WITHIN)) else {
            brought.missed_bytes = range.end.saturating_sub(range.start);
            return Ok(brought);
        };
        for piece in pieces(range, READ_BYTES_MAX.into()).take_while(|_| !file.has_ended()) {
            let len = piece.end - piece.start;
            if overtaken(file, &piece) || brought.look(file.fd, &piece).is_some_and(|cached| cached.complete()) {
                continue;
            }
            let start = i64::try_from(piece.start).map_err(io::Error::other)?;
            let read = match inside.ask(file.fd, &Task::Read { start, bytes: len as u32 }) {
                // The program is gone, or hangs.
                Err(_) if !inside.is_there() => {
                    brought.missed_bytes += len;
                    break;
                }
                read => u64::from(read?).min(len),
            };
            brought.asked_bytes += read;
            brought.calls += 1;
            if read < len {
                break; // the end of the file
            }
        }
        Ok(brought)
    }
}
