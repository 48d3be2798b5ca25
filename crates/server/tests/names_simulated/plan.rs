//! A plan: what several clients do to a few names, and what goes wrong meanwhile. All of it follows from a seed, and a part of
//! a plan is a plan, so that one that fails can be made smaller.

use std::fmt;

use impresario_base::Random;
use impresario_testing::plans::{self, Links, Parts, Step, Thread};
use impresario_wire::message::{MetaCall, NodeKind, SetAttr, Target, XattrMode};

/// Names of files, in the root or in one of the directories.
const FILES: [&str; 5] = ["a", "b", "c", "d/a", "e/a"];
/// Names of directories.
pub const DIRECTORIES: [&str; 2] = ["d", "e"];
/// All names that there can be.
pub const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", "d/a", "e/a"];

/// One operation on the name space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Create {
        path: &'static str,
        exclusive: bool,
    },
    Unlink {
        path: &'static str,
    },
    Rename {
        from: &'static str,
        to: &'static str,
        no_replace: bool,
        /// Leaves a device at the old name.
        whiteout: bool,
    },
    Exchange {
        from: &'static str,
        to: &'static str,
    },
    Link {
        from: &'static str,
        to: &'static str,
    },
    Mkdir {
        path: &'static str,
    },
    Rmdir {
        path: &'static str,
    },
    Chmod {
        path: &'static str,
        mode: u32,
    },
    /// Sets an extended attribute, or removes it.
    Tag {
        path: &'static str,
        value: Option<u8>,
        mode: XattrMode,
    },
    ReadTag {
        path: &'static str,
    },
    Look {
        path: &'static str,
    },
    Open {
        path: &'static str,
    },
    List {
        path: &'static str,
    },
}

/// The mode of a new file and of a new directory.
pub const MODES: [u32; 2] = [0o644, 0o755];

impl Op {
    pub fn call(self) -> MetaCall {
        let bytes = |path: &str| path.as_bytes().to_vec();
        match self {
            Op::Create { path, exclusive } => {
                MetaCall::Create { path: bytes(path), mode: MODES[0], uid: 0, gid: 0, exclusive, layout: None }
            }
            Op::Unlink { path } => MetaCall::Unlink { path: bytes(path) },
            Op::Rename { from, to, no_replace, whiteout } => {
                MetaCall::Rename { from: bytes(from), to: bytes(to), no_replace, whiteout }
            }
            Op::Exchange { from, to } => MetaCall::Exchange { from: bytes(from), to: bytes(to) },
            Op::Link { from, to } => MetaCall::Link { from: bytes(from), to: bytes(to) },
            Op::Mkdir { path } => MetaCall::Mkdir { path: bytes(path), mode: MODES[1], uid: 0, gid: 0 },
            Op::Rmdir { path } => MetaCall::Rmdir { path: bytes(path) },
            Op::Chmod { path, mode } => {
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                MetaCall::SetAttr { target: Target::Path(bytes(path)), set }
            }
            Op::Tag { path, value, mode } => {
                let (target, name) = (Target::Path(bytes(path)), bytes("user.tag"));
                MetaCall::SetXattr { target, name, value: value.map(|value| vec![value]), mode }
            }
            Op::ReadTag { path } => MetaCall::GetXattr { target: Target::Path(bytes(path)), name: bytes("user.tag") },
            Op::Look { path } => MetaCall::GetAttr { target: Target::Path(bytes(path)) },
            Op::Open { path } => MetaCall::Open { path: bytes(path), write: false },
            Op::List { path } => MetaCall::Readdir { path: bytes(path), after: Vec::new(), max: 1000 },
        }
    }

