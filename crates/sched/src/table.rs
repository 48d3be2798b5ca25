//! The outstanding requests, in one bounded table shared by the core, the conflicts and the policies.

use crate::names::Naming;
use crate::types::{ClientId, ConnId, Extent, FileId, JobId, LaneId, Nanos, Op, Request, RequestId, UserId};
use impresario_base::prefetch::fetch;
use impresario_base::slab::extend;

/// An index into the table; valid while its request is outstanding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u32);

impl Slot {
    /// No request.
    pub const NONE: Slot = Slot(u32::MAX);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// `None` for [`Slot::NONE`].
    pub(crate) fn some(self) -> Option<Slot> {
        (self != Slot::NONE).then_some(self)
    }
}

/// A value for each outstanding request; its memory follows the table's.
#[derive(Clone, Debug)]
pub(crate) struct BySlot<T> {
    things: Vec<T>,
    nothing: T,
}

impl<T: Copy> BySlot<T> {
    /// All with the value `nothing`.
    pub fn new(nothing: T) -> BySlot<T> {
        BySlot { things: Vec::new(), nothing }
    }

    /// Sets the value of a request.
    #[inline]
    pub fn set(&mut self, slot: Slot, thing: T) {
        if self.things.len() <= slot.index() {
            extend(&mut self.things, slot.index() + 1, || self.nothing);
        }
        self.things[slot.index()] = thing;
    }

    /// The value of a request.
    #[inline]
    pub fn get(&self, slot: Slot) -> T {
        self.things.get(slot.index()).copied().unwrap_or(self.nothing)
    }
}

/// The value set for a request.
impl<T> std::ops::Index<Slot> for BySlot<T> {
    type Output = T;
    #[inline]
    fn index(&self, slot: Slot) -> &T {
        &self.things[slot.index()]
    }
}

impl<T> std::ops::IndexMut<Slot> for BySlot<T> {
    #[inline]
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.things[slot.index()]
    }
}

/// A request's number in the order of arrival and its slot, in one word; sorts by arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Arrival(u64);

impl Arrival {
    pub(crate) const MIN: Arrival = Arrival(0);
    pub(crate) const MAX: Arrival = Arrival(u64::MAX);

    /// The next greater one.
    pub(crate) fn next(self) -> Arrival {
        Arrival(self.0 + 1)
    }

    pub(crate) fn slot(self) -> Slot {
        Slot((self.0 & ((1 << Table::SLOT_BITS) - 1)) as u32)
    }
}

/// A number (below 2^44; greater ones saturate) and the slot or queue it belongs to, in one word; sorts by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Numbered(u64);

impl Numbered {
    pub(crate) fn new(number: u64, whose: u32) -> Numbered {
        Numbered(number.min(u64::MAX >> Table::SLOT_BITS) << Table::SLOT_BITS | u64::from(whose))
    }

    pub(crate) fn number(self) -> u64 {
        self.0 >> Table::SLOT_BITS
    }

    pub(crate) fn whose(self) -> u32 {
        (self.0 & ((1 << Table::SLOT_BITS) - 1)) as u32
    }
}

/// The state of an outstanding request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum State {
    Free,
    /// An older request conflicts with it, or it waits with the speculations of its file; no policy sees it.
    Blocked,
    /// Queued at the policy (a barrier: at the core).
    Queued,
    /// A predicted read; the core starts it when it delays no request.
    Speculative,
    /// It is served beside scheduling; what is left of a read may be queued.
    Passing,
    InFlight,
}

impl State {
    /// A policy may serve it, now or later.
    pub(crate) fn may_go(self) -> bool {
        matches!(self, State::Queued | State::Blocked | State::Passing)
    }
}

/// What decisions and searches look at. Many of them miss the CPU's caches, hence apart from [`Details`].
#[derive(Clone, Copy)]
struct Entry {
    lane_offset: u64,
    len: u64,
    /// Order of arrival at this core.
    seq: u64,
    file: FileId,
    lane: LaneId,
    op: Op,
    state: State,
}

/// The rest of a request.
#[derive(Clone, Copy)]
struct Details {
    arrival: Nanos,
    file_offset: u64,
    client: ClientId,
    conn: ConnId,
    job: JobId,
    user: UserId,
}

/// The free slots below the table's end; the lowest is used next. So requests that arrive together lie together, in whatever
/// order earlier ones left, and the memory in use stays dense.
#[derive(Default)]
struct FreeSlots {
    /// A bit for each free slot.
    words: Vec<u64>,
    /// A bit for each word that has one.
    filled: Vec<u64>,
    /// No filled word lies before this entry of `filled`.
    from: usize,
    len: usize,
}

