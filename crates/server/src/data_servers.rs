//! The data servers as other servers use them: an I/O node forwards to them, the metadata server asks them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_client::{ClientError, Identity, Link, LinkOptions, Op, Striped, Vet, Whereabouts, exchange};
use impresario_config::{Config, DataState};
use impresario_layout::{Layout, Skipped};
use impresario_transport::{Access, Membership};
use impresario_wire::{Answer, Call, ClientKey, Fault, FileKey, KeyRole, LaneState, ObjectInfo, Role, Statfs, Who};

use crate::meta::{Answered, NO_FILE, Objects, Stores};
use crate::workers::waiting_elsewhere;

/// Removals of objects that are under way at once, for one thread.
const UNLINKS_AT_ONCE: usize = 512;
/// How long a data server may take to welcome the metadata server that starts, until it is asked again.
const GREETING_MAX: Duration = Duration::from_secs(2);
/// Between two such attempts, at first and in the end.
const GREETING_PAUSE_MIN: Duration = Duration::from_millis(50);
const GREETING_PAUSE_MAX: Duration = Duration::from_secs(2);
/// After this time without a welcome it is told.
const GREETING_TOLD: Duration = Duration::from_secs(3);

/// A data server that has told its space before, and did not tell it in this time, is taken at its word.
const SPACE_WAIT: Duration = Duration::from_secs(1);
/// One that never told it is left out after this time.
const SPACE_WAIT_FIRST: Duration = Duration::from_secs(3);
/// One that was silent is asked again after this time.
const SPACE_PAUSE: Duration = Duration::from_secs(5);

/// Links to all data servers, in the order of the configuration.
pub(crate) struct DataServers {
    pub(crate) striped: Arc<Striped>,
    /// Who the server is to them where it speaks for itself.
    pub(crate) identity: Arc<Identity>,
    timeout: Duration,
    pub(crate) states: Arc<States>,
    /// What each of them has told of its space last.
    spaces: Mutex<Vec<Space>>,
}

/// What a data server has told of its space.
#[derive(Clone, Default)]
struct Space {
    told: Option<Store>,
    /// When it did not answer.
    silent: Option<Instant>,
}

/// Which data servers get files, live: as the configuration file says now.
pub(crate) struct States {
    whereabouts: Whereabouts,
    at_start: Vec<(String, DataState)>,
    /// Of the metadata server.
    stores: Option<Arc<Stores>>,
    /// That a server was retired too early was told.
    is_told: AtomicBool,
}

impl States {
    fn of(config: &Config, whereabouts: Whereabouts, stores: Option<Arc<Stores>>) -> States {
        let at_start = config.data.iter().map(|data| (data.name.clone(), data.state)).collect();
        States { whereabouts, at_start, stores, is_told: AtomicBool::default() }
    }

    /// In the order of the data servers that there were at the start. Where the file has another server now, what it said
    /// then still counts.
    fn now(&self) -> impl Iterator<Item = DataState> {
        self.whereabouts.look();
        let config = self.whereabouts.config();
        self.at_start.iter().enumerate().map(move |(number, (name, before))| {
            let now = config.data.get(number).filter(|data| data.name == *name);
            self.judged(name, now.map_or(*before, |data| data.state))
        })
    }

    /// A server that is retired before it was emptied is draining. One that gets files again is not empty from then on: it
    /// gets none before that is noted.
    fn judged(&self, name: &str, state: DataState) -> DataState {
        let Some(stores) = &self.stores else { return state };
        match (state, stores.is_emptied(name)) {
            (DataState::Retired, false) => {
                if !self.is_told.swap(true, Ordering::Relaxed) {
                    tracing::error!(server = name, "it is retired but was not found empty; it is taken for draining");
                }
                DataState::Draining
            }
            (DataState::Active, true) => match stores.note_emptied(name, false) {
                Ok(()) => DataState::Active,
                Err(error) => {
                    tracing::error!(server = name, %error, "it gets no files: that it is not empty cannot be noted");
                    DataState::Draining
                }
            },
            _ => state,
        }
    }

