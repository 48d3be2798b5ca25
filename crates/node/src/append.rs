//! Where appended bytes go: each append to a file gets a range of its own behind all bytes and all ranges before it.
//!
//! The server that owns the file's name assigns the ranges, under the file's lock; the data are written there by the client
//! itself. Ranges never overlap, whoever writes when. A client whose answer was lost asks again with the same number and
//! gets the same range, so a repetition leaves no gap.

use std::collections::{BTreeMap, VecDeque};

use impresario_base::generations::Generations;
use rustc_hash::FxHashMap;

/// Longest file, bytes.
const FILE_MAX_BYTES: u64 = i64::MAX as u64;
/// Ranges of one client in one file that are remembered for repetitions: as many as a client waits for at once, or
/// more. Mostly it is one.
const REMEMBERED_MAX: usize = 64;
/// Clients of one file that are remembered at least; there are at most twice as many.
const CLIENTS_MAX: usize = 2048;
/// Clients of all files that are remembered: with all their ranges some 50 MiB.
const ALL_CLIENTS_MAX: usize = 32 << 10;

/// The ranges of a file assigned lately. Each client has its own: what others append meanwhile, however much, makes none of
/// them forgotten.
#[derive(Debug)]
pub struct Appends {
    clients: Generations<u64, Client>,
    /// Clients were forgotten, with their ranges.
    has_forgotten: bool,
}

#[derive(Default, Debug)]
struct Client {
    lately: VecDeque<Range>,
    /// Highest sequence whose range was forgotten; 0: none.
    forgotten: u64,
    /// The range that was forgotten for the last one, and the highest sequence before that.
    displaced: Option<(Range, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    sequence: u64,
    offset: u64,
    len_bytes: u64,
}

/// What is known of copies of an append.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Earlier {
    /// None has got a range.
    None,
    /// One has got the range at this offset.
    At(u64),
    /// One may have got a range that is forgotten: another range would leave that one as a hole.
    Forgotten,
}

impl Default for Appends {
    fn default() -> Appends {
        Appends { clients: Generations::new(CLIENTS_MAX), has_forgotten: false }
    }
}

impl Appends {
    /// What copies of this append got before. `may_have_copies`: its client has sent it before.
    pub fn earlier(&mut self, client: u64, sequence: u64, len_bytes: u64, may_have_copies: bool) -> Earlier {
        let before = self.clients.len();
        let is_it = |range: &&Range| (range.sequence, range.len_bytes) == (sequence, len_bytes);
        let known = self.clients.get(&client).map(|known| (known.lately.iter().find(is_it).copied(), known.forgotten));
        // What is used becomes young again, for which others may be forgotten.
        self.has_forgotten |= self.clients.len() < before;
        let may_be_forgotten = known.map_or(self.has_forgotten, |(_, forgotten)| sequence <= forgotten);
        match known.and_then(|(range, _)| range) {
            Some(range) => Earlier::At(range.offset),
            None if may_have_copies && may_be_forgotten => Earlier::Forgotten,
            None => Earlier::None,
        }
    }

    /// Assigns the range behind `end`, which is the end of the file and of all ranges that are assigned. `None`: the file
    /// would become too long.
    pub fn assign(&mut self, client: u64, sequence: u64, end: u64, len_bytes: u64) -> Option<u64> {
        end.checked_add(len_bytes).filter(|end| *end <= FILE_MAX_BYTES)?;
        self.change(client, sequence, |known| {
            let before = known.forgotten;
            let oldest = (known.lately.len() >= REMEMBERED_MAX).then(|| known.lately.pop_front()).flatten();
            known.forgotten = before.max(oldest.map_or(0, |oldest| oldest.sequence));
            known.displaced = oldest.map(|oldest| (oldest, before));
            known.lately.push_back(Range { sequence, offset: end, len_bytes });
        });
        Some(end)
    }

    /// The range of an append, the last that was assigned to this client, was not assigned after all.
    pub fn take_back(&mut self, client: u64, sequence: u64) {
        self.change(client, sequence, |known| {
            known.lately.retain(|range| range.sequence != sequence);
            if let Some((oldest, forgotten)) = known.displaced.take() {
                known.lately.push_front(oldest);
                known.forgotten = forgotten;
            }
        });
    }

