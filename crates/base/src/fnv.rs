//! FNV-1a of 64 bits: a hash that is the same in every program and release, for numbers that are kept or sent. It is no protection
//! against whoever chooses what is hashed.

/// The hash of nothing.
pub const EMPTY: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash of these bytes.
pub fn hash(bytes: &[u8]) -> u64 {
    onto(EMPTY, bytes)
}

/// The hash of what `before` is the hash of, and these bytes behind it.
pub fn onto(before: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(before, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the test vectors of the algorithm's authors.
    #[test]
    fn it_is_the_hash_of_that_name() {
        assert_eq!((hash(b""), hash(b"a")), (0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c));
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(onto(hash(b"foo"), b"bar"), hash(b"foobar"));
    }
}
