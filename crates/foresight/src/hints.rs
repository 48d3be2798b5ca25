//! What clients say that they will read: hints, and an account for each client that gives them.
//!
//! A hint is believed as long as its client's hints come true. Bytes hinted are outstanding until they are read by anyone
//! (hit), written or cut off (dropped), or have waited too long (wasted). What is outstanding is bounded in bytes, and in
//! number however small the hints are; what does not fit is not taken, so that a program that hints more than there is
//! room for gets the beginning of it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::account::Account;
use crate::pages;

/// Longest extent of a hint that is taken, bytes; longer ones are divided. A request waits behind such pieces at worst.
pub const HINT_PIECE_BYTES: u64 = 1 << 20;
/// Most extents outstanding.
const EXTENTS_MAX: usize = 16 << 10;
/// Most clients with an account; the one that came first is forgotten first.
const CLIENTS_MAX: usize = 1024;
/// Bytes hinted and not read for so long will not be.
const LATE_NS: u64 = 60_000_000_000;
/// All that is outstanding is looked through for late ones so often at most.
const SWEEP_NS: u64 = 1_000_000_000;

/// Sums over all clients since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HintTotals {
    /// Bytes hinted and taken.
    pub hinted_bytes: u64,
    /// Of these, bytes that a device was asked for, as far as [`Hints::fetched`] was called.
    pub fetched_bytes: u64,
    /// Of these, bytes read afterwards.
    pub hit_bytes: u64,
    /// Of these, bytes not read in time.
    pub wasted_bytes: u64,
    /// Of these, bytes that a write or a truncation covered.
    pub dropped_bytes: u64,
    /// Of these, bytes still to come.
    pub outstanding_bytes: u64,
    /// Bytes hinted and not taken: by a client whose hints do not pay, or beyond the room.
    pub refused_bytes: u64,
    /// Times that a client's account was stopped.
    pub stops: u64,
}

/// A hint that is outstanding.
#[derive(Clone, Copy, Debug)]
struct Hinted {
    end: u64,
    client: u64,
    at_ns: u64,
    fetched: bool,
}

/// The hints of all clients.
#[derive(Debug, Default)]
pub struct Hints {
    /// By file and first byte; they do not overlap.
    outstanding: BTreeMap<(u64, u64), Hinted>,
    accounts: FxHashMap<u64, Account>,
    /// Clients in the order in which they came.
    clients: VecDeque<u64>,
    totals: HintTotals,
    swept_ns: u64,
}

impl Hints {
    /// A client says that it will read `extents` of a file of `len_bytes`. At most `room_bytes` more may become outstanding.
    ///
    /// Returns how many bytes of it are outstanding now, and what of them was not before: whole pages in pieces of
    /// [`HINT_PIECE_BYTES`] at most, ascending, none of it beyond the file's end. Takes time for each extent and each piece
    /// taken, not for each byte hinted.
    pub fn hint(
        &mut self,
        client: u64,
        file: u64,
        extents: impl IntoIterator<Item = Range<u64>>,
        len_bytes: u64,
        room_bytes: u64,
        at_ns: u64,
    ) -> (u64, Vec<Range<u64>>) {
        self.expire(at_ns);
        let clip = |extent: Range<u64>| {
            let whole = pages(&extent);
            whole.start..whole.end.min(len_bytes)
        };
        let mut wanted: Vec<Range<u64>> = extents.into_iter().map(clip).filter(|e| e.start < e.end).collect();
        wanted.sort_unstable_by_key(|extent| extent.start);
        wanted.dedup_by(|next, last| {
            let touches = next.start <= last.end;
            if touches {
                last.end = last.end.max(next.end);
            }
            touches
        });
        let pays = self.account(client).pays();
        let (mut room, mut accepted, mut taken) = (if pays { room_bytes } else { 0 }, 0, Vec::new());
        for extent in wanted {
            let mut at = extent.start;
            while at < extent.end {
                let known = self.overlapping(file, at..extent.end).next().map(|(start, hinted)| start..hinted.end);
                if let Some(known) = &known
                    && known.start <= at
                {
                    accepted += known.end.min(extent.end) - at;
                    at = known.end;
                    continue;
                }
                let gap_end = known.map_or(extent.end, |known| known.start.min(extent.end));
                let end = gap_end.min(at + HINT_PIECE_BYTES);
                if end - at > room || self.outstanding.len() >= EXTENTS_MAX {
                    // What follows may be outstanding already, but a client that goes beyond the room need not know.
                    self.refuse(client, extent.end - at);
                    break;
                }
                room -= end - at;
                accepted += end - at;
                self.outstanding.insert((file, at), Hinted { end, client, at_ns, fetched: false });
                taken.push(at..end);
                at = end;
            }
        }
        let bytes = taken.iter().map(|extent| extent.end - extent.start).sum::<u64>();
        self.totals.hinted_bytes += bytes;
        self.totals.outstanding_bytes += bytes;
        (accepted, taken)
    }

