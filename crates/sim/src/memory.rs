//! The memory of I/O nodes and data servers for requests and replies: [`Credits`] decide who has how much of it, as on real ones.
//!
//! A call that has come waits here until it has credit for its bytes: a write slice by slice, anything else at once. The calls of
//! a connection are read in order, so those behind one that waits wait too, without memory. Credit goes back when the reply has
//! arrived or is lost or, if nobody waits for it any more, when the last request that the call became is done. A call that waits
//! for half of the request timeout is refused, and its client tries again.
//!
//! Requests come whole here, so no peer holds memory for bytes that it does not send, and none is suspect.

use std::collections::{BTreeMap, VecDeque};

use impresario_base::slab::Key;
use impresario_node::credits::{Credit, Credits, SLICE_BYTES, Standing, Ticket};

use crate::calls::BUSY;
use crate::model::{Application, Scenario};
use crate::simulation::{Event, MERGE_BYTES, Simulation};

/// The memory of one node.
pub(crate) struct Memory {
    limit_bytes: u64,
    longest_write_bytes: u64,
    credits: Credits,
    waiting: BTreeMap<Ticket, Key>,
    /// Calls by connection that are not admitted; the first waits for memory.
    unread: BTreeMap<u32, VecDeque<Key>>,
    admitted: BTreeMap<Key, Held>,
    /// Bytes under way by the node that they are for.
    under_way: BTreeMap<u32, u64>,
    granting: bool,
}

/// What a call has.
struct Held {
    credit: Credit,
    /// Of its bytes, those with credit, and with credit if what is asked for is granted.
    covered_bytes: u64,
    asked_bytes: u64,
    len_bytes: u64,
    from: u32,
    conn: u32,
    /// What it waits for, and since when.
    ticket: Option<Ticket>,
    since: u64,
    /// The requests that it became that are not done.
    requests: u32,
}

/// What a call that was looked at does.
enum Look {
    Goes,
    Waits,
    /// Nobody waits for it any more.
    Gone,
}

impl Memory {
    /// For a limit, 0: none.
    pub(crate) fn new(limit_bytes: u64, longest_write_bytes: u64) -> Option<Box<Memory>> {
        (limit_bytes > 0).then(|| {
            Box::new(Memory {
                limit_bytes,
                longest_write_bytes,
                credits: Credits::new(limit_bytes, longest_write_bytes),
                waiting: BTreeMap::new(),
                unread: BTreeMap::new(),
                admitted: BTreeMap::new(),
                under_way: BTreeMap::new(),
                granting: false,
            })
        })
    }

    /// The node has lost all of it.
    pub(crate) fn forget(&mut self) {
        if let Some(fresh) = Memory::new(self.limit_bytes, self.longest_write_bytes) {
            *self = *fresh;
        }
    }

    /// Takes what a call has out of the books.
    fn take_out(&mut self, key: Key) -> bool {
        let Some(held) = self.admitted.remove(&key) else { return false };
        if let Some(ticket) = held.ticket {
            self.credits.give_up(ticket);
            self.waiting.remove(&ticket);
        }
        if let Some(bytes) = self.under_way.get_mut(&held.from) {
            *bytes -= held.len_bytes;
            if *bytes == 0 {
                self.under_way.remove(&held.from);
            }
        }
        self.credits.give_back(held.credit);
        true
    }

    /// Law: credit never exceeds the limit, and is what the calls hold.
    fn is_wrong(&self) -> Option<String> {
        let (used, _, limit) = self.credits.usage_bytes();
        let held: u64 = self.admitted.values().map(|held| held.credit.bytes()).sum();
        let what = || format!("law 10: {used} bytes of memory are used and {held} held, of {limit} that there are");
        (used > limit || used != held).then(what)
    }

    /// Law: in the end nothing is held and nobody waits.
    pub(crate) fn is_left(&self) -> Option<String> {
        let (used, ..) = self.credits.usage_bytes();
        let (waiting, unread) = (self.waiting.len(), self.unread.values().map(VecDeque::len).sum::<usize>());
        let what =
            || format!("law 10: {used} bytes of memory are left in use, {waiting} calls wait, {unread} are unread");
        (used > 0 || waiting > 0 || unread > 0).then(what)
    }
}

/// The longest write that the nodes of a scenario get at once, bytes.
pub(crate) fn longest_write_bytes(scenario: &Scenario) -> u64 {
    let of = |a: &Application| {
        let traced = a.trace.iter().map(|access| access.len).max().unwrap_or(0);
        let round = a.collective.as_ref().map_or(0, |collective| collective.buffer_bytes);
        (a.request_bytes * u64::from(a.regions)).max(a.sieve_bytes).max(round).max(traced)
    };
    scenario.application.iter().map(of).max().unwrap_or(0).max(MERGE_BYTES)
}

impl Simulation {
    fn memory(&mut self, node: u32) -> Option<&mut Memory> {
        match node.checked_sub(self.first_server) {
            Some(server) => self.servers.get_mut(server as usize)?.memory.as_deref_mut(),
            None => self.io.get_mut(node.checked_sub(self.first_io)? as usize)?.memory.as_deref_mut(),
        }
    }

    /// A call has come to its target, which takes it when there is memory for it.
    pub(crate) fn admit(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let (node, conn) = (call.target, self.connection(call.process, call.from));
        let Some(memory) = self.memory(node) else { return self.take(node, key) };
        let unread = memory.unread.entry(conn).or_default();
        unread.push_back(key);
        if unread.len() == 1 {
            self.read_on(node, conn);
            self.grant(node);
        }
    }

    fn take(&mut self, node: u32, key: Key) {
        match node.checked_sub(self.first_server) {
            Some(server) => self.server_takes(server as u16, key),
            None => self.io_node_takes((node - self.first_io) as u16, key),
        }
    }

