//! The store against a reference model, over the local file system and over one that forgets.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use impresario_base::page_cache::mapped_pages;
use impresario_store::testing::Forgetful;
use impresario_store::{
    FileSystem, FolderIdentity, FolderState, ObjectStore, Real, StoreError, StoreOptions, adopt, examine, make,
    make_over,
};
use proptest::prelude::*;

/// Fewer handles than keys, so that handles are evicted and opened again.
const FEW: StoreOptions =
    StoreOptions { open_files: 2, removed_keys: 1 << 18, checksums: None, unsettled_blocks: 1 << 20 };

/// In memory where possible: many short runs need not wait for a device each time.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn identity() -> FolderIdentity {
    FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }
}

/// Opens the directory of `data.0`, made if need be.
fn open(dir: &Path) -> ObjectStore {
    if examine(dir).unwrap() == FolderState::Blank {
        make(dir, &identity()).unwrap();
    }
    ObjectStore::open(dir, "data.0", FEW).unwrap()
}

fn refused(dir: &Path) -> StoreError {
    ObjectStore::open(dir, "data.0", FEW).err().unwrap()
}

fn start(fs: &Forgetful) -> Result<ObjectStore<Forgetful>, StoreError> {
    let name = Path::new("forgetful");
    match make_over(fs, name, &identity()) {
        Ok(()) | Err(StoreError::Made { .. }) => ObjectStore::over(fs.clone(), name, "data.0", FEW),
        Err(error) => Err(error),
    }
}

fn over(fs: &Forgetful) -> ObjectStore<Forgetful> {
    start(fs).unwrap()
}

fn write<F: FileSystem>(store: &ObjectStore<F>, key: u64, offset: u64, bytes: &[u8]) {
    assert_eq!(store.write_vectored(key, offset, &[IoSlice::new(bytes)]).unwrap(), bytes.len());
}

/// Nothing of an object that was removed.
fn content<F: FileSystem>(store: &ObjectStore<F>, key: u64) -> Vec<u8> {
    let mut buf = vec![0xee; 200_000];
    let len = match store.read(key, 0, &mut buf) {
        Err(error) if error.raw_os_error() == Some(libc::EIDRM) => 0,
        read => read.unwrap(),
    };
    buf.truncate(len);
    buf
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        key: u64,
        offset: u64,
        lens: Vec<usize>,
        fill: u8,
    },
    Read {
        key: u64,
        offset: u64,
        lens: Vec<usize>,
    },
    Truncate {
        key: u64,
        len: u64,
    },
    /// `change`: punched, zeroed with or without the end kept, allocated likewise.
    Space {
        key: u64,
        change: u8,
        offset: u64,
        len: u64,
    },
    Seek {
        key: u64,
        offset: u64,
    },
    Unlink {
        key: u64,
    },
    Sync {
        key: u64,
    },
    Crash {
        seed: Option<u64>,
    },
}

/// Keys that share a directory and keys that do not.
fn any_key() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1u64), Just(2), Just(0x101), Just(0xffff_ffff_ffff_ff01)]
}

fn any_step() -> impl Strategy<Value = Step> {
    let lens = || prop::collection::vec(0usize..5000, 0..4);
    let offset = || prop_oneof![0u64..64, 0u64..40_000];
    prop_oneof![
        4 => (any_key(), offset(), lens(), any::<u8>())
            .prop_map(|(key, offset, lens, fill)| Step::Write { key, offset, lens, fill }),
        3 => (any_key(), offset(), lens()).prop_map(|(key, offset, lens)| Step::Read { key, offset, lens }),
        1 => (any_key(), 0u64..50_000).prop_map(|(key, len)| Step::Truncate { key, len }),
        2 => (any_key(), 0u8..5, offset(), 0u64..20_000)
            .prop_map(|(key, change, offset, len)| Step::Space { key, change, offset, len }),
        1 => (any_key(), offset()).prop_map(|(key, offset)| Step::Seek { key, offset }),
        1 => any_key().prop_map(|key| Step::Unlink { key }),
        2 => any_key().prop_map(|key| Step::Sync { key }),
    ]
}

fn any_step_or_crash() -> impl Strategy<Value = Step> {
    prop_oneof![12 => any_step(), 1 => prop::option::of(any::<u64>()).prop_map(|seed| Step::Crash { seed })]
}

/// Content that differs by byte and by step.
fn pattern(len: usize, fill: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ fill).collect()
}

/// What the store must hold.
#[derive(Default)]
struct Model {
    objects: HashMap<u64, Vec<u8>>,
    removed: HashSet<u64>,
}

