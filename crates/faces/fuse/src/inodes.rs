//! Which file is meant by a number that the kernel names: the table of inode numbers and their places.
//!
//! The metadata server is asked by path, the kernel asks by number, so the table keeps for every number that
//! the kernel holds its parent and its name there, and a path is built by walking up. Numbers are the
//! server's own, so that they stay the same when the kernel forgets a file and finds it again. An entry lives
//! as long as the kernel holds its number (it counts look-ups and takes them back with `forget`) or another
//! entry lies below it: the kernel's own cache bounds the table.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use impresario_wire::{Attr, FileKey, NodeKind};
use rustc_hash::FxHashMap;

use crate::freshness::Freshness;
use crate::lock;

/// The number of the root, fixed by the protocol.
pub(crate) const ROOT: u64 = 1;

/// Longest path that is built, bytes. Longer ones the server would refuse anyway.
const PATH_MAX_BYTES: usize = 1 << 16;

/// At most so many names are spared a second look at a time.
const SPARED_MAX: usize = 64;

/// The number that the kernel is given for a server's number: only 0 and 1 mean something special to it.
pub(crate) fn number_of(server_ino: u64) -> u64 {
    if server_ino <= ROOT { server_ino | 1 << 63 } else { server_ino }
}

/// What the kernel is to be told of an entry.
#[derive(Clone, Debug)]
pub(crate) struct Entered {
    /// Its number.
    pub number: u64,
    /// Tells apart two files that had the same number one after the other.
    pub generation: u64,
    /// What the kernel believes of it.
    pub fresh: Arc<Freshness>,
}

/// How many local renames and removals there have been: taken before a question to the server, so that an
/// answer which is older than a change made meanwhile does not undo that change in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Changes(u64);

type Name = Arc<[u8]>;

/// A name in a directory.
pub(crate) type Place = (u64, Name);

#[derive(Debug)]
struct Node {
    /// Parent and name there; `None`: the root, or its name was removed.
    place: Option<Place>,
    /// The place it had last.
    was: Option<Place>,
    /// Look-ups that the kernel has not taken back.
    lookups: u64,
    /// Entries whose parent this is.
    children: u64,
    generation: u64,
    kind: NodeKind,
    /// The file behind the number, once it was opened.
    file: Option<FileKey>,
    /// It is known to be gone: the next answer with this number means another file.
    gone: bool,
    /// Handles by which it is open.
    opens: Vec<u64>,
    fresh: Arc<Freshness>,
}

#[derive(Debug, Default)]
struct Table {
    nodes: FxHashMap<u64, Node>,
    names: FxHashMap<Place, u64>,
    changes: u64,
    /// Names whose next open comes from a kernel that was just made to look again: it does so only once.
    spared: VecDeque<Place>,
}

/// The table of inode numbers.
#[derive(Debug)]
pub(crate) struct Inodes {
    table: Mutex<Table>,
}

impl Inodes {
    /// A table that holds the root only.
    pub(crate) fn new() -> Inodes {
        let root = Node {
            place: None,
            was: None,
            lookups: 1,
            children: 0,
            generation: 0,
            kind: NodeKind::Dir,
            file: None,
            gone: false,
            opens: Vec::new(),
            fresh: Arc::default(),
        };
        Inodes { table: Mutex::new(Table { nodes: FxHashMap::from_iter([(ROOT, root)]), ..Table::default() }) }
    }

    /// The state of the table, to be handed to [`Inodes::enter`] with the answer to a question asked from now on.
    pub(crate) fn changes(&self) -> Changes {
        Changes(lock(&self.table).changes)
    }

    /// Notes that `name` in `parent` is what `attr` describes and that the kernel is told so (one look-up).
    ///
    /// Where that cannot be (the child would be its own ancestor, because our view of the tree is older than
    /// another node's renames), the entry gets no place: the kernel looks the path up anew when it needs it.
    pub(crate) fn enter(&self, parent: u64, name: &[u8], attr: &Attr, asked: Changes) -> Entered {
        let mut table = lock(&self.table);
        let number = number_of(attr.ino);
        let possible = table.nodes.contains_key(&parent) && !table.is_at_or_above(number, parent);
        let current = table.changes == asked.0;
        let node = table.nodes.entry(number).or_insert_with(|| Node {
            place: None,
            was: None,
            lookups: 0,
            children: 0,
            generation: 0,
            kind: attr.kind,
            file: None,
            gone: false,
            opens: Vec::new(),
            fresh: Arc::default(),
        });
        if node.kind != attr.kind || (node.gone && current) {
            node.become_another(attr.kind);
        }
        node.lookups += 1;
        node.fresh.told(attr);
        let entered = Entered { number, generation: node.generation, fresh: node.fresh.clone() };
        let is_new = node.lookups == 1 && node.place.is_none() && !node.gone;
        if possible && (current || is_new) {
            table.place(number, parent, name);
        }
        entered
    }

