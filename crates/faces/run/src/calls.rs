//! What a program asks for, done with the cluster's client.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use impresario_base::lock::Mutex;
use impresario_client::{Client, ClientError, CreateOptions};
use impresario_interpose::served::protocol::{DATA_ONLY, Entries, Meta, Op, Request, UMASK_SHIFT};
use impresario_wire::{
    ACL_ACCESS, ACL_DEFAULT, Attr, Device, NodeKind, SetAttr, SetTime, Time, XATTRS_MAX_BYTES, XattrMode, with_umask,
};

use crate::ahead::{Ahead, Foresees, Opened};
use crate::locks::Peer;
use crate::mirror::Mirror;
use crate::open::{Node, Open, Opens};
use crate::rights::User;
use crate::walk::{Found, Named, errno, last_word, stat, walk};

mod data;

/// Names asked for at a time.
const NAMES_AT_ONCE: u32 = 512;
/// How often an open looks again at a name that others make and remove meanwhile.
const LOOKS: u32 = 100;
/// Longest value of an extended attribute in Linux, bytes.
const XATTR_MAX_BYTES: usize = 64 << 10;
/// Locks for appends, chosen by the file's number.
const APPENDS: usize = 64;

/// Why a call is not done.
pub(crate) enum Stop {
    Errno(i32),
    /// The path leads out of the cluster.
    Outside(Vec<u8>),
}

impl From<i32> for Stop {
    fn from(errno: i32) -> Stop {
        Stop::Errno(errno)
    }
}

impl From<ClientError> for Stop {
    fn from(error: ClientError) -> Stop {
        Stop::Errno(errno(&error))
    }
}

/// What is done.
#[derive(Default)]
pub(crate) struct Done {
    pub(crate) result: i64,
    pub(crate) fd: Option<OwnedFd>,
}

impl From<i64> for Done {
    fn from(result: i64) -> Done {
        Done { result, fd: None }
    }
}

/// A request with what came with it.
pub(crate) struct Incoming<'a> {
    pub(crate) peer: &'a Peer<'a>,
    pub(crate) numbers: Request,
    pub(crate) path: &'a [u8],
    pub(crate) other: &'a [u8],
    pub(crate) data: &'a [u8],
}

/// What calls act on.
pub(crate) struct Calls {
    client: Arc<Client>,
    user: User,
    /// The prefix under which programs know the cluster.
    at: Vec<u8>,
    /// The folders that stand for working directories.
    pub(crate) mirror: Mirror,
    pub(crate) opens: Opens,
    appends: [Mutex<()>; APPENDS],
    /// Held while the folder of a working directory is made, and while a directory and its folder are moved.
    entering: Mutex<()>,
    /// Hears of files that are only read.
    ahead: Option<Ahead>,
}

/// What an open has found or made: the node with its attributes, and its path.
type ToOpen = (Node, Attr, Vec<u8>);

/// What a call is about: an open file, or a name.
enum Target {
    Open(Arc<Open>),
    Named(Named),
}

impl Calls {
    pub(crate) fn new(
        client: Arc<Client>,
        at: Vec<u8>,
        mirror: Mirror,
        token: &str,
        foresees: Option<Box<dyn Foresees>>,
    ) -> std::io::Result<Calls> {
        let (appends, entering) = (std::array::from_fn(|_| Mutex::default()), Mutex::default());
        let (user, opens, ahead) = (User::new()?, Opens::new(token)?, foresees.map(Ahead::start).transpose()?);
        Ok(Calls { client, user, at, mirror, opens, appends, entering, ahead })
    }

