//! Credits for memory: which request may hold how many bytes, which waits, and which peer holds them for too long.
//!
//! A request has its credit before it is accepted, for the bytes that it carries (a write) or asks for (a read), and gives
//! it back when its reply has left. Credits never exceed the limit, whatever clients do; only what is there already is
//! charged beyond it, and then others wait.
//!
//! A write gets its credit in slices, as its bytes come: a client that only announces them holds little. Writes that all
//! have a part and wait for more would wait forever. So a headroom of the longest write is kept for one of them at a time
//! (the banker's algorithm with one customer), which can thus always be completed.
//!
//! Another part of the limit is kept for modest requests: those of peers that have little under way. A crowd that holds all
//! memory it can get keeps nobody waiting who asks for a few kilobytes.
//!
//! Who has held memory without progress while others waited for it is suspect for a while. All suspects together have a part
//! of the limit only, so that those who take turns in holding it leave the rest to the others. So have those whose requests a rule
//! of the policy withholds: such a request holds its memory for as long as the rule takes, hours if need be.

use std::collections::VecDeque;
use std::time::Duration;

/// The least that a request is counted as, bytes.
pub const CREDIT_MIN_BYTES: u64 = 512;
/// A long write gets its credit in slices of this length.
pub const SLICE_BYTES: u64 = 256 << 10;

/// A reader that takes less than this has made no progress, bytes: one that takes a byte now and then would hold the memory
/// of its replies as long as it likes.
const PROGRESS_BYTES: u64 = 64 << 10;
/// A reader may be without progress for this long.
const STALL_MAX: Duration = Duration::from_secs(30);
/// The same while others wait for memory.
const STALL_MAX_WHEN_SHORT: Duration = Duration::from_secs(3);
/// While others wait for memory, a slice of a write may take this long to come.
const SLICE_MAX_WHEN_SHORT: Duration = Duration::from_secs(2);

/// The part of the limit that a peer may have under way whose requests are modest.
const MODEST_PART: u64 = 256;
/// The part of the limit that is kept for them where writes get credit in slices.
const KEPT_PART: u64 = 8;
/// The part of the rest that suspects have at most, all together.
const SUSPECT_PART: u64 = 8;
/// The part of it that those have at most whose requests a rule withholds.
const WITHHELD_PART: u64 = 2;

/// How a request's peer has used memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It has at most [`Credits::modest_bytes`] under way with this request, which has all its credit at once.
    Modest,
    /// Neither.
    Usual,
    /// It held memory without progress lately; the request has all its credit at once.
    Suspect,
    /// A rule of the policy withholds requests of it; the request has all its credit at once.
    Withheld,
}

impl Standing {
    /// Which of the groups it is in that have a part only.
    fn group(self) -> Option<usize> {
        match self {
            Standing::Modest | Standing::Usual => None,
            Standing::Suspect => Some(0),
            Standing::Withheld => Some(1),
        }
    }
}

/// The parts of the groups.
const PARTS: [u64; 2] = [SUSPECT_PART, WITHHELD_PART];

/// A request that waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

/// The credit that a request holds. It knows where its bytes come from, so all go back there ([`Credits::give_back`]); dropped, they
/// never do.
#[derive(PartialEq, Eq, Default, Debug)]
#[must_use]
pub struct Credit {
    /// Of what is there for all.
    common_bytes: u64,
    /// Of what is kept for modest requests.
    kept_bytes: u64,
    /// Of what is there for all, held by the groups that have a part only.
    group_bytes: [u64; PARTS.len()],
    /// It has the headroom until everything is given back.
    completes: bool,
}

impl Credit {
    fn common(bytes: u64) -> Credit {
        Credit { common_bytes: bytes, ..Credit::default() }
    }

    fn kept(bytes: u64) -> Credit {
        Credit { kept_bytes: bytes, ..Credit::default() }
    }

    fn of_group(group: usize, bytes: u64) -> Credit {
        let mut credit = Credit::default();
        credit.group_bytes.get_mut(group).into_iter().for_each(|own| *own = bytes);
        credit
    }

