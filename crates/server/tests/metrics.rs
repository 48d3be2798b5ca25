//! Metrics of real servers: what a scraper gets after known work.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::support::{Cluster, Peer, pattern, who};
use impresario_layout::Layout;
use impresario_server::Started;
use impresario_testing::until;
use impresario_wire::{Answer, Call, FileKey, MetaCall, Role, Target};

/// The address of a server's metrics.
fn any() -> Option<SocketAddr> {
    Some("127.0.0.1:0".parse().unwrap())
}

/// All metrics of a server.
fn scrape(server: &Started) -> String {
    let mut stream = TcpStream::connect(server.metrics_address().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    body.to_string()
}

/// The value of a metric with its labels, as in `calls_total{…}` after `impresario_`.
fn value(metrics: &str, name: &str, labels: &str) -> Option<f64> {
    let line = format!("impresario_{name}{{{labels}}} ");
    metrics.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok())
}

/// Waits until a server's metrics have these values.
fn has(server: &Started, expected: &[(&str, &str, f64)]) {
    let mut metrics = String::new();
    until(format!("{expected:?}"), || {
        metrics = scrape(server);
        expected.iter().all(|(name, labels, expected)| value(&metrics, name, labels) == Some(*expected))
    });
}

#[test]
fn a_data_server_counts_what_it_did() {
    let cluster = Cluster::start(1, |config| {
        config.data[0].metrics = any();
        config.data[0].schedule_cached_reads = true;
    });
    let server = cluster.data[0].as_ref().unwrap();
    let mut peer = cluster.peer(0, 1);
    for block in 0..4 {
        assert_eq!(peer.write(1, 1, block << 16, &pattern(1, 1 << 16)), Answer::Written(1 << 16));
    }
    let (answer, bytes) = peer.call(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 1 << 16 }, &[]);
    assert_eq!((answer, bytes.len()), (Answer::Data, 1 << 16));
    assert_eq!(peer.call(&Call::Sync { who: who(1), file: FileKey(1) }, &[]).0, Answer::Done);
    let server_label = format!("server=\"{}\"", server.name());
    let of = |more: &str| format!("{server_label}{more}");
    // An answer may come before its completion is counted.
    let mut metrics = String::new();
    until("the sync is counted", || {
        metrics = scrape(server);
        value(&metrics, "request_seconds_count", &of(r#",operation="other""#)) == Some(1.0)
    });
    for (name, labels, expected) in [
        ("bytes_total", of(r#",operation="write""#), 262_144.0),
        ("bytes_total", of(r#",operation="read""#), 65_536.0),
        ("request_seconds_count", of(r#",operation="write""#), 4.0),
        ("request_seconds_count", of(r#",operation="read""#), 1.0),
        ("request_bytes_bucket", of(r#",le="65536""#), 0.0),
        ("request_bytes_bucket", of(r#",le="131072""#), 5.0),
        ("request_bytes_bucket", of(r#",le="+Inf""#), 5.0),
        ("requests_failed_total", of(""), 0.0),
        ("job_requests_total", of(r#",job="1""#), 6.0),
        ("job_bytes_total", of(r#",job="1",operation="write""#), 262_144.0),
        ("user_bytes_total", of(r#",user="0",operation="read""#), 65_536.0),
        ("policy_info", of(r#",policy="auto""#), 1.0),
        ("connections", of(""), 1.0),
    ] {
        assert_eq!(value(&metrics, name, &labels), Some(expected), "{name}{{{labels}}} in\n{metrics}");
    }
    assert!(value(&metrics, "store_free_bytes", &server_label).unwrap() > 0.0);
    assert!(value(&metrics, "request_seconds_sum", &of(r#",operation="write""#)).unwrap() > 0.0);
    assert!(!metrics.contains("impresario_forward_") && !metrics.contains("impresario_meta_"), "{metrics}");
}

#[test]
fn io_nodes_and_the_metadata_server_have_their_own() {
    let mut cluster = Cluster::start(2, |config| config.meta.metrics = any());
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let mut names = Peer::connect(meta.address(), Role::Meta, 1);
    let stat = MetaCall::GetAttr { target: Target::Path("/nothing".into()) };
    assert!(matches!(names.call(&Call::Meta { who: who(1), call: stat }, &[]).0, Answer::Fault(_)));
    // An answer may come before its call is counted.
    let getattr = r#"server="meta",operation="getattr""#;
    has(&meta, &[("meta_faults_total", getattr, 1.0), ("meta_seconds_count", getattr, 1.0)]);
    has(&meta, &[("meta_sessions", r#"server="meta""#, 1.0)]);

    let io = cluster.start_io(|io| io.metrics = any());
    let mut peer = Peer::connect(io.address(), Role::Io, 1);
    let layout = Layout::new(0, 2, 4096, 2).unwrap();
    let write = Call::FileWrite { who: who(1), file: FileKey(1), layout, offset: 0 };
    assert_eq!(peer.call(&write, &pattern(1, 8192)).0, Answer::Written(8192));
    let lane = r#"server="io.0",lane="1""#;
    has(&io, &[("forward_requests_total", r#"server="io.0""#, 1.0), ("in_flight_batches", lane, 0.0)]);
}

#[test]
fn a_server_whose_metrics_cannot_be_served_does_not_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let cluster = Cluster::start(1, |config| config.meta.metrics = Some(address));
    let error = impresario_server::start(&cluster.config, "meta").err().expect("it does not start").to_string();
    assert!(error.contains("meta: metrics: cannot listen at") && error.contains(&address.to_string()), "{error}");
}
