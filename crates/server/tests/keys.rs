//! Servers that take only peers with a key: who may send what, what a client can do to others, and rotation.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_client::{Access, Client, ClientError, ClientOptions, CreateOptions, Identity, Link, LinkOptions, Via};
use impresario_config::{Cluster, Config, Data, Io, Meta, Security};
use impresario_server::process::{Started, start};
use impresario_testing::free_address;
use impresario_transport::{Keys, key_file_name};
use impresario_wire::{Answer, Call, ClientKey, Extents, Fault, FileKey, KeyRole, Role, Sender, Who};

struct Cell {
    dir: tempfile::TempDir,
    config: Config,
    _data: Started,
}

fn write_keys(folder: &Path, keys: &Keys) {
    KeyRole::ALL.iter().for_each(|role| keys.for_role(*role).store(&folder.join(key_file_name(*role))).unwrap());
}

/// One data server with keys, though it listens on loopback.
fn cell() -> Cell {
    let dir = tempfile::tempdir().unwrap();
    let key_dir = dir.path().join("keys");
    write_keys(&key_dir, &Keys::draw().unwrap());
    let cluster = Cluster { security: Security::Key, key_dir, ..Cluster::default() };
    let meta = Meta { address: "127.0.0.1:1".into(), dir: dir.path().join("meta"), ..Meta::default() };
    let data = vec![Data::new("data.0", "127.0.0.1:0", dir.path().join("data.0"))];
    let mut config = Config { cluster, meta, data, ..Config::default() };
    impresario_server::folders::make_all(&config).unwrap();
    let data = start(&config, "data.0").unwrap();
    config.data[0].address = data.address().into();
    Cell { dir, config, _data: data }
}

fn link(cell: &Cell, role: KeyRole) -> (Link, Arc<Identity>) {
    link_with(&cell.config, role)
}

fn link_with(config: &Config, role: KeyRole) -> (Link, Arc<Identity>) {
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let access = Access::of(config, role);
    let options =
        LinkOptions { who: identity.who(), access, keep_trying: false, ..LinkOptions::new(Role::Data, 4 << 20) };
    (Link::new(&[("data.0", &config.data[0].address)], identity.clone(), options).unwrap(), identity)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn ask(link: &Link, call: Call) -> Result<Answer, ClientError> {
    let payload = [std::io::IoSlice::new(&[7; 100])];
    let is_write = matches!(call, Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. });
    link.call(call, if is_write { &payload } else { &[] }, None, soon()).map(|reply| reply.answer)
}

fn refusal(answer: Result<Answer, ClientError>) -> Option<Fault> {
    match answer {
        Err(ClientError::Fault { fault, .. }) if fault.errno == libc::EPERM => Some(fault),
        _ => None,
    }
}

/// A call of each kind that not everybody may send, with those who may.
fn guarded(who: Who) -> Vec<(&'static [KeyRole], Call)> {
    let (admin, keepers, server): (&[_], &[_], &[_]) =
        (&[KeyRole::Admin], &[KeyRole::Admin, KeyRole::Server], &[KeyRole::Server]);
    let file = FileKey(5);
    vec![
        (admin, Call::SetPolicy { name: "fifo".into(), params: vec![], at_shared_ns: 0 }),
        (admin, Call::ResetStatistics),
        (admin, Call::SetDiskOrder { order: "arrival".into() }),
        (admin, Call::Trace { on: false }),
        (admin, Call::EarlierRuns { runs: None }),
        (keepers, Call::Truncate { who, file, len: 10 }),
        (keepers, Call::Unlink { who, file }),
        (server, Call::WriteMerged { who, others: vec![Sender::default()], file, lane_offset: 0 }),
        (server, Call::WriteList { who, others: vec![], file, extents: Extents::of(&[(0, 40), (50, 60)]) }),
        (server, Call::Sync { who: Who { client: ClientKey(77), ..who }, file }),
    ]
}

#[test]
fn a_role_that_is_too_low_is_refused_with_the_key_that_it_takes_and_the_connection_goes_on() {
    let cell = cell();
    for role in KeyRole::ALL {
        let (link, identity) = link(&cell, role);
        for (allowed, call) in guarded(identity.who()) {
            let refused = refusal(ask(&link, call.clone()));
            assert_eq!(refused.is_none(), allowed.contains(&role), "{role}: {call:?}: {refused:?}");
            if let Some(fault) = refused {
                assert!(fault.message.contains("takes the") && fault.message.contains("key"), "{fault:?}");
            }
        }
        let write = Call::Write { who: identity.who(), file: FileKey(role as u64 + 10), lane_offset: 0 };
        assert!(ask(&link, write).is_ok(), "{role}");
        assert!(ask(&link, Call::Status).is_ok());
    }
}

