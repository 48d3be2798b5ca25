//! The space of open files: `fallocate`, and `lseek` to data and holes.

use fuser::Errno;
use impresario_client::{seek_to, space_change};

use crate::data::taken_set_id;
use crate::face::{Face, Outcome, fault};
use crate::names::Setter;

impl Face {
    /// Changes the space of a range (offset, length). The kernel has written its pages back, and drops those that become zeros.
    pub(crate) fn change_space(
        &self,
        handle: u64,
        (offset, len): (u64, u64),
        mode: i32,
        setter: Setter,
    ) -> Outcome<()> {
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
        self.take_from_open(&open, taken_set_id(setter, open.fresh().mode(), open.fresh().gid()))
    }

    /// Where data or a hole begins from `offset` on.
    pub(crate) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Outcome<i64> {
        let to = seek_to(whence).ok_or(Errno::EINVAL)?;
        let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let found = self.open_by(handle)?.file()?.seek(from, to).map_err(fault)?;
        found.and_then(|at| i64::try_from(at).ok()).ok_or(Errno::ENXIO)
    }
}
