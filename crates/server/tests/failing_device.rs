//! A data server on a device that fails, below a real kernel: an image served by FUSE, a loop device on it, ext4 on that. Writes of
//! what this test marks are held and then fail; those of the file system's own structures do not.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, SessionACL, WriteFlags,
};
use impresario_base::lock::Mutex;
use impresario_client::{Access, Client, ClientOptions, CreateOptions, KeyRole};
use impresario_config::{Config, Data, Meta};
use impresario_server::Started;
use impresario_testing::{require, skip, until};

const SIZE_BYTES: u64 = 256 << 20;
const IMAGE_NODE: u64 = 2;
/// With which each block of the file begins whose writes may fail.
const MARK: &[u8; 16] = b"this may be lost";
const BLOCK: usize = 4096;

/// What becomes of marked writes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Fate {
    #[default]
    Done,
    /// They wait for what comes next.
    Held,
    Fail,
}

#[derive(Default)]
struct State {
    fate: Fate,
    /// Where, what, and whose answer.
    held: Vec<(u64, Vec<u8>, ReplyWrite)>,
    failed: u64,
}

/// The image.
struct Image {
    bytes: File,
    state: Arc<Mutex<State>>,
}

impl Image {
    fn attr(node: u64) -> FileAttr {
        let (kind, perm, size) = match node {
            1 => (FileType::Directory, 0o700, 0),
            _ => (FileType::RegularFile, 0o600, SIZE_BYTES),
        };
        impresario_testing::fuse::attr(node, kind, perm, size)
    }
}

const KNOWN_FOR: Duration = Duration::from_secs(3600);

