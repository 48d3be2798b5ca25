//! `impresario scrub`: what it finds, beside running servers and on stopped folders, and its exit status.

use std::os::unix::fs::FileExt;
use std::time::Instant;

use impresario_config::DataState;

use crate::support::{Cluster, Ran, client, pattern, run, write_file};

fn scrub(cluster: &Cluster, words: &[&str]) -> Ran {
    run(["scrub", cluster.path.to_str().unwrap()].iter().chain(words))
}

/// Inverts bits of the longest object of a data server; gives its key.
pub fn rot(cluster: &Cluster, index: usize, at: u64) -> String {
    let folders = std::fs::read_dir(cluster.config.data[index].dir.join("objects")).unwrap();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap()).map(|file| file.unwrap());
    let objects = files.filter(|file| !file.file_name().to_str().unwrap().contains('.'));
    let object = objects.max_by_key(|file| file.metadata().unwrap().len()).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(object.path()).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    object.file_name().into_string().unwrap()
}

#[test]
fn scrub_finds_damage_and_names_its_file() {
    let mut cluster = Cluster::start(2, 0, |config| {
        config.cluster.stripe_bytes = 65536;
        config.data.iter_mut().for_each(|data| data.checksums = true);
    });
    let client_of = client(&cluster.config, 1);
    client_of.mkdir("d", 0o755, 0, 0).unwrap();
    write_file(&client_of, "d/large", &pattern(1, 1, 0, 3_000_000));
    write_file(&client_of, "small", &pattern(1, 2, 0, 1000));
    let ran = scrub(&cluster, &["--online"]);
    assert!(ran.code == 0 && ran.out.contains(" 0 without a checksum: no damage"), "{ran:?}");
    let ran = scrub(&cluster, &[]);
    assert!(ran.code == 8 && ran.out.contains("in use by another server"), "{ran:?}");
    assert_eq!(scrub(&cluster, &["--server", "data.7"]).code, 16);
    assert_eq!(scrub(&cluster, &["--rate", "fast"]).code, 2);

    // The second strip of the server's lane.
    let key = rot(&cluster, 1, 65536 + 3 * 4096 + 5);
    let ran = scrub(&cluster, &["--online", "--json", "--progress", "--rate", "0"]);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, &report["status"], &report["objects"]), (4, &4.into(), &3.into()), "{ran:?}");
    let damage = &report["damage"][0];
    assert_eq!((&damage["server"], &damage["key"]), (&"data.1".into(), &key.clone().into()));
    assert_eq!((&damage["offset"], &damage["len"]), (&(65536 + 3 * 4096).into(), &4096.into()));
    assert_eq!(damage["path"], "d/large");
    // Of the file's strips the server has every other one.
    let at = damage["file_offset"].as_u64().unwrap();
    assert!([131_072, 196_608].iter().any(|strip| at == strip + 3 * 4096), "{at}");
    let mut into = vec![0; 4096];
    let file = client_of.open("d/large", false).unwrap();
    let error = file.read_at(&mut into, at).unwrap_err();
    assert!(error.errno() == libc::EIO && error.to_string().contains("is damaged at byte"), "{error}");
    let other = scrub(&cluster, &["--online", "--server", "data.0"]);
    assert!(other.code == 0, "{other:?}");

    let started = Instant::now();
    let slow = scrub(&cluster, &["--online", "--server", "data.0", "--rate", "1m"]);
    assert!(slow.code == 0 && started.elapsed().as_millis() > 1000, "1.5 MB at 1 MiB/s: {:?}", started.elapsed());

    drop((file, client_of));
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.kill(name));
    let ran = scrub(&cluster, &[]);
    assert!(
        ran.code == 4 && ran.out.contains(&format!("damaged: d/large, byte {at}: data.1: object {key}")),
        "{ran:?}"
    );
    rot(&cluster, 1, 65536 + 3 * 4096 + 5);
    assert_eq!(scrub(&cluster, &[]).code, 0, "put right again");
}

/// Those before it may be left out, or retired: it is still the server of its number.
#[test]
fn a_server_is_scrubbed_without_those_before_it() {
    let mut cluster = Cluster::start(2, 0, |config| config.data[0].state = DataState::Draining);
    write_file(&client(&cluster.config, 1), "f", &pattern(1, 1, 0, 300_000));
    let path = cluster.path.to_str().unwrap().to_string();
    let clean = |cluster: &Cluster, words: &[&str]| {
        let ran = scrub(cluster, words);
        assert!(ran.code == 0 && ran.out.contains("1 objects of "), "{words:?}: {ran:?}");
    };
    clean(&cluster, &["--online", "--server", "data.1"]);
    let ran = run(["store", "drain", &path, "--name", "data.0", "--wait", "20s"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    cluster.kill("data.0");
    cluster.config.data[0].state = DataState::Retired;
    cluster.rewrite();
    cluster.kill("meta");
    cluster.restart("meta");
    for words in [&["--online"][..], &["--online", "--server", "data.1"]] {
        clean(&cluster, words);
    }
    ["data.1", "meta"].iter().for_each(|name| cluster.kill(name));
    for words in [&[][..], &["--server", "data.1"]] {
        clean(&cluster, words);
    }
    cluster.config.data[0].state = DataState::default();
    cluster.rewrite();
    clean(&cluster, &["--server", "data.1"]);
}
