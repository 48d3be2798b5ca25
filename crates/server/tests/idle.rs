//! A cluster with clients connected and nothing to do uses no processor. Alone in its process, which is what is measured.

mod support;

use std::time::Duration;

use impresario_wire::{Answer, Call, FileKey, Role};
use support::{Cluster, Peer, pattern, who};

/// Processor time that this process has used.
fn used() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// How often its threads have slept.
fn sleeps() -> u64 {
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    };
    std::fs::read_dir("/proc/self/task").unwrap().filter_map(of).sum()
}

#[test]
fn an_idle_cluster_uses_no_processor() {
    let mut cluster = Cluster::start(4, |config| {
        config.data[0].device = Some("disk".into());
        config.device.insert("disk".into(), Default::default());
    });
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let nodes = [
        cluster.start_io(|io| io.policy = impresario_sched::PolicySpec::named("twins")),
        cluster.start_io(|io| io.split = true),
    ];
    let layout = impresario_layout::Layout::over_all(4).unwrap();
    let mut peers: Vec<Peer> = Vec::new();
    for client in 0..20 {
        let mut peer = Peer::connect(nodes[client % 2].address(), Role::Io, client as u64);
        let (who, file) = (who(client as u64), FileKey(client as u64));
        let call = Call::FileWrite { who, file, layout, offset: 0 };
        assert_eq!(peer.call(&call, &pattern(1, 100_000)).0, Answer::Written(100_000));
        assert!(matches!(
            peer.call(
                &Call::Meta { who: impresario_wire::Who::default(), call: impresario_wire::MetaCall::Statfs },
                &[]
            )
            .0,
            Answer::Statfs(_)
        ));
        peers.push(peer);
    }
    // What was made on demand may linger, longer on a busy machine: one of several spans must be idle.
    let used_in = |_| {
        let (before, slept, span) = (used(), sleeps(), Duration::from_secs(2));
        std::thread::sleep(span);
        let share = (used() - before).as_secs_f64() / span.as_secs_f64();
        (share, sleeps().saturating_sub(slept) as f64 / span.as_secs_f64())
    };
    let mut shares = Vec::new();
    // On some machines the few times that threads wake up take more than 1 %.
    let is_idle = (0..15).map(used_in).any(|(share, sleeps_per_s)| {
        shares.push((share, sleeps_per_s));
        share < 0.01 || share < 0.05 && sleeps_per_s < 200.0
    });
    println!("shares of a processor, and how often threads woke up in a second: {shares:.4?}");
    assert!(is_idle, "seven idle servers used 1 % of a processor or more in every span: {shares:.4?}");
}
