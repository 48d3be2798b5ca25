//! The block cache: which blocks of one file are brought in and released as its readers move.
//!
//! MERCURY's rule (Congiu et al., 2014, III.B): the file is divided into blocks; when a reader touches a block, up to
//! `ReadAheadSize` blocks, beginning with that one, are brought in; each reader keeps `CacheSize` blocks, the least
//! recently used go first. Readers share blocks: one that any reader holds is not brought in again. A jump back within
//! the blocks held costs nothing.
//!
//! Ours in addition: blocks are brought in only where a [`Plan`] asks for it; a block that its last reader has left is
//! kept a while when another reader is on its way to it ([`LINGER_WINDOWS`]), so that several programs on one file read
//! it from the device once; and what was brought in and read is counted.
//!
//! This is a state machine without I/O: it says what to do, [`Action`], and the caller does it.

mod block;
mod coverage;
#[cfg(test)]
mod tests;
mod window;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rustc_hash::FxHashMap;

use block::Block;
use window::Window;

/// Who reads: one program, or one of its threads; the caller's choice.
pub type Reader = u64;

/// Blocks without a holder are kept for readers that come later, at most this many times `CacheSize` of them, and only
/// for readers that are at most as far behind.
pub const LINGER_WINDOWS: u64 = 4;

/// What is wanted of a file: regions of a configuration, or a forecast.
pub trait Plan {
    /// Whether any of these bytes is to be brought in, or released when done with. Other blocks are not looked after.
    fn moves_in(&self, bytes: Range<u64>) -> bool;

    /// The parts of these bytes that are to be brought in, in order and disjoint.
    fn will_need_in(&self, bytes: Range<u64>) -> Vec<Range<u64>>;

    /// The next blocks to bring in after a reader touched `first..=last`: at most `most`, nearest first, none of them
    /// beyond `size_bytes`.
    fn ahead(&self, touched: (u64, u64), most: u64, geometry: Geometry, size_bytes: u64) -> Vec<u64>;

    /// Whether these bytes are to be released as soon as the reader has left them.
    fn once_in(&self, bytes: Range<u64>) -> bool;

    /// Whether [`Plan::once_in`] can be true at all.
    fn has_once(&self) -> bool;
}

/// Sizes of one file's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of a block, at least 1.
    pub block_bytes: u64,
    /// Blocks for each reader, at least 1.
    pub cache_blocks: u64,
    /// Blocks brought in, beginning with the one touched; more than `cache_blocks` count as `cache_blocks`.
    pub read_ahead_blocks: u64,
    /// Blocks ahead that must be missing before they are brought in, together, so that small blocks make long requests;
    /// 0 and 1 bring each one in at once, as MERCURY does.
    pub batch_blocks: u64,
}

/// What the caller is to do. Ranges are bytes of the file and never empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Bring it in.
    Prefetch(Range<u64>),
    /// It was brought in before, and is most likely still there: bring in what is missing.
    Renew(Range<u64>),
    /// No reader needs it any more.
    Release(Range<u64>),
    /// Bring it in, and tell how long that took. No block holds it.
    Try(Range<u64>),
    /// Bring it in and nothing beside it: by the kernel's advice where the choice is free. No block holds it.
    Exactly(Range<u64>),
}

impl Action {
    /// What is to be brought in, if anything is.
    pub fn asked(&self) -> Option<&Range<u64>> {
        match self {
            Action::Prefetch(range) | Action::Renew(range) | Action::Try(range) | Action::Exactly(range) => Some(range),
            Action::Release(_) => None,
        }
    }
}

/// What became of the bytes that were brought in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Bytes asked to be brought in.
    pub prefetched_bytes: u64,
    /// Of these, bytes that were read, each counted once.
    pub used_bytes: u64,
    /// Of these, bytes that were let go unread, but for those that were in memory before.
    pub wasted_bytes: u64,
    /// Of these, bytes that were let go, read or not, but for those that were in memory before.
    pub gone_bytes: u64,
    /// Reads that lay wholly in blocks brought in before.
    pub hits: u64,
    /// Reads that did not.
    pub misses: u64,
}

