//! `impresario store`, and servers whose folder is not theirs: a disk that is not mounted, another cluster's, an old one.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{self, Cluster, Process, Ran, client, client_via, new_file, pattern, read_file, run, write_file};
use impresario_client::Via;
use impresario_config::Config;
use impresario_testing::{free_address, until};
use impresario_wire::{Device, NodeKind, SetAttr};

/// `impresario store WORDS[0] CONFIG WORDS[1..]`.
fn store(cluster: &Cluster, words: &[&str]) -> Ran {
    let (what, more) = words.split_first().unwrap();
    run(["store", what, cluster.path.to_str().unwrap()].iter().chain(more))
}

fn serve(cluster: &Cluster, name: &str) -> Ran {
    run(["serve", cluster.path.to_str().unwrap(), "--name", name])
}

#[test]
fn a_data_server_whose_disk_is_not_mounted_does_not_start_and_nothing_reads_as_zeros() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    let data = pattern(1, 1, 0, 300_000);
    write_file(&client(&cluster.config, 1), "a", &data);
    let folder = cluster.config.data[1].dir.clone();
    let away = folder.with_extension("away");
    for made in [false, true] {
        cluster.kill("data.1");
        fs::rename(&folder, &away).unwrap();
        if made {
            fs::create_dir(&folder).unwrap();
        }
        let ran = serve(&cluster, "data.1");
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("is empty") && ran.err.contains("impresario store init"), "{ran:?}");
        // The metadata server, which runs, knows the folder; so does its directory.
        for words in [&["init", "--name", "data.1"][..], &["init", "--all"]] {
            let ran = store(&cluster, words);
            assert_eq!(ran.code, 1, "{ran:?}");
            assert!(ran.err.contains("mounted?") && ran.err.contains("--replace"), "{ran:?}");
        }
        let ran = store(&cluster, &["show"]);
        assert!(ran.code == 1 && ran.out.contains("data.1: ") && ran.out.contains("empty or missing"), "{ran:?}");
        let file = client(&cluster.config, 2).open("a", false).unwrap();
        let error = file.read_at(&mut vec![0; data.len()], 0).unwrap_err();
        assert_eq!(error.errno(), libc::EIO, "{error}");
        drop(file);
        if made {
            fs::remove_dir(&folder).unwrap();
        }
        fs::rename(&away, &folder).unwrap();
        cluster.restart("data.1");
        assert!(read_file(&client(&cluster.config, 3), "a") == data);
    }
    assert_eq!(store(&cluster, &["show"]).code, 0);
}

#[test]
fn up_makes_the_folders_of_a_new_cluster_only() {
    let cluster = Cluster::start(2, 0, |_| {});
    let (path, dir) = (cluster.path.clone(), cluster.config.data[0].dir.clone());
    let mut cluster = cluster;
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.kill(name));
    fs::rename(&dir, dir.with_extension("away")).unwrap();
    let ran = run(["up", "--dir", path.parent().unwrap().to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("data.0 (") && ran.err.contains("is empty, but meta, data.1 are not"), "{ran:?}");
    assert!(!dir.exists());
}

/// A disk that is full, say: nothing is left that looks like a cluster that has lost a folder.
#[test]
fn folders_that_could_not_be_made_are_made_the_next_time() {
    let mut cluster = Cluster::describe(2, 0, |config| config.meta.dir = "/proc/impresario".into());
    let ran = store(&cluster, &["init", "--all"]);
    assert!(ran.code == 1 && ran.err.contains("/proc/impresario"), "{ran:?}");
    cluster.config.meta.dir = cluster.dir.path().join("meta");
    cluster.rewrite();
    let ran = store(&cluster, &["init", "--all"]);
    assert!(ran.code == 0 && ran.out.contains("made the folders"), "{ran:?}");
    cluster.begin();
}

