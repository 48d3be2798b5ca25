//! Checksums against a model: every bit that rots is found, and nothing else is taken for damage, whatever crashes and
//! fails.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::path::Path;
use std::time::Duration;

use impresario_store::testing::Forgetful;
use impresario_store::{BLOCK_BYTES, FolderIdentity, ObjectStore, StoreError, StoreOptions, make, make_over};
use proptest::prelude::*;

/// Fewer handles than keys, and less room for checksums than the steps may leave.
fn options(checksums: Option<bool>) -> StoreOptions {
    StoreOptions { open_files: 2, checksums, unsettled_blocks: 24, ..StoreOptions::default() }
}

fn identity() -> FolderIdentity {
    FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }
}

fn open(fs: &Forgetful, checksums: Option<bool>) -> ObjectStore<Forgetful> {
    let name = Path::new("forgetful");
    match make_over(fs, name, &identity()) {
        Ok(()) | Err(StoreError::Made { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    ObjectStore::over(fs.clone(), name, "data.0", options(checksums)).unwrap()
}

fn over(fs: &Forgetful) -> ObjectStore<Forgetful> {
    open(fs, Some(true))
}

fn path(key: u64) -> String {
    format!("objects/{:02x}/{key:016x}", key & 0xff)
}

fn write(store: &ObjectStore<Forgetful>, key: u64, offset: u64, bytes: &[u8]) {
    assert_eq!(store.write_vectored(key, offset, &[IoSlice::new(bytes)]).unwrap(), bytes.len());
}

/// Nothing of an object that was removed.
fn content(store: &ObjectStore<Forgetful>, key: u64) -> io::Result<Vec<u8>> {
    let mut buf = vec![0xee; 300_000];
    let len = match store.read(key, 0, &mut buf) {
        Err(error) if error.raw_os_error() == Some(libc::EIDRM) => 0,
        read => read?,
    };
    buf.truncate(len);
    Ok(buf)
}

/// Content that differs by byte and by step, and is never 0.
fn pattern(len: usize, fill: u8) -> Vec<u8> {
    (0..len).map(|i| ((i as u8).wrapping_mul(31) ^ fill) | 1).collect()
}

/// Scrubs an object; gives where it is damaged.
fn scrub(store: &ObjectStore<Forgetful>, key: u64) -> Vec<u64> {
    let (mut at, mut corrupt) = (0, Vec::new());
    while let Some(found) = store.scrub(key, at, 3 * BLOCK_BYTES).unwrap() {
        corrupt.extend(found.corrupt);
        match found.next {
            Some(next) => at = next,
            None => break,
        }
    }
    corrupt
}

/// A bit rots, is found by a read of that byte and by a scrub, and is put right again.
fn is_found(fs: &Forgetful, store: &ObjectStore<Forgetful>, key: u64, at: u64) -> Result<(), TestCaseError> {
    prop_assert!(fs.rot(&path(key), at, 0x40));
    let mut byte = [0];
    let error = store.read(key, at, &mut byte);
    prop_assert!(error.is_err(), "byte {} of object {:x} rots unseen", at, key);
    let message = error.unwrap_err().to_string();
    let block = at / BLOCK_BYTES * BLOCK_BYTES;
    let wanted = format!("data.0: object {key:016x} is damaged at byte {block}:");
    prop_assert!(message.starts_with(&wanted), "{}", message);
    prop_assert!(store.read_cached(key, at, &mut byte).is_none(), "memory is no way round");
    prop_assert_eq!(scrub(store, key), vec![block]);
    prop_assert!(fs.rot(&path(key), at, 0x40));
    prop_assert!(store.read(key, at, &mut byte).is_ok());
    Ok(())
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        key: u64,
        offset: u64,
        lens: Vec<usize>,
        fill: u8,
    },
    Truncate {
        key: u64,
        len: u64,
    },
    /// Zeroed, with storage or without.
    Zero {
        key: u64,
        offset: u64,
        len: u64,
        stored: bool,
    },
    Unlink {
        key: u64,
    },
    Sync {
        key: u64,
    },
    SettleAll,
    Scrub {
        key: u64,
    },
    /// A byte of an object, in thousandths of its length.
    Rot {
        key: u64,
        place: u64,
    },
    /// The server is killed; the machine goes on.
    Kill,
    Crash {
        seed: Option<u64>,
    },
    /// After so many more changes nothing works, until the crash that follows the first error.
    StopAfter {
        changes: u64,
        seed: u64,
    },
    SyncsFail {
        fail: bool,
    },
}

fn any_step() -> impl Strategy<Value = Step> {
    let key = || 1u64..4;
    let offset = || prop_oneof![0u64..64, 0u64..40_000, (0u64..10).prop_map(|block| block * BLOCK_BYTES)];
    let lens = || prop_oneof![prop::collection::vec(0usize..6000, 1..4), (1usize..6).prop_map(|n| vec![n * 4096])];
    prop_oneof![
        8 => (key(), offset(), lens(), any::<u8>())
            .prop_map(|(key, offset, lens, fill)| Step::Write { key, offset, lens, fill }),
        2 => (key(), 0u64..50_000).prop_map(|(key, len)| Step::Truncate { key, len }),
        2 => (key(), offset(), 0u64..20_000, any::<bool>())
            .prop_map(|(key, offset, len, stored)| Step::Zero { key, offset, len, stored }),
        1 => (2u64..4).prop_map(|key| Step::Unlink { key }),
        4 => key().prop_map(|key| Step::Sync { key }),
        1 => Just(Step::SettleAll),
        1 => key().prop_map(|key| Step::Scrub { key }),
        3 => (key(), 0u64..1000).prop_map(|(key, place)| Step::Rot { key, place }),
        1 => Just(Step::Kill),
        1 => prop::option::of(any::<u64>()).prop_map(|seed| Step::Crash { seed }),
        1 => (0u64..12, any::<u64>()).prop_map(|(changes, seed)| Step::StopAfter { changes, seed }),
        1 => any::<bool>().prop_map(|fail| Step::SyncsFail { fail }),
    ]
}

/// What the store must hold and know.
#[derive(Default)]
struct Model {
    objects: BTreeMap<u64, Vec<u8>>,
    removed: BTreeSet<u64>,
    /// Content at the last sync of objects that did not change since.
    settled: BTreeMap<u64, Vec<u8>>,
    /// A sync failed: what is known of them is not said here.
    doubtful: BTreeSet<u64>,
    /// The server was killed, with checksums in its memory: what they were of is checked again after a scrub.
    unlearnt: BTreeSet<u64>,
}

impl Model {
    fn write(&mut self, key: u64, offset: u64, bytes: &[u8]) {
        let object = self.objects.entry(key).or_default();
        let at = offset as usize;
        object.resize(object.len().max(at + bytes.len()), 0);
        object[at..at + bytes.len()].copy_from_slice(bytes);
        self.settled.remove(&key);
    }

    /// After a crash: what was settled is there, damage to it is found, and nothing looks damaged that is not.
    fn after_crash(&mut self, fs: &Forgetful, store: &ObjectStore<Forgetful>) -> Result<(), TestCaseError> {
        for key in 1..4 {
            let found = content(store, key);
            prop_assert!(found.is_ok(), "a false alarm after a crash: {:?}", found);
            let found = found.unwrap();
            if let Some(wanted) = self.settled.get(&key) {
                prop_assert_eq!(&found, wanted);
                for at in (0..found.len() as u64).step_by(3001).filter(|at| found[*at as usize] != 0) {
                    is_found(fs, store, key, at)?;
                }
            }
            prop_assert_eq!(scrub(store, key), Vec::<u64>::new());
            self.objects.insert(key, found);
        }
        self.unlearnt.clear();
        Ok(())
    }
}

fn run(steps: &[Step]) -> Result<(), TestCaseError> {
    let fs = Forgetful::default();
    let mut store = over(&fs);
    let mut model = Model::default();
    let mut stopping: Option<u64> = None;
    for step in steps {
        let done: io::Result<()> = match step {
            Step::Write { key, .. } if model.removed.contains(key) => Ok(()),
            Step::Write { key, offset, lens, fill } => {
                let bytes = pattern(lens.iter().sum(), *fill);
                let mut rest = &bytes[..];
                let slices: Vec<IoSlice<'_>> =
                    lens.iter().map(|&len| IoSlice::new(rest.split_off(..len).unwrap())).collect();
                let written = store.write_vectored(*key, *offset, &slices);
                if !bytes.is_empty() {
                    let len = written.as_ref().map_or_else(|error| error.written, |len| *len);
                    model.settled.remove(key);
                    if len > 0 {
                        model.write(*key, *offset, &bytes[..len]);
                    }
                }
                let mut relieved = Ok(());
                store.relieve(|key, error| {
                    model.doubtful.insert(key);
                    model.settled.remove(&key);
                    relieved = Err(error);
                });
                written.map(drop).map_err(io::Error::from).and(relieved)
            }
            Step::Truncate { key, .. } if model.removed.contains(key) => Ok(()),
            Step::Truncate { key, len } => {
                model.settled.remove(key);
                store.truncate(*key, *len).map(|()| {
                    if *len > 0 || model.objects.contains_key(key) {
                        model.objects.entry(*key).or_default().resize(*len as usize, 0);
                    }
                })
            }
            Step::Zero { key, .. } if model.removed.contains(key) => Ok(()),
            Step::Zero { key, offset, len, stored } => {
                model.settled.remove(key);
                let (start, end) = (*offset as usize, (offset + len) as usize);
                let done = match stored {
                    false => store.punch(*key, *offset..offset + len),
                    true => store.zero(*key, *offset..offset + len, true),
                };
                done.map(|()| {
                    if let Some(object) = model.objects.get_mut(key) {
                        let within = start.min(object.len())..end.min(object.len());
                        object[within].fill(0);
                    }
                })
            }
            Step::Unlink { key } => {
                model.settled.remove(key);
                model.removed.insert(*key);
                model.objects.remove(key);
                store.unlink(*key)
            }
            Step::Sync { key } => {
                let failures = store.checks().unwrap().failures;
                let synced = store.sync(*key);
                let is_stored = store.checks().unwrap().failures == failures;
                match &synced {
                    Ok(())
                        if is_stored
                            && ![&model.doubtful, &model.unlearnt, &model.removed]
                                .iter()
                                .any(|set| set.contains(key)) =>
                    {
                        model.settled.insert(*key, model.objects.get(key).cloned().unwrap_or_default());
                    }
                    Ok(()) => drop(model.settled.remove(key)),
                    Err(_) => {
                        model.doubtful.insert(*key);
                        model.settled.remove(key);
                    }
                }
                synced
            }
            Step::SettleAll => {
                let mut failed = Ok(());
                store.settle_older(Duration::ZERO, |key, error| {
                    model.doubtful.insert(key);
                    model.settled.remove(&key);
                    failed = Err(error);
                });
                failed
            }
            Step::Scrub { key } => {
                prop_assert_eq!(scrub(&store, *key), Vec::<u64>::new());
                model.unlearnt.remove(key);
                Ok(())
            }
            Step::Rot { key, place } => {
                let object = model.objects.get(key).map_or(&[][..], |object| object);
                let at = object.len() as u64 * place / 1000;
                if stopping.is_none()
                    && !model.doubtful.contains(key)
                    && object.get(at as usize).is_some_and(|b| *b != 0)
                {
                    // Blocks of which nothing is known, after a crash, are known from now on.
                    prop_assert_eq!(scrub(&store, *key), Vec::<u64>::new());
                    is_found(&fs, &store, *key, at)?;
                }
                Ok(())
            }
            Step::Kill if stopping.is_none() => {
                fs.fail_syncs(false);
                store = over(&fs);
                model.unlearnt.extend((1..4).filter(|key| !model.settled.contains_key(key)));
                Ok(())
            }
            Step::Kill => Ok(()),
            Step::Crash { seed: None } => {
                fs.crash();
                Err(io::Error::other("crash"))
            }
            Step::Crash { seed: Some(seed) } => {
                fs.crash_partly(*seed);
                Err(io::Error::other("crash"))
            }
            Step::StopAfter { changes, seed } => {
                fs.stop_after(*changes);
                stopping = Some(*seed);
                Ok(())
            }
            Step::SyncsFail { fail } => {
                fs.fail_syncs(*fail);
                // A writer may find that a sync of what it needs for itself fails.
                if *fail {
                    model.doubtful = (1..4).collect();
                    model.settled.clear();
                }
                Ok(())
            }
        };
        let is_crash = matches!(step, Step::Crash { .. });
        if is_crash || (done.is_err() && stopping.is_some()) {
            if let (false, Some(seed)) = (is_crash, stopping) {
                fs.crash_partly(seed);
            }
            stopping = None;
            fs.fail_syncs(false);
            store = over(&fs);
            model.after_crash(&fs, &store)?;
            continue;
        }
        // A write at a damaged edge would be an error, too.
        let syncs_fail = !model.doubtful.is_empty();
        prop_assert!(done.is_ok() || syncs_fail, "{:?}: {:?}", step, done);
        if stopping.is_none() {
            for key in 1..4 {
                let found = content(&store, key);
                prop_assert!(found.is_ok(), "a false alarm: {:?}", found);
                let wanted = model.objects.get(&key).cloned().unwrap_or_default();
                prop_assert_eq!(found.unwrap(), wanted, "object {}", key);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_rots_is_found_and_nothing_else(steps in prop::collection::vec(any_step(), 1..60)) {
        run(&steps)?;
    }
}

#[test]
fn what_was_synced_is_checked_after_a_crash_and_a_write_unsettles_its_own_blocks_only() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, &pattern(10 * 4096, 7));
    store.sync(1).unwrap();
    // Not synced, and lost or not.
    write(&store, 1, 5 * 4096 + 100, &pattern(50, 9));
    for seed in 0..20 {
        fs.crash_partly(seed);
        let store = over(&fs);
        content(&store, 1).unwrap();
        for block in (0..10).filter(|block| *block != 5) {
            is_found(&fs, &store, 1, block * 4096 + 17).unwrap();
        }
    }
}

/// Whole blocks of object 1, written again until that is taken.
fn write_until_taken(store: &ObjectStore<Forgetful>, blocks: usize, fill: u8) {
    let bytes = pattern(blocks * 4096, fill);
    let is_taken = (0..3).any(|_| store.write_vectored(1, 0, &[IoSlice::new(&bytes)]).is_ok());
    assert!(is_taken, "the device works again");
}

/// How a device does not take that checksums were cleared.
#[derive(Clone, Copy, Debug)]
enum Untaken {
    /// The sync fails, and then a further change.
    Sync,
    /// The sync fails, and the server is killed before it can note anything.
    SyncOfKilled,
    /// The server is killed before it syncs; the system writes what it left, and fails.
    InBackground,
    /// The server is killed before it syncs; the sync of the next one fails.
    SyncOfNext,
}

/// Checksums were cleared in memory, and the device has them still: they do not count for what is written then.
#[test]
fn checksums_that_a_device_has_kept_are_no_damage() {
    // Of all blocks, by cutting the file of the checksums, and of one, by zeros.
    for (blocks, untaken) in [1, 3].into_iter().flat_map(|blocks| {
        [Untaken::Sync, Untaken::SyncOfKilled, Untaken::InBackground, Untaken::SyncOfNext].map(|how| (blocks, how))
    }) {
        for (changes, seed) in (0..6).flat_map(|changes| (0..12).map(move |seed| (changes, seed))) {
            let fs = Forgetful::default();
            let mut store = over(&fs);
            write(&store, 1, 0, &pattern(3 * 4096, 7));
            store.sync(1).unwrap();
            fs.fail_syncs(matches!(untaken, Untaken::Sync | Untaken::SyncOfKilled));
            match untaken {
                Untaken::Sync => fs.fail_after(changes, libc::EIO, false),
                _ => fs.stop_after(changes),
            }
            let cut = store.write_vectored(1, 0, &[IoSlice::new(&pattern(blocks * 4096, 8))]);
            fs.mend();
            fs.fail_syncs(false);
            if !matches!(untaken, Untaken::Sync) {
                store = over(&fs);
            }
            match untaken {
                Untaken::InBackground => fs.write_back(seed, true),
                Untaken::SyncOfNext => {
                    fs.fail_syncs(true);
                    let _ = store.write_vectored(1, 0, &[IoSlice::new(&pattern(blocks * 4096, 9))]);
                    fs.fail_syncs(false);
                }
                _ => {}
            }
            write_until_taken(&store, blocks, 10);
            fs.crash_partly(seed);
            let found = content(&over(&fs), 1);
            assert!(found.is_ok(), "{untaken:?} after {changes} changes, {cut:?}, seed {seed}: {found:?}");
        }
    }
}

/// A power failure has lost an object and kept its checksums, and what is done about these fails or is interrupted.
#[test]
fn checksums_of_a_lost_object_do_not_count_although_the_device_keeps_them() {
    let mut met = 0;
    for (seed, changes) in (0..100).flat_map(|seed| (0..5).map(move |changes| (seed, changes))) {
        for is_killed in [false, true] {
            let fs = Forgetful::default();
            let store = over(&fs);
            write(&store, 1, 0, &pattern(4096, 7));
            store.settle_older(Duration::ZERO, |key, error| panic!("{key}: {error}"));
            fs.crash_partly(seed);
            let is_there = |path: &str| impresario_store::FileSystem::stat_name(&fs, path).is_ok_and(|it| it.size > 0);
            if is_there(&path(1)) || !is_there(&format!("{}.sums", path(1))) {
                continue;
            }
            met += 1;
            let mut store = over(&fs);
            match is_killed {
                true => fs.stop_after(changes),
                false => fs.fail_after(changes, libc::EIO, false),
            }
            let _ = store.write_vectored(1, 0, &[IoSlice::new(&pattern(4096, 8))]);
            fs.mend();
            if is_killed {
                store = over(&fs);
            }
            write_until_taken(&store, 1, 9);
            for crash in 0..12 {
                let fs = fs.copied();
                fs.crash_partly(crash);
                let found = content(&over(&fs), 1);
                assert!(found.is_ok(), "after {changes} changes, killed {is_killed}, seeds {seed}, {crash}: {found:?}");
            }
        }
    }
    assert!(met > 50, "{met}");
}

#[test]
fn a_lost_end_is_damage() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, &pattern(3 * 4096, 7));
    store.sync(1).unwrap();
    drop(store);
    // Something else cuts the object.
    let plain = open(&fs, None);
    assert!(plain.checks().is_some(), "as found");
    let file = impresario_store::FileSystem::open(&fs, &path(1), false).unwrap();
    impresario_store::FileSystem::set_len(&fs, &file, 4096).unwrap();
    let store = over(&fs);
    assert_eq!(store.read(1, 0, &mut [0; 4096]).unwrap(), 4096);
    assert!(store.read(1, 0, &mut [0; 3 * 4096]).is_err());
    assert_eq!(scrub(&store, 1), [4096, 8192]);
}

#[test]
fn what_was_written_without_checksums_is_no_damage_and_is_learnt() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, &pattern(4 * 4096, 7));
    store.sync(1).unwrap();
    drop(store);
    let without = open(&fs, Some(false));
    assert!(without.checks().is_none());
    write(&without, 1, 0, &pattern(2 * 4096, 8));
    without.sync(1).unwrap();
    drop(without);
    assert!(open(&fs, None).checks().is_none(), "as found");
    for seed in 0..10 {
        let store = over(&fs);
        content(&store, 1).unwrap();
        let found = store.scrub(1, 0, 1 << 20).unwrap().unwrap();
        assert_eq!((found.learnt_blocks + found.good_blocks, found.corrupt.len()), (4, 0), "{found:?}");
        is_found(&fs, &store, 1, 4096).unwrap();
        fs.crash_partly(seed);
    }
    let store = over(&fs);
    scrub(&store, 1);
    store.sync(1).unwrap();
    fs.crash();
    let found = over(&fs).scrub(1, 0, 1 << 20).unwrap().unwrap();
    assert_eq!((found.good_blocks, found.next, found.read_bytes), (4, None, 4 * 4096));
}

