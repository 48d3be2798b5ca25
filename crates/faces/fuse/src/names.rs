//! Names and attributes: look-up, creation, rename, removal, listing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{Errno, FileType, RenameFlags};
use impresario_base::lock::Mutex;
use impresario_client::{Caller, Client, ClientError, CreateOptions, File};
use impresario_wire::{
    ACL_ACCESS, ACL_DEFAULT, Attr, Entry, NodeKind, SetAttr, XATTRS_MAX_BYTES, XattrMode, with_umask,
};

use crate::attr::{file_type, special_kind};
use crate::data::{OpenFile, taken_set_id};
use crate::directory::Cursor;
use crate::face::{Face, Outcome, fault};
use crate::inodes::{Entered, ROOT, Target};
use crate::paths::InUse;
use crate::striping;

/// Names requested at first, while it is unknown how many fit into the kernel's buffer; a page holds about 24.
const FIRST_NAMES: u32 = 32;
/// Largest number of names requested at a time.
const NAMES_MAX: u32 = 1024;

/// What the kernel learnt of a directory within this time need not be asked again when it is opened.
const JUST_NOW: Duration = Duration::from_millis(1);

/// With which the names of users' extended attributes begin.
const USER: &[u8] = b"user.";
/// And those of security modules and capabilities.
const SECURITY: &[u8] = b"security.";

/// The user that creates a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker {
    pub uid: u32,
    pub gid: u32,
    /// What is taken off the permission bits of the node, unless its directory has a default access control list.
    pub umask: u32,
}

/// Who changes a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setter {
    pub uid: u32,
    pub gid: u32,
    /// The thread.
    pub thread: u32,
}

impl Setter {
    /// Whether the kernel lets this user's files of a group keep its set-group-id bit.
    pub(crate) fn is_in(self, gid: u32) -> bool {
        let status = || std::fs::read_to_string(format!("/proc/{}/status", self.thread)).unwrap_or_default();
        self.uid == 0 || self.gid == gid || lists_group(&status(), gid)
    }
}

/// Whether the status of a thread says that it is in a group.
fn lists_group(status: &str, gid: u32) -> bool {
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    groups.is_some_and(|groups| groups.split_whitespace().any(|group| group.parse() == Ok(gid)))
}

/// The errno of a call by the path of a number. If the server does not know it, another node has changed the tree: ESTALE makes
/// the kernel look the path up again.
fn stale_or_fault(number: u64, error: ClientError) -> Errno {
    match error.errno() {
        libc::ENOENT | libc::ENOTDIR if number != ROOT => Errno::ESTALE,
        _ => fault(error),
    }
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    number: u64,
    /// Who opened it.
    opener: Caller,
    cursor: Mutex<Cursor>,
}

impl OpenDirectory {
    pub(crate) fn new(number: u64, opener: Caller) -> OpenDirectory {
        OpenDirectory { number, opener, cursor: Mutex::default() }
    }

    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

/// A directory entry for the kernel.
pub(crate) struct Listed<'a> {
    pub number: u64,
    /// Offset from which to continue after it.
    pub offset: u64,
    pub kind: FileType,
    pub name: &'a [u8],
}

