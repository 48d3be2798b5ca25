//! `fsck`: every kind of damage is found, what is safe is repaired, and nothing that clients do is taken for damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::Cluster;
use impresario_base::Random;
use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_config::MovesTo;
use impresario_server::Started;
use impresario_server::fsck::{self, Finding, Kind, Options, Outcome, Report};
use impresario_store::{Arrived, Departed, FolderState, ObjectStore, StoreOptions, examine, make};

const OFFLINE: Options = Options { online: false, repair: false, delete_orphans: false, min_age: Duration::ZERO };
const REPAIR: Options = Options { repair: true, ..OFFLINE };
const ONLINE: Options = Options { online: true, ..OFFLINE };

/// A cluster that can be stopped and started as a whole.
struct Bed {
    cluster: Cluster,
    meta: Option<Started>,
}

impl Bed {
    fn start(servers: usize) -> Bed {
        let mut bed = Bed { cluster: Cluster::start(servers, |_| {}), meta: None };
        bed.start_meta();
        bed
    }

    fn start_meta(&mut self) {
        let meta = impresario_server::start(&self.cluster.config, "meta").unwrap();
        self.meta = Some(meta);
    }

    fn client(&self) -> Arc<Client> {
        Client::connect(&self.cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap()
    }

    /// Files of some lengths in two directories, over all servers; then everything stops.
    fn stopped_with_files(servers: usize) -> Bed {
        let mut bed = Bed::start(servers);
        let client = bed.client();
        client.mkdir("d", 0o755, 0, 0).unwrap();
        for (path, len) in FILES {
            let file = client.create(path, CreateOptions::default()).unwrap();
            file.write_at(&content(path, len), 0).unwrap();
            file.sync().unwrap();
            file.close().unwrap();
        }
        client.create("empty", CreateOptions::default()).unwrap().close().unwrap();
        drop(client);
        bed.stop();
        bed
    }

    fn stop(&mut self) {
        self.meta = None;
        (0..self.cluster.config.data.len()).for_each(|i| self.cluster.stop_data(i));
    }

    fn start_again(&mut self) {
        (0..self.cluster.config.data.len()).for_each(|i| self.cluster.start_data(i));
        self.start_meta();
    }

    fn check(&self, options: &Options) -> Report {
        fsck::run(&self.cluster.config, options, &mut |_| {})
    }

    #[track_caller]
    fn assert_clean(&self, options: &Options) {
        let report = self.check(options);
        assert!(report.status() == 0 && report.findings.is_empty(), "{}", report.text());
        assert_eq!((report.files, report.directories), (FILES.len() as u64 + 1, 2));
    }

    fn assert_readable(&mut self) {
        self.start_again();
        let client = self.client();
        for (path, len) in FILES {
            let file = client.open(path, false).unwrap();
            let mut read = vec![0; len + 1];
            assert_eq!(file.read_at(&mut read, 0).unwrap(), len, "{path}");
            assert_eq!(&read[..len], content(path, len), "{path}");
        }
        drop(client);
        self.stop();
    }

    fn name(&self, path: &str) -> PathBuf {
        self.cluster.config.meta.dir.join("names").join(path)
    }

    /// Key of a file, out of its record.
    fn key(&self, path: &str) -> u64 {
        let record = xattr::get(self.name(path), "user.impresario.file").unwrap().unwrap();
        u64::from_le_bytes(record[16..24].try_into().unwrap())
    }

    fn object(&self, server: usize, key: u64) -> PathBuf {
        self.cluster.config.data[server].dir.join(format!("objects/{:02x}/{key:016x}", key & 0xff))
    }
}

const FILES: [(&str, usize); 4] = [("a", 300_000), ("b", 1), ("d/c", 70_000), ("d/e", 200_001)];

fn content(path: &str, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ path.bytes().last().unwrap()).collect()
}