/// The folders of data servers that a killed `up` or `store init --all` has made are no cluster's yet.
#[test]
fn the_making_of_folders_may_be_interrupted_anywhere() {
    let cluster = Cluster::describe(3, 0, |_| {});
    let data: Vec<_> = cluster.config.data.iter().map(|data| data.dir.join("format")).collect();
    let meta = cluster.config.meta.dir.clone();
    for made in 0..=3 {
        let ran = store(&cluster, &["init", "--all"]);
        assert!(ran.code == 0 && ran.out.contains("made the folders"), "{made}: {ran:?}");
        fs::remove_file(meta.join("format")).unwrap();
        data.iter().skip(made).for_each(|format| fs::remove_file(format).unwrap());
    }
    // What may be another disk's is left alone: a folder that was served, or of whose cluster nobody began the names here.
    let before = fs::read(&data[0]).unwrap();
    let objects = cluster.config.data[2].dir.join("objects");
    fs::create_dir(&objects).unwrap();
    let refused = || {
        let ran = store(&cluster, &["init", "--all"]);
        assert!(ran.code == 1 && ran.err.contains("are all disks mounted?"), "{ran:?}");
        assert_eq!(fs::read(&data[0]).unwrap(), before);
    };
    refused();
    fs::remove_dir(&objects).unwrap();
    let away = meta.with_extension("away");
    fs::rename(&meta, &away).unwrap();
    refused();
    fs::create_dir(&meta).unwrap();
    refused();
    fs::remove_dir(&meta).unwrap();
    fs::rename(&away, &meta).unwrap();
    assert_eq!(store(&cluster, &["init", "--all"]).code, 0);
    let mut cluster = cluster;
    cluster.begin();
    write_file(&client(&cluster.config, 1), "a", b"text");
}

#[test]
fn another_clusters_server_is_not_taken_for_ours() {
    let (ours, theirs) = (Cluster::start(1, 0, |_| {}), Cluster::start(1, 0, |_| {}));
    let data = pattern(1, 1, 0, 100_000);
    write_file(&client(&ours.config, 1), "a", &data);
    let mut mixed = ours.config.clone();
    mixed.data[0].address = theirs.config.data[0].address.clone();
    let file = client(&mixed, 2).open("a", false).unwrap();
    let error = file.read_at(&mut vec![0; data.len()], 0).unwrap_err();
    let cluster = theirs.state("data.0")["cluster"].as_str().unwrap().to_string();
    assert!(error.to_string().contains(&format!("this server belongs to cluster {cluster}")), "{error}");
}

#[test]
fn a_folder_made_by_hand_for_a_server_that_had_one_is_refused_by_the_metadata_server() {
    let mut cluster = Cluster::start(1, 0, |_| {});
    let data = pattern(1, 1, 0, 100_000);
    write_file(&client(&cluster.config, 1), "a", &data);
    cluster.kill("data.0");
    let (folder, meta) = (cluster.config.data[0].dir.clone(), cluster.config.meta.dir.clone());
    fs::rename(&folder, folder.with_extension("away")).unwrap();
    // Where the metadata server cannot be asked.
    let id = cluster.state("meta")["cluster"].as_str().unwrap().to_string();
    cluster.kill("meta");
    fs::rename(&meta, meta.with_extension("away")).unwrap();
    let ran = store(&cluster, &["init", "--name", "data.0"]);
    assert!(ran.code == 1 && ran.err.contains("--cluster"), "{ran:?}");
    let ran = store(&cluster, &["init", "--name", "data.0", "--cluster", &id]);
    assert_eq!(ran.code, 0, "{ran:?}");
    fs::rename(meta.with_extension("away"), &meta).unwrap();
    cluster.restart("meta");
    cluster.restart("data.0");
    let client = client(&cluster.config, 2);
    let file = client.open("a", true).unwrap();
    file.write_at(b"x", 0).unwrap();
    let error = file.sync().unwrap_err();
    assert!(error.to_string().contains("has folder"), "{error}");
}

