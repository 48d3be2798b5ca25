//! Links between clients and servers, and among servers, that delay, break, and deliver what their sender has given up: all is
//! done, once, and nothing else.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Cluster, Process, Rounds, Worker, client, new_file, pattern, read_file, write_file};
use impresario_base::Random;
use impresario_client::{Client, CreateOptions};
use impresario_config::Config;
use impresario_testing::link::Link;
use impresario_testing::until;

const BLOCK: usize = 24 * 1024;
const BLOCKS: u64 = 40;
const RECORD: usize = 512;
/// Names of a client at a time.
const NAMES_MAX: usize = 8;

/// A cluster in which every way from one process to another is a link of its own.
struct Bed {
    cluster: Cluster,
    links: Vec<(String, Link)>,
    servers: Vec<(String, Process)>,
    /// As clients see it.
    config: Config,
}

impl Bed {
    fn start(data: usize, io: usize) -> Bed {
        let cluster = Cluster::describe(data, io, |_| {});
        impresario_server::folders::make_all(&cluster.config).unwrap();
        let mut bed = Bed { config: cluster.config.clone(), cluster, links: Vec::new(), servers: Vec::new() };
        for name in bed.names() {
            let path = bed.seen_from(&name);
            let log = bed.cluster.dir.path().join(format!("{name}.log"));
            let words = ["serve".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()];
            let process = Process::start(words, &log);
            bed.servers.push((name, process));
        }
        bed.config = Config::load(&bed.seen_from("client")).unwrap();
        for name in bed.names() {
            let address = bed.cluster.config.server(&name).unwrap().address().to_string();
            let access = bed.cluster.access();
            until(format!("{name} answers"), || {
                impresario_client::admin::status(&access, &address, Duration::from_secs(2)).is_ok()
            });
        }
        bed
    }

    fn names(&self) -> Vec<String> {
        self.cluster.config.servers().map(|server| server.name().to_string()).collect()
    }

    /// A configuration in which each server but the one that sees it is behind a link.
    fn seen_from(&mut self, who: &str) -> PathBuf {
        let mut config = self.cluster.config.clone();
        let addresses = std::iter::once((impresario_config::META_NAME.to_string(), &mut config.meta.address))
            .chain(config.data.iter_mut().map(|data| (data.name.clone(), &mut data.address)))
            .chain(config.io.iter_mut().map(|io| (io.name.clone(), &mut io.address)));
        for (name, address) in addresses.filter(|(name, _)| name != who) {
            let link = Link::to(address).unwrap();
            *address = link.address().into();
            self.links.push((format!("{who} to {name}"), link));
        }
        let path = self.cluster.dir.path().join(format!("seen.{who}.toml"));
        std::fs::write(&path, config.to_toml()).unwrap();
        path
    }

    /// Troubles links for a time, several at once.
    fn trouble(&self, time: Duration, random: &mut Random) -> usize {
        let (end, mut troubles) = (Instant::now() + time, 0);
        while Instant::now() < end {
            let mut hit = Vec::new();
            for _ in 0..=random.below(3) {
                let (name, link) = &self.links[random.below(self.links.len() as u64) as usize];
                match random.below(3) {
                    0 => link.hold(),
                    1 => link.cut(),
                    _ => {
                        // What comes in this moment is under way when its connection is lost.
                        link.hold();
                        std::thread::sleep(Duration::from_millis(random.below(20)));
                        link.lose();
                        link.go_on();
                    }
                }
                hit.push((name, link));
                troubles += 1;
            }
            std::thread::sleep(Duration::from_millis(random.below(600)));
            hit.iter().for_each(|(_, link)| link.heal());
            std::thread::sleep(Duration::from_millis(random.below(200)));
        }
        self.links.iter().for_each(|(_, link)| link.heal());
        troubles
    }

    fn late_bytes(&self) -> usize {
        self.links.iter().map(|(_, link)| link.late_bytes()).sum()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.servers.iter().for_each(|(name, process)| println!("{name} wrote:\n{}", process.log()));
        }
    }
}

