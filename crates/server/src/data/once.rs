//! Copies of changes that were done already. A client sends a request again whose answer was lost; when the first copy was done, and
//! another client has written over it since, a second time would undo that.
//!
//! This lasts as long as the process. After a restart a copy is done again, as far as the server knows for the first time.

use std::ops::Range;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_node::session::{Change, Did, Recent, Rest};
use impresario_wire::{Sender, Who};

/// Shares of the memory, each with a lock of its own.
const SHARES: usize = 16;
/// Changes remembered in a share: 15 MB in all, once so many were done.
const CHANGES_MAX: usize = 1 << 14;

/// Whose a change is.
#[derive(Clone, Default)]
pub(super) struct Origin {
    of: Of,
    /// An earlier copy of it may have been done.
    pub(super) is_copy: bool,
}

#[derive(Clone)]
enum Of {
    One {
        client: u64,
        sequence: u64,
    },
    /// They share its bytes. Any of them may send his own again.
    Several(Arc<[Sender]>),
}

impl Default for Of {
    fn default() -> Of {
        Of::One { client: 0, sequence: 0 }
    }
}

impl Origin {
    /// A request of this client, and of others whose bytes an I/O node has put together with his.
    pub(super) fn new(who: Who, others: &[Sender]) -> Origin {
        let first = Sender::from(&who);
        let of = match others {
            [] => Of::One { client: who.client.0, sequence: who.sequence },
            others => Of::Several(std::iter::once(first).chain(others.iter().copied()).collect()),
        };
        Origin { of, is_copy: who.is_copy() && who.sequence != 0 }
    }

    fn for_each(&self, mut each: impl FnMut(u64, u64)) {
        match &self.of {
            Of::One { client, sequence } => each(*client, *sequence),
            Of::Several(senders) => senders.iter().for_each(|sender| each(sender.client.0, sender.sequence)),
        }
    }
}

/// What was done lately.
pub(super) struct Once([Mutex<Recent>; SHARES]);

impl Default for Once {
    fn default() -> Once {
        Once(std::array::from_fn(|_| Mutex::new(Recent::new(CHANGES_MAX))))
    }
}

impl Once {
    fn share(&self, client: u64, sequence: u64) -> &Mutex<Recent> {
        // The key is random, the sequence counts: both count.
        &self.0[(client ^ sequence) as usize % SHARES]
    }

    /// A change was done, when the object's last loss was `loss`.
    pub(super) fn note(&self, origin: &Origin, object: u64, did: Did, range: &Range<u64>, loss: u32) {
        origin.for_each(|client, sequence| {
            // Of one without a number no copy can be told.
            if sequence == 0 {
                return;
            }
            let change = Change { client, sequence, object, did, range: range.clone() };
            self.share(client, sequence).lock().note(change, loss);
        });
    }

    /// What is to be done of a copy, and the least loss of what was done.
    pub(super) fn rest(&self, origin: &Origin, object: u64, did: Did, range: Range<u64>) -> Rest {
        let Of::One { client, sequence } = origin.of else {
            // I/O nodes put no copies together with others.
            return Rest { ranges: [range].into_iter().collect(), least: None };
        };
        let change = Change { client, sequence, object, did, range };
        self.share(client, sequence).lock().rest(&change)
    }
}
