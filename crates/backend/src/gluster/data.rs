//! The bytes of files: opening on a caller's behalf, reading, writing, cutting, syncing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::volume::Descriptor;
use super::{Files, Node, Open, Shared, stale};
use crate::nodes::{Descriptors, Use};
use crate::rules::{check_range, may_by_mode, mode_for_writer, take_bits};
use crate::{Caller, Errno, Kind, Result, SpaceChange};

/// GlusterFS answers EIO to a call that meets another one's making of the same shard: these are tried again after so long.
const SHARD_DELAYS: [Duration; 3] = [Duration::from_millis(5), Duration::from_millis(20), Duration::from_millis(80)];

impl Shared {
    /// A descriptor of a node for this use, opened as the caller unless there is one.
    pub(super) fn open_for(&self, caller: &Caller, node: &Node, what: Use) -> Result<Arc<Open>> {
        let number = self.callers.number(caller);
        if let Some(open) = node.open_for(number, what, self.nodes.now_ms()) {
            return Ok(open);
        }
        node.check_use(what)?;
        let checked = node.rights();
        let (descriptor, rights) = self.open_checked(caller, node, what)?;
        if what == Use::Write && caller.uid != 0 {
            self.take_set_id(caller, node)?;
        }
        Ok(self.nodes.add_open(node, descriptor, number, rights, checked))
    }

    /// Set-user-id and set-group-id go when a user changes the bytes: neither the library nor a brick sees to it. It is looked at
    /// when a file is opened, which is again after each change of its mode through this backend.
    fn take_set_id(&self, caller: &Caller, node: &Node) -> Result<()> {
        let (object, own) = (&node.fd.object, self.volume.own());
        let left = || Ok(mode_for_writer(caller, &self.see(node)?));
        take_bits(left, || object.take_set_id(own), |mode| object.set_mode(own, mode)).map_err(stale)
    }

    fn open_checked(&self, caller: &Caller, node: &Node, what: Use) -> Result<(Arc<Descriptor>, (bool, bool))> {
        let object = &node.fd.object;
        let tries: &[(i32, (bool, bool))] = match what {
            Use::List => {
                let opened = object.open_directory(caller).map_err(stale)?;
                return Ok((Arc::new(opened), (true, false)));
            }
            Use::Read => &[(libc::O_RDONLY, (true, false))],
            Use::Write => &[(libc::O_RDWR, (true, true)), (libc::O_WRONLY, (false, true))],
        };
        for (flags, rights) in tries {
            // A client that opens files lazily does not ask the brick when it says that a file is open: its rights are asked
            // for beforehand. Root has all.
            let right = if rights.0 { libc::R_OK } else { 0 } | if rights.1 { libc::W_OK } else { 0 };
            let may = if caller.uid == 0 { Ok(()) } else { object.access(caller, right) };
            match may.and_then(|()| object.open(caller, *flags)) {
                Ok(opened) => return Ok((Arc::new(opened), *rights)),
                Err(Errno(libc::EACCES)) => {}
                // Its last name is gone.
                Err(Errno(libc::ENOENT | libc::ESTALE)) => return self.open_kept(caller, node, what),
                Err(error) => return Err(error),
            }
        }
        // The owner opened it when its mode allowed that, or a program is about to be run: the server opens it.
        let owns = self.see(node)?.uid == caller.uid;
        let executes = what == Use::Read && object.access(caller, libc::X_OK).is_ok();
        let flags = if owns { libc::O_RDWR } else { libc::O_RDONLY };
        match owns || executes {
            true => Ok((Arc::new(object.open(self.volume.own(), flags).map_err(stale)?), (true, owns))),
            false => Err(Errno(libc::EACCES)),
        }
    }

    /// What keeps a held file that has no name any more, for a caller with the right.
    fn open_kept(&self, caller: &Caller, node: &Node, what: Use) -> Result<(Arc<Descriptor>, (bool, bool))> {
        let kept = node.fd.kept.lock().clone().ok_or(Errno(libc::ESTALE))?;
        let attr = self.attr_of(&kept.stat()?)?;
        let may = |right| attr.uid == caller.uid || may_by_mode(caller, &attr, right);
        let rights = (may(libc::R_OK), may(libc::W_OK));
        let suffices = if what == Use::Write { rights.1 } else { rights.0 };
        if suffices { Ok((kept, rights)) } else { Err(Errno(libc::EACCES)) }
    }

    /// Keeps a held file also without a name.
    pub(super) fn keep(&self, node: &Node) -> Result<()> {
        let mut kept = node.fd.kept.lock();
        if node.kind == Kind::File && kept.is_none() {
            let open = |flags| node.fd.object.open(self.volume.own(), flags);
            // A volume that is read only can still be read.
            let opened = open(libc::O_RDWR).or_else(|error| match error.0 {
                libc::EROFS | libc::EACCES | libc::EPERM => open(libc::O_RDONLY),
                _ => Err(error),
            });
            *kept = Some(Arc::new(opened.map_err(stale)?));
        }
        Ok(())
    }

