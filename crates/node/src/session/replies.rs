//! The server's side for calls that must be done once: which changes were done, and their replies.
//!
//! A change carries its client's key, epoch and sequence. Copies of it (repeated by the client or delayed in the
//! network) have the same sequence, so a copy of a completed change gets the remembered reply. A change of an epoch
//! that its client has left is refused, and one of a new epoch begins only after those of older epochs in progress have
//! ended: a change that was given up can no longer interfere with its replacement.
//!
//! Memory is bounded, and forgotten changes are refused, never done twice: as in [`Fence`](super::Fence), unknown
//! clients are in the base epoch or a newer one; and a repetition states since which epoch copies of it were sent,
//! which shows whether one of them may be among the forgotten changes.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::epoch::base_after;

/// Whether a call may begin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission<R> {
    /// It begins. [`Replies::end`] must follow if it is a change.
    New,
    /// A copy of it was done, with this reply.
    Done(R),
    /// A copy of it, or a change of an older epoch, is in progress: ask again.
    Busy,
    /// Its client has left its epoch, or may have: send it again in a newer one.
    Fenced,
    /// A copy of it may have been done, which is no longer known.
    Forgotten,
}

/// What a server stores for its next run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kept<R> {
    /// The epoch of unknown clients.
    Base(u32),
    /// A client, its epoch, and its highest forgotten sequence.
    Client {
        /// Its key.
        client: u64,
        /// Its epoch.
        epoch: u32,
        /// 0: none.
        forgotten: u64,
    },
    /// Clients were forgotten, with changes up to this epoch.
    Forgot(u32),
    /// A change was done.
    Change {
        /// Its client.
        client: u64,
        /// Its epoch.
        epoch: u32,
        /// Its sequence.
        sequence: u64,
        /// The reply; `None` revokes what was restored of this change before.
        reply: Option<R>,
    },
}

/// The identity of a change as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The client.
    pub client: u64,
    /// The epoch of this copy.
    pub epoch: u32,
    /// The oldest epoch of a copy that may have been done.
    pub since: u32,
    /// The same for all copies.
    pub sequence: u64,
}

/// Recent changes, by client.
///
/// Memory is bounded by `replies_max` remembered replies and two generations of `clients_max` clients.
pub struct Replies<R> {
    young: FxHashMap<u64, Client<R>>,
    old: FxHashMap<u64, Client<R>>,
    /// Completed changes in order of completion.
    order: VecDeque<(u64, u64)>,
    /// The epoch of unknown clients.
    base: u32,
    /// Clients with changes up to this epoch were forgotten.
    forgot: Option<u32>,
    clients_max: usize,
    replies_max: usize,
}

struct Client<R> {
    epoch: u32,
    /// Changes in progress: sequence and epoch.
    under_way: Vec<(u64, u32)>,
    done: FxHashMap<u64, R>,
    /// Highest sequence whose reply was forgotten; 0: none.
    forgotten: u64,
    /// If clients had been forgotten before this one was first seen, it may be among them: changes up to this epoch.
    unknown: Option<u32>,
}

impl<R> Default for Client<R> {
    fn default() -> Self {
        Client { epoch: 0, under_way: Vec::new(), done: FxHashMap::default(), forgotten: 0, unknown: None }
    }
}

impl<R: Clone> Replies<R> {
    /// Remembers at least the last `replies_max` changes of the last `clients_max` clients.
    pub fn new(clients_max: usize, replies_max: usize) -> Replies<R> {
        Replies {
            young: FxHashMap::default(),
            old: FxHashMap::default(),
            order: VecDeque::new(),
            base: 0,
            forgot: None,
            clients_max: clients_max.max(1),
            replies_max: replies_max.max(1),
        }
    }

    /// A call without changes arrived: records its epoch, and returns whether its client is still in it.
    pub fn note(&mut self, client: u64, epoch: u32) -> bool {
        let known = self.client(client);
        known.epoch = known.epoch.max(epoch);
        epoch == known.epoch
    }

    /// The newest known epoch of a client.
    pub fn epoch_of(&self, client: u64) -> u32 {
        self.young.get(&client).or_else(|| self.old.get(&client)).map_or(self.base, |known| known.epoch)
    }

