//! SipHash-2-4: a keyed hash of short messages that cannot be guessed without the key (J.-P. Aumasson, D. J. Bernstein:
//! SipHash: a fast short-input PRF, Indocrypt 2012, section 2).

/// The hash of `message` under `key`.
pub fn siphash(key: &[u8; 16], message: &[u8]) -> u64 {
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| key[at + n]));
    let (k0, k1) = (half(0), half(8));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let mut take = |word: u64| {
        v[3] ^= word;
        round(&mut v);
        round(&mut v);
        v[0] ^= word;
    };
    let words = message.chunks_exact(8);
    let rest = words.remainder();
    for word in words {
        take(u64::from_le_bytes(std::array::from_fn(|n| word[n])));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    last[7] = message.len() as u8;
    take(u64::from_le_bytes(last));
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_paper() {
        // Appendix A: key 00 01 … 0f, message 00 01 … 0e.
        let key: [u8; 16] = std::array::from_fn(|n| n as u8);
        let message: Vec<u8> = (0..15).collect();
        assert_eq!(siphash(&key, &message), 0xa129_ca61_49be_45e5);
        // The first of the authors' test vectors: no message.
        assert_eq!(siphash(&key, &[]), 0x726f_db47_dd0e_0e31);
    }
}
