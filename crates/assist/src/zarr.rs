//! Zarr: an array is a folder, and each of its chunks a file, named by its place in a grid. A small file at the top, `.zarray`
//! (version 2) or `zarr.json` (version 3), tells how large the grid is and how names are made.
//!
//! A chunk may itself be made of many, as a "shard": the index in it is followed by [`crate::formats`].
//!
//! The names' own order is seldom that of the grid: `0.10` comes before `0.2`. So the grid is followed as the extents of a
//! file are, one chunk an extent, by the same [`Tracks`]: rows, columns and slices of it are all steps. Reading the file
//! at the top is the caller's matter, so this is a state machine without I/O.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use impresario_foresight::{EXTENTS_MAX, Tracks};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Arrays that are followed at once, and folders that are known not to be one.
const ARRAYS_MAX: usize = 8;
const OTHERS_MAX: usize = 64;
/// Sides of a grid; with a folder for each, that is how far up the top may be.
const SIDES_MAX: usize = 16;
/// A chunk counts as at least so long, so that a grid of many small ones is not followed too far; and at most.
const CHUNK_BYTES: (u64, u64) = (64 << 10, 8 << 20);
/// Of the file at the top, which may hold attributes of any length.
pub const METADATA_BYTES_MAX: u64 = 1 << 20;

/// Reads a small file; `None` where there is none, or it is longer than [`METADATA_BYTES_MAX`].
pub type ReadSmall<'a> = dyn FnMut(&Path) -> Option<Vec<u8>> + 'a;

/// How the names of chunks are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Names {
    separator: char,
    /// The first part is `c`.
    has_c: bool,
}

/// The grid of an array's chunks.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Grid {
    counts: Vec<u64>,
    names: Names,
    is_of_shards: bool,
}

#[derive(Deserialize)]
struct Version2 {
    zarr_format: u64,
    shape: Vec<u64>,
    chunks: Vec<u64>,
    #[serde(default = "dot")]
    dimension_separator: char,
}

#[derive(Deserialize)]
struct Version3 {
    zarr_format: u64,
    node_type: String,
    shape: Vec<u64>,
    chunk_grid: Part,
    chunk_key_encoding: Part,
    #[serde(default)]
    codecs: Codecs,
}

#[derive(Deserialize)]
struct Part {
    name: String,
    #[serde(default)]
    configuration: Configuration,
}

#[derive(Deserialize, Default)]
struct Configuration {
    #[serde(default)]
    chunk_shape: Vec<u64>,
    separator: Option<char>,
}

/// What is known of codecs: whether one of them makes shards. What else is said of them is passed over: kept in memory it would be many
/// times as long.
#[derive(Default)]
struct Codecs {
    make_shards: bool,
}

impl<'de> Deserialize<'de> for Codecs {
    fn deserialize<D: Deserializer<'de>>(codecs: D) -> Result<Codecs, D::Error> {
        codecs.deserialize_any(Codecs::default())
    }
}

