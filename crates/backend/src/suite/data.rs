//! Bytes and attributes of files.

use std::time::{Duration, SystemTime};

use super::{Suite, refuses};
use crate::{Attr, Errno, Handle, Make, SetAttr, SetTime, SpaceChange};

pub(super) fn read_and_written(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let bytes: Vec<u8> = (0..300_000u32).map(|n| (n.wrapping_mul(n) >> 3) as u8).collect();
    let file = suite.file(dir, "file", &bytes);
    let mut back = vec![0; bytes.len() + 100];
    assert_eq!(backend.read(caller, &file, 0, &mut back), Ok(bytes.len()));
    assert_eq!(back[..bytes.len()], bytes);
    assert_eq!(backend.read(caller, &file, 299_990, &mut back), Ok(10));
    assert_eq!(backend.read(caller, &file, 1, &mut []), Ok(0));
    backend.write(caller, &file, 7, b"middle", false).unwrap();
    backend.write(caller, &file, 9, b"", false).unwrap();
    backend.read(caller, &file, 5, &mut back[..10]).unwrap();
    assert_eq!(back[..10], [&bytes[5..7], b"middle", &bytes[13..15]].concat());
    // What is said to be in memory is what a read gives, with any end of it.
    backend.will_read(&file, 0, 1 << 20);
    for (offset, len) in [(0, 300_000), (5, 10), (299_990, 100), (300_000, 10), (u64::MAX, 1)] {
        let (mut cached, mut read) = (vec![0; len], vec![0; len]);
        let got = backend.read_cached(caller, &file, offset, &mut cached);
        assert!(got.is_none() || backend.has_page_cache(), "there is none");
        if let Some(got) = got {
            assert_eq!((Ok(got.unwrap()), cached), (backend.read(caller, &file, offset, &mut read), read), "{offset}");
        }
    }
    let attr = backend.attr(&file).unwrap();
    assert_eq!(attr.size_bytes, 300_000);
    assert!(attr.used_bytes > 0);
    assert_eq!(backend.known_attr(&file).map_or(300_000, |known| known.size_bytes), 300_000);
}

pub(super) fn holes_and_ends(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"start");
    let mut back = [1; 16];
    assert_eq!(backend.read(caller, &file, 5, &mut back), Ok(0));
    assert_eq!(backend.read(caller, &file, 1 << 50, &mut back), Ok(0));
    assert_eq!(backend.read(caller, &file, u64::MAX, &mut back), Ok(0));
    backend.write(caller, &file, 100_000, b"end", false).unwrap();
    assert_eq!(backend.read(caller, &file, 50_000, &mut back), Ok(16));
    assert_eq!(back, [0; 16]);
    assert_eq!(backend.attr(&file).unwrap().size_bytes, 100_003);
    // Far out; the file is sparse.
    let far = 1 << 40;
    backend.write(caller, &file, far, b"far", false).unwrap();
    assert_eq!(backend.attr(&file).unwrap().size_bytes, far + 3);
    assert_eq!(backend.read(caller, &file, far, &mut back), Ok(3));
    assert_eq!(&back[..3], b"far");
    refuses(backend.write(caller, &file, u64::MAX - 1, b"over", false), libc::EFBIG);
    refuses(backend.write(caller, &file, i64::MAX as u64, b"over", false), libc::EFBIG);
    let cut = |size| backend.set_attr(caller, &file, &SetAttr { size_bytes: Some(size), ..SetAttr::default() });
    refuses(cut(u64::MAX), libc::EFBIG);
    // What is cut off and grown again is zero.
    assert_eq!(cut(3).unwrap().size_bytes, 3);
    assert_eq!(cut(8).unwrap().size_bytes, 8);
    assert_eq!(suite.contents(&file).unwrap(), b"sta\0\0\0\0\0");
    let inner = suite.folder(dir, "inner");
    let set = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    refuses(backend.set_attr(caller, &inner, &set), libc::EISDIR);
}

