//! The space of open files: `fallocate`, and `lseek` to data and holes.

use fuser::Errno;
use impresario_wire::{SeekTo, SetAttr, SpaceChange};

use crate::data::without_set_id;
use crate::face::{Face, Outcome, fault};

/// What a mode of `fallocate` asks for; `None`: what moves bytes behind the range, or is not known.
fn change_of(mode: i32) -> Option<SpaceChange> {
    const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_AND_KEEP: i32 = ZERO | KEEP;
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
    Some(match mode {
        0 | KEEP => SpaceChange::Allocate { keep_size: mode == KEEP },
        ZERO | ZERO_AND_KEEP => SpaceChange::Zero { keep_size: mode == ZERO_AND_KEEP },
        PUNCH => SpaceChange::Punch,
        _ => return None,
    })
}

impl Face {
    /// Changes the space of a range (offset, length). The kernel has written its pages back, and drops those that become zeros.
    pub(crate) fn change_space(&self, handle: u64, (offset, len): (u64, u64), mode: i32, uid: u32) -> Outcome<()> {
        let change = change_of(mode).ok_or(Errno::EOPNOTSUPP)?;
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
        }
        Ok(())
    }

    /// Where data or a hole begins from `offset` on.
    pub(crate) fn seek(&self, handle: u64, offset: i64, whence: i32) -> Outcome<i64> {
        let to = match whence {
            libc::SEEK_DATA => SeekTo::Data,
            libc::SEEK_HOLE => SeekTo::Hole,
            _ => return Err(Errno::EINVAL),
        };
        let from = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
        let found = self.open_by(handle)?.file()?.seek(from, to).map_err(fault)?;
        found.and_then(|at| i64::try_from(at).ok()).ok_or(Errno::ENXIO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_bytes_is_not_done() {
        assert_eq!(change_of(0), Some(SpaceChange::Allocate { keep_size: false }));
        assert_eq!(change_of(libc::FALLOC_FL_KEEP_SIZE), Some(SpaceChange::Allocate { keep_size: true }));
        let keep = |flag| change_of(flag | libc::FALLOC_FL_KEEP_SIZE);
        assert_eq!(keep(libc::FALLOC_FL_PUNCH_HOLE), Some(SpaceChange::Punch));
        assert_eq!(keep(libc::FALLOC_FL_ZERO_RANGE), Some(SpaceChange::Zero { keep_size: true }));
        assert_eq!(change_of(libc::FALLOC_FL_ZERO_RANGE), Some(SpaceChange::Zero { keep_size: false }));
        for flag in [libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_COLLAPSE_RANGE, libc::FALLOC_FL_INSERT_RANGE, 1 << 20]
        {
            assert_eq!(change_of(flag), None, "{flag:x}");
        }
    }
}
