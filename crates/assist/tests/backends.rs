//! The ways of giving hints, on the real kernel; GPFS against a recorder loaded in the place of its library.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use impresario_assist::backend::{
    Backends, FileId, Gpfs, HintBackend, HintedFile, Inside, Progress, cached_pages, device_limits, device_limits_of,
    parts_in_page_table,
};
use impresario_assist::config::BackendChoice;
use impresario_gpfs::Hint;
use impresario_ring::order::{self, Answer, ORDER_BYTES_MAX, Task};
use impresario_testing::page_cache::{self, PageCache};

const MIB: u64 = 1 << 20;

fn hinted(file: &File) -> HintedFile<'_> {
    let meta = file.metadata().unwrap();
    HintedFile { fd: file.as_fd(), id: FileId { dev: meta.dev(), ino: meta.ino() }, progress: None, inside: None }
}

/// A file on the disk whose pages have been dropped, and the right to look at them; `None` where the kernel does not tell what is cached.
fn cold_file(bytes: u64) -> Option<(File, PageCache)> {
    let cache = page_cache::watched();
    let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.write_all(&vec![9; bytes as usize]).unwrap();
    file.sync_all().unwrap();
    if cached_pages(file.as_fd(), 0..bytes).is_err() {
        impresario_testing::skip("cachestat", "the kernel has no cachestat (Linux 6.5 has)");
        return None;
    }
    drop_pages(&file);
    Some((file, cache))
}

fn drop_pages(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn cached(file: &File, range: Range<u64>) -> u64 {
    cached_pages(file.as_fd(), range).unwrap().cached
}

/// Whose files have a device of their own by their metadata, which neither sysfs nor the list of a process's maps knows.
#[test]
fn a_file_on_btrfs_has_its_disks_limits_and_is_found_in_page_tables() {
    let Some(disk) = impresario_testing::power::Disk::without_order() else { return };
    let (path, len) = (disk.folder().join("f"), 8 * MIB as usize);
    std::fs::write(&path, vec![9; len]).unwrap();
    let file = File::open(&path).unwrap();
    let (id, sysfs) = (hinted(&file).id, Path::new("/sys"));
    let limits = [device_limits_of(sysfs, id.dev, file.as_fd()), device_limits(sysfs, id.dev)];
    assert!(limits[0].call_bytes > limits[1].call_bytes, "{limits:?}");
    // SAFETY: a new map of an open file, checked below, and unmapped at the end.
    let map = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0).cast::<u8>()
    };
    assert!(!map.is_null() && map as isize != -1);
    // SAFETY: within the map, which nobody writes to.
    let byte = unsafe { map.add(MIB as usize).read_volatile() };
    let parts = [MIB..MIB + 4096, 7 * MIB..7 * MIB + 4096];
    let found = parts_in_page_table(std::process::id(), id, file.as_fd(), &parts).unwrap();
    // SAFETY: mapped above with this length.
    unsafe { libc::munmap(map.cast(), len) };
    assert_eq!((byte, found), (9, vec![true, false]));
}

#[test]
fn advice_brings_pages_in_and_lets_them_go() {
    let Some((file, _cache)) = cold_file(24 * MIB) else { return };
    assert_eq!(cached(&file, 0..24 * MIB), 0);
    let (backends, hinted) = (Backends::default(), hinted(&file));
    // More than the kernel takes in one call.
    let (brought, _) = backends.will_need(BackendChoice::Fadvise, hinted, MIB..21 * MIB).unwrap();
    assert_eq!(cached(&file, MIB..21 * MIB), 20 * 256, "{brought:?}");
    assert_eq!((brought.found_bytes, brought.asked_bytes, brought.missed_bytes), (0, 20 * MIB, 0));
    assert!(brought.calls >= 3, "{brought:?}");
    let (again, _) = backends.will_need(BackendChoice::Auto, hinted, 2 * MIB..10 * MIB).unwrap();
    assert_eq!(
        (again.found_bytes, again.asked_bytes, again.calls),
        (8 * MIB, 0, 0),
        "what is there is not hinted again"
    );
    let backend = backends.choose(BackendChoice::Auto, hinted);
    assert_eq!(backend.name(), "fadvise");
    wait_until_read(&file);
    backend.dont_need(hinted, 0..12 * MIB).unwrap();
    assert_eq!(cached(&file, 0..12 * MIB), 0);
    assert!(cached(&file, 12 * MIB..24 * MIB) >= 9 * 256);
}

/// Pages on their way in cannot be dropped.
fn wait_until_read(file: &File) {
    let mut sink = vec![0; MIB as usize];
    for at in 1..21 {
        let n = std::os::unix::fs::FileExt::read_at(file, &mut sink, at * MIB).unwrap();
        assert!(n > 0);
    }
}

