//! What was learnt of programs, as advice managers ask for it: `run` of its own user's programs, and `daemon` of those of all that it
//! serves. First what the program's user keeps is looked into, with that user's rights and no others, then what is kept for all users
//! of the machine. What cannot be read costs hints and not the run, and what hangs is not asked a second time while it does.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::learn::{Kind, Learnt, SHARED, Store};
use impresario_assist::manager::{Asked, Known};
use impresario_base::lock::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};

use super::lessons::Learner;
use crate::print;

/// A store is waited for so long.
const LOADED_WITHIN: Duration = Duration::from_secs(1);
/// No more is taken from a process of another user.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Nor is more looked at of a program's environment.
const ENVIRONMENT_BYTES_MAX: u64 = 2 << 20;
/// The hidden command by which a process tells what its user knows.
pub const TELL: &str = "tell-learnt";

/// A folder, and with whose rights it is read and written where these are not ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    store: Store,
    /// It is there, or nothing is kept.
    home: PathBuf,
    reader: Option<User>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

/// What a folder says of a program.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
struct Told {
    kinds: Vec<Kind>,
    runs: u64,
}

type Loaded = Result<Option<Told>, String>;

/// What was learnt of a program of this process's own user, whose environment is ours.
pub fn of_own(asked: &Asked<'_>) -> Known {
    let Told { kinds, runs } = first_of(place_by(|name| std::env::var_os(name)).as_ref(), asked.program);
    Known { kinds, runs, keep: None }
}

/// What was learnt of a program of whichever user, and where its runs are learnt from. Without root's rights that is nothing of other
/// users' own: for these the daemon may have a folder itself.
pub fn of_anyone(asked: &Asked<'_>, learner: &Learner, own_state: Option<&Path>) -> Known {
    let place = own_of(asked).or_else(|| own_state.map(|folder| kept_for(asked.uid, folder)));
    let Told { kinds, runs } = first_of(place.as_ref(), asked.program);
    // What cannot be read now cannot be added to either.
    let keep = place.filter(|place| !SILENT.lock().holds(place)).map(|place| learner.keep_at(&place));
    Known { kinds, runs, keep }
}

/// The folder that systemd has made for this daemon (`StateDirectory=`), if it has.
pub fn state_folder() -> Option<PathBuf> {
    let all = std::env::var_os("STATE_DIRECTORY")?;
    let first = all.as_bytes().split(|byte| *byte == b':').next()?;
    Some(PathBuf::from(OsStr::from_bytes(first))).filter(|path| path.is_absolute())
}

/// Where the daemon itself keeps what was learnt of a user's programs, for that user alone.
fn kept_for(uid: u32, state: &Path) -> Place {
    Place { store: Store::at(state.join("learnt").join(uid.to_string())), home: state.into(), reader: None }
}

/// Where a user keeps what is known, by the variables of the environment.
fn place_by(variable: impl Fn(&str) -> Option<OsString> + Copy) -> Option<Place> {
    Some(Place { store: Store::of_user(variable)?, home: Store::home_of_user(variable)?, reader: None })
}

/// Where a program's user keeps what is known, by the program's environment. Whoever uses its number now must be that user still.
fn own_of(asked: &Asked<'_>) -> Option<Place> {
    let own = rustix::process::geteuid();
    if asked.uid != own.as_raw() && !own.is_root() {
        return None;
    }
    let folder = format!("/proc/{}", asked.pid);
    let meta = std::fs::metadata(&folder).ok().filter(|meta| meta.uid() == asked.uid)?;
    let mut environment = Vec::new();
    let file = std::fs::File::open(folder + "/environ").ok()?;
    file.take(ENVIRONMENT_BYTES_MAX).read_to_end(&mut environment).ok()?;
    let place = place_by(|name| variable(&environment, name))?;
    let is_own = asked.uid == own.as_raw();
    Some(Place { reader: (!is_own).then_some(User { uid: asked.uid, gid: meta.gid() }), ..place })
}

