//! The inode table: which file an inode number from the kernel means, and its path.
//!
//! The metadata server works by path, the kernel by number. So the table keeps the parent and the name of every number
//! that the kernel holds, and builds a path by walking up. Numbers are the server's own, so that they stay the same
//! when the kernel forgets a file and finds it again. An entry lives as long as the kernel holds its number (it counts
//! look-ups and takes them back with `forget`) or another entry lies below it: the kernel's own cache bounds the table.
//!
//! A file with several names has one number. The table knows the names that the kernel looked up, the latest first: paths
//! are built from that one, which is the one that a program uses. An answer that says that a file has one name only
//! replaces the names known before.
//!
//! A metadata server gives the number of a removed file to the next one at once. The kernel would take the same number
//! with another generation for proof that its inode is broken, and every call that still uses the removed file would
//! fail with EIO. So a file whose number the kernel still holds for another one goes by a stand-in until that is over.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::lock::Mutex;
use impresario_base::time::wait_while;
use impresario_wire::{Attr, Entry, FileKey, NodeKind, Time};
use rustc_hash::FxHashMap;

use crate::freshness::Freshness;

/// The root's number, fixed by the protocol.
pub(crate) const ROOT: u64 = 1;

/// Longest path that is built, bytes. The server would refuse longer ones.
const PATH_MAX_BYTES: usize = 1 << 16;

/// Stand-ins count up from here: no file system below a metadata server numbers its files so high.
const STAND_INS: u64 = 1 << 62;

/// Largest number of opens marked as spared at a time.
const SPARED_MAX: usize = 64;

/// Largest number of names known of one file besides the latest.
const OTHERS_MAX: usize = 15;

/// The kernel's number for a server's number unless it has a stand-in: only 0 and 1 have a special meaning to the kernel.
fn number_of(server_ino: u64) -> u64 {
    if server_ino <= ROOT { server_ino | 1 << 63 } else { server_ino }
}

/// An open that the kernel retries.
#[derive(Debug)]
struct Spared {
    /// The thread that opens.
    thread: u32,
    /// The names by one of which it does.
    entries: Vec<EntryKey>,
}

/// The reply to a look-up.
#[derive(Clone, Debug)]
pub(crate) struct Entered {
    /// Its number.
    pub number: u64,
    /// Distinguishes two files that had the same number one after the other.
    pub generation: u64,
    /// The kernel's view of the file.
    pub fresh: Arc<Freshness>,
}

/// A count of local renames and removals, taken before a request to the server, so that an answer older than a
/// concurrent change does not undo that change in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Changes(u64);

type Name = Arc<[u8]>;

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'a> {
    /// A number, by its latest name.
    Node(u64),
    /// A name in a directory.
    Name(u64, &'a [u8]),
    /// The same, and what it means moves.
    Moved(u64, &'a [u8]),
}

/// Where places are.
#[derive(Debug)]
pub(crate) struct Ways<const N: usize> {
    pub paths: [Vec<u8>; N],
    /// The numbers on these paths, in order, but for the root and names that are not looked at.
    pub on: Vec<u64>,
    /// The directories that move: only they have paths below them that change with them.
    pub moved: Vec<u64>,
}

/// A name in a directory.
pub(crate) type EntryKey = (u64, Name);

#[derive(Debug)]
struct Node {
    /// Parent and name there; `None` for the root and after its last known name was removed.
    entry: Option<EntryKey>,
    /// Further names, the latest last.
    others: Vec<EntryKey>,
    /// How many names the server said it has.
    links: u32,
    /// Its last parent and name.
    was: Option<EntryKey>,
    /// Look-ups that the kernel has not taken back.
    lookups: u64,
    /// Entries whose parent this is.
    children: u64,
    generation: u64,
    /// The number that the server uses, where this is a stand-in for it.
    stands_for: Option<u64>,
    kind: NodeKind,
    /// The file behind the number, once it was opened.
    file: Option<FileKey>,
    /// The file is known to be gone: the next answer with this number means another file.
    gone: bool,
    /// When this mount removed it, if it is a directory.
    removed_at: Option<SystemTime>,
    /// Open handles.
    opens: Vec<u64>,
    fresh: Arc<Freshness>,
}

#[derive(Debug, Default)]
struct Table {
    nodes: FxHashMap<u64, Node>,
    names: FxHashMap<EntryKey, u64>,
    /// The server's numbers that have a stand-in, and which.
    stand_ins: FxHashMap<u64, u64>,
    stand_ins_drawn: u64,
    changes: u64,
    /// Opens that we made the kernel retry: it retries only once.
    spared: VecDeque<Spared>,
    /// What this mount moves at the moment, once for each move.
    moving: Vec<u64>,
}

/// The table of inode numbers.
#[derive(Debug)]
pub(crate) struct Inodes {
    table: Mutex<Table>,
}

/// A move of names by this mount: the server may have made it already, and the table does not know yet.
#[derive(Debug)]
pub(crate) struct Moving<'a> {
    inodes: &'a Inodes,
    numbers: Vec<u64>,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut table = self.inodes.table.lock();
        for number in &self.numbers {
            if let Some(at) = table.moving.iter().position(|moving| moving == number) {
                table.moving.swap_remove(at);
            }
        }
    }
}

