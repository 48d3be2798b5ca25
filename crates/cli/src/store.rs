//! `impresario store`: the folders of a cluster's servers: made, shown, adopted from older versions.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use impresario_config::Config;
use impresario_server::folders::{self, Folder, State};
use impresario_wire::ClusterId;

use crate::{print, usage};

/// Make, show or adopt the folders of a cluster's servers
///
/// Each folder says of which cluster and server it is, and a server opens no other: a disk that is not mounted, or mounted in
/// the wrong place, stops the server instead of giving zeros for data. `impresario up` makes the folders of a new cluster
/// itself; these commands are for clusters on several machines, for disks that were lost, and for folders of older versions.
#[derive(Subcommand)]
pub enum Command {
    /// Make the empty folders of a new cluster, or that of one new server
    ///
    /// On one machine: --all. On several: on the metadata server's machine --name meta, start that server, then on each data
    /// server's machine --name NAME. A data server of which the metadata server knows a folder is refused: its disk may not be
    /// mounted.
    #[command(after_long_help = "Examples:
  impresario store init impresario.toml --all
  impresario store init impresario.toml --name data.2
  impresario store init impresario.toml --name data.2 --replace")]
    Init {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        which: Which,
        /// The cluster's identity, where its metadata server cannot be asked
        #[arg(long, value_name = "ID", requires = "name")]
        cluster: Option<ClusterId>,
        /// The server had a folder, which is lost with what it held: files with data in it give I/O errors
        #[arg(long, requires = "name")]
        replace: bool,
    },
    /// Give folders that an older version made, or that of a renamed server, to the cluster
    ///
    /// Adopt the metadata server's folder first. Objects and names stay as they are. Stop the servers before.
    Adopt {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        which: Which,
        /// The cluster's identity, where its metadata server cannot be asked
        #[arg(long, value_name = "ID", requires = "name")]
        cluster: Option<ClusterId>,
    },
    /// Show of which cluster and server each folder on this machine is
    ///
    /// Changes nothing. Exits with status 1 when a folder is not what the configuration needs.
    Show {
        /// The configuration file of the cluster
        config: PathBuf,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
}

/// Which folders are meant.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub struct Which {
    /// All folders of the configuration, on this machine
    #[arg(long)]
    all: bool,
    /// The server of this name, or meta
    #[arg(long)]
    name: Option<String>,
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Init { config, which: Which { name: Some(name), .. }, cluster, replace } => {
            let config = named(&config, &name)?;
            let cluster = folders::make_one(&config, &name, cluster, replace)?;
            print(format!("made the folder of {name}, of cluster {cluster}\n").as_bytes())
        }
        Command::Init { config, .. } => {
            let text = match folders::make_all(&load(&config)?)? {
                Some(cluster) => format!("made the folders of cluster {cluster}\n"),
                None => "all folders exist already\n".into(),
            };
            print(text.as_bytes())
        }
        Command::Adopt { config, which: Which { name: Some(name), .. }, cluster } => {
            let config = named(&config, &name)?;
            let cluster = folders::adopt_one(&config, &name, cluster)?;
            print(format!("the folder of {name} is of cluster {cluster} now\n").as_bytes())
        }
        Command::Adopt { config, .. } => adopt_all(&load(&config)?),
        Command::Show { config, json } => show(&load(&config)?, json),
    }
}

/// The configuration, of a cluster whose servers have folders.
fn load(path: &std::path::Path) -> anyhow::Result<Config> {
    let config = crate::load(path)?;
    match &config.tree {
        None => Ok(config),
        Some(tree) => Err(usage(format!(
            "{} serves {tree}, whose files are its own: its servers have no folders",
            path.display()
        ))),
    }
}

fn named(path: &std::path::Path, name: &str) -> anyhow::Result<Config> {
    let config = load(path)?;
    config.server(name).map_err(usage)?;
    Ok(config)
}

/// Adopts every folder of an older version; the survey names the metadata server's first.
fn adopt_all(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    for Folder { name, state, .. } in folders::survey(config) {
        if state? == State::Older {
            let cluster = folders::adopt_one(config, &name, None)?;
            text += &format!("the folder of {name} is of cluster {cluster} now\n");
        }
    }
    if text.is_empty() {
        text = "no folder is of an older version\n".into();
    }
    print(text.as_bytes())
}

fn show(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let (mut rows, mut lines, mut good) = (Vec::new(), String::new(), true);
    for Folder { name, dir, state } in folders::survey(config) {
        let (kind, cluster, store, told) = match &state {
            Ok(State::Blank) => ("empty", None, None, "empty or missing".into()),
            Ok(State::Older) => ("older", None, None, "of an older version; see `impresario store adopt`".into()),
            Ok(State::Made { cluster, server, store }) if *server == name => {
                let number = store.map(|store| format!(", folder {store:016x}")).unwrap_or_default();
                ("made", Some(cluster.to_string()), *store, format!("cluster {cluster}{number}"))
            }
            Ok(State::Made { cluster, server, store }) => {
                let told = format!("made for {server} of cluster {cluster}; see `impresario store adopt`");
                ("of another server", Some(cluster.to_string()), *store, told)
            }
            Err(error) => ("foreign", None, None, error.to_string()),
        };
        good &= kind == "made";
        lines += &format!("{name}: {}: {told}\n", dir.display());
        rows.push(serde_json::json!({
            "server": name,
            "dir": dir,
            "state": kind,
            "cluster": cluster,
            "store": store.map(|store| format!("{store:016x}")),
            "told": told,
        }));
    }
    print(if json { format!("{}\n", serde_json::to_string_pretty(&rows)?) } else { lines }.as_bytes())?;
    Ok(ExitCode::from(u8::from(!good)))
}