    /// The lanes of the servers that hold nothing any more and do not run.
    pub(crate) fn retired(&self) -> Vec<u16> {
        self.now().zip(0..).filter_map(|(state, number)| (state == DataState::Retired).then_some(number)).collect()
    }

    /// The servers that new files do not use.
    pub(crate) fn skipped(&self) -> Skipped {
        let skipped = self.now().zip(0..).filter(|(state, _)| *state != DataState::Active);
        // A file that says this of more is refused.
        Skipped::of(skipped.map(|(_, number)| number)).unwrap_or_default()
    }
}

impl DataServers {
    /// For the server `name`, which is of this cluster. Nothing is connected yet. `vet` says whether a data server's folder
    /// is the right one; `stores` is what the metadata server has noted.
    pub(crate) fn of(
        config: &Config,
        name: &str,
        membership: Arc<Membership>,
        vet: Option<Vet>,
        stores: Option<Arc<Stores>>,
    ) -> Result<DataServers, ClientError> {
        let identity = Arc::new(Identity::draw(0, 0)?.with_membership(membership));
        let timeout = upstream_timeout(config);
        let whereabouts = Whereabouts::of(config);
        let options = LinkOptions {
            who: identity.who(),
            name: name.into(),
            timeout,
            vet,
            access: Access::of(config, KeyRole::Server),
            whereabouts: Some(whereabouts.clone()),
            poll: config.cluster.poll(),
            waits_for_limits: false,
            ..LinkOptions::new(Role::Data, config.cluster.max_payload_bytes)
        };
        let link = |data: &impresario_config::Data| {
            Link::to(config, &data.name, identity.clone(), options.clone()).map(Arc::new)
        };
        let links = config.data.iter().map(link).collect::<Result<Vec<_>, _>>()?;
        let states = Arc::new(States::of(config, whereabouts, stores));
        let spaces = Mutex::new(vec![Space::default(); links.len()]);
        Ok(DataServers { striped: Arc::new(Striped::new(links, timeout)), identity, timeout, states, spaces })
    }

    /// Has all data servers welcome this one, those that are away when they come.
    pub(crate) fn greet(self: &Arc<Self>, answered: &Arc<Answered>) -> io::Result<()> {
        for (number, link) in self.striped.servers().iter().cloned().enumerate() {
            let (states, answered) = (self.states.clone(), answered.clone());
            let thread = std::thread::Builder::new().name(format!("greeting-{number}")).stack_size(128 << 10);
            thread.spawn(move || greet(&link, number, &states, &answered))?;
        }
        Ok(())
    }

    /// The links to the servers that exist at present, with the state of each.
    fn existing(&self) -> Vec<(&Link, DataState)> {
        let all = self.striped.servers().iter().map(Arc::as_ref).zip(self.states.now());
        all.filter(|(_, state)| *state != DataState::Retired).collect()
    }
}

/// Asks one data server until it has answered.
fn greet(link: &Link, number: usize, states: &States, answered: &Answered) {
    let begun = Instant::now();
    let (mut pause, mut is_told) = (GREETING_PAUSE_MIN, false);
    while answered.awaits(number) {
        let is_there = states.now().nth(number).is_some_and(|state| state != DataState::Retired);
        let greeted = if is_there { link.session(Instant::now() + GREETING_MAX).map(drop) } else { Ok(()) };
        match greeted {
            Err(error) if !is_told && begun.elapsed() > GREETING_TOLD => {
                is_told = true;
                tracing::warn!(%error, "new files do not use this data server until it has answered");
            }
            _ => {}
        }
        if answered.wait(number, pause) {
            pause = (2 * pause).min(GREETING_PAUSE_MAX);
        } else if is_told {
            tracing::info!(server = link.peer().name, "the data server has answered; new files may use it");
        }
    }
}