    /// Takes the calls of a connection in order, up to one that has to wait.
    fn read_on(&mut self, node: u32, conn: u32) {
        loop {
            let Some(memory) = self.memory(node) else { return };
            let Some(&key) = memory.unread.get(&conn).and_then(VecDeque::front) else {
                memory.unread.remove(&conn);
                return;
            };
            let look = self.look_for_memory(node, conn, key);
            if matches!(look, Look::Waits) {
                return;
            }
            let Some(memory) = self.memory(node) else { return };
            memory.unread.get_mut(&conn).and_then(VecDeque::pop_front);
            match look {
                Look::Gone => drop(memory.take_out(key)),
                _ => self.take(node, key),
            }
        }
    }

    /// Asks for what a call needs and has no credit for yet.
    fn look_for_memory(&mut self, node: u32, conn: u32, key: Key) -> Look {
        let Some(call) = self.calls.get(key) else { return Look::Gone };
        let (len_bytes, is_write, from, now) = (call.len, call.write, call.from, self.now);
        let (patience, is_checked) = (self.timeouts.memory_patience_ns(), self.checks);
        let Some(memory) = self.memory(node) else { return Look::Goes };
        let under_way = memory.under_way.entry(from).or_default();
        let held = memory.admitted.entry(key).or_insert_with(|| {
            *under_way += len_bytes;
            let (credit, ticket) = Default::default();
            Held { credit, covered_bytes: 0, asked_bytes: 0, len_bytes, from, conn, ticket, since: 0, requests: 0 }
        });
        if held.ticket.is_some() {
            return Look::Waits;
        }
        let credits = &mut memory.credits;
        while held.covered_bytes < len_bytes {
            let is_first = held.covered_bytes == 0;
            held.asked_bytes = match is_write {
                false => len_bytes,
                true if is_first => credits.first_slice_bytes(len_bytes),
                true => len_bytes.min(held.covered_bytes + SLICE_BYTES),
            };
            let asked = match is_first {
                false => credits.grow(held.asked_bytes - held.covered_bytes, &held.credit),
                true => {
                    let is_modest = held.asked_bytes == len_bytes && *under_way <= credits.modest_bytes();
                    let standing = if is_modest { Standing::Modest } else { Standing::Usual };
                    credits.ask(credits.bytes_for(held.asked_bytes), standing)
                }
            };
            match asked {
                Ok(credit) => held.credit.add(credit),
                Err(ticket) => {
                    (held.ticket, held.since) = (Some(ticket), now);
                    memory.waiting.insert(ticket, key);
                    self.at(now + patience, Event::MemoryPatience(node, key));
                    return Look::Waits;
                }
            }
            held.covered_bytes = held.asked_bytes;
        }
        let wrong = if is_checked { memory.is_wrong() } else { None };
        wrong.into_iter().for_each(|what| self.violated(what));
        Look::Goes
    }

    /// Has those go on that need not wait any longer.
    fn grant(&mut self, node: u32) {
        let Some(memory) = self.memory(node).filter(|memory| !memory.granting) else { return };
        memory.granting = true;
        while let Some(memory) = self.memory(node)
            && let Some(grant) = memory.credits.next_grant()
        {
            let key = memory.waiting.remove(&grant.ticket);
            let Some(held) = key.and_then(|key| memory.admitted.get_mut(&key)) else {
                memory.credits.give_back(grant.credit);
                continue;
            };
            held.credit.add(grant.credit);
            (held.ticket, held.covered_bytes) = (None, held.asked_bytes);
            let conn = held.conn;
            self.read_on(node, conn);
        }
        if let Some(memory) = self.memory(node) {
            memory.granting = false;
        }
    }

    /// A call became so many requests.
    pub(crate) fn memory_is_for(&mut self, node: u32, key: Key, requests: u32) {
        if let Some(held) = self.memory(node).and_then(|memory| memory.admitted.get_mut(&key)) {
            held.requests = requests;
        }
    }

    /// One of them is done, after the call was answered if it was the last.
    pub(crate) fn memory_has_less(&mut self, node: u32, key: Key) {
        let is_awaited = self.calls.get(key).is_some();
        let Some(held) = self.memory(node).and_then(|memory| memory.admitted.get_mut(&key)) else { return };
        held.requests = held.requests.saturating_sub(1);
        if held.requests == 0 && !is_awaited {
            self.free_memory(node, key);
        }
    }

    /// The reply to a call of a node has arrived or is lost.
    pub(crate) fn free_memory(&mut self, node: u32, key: Key) {
        if self.memory(node).is_some_and(|memory| memory.take_out(key)) {
            self.grant(node);
        }
    }

    /// The same where it is not known which node was called.
    pub(crate) fn free_memory_of(&mut self, key: Key) {
        if self.has_memory_limits {
            (self.first_io..self.first_server + self.servers.len() as u32).for_each(|node| self.free_memory(node, key));
        }
    }

    /// A call has waited for memory for long.
    pub(crate) fn memory_patience(&mut self, node: u32, key: Key) {
        let patience = self.timeouts.memory_patience_ns();
        let now = self.now;
        let Some(memory) = self.memory(node) else { return };
        let Some(held) = memory.admitted.get(&key).filter(|held| held.ticket.is_some()) else { return };
        if now < held.since + patience {
            return; // it had some meanwhile, and waits for more
        }
        let conn = held.conn;
        memory.take_out(key);
        if let Some(unread) = memory.unread.get_mut(&conn) {
            unread.pop_front();
        }
        self.refuse(key, BUSY);
        self.read_on(node, conn);
        self.grant(node);
    }
}
