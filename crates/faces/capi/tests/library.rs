//! `libimpresario` as C programs see it: compiled by the system's compilers, run natively, under valgrind and with the
//! thread sanitizer.

#[allow(unused_imports)]
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Library, declared, exported, run, sanitized, succeed, valgrind};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

fn behave(library: &Library) -> PathBuf {
    library.compile("cc", "behave", &source("behave.c"), &["-std=gnu11"])
}

#[test]
fn the_header_is_c99_and_cplusplus() {
    let library = Library::find("impresario");
    let file = |name: &str, text: &str| {
        let path = library.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let c = "#include <impresario.h>\nint main(void) { impresario_options_t o = IMPRESARIO_OPTIONS_INIT;\n\
             impresario_submission_t s = IMPRESARIO_SUBMISSION_INIT; impresario_t *i = impresario_create(&o);\n\
             return i && s.size && impresario_destroy(i, 0, 0, 0) == 0 ? 0 : 1; }\n";
    let cpp = c.replace("(void)", "()");
    let strict = ["-pedantic-errors", "-Wconversion", "-Wmissing-field-initializers"];
    for (compiler, standard, file) in [
        ("cc", "-std=c99", file("h.c", c)),
        ("cc", "-std=c17", file("h17.c", c)),
        ("c++", "-std=c++11", file("h.cc", &cpp)),
        ("c++", "-std=c++20", file("h20.cc", &cpp)),
    ] {
        let program = library.compile(compiler, "header", &file, &[&[standard], &strict[..]].concat());
        succeed(&mut Command::new(program));
    }
}

/// The library exports exactly what the header declares.
#[test]
fn exactly_the_documented_functions_are_exported() {
    let library = Library::find("impresario");
    let header = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/impresario.h")).unwrap();
    let documented = declared(&header, "impresario_");
    assert!(documented.len() > 20, "{documented:?}");
    assert_eq!(exported(&library.so()), documented);
    let soname = succeed(Command::new("readelf").arg("-d").arg(library.so()));
    assert!(soname.contains("libimpresario.so.0"), "{soname}");
}

#[test]
fn wrong_calls_are_errors_with_a_line_of_text() {
    let library = Library::find("impresario");
    let program = library.compile("cc", "misuse", &source("misuse.c"), &["-std=gnu11"]);
    assert_eq!(succeed(&mut Command::new(&program)), "ok\n");
    if let Some(mut command) = valgrind(&program) {
        succeed(&mut command);
    }
}

#[test]
fn the_library_keeps_its_promises() {
    let library = Library::find("impresario");
    let program = behave(&library);
    succeed(&mut Command::new(&program));
    for case in ["fork", "destroy_with_blocked_callback"] {
        succeed(Command::new(&program).arg(case));
    }
}

#[test]
fn nothing_goes_wrong_at_the_edges() {
    let library = Library::find("impresario");
    let program = library.compile("cc", "edges", &source("edges.c"), &["-std=gnu11"]);
    assert_eq!(succeed(&mut Command::new(&program)), "ok\n");
    if let Some(mut command) = valgrind(&program) {
        succeed(&mut command);
    }
}

#[test]
fn an_idle_scheduler_costs_nothing() {
    let library = Library::find("impresario");
    succeed(Command::new(behave(&library)).arg("idle"));
}

#[test]
fn valgrind_finds_nothing() {
    let library = Library::find("impresario");
    if let Some(mut command) = valgrind(&behave(&library)) {
        let quick = ["one_by_one", "batches", "poll", "poll_ends", "cancel", "inline", "full", "tokens_come_back"];
        let more = [
            "several_schedulers",
            "policies",
            "configured",
            "destroy_in_callback",
            "read_ahead_taken_back",
            "recorded_runs",
        ];
        succeed(command.args(quick).args(more));
    }
}

/// The sanitizer watches the program's own accesses. It does not see into the library, which is not instrumented, so
/// the library's synchronisation does not order accesses for it. The program's shared data are atomics or under its own
/// locks, and the run shows that callbacks and calls of many threads need nothing more.
#[test]
fn the_thread_sanitizer_finds_nothing() {
    let library = Library::find("impresario");
    let program = library.compile("cc", "behave-tsan", &source("behave.c"), &["-std=gnu11", "-fsanitize=thread"]);
    let probe = run(sanitized(&program).arg("ready"));
    if !probe.status.success() && String::from_utf8_lossy(&probe.stderr).contains("unexpected memory mapping") {
        impresario_testing::skip("tsan", "the thread sanitizer does not run on this kernel");
        return;
    }
    succeed(&mut sanitized(&program));
}

/// The static library serves a program without the shared one.
#[test]
fn the_static_library_links() {
    let library = Library::find("impresario");
    let so = std::fs::read_link(library.so()).unwrap();
    let program = library.dir.path().join("static");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-pthread", "-o"]).arg(&program).arg(source("misuse.c"));
    cc.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
    cc.arg(so.with_extension("a")).args(["-lm", "-ldl"]);
    succeed(&mut cc);
    assert_eq!(succeed(&mut Command::new(program)), "ok\n");
}