impl Filesystem for Image {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let lacks = |_| io::Error::new(io::ErrorKind::Unsupported, "no asynchronous direct I/O");
        // Writes that are held must not keep others from being asked for.
        let _ = config.set_max_background(512); // the kernel may allow less
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(lacks)
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("image") => reply.entry(&KNOWN_FOR, &Image::attr(IMAGE_NODE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&KNOWN_FOR, &Image::attr(ino.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // A page cache below the loop device would take the failures for itself.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = vec![0; u64::from(len_bytes).min(SIZE_BYTES.saturating_sub(offset)) as usize];
        match self.bytes.read_exact_at(&mut buffer, offset) {
            Ok(()) => reply.data(&buffer),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let is_marked = bytes.chunks(512).any(|sector| sector.starts_with(MARK));
        let mut state = self.state.lock();
        match state.fate {
            Fate::Held if is_marked => return state.held.push((offset, bytes.to_vec(), reply)),
            Fate::Fail if is_marked => {
                state.failed += 1;
                return reply.error(Errno::EIO);
            }
            _ => {}
        }
        drop(state);
        match self.bytes.write_all_at(bytes, offset) {
            Ok(()) => reply.written(bytes.len() as u32),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EOPNOTSUPP);
    }
}

/// The device with a mounted file system. All goes when it is dropped.
struct Device {
    mounted: PathBuf,
    name: String,
    state: Arc<Mutex<State>>,
    session: Option<BackgroundSession>,
    _dir: tempfile::TempDir,
}

fn tool(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().into()).ok_or(said)
}

impl Device {
    /// `None` where this machine has no loop devices or FUSE; that is recorded.
    fn start() -> Option<Device> {
        if !require("root") || !require("fuse") || !["losetup", "mkfs.ext4", "mount"].into_iter().all(require) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["fuse", "disk"] {
            std::fs::create_dir(at(folder)).unwrap();
        }
        File::create(at("bytes")).unwrap().set_len(SIZE_BYTES).unwrap();
        let eager = "lazy_itable_init=0,lazy_journal_init=0";
        tool(Command::new("mkfs.ext4").args(["-q", "-F", "-E", eager]).arg(at("bytes"))).unwrap();
        let state = Arc::<Mutex<State>>::default();
        let bytes = File::options().read(true).write(true).open(at("bytes")).unwrap();
        let mut config = fuser::Config::default();
        config.mount_options = vec![MountOption::FSName("impresario-failing".into())];
        config.acl = SessionACL::Owner;
        let session = fuser::spawn_mount(Image { bytes, state: state.clone() }, at("fuse"), &config).unwrap();
        let image = at("fuse").join("image");
        let name = tool(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(image));
        let name = match name {
            Ok(name) => name,
            Err(why) => {
                skip("losetup", why);
                return None;
            }
        };
        let device = Device { mounted: at("disk"), name, state, session: Some(session), _dir: dir };
        tool(Command::new("mount").args(["-o", "noatime"]).arg(&device.name).arg(&device.mounted)).unwrap();
        Some(device)
    }

    fn path(&self) -> &Path {
        &self.mounted
    }

    /// Says what becomes of marked writes from now on, and of those that are held.
    fn set(&self, fate: Fate) {
        let held = {
            let mut state = self.state.lock();
            state.fate = fate;
            state.failed += if fate == Fate::Fail { state.held.len() as u64 } else { 0 };
            std::mem::take(&mut state.held)
        };
        let bytes = File::options().write(true).open(self._dir.path().join("bytes")).unwrap();
        for (offset, content, reply) in held {
            match fate {
                Fate::Fail => reply.error(Errno::EIO),
                _ => {
                    bytes.write_all_at(&content, offset).unwrap();
                    reply.written(content.len() as u32);
                }
            }
        }
    }

    fn held(&self) -> usize {
        self.state.lock().held.len()
    }

    fn failed(&self) -> u64 {
        self.state.lock().failed
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.set(Fate::Done);
        let unmounted = tool(Command::new("umount").arg(&self.mounted));
        if unmounted.is_err() {
            let _ = tool(Command::new("umount").arg("--lazy").arg(&self.mounted));
        }
        let _ = tool(Command::new("losetup").arg("--detach").arg(&self.name));
        drop(self.session.take());
    }
}

/// Blocks of which the device may lose each.
fn marked(blocks: usize, generation: u8) -> Vec<u8> {
    let block = |n: usize| {
        let mut block = vec![generation ^ n as u8; BLOCK];
        block[..MARK.len()].copy_from_slice(MARK);
        block
    };
    (0..blocks).flat_map(block).collect()
}

/// A cluster whose data server is a process of its own, with its folder on the device.
struct Cluster {
    config: Config,
    data: Child,
    _meta: Started,
    dir: tempfile::TempDir,
}

impl Cluster {
    fn start(device: &Device) -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{}", dir.path().join(name).display());
        let data = Data { checksums: true, ..Data::new("data.0", socket("data.0"), device.path().join("data.0")) };
        let meta = Meta { address: socket("meta"), dir: dir.path().join("meta.dir"), ..Meta::default() };
        let mut config = Config { meta, data: vec![data], ..Config::default() };
        config.cluster.request_timeout_ms = 20_000;
        impresario_server::folders::make_all(&config).unwrap();
        std::fs::write(dir.path().join("c.toml"), config.to_toml()).unwrap();
        let meta = impresario_server::start(&config, "meta").unwrap();
        let data = serve(dir.path());
        let cluster = Cluster { config, data, _meta: meta, dir };
        cluster.await_data();
        cluster
    }

    fn await_data(&self) {
        until("the data server answers", || self.told().is_some());
    }

    fn told(&self) -> Option<String> {
        let access = Access::of(&self.config, KeyRole::Client);
        impresario_client::admin::status(&access, &self.config.data[0].address, Duration::from_secs(2)).ok()
    }

    fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.told().unwrap()).unwrap()
    }

    /// `kill -9`, to which a process that waits for the device answers only when that does.
    fn kill(&mut self) {
        self.data.kill().unwrap();
    }

    fn restart(&mut self) {
        self.data.wait().unwrap();
        self.data = serve(self.dir.path());
        self.await_data();
    }

    fn client(&self) -> Arc<Client> {
        Client::connect(&self.config, ClientOptions::default()).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.data.kill();
        let _ = self.data.wait();
    }
}

fn serve(folder: &Path) -> Child {
    let out = File::options().create(true).append(true).open(folder.join("data.log")).unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "failing_device::the_data_server"])
        .env("IMPRESARIO_TEST_CONFIG", folder.join("c.toml"))
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Until it is killed.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn the_data_server() {
    let config = Config::load(Path::new(&std::env::var_os("IMPRESARIO_TEST_CONFIG").unwrap())).unwrap();
    let _data = impresario_server::start(&config, "data.0").unwrap();
    // The test that has started it kills it much earlier.
    std::thread::sleep(Duration::from_secs(600));
}

