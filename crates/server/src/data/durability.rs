//! Writes, changes and syncs of objects, and what is told of data that were lost. Over any file system, so that what runs on a
//! server runs on a simulated disk too, which loses and fails.

use std::io::{self, IoSlice};
use std::ops::Range;

use impresario_node::session::{Did, Rest};
use impresario_store::{FileSystem, ObjectStore};
use impresario_wire::SpaceChange;
use smallvec::SmallVec;

use super::disk::{Done, errno_of};
use super::losses::Losses;
use super::once::{Once, Origin};
use crate::owed::FirstLoss;

/// Writes the bytes of requests one behind the other. Of a copy, which comes alone, only what was not done.
pub(super) fn write<F: FileSystem>(
    store: &ObjectStore<F>,
    (losses, once): (&Losses, &Once),
    key: u64,
    offset: u64,
    parts: &[(&Origin, &[u8])],
) -> Done {
    if let [(origin, bytes)] = parts
        && origin.is_copy
    {
        return write_rest(store, (losses, once), key, offset, (origin, bytes));
    }
    let pieces: SmallVec<[IoSlice<'_>; 4]> = parts.iter().map(|(_, bytes)| IoSlice::new(bytes)).collect();
    let done = write_pieces(store, losses, key, offset, &pieces);
    if let Done::Written(_, None, loss) = done {
        let mut at = offset;
        for (origin, bytes) in parts {
            let end = at + bytes.len() as u64;
            once.note(origin, key, Did::Wrote, &(at..end), loss);
            at = end;
        }
    }
    done
}

fn write_rest<F: FileSystem>(
    store: &ObjectStore<F>,
    (losses, once): (&Losses, &Once),
    key: u64,
    offset: u64,
    (origin, bytes): (&Origin, &[u8]),
) -> Done {
    let len = bytes.len() as u64;
    let rest = once.rest(origin, key, Did::Wrote, offset..offset + len);
    // Of what was lost since the first copy was done its client must learn.
    let mut loss = FirstLoss::default();
    rest.least.into_iter().for_each(|least| loss.note(least));
    for range in &rest.ranges {
        let from = range.start - offset;
        let piece = bytes.get(from as usize..(range.end - offset) as usize).unwrap_or_default();
        match write_pieces(store, losses, key, range.start, &[IoSlice::new(piece)]) {
            Done::Written(written, error, now) => {
                loss.note(now);
                if error.is_some() {
                    // What was done before it is done.
                    return Done::Written(from + written, error, loss.number());
                }
                once.note(origin, key, Did::Wrote, range, now);
            }
            other => return other,
        }
    }
    Done::Written(len, None, loss.number())
}

fn write_pieces<F: FileSystem>(
    store: &ObjectStore<F>,
    losses: &Losses,
    key: u64,
    offset: u64,
    pieces: &[IoSlice<'_>],
) -> Done {
    // Before the write: of a sync that fails meanwhile the writer learns.
    let loss = losses.of(key);
    let written = match store.write_vectored(key, offset, pieces) {
        Ok(written) => Done::Written(written as u64, None, loss),
        Err(error) => Done::Written(error.written as u64, Some(error.source), loss),
    };
    store.relieve(|key, error| _ = lost(store, losses, key, &error));
    written
}

/// Makes an object durable, or tells that it has lost data.
pub(super) fn sync<F: FileSystem>(store: &ObjectStore<F>, losses: &Losses, key: u64) -> Done {
    let note = |error: io::Error| Done::AfterLoss(lost(store, losses, key, &error), errno_of(&error));
    match losses.settle_doubt(store, key).map_err(note).and_then(|()| store.sync_noting(key, note)) {
        Ok(()) => match losses.of(key) {
            0 => Done::Barrier,
            loss => Done::AfterLoss(loss, 0),
        },
        Err(lost) => lost,
    }
}

/// Sets the length of an object.
pub(super) fn truncate<F: FileSystem>(
    store: &ObjectStore<F>,
    (losses, once): (&Losses, &Once),
    key: u64,
    len_bytes: u64,
    origin: &Origin,
) -> io::Result<Done> {
    let loss =
        change_once((losses, once), key, Did::Cut, len_bytes..u64::MAX, origin, || store.truncate(key, len_bytes))?;
    Ok(if loss == 0 { Done::Barrier } else { Done::AfterLoss(loss, 0) })
}

/// Changes the space of a range.
pub(super) fn change_space<F: FileSystem>(
    store: &ObjectStore<F>,
    (losses, once): (&Losses, &Once),
    key: u64,
    change: SpaceChange,
    range: Range<u64>,
    origin: &Origin,
) -> io::Result<Done> {
    let make = || match change {
        SpaceChange::Allocate { keep_size } => store.allocate(key, range.clone(), keep_size),
        SpaceChange::Punch => store.punch(key, range.clone()),
        SpaceChange::Zero { keep_size } => store.zero(key, range.clone(), keep_size),
    };
    let loss = match change {
        // A request may allocate a range twice, the second time to move the end; and no byte changes.
        SpaceChange::Allocate { .. } => {
            let loss = losses.of(key);
            make().map(|()| loss)
        }
        SpaceChange::Punch | SpaceChange::Zero { .. } => {
            change_once((losses, once), key, Did::Cleared, range.clone(), origin, make)
        }
    };
    loss.map(Done::Changed)
}

/// Makes a change, unless it is a copy of one that was made. Gives the object's last loss at that time.
fn change_once(
    (losses, once): (&Losses, &Once),
    key: u64,
    did: Did,
    range: Range<u64>,
    origin: &Origin,
    change: impl FnOnce() -> io::Result<()>,
) -> io::Result<u32> {
    if origin.is_copy
        && let Rest { ranges, least: Some(loss) } = once.rest(origin, key, did, range.clone())
        && ranges.is_empty()
    {
        return Ok(loss);
    }
    // Before it, as for a write.
    let loss = losses.of(key);
    change()?;
    once.note(origin, key, did, &range, loss);
    Ok(loss)
}

/// A sync has failed; gives the number of the loss.
pub(super) fn lost<F: FileSystem>(store: &ObjectStore<F>, losses: &Losses, key: u64, error: &io::Error) -> u32 {
    losses.complaints.about("sync", &format!("{key:016x}"), |syncs| {
        tracing::error!(key, syncs, %error, "a sync failed; unsynced data of the object are lost");
    });
    losses.lost(store, key)
}