/// Sections that were sorted, or of which one was taken out: files would be read from, and written to, servers that have other
/// parts of them.
#[test]
fn data_servers_keep_their_places() {
    let mut cluster = Cluster::start(3, 0, |_| {});
    let data = pattern(1, 1, 0, 500_000);
    write_file(&client(&cluster.config, 1), "a", &data);
    let config = cluster.config.clone();
    cluster.kill("meta");
    let changes: [fn(&mut Vec<impresario_config::Data>); 3] =
        [|data| data.swap(0, 1), |data| drop(data.remove(0)), |data| drop(data.pop())];
    for change in changes {
        change(&mut cluster.config.data);
        cluster.rewrite();
        let ran = serve(&cluster, "meta");
        assert!(ran.code == 1 && ran.err.contains("in the order data.0, data.1, data.2"), "{ran:?}");
        cluster.config = config.clone();
    }
    cluster.rewrite();
    cluster.restart("meta");
    assert!(read_file(&client(&cluster.config, 2), "a") == data);
}

/// The same of a file on the machine of a client, of an I/O node or of a data server, while the metadata server runs with the right
/// one.
#[test]
fn programs_with_another_order_of_data_servers_are_refused() {
    let mut cluster = Cluster::start(3, 1, |_| {});
    const STRIP: usize = 65_536;
    let mut data = pattern(1, 1, 0, 8 * STRIP);
    write_file(&client_via(&cluster.config, 1, Via::Direct), "a", &data);
    let sorted = cluster.dir.path().join("sorted.toml");
    let mut config = cluster.config.clone();
    config.data.swap(0, 1);
    fs::write(&sorted, config.to_toml()).unwrap();
    let config = Config::load(&sorted).unwrap();
    let is_clear = |said: &str| {
        let parts = ["data servers of its cluster", sorted.to_str().unwrap(), "127.0.0.1:", "Copy the file"];
        parts.iter().all(|part| said.contains(part))
    };

    let begun = Instant::now();
    let wrong = client_via(&config, 2, Via::Direct);
    let file = wrong.open("a", true).unwrap();
    let mut read = vec![0; 8 * STRIP];
    let error = file.read_at(&mut read, 0).unwrap_err();
    assert!(is_clear(&error.to_string()), "{error}");
    // A third of the strips is on the server that has its place all the same.
    let new = pattern(1, 2, 0, 8 * STRIP);
    let mut refused = 0;
    for at in (0..8 * STRIP).step_by(STRIP) {
        let strip = at..at + STRIP;
        match file.write_at(&new[strip.clone()], at as u64) {
            Ok(_) => data[strip.clone()].copy_from_slice(&new[strip]),
            Err(error) => {
                assert!(is_clear(&error.to_string()), "{error}");
                refused += 1;
            }
        }
    }
    assert!((5..=6).contains(&refused), "{refused} of 8");
    drop(file);
    // Without waiting for what would not change.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());

    // An I/O node tells its clients.
    cluster.kill("io.0");
    let log = cluster.dir.path().join("sorted.log");
    let mut io = Process::start(["serve".as_ref(), sorted.as_os_str(), "--name".as_ref(), "io.0".as_ref()], &log);
    cluster.await_address("io.0");
    let behind = client_via(&cluster.config, 3, Via::IoNode(0));
    let error = behind.open("a", false).unwrap().read_at(&mut read, 0).unwrap_err();
    assert!(is_clear(&error.to_string()), "{error}");
    io.kill();

    // A data server does not start with it, so that it cannot agree with such clients.
    cluster.kill("data.1");
    let ran = run(["serve".as_ref(), sorted.as_os_str(), "--name".as_ref(), "data.1".as_ref()]);
    assert!(ran.code == 1 && ran.err.contains("the place 2") && ran.err.contains("the file `order`"), "{ran:?}");
    cluster.restart("data.1");
    // A check of these servers would take all objects for those of others.
    let check = |more: &str| run(["fsck", sorted.to_str().unwrap(), more]);
    let ran = check("--online");
    assert!(ran.code != 0 && is_clear(&format!("{}{}", ran.out, ran.err)), "{ran:?}");
    assert!(read_file(&client_via(&cluster.config, 4, Via::Direct), "a") == data, "nothing else was written");
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    names.iter().filter(|name| *name != "io.0").for_each(|name| cluster.kill(name));
    let ran = check("--json");
    assert!(ran.code != 0 && ran.out.contains("another place"), "{ran:?}");

    // A server that was added in a wrong place, and has nothing yet, takes its right one.
    let mut added = Cluster::start(1, 0, |_| {});
    let first = added.config.data[0].clone();
    let address = free_address();
    added.config.data.insert(0, impresario_config::Data::new("data.1", address, added.dir.path().join("data.1")));
    added.rewrite();
    assert_eq!(store(&added, &["init", "--name", "data.1"]).code, 0);
    added.launch("data.1");
    added.await_answer("data.1");
    added.kill("data.1");
    added.config.data.swap(0, 1);
    assert_eq!(added.config.data[0], first);
    added.rewrite();
    added.restart("data.1");
}