impl Inodes {
    /// Creates a table that holds only the root.
    pub(crate) fn new() -> Inodes {
        let root = Node { lookups: 1, ..Node::new(NodeKind::Dir) };
        let table = Table { nodes: FxHashMap::from_iter([(ROOT, root)]), ..Table::default() };
        Inodes { table: Mutex::new(table) }
    }

    /// The state of the table now, for [`Inodes::enter`] with the answer to a later request.
    pub(crate) fn changes(&self) -> Changes {
        Changes(self.table.lock().changes)
    }

    /// Records that `name` in `parent` is what `attr` describes and that the kernel learns it (one look-up).
    ///
    /// Where that is impossible (the child would be its own ancestor, because our view of the tree is older than
    /// another node's renames), the entry gets no path, and the kernel looks it up again when needed.
    pub(crate) fn enter(&self, parent: u64, name: &[u8], attr: &Attr, asked: Changes) -> Entered {
        self.enter_as(parent, name, attr, asked, None)
    }

    /// The same for the file `made` that this mount has just made: what was another file by that number, removed on another
    /// node, is gone.
    pub(crate) fn enter_made(&self, parent: u64, name: &[u8], attr: &Attr, asked: Changes, made: FileKey) -> Entered {
        self.enter_as(parent, name, attr, asked, Some(made))
    }

    fn enter_as(&self, parent: u64, name: &[u8], attr: &Attr, asked: Changes, made: Option<FileKey>) -> Entered {
        let mut table = self.table.lock();
        let current = table.changes == asked.0;
        let mut number = table.number_for(attr.ino);
        if let Some(node) = table.nodes.get_mut(&number)
            && (node.kind != attr.kind
                || (node.gone && (current || made.is_some()))
                || made.is_some_and(|made| node.file.is_some_and(|known| known != made)))
        {
            if node.lookups > 0 {
                number = table.draw_stand_in(number_of(attr.ino));
            } else {
                node.become_another(attr.kind);
            }
        }
        let possible = table.nodes.contains_key(&parent) && !table.is_at_or_above(number, parent);
        let stands_for = (number != number_of(attr.ino)).then(|| number_of(attr.ino));
        let node = table.nodes.entry(number).or_insert_with(|| Node { stands_for, ..Node::new(attr.kind) });
        node.lookups += 1;
        node.links = attr.nlink;
        // Of a file of unknown length the kernel takes no attributes.
        if attr.size != Entry::UNKNOWN_SIZE {
            node.fresh.kernel_has(attr);
        }
        let entered = Entered { number, generation: node.generation, fresh: node.fresh.clone() };
        let is_new = node.lookups == 1 && node.entry.is_none() && !node.gone;
        if possible && (current || is_new) {
            table.attach(number, parent, name, attr.nlink <= 1 || attr.kind == NodeKind::Dir);
        }
        entered
    }

    /// This mount gave a file another name, which was entered.
    pub(crate) fn linked(&self) {
        // What was asked before may not know that the file has several.
        self.table.lock().changes += 1;
    }

