//! Parquet: the file ends with its metadata in Thrift's compact encoding, its length and `PAR1`. Row groups hold one chunk of
//! each column.

use super::{Fields, Format, Source, Track};

/// The reader.
pub struct Parquet;

const DEPTH_MAX: u32 = 16;
const COLUMNS_MAX: usize = 1 << 14;

impl Format for Parquet {
    fn name(&self) -> &'static str {
        "Parquet"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["parquet", "parq", "pq"]
    }

    /// A track for each column: its chunks, row group after row group.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        file.end();
        let end_at = file.size_bytes().checked_sub(8)?;
        let end = file.bytes(end_at, 8)?;
        let footer_bytes = u64::from(u32::from_le_bytes(end.strip_suffix(b"PAR1")?.try_into().ok()?));
        let footer = file.bytes(end_at.checked_sub(footer_bytes)?, footer_bytes)?;
        let mut tracks: Vec<Track> = Vec::new();
        let mut fields = Fields::new(&footer);
        structure(&mut fields, |field, kind, fields| match (field, kind) {
            // FileMetaData.row_groups
            (4, LIST) => items(fields, |_, fields| row_group(fields, &mut tracks)),
            _ => skip(fields, kind, DEPTH_MAX),
        })?;
        Some(tracks)
    }
}

fn row_group(fields: &mut Fields<'_>, tracks: &mut Vec<Track>) -> Option<()> {
    structure(fields, |field, kind, fields| match (field, kind) {
        // RowGroup.columns
        (1, LIST) => items(fields, |column, fields| {
            let extent = column_chunk(fields)?;
            if column < COLUMNS_MAX {
                tracks.resize_with(tracks.len().max(column + 1), Track::new);
                tracks[column].extend(extent);
            }
            Some(())
        }),
        _ => skip(fields, kind, DEPTH_MAX),
    })
}

/// The extent of a chunk, or none where it lies in another file.
fn column_chunk(fields: &mut Fields<'_>) -> Option<Option<std::ops::Range<u64>>> {
    let (mut elsewhere, mut dictionary, mut data, mut bytes) = (false, None, None, None);
    structure(fields, |field, kind, fields| match (field, kind) {
        // ColumnChunk.file_path
        (1, BINARY) => {
            elsewhere = true;
            skip(fields, kind, DEPTH_MAX)
        }
        // ColumnChunk.meta_data: total_compressed_size, data_page_offset, dictionary_page_offset
        (3, STRUCT) => structure(fields, |field, kind, fields| {
            let place = match (field, kind) {
                (7, I64) => &mut bytes,
                (9, I64) => &mut data,
                (11, I64) => &mut dictionary,
                _ => return skip(fields, kind, DEPTH_MAX),
            };
            *place = u64::try_from(signed(fields)?).ok();
            Some(())
        }),
        _ => skip(fields, kind, DEPTH_MAX),
    })?;
    let start = dictionary.filter(|at| *at > 0 && data.is_none_or(|data| *at < data)).or(data);
    let extent = (!elsewhere).then_some(()).and_then(|()| Some(start?..start?.checked_add(bytes?)?));
    Some(extent)
}

// Thrift's compact encoding.

const I64: u8 = 6;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

fn varint(fields: &mut Fields<'_>) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = fields.little(1)?;
        number |= (byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

fn signed(fields: &mut Fields<'_>) -> Option<i64> {
    let number = varint(fields)?;
    Some((number >> 1) as i64 ^ -((number & 1) as i64))
}

/// Calls `take` with the number and the type of each field; it must read the field.
fn structure(fields: &mut Fields<'_>, mut take: impl FnMut(i64, u8, &mut Fields<'_>) -> Option<()>) -> Option<()> {
    let mut number = 0i64;
    loop {
        let head = fields.little(1)? as u8;
        if head == 0 {
            return Some(());
        }
        number = match head >> 4 {
            0 => signed(fields)?,
            more => number.checked_add(more.into())?,
        };
        take(number, head & 0x0f, fields)?;
    }
}

/// Calls `take` with each structure of a list; lists of other things are none here.
fn items(fields: &mut Fields<'_>, mut take: impl FnMut(usize, &mut Fields<'_>) -> Option<()>) -> Option<()> {
    let (count, kind) = list_head(fields)?;
    if kind != STRUCT {
        return None;
    }
    // Each one takes a byte at least, so the bytes bound the number.
    (0..count).try_for_each(|i| take(usize::try_from(i).ok()?, fields))
}

fn list_head(fields: &mut Fields<'_>) -> Option<(u64, u8)> {
    let head = fields.little(1)? as u8;
    let count = match head >> 4 {
        15 => varint(fields)?,
        few => few.into(),
    };
    Some((count, head & 0x0f))
}

fn skip(fields: &mut Fields<'_>, kind: u8, depth: u32) -> Option<()> {
    let deeper = depth.checked_sub(1)?;
    match kind {
        // Truth values are in the type.
        1 | 2 => Some(()),
        3 => fields.take(1).map(drop),
        4..=6 => varint(fields).map(drop),
        7 => fields.take(8).map(drop),
        BINARY => {
            let len = varint(fields)?;
            fields.take(len).map(drop)
        }
        LIST | 10 => {
            let (count, kind) = list_head(fields)?;
            // In a list a truth value takes a byte.
            let kind = if kind <= 2 { 3 } else { kind };
            (0..count).try_for_each(|_| skip(fields, kind, deeper))
        }
        11 => {
            let count = varint(fields)?;
            if count == 0 {
                return Some(());
            }
            let kinds = fields.little(1)? as u8;
            let byte_for_truth = |kind: u8| if kind <= 2 { 3 } else { kind };
            (0..count).try_for_each(|_| {
                skip(fields, byte_for_truth(kinds >> 4), deeper)?;
                skip(fields, byte_for_truth(kinds & 0x0f), deeper)
            })
        }
        STRUCT => structure(fields, |_, kind, fields| skip(fields, kind, deeper)),
        _ => None,
    }
}
