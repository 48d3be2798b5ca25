//! Kinds of files: learnt from recorded runs, used for a file that was never read before.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::{FileReport, Report};
use impresario_testing::until;

use crate::support::{Process, Ran, run_command};
use crate::tools::{Daemon, Folder, Nobody, WAIT_MS, assist, forget, of, plain, try_compile};

const MIB: u64 = 1 << 20;

/// A program, its files and what was learnt of it.
struct Tables {
    folder: Folder,
    program: PathBuf,
}

impl Tables {
    fn new() -> Tables {
        let folder = Folder::new();
        let program = try_compile(folder.path(), "table", &[]).unwrap();
        Tables { folder, program }
    }

    fn table(&self, name: &str, size: u64) -> PathBuf {
        let bytes = (0..size).map(|i| ((i * i) >> 7) as u8).collect::<Vec<u8>>();
        let path = self.folder.write(name, bytes);
        forget(&path);
        path
    }

    fn words(&self, file: &Path, more: &[&str]) -> Vec<String> {
        let paths = [&*self.program, file].map(|path| path.to_str().unwrap().to_string());
        paths.into_iter().chain(more.iter().map(|word| word.to_string())).collect()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = assist(args);
        command.env("XDG_DATA_HOME", self.folder.at("share")).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        command
    }

    #[track_caller]
    fn record(&self, trace: &str, file: &Path) -> PathBuf {
        let trace = self.folder.at(trace);
        let mut command = self.command(&["record", "-f", "-o"]);
        let ran = run_command(command.arg(&trace).arg("--").args(self.words(file, &[])));
        assert_eq!(ran.code, 0, "{}", ran.err);
        trace
    }

    fn learn(&self, traces: &[&Path]) -> Ran {
        run_command(self.command(&["learn", "--device", "200:200"]).args(traces))
    }

