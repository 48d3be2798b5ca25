//! The folders that a path leads through, as numbers small enough to go with every request.

use crate::fnv;

/// So many folders of a path count, from the root of the name space on.
pub const DEPTH_MAX: usize = 4;

/// By depth, the numbers of the folders that a path leads through: entry n is that of its first n + 1 components, 0 when it has
/// fewer. Two folders have the same number by chance once in four billion pairs.
pub type Folders = [u32; DEPTH_MAX];

/// Those of a path, whose last component counts as a folder too. Slashes before, behind and between components mean nothing.
pub fn of(path: &[u8]) -> Folders {
    let (mut numbers, mut hash) = (Folders::default(), fnv::EMPTY);
    for (number, component) in numbers.iter_mut().zip(components(path)) {
        hash = fnv::onto(fnv::onto(hash, component), b"/");
        *number = ((hash ^ hash >> 32) as u32).max(1);
    }
    numbers
}

/// The components of a path.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|component| !component.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_share_the_numbers_of_the_folders_that_they_share() {
        let (a, b, deep) = (of(b"scratch/a/f"), of(b"/scratch//b"), of(b"scratch/a/f/g/h"));
        assert_eq!((a[0], a[0] == b[0], a[1] == b[1]), (deep[0], true, false));
        assert_eq!((a[3], b[2]), (0, 0));
        assert_eq!((&a[..3], deep[3] != 0), (&deep[..3], true));
        assert_ne!(of(b"ab/c")[1], of(b"a/bc")[1]);
        assert_eq!(of(b"/"), [0; DEPTH_MAX]);
        // Servers and clients of different releases agree.
        assert_eq!(of(b"scratch")[0], 0x1695d31c);
    }
}
