//! The way of a client's requests, through I/O nodes or straight to the servers, and its change while the client runs.
//!
//! A change loses nothing and repeats nothing: calls under way end on the way on which they began, new ones take the new
//! way, and the old connection ends with its last call. Both are one client to every server, with one epoch and one sequence
//! of changes, so what holds after the loss of a connection holds here. The files that are open are registered over the new
//! way before the old one is given up, so that the metadata server knows them at any time.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::machine::host_name;
use impresario_config::{Config, META_NAME, Placed};
use impresario_transport::Access;
use impresario_wire::{Answer, MetaCall, Role};

use crate::client::{Client, ClientOptions, Via};
use crate::error::ClientError;
use crate::identity::Identity;
use crate::link::{Link, LinkOptions};
use crate::striped::{Growth, Striped, unasked};
use crate::unsynced::{AllSynced, Unsynced};
use crate::whereabouts::Whereabouts;

/// How often a client looks whether its configuration file has changed.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// A client that has lost its I/O node tries after so long whether that is there again; of a node that is lost again and again
/// at most after the second.
const AWAY: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(320));

/// Where a client's requests go.
pub(crate) struct Way {
    /// To the metadata server, or to an I/O node and through it.
    pub(crate) meta: Arc<Link>,
    pub(crate) data: DataPath,
    /// Names and addresses of the I/O nodes in the order in which they are tried; none: straight.
    nodes: Vec<(String, String)>,
}

pub(crate) enum DataPath {
    Direct(Striped),
    /// Data go the way of metadata.
    IoNode {
        piece_max_bytes: usize,
    },
}

impl Way {
    /// The way of a client; nothing is connected yet.
    pub(crate) fn new(
        config: &Config,
        options: &ClientOptions,
        identity: &Arc<Identity>,
        unsynced: &Arc<Unsynced>,
    ) -> Result<Way, ClientError> {
        let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
        let access = Access::of(config, options.role);
        let whereabouts = Whereabouts::of(config);
        let link_options = |role| LinkOptions {
            access: access.clone(),
            whereabouts: Some(whereabouts.clone()),
            who: identity.who(),
            name: options.name.clone(),
            timeout,
            poll: config.cluster.poll(),
            ..LinkOptions::new(role, config.cluster.max_payload_bytes)
        };
        let nodes = io_nodes(config, options)?;
        let nodes: Vec<_> = nodes.iter().filter_map(|index| config.io.get(*index)).collect();
        let nodes: Vec<_> = nodes.into_iter().map(|io| (io.name.clone(), io.address.clone())).collect();
        if !nodes.is_empty() {
            let routes: Vec<_> = nodes.iter().map(|(name, address)| (name.as_str(), address.as_str())).collect();
            let meta = Arc::new(Link::new(&routes, identity.clone(), link_options(Role::Io))?);
            let most = config.cluster.max_payload_bytes;
            let piece_max_bytes = options.wire_max_bytes.unwrap_or(most).clamp(1, most.max(1)) as usize;
            return Ok(Way { meta, data: DataPath::IoNode { piece_max_bytes }, nodes });
        }
        let link = |role, name: &str| Link::to(config, name, identity.clone(), link_options(role)).map(Arc::new);
        let meta = link(Role::Meta, META_NAME)?;
        let servers = config.data.iter().map(|data| link(Role::Data, &data.name));
        let growth = growth(config, whereabouts.clone(), identity.clone(), link_options(Role::Data));
        let striped = Striped::new(servers.collect::<Result<_, _>>()?, timeout).with_growth(growth);
        let striped = striped.with_piece_max(options.wire_max_bytes).with_unsynced(unsynced);
        Ok(Way { meta, data: DataPath::Direct(striped), nodes })
    }

    fn is_same(&self, other: &Way) -> bool {
        self.nodes == other.nodes
    }

    /// It goes through another I/O node than the one that is tried first.
    fn is_away(&self) -> bool {
        self.nodes.first().is_some_and(|(name, _)| *name != self.meta.peer().name)
    }
}