    /// A change arrived. Sequences of a client start at 1.
    pub fn begin(&mut self, Stamp { client, epoch, since, sequence }: Stamp) -> Admission<R> {
        let known = self.client(client);
        known.epoch = known.epoch.max(epoch);
        if let Some(reply) = known.done.get(&sequence) {
            return Admission::Done(reply.clone());
        }
        if known.under_way.iter().any(|(under_way, _)| *under_way == sequence) {
            return Admission::Busy;
        }
        if epoch < known.epoch {
            return Admission::Fenced;
        }
        let may_be_forgotten = sequence <= known.forgotten || known.unknown.is_some_and(|until| since <= until);
        if since < epoch && may_be_forgotten {
            return Admission::Forgotten;
        }
        if known.under_way.iter().any(|(_, older)| *older < epoch) {
            return Admission::Busy;
        }
        known.under_way.push((sequence, epoch));
        Admission::New
    }

    /// A change is being ended that was left open, as its reply says: it is in progress again, until [`Replies::leave`] or
    /// [`Replies::end`]. False, and it is not, if its client has left its epoch.
    pub fn resume(&mut self, client: u64, epoch: u32, sequence: u64) -> bool {
        let is_current = self.note(client, epoch);
        if is_current {
            self.client(client).under_way.push((sequence, epoch));
        }
        is_current
    }

    /// A change is no longer in progress, and what is remembered of it stays.
    pub fn leave(&mut self, client: u64, sequence: u64) {
        self.client(client).under_way.retain(|(under_way, _)| *under_way != sequence);
    }

    /// Whether a change of a client is in progress that began in an epoch before this one.
    pub fn is_any_before(&self, client: u64, epoch: u32) -> bool {
        let known = self.young.get(&client).or_else(|| self.old.get(&client));
        known.is_some_and(|known| known.under_way.iter().any(|(_, older)| *older < epoch))
    }

    /// A change ended: with this reply, or, if `None`, without changing anything; what was remembered of it is forgotten then.
    pub fn end(&mut self, client: u64, sequence: u64, reply: Option<R>) {
        self.leave(client, sequence);
        let known = self.client(client);
        match reply {
            Some(reply) => {
                if known.done.insert(sequence, reply).is_none() {
                    self.order.push_back((client, sequence));
                    self.forget_oldest();
                }
            }
            None => {
                if known.done.remove(&sequence).is_some() {
                    self.order.retain(|entry| *entry != (client, sequence));
                }
            }
        }
    }

    /// Restores what an earlier run of the server stored, in order.
    pub fn restore(&mut self, kept: Kept<R>) {
        match kept {
            Kept::Base(base) => self.base = self.base.max(base),
            Kept::Forgot(epoch) => self.forgot = self.forgot.max(Some(epoch)),
            Kept::Client { client, epoch, forgotten } => {
                let known = self.client(client);
                known.epoch = known.epoch.max(epoch);
                known.forgotten = known.forgotten.max(forgotten);
            }
            Kept::Change { client, epoch, sequence, reply } => {
                self.note(client, epoch);
                self.end(client, sequence, reply);
            }
        }
    }

    /// What the next run of the server needs.
    pub fn kept(&self) -> impl Iterator<Item = Kept<R>> {
        // After `Forgot`, some changes of clients are unknown.
        let clients =
            |is_unknown: bool| {
                let all = self.old.iter().chain(&self.young);
                all.filter(move |(_, known)| known.unknown.is_some() == is_unknown).map(|(client, known)| {
                    Kept::Client { client: *client, epoch: known.epoch, forgotten: known.forgotten }
                })
            };
        let changes = self.order.iter().filter_map(|&(client, sequence)| {
            let known = self.young.get(&client).or_else(|| self.old.get(&client))?;
            let reply = Some(known.done.get(&sequence)?.clone());
            Some(Kept::Change { client, epoch: known.epoch, sequence, reply })
        });
        let forgot = self.forgot.map(Kept::Forgot);
        std::iter::once(Kept::Base(self.base)).chain(clients(false)).chain(forgot).chain(clients(true)).chain(changes)
    }

    /// The changes in progress: client, epoch, sequence.
    pub fn under_way(&self) -> impl Iterator<Item = (u64, u32, u64)> {
        let clients = self.young.iter().chain(&self.old);
        clients.flat_map(|(client, known)| known.under_way.iter().map(|(sequence, epoch)| (*client, *epoch, *sequence)))
    }

    fn client(&mut self, client: u64) -> &mut Client<R> {
        if !self.young.contains_key(&client) {
            let known = self.old.remove(&client).unwrap_or(Client {
                epoch: self.base,
                unknown: self.forgot,
                ..Client::default()
            });
            if self.young.len() >= self.clients_max {
                self.next_generation(client);
            }
            self.young.insert(client, known);
        }
        self.young.entry(client).or_default()
    }

