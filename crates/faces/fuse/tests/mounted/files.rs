//! Reading, writing and open files.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::time::Duration;

use impresario_fuse::MountOptions;
use impresario_testing::{content, until};

use crate::cluster::{Node, mounted, mounted_with};

/// Bytes that tell at which place of which content they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    content::pattern(seed, 1, 0, len)
}

#[test]
fn a_write_is_with_the_servers_when_it_returns() {
    let Some(node) = mounted() else { return };
    let bytes = pattern(1, 300_000);
    let mut file = File::create(node.at("f")).unwrap();
    file.write_all(&bytes).unwrap();
    // Read without the kernel and this mount, while the file is still open and unsynced.
    assert_eq!(node.read_past_the_mount("f", bytes.len()), bytes);
    file.write_all(b"more").unwrap();
    assert_eq!(node.read_past_the_mount("f", bytes.len() + 4)[bytes.len()..], *b"more");
}

#[test]
fn reads_are_short_only_at_the_end() {
    let Some(node) = mounted() else { return };
    let bytes = pattern(2, 1_234_567);
    fs::write(node.at("f"), &bytes).unwrap();
    let file = File::open(node.at("f")).unwrap();
    let mut buffer = vec![0; 2_000_000];
    for (offset, want) in [(0, 1_234_567), (1, 1_234_566), (1_234_000, 567), (1_234_567, 0), (9_999_999, 0)] {
        let got = file.read_at(&mut buffer, offset).unwrap();
        assert_eq!(got, want, "at {offset}");
        assert_eq!(buffer[..got], bytes[(offset as usize).min(bytes.len())..][..got]);
    }
    assert_eq!(file.read_at(&mut buffer[..1000], 65_530).unwrap(), 1000, "over a strip's end");
    assert_eq!(buffer[..1000], bytes[65_530..66_530]);
}

#[test]
fn holes_read_as_zeros() {
    let Some(node) = mounted() else { return };
    let file = OpenOptions::new().create(true).read(true).write(true).truncate(true).open(node.at("f")).unwrap();
    file.write_all_at(b"far", 5_000_000).unwrap();
    file.write_all_at(b"near", 100).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5_000_003);
    let mut want = vec![0; 5_000_003];
    want[100..104].copy_from_slice(b"near");
    want[5_000_000..].copy_from_slice(b"far");
    assert_eq!(fs::read(node.at("f")).unwrap(), want);
    // Holes begin and end somewhere between the bytes that were written.
    let mut seeker = File::open(node.at("f")).unwrap();
    // SAFETY: plain calls on a descriptor that is open here.
    let (data, hole) = unsafe {
        (libc::lseek(seeker.as_raw_fd(), 1000, libc::SEEK_DATA), libc::lseek(seeker.as_raw_fd(), 0, libc::SEEK_HOLE))
    };
    assert!((1000..=5_000_000).contains(&data) && (104..=5_000_003).contains(&hole), "{data} {hole}");
    assert_eq!(seeker.seek(SeekFrom::End(-3)).unwrap(), 5_000_000);
}

/// Which of a file's pages are in the page cache. `None`: it cannot be mapped.
fn in_cache(file: &File, len: usize) -> Option<Vec<bool>> {
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a mapping of its own, which nothing else uses and which is taken away before its address is forgotten; the
    // vector has a byte for each of its pages.
    unsafe {
        let map = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if map == libc::MAP_FAILED {
            return None;
        }
        let told = libc::mincore(map, len, pages.as_mut_ptr());
        libc::munmap(map, len);
        assert_eq!(told, 0);
    }
    Some(pages.into_iter().map(|page| page & 1 != 0).collect())
}

fn resident(file: &File, len: usize) -> Vec<bool> {
    in_cache(file, len).unwrap()
}

