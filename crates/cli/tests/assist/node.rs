//! The advice manager of a node: its users, its control, and that programs do not depend on it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use impresario_assist::report::Report;
use impresario_testing::{PATIENCE, until};
use rustix::process::Signal;

use crate::support::{Process, run_command, run_within};
use crate::tools::{COUNT, Daemon, Folder, Nobody, PIECE, WAIT_MS, assist, forget, of, plain, reading, try_compile};

/// A program under `run --node` that reads on until it is told to stop.
struct Endless {
    process: Process,
    out: PathBuf,
    stop: PathBuf,
}

impl Endless {
    fn start(folder: &Folder, daemon: &Daemon, program: &Path, data: &Path) -> Endless {
        let (out, stop) = (folder.at("endless.out"), folder.at("endless.stop"));
        let mut words = reading(program, data, 1000);
        words.push(stop.to_str().unwrap().into());
        Endless { process: Process::start_command(&mut daemon.run(&words), &out), out, stop }
    }

    /// What it printed, all in all; its exit status must be 0.
    #[track_caller]
    fn end(&mut self) -> String {
        std::fs::write(&self.stop, "").unwrap();
        let status = self.process.wait();
        assert!(status.success(), "{status}: {}", self.process.log());
        std::fs::read_to_string(&self.out).unwrap()
    }
}

#[test]
fn programs_are_served_and_reported() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let read = reading(&program, &data, 1000);
    let alone = plain(&read);
    forget(&data);
    let ran = run_command(&mut daemon.run_told(&read));
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, alone.as_str(), ""));
    let report = daemon.until("everything is reported", |r| r.files.iter().any(|f| f.reads == COUNT && f.open == 0));
    let file = of(&report, &data);
    assert_eq!((file.entry.as_str(), file.read_bytes, report.cut_off), ("File[0]", COUNT * PIECE, 0));
    assert!(file.prefetched_bytes > 0 && file.used_bytes > 0, "{file:?}");
    let text = daemon.ask(&[]);
    let wanted = format!("{} (File[0])\n  64 reads by 1 programs, 4 MiB", data.display());
    assert!(text.code == 0 && text.out.contains(&wanted), "{}", text.out);

    // A second one leaves the socket alone, and the first continues.
    let mut second = assist(["daemon", "--config"]);
    let second = run_command(second.arg(folder.at("hints.json")).arg("--socket").arg(&daemon.socket));
    assert_eq!((second.code, second.err.lines().count()), (1, 1), "{}", second.err);
    let remedy = "another manager listens there; stop it or name another path";
    assert!(second.err.contains(remedy), "{}", second.err);
    assert!(run_command(&mut daemon.run(&read)).out == alone);
    daemon.until("the first goes on", |r| r.programs_ever >= 2);

    let socket = daemon.socket.clone();
    daemon.end();
    let ran = run_command(assist(["report", "--socket"]).arg(&socket));
    assert!(ran.code == 2 && ran.err.contains("assist daemon") && ran.err.lines().count() == 1, "{ran:?}");
    let mut without = assist(["run", "--node", "--"]);
    let ran = run_command(without.args(&read).env("IMPRESARIO_ASSIST_SOCKET", &socket));
    assert!(ran.code == 2 && ran.err.contains("assist daemon") && ran.out.is_empty(), "{ran:?}");
}

/// Nothing needs to be written: files are followed as by `run` without a plan.
#[test]
fn it_needs_no_hints_file() {
    let folder = Folder::new();
    let (program, data, socket) = (folder.strided(), folder.data("data"), folder.at("s"));
    let mut command = assist(["daemon", "--socket"]);
    let process = Process::start_command(command.arg(&socket), &folder.at("daemon.log"));
    until("the daemon listens", || process.log().contains("listens at"));
    let daemon = Daemon { process, socket };
    let read = reading(&program, &data, 0);
    assert_eq!(run_command(&mut daemon.run_told(&read)).out, plain(&read));
    let report = daemon.until("it is followed", |r| r.files.iter().any(|f| f.reads == COUNT));
    assert_eq!(of(&report, &data).entry, "Directory[0]");
    daemon.process.signal(Signal::HUP);
    until("it says so", || daemon.process.log().contains("there is no hints file to read"));
    daemon.end();
    let watch = run_command(&mut assist(["daemon", "--watch"]));
    assert!(watch.code == 2 && watch.err.contains("--config"), "{watch:?}");
}

