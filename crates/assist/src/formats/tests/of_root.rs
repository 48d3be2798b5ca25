//! Files of ROOT: trees and ntuples, written by hand and by uproot.

use twox_hash::XxHash3_64;

use super::*;

/// Numbers and texts as ROOT writes them, in files with wide seeks or narrow ones.
#[derive(Clone, Copy)]
pub(super) struct RootWriter {
    pub(super) is_wide: bool,
}

impl RootWriter {
    pub(super) fn int(self, n: u64) -> Vec<u8> {
        (n as u32).to_be_bytes().to_vec()
    }

    pub(super) fn long(self, n: u64) -> Vec<u8> {
        n.to_be_bytes().to_vec()
    }

    pub(super) fn short(self, n: u16) -> Vec<u8> {
        n.to_be_bytes().to_vec()
    }

    pub(super) fn text(self, text: &str) -> Vec<u8> {
        [&[text.len() as u8], text.as_bytes()].concat()
    }

    pub(super) fn seek(self, n: u64) -> Vec<u8> {
        if self.is_wide { self.long(n) } else { self.int(n) }
    }

    pub(super) fn counted(self, version: u16, body: Vec<u8>) -> Vec<u8> {
        [self.int(0x4000_0000 + 2 + body.len() as u64), self.short(version), body].concat()
    }

    /// A key, for an object that has these lengths packed and not.
    pub(super) fn key(self, at: u64, (packed, whole): (u64, u64), cycle: u16, class: &str, name: &str) -> Vec<u8> {
        let names = [self.text(class), self.text(name), self.text("")].concat();
        let head = 18 + self.seek(0).len() * 2 + names.len();
        let version = self.short(if self.is_wide { 1004 } else { 4 });
        let lengths = [self.int(head as u64 + packed), version, self.int(whole), self.int(0)].concat();
        let places = [self.short(head as u16), self.short(cycle), self.seek(at), self.seek(100)].concat();
        [lengths, places, names].concat()
    }

    pub(super) fn folder(self, list: u64, list_bytes: u64) -> Vec<u8> {
        let version = self.short(if self.is_wide { 1005 } else { 5 });
        let lengths = [version, self.int(0), self.int(0), self.int(list_bytes), self.int(60)].concat();
        [lengths, self.seek(100), self.seek(0), self.seek(list)].concat()
    }

    /// The list of a folder's keys.
    pub(super) fn list(self, keys: &[Vec<u8>]) -> Vec<u8> {
        let body = [self.int(keys.len() as u64), keys.concat()].concat();
        [self.key(0, (body.len() as u64, body.len() as u64), 1, "TFile", "f"), body].concat()
    }

    /// Makes bytes with room for a head into a file whose top folder has these keys.
    pub(super) fn file(self, mut bytes: Vec<u8>, keys: &[Vec<u8>], len: usize) -> Vec<u8> {
        let (top_at, top) = (bytes.len() as u64, self.list(keys));
        bytes.extend(&top);
        bytes.resize(len, 0);
        let version = self.int(if self.is_wide { 1_062_600 } else { 62_600 });
        let numbers = [version, self.int(100), self.seek(len as u64), self.seek(0), self.int(0), self.int(0)].concat();
        let head = [b"root".to_vec(), numbers, self.int(60)].concat();
        bytes[..head.len()].copy_from_slice(&head);
        let folder = self.folder(top_at, top.len() as u64);
        bytes[160..160 + folder.len()].copy_from_slice(&folder);
        bytes
    }
}

