//! Metadata calls on a folder: paths become nodes, one name at a time, and what is asked is done to them.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use impresario_backend::{Attr as Node, Errno, Handle, Kind, Make, SetAttr as Change, SetTime as When};
use impresario_sched::Op;
use impresario_wire::{
    Answer, Attr, Device, Entry, Fault, MetaCall, NodeKind, Opened, SetAttr, SetTime, Statfs, Target, masked_mode,
};

use super::files::{anywhere, key_of, striping};
use super::listing::{Snapshot, fits};
use super::{Tree, TreeSession, outward, time};

type Outcome<T> = Result<T, Fault>;

/// Longest path, bytes.
const PATH_MAX_BYTES: usize = 64 << 10;
/// Entries of one answer at most.
const ENTRIES_MAX: usize = 8192;

/// Adds the operation and its path to a bare error number.
trait Explain<T> {
    fn explain(self, doing: &str, path: &[u8]) -> Outcome<T>;
}

impl<T> Explain<T> for impresario_backend::Result<T> {
    fn explain(self, doing: &str, path: &[u8]) -> Outcome<T> {
        self.map_err(|Errno(errno)| {
            let reason = match errno {
                libc::ELOOP => "a component of the path is a symbolic link; resolve it on the client".into(),
                libc::EACCES | libc::EPERM => {
                    "the user that the I/O node runs as lacks permission; run it as root".into()
                }
                libc::EOPNOTSUPP => "it is no file".into(),
                libc::EXDEV => "it is on another file system than the folder".into(),
                errno => Errno(errno).to_string(),
            };
            let message = format!("cannot {doing} {}: {reason}", crate::meta::show(path));
            Fault { errno: outward(errno), message }
        })
    }
}

/// Attributes for the wire.
fn attr_of(node: &Node) -> Attr {
    let device = Device { major: node.device.0, minor: node.device.1 };
    let kind = match node.kind {
        Kind::File => NodeKind::File,
        Kind::Directory => NodeKind::Dir,
        Kind::Symlink => NodeKind::Symlink,
        Kind::Fifo => NodeKind::Fifo,
        Kind::Socket => NodeKind::Socket,
        Kind::Character => NodeKind::Character(device),
        Kind::Block => NodeKind::Block(device),
    };
    Attr {
        ino: node.fileid,
        kind,
        mode: node.mode,
        nlink: node.links,
        uid: node.uid,
        gid: node.gid,
        size: node.size_bytes,
        used_bytes: node.used_bytes,
        atime: time(node.atime),
        mtime: time(node.mtime),
        ctime: time(node.ctime),
        labelled: false,
    }
}

fn change_of(set: &SetAttr) -> Change {
    let when = |set: SetTime| match set {
        SetTime::Now => When::Now,
        SetTime::At(at) => {
            let secs = Duration::from_secs(at.secs.unsigned_abs());
            let whole = if at.secs < 0 { UNIX_EPOCH.checked_sub(secs) } else { UNIX_EPOCH.checked_add(secs) };
            let nanos = Duration::from_nanos(at.nanos.min(999_999_999).into());
            When::To(whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH))
        }
    };
    Change {
        mode: set.mode.map(|mode| mode & 0o7777),
        takes: set.takes,
        uid: set.uid,
        gid: set.gid,
        size_bytes: set.size,
        atime: set.atime.map(when),
        mtime: set.mtime.map(when),
    }
}

/// The names of a path from the root.
fn names_of(path: &[u8]) -> impresario_backend::Result<Vec<&[u8]>> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    if path.len() > PATH_MAX_BYTES {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let good = names.iter().all(|name| !name.is_empty() && !name.contains(&0) && *name != b"." && *name != b"..");
    if good { Ok(names) } else { Err(Errno(libc::EINVAL)) }
}

