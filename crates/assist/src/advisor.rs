//! What is done for one file as programs read it: its plan, its cache and its judge together.
//!
//! A state machine without I/O. One advisor serves all programs that read the same file (device and inode).

mod fill;
mod gaps;
mod indexed;
mod learnt;
mod map_watch;
mod quick_touches;
#[cfg(test)]
mod tests;
mod unaided;

use std::ops::Range;
use std::sync::Arc;

use impresario_foresight::{Detector, ReadingOrder, STREAMS_MAX};
use rustc_hash::FxHashMap;

use fill::{Fill, Step};
use gaps::{Advice, Gaps, SHORT_GAP_BYTES};
use indexed::Indexed;
use learnt::Learnt;
pub use map_watch::Cached;
use map_watch::MapWatch;
use quick_touches::QuickTouches;
use unaided::Unaided;

use crate::cache::{Action, BlockCache, Geometry, Plan, Tally};
use crate::config::{Budget, DeviceCost, Entry, Monitored, Region, StandDown};
use crate::formats::{Format, Index};
use crate::judge::{Judge, Why, is_slow, waited_ns};

/// Blocks are of this size when strides are detected, so that little is brought in for nothing.
const ONLINE_BLOCK_BYTES: u64 = 512 << 10;
/// And of this size on the line of pieces that are learnt, of which many small ones may be in a block.
const LEARNT_BLOCK_BYTES: u64 = 128 << 10;
/// They are prefetched together with this many bytes, so that requests are long all the same.
const ONLINE_BATCH_BYTES: u64 = 4 << 20;
/// Hints for files that are not larger are not tried first: they are over before a trial is.
const TRIED_FILE_BYTES_MIN: u64 = 8 << 20;
/// What is brought in before the program's first read, when hints are to be tried first.
const UNTRIED_BYTES_MAX: u64 = 8 << 20;
/// What is granted at a time of a file that is mapped.
const MAPPED_PIECE_BYTES: u64 = 4 << 20;
/// Maps of shorter files are not looked at.
const WATCHED_MAP_BYTES_MIN: u64 = 1 << 20;
/// An open file of at least so many bytes of which no read was told for so long is looked at as if it were mapped: a single
/// read may take long, and some are not seen. So often at most.
const QUIET_FILE_BYTES_MIN: u64 = 4 << 20;
const QUIET_NS: u64 = 5_000_000;
const QUIET_LOOKS_MAX: u32 = 32;
/// Threads of a program whose streams are told apart; more share.
const THREADS_MAX: u16 = 64;
/// What a program's reads of a file without a plan must have waited in all before their pattern is followed or its index read:
/// one that waits for less, as on a fast disk, can gain less than a mistake costs.
const AT_STAKE_NS: u64 = 8_000_000;
/// What hints by a file's index, or those by its kind, may have cost before others have their turn, and what counts at most of what they
/// saved. That is an estimate: a read of what was brought in would have taken as long as slow reads of the file take on the average, however
/// short it is, since a device takes about as long for 8 bytes as for a page or more. Reads that would have come from memory all the same are
/// not told from others.
const KNOWN_LOST_NS_MAX: i64 = 8_000_000;
const KNOWN_SAVED_NS_MAX: i64 = 100_000_000;

/// What is asked for by a file's index or its kind before its reads have shown what that is worth, and so much more for each byte that
/// was read since.
const KNOWN_HEAD_BYTES: u64 = 1 << 20;
const KNOWN_GROWTH: u64 = 2;

/// Stands for a program that will open the file; the manager gives no program this number.
const EXPECTED: u64 = (1 << 48) - 1;

/// Who reads: a program (the manager's number for it) and one of its threads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reader {
    /// Below 2⁴⁸.
    pub program: u64,
    /// The low bits of the thread's number.
    pub thread: u16,
}

/// A read as the ring told of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Read {
    /// What was read.
    pub bytes: Range<u64>,
    /// How long it took; 0 if unknown.
    pub duration_ns: u64,
    /// When it was seen, on the manager's clock.
    pub now_ns: u64,
}

#[derive(Debug)]
enum Engine {
    /// Only Sequential, Random or Normal regions: no data moves.
    Nothing,
    Regions(BlockCache),
    Sequence(ReadingOrder, BlockCache),
    Online(BlockCache, FxHashMap<Reader, Detector>),
}

