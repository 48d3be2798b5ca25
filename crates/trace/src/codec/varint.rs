//! Variable-length integers: seven bits a byte, lowest first (LEB128); signed ones in zigzag form.

/// Appends `value`.
pub fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a signed difference.
pub fn put_signed(out: &mut Vec<u8>, value: i64) {
    put(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// Appends a length and the bytes.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// The unread rest of a slice of untrusted bytes.
#[derive(Clone, Copy)]
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// `None` at the end, or if the number exceeds 64 bits.
    pub fn number(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    pub fn signed(&mut self) -> Option<i64> {
        let value = self.number()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    pub fn number_u32(&mut self) -> Option<u32> {
        self.number().and_then(|n| u32::try_from(n).ok())
    }

    /// A length and the bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_in_few_bytes() {
        for (value, len) in [(0, 1), (127, 1), (128, 2), (16_383, 2), (1 << 20, 3), (1 << 21, 4), (u64::MAX, 10)] {
            let mut out = Vec::new();
            put(&mut out, value);
            assert_eq!(out.len(), len, "{value}");
            assert_eq!(Bytes(&out).number(), Some(value));
        }
        for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
            let mut out = Vec::new();
            put_signed(&mut out, value);
            assert_eq!(Bytes(&out).signed(), Some(value));
        }
    }

    #[test]
    fn invalid_numbers_are_refused() {
        assert_eq!(Bytes(&[]).number(), None);
        assert_eq!(Bytes(&[0x80]).number(), None);
        assert_eq!(Bytes(&[0xff; 10]).number(), None, "more than 64 bits");
        assert_eq!(Bytes(&[0x80; 20]).number(), None, "without end");
        assert_eq!(Bytes(&[5, 1, 2]).bytes(), None, "fewer than announced");
        assert_eq!(Bytes(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).bytes(), None);
    }
}
