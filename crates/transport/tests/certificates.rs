//! The hand-shake with certificates, and frames in TLS records, between two ends of a socket.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::support::{LIMITS, TICK, echo, flipped, greet, pair, serve, soon};
use impresario_base::random::Random;
use impresario_config::{Cluster, Config, Data, Meta, Protect, Security, Tls};
use impresario_testing::certificates::{Authority, Wish, replace};
use impresario_testing::{require, until};
use impresario_transport::{
    Access, Certificates, FrameReader, HelloError, Host, Keyring, Keys, Membership, Stream, key_file_name,
    receive_hello, send_frame, show_certificates,
};
use impresario_wire::{Answer, KeyRole, Kind, Role, frame};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A cluster whose files of certificates are in this folder.
fn config(folder: &Path) -> Config {
    let cluster = Cluster { security: Security::Tls, ..Cluster::default() };
    let tls = Tls {
        ca: folder.join("ca.pem"),
        certificate: folder.join("{role}.pem"),
        private_key: folder.join("{role}.key"),
        revoked: folder.join("revoked.pem").exists().then(|| folder.join("revoked.pem")),
    };
    let meta = Meta { address: "127.0.0.1:1".into(), dir: "m".into(), ..Meta::default() };
    let data = vec![Data::new("data.0", "127.0.0.1:2", "d")];
    Config { cluster, tls: Some(tls), meta, data, ..Config::default() }
}

fn access(folder: &Path, role: KeyRole) -> Access {
    Access::of(&config(folder), role)
}

fn certificates(folder: &Path, role: KeyRole) -> Result<Certificates, String> {
    Certificates::of(&config(folder), role).map_err(|error| error.to_string())
}

fn server(folder: &Path) -> Arc<Certificates> {
    Arc::new(certificates(folder, KeyRole::Server).unwrap())
}

/// What both ends say of their meeting; the client's side sends something if it is welcome.
fn meet(access: &Access, server: &Arc<Certificates>) -> (Result<(), String>, Result<KeyRole, String>) {
    let (here, there) = pair();
    let server = server.clone();
    let server = std::thread::spawn(move || serve(there, None, Some(&server)));
    let mut reader = FrameReader::default();
    let ours = greet(&here, &mut reader, access).map(drop).map_err(|error| error.to_string());
    let ours = ours.and_then(|()| {
        let back = echo(&here, &mut reader, 1, b"payload").map_err(|error| error.to_string())?;
        assert_eq!(back, b"payload");
        Ok(())
    });
    here.shut_down();
    (ours, server.join().unwrap().map(|guest| guest.role.expect("a role")))
}

#[test]
fn frames_of_all_sizes_arrive_as_they_were_sent() {
    let dir = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(dir.path());
    let theirs = server(dir.path());
    let (here, there) = pair();
    let server = std::thread::spawn(move || serve(there, None, Some(&theirs)));
    let (mut reader, access) = (FrameReader::default(), access(dir.path(), KeyRole::Client));
    assert_eq!(greet(&here, &mut reader, &access).unwrap().name, "data.0");
    assert_eq!(here.session().unwrap().protect(), Protect::All);
    for (id, len) in [0usize, 1, 100, 4096, 16 << 10, (16 << 10) + 1, 100_000, 1 << 20].into_iter().enumerate() {
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
    assert_eq!(server.join().unwrap().unwrap().role, Some(KeyRole::Client));
}

#[test]
fn the_role_is_what_the_certificate_says() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::draw("cluster");
    authority.write_all(dir.path());
    let theirs = server(dir.path());
    for role in KeyRole::ALL {
        assert_eq!(meet(&access(dir.path(), role), &theirs), (Ok(()), Ok(role)));
    }
    // A machine without the files of its role does with another's that may do as much.
    std::fs::remove_file(dir.path().join("client.pem")).unwrap();
    assert_eq!(meet(&access(dir.path(), KeyRole::Client), &theirs), (Ok(()), Ok(KeyRole::Admin)));
    // A certificate of a lower role is of no use to a server or an administrator, wherever it lies.
    for (name, role) in [("server", KeyRole::Server), ("admin", KeyRole::Admin)] {
        authority.write(dir.path(), name, &Wish::role("client"));
        let why = certificates(dir.path(), role).unwrap_err();
        assert!(why.contains("for the role client") && why.contains(&format!("needs one for {role}")), "{why}");
    }
}

