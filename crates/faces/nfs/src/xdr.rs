//! External data representation (RFC 4506): numbers, texts and opaque bytes, in units of four bytes.
//!
//! What comes from a peer is read in place and checked against its bounds before any space is taken for it.

/// The bytes are not what the protocol says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not a call of this protocol")]
pub struct Garbage;

/// Reads from the front of some bytes.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

/// How many bytes fill the last unit of four after `len`.
const fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

impl<'a> Reader<'a> {
    /// Of these bytes.
    pub const fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    /// What was not read yet.
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// So many bytes as they are, and the filling after them.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Garbage> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Garbage)?;
        self.rest = rest.get(padding(len)..).ok_or(Garbage)?;
        Ok(bytes)
    }

    /// Bytes of a fixed number.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbage> {
        self.bytes(N)?.try_into().map_err(|_| Garbage)
    }

    /// An unsigned number.
    pub fn u32(&mut self) -> Result<u32, Garbage> {
        self.array().map(u32::from_be_bytes)
    }

    /// An unsigned hyper.
    pub fn u64(&mut self) -> Result<u64, Garbage> {
        self.array().map(u64::from_be_bytes)
    }

    /// A boolean: 0 or 1.
    pub fn bool(&mut self) -> Result<bool, Garbage> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Garbage),
        }
    }

    /// Bytes with their length before them, `most` at most.
    pub fn opaque(&mut self, most: usize) -> Result<&'a [u8], Garbage> {
        let len = self.u32()? as usize;
        if len > most {
            return Err(Garbage);
        }
        self.bytes(len)
    }

    /// What a boolean before it says is there.
    pub fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, Garbage>) -> Result<Option<T>, Garbage> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    /// Checks that nothing follows.
    pub fn end(&self) -> Result<(), Garbage> {
        if self.rest.is_empty() { Ok(()) } else { Err(Garbage) }
    }
}

/// Appends to some bytes.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Nothing yet, with room for so many bytes.
    pub fn with_capacity(bytes: usize) -> Writer {
        Writer { bytes: Vec::with_capacity(bytes) }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True while nothing is written.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Forgets what was written after the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    /// An unsigned number.
    pub fn u32(&mut self, value: u32) -> &mut Writer {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// An unsigned hyper.
    pub fn u64(&mut self, value: u64) -> &mut Writer {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A boolean.
    pub fn bool(&mut self, value: bool) -> &mut Writer {
        self.u32(value.into())
    }

    /// Bytes of a fixed number, and their filling.
    pub fn array(&mut self, bytes: &[u8]) -> &mut Writer {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len() + padding(bytes.len()), 0);
        self
    }

    /// Bytes with their length before them. There are never 2^32 of them.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Writer {
        self.u32(bytes.len() as u32);
        self.array(bytes)
    }

    /// A value that may be absent.
    pub fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Writer, T)) -> &mut Writer {
        self.bool(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
        self
    }
}

/// The filling that follows so many bytes.
pub fn filling(len: usize) -> &'static [u8] {
    &[0; 3][..padding(len)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, PartialEq)]
    enum Value {
        Number(u32),
        Hyper(u64),
        Flag(bool),
        Text(Vec<u8>),
        Eight([u8; 8]),
        Maybe(Option<u32>),
    }

    fn values() -> impl Strategy<Value = Vec<Value>> {
        let value = prop_oneof![
            any::<u32>().prop_map(Value::Number),
            any::<u64>().prop_map(Value::Hyper),
            any::<bool>().prop_map(Value::Flag),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Value::Text),
            any::<[u8; 8]>().prop_map(Value::Eight),
            proptest::option::of(any::<u32>()).prop_map(Value::Maybe),
        ];
        proptest::collection::vec(value, 0..20)
    }

    fn read(reader: &mut Reader<'_>, like: &Value) -> Result<Value, Garbage> {
        Ok(match like {
            Value::Number(_) => Value::Number(reader.u32()?),
            Value::Hyper(_) => Value::Hyper(reader.u64()?),
            Value::Flag(_) => Value::Flag(reader.bool()?),
            Value::Text(_) => Value::Text(reader.opaque(40)?.to_vec()),
            Value::Eight(_) => Value::Eight(reader.array()?),
            Value::Maybe(_) => Value::Maybe(reader.optional(Reader::u32)?),
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(values in values()) {
            let mut writer = Writer::default();
            for value in &values {
                match value {
                    Value::Number(n) => { writer.u32(*n); },
                    Value::Hyper(n) => { writer.u64(*n); },
                    Value::Flag(flag) => { writer.bool(*flag); },
                    Value::Text(text) => { writer.opaque(text); },
                    Value::Eight(bytes) => { writer.array(bytes); },
                    Value::Maybe(value) => { writer.optional(*value, |w, n| { w.u32(n); }); },
                }
            }
            let bytes = writer.into_bytes();
            prop_assert_eq!(bytes.len() % 4, 0);
            let mut reader = Reader::new(&bytes);
            for value in &values {
                prop_assert_eq!(&read(&mut reader, value).unwrap(), value);
            }
            prop_assert_eq!(reader.end(), Ok(()));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), like in values()) {
            let mut reader = Reader::new(&bytes);
            for value in &like {
                if read(&mut reader, value).is_err() {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_length_beyond_its_limit_or_the_bytes_is_refused() {
        assert_eq!(Reader::new(&[0, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0]).opaque(4), Err(Garbage));
        assert_eq!(Reader::new(&[255, 255, 255, 255, 1, 2, 3, 4]).opaque(usize::MAX), Err(Garbage));
        // The filling belongs to it.
        assert_eq!(Reader::new(&[0, 0, 0, 1, 1, 0, 0]).opaque(4), Err(Garbage));
        assert_eq!(Reader::new(&[0, 0, 0, 2]).bool(), Err(Garbage));
    }
}