/// The I/O nodes of a client by their index, in the order in which they are tried.
fn io_nodes(config: &Config, options: &ClientOptions) -> Result<Vec<usize>, ClientError> {
    let count = config.io.len();
    match options.via {
        Via::Direct if config.tree.is_some() => {
            Err(ClientError::invalid("a folder of a file system is served by I/O nodes only; go through one"))
        }
        Via::Direct => Ok(Vec::new()),
        Via::Auto => {
            let client = Placed { job: options.job, host: &host_name(), number: options.placement_seed };
            Ok(config.io_nodes_of(&client))
        }
        Via::IoNode(first) if first < count => Ok((first..count).chain(0..first).collect()),
        Via::IoNode(index) => {
            Err(ClientError::invalid(format!("I/O node {index} is not in the configuration, which has {count}")))
        }
    }
}

/// Finds data servers that were added to the configuration behind those that it had.
fn growth(config: &Config, whereabouts: Whereabouts, identity: Arc<Identity>, options: LinkOptions) -> Box<Growth> {
    let names: Vec<String> = config.data.iter().map(|data| data.name.clone()).collect();
    let names = Mutex::new(names);
    Box::new(move |count| {
        whereabouts.look();
        let config = whereabouts.config();
        let mut names = names.lock();
        let now: Vec<&String> = config.data.iter().map(|data| &data.name).collect();
        if names.len() != count || !names.iter().eq(now.iter().take(count).copied()) {
            let file = config.cluster.file.path().display();
            return Err(ClientError::invalid(format!(
                "the data servers in {file} are not in the order that they had; add new ones behind the others"
            )));
        }
        let more = config.data.iter().skip(count);
        let links = more.map(|data| Link::to(&config, &data.name, identity.clone(), options.clone()).map(Arc::new));
        let links = links.collect::<Result<Vec<_>, _>>()?;
        names.extend(config.data.iter().skip(count).map(|data| data.name.clone()));
        Ok(links)
    })
}

impl Client {
    /// Goes the way that the configuration says now; true if it goes another one. A client that was given its way
    /// ([`Via::Direct`], [`Via::IoNode`]) keeps it; one of a folder of a file system goes as by [`Client::return_home`]. When this fails,
    /// it goes on as before.
    pub fn reallocate(&self, config: &Config) -> Result<bool, ClientError> {
        Ok(self.allocate(config)? == Change::Done)
    }

    fn allocate(&self, config: &Config) -> Result<Change, ClientError> {
        if self.is_fixed(config) {
            return Ok(Change::Needless);
        }
        let next = Way::new(config, &self.options, &self.identity, &self.unsynced)?;
        if next.is_same(&self.way()) {
            return Ok(Change::Needless);
        }
        if !self.may_leave(self.unsynced.writes()) {
            return Ok(Change::NotYet);
        }
        next.meta.session(Instant::now() + next.meta.options().timeout)?;
        let way = next.nodes.first().map_or("the data servers".into(), |(name, _)| name.clone());
        let change = self.leave_for(next)?;
        if change == Change::Done {
            tracing::info!(way, "the allocation of I/O nodes has changed; requests go another way");
        }
        Ok(change)
    }

    /// Whether its requests go through another I/O node than the first of those that it is to use, as that was lost.
    pub fn is_away(&self) -> bool {
        self.way().is_away()
    }

    /// Goes back to the I/O node that it had to leave, if that is there again; true if it does. Clients that were given their way
    /// keep it; one of a folder of a file system goes when it has no file open, after the I/O node has synced all that was written. From a
    /// folder none goes to a cluster, nor the other way round.
    pub fn return_home(&self, config: &Config) -> Result<bool, ClientError> {
        Ok(self.head_home(config)? == Change::Done)
    }

    fn head_home(&self, config: &Config) -> Result<Change, ClientError> {
        if self.is_fixed(config) || !self.is_away() || !self.may_leave(self.unsynced.writes()) {
            return Ok(Change::NotYet);
        }
        let next = Way::new(config, &self.options, &self.identity, &self.unsynced)?;
        next.meta.session(Instant::now() + next.meta.options().timeout)?;
        if next.is_away() {
            return Ok(Change::NotYet);
        }
        let way = next.meta.peer().name;
        let change = self.leave_for(next)?;
        if change == Change::Done {
            tracing::info!(way, "the I/O node is there again; requests go through it");
        }
        Ok(change)
    }

