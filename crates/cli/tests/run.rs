//! `impresario run`: real programs on a cluster without a mount, compared with the same on a local folder.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use impresario_config::Config;
use impresario_device::DeviceParams;

use crate::library;
use crate::support::{self, Cluster, IMPRESARIO, Ran, pattern, run_command};

const AT: &str = "/impresario-test";

fn under(cluster: &Cluster, words: &[&str]) -> Ran {
    let mut command = Command::new(IMPRESARIO);
    command.args(["run", "--at", AT]).arg(&cluster.path).arg("--").args(words);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library());
    run_command(&mut command)
}

#[track_caller]
fn shell(cluster: &Cluster, script: &str) -> String {
    let ran = under(cluster, &["bash", "-euo", "pipefail", "-c", script]);
    assert_eq!(ran.code, 0, "{script}: {ran:?}");
    ran.out
}

/// Runs a script in the cluster and in a folder of this machine.
#[track_caller]
fn same_as_on_a_local_folder(cluster: &Cluster, script: &str) {
    let local = cluster.dir.path().join("local");
    std::fs::create_dir(&local).unwrap();
    let expected = run_command(Command::new("bash").args(["-euo", "pipefail", "-c", script]).current_dir(&local));
    assert_eq!(expected.code, 0, "{expected:?}");
    assert_eq!(shell(cluster, &format!("cd {AT}; {script}")), expected.out);
}

/// Compiles a program of this folder.
fn compiled(cluster: &Cluster, name: &str, compiler: &str) -> Option<PathBuf> {
    if !impresario_testing::require(compiler) {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run").join(name);
    let program = cluster.dir.path().join(name).with_extension("");
    let ran = run_command(Command::new(compiler).args(["-O1", "-w", "-pthread", "-o"]).arg(&program).arg(source));
    assert_eq!(ran.code, 0, "{ran:?}");
    Some(program)
}

#[test]
fn corner_cases_are_as_on_a_local_folder() {
    let cluster = Cluster::start(2, 2, |_| {});
    let Some(program) = compiled(&cluster, "corners.c", "cc") else { return };
    let local = cluster.dir.path().join("local");
    std::fs::create_dir(&local).unwrap();
    let expected = run_command(Command::new(&program).arg(&local));
    let got = under(&cluster, &[program.to_str().unwrap(), AT]);
    assert_eq!((expected.code, got.code), (0, 0), "{expected:?} {got:?}");
    let pairs = expected.out.lines().zip(got.out.lines());
    let differing: Vec<_> = pairs.filter(|(expected, got)| expected != got).collect();
    assert!(differing.is_empty() && expected.out == got.out, "local and cluster differ: {differing:#?}");
}

/// The requests of the first data server that are neither reads nor writes, syncs above all.
fn syncs(cluster: &Cluster) -> u64 {
    let state = cluster.state("data.0");
    state["engine"]["histograms"]["request_ns"]["other"]["count"].as_u64().unwrap_or(0)
}

/// O_SYNC and O_DSYNC: what was written is on the device when the call returns.
#[test]
fn synchronous_writes_reach_the_device() {
    let cluster = Cluster::start(1, 1, |_| {});
    let syncs = || syncs(&cluster);
    let before = syncs();
    for flag in ["sync", "dsync", "sync,append"] {
        shell(
            &cluster,
            &format!("cd {AT}; dd if=/dev/zero of=f bs=512 count=20 oflag={flag} conv=notrunc status=none"),
        );
    }
    assert!(syncs() >= before + 60, "{before} {}", syncs());
}

#[test]
fn a_working_directory_that_is_renamed_or_removed_is_as_on_a_local_folder() {
    let cluster = Cluster::start(1, 0, |_| {});
    let script = "mkdir m; cd m; mv ../m ../n; echo x > f; mkdir ../m; echo y > g; /bin/pwd | sed 's,.*/,,'; ls . ../m ../n; \
        mkdir deep; cd deep; mv ../../n ../../o; cat ../f; echo z > h; ls . ../../o; cd -P ../..; \
        mkdir -p a/b empty; cd a/b; rm -r ../../a; ls ../..; mkdir ../../c; (echo w > v) 2> /dev/null || echo gone; cd ../..; \
        cd empty; mv -T ../c ../empty; (echo w > v) 2> /dev/null || echo replaced; ls ../empty; cd ..; find . | sort";
    same_as_on_a_local_folder(&cluster, script);
}

/// As lock files are made and removed: an open that makes what is not there never finds that it is not there.
#[test]
fn a_name_that_others_make_and_remove_can_be_opened_at_any_time() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = format!(
        r#"
import os
failed = []
children = []
for child in range(4):
    children.append(os.fork())
    if not children[-1]:
        for turn in range(400):
            try:
                os.close(os.open("{AT}/lock", os.O_CREAT | os.O_RDWR))
            except OSError as error:
                failed.append(error)
            try:
                os.unlink("{AT}/lock")
            except FileNotFoundError:
                pass
        if failed:
            print(len(failed), failed[0], flush=True)
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
"#
    );
    let ran = under(&cluster, &["python3", "-c", &script]);
    assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{ran:?}");
}

#[test]
fn standard_streams_of_cpp_are_redirected_too() {
    let cluster = Cluster::start(1, 0, |_| {});
    let Some(program) = compiled(&cluster, "standard.cc", "c++") else { return };
    let program = program.display();
    let script = format!(
        "cd {AT}; printf '5\\na\\nb\\n' > in; {program} < in > out 2> error; cat out error; {program} in own 2>&1; cat own"
    );
    let lines = "5: a\n6: b\nfrom C\nsaved\n";
    assert_eq!(shell(&cluster, &script), format!("{lines}error 7\nerror 7\n{lines}"));
}

