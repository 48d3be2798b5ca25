//! `impresario-lab study`: the project's own studies, in virtual time.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use impresario_base::units::show_seconds;
use impresario_sim::sweep::value;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_text};

use super::reproduce::{show, status};
use crate::reproduce::{Effort, campaign, studies};
use crate::{print, usage};

/// Compare systems in the situations of a study, in virtual time: what policies and their options gain
///
/// Studies are the files of lab/studies: a scenario, and below [metadata] the axes: situations, and last the systems that
/// are compared. Gains are over the first system, run by run of the same seed, with their intervals.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab study policies --repetitions 8
  impresario-lab study policies --set network.jitter_us=0
  impresario-lab study twins-options --set io_nodes.count=4")]
pub struct Args {
    /// policies (what mlf, hbrr and merging gain over arrival order and the elevator), twins-windows, twins-options, twins-timer or io-nodes
    #[arg(value_name = "STUDY")]
    study: String,
    /// Runs of each system in each situation [default: the study's own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Set a key of the scenario in every situation, whatever the study says
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Simulations at a time; 0: one a core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Write the tables to a file, too
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Runs a study and prints its tables.
pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.markdown.as_deref()])?;
    let mut study = studies::study(&args.study).map_err(|e| usage(format!("{e:#}")))?;
    for text in &args.set {
        let set = text.split_once('=').filter(|(key, value)| !key.trim().is_empty() && !value.trim().is_empty());
        let (key, to) =
            set.ok_or_else(|| usage(format!("--set {text:?} sets nothing: write --set servers.in_flight=8")))?;
        study.set(key.trim().into(), value(to.trim()));
    }
    let effort = Effort { repetitions: args.repetitions, threads: usize::from(args.threads), ..Effort::default() };
    // Errors in `--set` are errors of the command line.
    study.cells(&effort).map_err(|e| usage(format!("{e:#}")))?;
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let campaign = campaign::run(&[&study], &effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let none = Default::default();
    let runs = campaign.figures.get(study.id).unwrap_or(&none);
    let table = studies::markdown(&study, runs, effort.repetitions.unwrap_or(study.metadata.repetitions));
    all_written([print(table.as_bytes()).map(drop), write_text(args.markdown.as_deref(), || Ok(table.clone()))])?;
    eprintln!("{} simulations in {}.", campaign.simulations, show_seconds(campaign.took_s));
    campaign.complaints.iter().for_each(|complaint| eprintln!("{complaint}"));
    Ok(status(&campaign.complaints))
}
