//! `impresario-lab goals`: the bounds that the schedulers must reach on modelled disks.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::{Outcome, compare};
use impresario_workload::compare_page;
use impresario_workload::comparison::Effort;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json, write_text};
use impresario_workload::stats::Verdict;
use impresario_workload::storage::Storage;
use serde_json::json;

use crate::goals;
use crate::{impresario, print, usage};

/// Judge what the schedulers must reach on modelled disks, with the parameters of the papers
///
/// mlf and mlf-8k: four applications of eight processes, 16 KiB strided and 256 KiB contiguous, read and write
/// (agios-2013, V), without and with client requests cut to 8 KiB, directly on four data servers. twins: shared
/// strided reads through two I/O nodes (twins-2017, V). Takes long: see --max-minutes.
#[derive(clap::Args)]
pub struct Args {
    /// Which: mlf, mlf-8k, twins [default: all]
    #[arg(value_name = "GOAL")]
    goals: Vec<String>,
    #[command(flatten)]
    effort: Effort,
    /// Share of the full data volume; less than 1 is for trying out, not for judging
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    scale: f64,
    /// Write every run, gain and verdict to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref(), args.html.as_deref()])?;
    let names = if args.goals.is_empty() { goals::NAMES.map(String::from).to_vec() } else { args.goals };
    let mut chosen = Vec::new();
    for name in &names {
        let unknown = || usage(format!("there is no goal {name}; there are {}", goals::NAMES.join(", ")));
        chosen.push(goals::goal(name, &args.effort, args.scale).ok_or_else(unknown)?);
    }
    let stop = catch_signals()?;
    let mut outcomes = Vec::new();
    for goal in chosen {
        eprintln!("goal {}: {}", goal.name, goal.experiment.title);
        let plan = Plan {
            io_nodes: goal.io_nodes,
            device: Some(Default::default()),
            // Goals of policies alone.
            read_ahead_bytes: 0,
            program: Some(impresario()?),
            ..Plan::default()
        };
        let cluster = OwnCluster::start(&plan, &stop)?;
        let mut line = Progress::new();
        let outcome = compare(&Storage::of(&cluster), &goal.experiment, &stop, &mut |p| line.experiment(&p))?;
        line.end();
        let shown = format!("{}\n", outcome.show());
        outcomes.push(outcome);
        // Written after every goal, so that an hour of measuring is not lost with the last one.
        all_written([
            print(shown.as_bytes()).map(drop),
            write_json(args.json.as_deref(), &json!({ "goals": outcomes })),
            write_text(args.html.as_deref(), || Ok(compare_page::page("What the schedulers reach", &outcomes))),
        ])?;
        if stop.is_set() {
            break;
        }
    }
    // 0 if every claim holds; 1 if one does not, or is unresolved.
    let mut claims = outcomes.iter().flat_map(|o: &Outcome| &o.claims);
    Ok(ExitCode::from(u8::from(claims.any(|c| c.verdict != Verdict::Holds))))
}
