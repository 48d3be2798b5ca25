//! A plan: what the threads of several clients do to a few files, and what goes wrong meanwhile. All of it follows from a seed, and
//! a part of a plan is a plan, so that one that fails can be made smaller.

use std::fmt;

use impresario_base::Random;
use impresario_testing::plans::{self, Links, Parts, Step, Thread};

/// Names of files.
pub(super) const NAMES: [&str; 3] = ["a", "b", "c"];
/// Open files of a thread.
pub(super) const SLOTS: usize = 2;
/// Strips of a file that plans use, on the data servers in turn.
pub(super) const STRIPS: usize = 6;
/// What a device writes as a whole or not: tears within a strip are the store's affair, not the cluster's.
pub(super) const STRIP_BYTES: u64 = 512;
pub(super) const DATA_SERVERS: usize = 2;
/// The number of the metadata server among all servers.
pub(super) const META: usize = DATA_SERVERS;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Op {
    /// Opens a file for reading and writing, and with `create` makes it where there is none.
    Open {
        slot: usize,
        path: &'static str,
        create: bool,
    },
    Close {
        slot: usize,
    },
    Write {
        slot: usize,
        first: usize,
        count: usize,
    },
    /// The metadata server says where.
    Append {
        slot: usize,
    },
    /// Cuts the file, or extends it, to so many strips.
    Cut {
        slot: usize,
        strips: usize,
    },
    Sync {
        slot: usize,
    },
    Read {
        slot: usize,
    },
    Unlink {
        path: &'static str,
    },
    Rename {
        from: &'static str,
        to: &'static str,
    },
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// A server's process is killed and started again: between two calls, or after so many changes of its disk. Memory is lost,
    /// the disk is not.
    Kill { server: usize, after: Option<u32>, down_us: u64 },
    /// A data server's machine loses its power; what is not durable survives or not by a draw from the seed.
    PowerFails { server: usize, seed: u64, down_us: u64 },
    /// A data server's system writes some of what is dirty by itself, or fails to.
    WriteBack { server: usize, seed: u64, fails: bool },
    /// One change of a server's disk fails.
    Fail { server: usize, after: u32, errno: i32 },
    /// A client's connection to its I/O node breaks.
    Cut { client: usize },
    /// Nothing passes between a client and one of its I/O nodes; what is on its way comes later.
    Partition { client: usize, way: usize, for_us: u64 },
    /// The metadata server does not reach a data server, and what it sends meanwhile comes later.
    Apart { server: usize, for_us: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    pub(super) at_us: u64,
    pub(super) what: What,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) checksums: bool,
    pub(super) clients: usize,
    /// I/O nodes through which a client reaches the servers.
    pub(super) ways: usize,
    pub(super) links: Links,
    pub(super) threads: Vec<Thread<Op>>,
    pub(super) faults: Vec<Fault>,
}

fn one_of<T: Copy>(draws: &mut Random, of: &[T]) -> T {
    of[draws.below(of.len() as u64) as usize]
}

impl Op {
    fn draw(draws: &mut Random) -> Op {
        let slot = draws.below(SLOTS as u64) as usize;
        let path = one_of(draws, &NAMES);
        let first = draws.below(STRIPS as u64) as usize;
        match draws.below(100) {
            0..22 => Op::Open { slot, path, create: draws.below(3) > 0 },
            22..26 => Op::Close { slot },
            26..48 => Op::Write { slot, first, count: 1 + draws.below((STRIPS - first).min(3) as u64) as usize },
            48..54 => Op::Append { slot },
            54..59 => Op::Cut { slot, strips: first },
            59..73 => Op::Sync { slot },
            73..84 => Op::Read { slot },
            84..92 => Op::Unlink { path },
            _ => Op::Rename { from: path, to: NAMES[(first + 1) % NAMES.len()] },
        }
    }
}