    /// The number by which the kernel knows, or would learn, what the server calls `server_ino`.
    pub(crate) fn number_for(&self, server_ino: u64) -> u64 {
        self.table.lock().number_for(server_ino)
    }

    /// Records attributes sent to the kernel for a number that it already holds.
    pub(crate) fn record_attr(&self, number: u64, attr: &Attr) {
        if let Some(node) = self.table.lock().nodes.get_mut(&number) {
            node.links = attr.nlink;
            node.fresh.kernel_has(attr);
        }
    }

    /// Takes back look-ups.
    pub(crate) fn forget(&self, number: u64, lookups: u64) {
        let mut table = self.table.lock();
        if let Some(node) = table.nodes.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(lookups);
            table.drop_unused(number);
        }
    }

    /// The paths of these places, and what is on them, all as the table is at one moment; `None` if one is unknown, has no name any
    /// more or too long a path.
    pub(crate) fn ways<const N: usize>(&self, places: [Target<'_>; N]) -> Option<Ways<N>> {
        let table = self.table.lock();
        let mut ways = Ways { paths: [const { Vec::new() }; N], on: Vec::with_capacity(16), moved: Vec::new() };
        for (path, place) in ways.paths.iter_mut().zip(places) {
            let (Target::Node(number) | Target::Name(number, _) | Target::Moved(number, _)) = place;
            *path = table.path(number, &mut ways.on)?;
            if let Target::Name(_, name) | Target::Moved(_, name) = place {
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(name);
            }
            if let Target::Moved(parent, name) = place {
                ways.moved.extend(table.directory_in(parent, name));
            }
        }
        ways.on.sort_unstable();
        ways.on.dedup();
        Some(ways)
    }

    /// The number of the directory that holds `number`; the root is its own parent.
    pub(crate) fn parent(&self, number: u64) -> u64 {
        match self.table.lock().nodes.get(&number) {
            Some(Node { entry: Some((parent, _)), .. }) => *parent,
            _ => ROOT,
        }
    }

    /// The kind of a number.
    pub(crate) fn kind(&self, number: u64) -> Option<NodeKind> {
        self.table.lock().nodes.get(&number).map(|node| node.kind)
    }

    /// The kernel's view of a number.
    pub(crate) fn fresh(&self, number: u64) -> Option<Arc<Freshness>> {
        self.table.lock().nodes.get(&number).map(|node| node.fresh.clone())
    }

    /// This mount removed a name; `left`: how many names its file has left, if the server said so.
    pub(crate) fn removed(&self, parent: u64, name: &[u8], left: Option<u32>) {
        let mut table = self.table.lock();
        table.changes += 1;
        table.remove_name(&(parent, Name::from(name)), left);
    }

    /// This mount renamed a name, replacing what the new name meant before; `left`: how many names that has left, if the
    /// server said so.
    pub(crate) fn renamed(&self, from: (u64, &[u8]), to: (u64, &[u8]), left: Option<u32>) {
        let mut table = self.table.lock();
        table.changes += 1;
        let (from, to) = ((from.0, Name::from(from.1)), (to.0, Name::from(to.1)));
        let moved = table.names.get(&from).copied();
        match table.names.get(&to).copied() {
            // Two names of one file both stay.
            same if same == moved => return,
            Some(_) => table.remove_name(&to, left),
            None => {}
        }
        let Some(number) = moved else { return };
        if table.is_at_or_above(number, to.0) {
            table.detach(number);
        } else {
            table.attach(number, to.0, &to.1, false);
            table.lose(number, &from);
        }
    }

    /// This mount exchanged what two names mean.
    pub(crate) fn exchanged(&self, one: (u64, &[u8]), other: (u64, &[u8])) {
        let mut table = self.table.lock();
        table.changes += 1;
        let (one, other) = ((one.0, Name::from(one.1)), (other.0, Name::from(other.1)));
        let (first, second) = (table.names.get(&one).copied(), table.names.get(&other).copied());
        if first == second {
            return;
        }
        // Another node may have renamed: then our view of the tree has one above the place of the other.
        let fits = |number: Option<u64>, at: &EntryKey| number.filter(|number| !table.is_at_or_above(*number, at.0));
        let (first_fits, second_fits) = (fits(first, &other), fits(second, &one));
        // While the entries change places, neither may be dropped for being without a name.
        for number in [first, second].into_iter().flatten() {
            table.hold(number, true);
        }
        for (number, old) in [(first, &one), (second, &other)] {
            if let Some(number) = number {
                table.lose(number, old);
            }
        }
        for (number, new) in [(first_fits, &other), (second_fits, &one)] {
            if let Some(number) = number {
                table.attach(number, new.0, &new.1, false);
            }
        }
        for number in [first, second].into_iter().flatten() {
            table.hold(number, false);
            table.drop_unused(number);
        }
    }

    /// Records that `handle` opened a number, and which file it is. `false`: the number previously meant another file,
    /// so this is not the file that the kernel meant.
    pub(crate) fn opened(&self, number: u64, file: FileKey, handle: u64) -> bool {
        let mut table = self.table.lock();
        let Some(node) = table.nodes.get_mut(&number) else { return false };
        if node.gone || node.file.is_some_and(|known| known != file) {
            node.gone = true;
            return false;
        }
        node.file = Some(file);
        node.opens.push(handle);
        true
    }

    /// Records that `handle` is closed.
    pub(crate) fn closed(&self, number: u64, handle: u64) {
        let mut table = self.table.lock();
        if let Some(node) = table.nodes.get_mut(&number) {
            node.opens.retain(|open| *open != handle);
            table.drop_unused(number);
        }
    }

    /// An open handle of the number.
    pub(crate) fn open_handle(&self, number: u64) -> Option<u64> {
        self.table.lock().nodes.get(&number)?.opens.last().copied()
    }

    /// This mount begins to move or exchange these names. What is returned is dropped when the table knows of it.
    pub(crate) fn moves(&self, names: [(u64, &[u8]); 2]) -> Moving<'_> {
        let mut table = self.table.lock();
        let numbers: Vec<_> =
            names.into_iter().filter_map(|(parent, name)| table.names.get(&(parent, name.into())).copied()).collect();
        table.moving.extend(&numbers);
        Moving { inodes: self, numbers }
    }

    /// Whether this mount has moved the number since it had these names. Waits for a move of it that is under way, at most so long.
    pub(crate) fn has_moved(&self, number: u64, names: &[EntryKey], most: Duration) -> bool {
        let moves = || self.table.lock().moving.contains(&number);
        wait_while(&|| moves() && self.entries(number) == names, most);
        self.entries(number) != names
    }

    /// The known names of a number, the latest first, or the one that it lost last.
    pub(crate) fn entries(&self, number: u64) -> Vec<EntryKey> {
        let table = self.table.lock();
        let Some(node) = table.nodes.get(&number) else { return Vec::new() };
        let latest = node.entry.as_ref().or(node.was.as_ref());
        latest.into_iter().chain(node.others.iter().rev()).cloned().collect()
    }

    /// The kernel is made to look one of these names up again: the open of what this thread then finds must not be refused.
    pub(crate) fn spare(&self, thread: u32, entries: Vec<EntryKey>) {
        let mut table = self.table.lock();
        table.spared.push_back(Spared { thread, entries });
        if table.spared.len() > SPARED_MAX {
            table.spared.pop_front();
        }
    }

    /// Whether this is the retry of such an open; it then has been made, or finds nothing to open. The retry is the same
    /// thread's: others that open the name at this moment have one of their own to come.
    pub(crate) fn is_spared(&self, thread: u32, entries: &[EntryKey]) -> bool {
        let mut table = self.table.lock();
        let before = table.spared.len();
        table
            .spared
            .retain(|spared| spared.thread != thread || !spared.entries.iter().any(|entry| entries.contains(entry)));
        table.spared.len() < before
    }

    /// Records that `handle` opened a number, although its name means another file by now.
    pub(crate) fn opened_instead(&self, number: u64, handle: u64) {
        if let Some(node) = self.table.lock().nodes.get_mut(&number) {
            node.opens.push(handle);
        }
    }

    /// The server reports that the path of this number means something else: another node changed the tree.
    pub(crate) fn replaced_elsewhere(&self, number: u64) {
        let mut table = self.table.lock();
        if let Some(Node { entry: Some(entry), .. }) = table.nodes.get(&number) {
            let entry = entry.clone();
            table.lose(number, &entry);
            table.drop_unused(number);
        }
    }

    /// Attributes of a directory that this mount has removed, for those who have it open: the server knows it no more. Its
    /// times are that of its removal.
    pub(crate) fn removed_directory(&self, number: u64) -> Option<Attr> {
        let table = self.table.lock();
        let node = table.nodes.get(&number)?;
        let since = node.removed_at?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let at = Time { secs: since.as_secs().cast_signed(), nanos: since.subsec_nanos() };
        Some(Attr {
            ino: number,
            kind: node.kind,
            mode: node.fresh.mode(),
            nlink: 0,
            uid: node.fresh.uid(),
            gid: node.fresh.gid(),
            size: 0,
            used_bytes: 0,
            atime: at,
            mtime: at,
            ctime: at,
            labelled: node.fresh.is_labelled(),
        })
    }

    /// Number of entries, including the root.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.table.lock().nodes.len()
    }
}

