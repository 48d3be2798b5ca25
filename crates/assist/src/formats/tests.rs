use std::process::Command;

use proptest::prelude::*;

use super::*;

/// What a reader makes of these bytes, without the bounds of a track.
fn tracks(format: &dyn Format, bytes: &[u8]) -> Option<Vec<Track>> {
    exercise::tracks(format, bytes)
}

// Small writers, from the formats' public descriptions.

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// Two row groups of three columns; the second column has a dictionary before its data.
fn parquet() -> (Vec<u8>, Vec<Track>) {
    let (mut bytes, mut expected) = (b"PAR1".to_vec(), vec![Track::new(); 3]);
    let list_of_two = |count: u8| count << 4 | 12;
    let mut footer = vec![0x15, 2, 0x19, list_of_two(1), 0x48, 3];
    footer.extend(b"abc\0");
    footer.extend([0x16, 20, 0x19, list_of_two(2)]);
    for group in 0..2u64 {
        footer.extend([0x19, list_of_two(3)]);
        for (column, track) in expected.iter_mut().enumerate() {
            let (at, len) = (bytes.len() as u64, 1000 + 10 * column as u64 + group);
            bytes.extend(vec![7; len as usize]);
            track.push(at..at + len);
            footer.extend([0x26, 0, 0x1c, 0x15, 2, 0x19, 0x15, 0, 0x19, 0x18, 1, b'x', 0x15, 0]);
            footer.push(0x16);
            footer.extend(varint(20));
            footer.push(0x16);
            footer.extend(varint(2 * len));
            footer.push(0x16);
            footer.extend(varint(2 * len));
            let data = if column == 1 { at + 100 } else { at };
            footer.push(0x26);
            footer.extend(varint(2 * data));
            if column == 1 {
                footer.push(0x26);
                footer.extend(varint(2 * at));
            }
            footer.extend([0, 0]);
        }
        footer.extend([0x16, 2, 0x16, 2, 0]);
    }
    footer.push(0);
    let len = footer.len() as u32;
    bytes.extend(footer);
    bytes.extend(len.to_le_bytes());
    bytes.extend(b"PAR1");
    (bytes, expected)
}

fn safetensors() -> (Vec<u8>, Vec<Track>) {
    let header = br#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[4],"data_offsets":[16,32]},
        "a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    let at = bytes.len() as u64;
    bytes.extend([1; 32]);
    (bytes, vec![vec![at..at + 16, at + 16..at + 32]])
}

/// Two record variables of three records and a fixed one of two rows.
fn netcdf(version: u8) -> (Vec<u8>, Vec<Track>) {
    let count = |n: u64| if version == 5 { n.to_be_bytes().to_vec() } else { (n as u32).to_be_bytes().to_vec() };
    let offset = |n: u64| if version == 1 { (n as u32).to_be_bytes().to_vec() } else { n.to_be_bytes().to_vec() };
    let tag = |n: u32| n.to_be_bytes().to_vec();
    let name = |name: &[u8]| {
        [count(name.len() as u64), name.to_vec(), vec![0; name.len().next_multiple_of(4) - name.len()]].concat()
    };
    let mut bytes = [b"CDF".to_vec(), vec![version], count(3)].concat();
    bytes.extend([tag(10), count(2), name(b"time"), count(0), name(b"x"), count(2)].concat());
    bytes.extend([tag(12), count(1), name(b"title"), tag(2), count(5), b"abcde\0\0\0".to_vec()].concat());
    let variable = |n: &[u8], dims: &[u64], bytes: u64, begin: u64| {
        let dims = [count(dims.len() as u64), dims.iter().flat_map(|d| count(*d)).collect()].concat();
        [name(n), dims, tag(0), count(0), tag(5), count(bytes), offset(begin)].concat()
    };
    bytes.extend([tag(11), count(3)].concat());
    bytes.extend(variable(b"t", &[0], 4, 1024));
    bytes.extend(variable(b"field", &[0, 1], 8192, 1028));
    bytes.extend(variable(b"grid", &[1, 1], 16384, 30000));
    bytes.resize(60_000, 9);
    let records = |begin: u64, len: u64| (0..3).map(|r| begin + r * 8196..begin + r * 8196 + len).collect::<Track>();
    (bytes, vec![records(1024, 4), records(1028, 8192), vec![30_000..38_192, 38_192..46_384]])
}