    /// Notes attributes that the kernel is told of a number it holds already.
    pub(crate) fn told(&self, number: u64, attr: &Attr) {
        if let Some(node) = lock(&self.table).nodes.get(&number) {
            node.fresh.told(attr);
        }
    }

    /// Takes back look-ups.
    pub(crate) fn forget(&self, number: u64, lookups: u64) {
        let mut table = lock(&self.table);
        if let Some(node) = table.nodes.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(lookups);
            table.drop_unused(number);
        }
    }

    /// The path of a number; `None` when it is unknown or has no name any more.
    pub(crate) fn path(&self, number: u64) -> Option<Vec<u8>> {
        lock(&self.table).path(number)
    }

    /// The path of `name` in `parent`.
    pub(crate) fn path_in(&self, parent: u64, name: &[u8]) -> Option<Vec<u8>> {
        let mut path = self.path(parent)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Some(path)
    }

    /// The number of the directory that holds `number`; the root's is itself.
    pub(crate) fn parent(&self, number: u64) -> u64 {
        match lock(&self.table).nodes.get(&number) {
            Some(Node { place: Some((parent, _)), .. }) => *parent,
            _ => ROOT,
        }
    }

    /// What `name` in `parent` is, where that is known.
    pub(crate) fn kind_in(&self, parent: u64, name: &[u8]) -> Option<NodeKind> {
        let table = lock(&self.table);
        let number = table.names.get(&(parent, Name::from(name)))?;
        table.nodes.get(number).map(|node| node.kind)
    }

    /// What a number is.
    pub(crate) fn kind(&self, number: u64) -> Option<NodeKind> {
        lock(&self.table).nodes.get(&number).map(|node| node.kind)
    }

    /// What the kernel believes of a number.
    pub(crate) fn fresh(&self, number: u64) -> Option<Arc<Freshness>> {
        lock(&self.table).nodes.get(&number).map(|node| node.fresh.clone())
    }

    /// A name was removed here.
    pub(crate) fn removed(&self, parent: u64, name: &[u8]) {
        let mut table = lock(&self.table);
        table.changes += 1;
        if let Some(number) = table.names.get(&(parent, Name::from(name))).copied() {
            table.lose(number);
        }
    }

    /// A name was renamed here, replacing what the new name meant before.
    pub(crate) fn renamed(&self, from: (u64, &[u8]), to: (u64, &[u8])) {
        let mut table = lock(&self.table);
        table.changes += 1;
        let moved = table.names.get(&(from.0, Name::from(from.1))).copied();
        match table.names.get(&(to.0, Name::from(to.1))).copied() {
            same if same == moved => return,
            Some(replaced) => table.lose(replaced),
            None => {}
        }
        let Some(number) = moved else { return };
        if table.is_at_or_above(number, to.0) {
            table.unplace(number);
        } else {
            table.place(number, to.0, to.1);
        }
    }

    /// Notes that a number was opened by `handle` and which file it is. `false`: the number was given to
    /// another file before, so the open is not for what the kernel means.
    pub(crate) fn opened(&self, number: u64, file: FileKey, handle: u64) -> bool {
        let mut table = lock(&self.table);
        let Some(node) = table.nodes.get_mut(&number) else { return false };
        if node.gone || node.file.is_some_and(|known| known != file) {
            node.gone = true;
            return false;
        }
        node.file = Some(file);
        node.opens.push(handle);
        true
    }

    /// Notes that `handle` is closed.
    pub(crate) fn closed(&self, number: u64, handle: u64) {
        let mut table = lock(&self.table);
        if let Some(node) = table.nodes.get_mut(&number) {
            node.opens.retain(|open| *open != handle);
            table.drop_unused(number);
        }
    }

    /// A handle by which the number is open.
    pub(crate) fn open_handle(&self, number: u64) -> Option<u64> {
        lock(&self.table).nodes.get(&number)?.opens.last().copied()
    }

    /// Where a number is, or was last.
    pub(crate) fn last_place(&self, number: u64) -> Option<Place> {
        let table = lock(&self.table);
        let node = table.nodes.get(&number)?;
        node.place.clone().or_else(|| node.was.clone())
    }

    /// The kernel is made to look this name up again: the next open of what it finds must not be refused.
    pub(crate) fn spare(&self, place: Place) {
        let mut table = lock(&self.table);
        if !table.spared.contains(&place) {
            table.spared.push_back(place);
        }
        if table.spared.len() > SPARED_MAX {
            table.spared.pop_front();
        }
    }

    /// Whether the name is spared; it is so once.
    pub(crate) fn is_spared(&self, place: &Place) -> bool {
        let mut table = lock(&self.table);
        let found = table.spared.iter().position(|spared| spared == place);
        found.is_some_and(|found| table.spared.remove(found).is_some())
    }

    /// Notes that a number was opened by `handle`, although its name means another file by now.
    pub(crate) fn opened_instead(&self, number: u64, handle: u64) {
        if let Some(node) = lock(&self.table).nodes.get_mut(&number) {
            node.opens.push(handle);
        }
    }

    /// The server says that the path of this number means something else: another node changed the tree.
    pub(crate) fn replaced_elsewhere(&self, number: u64) {
        let mut table = lock(&self.table);
        if number != ROOT && table.nodes.contains_key(&number) {
            table.unplace(number);
        }
    }

    /// Entries held, the root included.
    #[cfg(test)]
    fn len(&self) -> usize {
        lock(&self.table).nodes.len()
    }
}

