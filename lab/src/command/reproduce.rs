//! `impresario-lab reproduce`: the papers' experiments in the simulator, compared with the papers' results.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::reproduce::{Effort, Figure, Report, Step, campaign, map, page, papers, summary, sweep, text, why};
use anyhow::{Context, Result};
use impresario_base::units::show_seconds;

use crate::{print, usage};
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json, write_text};
use impresario_workload::stop::Stop;
use serde::Serialize;

/// Repeat the experiments of the papers in the simulator, and say where ours agrees
///
/// Every claim of a paper becomes a row: what the paper says, ours with its interval, and a verdict: agrees; gain agrees,
/// times differ; same sign; order inverted; opposite sign; differs; unresolved; or not tested, with the reason. Scenarios
/// and claims are the files of lab/papers; machines are fixed in lab/papers/devices.toml; what a paper leaves out is an
/// assumption of the scenario. doc/REPRODUCTION.md explains the rules and the differences.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab reproduce all --html papers.html
  impresario-lab reproduce twins-2017
  impresario-lab reproduce agios-2013-fig5 --json fig5.json
  impresario-lab reproduce --sweep --divide 4
  impresario-lab reproduce why --markdown why.md
  impresario-lab reproduce map --scale 1,10 --json which-policy.json
  impresario-lab reproduce map --scale 100 --with which-policy.json --json which-policy.json

Papers: server-side-scheduling-2002, aioli-2006, agios-2013, twins-2017. `impresario-lab reproduce list` lists the figures.")]
pub struct Args {
    /// all, a paper, a figure of one, why (what the differences come from), map (which policy wins where), or list
    #[arg(value_name = "WHAT", default_value = "all")]
    what: String,
    /// Instead: under which arrival jitter, placement of ranks, hand-off depth and order of devices the main effects keep
    /// their sign
    #[arg(long)]
    sweep: bool,
    /// Write everything that was measured to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with the papers' plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the tables to a file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Runs of each system in each situation [default: the figure's own, 5 to 16; 4 for the sweep, 3 for the map]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Divide the volume of all applications, and the caches with it, by this: for trying out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    divide: u64,
    /// Simulations at a time; 0: one a core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Of the map: processes, I/O nodes and servers times this; 0: only show what --with has
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1], value_parser = clap::value_parser!(u32).range(0..=10_000))]
    scale: Vec<u32>,
    /// Of the map: take the other scales from a map that was made before (its JSON)
    #[arg(long, value_name = "FILE")]
    with: Option<PathBuf>,
    /// Of the map: one scheduled layer at a time also at scale 1 [default: every I/O-node policy × every data-server policy
    /// at scale 1]
    #[arg(long)]
    one_layer: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref(), args.html.as_deref(), args.markdown.as_deref()])?;
    let effort = Effort { divide: args.divide, repetitions: args.repetitions, threads: usize::from(args.threads) };
    match args.what.as_str() {
        "list" => list(),
        _ if args.sweep => run_for_table(&args, &effort, sweep::run, sweep::markdown, |sweep| &sweep.complaints),
        "map" => run_map(&args, &effort),
        "why" => run_for_table(&args, &effort, why::run, why::markdown, |why| &why.complaints),
        what => run_papers(&args, &effort, what),
    }
}

fn list() -> Result<ExitCode> {
    let mut out = String::new();
    for f in papers::figures()? {
        out += &format!("{} (lab/papers/{}.toml)\n", f.base.title, f.id);
    }
    print(out.as_bytes())
}

