//! Arbitrary bytes as a trace of every format that `impresario trace` imports, and as a Darshan log: no panic, no end of memory.
#![no_main]

use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use impresario_trace::convert::{Format, ImportOptions, export_to, import};
use impresario_trace::darshan::Log;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = Log::parse(bytes);
    let Some((first, text)) = bytes.split_first() else { return };
    // A format of its own choice, or what the content suggests.
    let format = Format::ALL.get(usize::from(*first & 0x0f)).copied();
    let options = ImportOptions { format, mpiio: first & 0x80 != 0 };
    let mut memory = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    memory.write_all(text).expect("room for the text");
    let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    let Ok(imported) = import(&path, &options) else { return };
    // What was imported can be written in every format that takes it.
    for format in Format::ALL.into_iter().filter(|format| format.writes()) {
        let _ = export_to(&imported.trace, &mut std::io::sink(), &path, format);
    }
});
