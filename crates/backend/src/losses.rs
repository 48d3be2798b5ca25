//! Files of which written bytes were lost: an error of writing back is told by each sync of the file from then on.
//!
//! Linux tells such an error to every descriptor that was open when it happened, once (errseq_t). A server that closes and
//! reopens descriptors must remember it.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use crate::idle::{self, Closers};
use crate::{Errno, Handle, Lost, Result};

/// Files with losses that are remembered one by one; with more of them every file counts as one.
const FILES_MAX: usize = 65_536;

#[derive(Default)]
struct State {
    lost: FxHashMap<Handle, Errno>,
    /// Set when files no longer fit.
    all: Option<Errno>,
    /// What a sync of the whole file system has said.
    file_system: Option<Errno>,
    /// How often a loss was noted that may be any file's.
    any: u64,
    /// Files with descriptors that are being synced to be closed, or wait for that.
    closing: FxHashMap<Handle, usize>,
    /// Descriptors that nobody finds any more and that are not closed yet, by the order in which they left.
    leaving: BTreeSet<u64>,
    next_leave: u64,
}

/// The files with losses.
#[derive(Default)]
pub(crate) struct Losses {
    state: Mutex<State>,
    closed: Condvar,
    /// Held while the whole file system is synced.
    syncing_file_system: Mutex<()>,
    closers: Closers,
}

/// What is being closed.
pub(crate) struct Closing<T> {
    /// Dropped first.
    what: T,
    end: EndClose,
}

impl<T> Deref for Closing<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.what
    }
}

struct EndClose {
    losses: Arc<Losses>,
    file: Handle,
}

impl Drop for EndClose {
    fn drop(&mut self) {
        self.losses.end_close(&self.file);
    }
}

impl Losses {
    /// The error that a file's sync must tell, after closes of its descriptors that are under way.
    pub(crate) fn check(&self, file: &Handle) -> Result<()> {
        let state = self.end_closes(file);
        match state.all.or_else(|| state.lost.get(file).copied()) {
            None => Ok(()),
            Some(errno) => Err(errno),
        }
    }

    /// Waits until the closes of a file's descriptors that are under way have ended, or until then.
    pub(crate) fn await_closes(&self, file: &Handle, until: Instant) {
        let mut state = self.state.lock();
        while state.closing.contains_key(file) {
            self.closers.hurry(file);
            let wait = until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return;
            }
            state = self.closed.wait_timeout(state, wait).0;
        }
    }

    /// Whether closes of a file's descriptors are under way.
    pub(crate) fn is_closing(&self, file: &Handle) -> bool {
        self.state.lock().closing.contains_key(file)
    }

    /// Closes what of a file waits for its turn, which may be behind other files that hang, and waits for what others close: as long
    /// as the file's own syncs take.
    fn end_closes(&self, file: &Handle) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        while state.closing.contains_key(file) {
            let waiting = self.closers.take(file);
            if waiting.is_empty() {
                state = self.closed.wait(state);
                continue;
            }
            drop(state);
            waiting.into_iter().for_each(idle::close);
            state = self.state.lock();
        }
        state
    }

    /// What a sync of all files must tell, once all descriptors that have left by now are closed. `ETIMEDOUT`: some of them
    /// were not by then.
    pub(crate) fn after_closes(&self, until: Instant) -> Result<Lost> {
        let state = self.state.lock();
        let left = state.next_leave;
        let are_leaving = |state: &mut State| state.leaving.first().is_some_and(|first| *first < left);
        let wait = until.saturating_duration_since(Instant::now());
        let (state, is_late) = self.closed.wait_timeout_while(state, wait, are_leaving);
        if is_late {
            return Err(Errno(libc::ETIMEDOUT));
        }
        let files = (state.lost.len() <= Lost::FILES_MAX).then(|| state.lost.keys().copied().collect());
        Ok(Lost { files, any: state.any })
    }

    /// Syncs the whole file system, for all or for what can be synced in no other way. A failure is told to all of them from then on:
    /// the kernel says it only once, to whomever of them comes first. A file that is open has its own word of what it lost.
    pub(crate) fn sync_file_system(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        // One at a time: another one's must not say that all is well before what this one was told is noted. Where one hangs, all do.
        let _alone = self.syncing_file_system.lock();
        let synced = sync();
        let mut state = self.state.lock();
        if let Some(errno) = synced.err().filter(|errno| is_loss(*errno)) {
            state.file_system.get_or_insert(errno);
            state.any += 1;
            tracing::warn!(error = %errno, "the file system lost bytes or names that were written");
        }
        synced.and(state.file_system.map_or(Ok(()), Err))
    }

    /// A descriptor was taken out and is closed later: to be said while nobody can find that it is gone. Gives what
    /// [`Losses::left`] is told.
    pub(crate) fn leave(&self) -> u64 {
        let mut state = self.state.lock();
        let ticket = state.next_leave;
        state.next_leave += 1;
        state.leaving.insert(ticket);
        ticket
    }

    /// The descriptor is closed, or in use again.
    pub(crate) fn left(&self, ticket: u64) {
        self.state.lock().leaving.remove(&ticket);
        self.closed.notify_all();
    }

    /// What a sync said; remembers a failure that means a loss.
    pub(crate) fn observe(&self, file: &Handle, synced: Result<()>) -> Result<()> {
        let Err(errno) = synced else { return Ok(()) };
        if is_loss(errno) {
            let mut state = self.state.lock();
            if state.lost.len() < FILES_MAX || state.lost.contains_key(file) {
                state.lost.entry(*file).or_insert(errno);
            } else {
                state.all.get_or_insert(errno);
                state.any += 1;
            }
            tracing::warn!(?file, error = %errno, "the file system lost bytes of a file that was written");
        }
        Err(errno)
    }

    /// Syncs a descriptor that is about to be closed.
    pub(crate) fn settle(&self, file: &Handle, sync: impl FnOnce() -> Result<()>) {
        self.begin_close(file);
        let _ = self.observe(file, sync()); // remembered
        self.end_close(file);
    }

    /// What a file has open and is closed, by dropping it, at some time: from now until then its syncs wait.
    pub(crate) fn closing<T>(self: &Arc<Losses>, file: Handle, what: T) -> Closing<T> {
        self.begin_close(&file);
        Closing { what, end: EndClose { losses: self.clone(), file } }
    }

    /// Has another thread close it.
    pub(crate) fn close_aside(&self, closing: Closing<impl Send + 'static>) {
        self.closers.close(closing.end.file, Box::new(closing));
        self.queued();
    }

    /// Closes these one after the other. One that hangs keeps from none of the others who needs it closed.
    pub(crate) fn close_here(&self, closing: Vec<Closing<impl Send + 'static>>) {
        let batch = self.closers.enqueue(closing.into_iter().map(|one| (one.end.file, Box::new(one) as idle::Closing)));
        self.queued();
        self.closers.work_off(batch);
    }

    /// There is more among what waits to be closed.
    fn queued(&self) {
        // Who waits for it has not seen it there, or is woken.
        drop(self.state.lock());
        self.closed.notify_all();
    }

    fn begin_close(&self, file: &Handle) {
        *self.state.lock().closing.entry(*file).or_default() += 1;
    }

    fn end_close(&self, file: &Handle) {
        let mut state = self.state.lock();
        if let Some(count) = state.closing.get_mut(file) {
            *count -= 1;
            if *count == 0 {
                state.closing.remove(file);
            }
        }
        drop(state);
        self.closed.notify_all();
    }

    /// Files of which bytes were lost.
    pub(crate) fn count(&self) -> usize {
        self.state.lock().lost.len()
    }
}