/// Of a list, and of each codec in it: an object, or only a name.
impl<'de> Visitor<'de> for Codecs {
    type Value = Codecs;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("codecs")
    }

    fn visit_unit<E>(self) -> Result<Codecs, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Codecs, E> {
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Codecs, A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key == "name" {
                true => self.make_shards |= map.next_value::<String>()? == "sharding_indexed",
                false => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Codecs, A::Error> {
        while let Some(codec) = list.next_element::<Codecs>()? {
            self.make_shards |= codec.make_shards;
        }
        Ok(self)
    }
}

fn dot() -> char {
    '.'
}

impl Grid {
    /// From the bytes of `.zarray`.
    fn version_2(bytes: &[u8]) -> Option<Grid> {
        let array: Version2 = serde_json::from_slice(bytes).ok()?;
        let names = Names { separator: array.dimension_separator, has_c: false };
        (array.zarr_format == 2).then(|| Grid::new(&array.shape, &array.chunks, names))?
    }

    /// From the bytes of `zarr.json`.
    fn version_3(bytes: &[u8]) -> Option<Grid> {
        let array: Version3 = serde_json::from_slice(bytes).ok()?;
        let separator = array.chunk_key_encoding.configuration.separator;
        let names = match array.chunk_key_encoding.name.as_str() {
            "default" => Names { separator: separator.unwrap_or('/'), has_c: true },
            "v2" => Names { separator: separator.unwrap_or('.'), has_c: false },
            _ => return None,
        };
        let is_known = array.zarr_format == 3 && array.node_type == "array" && array.chunk_grid.name == "regular";
        let grid = is_known.then(|| Grid::new(&array.shape, &array.chunk_grid.configuration.chunk_shape, names))??;
        Some(Grid { is_of_shards: array.codecs.make_shards, ..grid })
    }

    /// `None` for a grid of more chunks than are followed, or one that nobody could have made.
    fn new(shape: &[u64], chunk: &[u64], names: Names) -> Option<Grid> {
        if shape.len() != chunk.len() || !(1..=SIDES_MAX).contains(&shape.len()) || chunk.contains(&0) {
            return None;
        }
        let counts: Vec<u64> = shape.iter().zip(chunk).map(|(side, chunk)| side.div_ceil(*chunk)).collect();
        let all = counts.iter().try_fold(1u64, |all, count| all.checked_mul(*count));
        let is_followed = all.is_some_and(|all| (2..=EXTENTS_MAX as u64).contains(&all));
        (is_followed && matches!(names.separator, '.' | '/')).then_some(Grid { counts, names, is_of_shards: false })
    }

    fn chunks(&self) -> u64 {
        self.counts.iter().product()
    }

    /// The number of the chunk of this name, below the array's folder.
    fn number(&self, name: &str) -> Option<u64> {
        let name = match self.names.has_c {
            true => name.strip_prefix('c')?.strip_prefix(self.names.separator)?,
            false => name,
        };
        let mut parts = name.split(self.names.separator);
        let number = self.counts.iter().try_fold(0u64, |number, count| {
            let part = parts.next().filter(|part| part.bytes().all(|b| b.is_ascii_digit()))?;
            let place = part.parse::<u64>().ok().filter(|place| place < count)?;
            Some(number * count + place)
        })?;
        parts.next().is_none().then_some(number)
    }

    /// The name of a chunk.
    fn name(&self, mut number: u64) -> String {
        let mut parts = Vec::new();
        for count in self.counts.iter().rev() {
            parts.push((number % count).to_string());
            number /= count;
        }
        if self.names.has_c {
            parts.push("c".into());
        }
        parts.reverse();
        parts.join(self.names.separator.to_string().as_str())
    }
}

#[derive(Debug)]
struct Array {
    folder: PathBuf,
    grid: Grid,
    chunk_bytes: u64,
    tracks: Tracks,
    is_followed: bool,
}

/// The arrays that programs read now.
#[derive(Debug, Default)]
pub struct Arrays {
    /// Last used first.
    arrays: VecDeque<Array>,
    /// Folders above files that look like chunks and belong to no array that is known.
    others: VecDeque<PathBuf>,
}

impl Arrays {
    /// A file was opened; its length is asked for once an array. The files to bring in now, nearest first, and how much of each at most; `None`
    /// where it is no chunk of an array that is known. `may` grants the bytes that this may be.
    pub fn opened(
        &mut self,
        path: &Path,
        file_bytes: impl FnOnce() -> u64,
        read: &mut ReadSmall<'_>,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<(PathBuf, u64)>> {
        looks_like_chunk(path).then_some(())?;
        let at = match self.arrays.iter().position(|array| path.starts_with(&array.folder)) {
            Some(at) => at,
            None => {
                let parent = path.parent()?;
                if self.others.iter().any(|other| other == parent) {
                    return None;
                }
                let Some((folder, grid)) = find(path, read) else {
                    self.others.push_front(parent.into());
                    self.others.truncate(OTHERS_MAX);
                    return None;
                };
                let file_bytes = file_bytes();
                let chunk_bytes = file_bytes.clamp(CHUNK_BYTES.0, CHUNK_BYTES.1);
                // Of a large shard nobody knows what is wanted before its index is read.
                let is_followed = !grid.is_of_shards || file_bytes <= CHUNK_BYTES.1;
                let extents = (0..grid.chunks()).map(|n| n * chunk_bytes..(n + 1) * chunk_bytes).collect();
                let tracks = Tracks::new([extents], grid.chunks() * chunk_bytes);
                self.arrays.push_front(Array { folder, grid, chunk_bytes, tracks, is_followed });
                self.arrays.truncate(ARRAYS_MAX);
                0
            }
        };
        let mut array = self.arrays.remove(at)?;
        let next = array.opened(path, may);
        self.arrays.push_front(array);
        next
    }
}

impl Array {
    fn opened(&mut self, path: &Path, may: &mut dyn FnMut(u64) -> bool) -> Option<Vec<(PathBuf, u64)>> {
        let number = self.grid.number(path.strip_prefix(&self.folder).ok()?.to_str()?)?;
        if !self.is_followed {
            return Some(Vec::new());
        }
        let chunk = |number: u64| number * self.chunk_bytes..(number + 1) * self.chunk_bytes;
        let next = self.tracks.read(0, &chunk(number), may).unwrap_or_default().next;
        let numbers = next.into_iter().flat_map(|bytes| bytes.start / self.chunk_bytes..bytes.end / self.chunk_bytes);
        Some(numbers.map(|number| (self.folder.join(self.grid.name(number)), self.chunk_bytes)).collect())
    }
}

/// Whether the last part of a path may be that of a chunk: numbers, and what stands between them.
pub fn looks_like_chunk(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_prefix("c.").unwrap_or(name);
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit() || b == b'.')
}