/// Applies one step to both; reads must return the same bytes, and what was removed is never made again.
fn apply<F: FileSystem>(store: &ObjectStore<F>, model: &mut Model, step: &Step) -> Result<(), TestCaseError> {
    let Model { objects: model, removed } = model;
    match step {
        Step::Write { key, lens, .. } if removed.contains(key) && lens.iter().sum::<usize>() > 0 => {
            let error = store.write_vectored(*key, 0, &[IoSlice::new(b"late")]).unwrap_err();
            prop_assert_eq!(error.source.raw_os_error(), Some(libc::EIDRM));
        }
        Step::Truncate { key, len } if removed.contains(key) && *len > 0 => {
            prop_assert_eq!(store.truncate(*key, *len).unwrap_err().raw_os_error(), Some(libc::EIDRM));
        }
        Step::Space { key, change, offset, len } if removed.contains(key) => {
            let range = *offset..offset + len;
            let changed = if *change > 0 { store.allocate(*key, range, true) } else { store.punch(*key, range) };
            prop_assert_eq!(changed.unwrap_err().raw_os_error(), Some(libc::EIDRM));
        }
        Step::Seek { key, offset } if removed.contains(key) => {
            prop_assert_eq!(store.seek(*key, *offset, true).unwrap_err().raw_os_error(), Some(libc::EIDRM));
        }
        Step::Read { key, offset, .. } if removed.contains(key) => {
            prop_assert_eq!(store.read(*key, *offset, &mut [0; 9]).unwrap_err().raw_os_error(), Some(libc::EIDRM));
            let cached = store.read_cached(*key, *offset, &mut [0; 9]);
            prop_assert!(cached.is_none_or(|read| read.is_err_and(|e| e.raw_os_error() == Some(libc::EIDRM))));
            prop_assert_eq!(store.look(*key).unwrap(), None);
        }
        Step::Space { key, change, offset, len } => {
            let (start, end) = (*offset as usize, (offset + len) as usize);
            let (range, keeps) = (*offset..offset + len, change % 2 == 0);
            match change {
                0 => store.punch(*key, range).unwrap(),
                1 | 2 => store.zero(*key, range, keeps).unwrap(),
                _ => store.allocate(*key, range, keeps).unwrap(),
            }
            if *change > 0 {
                model.entry(*key).or_default();
            }
            if let Some(object) = model.get_mut(key) {
                // Nothing is allocated of no bytes.
                if !keeps && start < end {
                    object.resize(object.len().max(end), 0);
                }
                let within = start.min(object.len())..end.min(object.len());
                if *change < 3 {
                    object[within].fill(0);
                }
            }
        }
        Step::Seek { key, offset } => {
            let object = model.get(key).map_or(&[][..], |object| object);
            let (data, state) = store.seek(*key, *offset, true).unwrap();
            let hole = store.seek(*key, *offset, false).unwrap().0.unwrap();
            prop_assert!(state.is_some() || !model.contains_key(key));
            let size = object.len() as u64;
            let zeros = |range: std::ops::Range<u64>| {
                object[range.start.min(size) as usize..range.end.min(size) as usize].iter().all(|byte| *byte == 0)
            };
            prop_assert!(data.is_none_or(|at| (*offset..size).contains(&at)), "{:?} of {}", data, size);
            prop_assert!(zeros(*offset..data.unwrap_or(size)), "data at {} passed over for {:?}", offset, data);
            prop_assert!((*offset..=size.max(*offset)).contains(&hole));
            let until = store.seek(*key, hole, true).unwrap().0.unwrap_or(size);
            prop_assert!(zeros(hole..until), "a hole at {} that has data before {}", hole, until);
        }
        Step::Write { key, offset, lens, fill } => {
            let bytes = pattern(lens.iter().sum(), *fill);
            let mut rest = &bytes[..];
            let slices: Vec<IoSlice<'_>> =
                lens.iter().map(|&len| IoSlice::new(rest.split_off(..len).unwrap())).collect();
            prop_assert_eq!(store.write_vectored(*key, *offset, &slices).unwrap(), bytes.len());
            if !bytes.is_empty() {
                let object = model.entry(*key).or_default();
                let at = *offset as usize;
                object.resize(object.len().max(at + bytes.len()), 0);
                object[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        Step::Read { key, offset, lens } => {
            let object = model.get(key).map_or(&[][..], |object| object);
            let wanted = object.get(*offset as usize..).unwrap_or(&[]);
            let total: usize = lens.iter().sum();
            let wanted = &wanted[..wanted.len().min(total)];
            let mut bufs: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0xee; len]).collect();
            let mut slices: Vec<IoSliceMut<'_>> = bufs.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
            let cached = store.read_vectored_cached(*key, *offset, &mut slices);
            if let Some(len) = cached {
                prop_assert_eq!(len.unwrap(), wanted.len());
                prop_assert_eq!(&bufs.concat()[..wanted.len()], wanted);
            }
            let mut slices: Vec<IoSliceMut<'_>> = bufs.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
            prop_assert_eq!(store.read_vectored(*key, *offset, &mut slices).unwrap(), wanted.len());
            prop_assert_eq!(&bufs.concat()[..wanted.len()], wanted);
            let size = store.stat(*key).unwrap().size;
            prop_assert_eq!(size, model.get(key).map_or(0, Vec::len) as u64);
        }
        Step::Truncate { key, len } => {
            store.truncate(*key, *len).unwrap();
            if *len > 0 || model.contains_key(key) {
                model.entry(*key).or_default().resize(*len as usize, 0);
            }
        }
        Step::Unlink { key } => {
            store.unlink(*key).unwrap();
            model.remove(key);
            removed.insert(*key);
        }
        Step::Sync { key } => store.sync(*key).unwrap(),
        Step::Crash { .. } => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_store_is_a_map_of_bytes(steps in prop::collection::vec(any_step(), 1..60)) {
        let dir = scratch();
        let (real, forgetful) = (open(dir.path()), over(&Forgetful::default()));
        let (mut model, mut same) = (Model::default(), Model::default());
        for step in &steps {
            apply(&real, &mut model, step)?;
            apply(&forgetful, &mut same, step)?;
        }
        drop(real);
        let reopened = open(dir.path());
        for (key, object) in model.objects {
            prop_assert_eq!(&content(&reopened, key), &object);
            prop_assert_eq!(&content(&forgetful, key), &object);
        }
    }

    #[test]
    fn what_was_synced_survives_every_crash(steps in prop::collection::vec(any_step_or_crash(), 1..80)) {
        let fs = Forgetful::default();
        let mut store = over(&fs);
        let mut model = Model::default();
        // The content of each object at its last sync, and whether it changed since.
        let mut synced: HashMap<u64, (Vec<u8>, bool)> = HashMap::new();
        for step in &steps {
            apply(&store, &mut model, step)?;
            match step {
                Step::Sync { key } => {
                    synced.insert(*key, (model.objects.get(key).cloned().unwrap_or_default(), false));
                }
                Step::Write { key, .. } | Step::Truncate { key, .. } | Step::Space { key, .. } => {
                    synced.entry(*key).or_default().1 = !model.removed.contains(key);
                }
                // For good.
                Step::Unlink { key } => drop(synced.insert(*key, (Vec::new(), false))),
                Step::Crash { seed } => {
                    match seed {
                        Some(seed) => fs.crash_partly(*seed),
                        None => fs.crash(),
                    }
                    store = over(&fs);
                    for (key, (object, touched)) in &synced {
                        if !touched {
                            prop_assert_eq!(&content(&store, *key), object, "object {:x}", key);
                        }
                    }
                    // What survived by luck is the new truth; how much of it is durable is unknown until the next sync.
                    model.objects = [1, 2, 0x101, 0xffff_ffff_ffff_ff01].map(|key| (key, content(&store, key))).into();
                    model.objects.retain(|_, object| !object.is_empty());
                    synced.retain(|_, (_, touched)| !*touched);
                }
                Step::Read { .. } | Step::Seek { .. } => {}
            }
        }
    }
}

#[test]
fn a_hole_takes_no_storage_and_what_was_allocated_does() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let used = || store.stat(1).unwrap().used_bytes;
    write(&store, 1, 0, &[7; 1 << 20]);
    store.sync(1).unwrap();
    let full = used();
    assert!(full >= 1 << 20, "{full}");
    store.punch(1, 128 << 10..896 << 10).unwrap();
    assert!(used() <= full - (768 << 10), "{} of {full}", used());
    assert_eq!(store.seek(1, 0, false).unwrap().0, Some(128 << 10));
    assert_eq!(store.seek(1, 128 << 10, true).unwrap().0, Some(896 << 10));
    store.zero(1, 128 << 10..2 << 20, true).unwrap();
    assert_eq!(store.stat(1).unwrap().size, 1 << 20);
    assert!(used() >= 2 << 20, "{}", used());
    store.allocate(1, 0..3 << 20, false).unwrap();
    assert_eq!(store.stat(1).unwrap().size, 3 << 20);
    store.punch(2, 0..1 << 20).unwrap();
    assert_eq!(store.look(2).unwrap(), None, "a hole makes no object");
    let beyond = store.punch(1, 0..u64::MAX).unwrap_err();
    assert_eq!(beyond.raw_os_error(), Some(libc::EFBIG));
}

#[test]
fn without_a_sync_nothing_survives() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, b"synced");
    store.sync(1).unwrap();
    write(&store, 1, 0, b"not");
    write(&store, 2, 0, b"not");
    fs.crash();
    let store = over(&fs);
    assert_eq!((content(&store, 1), content(&store, 2)), (b"synced".to_vec(), Vec::new()));
}

