//! Files that change while they are advised, and descriptors that change hands: programs see what they would without us.

use std::path::{Path, PathBuf};

use crate::support::{Process, run_command};
use crate::tools::{COUNT, Daemon, Folder, STRIDE, assist, of, plain, reading, try_compile};

/// A program reads a file again and again under a manager while something happens to the file; what it reads in the end.
fn while_advised(happens: impl FnOnce(&Folder, &Path)) -> (Folder, PathBuf, String) {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let stop = folder.at("stop");
    let mut words = reading(&program, &data, 500);
    words.push(stop.to_str().unwrap().into());
    let mut process = Process::start_command(&mut daemon.run(&words), &folder.at("out"));
    daemon.until("hints are given", |r| r.files.iter().any(|f| f.prefetched_bytes > 0));
    happens(&folder, &data);
    // At least one whole pass over what the file is now.
    let passed = of(&daemon.report(), &data).reads + 2 * COUNT;
    let report = daemon.until("it reads on", |r| of(r, &data).reads >= passed);
    assert_eq!((report.programs, report.cut_off), (1, 0));
    std::fs::write(&stop, "").unwrap();
    let status = process.wait();
    assert!(status.success(), "{status}: {}", process.log());
    let said = process.log();
    daemon.until("it is let go", |r| r.programs == 0 && r.held_bytes == 0 && of(r, &data).open == 0);
    let log = daemon.end();
    assert!(!log.contains("panicked"), "{log}");
    (folder, program, said)
}

#[test]
fn a_file_is_truncated() {
    let half = COUNT * STRIDE / 2 + 12_345;
    let (folder, program, said) = while_advised(|_, data| {
        let file = std::fs::File::options().write(true).open(data).unwrap();
        file.set_len(0).unwrap();
        file.set_len(COUNT * STRIDE * 3).unwrap();
        file.set_len(half).unwrap();
    });
    let zeroes = folder.write("zeroes", vec![0; half as usize]);
    assert_eq!(said, plain(&reading(&program, &zeroes, 0)));
}

#[test]
fn a_file_is_deleted() {
    let (folder, program, said) = while_advised(|_, data| std::fs::remove_file(data).unwrap());
    assert_eq!(said, plain(&reading(&program, &folder.data("data"), 0)));
}

#[test]
fn a_file_is_replaced() {
    let (folder, program, said) = while_advised(|folder, data| std::fs::rename(folder.data("other"), data).unwrap());
    let new = plain(&reading(&program, &folder.at("data"), 0));
    assert_eq!(new, plain(&reading(&program, &folder.data("other"), 0)));
    assert_ne!(said, new, "it has the old file open");
    assert_eq!(said, plain(&reading(&program, &folder.data("data"), 0)));
}

#[test]
fn descriptors_change_hands_at_once() {
    let folder = Folder::new();
    let reuse = try_compile(folder.path(), "reuse", &[]).unwrap();
    let (a, b) = (folder.write("a", vec![b'a'; 4 << 20]), folder.write("b", vec![b'b'; 4 << 20]));
    let hints = folder.hints("hints.json", &[&a, &b, &folder.at("c")]);
    let report = folder.at("report.json");
    let mut command = assist(["run"]);
    command.arg(&hints).arg("--report").arg(&report).arg("--").arg(&reuse).arg(folder.path()).arg("2000");
    let ran = run_command(&mut command);
    assert_eq!((ran.code, ran.out.as_str()), (0, "all bytes were those of their files\n"), "{}", ran.err);
    let report: impresario_assist::report::Report = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(report.cut_off, 0);
    assert!(of(&report, &a).programs > 0 && of(&report, &b).programs > 0, "{report:?}");

    // Recorded, each read is of the file that was open at that moment.
    let trace = folder.at("t.imt");
    let ran = run_command(assist(["record", "-o"]).arg(&trace).arg("--").arg(&reuse).arg(folder.path()).arg("200"));
    assert_eq!(ran.code, 0, "{}", ran.err);
    let trace = impresario_trace::Trace::load(&trace).unwrap();
    // On a machine under load some are missing: a file is not registered while the manager's queue is full. What is
    // recorded of a round is in the order of the program: a, b, a, b at one offset, then the beginning of c.
    let (mut at, mut rest, mut recorded) = (0, "abab", 0);
    for read in trace.records.iter().filter(|r| r.op == impresario_trace::TraceOp::Read) {
        recorded += 1;
        let name = trace.files[read.file.0 as usize].path.last().copied().map_or(' ', char::from);
        if name == 'c' {
            assert_eq!(read.offset, 0, "read {recorded}: the file `c` is shorter");
            rest = "";
            continue;
        }
        if read.offset != at {
            (at, rest) = (read.offset, "abab");
        }
        let place = rest.find(name);
        rest = &rest[1 + place.unwrap_or_else(|| panic!("read {recorded}, of {name} at {at}: expected of {rest:?}"))..];
    }
    assert!((250..=1000).contains(&recorded), "{recorded} of 1000 reads were recorded");
}
