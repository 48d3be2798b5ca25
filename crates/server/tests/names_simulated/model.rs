//! What a name space may answer: the rules of POSIX for the operations of a plan, done one at a time.

use std::collections::BTreeMap;

use impresario_testing::linear::Model;
use impresario_wire::message::{NodeKind, XattrMode};

use crate::plan::{MODES, NAMES, Op, kind_of};

/// What a client was told of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It was done.
    Done,
    /// A file of this number was made or opened.
    File(u64),
    /// Kind, mode and number of names of a node.
    Node(NodeKind, u32, u32),
    /// The names in a directory.
    Names(Vec<String>),
    /// An extended attribute.
    Tag(Vec<u8>),
    /// It failed and changed nothing.
    Failed(i32),
    /// It may have been done.
    Unknown,
}

/// An operation and what was told of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// Different for each.
    pub id: u64,
    pub op: Op,
    pub seen: Seen,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Node {
    kind: u8,
    mode: u32,
    tag: Option<u8>,
    /// The number of the file, once somebody was told.
    key: Option<u64>,
}

const FILE: u8 = 0;
const DIRECTORY: u8 = 1;
const DEVICE: u8 = 2;

/// Nodes by the operation that made them, and which names they have.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Names {
    names: BTreeMap<&'static str, u64>,
    nodes: BTreeMap<u64, Node>,
}

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const ENOSPC: i32 = 28;
const ENOTEMPTY: i32 = 39;
const ENODATA: i32 = 61;
const EOPNOTSUPP: i32 = 95;

impl Names {
    fn at(&self, path: &str) -> Result<u64, i32> {
        self.has_parent(path)?;
        self.names.get(path).copied().ok_or(ENOENT)
    }

    fn has_parent(&self, path: &str) -> Result<(), i32> {
        match path.rsplit_once('/') {
            Some((parent, _)) if !self.names.contains_key(parent) => Err(ENOENT),
            _ => Ok(()),
        }
    }

    fn is_free(&self, path: &str) -> Result<(), i32> {
        self.has_parent(path)?;
        if self.names.contains_key(path) { Err(EEXIST) } else { Ok(()) }
    }

    fn make(&mut self, path: &'static str, id: u64, kind: u8) {
        self.names.insert(path, id);
        self.nodes
            .insert(id, Node { kind, mode: MODES.get(usize::from(kind)).copied().unwrap_or(0), tag: None, key: None });
    }

