//! Which connections a server keeps: a place for a new one, and those that are closed for others.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use impresario_node::credits::owes_too_long;
use rustc_hash::FxHashMap;

use super::{Settings, Shared};
use crate::addresses::Tenancy;
use crate::connection::Connection;

/// A connection that has been idle for less is not closed for another.
const IDLE_MIN: Duration = Duration::from_millis(500);
/// The same for one of the machine that the other is from, or of one that has no more.
const IDLE_MIN_OF_EQUALS: Duration = Duration::from_secs(60);
/// This many connections may always be silent before their hello; beyond that, half of all.
const UNPROVEN_MIN: usize = 16;
/// Threads of connections that were closed and have not ended yet, beyond which no connection is taken.
const CLOSING_MAX: usize = 64;

impl Shared {
    /// Finds a place for a connection from `peer`; where there is none, closes one of the machine that has most: one that is
    /// silent before its hello, else the idlest. None is closed in favour of a machine that would then have the most.
    /// The error is what to tell the peer.
    pub(super) fn make_room_for(&self, peer: &str) -> Result<Tenancy, String> {
        let Settings { name, max_connections, max_connections_per_address, .. } = &self.settings;
        let max = *max_connections as usize;
        let full = || format!("{name} has its {max} connections (max_connections); try again later");
        if *self.threads.lock() as usize >= max + CLOSING_MAX {
            return Err(full());
        }
        let ours = host_of(peer);
        let tenancy = self.addresses.enter(ours, *max_connections_per_address).map_err(|has| {
            format!(
                "{name} has {has} connections from {ours}, of {max_connections_per_address} that an address may have \
                 (max_connections_per_address); close some, or raise it"
            )
        })?;
        let mut connections = self.connections.lock();
        let unproven = connections.values().filter(|connection| !connection.is_greeted()).count();
        if connections.len() < max && unproven < (max / 2).max(UNPROVEN_MIN) {
            return Ok(tenancy);
        }
        let mut counts: FxHashMap<&str, usize> = FxHashMap::default();
        connections.values().for_each(|connection| *counts.entry(connection.host()).or_default() += 1);
        let most = counts.iter().max_by_key(|(_, count)| **count).map(|(host, count)| (*host, *count));
        let own = counts.get(ours).copied().unwrap_or(0);
        let (host, idle_min) = match most {
            Some((host, count)) if count > own + 1 => (host, IDLE_MIN),
            _ => (ours, IDLE_MIN_OF_EQUALS),
        };
        let standing = |connection: &&Arc<Connection>| {
            let idle = connection.idle_for().filter(|idle| connection.host() == host && *idle >= IDLE_MIN)?;
            let silent = !connection.is_greeted();
            (silent || idle >= idle_min).then_some((silent, idle))
        };
        let of_unproven = connections.len() < max;
        let victim = match of_unproven {
            // Half of the connections may be silent before their hello; the longest of them goes.
            true => silent_victim(&connections, ours),
            false => connections.values().filter(|c| standing(c).is_some()).max_by_key(standing).cloned(),
        };
        let Some(victim) = victim else {
            return Err(match of_unproven {
                true => format!("{name} has {unproven} connections that have not said hello; try again later"),
                false => full(),
            });
        };
        self.complaints.about(victim.host(), || {
            tracing::warn!(peer = victim.peer(), name = victim.name(), max, "closed an idle connection for a new one");
        });
        connections.remove(&victim.id().0);
        drop(connections);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        victim.close();
        Ok(tenancy)
    }

    /// Others wait for memory: closes the connections that announced bytes for a write and send them too slowly.
    pub(super) fn close_those_that_owe(&self) {
        let owing = |connection: &&Arc<Connection>| owes_too_long(connection.owes_for());
        let slow: Vec<_> = self.connections.lock().values().filter(owing).cloned().collect();
        for connection in slow {
            self.complaints.about(connection.host(), || {
                tracing::warn!(
                    peer = connection.peer(),
                    "closed a connection: it holds memory for bytes that it does not send"
                );
            });
            connection.close();
        }
    }
}

/// The connection that goes where too many have not said hello: of the machine that has most of them, at once if it would still
/// have more than the new one's, so that a storm of connections from elsewhere keeps no machine out; else one that has been
/// silent for a while.
fn silent_victim(connections: &FxHashMap<u32, Arc<Connection>>, ours: &str) -> Option<Arc<Connection>> {
    let unproven = || connections.values().filter(|connection| !connection.is_greeted());
    let mut counts: FxHashMap<&str, usize> = FxHashMap::default();
    unproven().for_each(|connection| *counts.entry(connection.host()).or_default() += 1);
    let own = counts.get(ours).copied().unwrap_or(0);
    let crowded = counts.iter().max_by_key(|(_, count)| **count).filter(|(_, count)| **count > own + 1);
    let of_crowded =
        crowded.and_then(|(host, _)| unproven().filter(|c| c.host() == *host).max_by_key(|c| c.idle_for()));
    let longest = || unproven().filter(|c| c.idle_for() >= Some(IDLE_MIN)).max_by_key(|c| c.idle_for());
    of_crowded.or_else(longest).cloned()
}

/// The machine that a peer speaks from; all peers on Unix sockets are one.
pub(super) fn host_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(host, _)| host)
}