    /// Ends that when nobody holds the node.
    pub(super) fn let_go(&self, node: &Node) {
        let mut kept = node.fd.kept.lock();
        let ended = if node.holds.load(Ordering::Acquire) == 0 { kept.take() } else { None };
        drop(kept);
        drop(ended); // a call to the brick; not under the lock
    }

    pub(super) fn read(&self, caller: &Caller, node: &Node, offset: u64, into: &mut [u8]) -> Result<usize> {
        let open = self.open_for(caller, node, Use::Read)?;
        // Beyond the largest offset there is nothing.
        let room = usize::try_from((i64::MAX as u64).saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = into.len().min(room);
        if len == 0 {
            return Ok(0);
        }
        self.observe(node, || open.fd.read(offset, &mut into[..len]))
    }

    pub(super) fn write(&self, caller: &Caller, node: &Node, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        check_range(offset, bytes.len() as u64)?;
        let open = self.open_for(caller, node, Use::Write)?;
        if !bytes.is_empty() {
            let _changing = open.changing();
            let alone = self.bricks.in_shards().then(|| node.fd.writing.lock());
            self.observe(node, || open.fd.write(offset, bytes, alone.is_none()))?;
        }
        if !stable {
            return Ok(());
        }
        node.sync_stable(&open, &self.losses, || Files::sync(&open.fd))
    }

    pub(super) fn truncate(&self, caller: &Caller, node: &Node, size_bytes: u64) -> Result<()> {
        let size = i64::try_from(size_bytes).map_err(|_| Errno(libc::EFBIG))?;
        let open = self.open_for(caller, node, Use::Write)?;
        let _changing = open.changing();
        let _alone = self.bricks.in_shards().then(|| node.fd.writing.lock());
        self.observe(node, || open.fd.truncate(size))
    }

    /// A volume in shards knows of no holes, and of allocation without a new end neither.
    pub(super) fn change_space(
        &self,
        caller: &Caller,
        node: &Node,
        change: SpaceChange,
        (offset, len_bytes): (u64, u64),
    ) -> Result<()> {
        check_range(offset, len_bytes)?;
        let open = self.open_for(caller, node, Use::Write)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let keeps_size = match change {
            SpaceChange::Allocate { keep_size } | SpaceChange::Zero { keep_size } => keep_size,
            SpaceChange::Punch => false,
        };
        if keeps_size && self.bricks.in_shards() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let _changing = open.changing();
        let _alone = self.bricks.in_shards().then(|| node.fd.writing.lock());
        self.observe(node, || {
            if !matches!(change, SpaceChange::Allocate { .. }) {
                open.fd.discard(offset, len_bytes)?;
            }
            match change {
                SpaceChange::Allocate { keep_size } | SpaceChange::Zero { keep_size } => {
                    open.fd.allocate(keep_size, offset, len_bytes)
                }
                SpaceChange::Punch => Ok(()),
            }
        })
    }

    pub(super) fn seek(&self, caller: &Caller, node: &Node, from: u64, data: bool) -> Result<Option<u64>> {
        let open = self.open_for(caller, node, Use::Read)?;
        let size = u64::try_from(open.fd.stat()?.st_size).unwrap_or(0);
        if from >= size {
            return Ok(None);
        }
        let no_holes = Ok(Some(if data { from } else { size }));
        if self.bricks.in_shards() {
            return no_holes;
        }
        // The library answers from the descriptor's position, which all callers share.
        let _alone = node.fd.writing.lock();
        match self.observe(node, || open.fd.seek_data(from, if data { libc::SEEK_DATA } else { libc::SEEK_HOLE })) {
            Ok(at) => Ok(Some(at)),
            Err(Errno(libc::ENXIO)) => Ok(None),
            Err(Errno(libc::EINVAL | libc::EOPNOTSUPP)) => no_holes,
            Err(error) => Err(error),
        }
    }

    /// Makes a call that may be repeated. After a descriptor did not survive what happened to its brick, the next call opens
    /// the file anew.
    fn observe<T>(&self, node: &Node, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let mut delays = SHARD_DELAYS.iter().filter(|_| self.bricks.in_shards());
        loop {
            match call() {
                Err(Errno(libc::EBADF)) => {
                    self.nodes.close_opens(node);
                    return Err(Errno(libc::EIO));
                }
                Err(Errno(libc::EIO)) => match delays.next() {
                    Some(delay) => std::thread::sleep(*delay),
                    None => return Err(Errno(libc::EIO)),
                },
                answer => return answer,
            }
        }
    }

    pub(super) fn sync(&self, node: &Node) -> Result<()> {
        if node.kind != Kind::File {
            return Ok(()); // there is no call for it
        }
        let _syncing = node.syncing.lock();
        if node.sync_written(&self.losses)? {
            return Ok(());
        }
        // Others' writes, the attributes.
        let open = node.any_open().map_or_else(|| self.open_for(self.volume.own(), node, Use::Read), Ok)?;
        node.sync_others(&self.losses, || Files::sync(&open.fd))
    }
}
