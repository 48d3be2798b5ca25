//! Sequences of requests that arrive as one and cannot be told apart by who sends them: processes of one mount, of one NFS client,
//! behind one I/O node.
//!
//! Requests of one length are looked at as numbered blocks. If each of the sequences goes on by the same step, then of every
//! request the block one step before was read and the one a step behind was not, in whatever order the sequences get ahead
//! of one another; any other step is soon refuted by one that is ahead or behind. So all steps up to [`STEPS`] blocks are tried
//! with each request at once, a bit for each, and the shortest that stands is the one. Blocks that come in order stand for a
//! step of one block, which is no interleaving.

use std::ops::Range;

use super::turns::Turn;

/// Steps that are tried, blocks.
const STEPS: u64 = 64;
/// Blocks of a window: beyond so many, sequences are not compared.
const WINDOW_BLOCKS: u64 = 4096;
const WORDS: usize = (WINDOW_BLOCKS / 64) as usize;
/// The window moves on by so many words more than it must.
const WORDS_MORE: usize = 8;
/// Windows of a file.
const WINDOWS_MAX: usize = 4;
/// Requests after which half of what spoke for a step and against it is forgotten.
const FADE_REQUESTS: u64 = 16;
/// A step is known when eight of the last requests or more speak for it and hardly one against it, after so many requests and one more
/// for each of its blocks: those with which sequences begin speak against their own step.
const REQUESTS_MIN: u64 = 16;
/// Requests of what was read already after which a new pass is thought to have begun.
const AGAIN_MAX: u32 = 4;

/// Counters from 0 to 15, one for each step, that stay at 15: bit by bit.
#[derive(Clone, Copy, Debug, Default)]
struct Counters([u64; 4]);

impl Counters {
    fn add(&mut self, mut ones: u64) {
        ones &= !self.0.iter().fold(u64::MAX, |full, bits| full & bits);
        for bits in &mut self.0 {
            (*bits, ones) = (*bits ^ ones, *bits & ones);
        }
    }

    /// Those that are 8 or more.
    fn many(&self) -> u64 {
        self.0[3]
    }

    /// Those that are 0 or 1.
    fn few(&self) -> u64 {
        !(self.0[1] | self.0[2] | self.0[3])
    }

    fn halve(&mut self) {
        self.0 = [self.0[1], self.0[2], self.0[3], 0];
    }
}

/// Blocks read of one part of the file.
#[derive(Clone, Debug)]
struct Window {
    /// Of a block, bytes, and where blocks begin within multiples of it.
    len: u64,
    rest: u64,
    /// The first block of the window, a multiple of 64, and the first that was read.
    base: u64,
    lowest: u64,
    read: [u64; WORDS],
    /// What spoke for each step, and against it.
    proofs: Counters,
    refuted: Counters,
    requests: u64,
    /// Requests in a row for what was read already.
    again: u32,
    /// The file's requests when it was begun, and until its last one.
    born: u64,
    used: u64,
}

impl Window {
    /// One that begins with this block, by the file's request of that number.
    fn new((len, rest, block): (u64, u64, u64), number: u64) -> Window {
        Window {
            len,
            rest,
            base: block.saturating_sub(64) / 64 * 64,
            lowest: block,
            read: [0; WORDS],
            proofs: Counters::default(),
            refuted: Counters::default(),
            requests: 0,
            again: 0,
            born: number,
            used: number,
        }
    }

    fn has(&self, (len, rest, block): (u64, u64, u64)) -> bool {
        self.len == len
            && self.rest == rest
            && block + STEPS >= self.base
            && block < self.base + WINDOW_BLOCKS + WINDOW_BLOCKS / 2
    }

    /// The 64 blocks from this one on, counted from the base: which were read.
    fn from(&self, at: i64) -> u64 {
        let word = |i: i64| usize::try_from(i).ok().and_then(|i| self.read.get(i)).copied().unwrap_or(0);
        let (first, shift) = (at.div_euclid(64), at.rem_euclid(64) as u32);
        match shift {
            0 => word(first),
            _ => word(first) >> shift | word(first + 1) << (64 - shift),
        }
    }