#[test]
fn a_sync_after_a_restart_makes_older_names_durable() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 7, 0, b"written by the first server");
    drop(store);
    // Killed without a power failure: the next server finds the object and syncs it.
    let store = over(&fs);
    store.sync(7).unwrap();
    fs.crash();
    assert_eq!(content(&over(&fs), 7), b"written by the first server");
}

#[test]
fn a_name_is_durable_even_if_its_handle_was_closed_before_the_sync() {
    let fs = Forgetful::default();
    let store = over(&fs);
    (0..100).for_each(|key| write(&store, key, 0, &key.to_le_bytes()));
    (0..100).for_each(|key| store.sync(key).unwrap());
    fs.crash();
    let store = over(&fs);
    (0..100u64).for_each(|key| assert_eq!(content(&store, key), key.to_le_bytes()));
}

#[test]
fn a_failed_sync_is_reported() {
    let fs = Forgetful::default();
    let store = over(&fs);
    write(&store, 1, 0, b"x");
    fs.fail_syncs(true);
    assert_eq!(store.sync(1).unwrap_err().raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    fs.fail_syncs(false);
    store.sync(1).unwrap();
}

#[test]
fn a_full_device_says_so_and_what_was_written_is_there() {
    let fs = Forgetful::new(1100);
    let store = over(&fs);
    write(&store, 1, 0, &[1; 500]);
    let free = store.statfs().unwrap().free_bytes as usize;
    let two = [2; 400];
    let error = store.write_vectored(2, 0, &[IoSlice::new(&two), IoSlice::new(&two)]).unwrap_err();
    assert_eq!(error.written, free);
    assert_eq!(error.source.kind(), io::ErrorKind::StorageFull);
    assert_eq!(content(&store, 2).len(), free);
    store.unlink(1).unwrap();
    write(&store, 2, 0, &[3; 900]);
}

#[test]
fn offsets_beyond_every_file_are_refused_or_empty() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    write(&store, 1, 0, b"x");
    for offset in [u64::MAX, i64::MAX as u64, u64::MAX - 3] {
        let error = store.write_vectored(1, offset, &[IoSlice::new(b"yy")]).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::FileTooLarge, "{offset}");
        assert_eq!(store.read(1, offset, &mut [0; 8]).unwrap(), 0, "{offset}");
        assert!(store.read_cached(1, offset, &mut [0; 8]).is_none_or(|read| read.unwrap() == 0));
    }
    assert_eq!(store.truncate(1, u64::MAX).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
}

