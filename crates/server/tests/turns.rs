//! I/O nodes under `twins` agree on who takes turns, while they go and come.

use crate::support::{Cluster, Peer};
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::until;
use impresario_wire::{Answer, Call, Role};
use serde_json::{Value, json};

/// What an I/O node says of who takes turns: nodes, lanes without turns, and the number of the view.
fn turns(cluster: &Cluster, node: usize) -> (Value, Value, u64) {
    let turns = Peer::connect(&cluster.config.io[node].address, Role::Io, 1).status()["turns"].clone();
    (turns["nodes"].clone(), turns["absent_lanes"].clone(), turns["view"].as_u64().unwrap_or(0))
}

fn start(cluster: &Cluster, node: usize) -> Option<Started> {
    Some(impresario_server::start(&cluster.config, &format!("io.{node}")).unwrap())
}

#[test]
fn io_nodes_that_go_and_come_take_turns_anew() {
    let mut cluster = Cluster::start(2, |_| {});
    let folder = cluster.dir.path().to_path_buf();
    for n in 0..3 {
        let address = format!("unix:{}", folder.join(format!("io.{n}.sock")).display());
        let mut io = impresario_config::Io::new(format!("io.{n}"), address);
        io.policy = PolicySpec::named("twins").with("window_us", 1000);
        cluster.config.io.push(io);
    }
    let mut nodes: Vec<_> = (0..3).map(|n| start(&cluster, n)).collect();
    let agree = |cluster: &Cluster, those: &[usize], nodes: Value, least: u64| {
        let said: Vec<_> = those.iter().map(|node| turns(cluster, *node)).collect();
        said.iter().all(|(there, absent, view)| {
            *there == nodes && *absent == json!([]) && *view >= least && *view == said[0].2
        })
    };
    until("all know of all", || agree(&cluster, &[0, 1, 2], json!(["io.0", "io.1", "io.2"]), 0));
    nodes[0] = None;
    until("the first has gone, and the next one says so", || agree(&cluster, &[1, 2], json!(["io.1", "io.2"]), 1));
    let before = turns(&cluster, 1).2;
    nodes[0] = start(&cluster, 0);
    until("it is back, and has learnt what was agreed meanwhile", || {
        agree(&cluster, &[0, 1, 2], json!(["io.0", "io.1", "io.2"]), before + 1)
    });
    // Another policy has no use for it, and with the next switch it goes on.
    let switch = |name: &str| {
        let mut peer = Peer::connect(&cluster.config.io[0].address, Role::Io, 1);
        let call = Call::SetPolicy { name: name.into(), params: Vec::new(), at_shared_ns: 0 };
        assert_eq!(peer.call(&call, &[]).0, Answer::Done);
    };
    switch("fifo");
    switch("twins");
    until("it goes on", || agree(&cluster, &[0, 1, 2], json!(["io.0", "io.1", "io.2"]), before + 1));
}

#[test]
fn a_retired_data_server_has_no_turns() {
    let mut cluster = Cluster::start(3, |_| {});
    let address = format!("unix:{}", cluster.dir.path().join("io.0.sock").display());
    let mut io = impresario_config::Io::new("io.0", address);
    io.policy = PolicySpec::named("twins");
    cluster.config.io.push(io);
    cluster.config.data[1].state = impresario_config::DataState::Retired;
    let _node = start(&cluster, 0);
    until("it has none", || turns(&cluster, 0).1 == json!([1]));
}
