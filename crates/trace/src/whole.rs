//! A whole trace in memory, in order of arrival, for converting, planning and replaying.

use std::path::Path;

use crate::codec::{
    Ending, FILES_MAX, FileInfo, Header, ORIGINS_MAX, Origin, OriginId, PATH_BYTES_MAX, Record, TEXT_BYTES_MAX,
};
use impresario_sched::FileId;
use rustc_hash::FxHashMap;

use crate::{Reader, TraceError, Writer};

/// Maximum requests of a trace in memory: 72 bytes each, 2.3 GB.
pub const RECORDS_MAX: usize = 1 << 25;

/// A trace in memory.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    /// The header.
    pub header: Header,
    /// By their numbers.
    pub files: Vec<FileInfo>,
    /// By their numbers.
    pub origins: Vec<Origin>,
    /// In order of arrival.
    pub records: Vec<Record>,
    /// How its file ends; [`Ending::Closed`] if it never was a file.
    pub ending: Ending,
}

impl Trace {
    /// Reads a trace of at most [`RECORDS_MAX`] requests.
    pub fn load(path: impl AsRef<Path>) -> Result<Trace, TraceError> {
        Trace::read(Reader::open(path)?)
    }

    /// Reads everything from a reader.
    pub fn read<R: std::io::Read>(mut reader: Reader<R>) -> Result<Trace, TraceError> {
        let mut records = Vec::new();
        while let Some(record) = reader.next_record()? {
            if records.len() == RECORDS_MAX {
                let reason = format!("it has more than {RECORDS_MAX} requests: more than fit in memory");
                return Err(TraceError::file(reader.path(), reason));
            }
            records.push(record);
        }
        Ok(Trace::of(reader, records))
    }

    /// From records that a reader returned.
    pub(crate) fn of<R: std::io::Read>(reader: Reader<R>, mut records: Vec<Record>) -> Trace {
        records.sort_by_key(|r| r.arrival);
        Trace {
            header: reader.header().clone(),
            files: reader.files().to_vec(),
            origins: reader.origins().to_vec(),
            records,
            ending: reader.ending().unwrap_or(Ending::Unclosed),
        }
    }

    /// Writes it to a new file.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        let path = path.as_ref();
        let file = std::fs::File::create_new(path).map_err(|e| TraceError::io(path, e))?;
        self.write(file, path).map(|_| ())
    }

    /// Writes it to any writer, which errors call `name`.
    pub fn write<W: std::io::Write>(&self, out: W, name: &Path) -> Result<W, TraceError> {
        let mut writer = Writer::new(out, name, &self.header)?;
        let mut numbers = Vec::with_capacity(self.files.len());
        for file in &self.files {
            numbers.push(writer.file(file)?);
        }
        let mut origins = Vec::with_capacity(self.origins.len());
        for origin in &self.origins {
            origins.push(writer.origin(origin)?);
        }
        for record in &self.records {
            let file = numbers.get(record.file.0 as usize).copied().unwrap_or(record.file);
            let origin = origins.get(record.origin.0 as usize).copied().unwrap_or(record.origin);
            writer.push(&Record { file, origin, ..*record })?;
        }
        writer.finish()
    }

    /// The file of a record.
    pub fn file(&self, id: FileId) -> &FileInfo {
        static NONE: FileInfo = FileInfo { path: Vec::new(), key: 0, size_bytes: None };
        self.files.get(id.0 as usize).unwrap_or(&NONE)
    }

    /// The origin of a record.
    pub fn origin(&self, id: OriginId) -> &Origin {
        static NONE: Origin =
            Origin { host: String::new(), process: 0, thread: 0, user: 0, job: String::new(), label: String::new() };
        self.origins.get(id.0 as usize).unwrap_or(&NONE)
    }
}

/// Builds a trace in memory: numbers files and origins, and sorts.
#[derive(Default)]
pub struct Builder {
    /// The header of the trace.
    pub header: Header,
    files: Vec<FileInfo>,
    origins: Vec<Origin>,
    records: Vec<Record>,
    by_path: FxHashMap<(Vec<u8>, u64), FileId>,
    by_origin: FxHashMap<Origin, OriginId>,
}

impl Builder {
    /// An empty builder.
    pub fn new(header: Header) -> Builder {
        Builder { header, ..Builder::default() }
    }

    /// The number of a file, by its path and key. Fails beyond what a trace can hold.
    pub fn file(&mut self, file: FileInfo) -> Result<FileId, String> {
        let key = (file.path.clone(), file.key);
        if let Some(id) = self.by_path.get(&key) {
            if let (None, size @ Some(_)) = (self.files[id.0 as usize].size_bytes, file.size_bytes) {
                self.files[id.0 as usize].size_bytes = size;
            }
            return Ok(*id);
        }
        if file.path.len() > PATH_BYTES_MAX {
            return Err(format!("a path of {} bytes is longer than any system takes", file.path.len()));
        }
        if self.files.len() >= FILES_MAX as usize {
            return Err(format!("there are more than {FILES_MAX} files, the most that a trace holds"));
        }
        let id = FileId(self.files.len() as u32);
        self.files.push(file);
        self.by_path.insert(key, id);
        Ok(id)
    }

    /// The number of a file known only by path.
    pub fn path(&mut self, path: &[u8]) -> Result<FileId, String> {
        self.file(FileInfo { path: path.to_vec(), ..FileInfo::default() })
    }

    /// The number of an origin. Fails beyond what a trace can hold.
    pub fn origin(&mut self, origin: Origin) -> Result<OriginId, String> {
        if let Some(id) = self.by_origin.get(&origin) {
            return Ok(*id);
        }
        if [&origin.host, &origin.job, &origin.label].iter().any(|text| text.len() > TEXT_BYTES_MAX) {
            return Err(format!("a host, job or label has more than {TEXT_BYTES_MAX} bytes"));
        }
        if self.origins.len() >= ORIGINS_MAX as usize {
            return Err(format!("there are more than {ORIGINS_MAX} threads, the most that a trace holds"));
        }
        let id = OriginId(self.origins.len() as u32);
        self.origins.push(origin.clone());
        self.by_origin.insert(origin, id);
        Ok(id)
    }

    /// Adds a request of a file and origin of this builder.
    pub fn push(&mut self, record: Record) -> Result<(), String> {
        if self.records.len() >= RECORDS_MAX {
            return Err(format!("there are more than {RECORDS_MAX} requests: more than fit in memory"));
        }
        self.records.push(record);
        Ok(())
    }

    /// Requests added so far.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if there are no requests.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The trace.
    pub fn build(mut self) -> Trace {
        self.records.sort_by_key(|r| r.arrival);
        Trace {
            header: self.header,
            files: self.files,
            origins: self.origins,
            records: self.records,
            ending: Ending::Closed,
        }
    }
}