#[test]
fn many_slices_are_written_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let bytes = pattern(3 * 1500, 9);
    let slices: Vec<IoSlice<'_>> = bytes.chunks(3).map(IoSlice::new).collect();
    assert_eq!(store.write_vectored(1, 5, &slices).unwrap(), bytes.len());
    let mut read = vec![0; bytes.len()];
    let mut bufs: Vec<IoSliceMut<'_>> = read.chunks_mut(3).map(IoSliceMut::new).collect();
    assert_eq!(store.read_vectored(1, 5, &mut bufs).unwrap(), bytes.len());
    assert_eq!(read, bytes);
}

#[test]
fn reading_makes_no_object_and_nor_does_an_empty_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    assert_eq!(store.read(3, 0, &mut [0; 8]).unwrap(), 0);
    assert_eq!(store.write_vectored(3, 10, &[IoSlice::new(b"")]).unwrap(), 0);
    store.truncate(3, 0).unwrap();
    store.sync(3).unwrap();
    let path = dir.path().join("objects/03/0000000000000003");
    assert!(!path.exists());
    store.truncate(3, 100).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 100);
    let state = store.stat(3).unwrap();
    assert_eq!((state.size, state.used_bytes), (100, 0), "a hole uses nothing");
    assert!(state.mtime_secs > 1_600_000_000);
    assert!(store.statfs().unwrap().free_bytes > 0);
}

#[test]
fn no_handle_outlives_a_removal() {
    let dir = scratch();
    let store = open(dir.path());
    let (stop, present) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Keeps opening the object that the other thread makes and removes.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match store.read(present.load(Ordering::Relaxed), 0, &mut [0; 64]) {
                    Ok(len) => assert!(len == 0 || len == 64),
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIDRM)),
                }
            }
        });
        let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..2000u64 {
                present.store(round, Ordering::Relaxed);
                write(&store, round, 0, &[round as u8; 64]);
                store.unlink(round).unwrap();
                let error = store.read(round, 0, &mut [0; 64]).expect_err("read through a handle");
                assert_eq!(error.raw_os_error(), Some(libc::EIDRM), "round {round}");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        rounds.unwrap();
    });
}

