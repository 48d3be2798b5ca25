//! A folder of this machine as a backend.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;

use impresario_backend::posix::{Calls, Options};
use impresario_backend::suite::Suite;
use impresario_backend::{Backend, Caller, Errno, Handle, Make, PosixTree, SetAttr};

fn caller() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect(),
    }
}

/// Others close what was open.
fn close_all(tree: &PosixTree) {
    tree.close_all();
    impresario_testing::until("all is closed", || tree.descriptors() == 0);
}

fn suite(folder: &Path, options: Options, entries: usize) {
    let tree = PosixTree::open(folder, options).unwrap();
    Suite { backend: &tree, caller: caller(), others: impresario_testing::is_root(), earlier_times: true, entries }
        .run();
}

#[test]
fn the_contract_holds() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path(), Options::default(), 10_000);
}

#[test]
fn the_contract_holds_with_the_table() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path(), Options { table_only: true, ..Options::default() }, 1000);
}

#[test]
fn the_contract_holds_with_few_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    suite(folder.path(), Options { descriptors_max: Some(16), ..Options::default() }, 300);
}

/// The ways in which bytes may be moved other than by plain calls through the page cache, as far as this machine has them.
fn other_ways(folder: &Path) -> Vec<Options> {
    let ways = [(Calls::Uring, false), (Calls::Threads, true), (Calls::Auto, true)];
    let ways = ways.map(|(calls, direct)| Options { calls, direct, ..Options::default() });
    let mut there = Vec::new();
    for options in ways {
        let tree = PosixTree::open(folder, options.clone()).unwrap();
        let (caller, root) = (caller(), tree.root().unwrap());
        let (file, _) = tree.make(&caller, &root, b"probe", Make::File, &SetAttr::default()).unwrap();
        // Longer than a piece, so that `auto` takes the ring.
        tree.write(&caller, &file, 0, &vec![1; 512 << 10], false).unwrap();
        tree.remove(&caller, &root, b"probe").unwrap();
        let (io, wants_ring) = (tree.io(), options.calls != Calls::Threads);
        if wants_ring && io.ring.is_none() {
            impresario_testing::skip("io_uring", io.no_ring.expect("why there is none"));
        } else if options.direct && !io.direct {
            impresario_testing::skip("O_DIRECT", "the file system of temporary folders does not have it");
        } else {
            // What was chosen was used.
            assert_eq!(io.ring.is_some_and(|ring| ring.transfers > 0), wants_ring, "{io:?}");
            there.push(options);
        }
    }
    there
}

#[test]
fn the_contract_holds_whichever_way_bytes_are_moved() {
    let folder = tempfile::tempdir().unwrap();
    for options in other_ways(folder.path()) {
        suite(folder.path(), options, 300);
    }
}

fn user(uid: u32, groups: &[u32]) -> Caller {
    Caller { uid, gid: uid, groups: groups.into() }
}

fn mode(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

/// Whoever makes it, whatever mode they ask for and whatever the mask of the process: as by mkdir(2).
#[test]
fn a_directory_inherits_set_group_id() {
    if !impresario_testing::require("root") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (root, own) = (tree.root().unwrap(), caller());
    let set = SetAttr { gid: Some(7200), ..mode(0o2777) };
    let (shared, _) = tree.make(&own, &root, b"shared", Make::Directory, &set).unwrap();
    for by in [user(7001, &[7200]), user(7002, &[])] {
        for asked in [0o700, 0o755, 0o777] {
            let name = format!("{} {asked:o}", by.uid);
            let (_, attr) = tree.make(&by, &shared, name.as_bytes(), Make::Directory, &mode(asked)).unwrap();
            assert_eq!((attr.gid, attr.mode), (7200, 0o2000 | asked), "{name}");
            // A file has only the group; who is not in it does not get its rights.
            let (_, attr) = tree.make(&by, &shared, b"file", Make::File, &mode(0o2777)).unwrap();
            let wanted = if by.groups.is_empty() { 0o777 } else { 0o2777 };
            assert_eq!((attr.gid, attr.mode), (7200, wanted), "{name}");
            tree.remove(&by, &shared, b"file").unwrap();
        }
    }
}

#[test]
fn bits_are_taken_of_files_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (root, own) = (tree.root().unwrap(), caller());
    let takes = |takes| SetAttr { takes, ..SetAttr::default() };
    let (file, _) = tree.make(&own, &root, b"file", Make::File, &mode(0o600)).unwrap();
    for (was, taken, left) in [
        (0o6755, 0o6000, 0o755),
        (0o6755, 0o4000, 0o2755),
        (0o6755, 0o2000, 0o4755),
        (0o2745, 0o2000, 0o745),
        (0o4777, 0o4022, 0o755),
        (0o644, 0o6000, 0o644),
    ] {
        tree.set_attr(&own, &file, &mode(was)).unwrap();
        assert_eq!(tree.set_attr(&own, &file, &takes(taken)).unwrap().mode, left, "{taken:o} of {was:o}");
    }
    let both = SetAttr { takes: 0o6000, ..mode(0o600) };
    assert_eq!(tree.set_attr(&own, &file, &both).unwrap_err(), Errno(libc::EINVAL));
    let (shared, _) = tree.make(&own, &root, b"shared", Make::Directory, &mode(0o2775)).unwrap();
    assert_eq!(tree.set_attr(&own, &shared, &takes(0o2000)).unwrap_err(), Errno(libc::EINVAL));
    assert_eq!(tree.attr(&shared).unwrap().mode, 0o2775);
}