#[track_caller]
fn only(report: &Report, kind: Kind, outcome: Outcome) -> Finding {
    match report.findings.as_slice() {
        [finding] if (finding.kind, finding.outcome) == (kind, outcome) => finding.clone(),
        _ => panic!("{}", report.text()),
    }
}

#[test]
fn objects_without_a_file_are_set_aside_or_removed() {
    let mut bed = Bed::stopped_with_files(2);
    bed.assert_clean(&OFFLINE);
    for delete_orphans in [false, true] {
        let key = bed.key("a") + 1000 + u64::from(delete_orphans);
        let orphan = bed.object(1, key);
        fs::write(&orphan, "whose?").unwrap();
        let found = bed.check(&OFFLINE);
        let finding = only(&found, Kind::Orphan, Outcome::Repairable);
        assert_eq!(
            (finding.key, finding.server.as_deref(), found.status()),
            (Some(key), Some(&*bed.cluster.config.data[1].name), 4)
        );
        let young = Options { min_age: Duration::from_secs(3600), ..REPAIR };
        assert_eq!((bed.check(&young).young, orphan.exists()), (1, true));
        let repaired = bed.check(&Options { delete_orphans, ..REPAIR });
        only(&repaired, Kind::Orphan, Outcome::Repaired);
        assert!(repaired.status() == 1 && !orphan.exists());
        let aside = bed.cluster.config.data[1].dir.join(format!("set-aside/{key:016x}"));
        assert_eq!(fs::read(aside).ok(), (!delete_orphans).then(|| b"whose?".to_vec()));
        bed.assert_clean(&OFFLINE);
    }
    bed.assert_readable();
}

/// A folder that is being filled is beside its server's own, and one that it has moved to is in its place; the folders of the
/// others are theirs all the same.
#[test]
fn a_server_that_moves_is_checked_where_it_serves_from() {
    let mut bed = Bed::stopped_with_files(3);
    let of = |server: usize| bed.cluster.config.data[server].clone();
    let (first, dir) = (of(0), of(0).dir.with_file_name("moved.0"));
    let address = "127.0.0.1:1".to_string();
    let FolderState::Made(identity) = examine(&first.dir).unwrap() else { panic!("{first:?}") };
    make(&dir, &identity).unwrap();
    bed.cluster.config.data[0].moves_to = Some(MovesTo { address: address.clone(), dir: dir.clone() });
    bed.assert_clean(&OFFLINE);
    fs::remove_dir_all(&dir).unwrap();
    assert!(std::process::Command::new("cp").arg("-a").args([&first.dir, &dir]).status().unwrap().success());
    let open = |dir: &Path| ObjectStore::open(dir, &first.name, StoreOptions::default()).unwrap();
    open(&first.dir).depart(&Departed { number: 1, address: address.clone() }).unwrap();
    let there = open(&dir);
    fs::write(dir.join("arriving"), "").unwrap();
    there.arrive(&Arrived { address, boot: (1, 1) }).unwrap();
    drop(there);
    bed.assert_clean(&OFFLINE);
}

#[test]
fn a_lost_object_is_told_by_path_and_nothing_is_touched() {
    let mut bed = Bed::stopped_with_files(2);
    let object = bed.object(1, bed.key("d/e"));
    let kept = fs::read(&object).unwrap();
    fs::remove_file(&object).unwrap();
    for options in [OFFLINE, REPAIR] {
        let report = bed.check(&options);
        let finding = only(&report, Kind::Missing, Outcome::Left);
        assert_eq!((finding.path.as_deref(), report.status()), (Some("d/e"), 4));
        assert!(finding.what.contains(&bed.cluster.config.data[1].name), "{}", finding.what);
    }
    fs::write(&object, kept).unwrap();
    bed.assert_clean(&OFFLINE);
    bed.assert_readable();
}