impl Node {
    /// The number was given to another file.
    fn become_another(&mut self, kind: NodeKind) {
        self.generation += 1;
        self.kind = kind;
        self.file = None;
        self.gone = false;
        self.opens.clear();
        self.fresh = Arc::default();
    }
}

impl Table {
    fn path(&self, number: u64) -> Option<Vec<u8>> {
        let mut names: Vec<&[u8]> = Vec::new();
        let (mut at, mut len) = (number, 0);
        while at != ROOT {
            let (parent, name) = self.nodes.get(&at)?.place.as_ref()?;
            len += name.len() + 1;
            if len > PATH_MAX_BYTES {
                return None;
            }
            names.push(name);
            at = *parent;
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// `upper` is `lower` or one of its ancestors.
    fn is_at_or_above(&self, upper: u64, lower: u64) -> bool {
        let mut at = lower;
        loop {
            if at == upper {
                return true;
            }
            match self.nodes.get(&at) {
                Some(Node { place: Some((parent, _)), .. }) => at = *parent,
                _ => return false,
            }
        }
    }

    /// Gives a number its place. What had that name before has none now: another node replaced it.
    fn place(&mut self, number: u64, parent: u64, name: &[u8]) {
        let key = (parent, Name::from(name));
        if self.names.get(&key) == Some(&number) {
            return;
        }
        if let Some(replaced) = self.names.get(&key).copied() {
            self.unplace(replaced);
        }
        // The new parent is held before the old one is let go: they may lie on one line.
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children += 1;
        }
        self.unplace_keeping(number);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.place = Some(key.clone());
            self.names.insert(key, number);
        }
    }

    /// Takes a number's place away, and the entry when nothing holds it then.
    fn unplace(&mut self, number: u64) {
        self.unplace_keeping(number);
        self.drop_unused(number);
    }

    fn unplace_keeping(&mut self, number: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        let Some(key) = node.place.take() else { return };
        self.names.remove(&key);
        node.was = Some(key.clone());
        if let Some(parent) = self.nodes.get_mut(&key.0) {
            parent.children = parent.children.saturating_sub(1);
        }
        self.drop_unused(key.0);
    }

    /// The last name of a number was removed here.
    fn lose(&mut self, number: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.gone = true;
        }
        self.unplace(number);
    }

    /// Drops an entry that nothing holds, then its parent when that was the last to hold it, and so on.
    fn drop_unused(&mut self, number: u64) {
        let mut at = number;
        while at != ROOT {
            let Some(node) = self.nodes.get(&at) else { return };
            if node.lookups > 0 || node.children > 0 || !node.opens.is_empty() {
                return;
            }
            let Some((parent, name)) = self.nodes.remove(&at).and_then(|node| node.place) else { return };
            self.names.remove(&(parent, name));
            if let Some(parent) = self.nodes.get_mut(&parent) {
                parent.children = parent.children.saturating_sub(1);
            }
            at = parent;
        }
    }
}

#[cfg(test)]
mod tests;
