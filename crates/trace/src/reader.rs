//! Reads a trace of any length, holding one block in memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::codec::{Decoder, Ending, FileInfo, Header, Origin, Record, Step};

use crate::TraceError;

/// Bytes read at once.
const CHUNK_BYTES: usize = 256 * 1024;

/// Returns the records of a trace one after the other, as written.
///
/// A trace whose writer was killed is read up to its last whole block; [`ending`](Reader::ending) says so. Damage
/// before that is an error, after the preceding records.
pub struct Reader<R = File> {
    path: PathBuf,
    input: R,
    decoder: Decoder,
    /// Bytes read and not yet decoded.
    buffer: Vec<u8>,
    /// Position in `buffer`.
    at: usize,
    /// Bytes of the file before `buffer[at]`.
    position: u64,
    /// The last block's records, and how many were returned.
    records: Vec<Record>,
    given: usize,
    ending: Option<Ending>,
    failed: bool,
}

impl Reader<File> {
    /// Opens a trace and checks its beginning.
    pub fn open(path: impl AsRef<Path>) -> Result<Reader, TraceError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| TraceError::io(path, e))?;
        Reader::new(file, path)
    }
}

impl<R: Read> Reader<R> {
    /// Reads from any source, which errors call `name`.
    pub fn new(input: R, name: impl Into<PathBuf>) -> Result<Reader<R>, TraceError> {
        let mut reader = Reader {
            path: name.into(),
            input,
            decoder: Decoder::new(),
            buffer: Vec::new(),
            at: 0,
            position: 0,
            records: Vec::new(),
            given: 0,
            ending: None,
            failed: false,
        };
        while reader.decoder.header().is_none() && reader.ending.is_none() {
            reader.step()?;
        }
        if reader.decoder.header().is_none() {
            let reason = "it is not a whole trace: it ends before its first block does";
            return Err(TraceError::file(&reader.path, reason));
        }
        Ok(reader)
    }

    /// The header.
    pub fn header(&self) -> &Header {
        static NONE: Header = Header {
            clock_unix_ns: None,
            host: String::new(),
            source: String::new(),
            command: String::new(),
            space: crate::codec::Space::File,
        };
        // Always present: `new` fails without it.
        self.decoder.header().unwrap_or(&NONE)
    }

    /// The files defined so far, by number; includes those of every record returned.
    pub fn files(&self) -> &[FileInfo] {
        self.decoder.files()
    }

    /// The origins defined so far, by number.
    pub fn origins(&self) -> &[Origin] {
        self.decoder.origins()
    }

    /// How the trace ends, once every record was returned.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next record, or `None` at the end.
    pub fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while self.given == self.records.len() {
            if self.ending.is_some() || self.failed {
                return Ok(None);
            }
            self.records.clear();
            self.given = 0;
            self.step()?;
        }
        self.given += 1;
        Ok(Some(self.records[self.given - 1]))
    }

    /// Decodes one block, or finds the end.
    fn step(&mut self) -> Result<(), TraceError> {
        loop {
            let rest = &self.buffer[self.at..];
            let error = match self.decoder.step(rest, &mut self.records) {
                Ok(Step::Used(n) | Step::Closed(n)) => {
                    self.at += n;
                    self.position += n as u64;
                    return Ok(());
                }
                Ok(Step::Need(n)) => {
                    if self.fill(n)? {
                        continue;
                    }
                    None
                }
                Err(error) => {
                    // Whether this is a torn tail depends on what follows: a byte after the block, or only zeros.
                    self.fill(CHUNK_BYTES * 2)?;
                    Some(error)
                }
            };
            self.ending = self.decoder.ending(&self.buffer[self.at..], error.as_ref());
            return match (self.ending, error) {
                (None, Some(source)) => {
                    self.failed = true;
                    Err(TraceError::Damaged { path: self.path.clone(), at_byte: self.position, source })
                }
                _ => Ok(()),
            };
        }
    }

    /// Reads until `want` bytes are buffered; false if the file ends first.
    fn fill(&mut self, want: usize) -> Result<bool, TraceError> {
        self.buffer.drain(..self.at);
        self.at = 0;
        let more = want.saturating_sub(self.buffer.len()).max(CHUNK_BYTES) as u64;
        if self.buffer.len() < want
            && let Err(e) = self.input.by_ref().take(more).read_to_end(&mut self.buffer)
        {
            self.failed = true;
            return Err(TraceError::io(&self.path, e));
        }
        Ok(self.buffer.len() >= want)
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}