#[test]
fn threads_with_few_handles_do_not_mix_objects_up() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..200u64 {
                    let key = thread * 10 + round % 7;
                    write(store, key, round * 8, &(key + round).to_le_bytes());
                    let mut back = [0; 8];
                    assert_eq!(store.read(key, round * 8, &mut back).unwrap(), 8);
                    assert_eq!(u64::from_le_bytes(back), key + round);
                }
            });
        }
    });
}

#[test]
fn what_is_in_the_page_cache_is_read_without_waiting() {
    // A directory in memory always can; elsewhere the kernel decides, and must then agree with a plain read.
    let dir = scratch();
    let store = open(dir.path());
    write(&store, 1, 0, &[7; 10_000]);
    let mut buf = [0; 8000];
    let first = store.read_cached(1, 0, &mut buf).map(Result::unwrap);
    let end = store.read_cached(1, 8000, &mut buf).map(Result::unwrap);
    let beyond = store.read_cached(1, 20_000, &mut buf).map(Result::unwrap);
    let absent = store.read_cached(2, 0, &mut buf).map(Result::unwrap);
    if store.in_memory() {
        assert_eq!((first, end, beyond, absent), (Some(8000), Some(2000), Some(0), Some(0)));
    } else {
        assert!(first.is_none_or(|n| n == 8000) && end.is_none_or(|n| n == 2000) && absent.is_none());
    }
}

/// What a read without waiting misses, the kernel begins to read, before anything is scheduled.
#[test]
fn a_look_into_memory_begins_no_read() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let store = open(dir.path());
    write(&store, 1, 0, &[7; 1 << 20]);
    store.sync(1).unwrap();
    let is_object = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|of| of.starts_with(dir.path())) && fs::metadata(path).unwrap().len() == 1 << 20
    };
    let path = fs::read_dir("/proc/self/fd").unwrap().flatten().map(|open| open.path()).find(is_object).unwrap();
    let object = fs::File::open(path).unwrap();
    rustix::fs::fadvise(&object, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let cached = || mapped_pages(object.as_fd(), 0..1 << 20).map(|pages| pages.cached);
    if cached() != Some(0) {
        return impresario_testing::skip("page cache", "a file system whose pages stay");
    }
    let mut buf = vec![0; 64 << 10];
    for (offset, len) in [(0, 1), (4096, 64 << 10), ((1 << 20) - 1, 2)] {
        assert!(store.read_cached(1, offset, &mut buf[..len]).is_none());
        assert!(!store.has_cached(1, offset));
    }
    assert_eq!(store.read_cached(1, 1 << 20, &mut buf).map(Result::unwrap), Some(0), "the end is known");
    assert_eq!(cached(), Some(0));
}

#[test]
fn a_directory_serves_one_server_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("a/b");
    let first = open(&directory);
    let error = refused(&directory);
    assert!(matches!(error, StoreError::InUse { .. }));
    let text = error.to_string();
    assert!(text.contains("is in use by another server (process ") && text.contains("a/b"), "{text}");
    write(&first, 1, 0, b"kept");
    drop(first);
    assert_eq!(content(&open(&directory), 1), b"kept");
}

/// A process that was forked has another descriptor of a server's lock until it executes a program: so does this test.
#[test]
fn a_server_that_ended_lets_go_of_its_directory_whoever_has_its_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let lock = dir.path().canonicalize().unwrap().join("lock");
    let is_lock = |fd: &fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|to| to == lock);
    let fd = fs::read_dir("/proc/self/fd").unwrap().flatten().find(is_lock).expect("the store has its lock open");
    let number = fd.file_name().to_str().unwrap().parse().unwrap();
    // SAFETY: the store has it open.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().unwrap();
    drop(store);
    drop(open(dir.path()));
    drop(inherited);
}

#[test]
fn a_server_waits_for_one_that_is_just_ending() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let ending = fs::File::open(dir.path().join("lock")).unwrap();
    rustix::fs::flock(&ending, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let other = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        drop(ending);
    });
    drop(open(dir.path()));
    other.join().unwrap();
}

#[test]
fn foreign_directories_and_other_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.tex"), "x").unwrap();
    let error = refused(dir.path());
    assert!(matches!(&error, StoreError::Foreign { found, .. } if found == "thesis.tex"), "{error}");
    assert!(matches!(make(dir.path(), &identity()), Err(StoreError::Foreign { .. })));
    assert!(!dir.path().join("objects").exists());

    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    fs::write(dir.path().join("format"), "impresario objects 9\n").unwrap();
    let error = refused(dir.path());
    assert!(error.to_string().contains("says \"impresario objects 9\""), "{error}");
    fs::remove_file(dir.path().join("format")).unwrap();
    let error = refused(dir.path());
    assert!(matches!(&error, StoreError::Foreign { found, .. } if found == "objects"), "{error}");

    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = refused(&file);
    assert!(matches!(error, StoreError::Open { .. }), "{error}");
}