/// Whatever the owner does at that moment, on this machine or another.
#[test]
fn rights_that_an_owner_takes_stay_taken_when_set_id_goes() {
    const ROUNDS: usize = 3000;
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (root, own) = (tree.root().unwrap(), caller());
    let (file, _) = tree.make(&own, &root, b"file", Make::File, &mode(0o600)).unwrap();
    let (path, begin, end) = (folder.path().join("file"), Barrier::new(2), Barrier::new(2));
    let chmod = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    let left: Vec<u32> = std::thread::scope(|threads| {
        threads.spawn(|| {
            for _ in 0..ROUNDS {
                begin.wait();
                chmod(0o600);
                end.wait();
            }
        });
        let round = |_| {
            chmod(0o6777);
            begin.wait();
            let taken = tree.set_attr(&own, &file, &SetAttr { takes: 0o6000, ..SetAttr::default() });
            end.wait();
            (taken.is_ok(), std::fs::metadata(&path).unwrap().mode() & 0o7777)
        };
        let rounds: Vec<_> = (0..ROUNDS).map(round).collect();
        rounds.into_iter().map(|(is_done, mode)| if is_done { mode } else { u32::MAX }).collect()
    });
    let wrong: Vec<_> = left.into_iter().filter(|mode| *mode != 0o600).collect();
    assert!(wrong.is_empty(), "{} of {ROUNDS}, the first {:o}", wrong.len(), wrong[0]);
}

/// Nobody but root changes what runs with another's rights: as by write(2) and truncate(2).
#[test]
fn set_id_goes_when_others_than_root_change_a_file() {
    if !impresario_testing::require("root") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for options in [Options::default()].into_iter().chain(other_ways(folder.path())) {
        let tree = PosixTree::open(folder.path(), options).unwrap();
        let (root, ann, bob) = (tree.root().unwrap(), user(7001, &[]), user(7002, &[]));
        tree.set_attr(&caller(), &root, &mode(0o777)).unwrap();
        let (file, _) = tree.make(&ann, &root, b"file", Make::File, &mode(0o777)).unwrap();
        for cuts in [false, true] {
            for (by, was, left) in [
                (&ann, 0o6777, 0o777),
                (&bob, 0o6777, 0o777),
                (&caller(), 0o6777, 0o6777),
                // Without execution by the group it is no right, and stays where a member changes the file.
                (&ann, 0o2767, 0o2767),
                (&bob, 0o2767, 0o767),
            ] {
                tree.set_attr(&ann, &file, &mode(was)).unwrap();
                if cuts {
                    tree.set_attr(by, &file, &SetAttr { size_bytes: Some(1), ..SetAttr::default() }).unwrap();
                } else {
                    tree.write(by, &file, 0, b"bytes", false).unwrap();
                }
                assert_eq!(tree.attr(&file).unwrap().mode, left, "{was:o} {cuts} {by:?}");
            }
        }
        tree.remove(&ann, &root, b"file").unwrap();
    }
}