#[test]
fn advice_fills_and_empties_the_page_cache() {
    const STEP: usize = 128 << 10;
    let Some(node) = mounted() else { return };
    let bytes = pattern(7, 4 << 20);
    fs::write(node.at("f"), &bytes).unwrap();
    let other = node.second(MountOptions::default());
    let file = File::open(other.at("f")).unwrap();
    assert!(resident(&file, bytes.len()).iter().all(|page| !page), "nothing was read on this node");
    let advise = |offset: usize, len: usize, advice| {
        // SAFETY: a plain call on a descriptor that is open here.
        assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as i64, len as i64, advice) }, 0);
    };
    // Within what an unprivileged mount may read ahead, so that the kernel cuts none of it.
    for at in (1 << 20..2 << 20).step_by(STEP) {
        advise(at, STEP, libc::POSIX_FADV_WILLNEED);
    }
    let (start, end) = ((1 << 20) / 4096, (2 << 20) / 4096);
    until("what was advised comes", || resident(&file, bytes.len())[start..end].iter().all(|page| *page));
    let there = resident(&file, bytes.len());
    assert!(!there[..start].iter().chain(&there[end..]).any(|page| *page), "and nothing else came");
    let mut back = vec![0; 1 << 20];
    assert_eq!(file.read_at(&mut back, 1 << 20).unwrap(), back.len());
    assert!(back == bytes[1 << 20..2 << 20]);
    advise(0, 0, libc::POSIX_FADV_DONTNEED);
    assert!(!resident(&file, bytes.len())[start..end].iter().any(|page| *page), "released");
}

/// Pages would have the kernel let one program at a time write to the file, and none while one syncs it.
#[test]
fn an_open_that_cannot_read_keeps_no_pages() {
    let Some(node) = mounted() else { return };
    let (old, new) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    fs::write(node.at("f"), &old).unwrap();
    let mut reader = File::open(node.at("f")).unwrap();
    let both = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    both.write_all_at(&old, 0).unwrap();
    assert!(resident(&reader, old.len()).iter().all(|page| *page), "an open that can read keeps what is written");
    let writer = OpenOptions::new().write(true).open(node.at("f")).unwrap();
    writer.write_all_at(&new[..32 << 10], 0).unwrap();
    assert!(!resident(&reader, 32 << 10).iter().any(|page| *page), "nor any that others had of the same bytes");
    let mut back = Vec::new();
    reader.read_to_end(&mut back).unwrap();
    assert!(back[..32 << 10] == new[..32 << 10] && back[32 << 10..] == old[32 << 10..]);
}

/// What a program does with opens that can read is learnt. This test's program is one, by the name of its thread.
#[test]
fn a_program_that_writes_a_file_in_turns_with_others_keeps_no_pages() {
    let Some(node) = mounted() else { return };
    let (path, bytes) = (node.at("f"), pattern(4, 128 << 10));
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    let keeps = |file: &File| {
        file.write_all_at(&bytes[..4096], 0).unwrap();
        resident(file, 4096)[0]
    };
    let (first, second) = (open(), open());
    for (n, piece) in bytes.chunks(4096).enumerate() {
        let file = if n % 2 == 0 { &first } else { &second };
        file.write_all_at(piece, n as u64 * 4096).unwrap();
    }
    assert!(keeps(&first), "the present ones keep them");
    let direct = open();
    let past = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    if in_cache(&past, 4096).is_none() {
        assert!(keeps(&direct), "nothing is learnt where such opens cannot be mapped");
        return;
    }
    assert!(!keeps(&direct));
    // All see the same, with pages or without.
    let mut back = vec![0; bytes.len()];
    for file in [&first, &direct] {
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == bytes);
    }
    for _ in 0..40 {
        direct.read_exact_at(&mut back[..512], 0).unwrap();
    }
    assert!(keeps(&open()), "one that reads keeps them from then on");
}

/// Several programs write parts of a file in turns, which no lock of the kernel keeps apart, and sync it meanwhile.
#[test]
fn programs_that_only_write_a_shared_file_lose_nothing() {
    const PIECE: usize = 10_000;
    let Some(node) = mounted() else { return };
    File::create(node.at("f")).unwrap();
    let want = pattern(3, 8 * 50 * PIECE);
    std::thread::scope(|scope| {
        for process in 0..8 {
            let (path, want) = (node.at("f"), &want);
            scope.spawn(move || {
                let file = OpenOptions::new().write(true).open(path).unwrap();
                for at in (0..50).map(|turn| (turn * 8 + process) * PIECE) {
                    file.write_all_at(&want[at..at + PIECE], at as u64).unwrap();
                    if (at / PIECE).is_multiple_of(17) {
                        file.sync_all().unwrap();
                    }
                }
            });
        }
    });
    assert!(fs::read(node.at("f")).unwrap() == want);
}