/// One file.
#[derive(Debug)]
pub struct Advisor {
    monitored: Arc<Monitored>,
    engine: Engine,
    judge: Judge,
    gap_bytes: u64,
    size_bytes: u64,
    was_down: bool,
    /// Bytes brought in for maps, and how far in the file, by program.
    mapped: FxHashMap<u64, (u64, u64)>,
    /// Of files without a plan whose kind is known.
    learnt: Option<Learnt>,
    /// Of files without a plan that list their own extents.
    indexed: Indexed,
    /// Of files without a plan: whether gaps are read along.
    gaps: Gaps,
    /// Of files without a plan: bringing in all of them.
    fill: Fill,
    /// How long reads take that wait for no hint.
    unaided: Unaided,
    /// Of files without a plan that are mapped.
    map_watch: Option<MapWatch>,
    /// Of what was brought in of it.
    quick_touches: QuickTouches,
    /// The program has mapped it; else it is looked at because no reads are told of.
    is_mapped: bool,
    /// What earlier watches brought in.
    watched_bytes: u64,
    /// When it counts as quiet, and how often it did.
    quiet_ns: Option<u64>,
    quiet_looks: u32,
    /// Until when a program is waited for that is expected to read from the beginning.
    expecting_until_ns: Option<u64>,
    /// What reads have still to wait before it is known that something is at stake.
    to_wait_ns: u64,
    /// What hints by the file's index, and those by its kind, have saved, less what they cost.
    known_saved_ns: [i64; 2],
    /// Whether these give way to others that may be better; not where hints are given whatever comes of them.
    gives_way: bool,
}

impl Advisor {
    /// An advisor for a file of the given size. Its window is bounded by the budget for one file, if that is not 0.
    pub fn new(
        monitored: Arc<Monitored>,
        size_bytes: u64,
        budget: &Budget,
        stand_down: StandDown,
        device: &DeviceCost,
    ) -> Advisor {
        let entry = &monitored.entry;
        let geometry = |block_bytes: u64| {
            let scale = entry.block_size.div_ceil(block_bytes);
            let most = if budget.per_file == 0 { u64::MAX } else { (budget.per_file / block_bytes).max(1) };
            let cache_blocks = entry.cache_size.saturating_mul(scale).min(most);
            let read_ahead_blocks = entry.read_ahead_size.saturating_mul(scale).max(1).min(cache_blocks);
            let together = if block_bytes < entry.block_size { ONLINE_BATCH_BYTES / block_bytes } else { 1 };
            let batch_blocks = together.min(read_ahead_blocks / 2);
            Geometry { block_bytes, cache_blocks, read_ahead_blocks, batch_blocks }
        };
        let engine = if !entry.sequence.is_empty() {
            let line = reading_order(entry, size_bytes);
            let cache = BlockCache::new(geometry(entry.block_size), line.bytes());
            Engine::Sequence(line, cache)
        } else if monitored.regions.moves_anything() {
            Engine::Regions(BlockCache::new(geometry(entry.block_size), size_bytes))
        } else if entry.online {
            let block_bytes = entry.block_size.min(ONLINE_BLOCK_BYTES);
            Engine::Online(BlockCache::new(geometry(block_bytes), size_bytes), FxHashMap::default())
        } else {
            Engine::Nothing
        };
        let learnt = match (&engine, &monitored.learnt) {
            (Engine::Online(..), Some(shape)) => Learnt::new(shape, geometry(LEARNT_BLOCK_BYTES), size_bytes),
            _ => None,
        };
        let gap_bytes = device.gap_bytes();
        // Only blocks bring in more than what is read. A window that holds the file, or a region that is brought in as a
        // whole, has no way ahead that could be tried.
        let ahead_bytes = entry.block_size.saturating_mul(entry.read_ahead_size);
        let tries = matches!(engine, Engine::Regions(_)) && size_bytes > ahead_bytes.max(TRIED_FILE_BYTES_MIN);
        let at_once = !stand_down.enabled || !stand_down.trial;
        let judge = Judge::new(stand_down, tries);
        Advisor {
            monitored,
            engine,
            judge,
            gap_bytes,
            size_bytes,
            was_down: false,
            mapped: FxHashMap::default(),
            learnt,
            indexed: Indexed::default(),
            gaps: Gaps::new(!at_once),
            fill: Fill::default(),
            unaided: Unaided::default(),
            map_watch: None,
            quick_touches: QuickTouches::default(),
            is_mapped: false,
            watched_bytes: 0,
            quiet_ns: None,
            quiet_looks: 0,
            expecting_until_ns: None,
            to_wait_ns: if at_once { 0 } else { AT_STAKE_NS },
            known_saved_ns: [0; 2],
            gives_way: stand_down.enabled,
        }
    }

