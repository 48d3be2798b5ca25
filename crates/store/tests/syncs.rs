//! Every single sync of the store is needed: without any one of them some scenario loses what was promised.
//!
//! The file system double tells which places in the code sync, and can ignore one of them. The list must be all that the
//! sources have, so a new sync needs a scenario here.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::path::Path;
use std::time::Duration;

use impresario_store::testing::{Forgetful, SyncSite};
use impresario_store::{
    Arrived, Arriving, Departed, FileSystem, FolderIdentity, Note, ObjectStore, StoreError, StoreOptions, make_over,
    unmark_over,
};

type Store = ObjectStore<Forgetful>;
type Outcome = Result<(), String>;

/// File systems whose syncs are ignored at one place, and what all of them have synced.
struct Bench {
    ignored: Option<SyncSite>,
    made: Vec<Forgetful>,
}

impl Bench {
    fn fs(&mut self) -> Forgetful {
        self.fs_of(64 << 20)
    }

    fn fs_of(&mut self, capacity_bytes: u64) -> Forgetful {
        let fs = Forgetful::new(capacity_bytes);
        fs.ignore_syncs_of(self.ignored);
        self.made.push(fs.clone());
        fs
    }
}

fn open(fs: &Forgetful, checksums: bool) -> Result<Store, String> {
    let options =
        StoreOptions { open_files: 4, removed_keys: 5, checksums: Some(checksums), ..StoreOptions::default() };
    let name = Path::new("forgetful");
    let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
    match make_over(fs, name, &identity) {
        Ok(()) | Err(StoreError::Made { .. }) => {}
        Err(error) => return Err(error.to_string()),
    }
    ObjectStore::over(fs.clone(), name, "data.0", options).map_err(|error| error.to_string())
}

fn write(store: &Store, key: u64, offset: u64, bytes: &[u8]) -> Outcome {
    store.write_vectored(key, offset, &[IoSlice::new(bytes)]).map(drop).map_err(|error| error.to_string())
}

fn holds(store: &Store, key: u64, wanted: &[u8]) -> Outcome {
    let mut buf = vec![0; 1 << 20];
    let len = store.read(key, 0, &mut buf).map_err(|error| error.to_string())?;
    ensure(buf[..len] == *wanted, "an object is not what it was")
}

fn reads(store: &Store, key: u64) -> Outcome {
    store.read(key, 0, &mut vec![0; 1 << 20]).map(drop).map_err(|error| error.to_string())
}

fn ensure(holds: bool, what: &str) -> Outcome {
    if holds { Ok(()) } else { Err(what.into()) }
}

fn path(key: u64) -> String {
    format!("objects/{:02x}/{key:016x}", key & 0xff)
}

fn io<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn a_folder_stays_made(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
    make_over(&fs, Path::new("forgetful"), &identity).map_err(|error| error.to_string())?;
    fs.crash();
    let made = make_over(&fs, Path::new("forgetful"), &identity);
    ensure(matches!(made, Err(StoreError::Made { .. })), "the folder is no more")
}

fn what_was_synced_is_there(bench: &mut Bench, checksums: bool) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, checksums)?;
    write(&store, 1, 0, &[7; 10_000])?;
    io(store.sync(1))?;
    write(&store, 1, 0, &[8; 10_000])?;
    io(store.sync(1))?;
    fs.crash();
    holds(&open(&fs, checksums)?, 1, &[8; 10_000])
}

fn a_note_before_a_sync_is_kept(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, false)?;
    io(store.open_notes())?;
    let note = Note { kind: 7, key: 1, value: 2 };
    io(store.note(note))?;
    io(store.sync(5))?;
    fs.crash();
    ensure(io(open(&fs, false)?.open_notes())? == [note], "a note is lost")
}

fn what_was_removed_stays_removed(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, false)?;
    // More than two generations.
    for key in 1..=13 {
        write(&store, key, 0, b"x")?;
        io(store.sync(key))?;
    }
    for last in 1..=13 {
        io(store.unlink(last))?;
        fs.crash();
        let store = open(&fs, false)?;
        for key in 1..=last {
            ensure(io(store.look(key))?.is_none(), "a removed object is there again")?;
        }
        ensure(write(&store, last, 0, b"late").is_err(), "a removed object is made again")?;
        // Without a restart between them, too.
        if last == 1 {
            return what_was_removed_without_a_restart(bench);
        }
    }
    Ok(())
}

