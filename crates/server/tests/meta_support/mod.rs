//! Shared by the metadata server's tests: a server on a temporary directory, short calls, and a check of the directory.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_layout::Layout;
use impresario_server::meta::{self, MemoryObjects, MetaOptions, MetaService, Objects, SessionId};
use impresario_wire::message::*;

pub const SERVERS: u16 = 4;

pub struct Server {
    pub service: Arc<MetaService>,
    pub objects: Arc<MemoryObjects>,
    pub session: SessionId,
}

pub fn options(dir: &Path) -> MetaOptions {
    MetaOptions { grace: Duration::ZERO, ..MetaOptions::new(dir, SERVERS) }
}

pub fn start(dir: &Path) -> Server {
    start_with(options(dir), Arc::default())
}

pub fn start_with(options: MetaOptions, objects: Arc<MemoryObjects>) -> Server {
    try_start_with(options, objects).unwrap()
}

pub fn try_start_with(options: MetaOptions, objects: Arc<MemoryObjects>) -> Result<Server, meta::StartError> {
    if meta::examine(&options.dir).unwrap() == meta::FolderState::Blank {
        meta::make(&options.dir, ClusterId(1), &BTreeMap::new()).unwrap();
    }
    let service = Arc::new(MetaService::open(options, objects.clone())?);
    let session = service.open_session(Who::default()).unwrap();
    Ok(Server { service, objects, session })
}

pub fn path(p: &str) -> Vec<u8> {
    p.as_bytes().to_vec()
}

pub fn at(p: &str) -> Target {
    Target::Path(path(p))
}

/// A time in the distant past, which no other operation sets.
pub fn past(secs: i64) -> Time {
    Time { secs, nanos: 123_456_789 }
}

impl Server {
    /// Another client of the same server.
    pub fn again(&self) -> Server {
        let session = self.service.open_session(Who::default()).unwrap();
        Server { service: self.service.clone(), objects: self.objects.clone(), session }
    }

    /// The client's connection ends.
    pub fn hang_up(&self) {
        self.service.close_session(self.session);
    }

    pub fn call(&self, call: MetaCall) -> Answer {
        self.service.call(self.session, call)
    }

    pub fn done(&self, call: MetaCall) {
        if let Answer::Fault(fault) = self.call(call.clone()) {
            panic!("{call:?}: {fault}");
        }
    }

    pub fn errno(&self, call: MetaCall) -> i32 {
        match self.call(call.clone()) {
            Answer::Fault(fault) => fault.errno,
            other => panic!("{call:?} should fail: {other:?}"),
        }
    }

    pub fn opened(&self, call: MetaCall) -> Opened {
        match self.call(call.clone()) {
            Answer::Opened(opened) => opened,
            other => panic!("{call:?}: {other:?}"),
        }
    }

    pub fn create(&self, p: &str) -> Opened {
        self.opened(create(p))
    }

    pub fn open(&self, p: &str, write: bool) -> Opened {
        self.opened(MetaCall::Open { path: path(p), write })
    }

    pub fn close(&self, opened: Opened) {
        self.done(MetaCall::Close { handle: opened.handle, wrote: true });
    }

    /// Closes a file, and says that nothing was written.
    pub fn close_unwritten(&self, opened: Opened) {
        self.done(MetaCall::Close { handle: opened.handle, wrote: false });
    }

    /// Creates a file of `len` bytes.
    pub fn file(&self, p: &str, len: u64) -> Opened {
        let opened = self.create(p);
        self.write(&opened, 0, len);
        self.close(opened);
        opened
    }

    pub fn write(&self, opened: &Opened, offset: u64, len: u64) {
        if len > 0 {
            self.objects.write(opened.file, &opened.layout, offset, len);
        }
    }

    pub fn mkdir(&self, p: &str) {
        self.done(MetaCall::Mkdir { path: path(p), mode: 0o755, uid: 0, gid: 0 });
    }

    pub fn attr(&self, target: Target) -> Attr {
        match self.call(MetaCall::GetAttr { target: target.clone() }) {
            Answer::Attr(attr) => attr,
            other => panic!("{target:?}: {other:?}"),
        }
    }

    pub fn stat(&self, p: &str) -> Attr {
        self.attr(at(p))
    }

    pub fn set(&self, target: Target, set: SetAttr) -> Attr {
        match self.call(MetaCall::SetAttr { target, set }) {
            Answer::Attr(attr) => attr,
            other => panic!("{other:?}"),
        }
    }

    pub fn list(&self, p: &str, after: &str, max: u32) -> Vec<Entry> {
        match self.call(MetaCall::Readdir { path: path(p), after: path(after), max }) {
            Answer::Entries(entries) => entries,
            other => panic!("{p}: {other:?}"),
        }
    }

    pub fn names(&self, p: &str) -> Vec<String> {
        self.list(p, "", u32::MAX).into_iter().map(|e| String::from_utf8(e.name).unwrap()).collect()
    }

    pub fn idle(&self) {
        assert!(self.service.wait_idle(Duration::from_secs(20)), "background work does not end");
    }

