//! The server's side for calls that must not be done twice: which changes were done, and what was answered.
//!
//! A change carries its client's key, epoch and sequence. Copies of it (repeated by the client, or delayed on the way)
//! carry the same sequence, so a copy of a change that was done gets the remembered reply. A change of an epoch that its
//! client has left is refused, and one of a new epoch begins only when what is under way of older ones has ended:
//! what was given up can no longer interfere with what is done instead.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Whether a call may begin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission<R> {
    /// It begins. [`Replies::end`] must follow if it is a change.
    New,
    /// A copy of it was done, with this reply.
    Done(R),
    /// A copy of it, or a change of an older epoch, is under way: to be asked again.
    Busy,
    /// Its client has left its epoch; or it is so old that nothing is known of it any more.
    Fenced,
}

/// Changes done lately, by client.
///
/// Memory is bounded by `replies_max` remembered replies and two generations of `clients_max` clients. A client that is
/// not heard of for a whole generation is forgotten, and with it the protection against its delayed copies.
pub struct Replies<R> {
    young: FxHashMap<u64, Client<R>>,
    old: FxHashMap<u64, Client<R>>,
    /// Done changes in the order in which they ended.
    order: VecDeque<(u64, u64)>,
    clients_max: usize,
    replies_max: usize,
}

struct Client<R> {
    epoch: u32,
    /// Changes under way: sequence and epoch.
    under_way: Vec<(u64, u32)>,
    done: FxHashMap<u64, R>,
    /// Highest sequence whose reply was forgotten; 0: none.
    forgotten: u64,
}

impl<R> Default for Client<R> {
    fn default() -> Self {
        Client { epoch: 0, under_way: Vec::new(), done: FxHashMap::default(), forgotten: 0 }
    }
}

impl<R: Clone> Replies<R> {
    /// Remembers at least the last `replies_max` changes of the last `clients_max` clients.
    pub fn new(clients_max: usize, replies_max: usize) -> Replies<R> {
        Replies {
            young: FxHashMap::default(),
            old: FxHashMap::default(),
            order: VecDeque::new(),
            clients_max: clients_max.max(1),
            replies_max: replies_max.max(1),
        }
    }

    /// A call has come that changes nothing: notes its epoch, and says whether its client is still in it.
    pub fn note(&mut self, client: u64, epoch: u32) -> bool {
        let known = self.client(client);
        known.epoch = known.epoch.max(epoch);
        epoch == known.epoch
    }

    /// A change has come. Sequences of a client start at 1.
    pub fn begin(&mut self, client: u64, epoch: u32, sequence: u64) -> Admission<R> {
        let known = self.client(client);
        known.epoch = known.epoch.max(epoch);
        if let Some(reply) = known.done.get(&sequence) {
            return Admission::Done(reply.clone());
        }
        if known.under_way.iter().any(|(under_way, _)| *under_way == sequence) {
            return Admission::Busy;
        }
        if epoch < known.epoch || sequence <= known.forgotten {
            return Admission::Fenced;
        }
        if known.under_way.iter().any(|(_, older)| *older < epoch) {
            return Admission::Busy;
        }
        known.under_way.push((sequence, epoch));
        Admission::New
    }

    /// A change has ended: with this reply, or, `None`, without having changed anything.
    pub fn end(&mut self, client: u64, sequence: u64, reply: Option<R>) {
        let known = self.client(client);
        known.under_way.retain(|(under_way, _)| *under_way != sequence);
        if let Some(reply) = reply
            && known.done.insert(sequence, reply).is_none()
        {
            self.order.push_back((client, sequence));
            self.forget_oldest();
        }
    }

    /// Takes up what an earlier run of the server did; `None`: what was restored of this change before does not count.
    pub fn restore(&mut self, client: u64, epoch: u32, sequence: u64, reply: Option<R>) {
        self.note(client, epoch);
        if reply.is_none() {
            self.client(client).done.remove(&sequence);
            self.order.retain(|entry| *entry != (client, sequence));
        }
        self.end(client, sequence, reply);
    }

    /// The changes under way: client, epoch, sequence.
    pub fn under_way(&self) -> impl Iterator<Item = (u64, u32, u64)> {
        let clients = self.young.iter().chain(&self.old);
        clients.flat_map(|(client, known)| known.under_way.iter().map(|(sequence, epoch)| (*client, *epoch, *sequence)))
    }