#[test]
fn a_write_into_a_damaged_block_does_not_hide_the_damage_and_a_whole_block_mends_it() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, &pattern(3 * 4096, 7));
    store.sync(1).unwrap();
    assert!(fs.rot(&path(1), 5000, 1));
    let error = store.write_vectored(1, 4096, &[IoSlice::new(b"part")]).unwrap_err();
    assert_eq!((error.written, error.source.to_string().contains("damaged at byte 4096")), (0, true));
    assert!(store.truncate(1, 6000).is_err());
    assert_eq!(store.read(1, 0, &mut [0; 4096]).unwrap(), 4096, "other blocks are read as ever");
    assert_eq!(store.checks().unwrap().corrupt_blocks, 2);
    let lines = impresario_testing::logged(|| {
        (0..1000).for_each(|_| assert!(store.read(1, 4096, &mut [0; 4096]).is_err()));
    });
    assert!(lines.is_empty(), "it was said before; {} lines: {:?}", lines.len(), lines.first());
    assert_eq!(store.checks().unwrap().corrupt_blocks, 1002);
    write(&store, 1, 4096, &pattern(4096, 3));
    assert_eq!(content(&store, 1).unwrap().len(), 3 * 4096);
}

#[test]
fn checksums_in_memory_are_bounded() {
    let fs = Forgetful::default();
    let store = over(&fs);
    for round in 0..50 {
        write(&store, 1 + round % 3, round * 4096, &pattern(4096, round as u8));
        store.relieve(|key, error| panic!("{key}: {error}"));
        assert!(store.checks().unwrap().unsettled_blocks <= 24 + 1);
    }
    store.settle_older(Duration::ZERO, |key, error| panic!("{key}: {error}"));
    assert_eq!(store.checks().unwrap().unsettled_blocks, 0);
    store.sync(1).unwrap();
    fs.crash();
    assert_eq!(content(&over(&fs), 1).unwrap().len(), 49 * 4096);
}