/// Runs a script; whether there is a Python with all of these modules.
fn python(script: &str, dir: &Path, modules: &str) -> bool {
    let wants = format!("import {modules}");
    let has = Command::new("python3").args(["-c", &wants]).output().is_ok_and(|out| out.status.success());
    if !has {
        impresario_testing::skip(modules, "python3 does not have it (Debian: python3-h5py; PyPI: uproot)");
        return false;
    }
    let out = Command::new("python3").args(["-c", script]).current_dir(dir).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    true
}

#[test]
fn each_format_lists_its_extents() {
    let (bytes, expected) = parquet();
    assert_eq!(tracks(&parquet::Parquet, &bytes), Some(expected));
    let (bytes, expected) = safetensors();
    assert_eq!(tracks(&safetensors::Safetensors, &bytes), Some(expected));
    for version in [1, 2, 5] {
        let (bytes, expected) = netcdf(version);
        assert_eq!(tracks(&netcdf::NetCdf, &bytes), Some(expected), "version {version}");
    }
}

#[test]
fn names_choose_the_readers() {
    let names = |path: &str| by_name(Path::new(path)).iter().map(|f| f.name()).collect::<Vec<_>>();
    assert_eq!(names("/d/a.Parquet"), ["Parquet"]);
    assert_eq!(names("/d/a.nc"), ["NetCDF classic", "HDF5"]);
    assert!(names("/d/parquet").is_empty() && names("/d/a.txt").is_empty());
    let mut none = |_: u64, _: &mut [u8]| panic!("nothing is read of a file that is nobody's");
    assert!(read(&by_name(Path::new("a.txt")), 1 << 30, &mut none).is_none());
}

/// Files of the real writers: every extent that the reader lists holds the bytes that the writer put there.
#[test]
fn files_of_numpy_and_h5py_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import numpy as np, h5py
a = np.arange(40 * 2048, dtype="<u4").reshape(40, 2048)
np.save("rows.npy", a)
np.savez("many.npz", **{f"m{i}": a[i] for i in range(40)})
for name, libver in (("old.h5", "earliest"), ("new.h5", "latest")):
    with h5py.File(name, "w", libver=libver) as f:
        f.create_dataset("g/chunked", data=a, chunks=(1, 2048))
        f.create_dataset("g/packed", data=a, chunks=(1, 2048), compression="gzip")
        f.create_dataset("plain", data=a)
        for i in range(3):
            f.create_group(f"empty{i}")
"#;
    if !python(script, dir.path(), "numpy, h5py") {
        return;
    }
    let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let row = |i: u32| (i * 2048..(i + 1) * 2048).flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let is_rows = |bytes: &[u8], track: &Track| {
        let at = |r: &Range<u64>| &bytes[r.start as usize..r.end as usize];
        track.len() == 40 && track.iter().zip(0..).all(|(extent, i)| at(extent).ends_with(&row(i)))
    };
    for name in ["rows.npy", "many.npz"] {
        let bytes = file(name);
        let tracks = tracks(&numpy::Numpy, &bytes).unwrap();
        assert!(tracks.len() == 1 && is_rows(&bytes, &tracks[0]), "{name}: {tracks:?}");
    }
    for name in ["old.h5", "new.h5"] {
        let bytes = file(name);
        let tracks = tracks(&hdf5::Hdf5, &bytes).unwrap();
        assert_eq!(tracks.iter().filter(|track| is_rows(&bytes, track)).count(), 2, "{name}: {tracks:?}");
        let packed = tracks.iter().find(|track| track.len() == 40 && !is_rows(&bytes, track)).unwrap();
        // Streams of zlib begin so.
        assert!(packed.iter().all(|extent| bytes[extent.start as usize] == 0x78), "{name}");
    }
}

/// Each index of chunks that the library has, by what it makes of a data set, against what the library itself tells of
/// every chunk.
#[test]
fn every_chunk_of_h5py_is_where_the_library_says() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import json, numpy as np, h5py
written = {}
def fill(d, step=1):
    # One chunk after the other, every `step`-th of them.
    for n, at in enumerate(d.iter_chunks()):
        if n % step == 0:
            d[at] = n + np.arange(d[at].size).reshape(d[at].shape)
