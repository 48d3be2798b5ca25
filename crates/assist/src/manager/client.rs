//! One program that is connected: its socket, its ring and the files it has open.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use impresario_ring::{Consumer, Sleep};
use rustc_hash::FxHashMap;

use super::lull::Lull;
use super::pool::LentFile;
use super::programs::Taught;
use super::siblings::Told;
use crate::advice::OpenFile;
use crate::backend::{FileId, Inside};
use crate::learn::{Kind, file_time_ns};

/// Drains of an empty ring before the manager waits to be woken by it.
const QUIET_DRAINS: u32 = 8;

/// A file that a program has open.
#[derive(Debug)]
pub(super) struct Open {
    /// For hints; `None` when the file is only recorded.
    pub(super) advised: Option<Advised>,
    /// It is so small that the program passes it over in a lull.
    pub(super) is_small: bool,
    /// The program has closed it.
    pub(super) is_leaving: bool,
    /// Its number in the record.
    pub(super) number: u64,
}

#[derive(Debug)]
pub(super) struct Advised {
    pub(super) id: FileId,
    pub(super) fd: Arc<LentFile>,
    pub(super) mode: OpenFile,
    /// The program has mapped the file, which lasts when it closes the descriptor.
    pub(super) is_mapped: bool,
}

#[derive(Debug)]
pub(super) struct Client {
    /// Number of this connection, used once.
    pub(super) id: u64,
    pub(super) socket: OwnedFd,
    pub(super) uid: u32,
    pub(super) pid: u32,
    /// When it connected, on the manager's clock.
    pub(super) since_ns: u64,
    /// Both from its Hello on. The event descriptor is only waited for, never read: its owner could make that block.
    pub(super) ring: Option<(Consumer, OwnedFd)>,
    pub(super) files: FxHashMap<u32, Open>,
    /// Files that it closed and has mapped: that a map ends is not told.
    pub(super) mapped: Vec<Advised>,
    /// When it is looked which of them it has mapped still; `u64::MAX` until a worker has told.
    pub(super) look_at_maps_ns: u64,
    /// The program's own thread for hints, if there is one.
    pub(super) inside: Arc<Inside>,
    /// Files that the program closed, but whose last accesses may still be in the ring.
    pub(super) leaving: Vec<u32>,
    /// It is asked what is known of it: until this instant nothing that it says is taken, and its socket is not waited for.
    pub(super) asked_until_ns: Option<u64>,
    /// Its name; empty when it is not known.
    pub(super) program: Arc<str>,
    /// What is known of it.
    pub(super) kinds: Arc<[Kind]>,
    /// What is needed to learn from it; `None` where nothing can be.
    pub(super) taught: Option<Taught>,
    /// The recorded run that it is of.
    pub(super) lesson: Option<u64>,
    /// When it connected, in nanoseconds since 1970.
    pub(super) began_unix_ns: u64,
    /// Whether it need not tell of small files.
    pub(super) lull: Lull,
    /// The files that it told of, by which that is judged.
    pub(super) told: Told,
    /// Registrations that found no room were told of in the log.
    pub(super) told_of_limit: bool,
    quiet: u32,
}

impl Client {
    pub(super) fn new(id: u64, socket: OwnedFd, uid: u32, pid: u32, since_ns: u64) -> Client {
        let files = FxHashMap::default();
        Client {
            id,
            socket,
            uid,
            pid,
            since_ns,
            ring: None,
            files,
            mapped: Vec::new(),
            look_at_maps_ns: 0,
            inside: Arc::default(),
            leaving: Vec::new(),
            asked_until_ns: None,
            program: Arc::default(),
            kinds: Arc::default(),
            taught: None,
            lesson: None,
            began_unix_ns: file_time_ns(),
            lull: Lull::first(),
            told: Told::default(),
            told_of_limit: false,
            quiet: 0,
        }
    }

    /// It says that it closed a file. That counts once, and of files that it has told of: it may say so without end while its ring
    /// is never empty.
    pub(super) fn closes(&mut self, number: u32) {
        if let Some(open) = self.files.get_mut(&number).filter(|open| !open.is_leaving) {
            open.is_leaving = true;
            self.leaving.push(number);
        }
    }

    /// After a drain: whether its ring must be looked at again soon. If not, it wakes the manager.
    pub(super) fn stays_active(&mut self, drained_something: bool) -> bool {
        let Some((ring, _)) = &mut self.ring else { return false };
        if drained_something {
            self.quiet = 0;
            return true;
        }
        self.quiet += 1;
        if self.quiet < QUIET_DRAINS {
            return true;
        }
        match ring.sleep() {
            Sleep::Allowed => {
                self.quiet = 0;
                false
            }
            Sleep::Pending => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_cannot_close_more_than_it_has_open() {
        let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
        let mut client = Client::new(1, socket.into(), 0, 0, 0);
        for number in [7, 9] {
            client.files.insert(number, Open { advised: None, is_small: false, is_leaving: false, number: 1 });
        }
        (0..1000).chain(0..1000).for_each(|number| client.closes(number));
        assert_eq!(client.leaving, [7, 9]);
    }
}
