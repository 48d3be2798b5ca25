//! Requests that a limit withholds: their clients wait for longer than for a server, come back when that restarts, and may give
//! them up. What hangs fails as it does without limits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Cluster, Peer, pattern, who};
use impresario_client::{Client, ClientOptions, CreateOptions, File, Via, Watch};
use impresario_config::Config;
use impresario_layout::Layout;
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::link::Link;
use impresario_testing::until;
use impresario_wire::{Answer, Call, FileKey, LayoutRequest, Role};

/// A request that is not answered in this time fails, unless a limit withholds it.
const TIMEOUT: Duration = Duration::from_millis(2000);
/// What follows a request of [`BYTES`] is withheld for that long.
const WITHHELD: Duration = Duration::from_millis(5000);
const BYTES: usize = 64 << 10;

/// Each client has a rate, at which a request is paid in the time given.
fn limit(withheld: Duration) -> PolicySpec {
    let rate = BYTES as f64 / withheld.as_secs_f64();
    PolicySpec::named("tbf").with("rules", format!("slow: job=7 {{bytes_per_s={rate}, burst=1, each=client}}"))
}

/// Where the limit is, and which way requests go.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Place {
    /// At the data servers, which clients ask directly.
    Direct,
    /// At the data servers, behind an I/O node.
    Behind,
    /// At the I/O node.
    IoNode,
}

const PLACES: [Place; 3] = [Place::Direct, Place::Behind, Place::IoNode];

/// Two data servers, a metadata server and an I/O node, with the limit there.
struct Limited {
    place: Place,
    cluster: Cluster,
    meta: Option<Started>,
    _io: Started,
}

impl Limited {
    fn start(place: Place, withheld: Duration) -> Limited {
        let policy = limit(withheld);
        let mut cluster = Cluster::start(2, |config| {
            config.cluster.request_timeout_ms = TIMEOUT.as_millis() as u64;
            if place != Place::IoNode {
                config.data.iter_mut().for_each(|data| data.policy = policy.clone());
            }
        });
        let meta = impresario_server::start(&cluster.config, "meta").unwrap();
        let _io = cluster.start_io(|io| {
            if place == Place::IoNode {
                io.policy = policy.clone();
            }
        });
        Limited { place, cluster, meta: Some(meta), _io }
    }

    fn seen(&self) -> Seen<'_> {
        Seen { place: self.place, config: &self.cluster.config }
    }
}

/// The same, as any thread sees it.
#[derive(Clone, Copy)]
struct Seen<'a> {
    place: Place,
    config: &'a Config,
}

impl Seen<'_> {
    fn client(&self, job: u64) -> Arc<Client> {
        let via = if self.place == Place::Direct { Via::Direct } else { Via::IoNode(0) };
        Client::connect(self.config, ClientOptions { via, job, ..Default::default() }).unwrap()
    }

    /// A new file on the first data server, into which a first request was written: the next one of its client waits.
    fn file(&self, name: &str, client: &Arc<Client>) -> File {
        let layout = LayoutRequest { base: Some(0), pcount: Some(1), ssize_bytes: None };
        let file = client.create(name, CreateOptions { layout: Some(layout), ..Default::default() }).unwrap();
        assert_eq!(file.write_at(&pattern(1, BYTES), 0).unwrap(), BYTES);
        file
    }

    /// The requests that the limit withholds at present.
    fn waiting(&self) -> u64 {
        let mut peer = match self.place {
            Place::IoNode => Peer::connect(&self.config.io[0].address, Role::Io, 99),
            _ => Peer::connect(&self.config.data[0].address, Role::Data, 99),
        };
        let status = peer.status();
        let classes = status["limits"]["classes"].as_array().into_iter().flatten();
        classes.filter_map(|class| class["waiting"].as_u64()).sum()
    }
}

