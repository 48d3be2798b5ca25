//! Decodes the bytes of a trace. They are untrusted: nothing is used before it is checked, and constants bound the
//! memory.

use super::context::{Context, Stream, StreamKey};
use super::encode::checksum;
use super::varint::Bytes;
use super::*;

/// Why bytes are not a trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// The magic is wrong.
    #[error("it is not a trace: it does not begin with IMTRACE")]
    Magic,
    /// The version is not supported.
    #[error("it is a trace of version {0}, and this program reads version {VERSION}; a newer program reads it")]
    Version(u8),
    /// The block has an unknown kind.
    #[error("there is a block of unknown kind {0}; the file is damaged, or from a newer program")]
    Kind(u8),
    /// A block is in the wrong place: a second header, or anything after the end.
    #[error("there is a block of kind {0} where none may be; the file is damaged")]
    Order(u8),
    /// The block is longer than the format allows.
    #[error("there is a block of {0} bytes, and none has more than {BLOCK_BYTES_MAX}; the file is damaged")]
    Long(usize),
    /// The block's bytes changed. In the last block of a trace this is a torn tail.
    #[error("the checksum of a block of {0} bytes is wrong; the file is damaged")]
    Checksum(usize),
    /// The block's content is invalid although its checksum is right.
    #[error("a block says something impossible ({0}); its writer is at fault")]
    Content(&'static str),
}

/// The result of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// No progress: this many bytes are needed, counted from the first one given.
    Need(usize),
    /// This many bytes are consumed.
    Used(usize),
    /// This many bytes are consumed and end the trace.
    Closed(usize),
}

/// Decodes one trace, block by block.
#[derive(Default)]
pub struct Decoder {
    header: Option<Header>,
    begun: bool,
    closed: bool,
    files: Vec<FileInfo>,
    origins: Vec<Origin>,
    definitions: DefinitionsSize,
    records: u64,
    context: Context,
}

impl Decoder {
    /// A decoder at the start of a trace.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// The header, once the first block is decoded.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// The files defined so far, by number.
    pub fn files(&self) -> &[FileInfo] {
        &self.files
    }

    /// The origins defined so far, by number.
    pub fn origins(&self) -> &[Origin] {
        &self.origins
    }