#[test]
fn cp_tar_grep_and_redirections_work() {
    let cluster = Cluster::start(2, 1, |_| {});
    let work = cluster.dir.path().join("work");
    for i in 0..20u64 {
        let path = work.join(format!("tree/d{}/f{i}", i % 5));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, pattern(i, 1, 0, (i * i * 500) as usize)).unwrap();
    }
    std::fs::write(work.join("tree/words"), "one\nneedle\n").unwrap();
    std::os::unix::fs::symlink("d1/f1", work.join("tree/link")).unwrap();
    let work = work.to_str().unwrap();
    shell(&cluster, &format!("cp -a {work}/tree {AT}/ && diff -r --no-dereference {work}/tree {AT}/tree"));
    shell(&cluster, &format!("tar -C {AT} -cf {work}/t.tar tree && mkdir {AT}/u && tar -C {AT}/u -xf {work}/t.tar"));
    shell(&cluster, &format!("diff -r --no-dereference {work}/tree {AT}/u/tree && rm -r {AT}/u && test ! -e {AT}/u"));
    assert_eq!(shell(&cluster, &format!("cd {AT} && grep -r needle .")), "./tree/words:needle\n");
    let out = shell(
        &cluster,
        &format!(
            "cd {AT}; (echo a; sh -c 'echo b'; ls tree | head -1) > out; cat < out >> all; echo c >> all; cat all; pwd; \
             dd if=/dev/zero of=zeros bs=64k count=5 status=none; stat -c %s zeros; ls -d t*"
        ),
    );
    assert_eq!(out, format!("a\nb\nd0\nc\n{AT}\n327680\ntree\n"));
    // What the programs left behind is there for others, and nothing is there but in the run.
    let client = support::client(&cluster.config, 1);
    assert_eq!(support::read_file(&client, "/all"), b"a\nb\nd0\nc\n");
    assert!(!Path::new(AT).exists());
}

#[test]
fn access_control_lists_count_in_a_run() {
    if !["root", "setfacl", "getfacl"].into_iter().all(impresario_testing::require) {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = "umask 027; show() { stat -c '%n %A' $@; getfacl -n $@; }; \
        mkdir d; setfacl -d -m u:4321:rwx,g:4400:rx d; echo x > d/f; mkdir d/sub plain; echo x > plain/f; \
        show d d/f d/sub plain plain/f; chmod 640 d/f; show d/f; setfacl -m u:4322:rw,m::r d/f; show d/f; \
        cp -a d copy; show copy/f copy/sub; setfacl -b d/f; show d/f; \
        setfattr -n system.posix_acl_access -v 0x0200 d/f 2>/dev/null || echo refused";
    same_as_on_a_local_folder(&cluster, script);
}

/// As the kernel has it, a link whose text ends so leads to a directory or nowhere.
#[test]
fn links_that_end_in_a_dot_or_a_slash_lead_to_directories() {
    let cluster = Cluster::start(1, 0, |_| {});
    let script = "mkdir d; echo x > f; for to in f/. f/ d/. d/ none/. none/ d/./ . f/./; do ln -s $to l; echo $to; \
        cat l 2>/dev/null || echo unread; ls -d l/ 2>/dev/null || echo unlisted; stat -L -c %F l 2>/dev/null || echo none; \
        stat -c %F l; (: > l) 2>/dev/null || echo refused; rm l; done; ls";
    same_as_on_a_local_folder(&cluster, script);
}

#[test]
fn python_reads_writes_maps_and_starts_programs() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(2, 1, |_| {});
    let script = format!(
        r#"
import io, mmap, os, shutil, subprocess, threading
os.chdir("{AT}")
os.makedirs("p/q")
with open("p/text", "w") as f:
    f.writelines(f"{{i}}\n" for i in range(1000))
assert sum(int(line) for line in open("p/text")) == 499500
assert os.path.realpath("p/../p/text") == "{AT}/p/text"
with open("p/text", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
    assert m[:4] == b"0\n1\n"
with open("p/text", "r+b") as f:
    try:
        mmap.mmap(f.fileno(), 0)
        assert False
    except OSError as error:
        assert error.errno == 19, error
with open("p/text", "r+b") as f:
    for call in (
        lambda: os.pwritev(f.fileno(), [b"x"], 0, os.RWF_DSYNC),
        lambda: os.preadv(f.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT),
    ):
        try:
            call()
            assert False
        except OSError as error:
            assert error.errno == 95, error
    assert os.preadv(f.fileno(), [bytearray(1)], 0, os.RWF_HIPRI) == 1
shutil.copy("p/text", "/tmp/impresario-run-copy")
shutil.copytree("p", "copy")
assert open("copy/text").read() == open("/tmp/impresario-run-copy").read()
os.unlink("/tmp/impresario-run-copy")
def work(n):
    for i in range(10):
        with open(f"p/q/{{n}}-{{i}}", "wb") as f:
            f.write(bytes([n]) * 5000)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(os.listdir("p/q")) == 80 and all(e.stat().st_size == 5000 for e in os.scandir("p/q"))
with open("p/out", "w") as f:
    subprocess.run(["cat"], stdin=open("p/text"), stdout=f, check=True)
    subprocess.run(["sh", "-c", "pwd; echo done"], stdout=f, check=True, cwd="p/q")
assert open("p/out").read().endswith("999\n{AT}/p/q\ndone\n")
shutil.rmtree("p")
assert os.listdir(".") == ["copy"]
print("good")
"#
    );
    let ran = under(&cluster, &["python3", "-c", &script]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "good\n"), "{ran:?}");
    assert_eq!(ran.err.matches("impresario mount").count(), 1, "{ran:?}");
}

