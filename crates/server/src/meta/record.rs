//! The contents of extended attributes: a file's key and layout, and a directory's default layout for new files.
//!
//! Both are little-endian and of fixed size; the first two bytes are the version. A later version may be longer. This
//! version refuses what it does not know, so that nothing is misread.

use std::os::fd::AsFd;

use impresario_layout::Layout;
use impresario_wire::message::{FileKey, LayoutRequest, Time};
use rustix::io::Errno;

use super::disk::Disk;

/// Attribute of a file: its [`Record`].
pub(super) const FILE_ATTRIBUTE: &str = "user.impresario.file";
/// Attribute of a directory: the default layout of files created in it.
pub(super) const LAYOUT_ATTRIBUTE: &str = "user.impresario.layout";

const VERSION: u16 = 1;
/// Of a record with `made` and `used_bytes`.
const RECORD_VERSION: u16 = 3;
/// Bytes of an encoded [`Record`].
pub(super) const RECORD_BYTES: usize = 48;
/// Of a record without `used_bytes`, and its bytes.
const RECORD_2: (usize, u16) = (40, 2);
/// Of a record without `made` too.
const RECORD_1: (usize, u16) = (32, VERSION);
/// `used_bytes` of a file that has no note of it.
const NOT_NOTED: u64 = u64::MAX;
/// Bytes of an encoded default layout.
pub(super) const LAYOUT_REQUEST_BYTES: usize = 12;

/// The permanent properties of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    /// Key of its objects.
    pub(super) key: FileKey,
    /// Location of its data.
    pub(super) layout: Layout,
    /// Its objects when they were last asked for.
    pub(super) seen: Seen,
}

/// What is remembered of a file's objects.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Seen {
    /// Their modification time when the local time was last settled or set by hand. While the objects still report this
    /// time, nothing has been written since, and the local time holds.
    pub(super) mtime: Time,
    /// Those that existed, as in [`ObjectInfo::made`]: they exist until the file is removed, or are lost.
    ///
    /// [`ObjectInfo::made`]: impresario_wire::ObjectInfo::made
    pub(super) made: u64,
    /// Storage that they use, bytes, when the size was settled. `None`: what its size says, since it has no holes worth
    /// speaking of and nothing allocated beside its bytes.
    pub(super) used_bytes: Option<u64>,
}

/// Why an attribute is not usable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BadRecord {
    /// Absent: this server did not create the file.
    Missing,
    /// Of another version, truncated, or invalid.
    Unknown,
    /// Unreadable.
    Io(Errno),
}

impl Record {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let mut out = Writer(&mut bytes);
        out.put(&RECORD_VERSION.to_le_bytes());
        out.put(&self.layout.base.to_le_bytes());
        out.put(&self.layout.pcount.to_le_bytes());
        out.put(&self.layout.servers.to_le_bytes());
        out.put(&self.layout.ssize_bytes.to_le_bytes());
        out.put(&self.seen.mtime.nanos.to_le_bytes());
        out.put(&self.key.0.to_le_bytes());
        out.put(&self.seen.mtime.secs.to_le_bytes());
        out.put(&self.seen.made.to_le_bytes());
        out.put(&self.seen.used_bytes.unwrap_or(NOT_NOTED).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
        let mut from = Reader(bytes);
        let (has_made, has_used) = match (bytes.len(), u16::from_le_bytes(from.take()?)) {
            (RECORD_BYTES, RECORD_VERSION) => (true, true),
            RECORD_2 => (true, false),
            RECORD_1 => (false, false),
            _ => return None,
        };
        let (base, pcount) = (u16::from_le_bytes(from.take()?), u16::from_le_bytes(from.take()?));
        let servers = u16::from_le_bytes(from.take()?);
        let ssize_bytes = u32::from_le_bytes(from.take()?);
        let nanos = u32::from_le_bytes(from.take()?);
        let key = FileKey(u64::from_le_bytes(from.take()?));
        let secs = i64::from_le_bytes(from.take()?);
        let layout = Layout::new(base, pcount, ssize_bytes, servers).ok()?;
        let made = if has_made { u64::from_le_bytes(from.take()?) } else { 0 };
        let used_bytes = if has_used { u64::from_le_bytes(from.take()?) } else { NOT_NOTED };
        let used_bytes = Some(used_bytes).filter(|used| *used != NOT_NOTED);
        Some(Record { key, layout, seen: Seen { mtime: Time { secs, nanos }, made, used_bytes } })
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

/// Encodes a default layout.
pub(super) fn encode_layout_request(request: &LayoutRequest) -> [u8; LAYOUT_REQUEST_BYTES] {
    let given = u16::from(request.base.is_some())
        | u16::from(request.pcount.is_some()) << 1
        | u16::from(request.ssize_bytes.is_some()) << 2;
    let mut bytes = [0; LAYOUT_REQUEST_BYTES];
    let mut out = Writer(&mut bytes);
    out.put(&VERSION.to_le_bytes());
    out.put(&given.to_le_bytes());
    out.put(&request.base.unwrap_or(0).to_le_bytes());
    out.put(&request.pcount.unwrap_or(0).to_le_bytes());
    out.put(&request.ssize_bytes.unwrap_or(0).to_le_bytes());
    bytes
}

/// Decodes a default layout.
pub(super) fn decode_layout_request(bytes: &[u8]) -> Option<LayoutRequest> {
    let mut from = Reader(bytes);
    if bytes.len() != LAYOUT_REQUEST_BYTES || u16::from_le_bytes(from.take()?) != VERSION {
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
            seen: Seen { mtime: Time { secs: -7, nanos: 999_999_999 }, made: 5, used_bytes: Some(8192) },
        };
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes), Some(record));
        assert_eq!(Record::decode(&bytes[..31]), None);
        assert_eq!(Record::decode(&bytes[..32]), None);
        let mut older = bytes;
        older[0] = 2;
        let unknown = Record { seen: Seen { used_bytes: None, ..record.seen }, ..record };
        assert_eq!(Record::decode(&older[..40]), Some(unknown), "of a version that did not note the storage used");
        assert_eq!(Record::decode(&unknown.encode()), Some(unknown));
        older[0] = 1;
        let unknown = Record { seen: Seen { made: 0, ..unknown.seen }, ..record };
        assert_eq!(Record::decode(&older[..32]), Some(unknown), "of a version that did not remember objects");
        assert_eq!(Record::decode(&[]), None);
        let mut newer = bytes;
        newer[0] = 4;
        assert_eq!(Record::decode(&newer), None);
        let mut no_servers = bytes;
        no_servers[6..8].fill(0);
        assert_eq!(Record::decode(&no_servers), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_decoders(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(record) = Record::decode(&bytes) {
                prop_assert_eq!(&record.encode()[2..bytes.len()], &bytes[2..]);
            }
            decode_layout_request(&bytes);
        }

        #[test]
        fn a_layout_request_survives(base in any::<Option<u16>>(), pcount in any::<Option<u16>>(), ssize_bytes in any::<Option<u32>>()) {
            let request = LayoutRequest { base, pcount, ssize_bytes };
            prop_assert_eq!(decode_layout_request(&encode_layout_request(&request)), Some(request));
        }
    }
}
