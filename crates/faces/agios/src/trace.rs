//! The trace of arrivals that the key `trace` asks for: one line a request, as the public library writes it
//! (nanoseconds since the start, file, R or W, offset, length; separated by tabs).

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::time::Instant;

/// Traces of one prefix at most.
const FILES_MAX: u32 = 100_000;

pub struct Trace {
    out: BufWriter<File>,
    start: Instant,
    /// Why writing ended; told once.
    failed: bool,
}

impl Trace {
    /// Opens the first of `prefix.1.suffix`, `prefix.2.suffix`, … that does not exist.
    pub fn create(prefix: &str, suffix: &str, buffer_bytes: usize) -> Result<Trace, String> {
        for n in 1..=FILES_MAX {
            let path = format!("{prefix}.{n}.{suffix}");
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let out = BufWriter::with_capacity(buffer_bytes, file);
                    return Ok(Trace { out, start: Instant::now(), failed: false });
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(format!("the trace {path} cannot be made: {e}; see trace_file_prefix")),
            }
        }
        Err(format!("there are {FILES_MAX} traces {prefix}.*.{suffix}; remove some"))
    }

    /// Notes an arrival; what is wrong with the file is told once.
    pub fn add(&mut self, file: &str, write: bool, offset: i64, len: i64) -> Result<(), String> {
        if self.failed {
            return Ok(());
        }
        let ns = self.start.elapsed().as_nanos();
        let op = if write { 'W' } else { 'R' };
        writeln!(self.out, "{ns}\t{file}\t{op}\t{offset}\t{len}").map_err(|e| {
            self.failed = true;
            format!("the trace cannot be written ({e}); it ends here")
        })
    }

    /// Writes what is in memory.
    pub fn finish(&mut self) -> Result<(), String> {
        if self.failed { Ok(()) } else { self.out.flush().map_err(|e| format!("the trace cannot be written: {e}")) }
    }
}