/// A file of one tree with a branch within a branch, laid out as in memory of ROOT's classes: the tree twice, of which the
/// second is the one that counts, in a folder below the first.
pub(super) fn root(version: u16, is_wide: bool, pack: impl Fn(&[u8]) -> Vec<u8>) -> (Vec<u8>, Vec<Track>) {
    let w = RootWriter { is_wide };
    let branch = |name: &str, inside: Vec<u8>, baskets: &Track| {
        // Room for two more, of which one is in memory.
        let all = |of: &dyn Fn(&Range<u64>) -> Vec<u8>, none: Vec<u8>| {
            [vec![1], baskets.iter().flat_map(of).collect(), none.repeat(2)].concat()
        };
        w.counted(
            version,
            [
                w.counted(1, [w.short(1), w.int(0), w.int(0x0300_0000), w.text(name), w.text("a title")].concat()),
                w.counted(2, vec![0; 4]),
                [w.int(101), w.int(32_000), w.int(0), w.int(baskets.len() as u64 + 1), w.long(900)].concat(),
                if version >= 13 { w.counted(1, vec![0]) } else { Vec::new() },
                [w.int(0), w.int(baskets.len() as u64 + 2), w.int(0), w.long(900)].concat(),
                w.long(0).repeat(if version >= 11 { 3 } else { 2 }),
                w.counted(3, inside),
                w.counted(3, vec![0; 9]),
                w.counted(3, vec![7; 30]),
                all(&|r| w.int(r.end - r.start), w.int(0)),
                all(&|r| w.long(r.start), w.long(0)),
                all(&|r| w.long(r.start), w.long(0)),
                w.text(""),
            ]
            .concat(),
        )
    };
    let place = |at: u64, n: u64| (0..n).map(|i| at - i * 700..at - i * 700 + 600 + i).collect::<Track>();
    let expected = vec![place(18_000, 9), place(30_000, 5)];
    let old = branch("px", Vec::new(), &place(18_000, 3));
    let new = branch("event", branch("px", Vec::new(), &expected[1]), &expected[0]);
    let (mut bytes, mut at_of) = (vec![0; 300], Vec::new());
    for (cycle, branches) in [(1, old), (2, new)] {
        let tree = w.counted(20, [vec![5; 100], w.counted(3, branches), vec![6; 50]].concat());
        let packed = pack(&tree);
        let at = bytes.len() as u64;
        let of_tree = w.key(at, (packed.len() as u64, tree.len() as u64), cycle, "TTree", "events");
        bytes.extend([of_tree.clone(), packed].concat());
        at_of.push(of_tree);
    }
    let below = w.list(&at_of);
    let below_at = bytes.len() as u64;
    bytes.extend(&below);
    let folder_at = bytes.len() as u64;
    let of_folder = w.key(folder_at, (60, 60), 1, "TDirectory", "run");
    bytes.extend([of_folder.clone(), w.folder(below_at, below.len() as u64)].concat());
    (w.file(bytes, &[w.key(1, (9, 9), 1, "TH1F", "h"), of_folder], 31_000), expected)
}

/// What is unusual about an ntuple, for tests of what is not understood.
#[derive(Default)]
pub(super) struct Odd {
    epoch: u16,
    header_flags: u64,
    footer_flags: u64,
    is_sharded: u8,
    locator: u32,
    other_header: u64,
    key_bytes_max: Option<u64>,
}