/// The array that a chunk belongs to. Only above folders that are named as parts of a chunk's name it is looked for
/// further up.
fn find(path: &Path, read: &mut ReadSmall<'_>) -> Option<(PathBuf, Grid)> {
    let mut folder = path.parent()?;
    for _ in 0..=SIDES_MAX {
        let mut grid_of = |name: &str, parse: fn(&[u8]) -> Option<Grid>| parse(&read(&folder.join(name))?);
        let grid = grid_of(".zarray", Grid::version_2).or_else(|| grid_of("zarr.json", Grid::version_3));
        if let Some(grid) = grid {
            return Some((folder.into(), grid));
        }
        let name = folder.file_name()?.to_str()?;
        if name != "c" && !name.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        folder = folder.parent()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V2: &str = r#"{"zarr_format":2,"shape":[100,70],"chunks":[10,10],"dtype":"<f4","compressor":null,"order":"C",
        "fill_value":0,"filters":null}"#;
    const V3: &str = r#"{"zarr_format":3,"node_type":"array","shape":[100,70],"data_type":"float32","attributes":{"a":1},
        "chunk_grid":{"name":"regular","configuration":{"chunk_shape":[10,10]}},
        "chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},"codecs":[],"fill_value":0}"#;

    /// Each way of naming: the file at the top, what it says, and the chunk in row 3 and column 12... of 10 by 7.
    fn ways() -> Vec<(&'static str, String, &'static str)> {
        let slashes = V2.replace("\"order\"", "\"dimension_separator\":\"/\",\"order\"");
        let dots = V3.replace("\"separator\":\"/\"", "\"separator\":\".\"");
        let bare = V3.replace(r#","configuration":{"separator":"/"}"#, "");
        let old = V3.replace(r#""default","configuration":{"separator":"/"}"#, r#""v2""#);
        vec![
            (".zarray", V2.into(), "9.6"),
            (".zarray", slashes, "9/6"),
            ("zarr.json", V3.into(), "c/9/6"),
            ("zarr.json", bare, "c/9/6"),
            ("zarr.json", dots, "c.9.6"),
            ("zarr.json", old, "9.6"),
        ]
    }

    fn grid(name: &str, says: &str) -> Option<Grid> {
        if name == ".zarray" { Grid::version_2(says.as_bytes()) } else { Grid::version_3(says.as_bytes()) }
    }

    #[test]
    fn names_of_each_way_lead_to_chunks_and_back() {
        for (top, says, last) in ways() {
            let grid = grid(top, &says).unwrap();
            assert_eq!((grid.chunks(), grid.name(69).as_str()), (70, last));
            for number in 0..70 {
                assert_eq!(grid.number(&grid.name(number)), Some(number), "{last}");
            }
            for wrong in
                ["", "9", "10.0", "0.7", "0.0.0", "c", "c/0", "+1.2", ".zarray", "c/0/0/0", "0.00000000000000000000009"]
            {
                assert_eq!(grid.number(wrong), None, "{last}: {wrong}");
            }
        }
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        let of = |from: &str, to: &str| grid(".zarray", &V2.replace(from, to)).is_some();
        assert!(of("x", "y") && !of("[10,10]", "[10]") && !of("[10,10]", "[0,10]") && !of(":2,", ":3,"));
        assert!(!of("[100,70]", "[10000000000,70]") && !of("[100,70]", "[18446744073709551615,18446744073709551615]"));
        assert!(
            !of("[100,70]", "[1,1]")
                && !of("[100,70]", "[]")
                && !of("[100,70]", "[0,70]")
                && !of("[100,70]", "[-1,70]")
        );
        let of = |from: &str, to: &str| grid("zarr.json", &V3.replace(from, to)).is_some();
        assert!(
            of("x", "y") && !of("regular", "rectangular") && !of("default", "other") && !of("\"array\"", "\"group\"")
        );
        assert!(!of("\"separator\":\"/\"", "\"separator\":\"-\""));
    }

    /// What comes of the opens of chunks in this order: how many had been brought in, and all that was.
    fn follow(top: &str, says: &str, order: impl Iterator<Item = u64>) -> (usize, Vec<PathBuf>) {
        let folder = Path::new("/data/a.zarr/x");
        let (grid, mut arrays) = (grid(top, says).unwrap(), Arrays::default());
        let (mut brought, mut hits, mut looked) = (Vec::new(), 0, 0);
        for number in order {
            let path = folder.join(grid.name(number));
            hits += usize::from(brought.contains(&path));
            let mut read = |path: &Path| {
                looked += 1;
                (path == folder.join(top)).then(|| says.as_bytes().to_vec())
            };
            let next = arrays.opened(&path, || 1 << 20, &mut read, &mut |_| true).unwrap();
            assert!(next.iter().all(|(_, bytes)| *bytes == 1 << 20));
            brought.extend(next.into_iter().map(|(path, _)| path));
        }
        assert!(looked <= 8, "{top}: the array is looked for once, not {looked} times");
        (hits, brought)
    }

    #[test]
    fn rows_columns_and_what_is_read_backward_come_before_they_are_opened() {
        for (top, says, _) in ways() {
            // All of it: the second chunk follows from the first.
            assert_eq!(follow(top, &says, 0..70).0, 69);
            // A column: the wrong neighbour once, then the step is known by its second time.
            let (hits, brought) = follow(top, &says, (0..10).map(|row| 3 + 7 * row));
            assert!(hits >= 7 && brought.len() <= 9, "{hits} {brought:?}");
            let (hits, _) = follow(top, &says, (0..70).rev());
            assert!(hits >= 66, "{hits}");
            // In no order: little for nothing.
            let (_, brought) = follow(top, &says, (0..60).map(|i| i * i * 31 % 70));
            assert!(brought.len() <= 12, "{brought:?}");
        }
    }

    #[test]
    fn of_large_shards_nothing_is_brought_in_by_their_names() {
        let codec = r#""codecs":[{"name":"sharding_indexed","configuration":{"chunk_shape":[2,2]}}]"#;
        let sharded = V3.replace(r#""codecs":[]"#, codec);
        let brought = |says: &str, shard_bytes: u64| {
            let mut arrays = Arrays::default();
            let mut read = |path: &Path| (path == Path::new("/a/zarr.json")).then(|| says.as_bytes().to_vec());
            let path = |n: u64| PathBuf::from(format!("/a/c/0/{n}"));
            let opened = |n| arrays.opened(&path(n), || shard_bytes, &mut read, &mut |_| true).unwrap().len();
            (0..6).map(opened).sum::<usize>()
        };
        assert_eq!(brought(&sharded, 100 << 20), 0);
        assert!(brought(&sharded, 1 << 20) > 4 && brought(V3, 100 << 20) > 1);
        assert!(brought(&V3.replace(r#""codecs":[]"#, r#""codecs":["bytes"]"#), 100 << 20) > 1);
    }

    #[test]
    fn what_is_not_granted_is_not_brought_in() {
        let says = V2.as_bytes();
        let mut arrays = Arrays::default();
        let mut read = |path: &Path| path.ends_with(".zarray").then(|| says.to_vec());
        for number in 0..20 {
            let path = PathBuf::from(format!("/a/0.{number}"));
            let next = arrays.opened(&path, || 1 << 20, &mut read, &mut |_| false);
            assert!(next.is_none_or(|next| next.is_empty()));
        }
    }

    #[test]
    fn other_files_are_looked_at_once_a_folder() {
        let (mut arrays, mut looked) = (Arrays::default(), 0);
        for n in 0..100 {
            for folder in ["/a/b", "/a/7/8", "/c"] {
                let mut read = |_: &Path| {
                    looked += 1;
                    None
                };
                let path = Path::new(folder).join(n.to_string());
                assert_eq!(arrays.opened(&path, || 1, &mut read, &mut |_| true), None);
                assert_eq!(arrays.opened(&path.with_extension("dat"), || 1, &mut read, &mut |_| true), None);
            }
        }
        // `c` may be a part of a name, so what is above it is looked at, too.
        assert_eq!(looked, 2 + 3 * 2 + 2 * 2);
        let mut none = |_: &Path| -> Option<Vec<u8>> { panic!("looked at for a name that is no chunk's") };
        assert_eq!(arrays.opened(Path::new("/a/run7.root"), || 1, &mut none, &mut |_| true), None);
        // Folders and arrays that are remembered are bounded.
        let says = V2.as_bytes();
        let mut read = |path: &Path| {
            path.to_str().is_some_and(|p| p.starts_with("/z") && p.ends_with(".zarray")).then(|| says.to_vec())
        };
        for n in 0..1000 {
            arrays.opened(Path::new(&format!("/y{n}/1")), || 1, &mut read, &mut |_| true);
            arrays.opened(Path::new(&format!("/z{n}/0.1")), || 1, &mut read, &mut |_| true);
        }
        assert!(arrays.arrays.len() <= ARRAYS_MAX && arrays.others.len() <= OTHERS_MAX);
    }

    proptest! {
        #[test]
        fn damaged_metadata_do_no_harm(
            which in 0usize..6,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            name in "[c0-9./]{0,24}",
        ) {
            let (top, says, _) = ways().swap_remove(which);
            let mut says = says.into_bytes();
            for (place, value) in changes {
                let at = place.index(says.len());
                says[at] = value;
            }
            let mut arrays = Arrays::default();
            let mut read = |path: &Path| path.ends_with(top).then(|| says.clone());
            for name in ["0.0", "c/0/1", "1/2", "c.3.3", &name] {
                let path = Path::new("/a").join(name);
                let next = arrays.opened(&path, || u64::MAX, &mut read, &mut |_| true).unwrap_or_default();
                prop_assert!(next.len() <= 64 && next.iter().all(|(path, _)| path.starts_with("/a")));
            }
        }
    }
}