/// A plan for some files leaves the others to be followed, as with `run`, and their entry may leave them alone.
#[test]
fn files_of_which_hints_say_nothing_are_followed() {
    let folder = Folder::new();
    let (program, planned, other) = (folder.strided(), folder.data("planned"), folder.data("other"));
    std::fs::create_dir(folder.at("left")).unwrap();
    let left = folder.data("left/alone");
    let hints = serde_json::json!({
        "File": [{ "Path": planned, "WillNeed": [{}] }],
        "Directory": [{ "Path": folder.at("left"), "Recursive": true }],
    });
    let daemon = Daemon::start(&folder, &folder.write("hints.json", hints.to_string()), &[]);
    for file in [&planned, &other, &left] {
        let read = reading(&program, file, 0);
        assert_eq!(run_command(&mut daemon.run_told(&read)).out, plain(&read));
    }
    let report = daemon.until("all are known", |r| r.files.iter().filter(|f| f.reads == COUNT).count() == 3);
    let entries = [&planned, &other, &left].map(|file| of(&report, file).entry.as_str());
    assert_eq!(entries, ["File[0]", "Directory[1]", "Directory[0]"]);
    assert_eq!(of(&report, &left).hints, 0);
    daemon.end();
}

/// How often the threads of a process have begun to run, all in all.
fn wake_ups(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let number = |line: &str| line.split_once("voluntary_ctxt_switches:")?.1.trim().parse::<u64>().ok();
        status.lines().filter_map(number).sum::<u64>()
    };
    tasks.flatten().map(of).sum()
}

#[test]
fn a_daemon_that_nobody_asks_for_anything_sleeps() {
    let folder = Folder::new();
    let data = folder.data("data");
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let pid = daemon.process.pid();
    let rests = |what: &str| {
        // What was asked last is over.
        let mut least = u64::MAX;
        until(what, || {
            let before = wake_ups(pid);
            std::thread::sleep(std::time::Duration::from_secs(3));
            least = least.min(wake_ups(pid) - before);
            least == 0
        });
    };
    rests("it sleeps when it was started");
    let mut program =
        Process::start_command(&mut daemon.run(&["sleep".into(), "1000".into()]), &folder.at("sleep.out"));
    daemon.until("the program is there", |r| r.programs == 1);
    rests("it sleeps while its program does");
    program.signal(Signal::TERM);
    program.wait();
    daemon.until("the program is gone", |r| r.programs == 0);
    rests("it sleeps after its program");
    daemon.end();
}

#[test]
fn hints_are_read_anew_and_a_file_with_a_mistake_changes_nothing() {
    let folder = Folder::new();
    let (program, first, second) = (folder.strided(), folder.data("first"), folder.data("second"));
    let hints = folder.hints("hints.json", &[&first]);
    let daemon = Daemon::start(&folder, &hints, &[]);
    let run = |data: &Path| {
        let read = reading(&program, data, 0);
        assert_eq!(run_command(&mut daemon.run_told(&read)).out, plain(&read));
    };
    run(&first);
    let before = daemon.until("the first file is known", |r| r.files.iter().any(|f| f.reads == COUNT));

    folder.write("hints.json", "{\n  \"File\": [\n    { \"Path\": \"/x\", \"BlockSiez\": 4096 }\n  ]\n}");
    daemon.process.signal(Signal::HUP);
    until("the mistake is reported", || daemon.process.log().contains("the hints are unchanged"));
    let log = daemon.process.log();
    let place = format!("{}:3:", hints.display());
    assert!(log.contains(&place) && log.contains("BlockSiez"), "{log}");
    let after = daemon.report();
    assert_eq!(
        (of(&after, &first).reads, after.programs_ever),
        (COUNT, before.programs_ever),
        "what was known is forgotten"
    );

    folder.hints("hints.json", &[&second]);
    daemon.process.signal(Signal::HUP);
    until("the hints are read again", || daemon.process.log().contains("read again"));
    // The manager restarts then; it takes a moment to listen.
    until("it answers", || daemon.ask(&["--json"]).code == 0);
    run(&second);
    let report = daemon.until("the second file is known", |r| r.files.iter().any(|f| f.reads == COUNT));
    assert!(report.files.iter().all(|f| Path::new(&f.path) != first), "{report:?}");
    of(&report, &second);
    daemon.end();
}

