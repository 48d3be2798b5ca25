//! ROOT: folders lead to objects, each behind a key, and two kinds of these tell where the data of their columns lie:
//! `TTree` ([`tree`]) and `RNTuple` ([`ntuple`]). Not known, and left out: what ROOT's oldest method has compressed, and
//! baskets that are kept inside the tree.

mod ntuple;
mod tree;
mod unpack;

use std::collections::{HashMap, HashSet};

use super::{Fields, Format, Source, Track};

/// The reader.
pub struct Root;

const FOLDERS_MAX: usize = 256;
const KEYS_MAX: u64 = 1 << 14;
const TREES_MAX: usize = 64;
/// What tells of the columns, unpacked; that of all trees together.
const OBJECTS_BYTES_MAX: u64 = 32 << 20;
/// Of a key's beginning: more than its fixed fields and the names of its classes.
const KEY_BYTES_MAX: u64 = 1024;
/// Seeks of files beyond 2 GB, and of what lies in them, are wide from these versions on.
const WIDE_FILE: u64 = 1_000_000;
const WIDE_KEY: u64 = 1_000;

impl Format for Root {
    fn name(&self) -> &'static str {
        "ROOT"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["root"]
    }

    /// A track for each branch or column: its baskets or pages in the order of the entries.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        file.beginning();
        let start = file.up_to(0, 64)?;
        let mut fields = Fields::new(start.strip_prefix(b"root")?);
        // Where most writers put the list of the keys.
        file.end();
        let (version, begin) = (fields.big(4)?, fields.big(4)?);
        let wide = if version >= WIDE_FILE { 8 } else { 4 };
        fields.take(2 * wide + 4 + 4)?;
        let name_bytes = fields.big(4)?;
        let (mut waiting, mut seen) = (vec![begin + name_bytes], HashSet::new());
        let mut trees: HashMap<(u64, Vec<u8>), Key> = HashMap::new();
        while !waiting.is_empty() {
            waiting.retain(|at| seen.len() < FOLDERS_MAX && seen.insert(*at));
            let folders = file.each(&waiting, |file, at| keys(file, *at));
            let level = std::mem::take(&mut waiting).into_iter().zip(folders);
            for (at, key) in level.flat_map(|(at, keys)| keys.into_iter().flatten().map(move |key| (at, key))) {
                match key.class.as_slice() {
                    b"TDirectory" | b"TDirectoryFile" => waiting.push(key.at.saturating_add(key.head_bytes)),
                    // Of a tree that was written more than once the last one counts.
                    b"TTree" | b"TNtuple" | b"TNtupleD" | b"ROOT::RNTuple" if trees.len() < TREES_MAX => {
                        let place = (at, key.name.clone());
                        if trees.get(&place).is_none_or(|other| other.cycle < key.cycle) {
                            trees.insert(place, key);
                        }
                    }
                    _ => {}
                }
            }
        }
        let mut trees: Vec<Key> = trees.into_values().collect();
        trees.sort_by_key(|tree| tree.at);
        file.ahead(trees.iter().map(|tree| (tree.at, tree.bytes)));
        let (mut tracks, mut left, mut ntuples) = (Vec::new(), OBJECTS_BYTES_MAX, Vec::new());
        for tree in trees {
            let Some(object) = tree.object(file, left) else { continue };
            left -= object.len() as u64;
            match tree.class.as_slice() {
                b"ROOT::RNTuple" => ntuples.extend(ntuple::Anchor::read(&object)),
                _ => tree::branches(&object, &mut tracks),
            }
        }
        ntuple::columns(file, &ntuples, &mut left, &mut tracks);
        Some(tracks)
    }
}

/// What stands before each object.
struct Key {
    at: u64,
    bytes: u64,
    head_bytes: u64,
    object_bytes: u64,
    cycle: u64,
    class: Vec<u8>,
    name: Vec<u8>,
}

impl Key {
    fn read(fields: &mut Fields<'_>) -> Option<Key> {
        let (bytes, version, object_bytes) = (fields.big(4)?, fields.big(2)?, fields.big(4)?);
        fields.take(4)?;
        let (head_bytes, cycle) = (fields.big(2)?, fields.big(2)?);
        let wide = if version > WIDE_KEY { 8 } else { 4 };
        let at = fields.big(wide)?;
        fields.take(wide)?;
        let (class, name) = (text(fields)?.to_vec(), text(fields)?.to_vec());
        text(fields)?;
        Some(Key { at, bytes, head_bytes, object_bytes, cycle, class, name })
    }

    /// The object, unpacked, if it has no more than so many bytes.
    fn object(&self, file: &mut Source<'_>, most: u64) -> Option<Vec<u8>> {
        let bytes = file.bytes(self.at.checked_add(self.head_bytes)?, self.bytes.checked_sub(self.head_bytes)?)?;
        match self.object_bytes {
            len if len > most => None,
            len if len == bytes.len() as u64 => Some(bytes),
            len => unpack::blocks(&bytes, usize::try_from(len).ok()?),
        }
    }
}

/// The keys of the folder whose record stands here.
fn keys(file: &mut Source<'_>, at: u64) -> Option<Vec<Key>> {
    let folder = file.up_to(at, 64)?;
    let mut fields = Fields::new(&folder);
    let wide = if fields.big(2)? > WIDE_KEY { 8 } else { 4 };
    fields.take(4 + 4)?;
    let list_bytes = fields.big(4)?;
    fields.take(4 + 2 * wide)?;
    let list = fields.big(wide)?;
    let list = file.bytes(list, list_bytes.min(KEYS_MAX * KEY_BYTES_MAX))?;
    let mut fields = Fields::new(&list);
    // The list has a key of its own.
    Key::read(&mut fields)?;
    let count = fields.big(4)?.min(KEYS_MAX);
    (0..count).map(|_| Key::read(&mut fields)).collect()
}

fn text<'a>(fields: &mut Fields<'a>) -> Option<&'a [u8]> {
    let short = fields.big(1)?;
    let len = if short == 255 { fields.big(4)? } else { short };
    fields.take(len)
}

/// The bytes of an object that tells its length, and its version.
fn counted<'a>(fields: &mut Fields<'a>) -> Option<(u64, Fields<'a>)> {
    let bytes = fields.big(4)?.checked_sub(0x4000_0000)?;
    let mut object = Fields::new(fields.take(bytes)?);
    Some((object.big(2)?, object))
}