/// The read of a map is made in parts, of which an early one that succeeds must not hide a later one that fails.
#[test]
fn a_map_of_a_file_that_is_damaged_behind_its_first_megabytes_fails() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(1, 0, |config| config.data[0].checksums = true);
    let client = support::client(&cluster.config, 1);
    support::write_file(&client, "f", &pattern(1, 1, 0, 8 << 20));
    let script = format!(
        r#"
import mmap
f = open("{AT}/f", "rb")
try:
    m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    print("mapped", len(m), m[0], sum(m[6 << 20:]) > 0)
except OSError as error:
    print(error.errno)
"#
    );
    let map = || under(&cluster, &["python3", "-c", &script]).out;
    assert_eq!(map(), format!("mapped {} {} True\n", 8 << 20, pattern(1, 1, 0, 1)[0]));
    crate::scrub::rot(&cluster, 0, 6 << 20);
    assert_eq!(map(), format!("{}\n", libc::EIO));
}

#[test]
fn random_calls_give_what_memory_holds() {
    let cluster = Cluster::start(3, 2, |_| {});
    if !impresario_testing::require("cc") {
        return;
    }
    let program = cluster.dir.path().join("exercise");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../testing/c/exercise.c");
    let ran = run_command(Command::new("cc").args(["-O1", "-w", "-o"]).arg(&program).arg(source));
    assert_eq!(ran.code, 0, "{ran:?}");
    // Files of one process each, and one that two processes change in turn, with locks.
    let program = program.display();
    let script = format!(
        "jobs=(); for seed in 1 2 3; do {program} {AT}/$seed 500 $seed ha & jobs+=($!); done; \
         {program} {AT}/both 250 4 ha {AT}/both & jobs+=($!); for job in ${{jobs[@]}}; do wait $job; done"
    );
    assert_eq!(shell(&cluster, &script), "good\n".repeat(4));
}

/// A close has ended when it returns, also where the agent learns of it otherwise before the program asks: the delays see to
/// that, and that the close takes a while.
#[test]
fn a_close_that_has_returned_has_ended_the_locks_of_the_open_file() {
    if !impresario_testing::require("python3") || !impresario_testing::require("strace") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = format!(
        r#"
import os, struct
from fcntl import *
whole = struct.pack("hhqqi4x", F_WRLCK, os.SEEK_SET, 0, 0, 0)
OFD_SETLK = 37
for _ in range(3):
    f, g = open("{AT}/f", "w+b"), open("{AT}/f", "r+b")
    fcntl(f, OFD_SETLK, whole)
    f.close()
    fcntl(g, OFD_SETLK, whole)
    g.close()
print("good")
"#
    );
    let mut command = Command::new("strace");
    command.args(["-f", "-o", "/dev/null", "-e", "trace=epoll_ctl,recvfrom,recvmsg"]);
    command.args(["-e", "inject=epoll_ctl:delay_enter=50000", "-e", "inject=recvfrom,recvmsg:delay_exit=5000"]);
    command.args([IMPRESARIO, "run", "--at", AT]).arg(&cluster.path).args(["--", "python3", "-c", &script]);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library());
    let ran = run_command(&mut command);
    assert_eq!((ran.code, ran.out.as_str()), (0, "good\n"), "{ran:?}");
}

/// Locks exclude programs of a run, of other runs and of other clients, and end with their processes.
#[test]
fn locks_exclude_programs_of_all_runs() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(2, 1, |_| {});
    let script = format!(
        r#"
import os, signal, struct, subprocess, sys, time
from fcntl import *
path = "{AT}/f"
f = open(path, "w+b")
f.write(b"x" * 100)
f.flush()
lockf(f, LOCK_EX, 10, 20)

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), error.__traceback__.tb_next and error.__traceback__.tb_next.tb_lineno, flush=True)
            os._exit(1)
    return pid

def ends_well(pid):
    assert os.waitpid(pid, 0)[1] == 0

def refused(g, *where):
    try:
        lockf(g, *where)
        assert False
    except BlockingIOError:
        pass