    /// Does a call; data of the reply go into `out`, which is empty.
    pub(crate) fn call(&self, asked: &Incoming<'_>, out: &mut Vec<u8>) -> Result<Done, Stop> {
        let Request { op, a, b, c, room, .. } = asked.numbers;
        let room = room as usize;
        let done = match op {
            Op::Open => return self.open(asked.peer, asked.path, a as i32, new_mode(b)),
            Op::Read => self.read(asked, room, out)?,
            Op::Write => self.write(asked)?,
            Op::Seek => self.seek(asked)?,
            Op::Stat => {
                let follow = a as i32 & libc::AT_SYMLINK_NOFOLLOW == 0;
                out.extend(meta(&self.attr(&self.target(asked, follow)?)?).encode());
                0
            }
            Op::Space => self.change_space(asked)?,
            Op::Truncate => self.truncate(asked, u64::try_from(a).map_err(|_| libc::EINVAL)?)?,
            Op::Advise => self.advise(asked)?,
            Op::Sync => {
                let open = self.opens.get(asked.numbers.open)?;
                match &open.node {
                    Node::File(file) if a == DATA_ONLY => file.sync_data()?,
                    Node::File(file) => file.sync()?,
                    Node::Directory => self.client.sync_dir(path_of(&open))?,
                }
                0
            }
            Op::Lock => self.opens.lock(asked, out)?,
            Op::Flock => self.opens.locks.flock(asked, &*self.opens.get(asked.numbers.open)?)?,
            Op::Closed => {
                let key = self.opens.key_of(asked.numbers.open);
                let closed = self.opens.settle(asked.numbers.open);
                // Afterwards: meanwhile it uses open files, and the close of one in use does not say how it went.
                self.opens.drop_locks(key, asked.peer.pid);
                closed?;
                0
            }
            Op::Unlink if a & !i64::from(libc::AT_REMOVEDIR) != 0 => return Err(libc::EINVAL.into()),
            Op::Access if a & !i64::from(libc::R_OK | libc::W_OK | libc::X_OK) != 0 => return Err(libc::EINVAL.into()),
            Op::Unlink => self.unlink(asked.path, a as i32 & libc::AT_REMOVEDIR != 0)?,
            Op::Rename => self.rename(asked.path, asked.other, a as u32)?,
            Op::Link => {
                let from = self.inside(asked.path, a as i32 & libc::AT_SYMLINK_FOLLOW != 0)?;
                let to = self.new_entry(asked.other)?;
                let attr = from.attr()?;
                if attr.kind == NodeKind::Dir {
                    return Err(libc::EPERM.into());
                }
                let may_change = || self.user.may_at(&self.client, &from.path, attr, libc::R_OK | libc::W_OK).is_ok();
                self.user.may_link(attr, may_change)?;
                self.may_make(&to)?;
                self.client.link(&from.path, &to.path)?;
                0
            }
            Op::Symlink => {
                let named = self.new_entry(asked.path)?;
                let (gid, _) = self.user.inherited(&self.may_make(&named)?, 0);
                self.client.symlink(&named.path, asked.other, self.user.uid, gid)?;
                0
            }
            Op::Readlink => {
                let named = self.inside(asked.path, false)?;
                if named.attr()?.kind != NodeKind::Symlink {
                    return Err(libc::EINVAL.into());
                }
                out.extend(self.client.readlink(&named.path)?);
                out.truncate(room);
                out.len() as i64
            }
            Op::Mkdir => {
                let named = self.last(asked.path)?;
                let (gid, mode) = self.user.inherited(&self.may_make(&named)?, new_mode(a));
                self.client.mkdir(&named.path, mode, self.user.uid, gid)?;
                0
            }
            Op::Mknod => {
                let named = self.new_entry(asked.path)?;
                let (gid, _) = self.user.inherited(&self.may_make(&named)?, 0);
                let kind = match a as u32 & libc::S_IFMT {
                    libc::S_IFIFO => NodeKind::Fifo,
                    libc::S_IFSOCK => NodeKind::Socket,
                    _ => return Err(libc::EPERM.into()),
                };
                self.client.mknod(&named.path, kind, new_mode(a), self.user.uid, gid)?;
                0
            }
            Op::Chmod => {
                let target = self.target(asked, b as i32 & libc::AT_SYMLINK_NOFOLLOW == 0)?;
                let attr = self.attr(&target)?;
                if attr.kind == NodeKind::Symlink {
                    return Err(libc::EOPNOTSUPP.into());
                }
                self.user.owns(&attr)?;
                let mode = self.user.mode_to_set(&attr, a as u32 & 0o7777);
                self.set(&target, SetAttr { mode: Some(mode), ..SetAttr::default() })?;
                // Afterwards: a write that came between would find no bit yet, and not look again.
                self.opens.note_mode(attr.ino, mode);
                0
            }
            Op::Chown => {
                let target = self.target(asked, c as i32 & libc::AT_SYMLINK_NOFOLLOW == 0)?;
                let id = |id: i64| Some(id as u32).filter(|id| *id != u32::MAX);
                self.user.may_give(&self.attr(&target)?, id(a), id(b))?;
                self.set(&target, SetAttr { uid: id(a), gid: id(b), ..SetAttr::default() })?
            }
            Op::Times => self.times(asked)?,
            Op::Access => {
                let target = self.target(asked, b as i32 & libc::AT_SYMLINK_NOFOLLOW == 0)?;
                self.may(&target, &self.attr(&target)?, a as i32)?;
                0
            }
            Op::Readdir => {
                let open = self.opens.get(asked.numbers.open)?;
                if !matches!(open.node, Node::Directory) {
                    return Err(libc::ENOTDIR.into());
                }
                for entry in self.client.readdir(path_of(&open), asked.data, NAMES_AT_ONCE)? {
                    if !Entries::push(out, room, entry.attr.ino, d_type(entry.attr.kind), &entry.name) {
                        break;
                    }
                }
                0
            }
            Op::PathOf => {
                let open = self.opens.get(asked.numbers.open)?;
                out.extend(path_of(&open));
                0
            }
            Op::Realpath => {
                let named = self.inside(asked.path, true)?;
                named.attr()?;
                out.extend(named.path);
                0
            }
            Op::Enter => self.enter(asked, out)?,
            Op::Flags => i64::from(*self.opens.get(asked.numbers.open)?.flags.lock()),
            Op::SetFlags => {
                const CHANGE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME;
                let open = self.opens.get(asked.numbers.open)?;
                let mut flags = open.flags.lock();
                *flags = (*flags & !CHANGE) | (a as i32 & CHANGE);
                0
            }
            Op::GetXattr | Op::ListXattr | Op::SetXattr | Op::RemoveXattr => self.xattr(asked, room, out)?,
            Op::Statfs => {
                if let Target::Named(named) = self.target(asked, true)? {
                    named.attr()?;
                }
                let found = self.client.statfs()?;
                const BLOCK: u64 = 4096;
                let free = found.free_bytes / BLOCK;
                let words = [BLOCK, found.total_bytes / BLOCK, free, free, found.files, found.files_free];
                words.iter().for_each(|word| out.extend(word.to_ne_bytes()));
                0
            }
        };
        if out.len() > room {
            return Err(libc::ERANGE.into());
        }
        Ok(done.into())
    }

