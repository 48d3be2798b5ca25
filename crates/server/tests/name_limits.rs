//! Limits of metadata calls: they hold, leave everything else alone, and clients notice nothing but that they wait.

use std::time::{Duration, Instant};

use crate::support::{Cluster, Peer, who};
use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::until;
use impresario_wire::message::*;
use impresario_wire::{Answer, Call, Fault, Role};

/// A cluster of one data server and a metadata server with these rules, if any.
fn start(rules: Option<&str>, timeout_ms: u64) -> (Cluster, Started) {
    let cluster = Cluster::start(1, |config| {
        config.meta.policy = rules.map(tbf);
        config.cluster.request_timeout_ms = timeout_ms;
    });
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    (cluster, meta)
}

fn tbf(rules: &str) -> PolicySpec {
    PolicySpec::named("tbf").with("rules", rules)
}

fn set(policy: &PolicySpec) -> Call {
    let params = policy.params.clone().into_iter().collect();
    Call::SetPolicy { name: policy.name.clone(), params, at_shared_ns: 0 }
}

fn peer(cluster: &Cluster, client: u64) -> Peer {
    Peer::connect(&cluster.config.meta.address, Role::Meta, client)
}

fn meta(client: u64, sequence: u64, call: MetaCall) -> Call {
    Call::Meta { who: Who { sequence, ..who(client) }, call }
}

fn stat(client: u64) -> Call {
    meta(client, 0, MetaCall::GetAttr { target: Target::Path(Vec::new()) })
}

fn mkdir(client: u64, n: u64) -> Call {
    let path = format!("{client}.{n}").into_bytes();
    meta(client, n + 1, MetaCall::Mkdir { path, mode: 0o755, uid: 0, gid: 0 })
}

/// The next answer to a call.
fn answer(peer: &mut Peer) -> (u64, Answer) {
    let (id, answer, _) = peer.answer().expect("an answer");
    (id, answer)
}

fn waiting(admin: &mut Peer) -> u64 {
    let status = admin.status();
    status["limits"]["classes"].as_array().into_iter().flatten().filter_map(|class| class["waiting"].as_u64()).sum()
}

#[test]
fn a_rule_limits_its_calls_and_no_others_and_ends_live() {
    const RATE: f64 = 50.0;
    const BURST: f64 = 10.0;
    let (cluster, _meta) = start(Some("made: job=1 & op=create {requests_per_s=50, burst=10}"), 10_000);
    let (mut limited, mut free) = (peer(&cluster, 1), peer(&cluster, 2));
    const CALLS: u64 = 400;
    let began = Instant::now();
    for n in 0..CALLS {
        limited.send(&mkdir(1, n), &[]);
    }
    let (mut done, mut others) = (0.0, 0);
    while began.elapsed() < Duration::from_secs(2) {
        assert!(matches!(answer(&mut limited).1, Answer::Attr(_)));
        done += 1.0;
        let most = BURST + RATE * began.elapsed().as_secs_f64() * 1.1;
        assert!(done <= most, "{done} calls where {most} are allowed");
        assert!(matches!(free.call(&stat(2), &[]).0, Answer::Attr(_)), "another kind of call");
        others += 1;
    }
    assert!(done < 0.75 * CALLS as f64 && others > 0, "{done} calls, {others} others");
    let status = free.status();
    let class = &status["limits"]["classes"][0];
    assert_eq!((class["rule"].as_str(), class["rate"].as_f64()), (Some("made"), Some(RATE)), "{status}");
    assert!(class["waiting"].as_u64().is_some_and(|waiting| waiting > 0), "{status}");
    let explain = |op: &str| Call::Explain { job: 1, user: 0, client: 1, file: 0, op: op.into(), folders: [0; 4] };
    let text = |answer: Answer| if let Answer::Text(text) = answer { text } else { panic!("{answer:?}") };
    assert!(text(free.call(&explain("create"), &[]).0).contains("rule made: 50 requests/s"));
    assert!(text(free.call(&explain("remove"), &[]).0).contains("not limited"));
    // The end of the limit lets all go.
    assert_eq!(free.call(&set(&PolicySpec::named("none")), &[]).0, Answer::Done);
    (done as u64..CALLS).for_each(|_| assert!(matches!(answer(&mut limited).1, Answer::Attr(_))));
    assert!(free.status().get("limits").is_none(), "nothing is limited");
}

#[test]
fn clients_wait_for_a_limit_for_longer_than_for_a_server() {
    // A call that is not answered in this time fails; a token comes in more than twice that.
    const TIMEOUT_MS: u64 = 2000;
    let (mut cluster, _meta) =
        start(Some("slow: job=7 & op=stat {requests_per_s=0.2, burst=1, each=client}"), TIMEOUT_MS);
    let _io = cluster.start_io(|_| {});
    std::thread::scope(|scope| {
        for (name, via) in [("direct", Via::Direct), ("forwarded", Via::IoNode(0))] {
            let config = &cluster.config;
            scope.spawn(move || {
                let client = Client::connect(config, ClientOptions { via, job: 7, ..Default::default() }).unwrap();
                client.create(name, CreateOptions::default()).unwrap().close().unwrap();
                let began = Instant::now();
                for _ in 0..2 {
                    client.stat(name).unwrap();
                }
                assert!(began.elapsed() > 2 * Duration::from_millis(TIMEOUT_MS), "{name}: it has waited");
            });
        }
    });
}

#[test]
fn what_ends_something_passes_calls_that_wait() {
    let (cluster, _meta) = start(None, 10_000);
    let (mut client, mut admin) = (peer(&cluster, 1), peer(&cluster, 2));
    let create =
        |path: &str| MetaCall::Create { path: path.into(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
    let Answer::Opened(opened) = client.call(&meta(1, 1, create("f")), &[]).0 else { panic!() };
    assert_eq!(admin.call(&set(&tbf("all: * {requests_per_s=0.001, burst=1, each=client}")), &[]).0, Answer::Done);
    let first = client.send(&stat(1), &[]);
    assert_eq!(answer(&mut client).0, first);
    // So many wait; the rest is told to come again, and finds the connection open.
    let sent: Vec<u64> = (0..1030).map(|_| client.send(&stat(1), &[])).collect();
    for id in &sent[1024..] {
        match answer(&mut client) {
            (answered, Answer::Fault(Fault { errno: libc::EBUSY, .. })) => assert_eq!(answered, *id),
            other => panic!("{other:?}"),
        }
    }
    until("they are listed", || waiting(&mut admin) == 1024);
    let handle = opened.handle;
    for call in [MetaCall::Fsync { handle }, MetaCall::Close { handle, wrote: false }] {
        let id = client.send(&meta(1, 2, call), &[]);
        assert_eq!(answer(&mut client), (id, Answer::Done));
    }
    // Of a client that is gone nothing waits.
    drop(client);
    until("they are forgotten", || waiting(&mut admin) == 0);
    let refused = |spec: &PolicySpec, admin: &mut Peer| match admin.call(&set(spec), &[]).0 {
        Answer::Fault(fault) => fault.message,
        other => panic!("{other:?}"),
    };
    assert!(refused(&tbf("a: * {bytes_per_s=5}"), &mut admin).contains("must have requests_per_s"));
    assert!(refused(&PolicySpec::named("sjf"), &mut admin).contains("tbf and none only"));
    assert!(refused(&PolicySpec::named("tbf"), &mut admin).contains("give it rules"));
}
