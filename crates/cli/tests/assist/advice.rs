//! What the kernel is asked for by its advice, on a file system that takes 128 KiB in one call.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use impresario_assist::backend::{Backends, FileId, HintedFile, cached_pages};
use impresario_assist::config::BackendChoice;
use impresario_testing::{require, skip};

use crate::hung_mount::HungMount;
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
