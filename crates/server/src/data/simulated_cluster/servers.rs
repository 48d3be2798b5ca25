//! The servers: data servers with the real store, fence and notes of losses on disks that lose and fail, and the real metadata
//! server in a folder, which reaches them as a partition lets it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_store::testing::Forgetful;
use impresario_store::{FolderIdentity, ObjectStore, StoreOptions};
use impresario_wire::{ClusterId, Fault, FileKey, LaneState, ObjectInfo, Statfs, Time, Who};

use super::plan::{DATA_SERVERS, STRIP_BYTES};
use crate::data::disk::{Done, errno_of};
use crate::data::durability;
use crate::data::ledger::Ledger;
use crate::data::losses::Losses;
use crate::data::once::{Once, Origin};
use crate::meta::{self, Fate, MetaOptions, MetaService, Objects, StepHook};

/// What is broken on purpose, to see that it is found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Sabotage {
    #[default]
    None,
    /// Data servers take every request for one of its client's present epoch.
    NoDataFence,
    /// A data server takes each copy of a write for another write.
    DoesCopiesAgain,
    /// Every third sync of a data server is answered and not done.
    SkipsSyncs,
    /// A data server tells nobody that a sync has failed.
    SwallowsErrors,
    /// A machine that was started again says it was not.
    HidesReboots,
    /// A data server removes an object and does not note that it is removed for ever.
    NoRemovalMarks,
    /// The metadata server takes each copy of a change for another change.
    NoReplies,
    /// The metadata server takes every call for one of its client's present epoch.
    NoMetaFence,
    /// Truncations are answered and not done.
    SkipsCuts,
}

const CAPACITY_BYTES: u64 = 1 << 20;

/// A truncation that is on its way from the metadata server to a data server.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateCut {
    pub(super) server: usize,
    pub(super) who: Who,
    pub(super) file: FileKey,
    pub(super) len_bytes: u64,
}

struct Running {
    store: ObjectStore<Forgetful>,
    losses: Arc<Losses>,
    once: Once,
    ledger: Ledger,
}

/// A data server and its machine.
pub(super) struct DataServer {
    number: usize,
    sabotage: Sabotage,
    checksums: bool,
    pub(super) disk: Forgetful,
    running: Option<Running>,
    boots: u64,
    /// How often it was started; messages to an earlier process are lost.
    pub(super) runs: u64,
    /// In the next call it is killed after so many changes of the disk.
    kill_after: Option<(u32, u64)>,
    syncs: u64,
    /// Objects whose removal has begun: nothing is promised of their bytes.
    removed: BTreeSet<FileKey>,
    /// The metadata server does not reach it.
    pub(super) is_apart: bool,
}

/// What a data server is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ask {
    Write { at: u64, value: u64 },
    Read { at: u64 },
    Sync,
    Cut { len_bytes: u64 },
    Unlink,
}

/// What it answers.
#[derive(Clone, Debug)]
pub(super) enum Told {
    Written(LaneState),
    Value(u64),
    /// With the errno of a sync that failed.
    Synced(LaneState, i32),
    Cut(LaneState),
    Unlinked,
    Fault(Fault),
}

impl DataServer {
    fn new(number: usize, checksums: bool, sabotage: Sabotage) -> DataServer {
        let disk = Forgetful::new(CAPACITY_BYTES);
        let identity = FolderIdentity { cluster: 1, store: 2 + number as u64, server: format!("data.{number}") };
        impresario_store::make_over(&disk, Path::new("disk"), &identity).expect("an empty disk");
        let mut server = DataServer {
            number,
            sabotage,
            checksums,
            disk,
            running: None,
            boots: 1,
            runs: 0,
            kill_after: None,
            syncs: 0,
            removed: BTreeSet::new(),
            is_apart: false,
        };
        server.start();
        server
    }

    pub(super) fn is_up(&self) -> bool {
        self.running.is_some()
    }

