//! `libagios` as seen by programs written for AGIOS, in its three generations.

#[path = "../../capi/tests/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_trace::{Ending, FileInfo, Trace, TraceOp, key_of_name};
use support::{Library, declared, exported, root, run, sanitized, succeed, valgrind};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

fn header() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/agios.h")).unwrap()
}

/// A program in its library's folder, so that its files lie there.
fn at(library: &Library, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(library.dir.path());
    command
}

#[test]
fn the_header_is_c99_and_cplusplus_in_every_generation() {
    let library = Library::find("agios");
    for api in ["1", "2", "3"] {
        let args = if api == "1" { "0, 0, 0" } else { "0, 0, 0, 0" };
        let text = format!(
            "#define AGIOS_API {api}\n#include <agios.h>\nint main(void) {{ agios_exit(); return agios_init({args}) ? 0 : 1; }}"
        );
        for (compiler, standard, name) in [("cc", "-std=c99", "h.c"), ("c++", "-std=c++11", "h.cc")] {
            let file = library.dir.path().join(format!("{api}{name}"));
            std::fs::write(&file, &text).unwrap();
            library.compile(compiler, "header", &file, &[standard, "-pedantic-errors"]);
        }
    }
}

#[test]
fn sources_of_every_public_version_compile_and_run() {
    let library = Library::find("agios");
    let cpp = library.dir.path().join("sources.cc");
    std::fs::copy(source("sources.c"), &cpp).unwrap();
    for api in ["1", "2", "3"] {
        let define = format!("-DAGIOS_API={api}");
        for (compiler, standard, file) in [("cc", "-std=gnu99", &source("sources.c")), ("c++", "-std=gnu++11", &cpp)] {
            let program = library.compile(compiler, "sources", file, &[standard, &define]);
            succeed(&mut at(&library, &program));
        }
    }
}

