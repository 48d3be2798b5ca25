//! Writes a trace incrementally.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::codec::{EncodeError, Encoder, FileInfo, Header, Origin, OriginId, Record};
use impresario_sched::FileId;
use rustc_hash::FxHashMap;

use crate::TraceError;

/// Writes one trace. Every block is written in one piece, so a killed writer loses at most the records since the last
/// block (64 KiB, some 7000 requests) or [`flush`](Writer::flush).
pub struct Writer<W: Write = File> {
    path: PathBuf,
    out: W,
    encoder: Encoder,
    files: FxHashMap<(Vec<u8>, u64), FileId>,
    origins: FxHashMap<Origin, OriginId>,
    written_bytes: u64,
    limit_bytes: u64,
}

impl Writer<File> {
    /// Creates a new file; fails if it exists.
    pub fn create(path: impl AsRef<Path>, header: &Header) -> Result<Writer, TraceError> {
        let path = path.as_ref();
        let file = File::create_new(path).map_err(|e| TraceError::io(path, e))?;
        Writer::new(file, path, header)
    }
}

impl<W: Write> Writer<W> {
    /// Writes to any writer, which errors call `name`.
    pub fn new(out: W, name: impl Into<PathBuf>, header: &Header) -> Result<Writer<W>, TraceError> {
        let mut writer = Writer {
            path: name.into(),
            out,
            encoder: Encoder::new(header),
            files: FxHashMap::default(),
            origins: FxHashMap::default(),
            written_bytes: 0,
            limit_bytes: u64::MAX,
        };
        writer.write_sealed()?;
        Ok(writer)
    }

    /// The same, but the file ends at about `limit_bytes` (at most one block more): later pushes fail.
    pub fn limited(mut self, limit_bytes: u64) -> Writer<W> {
        self.limit_bytes = limit_bytes;
        self
    }

    /// The number of a file, by its path and key; defines it on first use.
    pub fn file(&mut self, file: &FileInfo) -> Result<FileId, TraceError> {
        let key = (file.path.clone(), file.key);
        if let Some(id) = self.files.get(&key) {
            return Ok(*id);
        }
        let id = self.encoder.define_file(file).map_err(|e| self.refused(e))?;
        self.files.insert(key, id);
        self.write_sealed()?;
        Ok(id)
    }

    /// The number of an origin; defines it on first use.
    pub fn origin(&mut self, origin: &Origin) -> Result<OriginId, TraceError> {
        if let Some(id) = self.origins.get(origin) {
            return Ok(*id);
        }
        let id = self.encoder.define_origin(origin).map_err(|e| self.refused(e))?;
        self.origins.insert(origin.clone(), id);
        self.write_sealed()?;
        Ok(id)
    }

    /// Appends a request.
    pub fn push(&mut self, record: &Record) -> Result<(), TraceError> {
        if self.written_bytes >= self.limit_bytes {
            return Err(TraceError::Full { path: self.path.clone(), limit_bytes: self.limit_bytes });
        }
        self.encoder.push(record).map_err(|e| self.refused(e))?;
        self.write_sealed()
    }

    /// Writes what was pushed so far to the file; useful now and then if requests are rare.
    pub fn flush(&mut self) -> Result<(), TraceError> {
        self.encoder.seal();
        self.write_sealed()?;
        self.out.flush().map_err(|e| TraceError::io(&self.path, e))
    }

    /// Closes the trace. A trace without this can be read too, but readers report it as unclosed.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.encoder.finish();
        self.write_sealed()?;
        self.out.flush().map_err(|e| TraceError::io(&self.path, e))?;
        Ok(self.out)
    }

    /// The file, or what errors call it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records pushed so far.
    pub fn records(&self) -> u64 {
        self.encoder.records()
    }

    /// Bytes written so far.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    fn refused(&self, source: EncodeError) -> TraceError {
        TraceError::Encode { path: self.path.clone(), source }
    }

    fn write_sealed(&mut self) -> Result<(), TraceError> {
        let sealed = self.encoder.sealed();
        if !sealed.is_empty() {
            self.out.write_all(sealed).map_err(|e| TraceError::io(&self.path, e))?;
            self.written_bytes += sealed.len() as u64;
            self.encoder.written();
        }
        Ok(())
    }
}