    fn below(path: &str) -> impl Iterator<Item = &'static str> {
        let prefix = format!("{path}/");
        NAMES.into_iter().filter(move |name| name.starts_with(&prefix))
    }

    fn is_empty(&self, directory: &str) -> bool {
        !Names::below(directory).any(|name| self.names.contains_key(name))
    }

    /// Takes a name away, with all below it, as (what follows the name, node).
    fn take(&mut self, path: &str) -> Vec<(&'static str, u64)> {
        let whole = NAMES.into_iter().filter(|name| *name == path);
        let all: Vec<&'static str> = whole.chain(Names::below(path)).collect();
        all.into_iter().filter_map(|name| Some((name.get(path.len()..)?, self.names.remove(name)?))).collect()
    }

    fn put(&mut self, path: &str, taken: &[(&'static str, u64)]) {
        for (rest, node) in taken {
            let name = NAMES.into_iter().find(|name| *name == format!("{path}{rest}"));
            self.names.extend(name.map(|name| (name, *node)));
        }
    }

    /// What the operation answers; changes the names if it succeeds.
    fn done(&mut self, id: u64, op: Op) -> Result<Answer, i32> {
        match op {
            Op::Create { path, exclusive } => match self.is_free(path) {
                Err(EEXIST) if !exclusive => return self.open(path),
                free => {
                    free?;
                    self.make(path, id, FILE);
                    return Ok(Answer::File(id));
                }
            },
            Op::Mkdir { path } => {
                self.is_free(path)?;
                self.make(path, id, DIRECTORY);
            }
            Op::Unlink { path } => {
                self.at(path)?;
                self.names.remove(path);
            }
            Op::Rmdir { path } => {
                self.at(path)?;
                if !self.is_empty(path) {
                    return Err(ENOTEMPTY);
                }
                self.names.remove(path);
            }
            Op::Rename { from, to, no_replace, whiteout } => {
                let node = self.at(from)?;
                match self.is_free(to) {
                    Err(EEXIST) if no_replace => return Err(EEXIST),
                    Err(EEXIST) if self.at(to)? == node => return Ok(Answer::Done),
                    Err(EEXIST) if !self.is_empty(to) => return Err(ENOTEMPTY),
                    Err(EEXIST) | Ok(()) => {}
                    Err(errno) => return Err(errno),
                }
                let taken = self.take(from);
                self.put(to, &taken);
                if whiteout {
                    self.make(from, id, DEVICE);
                }
            }
            Op::Exchange { from, to } => {
                self.at(from)?;
                self.at(to)?;
                let (one, other) = (self.take(from), self.take(to));
                self.put(to, &one);
                self.put(from, &other);
            }
            Op::Link { from, to } => {
                let node = self.at(from)?;
                self.is_free(to)?;
                self.names.insert(to, node);
            }
            Op::Chmod { path, mode } => {
                let node = self.at(path)?;
                if let Some(node) = self.nodes.get_mut(&node) {
                    node.mode = mode;
                }
            }
            Op::Tag { path, value, mode } => {
                let node = self.at(path)?;
                let Some(node) = self.nodes.get_mut(&node) else { return Err(ENOENT) };
                match (node.tag, value, mode) {
                    _ if node.kind == DEVICE => return Err(EPERM),
                    (None, None, _) | (None, Some(_), XattrMode::Replace) => return Err(ENODATA),
                    (Some(_), Some(_), XattrMode::Create) => return Err(EEXIST),
                    _ => node.tag = value,
                }
            }
            Op::ReadTag { path } => {
                let node = self.at(path)?;
                let tag = self.nodes.get(&node).and_then(|node| node.tag);
                return tag.map(|tag| Answer::Tag(vec![tag])).ok_or(ENODATA);
            }
            Op::Look { path } => return Ok(Answer::Node(self.at(path)?)),
            Op::Open { path } => return self.open(path),
            Op::List { path: "" } => {
                return Ok(Answer::Names(
                    self.names.keys().filter(|name| !name.contains('/')).map(|n| n.to_string()).collect(),
                ));
            }
            Op::List { path } => {
                self.at(path)?;
                let names = self.names.keys().filter_map(|name| name.strip_prefix(path)?.strip_prefix('/'));
                return Ok(Answer::Names(names.map(String::from).collect()));
            }
        }
        Ok(Answer::Done)
    }

    fn open(&self, path: &str) -> Result<Answer, i32> {
        let node = self.at(path)?;
        let is_device = self.nodes.get(&node).is_some_and(|node| node.kind == DEVICE);
        if is_device { Err(EOPNOTSUPP) } else { Ok(Answer::File(node)) }
    }

    fn forget_the_nameless(&mut self) {
        let Names { names, nodes } = self;
        nodes.retain(|id, _| names.values().any(|node| node == id));
    }
}

enum Answer {
    Done,
    File(u64),
    Node(u64),
    Names(Vec<String>),
    Tag(Vec<u8>),
}

/// The rules, and the numbers of the files that are known to be of certain operations.
pub struct NameSpace {
    pub made_by: BTreeMap<u64, u64>,
    /// Calls may fail for want of space, and change nothing.
    pub may_be_full: bool,
}

impl NameSpace {
    /// Whether the node may be the file of this number; from now on it is.
    fn is_file(&self, names: &mut Names, node: u64, key: u64) -> bool {
        let Some(file) = names.nodes.get_mut(&node).filter(|file| file.kind == FILE) else { return false };
        let is_it = match (file.key, self.made_by.get(&key)) {
            (Some(known), _) => known == key,
            (None, Some(maker)) => *maker == node,
            (None, None) => true,
        };
        file.key = Some(key);
        // Two nodes of one number.
        is_it && names.nodes.values().filter(|file| file.key == Some(key)).count() == 1
    }
}

impl Model for NameSpace {
    type State = Names;
    type Operation = Told;

    fn apply(&self, state: &Names, told: &Told) -> Option<Names> {
        let mut names = state.clone();
        let answer = names.done(told.id, told.op);
        let fits = match (&told.seen, answer) {
            (Seen::Failed(ENOSPC), _) if self.may_be_full => return Some(state.clone()),
            (Seen::Failed(errno), Err(expected)) => *errno == expected,
            (Seen::Unknown, answer) => answer.is_ok(),
            (Seen::Done, Ok(_)) => true,
            (Seen::File(key), Ok(Answer::File(node))) => self.is_file(&mut names, node, *key),
            (Seen::Node(kind, mode, links), Ok(Answer::Node(node))) => {
                let is_directory = *kind == NodeKind::Dir;
                let kind = match kind {
                    NodeKind::File => FILE,
                    NodeKind::Dir => DIRECTORY,
                    _ => DEVICE,
                };
                let count = names.names.values().filter(|other| **other == node).count();
                names.nodes.get(&node).is_some_and(|node| {
                    node.kind == kind && node.mode == *mode && (is_directory || count == *links as usize)
                })
            }
            (Seen::Names(seen), Ok(Answer::Names(names))) => *seen == names,
            (Seen::Tag(seen), Ok(Answer::Tag(tag))) => *seen == tag,
            _ => false,
        };
        names.forget_the_nameless();
        fits.then_some(names)
    }
}

/// What must be asked for to see everything.
pub fn everything() -> impl Iterator<Item = Op> {
    let lists = ["", "d", "e"].into_iter().map(|path| Op::List { path });
    let looks = NAMES.into_iter().map(|path| Op::Look { path });
    let files = NAMES.into_iter().filter(|path| kind_of(path) == NodeKind::File);
    let opens = files.flat_map(|path| [Op::Open { path }, Op::ReadTag { path }]);
    lists.chain(looks).chain(opens)
}