for name, options in {
    "latest.h5": dict(libver="latest"),
    "earliest.h5": dict(libver="earliest"),
    "user.mat": dict(libver="latest", userblock_size=1024),
    "user-old.mat": dict(libver="earliest", userblock_size=512),
}.items():
    with h5py.File(name, "w", **options) as f:
        def make(key, shape, chunks, maxshape=None, step=1, **more):
            fill(f.create_dataset(key, shape=shape, chunks=chunks, maxshape=maxshape, dtype="<i4", **more), step)
        make("grows/plain", (900, 4), (1, 4), (None, 4))
        make("grows/packed", (300, 4), (1, 4), (None, 4), compression="gzip")
        make("grows/long", (6000,), (2,), (None,))
        make("grows/sparse", (6000,), (2,), (None,), step=37)
        make("grows/inside", (6, 40, 5), (2, 1, 2), (6, None, 8))
        make("grows/last", (5, 30), (1, 2), (9, None))
        make("grows/little", (3,), (1,), (None,))
        make("both/plain", (40, 60), (1, 2), (None, None))
        make("both/packed", (25, 30), (1, 2), (None, None), compression="gzip", shuffle=True)
        make("both/many", (100, 100), (1, 1), (None, None))
        make("both/sparse", (100, 100), (1, 1), (None, None), step=11)
        make("fixed/plain", (70, 10), (1, 5))
        make("fixed/packed", (70, 10), (1, 5), fletcher32=True)
        make("fixed/room", (30, 10), (1, 5), (50, 20))
        make("fixed/paged", (5000,), (1,))
        make("fixed/pages", (9000,), (1,), step=2500)
        for i in range(100):
            make(f"crowd/{i:03}", (3, 8 + i), (1, 8 + i), (None, 8 + i))
        f.create_group("tracked", track_order=True)
        for i in range(20):
            make(f"tracked/{i:03}", (4, 2), (1, 2))
        f["grows/soft"] = h5py.SoftLink("/both/plain")
        f["tracked/same"] = f["both/plain"]
    base = options.get("userblock_size", 0)
    raw = open(name, "rb").read()
    with h5py.File(name, "r") as f:
        sets = {}
        def see(key, d):
            if isinstance(d, h5py.Dataset):
                all = [d.id.get_chunk_info(i) for i in range(d.id.get_num_chunks())]
                # By their content where that can be read: HDF5 1.10 takes one dimension for the other if it is not the
                # first that grows.
                is_plain = d.compression is None and not d.fletcher32
                first = lambda at: int.from_bytes(raw[at:at + 4], "little")
                all.sort(key=lambda c: first(base + c.byte_offset) if is_plain else c.chunk_offset)
                sets[key] = [[base + c.byte_offset, c.size] for c in all]
        f.visititems(see)
        written[name] = sets
json.dump(written, open("written.json", "w"))
"#;
    if !python(script, dir.path(), "numpy, h5py") {
        return;
    }
    type Written = std::collections::BTreeMap<String, std::collections::BTreeMap<String, Vec<(u64, u64)>>>;
    let written: Written = serde_json::from_slice(&std::fs::read(dir.path().join("written.json")).unwrap()).unwrap();
    assert_eq!(written.len(), 4);
    for (name, sets) in written {
        let bytes = std::fs::read(dir.path().join(&name)).unwrap();
        let mut tracks = tracks(&hdf5::Hdf5, &bytes).unwrap();
        tracks.retain(|track| track.len() > 1);
        tracks.sort_by_key(|track| track[0].start);
        let of = |chunks: &Vec<(u64, u64)>| chunks.iter().map(|(at, len)| *at..at + len).collect::<Track>();
        let mut expected: Vec<Track> = sets.values().map(of).filter(|track| track.len() > 1).collect();
        expected.sort_by_key(|track| track[0].start);
        assert!(expected.len() > 130, "{name}: {}", expected.len());
        for (set, chunks) in &sets {
            assert!(chunks.len() < 2 || tracks.contains(&of(chunks)), "{name}: {set}");
        }
        assert_eq!(tracks, expected, "{name}");
    }
}