#[test]
fn a_folder_serves_only_the_server_that_it_was_made_for() {
    let dir = tempfile::tempdir().unwrap();
    // A disk that is not mounted: refused, and nothing is written.
    let error = refused(dir.path());
    assert!(matches!(error, StoreError::Blank { .. }), "{error}");
    assert!(error.to_string().contains("impresario store init"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let missing = dir.path().join("missing");
    assert!(matches!(refused(&missing), StoreError::Blank { .. }) && !missing.exists());

    let store = open(dir.path());
    write(&store, 1, 0, b"kept");
    assert_eq!((store.identity(), examine(dir.path()).unwrap()), (&identity(), FolderState::Made(identity())));
    drop(store);
    let error = ObjectStore::open(dir.path(), "data.1", FEW).err().unwrap().to_string();
    assert!(error.contains("is that of data.0 of cluster 0000000000000001, not of data.1"), "{error}");
    assert!(matches!(make(dir.path(), &identity()), Err(StoreError::Made { .. })));

    // A renamed server takes its folder along; another one does not get it.
    let renamed = FolderIdentity { server: "data.1".into(), ..identity() };
    assert!(adopt(dir.path(), &FolderIdentity { store: 9, ..renamed.clone() }).is_err());
    adopt(dir.path(), &renamed).unwrap();
    assert_eq!(content(&ObjectStore::open(dir.path(), "data.1", FEW).unwrap(), 1), b"kept");

    // Of a version without identities.
    fs::write(dir.path().join("format"), "impresario objects 1\n").unwrap();
    let error = refused(dir.path());
    assert!(matches!(error, StoreError::Older { .. }) && error.to_string().contains("store adopt"), "{error}");
    assert!(matches!(make(dir.path(), &identity()), Err(StoreError::Older { .. })));
    adopt(dir.path(), &identity()).unwrap();
    assert_eq!(content(&open(dir.path()), 1), b"kept");
}

#[test]
fn a_crash_at_any_point_of_the_first_start_leaves_a_directory_that_can_be_started() {
    let mut stopped = 0;
    for changes in (0..12).chain((12..300).step_by(7)) {
        for seed in 0..8u64 {
            let fs = Forgetful::default();
            fs.stop_after(changes);
            let started = start(&fs);
            stopped += u32::from(started.is_err());
            drop(started);
            if seed == 0 {
                fs.crash()
            } else {
                fs.crash_partly(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            }
            let store = over(&fs);
            write(&store, 1, 0, b"x");
            store.sync(1).unwrap();
            drop(store);
            fs.crash();
            assert_eq!(content(&over(&fs), 1), b"x", "stopped after {changes}, seed {seed}");
        }
    }
    assert!(stopped > 300, "{stopped}");
}

/// A small file system in memory, if the test may mount one.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(options: &str) -> Option<Mount> {
        use rustix::mount::{MountFlags, mount};
        let dir = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(options).unwrap();
        match mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), options.as_c_str()) {
            Ok(()) => Some(Mount(dir)),
            Err(error) => {
                impresario_testing::skip("root", format!("a small tmpfs cannot be mounted: {error}"));
                None
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_file_system_says_so() {
    let Some(mount) = Mount::new("size=1m") else { return };
    let store = open(mount.0.path());
    let block = vec![5; 300 << 10];
    let mut written = 0;
    let error = loop {
        match store.write_vectored(1, written, &[IoSlice::new(&block)]) {
            Ok(len) => written += len as u64,
            Err(error) => break error,
        }
        assert!(written <= 1 << 20);
    };
    assert_eq!(error.source.kind(), io::ErrorKind::StorageFull);
    assert_eq!(error.source.raw_os_error(), Some(rustix::io::Errno::NOSPC.raw_os_error()));
    let total = written + error.written as u64;
    assert_eq!(store.stat(1).unwrap().size, total);
    assert_eq!(store.statfs().unwrap().free_bytes, 0);
    store.unlink(1).unwrap();
    write(&store, 2, 0, &block);
    assert_eq!(content(&store, 2).len(), 200_000);
}

#[test]
fn a_directory_that_cannot_be_written_says_so() {
    let Some(mount) = Mount::new("size=1m,nr_inodes=1") else { return };
    let error = Real::make(mount.0.path()).err().unwrap();
    assert!(matches!(error, StoreError::NotWritable { .. }), "{error}");
    assert!(error.to_string().contains("must be writable"), "{error}");
    let error = make(Path::new("/proc/nothing/here"), &identity()).err().unwrap();
    assert!(matches!(error, StoreError::Open { .. }), "{error}");
}

#[test]
fn a_removed_object_is_not_made_again_by_what_comes_late() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    write(&store, 1, 0, b"x");
    store.unlink(1).unwrap();
    // It never had an object here: a late write must not give it one, either.
    store.unlink(2).unwrap();
    drop(store);
    for _ in 0..2 {
        let store = open(dir.path());
        for key in [1, 2] {
            let error = store.write_vectored(key, 7, &[IoSlice::new(b"late")]).unwrap_err();
            assert_eq!((error.written, error.source.raw_os_error()), (0, Some(libc::EIDRM)));
            assert_eq!(store.truncate(key, 9).unwrap_err().raw_os_error(), Some(libc::EIDRM));
            store.truncate(key, 0).unwrap();
            store.unlink(key).unwrap();
            store.sync(key).unwrap();
            assert_eq!(store.look(key).unwrap(), None);
            // Nor is it a hole.
            let read = [store.read(key, 0, &mut [0; 9]).map(drop), store.punch(key, 0..5)];
            let told = [store.seek(key, 0, true).map(drop), store.look_unless_removed(key).map(drop)];
            for error in read.into_iter().chain(told) {
                assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EIDRM));
            }
        }
        write(&store, 3, 0, b"another");
    }
}

