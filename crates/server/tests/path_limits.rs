//! Limits of folders: they hold for the requests of the files that were opened in them, at whichever server these come.

use std::sync::Arc;

use crate::support::{Cluster, Peer, who};
use impresario_base::folders;
use impresario_client::{Client, ClientError, ClientOptions, CreateOptions, File, Via};
use impresario_sched::PolicySpec;
use impresario_testing::until;
use impresario_wire::message::*;
use impresario_wire::{Answer, Call, Role};

const BLOCK: usize = 4096;

fn set(policy: &PolicySpec) -> Call {
    let params = policy.params.clone().into_iter().collect();
    Call::SetPolicy { name: policy.name.clone(), params, at_shared_ns: 0 }
}

/// Requests that the limit of this name withholds.
fn waiting(admin: &mut Peer, rule: &str) -> u64 {
    let status = admin.status();
    let mut classes = status["limits"]["classes"].as_array().into_iter().flatten();
    classes.find(|class| class["rule"] == rule).and_then(|class| class["waiting"].as_u64()).unwrap_or(0)
}

fn write(file: &File, block: u64) -> Result<usize, ClientError> {
    file.write_at(&[7; BLOCK], block * BLOCK as u64)
}

#[test]
fn the_longest_path_by_which_a_file_was_opened_limits_its_requests() {
    let mut cluster = Cluster::start(1, |config| config.cluster.request_timeout_ms = 120_000);
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let _io = cluster.start_io(|_| {});
    let ways = [
        (Via::Direct, Role::Data, cluster.address(0).to_string()),
        (Via::IoNode(0), Role::Io, cluster.config.io[0].address.clone()),
    ];
    for (via, role, address) in ways {
        let mut admin = Peer::connect(&address, role, 9);
        let client = Client::connect(&cluster.config, ClientOptions { via, ..Default::default() }).unwrap();
        let folder = |name: &str| assert!(client.mkdir(name, 0o755, 0, 0).is_ok());
        ["a", "a/b", "c"].into_iter().for_each(folder);
        let create = |path: &str| client.create(path, CreateOptions::default()).unwrap();
        let rules = "deep: path=/a/b/ {requests_per_s=0.001, burst=2}; wide: path=/a {requests_per_s=1e6}";
        let limits = PolicySpec::named("tbf").with("rules", rules);
        assert_eq!(admin.call(&set(&limits), &[]).0, Answer::Done);

        let slow = Arc::new(create("a/b/f"));
        (0..2).for_each(|block| assert_eq!(write(&slow, block).unwrap(), BLOCK));
        let third = std::thread::spawn({
            let slow = slow.clone();
            move || write(&slow, 2)
        });
        until("the third request waits", || waiting(&mut admin, "deep") == 1);
        for path in ["a/f", "c/f", "f"] {
            let file = create(path);
            (0..8).for_each(|block| assert_eq!(write(&file, block).unwrap(), BLOCK, "{path}"));
        }
        // What is opened by its new name is under no limit.
        client.rename("a/b/f", "c/g", true).unwrap();
        let moved = client.open("c/g", true).unwrap();
        (8..16).for_each(|block| assert_eq!(write(&moved, block).unwrap(), BLOCK));
        assert_eq!(waiting(&mut admin, "deep"), 1);
        let explain = |path: &[u8]| {
            let folders = folders::of(path);
            Call::Explain { job: 1, user: 0, client: 1, file: 0, op: "write".into(), folders }
        };
        for (path, says) in [("a/b/x/y/z", "rule deep"), ("a/x", "rule wide"), ("b", "not limited")] {
            match admin.call(&explain(path.as_bytes()), &[]).0 {
                Answer::Text(told) => assert!(told.contains(says), "{path}: {told}"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(admin.call(&set(&PolicySpec::named("none")), &[]).0, Answer::Done);
        assert_eq!(third.join().unwrap().unwrap(), BLOCK);
        for name in ["a/f", "c/f", "c/g", "f"] {
            client.unlink(name).unwrap();
        }
        ["a/b", "a", "c"].into_iter().for_each(|name| client.rmdir(name).unwrap());
    }
}

#[test]
fn a_folder_limits_the_calls_on_its_names() {
    let cluster = Cluster::start(1, |_| {});
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let [mut client, mut admin] = [1, 2].map(|key| Peer::connect(&cluster.config.meta.address, Role::Meta, key));
    let mkdir = |path: &str, sequence| {
        let call = MetaCall::Mkdir { path: path.into(), mode: 0o755, uid: 0, gid: 0 };
        Call::Meta { who: Who { sequence, ..who(1) }, call }
    };
    assert!(matches!(client.call(&mkdir("a", 1), &[]).0, Answer::Attr(_)));
    let limits = PolicySpec::named("tbf").with("rules", "made: path=/a & op=create {requests_per_s=0.001, burst=1}");
    assert_eq!(admin.call(&set(&limits), &[]).0, Answer::Done);
    assert!(matches!(client.call(&mkdir("a/1", 2), &[]).0, Answer::Attr(_)));
    client.send(&mkdir("a/2", 3), &[]);
    until("the second one waits", || waiting(&mut admin, "made") == 1);
    let free = client.send(&mkdir("b", 4), &[]);
    match client.answer().unwrap() {
        (id, Answer::Attr(_), _) => assert_eq!(id, free),
        other => panic!("{other:?}"),
    }
    assert_eq!(waiting(&mut admin, "made"), 1);
}
