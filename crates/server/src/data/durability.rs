//! Writes, changes and syncs of objects, and what is told of data that were lost. Over any file system, so that what runs on a
//! server runs on a simulated disk too, which loses and fails.

use std::io::{self, IoSlice};
use std::ops::Range;

use impresario_store::{FileSystem, ObjectStore};
use impresario_wire::SpaceChange;

use super::disk::{Done, errno_of};
use super::losses::Losses;

/// Writes the pieces one behind the other.
pub(super) fn write<F: FileSystem>(
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
    losses: &Losses,
    key: u64,
    len_bytes: u64,
) -> io::Result<Done> {
    // Before it, as for a write.
    let loss = losses.of(key);
    store.truncate(key, len_bytes).map(|()| if loss == 0 { Done::Barrier } else { Done::AfterLoss(loss, 0) })
}

/// Changes the space of a range.
pub(super) fn change_space<F: FileSystem>(
    store: &ObjectStore<F>,
    losses: &Losses,
    key: u64,
    change: SpaceChange,
    range: Range<u64>,
) -> io::Result<Done> {
    // Before it, as for a write.
    let loss = losses.of(key);
    match change {
        SpaceChange::Allocate { keep_size } => store.allocate(key, range, keep_size),
        SpaceChange::Punch => store.punch(key, range),
        SpaceChange::Zero { keep_size } => store.zero(key, range, keep_size),
    }
    .map(|()| Done::Changed(loss))
}

/// A sync has failed; gives the number of the loss.
pub(super) fn lost<F: FileSystem>(store: &ObjectStore<F>, losses: &Losses, key: u64, error: &io::Error) -> u32 {
    losses.complaints.about("sync", &format!("{key:016x}"), |syncs| {
        tracing::error!(key, syncs, %error, "a sync failed; unsynced data of the object are lost");
    });
    losses.lost(store, key)
}