/// Nor is a right left that its owner gives a file while its bytes are changed.
#[test]
fn set_id_given_amid_a_write_does_not_outlast_it() {
    const LEN: usize = 8 << 20;
    if !impresario_testing::require("root") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Those that write so much in several pieces.
    for options in other_ways(folder.path()).into_iter().filter(|options| options.direct) {
        let calls = options.calls;
        let tree = PosixTree::open(folder.path(), options).unwrap();
        let (root, bob) = (tree.root().unwrap(), user(7002, &[]));
        let (file, _) = tree.make(&caller(), &root, b"file", Make::File, &mode(0o777)).unwrap();
        let plain = std::fs::File::options().read(true).write(true).open(folder.path().join("file")).unwrap();
        let byte_at = |at: u64| {
            let mut byte = [0];
            plain.read_exact_at(&mut byte, at).unwrap();
            byte[0]
        };
        let mut hits = 0;
        for round in 1..=250 {
            plain.set_permissions(Permissions::from_mode(0o777)).unwrap();
            plain.write_all_at(&[0; LEN], 0).unwrap();
            let is_hit = std::thread::scope(|scope| {
                let writing = scope.spawn(|| tree.write(&bob, &file, 0, &vec![round; LEN], false));
                while byte_at(0) == 0 && !writing.is_finished() {}
                plain.set_permissions(Permissions::from_mode(0o4777)).unwrap();
                let is_hit = byte_at(LEN as u64 - 1) == 0;
                writing.join().unwrap().unwrap();
                is_hit
            });
            if is_hit {
                assert_eq!(tree.attr(&file).unwrap().mode, 0o777, "{calls:?}");
                hits += 1;
            }
            if hits == 3 {
                break;
            }
        }
        assert!(hits > 0, "{calls:?}: no write was under way");
        tree.remove(&caller(), &root, b"file").unwrap();
    }
}

/// Runs a test of this program as a server with the rights that these arguments of setpriv(1) leave.
fn as_server(rights: &[&str], test: &str) {
    if !["root", "setpriv"].into_iter().all(impresario_testing::require) {
        return;
    }
    let mut command = std::process::Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).args(rights).args(["sh", "-c", "umask 077; exec \"$@\"", "sh"]);
    command.arg(std::env::current_exe().unwrap()).args(["--ignored", "--exact", test, "--nocapture"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{failed}");
}

/// Those that the documents name.
#[test]
fn a_server_that_is_not_root_makes_what_is_asked() {
    const RIGHTS: &str = "-all,+setuid,+setgid,+dac_read_search";
    let (inherited, ambient) = (format!("--inh-caps={RIGHTS}"), format!("--ambient-caps={RIGHTS}"));
    let rights = ["--reuid=7003", "--regid=7003", "--clear-groups", &inherited, &ambient];
    as_server(&rights, "posix::inside_a_server_that_is_not_root");
}

/// Not a test by itself: the one above runs it.
#[test]
#[ignore = "run by another test as a process"]
fn inside_a_server_that_is_not_root() {
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (root, ann) = (tree.root().unwrap(), user(7001, &[]));
    for shared in [0o777, 0o2777] {
        tree.set_attr(&caller(), &root, &mode(shared)).unwrap();
        let kinds = [Make::File, Make::Directory, Make::Fifo, Make::Socket];
        for (name, what) in [&b"file"[..], b"directory", b"pipe", b"socket"].into_iter().zip(kinds) {
            let (_, attr) = tree.make(&ann, &root, name, what, &mode(0o775)).unwrap();
            assert_eq!((attr.uid, attr.mode & 0o777), (ann.uid, 0o775), "{what:?} in {shared:o}");
            let removed = match what {
                Make::Directory => tree.remove_dir(&ann, &root, name),
                _ => tree.remove(&ann, &root, name),
            };
            removed.unwrap();
        }
    }
}

#[test]
fn a_server_of_root_without_its_rights_to_files_writes() {
    as_server(&["--bounding-set=-fowner,-fsetid"], "posix::inside_a_server_without_rights_to_files");
}

/// Not a test by itself: the one above runs it.
#[test]
#[ignore = "run by another test as a process"]
fn inside_a_server_without_rights_to_files() {
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (root, ann, bob) = (tree.root().unwrap(), user(7001, &[]), user(7002, &[]));
    tree.set_attr(&caller(), &root, &mode(0o777)).unwrap();
    let (file, _) = tree.make(&ann, &root, b"file", Make::File, &mode(0o777)).unwrap();
    tree.set_attr(&ann, &file, &mode(0o6777)).unwrap();
    tree.write(&bob, &file, 0, b"bytes", false).unwrap();
    assert_eq!(tree.attr(&file).unwrap().mode, 0o777);
}

#[test]
fn random_calls_do_what_a_plain_folder_does() {
    let folder = tempfile::tempdir().unwrap();
    let ways = [Options::default(), Options { table_only: true, ..Options::default() }];
    for options in ways.into_iter().chain(other_ways(folder.path())) {
        for seed in 1..=6 {
            let (folder, model) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let options = Options { descriptors_max: (seed % 3 == 0).then_some(16), ..options.clone() };
            let tree = PosixTree::open(folder.path(), options).unwrap();
            let suite = Suite { backend: &tree, caller: caller(), others: false, earlier_times: true, entries: 0 };
            impresario_backend::suite::reference::compare(&suite, model.path(), seed, 1500);
        }
    }
}

#[test]
fn odd_ranges_past_the_page_cache_are_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    for options in other_ways(folder.path()) {
        let (calls, tree) = (options.calls, PosixTree::open(folder.path(), options).unwrap());
        let (caller, root) = (caller(), tree.root().unwrap());
        let (file, _) = tree.make(&caller, &root, b"file", Make::File, &SetAttr::default()).unwrap();
        let mut random = impresario_base::Random::new(7);
        let mut model = Vec::new();
        for round in 0..200_u8 {
            // Whole blocks, parts of them, and both; the end moves.
            let unit = [1, 4096][round as usize % 2];
            let at = random.below(3 << 20) as usize / unit * unit;
            let len = 1 + random.below(if round % 5 == 0 { 3 << 20 } else { 10_000 }) as usize;
            if random.below(2) == 0 {
                let bytes: Vec<u8> = (0..len).map(|n| (n >> 3) as u8 ^ round).collect();
                tree.write(&caller, &file, at as u64, &bytes, false).unwrap();
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].copy_from_slice(&bytes);
            } else {
                let mut back = vec![0; len];
                let got = tree.read(&caller, &file, at as u64, &mut back).unwrap();
                let wanted = model.get(at..model.len().min(at + len)).unwrap_or(&[]);
                assert!(back[..got] == *wanted, "{len} bytes from {at}, {calls:?}: {got} of {}", wanted.len());
            }
        }
        assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), model);
        tree.remove(&caller, &root, b"file").unwrap();
    }
}

