//! Writes that only go to the page cache and need not be scheduled: no device has to be free for them.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use impresario_base::dirtying::DirtyRoom;
use impresario_engine::now;
use impresario_wire::FileKey;

use super::Disk;
use crate::data::disk::Done;
use crate::data::durability;
use crate::data::once::Origin;

/// The file system keeps what is written in the page cache; that it does not; anything below: so often it did not.
const PAGED: u8 = u8::MAX;
const NOT_PAGED: u8 = 8;

/// Whether, and how much, may be written so.
#[derive(Default)]
pub(super) struct Dirtying {
    room: DirtyRoom,
    /// What was found when writes were done as scheduled.
    paged: AtomicU8,
}

impl Disk {
    /// Whether a write may be done before it is scheduled, as far as the device is concerned.
    pub(in crate::data) fn may_dirty(&self, file: FileKey, (offset, len): (u64, u64)) -> bool {
        let Some(dirtying) = &self.dirtying else { return false };
        dirtying.paged.load(Relaxed) == PAGED
            && !self.store.write_waits(file.0, offset, len)
            && dirtying.room.takes(len, now())
    }

    /// Does such a write. Gives the object's last loss, or 0; `None` if it has failed: then it is to be done as others are.
    pub(in crate::data) fn write_at_once(
        &self,
        file: FileKey,
        offset: u64,
        (origin, bytes): (&Origin, &[u8]),
    ) -> Option<u32> {
        let began = now();
        let done = durability::write(&self.store, self.known(), file.0, offset, &[(origin, bytes)]);
        let ended = now();
        let dirtying = self.dirtying.as_ref()?;
        dirtying.room.took(bytes.len() as u64, ended.since(began), ended);
        match done {
            Done::Written(written, None, loss) if written == bytes.len() as u64 => Some(loss),
            _ => None,
        }
    }

    /// A write was done as it was scheduled: is it in the page cache? Not on a file system that is read and written past it.
    pub(super) fn look_for_pages(&self, file: u64, offset: u64) {
        let Some(Dirtying { paged, .. }) = &self.dirtying else { return };
        let known = paged.load(Relaxed);
        if known < NOT_PAGED {
            let is_there =
                self.store.read_cached(file, offset, &mut [0]).is_some_and(|got| got.is_ok_and(|got| got > 0));
            paged.store(if is_there { PAGED } else { known + 1 }, Relaxed);
        }
    }
}