parent = os.getpid()
def other():
    g = open(path, "r+b")
    refused(g, LOCK_EX | LOCK_NB, 1, 25)
    refused(g, LOCK_SH | LOCK_NB, 0, 0)
    lockf(g, LOCK_EX | LOCK_NB, 10, 30)
    held = fcntl(g, F_GETLK, struct.pack("hhqqi", F_WRLCK, os.SEEK_SET, 0, 0, 0))
    assert struct.unpack("hhqqi", held) == (F_WRLCK, os.SEEK_SET, 20, 10, parent), held
    free = fcntl(g, F_GETLK, struct.pack("hhqqi", F_WRLCK, os.SEEK_END, -10, 0, 0))
    assert struct.unpack("hhqqi", free)[0] == F_UNLCK, free
    # A wait is interrupted where the handler wants that, and goes on where it does not.
    def rings(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        lockf(g, LOCK_EX, 1, 25)
        assert False
    except TimeoutError:
        pass
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    os.write(ready[1], b"x")
    lockf(g, LOCK_EX, 1, 25)
ready = os.pipe()
child = forked(other)
os.read(ready[0], 1)
time.sleep(0.3)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
# Closing any descriptor of the file ends all locks of the process.
open(path, "rb").close()
ends_well(child)

# A process that is killed has no locks any more, and one that waited is in nobody's way.
def holds():
    lockf(f, LOCK_EX)
    os.write(ready[1], b"x")
    time.sleep(100)
def waits():
    os.write(ready[1], b"x")
    lockf(f, LOCK_EX)
    os._exit(3)
holder = forked(holds)
os.read(ready[0], 1)
waiter = forked(waits)
os.read(ready[0], 1)
time.sleep(0.2)
refused(f, LOCK_EX | LOCK_NB)
for process in (waiter, holder):
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
before = time.monotonic()
lockf(f, LOCK_EX)
assert time.monotonic() - before < 3, time.monotonic() - before
lockf(f, LOCK_UN)

# A lock of the open file is shared by who shares that, and excludes this process's own others.
OFD_SETLK = 37
whole = struct.pack("hhqqi4x", F_WRLCK, os.SEEK_SET, 0, 0, 0)
fcntl(f, OFD_SETLK, whole)
g = open(path, "r+b")
try:
    fcntl(g, OFD_SETLK, whole)
    assert False
except BlockingIOError:
    pass
ends_well(forked(lambda: fcntl(f, OFD_SETLK, whole)))
f.close()
fcntl(g, OFD_SETLK, whole)
fcntl(g, OFD_SETLK, struct.pack("hhqqi4x", F_UNLCK, os.SEEK_SET, 0, 0, 0))

# flock, among the programs of the run.
flock(g, LOCK_SH)
def shares():
    h = open(path, "rb")
    flock(h, LOCK_SH)
    try:
        flock(h, LOCK_EX | LOCK_NB)
        assert False
    except BlockingIOError:
        pass
    os.write(ready[1], b"x")
    flock(h, LOCK_EX)
child = forked(shares)
os.read(ready[0], 1)
time.sleep(0.2)
assert os.waitpid(child, os.WNOHANG) == (0, 0)
flock(g, LOCK_UN)
ends_well(child)
flock(g, LOCK_EX | LOCK_NB)
lockf(g, LOCK_EX, 1, 99)
print("good", flush=True)
time.sleep(float(sys.argv[1]))
"#
    );
    let ran = under(&cluster, &["python3", "-c", &script, "0"]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "good\n"), "{ran:?}");

    // What one run holds, another client does not get until the run has ended.
    let mut command = Command::new(IMPRESARIO);
    command.args(["run", "--at", AT]).arg(&cluster.path).args(["--", "python3", "-c", &script, "100"]);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library());
    let mut other = support::Process::start_command(&mut command, &cluster.dir.path().join("run.log"));
    impresario_testing::until("the lock", || other.log().contains("good"));
    let script = format!(
        "import fcntl\nf = open('{AT}/f', 'r+b')\nfcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 99, 0)\n\
         try:\n fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99)\nexcept BlockingIOError: print('held')"
    );
    let ran = under(&cluster, &["python3", "-c", &script]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "held\n"), "{ran:?}");
    other.signal(rustix::process::Signal::TERM);
    other.wait();
}

/// Each gives up its shared lock while it waits, as in Linux: otherwise they would wait for one another.
#[test]
fn programs_that_upgrade_a_shared_flock_at_the_same_time_get_their_turns() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = format!(
        r#"
import os, signal
from fcntl import *
path = "{AT}/f"
open(path, "w").close()
shared, go = os.pipe(), os.pipe()
children = []
for child in range(2):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(30)
        f = open(path, "r+b")
        flock(f, LOCK_SH)
        os.write(shared[1], b"x")
        os.read(go[0], 1)
        flock(f, LOCK_EX)
        g = open(path, "rb")
        try:
            flock(g, LOCK_SH | LOCK_NB)
            os._exit(2)
        except BlockingIOError:
            pass
        flock(f, LOCK_UN)
        os._exit(0)
for _ in range(2):
    os.read(shared[0], 1)
os.write(go[1], b"xx")
print([os.waitpid(child, 0)[1] for child in children])
# An upgrade that does not wait and fails has given up the lock too.
f, g = open(path, "rb"), open(path, "rb")
flock(f, LOCK_SH)
flock(g, LOCK_SH)
try:
    flock(f, LOCK_EX | LOCK_NB)
except BlockingIOError:
    print("refused")
flock(g, LOCK_EX | LOCK_NB)
"#
    );
    let ran = under(&cluster, &["python3", "-c", &script]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "[0, 0]\nrefused\n"), "{ran:?}");
}

