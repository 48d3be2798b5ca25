//! Traces as files: long ones in bounded memory, killed writers, full disks.

use std::io::Read;
use std::process::Command;

use impresario_sched::{FileId, Nanos};
use impresario_trace::codec::{Ending, FileInfo, Header, Origin, Record, TraceOp};
use impresario_trace::{Ordered, Reader, Trace, TraceError, Writer};

fn record(i: u64) -> Record {
    Record { duration: Some(Nanos(1000)), ..Record::new(TraceOp::Read, FileId(0), i * 4096, 4096, Nanos(i * 5000)) }
}

fn begin<W: std::io::Write>(writer: &mut Writer<W>) {
    writer.file(&FileInfo { path: b"/f".to_vec(), ..FileInfo::default() }).unwrap();
    writer.origin(&Origin::default()).unwrap();
}

#[test]
fn a_long_trace_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.imt");
    let mut writer = Writer::create(&path, &Header::default()).unwrap();
    begin(&mut writer);
    for i in 0..300_000 {
        writer.push(&record(i)).unwrap();
    }
    assert_eq!(writer.records(), 300_000);
    writer.finish().unwrap();
    let mut reader = Reader::open(&path).unwrap();
    let mut n = 0;
    while let Some(r) = reader.next_record().unwrap() {
        assert_eq!(r, record(n));
        n += 1;
    }
    assert_eq!((n, reader.ending()), (300_000, Some(Ending::Closed)));
    assert_eq!(reader.files()[0].path, b"/f");
    assert!(Writer::create(&path, &Header::default()).is_err(), "never over an older trace");
}

/// Written in order of completion, read in order of arrival.
#[test]
fn order_of_arrival() {
    let mut writer = Writer::new(Vec::new(), "x", &Header::default()).unwrap();
    begin(&mut writer);
    let swapped = |i: u64| i ^ 1;
    (0..1000).for_each(|i| writer.push(&record(swapped(i))).unwrap());
    let bytes = writer.finish().unwrap();
    let ordered = Ordered::new(Reader::new(&bytes[..], "x").unwrap());
    let got: Vec<u64> = ordered.map(|r| r.unwrap().arrival.0).collect();
    assert_eq!(got, (0..1000).map(|i| i * 5000).collect::<Vec<_>>());
    assert_eq!(Trace::read(Reader::new(&bytes[..], "x").unwrap()).unwrap().records.len(), 1000);
}

/// Returns a byte at a time, as a slow pipe may.
struct Drops<'a>(&'a [u8]);

impl Read for Drops<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = buf.len().min(self.0.len()).min(1);
        buf[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        Ok(n)
    }
}

#[test]
fn any_cut_is_a_torn_tail_and_any_change_is_found() {
    let mut writer = Writer::new(Vec::new(), "x", &Header::default()).unwrap();
    begin(&mut writer);
    for i in 0..400 {
        writer.push(&record(i)).unwrap();
        if i % 50 == 0 {
            writer.flush().unwrap();
        }
    }
    let bytes = writer.finish().unwrap();
    let read = |bytes: &[u8]| -> Result<(usize, Option<Ending>), TraceError> {
        let mut reader = Reader::new(Drops(bytes), "x")?;
        let mut n = 0;
        while let Some(r) = reader.next_record()? {
            assert_eq!(r, record(n as u64));
            n += 1;
        }
        Ok((n, reader.ending()))
    };
    assert_eq!(read(&bytes).unwrap(), (400, Some(Ending::Closed)));
    let mut last = 0;
    for cut in 0..bytes.len() {
        match read(&bytes[..cut]) {
            Ok((n, ending)) => {
                assert!(n >= last && ending != Some(Ending::Closed));
                last = n;
            }
            Err(e) => assert!(last == 0 && e.to_string().starts_with("x: it is not a whole trace"), "{e}"),
        }
    }
    assert_eq!(last, 400);
    for at in (8..bytes.len()).step_by(7) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x40;
        match read(&changed) {
            Ok((_, ending)) => assert_ne!(ending, Some(Ending::Closed)),
            Err(e) => assert!(e.to_string().starts_with("x: "), "{e}"),
        }
    }
}

#[test]
fn a_limit_ends_a_trace_well() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.imt");
    let mut writer = Writer::create(&path, &Header::default()).unwrap().limited(200_000);
    begin(&mut writer);
    let full = (0..1_000_000).find_map(|i| writer.push(&record(i)).err()).unwrap();
    assert!(full.to_string().contains("limit of 200000 bytes"), "{full}");
    writer.finish().unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() < 300_000);
    assert_eq!(Trace::load(&path).unwrap().ending, Ending::Closed);
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = Writer::new(full, "/dev/full", &Header::default()).err().unwrap();
    assert!(error.to_string().starts_with("/dev/full: No space left"), "{error}");
}

/// Other files are refused by name.
#[test]
fn other_files() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes, wanted) in [
        ("empty", &b""[..], "ends before its first block"),
        ("text", b"hello world, this is no trace", "at byte 0: it is not a trace"),
        ("newer", b"IMTRACE\x09more", "version 9, and this program reads version 1"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = Reader::open(&path).err().unwrap().to_string();
        assert!(error.starts_with(path.to_str().unwrap()) && error.contains(wanted), "{error}");
    }
    assert!(Reader::open(dir.path().join("none")).err().unwrap().to_string().contains("No such file"));
    assert!(Reader::open(dir.path()).is_err(), "a folder");
}

/// A real writer, really killed. The test runs itself as the writer.
#[test]
fn kill_9_loses_little() {
    const NAME: &str = "IMPRESARIO_TRACE_TEST_WRITE";
    if let Some(path) = std::env::var_os(NAME) {
        let mut writer = Writer::create(path, &Header::default()).unwrap();
        begin(&mut writer);
        (0..40_000).for_each(|i| writer.push(&record(i)).unwrap());
        std::process::abort();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.imt");
    let me = std::env::current_exe().unwrap();
    let mut child = Command::new(me);
    child.args(["kill_9_loses_little", "--exact", "--nocapture"]).env(NAME, &path);
    assert!(!child.output().unwrap().status.success());
    let trace = Trace::load(&path).unwrap();
    assert_eq!(trace.ending, Ending::Unclosed);
    assert!(trace.records.len() > 25_000, "{}", trace.records.len());
    assert!(trace.records.iter().enumerate().all(|(i, r)| *r == record(i as u64)));
}