#[test]
fn a_file_that_cannot_be_used_is_named_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, other) = (Authority::draw("cluster"), Authority::draw("another"));
    let file = |name: &str| dir.path().join(name);
    let now = SystemTime::now();
    let of = |uris: &[&str]| Wish { uris: uris.iter().map(|uri| uri.to_string()).collect(), ..Wish::role("client") };
    let cases: &[(&dyn Fn(), &str, &str)] = &[
        (&|| std::fs::remove_file(file("ca.pem")).unwrap(), "ca.pem", "SECURITY.md"),
        (&|| std::fs::remove_file(file("client.key")).unwrap(), "client.key", "SECURITY.md"),
        (&|| replace(&file("ca.pem"), "nothing"), "ca.pem", "no certificate in PEM"),
        (&|| replace(&file("client.pem"), "-----BEGIN CERTIFICATE-----\n!\n"), "client.pem", "copy it again"),
        (&|| replace(&file("client.key"), authority.pem()), "client.key", "no private key in PEM"),
        (
            &|| replace(&file("client.key"), &authority.issue(&Wish::role("client")).1),
            "client.key",
            "does not belong to",
        ),
        (&|| replace(&file("ca.pem"), other.pem()), "client.pem", "no authority in"),
        (&|| authority.write(dir.path(), "client", &of(&[])), "client.pem", "names no role"),
        (&|| authority.write(dir.path(), "client", &of(&["impresario:role/king"])), "client.pem", "names no role"),
        (
            &|| authority.write(dir.path(), "client", &of(&["impresario:role/client", "impresario:role/server"])),
            "client.pem",
            "several roles",
        ),
        (
            &|| {
                authority.write(
                    dir.path(),
                    "client",
                    &Wish { valid: (now - 3 * DAY, now - DAY), ..Wish::role("client") },
                )
            },
            "client.pem",
            "expired",
        ),
        (
            &|| {
                authority.write(
                    dir.path(),
                    "client",
                    &Wish { valid: (now + DAY, now + 3 * DAY), ..Wish::role("client") },
                )
            },
            "client.pem",
            "not valid for another",
        ),
        (
            &|| std::fs::set_permissions(file("client.key"), std::fs::Permissions::from_mode(0o640)).unwrap(),
            "client.key",
            "chmod 0600",
        ),
    ];
    for (spoil, name, what) in cases {
        authority.write_all(dir.path());
        certificates(dir.path(), KeyRole::Client).unwrap();
        for role in ["admin", "server"] {
            std::fs::remove_file(file(&format!("{role}.pem"))).unwrap();
        }
        spoil();
        let why = certificates(dir.path(), KeyRole::Client).unwrap_err();
        assert!(why.contains(name) && why.contains(what) && !why.contains('\n'), "{what}: {why}");
    }
}