/// Everything that the limit withholds waits for it, and is done.
fn waits(place: Place) {
    let started = Limited::start(place, WITHHELD);
    let (limited, later) = (started.seen(), pattern(2, BYTES));
    let later = &later;
    let during = |name: &'static str, work: &dyn Fn(&File)| {
        let client = limited.client(7);
        let file = limited.file(name, &client);
        let began = Instant::now();
        work(&file);
        assert!(began.elapsed() > TIMEOUT, "{place:?}, {name}: it was withheld");
    };
    let during = &during;
    std::thread::scope(|scope| {
        scope.spawn(move || during("write", &|file| assert_eq!(file.write_at(later, 0).unwrap(), BYTES)));
        scope.spawn(move || {
            during("read", &|file| {
                let mut into = vec![0; BYTES];
                assert_eq!(file.read_at(&mut into, 0).unwrap(), BYTES);
                assert_eq!(into, pattern(1, BYTES));
            });
        });
        scope.spawn(move || {
            during("list", &|file| {
                let mut into = vec![0; 8192];
                assert_eq!(file.read_list(&[(0, 4096), (16384, 4096)], &mut into).unwrap(), [4096, 4096]);
                assert_eq!(into[4096..], pattern(1, BYTES)[16384..20480]);
            });
        });
        scope.spawn(move || {
            during("append", &|file| assert_eq!(file.append(later).unwrap(), Some((BYTES as u64, BYTES))));
        });
        scope.spawn(move || {
            // A sync is no request of the limit, but waits for a write that is.
            during("sync", &|file| {
                std::thread::scope(|scope| {
                    scope.spawn(|| file.write_at(later, 0).unwrap());
                    until("the write waits", || limited.waiting() > 0);
                    std::thread::sleep(TIMEOUT / 10);
                    file.sync().unwrap();
                });
            });
        });
        scope.spawn(move || {
            // Others notice nothing.
            let client = limited.client(8);
            let file = limited.file("free", &client);
            let began = Instant::now();
            assert_eq!(file.write_at(later, 0).unwrap(), BYTES);
            assert!(began.elapsed() < WITHHELD, "{place:?}: it is not limited");
        });
    });
}

#[test]
fn clients_wait_for_a_limit_of_data_servers() {
    waits(Place::Direct);
}

#[test]
fn clients_wait_for_a_limit_of_data_servers_behind_an_io_node() {
    waits(Place::Behind);
}

#[test]
fn clients_wait_for_a_limit_of_an_io_node() {
    waits(Place::IoNode);
}

/// A limit that would withhold a request for longer than any test takes.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// Waits until requests have been withheld for so long that they would have failed otherwise.
fn past_the_timeout(limited: Seen<'_>, requests: u64) {
    until("they wait", || limited.waiting() == requests);
    std::thread::sleep(TIMEOUT + TIMEOUT / 2);
    assert_eq!(limited.waiting(), requests, "{:?}: they wait still", limited.place);
}

#[test]
fn what_a_data_server_withheld_is_sent_again_when_it_was_started_again() {
    for place in [Place::Direct, Place::Behind] {
        let mut limited = Limited::start(place, FOR_EVER);
        let files = ["written", "read"].map(|name| limited.seen().file(name, &limited.seen().client(7)));
        let [written, read] = &files;
        let later = pattern(2, BYTES);
        std::thread::scope(|scope| {
            let write = scope.spawn(|| written.write_at(&later, 0));
            let read = scope.spawn(|| {
                let mut into = vec![0; BYTES];
                read.read_at(&mut into, 0).map(|_| into)
            });
            past_the_timeout(limited.seen(), 2);
            limited.cluster.stop_data(0);
            std::thread::sleep(TIMEOUT / 4);
            // Its limit has forgotten what was written before.
            limited.cluster.start_data(0);
            assert_eq!(write.join().unwrap().unwrap(), BYTES, "{place:?}");
            assert_eq!(read.join().unwrap().unwrap(), pattern(1, BYTES), "{place:?}");
        });
        let mut into = vec![0; BYTES];
        let seen = limited.seen().client(8).open("written", false).unwrap();
        assert_eq!(seen.read_at(&mut into, 0).unwrap(), BYTES);
        assert!(into == later, "{place:?}");
    }
}

