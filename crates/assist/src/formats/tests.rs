mod of_root;

use std::io::{Read as _, Write};
use std::process::Command;
use std::time::Duration;

use proptest::prelude::*;

use super::source::Modelled;
use super::*;
use of_root::{Odd, RootWriter, lz4_of_root, lzma_of_root, ntuple, zlib_of_root, zstd_of_root};

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
    let said = if version == 5 { u64::MAX } else { 0xffff_ffff };
    let variables: [(&[u64], u32, u64); 3] = [(&[0], 5, 1024), (&[0, 2], 5, 1028), (&[1, 2], 5, 30_000)];
    let mut bytes = netcdf_header(version, said, &variables);
    bytes.resize(60_000, 9);
    let records = |begin: u64, len: u64| (0..3).map(|r| begin + r * 8196..begin + r * 8196 + len).collect::<Track>();
    (bytes, vec![records(1024, 4), records(1028, 8192), vec![30_000..38_192, 38_192..46_384]])
}

/// A header with three records, sides without a bound, of 2 and of 2048, and variables: their sides, type, and first byte. All of
/// them are `said` to be so long, as variables of more than 4 GiB are.
fn netcdf_header(version: u8, said: u64, variables: &[(&[u64], u32, u64)]) -> Vec<u8> {
    let count = |n: u64| if version == 5 { n.to_be_bytes().to_vec() } else { (n as u32).to_be_bytes().to_vec() };
    let offset = |n: u64| if version == 1 { (n as u32).to_be_bytes().to_vec() } else { n.to_be_bytes().to_vec() };
    let tag = |n: u32| n.to_be_bytes().to_vec();
    let name = |name: &[u8]| {
        [count(name.len() as u64), name.to_vec(), vec![0; name.len().next_multiple_of(4) - name.len()]].concat()
    };
    let mut bytes = [b"CDF".to_vec(), vec![version], count(3)].concat();
    bytes.extend([tag(10), count(3), name(b"time"), count(0), name(b"x"), count(2), name(b"y"), count(2048)].concat());
    bytes.extend([tag(12), count(1), name(b"title"), tag(2), count(5), b"abcde\0\0\0".to_vec()].concat());
    bytes.extend([tag(11), count(variables.len() as u64)].concat());
    for (sides, of, begin) in variables {
        let sides = [count(sides.len() as u64), sides.iter().flat_map(|d| count(*d)).collect()].concat();
        bytes.extend([name(b"field"), sides, tag(0), count(0), tag(*of), count(said), offset(*begin)].concat());
    }
    bytes
}

