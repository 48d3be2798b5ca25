//! What was learnt of programs, as advice managers ask for it: `run` of its own user's programs, and `daemon` of those of all that it
//! serves. First what the program's user keeps is looked into, with that user's rights and no others, then what is kept for all users
//! of the machine. What cannot be read costs hints and not the run, and what hangs is not asked a second time while it does.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::learn::{Kind, SHARED, Store};
use impresario_assist::manager::Asked;
use impresario_base::lock::Mutex;

use crate::print;

/// A store is waited for so long.
const LOADED_WITHIN: Duration = Duration::from_secs(1);
/// No more is taken from a process of another user.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Nor is more looked at of a program's environment.
const ENVIRONMENT_BYTES_MAX: u64 = 2 << 20;
/// The hidden command by which a process tells what its user knows.
pub const TELL: &str = "tell-learnt";

/// A folder, and with whose rights it is read where these are not ours.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Place {
    store: Store,
    reader: Option<User>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct User {
    uid: u32,
    gid: u32,
}

type Loaded = Result<Option<Vec<Kind>>, String>;

/// What was learnt of a program of this process's own user, whose environment is ours.
pub fn of_own(asked: &Asked<'_>) -> Vec<Kind> {
    let own = Store::of_user(|name| std::env::var_os(name));
    first_of(own.map(|store| Place { store, reader: None }), asked.program)
}

/// What was learnt of a program of whichever user. Without root's rights that is nothing of other users' own.
pub fn of_anyone(asked: &Asked<'_>) -> Vec<Kind> {
    first_of(own_of(asked), asked.program)
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
    let store = Store::of_user(|name| variable(&environment, name))?;
    let is_own = asked.uid == own.as_raw();
    Some(Place { store, reader: (!is_own).then_some(User { uid: asked.uid, gid: meta.gid() }) })
}

/// A variable of an environment as the kernel shows it.
fn variable(environment: &[u8], name: &str) -> Option<OsString> {
    let mut set = environment.split(|byte| *byte == 0);
    let value = set.find_map(|set| set.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(OsStr::from_bytes(value).to_owned())
}

fn first_of(own: Option<Place>, program: &str) -> Vec<Kind> {
    let shared = Place { store: Store::of_machine(SHARED), reader: None };
    own.into_iter().chain([shared]).find_map(|place| load(place, program)).unwrap_or_default()
}

/// Places that have not answered. Each has a thread, and mostly a process, of ours: a program names its place, so a user could have any
/// number of them.
#[derive(Default)]
struct Silent(Vec<(Place, Receiver<Loaded>)>);

impl Silent {
    const ALL_MAX: usize = 32;
    const OF_USER_MAX: usize = 4;

    /// A place that did not answer is not asked again until it has, nor more places than may be silent.
    fn may_ask(&mut self, place: &Place) -> bool {
        self.0.retain(|(_, answer)| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        let of_user = self.0.iter().filter(|(other, _)| other.reader == place.reader).count();
        of_user < Silent::OF_USER_MAX
            && self.0.len() < Silent::ALL_MAX
            && self.0.iter().all(|(other, _)| other != place)
    }
}

/// What is said there of a program.
fn load(place: Place, program: &str) -> Option<Vec<Kind>> {
    static SILENT: Mutex<Silent> = Mutex::new(Silent(Vec::new()));
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

impl Place {
    fn load(&self, program: &str) -> Loaded {
        match self.reader {
            None => self.store.load(program).map(|found| found.map(|learnt| learnt.kinds)).map_err(|e| e.to_string()),
            // It is the user's affair what is wrong there, and not for our log.
            Some(user) => Ok(self
                .ask_as(user, program)
                .inspect_err(|error| tracing::debug!(uid = user.uid, %error, "nothing is known of a user's program"))
                .ok()
                .flatten()),
        }
    }

    /// Asks by a process that has that user's rights and nothing of ours.
    fn ask_as(&self, user: User, program: &str) -> Result<Option<Vec<Kind>>> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("impresario").args(["assist", TELL, "--folder"]).arg(self.store.folder()).arg("--").arg(program);
        command.env_clear().current_dir("/").process_group(0).uid(user.uid).gid(user.gid);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("starting a process of the user")?;
        let mut text = Vec::new();
        let out = child.stdout.take().context("its output")?;
        let read = out.take(ANSWER_BYTES_MAX).read_to_end(&mut text);
        // It has said what it had to say, whatever else its user does with it.
        let _ = child.kill();
        let _ = child.wait();
        read.context("reading its answer")?;
        if text.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&text).map_err(io::Error::from).context("its answer")
    }
}

/// Tell what was learnt of a program in a folder
#[derive(clap::Args)]
pub struct Tell {
    /// The folder
    #[arg(long)]
    folder: std::path::PathBuf,
    /// The program
    #[arg(last = true, required = true)]
    program: String,
}

/// Prints the kinds that are known; nothing where there are none.
pub fn tell_learnt(args: Tell) -> Result<ExitCode> {
    if let Some(learnt) = Store::at(args.folder).load(&args.program)? {
        print(serde_json::to_string(&learnt.kinds)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_hides_nothing_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let circle = folder.path().join("circle");
        std::os::unix::fs::symlink("circle", &circle).unwrap();
        let of = |store| Place { store, reader: None };
        let good = Store::at(folder.path().join("good"));
        good.prepare().unwrap();
        good.add("a.py", Vec::new()).unwrap();
        assert!(Store::at(&circle).load("a.py").is_err());
        let found = [of(Store::at(&circle)), of(good)].into_iter().find_map(|place| load(place, "a.py"));
        assert_eq!(found, Some(Vec::new()));
    }

    #[test]
    fn no_user_leaves_more_behind_than_a_few_places_that_hang() {
        let place = |uid, n| Place { store: Store::at(format!("/{uid}/{n}")), reader: Some(User { uid, gid: 1 }) };
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
        tells.clear();
        assert!(silent.may_ask(&place(1, 0)), "they have answered, or ended");
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
