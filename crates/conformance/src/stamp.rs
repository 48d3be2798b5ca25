//! Stamps: contents that say who wrote them. Every 32 bytes name the run, the file, the writer, the write's sequence
//! number and their own place, so each wrong byte tells where it came from.

use std::fmt;

/// Bytes of a cell, the unit that carries one stamp.
pub(crate) const CELL_BYTES: usize = 32;

/// One write: its writer and the sequence number that the writer gave it, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct Mark {
    pub writer: u32,
    pub sequence: u64,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "writer {}'s write {}", self.writer, self.sequence)
    }
}

/// A file of a run, as stamps name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stamps {
    /// Drawn for each run, never 0, so that no stamp is all zeros and none of an earlier run is taken for one of this.
    pub run: u64,
    pub file: u32,
}

impl Stamps {
    /// The cell at `offset` (a multiple of 32) of a write; zeros for bytes that nobody wrote.
    pub fn cell(self, mark: Option<Mark>, offset: u64) -> [u8; CELL_BYTES] {
        let mut cell = [0; CELL_BYTES];
        if let Some(mark) = mark {
            cell[..8].copy_from_slice(&self.run.to_le_bytes());
            cell[8..12].copy_from_slice(&self.file.to_le_bytes());
            cell[12..16].copy_from_slice(&mark.writer.to_le_bytes());
            cell[16..24].copy_from_slice(&mark.sequence.to_le_bytes());
            cell[24..].copy_from_slice(&offset.to_le_bytes());
        }
        cell
    }

    /// The bytes of a write of `len` bytes at `offset`, both multiples of 32.
    pub fn bytes(self, mark: Mark, offset: u64, len: usize) -> Vec<u8> {
        let cells = (0..len as u64 / CELL_BYTES as u64).map(|n| self.cell(Some(mark), offset + n * CELL_BYTES as u64));
        cells.flatten().collect()
    }

    /// The write that a cell at `offset` of this file is of: `Ok(None)` for zeros; `Err` describes anything else.
    pub fn read(self, cell: &[u8], offset: u64) -> Result<Option<Mark>, String> {
        if cell.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let mark = Mark { writer: word32(cell, 12), sequence: word64(cell, 16) };
        if cell == self.cell(Some(mark), offset) {
            return Ok(Some(mark));
        }
        Err(self.describe(cell, offset))
    }

    /// Says what a cell at `offset` contains.
    pub fn describe(self, cell: &[u8], offset: u64) -> String {
        if cell.iter().all(|&byte| byte == 0) {
            return "zeros".into();
        }
        if cell.len() < CELL_BYTES || word64(cell, 0) != self.run {
            let hex: String = cell.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
            return format!("bytes that no write of this run contains ({hex}…)");
        }
        let (file, place) = (word32(cell, 8), word64(cell, 24));
        let mark = Mark { writer: word32(cell, 12), sequence: word64(cell, 16) };
        let mut text = mark.to_string();
        if file != self.file {
            text += &format!(" to file {file}");
        }
        if place != offset {
            text += &format!(", its bytes for offset {place}");
        }
        if cell != (Stamps { file, ..self }).cell(Some(mark), place) {
            text += ", mixed with other bytes";
        }
        text
    }
}

fn word32(cell: &[u8], at: usize) -> u32 {
    cell.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn word64(cell: &[u8], at: usize) -> u64 {
    cell.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// What a file must contain when no write is in flight: the write of each cell.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub stamps: Stamps,
    cells: Vec<Option<Mark>>,
}

impl Image {
    /// An empty file.
    pub fn new(stamps: Stamps) -> Image {
        Image { stamps, cells: Vec::new() }
    }

    /// Its length, bytes.
    pub fn len(&self) -> u64 {
        (self.cells.len() * CELL_BYTES) as u64
    }

    /// Cuts or extends it with zeros.
    pub fn resize(&mut self, len: u64) {
        self.cells.resize(len as usize / CELL_BYTES, None);
    }

    /// Records a write (or zeros), extending the file as needed.
    pub fn set(&mut self, offset: u64, len: usize, mark: Option<Mark>) {
        let (first, last) = (offset as usize / CELL_BYTES, (offset as usize + len) / CELL_BYTES);
        self.cells.resize(self.cells.len().max(last), None);
        self.cells[first..last].fill(mark);
    }

    /// Whether `bytes`, read at `offset`, are what the file contains: as many as there are, and these.
    pub fn check(&self, offset: u64, asked: usize, bytes: &[u8]) -> Result<(), String> {
        let there = self.len().saturating_sub(offset).min(asked as u64);
        if bytes.len() as u64 != there {
            return Err(format!("offset {offset}: expected {there} bytes, found {}", bytes.len()));
        }
        for (n, cell) in bytes.chunks(CELL_BYTES).enumerate() {
            let place = offset + (n * CELL_BYTES) as u64;
            let mark = self.cells[place as usize / CELL_BYTES];
            if cell != self.stamps.cell(mark, place) {
                let found = self.stamps.describe(cell, place);
                return Err(format!("offset {place}: expected {}, found {found}", name(mark)));
            }
        }
        Ok(())
    }
}

/// A cell's write, for people.
pub(crate) fn name(mark: Option<Mark>) -> String {
    mark.map_or_else(|| "zeros".into(), |mark| mark.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Stamps = Stamps { run: 77, file: 3 };

    #[test]
    fn a_cell_names_its_write_and_place() {
        let mark = Mark { writer: 2, sequence: 9 };
        let bytes = FILE.bytes(mark, 64, 96);
        for (n, cell) in bytes.chunks(CELL_BYTES).enumerate() {
            assert_eq!(FILE.read(cell, 64 + 32 * n as u64), Ok(Some(mark)));
        }
        assert_eq!(FILE.read(&[0; 32], 5 * 32), Ok(None));
        let said = |stamps: Stamps, cell: &[u8], offset| stamps.read(cell, offset).unwrap_err();
        assert_eq!(said(FILE, &bytes[..32], 0), "writer 2's write 9, its bytes for offset 64");
        assert_eq!(said(Stamps { file: 4, ..FILE }, &bytes[..32], 64), "writer 2's write 9 to file 3");
        assert!(said(Stamps { run: 78, file: 3 }, &bytes[..32], 64).starts_with("bytes that no write of this run"));
        assert!(said(FILE, b"short", 0).starts_with("bytes that no write"));
    }

    #[test]
    fn an_image_finds_the_wrong_cell() {
        let (old, new) = (Mark { writer: 1, sequence: 1 }, Mark { writer: 2, sequence: 1 });
        let mut image = Image::new(FILE);
        image.set(0, 128, Some(old));
        image.set(64, 32, Some(new));
        let mut bytes = FILE.bytes(old, 0, 128);
        assert_eq!(
            image.check(0, 128, &bytes).unwrap_err(),
            "offset 64: expected writer 2's write 1, found writer 1's write 1"
        );
        bytes[64..96].copy_from_slice(&FILE.cell(Some(new), 64));
        assert_eq!(image.check(0, 4096, &bytes), Ok(()));
        assert!(image.check(0, 128, &bytes[..96]).unwrap_err().contains("expected 128 bytes, found 96"));
        image.resize(32);
        assert_eq!(image.check(32, 64, &[]), Ok(()));
    }
}