/// A file with an ntuple of three columns: three clusters in two groups, pages that lie in no order, the third column
/// suppressed in the first cluster, the second one with sums behind its pages.
pub(super) fn ntuple(pack: impl Fn(&[u8]) -> Vec<u8>, odd: &Odd) -> (Vec<u8>, Vec<Track>) {
    let long = |n: u64| n.to_le_bytes().to_vec();
    let int = |n: u32| n.to_le_bytes().to_vec();
    let record = |body: Vec<u8>| [long(8 + body.len() as u64), body].concat();
    let list = |items: Vec<Vec<u8>>, after: Vec<u8>| {
        let body = [items.concat(), after].concat();
        [(-12 - body.len() as i64).to_le_bytes().to_vec(), int(items.len() as u32), body].concat()
    };
    let envelope = |kind: u64, body: Vec<u8>| {
        let mut bytes = [long((body.len() as u64 + 16) << 16 | kind), body].concat();
        let sum = XxHash3_64::oneshot(&bytes);
        bytes.extend(long(sum));
        (bytes, sum)
    };
    let mut file = vec![0; 300];
    let mut put = |bytes: &[u8]| {
        let (packed, at) = (pack(bytes), file.len() as u64);
        file.extend(&packed);
        // What stands between them is keys.
        file.extend([0x55; 40]);
        (at, packed.len() as u64, bytes.len() as u64)
    };
    let schema = || (0..4).flat_map(|_| list(Vec::new(), Vec::new())).collect::<Vec<u8>>();
    let text = |text: &str| [int(text.len() as u32), text.as_bytes().to_vec()].concat();
    let names = [text("events"), text(""), text("a test")].concat();
    let (header, header_sum) = envelope(1, [long(odd.header_flags), names, schema()].concat());
    let header = put(&header);
    // The page of a column in a cluster, by its number: large ones say so.
    let page = |column: u64, cluster: u64, n: u64| {
        let at = 20_000 + column * 10_000 - cluster * 3_000 - n * 900;
        at..at + 500 + 10 * n + column
    };
    let locator = |page: &Range<u64>| {
        let bytes = page.end - page.start;
        match bytes % 2 {
            0 => [int(bytes as u32), long(page.start)].concat(),
            _ => [int((20 | (1 + odd.locator) << 24).wrapping_neg()), long(bytes), long(page.start)].concat(),
        }
    };
    let mut expected = vec![Track::new(); 3];
    let cluster = |cluster: u64, expected: &mut Vec<Track>| {
        let of_column = |column: u64| {
            if (column, cluster) == (2, 0) {
                return list(Vec::new(), long(1 << 63));
            }
            let item = |n: u64| {
                let (page, sum) = (page(column, cluster, n), column == 1);
                expected[column as usize].push(page.start..page.end + if sum { 8 } else { 0 });
                [int(100 | if sum { 1 << 31 } else { 0 }), locator(&page)].concat()
            };
            list((0..2 + column).map(item).collect(), [long(cluster * 100), int(505)].concat())
        };
        list((0..3).map(of_column).collect(), Vec::new())
    };
    let mut groups = Vec::new();
    for clusters in [0..2, 2..3] {
        let summary = |cluster: u64| {
            record([long(cluster * 100), vec![100, 0, 0, 0, 0, 0, 0, odd.is_sharded], vec![9; 5]].concat())
        };
        let summaries = list(clusters.clone().map(summary).collect(), Vec::new());
        let pages = list(clusters.clone().map(|n| cluster(n, &mut expected)).collect(), Vec::new());
        let (pages, _) = envelope(3, [long(header_sum), summaries, pages, vec![7; 4]].concat());
        let (at, packed, whole) = put(&pages);
        let link = [long(whole), int(packed as u32), long(at)].concat();
        groups.push(record([long(0), long(200), int(clusters.count() as u32), link].concat()));
    }
    let checked = long(header_sum ^ odd.other_header);
    let footer = [long(odd.footer_flags), checked, record(schema()), list(groups, Vec::new()), vec![3; 12]].concat();
    let footer = put(&envelope(2, footer).0);
    let w = RootWriter { is_wide: false };
    let links = [header, footer].into_iter().flat_map(|(at, packed, whole)| [at, packed, whole].map(|n| w.long(n)));
    let versions = [1u16.wrapping_add(odd.epoch), 0, 1, 0].map(|n| w.short(n)).concat();
    let fields = [versions, links.flatten().collect(), w.long(odd.key_bytes_max.unwrap_or(1 << 30))].concat();
    let sum = w.long(XxHash3_64::oneshot(&fields));
    let anchor = [w.counted(2, fields), sum].concat();
    let key = w.key(file.len() as u64, (anchor.len() as u64, anchor.len() as u64), 1, "ROOT::RNTuple", "events");
    file.extend([key.clone(), anchor].concat());
    (w.file(file, &[key], 60_000), expected)
}