#[test]
fn truncate_down_and_up() {
    let Some(node) = mounted() else { return };
    let bytes = pattern(3, 400_000);
    fs::write(node.at("f"), &bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    for len in [399_999u64, 200_001, 65_536, 65_535, 1, 0] {
        file.set_len(len).unwrap();
        assert_eq!(file.metadata().unwrap().len(), len);
        assert_eq!(fs::read(node.at("f")).unwrap(), bytes[..len as usize], "{len}");
    }
    file.write_all_at(&bytes, 0).unwrap();
    file.set_len(70_000).unwrap();
    file.set_len(300_000).unwrap();
    let mut want = bytes[..70_000].to_vec();
    want.resize(300_000, 0);
    assert_eq!(fs::read(node.at("f")).unwrap(), want, "what was cut does not come back");
    drop(file);
    // By path, with nothing open.
    let path = std::ffi::CString::new(node.at("f").to_str().unwrap()).unwrap();
    // SAFETY: a terminated string that lives over the call.
    assert_eq!(unsafe { libc::truncate(path.as_ptr(), 131_072) }, 0);
    want.truncate(131_072);
    assert_eq!(fs::read(node.at("f")).unwrap(), want);
}

#[test]
fn open_with_truncation_empties() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), pattern(4, 200_000)).unwrap();
    let mut file = OpenOptions::new().write(true).truncate(true).open(node.at("f")).unwrap();
    assert_eq!(node.stat_past_the_mount("f").size, 0);
    assert_eq!(file.metadata().unwrap().len(), 0);
    file.write_all(b"new").unwrap();
    assert_eq!(fs::read(node.at("f")).unwrap(), b"new");
}

#[test]
fn appends_of_one_node_are_whole() {
    let Some(node) = mounted() else { return };
    let record = |writer: usize, i: usize| format!("{writer}:{i:05}:{}\n", "x".repeat(writer * 7));
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = node.at("log");
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
                (0..100).for_each(|i| file.write_all(record(writer, i).as_bytes()).unwrap());
            });
        }
    });
    let text = fs::read_to_string(node.at("log")).unwrap();
    let mut lines: Vec<_> = text.lines().map(|line| format!("{line}\n")).collect();
    let mut want: Vec<_> = (0..4).flat_map(|writer| (0..100).map(move |i| record(writer, i))).collect();
    lines.sort();
    want.sort();
    assert_eq!(lines, want);
}

#[test]
fn mapped_reading_and_writing() {
    let Some(node) = mounted() else { return };
    let mut bytes = pattern(5, 250_000);
    fs::write(node.at("f"), &bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    // SAFETY: a fresh mapping of a file of that length, used within its bounds and unmapped once.
    unsafe {
        let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        let map = libc::mmap(std::ptr::null_mut(), bytes.len(), protection, libc::MAP_SHARED, fd, 0);
        assert_ne!(map, libc::MAP_FAILED);
        let view = std::slice::from_raw_parts_mut(map.cast::<u8>(), bytes.len());
        assert!(view == bytes);
        view[123_456..123_460].copy_from_slice(b"mmap");
        assert_eq!(libc::msync(map, bytes.len(), libc::MS_SYNC), 0);
        libc::munmap(map, bytes.len());
    }
    bytes[123_456..123_460].copy_from_slice(b"mmap");
    assert!(node.read_past_the_mount("f", bytes.len()) == bytes);
}

#[test]
fn an_open_removed_file_lives_on() {
    let Some(node) = mounted() else { return };
    let bytes = pattern(6, 150_000);
    fs::write(node.at("f"), &bytes).unwrap();
    let mut file = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    fs::remove_file(node.at("f")).unwrap();
    assert!(!node.at("f").exists());
    fs::write(node.at("f"), b"another file of that name").unwrap();
    file.write_all_at(b"still", 149_995).unwrap();
    file.set_len(160_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 160_000);
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o640);
    let mut got = Vec::new();
    file.read_to_end(&mut got).unwrap();
    assert_eq!(got[..149_995], bytes[..149_995]);
    assert_eq!(got[149_995..150_000], *b"still");
    file.sync_all().unwrap();
    drop(file);
    assert_eq!(fs::read(node.at("f")).unwrap(), b"another file of that name");
}

#[test]
fn stat_follows_writing() {
    let Some(node) = mounted_with(MountOptions { cache_time: Duration::from_millis(50), ..Default::default() }) else {
        return;
    };
    let mut file = File::create(node.at("f")).unwrap();
    let mut last = file.metadata().unwrap().modified().unwrap();
    for step in 1..4u64 {
        std::thread::sleep(Duration::from_millis(60));
        file.write_all(&[7; 100_000]).unwrap();
        let seen = fs::metadata(node.at("f")).unwrap();
        assert_eq!(seen.len(), step * 100_000);
        assert!(seen.modified().unwrap() > last, "writing moves the time");
        last = seen.modified().unwrap();
        assert_eq!(node.stat_past_the_mount("f").size, step * 100_000, "on every node");
    }
}