impl FreeSlots {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn push(&mut self, slot: Slot) {
        let word = slot.index() / 64;
        if self.words.len() <= word {
            extend(&mut self.words, word + 1, || 0);
            extend(&mut self.filled, word / 64 + 1, || 0);
        }
        debug_assert!(self.words[word] & 1 << (slot.0 % 64) == 0, "{slot:?} is free already");
        self.words[word] |= 1 << (slot.0 % 64);
        self.filled[word / 64] |= 1 << (word % 64);
        self.from = self.from.min(word / 64);
        self.len += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Slot> {
        if self.len == 0 {
            return None;
        }
        while self.filled[self.from] == 0 {
            self.from += 1;
        }
        let word = self.from * 64 + self.filled[self.from].trailing_zeros() as usize;
        let bits = &mut self.words[word];
        let slot = Slot(word as u32 * 64 + bits.trailing_zeros());
        *bits &= *bits - 1;
        if *bits == 0 {
            self.filled[self.from] &= self.filled[self.from] - 1;
        }
        self.len -= 1;
        Some(slot)
    }
}

/// The outstanding requests, 64 bytes each.
pub struct Table {
    entries: Vec<Entry>,
    details: Vec<Details>,
    /// Apart, as most servers have none.
    namings: BySlot<Naming>,
    has_namings: bool,
    free: FreeSlots,
    capacity: u32,
    next_seq: u64,
}

impl Table {
    /// Slots share a 64-bit key with sequence numbers in the conflict index.
    pub(crate) const SLOT_BITS: u32 = 20;
    /// The largest capacity.
    pub const CAPACITY_MAX: u32 = 1 << Self::SLOT_BITS;

    pub(crate) fn new(capacity: u32) -> Table {
        let capacity = capacity.clamp(1, Self::CAPACITY_MAX);
        let (entries, details, free) = (Vec::new(), Vec::new(), FreeSlots::default());
        let namings = BySlot::new(Naming::default());
        Table { entries, details, namings, has_namings: false, free, capacity, next_seq: 0 }
    }

    /// Requests outstanding.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// True when nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The maximum number of requests.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// True if sequence numbers should restart at the next opportunity (after 10^12 requests).
    pub(crate) fn is_worn(&self) -> bool {
        self.is_empty() && self.next_seq >> (63 - Self::SLOT_BITS) > 0
    }

    /// Restarts sequence numbers; no caller may hold an old one.
    pub(crate) fn renew(&mut self) {
        self.next_seq = 0;
    }

