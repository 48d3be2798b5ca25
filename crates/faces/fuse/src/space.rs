//! The space of open files: `fallocate`, and `lseek` to data and holes.

use fuser::{Errno, INodeNo};
use impresario_client::{seek_to, space_change};
use impresario_wire::SetAttr;

use crate::data::without_set_id;
use crate::face::{Face, Outcome, fault};

impl Face {
    /// Changes the space of a range (offset, length). The kernel has written its pages back, and drops those that become zeros.
    pub(crate) fn change_space(&self, handle: u64, (offset, len): (u64, u64), mode: i32, uid: u32) -> Outcome<()> {
        let change = space_change(mode).ok_or(Errno::EOPNOTSUPP)?;
        let open = self.open_by(handle)?;
        let file = open.file()?;
        open.fresh().write_begins();
        let changed = file.change_space(change, offset, len);
        // What was known of the storage used is not, from now on.
        match changed.is_ok() && change.extends() {
            true => open.fresh().append_ended(offset.saturating_add(len)),
            false => open.fresh().write_ended(None),
        }
        changed.map_err(fault)?;
        // As with a write, of which the kernel says so.
        if let Some(mode) = without_set_id(uid, open.fresh().mode()) {
            let attr = file.set_attr(&SetAttr { mode: Some(mode), ..SetAttr::default() }).map_err(fault)?;
            open.fresh().set_mode(attr.mode);
            self.show_attributes_anew(open.number());
        }
        Ok(())
    }

    /// The kernel asks for the attributes of a file the next time that they are wanted. Where locks are its own there is no way to
    /// tell it, and it shows what it has for the time for which it may. It drops no pages, so this waits for nothing.
    fn show_attributes_anew(&self, number: u64) {
        let kernel = self.locks.as_ref().and_then(|locks| locks.notifier.get());
        if let Some(Err(error)) = kernel.map(|kernel| kernel.inval_inode(INodeNo(number), -1, 0)) {
            tracing::debug!(%error, number, "the kernel did not drop the attributes of a file");
        }
    }

    /// Where data or a hole begins from `offset` on.
    pub(crate) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Outcome<i64> {
        let to = seek_to(whence).ok_or(Errno::EINVAL)?;
        let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let found = self.open_by(handle)?.file()?.seek(from, to).map_err(fault)?;
        found.and_then(|at| i64::try_from(at).ok()).ok_or(Errno::ENXIO)
    }
}