#[test]
fn programs_go_on_when_it_is_killed_and_find_it_again() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let alone = plain(&reading(&program, &data, 0));
    let hints = folder.hints("hints.json", &[&data]);
    let mut daemon = Daemon::start(&folder, &hints, &[]);
    let mut endless = Endless::start(&folder, &daemon, &program, &data);
    for _ in 0..2 {
        daemon.until("it reads", |r| r.programs == 1 && r.files.iter().any(|f| f.reads > 0));
        daemon.process.kill();
        assert!(daemon.socket.exists(), "a killed manager cannot clean up");
        daemon = Daemon::start(&folder, &hints, &[]);
    }
    let report = daemon.until("it is found again", |r| r.programs == 1 && r.files.iter().any(|f| f.reads > 0));
    assert!(of(&report, &data).prefetched_bytes > 0, "{report:?}");
    assert_eq!(endless.end(), alone);
    daemon.until("the program is let go", |r| r.programs == 0 && r.files.iter().all(|f| f.open == 0));
    daemon.end();
}

#[test]
fn programs_go_on_when_it_is_stopped() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let mut endless = Endless::start(&folder, &daemon, &program, &data);
    daemon.until("it reads", |r| r.files.iter().any(|f| f.reads > 0));
    daemon.process.signal(Signal::STOP);
    // One that ran already, and one that comes now.
    assert_eq!(run_command(&mut daemon.run(&read)).out, alone);
    assert_eq!(endless.end(), alone);
    daemon.process.signal(Signal::CONT);
    daemon.until("both are let go", |r| r.programs == 0 && r.files.iter().all(|f| f.open == 0));
    daemon.end();
}

#[test]
fn a_program_that_is_killed_is_let_go() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let mut read = reading(&program, &data, 1000);
    read.push(folder.at("never").to_str().unwrap().into());
    let mut command = Command::new(&read[0]);
    command.args(&read[1..]).env("LD_PRELOAD", crate::tools::library()).env("XDG_DATA_HOME", "/nowhere");
    let mut victim =
        Process::start_command(command.env("IMPRESARIO_ASSIST_SOCKET", &daemon.socket), &folder.at("victim.log"));
    daemon.until("it reads", |r| r.programs == 1 && r.files.iter().any(|f| f.reads > 0));
    victim.kill();
    daemon.until("it is let go", |r| r.programs == 0 && r.held_bytes == 0 && r.files.iter().all(|f| f.open == 0));
    daemon.end();
}

#[test]
fn other_users_are_served_only_when_everyone_is() {
    let folder = Folder::new();
    let Some(nobody) = Nobody::new(&folder) else { return };
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let hints = folder.hints("hints.json", &[&data]);
    let run = |daemon: &Daemon| {
        let mut command = nobody.command(["run", "--node", "--"]);
        command
            .env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS)
            .args(&read)
            .env("IMPRESARIO_ASSIST_SOCKET", &daemon.socket)
            .current_dir("/");
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
        run_command(nobody.command(["report", "--socket"]).arg(&daemon.socket).current_dir("/"))
    };
    let own = Daemon::start(&folder, &hints, &[]);
    let refused = run(&own);
    assert!(refused.code == 2 && refused.err.contains("Permission denied"), "{refused:?}");
    assert_eq!(own.report().programs_ever, 0);
    own.end();
    let everyone = Daemon::start(&folder, &hints, &["--everyone"]);
    // They are served, but the report names everyone's files: it is for the daemon's user.
    let refused = run(&everyone);
    assert!(refused.code == 2 && refused.err.contains("Permission denied"), "{refused:?}");
    let report = everyone.until("it is served", |r| r.files.iter().any(|f| f.reads == COUNT));
    assert_eq!((report.programs_ever, report.cut_off), (1, 0));
    everyone.end();
}

