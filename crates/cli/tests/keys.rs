//! Clusters with keys or certificates, of real processes: what `up` makes, who is let in, and a rotation under load.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Cluster, IMPRESARIO, Process, Ran, client_via, new_file, pattern, run, run_command};
use impresario_client::{Access, KeyRole, Via, admin};
use impresario_config::{Protect, Security, Tls};
use impresario_testing::certificates::{Authority, Wish, replace};
use impresario_testing::until;
use impresario_transport::{Keys, key_file_name};
use rustix::process::Signal;

/// A network namespace whose only addresses are those of its own loopback interface, one of them not a loopback address.
struct Network(String);

impl Network {
    const ADDRESS: &str = "10.77.0.1";

    fn new() -> Network {
        let network = Network(format!("impresario-{}", std::process::id()));
        network.ip(&["netns", "add", &network.0]);
        network.ip(&["-n", &network.0, "link", "set", "lo", "up"]);
        network.ip(&["-n", &network.0, "addr", "add", "10.77.0.1/32", "dev", "lo"]);
        network
    }

    fn ip(&self, args: &[&str]) {
        let ran = run_command(Command::new("ip").args(args));
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, IMPRESARIO]).args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        run_command(&mut self.command(args))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

#[test]
fn beyond_loopback_up_makes_keys_and_nobody_comes_in_without() {
    if !impresario_testing::require("root") || !impresario_testing::require("ip") {
        return;
    }
    let network = Network::new();
    let base = tempfile::tempdir().unwrap();
    let (dir, log) = (base.path().join("c"), base.path().join("log"));
    let words = ["up", "--dir", dir.to_str().unwrap(), "--listen", Network::ADDRESS];
    let more = ["--data-servers", "1", "--io-nodes", "1"];
    let mut up = Process::start_command(&mut network.command(&[&words[..], &more[..]].concat()), &log);
    until("up says ready", || {
        assert!(!up.log().contains("did not start"), "{}", up.log());
        up.log().contains("ready: ")
    });
    assert!(up.log().contains("made keys: "), "{}", up.log());
    let config = dir.join("impresario.toml");
    let config = config.to_str().unwrap();
    let keys = dir.join("keys");
    for role in KeyRole::ALL {
        let mode = keys.join(key_file_name(role)).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let ran = network.run(&["status", config]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let set = ["policy", "set", config, "--server", "io.0", "sjf"];
    assert_eq!(network.run(&set).code, 0);

    // Another machine of the cluster, by its files.
    let other = base.path().join("other");
    std::fs::create_dir_all(other.join("keys")).unwrap();
    let theirs = other.join("impresario.toml");
    std::fs::copy(config, &theirs).unwrap();
    let theirs = theirs.to_str().unwrap();
    let ran = network.run(&["status", theirs]);
    assert!(ran.code == 1 && (ran.out.clone() + &ran.err).contains("no such key file"), "{ran:?}");
    std::fs::copy(keys.join("client.key"), other.join("keys/client.key")).unwrap();
    let ran = network.run(&["status", theirs]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = network.run(&["policy", "set", theirs, "--server", "io.0", "fifo"]);
    assert!(ran.code == 1 && ran.err.contains("admin.key"), "{ran:?}");
    let forged = other.join("keys/admin.key");
    Keys::draw().unwrap().for_role(KeyRole::Admin).store(&forged).unwrap();
    let ran = network.run(&["policy", "set", theirs, "--server", "io.0", "fifo"]);
    assert!(ran.code == 1 && ran.err.contains("is not known here"), "{ran:?}");
    std::fs::remove_file(forged).unwrap();
    let ran = network.run(&["key", "show", theirs]);
    assert!(ran.code == 0 && ran.out.contains("client key") && ran.out.contains("not on this machine"), "{ran:?}");

    // A machine that does without keys, and a key file that others may read.
    let text = std::fs::read_to_string(theirs).unwrap();
    std::fs::write(theirs, text.replace("# security = \"auto\"", "security = \"none\"")).unwrap();
    let ran = network.run(&["status", theirs]);
    assert!((ran.out.clone() + &ran.err).contains("only peers that show a key"), "{ran:?}");
    std::fs::write(theirs, text).unwrap();
    let file = other.join("keys/client.key");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let ran = network.run(&["status", theirs]);
    assert!((ran.out.clone() + &ran.err).contains("chmod 0600"), "{ran:?}");
    up.signal(Signal::INT);
    assert!(up.wait().success(), "{}", up.log());
}

#[test]
fn a_server_beyond_loopback_does_not_start_without_keys() {
    let mut cluster = Cluster::describe(1, 0, |config| config.cluster.security = Security::Key);
    impresario_server::folders::make_all(&cluster.config).unwrap();
    cluster.launch("data.0");
    let process = cluster.server("data.0");
    assert!(!process.wait().success());
    let log = process.log();
    assert!(log.contains("only peers with a key") && log.contains("impresario key new"), "{log}");
    let config = cluster.path.to_str().unwrap();
    assert_eq!(run(["key", "new", config]).code, 0);
    let again = run(["key", "new", config]);
    assert!(again.code == 2 && again.err.contains("key rotate"), "{again:?}");
    cluster.launch("data.0");
    cluster.await_answer("data.0");
}

#[test]
fn rotations_at_once_and_again_leave_files_that_belong_together() {
    let cluster = Cluster::describe(1, 0, |config| config.cluster.security = Security::Key);
    let (config, dir) = (cluster.path.to_str().unwrap(), &cluster.config.cluster.key_dir);
    assert_eq!(run(["key", "new", config]).code, 0);
    let numbers = |role: KeyRole| -> Vec<String> {
        let keys = Keys::load(&dir.join(key_file_name(role))).unwrap();
        keys.generations.iter().map(|generation| generation.number.clone()).collect()
    };
    let rotate = || {
        let ran = run(["key", "rotate", config]);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out
    };
    let first = numbers(KeyRole::Server);
    rotate();
    let out = rotate();
    // Servers were said to accept the first keys for a day.
    assert!(numbers(KeyRole::Server).ends_with(&first) && !out.contains("refused from now on"), "{out}");
    let out = rotate();
    assert!(!numbers(KeyRole::Server).contains(&first[0]), "the oldest of four goes");
    assert!(out.contains(&format!("key {} is refused from now on", first[0])), "{out}");
    for _ in 0..10 {
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(rotate))));
        let all = KeyRole::ALL.map(numbers);
        assert!(all.iter().all(|numbers| *numbers == all[0]), "{all:?}");
    }
}