#[test]
fn a_length_is_taken_from_the_objects_unless_that_cuts_the_file() {
    let mut bed = Bed::stopped_with_files(2);
    let set_len = |path: PathBuf, len| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
    set_len(bed.name("a"), 5);
    set_len(bed.name("b"), 100);
    let report = bed.check(&REPAIR);
    assert_eq!(report.status(), 5, "{}", report.text());
    let outcome =
        |path: &str| report.findings.iter().find(|f| f.path.as_deref() == Some(path)).map(|f| (f.kind, f.outcome));
    assert_eq!(outcome("a"), Some((Kind::Size, Outcome::Repaired)));
    assert_eq!(outcome("b"), Some((Kind::Size, Outcome::Left)));
    set_len(bed.name("b"), 1);
    bed.assert_clean(&OFFLINE);
    bed.assert_readable();
}

#[test]
fn removals_and_writes_that_were_begun_are_finished() {
    let mut bed = Bed::stopped_with_files(2);
    let meta = bed.cluster.config.meta.dir.clone();
    let (removed, written, half) = (bed.key("d/c"), bed.key("b"), bed.key("a"));
    let kept = content("d/c", 70_000);
    fs::rename(bed.name("d/c"), meta.join(format!("orphans/{removed:016x}"))).unwrap();
    fs::hard_link(bed.name("b"), meta.join(format!("writers/{written:016x}"))).unwrap();
    // Its removal had not come so far that it lost its name.
    fs::hard_link(bed.name("a"), meta.join(format!("orphans/{half:016x}"))).unwrap();
    let found = bed.check(&OFFLINE);
    assert!(found.status() == 0 && found.findings.len() == 3, "{}", found.text());
    let repaired = bed.check(&REPAIR);
    assert!(
        repaired.status() == 1 && repaired.findings.iter().all(|f| f.outcome == Outcome::Repaired),
        "{}",
        repaired.text()
    );
    assert!(!bed.object(0, removed).exists() && !bed.object(1, removed).exists());
    for folder in ["orphans", "writers"] {
        assert_eq!(fs::read_dir(meta.join(folder)).unwrap().count(), 0);
    }
    assert_eq!(bed.check(&OFFLINE).findings, []);
    bed.start_again();
    let file = bed.client().create("d/c", CreateOptions::default()).unwrap();
    file.write_at(&kept, 0).unwrap();
    file.close().unwrap();
    bed.stop();
    bed.assert_readable();
}

#[test]
fn what_is_not_the_clusters_own_is_told_and_left() {
    let bed = Bed::stopped_with_files(2);
    let data = bed.cluster.config.data[0].dir.clone();
    for (place, kind) in [
        (data.join("letter.txt"), Kind::ForeignFile),
        (data.join("objects/00/letter.txt"), Kind::ForeignFile),
        (data.join("objects/07/1234560000000007"), Kind::ForeignObject),
        (bed.cluster.config.meta.dir.join("orphans/letter.txt"), Kind::ForeignFile),
        (bed.name("d/letter.txt"), Kind::Record),
    ] {
        fs::write(&place, "dear").unwrap();
        let report = bed.check(&REPAIR);
        assert_eq!(report.findings.len(), 1, "{}: {}", place.display(), report.text());
        let finding = only(&report, kind, Outcome::Left);
        assert_eq!(report.status(), 4, "{finding:?}");
        assert_eq!(fs::read(&place).unwrap(), b"dear");
        fs::remove_file(&place).unwrap();
        assert_eq!(bed.check(&OFFLINE).status(), 0);
    }
}

/// Whose objects are they? As long as that is not known, none is taken for an orphan.
#[test]
fn with_an_unreadable_record_nothing_is_moved() {
    let mut bed = Bed::stopped_with_files(2);
    let (record, key) = (xattr::get(bed.name("a"), "user.impresario.file").unwrap().unwrap(), bed.key("a"));
    xattr::set(bed.name("a"), "user.impresario.file", b"garbage").unwrap();
    let report = bed.check(&Options { delete_orphans: true, ..REPAIR });
    assert!(report.status() == 4 && report.findings.iter().all(|f| f.outcome == Outcome::Left), "{}", report.text());
    assert!(report.findings.iter().any(|f| f.kind == Kind::Record && f.path.as_deref() == Some("a")));
    assert!(bed.object(0, key).exists() && bed.object(1, key).exists());
    xattr::set(bed.name("a"), "user.impresario.file", &record).unwrap();
    bed.assert_clean(&OFFLINE);
    bed.assert_readable();
}