impl Node {
    fn new(kind: NodeKind) -> Node {
        Node {
            entry: None,
            others: Vec::new(),
            links: 1,
            was: None,
            lookups: 0,
            children: 0,
            generation: 0,
            stands_for: None,
            kind,
            file: None,
            gone: false,
            removed_at: None,
            opens: Vec::new(),
            fresh: Arc::default(),
        }
    }

    /// The number now belongs to another file.
    fn become_another(&mut self, kind: NodeKind) {
        self.generation += 1;
        self.kind = kind;
        self.file = None;
        self.gone = false;
        self.removed_at = None;
        self.opens.clear();
        self.fresh = Arc::default();
    }
}

impl Table {
    fn number_for(&self, server_ino: u64) -> u64 {
        let number = number_of(server_ino);
        self.stand_ins.get(&number).copied().unwrap_or(number)
    }

    /// A number that the kernel does not hold, for the file that the server calls `number` from now on.
    fn draw_stand_in(&mut self, number: u64) -> u64 {
        loop {
            self.stand_ins_drawn += 1;
            let drawn = STAND_INS + self.stand_ins_drawn;
            if !self.nodes.contains_key(&drawn) {
                self.stand_ins.insert(number, drawn);
                return drawn;
            }
        }
    }

    /// The path of a number. What is on it is added to `on`, but for the root.
    fn path(&self, number: u64, on: &mut Vec<u64>) -> Option<Vec<u8>> {
        let mut names: Vec<&[u8]> = Vec::new();
        let (mut at, mut len) = (number, 0);
        while at != ROOT {
            let (parent, name) = self.nodes.get(&at)?.entry.as_ref()?;
            len += name.len() + 1;
            if len > PATH_MAX_BYTES {
                return None;
            }
            names.push(name);
            on.push(at);
            at = *parent;
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// The directory that `name` in `parent` is, if it is one and known.
    fn directory_in(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let number = *self.names.get(&(parent, Name::from(name)))?;
        self.nodes.get(&number).filter(|node| node.kind == NodeKind::Dir).map(|_| number)
    }

    /// Whether `upper` is `lower` or one of its ancestors, by any of their names. Only files have several, and nothing is below a
    /// file but by a server's nonsense: an older name on which a node falls back must not be below it even then.
    fn is_at_or_above(&self, upper: u64, lower: u64) -> bool {
        let (mut at, mut others, mut looked) = (Some(lower), Vec::new(), 0);
        while let Some(number) = at {
            if number == upper {
                return true;
            }
            let node = self.nodes.get(&number);
            for (parent, _) in node.iter().flat_map(|node| &node.others) {
                if !others.contains(parent) {
                    others.push(*parent);
                }
            }
            at = node.and_then(|node| node.entry.as_ref()).map(|(parent, _)| *parent).or_else(|| {
                looked += 1;
                others.get(looked - 1).copied()
            });
        }
        false
    }

    /// Gives a number a name, as its latest, or as its only one. The previous owner of that name loses it: another node
    /// replaced it.
    fn attach(&mut self, number: u64, parent: u64, name: &[u8], is_only: bool) {
        let key = (parent, Name::from(name));
        let owner = self.names.get(&key).copied();
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if owner == Some(number) {
            if node.entry.as_ref() != Some(&key) {
                node.others.retain(|other| *other != key);
                node.others.extend(node.entry.replace(key));
            }
        } else {
            // Reference the new parent before releasing the old one: one may be the other's ancestor.
            let others = node.entry.replace(key.clone());
            node.others.extend(others);
            if let Some(node) = self.nodes.get_mut(&parent) {
                node.children += 1;
            }
            self.names.insert(key.clone(), number);
            if let Some(replaced) = owner {
                self.lose_here(replaced, &key);
                self.release(parent);
                self.drop_unused(replaced);
            }
        }
        let others_max = if is_only { 0 } else { OTHERS_MAX };
        while let Some(oldest) = self.nodes.get(&number).filter(|node| node.others.len() > others_max) {
            let oldest = oldest.others[0].clone();
            self.lose(number, &oldest);
        }
    }

    /// Keeps an entry that nothing else holds, or no longer.
    fn hold(&mut self, number: u64, held: bool) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups = if held { node.lookups + 1 } else { node.lookups.saturating_sub(1) };
        }
    }