#[test]
fn each_mismatch_is_explained_on_both_sides() {
    let (dir, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let authority = Authority::draw("cluster");
    authority.write_all(dir.path());
    Authority::draw("another").write_all(foreign.path());
    let theirs = server(dir.path());
    // Another cluster's client; the server's certificate is unknown to it.
    let (ours, there) = meet(&access(foreign.path(), KeyRole::Client), &theirs);
    let ours = ours.unwrap_err();
    assert!(ours.contains("the certificate of the server there") && ours.contains("ca.pem"), "{ours}");
    assert!(there.unwrap_err().contains("has refused the certificate in"));
    // One that believes the server, with a certificate that the server does not know.
    replace(
        &foreign.path().join("ca.pem"),
        &(std::fs::read_to_string(foreign.path().join("ca.pem")).unwrap() + authority.pem()),
    );
    let (ours, there) = meet(&access(foreign.path(), KeyRole::Client), &theirs);
    let ours = ours.unwrap_err();
    assert!(ours.contains("has refused the certificate in") && ours.contains("client.pem"), "{ours}");
    assert!(ours.contains("knows no authority"), "{ours}");
    let there = there.unwrap_err();
    assert!(there.contains("the certificate of the client") && there.contains("no authority in"), "{there}");

    // A client that speaks with another client in a server's place: its certificate was made for the server's files.
    let posing = tempfile::tempdir().unwrap();
    authority.write_all(posing.path());
    let pose = config(posing.path());
    let admin = Certificates::of(&pose, KeyRole::Admin).unwrap();
    let (ours, _) = meet(&access(dir.path(), KeyRole::Client), &Arc::new(admin));
    let ours = ours.unwrap_err();
    assert!(ours.contains("is for the role admin, and servers have the role server"), "{ours}");

    // A certificate that expires while the program runs.
    let brief = Wish {
        valid: (SystemTime::now() - Duration::from_secs(60), SystemTime::now() + Duration::from_secs(2)),
        ..Wish::role("client")
    };
    authority.write(posing.path(), "client", &brief);
    let late = access(posing.path(), KeyRole::Client);
    until("it has expired", || SystemTime::now() > brief.valid.1 + Duration::from_millis(1100));
    let (ours, there) = meet(&late, &theirs);
    let (ours, there) = (ours.unwrap_err(), there.unwrap_err());
    assert!(ours.contains("client.pem") && ours.contains("expired"), "{ours}");
    assert!(there.contains("the certificate of the client expired"), "{there}");
}

#[test]
fn peers_with_keys_or_without_anything_are_told_what_is_spoken_here() {
    let dir = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(dir.path());
    let keys = Keys::draw().unwrap();
    let key_dir = dir.path().join("keys");
    KeyRole::ALL.iter().for_each(|role| keys.for_role(*role).store(&key_dir.join(key_file_name(*role))).unwrap());
    let mut keyed = config(dir.path());
    keyed.tls = None;
    keyed.cluster = Cluster { security: Security::Key, key_dir: key_dir.clone(), ..Cluster::default() };
    let theirs = server(dir.path());
    for access in [Access::default(), Access::of(&keyed, KeyRole::Client)] {
        let (ours, there) = meet(&access, &theirs);
        let ours = ours.unwrap_err();
        assert!(ours.contains("only peers that show a certificate by TLS") && there.is_err(), "{ours}");
    }
    let ring = Arc::new(Keyring::find(&key_dir, KeyRole::Server).unwrap());
    for (ring, wanted) in [(Some(ring), "asks for a key"), (None, "asks for none")] {
        let (here, there) = pair();
        let server =
            std::thread::spawn(move || serve(there, ring.as_deref().map(|ring| (ring, Protect::Headers)), None));
        let mut reader = FrameReader::default();
        let ours = greet(&here, &mut reader, &access(dir.path(), KeyRole::Client)).unwrap_err().to_string();
        assert!(ours.contains(wanted) && ours.contains("client.pem"), "{ours}");
        here.shut_down();
        assert!(server.join().unwrap().is_err());
    }
    // Something else altogether.
    let (here, there) = UnixStream::pair().unwrap();
    let web = std::thread::spawn(move || {
        let mut there = there;
        let _ = there.read(&mut [0; 4096]);
        let _ = there.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let here = Stream::from_unix(here, TICK).unwrap();
    let ours = greet(&here, &mut FrameReader::default(), &access(dir.path(), KeyRole::Client)).unwrap_err().to_string();
    assert!(ours.contains("no server of Impresario"), "{ours}");
    web.join().unwrap();
}

#[test]
fn files_are_read_again_once_they_fit_together() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, next) = (Authority::draw("cluster"), Authority::draw("next"));
    authority.write_all(dir.path());
    let (theirs, ours) = (server(dir.path()), access(dir.path(), KeyRole::Client));
    let (here, there) = pair();
    let first = theirs.clone();
    let serving = std::thread::spawn(move || serve(there, None, Some(&first)));
    greet(&here, &mut FrameReader::default(), &ours).unwrap();
    here.shut_down();
    let old = serving.join().unwrap().unwrap().certificate.unwrap();
    assert_eq!(theirs.check(&old), Ok(()));

    // Both authorities are believed while the certificates are replaced one by one.
    let both = authority.pem().to_string() + next.pem();
    replace(&dir.path().join("ca.pem"), &both);
    assert!(theirs.refresh());
    let (certificate, key) = next.issue(&Wish::role("server"));
    replace(&dir.path().join("server.key"), &key);
    assert!(!theirs.refresh(), "half of a pair is not taken");
    replace(&dir.path().join("server.pem"), &certificate);
    assert!(theirs.refresh());
    until("the client has read the authorities", || meet(&ours, &theirs) == (Ok(()), Ok(KeyRole::Client)));
    assert_eq!(theirs.check(&old), Ok(()));
    next.write(dir.path(), "client", &Wish::role("client"));
    replace(&dir.path().join("ca.pem"), next.pem());
    assert!(theirs.refresh());
    let why = theirs.check(&old).unwrap_err();
    assert!(why.contains("no authority in"), "{why}");
    until("the client has read its new files", || meet(&ours, &theirs) == (Ok(()), Ok(KeyRole::Client)));
}

#[test]
fn what_is_revoked_is_refused_on_both_sides_and_connections_of_it_end() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::draw("cluster");
    authority.write_all(dir.path());
    let list = |revoked: &[&str]| replace(&dir.path().join("revoked.pem"), &authority.revoke(revoked, DAY));
    let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    list(&[]);
    let theirs = server(dir.path());
    let connected = |role| {
        let (here, there) = pair();
        let theirs = theirs.clone();
        let serving = std::thread::spawn(move || serve(there, None, Some(&theirs)));
        greet(&here, &mut FrameReader::default(), &access(dir.path(), role)).unwrap();
        here.shut_down();
        serving.join().unwrap().unwrap().certificate.unwrap()
    };
    let (client, admin) = (connected(KeyRole::Client), connected(KeyRole::Admin));
    list(&[&text("client.pem")]);
    assert!(theirs.refresh());
    let why = theirs.check(&client).unwrap_err();
    assert!(why.contains("the certificate of the client was revoked") && why.contains("revoked.pem"), "{why}");
    assert_eq!(theirs.check(&admin), Ok(()));
    let (ours, there) = meet(&access(dir.path(), KeyRole::Client), &theirs);
    let ours = ours.unwrap_err();
    assert!(ours.contains("client.pem") && ours.contains("it was revoked"), "{ours}");
    assert_eq!(there.unwrap_err(), why);
    assert_eq!(meet(&access(dir.path(), KeyRole::Admin), &theirs), (Ok(()), Ok(KeyRole::Admin)));
    authority.write(dir.path(), "client", &Wish::role("client"));
    let ours = access(dir.path(), KeyRole::Client);
    assert_eq!(meet(&ours, &theirs), (Ok(()), Ok(KeyRole::Client)));

    // A server's: its own program goes on, with the list; clients refuse it.
    list(&[&text("admin.pem"), &text("server.pem")]);
    assert!(theirs.refresh());
    assert!(theirs.check(&admin).unwrap_err().contains("was revoked"));
    until("the client has read the list", || {
        meet(&ours, &theirs).0.is_err_and(|why| why.contains("the certificate of the server there was revoked"))
    });
}