/// Whether a sync that failed so may have lost bytes. Other numbers say that the call was not made: nothing was written,
/// nothing forgotten.
pub(crate) fn is_loss(errno: Errno) -> bool {
    let not_tried = [libc::EINTR, libc::EBADF, libc::EINVAL, libc::EROFS, libc::ENOSYS];
    !not_tried.contains(&errno.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files with losses, and how often any file may have one.
    fn of_any(losses: &Losses) -> (Option<Vec<Handle>>, u64) {
        let Lost { files, any } = losses.after_closes(Instant::now()).unwrap();
        (files, any)
    }

    fn file(number: u32) -> Handle {
        Handle::new(&number.to_le_bytes()).unwrap()
    }

    #[test]
    fn a_loss_is_told_from_then_on() {
        let losses = Losses::default();
        assert_eq!((losses.check(&file(1)), of_any(&losses)), (Ok(()), (Some(vec![]), 0)));
        assert_eq!(losses.observe(&file(1), Err(Errno(libc::EIO))), Err(Errno(libc::EIO)));
        assert_eq!(losses.observe(&file(1), Ok(())), Ok(()));
        assert_eq!(losses.check(&file(1)), Err(Errno(libc::EIO)));
        assert_eq!((losses.check(&file(2)), of_any(&losses)), (Ok(()), (Some(vec![file(1)]), 0)));
        losses.settle(&file(2), || Err(Errno(libc::ENOSPC)));
        assert_eq!(losses.check(&file(2)), Err(Errno(libc::ENOSPC)));
        // An interrupted sync loses nothing.
        assert_eq!(losses.observe(&file(3), Err(Errno(libc::EINTR))), Err(Errno(libc::EINTR)));
        assert_eq!(losses.check(&file(3)), Ok(()));
    }

    #[test]
    fn what_a_sync_of_the_file_system_says_once_is_told_to_all_who_need_one() {
        let (losses, lost) = (Losses::default(), Err(Errno(libc::EIO)));
        let not_tried = Err(Errno(libc::EINTR));
        assert_eq!((losses.sync_file_system(|| not_tried), losses.sync_file_system(|| Ok(()))), (not_tried, Ok(())));
        assert_eq!(losses.sync_file_system(|| lost), lost);
        assert_eq!((losses.sync_file_system(|| Ok(())), of_any(&losses)), (lost, (Some(vec![]), 1)));
        assert_eq!(losses.check(&file(1)), Ok(()), "its own descriptor says what it lost");
    }

    #[test]
    fn memory_is_bounded_and_no_loss_forgotten() {
        let losses = Losses::default();
        for number in 0..FILES_MAX as u32 {
            let _ = losses.observe(&file(number), Err(Errno(libc::EIO)));
        }
        assert_eq!(losses.check(&file(u32::MAX)), Ok(()));
        let _ = losses.observe(&file(u32::MAX), Err(Errno(libc::EIO)));
        assert_eq!(losses.check(&file(u32::MAX)), Err(Errno(libc::EIO)));
        assert_eq!((losses.count(), of_any(&losses)), (FILES_MAX, (None, 1)), "too many to be named");
        assert!(losses.check(&file(u32::MAX - 1)).is_err(), "where files no longer fit every one counts as lost");
    }
}