    /// `taken` has been taken out of the old generation and goes into the young one.
    fn next_generation(&mut self, taken: u64) {
        let gone = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        let mut gone_epochs = Vec::with_capacity(gone.len());
        for (number, client) in gone {
            // A change in progress must be found when it ends.
            if !client.under_way.is_empty() {
                self.young.insert(number, client);
                continue;
            }
            gone_epochs.push(client.epoch);
            if client.forgotten > 0 || !client.done.is_empty() || client.unknown.is_some() {
                self.forgot = self.forgot.max(Some(client.epoch));
            }
        }
        self.base = base_after(self.base, gone_epochs.into_iter());
        let (young, old) = (&self.young, &self.old);
        let is_known = |client| young.contains_key(&client) || old.contains_key(&client) || client == taken;
        self.order.retain(|(client, _)| is_known(*client));
    }

    fn forget_oldest(&mut self) {
        while self.order.len() > self.replies_max {
            let Some((client, sequence)) = self.order.pop_front() else { return };
            let known = match self.young.get_mut(&client) {
                Some(known) => Some(known),
                None => self.old.get_mut(&client),
            };
            if let Some(known) = known {
                known.done.remove(&sequence);
                known.forgotten = known.forgotten.max(sequence);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(client: u64, epoch: u32, sequence: u64) -> Stamp {
        Stamp { client, epoch, since: epoch, sequence }
    }

    fn repeated(client: u64, since: u32, epoch: u32, sequence: u64) -> Stamp {
        Stamp { client, epoch, since, sequence }
    }

    #[test]
    fn a_copy_of_a_change_gets_its_reply() {
        let mut replies = Replies::new(10, 10);
        assert_eq!(replies.begin(first(1, 0, 5)), Admission::New);
        assert_eq!(replies.begin(first(1, 1, 5)), Admission::Busy, "its first copy is under way");
        replies.end(1, 5, Some("done"));
        assert_eq!(replies.begin(first(1, 1, 5)), Admission::Done("done"));
        assert_eq!(replies.begin(first(1, 0, 5)), Admission::Done("done"), "delayed, of an older epoch");
        assert_eq!(replies.begin(first(1, 0, 4)), Admission::Fenced, "given up");
        assert_eq!(replies.begin(first(2, 0, 5)), Admission::New, "another client");
    }

    #[test]
    fn what_changed_nothing_may_be_tried_again() {
        let mut replies: Replies<()> = Replies::new(10, 10);
        assert_eq!(replies.begin(first(1, 0, 5)), Admission::New);
        replies.end(1, 5, None);
        assert_eq!(replies.begin(first(1, 0, 5)), Admission::New);
        replies.restore(Kept::Change { client: 1, epoch: 0, sequence: 6, reply: Some(()) });
        assert_eq!(replies.begin(first(1, 0, 6)), Admission::Done(()));
        replies.end(1, 6, None);
        assert_eq!(replies.begin(first(1, 0, 6)), Admission::New, "begun by an earlier run, and failed in this one");
    }

    #[test]
    fn a_new_epoch_waits_for_what_is_under_way_of_older_ones() {
        let mut replies = Replies::new(10, 10);
        assert_eq!(replies.begin(first(1, 0, 5)), Admission::New);
        assert_eq!(replies.begin(first(1, 0, 6)), Admission::New, "the same epoch");
        assert_eq!(replies.begin(first(1, 1, 7)), Admission::Busy);
        assert_eq!(replies.begin(first(1, 0, 8)), Admission::Fenced, "epoch 1 was seen");
        replies.end(1, 5, Some(()));
        replies.end(1, 6, None);
        assert_eq!(replies.begin(first(1, 1, 7)), Admission::New);
        assert!(replies.note(1, 1) && replies.note(1, 2) && !replies.note(1, 1));
    }

    #[test]
    fn what_an_earlier_run_left_open_is_in_progress_while_it_is_ended() {
        let mut replies = Replies::new(10, 10);
        replies.restore(Kept::Change { client: 1, epoch: 2, sequence: 5, reply: Some("open") });
        assert!(replies.resume(1, 3, 5) && replies.is_any_before(1, 4) && !replies.is_any_before(1, 3));
        assert_eq!(replies.begin(first(1, 4, 6)), Admission::Busy, "it may still come between");
        assert!(!replies.resume(1, 3, 5), "its client has left that epoch");
        replies.leave(1, 5);
        assert!(!replies.is_any_before(1, 4));
        assert_eq!(replies.begin(repeated(1, 2, 4, 5)), Admission::Done("open"));
        assert!(replies.resume(1, 4, 5));
        replies.end(1, 5, Some("done"));
        assert!(!replies.is_any_before(1, 5) && !replies.is_any_before(2, 5));
        assert_eq!(replies.begin(repeated(1, 2, 4, 5)), Admission::Done("done"));
    }

    #[test]
    fn memory_is_bounded_and_the_forgotten_is_refused() {
        let mut replies = Replies::new(100, 50);
        for sequence in 1..=60 {
            assert_eq!(replies.begin(first(7, 0, sequence)), Admission::New);
            replies.end(7, sequence, Some(sequence));
        }
        assert_eq!(replies.begin(repeated(7, 0, 1, 10)), Admission::Forgotten);
        assert_eq!(replies.begin(first(7, 0, 9)), Admission::Fenced, "delayed");
        assert_eq!(replies.begin(first(7, 1, 8)), Admission::New, "of a slow thread");
        replies.end(7, 8, None);
        assert_eq!(replies.begin(first(7, 0, 11)), Admission::Done(11));
        assert_eq!(replies.begin(first(8, 0, 1)), Admission::New, "stays under way for long");
        for client in 1000..1500 {
            replies.begin(first(client, 0, 1));
            replies.end(client, 1, Some(1));
        }
        assert!(replies.young.len() <= 101 && replies.old.len() <= 101 && replies.order.len() <= 50);
        assert_eq!(replies.begin(first(8, 0, 1)), Admission::Busy);
    }

    #[test]
    fn a_forgotten_client_does_nothing_twice() {
        let mut replies = Replies::new(4, 1000);
        assert_eq!(replies.begin(first(7, 2, 5)), Admission::New);
        replies.end(7, 5, Some(()));
        for client in 100..120 {
            assert_eq!(replies.begin(first(client, replies.base, 1)), Admission::New, "a new client");
            replies.end(client, 1, Some(()));
        }
        assert_eq!((replies.base, replies.forgot), (2, Some(2)));
        assert_eq!(replies.begin(first(7, 1, 4)), Admission::Fenced, "given up");
        assert_eq!(replies.begin(repeated(7, 2, 3, 5)), Admission::Forgotten);
        assert_eq!(replies.begin(first(7, 3, 6)), Admission::New, "its next change");
        let mut after: Replies<()> = Replies::new(4, 1000);
        replies.kept().for_each(|kept| after.restore(kept));
        let mut after: Replies<()> = Replies::new(4, 1000);
        [Kept::Base(2), Kept::Forgot(2)].into_iter().for_each(|kept| after.restore(kept));
        assert_eq!(after.begin(repeated(7, 2, 3, 5)), Admission::Forgotten);
        assert_eq!(after.begin(first(7, 3, 6)), Admission::New);
        assert_eq!(after.begin(first(8, 0, 1)), Admission::Fenced);
    }

    /// Also of a client that is heard of again just as the oldest clients are forgotten.
    #[test]
    fn what_a_client_did_is_stored_as_long_as_it_is_known() {
        let mut before = Replies::new(4, 1000);
        before.begin(first(1, 0, 1));
        before.end(1, 1, Some('a'));
        for client in 100..107 {
            before.begin(first(client, 0, 1));
            before.end(client, 1, Some('x'));
        }
        assert!(before.old.contains_key(&1) && before.young.len() == 4);
        before.note(1, 0);
        let mut after = Replies::new(4, 1000);
        before.kept().for_each(|kept| after.restore(kept));
        assert_eq!(after.begin(repeated(1, 0, 1, 1)), Admission::Done('a'));
    }

    #[test]
    fn a_restart_takes_up_what_was_done() {
        let mut before = Replies::new(10, 2);
        for (sequence, reply) in [(7, 'x'), (8, 'y'), (9, 'a')] {
            before.begin(first(1, 3, sequence));
            before.end(1, sequence, Some(reply));
        }
        let mut after = Replies::new(10, 2);
        before.kept().for_each(|kept| after.restore(kept));
        assert_eq!(after.begin(first(1, 4, 9)), Admission::Done('a'));
        assert_eq!(after.begin(first(1, 3, 8)), Admission::Done('y'));
        assert_eq!(after.begin(first(1, 3, 6)), Admission::Fenced);
        assert_eq!(after.begin(repeated(1, 3, 4, 7)), Admission::Forgotten);
        after.restore(Kept::Change { client: 1, epoch: 4, sequence: 9, reply: None });
        assert_eq!(after.begin(first(1, 4, 9)), Admission::New);
        assert_eq!(after.under_way().collect::<Vec<_>>(), [(1, 4, 9)]);
    }
}