#[test]
fn forced_reads_bring_pages_in_and_leave_the_position() {
    let Some((mut file, _cache)) = cold_file(4 * MIB) else { return };
    let backends = Backends::default();
    let (brought, _) = backends.will_need(BackendChoice::ForcedRead, hinted(&file), 5000..3 * MIB).unwrap();
    let all = brought.asked_bytes + brought.found_bytes;
    assert!(all >= 3 * MIB - 5000, "the kernel's own read-ahead may have been faster: {brought:?}");
    assert_eq!(cached(&file, 5000..3 * MIB), 3 * 256 - 1);
    let (beyond, _) = backends.will_need(BackendChoice::ForcedRead, hinted(&file), 3 * MIB..9 * MIB).unwrap();
    assert_eq!(beyond.asked_bytes, MIB - beyond.found_bytes.min(MIB), "it stops at the end of the file");
    use std::io::Seek;
    assert_eq!(file.stream_position().unwrap(), 4 * MIB, "where writing left it");
}

#[test]
fn what_the_program_has_just_passed_is_not_read() {
    let Some((file, _cache)) = cold_file(16 * MIB) else { return };
    let backends = Backends::default();
    let progress = Progress { passed: AtomicU64::new(13 * MIB), ..Progress::default() };
    let hinted = HintedFile { progress: Some(&progress), ..hinted(&file) };
    let (brought, _) = backends.will_need(BackendChoice::ForcedRead, hinted, 0..16 * MIB).unwrap();
    assert_eq!(cached(&file, 0..4 * MIB), 0, "{brought:?}");
    assert_eq!(cached(&file, 13 * MIB..16 * MIB), 3 * 256);
    // A read far away has passed nothing.
    progress.passed.store(1 << 40, Ordering::Relaxed);
    backends.will_need(BackendChoice::ForcedRead, hinted, 0..4 * MIB).unwrap();
    assert_eq!(cached(&file, 0..4 * MIB), 4 * 256);
}

#[test]
fn nothing_more_is_brought_in_once_nobody_reads() {
    let Some((file, _cache)) = cold_file(16 * MIB) else { return };
    let progress = Progress { ended: true.into(), ..Progress::default() };
    let hinted = HintedFile { progress: Some(&progress), ..hinted(&file) };
    let backends = Backends::default();
    for choice in [BackendChoice::Fadvise, BackendChoice::ForcedRead] {
        let (brought, _) = backends.will_need(choice, hinted, 0..16 * MIB).unwrap();
        assert_eq!((brought.calls, cached(&file, 0..16 * MIB)), (0, 0));
    }
}

#[test]
fn a_file_system_that_ignores_advice_is_found_out() {
    let file = match tempfile::tempfile_in("/dev/shm") {
        Ok(file) => file,
        Err(error) => return impresario_testing::skip("/dev/shm", error),
    };
    file.set_len(64 * MIB).unwrap();
    if let Err(error) = cached_pages(file.as_fd(), 0..MIB) {
        return impresario_testing::skip("cachestat", error);
    }
    // A memory file system never reads ahead: the holes of a sparse file stay holes.
    let (backends, hinted) = (Backends::default(), hinted(&file));
    assert_eq!(backends.choose(BackendChoice::Auto, hinted).name(), "fadvise");
    backends.will_need(BackendChoice::Auto, hinted, 0..64 * MIB).unwrap();
    assert_eq!(backends.choose(BackendChoice::Auto, hinted).name(), "forced-read");
    assert_eq!(backends.choose(BackendChoice::Fadvise, hinted).name(), "fadvise", "unless it was forced");
}

#[test]
fn hints_for_descriptors_that_take_none_are_errors() {
    let (read, _write) = std::io::pipe().unwrap();
    let pipe = HintedFile { fd: read.as_fd(), id: FileId { dev: 0, ino: 0 }, progress: None, inside: None };
    let backends = Backends::default();
    for choice in [BackendChoice::Fadvise, BackendChoice::ForcedRead, BackendChoice::Lustre] {
        let said = backends.will_need(choice, pipe, 0..4096).unwrap_err();
        assert_eq!(said.raw_os_error(), Some(libc::ESPIPE), "{choice:?}");
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Call {
    kind: i32,
    asked: i32,
    taken: i32,
    released: i32,
    first_block: i64,
    first_start: i64,
    first_length: i64,
}

fn symbol<T>(library: &Path, name: &std::ffi::CStr) -> *const T {
    let path = std::ffi::CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: the library is the recorder, loaded already.
    let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null());
    found.cast()
}

/// The recorder; each folder's is another library.
fn recorder(dir: &Path) -> PathBuf {
    let library = dir.join("libgpfs.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/gpfs.c");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library).arg(source);
    assert!(cc.status().expect("a C compiler").success());
    library
}

