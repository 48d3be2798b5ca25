//! The contents of extended attributes: a file's key and layout, and a directory's default layout for new files.
//!
//! Both are little-endian and of fixed size; the first two bytes are the version. A later version may be longer. This
//! version refuses what it does not know, so that nothing is misread.

use std::os::fd::AsFd;

use impresario_layout::{Layout, Skipped};
use impresario_wire::message::{FileKey, LayoutRequest, Time};
use rustix::io::Errno;

use super::disk::Disk;

/// Attribute of a file: its [`Record`].
pub(super) const FILE_ATTRIBUTE: &str = "user.impresario.file";
/// Attribute of a directory: the default layout of files created in it.
pub(super) const LAYOUT_ATTRIBUTE: &str = "user.impresario.layout";

const VERSION: u16 = 1;
/// Of a record that also has skipped servers, spare objects or both. Others stay of the version before.
const RECORD_VERSION: u16 = 4;
/// Of a record with `made` and `used_bytes`, and its bytes, which one of [`RECORD_VERSION`] begins with.
const RECORD_3: (usize, u16) = (48, 3);
/// More than the longest record.
const RECORD_MAX_BYTES: usize = 256;
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
    /// Other objects that are to be removed: those that it had before it was laid out anew, or has not yet.
    pub(super) spare: Option<(FileKey, Layout)>,
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
    pub(super) fn encode(&self) -> Vec<u8> {
        let is_plain = self.layout.skipped.is_empty() && self.spare.is_none();
        let version = if is_plain { RECORD_3.1 } else { RECORD_VERSION };
        let mut bytes = vec![0; RECORD_3.0];
        let mut out = Writer(&mut bytes);
        out.put(&version.to_le_bytes());
        out.put(&self.layout.base.to_le_bytes());
        out.put(&self.layout.pcount.to_le_bytes());
        out.put(&self.layout.servers.to_le_bytes());
        out.put(&self.layout.ssize_bytes.to_le_bytes());
        out.put(&self.seen.mtime.nanos.to_le_bytes());
        out.put(&self.key.0.to_le_bytes());
        out.put(&self.seen.mtime.secs.to_le_bytes());
        out.put(&self.seen.made.to_le_bytes());
        out.put(&self.seen.used_bytes.unwrap_or(NOT_NOTED).to_le_bytes());
        if is_plain {
            return bytes;
        }
        let put_skipped = |bytes: &mut Vec<u8>, skipped: &Skipped| {
            bytes.extend(skipped.len().to_le_bytes());
            bytes.extend(skipped.servers().iter().flat_map(|server| server.to_le_bytes()));
        };
        put_skipped(&mut bytes, &self.layout.skipped);
        if let Some((key, layout)) = &self.spare {
            bytes.extend(key.0.to_le_bytes());
            [layout.base, layout.pcount, layout.servers].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            bytes.extend(layout.ssize_bytes.to_le_bytes());
            put_skipped(&mut bytes, &layout.skipped);
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
        let mut from = Reader(bytes);
        let version = u16::from_le_bytes(from.take()?);
        let (has_made, has_used) = match (bytes.len(), version) {
            (48.., RECORD_VERSION) | RECORD_3 => (true, true),
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
        let seen = Seen { mtime: Time { secs, nanos }, made, used_bytes };
        if version != RECORD_VERSION {
            return Some(Record { key, layout, seen, spare: None });
        }
        let layout = layout.without(take_skipped(&mut from)?).ok()?;
        if from.0.is_empty() {
            return Some(Record { key, layout, seen, spare: None });
        }
        let spare_key = FileKey(u64::from_le_bytes(from.take()?));
        let (base, pcount) = (u16::from_le_bytes(from.take()?), u16::from_le_bytes(from.take()?));
        let servers = u16::from_le_bytes(from.take()?);
        let spare = Layout::new(base, pcount, u32::from_le_bytes(from.take()?), servers).ok()?;
        let spare = spare.without(take_skipped(&mut from)?).ok()?;
        from.0.is_empty().then_some(Record { key, layout, seen, spare: Some((spare_key, spare)) })
    }

    /// The record of an open file.
    pub(super) fn of(disk: &Disk, file: impl AsFd) -> Result<Record, BadRecord> {
        let mut bytes = [0; RECORD_MAX_BYTES];
        match disk.attribute(file, FILE_ATTRIBUTE, &mut bytes) {
            Ok(len) => bytes.get(..len).and_then(Record::decode).ok_or(BadRecord::Unknown),
            Err(Errno::NODATA) => Err(BadRecord::Missing),
            Err(Errno::RANGE) => Err(BadRecord::Unknown),
            Err(errno) => Err(BadRecord::Io(errno)),
        }
    }
}

fn take_skipped(from: &mut Reader<'_>) -> Option<Skipped> {
    let count = u16::from_le_bytes(from.take()?);
    let mut skipped = Vec::new();
    for _ in 0..count {
        skipped.push(u16::from_le_bytes(from.take()?));
    }
    // In order, each once, as it was written.
    Skipped::of(skipped.iter().copied()).filter(|known| known.servers() == skipped)
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
            spare: None,
        };
        let without = record.layout.without(Skipped::of([1, 2]).unwrap()).unwrap();
        let spare = Some((FileKey(9), Layout::new(0, 4, 4096, 5).unwrap().without(Skipped::of([4]).unwrap()).unwrap()));
        for (layout, spare) in [(without, None), (without, spare), (record.layout, spare)] {
            let further = Record { layout, spare, ..record };
            let bytes = further.encode();
            assert_eq!((bytes[0], Record::decode(&bytes)), (4, Some(further)));
            assert_eq!(Record::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Record::decode(&[&bytes[..], &[0]].concat()), None);
        }
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes), Some(record));
        assert_eq!(Record::decode(&bytes[..31]), None);
        assert_eq!(Record::decode(&bytes[..32]), None);
        let mut older = bytes.clone();
        older[0] = 2;
        let unknown = Record { seen: Seen { used_bytes: None, ..record.seen }, ..record };
        assert_eq!(Record::decode(&older[..40]), Some(unknown), "of a version that did not note the storage used");
        assert_eq!(Record::decode(&unknown.encode()), Some(unknown));
        older[0] = 1;
        let unknown = Record { seen: Seen { made: 0, ..unknown.seen }, ..record };
        assert_eq!(Record::decode(&older[..32]), Some(unknown), "of a version that did not remember objects");
        assert_eq!(Record::decode(&[]), None);
        let mut newer = bytes.clone();
        newer[0] = 5;
        assert_eq!(Record::decode(&newer), None);
        let mut no_servers = bytes;
        no_servers[6..8].fill(0);
        assert_eq!(Record::decode(&no_servers), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_decoders(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(record) = Record::decode(&bytes) {
                // What an older version did not have is written, too.
                let encoded = record.encode();
                let is_plain = bytes[0] == 4 && record.layout.skipped.is_empty() && record.spare.is_none();
                let len = if is_plain { encoded.len() } else { bytes.len() };
                prop_assert_eq!(&encoded[2..len], &bytes[2..len]);
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