/// The kernel tells one of the syncs that a descriptor has at the same time.
#[test]
fn a_sync_succeeds_when_what_another_was_told_of_is_noted() {
    for (checksums, in_background) in [(false, false), (true, false), (true, true)] {
        let fs = Forgetful::default();
        drop(over(&fs));
        let options = StoreOptions { checksums: Some(checksums), ..FEW };
        let store = ObjectStore::over(fs.clone(), Path::new("forgetful"), "data.0", options).unwrap();
        write(&store, 1, 0, b"lost");
        fs.fail_syncs(true);
        let (is_noted, failures) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (again, noted) = (&store, &is_noted);
        std::thread::scope(|scope| {
            let note = || {
                failures.fetch_add(1, Ordering::SeqCst);
                fs.fail_syncs(false);
                scope.spawn(move || {
                    again.sync_noting(1, |error| error).expect("the other one was told");
                    assert!(noted.load(Ordering::SeqCst), "who asks now learns of no loss");
                });
                // Time enough for the other one.
                std::thread::sleep(Duration::from_millis(200));
                is_noted.store(true, Ordering::SeqCst);
            };
            match in_background {
                true => store.settle_older(Duration::ZERO, |_, _| note()),
                false => store.sync_noting(1, |_| note()).unwrap_err(),
            }
        });
        assert_eq!(failures.into_inner(), 1);
    }
}

