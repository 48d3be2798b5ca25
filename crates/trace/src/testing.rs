//! Traces for tests.

use impresario_sched::{FileId, Nanos};

use crate::{Builder, FileInfo, Header, Origin, Outcome, Record, Trace, TraceOp};

pub fn read_at(file: u32, offset: u64, len: u64, arrival_ns: u64, duration_ns: Option<u64>) -> Record {
    let record = Record::new(TraceOp::Read, FileId(file), offset, len, Nanos(arrival_ns));
    Record { duration: duration_ns.map(Nanos), ..record }
}

/// A varied trace: odd paths, two processes, all operations and outcomes.
pub fn varied() -> Trace {
    let mut builder = Builder::new(Header {
        clock_unix_ns: Some(1_790_000_000_000_000_000),
        host: "node1".into(),
        source: "test".into(),
        command: "analyse --all".into(),
        ..Header::default()
    });
    let paths: [&[u8]; 4] =
        [b"/plain", b"/with space, \"quotes\"\nand lines", b"/not utf-8 \xff\xfe %20", b"/\xc3\xbc"];
    let sizes = [None, Some(1 << 30), None, Some(0)];
    let files: Vec<FileId> = paths
        .iter()
        .zip(sizes)
        .enumerate()
        .map(|(key, (path, size_bytes))| {
            builder.file(FileInfo { path: path.to_vec(), key: key as u64 * 77, size_bytes }).unwrap()
        })
        .collect();
    let origins: Vec<_> = (0..3)
        .map(|i| {
            let host = if i == 2 { "node2".into() } else { "node1".into() };
            let job = "42".into();
            builder.origin(Origin { host, process: 100 + i, thread: i, user: 1000, job, label: "a, b".into() }).unwrap()
        })
        .collect();
    for i in 0..90u64 {
        let op = TraceOp::ALL[i as usize % 9];
        let mut r = Record::new(op, files[i as usize % 4], i * 4096 + i % 3, 1 << (i % 33), Nanos(i * 1_001_000));
        r.origin = origins[i as usize % 3];
        r.duration = (i % 7 != 0).then_some(Nanos(i * 1000));
        r.outcome = match i % 11 {
            3 => Outcome::Short(i),
            5 => Outcome::Failed(28),
            _ => Outcome::Whole,
        };
        builder.push(r).unwrap();
    }
    builder.build()
}
