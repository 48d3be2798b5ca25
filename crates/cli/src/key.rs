//! `impresario key`: the keys by which servers and clients know one another.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::units::{parse_duration, show_utc};
use impresario_client::KeyRole;
use impresario_config::Tls;
use impresario_transport::{Keys, key_file_name};

use crate::allocate::lock;
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
    /// Show which keys or certificates there are, without their secrets
    ///
    /// Of a certificate: its role, its fingerprint, its number with its authority, and when it ends. Exits with status 1 when a file
    /// that is there cannot be used, or a certificate has expired or was revoked.
    #[command(after_help = "Examples:
  impresario key show impresario.toml
  impresario key show tls/client.pem")]
    Show {
        /// The configuration file of the cluster, or a file of certificates in PEM
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
            let load = || Keys::load(&dir.join(key_file_name(KeyRole::Server)));
            load()?;
            // Of two commands at once, one would leave server.key and the other client.key.
            let _locked = lock(&dir)?;
            let present = load()?;
            let new = present.rotated(keep)?;
            write(&dir, &new)?;
            let mut until = match keep.is_zero() {
                true => "the keys from before are refused from now on".into(),
                false => format!("servers accept the keys from before for {} s", keep.as_secs()),
            };
            let is_kept = |number: &str| new.generations.iter().any(|kept| kept.number == number);
            for old in present.generations.iter().filter(|old| !keep.is_zero() && old.is_accepted()) {
                if !is_kept(&old.number) {
                    until += &format!("; key {} is refused from now on", old.number);
                }
            }
            print(format!("replaced {}; {until}; copy the files to the other machines\n", names(&dir)))
        }
        Command::Show { config, json } => {
            if holds_certificates(&config) {
                return show_certificates(&[("certificate", config)], None, json);
            }
            let config = load(&config)?;
            match &config.tls {
                Some(tls) => show_certificates(&certificate_files(tls), tls.revoked.as_deref(), json),
                None => show(&config.cluster.key_dir, json),
            }
        }
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
                        "file": file.display().to_string(), "role": keys.role().name(), "key": generation.number, "state": state,
                        "until_s": generation.until_s,
                    }));
                }
            }
            Err(error) if error.is_missing => lines += &format!("{}: not on this machine\n", file.display()),
            Err(error) => {
                (any, good) = (true, false);
                lines += &format!("{error}\n");
                rows.push(serde_json::json!({ "file": file.display().to_string(), "role": role.name(), "error": error.to_string() }));
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

/// Whether a file holds certificates, and no configuration.
fn holds_certificates(file: &Path) -> bool {
    std::fs::read_to_string(file).is_ok_and(|text| text.contains("-----BEGIN CERTIFICATE-----"))
}

/// The files of certificates of a configuration, and what each is.
fn certificate_files(tls: &Tls) -> Vec<(&'static str, PathBuf)> {
    let of_role = |role: KeyRole| (role.name(), tls.certificate_of(role.name()));
    let mut files = vec![("authority", tls.ca.clone())];
    for (role, file) in KeyRole::ALL.into_iter().map(of_role) {
        // Without `{role}` all have one.
        if files.iter().all(|(_, other)| *other != file) {
            files.push((role, file));
        }
    }
    files
}

fn show_certificates(files: &[(&str, PathBuf)], revoked: Option<&Path>, json: bool) -> anyhow::Result<ExitCode> {
    let (mut rows, mut lines, mut good, now) = (Vec::new(), String::new(), true, now_s());
    for (what, file) in files {
        let shown = match impresario_transport::show_certificates(file, revoked) {
            Ok(shown) => shown,
            Err(error) if error.is_missing && error.file == *file && files.len() > 1 => {
                lines += &format!("{}: not on this machine\n", file.display());
                continue;
            }
            Err(error) => {
                good = false;
                lines += &format!("{error}\n");
                rows.push(
                    serde_json::json!({ "file": file.display().to_string(), "what": what, "error": error.to_string() }),
                );
                continue;
            }
        };
        for one in shown {
            let (from_s, until_s) = one.valid_s;
            let state = match () {
                () if one.is_revoked => "revoked".to_string(),
                () if until_s < now => format!("expired on {}", show_utc(until_s)),
                () if from_s > now => format!("not valid before {}", show_utc(from_s)),
                () => format!("valid until {}", show_utc(until_s)),
            };
            good &= !one.is_revoked && (from_s..=until_s).contains(&now);
            let role = match one.role {
                Some(role) => format!("role {role}"),
                None if *what == "authority" => "authority".into(),
                None => "no role".into(),
            };
            let (file, sha256, serial) = (file.display(), &one.sha256, &one.serial);
            lines += &format!("{file}: {role}; {state}; number {serial}; SHA-256 {sha256}\n");
            rows.push(serde_json::json!({
                "file": file.to_string(), "what": what, "role": one.role.map(KeyRole::name), "uris": one.uris, "state": state,
                "from_s": from_s, "until_s": until_s, "serial": serial, "sha256": sha256,
            }));
        }
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
