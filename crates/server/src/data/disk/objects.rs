//! What is done with whole objects beside the clients' requests: their state, listings, the search for damage, and the
//! settling of checksums.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::time::wait_while;
use impresario_store::{FileState, ObjectPage};
use impresario_wire::{Answer, FileKey, ObjectEntry, ObjectInfo, ScrubbedPiece, SeekTo, Sought, Time};

use super::Disk;
use super::answers::fault_of;
use crate::connection::Reply;
use crate::fsck::PIECE_BYTES;
use crate::workers::PATIENCE;

/// How long checksums wait in memory for a client's sync.
const SETTLE_EVERY: Duration = Duration::from_secs(5);

/// Objects in one page of a listing.
const PAGE_OBJECTS_MAX: usize = 4096;

impl Disk {
    /// Begins to settle checksums in the background, if there are any.
    pub(crate) fn begin_settling(&self) -> io::Result<()> {
        if self.store.checks().is_none() {
            return Ok(());
        }
        let (stop, stopped) = channel();
        let this = self.this.clone();
        let settle = move || {
            loop {
                let goes_on = stopped.recv_timeout(SETTLE_EVERY) == Err(RecvTimeoutError::Timeout);
                let Some(disk) = this.upgrade() else { return };
                let age = if goes_on { SETTLE_EVERY } else { Duration::ZERO };
                disk.store.settle_older(age, |key, error| _ = disk.lost(key, &error));
                if !goes_on {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checksums".into()).spawn(settle)?;
        *self.settling.lock() = Some((stop, thread));
        Ok(())
    }

    /// Settles what is left, and waits for that a while.
    pub(super) fn stop_settling(&self) {
        let Some((stop, thread)) = self.settling.lock().take() else { return };
        drop(stop);
        // A device that hangs must not keep the server from ending; what is not settled is unchecked.
        wait_while(&|| !thread.is_finished(), PATIENCE);
    }

    fn refuse(&self, reply: Reply, error: &io::Error) {
        self.note_failure(error);
        reply.send(&Answer::Fault(fault_of(error)));
    }

    /// Answers with the state of an object.
    pub(crate) fn stat(&self, file: FileKey, reply: Reply) {
        match self.store.look_unless_removed(file.0) {
            Ok(state) => reply.send(&Answer::Object(info_of(state))),
            Err(error) => self.refuse(reply, &error),
        }
    }

    /// Answers where an object has data or a hole. Its map may have to be read from the device.
    pub(crate) fn seek(&self, file: FileKey, from: u64, to: SeekTo, reply: Reply) {
        self.on_a_thread(move |disk| match disk.store.seek(file.0, from, to == SeekTo::Data) {
            Ok((at, state)) => reply.send(&Answer::Sought(Sought { at, object: info_of(state) })),
            Err(error) => disk.refuse(reply, &error),
        });
    }

    /// Answers with a page of the objects.
    pub(crate) fn list(&self, from: FileKey, max: u32, reply: Reply) {
        self.on_a_thread(move |disk| {
            let max = (max as usize).clamp(1, PAGE_OBJECTS_MAX);
            let page = disk.store.page(from.0, max).and_then(|mut page| {
                if from.0 == 0 {
                    page.foreign.extend(disk.store.foreign_at_top()?);
                }
                Ok(page)
            });
            match page {
                Ok(ObjectPage { objects, foreign, next }) => {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                    let entry = |(key, state): &(u64, FileState)| ObjectEntry {
                        file: FileKey(*key),
                        size: state.size,
                        age_s: now.saturating_sub(u64::try_from(state.mtime_secs).unwrap_or(0)),
                    };
                    let objects = objects.iter().map(entry).collect();
                    reply.send(&Answer::Objects { objects, foreign, next: next.map(FileKey) });
                }
                Err(error) => disk.refuse(reply, &error),
            }
        });
    }

    /// Reads a piece of an object to find damage, on a thread of its own and one at a time, so that clients wait for one
    /// piece at most. A modelled device does not know of it.
    pub(crate) fn scrub(&self, file: FileKey, offset: u64, max_bytes: u32, reply: Reply) {
        self.on_a_thread(move |disk| {
            let Some(scrubbing) = disk.scrubbing.try_lock() else {
                let message = format!("{} is scrubbing for another caller; one at a time", disk.vitals.name());
                return reply.fault(libc::EBUSY, message);
            };
            let found = disk.store.scrub(file.0, offset, u64::from(max_bytes).min(PIECE_BYTES));
            disk.store.relieve(|key, error| _ = disk.lost(key, &error));
            // Before the reply: the caller's next call may come at once.
            drop(scrubbing);
            match found {
                Ok(found) => reply.send(&Answer::Scrubbed(found.map(|found| ScrubbedPiece {
                    read_bytes: found.read_bytes,
                    good_blocks: found.good_blocks,
                    learnt_blocks: found.learnt_blocks,
                    unknown_blocks: found.unknown_blocks,
                    corrupt: found.corrupt,
                    next: found.next,
                }))),
                Err(error) => disk.refuse(reply, &error),
            }
        });
    }

    /// Moves an object out of the way.
    pub(crate) fn set_aside(&self, file: FileKey, reply: Reply) {
        let setting_aside = SettingAside::begin(&self.setting_aside);
        self.on_a_thread(move |disk| {
            let done = disk.store.set_aside(file.0);
            // Before the reply: the caller may have the server move next.
            drop(setting_aside);
            match done {
                Ok(()) => {
                    tracing::warn!(key = file.0, "an object that belongs to no file was set aside");
                    reply.send(&Answer::Done);
                }
                Err(error) => disk.refuse(reply, &error),
            }
        });
    }
}

/// An object is being set aside, until this is dropped: also undone.
struct SettingAside(Arc<AtomicU32>);

impl SettingAside {
    fn begin(count: &Arc<AtomicU32>) -> SettingAside {
        count.fetch_add(1, Ordering::SeqCst);
        SettingAside(count.clone())
    }
}

impl Drop for SettingAside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn info_of(state: Option<FileState>) -> ObjectInfo {
    let made = u64::from(state.is_some());
    let state = state.unwrap_or_default();
    let mtime = Time { secs: state.mtime_secs, nanos: state.mtime_nanos };
    ObjectInfo { size: state.size, mtime, used_bytes: state.used_bytes, made }
}