fn new_file() -> CreateOptions {
    CreateOptions { mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None }
}

/// What a file has is one of these contents, block by block, or cannot be read: nothing else. Returns how many blocks are not as in
/// the first, and how many cannot be read.
#[track_caller]
fn is_one_of(cluster: &Cluster, name: &str, contents: &[&[u8]]) -> (usize, usize) {
    // Not only what is in memory: ask the device.
    let cache = impresario_testing::page_cache::emptied();
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    drop(cache);
    let file = cluster.client().open(name, false).unwrap();
    let (mut others, mut lost) = (0, 0);
    for (n, newest) in contents[0].chunks(BLOCK).enumerate() {
        let mut block = vec![0; newest.len()];
        match file.read_at(&mut block, (n * BLOCK) as u64) {
            Ok(_) if block == newest => {}
            Ok(len) => {
                // Behind its end a file of before has nothing, and where nothing was written it is a hole.
                let is = |content: &&[u8]| content.get(n * BLOCK..).is_some_and(|rest| rest.starts_with(&block));
                assert!(contents.iter().any(is), "block {n} of {name} is none that it may be ({len} bytes)");
                others += 1;
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::EIO, "{error}");
                lost += 1;
            }
        }
    }
    (others, lost)
}

const BLOCKS: usize = 64;

/// The data server is killed in the middle of a sync, which then succeeds or fails in the kernel, where nobody hears of it.
fn killed_in_the_middle_of_a_sync(fails: bool) {
    let Some(device) = Device::start() else { return };
    let mut cluster = Cluster::start(&device);
    let writer = cluster.client();
    let other = writer.create("other", new_file()).unwrap();
    other.write_at(&[7; 100_000], 0).unwrap();
    other.sync().unwrap();
    let file = writer.create("file", new_file()).unwrap();
    let old = marked(BLOCKS, 1);
    file.write_at(&old, 0).unwrap();
    file.sync().unwrap();
    // A part of it is written anew, and some behind it.
    let new = [marked(BLOCKS / 2, 2), old[BLOCKS / 2 * BLOCK..].to_vec(), marked(BLOCKS, 3)].concat();
    file.write_at(&new[..BLOCKS / 2 * BLOCK], 0).unwrap();
    file.write_at(&new[BLOCKS * BLOCK..], (BLOCKS * BLOCK) as u64).unwrap();
    device.set(Fate::Held);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| file.sync());
        until("the sync is at the device", || device.held() > 0);
        cluster.kill();
        device.set(if fails { Fate::Fail } else { Fate::Done });
        cluster.data.wait().unwrap();
        assert_eq!(device.failed() > 0, fails);
        device.set(Fate::Done);
        cluster.restart();
        let synced = syncing.join().unwrap();
        match (fails, synced) {
            (false, synced) => synced.unwrap(),
            (true, Ok(())) => panic!("the sync was answered as if nothing was lost"),
            (true, Err(error)) => assert_eq!(error.errno(), libc::EIO, "{error}"),
        }
    });
    // It is told once.
    file.sync().unwrap();
    other.sync().unwrap();
    let before = [old.clone(), vec![0; BLOCKS * BLOCK]].concat();
    let (others, lost) = is_one_of(&cluster, "file", &[&new, &before]);
    assert!(fails || (others, lost) == (0, 0), "{others} blocks are old and {lost} lost though nothing failed");
    assert_eq!(is_one_of(&cluster, "other", &[&[7; 100_000]]), (0, 0));
    println!("of {} blocks {others} are as before and {lost} cannot be read", new.len() / BLOCK);
    // What is written again, and synced, is there, also after another restart.
    file.write_at(&new, 0).unwrap();
    file.sync().unwrap();
    cluster.kill();
    cluster.restart();
    assert_eq!(is_one_of(&cluster, "file", &[&new]), (0, 0));
    file.close().unwrap();
    other.close().unwrap();
}