    /// Goes another way, which is connected, when all is settled on the present one.
    fn leave_for(&self, next: Way) -> Result<Change, ClientError> {
        let Some(writes) = self.settle_here()? else { return Ok(Change::Unsettled) };
        Ok(if self.go(next, writes) { Change::Done } else { Change::NotYet })
    }

    /// Nothing is at its I/O node that another one could not know of: in front of a folder files that are open, as they may have no
    /// name any more, and what was written after these `writes`.
    fn may_leave(&self, writes: u64) -> bool {
        !self.is_of_tree || self.opens.are_none() && self.unsynced.writes() == writes
    }

    /// Has the I/O node of a folder sync all that was written through it, as another one could not. What that node knows to be lost
    /// the next sync of each file tells, wherever it goes. How many writes the client knew of then; `None`: not all of them are settled.
    fn settle_here(&self) -> Result<Option<u64>, ClientError> {
        let writes = self.unsynced.writes();
        if !self.is_of_tree || self.unsynced.is_empty() {
            return Ok(Some(writes));
        }
        match self.meta(MetaCall::SyncAll)? {
            Answer::AllSynced { lane, run, lost, any_lost } => {
                let synced = AllSynced { lane, run, lost: lost.as_deref(), any_lost };
                Ok(self.unsynced.note_sync_of_all(writes, &synced).then_some(writes))
            }
            other => Err(unasked(self.meta_link().peer(), &other)),
        }
    }

    /// It was given its way, or the configuration is now another's: from a folder none goes to a cluster, nor the other way round.
    fn is_fixed(&self, config: &Config) -> bool {
        self.options.via != Via::Auto || config.tree.is_some() != self.is_of_tree
    }

    /// Goes another way, which is connected; false if it may not leave the present one: see [`Client::may_leave`].
    fn go(&self, next: Way, writes: u64) -> bool {
        let next = Arc::new(next);
        let mut way = self.way.write();
        // With the lock: what writes has an open file before it asks for the way.
        if !self.may_leave(writes) {
            return false;
        }
        let old = std::mem::replace(&mut *way, next);
        drop(way);
        for file in self.opens.all() {
            if let Err(error) = file.register(self.deadline()) {
                tracing::debug!(%error, "an open file could not be registered over the new way; it will be");
                break;
            }
        }
        drop(old);
        true
    }

    /// Follows the file of its configuration: whenever that changes, the client goes the way that it says then, after two seconds
    /// or so; one of a folder that has files open then some ten seconds after it has none. A file with mistakes changes nothing. A client
    /// that had to leave its I/O node for another one goes back some ten seconds after that is there again, so that the load does not
    /// stay with those that were never restarted.
    pub fn follow(&self, config: &Config) {
        if self.options.via != Via::Auto {
            return;
        }
        let (client, whereabouts) = (self.own.clone(), Whereabouts::of(config));
        let thread = std::thread::Builder::new().name("allocation".into()).stack_size(256 << 10);
        if let Err(error) = thread.spawn(move || follow(&client, &whereabouts)) {
            tracing::warn!(%error, "no thread to follow the allocation of I/O nodes; raise its limit (ulimit -u)");
        }
    }
}