/// Nor is what seems to have lost its last name removed, as a copy without extended attributes may have left it.
#[test]
fn with_a_missing_record_no_removal_is_finished() {
    let mut bed = Bed::stopped_with_files(2);
    let meta = bed.cluster.config.meta.dir.clone();
    let hidden = [("d/c", "orphans"), ("d/e", "writers")].map(|(path, folder)| {
        let (name, key) = (bed.name(path), bed.key(path));
        let other = meta.join(format!("{folder}/{key:016x}"));
        fs::rename(&name, &other).unwrap();
        fs::copy(&other, &name).unwrap();
        (name, other, key)
    });
    let report = bed.check(&Options { delete_orphans: true, ..REPAIR });
    assert!(report.findings.iter().all(|f| f.outcome != Outcome::Repaired), "{}", report.text());
    for (kind, (_, _, key)) in [Kind::Removal, Kind::Mark].into_iter().zip(&hidden) {
        let is_told =
            |f: &Finding| f.kind == kind && f.key == Some(*key) && f.what.contains("missing or cannot be read");
        assert!(report.findings.iter().any(is_told), "{}", report.text());
        assert!(bed.object(0, *key).exists() && bed.object(1, *key).exists());
    }
    for (name, other, _) in &hidden {
        fs::rename(other, name).unwrap();
    }
    bed.assert_clean(&OFFLINE);
    bed.assert_readable();
}

#[test]
fn folders_that_cannot_be_checked_are_named_with_the_remedy() {
    let mut bed = Bed::stopped_with_files(2);
    let (first, second) = (bed.cluster.config.data[0].dir.clone(), bed.cluster.config.data[1].dir.clone());
    // One is not there: nothing is said of its objects, and nothing that rests on them is repaired.
    fs::rename(&second, second.with_extension("away")).unwrap();
    let report = bed.check(&REPAIR);
    assert!(report.status() == 8 && report.findings.is_empty(), "{}", report.text());
    assert!(report.unchecked[0].contains("not on this machine"), "{:?}", report.unchecked);
    // They were swapped.
    fs::rename(&first, &second).unwrap();
    fs::rename(second.with_extension("away"), &first).unwrap();
    let report = bed.check(&REPAIR);
    assert_eq!(report.findings.iter().filter(|f| f.kind == Kind::Identity).count(), 2, "{}", report.text());
    fs::rename(&first, second.with_extension("away")).unwrap();
    fs::rename(&second, &first).unwrap();
    fs::rename(second.with_extension("away"), &second).unwrap();
    // Servers hold them.
    bed.start_again();
    let report = bed.check(&REPAIR);
    assert_eq!((report.status(), report.unchecked.len()), (8, 3), "{}", report.text());
    assert!(report.unchecked.iter().all(|why| why.contains("in use") && why.contains("--online")), "{}", report.text());
    // They do not answer.
    bed.cluster.stop_data(1);
    let report = bed.check(&ONLINE);
    assert!(report.status() == 8 && report.findings.is_empty(), "{}", report.text());
    bed.meta = None;
    let report = bed.check(&ONLINE);
    assert!(report.status() == 8 && report.text().contains("without --online"), "{}", report.text());
}

