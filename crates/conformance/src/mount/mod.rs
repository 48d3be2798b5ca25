//! The checks of a mounted file system.

mod agent;
mod checks;
mod protocol;
mod remote;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use impresario_base::Random;
use impresario_base::random::mix;

pub(crate) use agent::{Kind, kind};
pub(crate) use checks::CHECKS;
pub(crate) use protocol::{Found, Op};
pub(crate) use remote::{Remote, teams};

use crate::stamp::{Mark, Stamps};
use crate::{Checking, Error, Options, Report, Shared, Stop, chosen, run_checks};

/// Agents that a check uses.
const AGENTS: usize = 6;

/// What the checks of a mount work with.
pub(crate) struct Site {
    options: Options,
    pub shared: Arc<Shared>,
    /// The folder under test.
    mount: PathBuf,
    /// The run's own folder in it.
    run_folder: String,
    check: &'static str,
    until: Instant,
    pub crew: Vec<Remote>,
    started: u32,
    files: u32,
    /// Identifies the run in stamps.
    run: u64,
    /// Whether files can be opened with O_DIRECT here.
    pub direct: bool,
    pub notes: Vec<String>,
}

impl Site {
    /// A name in the check's folder, for agents.
    pub fn name(&self, file: &str) -> String {
        format!("{}/{}/{file}", self.run_folder, self.check)
    }

    /// The same file below the mount.
    pub fn below(&self, file: &str) -> Option<String> {
        let below = self.options.below.as_ref()?;
        Some(below.join(self.name(file)).to_string_lossy().into_owned())
    }

    /// Whether a check goes on: it has time, and the user has not interrupted it.
    pub fn goes_on(&self) -> bool {
        Instant::now() < self.until && !self.shared.stopped()
    }

    /// Stamps for a new file.
    pub fn stamps(&mut self) -> Stamps {
        self.files += 1;
        Stamps { run: self.run, file: self.files }
    }

    /// The random choices of part `part` of the check.
    pub fn random(&self, part: u64) -> Random {
        let check = self.check.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Random::new(mix(self.options.seed ^ check).wrapping_add(part.wrapping_mul(0x1_0001)))
    }

    /// Another agent, beside the crew.
    pub fn agent(&mut self) -> Checking<Remote> {
        self.started += 1;
        Remote::start(&self.options.agent, &self.mount, self.started, &self.shared)
            .map_err(|error| Stop::Fail(format!("an agent process cannot be started: {error}")))
    }

    /// The command that restarts the server.
    pub fn restart(&self) -> Option<&str> {
        self.options.restart.as_deref()
    }

    /// Prepares for a check: agents without open files, and an empty folder.
    fn prepare(&mut self, check: &'static str, until: Instant) -> Checking {
        (self.check, self.until) = (check, until);
        self.crew.retain_mut(|agent| !agent.is_lost() && matches!(agent.attempt(&Op::CloseAll, &[]), Ok(Ok(_))));
        while self.crew.len() < AGENTS {
            let agent = self.agent()?;
            self.crew.push(agent);
        }
        let name = format!("{}/{check}", self.run_folder);
        self.crew[0].call(&Op::MakeFolder { name }, &[]).map(drop)
    }

    /// Removes what a check left; failures are noted.
    fn clean(&mut self, name: String) {
        let agent = match self.crew.iter_mut().find(|agent| !agent.is_lost()) {
            Some(agent) => Ok(agent),
            None => self.agent().map(|agent| {
                self.crew.push(agent);
                let last = self.crew.len() - 1;
                &mut self.crew[last]
            }),
        };
        let removed = agent.and_then(|agent| agent.attempt(&Op::RemoveAll { name: name.clone() }, &[]));
        let why = match removed {
            Ok(Ok(_) | Err(libc::ENOENT)) => return,
            Ok(Err(errno)) => crate::errno_text(errno),
            Err(Stop::Fail(reason) | Stop::Skip(reason)) => reason,
        };
        self.notes.push(format!("{} could not be removed: {why}", self.mount.join(name).display()));
    }
}

/// The number of a write that is about to be made by an agent.
pub(crate) fn next_mark(agent: &Remote) -> Mark {
    Mark { writer: agent.number, sequence: agent.shared.tick() }
}

/// Checks a folder of a mount.
pub(crate) fn run(options: &Options, mount: &Path, progress: &mut dyn FnMut(&str)) -> Result<Report, Error> {
    let checks = chosen(CHECKS, &options.only)?;
    if let Some(below) = &options.below
        && !below.is_dir()
    {
        return Err(Error::Usage(format!("--below {}: is not a folder", below.display())));
    }
    let shared = Shared::new(options);
    let run_folder = format!(".impresario-conformance-{}-{:x}", std::process::id(), options.seed);
    let below = options.below.as_ref().and_then(|below| std::path::absolute(below).ok());
    let mut site = Site {
        options: Options { below, ..options.clone() },
        run: mix(options.seed ^ mix(u64::from(std::process::id()))) | 1,
        shared: shared.clone(),
        mount: mount.to_owned(),
        run_folder: run_folder.clone(),
        check: "",
        until: Instant::now(),
        crew: Vec::new(),
        started: 0,
        files: 0,
        direct: false,
        notes: Vec::new(),
    };
    begin(&mut site).map_err(|stop| match stop {
        Stop::Fail(reason) | Stop::Skip(reason) => {
            Error::Target(format!("{} cannot be used: {reason}", mount.display()))
        }
    })?;
    let checked = run_checks(options, &shared, &checks, &mut site, progress, Site::prepare, |site| {
        let name = format!("{}/{}", site.run_folder, site.check);
        site.clean(name);
    });
    site.clean(run_folder);
    let target = options.target.to_string_lossy().into_owned();
    Ok(Report { target, seed: options.seed, checks: checked, notes: site.notes })
}

/// Makes the run's folder and finds out whether O_DIRECT works.
fn begin(site: &mut Site) -> Checking {
    let mut agent = site.agent()?;
    agent.call(&Op::MakeFolder { name: site.run_folder.clone() }, &[])?;
    let name = format!("{}/probe", site.run_folder);
    let slot = agent.open(&name, libc::O_RDWR | libc::O_CREAT)?;
    agent.write(slot, 0, &[1; 4096])?;
    let probe = Op::Open { slot: 1 << 20, name: name.clone(), flags: libc::O_RDONLY, direct: true };
    let read = Op::Read { slot: 1 << 20, offset: 0, len: 4096 };
    site.direct = agent.attempt(&probe, &[])?.is_ok() && agent.attempt(&read, &[])?.is_ok();
    agent.call(&Op::CloseAll, &[])?;
    agent.call(&Op::Unlink { name }, &[])?;
    site.crew.push(agent);
    Ok(())
}

/// Serves as an agent of a checker that started this process, on its standard input; returns when the checker has ended.
///
/// # Errors
/// When standard input is not the checker's socket.
pub fn serve_agent() -> io::Result<()> {
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let ((), folder) = protocol::receive(&mut socket)?;
    agent::serve(socket, &PathBuf::from(std::ffi::OsString::from_vec(folder)))
}