/// A file of one tree with a branch within a branch, laid out as in memory of ROOT's classes: the tree twice, of which the
/// second is the one that counts, in a folder below the first.
fn root(version: u16, is_wide: bool, pack: impl Fn(&[u8]) -> Vec<u8>) -> (Vec<u8>, Vec<Track>) {
    let int = |n: u64| (n as u32).to_be_bytes().to_vec();
    let long = |n: u64| n.to_be_bytes().to_vec();
    let short = |n: u16| n.to_be_bytes().to_vec();
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let seek = |n: u64| if is_wide { long(n) } else { int(n) };
    let counted =
        |version: u16, body: Vec<u8>| [int(0x4000_0000 + 2 + body.len() as u64), short(version), body].concat();
    let branch = |name: &str, inside: Vec<u8>, baskets: &Track| {
        // Room for two more, of which one is in memory.
        let all = |of: &dyn Fn(&Range<u64>) -> Vec<u8>, none: Vec<u8>| {
            [vec![1], baskets.iter().flat_map(of).collect(), none.repeat(2)].concat()
        };
        counted(
            version,
            [
                counted(1, [short(1), int(0), int(0x0300_0000), text(name), text("a title")].concat()),
                counted(2, vec![0; 4]),
                [int(101), int(32_000), int(0), int(baskets.len() as u64 + 1), long(900)].concat(),
                if version >= 13 { counted(1, vec![0]) } else { Vec::new() },
                [int(0), int(baskets.len() as u64 + 2), int(0), long(900)].concat(),
                long(0).repeat(if version >= 11 { 3 } else { 2 }),
                counted(3, inside),
                counted(3, vec![0; 9]),
                counted(3, vec![7; 30]),
                all(&|r| int(r.end - r.start), int(0)),
                all(&|r| long(r.start), long(0)),
                all(&|r| long(r.start), long(0)),
                text(""),
            ]
            .concat(),
        )
    };
    let key_version = short(if is_wide { 1004 } else { 4 });
    let key = |at: u64, (packed, whole): (u64, u64), cycle: u16, class: &str, name: &str| {
        let names = [text(class), text(name), text("")].concat();
        let head = 18 + seek(0).len() * 2 + names.len();
        [
            [int(head as u64 + packed), key_version.clone(), int(whole), int(0), short(head as u16), short(cycle)]
                .concat(),
            [seek(at), seek(100), names].concat(),
        ]
        .concat()
    };
    let folder = |list: u64, list_bytes: u64| {
        let version = short(if is_wide { 1005 } else { 5 });
        [version, int(0), int(0), int(list_bytes), int(60), seek(100), seek(0), seek(list)].concat()
    };
    let lists = |keys: &[Vec<u8>]| {
        let body = [int(keys.len() as u64), keys.concat()].concat();
        [key(0, (body.len() as u64, body.len() as u64), 1, "TFile", "f"), body].concat()
    };
    let place = |at: u64, n: u64| (0..n).map(|i| at - i * 700..at - i * 700 + 600 + i).collect::<Track>();
    let expected = vec![place(18_000, 9), place(30_000, 5)];
    let old = branch("px", Vec::new(), &place(18_000, 3));
    let new = branch("event", branch("px", Vec::new(), &expected[1]), &expected[0]);
    let (mut bytes, mut at_of) = (vec![0; 300], Vec::new());
    for (cycle, branches) in [(1, old), (2, new)] {
        let tree = counted(20, [vec![5; 100], counted(3, branches), vec![6; 50]].concat());
        let packed = pack(&tree);
        let at = bytes.len() as u64;
        let of_tree = key(at, (packed.len() as u64, tree.len() as u64), cycle, "TTree", "events");
        bytes.extend([of_tree.clone(), packed].concat());
        at_of.push(of_tree);
    }
    let below = lists(&at_of);
    let below_at = bytes.len() as u64;
    bytes.extend(&below);
    let folder_at = bytes.len() as u64;
    let of_folder = key(folder_at, (60, 60), 1, "TDirectory", "run");
    bytes.extend([of_folder.clone(), folder(below_at, below.len() as u64)].concat());
    let top = lists(&[key(1, (9, 9), 1, "TH1F", "h"), of_folder]);
    let top_at = bytes.len() as u64;
    bytes.extend(&top);
    bytes.resize(31_000, 0);
    let head =
        [int(if is_wide { 1_062_600 } else { 62_600 }), int(100), seek(31_000), seek(0), int(0), int(0), int(60)];
    let head = [b"root".to_vec(), head.concat()].concat();
    bytes[..head.len()].copy_from_slice(&head);
    let folder = folder(top_at, top.len() as u64);
    bytes[160..160 + folder.len()].copy_from_slice(&folder);
    (bytes, expected)
}

