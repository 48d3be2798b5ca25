//! Every sync of the metadata server is needed: without any one of them a power failure loses something that was promised. The
//! names of the steps are those of the sources, so a new sync needs a scenario here.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Debug;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_server::meta::{self, Fate, MemoryObjects, MetaOptions, StepHook};
use impresario_testing::power::{Disk, sync_steps};
use impresario_wire::message::*;
use impresario_wire::{FileLock, LockAnswer, LockCall, LockSaid, LockWish};
use tempfile::TempDir;

/// They sync the names at the top of the metadata folder.
const OF_THE_TOP: [&str; 3] = ["sync_lockers", "sync_place_of_changes", "sync_place_of_small_file"];
/// Of the offline check, which a power failure makes begin again.
const OF_THE_CHECK: [&str; 2] = ["sync_corrected", "sync_struck"];

/// How often a power failure without a sync may lose nothing before the sync counts as needless.
const TRIES: usize = 3;

/// What the metadata folder is on.
#[derive(Clone, Copy)]
enum Medium {
    /// ext4, which keeps the order of changes.
    Ordered,
    /// btrfs, which does not, but makes the name of a new or renamed file durable with the file.
    Unordered,
    /// One that does neither, as POSIX allows. There is none at hand.
    Nameless,
}

enum Storage {
    Disk(Disk),
    Nameless(Arc<Nameless>),
}

/// A metadata folder at the top of which a power failure leaves the names of the last sync, and what they named; what the files
/// and directories hold is durable at once.
struct Nameless {
    dir: TempDir,
    /// Each name, and the number of what it named.
    durable: Mutex<BTreeMap<OsString, u64>>,
}

impl Nameless {
    fn new() -> Nameless {
        let made = Nameless { dir: tempfile::tempdir().unwrap(), durable: Mutex::default() };
        meta::make(&made.folder().join("meta"), ClusterId(1), &BTreeMap::new()).unwrap();
        std::fs::create_dir(made.kept()).unwrap();
        made.sync();
        made
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// Where the files stay that a power failure may bring back, each by its number.
    fn kept(&self) -> PathBuf {
        self.dir.path().join("kept")
    }

    fn names(&self) -> BTreeMap<OsString, u64> {
        let entries = std::fs::read_dir(self.folder().join("meta")).unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().ino())).collect()
    }

    /// The top is synced.
    fn sync(&self) {
        let names = self.names();
        for (name, number) in &names {
            let (file, kept) = (self.folder().join("meta").join(name), self.kept().join(number.to_string()));
            if file.is_file() && !kept.exists() {
                std::fs::hard_link(file, kept).unwrap();
            }
        }
        *self.durable.lock().unwrap() = names;
    }

    /// The power has failed when these names were durable.
    fn fall_back(&self, durable: &BTreeMap<OsString, u64>) {
        let top = self.folder().join("meta");
        for (name, number) in self.names() {
            if durable.get(&name) != Some(&number) {
                let path = top.join(name);
                if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.unwrap();
            }
        }
        let now = self.names();
        for (name, number) in durable.iter().filter(|(name, _)| !now.contains_key(*name)) {
            std::fs::hard_link(self.kept().join(number.to_string()), top.join(name)).unwrap();
        }
        self.sync();
    }
}

impl Storage {
    fn of(medium: Medium) -> Option<Storage> {
        match medium {
            Medium::Ordered => Disk::new().map(Storage::Disk),
            Medium::Unordered => Disk::without_order().map(Storage::Disk),
            Medium::Nameless => Some(Storage::Nameless(Arc::new(Nameless::new()))),
        }
    }

    fn folder(&self) -> PathBuf {
        match self {
            Storage::Disk(disk) => disk.folder(),
            Storage::Nameless(top) => top.folder(),
        }
    }
}

/// A machine with the metadata server; the data servers are others, and lose nothing.
struct Machine {
    storage: Storage,
    objects: Arc<MemoryObjects>,
    lease: Duration,
    left_out: Option<&'static str>,
    made: Arc<Mutex<BTreeSet<&'static str>>>,
}

impl Machine {
    fn folder(&self) -> PathBuf {
        self.storage.folder().join("meta")
    }

    fn start(&self) -> Server {
        self.try_start().unwrap()
    }