    /// Starts it, unless its disk keeps it from that.
    pub(super) fn start(&mut self) {
        if self.running.is_some() {
            return;
        }
        self.disk.mend();
        let options = StoreOptions {
            open_files: 2,
            checksums: Some(self.checksums),
            unsettled_blocks: 4,
            ..StoreOptions::default()
        };
        let name = format!("data.{}", self.number);
        let losses = Arc::new(Losses::default());
        let opened = ObjectStore::over(self.disk.clone(), Path::new("disk"), &name, options);
        let store = opened.expect("the disk is mended");
        let ledger = Ledger::open(&store, losses.clone()).expect("the disk is mended");
        self.running = Some(Running { store, losses, once: Once::default(), ledger });
        self.runs += 1;
    }

    pub(super) fn kill(&mut self) {
        (self.running, self.kill_after) = (None, None);
    }

    pub(super) fn kill_after(&mut self, changes: u32, down_us: u64) {
        self.kill_after = Some((changes, down_us));
    }

    pub(super) fn power_fails(&mut self, seed: u64) {
        self.kill();
        self.boots += 1;
        self.disk.fail_syncs(false);
        self.disk.crash_partly(seed);
    }

    fn state(&self, loss: u32) -> LaneState {
        let boots = if self.sabotage == Sabotage::HidesReboots { 1 } else { self.boots };
        LaneState::new(self.number as u16, boots << 32, loss)
    }

    /// Serves a request. `Err`: it was killed meanwhile, and is to be started again after so many µs.
    pub(super) fn serve(&mut self, who: Who, file: FileKey, ask: Ask) -> Result<Told, u64> {
        let Some(running) = self.running.take() else { return Err(0) };
        let killed = self.kill_after.take();
        if matches!(ask, Ask::Unlink) {
            self.removed.insert(file);
        }
        if let Some((after, _)) = killed {
            self.disk.stop_after(u64::from(after));
        }
        let told = self.served(&running, who, file, ask);
        if let Some((_, down_us)) = killed {
            drop(running);
            self.disk.mend();
            return Err(down_us);
        }
        self.running = Some(running);
        Ok(told)
    }

