//! Real programs see the same through bricks with the translator, above io-threads or in its place, as through
//! GlusterFS as it comes and in a plain folder.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::{Machine, Mount, Place, Volume, apart, apart_within, cooling, on_disk, script, succeed};
use impresario_testing::suites::{Fsx, Outcome, pjdfstest};

/// What programs do to files. Ends with a list of all names, sizes and sums.
const PROGRAMS: &str = r#"
    seed() { openssl enc -aes-128-ctr -K 00112233445566778899aabbccddeeff -iv "$1" </dev/zero 2>/dev/null | head -c "$2"; }
    mkdir data && cd data
    seed 01 9000000 >whole
    # Pieces of odd sizes that overlap, out of order, by several processes.
    for i in 3 1 4 0 5 2; do seed 0$i 700001 >piece$i; done
    for i in 3 1 4 0 5 2; do dd if=piece$i of=assembled bs=65537 seek=$((i * 10)) conv=notrunc status=none & done; wait
    for i in 0 1 2 3 4 5; do dd if=piece$i of=assembled bs=65537 seek=$((i * 10)) conv=notrunc,fsync status=none; done
    for i in 0 1 2; do cat piece$i >>appended; done
    dd if=whole of=synced bs=100003 oflag=sync status=none
    # Shorter, longer, and over the edge of a shard.
    cp whole cut && truncate -s 4194305 cut && truncate -s 6000000 cut && printf end >>cut
    cp whole shrunk && truncate -s 1 shrunk && truncate -s 0 shrunk
    # Open files that are renamed and removed.
    exec 3<>whole 4<>piece5
    mv whole moved && rm piece5
    head -c 1000000 <&3 >from-renamed && head -c 500000 <&4 >from-removed
    printf written-after >&3; exec 3>&- 4>&-
    ln moved linked && ln -s moved symbolic
    # A repository.
    git init -q repository && cd repository && git config user.email a@b && git config user.name c
    export GIT_AUTHOR_DATE="2020-01-01T00:00:00Z" GIT_COMMITTER_DATE="2020-01-01T00:00:00Z"
    for i in $(seq 30); do seed 0a $((i * 997)) >file$i; done
    git add . && git commit -qm one && git mv file1 renamed && rm file2 && git commit -qam two
    git repack -qad && git fsck --full >/dev/null 2>&1 && git checkout -q HEAD~1 && git log --format=%H >../log
    cd .. && rm -rf repository/.git
    find . -type f -printf '%p %s %n\n' | sort
    find . -type f | sort | xargs sha256sum
"#;

/// Holes and zeros, which shards do not support. The mount of GlusterFS 10.3 makes an `fallocate` without zeros of one with,
/// so what GlusterFS as it comes has in its bricks is what is expected. The kernel clears the pages at the edges all the same, which
/// shows for as long as it keeps them: they are dropped before anything is read.
const HOLES: &str = r#"
    mkdir holes && cd holes
    for f in punched zeroed both; do head -c 3000000 /dev/zero | tr '\0' x >$f; done
    fallocate -p -o 4096 -l 1000000 punched
    fallocate -z -o 5000 -l 70000 zeroed
    fallocate -z -o 5000 -l 70000 both && fallocate -p -o 8192 -l 2000000 both
    for f in punched zeroed both; do sync $f; dd if=$f iflag=nocache count=0 status=none; done
    find . -type f | sort | xargs sha256sum
"#;

/// Lines that only one of two texts has.
fn differences(one: &str, other: &str) -> Vec<String> {
    let only = |mark: &str, a: &str, b: &str| -> Vec<String> {
        a.lines().filter(|line| !b.lines().any(|l| l == *line)).map(|line| format!("{mark} {line}")).collect()
    };
    [only("only there:", one, other), only("missing:", other, one)].concat()
}

fn fio(folder: &Path, arguments: &[&str]) {
    let mut fio = Command::new("fio");
    fio.args(["--name=job", "--ioengine=libaio", "--direct=1", "--size=8m", "--verify=crc32c", "--verify_fatal=1"]);
    succeed(fio.args(["--numjobs=2", "--thread", "--group_reporting"]).args(arguments).current_dir(folder));
}

