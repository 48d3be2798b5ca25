//! Reads that no client has requested yet, from a folder that this machine has mounted into its page cache.
//!
//! The folder may hang. Threads that take requests ask it nothing, not even for a file's length: that is left to the
//! threads that read ahead, and to those that forward. No lock is held over a call.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use impresario_backend::{Backend, Caller, Errno, Handle};
use impresario_engine::{Outcome, PagedFile, ReadAhead, Ticket, now};
use impresario_foresight::{ALONE_MAX, is_there};
use impresario_layout::Layout;
use impresario_sched::{Op, PolicySpec, PredictedQueues, policy};
use impresario_wire::FileKey;

use super::super::{HINTS_MAX, Item};
use super::files::{Files, OpenFile};
use crate::workers::{Workers, waiting_elsewhere};

/// What is read before it is asked for.
pub(crate) struct Foreseen {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) extent: Range<u64>,
}

/// Reads ahead of an I/O node's clients.
pub(crate) struct Ahead {
    reading: ReadAhead,
    threads: Workers,
    backend: Arc<dyn Backend>,
    caller: Caller,
    files: Arc<Files>,
    /// The policy lets what is foreseen be read ahead.
    foresees: AtomicBool,
}

/// A file as the page cache has it.
struct Paged<'a> {
    backend: &'a dyn Backend,
    caller: &'a Caller,
    handle: &'a Handle,
}

impl PagedFile for Paged<'_> {
    fn len_bytes(&self) -> u64 {
        // Each prediction would be a question to another machine; a length of a moment ago only makes it shorter.
        let known = self.backend.known_attr(self.handle);
        known.or_else(|| self.backend.attr(self.handle).ok()).map_or(0, |attr| attr.size_bytes)
    }

    fn has(&self, at: u64) -> bool {
        self.backend.is_in_memory(self.caller, self.handle, at)
    }

    fn will_read(&self, range: Range<u64>) {
        self.backend.will_read(self.handle, range.start, range.end.saturating_sub(range.start));
    }

    fn wait_for(&self, range: Range<u64>) -> io::Result<()> {
        let waited = self.backend.wait_for(self.caller, self.handle, range);
        waited.map_err(|Errno(errno)| io::Error::from_raw_os_error(errno))
    }
}

/// A file of which nothing is asked.
struct Unasked;

impl PagedFile for Unasked {
    fn len_bytes(&self) -> u64 {
        u64::MAX
    }

    fn has(&self, _: u64) -> bool {
        true
    }

    fn will_read(&self, _: Range<u64>) {}

    fn wait_for(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }
}

/// Offsets of the file are those of its lane, so what continues a request is on the lane of the request.
fn has_one_lane(layout: &Layout) -> bool {
    layout.pcount == 1
}

impl Ahead {
    /// At most `budget_bytes` are read ahead and not yet asked for.
    pub(super) fn new(budget_bytes: u64, backend: Arc<dyn Backend>, caller: Caller, files: Arc<Files>) -> Arc<Ahead> {
        let threads = Workers::new("read-ahead", 2 * ALONE_MAX as usize);
        let (reading, foresees) = (ReadAhead::new(budget_bytes), AtomicBool::new(false));
        Arc::new(Ahead { reading, threads, backend, caller, files, foresees })
    }

    pub(super) fn threads(&self) -> &Workers {
        &self.threads
    }

    /// This policy decides from now on.
    pub(in crate::io_node) fn follow_policy(&self, spec: &PolicySpec) {
        let foresees = policy::speculates(spec);
        self.foresees.store(foresees, Relaxed);
        if !foresees {
            self.reading.rest();
        }
    }

    /// What earlier runs foretell of reads.
    pub(in crate::io_node) fn foretell(&self, queues: Option<&PredictedQueues>) {
        self.reading.foretell(queues);
    }

    pub(in crate::io_node) fn describe(&self) -> serde_json::Value {
        self.reading.describe()
    }

    /// Reads are known to go through the page cache, and may be foreseen.
    fn is_on(&self) -> bool {
        self.foresees.load(Relaxed) && self.backend.has_page_cache()
    }

    fn paged<'a>(&'a self, file: &'a OpenFile) -> Paged<'a> {
        Paged { backend: &*self.backend, caller: &self.caller, handle: &file.handle }
    }

    /// A request came that will be scheduled. What should be read before it is asked for.
    pub(in crate::io_node) fn observe(
        &self,
        op: Op,
        (key, layout): (FileKey, &Layout),
        extent: Range<u64>,
        client: u64,
    ) -> Vec<Foreseen> {
        if !self.is_on() {
            return Vec::new();
        }
        if !has_one_lane(layout) {
            self.reading.observe_hints(op, key.0, extent);
            return Vec::new();
        }
        let predictions = self.reading.observe(op, (key.0, &Unasked), extent, client);
        let Some(file) = (!predictions.is_empty()).then(|| self.files.get(key)).flatten() else { return Vec::new() };
        predictions.into_iter().map(|of| Foreseen { file: file.clone(), extent: of.extent }).collect()
    }

