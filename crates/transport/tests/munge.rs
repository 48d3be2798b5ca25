//! Credentials of MUNGE, made and checked by daemons with keys of their own.

use impresario_testing::munge::Munged;
use impresario_transport::{Munge, Proven};
use impresario_wire::ClientKey;

#[test]
fn a_credential_names_its_user_once_and_for_one_client() {
    let dir = tempfile::tempdir().unwrap();
    let Some(here) = Munged::start(&dir.path().join("here"), &[1; 32]) else { return };
    let Some(elsewhere) = Munged::start(&dir.path().join("elsewhere"), &[1; 32]) else { return };
    let Some(foreign) = Munged::start(&dir.path().join("foreign"), &[2; 32]) else { return };
    let [here, elsewhere, foreign] = [&here, &elsewhere, &foreign].map(|munged| Munge::at(Some(munged.socket())));
    let (client, other) = (ClientKey(7), ClientKey(8));
    let root = Proven { uid: 0, gid: 0 };
    let shown = here.prove(client).unwrap();
    assert_eq!(elsewhere.verify(&shown, client), Ok(root), "machines share a key");
    let again = elsewhere.verify(&shown, client).unwrap_err();
    assert!(again.contains("used before"), "{again}");
    let stolen = elsewhere.verify(&here.prove(client).unwrap(), other).unwrap_err();
    assert!(stolen.contains("another client"), "{stolen}");
    let unknown = foreign.verify(&here.prove(client).unwrap(), client).unwrap_err();
    assert!(unknown.contains("same munge.key"), "{unknown}");
    for nonsense in [&b""[..], b"nonsense", b"MUNGE:AAAA:", b"a\0b", &[b'x'; 5000], &shown[..shown.len() / 2]] {
        assert!(here.verify(nonsense, client).is_err(), "{nonsense:?}");
    }
    let away = Munge::at(Some(&dir.path().join("nobody"))).prove(client).unwrap_err();
    assert!(away.contains("start munged"), "{away}");
}

#[test]
fn a_program_of_root_gets_credentials_of_users_and_stays_root() {
    let dir = tempfile::tempdir().unwrap();
    let Some(munged) = Munged::start(dir.path(), &[1; 32]) else { return };
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let munge = Munge::at(Some(munged.socket()));
    let client = ClientKey(7);
    let users = (0..16).map(|n| Proven { uid: 1000 + n, gid: 2000 + n });
    // Several at once, as threads of a mount ask for them.
    let asked: Vec<_> = users
        .map(|user| (user, munge.clone()))
        .map(|(user, munge)| (user, std::thread::spawn(move || munge.prove_as(user, client))))
        .collect();
    for (user, asked) in asked {
        assert_eq!(munge.verify(&asked.join().unwrap().unwrap(), client), Ok(user));
    }
    assert_eq!(munge.verify(&munge.prove(client).unwrap(), client), Ok(Proven { uid: 0, gid: 0 }));
    // What the kernel takes for no change would give root's.
    for (uid, gid) in [(u32::MAX, 7), (7, u32::MAX), (0, 0)] {
        munge.prove_as(Proven { uid, gid }, client).unwrap_err();
    }
}
