//! Contents of files, made and compared. Tests are compiled without optimisation, and take ten times longer for a byte than
//! this crate.

/// Bytes that tell where they belong: a wrong file, generation or offset shows.
pub fn pattern(file: u64, generation: u64, offset: u64, len: usize) -> Vec<u8> {
    let start = file.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ generation.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    let word = |i: u64| {
        let x = start.wrapping_add(i);
        let x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x ^ (x >> 29)).to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(len + 16);
    let skipped = (offset % 8) as usize;
    (offset / 8..(offset + len as u64).div_ceil(8)).for_each(|i| bytes.extend(word(i)));
    bytes.drain(..skipped);
    bytes.truncate(len);
    bytes
}

/// Where two contents differ first: at a byte of both, or where the shorter one ends. `None`: they are the same.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    const STEP: usize = 4096;
    if one == other {
        return None;
    }
    let steps = one.chunks(STEP).zip(other.chunks(STEP)).take_while(|(one, other)| one == other).count();
    // Both may be shorter: the last step that is the same may be a part of one.
    let from = (steps * STEP).min(one.len()).min(other.len());
    let differs = one[from..].iter().zip(&other[from..]).position(|(one, other)| one != other);
    Some(differs.map_or(one.len().min(other.len()), |at| from + at))
}

/// Whether there is nothing but zeros.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_from_their_place_alone() {
        let all = pattern(3, 4, 0, 100);
        for from in 0..20 {
            for len in 0..40 {
                assert_eq!(pattern(3, 4, from as u64, len), all[from..from + len], "{len} bytes from {from}");
            }
        }
        assert_ne!(pattern(4, 4, 0, 100), all);
        assert_ne!(pattern(3, 5, 0, 100), all);
    }

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let one = pattern(1, 1, 0, 10_000);
        assert_eq!(first_difference(&one, &one), None);
        for at in [0, 1, 4095, 4096, 4097, 8191, 8192, 9999] {
            let mut other = one.clone();
            other[at] ^= 1;
            assert_eq!(first_difference(&one, &other), Some(at));
            assert_eq!(first_difference(&one, &one[..at]), Some(at));
            assert_eq!(first_difference(&one[..at], &one), Some(at));
        }
    }

    #[test]
    fn one_bit_is_not_zero() {
        assert!(is_zero(&[]) && is_zero(&[0; 5000]));
        let mut bytes = [0; 5000];
        bytes[4999] = 128;
        assert!(!is_zero(&bytes));
    }
}