#[test]
fn a_client_raises_its_own_epoch_and_nobody_elses() {
    let cell = cell();
    let (honest, identity) = link(&cell, KeyRole::Client);
    let (hostile, own) = link(&cell, KeyRole::Client);
    let write = |who| Call::Write { who, file: FileKey(1), lane_offset: 0 };
    ask(&honest, write(identity.who())).unwrap();
    // In the name of the honest client: a newer epoch would have its requests refused.
    let stolen = Who { epoch: u32::MAX, ..identity.who() };
    assert!(refusal(ask(&hostile, write(stolen))).is_some());
    // Its own is its own matter: no other client must begin there.
    ask(&hostile, write(Who { epoch: u32::MAX, ..own.who() })).unwrap();
    ask(&honest, write(identity.who())).expect("the honest one goes on");
    let (newcomer, other) = link(&cell, KeyRole::Client);
    ask(&newcomer, write(other.who())).expect("and so does a new one");
}

#[test]
fn a_rotation_ends_the_old_key_when_its_time_is_over_and_nobody_with_the_new_one_notices() {
    let cell = cell();
    let keys = cell.dir.path().join("keys");
    let old = tempfile::tempdir().unwrap();
    let first = Keys::load(&keys.join("server.key")).unwrap();
    write_keys(old.path(), &first);
    let mut left_behind = cell.config.clone();
    left_behind.cluster.key_dir = old.path().into();
    let ((follows, _), (stays, _)) = (link(&cell, KeyRole::Client), link_with(&left_behind, KeyRole::Client));
    ask(&follows, Call::Status).unwrap();
    ask(&stays, Call::Status).unwrap();
    // Accepted for a while, then no longer.
    let rotated = first.rotated(Duration::from_secs(3600)).unwrap();
    write_keys(&keys, &rotated);
    ask(&stays, Call::Status).expect("accepted for an hour");
    assert!(ask(&link_with(&left_behind, KeyRole::Client).0, Call::Status).is_ok(), "new connections too");
    let mut over = rotated.clone();
    let [_, before] = over.generations.as_mut_slice() else { panic!("{over:?}") };
    before.until_s = Some(1);
    write_keys(&keys, &over);
    let ended = std::iter::repeat_with(|| {
        ask(&follows, Call::Status).expect("the client with the new key goes on");
        std::thread::sleep(Duration::from_millis(20));
        ask(&stays, Call::Status)
    });
    let error = ended.take(1000).find_map(Result::err).expect("the old key is refused in the end").to_string();
    assert!(error.contains("no longer accepted"), "{error}");
}

/// After another node was lost, all clients come through one: the metadata server sees one address.
#[test]
fn an_io_node_brings_more_clients_than_an_address_may_have() {
    for security in [Security::Key, Security::None] {
        let dir = tempfile::tempdir().unwrap();
        let key_dir = dir.path().join("keys");
        write_keys(&key_dir, &Keys::draw().unwrap());
        let cluster = Cluster { security, key_dir, request_timeout_ms: 3000, ..Cluster::default() };
        let meta = Meta { address: free_address(), dir: dir.path().join("meta"), ..Meta::default() };
        let data = vec![Data::new("data.0", free_address(), dir.path().join("data.0"))];
        let io = vec![Io::new("io.0", free_address())];
        let config = Config { cluster, meta, data, io, ..Config::default() };
        impresario_server::folders::make_all(&config).unwrap();
        let mut narrow = config.clone();
        narrow.cluster.max_connections_per_address = 4;
        let _meta = start(&narrow, "meta").unwrap();
        // The clients are all of one address, too.
        let _others = ["data.0", "io.0"].map(|name| start(&config, name).unwrap());
        let connect = |seed| {
            let options = ClientOptions { via: Via::IoNode(0), placement_seed: seed, ..ClientOptions::default() };
            let client = Client::connect(&config, options).unwrap();
            let new = CreateOptions { mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
            client.create(format!("f.{seed}").as_bytes(), new).unwrap_or_else(|error| panic!("{security:?}: {error}"));
            client
        };
        let _clients: Vec<Arc<Client>> = (0..6).map(connect).collect();
    }
}