impl Tally {
    /// The sum of this and another one.
    pub fn and(self, other: Tally) -> Tally {
        Tally {
            prefetched_bytes: self.prefetched_bytes + other.prefetched_bytes,
            used_bytes: self.used_bytes + other.used_bytes,
            wasted_bytes: self.wasted_bytes + other.wasted_bytes,
            gone_bytes: self.gone_bytes + other.gone_bytes,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
        }
    }
}

/// A reader has come to other blocks.
struct Step<'a> {
    reader: Reader,
    /// What it is to hold there.
    wanted: &'a [u64],
    may: &'a mut dyn FnMut(u64) -> bool,
    /// Bytes that were let go to make room, and whose room is not taken yet.
    spare_bytes: u64,
    actions: Vec<Action>,
}

/// One file's blocks.
#[derive(Debug)]
pub struct BlockCache {
    geometry: Geometry,
    size_bytes: u64,
    blocks: FxHashMap<u64, Block>,
    readers: FxHashMap<Reader, Window>,
    /// Where readers are, by block; how many at each.
    positions: BTreeMap<u64, u32>,
    /// Blocks without a holder, oldest first.
    lingering: VecDeque<u64>,
    held_bytes: u64,
    tally: Tally,
}

impl BlockCache {
    /// An empty cache for a file of the given size.
    pub fn new(geometry: Geometry, size_bytes: u64) -> BlockCache {
        let cache_blocks = geometry.cache_blocks.max(1);
        let read_ahead_blocks = geometry.read_ahead_blocks.min(cache_blocks);
        let geometry =
            Geometry { block_bytes: geometry.block_bytes.max(1), cache_blocks, read_ahead_blocks, ..geometry };
        BlockCache {
            geometry,
            size_bytes,
            blocks: FxHashMap::default(),
            readers: FxHashMap::default(),
            positions: BTreeMap::new(),
            lingering: VecDeque::new(),
            held_bytes: 0,
            tally: Tally::default(),
        }
    }

    /// The file's length changed; blocks that end beyond it are brought in only as far as it goes.
    pub fn set_size(&mut self, size_bytes: u64) {
        if size_bytes > self.size_bytes {
            // The block that the old end cut short may be brought in further.
            self.readers.values_mut().for_each(Window::unsettle);
        }
        self.size_bytes = size_bytes;
    }

    /// Length of the file, as last told.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes that were asked for and not yet released.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// What became of what was brought in, so far; bytes held and not yet read are neither used nor wasted.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Whether these bytes lie wholly in blocks that are held.
    pub fn holds(&self, bytes: &Range<u64>) -> bool {
        span(bytes, self.geometry.block_bytes).is_some_and(|(first, last)| {
            last - first < self.geometry.cache_blocks && (first..=last).all(|b| self.blocks.contains_key(&b))
        })
    }