fn what_was_removed_without_a_restart(bench: &mut Bench) -> Outcome {
    for count in 1..=13 {
        let fs = bench.fs();
        let store = open(&fs, false)?;
        for key in 1..=count {
            write(&store, key, 0, b"x")?;
            io(store.sync(key))?;
        }
        (1..=count).try_for_each(|key| io(store.unlink(key)))?;
        fs.crash();
        let store = open(&fs, false)?;
        for key in 1..=count {
            ensure(io(store.look(key))?.is_none(), "a removed object is there again")?;
        }
        for key in (1..=count).rev().take(5) {
            ensure(write(&store, key, 0, b"late").is_err(), "a removed object is made again")?;
        }
    }
    Ok(())
}

fn a_full_device_removes_durably(bench: &mut Bench) -> Outcome {
    let fs = bench.fs_of(20_000);
    let store = open(&fs, false)?;
    write(&store, 1, 0, b"a")?;
    io(store.sync(1))?;
    ensure(write(&store, 3, 0, &[1; 20_000]).is_err(), "the device is not full")?;
    io(store.unlink(1))?;
    fs.crash();
    ensure(io(open(&fs, false)?.look(1))?.is_none(), "a removed object is there again")
}

fn what_was_set_aside_is_kept(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, false)?;
    io(store.unlink(9))?;
    write(&store, 1, 0, b"an orphan")?;
    io(store.set_aside(1))?;
    fs.crash();
    ensure(io(open(&fs, false)?.look(1))?.is_none(), "it is there again")?;
    let file = io(fs.open("set-aside/0000000000000001", false))?;
    ensure(io(fs.stat(&file))?.size == 9, "it has lost its content")
}

fn rot_after_a_crash_is_found(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, true)?;
    write(&store, 1, 0, &[7; 10_000])?;
    io(store.sync(1))?;
    fs.crash();
    let store = open(&fs, true)?;
    ensure(fs.rot(&path(1), 5000, 1), "there is no such byte")?;
    ensure(reads(&store, 1).is_err(), "rot is not found")
}

/// A write over synced blocks, and a crash that keeps any part of it.
fn a_crash_is_no_damage(bench: &mut Bench, blocks: usize, written: usize) -> Outcome {
    for seed in 0..24 {
        let fs = bench.fs();
        let store = open(&fs, true)?;
        write(&store, 1, 0, &vec![7; blocks * 4096])?;
        io(store.sync(1))?;
        write(&store, 1, 0, &vec![8; written])?;
        fs.crash_partly(seed);
        reads(&open(&fs, true)?, 1)?;
    }
    Ok(())
}

fn a_failed_sync_of_checksums_is_made_up_for(bench: &mut Bench) -> Outcome {
    for seed in 0..24 {
        let fs = bench.fs();
        let store = open(&fs, true)?;
        write(&store, 1, 0, &[7; 4096])?;
        io(store.sync(1))?;
        fs.fail_syncs(true);
        let _ = write(&store, 1, 0, &[8; 4096]);
        drop(store);
        fs.fail_syncs(false);
        let store = open(&fs, true)?;
        write(&store, 1, 0, &[9; 4096])?;
        fs.crash_partly(seed);
        reads(&open(&fs, true)?, 1)?;
    }
    Ok(())
}

/// What was written while checksums were off has none, wherever a sync that stores new ones is interrupted.
fn an_older_era_does_not_count(bench: &mut Bench) -> Outcome {
    for seed in 0..32 {
        let fs = bench.fs();
        let store = open(&fs, true)?;
        write(&store, 1, 0, &[7; 200 * 4096])?;
        io(store.sync(1))?;
        let store = open(&fs, false)?;
        write(&store, 1, 0, &[8; 200 * 4096])?;
        io(store.sync(1))?;
        fs.crash();
        let store = open(&fs, true)?;
        reads(&store, 1)?;
        let only_read = fs.copied();
        only_read.crash_partly(seed);
        reads(&open(&only_read, true)?, 1)?;
        write(&store, 1, 0, &[9; 4096])?;
        fs.stop_after(seed % 8);
        let _ = store.sync(1);
        fs.crash_partly(seed);
        reads(&open(&fs, true)?, 1)?;
    }
    Ok(())
}

