//! The hand-shake with keys, and protected frames, between two ends of a socket with an attacker in between.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::support::{self, LIMITS, TICK, between, echo, flipped, greet, pair, soon};
use impresario_base::random::Random;
use impresario_config::{Cluster, Config, Data, Meta, Protect, Security};
use impresario_transport::{Access, FrameReader, Guest, Keyring, Keys, Stream, key_file_name, send_frame};
use impresario_wire::{Answer, Fault, KeyRole, Kind, PROTOCOL_VERSION, frame};

fn write_keys(folder: &Path, keys: &Keys) {
    for role in KeyRole::ALL {
        keys.for_role(role).store(&folder.join(key_file_name(role))).unwrap();
    }
}

fn access(folder: &Path, role: KeyRole, protect: Protect) -> Access {
    let cluster = Cluster { security: Security::Key, key_dir: folder.into(), protect, ..Cluster::default() };
    let meta = Meta { address: "127.0.0.1:1".into(), dir: "m".into(), ..Meta::default() };
    let data = vec![Data::new("data.0", "127.0.0.1:2", "d")];
    Access::of(&Config { cluster, meta, data, ..Config::default() }, role)
}

/// A server with keys, or without.
fn serve(stream: Stream, ring: Option<&Keyring>, protect: Protect) -> Result<Guest, String> {
    support::serve(stream, ring.map(|ring| (ring, protect)), None)
}

#[test]
fn frames_of_all_sizes_arrive_as_they_were_sent() {
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &Keys::draw().unwrap());
    for (theirs, ours) in [
        (Protect::Handshake, Protect::Handshake),
        (Protect::Handshake, Protect::Headers),
        (Protect::Headers, Protect::Headers),
        (Protect::All, Protect::Headers),
        (Protect::Headers, Protect::All),
    ] {
        let ring = Keyring::find(dir.path(), KeyRole::Server).unwrap();
        let (here, there) = pair();
        let server = std::thread::spawn(move || serve(there, Some(&ring), theirs));
        let (mut reader, access) = (FrameReader::default(), access(dir.path(), KeyRole::Client, ours));
        assert_eq!(greet(&here, &mut reader, &access).unwrap().name, "data.0");
        assert_eq!(here.session().unwrap().protect(), theirs.max(ours));
        for (id, len) in [0usize, 1, 100, 4096, 32 << 10, (32 << 10) + 1, 100_000, 1 << 20].into_iter().enumerate() {
            let payload: Vec<u8> = (0..len).map(|at| (at * 7 + id) as u8).collect();
            assert!(echo(&here, &mut reader, id as u64, &payload).unwrap() == payload, "{len} bytes");
        }
        echo(&here, &mut reader, 99, &[1; 200_000]).unwrap();
        // Several frames in one record.
        let ping = |id| frame::encode(Kind::Answer, id, &Answer::Done, 0).unwrap();
        send_frame(&here, &[ping(5), ping(6)].concat(), &[], soon()).unwrap();
        for id in [5, 6] {
            assert_eq!(reader.next_frame(&here, &LIMITS, soon()).unwrap().0.id, id);
        }
        here.shut_down();
        let guest = server.join().unwrap().unwrap();
        assert_eq!(guest.role, Some(KeyRole::Client));
    }
}

#[test]
fn each_mismatch_is_explained_on_both_sides() {
    let (dir, foreign, empty) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let keys = Keys::draw().unwrap();
    write_keys(dir.path(), &keys);
    write_keys(foreign.path(), &Keys::draw().unwrap());
    let ring = || Keyring::find(dir.path(), KeyRole::Server).unwrap();
    let meet = |access: Access, ring: Option<Keyring>| {
        let (here, there) = pair();
        let server = std::thread::spawn(move || serve(there, ring.as_ref(), Protect::Headers));
        let ours = greet(&here, &mut FrameReader::default(), &access).map(|_| ()).map_err(|error| error.to_string());
        here.shut_down();
        (ours, server.join().unwrap())
    };
    let client = |folder: &Path| access(folder, KeyRole::Client, Protect::Headers);
    let (ours, theirs) = meet(Access::default(), Some(ring()));
    assert!(ours.unwrap_err().contains("only peers that show a key") && theirs.is_err());
    let (ours, theirs) = meet(client(dir.path()), None);
    assert!(ours.unwrap_err().contains("asks for none") && theirs.is_err());
    let (ours, _) = meet(client(empty.path()), Some(ring()));
    assert!(ours.unwrap_err().contains("no such key file"));
    let (ours, _) = meet(client(foreign.path()), Some(ring()));
    let ours = ours.unwrap_err();
    assert!(ours.contains("is not known here") && ours.contains("client.key"), "{ours}");
    // The right number with another secret; another key pair at the server.
    let numbered = |text: String| {
        let (own, other) = (&keys.generations[0].number, foreign.path());
        let theirs = Keys::load(&other.join("client.key")).unwrap().generations[0].number.clone();
        text.replace(&theirs, own)
    };
    let file = foreign.path().join("client.key");
    let text = numbered(std::fs::read_to_string(&file).unwrap());
    std::fs::write(&file, text).unwrap();
    let (ours, _) = meet(client(foreign.path()), Some(ring()));
    assert!(ours.unwrap_err().contains("does not hold the client key"));
    let (ours, theirs) = meet(client(dir.path()), Some(ring()));
    assert!(ours.is_ok() && theirs.is_ok());
}