impl Face {
    /// The paths of these places, which stay as they are until this is dropped, but for moves by other nodes.
    fn still<const N: usize>(&self, places: [Target<'_>; N]) -> InUse<'_, N> {
        self.paths.still(&self.inodes, places)
    }

    /// Calls with the path of a number.
    pub(crate) fn at_path<T>(&self, number: u64, call: impl FnOnce(&[u8]) -> Result<T, ClientError>) -> Outcome<T> {
        let still = self.still([Target::Node(number)]);
        let [path] = still.paths().ok_or(Errno::ESTALE)?;
        call(path).map_err(|error| stale_or_fault(number, error))
    }

    /// Calls with the path of a name in a directory.
    pub(crate) fn at_name<T>(
        &self,
        parent: u64,
        name: &[u8],
        call: impl FnOnce(&[u8]) -> Result<T, ClientError>,
    ) -> Outcome<T> {
        let still = self.still([Target::Name(parent, name)]);
        let [path] = still.paths().ok_or(Errno::ESTALE)?;
        call(path).map_err(fault)
    }

    /// Checks that the path of `number` led to what the kernel means by it.
    pub(crate) fn must_be(&self, number: u64, attr: &Attr) -> Outcome<()> {
        if number == ROOT || self.inodes.number_for(attr.ino) == number {
            return Ok(());
        }
        self.inodes.replaced_elsewhere(number);
        Err(Errno::ESTALE)
    }

    /// Checks that no other node has removed or replaced a directory while the kernel had its name cached: ESTALE makes the kernel
    /// look the name up again, once, before the program learns of an error.
    pub(crate) fn must_be_there(&self, number: u64) -> Outcome<()> {
        // Mostly the kernel has just asked, to look the name up or to check permissions.
        let was_just_there = self.inodes.fresh(number).is_some_and(|fresh| fresh.was_told_within(JUST_NOW));
        if number == ROOT || was_just_there || self.inodes.removed_directory(number).is_some() {
            return Ok(());
        }
        let attr = self.at_path(number, |path| self.client.stat(path))?;
        self.must_be(number, &attr)
    }

    pub(crate) fn look_up(&self, parent: u64, name: &[u8], thread: u32) -> Outcome<(Entered, Attr)> {
        let asked = self.inodes.changes();
        let attr = self.at_name(parent, name, |path| self.client.stat(path)).inspect_err(|_| {
            // There is nothing to open. The next open of the name is none that we made the kernel retry.
            self.inodes.is_spared(thread, &[(parent, name.into())]);
        })?;
        Ok((self.inodes.enter(parent, name, &attr, asked), attr))
    }

    /// Attributes, and for how long the kernel may cache them.
    ///
    /// A request with a `handle` comes from a reader that needs the size only: `stat` never has one.
    pub(crate) fn get_attr(&self, number: u64, handle: Option<u64>) -> Outcome<(Attr, Duration)> {
        let Some(open) = self.some_open(number, handle) else {
            if let Some(attr) = self.inodes.removed_directory(number) {
                return Ok((attr, self.cache_time()));
            }
            let attr = self.at_path(number, |path| self.client.stat(path))?;
            self.must_be(number, &attr)?;
            self.inodes.record_attr(number, &attr);
            return Ok((attr, self.cache_time()));
        };
        let recent = || open.fresh().recent(Instant::now(), self.cache_time());
        if let Some(attr) = handle.and_then(|_| recent()) {
            return Ok((attr, Duration::ZERO));
        }
        let mark = open.fresh().mark();
        // By the handle, which works without a name too.
        let attr = open.file()?.attr().map_err(fault)?;
        if !open.is_instead() {
            self.must_be(number, &attr)?;
        }
        open.fresh().learnt(&attr, mark, Instant::now());
        Ok((attr, self.cache_time()))
    }

    pub(crate) fn set_attr(&self, number: u64, handle: Option<u64>, mut set: SetAttr, setter: Setter) -> Outcome<Attr> {
        if set.size.is_some() && set.mode.is_none() {
            let fresh = self.inodes.fresh(number);
            set.takes = fresh.map_or(0, |fresh| taken_set_id(setter, fresh.mode(), fresh.gid()));
        }
        let (open, resizes) = (self.some_open(number, handle), set.size.is_some());
        let attr = match &open {
            Some(open) => open.file()?.set_attr(&set).map_err(fault),
            None => self.at_path(number, |path| self.client.set_attr(path, set)),
        };
        if resizes {
            // Also when it failed: part of it may have been done.
            match (&open, self.inodes.fresh(number)) {
                (Some(open), _) => open.fresh().resized(),
                (None, Some(fresh)) => fresh.resized(),
                (None, None) => {}
            }
        }
        let attr = attr?;
        if !open.is_some_and(|open| open.is_instead()) {
            self.must_be(number, &attr)?;
        }
        self.inodes.record_attr(number, &attr);
        Ok(attr)
    }

    fn some_open(&self, number: u64, handle: Option<u64>) -> Option<Arc<OpenFile>> {
        let by = |handle| self.open_by(handle).ok();
        handle.and_then(by).or_else(|| self.inodes.open_handle(number).and_then(by))
    }

    pub(crate) fn read_link(&self, number: u64) -> Outcome<Vec<u8>> {
        self.at_path(number, |path| self.client.readlink(path))
    }

    /// Creates an empty file and leaves it open.
    pub(crate) fn make_file(
        &self,
        parent: u64,
        name: &[u8],
        mode: u32,
        maker: Maker,
    ) -> Outcome<(File, Entered, Attr)> {
        let asked = self.inodes.changes();
        let gid = self.inherited_gid(parent, maker.gid);
        let mode = with_umask(mode, maker.umask);
        let options = CreateOptions { mode, uid: maker.uid, gid, exclusive: true, layout: None };
        let (file, attr) = self.at_name(parent, name, |path| self.client.create_with_attr(path, options))?;
        let entered = self.inodes.enter_made(parent, name, &attr, asked, file.key());
        Ok((file, entered, attr))
    }

    /// Makes a pipe, a socket, a device or an empty file.
    pub(crate) fn make_node(
        &self,
        parent: u64,
        name: &[u8],
        mode: u32,
        device: u32,
        maker: Maker,
    ) -> Outcome<(Entered, Attr)> {
        if let Some(kind) = special_kind(mode, device) {
            let asked = self.inodes.changes();
            let gid = self.inherited_gid(parent, maker.gid);
            let mode = with_umask(mode, maker.umask);
            let make = |path: &[u8]| self.client.mknod(path, kind, mode, maker.uid, gid);
            let attr = self.at_name(parent, name, make)?;
            return Ok((self.inodes.enter(parent, name, &attr, asked), attr));
        }
        let (file, entered, attr) = self.make_file(parent, name, mode, maker)?;
        if let Err(error) = file.close() {
            tracing::warn!(%error, "closing a new file");
        }
        Ok((entered, attr))
    }

    pub(crate) fn make_directory(&self, parent: u64, name: &[u8], mode: u32, maker: Maker) -> Outcome<(Entered, Attr)> {
        let asked = self.inodes.changes();
        let gid = self.inherited_gid(parent, maker.gid);
        let inherited = if self.has_set_gid(parent) { libc::S_ISGID } else { 0 };
        let mode = with_umask(mode | inherited, maker.umask);
        let attr = self.at_name(parent, name, |path| self.client.mkdir(path, mode, maker.uid, gid))?;
        Ok((self.inodes.enter(parent, name, &attr, asked), attr))
    }

    pub(crate) fn make_symlink(
        &self,
        parent: u64,
        name: &[u8],
        target: &[u8],
        maker: Maker,
    ) -> Outcome<(Entered, Attr)> {
        let asked = self.inodes.changes();
        let gid = self.inherited_gid(parent, maker.gid);
        let attr = self.at_name(parent, name, |path| self.client.symlink(path, target, maker.uid, gid))?;
        Ok((self.inodes.enter(parent, name, &attr, asked), attr))
    }

    /// Nodes created in a set-group-id directory get the directory's group.
    fn inherited_gid(&self, parent: u64, gid: u32) -> u32 {
        match self.inodes.fresh(parent) {
            Some(fresh) if fresh.mode() & libc::S_ISGID != 0 => fresh.gid(),
            _ => gid,
        }
    }

    fn has_set_gid(&self, parent: u64) -> bool {
        self.inodes.fresh(parent).is_some_and(|fresh| fresh.mode() & libc::S_ISGID != 0)
    }

    pub(crate) fn remove(
        &self,
        parent: u64,
        name: &[u8],
        remove: impl FnOnce(&Client, &[u8]) -> Result<Option<u32>, ClientError>,
    ) -> Outcome<()> {
        let left = self.at_name(parent, name, |path| remove(&self.client, path))?;
        self.inodes.removed(parent, name, left);
        Ok(())
    }

    /// Gives the node `number` the name `name` in `parent` too.
    pub(crate) fn make_link(&self, number: u64, parent: u64, name: &[u8]) -> Outcome<(Entered, Attr)> {
        let asked = self.inodes.changes();
        let still = self.still([Target::Node(number), Target::Name(parent, name)]);
        let [from, to] = still.paths().ok_or(Errno::ESTALE)?;
        let attr = self.client.link(from, to).map_err(|error| stale_or_fault(number, error))?;
        drop(still);
        if self.inodes.number_for(attr.ino) != number {
            // Another node had given the name to another file, and that one is linked now.
            self.inodes.replaced_elsewhere(number);
        }
        let entered = self.inodes.enter(parent, name, &attr, asked);
        self.inodes.linked();
        Ok((entered, attr))
    }

    pub(crate) fn move_name(&self, from: (u64, &[u8]), to: (u64, &[u8]), flags: RenameFlags) -> Outcome<()> {
        if flags == RenameFlags::RENAME_EXCHANGE {
            return self.exchange_names(from, to);
        }
        if !(flags - RenameFlags::RENAME_NOREPLACE - RenameFlags::RENAME_WHITEOUT).is_empty() {
            return Err(Errno::EINVAL);
        }
        let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
        let whiteout = flags.contains(RenameFlags::RENAME_WHITEOUT);
        let moving = self.still([Target::Moved(from.0, from.1), Target::Moved(to.0, to.1)]);
        let [from_path, to_path] = moving.paths().ok_or(Errno::ESTALE)?;
        let _moves = self.inodes.moves([from, to]);
        let left = self.client.replace_name(from_path, to_path, no_replace, whiteout).map_err(fault)?;
        self.inodes.renamed(from, to, left);
        Ok(())
    }

    fn exchange_names(&self, one: (u64, &[u8]), other: (u64, &[u8])) -> Outcome<()> {
        let moving = self.still([Target::Moved(one.0, one.1), Target::Moved(other.0, other.1)]);
        let [one_path, other_path] = moving.paths().ok_or(Errno::ESTALE)?;
        let _moves = self.inodes.moves([one, other]);
        self.client.exchange(one_path, other_path).map_err(fault)?;
        self.inodes.exchanged(one, other);
        Ok(())
    }

    pub(crate) fn sync_directory(&self, number: u64) -> Outcome<()> {
        if self.inodes.removed_directory(number).is_some() {
            return Ok(());
        }
        self.at_path(number, |path| self.client.sync_dir(path))
    }

    /// Passes the names from `offset` on to `add` until it reports that there is no more room.
    pub(crate) fn read_directory(
        &self,
        handle: u64,
        offset: u64,
        add: &mut dyn FnMut(Listed<'_>) -> bool,
    ) -> Outcome<()> {
        self.list(handle, offset, &mut |listed, _| add(listed))
    }

    /// Like [`Face::read_directory`], with attributes; each name except `.` and `..` is one look-up.
    pub(crate) fn read_directory_plus(
        &self,
        handle: u64,
        offset: u64,
        add: &mut dyn FnMut(Listed<'_>, &Attr, u64) -> bool,
    ) -> Outcome<()> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        let asked = self.inodes.changes();
        self.list(handle, offset, &mut |listed, attr| {
            let Some(attr) = attr else {
                return add(listed, &directory_attr(), 0);
            };
            // Of a file of unknown length the kernel emits the name, takes no attributes, as no file is so long, and forgets the node.
            let entered = self.inodes.enter(directory.number, listed.name, attr, asked);
            let full = add(Listed { number: entered.number, ..listed }, attr, entered.generation);
            if full {
                self.inodes.forget(entered.number, 1);
            }
            full
        })
    }

    fn list(&self, handle: u64, offset: u64, add: &mut dyn FnMut(Listed<'_>, Option<&Attr>) -> bool) -> Outcome<()> {
        let directory = self.directories.get(handle).ok_or(Errno::EBADF)?;
        let _acting = directory.opener.enter();
        let own = [(directory.number, &b"."[..]), (self.inodes.parent(directory.number), &b".."[..])];
        for (position, (number, name)) in own.into_iter().enumerate().skip(usize::try_from(offset).unwrap_or(2)) {
            let listed = Listed { number, offset: position as u64 + 1, kind: FileType::Directory, name };
            if add(listed, None) {
                return Ok(());
            }
        }
        let own_count = own.len() as u64;
        let mut cursor = directory.cursor.lock();
        let resume = cursor.seek(offset.saturating_sub(own_count));
        if cursor.at_end() {
            return Ok(());
        }
        let (mut after, mut skip) = (resume.after, resume.skip);
        let mut want = cursor.last_fit.saturating_add(2).clamp(FIRST_NAMES, NAMES_MAX);
        let mut fitted = 0;
        loop {
            let ask = if skip > 0 { NAMES_MAX } else { want };
            let entries = self.at_path(directory.number, |path| self.client.readdir(path, &after, ask))?;
            let Some(last) = entries.last() else {
                cursor.ended();
                return Ok(());
            };
            // Guards against an endless loop with a server that repeats itself.
            if last.name <= after {
                tracing::warn!("the names of a directory arrive out of order");
                return Err(Errno::EIO);
            }
            after.clone_from(&last.name);
            for Entry { name, attr } in entries {
                if skip > 0 {
                    skip -= 1;
                    continue;
                }
                let listed = Listed {
                    number: self.inodes.number_for(attr.ino),
                    offset: own_count + cursor.position() + 1,
                    kind: file_type(attr.kind),
                    name: &name,
                };
                if add(listed, Some(&attr)) {
                    cursor.last_fit = fitted;
                    return Ok(());
                }
                fitted += 1;
                cursor.gave(name);
            }
            want = want.saturating_mul(2).min(NAMES_MAX);
        }
    }

    /// Striping as an extended attribute, or one that the servers keep. Every other is absent, and so, without a question to the
    /// server, are access control lists and labels of what is known to have none: the kernel itself looks for lists when it checks
    /// permissions, and for `security.capability` at writes.
    pub(crate) fn get_extended(&self, number: u64, name: &[u8]) -> Outcome<Vec<u8>> {
        if name != striping::NAME.as_bytes() {
            let is_there = name.starts_with(USER) || is_label(name) && self.is_labelled(number);
            return match (is_there, self.some_open(number, None)) {
                (false, _) => Err(Errno::NO_XATTR),
                (true, Some(open)) => open.file()?.xattr(name).map_err(fault),
                (true, None) => self.at_path(number, |path| self.client.xattr(path, name)),
            };
        }
        if self.inodes.kind(number) != Some(NodeKind::File) {
            return Err(Errno::NO_XATTR);
        }
        if let Some(open) = self.some_open(number, None) {
            return Ok(striping::show(&open.file()?.layout()).into_bytes());
        }
        let file = self.at_path(number, |path| self.client.open(path, false))?;
        let shown = striping::show(&file.layout());
        if let Err(error) = file.close() {
            tracing::warn!(%error, "closing a file after reading its striping");
        }
        Ok(shown.into_bytes())
    }

    /// Whether the node may have access control lists or labels.
    fn is_labelled(&self, number: u64) -> bool {
        self.inodes.fresh(number).is_none_or(|fresh| fresh.is_labelled())
    }

    /// The names of the attributes that the servers keep. The striping is not listed, so that `cp -a` and `tar` do not try to set it on
    /// copies.
    pub(crate) fn list_extended(&self, number: u64) -> Outcome<Vec<u8>> {
        let names = match self.some_open(number, None) {
            Some(open) => open.file()?.list_xattr().map_err(fault),
            None => self.at_path(number, |path| self.client.list_xattr(path)),
        };
        match names {
            // The servers keep none: the kernel need not ask again.
            Err(errno) if errno.code() == libc::EOPNOTSUPP => Err(Errno::ENOSYS),
            names => names,
        }
    }

    /// Sets an attribute that the servers keep, or the default striping of a directory. `None` removes it; the striping is then
    /// as in the parent.
    pub(crate) fn set_extended(
        &self,
        number: u64,
        name: &[u8],
        value: Option<&[u8]>,
        mode: XattrMode,
        setter: Setter,
    ) -> Outcome<()> {
        let is_striping = name == striping::NAME.as_bytes();
        if (name.starts_with(USER) || is_label(name)) && !is_striping {
            if value.is_some_and(|value| value.len() > XATTRS_MAX_BYTES) {
                return Err(Errno::ENOSPC);
            }
            if name == ACL_ACCESS && value.is_some() {
                self.clear_set_gid(number, setter)?;
            }
            match self.some_open(number, None) {
                Some(open) => open.file()?.set_xattr(name, value, mode).map_err(fault),
                None => self.at_path(number, |path| self.client.set_xattr(path, name, value, mode)),
            }?;
            if is_label(name)
                && let Some(fresh) = self.inodes.fresh(number)
            {
                fresh.label();
                // The permission bits are others now, which the kernel asks for itself.
                if name == ACL_ACCESS
                    && let Ok(attr) = self.at_path(number, |path| self.client.stat(path))
                {
                    fresh.set_mode(attr.mode);
                }
            }
            return Ok(());
        }
        // A file's striping is fixed when it is created.
        if !is_striping || self.inodes.kind(number) != Some(NodeKind::Dir) {
            return Err(if value.is_some() { Errno::EOPNOTSUPP } else { Errno::NO_XATTR });
        }
        let request = value.map(striping::parse).transpose().map_err(|complaint| {
            tracing::warn!("{complaint}");
            Errno::EINVAL
        })?;
        self.at_path(number, |path| self.client.set_layout(path, request))
    }
}

impl Face {
    /// Before a user sets an access control list: as the kernel has it in local file systems, the set-group-id bit goes unless the
    /// user is in the group.
    fn clear_set_gid(&self, number: u64, setter: Setter) -> Outcome<()> {
        let Some(fresh) = self.inodes.fresh(number) else { return Ok(()) };
        if fresh.mode() & libc::S_ISGID == 0 || setter.is_in(fresh.gid()) {
            return Ok(());
        }
        let set = SetAttr { takes: libc::S_ISGID, ..SetAttr::default() };
        self.set_attr(number, None, set, setter).map(drop)
    }
}

/// Access control lists, and what security modules and capabilities use.
fn is_label(name: &[u8]) -> bool {
    name == ACL_ACCESS || name == ACL_DEFAULT || name.starts_with(SECURITY)
}

/// For `.` and `..`, of which the kernel uses only the kind.
pub(crate) fn directory_attr() -> Attr {
    Attr {
        ino: 0,
        kind: NodeKind::Dir,
        mode: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        size: 0,
        used_bytes: 0,
        atime: Default::default(),
        mtime: Default::default(),
        ctime: Default::default(),
        labelled: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_those_of_the_status() {
        let status = "Name:\tx\nGid:\t7\t7\t7\t7\nGroups:\t4 24 1000 \nNStgid:\t5\n";
        assert!(lists_group(status, 24) && lists_group(status, 1000));
        assert!(
            !lists_group(status, 7) && !lists_group(status, 5) && !lists_group("Groups:\n", 0) && !lists_group("", 0)
        );
    }
}
