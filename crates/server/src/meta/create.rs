//! Creation of names: files, directories, symbolic links, pipes, sockets and devices appear whole or not at all; and the
//! striping of new files. What new nodes inherit of access control lists is in `labels`.
//!
//! A file is created as its own mark, `writers/<key>`. Its record, owner and mode are set there, then it is linked into
//! place. So it has a record before it has a name, and its first writer needs no further mark. An interrupted creation
//! is found in `writers/` without another name. All other nodes are created in `staging/` and renamed into place.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use impresario_layout::Layout;
use impresario_wire::message::{Attr, Device, FileKey, LayoutRequest, NodeKind, Opened};
use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;

use super::changes::By;
use super::directory::key_name;
use super::disk::PATH_FLAGS;
use super::fault::{Explain, Outcome, fault, show};
use super::opens::{Found, OpenFile, Pin, Room, Session};
use super::permissions::{LAYOUT_CHANGE, User, not_owned};
use super::record::{
    FILE_ATTRIBUTE, LAYOUT_ATTRIBUTE, LAYOUT_REQUEST_BYTES, Record, Seen, decode_layout_request, encode_layout_request,
};
use super::removal::TRIES;
use super::service::Meta;
use super::tree::{Absent, EntryRef, check_path, local_attr};
use crate::workers::waiting_elsewhere;

const SETGID: u32 = 0o2000;
/// Numbers of devices that every local file system of Linux keeps; of larger ones it would keep a part.
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;
/// Longest target of a symbolic link, bytes.
const LINK_MAX_BYTES: usize = 4095;