    /// A file is about to be cut to a length, or its last name is gone, which the scheduler does not know of.
    pub(super) fn changed(&self, op: Op, key: FileKey, from: u64) {
        self.reading.observe(op, (key.0, &Unasked), from..u64::MAX, 0);
    }

    /// A client says what it will read; on a thread that may wait. How many bytes are, or are to be, read ahead for it, and
    /// what of them should be scheduled now.
    pub(in crate::io_node) fn hinted(
        self: &Arc<Self>,
        key: FileKey,
        extent: Range<u64>,
        client: u64,
    ) -> (u64, Vec<Foreseen>) {
        let Some(file) = self.files.get(key) else { return (0, Vec::new()) };
        // Whether reads go through the page cache the first one shows.
        let shows = || self.backend.read(&self.caller, &file.handle, extent.start, &mut [0]).is_ok();
        let is_paged = || self.backend.has_page_cache() || shows() && self.backend.has_page_cache();
        if !self.foresees.load(Relaxed) || self.threads.waiting() >= HINTS_MAX || !is_paged() {
            return (0, Vec::new());
        }
        let (bytes, fresh) = self.reading.hinted((key.0, &self.paged(&file)), std::iter::once(extent), client);
        let fresh: Vec<_> = fresh.into_iter().map(|extent| Foreseen { file: file.clone(), extent }).collect();
        if has_one_lane(&file.striping.layout) || fresh.is_empty() {
            return (bytes, fresh);
        }
        // One after the other: nothing orders them among the requests.
        self.on_a_thread(move |ahead| fresh.iter().for_each(|of| drop(ahead.fetch(of))));
        (bytes, Vec::new())
    }

    /// A read of these bytes is about to be made; on a thread that may wait. Has the kernel begin with it and with what continues
    /// it in one piece, unless memory has what is asked for. Whether it was begun so.
    pub(in crate::io_node) fn begin(&self, key: FileKey, extent: &Range<u64>, along: &[Foreseen]) -> bool {
        let Some(file) = self.files.get(key).filter(|file| has_one_lane(&file.striping.layout)) else { return false };
        if !self.is_on() {
            return false;
        }
        // Beyond its end a file has nothing that could be in memory, or be waited for.
        let known_bytes = self.backend.known_attr(&file.handle).map_or(u64::MAX, |attr| attr.size_bytes);
        let (paged, extent) = (self.paged(&file), extent.start..extent.end.min(known_bytes));
        if extent.is_empty() || is_there(&extent, |at| paged.has(at)) {
            return false;
        }
        self.reading.waited((key.0, &paged), &extent);
        let Some(end) = along.iter().map(|of| of.extent.end).max() else { return false };
        paged.will_read(extent.start..end.max(extent.end));
        true
    }

    /// Has what continues a read come, or takes note when it does if it was begun with that. What was asked for is answered;
    /// nothing waits for the rest.
    pub(in crate::io_node) fn go_on(self: &Arc<Self>, along: Vec<Foreseen>, begun: bool) {
        for of in along {
            self.on_a_thread(move |ahead| {
                // A request for these bytes will report an error itself.
                drop(match begun {
                    true => ahead.within(&of, |paged, extent| ahead.reading.follow((of.file.key.0, paged), &extent)),
                    false => ahead.fetch(&of).map(drop),
                });
            });
        }
    }

    /// Reads ahead with a batch of its own, whose ticket this is; `noted` is dropped when it is done.
    pub(in crate::io_node) fn read_alone(
        self: &Arc<Self>,
        of: Foreseen,
        ticket: Ticket<Item>,
        noted: impl Send + 'static,
    ) {
        let ahead = self.clone();
        self.threads.run(Box::new(move || {
            let started = now();
            let read = waiting_elsewhere(|| ahead.fetch(&of));
            // A request for these bytes will report an error itself.
            let (errno, bytes_done) = match read {
                Ok(()) => (0, of.extent.end - of.extent.start),
                Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), 0),
            };
            drop(noted);
            ticket.complete(Outcome { errno, bytes_done, started, finished: now() });
        }));
    }

    fn fetch(&self, of: &Foreseen) -> io::Result<()> {
        self.within(of, |paged, extent| self.reading.fetch((of.file.key.0, paged), extent))
    }

    /// Does it with what is foreseen as far as the file reaches, which nobody has asked until now.
    fn within(&self, of: &Foreseen, read: impl FnOnce(&Paged<'_>, Range<u64>) -> io::Result<()>) -> io::Result<()> {
        let (paged, mut extent) = (self.paged(&of.file), of.extent.clone());
        let end = paged.len_bytes();
        if end < extent.end {
            self.reading.ended(of.file.key.0, extent.clone(), end);
            extent.end = end;
        }
        if extent.start < extent.end { read(&paged, extent) } else { Ok(()) }
    }

    fn on_a_thread(self: &Arc<Self>, job: impl FnOnce(&Ahead) + Send + 'static) {
        let ahead = self.clone();
        self.threads.run(Box::new(move || waiting_elsewhere(|| job(&ahead))));
    }
}
