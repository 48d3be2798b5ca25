//! What a batch brought, and the answers to its parts.

use std::io;

use impresario_engine::{Outcome, Work};
use impresario_sched::{Nanos, Request};
use impresario_store::Timing;
use impresario_wire::Fault;

use super::Item;
use crate::data::modelled::Performed;
use crate::owed::{Came, Run};
use crate::payload::Slice;

/// What a batch brought.
pub(in crate::data) enum Done {
    /// Bytes from the start of the batch; fewer than it asked for where the object ends.
    Read(Slice),
    /// The batch failed as a whole, so each of its parts was done alone.
    Apart(Vec<io::Result<Done>>),
    /// The bytes from the start of the batch; if not all, why; and the object's last loss.
    Written(u64, Option<io::Error>, u32),
    Barrier,
    /// The space of a range was changed; the object's last loss.
    Changed(u32),
    /// A sync of an object that has lost data, and how it failed; or another change of the whole object, which did not.
    AfterLoss(u32, i32),
}

pub(super) fn outcome(result: &io::Result<Done>, bytes_done: u64, started: Nanos, finished: Nanos) -> Outcome {
    Outcome { errno: failure_of(result), bytes_done, started, finished }
}

/// The errno of a batch that failed, or of its first part that did; or 0.
fn failure_of(result: &io::Result<Done>) -> i32 {
    match result {
        Ok(Done::Written(_, Some(error), _)) | Err(error) => errno_of(error),
        Ok(Done::AfterLoss(_, errno)) => *errno,
        Ok(Done::Apart(parts)) => parts.iter().map(failure_of).find(|errno| *errno != 0).unwrap_or(0),
        Ok(_) => 0,
    }
}

/// Answers every part of a batch that begins at `start`; gives the bytes moved.
pub(super) fn answer(start: u64, parts: Vec<(Request, Item)>, result: &io::Result<Done>) -> u64 {
    let mut bytes = 0;
    let mut run = Run::default();
    for (nth, (request, item)) in parts.into_iter().enumerate() {
        let extent = request.extent;
        bytes += match result {
            Ok(Done::Apart(each)) => match each.get(nth) {
                Some(result) => answer_part((0, extent.len), item, result, &mut run),
                None => 0,
            },
            result => answer_part((extent.lane_offset - start, extent.len), item, result, &mut run),
        };
    }
    run.send();
    bytes
}

/// Answers a part that lies at these bytes of what was done together; gives the bytes moved.
fn answer_part((from, len): (u64, u64), mut item: Item, result: &io::Result<Done>, run: &mut Run) -> u64 {
    // Before the reply, with which the permission to hold it goes.
    item.payload = None;
    match result {
        Ok(Done::Read(slice)) => {
            let part = slice.part(from as usize..(from + len) as usize);
            let got = part.len() as u64;
            run.read(item.owed, part);
            return got;
        }
        // What was written before the device was full was written.
        Ok(Done::Written(written, error, loss)) => match error {
            Some(error) if from + len > *written => item.owed.fulfil(Came::Failed(fault_of(error))),
            _ => {
                item.owed.fulfil(Came::Written(len, *loss));
                return len;
            }
        },
        Ok(Done::Changed(loss)) => item.owed.fulfil(Came::Written(0, *loss)),
        Ok(Done::AfterLoss(loss, errno)) => item.owed.fulfil(Came::AfterLoss(*loss, *errno)),
        Ok(Done::Barrier | Done::Apart(_)) => item.owed.fulfil(Came::Done),
        Err(error) => item.owed.fulfil(Came::Failed(fault_of(error))),
    }
    0
}

pub(in crate::data) fn errno_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        // The server's own shortage.
        Some(libc::EMFILE) => libc::ENFILE,
        errno => errno.unwrap_or(libc::EIO),
    }
}

pub(super) fn fault_of(error: &io::Error) -> Fault {
    let remedy = match errno_of(error) {
        libc::ENOSPC | libc::EDQUOT => "; free space on the data server",
        libc::ENFILE => "; raise its limit of open files",
        libc::EIDRM => {
            let message =
                "its file was removed, or moved to other data servers; what came for it late was not done".into();
            return Fault { errno: libc::EIDRM, message };
        }
        _ => "",
    };
    Fault { errno: errno_of(error), message: format!("{error}{remedy}") }
}

pub(super) fn complete_modelled((performed, timing): (Performed, Timing)) {
    complete(performed, Nanos(timing.started_ns), || Nanos(timing.finished_ns));
}

/// Answers the parts of a batch, then reports its end. The clocks of engine and device are the same.
pub(super) fn complete(performed: Performed, started: Nanos, finished: impl FnOnce() -> Nanos) {
    complete_after(0, performed, started, finished);
}

/// The same for what is left of a batch of which so many bytes have been moved before.
pub(super) fn complete_after(
    moved_bytes: u64,
    (work, result): Performed,
    started: Nanos,
    finished: impl FnOnce() -> Nanos,
) {
    let Work { batch, parts, ticket, .. } = work;
    let finished = finished();
    let bytes = moved_bytes + answer(batch.extent.lane_offset, parts, &result);
    ticket.complete(outcome(&result, bytes, started, finished));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that heard EMFILE would raise its own limit, or close files of its own.
    #[test]
    fn descriptors_that_a_server_lacks_are_not_those_of_the_program() {
        let fault = fault_of(&io::Error::from_raw_os_error(libc::EMFILE));
        assert_eq!(fault.errno, libc::ENFILE, "{fault:?}");
        assert!(fault.message.contains("raise its limit of open files"), "{fault:?}");
        assert_eq!(fault_of(&io::Error::from_raw_os_error(libc::EDQUOT)).errno, libc::EDQUOT);
    }
}
