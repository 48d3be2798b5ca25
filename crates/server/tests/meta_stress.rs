//! Many clients at once on few names, with data servers going away and coming back: nothing hangs, no answer is
//! impossible, and nothing is left over at the end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::meta_support;
use crate::meta_support::*;
use impresario_base::Random;
use impresario_server::meta::MetaOptions;
use impresario_wire::message::*;

const THREADS: u64 = 8;

/// A small generator, so that a seed tells a run.
struct Draw(Random);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    fn name(&mut self) -> String {
        let directory = ["", "d/", "e/"][self.below(3) as usize];
        format!("{directory}{}", ["a", "b", "c"][self.below(3) as usize])
    }
}

/// A client's operations; its faults must be ones that other clients' operations explain.
fn client(mut s: Server, seed: u64, until: Instant) -> u64 {
    let mut draw = Draw(Random::new(seed));
    let (mut held, mut written): (Vec<Opened>, std::collections::HashSet<u64>) = Default::default();
    let mut done = 0;
    while Instant::now() < until {
        let (name, other) = (draw.name(), draw.name());
        let call = match draw.below(16) {
            0 | 1 => MetaCall::Create {
                path: path(&name),
                mode: 0o644,
                uid: 0,
                gid: 0,
                exclusive: draw.below(2) == 0,
                layout: None,
            },
            2 | 3 => MetaCall::Open { path: path(&name), write: draw.below(2) == 0 },
            4 => unlink(&name),
            5 => rename(&name, &other),
            6 => MetaCall::SetAttr { target: at(&name), set: size(draw.below(100_000)) },
            7 => MetaCall::Readdir { path: path(["", "d", "e"][draw.below(3) as usize]), after: vec![], max: 100 },
            8 => MetaCall::GetAttr { target: at(&name) },
            9 => match held.last() {
                Some(opened) => MetaCall::GetAttr { target: Target::Handle(opened.handle) },
                None => continue,
            },
            10 => match held.last() {
                Some(opened) if draw.below(4) == 0 => MetaCall::Fsync { handle: opened.handle },
                _ => continue,
            },
            11 => match held.last() {
                Some(opened) => {
                    MetaCall::SetAttr { target: Target::Handle(opened.handle), set: mtime(draw.below(1000) as i64) }
                }
                None => continue,
            },
            12 | 13 => link(&name, &other),
            14 if draw.below(20) == 0 => {
                s.hang_up();
                s = s.again();
                held.clear();
                continue;
            }
            _ => match held.is_empty() {
                true => continue,
                false => {
                    let handle = held.swap_remove(draw.below(held.len() as u64) as usize).handle;
                    MetaCall::Close { handle, wrote: written.contains(&handle) }
                }
            },
        };
        match s.call(call.clone()) {
            Answer::Opened(opened) => {
                if !matches!(call, MetaCall::Open { write: false, .. }) && draw.below(3) > 0 {
                    written.insert(opened.handle);
                    s.write(&opened, draw.below(50_000), draw.below(50_000));
                }
                held.push(opened);
            }
            // There are nine names.
            Answer::Attr(attr) => assert!(attr.nlink <= 9 || attr.kind != NodeKind::File, "{call:?}: {attr:?}"),
            Answer::Entries(entries) => assert!(entries.iter().all(|entry| entry.attr.nlink <= 9), "{entries:?}"),
            Answer::Removed { links } => assert!(links < 9, "{call:?}: {links}"),
            // ENOENT, data servers away, EEXIST.
            Answer::Fault(fault) => assert!([2, 5, 17].contains(&fault.errno), "{call:?}: {fault}"),
            _ => {}
        }
        if held.len() > 20 {
            s.close(held.swap_remove(0));
        }
        done += 1;
    }
    s.hang_up();
    done
}