#[test]
fn any_damage_is_found_and_a_second_run_finds_only_what_is_lost() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let mut bed = Bed::stopped_with_files(3);
        let mut damaged: BTreeMap<&str, ()> = BTreeMap::new();
        let (mut orphans, mut sizes, mut lost) = (0, 0, 0);
        for n in 0..1 + random.below(6) {
            let (path, len) = FILES[random.below(FILES.len() as u64) as usize];
            let server = random.below(3) as usize;
            match random.below(3) {
                0 => {
                    let key = bed.key("a") + 1000 + n;
                    fs::write(bed.object(server, key), vec![7; random.below(100_000) as usize]).unwrap();
                    orphans += 1;
                }
                1 if !damaged.contains_key(path) => {
                    let name = fs::OpenOptions::new().write(true).open(bed.name(path)).unwrap();
                    name.set_len(random.below(len as u64)).unwrap();
                    damaged.insert(path, ());
                    sizes += 1;
                }
                2 if !damaged.contains_key(path) => {
                    let object = bed.object(server, bed.key(path));
                    if object.exists() {
                        fs::remove_file(object).unwrap();
                        damaged.insert(path, ());
                        lost += 1;
                    }
                }
                _ => {}
            }
        }
        let count = |report: &Report, kind| report.findings.iter().filter(|f| f.kind == kind).count();
        let found = bed.check(&OFFLINE);
        let counts = (count(&found, Kind::Orphan), count(&found, Kind::Size), count(&found, Kind::Missing));
        assert_eq!(counts, (orphans, sizes, lost), "seed {seed}: {}", found.text());
        assert_eq!(found.findings.len(), orphans + sizes + lost);
        let repaired = bed.check(&REPAIR);
        assert_eq!(repaired.status(), u8::from(orphans + sizes > 0) | u8::from(lost > 0) << 2, "seed {seed}");
        let again = bed.check(&REPAIR);
        assert_eq!((again.findings.len(), count(&again, Kind::Missing)), (lost, lost), "seed {seed}: {}", again.text());
        if lost == 0 {
            bed.assert_readable();
        }
    }
}

#[test]
fn running_servers_are_checked_and_repaired_too() {
    let mut bed = Bed::stopped_with_files(2);
    let key = bed.key("a") + 1000;
    let lost = bed.object(1, bed.key("d/e"));
    fs::write(bed.object(0, key), "whose?").unwrap();
    fs::OpenOptions::new().write(true).open(bed.name("a")).unwrap().set_len(5).unwrap();
    fs::remove_file(&lost).unwrap();
    bed.start_again();
    let found = bed.check(&ONLINE);
    assert!(found.status() == 4 && found.findings.len() == 3, "{}", found.text());
    let repaired = bed.check(&Options { repair: true, ..ONLINE });
    assert!(repaired.status() == 5 && repaired.findings.len() == 3, "{}", repaired.text());
    assert!(bed.cluster.config.data[0].dir.join(format!("set-aside/{key:016x}")).exists());
    assert_eq!(bed.client().stat("a").unwrap().size, 300_000);
    only(&bed.check(&ONLINE), Kind::Missing, Outcome::Left);
}

#[test]
fn names_of_a_file_are_counted() {
    let mut bed = Bed::stopped_with_files(2);
    bed.start_again();
    let client = bed.client();
    client.link("a", "d/a too").unwrap();
    client.link("a", "third").unwrap();
    client.link("b", "d/b too").unwrap();
    drop(client);
    bed.assert_clean(&ONLINE);
    bed.stop();
    bed.assert_clean(&OFFLINE);

    // A name that a stopped removal left.
    let (meta, half) = (bed.cluster.config.meta.dir.clone(), bed.key("a"));
    fs::hard_link(bed.name("a"), meta.join(format!("orphans/{half:016x}"))).unwrap();
    only(&bed.check(&REPAIR), Kind::Removal, Outcome::Repaired);
    bed.assert_clean(&OFFLINE);

    // A copy of the metadata folder, made of hard links.
    let copy = meta.with_file_name("copy");
    fs::hard_link(bed.name("a"), &copy).unwrap();
    let found = only(&bed.check(&REPAIR), Kind::Links, Outcome::Left);
    assert!(found.what.contains("link count is 4, but it has 3 names"), "{}", found.what);
    bed.start_again();
    only(&bed.check(&ONLINE), Kind::Links, Outcome::Left);
    bed.stop();
    fs::remove_file(copy).unwrap();
    bed.assert_clean(&OFFLINE);
    bed.assert_readable();
}

