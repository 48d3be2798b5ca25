//! What the kernel is asked for by its advice, on a file system that takes 128 KiB in one call.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use impresario_assist::backend::{Backends, FileId, HintedFile, cached_pages};
use impresario_assist::config::BackendChoice;
use impresario_testing::{require, skip};

use crate::hung_mount::{Asked, HungMount};
use crate::tools::Folder;

/// Of a row of an array that does not begin with a page, the last bytes lie in one page more than its length has.
#[test]
fn a_hint_that_begins_within_a_page_brings_its_last_one_too() {
    if !require("fuse") || !require("root") {
        return;
    }
    let folder = Folder::new();
    let at = folder.at("mount");
    std::fs::create_dir(&at).unwrap();
    let _mount = HungMount::new(&at, Duration::from_secs(3600));
    let file = File::open(at.join("0")).unwrap();
    let meta = file.metadata().unwrap();
    let id = FileId { dev: meta.dev(), ino: meta.ino() };
    let hinted = HintedFile { fd: file.as_fd(), id, progress: None, inside: None };
    let start = (1 << 20) + 2048;
    let row = start..start + (128 << 10);
    if cached_pages(file.as_fd(), row.clone()).is_err() {
        return skip("cachestat", "the kernel has no cachestat (Linux 6.5 has)");
    }
    let (brought, _) = Backends::default().will_need(BackendChoice::Fadvise, hinted, row.clone()).unwrap();
    let pages = cached_pages(file.as_fd(), row).unwrap();
    assert!(pages.complete(), "{pages:?}, {brought:?}");
    assert_eq!((brought.found_bytes, brought.missed_bytes), (0, 0), "{brought:?}");
}

/// Whether it holds within this time.
fn within(most: Duration, holds: impl Fn() -> bool) -> bool {
    let end = Instant::now() + most;
    std::iter::repeat_with(holds)
        .inspect(|_| std::thread::sleep(Duration::from_millis(1)))
        .take_while(|_| Instant::now() < end)
        .any(|holds| holds)
}

/// The kernel has so many requests under way to a file system in user space, and drops what is read ahead beyond that. A program
/// that then reads what was dropped waits behind all that was taken.
#[test]
fn what_the_kernel_does_not_take_at_once_is_asked_for_again() {
    if !require("fuse") || !require("root") {
        return;
    }
    let folder = Folder::new();
    let at = folder.at("mount");
    std::fs::create_dir(&at).unwrap();
    let mount = HungMount::new(&at, Duration::from_secs(3600));
    let file = File::open(at.join("0")).unwrap();
    let meta = file.metadata().unwrap();
    let id = FileId { dev: meta.dev(), ino: meta.ino() };
    let hinted = HintedFile { fd: file.as_fd(), id, progress: None, inside: None };
    // It goes straight on at first: the kernel takes what follows for what it reads ahead itself.
    file.read_exact_at(&mut [0; 128 << 10], 0).unwrap();
    let piece = |i: u64| (1 << 20) + i * (100 << 10)..(1 << 20) + i * (100 << 10) + (16 << 10);
    if cached_pages(file.as_fd(), piece(0)).is_err() {
        return skip("cachestat", "the kernel has no cachestat (Linux 6.5 has)");
    }
    // As the kernel has it for a mount that says nothing else, and some that were sent before it counted them.
    const UNDER_WAY: std::ops::Range<usize> = 9..13;
    const HINTS: u64 = 30;
    mount.hang();
    let backends = Backends::default();
    let missed: u64 = std::thread::scope(|scope| {
        let hints = scope.spawn(|| {
            let hints = (0..HINTS).map(|i| backends.will_need(BackendChoice::Fadvise, hinted, piece(i)));
            hints.map(|brought| brought.unwrap().0.missed_bytes).sum()
        });
        // Long enough for one that does not wait to come to the end. A file that is closed while it hangs hangs, too.
        let begun = within(Duration::from_secs(10), || mount.waiting(Asked::Read) >= UNDER_WAY.start);
        std::thread::sleep(Duration::from_millis(10));
        let under_way = mount.waiting(Asked::Read);
        mount.go_on();
        assert!(begun && UNDER_WAY.contains(&under_way), "{under_way}");
        hints.join().unwrap()
    });
    assert_eq!(missed, 0);
    let there = |i: &u64| cached_pages(file.as_fd(), piece(*i)).unwrap().complete();
    // What hung failed.
    assert_eq!((UNDER_WAY.end as u64..HINTS).filter(|i| !there(i)).count(), 0);
}