/// Has the kernel refuse this thread, and those that it starts, rings: as containers and administrators do.
fn refuse_rings(errno: i32) {
    let op =
        |code: u32, value: u32, (yes, no): (u8, u8)| libc::sock_filter { code: code as u16, jt: yes, jf: no, k: value };
    let (load, equal, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let mut filter = [
        op(load, 0, (0, 0)), // the call's number
        op(equal, libc::SYS_io_uring_setup as u32, (0, 1)),
        op(answer, libc::SECCOMP_RET_ERRNO | errno as u32, (0, 0)),
        op(answer, libc::SECCOMP_RET_ALLOW, (0, 0)),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its filter live until the call returns; the kernel copies them.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }, 0);
}

/// Not a test by itself: the next one runs it in a process of its own.
#[test]
#[ignore = "run by another test as a process"]
fn without_rings() {
    let folder = std::env::var_os("IMPRESARIO_FOLDER").unwrap();
    refuse_rings(std::env::var("IMPRESARIO_ERRNO").unwrap().parse().unwrap());
    for (calls, direct) in [(Calls::Uring, false), (Calls::Auto, true), (Calls::Auto, false)] {
        let options = Options { calls, direct, ..Options::default() };
        let io = PosixTree::open(Path::new(&folder), options.clone()).unwrap().io();
        assert_eq!((io.ring, io.no_ring.is_some()), (None, calls == Calls::Uring || direct));
        suite(Path::new(&folder), options, 300);
    }
}