/// An object whose name a crash has lost and whose checksums it has kept is made anew.
fn checksums_of_a_lost_object_do_not_count(bench: &mut Bench) -> Outcome {
    for seed in 0..200u64 {
        let fs = bench.fs();
        let store = open(&fs, true)?;
        write(&store, 1, 0, &[7; 4096])?;
        let mut settled = Ok(());
        store.settle_older(Duration::ZERO, |_, error| settled = Err(error.to_string()));
        settled?;
        fs.crash_partly(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let store = open(&fs, true)?;
        write(&store, 1, 0, &[9; 4096])?;
        fs.crash_partly(seed.wrapping_mul(0xd134_2543_de82_ef95));
        reads(&open(&fs, true)?, 1)?;
    }
    Ok(())
}

fn arriving() -> Arriving {
    let arrived = Arrived { address: "here:7".into(), boot: (1, 2) };
    Arriving { number: 9, next: None, batch: 1, is_complete: true, arrived }
}

fn a_folder_that_arrived_is_served(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, false)?;
    io(store.note_arriving(&arriving()))?;
    io(store.arrive(&arriving().arrived))?;
    fs.crash();
    open(&fs, false).map(drop)
}

fn a_server_that_could_not_leave_stays(bench: &mut Bench) -> Outcome {
    let fs = bench.fs();
    let store = open(&fs, false)?;
    io(store.depart(&Departed { number: 9, address: "there:7".into() }))?;
    io(store.stay())?;
    fs.crash();
    open(&fs, false).map(drop)
}

fn a_copy_that_was_given_up_is_never_served(bench: &mut Bench) -> Outcome {
    for seed in 0..200u64 {
        let fs = bench.fs();
        io(open(&fs, false)?.note_arriving(&arriving()))?;
        io(unmark_over(&fs))?;
        fs.crash_partly(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let opened = ObjectStore::over(fs, Path::new("forgetful"), "data.0", StoreOptions::default());
        ensure(opened.is_err(), "a copy that was given up is served")?;
    }
    Ok(())
}

/// More than a generation of them.
fn removals_of_another_folder_are_kept(bench: &mut Bench) -> Outcome {
    let (fs, keys) = (bench.fs(), [1, 2, 3, 4, 5, 6, 7]);
    io(open(&fs, false)?.remember_all_removed(&keys))?;
    fs.crash();
    let late = open(&fs, false)?;
    ensure(keys.iter().all(|key| write(&late, *key, 0, b"late").is_err()), "a removed object is made again")
}

fn all(bench: &mut Bench) -> Outcome {
    removals_of_another_folder_are_kept(bench)?;
    a_folder_that_arrived_is_served(bench)?;
    a_server_that_could_not_leave_stays(bench)?;
    a_copy_that_was_given_up_is_never_served(bench)?;

    a_folder_stays_made(bench)?;
    what_was_synced_is_there(bench, false)?;
    what_was_synced_is_there(bench, true)?;
    a_note_before_a_sync_is_kept(bench)?;
    what_was_removed_stays_removed(bench)?;
    a_full_device_removes_durably(bench)?;
    what_was_set_aside_is_kept(bench)?;
    rot_after_a_crash_is_found(bench)?;
    a_crash_is_no_damage(bench, 1, 4096)?;
    a_crash_is_no_damage(bench, 3, 4096)?;
    a_failed_sync_of_checksums_is_made_up_for(bench)?;
    an_older_era_does_not_count(bench)?;
    checksums_of_a_lost_object_do_not_count(bench)
}

/// Calls that sync, in the sources of the store: file and number.
fn in_the_sources() -> BTreeSet<(String, usize)> {
    let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let mut found = BTreeSet::new();
    for file in files.map(|file| file.unwrap()) {
        let name = file.file_name().into_string().unwrap();
        if ["testing.rs", "real.rs", "filesystem.rs"].contains(&name.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(file.path()).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let calls = ["fs.sync(", "fs.sync_data(", "fs.sync_dir("].map(|call| code.matches(call).count());
        let count = calls.iter().sum();
        if count > 0 {
            found.insert((name, count));
        }
    }
    found
}

#[test]
fn every_sync_is_needed() {
    let mut bench = Bench { ignored: None, made: Vec::new() };
    all(&mut bench).unwrap();
    let sites: BTreeSet<SyncSite> = bench.made.iter().flat_map(Forgetful::sync_sites).collect();
    let files: BTreeSet<&str> = sites.iter().map(|site| site.0).collect();
    let count = |file: &str| sites.iter().filter(|site| site.0 == file).count();
    let met: BTreeSet<(String, usize)> =
        files.iter().map(|file| (file.rsplit('/').next().unwrap().to_string(), count(file))).collect();
    assert_eq!(met, in_the_sources(), "a sync that no scenario comes to");
    let mut needless = Vec::new();
    for site in sites {
        match all(&mut Bench { ignored: Some(site), made: Vec::new() }) {
            Ok(()) => needless.push(site),
            Err(why) => println!("{}:{}:{}: {why}", site.0, site.1, site.2),
        }
    }
    assert!(needless.is_empty(), "nothing fails without {needless:?}");
}