#[test]
fn lists_are_those_of_the_authorities_whatever_their_names_and_ages() {
    let dir = tempfile::tempdir().unwrap();
    let (authority, namesake, other) =
        (Authority::draw("cluster"), Authority::draw("cluster"), Authority::draw("another"));
    authority.write_all(dir.path());
    let file = dir.path().join("revoked.pem");
    let client = std::fs::read_to_string(dir.path().join("client.pem")).unwrap();
    // Certificates of the same number.
    let [theirs, another] = [&namesake, &other].map(|one| one.issue(&Wish::role("client")).0);
    let verdict = |lists: &str| {
        replace(&file, lists);
        meet(&access(dir.path(), KeyRole::Client), &server(dir.path())).1
    };
    // Past its next update.
    assert!(verdict(&authority.revoke(&[&client], Duration::ZERO)).unwrap_err().contains("was revoked"));
    // Of another authority, which has issued nothing here.
    assert_eq!(verdict(&other.revoke(&[&another], DAY)), Ok(KeyRole::Client));
    // While one authority takes the place of another one of the same name.
    replace(&dir.path().join("ca.pem"), &(namesake.pem().to_string() + authority.pem()));
    let both = authority.revoke(&[&client], DAY) + &namesake.revoke(&[], DAY);
    assert!(verdict(&both).unwrap_err().contains("was revoked"));
    let both = namesake.revoke(&[&theirs], DAY) + &authority.revoke(&[], DAY);
    assert_eq!(verdict(&both), Ok(KeyRole::Client));
    replace(&dir.path().join("ca.pem"), authority.pem());
    let twice = authority.revoke(&[], DAY) + &authority.revoke(&[], DAY);
    for (lists, what) in [
        ("", "holds no list"),
        (authority.pem(), "holds no list"),
        ("-----BEGIN X509 CRL-----\n!\n", "copy it again"),
        (&twice, "keep the later"),
        // Signed by another.
        (&namesake.revoke(&[&theirs], DAY), "is of no use"),
    ] {
        replace(&file, lists);
        let why = certificates(dir.path(), KeyRole::Client).unwrap_err();
        assert!(why.contains("revoked.pem") && why.contains(what) && !why.contains('\n'), "{what}: {why}");
    }
    let config = config(dir.path());
    std::fs::remove_file(&file).unwrap();
    let why = Certificates::of(&config, KeyRole::Client).unwrap_err().to_string();
    assert!(why.contains("revoked.pem") && why.contains("SECURITY.md"), "{why}");
}