    fn inside(&self, path: &[u8], follow: bool) -> Result<Named, Stop> {
        match walk(&self.client, &self.user, &self.at, path, follow)? {
            Found::Inside(named) => Ok(named),
            Found::Outside(path) => Err(Stop::Outside(path)),
        }
    }

    /// What a name itself stands for: a link is not followed, even with a slash behind it. `.` and `..` stand for what is there.
    fn last(&self, path: &[u8]) -> Result<Named, Stop> {
        if matches!(last_word(path), b"." | b"..") {
            let named = self.inside(path, true)?;
            return if named.attr()?.kind == NodeKind::Dir { Ok(named) } else { Err(libc::ENOTDIR.into()) };
        }
        let end = path.iter().rposition(|byte| *byte != b'/').map_or(path.len(), |last| last + 1);
        self.inside(path.get(..end).unwrap_or(path), false)
    }

    /// The same, to be moved or removed: with a slash behind it, it is a directory's.
    fn entry(&self, path: &[u8]) -> Result<Named, Stop> {
        let named = self.last(path)?;
        match named.attr {
            Some(attr) if path.ends_with(b"/") && attr.kind != NodeKind::Dir => Err(libc::ENOTDIR.into()),
            _ => Ok(named),
        }
    }

    /// The same, for something new that is no directory.
    fn new_entry(&self, path: &[u8]) -> Result<Named, Stop> {
        let named = self.last(path)?;
        if named.attr.is_none() && path.ends_with(b"/") { Err(libc::ENOENT.into()) } else { Ok(named) }
    }