/// Programs whose requests are many at a time, so that a queue forms and neighbours meet in it.
fn verified_loads(folder: &Path) {
    fio(folder, &["--rw=write", "--bs=64k", "--iodepth=16"]);
    fio(folder, &["--rw=randrw", "--bs=4k", "--iodepth=16", "--io_size=8m"]);
    fio(folder, &["--rw=rw", "--bsrange=1k-300k", "--bs_unaligned", "--direct=0", "--fsync=8"]);
}

#[test]
fn programs_see_the_same_with_and_without_the_translator() {
    if impresario_testing::require("fio") && impresario_testing::require("openssl") {
        apart("content::inside_programs_see_the_same");
    }
}

/// Compiles a program of the tests.
fn compiled(machine: &Machine, source: &str) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let program = machine.path(source.file_stem().unwrap().to_str().unwrap());
    succeed(Command::new("cc").args(["-O1", "-w", "-pthread", "-o"]).arg(&program).arg(source));
    program.to_str().unwrap().to_string()
}

#[test]
fn system_calls_do_the_same_with_and_without_the_translator() {
    if impresario_testing::require("cc") {
        apart("content::inside_system_calls_do_the_same");
    }
}

/// What a client has under way at a time is done in the order in which it came, above io-threads, which keep none, and in their place.
#[test]
fn requests_under_way_together_keep_their_order() {
    if impresario_testing::require("cc") && impresario_testing::require("pkg-config") {
        apart("content::inside_requests_under_way_keep_their_order");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_requests_under_way_keep_their_order() {
    let machine = Machine::new();
    let program = machine.path("order");
    let build = "cc -O1 -Wall -o \"$0\" \"$1\" $(pkg-config --cflags --libs glusterfs-api) -pthread";
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/order.c");
    succeed(Command::new("bash").args(["-euc", build]).arg(&program).arg(source));
    for (name, place, merge, depth, policy) in [
        ("above-fd", Place::Above, "fd", "1", "mlf"),
        ("above-file", Place::Above, "file", "4", "mlf"),
        ("above-off", Place::Above, "off", "16", "none"),
        ("instead-fd", Place::Instead, "fd", "4", "auto"),
        ("instead-file", Place::Instead, "file", "1", "aioli"),
    ] {
        // Memory knows no zeroing: GlusterFS then writes zeros at a position that requests of a descriptor share.
        let Some(_disk) = on_disk(&machine, name) else { return };
        // Two threads that receive do not keep the order of what one connection sends.
        let options = [("policy", policy), ("depth", depth), ("merge", merge), ("server.event-threads", "1")];
        let mut volume = Volume::start(&machine, name, 2, place, &options);
        // The bricks answer.
        drop(volume.mount_whole_files());
        let graph = machine.path(name).join("whole-files.vol");
        for seed in 1..=2 {
            let mut order = Command::new(&program);
            order.arg(&graph).args(["4", "1000", &seed.to_string()]);
            assert_eq!(succeed(&mut order), "good\n", "{name}");
        }
        let (merged, calls) = (volume.sum("merged_requests"), volume.sum("merged_calls"));
        println!("{name}: {merged} requests in {calls} calls, {} were ordered", volume.sum("ordered_requests"));
        assert!(volume.sum("ordered_requests") > 0, "{name}");
        // These make batches.
        assert!(calls > 0 || !["mlf", "aioli"].contains(&policy), "{name}");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_system_calls_do_the_same() {
    let machine = Machine::new();
    let corners = compiled(&machine, "../../crates/cli/tests/run/corners.c");
    let exercise = compiled(&machine, "../../crates/testing/c/exercise.c");
    let mut expected = None;
    for (name, place) in [("as-it-comes", Place::None), ("above", Place::Above), ("instead", Place::Instead)] {
        let mut volume = Volume::start(&machine, name, 4, place, &[("policy", "mlf"), ("depth", "1")][..]);
        let (shards, whole) = (volume.mount(&[]), volume.mount_whole_files());
        // Times that are set are those of the moment here, with and without the translator.
        let corners = format!("{corners} $folder | grep -v st_mtim");
        let seen = [(&shards, "a"), (&whole, "b")]
            .map(|(mount, folder)| script(&mount.path, &format!("folder={folder}; mkdir $folder; {corners}")));
        let expected = expected.get_or_insert_with(|| seen.clone());
        for (seen, expected) in seen.iter().zip(expected.iter()) {
            assert!(seen == expected, "{name}: {:#?}", differences(seen, expected));
        }
        // Several files at a time, each with its own order.
        let run = format!(
            "for seed in 1 2 3 4; do {exercise} file$seed$holes 400 $seed m$holes & jobs+=($!); done; \
             for job in ${{jobs[@]}}; do wait $job; done"
        );
        assert_eq!(script(&shards.path, &format!("holes=; {run}")).matches("good").count(), 4, "{name}");
        assert_eq!(script(&whole.path, &format!("holes=h; {run}")).matches("good").count(), 4, "{name}");
    }
}

#[test]
#[ignore = "takes minutes: make soak"]
fn suites_find_the_same_with_and_without_the_translator() {
    if impresario_testing::require("pjdfstest") && impresario_testing::require("fsx") {
        apart_within("content::inside_suites_find_the_same", Duration::from_secs(1800));
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_suites_find_the_same() {
    let machine = Machine::new();
    let mut expected = None;
    for (name, place) in [("as-it-comes", Place::None), ("above", Place::Above), ("instead", Place::Instead)] {
        // On a disk, and with little in memory: only then is something read ahead.
        let Some(_disk) = on_disk(&machine, name) else { return };
        let mut volume = Volume::start(&machine, name, 4, place, &[("policy", "mlf"), ("depth", "1")][..]);
        let (shards, whole, uncached) = (volume.mount(&[]), volume.mount_whole_files(), volume.mount_uncached());
        let _cooling = [0, 1, 2, 3].map(|brick| cooling(&machine.path(&format!("{name}/brick{brick}"))));
        fs::set_permissions(&shards.path, fs::Permissions::from_mode(0o755)).unwrap();
        let outcomes = pjdfstest(&shards.path);
        let count = |outcome| outcomes.values().filter(|found| **found == outcome).count();
        let (passed, failed, skipped) = (count(Outcome::Passed), count(Outcome::Failed), count(Outcome::Skipped));
        println!("{name}: pjdfstest: {passed} passed, {failed} failed, {skipped} skipped");
        let expected = expected.get_or_insert_with(|| outcomes.clone());
        let differing: Vec<_> =
            outcomes.iter().filter(|(test, outcome)| expected.get(*test) != Some(outcome)).collect();
        assert!(differing.is_empty(), "{name}: not as without the translator: {differing:?}");
        std::thread::scope(|scope| {
            for seed in 1..=2 {
                let files = [(&shards, "s"), (&whole, "w"), (&uncached, "u")];
                let [shards, whole, uncached] = files.map(|(mount, name)| mount.path.join(format!("{name}{seed}")));
                scope.spawn(move || Fsx { maps: true, space: false, copies: true }.run(&shards, seed, 2000));
                scope.spawn(move || Fsx { maps: true, space: true, copies: true }.run(&whole, seed, 2000));
                // Every read is one of the brick.
                scope.spawn(move || Fsx { maps: false, space: true, copies: false }.run(&uncached, seed, 2000));
            }
        });
        println!("{name}: fsx: 6 runs of 2000 calls passed");
        if place != Place::None {
            let ahead = volume.sum("read_ahead_read_bytes");
            println!(
                "{name}: {ahead} bytes were read ahead, {} of them in vain",
                volume.sum("read_ahead_wasted_bytes")
            );
            assert!(ahead > 1 << 20, "{name}");
        }
    }
}

/// storage/posix writes every piece of a call by itself where it passes the page cache by.
#[test]
fn writes_past_the_page_cache_are_merged_at_the_disk_too() {
    apart("content::inside_writes_past_the_page_cache_are_merged_at_the_disk_too");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_writes_past_the_page_cache_are_merged_at_the_disk_too() {
    const LEN: usize = 16 << 10;
    const WRITES: usize = 512;
    let machine = Machine::new();
    let Some(_disk) = on_disk(&machine, "direct") else { return };
    let options = [("policy", "mlf"), ("depth", "1"), ("merge", "file"), ("storage.o-direct", "on")];
    let mut volume = Volume::start(&machine, "direct", 1, Place::Above, &options);
    // A mount has one write of a file on its way at a time.
    let mounts: Vec<_> = (0..8).map(|_| volume.mount_uncached()).collect();
    // Not written by who made it: storage/posix of GlusterFS 10 then does not align what it writes, with or without a translator.
    fs::File::create(mounts[0].path.join("f")).unwrap().set_len((LEN * WRITES) as u64).unwrap();
    let open = |mount: &Mount| fs::OpenOptions::new().write(true).open(mount.path.join("f")).unwrap();
    let files: Vec<fs::File> = mounts.iter().map(open).collect();
    let (content, step) = (|n: usize| vec![(n % 251) as u8 + 1; LEN], files.len());
    let saved_before = volume.saved_calls();
    let (mut writes, mut calls, mut saved) = (0, 0, 0);
    // On a busy machine few of them meet.
    while saved < 64 && writes < 20 * WRITES as u64 {
        // Without the calls that write statedumps.
        let before = volume.bricks[0].write_calls();
        std::thread::scope(|scope| {
            for (first, file) in files.iter().enumerate() {
                scope.spawn(move || {
                    for n in (first..WRITES).step_by(step) {
                        file.write_all_at(&content(n), (n * LEN) as u64).unwrap();
                    }
                });
            }
        });
        calls += volume.bricks[0].write_calls() - before;
        writes += WRITES as u64;
        saved = volume.saved_calls() - saved_before;
    }
    println!("{writes} writes, {calls} calls, {saved} saved");
    assert!(saved >= 64, "nothing to be seen: {saved} of {writes} writes were merged with another");
    // An answer for each write, and a write of the disk for each call of the translator.
    assert!(calls < 2 * writes - saved / 2, "{calls} calls for {writes} writes, of which {saved} were saved");
    let seen = fs::read(machine.path("direct").join("brick0/f")).unwrap();
    assert_eq!(seen.len(), LEN * WRITES);
    assert!(seen.chunks(LEN).enumerate().all(|(n, chunk)| chunk == content(n)), "other bytes than were written");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_programs_see_the_same() {
    let machine = Machine::new();
    let plain = machine.path("plain");
    fs::create_dir(&plain).unwrap();
    let expected = script(&plain, PROGRAMS);
    let mut expected_holes = None;
    let queued = [("policy", "mlf"), ("depth", "1")];
    for (name, place, options) in [
        ("as-it-comes", Place::None, &[][..]),
        ("defaults", Place::Above, &[]),
        ("above", Place::Above, &queued),
        ("instead", Place::Instead, &queued),
    ] {
        let mut volume = Volume::start(&machine, name, 4, place, options);
        let mount = volume.mount(&[]);
        let holes = volume.mount_whole_files();
        let seen = script(&mount.path, PROGRAMS);
        assert!(seen == expected, "{name}: {:#?}", differences(&seen, &expected));
        let seen = script(&holes.path, HOLES);
        let expected = expected_holes.get_or_insert_with(|| seen.clone());
        assert!(seen == *expected, "{name}: {:#?}", differences(&seen, expected));
        if options.is_empty() {
            continue;
        }
        verified_loads(&mount.path);
        // What the load was for: the translator had a queue and made several requests one.
        let (merged, calls) = (volume.sum("merged_requests"), volume.sum("merged_calls"));
        assert!(calls > 0 && merged >= 2 * calls, "{name}: {merged} requests in {calls} calls");
        for figure in
            ["open_requests", "queued_write_bytes", "queued_requests", "in_flight_batches", "unscheduled_requests"]
        {
            assert_eq!(volume.sum(figure), 0, "{name}: {figure}");
        }
    }
}