#[test]
fn a_metadata_call_that_was_withheld_is_sent_again_when_its_server_was_started_again() {
    let mut limited = Limited::start(Place::Direct, FOR_EVER);
    limited.meta = None;
    let rules = "slow: job=7 & op=stat {requests_per_s=0.001, burst=1, each=client}";
    limited.cluster.config.meta.policy = Some(PolicySpec::named("tbf").with("rules", rules));
    limited.meta = Some(impresario_server::start(&limited.cluster.config, "meta").unwrap());
    let client = limited.seen().client(7);
    client.mkdir("folder", 0o755, 0, 0).unwrap();
    client.stat("folder").unwrap();
    std::thread::scope(|scope| {
        let stat = scope.spawn(|| client.stat("folder"));
        std::thread::sleep(2 * TIMEOUT);
        assert!(!stat.is_finished(), "it is withheld");
        drop(limited.meta.take());
        limited.meta = Some(impresario_server::start(&limited.cluster.config, "meta").unwrap());
        stat.join().unwrap().unwrap();
    });
}

#[test]
fn a_request_that_is_given_up_while_it_is_withheld_is_not_done() {
    for place in PLACES {
        let limited = Limited::start(place, FOR_EVER);
        let file = limited.seen().file("file", &limited.seen().client(7));
        let (watch, later) = (Arc::new(Watch::default()), pattern(2, BYTES));
        std::thread::scope(|scope| {
            let write = scope.spawn(|| watch.attend(|| file.write_at(&later, BYTES as u64)));
            let began = Instant::now();
            let read = scope.spawn(|| watch.attend(|| file.read_at(&mut [0; 4096], 0)));
            past_the_timeout(limited.seen(), 2);
            watch.give_up();
            let errors = [write.join().unwrap().unwrap_err(), read.join().unwrap().unwrap_err()];
            errors.iter().for_each(|error| assert_eq!(error.errno(), libc::EINTR, "{place:?}: {error}"));
            assert!(began.elapsed() < FOR_EVER / 2);
        });
        until("they are forgotten", || limited.seen().waiting() == 0);
        let mut into = vec![0; 2 * BYTES];
        let seen = limited.seen().client(8).open("file", false).unwrap();
        assert_eq!(seen.read_at(&mut into, 0).unwrap(), BYTES, "{place:?}: it was not written");
    }
}

#[test]
fn of_a_client_that_is_gone_nothing_is_withheld() {
    for place in PLACES {
        let limited = Limited::start(place, FOR_EVER);
        let layout = Layout::new(0, 1, 1 << 20, 2).unwrap();
        let (mut client, role) = match place {
            Place::Direct => (limited.cluster.peer(0, 7), Role::Data),
            _ => (Peer::connect(&limited.cluster.config.io[0].address, Role::Io, 7), Role::Io),
        };
        let who = impresario_wire::Who { job: 7, ..who(7) };
        // None touches another: an I/O node would make one of those that come at once.
        let write = |n: u64| match role {
            Role::Data => Call::Write { who, file: FileKey(1), lane_offset: 2 * n * BYTES as u64 },
            _ => Call::FileWrite { who, file: FileKey(1), layout, offset: 2 * n * BYTES as u64 },
        };
        let answer = client.call(&write(0), &pattern(1, BYTES)).0;
        assert!(matches!(answer, Answer::Written(_) | Answer::FileWritten { .. }), "{answer:?}");
        for n in 1..5 {
            client.send(&write(n), &pattern(1, BYTES));
        }
        until("they wait", || limited.seen().waiting() == 4);
        drop(client);
        until("they are forgotten", || limited.seen().waiting() == 0);
    }
}

