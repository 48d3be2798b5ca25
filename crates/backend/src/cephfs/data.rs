//! The bytes of files: opening on a caller's behalf, reading, writing, cutting, syncing.

use std::sync::Arc;
use std::time::Instant;

use super::mount::{Descriptor, Inode, is_lost};
use super::{Files, Node, Open, Shared, api, outward, stale};
use crate::nodes::{Descriptors, Use};
use crate::rules::{check_range, may_by_mode, mode_for_writer, take_bits};
use crate::{Caller, Errno, Result};

impl Shared {
    /// A descriptor of a node for this use, opened as the caller unless there is one.
    pub(super) fn open_for(&self, caller: &Caller, node: &Node, what: Use) -> Result<Arc<Open>> {
        // First, for it closes what a lost mount has left.
        let inode = self.inode(node)?;
        let number = self.callers.number(caller);
        if let Some(open) = node.open_for(number, what, self.nodes.now_ms()) {
            return Ok(open);
        }
        node.check_use(what)?;
        let checked = node.rights();
        let (descriptor, rights) = match what {
            Use::List => (inode.open_directory(caller).map_err(stale)?, (true, false)),
            Use::Read | Use::Write => self.open_checked(caller, node, what)?,
        };
        if what == Use::Write && caller.uid != 0 {
            self.take_set_id(caller, node, &inode)?;
        }
        Ok(self.nodes.add_open(node, descriptor, number, rights, checked))
    }

    /// Set-user-id and set-group-id go when a user changes the bytes: the library does not see to it. It is looked at when a
    /// file is opened, which is again after each change of its mode through this backend.
    fn take_set_id(&self, caller: &Caller, node: &Node, inode: &Inode) -> Result<()> {
        let own = inode.mount().own();
        let left = || Ok(mode_for_writer(caller, &self.see(node)?));
        take_bits(left, || inode.take_set_id(own), |mode| inode.set_mode(own, mode)).map_err(stale)
    }

    /// As [`Shared::open_for`], of a call that waits for metadata servers only where there is no descriptor yet.
    fn open_in_use(&self, caller: &Caller, node: &Node, what: Use) -> Result<Arc<Open>> {
        let is_there = self.known_inode(node).is_some()
            && node.open_for(self.callers.number(caller), what, self.nodes.now_ms()).is_some();
        let _watched = if is_there { None } else { Some(self.watch.enter(Instant::now())?) };
        self.open_for(caller, node, what)
    }

    fn open_checked(&self, caller: &Caller, node: &Node, what: Use) -> Result<(Descriptor, (bool, bool))> {
        let inode = self.inode(node)?;
        let tries: &[(i32, (bool, bool))] = match what {
            Use::Write => &[(libc::O_RDWR, (true, true)), (libc::O_WRONLY, (false, true))],
            Use::Read | Use::List => &[(libc::O_RDONLY, (true, false))],
        };
        for (flags, rights) in tries {
            match inode.open(caller, *flags) {
                Ok(opened) => return Ok((opened, *rights)),
                Err(Errno(libc::EACCES)) => {}
                Err(error) => return Err(stale(error)),
            }
        }
        // The owner opened it when its mode allowed that, or a program is about to be run: the server opens it.
        let attr = self.see(node)?;
        let owns = attr.uid == caller.uid;
        let executes = what == Use::Read && may_by_mode(caller, &attr, libc::X_OK);
        let flags = if owns { libc::O_RDWR } else { libc::O_RDONLY };
        match owns || executes {
            true => Ok((inode.open(inode.mount().own(), flags).map_err(stale)?, (true, owns))),
            false => Err(Errno(libc::EACCES)),
        }
    }

    pub(super) fn read(&self, caller: &Caller, node: &Node, offset: u64, into: &mut [u8]) -> Result<usize> {
        // Beyond the largest offset there is nothing.
        let room = usize::try_from((i64::MAX as u64).saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = into.len().min(room);
        let mut read = || {
            let open = self.open_in_use(caller, node, Use::Read)?;
            if len == 0 { Ok(0) } else { self.observe(node, open.fd.read(offset, &mut into[..len])) }
        };
        let got = match read() {
            Err(error) if is_lost(error) => read(),
            got => got,
        };
        got.map_err(outward)
    }

    pub(super) fn write(&self, caller: &Caller, node: &Node, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        check_range(offset, bytes.len() as u64)?;
        let open = self.open_in_use(caller, node, Use::Write)?;
        if !bytes.is_empty() {
            // Within the file it is a matter of the OSDs. How far a file may grow the metadata servers say.
            let grows = open.fd.known_size()? < offset + bytes.len() as u64;
            let _watched = if grows { Some(self.watch.enter_with_osds(Instant::now())?) } else { None };
            let _changing = open.changing();
            self.observe(node, open.fd.write(offset, bytes)).map_err(outward)?;
        }
        if !stable {
            return Ok(());
        }
        let _watched = self.watch.enter(Instant::now())?;
        node.sync_stable(&open, &self.losses, || Files::sync(&open.fd))
    }

    pub(super) fn truncate(&self, caller: &Caller, node: &Node, size_bytes: u64) -> Result<()> {
        i64::try_from(size_bytes).map_err(|_| Errno(libc::EFBIG))?;
        // Who may write it, or could when it was opened, may cut it: the library looks at the mode alone.
        let open = self.open_for(caller, node, Use::Write)?;
        let _changing = open.changing();
        let inode = self.inode(node)?;
        let cut = inode.set_stat(inode.mount().own(), api::SET_SIZE, |stat| stat.size = size_bytes);
        cut.map_err(stale)
    }

    pub(super) fn sync(&self, node: &Node) -> Result<()> {
        let _syncing = node.syncing.lock();
        node.sync_written(&self.losses)?;
        // The attributes; of a directory its names.
        self.look_at(node)?;
        // What was closed meanwhile may have been told of a loss.
        self.losses.check(&node.handle)
    }

    fn look_at(&self, node: &Node) -> Result<()> {
        let sync = || self.inode(node)?.sync().map_err(stale);
        let synced = match sync() {
            // Nothing that was written is lost: it was synced above. A new session knows what the servers know.
            Err(error) if is_lost(error) => sync(),
            synced => synced,
        };
        synced.map_err(outward)
    }

    /// After a descriptor did not survive, the next call opens the file anew.
    fn observe<T>(&self, node: &Node, answer: Result<T>) -> Result<T> {
        match answer {
            Err(Errno(libc::EBADF)) => {
                self.nodes.close_opens(node);
                Err(Errno(libc::EIO))
            }
            answer => answer,
        }
    }
}
