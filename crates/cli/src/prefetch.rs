//! `impresario prefetch`: what a job will read is brought into the servers' memory before it starts.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use impresario_base::units::{parse_bytes, show_bytes};
use impresario_client::{Client, ClientOptions};
use serde_json::json;

use crate::{load, print, usage};

/// Have the servers read a file, or a range of it, into their memory before it is asked for
///
/// For a job that is about to start, or that will soon come to another file. Nothing is sent here: each data server
/// reads its part of the file, after the requests that clients wait for; in front of a mounted folder ([tree]) the I/O
/// node does, into its page cache. The command tells how much they will read, and
/// does not wait for it; a job that starts meanwhile finds what is there. A server has at most read_ahead_bytes of
/// its configuration read ahead and not yet asked for, so of a large file it takes the beginning; raise
/// read_ahead_bytes for more. What was not read after a minute is no longer counted, but stays in memory while there is
/// room. Nothing is read ahead under the policy none, where the folder is in memory anyway, or where reads go past the
/// page cache.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario prefetch cluster/impresario.toml /in/mesh.h5
  impresario prefetch cluster/impresario.toml /in/steps.dat --offset 10g --length 256m
  impresario status cluster/impresario.toml --json | jq '.servers[].state.read_ahead.hints'")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// The file's path in the cluster, from its root
    path: String,
    /// Where the range begins, such as 64k or 10g
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "0")]
    offset: u64,
    /// How long the range is; to the end of the file unless given
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    length: Option<u64>,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Args { config, path, offset, length, json } = args;
    let config = load(&config)?;
    let client = Client::connect(&config, ClientOptions::default())?;
    let file = client.open(path.trim_matches('/').as_bytes(), false).with_context(|| format!("cannot open {path}"))?;
    let file_bytes = file.attr()?.size;
    if offset >= file_bytes && offset > 0 {
        return Err(usage(format!("--offset: {path} has {file_bytes} bytes; there is nothing from {offset} on")));
    }
    let asked_bytes = file_bytes.saturating_sub(offset).min(length.unwrap_or(u64::MAX));
    let accepted_bytes = file.prefetch(offset, asked_bytes)?.min(asked_bytes);
    let text = if json {
        let all = json!({
            "path": path, "offset": offset, "asked_bytes": asked_bytes, "accepted_bytes": accepted_bytes,
        });
        serde_json::to_string_pretty(&all)?
    } else {
        let (accepted, asked) = (show_bytes(accepted_bytes as f64), show_bytes(asked_bytes as f64));
        let (servers, why_nothing, why_less) = match config.tree {
            None => (
                "data servers",
                "they read nothing ahead (policy none, a device model, a folder in memory) or have no room",
                "they have no room for more (read_ahead_bytes)",
            ),
            Some(_) => (
                "I/O node",
                "it reads nothing ahead (policy none, reads past the page cache, a folder in memory) or has no room",
                "it has no room for more (read_ahead_bytes)",
            ),
        };
        let why = match accepted_bytes {
            all if all == asked_bytes => String::new(),
            0 => format!("; {why_nothing}"),
            _ => format!("; {why_less}"),
        };
        format!("{path}: {accepted} of {asked} are, or are going to be, in the memory of the {servers}{why}")
    };
    print(format!("{text}\n"))
}