#[test]
fn on_a_real_file_system_damage_of_a_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    make(dir.path(), &identity()).unwrap();
    let open = || ObjectStore::open(dir.path(), "data.0", options(Some(true))).unwrap();
    let store = open();
    let bytes = pattern(300_000, 5);
    store.write_vectored(7, 0, &[IoSlice::new(&bytes)]).unwrap();
    store.sync(7).unwrap();
    drop(store);
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join(path(7))).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", 200_000).unwrap();
    let store = open();
    let mut buf = vec![0; 300_000];
    assert!(store.read(7, 0, &mut buf).unwrap_err().to_string().contains("damaged at byte 196608"));
    assert_eq!(store.read(7, 1, &mut buf[..196_000]).unwrap(), 196_000);
    assert_eq!(buf[..196_000], bytes[1..196_001]);
    let page = store.page(0, 10).unwrap();
    assert_eq!((page.objects.len(), page.foreign.len()), (1, 0), "checksums are no objects");
    store.unlink(7).unwrap();
    assert!(!dir.path().join(path(7) + ".sums").exists());
}

/// A file of 64 TiB with a few blocks is looked through in a few steps, and damage of these is found.
#[test]
fn holes_are_passed_over() {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    make(dir.path(), &identity()).unwrap();
    for checksums in [None, Some(true)] {
        let store = ObjectStore::open(dir.path(), "data.0", options(checksums)).unwrap();
        let far = 6 << 40;
        store.write_vectored(1, 5000, &[IoSlice::new(&pattern(100, 1))]).unwrap();
        store.write_vectored(1, far, &[IoSlice::new(&pattern(5000, 2))]).unwrap();
        store.truncate(1, far + (1 << 40)).unwrap();
        store.sync(1).unwrap();
        let scrub = || {
            let (mut at, mut steps, mut corrupt, mut read_bytes) = (Some(0), 0, Vec::new(), 0);
            while let Some(offset) = at {
                let found = store.scrub(1, offset, 1 << 20).unwrap().unwrap();
                corrupt.extend(found.corrupt);
                (at, read_bytes) = (found.next, read_bytes + found.read_bytes);
                steps += 1;
                assert!(steps < 100, "{offset}");
            }
            (corrupt, read_bytes)
        };
        let (corrupt, read_bytes) = scrub();
        assert!(corrupt.is_empty() && read_bytes >= 5100, "{corrupt:?}, {read_bytes} bytes");
        if checksums.is_some() {
            let object = std::fs::OpenOptions::new().write(true).open(dir.path().join(path(1))).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&object, &[0xee], far + 4097).unwrap();
            assert_eq!(scrub().0, [far + 4096]);
        }
        drop(store);
    }
}

