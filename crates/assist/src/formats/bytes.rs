//! Numbers out of bytes that nobody vouches for.

/// Reads fields one after the other; `None` at the end of the bytes.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    /// From the beginning of these bytes.
    pub fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { bytes }
    }

    /// What is not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(usize::try_from(len).ok()?)?;
        self.bytes = rest;
        Some(taken)
    }

    /// A number of up to 8 bytes, least significant byte first.
    pub fn little(&mut self, len: u64) -> Option<u64> {
        let taken = self.take(len).filter(|t| t.len() <= 8)?;
        Some(taken.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// A number of up to 8 bytes, most significant byte first.
    pub fn big(&mut self, len: u64) -> Option<u64> {
        let taken = self.take(len).filter(|t| t.len() <= 8)?;
        Some(taken.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}
