//! Write gathering: unstable writes are answered before they are done, so that a client sends its next ones while they wait,
//! and neighbours are written together (C. Juszczak, "Improving the Write Performance of an NFS Server", USENIX 1994). For
//! file systems without a page cache, where each write waits for the device.
//!
//! RFC 1813 lets the bytes of an UNSTABLE write be lost until its COMMIT, which waits for the writes before it here, as reads
//! do that overlap one. A write is answered early only where nothing but success is to be expected: within the length of a file
//! that the same user has just written through this server. If it fails all the same, the write verifier changes, so that
//! clients write again, and writes to that file wait for the device from then on. Changes of a file's attributes wait for its
//! gathered writes ([`Gathering::settle`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_backend::{Caller, Errno};
use impresario_base::lock::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::protocol::{Answer, Status};
use crate::service::Service;

/// How long a write of a user speaks for that user's next ones.
const RECENT: Duration = Duration::from_secs(3);
/// Files remembered at most, and gathered writes that are not done.
const FILES_MAX: usize = 1024;
const WRITES_MAX: u32 = 2048;
/// How long a change of a file's attributes waits for its gathered writes.
const SETTLE_MAX: Duration = Duration::from_secs(5);

/// A file that was written lately, or has gathered writes.
struct Written {
    by: Caller,
    size_bytes: u64,
    at: Instant,
    /// Gathered writes that are not done.
    gathered: u32,
}

#[derive(Default)]
struct State {
    files: FxHashMap<u64, Written>,
    /// Gathered writes that are not done, and their bytes.
    gathered: u32,
    gathered_bytes: u64,
    /// Since the start.
    answered_early: u64,
    lost: u64,
}

/// The gathered writes of a server.
pub struct Gathering {
    limit_bytes: u64,
    state: Mutex<State>,
    done: Condvar,
}

/// A gathered write that is not done. Dropped so, its bytes count as lost.
pub struct Gathered {
    service: Arc<Service>,
    file: u64,
    bytes: u64,
    is_over: bool,
}

impl Gathering {
    /// At most `limit_bytes` are answered and not written; 0: none.
    pub fn new(limit_bytes: u64) -> Gathering {
        Gathering { limit_bytes, state: Mutex::default(), done: Condvar::new() }
    }

    /// Whether writes are gathered at all.
    pub fn is_on(&self) -> bool {
        self.limit_bytes > 0
    }

    /// A user has written a file, which has this length now.
    pub fn wrote(&self, file: u64, by: &Caller, size_bytes: u64) {
        if !self.is_on() {
            return;
        }
        let state = &mut *self.state.lock();
        if let Some(written) = state.files.get_mut(&file) {
            if written.by != *by {
                written.by = by.clone();
            }
            (written.size_bytes, written.at) = (size_bytes, Instant::now());
            return;
        }
        if state.files.len() >= FILES_MAX {
            state.files.retain(|_, written| written.gathered > 0 || written.at.elapsed() < RECENT);
        }
        if state.files.len() < FILES_MAX {
            let written = Written { by: by.clone(), size_bytes, at: Instant::now(), gathered: 0 };
            state.files.insert(file, written);
        }
    }

    /// Gathers a write that ends at `end` of a file, if it may be answered before it is done.
    pub fn gather(&self, service: &Arc<Service>, file: u64, by: &Caller, bytes: u64, end: u64) -> Option<Gathered> {
        let state = &mut *self.state.lock();
        let has_room = state.gathered < WRITES_MAX && state.gathered_bytes.saturating_add(bytes) <= self.limit_bytes;
        let written = state.files.get_mut(&file)?;
        let is_expected = written.by == *by && written.at.elapsed() < RECENT && end <= written.size_bytes;
        if !has_room || !is_expected || service.verifier.has_lost(file) {
            return None;
        }
        written.gathered += 1;
        state.gathered += 1;
        state.gathered_bytes += bytes;
        state.answered_early += 1;
        Some(Gathered { service: service.clone(), file, bytes, is_over: false })
    }

    /// The length of a file is no longer known: its next write is not gathered.
    pub fn forget(&self, file: u64) {
        if self.is_on()
            && let Some(written) = self.state.lock().files.get_mut(&file)
        {
            written.size_bytes = 0;
        }
    }

    /// Before a change of a file by a call that the scheduler does not order behind its writes: waits for the gathered ones.
    /// Asks the client to try again if that takes long.
    pub fn settle(&self, file: u64) -> Answer<()> {
        if !self.is_on() {
            return Ok(());
        }
        // Writes that come meanwhile are not gathered.
        self.forget(file);
        let is_gathered = |state: &mut State| state.files.get(&file).is_some_and(|written| written.gathered > 0);
        let (mut state, _) = self.done.wait_timeout_while(self.state.lock(), SETTLE_MAX, is_gathered);
        if is_gathered(&mut state) {
            return Err(Status::JUKEBOX);
        }
        state.files.remove(&file);
        Ok(())
    }

    /// Waits until all gathered writes are done, for at most `patience`.
    pub fn settle_all(&self, patience: Duration) {
        drop(self.done.wait_timeout_while(self.state.lock(), patience, |state| state.gathered > 0));
    }

    /// For the server's state.
    pub fn describe(&self) -> Value {
        let state = self.state.lock();
        json!({
            "limit_bytes": self.limit_bytes,
            "answered_early": state.answered_early,
            "outstanding": state.gathered,
            "outstanding_bytes": state.gathered_bytes,
            "lost": state.lost,
        })
    }

    fn ended(&self, file: u64, bytes: u64, is_lost: bool) {
        let mut state = self.state.lock();
        state.gathered -= 1;
        state.gathered_bytes -= bytes;
        state.lost += u64::from(is_lost);
        let is_settled = state.files.get_mut(&file).is_none_or(|written| {
            written.gathered -= 1;
            written.gathered == 0
        });
        if is_settled {
            self.done.notify_all();
        }
    }
}

impl Gathered {
    /// It is done, or was not promised.
    pub fn over(mut self) {
        self.end(None);
    }

    /// It failed: clients write again what they have not committed.
    pub fn failed(mut self, error: Errno) {
        // Of a file that was removed meanwhile nothing is missed.
        self.end(Some(error).filter(|error| error.0 != libc::ESTALE));
    }

    fn end(&mut self, lost: Option<Errno>) {
        self.is_over = true;
        if let Some(error) = lost {
            self.service.verifier.lost(self.file, error);
        }
        self.service.gathering.ended(self.file, self.bytes, lost.is_some());
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if !self.is_over {
            // Clients of a server that stops see the verifier of the next one.
            self.end(Some(Errno(libc::EIO)).filter(|_| !self.service.is_stopping()));
        }
    }
}
