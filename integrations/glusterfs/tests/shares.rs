//! Tenants share a brick by their weights, and none has more than its cap, however much it asks for.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Machine, Place, Process, Volume, apart, until};

const BLOCK_BYTES: u64 = 64 << 10;
/// What each call below the translator takes, so that the brick is the bottleneck.
const CALL_US: &str = "4000";
const WRITERS: usize = 4;
const MEASURED: Duration = Duration::from_secs(4);
/// Blocks of each tenant before it is measured.
const SETTLED_BLOCKS: u64 = 20;

/// A tenant: who writes, from which mount, to files of this name.
pub struct Tenant<'a> {
    pub name: &'a str,
    pub user: u32,
    pub group: u32,
    pub mount: &'a Path,
}

impl Tenant<'_> {
    /// Starts processes that write as much as they can.
    pub fn write(&self) -> Vec<Process> {
        let writer = |nth: usize| {
            let mut dd = Command::new("setpriv");
            dd.args([format!("--reuid={}", self.user), format!("--regid={}", self.group), "--clear-groups".into()]);
            dd.args(["dd", "if=/dev/zero", "bs=64k", "count=100000", "oflag=direct", "status=none"]);
            Process::start(dd.arg(format!("of={}-{nth}", self.name)).current_dir(self.mount))
        };
        (0..WRITERS).map(writer).collect()
    }
}

/// Blocks that tenants have written to the brick in a folder.
pub fn written(brick: &Path, tenants: &[&str; 2]) -> [u64; 2] {
    let size = |path: PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
    tenants.map(|name| (0..WRITERS).map(|nth| size(brick.join(format!("{name}-{nth}")))).sum::<u64>() / BLOCK_BYTES)
}

/// Blocks a second of two tenants, both of which write all the time.
pub fn rates(brick: &Path, tenants: &[&str; 2]) -> [f64; 2] {
    let start = written(brick, tenants);
    until("writes of both", || (0..2).all(|nth| written(brick, tenants)[nth] >= start[nth] + SETTLED_BLOCKS));
    let (before, began) = (written(brick, tenants), Instant::now());
    std::thread::sleep(MEASURED);
    let (after, took_s) = (written(brick, tenants), began.elapsed().as_secs_f64());
    [0, 1].map(|nth| (after[nth] - before[nth]) as f64 / took_s)
}

#[test]
fn weights_and_caps_hold_inside_a_brick() {
    apart("shares::inside_weights_and_caps");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_weights_and_caps() {
    let machine = Machine::new();
    let twice = "{quantum_bytes=131072}; rest: * {quantum_bytes=65536}";
    let weighed =
        |policy: &'static str, first: &str, job: &'static str| (policy, format!("first: {first} {twice}"), job);
    for (name, (policy, rules, job), expected) in [
        ("users", weighed("wfq by=user", "user=1001", "process"), 2.0),
        ("hosts", weighed("wfq by=client", "client=host:large", "process"), 2.0),
        ("groups", weighed("wfq by=job", "job=4001", "group"), 2.0),
        ("weights", ("mclock", "first: user=1001 {weight=3}; rest: * {weight=1}".into(), "process"), 3.0),
        // Its weight would give it more than its cap does.
        ("caps", ("mclock", "first: user=1001 {weight=3, limit=40}; rest: * {weight=1}".into(), "process"), 0.0),
    ] {
        let options =
            [("policy", policy), ("rules", &rules), ("job", job), ("depth", "1"), ("delay.delay-duration", CALL_US)];
        let mut volume = Volume::start(&machine, name, 1, Place::Above, &options);
        let mounts = ["large", "small"].map(|host| volume.mount_from(host));
        fs::set_permissions(&mounts[0].path, fs::Permissions::from_mode(0o777)).unwrap();
        let tenant = |nth: usize, name| {
            let own = nth as u32 + 1;
            Tenant { name, user: 1000 + own, group: 4000 + own, mount: &mounts[nth].path }
        };
        let names = ["first", "second"];
        let writers = [tenant(0, names[0]).write(), tenant(1, names[1]).write()];
        let [first, second] = rates(&machine.path(name).join("brick0"), &names);
        println!("{name}: {first:.1} and {second:.1} blocks a second, {:.2} : 1", first / second);
        match expected {
            0.0 => assert!((32.0..=44.0).contains(&first) && second > 2.0 * first, "{name}: {first} and {second}"),
            ratio => assert!((0.85..=1.15).contains(&(first / second / ratio)), "{name}: {first} and {second}"),
        }
        drop((writers, mounts));
        volume.bricks.clear();
    }
}
