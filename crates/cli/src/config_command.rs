//! `impresario config`: checks a configuration file and prints it with all defaults.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use impresario_config::{Config, Nfs};

use crate::{load, print, print_json};

/// Check or show a configuration file
#[derive(Subcommand)]
pub enum Command {
    /// Report every unknown key and bad value of a configuration file, with line and remedy
    ///
    /// Prints one line for each mistake, as file:line:column: message, and exits with status 2; or prints one line that
    /// summarises the cluster. Also reads the calibrations that servers name by `cost`. Nothing is started or changed.
    Check {
        /// The configuration file
        config: PathBuf,
    },
    /// Print a configuration with every default filled in
    Show {
        /// The configuration file
        config: PathBuf,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check { config: path } if Nfs::stands_alone(&path) => {
            let exports = Nfs::load(&path)?.export.len();
            print(format!("{}: good: an NFS server, {exports} exports\n", path.display()))
        }
        Command::Check { config: path } => {
            let config = Config::load_with_calibrations(&path)?;
            let (data, io) = (config.data.len(), config.io.len());
            let devices = config.data.iter().filter(|d| d.device.is_some()).count();
            let modelled = if devices > 0 { format!(", {devices} of them on modelled devices") } else { String::new() };
            let below = match &config.tree {
                Some(tree) => tree.to_string(),
                None => format!("{data} data servers{modelled}"),
            };
            print(format!("{}: good: {below}, {io} I/O nodes\n", path.display()))
        }
        Command::Show { config, json } if Nfs::stands_alone(&config) => {
            let nfs = Nfs::load(&config)?;
            let text = if json { serde_json::to_string_pretty(&nfs)? + "\n" } else { nfs.to_toml() };
            print(&text)
        }
        Command::Show { config, json: true } => print_json(&load(&config)?.with_defaults()),
        Command::Show { config, json: false } => print(toml::to_string(&load(&config)?.with_defaults())?),
    }
}
