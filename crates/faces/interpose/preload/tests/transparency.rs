//! Real programs behave as without the library, byte for byte: with no manager, one that records, one that is stopped,
//! one that is killed in mid-run and one that comes back.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::programs::{Reaped, wait};
use crate::support::{Manager, compile, library, preloaded, run};
use impresario_ring::message::{Mode, register};
use impresario_ring::{Op, SLOTS};
use impresario_testing::until;

/// Scripts for `sh -c` in a folder with data; `$1` is an empty folder for what they make.
const PROGRAMS: [(&str, &str); 9] = [
    (
        "python3",
        "python3 -c 'import hashlib,os,subprocess,mmap,shutil\nfor n in sorted(filter(os.path.isfile,os.listdir(\".\"))):\n b=open(n,\"rb\").read(); print(n,len(b),hashlib.sha1(b).hexdigest())\nprint(subprocess.run([\"cat\",\"text\"],capture_output=True,close_fds=True).stdout[:50])\nf=open(\"bytes\",\"rb\"); m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ); print(m[99:110]); shutil.copyfile(\"bytes\",\"'$1'/c\")\nprint(sum(1 for _ in open(\"text\")))'; cmp bytes $1/c",
    ),
    (
        "tar",
        "tar -cf $1/a.tar --sort=name . && tar -xf $1/a.tar -C $1 && cksum < $1/bytes && tar -tvf $1/a.tar | wc -l",
    ),
    (
        "git",
        "cd $1 && git init -q r && cd r && cp ../../text ../../bytes . && git add . && git -c user.name=a -c user.email=a@b.c -c commit.gpgsign=false commit -q -m m --date 2020-01-01T00:00:00Z && git ls-files -s && git fsck --strict && git clone -q . ../s && git -C ../s log --format=%T && git gc -q && git -C ../s diff --stat",
    ),
    (
        "sqlite3",
        "sqlite3 $1/db \"create table t(a,b); with recursive c(x) as (select 1 union all select x+1 from c where x<5000) insert into t select x, x*x from c; create index i on t(b); select count(*), sum(b) from t where b>100; pragma integrity_check;\" && sqlite3 $1/db 'select * from t where a%1000=0'",
    ),
    (
        "gcc",
        "printf '#include <stdio.h>\\nint main(void){puts(\"made\");return 3;}\\n' > $1/m.c && gcc -O1 -o $1/m $1/m.c && $1/m; echo $?",
    ),
    (
        "java",
        "cd $1 && printf 'public class M { public static void main(String[] a) throws Exception { System.out.println(java.nio.file.Files.readAllBytes(java.nio.file.Path.of(\"../bytes\")).length); System.out.println(new java.util.Scanner(new java.io.File(\"../text\")).nextLine()); } }' > M.java && java -XX:TieredStopAtLevel=1 M.java",
    ),
    (
        "sort",
        "sort -r text | head -3; grep -c 7 text; head -c 100 bytes | od -c; wc text bytes; sed -n 5p text; awk 'END{print NR}' text; cat < text | tail -1; dd if=bytes bs=1000 skip=3 count=5 2>/dev/null | cksum",
    ),
    (
        "perl",
        "perl -ne 'print if /99$/' text; perl -e 'open F, \"<bytes\"; seek F, 70000, 0; read F, $b, 20; print unpack(\"H*\", $b), \"\\n\"; exit 7'",
    ),
    (
        "find",
        "find . -maxdepth 1 -type f -printf '%f %s\\n' | sort; ls | xargs -n1 -P3 cksum | sort; cat none; echo $?",
    ),
];

struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        std::fs::write(data.join("bytes"), (0..100_000u32).map(|i| (i % 251) as u8).collect::<Vec<_>>()).unwrap();
        std::fs::write(data.join("lines"), (0..500).map(|i| format!("line {i}\n")).collect::<String>()).unwrap();
        std::fs::write(
            data.join("text"),
            (0..3000).map(|i| format!("{i} words of text {}\n", i * 7)).collect::<String>(),
        )
        .unwrap();
        Stage { dir }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("data")
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Runs a script in the data's folder, with the library or without.
    fn script(&self, script: &str, with: bool) -> Output {
        let made = self.data().join("made");
        let _ = std::fs::remove_dir_all(&made);
        std::fs::create_dir(&made).unwrap();
        let mut command = if with { preloaded("sh", &self.socket()) } else { Command::new("sh") };
        command.args(["-c", script, "sh", "made"]).current_dir(self.data());
        command.env("LC_ALL", "C").env("HOME", self.dir.path()).env("TZ", "UTC").env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("GIT_COMMITTER_DATE", "2020-01-01T00:00:00Z").env("GIT_CONFIG_NOSYSTEM", "1");
        let output = run(&mut command);
        let _ = std::fs::remove_dir_all(&made);
        output
    }

    /// Every program that is installed, compared with itself without the library.
    fn compare(&self, situation: &str) {
        let mut compared = 0;
        for (name, script) in PROGRAMS {
            if run(Command::new("sh").args(["-c", &format!("command -v {name}")])).stdout.is_empty() {
                eprintln!("{name} is not installed and not compared");
                continue;
            }
            // The folder's name is an argument, so that it is the same in messages.
            let begin = Instant::now();
            let plain = self.script(script, false);
            let between = Instant::now();
            let with = self.script(script, true);
            let ms = |time: Duration| time.as_secs_f64() * 1000.0;
            println!(
                "{name}, {situation}: {:.0} ms without the library, {:.0} ms with it",
                ms(between - begin),
                ms(between.elapsed())
            );
            assert_eq!(with, plain, "{name}, {situation}");
            assert!(!plain.stdout.is_empty(), "{name} says nothing: {}", String::from_utf8_lossy(&plain.stderr));
            compared += 1;
        }
        assert!(compared >= 5, "hardly any program is installed");
    }

    /// A manager in a process of its own, which can be stopped and killed.
    fn manager_process(&self) -> Reaped {
        let _ = std::fs::remove_file(self.socket());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "transparency::manager_process", "--nocapture"]).stdout(Stdio::null());
        let child = command.env("MANAGER_SOCKET", self.socket()).env("MANAGER_TREE", self.data()).spawn().unwrap();
        let child = Reaped(child);
        until("the manager starts", || self.socket().exists());
        child
    }
}

fn signal(child: &Reaped, signal: i32) {
    // SAFETY: a signal to a process that is our child until it is reaped.
    assert_eq!(unsafe { libc::kill(child.0.id() as i32, signal) }, 0);
}

/// Not a test: the process of [`Stage::manager_process`].
#[test]
#[ignore = "run by other tests as a process"]
fn manager_process() {
    let Some(socket) = std::env::var_os("MANAGER_SOCKET") else { return };
    let tree = std::env::var_os("MANAGER_TREE").unwrap();
    let manager = Manager::start(Path::new(&socket), Path::new(&tree), Mode::Record);
    std::thread::sleep(Duration::from_secs(60));
    drop(manager);
}

#[test]
fn without_a_manager() {
    Stage::new().compare("no manager");
}

#[test]
fn with_a_manager_that_records() {
    let stage = Stage::new();
    let manager = Manager::start(&stage.socket(), &stage.data(), Mode::Record);
    stage.compare("recorded");
    let told = manager.finish();
    let seen = |name: &str| {
        told.iter().any(|t| t.path == stage.data().join(name) && t.ranges().iter().any(|r| r.0 == Op::Read))
    };
    assert!(seen("bytes") && seen("text"));
    assert!(told.iter().any(|t| t.flags & register::WRITE != 0 && t.ranges().iter().any(|r| r.0 == Op::Write)));
}

#[test]
fn with_a_manager_that_is_stopped() {
    let stage = Stage::new();
    let manager = stage.manager_process();
    signal(&manager, libc::SIGSTOP);
    stage.compare("stopped");
}

fn cases(stage: &Stage) -> PathBuf {
    compile(stage.dir.path(), "cases", &[])
}

/// The file whose removal ends the program of [`long`].
fn lasts(stage: &Stage) -> PathBuf {
    stage.dir.path().join("lasts")
}

/// A program that reads until [`lasts`] is removed, and `more` times after that.
fn long(stage: &Stage, program: &Path, more: u32) -> Command {
    std::fs::write(lasts(stage), "").unwrap();
    let mut command = preloaded(program, &stage.socket());
    command.arg("long").arg(stage.data().join("bytes")).arg(stage.data().join("lines"));
    command.arg(lasts(stage)).arg(more.to_string());
    command.env("EXPECT_MANAGER", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("IMPRESARIO_ASSIST_LOG", stage.dir.path().join("log"));
    command
}

fn ends_well(mut child: Reaped) {
    let status = wait(&mut child.0, Duration::from_secs(30)).expect("the program hangs");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.0.stdout.take().unwrap(), &mut text).unwrap();
    std::io::Read::read_to_string(&mut child.0.stderr.take().unwrap(), &mut text).unwrap();
    assert!(status.success() && text == "ok\n", "{status}: {text}");
}

