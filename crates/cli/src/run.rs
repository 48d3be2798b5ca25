//! `impresario run`: a program with a cluster's files under a prefix, on a machine without FUSE or root.

mod guided;

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, bail};
use impresario_base::machine::raise_file_limit;
use impresario_client::{Client, ClientOptions};
use impresario_interpose::served::protocol::{AT_VARIABLE, BYPASS_VARIABLE, FOLDER_VARIABLE, TOKEN_VARIABLE};
use impresario_run::Agent;

use crate::assist::launch::{self, Reach};
use crate::assist::library;
use crate::mount::via;
use crate::{load, usage};

/// Run a program with a cluster's files under a prefix, without a mount
///
/// For machines without FUSE or root. The program and those that it starts find the cluster's files under the prefix, by
/// a library that is preloaded into them; nothing is mounted, and other processes see nothing. Static programs, those
/// that gain rights, and calls past the C library are not served. doc/RUN.md says what works and what does not.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario run cluster/impresario.toml -- ls -l /impresario
  impresario run --at /scratch --job 42 cluster/impresario.toml -- python3 train.py /scratch/data
  impresario run --bypass '/scratch/local/**' --at /scratch cluster/impresario.toml -- make -C /scratch/src

Exit status:
  that of the program; 128 and the signal's number if a signal ended it")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// Where the program finds the cluster's files; what the machine has there is hidden from it
    #[arg(long, value_name = "PREFIX", default_value = "/impresario")]
    at: PathBuf,
    /// Paths that stay the machine's, as a glob: * and ? match no slash, ** anything; may be repeated
    #[arg(long, value_name = "GLOB")]
    bypass: Vec<OsString>,
    /// Number of the job (application) to which the scheduler assigns the requests
    #[arg(long, value_name = "N", default_value_t = 0)]
    job: u64,
    /// Path to the data: auto (as the configuration allocates I/O nodes), direct (bypassing them), or an I/O node's name
    #[arg(long, default_value = "auto")]
    via: String,
    /// Do not foresee what the program reads: the data servers are told only what it says itself
    #[arg(long)]
    unguided: bool,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// How often is looked whether the last program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The same while none of those that are left uses the cluster.
const LOOK_EVERY_MAX: Duration = Duration::from_millis(200);

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = load(&args.config)?;
    let via = via(&config, &args.via)?;
    let at = prefix(&args.at)?;
    let bypass = bypass(&args.bypass)?;
    let Some(name) = args.program.first() else { return Err(usage("name a program after `--`")) };
    if let Reach::No(why) = launch::reach(&name.to_string_lossy())? {
        let remedy = why.split_once(';').map_or(why.as_str(), |(what, _)| what);
        bail!("{remedy}; `impresario mount` serves every program, where FUSE is available");
    }
    let library = library::find()?;
    let client = Client::connect(&config, ClientOptions { job: args.job, via, ..ClientOptions::default() })
        .with_context(|| format!("cannot reach the cluster of {}; see `impresario status`", args.config.display()))?;
    client.follow(&config);
    // The agent has a descriptor for each open file of all programs.
    let files_limit = raise_file_limit(0).before;
    let agent = Agent::start(client, &at, (!args.unguided).then(|| Box::new(guided::Guided::new()) as _))?;
    let mut preload = library.to_preload();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(name);
    command.args(args.program.iter().skip(1)).env("LD_PRELOAD", preload);
    command.env(FOLDER_VARIABLE, agent.folder()).env(TOKEN_VARIABLE, agent.token());
    command.env(AT_VARIABLE, &at).env(BYPASS_VARIABLE, bypass);
    let code = launch::run_one(command, files_limit)?;
    // Programs that it left behind keep their files, as they would on a mount, until a signal asks for the end.
    let told = launch::told_to_end()?;
    let mut pause = LOOK_EVERY;
    while !told.load(Relaxed) && (agent.is_used() || agent.has_programs()) {
        std::thread::sleep(pause);
        // All processes of the machine are looked at.
        pause = if agent.is_used() { LOOK_EVERY } else { (2 * pause).min(LOOK_EVERY_MAX) };
    }
    Ok(code)
}

/// The prefix in its plain form.
fn prefix(at: &Path) -> anyhow::Result<PathBuf> {
    let words: Vec<&[u8]> = at.as_os_str().as_bytes().split(|b| *b == b'/').filter(|word| !word.is_empty()).collect();
    if !at.is_absolute() || words.is_empty() || words.iter().any(|word| matches!(*word, b"." | b"..")) {
        return Err(usage(format!(
            "--at {}: write an absolute path below / without . and .., such as /impresario",
            at.display()
        )));
    }
    let path: Vec<u8> = words.iter().flat_map(|word| [b"/", *word].concat()).collect();
    if path.len() > 1024 {
        return Err(usage("--at: the prefix is longer than 1024 bytes"));
    }
    Ok(OsString::from_vec(path).into())
}

/// The patterns, a line each.
fn bypass(patterns: &[OsString]) -> anyhow::Result<OsString> {
    for pattern in patterns {
        if !pattern.as_bytes().starts_with(b"/") || pattern.as_bytes().contains(&b'\n') {
            return Err(usage(format!(
                "--bypass {}: write a pattern of whole paths, beginning with /",
                pattern.to_string_lossy()
            )));
        }
    }
    Ok(patterns.join(std::ffi::OsStr::new("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_absolute_and_plain() {
        let of = |at: &str| prefix(Path::new(at)).map(|at| at.display().to_string()).map_err(|e| e.to_string());
        assert_eq!(of("/a//b/").as_deref(), Ok("/a/b"));
        for wrong in ["", "a", "/", "/a/../b", "/./"] {
            assert!(of(wrong).unwrap_err().contains("--at"), "{wrong}");
        }
        assert!(bypass(&["relative".into()]).unwrap_err().to_string().contains("--bypass relative"));
        assert_eq!(bypass(&["/a".into(), "/b".into()]).unwrap(), "/a\n/b");
    }
}