#[test]
fn readers_beside_writers_never_see_damage() {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    make(dir.path(), &identity()).unwrap();
    let store = ObjectStore::open(dir.path(), "data.0", options(Some(true))).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..2u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..400u64 {
                    let at = (round * 1777 + writer * 900) % 30_000;
                    store.write_vectored(1, at, &[IoSlice::new(&pattern(2500, round as u8))]).unwrap();
                    if round % 16 == writer {
                        store.sync(1).unwrap();
                    }
                    if round % 50 == 49 {
                        store.truncate(1, 20_000).unwrap();
                    }
                }
            });
        }
        for reader in 0..2u64 {
            let store = &store;
            scope.spawn(move || {
                let mut buf = vec![0; 9000];
                for round in 0..800u64 {
                    let at = (round * 1313 + reader * 77) % 28_000;
                    store.read(1, at, &mut buf).unwrap();
                    if let Some(read) = store.read_cached(1, at, &mut buf) {
                        read.unwrap();
                    }
                    if round % 40 == 0 {
                        assert_eq!(store.scrub(1, 0, 1 << 20).unwrap().map_or(0, |found| found.corrupt.len()), 0);
                    }
                }
            });
        }
    });
    assert_eq!(store.checks().unwrap().corrupt_blocks, 0);
}