#[test]
fn a_rotation_reaches_both_sides_in_either_order() {
    let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let keys = Keys::draw().unwrap();
    let rotated = keys.rotated(Duration::from_secs(3600)).unwrap();
    write_keys(old.path(), &keys);
    write_keys(new.path(), &rotated);
    let meet = |client: &Path, server: &Path| {
        let ring = Keyring::find(server, KeyRole::Server).unwrap();
        let (here, there) = pair();
        let server = std::thread::spawn(move || serve(there, Some(&ring), Protect::Headers));
        let access = access(client, KeyRole::Client, Protect::Headers);
        let met = greet(&here, &mut FrameReader::default(), &access).map_err(|error| error.to_string());
        here.shut_down();
        met.map(|_| server.join().unwrap().unwrap().key.unwrap())
    };
    let number = |keys: &Keys| u64::from_str_radix(&keys.generations[0].number, 16).unwrap();
    assert_eq!(meet(old.path(), new.path()), Ok(number(&keys)));
    assert_eq!(meet(new.path(), old.path()), Ok(number(&keys)), "the server has not read the new one yet");
    assert_eq!(meet(new.path(), new.path()), Ok(number(&rotated)));
    write_keys(new.path(), &keys.rotated(Duration::ZERO).unwrap());
    assert!(meet(old.path(), new.path()).unwrap_err().contains("is not known here"));
}

/// A client that has read its file is overtaken by a rotation before the server looks at what it shows.
#[test]
fn a_key_that_is_replaced_during_the_hand_shake_is_read_again() {
    let (here_dir, there_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let keys = Keys::draw().unwrap();
    let rotated = keys.rotated(Duration::ZERO).unwrap();
    write_keys(here_dir.path(), &keys);
    write_keys(there_dir.path(), &rotated);
    let access = access(here_dir.path(), KeyRole::Client, Protect::Headers);
    write_keys(here_dir.path(), &rotated);
    let ring = Keyring::find(there_dir.path(), KeyRole::Server).unwrap();
    let (here, there) = pair();
    let server = std::thread::spawn(move || serve(there, Some(&ring), Protect::Headers));
    greet(&here, &mut FrameReader::default(), &access).unwrap();
    here.shut_down();
    let shown = server.join().unwrap().unwrap().key.unwrap();
    assert_eq!(format!("{shown:016x}"), rotated.generations[0].number);
}

#[test]
fn a_bit_that_flips_on_the_way_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &Keys::draw().unwrap());
    let payload = vec![7; 100_000];
    // The role of each byte in both directions, counted from the start.
    let run = |flip: Option<(bool, usize)>, protect: Protect| {
        let ring = Keyring::find(dir.path(), KeyRole::Server).unwrap();
        let access = access(dir.path(), KeyRole::Client, protect);
        flipped(flip, &access, &payload, |theirs| serve(theirs, Some(&ring), protect))
    };
    let (whole, _) = run(None, Protect::All);
    assert!(whole.unwrap() == payload);
    for there in [true, false] {
        // Every part of the hand-shake, the hello or welcome, the head of the frame, and its payload. The number in a
        // frame's head (bytes 8 to 15) is unused before there are keys.
        for place in (0..460).step_by(7).filter(|at| !(8..16).contains(at)).chain([20_000, 50_000, 99_000]) {
            let (ended, theirs) = run(Some((there, place)), Protect::All);
            assert!(ended.is_err(), "{there} {place}: the client went on, the server {theirs:?}");
        }
        for place in (0..160).step_by(7).filter(|at| !(8..16).contains(at)) {
            let (ended, _) = run(Some((there, place)), Protect::Headers);
            assert!(ended.is_err(), "headers: {there} {place}");
        }
        for place in (0..100).step_by(7).filter(|at| !(8..16).contains(at)) {
            let (ended, _) = run(Some((there, place)), Protect::Handshake);
            assert!(ended.is_err(), "handshake: {there} {place}");
        }
        // What the weaker modes do not guarantee.
        let (ended, theirs) = run(Some((there, 50_000)), Protect::Headers);
        assert!(ended.unwrap() != payload && theirs.is_ok());
    }
}