/// Runs a script; whether there is a Python with all of these modules.
#[track_caller]
fn python(script: &str, dir: &Path, modules: &str) -> bool {
    let Some(python) = impresario_testing::python(modules) else { return false };
    let out = Command::new(python).args(["-c", script]).current_dir(dir).output().unwrap();
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
fn what_a_netcdf_file_says_of_lengths_is_not_believed() {
    let tracks_of = |variables: &[(&[u64], u32, u64)]| {
        let mut bytes = netcdf_header(2, 4, variables);
        bytes.resize(90_000, 9);
        tracks(&netcdf::NetCdf, &bytes).unwrap()
    };
    let records =
        |begin: u64, step: u64, len: u64| (0..3).map(|r| begin + r * step..begin + r * step + len).collect::<Track>();
    let (bytes, shorts): ((&[u64], u32, u64), _) = ((&[0], 1, 1024), (&[0, 1][..], 3, 2048));
    // Alone, short items stand without a gap; beside others each variable begins at a multiple of four.
    assert_eq!(tracks_of(&[bytes]), [records(1024, 1, 1)]);
    assert_eq!(tracks_of(&[(&[0], 3, 1024)]), [records(1024, 2, 2)]);
    assert_eq!(tracks_of(&[bytes, shorts]), [records(1024, 8, 1), records(2048, 8, 4)]);
    // Two rows of 2048 doubles, and one of as many shorts.
    assert_eq!(tracks_of(&[(&[1, 2], 6, 4096), (&[2], 3, 1000)]), [vec![4096..20_480, 20_480..36_864], vec![]]);
    let most = netcdf_header(5, 4, &[(&[2; 6], 6, 1024)]);
    assert_eq!(tracks(&netcdf::NetCdf, &most), None, "no file is so long");
}

/// A user's files must not fill the memory of a manager that serves others, too.
#[test]
fn a_header_takes_no_more_memory_than_it_is_long() {
    let of = |header: String| {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1; 32]].concat();
        tracks(&safetensors::Safetensors, &bytes)
    };
    let zeros = |count: usize| format!(r#"{{"a":{{"shape":[0{}],"data_offsets":[0,16]}}}}"#, ",0".repeat(count));
    assert_eq!(of(zeros(2 << 20)), None, "longer than 4 MiB");
    let in_the_way = of(zeros(2000)).unwrap();
    assert_eq!(in_the_way[0].len(), 1);
    assert_eq!(of(format!(r#"{{"a":[0{}]}}"#, ",0".repeat(4_000_000))), None);
    assert_eq!(of(format!(r#"{{"a":[0{}]}}"#, ",0".repeat(1_000_000))), None, "that is no tensor");
}

/// What reading the index of a file took.
fn spent(format: &'static dyn Format, bytes: &[u8]) -> Spent {
    let read_at = |at: u64, out: &mut [u8]| {
        let from = &bytes[at as usize..];
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        Ok(len)
    };
    let mut source = Source::new(&read_at, bytes.len() as u64, Some(Duration::from_secs(60)));
    format.tracks(&mut source).unwrap();
    source.spent()
}

/// Where a request takes long, an index in one place takes one of them, and folders of a level are read together.
#[test]
fn no_request_waits_for_another_without_need() {
    let before = |bytes: Vec<u8>| [vec![0; 1 << 20], bytes].concat();
    let behind = |bytes: Vec<u8>| [bytes, vec![0; 1 << 20]].concat();
    assert_eq!(spent(&parquet::Parquet, &before(parquet().0)).rounds, [1]);
    assert_eq!(spent(&safetensors::Safetensors, &behind(safetensors().0)).rounds, [1]);
    assert_eq!(spent(&netcdf::NetCdf, &behind(netcdf(5).0)).rounds, [1]);
    let directory = [&b"PK\x01\x02"[..], &[0; 42]].concat().repeat(400);
    let numbers = [(400u16).to_le_bytes().to_vec(), (directory.len() as u32).to_le_bytes().to_vec()].concat();
    let end = [&b"PK\x05\x06"[..], &[0; 6], &numbers, &(1u32 << 20).to_le_bytes(), &[0; 2]].concat();
    let mut archive = before([directory, end].concat());
    archive[..4].copy_from_slice(b"PK\x03\x04");
    assert_eq!(spent(&numpy::Numpy, &archive).rounds, [1, 1]);

    let (w, far) = (RootWriter { is_wide: true }, 100_000);
    let (mut bytes, mut keys) = (vec![0; 300], Vec::new());
    for i in 0..30 {
        let list_at = bytes.len() as u64;
        bytes.extend(w.list(&[]));
        let list_bytes = bytes.len() as u64 - list_at;
        bytes.resize(bytes.len() + far, 0);
        let key = w.key(bytes.len() as u64, (60, 60), 1, "TDirectory", &format!("run{i}"));
        bytes.extend([key.clone(), w.folder(list_at, list_bytes)].concat());
        bytes.resize(bytes.len() + far, 0);
        keys.push(key);
    }
    let len = bytes.len() + far;
    let spent = spent(&root::Root, &w.file(bytes, &keys, len));
    assert!(spent.requests > 55 && spent.rounds.len() <= 6, "{spent:?}");
}

/// Headers that are longer than the first request, and a chain that runs backwards through them: one more request.
#[test]
fn a_long_beginning_takes_two_requests() {
    for header_bytes in [5 << 10, 20 << 10, 60 << 10] {
        let entry = |i: u64| {
            format!(r#""layer{i:06}":{{"dtype":"F32","shape":[4],"data_offsets":[{},{}]}}"#, i * 16, i * 16 + 16)
        };
        let entries: Vec<String> = (0..header_bytes / 80).map(entry).collect();
        let header = format!("{{{}}}", entries.join(","));
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![1; 2 << 20]].concat();
        let spent = spent(&safetensors::Safetensors, &bytes);
        assert!(header.len() > 4096 && spent.rounds == [1, 1], "{header_bytes}: {spent:?}");
    }
    let file: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
    let read_at = |at: u64, out: &mut [u8]| {
        out.copy_from_slice(&file[at as usize..][..out.len()]);
        Ok(out.len())
    };
    let mut source = Source::new(&read_at, file.len() as u64, Some(Duration::from_secs(60)));
    source.beginning();
    for at in (1..16).rev().map(|i| i * 4096 - 10) {
        assert_eq!(source.bytes(at, 20).as_deref(), Some(&file[at as usize..][..20]));
        source.ahead([(at + 100, 8)]);
    }
    assert_eq!(source.bytes((64 << 10) - 10, 20).as_deref(), Some(&file[(64 << 10) - 10..][..20]));
    assert_eq!((source.spent().rounds, source.spent().bytes), (vec![1, 1, 1], (64 << 10) + 4096));
}

/// Members of a group, each with a header of its own behind one another.
#[test]
fn dozens_of_members_take_few_turns() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import numpy as np, h5py
for name, libver in (("old.h5", "earliest"), ("new.h5", "latest")):
    with h5py.File(name, "w", libver=libver) as f:
        for i in range(48):
            f.create_dataset(f"g/member{i}", data=np.arange(40 * 256, dtype="<u4").reshape(40, 256), chunks=(1, 256))
"#;
    if !python(script, dir.path(), "numpy, h5py") {
        return;
    }
    for name in ["old.h5", "new.h5"] {
        let spent = spent(&hdf5::Hdf5, &std::fs::read(dir.path().join(name)).unwrap());
        assert!(spent.rounds.len() <= 12, "{name}: {spent:?}");
    }
}

#[test]
fn names_choose_the_readers() {
    let names = |path: &str| by_name(Path::new(path)).iter().map(|f| f.name()).collect::<Vec<_>>();
    assert_eq!(names("/d/a.Parquet"), ["Parquet"]);
    assert_eq!(names("/d/a.nc"), ["NetCDF classic", "HDF5"]);
    assert!(names("/d/parquet").is_empty() && names("/d/a.txt").is_empty());
    assert_eq!(names("/d/a/c/0/17"), ["Zarr shard"]);
    assert_eq!((names("/d/a/c.0.17"), names("/d/a/3.2")), (vec!["Zarr shard"], vec!["Zarr shard"]));
    let none = |_: u64, _: &mut [u8]| panic!("nothing is read of a file that is nobody's");
    assert!(read(&by_name(Path::new("a.txt")), 1 << 30, &none).is_none());
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
        // Who reads the data set that lies in one piece is told of that alone, and others of all.
        let in_one_piece = tracks.iter().find(|track| track.windows(2).all(|two| two[0].end == two[1].start)).unwrap();
        let read_at: &ReadAt<'_> = &|at, out| Ok((&bytes[at as usize..]).read(out).unwrap());
        let at = |place| {
            let source = Source::new(read_at, bytes.len() as u64, Some(Duration::from_secs(60))).at(Some(place));
            let index = index(&[&hdf5::Hdf5], source).unwrap();
            (index.tracks.extents(), index.is_partial, index.spent.bytes)
        };
        let ((few, partial, bytes_of_few), (all, rest, bytes_of_all)) =
            (at(in_one_piece[39].start), at(packed[39].start));
        assert_eq!((few, partial, all, rest), (40, true, 120, false), "{name}");
        assert_eq!(at(0), (few, partial, bytes_of_few), "{name}: it is still in the headers");
        assert!(bytes_of_few <= bytes_of_all, "{name}: {bytes_of_few} of {bytes_of_all}");
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
    "user-paged.mat": dict(libver="latest", userblock_size=1024, fs_strategy="page", fs_page_size=512),
}.items():
    # A block of the user's moves all addresses alike, the many of a large index too: that one is not made again.
    large = 1 if "userblock_size" in options else 10
    with h5py.File(name, "w", **options) as f:
        def make(key, shape, chunks, maxshape=None, step=1, **more):
            fill(f.create_dataset(key, shape=shape, chunks=chunks, maxshape=maxshape, dtype="<i4", **more), step)
        make("grows/plain", (900, 4), (1, 4), (None, 4))
        make("grows/packed", (300, 4), (1, 4), (None, 4), compression="gzip")
        make("grows/long", (600 * large,), (2,), (None,))
        make("grows/sparse", (6000,), (2,), (None,), step=37)
        make("grows/inside", (6, 40, 5), (2, 1, 2), (6, None, 8))
        make("grows/last", (5, 30), (1, 2), (9, None))
        make("grows/little", (3,), (1,), (None,))
        make("both/plain", (40, 60), (1, 2), (None, None))
        make("both/packed", (25, 30), (1, 2), (None, None), compression="gzip", shuffle=True)
        make("both/many", (10 * large, 100), (1, 1), (None, None))
        make("both/sparse", (100, 100), (1, 1), (None, None), step=11)
        make("fixed/plain", (70, 10), (1, 5))
        make("fixed/packed", (70, 10), (1, 5), fletcher32=True)
        make("fixed/room", (30, 10), (1, 5), (50, 20))
        make("fixed/paged", (500 * large,), (1,))
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
        # Newer libraries tell of places in the file, older ones of those behind the user's block.
        second = f["grows/plain"].id.get_chunk_info(1).byte_offset
        if raw[second:second + 16] == np.arange(1, 5, dtype="<i4").tobytes():
            base = 0
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
    assert_eq!(written.len(), 5);
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

/// A shard of so many chunks, of which every third was never written, laid out backward.
fn shard(chunks: u64, is_at_end: bool) -> (Vec<u8>, Track) {
    let index_bytes = 16 * chunks + 4;
    let (mut at, mut data, mut places) = (if is_at_end { 0 } else { index_bytes }, Vec::new(), Vec::new());
    for n in (0..chunks).rev() {
        let len = 1000 + n % 7;
        places.push((n % 3 != 1).then_some(at..at + len));
        if n % 3 != 1 {
            data.extend(vec![n as u8; len as usize]);
            at += len;
        }
    }
    places.reverse();
    let entry = |place: &Option<Range<u64>>| {
        let (at, len) = place.as_ref().map_or((u64::MAX, u64::MAX), |place| (place.start, place.end - place.start));
        [at.to_le_bytes(), len.to_le_bytes()].concat()
    };
    let mut index: Vec<u8> = places.iter().flat_map(entry).collect();
    index.extend(crc32c::crc32c(&index).to_le_bytes());
    let bytes = if is_at_end { [data, index].concat() } else { [index, data].concat() };
    (bytes, places.into_iter().flatten().collect())
}

#[test]
fn chunks_in_a_shard_are_listed_wherever_its_index_stands() {
    for chunks in [1, 2, 4, 255, 256, 4096, 30_000] {
        for is_at_end in [true, false] {
            let (bytes, expected) = shard(chunks, is_at_end);
            assert_eq!(tracks(&zarr::Shard, &bytes), Some(vec![expected]), "{chunks}, {is_at_end}");
            let mut damaged = bytes.clone();
            // The place of the first chunk.
            damaged[if is_at_end { bytes.len() - 16 * chunks as usize - 3 } else { 1 }] ^= 1;
            assert_eq!(tracks(&zarr::Shard, &damaged), None, "{chunks}, {is_at_end}: damaged");
        }
    }
    for other in [vec![0; 2 << 20], vec![255; 2 << 20], vec![7; 2 << 20], Vec::new(), vec![1; 10]] {
        assert_eq!(tracks(&zarr::Shard, &other), None);
    }
}

/// Shards that Zarr has written, every chunk against what it holds.
#[test]
fn shards_of_zarr_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import numpy as np, zarr
from zarr.codecs import BytesCodec, ShardingCodec
assert int(zarr.__version__.split(".")[0]) >= 3
a = np.arange(64 * 64, dtype="<u4").reshape(64, 64)
for where in ("end", "start"):
    codec = ShardingCodec(chunk_shape=(8, 16), codecs=[BytesCodec()], index_location=where)
    z = zarr.create_array(where, shape=a.shape, dtype=a.dtype, chunks=(32, 64), serializer=codec, compressors=None)
    z[:, :] = a
    z[0:8, 16:32] = 0
"#;
    if !python(script, dir.path(), "numpy, zarr.codecs") {
        return;
    }
    for place in ["end", "start"] {
        let path = dir.path().join(place).join("c/0/0");
        let bytes = std::fs::read(&path).unwrap();
        let tracks = by_name(&path).iter().find_map(|format| tracks(*format, &bytes)).unwrap();
        let chunk = |row: u32, column: u32| {
            let rows = (0..8).map(move |i| (8 * row + i) * 64 + 16 * column);
            rows.flat_map(|first| (first..first + 16).flat_map(u32::to_le_bytes)).collect::<Vec<u8>>()
        };
        let mut expected: Vec<Vec<u8>> = (0..16).map(|n| chunk(n / 4, n % 4)).collect();
        // Of zeros alone: never written.
        expected.remove(1);
        let found: Vec<Vec<u8>> = tracks[0].iter().map(|r| bytes[r.start as usize..r.end as usize].to_vec()).collect();
        assert!(tracks.len() == 1 && found == expected, "{place}: {tracks:?}");
    }
}

fn whole_files() -> Vec<Vec<u8>> {
    let mut files = vec![parquet().0, safetensors().0, netcdf(1).0, netcdf(5).0];
    files.extend([
        hdf5_by_hand(4, 1000).0,
        of_root::root(13, false, <[u8]>::to_vec).0,
        of_root::root(13, true, zlib_of_root).0,
    ]);
    files.extend([ntuple(<[u8]>::to_vec, &Odd::default()).0, ntuple(zlib_of_root, &Odd::default()).0]);
    files.extend(
        [lzma_of_root, lz4_of_root, zstd_of_root].map(|pack: fn(&[u8]) -> Vec<u8>| of_root::root(12, false, pack).0),
    );
    files.extend([shard(20, true).0, shard(20, false).0, hdf5_by_hand(200, 10).0]);
    files
}

const WHOLE_FILES: usize = 15;

/// From nothing, a fuzzer finds no file of these formats.
#[test]
#[ignore = "writes what scripts/fuzz.sh begins with"]
fn seeds_of_the_fuzzer() {
    let folder = std::env::var_os("IMPRESARIO_FUZZ_SEEDS").expect("IMPRESARIO_FUZZ_SEEDS names a folder");
    for (i, bytes) in whole_files().into_iter().enumerate() {
        std::fs::write(Path::new(&folder).join(format!("whole-{i}")), bytes).unwrap();
    }
}

/// A file of version 0 with a data set in so many chunks, written by hand: the tests of damaged files need no Python. Between
/// the nodes of its tree stand the chunks, those of each node backward.
fn hdf5_by_hand(chunks: u64, chunk_bytes: u64) -> (Vec<u8>, Track) {
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
    file.resize(600, 0);
    // The number of the first chunk of a node, and where the node stands.
    let node = |file: &mut Vec<u8>, level: u8, children: &[(u64, u64)]| {
        let at = file.len() as u64;
        file.extend([b"TREE\x01".to_vec(), vec![level, children.len() as u8, 0], long(none), long(none)].concat());
        for (first, child) in children {
            let key = [(chunk_bytes as u32).to_le_bytes().to_vec(), vec![0; 4], long(first * chunk_bytes), long(0)];
            file.extend([key.concat(), long(*child)].concat());
        }
        file.resize(at as usize + 24 + 64 * 32 + 24, 0);
        (children[0].0, at)
    };
    let (mut nodes, mut track) = (Vec::new(), Track::new());
    for first in (0..chunks).step_by(64) {
        let end = chunks.min(first + 64);
        let data = file.len() as u64 + 24 + 64 * 32 + 24;
        let children: Vec<(u64, u64)> = (first..end).map(|n| (n, data + (end - 1 - n) * chunk_bytes)).collect();
        track.extend(children.iter().map(|(_, at)| *at..at + chunk_bytes));
        nodes.push(node(&mut file, 0, &children));
        file.resize((data + (end - first) * chunk_bytes) as usize, 3);
    }
    for level in 1.. {
        if nodes.len() == 1 {
            break;
        }
        nodes = nodes.chunks(64).map(|children| node(&mut file, level, children)).collect();
    }
    let space = [vec![1, 1, 0, 0, 0, 0, 0, 0], long(chunks * chunk_bytes)].concat();
    let sides = [(chunk_bytes as u32).to_le_bytes(), 1u32.to_le_bytes()].concat();
    let layout = [vec![3, 2, 2], long(nodes[0].1), sides, vec![0; 5]].concat();
    let set = header([message(1, space), message(8, layout)].concat());
    file[400..400 + set.len()].copy_from_slice(&set);
    (file, track)
}

/// A mount where each request takes 5 ms, and many at once no longer: a tree of three levels, and many data sets.
#[test]
fn deep_indexes_are_read_where_each_request_takes_long() {
    let (bytes, expected) = hdf5_by_hand(40_000, 100);
    let each = Duration::from_millis(5);
    let read_at: &ReadAt<'_> = &|at, out| {
        let from = &bytes[at as usize..];
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        Ok(len)
    };
    let device = Modelled::new(read_at, each, usize::MAX);
    let index = index(&[&hdf5::Hdf5], device.source(bytes.len() as u64)).unwrap();
    assert_eq!(index.tracks.extents(), expected.len());
    assert!(index.spent.requests > 600, "{} requests", index.spent.requests);
    assert!(device.took() < each * index.spent.requests as u32 / 2, "{:?}", device.took());
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import numpy as np, h5py
for name, libver in (("old.h5", "earliest"), ("new.h5", "latest")):
    with h5py.File(name, "w", libver=libver) as f:
        for i in range(120):
            f.create_dataset(f"{i % 7}/{i}", data=np.ones((30, 512), "f8"), chunks=(1, 512), maxshape=(None, 512))
"#;
    if !python(script, dir.path(), "numpy, h5py") {
        return;
    }
    for name in ["old.h5", "new.h5"] {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        assert_eq!(tracks(&hdf5::Hdf5, &bytes).unwrap().iter().map(Vec::len).sum::<usize>(), 120 * 30, "{name}");
        // In turns, not by the clock of a machine that does other things.
        let spent = spent(&hdf5::Hdf5, &bytes);
        assert!(spent.time(each, 32).is_some(), "{name}: {spent:?}");
        assert!(spent.time(each, 1).is_none(), "{name}: one after the other it would not do");
    }
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
fn files_by_hand_are_understood() {
    for (chunks, chunk_bytes) in [(4, 1000), (200, 10), (5000, 30)] {
        let (bytes, expected) = hdf5_by_hand(chunks, chunk_bytes);
        assert_eq!(tracks(&hdf5::Hdf5, &bytes), Some(vec![expected]));
    }
    assert_eq!(whole_files().len(), WHOLE_FILES);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_files_do_no_harm(
        which in 0..WHOLE_FILES,
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
