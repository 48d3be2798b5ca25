//! Whether the kernel's view of a file is as new as an open requires (close-to-open).
//!
//! The kernel caches a file's size and pages for a while. At every open we have the file's current attributes from the
//! server and decide two things. First, whether the kernel must look the file up again because it believes another size
//! (an append or a read up to the end would go wrong). Second, whether its cached pages may stay.
//!
//! Between opens, a program that reads what it also writes makes the kernel ask for the size after every write. As long
//! as attributes may be cached, [`Freshness::recent`] answers that request locally.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use impresario_base::lock::Mutex;
use impresario_wire::{Attr, FileKey, Time};

use crate::attr::system_time;

/// A file changed more recently than this may change again without a new time stamp (the servers' clocks tick in
/// milliseconds), so its pages are not kept.
const SETTLED: Duration = Duration::from_secs(1);

/// An answer may come so much later than one to a later question. It is longer than clients wait for a server.
const LATE_MAX: Duration = Duration::from_secs(300);

/// The kernel's view of one file or directory.
#[derive(Debug, Default)]
pub(crate) struct Freshness {
    /// The size that the kernel uses, bytes.
    size: AtomicU64,
    /// Permission bits.
    mode: AtomicU32,
    /// Owner and group.
    uid: AtomicU32,
    gid: AtomicU32,
    /// It is known to have no access control lists and no attributes `security.*`.
    unlabelled: AtomicBool,
    /// When this mount gave it such an attribute, or took one.
    labelled_at: Mutex<Option<Instant>>,
    /// It is known to have no capability, as a file has none that was just written.
    incapable: AtomicBool,
    /// Writes through this mount: started, and ended (or truncations).
    begun: AtomicU64,
    writes: AtomicU64,
    /// Handle of the open that wrote last through this mount; 0: none has.
    last_writer: AtomicU64,
    /// How often its size may have changed without a write through this mount: it was cut or extended, or a lock was granted, which
    /// shows what other nodes have written.
    turns: AtomicU64,
    /// The server's latest attributes and this mount's writes since.
    view: Mutex<Option<View>>,
    /// When the kernel got attributes last.
    told: Mutex<Option<Instant>>,
    /// The version of the file that came with its last lock: the kernel's pages hold what others had written before.
    lock_version: Mutex<Option<u64>>,
    /// The version of the file that the kernel's cached pages hold.
    pages: Mutex<Option<Stamp>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    file: FileKey,
    size: u64,
    mtime: Time,
    /// Programs can set the modification time back after they have written, but not this one.
    ctime: Time,
    writes: u64,
}

#[derive(Clone, Copy, Debug)]
struct View {
    attr: Attr,
    at: Instant,
    /// Largest end offset of a write since, bytes.
    end: u64,
}

/// Taken before the server is asked for attributes: shows whether a write overlapped the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    begun: u64,
    ended: u64,
    turns: u64,
}

/// The decision on an open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The kernel believes another size: make it look the path up again (it does so on ESTALE, once).
    LookUpAgain,
    /// Open it; cached pages stay or not.
    Open {
        /// The cached pages are what the server has.
        keep_pages: bool,
    },
    /// The same, but the kernel believes another size and has looked up again already: it must not read by its size.
    OpenPastTheKernel,
}

impl Freshness {
    /// These attributes were sent to the kernel.
    pub(crate) fn kernel_has(&self, attr: &Attr) {
        self.size.store(attr.size, Relaxed);
        self.mode.store(attr.mode, Relaxed);
        self.uid.store(attr.uid, Relaxed);
        self.gid.store(attr.gid, Relaxed);
        // What was asked before this mount labelled it does not take that back: the kernel would be told that there is no access
        // control list, and let in whom it forbids.
        let labelled_at = self.labelled_at.lock();
        if attr.labelled || labelled_at.is_none_or(|at| at.elapsed() >= LATE_MAX) {
            self.unlabelled.store(!attr.labelled, Relaxed);
            self.incapable.store(!attr.labelled, Relaxed);
        }
        drop(labelled_at);
        *self.view.lock() = None;
        *self.told.lock() = Some(Instant::now());
    }

    /// Whether the kernel got attributes within the last `age_max`.
    pub(crate) fn was_told_within(&self, age_max: Duration) -> bool {
        self.told.lock().is_some_and(|told| told.elapsed() < age_max)
    }

    /// Whether it may have access control lists or attributes `security.*`.
    pub(crate) fn is_labelled(&self) -> bool {
        !self.unlabelled.load(Relaxed)
    }

