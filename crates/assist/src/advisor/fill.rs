//! Reads without a pattern: when the whole file is brought in because the program has waited for so long already.
//!
//! An index, a table of chunks, or a tree is read in an order that nothing foretells. One may go on waiting for each read, or
//! pay once for the whole file. As with renting or buying, the file is brought in when the reads that were not foreseen have
//! cost as much time as that takes (Karlin, Manasse, Rudolph & Sleator, *Competitive Snoopy Caching*, 1988, §2). It is not begun
//! where so little can be left to read that it would take longer: a program that reads each chunk of a table once has fewer
//! chunks left with each read.
//!
//! That rule pays up to twice the least, and a program must not become slower. So the file is bought in pieces, each of which
//! must be affordable: what reads were delayed by pieces, and what those on their way may delay, is at most a hundredth of what
//! the program has waited, some milliseconds, and what reads of earlier pieces have saved. Where the device serves reads and pieces
//! side by side there is no delay, and the file comes at once; where it serves one after the other each piece that is read pays
//! for more of them. What a piece takes is learnt from the pieces, the first of which is short.
//!
//! A fault of a map is seen when it begins, and how long it took when the next one does, so there is no further piece until then.
//! Touches that do not wait any more are seen in the program's page table.
//!
//! Where faults of a map were hardly delayed by pieces, the device serves them side by side. What delays a fault there is the
//! piece before it on a line that they share. So with each fault one piece is asked for that passes behind it, and has passed
//! when the next fault comes to the line; long ones follow when touches have saved what these cost.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::map_watch::Fault;

/// Slow reads, and the time that they took, before the first piece.
const SLOW_READS: u64 = 8;
const WAITED_NS_MIN: u64 = 10_000_000;
/// A piece at least, unless it is the last one, and at most.
const PIECE_BYTES: (u64, u64) = (128 << 10, 4 << 20);
/// The first one: so many bytes for each millisecond that a read takes, and at most. It takes twice as long as a read where a
/// device brings in 40 MB a second, and hardly longer on faster ones.
const FIRST_BYTES: (u64, u64) = (40_000, 512 << 10);
/// How much longer a piece may be than one whose time is known.
const GROWTH: u64 = 4;
/// Pieces on their way at once.
const PIECES_AHEAD: usize = 4;
/// Of a piece's time, the part that its bytes take is at least one over this; by the second, where the whole file is judged by a
/// piece shorter than this. The rest is what the request costs.
const BYTES_SHARE: (u64, u64) = (4, 8);
const LONG_BYTES: u64 = 1 << 20;
/// While little is known, the part of the time of the file that reads must have waited, one over this.
const UNKNOWN_SHARE: u64 = 4;
/// A file smaller than this is read by the kernel as soon as it is opened.
const FILE_BYTES_MIN: u64 = 256 << 10;
/// What reads may be delayed in any case, and the part of what they waited, one over this.
const DELAY_NS: u64 = 10_000_000;
const DELAY_SHARE: u64 = 100;

/// A device serves faults and pieces side by side if pieces that took so long in all have delayed faults by no more than a quarter of it.
const BESIDE_NS_MIN: u64 = 20_000_000;
/// Of each nanosecond that pieces take, reads are held to be delayed by no less, in 2⁻¹⁰, whatever was seen.
const DELAY_LEAST: u128 = 1 << 7;

/// Places remembered, at most.
const PLACES_MAX: usize = 4096;

/// Where reads began.
#[derive(Debug, Default)]
struct Places {
    starts: BTreeSet<u64>,
    /// The least distance between two of them, bytes.
    closest: Option<u64>,
}

impl Places {
    /// Whether it is a new one.
    fn add(&mut self, start: u64) -> bool {
        if self.starts.len() >= PLACES_MAX {
            return false;
        }
        let before = self.starts.range(..start).next_back().map(|before| start - before);
        let after = self.starts.range(start.saturating_add(1)..).next().map(|after| after - start);
        let is_new = self.starts.insert(start);
        if is_new {
            self.closest = [self.closest, before, after].into_iter().flatten().min();
        }
        is_new
    }

    /// How many more there are in a file of `size_bytes` at most, if all are as far apart as those that are known.
    fn left(&self, size_bytes: u64) -> u64 {
        self.closest.map_or(u64::MAX, |closest| (size_bytes / closest + 1).saturating_sub(self.starts.len() as u64))
    }
}