    pub fn draw(draws: &mut Random) -> Op {
        let file = |draws: &mut Random| FILES[draws.below(FILES.len() as u64) as usize];
        let path = file(draws);
        let other = |draws: &mut Random| loop {
            let other = file(draws);
            if other != path {
                return other;
            }
        };
        let turned = draws.below(2) as usize;
        let (one, two) = (DIRECTORIES[turned], DIRECTORIES[1 - turned]);
        match draws.below(100) {
            0..18 => Op::Create { path, exclusive: draws.below(2) == 0 },
            18..33 => Op::Unlink { path },
            33..46 => {
                let (to, how) = (other(draws), draws.below(12));
                Op::Rename { from: path, to, no_replace: how < 4, whiteout: how % 4 == 0 }
            }
            46..54 => Op::Exchange { from: path, to: other(draws) },
            54..63 => Op::Link { from: path, to: other(draws) },
            63..67 => Op::Mkdir { path: one },
            67..69 => Op::Rmdir { path: one },
            69..72 => Op::Rename { from: one, to: two, no_replace: draws.below(3) == 0, whiteout: false },
            72..74 => Op::Exchange { from: one, to: two },
            74..78 => Op::Chmod { path, mode: 0o600 + draws.below(64) as u32 },
            78..83 => {
                let value = (draws.below(3) > 0).then(|| draws.below(100) as u8);
                let mode = [XattrMode::Any, XattrMode::Create, XattrMode::Replace][draws.below(3) as usize];
                Op::Tag { path, value, mode }
            }
            83..85 => Op::ReadTag { path },
            85..90 => Op::Look { path },
            90..96 => Op::Open { path },
            _ => Op::List { path: ["", "d", "e"][draws.below(3) as usize] },
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The server's process is killed and started again: between two calls, or, with `step`, before that many changes of its
    /// disk in one call. Memory is lost, the disk is not.
    Kill { at_us: u64, step: Option<u32>, down_us: u64 },
    /// A client's connection breaks.
    Cut { at_us: u64, client: usize },
    /// Nothing passes between a client and one of its ways to the server; what is on its way comes later.
    Partition { at_us: u64, for_us: u64, client: usize, way: usize },
    /// One change of the disk fails with ENOSPC, in the next call that makes so many.
    Full { at_us: u64, step: u32 },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub clients: usize,
    /// I/O nodes through which a client reaches the server, or 1.
    pub ways: usize,
    pub links: Links,
    pub threads: Vec<Thread<Op>>,
    pub faults: Vec<Fault>,
}

impl Plan {
    pub fn of_seed(seed: u64) -> Plan {
        let mut draws = Random::new(seed ^ 0x6e61_6d65);
        let clients = 2 + draws.below(2) as usize;
        let ways = 1 + draws.below(2) as usize;
        let links = Links::draw(&mut draws);
        let threads = 2 + draws.below(3) as usize;
        let mean_us = [300.0, 20_000.0, 1_000_000.0][draws.below(3) as usize];
        let threads: Vec<Thread<Op>> = (0..threads)
            .map(|thread| {
                let count = 4 + draws.below(12);
                let step = |index: u64| {
                    let pause_us = draws.exponential(mean_us) as u64;
                    Step { id: 100 * thread as u64 + index, pause_us, op: Op::draw(&mut draws) }
                };
                Thread { client: thread % clients, steps: (0..count).map(step).collect() }
            })
            .collect();
        let span_us = (mean_us * 12.0) as u64 + 2000;
        let mut fault = |_| {
            let at_us = draws.below(span_us);
            let client = draws.below(clients as u64) as usize;
            match draws.below(10) {
                0..4 => Fault::Kill { at_us, step: Some(draws.below(14) as u32), down_us: draws.below(100_000) },
                4 => Fault::Kill { at_us, step: None, down_us: draws.below(3_000_000) },
                5..8 => Fault::Cut { at_us, client },
                8 => Fault::Partition {
                    at_us,
                    for_us: draws.below(12_000_000),
                    client,
                    way: draws.below(ways as u64) as usize,
                },
                _ => Fault::Full { at_us, step: draws.below(14) as u32 },
            }
        };
        let faults = (0..2 + seed % 5).map(&mut fault).collect();
        Plan { clients, ways, links, threads, faults }
    }

    pub fn operations(&self) -> usize {
        self.threads.iter().map(|thread| thread.steps.len()).sum()
    }

    /// Whether calls may fail for want of space.
    pub fn has_full_disk(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault, Fault::Full { .. }))
    }

    fn parts(&mut self) -> Parts<'_, Op, Fault> {
        let Plan { threads, faults, links, ways, .. } = self;
        Parts { threads, faults, links, ways }
    }

    /// Plans with less in them, those that lack most first.
    pub fn smaller(&self) -> Vec<Plan> {
        plans::smaller(self, Plan::parts, &[])
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} clients, {} ways, {:?}", self.clients, self.ways, self.links)?;
        self.threads.iter().try_for_each(|thread| writeln!(f, "{thread}"))?;
        self.faults.iter().try_for_each(|fault| writeln!(f, "  {fault:?}"))
    }
}

/// What a path may name, by where it stands in the plans.
pub fn kind_of(path: &str) -> NodeKind {
    if DIRECTORIES.contains(&path) { NodeKind::Dir } else { NodeKind::File }
}
