//! The files a client has open, kept registered with the metadata server across lost connections.
//!
//! An open file that is idle makes no call that would notice a lost connection. While files are open, a thread looks
//! once a second whether the metadata connection still stands, and registers them anew when it does not: the server
//! keeps removed files only for a while after a restart, and must know who writes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::client::Client;
use crate::file::OpenFile;
use impresario_base::lock::Mutex;

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The open files of a client.
#[derive(Default)]
pub(crate) struct Opens {
    next: AtomicU64,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    files: FxHashMap<u64, Weak<OpenFile>>,
    /// The keeper runs.
    is_kept: bool,
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

    pub(crate) fn remove(&self, number: u64) {
        self.table.lock().files.remove(&number);
    }

    pub(crate) fn note_rename(&self, from: &[u8], to: &[u8]) {
        self.all().iter().for_each(|file| file.note_rename(from, to));
    }

    pub(crate) fn note_exchange(&self, from: &[u8], to: &[u8]) {
        self.all().iter().for_each(|file| file.note_exchange(from, to));
    }

    pub(crate) fn note_link(&self, from: &[u8], to: &[u8]) {
        self.all().iter().for_each(|file| file.note_link(from, to));
    }

    pub(crate) fn note_unlink(&self, path: &[u8]) {
        self.all().iter().for_each(|file| file.note_unlink(path));
    }

    pub(crate) fn all(&self) -> Vec<Arc<OpenFile>> {
        self.table.lock().files.values().filter_map(Weak::upgrade).collect()
    }

    /// True when the keeper has nothing to do and ends.
    fn stop_keeping(&self) -> bool {
        let mut table = self.table.lock();
        if table.files.is_empty() {
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