    /// Two tables of different sizes, recorded and learnt.
    #[track_caller]
    fn learnt(&self) -> Ran {
        let [a, b] = [("a.tbl", 12 * MIB + 100), ("b.tbl", 20 * MIB)].map(|(name, size)| self.table(name, size));
        let traces = [self.record("a.imt", &a), self.record("b.imt", &b)];
        let ran = self.learn(&[&traces[0], &traces[1]]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
        assert!(!ran.out.contains("not used"), "{}", ran.out);
        ran
    }

    /// Runs the program guided; its result is its own. What the report says of the file.
    #[track_caller]
    fn run(&self, hints: Option<&Path>, file: &Path, more: &[&str]) -> (FileReport, Ran) {
        let (words, report) = (self.words(file, more), self.folder.at("report.json"));
        let alone = plain(&words);
        forget(file);
        let mut command = self.command(&["run"]);
        command.args(hints).arg("--report").arg(&report).arg("--").args(&words);
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
        let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
        assert_eq!(report.dropped_accesses, 0);
        (of(&report, file).clone(), ran)
    }

    /// A run is learnt from when its program has ended already. What is known once so many were; the program has its own line.
    #[track_caller]
    fn known_of(&self, runs: &str) -> Ran {
        let list = || run_command(&mut self.command(&["learn", "--list"]));
        until("the run is learnt from", || list().out.starts_with(&format!("table, {runs}:\n")));
        list()
    }

    /// Hints of a node's manager: whatever programs read is followed, however fast this machine is.
    fn online(&self) -> PathBuf {
        let hints = r#"{ "Directory": [{ "Path": "/", "Recursive": true, "Online": true }], "StandDown": { "Enabled": false } }"#;
        self.folder.write("online.json", hints)
    }

    /// Hints that say nothing of any file, but that those learnt are not stopped by how fast this machine is.
    fn never_down(&self) -> PathBuf {
        self.folder.write("down.json", r#"{ "StandDown": { "Enabled": false } }"#)
    }
}

/// No trace is carried around: each run adds to what is known, and the first new file after two gets the hints of its kind.
#[test]
fn each_run_teaches_the_next() {
    let tables = Tables::new();
    let hints = tables.never_down();
    for (name, size) in [("a.tbl", 12 * MIB + 100), ("b.tbl", 20 * MIB)] {
        let file = tables.table(name, size);
        let words = tables.words(&file, &[]);
        let mut command = tables.command(&["run", "-q", "--learn"]);
        let ran = run_command(command.arg("--").args(&words));
        assert_eq!((ran.code, ran.out, ran.err.as_str()), (0, plain(&words), ""));
    }
    let list = tables.known_of("2 recorded runs");
    assert!(list.out.starts_with("table, 2 recorded runs:\n  *.tbl: "), "{}", list.out);
    assert!(!list.out.contains("not used"), "{}", list.out);
    let (file, _) = tables.run(Some(&hints), &tables.table("c.tbl", 30 * MIB), &[]);
    assert_eq!(file.entry, "learnt of *.tbl");
    assert!(file.hits * 10 >= file.reads * 9 && !file.strayed, "{file:?}");
}

/// The user has his prompt when the program has ended, whatever learning waits for, and what it did is not lost. Nobody waits for the end
/// of a pipe that the user had open either.
#[test]
fn learning_holds_nobody_up() {
    let tables = Tables::new();
    let folder = tables.folder.at("share").join("impresario/assist");
    std::fs::create_dir_all(&folder).unwrap();
    let lock = File::create(folder.join(".lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let words = tables.words(&tables.table("a.tbl", 12 * MIB + 100), &[]);
    let pipe = tables.folder.at("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
    let guided = tables.command(&["run", "-q", "--learn", "--"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"exec "$@" 9>"$0""#]).arg(&pipe).arg(guided.get_program()).args(guided.get_args()).args(&words);
    shell.envs(guided.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ran = run_command(&mut shell);
    assert_eq!((ran.code, ran.out, ran.err.as_str()), (0, plain(&words), ""));
    assert_eq!(reader.read(&mut [0]).ok(), Some(0), "it is open in a process that learns");
    assert!(!folder.join("table.json").exists(), "another one writes there");
    drop(lock);
    tables.known_of("1 recorded run");
}

#[test]
fn where_nothing_can_be_kept_the_program_runs_and_one_line_says_so() {
    let tables = Tables::new();
    let words = tables.words(&tables.table("a.tbl", 12 * MIB + 100), &[]);
    let mut command = tables.command(&["run", "-q", "--learn", "--"]);
    let ran = run_command(command.args(&words).env("XDG_DATA_HOME", tables.folder.write("file", "")));
    assert_eq!((ran.code, ran.out), (0, plain(&words)));
    assert!(ran.err.starts_with("impresario: nothing is learnt from this run: "), "{}", ran.err);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
}

/// What a launcher starts is known by its own name, and is guided under another launcher, too.
#[test]
fn programs_that_a_launcher_starts_are_known_by_themselves() {
    let tables = Tables::new();
    let hints = tables.never_down();
    let launched = |args: &[&str], launcher: &str, file: &Path| {
        let mut command = tables.command(args);
        command.args(["--", "sh", "-c", launcher]).args(tables.words(file, &[]));
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.out), (0, plain(&tables.words(file, &[]))), "{}", ran.err);
    };
    let first = tables.table("a.tbl", 12 * MIB + 100);
    launched(&["run", "-q", "--learn"], "\"$0\" \"$@\"; true", &first);
    tables.known_of("1 recorded run");
    let trace = tables.folder.at("b.imt");
    launched(&["record", "-o", trace.to_str().unwrap()], "env \"$0\" \"$@\"; true", &tables.table("b.tbl", 20 * MIB));
    let ran = tables.learn(&[&trace]);
    assert!(ran.out.starts_with("table, 2 recorded runs:\n  *.tbl: "), "{}{}", ran.out, ran.err);
    let list = run_command(&mut tables.command(&["learn", "--list"]));
    assert_eq!(list.out.lines().filter(|line| !line.starts_with(' ')).count(), 1, "{}", list.out);

    let (new, report) = (tables.table("c.tbl", 30 * MIB), tables.folder.at("launched.json"));
    let args = ["run", "-q", hints.to_str().unwrap(), "--report", report.to_str().unwrap()];
    launched(&args, "\"$0\" \"$@\" && true", &new);
    let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let file = of(&report, &new);
    assert_eq!(file.entry, "learnt of *.tbl");
    assert!(file.hits * 10 >= file.reads * 9 && !file.strayed, "{file:?}");
}

#[test]
fn a_file_that_was_never_read_gets_the_hints_of_its_kind() {
    let tables = Tables::new();
    let ran = tables.learnt();
    for told in [
        "table, 2 recorded runs:",
        "*.tbl",
        "8 bytes at the end -8",
        "65536 bytes of every 262144 from 4096 to the end",
        "100.0 % of what the others predicted was read",
        "expected of 2 files held out: ",
        "a model of the device: ",
    ] {
        assert!(ran.out.contains(told), "{told} is missing:\n{}", ran.out);
    }
    let new = tables.table("new.tbl", 33 * MIB + 777);
    let (file, _) = tables.run(Some(&tables.never_down()), &new, &[]);
    assert_eq!(file.entry, "learnt of *.tbl");
    // By count: nearly all that is read is asked for before, and next to nothing else.
    assert!(file.used_bytes * 10 >= file.read_bytes * 9, "{file:?}");
    assert!((file.prefetched_bytes - file.used_bytes) * 20 < file.read_bytes, "{file:?}");
    assert!(file.hits * 10 >= file.reads * 9 && !file.strayed, "{file:?}");
    // The same without any hints file.
    let (file, _) = tables.run(None, &new, &[]);
    assert!(file.entry.starts_with("learnt of *.tbl") && file.hints > 0, "{file:?}");
}

/// By count, whatever this machine is like: of the second new file of a kind at least 90 % of the bytes that were brought in and used of
/// a recorded one, under the plan of its own run, are brought in and used, too.
#[test]
fn a_new_file_of_a_kind_is_hinted_as_one_that_was_recorded() {
    let tables = Tables::new();
    tables.learnt();
    let (recorded, plan) = (tables.folder.at("b.tbl"), tables.folder.at("plan.json"));
    let mut command = tables.command(&["plan", "--device", "200:200", "--cold", "-o"]);
    let ran = run_command(command.arg(&plan).arg(tables.folder.at("b.imt")));
    assert_eq!(ran.code, 0, "{}", ran.err);
    let mut hints: serde_json::Value = serde_json::from_slice(&std::fs::read(&plan).unwrap()).unwrap();
    hints["StandDown"] = serde_json::json!({ "Enabled": false });
    std::fs::write(&plan, hints.to_string()).unwrap();
    let (of_plan, _) = tables.run(Some(&plan), &recorded, &[]);
    assert_eq!(of_plan.entry, "File[0]", "{}", ran.out);
    for (name, size) in [("first.tbl", 20 * MIB), ("second.tbl", 20 * MIB), ("longer.tbl", 37 * MIB + 5)] {
        let (new, _) = tables.run(Some(&tables.never_down()), &tables.table(name, size), &[]);
        assert_eq!(new.entry, "learnt of *.tbl");
        let [new_share, planned_share] = [&new, &of_plan].map(|file| file.used_bytes as f64 / file.read_bytes as f64);
        assert!(new_share >= 0.9 * planned_share, "{name}: {new_share} of {planned_share}: {new:?}\n{of_plan:?}");
    }
}

/// The manager of a node follows what a program's user has learnt, as one that serves it alone does, also what is learnt meanwhile.
#[test]
fn the_node_s_manager_uses_what_a_program_s_user_has_learnt() {
    let tables = Tables::new();
    let daemon = Daemon::start(&tables.folder, &tables.online(), &[]);
    let run = |file: &Path| {
        let words = tables.words(file, &[]);
        let mut command = daemon.run_told(&words);
        let ran = run_command(command.env("XDG_DATA_HOME", tables.folder.at("share")));
        assert_eq!((ran.code, ran.out), (0, plain(&words)), "{}", ran.err);
        let path = |report: &Report| report.files.iter().find(|f| Path::new(&f.path) == file).cloned();
        let report = daemon.until("it is reported", |r| path(r).is_some_and(|f| f.reads > 0 && f.open == 0));
        path(&report).unwrap()
    };
    let before = run(&tables.table("before.tbl", 8 * MIB));
    assert_eq!(before.entry, "Directory[0]");
    tables.learnt();
    // What was known counts for some seconds.
    let (new, mut number) = (|n: u32| format!("new{n}.tbl"), 0);
    until("what was learnt is used", || {
        number += 1;
        let file = run(&tables.table(&new(number), 30 * MIB));
        file.entry.starts_with("learnt of *.tbl") && file.hits * 10 >= file.reads * 9 && !file.strayed
    });
    daemon.end();
}

/// Runs `table` on a new file under a manager of the node, and waits until that has let it go.
#[track_caller]
fn run_served(tables: &Tables, daemon: &Daemon, command: &mut Command, file: &Path) -> FileReport {
    let ran = run_command(command);
    assert_eq!((ran.code, ran.out), (0, plain(&tables.words(file, &[]))), "{}", ran.err);
    let path = |report: &Report| report.files.iter().find(|f| Path::new(&f.path) == file).cloned();
    let report = daemon.until("it is let go", |r| r.programs == 0 && path(r).is_some_and(|f| f.reads > 0));
    path(&report).unwrap()
}

/// Has a program run on new files until a manager of the node has recorded it. On a busy machine that may not have looked at the first one
/// before it ends, and nothing is learnt from what was not known from its beginning.
#[track_caller]
fn until_recorded(daemon: &Daemon, mut run: impl FnMut(u32)) {
    let (before, mut number) = (daemon.report().lessons.taken, 0);
    until("a run is recorded", || {
        number += 1;
        run(number);
        daemon.report().lessons.taken > before
    });
}

/// Nobody records anything or says that runs are to be learnt from: the third new file of a kind has the hints of the first two.
#[test]
fn the_node_s_manager_learns_by_itself() {
    let tables = Tables::new();
    std::fs::create_dir(tables.folder.at("share")).unwrap();
    // Its hints name no file.
    let daemon = Daemon::start(&tables.folder, &tables.never_down(), &[]);
    let run = |file: &Path| {
        let mut command = daemon.run_told(&tables.words(file, &[]));
        run_served(&tables, &daemon, command.env("XDG_DATA_HOME", tables.folder.at("share")), file)
    };
    until_recorded(&daemon, |n| {
        assert_eq!(run(&tables.table(&format!("a{n}.tbl"), 12 * MIB + 100)).entry, "Directory[0]");
    });
    tables.known_of("1 recorded run");
    until_recorded(&daemon, |n| drop(run(&tables.table(&format!("b{n}.tbl"), 20 * MIB))));
    let list = tables.known_of("2 recorded runs");
    assert!(list.out.contains("  *.tbl: ") && !list.out.contains("not used"), "{}", list.out);
    let mut number = 0;
    until("what was learnt is used", || {
        number += 1;
        let file = run(&tables.table(&format!("new{number}.tbl"), 30 * MIB));
        file.entry.starts_with("learnt of *.tbl") && file.hits * 10 >= file.reads * 9 && !file.strayed
    });
    // What is known and right is not learnt anew.
    let taken = daemon.report().lessons.taken;
    run(&tables.table("last.tbl", 25 * MIB));
    assert_eq!(daemon.report().lessons.taken, taken);
    let told = run_command(&mut tables.command(&["status"])).out;
    assert!(told.contains("Learnt of 1 program, last of:\n  table, just now: "), "{told}");
    assert!(told.contains("hints for 1 of 1 kind of files\n"), "{told}");
    daemon.end();
}

#[test]
fn the_node_s_manager_learns_nothing_where_that_is_switched_off() {
    let tables = Tables::new();
    let share = tables.folder.at("share");
    std::fs::create_dir(&share).unwrap();
    let entry = r#""Directory": [{ "Path": "/", "Recursive": true, "Online": true }]"#;
    let off = tables.folder.write("off.json", format!(r#"{{ {entry}, "Learn": {{ "Enabled": false }} }}"#));
    let daemon = Daemon::start(&tables.folder, &off, &[]);
    let file = tables.table("a.tbl", 12 * MIB + 100);
    let mut command = daemon.run_told(&tables.words(&file, &[]));
    run_served(&tables, &daemon, command.env("XDG_DATA_HOME", &share), &file);
    assert_eq!(daemon.report().lessons.taken, 0);
    daemon.end();
    assert_eq!(std::fs::read_dir(&share).unwrap().count(), 0);
}

/// A daemon of root's has what it records of a user's programs kept by that user: no other one reads it, and where the user may not write
/// nothing is.
#[test]
fn a_run_is_learnt_from_with_its_user_s_rights() {
    let tables = Tables::new();
    let Some(nobody) = Nobody::new(&tables.folder) else { return };
    let daemon = Daemon::start(&tables.folder, &tables.online(), &["--everyone"]);
    let run = |program: &Path, name: &str, share: &Path| {
        until_recorded(&daemon, |n| {
            let file = tables.table(&format!("{name}{n}.tbl"), 12 * MIB + 100);
            let mut command = nobody.command(["run", "--node", "--"]);
            command.arg(program).arg(&file).env("IMPRESARIO_ASSIST_SOCKET", &daemon.socket);
            command.env("XDG_DATA_HOME", share).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS).current_dir("/");
            run_served(&tables, &daemon, &mut command, &file);
        });
    };
    let [closed, own] = ["closed", "own"].map(|name| tables.folder.at(name));
    [&closed, &own].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    std::os::unix::fs::chown(&own, Some(65534), Some(65534)).unwrap();
    // What is known of a program counts for some time, with the place, so that this one has another name.
    let other = tables.folder.at("other");
    std::fs::copy(&tables.program, &other).unwrap();
    run(&other, "a", &closed);
    run(&tables.program, "b", &own);
    until("the run is learnt from", || own.join("impresario/assist/table.json").exists());
    assert_eq!(daemon.report().lessons.taken, 2);
    let kept = own.join("impresario/assist/table.json").metadata().unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!((kept.uid(), kept.gid(), kept.mode() & 0o077), (65534, 65534, 0));
    assert_eq!(std::fs::read_dir(&closed).unwrap().count(), 0);
    daemon.end();
    // Nor is a home made that is not there.
    let missing = tables.folder.at("missing");
    let ran = run_command(assist(["remember", "--folder"]).arg(missing.join("x")).arg("--home").arg(&missing));
    assert!(ran.code != 0 && ran.err.contains("is not there") && !missing.exists(), "{ran:?}");
}

/// A daemon without rights, as the unit has it, keeps what it learns of users' programs in a folder of its own.
#[test]
fn a_daemon_without_rights_learns_for_each_user() {
    let tables = Tables::new();
    let Some(nobody) = Nobody::new(&tables.folder) else { return };
    let state = tables.folder.at("state");
    std::fs::create_dir(&state).unwrap();
    std::os::unix::fs::chown(&state, Some(65534), Some(65534)).unwrap();
    let socket = state.join("s");
    let mut command = nobody.command(["daemon", "--everyone", "--config"]);
    command.arg(tables.online()).arg("--socket").arg(&socket).env("STATE_DIRECTORY", &state).current_dir("/");
    let process = Process::start_command(&mut command, &tables.folder.at("daemon.log"));
    until("the daemon listens", || process.log().contains("listens at"));
    let daemon = Daemon { process, socket };
    for (name, size) in [("a", 12 * MIB + 100), ("b", 20 * MIB)] {
        until_recorded(&daemon, |n| {
            let file = tables.table(&format!("{name}{n}.tbl"), size);
            run_served(&tables, &daemon, &mut daemon.run_told(&tables.words(&file, &[])), &file);
        });
    }
    let kept = state.join("learnt/0");
    until("both runs are learnt from", || {
        let list = run_command(assist(["learn", "--list", "--folder"]).arg(&kept));
        list.out.starts_with("table, 2 recorded runs:\n")
    });
    let mut number = 0;
    until("what was learnt is used", || {
        number += 1;
        let file = tables.table(&format!("new{number}.tbl"), 30 * MIB);
        let served = run_served(&tables, &daemon, &mut daemon.run_told(&tables.words(&file, &[])), &file);
        served.entry.starts_with("learnt of *.tbl")
    });
    daemon.end();
}

/// A daemon of root's serves everyone, and reads what a user has learnt as that user: root's rights reach nothing that the user's do not.
#[test]
fn what_a_user_has_learnt_is_read_with_that_user_s_rights() {
    let tables = Tables::new();
    let Some(nobody) = Nobody::new(&tables.folder) else { return };
    tables.learnt();
    let share = tables.folder.at("share");
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    let folder = share.join("impresario/assist");
    std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let kept = folder.join("table.json");
    std::fs::set_permissions(&kept, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let daemon = Daemon::start(&tables.folder, &tables.online(), &["--everyone"]);
    let run = |name: &str| {
        let file = tables.table(name, 30 * MIB);
        let words = tables.words(&file, &[]);
        let mut command = nobody.command(["run", "--node", "--"]);
        command.args(&words).env("IMPRESARIO_ASSIST_SOCKET", &daemon.socket).env("XDG_DATA_HOME", &share);
        let ran = run_command(command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS).current_dir("/"));
        assert_eq!((ran.code, ran.out), (0, plain(&words)), "{}", ran.err);
        let path = |report: &Report| report.files.iter().find(|f| Path::new(&f.path) == file).cloned();
        let report = daemon.until("it is reported", |r| path(r).is_some_and(|f| f.reads > 0 && f.open == 0));
        path(&report).unwrap().entry
    };
    assert_eq!(run("closed.tbl"), "Directory[0]", "root may read it, and this user may not");
    [&*folder, &kept].into_iter().for_each(own);
    let mut number = 0;
    until("what the user has learnt is used", || {
        number += 1;
        run(&format!("own{number}.tbl")).starts_with("learnt of *.tbl")
    });
    daemon.end();
}

#[test]
fn a_plan_of_the_file_comes_before_its_kind() {
    let tables = Tables::new();
    tables.learnt();
    let new = tables.table("new.tbl", 16 * MIB);
    let hints = tables.folder.hints("hints.json", &[&new]);
    assert_eq!(tables.run(Some(&hints), &new, &[]).0.entry, "File[0]");
    // And another kind of file is followed as it is read.
    let other = tables.table("new.other", 16 * MIB);
    assert_eq!(tables.run(None, &other, &[]).0.entry, "Directory[0]");
}

#[test]
fn a_file_that_is_read_otherwise_is_given_up() {
    let tables = Tables::new();
    tables.learnt();
    let new = tables.folder.at("new.tbl");
    std::fs::File::create(&new).unwrap().set_len(256 * MIB).unwrap();
    let (file, _) = tables.run(Some(&tables.never_down()), &new, &["any"]);
    assert!(file.entry.starts_with("learnt of") && file.strayed, "{file:?}");
}

#[test]
fn one_file_says_nothing_of_others() {
    let tables = Tables::new();
    let trace = tables.record("a.imt", &tables.table("a.tbl", 8 * MIB));
    // Nor do two runs with one file.
    for _ in 0..2 {
        let ran = tables.learn(&[&trace]);
        assert!(ran.code == 0 && ran.out.contains("not used: seen in one file only"), "{}{}", ran.out, ran.err);
    }
    assert_eq!(tables.run(None, &tables.table("b.tbl", 8 * MIB), &[]).0.entry, "Directory[0]");
}

#[test]
fn what_was_learnt_is_listed_and_forgotten() {
    let tables = Tables::new();
    let list = |more: &[&str]| run_command(tables.command(&["learn", "--list"]).args(more));
    assert!(list(&[]).out.starts_with("Nothing was learnt yet in "), "{:?}", list(&[]));
    let learnt = tables.learnt();
    // What hints save is told with the runs from which that can be known.
    let (kept, replayed): (Vec<&str>, Vec<&str>) =
        learnt.out.lines().partition(|line| !line.contains("expected of") && !line.contains("a model of the device"));
    assert_eq!((list(&[]).code, list(&[]).out), (0, kept.join("\n") + "\n"));
    let saved = replayed[0].split_once(" waiting saved (").and_then(|(_, part)| part.split_once(" %)"));
    let percent: i64 = saved.unwrap_or_else(|| panic!("{replayed:?}")).0.parse().unwrap();
    assert!((0..=100).contains(&percent), "{replayed:?}");
    let again = run_command(tables.command(&["learn", "--json", "--device", "disk"]).arg(tables.folder.at("a.imt")));
    let again: serde_json::Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!(again[0]["expected"][0]["files"], 1, "{again}");
    let json: serde_json::Value = serde_json::from_str(&list(&["--json"]).out).unwrap();
    assert_eq!((json[0]["program"].as_str(), json[0]["kinds"].as_array().map(Vec::len)), (Some("table"), Some(1)));
    let forget = || run_command(tables.command(&["learn", "--forget", "table"]).current_dir("/"));
    assert_eq!(forget().out, "What was learnt of table is forgotten.\n");
    let ran = forget();
    assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
    assert!(ran.err.contains("\"table\"") && ran.err.contains("--list"), "{}", ran.err);
}

#[test]
fn a_damaged_file_costs_hints_and_not_the_run() {
    let tables = Tables::new();
    tables.learnt();
    let kept = tables.folder.at("share").join("impresario/assist/table.json");
    let text = std::fs::read_to_string(&kept).unwrap();
    std::fs::write(&kept, &text[..text.len() / 2]).unwrap();
    let (file, ran) = tables.run(None, &tables.table("new.tbl", 8 * MIB), &[]);
    assert_eq!(file.entry, "Directory[0]");
    for ran in
        [ran, run_command(&mut tables.command(&["learn", "--list"])), tables.learn(&[&tables.folder.at("a.imt")])]
    {
        assert!(ran.err.contains("table.json: is damaged") && ran.err.contains("--forget PROGRAM"), "{ran:?}");
    }
    assert_eq!(run_command(&mut tables.command(&["learn", "--forget", "table"])).code, 0);
    assert_eq!(tables.learn(&[&tables.folder.at("a.imt")]).code, 0);
}

#[test]
fn mistakes_are_named() {
    let tables = Tables::new();
    for (args, told) in [
        (&["learn"][..], "TRACE"),
        (&["learn", "nowhere.imt"], "nowhere.imt"),
        (&["learn", "--list", "--forget", "x"], "--forget"),
        (&["learn", "--list", "--shared", "--folder", "x"], "--folder"),
    ] {
        let ran = run_command(tables.command(args).current_dir(tables.folder.path()));
        assert!(ran.code != 0 && ran.err.contains(told), "{args:?}: {ran:?}");
    }
}
