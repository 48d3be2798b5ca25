//! Jobs of files that hang, of several users.

use std::sync::mpsc;

use super::*;
use crate::backend::FileId;
use crate::manager::pool::{INDEXES_MAX, LentFile, TRIES_MAX};

fn target(ino: u64, uid: u32) -> Target {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let (id, fd) = (FileId { dev: 1 << 40, ino }, Arc::new(OwnedFd::from(file).into()));
    Target { id, fd, backend: BackendChoice::ForcedRead, uid, inside: None, progress: Arc::default() }
}

#[test]
fn every_hint_is_given_or_refused() {
    let (send, done) = mpsc::channel();
    let pool = Pool::start(4, 3, Backends::default(), send, || {}).unwrap();
    let targets: Vec<Target> = (0..50).map(|i| target(i, i as u32 % 3)).collect();
    let mut taken = 0;
    for n in 0..1000u64 {
        let range = n * 512..n * 512 + 512;
        let work = Work::WillNeed { range, fresh: true };
        taken += usize::from(pool.submit(targets[n as usize % 50].clone(), work));
    }
    let reports: Vec<Done> = (0..taken).map(|_| done.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    assert!(reports.iter().all(|d| d.result.is_ok() && d.backend == "forced-read"));
    for target in targets {
        let weak = Arc::downgrade(&target.fd);
        assert!(pool.submit(target, Work::Close { last: true }));
        pool.begin_closing(true);
        let end = Instant::now() + Duration::from_secs(20);
        while weak.strong_count() > 0 {
            assert!(Instant::now() < end, "a closed file is let go");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    pool.stop(Duration::from_secs(20));
    let state = pool.locked();
    assert_eq!((state.workers, state.files.len(), state.running_of.len()), (0, 0, 0));
}

#[test]
fn a_user_whose_files_hang_leaves_a_worker_to_others() {
    // Reads of an empty pipe hang; a pipe would be refused on registration, here it stands for a dead file system.
    let (send, done) = mpsc::channel();
    let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
        let mut byte = [0];
        if rustix::fs::fstat(fd)?.st_size == 0 {
            rustix::io::read(fd, &mut byte)?;
        }
        Ok(())
    };
    let backends = Backends::new(c"/nowhere", Box::new(hang));
    let pool = Pool::start(3, 2, backends, send, || {}).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let read: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
    for ino in 0..20 {
        let (id, fd) = (FileId { dev: 7, ino }, read.clone());
        let hung = Target { id, fd, backend: BackendChoice::Lustre, uid: 1, inside: None, progress: Arc::default() };
        assert!(pool.submit(hung, Work::WillNeed { range: 0..1, fresh: true }));
    }
    assert!(pool.submit(target(99, 2), Work::WillNeed { range: 0..4096, fresh: true }));
    let report = done.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(report.id.ino, 99);
    drop(write);
    pool.stop(Duration::from_secs(20));
}

/// Two users have files that hang, and take all workers; a third one is served all the same.
#[test]
fn stuck_workers_are_replaced() {
    let (send, done) = mpsc::channel();
    let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
        if rustix::fs::fstat(fd)?.st_size == 0 {
            rustix::io::read(fd, &mut [0])?;
        }
        Ok(())
    };
    let pool = Pool::start(2, 1, Backends::new(c"/nowhere", Box::new(hang)), send, || {}).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let read: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
    for uid in [1, 2] {
        let (id, fd) = (FileId { dev: uid.into(), ino: 1 }, read.clone());
        let hung = Target { id, fd, backend: BackendChoice::Lustre, uid, inside: None, progress: Arc::default() };
        assert!(pool.submit(hung, Work::WillNeed { range: 0..1, fresh: true }));
    }
    let end = Instant::now() + Duration::from_secs(20);
    while pool.locked().since.len() < 2 {
        assert!(Instant::now() < end, "both run");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(pool.submit(target(99, 3), Work::WillNeed { range: 0..4096, fresh: true }));
    let report = loop {
        assert!(Instant::now() < end, "the third user is served");
        pool.relieve();
        if let Ok(report) = done.recv_timeout(Duration::from_millis(10)) {
            break report;
        }
    };
    assert_eq!(report.id.ino, 99);
    drop(write);
    while pool.locked().workers > 2 {
        assert!(Instant::now() < end, "the replacement ends");
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.stop(Duration::from_secs(20));
}

#[test]
fn pieces_of_a_file_are_waited_for_side_by_side_and_hints_do_not_wait_for_them() {
    let (send, done) = mpsc::channel();
    let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
        rustix::io::read(fd, &mut [0])?;
        Ok(())
    };
    let pool = Pool::start(8, 7, Backends::new(c"/nowhere", Box::new(hang)), send, || {}).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let fd: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
    let id = FileId { dev: 1, ino: 1 };
    let hung = Target { id, fd, backend: BackendChoice::Lustre, uid: 1, inside: None, progress: Arc::default() };
    for n in 0..2 * u64::from(TRIES_MAX) {
        assert!(pool.submit(hung.clone(), Work::Try(n..n + 1)));
    }
    let end = Instant::now() + Duration::from_secs(20);
    while pool.locked().since.len() < TRIES_MAX as usize {
        assert!(Instant::now() < end, "so many are waited for at once");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(pool.submit(Target { id, ..target(1, 1) }, Work::WillNeed { range: 0..4096, fresh: true }));
    assert_eq!(done.recv_timeout(Duration::from_secs(20)).unwrap().range, 0..4096);
    while pool.locked().since.len() > TRIES_MAX as usize {
        assert!(Instant::now() < end, "and no more");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((hung, write));
    (0..2 * TRIES_MAX).for_each(|_| drop(done.recv_timeout(Duration::from_secs(20)).unwrap()));
    while pool.has_jobs() {
        assert!(Instant::now() < end, "all are done");
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.stop(Duration::from_secs(20));
}

#[test]
fn what_was_not_asked_for_yet_and_is_not_needed_is_not_asked_for() {
    let (send, _done) = mpsc::channel();
    let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
    pool.locked().running_of.insert(5, 100); // this user's jobs must wait
    let target = target(1, 5);
    for n in 0..4 {
        pool.submit(target.clone(), Work::WillNeed { range: n * 100..n * 100 + 100, fresh: true });
    }
    pool.submit(target.clone(), Work::DontNeed(100..300));
    let waiting = pool.locked().files[&QueueKey::Hints(target.id)]
        .jobs
        .iter()
        .map(|j| format!("{:?}", j.work))
        .collect::<Vec<_>>();
    assert_eq!(waiting.len(), 3, "{waiting:?}");
    for _ in 0..1000 {
        pool.submit(target.clone(), Work::WillNeed { range: 900..901, fresh: false });
    }
    assert_eq!(pool.locked().files[&QueueKey::Hints(target.id)].jobs.len(), WAITING_MAX);
    pool.stop(Duration::from_secs(20));
}

#[test]
fn a_page_table_that_cannot_be_seen_is_told_of() {
    let (send, done) = mpsc::channel();
    let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
    let parts = vec![0..4096, 8192..12_288];
    for (pid, seen) in [(std::process::id(), Some(vec![false; 2])), (u32::MAX, None)] {
        assert!(pool.submit(target(1, 0), Work::PageTable(pid, parts.clone())));
        let Some(Found::PageTable(told)) = done.recv_timeout(Duration::from_secs(20)).unwrap().found else { panic!() };
        let expected = seen.map(|seen| parts.iter().cloned().zip(seen).collect::<Vec<_>>());
        assert_eq!(told, expected, "process {pid}");
    }
    pool.stop(Duration::from_secs(20));
}

/// A format whose index takes until the test lets it go.
struct Slow;

static SLOW: Mutex<u32> = Mutex::new(0);

impl Format for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    fn tracks(&self, _: &mut formats::Source<'_>) -> Option<Vec<formats::Track>> {
        *SLOW.lock() += 1;
        while *SLOW.lock() < 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// One worker is told of several, but of none too late.
#[test]
fn files_are_closed_several_at_a_time() {
    let (send, _done) = mpsc::channel();
    let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
    let closed = |many: u32, at_once: bool| {
        let targets: Vec<Target> = (0..many.into()).map(|ino| target(ino, 1)).collect();
        let open: Vec<_> = targets.iter().map(|target| Arc::downgrade(&target.fd)).collect();
        targets.into_iter().for_each(|target| assert!(pool.submit(target, Work::Close { last: true })));
        pool.begin_closing(at_once);
        move || open.iter().all(|fd| fd.strong_count() == 0)
    };
    impresario_testing::until("nothing else is used", closed(1, true));
    impresario_testing::until("there are many", closed(CLOSED_AT_ONCE, false));
    let few = closed(CLOSED_AT_ONCE - 1, false);
    impresario_testing::until("they have waited", || {
        pool.begin_closing(false);
        few()
    });
    pool.stop(Duration::from_secs(20));
}

/// A socket whose close waits until its peer, the second one, is gone.
fn hanging_close() -> (OwnedFd, OwnedFd) {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    (socket.into(), peer.into())
}

#[test]
fn no_file_waits_behind_closes_that_hang() {
    let (send, _done) = mpsc::channel();
    let pool = Pool::start(4, 3, Backends::default(), send, || {}).unwrap();
    let ((first, first_peer), (second, second_peer)) = (hanging_close(), hanging_close());
    let close = |ino, fd: OwnedFd| {
        let target = Target { fd: Arc::new(fd.into()), ..target(ino, 1) };
        assert!(pool.submit(target, Work::Close { last: true }));
    };
    close(1, first);
    pool.begin_closing(true);
    let hangs = || pool.locked().since.values().any(|since| since.elapsed() >= 2 * CLOSED_WITHIN);
    impresario_testing::until("the first one hangs", hangs);
    close(2, second);
    let last = target(3, 1);
    let open = Arc::downgrade(&last.fd);
    assert!(pool.submit(last, Work::Close { last: true }));
    pool.begin_closing(true);
    impresario_testing::until("the one behind them is closed", || open.strong_count() == 0);
    drop((first_peer, second_peer));
    pool.stop(Duration::from_secs(20));
}

#[test]
fn hints_do_not_wait_for_indexes_of_which_few_are_read_at_once() {
    for (share, at_once) in [(2, 1), (5, INDEXES_MAX)] {
        *SLOW.lock() = 0;
        let (send, done) = mpsc::channel();
        let pool = Pool::start(6, share, Backends::default(), send, || {}).unwrap();
        let targets: Vec<Target> = (0..5).map(|i| target(i, i as u32)).collect();
        for target in &targets {
            assert!(pool.submit(target.clone(), Work::Index(vec![&Slow], None)));
        }
        let end = Instant::now() + Duration::from_secs(20);
        while *SLOW.lock() < at_once {
            assert!(Instant::now() < end, "indexes are read");
            std::thread::sleep(Duration::from_millis(1));
        }
        for target in &targets {
            assert!(pool.submit(target.clone(), Work::WillNeed { range: 0..4096, fresh: true }));
        }
        for _ in &targets {
            assert!(done.recv_timeout(Duration::from_secs(20)).unwrap().result.is_ok());
        }
        assert_eq!(*SLOW.lock(), at_once);
        *SLOW.lock() = 100;
        pool.stop(Duration::from_secs(20));
    }
}

/// Its index: two extents. The file grows while it is read where its first byte says so.
struct Pair;

impl Format for Pair {
    fn name(&self) -> &'static str {
        "pair"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    fn tracks(&self, file: &mut formats::Source<'_>) -> Option<Vec<formats::Track>> {
        let path = String::from_utf8(file.bytes(0, 256).unwrap()).unwrap();
        if let Some(path) = path.trim_end_matches('\0').strip_prefix("grow ") {
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1 << 21).unwrap();
        }
        Some(vec![vec![0..10, 20..30]])
    }
}

#[test]
fn an_index_is_read_through_a_descriptor_of_our_own_of_a_file_that_stays_as_it_is() {
    use std::os::unix::fs::FileExt;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let index = read_index(file.as_file().as_fd(), &[&Pair], None).unwrap();
    assert_eq!((index.format, index.size_bytes, index.tracks.extents()), ("pair", 1 << 20, 2));
    let grow = format!("grow {}", file.path().display());
    file.as_file().write_all_at(grow.as_bytes(), 0).unwrap();
    assert!(read_index(file.as_file().as_fd(), &[&Pair], None).is_none(), "it grew meanwhile");
    // A socket cannot be opened again.
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(read_index(socket.as_fd(), &[&Pair], None).is_none());
}
