//! NumPy: `.npz`, a ZIP archive with one array a member, listed by the directory at its end; `.npy`, a header and the rows
//! of one array.

use super::{Fields, Format, Source, Track};
use impresario_foresight::EXTENTS_MAX;

/// The reader of both.
pub struct Numpy;

/// The end of a ZIP archive without a comment, which NumPy never writes.
const END_BYTES: u64 = 22;
/// Rows that are shorter share pages, and come with the kernel's read-ahead.
const ROW_BYTES_MIN: u64 = 4096;
/// NumPy itself refuses to parse headers beyond 10,000 bytes.
const HEADER_BYTES_MAX: u64 = 64 << 10;

impl Format for Numpy {
    fn name(&self) -> &'static str {
        "NumPy"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["npz", "npy"]
    }

    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        match file.bytes(0, 6)?.as_slice() {
            b"\x93NUMPY" => rows(file),
            [b'P', b'K', 3, 4, ..] => members(file),
            _ => None,
        }
    }
}

/// A track of the archive's members, each with the header before it.
fn members(file: &mut Source<'_>) -> Option<Vec<Track>> {
    file.end();
    let end_at = file.size_bytes().checked_sub(END_BYTES)?;
    let end = file.bytes(end_at, END_BYTES)?;
    let mut fields = Fields::new(end.strip_prefix(b"PK\x05\x06")?);
    fields.take(4 + 2)?;
    let (mut count, mut len, mut at) = (fields.little(2)?, fields.little(4)?, fields.little(4)?);
    if at == 0xffff_ffff || count == 0xffff || len == 0xffff_ffff {
        let locator = file.bytes(end_at.checked_sub(20)?, 20)?;
        let mut fields = Fields::new(locator.strip_prefix(b"PK\x06\x07")?);
        fields.take(4)?;
        let end = file.bytes(fields.little(8)?, 56)?;
        let mut fields = Fields::new(end.strip_prefix(b"PK\x06\x06")?);
        fields.take(8 + 2 + 2 + 4 + 4 + 8)?;
        (count, len, at) = (fields.little(8)?, fields.little(8)?, fields.little(8)?);
    }
    let directory = file.bytes(at, len)?;
    let mut fields = Fields::new(&directory);
    let mut starts = Vec::new();
    for _ in 0..count.min(EXTENTS_MAX as u64) {
        if fields.take(4)? != b"PK\x01\x02" {
            return None;
        }
        fields.take(16)?;
        let (packed, whole) = (fields.little(4)?, fields.little(4)?);
        let (name, extra, comment) = (fields.little(2)?, fields.little(2)?, fields.little(2)?);
        fields.take(2 + 2 + 4)?;
        let mut start = fields.little(4)?;
        fields.take(name)?;
        let extra = fields.take(extra)?;
        fields.take(comment)?;
        if start == 0xffff_ffff {
            let before = 8 * (u64::from(packed == 0xffff_ffff) + u64::from(whole == 0xffff_ffff));
            start = long_place(extra, before)?;
        }
        starts.push(start);
    }
    // A member ends where the next one in the file begins.
    let mut sorted = starts.clone();
    sorted.push(at);
    sorted.sort_unstable();
    let end_of = |start: u64| sorted.get(sorted.partition_point(|s| *s <= start)).copied().unwrap_or(start);
    Some(vec![starts.into_iter().map(|start| start..end_of(start)).collect()])
}

/// The place of a member beyond 4 GiB, after `before` bytes of other lengths.
fn long_place(extra: &[u8], before: u64) -> Option<u64> {
    let mut fields = Fields::new(extra);
    loop {
        let (kind, len) = (fields.little(2)?, fields.little(2)?);
        let mut value = Fields::new(fields.take(len)?);
        if kind == 1 {
            value.take(before)?;
            return value.little(8);
        }
    }
}

/// A track of the rows of an array that is stored row by row.
fn rows(file: &mut Source<'_>) -> Option<Vec<Track>> {
    let start = file.bytes(6, 6)?;
    let mut fields = Fields::new(&start);
    let (major, _) = (fields.little(1)?, fields.little(1)?);
    let (at, len) = if major == 1 { (10, fields.little(2)?) } else { (12, fields.little(4)?) };
    let header = String::from_utf8(file.bytes(at, Some(len).filter(|len| *len <= HEADER_BYTES_MAX)?)?).ok()?;
    if !header.contains("'fortran_order': False") {
        return None;
    }
    let (_, shape) = header.split_once("'shape': (")?;
    let (shape, _) = shape.split_once(')')?;
    let sides: Vec<u64> =
        shape.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| s.parse().ok()).collect::<Option<_>>()?;
    let (data, rows) = (at + len, *sides.first().filter(|_| sides.len() > 1)?);
    let row_bytes = file.size_bytes().checked_sub(data)?.checked_div(rows)?;
    if row_bytes < ROW_BYTES_MIN || rows > EXTENTS_MAX as u64 {
        return None;
    }
    Some(vec![file.series(data, row_bytes, row_bytes, rows)])
}