    /// The file may have one of these formats. Where nothing else is known of it, its index is wanted in time.
    pub fn may_be(&mut self, formats: Vec<&'static dyn Format>) {
        if matches!(self.engine, Engine::Online(..)) {
            self.indexed.may_be(formats);
        }
    }

    /// The formats whose readers are to look at the file's index now, once, and the place that it is to tell of, if that is enough.
    pub fn take_index_wish(&mut self) -> Option<(Vec<&'static dyn Format>, Option<u64>)> {
        let wish = if self.to_wait_ns > 0 { None } else { self.indexed.take_wish() };
        self.unaided.gave(wish.is_some().into());
        wish
    }

    /// What the file's index says, which is the answer to a wish. It is not used where it is not waited for any more, or the file has
    /// another length.
    pub fn index_is_known(&mut self, index: Index, now_ns: u64) {
        if index.size_bytes == self.size_bytes {
            self.unaided.answered(now_ns);
            self.indexed.is_known(index);
        } else {
            self.has_no_index(now_ns);
        }
    }

    /// The answer to a wish: the file's index could not be read, or is not kept.
    pub fn has_no_index(&mut self, now_ns: u64) {
        self.unaided.answered(now_ns);
        self.indexed.is_none();
    }

    /// How many extents are known of the file by its index.
    pub fn index_extents(&self) -> usize {
        self.indexed.extents()
    }

    /// How many pieces its kind predicts of it.
    pub fn learnt_pieces(&self) -> usize {
        self.learnt.as_ref().map_or(0, Learnt::pieces)
    }

    /// Whether the file's index is followed, or waited for.
    pub fn goes_by_index(&self) -> bool {
        self.indexed.is_followed()
    }

