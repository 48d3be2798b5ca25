//! What the numbers of `fallocate` and `lseek` ask of a file's space.

use impresario_wire::{SeekTo, SpaceChange};

/// What a mode of `fallocate` asks for; `None`: what moves bytes behind the range, or is not known.
pub fn space_change(mode: i32) -> Option<SpaceChange> {
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

/// What `lseek` looks for; `None`: it looks for nothing, but moves.
pub fn seek_to(whence: i32) -> Option<SeekTo> {
    match whence {
        libc::SEEK_DATA => Some(SeekTo::Data),
        libc::SEEK_HOLE => Some(SeekTo::Hole),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_bytes_is_not_done() {
        assert_eq!(space_change(0), Some(SpaceChange::Allocate { keep_size: false }));
        assert_eq!(space_change(libc::FALLOC_FL_KEEP_SIZE), Some(SpaceChange::Allocate { keep_size: true }));
        let keep = |flag| space_change(flag | libc::FALLOC_FL_KEEP_SIZE);
        assert_eq!(keep(libc::FALLOC_FL_PUNCH_HOLE), Some(SpaceChange::Punch));
        assert_eq!(keep(libc::FALLOC_FL_ZERO_RANGE), Some(SpaceChange::Zero { keep_size: true }));
        assert_eq!(space_change(libc::FALLOC_FL_ZERO_RANGE), Some(SpaceChange::Zero { keep_size: false }));
        for flag in [libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_COLLAPSE_RANGE, libc::FALLOC_FL_INSERT_RANGE, 1 << 20]
        {
            assert_eq!(space_change(flag), None, "{flag:x}");
        }
    }
}