impl Tree {
    /// Serves a call.
    pub(super) fn serve(&self, session: &TreeSession, call: MetaCall) -> Outcome<Answer> {
        let (backend, caller) = (self.backend(), &self.settings.caller);
        Ok(match call {
            MetaCall::GetAttr { target: Target::Path(path) } => {
                Answer::Attr(self.find(&path).map(|(_, node)| attr_of(&node)).explain("get the attributes of", &path)?)
            }
            MetaCall::GetAttr { target: Target::Handle(handle) } => {
                let file = session.opened(handle)?;
                let node = backend.attr(&file.handle).map_err(|error| self.failed(error, "looking at an open file"))?;
                Answer::Attr(attr_of(&node))
            }
            MetaCall::SetAttr { target: Target::Path(path), set } => {
                let node = self.find(&path).and_then(|(handle, _)| self.set_attr(&handle, &set));
                Answer::Attr(node.map(|node| attr_of(&node)).explain("change the attributes of", &path)?)
            }
            MetaCall::SetAttr { target: Target::Handle(handle), set } => {
                let file = session.opened(handle)?;
                let node = self.set_attr(&file.handle, &set);
                let node = node.map_err(|error| self.failed(error, "changing an open file"))?;
                Answer::Attr(attr_of(&node))
            }
            MetaCall::Create { layout: Some(_), path, .. } => return Err(no_layouts(&path)),
            MetaCall::Create { path, mode, uid, gid, exclusive, layout: None } => {
                let what = if exclusive { Make::File } else { Make::FileIfNone };
                let (dir, (handle, _)) =
                    self.make(&path, what, [masked_mode(mode), uid, gid]).explain("create", &path)?;
                let opened = self.open(session, handle)?;
                if let Ok(file) = session.opened(opened.handle) {
                    *file.made_in.lock() = Some(dir);
                }
                Answer::Opened(opened)
            }
            MetaCall::Open { path, write: _ } => {
                let (handle, node) = self.find(&path).explain("open", &path)?;
                openable(&node).explain("open", &path)?;
                Answer::Opened(self.open(session, handle)?)
            }
            MetaCall::Reopen { path, file, write: _ } => {
                let found = self.find(&path).and_then(|(handle, node)| openable(&node).map(|()| handle));
                let found = found.and_then(|handle| match key_of(&handle) == file {
                    true => Ok(handle),
                    // Another file has its name by now.
                    false => Err(Errno(libc::ENOENT)),
                });
                Answer::Opened(self.open(session, found.explain("open again", &path)?)?)
            }
            MetaCall::Close { handle, .. } => {
                session.close(handle)?;
                Answer::Done
            }
            MetaCall::Fsync { handle } => {
                let file = session.opened(handle)?;
                let sync = |node: &Handle| backend.sync(node).map_err(|error| self.failed(error, "syncing"));
                file.attributes.sync(|| sync(&file.handle))?;
                let made_in = *file.made_in.lock();
                if let Some(dir) = made_in {
                    match backend.sync(&dir) {
                        // The directory is gone, and the name with it.
                        Err(Errno(libc::ESTALE)) | Ok(()) => *file.made_in.lock() = None,
                        Err(error) => return Err(self.failed(error, "syncing the directory")),
                    }
                }
                Answer::Done
            }
            MetaCall::Append { .. } => {
                let message = "a folder of a file system knows no ranges for appends of several nodes";
                return Err(Fault { errno: libc::EOPNOTSUPP, message: message.into() });
            }
            MetaCall::CutBack { .. } => {
                let message = "a folder of a file system does not tell who else has written a file";
                return Err(Fault { errno: libc::EOPNOTSUPP, message: message.into() });
            }
            MetaCall::SyncAll => self.sync_all()?,
            MetaCall::FsyncDir { path } => {
                self.find(&path).and_then(|(handle, _)| backend.sync(&handle)).explain("sync", &path)?;
                Answer::Done
            }
            MetaCall::Mkdir { path, mode, uid, gid } => {
                let owned = [masked_mode(mode), uid, gid];
                let (_, (_, node)) = self.make(&path, Make::Directory, owned).explain("make", &path)?;
                Answer::Attr(attr_of(&node))
            }
            MetaCall::Symlink { path, target, uid, gid } => {
                let made = self.make(&path, Make::Symlink(&target), [0o777, uid, gid]);
                let (_, (_, node)) = made.explain("make the link", &path)?;
                Answer::Attr(attr_of(&node))
            }
            MetaCall::Mknod { path, kind, mode, uid, gid } => {
                let what = match kind {
                    NodeKind::Fifo => Ok(Make::Fifo),
                    NodeKind::Socket => Ok(Make::Socket),
                    NodeKind::Character(device) => Ok(Make::Character(device.major, device.minor)),
                    NodeKind::Block(device) => Ok(Make::Block(device.major, device.minor)),
                    NodeKind::File | NodeKind::Dir | NodeKind::Symlink => Err(Errno(libc::EINVAL)),
                };
                let made = what.and_then(|what| self.make(&path, what, [masked_mode(mode), uid, gid]));
                let (_, (_, node)) = made.explain("make", &path)?;
                Answer::Attr(attr_of(&node))
            }
            MetaCall::Rmdir { path } => {
                self.at(&path)
                    .and_then(|(dir, name)| backend.remove_dir(caller, &dir, name))
                    .explain("remove", &path)?;
                Answer::Done
            }
            MetaCall::Unlink { path } => {
                let removed = self.at(&path).and_then(|(dir, name)| {
                    let (node, _) = backend.lookup(caller, &dir, name)?;
                    backend.remove(caller, &dir, name)?;
                    Ok(self.removed(&node))
                });
                removed.explain("remove", &path)?
            }
            MetaCall::Rename { from, whiteout: true, .. } => {
                Err(Errno(libc::EINVAL)).explain("leave a whiteout at", &from)?
            }
            MetaCall::Rename { from, to, no_replace, whiteout: false } => {
                let renamed = self.at(&from).and_then(|(old_dir, old)| {
                    let (new_dir, new) = self.at(&to)?;
                    let replaced = if no_replace { None } else { backend.lookup(caller, &new_dir, new).ok() };
                    // To another name of the same node a rename does nothing.
                    let is_same = |(node, attr): &(Handle, Node)| {
                        attr.links > 1 && backend.lookup(caller, &old_dir, old).is_ok_and(|(moved, _)| moved == *node)
                    };
                    let replaced = replaced.filter(|there| there.1.kind != Kind::Directory && !is_same(there));
                    let (old, new) = ((&old_dir, old), (&new_dir, new));
                    match no_replace {
                        true => backend.rename_new(caller, old, new)?,
                        false => backend.rename(caller, old, new)?,
                    }
                    Ok(replaced.map_or(Answer::Done, |(node, _)| self.removed(&node)))
                });
                renamed.explain("rename", &from)?
            }
            MetaCall::Exchange { from, to } => {
                let exchanged = self.at(&from).and_then(|(dir, name)| {
                    let (other_dir, other) = self.at(&to)?;
                    backend.exchange(caller, (&dir, name), (&other_dir, other))
                });
                exchanged.explain("exchange", &from)?;
                Answer::Done
            }
            MetaCall::Link { from, to } => {
                let linked = self.find(&from).and_then(|(node, attr)| {
                    let (dir, name) = self.at(&to)?;
                    match backend.link(caller, &node, &dir, name) {
                        Err(Errno(libc::EPERM)) if attr.kind != Kind::Directory => Err(Errno(libc::EOPNOTSUPP)),
                        other => other,
                    }
                });
                let linked = linked.map_err(|Errno(errno)| {
                    let why = match errno {
                        libc::EPERM => "directories have one name only".into(),
                        libc::EOPNOTSUPP => {
                            "the file system below has no hard links, or does not let this user make them".into()
                        }
                        libc::EXDEV => "the two names are on different file systems".into(),
                        errno => Errno(errno).to_string(),
                    };
                    let path = crate::meta::show(&from);
                    Fault { errno: outward(errno), message: format!("cannot link {path}: {why}") }
                });
                Answer::Attr(attr_of(&linked?))
            }
            MetaCall::Readlink { path } => {
                let text = self.find(&path).and_then(|(handle, _)| backend.read_link(caller, &handle));
                Answer::Link(text.explain("read the link", &path)?)
            }
            MetaCall::Readdir { path, after, max } => {
                Answer::Entries(self.list(session, &path, &after, max).explain("list", &path)?)
            }
            MetaCall::Statfs => {
                let space =
                    backend.root().and_then(|root| backend.space(&root)).explain("ask for the free space of", b"")?;
                Answer::Statfs(Statfs {
                    total_bytes: space.total_bytes,
                    free_bytes: space.available_bytes,
                    files: space.total_files,
                    files_free: space.free_files,
                })
            }
            MetaCall::SetLayout { path, .. } => return Err(no_layouts(&path)),
            MetaCall::GetXattr { .. } | MetaCall::ListXattr { .. } | MetaCall::SetXattr { .. } => {
                let message = "extended attributes of a folder of a file system are not passed on";
                return Err(Fault { errno: libc::EOPNOTSUPP, message: message.into() });
            }
            MetaCall::Lock(_) => {
                let message = "locks of a folder of a file system are kept by each mount for itself";
                return Err(Fault { errno: libc::EOPNOTSUPP, message: message.into() });
            }
            MetaCall::Examine(_) | MetaCall::Relay(_) | MetaCall::Restrict(_) | MetaCall::Prove { .. } => {
                let message =
                    "a folder of a file system has no names and objects of ours to compare; use its own check";
                return Err(Fault { errno: libc::EOPNOTSUPP, message: message.into() });
            }
        })
    }