/// Changes of space, where the file system has them; data and holes in any.
pub(super) fn space_changed(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let mut content = vec![7; 1 << 20];
    let file = suite.file(dir, "file", &content);
    let change = |change, offset, len| backend.change_space(caller, &file, change, offset, len);
    let size = || backend.attr(&file).unwrap().size_bytes;
    let seek = |from, data| backend.seek(caller, &file, from, data);
    for keep_size in [true, false] {
        refuses(change(SpaceChange::Allocate { keep_size }, u64::MAX, 2), libc::EFBIG);
    }
    let kinds = [
        SpaceChange::Punch,
        SpaceChange::Zero { keep_size: true },
        SpaceChange::Zero { keep_size: false },
        SpaceChange::Allocate { keep_size: true },
        SpaceChange::Allocate { keep_size: false },
    ];
    for (kind, start) in kinds.into_iter().zip((100_000usize..).step_by(150_000)) {
        let len = if matches!(kind, SpaceChange::Allocate { .. }) { 1 << 20 } else { 130_000 };
        match change(kind, start as u64, len as u64) {
            Ok(()) => {}
            Err(Errno(libc::EOPNOTSUPP)) => continue,
            Err(error) => panic!("{kind:?}: {error}"),
        }
        match kind {
            SpaceChange::Allocate { keep_size: false } => content.resize(content.len().max(start + len), 0),
            SpaceChange::Allocate { keep_size: true } => {}
            _ => content[start..start + len].fill(0),
        }
        assert_eq!(size(), content.len() as u64, "{kind:?}");
        let mut found = vec![1; content.len()];
        assert_eq!(backend.read(caller, &file, 0, &mut found), Ok(content.len()), "{kind:?}");
        let wrong = found.iter().zip(&content).position(|(found, wanted)| found != wanted);
        assert_eq!(wrong, None, "{kind:?} from {start}: this byte differs");
    }
    let end = content.len() as u64;
    for from in [0, 100_000, 131_072, 240_000] {
        let zeros =
            |range: std::ops::Range<u64>| content[range.start as usize..range.end as usize].iter().all(|b| *b == 0);
        let (data, hole) = (seek(from, true).unwrap(), seek(from, false).unwrap().expect("the end is one"));
        assert!(zeros(from..data.unwrap_or(end)), "{data:?} from {from}");
        assert!((from..=end).contains(&hole), "{hole} from {from}");
        let next = seek(hole, true).unwrap().unwrap_or(end);
        assert!(hole == end || zeros(hole..next), "a hole from {hole} to {next}");
    }
    assert_eq!((seek(end, true), seek(end, false), seek(u64::MAX, true)), (Ok(None), Ok(None), Ok(None)));
    let inner = suite.folder(dir, "inner");
    refuses(backend.change_space(caller, &inner, SpaceChange::Punch, 0, 1), libc::EISDIR);
}

