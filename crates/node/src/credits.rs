//! Credits for memory: which request may hold how many bytes, which waits, and which peer holds them for too long.
//!
//! A request has its credit before it is accepted, for the bytes that it carries (a write) or asks for (a read), and gives
//! it back when its reply has left. Credits never exceed the limit, whatever clients do; only what is there already is
//! charged beyond it, and then others wait.
//!
//! A write gets its credit in slices, as its bytes come: a client that only announces them holds little. Writes that all
//! have a part and wait for more would wait forever. So a headroom of the longest write is kept for one of them at a time
//! (the banker's algorithm with one customer), which can thus always be completed.

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

/// A request that waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket(u64);

/// A request no longer waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Which.
    pub ticket: Ticket,
    /// It has the headroom until it gives everything back.
    pub completes: bool,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    bytes: u64,
    /// It has a part and may use the headroom.
    grows: bool,
}

/// The credits of one server.
#[derive(Default, Debug)]
pub struct Credits {
    limit_bytes: u64,
    /// Of the limit, kept for the one write that is to be completed.
    headroom_bytes: u64,
    used_bytes: u64,
    peak_bytes: u64,
    /// First those that grow, then the others; each in order, so that a large request is not starved by small ones.
    waiters: VecDeque<Waiter>,
    next_ticket: u64,
    /// A write has the headroom.
    completing: bool,
}

impl Credits {
    /// For `limit_bytes` at once, with a headroom for a write of at most `write_max_bytes` if the limit is large enough.
    pub fn new(limit_bytes: u64, write_max_bytes: u64) -> Credits {
        let headroom_bytes = if write_max_bytes <= limit_bytes / 2 { write_max_bytes } else { 0 };
        Credits { limit_bytes, headroom_bytes, ..Credits::default() }
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

    /// The limit of all but the write that completes.
    fn usual_bytes(&self) -> u64 {
        self.limit_bytes - self.headroom_bytes
    }

    fn fits(&self, bytes: u64) -> bool {
        self.used_bytes.saturating_add(bytes) <= self.usual_bytes()
    }

    /// Asks for credit; a request that waits is given a ticket, and later a [`Grant`] unless it gives up.
    pub fn ask(&mut self, bytes: u64) -> Result<(), Ticket> {
        if self.waiters.is_empty() && self.fits(bytes) {
            self.charge(bytes);
            return Ok(());
        }
        Err(self.wait(bytes, false, self.waiters.len()))
    }

    /// Asks for more credit for a write that has a part; `completes` as it was granted.
    pub fn grow(&mut self, bytes: u64, completes: bool) -> Result<(), Ticket> {
        // It does not wait for those that have nothing yet.
        if completes || self.fits(bytes) {
            self.charge(bytes);
            return Ok(());
        }
        let before = self.waiters.iter().take_while(|waiter| waiter.grows).count();
        Err(self.wait(bytes, true, before))
    }

    fn wait(&mut self, bytes: u64, grows: bool, at: usize) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.waiters.insert(at, Waiter { ticket, bytes, grows });
        ticket
    }

    /// Takes credit for what is there already.
    pub fn charge(&mut self, bytes: u64) {
        self.used_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
    }

    /// The next request that need not wait any longer. Call after every change until there is none: one that gives up may
    /// have held back smaller ones behind it, and one that begins to wait may have the headroom.
    pub fn next_grant(&mut self) -> Option<Grant> {
        let first = self.waiters.front()?;
        let completes = !self.fits(first.bytes);
        // Only one write that is to be completed goes beyond, and no other until it is.
        if completes && (!first.grows || self.completing) {
            return None;
        }
        let Waiter { ticket, bytes, .. } = self.waiters.pop_front()?;
        self.completing |= completes;
        self.charge(bytes);
        Some(Grant { ticket, completes })
    }

    /// A request no longer waits.
    pub fn give_up(&mut self, ticket: Ticket) {
        self.waiters.retain(|waiter| waiter.ticket != ticket);
    }

    /// A request gives back all that it has.
    pub fn give_back(&mut self, bytes: u64, completes: bool) {
        self.used_bytes -= bytes;
        self.completing &= !completes;
    }

    /// Bytes held now, most ever, limit.
    pub fn usage_bytes(&self) -> (u64, u64, u64) {
        (self.used_bytes, self.peak_bytes, self.limit_bytes)
    }

    /// What was charged exceeds the limit.
    pub fn is_over(&self) -> bool {
        self.used_bytes > self.limit_bytes
    }