fn storm(seconds: u64, flapping: bool, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let options = MetaOptions { grace: Duration::from_millis(1), ..options(dir.path()) };
    let s = start_with(options, Arc::default());
    s.mkdir("d");
    s.mkdir("e");
    let until = Instant::now() + Duration::from_secs(seconds);
    let over = AtomicBool::new(false);
    let done: u64 = std::thread::scope(|scope| {
        let flaps = scope.spawn(|| {
            let mut draw = Draw(Random::new(seed));
            while flapping && !over.load(Ordering::Relaxed) {
                s.objects.set_away(draw.below(4) == 0);
                s.objects.set_delay(Duration::from_micros(draw.below(300)));
                std::thread::sleep(Duration::from_millis(draw.below(30)));
            }
            s.objects.set_away(false);
        });
        let clients: Vec<_> = (0..THREADS)
            .map(|i| {
                let client_of = s.again();
                scope.spawn(move || client(client_of, seed * 100 + i, until))
            })
            .collect();
        let done = clients.into_iter().map(|client| client.join().unwrap()).sum();
        over.store(true, Ordering::Relaxed);
        flaps.join().unwrap();
        done
    });
    println!("{done} calls in {seconds} s");
    s.quiet();
    for key in ["open_files", "opens_read", "opens_write"] {
        assert_eq!(s.service.status()[key], 0, "{key}");
    }
    let seen = s.tree();
    check_directory(dir.path(), &s.objects);
    let objects = s.objects.clone();
    drop(s);
    let s = start_with(meta_support::options(dir.path()), objects);
    s.idle();
    assert_eq!(s.tree(), seen, "a restart changes nothing");
    assert!(done > 100, "{done} calls only");
}

#[test]
fn a_storm_leaves_nothing_over() {
    storm(3, false, 1);
}

#[test]
fn a_storm_with_data_servers_coming_and_going_leaves_nothing_over() {
    storm(3, true, 2);
}

/// The names of a directory, in pages, each once.
fn listed(s: &Server, dir: &str) -> BTreeSet<Vec<u8>> {
    let (mut names, mut after) = (BTreeSet::new(), Vec::new());
    loop {
        let page = match s.call(MetaCall::Readdir { path: path(dir), after, max: 1000 }) {
            Answer::Entries(page) => page,
            other => panic!("{other:?}"),
        };
        let Some(last) = page.last() else { return names };
        after = last.name.clone();
        for entry in page {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            assert!(names.insert(entry.name), "{name} is listed twice");
        }
    }
}

/// Clients fill a directory and half empty it again, while others list it.
fn large_directory(names_of_each: u64) {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let began = Instant::now();
    let all_do = |act: &(dyn Fn(&Server, String, u64) + Sync)| {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lister = s.again();
            let listing = scope.spawn(|| {
                let lister = lister;
                let mut before = listed(&lister, "d");
                while !is_over.load(Ordering::Relaxed) {
                    let now = listed(&lister, "d");
                    // Names are only made, or only removed, meanwhile.
                    assert!(now.is_superset(&before) || now.is_subset(&before));
                    before = now;
                }
                lister.hang_up();
            });
            let clients: Vec<_> = (0..THREADS)
                .map(|client| {
                    let of = s.again();
                    scope.spawn(move || {
                        (0..names_of_each).for_each(|number| act(&of, format!("d/{client}.{number}"), number));
                        of.hang_up();
                    })
                })
                .collect();
            clients.into_iter().for_each(|client| client.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
            listing.join().unwrap();
        });
    };
    all_do(&|s, name, _| s.close(s.create(&name)));
    println!("{} names made in {:?}", THREADS * names_of_each, began.elapsed());
    assert_eq!(listed(&s, "d").len() as u64, THREADS * names_of_each);
    all_do(&|s, name, number| {
        if number % 2 == 0 {
            s.done(unlink(&name));
        }
    });
    let left = listed(&s, "d");
    let expected = (0..THREADS).flat_map(|client| {
        (0..names_of_each).filter(|number| number % 2 == 1).map(move |number| path(&format!("{client}.{number}")))
    });
    assert!(left == expected.collect());
    println!("half of them removed in {:?}", began.elapsed());
}

#[test]
fn a_directory_is_filled_by_many_clients_and_listed_meanwhile() {
    large_directory(1_000);
}

#[test]
#[ignore = "takes a minute: make soak"]
fn a_directory_of_100000_names_is_filled_by_8_clients_and_listed_meanwhile() {
    large_directory(12_500);
}