    fn served(&mut self, running: &Running, who: Who, file: FileKey, ask: Ask) -> Told {
        let Running { store, losses, once, ledger } = running;
        let known = (&**losses, once);
        let fault = |errno: i32| Told::Fault(Fault { errno, message: String::new() });
        let who = if self.sabotage == Sabotage::NoDataFence { Who { epoch: 0, ..who } } else { who };
        let _passing = match ledger.admit(store, who) {
            Ok(passing) => passing,
            Err(refusal) => return Told::Fault(refusal),
        };
        let origin = Origin::new(who, &[]);
        let origin = if self.sabotage == Sabotage::DoesCopiesAgain { Origin::default() } else { origin };
        match ask {
            Ask::Write { at, value } => {
                let bytes = value.to_le_bytes().repeat(STRIP_BYTES as usize / 8);
                match durability::write(store, known, file.0, at, &[(&origin, &bytes)]) {
                    Done::Written(written, None, loss) if written == STRIP_BYTES => Told::Written(self.state(loss)),
                    Done::Written(_, Some(error), _) => fault(errno_of(&error)),
                    _ => fault(libc::EIO),
                }
            }
            Ask::Read { at } => {
                let mut bytes = [0; STRIP_BYTES as usize];
                match store.read(file.0, at, &mut bytes) {
                    Ok(_) => Told::Value(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))),
                    Err(error) => fault(errno_of(&error)),
                }
            }
            Ask::Sync => {
                self.syncs += 1;
                let done = match self.sabotage {
                    Sabotage::SkipsSyncs if self.syncs.is_multiple_of(3) => Done::Barrier,
                    Sabotage::SwallowsErrors => {
                        let _ = store.sync(file.0);
                        Done::Barrier
                    }
                    _ => durability::sync(store, losses, file.0),
                };
                match done {
                    Done::AfterLoss(loss, errno) => Told::Synced(self.state(loss), errno),
                    _ => Told::Synced(self.state(0), 0),
                }
            }
            Ask::Cut { .. } if self.sabotage == Sabotage::SkipsCuts => Told::Cut(self.state(0)),
            Ask::Cut { len_bytes } => match durability::truncate(store, known, file.0, len_bytes, &origin) {
                Ok(Done::AfterLoss(loss, _)) => Told::Cut(self.state(loss)),
                Ok(_) => Told::Cut(self.state(0)),
                Err(error) => fault(errno_of(&error)),
            },
            Ask::Unlink if self.sabotage == Sabotage::NoRemovalMarks => {
                // What is written next is the same as to a new object.
                let cut = store.truncate(file.0, 0);
                let key = file.0;
                let removed =
                    impresario_store::FileSystem::unlink(&self.disk, &format!("objects/{:02x}/{key:016x}", key & 0xff));
                match cut.and(removed) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => fault(errno_of(&error)),
                    _ => Told::Unlinked,
                }
            }
            Ask::Unlink => match store.unlink(file.0) {
                Ok(()) => Told::Unlinked,
                Err(error) => fault(errno_of(&error)),
            },
        }
    }

    /// What a strip of an object holds at present, unless that is being removed.
    pub(super) fn value(&self, file: FileKey, at: u64) -> Option<u64> {
        use std::io::IoSliceMut;

        use impresario_store::FileSystem;

        if self.removed.contains(&file) {
            return None;
        }
        let path = format!("objects/{:02x}/{:016x}", file.0 & 0xff, file.0);
        let mut bytes = [0; 8];
        if let Ok(file) = self.disk.open(&path, false) {
            // Beyond the end there are zeros.
            let _ = self.disk.read(&file, at, &mut [IoSliceMut::new(&mut bytes)]);
        }
        Some(u64::from_le_bytes(bytes))
    }

    /// Whether there is an object of a file.
    pub(super) fn has(&self, file: FileKey) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| matches!(running.store.look(file.0), Ok(Some(_))))
    }
}

/// The data servers, and what the metadata server has sent them and is not there yet.
pub(super) struct Data {
    pub(super) servers: Vec<DataServer>,
    pub(super) late: Vec<LateCut>,
    /// Data servers that were killed by a call of the metadata server, to be started after so many µs.
    pub(super) killed: Vec<(usize, u64)>,
    mtime: i64,
}

/// The data servers as the metadata server sees them.
pub(super) struct Reached(pub(super) Mutex<Data>);

impl Reached {
    pub(super) fn new(checksums: bool, sabotage: Sabotage) -> Reached {
        let servers = (0..DATA_SERVERS).map(|number| DataServer::new(number, checksums, sabotage)).collect();
        Reached(Mutex::new(Data { servers, late: Vec::new(), killed: Vec::new(), mtime: 1 }))
    }
}

/// Who the metadata server is to the data servers where it speaks for itself.
fn own() -> Who {
    Who { client: impresario_wire::ClientKey(1), ..Who::default() }
}

impl Data {
    fn ask(&mut self, server: usize, who: Who, file: FileKey, ask: Ask) -> io::Result<Told> {
        let away = || io::Error::from_raw_os_error(Fault::PATH_LOST);
        let here = &mut self.servers[server];
        if here.is_apart || !here.is_up() {
            return Err(away());
        }
        match here.serve(who, file, ask) {
            Ok(Told::Fault(fault)) => Err(io::Error::from_raw_os_error(fault.errno)),
            Ok(told) => Ok(told),
            Err(down_us) => {
                self.killed.push((server, down_us));
                Err(away())
            }
        }
    }

    fn on_all(&mut self, who: Who, file: FileKey, layout: &Layout, ask: impl Fn(u16) -> Ask) -> io::Result<Vec<Told>> {
        // Each gets its part, whatever the others answer.
        let told: Vec<io::Result<Told>> = (0..layout.pcount)
            .map(|lane| self.ask(usize::from(layout.server_at(lane)), who, file, ask(lane)))
            .collect();
        told.into_iter().collect()
    }
}