    /// A block is read. The step that its sequence has made, in blocks; 0: not known. And whether it was read before.
    fn observe(&mut self, block: u64) -> (u64, bool) {
        if block < self.base {
            // Before all that is known, though near: rare, and shown only by those that come after it.
            *self = Window::new((self.len, self.rest, block), self.used);
        }
        if block + STEPS >= self.base + WINDOW_BLOCKS {
            let words = ((block + STEPS - self.base - WINDOW_BLOCKS) / 64) as usize + 1 + WORDS_MORE;
            let words = words.min(WORDS);
            self.read.copy_within(words.., 0);
            self.read[WORDS - words..].fill(0);
            self.base += words as u64 * 64;
        }
        let at = block - self.base;
        let (word, bit) = ((at / 64) as usize, 1 << (at % 64));
        if self.read[word] & bit != 0 {
            self.again += 1;
            if self.again > AGAIN_MAX {
                *self = Window::new((self.len, self.rest, block), self.used);
                self.observe(block);
            }
            return (0, true);
        }
        self.again = 0;
        self.read[word] |= bit;
        // Bit k - 1 of each is the step of k blocks.
        let before = self.from(at as i64 - 64).reverse_bits();
        let behind = self.from(at as i64 + 1);
        let since = block.saturating_sub(self.lowest.max(self.base));
        let unknown = if since < 64 { u64::MAX << since } else { 0 };
        self.lowest = self.lowest.min(block);
        self.proofs.add(before & !behind);
        self.refuted.add(!(before | unknown) | behind);
        self.requests += 1;
        if self.requests.is_multiple_of(FADE_REQUESTS) {
            self.proofs.halve();
            self.refuted.halve();
        }
        let step = self.step();
        (if step > 0 && (before & !behind) >> (step - 1) & 1 == 1 { step } else { 0 }, false)
    }

    /// The shortest step that stands, blocks; 0: none does.
    fn step(&self) -> u64 {
        match self.proofs.many() & self.refuted.few() {
            0 => 0,
            standing => {
                let step = u64::from(standing.trailing_zeros()) + 1;
                if self.requests >= REQUESTS_MIN + step { step } else { 0 }
            }
        }
    }

    /// Where each sequence has come, if they make this step, blocks.
    fn fronts(&self, step: u64) -> Vec<Turn> {
        let mut seen = 0u64;
        let mut fronts = Vec::new();
        for word in (0..WORDS).rev() {
            let mut left = self.read[word];
            while left != 0 {
                let bit = 63 - u64::from(left.leading_zeros());
                left &= !(1 << bit);
                let block = self.base + word as u64 * 64 + bit;
                if seen >> (block % step) & 1 == 0 {
                    seen |= 1 << (block % step);
                    fronts.push(Turn::at(block * self.len + self.rest, self.len, step * self.len));
                }
            }
            if u64::from(seen.count_ones()) == step {
                break;
            }
        }
        fronts
    }
}

/// A request as one of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfAny {
    pub(super) turn: Turn,
    /// It was read before.
    pub(super) is_again: bool,
    /// Nothing is known of what was read before this one of the file's requests.
    pub(super) since: u64,
}

/// The interleaved sequences of one file.
#[derive(Debug, Default)]
pub(super) struct Interleaved {
    windows: Vec<Window>,
}