#[test]
fn a_sync_that_fails_while_the_server_is_killed_is_told_once() {
    killed_in_the_middle_of_a_sync(true);
}

#[test]
fn a_sync_that_succeeds_while_the_server_is_killed_is_no_loss() {
    killed_in_the_middle_of_a_sync(false);
}

/// The device fails writes while the server lives: the sync fails, once, and later ones succeed.
#[test]
fn a_sync_that_fails_is_told_once_to_each_who_wrote() {
    let Some(device) = Device::start() else { return };
    let cluster = Cluster::start(&device);
    let (writer, other) = (cluster.client(), cluster.client());
    let file = writer.create("file", new_file()).unwrap();
    let content = marked(BLOCKS, 1);
    file.write_at(&content, 0).unwrap();
    // Another client has unsynced bytes in it too, and learns of the loss with its own sync.
    let theirs = other.open("file", true).unwrap();
    theirs.write_at(&content[..BLOCK], 0).unwrap();
    device.set(Fate::Fail);
    assert!(cluster.status().get("failures").is_none());
    assert_eq!(file.sync().unwrap_err().errno(), libc::EIO);
    assert!(device.failed() > 0);
    let failures = &cluster.status()["failures"];
    assert_eq!(failures["place"], cluster.config.data[0].dir.display().to_string());
    assert_eq!(failures["kinds"]["EIO"]["count"], 1, "{failures}");
    device.set(Fate::Done);
    file.sync().unwrap();
    assert_eq!(theirs.sync().unwrap_err().errno(), libc::EIO);
    theirs.sync().unwrap();
    // Nothing was synced before: what is lost is a hole.
    let (others, lost) = is_one_of(&cluster, "file", &[&content, &vec![0; BLOCKS * BLOCK]]);
    println!("of {BLOCKS} blocks {others} are as before and {lost} cannot be read");
    file.write_at(&content, 0).unwrap();
    file.sync().unwrap();
    assert_eq!(is_one_of(&cluster, "file", &[&content]), (0, 0));
    file.close().unwrap();
    theirs.close().unwrap();
}

/// A read that needs the device does not wait for syncs that do not end, of as many files as they may be.
#[test]
fn syncs_that_take_long_hold_up_no_read() {
    const FILES: usize = 40;
    let Some(device) = Device::start() else { return };
    let cluster = Cluster::start(&device);
    let (writer, reader) = (cluster.client(), cluster.client());
    let other = writer.create("other", new_file()).unwrap();
    other.write_at(&[7; 100_000], 0).unwrap();
    other.sync().unwrap();
    let files: Vec<_> = (0..FILES).map(|n| writer.create(format!("file {n}"), new_file()).unwrap()).collect();
    for file in &files {
        file.write_at(&marked(1, 1), 0).unwrap();
        file.sync().unwrap();
    }
    let read = reader.open("other", false).unwrap();
    // Not from memory.
    let cache = impresario_testing::page_cache::emptied();
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    drop(cache);
    // Just before, or the kernel may have written it by itself.
    for file in &files {
        file.write_at(&marked(1, 2), 0).unwrap();
    }
    device.set(Fate::Held);
    std::thread::scope(|scope| {
        let syncs: Vec<_> = files.iter().map(|file| scope.spawn(|| file.sync())).collect();
        until("syncs are at the device", || device.held() > 0);
        until("all are with the server", || {
            let engine = &cluster.status()["engine"];
            let count = |what: &str| engine[what].as_u64().unwrap_or(0);
            count("queued") + count("blocked") + count("in_flight_batches") >= FILES as u64
        });
        let mut bytes = vec![0; 100_000];
        // Behind a sync it would fail when the time for an answer is over.
        let got = read.read_at(&mut bytes, 0);
        assert!(syncs.iter().all(|sync| !sync.is_finished()), "a sync has ended");
        device.set(Fate::Done);
        assert_eq!(got.unwrap(), bytes.len());
        assert!(bytes.iter().all(|byte| *byte == 7));
        syncs.into_iter().for_each(|sync| sync.join().unwrap().unwrap());
    });
    files.into_iter().for_each(|file| file.close().unwrap());
}