    pub(crate) fn insert(&mut self, request: &Request) -> Option<Slot> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.entries.len() < self.capacity as usize => {
                let slot = Slot(self.entries.len() as u32);
                extend(&mut self.entries, slot.index() + 1, || Entry::FREE);
                extend(&mut self.details, slot.index() + 1, || Details::NONE);
                slot
            }
            None => return None,
        };
        let Request { extent, arrival, client, conn, job, user, op, naming, .. } = *request;
        let Extent { file, lane, file_offset, lane_offset, len } = extent;
        let seq = self.next_seq;
        self.next_seq += 1;
        self.entries[slot.index()] = Entry { lane_offset, len, seq, file, lane, op, state: State::Queued };
        self.details[slot.index()] = Details { arrival, file_offset, client, conn, job, user };
        if self.has_namings || naming != Naming::default() {
            self.has_namings = true;
            self.namings.set(slot, naming);
        }
        Some(slot)
    }

    pub(crate) fn remove(&mut self, slot: Slot) {
        self.entries[slot.index()].state = State::Free;
        self.free.push(slot);
    }

    /// The identity that the core gave the request: its slot, and its place among the last 2^32 requests.
    pub fn id(&self, slot: Slot) -> RequestId {
        RequestId((self.seq(slot) + 1) << 32 | u64::from(slot.0))
    }

    pub(crate) fn find(&self, id: RequestId) -> Option<Slot> {
        let slot = Slot(id.0 as u32);
        let outstanding = self.entries.get(slot.index())?.state != State::Free;
        (outstanding && self.id(slot) == id).then_some(slot)
    }

    /// Prefetches a request into the CPU cache.
    pub(crate) fn fetch(&self, slot: Slot) {
        self.entries.get(slot.index()).inspect(|entry| fetch(*entry));
        self.details.get(slot.index()).inspect(|details| fetch(*details));
    }

    /// The whole request.
    pub fn request(&self, slot: Slot) -> Request {
        let Details { arrival, client, conn, job, user, .. } = self.details[slot.index()];
        let (id, extent, op, naming) = (self.id(slot), self.extent(slot), self.op(slot), self.naming(slot));
        Request { id, extent, arrival, client, conn, job, user, op, naming }
    }

    /// The extent it acts on.
    pub fn extent(&self, slot: Slot) -> Extent {
        let Entry { lane_offset, len, file, lane, .. } = self.entries[slot.index()];
        Extent { file, lane, file_offset: self.details[slot.index()].file_offset, lane_offset, len }
    }

    /// Start in the lane's space, bytes.
    pub fn start(&self, slot: Slot) -> u64 {
        self.entries[slot.index()].lane_offset
    }

    /// Length, bytes.
    pub fn len_bytes(&self, slot: Slot) -> u64 {
        self.entries[slot.index()].len
    }

    /// First byte after it in the lane's space.
    pub fn end(&self, slot: Slot) -> u64 {
        let e = &self.entries[slot.index()];
        e.lane_offset.saturating_add(e.len)
    }

    /// Its lane.
    pub fn lane(&self, slot: Slot) -> LaneId {
        self.entries[slot.index()].lane
    }

    /// Its file.
    pub fn file(&self, slot: Slot) -> FileId {
        self.entries[slot.index()].file
    }

    /// Its operation.
    pub fn op(&self, slot: Slot) -> Op {
        self.entries[slot.index()].op
    }

    /// When it first arrived.
    pub fn arrival(&self, slot: Slot) -> Nanos {
        self.details[slot.index()].arrival
    }

    /// Its number in the order of arrival at this core.
    pub fn seq(&self, slot: Slot) -> u64 {
        self.entries[slot.index()].seq
    }

    pub(crate) fn arrival_order(&self, slot: Slot) -> Arrival {
        Arrival(self.seq(slot) << Self::SLOT_BITS | u64::from(slot.0))
    }

    pub(crate) fn state(&self, slot: Slot) -> State {
        self.entries[slot.index()].state
    }

    pub(crate) fn set_state(&mut self, slot: Slot, state: State) {
        self.entries[slot.index()].state = state;
    }

    /// Its connection.
    pub fn conn(&self, slot: Slot) -> ConnId {
        self.details[slot.index()].conn
    }

    /// Its client.
    pub fn client(&self, slot: Slot) -> ClientId {
        self.details[slot.index()].client
    }

    /// Its application.
    pub fn job(&self, slot: Slot) -> JobId {
        self.details[slot.index()].job
    }

    /// Its user.
    pub fn user(&self, slot: Slot) -> UserId {
        self.details[slot.index()].user
    }

    /// What else is known of it.
    pub fn naming(&self, slot: Slot) -> Naming {
        self.namings.get(slot)
    }

    /// Cuts off the first `len` bytes of a request, which are dispatched.
    pub(crate) fn advance(&mut self, slot: Slot, len: u64) {
        self.details[slot.index()].file_offset += len;
        let e = &mut self.entries[slot.index()];
        e.lane_offset += len;
        e.len -= len;
    }

    /// Restores the original extent of a request.
    pub(crate) fn restore(&mut self, slot: Slot, whole: &Extent) {
        self.details[slot.index()].file_offset = whole.file_offset;
        let e = &mut self.entries[slot.index()];
        (e.lane_offset, e.len) = (whole.lane_offset, whole.len);
    }

    /// Lengths of the requests that arrived earlier and are not in flight, on the same lane or (`any_lane`) on any.
    /// Walks the table.
    pub(crate) fn older(&self, slot: Slot, any_lane: bool) -> impl Iterator<Item = u64> {
        let me = &self.entries[slot.index()];
        let older = move |e: &&Entry| e.state.may_go() && e.seq < me.seq && (any_lane || e.lane == me.lane);
        self.entries.iter().filter(older).map(|e| e.len)
    }

    /// The number of those requests.
    pub(crate) fn older_than(&self, slot: Slot, any_lane: bool) -> u64 {
        self.older(slot, any_lane).count() as u64
    }

    /// The slots in the given states, in order of arrival. Walks the table: for rare use.
    pub(crate) fn in_state(&self, wanted: impl Fn(State) -> bool) -> Vec<Slot> {
        let mut slots: Vec<Slot> =
            (0..self.entries.len() as u32).map(Slot).filter(|s| wanted(self.state(*s))).collect();
        slots.sort_unstable_by_key(|s| self.seq(*s));
        slots
    }
}

impl Entry {
    const FREE: Entry =
        Entry { lane_offset: 0, len: 0, seq: 0, file: FileId(0), lane: LaneId(0), op: Op::Read, state: State::Free };
}

impl Details {
    const NONE: Details = Details {
        arrival: Nanos::ZERO,
        file_offset: 0,
        client: ClientId(0),
        conn: ConnId(0),
        job: JobId(0),
        user: UserId(0),
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn half_a_cache_line_each() {
        assert_eq!((size_of::<Entry>(), size_of::<Details>()), (32, 32));
    }

    proptest! {
        /// Whatever is freed in whatever order: the lowest is used next.
        #[test]
        fn the_lowest_free_slot_is_next(steps in proptest::collection::vec((0u32..3, 0u32..20_000), 0..400)) {
            let (mut free, mut expected) = (FreeSlots::default(), BTreeSet::new());
            for (what, slot) in steps {
                if what == 0 {
                    prop_assert_eq!(free.pop().map(|slot| slot.0), expected.pop_first());
                } else if expected.insert(slot) {
                    free.push(Slot(slot));
                }
                prop_assert_eq!(free.len(), expected.len());
            }
            while let Some(slot) = expected.pop_first() {
                prop_assert_eq!(free.pop(), Some(Slot(slot)));
            }
            prop_assert_eq!(free.pop(), None);
        }
    }
}