    fn target(&self, asked: &Incoming<'_>, follow: bool) -> Result<Target, Stop> {
        match asked.numbers.open {
            0 => self.inside(asked.path, follow).map(Target::Named),
            number => Ok(Target::Open(self.opens.get(number)?)),
        }
    }

    fn attr(&self, target: &Target) -> Result<Attr, Stop> {
        match target {
            Target::Named(named) => Ok(*named.attr()?),
            Target::Open(open) => match &open.node {
                Node::File(file) => Ok(file.attr()?),
                Node::Directory => Ok(self.client.stat(path_of(open))?),
            },
        }
    }

    /// Whether the user may do all of `wanted` with what a call is about.
    fn may(&self, target: &Target, attr: &Attr, wanted: i32) -> Result<(), i32> {
        let read_acl = || match target {
            Target::Named(named) => self.client.xattr(&named.path, ACL_ACCESS),
            Target::Open(open) => match &open.node {
                Node::File(file) => file.xattr(ACL_ACCESS),
                Node::Directory => self.client.xattr(path_of(open), ACL_ACCESS),
            },
        };
        self.user.may(attr, read_acl, wanted)
    }

    fn set(&self, target: &Target, set: SetAttr) -> Result<i64, Stop> {
        match target {
            Target::Named(named) => self.client.set_attr(&named.path, set)?,
            Target::Open(open) => match &open.node {
                Node::File(file) => file.set_attr(&set)?,
                Node::Directory => self.client.set_attr(path_of(open), set)?,
            },
        };
        Ok(0)
    }

    /// Whether a new name may be made; returns its directory.
    fn may_make(&self, named: &Named) -> Result<Attr, Stop> {
        if named.attr.is_some() {
            return Err(libc::EEXIST.into());
        }
        let parent = stat(&self.client, named.parent())?.ok_or(libc::ENOENT)?;
        self.user.may_at(&self.client, named.parent(), &parent, libc::W_OK | libc::X_OK)?;
        Ok(parent)
    }

    fn may_remove(&self, named: &Named) -> Result<(), Stop> {
        let attr = named.attr()?;
        if named.path.is_empty() {
            return Err(libc::EBUSY.into());
        }
        let parent = stat(&self.client, named.parent())?.ok_or(libc::ENOENT)?;
        self.user.may_at(&self.client, named.parent(), &parent, libc::W_OK | libc::X_OK)?;
        Ok(self.user.may_remove(&parent, attr)?)
    }