    /// How much it is, bytes.
    pub fn bytes(&self) -> u64 {
        self.common_bytes + self.kept_bytes + self.group_bytes.iter().sum::<u64>()
    }

    /// More for the same request.
    pub fn add(&mut self, more: Credit) {
        self.common_bytes += more.common_bytes;
        self.kept_bytes += more.kept_bytes;
        self.group_bytes.iter_mut().zip(more.group_bytes).for_each(|(own, more)| *own += more);
        self.completes |= more.completes;
    }

    /// Takes all bytes beyond so many out. The headroom stays with the rest.
    pub fn beyond(&mut self, bytes: u64) -> Credit {
        let mut spare = self.bytes().saturating_sub(bytes);
        let mut take = |from: &mut u64| {
            let taken = spare.min(*from);
            spare -= taken;
            *from -= taken;
            taken
        };
        let (common_bytes, kept_bytes) = (take(&mut self.common_bytes), take(&mut self.kept_bytes));
        let group_bytes = self.group_bytes.each_mut().map(take);
        Credit { common_bytes, kept_bytes, group_bytes, completes: false }
    }
}

/// A request no longer waits.
#[derive(PartialEq, Eq, Debug)]
pub struct Grant {
    /// Which.
    pub ticket: Ticket,
    /// What it waited for.
    pub credit: Credit,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    bytes: u64,
    /// It has a part and may use the headroom.
    grows: bool,
}

/// Those that have a part only.
#[derive(Default, Debug)]
struct Group {
    /// Of the bytes that are used, held by them.
    used_bytes: u64,
    /// What they have at most, but for one request.
    max_bytes: u64,
    /// In order.
    waiters: VecDeque<Waiter>,
}

impl Group {
    /// They may have so many more bytes, or have none.
    fn has_left(&self, bytes: u64) -> bool {
        self.used_bytes == 0 || self.used_bytes.saturating_add(bytes) <= self.max_bytes
    }

    /// The first that waits, unless it waits for others of the group.
    fn next(&self) -> Option<&Waiter> {
        self.waiters.front().filter(|first| self.has_left(first.bytes))
    }
}

/// The credits of one server.
#[derive(Default, Debug)]
pub struct Credits {
    limit_bytes: u64,
    /// Of the limit, kept for the one write that is to be completed.
    headroom_bytes: u64,
    /// Of the limit, kept for modest requests.
    kept_bytes: u64,
    used_bytes: u64,
    /// Of what is kept.
    kept_used_bytes: u64,
    peak_bytes: u64,
    /// First those that grow, then the others; each in order, so that a large request is not starved by small ones.
    waiters: VecDeque<Waiter>,
    /// Modest requests, in order.
    modest: VecDeque<Waiter>,
    groups: [Group; PARTS.len()],
    next_ticket: u64,
    /// A write has the headroom.
    completing: bool,
}

impl Credits {
    /// For `limit_bytes` at once, with a headroom for a write of at most `write_max_bytes` if the limit is large enough.
    pub fn new(limit_bytes: u64, write_max_bytes: u64) -> Credits {
        let headroom_bytes = if write_max_bytes <= limit_bytes / 2 { write_max_bytes } else { 0 };
        // The longest write still fits into the rest.
        let kept_bytes = if headroom_bytes > 0 { limit_bytes / KEPT_PART } else { 0 };
        let kept_bytes = kept_bytes.min(limit_bytes - 2 * headroom_bytes);
        let mut credits = Credits { limit_bytes, headroom_bytes, kept_bytes, ..Credits::default() };
        let usual_bytes = credits.usual_bytes();
        credits.groups.iter_mut().zip(PARTS).for_each(|(group, part)| group.max_bytes = usual_bytes / part);
        credits
    }

    /// A request is modest if its peer has at most so much under way with it, and it has all its credit at once, bytes.
    pub fn modest_bytes(&self) -> u64 {
        if self.kept_bytes == 0 { 0 } else { self.limit_bytes / MODEST_PART }
    }

    /// The bytes of a write for which it asks first; for the rest it asks as they come.
    pub fn first_slice_bytes(&self, len: u64) -> u64 {
        if self.headroom_bytes == 0 { len } else { len.min(SLICE_BYTES) }
    }