/// Overwrites blocks of a file; the last generation of each.
fn write_blocks(client: &Arc<Client>, w: u64, rounds: &Rounds) -> Vec<u64> {
    let file = client.create(format!("blocks.{w}"), new_file(0o644)).unwrap();
    let (mut generations, mut random) = (vec![0; BLOCKS as usize], Random::new(w));
    while let Some(round) = rounds.next() {
        let block = random.below(BLOCKS);
        let (generation, offset) = (generations[block as usize] + 1, block * BLOCK as u64);
        let bytes = pattern(w, generation, offset, BLOCK);
        assert_eq!(file.write_at(&bytes, offset).unwrap_or_else(|e| panic!("writer {w}: {e}")), BLOCK);
        generations[block as usize] = generation;
        let looked = random.below(BLOCKS);
        if generations[looked as usize] > 0 {
            let (mut back, offset) = (vec![0; BLOCK], looked * BLOCK as u64);
            let got = file.read_at(&mut back, offset).unwrap_or_else(|e| panic!("reader {w}: {e}"));
            let wanted = pattern(w, generations[looked as usize], offset, BLOCK);
            assert!(got == BLOCK && back == wanted, "block {looked} of {w} is not what was written last");
        }
        if round % 40 == 39 {
            file.sync().unwrap_or_else(|e| panic!("writer {w}, fsync: {e}"));
        }
    }
    file.close().unwrap();
    generations
}

/// Makes, links, renames and removes names in a directory of its own. Each change is done once: done twice it would fail. The
/// names that are left, and their contents.
fn change_names(client: &Arc<Client>, w: u64, rounds: &Rounds) -> BTreeMap<String, u64> {
    let dir = format!("names.{w}");
    client.mkdir(&dir, 0o755, 0, 0).unwrap();
    let (mut names, mut random): (BTreeMap<String, u64>, _) = (BTreeMap::new(), Random::new(w));
    while let Some(round) = rounds.next() {
        let at = |kind: &str| format!("{dir}/{kind}{round}");
        write_file(client, &at("a"), &pattern(w, round, 0, 3000));
        client.link(at("a"), at("b")).unwrap_or_else(|e| panic!("link {round} of {w}: {e}"));
        client.rename(at("a"), at("c"), true).unwrap_or_else(|e| panic!("rename {round} of {w}: {e}"));
        client.unlink(at("b")).unwrap_or_else(|e| panic!("unlink {round} of {w}: {e}"));
        names.insert(format!("c{round}"), round);
        if names.len() > NAMES_MAX {
            let oldest = names.keys().nth(random.below(names.len() as u64) as usize).unwrap().clone();
            client.unlink(format!("{dir}/{oldest}")).unwrap_or_else(|e| panic!("unlink {oldest} of {w}: {e}"));
            names.remove(&oldest);
        }
        check_names(client, w, &names);
    }
    names
}

fn check_names(client: &Arc<Client>, w: u64, names: &BTreeMap<String, u64>) {
    let listed = client.list(format!("names.{w}")).unwrap().into_iter();
    let mut listed: Vec<String> = listed.map(|entry| String::from_utf8(entry.name).unwrap()).collect();
    listed.sort();
    assert_eq!(listed, names.keys().cloned().collect::<Vec<_>>(), "of {w}");
}

/// Appends records to a file of all; how many.
fn append(client: &Arc<Client>, w: u64, rounds: &Rounds) -> u64 {
    let file = client.create("appended", CreateOptions { exclusive: false, ..new_file(0o644) }).unwrap();
    let mut count = 0;
    while rounds.next().is_some() {
        let (_, len) = file.append(&record(w, count)).unwrap_or_else(|e| panic!("append {count} of {w}: {e}")).unwrap();
        assert_eq!(len, RECORD);
        count += 1;
    }
    file.close().unwrap();
    count
}