    /// A reader has read these bytes. `may` grants or refuses each number of bytes to prefetch beyond what is held now; refused
    /// blocks take the room of those that the reader has left behind, or are requested again when it reaches them. 0 bytes are
    /// refused where none are to be brought in, whatever the room. An empty read, as at the end of the file, changes nothing.
    pub fn access(
        &mut self,
        reader: Reader,
        bytes: Range<u64>,
        plan: &dyn Plan,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Action> {
        let Some(touched) = span(&bytes, self.geometry.block_bytes) else { return Vec::new() };
        self.count(touched, &bytes);
        self.settle(reader, touched, &bytes, plan, may)
    }

    /// A reader will come to this byte: what it will want then is brought in now. It holds these blocks until it departs.
    pub fn expect(
        &mut self,
        reader: Reader,
        byte: u64,
        plan: &dyn Plan,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Action> {
        let block = byte / self.geometry.block_bytes;
        self.settle(reader, (block, block), &(byte..byte), plan, may)
    }

    /// Gives a reader that has come to these blocks those that it wants there.
    fn settle(
        &mut self,
        reader: Reader,
        touched: (u64, u64),
        bytes: &Range<u64>,
        plan: &dyn Plan,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Action> {
        let window = self.readers.entry(reader).or_default();
        if window.settled_at() == Some(touched) {
            return Vec::new();
        }
        let moved_from = window.move_to(touched);
        self.moved(moved_from, touched.1);
        let wanted = self.wanted(touched, plan);
        let mut step = Step { reader, wanted: &wanted, may, spare_bytes: 0, actions: Vec::new() };
        let mut refused = false;
        for &block in &wanted {
            refused |= !self.touch(&mut step, block, bytes, plan);
        }
        let mut actions = step.actions;
        self.shrink(reader, &wanted, plan, &mut actions);
        self.let_linger_go(&mut actions);
        if let Some(window) = self.readers.get_mut(&reader).filter(|_| !refused) {
            window.settle(touched);
        }
        merged(actions)
    }

    /// A reader is gone. Its blocks are forgotten and left to the kernel, but for those that are read once.
    pub fn depart(&mut self, reader: Reader) -> Vec<Action> {
        let mut actions = Vec::new();
        let Some(mut window) = self.readers.remove(&reader) else { return actions };
        self.moved(window.position(), u64::MAX);
        while let Some(block) = window.evict_oldest() {
            let Some(state) = self.blocks.get_mut(&block) else { continue };
            state.holders -= 1;
            if state.holders == 0 && !self.awaited(block) {
                let once = self.blocks.get(&block).is_some_and(|b| b.once);
                self.drop_block(block, once.then_some(&mut actions));
            } else if self.blocks.get(&block).is_some_and(|b| b.holders == 0) {
                self.lingering.push_back(block);
            }
        }
        self.let_linger_go(&mut actions);
        merged(actions)
    }

    /// The reader's plan changed: its next access is looked at even if it touches the same blocks as the last one.
    pub fn look_again(&mut self, reader: Reader) {
        if let Some(window) = self.readers.get_mut(&reader) {
            window.unsettle();
        }
    }

    /// Forgets all blocks and readers without releasing anything: hints stop here. What was not read counts as wasted.
    pub fn clear(&mut self) {
        let blocks: Vec<u64> = self.blocks.keys().copied().collect();
        for block in blocks {
            self.drop_block(block, None);
        }
        self.readers.clear();
        self.positions.clear();
        self.lingering.clear();
    }

    /// The blocks whose data was there before it was asked for are not ours to release.
    pub fn found_cached(&mut self, bytes: Range<u64>) {
        let Some((first, last)) = span(&bytes, self.geometry.block_bytes) else { return };
        for block in first..=last {
            let whole = self.bytes_of(block);
            if let Some(state) = self.blocks.get_mut(&block)
                && bytes.start <= whole.start
                && whole.end <= bytes.end
            {
                state.foreign = true;
            }
        }
    }

    /// Counts a read: hit or miss, and the bytes used.
    fn count(&mut self, touched: (u64, u64), bytes: &Range<u64>) {
        let few = touched.1 - touched.0 < self.geometry.cache_blocks;
        let mut hit = few;
        if few {
            for block in touched.0..=touched.1 {
                match self.blocks.get_mut(&block) {
                    Some(state) => self.tally.used_bytes += state.used(bytes),
                    None => hit = false,
                }
            }
        }
        match hit {
            true => self.tally.hits += 1,
            false => self.tally.misses += 1,
        }
    }

    /// The blocks a reader is to hold after this touch: the last ones it touched, and those ahead.
    fn wanted(&self, touched: (u64, u64), plan: &dyn Plan) -> Vec<u64> {
        let Geometry { block_bytes, cache_blocks, read_ahead_blocks, .. } = self.geometry;
        let ahead = read_ahead_blocks.saturating_sub(1);
        let room = (cache_blocks - ahead).max(1);
        let first = touched.0.max((touched.1 + 1).saturating_sub(room));
        let moves = |block: u64| plan.moves_in(block_range(block, block_bytes));
        let mut wanted: Vec<u64> = (first..=touched.1).filter(|&b| moves(b)).collect();
        let next = plan.ahead(touched, ahead, self.geometry, self.size_bytes);
        let there = |block: &u64| self.blocks.contains_key(block);
        let missing = next.iter().filter(|b| !there(b)).count() as u64;
        // The very next one is waited for; others until enough of them are missing.
        let all = missing >= self.geometry.batch_blocks || next.first().is_some_and(|b| !there(b));
        wanted.extend(next.into_iter().filter(|b| all || there(b)));
        wanted
    }

    /// A reader takes a block, or has it already. False when it had to be brought in and there was no room.
    fn touch(&mut self, step: &mut Step<'_>, block: u64, read: &Range<u64>, plan: &dyn Plan) -> bool {
        let Some(window) = self.readers.get_mut(&step.reader) else { return true };
        if window.touch(block) {
            return true;
        }
        let whole = block_range(block, self.geometry.block_bytes);
        let whole = whole.start..whole.end.min(self.size_bytes.max(read.end));
        if let Some(state) = self.blocks.get_mut(&block) {
            state.holders += 1;
            if state.holders == 1 {
                self.lingering.retain(|b| *b != block);
                if state.asked_bytes() > 0 {
                    step.actions.extend(plan.will_need_in(whole).into_iter().map(Action::Renew));
                }
            }
        } else {
            let all_read = read.start <= whole.start && whole.end <= read.end;
            let mut pieces = if all_read { Vec::new() } else { plan.will_need_in(whole.clone()) };
            // A piece may reach beyond its block, but not beyond the file.
            let end = self.size_bytes.max(read.end);
            pieces.iter_mut().for_each(|p| p.end = p.end.min(end));
            pieces.retain(|p| p.start < p.end);
            let asked: u64 = pieces.iter().map(|p| p.end - p.start).sum();
            if asked > 0 && !self.has_room(asked, step) {
                if let Some(window) = self.readers.get_mut(&step.reader) {
                    window.forget(block);
                }
                return false;
            }
            let mut state = Block::new(pieces.clone(), plan.once_in(whole));
            // The read that brought the block about needed part of it itself; only the rest can be gained.
            self.tally.used_bytes += state.used(read);
            self.tally.prefetched_bytes += asked;
            self.held_bytes += asked;
            self.blocks.insert(block, state);
            step.actions.extend(pieces.into_iter().map(Action::Prefetch));
        }
        true
    }

    /// Whether so many bytes may be brought in. Where they may not, what the reader has left behind makes room for them, least
    /// recently used first: it would else keep a reader whose window is larger than what it may hold from anything further.
    fn has_room(&mut self, bytes: u64, step: &mut Step<'_>) -> bool {
        if step.spare_bytes < bytes && (step.may)(bytes) {
            return true;
        }
        if !(step.may)(0) {
            return false;
        }
        while step.spare_bytes < bytes {
            let held_bytes = self.held_bytes;
            let window = self.readers.get_mut(&step.reader);
            if let Some(block) = window.and_then(|window| window.evict_oldest_but(step.wanted)) {
                self.left(block, &mut step.actions);
            } else if let Some(block) = self.lingering.pop_front() {
                self.drop_block(block, Some(&mut step.actions));
            } else {
                return false;
            }
            step.spare_bytes += held_bytes - self.held_bytes;
        }
        step.spare_bytes -= bytes;
        true
    }

    /// Takes from a reader what exceeds its window, and blocks that are read once and left behind.
    fn shrink(&mut self, reader: Reader, wanted: &[u64], plan: &dyn Plan, actions: &mut Vec<Action>) {
        let Some(window) = self.readers.get_mut(&reader) else { return };
        let mut gone = Vec::new();
        if plan.has_once() {
            let blocks = &self.blocks;
            gone = window.evict_where(|b| !wanted.contains(&b) && blocks.get(&b).is_some_and(|s| s.once));
        }
        while window.len() > self.geometry.cache_blocks {
            gone.extend(window.evict_oldest());
        }
        gone.into_iter().for_each(|block| self.left(block, actions));
    }

    /// A reader holds a block no longer.
    fn left(&mut self, block: u64, actions: &mut Vec<Action>) {
        let Some(state) = self.blocks.get_mut(&block) else { return };
        state.holders -= 1;
        if state.holders == 0 {
            match self.awaited(block) {
                true => self.lingering.push_back(block),
                false => self.drop_block(block, Some(actions)),
            }
        }
    }

    /// Whether a reader is on its way to a block.
    fn awaited(&self, block: u64) -> bool {
        let far = self.geometry.cache_blocks.saturating_mul(LINGER_WINDOWS);
        self.positions.range(block.saturating_sub(far)..block).next().is_some()
    }

    fn let_linger_go(&mut self, actions: &mut Vec<Action>) {
        let most = self.geometry.cache_blocks.saturating_mul(LINGER_WINDOWS) as usize;
        let too_many = self.lingering.len().saturating_sub(most);
        for (i, block) in std::mem::take(&mut self.lingering).into_iter().enumerate() {
            match i >= too_many && self.awaited(block) {
                true => self.lingering.push_back(block),
                false => self.drop_block(block, Some(&mut *actions)),
            }
        }
    }

    /// Forgets a block; with `actions` it is released, unless it was there before us.
    fn drop_block(&mut self, block: u64, actions: Option<&mut Vec<Action>>) {
        let Some(state) = self.blocks.remove(&block) else { return };
        self.held_bytes -= state.asked_bytes();
        if !state.foreign {
            self.tally.gone_bytes += state.asked_bytes();
            self.tally.wasted_bytes += state.asked_bytes() - state.used_bytes();
        }
        if let Some(actions) = actions.filter(|_| !state.foreign) {
            let bytes = self.bytes_of(block);
            if bytes.start < bytes.end {
                actions.push(Action::Release(bytes));
            }
        }
    }

    /// The bytes of a block that exist.
    fn bytes_of(&self, block: u64) -> Range<u64> {
        let whole = block_range(block, self.geometry.block_bytes);
        whole.start..whole.end.min(self.size_bytes).max(whole.start)
    }

    fn moved(&mut self, from: Option<u64>, to: u64) {
        if let Some(from) = from
            && let Some(n) = self.positions.get_mut(&from)
        {
            *n -= 1;
            if *n == 0 {
                self.positions.remove(&from);
            }
        }
        if to != u64::MAX {
            *self.positions.entry(to).or_default() += 1;
        }
    }
}

/// First and last block of a range of bytes.
fn span(bytes: &Range<u64>, block_bytes: u64) -> Option<(u64, u64)> {
    (bytes.start < bytes.end).then(|| (bytes.start / block_bytes, (bytes.end - 1) / block_bytes))
}

fn block_range(block: u64, block_bytes: u64) -> Range<u64> {
    let start = block.saturating_mul(block_bytes);
    start..start.saturating_add(block_bytes)
}

/// Neighbouring ranges of one kind become one; also those that come one before the other, for a program that goes backward: a
/// disk would wait for each.
fn merged(actions: Vec<Action>) -> Vec<Action> {
    let mut out: Vec<Action> = Vec::with_capacity(actions.len());
    for action in actions {
        match (out.last_mut(), &action) {
            (Some(Action::Prefetch(a)), Action::Prefetch(b)) if a.end == b.start => a.end = b.end,
            (Some(Action::Prefetch(a)), Action::Prefetch(b)) if b.end == a.start => a.start = b.start,
            (Some(Action::Renew(a)), Action::Renew(b)) if a.end == b.start => a.end = b.end,
            (Some(Action::Renew(a)), Action::Renew(b)) if b.end == a.start => a.start = b.start,
            (Some(Action::Release(a)), Action::Release(b)) if a.end == b.start => a.end = b.end,
            _ => out.push(action),
        }
    }
    out
}