/// Creates, writes, truncates, renames (over others, too), links, unlinks, and moves directories, on several threads, while the
/// cluster is checked and repaired again and again.
#[test]
fn nothing_that_clients_do_is_taken_for_damage() {
    const THREADS: u64 = 4;
    const CHECKS: usize = 25;
    let bed = Bed::start(3);
    let client = bed.client();
    for directory in 0..8 {
        client.mkdir(format!("d{directory}"), 0o755, 0, 0).unwrap();
    }
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let config = bed.cluster.config.clone();
    let work = |thread: u64| {
        let options = ClientOptions { via: Via::Direct, ..Default::default() };
        let (client, mut random) = (Client::connect(&config, options).unwrap(), Random::new(thread));
        while !stop.load(Ordering::Relaxed) {
            let mut path = || format!("d{}/f{}", random.below(8), random.below(12));
            let (path, other) = (path(), path());
            // Another thread may be faster: whether each call succeeds is of no interest here.
            match random.below(11) {
                0..3 => {
                    if let Ok(file) = client.create(&path, CreateOptions::default()) {
                        let _ = file.write_at(&vec![1; random.below(200_000) as usize], random.below(100_000));
                        let _ = file.close();
                    }
                }
                3 => drop(client.set_attr(
                    &path,
                    impresario_wire::SetAttr { size: Some(random.below(300_000)), ..Default::default() },
                )),
                4..7 => drop(client.rename(&path, &other, false)),
                7 if thread == 0 && random.below(20) == 0 => {
                    let (from, to) = (format!("d{}", random.below(8)), "moved");
                    if client.rename(&from, to, true).is_ok() {
                        client.rename(to, &from, true).unwrap();
                    }
                }
                7 => drop(client.link(&path, &other)),
                _ => drop(client.unlink(&path)),
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| {
            drop(scope.spawn({
                let work = &work;
                move || work(thread)
            }))
        });
        let checks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for check in 0..CHECKS {
                let report = bed.check(&Options { repair: true, ..ONLINE });
                let bad: Vec<_> = report.findings.iter().filter(|f| f.outcome != Outcome::Noted).collect();
                assert!(bad.is_empty() && report.unchecked.is_empty(), "check {check}: {}", report.text());
            }
        }));
        stop.store(true, Ordering::Relaxed);
        checks.unwrap();
    });
    assert!(done.load(Ordering::Relaxed) > 100, "{done:?} operations");
    let report = bed.check(&ONLINE);
    assert_eq!(report.status(), 0, "{}", report.text());
}

/// A copy of the folder of a metadata server that does not run.
struct MetaCopy {
    dir: PathBuf,
    copy: PathBuf,
}

impl MetaCopy {
    fn of(bed: &Bed) -> MetaCopy {
        let dir = bed.cluster.config.meta.dir.clone();
        let copy = dir.with_extension("copy");
        copy_folder(&dir, &copy);
        MetaCopy { dir, copy }
    }

    fn put_back(&self) {
        fs::remove_dir_all(&self.dir).unwrap();
        copy_folder(&self.copy, &self.dir);
    }
}

