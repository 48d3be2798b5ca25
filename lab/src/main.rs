//! `impresario-lab`: the project's own experiments. It is a user of the product: it drives clusters, simulations and
//! guided programs from outside, and no crate of the product depends on it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use impresario_workload::progress::{all_written, write_json};
use impresario_workload::usage::{Usage, usage};
use serde::Serialize;

mod agios;
mod allocation;
mod auto;
mod client_program;
mod codec;
mod command {
    pub mod core;
    pub mod datapath;
    pub mod goals;
    pub mod guided;
    pub mod reproduce;
    pub mod study;
    pub mod validate;
}
mod concurrency;
mod core_bench;
mod crowd;
mod datapath;
mod failover;
mod forwarding;
mod glusterfs;
mod goals;
mod guided;
mod incast;
mod key_cost;
mod link;
mod live_2002;
mod minimal;
mod nfs_ganesha;
mod nfs_point;
mod peers;
mod prediction;
mod reproduce;
mod server_bench;
mod sim_cost;
mod trace_cost;
mod tree_io;
mod validate;

/// Experiments on Impresario: the papers' results beside ours, validation of the simulator, and the project's benchmarks
///
/// Commands that start a cluster or run programs under guided I/O use the program `impresario` in the same folder as
/// this one, or the one that IMPRESARIO_PROGRAM names.
#[derive(Parser)]
#[command(name = "impresario-lab", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Reproduce(command::reproduce::Args),
    Validate(command::validate::Args),
    Guided(command::guided::Args),
    Goals(command::goals::Args),
    Auto(auto::Args),
    Study(command::study::Args),
    Prediction(prediction::Args),
    Allocation(allocation::Args),
    Datapath(command::datapath::Args),
    Peers(peers::Args),
    Core(command::core::Args),
    Agios(agios::Args),
    #[command(hide = true)]
    AgiosOne(agios::OneArgs),
    Concurrency(concurrency::Args),
    Incast(incast::Args),
    Nfs(nfs_point::Args),
    Glusterfs(glusterfs::Args),
    Forwarding(forwarding::Args),
    Link(link::Args),
    #[command(name = "live-2002")]
    Live2002(live_2002::Args),
    /// Measure what encoding and decoding a frame costs
    Codec,
    SimCost(sim_cost::Args),
    TraceCost(trace_cost::Args),
    KeyCost(key_cost::Args),
    Crowd(crowd::Args),
    Failover(failover::Args),
    TreeIo(tree_io::Args),
    MinimalServer(command::datapath::MinimalServerArgs),
}

/// Writes to standard output.
fn print(text: &[u8]) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Those of all whose names contain one of these texts, or all where there are none; that nothing is left is the user's mistake.
fn named<T>(all: Vec<T>, name: impl Fn(&T) -> String, texts: &[impl AsRef<str>]) -> Result<Vec<T>> {
    let names: Vec<String> = all.iter().map(&name).collect();
    let is_chosen = |item: &T| texts.is_empty() || texts.iter().any(|text| name(item).contains(text.as_ref()));
    let chosen: Vec<T> = all.into_iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        let texts = texts.iter().map(|text| format!("{:?}", text.as_ref())).collect::<Vec<_>>().join(" or ");
        return Err(usage(format!("no name contains {texts}; there are: {}", names.join("; "))));
    }
    Ok(chosen)
}

/// The end of an experiment: its report for people is printed, and what it measured goes to the file that the user named, if any,
/// whatever becomes of the other.
fn report(text: &str, json: Option<&Path>, measured: &impl Serialize) -> Result<ExitCode> {
    all_written([print(text.as_bytes()).map(drop), write_json(json, measured)])?;
    Ok(ExitCode::SUCCESS)
}

/// The program `impresario` that runs servers and guided programs.
fn impresario() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("IMPRESARIO_PROGRAM") {
        return Ok(path.into());
    }
    let path = std::env::current_exe().context("finding this program's own file")?.with_file_name("impresario");
    anyhow::ensure!(
        path.is_file(),
        "there is no {}: build it (make build), or set IMPRESARIO_PROGRAM to the program",
        path.display()
    );
    Ok(path)
}

/// A port of loopback that is free now.
fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let filter = tracing_subscriber::EnvFilter::try_from_env("IMPRESARIO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,fuser=error"));
    // What cannot be logged would be told to standard error, and end its thread when that is full or closed.
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false).init();
    match run(command) {
        Ok(code) => code,
        Err(error) if closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("impresario-lab: {error:#}");
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Reproduce(args) => command::reproduce::run(args),
        Command::Validate(args) => command::validate::run(args),
        Command::Guided(args) => command::guided::run(args),
        Command::Goals(args) => command::goals::run(args),
        Command::Auto(args) => auto::run(&args),
        Command::Prediction(args) => prediction::run(&args),
        Command::Allocation(args) => allocation::run(&args),
        Command::Study(args) => command::study::run(args),
        Command::Datapath(args) => command::datapath::run(args),
        Command::Peers(args) => peers::run(&args),
        Command::Core(args) => command::core::run(args),
        Command::Agios(args) => agios::run(args),
        Command::AgiosOne(args) => agios::run_one(args),
        Command::Concurrency(args) => concurrency::run(&args),
        Command::Incast(args) => incast::run(&args),
        Command::Nfs(args) => nfs_point::run(&args),
        Command::Glusterfs(args) => glusterfs::run(&args),
        Command::Forwarding(args) => forwarding::run(&args),
        Command::Link(args) => link::run(&args),
        Command::Live2002(args) => live_2002::run(&args),
        Command::Codec => codec::run(),
        Command::SimCost(args) => sim_cost::run(&args),
        Command::TraceCost(args) => trace_cost::run(&args),
        Command::KeyCost(args) => key_cost::run(&args),
        Command::Crowd(args) => crowd::run(&args),
        Command::Failover(args) => failover::run(&args),
        Command::TreeIo(args) => tree_io::run(&args),
        Command::MinimalServer(args) => command::datapath::minimal_server(&args),
    }
}

/// A reader that closes the pipe, as in `| head`, is not a failure.
fn closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_explained() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{} is not explained", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{}: {} is not explained", command.get_name(), arg.get_id());
            }
        }
    }

    /// Both tables of the README: what a command answers, and which chain it belongs to.
    #[test]
    fn the_readme_lists_every_command_and_its_chain() {
        let text = include_str!("../README.md");
        let (commands, chains) = text.split_once("## Who measures how").expect("a section");
        let chains = chains.split("\n## ").next().unwrap_or_default();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = format!("`{}`", command.get_name());
            assert!(
                commands.contains(&format!("| {name}")) || commands.contains(&format!(", {name} |")),
                "no answer: {name}"
            );
            assert!(chains.contains(&name), "no chain: {name}");
        }
    }

    #[test]
    fn what_is_measured_is_chosen_by_parts_of_names() {
        let chosen = |texts: &[&str]| named(vec!["1 MiB read", "4 KiB read"], |name| name.to_string(), texts);
        assert_eq!(chosen(&[]).unwrap().len(), 2);
        assert_eq!((chosen(&["MiB"]).unwrap(), chosen(&["x", "read"]).unwrap().len()), (vec!["1 MiB read"], 2));
        let error = chosen(&["write", "x"]).unwrap_err();
        assert!(error.is::<Usage>());
        assert_eq!(error.to_string(), "no name contains \"write\" or \"x\"; there are: 1 MiB read; 4 KiB read");
    }

    #[test]
    fn the_documents_name_commands_that_exist() {
        let told = impresario_testing::documents::check_commands(Cli::command());
        assert!(told > 40, "{told}");
    }
}