fn states(told: Vec<Told>) -> Vec<LaneState> {
    let state = |told| match told {
        Told::Written(state) | Told::Synced(state, _) | Told::Cut(state) => Some(state),
        _ => None,
    };
    told.into_iter().filter_map(state).collect()
}

impl Objects for Reached {
    fn stat(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo> {
        let mut data = self.0.lock();
        data.mtime += 1;
        let mut info = ObjectInfo { mtime: Time { secs: data.mtime, nanos: 0 }, ..ObjectInfo::default() };
        for lane in 0..layout.pcount {
            let server = &data.servers[usize::from(layout.server_at(lane))];
            let running = server.running.as_ref().filter(|_| !server.is_apart);
            let running = running.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
            if let Some(state) = running.store.look_unless_removed(file.0)? {
                info.size = info.size.max(layout.file_len(lane, state.size));
                info.made |= 1 << lane;
            }
        }
        Ok(info)
    }

    fn truncate(&self, who: &Who, file: FileKey, layout: &Layout, len_bytes: u64) -> io::Result<Vec<LaneState>> {
        let mut data = self.0.lock();
        let cut = |lane| Ask::Cut { len_bytes: layout.lane_len(lane, len_bytes) };
        for lane in 0..layout.pcount {
            let server = usize::from(layout.server_at(lane));
            if data.servers[server].is_apart {
                let Ask::Cut { len_bytes } = cut(lane) else { continue };
                data.late.push(LateCut { server, who: *who, file, len_bytes });
            }
        }
        data.on_all(*who, file, layout, cut).map(states)
    }

    fn sync(&self, file: FileKey, layout: &Layout) -> io::Result<Vec<LaneState>> {
        self.0.lock().on_all(own(), file, layout, |_| Ask::Sync).map(states)
    }

    fn revoke(&self, who: &Who, file: FileKey, layout: &Layout) -> io::Result<()> {
        let newer = Who { epoch: who.epoch.saturating_add(1), ..*who };
        let mut data = self.0.lock();
        match data.on_all(newer, file, layout, |_| Ask::Sync) {
            Err(error) if error.raw_os_error() == Some(Fault::FENCED) => {
                data.on_all(own(), file, layout, |_| Ask::Sync).map(drop)
            }
            synced => synced.map(drop),
        }
    }

    fn fence(&self, who: &Who) -> io::Result<()> {
        let mut data = self.0.lock();
        for server in 0..DATA_SERVERS {
            match data.ask(server, *who, crate::meta::NO_FILE, Ask::Sync) {
                Err(error) if error.raw_os_error() != Some(Fault::FENCED) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn unlink(&self, files: &[(FileKey, Layout)]) -> Vec<io::Result<()>> {
        let mut data = self.0.lock();
        files.iter().map(|(file, layout)| data.on_all(own(), *file, layout, |_| Ask::Unlink).map(drop)).collect()
    }

    fn statfs(&self) -> io::Result<Statfs> {
        Ok(Statfs { total_bytes: 1 << 40, free_bytes: 1 << 39, files: 0, files_free: 0 })
    }
}

/// What becomes of the changes of the metadata server's disk.
struct MetaDisk {
    main: ThreadId,
    is_dead: AtomicBool,
    /// After so many more changes, a kill (with the time it is down, µs) or an errno.
    trouble: Mutex<Option<(u32, MetaTrouble)>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MetaTrouble {
    Killed { down_us: u64 },
    Fails { errno: i32 },
}

impl MetaDisk {
    fn fate(&self, step: &str) -> Fate {
        // Nothing of a dead process reaches the disk any more.
        if self.is_dead.load(Ordering::SeqCst) {
            return Fate::Fails(libc::EIO);
        }
        let mut trouble = self.trouble.lock();
        if std::thread::current().id() == self.main {
            match &mut *trouble {
                Some((0, MetaTrouble::Killed { .. })) => {
                    self.is_dead.store(true, Ordering::SeqCst);
                    return Fate::Fails(libc::EIO);
                }
                Some((0, MetaTrouble::Fails { errno })) => {
                    let errno = *errno;
                    *trouble = None;
                    return Fate::Fails(errno);
                }
                Some((left, _)) => *left -= 1,
                None => {}
            }
        }
        // The process is killed, not the machine.
        if step.starts_with("sync") { Fate::LeftOut } else { Fate::Done }
    }
}

/// The metadata server.
pub(super) struct MetaServer {
    dir: tempfile::TempDir,
    objects: Arc<Reached>,
    disk: Arc<MetaDisk>,
    pub(super) service: Option<MetaService>,
    /// How often it was started.
    pub(super) runs: u64,
    troubles: Vec<(u32, MetaTrouble)>,
}

impl MetaServer {
    pub(super) fn new(objects: Arc<Reached>) -> MetaServer {
        let main = std::thread::current().id();
        let disk = Arc::new(MetaDisk { main, is_dead: AtomicBool::default(), trouble: Mutex::default() });
        // In memory where that keeps extended attributes: a plan waits for nothing then.
        let takes = |dir: &tempfile::TempDir| {
            rustix::fs::setxattr(dir.path(), "user.a", b"", rustix::fs::XattrFlags::empty()).is_ok()
        };
        let in_memory = tempfile::tempdir_in("/dev/shm").ok().filter(takes);
        let dir = in_memory.unwrap_or_else(|| tempfile::tempdir().expect("a temporary folder"));
        let mut server = MetaServer { dir, objects, disk, service: None, runs: 0, troubles: Vec::new() };
        meta::make(server.dir.path(), ClusterId(1), &BTreeMap::new()).expect("an empty folder");
        server.start(None);
        server
    }

    /// Starts it; without grace at the end, when no client comes back.
    pub(super) fn start(&mut self, grace: Option<Duration>) {
        if self.service.is_some() {
            return;
        }
        self.disk.is_dead.store(false, Ordering::SeqCst);
        *self.disk.trouble.lock() = None;
        let disk = self.disk.clone();
        let hook: StepHook = Arc::new(move |step| disk.fate(step));
        let options = MetaOptions::new(self.dir.path(), DATA_SERVERS as u16);
        let grace = grace.unwrap_or(options.grace);
        let options = MetaOptions { before_step: Some(hook), grace, ..options };
        self.service = Some(MetaService::open(options, self.objects.clone()).expect("the server starts"));
        self.runs += 1;
        self.idle();
    }

    pub(super) fn trouble(&mut self, after: u32, trouble: MetaTrouble) {
        self.troubles.push((after, trouble));
    }

    pub(super) fn kill(&mut self) {
        self.service = None;
    }

    pub(super) fn idle(&self) {
        let is_idle = self.service.as_ref().is_none_or(|service| service.wait_idle(Duration::from_secs(60)));
        assert!(is_idle, "background work does not end");
    }

    /// Does something with the server. `Err`: it was killed meanwhile, and is to be started again after so many µs.
    pub(super) fn serve<T>(&mut self, call: impl FnOnce(&MetaService) -> T) -> Result<T, u64> {
        let Some(service) = &self.service else { return Err(0) };
        *self.disk.trouble.lock() = self.troubles.first().copied();
        let told = call(service);
        self.idle();
        let left = self.disk.trouble.lock().take();
        let had = !self.troubles.is_empty();
        if self.disk.is_dead.load(Ordering::SeqCst) {
            self.troubles.remove(0);
            self.service = None;
            return Err(match left {
                Some((_, MetaTrouble::Killed { down_us })) => down_us,
                _ => 0,
            });
        }
        if left.is_none() && had {
            self.troubles.remove(0);
        }
        Ok(told)
    }
}