fn record(w: u64, number: u64) -> Vec<u8> {
    [&w.to_le_bytes()[..], &number.to_le_bytes(), &pattern(w, number, 0, RECORD - 16)].concat()
}

/// Workers, each with a client of its own.
fn begin<T: Send + 'static>(
    bed: &Bed,
    who: Range<u64>,
    work: fn(&Arc<Client>, u64, &Rounds) -> T,
) -> Vec<(u64, Worker<T>)> {
    let start = |w| {
        let config = bed.config.clone();
        (w, Worker::start(move |rounds| work(&client(&config, w), w, rounds)))
    };
    who.map(start).collect()
}

/// Whatever happens to links, no call fails as long as it is over before calls time out, and nothing is lost or done twice.
/// `IMPRESARIO_LINKS_S` seconds, 8 unless it is set; `IMPRESARIO_LINKS_SEED` repeats the choices.
fn all_is_done_once(data: usize, io: usize) {
    let of = |key| std::env::var(key).ok().and_then(|text| text.parse().ok());
    let seconds = of("IMPRESARIO_LINKS_S").unwrap_or(8);
    let seed = of("IMPRESARIO_LINKS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    println!("IMPRESARIO_LINKS_SEED={seed}");
    let bed = Bed::start(data, io);
    let blocks = begin(&bed, 0..3, write_blocks);
    let names = begin(&bed, 10..12, change_names);
    let appends = begin(&bed, 20..22, append);
    blocks.iter().for_each(|(_, worker)| worker.goes_on(10));
    names.iter().for_each(|(_, worker)| worker.goes_on(3));
    let mut random = Random::new(seed);
    let mut troubles = bed.trouble(Duration::from_secs(seconds), &mut random);
    // By chance nothing was under way where a link held something back.
    for _ in 0..5 {
        if bed.late_bytes() == 0 {
            troubles += bed.trouble(Duration::from_secs(seconds.min(8)), &mut random);
        }
    }
    blocks.iter().for_each(|(_, worker)| worker.goes_on(1));
    let reader = client(&bed.cluster.config, 99);
    for (w, worker) in blocks {
        let generations = worker.stop();
        let data = read_file(&reader, &format!("blocks.{w}"));
        for (block, generation) in generations.into_iter().enumerate().filter(|(_, generation)| *generation > 0) {
            let offset = block * BLOCK;
            let wanted = pattern(w, generation, offset as u64, BLOCK);
            assert!(data[offset..offset + BLOCK] == wanted, "block {block} of {w} is not generation {generation}");
        }
    }
    let mut changes = 0;
    for (w, worker) in names {
        let names = worker.stop();
        check_names(&reader, w, &names);
        for (name, round) in names {
            assert!(read_file(&reader, &format!("names.{w}/{name}")) == pattern(w, round, 0, 3000), "{name} of {w}");
            changes = changes.max(round);
        }
    }
    let counts: Vec<(u64, u64)> = appends.into_iter().map(|(w, worker)| (w, worker.stop())).collect();
    let appended = read_file(&reader, "appended");
    let mut found: Vec<&[u8]> = appended.chunks(RECORD).collect();
    let mut wanted: Vec<Vec<u8>> =
        counts.iter().flat_map(|(w, count)| (0..*count).map(|number| record(*w, number))).collect();
    found.sort_unstable();
    wanted.sort_unstable();
    assert!(found == wanted, "{} records, {} were appended", found.len(), wanted.len());
    println!(
        "{troubles} troubles, {} bytes came late, {changes} rounds of names, appends {counts:?}",
        bed.late_bytes()
    );
    assert!(troubles > 0 && bed.late_bytes() > 0);
}

#[test]
fn all_is_done_once_over_links_that_fail() {
    all_is_done_once(3, 0);
}

#[test]
fn all_is_done_once_over_links_that_fail_behind_io_nodes() {
    all_is_done_once(2, 2);
}