    /// Forgets all clients.
    fn forget(&mut self) {
        self.has_forgotten |= !self.clients.is_empty();
        self.clients = Generations::new(CLIENTS_MAX);
    }

    fn change(&mut self, client: u64, sequence: u64, change: impl FnOnce(&mut Client)) {
        // Of one that may be among the forgotten nothing is known before this append.
        let forgotten = if self.has_forgotten { sequence.saturating_sub(1) } else { 0 };
        let mut known = self.clients.take(&client).unwrap_or(Client { forgotten, ..Client::default() });
        change(&mut known);
        let before = self.clients.len();
        self.clients.put(client, known);
        self.has_forgotten |= self.clients.len() <= before;
    }
}

/// The same of all files, in bounded memory: of those that nobody has appended to for longest the clients are forgotten.
#[derive(Default, Debug)]
pub struct AllAppends {
    files: FxHashMap<u64, (u64, Appends)>,
    /// Files by the number of their last use.
    used: BTreeMap<u64, u64>,
    uses: u64,
    /// Clients of all files.
    clients: usize,
}

impl AllAppends {
    /// Looks at or changes the ranges of a file. Until [`forget`](AllAppends::forget) it takes some memory.
    pub fn with<T>(&mut self, file: u64, change: impl FnOnce(&mut Appends) -> T) -> T {
        self.uses += 1;
        let (used, appends) = self.files.entry(file).or_default();
        self.used.remove(used);
        *used = self.uses;
        self.used.insert(self.uses, file);
        let before = appends.clients.len();
        let result = change(appends);
        self.clients = self.clients + appends.clients.len() - before;
        while self.clients > ALL_CLIENTS_MAX
            && let Some((_, oldest)) = self.used.pop_first()
        {
            if let Some((_, appends)) = self.files.get_mut(&oldest) {
                self.clients -= appends.clients.len();
                appends.forget();
            }
        }
        result
    }