    /// It got such an attribute.
    pub(crate) fn label(&self) {
        let mut labelled_at = self.labelled_at.lock();
        *labelled_at = Some(Instant::now());
        self.unlabelled.store(false, Relaxed);
        self.incapable.store(false, Relaxed);
    }

    /// True when the file may have a capability, which whoever asks takes away.
    pub(crate) fn takes_capability(&self) -> bool {
        self.is_labelled() && !self.incapable.swap(true, Relaxed)
    }

    /// A write through this mount starts.
    pub(crate) fn write_begins(&self) {
        let _view = self.view.lock();
        self.begun.fetch_add(1, Relaxed);
    }

    /// The open with this handle writes. True: another wrote last.
    pub(crate) fn changes_writer(&self, handle: u64) -> bool {
        let last = self.last_writer.swap(handle, Relaxed);
        last != 0 && last != handle
    }

    /// The write ended at `end`, and the kernel adjusts its size; `None`: it failed.
    pub(crate) fn write_ended(&self, end: Option<u64>) {
        let mut view = self.view.lock();
        self.writes.fetch_add(1, Relaxed);
        match (end, &mut *view) {
            (Some(end), Some(view)) => view.end = view.end.max(end),
            // A part of it may have been written.
            (None, view) => *view = None,
            _ => {}
        }
        self.size.fetch_max(end.unwrap_or(0), Relaxed);
    }

    /// An append ended elsewhere than the kernel believes, or storage was allocated up to `end`, to which it adjusts its size.
    pub(crate) fn append_ended(&self, end: u64) {
        self.write_ended(None);
        self.size.fetch_max(end, Relaxed);
    }

    /// After an open with truncation succeeds, the kernel sets its size to zero itself.
    pub(crate) fn emptied(&self) {
        self.write_begins();
        self.write_ended(None);
        self.size.store(0, Relaxed);
    }

    /// Taken before a request to the server and passed to [`Freshness::learnt`].
    pub(crate) fn mark(&self) -> Mark {
        let _view = self.view.lock();
        let (begun, ended) = (self.begun.load(Relaxed), self.writes.load(Relaxed));
        Mark { begun, ended, turns: self.turns.load(Relaxed) }
    }

    /// A call that sets the file's length has been answered, if only by an error: what the server said before may be out of date.
    pub(crate) fn resized(&self) {
        self.turned();
    }

    /// Attributes that were asked for before this are not kept, even if they arrive later.
    fn turned(&self) {
        let mut view = self.view.lock();
        self.turns.fetch_add(1, Relaxed);
        *view = None;
    }

    /// These attributes were sent to the kernel; the server was asked for them after `mark`.
    pub(crate) fn learnt(&self, attr: &Attr, mark: Mark, now: Instant) {
        self.kernel_has(attr);
        let mut view = self.view.lock();
        // They may or may not include a concurrent write.
        if self.has_no_write_since(mark) {
            *view = Some(View { attr: *attr, at: now, end: 0 });
        }
    }

    /// A lock was granted with this version: attributes have to be asked for again. True when no other node has changed the
    /// file under a lock since this one had the last.
    pub(crate) fn locked(&self, version: u64) -> bool {
        self.turned();
        self.lock_version.lock().replace(version) == Some(version)
    }

    fn is_quiet_since(&self, mark: Mark) -> bool {
        let _view = self.view.lock();
        self.has_no_write_since(mark)
    }

    /// Call with `view` locked.
    fn has_no_write_since(&self, mark: Mark) -> bool {
        let is_unturned = self.turns.load(Relaxed) == mark.turns;
        is_unturned && mark.begun == mark.ended && self.begun.load(Relaxed) == mark.begun
    }

    /// The server's attributes, at most `age_max` old, with the size updated by this mount's writes since, and the storage
    /// by what the file has grown. Their times are not updated, so callers may use these only.
    pub(crate) fn recent(&self, now: Instant, age_max: Duration) -> Option<Attr> {
        let view = (*self.view.lock())?;
        let young = now.saturating_duration_since(view.at) < age_max;
        let grown = view.end.saturating_sub(view.attr.size);
        let (size, used_bytes) = (view.attr.size + grown, view.attr.used_bytes.saturating_add(grown));
        young.then_some(Attr { size, used_bytes, ..view.attr })
    }

    /// Permission bits last sent to the kernel.
    pub(crate) fn mode(&self) -> u32 {
        self.mode.load(Relaxed)
    }

    /// This mount changed the permission bits.
    pub(crate) fn set_mode(&self, mode: u32) {
        self.mode.store(mode, Relaxed);
    }

    /// Owner last sent to the kernel.
    pub(crate) fn uid(&self) -> u32 {
        self.uid.load(Relaxed)
    }