    /// The format of the file, if its index is followed.
    pub fn index_format(&self) -> Option<&'static str> {
        self.indexed.format()
    }

    /// What the configuration says of the file.
    pub fn monitored(&self) -> &Arc<Monitored> {
        &self.monitored
    }

    /// The file's length as last told.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The file's length changed.
    pub fn set_size(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.indexed.forget();
        if let Some(learnt) = &mut self.learnt {
            learnt.set_size(size_bytes);
        }
        match &mut self.engine {
            Engine::Regions(cache) | Engine::Online(cache, _) => cache.set_size(size_bytes),
            Engine::Sequence(line, cache) => {
                *line = reading_order(&self.monitored.entry, size_bytes);
                cache.set_size(line.bytes());
            }
            Engine::Nothing => {}
        }
    }

    /// A program is about to open the file: what it will want at the beginning of its plan is brought in now. A program's
    /// first read there takes it over. What no reader has taken over by `until_ns` is released at the next read, or by
    /// [`Advisor::unexpect`].
    pub fn expect(&mut self, now_ns: u64, until_ns: u64, may: &mut dyn FnMut(u64) -> bool) -> Vec<Action> {
        let advising = self.judge.may_hint(now_ns);
        let mut left = if self.judge.is_trying() { UNTRIED_BYTES_MAX } else { u64::MAX };
        let may_begin = advising || self.judge.is_trying();
        let mut grant = |bytes: u64| {
            let granted = may_begin && bytes <= left && may(bytes);
            left -= if granted { bytes } else { 0 };
            granted
        };
        self.expecting_until_ns = Some(until_ns);
        let actions = match &mut self.engine {
            Engine::Nothing => Vec::new(),
            // Strides are not known before they are seen, but for files of a known kind.
            Engine::Online(..) => {
                self.learnt.as_mut().map(|learnt| learnt.opened(EXPECTED, &mut grant)).unwrap_or_default()
            }
            Engine::Regions(cache) => match self.monitored.regions.next_will_need(0) {
                Some(byte) if byte < self.size_bytes => {
                    cache.expect(EXPECTED, byte, &self.monitored.regions, &mut grant)
                }
                _ => Vec::new(),
            },
            Engine::Sequence(line, cache) => {
                let actions = cache.expect(EXPECTED, 0, &Everything, &mut grant);
                in_file(line, actions)
            }
        };
        self.kept(actions)
    }

    /// A program has opened the file. If its kind is known, what the program will read first is brought in.
    pub fn opened(&mut self, program: u64, now_ns: u64, may: &mut dyn FnMut(u64) -> bool) -> Vec<Action> {
        let advising = self.judge.may_hint(now_ns);
        let actions = self.learnt.as_mut().filter(|_| advising).map(|learnt| learnt.opened(program, may));
        self.kept(actions.unwrap_or_default())
    }

    /// The program that was expected is there, or does not come. What it has not taken over is let go.
    pub fn unexpect(&mut self) -> Vec<Action> {
        match self.expecting_until_ns.take() {
            Some(_) => self.depart(EXPECTED),
            None => Vec::new(),
        }
    }

    /// A program has read. What to do now, in ranges of the file; `may` grants or refuses each number of bytes to
    /// prefetch.
    pub fn read(&mut self, reader: Reader, read: &Read, may: &mut dyn FnMut(u64) -> bool) -> Vec<Action> {
        let is_watched_on = self.is_heard_of(read.now_ns, Some(&read.bytes));
        let advising = self.judge.may_hint(read.now_ns);
        // Before a file goes without any hints, those that need no plan have their turn.
        if matches!(self.judge.why(), Some(Why::NoGain(_) | Why::Wasted(_)))
            && self.learnt.as_mut().is_some_and(Learnt::step_aside)
        {
            self.judge.start_anew(self.tally());
            self.gaps.after_others();
        }
        if self.judge.why().is_some() {
            if !std::mem::replace(&mut self.was_down, true) {
                self.forget();
                // What was given up with this counts neither for hints nor against them.
                self.judge.start_over(self.tally());
            }
            if self.unaided.is_alone(read) {
                self.judge.read(false, read.bytes.end - read.bytes.start, read.duration_ns, read.now_ns);
            }
            return Vec::new();
        }
        self.was_down = false;
        let len = read.bytes.end - read.bytes.start;
        self.to_wait_ns = match read.duration_ns {
            0 => 0, // how long reads take is not known
            duration_ns => self.to_wait_ns.saturating_sub(waited_ns(len, duration_ns)),
        };
        let at_stake = self.to_wait_ns == 0;
        // How long reads take is not always known.
        let (is_timed, slow) = (read.duration_ns > 0, is_slow(len, read.duration_ns));
        let alone = self.unaided.is_alone(read);
        // What is watched is brought in by what is seen.
        let mut grant = |bytes: u64| advising && !is_watched_on && may(bytes);
        let mut gave_way = false;
        let (hit, mut actions) = match &mut self.engine {
            Engine::Nothing => return Vec::new(),
            Engine::Regions(cache) => {
                let hit = cache.holds(&read.bytes);
                (hit, cache.access(reader.program, read.bytes.clone(), &self.monitored.regions, &mut grant))
            }
            Engine::Sequence(line, cache) => {
                let Some(place) = line.read(reader.program, &read.bytes) else { return Vec::new() };
                let hit = cache.holds(&place);
                let actions = cache.access(reader.program, place, &Everything, &mut grant);
                (hit, in_file(line, actions))
            }
            Engine::Online(cache, detectors) => {
                if read.bytes.is_empty() {
                    return Vec::new();
                }
                let thread = Reader { thread: reader.thread % THREADS_MAX, ..reader };
                let seen = detectors.entry(thread).or_default().observe(&read.bytes, self.gap_bytes);
                // Where what is known comes late, longer pieces may come sooner: what is found out without a plan goes before it.
                let is_late = self.gives_way && self.learnt.as_ref().is_some_and(Learnt::is_late);
                let is_open = is_late && seen.forecast.is_some();
                if is_open {
                    self.gaps.after_others();
                }
                let gave = [self.indexed.gives(), self.learnt.as_ref().is_some_and(Learnt::gives)];
                let known = self.learnt.as_mut().and_then(|learnt| {
                    let late_ns = if slow { waited_ns(len, read.duration_ns) } else { 0 };
                    learnt.read(reader, &read.bytes, late_ns, &mut |bytes| !is_open && grant(bytes))
                });
                let by_kind = known.is_some();
                // Only one of them may be granted bytes: the other's prefetches would be counted and never made.
                let known =
                    known.or_else(|| self.indexed.read(reader.program, &read.bytes, self.size_bytes, &mut grant));
                let is_known = known.is_some() && !(by_kind && is_open);
                let (brought, more) = known.unwrap_or_default();
                let hit = brought || cache.holds(&read.bytes);
                // Before the first hint of it, a read waited for others, or for the index itself: that is spent whatever it is worth.
                let is_delayed = is_known && slow && !alone && gave[usize::from(by_kind)];
                if read.duration_ns > 0 && (brought || is_delayed) {
                    let usual_ns = self.unaided.usual_ns(len).unwrap_or(read.duration_ns);
                    let saved_ns =
                        i64::try_from(usual_ns).unwrap_or(i64::MAX).saturating_sub_unsigned(read.duration_ns);
                    let account = &mut self.known_saved_ns[usize::from(by_kind)];
                    *account = account.saturating_add(saved_ns).min(KNOWN_SAVED_NS_MAX);
                    // A device that serves one request after the other may be slower by what it does not need yet.
                    if *account < -KNOWN_LOST_NS_MAX && self.gives_way {
                        *account = 0;
                        gave_way = match &mut self.learnt {
                            Some(learnt) if by_kind => learnt.step_aside(),
                            _ => self.indexed.step_aside(),
                        };
                        self.gaps.after_others();
                    }
                }
                let stream = stream_of(thread, seen.stream);
                let mut actions = if seen.fresh { cache.depart(stream) } else { Vec::new() };
                actions.extend(more);
                match alone {
                    true if !hit && (slow || !is_timed) => self.gaps.read(len, read.duration_ns, read.now_ns),
                    true => {}
                    false => self.gaps.interrupted(),
                }
                if !hit && slow && alone {
                    self.unaided.read(len, read.duration_ns);
                }
                // Between reads that the index knows the program looks at the index itself, which is in memory: that is no pattern of its own.
                let is_aside = self.indexed.is_followed() && !hit && is_timed && !slow;
                if let Some(forecast) = seen.forecast.filter(|_| !is_known && !is_aside) {
                    let may_try = at_stake && advising;
                    let advice = may_try.then(|| {
                        self.gaps.advise(forecast, &read.bytes, self.size_bytes, |bytes| self.fill.affords(bytes))
                    });
                    match advice.unwrap_or(Advice::Follow) {
                        Advice::Follow => {
                            if seen.changed {
                                cache.look_again(stream);
                            }
                            let mut may = |bytes: u64| at_stake && grant(bytes);
                            actions.extend(cache.access(stream, read.bytes.clone(), forecast, &mut may));
                        }
                        // Without a grant its end is never told.
                        Advice::Try(extent) if grant(extent.end - extent.start) => actions.push(Action::Try(extent)),
                        Advice::Try(_) | Advice::Wait => {}
                    }
                }
                let unforeseen = !hit && !is_known && !is_watched_on && seen.forecast.is_none();
                // What the index is going to tell of is not in no order.
                self.fill.hold_back(self.indexed.is_awaited());
                let without_hints_ns = self.unaided.without_hints_ns(len, read.duration_ns);
                let steps = if unforeseen && slow {
                    let ns = [without_hints_ns, read.duration_ns];
                    self.fill.slow_read(Some(&read.bytes), ns, self.size_bytes, &mut grant)
                } else {
                    if unforeseen && is_timed {
                        self.fill.fast_read(&read.bytes);
                    } else if !hit && slow && !alone {
                        self.fill.delayed(read.duration_ns - without_hints_ns);
                    }
                    self.fill.more(self.size_bytes)
                };
                actions.extend(steps.into_iter().map(of_step));
                (hit, actions)
            }
        };
        if hit || self.expecting_until_ns.is_some_and(|until| read.now_ns >= until) {
            actions.extend(self.unexpect());
        }
        if gave_way {
            // Neither these reads nor what is let go now tell of the hints that follow.
            self.judge.start_anew(self.tally());
            return self.kept(actions);
        }
        if self.judge.is_trying() {
            let extent = self.judge.try_out(reader, hit, read, self.size_bytes);
            // Without a grant its time is never reported, and the trial ends by itself.
            actions.extend(extent.filter(|e| may(e.end - e.start)).map(Action::Try));
            return self.kept(actions);
        }
        let tally = self.tally();
        // One that waited behind a hint does not tell how reads are without.
        if hit || alone {
            self.judge.read(hit, len, read.duration_ns, read.now_ns);
        }
        self.judge.tally(tally, read.now_ns);
        self.kept(actions)
    }

    /// A program has mapped these bytes into memory. Which of them it touches is not told: what the configuration wants of
    /// them is brought in in the order of the file, as far as `may` grants, and kept until the program is gone.
    pub fn mapped(
        &mut self,
        program: u64,
        bytes: Range<u64>,
        now_ns: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Action> {
        if matches!(self.engine, Engine::Online(..)) && self.size_bytes >= WATCHED_MAP_BYTES_MIN {
            self.is_mapped = true;
            let watch = self.map_watch.get_or_insert_with(|| MapWatch::new(now_ns));
            watch.add(bytes.start..bytes.end.min(self.size_bytes));
            return Vec::new();
        }
        let wanted = match self.engine {
            Engine::Regions(_) if self.judge.may_hint(now_ns) || self.judge.is_trying() => {
                self.monitored.regions.will_need_in(bytes.start..bytes.end.min(self.size_bytes))
            }
            _ => return Vec::new(),
        };
        let mut actions: Vec<Action> = Vec::new();
        // Long maps are told of in parts, and a file may be mapped twice.
        let (mut held, mut until) = self.mapped.get(&program).copied().unwrap_or_default();
        for piece in wanted {
            let mut at = piece.start.max(until);
            // Granted piece by piece, so that what has room is brought in even if not all has.
            while at < piece.end {
                let end = piece.end.min(at.saturating_add(MAPPED_PIECE_BYTES));
                if !may(end - at) {
                    break;
                }
                held += end - at;
                match actions.last_mut() {
                    Some(Action::Prefetch(last)) if last.end == at => last.end = end,
                    _ => actions.push(Action::Prefetch(at..end)),
                }
                (at, until) = (end, end);
            }
        }
        if held > 0 {
            self.mapped.insert(program, (held, until));
        }
        self.kept(actions)
    }

    /// When the maps of a file without a plan are to be looked at; `None` when they are not.
    pub fn look_at_map_ns(&self) -> Option<u64> {
        self.map_watch.as_ref().map(MapWatch::look_ns).or(self.quiet_ns)
    }

    /// The program has opened the file, or read this of it: it is not quiet for now. Whether it is watched on all the same, since
    /// the read was one of several long ones in the order of the file: what was brought in for it is what the next one reads.
    pub fn is_heard_of(&mut self, now_ns: u64, read: Option<&Range<u64>>) -> bool {
        let watches = matches!(self.engine, Engine::Online(..)) && self.size_bytes >= QUIET_FILE_BYTES_MIN;
        if !watches || self.is_mapped {
            return false;
        }
        let is_foretold = self.indexed.is_followed() || self.learnt.as_ref().is_some_and(Learnt::is_followed);
        if let Some(read) = read.filter(|_| !is_foretold)
            && self.map_watch.as_mut().is_some_and(|watch| watch.goes_on(read))
        {
            return true;
        }
        if let Some(watch) = self.map_watch.take() {
            self.watched_bytes += watch.held_bytes();
            self.quiet_looks += 1;
        }
        self.quiet_ns = (self.quiet_looks < QUIET_LOOKS_MAX).then(|| now_ns.saturating_add(QUIET_NS));
        false
    }

    /// Looks at what came into memory of a file that is mapped; `cached` tells how much of a range is there. What to do now.
    pub fn look_at_map(
        &mut self,
        now_ns: u64,
        cached: &mut Cached<'_>,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Action> {
        if self.quiet_ns.take_if(|at| now_ns >= *at).is_some() && self.map_watch.is_none() {
            let mut watch = MapWatch::new(now_ns);
            watch.add(0..self.size_bytes);
            self.map_watch = Some(watch);
        }
        let Some(watch) = &mut self.map_watch else { return Vec::new() };
        let seen = watch.look(now_ns, cached, may);
        let mut actions: Vec<Action> = seen.bring.into_iter().map(Action::Exactly).collect();
        // What the index is going to tell of is not in no order, whichever way it is seen.
        self.fill.hold_back(self.indexed.is_awaited());
        // A touch is seen as soon as it waits, and what the one before it took until then.
        let alone = self.unaided.is_idle_since(seen.since_ns);
        let mut steps: Vec<Step> = Vec::new();
        for fault in seen.faults {
            steps.extend(self.fill.slow_fault(fault, alone, self.size_bytes, may));
        }
        steps.extend(self.fill.more(self.size_bytes));
        for step in &steps {
            let (Step::Try(piece) | Step::Bring(piece)) = step;
            self.quick_touches.give(piece.start, watch.give(piece));
        }
        actions.extend(steps.into_iter().map(of_step));
        if let Some(watch) = self.map_watch.take_if(|watch| watch.is_done()) {
            self.watched_bytes += watch.held_bytes();
        }
        self.kept(actions)
    }

    /// Parts of a map whose touches do not wait, as they were brought in: which of them the program touches is seen in its page table.
    /// To be answered by [`Advisor::page_table_is_known`] before anything more is asked.
    pub fn take_page_table_wish(&mut self, now_ns: u64) -> Option<Vec<Range<u64>>> {
        if self.is_mapped { self.quick_touches.question(now_ns) } else { None }
    }

    /// Of the parts that were asked about, whether the program has a page of each in its page table; `None` where that cannot be seen.
    pub fn page_table_is_known(&mut self, parts: Option<&[(Range<u64>, bool)]>) {
        match parts {
            Some(parts) => self.fill.fast_touches(self.quick_touches.told(parts)),
            None => self.quick_touches.blind(),
        }
    }

    /// The number of programs that have the file open.
    pub fn set_programs(&mut self, programs: u64) {
        self.judge.set_programs(programs);
    }

    /// A program has closed the file, or is gone.
    pub fn depart(&mut self, program: u64) -> Vec<Action> {
        self.mapped.remove(&program);
        let actions = match &mut self.engine {
            Engine::Nothing => return Vec::new(),
            Engine::Regions(cache) => cache.depart(program),
            Engine::Sequence(line, cache) => {
                line.depart(program);
                let actions = cache.depart(program);
                in_file(line, actions)
            }
            Engine::Online(cache, detectors) => {
                if let Some(learnt) = &mut self.learnt {
                    learnt.depart(program);
                }
                self.indexed.depart(program);
                let mut actions = Vec::new();
                detectors.retain(|reader, _| {
                    if reader.program == program {
                        for stream in 0..STREAMS_MAX {
                            actions.extend(cache.depart(stream_of(*reader, stream)));
                        }
                    }
                    reader.program != program
                });
                actions
            }
        };
        self.kept(actions)
    }

    /// A hint asked for some bytes of which `found_bytes` were in memory already; `fresh` when they were asked for the
    /// first time, and what is there is not ours.
    pub fn hinted(&mut self, asked: Range<u64>, found_bytes: u64, fresh: bool, now_ns: u64) {
        let asked_bytes = asked.end.saturating_sub(asked.start);
        self.unaided.answered(now_ns);
        self.fill.arrived(&asked);
        self.quick_touches.arrived(asked.start, true);
        if !fresh {
            return;
        }
        self.judge.hinted(asked_bytes, found_bytes, now_ns);
        if found_bytes >= asked_bytes
            && let Engine::Regions(cache) | Engine::Online(cache, _) = &mut self.engine
        {
            cache.found_cached(asked);
        }
    }

    /// A hint was refused, or failed.
    pub fn failed(&mut self, asked: &Range<u64>, now_ns: u64) {
        self.unaided.answered(now_ns);
        self.fill.arrived(asked);
        self.quick_touches.arrived(asked.start, false);
    }

    /// How long it took to bring in what was to be tried, of which `found_bytes` were in memory already.
    pub fn tried(&mut self, bytes: &Range<u64>, found_bytes: u64, took_ns: u64, now_ns: u64) {
        self.unaided.answered(now_ns);
        self.judge.tried(bytes, took_ns);
        if !self.gaps.tried(bytes, found_bytes, took_ns) {
            self.gap_bytes = self.gap_bytes.min(SHORT_GAP_BYTES);
            if let Engine::Online(_, detectors) = &mut self.engine {
                detectors.values_mut().for_each(|detector| detector.regard_gaps(self.gap_bytes));
            }
        }
        self.fill.tried(bytes, found_bytes, took_ns);
        self.quick_touches.arrived(bytes.start, true);
    }

    /// Bytes brought in and not yet released.
    pub fn held_bytes(&self) -> u64 {
        let watched = self.watched_bytes + self.map_watch.as_ref().map_or(0, MapWatch::held_bytes);
        let mapped = self.mapped.values().map(|(held, _)| held).sum::<u64>();
        let known = self.learnt.as_ref().map_or(0, Learnt::held_bytes) + self.indexed.held_bytes();
        self.cache().map_or(0, BlockCache::held_bytes) + known + mapped + watched + self.fill.held_bytes()
    }

    /// What became of what was brought in.
    pub fn tally(&self) -> Tally {
        let tally = self.cache().map_or_else(Tally::default, BlockCache::tally).and(self.indexed.tally());
        self.learnt.as_ref().map_or(tally, |learnt| tally.and(learnt.tally()))
    }

    /// Whether the file's kind was known, and the program read it in another order.
    pub fn has_strayed(&self) -> bool {
        self.learnt.as_ref().is_some_and(Learnt::has_strayed)
    }

    /// Why the file gets no hints now.
    pub fn why_down(&self) -> Option<Why> {
        self.judge.why()
    }

    /// How often it was stood down.
    pub fn stood_down(&self) -> u64 {
        self.judge.stood_down()
    }

    /// Time saved by hints in percent of the reads without, as judged last.
    pub fn gain_percent(&self) -> Option<i64> {
        self.judge.judged_gain_percent()
    }

    fn cache(&self) -> Option<&BlockCache> {
        match &self.engine {
            Engine::Nothing => None,
            Engine::Regions(cache) | Engine::Sequence(_, cache) | Engine::Online(cache, _) => Some(cache),
        }
    }

    fn forget(&mut self) {
        self.indexed.clear();
        if let Some(learnt) = &mut self.learnt {
            learnt.clear();
        }
        match &mut self.engine {
            Engine::Nothing => {}
            Engine::Regions(cache) | Engine::Sequence(_, cache) => cache.clear(),
            Engine::Online(cache, detectors) => {
                cache.clear();
                detectors.clear();
            }
        }
    }

    /// Without releases where the configuration wants none, or nothing is known of what is read again. The rest is noted.
    fn kept(&mut self, mut actions: Vec<Action>) -> Vec<Action> {
        if !self.monitored.entry.release || matches!(self.engine, Engine::Online(..)) {
            actions.retain(|a| !matches!(a, Action::Release(_)));
        }
        self.unaided.gave(actions.iter().filter_map(Action::asked).count() as u64);
        actions
    }
}

