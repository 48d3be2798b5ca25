//! The space that `df` shows: what the file systems of the data servers have, each counted once.

use std::sync::Arc;

use crate::support::{Cluster, SmallDisk};
use impresario_client::{Client, ClientOptions, CreateOptions, File, Via};
use impresario_wire::{LayoutRequest, Statfs};

const MIB: u64 = 1 << 20;

fn create(client: &Arc<Client>, name: &str) -> File {
    let layout = LayoutRequest { base: Some(0), pcount: Some(4), ssize_bytes: Some(64 << 10) };
    client.create(name, CreateOptions { layout: Some(layout), ..CreateOptions::default() }).unwrap()
}

/// Writes whole MiB, each of which all four servers have an equal part of.
fn fill(file: &File, mib: u64) -> Result<(), i32> {
    let bytes = vec![7; MIB as usize];
    (0..mib).try_for_each(|n| file.write_at(&bytes, n * MIB).map(|_| ()).map_err(|error| error.errno()))
}

#[test]
fn what_is_told_free_can_be_written_and_no_more() {
    let Some(shared) = SmallDisk::mount(c"size=16m") else { return };
    let (Some(one), Some(other)) = (SmallDisk::mount(c"size=40m"), SmallDisk::mount(c"size=48m")) else { return };
    let cluster = Cluster::start(4, |config| {
        let folders = [shared.at("d0"), one.at("d1"), shared.at("d2"), other.at("d3")];
        config.data.iter_mut().zip(folders).for_each(|(data, folder)| data.dir = folder);
    });
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let client = Client::connect(&cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap();
    let space = || {
        let Statfs { total_bytes, free_bytes, .. } = client.statfs().unwrap();
        (total_bytes, free_bytes)
    };
    let (total, free) = space();
    assert_eq!(total, (16 + 40 + 48) * MIB);
    // Two of four servers fill the smallest.
    assert!((30 * MIB..=32 * MIB).contains(&free), "{free}");
    let file = create(&client, "file");
    fill(&file, 28).unwrap();
    let (_, left) = space();
    assert!(free - 28 * MIB - left < MIB, "{left} of {free}");
    assert_eq!(fill(&create(&client, "more"), 6), Err(libc::ENOSPC));
    assert_eq!(space().0, total);
    let (_, left) = space();
    assert!(left < MIB, "{left}");
    client.unlink("more").unwrap();
    client.unlink("file").unwrap();
    drop(file);
    impresario_testing::until("what was removed is free", || space().1 > free - MIB);
    // What one loses to others is missing to all who share it.
    std::fs::write(shared.at("foreign"), vec![1; 8 * MIB as usize]).unwrap();
    let (_, left) = space();
    assert!(free - 16 * MIB - left < MIB, "{left} of {free}");
}
