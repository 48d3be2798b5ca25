//! Files that list their own extents: what comes next is known from their index, not from a pattern of offsets.

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::{FileReport, Report};

use crate::support::run_command;
use crate::tools::{Folder, WAIT_MS, assist, forget, of, plain};

/// Makes files whose chunks lie in no order.
const WRITES: &str = r#"
import h5py, random, sys
import numpy as np
rng = np.random.default_rng(7)
rows = list(range(160))
random.Random(3).shuffle(rows)
with h5py.File(sys.argv[1] + "/scattered.h5", "w") as f:
    table = f.create_dataset("table", (160, 16384), "f4", chunks=(1, 16384))
    for row in rows:
        table[row] = rng.random(16384, dtype="f4")
"#;

const READS: &str = r#"
import h5py, sys, time
with h5py.File(sys.argv[1], "r") as f:
    total = 0.0
    for row in range(160):
        total += float(f["table"][row].sum())
        time.sleep(0.002)
    print(total)
"#;

/// A shard of 16 MiB: rows of four chunks.
const WRITES_SHARD: &str = r#"
import sys
import numpy as np, zarr
z = zarr.create_array(sys.argv[1] + "/a.zarr", shape=(256, 16384), dtype="f4", chunks=(1, 4096), shards=(256, 16384), compressors=None)
z[:, :] = np.random.default_rng(7).random((256, 16384), dtype="f4")
"#;

/// Opens the shard again for each chunk.
const READS_SHARD: &str = r#"
import sys, time
import zarr
z = zarr.open_array(sys.argv[1].removesuffix("/c/0/0"), mode="r")
total = 0.0
for row in range(256):
    total += float(z[row, 4096:8192].sum())
    time.sleep(0.002)
print(total)
"#;

/// The Python with these modules that has made the files.
fn python(folder: &Folder, modules: &str, writes: &str) -> Option<String> {
    let python = impresario_testing::python(modules)?;
    let made = Command::new(&python).args(["-c", writes]).arg(folder.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(python.to_str().unwrap().into())
}

/// Runs the program guided; its result is its own. What the report says of the file.
#[track_caller]
fn run(folder: &Folder, words: &[String], file: &Path, hints: &[PathBuf]) -> FileReport {
    let (alone, report) = (plain(words), folder.at("report.json"));
    forget(file);
    let mut command = assist(["run"]);
    command.args(hints).arg("--report").arg(&report).arg("--").args(words);
    let ran = run_command(command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    of(&report, file).clone()
}

#[test]
fn chunks_in_no_order_of_the_file_are_brought_in_by_its_index() {
    let folder = Folder::new();
    let Some(python) = python(&folder, "numpy, h5py", WRITES) else { return };
    let file = folder.at("scattered.h5");
    let words = |file: &Path| [&python, "-c", READS, file.to_str().unwrap()].map(String::from).to_vec();
    // Whatever this machine's device is like.
    let never_down = folder.write("down.json", r#"{ "StandDown": { "Enabled": false } }"#);
    let told = run(&folder, &words(&file), &file, std::slice::from_ref(&never_down));
    assert_eq!(told.index, "HDF5", "{told:?}");
    assert!(told.used_bytes * 10 >= told.read_bytes * 8, "{told:?}");
    assert!(told.wasted_bytes * 20 < told.read_bytes, "{told:?}");
    // The same bytes under a name that no reader knows: what strides show, if anything.
    let other = folder.at("scattered.bin");
    std::fs::copy(&file, &other).unwrap();
    let without = run(&folder, &words(&other), &other, &[never_down]);
    assert!(without.index.is_empty() && without.hits < told.hits, "{without:?}");
}

#[test]
fn a_copy_needs_nothing_of_an_index() {
    let folder = Folder::new();
    if python(&folder, "numpy, h5py", WRITES).is_none() {
        return;
    }
    let file = folder.at("scattered.h5");
    let words = ["cksum", file.to_str().unwrap()].map(String::from);
    assert!(run_command(Command::new(&words[0]).arg(&words[1])).code == 0);
    assert_eq!(run(&folder, &words, &file, &[]).index, "");
}

#[test]
fn chunks_of_a_shard_that_is_opened_for_each_are_brought_in() {
    let folder = Folder::new();
    let Some(python) = python(&folder, "numpy, zarr.codecs", WRITES_SHARD) else { return };
    let file = folder.at("a.zarr/c/0/0");
    let words = [&python, "-c", READS_SHARD, file.to_str().unwrap()].map(String::from);
    let never_down = folder.write("down.json", r#"{ "StandDown": { "Enabled": false } }"#);
    let told = run(&folder, &words, &file, &[never_down]);
    assert_eq!(told.index, "Zarr shard", "{told:?}");
    assert!(told.hits >= 200 && told.wasted_bytes * 10 < told.read_bytes, "{told:?}");
}