#[test]
fn where_the_kernel_refuses_a_ring_plain_calls_do_its_work() {
    for errno in [libc::ENOSYS, libc::EPERM] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "posix::without_rings"]);
        command.env("IMPRESARIO_FOLDER", folder.path()).env("IMPRESARIO_ERRNO", errno.to_string());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn handles_outlive_a_restart_and_renames() {
    let folder = tempfile::tempdir().unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    if !tree.has_permanent_handles() {
        return impresario_testing::skip("root", "this file system gives no permanent handles to this user");
    }
    let caller = caller();
    let root = tree.root().unwrap();
    let (dir, _) = tree.make(&caller, &root, b"dir", Make::Directory, &SetAttr::default()).unwrap();
    let (file, _) = tree.make(&caller, &dir, b"file", Make::File, &SetAttr::default()).unwrap();
    tree.write(&caller, &file, 0, b"bytes", false).unwrap();
    drop(tree);
    std::fs::rename(folder.path().join("dir/file"), folder.path().join("moved")).unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let mut bytes = [0; 5];
    assert_eq!(tree.read(&caller, &file, 0, &mut bytes), Ok(5));
    assert_eq!(tree.lookup(&caller, &dir, b"..").unwrap().0, root);
    assert_eq!(tree.root().unwrap(), root);
    // A node that takes the place of another is not it.
    std::fs::remove_file(folder.path().join("moved")).unwrap();
    for n in 0..100 {
        std::fs::write(folder.path().join(format!("new {n}")), "x").unwrap();
    }
    close_all(&tree);
    assert_eq!(tree.attr(&file), Err(Errno(libc::ESTALE)));
}

#[test]
fn handles_of_another_folder_are_refused() {
    let above = tempfile::tempdir().unwrap();
    let (one, two) = (above.path().join("one"), above.path().join("two"));
    std::fs::create_dir(&one).unwrap();
    std::fs::create_dir(&two).unwrap();
    let (one, two) = [one, two].map(|path| PosixTree::open(&path, Options::default()).unwrap()).into();
    let whole = PosixTree::open(above.path(), Options::default()).unwrap();
    let caller = caller();
    let (file, _) = one.make(&caller, &one.root().unwrap(), b"file", Make::File, &SetAttr::default()).unwrap();
    assert!(one.attr(&file).is_ok());
    assert_eq!(two.attr(&file), Err(Errno(libc::ESTALE)));
    assert_eq!(whole.attr(&file), Err(Errno(libc::ESTALE)));
}

#[test]
fn what_is_moved_out_of_the_folder_or_planted_in_it_leads_nowhere() {
    let above = tempfile::tempdir().unwrap();
    let folder = above.path().join("folder");
    std::fs::create_dir_all(folder.join("dir/inner")).unwrap();
    std::fs::write(above.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(above.path(), folder.join("way out")).unwrap();
    std::os::unix::fs::symlink(above.path().join("secret"), folder.join("link")).unwrap();
    let tree = PosixTree::open(&folder, Options::default()).unwrap();
    let (caller, root) = (caller(), tree.root().unwrap());
    let find = |dir: &Handle, name: &str| tree.lookup(&caller, dir, name.as_bytes()).map(|found| found.0);
    let (out, link) = (find(&root, "way out").unwrap(), find(&root, "link").unwrap());
    assert_eq!(find(&out, "secret"), Err(Errno(libc::ENOTDIR)));
    assert!(tree.read(&caller, &link, 0, &mut [0; 6]).is_err());
    assert_eq!(find(&root, ".."), Ok(root));

    let dir = find(&root, "dir").unwrap();
    let inner = find(&dir, "inner").unwrap();
    std::fs::rename(folder.join("dir"), above.path().join("dir")).unwrap();
    // Going up does not leave the folder, even while descriptors are open.
    assert_eq!(find(&dir, ".."), Err(Errno(libc::ESTALE)));
    close_all(&tree);
    assert_eq!(tree.attr(&dir), Err(Errno(libc::ESTALE)));
    assert_eq!(tree.attr(&inner), Err(Errno(libc::ESTALE)));
    // A folder whose name begins alike is another one.
    std::fs::rename(above.path().join("dir"), above.path().join("folder2")).unwrap();
    assert_eq!(tree.attr(&dir), Err(Errno(libc::ESTALE)));
}

/// Leases of the only file of a tree. While there are any, the signal that tells of the other opens is ignored, so there are those of
/// one test at a time.
struct Leases {
    tree: PosixTree,
    file: Handle,
    path: std::path::PathBuf,
    before: libc::sighandler_t,
    _folder: tempfile::TempDir,
    _alone: std::sync::MutexGuard<'static, ()>,
}

impl Leases {
    fn new() -> Leases {
        static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _folder = tempfile::tempdir().unwrap();
        let tree = PosixTree::open(_folder.path(), Options::default()).unwrap();
        let path = _folder.path().join("file");
        std::fs::write(&path, "leased").unwrap();
        let (file, _) = tree.lookup(&caller(), &tree.root().unwrap(), b"file").unwrap();
        // SAFETY: no handler is installed.
        let before = unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        assert_ne!(before, libc::SIG_ERR);
        Leases { tree, file, path, before, _folder, _alone }
    }

    /// Takes or gives up a lease.
    fn set(&self, holder: &std::fs::File, kind: libc::c_int) -> std::io::Result<()> {
        use std::os::fd::AsRawFd;
        // SAFETY: a descriptor that is open, and numbers.
        let set = unsafe { libc::fcntl(holder.as_raw_fd(), libc::F_SETLEASE, kind) };
        if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// The same for the lease that a test begins with; false where the file system has none.
    fn are_there(&self, holder: &std::fs::File, kind: libc::c_int) -> bool {
        let taken = self.set(holder, kind);
        taken.inspect_err(|error| impresario_testing::skip("leases", error)).is_ok()
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        // SAFETY: what was there before.
        unsafe { libc::signal(libc::SIGIO, self.before) };
    }
}

/// As Samba and the kernel's NFS server do with what their clients cache.
#[test]
fn a_file_that_another_server_has_a_lease_of_is_opened_when_that_has_given_it_up() {
    let leases = Leases::new();
    let (Leases { tree, file, path, .. }, caller) = (&leases, caller());
    for (lease, writes) in [(libc::F_WRLCK, false), (libc::F_RDLCK, true)] {
        let holder = std::fs::File::open(path).unwrap();
        if !leases.are_there(&holder, lease) {
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(200));
                leases.set(&holder, libc::F_UNLCK).unwrap();
            });
            if writes {
                tree.write(&caller, file, 0, b"LEASED", false).unwrap();
            } else {
                assert_eq!(tree.read(&caller, file, 0, &mut [0; 6]), Ok(6));
            }
        });
        close_all(tree);
    }
    assert_eq!(std::fs::read(path).unwrap(), b"LEASED");
}

