//! Set-user-id and set-group-id do not outlast a change of a file's bytes by anybody but root, as Linux has it.

/// The mode without these bits, after somebody other than root has changed the bytes of a file; `None` if it stays as it is. A
/// set-group-id bit without execution by the group stays when a member of the file's group makes the change.
pub fn removed(mode: u32, by_member: impl FnOnce() -> bool) -> Option<u32> {
    let mut left = mode & !libc::S_ISUID;
    if mode & libc::S_ISGID != 0 && (mode & libc::S_IXGRP != 0 || !by_member()) {
        left &= !libc::S_ISGID;
    }
    (left != mode).then_some(left & 0o7777)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_go_as_the_kernel_takes_them() {
        assert_eq!(removed(0o104755, || true), Some(0o755));
        assert_eq!(removed(0o2755, || true), Some(0o755));
        assert_eq!(removed(0o2745, || true), None, "a member of the group may leave it");
        assert_eq!(removed(0o2745, || false), Some(0o745));
        assert_eq!(removed(0o755, || false), None);
    }
}
