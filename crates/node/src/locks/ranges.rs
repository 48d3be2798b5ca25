//! Locks of byte ranges: what one more lock or unlock makes of those that are held.

/// Who holds a lock: an owner (in a mount: a process, or an open file description) of a client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder {
    /// The client.
    pub client: u64,
    /// Its owner.
    pub owner: u64,
}

/// Bytes of a file, the last one included.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Range {
    /// Offset of the first byte.
    pub start: u64,
    /// Offset of the last byte.
    pub end: u64,
}

impl Range {
    /// All bytes that a file can have.
    pub const ALL: Range = Range { start: 0, end: u64::MAX };

    fn overlaps(&self, other: &Range) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    fn touches(&self, other: &Range) -> bool {
        self.overlaps(other)
            || self.end.checked_add(1) == Some(other.start)
            || other.end.checked_add(1) == Some(self.start)
    }

    /// It has bytes before and behind the other.
    fn surrounds(&self, other: &Range) -> bool {
        self.start < other.start && self.end > other.end
    }
}

/// A lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lock {
    /// Who holds it.
    pub holder: Holder,
    /// The holder's process on its machine, for people.
    pub pid: u32,
    /// What it covers.
    pub range: Range,
    /// It excludes all others; a shared one excludes exclusive ones.
    pub exclusive: bool,
}

impl Lock {
    /// Two holders cannot have both.
    pub fn conflicts(&self, other: &Lock) -> bool {
        self.holder != other.holder && (self.exclusive || other.exclusive) && self.range.overlaps(&other.range)
    }
}

/// A new lock would split one of the holder's.
pub fn splits(held: &[Lock], holder: Holder, range: Range) -> bool {
    held.iter().any(|lock| lock.holder == holder && lock.range.surrounds(&range))
}

/// Takes a range from what a holder has; true when any of it was locked exclusively.
pub fn carve(held: &mut Vec<Lock>, holder: Holder, range: Range) -> bool {
    let mut rest: [Option<Lock>; 2] = [None; 2];
    let mut exclusive = false;
    held.retain(|lock| {
        if lock.holder != holder || !lock.range.overlaps(&range) {
            return true;
        }
        exclusive |= lock.exclusive;
        // A holder's locks do not overlap: one at most reaches beyond each end of the range.
        if let Some(end) = range.start.checked_sub(1).filter(|end| lock.range.start <= *end) {
            rest[0] = Some(Lock { range: Range { start: lock.range.start, end }, ..*lock });
        }
        if let Some(start) = range.end.checked_add(1).filter(|start| *start <= lock.range.end) {
            rest[1] = Some(Lock { range: Range { start, end: lock.range.end }, ..*lock });
        }
        false
    });
    held.extend(rest.into_iter().flatten());
    exclusive
}

/// Gives a holder a lock in the place of what it had there, and joins it with its equals that touch it; true when any of
/// that was locked exclusively and is not any more.
pub fn put(held: &mut Vec<Lock>, mut lock: Lock) -> bool {
    let was_exclusive = carve(held, lock.holder, lock.range);
    let mut whole = lock.range;
    held.retain(|other| {
        let joins =
            other.holder == lock.holder && other.exclusive == lock.exclusive && other.range.touches(&lock.range);
        if joins {
            whole.start = whole.start.min(other.range.start);
            whole.end = whole.end.max(other.range.end);
        }
        !joins
    });
    lock.range = whole;
    held.push(lock);
    was_exclusive && !lock.exclusive
}