impl Interleaved {
    /// A request, by its number within the file. What its sequence does, if that is known.
    pub(super) fn observe(&mut self, extent: &Range<u64>, number: u64) -> OfAny {
        let len = extent.end - extent.start;
        let (block, rest) = (extent.start / len, extent.start % len);
        let place = (len, rest, block);
        // Earlier passes over the file have left windows, too.
        let with = (0..self.windows.len()).filter(|i| self.windows[*i].has(place));
        let known = with.max_by_key(|i| self.windows[*i].used);
        let at = match known {
            Some(at) => at,
            None if self.windows.len() < WINDOWS_MAX => {
                self.windows.push(Window::new(place, number));
                self.windows.len() - 1
            }
            None => {
                let oldest = (0..WINDOWS_MAX).min_by_key(|i| self.windows[*i].used).unwrap_or(0);
                self.windows[oldest] = Window::new(place, number);
                oldest
            }
        };
        let window = &mut self.windows[at];
        window.used = number;
        let (step, is_again) = window.observe(block);
        OfAny { turn: Turn::at(extent.start, len, step * len), is_again, since: window.born }
    }

    /// Where the sequences have come of which this is one.
    pub(super) fn fronts(&self, turn: Turn) -> Vec<Turn> {
        self.latest().map_or_else(Vec::new, |window| window.fronts(turn.step_blocks()))
    }

    /// Where those of the last request began, as far back as is known.
    pub(super) fn began(&self) -> u64 {
        self.latest().map_or(0, |window| window.lowest * window.len)
    }

    fn latest(&self) -> Option<&Window> {
        self.windows.iter().max_by_key(|window| window.used)
    }
}

#[cfg(test)]
mod tests {
    use impresario_base::random::Random;

    use super::*;

    const LEN: u64 = 64 << 10;

    /// So many readers take turns, each as often as the others, but in random order. The last step that was seen, in blocks, and how many
    /// requests showed it.
    fn step(readers: u64, turn: u64, seed: u64) -> (u64, u64) {
        let (mut of_all, mut random) = (Interleaved::default(), Random::new(seed));
        let (mut next, mut last, mut shown) = ((0..readers).collect::<Vec<u64>>(), 0, 0);
        for number in 1..=readers * 100 {
            let reader = random.below(readers) as usize;
            let start = next[reader] * LEN;
            next[reader] += turn;
            let step = of_all.observe(&(start..start + LEN), number).turn.step_blocks();
            if step > 0 {
                (last, shown) = (step, shown + 1);
            }
        }
        assert!(of_all.windows.len() <= WINDOWS_MAX);
        (last, shown)
    }

    #[test]
    fn the_step_of_readers_in_any_order_is_found() {
        for seed in 1..20 {
            for (readers, turn) in [(32, 32), (8, 8), (48, 48), (8, 16), (3, 5), (64, 64)] {
                let (found, shown) = step(readers, turn, seed);
                assert_eq!(found, turn, "{readers} of {turn}, seed {seed}");
                assert!(shown * 2 > readers * 100, "{readers} of {turn}, seed {seed}: {shown}");
            }
        }
    }

    #[test]
    fn blocks_in_order_are_no_sequences_and_random_ones_none() {
        let (mut of_all, mut random) = (Interleaved::default(), Random::new(3));
        for block in 0..1000 {
            assert!(of_all.observe(&(block * LEN..(block + 1) * LEN), block).turn.step_blocks() <= 1);
        }
        let mut of_all = Interleaved::default();
        let shown = (0..20_000).filter(|number| {
            let start = random.below(3000) * LEN;
            of_all.observe(&(start..start + LEN), *number).turn.step_blocks() > 1
        });
        assert!(shown.count() < 200);
    }

    #[test]
    fn a_block_that_was_read_is_known() {
        let mut of_all = Interleaved::default();
        for pass in 0..2 {
            for block in 0..100 {
                let seen = of_all.observe(&(block * LEN..(block + 1) * LEN), pass * 100 + block);
                // After some the window is a new one.
                assert_eq!(seen.is_again, pass > 0 && block <= u64::from(AGAIN_MAX), "{pass} {block}");
                assert_eq!(seen.since >= pass * 100, pass == 0 || block >= u64::from(AGAIN_MAX), "{pass} {block}");
            }
        }
    }
}