    /// Removes one name of a number, and keeps its entry.
    fn lose(&mut self, number: u64, key: &EntryKey) {
        if self.lose_here(number, key) {
            self.names.remove(key);
            self.release(key.0);
        }
    }

    /// Removes one name from the entry of a number; false if it has no such name.
    fn lose_here(&mut self, number: u64, key: &EntryKey) -> bool {
        let Some(node) = self.nodes.get_mut(&number) else { return false };
        if node.entry.as_ref() == Some(key) {
            node.entry = node.others.pop();
            node.was = Some(key.clone());
            return true;
        }
        let before = node.others.len();
        node.others.retain(|other| other != key);
        node.others.len() < before
    }

    /// A directory has one entry less below it.
    fn release(&mut self, parent: u64) {
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children = node.children.saturating_sub(1);
        }
        self.drop_unused(parent);
    }

    /// Removes a number's names, and the entry if nothing holds it then.
    fn detach(&mut self, number: u64) {
        while let Some(Node { entry: Some(entry), .. }) = self.nodes.get(&number) {
            let entry = entry.clone();
            self.lose(number, &entry);
        }
        self.drop_unused(number);
    }

    /// This mount removed a name. If the server does not say how many are left, the last answer has to do.
    fn remove_name(&mut self, key: &EntryKey, left: Option<u32>) {
        let Some(number) = self.names.get(key).copied() else { return };
        let Some(node) = self.nodes.get_mut(&number) else { return };
        let was_last = left.map_or(node.links <= 1, |left| left == 0);
        node.links = left.unwrap_or(node.links.saturating_sub(1));
        if was_last || node.kind == NodeKind::Dir {
            node.gone = true;
            node.removed_at = (node.kind == NodeKind::Dir).then(SystemTime::now);
            self.detach(number);
        } else {
            self.lose(number, key);
            self.drop_unused(number);
        }
    }

    /// Drops an entry that nothing holds, then its parent if this was its last child, and so on.
    fn drop_unused(&mut self, number: u64) {
        let mut at = number;
        while at != ROOT {
            let Some(node) = self.nodes.get(&at) else { return };
            if node.lookups > 0 || node.children > 0 || !node.opens.is_empty() {
                return;
            }
            let Some(node) = self.nodes.remove(&at) else { return };
            if let Some(number) = node.stands_for.filter(|number| self.stand_ins.get(number) == Some(&at)) {
                self.stand_ins.remove(&number);
            }
            // Only files have several: what holds them are directories, so this goes no deeper.
            for other in node.others {
                self.names.remove(&other);
                self.release(other.0);
            }
            let Some((parent, name)) = node.entry else { return };
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