/// As one block of zlib.
fn zlib_of_root(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, bytes).unwrap();
    let packed = packed.finish().unwrap();
    let wide = |n: usize| n.to_le_bytes()[..3].to_vec();
    [b"ZL\x08".to_vec(), wide(packed.len()), wide(bytes.len()), packed].concat()
}

#[test]
fn trees_of_root_are_found_whatever_their_version_and_packing() {
    for version in 10..=13 {
        for is_wide in [false, true] {
            let (bytes, expected) = root(version, is_wide, <[u8]>::to_vec);
            assert_eq!(tracks(&root::Root, &bytes), Some(expected), "version {version}, {is_wide}");
            let (bytes, expected) = root(version, is_wide, zlib_of_root);
            assert_eq!(tracks(&root::Root, &bytes), Some(expected), "version {version}, {is_wide}, packed");
        }
    }
}

/// Every basket of a file that uproot has written, by what uproot itself tells of it.
#[test]
fn every_basket_of_uproot_is_where_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import json, numpy as np, uproot, awkward as ak
ways = dict(none=None, zlib=uproot.ZLIB(1), lz4=uproot.LZ4(4), zstd=uproot.ZSTD(3))
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
    assert_eq!(written.len(), 4);
    for (name, branches) in written {
        let bytes = std::fs::read(dir.path().join(&name)).unwrap();
        let mut tracks = tracks(&root::Root, &bytes).unwrap();
        tracks.retain(|track| track.len() > 1);
        let expected: Vec<Track> = branches.iter().map(|b| b.iter().map(|(at, end)| *at..*end).collect()).collect();
        assert!(expected.len() > 40 && expected.iter().all(|track: &Track| track.len() == 120));
        assert!(tracks == expected, "{name}: {} of {}", tracks.len(), expected.len());
    }
}

fn whole_files() -> Vec<Vec<u8>> {
    let mut files = vec![parquet().0, safetensors().0, netcdf(1).0, netcdf(5).0];
    files.extend([hdf5_by_hand(), root(13, false, <[u8]>::to_vec).0, root(13, true, zlib_of_root).0]);
    files
}

/// A file of version 0 with a data set in four chunks, written by hand: the tests of damaged files need no Python.
fn hdf5_by_hand() -> Vec<u8> {
    let long = |n: u64| n.to_le_bytes().to_vec();
    let none = u64::MAX;
    let mut file = b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0\x04\0\x10\0\0\0\0\0".to_vec();
    file.extend([long(0), long(none), long(9000), long(none), long(0), long(96), vec![0; 24]].concat());
    file.resize(96, 0);
    let message = |kind: u16, body: Vec<u8>| {
        [kind.to_le_bytes().to_vec(), (body.len() as u16).to_le_bytes().to_vec(), vec![0; 4], body].concat()
    };
    let header = |messages: Vec<u8>| {
        [vec![1, 0, 1, 0, 1, 0, 0, 0], (messages.len() as u32).to_le_bytes().to_vec(), vec![0; 4], messages].concat()
    };
    file.extend(header(message(0x11, [long(200), long(160)].concat())));
    file.resize(200, 0);
    file.extend([b"TREE\0\0\x01\0".to_vec(), long(none), long(none), long(0), long(300), long(8)].concat());
    file.resize(300, 0);
    file.extend([b"SNOD\x01\0\x01\0".to_vec(), long(8), long(400), vec![0; 24]].concat());
    file.resize(400, 0);
    let space = [vec![1, 1, 0, 0, 0, 0, 0, 0], long(4000)].concat();
    let layout = [vec![3, 2, 2], long(600), 1000u32.to_le_bytes().to_vec(), 1u32.to_le_bytes().to_vec(), vec![0; 5]];
    file.extend(header([message(1, space), message(8, layout.concat())].concat()));
    file.resize(600, 0);
    file.extend([b"TREE\x01\0\x04\0".to_vec(), long(none), long(none)].concat());
    for i in 0..4 {
        file.extend(
            [1000u32.to_le_bytes().to_vec(), vec![0; 4], long(i * 1000), long(0), long(5000 - 1000 * i)].concat(),
        );
    }
    file.resize(9000, 3);
    file
}

