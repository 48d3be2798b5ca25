//! What is merged without an option, and that merging shows nobody what a lock keeps from them.

use std::path::Path;
use std::process::Command;

use crate::support::{Machine, Place, Volume, apart, succeed, until};

#[test]
fn requests_through_several_descriptors_are_merged_until_the_file_is_locked() {
    if impresario_testing::require("cc") && impresario_testing::require("pkg-config") {
        apart("merging::inside_several_descriptors");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_several_descriptors() {
    let machine = Machine::new();
    let program = machine.path("locked");
    let build = "cc -O1 -w -o \"$0\" \"$1\" $(pkg-config --cflags --libs glusterfs-api) -pthread";
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/locked.c");
    succeed(Command::new("bash").args(["-euc", build]).arg(&program).arg(source));
    // Each call of the storage takes so long that a queue forms.
    let queue = [("policy", "mlf"), ("depth", "1"), ("delay.delay-duration", "2000")];
    for (name, merge) in [("default", None), ("file", Some(("merge", "file")))] {
        let options: Vec<_> = queue.into_iter().chain(merge).chain([("locks.mandatory-locking", "forced")]).collect();
        let mut volume = Volume::start(&machine, name, 1, Place::Above, &options);
        // The brick answers.
        drop(volume.mount_whole_files());
        let graph = machine.path(name).join("whole-files.vol");
        let reads = |file: &str, locks: &str| succeed(Command::new(&program).arg(&graph as &Path).args([file, locks]));
        let before = volume.saved_calls();
        assert_eq!(reads("/free", "0"), "192 192 of 192\n", "{name}");
        let saved = volume.saved_calls() - before;
        println!("{name}: merging saved {saved} calls");
        // Neighbours come through different descriptors.
        assert!(saved > 20, "{name}: {saved}");
        // Nothing is read through the lock, and nothing of its owner is refused.
        assert_eq!(reads("/locked", "1"), "192 0 of 192\n", "{name}");
        // The brick counts a request as ended after its client has the reply, and may still be reading ahead.
        until("the end", || volume.sum("open_requests") == 0);
        volume.bricks.clear();
    }
}