impl What {
    fn draw(draws: &mut Random, clients: usize, ways: usize) -> What {
        let data = draws.below(DATA_SERVERS as u64) as usize;
        let any = draws.below(DATA_SERVERS as u64 + 1) as usize;
        let client = draws.below(clients as u64) as usize;
        match draws.below(20) {
            0..4 => What::Kill { server: any, after: Some(draws.below(12) as u32), down_us: draws.below(100_000) },
            4..6 => What::Kill { server: any, after: None, down_us: draws.below(3_000_000) },
            6..9 => What::PowerFails { server: data, seed: draws.next_u64(), down_us: draws.below(1_000_000) },
            9..12 => What::WriteBack { server: data, seed: draws.next_u64(), fails: draws.below(2) == 0 },
            12 => {
                let errno = one_of(draws, &[libc::EIO, libc::ENOSPC]);
                What::Fail { server: any, after: draws.below(10) as u32, errno }
            }
            13..16 => What::Cut { client },
            16..18 => {
                What::Partition { client, way: draws.below(ways as u64) as usize, for_us: draws.below(12_000_000) }
            }
            _ => What::Apart { server: data, for_us: draws.below(3_000_000) },
        }
    }
}

impl Plan {
    pub(super) fn of_seed(seed: u64) -> Plan {
        // What happens between a request and its copy needs clients that have to do with one another.
        if seed % 4 == 3 {
            return Plan::of_one_strip(seed);
        }
        let mut draws = Random::new(seed ^ 0x77_686f_6c65);
        let (clients, ways) = (2 + draws.below(2) as usize, 1 + draws.below(2) as usize);
        let links = Links::draw(&mut draws);
        let mean_us = [300.0, 20_000.0, 1_000_000.0][draws.below(3) as usize];
        let threads: Vec<Thread<Op>> = (0..2 + draws.below(3))
            .map(|thread| {
                let count = 6 + draws.below(18);
                let step = |index: u64| {
                    let pause_us = draws.exponential(mean_us) as u64;
                    // Whoever has nothing open can do little.
                    let op = match index {
                        0 => Op::Open { slot: 0, path: NAMES[(draws.below(4) / 2) as usize], create: true },
                        _ => Op::draw(&mut draws),
                    };
                    Step { id: 100 * thread + index, pause_us, op }
                };
                Thread { client: thread as usize % clients, steps: (0..count).map(step).collect() }
            })
            .collect();
        let span_us = (mean_us * 16.0) as u64 + 2000;
        let fault = |_| Fault { at_us: draws.below(span_us), what: What::draw(&mut draws, clients, ways) };
        let faults = (0..2 + seed % 6).map(fault).collect();
        Plan { checksums: seed.is_multiple_of(3), clients, ways, links, threads, faults }
    }

    /// Clients that read and write one strip of one file all the time, over connections that break.
    fn of_one_strip(seed: u64) -> Plan {
        let mut draws = Random::new(seed ^ 0x6f_6e65);
        let clients = 2 + draws.below(2) as usize;
        let links = Links { slow_of: 3 + draws.below(6), late_of: 0, doubled_of: 0, seed: draws.next_u64() };
        let threads = (0..clients).map(|client| {
            let step = |index: u64| {
                let op = match index {
                    0 => Op::Open { slot: 0, path: NAMES[0], create: true },
                    _ if draws.below(2) == 0 => Op::Read { slot: 0 },
                    _ => Op::Write { slot: 0, first: 0, count: 1 },
                };
                Step { id: 100 * client as u64 + index, pause_us: draws.below(600), op }
            };
            Thread { client, steps: (0..20).map(step).collect() }
        });
        let threads = threads.collect();
        let fault = |_| {
            let what = match draws.below(12) {
                0 => What::Kill { server: draws.below(DATA_SERVERS as u64) as usize, after: None, down_us: 1000 },
                _ => What::Cut { client: draws.below(clients as u64) as usize },
            };
            Fault { at_us: 3000 + draws.below(60_000), what }
        };
        let faults = (0..8).map(fault).collect();
        Plan { checksums: false, clients, ways: 2, links, threads, faults }
    }

    pub(super) fn operations(&self) -> usize {
        self.threads.iter().map(|thread| thread.steps.len()).sum()
    }

    fn parts(&mut self) -> Parts<'_, Op, Fault> {
        let Plan { threads, faults, links, ways, .. } = self;
        Parts { threads, faults, links, ways }
    }

    /// Plans with less in them, those that lack most first.
    pub(super) fn smaller(&self) -> Vec<Plan> {
        plans::smaller(self, Plan::parts, &[&|plan: &mut Plan| plan.checksums = false])
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} clients, {} ways, checksums {}, {:?}", self.clients, self.ways, self.checksums, self.links)?;
        self.threads.iter().try_for_each(|thread| writeln!(f, "{thread}"))?;
        self.faults.iter().try_for_each(|fault| writeln!(f, "  after {} µs {:?}", fault.at_us, fault.what))
    }
}
