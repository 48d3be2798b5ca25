//! NetCDF classic (`CDF-1`, `-2` and `-5`): a header with the place of each variable. Variables with the unlimited dimension
//! stand one record after the other, all of them in each record; the others in one piece. (NetCDF-4 files are HDF5.)

use super::{Fields, Format, Source, Track};

/// The reader.
pub struct NetCdf;

/// What of the file the header is looked for in, one after the other.
const HEADER_BYTES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];
const ITEMS_MAX: u64 = 1 << 16;
/// Slices of a variable that are shorter share pages, and come with the kernel's read-ahead.
const SLICE_BYTES_MIN: u64 = 4096;

impl Format for NetCdf {
    fn name(&self) -> &'static str {
        "NetCDF classic"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["nc", "cdf", "nc3", "ncf"]
    }

    /// A track for each variable: its records, or its slices along the first dimension.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        file.beginning();
        let first = file.bytes(0, 4)?;
        let version = match first.as_slice() {
            [b'C', b'D', b'F', v @ (1 | 2 | 5)] => *v,
            _ => return None,
        };
        // Most headers are short; a longer one is read once more as a whole.
        let found = HEADER_BYTES.into_iter().find_map(|most| header(&file.up_to(0, most)?, version));
        Some(found?.tracks(file))
    }
}

struct Variable {
    begin: u64,
    /// All that it has, or what it has in a record. The length that the file says is none where it takes more than 4 GiB.
    bytes: u64,
    item_bytes: u64,
    /// Along the first dimension; `None` where that is the unlimited one.
    slices: Option<u64>,
}

struct Header {
    records: u64,
    variables: Vec<Variable>,
}

/// How wide numbers are.
struct Widths {
    count: u64,
    offset: u64,
}

fn header(bytes: &[u8], version: u8) -> Option<Header> {
    let widths = Widths { count: if version == 5 { 8 } else { 4 }, offset: if version == 1 { 4 } else { 8 } };
    let mut fields = Fields::new(bytes.get(4..)?);
    let records = fields.big(widths.count)?;
    let mut dimensions = Vec::new();
    for _ in 0..list(&mut fields, &widths, 10)? {
        name(&mut fields, &widths)?;
        dimensions.push(fields.big(widths.count)?);
    }
    attributes(&mut fields, &widths)?;
    let mut variables = Vec::new();
    for _ in 0..list(&mut fields, &widths, 11)? {
        name(&mut fields, &widths)?;
        let sides = fields.big(widths.count).filter(|n| *n <= ITEMS_MAX)?;
        let (mut slices, mut items) = (Some(1), 1u64);
        for side in 0..sides {
            let length = *dimensions.get(usize::try_from(fields.big(widths.count)?).ok()?)?;
            if side == 0 {
                slices = (length > 0).then_some(length);
            }
            if side > 0 || length > 0 {
                items = items.checked_mul(length)?;
            }
        }
        attributes(&mut fields, &widths)?;
        let item_bytes = item_bytes(fields.big(4)?)?;
        let (_said, begin) = (fields.big(widths.count)?, fields.big(widths.offset)?);
        variables.push(Variable { begin, bytes: items.checked_mul(item_bytes)?, item_bytes, slices });
    }
    Some(Header { records, variables })
}

impl Header {
    fn tracks(&self, file: &mut Source<'_>) -> Vec<Track> {
        let in_records: Vec<&Variable> = self.variables.iter().filter(|v| v.slices.is_none()).collect();
        let record_bytes = match in_records[..] {
            // Short items of the only variable in the records stand without a gap.
            [only] if only.item_bytes < 4 => only.bytes,
            _ => in_records.iter().map(|v| v.bytes.saturating_add(3) & !3).fold(0, u64::saturating_add),
        };
        self.variables.iter().map(|variable| variable.track(record_bytes, self.records, file)).collect()
    }
}

impl Variable {
    fn track(&self, record_bytes: u64, records: u64, file: &mut Source<'_>) -> Track {
        let Some(slices) = self.slices else {
            // While it is written, a file says "streaming" for the number of records; the series ends with the file.
            return file.series(self.begin, record_bytes, self.bytes, records);
        };
        match self.bytes / slices {
            len if len < SLICE_BYTES_MIN => Track::new(),
            len => file.series(self.begin, len, len, slices),
        }
    }
}

/// The number of items in a list with this tag, which stands before a list that is not empty.
fn list(fields: &mut Fields<'_>, widths: &Widths, tag: u64) -> Option<u64> {
    let (found, count) = (fields.big(4)?, fields.big(widths.count)?);
    ((found == tag || found == 0 && count == 0) && count <= ITEMS_MAX).then_some(count)
}

fn name(fields: &mut Fields<'_>, widths: &Widths) -> Option<()> {
    let len = fields.big(widths.count)?;
    fields.take(len.checked_next_multiple_of(4)?).map(drop)
}

fn attributes(fields: &mut Fields<'_>, widths: &Widths) -> Option<()> {
    for _ in 0..list(fields, widths, 12)? {
        name(fields, widths)?;
        let item_bytes = item_bytes(fields.big(4)?)?;
        let bytes = fields.big(widths.count)?.checked_mul(item_bytes)?;
        fields.take(bytes.checked_next_multiple_of(4)?)?;
    }
    Some(())
}

/// The length of an item of a type.
fn item_bytes(of: u64) -> Option<u64> {
    match of {
        1 | 2 | 7 => Some(1),
        3 | 8 => Some(2),
        4 | 5 | 9 => Some(4),
        6 | 10 | 11 => Some(8),
        _ => None,
    }
}
