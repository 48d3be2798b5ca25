//! A store on a real file system whose machine loses its power: the syncs that the store asks for are made.

use std::io::IoSlice;
use std::path::Path;

use impresario_store::{FolderIdentity, ObjectStore, StoreError, StoreOptions, make};
use impresario_testing::power::Disk;

fn open(disk: &Disk) -> ObjectStore {
    let dir: &Path = &disk.folder().join("data");
    let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
    match make(dir, &identity) {
        Ok(()) | Err(StoreError::Made { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    ObjectStore::open(dir, "data.0", StoreOptions { checksums: Some(true), ..StoreOptions::default() }).unwrap()
}

fn write(store: &ObjectStore, key: u64, offset: u64, byte: u8) {
    store.write_vectored(key, offset, &[IoSlice::new(&[byte; 5000])]).unwrap();
}

#[test]
fn what_was_promised_outlasts_a_power_failure() {
    let Some(disk) = Disk::new() else { return };
    let store = open(&disk);
    store.open_notes().unwrap();
    for key in [1, 2, 3] {
        write(&store, key, 0, 1);
        store.sync(key).unwrap();
    }
    // In place: no length changes, only bytes and the time.
    write(&store, 1, 0, 2);
    store.set_mtime(1, 1_000_000_000, 7).unwrap();
    store.sync(1).unwrap();
    write(&store, 2, 0, 2);
    store.unlink(3).unwrap();
    write(&store, 4, 0, 4);
    let after = disk.after_power_failure();
    drop(store);
    let store = open(&after);
    let mut got = [0; 6000];
    assert_eq!((store.read(1, 0, &mut got).unwrap(), got[0], got[4999]), (5000, 2, 2));
    let state = store.stat(1).unwrap();
    assert_eq!((state.mtime_secs, state.mtime_nanos), (1_000_000_000, 7));
    assert_eq!((store.read(2, 0, &mut got).unwrap(), got[0]), (5000, 1), "what was not synced is lost here");
    assert!(store.look(3).unwrap().is_none() && store.write_vectored(3, 0, &[IoSlice::new(&[1])]).is_err());
    assert!(store.look(4).unwrap().is_none_or(|state| state.size == 0), "what was not synced is lost here");
}