    /// The credit for a request of this length. More than the whole limit is granted when nothing else is held, so that a
    /// large request cannot wait forever.
    pub fn bytes_for(&self, len: u64) -> u64 {
        len.max(CREDIT_MIN_BYTES).min(self.usual_bytes())
    }

    /// The limit of all but the write that completes and modest requests.
    fn usual_bytes(&self) -> u64 {
        self.limit_bytes - self.headroom_bytes - self.kept_bytes
    }

    fn fits(&self, bytes: u64) -> bool {
        self.used_bytes.saturating_add(bytes) <= self.usual_bytes()
    }

    /// The group whose first waiter has waited longest, of those that wait for others than their own.
    fn next_group(&self) -> Option<(usize, &Waiter)> {
        let all = self.groups.iter().enumerate();
        all.filter_map(|(group, those)| Some((group, those.next()?))).min_by_key(|(_, first)| first.ticket)
    }

    /// Asks for credit; a request that waits is given a ticket, and later a [`Grant`] unless it gives up.
    pub fn ask(&mut self, bytes: u64, standing: Standing) -> Result<Credit, Ticket> {
        let is_next = self.waiters.is_empty() && self.next_group().is_none() && self.fits(bytes);
        let has_left = |group: Option<usize>| {
            let group = group.and_then(|group| self.groups.get(group));
            group.is_some_and(|group| group.waiters.is_empty() && group.has_left(bytes))
        };
        match standing {
            Standing::Usual if is_next => return Ok(self.charge(bytes)),
            Standing::Modest if is_next && self.modest.is_empty() => return Ok(self.charge(bytes)),
            Standing::Modest if self.modest.is_empty() && self.is_kept(bytes) => return Ok(self.charge_kept(bytes)),
            Standing::Suspect | Standing::Withheld if is_next && has_left(standing.group()) => {
                return Ok(self.charge_group(standing.group().unwrap_or_default(), bytes));
            }
            _ => {}
        }
        let ticket = self.ticket();
        let waiters = match standing.group().and_then(|group| self.groups.get_mut(group)) {
            Some(group) => &mut group.waiters,
            None if standing == Standing::Modest => &mut self.modest,
            None => &mut self.waiters,
        };
        waiters.push_back(Waiter { ticket, bytes, grows: false });
        Err(ticket)
    }

    /// Asks for more credit for a request that holds some.
    pub fn grow(&mut self, bytes: u64, held: &Credit) -> Result<Credit, Ticket> {
        // It does not wait for those that have nothing yet.
        if held.completes || self.fits(bytes) {
            return Ok(self.charge(bytes));
        }
        let before = self.waiters.iter().take_while(|waiter| waiter.grows).count();
        let ticket = self.ticket();
        self.waiters.insert(before, Waiter { ticket, bytes, grows: true });
        Err(ticket)
    }

