//! The manager with a file that lists its own extents.

use std::fmt::Write;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use crate::support::*;
use impresario_assist::config::{Entry, Hints, StandDown};
use impresario_assist::manager::{Handle, Manager, Options};
use impresario_assist::report::FileReport;

/// Tensors of lengths that follow no rule, and where they lie.
fn model(folder: &std::path::Path, name: &str) -> (PathBuf, File, Vec<Range<u64>>) {
    let (mut header, mut tensors, mut at) = (String::from("{"), Vec::new(), 0u64);
    for n in 0..120u64 {
        let len = 40 * KIB + n * n * 7919 % (60 * KIB);
        let comma = if n == 0 { "" } else { "," };
        let end = at + len;
        write!(header, r#"{comma}"t{n}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{at},{end}]}}"#).unwrap();
        tensors.push(at..end);
        at = end;
    }
    header.push('}');
    let data = 8 + header.len() as u64;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize((data + at) as usize, 7);
    let path = folder.canonicalize().unwrap().join(name);
    std::fs::write(&path, bytes).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    (path, file, tensors.into_iter().map(|t| data + t.start..data + t.end).collect())
}

fn manager(folder: &std::path::Path, path: &std::path::Path) -> Handle {
    let stand_down = StandDown { enabled: false, ..StandDown::default() };
    let file = vec![Entry { online: true, ..Entry::new(path) }];
    Manager::start(Options::new(Hints { stand_down, ..hints(file) }), &folder.join("socket")).unwrap()
}

/// Reads the header, then these tensors.
fn read(name: &str, which: impl Iterator<Item = usize>, has_jumped: bool) -> FileReport {
    let dir = folder();
    let (path, file, tensors) = model(dir.path(), name);
    let manager = manager(dir.path(), &path);
    let mut program = Program::start(manager.socket());
    let number = program.register(&file);
    let mut reads = vec![0..8, 8..tensors[0].start];
    reads.extend(which.map(|n| tensors[n].clone()));
    for (read, told) in reads.iter().zip(1..) {
        program.read(number, &file, read.start, read.end - read.start);
        until("it is told", || file_report(&manager.report().unwrap(), &path).reads == told);
        if told == 4 && has_jumped {
            until("the index is read", || !file_report(&manager.report().unwrap(), &path).index.is_empty());
        }
    }
    drop(program);
    until("the program is forgotten", || manager.report().unwrap().programs == 0);
    file_report(&manager.stop().unwrap(), &path)
}

#[test]
fn what_an_index_lists_comes_before_it_is_read() {
    let report = read("model.safetensors", (0..120).step_by(2), true);
    assert_eq!(report.index, "safetensors");
    assert!(report.hits >= 40, "{report:?}");
    assert!(report.used_bytes * 10 >= report.read_bytes * 7, "{report:?}");
    assert!(report.wasted_bytes * 20 <= report.read_bytes, "{report:?}");
}

#[test]
fn a_file_read_straight_on_needs_no_index() {
    assert_eq!(read("model.safetensors", 0..120, false).index, "");
}