fn keyed(protect: Protect) -> Cluster {
    Cluster::start(2, 1, |config| {
        config.cluster.security = Security::Key;
        config.cluster.protect = protect;
        // The configuration is not written yet, so its folder is not known: a folder of its own.
        let dir = tempfile::tempdir().unwrap().keep();
        config.cluster.key_dir = dir.join("keys");
        let keys = Keys::draw().unwrap();
        KeyRole::ALL.iter().for_each(|role| {
            keys.for_role(*role).store(&config.cluster.key_dir.join(key_file_name(*role))).unwrap();
        });
    })
}

fn remove_keys(cluster: &Cluster) {
    let _ = std::fs::remove_dir_all(cluster.config.cluster.key_dir.parent().unwrap_or(Path::new("/nowhere")));
}

/// Clients write, read and remove files, without an error, while something is changed.
fn work_goes_on(cluster: &Cluster, via: Via, change: impl FnOnce(&dyn Fn(Duration))) {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let round = |client: &std::sync::Arc<impresario_client::Client>, thread: u64, n: u64| {
        let path = format!("f{thread}.{n}");
        let data = pattern(thread, n, 0, 300_000);
        let file = client.create(path.as_bytes(), new_file(0o644)).unwrap_or_else(|e| panic!("{path}: {e}"));
        file.write_at(&data, 0).unwrap_or_else(|e| panic!("writing {path}: {e}"));
        let mut back = vec![0; data.len()];
        let got = file.read_at(&mut back, 0).unwrap_or_else(|e| panic!("reading {path}: {e}"));
        assert!(got == data.len() && back == data, "{path}");
        file.close().unwrap_or_else(|e| panic!("closing {path}: {e}"));
        client.unlink(path.as_bytes()).unwrap_or_else(|e| panic!("removing {path}: {e}"));
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|thread| {
                let (stop, rounds) = (&stop, &rounds);
                scope.spawn(move || {
                    let mut client = client_via(&cluster.config, thread, via);
                    let mut n = 0;
                    while !stop.load(Ordering::Relaxed) {
                        round(&client, thread, n);
                        // One that comes and goes.
                        if thread == 3 {
                            client = client_via(&cluster.config, thread, via);
                        }
                        n += 1;
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        change(&|while_s| {
            let end = std::time::Instant::now() + while_s;
            until("work goes on", || {
                std::time::Instant::now() > end || workers.iter().any(|worker| worker.is_finished())
            });
        });
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    assert!(rounds.load(Ordering::Relaxed) > 10, "little was done");
}

#[test]
fn keys_are_replaced_under_load_without_an_error() {
    for (protect, via) in [(Protect::Handshake, Via::Direct), (Protect::All, Via::Auto)] {
        let mut cluster = keyed(protect);
        let config = cluster.path.to_str().unwrap().to_string();
        work_goes_on(&cluster, via, |go_on| {
            // Each generation ends under way: connections of the first are closed and made anew with the second.
            for _ in 0..2 {
                let ran = run(["key", "rotate", &config, "--keep", "1s"]);
                assert_eq!(ran.code, 0, "{ran:?}");
                go_on(Duration::from_secs(3));
            }
        });
        // A hang-up makes a server with keys read them again, not end.
        cluster.server("data.0").signal(Signal::HUP);
        assert!(cluster.state("data.0")["connections"]["open"].as_u64().is_some());
        assert!(cluster.server("data.0").log().contains("read the keys again"), "{}", cluster.server("data.0").log());
        remove_keys(&cluster);
    }
}

/// A cluster whose programs show certificates, in this folder.
fn certified(folder: &Path, authority: &Authority) -> Cluster {
    authority.write_all(folder);
    Cluster::start(2, 1, |config| {
        config.cluster.security = Security::Tls;
        config.tls = Some(Tls {
            ca: folder.join("ca.pem"),
            certificate: folder.join("{role}.pem"),
            private_key: folder.join("{role}.key"),
            revoked: folder.join("revoked.pem").exists().then(|| folder.join("revoked.pem")),
        });
    })
}

#[test]
fn authorities_and_certificates_are_replaced_under_load_without_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, next) = (Authority::draw("cluster"), Authority::draw("next"));
    let mut cluster = certified(folder.path(), &authority);
    for via in [Via::Direct, Via::Auto] {
        // What was issued by the one that goes is refused in the end, and what comes is known before.
        let (from, to) = if via == Via::Direct { (&authority, &next) } else { (&next, &authority) };
        work_goes_on(&cluster, via, |go_on| {
            replace(&folder.path().join("ca.pem"), &(from.pem().to_string() + to.pem()));
            go_on(Duration::from_secs(2));
            for role in ["server", "client", "admin"] {
                to.write(folder.path(), role, &Wish::role(role));
                go_on(Duration::from_secs(1));
            }
            replace(&folder.path().join("ca.pem"), to.pem());
            go_on(Duration::from_secs(3));
        });
    }
    let log = cluster.server("data.0").log();
    assert!(log.contains("no authority in"), "a connection of before went on: {log}");
}

/// A client whose certificate is revoked loses its connections, and comes back with another one.
#[test]
fn a_certificate_is_revoked_while_the_cluster_works() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::draw("cluster");
    let day = Duration::from_secs(24 * 3600);
    let list = |revoked: &[&str]| replace(&folder.path().join("revoked.pem"), &authority.revoke(revoked, day));
    list(&[]);
    let mut cluster = certified(folder.path(), &authority);
    let config = cluster.path.to_str().unwrap().to_string();
    let client = client_via(&cluster.config, 1, Via::Direct);
    client.mkdir("d", 0o755, 0, 0).unwrap();
    let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let stolen = text("client.pem");
    let ran = run(["key", "show", &config]);
    assert!(ran.code == 0 && ran.out.contains("role client; valid until 20"), "{ran:?}");
    list(&[&stolen]);
    until("the client is shut out", || client.stat("d").is_err());
    let why = client.stat("d").unwrap_err().to_string();
    assert!(why.contains("revoked"), "{why}");
    assert!(cluster.server("meta").log().contains("was revoked"), "a connection of before went on");
    let ran = run(["policy", "set", &config, "--server", "io.0", "sjf"]);
    assert_eq!(ran.code, 0, "the administrator's is good: {ran:?}");
    let ran = run(["key", "show", &config]);
    assert!(ran.code == 1 && ran.out.contains("role client; revoked; number "), "{ran:?}");
    authority.write(folder.path(), "client", &Wish::role("client"));
    until("the client is back", || client.stat("d").is_ok());
    let pem = folder.path().join("admin.pem");
    let ran = run(["key", "show", pem.to_str().unwrap(), "--json"]);
    assert!(ran.code == 0 && ran.out.contains("impresario:role/admin") && ran.out.contains("sha256"), "{ran:?}");
}

#[test]
fn certificates_give_the_roles_that_keys_give() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::draw("cluster");
    let cluster = certified(folder.path(), &authority);
    let config = cluster.path.to_str().unwrap();
    let set = ["policy", "set", config, "--server", "io.0", "sjf"];
    assert_eq!(run(set).code, 0);
    // A machine that has a client's certificate under the administrator's name.
    let other = tempfile::tempdir().unwrap();
    let theirs = other.path().join("impresario.toml");
    let text = std::fs::read_to_string(config).unwrap();
    std::fs::write(&theirs, text.replace(folder.path().to_str().unwrap(), other.path().to_str().unwrap())).unwrap();
    let theirs = theirs.to_str().unwrap();
    replace(&other.path().join("ca.pem"), authority.pem());
    authority.write(other.path(), "client", &Wish::role("client"));
    assert_eq!(run(["status", theirs]).code, 0);
    let set = ["policy", "set", theirs, "--server", "io.0", "fifo"];
    let ran = run(set);
    assert!(ran.code == 1 && ran.err.contains("admin.pem"), "{ran:?}");
    authority.write(other.path(), "admin", &Wish::role("client"));
    let ran = run(set);
    assert!(ran.code == 1 && ran.err.contains("needs one for admin"), "{ran:?}");
    // A client that is not honest about that sends the call all the same, and is refused by the server.
    let access = Access::of(&cluster.config, KeyRole::Client);
    let error = admin::reset_statistics(&access, cluster.config.data[0].address.as_str(), Duration::from_secs(20));
    let error = error.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("takes the admin key or certificate"), "{error}");
    // One of another cluster.
    let foreign = Authority::draw("another");
    foreign.write_all(other.path());
    let ran = run(["status", theirs]);
    assert!(ran.code == 1 && (ran.out.clone() + &ran.err).contains("no authority in"), "{ran:?}");
}