    /// Bytes were read.
    pub fn read(&mut self, file: u64, extent: Range<u64>, at_ns: u64) {
        self.expire(at_ns);
        for (bytes, hinted) in self.take(file, &extent) {
            self.totals.hit_bytes += bytes;
            self.judge(hinted.client, |account| account.hit(bytes, 0));
        }
    }

    /// Bytes were written or cut off: hints of them are dropped, without a judgement.
    pub fn changed(&mut self, file: u64, extent: Range<u64>) {
        self.totals.dropped_bytes += self.take(file, &extent).iter().map(|(bytes, _)| bytes).sum::<u64>();
    }

    /// These bytes were read from the device before they were asked for; those that a hint brought about count.
    pub fn fetched(&mut self, file: u64, extent: Range<u64>) {
        let mut bytes = 0;
        let keys: Vec<u64> = self.overlapping(file, extent.clone()).map(|(start, _)| start).collect();
        for start in keys {
            if let Some(hinted) = self.outstanding.get_mut(&(file, start))
                && !std::mem::replace(&mut hinted.fetched, true)
            {
                bytes += hinted.end.min(extent.end) - start.max(extent.start);
            }
        }
        self.totals.fetched_bytes += bytes;
    }

    /// What has waited too long is wasted.
    pub fn expire(&mut self, at_ns: u64) {
        if self.outstanding.is_empty() || at_ns < self.swept_ns.saturating_add(SWEEP_NS) {
            return;
        }
        self.swept_ns = at_ns;
        let mut late = Vec::new();
        self.outstanding.retain(|(_, start), hinted| {
            let is_late = at_ns.saturating_sub(hinted.at_ns) > LATE_NS;
            if is_late {
                late.push((hinted.end - start, *hinted));
            }
            !is_late
        });
        for (bytes, hinted) in late {
            self.totals.outstanding_bytes -= bytes;
            self.totals.wasted_bytes += bytes;
            self.judge(hinted.client, |account| account.wasted(bytes, 0));
        }
    }