    fn try_start(&self) -> Result<Server, meta::StartError> {
        let (left_out, made) = (self.left_out, self.made.clone());
        let top = if let Storage::Nameless(top) = &self.storage { Some(top.clone()) } else { None };
        let hook: StepHook = Arc::new(move |step| {
            if step.starts_with("sync") {
                made.lock().unwrap().insert(step);
            }
            if left_out == Some(step) {
                return Fate::LeftOut;
            }
            top.iter().filter(|_| OF_THE_TOP.contains(&step)).for_each(|top| top.sync());
            Fate::Done
        });
        let options = MetaOptions { before_step: Some(hook), lock_lease: self.lease, ..options(&self.folder()) };
        try_start_with(options, self.objects.clone())
    }

    /// Started again after a power failure. An error: what it needs for that is lost.
    fn fails(self, server: Server) -> Result<(Machine, Server), String> {
        let storage = match self.storage {
            Storage::Disk(disk) => {
                let after = disk.after_power_failure();
                drop(server);
                Storage::Disk(after)
            }
            Storage::Nameless(top) => {
                let durable = top.durable.lock().unwrap().clone();
                drop(server);
                top.fall_back(&durable);
                Storage::Nameless(top)
            }
        };
        let machine = Machine { storage, ..self };
        let started = machine.try_start().map_err(|error| error.to_string())?;
        Ok((machine, started))
    }
}

fn who(client: u64, epoch: u32, sequence: u64) -> Who {
    Who { client: ClientKey(client), epoch, since: epoch, sequence, ..Who::default() }
}

/// What an earlier run or the start may have left unsynced is synced, and all names so far.
fn settle_down(server: &Server) {
    server.done(MetaCall::FsyncDir { path: path("") });
}

/// What a power failure has left of what was promised. All else that goes wrong in a scenario is a panic, and shows no loss.
type Kept = Result<(), String>;

fn kept<T: PartialEq + Debug>(left: T, promised: T) -> Kept {
    if left == promised { Ok(()) } else { Err(format!("{left:?} is left of {promised:?}")) }
}

/// None where there is no such directory.
fn names_below(server: &Server, directory: &str) -> Vec<String> {
    let is_there = matches!(server.call(MetaCall::GetAttr { target: at(directory) }), Answer::Attr(_));
    if is_there { server.names(directory) } else { Vec::new() }
}

fn attributes_of_a_synced_file(machine: Machine) -> Kept {
    let server = machine.start();
    server.file("f", 100);
    settle_down(&server);
    let opened = server.open("f", false);
    server.set(at("f"), SetAttr { mode: Some(0o600), ..SetAttr::default() });
    server.done(MetaCall::Fsync { handle: opened.handle });
    let (_machine, server) = machine.fails(server)?;
    kept(server.stat("f").mode, 0o600)
}

fn names_in_a_synced_directory(machine: Machine) -> Kept {
    let server = machine.start();
    settle_down(&server);
    server.mkdir("d");
    server.done(MetaCall::FsyncDir { path: path("") });
    let (_machine, server) = machine.fails(server)?;
    kept(server.names(""), vec!["d".into()])
}

fn names_of_a_synced_file_whose_directory_moved(machine: Machine) -> Kept {
    let server = machine.start();
    server.mkdir("d");
    server.file("d/f", 10);
    settle_down(&server);
    let opened = server.open("d/f", false);
    server.done(rename("d", "e"));
    server.done(MetaCall::Fsync { handle: opened.handle });
    let (_machine, server) = machine.fails(server)?;
    kept((server.names(""), names_below(&server, "e")), (vec!["e".into()], vec!["f".into()]))
}

fn the_size_of_a_file_that_is_written(machine: Machine) -> Kept {
    let server = machine.start();
    server.file("f", 100);
    settle_down(&server);
    let opened = server.open("f", true);
    server.write(&opened, 0, 70_000);
    let (_machine, server) = machine.fails(server)?;
    kept(server.stat("f").size, 70_000)
}

fn a_removed_file_stays_removed(machine: Machine) -> Kept {
    let server = machine.start();
    server.file("f", 100);
    settle_down(&server);
    server.done(unlink("f"));
    server.quiet();
    assert!(machine.objects.files().is_empty());
    let (_machine, server) = machine.fails(server)?;
    kept(server.names(""), Vec::new()) // or a name without its data
}