#[test]
fn pages_of_an_ntuple_are_listed_column_by_column() {
    // As the specification of the sum has it.
    assert_eq!(XxHash3_64::oneshot(b""), 0x2d06_8005_38d3_94c2);
    let plain = |bytes: &[u8]| bytes.to_vec();
    let (bytes, expected) = ntuple(plain, &Odd::default());
    assert_eq!(expected.iter().map(Vec::len).collect::<Vec<_>>(), [6, 9, 8]);
    assert_eq!(tracks(&root::Root, &bytes), Some(expected.clone()));
    assert_eq!(tracks(&root::Root, &ntuple(zlib_of_root, &Odd::default()).0), Some(expected.clone()));
    let odds = [
        Odd { epoch: 1, ..Odd::default() },
        Odd { epoch: u16::MAX, ..Odd::default() },
        Odd { header_flags: 1, ..Odd::default() },
        Odd { footer_flags: 1 << 63, ..Odd::default() },
        Odd { is_sharded: 1, ..Odd::default() },
        Odd { locator: 1, ..Odd::default() },
        Odd { other_header: 4, ..Odd::default() },
        Odd { key_bytes_max: Some(60), ..Odd::default() },
    ];
    for (n, odd) in odds.iter().enumerate() {
        assert_eq!(tracks(&root::Root, &ntuple(plain, odd).0), Some(Vec::new()), "odd {n}");
    }
    for known in [Odd { is_sharded: 2, ..Odd::default() }, Odd { key_bytes_max: Some(0), ..Odd::default() }] {
        assert_eq!(tracks(&root::Root, &ntuple(plain, &known).0), Some(expected.clone()));
    }
    // One bit in any envelope, and it is not believed.
    let mut refused = 0;
    for at in (300..600).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        refused += usize::from(tracks(&root::Root, &damaged) == Some(Vec::new()));
    }
    assert!(refused >= 25, "{refused}");
}

/// As one block of this method.
fn block_of_root(method: &[u8; 3], bytes: &[u8], packed: &[u8]) -> Vec<u8> {
    let wide = |n: usize| n.to_le_bytes()[..3].to_vec();
    [method.to_vec(), wide(packed.len()), wide(bytes.len()), packed.to_vec()].concat()
}

pub(super) fn zlib_of_root(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    block_of_root(b"ZL\x08", bytes, &packed.finish().unwrap())
}

pub(super) fn lzma_of_root(bytes: &[u8]) -> Vec<u8> {
    let mut packed = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(5)).unwrap();
    packed.write_all(bytes).unwrap();
    block_of_root(b"XZ\0", bytes, &packed.finish().unwrap())
}

pub(super) fn lz4_of_root(bytes: &[u8]) -> Vec<u8> {
    let sum = [0; 8];
    block_of_root(b"L4\x01", bytes, &[&sum[..], &lz4_flex::block::compress(bytes)].concat())
}

pub(super) fn zstd_of_root(bytes: &[u8]) -> Vec<u8> {
    let packed = ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest);
    block_of_root(b"ZS\x01", bytes, &packed)
}

#[test]
fn trees_of_root_are_found_whatever_their_version_and_packing() {
    for version in 10..=13 {
        for is_wide in [false, true] {
            let (bytes, expected) = root(version, is_wide, <[u8]>::to_vec);
            assert_eq!(tracks(&root::Root, &bytes), Some(expected), "version {version}, {is_wide}");
            for pack in [zlib_of_root, lzma_of_root, lz4_of_root, zstd_of_root] as [fn(&[u8]) -> Vec<u8>; 4] {
                let (bytes, expected) = root(version, is_wide, pack);
                assert_eq!(tracks(&root::Root, &bytes), Some(expected), "version {version}, {is_wide}, packed");
            }
        }
    }
}