impl Meta {
    /// Creates a file and opens it for writing; `owned` is mode, uid and gid. `user`: for whom it has to be permitted.
    pub(super) fn create(
        &self,
        session: &Session,
        by: By<'_>,
        user: Option<&User>,
        path: &[u8],
        (owned, exclusive, request): ([u32; 3], bool, Option<LayoutRequest>),
    ) -> Outcome<Opened> {
        let room = session.take_room()?;
        let doing = "create";
        let root = if exclusive { Errno::EXIST } else { Errno::ISDIR };
        let known = by.absent.and_then(|absent| self.dir.entry_in(absent, path));
        // Its link says whether the name was taken meanwhile.
        let mut is_absent = known.is_some();
        let entry = known.map_or_else(|| self.entry_for(user, path, doing), |entry| Ok(Some(entry)))?;
        let entry = entry.ok_or(root).explain(doing, path)?;
        for _ in 0..TRIES {
            match if std::mem::take(&mut is_absent) { Err(Errno::NOENT) } else { entry.stat() } {
                Ok(_) if exclusive => return Err(Errno::EXIST).explain(doing, path),
                Ok(_) => match self.pin_at(&entry, "open") {
                    Err(gone) if gone.errno == Errno::NOENT.raw_os_error() => continue,
                    pin => return self.open_pinned(room, pin?, true, path),
                },
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno).explain(doing, path),
            }
            if let Some(user) = user {
                self.permit_new(user, &entry, doing)?;
            }
            let layout = self.layout_for(&entry, request)?;
            // What is opened if it is there may be asked for again.
            if !exclusive {
                self.changes.begin(&self.dir, by, 0)?.goes_on();
            }
            match self.make_file(exclusive.then_some(by), &entry, layout, owned)? {
                Some(pin) => return self.open_made(room, &pin, path),
                None if exclusive => return Err(Errno::EXIST).explain(doing, path),
                None => {}
            }
        }
        Err(Errno::BUSY).explain(doing, path)
    }

    /// The directory of a path that names nothing; `None` also where that cannot be told.
    pub(super) fn absent(&self, path: &[u8]) -> Option<Absent> {
        check_path(path).ok()?;
        let entry = self.dir.entry(path).ok()??;
        let is_absent = entry.stat().is_err_and(|errno| errno == Errno::NOENT);
        is_absent.then(|| Absent::of(entry))
    }

    /// Opens a file that was just made. Its session may have ended meanwhile, but the file is there, and a copy of the call must
    /// learn of it: so this is no failure. Nobody hears the answer, and its handle is none.
    fn open_made(&self, room: Room<'_>, pin: &Pin<'_>, path: &[u8]) -> Outcome<Opened> {
        match self.grant_handle(room, pin, true, true, path) {
            Err(ended) if ended.errno == Errno::NOTCONN.raw_os_error() => {
                let attr = self.local_attr_of(pin, path)?;
                Ok(Opened { handle: 0, file: pin.key, layout: pin.layout, made: 0, attr })
            }
            opened => opened,
        }
    }

    /// A new file with one writer; `None` if the name was taken meanwhile. `by`: the change is to be noted.
    fn make_file(
        &self,
        by: Option<By<'_>>,
        entry: &EntryRef<'_>,
        layout: Layout,
        owned: [u32; 3],
    ) -> Outcome<Option<Pin<'_>>> {
        let doing = "create";
        let (disk, writers) = (&self.dir.disk, &self.dir.writers);
        let key = self.new_key().explain(doing, entry.path)?;
        let name = key_name(key);
        let fd = disk.make_file(writers, &name).explain(doing, entry.path)?;
        let record = Record { key, layout, seen: Seen::default(), spare: None };
        let prepared = disk.set_attribute(&fd, FILE_ATTRIBUTE, &record.encode()).and_then(|()| {
            let directory = rustix::fs::fstat(entry.directory())?;
            self.set_ownership(&fd, entry, &directory, owned, NodeKind::File)?;
            Ok((rustix::fs::fstat(&fd)?.st_ino, directory.st_ino))
        });
        let undo = |errno| {
            let _ = disk.unlink(writers, name.as_bytes());
            Err(errno)
        };
        let (ino, directory) = prepared.or_else(undo).explain(doing, entry.path)?;
        let _name = self.names.hold_in(directory, entry);
        let undone = by.map(|by| self.changes.begin(&self.dir, by, ino)).transpose();
        let undone = undone.inspect_err(|_| {
            let _ = disk.unlink(writers, name.as_bytes());
        })?;
        let file = OpenFile { read_at: self.opens.switches(), ..OpenFile::of(ino, fd, record) };
        // In the table, marked and with its writer before any other call can find it.
        self.opens.set_mark(ino, key, false);
        let pin = match self.insert_pinned(file, entry.path, false) {
            Found::Pinned(pin) => pin,
            Found::Removed | Found::Absent => return Err(Errno::BUSY).explain(doing, entry.path),
        };
        let admitted = self.opens.admit(ino, true);
        let linked = match admitted {
            Ok(()) => disk.link(writers, name.as_bytes(), entry.directory(), entry.name),
            Err(full) => {
                drop(undone);
                let _ = disk.unlink(writers, name.as_bytes());
                self.opens.clear_mark(ino);
                return Err(full);
            }
        };
        if let Err(errno) = linked {
            self.opens.leave(ino, true);
            drop(undone);
            disk.unlink(writers, name.as_bytes()).explain("undo the creation of", entry.path)?;
            self.opens.clear_mark(ino);
            return if errno == Errno::EXIST { Ok(None) } else { Err(errno).explain(doing, entry.path) };
        }
        if let Some(undone) = undone {
            undone.made(key);
        }
        Ok(Some(pin))
    }

    /// Gives a new node its owner, mode and access control lists. `directory`: the one that it gets its name in.
    fn set_ownership(
        &self,
        node: &OwnedFd,
        entry: &EntryRef<'_>,
        directory: &Stat,
        owned: [u32; 3],
        kind: NodeKind,
    ) -> rustix::io::Result<()> {
        let [mode, uid, gid] = owned;
        let inherits = directory.st_mode & SETGID != 0;
        // Without root, everything belongs to the user that the server runs as.
        if self.dir.disk.root {
            let gid = if inherits { directory.st_gid } else { gid };
            self.dir.disk.set_owner(node, Some(uid), Some(gid))?;
        }
        let inherited = self.inherited(entry.directory(), kind, mode)?;
        self.set_inherited(node, &inherited)?;
        let is_passed_on = inherits && kind == NodeKind::Dir;
        self.dir.disk.set_mode(node, inherited.mode | if is_passed_on { SETGID } else { 0 })
    }

    /// The place of a new name that something other than a file gets.
    fn absent_at<'a>(&'a self, path: &'a [u8], doing: &str) -> Outcome<EntryRef<'a>> {
        let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::EXIST)).explain(doing, path)?;
        match entry.stat() {
            Ok(_) => Err(Errno::EXIST).explain(doing, path),
            Err(Errno::NOENT) => Ok(entry),
            Err(errno) => Err(errno).explain(doing, path),
        }
    }

    /// Makes a node in `staging/`, has it prepared there, and gives it its name.
    fn make_staged(
        &self,
        by: By<'_>,
        (entry, kind, doing): (&EntryRef<'_>, NodeKind, &str),
        make: impl FnOnce(&OwnedFd, &str) -> rustix::io::Result<()>,
        prepare: impl FnOnce(&OwnedFd, &Stat) -> rustix::io::Result<()>,
    ) -> Outcome<Attr> {
        let (disk, staging, name) = (&self.dir.disk, &self.dir.staging, self.staging_name());
        let is_dir = kind == NodeKind::Dir;
        make(staging, &name).explain(doing, entry.path)?;
        let place = || {
            let node = match is_dir {
                true => disk.open_dir_in(staging, &name),
                false => rustix::fs::openat(staging, &name, PATH_FLAGS, Mode::empty()),
            };
            let node = node.explain(doing, entry.path)?;
            let directory = rustix::fs::fstat(entry.directory()).explain(doing, entry.path)?;
            prepare(&node, &directory).explain(doing, entry.path)?;
            let ino = rustix::fs::fstat(&node).explain(doing, entry.path)?.st_ino;
            let _name = self.names.hold_in(directory.st_ino, entry);
            let undone = self.changes.begin(&self.dir, by, ino)?;
            let _special = (!is_dir && kind != NodeKind::Symlink).then(|| disk.with_specials());
            let placed = disk.rename(staging, name.as_bytes(), entry.directory(), entry.name, true);
            placed.explain(doing, entry.path)?;
            undone.done();
            rustix::fs::fstat(&node).and_then(|stat| local_attr(&stat)).explain(doing, entry.path)
        };
        place().inspect_err(|_| {
            let _ =
                if is_dir { disk.remove_dir(staging, name.as_bytes()) } else { disk.unlink(staging, name.as_bytes()) };
        })
    }

    /// Creates a directory; it inherits the default layout of its parent.
    pub(super) fn mkdir(&self, by: By<'_>, path: &[u8], owned: [u32; 3]) -> Outcome<Attr> {
        let doing = "create the directory";
        let entry = self.absent_at(path, doing)?;
        let request = self.default_layout_of(&entry)?;
        let disk = &self.dir.disk;
        let prepare = |node: &OwnedFd, directory: &Stat| {
            if let Some(request) = request {
                disk.set_attribute(node, LAYOUT_ATTRIBUTE, &encode_layout_request(&request))?;
            }
            self.set_ownership(node, &entry, directory, owned, NodeKind::Dir)
        };
        let make = |staging: &OwnedFd, name: &str| disk.make_dir(staging, name);
        self.make_staged(by, (&entry, NodeKind::Dir, doing), make, prepare)
    }

    /// Creates a symbolic link.
    pub(super) fn symlink(&self, by: By<'_>, path: &[u8], target: &[u8], uid: u32, gid: u32) -> Outcome<Attr> {
        let doing = "create the symbolic link";
        let wrong = match target {
            [] => Some((Errno::NOENT, "is empty")),
            _ if target.len() > LINK_MAX_BYTES => Some((Errno::NAMETOOLONG, "is longer than 4095 bytes")),
            _ if target.contains(&0) => Some((Errno::INVAL, "has a NUL byte")),
            _ => None,
        };
        if let Some((errno, wrong)) = wrong {
            return Err(fault(errno, format!("cannot {doing} {}: its target {wrong}", show(path))));
        }
        let entry = self.absent_at(path, doing)?;
        let disk = &self.dir.disk;
        let prepare = |node: &OwnedFd, directory: &Stat| {
            if !disk.root {
                return Ok(());
            }
            let gid = if directory.st_mode & SETGID != 0 { directory.st_gid } else { gid };
            disk.set_owner(node, Some(uid), Some(gid))
        };
        let make = |staging: &OwnedFd, name: &str| disk.make_symlink(target, staging, name);
        self.make_staged(by, (&entry, NodeKind::Symlink, doing), make, prepare)
    }

    /// Creates a pipe, a socket or a device.
    pub(super) fn make_special(&self, by: By<'_>, path: &[u8], kind: NodeKind, owned: [u32; 3]) -> Outcome<Attr> {
        let doing = "create";
        let node = special_of(kind).explain(doing, path)?;
        let entry = self.absent_at(path, doing)?;
        let make = |staging: &OwnedFd, name: &str| self.dir.disk.make_node(staging, name, node);
        let prepare = |node: &OwnedFd, directory: &Stat| self.set_ownership(node, &entry, directory, owned, kind);
        self.make_staged(by, (&entry, kind, doing), make, prepare)
    }

    fn staging_name(&self) -> String {
        format!("{:x}", self.staged.fetch_add(1, Ordering::Relaxed))
    }

    /// The key of a new file, whose layout was chosen before.
    pub(super) fn new_key(&self) -> rustix::io::Result<FileKey> {
        self.dir.new_key(self.options.answered.as_ref().map_or(0, |answered| answered.keys_from()))
    }

    /// The layout of a new file: as requested, else the default of its directory, else of the cluster.
    fn layout_for(&self, entry: &EntryRef<'_>, asked: Option<LayoutRequest>) -> Outcome<Layout> {
        let directory = self.default_layout_of(entry)?.unwrap_or_default();
        let asked = asked.unwrap_or_default();
        let request = LayoutRequest {
            base: asked.base.or(directory.base),
            pcount: asked.pcount.or(directory.pcount),
            ssize_bytes: asked.ssize_bytes.or(directory.ssize_bytes),
        };
        self.resolve(&request, || self.dealt.fetch_add(1, Ordering::Relaxed), entry.path)
    }

    pub(super) fn resolve(&self, request: &LayoutRequest, deal: impl FnOnce() -> u64, path: &[u8]) -> Outcome<Layout> {
        let options = &self.options;
        let ssize_bytes = request.ssize_bytes.unwrap_or(options.stripe_bytes);
        let pcount = request.pcount.unwrap_or(options.stripe_count);
        let (wanted, servers) = (request.base, options.data_servers);
        let skipped = (options.skipped)();
        let skipped = match &options.answered {
            Some(answered) => waiting_elsewhere(|| answered.skipped(skipped))
                .map_err(|why| fault(Errno::IO, format!("cannot stripe {}: {why}", show(path))))?,
            None => skipped,
        };
        let skipped = skipped.below(servers);
        let active = servers - skipped.len();
        if active == 0 {
            let why = "all data servers that the metadata server knows are draining or retired; restart it when others were added";
            return Err(fault(Errno::NOSPC, format!("cannot stripe {}: {why}", show(path))));
        }
        let nth = |n: u64| skipped.nth_other((n % u64::from(active)) as u16);
        let base = match wanted {
            // The next one in its place.
            Some(base) if base < servers => nth(u64::from(base - skipped.below_count(base))),
            Some(base) => base,
            None => nth(deal()),
        };
        // A wish for more than there are just now is not refused: it is of a directory that was there before, or a copy's.
        let pcount = if pcount <= servers { pcount.min(active) } else { pcount };
        Layout::new(base, pcount, ssize_bytes, servers)
            .and_then(|layout| layout.without(skipped))
            .map_err(|error| fault(Errno::INVAL, format!("cannot stripe {}: {error}", show(path))))
    }

    /// The default layout that the directory of an entry gives to new files, if any.
    fn default_layout_of(&self, entry: &EntryRef<'_>) -> Outcome<Option<LayoutRequest>> {
        let mut bytes = [0; 2 * LAYOUT_REQUEST_BYTES];
        let len = match self.dir.disk.attribute(entry.directory(), LAYOUT_ATTRIBUTE, &mut bytes) {
            Err(Errno::NODATA) => return Ok(None),
            Err(Errno::RANGE) => 0,
            other => other.explain("read the striping of the directory of", entry.path)?,
        };
        bytes.get(..len).and_then(decode_layout_request).map(Some).ok_or_else(|| {
            let why = "this program does not understand the default layout of its directory; set it again";
            fault(Errno::IO, format!("cannot stripe {}: {why}", show(entry.path)))
        })
    }

    /// Sets the default layout of files created in a directory.
    pub(super) fn set_layout(&self, path: &[u8], request: Option<LayoutRequest>, user: Option<&User>) -> Outcome<()> {
        let doing = "set the striping of";
        let entry = self.entry_for(user, path, doing)?;
        let directory = self.dir.open_dir_at(entry.as_ref()).explain(doing, path)?;
        if let Some(request) = &request {
            // It may wait for data servers, and nobody for that.
            self.resolve(request, || 0, path)?;
        }
        // The owner does not change from here on: the user may have lost the directory since the call was permitted.
        let _modes = match user {
            Some(user) => {
                let modes = self.dir.disk.modes.lock();
                if !self.is_owned_by(user, &directory).explain(doing, path)? {
                    return Err(not_owned(user, LAYOUT_CHANGE, path));
                }
                Some(modes)
            }
            None => None,
        };
        match request {
            None => self.dir.disk.remove_attribute(&directory, LAYOUT_ATTRIBUTE).explain(doing, path),
            Some(request) => {
                let set = encode_layout_request(&request);
                self.dir.disk.set_attribute(&directory, LAYOUT_ATTRIBUTE, &set).explain(doing, path)
            }
        }
    }
}

/// Type and number of a node that is no file, directory or symbolic link.
fn special_of(kind: NodeKind) -> rustix::io::Result<(FileType, u64)> {
    let device = |device: Device| match device.major <= MAJOR_MAX && device.minor <= MINOR_MAX {
        true => Ok(rustix::fs::makedev(device.major, device.minor)),
        false => Err(Errno::INVAL),
    };
    Ok(match kind {
        NodeKind::Fifo => (FileType::Fifo, 0),
        NodeKind::Socket => (FileType::Socket, 0),
        NodeKind::Character(number) => (FileType::CharacterDevice, device(number)?),
        NodeKind::Block(number) => (FileType::BlockDevice, device(number)?),
        NodeKind::File | NodeKind::Dir | NodeKind::Symlink => return Err(Errno::INVAL),
    })
}