/// The output and results of a program built for one public version, run with the library of another.
fn swapped(version: &str, built: &Library, found: &Library) -> (Option<i32>, String) {
    std::fs::write(built.dir.path().join("agios.conf"), "library_options: { trace = false };").unwrap();
    let define = format!("-DGENERATION={version}");
    let mut flags = vec!["-std=gnu11", "-Wno-discarded-qualifiers", "-Wl,-z,lazy"];
    flags.extend(define.split(' '));
    let program = built.compile("cc", "public", &source("public.c"), &flags);
    // Whatever name the program requests, the loader finds this library.
    let folder = tempfile::tempdir().unwrap();
    for soname in ["libagios.so.1", "libagios.so.2", "libagios.so.3"] {
        std::os::unix::fs::symlink(found.so(), folder.path().join(soname)).unwrap();
    }
    let output = run(at(built, &program).env("LD_LIBRARY_PATH", folder.path()));
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Programs that use the plain names are served by the library of their version; the other libraries tell them what
/// they need.
#[test]
fn each_version_has_its_library_and_the_wrong_one_says_so() {
    let [one, two, three] = ["agios1", "agios", "agios3"].map(Library::find);
    for (library, soname) in [(&one, "libagios.so.1"), (&two, "libagios.so.2"), (&three, "libagios.so.3")] {
        let text = succeed(Command::new("readelf").arg("-d").arg(library.so()));
        assert!(text.contains(&format!("[{soname}]")), "{text}");
    }
    for (version, library) in [("1", &one), ("2", &two), ("3", &three), ("30", &three)] {
        assert_eq!(swapped(version, library, library), (Some(0), String::new()), "version {version}");
    }
    for (version, built, found, wants) in [
        ("1", &one, &two, "libagios.so.1"),
        ("1", &one, &three, "libagios.so.1"),
        ("2", &two, &one, "libagios.so.2"),
        ("3", &three, &two, "libagios.so.3"),
        ("30", &three, &two, "libagios.so.3"),
    ] {
        let (code, said) = swapped(version, built, found);
        assert!(code == Some(3) && said.lines().count() == 1 && said.contains(wants), "{version}: {code:?} {said}");
    }
    // In the place of version 3's callback a program of version 2 has whatever lies on its stack: code seldom, nothing sometimes,
    // and then the callback of init serves it.
    let (code, said) = swapped("2", &two, &three);
    assert!(code == Some(4) && said.contains("libagios.so.2") || code == Some(0) && said.is_empty(), "{code:?} {said}");
    // Version 3 may start without callbacks, where version 1 has a client: the failure is one to a bool, too.
    for version in ["3", "30"] {
        let (code, said) = swapped(version, &three, &one);
        assert!(
            code == Some(3) && said.lines().count() == 1 && said.contains("libagios.so.3"),
            "{version}: {code:?} {said}"
        );
    }
    // Without any argument it cannot be told from a program of version 1 that forgot its client, to which 0 were a success.
    let (code, said) = swapped("3 -DCONFIG=NULL -DPATIENCE_MS=100", &three, &one);
    let first = said.lines().next().unwrap_or_default();
    assert!(code == Some(5) && first.contains("client") && first.contains("libagios.so.3"), "{code:?} {said}");
}

/// The libraries export exactly what the header declares.
#[test]
fn exactly_the_documented_functions_are_exported() {
    let library = Library::find("agios");
    let header = header();
    let mut documented = declared(&header, "agios_");
    documented.retain(|name| {
        !["agios_print_stats_file", "agios_reset_stats", "agios_set_stripe_size"].contains(&name.as_str())
    });
    let renamed = header.lines().filter_map(|l| l.strip_prefix("#define agios_")).filter_map(|l| l.split(' ').nth(1));
    documented.extend(renamed.filter(|name| name.starts_with("agios_v")).map(String::from));
    documented.sort();
    documented.dedup();
    assert_eq!(exported(&library.so()), documented);
    assert!(documented.contains(&"agios_v3_add_request".into()), "{documented:?}");
}

#[test]
fn the_current_interface_works_without_the_known_defects() {
    let library = Library::find("agios");
    let program = library.compile("cc", "version2", &source("version2.c"), &["-std=gnu11"]);
    succeed(&mut at(&library, &program));
    for run in 1..=2 {
        let trace = Trace::load(library.dir.path().join(format!("trace.{run}.imt"))).unwrap();
        let seen = trace.records.iter().map(|r| (trace.file(r.file), r.op, r.offset, r.len, r.duration.is_some()));
        let file = |name: &str| FileInfo { path: name.into(), key: key_of_name(name.as_bytes()), size_bytes: None };
        let (a, b) = (file("file a"), file("file b"));
        assert_eq!(
            seen.collect::<Vec<_>>(),
            [(&a, TraceOp::Read, 7, 5, true), (&b, TraceOp::Write, 1, 2, true)],
            "with names, stable keys and completions"
        );
        assert_eq!(trace.ending, Ending::Closed);
    }
    for case in ["twins", "forked"] {
        succeed(at(&library, &program).arg(case));
    }
    let misused = run(at(&library, &program).arg("misused"));
    let said = String::from_utf8_lossy(&misused.stderr);
    assert!(misused.status.success(), "{said}");
    assert_eq!(said.lines().count(), 200, "100 for the one init, and 100 before it: {said}");
    assert_eq!(said.matches("further lines are suppressed").count(), 2, "{said}");
    if let Some(mut command) = valgrind(&program) {
        let cases = [
            "before_and_after",
            "order",
            "cancelling",
            "overlaps",
            "in_flight",
            "trace",
            "threads",
            "noop",
            "exit_delivers",
        ];
        succeed(command.current_dir(library.dir.path()).args(cases));
    }
    let tsan = library.compile("cc", "version2-tsan", &source("version2.c"), &["-std=gnu11", "-fsanitize=thread"]);
    let probe = run(sanitized(&tsan).arg("no such case"));
    if String::from_utf8_lossy(&probe.stderr).contains("unexpected memory mapping") {
        impresario_testing::skip("tsan", "the thread sanitizer does not run on this kernel");
    } else {
        succeed(sanitized(&tsan).current_dir(library.dir.path()));
    }
}

/// Algorithms with a configuration under which 64 files, 4 queues and 500 waiting requests are served.
const ALGORITHMS: [&str; 13] =
    ["TO", "FIFO", "SJF", "MLF", "aIOLi", "TO-agg", "SW", "WFQ", "TWINS", "NOOP", "HBRR", "SRTF", "auto"];

/// `costs.c` with an algorithm, in a folder of its own.
fn costs(program: &Path, what: &str, algorithm: &str) -> (Command, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    let config = format!("default_algorithm = \"{algorithm}\"; wfq_conf = \"weights.conf\"");
    command.args([what, &config]).current_dir(folder.path());
    (command, folder)
}

/// A library without requests uses nothing: its threads neither run nor wake, before and after a load.
#[test]
fn idle_threads_sleep() {
    let library = Library::find("agios");
    let program = library.compile("cc", "costs", &source("costs.c"), &["-std=gnu11"]);
    std::thread::scope(|scope| {
        for algorithm in ALGORITHMS {
            let program = &program;
            scope.spawn(move || {
                let (mut command, _folder) = costs(program, "idle", algorithm);
                let output = run(&mut command);
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{algorithm}: {said}");
            });
        }
    });
}

/// In a steady state a request costs no allocation. Where a policy takes a file's last requests, the file's sets are made
/// anew with the next ones: seldom, but under `auto`, which takes whole files.
#[test]
fn requests_cost_no_allocation() {
    let library = Library::find("agios");
    let program = library.compile("cc", "costs", &source("costs.c"), &["-std=gnu11"]);
    for algorithm in ALGORITHMS {
        let (mut command, _folder) = costs(&program, "steady", algorithm);
        let allocations: u32 = succeed(&mut command).trim().parse().unwrap();
        let most = if algorithm == "auto" { 20_000 } else { 400 };
        assert!(allocations <= most, "{algorithm}: {allocations} allocations for 20,000 requests");
    }
}

#[test]
fn the_later_and_the_oldest_interface_work() {
    for name in ["version3", "version1"] {
        let library = Library::find("agios");
        let program = library.compile("cc", name, &source(&format!("{name}.c")), &["-std=gnu11"]);
        assert_eq!(succeed(&mut at(&library, &program)), "ok\n", "{name}");
        if let Some(mut command) = valgrind(&program) {
            succeed(command.current_dir(library.dir.path()));
        }
    }
}

/// Starts the library with a configuration and says what it answered.
fn start_with(library: &Library, program: &Path, config: Option<&str>) -> (bool, String) {
    let file = library.dir.path().join("c.conf");
    match config {
        Some(text) => std::fs::write(&file, text).unwrap(),
        None => drop(std::fs::remove_file(&file)),
    }
    let output = run(at(library, program).arg(&file));
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn configurations_warn_or_are_refused_in_one_line() {
    let library = Library::find("agios");
    let text = "#include <agios.h>\n#include <stddef.h>\nstatic void *f(int64_t i) { (void)i; return NULL; }\n\
                int main(int n, char **v) { (void)n; int ok = agios_init(f, NULL, v[1], 0); agios_exit(); return ok ? 0 : 1; }";
    let file = library.dir.path().join("start.c");
    std::fs::write(&file, text).unwrap();
    let program = library.compile("cc", "start", &file, &["-std=c99"]);
    let (ok, said) = start_with(&library, &program, None);
    assert!(ok && said.lines().count() == 1 && said.contains("c.conf") && said.contains("defaults"), "{said}");
    let (ok, said) = start_with(&library, &program, Some("library_options: { frobnicate = 3 ; trace = false };"));
    assert!(ok && said.lines().count() == 1 && said.contains("frobnicate"), "{said}");
    let (ok, said) = start_with(&library, &program, Some("library_options: { trace = false };"));
    assert!(ok && said.is_empty(), "{said}");
    for bad in [
        "library_options: {",
        "library_options: { twins_window = \"x\" }",
        "library_options: { default_algorithm = \"?\" }",
    ] {
        let (ok, said) = start_with(&library, &program, Some(bad));
        assert!(!ok && said.lines().count() == 1 && said.contains("c.conf line"), "{bad}: {said}");
    }
}

/// When lines cannot be printed, calls still return: stderr is full, and the configuration is a device that never ends.
#[test]
fn a_full_stderr_is_no_reason_to_fail() {
    let library = Library::find("agios");
    let text = "#include <agios.h>\n#include <stddef.h>\nstatic void *f(int64_t i) { (void)i; return NULL; }\n\
                int main(void) { char z[] = \"/dev/zero\", n[] = \"/nonexistent.conf\";\n\
                int wrong = agios_init(NULL, NULL, NULL, 0) + 2 * agios_init(f, NULL, z, 0) +\n\
                4 * agios_add_request(n, 0, 0, 1, 1, 0) + 8 * !agios_init(f, NULL, n, 0) +\n\
                16 * agios_add_request(n, 5, 0, 1, 1, 0) + 32 * !agios_add_request(n, 0, 0, 1, 1, 0);\n\
                agios_exit(); return wrong; }";
    let file = library.dir.path().join("full.c");
    std::fs::write(&file, text).unwrap();
    let program = library.compile("cc", "full", &file, &["-std=c99"]);
    let shell = format!("exec {} 2>/dev/full", program.display());
    succeed(Command::new("sh").args(["-c", &shell]));
}

#[test]
fn the_example_copies() {
    let library = Library::find("agios");
    let program = library.compile("cc", "copy", &root().join("examples/agios/copy.c"), &["-std=gnu99"]);
    let from: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(library.dir.path().join("from"), &from).unwrap();
    let said = succeed(at(&library, &program).args(["from", "to"]));
    assert!(said.starts_with("copied 46 blocks in "), "{said}");
    assert!(std::fs::read(library.dir.path().join("to")).unwrap() == from);
    std::fs::write(library.dir.path().join("from"), "").unwrap();
    assert!(succeed(at(&library, &program).args(["from", "to"])).starts_with("copied 0 blocks"));
}
