//! Set-user-id and set-group-id do not outlast a change of a file's bytes by anybody but root, as Linux has it.

/// Those of these bits that go when somebody other than root changes the bytes of a file of this mode; 0: none. A set-group-id bit
/// without execution by the group stays when a member of the file's group makes the change.
pub fn taken(mode: u32, by_member: impl FnOnce() -> bool) -> u32 {
    let group = mode & libc::S_ISGID != 0 && (mode & libc::S_IXGRP != 0 || !by_member());
    mode & libc::S_ISUID | if group { libc::S_ISGID } else { 0 }
}

/// The permissions (0 to 0o7777) of a mode without these bits; `None`: it has none of them.
pub fn without(mode: u32, takes: u32) -> Option<u32> {
    (mode & takes != 0).then_some(mode & 0o7777 & !takes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_go_as_the_kernel_takes_them() {
        assert_eq!(taken(0o104755, || true), 0o4000);
        assert_eq!(taken(0o6755, || true), 0o6000);
        assert_eq!(taken(0o2745, || true), 0, "a member of the group may leave it");
        assert_eq!(taken(0o2745, || false), 0o2000);
        assert_eq!(taken(0o755, || false), 0);
        assert_eq!((without(0o104755, 0o6000), without(0o755, 0o6000), without(0o755, 0)), (Some(0o755), None, None));
    }
}
