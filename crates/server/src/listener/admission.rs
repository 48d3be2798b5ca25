//! Which connections a server keeps: a place for a new one, and those that are closed for others.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use impresario_node::credits::owes_too_long;
use rustc_hash::FxHashMap;

use super::lobby::Lobby;
use super::{Settings, Shared};
use crate::addresses::{AddressId, SUSPECT_FOR, Tenancy};
use crate::connection::Connection;

/// A connection that has been idle for less is not closed for another.
const IDLE_MIN: Duration = Duration::from_millis(500);
/// The same for one of the machine that the other is from, or of one that has no more.
const IDLE_MIN_OF_EQUALS: Duration = Duration::from_secs(60);
/// This many connections may always be silent before their hello; beyond that, half of all.
const UNGREETED_MIN: usize = 16;
/// Threads of connections that were closed and have not ended yet, beyond which no connection is taken.
const CLOSING_MAX: usize = 64;
/// A machine with so few connections has as many beyond these: the threads that end are hardly its own.
const FEW: u32 = 32;

/// One that makes room.
enum Victim {
    /// In the lobby.
    Silent(u64),
    Connected(Arc<Connection>),
}

/// Why a connection is refused, which it is told when it speaks.
pub(super) struct Refusal {
    pub(super) why: String,
    /// Counts it among those that are told.
    pub(super) place: Arc<()>,
}

impl Shared {
    /// Finds a place for a connection from `peer`; where there is none, closes one of the machine that has most: one that is
    /// silent before its hello, else the idlest. None is closed in favour of a machine that would then have the most.
    /// The error is what to tell the peer.
    pub(super) fn make_room_for(&self, peer: &str, lobby: &mut Lobby) -> Result<Tenancy, String> {
        let Settings { name, max_connections, max_connections_per_address, .. } = &self.settings;
        let max = *max_connections as usize;
        let full = || format!("{name} has its {max} connections (max_connections); try again later");
        let ours = host_of(peer);
        let tenancy = self.addresses.enter(ours, *max_connections_per_address).map_err(|has| {
            format!(
                "{name} has {has} connections from {ours}, of {max_connections_per_address} that an address may have \
                 (max_connections_per_address); close some, or raise it"
            )
        })?;
        let closing_max = if tenancy.connections() <= FEW { 2 * CLOSING_MAX } else { CLOSING_MAX };
        if *self.threads.lock() as usize >= max + closing_max {
            return Err(full());
        }
        let mut connections = self.connections.lock();
        let ungreeted = Arc::strong_count(&self.ungreeted) - 1;
        let is_full = lobby.len() + connections.len() >= max;
        if !is_full && lobby.len() + ungreeted < (max / 2).max(UNGREETED_MIN) {
            return Ok(tenancy);
        }
        let victim = match is_full {
            true => idle_victim(lobby, &connections, tenancy.address()),
            // Half of the connections may be silent before their hello; the longest of them goes.
            false => silent_victim(lobby, &connections, ungreeted, tenancy.address()),
        };
        let (peer, hello, connection) = match victim {
            Some(Victim::Silent(token)) => {
                (lobby.remove(token).map_or_else(String::new, |waiting| waiting.peer), String::new(), None)
            }
            Some(Victim::Connected(victim)) => {
                connections.remove(&victim.id().0);
                (victim.peer().into(), victim.name().into(), Some(victim))
            }
            None if is_full => return Err(full()),
            None => {
                let silent = lobby.len() + ungreeted;
                return Err(format!("{name} has {silent} connections that have not said hello; try again later"));
            }
        };
        drop(connections);
        self.complaints.about("peer", host_of(&peer), |_| {
            tracing::warn!(peer, name = hello, max, "closed an idle connection for a new one");
        });
        self.evicted.fetch_add(1, Ordering::Relaxed);
        if let Some(connection) = connection {
            connection.close();
        }
        Ok(tenancy)
    }

    /// Others wait for memory: closes the connections that announced bytes for a write and send them too slowly.
    pub(super) fn close_those_that_owe(&self) {
        let owing = |connection: &&Arc<Connection>| owes_too_long(connection.owes_for());
        let slow: Vec<_> = self.connections.lock().values().filter(owing).cloned().collect();
        for connection in slow {
            connection.suspect();
            self.complaints.about("peer", connection.host(), |_| {
                tracing::warn!(
                    peer = connection.peer(),
                    name = connection.name(),
                    "closed a connection: it holds memory for bytes that it does not send, while others wait for memory; for {} \
                     minutes its machine and others like it have a small part of payload_bytes together",
                    SUSPECT_FOR.as_secs() / 60
                );
            });
            connection.close();
        }
    }
}

