//! What is kept in extended attributes: a file's key and layout, and a folder's wish for the striping of new files.
//!
//! Both are little-endian and of fixed size; the first two bytes are the version. A later version may be
//! longer; what this version does not know it refuses, so that nothing is misread.

use std::os::fd::AsFd;

use impresario_layout::Layout;
use impresario_wire::message::{FileKey, LayoutRequest, Time};
use rustix::io::Errno;

use super::disk::Disk;

/// Attribute of a file: its [`Record`].
pub(super) const FILE_ATTRIBUTE: &str = "user.impresario.file";
/// Attribute of a folder: how files made in it are striped.
pub(super) const LAYOUT_ATTRIBUTE: &str = "user.impresario.layout";

const VERSION: u16 = 1;
/// Bytes of an encoded [`Record`].
pub(super) const RECORD_BYTES: usize = 32;
/// Bytes of an encoded striping wish.
pub(super) const WISH_BYTES: usize = 12;

/// What a file carries for as long as it lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Names its objects.
    pub(super) key: FileKey,
    /// Where its data lie.
    pub(super) layout: Layout,
    /// Modification time of its objects when the local one was last settled or set by hand: while the objects
    /// still say this, nobody has written since, and the local time holds.
    pub(super) seen: Time,
}

/// Why an attribute is not believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BadRecord {
    /// Nothing there: not made by this server.
    Missing,
    /// Of another version, cut, or impossible.
    Unknown,
    /// It could not be read.
    Io(Errno),
}

impl Record {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let mut out = Writer(&mut bytes);
        out.put(&VERSION.to_le_bytes());
        out.put(&self.layout.base.to_le_bytes());
        out.put(&self.layout.pcount.to_le_bytes());
        out.put(&self.layout.servers.to_le_bytes());
        out.put(&self.layout.ssize_bytes.to_le_bytes());
        out.put(&self.seen.nanos.to_le_bytes());
        out.put(&self.key.0.to_le_bytes());
        out.put(&self.seen.secs.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
        let mut from = Reader(bytes);
        if bytes.len() != RECORD_BYTES || u16::from_le_bytes(from.take()?) != VERSION {
            return None;
        }
        let (base, pcount) = (u16::from_le_bytes(from.take()?), u16::from_le_bytes(from.take()?));
        let servers = u16::from_le_bytes(from.take()?);
        let ssize_bytes = u32::from_le_bytes(from.take()?);
        let nanos = u32::from_le_bytes(from.take()?);
        let key = FileKey(u64::from_le_bytes(from.take()?));
        let secs = i64::from_le_bytes(from.take()?);
        let layout = Layout::new(base, pcount, ssize_bytes, servers).ok()?;
        Some(Record { key, layout, seen: Time { secs, nanos } })
    }

    /// The record of an open file.
    pub(super) fn of(disk: &Disk, file: impl AsFd) -> Result<Record, BadRecord> {
        let mut bytes = [0; 2 * RECORD_BYTES];
        match disk.attribute(file, FILE_ATTRIBUTE, &mut bytes) {
            Ok(len) => bytes.get(..len).and_then(Record::decode).ok_or(BadRecord::Unknown),
            Err(Errno::NODATA) => Err(BadRecord::Missing),
            Err(Errno::RANGE) => Err(BadRecord::Unknown),
            Err(errno) => Err(BadRecord::Io(errno)),
        }
    }
}

/// A folder's wish, encoded.
pub(super) fn encode_wish(wish: &LayoutRequest) -> [u8; WISH_BYTES] {
    let given = u16::from(wish.base.is_some())
        | u16::from(wish.pcount.is_some()) << 1
        | u16::from(wish.ssize_bytes.is_some()) << 2;
    let mut bytes = [0; WISH_BYTES];
    let mut out = Writer(&mut bytes);
    out.put(&VERSION.to_le_bytes());
    out.put(&given.to_le_bytes());
    out.put(&wish.base.unwrap_or(0).to_le_bytes());
    out.put(&wish.pcount.unwrap_or(0).to_le_bytes());
    out.put(&wish.ssize_bytes.unwrap_or(0).to_le_bytes());
    bytes
}

/// A folder's wish, decoded.
pub(super) fn decode_wish(bytes: &[u8]) -> Option<LayoutRequest> {
    let mut from = Reader(bytes);
    if bytes.len() != WISH_BYTES || u16::from_le_bytes(from.take()?) != VERSION {
        return None;
    }
    let given = u16::from_le_bytes(from.take()?);
    let (base, pcount) = (u16::from_le_bytes(from.take()?), u16::from_le_bytes(from.take()?));
    let ssize_bytes = u32::from_le_bytes(from.take()?);
    Some(LayoutRequest {
        base: (given & 1 != 0).then_some(base),
        pcount: (given & 2 != 0).then_some(pcount),
        ssize_bytes: (given & 4 != 0).then_some(ssize_bytes),
    })
}

struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let (head, rest) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        self.0 = rest;
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_survives_and_others_are_refused() {
        let record = Record {
            key: FileKey(0x1234_5678_9abc_def0),
            layout: Layout::new(3, 2, 65536, 5).unwrap(),
            seen: Time { secs: -7, nanos: 999_999_999 },
        };
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes), Some(record));
        assert_eq!(Record::decode(&bytes[..31]), None);
        assert_eq!(Record::decode(&[]), None);
        let mut newer = bytes;
        newer[0] = 2;
        assert_eq!(Record::decode(&newer), None);
        let mut no_servers = bytes;
        no_servers[6..8].fill(0);
        assert_eq!(Record::decode(&no_servers), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_decoders(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(record) = Record::decode(&bytes) {
                prop_assert_eq!(&record.encode()[..], &bytes[..]);
            }
            decode_wish(&bytes);
        }

        #[test]
        fn a_wish_survives(base in any::<Option<u16>>(), pcount in any::<Option<u16>>(), ssize_bytes in any::<Option<u32>>()) {
            let wish = LayoutRequest { base, pcount, ssize_bytes };
            prop_assert_eq!(decode_wish(&encode_wish(&wish)), Some(wish));
        }
    }
}