/// However many clients a limit withholds: those that it does not get memory.
#[test]
fn what_is_withheld_leaves_memory_to_others() {
    const WHOLE: usize = 1 << 20;
    let mut cluster = Cluster::start(1, |config| {
        config.cluster.request_timeout_ms = TIMEOUT.as_millis() as u64;
        config.cluster.max_payload_bytes = WHOLE as u32;
        config.data[0].payload_bytes = 16 << 20;
        config.data[0].policy = limit(FOR_EVER);
    });
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let _io = cluster.start_io(|_| {});
    let seen = Seen { place: Place::Direct, config: &cluster.config };
    let files: Vec<File> = (0..6).map(|n| seen.file(&format!("limited{n}"), &seen.client(7))).collect();
    let (watch, bytes) = (Arc::new(Watch::default()), pattern(2, WHOLE));
    std::thread::scope(|scope| {
        let write = |n: usize| {
            let (watch, bytes, file) = (&watch, &bytes, &files[n % files.len()]);
            scope.spawn(move || watch.attend(|| file.write_at(bytes, 0)))
        };
        let mut writes: Vec<_> = (0..files.len()).map(write).collect();
        until("one of each waits", || seen.waiting() == files.len() as u64);
        // Until the server has seen it, too.
        std::thread::sleep(TIMEOUT / 4);
        writes.extend((0..4 * files.len()).map(write));
        std::thread::sleep(TIMEOUT / 2);
        let free = |via: Via| {
            let name = format!("{via:?}");
            let client = Client::connect(&cluster.config, ClientOptions { via, job: 8, ..Default::default() })?;
            let free = client.create(name, CreateOptions::default())?;
            (0..4).try_for_each(|n| free.write_at(&bytes, n * WHOLE as u64).map(drop))
        };
        let outcomes = [Via::Direct, Via::IoNode(0)].map(free);
        std::thread::sleep(TIMEOUT);
        let all_wait = writes.iter().all(|write| !write.is_finished());
        // Before anything is asserted: they would wait for an hour.
        watch.give_up();
        for write in writes {
            // What has begun to leave cannot be given up, and fails in time.
            let errno = write.join().unwrap().unwrap_err().errno();
            assert!([libc::EINTR, libc::EIO].contains(&errno), "{errno}");
        }
        assert!(all_wait && outcomes.iter().all(Result::is_ok), "{outcomes:?}, the others wait: {all_wait}");
    });
}

/// It says that it withholds a request, and then nothing any more.
#[test]
fn a_server_that_hangs_is_not_waited_for_though_it_has_withheld_a_request() {
    let limited = Limited::start(Place::Direct, FOR_EVER);
    let link = Link::to(limited.cluster.address(0)).unwrap();
    let mut seen = limited.cluster.config.clone();
    seen.data[0].address = link.address().into();
    let client = Client::connect(&seen, ClientOptions { via: Via::Direct, job: 7, ..Default::default() }).unwrap();
    let file = limited.seen().file("file", &client);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write_at(&pattern(2, BYTES), 0));
        past_the_timeout(limited.seen(), 1);
        link.hold();
        let began = Instant::now();
        let error = write.join().unwrap().unwrap_err();
        assert_eq!(error.errno(), libc::EIO, "{error}");
        assert!(began.elapsed() < 10 * TIMEOUT, "{:?}", began.elapsed());
        link.heal();
    });
}

/// More than a server takes of one connection waits in the client, and is sent when there is room.
#[test]
fn more_than_a_server_takes_waits_for_the_limit_too() {
    const WHOLE: usize = 24 << 20;
    let cluster = Cluster::start(1, |config| {
        config.cluster.request_timeout_ms = TIMEOUT.as_millis() as u64;
        config.cluster.max_payload_bytes = 1 << 20;
        config.data[0].payload_bytes = 8 << 20;
        config.data[0].policy = PolicySpec::named("tbf").with("rules", "slow: job=7 {bytes_per_s=2.5e6, burst=1}");
    });
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let options = ClientOptions { via: Via::Direct, job: 7, ..Default::default() };
    let client = Client::connect(&cluster.config, options).unwrap();
    let file = client.create("file", CreateOptions::default()).unwrap();
    let bytes = pattern(3, WHOLE);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| file.write_at(&bytes, 0));
        std::thread::sleep(TIMEOUT / 4);
        // It waits in the client behind the frames of the write, which the server does not take.
        let small = scope.spawn(|| file.read_at(&mut [0; 10], 0));
        assert_eq!(write.join().unwrap().unwrap(), WHOLE);
        small.join().unwrap().unwrap();
    });
    let free =
        Client::connect(&cluster.config, ClientOptions { via: Via::Direct, job: 8, ..Default::default() }).unwrap();
    let mut into = vec![0; WHOLE];
    assert_eq!(free.open("file", false).unwrap().read_at(&mut into, 0).unwrap(), WHOLE);
    assert!(into == bytes);
}
