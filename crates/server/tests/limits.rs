//! Limits over several I/O nodes: a rate that holds for all of them together, wherever its requests come in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{Cluster, Peer, pattern, who};
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::until;
use impresario_wire::{Answer, Call, FileKey, Role};

const NODES: usize = 3;
/// Bytes per second of job 1, over all I/O nodes.
const RATE: f64 = 4e6;
const REQUEST_BYTES: usize = 16 << 10;

/// I/O nodes that know one another's addresses before they start.
fn nodes(cluster: &mut Cluster, policy: &PolicySpec) -> Vec<Option<Started>> {
    let folder = cluster.dir.path().to_path_buf();
    for n in 0..NODES {
        let address = format!("unix:{}", folder.join(format!("io.{n}.sock")).display());
        let mut io = impresario_config::Io::new(format!("io.{n}"), address);
        io.policy = policy.clone();
        cluster.config.io.push(io);
    }
    let start = |n| impresario_server::start(&cluster.config, &format!("io.{n}")).unwrap();
    (0..NODES).map(|n| Some(start(n))).collect()
}

/// Writers of job 1 at one I/O node, each with one request under way.
struct Load {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn at(address: &str, first_client: u64) -> Load {
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let writer = |client| {
            let (address, stop, written) = (address.to_string(), stop.clone(), written.clone());
            std::thread::spawn(move || {
                let layout = impresario_layout::Layout::over_all(1).unwrap();
                let bytes = pattern(client, REQUEST_BYTES);
                let mut peer = Peer::connect(&address, Role::Io, client);
                for block in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let offset = block % 16 * REQUEST_BYTES as u64;
                    let call = Call::FileWrite { who: who(client), file: FileKey(client), layout, offset };
                    assert_eq!(peer.call(&call, &bytes).0, Answer::Written(REQUEST_BYTES as u32));
                    written.fetch_add(REQUEST_BYTES as u64, Ordering::Relaxed);
                }
            })
        };
        let threads = (first_client..first_client + 4).map(writer).collect();
        Load { stop, written, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Waits a while; returns the part of the rate that the loads reached together.
fn reached(loads: &[&Load], span: Duration) -> f64 {
    let written = || loads.iter().map(|load| load.written.load(Ordering::Relaxed)).sum::<u64>();
    let (before, started) = (written(), Instant::now());
    std::thread::sleep(span);
    (written() - before) as f64 / started.elapsed().as_secs_f64() / RATE
}

fn limited(load: f64, what: &str) {
    // What was not used before and a burst of 0.1 s may fall into the span. A busy machine may do less, but more than the
    // even part of two servers out of three.
    assert!((0.4..=1.15).contains(&load), "{what}: {load:.3} of the rate");
}

#[test]
fn a_limit_holds_over_all_io_nodes() {
    let span = Duration::from_secs(3);
    let mut cluster = Cluster::start(1, |_| {});
    // The limit is that of a group above the job's own, which it never reaches.
    let rules = format!("one: job=1 {{bytes_per_s=1e9, under=group}}; group: job=9 {{bytes_per_s={RATE}, over=all}}");
    let mut nodes = nodes(&mut cluster, &PolicySpec::named("tbf").with("rules", &rules));
    let address = |n: usize| cluster.config.io[n].address.clone();

    let first = Load::at(&address(0), 10);
    std::thread::sleep(Duration::from_secs(2));
    limited(reached(&[&first], span), "all requests at one I/O node");
    let mut peer = Peer::connect(&address(0), Role::Io, 1);
    until("the status says that most of the rate is here, and what waits for it", || {
        let status = peer.status();
        let mut classes = status["limits"]["classes"].as_array().into_iter().flatten();
        classes.any(|class| {
            class["rule"] == "group"
                && class["over_all"] == true
                && class["fraction"].as_f64().is_some_and(|f| f > 0.6)
                && class["waiting"].as_u64().is_some_and(|waiting| waiting > 0)
        })
    });

    let second = Load::at(&address(1), 20);
    std::thread::sleep(Duration::from_secs(2));
    let load = reached(&[&first, &second], span);
    limited(load, "requests at two I/O nodes");

    // A server that is gone makes no limit void: its part is kept for it.
    nodes[2] = None;
    until("its peers miss it", || {
        let status = peer.status();
        status["limits"]["peers"].as_array().is_some_and(|peers| peers.iter().any(|peer| peer["answers"] == false))
    });
    std::thread::sleep(Duration::from_secs(2));
    let load = reached(&[&first, &second], span);
    assert!((0.2..=0.8).contains(&load), "two of three: {load:.3} of the rate");
}

#[test]
fn limits_over_all_begin_with_a_live_switch_and_hold_for_data_servers_too() {
    let sockets = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(2, |config| {
        for (n, data) in config.data.iter_mut().enumerate() {
            data.address = format!("unix:{}", sockets.path().join(n.to_string()).display());
        }
    });
    let mut peers: Vec<Peer> = (0..2).map(|n| cluster.peer(n, 1)).collect();
    assert_eq!(peers[0].status()["limits"]["peers"].as_array().unwrap().len(), 0, "nothing is exchanged");
    let rules = "one: job=1 {requests_per_s=50, over=all}".to_string();
    for peer in &mut peers {
        let params = vec![("rules".to_string(), rules.clone())];
        let call = Call::SetPolicy { name: "tbf".into(), params, at_shared_ns: 0 };
        assert_eq!(peer.call(&call, &[]).0, Answer::Done);
    }
    until("they hear from one another", || {
        peers.iter_mut().all(|peer| peer.status()["limits"]["peers"][0]["answers"] == true)
    });
    // One server gets more than its half.
    let portion = |peer: &mut Peer| {
        let status = peer.status();
        status["limits"]["classes"][0]["fraction"].as_f64().unwrap_or(0.0)
    };
    let mut watcher = cluster.peer(0, 2);
    until("the rate goes where its requests are", || {
        for block in 0..8 {
            assert_eq!(peers[0].write(1, 1, block << 12, &[1; 4096]), Answer::Written(4096));
        }
        portion(&mut watcher) > 0.7
    });
}