    /// A file is not appended to any more, and no append to it is repeated.
    pub fn forget(&mut self, file: u64) {
        if let Some((used, appends)) = self.files.remove(&file) {
            self.used.remove(&used);
            self.clients -= appends.clients.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_repetition_gets_the_same_range() {
        let mut appends = Appends::default();
        assert_eq!(appends.assign(1, 7, 100, 10), Some(100));
        assert_eq!(appends.earlier(1, 7, 10, true), Earlier::At(100));
        assert_eq!(appends.earlier(1, 7, 11, true), Earlier::None, "another append");
        assert_eq!(appends.earlier(2, 7, 10, true), Earlier::None, "another client");
        for sequence in 0..1000 {
            assert!(appends.assign(2, sequence, 200, 1).is_some());
        }
        assert_eq!(appends.earlier(1, 7, 10, true), Earlier::At(100), "others have appended much since");
        assert_eq!(appends.earlier(2, 999, 1, true), Earlier::At(200));
        appends.take_back(2, 999);
        assert_eq!(appends.earlier(2, 999, 1, true), Earlier::None);
    }

    #[test]
    fn a_repetition_that_may_be_forgotten_gets_no_other_range() {
        let mut appends = Appends::default();
        for sequence in 1..=100 {
            assert!(appends.assign(1, sequence, 200, 1).is_some());
        }
        let first = 101 - REMEMBERED_MAX as u64;
        assert_eq!(appends.earlier(1, first - 1, 1, true), Earlier::Forgotten);
        assert_eq!(appends.earlier(1, first - 1, 1, false), Earlier::None, "of a slow thread");
        assert_eq!(appends.earlier(1, first, 1, true), Earlier::At(200));
        assert_eq!(appends.assign(1, 101, 201, 1), Some(201));
        assert_eq!(appends.earlier(1, first, 1, true), Earlier::Forgotten);
        appends.take_back(1, 101);
        assert_eq!(appends.earlier(1, first - 1, 1, true), Earlier::Forgotten);
        assert_eq!(appends.earlier(1, first, 1, true), Earlier::At(200), "as before it was assigned");
        assert_eq!(appends.earlier(1, 101, 1, true), Earlier::None, "its first copy has not come");
        assert_eq!(appends.earlier(2, 5, 1, true), Earlier::None, "no client is forgotten yet");
        for client in 0..10 * CLIENTS_MAX as u64 {
            assert!(appends.assign(1000 + client, 5, 200, 1).is_some());
        }
        assert!(appends.clients.len() <= 2 * CLIENTS_MAX + 1);
        assert_eq!(appends.earlier(1, 100, 1, true), Earlier::Forgotten);
        assert_eq!(appends.earlier(1, 101, 1, false), Earlier::None);
        assert!(appends.assign(1, 101, 200, 1).is_some());
        assert_eq!(appends.earlier(1, 100, 1, true), Earlier::Forgotten, "as before");
        assert_eq!(appends.earlier(1, 101, 1, true), Earlier::At(200));
    }

    /// Who asks again is young again, and others are forgotten for that.
    #[test]
    fn what_is_forgotten_for_a_repetition_gets_no_other_range() {
        let mut appends = Appends::default();
        let max = CLIENTS_MAX as u64;
        for client in 0..max + max / 2 {
            assert!(appends.assign(client, 1, 200, 1).is_some());
        }
        for client in 0..max {
            let earlier = appends.earlier(client, 1, 1, true);
            assert!(earlier != Earlier::None, "client {client} gets a second range");
        }
        assert!(appends.has_forgotten);
    }

    #[test]
    fn the_ranges_of_all_files_are_bounded() {
        let mut all = AllAppends::default();
        let assign = |all: &mut AllAppends, file, client| {
            assert!(all.with(file, |appends| appends.assign(client, 1, 200, 1)).is_some());
        };
        let earlier =
            |all: &mut AllAppends, file, client| all.with(file, |appends| appends.earlier(client, 1, 1, true));
        let max = ALL_CLIENTS_MAX as u64;
        (0..3).for_each(|client| assign(&mut all, 0, client));
        for file in 1..2 * max {
            assign(&mut all, file, 7);
            if file % 1000 == 0 {
                assert_eq!(earlier(&mut all, 0, 2), Earlier::At(200), "of the file that is used");
            }
            assert!(all.clients <= ALL_CLIENTS_MAX);
        }
        assert_eq!(all.clients, ALL_CLIENTS_MAX);
        assert_eq!(earlier(&mut all, 1, 7), Earlier::Forgotten);
        assert_eq!(earlier(&mut all, 2 * max - 1, 7), Earlier::At(200));
        assert_eq!(earlier(&mut all, 2 * max, 7), Earlier::None, "another file");
        (0..=2 * max).for_each(|file| all.forget(file));
        assert_eq!((all.clients, all.files.len(), all.used.len()), (0, 0, 0));
        assert_eq!(earlier(&mut all, 1, 7), Earlier::None, "a file of the same number");
    }

    #[test]
    fn a_file_does_not_become_too_long() {
        let mut appends = Appends::default();
        assert_eq!(appends.assign(1, 1, FILE_MAX_BYTES - 5, 5), Some(FILE_MAX_BYTES - 5));
        assert_eq!(appends.assign(1, 2, FILE_MAX_BYTES - 5, 6), None);
        assert_eq!(appends.assign(1, 3, 5, u64::MAX), None);
    }

    proptest! {
        /// Calls arrive with copies and in any order; each append has one range, and no two overlap.
        #[test]
        fn ranges_do_not_overlap(calls in prop::collection::vec((0u64..3, 0u64..20, 1u64..100), 1..60)) {
            let (mut appends, mut end, mut ranges) = (Appends::default(), 0, std::collections::BTreeMap::new());
            for (client, sequence, len) in calls {
                let offset = match appends.earlier(client, sequence, len, true) {
                    Earlier::At(offset) => offset,
                    // More were assigned than are remembered; it fails.
                    Earlier::Forgotten => continue,
                    Earlier::None => {
                        let offset = appends.assign(client, sequence, end, len).unwrap();
                        end = offset + len;
                        offset
                    }
                };
                let before = ranges.insert((client, sequence, len), offset);
                prop_assert!(before.is_none_or(|before| before == offset));
            }
            let mut sorted: Vec<_> = ranges.into_iter().map(|((_, _, len), offset)| (offset, len)).collect();
            sorted.sort_unstable();
            prop_assert!(sorted.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        }
    }
}