#[test]
fn gpfs_takes_a_prefix_and_gets_everything_back() {
    let dir = tempfile::tempdir().unwrap();
    let library = recorder(dir.path());
    let gpfs = Gpfs::load(&CString::new(library.to_str().unwrap()).unwrap()).unwrap();
    let calls = || -> Vec<Call> {
        // SAFETY: the recorder's own variables; nobody writes to them now.
        unsafe {
            let n = *symbol::<i32>(&library, c"recorded_count") as usize;
            (0..n).map(|i| *symbol::<Call>(&library, c"recorded").add(i)).collect()
        }
    };
    // SAFETY: as above.
    let number = |name: &std::ffi::CStr| unsafe { *symbol::<i32>(&library, name) };
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let block = file.metadata().unwrap().blksize();
    let hinted = hinted(&file);

    let brought = gpfs.will_need(hinted, block + 100..6 * block).unwrap();
    let first = Call { kind: 1003, asked: 5, taken: 3, first_block: 1, first_start: 100, ..Call::default() };
    let first = Call { first_length: block as i64 - 100, ..first };
    let rest = Call { kind: 1003, asked: 2, taken: 2, first_block: 4, first_length: block as i64, ..Call::default() };
    assert_eq!(calls(), [first, rest], "three of five are taken on, then the rest");
    assert_eq!(brought.asked_bytes, 5 * block - 100);

    // More, until the recorder holds ten.
    for next in [6, 10, 14] {
        gpfs.will_need(hinted, next * block..(next + 4) * block).unwrap();
    }
    assert_eq!(number(c"held"), 10);
    assert_eq!(gpfs.will_need(hinted, 18 * block..19 * block).unwrap().asked_bytes, 0, "it takes no more");

    gpfs.dont_need(hinted, 0..5 * block).unwrap();
    assert_eq!(number(c"held"), 10, "what was given back makes room for what waits");
    let last = *calls().last().unwrap();
    assert_eq!((last.kind, last.first_start, last.first_length), (1002, 0, 5 * block as i64));
    gpfs.closed(hinted);
    assert_eq!(number(c"held"), 0, "everything is given back");
    assert_eq!(number(c"broken"), 0);
}