    /// Group last sent to the kernel.
    pub(crate) fn gid(&self) -> u32 {
        self.gid.load(Relaxed)
    }

    /// Whether the kernel has checked the permissions that these attributes have.
    pub(crate) fn has_permissions_of(&self, attr: &Attr) -> bool {
        let checked = (self.mode.load(Relaxed), self.uid.load(Relaxed), self.gid.load(Relaxed));
        checked == (attr.mode, attr.uid, attr.gid)
    }

    /// Decides on an open that found `attr` on the server, asked after `mark`. A `spared` one must not be refused.
    pub(crate) fn judge(&self, file: FileKey, attr: &Attr, mark: Mark, spared: bool, now: SystemTime) -> Verdict {
        // The kernel knows about this mount's own writes.
        let differs = self.size.load(Relaxed) != attr.size && self.is_quiet_since(mark);
        if differs {
            return if spared { Verdict::OpenPastTheKernel } else { Verdict::LookUpAgain };
        }
        let Attr { size, mtime, ctime, .. } = *attr;
        let stamp = Stamp { file, size, mtime, ctime, writes: self.writes.load(Relaxed) };
        let is_old = |time| now.duration_since(system_time(time)).is_ok_and(|age| age >= SETTLED);
        let settled = is_old(mtime) && is_old(ctime);
        let mut pages = self.pages.lock();
        let keep_pages = settled && *pages == Some(stamp);
        *pages = settled.then_some(stamp);
        Verdict::Open { keep_pages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_wire::NodeKind;

    const FILE: FileKey = FileKey(7);

    fn attr(size: u64, mtime_secs: i64) -> Attr {
        Attr {
            ino: 5,
            kind: NodeKind::File,
            mode: 0o4755,
            nlink: 1,
            uid: 1,
            gid: 2,
            size,
            used_bytes: size,
            atime: Time::default(),
            mtime: Time { secs: mtime_secs, nanos: 0 },
            ctime: Time::default(),
            labelled: false,
        }
    }

    fn judge(fresh: &Freshness, file: FileKey, attr: &Attr, now: SystemTime) -> Verdict {
        fresh.judge(file, attr, fresh.mark(), false, now)
    }

    fn write(fresh: &Freshness, end: Option<u64>) {
        fresh.write_begins();
        fresh.write_ended(end);
    }

    fn at(secs: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
    }

    #[test]
    fn pages_stay_only_when_nothing_changed() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        assert_eq!(judge(&fresh, FILE, &attr(10, 100), at(200)), Verdict::Open { keep_pages: false }, "first open");
        assert_eq!(judge(&fresh, FILE, &attr(10, 100), at(201)), Verdict::Open { keep_pages: true });
        assert_eq!(judge(&fresh, FILE, &attr(10, 150), at(202)), Verdict::Open { keep_pages: false }, "another time");
        assert_eq!(judge(&fresh, FILE, &attr(10, 150), at(203)), Verdict::Open { keep_pages: true });
        assert_eq!(
            judge(&fresh, FileKey(8), &attr(10, 150), at(204)),
            Verdict::Open { keep_pages: false },
            "another file"
        );
    }

    #[test]
    fn pages_of_a_file_that_just_changed_do_not_stay() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        for now in [100, 100, 99] {
            assert_eq!(judge(&fresh, FILE, &attr(10, 100), at(now)), Verdict::Open { keep_pages: false });
        }
        let set_back = Attr { ctime: Time { secs: 200, nanos: 0 }, ..attr(10, 100) };
        for (now, keep_pages) in [(200, false), (200, false), (201, false), (202, true)] {
            assert_eq!(judge(&fresh, FILE, &set_back, at(now)), Verdict::Open { keep_pages }, "{now}");
        }
    }

    #[test]
    fn a_lock_makes_attributes_be_asked_for_and_pages_stay_with_the_same_version() {
        let (fresh, now) = (Freshness::default(), Instant::now());
        fresh.learnt(&attr(10, 100), fresh.mark(), now);
        let asked_before = fresh.mark();
        assert!(!fresh.locked(7), "the first");
        fresh.learnt(&attr(10, 100), asked_before, now);
        assert!(fresh.recent(now, Duration::MAX).is_none(), "another node may have written before it unlocked");
        let asked_before = fresh.mark();
        fresh.resized();
        fresh.learnt(&attr(10, 100), asked_before, now);
        assert!(fresh.recent(now, Duration::MAX).is_none(), "the length may be another one");
        assert!(fresh.recent(now, Duration::from_secs(1)).is_none());
        assert!(fresh.locked(7) && !fresh.locked(8) && fresh.locked(8));
    }

