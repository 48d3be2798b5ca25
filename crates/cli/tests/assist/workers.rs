//! Programs of Python that read in several processes: all are recorded, each by its number, as one program.

use std::collections::BTreeSet;
use std::path::Path;

use impresario_trace::{Trace, TraceOp};

use crate::support::run_command;
use crate::tools::{COUNT, Folder, PIECE, STRIDE, assist, plain};

/// What the workers do: each reads pieces of a file.
const PIECES: &str = r#"
import sys, time, zlib

def piece(job):
    path, offset, length = job
    time.sleep(0.005)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return zlib.crc32(file.read(length))

if __name__ == "__main__":
    path, (length, stride, count) = sys.argv[2], map(int, sys.argv[3:6])
    jobs = [(path, i * stride, length) for i in range(count)]
"#;

/// Two workers; the program prints a checksum of all pieces in their order.
const MULTIPROCESSING: &str = r#"
    import multiprocessing
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(zlib.crc32(repr(pool.map(piece, jobs, chunksize=1)).encode()))
"#;

const DASK: &str = r#"
    import dask.bag
    bag = dask.bag.from_sequence(jobs, npartitions=16).map(piece)
    print(zlib.crc32(repr(bag.compute(scheduler="processes", num_workers=2)).encode()))
"#;

/// Records the script, and runs it guided: it prints the same, and every piece is in the trace, read by two processes.
fn recorded(folder: &Folder, python: &Path, script: &Path, how: &str) {
    let data = folder.data("data");
    let numbers = [PIECE, STRIDE, COUNT].map(|n| n.to_string());
    let words = [python, script, Path::new(how), &data].map(|word| word.to_str().unwrap().to_string());
    let words = [&words[..], &numbers[..]].concat();
    let alone = plain(&words);
    let trace = folder.at(&format!("{how}.imt"));
    let ran = run_command(assist(["record", "-o"]).arg(&trace).arg("--").args(&words));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    let trace = Trace::load(&trace).unwrap();
    let of_data = |path: &[u8]| path == data.to_str().unwrap().as_bytes();
    let reads = trace.records.iter().filter(|r| r.op == TraceOp::Read && of_data(&trace.files[r.file.0 as usize].path));
    let reads: Vec<_> = reads.filter(|r| r.moved_bytes() > 0).map(|r| (r.offset, trace.origin(r.origin))).collect();
    let places: BTreeSet<u64> = reads.iter().map(|(offset, _)| *offset).collect();
    assert_eq!((reads.len() as u64, places.len() as u64), (COUNT, COUNT), "{how}");
    let processes: BTreeSet<u32> = reads.iter().map(|(_, origin)| origin.process).collect();
    assert_eq!(processes.len(), 2, "{how}");
    let programs: BTreeSet<&str> = reads.iter().map(|(_, origin)| origin.label.as_str()).collect();
    assert_eq!(programs, BTreeSet::from([script.file_name().unwrap().to_str().unwrap()]), "{how}");
    let ran = run_command(assist(["run", "-q", "--"]).args(&words));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
}

#[test]
fn workers_of_python_are_recorded_as_their_program() {
    let Some(python) = impresario_testing::python("multiprocessing") else { return };
    let folder = Folder::new();
    let script = folder.write("pieces.py", [PIECES, MULTIPROCESSING].concat());
    for how in ["fork", "forkserver", "spawn"] {
        recorded(&folder, &python, &script, how);
    }
}

#[test]
fn workers_of_dask_are_recorded_as_their_program() {
    let Some(python) = impresario_testing::python("dask.bag") else { return };
    let folder = Folder::new();
    let script = folder.write("bag.py", [PIECES, DASK].concat());
    recorded(&folder, &python, &script, "processes");
}
