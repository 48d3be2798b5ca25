//! The decision table of `auto`: training, and evaluation outside the training set.
//!
//! `impresario-lab auto train --out crates/sched/src/policy/auto/table.toml`

mod evaluate;
mod situation;
mod train;
mod tree;
mod trial;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use evaluate::Told;
use impresario_sched::PolicySpec;
use impresario_workload::progress::{check_outputs, write_json};
use tree::Growth;

/// Train the decision table of the policy auto in the simulator, and show what it is worth where it was not trained
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run every candidate policy in every training situation and write the table
    Train {
        /// Where to write it; without this: standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Situations
        #[arg(long, default_value_t = 1200, value_name = "N", value_parser = clap::value_parser!(u64).range(8..=100_000))]
        situations: u64,
        /// Seeds of each simulation
        #[arg(long, default_value_t = 1, value_name = "SEEDS", value_parser = clap::value_parser!(u64).range(1..=100))]
        seeds: u64,
        /// Situations whose observations meet a rule at least
        #[arg(long, default_value_t = 15.0, value_name = "N")]
        least: f64,
        /// What a condition must gain at least over all situations, percent
        #[arg(long, default_value_t = 0.2, value_name = "PERCENT")]
        gain: f64,
        /// Conditions of a rule at most
        #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=20))]
        conditions: u32,
        /// Only the rules for I/O nodes, without the rest of the table
        #[arg(long)]
        io_nodes: bool,
        /// Keep what is measured in this file; if it is there, grow the tree from it in place of measuring
        #[arg(long, value_name = "FILE")]
        measured: Option<PathBuf>,
    },
    /// Compare auto with every fixed policy in situations that are not among those of training
    HeldOut {
        /// Another table than the built-in one
        #[arg(long, value_name = "FILE")]
        table: Option<PathBuf>,
        /// Situations, drawn at random
        #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
        situations: u64,
        /// Seed of the draw and of the simulations
        #[arg(long, default_value_t = 1000, value_name = "SEED")]
        seed: u64,
        /// On I/O nodes in front of data servers, in place of data servers
        #[arg(long)]
        io_nodes: bool,
    },
    /// Compare auto with every fixed policy over a schedule of eight phases, none of which is among the training situations
    Phases {
        /// Another table than the built-in one
        #[arg(long, value_name = "FILE")]
        table: Option<PathBuf>,
        /// Seeds of each schedule
        #[arg(long, default_value_t = 3, value_name = "SEEDS", value_parser = clap::value_parser!(u64).range(1..=100))]
        seeds: u64,
        /// Schedules drawn at random in place of the published one, to develop with
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
        drawn: Option<u64>,
        /// Seed of the draw
        #[arg(long, default_value_t = 1, value_name = "SEED", requires = "drawn")]
        seed: u64,
        /// Print every change of policy, with what was observed, instead of the choices at the end of each phase
        #[arg(long)]
        changes: bool,
        /// Print where each phase lost time: runs every candidate of the table too
        #[arg(long, conflicts_with = "changes")]
        losses: bool,
        /// Write the time of every system in every phase to a file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
}

/// Seeds that training does not use.
const OTHER_SEEDS: u64 = 5_000;

fn auto(table: Option<&Path>) -> Result<PolicySpec> {
    let spec = PolicySpec::named("auto");
    let Some(path) = table else { return Ok(spec) };
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let spec = spec.with("table", text);
    impresario_sched::policy::check(&spec, 1).map_err(|e| crate::usage(format!("{}: {e}", path.display())))?;
    Ok(spec)
}

/// Trains a table, or evaluates one.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Train { out, situations, seeds, least, gain, conditions, io_nodes, measured } => {
            let seeds: Vec<u64> = (1..=*seeds).collect();
            let growth = Growth { depth_max: *conditions, leaf_min: *least, gain_min: gain / 100.0 };
            let mut progress = |done: usize, of: usize| {
                if done.is_multiple_of(500) || done == of {
                    eprintln!("{done} of {of} simulations");
                }
            };
            let kept = measured.as_deref().filter(|path| path.exists());
            check_outputs(&[measured.as_deref().filter(|_| kept.is_none()), out.as_deref()])?;
            let measurements = match kept {
                Some(path) => {
                    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
                    serde_json::from_str(&text).with_context(|| path.display().to_string())?
                }
                None => train::measure_all(*situations as usize, &seeds, *io_nodes, &mut progress)?,
            };
            write_json(measured.as_deref().filter(|_| kept.is_none()), &measurements)?;
            let text =
                if *io_nodes { train::io_rules(&measurements, growth) } else { train::table(&measurements, growth)? };
            match out {
                Some(path) => std::fs::write(path, text).with_context(|| path.display().to_string())?,
                None => return crate::print(text.as_bytes()),
            }
        }
        Command::HeldOut { table, situations, seed, io_nodes } => {
            let auto = auto(table.as_deref())?;
            let (situations, fixed) = match io_nodes {
                true => (situation::held_out_io(*situations as usize, *seed), train::fixed_on_io_nodes()),
                false => (situation::held_out(*situations as usize, *seed), evaluate::fixed()),
            };
            let times = evaluate::over_situations(&auto, &fixed, &situations, &[OTHER_SEEDS + seed])?;
            return crate::print(times.situations_text().as_bytes());
        }
        Command::Phases { table, seeds, drawn, seed, changes, losses, json } => {
            check_outputs(&[json.as_deref()])?;
            let auto = auto(table.as_deref())?;
            let seeds: Vec<u64> = (0..*seeds).map(|seed| OTHER_SEEDS + seed).collect();
            let (told, heading) = match (changes, losses) {
                (true, _) => (Told::Changes, "Changes of policy"),
                (_, true) => (Told::Losses, "Where time is lost"),
                _ => (Told::Ends, "At the end of each phase, by data server"),
            };
            let Some(drawn) = drawn else {
                let (times, chosen) = evaluate::over_phases(&auto, &situation::phases(), &seeds, told)?;
                write_json(json.as_deref(), &[&times])?;
                return crate::print(format!("{}\n{heading}:\n{chosen}", times.schedule_text()).as_bytes());
            };
            let (mut schedules, mut all_chosen) = (Vec::new(), String::new());
            for seed in *seed..seed.saturating_add(*drawn) {
                let (times, chosen) = evaluate::over_phases(&auto, &situation::drawn_phases(seed), &seeds, told)?;
                schedules.push(times);
                all_chosen += &chosen;
            }
            write_json(json.as_deref(), &schedules)?;
            return crate::print(format!("{}\n{heading}:\n{all_chosen}", evaluate::drawn_text(schedules)).as_bytes());
        }
    }
    Ok(ExitCode::SUCCESS)
}