/// A variable of an environment as the kernel shows it.
fn variable(environment: &[u8], name: &str) -> Option<OsString> {
    let mut set = environment.split(|byte| *byte == 0);
    let value = set.find_map(|set| set.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(OsStr::from_bytes(value).to_owned())
}

fn first_of(own: Option<&Place>, program: &str) -> Told {
    own.cloned().into_iter().chain([Place::of_machine()]).find_map(|place| load(place, program)).unwrap_or_default()
}

/// Places that have not answered. Each has a thread, and mostly a process, of ours: a program names its place, so a user could have any
/// number of them.
#[derive(Default)]
struct Silent(Vec<(Place, Receiver<Loaded>)>);

impl Silent {
    /// Of all other users together.
    const ALL_MAX: usize = 32;
    const OF_USER_MAX: usize = 4;

    /// Whether a place has not answered, as far as is known.
    fn holds(&self, place: &Place) -> bool {
        self.0.iter().any(|(other, _)| other == place)
    }

    /// A place that did not answer is not asked again until it has, nor more places than may be silent. Those of other users, of
    /// whatever groups, do not keep ours from being asked, and no user's keep the machine's from that.
    fn may_ask(&mut self, place: &Place) -> bool {
        self.0.retain(|(_, answer)| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        let others = || self.0.iter().map(|(other, _)| other).filter(|other| !other.is_machines());
        let of_user = others().filter(|other| other.uid() == place.uid()).count();
        let of_all = others().filter(|other| other.reader.is_some()).count();
        !self.holds(place)
            && (place.is_machines() || of_user < Silent::OF_USER_MAX)
            && (place.reader.is_none() || of_all < Silent::ALL_MAX)
    }
}

static SILENT: Mutex<Silent> = Mutex::new(Silent(Vec::new()));

/// What is said there of a program.
fn load(place: Place, program: &str) -> Option<Told> {
    if !SILENT.lock().may_ask(&place) {
        return None;
    }
    let (tell, answer) = mpsc::channel();
    let asking = {
        let (place, program) = (place.clone(), program.to_string());
        move || drop(tell.send(place.load(&program)))
    };
    std::thread::Builder::new().name("assist-learnt".into()).spawn(asking).ok()?;
    match answer.recv_timeout(LOADED_WITHIN) {
        Ok(loaded) => loaded.inspect_err(|error| tell!("impresario: {error}")).ok()?,
        Err(RecvTimeoutError::Disconnected) => None,
        Err(RecvTimeoutError::Timeout) => {
            let folder = place.store.folder();
            match place.reader {
                // Its name may be anything.
                Some(User { uid, .. }) => tracing::warn!(uid, ?folder, "a user's file system does not answer"),
                None => tell!(
                    "impresario: nothing that was learnt in {} is used: its file system does not answer",
                    folder.display()
                ),
            }
            SILENT.lock().0.push((place, answer));
            None
        }
    }
}

impl From<Learnt> for Told {
    fn from(learnt: Learnt) -> Told {
        Told { kinds: learnt.kinds, runs: learnt.runs }
    }
}

impl Place {
    fn of_machine() -> Place {
        Place { store: Store::of_machine(SHARED), home: SHARED.into(), reader: None }
    }

    fn is_machines(&self) -> bool {
        *self == Place::of_machine()
    }

    /// Whose rights it is read with; `None`: ours.
    fn uid(&self) -> Option<u32> {
        self.reader.map(|user| user.uid)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.store.folder()
    }

    /// What must be there for anything to be kept.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// With whose rights it is read and written, where these are not ours.
    pub fn reader(&self) -> Option<User> {
        self.reader
    }

    /// A process is to have these rights and nothing of ours.
    pub fn bind(&self, command: &mut Command) {
        command.env_clear().current_dir("/").process_group(0);
        if let Some(User { uid, gid }) = self.reader {
            command.uid(uid).gid(gid);
        }
    }

    fn load(&self, program: &str) -> Loaded {
        match self.reader {
            None => self.store.load(program).map(|found| found.map(Told::from)).map_err(|e| e.to_string()),
            // It is the user's affair what is wrong there, and not for our log.
            Some(user) => Ok(self
                .ask(program)
                .inspect_err(|error| tracing::debug!(uid = user.uid, %error, "nothing is known of a user's program"))
                .ok()
                .flatten()),
        }
    }

    /// Asks by a process that has the user's rights and nothing of ours.
    fn ask(&self, program: &str) -> Result<Option<Told>> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("impresario").args(["assist", TELL, "--folder"]).arg(self.store.folder()).arg("--").arg(program);
        self.bind(&mut command);
        let text = answer_of(command, LOADED_WITHIN)?;
        if text.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&text).map_err(io::Error::from).context("its answer")
    }
}

/// What a process prints, which has so long for it, up to [`ANSWER_BYTES_MAX`]. It is a user's, who may stop it, or make it leave others
/// behind that have its output: all of its group end here, whatever they do.
fn answer_of(mut command: Command, within: Duration) -> Result<Vec<u8>> {
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("starting a process of the user")?;
    let answer = child
        .stdout
        .take()
        .context("its output")
        .and_then(|mut out| Ok(read_until(&mut out, Instant::now() + within)?));
    // Its number, and that of its group, is no other's before it was waited for.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let _ = child.wait();
    answer.context("reading its answer")
}

fn read_until(out: &mut ChildStdout, end: Instant) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut part = [0; 16 << 10];
    while text.len() < ANSWER_BYTES_MAX {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&*out, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => continue,
            ready => ready?,
        };
        match out.read(&mut part)? {
            0 => break,
            len => text.extend_from_slice(&part[..len]),
        }
    }
    Ok(text)
}

