//! A server of XRootD under guided I/O: what its clients read is seen as the server's own reads, and brought in ahead of them.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::Report;
use impresario_testing::{free_ports, is_root, require, skip, until};
use rustix::process::Signal;

use crate::support::{Process, run_command};
use crate::tools::{COUNT, Folder, Nobody, PIECE, STRIDE, assist, forget, of, plain, reading};

/// XRootD's library that lets programs open `root://` as if it were a path.
fn client_library() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    folders.chain([PathBuf::from("/usr/lib64")]).map(|f| f.join("libXrdPosixPreload.so")).find(|p| p.exists())
}

/// A server of the files of a folder, under `assist run`. It refuses to be root.
struct Server {
    process: Process,
    address: String,
}

impl Server {
    fn start(folder: &Folder, nobody: Option<&Nobody>, more: &[&Path]) -> Server {
        let [port] = free_ports(1)[..] else { unreachable!() };
        let own = folder.at("own");
        let _ = std::fs::remove_dir_all(&own);
        std::fs::create_dir(&own).unwrap();
        std::fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
        let lines = [
            format!("xrd.port {port}"),
            "xrd.network nodnr".into(),
            "all.export / r/o".into(),
            format!("oss.localroot {}", folder.at("").display()),
            format!("all.adminpath {}", own.display()),
            format!("all.pidpath {}", own.display()),
        ];
        let config = folder.write("xrootd.cf", lines.join("\n") + "\n");
        let mut command = match nobody {
            Some(nobody) => nobody.command(["run"]),
            None => assist(["run"]),
        };
        command.env("IMPRESARIO_ASSIST_WAIT_MS", crate::tools::WAIT_MS).current_dir(&own);
        command.args(more).arg("--report").arg(own.join("report.json"));
        command.args(["--", "xrootd", "-c"]).arg(config);
        let log = own.join("log");
        let mut process = Process::start_command(&mut command, &log);
        until("the server of XRootD is up", || {
            let ended = process.child.try_wait().unwrap();
            assert!(ended.is_none(), "it ended with {ended:?}: {}", process.log());
            process.log().contains("initialization completed")
        });
        Server { process, address: format!("root://127.0.0.1:{port}/") }
    }

    /// Ends it, and gives the report of the run.
    fn end(mut self, folder: &Folder) -> Report {
        self.process.signal(Signal::TERM);
        self.process.wait();
        let report = std::fs::read(folder.at("own/report.json"));
        let report = report.unwrap_or_else(|e| panic!("no report ({e}): {}", self.process.log()));
        serde_json::from_slice(&report).unwrap()
    }
}

#[test]
fn what_a_server_of_xrootd_reads_for_its_clients_is_guided() {
    if !require("xrootd") || !require("xrdcp") {
        return;
    }
    let Some(client) = client_library() else {
        return skip("xrootd-client", "libXrdPosixPreload.so is not installed");
    };
    let folder = Folder::new();
    let nobody = if is_root() { Nobody::new(&folder) } else { None };
    if is_root() && nobody.is_none() {
        return;
    }
    let (program, data) = (folder.strided(), folder.data("data"));
    let alone = plain(&reading(&program, &data, 0));
    let hints = folder.hints("hints.json", &[&data]);
    for (more, entry) in [(&[hints.as_path()][..], "File[0]"), (&[], "Directory[0]")] {
        forget(&data);
        let server = Server::start(&folder, nobody.as_ref(), more);
        // A program that reads in strides, and one that copies all of it.
        let remote = PathBuf::from(format!("{}/data", server.address));
        let words = reading(&program, &remote, 2000);
        let read = run_command(Command::new(&words[0]).args(&words[1..]).env("LD_PRELOAD", &client));
        assert_eq!((read.code, read.out.as_str()), (0, alone.as_str()), "{}", read.err);
        let copy = folder.at("copy");
        let copied = run_command(Command::new("xrdcp").args(["-f", "-s"]).arg(&remote).arg(&copy));
        assert_eq!(copied.code, 0, "{}", copied.err);
        assert!(std::fs::read(&copy).unwrap() == std::fs::read(&data).unwrap(), "the copy is another file");
        let report = server.end(&folder);
        let file = of(&report, &data);
        assert_eq!(file.entry, entry);
        assert!(file.reads >= COUNT && file.read_bytes == COUNT * (PIECE + STRIDE), "{file:?}");
        if entry == "File[0]" {
            assert!(file.prefetched_bytes > 0 && file.used_bytes > 0 && file.errors == 0, "{file:?}");
        }
    }
}