/// An address that has so many has more than this one, also with one more.
fn crowded_from(counts: &FxHashMap<AddressId, usize>, ours: AddressId) -> usize {
    counts.get(&ours).copied().unwrap_or(0) + 2
}

/// The connection that goes where there are as many as there may be.
fn idle_victim(lobby: &Lobby, connections: &FxHashMap<u32, Arc<Connection>>, ours: AddressId) -> Option<Victim> {
    let mut counts: FxHashMap<AddressId, usize> = lobby.counts().collect();
    connections.values().filter_map(|c| c.address()).for_each(|address| *counts.entry(address).or_default() += 1);
    let crowded_from = crowded_from(&counts, ours);
    let count_of = |address| counts.get(&address).copied().filter(|count| *count >= crowded_from);
    // As below, those that are silent go at once: a storm keeps no other machine out.
    let silent = lobby.counts().filter_map(|(address, _)| Some((count_of(address)?, address))).max_by_key(|of| of.0);
    let standing = |c: &&Arc<Connection>| {
        let idle = c.idle_for().filter(|idle| *idle >= IDLE_MIN)?;
        Some((count_of(c.address()?)?, !c.is_greeted(), idle))
    };
    let idle = connections.values().filter_map(|c| Some((standing(&c)?, c))).max_by_key(|(standing, _)| *standing);
    match (silent, idle) {
        (Some((count, address)), idle) if idle.is_none_or(|((other, ..), _)| count >= other) => {
            return lobby.oldest(Some(address)).map(|(token, _)| Victim::Silent(token));
        }
        (_, Some((_, connection))) => return Some(Victim::Connected(connection.clone())),
        _ => {}
    }
    // Nobody has more: one of its own.
    if let Some((token, _)) = lobby.oldest(Some(ours)).filter(|(_, idle)| *idle >= IDLE_MIN) {
        return Some(Victim::Silent(token));
    }
    let standing = |c: &&Arc<Connection>| {
        let (silent, idle) = (!c.is_greeted(), c.idle_for()?);
        let idle_min = if silent { IDLE_MIN } else { IDLE_MIN_OF_EQUALS };
        (c.address() == Some(ours) && idle >= idle_min).then_some((silent, idle))
    };
    connections.values().filter(|c| standing(c).is_some()).max_by_key(standing).cloned().map(Victim::Connected)
}

/// The connection that goes where too many have not said hello: of the machine that has most of them, at once if it would still
/// have more than the new one's, so that a storm of connections from elsewhere keeps no machine out; else one that has been
/// silent for a while.
fn silent_victim(
    lobby: &Lobby,
    connections: &FxHashMap<u32, Arc<Connection>>,
    ungreeted: usize,
    ours: AddressId,
) -> Option<Victim> {
    let mut counts: FxHashMap<AddressId, usize> = lobby.counts().collect();
    // Where one address has more in the lobby than there are others, all connections need not be looked at.
    let few = counts.values().all(|count| *count <= ungreeted);
    let begun = || connections.values().filter(|connection| few && !connection.is_greeted());
    begun().filter_map(|c| c.address()).for_each(|address| *counts.entry(address).or_default() += 1);
    let longest_begun = |of: Option<AddressId>| {
        let its = begun().filter(|c| of.is_none_or(|address| c.address() == Some(address)));
        its.filter_map(|c| Some((c.idle_for()?, c))).max_by_key(|(idle, _)| *idle)
    };
    let crowded_from = crowded_from(&counts, ours);
    let of = counts.iter().filter(|(_, count)| **count >= crowded_from).max_by_key(|(_, count)| **count);
    let of = of.map(|(address, _)| *address);
    let idle_min = if of.is_some() { Duration::ZERO } else { IDLE_MIN };
    let waiting = lobby.oldest(of).filter(|(_, idle)| *idle >= idle_min);
    let begun = longest_begun(of).filter(|(idle, _)| *idle >= idle_min);
    match (waiting, begun) {
        (Some((token, idle)), begun) if begun.is_none_or(|(other, _)| idle >= other) => Some(Victim::Silent(token)),
        (_, begun) => begun.map(|(_, connection)| Victim::Connected(connection.clone())),
    }
}

/// The machine that a peer speaks from; all peers on Unix sockets are one.
pub(crate) fn host_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(host, _)| host)
}