    #[test]
    fn what_has_no_label_is_not_asked_for_one_until_it_gets_one() {
        let fresh = Freshness::default();
        assert!(fresh.is_labelled(), "nothing is known of it");
        fresh.kernel_has(&attr(10, 100));
        assert!(!fresh.is_labelled() && !fresh.takes_capability());
        fresh.label();
        assert!(fresh.is_labelled() && fresh.takes_capability() && !fresh.takes_capability());
        fresh.kernel_has(&Attr { labelled: true, ..attr(10, 100) });
        assert!(fresh.takes_capability(), "another node may have given it one");
        fresh.kernel_has(&attr(10, 100));
        assert!(fresh.is_labelled(), "an answer to an earlier question takes nothing back");
    }

    #[test]
    fn own_writes_count_as_change() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        judge(&fresh, FILE, &attr(10, 100), at(200));
        write(&fresh, Some(5));
        assert_eq!(judge(&fresh, FILE, &attr(10, 100), at(201)), Verdict::Open { keep_pages: false });
        assert_eq!(judge(&fresh, FILE, &attr(10, 100), at(202)), Verdict::Open { keep_pages: true });
    }

    #[test]
    fn another_size_makes_the_kernel_look_again_once() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        assert_eq!(judge(&fresh, FILE, &attr(20, 150), at(200)), Verdict::LookUpAgain);
        fresh.kernel_has(&attr(20, 150));
        assert_eq!(judge(&fresh, FILE, &attr(20, 150), at(200)), Verdict::Open { keep_pages: false });
        assert_eq!(judge(&fresh, FILE, &attr(30, 160), at(200)), Verdict::LookUpAgain);
        let spared = fresh.judge(FILE, &attr(40, 170), fresh.mark(), true, at(200));
        assert_eq!(spared, Verdict::OpenPastTheKernel, "it keeps growing");
    }

    #[test]
    fn another_size_by_own_writes_does_not() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        let mark = fresh.mark();
        write(&fresh, Some(30));
        let verdict = fresh.judge(FILE, &attr(20, 150), mark, false, at(200));
        assert!(matches!(verdict, Verdict::Open { .. }), "the answer is from before the write ended");
    }

    #[test]
    fn own_appends_and_cuts_are_followed() {
        let fresh = Freshness::default();
        fresh.kernel_has(&attr(10, 100));
        write(&fresh, Some(25));
        write(&fresh, Some(5));
        assert!(matches!(judge(&fresh, FILE, &attr(25, 150), at(200)), Verdict::Open { .. }));
        fresh.emptied();
        assert!(matches!(judge(&fresh, FILE, &attr(0, 150), at(200)), Verdict::Open { .. }));
    }

    #[test]
    fn the_size_is_known_here_while_it_is_young() {
        const AGE: Duration = Duration::from_secs(1);
        let (fresh, now) = (Freshness::default(), Instant::now());
        let size = |at: Instant| fresh.recent(at, AGE).map(|attr| attr.size);
        assert_eq!(size(now), None);
        fresh.learnt(&attr(10, 100), fresh.mark(), now);
        assert_eq!(size(now + AGE / 2), Some(10));
        write(&fresh, Some(30));
        write(&fresh, Some(20));
        assert_eq!(size(now + AGE / 2), Some(30));
        assert_eq!(size(now + AGE), None, "too old");
        write(&fresh, None);
        assert_eq!(size(now), None, "a failed write may have done anything");
        fresh.learnt(&attr(10, 100), fresh.mark(), now);
        fresh.kernel_has(&attr(5, 200));
        assert_eq!(size(now), None, "the kernel knows something newer");
    }

    #[test]
    fn an_answer_that_a_write_overlapped_is_not_gone_by() {
        let (fresh, now) = (Freshness::default(), Instant::now());
        let known = || fresh.recent(now, Duration::from_secs(1)).is_some();
        let mark = fresh.mark();
        write(&fresh, Some(30));
        fresh.learnt(&attr(10, 100), mark, now);
        assert!(!known(), "began and ended meanwhile");
        fresh.write_begins();
        let mark = fresh.mark();
        fresh.write_ended(Some(40));
        fresh.learnt(&attr(10, 100), mark, now);
        assert!(!known(), "was under way");
        let mark = fresh.mark();
        fresh.write_begins();
        fresh.learnt(&attr(10, 100), mark, now);
        assert!(!known(), "began meanwhile");
        fresh.write_ended(Some(41));
        fresh.learnt(&attr(41, 100), fresh.mark(), now);
        assert!(known());
    }
}
