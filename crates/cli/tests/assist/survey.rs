//! `assist survey` on logs as Darshan writes them.

use impresario_trace::darshan::writing::write;
use impresario_trace::darshan::{FileRecord, Log};

use crate::support::run_command;
use crate::tools::{Folder, assist};

fn log(command: &str, strided_reads: u64, read_s: f64) -> Log {
    let file = FileRecord {
        path: "/in/a.h5".into(),
        rank: -1,
        reads: 10_000,
        strided_reads,
        read_bytes: 655_360_000,
        read_s,
        ..FileRecord::default()
    };
    Log { command: command.into(), processes: 10, seconds: 100.0, posix: vec![file], ..Log::default() }
}

#[test]
fn programs_are_ranked_and_damaged_logs_named() {
    let folder = Folder::new();
    std::fs::create_dir_all(folder.at("2026/10")).unwrap();
    folder.write("2026/10/a.darshan", write(&log("/opt/columns x", 10_000, 400.0), "3.41", 0));
    folder.write("2026/10/b.darshan", write(&log("/opt/columns y", 10_000, 200.0), "3.21", 1));
    folder.write("2026/c.darshan", write(&log("python3 tree.py", 0, 500.0), "3.10", 0));
    folder.write("2026/broken.darshan", b"nonsense");
    folder.write("2026/notes.txt", b"no log");
    let ran = run_command(assist(["survey"]).arg(folder.path()));
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.err.contains("broken.darshan: not a Darshan log") && ran.err.lines().count() == 1, "{}", ran.err);
    for told in [
        "3 logs, 2 programs; 1 logs could not be read",
        "1. columns: at most 30.0 % of its time, 0.17 process hours of 0.56 in 2 runs",
        "2. tree.py: at most 0.0 % of its time",
        "in no order that the log shows",
    ] {
        assert!(ran.out.contains(told), "{told} is missing:\n{}", ran.out);
    }
    let ran = run_command(assist(["survey", "--json", "--top", "1"]).arg(folder.path()));
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((told["logs"].as_u64(), told["damaged"].as_u64()), (Some(3), Some(1)));
    assert_eq!(told["programs"].as_array().unwrap().len(), 1);
    assert_eq!(told["programs"][0]["gain_s"].as_f64(), Some(600.0));
}

#[test]
fn a_folder_without_logs_is_told() {
    let folder = Folder::new();
    let ran = run_command(assist(["survey"]).arg(folder.path()));
    assert!(ran.code == 2 && ran.err.contains("ends with .darshan"), "{ran:?}");
    let ran = run_command(&mut assist(["survey", "/nowhere/at/all"]));
    assert!(ran.code != 0 && ran.err.contains("/nowhere/at/all"), "{ran:?}");
}
