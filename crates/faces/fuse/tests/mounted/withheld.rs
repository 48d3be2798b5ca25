//! Programs that a limit withholds wait in the kernel, and can be ended.

use std::process::{Command, Stdio};
use std::time::Duration;

use impresario_testing::until;

use crate::cluster::Cluster;

#[test]
fn a_program_that_a_limit_withholds_can_be_killed() {
    let timeout = Duration::from_secs(2);
    let cluster = Cluster::with(timeout, 0, |config| {
        // What there is by default is another policy's.
        let mut limits = config.data[0].policy.clone();
        (limits.name, limits.params) = ("tbf".into(), Default::default());
        let mut limit = |rules: &str| {
            limits.params.insert("rules".into(), rules.into());
            limits.clone()
        };
        let written = limit("slow: op=write {bytes_per_s=10, burst=1, each=file}");
        config.data.iter_mut().for_each(|data| data.policy = written.clone());
        config.meta.policy = Some(limit("slow: op=create {requests_per_s=0.001, burst=1}"));
    });
    let Some(cluster) = cluster else { return };
    let node = cluster.mount(Default::default());
    // The first request of each kind passes.
    let write = Command::new("dd")
        .args(["if=/dev/zero", "bs=4096", "count=3"])
        .arg(format!("of={}", node.at("written").display()))
        .stderr(Stdio::null())
        .spawn();
    until("the file is there", || node.at("written").exists());
    let make = Command::new("mkdir").arg(node.at("made")).spawn();
    let mut programs = [write.unwrap(), make.unwrap()];
    std::thread::sleep(2 * timeout);
    for program in &mut programs {
        assert!(program.try_wait().unwrap().is_none(), "{program:?} waits");
        program.kill().unwrap();
    }
    for program in &mut programs {
        until("it has ended", || program.try_wait().unwrap().is_some());
    }
}