/// The commands of SECURITY.md under "Certificates".
#[test]
fn certificates_and_lists_are_made_as_the_documentation_says() {
    if !require("openssl") {
        return;
    }
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../doc/SECURITY.md")).unwrap();
    let section = document.split("\n## Certificates").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut blocks = section.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let base = tempfile::tempdir().unwrap();
    let mut run = || {
        let block = blocks.next().unwrap();
        let ran = Command::new("sh").args(["-e", "-c", block]).current_dir(base.path()).output().unwrap();
        assert!(ran.status.success(), "{block}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    run();
    let dir = base.path().join("tls");
    let theirs = server(&dir);
    for role in KeyRole::ALL {
        assert_eq!(meet(&access(&dir, role), &theirs), (Ok(()), Ok(role)));
    }
    run();
    let theirs = server(&dir);
    assert!(meet(&access(&dir, KeyRole::Client), &theirs).1.unwrap_err().contains("was revoked"));
    assert_eq!(meet(&access(&dir, KeyRole::Admin), &theirs).1, Ok(KeyRole::Admin));
}

#[test]
fn what_a_certificate_says_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::draw("cluster");
    authority.write_all(dir.path());
    let (from, until) = (SystemTime::UNIX_EPOCH + 10_000 * DAY, SystemTime::UNIX_EPOCH + 30_000 * DAY);
    let uris = vec!["https://example.org".into(), "impresario:role/client".into()];
    authority.write(dir.path(), "client", &Wish { uris: uris.clone(), valid: (from, until) });
    let file = dir.path().join("client.pem");
    let list = dir.path().join("revoked.pem");
    let show = |file: &Path| show_certificates(file, Some(&list)).map_err(|error| error.to_string());
    assert!(show(&file).unwrap_err().contains("revoked.pem"));
    replace(&list, &authority.revoke(&[], DAY));
    let shown = show(&file).unwrap().pop().unwrap();
    assert_eq!((shown.role, &shown.uris), (Some(KeyRole::Client), &uris));
    assert_eq!((shown.valid_s, shown.is_revoked), ((10_000 * 86_400, 30_000 * 86_400), false));
    assert_eq!((shown.sha256.len(), shown.serial.as_str()), (95, "04"));
    replace(&list, &authority.revoke(&[&std::fs::read_to_string(&file).unwrap()], DAY));
    assert!(show(&file).unwrap()[0].is_revoked && !show(&dir.path().join("admin.pem")).unwrap()[0].is_revoked);
    let both = std::fs::read_to_string(&file).unwrap() + authority.pem();
    replace(&file, &both);
    assert_eq!(show(&file).unwrap().iter().map(|one| one.role).collect::<Vec<_>>(), [Some(KeyRole::Client), None]);
    assert!(
        show_certificates(&dir.path().join("client.key"), None).unwrap_err().to_string().contains("no certificate")
    );
}

#[test]
fn a_bit_that_flips_on_the_way_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(dir.path());
    let (theirs, access) = (server(dir.path()), access(dir.path(), KeyRole::Client));
    let payload = vec![7; 100_000];
    let run = |flip| flipped(flip, &access, &payload, |there| serve(there, None, Some(&theirs))).0;
    assert!(run(None).unwrap() == payload);
    for way in [true, false] {
        // The two bytes of a record that only say an old version mean nothing, and are covered by nothing in the first.
        for place in (9..1500).step_by(61).chain([20_000, 50_000, 99_000]) {
            let ended = run(Some((way, place)));
            assert!(ended.is_err(), "{way} {place}: the client went on");
        }
    }
}