fn no_key_is_given_twice(machine: Machine) -> Kept {
    let server = machine.start();
    let key = server.file("f", 100).file;
    settle_down(&server);
    let (_machine, server) = machine.fails(server)?;
    kept(server.file("g", 100).file == key, false)
}

fn what_was_given_up_is_refused(machine: Machine) -> Kept {
    let server = machine.start();
    settle_down(&server);
    let mkdir = |name: &str| MetaCall::Mkdir { path: path(name), mode: 0o755, uid: 0, gid: 0 };
    server.service.call_from(server.session, who(7, 4, 1), mkdir("d"));
    server.done(MetaCall::FsyncDir { path: path("") });
    let (_machine, server) = machine.fails(server)?;
    let late = server.service.call_from(server.session, who(7, 3, 2), mkdir("late"));
    kept(matches!(late, Answer::Fault(Fault { errno: Fault::FENCED, .. })), true)
}

/// Its notes are in the file that the start has put in the place of the last run's.
fn what_was_given_up_to_a_restarted_server_is_refused(machine: Machine) -> Kept {
    drop(machine.start());
    what_was_given_up_is_refused(machine)
}

fn what_was_given_up_is_refused_by_the_run_after_the_next(machine: Machine) -> Kept {
    let server = machine.start();
    let mkdir = |name: &str| MetaCall::Mkdir { path: path(name), mode: 0o755, uid: 0, gid: 0 };
    server.service.call_from(server.session, who(7, 4, 1), mkdir("d"));
    server.done(MetaCall::FsyncDir { path: path("") });
    drop(server);
    let server = machine.start();
    let (_machine, server) = machine.fails(server)?;
    let late = server.service.call_from(server.session, who(7, 3, 2), mkdir("late"));
    kept(matches!(late, Answer::Fault(Fault { errno: Fault::FENCED, .. })), true)
}

const LOCK: FileLock = FileLock { owner: 1, pid: 2, start: 0, end: 9, exclusive: true };

fn ask(server: &Server, client: u64, epoch: u32, lease: u64, wish: LockWish) -> LockAnswer {
    match server.service.call_from(server.session, who(client, epoch, 1), MetaCall::Lock(LockCall { lease, wish })) {
        Answer::Lock(answer) => answer,
        other => panic!("{other:?}"),
    }
}

fn set(file: u64) -> LockWish {
    LockWish::Set { file: FileKey(file), lock: LOCK, wait: true }
}

fn a_locked_range_stays_locked(machine: Machine) -> Kept {
    let server = machine.start();
    settle_down(&server);
    let answer = ask(&server, 7, 1, 0, set(1));
    assert!(matches!(answer.said, LockSaid::Granted { .. }), "{answer:?}");
    let (_machine, server) = machine.fails(server)?;
    let other = ask(&server, 8, 1, 0, set(1));
    kept(other.said, LockSaid::Later) // until its holder has been asked
}