    /// Records decoded so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// True after the block that closes a trace.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Decodes the magic or one block at the start of `bytes`, and appends its records, whose files and origins are all
    /// defined. On an error nothing is appended.
    pub fn step(&mut self, bytes: &[u8], records: &mut Vec<Record>) -> Result<Step, DecodeError> {
        if !self.begun {
            return self.begin(bytes);
        }
        let Some((frame, rest)) = bytes.split_at_checked(FRAME_BYTES) else { return Ok(Step::Need(FRAME_BYTES)) };
        let kind = frame[0];
        if !matches!(kind, BLOCK_HEADER | BLOCK_RECORDS | BLOCK_END) && kind & BLOCK_OPTIONAL == 0 {
            return Err(DecodeError::Kind(kind));
        }
        let len = u32::from_le_bytes([frame[1], frame[2], frame[3], 0]) as usize;
        if len > BLOCK_BYTES_MAX {
            return Err(DecodeError::Long(len));
        }
        let Some(payload) = rest.get(..len) else { return Ok(Step::Need(FRAME_BYTES + len)) };
        let told = u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]);
        if checksum(&frame[..4], payload) != told {
            return Err(DecodeError::Checksum(FRAME_BYTES + len));
        }
        if self.closed || (kind == BLOCK_HEADER) != self.header.is_none() {
            return Err(DecodeError::Order(kind));
        }
        let used = FRAME_BYTES + len;
        let mut rest = Bytes(payload);
        match kind {
            BLOCK_HEADER => self.header = Some(header(&mut rest).ok_or(DecodeError::Content("in its header"))?),
            BLOCK_RECORDS => {
                let before = records.len();
                if let Err(what) = self.block(&mut rest, records) {
                    records.truncate(before);
                    return Err(DecodeError::Content(what));
                }
                self.records += (records.len() - before) as u64;
            }
            BLOCK_END => {
                if rest.number() != Some(self.records) {
                    return Err(DecodeError::Content("at its end, on the number of records"));
                }
                self.closed = true;
                return Ok(Step::Closed(used));
            }
            _ => {}
        }
        Ok(Step::Used(used))
    }

    fn begin(&mut self, bytes: &[u8]) -> Result<Step, DecodeError> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(DecodeError::Magic);
        }
        match bytes.get(MAGIC.len()) {
            None => Ok(Step::Need(MAGIC.len() + 1)),
            Some(&VERSION) => {
                self.begun = true;
                Ok(Step::Used(MAGIC.len() + 1))
            }
            Some(&other) => Err(DecodeError::Version(other)),
        }
    }

    /// How the trace ends if only `rest` remains and [`step`](Decoder::step) returned `error` for it, or asked for
    /// more. `None` if the bytes are damaged instead.
    pub fn ending(&self, rest: &[u8], error: Option<&DecodeError>) -> Option<Ending> {
        let torn = Ending::Torn { lost_bytes: rest.len() as u64 };
        match error {
            None if rest.is_empty() && self.closed => Some(Ending::Closed),
            None if rest.is_empty() && self.header.is_some() => Some(Ending::Unclosed),
            None => Some(torn),
            Some(DecodeError::Checksum(block_bytes)) if *block_bytes >= rest.len() => Some(torn),
            // A file system may leave zeros for a write that a machine crash interrupted.
            Some(DecodeError::Kind(0)) if rest.iter().all(|b| *b == 0) => Some(torn),
            Some(_) => None,
        }
    }

    fn block(&mut self, rest: &mut Bytes, records: &mut Vec<Record>) -> Result<(), &'static str> {
        self.context.clear();
        while let Some(first) = rest.byte() {
            match first {
                tag::FILE => self.file(rest)?,
                tag::ORIGIN => self.origin(rest)?,
                _ if first & 0x80 != 0 => return Err("an unknown definition"),
                _ => records.push(self.record(first, rest)?),
            }
        }
        Ok(())
    }

    fn record(&mut self, first: u8, rest: &mut Bytes) -> Result<Record, &'static str> {
        const CUT: &str = "a record that extends beyond its block";
        let context = &mut self.context;
        if first & tag::STREAM != 0 {
            let at = rest.number().ok_or(CUT)?;
            context.current = usize::try_from(at).map_err(|_| "a stream")?;
            if context.current == context.streams.len() {
                let file = FileId(rest.number_u32().ok_or(CUT)?);
                let origin = OriginId(rest.number_u32().ok_or(CUT)?);
                let lane = rest.number().ok_or(CUT)?;
                let lane = LaneId(u16::try_from(lane).map_err(|_| "a lane")?);
                if file.0 as usize >= self.files.len() || origin.0 as usize >= self.origins.len() {
                    return Err("a file or origin that was not defined");
                }
                context.streams.push(Stream::new(StreamKey { file, origin, lane }));
            }
        }
        let stream = context.streams.get_mut(context.current).ok_or("a stream")?;
        let op = match first & tag::OP {
            0 => stream.op,
            _ => TraceOp::from_code(rest.byte().ok_or(CUT)?).ok_or("an operation")?,
        };
        let offset = match first & tag::OFFSET {
            tag::OFFSET_CONTIGUOUS => stream.next(),
            tag::OFFSET_STRIDE => stream.strided(),
            tag::OFFSET_SECTORS => stream.next().wrapping_add((rest.signed().ok_or(CUT)? as u64).wrapping_mul(512)),
            _ => stream.next().wrapping_add(rest.signed().ok_or(CUT)? as u64),
        };
        let len = if first & tag::LEN == 0 { stream.len } else { rest.number().ok_or(CUT)? };
        let arrival = context.arrival.wrapping_add(rest.signed().ok_or(CUT)? as u64);
        let duration = if first & tag::OPEN == 0 { Some(Nanos(rest.number().ok_or(CUT)?)) } else { None };
        let outcome = match first & tag::OUTCOME {
            0 => Outcome::Whole,
            _ => match rest.byte().ok_or(CUT)? {
                1 => Outcome::Short(rest.number().ok_or(CUT)?),
                2 => Outcome::Failed(rest.number_u32().ok_or(CUT)?),
                _ => return Err("an outcome"),
            },
        };
        let StreamKey { file, origin, lane } = stream.key;
        let record = Record { op, file, origin, lane, offset, len, arrival: Nanos(arrival), duration, outcome };
        stream.moved(&record);
        context.arrival = arrival;
        Ok(record)
    }

    fn file(&mut self, rest: &mut Bytes) -> Result<(), &'static str> {
        const WRONG: &str = "the definition of a file";
        let fields = rest.bytes().ok_or(WRONG)?;
        self.defined(fields, self.files.len(), FILES_MAX)?;
        let mut file = FileInfo::default();
        each_field(fields, |tag, value| {
            match tag {
                1 if value.len() <= PATH_BYTES_MAX => file.path = value.to_vec(),
                1 => return None,
                2 => file.key = Bytes(value).number()?,
                3 => file.size_bytes = Some(Bytes(value).number()?),
                _ => {}
            }
            Some(())
        })
        .ok_or(WRONG)?;
        self.files.push(file);
        Ok(())
    }

    fn origin(&mut self, rest: &mut Bytes) -> Result<(), &'static str> {
        const WRONG: &str = "the definition of an origin";
        let fields = rest.bytes().ok_or(WRONG)?;
        self.defined(fields, self.origins.len(), ORIGINS_MAX)?;
        let mut origin = Origin::default();
        each_field(fields, |tag, value| {
            match tag {
                1 => origin.process = Bytes(value).number_u32()?,
                2 => origin.thread = Bytes(value).number_u32()?,
                3 => origin.user = Bytes(value).number_u32()?,
                4 => origin.host = text(value)?,
                5 => origin.job = text(value)?,
                6 => origin.label = text(value)?,
                _ => {}
            }
            Some(())
        })
        .ok_or(WRONG)?;
        self.origins.push(origin);
        Ok(())
    }

    /// Counts a definition before it uses memory.
    fn defined(&mut self, fields: &[u8], number: usize, max: u32) -> Result<(), &'static str> {
        if number >= max as usize || !self.definitions.add(fields.len()) {
            return Err("more files or origins than any trace has");
        }
        Ok(())
    }
}

fn header(rest: &mut Bytes) -> Option<Header> {
    let mut header = Header::default();
    each_field(rest.0, |tag, value| {
        match tag {
            1 => {
                header.space = match value {
                    [0] => Space::File,
                    [1] => Space::Lane,
                    _ => return None,
                }
            }
            2 => header.clock_unix_ns = Some(Bytes(value).number()?),
            3 => header.host = text(value)?,
            4 => header.source = text(value)?,
            5 => header.command = text(value)?,
            _ => {}
        }
        Some(())
    })?;
    Some(header)
}

fn text(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    (text.len() <= TEXT_BYTES_MAX).then(|| text.to_owned())
}

/// Calls `take` for each (tag, value). Later versions may add tags, so `take` ignores unknown ones.
fn each_field(fields: &[u8], mut take: impl FnMut(u64, &[u8]) -> Option<()>) -> Option<()> {
    let mut rest = Bytes(fields);
    while !rest.is_empty() {
        let tag = rest.number()?;
        take(tag, rest.bytes()?)?;
    }
    Some(())
}
