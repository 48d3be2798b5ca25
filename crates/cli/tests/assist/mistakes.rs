//! Hints files with mistakes: one line with the position and the remedy.

use std::path::{Path, PathBuf};

use impresario_assist::config::Hints;

use crate::support::run_command;
use crate::tools::{Folder, assist, plain, reading};

#[test]
fn mistakes_are_named_with_line_and_key() {
    let folder = Folder::new();
    let file = |inner: &str| format!("{{\n  \"File\": [\n    {{ \"Path\": \"/x\",\n      {inner} }}\n  ]\n}}");
    for (text, line, wanted) in [
        (file("\"BlockSiez\": 4096"), 4, &["BlockSiez", "BlockSize"][..]),
        (file("\"BlockSize\": -4096"), 4, &["File[0].BlockSize", "-4096", "4096 to 1073741824"]),
        (file("\"BlockSize\": 99999999999999999999999"), 4, &["File[0].BlockSize", "4096 to 1073741824"]),
        (file("\"CacheSize\": 18446744073709551615"), 4, &["File[0].CacheSize", "1 to 65536"]),
        (file("\"CacheSize\": 1.5"), 4, &["File[0].CacheSize", "a whole number"]),
        (file("\"WillNeed\": [{ \"Offset\": -1 }]"), 4, &["File[0].WillNeed[0].Offset", "-1"]),
        (file("\"WillNeed\": [{ \"Length\": \"1\" }]"), 4, &["File[0].WillNeed[0].Length", "string"]),
        (file("\"Backend\": \"Tape\""), 4, &["Tape", "ForcedRead"]),
        ("{ \"Files\": [] }".into(), 1, &["Files", "File"]),
        ("{ \"File\": [ { \"Path\": \"data\" } ] }".into(), 1, &["File", "absolute"]),
        ("{\n  \"File\": [,]\n}".into(), 2, &["not JSON"]),
        (String::new(), 1, &["not JSON"]),
    ] {
        let hints = folder.write("hints.json", &text);
        for command in [vec!["run"], vec!["daemon", "--config"], vec!["compare"]] {
            let mut ran = assist(&command);
            ran.arg(&hints);
            match command[0] {
                "daemon" => ran.arg("--socket").arg(folder.at("s")),
                _ => ran.args(["--", "echo", "ran"]),
            };
            let ran = run_command(&mut ran);
            assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (2, "", 1), "{text}: {ran:?}");
            let place = format!("{}:{line}:", hints.display());
            assert!(ran.err.starts_with(&place) || text.is_empty(), "{text}: {}", ran.err);
            wanted.iter().for_each(|w| assert!(ran.err.contains(w), "{text}: {w} is not in: {}", ran.err));
        }
        assert!(!folder.at("s").exists());
    }
    let ran = run_command(assist(["run"]).arg(folder.at("none.json")).args(["--", "echo", "ran"]));
    assert!(
        ran.code == 2 && ran.err.contains("none.json: cannot be read") && ran.err.contains("assist plan"),
        "{ran:?}"
    );
    assert_eq!((ran.out.as_str(), ran.err.lines().count()), ("", 1), "{ran:?}");
}

#[test]
fn what_is_only_odd_is_told_and_used() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let missing = folder.at("missing");
    let regions = serde_json::json!([{ "Offset": 0, "Length": 8 << 20 }, { "Offset": 1 << 20, "Length": 1 << 20 }]);
    let hints = serde_json::json!({ "File": [
        { "Path": missing, "WillNeed": [{}] },
        { "Path": data, "WillNeed": regions, "Random": [{}], "DontNeed": [{ "Offset": 4 << 20, "Length": 4096 }] },
    ]});
    let hints = folder.write("hints.json", hints.to_string());
    let read = reading(&program, &data, 0);
    let ran = run_command(assist(["run"]).arg(&hints).arg("--").args(&read));
    assert_eq!((ran.code, ran.out.as_str()), (0, plain(&read).as_str()), "{}", ran.err);
    let told: Vec<&str> = ran.err.lines().collect();
    assert!(told.len() == 3 && told[2].contains("Saw "), "{}", ran.err);
    assert!(told[0].contains("File[0].Path") && told[0].contains(missing.to_str().unwrap()), "{}", ran.err);
    assert!(told[1].contains("File[1].WillNeed[1]") && told[1].contains("overlaps WillNeed[0]"), "{}", ran.err);
}

/// `-o` before a trace that the shell found instead of before the name of hints loses nothing.
#[test]
fn a_plan_replaces_nothing_but_hints() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let traces = ["trace.0.imt", "trace.1.imt"].map(|name| folder.at(name));
    for trace in &traces {
        let ran = run_command(assist(["record", "-o"]).arg(trace).arg("--").args(reading(&program, &data, 0)));
        assert_eq!(ran.code, 0, "{}", ran.err);
    }
    let plan = |output: &Path, inputs: &[PathBuf], more: &[&str]| {
        let mut command = assist(["plan", "--device", "disk", "--cold"]);
        run_command(command.args(more).arg("-o").arg(output).args(inputs))
    };
    let kept = |path: &Path, inputs: &[PathBuf], more: &[&str], word: &str| {
        let before = std::fs::read(path).unwrap();
        let ran = plan(path, inputs, more);
        assert!(ran.code == 2 && ran.err.contains(word) && ran.err.lines().count() == 1, "{ran:?}");
        assert!(std::fs::read(path).unwrap() == before, "{} is another", path.display());
    };
    kept(&traces[0], &traces[1..], &[], "--force");
    let link = folder.at("link");
    std::os::unix::fs::symlink(&traces[1], &link).unwrap();
    for path in [&traces[1], &link] {
        kept(path, &traces, &["--force"], "is one of the traces");
    }
    let notes = folder.write("notes.txt", "{ not JSON");
    kept(&notes, &traces, &[], "is there and is not a hints file");
    let hints = folder.at("hints.json");
    for (path, more) in [(&hints, &[][..]), (&hints, &[]), (&notes, &["--force"])] {
        let ran = plan(path, &traces, more);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
        Hints::load(path).unwrap();
    }
    // What is no file is written to.
    let ran = plan(Path::new("/dev/null"), &traces, &["--json"]);
    assert!(
        ran.code == 0 && ran.out.starts_with('{') && Path::new("/dev/null").metadata().unwrap().len() == 0,
        "{ran:?}"
    );
    let command = assist(["plan", "--device", "disk", "--cold", "-o", "/dev/stdout"]);
    let mut piped = std::process::Command::new("sh");
    piped.args(["-c", "\"$@\" | cat", "sh"]).arg(command.get_program()).args(command.get_args()).args(&traces);
    let ran = run_command(&mut piped);
    // Which hints these are depends on how busy the machine was.
    assert!(ran.out.starts_with('{') && ran.out.contains("\"File\""), "{ran:?}");
    let ran = plan(folder.path(), &traces, &["--force"]);
    assert!(ran.code == 2 && ran.err.contains("is a directory"), "{ran:?}");
    let ran = plan(&folder.at("none/hints.json"), &traces, &[]);
    assert!(ran.code == 1 && ran.err.contains("none/hints.json"), "{ran:?}");
}
