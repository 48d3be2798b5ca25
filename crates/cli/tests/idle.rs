//! Cost of an idle cluster: few wake-ups in all, less than 50 MB per data server.

use crate::support::{Cluster, client, pattern, write_file};
use impresario_workload::cpu::process_rss_bytes;

#[test]
fn an_idle_cluster_hardly_wakes_up_and_takes_little_memory() {
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
    impresario_testing::idle::until_idle(&pids, 100.0);
    for (name, pid) in names.iter().zip(&pids) {
        let resident = process_rss_bytes(*pid).unwrap();
        println!("{name}: {:.1} MB", resident as f64 / 1e6);
        assert!(resident < 50_000_000, "{name} has {resident} bytes resident");
    }
    drop(clients);
}