fn run_papers(args: &Args, effort: &Effort, what: &str) -> Result<ExitCode> {
    let all = papers::figures()?;
    let wanted: Vec<&Figure> = all.iter().filter(|f| what == "all" || f.paper == what || f.id == what).collect();
    if wanted.is_empty() {
        let papers = papers::PAPERS.join(", ");
        return Err(usage(format!(
            "there is no paper or figure {what}; give all, why, map, list, {papers}, or a figure that `impresario-lab reproduce list` names"
        )));
    }
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let campaign = campaign::run(&wanted, effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let report = Report::of(&wanted, &campaign, effort);
    all_written([
        print(text::terminal(&report).as_bytes()).map(drop),
        write_json(args.json.as_deref(), &report),
        write_text(args.html.as_deref(), || Ok(page::page(&wanted, &campaign, &report))),
        write_text(args.markdown.as_deref(), || {
            Ok([text::markdown(&report), text::markdown_measures(&report)].join("\n"))
        }),
    ])?;
    eprintln!("{} simulations in {}.", campaign.simulations, show_seconds(campaign.took_s));
    // Only a whole run is what the summary is of.
    if what == "all" && effort.divide == 1 && effort.repetitions.is_none() {
        for line in summary::differences(summary::DOCUMENT, &report.figures) {
            eprintln!("doc/REPRODUCTION.md: {line}");
        }
    }
    Ok(status(&report.complaints))
}

/// Makes the simulations of an experiment.
type Simulated<R> = fn(&Effort, &Stop, &mut dyn FnMut(Step)) -> Result<R>;

/// An experiment in virtual time whose report is one table: what runs it, its table, and what went wrong in it.
fn run_for_table<R: Serialize>(
    args: &Args,
    effort: &Effort,
    run: Simulated<R>,
    markdown: fn(&R) -> String,
    complaints: fn(&R) -> &[String],
) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let result = run(effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let table = markdown(&result);
    let written = write_text(args.markdown.as_deref(), || Ok(table.clone()));
    all_written([crate::report(&table, args.json.as_deref(), &result).map(drop), written])?;
    Ok(status(complaints(&result)))
}

fn run_map(args: &Args, effort: &Effort) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut maps = Vec::new();
    for &scale in args.scale.iter().filter(|scale| **scale > 0) {
        let cascade = scale == 1 && !args.one_layer;
        let asked = map::MapOptions { scale, cascade, extent: map::Extent::at(scale), effort: effort.clone() };
        let mut line = Progress::new();
        maps.push(map::run(&asked, &stop, &mut |s| show(&mut line, s)).with_context(|| format!("scale {scale}"))?);
        line.end();
    }
    if let Some(path) = &args.with {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let before: Vec<map::ScaleMap> =
            serde_json::from_str(&text).with_context(|| format!("{} is not a map", path.display()))?;
        maps.extend(before.into_iter().filter(|m| !args.scale.contains(&m.scale)));
        maps.sort_by_key(|m| m.scale);
    }
    let table = map::markdown(&maps);
    all_written([
        print(table.as_bytes()).map(drop),
        write_text(args.json.as_deref(), || {
            // A line for each scale: the file is large.
            let lines: Vec<String> = maps.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
            Ok(format!("[\n{}\n]\n", lines.join(",\n")))
        }),
        write_text(args.markdown.as_deref(), || Ok(table.clone())),
    ])?;
    Ok(status(&maps.iter().flat_map(|m| m.complaints.clone()).collect::<Vec<_>>()))
}

pub(super) fn show(line: &mut Progress, step: Step) {
    let left = step
        .left
        .filter(|l| l.as_secs() > 0)
        .map_or(String::new(), |l| format!(", about {} left", show_seconds(l.as_secs_f64())));
    let filled = 20 * step.done / step.of.max(1);
    line.show_now_and_then(&format!("[{:<20}] {}/{} simulations{left}", "#".repeat(filled), step.done, step.of));
}

/// A violated law or a failed operation is not a result.
pub(super) fn status(complaints: &[String]) -> ExitCode {
    if complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn document(name: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    fn claims(paper: &str) -> Vec<String> {
        let figures = papers::figures().unwrap_or_else(|e| panic!("{e:#}"));
        let of = figures.iter().filter(|f| f.paper == paper).flat_map(|f| &f.metadata.claims);
        of.map(|c| c.id.clone()).collect()
    }

    #[test]
    fn the_documents_name_claims_that_exist() {
        let known: Vec<String> = papers::PAPERS.iter().flat_map(|p| claims(p)).collect();
        let families: Vec<&str> = known.iter().filter_map(|id| id.split_once('.')).map(|(family, _)| family).collect();
        for name in ["doc/REPRODUCTION.md", "lab/papers/WHY.md"] {
            let text = document(name);
            let named = text.split('`').skip(1).step_by(2);
            let named: Vec<&str> = named.filter(|n| families.iter().any(|f| n.starts_with(&format!("{f}.")))).collect();
            assert!(!named.is_empty(), "{name} names no claim");
            for id in named {
                let found = known.iter().any(|k| k == id || id.strip_suffix(".*").is_some_and(|p| k.starts_with(p)));
                assert!(found, "{name}: there is no claim {id}");
            }
        }
    }
}