/// Stopped for a while, woken, killed, and another one in its place: the program notices nothing, and the new manager
/// is told of the files that were open all the time.
#[test]
fn a_manager_may_come_and_go() {
    let stage = Stage::new();
    let program = cases(&stage);
    let first = stage.manager_process();
    let child = Reaped(long(&stage, &program, 1).spawn().unwrap());
    until("the program is connected", || lasts(&stage).with_extension("begun").exists());
    signal(&first, libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(200));
    signal(&first, libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(100));
    drop(first);
    let second = Manager::start(&stage.socket(), &stage.data(), Mode::Advise);
    until("the new manager is told of both files", || {
        let told = second.so_far();
        let of = |name: &str| told.iter().any(|t| t.path == stage.data().join(name) && t.accesses.len() > 10);
        of("bytes") && told.iter().any(|t| t.path == stage.data().join("lines"))
    });
    std::fs::remove_file(lasts(&stage)).unwrap();
    ends_well(child);
    // On a busy machine the manager may be too slow for a program that reads without a pause.
    let (_, told) = second.finish_lossy();
    let found =
        told.iter().find(|t| t.path == stage.data().join("bytes")).expect("the open file is not registered anew");
    assert!(found.flags & register::FOUND != 0 && found.accesses.len() > 10);
    assert!(told.iter().any(|t| t.path == stage.data().join("lines") && t.flags & register::FOUND == 0));
    let log = std::fs::read_to_string(stage.dir.path().join("log")).unwrap();
    assert_eq!(log.lines().filter(|l| l.contains("went away")).count(), 1, "{log}");
}

/// A manager that drains no more: what does not fit is dropped and counted, and the program goes on.
#[test]
fn a_full_ring_stops_nobody() {
    let stage = Stage::new();
    let program = cases(&stage);
    let manager = Manager::start(&stage.socket(), &stage.data(), Mode::Advise);
    let child = Reaped(long(&stage, &program, 3 * SLOTS).spawn().unwrap());
    until("something is told", || manager.so_far().iter().any(|t| !t.accesses.is_empty()));
    manager.pause(true);
    std::fs::remove_file(lasts(&stage)).unwrap();
    ends_well(child);
    let before: usize = manager.so_far().iter().map(|t| t.accesses.len()).sum();
    manager.pause(false);
    let (dropped, told) = manager.finish_lossy();
    let after: usize = told.iter().map(|t| t.accesses.len()).sum();
    assert!(dropped > 0, "the ring did not fill");
    assert!(after - before <= SLOTS as usize, "{before} {after}");
}

/// Programs that close what is not theirs, leave handlers by jumps, share memory without descriptors, and the like.
#[test]
fn unusual_programs_run_as_without_the_library() {
    const CASES: [&str; 11] = [
        "closes_all",
        "small_stacks",
        "handlers",
        "jumps",
        "clones",
        "own_descriptors",
        "other_library",
        "high_numbers",
        "busy_forks",
        "filtered",
        "again",
    ];
    let stage = Stage::new();
    let program = compile(stage.dir.path(), "unusual", &[]);
    for case in CASES {
        let (nobody, manager) = (Path::new("/nowhere"), stage.manager_process());
        for mut command in [Command::new(&program), preloaded(&program, nobody), preloaded(&program, &stage.socket())] {
            let output = run(command.arg(case).arg(stage.data().join("bytes")));
            assert!(
                output.status.success() && output.stdout == b"ok\n" && output.stderr.is_empty(),
                "{case}: {output:?}"
            );
        }
        drop(manager);
    }
}

