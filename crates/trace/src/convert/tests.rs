use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::testing::varied;
use crate::{Builder, FileInfo, Header, Origin, OriginId, Outcome, Record, TraceOp};

fn write_file(dir: &tempfile::TempDir, name: &str, text: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn import_text(text: &[u8]) -> Result<Imported, TraceError> {
    let dir = tempfile::tempdir().unwrap();
    import(&write_file(&dir, "in", text), &ImportOptions::default())
}

/// The error without its folder.
fn complaint(text: &[u8]) -> String {
    let error = import_text(text).unwrap_err().to_string();
    error.split_once("/in:").map_or(error.clone(), |(_, rest)| rest.to_string())
}

fn again(trace: &Trace, format: Format) -> Imported {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    export(trace, &path, format).unwrap();
    let got = import(&path, &ImportOptions::default()).unwrap();
    assert_eq!(got.format, format, "found by its content");
    got
}

/// (op, path, offset, len, arrival, duration, outcome, process) of each record.
type Told = (TraceOp, Vec<u8>, u64, u64, u64, Option<u64>, Outcome, u32);

fn told(trace: &Trace) -> Vec<Told> {
    let one = |r: &Record| {
        let path = trace.file(r.file).path.clone();
        let process = trace.origin(r.origin).process;
        (r.op, path, r.offset, r.len, r.arrival.0, r.duration.map(|d| d.0), r.outcome, process)
    };
    trace.records.iter().map(one).collect()
}

#[test]
fn our_own_format_keeps_everything() {
    let trace = varied();
    assert_eq!(again(&trace, Format::Imt).trace, trace);
}

#[test]
fn csv_keeps_every_request() {
    let trace = varied();
    let got = again(&trace, Format::Csv).trace;
    assert_eq!(told(&got), told(&trace));
    for (a, b) in got.records.iter().zip(&trace.records) {
        assert_eq!(got.file(a.file), trace.file(b.file));
        assert_eq!(got.origin(a.origin), trace.origin(b.origin));
    }
}

#[test]
fn csv_by_hand() {
    let text = "op,path,arrival_ns,len,offset\nread,\"/a,b\",5,10,20\nwrite,/c,6,1,2\n";
    let got = import_text(text.as_bytes()).unwrap().trace;
    assert_eq!(told(&got)[0], (TraceOp::Read, b"/a,b".to_vec(), 20, 10, 5, None, Outcome::Whole, 0));
    let head = "arrival_ns,op,path,offset,len";
    for (text, wanted) in [
        (format!("{head}\n1,read,/a,0,5\n2,dance,/a,0,5\n"), "3: \"dance\" is not a valid operation"),
        (format!("{head}\n-1,read,/a,0,5\n"), "2: \"-1\" is not a valid arrival_ns"),
        (format!("{head}\n1,read,/a,0\n"), "2: there are 4 fields, and 5"),
        (format!("{head},colour\n1,read,/a,0,5,red\n"), "1: there is no column \"colour\""),
        (format!("{head},lane\n1,read,/a,0,5,70000\n"), "2: lane 70000 is larger"),
        (format!("{head},outcome\n1,read,/a,0,5,odd\n"), "2: \"odd\" is not a valid outcome"),
    ] {
        let got = complaint(text.as_bytes());
        assert!(got.starts_with(wanted), "{got}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = write_file(&dir, "x", b"arrival_ns,op\n1,read\n");
    let csv = ImportOptions { format: Some(Format::Csv), ..Default::default() };
    assert!(import(&path, &csv).unwrap_err().to_string().ends_with("x:1: the column path is missing"));
}

#[test]
fn fio_logs_keep_reads_writes_and_syncs() {
    let trace = varied();
    let data = |r: &&Told| (r.0.is_data() && r.3 > 0) || r.0 == TraceOp::Sync;
    for (format, grain) in [(Format::Fio3, 1_000), (Format::Fio2, 1_000_000)] {
        let got = told(&again(&trace, format).trace);
        let all = told(&trace);
        // Long requests take several lines.
        let lines =
            all.iter().filter(data).map(|r| if r.0.is_data() && r.3 > u32::MAX.into() { 2 } else { 1 }).sum::<usize>();
        let got: Vec<&Told> = got.iter().filter(data).collect();
        assert_eq!(got.len(), lines);
        let sum = |all: &[&Told]| all.iter().filter(|r| r.0.is_data()).map(|r| u128::from(r.3)).sum::<u128>();
        let wanted: Vec<&Told> = all.iter().filter(data).collect();
        assert_eq!(sum(&got), sum(&wanted));
        let first = wanted[0].4;
        for (g, w) in got.iter().zip(&wanted).take(20) {
            let place = if w.0 == TraceOp::Sync { (0, 0) } else { (w.2, w.3) };
            assert_eq!((g.0, &g.1, (g.2, g.3)), (w.0, &w.1, place));
            assert!((w.4 - first).abs_diff(g.4) <= grain + 1000, "{} {}", w.4 - first, g.4);
        }
    }
}

#[test]
fn fio_logs_of_fio() {
    // As written by fio 3.33.
    let text = "fio version 3 iolog\n18 /tmp/f.dat add\n126 /tmp/f.dat open\n133 /tmp/f.dat read 0 65536\n\
                10683 /tmp/f.dat write 65536 4096\n10700 /tmp/f.dat sync 0 0\n40842 /tmp/f.dat close\n";
    let got = import_text(text.as_bytes()).unwrap();
    let ops: Vec<_> = got.trace.records.iter().map(|r| (r.op, r.offset, r.len, r.arrival.0)).collect();
    assert_eq!(ops[1], (TraceOp::Read, 0, 65536, 133_000));
    assert_eq!(ops[2], (TraceOp::Write, 65536, 4096, 10_683_000));
    assert_eq!(ops.len(), 5);
    for (text, wanted) in [
        ("fio version 3 iolog\n5 /f dance 0 1\n", "2: \"dance\" is not a valid action of a version 3 log"),
        ("fio version 3 iolog\n5 /f wait 0 1\n", "2: \"wait\" is not a valid action of a version 3 log"),
        ("fio version 3 iolog\n5 /f read 0\n", "2: the length is missing"),
        ("fio version 3 iolog\nx /f read 0 1\n", "2: \"x\" is not a valid time in microseconds"),
        ("fio version 2 iolog\n/f read 0 -4\n", "2: \"-4\" is not a valid length"),
        ("fio version 2 iolog\n/f\n", "2: the action is missing"),
    ] {
        let got = complaint(text.as_bytes());
        assert!(got.starts_with(wanted), "{got}");
    }
}

const DXT: &str = "\
# darshan log version: 3.21
# exe: ./ior -a posix
# jobid: 4478544
# start_time: 1556041560
# DXT, file_id: 14388265063268455899, file_name: /tmp/odd, name: x.dat
# DXT, rank: 3, hostname: node7
# DXT, write_count: 2, read_count: 1
# DXT, mnt_pt: /, fs_type: lustre
# DXT, Lustre stripe_size: 1048576, Lustre stripe_count: 1
# DXT, Lustre OST obdidx: 5
# Module    Rank  Wt/Rd  Segment          Offset       Length    Start(s)      End(s)  [OST]
 X_POSIX       3  write        0               0         1048576      0.0100      0.0150  [  5]
 X_POSIX       3  write        1         1048576         1048576      0.0150      0.0151  [  5]
 X_POSIX       3   read        0               0            4096      0.0051      0.0052  [  5]

# DXT, file_id: 14388265063268455899, file_name: /tmp/odd, name: x.dat
# DXT, rank: 3, hostname: node7
# Module    Rank  Wt/Rd  Segment          Offset       Length    Start(s)      End(s)
 X_MPIIO       3  write        0               0         2097152      0.0099      0.0152
";

#[test]
fn darshan_texts() {
    let got = import_text(DXT.as_bytes()).unwrap();
    assert_eq!(got.format, Format::Dxt);
    assert!(got.notes[0].starts_with("1 requests of MPI-IO are left out"), "{:?}", got.notes);
    let path = b"/tmp/odd, name: x.dat".to_vec();
    assert_eq!(
        told(&got.trace),
        vec![
            (TraceOp::Read, path.clone(), 0, 4096, 5_100_000, Some(100_000), Outcome::Whole, 3),
            (TraceOp::Write, path.clone(), 0, 1 << 20, 10_000_000, Some(5_000_000), Outcome::Whole, 3),
            (TraceOp::Write, path.clone(), 1 << 20, 1 << 20, 15_000_000, Some(100_000), Outcome::Whole, 3),
        ]
    );
    let header = &got.trace.header;
    assert_eq!((header.command.as_str(), header.clock_unix_ns), ("./ior -a posix", Some(1_556_041_560_000_000_000)));
    let origin = got.trace.origin(OriginId(0));
    assert_eq!((origin.host.as_str(), origin.job.as_str()), ("node7", "4478544"));
    assert_eq!(got.trace.files[0].key, 14388265063268455899);

    let dir = tempfile::tempdir().unwrap();
    let path = write_file(&dir, "in", DXT.as_bytes());
    let mpiio = import(&path, &ImportOptions { mpiio: true, ..Default::default() }).unwrap();
    assert_eq!(mpiio.trace.records.len(), 1);
    let only = "# DXT, file_id: 1, file_name: /f\n# DXT, rank: 0, hostname: h\n X_MPIIO 0 read 0 0 1 0.0 0.1\n";
    assert!(import_text(only.as_bytes()).unwrap_err().to_string().contains("convert with --mpiio"));
    for (line, wanted) in [
        (" X_POSIX 0 dance 0 0 1 0.0 0.1", "4: \"dance\" is neither read nor write"),
        (" X_POSIX 0 read 0 0 1 0.2 0.1", "4: it ends (100000000 ns) before it starts"),
        (" X_POSIX 0 read 0 0 1 0.2", "4: the end is missing"),
        (" X_POSIX 0 read 0 -1 1 0.2 0.3", "4: \"-1\" is not a valid offset"),
        ("something else", "4: \"something\" begins no line of darshan-dxt-parser"),
    ] {
        let got =
            complaint(format!("# DXT, file_id: 1, file_name: /f\n#\n# DXT, rank: 0, hostname: h\n{line}\n").as_bytes());
        assert!(got.starts_with(wanted), "{got}");
    }
}

#[test]
fn a_binary_darshan_log_error_names_the_converter() {
    let mut log = b"3.41\0\0\0\0".to_vec();
    log.extend(6_567_223i64.to_le_bytes());
    log.extend([0; 100]);
    let got = complaint(&log);
    assert!(got.contains("binary Darshan log") && got.contains("darshan-dxt-parser "), "{got}");
}

/// As written by strace 6.1 with -y.
const STRACE: &str = r#"15596 1795295294.824000 execve("/usr/bin/python3", ["python3"], 0x7ffe /* 20 vars */) = 0 <0.000300>
15596 1795295294.825000 read(0<pipe:[36879]>, "2", 1) = 1 <0.000005>
15596 1795295294.825091 openat(AT_FDCWD</tmp/look>, "f.dat", O_RDONLY|O_CLOEXEC) = 3</tmp/look/f.dat> <0.000008>
15596 1795295294.825123 lseek(3</tmp/look/f.dat>, 5000, SEEK_SET) = 5000 <0.000005>
15596 1795295294.825139 read(3</tmp/look/f.dat>, "\0\0, \"x) = 5 <unfinished ...>"..., 100) = 100 <0.000006>
15596 1795295294.825157 pread64(3</tmp/look/f.dat>, "\0\0\0\0", 10, 77) = 10 <0.000005>
15596 1795295294.825173 openat(AT_FDCWD</tmp/look>, "/tmp/look/a b,\"c\"\n>(x).txt", O_WRONLY|O_CREAT|O_TRUNC|O_CLOEXEC, 0666) = 4</tmp/look/a b,\"c\"\n\76(x).txt> <0.000026>
15596 1795295294.825273 write(4</tmp/look/a b,\"c\"\n\76(x).txt>, "hello", 5) = 5 <0.000026>
15596 1795295294.825287 close(4</tmp/look/a b,\"c\"\n\76(x).txt>) = 0 <0.000006>
15596 1795295294.825407 clone3({flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD, child_tid=0x7fe24b430990, stack_size=0x7fff80} => {parent_tid=[15637]}, 88) = 15637 <0.000026>
15637 1795295294.825595 read(3</tmp/look/f.dat>,  <unfinished ...>
15596 1795295294.825600 openat(AT_FDCWD</tmp/look>, "none", O_RDONLY) = -1 ENOENT (No such file or directory) <0.000006>
15637 1795295294.825695 <... read resumed>"\0\0\0\0\0\0\0\0\0\0", 10) = 10 <0.000105>
15596 1795295294.825700 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|CLONE_CHILD_SETTID|SIGCHLD <unfinished ...>
15637 1795295294.825713 +++ exited with 0 +++
15638 1795295294.825800 read(3</tmp/look/f.dat>, "\0\0\0\0\0\0\0\0\0\0\0", 11) = 11 <0.000003>
15596 1795295294.825884 <... clone resumed>, child_tidptr=0x7fe24c274e50) = 15638 <0.000195>
15638 1795295294.826275 close(3</tmp/look/f.dat>) = 0 <0.000003>
15638 1795295294.826461 +++ exited with 0 +++
15596 1795295294.826478 --- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED, si_pid=15638} ---
15596 1795295294.826493 read(3</tmp/look/f.dat>, "", 12) = 0 <0.000006>
15596 1795295294.826500 readv(3</tmp/look/f.dat>, [{iov_base="", iov_len=7}, {iov_base="", iov_len=8}], 2) = -1 EIO (Input/output error) <0.000006>
15596 1795295294.827760 mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, 3</tmp/look/f.dat>, 0x1000) = 0x7fe24ac30000 <0.000007>
15596 1795295294.831182 +++ exited with 0 +++
"#;

#[test]
fn strace_texts() {
    let got = import_text(STRACE.as_bytes()).unwrap();
    assert_eq!(got.format, Format::Strace);
    let data: Vec<Told> = told(&got.trace).into_iter().filter(|r| r.0.is_data() || r.0 == TraceOp::Map).collect();
    let f = b"/tmp/look/f.dat".to_vec();
    let odd = b"/tmp/look/a b,\"c\"\n>(x).txt".to_vec();
    let us = |us: u64| us * 1000;
    use Outcome::*;
    assert_eq!(
        data,
        vec![
            (TraceOp::Read, f.clone(), 5000, 100, us(1139), Some(us(6)), Whole, 15596),
            (TraceOp::Read, f.clone(), 77, 10, us(1157), Some(us(5)), Whole, 15596),
            (TraceOp::Write, odd, 0, 5, us(1273), Some(us(26)), Whole, 15596),
            (TraceOp::Read, f.clone(), 5100, 10, us(1595), Some(us(105)), Whole, 15596),
            (TraceOp::Read, f.clone(), 5110, 11, us(1800), Some(us(3)), Whole, 15638),
            (TraceOp::Read, f.clone(), 5121, 12, us(2493), Some(us(6)), Short(0), 15596),
            (TraceOp::Read, f.clone(), 5121, 15, us(2500), Some(us(6)), Failed(5), 15596),
            (TraceOp::Map, f, 0x1000, 8192, us(3760), Some(us(7)), Whole, 15596),
        ]
    );
    let threads: Vec<_> = got.trace.origins.iter().map(|o| (o.process, o.thread)).collect();
    assert_eq!(threads, vec![(15596, 15596), (15596, 15637), (15638, 15638)]);
    assert!(got.notes[0].starts_with("1 requests are left out: of pipes"), "{:?}", got.notes);
}

#[test]
fn strace_texts_without_paths_and_threads() {
    let text = "\
1.000000 chdir(\"/data\") = 0
1.100000 open(\"x\", O_RDWR) = 3
1.200000 dup2(3, 7) = 7
1.300000 pwritev(7, [{iov_base=\"a\", iov_len=100}], 1, 4096) = 100
1.400000 close(3) = 0
1.500000 read(7, \"\", 50) = 50
1.600000 socket(AF_INET, SOCK_STREAM, IPPROTO_TCP) = 3
1.700000 read(3, \"\", 50) = 50
1.800000 copy_file_range(7, [10], 7, NULL, 20, 0) = 20
1.900000 sendfile(3, 7, [100] => [160], 60) = 60
";
    let got = import_text(text.as_bytes()).unwrap().trace;
    let x = b"/data/x".to_vec();
    let data: Vec<_> = told(&got).into_iter().filter(|r| r.0.is_data()).map(|r| (r.0, r.1, r.2, r.3)).collect();
    assert_eq!(
        data,
        vec![
            (TraceOp::Write, x.clone(), 4096, 100),
            (TraceOp::Read, x.clone(), 0, 50),
            (TraceOp::Read, x.clone(), 10, 20),
            (TraceOp::Write, x.clone(), 50, 20),
            (TraceOp::Read, x, 100, 60),
        ]
    );
    assert_eq!(got.records[0].duration, None, "without -T");
}

#[test]
fn bad_strace_texts() {
    for (text, wanted) in [
        ("1.5 read(3, \"\", 5) = 5\nnonsense\n", "2: \"nonsense\" is not a valid time in seconds"),
        ("1.5 read(3, \"\", 5) = 5\n12:30:01.123 read(3, \"\", 5) = 5\n", "2: \"12:30:01.123\" is not a valid time"),
        ("1.5 read(3, \"\", 5) = 5\n1.6 read(3, \"\n", "2: the call \"read(3, \\\"\" does not end"),
        ("1.5 read(3, \"\", 5) = 5\n1.6 read(3, \"\", 5)\n", "2: \"read(3, \\\"\\\", 5)\" has no result"),
        ("1.5 read(3, \"\", 5) = 5\n", " it holds no read or write of a file"),
        ("", " it is of no format that is known"),
        ("hello\nworld\n", " it is of no format that is known"),
    ] {
        let got = complaint(text.as_bytes());
        assert!(got.starts_with(wanted), "{got}");
    }
}

#[test]
fn trace_events_are_json_that_viewers_accept() {
    let trace = varied();
    let mut out = Vec::new();
    export_to(&trace, &mut out, Path::new("x"), Format::Chrome).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let bars: Vec<_> = events.iter().filter(|e| e["ph"] != "M").collect();
    assert_eq!(bars.len(), trace.records.len());
    for (bar, r) in bars.iter().zip(&trace.records) {
        assert_eq!(bar["name"], r.op.name());
        assert_eq!(bar["args"]["offset"].as_u64(), Some(r.offset));
        assert_eq!(bar["dur"].as_f64(), r.duration.map(|d| d.0 as f64 / 1e3));
    }
    assert_eq!(events.iter().filter(|e| e["name"] == "process_name").count(), 3);
}

#[test]
fn formats_have_names() {
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
        assert!(format.reads() || format.writes());
    }
    assert!(export_to(&varied(), &mut Vec::new(), Path::new("x"), Format::Dxt).is_err());
}

fn any_trace() -> impl Strategy<Value = Trace> {
    let path = prop::collection::vec(1u8..=255, 1..12);
    let record = (0..9u8, 0..3u32, 0..3u32, any::<u64>(), any::<u64>(), 0..1u64 << 50, prop::option::of(any::<u64>()));
    (prop::collection::vec(path, 3), prop::collection::vec(record, 1..40)).prop_map(|(paths, records)| {
        let mut builder = Builder::new(Header::default());
        let files: Vec<_> = paths.iter().map(|p| builder.path(p).unwrap()).collect();
        let origins: Vec<_> =
            (0..3).map(|process| builder.origin(Origin { process, ..Origin::default() }).unwrap()).collect();
        for (op, file, origin, offset, len, arrival, duration) in records {
            let op = TraceOp::from_code(op).unwrap();
            let mut r = Record::new(op, files[file as usize], offset, len, impresario_sched::Nanos(arrival));
            (r.origin, r.duration) = (origins[origin as usize], duration.map(impresario_sched::Nanos));
            builder.push(r).unwrap();
        }
        builder.build()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn csv_keeps_anything(trace in any_trace()) {
        prop_assert_eq!(told(&again(&trace, Format::Csv).trace), told(&trace));
    }

    /// No text makes a reader panic, whatever its claimed format.
    #[test]
    fn arbitrary_texts_never_panic(
        base in prop::sample::select(vec![STRACE, DXT, "fio version 3 iolog\n5 /f read 0 4096\n", "arrival_ns,op,path,offset,len\n1,read,/a,0,5\n"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..12),
    ) {
        let mut text = base.as_bytes().to_vec();
        for (at, to, cut) in changes {
            let at = at.index(text.len());
            text[at] = to;
            if cut {
                text.truncate(at + 1);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = write_file(&dir, "in", &text);
        for format in Format::ALL {
            _ = import(&path, &ImportOptions { format: Some(format), ..Default::default() });
        }
    }
}

#[test]
fn files_with_keys_and_sizes_are_distinguished() {
    let mut builder = Builder::new(Header::default());
    let a = builder.file(FileInfo { key: 1, ..FileInfo::default() }).unwrap();
    let b = builder.file(FileInfo { key: 2, ..FileInfo::default() }).unwrap();
    assert_ne!(a, b);
    assert_eq!(builder.file(FileInfo { key: 1, size_bytes: Some(5), ..FileInfo::default() }).unwrap(), a);
    assert_eq!(builder.build().files[0].size_bytes, Some(5));
}