/// What a step asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Bring it in and tell how long that took.
    Try(Range<u64>),
    /// Bring it in.
    Bring(Range<u64>),
}

/// A piece on its way.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    /// What it takes.
    ns: u64,
    /// None was on its way when it was asked for, so what it takes tells what pieces cost.
    alone: bool,
}

/// So many bytes at a cost in 2⁻¹⁰ ns.
fn bytes_ns(bytes: u64, byte: u64) -> u64 {
    u64::try_from((u128::from(bytes) * u128::from(byte)) >> 10).unwrap_or(u64::MAX)
}

/// What one of these bytes costs that took so long, in 2⁻¹⁰ ns.
fn byte_of(ns: u64, bytes: u64) -> u64 {
    u64::try_from((u128::from(ns) << 10) / u128::from(bytes.max(1))).unwrap_or(u64::MAX)
}

/// Of one file.
#[derive(Debug, Default)]
pub(super) struct Fill {
    /// Reads that were not foreseen and slow, their bytes, and the time that they take without hints.
    reads: u64,
    bytes: u64,
    waited_ns: u64,
    /// What faults of a map brought in, and how much longer they took beside pieces.
    faulted_bytes: u64,
    faults_beyond_ns: i64,
    /// What pieces took that came since the last touch of a map: what they delayed the program by is seen at the next one, before
    /// which there are no more.
    owed_ns: u64,
    /// The shortest time that a piece took.
    quickest_ns: Option<u64>,
    places: Places,
    /// What a byte of a piece takes in 2⁻¹⁰ ns, if that is known: by what one piece is afforded, and by what the whole file is.
    byte: Option<[u64; 2]>,
    /// By a piece so long.
    measured_bytes: u64,
    /// It took much longer than a read, or could not be longer.
    is_sure: bool,
    /// Everything before this was asked for.
    asked: u64,
    /// Pieces on their way by their beginnings.
    under_way: BTreeMap<u64, UnderWay>,
    /// The most that pieces took that were on their way together, of those that are there.
    together_ns: u64,
    /// What those took that are there.
    came_ns: u64,
    /// What reads were delayed meanwhile.
    delayed_ns: u64,
    /// What reads of what was brought in would have waited.
    saved_ns: u64,
    /// All was asked for, or nothing can be.
    is_over: bool,
    /// It does not begin now.
    is_held_back: bool,
}