    /// Nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.outstanding.is_empty()
    }

    /// Sums over all clients.
    pub fn totals(&self) -> HintTotals {
        self.totals
    }

    /// What is outstanding and shares bytes with an extent, ascending: first byte and the rest.
    fn overlapping(&self, file: u64, extent: Range<u64>) -> impl Iterator<Item = (u64, &Hinted)> {
        let before = self.outstanding.range((file, 0)..(file, extent.start)).next_back();
        let before = before.filter(|(_, hinted)| hinted.end > extent.start);
        let within = self.outstanding.range((file, extent.start)..(file, extent.end.max(extent.start)));
        before.into_iter().chain(within).map(|((_, start), hinted)| (*start, hinted))
    }

    /// Takes out what shares bytes with an extent, as far as it does; how many bytes of which.
    fn take(&mut self, file: u64, extent: &Range<u64>) -> Vec<(u64, Hinted)> {
        let found: Vec<(u64, Hinted)> = self.overlapping(file, extent.clone()).map(|(s, h)| (s, *h)).collect();
        let mut taken = Vec::with_capacity(found.len());
        for (start, hinted) in found {
            self.outstanding.remove(&(file, start));
            let (from, to) = (start.max(extent.start), hinted.end.min(extent.end));
            if start < from {
                self.outstanding.insert((file, start), Hinted { end: from, ..hinted });
            }
            if to < hinted.end {
                self.outstanding.insert((file, to), hinted);
            }
            self.totals.outstanding_bytes -= to - from;
            taken.push((to - from, hinted));
        }
        taken
    }

    fn account(&mut self, client: u64) -> &mut Account {
        if !self.accounts.contains_key(&client) {
            if self.clients.len() >= CLIENTS_MAX
                && let Some(first) = self.clients.pop_front()
            {
                self.accounts.remove(&first);
            }
            self.clients.push_back(client);
        }
        self.accounts.entry(client).or_default()
    }

    /// Bytes of a client's hint are not taken. A client that is not believed is tried again after it has hinted enough.
    fn refuse(&mut self, client: u64, bytes: u64) {
        self.totals.refused_bytes = self.totals.refused_bytes.saturating_add(bytes);
        self.account(client).demanded(bytes);
    }

    fn judge(&mut self, client: u64, judgement: impl FnOnce(&mut Account)) {
        if let Some(account) = self.accounts.get_mut(&client) {
            let stops = account.stops;
            judgement(account);
            self.totals.stops += u64::from(account.stops - stops);
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "one extent is a list too")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_hint_is_taken_once_in_pieces_within_the_file_and_the_room() {
        let mut hints = Hints::default();
        let (accepted, taken) = hints.hint(1, 7, [0..3 * MIB, 5 * MIB..u64::MAX], 5 * MIB + 10, u64::MAX, 0);
        assert_eq!(taken, [0..MIB, MIB..2 * MIB, 2 * MIB..3 * MIB, 5 * MIB..5 * MIB + 10]);
        assert_eq!(accepted, 3 * MIB + 10);
        // Partly known: only the rest is new; what is known counts as accepted.
        let (accepted, taken) = hints.hint(2, 7, [2 * MIB + 1..3 * MIB + 1], 8 * MIB, u64::MAX, 0);
        assert_eq!((accepted, taken), (MIB + 4096, vec![3 * MIB..3 * MIB + 4096]));
        let (accepted, taken) = hints.hint(2, 8, [0..4 * MIB], 4 * MIB, 2 * MIB + 4096, 0);
        assert_eq!((accepted, taken.len()), (2 * MIB, 2), "the beginning");
        assert_eq!(hints.totals().refused_bytes, 2 * MIB);
        assert_eq!(hints.hint(2, 9, [0..10], 0, MIB, 0), (0, vec![]), "there is no such object");
    }

    #[test]
    fn what_is_read_is_hit_and_what_is_written_is_dropped() {
        let mut hints = Hints::default();
        hints.hint(1, 7, [0..MIB], MIB, MIB, 0);
        hints.fetched(7, 0..MIB);
        hints.fetched(7, 0..MIB);
        hints.read(7, 4096..8192, 1);
        hints.read(7, 4096..8192, 1);
        hints.read(8, 0..MIB, 1);
        hints.changed(7, 0..12288);
        let t = hints.totals();
        assert_eq!((t.hit_bytes, t.dropped_bytes, t.fetched_bytes), (4096, 8192, MIB));
        assert_eq!(t.outstanding_bytes, MIB - 12288);
        hints.changed(7, 0..u64::MAX);
        assert!(hints.is_empty() && hints.totals().wasted_bytes == 0);
    }

    #[test]
    fn a_client_whose_hints_are_wasted_is_ignored_for_a_while() {
        let mut hints = Hints::default();
        hints.hint(1, 7, [0..2 * MIB], 64 * MIB, u64::MAX, 0);
        hints.hint(2, 8, [0..2 * MIB], 64 * MIB, u64::MAX, LATE_NS);
        let later = LATE_NS + SWEEP_NS;
        assert_eq!(hints.hint(1, 7, [0..8 * MIB], 64 * MIB, u64::MAX, later), (0, vec![]));
        let t = hints.totals();
        assert_eq!((t.wasted_bytes, t.outstanding_bytes, t.stops, t.refused_bytes), (2 * MIB, 2 * MIB, 1, 8 * MIB));
        assert_eq!(hints.hint(2, 8, [2 * MIB..3 * MIB], 64 * MIB, u64::MAX, later).0, MIB, "others are heard");
        assert_eq!(hints.hint(1, 7, [0..8 * MIB], 64 * MIB, u64::MAX, later).0, 0);
        assert_eq!(hints.hint(1, 7, [0..8 * MIB], 64 * MIB, u64::MAX, later).0, 8 * MIB, "and it again");
    }

    #[test]
    fn hostile_hints_are_bounded() {
        let mut hints = Hints::default();
        for client in 0..2 * CLIENTS_MAX as u64 {
            let extents = (0..64).map(|i| (client * 64 + i) * 8192).map(|at| at..at + 1);
            hints.hint(client, 1, extents, u64::MAX, u64::MAX, 0);
        }
        assert_eq!(hints.outstanding.len(), EXTENTS_MAX);
        assert!(hints.accounts.len() <= CLIENTS_MAX && hints.clients.len() <= CLIENTS_MAX);
        hints.read(1, 0..u64::MAX, 0);
        assert_eq!(hints.totals().hit_bytes, EXTENTS_MAX as u64 * 4096);
    }

    proptest! {
        /// Every byte that was taken is in one place, whatever happens; what is outstanding never exceeds the room.
        #[test]
        fn bytes_are_neither_lost_nor_counted_twice(
            steps in proptest::collection::vec((0u8..4, 0u64..3, 0u64..40 << 12, 1u64..20 << 12), 1..80),
        ) {
            const ROOM: u64 = 60 << 12;
            let mut hints = Hints::default();
            let mut at_ns = 0;
            for (what, file, start, len) in steps {
                let extent = start..start + len;
                at_ns += LATE_NS / 20;
                match what {
                    0 | 1 => {
                        let room = ROOM.saturating_sub(hints.totals().outstanding_bytes);
                        let (accepted, taken) = hints.hint(file, file, [extent.clone()], 50 << 12, room, at_ns);
                        prop_assert!(accepted <= pages(&extent).end - pages(&extent).start);
                        prop_assert!(taken.iter().all(|t| t.end <= 50 << 12 && t.start < t.end));
                    }
                    2 => hints.read(file, extent, at_ns),
                    _ => hints.changed(file, extent),
                }
                let t = hints.totals();
                let there: u64 = hints.outstanding.iter().map(|((_, start), hinted)| hinted.end - start).sum();
                prop_assert_eq!(t.outstanding_bytes, there);
                prop_assert_eq!(t.hinted_bytes, t.hit_bytes + t.wasted_bytes + t.dropped_bytes + there);
                prop_assert!(there <= ROOM);
                let mut last = (0, 0);
                for ((file, start), hinted) in &hints.outstanding {
                    prop_assert!(*file > last.0 || *start >= last.1, "they do not overlap");
                    last = (*file, hinted.end);
                }
            }
        }
    }
}
