//! The example storage server: built as its Makefile does, with clients that verify every byte.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{self, Library, Reaped, root, sanitized, succeed, valgrind, wait};

/// Starts the server, runs clients at the same time, stops it by a signal; returns its last output.
fn serve(mut server: Command, client: &Path, clients: u32, requests: u32) -> String {
    let folder = tempfile::tempdir().unwrap();
    server.arg(folder.path()).args(["0", "mlf"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut server = Reaped(server.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let port = first.strip_prefix("port ").unwrap_or_else(|| panic!("{first}"));
    std::thread::scope(|s| {
        for number in 0..clients {
            s.spawn(move || {
                let len = if number % 2 == 0 { 8192 } else { 3000 };
                let args = [port, &number.to_string(), &requests.to_string(), &len.to_string()];
                let said = succeed(Command::new(client).args(args));
                assert!(said.contains("verified"), "{said}");
            });
        }
    });
    succeed(Command::new("kill").args(["-TERM", &server.0.id().to_string()]));
    let status = wait(&mut server.0, Duration::from_secs(30)).expect("the server ends");
    assert!(status.success(), "{status}");
    lines.next().unwrap().unwrap()
}

#[test]
fn the_example_server_serves_and_ends_cleanly() {
    let library = Library::find("impresario");
    let example = root().join("examples/server");
    let server = library.compile("cc", "server", &example.join("server.c"), &["-std=gnu99"]);
    let client = library.compile("cc", "client", &example.join("client.c"), &["-std=gnu99"]);
    let said = serve(Command::new(&server), &client, 4, 300);
    // Each client wrote and read 300 blocks, synced and removed its file.
    assert!(said.starts_with("served 2408 requests in "), "{said}");
    if let Some(command) = valgrind(&server) {
        assert!(serve(command, &client, 3, 40).starts_with("served 246 requests"));
    }
    let tsan = library.compile("cc", "server-tsan", &example.join("server.c"), &["-std=gnu99", "-fsanitize=thread"]);
    let probe = sanitized(&tsan).stderr(Stdio::null()).status().unwrap();
    if probe.code() == Some(2) {
        assert!(serve(sanitized(&tsan), &client, 4, 100).starts_with("served 808 requests"));
    } else {
        impresario_testing::skip("tsan", "the thread sanitizer does not run on this kernel");
    }
    // Its messages on wrong arguments.
    let wrong = support::run(Command::new(&server).args(["/nowhere"]));
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("/nowhere"));
}

/// A client that sends requests and reads no replies is disconnected, and the server ends.
#[test]
fn a_client_that_does_not_listen_holds_nobody_up_for_ever() {
    let library = Library::find("impresario");
    let server = library.compile("cc", "server", &root().join("examples/server/server.c"), &["-std=gnu99"]);
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(server);
    command.arg(folder.path()).args(["0", "mlf"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut server = Reaped(command.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let port: u16 = lines.next().unwrap().unwrap().strip_prefix("port ").unwrap().parse().unwrap();
    let mut socket = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let ask = |op: u32, tag: u64| {
        let mut bytes = Vec::new();
        [op, 1 << 20].iter().for_each(|n| bytes.extend(n.to_ne_bytes()));
        [7u64, 0, tag].iter().for_each(|n| bytes.extend(n.to_ne_bytes()));
        bytes
    };
    socket.write_all(&ask(1, 0)).unwrap();
    socket.write_all(&vec![1; 1 << 20]).unwrap();
    (1..64).for_each(|tag| socket.write_all(&ask(0, tag)).unwrap());
    std::thread::sleep(Duration::from_millis(300));
    succeed(Command::new("kill").args(["-TERM", &server.0.id().to_string()]));
    let status = wait(&mut server.0, Duration::from_secs(30)).expect("the server ends");
    assert!(status.success(), "{status}");
}

/// The tree that `make install` writes works with pkg-config, make and man.
#[test]
fn an_installed_library_builds_the_example() {
    let library = Library::find("impresario");
    let built = std::fs::read_link(library.so()).unwrap();
    let prefix = library.dir.path().join("prefix");
    let script = |action: &str| {
        let mut command = Command::new(root().join("scripts/install-libs.sh"));
        command.env("VERSION", env!("CARGO_PKG_VERSION")).env("SO", "0").arg(action);
        command.arg(built.parent().unwrap()).arg("").arg(&prefix).arg(prefix.join("lib")).arg("impresario");
        succeed(&mut command);
    };
    script("install");
    let out = library.dir.path().join("example");
    succeed(Command::new("cp").arg("-r").arg(root().join("examples/server")).arg(&out));
    let mut make = Command::new("make");
    succeed(make.arg("-C").arg(&out).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).env_remove("MAKEFLAGS"));
    let wrong =
        support::run(Command::new(out.join("server")).arg("/nowhere").env("LD_LIBRARY_PATH", prefix.join("lib")));
    assert_eq!(wrong.status.code(), Some(1), "{}", String::from_utf8_lossy(&wrong.stderr));
    let nbd = library.dir.path().join("nbd-example");
    succeed(Command::new("cp").arg("-r").arg(root().join("examples/nbd")).arg(&nbd));
    let mut make = Command::new("make");
    succeed(make.arg("-C").arg(&nbd).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).env_remove("MAKEFLAGS"));
    // The program of doc/EMBEDDING.md as well.
    let text = std::fs::read_to_string(root().join("doc/EMBEDDING.md")).unwrap();
    let code = text.split("```c\n").nth(1).unwrap().split("```").next().unwrap();
    std::fs::write(out.join("hello.c"), code).unwrap();
    let hello = library.compile("cc", "hello", &out.join("hello.c"), &["-std=gnu99"]);
    let said = succeed(&mut Command::new(hello));
    let requests: u32 = said.lines().map(|l| l.split(' ').next().unwrap().parse::<u32>().unwrap()).sum();
    assert_eq!(requests, 100, "{said}");
    script("uninstall");
    let left = succeed(Command::new("find").arg(&prefix).args(["-not", "-type", "d"]));
    assert_eq!(left, "");
}

/// Every function of the headers has a manual page, and the pages render.
#[test]
fn every_function_has_a_manual_page() {
    let pages: Vec<_> = std::fs::read_dir(root().join("doc/man")).unwrap().map(|e| e.unwrap().path()).collect();
    let text: String = pages.iter().map(|p| std::fs::read_to_string(p).unwrap()).collect();
    for (header, prefix) in [("capi/include/impresario.h", "impresario_"), ("agios/include/agios.h", "agios_")] {
        let header = std::fs::read_to_string(root().join("crates/faces").join(header)).unwrap();
        for name in support::declared(&header, prefix) {
            // Behind the names of versions of AGIOS's interface are those that their programs use.
            let name = name.replace("_v1_", "_").replace("_v3_", "_").replace("_without_argument", "");
            assert!(text.lines().any(|l| l.trim_end_matches(" ,") == format!(".Nm {name}")), "{name} has no page");
        }
    }
    if !impresario_testing::require("man") {
        return;
    }
    for page in pages {
        let mut man = Command::new("man");
        let output = support::run(man.args(["--warnings", "-Tutf8", "-l"]).arg(&page).env("LC_ALL", "C.UTF-8"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.is_empty(), "{page:?}: {said}");
        assert!(output.stdout.len() > 500, "{page:?}");
    }
}
