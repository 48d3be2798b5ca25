//! The files a client has open, kept registered with the metadata server across lost connections.
//!
//! An open file that is idle makes no call that would notice a lost connection. While files are open, a thread looks
//! once a second whether the metadata connection still stands, and registers them anew when it does not: the server
//! keeps removed files only for a while after a restart, and must know who writes.
//!
//! A close of a file to which nothing was written tells the server only that the open is over, and is not waited for: it is sent, and
//! its answer is taken with a later one, by that thread, or when the client is dropped. Where the server refuses it (it may be too busy,
//! or know the client in a later epoch), it is made again; a lost connection ends the open by itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_wire::{Answer, Call, MetaCall};
use rustc_hash::FxHashMap;

use crate::client::Client;
use crate::connection::{Connection, Outcome};
use crate::file::OpenFile;
use crate::paths::OpenPaths;
use impresario_base::lock::Mutex;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Closes of a client that are under way without being waited for, at most.
const CLOSES_MAX: usize = 16;

/// The open files of a client.
#[derive(Default)]
pub(crate) struct Opens {
    next: AtomicU64,
    table: Mutex<Table>,
    /// Apart from the files' registrations, which are held while the metadata server is asked.
    pub(crate) paths: OpenPaths,
}

#[derive(Default)]
struct Table {
    files: FxHashMap<u64, Weak<OpenFile>>,
    /// Closes that were sent, and have no answer yet as far as is known.
    closes: Vec<Close>,
    /// These, those that are being sent, and those whose answer the keeper waits for.
    under_way: usize,
    /// Opens and closes that threads are at.
    changing: usize,
    /// The keeper runs.
    is_kept: bool,
}

/// An open or a close, until its answer is here and the table says so: see [`Opens::are_none`].
pub(crate) struct Changing<'a>(&'a Opens);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.table.lock().changing -= 1;
    }
}

/// A close that no thread waits for.
struct Close {
    connection: Arc<Connection>,
    id: u64,
    handle: u64,
}

impl Close {
    /// What is sent.
    fn call(client: &Client, handle: u64) -> Call {
        Call::Meta { who: client.identity().who(), call: MetaCall::Close { handle, wrote: false } }
    }

    /// Makes it again, and waits, if the server has not done it as far as is known. A second copy harms nothing: handles are not
    /// used again.
    fn repeat_if_undone(&self, client: &Client, outcome: &Outcome, patience: Duration) {
        if let Outcome::Answered(Answer::Fault(_), ..) | Outcome::Late = outcome {
            let (call, deadline) = (Close::call(client, self.handle), Instant::now() + patience);
            if let Err(error) = client.meta_link().call_in(self.connection.session, call, deadline) {
                tracing::debug!(%error, "closing a file");
            }
        }
    }
}

impl Opens {
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn insert(&self, client: &Arc<Client>, number: u64, file: &Arc<OpenFile>) {
        let mut table = self.table.lock();
        table.files.insert(number, Arc::downgrade(file));
        if !table.is_kept {
            let client = Arc::downgrade(client);
            // Without a keeper files are registered anew when they are used: worse, but not wrong.
            let keeper = std::thread::Builder::new().name("opens".into()).stack_size(128 << 10);
            table.is_kept = keeper.spawn(move || keep(&client)).is_ok();
        }
    }

    /// Begins an open or a close. To be called before it asks for the way of its call.
    pub(crate) fn changing(&self) -> Changing<'_> {
        self.table.lock().changing += 1;
        Changing(self)
    }

    pub(crate) fn remove(&self, number: u64) {
        self.table.lock().files.remove(&number);
    }

    /// Closes a file, which was opened as `handle` in `session` and not written, without waiting for the answer. False: it is to be
    /// closed with waiting.
    pub(crate) fn close_unwritten(
        &self,
        client: &Client,
        number: u64,
        (session, handle): (u64, u64),
        deadline: Instant,
    ) -> bool {
        self.take_answers(client);
        {
            let mut table = self.table.lock();
            if !table.is_kept || table.under_way >= CLOSES_MAX {
                return false;
            }
            // In one step, so that the keeper stays.
            table.files.remove(&number);
            table.under_way += 1;
        }
        let sent = client.meta_link().start_in(session, &Close::call(client, handle), deadline);
        let mut table = self.table.lock();
        match sent {
            Some((connection, id)) => table.closes.push(Close { connection, id, handle }),
            None => {
                table.under_way -= 1;
                return false;
            }
        }
        true
    }

    /// Ends the closes of which the answers are here.
    fn take_answers(&self, client: &Client) {
        let mut ended = Vec::new();
        {
            let mut table = self.table.lock();
            for close in std::mem::take(&mut table.closes) {
                match close.connection.answer_of(close.id) {
                    Some(outcome) => ended.push((close, outcome)),
                    None => table.closes.push(close),
                }
            }
        }
        self.end(client, ended, client.timeout());
    }

    /// Waits so long for the answers to the closes that were sent, and as long as `patience` to each that has to be made again.
    pub(crate) fn await_answers(&self, client: &Client, wait: Duration, patience: Duration) {
        let (closes, deadline) = (std::mem::take(&mut self.table.lock().closes), Instant::now() + wait);
        let ended = closes.into_iter().map(|close| {
            let outcome = close.connection.wait(close.id, deadline).outcome;
            (close, outcome)
        });
        self.end(client, ended.collect(), patience);
    }

    /// Closes have ended, one way or the other.
    fn end(&self, client: &Client, ended: Vec<(Close, Outcome)>, patience: Duration) {
        for (close, outcome) in ended {
            close.repeat_if_undone(client, &outcome, patience);
            self.table.lock().under_way -= 1;
        }
    }

    #[cfg(test)]
    pub(crate) fn closes_under_way(&self) -> usize {
        self.table.lock().under_way
    }

    /// No file is open, and no open or close under way.
    pub(crate) fn are_none(&self) -> bool {
        let table = self.table.lock();
        table.files.is_empty() && table.under_way == 0 && table.changing == 0
    }

    pub(crate) fn all(&self) -> Vec<Arc<OpenFile>> {
        self.table.lock().files.values().filter_map(Weak::upgrade).collect()
    }

    /// True when the keeper has nothing to do and ends.
    fn stop_keeping(&self) -> bool {
        let mut table = self.table.lock();
        if table.files.is_empty() && table.under_way == 0 {
            table.is_kept = false;
        }
        !table.is_kept
    }
}

/// Ends when no file is open: each holds its client, so it does not outlive that.
fn keep(client: &Weak<Client>) {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let Some(client) = client.upgrade() else { return };
        if client.opens.stop_keeping() {
            return;
        }
        client.opens.await_answers(&client, LOOK_EVERY.min(client.timeout()), client.timeout());
        let session = client.meta_link().session_now();
        for file in client.opens.all().iter().filter(|file| file.is_unregistered(session)) {
            // Not longer: other users of the file wait for us meanwhile.
            if let Err(error) = file.register(Instant::now() + LOOK_EVERY.min(client.timeout())) {
                tracing::debug!(%error, "an open file could not be registered anew");
                break;
            }
        }
    }
}