impl Fill {
    /// A read that was not foreseen and took longer than from memory, of a file of `size_bytes`; what it read, if that is
    /// known, and how long it takes without hints and took now. `may` grants bytes.
    pub(super) fn slow_read(
        &mut self,
        read: Option<&Range<u64>>,
        [without_hints_ns, took_ns]: [u64; 2],
        size_bytes: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Step> {
        self.owed_ns = 0;
        self.reads += 1;
        self.waited_ns = self.waited_ns.saturating_add(without_hints_ns);
        self.delayed(took_ns.saturating_sub(without_hints_ns));
        if let Some(read) = read {
            self.bytes = self.bytes.saturating_add(read.end - read.start);
            self.places.add(read.start);
        }
        self.next(size_bytes, may)
    }

    /// Whether it does not begin for now; what reads wait meanwhile counts.
    pub(super) fn hold_back(&mut self, is_held_back: bool) {
        self.is_held_back = is_held_back;
    }

    /// What is to be asked for after a slow read.
    fn next(&mut self, size_bytes: u64, may: &mut dyn FnMut(u64) -> bool) -> Vec<Step> {
        let begins = self.asked == 0 && self.reads >= SLOW_READS && self.waited_ns >= WAITED_NS_MIN;
        if begins && size_bytes >= FILE_BYTES_MIN && !self.is_over && !self.is_held_back {
            // A file that does not fit is not begun.
            self.is_over = !may(size_bytes);
            return if self.is_over { Vec::new() } else { vec![Step::Try(self.give(self.first_bytes(size_bytes)))] };
        }
        self.more(size_bytes)
    }

    /// A fault of a map. `alone`: no piece was on its way meanwhile. If one was, the fault is held to have taken as long as others did
    /// without it, and the rest counts as delay.
    pub(super) fn slow_fault(
        &mut self,
        fault: Fault,
        alone: bool,
        size_bytes: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Step> {
        self.owed_ns = 0;
        self.faulted_bytes = self.faulted_bytes.saturating_add(fault.bytes);
        let mean_ns = self.mean_ns();
        if !alone {
            // How long each took is known roughly, so those that took less count, too.
            let longer_ns = i128::from(fault.took_ns) - i128::from(mean_ns);
            self.faults_beyond_ns = self.faults_beyond_ns.saturating_add(i64::try_from(longer_ns).unwrap_or(i64::MAX));
        }
        let without_hints_ns = if alone { fault.waited_ns() } else { mean_ns };
        (self.reads, self.waited_ns) = (self.reads + 1, self.waited_ns.saturating_add(without_hints_ns));
        self.next(size_bytes, may)
    }

    /// So many touches of a map did not wait, since what they touched was brought in. A fault brings in what is around it, too, so no
    /// more count than it would have taken faults for all that was brought in.
    pub(super) fn fast_touches(&mut self, touches: u64) {
        self.owed_ns = if touches == 0 { self.owed_ns } else { 0 };
        let faults_max = u128::from(self.asked) * u128::from(self.reads) / u128::from(self.faulted_bytes.max(1));
        let most_ns = faults_max.saturating_mul(u128::from(self.each_ns()));
        let most_ns = u64::try_from(most_ns).unwrap_or(u64::MAX).max(self.saved_ns);
        self.saved_ns = self.saved_ns.saturating_add(touches.saturating_mul(self.each_ns())).min(most_ns);
    }

    /// A read waited so long behind something that was brought in.
    pub(super) fn delayed(&mut self, ns: u64) {
        self.delayed_ns = self.delayed_ns.saturating_add(ns);
    }

    /// A read that was not foreseen and came from memory.
    pub(super) fn fast_read(&mut self, read: &Range<u64>) {
        self.owed_ns = 0;
        if read.end <= self.asked && self.places.add(read.start) {
            self.saved_ns = self.saved_ns.saturating_add(self.each_ns());
        }
    }

    /// What is to be asked for next.
    pub(super) fn more(&mut self, size_bytes: u64) -> Vec<Step> {
        let mut steps = Vec::new();
        while self.asked > 0 && !self.is_over && self.owed_ns == 0 && self.under_way.len() < PIECES_AHEAD {
            if self.asked >= size_bytes {
                self.is_over = true;
                break;
            }
            let paced = self.is_paced(size_bytes - self.asked);
            let Some(len) = self.next_bytes(size_bytes - self.asked, size_bytes) else { break };
            // How long one takes is seen where no other is on its way, and when one is there where it is waited for.
            let tries = paced || self.under_way.is_empty() && !self.is_sure;
            let make = if tries { Step::Try } else { Step::Bring };
            steps.push(make(self.give(len)));
            if paced {
                // What follows a fault on the line is to have passed when the next one comes.
                self.owed_ns = 1;
                break;
            }
        }
        steps
    }

    fn give(&mut self, len: u64) -> Range<u64> {
        let piece = self.asked..self.asked + len;
        let under_way = UnderWay { ns: self.piece_ns(len), alone: self.under_way.is_empty() };
        self.under_way.insert(piece.start, under_way);
        self.asked = piece.end;
        piece
    }

    fn first_bytes(&self, rest: u64) -> u64 {
        let bytes = (self.each_ns() / 1_000_000).saturating_mul(FIRST_BYTES.0);
        (bytes / PIECE_BYTES.0 * PIECE_BYTES.0).clamp(PIECE_BYTES.0, FIRST_BYTES.1).min(rest)
    }

    /// The next piece that can be afforded, of a file with `rest` bytes to go.
    fn next_bytes(&self, rest: u64, size_bytes: u64) -> Option<u64> {
        let Some([byte, bold]) = self.byte else {
            return self.under_way.is_empty().then_some(self.first_bytes(rest)); // what was tried was in memory
        };
        let left_ns = self.places.left(size_bytes).saturating_mul(self.each_ns());
        if left_ns <= self.rest_ns(rest, byte) {
            return None;
        }
        // A longer piece tells more, and may show that all of it takes less time.
        let share = if self.is_sure { 1 } else { UNKNOWN_SHARE };
        if self.all_ns() < self.rest_ns(rest, bold) / share {
            return None;
        }
        let room_ns = self.room_ns();
        let most = self.measured_bytes.saturating_mul(GROWTH).clamp(PIECE_BYTES.0, PIECE_BYTES.1);
        // Where requests are dear, a fifth of the time is to be for bytes.
        let least = u64::try_from((u128::from(self.request_ns()) << 8) / u128::from(byte)).unwrap_or(u64::MAX);
        let least = least.min(PIECE_BYTES.1 / 4).clamp(PIECE_BYTES.0, most).min(rest);
        let halves = std::iter::successors(Some(most), |len| Some(len / 2)).take_while(|len| *len >= least);
        let mut pieces = halves.map(|len| (len / PIECE_BYTES.0 * PIECE_BYTES.0).max(PIECE_BYTES.0).min(rest));
        if self.is_paced(rest) {
            let idle_bytes =
                u64::try_from((u128::from(self.each_ns() * 3 / 4) << 10) / u128::from(byte)).unwrap_or(u64::MAX);
            let len = (idle_bytes / PIECE_BYTES.0 * PIECE_BYTES.0).clamp(PIECE_BYTES.0, most).min(rest);
            return Some(len).filter(|len| self.piece_ns(*len) <= room_ns);
        }
        pieces.find(|len| self.piece_ns(*len) <= room_ns)
    }

    /// The next piece is to pass behind a fault. Once a long one can be borne, and all the more what is left, there is no need.
    fn is_paced(&self, rest: u64) -> bool {
        let most = PIECE_BYTES.1.min(rest);
        self.is_beside() && self.usual_room_ns() < self.piece_ns(most)
    }

    /// The device serves faults of a map beside pieces.
    fn is_beside(&self) -> bool {
        self.is_mapped() && self.came_ns >= BESIDE_NS_MIN && self.all_delayed_ns() <= self.came_ns / 4
    }

    /// What pieces may take beside those on their way, as far as faults that are served beside them are concerned.
    fn room_ns(&self) -> u64 {
        let usual_ns = self.usual_room_ns();
        if !self.is_beside() {
            return usual_ns;
        }
        // By what was seen, but no more than twice as much at once as was seen: more may be served otherwise.
        self.room_at_ns(DELAY_LEAST, self.together_ns.saturating_mul(2)).max(usual_ns)
    }

    /// The same where a read may want what is on its way.
    fn usual_room_ns(&self) -> u64 {
        // It is delayed by half of what pieces take at least. A touch of that is not seen, so of maps it is three quarters.
        self.room_at_ns(if self.is_mapped() { 3 << 8 } else { 1 << 9 }, u64::MAX)
    }

    /// Of each nanosecond that pieces take, reads are delayed by so much, in 2⁻¹⁰: all of it until more is known, and `least` at least.
    fn room_at_ns(&self, least: u128, most_ns: u64) -> u64 {
        let delayed_ns = self.all_delayed_ns();
        let delay = u128::from(delayed_ns.saturating_add(DELAY_NS)) << 10;
        let delay = (delay / u128::from(self.came_ns.saturating_add(DELAY_NS))).clamp(least, 2 << 10);
        let bearable_ns = (DELAY_NS + self.all_ns() / DELAY_SHARE).saturating_add(self.saved_ns);
        let room_ns = u128::from(bearable_ns.saturating_sub(delayed_ns)) << 10;
        let room_ns = u64::try_from(room_ns / delay).unwrap_or(u64::MAX).min(most_ns);
        room_ns.saturating_sub(self.under_way_ns()).saturating_sub(self.owed_ns)
    }

    /// What those on their way take.
    fn under_way_ns(&self) -> u64 {
        self.under_way.values().map(|piece| piece.ns).sum()
    }

    /// Whether so many bytes may be tried somewhere for another reason. Before reads were found to have no pattern they may.
    pub(super) fn affords(&self, bytes: u64) -> bool {
        self.asked == 0 || self.byte.is_some() && self.piece_ns(bytes) <= self.room_ns()
    }

    /// The reads are touches of a map.
    fn is_mapped(&self) -> bool {
        self.faulted_bytes > 0
    }

    /// What a read waited without hints, computing between touches of a map included.
    fn mean_ns(&self) -> u64 {
        self.waited_ns / self.reads.max(1)
    }

    /// What a read takes without hints. A fault takes no longer than a piece, which is not shorter than what the kernel brings in
    /// around one; what is beyond that was computing.
    fn each_ns(&self) -> u64 {
        let each_ns = self.mean_ns();
        self.quickest_ns.filter(|_| self.is_mapped()).map_or(each_ns, |quickest_ns| each_ns.min(quickest_ns))
    }

    /// What all reads took without hints.
    fn all_ns(&self) -> u64 {
        self.waited_ns.min(self.each_ns().saturating_add(1).saturating_mul(self.reads))
    }

    /// What reads and faults were delayed by pieces.
    fn all_delayed_ns(&self) -> u64 {
        self.delayed_ns.saturating_add(u64::try_from(self.faults_beyond_ns).unwrap_or(0).min(self.came_ns))
    }

    /// What a request costs before its first byte.
    fn request_ns(&self) -> u64 {
        let [byte, _] = self.byte.unwrap_or_default();
        self.each_ns().saturating_sub(bytes_ns(self.bytes / self.reads.max(1), byte))
    }

    /// What the next piece takes: what was read of it already cuts it into more requests.
    fn piece_ns(&self, len: u64) -> u64 {
        let cuts = self.places.starts.range(self.asked..self.asked.saturating_add(len)).count() as u64;
        let [byte, _] = self.byte.unwrap_or_default();
        bytes_ns(len, byte).saturating_add(self.request_ns().saturating_mul(1 + cuts))
    }

    /// What so many bytes take in pieces, at that cost of one.
    fn rest_ns(&self, bytes: u64, byte: u64) -> u64 {
        bytes_ns(bytes, byte).saturating_add(self.request_ns().saturating_mul(bytes.div_ceil(PIECE_BYTES.1)))
    }

    /// A piece took so long; `found_bytes` of it were in memory already.
    pub(super) fn tried(&mut self, piece: &Range<u64>, found_bytes: u64, took_ns: u64) {
        let took = |piece: UnderWay| if piece.alone { took_ns } else { piece.ns };
        if !self.came(piece, took).is_some_and(|piece| piece.alone) {
            return;
        }
        let len = piece.end.saturating_sub(piece.start);
        let came = len.saturating_sub(found_bytes);
        if came < len.div_ceil(2) || came < self.measured_bytes / 2 {
            return; // too little to tell
        }
        self.quickest_ns = Some(self.quickest_ns.map_or(took_ns, |quickest_ns| quickest_ns.min(took_ns)));
        // A read tells what a request costs, and the piece what the bytes take beyond that. It may have waited behind a read. What
        // was read of it before cut it into more requests, unless the device serves those side by side.
        let each_ns = self.each_ns();
        let cuts = self.places.starts.range(piece.clone()).count() as u64;
        let beyond_bytes = came.saturating_sub(self.bytes / self.reads.max(1)).max(came / 2);
        let byte = |took_ns: u64, requests: u64, share: u64| {
            let own_ns = took_ns.saturating_sub(each_ns).max(took_ns / 2);
            byte_of(took_ns.saturating_sub(requests * each_ns), beyond_bytes).max(byte_of(own_ns / share, came)).max(1)
        };
        let uncut_ns = took_ns.saturating_sub(cuts.saturating_mul(each_ns)).max(took_ns / 4);
        let bold_share = if came < LONG_BYTES { BYTES_SHARE.1 } else { BYTES_SHARE.0 };
        self.byte = Some([byte(took_ns, 1, BYTES_SHARE.0), byte(uncut_ns, 2, bold_share)]);
        self.measured_bytes = self.measured_bytes.max(came);
        self.is_sure |= took_ns / 4 >= each_ns || came >= PIECE_BYTES.1;
    }

    /// A piece is there, or will not come.
    pub(super) fn arrived(&mut self, piece: &Range<u64>) {
        self.came(piece, |piece| piece.ns);
    }

    /// The piece, if it was on its way, which took so long.
    fn came(&mut self, piece: &Range<u64>, took_ns: impl FnOnce(UnderWay) -> u64) -> Option<UnderWay> {
        self.together_ns = self.together_ns.max(self.under_way_ns());
        let piece = self.under_way.remove(&piece.start)?;
        let took_ns = took_ns(piece);
        self.came_ns = self.came_ns.saturating_add(took_ns);
        if self.is_mapped() {
            self.owed_ns = self.owed_ns.saturating_add(took_ns);
        }
        Some(piece)
    }

    /// Bytes that were asked for.
    pub(super) fn held_bytes(&self) -> u64 {
        self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_base::random::Random;

    const MIB: u64 = 1 << 20;
    const MS: u64 = 1_000_000;

    /// What a piece takes where a mebibyte takes so many milliseconds.
    fn ns(piece: &Range<u64>, mib_ms: u64) -> u64 {
        (piece.end - piece.start) * mib_ms * MS / MIB
    }

    /// Reads of 5 ms each of a file of 64 MiB, of which pieces come in beside them. After how many reads all of it was asked for.
    fn reads_until_asked(mib_ms: u64, place: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let (mut fill, mut asked) = (Fill::default(), 0);
        for read in 1..=1000 {
            let read_bytes = place(read).map(|at| at..at + 4096);
            for step in fill.slow_read(read_bytes.as_ref(), [5 * MS; 2], 64 * MIB, &mut |_| true) {
                let (Step::Try(piece) | Step::Bring(piece)) = &step;
                assert_eq!(piece.start, asked, "no piece is left out");
                asked = piece.end;
                fill.tried(piece, 0, ns(piece, mib_ms) + 5 * MS);
            }
            if asked == 64 * MIB {
                return Some(read);
            }
        }
        None
    }

    #[test]
    fn faults_that_take_longer_than_others_by_themselves_were_not_delayed() {
        let (mut fill, mut asked) = (Fill::default(), 0);
        let faults = (1..=300).take_while(|fault| {
            let took_ns = if fault % 2 == 0 { 4 * MS } else { 6 * MS };
            for step in fill.slow_fault(Fault { bytes: 128 << 10, took_ns }, true, 64 * MIB, &mut |_| true) {
                let (Step::Try(piece) | Step::Bring(piece)) = &step;
                asked = piece.end;
                fill.tried(piece, 0, ns(piece, 5) + 5 * MS);
            }
            asked < 64 * MIB
        });
        assert!((40..200).contains(&faults.count()), "{asked}");
    }

    #[test]
    fn the_file_is_brought_in_when_the_reads_have_cost_as_much() {
        // In 16 requests and more it takes 400 ms.
        assert!(reads_until_asked(5, |_| None).is_some_and(|reads| (40..100).contains(&reads)));
        // 3.3 s.
        assert!(reads_until_asked(50, |_| None).is_some_and(|reads| (500..700).contains(&reads)));
        assert_eq!(reads_until_asked(500, |_| None), None, "it would take longer than the reads");
    }

    #[test]
    fn it_is_not_begun_where_too_little_is_left() {
        let chunks = |bytes: u64| move |read: u64| Some(read * 205 % (64 * MIB / bytes) * bytes);
        assert!(reads_until_asked(5, chunks(MIB / 4)).is_some_and(|reads| reads < 100), "of 256 chunks");
        // Of 64 chunks none are left then.
        assert_eq!(reads_until_asked(5, chunks(MIB)), None);
        let mut places = Places::default();
        (0..1 << 20).for_each(|i| _ = places.add(i * 4096));
        assert_eq!((places.starts.len(), places.left(1 << 40)), (PLACES_MAX, (1 << 28) + 1 - PLACES_MAX as u64));
    }

    #[test]
    fn all_of_it_comes_once_and_stops_where_reads_become_slower() {
        for slower in [false, true] {
            let (mut fill, mut asked) = (Fill::default(), 0);
            for _ in 0..2000 {
                let ns_now = if slower && asked > 0 { 9 * MS } else { 5 * MS };
                for step in fill.slow_read(None, [5 * MS, ns_now], 402 * MIB, &mut |_| true) {
                    let (Step::Try(piece) | Step::Bring(piece)) = &step;
                    assert_eq!(piece.start, asked);
                    asked = piece.end;
                    match &step {
                        Step::Try(piece) => fill.tried(piece, 0, ns(piece, 5) + 5 * MS),
                        // One in four arrives at once.
                        Step::Bring(piece) => {
                            (piece.start / PIECE_BYTES.1).is_multiple_of(4).then(|| fill.arrived(piece));
                        }
                    }
                }
                let first = fill.under_way.first_key_value().map(|(start, _)| *start);
                first.into_iter().for_each(|start| fill.arrived(&(start..start + 1)));
            }
            assert_eq!(asked == 402 * MIB, !slower, "{asked}");
        }
    }

    /// Places in no order of a file. However long the program reads, it takes hardly longer than without, also where the device
    /// serves one request after the other; and much less if it reads on and the device serves pieces beside reads.
    #[test]
    fn what_is_spent_was_saved_before() {
        let of = |beside| {
            let kinds = [(15 * MIB, 1, 20), (47 * MIB, 5, 5), (30 * MIB, 14, 8), (8 * MIB, 3, 50)];
            kinds.map(|(size, read_ms, mib_ms)| (size, read_ms, mib_ms, beside))
        };
        for (size, read_ms, mib_ms, beside) in of(false).into_iter().chain(of(true)) {
            let piece_ns = |piece: &Range<u64>| (read_ms * MS).max(ns(piece, mib_ms));
            let all_reads = ns(&(0..size), mib_ms) / MS / read_ms;
            for share in [25, 50, 90, 110, 150, 250, 400, 2000] {
                let reads = all_reads * share / 100 + 10;
                let mut random = Random::new(share);
                let (mut fill, mut now_ns, mut free_ns, mut pieces_free_ns) = (Fill::default(), 0, 0, 0);
                // Pieces, when they are there, and how long they took if that is told.
                let mut coming: Vec<(Range<u64>, u64, Option<u64>)> = Vec::new();
                for _ in 0..reads {
                    coming.retain(|(piece, at_ns, took_ns)| {
                        let there = *at_ns <= now_ns;
                        match took_ns.filter(|_| there) {
                            Some(took_ns) => fill.tried(piece, 0, took_ns),
                            None if there => fill.arrived(piece),
                            None => {}
                        }
                        !there
                    });
                    let start = random.below(size / 4096) * 4096;
                    let read = start..start + 4096;
                    let is_coming = coming.iter().find(|(piece, ..)| piece.contains(&start));
                    let steps = if is_coming.is_none() && start < fill.asked {
                        now_ns += 10_000;
                        fill.fast_read(&read);
                        fill.more(size)
                    } else {
                        let end_ns = match is_coming {
                            Some((_, at_ns, _)) => *at_ns,
                            None => now_ns.max(free_ns) + read_ms * MS,
                        };
                        free_ns = free_ns.max(end_ns);
                        let took_ns = end_ns - now_ns;
                        now_ns = end_ns;
                        fill.slow_read(Some(&read), [took_ns.min(read_ms * MS), took_ns], size, &mut |_| true)
                    };
                    for step in steps {
                        let (Step::Try(piece) | Step::Bring(piece)) = &step;
                        let free = if beside { &mut pieces_free_ns } else { &mut free_ns };
                        *free = now_ns.max(*free) + piece_ns(piece);
                        let took_ns = matches!(step, Step::Try(_)).then(|| *free - now_ns);
                        coming.push((piece.clone(), *free, took_ns));
                    }
                }
                let last_ns = now_ns;
                let without_ns = reads * read_ms * MS;
                fill.places = Places::default();
                let what = format!("{reads} reads of {read_ms} ms: {without_ns} → {last_ns} ns, {fill:?}");
                assert!(last_ns <= without_ns + without_ns / 100 + 20 * MS, "{what}");
                assert!(share < 2000 || !beside || last_ns < without_ns / 3, "{what}");
            }
        }
    }

    /// A program that touches a map of 47 MiB in no order, so many times, where requests are late and all bytes share one line. How
    /// long it takes, ns, and how many of the file's bytes were asked for; `fills`: whether any may be.
    fn far_map(touches: u64, fills: bool) -> (u64, u64) {
        const SIZE: u64 = 47 * MIB;
        const GRANULE: u64 = 128 << 10;
        let (mut random, mut fill) = (Random::new(touches), Fill::default());
        let (mut now_ns, mut line_free_ns, mut touched_ns, mut answered_ns) = (0, 0, 0, 0);
        let mut touched = BTreeSet::new();
        // When so many bytes are there that are asked for now.
        let mut pass = |now_ns: u64, bytes: u64| {
            line_free_ns = (now_ns + 5 * MS).max(line_free_ns) + bytes * 5;
            line_free_ns
        };
        // By the instants at which they are there: what was asked for, and when.
        let mut coming: BTreeMap<(u64, u64), (Step, u64)> = BTreeMap::new();
        let piece_of = |step: &Step| match step {
            Step::Try(piece) | Step::Bring(piece) => piece.clone(),
        };
        for _ in 0..touches {
            let granule = random.below(SIZE / GRANULE) * GRANULE;
            let coming_ns = coming.iter().find(|(_, (step, _))| piece_of(step).contains(&granule)).map(|(at, _)| at.0);
            let is_new = touched.insert(granule);
            let is_there = !is_new || granule < fill.asked && coming_ns.is_none();
            let end_ns = match coming_ns {
                _ if is_there => now_ns + 1000,
                Some(coming_ns) => coming_ns,
                None => pass(now_ns, GRANULE),
            };
            if is_there {
                fill.fast_touches(u64::from(is_new));
            }
            // A fault is seen while it waits, and then it is known how long the one before took.
            let mut seen_ns = (!is_there && coming_ns.is_none()).then_some(now_ns + MS);
            // What comes meanwhile is told, and the next pieces are asked for.
            loop {
                let comes_ns = coming.first_key_value().map(|(at, _)| at.0).filter(|at_ns| *at_ns <= end_ns);
                let (at_ns, steps) = match (seen_ns, comes_ns) {
                    (Some(at_ns), comes_ns) if comes_ns.is_none_or(|comes_ns| at_ns <= comes_ns) => {
                        seen_ns = None;
                        let alone = coming.is_empty() && touched_ns >= answered_ns;
                        let fault = Fault { bytes: GRANULE, took_ns: at_ns - touched_ns };
                        touched_ns = at_ns;
                        (at_ns, fill.slow_fault(fault, alone, SIZE, &mut |_| fills))
                    }
                    (_, Some(at_ns)) => {
                        answered_ns = at_ns;
                        match coming.pop_first() {
                            Some((_, (Step::Try(piece), asked_ns))) => fill.tried(&piece, 0, at_ns - asked_ns),
                            Some((_, (Step::Bring(piece), _))) => fill.arrived(&piece),
                            None => {}
                        }
                        (at_ns, fill.more(SIZE))
                    }
                    (_, None) => break,
                };
                for step in steps {
                    let piece = piece_of(&step);
                    coming.insert((pass(at_ns, piece.end - piece.start), piece.start), (step, at_ns));
                }
            }
            now_ns = end_ns;
        }
        (now_ns, fill.asked)
    }

    #[test]
    fn a_map_whose_faults_are_served_beside_pieces_is_there_soon() {
        let ((without_ns, _), (with_ns, asked)) = (far_map(600, false), far_map(600, true));
        assert_eq!(asked, 47 * MIB);
        assert!(with_ns <= without_ns / 100 * 30, "{without_ns} → {with_ns}");
        for touches in (10..600).step_by(7) {
            let ((without_ns, _), (with_ns, asked)) = (far_map(touches, false), far_map(touches, true));
            let most_ns = without_ns + without_ns / 100 + 20 * MS;
            assert!(with_ns <= most_ns, "{touches} touches: {without_ns} → {with_ns}, {asked}");
        }
    }

    #[test]
    fn what_was_in_memory_tells_nothing() {
        let mut fill = Fill::default();
        let first = (0..8).flat_map(|_| fill.slow_read(None, [5 * MS; 2], 64 * MIB, &mut |_| true)).last();
        let Some(Step::Try(first)) = first else { panic!("{first:?}") };
        assert!(first.start == 0 && first.end <= FIRST_BYTES.1);
        assert_eq!(fill.slow_read(None, [5 * MS; 2], 64 * MIB, &mut |_| true), [], "until it is told");
        fill.tried(&first, first.end, 1000);
        assert_eq!(fill.more(64 * MIB), [Step::Try(first.end..2 * first.end)]);
    }

    #[test]
    fn a_file_that_does_not_fit_is_not_begun() {
        let mut fill = Fill::default();
        let steps: usize = (0..100).map(|_| fill.slow_read(None, [5 * MS; 2], 64 * MIB, &mut |_| false).len()).sum();
        assert!(steps == 0 && fill.is_over);
    }
}