/// Small files of each kind of index that h5py has, damaged in many ways.
#[test]
fn damaged_files_of_h5py_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import numpy as np, h5py
for name, latest in (("a.h5", "latest"), ("b.h5", "earliest")):
    with h5py.File(name, "w", libver=latest, track_order=True, userblock_size=512) as f:
        for i, most in enumerate([(None, 2), (None, None), (40, 2), (60, 4)]):
            f.create_dataset(f"d{i}", data=np.ones((40, 2), "u1"), chunks=(1, 1), maxshape=most)
        for i in range(12):
            f.create_dataset(f"e{i}", data=np.ones((6, 6), "u1"), chunks=(1, 2), maxshape=(None, 6), compression="gzip")
"#;
    if !python(script, dir.path(), "numpy, h5py") {
        return;
    }
    let files = ["a.h5", "b.h5"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    assert!(files.iter().all(|bytes| tracks(&hdf5::Hdf5, bytes).unwrap().len() == 16));
    // Bytes anywhere, and those of numbers that lead elsewhere: what a first look has read stands around signatures.
    let signed = |bytes: &[u8]| {
        let is = |w: &[u8]| {
            [&b"BTHD"[..], b"BTLF", b"BTIN", b"EAHD", b"EAIB", b"EASB", b"EADB", b"FAHD", b"FRHP", b"FHIB", b"OHDR"]
                .contains(&w)
        };
        bytes.windows(4).enumerate().filter(|(_, w)| is(w)).map(|(at, _)| at).collect::<Vec<_>>()
    };
    let signed = [signed(&files[0]), signed(&files[1])];
    assert!(signed[0].len() > 30, "{}", signed[0].len());
    let change = (any::<prop::sample::Index>(), 0usize..80, any::<u8>(), any::<bool>());
    let damage = (0usize..2, prop::collection::vec(change, 1..6));
    proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500))
        .run(&damage, |(which, changes)| {
            let mut bytes = files[which].clone();
            for (place, after, value, is_anywhere) in changes {
                let at = match is_anywhere || signed[which].is_empty() {
                    true => place.index(bytes.len()),
                    false => (signed[which][place.index(signed[which].len())] + after).min(bytes.len() - 1),
                };
                bytes[at] = value;
            }
            exercise::read_everything(&bytes);
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_file_by_hand_is_understood() {
    let chunks = [5000, 4000, 3000, 2000].map(|at| at..at + 1000);
    assert_eq!(tracks(&hdf5::Hdf5, &hdf5_by_hand()), Some(vec![chunks.to_vec()]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_files_do_no_harm(
        which in 0usize..7,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let mut bytes = whole_files().swap_remove(which);
        // Most of what matters stands at the beginning and at the end.
        for (place, value) in changes {
            let n = bytes.len();
            let i = place.index(2 * n.min(700));
            let i = if i < n.min(700) { i } else { n - (i - n.min(700)).min(n - 1) - 1 };
            bytes[i] = value;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()) + 1);
        }
        exercise::read_everything(&bytes);
    }

    #[test]
    fn random_bytes_do_no_harm(start in 0usize..7, bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let starts: [&[u8]; 7] = [b"root\0\0\xf2\x48\0\0\0\x64", b"", b"\x93NUMPY\x01\0", b"PK\x03\x04", b"CDF\x01", b"\x89HDF\r\n\x1a\n\0", b"\x10\0\0\0\0\0\0\0"];
        let ends: &[u8] = if start == 3 { b"PK\x05\x06" } else { b"" };
        exercise::read_everything(&[starts[start], &bytes, ends].concat());
        exercise::read_everything(&[&bytes, &(bytes.len() as u32).to_le_bytes()[..], b"PAR1"].concat());
    }
}