/// Many processes at once, and one with many open files.
fn crowd(processes: u64, files: u64) {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let many = try_compile(folder.path(), "many", &[]).unwrap();
    let dir = folder.at("files");
    std::fs::create_dir(&dir).unwrap();
    for i in 0..files {
        std::fs::write(dir.join(i.to_string()), vec![i as u8; 5000]).unwrap();
    }
    let hints = serde_json::json!({
        "File": [{ "Path": data, "BlockSize": 1 << 20, "WillNeed": [{}] }],
        "Directory": [{ "Path": dir, "BlockSize": 4096, "WillNeed": [{}] }],
        "StandDown": { "Trial": false },
        "Limits": { "FilesPerProgram": 100_000, "FilesPerUser": 100_000 },
    });
    let hints = folder.write("hints.json", hints.to_string());
    let daemon = Daemon::start(&folder, &hints, &[]);

    let read = reading(&program, &data, 0);
    let mut command = assist(["run", "--node", "--instances"]);
    command.arg(processes.to_string()).arg("--").args(&read).env("IMPRESARIO_ASSIST_SOCKET", &daemon.socket);
    command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    let ran = run_within(3 * PATIENCE, &mut command);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert_eq!(ran.out, plain(&read).repeat(processes as usize));
    let report = daemon.until("all are let go", |r| r.programs == 0);
    assert_eq!((report.programs_ever, report.cut_off), (processes, 0));
    assert_eq!(of(&report, &data).programs, processes);

    let words = [many.to_str().unwrap(), dir.to_str().unwrap(), &files.to_string()].map(String::from);
    let alone = run_command(Command::new(&words[0]).args(&words[1..]));
    if alone.code == 66 {
        return impresario_testing::skip(
            "open-files",
            format!("the limit of open files is below {files}: {}", alone.err.trim()),
        );
    }
    // A registration that finds the manager's queue full is repeated at the file's next use.
    let stop = folder.at("stop");
    let words = [&words[..], &[stop.to_str().unwrap().into()]].concat();
    let mut process = Process::start_command(&mut daemon.run(&words), &folder.at("many.out"));
    let open = |r: &Report| r.files.iter().map(|f| f.open).sum::<u64>();
    until("all files are known", || open(&daemon.report()) == files);
    std::fs::write(&stop, "").unwrap();
    assert!(process.wait().success(), "{}", process.log());
    assert_eq!(process.log(), alone.out);
    let report = daemon.until("all are let go", |r| r.programs == 0 && open(r) == 0);
    assert_eq!((report.total().programs, report.cut_off), (processes + files, 0));
    assert_eq!(report.held_bytes, 0);
    daemon.end();
}

#[test]
fn two_hundred_processes_and_five_thousand_files() {
    crowd(200, 5000);
}

#[test]
#[ignore = "takes a minute and much memory: make soak"]
fn a_thousand_processes_and_ten_thousand_files() {
    crowd(1000, 10_000);
}

#[test]
fn a_user_needs_to_name_no_socket() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let hints = folder.hints("hints.json", &[&data]);
    let mine = |command: &mut Command| run_command(command.env("XDG_RUNTIME_DIR", folder.path()));
    let mut command = assist(["daemon", "--config"]);
    command.arg(&hints).env("XDG_RUNTIME_DIR", folder.path());
    let daemon = Process::start_command(&mut command, &folder.at("daemon.log"));
    let socket = folder.path().join("impresario-assist.sock");
    until("it listens", || daemon.log().contains(socket.to_str().unwrap()));
    let read = reading(&program, &data, 0);
    let ran = mine(assist(["run", "--node", "--"]).args(&read).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS));
    assert_eq!((ran.code, ran.out), (0, plain(&read)), "{}", ran.err);
    until("it is reported", || mine(&mut assist(["report"])).out.contains("  64 reads by 1 programs"));
}

/// None of our processes may hold a program's standard output open, or a pipe behind it never ends.
#[test]
fn a_pipe_behind_a_program_ends() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let read = reading(&program, &data, 0);
    let mut child = daemon.run(&read).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut out, &mut text).map(|_| text)
    });
    until("the pipe ends", || reader.is_finished());
    assert_eq!(reader.join().unwrap().unwrap(), plain(&read));
    assert!(child.wait().unwrap().success());
    daemon.end();
}