/// A thread waits for a lock while another one closes the file's last descriptor: what it gets then ends with the call, as in
/// Linux, and is in nobody's way.
#[test]
fn a_lock_that_is_granted_after_the_last_close_is_in_nobodys_way() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = format!(
        r#"
import errno, fcntl, os, signal, struct, threading, time
path = "{AT}/f"
open(path, "w").close()
whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
OFD_SETLK, OFD_SETLKW = 37, 38
def flock(f, waits):
    fcntl.flock(f, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
def posix(f, waits):
    fcntl.lockf(f, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
def of_open(f, waits):
    fcntl.fcntl(f, OFD_SETLKW if waits else OFD_SETLK, whole)

def sequence(lock):
    to_holder, to_us = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        signal.alarm(60)
        with open(path, "r+b") as f:
            lock(f, False)
            os.write(to_us[1], b"x")
            os.read(to_holder[0], 1)
        os.read(to_holder[0], 1)
        # A grant that is undone may be seen for a moment.
        end = time.monotonic() + 5
        with open(path, "r+b") as f:
            while True:
                try:
                    lock(f, False)
                    os._exit(0)
                except BlockingIOError:
                    if time.monotonic() > end:
                        os._exit(1)
                    time.sleep(0.05)
    os.read(to_us[0], 1)
    fd = os.open(path, os.O_RDWR)
    said = []
    def waits():
        try:
            lock(fd, True)
            said.append("granted")
        except OSError as error:
            said.append(errno.errorcode[error.errno])
    waiter = threading.Thread(target=waits, daemon=True)
    waiter.start()
    time.sleep(0.5)
    os.close(fd)
    os.write(to_holder[1], b"x")
    waiter.join(30)
    os.write(to_holder[1], b"x")
    print(lock.__name__, said, os.waitpid(holder, 0)[1], flush=True)

for lock in flock, posix, of_open:
    sequence(lock)
"#
    );
    let ran = under(&cluster, &["timeout", "100", "python3", "-c", &script]);
    let expected = "flock ['granted'] 0\nposix ['EBADF'] 0\nof_open ['granted'] 0\n";
    assert_eq!((ran.code, ran.out.as_str()), (0, expected), "{ran:?}");
}

/// Programs that limit how long a call may take leave it so. A connection of which the reply is outstanding is not used again.
#[test]
fn calls_that_are_left_by_a_jump_out_of_a_signal_handler_leave_no_others_waiting() {
    let mut cluster = Cluster::start(1, 0, |_| {});
    let Some(program) = compiled(&cluster, "jumps.c", "cc") else { return };
    support::write_file(&support::client(&cluster.config, 1), "f", b"abcdef");
    let (program, server) = (program.to_str().unwrap().to_owned(), cluster.server("data.0").pid().to_string());
    for way in ["flat", "deep"] {
        let ran = under(&cluster, &["timeout", "60", &program, &format!("{AT}/f"), &server, way]);
        let nested = "nested 3 def in 3 abc\n".repeat(2);
        let expected = format!("{nested}jumped out of all\nread 3 abc\n");
        assert_eq!((ran.code, ran.out.as_str()), (0, expected.as_str()), "{way}: {ran:?}");
    }
    let ran = under(&cluster, &["timeout", "60", &program, &format!("{AT}/f"), &server, "locks"]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "jumped out of all\nread 1\nlocked again 0\n"), "{ran:?}");
}

#[test]
fn sqlite_in_two_runs_loses_no_transaction() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(2, 1, |_| {});
    let script = format!(
        r#"
import sqlite3, sys
db = sqlite3.connect("{AT}/db", timeout=60, isolation_level=None)
db.execute("create table if not exists t (who text, n integer)")
for n in range(40):
    db.execute("begin immediate")
    db.execute("insert into t values (?, ?)", (sys.argv[1], n))
    db.execute("commit")
print(db.execute("pragma integrity_check").fetchone()[0])
"#
    );
    std::thread::scope(|scope| {
        let runs = ["a", "b"].map(|who| {
            let (cluster, script) = (&cluster, &script);
            scope.spawn(move || under(cluster, &["python3", "-c", script, who]))
        });
        for run in runs {
            let ran = run.join().unwrap();
            assert_eq!((ran.code, ran.out.as_str()), (0, "ok\n"), "{ran:?}");
        }
    });
    let count =
        format!("import sqlite3; print(sqlite3.connect('{AT}/db').execute('select count(*) from t').fetchone())");
    assert_eq!(under(&cluster, &["python3", "-c", &count]).out, "(80,)\n");
}

#[test]
fn a_copy_goes_on_when_its_io_node_is_killed() {
    let mut cluster = Cluster::start(2, 2, |_| {});
    let from = cluster.dir.path().join("from");
    let data = pattern(7, 1, 0, 48 << 20);
    std::fs::write(&from, &data).unwrap();
    let script = format!("for i in 1 2 3 4; do cp {} {AT}/f$i; done", from.display());
    let mut command = Command::new(IMPRESARIO);
    command.args(["run", "--at", AT, "--via", "io.0"]).arg(&cluster.path).args(["--", "sh", "-ec", &script]);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library());
    let client = support::client_via(&cluster.config, 1, impresario_client::Via::Direct);
    let mut child = command.spawn().unwrap();
    impresario_testing::until("it copies", || client.stat(b"f1").is_ok());
    let was_running = child.try_wait().unwrap().is_none();
    cluster.kill("io.0");
    assert!(child.wait().unwrap().success() && was_running);
    assert!((1..=4).all(|i| support::read_file(&client, &format!("/f{i}")) == data));
}