    /// What is remembered, oldest first: client, its epoch, sequence, reply.
    pub fn remembered(&self) -> impl Iterator<Item = (u64, u32, u64, &R)> {
        self.order.iter().filter_map(|&(client, sequence)| {
            let known = self.young.get(&client).or_else(|| self.old.get(&client))?;
            Some((client, known.epoch, sequence, known.done.get(&sequence)?))
        })
    }

    fn client(&mut self, client: u64) -> &mut Client<R> {
        if !self.young.contains_key(&client) {
            let known = self.old.remove(&client).unwrap_or_default();
            if self.young.len() >= self.clients_max {
                self.next_generation();
            }
            self.young.insert(client, known);
        }
        self.young.entry(client).or_default()
    }

    fn next_generation(&mut self) {
        let gone = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        // A change under way must be found when it ends.
        self.young.extend(gone.into_iter().filter(|(_, client)| !client.under_way.is_empty()));
        let (young, old) = (&self.young, &self.old);
        self.order.retain(|(client, _)| young.contains_key(client) || old.contains_key(client));
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

    #[test]
    fn a_copy_of_a_change_gets_its_reply() {
        let mut replies = Replies::new(10, 10);
        assert_eq!(replies.begin(1, 0, 5), Admission::New);
        assert_eq!(replies.begin(1, 1, 5), Admission::Busy, "its first copy is under way");
        replies.end(1, 5, Some("done"));
        assert_eq!(replies.begin(1, 1, 5), Admission::Done("done"));
        assert_eq!(replies.begin(1, 0, 5), Admission::Done("done"), "delayed, of an older epoch");
        assert_eq!(replies.begin(1, 0, 4), Admission::Fenced, "given up");
        assert_eq!(replies.begin(2, 0, 5), Admission::New, "another client");
    }

    #[test]
    fn what_changed_nothing_may_be_tried_again() {
        let mut replies: Replies<()> = Replies::new(10, 10);
        assert_eq!(replies.begin(1, 0, 5), Admission::New);
        replies.end(1, 5, None);
        assert_eq!(replies.begin(1, 0, 5), Admission::New);
    }

    #[test]
    fn a_new_epoch_waits_for_what_is_under_way_of_older_ones() {
        let mut replies = Replies::new(10, 10);
        assert_eq!(replies.begin(1, 0, 5), Admission::New);
        assert_eq!(replies.begin(1, 0, 6), Admission::New, "the same epoch");
        assert_eq!(replies.begin(1, 1, 7), Admission::Busy);
        assert_eq!(replies.begin(1, 0, 8), Admission::Fenced, "epoch 1 was seen");
        replies.end(1, 5, Some(()));
        replies.end(1, 6, None);
        assert_eq!(replies.begin(1, 1, 7), Admission::New);
        assert!(replies.note(1, 1) && replies.note(1, 2) && !replies.note(1, 1));
    }

    #[test]
    fn memory_is_bounded_and_the_forgotten_is_refused() {
        let mut replies = Replies::new(100, 50);
        for sequence in 1..=60 {
            assert_eq!(replies.begin(7, 0, sequence), Admission::New);
            replies.end(7, sequence, Some(sequence));
        }
        assert_eq!(replies.begin(7, 0, 10), Admission::Fenced);
        assert_eq!(replies.begin(7, 0, 11), Admission::Done(11));
        assert_eq!(replies.begin(8, 0, 1), Admission::New, "stays under way for long");
        for client in 1000..1500 {
            replies.begin(client, 0, 1);
            replies.end(client, 1, Some(1));
        }
        assert!(replies.young.len() <= 101 && replies.old.len() <= 101 && replies.order.len() <= 50);
        assert_eq!(replies.begin(8, 0, 1), Admission::Busy);
    }

    #[test]
    fn a_restart_takes_up_what_was_done() {
        let mut before = Replies::new(10, 10);
        before.begin(1, 3, 9);
        before.end(1, 9, Some('a'));
        let mut after = Replies::new(10, 10);
        for (client, epoch, sequence, reply) in before.remembered() {
            after.restore(client, epoch, sequence, Some(*reply));
        }
        assert_eq!(after.begin(1, 4, 9), Admission::Done('a'));
        assert_eq!(after.begin(1, 3, 8), Admission::Fenced);
        after.restore(1, 4, 9, None);
        assert_eq!(after.begin(1, 4, 9), Admission::New);
        assert_eq!(after.under_way().collect::<Vec<_>>(), [(1, 4, 9)]);
        assert_eq!(after.remembered().count(), 0);
    }
}
