//! Encodes records as the bytes of a trace.

use rustc_hash::FxHashMap;

use super::context::{Context, Stream, StreamKey};
use super::varint::{put, put_bytes, put_signed};
use super::*;

/// Why something cannot be encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EncodeError {
    /// More than [`FILES_MAX`] files.
    #[error("a trace holds at most {FILES_MAX} files; begin another trace")]
    Files,
    /// More than [`ORIGINS_MAX`] origins.
    #[error("a trace holds at most {ORIGINS_MAX} threads; begin another trace")]
    Origins,
    /// More names than readers keep.
    #[error("the names of a trace's files and threads take at most {} MiB; begin another trace", DEFINITIONS_BYTES_MAX >> 20)]
    Definitions,
    /// Longer than [`PATH_BYTES_MAX`] or [`TEXT_BYTES_MAX`].
    #[error("a name of {0} bytes is too long for a trace")]
    Name(usize),
    /// The file was not defined.
    #[error("file {} was not defined in this trace", .0.0)]
    File(FileId),
    /// The origin was not defined.
    #[error("origin {} was not defined in this trace", .0.0)]
    Origin(OriginId),
    /// After [`Encoder::finish`].
    #[error("the trace is closed")]
    Closed,
}

/// Encodes one trace. Holds one block of records and the sealed bytes not yet taken.
pub struct Encoder {
    /// Whole blocks.
    sealed: Vec<u8>,
    /// The payload of the current block.
    payload: Vec<u8>,
    context: Context,
    /// The streams of the context by key.
    index: FxHashMap<StreamKey, usize>,
    files: u32,
    origins: u32,
    definitions: DefinitionsSize,
    records: u64,
    closed: bool,
}

impl Encoder {
    /// Starts a trace and seals its header block. Texts beyond [`TEXT_BYTES_MAX`] are truncated.
    pub fn new(header: &Header) -> Encoder {
        let mut sealed = Vec::with_capacity(BLOCK_BYTES + BLOCK_BYTES / 4);
        sealed.extend_from_slice(&MAGIC);
        sealed.push(VERSION);
        let mut fields = Vec::new();
        field(&mut fields, 1, &[u8::from(header.space == Space::Lane)]);
        if let Some(unix_ns) = header.clock_unix_ns {
            number_field(&mut fields, 2, unix_ns);
        }
        for (tag, text) in [(3, &header.host), (4, &header.source), (5, &header.command)] {
            text_field(&mut fields, tag, cut(text));
        }
        seal(&mut sealed, BLOCK_HEADER, &fields);
        Encoder {
            sealed,
            payload: Vec::with_capacity(BLOCK_BYTES + 1024),
            context: Context::default(),
            index: FxHashMap::default(),
            files: 0,
            origins: 0,
            definitions: DefinitionsSize::default(),
            records: 0,
            closed: false,
        }
    }

    /// Defines a file; the first is number 0.
    pub fn define_file(&mut self, file: &FileInfo) -> Result<FileId, EncodeError> {
        self.open()?;
        if self.files == FILES_MAX {
            return Err(EncodeError::Files);
        }
        if file.path.len() > PATH_BYTES_MAX {
            return Err(EncodeError::Name(file.path.len()));
        }
        let mut fields = Vec::with_capacity(file.path.len() + 24);
        field(&mut fields, 1, &file.path);
        number_field_unless_zero(&mut fields, 2, file.key);
        if let Some(size) = file.size_bytes {
            number_field(&mut fields, 3, size);
        }
        self.define(tag::FILE, &fields)?;
        self.files += 1;
        Ok(FileId(self.files - 1))
    }

    /// Defines an origin; the first is number 0.
    pub fn define_origin(&mut self, origin: &Origin) -> Result<OriginId, EncodeError> {
        self.open()?;
        if self.origins == ORIGINS_MAX {
            return Err(EncodeError::Origins);
        }
        let texts = [(4, &origin.host), (5, &origin.job), (6, &origin.label)];
        if let Some((_, long)) = texts.iter().find(|(_, text)| text.len() > TEXT_BYTES_MAX) {
            return Err(EncodeError::Name(long.len()));
        }
        let mut fields = Vec::new();
        number_field_unless_zero(&mut fields, 1, origin.process.into());
        number_field_unless_zero(&mut fields, 2, origin.thread.into());
        number_field_unless_zero(&mut fields, 3, origin.user.into());
        for (tag, text) in texts {
            text_field(&mut fields, tag, text);
        }
        self.define(tag::ORIGIN, &fields)?;
        self.origins += 1;
        Ok(OriginId(self.origins - 1))
    }

    fn define(&mut self, tag: u8, fields: &[u8]) -> Result<(), EncodeError> {
        if !self.definitions.add(fields.len()) {
            return Err(EncodeError::Definitions);
        }
        self.payload.push(tag);
        put_bytes(&mut self.payload, fields);
        self.seal_when_full();
        Ok(())
    }