#[test]
fn nonsense_and_halves_end_a_connection_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(dir.path());
    let theirs = server(dir.path());
    // What an honest client sends first.
    let (here, mut there) = UnixStream::pair().unwrap();
    let access = access(dir.path(), KeyRole::Client);
    let greeting = std::thread::spawn(move || {
        let here = Stream::from_unix(here, TICK).unwrap();
        let _ = greet(&here, &mut FrameReader::default(), &access);
    });
    let mut hello = vec![0; 4096];
    let got = there.read(&mut hello).unwrap();
    hello.truncate(got);
    drop(there);
    greeting.join().unwrap();
    assert_eq!(hello[0], 22);
    let mut cases = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![22],
        vec![22, 3, 1, 0xff, 0xff],
        [&[22, 3, 1, 0xff, 0xff][..], &[0; 70_000]].concat(),
        // A message of the hand-shake that claims 16 MB, in small records that never end.
        [22, 3, 1, 0, 64, 1, 0xff, 0xff, 0xff].iter().copied().chain([0; 60]).collect::<Vec<u8>>(),
        [&[22, 3, 1, 0, 4, 1, 0, 0xff, 0xff][..], &[[22, 3, 1, 0, 1, 0]; 30_000].concat()].concat(),
        [&[22, 3, 3, 0, 0][..]; 20_000].concat(),
        [&[21, 3, 3, 0, 2, 2, 40][..]; 3].concat(),
        [&[23, 3, 3, 0, 2, 2, 40][..]; 3].concat(),
        [hello.clone(), hello.clone()].concat(),
    ];
    cases.extend((0..hello.len()).step_by(7).map(|len| hello[..len].to_vec()));
    let mut random = Random::new(16);
    for _ in 0..300 {
        let mut bytes = hello.clone();
        for byte in bytes.iter_mut().skip(1) {
            if random.below(40) == 0 {
                *byte = random.below(256) as u8;
            }
        }
        bytes.extend((0..random.below(2000)).map(|_| random.below(256) as u8));
        cases.push(bytes);
    }
    cases.extend((0..100).map(|_| (0..random.below(3000)).map(|_| random.below(256) as u8).collect()));
    for bytes in cases {
        let (mut ours, there) = UnixStream::pair().unwrap();
        let (there, theirs) = (Stream::from_unix(there, TICK).unwrap(), theirs.clone());
        let server = std::thread::spawn(move || serve(there, None, Some(&theirs)));
        let drained = {
            let mut ours = ours.try_clone().unwrap();
            std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()))
        };
        let _ = ours.write_all(&bytes);
        let _ = ours.shutdown(std::net::Shutdown::Write);
        let ended = server.join().expect("no panic");
        assert!(ended.is_err(), "{bytes:02x?}");
        drop(ours);
        let _ = drained.join().unwrap();
    }
    // And a server that answers with nonsense.
    for round in 0..50 {
        let (here, mut there) = UnixStream::pair().unwrap();
        let first = if round % 2 == 0 { 22 } else { random.below(256) as u8 };
        let bytes: Vec<u8> = (0..random.below(2000)).map(|_| random.below(256) as u8).collect();
        let server = std::thread::spawn(move || {
            let _ = there.read(&mut [0; 4096]);
            let _ = there.write_all(&[&[first, 3, 3, 0, 40][..], &bytes].concat());
        });
        let here = Stream::from_unix(here, TICK).unwrap();
        let access = Access::of(&config(dir.path()), KeyRole::Client);
        assert!(greet(&here, &mut FrameReader::default(), &access).is_err());
        server.join().unwrap();
    }
}