/// New files of a metadata folder that was restored from an older copy, and started as it is, must not get the bytes of lost
/// ones: neither on data servers that are there, nor on one that comes later.
#[test]
fn a_metadata_folder_that_was_put_back_gives_no_bytes_of_lost_files() {
    const LEN: usize = 300_000;
    let mut cluster = Cluster::start(2, 0, |_| {});
    let kept = pattern(1, 1, 0, LEN);
    write_file(&client(&cluster.config, 1), "kept", &kept);
    let dir = cluster.config.meta.dir.clone();
    let copy = dir.with_extension("copy");
    let cp = |from: &Path, to: &Path| {
        assert!(std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    };
    cluster.kill("meta");
    cp(&dir, &copy);
    for round in 0..2 {
        cluster.restart("meta");
        let before = client(&cluster.config, 2);
        (0..20).for_each(|n| write_file(&before, &format!("lost-{n}"), &pattern(n, 7, 0, LEN)));
        drop(before);
        cluster.kill("meta");
        fs::remove_dir_all(&dir).unwrap();
        cp(&copy, &dir);
        // In the second round one of them is away when the metadata server starts.
        if round == 1 {
            cluster.kill("data.1");
        }
        cluster.restart("meta");
        let after = client(&cluster.config, 3);
        let make = |n: u64| {
            let file = after.create(format!("new-{n}"), new_file(0o644)).unwrap();
            // Bytes that nobody has written yet are zeros.
            file.write_at(b"end", LEN as u64).unwrap();
            file.sync().unwrap();
            file.close().unwrap();
        };
        (0..10).for_each(make);
        if round == 1 {
            assert_eq!(cluster.state("meta")["meta"]["data_servers_not_heard"], serde_json::json!(["data.1"]));
            cluster.restart("data.1");
            until("it has answered", || {
                cluster.state("meta")["meta"]["data_servers_not_heard"]
                    .as_array()
                    .is_some_and(|silent| silent.is_empty())
            });
        }
        (10..20).for_each(make);
        for n in 0..20 {
            let read = read_file(&after, &format!("new-{n}"));
            assert!(read[..LEN].iter().all(|byte| *byte == 0) && &read[LEN..] == b"end", "new-{n} in round {round}");
        }
        assert!(read_file(&after, "kept") == kept);
        let layout = |n: u64| after.open(format!("new-{n}"), false).unwrap().layout();
        assert_eq!(layout(0).position_of(1).is_none(), round == 1, "new files avoid one that is away");
        assert!(layout(19).position_of(1).is_some());
        (0..20).for_each(|n| after.unlink(format!("new-{n}")).unwrap());
        drop(after);
        cluster.kill("meta");
    }
}

#[test]
fn clusters_on_several_machines_are_made_server_by_server() {
    let mut cluster = Cluster::describe(2, 0, |_| {});
    let ran = store(&cluster, &["init", "--name", "data.0"]);
    assert!(ran.code == 1 && ran.err.contains("make the metadata folder first"), "{ran:?}");
    assert_eq!(store(&cluster, &["init", "--name", "meta"]).code, 0);
    cluster.launch("meta");
    cluster.await_answer("meta");
    // The metadata folder may be on this machine and closed to who makes a data server's: its server is asked.
    let (mut closed, other) = (cluster.config.clone(), cluster.dir.path().join("closed.toml"));
    closed.meta.dir = cluster.path.clone();
    fs::write(&other, closed.to_toml()).unwrap();
    for (name, path) in [("data.0", &cluster.path.clone()), ("data.1", &other)] {
        let ran = run(["store", "init", path.to_str().unwrap(), "--name", name]);
        assert_eq!(ran.code, 0, "{ran:?}");
        cluster.launch(name);
        cluster.await_answer(name);
    }
    let data = pattern(1, 1, 0, 300_000);
    write_file(&client(&cluster.config, 1), "a", &data);
    assert!(read_file(&client(&cluster.config, 2), "a") == data);
    let stores = cluster.state("meta")["stores"].as_object().unwrap().len();
    assert_eq!(stores, 2, "the metadata server has noted the folders");
    let ran = store(&cluster, &["init", "--name", "data.9"]);
    assert!(ran.code == 2 && ran.err.contains("no server is named data.9"), "{ran:?}");
}

#[test]
fn folders_of_the_version_before_are_adopted() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    let data = pattern(1, 1, 0, 300_000);
    write_file(&client(&cluster.config, 1), "a", &data);
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.kill(name));
    // As that version had written them.
    for data in &cluster.config.data {
        fs::write(data.dir.join("format"), "impresario objects 1\n").unwrap();
    }
    let format = cluster.config.meta.dir.join("format");
    let text = fs::read_to_string(&format).unwrap();
    fs::write(&format, format!("impresario-meta 1 {}\n", text.split(' ').nth(2).unwrap())).unwrap();
    for name in ["meta", "data.0"] {
        let ran = serve(&cluster, name);
        assert!(ran.code == 1 && ran.err.contains("impresario store adopt"), "{ran:?}");
    }
    let ran = store(&cluster, &["adopt", "--all"]);
    assert!(ran.code == 0 && ran.out.lines().count() == 3, "{ran:?}");
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.restart(name));
    assert!(read_file(&client(&cluster.config, 2), "a") == data);

    // Objects of another cluster are not adopted.
    let mut other = Cluster::start(1, 0, |_| {});
    write_file(&client(&other.config, 1), "b", &data);
    other.kill("data.0");
    cluster.kill("data.0");
    fs::remove_dir_all(&cluster.config.data[0].dir).unwrap();
    fs::rename(&other.config.data[0].dir, &cluster.config.data[0].dir).unwrap();
    fs::write(cluster.config.data[0].dir.join("format"), "impresario objects 1\n").unwrap();
    let ran = store(&cluster, &["adopt", "--name", "data.0"]);
    assert!(ran.code == 1 && ran.err.contains("objects of another cluster"), "{ran:?}");
}