fn of_step(step: Step) -> Action {
    match step {
        Step::Try(range) => Action::Try(range),
        Step::Bring(range) => Action::Prefetch(range),
    }
}

fn reading_order(entry: &Entry, size_bytes: u64) -> ReadingOrder {
    ReadingOrder::new(entry.sequence.iter().map(Region::bytes), size_bytes)
}

/// The cache's name for a thread's stream.
fn stream_of(reader: Reader, stream: usize) -> u64 {
    reader.program << 16 | u64::from(reader.thread) << 4 | stream as u64
}

/// On a line of pieces, everything is wanted.
struct Everything;

impl crate::cache::Plan for Everything {
    fn moves_in(&self, _: Range<u64>) -> bool {
        true
    }

    fn will_need_in(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        if bytes.is_empty() { Vec::new() } else { vec![bytes] }
    }

    fn ahead(&self, touched: (u64, u64), most: u64, geometry: Geometry, size_bytes: u64) -> Vec<u64> {
        let end = size_bytes.div_ceil(geometry.block_bytes);
        (touched.1 + 1..end).take(most as usize).collect()
    }

    fn once_in(&self, _: Range<u64>) -> bool {
        false
    }

    fn has_once(&self) -> bool {
        false
    }
}

/// Actions on a line as actions on the file. What the program reads in one piece is brought in in one piece, with the
/// block in which it begins, and released with the block in which it ends.
fn in_file(line: &ReadingOrder, actions: Vec<Action>) -> Vec<Action> {
    let mut out = Vec::with_capacity(actions.len());
    for action in actions {
        let (pieces, make): (_, fn(Range<u64>) -> Action) = match action {
            Action::Prefetch(range) => (line.beginning_in(range), Action::Prefetch),
            Action::Renew(range) => (line.beginning_in(range), Action::Renew),
            Action::Release(range) => (line.ending_in(range), Action::Release),
            Action::Try(range) => (line.in_file(range), Action::Try),
            Action::Exactly(range) => (line.in_file(range), Action::Exactly),
        };
        out.extend(pieces.into_iter().map(make));
    }
    out
}
