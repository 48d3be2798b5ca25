//! Set-user-id and set-group-id do not outlast a change of a file's bytes by anybody but root, as Linux has it.

/// Those of these bits that go when somebody other than root changes the bytes of a file of this mode; 0: none. A set-group-id bit
/// without execution by the group stays when a member of the file's group makes the change.
pub fn taken(mode: u32, by_member: impl FnOnce() -> bool) -> u32 {
    let group = mode & libc::S_ISGID != 0 && (mode & libc::S_IXGRP != 0 || !by_member());
    mode & libc::S_ISUID | if group { libc::S_ISGID } else { 0 }
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
    }
}