    fn ticket(&mut self) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        ticket
    }

    /// Takes credit for what is there already.
    pub fn charge(&mut self, bytes: u64) -> Credit {
        self.used_bytes += bytes;
        self.note_peak();
        Credit::common(bytes)
    }

    fn is_kept(&self, bytes: u64) -> bool {
        self.kept_used_bytes.saturating_add(bytes) <= self.kept_bytes
    }

    fn charge_kept(&mut self, bytes: u64) -> Credit {
        self.kept_used_bytes += bytes;
        self.note_peak();
        Credit::kept(bytes)
    }

    fn charge_group(&mut self, group: usize, bytes: u64) -> Credit {
        self.used_bytes += bytes;
        self.groups.get_mut(group).into_iter().for_each(|group| group.used_bytes += bytes);
        self.note_peak();
        Credit::of_group(group, bytes)
    }

    fn note_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.used_bytes + self.kept_used_bytes);
    }

    /// The next request that need not wait any longer. Call after every change until there is none: one that gives up may
    /// have held back smaller ones behind it, and one that begins to wait may have the headroom.
    pub fn next_grant(&mut self) -> Option<Grant> {
        if let Some(first) = self.modest.front() {
            let is_kept = self.is_kept(first.bytes);
            // No other waits for the rest.
            if is_kept || self.waiters.is_empty() && self.fits(first.bytes) {
                let Waiter { ticket, bytes, .. } = self.modest.pop_front()?;
                let credit = if is_kept { self.charge_kept(bytes) } else { self.charge(bytes) };
                return Some(Grant { ticket, credit });
            }
        }
        // Those that have come first, but writes that have a part before all.
        let comes_before = |first: &Waiter| self.waiters.front().is_none_or(|w| !w.grows && first.ticket < w.ticket);
        if let Some((group, first)) = self.next_group().filter(|(_, first)| comes_before(first)) {
            if !self.fits(first.bytes) {
                return None;
            }
            let Waiter { ticket, bytes, .. } = self.groups.get_mut(group)?.waiters.pop_front()?;
            return Some(Grant { ticket, credit: self.charge_group(group, bytes) });
        }
        let first = self.waiters.front()?;
        let completes = !self.fits(first.bytes);
        // Only one write that is to be completed goes beyond, and no other until it is.
        if completes && (!first.grows || self.completing) {
            return None;
        }
        let Waiter { ticket, bytes, .. } = self.waiters.pop_front()?;
        self.completing |= completes;
        Some(Grant { ticket, credit: Credit { completes, ..self.charge(bytes) } })
    }

    /// A request no longer waits.
    pub fn give_up(&mut self, ticket: Ticket) {
        let groups = self.groups.iter_mut().map(|group| &mut group.waiters);
        let all = [&mut self.waiters, &mut self.modest].into_iter().chain(groups);
        all.for_each(|waiters| waiters.retain(|waiter| waiter.ticket != ticket));
    }

    /// A request gives credit back.
    pub fn give_back(&mut self, credit: Credit) {
        self.used_bytes -= credit.common_bytes;
        for (group, bytes) in self.groups.iter_mut().zip(credit.group_bytes) {
            self.used_bytes -= bytes;
            group.used_bytes -= bytes;
        }
        self.kept_used_bytes -= credit.kept_bytes;
        self.completing &= !credit.completes;
    }

    /// Bytes held now, most ever, limit.
    pub fn usage_bytes(&self) -> (u64, u64, u64) {
        (self.used_bytes + self.kept_used_bytes, self.peak_bytes, self.limit_bytes)
    }

    /// What was charged exceeds the limit.
    pub fn is_over(&self) -> bool {
        self.used_bytes + self.kept_used_bytes > self.limit_bytes
    }

    /// A request waits, and not only for what others of its group hold: no peer may hold memory without progress.
    pub fn is_short(&self) -> bool {
        !self.waiters.is_empty() || !self.modest.is_empty() || self.next_group().is_some()
    }
}

/// Whether a peer, while others wait for memory, holds it for a slice of a write that it does not send.
pub fn owes_too_long(since: Duration) -> bool {
    since >= SLICE_MAX_WHEN_SHORT
}

/// The progress of a reply; times are since any fixed instant.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    sent_bytes: u64,
    at: Duration,
}

impl Progress {
    /// It begins.
    pub fn new(sent_bytes: u64, now: Duration) -> Progress {
        Progress { sent_bytes, at: now }
    }