#[test]
fn the_limit_of_open_files_and_what_is_ignored_are_the_programs_own() {
    let cluster = Cluster::start(1, 0, |_| {});
    // Two programs at the same time that use up theirs; together they have more than the agent's limit was.
    let script = format!(
        "ulimit -Sn; grep SigIgn /proc/self/status | grep -o '.$'; touch {AT}/f; for i in 1 2; do bash -c 'for i in $(seq 100); do exec {{fd}}< {AT}/f || exit 1; done; \
         echo opened; sleep 1' & done; wait"
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' HUP; ulimit -Sn 160; exec \"$@\"", "sh", IMPRESARIO, "run", "--at", AT])
        .arg(&cluster.path);
    command.args(["--", "bash", "-c", &script]).env("IMPRESARIO_ASSIST_LIBRARY", library::library());
    let ran = run_command(&mut command);
    assert_eq!((ran.code, ran.out.as_str()), (0, "160\n1\nopened\nopened\n"), "{}", ran.err);
}

/// A child in the background may ask for the first time long after the program that started it has ended.
#[test]
fn a_child_that_has_asked_nothing_yet_is_waited_for() {
    let cluster = Cluster::start(1, 0, |_| {});
    let late = format!("(sleep 1; echo late > {AT}/late) > /dev/null 2>&1 &");
    assert_eq!(under(&cluster, &["sh", "-c", &late]).code, 0);
    assert_eq!(support::read_file(&support::client(&cluster.config, 1), "late"), b"late\n");
    // A daemon lives for ever.
    let pid = cluster.dir.path().join("pid");
    let daemon = format!("setsid sh -c 'echo $$ > {}; exec sleep 1000' > /dev/null 2>&1 & sleep 0.5", pid.display());
    assert_eq!(under(&cluster, &["sh", "-c", &daemon]).code, 0);
    let pid: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[test]
fn a_signal_ends_the_wait_for_what_a_program_left_behind() {
    let cluster = Cluster::start(1, 0, |_| {});
    let place = cluster.dir.path().join("temporary");
    std::fs::create_dir(&place).unwrap();
    let pid = cluster.dir.path().join("pid");
    let script = format!("exec 9> {AT}/held; sleep 100 & echo $! > {}; exit 3", pid.display());
    let mut command = Command::new(IMPRESARIO);
    command.args(["run", "--at", AT]).arg(&cluster.path).args(["--", "bash", "-c", &script]);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()).env("TMPDIR", &place);
    let mut child = command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let left: i32 = impresario_testing::eventually("the program's end", || {
        let left = std::fs::read_to_string(&pid).ok()?.trim().parse().ok()?;
        // Its parent is gone.
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        std::fs::read_to_string(children).ok()?.trim().is_empty().then_some(left)
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none(), "it waits for the process that holds a file");
    let kill = |pid: i32| {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    };
    kill(child.id() as i32);
    let status = impresario_testing::eventually("an end", || child.try_wait().unwrap());
    kill(left);
    assert_eq!(status.code(), Some(3));
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "the run's folder is gone");
}

#[test]
fn a_program_that_gives_up_its_rights_has_none_in_the_cluster() {
    // Only root can become another user.
    if !(impresario_testing::require("root") && impresario_testing::require("python3")) {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let script = format!(
        "import os\nf = os.open('{AT}/f', os.O_RDWR | os.O_CREAT)\nassert os.write(f, b'x') == 1\n\
         for step in range(2):\n try:\n  os.seteuid(65534)\n  os.write(f, b'y')\n  assert False\n\
         \x20except PermissionError: pass\n os.seteuid(0)\n assert os.write(f, b'z') == 1\n\
         print(os.fstat(f).st_size)"
    );
    let ran = under(&cluster, &["python3", "-c", &script]);
    assert_eq!((ran.code, ran.out.as_str()), (0, "3\n"), "{ran:?}");
}

/// Starts a command, which is to be added, as a user without rights.
fn nobody() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command
}

/// The rights that count are those of the file that is opened, however often its name changes hands.
#[test]
fn a_file_that_takes_a_name_during_an_open_is_not_opened_by_the_rights_of_the_one_before() {
    if !["root", "setpriv", "python3"].into_iter().all(impresario_testing::require) {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    std::fs::set_permissions(cluster.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    shell(&cluster, &format!("cd {AT}; echo secret > secret; chmod 600 secret; echo open > open; ln open f"));
    let stop = cluster.dir.path().join("stop");
    let swaps = format!(
        r#"
import os, time
os.chdir("{AT}")
end = time.monotonic() + 60
while not os.path.exists("{}") and time.monotonic() < end:
    for name in ("secret", "open"):
        os.link(name, "new")
        os.rename("new", "f")
"#,
        stop.display()
    );
    let opens = format!(
        r#"
import time
seen = set()
end = time.monotonic() + 30
for turn in range(2000):
    try:
        seen.add(open("{AT}/f").read())
    except OSError as error:
        seen.add(type(error).__name__)
    if time.monotonic() > end:
        break
print(sorted(seen - {{"OSError"}}))
"#
    );
    let ran = std::thread::scope(|scope| {
        let swaps = scope.spawn(|| under(&cluster, &["python3", "-c", &swaps]));
        let mut command = nobody();
        command.arg(IMPRESARIO).args(["run", "--at", AT]).arg(&cluster.path).args(["--", "python3", "-c", &opens]);
        let ran = run_command(command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()));
        std::fs::write(&stop, "").unwrap();
        let swaps = swaps.join().unwrap();
        assert_eq!(swaps.code, 0, "{swaps:?}");
        ran
    });
    assert_eq!((ran.code, ran.out.as_str()), (0, "['PermissionError', 'open\\n']\n"), "{ran:?}");
}

#[test]
fn what_a_user_without_rights_may_do_is_as_on_a_local_folder() {
    if !["root", "setpriv", "python3"].into_iter().all(impresario_testing::require) {
        return;
    }
    let cluster = Cluster::start(2, 0, |_| {});
    std::fs::set_permissions(cluster.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = "cd \"$1\"; chmod 4755 a; stat -c %a a; echo x >> a; stat -c %a a; chmod 6755 a; : > a; stat -c %a a; \
        chmod 6755 a; truncate -s 5 a; stat -c %a a; chmod 2644 a; echo x >> a; stat -c %a a; exec 5>> a; chmod 6755 a; \
        echo x >&5; stat -c %a a; ln theirs l 2> /dev/null || echo refused; ln private l 2> /dev/null || echo refused; \
        ln open l && stat -c %h open; ln setid m 2> /dev/null || echo refused; rm -f theirs 2> /dev/null || echo refused; \
        chown 0 a 2> /dev/null || echo refused; echo y 2> /dev/null > theirs || echo refused; \
        chmod 6755 g; stat -c %a g";
    let prepare = "mkdir \"$1\"; cd \"$1\"; chmod 1777 .; echo > a; chown 65534:65534 a; echo > theirs; echo > private; \
        chmod 600 private; echo > open; chmod 666 open; echo > setid; chmod 6777 setid; \
        echo > g; chown 65534:0 g";
    let local = cluster.dir.path().join("local");
    let (local, inside) = (local.to_str().unwrap(), &format!("{AT}/d"));
    let mut prepared = Command::new("bash");
    assert_eq!(run_command(prepared.args(["-euc", prepare, "bash", local])).code, 0);
    assert_eq!(under(&cluster, &["bash", "-euc", prepare, "bash", inside]).code, 0);
    let expected = run_command(nobody().args(["bash", "-euc", script, "bash", local]));
    let mut command = nobody();
    command
        .arg(IMPRESARIO)
        .args(["run", "--at", AT])
        .arg(&cluster.path)
        .args(["--", "bash", "-euc", script, "bash", inside]);
    let got = run_command(command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()));
    assert_eq!((expected.code, &expected.out), (got.code, &got.out), "{expected:?} {got:?}");
    assert_eq!(got.code, 0, "{got:?}");
}

#[test]
fn temporary_files_may_be_behind_a_symbolic_link() {
    let cluster = Cluster::start(1, 0, |_| {});
    let place = cluster.dir.path().join("temporary");
    let link = cluster.dir.path().join("link");
    std::fs::create_dir(&place).unwrap();
    std::os::unix::fs::symlink("temporary", &link).unwrap();
    let mut command = Command::new(IMPRESARIO);
    let script = format!("mkdir -p {AT}/a/b; cd {AT}/a/b; pwd; echo x > relative; cat {AT}/a/b/relative");
    command.args(["run", "--at", AT]).arg(&cluster.path).args(["--", "sh", "-ec", &script]);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()).env("TMPDIR", &link);
    let ran = run_command(&mut command);
    assert_eq!((ran.code, ran.out), (0, format!("{AT}/a/b\nx\n")), "{}", ran.err);
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "the run's folder is gone");
}