/// The loader ignores the library for programs that gain rights, and for static ones; both run as ever.
#[test]
fn programs_that_cannot_be_interposed_run_on() {
    let stage = Stage::new();
    let source = stage.dir.path().join("s.c");
    std::fs::write(&source, "#include <stdio.h>\nint main(void){puts(\"static\");return 0;}\n").unwrap();
    let program = stage.dir.path().join("s");
    let made = run(Command::new("cc").arg("-static").arg("-o").arg(&program).arg(&source));
    assert!(made.status.success());
    let output = run(&mut preloaded(&program, &stage.socket()));
    assert!(output.status.success() && output.stdout == b"static\n" && output.stderr.is_empty());
    assert_eq!(impresario_interpose::check_program(&program), impresario_interpose::Verdict::Static);
    let made = run(Command::new("cc").arg("-static-pie").arg("-o").arg(&program).arg(&source));
    assert!(made.status.success());
    let output = run(&mut preloaded(&program, &stage.socket()));
    assert!(output.status.success() && output.stdout == b"static\n" && output.stderr.is_empty());
    assert_eq!(impresario_interpose::check_program(&program), impresario_interpose::Verdict::Static);
    let copy = stage.dir.path().join("true");
    std::fs::copy("/bin/true", &copy).unwrap();
    assert_eq!(impresario_interpose::check_program(&copy), impresario_interpose::Verdict::Ok);
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o4755)).unwrap();
    assert!(run(&mut preloaded(&copy, &stage.socket())).status.success());
}

/// Other preloaded libraries keep their place in the chain, before and after ours.
#[test]
fn other_preloaded_libraries_work_on() {
    let stage = Stage::new();
    let source = stage.dir.path().join("o.c");
    std::fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <unistd.h>\nstatic int n;\n\
         ssize_t pread(int fd, void *b, size_t len, off_t at) { ssize_t (*next)(int, void *, size_t, off_t); n++;\n\
         *(void **)&next = dlsym(RTLD_NEXT, \"pread\"); return next(fd, b, len, at); }\n\
         __attribute__((destructor)) static void end(void) { dprintf(2, \"%d\", n); }\n",
    )
    .unwrap();
    let other = stage.dir.path().join("o.so");
    let made = run(Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&other).arg(&source).arg("-ldl"));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let program = cases(&stage);
    for order in [[library(), &other], [&other, library()]] {
        let manager = Manager::start(&stage.socket(), &stage.data(), Mode::Advise);
        let mut command = preloaded(&program, &stage.socket());
        command.env("LD_PRELOAD", format!("{}:{}", order[0].display(), order[1].display())).env("EXPECT_MANAGER", "1");
        let output = run(command.arg("reads").arg(stage.data().join("bytes")).arg(stage.data().join("lines")));
        assert!(output.status.success() && output.stdout == b"ok\n");
        assert_eq!(output.stderr, b"4");
        let told = manager.finish();
        assert_eq!(told[0].ranges().iter().filter(|r| r.0 == Op::Read).count(), 9);
    }
}

/// A socket's name that cannot be, a folder in its place, a manager that is none: nothing happens, and one line tells.
#[test]
fn nonsense_in_the_environment_does_no_harm() {
    let stage = Stage::new();
    let program = cases(&stage);
    let long_name = format!("/tmp/{}", "x".repeat(200));
    let folder = stage.dir.path().to_str().unwrap().to_string();
    for (socket, expected) in [(long_name.as_str(), "107 bytes"), (&folder, "no advice manager"), ("", "")] {
        let log = stage.dir.path().join("log");
        let _ = std::fs::remove_file(&log);
        let mut command = preloaded(&program, Path::new(socket));
        command.env("IMPRESARIO_ASSIST_LOG", &log).env_remove("XDG_RUNTIME_DIR");
        let output = run(command.arg("threads").arg(stage.data().join("bytes")).arg(stage.data().join("lines")));
        assert!(output.status.success() && output.stdout == b"ok\n" && output.stderr.is_empty());
        let text = std::fs::read_to_string(&log).unwrap();
        assert!(text.contains(expected) && text.lines().count() == 1, "{socket}: {text}");
    }
}

/// Outside `impresario run`, the hooks of names and attributes do no more than before there were any.
#[test]
fn early_calls_and_wild_pointers_are_the_kernels() {
    let stage = Stage::new();
    let program = compile(stage.dir.path(), "early", &["-rdynamic"]);
    for mut command in [Command::new(&program), preloaded(&program, &stage.socket())] {
        let output = run(&mut command);
        assert!(output.status.success() && output.stdout == b"ok\n", "{command:?}: {output:?}");
    }
}