    /// This much has been sent. True if the reader is so slow that its connection is to be closed.
    pub fn is_too_slow(&mut self, sent_bytes: u64, now: Duration, is_short: bool) -> bool {
        if sent_bytes >= self.sent_bytes + PROGRESS_BYTES {
            *self = Progress::new(sent_bytes, now);
        }
        now - self.at >= if is_short { STALL_MAX_WHEN_SHORT } else { STALL_MAX }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn granted(credits: &mut Credits) -> Vec<Grant> {
        std::iter::from_fn(|| credits.next_grant()).collect()
    }

    #[test]
    fn the_limit_holds_and_waiters_are_served_in_order() {
        let mut credits = Credits::new(4096, 0);
        let first = credits.ask(3000, Standing::Usual).unwrap();
        assert_eq!(first, Credit::common(3000));
        let [large, small] = [4000, 600].map(|bytes| credits.ask(bytes, Standing::Usual).unwrap_err());
        assert!(granted(&mut credits).is_empty() && credits.is_short(), "600 would fit but is not first");
        credits.give_back(first);
        assert_eq!(granted(&mut credits), [Grant { ticket: large, credit: Credit::common(4000) }]);
        credits.give_up(small);
        assert!(!credits.is_short());
        // One that gives up does not hold back those behind it.
        let [large, small] = [4000, 90].map(|bytes| credits.ask(bytes, Standing::Usual).unwrap_err());
        credits.give_up(large);
        assert_eq!(granted(&mut credits), [Grant { ticket: small, credit: Credit::common(90) }]);
        assert_eq!(credits.usage_bytes(), (4090, 4090, 4096));
    }

    #[test]
    fn more_than_the_limit_is_granted_alone() {
        let mut credits = Credits::new(4096, 0);
        let all = credits.bytes_for(1 << 30);
        assert_eq!((all, credits.bytes_for(1)), (4096, 512));
        let all = credits.ask(all, Standing::Usual).unwrap();
        assert!(credits.ask(512, Standing::Usual).is_err());
        credits.give_back(all);
        assert_eq!(granted(&mut credits).len(), 1);
    }

    #[test]
    fn who_asks_for_little_does_not_wait_for_those_that_hold_all() {
        let mut credits = Credits::new(32 << 20, 4 << 20);
        let (kept, modest) = (4 << 20, credits.modest_bytes());
        assert_eq!(modest, 128 << 10);
        // With room for all, modest requests take nothing of what is kept.
        let little = credits.ask(modest, Standing::Modest).unwrap();
        assert_eq!(little, Credit::common(modest));
        credits.give_back(little);
        // A crowd takes what it can get, and more of it waits.
        let all = credits.ask(credits.bytes_for(u64::MAX), Standing::Usual).unwrap();
        assert_eq!(all, Credit::common(24 << 20));
        let waits = credits.ask(4096, Standing::Usual).unwrap_err();
        let mut little: Vec<Credit> =
            (0..kept / modest).map(|_| credits.ask(modest, Standing::Modest).unwrap()).collect();
        assert!(little.iter().all(|credit| *credit == Credit::kept(modest)));
        let [first, second] = [1, 2].map(|_| credits.ask(modest, Standing::Modest).unwrap_err());
        assert!(granted(&mut credits).is_empty());
        credits.give_back(little.pop().unwrap());
        assert_eq!(granted(&mut credits), [Grant { ticket: first, credit: Credit::kept(modest) }]);
        // They do not keep the others waiting either: those have the rest, in order.
        credits.give_back(all);
        let common = |ticket, bytes| Grant { ticket, credit: Credit::common(bytes) };
        assert_eq!(granted(&mut credits), [common(waits, 4096), common(second, modest)]);
        assert_eq!(credits.usage_bytes().0, kept + 4096 + modest);
        assert_eq!(Credits::new(32 << 20, 0).modest_bytes(), 0);
    }

    /// Of a request that has some of what is kept, more comes from what is there for all, and each goes back to its own.
    #[test]
    fn what_grows_goes_back_to_where_it_came_from() {
        let mut credits = Credits::new(32 << 20, 4 << 20);
        let all = credits.ask(24 << 20, Standing::Usual).unwrap();
        let mut held = credits.ask(1000, Standing::Modest).unwrap();
        assert_eq!(held, Credit::kept(1000));
        assert!(credits.grow(500, &held).is_err());
        held.add(granted(&mut credits).pop().unwrap().credit);
        assert_eq!(held, Credit { completes: true, kept_bytes: 1000, ..Credit::common(500) });
        assert!(credits.grow(200, &Credit::default()).is_err(), "one at a time");
        let more = credits.grow(4000, &held).unwrap();
        held.add(more);
        let spare = held.beyond(200);
        assert_eq!((spare.bytes(), held.bytes(), held.completes), (5300, 200, true));
        credits.give_back(spare);
        assert_eq!(held, Credit { completes: true, ..Credit::kept(200) });
        credits.give_back(held);
        credits.give_back(all);
        granted(&mut credits).into_iter().for_each(|grant| credits.give_back(grant.credit));
        assert_eq!((credits.usage_bytes().0, credits.used_bytes, credits.kept_used_bytes), (0, 0, 0));
        assert!(!credits.completing);
    }

    #[test]
    fn suspects_have_a_part_together_and_keep_nobody_waiting() {
        let mut credits = Credits::new(32 << 20, 4 << 20);
        let (mib, all) = (1 << 20, 24 << 20);
        let long = credits.ask(4 * mib, Standing::Suspect).expect("one of any length");
        assert_eq!(long, Credit::of_group(0, 4 * mib));
        let [second, third] = [mib, mib].map(|bytes| credits.ask(bytes, Standing::Suspect).unwrap_err());
        assert!(granted(&mut credits).is_empty() && !credits.is_short(), "they wait for each other only");
        // The others have the rest at once, and wait for nothing but memory.
        let rest = credits.ask(all - 4 * mib, Standing::Usual).unwrap();
        let usual = credits.ask(mib, Standing::Usual).unwrap_err();
        assert!(credits.is_short());
        credits.give_back(rest);
        assert_eq!(granted(&mut credits), [Grant { ticket: usual, credit: Credit::common(mib) }]);
        credits.give_back(Credit::common(mib));
        credits.give_back(long);
        let of = |ticket| Grant { ticket, credit: Credit::of_group(0, mib) };
        assert_eq!(granted(&mut credits), [of(second), of(third)]);
        credits.give_back(Credit::of_group(0, mib));
        // With memory short they are served in the order in which all have come.
        let mut most = credits.ask(all - mib, Standing::Usual).unwrap();
        let suspect = credits.ask(mib, Standing::Suspect).unwrap_err();
        assert!(credits.is_short(), "it waits for what others hold");
        let usual = credits.ask(2 * mib, Standing::Usual).unwrap_err();
        credits.give_back(most.beyond(all - 2 * mib));
        assert_eq!(granted(&mut credits), [of(suspect)]);
        credits.give_up(usual);
        let mut both = Credit::of_group(0, mib);
        both.add(Credit::of_group(0, mib));
        let spare = both.beyond(mib / 2);
        assert_eq!((spare.bytes(), both.bytes()), (mib + mib / 2, mib / 2));
        [spare, both, most].into_iter().for_each(|credit| credits.give_back(credit));
        assert_eq!((credits.usage_bytes().0, credits.groups[0].used_bytes), (0, 0));
    }

    #[test]
    fn what_is_withheld_leaves_half_to_the_others() {
        let mut credits = Credits::new(32 << 20, 4 << 20);
        let mib = 1 << 20;
        let held = credits.ask(12 * mib, Standing::Withheld).unwrap();
        let more = credits.ask(mib, Standing::Withheld).unwrap_err();
        // Small ones as well: what is kept for modest requests is not theirs.
        let small = credits.ask(CREDIT_MIN_BYTES, Standing::Withheld).unwrap_err();
        assert!(granted(&mut credits).is_empty() && !credits.is_short());
        let suspect = credits.ask(3 * mib, Standing::Suspect).expect("another group");
        let rest = credits.ask(9 * mib, Standing::Usual).unwrap();
        credits.give_back(suspect);
        let mut held = held;
        credits.give_back(held.beyond(11 * mib));
        let ended: Vec<Ticket> = granted(&mut credits).into_iter().map(|grant| grant.ticket).collect();
        assert_eq!(ended, [more]);
        credits.give_up(small);
        [held, rest, Credit::of_group(1, mib)].into_iter().for_each(|credit| credits.give_back(credit));
        assert_eq!((credits.usage_bytes().0, credits.groups[1].used_bytes), (0, 0));
    }

    #[test]
    fn slow_peers_hold_memory_only_while_there_is_enough() {
        let (second, part) = (Duration::from_secs, PROGRESS_BYTES);
        let mut reader = Progress::new(5, second(100));
        assert!(!reader.is_too_slow(5, second(129), false) && reader.is_too_slow(5, second(103), true));
        assert!(reader.is_too_slow(part, second(130), false), "less than a part is no progress");
        assert!(!reader.is_too_slow(part + 5, second(130), true) && reader.is_too_slow(part + 6, second(133), true));
        assert!(owes_too_long(second(2)) && !owes_too_long(second(1)));
    }

    /// What one client does: a read, or a write that asks for a slice at a time, unless it is of a group that has a part only.
    struct Client {
        len: u64,
        writes: bool,
        group: Option<Standing>,
        held: Credit,
        waits: Option<Ticket>,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Whatever comes in whichever order: the limit holds, at most one write has the headroom, those without a part are
        /// served in order, and every request is completed although none gives up.
        #[test]
        fn every_request_is_completed_within_the_limit(
            lens in proptest::collection::vec((prop_oneof![1u64..=8192, 1..=4 * SLICE_BYTES], any::<bool>(), 0..4u8), 1..40),
            limit in 8u64..20,
            order in proptest::collection::vec(any::<u16>(), 0..200),
        ) {
            let mut credits = Credits::new(limit * SLICE_BYTES, 4 * SLICE_BYTES);
            let fresh = |(len, writes, group)| {
                let group = [None, None, Some(Standing::Suspect), Some(Standing::Withheld)][usize::from(group)];
                Client { len, writes, group, held: Credit::default(), waits: None }
            };
            let mut clients: Vec<Client> = lens.into_iter().map(fresh).collect();
            let mut turns = order.into_iter().map(usize::from).chain(0..);
            let mut queues: [VecDeque<Ticket>; 4] = Default::default();
            for _ in 0..5_000 {
                let able: Vec<usize> = (0..clients.len()).filter(|c| clients[*c].waits.is_none()).collect();
                prop_assert!(!able.is_empty() || clients.is_empty(), "all wait for each other");
                let Some(&c) = able.get(turns.next().unwrap() % able.len().max(1)) else { break };
                let client = &mut clients[c];
                let first = client.held.bytes() == 0;
                let bytes = match (first, client.writes) {
                    (true, true) if client.group.is_none() => credits.bytes_for(credits.first_slice_bytes(client.len)),
                    (true, _) => credits.bytes_for(client.len),
                    (false, _) => client.len.saturating_sub(client.held.bytes()).min(SLICE_BYTES),
                };
                if bytes == 0 {
                    credits.give_back(clients.swap_remove(c).held);
                } else {
                    let standing = match client.group {
                        Some(standing) => standing,
                        None if !client.writes && client.len <= credits.modest_bytes() => Standing::Modest,
                        None => Standing::Usual,
                    };
                    let asked = match first {
                        true => credits.ask(bytes, standing),
                        false => credits.grow(bytes, &client.held),
                    };
                    match asked {
                        Ok(credit) => client.held.add(credit),
                        Err(ticket) => {
                            client.waits = Some(ticket);
                            if first {
                                queues[standing as usize].push_back(ticket);
                            }
                        }
                    }
                }
                for grant in granted(&mut credits) {
                    let waited = |c: &&mut Client| c.waits == Some(grant.ticket);
                    let client = clients.iter_mut().find(waited).unwrap();
                    if client.held.bytes() == 0 {
                        let queue = queues.iter_mut().find(|queue| queue.contains(&grant.ticket)).unwrap();
                        prop_assert_eq!(queue.pop_front(), Some(grant.ticket));
                        prop_assert!(!grant.credit.completes);
                        let group = grant.credit.group_bytes.iter().position(|bytes| *bytes > 0);
                        prop_assert_eq!(group, client.group.and_then(Standing::group));
                    }
                    client.waits = None;
                    client.held.add(grant.credit);
                }
                let (used, peak, limit) = credits.usage_bytes();
                prop_assert!(used == clients.iter().map(|c| c.held.bytes()).sum::<u64>() && peak <= limit);
                prop_assert!(clients.iter().filter(|c| c.held.completes).count() <= 1);
                for (group, part) in PARTS.into_iter().enumerate() {
                    let held = clients.iter().map(|c| c.held.group_bytes[group]).filter(|held| *held > 0);
                    let held: Vec<u64> = held.collect();
                    prop_assert!(held.len() <= 1 || held.iter().sum::<u64>() <= credits.usual_bytes() / part);
                }
            }
            prop_assert!(clients.is_empty() && credits.usage_bytes().0 == 0);
        }
    }
}
