//! Programs without the library, observed through the kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_testing::{is_root, require, skip};

use crate::support::{Process, run_command};
use crate::tools::{COUNT, Daemon, Folder, Nobody, assist, forget, of, plain, reading, try_compile};

const TRACEFS: &str = "/sys/kernel/tracing";

/// The kernel's release: its first two numbers.
fn kernel() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// A static program reads a file of a watched directory until the manager knows of it.
fn watched(how: &str) {
    let folder = Folder::new();
    let dir = folder.at("dir");
    std::fs::create_dir(&dir).unwrap();
    let data = dir.join("data");
    std::fs::rename(folder.data("data"), &data).unwrap();
    let program = try_compile(folder.path(), "strided", &["-static"]).unwrap_or_else(|| {
        eprintln!("there is no static C library; a dynamic program without our library is used");
        folder.strided()
    });
    let alone = plain(&reading(&program, &data, 0));
    forget(&data);
    let hints = serde_json::json!({ "Directory": [{ "Path": dir, "BlockSize": 1 << 20, "WillNeed": [{}] }] });
    let daemon = Daemon::start(&folder, &folder.write("hints.json", hints.to_string()), &[how]);
    assert!(daemon.process.log().contains("Watching 1 files."), "{}", daemon.process.log());
    let stop = folder.at("stop");
    let mut words = reading(&program, &data, 1000);
    words.push(stop.to_str().unwrap().into());
    let start = || Process::start_command(Command::new(&words[0]).args(&words[1..]), &folder.at("out"));
    let mut process = start();
    let seen = |file: &impresario_assist::report::FileReport| file.reads >= COUNT && file.prefetched_bytes > 0;
    let report = daemon.until("the program is seen", |r| r.files.iter().any(seen));
    let file = of(&report, &data);
    assert!(file.entry == "Directory[0]" && file.hints > 0, "{file:?}");
    std::fs::write(&stop, "").unwrap();
    assert!(process.wait().success(), "{}", process.log());
    assert_eq!(process.log(), alone);

    // Killed in mid-run: the program continues, and the next manager cleans up.
    std::fs::remove_file(&stop).unwrap();
    std::fs::remove_file(folder.at("out")).unwrap();
    let mut process = start();
    let reads = of(&daemon.report(), &data).reads;
    daemon.until("it is seen again", |r| of(r, &data).reads > reads);
    let instance = |pid: u32| -> PathBuf { Path::new(TRACEFS).join(format!("instances/impresario-{pid}")) };
    let mut daemon = daemon;
    let killed = daemon.process.pid();
    daemon.process.kill();
    let daemon = Daemon::start(&folder, &folder.at("hints.json"), &[how]);
    daemon.until("it is seen by the next one", |r| r.files.iter().any(seen));
    assert!(!instance(killed).exists(), "the trace of a killed manager stays behind");
    std::fs::write(&stop, "").unwrap();
    assert!(process.wait().success(), "{}", process.log());
    assert_eq!(process.log(), alone);
    let pid = daemon.process.pid();
    daemon.end();
    assert!(!instance(pid).exists(), "the trace stays behind");
}

/// Whether the kernel traces reads here, or why not.
pub fn can_trace() -> Result<(), String> {
    if !Path::new(TRACEFS).join("instances").is_dir() {
        return Err("tracefs is not mounted".into());
    }
    if !Path::new(TRACEFS).join("events/filemap/mm_filemap_get_pages").exists() {
        return Err("this kernel does not trace reads of the page cache (Linux 6.11 does)".into());
    }
    Ok(())
}

/// Whether the kernel tells of accesses to files of this folder before they are made, or why not.
pub fn can_precede(folder: &Folder) -> Result<(), String> {
    if kernel() < (6, 14) {
        return Err("events before each access need Linux 6.14".into());
    }
    let kind = run_command(Command::new("stat").args(["-f", "-c", "%T"]).arg(folder.path())).out;
    if !["ext2/ext3", "xfs", "btrfs"].contains(&kind.trim()) {
        return Err(format!("the folder for temporary files lies on {}, not on ext4, xfs or btrfs", kind.trim()));
    }
    Ok(())
}

#[test]
fn through_the_trace_of_the_page_cache() {
    if !require("root") {
        return;
    }
    match can_trace() {
        Ok(()) => watched("--watch"),
        Err(why) => skip("tracefs", why),
    }
}

#[test]
fn before_each_access() {
    if !require("root") {
        return;
    }
    match can_precede(&Folder::new()) {
        Ok(()) => watched("--watch-before"),
        Err(why) => skip("fanotify", why),
    }
}

#[test]
fn refused_to_users_without_rights() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    let nobody = if is_root() { Nobody::new(&folder) } else { None };
    if is_root() && nobody.is_none() {
        return;
    }
    for how in ["--watch", "--watch-before"] {
        let mut command = match &nobody {
            Some(nobody) => nobody.command(["daemon", "--config"]),
            None => assist(["daemon", "--config"]),
        };
        let mine = tempfile::Builder::new().prefix("ia-").tempdir().unwrap();
        if is_root() {
            std::os::unix::fs::chown(mine.path(), Some(65534), None).unwrap();
        }
        let socket = mine.path().join("s");
        let ran = run_command(command.arg(&hints).arg("--socket").arg(&socket).arg(how).current_dir("/"));
        assert!(ran.code == 1 && ran.err.contains("needs root"), "{ran:?}");
        assert!(!socket.exists() && !socket.with_extension("report").exists(), "sockets stay behind");
    }
}