/// Tell what was learnt of a program in a folder
#[derive(clap::Args)]
pub struct Tell {
    /// The folder
    #[arg(long)]
    folder: PathBuf,
    /// The program
    #[arg(last = true, required = true)]
    program: String,
}

/// Prints what is known; nothing where nothing is.
pub fn tell_learnt(args: Tell) -> Result<ExitCode> {
    if let Some(learnt) = Store::at(args.folder).load(&args.program)? {
        print(serde_json::to_string(&Told::from(learnt))?)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
impl Place {
    /// A folder of another user.
    pub fn of_another(folder: PathBuf, user: User) -> Place {
        Place { store: Store::at(&folder), home: folder, reader: Some(user) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_cannot_be_read_hides_nothing_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let circle = folder.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        let of = |store| Place { store, home: "/".into(), reader: None };
        let good = Store::at(folder.path().join("good"));
        good.prepare().unwrap();
        good.add("a.py", Vec::new()).unwrap();
        assert!(Store::at(&circle).load("a.py").is_err());
        let found = [of(Store::at(&circle)), of(good)].into_iter().find_map(|place| load(place, "a.py"));
        assert_eq!(found, Some(Told { kinds: Vec::new(), runs: 1 }));
    }

    #[test]
    fn no_user_leaves_more_behind_than_a_few_places_that_hang() {
        let place = |uid, n| {
            let store = Store::at(format!("/{uid}/{n}"));
            Place { store, home: "/".into(), reader: Some(User { uid, gid: n }) }
        };
        let (mut silent, mut tells) = (Silent::default(), Vec::new());
        let mut hang = |silent: &mut Silent, uid, n| {
            let may = silent.may_ask(&place(uid, n));
            if may {
                let (tell, answer) = mpsc::channel();
                tells.push(tell);
                silent.0.push((place(uid, n), answer));
            }
            may
        };
        assert!(hang(&mut silent, 1, 0) && !hang(&mut silent, 1, 0), "it is silent");
        assert_eq!((1..100).filter(|n| hang(&mut silent, 1, *n)).count(), Silent::OF_USER_MAX - 1);
        assert!(hang(&mut silent, 2, 0), "another user's");
        assert_eq!((3..100).filter(|uid| hang(&mut silent, *uid, 0)).count(), Silent::ALL_MAX - 5);
        // Ours and the machine's are asked all the same, and of ours not any number.
        let own = |n| Place { store: Store::at(format!("/own/{n}")), home: "/".into(), reader: None };
        for n in 0..Silent::OF_USER_MAX {
            assert!(silent.may_ask(&own(n)));
            let (tell, answer) = mpsc::channel();
            tells.push(tell);
            silent.0.push((own(n), answer));
        }
        assert!(!silent.may_ask(&own(99)) && silent.may_ask(&Place::of_machine()));
        tells.clear();
        assert!(silent.may_ask(&place(1, 0)), "they have answered, or ended");
    }

    /// One that hangs has a thread of ours, and so many of one user's would keep all others from being asked.
    #[test]
    fn a_process_that_its_user_has_stopped_ends_in_time() {
        let ask = |script: &str, within| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            answer_of(command, within)
        };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let stopped = |file: &Path| format!("echo $$ > {}; kill -STOP $$", file.display());
        let left_behind = |file: &Path| format!("sleep 1000 & echo $! > {}", file.display());
        for (what, script) in [("stopped", &stopped as &dyn Fn(&Path) -> String), ("left behind", &left_behind)] {
            let error = ask(&script(&file), Duration::from_millis(500)).unwrap_err();
            let timed_out = error.downcast_ref::<io::Error>().map(io::Error::kind) == Some(io::ErrorKind::TimedOut);
            assert!(timed_out, "{what}: {error:#}");
            // A busy machine may have ended the shell before it wrote the number.
            let Ok(pid) = std::fs::read_to_string(&file) else { continue };
            let stat = format!("/proc/{}/stat", pid.trim());
            let has_ended = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
            impresario_testing::until(what, has_ended);
        }
        assert_eq!(ask("echo all", Duration::from_secs(600)).unwrap(), b"all\n");
        let long = ask("yes", Duration::from_secs(600)).unwrap();
        assert!(long.len() >= ANSWER_BYTES_MAX, "no more than that is taken");
    }

    #[test]
    fn an_environment_names_the_folder() {
        let environment = b"PATH=/bin\0XDG_DATA_HOME_X=/no\0XDG_DATA_HOME=/a=b\0HOME=\0";
        assert_eq!(variable(environment, "XDG_DATA_HOME"), Some("/a=b".into()));
        assert_eq!(variable(environment, "HOME"), Some("".into()));
        assert_eq!(variable(environment, "TMPDIR"), None);
        let pid = std::process::id();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(
            own_of(&Asked { uid: uid.wrapping_add(1), pid, program: "x" }),
            None,
            "another user's process by now"
        );
    }
}