/// How long a server waits for another on a client's behalf: less than the client waits, so that the client hears
/// who is to blame before it gives up.
pub(crate) fn upstream_timeout(config: &Config) -> Duration {
    Duration::from_millis(config.cluster.request_timeout_ms) * 3 / 4
}

fn failed(error: ClientError) -> io::Error {
    match error.errno() {
        // The errno says less than the text, which names the server.
        libc::EIO => io::Error::other(error),
        errno => io::Error::from_raw_os_error(errno),
    }
}

impl Objects for DataServers {
    fn stat(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo> {
        waiting_elsewhere(|| self.striped.stat(file, layout)).map_err(failed)
    }

    fn truncate(&self, who: &Who, file: FileKey, layout: &Layout, len_bytes: u64) -> io::Result<Vec<LaneState>> {
        let who = if who.client == ClientKey::default() { self.identity.who() } else { *who };
        waiting_elsewhere(|| self.striped.truncate(&who, file, layout, len_bytes)).map_err(|error| match error {
            // It may still be under way: its client asks for it again in a newer epoch.
            ClientError::Lost { .. } => io::Error::from_raw_os_error(Fault::PATH_LOST),
            error => failed(error),
        })
    }

    fn sync(&self, file: FileKey, layout: &Layout) -> io::Result<Vec<LaneState>> {
        let synced = waiting_elsewhere(|| self.striped.sync_lanes(&self.identity.who(), file, layout));
        synced.map(|(lanes, _)| lanes).map_err(failed)
    }

    fn revoke(&self, who: &Who, file: FileKey, layout: &Layout) -> io::Result<()> {
        // What this server gave up itself it has revoked by having begun an epoch.
        let own = who.client == ClientKey::default();
        let newer = if own { self.identity.who() } else { Who { epoch: who.epoch.saturating_add(1), ..*who } };
        // A sync waits for all that came before it.
        match waiting_elsewhere(|| self.striped.sync(&newer, file, layout)) {
            // Its client has gone on, and so has revoked it.
            Err(ClientError::Fault { fault: Fault { errno: Fault::FENCED, .. }, .. }) if !own => {
                waiting_elsewhere(|| self.striped.sync(&self.identity.who(), file, layout)).map_err(failed)
            }
            synced => synced.map_err(failed),
        }
    }

    fn fence(&self, who: &Who) -> io::Result<()> {
        let existing = self.existing();
        let sync = |link| Op { link, call: Call::Sync { who: *who, file: NO_FILE }, payload: &[], into: None };
        let deadline = Instant::now() + self.timeout;
        let ops = || existing.iter().map(|(link, _)| sync(*link)).collect();
        for synced in waiting_elsewhere(|| exchange(ops(), deadline)) {
            match synced {
                Ok(_) => {}
                // It knows a newer epoch already.
                Err(ClientError::Fault { fault: Fault { errno: Fault::FENCED, .. }, .. }) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    fn unlink(&self, files: &[(FileKey, Layout)]) -> Vec<io::Result<()>> {
        let lanes_max = files.iter().map(|(_, layout)| usize::from(layout.pcount)).max().unwrap_or(1).max(1);
        let chunks = files.chunks((UNLINKS_AT_ONCE / lanes_max).max(1));
        let mut removed = Vec::with_capacity(files.len());
        for files in chunks {
            let calls: Vec<_> = files.iter().map(|(file, layout)| (self.identity.who(), *file, *layout)).collect();
            let answers = waiting_elsewhere(|| self.striped.unlink_all(&calls));
            let is_away = |answer: &Result<(), ClientError>| !matches!(answer, Ok(()) | Err(ClientError::Fault { .. }));
            let any_is_away = answers.iter().any(is_away);
            removed.extend(answers.into_iter().map(|removed| removed.map_err(failed)));
            if any_is_away {
                break;
            }
        }
        removed
    }

    fn statfs(&self) -> io::Result<Statfs> {
        let begun = Instant::now();
        let spaces = self.spaces.lock().clone();
        // While nobody has told anything, all are asked each time.
        let is_known = spaces.iter().any(|space| space.told.is_some());
        let servers: Vec<_> = self.striped.servers().iter().zip(self.states.now()).enumerate().collect();
        let exists = |state: &DataState| *state != DataState::Retired;
        let told = |number: usize| spaces.get(number).is_some_and(|space| space.told.is_some());
        let is_silent = |at: &Instant| is_known && begun.saturating_duration_since(*at) < SPACE_PAUSE;
        let rests = |number: usize| spaces.get(number).and_then(|space| space.silent).is_some_and(|at| is_silent(&at));
        let is_asked = |(number, (_, state)): &&(usize, (&Arc<Link>, DataState))| exists(state) && !rests(*number);
        let asked: Vec<_> = servers.iter().filter(is_asked).collect();
        let all_told = asked.iter().all(|(number, _)| told(*number));
        let deadline = begun + if all_told { SPACE_WAIT } else { SPACE_WAIT_FIRST }.min(self.timeout);
        let ask = |link| Op { link, call: Call::Status, payload: &[], into: None };
        let ops = || asked.iter().map(|(_, (link, _))| ask(link.as_ref())).collect();
        let answers = waiting_elsewhere(|| exchange(ops(), deadline));
        let mut why = None;
        // Others may have learnt of more meanwhile.
        let mut spaces = self.spaces.lock();
        for ((number, _), reply) in asked.iter().zip(answers) {
            let Some(space) = spaces.get_mut(*number) else { continue };
            match reply.map_err(failed).and_then(|reply| Store::told(&reply.answer)) {
                Ok(store) => *space = Space { told: Some(store), silent: None },
                // What is free is an estimate at any time: one server that is away must not make it unknown.
                Err(error) => {
                    space.silent = Some(Instant::now());
                    why = why.or(Some(error));
                }
            }
        }
        let known = spaces.clone();
        drop(spaces);
        let existing = servers.iter().zip(known).filter(|((_, (_, state)), _)| exists(state));
        let stores = existing.map(|((_, (_, state)), space)| {
            space.told.map(|told| Store { is_active: *state == DataState::Active, ..told })
        });
        let stores: Vec<_> = stores.collect();
        // New files use no server that has not answered yet, so what is left out is no room for them.
        if !stores.is_empty() && stores.iter().all(Option::is_none) {
            return Err(why.unwrap_or_else(|| io::Error::other("no data server has told its space yet")));
        }
        Ok(space_of(stores.into_iter().flatten().collect()))
    }
}

/// What a data server says of the file system that it stores on.
#[derive(Clone)]
struct Store {
    /// Which one it is; `None`: not known, so one of its own.
    file_system: Option<String>,
    total_bytes: u64,
    free_bytes: u64,
    /// The server gets new files.
    is_active: bool,
}

impl Store {
    /// From the answer of a server whose state is not known yet.
    fn told(answer: &Answer) -> io::Result<Store> {
        let Answer::Text(text) = answer else { return Err(io::ErrorKind::InvalidData.into()) };
        let status: serde_json::Value = serde_json::from_str(text)?;
        let store = |key: &str| status.get("store").and_then(|store| store.get(key));
        let bytes = |key: &str| store(key).and_then(|bytes| bytes.as_u64()).unwrap_or(0);
        Ok(Store {
            file_system: store("file_system").and_then(|id| id.as_str()).map(str::to_owned),
            total_bytes: bytes("total_bytes"),
            free_bytes: bytes("free_bytes"),
            is_active: false,
        })
    }
}

/// Space over all data servers; a file system that several of them store on is counted once. Files are striped evenly over the
/// servers that get new ones, so what is free is limited by the file system that is full first.
fn space_of(stores: Vec<Store>) -> Statfs {
    let active = stores.iter().filter(|store| store.is_active).count() as u128;
    let mut file_systems: Vec<(Store, u32)> = Vec::new();
    for store in stores {
        let same = |known: &&mut (Store, u32)| store.file_system.is_some() && known.0.file_system == store.file_system;
        let more = u32::from(store.is_active);
        match file_systems.iter_mut().find(same) {
            Some((known, sharers)) => {
                // Its servers have looked at it one after the other.
                known.free_bytes = known.free_bytes.min(store.free_bytes);
                *sharers += more;
            }
            None => file_systems.push((store, more)),
        }
    }
    let total_bytes = file_systems.iter().fold(0_u64, |sum, (store, _)| sum.saturating_add(store.total_bytes));
    let in_use = file_systems.iter().filter(|(_, sharers)| *sharers > 0);
    let free = in_use.map(|(store, sharers)| u128::from(store.free_bytes) * active / u128::from(*sharers)).min();
    let free_bytes = u64::try_from(free.unwrap_or(0)).unwrap_or(u64::MAX).min(total_bytes);
    Statfs { total_bytes, free_bytes, ..Statfs::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_servers_share_is_counted_once() {
        let store = |file_system: &str, free_bytes, is_active| Store {
            file_system: Some(file_system.to_owned()).filter(|id| !id.is_empty()),
            total_bytes: 1000,
            free_bytes,
            is_active,
        };
        let space = |stores: Vec<Store>| {
            let Statfs { total_bytes, free_bytes, .. } = space_of(stores);
            (total_bytes, free_bytes)
        };
        // Looked at one after the other, while others write.
        let shared = || (0..4).map(|n| store("a", 700 - n, true));
        assert_eq!(space(shared().collect()), (1000, 697));
        assert_eq!(space(shared().chain([store("b", 500, true)]).collect()), (2000, 871), "five fourths of 697");
        let mixed = |of_a, of_b| {
            vec![store("a", 300, of_a), store("a", 300, true), store("b", 200, of_b), store("c", 900, true)]
        };
        assert_eq!(space(mixed(true, true)), (3000, 600), "the shared one is full first");
        assert_eq!(space(mixed(true, false)), (3000, 450));
        assert_eq!(
            space(mixed(false, true)),
            (3000, 600),
            "a draining server takes nothing of it, and the other one is full first"
        );
        assert_eq!(space(mixed(false, false)), (3000, 600));
        // Of those that do not say which it is, each has its own.
        assert_eq!(space(vec![store("", 300, true), store("", 400, true)]), (2000, 600));
        assert_eq!(space(vec![store("a", 300, false), store("", 400, false)]), (2000, 0), "new files have no place");
        assert_eq!(space(Vec::new()), (0, 0));
        let huge = || Store { total_bytes: u64::MAX, free_bytes: u64::MAX, file_system: None, is_active: true };
        assert_eq!(space(vec![huge(), huge()]), (u64::MAX, u64::MAX));
    }

    #[test]
    fn the_space_is_known_while_a_data_server_is_away() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.meta.dir = folder.path().join("meta");
        let data = |n| {
            let dir = folder.path().join(format!("data.{n}"));
            impresario_config::Data::new(format!("data.{n}"), impresario_testing::free_address(), dir)
        };
        config.data = (0..3).map(data).collect();
        config.cluster.request_timeout_ms = 3000;
        crate::folders::make_all(&config).unwrap();
        let start = |name| crate::process::start(&config, name).unwrap();
        let mut started = vec![start("data.0"), start("data.1")];
        let servers = || DataServers::of(&config, "meta", Arc::default(), None, None).unwrap();
        let (servers, later) = (servers(), servers());
        let silent = || servers.spaces.lock()[2].silent;
        assert!(servers.statfs().unwrap().total_bytes > 0, "one that has never told its space is left out");
        let told: Vec<_> = servers.spaces.lock().iter().map(|space| space.told.is_some()).collect();
        assert_eq!(told, [true, true, false]);
        let since = silent().unwrap();
        while since.elapsed() < SPACE_PAUSE / 2 {
            servers.statfs().unwrap();
            assert!(silent() == Some(since) || since.elapsed() >= SPACE_PAUSE, "it is not waited for again");
            std::thread::sleep(Duration::from_millis(100));
        }
        started.push(start("data.2"));
        let servers = later;
        let before = servers.statfs().unwrap();
        assert!(before.total_bytes > 0);
        drop(started.remove(0));
        for _ in 0..3 {
            assert_eq!(servers.statfs().unwrap().total_bytes, before.total_bytes);
        }
        drop(started);
        assert_eq!(servers.statfs().unwrap().total_bytes, before.total_bytes);
        let never = DataServers::of(&config, "meta", Arc::default(), None, None).unwrap();
        for _ in 0..2 {
            assert!(never.statfs().is_err(), "nobody has told anything");
        }
    }

    #[test]
    fn removals_do_not_wait_again_and_again_for_a_server_that_is_away() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.meta.dir = folder.path().join("meta");
        let data = |n| {
            let dir = folder.path().join(format!("data.{n}"));
            impresario_config::Data::new(format!("data.{n}"), impresario_testing::free_address(), dir)
        };
        config.data = (0..2).map(data).collect();
        config.cluster.request_timeout_ms = 1000;
        crate::folders::make_all(&config).unwrap();
        let _started = crate::process::start(&config, "data.0").unwrap();
        let servers = DataServers::of(&config, "meta", Arc::default(), None, None).unwrap();
        let layout = |base, pcount| Layout { base, pcount, ssize_bytes: 65_536, servers: 2, skipped: Skipped::NONE };
        let files = |layout| (1..=2000).map(|key| (FileKey(key), layout)).collect::<Vec<_>>();
        let removed = servers.unlink(&files(layout(0, 2)));
        assert!(removed.len() == UNLINKS_AT_ONCE / 2 && removed.iter().all(Result::is_err), "{}", removed.len());
        // A busy machine may need longer for so many than what the server that is away is waited for here.
        config.cluster.request_timeout_ms = Config::default().cluster.request_timeout_ms;
        let servers = DataServers::of(&config, "meta", Arc::default(), None, None).unwrap();
        let removed = servers.unlink(&files(layout(0, 1)));
        assert!(removed.len() == 2000 && removed.iter().all(Result::is_ok), "the other server answers");
    }

    /// What a client has given up it revokes with whatever it does next: that others see to it too must not fail then.
    #[test]
    fn what_its_client_has_revoked_is_revoked() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.meta.dir = folder.path().join("meta");
        config.data = vec![impresario_config::Data::new("data.0", "127.0.0.1:0", folder.path().join("data"))];
        crate::folders::make_all(&config).unwrap();
        let server = crate::process::start(&config, "data.0").unwrap();
        config.data[0].address = server.address().to_string();
        let servers = DataServers::of(&config, "meta", Arc::default(), None, None).unwrap();
        let layout = Layout { base: 0, pcount: 1, ssize_bytes: 65_536, servers: 1, skipped: Skipped::NONE };
        let of = |epoch| Who { client: ClientKey(7), epoch, ..Who::default() };
        servers.striped.write(&of(5), FileKey(1), &layout, 0, b"bytes").unwrap();
        let stale = servers.truncate(&of(4), FileKey(1), &layout, 0).unwrap_err();
        assert_eq!(stale.raw_os_error(), Some(Fault::FENCED));
        for epoch in [1, 3, 4, 5] {
            servers.revoke(&of(epoch), FileKey(1), &layout).unwrap();
        }
        assert_eq!(servers.truncate(&of(5), FileKey(1), &layout, 0).unwrap_err().raw_os_error(), Some(Fault::FENCED));
        assert_eq!(servers.stat(FileKey(1), &layout).unwrap().size, 5);
    }
}