    /// Waits until no work is left at all.
    pub fn quiet(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let told = self.service.status();
            let left = ["files_with_size_at_data_servers", "orphans_waiting", "background_jobs"].map(|key| &told[key]);
            if left.iter().all(|left| **left == 0) {
                return;
            }
            assert!(Instant::now() < deadline, "left over: {told}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn xattr(&self, target: Target, name: &str) -> Result<Vec<u8>, i32> {
        match self.call(MetaCall::GetXattr { target, name: path(name) }) {
            Answer::Xattr(value) => Ok(value),
            Answer::Fault(fault) => Err(fault.errno),
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Extended attributes with the lengths of their values, by name.
    pub fn xattrs(&self, p: &str) -> String {
        let Answer::Xattr(names) = self.call(MetaCall::ListXattr { target: at(p) }) else { panic!("{p}") };
        let mut names: Vec<&str> = std::str::from_utf8(&names).unwrap().split_terminator('\0').collect();
        names.sort_unstable();
        names.iter().map(|name| format!(" {name}:{}", self.xattr(at(p), name).unwrap().len())).collect()
    }

    /// Every name with its kind, number of names, size, extended attributes and, if it lies in the past, time.
    pub fn tree(&self) -> BTreeMap<String, String> {
        let mut tree = BTreeMap::new();
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            for entry in self.list(&directory, "", u32::MAX) {
                let name = String::from_utf8(entry.name).unwrap();
                let full = if directory.is_empty() { name } else { format!("{directory}/{name}") };
                let attr = self.stat(&full);
                assert_eq!(
                    (attr.ino, attr.nlink, attr.size, attr.mtime),
                    (entry.attr.ino, entry.attr.nlink, entry.attr.size, entry.attr.mtime),
                    "listing and asking agree on {full}"
                );
                let set = if attr.mtime.secs < 1_000_000_000 { attr.mtime.secs } else { 0 };
                let size = if attr.kind == NodeKind::File { attr.size } else { 0 };
                let xattrs = self.xattrs(&full);
                let names = if attr.kind == NodeKind::Dir { 1 } else { attr.nlink };
                tree.insert(full.clone(), format!("{:?} {:o} {names} {size} {set}{xattrs}", attr.kind, attr.mode));
                if attr.kind == NodeKind::Dir {
                    directories.push(full);
                }
            }
        }
        tree
    }
}

pub fn create(p: &str) -> MetaCall {
    MetaCall::Create { path: path(p), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None }
}

pub fn pipe(p: &str) -> MetaCall {
    MetaCall::Mknod { path: path(p), kind: NodeKind::Fifo, mode: 0o640, uid: 0, gid: 0 }
}

pub fn set_xattr(p: &str, name: &str, value: Option<&str>) -> MetaCall {
    let (name, value) = (path(name), value.map(path));
    MetaCall::SetXattr { target: at(p), name, value, mode: XattrMode::Any }
}

pub fn whiteout(from: &str, to: &str) -> MetaCall {
    MetaCall::Rename { from: path(from), to: path(to), no_replace: false, whiteout: true }
}

pub fn unlink(p: &str) -> MetaCall {
    MetaCall::Unlink { path: path(p) }
}

pub fn rename(from: &str, to: &str) -> MetaCall {
    MetaCall::Rename { from: path(from), to: path(to), no_replace: false, whiteout: false }
}

pub fn exchange(from: &str, to: &str) -> MetaCall {
    MetaCall::Exchange { from: path(from), to: path(to) }
}

pub fn link(from: &str, to: &str) -> MetaCall {
    MetaCall::Link { from: path(from), to: path(to) }
}

pub fn size(len: u64) -> SetAttr {
    SetAttr { size: Some(len), ..SetAttr::default() }
}

pub fn mtime(secs: i64) -> SetAttr {
    SetAttr { mtime: Some(SetTime::At(past(secs))), ..SetAttr::default() }
}

/// Checks the directory of an idle server without pending work: nothing may wait, every file must have a record, its
/// own key, as many names as it has links and the size of its objects, and no objects may exist without a file.
pub fn check_directory(dir: &Path, objects: &MemoryObjects) {
    for member in ["writers", "orphans", "staging"] {
        let left: Vec<_> = std::fs::read_dir(dir.join(member)).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.is_empty(), "left in {member}: {left:?}");
    }
    let mut keys = BTreeMap::new();
    let mut directories = vec![dir.join("names")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let (file, meta) = (entry.as_ref().unwrap().path(), entry.unwrap().metadata().unwrap());
            if meta.is_dir() {
                directories.push(file);
            } else if meta.is_file() {
                use std::os::unix::fs::MetadataExt;
                let (key, layout) = record(&file);
                assert_eq!(objects.stat(key, &layout).unwrap().size, meta.len(), "{file:?}");
                let (ino, names, links) = keys.entry(key).or_insert((meta.ino(), 0, meta.nlink()));
                assert_eq!((*ino, *links), (meta.ino(), meta.nlink()), "two files of one key: {file:?}");
                *names += 1;
            }
        }
    }
    for (key, (_, names, links)) in &keys {
        assert_eq!(names, links, "names and links of {key:?}");
    }
    for key in objects.files() {
        assert!(keys.contains_key(&key), "objects without a file: {key:?}");
    }
}

/// What a file's record says, read independently of the server.
pub fn record(file: &Path) -> (FileKey, Layout) {
    let mut bytes = [0; 48];
    let len = rustix::fs::getxattr(file, "user.impresario.file", &mut bytes[..]).unwrap();
    assert_eq!((len, bytes[0]), (48, 3), "{file:?}");
    let u16_at = |i: usize| u16::from_le_bytes(bytes[i..i + 2].try_into().unwrap());
    let ssize = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
    let key = FileKey(u64::from_le_bytes(bytes[16..24].try_into().unwrap()));
    (key, Layout::new(u16_at(2), u16_at(4), ssize, u16_at(6)).unwrap())
}

pub fn getattr(p: &str) -> MetaCall {
    MetaCall::GetAttr { target: at(p) }
}

pub fn handle(opened: &Opened) -> Target {
    Target::Handle(opened.handle)
}
