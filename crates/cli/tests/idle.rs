//! Cost of an idle cluster: less than 1 % of a core in all, less than 50 MB per data server.

use std::time::{Duration, Instant};

use crate::support::{Cluster, client, pattern, write_file};
use impresario_workload::cpu::process_rss_bytes;

/// CPU time that a process has used, seconds (fields 14 and 15 of /proc/PID/stat).
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = after_name[11].parse::<u64>().unwrap() + after_name[12].parse::<u64>().unwrap();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[test]
fn an_idle_cluster_uses_less_than_one_percent_of_a_core_and_little_memory() {
    let mut cluster = Cluster::start(4, 2, |config| {
        config.io[1].policy = impresario_sched::PolicySpec::named("twins").with("window_us", 1000);
    });
    // Not merely started: used, and still connected.
    let clients: Vec<_> = (0..4).map(|seed| client(&cluster.config, seed)).collect();
    let data = pattern(1, 1, 0, 16 << 20);
    for (i, client) in clients.iter().enumerate() {
        write_file(client, &format!("file.{i}"), &data);
    }
    let names: Vec<String> = cluster.config.servers().map(|s| s.name().to_string()).collect();
    let pids: Vec<u32> = names.iter().map(|name| cluster.server(name).pid()).collect();
    let used = || pids.iter().map(|pid| cpu_seconds(*pid)).collect::<Vec<f64>>();
    // The work before may end late on a busy machine: one of several spans must be idle.
    let (mut shares, mut sum) = (Vec::new(), 1.0);
    for _ in 0..5 {
        let (before, started) = (used(), Instant::now());
        std::thread::sleep(Duration::from_secs(5));
        let elapsed = started.elapsed().as_secs_f64();
        shares = used().iter().zip(&before).map(|(after, before)| (after - before) / elapsed).collect::<Vec<_>>();
        sum = shares.iter().sum();
        if sum < 0.01 {
            break;
        }
    }
    println!("idle: {:.3} % of a core in all", sum * 100.0);
    assert!(sum < 0.01, "the idle cluster uses {:.2} % of a core: {names:?} {shares:?}", sum * 100.0);
    for (name, pid) in names.iter().zip(&pids) {
        let resident = process_rss_bytes(*pid).unwrap();
        println!("{name}: {:.1} MB", resident as f64 / 1e6);
        assert!(resident < 50_000_000, "{name} has {resident} bytes resident");
    }
    drop(clients);
}