    /// Opens a file for a client.
    pub(super) fn open(&self, session: &TreeSession, handle: Handle) -> Outcome<Opened> {
        let backend = self.backend();
        let lanes = self.settings.lanes;
        let file = self.files.open(backend, handle, || match backend.placement(&handle) {
            Ok(placement) => striping(&placement, lanes, self.settings.split),
            Err(_) => anywhere(&handle, lanes),
        });
        let file = file.explain("open", b"a file")?;
        let (key, layout) = (file.key, file.striping.layout);
        let handle = session.keep(file.clone())?;
        let attr = backend.attr(&file.handle).map(|node| attr_of(&node)).explain("open", b"a file");
        let attr = attr.inspect_err(|_| drop(session.close(handle)))?;
        Ok(Opened { handle, file: key, layout, made: 0, attr })
    }

    fn set_attr(&self, node: &Handle, set: &SetAttr) -> impresario_backend::Result<Node> {
        if let (Some(ahead), Some(size)) = (&self.ahead, set.size) {
            ahead.changed(Op::Truncate, key_of(node), size);
        }
        let set = self.backend().set_attr(&self.settings.caller, node, &change_of(set));
        if let Some(file) = self.files.get(key_of(node)) {
            file.attributes.changed();
        }
        set
    }

    /// What is left of a node that lost a name.
    fn removed(&self, node: &Handle) -> Answer {
        let links = match self.backend().attr(node) {
            Ok(attr) => attr.links,
            Err(Errno(libc::ESTALE)) => 0,
            Err(_) => return Answer::Done,
        };
        if let (Some(ahead), 0) = (&self.ahead, links) {
            ahead.changed(Op::Unlink, key_of(node), 0);
        }
        Answer::Removed { links }
    }