/// Ends with the client.
fn follow(client: &Weak<Client>, whereabouts: &Whereabouts) {
    let mut followed = whereabouts.config();
    let mut pending = Pending::of(followed.clone());
    let mut homecoming = Homecoming::default();
    loop {
        let until = Instant::now() + LOOK_EVERY;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if client.strong_count() == 0 {
                return;
            }
            std::thread::sleep(left.min(Duration::from_millis(500)));
        }
        whereabouts.look();
        let config = whereabouts.config();
        let Some(client) = client.upgrade() else { return };
        if homecoming.is_due(client.is_away(), Instant::now()) {
            match client.head_home(&config) {
                Ok(Change::Unsettled) => homecoming.back_off(),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "it goes on through its I/O node"),
            }
        }
        if Arc::ptr_eq(&config, &followed) {
            continue;
        }
        if !Arc::ptr_eq(&config, &pending.config) {
            pending = Pending::of(config.clone());
        }
        if !pending.is_due(Instant::now()) {
            continue;
        }
        match client.allocate(&config) {
            Ok(Change::Done | Change::Needless) => followed = config,
            Ok(Change::NotYet) => pending.waits = true,
            Ok(Change::Unsettled) => {
                pending.waits = true;
                pending.attempts.back_off();
            }
            Err(error) => {
                if !std::mem::replace(&mut pending.is_told, true) {
                    tracing::warn!(%error, "the I/O nodes that are allocated now cannot be used yet");
                }
                pending.waits = client.is_of_tree;
            }
        }
    }
}

/// What came of an attempt to go another way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Done,
    /// The way is the one that it is to go, or the client keeps its own.
    Needless,
    /// The node is not there, or something is under way here.
    NotYet,
    /// Everything was synced here, and yet not all that the client wrote is known to be stable or lost.
    Unsettled,
}

/// A configuration whose allocation is not followed yet.
struct Pending {
    config: Arc<Config>,
    /// The log has why.
    is_told: bool,
    /// It was tried in front of a folder, where each attempt may have everything synced: from then on it is as often as a return.
    waits: bool,
    attempts: Homecoming,
}

impl Pending {
    fn of(config: Arc<Config>) -> Pending {
        Pending { config, is_told: false, waits: false, attempts: Homecoming::default() }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        !self.waits || self.attempts.is_due(true, now)
    }
}

/// When a client that had to leave its I/O node looks whether that is there again.
#[derive(Default)]
struct Homecoming {
    /// Since when it has been away, or has looked last.
    away_since: Option<Instant>,
    came_back: Option<Instant>,
    wait: Duration,
}

impl Homecoming {
    /// The sync that it asked for was in vain: it cost everyone who writes there, and is not repeated as often.
    fn back_off(&mut self) {
        self.wait = (self.wait * 2).min(AWAY.1);
    }

    fn is_due(&mut self, is_away: bool, now: Instant) -> bool {
        match (self.away_since, is_away) {
            (None, true) => {
                let is_soon = self.came_back.is_some_and(|at| now.duration_since(at) < AWAY.1);
                self.wait = if is_soon { (self.wait * 2).min(AWAY.1) } else { AWAY.0 };
                self.away_since = Some(now);
                false
            }
            (Some(since), true) => {
                let is_due = now.duration_since(since) >= self.wait;
                if is_due {
                    self.away_since = Some(now);
                }
                is_due
            }
            (Some(_), false) => {
                (self.away_since, self.came_back) = (None, Some(now));
                false
            }
            (None, false) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_lost_again_and_again_is_tried_less_and_less_often() {
        let (mut homecoming, start) = (Homecoming::default(), Instant::now());
        let mut looks = |is_away: bool, at_s: u64| homecoming.is_due(is_away, start + Duration::from_secs(at_s));
        assert!(!looks(false, 0) && !looks(true, 2) && !looks(true, 10));
        assert!(looks(true, 12), "ten seconds after it was lost");
        assert!(!looks(true, 20) && looks(true, 22), "and every ten seconds");
        assert!(!looks(false, 24) && !looks(true, 30) && !looks(true, 48));
        assert!(looks(true, 50), "lost again soon: twenty");
        assert!(!looks(false, 52) && !looks(true, 372) && looks(true, 382), "it was there for long: ten again");
    }

    #[test]
    fn a_sync_of_all_that_settles_nothing_is_asked_for_less_and_less_often() {
        let (mut homecoming, start) = (Homecoming::default(), Instant::now());
        let due: Vec<_> = (0..2000)
            .filter(|at_s| {
                let is_due = homecoming.is_due(true, start + Duration::from_secs(*at_s));
                if is_due {
                    homecoming.back_off();
                }
                is_due
            })
            .collect();
        assert_eq!(due, [10, 30, 70, 150, 310, 630, 950, 1270, 1590, 1910]);
    }
}