/// Wherever the server stops, and whatever survives of what was not synced.
#[test]
fn a_removal_that_was_acknowledged_outlasts_a_power_failure() {
    let mut acknowledged = 0;
    for stop in 0..24 {
        for seed in [None, Some(1u64), Some(2), Some(3)] {
            let fs = Forgetful::default();
            let store = over(&fs);
            for key in [1, 2, 0x101] {
                write(&store, key, 0, b"synced");
                store.sync(key).unwrap();
            }
            fs.stop_after(stop);
            let removed: Vec<u64> = [1, 2, 0x101].into_iter().filter(|key| store.unlink(*key).is_ok()).collect();
            match seed {
                Some(seed) => fs.crash_partly(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
                None => fs.crash(),
            }
            let store = over(&fs);
            for key in &removed {
                assert_eq!(store.look(*key).unwrap(), None, "object {key:x}, stopped after {stop} changes");
                assert!(store.write_vectored(*key, 0, &[IoSlice::new(b"late")]).is_err());
            }
            for key in [1, 2, 0x101].iter().filter(|key| !removed.contains(key)) {
                assert!([&b""[..], b"synced"].contains(&&*content(&store, *key)));
                store.unlink(*key).unwrap();
            }
            fs.crash();
            let store = over(&fs);
            assert!([1, 2, 0x101].iter().all(|key| store.look(*key).unwrap().is_none()), "the second attempt holds");
            acknowledged += removed.len();
        }
    }
    assert!(acknowledged > 100, "{acknowledged}");
}

/// The kernel takes what a failed sync has lost for written: the next one succeeds and writes nothing.
#[test]
fn a_removal_that_is_repeated_after_a_failed_sync_outlasts_a_power_failure() {
    let fs = Forgetful::default();
    let store = over(&fs);
    for key in [1, 2, 3, 4] {
        write(&store, key, 0, b"synced");
        store.sync(key).unwrap();
    }
    store.unlink(1).unwrap();
    fs.fail_syncs(true);
    assert!(store.unlink(2).is_err() && store.unlink(3).is_err() && store.unlink(2).is_err());
    fs.fail_syncs(false);
    store.unlink(3).unwrap();
    store.unlink(4).unwrap();
    store.unlink(2).unwrap();
    fs.crash();
    let store = over(&fs);
    for key in [1, 2, 3, 4] {
        assert_eq!(store.look(key).unwrap(), None, "object {key}");
        assert!(store.write_vectored(key, 0, &[IoSlice::new(b"late")]).is_err(), "object {key}");
    }
}

#[test]
fn a_removal_that_is_repeated_after_a_failed_sync_of_a_killed_server_outlasts_a_power_failure() {
    let fs = Forgetful::default();
    let store = over(&fs);
    for key in [1, 2] {
        write(&store, key, 0, b"synced");
        store.sync(key).unwrap();
    }
    store.unlink(1).unwrap();
    fs.fail_syncs(true);
    store.unlink(2).unwrap_err();
    fs.fail_syncs(false);
    drop(store);
    over(&fs).unlink(2).unwrap();
    fs.crash();
    let store = over(&fs);
    assert_eq!(store.look(2).unwrap(), None);
    assert!(store.write_vectored(2, 0, &[IoSlice::new(b"late")]).is_err());
}

#[test]
fn removals_are_remembered_for_a_generation_at_least_and_stay_durable_beyond() {
    const GENERATION: u64 = 50;
    let options = StoreOptions { removed_keys: GENERATION as usize, ..FEW };
    let fs = Forgetful::default();
    let again = || {
        let name = Path::new("forgetful");
        ObjectStore::over(fs.clone(), name, "data.0", options.clone()).unwrap()
    };
    drop(over(&fs));
    let mut store = again();
    for key in 1..=5 * GENERATION {
        write(&store, key, 0, b"x");
        store.sync(key).unwrap();
        store.unlink(key).unwrap();
        if key % 33 == 0 {
            fs.crash();
            store = again();
        }
        let refuses = |key| store.write_vectored(key, 0, &[IoSlice::new(b"late")]).is_err();
        assert!((1..=key).rev().take(GENERATION as usize).all(refuses), "{key}");
    }
    fs.crash();
    let store = again();
    (1..=5 * GENERATION).for_each(|key| assert_eq!(store.look(key).unwrap(), None, "{key}"));
    let forgotten = (1..=5 * GENERATION).filter(|key| store.write_vectored(*key, 0, &[IoSlice::new(b"x")]).is_ok());
    assert!(forgotten.count() >= 3 * GENERATION as usize, "memory is bounded");
}

/// A store whose generations have one removal each.
fn forgets_soon(fs: &Forgetful) -> ObjectStore<Forgetful> {
    drop(over(fs));
    let options = StoreOptions { removed_keys: 1, ..FEW };
    ObjectStore::over(fs.clone(), Path::new("forgetful"), "data.0", options).unwrap()
}

/// The note of a removal that is under way goes to the older generation, whose objects are not removed again at the start.
#[test]
fn a_removal_during_which_a_generation_begins_outlasts_a_power_failure() {
    for other in [2, 0x101] {
        let fs = Forgetful::default();
        let store = Arc::new(forgets_soon(&fs));
        write(&store, 1, 0, b"synced");
        store.sync(1).unwrap();
        let remover = store.clone();
        fs.before_unlink("objects/01/0000000000000001", move || remover.unlink(other).unwrap());
        store.unlink(1).unwrap();
        assert_eq!(store.removed_keys(), [1, other], "the other removal began a generation");
        fs.crash();
        let store = forgets_soon(&fs);
        assert_eq!(store.look(1).unwrap(), None, "{other:x}");
        assert!(store.write_vectored(1, 0, &[IoSlice::new(b"late")]).is_err(), "{other:x}");
    }
}

#[test]
fn a_full_device_still_removes() {
    let fs = Forgetful::new(20_000);
    let store = over(&fs);
    write(&store, 1, 0, b"a");
    write(&store, 2, 0, b"b");
    (1..=2).for_each(|key| store.sync(key).unwrap());
    store.write_vectored(3, 0, &[IoSlice::new(&[1; 20_000])]).unwrap_err();
    store.unlink(1).unwrap();
    fs.crash();
    let store = over(&fs);
    assert_eq!(store.look(1).unwrap(), None);
    store.unlink(3).unwrap();
    store.unlink(2).unwrap();
    fs.crash();
    assert!(over(&fs).write_vectored(2, 0, &[IoSlice::new(b"late")]).is_err(), "noted when there was room again");
}

#[test]
fn a_device_that_fails_every_removal_does_not_fill_the_log() {
    let fs = Forgetful::default();
    let store = over(&fs);
    fs.fail_after(0, libc::EIO, true);
    let lines = impresario_testing::logged(|| {
        (1..=1000).for_each(|key| assert!(store.unlink(key << 24).is_err(), "{key}"));
    });
    assert!((1..=3).contains(&lines.len()), "{} lines: {:?}", lines.len(), lines.first());
}