fn unit(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name);
    fs::read_to_string(path).unwrap()
}

/// A folder on a disk that comes late, or a crash of a large server, is nothing that a person has to see to.
#[test]
fn units_start_their_servers_as_often_and_as_long_as_it_takes() {
    let document = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../doc/DEPLOYING.md");
    let document = fs::read_to_string(document).unwrap();
    let described = document.split("```ini\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let servers = [unit("impresario@.service"), unit("impresario@meta.service"), described.to_string()];
    for (text, is_server) in
        servers.map(|text| (text, true)).into_iter().chain([(unit("impresario-assist.service"), false)])
    {
        let section = |name: &str| text.split(&format!("[{name}]\n")).nth(1).unwrap().split("\n[").next().unwrap();
        let says = |name: &str, line: &str| assert!(section(name).lines().any(|is| is == line), "{line}: {text}");
        says("Unit", "StartLimitIntervalSec=0");
        says("Service", "Restart=on-failure");
        says("Service", "RestartSec=5");
        // Of the status, `a_mistake_in_the_configuration_has_a_status_of_its_own` says when.
        says("Service", "RestartPreventExitStatus=2");
        if !is_server {
            continue;
        }
        says("Service", "TimeoutStartSec=infinity");
        let after = section("Unit").lines().find_map(|line| line.strip_prefix("After=")).unwrap();
        assert!(after.split(' ').any(|target| target == "time-sync.target"), "{text}");
    }
}

/// Units do not start a server again that no restart helps: one whose configuration is wrong, and none else.
#[test]
fn a_mistake_in_the_configuration_has_a_status_of_its_own() {
    let cluster = Cluster::describe(1, 1, |_| {});
    let serve = |file: &std::path::Path, name: &str| {
        let ran =
            std::process::Command::new(support::IMPRESARIO).arg("serve").arg(file).args(["--name", name]).output();
        ran.unwrap().status.code()
    };
    let good = cluster.dir.path().join("impresario.toml");
    let bad = cluster.dir.path().join("bad.toml");
    let text = fs::read_to_string(&good).unwrap();
    fs::write(&bad, format!("{text}\n[meta]\nno_such_key = 1\n")).unwrap();
    assert_eq!(serve(&bad, "data.0"), Some(2), "a key that there is not");
    assert_eq!(serve(&good, "data.7"), Some(2), "a server that there is not");
    assert_eq!(serve(&cluster.dir.path().join("none.toml"), "data.0"), Some(2), "no configuration");
    // A folder that is not there yet may come with its disk.
    assert_eq!(serve(&good, "data.0"), Some(1), "no folder");
    impresario_server::folders::make_all(&cluster.config).unwrap();
    // And another program may end, which has the port.
    let _taken = std::net::TcpListener::bind(&cluster.config.data[0].address).unwrap();
    assert_eq!(serve(&good, "data.0"), Some(1), "a port that is taken");
    // The advice manager likewise.
    let daemon = |args: &[&str]| {
        let ran = std::process::Command::new(support::IMPRESARIO).args(["assist", "daemon"]).args(args).output();
        ran.unwrap().status.code()
    };
    let hints = cluster.dir.path().join("hints.json");
    fs::write(&hints, "{ \"NoSuchKey\": 1 }").unwrap();
    assert_eq!(daemon(&["--config", hints.to_str().unwrap()]), Some(2), "hints that make no sense");
    let socket = cluster.dir.path().join("none/assist.sock");
    assert_eq!(daemon(&["--socket", socket.to_str().unwrap()]), Some(1), "a folder that may come");
}

/// The rights of root that a unit leaves its server, as setpriv(1) writes them.
fn rights_in(name: &str) -> String {
    let text = unit(name);
    let rights = text.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let rights = rights.split_whitespace().map(|right| right.strip_prefix("CAP_").unwrap().to_lowercase());
    std::iter::once("-all".to_string()).chain(rights.map(|right| format!("+{right}"))).collect::<Vec<_>>().join(",")
}

#[test]
fn servers_do_with_the_rights_that_their_units_leave_them() {
    if !["root", "setpriv"].into_iter().all(impresario_testing::require) {
        return;
    }
    let mut cluster = Cluster::describe(2, 1, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    for name in ["data.0", "data.1", "meta", "io.0"] {
        let unit = if name == "meta" { "impresario@meta.service" } else { "impresario@.service" };
        let mut command = std::process::Command::new("setpriv");
        command.args(["--no-new-privs", "--inh-caps=-all", "--bounding-set", &rights_in(unit), support::IMPRESARIO]);
        cluster.launch_by(&mut command, name);
    }
    for name in ["data.0", "data.1", "meta", "io.0"] {
        cluster.await_answer(name);
        let status = fs::read_to_string(format!("/proc/{}/status", cluster.server(name).pid())).unwrap();
        assert_eq!(status.contains("CapBnd:\t0000000000000000"), name != "meta", "{status}");
    }
    let client = client(&cluster.config, 1);
    let data = pattern(1, 1, 0, 500_000);
    write_file(&client, "f", &data);
    let set = SetAttr { uid: Some(1000), gid: Some(1001), mode: Some(0o6755), ..SetAttr::default() };
    let attr = client.set_attr("f", set).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode), (1000, 1001, 0o6755));
    assert!(read_file(&client, "f") == data);
    client.open("f", true).unwrap().set_len(7).unwrap();
    client.rename("f", "g", true).unwrap();
    client.mknod("null", NodeKind::Character(Device { major: 1, minor: 3 }), 0o666, 0, 0).unwrap();
    client.unlink("g").unwrap();
}
