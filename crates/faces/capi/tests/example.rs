//! The example storage server: built as its Makefile does, with clients that verify every byte.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{Library, Reaped, root, sanitized, succeed, valgrind, wait};

/// Starts the server, runs clients at the same time, stops it by a signal; what it said at the end.
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
        eprintln!("the thread sanitizer does not run on this kernel: skipped");
    }
    // What it answers when it is started wrongly.
    let wrong = support::run(Command::new(&server).args(["/nowhere"]));
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("/nowhere"));
}