pub(super) fn attributes(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"bytes");
    let at = |secs| SystemTime::UNIX_EPOCH + Duration::from_secs(secs);
    let set = SetAttr {
        mode: Some(0o4751),
        atime: Some(SetTime::To(at(1_000_000_000))),
        mtime: Some(SetTime::To(at(86_400))),
        ..SetAttr::default()
    };
    let attr = backend.set_attr(caller, &file, &set).unwrap();
    assert_eq!((attr.mode, attr.atime, attr.mtime), (0o4751, at(1_000_000_000), at(86_400)));
    assert_eq!(backend.attr(&file).unwrap().mtime, at(86_400));
    assert!(attr.ctime > at(1_000_000_000));
    // Both at once: the length changes the time, the given one stays.
    let set = SetAttr { size_bytes: Some(2), mtime: Some(SetTime::To(at(90_000))), ..SetAttr::default() };
    let attr = backend.set_attr(caller, &file, &set).unwrap();
    assert_eq!((attr.size_bytes, attr.mtime), (2, at(90_000)));
    let attr = backend.set_attr(caller, &file, &SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }).unwrap();
    assert!(attr.mtime > at(1_000_000_000) && attr.atime == at(1_000_000_000));
    // Nothing to change changes nothing.
    assert_eq!(backend.set_attr(caller, &file, &SetAttr::default()).unwrap(), attr);
    let inner = suite.folder(dir, "inner");
    let set = SetAttr { mode: Some(0o1777), ..SetAttr::default() };
    assert_eq!(backend.set_attr(caller, &inner, &set).unwrap().mode, 0o1777);
    assert_eq!(backend.access(caller, &inner, 7), Ok(7));
    // Of a link itself, not of what it names.
    let (link, _) = suite.make(dir, "link", Make::Symlink(b"file")).unwrap();
    let set = SetAttr { mtime: Some(SetTime::To(at(77))), ..SetAttr::default() };
    assert_eq!(backend.set_attr(caller, &link, &set).unwrap().mtime, at(77));
    let now = backend.attr(&file).unwrap();
    // Its blocks may be allocated later.
    assert_eq!(now, Attr { used_bytes: now.used_bytes, ..attr });

    let space = backend.space(&file).unwrap();
    assert!(space.total_bytes >= space.free_bytes && space.free_bytes >= space.available_bytes);
    assert!(space.total_bytes > 0);
    let placement = backend.placement(&file).unwrap();
    assert!(placement.layout.check().is_ok());
    assert_eq!(placement.servers.len(), usize::from(placement.layout.servers));
    refuses(backend.placement(&inner), libc::EINVAL);
}

pub(super) fn stable(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"");
    backend.write(caller, &file, 0, b"stable", true).unwrap();
    backend.write(caller, &file, 6, b" bytes", false).unwrap();
    backend.sync(&file).unwrap();
    backend.sync(&file).unwrap();
    backend.sync(dir).unwrap();
    backend.write(caller, &file, 12, b" too", false).unwrap();
    backend.sync_all().unwrap();
    backend.sync_all().unwrap();
    assert_eq!(suite.contents(&file).unwrap(), b"stable bytes too");
}

/// Threads that use one folder, and one file.
pub(super) fn concurrent(suite: &Suite<'_>, dir: &Handle) {
    const THREADS: usize = 8;
    const ROUNDS: usize = 60;
    let Suite { backend, caller, .. } = suite;
    let shared = suite.file(dir, "shared", b"");
    let made = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, made) = (&shared, &made);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let (name, moved) = (format!("{thread} {round}"), format!("{thread} {round} moved"));
                    let file = suite.file(dir, &name, name.as_bytes());
                    backend.rename(caller, (dir, name.as_bytes()), (dir, moved.as_bytes())).unwrap();
                    assert_eq!(suite.contents(&file).unwrap(), name.as_bytes());
                    let at = (round * THREADS + thread) as u64 * 8;
                    backend.write(caller, shared, at, &at.to_le_bytes(), round % 16 == 0).unwrap();
                    if round % 20 == 0 {
                        backend.sync(shared).unwrap();
                    }
                    backend.remove(caller, dir, moved.as_bytes()).unwrap();
                    refuses(backend.attr(&file), libc::ESTALE);
                    // Only one of them makes it.
                    match suite.make(dir, &format!("race {round}"), Make::File) {
                        Ok(_) => drop(made.fetch_add(1, std::sync::atomic::Ordering::Relaxed)),
                        Err(error) => assert_eq!(error, Errno(libc::EEXIST)),
                    }
                }
            });
        }
    });
    assert_eq!(made.into_inner(), ROUNDS);
    let bytes = suite.contents(&shared).unwrap();
    assert_eq!(bytes.len(), THREADS * ROUNDS * 8);
    for (n, written) in bytes.chunks_exact(8).enumerate() {
        assert_eq!(written, (n as u64 * 8).to_le_bytes());
    }
}