/// Every basket of a file that uproot has written, by what uproot itself tells of it.
#[test]
fn every_basket_of_uproot_is_where_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import json, numpy as np, uproot, awkward as ak
ways = dict(none=None, zlib=uproot.ZLIB(1), lzma=uproot.LZMA(1), lz4=uproot.LZ4(4), zstd=uproot.ZSTD(3))
written = {}
for name, way in ways.items():
    with uproot.recreate(name, compression=way) as f:
        tree = f.mktree("run/events", {f"b{i}": np.dtype("f8") for i in range(40)} | {"v": "var * float32"})
        for k in range(120):
            v = ak.unflatten(np.random.random(400).astype("f4"), [2] * 200)
            tree.extend({f"b{i}": np.random.random(200) for i in range(40)} | {"v": v})
        f["other"] = {"x": np.arange(10)}
    with uproot.open(name) as f:
        keys = lambda b: [b.basket_key(i) for i in range(b.num_baskets)]
        branches = f["run/events"].branches
        written[name] = [[[k.fSeekKey, k.fSeekKey + k.fNbytes] for k in keys(b)] for b in branches]
json.dump(written, open("written.json", "w"))
"#;
    if !python(script, dir.path(), "uproot, awkward") {
        return;
    }
    type Written = std::collections::BTreeMap<String, Vec<Vec<(u64, u64)>>>;
    let written: Written = serde_json::from_slice(&std::fs::read(dir.path().join("written.json")).unwrap()).unwrap();
    assert_eq!(written.len(), 5);
    for (name, branches) in written {
        let bytes = std::fs::read(dir.path().join(&name)).unwrap();
        let mut tracks = tracks(&root::Root, &bytes).unwrap();
        tracks.retain(|track| track.len() > 1);
        let expected: Vec<Track> = branches.iter().map(|b| b.iter().map(|(at, end)| *at..*end).collect()).collect();
        assert!(expected.len() > 40 && expected.iter().all(|track: &Track| track.len() == 120));
        assert!(tracks == expected, "{name}: {} of {}", tracks.len(), expected.len());
    }
}

/// Every page of an ntuple that uproot has written, by what uproot itself reads of it.
#[test]
fn every_page_of_uproot_is_where_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import json, numpy as np, uproot, awkward as ak
ways = dict(none=None, zlib=uproot.ZLIB(1), lzma=uproot.LZMA(1), lz4=uproot.LZ4(4), zstd=uproot.ZSTD(3))
written = {}
for name, way in ways.items():
    with uproot.recreate(name, compression=way) as f:
        def data():
            v = ak.unflatten(np.random.random(400).astype("f4"), [2] * 200)
            return ak.Array({f"b{i}": np.random.random(200) for i in range(40)} | {"v": v})
        ntuple = f.mkrntuple("run/events", data().layout.form)
        for k in range(60):
            ntuple.extend(data())
    with uproot.open(name) as f:
        clusters = f["run/events"].page_link_list
        columns = [[p.locator for c in clusters for p in c[i].pages] for i in range(len(clusters[0]))]
        written[name] = [[[l.offset, l.offset + l.num_bytes] for l in column] for column in columns]
json.dump(written, open("written.json", "w"))
"#;
    if !python(script, dir.path(), "uproot, awkward, xxhash") {
        return;
    }
    type Written = std::collections::BTreeMap<String, Vec<Vec<(u64, u64)>>>;
    let written: Written = serde_json::from_slice(&std::fs::read(dir.path().join("written.json")).unwrap()).unwrap();
    assert_eq!(written.len(), 5);
    for (name, columns) in written {
        let bytes = std::fs::read(dir.path().join(&name)).unwrap();
        let expected: Vec<Track> = columns.iter().map(|c| c.iter().map(|(at, end)| *at..*end).collect()).collect();
        assert!(expected.len() == 42 && expected.iter().all(|track: &Track| track.len() == 60), "{name}");
        let tracks = tracks(&root::Root, &bytes).unwrap();
        assert!(tracks == expected, "{name}: {} of {}", tracks.len(), expected.len());
    }
}