    /// Appends a request, in any order; the closer to order of arrival, the fewer bytes.
    pub fn push(&mut self, record: &Record) -> Result<(), EncodeError> {
        self.open()?;
        if record.file.0 >= self.files {
            return Err(EncodeError::File(record.file));
        }
        if record.origin.0 >= self.origins {
            return Err(EncodeError::Origin(record.origin));
        }
        let key = StreamKey { file: record.file, origin: record.origin, lane: record.lane };
        let context = &mut self.context;
        let known = match context.streams.get(context.current) {
            Some(current) if current.key == key => Some(context.current),
            _ => self.index.get(&key).copied(),
        };
        let at = known.unwrap_or(context.streams.len());
        if known.is_none() {
            self.index.insert(key, at);
            context.streams.push(Stream::new(key));
        }
        let stream = &mut context.streams[at];
        let gap = record.offset.wrapping_sub(stream.next()) as i64;
        let mut first = match gap {
            0 => tag::OFFSET_CONTIGUOUS,
            _ if record.offset == stream.strided() => tag::OFFSET_STRIDE,
            _ if gap % 512 == 0 => tag::OFFSET_SECTORS,
            _ => tag::OFFSET_BYTES,
        };
        let mut set = |bit, when: bool| first |= if when { bit } else { 0 };
        // A new stream must be written even if its index equals the current one, as in an empty block.
        set(tag::STREAM, known.is_none() || at != context.current);
        set(tag::OP, record.op != stream.op);
        set(tag::LEN, record.len != stream.len);
        set(tag::OUTCOME, record.outcome != Outcome::Whole);
        set(tag::OPEN, record.duration.is_none());
        let out = &mut self.payload;
        out.push(first);
        if first & tag::STREAM != 0 {
            put(out, at as u64);
            if known.is_none() {
                put(out, record.file.0.into());
                put(out, record.origin.0.into());
                put(out, record.lane.0.into());
            }
        }
        if first & tag::OP != 0 {
            out.push(record.op as u8);
        }
        match first & tag::OFFSET {
            tag::OFFSET_SECTORS => put_signed(out, gap / 512),
            tag::OFFSET_BYTES => put_signed(out, gap),
            _ => {}
        }
        if first & tag::LEN != 0 {
            put(out, record.len);
        }
        put_signed(out, record.arrival.0.wrapping_sub(context.arrival) as i64);
        if let Some(duration) = record.duration {
            put(out, duration.0);
        }
        match record.outcome {
            Outcome::Whole => {}
            Outcome::Short(bytes) => {
                out.push(1);
                put(out, bytes);
            }
            Outcome::Failed(errno) => {
                out.push(2);
                put(out, errno.into());
            }
        }
        stream.moved(record);
        (context.current, context.arrival) = (at, record.arrival.0);
        self.records += 1;
        self.seal_when_full();
        Ok(())
    }

    fn open(&self) -> Result<(), EncodeError> {
        if self.closed { Err(EncodeError::Closed) } else { Ok(()) }
    }

    fn seal_when_full(&mut self) {
        if self.payload.len() >= BLOCK_BYTES {
            self.seal();
        }
    }

    /// Ends the current block: everything pushed so far becomes [`sealed`](Encoder::sealed).
    pub fn seal(&mut self) {
        if !self.payload.is_empty() {
            seal(&mut self.sealed, BLOCK_RECORDS, &self.payload);
            self.payload.clear();
            self.context.clear();
            self.index.clear();
        }
    }

    /// Seals and closes the trace, so that readers know it is complete.
    pub fn finish(&mut self) {
        if !self.closed {
            self.seal();
            let mut payload = Vec::new();
            put(&mut payload, self.records);
            seal(&mut self.sealed, BLOCK_END, &payload);
            self.closed = true;
        }
    }

    /// Whole blocks that are ready to be written.
    pub fn sealed(&self) -> &[u8] {
        &self.sealed
    }

    /// Drops the sealed blocks after they were written.
    pub fn written(&mut self) {
        self.sealed.clear();
    }

    /// Records pushed so far.
    pub fn records(&self) -> u64 {
        self.records
    }
}

/// Appends one block. Its payload is at most a full block plus one definition.
fn seal(out: &mut Vec<u8>, kind: u8, payload: &[u8]) {
    debug_assert!(payload.len() <= BLOCK_BYTES_MAX);
    let at = out.len();
    out.push(kind);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes()[..3]);
    out.extend_from_slice(&checksum(&out[at..at + 4], payload).to_le_bytes());
    out.extend_from_slice(payload);
}

/// The checksum of a block's kind, length and payload.
pub(super) fn checksum(frame: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(frame);
    crc.update(payload);
    crc.finalize()
}

fn field(out: &mut Vec<u8>, tag: u64, value: &[u8]) {
    put(out, tag);
    put_bytes(out, value);
}

fn number_field(out: &mut Vec<u8>, tag: u64, value: u64) {
    let mut bytes = Vec::with_capacity(10);
    put(&mut bytes, value);
    field(out, tag, &bytes);
}

fn number_field_unless_zero(out: &mut Vec<u8>, tag: u64, value: u64) {
    if value != 0 {
        number_field(out, tag, value);
    }
}

fn text_field(out: &mut Vec<u8>, tag: u64, text: &str) {
    if !text.is_empty() {
        field(out, tag, text.as_bytes());
    }
}

/// The text up to [`TEXT_BYTES_MAX`], cut at a character boundary.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