    /// The node of a path.
    fn find(&self, path: &[u8]) -> impresario_backend::Result<(Handle, Node)> {
        self.walk(&names_of(path)?)
    }

    /// The directory of a path and the name in it.
    fn at<'p>(&self, path: &'p [u8]) -> impresario_backend::Result<(Handle, &'p [u8])> {
        let names = names_of(path)?;
        // The root has no name.
        let Some((name, dirs)) = names.split_last() else { return Err(Errno(libc::EPERM)) };
        let (dir, node) = self.walk(dirs)?;
        match node.kind {
            Kind::Directory => Ok((dir, name)),
            Kind::Symlink => Err(Errno(libc::ELOOP)),
            _ => Err(Errno(libc::ENOTDIR)),
        }
    }

    fn walk(&self, names: &[&[u8]]) -> impresario_backend::Result<(Handle, Node)> {
        let backend = self.backend();
        let mut at = backend.root()?;
        let mut node: Option<Node> = None;
        for name in names {
            match node.as_ref().map(|node| node.kind) {
                None | Some(Kind::Directory) => {}
                Some(Kind::Symlink) => return Err(Errno(libc::ELOOP)),
                Some(_) => return Err(Errno(libc::ENOTDIR)),
            }
            let (next, attr) = backend.lookup(&self.settings.caller, &at, name)?;
            (at, node) = (next, Some(attr));
        }
        let node = node.map_or_else(|| backend.attr(&at), Ok)?;
        Ok((at, node))
    }

    /// Makes a node that belongs to its maker; its directory and itself.
    fn make(
        &self,
        path: &[u8],
        what: Make<'_>,
        [mode, uid, gid]: [u32; 3],
    ) -> impresario_backend::Result<(Handle, (Handle, Node))> {
        let (dir, name) = self.at(path)?;
        // In a directory with this bit new nodes get its group.
        let inherits = self.backend().attr(&dir)?.mode & 0o2000 != 0;
        let set = Change {
            mode: (!matches!(what, Make::Symlink(_))).then_some(mode & 0o7777),
            uid: Some(uid),
            gid: (!inherits).then_some(gid),
            ..Change::default()
        };
        let made = self.backend().make(&self.settings.caller, &dir, name, what, &set)?;
        Ok((dir, made))
    }

    fn list(
        &self,
        session: &TreeSession,
        path: &[u8],
        after: &[u8],
        max: u32,
    ) -> impresario_backend::Result<Vec<Entry>> {
        let (backend, caller) = (self.backend(), &self.settings.caller);
        let (dir, _) = self.find(path)?;
        let kept = session.state.lock().snapshot.clone();
        // A listing from the start sees the directory as it is now.
        let kept = kept.filter(|snapshot| snapshot.dir == dir && !after.is_empty() && snapshot.after(after).is_some());
        let snapshot = match kept {
            Some(kept) => kept,
            None => Arc::new(Snapshot::read(backend, caller, &dir, after)?),
        };
        let (mut entries, mut bytes, mut full, mut last) = (Vec::new(), 0, false, None);
        let most = (max as usize).clamp(1, ENTRIES_MAX);
        for name in snapshot.after(after).unwrap_or_default() {
            last = Some(name);
            // What was removed meanwhile is left out.
            let attr = match backend.lookup(caller, &dir, name) {
                Ok((_, node)) => Some(attr_of(&node)),
                Err(Errno(libc::ENOENT | libc::ESTALE | libc::EXDEV | libc::EACCES)) => None,
                Err(error) => return Err(error),
            };
            let Some(attr) = attr else { continue };
            let entry = Entry { name: name.clone(), attr };
            full = entries.len() >= most || !fits(&mut bytes, &entry);
            if full {
                break;
            }
            entries.push(entry);
        }
        // Nothing to tell of these names; an empty answer would be the end.
        let beyond = last.filter(|_| entries.is_empty() && !full && !snapshot.is_whole()).cloned();
        if let Some(beyond) = beyond {
            return self.list(session, path, &beyond, max);
        }
        let mut state = session.state.lock();
        state.snapshot = (full && !state.ended).then_some(snapshot);
        Ok(entries)
    }
}

fn openable(node: &Node) -> impresario_backend::Result<()> {
    match node.kind {
        Kind::File => Ok(()),
        Kind::Directory => Err(Errno(libc::EISDIR)),
        Kind::Symlink => Err(Errno(libc::ELOOP)),
        _ => Err(Errno(libc::EOPNOTSUPP)),
    }
}

fn no_layouts(path: &[u8]) -> Fault {
    let path = crate::meta::show(path);
    let message = format!("cannot set the striping of {path}: the file system below decides it; use its own commands");
    Fault { errno: libc::EOPNOTSUPP, message }
}
