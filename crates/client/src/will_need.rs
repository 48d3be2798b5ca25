//! Hints that a program gives and does not wait for: a thread of the client passes them on, one at a time.
//!
//! A hint is worth less than a request: it never waits for room, and one that comes while many wait is dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use impresario_base::folders::Folders;
use impresario_base::lock::{Condvar, Mutex};
use impresario_layout::Layout;
use impresario_wire::FileKey;

use crate::client::Client;

/// Hints that wait at most.
const WAITING_MAX: usize = 64;
/// The thread ends when nothing comes for this time.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes of a file that will be read.
pub(crate) struct Hint {
    pub(crate) folders: Folders,
    pub(crate) file: FileKey,
    pub(crate) layout: Layout,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The hints of a client that are to be passed on.
#[derive(Default)]
pub(crate) struct Hints(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    came: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Hint>,
    /// The thread runs.
    is_served: bool,
}

impl Hints {
    /// Has a hint passed on soon; drops it when too many wait.
    pub(crate) fn push(&self, client: &Arc<Client>, hint: Hint) {
        let mut queue = self.0.queue.lock();
        if queue.waiting.len() >= WAITING_MAX {
            return;
        }
        queue.waiting.push_back(hint);
        if queue.is_served {
            drop(queue);
            return self.0.came.notify_one();
        }
        let (shared, client) = (self.0.clone(), Arc::downgrade(client));
        let thread = std::thread::Builder::new().name("hints".into()).stack_size(128 << 10);
        queue.is_served = thread.spawn(move || shared.serve(&client)).is_ok();
        if !queue.is_served {
            queue.waiting.clear();
        }
    }
}

impl Shared {
    /// Ends when the client is gone, or no hint comes for a while.
    fn serve(&self, client: &Weak<Client>) {
        loop {
            let mut queue = self.queue.lock();
            if queue.waiting.is_empty() {
                queue = self.came.wait_timeout(queue, LINGER).0;
            }
            let (Some(hint), Some(client)) = (queue.waiting.pop_front(), client.upgrade()) else {
                queue.is_served = false;
                return;
            };
            drop(queue);
            if let Err(error) = client.prefetch(hint.folders, hint.file, &hint.layout, hint.offset, hint.len) {
                tracing::debug!(%error, "a hint was not taken");
            }
        }
    }
}
