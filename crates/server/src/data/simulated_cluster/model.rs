//! What a cluster may answer: names one at a time, and each strip of a file as a register that a power failure may take back to
//! what was synced last.

use std::collections::{BTreeMap, BTreeSet};

use impresario_testing::linear::Model;

/// What is done to a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NameOp {
    Open { path: &'static str, create: bool },
    Unlink { path: &'static str },
    Rename { from: &'static str, to: &'static str },
}

/// What a client was told of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    Done,
    /// The key of the file.
    File(u64),
    Failed(i32),
    Unknown,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Named {
    /// Different for each.
    pub(super) id: u64,
    pub(super) op: NameOp,
    pub(super) seen: Seen,
}

/// Files by the operation that made them, and their keys once somebody was told.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub(super) struct Names {
    names: BTreeMap<&'static str, u64>,
    keys: BTreeMap<u64, u64>,
}

/// The rules of names. Keys may be used for one file only, ever.
#[derive(Default)]
pub(super) struct NameSpace {
    /// A change of the metadata server's disk may fail.
    pub(super) may_fail: bool,
}

impl NameSpace {
    fn open(names: &mut Names, path: &str, key: u64) -> bool {
        let Some(file) = names.names.get(path) else { return false };
        *names.keys.entry(*file).or_insert(key) == key
            && names.keys.values().filter(|other| **other == key).count() == 1
    }
}

impl Model for NameSpace {
    type State = Names;
    type Operation = Named;

    fn apply(&self, state: &Names, told: &Named) -> Option<Names> {
        let mut names = state.clone();
        let done = match told.op {
            NameOp::Open { path, create } => match (names.names.contains_key(path), create) {
                (false, false) => Err(libc::ENOENT),
                (is_there, _) => {
                    if !is_there {
                        names.names.insert(path, told.id);
                    }
                    Ok(path)
                }
            },
            NameOp::Unlink { path } => names.names.remove(path).map(|_| path).ok_or(libc::ENOENT),
            NameOp::Rename { from, to } => match names.names.get(from).copied() {
                None => Err(libc::ENOENT),
                Some(file) => {
                    // To the same name it does nothing.
                    if from != to {
                        names.names.remove(from);
                    }
                    names.names.insert(to, file);
                    Ok(to)
                }
            },
        };
        let fits = match (told.seen, done) {
            (Seen::Failed(libc::ENOSPC), _) if self.may_fail => return Some(state.clone()),
            (Seen::Failed(errno), Err(expected)) => errno == expected,
            (Seen::Unknown, done) => done.is_ok(),
            (Seen::Done, Ok(_)) => true,
            (Seen::File(key), Ok(path)) => NameSpace::open(&mut names, path, key),
            _ => false,
        };
        // Keys stay known when their files are gone: no other file may get them.
        fits.then_some(names)
    }
}

/// What happens to a strip of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StripOp {
    /// It gets this value; `by`: the client that was told so. A truncation writes 0.
    Write {
        value: u64,
        by: Option<usize>,
    },
    Read {
        value: u64,
    },
    /// A client was told that what it wrote is durable.
    Synced {
        client: usize,
    },
    /// A client was told that what it wrote may be lost.
    Told {
        client: usize,
    },
    /// The data server's machine lost its power, and this is what the device has.
    PowerFailed {
        value: u64,
    },
}

/// A strip: what it held since it was durable.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Strip {
    /// With the client that was told of each; the first is durable. What a power failure leaves is one of these.
    values: Vec<(u64, Option<usize>)>,
    /// Clients some of whose writes are lost, and which were not told.
    lost: BTreeSet<usize>,
}

impl Default for Strip {
    fn default() -> Strip {
        Strip { values: vec![(0, None)], lost: BTreeSet::new() }
    }
}

/// The rule of strips.
pub(super) struct Register;

impl Model for Register {
    type State = Strip;
    type Operation = StripOp;

    fn apply(&self, state: &Strip, operation: &StripOp) -> Option<Strip> {
        let mut strip = state.clone();
        match *operation {
            StripOp::Write { value, by } => strip.values.push((value, by)),
            StripOp::Read { value } => return (state.values.last()?.0 == value).then_some(strip),
            StripOp::Synced { client } => {
                if state.lost.contains(&client) {
                    return None;
                }
                let of_client = |entry: &(u64, Option<usize>)| entry.1 == Some(client);
                if let Some(floor) = strip.values.iter().rposition(of_client) {
                    strip.values.drain(..floor);
                    strip.values[0].1 = None;
                }
            }
            StripOp::Told { client } => {
                strip.lost.remove(&client);
                let of_client = strip.values.iter_mut().filter(|entry| entry.1 == Some(client));
                of_client.for_each(|entry| entry.1 = None);
            }
            StripOp::PowerFailed { value } => {
                let left = strip.values.iter().rposition(|entry| entry.0 == value)?;
                strip.lost.extend(strip.values[left + 1..].iter().filter_map(|entry| entry.1));
                strip.values = vec![(value, None)];
            }
        }
        Some(strip)
    }
}