    /// A request waits: no peer may hold memory without progress.
    pub fn is_short(&self) -> bool {
        !self.waiters.is_empty()
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
        assert_eq!(credits.ask(3000), Ok(()));
        let [large, small] = [4000, 600].map(|bytes| credits.ask(bytes).unwrap_err());
        assert!(granted(&mut credits).is_empty() && credits.is_short(), "600 would fit but is not first");
        credits.give_back(3000, false);
        assert_eq!(granted(&mut credits), [Grant { ticket: large, completes: false }]);
        credits.give_up(small);
        assert!(!credits.is_short());
        // One that gives up does not hold back those behind it.
        let [large, small] = [4000, 90].map(|bytes| credits.ask(bytes).unwrap_err());
        credits.give_up(large);
        assert_eq!(granted(&mut credits), [Grant { ticket: small, completes: false }]);
        assert_eq!(credits.usage_bytes(), (4090, 4090, 4096));
    }

    #[test]
    fn more_than_the_limit_is_granted_alone() {
        let mut credits = Credits::new(4096, 0);
        let all = credits.bytes_for(1 << 30);
        assert_eq!((all, credits.bytes_for(1), credits.ask(all)), (4096, 512, Ok(())));
        assert!(credits.ask(512).is_err());
        credits.give_back(all, false);
        assert_eq!(granted(&mut credits).len(), 1);
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

    /// What one client does: a read, or a write that asks for a slice at a time.
    #[derive(Clone, Copy)]
    struct Client {
        len: u64,
        writes: bool,
        held: u64,
        waits: Option<(Ticket, u64)>,
        completes: bool,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Whatever comes in whichever order: the limit holds, at most one write has the headroom, those without a part are
        /// served in order, and every request is completed although none gives up.
        #[test]
        fn every_request_is_completed_within_the_limit(
            lens in proptest::collection::vec((1u64..=4 * SLICE_BYTES, any::<bool>()), 1..40),
            limit in 8u64..20,
            order in proptest::collection::vec(any::<u16>(), 0..200),
        ) {
            let mut credits = Credits::new(limit * SLICE_BYTES, 4 * SLICE_BYTES);
            let fresh = |(len, writes)| Client { len, writes, held: 0, waits: None, completes: false };
            let mut clients: Vec<Client> = lens.into_iter().map(fresh).collect();
            let mut turns = order.into_iter().map(usize::from).chain(0..);
            let mut queue: VecDeque<Ticket> = VecDeque::new();
            for _ in 0..5_000 {
                let able: Vec<usize> = (0..clients.len()).filter(|c| clients[*c].waits.is_none()).collect();
                prop_assert!(!able.is_empty() || clients.is_empty(), "all wait for each other");
                let Some(&c) = able.get(turns.next().unwrap() % able.len().max(1)) else { break };
                let client = &mut clients[c];
                let first = client.held == 0;
                let bytes = match (first, client.writes) {
                    (true, true) => credits.bytes_for(credits.first_slice_bytes(client.len)),
                    (true, false) => credits.bytes_for(client.len),
                    (false, _) => client.len.saturating_sub(client.held).min(SLICE_BYTES),
                };
                if bytes == 0 {
                    credits.give_back(client.held, client.completes);
                    clients.swap_remove(c);
                } else {
                    let asked = if first { credits.ask(bytes) } else { credits.grow(bytes, client.completes) };
                    match asked {
                        Ok(()) => client.held += bytes,
                        Err(ticket) => client.waits = Some((ticket, bytes)),
                    }
                    if first && asked.is_err() {
                        queue.extend(asked.err());
                    }
                }
                for grant in granted(&mut credits) {
                    let waited = |c: &&mut Client| c.waits.is_some_and(|(ticket, _)| ticket == grant.ticket);
                    let client = clients.iter_mut().find(waited).unwrap();
                    if client.held == 0 {
                        prop_assert_eq!(queue.pop_front(), Some(grant.ticket));
                        prop_assert!(!grant.completes);
                    }
                    client.held += client.waits.take().unwrap().1;
                    client.completes = grant.completes;
                }
                let (used, peak, limit) = credits.usage_bytes();
                prop_assert!(used == clients.iter().map(|c| c.held).sum::<u64>() && peak <= limit);
                prop_assert!(clients.iter().filter(|c| c.completes).count() <= 1);
            }
            prop_assert!(clients.is_empty() && credits.usage_bytes().0 == 0);
        }
    }
}
