//! A file that lists its own extents: its index is read once the program has shown that it does not read straight on, and
//! then says what comes next.

use std::ops::Range;

use impresario_foresight::Tracks;

use super::{KNOWN_GROWTH, KNOWN_HEAD_BYTES};
use crate::cache::{Action, Tally};
use crate::formats::{FILE_BYTES_MIN, Format, Index};

/// Parts of an index that are asked for, before all of it is.
const PARTS_MAX: u32 = 4;

/// Of one file.
#[derive(Debug, Default)]
pub(super) struct Indexed {
    /// The formats that it may have; empty once all of its index was asked for.
    formats: Vec<&'static dyn Format>,
    /// Those that were asked, and how often.
    asked: Vec<&'static dyn Format>,
    asked_times: u32,
    /// Where the last read began and ended.
    start: u64,
    end: u64,
    is_wanted: bool,
    /// Its index was asked for, and the file has not changed since.
    is_awaited: bool,
    known: Option<(&'static str, Tracks)>,
    tally: Tally,
    unread_bytes: u64,
    /// Bytes that its extents were read of.
    read_bytes: u64,
    /// It is not followed any more: that cost more than it saved.
    has_stepped_aside: bool,
}

impl Indexed {
    /// The file may have one of these formats.
    pub(super) fn may_be(&mut self, formats: Vec<&'static dyn Format>) {
        self.formats = formats;
    }

    /// The formats whose readers are to look at the file now, once, and what stands where is wanted; `None` for all of it, since
    /// that was not enough.
    pub(super) fn take_wish(&mut self) -> Option<(Vec<&'static dyn Format>, Option<u64>)> {
        let is_wanted = std::mem::take(&mut self.is_wanted);
        self.is_awaited |= is_wanted;
        let knows_some = self.known.as_ref().is_some_and(|(_, tracks)| !tracks.is_empty());
        let place = (!knows_some && self.asked_times < PARTS_MAX).then_some(self.start);
        is_wanted.then(|| {
            self.asked_times += 1;
            self.asked = std::mem::take(&mut self.formats);
            (self.asked.clone(), place)
        })
    }

    /// The index has been read, if it is still waited for. Where that was a part of it, the rest is asked for when a program reads
    /// what the part does not tell of.
    pub(super) fn is_known(&mut self, index: Index) {
        if std::mem::take(&mut self.is_awaited) {
            self.clear();
            self.known = Some((index.format, index.tracks));
            let asked = std::mem::take(&mut self.asked);
            self.formats = if index.is_partial { asked } else { Vec::new() };
        }
    }

    /// The index could not be read, or is too large to be kept.
    pub(super) fn is_none(&mut self) {
        self.is_awaited = false;
    }

    /// The file has changed: its index is not believed any more.
    pub(super) fn forget(&mut self) {
        self.clear();
        self.known = None;
        (self.is_wanted, self.is_awaited) = (false, false);
        self.formats = Vec::new();
    }

    /// A program has read these bytes of a file of `size_bytes`. `None` where the index does not know them; else whether they
    /// were brought in, and what to do now.
    pub(super) fn read(
        &mut self,
        program: u64,
        bytes: &Range<u64>,
        size_bytes: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Option<(bool, Vec<Action>)> {
        let is_straight_on = bytes.start == self.end;
        (self.start, self.end) = (bytes.start, bytes.end);
        if self.has_stepped_aside {
            return None;
        }
        // Who copies a file needs nothing of its index.
        let is_unknown = self.known.as_ref().is_none_or(|(_, tracks)| !tracks.knows(bytes));
        self.is_wanted |= !is_straight_on && is_unknown && size_bytes >= FILE_BYTES_MIN && !self.formats.is_empty();
        let allowed_bytes = KNOWN_HEAD_BYTES.saturating_add(self.read_bytes.saturating_mul(KNOWN_GROWTH));
        let (mut asked_bytes, mut unread_bytes) = (self.tally.prefetched_bytes, self.unread_bytes);
        let mut grant = |bytes: u64| {
            // An extent may be longer than what is allowed at first.
            let is_granted = (unread_bytes == 0 || asked_bytes.saturating_add(bytes) <= allowed_bytes) && may(bytes);
            if is_granted {
                asked_bytes += bytes;
                unread_bytes += bytes;
            }
            is_granted
        };
        let next = self.known.as_mut()?.1.read(program, bytes, &mut grant)?;
        self.read_bytes = self.read_bytes.saturating_add(bytes.end - bytes.start);
        let brought: u64 = next.next.iter().map(|r| r.end - r.start).sum();
        self.tally.prefetched_bytes += brought;
        self.tally.used_bytes += next.used_bytes;
        self.tally.gone_bytes += next.used_bytes;
        self.unread_bytes = (self.unread_bytes + brought).saturating_sub(next.used_bytes);
        match next.was_predicted {
            true => self.tally.hits += 1,
            false => self.tally.misses += 1,
        }
        Some((next.was_predicted, next.next.into_iter().map(Action::Prefetch).collect()))
    }

    /// Lets others have their turn if it is followed; whether it does now.
    pub(super) fn step_aside(&mut self) -> bool {
        let steps_aside = self.format().is_some() && !self.has_stepped_aside;
        if steps_aside {
            self.has_stepped_aside = true;
            self.clear();
        }
        steps_aside
    }

    /// A program has closed the file, or is gone.
    pub(super) fn depart(&mut self, program: u64) {
        let unread = self.known.as_mut().map_or(0, |(_, tracks)| tracks.depart(program));
        self.let_go(unread);
    }

    /// Hints stop here: everything held is forgotten.
    pub(super) fn clear(&mut self) {
        let unread = self.known.as_mut().map_or(0, |(_, tracks)| tracks.clear());
        self.let_go(unread);
    }

    fn let_go(&mut self, unread_bytes: u64) {
        self.unread_bytes = self.unread_bytes.saturating_sub(unread_bytes);
        self.tally.wasted_bytes += unread_bytes;
        self.tally.gone_bytes += unread_bytes;
    }

    /// The index is on its way.
    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Hints were given by it.
    pub(super) fn gives(&self) -> bool {
        self.tally.prefetched_bytes > 0
    }

    /// The index is there or on its way.
    pub(super) fn is_followed(&self) -> bool {
        self.is_awaited || self.format().is_some() && !self.has_stepped_aside
    }

    /// The format whose index is followed.
    pub(super) fn format(&self) -> Option<&'static str> {
        self.known.as_ref().filter(|(_, tracks)| !tracks.is_empty()).map(|(format, _)| *format)
    }

    /// How many extents it lists.
    pub(super) fn extents(&self) -> usize {
        self.known.as_ref().map_or(0, |(_, tracks)| tracks.extents())
    }

    /// Brought in and not read yet; what was read is the kernel's.
    pub(super) fn held_bytes(&self) -> u64 {
        self.unread_bytes
    }

    pub(super) fn tally(&self) -> Tally {
        self.tally
    }
}