    fn open(&self, peer: &Peer<'_>, path: &[u8], flags: i32, mode: u32) -> Result<Done, Stop> {
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            return Err(libc::EOPNOTSUPP.into());
        }
        let mut changed = libc::ENOENT;
        for _ in 0..LOOKS {
            match self.open_as_found(path, flags, mode)? {
                Ok(found) => return self.opened(peer, found, flags),
                Err(errno) => changed = errno,
            }
        }
        Err(changed.into())
    }

    /// Opens what the path led to, or makes it. The inner error: others have made, removed or replaced it since; it is the
    /// answer if they do not cease.
    fn open_as_found(&self, path: &[u8], flags: i32, mode: u32) -> Result<Result<ToOpen, i32>, Stop> {
        let is_made = flags & libc::O_CREAT != 0;
        let is_new = is_made && flags & libc::O_EXCL != 0;
        let named = self.inside(path, flags & libc::O_NOFOLLOW == 0 && !is_new)?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let Some(attr) = named.attr else {
            if !is_made || last_word(path) == b"." {
                return Err(libc::ENOENT.into());
            }
            if path.ends_with(b"/") {
                return Err(libc::EISDIR.into());
            }
            let (gid, _) = self.user.inherited(&self.may_make(&named)?, 0);
            // What another has made meanwhile may not be this user's to open, and may be to be cut.
            let options = CreateOptions { mode, uid: self.user.uid, gid, exclusive: true, layout: None };
            return match self.client.create_with_attr(&named.path, options) {
                Ok((file, attr)) => Ok(Ok((Node::File(file), attr, named.path))),
                Err(error) if !is_new && error.errno() == libc::EEXIST => Ok(Err(libc::ENOENT)),
                Err(error) => Err(error.into()),
            };
        };
        if is_new {
            return Err(libc::EEXIST.into());
        }
        let wanted = match flags & libc::O_ACCMODE {
            _ if flags & libc::O_PATH != 0 => 0,
            libc::O_RDONLY if flags & libc::O_TRUNC == 0 => libc::R_OK,
            libc::O_WRONLY => libc::W_OK,
            _ => libc::R_OK | libc::W_OK,
        };
        match attr.kind {
            NodeKind::Symlink => Err(libc::ELOOP.into()),
            NodeKind::Dir if is_made || writes => Err(libc::EISDIR.into()),
            NodeKind::Dir => {
                self.user.may_at(&self.client, &named.path, &attr, wanted)?;
                Ok(Ok((Node::Directory, attr, named.path)))
            }
            NodeKind::File if flags & libc::O_DIRECTORY != 0 => Err(libc::ENOTDIR.into()),
            NodeKind::File => {
                self.user.may_at(&self.client, &named.path, &attr, wanted)?;
                let (file, now) = match self.client.open_with_attr(&named.path, writes) {
                    Err(error) if is_made && error.errno() == libc::ENOENT => return Ok(Err(libc::ENOENT)),
                    opened => opened?,
                };
                // Rights were checked on another file than the name has by now.
                if now.ino != attr.ino {
                    return Ok(Err(libc::ESTALE));
                }
                if flags & libc::O_TRUNC != 0 && flags & libc::O_PATH == 0 {
                    let takes = self.user.takes_by_change(&now);
                    file.set_attr(&SetAttr { size: Some(0), takes, ..SetAttr::default() })?;
                }
                Ok(Ok((Node::File(file), now, named.path)))
            }
            // Pipes, sockets and devices belong to the machine that opens them.
            _ => Err(libc::ENXIO.into()),
        }
    }

    fn opened(&self, peer: &Peer<'_>, (node, attr, path): ToOpen, flags: i32) -> Result<Done, Stop> {
        const ONCE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_NOCTTY | libc::O_CLOEXEC;
        // A file that is written tells by its close whether that succeeded: nothing else may hold it then.
        let is_only_read = flags & (libc::O_ACCMODE | libc::O_PATH) == libc::O_RDONLY;
        let foreseen = self.ahead.as_ref().filter(|_| is_only_read && attr.kind == NodeKind::File);
        let path_at = foreseen.map(|_| Path::new(OsStr::from_bytes(&self.at)).join(OsStr::from_bytes(&path)));
        let (fd, number, open) = self.opens.add(node, &attr, flags & !ONCE, path)?;
        if let Some((ahead, path)) = foreseen.zip(path_at) {
            open.is_foreseen.store(true, Relaxed);
            ahead.opened(&open, Opened { number, pid: peer.pid, path, size_bytes: attr.size });
        }
        Ok(Done { result: 0, fd: Some(fd) })
    }

    fn truncate(&self, asked: &Incoming<'_>, size: u64) -> Result<i64, Stop> {
        let target = self.target(asked, true)?;
        let mut takes = 0;
        match &target {
            Target::Open(open) if !open.may_write() => return Err(libc::EINVAL.into()),
            Target::Open(open) => self.take_set_id(open)?,
            Target::Named(named) => {
                let attr = named.attr()?;
                match attr.kind {
                    NodeKind::File => {
                        self.user.may_at(&self.client, &named.path, attr, libc::W_OK)?;
                        takes = self.user.takes_by_change(attr);
                    }
                    NodeKind::Dir => return Err(libc::EISDIR.into()),
                    _ => return Err(libc::EINVAL.into()),
                }
            }
        }
        self.set(&target, SetAttr { size: Some(size), takes, ..SetAttr::default() })
    }

    /// An open file is about to be changed: what would run it as its owner or group is taken away.
    fn take_set_id(&self, open: &Open) -> Result<(), Stop> {
        let file = open.file()?;
        let seen = open.set_id.load(Relaxed);
        if seen != 0 && !self.user.is_root() {
            let takes = self.user.takes_by_change(&file.attr()?);
            if takes != 0 {
                file.set_attr(&SetAttr { takes, ..SetAttr::default() })?;
            }
            // Not if a `chmod` came since: that is for the next change.
            let _ = open.set_id.compare_exchange(seen, 0, Relaxed, Relaxed);
        }
        Ok(())
    }

    fn unlink(&self, path: &[u8], is_directory: bool) -> Result<i64, Stop> {
        let named = self.entry(path)?;
        match (last_word(path), is_directory) {
            (b".", true) => return Err(libc::EINVAL.into()),
            (b"..", true) => return Err(libc::ENOTEMPTY.into()),
            (b"." | b"..", false) => return Err(libc::EISDIR.into()),
            _ => self.may_remove(&named)?,
        }
        match (is_directory, named.attr()?.kind) {
            (true, NodeKind::Dir) => self.client.rmdir(&named.path)?,
            (true, _) => return Err(libc::ENOTDIR.into()),
            (false, NodeKind::Dir) => return Err(libc::EISDIR.into()),
            (false, _) => self.client.unlink(&named.path)?,
        }
        Ok(0)
    }

    fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Result<i64, Stop> {
        let exchanges = flags == libc::RENAME_EXCHANGE;
        if !exchanges && flags & !(libc::RENAME_NOREPLACE | libc::RENAME_WHITEOUT) != 0 {
            return Err(libc::EINVAL.into());
        }
        let has_slash = to.ends_with(b"/");
        let [is_no_name, is_to_no_name] = [from, to].map(|path| matches!(last_word(path), b"." | b".."));
        let named = |path| match self.entry(path) {
            Err(Stop::Outside(_)) => Err(Stop::Errno(libc::EXDEV)),
            named => named,
        };
        let (from, to) = (named(from)?, named(to)?);
        if is_no_name || is_to_no_name {
            let is_there = !is_no_name && flags & libc::RENAME_NOREPLACE != 0;
            return Err(if is_there { libc::EEXIST } else { libc::EBUSY }.into());
        }
        self.may_remove(&from)?;
        match &to.attr {
            Some(_) if to.path.is_empty() => return Err(libc::EBUSY.into()),
            Some(_) => self.may_remove(&to)?,
            None if exchanges => return Err(libc::ENOENT.into()),
            None if has_slash && from.attr()?.kind != NodeKind::Dir => return Err(libc::ENOTDIR.into()),
            None => {
                self.may_make(&to)?;
            }
        }
        let is_dir = |named: &Named| named.attr.is_some_and(|attr| attr.kind == NodeKind::Dir);
        let (moves_from, moves_to) = (is_dir(&from), exchanges && is_dir(&to));
        // No program enters a directory between its move and that of its folder.
        let _entering = (moves_from || moves_to).then(|| self.entering.lock());
        if exchanges {
            self.client.exchange(&from.path, &to.path)?;
        } else {
            let has = |flag| flags & flag != 0;
            let (no_replace, whiteout) = (has(libc::RENAME_NOREPLACE), has(libc::RENAME_WHITEOUT));
            self.client.replace_name(&from.path, &to.path, no_replace, whiteout)?;
        }
        if from.path == to.path {
            return Ok(0);
        }
        let moves = [(&from.path[..], &to.path[..]), (&to.path, &from.path)];
        self.opens.note_moves(if exchanges { &moves } else { &moves[..1] });
        let moved = match (moves_from, moves_to) {
            (true, true) => self.mirror.exchanged(&from.path, &to.path),
            (true, false) => self.mirror.renamed(&from.path, &to.path),
            (false, true) => self.mirror.renamed(&to.path, &from.path),
            (false, false) => Ok(()),
        };
        if let Err(error) = moved {
            tracing::warn!(%error, "programs that work in a renamed directory do not find it any more");
        }
        Ok(0)
    }

    fn times(&self, asked: &Incoming<'_>) -> Result<i64, Stop> {
        let target = self.target(asked, asked.numbers.a as i32 & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        let attr = self.attr(&target)?;
        let word = |at: usize| {
            let bytes = asked.data.get(at * 8..at * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(i64::from_ne_bytes).ok_or(libc::EINVAL)
        };
        let time = |at: usize| -> Result<Option<SetTime>, i32> {
            match word(at + 1)? {
                libc::UTIME_OMIT => Ok(None),
                libc::UTIME_NOW => Ok(Some(SetTime::Now)),
                nanos @ 0..1_000_000_000 => Ok(Some(SetTime::At(Time { secs: word(at)?, nanos: nanos as u32 }))),
                _ => Err(libc::EINVAL),
            }
        };
        let (atime, mtime) = (time(0)?, time(2)?);
        if (atime, mtime) == (None, None) {
            return Ok(0);
        }
        if self.user.owns(&attr).is_err() {
            // Who may write a file may say that it was just used.
            let is_now = (atime, mtime) == (Some(SetTime::Now), Some(SetTime::Now));
            self.may(&target, &attr, libc::W_OK).map_err(|_| if is_now { libc::EACCES } else { libc::EPERM })?;
            if !is_now {
                return Err(libc::EPERM.into());
            }
        }
        self.set(&target, SetAttr { atime, mtime, ..SetAttr::default() })
    }

    /// Makes the folder that stands for a directory.
    fn enter(&self, asked: &Incoming<'_>, out: &mut Vec<u8>) -> Result<i64, Stop> {
        let target = self.target(asked, true)?;
        let attr = self.attr(&target)?;
        if attr.kind != NodeKind::Dir {
            return Err(libc::ENOTDIR.into());
        }
        self.may(&target, &attr, libc::X_OK)?;
        let _entering = self.entering.lock();
        let inside = match &target {
            Target::Named(named) => named.path.clone(),
            Target::Open(open) => path_of(open),
        };
        let folder = self.mirror.folder(&inside);
        out.extend(folder.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?);
        Ok(0)
    }

    fn xattr(&self, asked: &Incoming<'_>, room: usize, out: &mut Vec<u8>) -> Result<i64, Stop> {
        let Request { op, a, c, .. } = asked.numbers;
        let name = asked.other;
        let is_change = matches!(op, Op::SetXattr | Op::RemoveXattr);
        if op == Op::SetXattr && a & !i64::from(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
            return Err(libc::EINVAL.into());
        }
        if op == Op::SetXattr && asked.data.len() > XATTRS_MAX_BYTES {
            let is_none = asked.data.len() > XATTR_MAX_BYTES;
            return Err(if is_none { libc::E2BIG } else { libc::ENOSPC }.into());
        }
        if op != Op::ListXattr && name.is_empty() {
            return Err(libc::ERANGE.into());
        }
        let is_acl = name == ACL_ACCESS || name == ACL_DEFAULT;
        let is_label = is_acl || name.starts_with(b"security.");
        if op != Op::ListXattr && !is_label && !name.starts_with(b"user.") {
            // As on a mount: others are not kept.
            return Err(if op == Op::SetXattr { libc::EOPNOTSUPP } else { libc::ENODATA }.into());
        }
        let target = self.target(asked, c as i32 & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        let attr = self.attr(&target)?;
        match (is_label, is_change) {
            _ if op == Op::ListXattr => {}
            (true, false) => {}
            (true, true) if is_acl => self.user.owns(&attr)?,
            (true, true) if !self.user.is_root() => return Err(libc::EPERM.into()),
            (true, true) => {}
            (false, true) => self.may(&target, &attr, libc::W_OK)?,
            (false, false) => self.may(&target, &attr, libc::R_OK)?,
        }
        let by_path = match &target {
            Target::Named(named) => {
                named.attr()?;
                Some(named.path.clone())
            }
            Target::Open(open) if matches!(open.node, Node::Directory) => Some(path_of(open)),
            Target::Open(_) => None,
        };
        let file = || match &target {
            Target::Open(open) => open.file(),
            Target::Named(_) => Err(libc::EIO),
        };
        if is_change {
            let mode = match a as i32 {
                libc::XATTR_CREATE => XattrMode::Create,
                libc::XATTR_REPLACE => XattrMode::Replace,
                _ => XattrMode::Any,
            };
            let value = (op == Op::SetXattr).then_some(asked.data);
            match by_path {
                Some(path) => self.client.set_xattr(path, name, value, mode)?,
                None => file()?.set_xattr(name, value, mode)?,
            }
            return Ok(0);
        }
        let value = match (by_path, op) {
            (Some(path), Op::ListXattr) => self.client.list_xattr(path)?,
            (None, Op::ListXattr) => file()?.list_xattr()?,
            (Some(path), _) => self.client.xattr(path, name)?,
            (None, _) => file()?.xattr(name)?,
        };
        if room == 0 {
            // The program asks how much room it needs.
            return Ok(value.len() as i64);
        }
        if value.len() > room {
            return Err(libc::ERANGE.into());
        }
        out.extend(&value);
        Ok(value.len() as i64)
    }
}

fn path_of(open: &Open) -> Vec<u8> {
    open.path.lock().clone()
}

/// The mode of a new node, as the server takes it.
fn new_mode(asked: i64) -> u32 {
    with_umask(asked as u32, asked as u32 >> UMASK_SHIFT)
}

fn d_type(kind: NodeKind) -> u8 {
    match kind {
        NodeKind::File => libc::DT_REG,
        NodeKind::Dir => libc::DT_DIR,
        NodeKind::Symlink => libc::DT_LNK,
        NodeKind::Fifo => libc::DT_FIFO,
        NodeKind::Socket => libc::DT_SOCK,
        NodeKind::Character(_) => libc::DT_CHR,
        NodeKind::Block(_) => libc::DT_BLK,
    }
}

fn meta(attr: &Attr) -> Meta {
    let kind = match attr.kind {
        NodeKind::File => libc::S_IFREG,
        NodeKind::Dir => libc::S_IFDIR,
        NodeKind::Symlink => libc::S_IFLNK,
        NodeKind::Fifo => libc::S_IFIFO,
        NodeKind::Socket => libc::S_IFSOCK,
        NodeKind::Character(_) => libc::S_IFCHR,
        NodeKind::Block(_) => libc::S_IFBLK,
    };
    let rdev = match attr.kind {
        NodeKind::Character(Device { major, minor }) | NodeKind::Block(Device { major, minor }) => {
            libc::makedev(major, minor)
        }
        _ => 0,
    };
    Meta {
        ino: attr.ino,
        mode: kind | attr.mode & 0o7777,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        size: attr.size,
        used_bytes: attr.used_bytes,
        rdev,
        times: [attr.atime, attr.mtime, attr.ctime].map(|time| (time.secs, time.nanos)),
    }
}
