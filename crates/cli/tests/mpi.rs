//! MPI-IO and parallel HDF5: the same programs on a local folder, on a mount, on two mounts, and under `impresario run`,
//! with Open MPI (its own I/O and ROMIO) and MPICH. What they read is checked by them; what they leave is compared byte by
//! byte.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::library;
use crate::support::{Cluster, IMPRESARIO, Ran, run, run_command, run_within};

/// There are fewer processors than ranks.
const LONG: Duration = Duration::from_secs(240);
const AT: &str = "/impresario-mpi";

/// An implementation of MPI.
#[derive(Clone, Copy)]
struct Mpi {
    launcher: &'static str,
    compiler: &'static str,
    /// Arguments of the launcher.
    more: &'static [&'static str],
}

const OPEN_MPI: Mpi = Mpi {
    launcher: "mpirun.openmpi",
    compiler: "mpicc.openmpi",
    more: &["--allow-run-as-root", "--oversubscribe", "--mca", "plm", "isolated", "--mca", "btl", "self,vader"],
};
const MPICH: Mpi = Mpi { launcher: "mpirun.mpich", compiler: "mpicc.mpich", more: &[] };

impl Mpi {
    fn is_there(self) -> bool {
        impresario_testing::require(self.launcher) && impresario_testing::require(self.compiler)
    }

    /// The command of so many processes of a program, which has the library `yield.c` in it.
    fn command(self, ranks: usize, io: &[&str], pause: &str, program: &[&str]) -> Command {
        let mut command = Command::new(self.launcher);
        command.args(self.more).args(io).args(["-n", &ranks.to_string()]).args(program);
        command.env("OMPI_MCA_mpi_yield_when_idle", "1").env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
        command.env("IMPRESARIO_ASSIST_LIBRARY", library::library()).env("LD_PRELOAD", pause);
        command
    }

    fn compiled(self, cluster: &Cluster, name: &str, flags: &[&str]) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpi").join(name);
        let program = cluster.dir.path().join(name).with_extension("out");
        let ran = run_command(Command::new(self.compiler).args(flags).args(["-O1", "-o"]).arg(&program).arg(source));
        assert_eq!(ran.code, 0, "{ran:?}");
        program.to_str().unwrap().to_string()
    }
}

#[track_caller]
fn good(command: &mut Command) {
    let ran: Ran = run_within(LONG, command);
    assert!(ran.code == 0 && ran.out.ends_with("good\n"), "{command:?}: {ran:?}");
}

/// A mount that is gone when the test ends.
struct Mount(PathBuf);

impl Mount {
    fn new(cluster: &Cluster, name: &str, more: &[&str]) -> Mount {
        let folder = cluster.dir.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let words = ["mount".as_ref(), "-d".as_ref(), cluster.path.as_os_str(), folder.as_os_str()];
        let ran = run(words.into_iter().chain(more.iter().map(|word| word.as_ref())));
        assert_eq!(ran.code, 0, "{ran:?}");
        Mount(folder)
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new(IMPRESARIO).args(["umount", "--lazy"]).arg(&self.0).status();
    }
}

/// Runs a program on a local folder, then everywhere else; `program` and its arguments before the folders.
fn same_everywhere(cluster: &Cluster, mpi: Mpi, io: &[&str], ranks: usize, program: &[&str]) {
    let local = cluster.dir.path().join("local");
    std::fs::create_dir(&local).unwrap();
    let pause = mpi.compiled(cluster, "yield.c", &["-shared", "-fPIC"]);
    let with = |front: &[&str], folders: &[&str]| {
        let words: Vec<&str> = [front, program, folders].concat();
        mpi.command(ranks, io, &pause, &words)
    };
    good(&mut with(&[], &[local.to_str().unwrap()]));
    let one = Mount::new(cluster, "mount", &[]);
    let direct = ["direct", "other"].map(|name| Mount::new(cluster, name, &["--direct-io", "--cache-time", "0s"]));
    let (config, at) = (cluster.path.to_str().unwrap(), format!("{AT}/run"));
    let alone = format!("{AT}/alone");
    for name in ["mount", "mounts", "run", "alone"] {
        std::fs::create_dir(one.at(name)).unwrap();
    }
    good(&mut with(&[], &[&one.at("mount")]));
    // Each rank has another mount than the next; with files open, one sees at once what the others write.
    good(&mut with(&[], &[&direct[0].at("mounts"), &direct[1].at("mounts")]));
    // One run of all ranks, as on one machine, and a run of each, as on many.
    let run_of = ["run", "--at", AT, config, "--"];
    let launcher = with(&[], &[&at]);
    let mut under = Command::new(IMPRESARIO);
    under.args(run_of).arg(launcher.get_program()).args(launcher.get_args());
    under.envs(launcher.get_envs().filter_map(|(key, value)| Some((key, value?))));
    good(&mut under);
    good(&mut with(&[&[IMPRESARIO], &run_of[..]].concat(), &[&alone]));
    let files = || std::fs::read_dir(&local).unwrap().map(|entry| entry.unwrap());
    assert!(files().count() > 0);
    for name in ["mount", "mounts", "run", "alone"] {
        let there = std::fs::read_dir(one.at(name)).unwrap().count();
        assert_eq!(
            there,
            files().count(),
            "{name}: {:?}",
            std::fs::read_dir(one.at(name)).unwrap().collect::<Vec<_>>()
        );
        for file in files() {
            let other = Path::new(&one.at(name)).join(file.file_name());
            let (expected, got) = (std::fs::read(file.path()).unwrap(), std::fs::read(&other).unwrap());
            assert!(expected == got, "{} differs from the local file", other.display());
        }
    }
}

fn patterns(mpi: Mpi, io: &[&str], ranks: usize, io_nodes: usize) {
    if !(impresario_testing::require("fuse") && mpi.is_there()) {
        return;
    }
    let cluster = Cluster::start(3, io_nodes, |_| {});
    let program = mpi.compiled(&cluster, "patterns.c", &[]);
    same_everywhere(&cluster, mpi, io, ranks, &[&program]);
}

#[test]
fn open_mpi_with_its_own_io() {
    patterns(OPEN_MPI, &["--mca", "io", "ompio"], 4, 0);
}

#[test]
fn open_mpi_with_romio() {
    patterns(OPEN_MPI, &["--mca", "io", "romio321"], 8, 2);
}

#[test]
fn mpich() {
    patterns(MPICH, &[], 4, 2);
}

#[test]
fn parallel_hdf5() {
    let parallel = Path::new("/usr/lib/python3/dist-packages/h5py/_debian_h5py_mpi");
    if !(impresario_testing::require("fuse") && OPEN_MPI.is_there()) {
        return;
    }
    if !parallel.exists() {
        return impresario_testing::skip("python3-h5py-mpi", format!("{} is missing", parallel.display()));
    }
    let cluster = Cluster::start(3, 2, |_| {});
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpi/parallel.py");
    same_everywhere(&cluster, OPEN_MPI, &[], 4, &["/usr/bin/python3", script.to_str().unwrap()]);
}