#[test]
fn direct_io_gives_the_same_bytes() {
    let direct = MountOptions { direct_io: true, ..Default::default() };
    let Some(node) = mounted_with(direct) else { return };
    check_odd_requests(&node, 0);
    let plain = node.second(MountOptions::default());
    check_odd_requests(&plain, libc::O_DIRECT);
    // One writer direct, one reader through the page cache of another node.
    assert!(fs::read(node.at("f")).unwrap() == fs::read(plain.at("f")).unwrap());
}

fn check_odd_requests(node: &Node, flags: i32) {
    let bytes = pattern(7, 700_000);
    let mut open = OpenOptions::new();
    let file = open.read(true).write(true).create(true).truncate(true).custom_flags(flags).open(node.at("f")).unwrap();
    let mut at = 0;
    for len in [1, 511, 512, 4096, 65_535, 65_537, 100_000, 1].into_iter().cycle() {
        let end = (at + len).min(bytes.len());
        file.write_all_at(&bytes[at..end], at as u64).unwrap();
        at = end;
        if at == bytes.len() {
            break;
        }
    }
    let mut got = vec![0; bytes.len()];
    let mut at = 0;
    for len in [3, 4097, 262_144, 65_536, 77].into_iter().cycle() {
        let end = (at + len).min(bytes.len());
        file.read_exact_at(&mut got[at..end], at as u64).unwrap();
        at = end;
        if at == bytes.len() {
            break;
        }
    }
    assert!(got == bytes);
}

#[test]
fn locks_hold_on_one_node() {
    let Some(node) = mounted() else { return };
    let (one, two) = (File::create(node.at("f")).unwrap(), File::open(node.at("f")).unwrap());
    // SAFETY: plain calls on open descriptors.
    unsafe {
        assert_eq!(libc::flock(one.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB), 0);
        assert_eq!(libc::flock(two.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EWOULDBLOCK));
        assert_eq!(libc::flock(one.as_raw_fd(), libc::LOCK_UN), 0);
        assert_eq!(libc::flock(two.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB), 0);
    }
}

#[test]
fn many_readers_and_writers_of_one_file() {
    let Some(node) = mounted() else { return };
    const PART: usize = 600_000;
    File::create(node.at("f")).unwrap();
    std::thread::scope(|scope| {
        for part in 0..6 {
            let path = node.at("f");
            scope.spawn(move || {
                let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
                let bytes = pattern(part as u64, PART);
                for (i, piece) in bytes.chunks(33_333).enumerate() {
                    let offset = (part * PART + i * 33_333) as u64;
                    file.write_all_at(piece, offset).unwrap();
                    let mut back = vec![0; piece.len()];
                    file.read_exact_at(&mut back, offset).unwrap();
                    assert!(back == piece);
                }
            });
        }
    });
    let want: Vec<u8> = (0..6).flat_map(|part| pattern(part, PART)).collect();
    assert!(fs::read(node.at("f")).unwrap() == want);
}

#[test]
fn ranges_are_copied_between_files() {
    let Some(node) = mounted() else { return };
    let bytes = pattern(5, 700_000);
    fs::write(node.at("from"), &bytes).unwrap();
    fs::write(node.at("to"), vec![1; 900_000]).unwrap();
    let from = File::open(node.at("from")).unwrap();
    let to = OpenOptions::new().write(true).open(node.at("to")).unwrap();
    let (mut at, mut goes_to) = (100_001_i64, 200_002_i64);
    while at < 500_001 {
        let left = (500_001 - at) as usize;
        // SAFETY: open descriptors, and offsets that live over the call.
        let copied = unsafe { libc::copy_file_range(from.as_raw_fd(), &mut at, to.as_raw_fd(), &mut goes_to, left, 0) };
        assert!(copied > 0 && copied as usize <= left, "{copied}: {}", std::io::Error::last_os_error());
    }
    drop(to);
    let mut want = vec![1; 900_000];
    want[200_002..600_002].copy_from_slice(&bytes[100_001..500_001]);
    assert!(fs::read(node.at("to")).unwrap() == want);
    assert!(node.read_past_the_mount("to", 1_000_000) == want);
}