/// A watch in which nothing ever happens would leave a program waiting; `.` leads to what stands for a directory of the cluster.
#[test]
fn watches_of_the_clusters_files_are_refused() {
    if !impresario_testing::require("python3") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let program = "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nfor path in b'.', b'f', b'/':\n  \
                   print(path, c.inotify_add_watch(c.inotify_init(), path, 2), ctypes.get_errno())";
    let told = shell(&cluster, &format!("cd {AT}; touch f; python3 -c \"{program}\""));
    assert_eq!(told, "b'.' -1 2\nb'f' -1 2\nb'/' 1 2\n");
}

#[test]
fn a_sync_of_the_file_system_is_refused() {
    let cluster = Cluster::start(1, 0, |_| {});
    let said = shell(&cluster, &format!("cd {AT}; echo > f; sync f && ! sync -f f 2>&1; ! sync -f . 2>&1"));
    assert_eq!(said.matches("not supported").count(), 2, "{said}");
}

#[test]
fn mistakes_are_named() {
    let cluster = Cluster::start(1, 0, |_| {});
    let at = |at: &str| {
        let mut command = Command::new(IMPRESARIO);
        run_command(command.args(["run", "--at", at]).arg(&cluster.path).args(["--", "true"]))
    };
    let ran = at("relative");
    assert!(ran.code == 2 && ran.err.contains("--at relative"), "{ran:?}");
    // A program without a loader: no library can be put into it.
    let mut program = std::fs::read("/bin/true").unwrap();
    program[56..58].fill(0);
    let path = cluster.dir.path().join("static");
    std::fs::write(&path, program).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ran = under(&cluster, &[path.to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("statically linked") && ran.err.contains("impresario mount"), "{ran:?}");
    let ran = under(&cluster, &["sh", "-c", "exit 7"]);
    assert_eq!(ran.code, 7, "{ran:?}");
}

/// A number of the data servers' hints, over all of them.
fn hints(cluster: &Cluster, what: &str) -> u64 {
    let of = |i: usize| cluster.state(&format!("data.{i}"))["read_ahead"]["hints"][what].as_u64().unwrap_or(0);
    (0..cluster.config.data.len()).map(of).sum()
}

/// A cluster with a file of the cluster's, the bytes of which its servers can read ahead.
fn with_file(
    data: usize,
    io: usize,
    name: &str,
    len: usize,
    change: impl FnOnce(&mut Config),
) -> Option<(Cluster, Vec<u8>)> {
    if !impresario_testing::require("python3") {
        return None;
    }
    let cluster = Cluster::start(data, io, change);
    if cluster.state("data.0")["store"]["in_memory"] == true {
        impresario_testing::skip("disk", "a store in memory reads nothing ahead");
        return None;
    }
    let bytes = pattern(1, 1, 0, len);
    support::write_file(&support::client(&cluster.config, 1), name, &bytes);
    Some((cluster, bytes))
}

#[test]
fn advice_of_programs_reaches_the_data_servers() {
    for io_nodes in [0, 1] {
        let Some((cluster, _)) = with_file(2, io_nodes, "input", 16 << 20, |_| {}) else { return };
        let advised = |script: &str| {
            let script = format!(
                "import ctypes, os\nfd = os.open('{AT}/input', os.O_RDONLY)\nlibc = ctypes.CDLL(None, use_errno=True)\n\
                 ahead = lambda at, n: libc.readahead(fd, ctypes.c_long(at), ctypes.c_size_t(n))\n{script}"
            );
            let ran = under(&cluster, &["python3", "-c", &script]);
            assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{ran:?}");
        };
        advised(
            "for advice in os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM:\n    \
             os.posix_fadvise(fd, 0, 0, advice)\nassert ahead(0, 0) == 0",
        );
        assert_eq!(hints(&cluster, "hinted_bytes"), 0);
        // Hints are passed on beside the program, which may end before they are.
        let waits = "import time; time.sleep(0.05)\n".repeat(2);
        advised(&format!("os.posix_fadvise(fd, 1 << 20, 1 << 20, os.POSIX_FADV_WILLNEED)\n{waits}"));
        impresario_testing::until("the advice is there", || hints(&cluster, "hinted_bytes") == 1 << 20);
        advised(&format!("assert ahead(4 << 20, 2 << 20) == 0\n{waits}"));
        impresario_testing::until("what is read ahead is there", || hints(&cluster, "hinted_bytes") == 3 << 20);
        advised(&format!("os.posix_fadvise(fd, 8 << 20, 0, os.POSIX_FADV_WILLNEED)\n{waits}"));
        impresario_testing::until("all of the rest is there", || hints(&cluster, "hinted_bytes") == 11 << 20);
    }
}

/// What a program does with a kind of file is known from files of this machine; one of the cluster is new to it.
#[test]
fn what_was_learnt_of_a_kind_is_asked_for_as_a_program_opens_a_file_of_it() {
    let Some((cluster, _)) = with_file(2, 1, "wednesday.kind", 16 << 20, |_| {}) else { return };
    let (learnt, work) = (cluster.dir.path().join("learnt"), cluster.dir.path().join("work"));
    std::fs::create_dir_all(&work).unwrap();
    let program = work.join("analysis.py");
    let reads = "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\n\
        for at in range(0, os.fstat(fd).st_size, 1 << 20) if len(sys.argv) < 3 else []:\n    os.pread(fd, 65536, at)\n\
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)\n";
    std::fs::write(&program, reads).unwrap();
    let program = program.to_str().unwrap();
    // Of two lengths, or what is learnt holds for one of them only. What they begin with is what they have in common.
    for (day, len) in [("monday", 12 << 20), ("tuesday", 10 << 20)] {
        let (file, trace) = (work.join(format!("{day}.kind")), work.join(format!("{day}.imt")));
        std::fs::write(&file, pattern(1, 1, 0, len)).unwrap();
        let mut record = Command::new(IMPRESARIO);
        record.args(["assist", "record", "-o"]).arg(&trace).args(["--", "python3", program]).arg(&file);
        let ran = run_command(record.env("IMPRESARIO_ASSIST_LIBRARY", library::library()));
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    let mut learn = Command::new(IMPRESARIO);
    learn.args(["assist", "learn"]).args(["monday", "tuesday"].map(|day| work.join(format!("{day}.imt"))));
    let ran = run_command(learn.env("XDG_DATA_HOME", &learnt));
    assert!(ran.code == 0 && ran.out.contains("*.kind"), "{ran:?}");
    let opens = |options: &[&str]| {
        let mut command = Command::new(IMPRESARIO);
        command.args(["run", "--at", AT]).args(options).arg(&cluster.path);
        command.args(["--", "python3", program, &format!("{AT}/wednesday.kind"), "0.2"]);
        command.env("XDG_DATA_HOME", &learnt).env("IMPRESARIO_ASSIST_LIBRARY", library::library());
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{ran:?}");
        hints(&cluster, "hinted_bytes")
    };
    assert_eq!(opens(&["--unguided"]), 0);
    // It reads nothing: all that is asked for is by the kind.
    let mut asked = 0;
    impresario_testing::until("the kind is known in time", || {
        asked = opens(&[]);
        asked > 0
    });
    assert!(asked % 65536 == 0 && asked <= 1 << 20, "{asked}");
}

/// The program says nothing, and nothing is known of it: its reads wait, and show which come next.
#[test]
fn a_pattern_of_slow_reads_is_foreseen() {
    let slow = DeviceParams { interface_bytes_per_s: 4_000_000, ..DeviceParams::default() };
    let made = with_file(2, 0, "input.dat", 24 << 20, |config| {
        config.device.insert("slow".into(), slow);
        config.data.iter_mut().for_each(|data| data.device = Some("slow".into()));
    });
    let Some((cluster, bytes)) = made else { return };
    let script = format!(
        "import os, hashlib\nfd = os.open('{AT}/input.dat', os.O_RDONLY)\nsum = hashlib.sha256()\n\
         for at in range(0, 24 << 20, 300000):\n    sum.update(os.pread(fd, 40000, at))\nprint(sum.hexdigest())"
    );
    let reads = |options: &[&str]| {
        let mut command = Command::new(IMPRESARIO);
        command.args(["run", "--at", AT]).args(options).arg(&cluster.path).args(["--", "python3", "-c", &script]);
        let ran = run_command(command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()));
        assert_eq!(ran.code, 0, "{ran:?}");
        (ran.out, hints(&cluster, "hinted_bytes"))
    };
    let (without, none) = reads(&["--unguided"]);
    let (with, asked) = reads(&[]);
    assert_eq!((none, with), (0, without));
    assert!(asked >= 1 << 20, "{asked}");
    assert!(asked <= bytes.len() as u64, "{asked}");
}