#[test]
fn recorded_bytes_cannot_be_played_again() {
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &Keys::draw().unwrap());
    let ring = || Keyring::find(dir.path(), KeyRole::Server).unwrap();
    let (ours, middle_a) = UnixStream::pair().unwrap();
    let (middle_b, theirs) = UnixStream::pair().unwrap();
    let (sender, recorded) = std::sync::mpsc::channel();
    between(middle_a.try_clone().unwrap(), middle_b.try_clone().unwrap(), move |_, bytes| {
        sender.send(bytes.to_vec()).unwrap();
    });
    between(middle_b, middle_a, |_, _| {});
    let theirs = Stream::from_unix(theirs, TICK).unwrap();
    let (first, second) = (ring(), ring());
    let server = std::thread::spawn(move || serve(theirs, Some(&first), Protect::Headers));
    let here = Stream::from_unix(ours, TICK).unwrap();
    let mut reader = FrameReader::default();
    greet(&here, &mut reader, &access(dir.path(), KeyRole::Client, Protect::Headers)).unwrap();
    echo(&here, &mut reader, 1, b"payload").unwrap();
    here.shut_down();
    server.join().unwrap().unwrap();
    let recorded: Vec<u8> = recorded.iter().flatten().collect();
    let (mut again, theirs) = UnixStream::pair().unwrap();
    let theirs = Stream::from_unix(theirs, TICK).unwrap();
    let server = std::thread::spawn(move || serve(theirs, Some(&second), Protect::Headers));
    again.write_all(&recorded).unwrap();
    let error = server.join().unwrap().unwrap_err();
    assert!(error.contains("replayed"), "{error}");
}

#[test]
fn nonsense_and_halves_end_a_connection_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &Keys::draw().unwrap());
    let offer =
        impresario_wire::KeyOffer { version: PROTOCOL_VERSION, key: 1, role: KeyRole::Server, noise: vec![7; 90] };
    let known = Keys::load(&dir.path().join("server.key")).unwrap().generations[0].number.clone();
    let known = u64::from_str_radix(&known, 16).unwrap();
    let encode = |offer: &impresario_wire::KeyOffer| frame::encode(Kind::Key, 3, offer, 0).unwrap();
    let unknown = encode(&offer);
    let mut cases = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        unknown.clone(),
        [unknown.clone(), unknown.clone(), unknown.clone(), unknown.clone()].concat(),
        unknown[..30].to_vec(),
        encode(&impresario_wire::KeyOffer { key: known, ..offer.clone() }),
        encode(&impresario_wire::KeyOffer { key: known, noise: vec![], ..offer.clone() }),
        encode(&impresario_wire::KeyOffer { key: known, noise: vec![1; 3000], ..offer.clone() }),
        encode(&impresario_wire::KeyOffer { version: 3, ..offer }),
        frame::encode(Kind::Welcome, 1, &Answer::Fault(Fault { errno: 1, message: String::new() }), 0).unwrap(),
    ];
    let mut random = Random::new(1);
    for _ in 0..50 {
        let mut bytes = unknown.clone();
        for byte in bytes.iter_mut().skip(4) {
            if random.below(8) == 0 {
                *byte = random.below(256) as u8;
            }
        }
        cases.push(bytes);
    }
    for bytes in cases {
        let ring = Keyring::find(dir.path(), KeyRole::Server).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let theirs = Stream::from_unix(theirs, TICK).unwrap();
        let server = std::thread::spawn(move || serve(theirs, Some(&ring), Protect::Headers));
        let _ = ours.write_all(&bytes);
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let ended = server.join().expect("no panic");
        assert!(ended.is_err(), "{bytes:02x?}");
    }
}
