//! `impresario layout`: how files are striped over the data servers.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::Subcommand;
use impresario_base::units::{parse_positive_bytes, show_bytes};
use impresario_client::{Client, ClientOptions};
use impresario_wire::LayoutRequest;
use serde_json::json;

use crate::{load, print, usage};

/// Show how a file is striped, or set the striping of files created later in a directory
#[derive(Subcommand)]
pub enum Command {
    /// Show how a file is striped over the data servers
    Get {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The file's path in the cluster, from its root
        path: String,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Set the striping of files created later in a directory
    ///
    /// Existing files keep their striping. An unset value comes from the directory above, and finally from the
    /// configuration; without any flag the directory follows the one above it again.
    #[command(after_long_help = "Examples:
  impresario layout set cluster/impresario.toml /big --stripe-size 1m
  impresario layout set cluster/impresario.toml /small --stripe-count 1
  impresario layout set cluster/impresario.toml /small")]
    Set {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The directory's path in the cluster, from its root
        path: String,
        /// Strip size, such as 64k or 1m
        #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes)]
        stripe_size: Option<u64>,
        /// Number of data servers per file
        #[arg(long, value_name = "N")]
        stripe_count: Option<u16>,
        /// Index of the first data server; otherwise files are spread evenly
        #[arg(long, value_name = "INDEX")]
        base: Option<u16>,
    },
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Get { config, path, json } => {
            let (config, client) = connect(&config)?;
            let file = client.open(name(&path), false).with_context(|| format!("cannot open {path}"))?;
            let layout = file.layout();
            let servers = (0..layout.pcount).map(|k| usize::from(layout.server_at(k)));
            // Of a file system below only the numbers are known.
            let server = |i: usize| config.data.get(i).map_or_else(|| format!("data server {i}"), |d| d.name.clone());
            let servers: Vec<String> = servers.map(server).collect();
            let text = if json {
                let all = json!({
                    "path": path, "stripe_bytes": layout.ssize_bytes, "stripe_count": layout.pcount,
                    "base": layout.base, "servers": servers,
                });
                serde_json::to_string_pretty(&all)?
            } else {
                let size = show_bytes(f64::from(layout.ssize_bytes));
                format!("{path}: strips of {size}, distributed in turn over {}", servers.join(", "))
            };
            print(format!("{text}\n"))
        }
        Command::Set { config, path, stripe_size, stripe_count, base } => {
            let (_, client) = connect(&config)?;
            let ssize_bytes =
                stripe_size.map(|n| u32::try_from(n).map_err(|_| usage("--stripe-size must be at most 1g")));
            let request = LayoutRequest { base, pcount: stripe_count, ssize_bytes: ssize_bytes.transpose()? };
            let layout = (request != LayoutRequest::default()).then_some(request);
            client.set_layout(name(&path), layout).with_context(|| format!("cannot set the striping of {path}"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn connect(path: &std::path::Path) -> anyhow::Result<(impresario_config::Config, Arc<Client>)> {
    let config = load(path)?;
    let client = Client::connect(&config, ClientOptions::default())?;
    Ok((config, client))
}

/// A path without its leading slash, as the metadata server expects it.
fn name(path: &str) -> &[u8] {
    path.trim_matches('/').as_bytes()
}