#[test]
fn a_hand_shake_that_trickles_ends_at_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(dir.path());
    let theirs = server(dir.path());
    let (mut ours, there) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let there = Stream::from_unix(there, TICK).unwrap();
        let membership = Membership::default();
        let (name, role) = ("data.0", Role::Data);
        let host = Host { name, role, membership: &membership, keys: None, certificates: Some(&theirs) };
        let began = Instant::now();
        let deadline = began + Duration::from_millis(600);
        let received = receive_hello(&there, &mut FrameReader::new(1000), host, &LIMITS, deadline);
        (matches!(received, Err(HelloError::Broken(_))), began.elapsed())
    });
    // The beginning of a record of 16 KiB, which would take minutes.
    let _ = ours.write_all(&[22, 3, 1, 0x40, 0]);
    while ours.write_all(&[0]).is_ok() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (ended, took) = server.join().unwrap();
    assert!(ended && took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn the_recipe_in_the_documentation_makes_certificates_that_are_accepted() {
    if !require("openssl") || !require("bash") {
        return;
    }
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../doc/SECURITY.md")).unwrap();
    let recipe = text.split("```").find(|block| block.contains("openssl req")).expect("a recipe");
    let recipe = recipe.split_once('\n').unwrap().1;
    let dir = tempfile::tempdir().unwrap();
    let ran = std::process::Command::new("bash").args(["-e", "-c", recipe]).current_dir(dir.path()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let theirs = server(&dir.path().join("tls"));
    for role in KeyRole::ALL {
        assert_eq!(meet(&access(&dir.path().join("tls"), role), &theirs), (Ok(()), Ok(role)));
    }
    // Without its file of extensions openssl makes a certificate of version 1, later releases one of version 3 without a role.
    let forgotten = "openssl req -new -key tls/client.key -subj /CN=x -out tls/x.csr\n\
                     openssl x509 -req -in tls/x.csr -CA tls/ca.pem -CAkey tls/ca.key -days 9 -out tls/client.pem";
    let ran = Command::new("bash").args(["-e", "-c", forgotten]).current_dir(dir.path()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let why = certificates(&dir.path().join("tls"), KeyRole::Client).unwrap_err();
    assert!(why.contains("client.pem") && (why.contains("-extfile") || why.contains("names no role")), "{why}");
}
