//! Operations per second of the metadata server in-process, without network and data servers. A measurement, not a
//! check: `cargo test --release --test server -- --ignored --nocapture meta_rates::`. `IMPRESARIO_RATES_DIR` sets the directory
//! (default: the directory for temporary files).

use std::time::Instant;

use crate::meta_support::*;
use impresario_wire::message::*;

use crate::support;

const FILES: usize = 20_000;

fn rate(what: &str, threads: usize, count: usize, act: impl Fn(&Server, usize, usize) + Sync, s: &Server) {
    let began = Instant::now();
    std::thread::scope(|scope| {
        for t in 0..threads {
            let (client, act) = (s.again(), &act);
            scope.spawn(move || {
                for i in 0..count / threads {
                    act(&client, t, i);
                }
            });
        }
    });
    println!("{what:<40} {threads} threads {:>10.0}/s", count as f64 / began.elapsed().as_secs_f64());
}

#[test]
#[ignore = "a measurement"]
fn operations_a_second() {
    let base = std::env::var_os("IMPRESARIO_RATES_DIR").map_or_else(std::env::temp_dir, Into::into);
    println!("in {}", base.display());
    for threads in [1, 2] {
        let dir = tempfile::tempdir_in(&base).unwrap();
        let s = start(dir.path());
        s.mkdir("d");
        for t in 0..threads {
            s.mkdir(&format!("d/{t}"));
        }
        let name = |t: usize, i: usize| format!("d/{t}/file.{i:06}");
        rate("create", threads, FILES, |s, t, i| s.close(s.create(&name(t, i))), &s);
        rate("stat", threads, FILES * 5, |s, t, i| assert_eq!(s.stat(&name(t, i % (FILES / 2))).size, 0), &s);
        rate("open and close for reading", threads, FILES, |s, t, i| s.close(s.open(&name(t, i), false)), &s);
        rate("open and close for writing", threads, 2000, |s, t, i| s.close(s.open(&name(t, i), true)), &s);
        rate(
            "chmod",
            threads,
            FILES,
            |s, t, i| {
                assert_eq!(s.set(at(&name(t, i)), SetAttr { mode: Some(0o600), ..SetAttr::default() }).mode, 0o600)
            },
            &s,
        );
        rate("rename", threads, FILES, |s, t, i| s.done(rename(&name(t, i), &format!("d/{t}/moved.{i:06}"))), &s);
        let began = Instant::now();
        let mut listed = 0;
        for t in 0..threads {
            let mut after = Vec::new();
            loop {
                let call = MetaCall::Readdir { path: path(&format!("d/{t}")), after: after.clone(), max: 1000 };
                let Answer::Entries(entries) = s.call(call) else { panic!() };
                let Some(last) = entries.last() else { break };
                after = last.name.clone();
                listed += entries.len();
            }
        }
        assert_eq!(listed, FILES);
        println!("{:<40} 1 thread  {:>10.0}/s", "readdir, entries", listed as f64 / began.elapsed().as_secs_f64());
        let began = Instant::now();
        rate("unlink", threads, FILES, |s, t, i| s.done(unlink(&format!("d/{t}/moved.{i:06}"))), &s);
        s.quiet();
        println!(
            "{:<40} {:>19.0}/s",
            "unlink until the objects are gone",
            FILES as f64 / began.elapsed().as_secs_f64()
        );
        rate("mkdir", threads, FILES, |s, t, i| s.mkdir(&format!("d/{t}/dir.{i:06}")), &s);
        rate(
            "create, write, fsync, close",
            threads,
            1000,
            |s, t, i| {
                let opened = s.create(&format!("d/{t}/synced.{i}"));
                s.write(&opened, 0, 1);
                s.done(MetaCall::Fsync { handle: opened.handle });
                s.close(opened);
            },
            &s,
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn a_directory_of_100_000_names() {
    const NAMES: usize = 100_000;
    let base = std::env::var_os("IMPRESARIO_RATES_DIR").map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(&base).unwrap();
    let s = start(dir.path());
    for i in 0..NAMES {
        s.close(s.create(&format!("a.long.enough.name.{i:07}")));
    }
    for max in [100, 1000, u32::MAX] {
        let (began, mut after, mut listed, mut slices) = (Instant::now(), Vec::new(), 0, 0);
        loop {
            let call = MetaCall::Readdir { path: vec![], after: after.clone(), max };
            let Answer::Entries(entries) = s.call(call) else { panic!() };
            let Some(last) = entries.last() else { break };
            after = last.name.clone();
            (listed, slices) = (listed + entries.len(), slices + 1);
        }
        assert_eq!(listed, NAMES);
        println!("{listed} names in {slices} slices: {:.3} s", began.elapsed().as_secs_f64());
    }
}

/// Creates and stats a second of the threads of one client through an I/O node, over loopback; rounds alternate.
#[test]
#[ignore = "a measurement"]
fn through_an_io_node() {
    use impresario_client::{Client, ClientOptions, CreateOptions, Via};
    let mut cluster = support::Cluster::start(1, |_| {});
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let _io = cluster.start_io(|_| {});
    let client = Client::connect(&cluster.config, ClientOptions { via: Via::IoNode(0), ..Default::default() }).unwrap();
    let measure = |threads: usize, count: usize, act: &(dyn Fn(usize) + Sync)| {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for t in 0..threads {
                scope.spawn(move || (0..count / threads).for_each(|i| act(t * count + i)));
            }
        });
        count as f64 / began.elapsed().as_secs_f64()
    };
    for round in 0..5 {
        for threads in [1, 16] {
            let name = |i: usize| format!("f.{round}.{threads}.{i}");
            let create = |i: usize| client.create(name(i), CreateOptions::default()).unwrap().close().unwrap();
            let creates = measure(threads, 4_000, &create);
            let stats = measure(threads, 16_000, &|_| assert_eq!(client.stat(name(0)).unwrap().size, 0));
            println!("{threads:>2} threads: {creates:>7.0} creates and closes/s, {stats:>7.0} stats/s");
        }
    }
}