fn copy_folder(from: &Path, to: &Path) {
    assert!(std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
}

/// New files would get the keys of files that were made after the copy, and with them their objects.
#[test]
fn a_metadata_folder_from_an_older_copy_gives_no_key_twice() {
    let mut bed = Bed::start(2);
    bed.stop();
    let copy = MetaCopy::of(&bed);
    let write = |bed: &Bed, bytes: &[u8]| {
        let client = bed.client();
        for path in ["a", "b", "c"] {
            let file = client.create(path, CreateOptions::default()).unwrap();
            file.write_at(bytes, 0).unwrap();
            file.close().unwrap();
        }
        client
    };
    bed.start_again();
    drop(write(&bed, &[7; 300_000]));
    bed.stop();
    copy.put_back();
    let has = |report: &Report, kind, outcome| report.findings.iter().any(|f| (f.kind, f.outcome) == (kind, outcome));
    let found = bed.check(&OFFLINE);
    assert!(has(&found, Kind::Keys, Outcome::Repairable) && found.status() == 4, "{}", found.text());
    let repaired = bed.check(&REPAIR);
    assert!(has(&repaired, Kind::Keys, Outcome::Repaired) && repaired.status() == 1, "{}", repaired.text());
    let again = bed.check(&OFFLINE);
    assert!(again.findings.is_empty(), "{}", again.text());
    bed.start_again();
    let client = write(&bed, b"new");
    for path in ["a", "b", "c"] {
        let mut read = [0; 100];
        let len = client.open(path, false).unwrap().read_at(&mut read, 0).unwrap();
        assert_eq!(&read[..len], b"new", "{path}");
    }
}

/// A count of keys that was cut off is a smaller one: the server must not go by it, and the check counts them anew.
#[test]
fn a_damaged_count_of_keys_is_counted_anew() {
    let mut bed = Bed::start(2);
    // Empty files have no objects that would tell.
    let make = |bed: &Bed, name: String| {
        let file = bed.client().create(&name, CreateOptions::default()).unwrap();
        let key = file.key();
        file.close().unwrap();
        key
    };
    let before: Vec<_> = (0..5).map(|n| make(&bed, format!("before{n}"))).collect();
    bed.stop();
    let keys = bed.cluster.config.meta.dir.join("keys");
    let whole = fs::read_to_string(&keys).unwrap();
    fs::write(&keys, &whole[..1]).unwrap();
    let refused = impresario_server::process::start(&bed.cluster.config, "meta").err().unwrap().to_string();
    assert!(refused.contains("it is damaged") && refused.contains("impresario fsck --repair"), "{refused}");
    let has = |report: &Report, outcome| report.findings.iter().any(|f| (f.kind, f.outcome) == (Kind::Keys, outcome));
    let found = bed.check(&OFFLINE);
    assert!(has(&found, Outcome::Repairable) && found.status() == 4, "{}", found.text());
    assert_eq!(fs::read_to_string(&keys).unwrap(), whole[..1], "a check changes nothing");
    let repaired = bed.check(&REPAIR);
    assert!(has(&repaired, Outcome::Repaired) && repaired.status() == 1, "{}", repaired.text());
    assert!(bed.check(&OFFLINE).findings.is_empty());
    bed.start_again();
    let after: Vec<_> = (0..5).map(|n| make(&bed, format!("after{n}"))).collect();
    assert!(after.iter().min() > before.iter().max(), "{before:?} {after:?}");
}

/// A client with a file open that the metadata folder does not have any more, since an older copy of it was put back, hears so at
/// once: what it writes would be lost.
#[test]
fn an_open_file_that_a_restored_folder_does_not_have_is_stale() {
    let mut bed = Bed::start(2);
    bed.stop();
    let copy = MetaCopy::of(&bed);
    bed.start_again();
    bed.cluster.config.cluster.request_timeout_ms = 60_000;
    let client = bed.client();
    let file = client.create("new", CreateOptions::default()).unwrap();
    file.write_at(&[7; 300_000], 0).unwrap();
    file.sync().unwrap();
    bed.meta = None;
    copy.put_back();
    bed.start_meta();
    let began = std::time::Instant::now();
    let error = file.write_at(&[8; 1000], 0).unwrap_err();
    assert_eq!(error.errno(), libc::ESTALE, "{error}");
    assert_eq!(file.sync().unwrap_err().errno(), libc::ESTALE);
    assert_eq!(file.attr().unwrap_err().errno(), libc::ESTALE);
    // Not when the time for an answer is over.
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
}