fn a_lock_that_went_to_another_is_not_restored(machine: Machine) -> Kept {
    let machine = Machine { lease: Duration::from_millis(300), ..machine };
    let server = machine.start();
    let lease = ask(&server, 7, 1, 0, set(1)).lease;
    let mut other = ask(&server, 8, 1, 0, set(2));
    settle_down(&server);
    let began = Instant::now();
    loop {
        other = ask(&server, 8, 1, other.lease, set(1));
        if matches!(other.said, LockSaid::Granted { .. }) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{other:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Time enough to ask.
    let (_machine, server) = Machine { lease: Duration::from_secs(20), ..machine }.fails(server)?;
    let restore = LockWish::Restore { file: FileKey(1), owner: 1, locks: vec![LOCK] };
    // In an epoch that it has begun since, as one that was fenced does.
    let said = ask(&server, 7, 1 << 20, lease, restore).said;
    kept(said, LockSaid::Lost) // or two have one lock
}

fn the_size_of_a_file_that_was_closed(machine: Machine) -> Kept {
    let server = machine.start();
    for name in ["f", "other"] {
        server.file(name, 100);
    }
    settle_down(&server);
    let opened = server.open("f", true);
    server.write(&opened, 0, 70_000);
    server.close(opened);
    server.quiet();
    // This makes a mark durable, and that the other one is removed.
    let _ = server.open("other", true);
    let (_machine, server) = machine.fails(server)?;
    kept(server.stat("f").size, 70_000)
}

/// A directory above one of the names has moved, and is not above the other.
fn all_names_of_a_synced_file(machine: Machine) -> Kept {
    let server = machine.start();
    for name in ["d", "up", "up/e"] {
        server.mkdir(name);
    }
    server.file("d/f", 10);
    server.done(link("d/f", "up/e/g"));
    for directory in ["d", "up/e"] {
        server.done(MetaCall::FsyncDir { path: path(directory) });
    }
    server.done(rename("up/e", "up/h"));
    let opened = server.open("d/f", false);
    server.done(MetaCall::Fsync { handle: opened.handle });
    let (_machine, server) = machine.fails(server)?;
    kept((server.names("d"), names_below(&server, "up/h")), (vec!["f".into()], vec!["g".into()]))
}

/// The file is lost, and its data are not: they are on the data servers.
fn no_key_of_a_lost_file_is_given_again(machine: Machine) -> Kept {
    let server = machine.start();
    let key = server.file("f", 100).file;
    let (_machine, server) = machine.fails(server)?;
    kept(server.file("g", 100).file == key, false)
}

type Scenario = fn(Machine) -> Kept;

/// Each sync, what is lost without it, and the file system on which it is.
const SCENARIOS: &[(&str, Scenario, Medium)] = &[
    ("sync", attributes_of_a_synced_file, Medium::Unordered),
    ("sync_all_names", all_names_of_a_synced_file, Medium::Unordered),
    ("sync_all_removals", a_removed_file_stays_removed, Medium::Unordered),
    ("sync_changes", what_was_given_up_is_refused, Medium::Ordered),
    ("sync_directory", names_in_a_synced_directory, Medium::Ordered),
    ("sync_end_of_lease", a_lock_that_went_to_another_is_not_restored, Medium::Ordered),
    ("sync_lease", a_locked_range_stays_locked, Medium::Ordered),
    ("sync_lockers", a_locked_range_stays_locked, Medium::Nameless),
    ("sync_mark", the_size_of_a_file_that_is_written, Medium::Ordered),
    ("sync_moved_names", names_of_a_synced_file_whose_directory_moved, Medium::Ordered),
    ("sync_new_changes", what_was_given_up_is_refused_by_the_run_after_the_next, Medium::Ordered),
    ("sync_place_of_changes", what_was_given_up_to_a_restarted_server_is_refused, Medium::Nameless),
    ("sync_place_of_small_file", no_key_of_a_lost_file_is_given_again, Medium::Ordered),
    ("sync_removals", a_removed_file_stays_removed, Medium::Ordered),
    ("sync_settled", the_size_of_a_file_that_was_closed, Medium::Unordered),
    ("sync_small_file", no_key_is_given_twice, Medium::Ordered),
];

#[test]
fn every_sync_is_needed() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/meta");
    let known: BTreeSet<String> =
        SCENARIOS.iter().map(|(step, ..)| *step).chain(OF_THE_CHECK).map(String::from).collect();
    assert_eq!(sync_steps(&sources), known, "a sync without a scenario");
    let (made, mut needless) = (Arc::new(Mutex::new(BTreeSet::new())), Vec::new());
    let machine = |medium: Medium, left_out| {
        let storage = Storage::of(medium)?;
        Some(Machine { storage, objects: Arc::default(), lease: Duration::from_secs(20), left_out, made: made.clone() })
    };
    let mut lacking = false;
    for (step, scenario, medium) in SCENARIOS {
        let Some(whole) = machine(*medium, None) else {
            lacking = true;
            continue;
        };
        scenario(whole).unwrap_or_else(|lost| panic!("{step}: lost with every sync: {lost}"));
        // On a busy machine another sync, of the server's own or of the whole machine, may come between and keep by chance
        // what is to be lost: then nothing is shown.
        let is_lost = || {
            let without = machine(*medium, Some(*step)).expect("a machine as before");
            scenario(without).is_err()
        };
        match (0..TRIES).any(|_| is_lost()) {
            true => println!("{step}: needed"),
            false => needless.push(*step),
        }
    }
    assert!(needless.is_empty(), "nothing is lost without {needless:?}");
    let made = made.lock().unwrap();
    assert!(lacking || SCENARIOS.iter().all(|(step, ..)| made.contains(step)), "{made:?}");
}