/// The threads are needed for other files.
#[test]
fn a_lease_that_is_not_given_up_holds_one_opener_and_not_for_long() {
    use std::time::{Duration, Instant};
    let leases = Leases::new();
    let (Leases { tree, file, path, .. }, caller) = (&leases, caller());
    let holder = std::fs::File::open(path).unwrap();
    if !leases.are_there(&holder, libc::F_WRLCK) {
        return;
    }
    let waits: Vec<_> = std::thread::scope(|scope| {
        let read = || {
            let began = Instant::now();
            let got = tree.read(&caller, file, 0, &mut [0; 6]);
            (got, began.elapsed())
        };
        let readers: Vec<_> = (0..8).map(|_| scope.spawn(read)).collect();
        std::thread::sleep(Duration::from_secs(8));
        leases.set(&holder, libc::F_UNLCK).unwrap();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert!(waits.iter().all(|(got, _)| *got == Err(Errno(libc::EAGAIN))), "{waits:?}");
    assert!(waits.iter().all(|(_, wait)| *wait < Duration::from_secs(6)), "{waits:?}");
    assert!(waits.iter().filter(|(_, wait)| *wait >= Duration::from_secs(1)).count() <= 1, "{waits:?}");
    assert_eq!(tree.read(&caller, file, 0, &mut [0; 6]), Ok(6));
}

#[test]
fn descriptors_are_bounded_and_closed_when_idle() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        Options { descriptors_max: Some(100), idle: std::time::Duration::from_millis(20), ..Options::default() };
    let tree = PosixTree::open(folder.path(), options).unwrap();
    let (caller, root) = (caller(), tree.root().unwrap());
    let mut most = 0;
    for n in 0..1000 {
        let name = format!("file {n}").into_bytes();
        let (file, _) = tree.make(&caller, &root, &name, Make::File, &SetAttr::default()).unwrap();
        tree.write(&caller, &file, 0, &name, false).unwrap();
        most = most.max(tree.descriptors());
    }
    // As many shards as there are may each keep what is just used.
    assert!(most <= 200, "{most}");
    impresario_testing::until("none is open", || tree.descriptors() == 0);
    let (file, _) = tree.lookup(&caller, &root, b"file 7").unwrap();
    let mut bytes = [0; 6];
    assert_eq!(tree.read(&caller, &file, 0, &mut bytes), Ok(6));
}

/// Not a test by itself: the next one runs it in a process of its own, as a user without rights.
#[test]
#[ignore = "run by another test as a process"]
fn without_rights() {
    let folder = std::env::var_os("IMPRESARIO_FOLDER").unwrap();
    let tree = PosixTree::open(Path::new(&folder), Options::default()).unwrap();
    assert!(!tree.has_permanent_handles());
    let (own, root) = (caller(), tree.root().unwrap());
    Suite { backend: &tree, caller: own.clone(), others: false, earlier_times: true, entries: 500 }.run();
    let other = Caller { uid: own.uid + 1, ..own };
    let refused = tree.make(&other, &root, b"file", Make::File, &SetAttr::default());
    assert_eq!(refused.unwrap_err(), Errno(libc::EACCES));
    let root_user = Caller { uid: 0, gid: 0, groups: vec![] };
    assert_eq!(tree.read_dir(&root_user, &root, 0, 10).unwrap_err(), Errno(libc::EACCES));
}

#[test]
fn a_server_without_rights_serves_its_own_user() {
    use std::os::unix::process::CommandExt;
    if !impresario_testing::require("root") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(7001), Some(7001)).unwrap();
    // The program where that user can run it.
    let program = folder.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let served = folder.path().join("served");
    std::fs::create_dir(&served).unwrap();
    std::os::unix::fs::chown(&served, Some(7001), Some(7001)).unwrap();
    let mut command = std::process::Command::new(program);
    command
        .args(["--ignored", "--exact", "posix::without_rights"])
        .env("IMPRESARIO_FOLDER", &served)
        .uid(7001)
        .gid(7001);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn the_contract_holds_on_a_glusterfs_volume() {
    let Some(volume) = impresario_testing::gluster::GlusterVolume::start() else { return };
    let folder = volume.mount().join("served");
    std::fs::create_dir(&folder).unwrap();
    suite(&folder, Options::default(), 1000);

    // Where its files are is told by the volume.
    let tree = PosixTree::open(&folder, Options::default()).unwrap();
    let (caller, root) = (caller(), tree.root().unwrap());
    let mut bricks = std::collections::BTreeMap::new();
    for n in 0..20 {
        let name = format!("file {n}");
        let (file, _) = tree.make(&caller, &root, name.as_bytes(), Make::File, &SetAttr::default()).unwrap();
        let server = tree.placement(&file).unwrap().servers[0];
        // Not the link that GlusterFS leaves where a name belongs when it puts the file elsewhere.
        let link = |mode: u32| mode & 0o1000 != 0;
        let there = |brick: usize| std::fs::metadata(volume.brick(brick).join("served").join(&name));
        let holds = |brick: usize| there(brick).is_ok_and(|found| !link(found.mode()));
        let brick = usize::from(holds(1));
        assert!(holds(brick));
        assert_eq!(*bricks.entry(brick).or_insert(server), server, "{name}");
    }
    assert!(bricks.len() == 2 && bricks[&0] != bricks[&1], "{bricks:?}");
}

/// A file system on a device that takes less than it promises: writes succeed in memory, and are lost on their way to it.
struct ShortDevice(tempfile::TempDir);

impl ShortDevice {
    fn start() -> Option<ShortDevice> {
        if !["root", "mkfs.ext4", "mount"].into_iter().all(impresario_testing::require) {
            return None;
        }
        let device = ShortDevice(tempfile::tempdir().unwrap());
        let (small, image, mount) = (device.path("small"), device.path("small/image"), device.path("mount"));
        std::fs::create_dir(&small).unwrap();
        std::fs::create_dir(&mount).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let done = std::process::Command::new(program).args(arguments).output().unwrap();
            done.status.success().then_some(()).ok_or(String::from_utf8_lossy(&done.stderr).into_owned())
        };
        let text = |path: &std::path::PathBuf| path.to_str().unwrap().to_string();
        let made = run("mount", &["-t", "tmpfs", "-o", "size=12m", "none", &text(&small)])
            .and_then(|()| run("truncate", &["-s", "64m", &text(&image)]))
            .and_then(|()| run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", &text(&image)]))
            .and_then(|()| run("mount", &["-o", "loop", &text(&image), &text(&mount)]));
        match made {
            Ok(()) => Some(device),
            Err(why) => {
                impresario_testing::skip("loop devices", why);
                None
            }
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for ShortDevice {
    fn drop(&mut self) {
        for name in ["mount", "small"] {
            let _ = std::process::Command::new("umount").arg("-l").arg(self.path(name)).output();
        }
    }
}

#[test]
fn a_file_system_that_became_read_only_has_lost_what_was_not_synced() {
    let Some(device) = ShortDevice::start() else { return };
    let (folder, caller) = (device.path("mount"), caller());
    let tree = PosixTree::open(&folder, Options::default()).unwrap();
    let (file, _) = tree.make(&caller, &tree.root().unwrap(), b"file", Make::File, &SetAttr::default()).unwrap();
    assert_eq!(tree.sync_all().unwrap().any, 0);
    tree.write(&caller, &file, 0, b"bytes", false).unwrap();
    close_all(&tree);
    // As a journal that cannot be written any more does.
    let aborted = std::process::Command::new("mount").args(["-o", "remount,abort"]).arg(&folder).output().unwrap();
    if std::fs::write(folder.join("other"), "").is_ok() {
        return impresario_testing::skip("ext4's abort", String::from_utf8_lossy(&aborted.stderr));
    }
    assert_ne!(tree.sync_all().unwrap().any, 0);
}

#[test]
fn lost_bytes_are_told_by_every_sync_from_then_on() {
    let Some(device) = ShortDevice::start() else { return };
    let tree = PosixTree::open(&device.path("mount"), Options::default()).unwrap();
    let (caller, root) = (caller(), tree.root().unwrap());
    let make = |name: &[u8]| tree.make(&caller, &root, name, Make::File, &SetAttr::default()).unwrap().0;
    let (lost, closed) = (make(b"lost"), make(b"closed"));
    let bytes = vec![7; 1 << 20];
    for n in 0..20 {
        tree.write(&caller, &lost, n << 20, &bytes, false).unwrap();
    }
    let failed = tree.sync(&lost).unwrap_err();
    assert!([libc::EIO, libc::ENOSPC].contains(&failed.0), "{failed:?}");
    // The kernel tells it once or twice. It stays true, for stable writes too, and whatever is closed in between.
    for _ in 0..4 {
        assert_eq!(tree.sync(&lost), Err(failed));
        tree.close_all();
    }
    assert_eq!(tree.write(&caller, &lost, 0, b"x", true), Err(failed));
    assert_eq!(tree.losses(), 1);
    // What is lost unnoticed, because nobody syncs, is noticed when the descriptor is closed.
    for n in 0..20 {
        tree.write(&caller, &closed, n << 20, &bytes, false).unwrap();
    }
    tree.close_all();
    impresario_testing::until("it is noticed", || tree.losses() == 2);
    assert!(tree.sync(&closed).is_err());
}

#[test]
fn what_is_stable_outlasts_a_power_failure() {
    let Some(disk) = impresario_testing::power::Disk::new() else { return };
    let folder = disk.folder().join("exported");
    std::fs::create_dir(&folder).unwrap();
    let tree = PosixTree::open(&folder, Options::default()).unwrap();
    let (caller, root) = (caller(), tree.root().unwrap());
    let make = |name: &[u8]| tree.make(&caller, &root, name, Make::File, &SetAttr::default()).unwrap().0;
    let [synced, stable, directory] = [&b"synced"[..], b"stable", b"directory"].map(make);
    tree.write(&caller, &synced, 0, b"first", false).unwrap();
    tree.sync(&synced).unwrap();
    tree.write(&caller, &stable, 0, b"first", true).unwrap();
    tree.write(&caller, &stable, 0, b"other", true).unwrap();
    tree.remove(&caller, &root, b"directory").unwrap();
    tree.sync(&root).unwrap();
    tree.write(&caller, &synced, 0, b"other", false).unwrap();
    let after = disk.after_power_failure();
    drop((tree, directory));
    let read = |name: &str| std::fs::read_to_string(after.folder().join("exported").join(name)).unwrap();
    assert_eq!((read("synced").as_str(), read("stable").as_str()), ("first", "other"));
    assert!(!after.folder().join("exported/directory").exists());
}

#[test]
fn a_hint_ends_where_the_file_ends() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f"), vec![1; 1 << 20]).unwrap();
    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let (file, _) = tree.lookup(&caller(), &tree.root().unwrap(), b"f").unwrap();
    let (told, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for (offset, len) in [(0, u64::MAX), (1 << 19, i64::MAX as u64), (1 << 30, u64::MAX), (u64::MAX, 1)] {
            tree.will_read(&file, offset, len);
        }
        told.send(()).unwrap();
    });
    done.recv_timeout(std::time::Duration::from_secs(30)).expect("it goes on beyond the end");
}
