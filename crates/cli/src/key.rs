//! `impresario key`: the keys by which servers and clients know one another.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::units::parse_duration;
use impresario_client::KeyRole;
use impresario_transport::{Keys, key_file_name};

use crate::{load, print, print_json, usage};

/// Make, replace and examine the keys of a cluster
///
/// Where servers listen beyond this machine they take only peers with a key. The keys are three files in the folder
/// `key_dir` of the configuration: server.key for machines with servers, client.key for all other machines, admin.key for
/// who may switch policies and reset statistics. Copy to each machine the file that it needs, with mode 0600.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Make the keys of a new cluster
    New {
        /// The configuration file of the cluster
        config: PathBuf,
    },
    /// Replace the keys while the cluster works
    ///
    /// Makes new keys; servers accept the present ones for a while longer. Run it where server.key is, then copy the files
    /// to the other machines in any order. Servers read a changed file by themselves, at the latest when a client shows a
    /// new key or on SIGHUP; clients use it for their next connection. With --keep 0s the present keys are refused as soon as
    /// servers have the new file: for keys that were stolen.
    #[command(after_help = "Examples:
  impresario key rotate impresario.toml
  impresario key rotate impresario.toml --keep 0s")]
    Rotate {
        /// The configuration file of the cluster
        config: PathBuf,
        /// How long servers accept the present keys, such as 90m or 24h, by their own clocks
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
        keep: Duration,
    },
    /// Show which keys there are, without their secrets
    ///
    /// Exits with status 1 when a file that is there cannot be used.
    Show {
        /// The configuration file of the cluster
        config: PathBuf,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::New { config } => {
            let dir = load(&config)?.cluster.key_dir;
            make(&dir, true)?;
            print(format!("made {}\n", names(&dir)))
        }
        Command::Rotate { config, keep } => {
            let dir = load(&config)?.cluster.key_dir;
            let present = Keys::load(&dir.join(key_file_name(KeyRole::Server)))?;
            write(&dir, &present.rotated(keep)?)?;
            let until = match keep.is_zero() {
                true => "the keys from before are refused from now on".into(),
                false => format!("servers accept the keys from before for {} s", keep.as_secs()),
            };
            print(format!("replaced {}; {until}; copy the files to the other machines\n", names(&dir)))
        }
        Command::Show { config, json } => show(&load(&config)?.cluster.key_dir, json),
    }
}

fn names(dir: &Path) -> String {
    let names: Vec<String> =
        KeyRole::ALL.iter().map(|role| dir.join(key_file_name(*role)).display().to_string()).collect();
    names.join(", ")
}

/// Makes keys, unless there are some: then that is an error if they `must_be_new`. True when they were made.
pub fn make(dir: &Path, must_be_new: bool) -> anyhow::Result<bool> {
    let there = KeyRole::ALL.iter().map(|role| dir.join(key_file_name(*role))).find(|file| file.exists());
    match there {
        Some(file) if must_be_new => Err(usage(format!(
            "{} exists; replace keys in use with `impresario key rotate`, or remove the files if they are not in use",
            file.display()
        ))),
        Some(_) => Ok(false),
        None => write(dir, &Keys::draw()?).map(|()| true),
    }
}

/// Writes the files of all roles, that of servers first: it holds everything.
fn write(dir: &Path, keys: &Keys) -> anyhow::Result<()> {
    for role in [KeyRole::Server, KeyRole::Admin, KeyRole::Client] {
        keys.for_role(role).store(&dir.join(key_file_name(role)))?;
    }
    Ok(())
}

fn show(dir: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let (mut rows, mut lines, mut good, mut any) = (Vec::new(), String::new(), true, false);
    for role in KeyRole::ALL {
        let file = dir.join(key_file_name(role));
        match Keys::load(&file) {
            Ok(keys) => {
                any = true;
                for (at, generation) in keys.generations.iter().enumerate() {
                    let state = match (at, generation.until_s) {
                        (0, _) => "in use".to_string(),
                        (_, Some(until_s)) if generation.is_accepted() => {
                            let left_s = until_s.saturating_sub(now_s());
                            format!("replaced; servers with this clock accept it for {left_s} s more")
                        }
                        _ => "replaced; no longer accepted".into(),
                    };
                    lines += &format!("{}: {} key {}: {state}\n", file.display(), keys.role(), generation.number);
                    rows.push(serde_json::json!({
                        "file": file, "role": keys.role().name(), "key": generation.number, "state": state,
                        "until_s": generation.until_s,
                    }));
                }
            }
            Err(error) if error.is_missing => lines += &format!("{}: not on this machine\n", file.display()),
            Err(error) => {
                (any, good) = (true, false);
                lines += &format!("{error}\n");
                rows.push(serde_json::json!({ "file": file, "role": role.name(), "error": error.to_string() }));
            }
        }
    }
    if !any {
        lines += "there are no keys; make them with `impresario key new`\n";
    }
    if json {
        print_json(&rows)?
    } else {
        print(lines)?
    };
    Ok(ExitCode::from(u8::from(!good)))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}
