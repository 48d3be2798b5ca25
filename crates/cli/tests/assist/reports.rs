//! What guided I/O did for the jobs of a site, from the reports of their runs.

use impresario_assist::report::Report;

use crate::support::run_command;
use crate::tools::{COUNT, Daemon, Folder, PIECE, WAIT_MS, assist, of, plain, reading};

#[test]
fn reports_of_jobs_come_to_a_table_and_to_metrics() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let words = reading(&program, &data, 0);
    std::fs::create_dir_all(folder.at("reports/october")).unwrap();
    for (job, report) in [("17", "a.json"), ("17", "october/b.json"), ("18", "october/c.json")] {
        let mut command = assist(["run", "-q", "--report"]);
        command.arg(folder.at("reports").join(report)).arg("--").args(&words);
        command.env("IMPRESARIO_ASSIST_JOB", job).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.out, ran.err.as_str()), (0, plain(&words), ""));
    }
    folder.write("reports/october/not.json", "{");
    folder.write("reports/october/else.txt", "{");

    let report = |more: &[&str]| run_command(assist(["report"]).arg(folder.at("reports")).args(more));
    let told = report(&[]);
    assert_eq!((told.code, told.err.lines().count()), (0, 1), "{}", told.err);
    assert!(told.err.contains("not.json is no report"), "{}", told.err);
    let mut lines: Vec<Vec<&str>> = told.out.lines().skip(1).map(|l| l.split_whitespace().take(3).collect()).collect();
    lines.sort();
    assert_eq!(lines, [["17", "strided", "2"], ["18", "strided", "1"]], "{}", told.out);

    let metrics = report(&["--prometheus"]).out;
    let bytes = |job: &str, count: u64| {
        format!("impresario_assist_read_bytes_total{{job=\"{job}\",program=\"strided\"}} {}\n", count * COUNT * PIECE)
    };
    assert!(metrics.contains(&bytes("17", 2)) && metrics.contains(&bytes("18", 1)), "{metrics}");
    let json: serde_json::Value = serde_json::from_str(&report(&["--json"]).out).unwrap();
    assert_eq!(json["jobs"].as_array().map(Vec::len), Some(2), "{json}");

    let one: Report = serde_json::from_slice(&std::fs::read(folder.at("reports/a.json")).unwrap()).unwrap();
    assert_eq!((one.origin.program.as_str(), of(&one, &data).reads), ("strided", COUNT));
    assert!(!one.origin.node.is_empty());
    std::fs::create_dir(folder.at("none")).unwrap();
    for (place, why) in [("none", "ends with .json"), ("nowhere", "No such file")] {
        let ran = run_command(assist(["report"]).arg(folder.at(place)));
        assert!(ran.code != 0 && ran.err.contains(why) && ran.err.lines().count() == 1, "{ran:?}");
    }
}

#[test]
fn a_daemon_s_report_has_metrics() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let ran = run_command(&mut daemon.run_told(&reading(&program, &data, 0)));
    assert_eq!(ran.code, 0, "{}", ran.err);
    daemon.until("everything is reported", |r| r.files.iter().any(|f| f.reads == COUNT));
    let metrics = daemon.ask(&["--prometheus"]).out;
    let line = format!("impresario_assist_read_bytes_total{{job=\"\",program=\"\"}} {}\n", COUNT * PIECE);
    assert!(metrics.contains(&line), "{metrics}");
    daemon.end();
}