/// A program's thread for hints, which answers as the test says and hangs up when it says nothing.
fn helper(answer: impl Fn(usize, &Hint) -> Option<Answer> + Send + 'static) -> (Arc<Inside>, JoinHandle<Vec<Seen>>) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let kind = rustix::net::SocketType::SEQPACKET;
    let (ours, theirs) = rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
    let inside = Arc::new(Inside::default());
    assert!(!inside.is_there());
    inside.connected(ours);
    let thread = std::thread::spawn(move || {
        let mut seen = Vec::new();
        loop {
            let mut bytes = [0; ORDER_BYTES_MAX];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [io::IoSliceMut::new(&mut bytes)];
            let got = rustix::net::recvmsg(&theirs, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            let Some(RecvAncillaryMessage::ScmRights(mut rights)) = control.drain().next() else { return seen };
            let stat = rustix::fs::fstat(rights.next().unwrap()).unwrap();
            let Task::Hint(hint) = order::decode(&bytes[..got.bytes]).unwrap() else { panic!("a hint was asked for") };
            let Some(answer) = answer(seen.len(), &hint) else { return seen };
            seen.push((stat.st_ino, hint));
            rustix::net::send(&theirs, &answer.encode(), SendFlags::NOSIGNAL).unwrap();
        }
    });
    (inside, thread)
}

type Seen = (u64, Hint);

#[test]
fn a_program_gives_hints_itself_until_it_cannot() {
    let backends = Backends::new(c"", Box::new(|_, _| Err(io::ErrorKind::Other.into())));
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let block = file.metadata().unwrap().blksize();
    file.set_len(100 * block).unwrap();
    // Two ranges of each call are taken on; the eighth order finds nobody.
    let (inside, thread) = helper(|n, hint| {
        let wanted = match hint {
            Hint::Ranges { access, .. } => access.len().min(2),
            _ => 0,
        };
        let answer = Answer {
            errno: if n == 6 { libc::EACCES as u32 } else { 0 },
            accepted: wanted as u32 + 100 * (n == 1) as u32,
        };
        (n < 7).then_some(answer)
    });
    let hinted = HintedFile { inside: Some(&inside), ..hinted(&file) };
    let will_need = |range| backends.will_need(BackendChoice::Gpfs, hinted, range);
    let (brought, by) = will_need(0..5 * block).unwrap();
    assert_eq!((by, brought.asked_bytes, brought.calls), ("gpfs-inside", 5 * block, 1), "no more than was asked for");
    let (brought, _) = will_need(5 * block..8 * block).unwrap();
    assert_eq!((brought.asked_bytes, brought.calls), (3 * block, 2));
    backends.dont_need(BackendChoice::Gpfs, hinted, 0..4 * block).unwrap();
    let (refused, by) = backends.dont_need(BackendChoice::Gpfs, hinted, 0..block).unwrap_err();
    assert_eq!((refused.raw_os_error(), by), (Some(libc::EACCES), "gpfs-inside"));
    assert!(inside.is_there() && !inside.is_wanted(), "an error of the file system is none of the connection");
    let (brought, by) = will_need(8 * block..10 * block).unwrap();
    assert_eq!((by, brought.asked_bytes + brought.found_bytes), ("forced-read", 2 * block));
    assert!(!inside.is_there() && inside.is_wanted());
    backends.closed(hinted, true);

    let seen = thread.join().unwrap();
    assert!(seen.iter().all(|(ino, _)| *ino == hinted.id.ino));
    let ranges = |hint: &Hint| match hint {
        Hint::Ranges { access, release } => Some((access.len(), release.len())),
        _ => None,
    };
    assert_eq!(seen[0].1, Hint::Cancel, "it starts anew");
    let all: Vec<_> = seen.iter().filter_map(|(_, hint)| ranges(hint)).collect();
    assert_eq!(all, [(5, 0), (3, 0), (1, 0), (0, 4)]);
    assert_eq!(seen[5].1, Hint::Free { start: 0, bytes: 4 * block as i64 });
}

#[test]
fn each_open_file_gives_back_what_it_took_on() {
    let backends = Backends::new(c"", Box::new(|_, _| Err(io::ErrorKind::Other.into())));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("two-opens");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let opens = [(); 2].map(|()| File::open(&path).unwrap());
    let helpers = [(); 2].map(|()| {
        helper(|_, hint| match hint {
            Hint::Ranges { access, .. } => Some(Answer { errno: 0, accepted: access.len() as u32 }),
            _ => Some(Answer { errno: 0, accepted: 0 }),
        })
    });
    let block = opens[0].metadata().unwrap().blksize();
    let hinted = [0, 1].map(|n: usize| HintedFile { inside: Some(&helpers[n].0), ..hinted(&opens[n]) });
    for (n, file) in hinted.into_iter().enumerate() {
        let range = n as u64 * 4 * block..(n as u64 * 4 + 4) * block;
        backends.will_need(BackendChoice::Gpfs, file, range).unwrap();
    }
    // The second program's read pushes out what the first one's brought in.
    backends.dont_need(BackendChoice::Gpfs, hinted[1], 0..2 * block).unwrap();
    backends.closed(hinted[0], false);
    // What a program that is gone held is nobody's trouble.
    let (gone, thread) = helper(|_, _| Some(Answer { errno: 0, accepted: 1 }));
    let other = File::open(&path).unwrap();
    let of_other = HintedFile { fd: other.as_fd(), inside: Some(&gone), ..hinted[1] };
    backends.will_need(BackendChoice::Gpfs, of_other, 0..block).unwrap();
    gone.hang_up();
    thread.join().unwrap();
    backends.dont_need(BackendChoice::Gpfs, hinted[1], 0..block).unwrap();
    backends.closed(hinted[1], true);
    let given_back = helpers.map(|(inside, thread)| {
        inside.hang_up();
        let seen = thread.join().unwrap();
        let release = |(_, hint): &Seen| match hint {
            Hint::Ranges { release, .. } => release.iter().map(|r| r.block).collect(),
            _ => Vec::new(),
        };
        seen.iter().flat_map(release).collect::<Vec<_>>()
    });
    assert_eq!(given_back, [[0, 1, 2, 3], [4, 5, 6, 7]]);
}

#[test]
fn without_libgpfs_data_is_read() {
    let said = Gpfs::load(c"/nowhere/libgpfs.so").unwrap_err();
    assert!(said.contains("/nowhere/libgpfs.so"), "{said}");
    let backends = Backends::new(c"/nowhere/libgpfs.so", Box::new(|_, _| Err(io::ErrorKind::Other.into())));
    let file = tempfile::tempfile().unwrap();
    assert_eq!(backends.choose(BackendChoice::Gpfs, hinted(&file)).name(), "forced-read");
    assert_eq!(backends.choose(BackendChoice::Lustre, hinted(&file)).name(), "lustre");
}
