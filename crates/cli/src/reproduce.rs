//! `impresario reproduce`: the papers' experiments in the simulator, beside what the papers say.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use impresario_workload::reproduce::{Effort, Figure, Report, Step, campaign, map, page, papers, sweep, text, why};
use impresario_workload::size::show_seconds;

use crate::bench::{Progress, catch_signals, write_json};
use crate::{print, usage};

/// Repeat the experiments of the papers in the simulator, and say where ours agrees
///
/// Every claim of a paper becomes a row: what the paper says, ours with its interval, and a verdict: agrees, same sign,
/// opposite sign, differs, or unresolved. The machines are fixed in scenarios/papers/devices.toml; what a paper leaves out
/// is an assumption that stands in the scenario. doc/REPRODUCTION.md explains the rules and the differences.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario reproduce all --html papers.html
  impresario reproduce twins-2017
  impresario reproduce agios-2013-fig5 --json fig5.json
  impresario reproduce all --markdown doc/REPRODUCTION.md
  impresario reproduce --sweep --divide 4
  impresario reproduce why --markdown doc/REPRODUCTION.md
  impresario reproduce map --scale 1,10 --json which-policy.json
  impresario reproduce map --scale 100 --with which-policy.json --json which-policy.json

Papers: server-side-scheduling-2002, aioli-2006, agios-2013, twins-2017. `impresario reproduce list` lists the figures.")]
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
    /// Write tables to a file; one that has places for them (`<!-- reproduce: claims -->`) keeps the rest of its text; may
    /// be given several times
    #[arg(long, value_name = "FILE")]
    markdown: Vec<PathBuf>,
    /// Runs of each system in each situation [default: the figure's own, 5 to 16; 4 for the sweep, 3 for the map]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: Option<u32>,
    /// Divide the volume of all applications, and the caches with it, by this: for trying out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    divide: u64,
    /// Simulations at a time; 0: one a core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Of the map: processes, I/O nodes and servers times this; 0: only tell what --with has
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
    let effort = Effort { divide: args.divide, repetitions: args.repetitions, threads: usize::from(args.threads) };
    match args.what.as_str() {
        "list" => list(),
        _ if args.sweep => run_sweep(&args, &effort),
        "map" => run_map(&args, &effort),
        "why" => run_why(&args, &effort),
        what => run_papers(&args, &effort, what),
    }
}

fn list() -> Result<ExitCode> {
    let mut out = String::new();
    for f in papers::figures() {
        out += &format!("{:<36} {} (scenarios/papers/{})\n", f.id, f.title, f.file);
    }
    print(out.as_bytes())
}

fn run_papers(args: &Args, effort: &Effort, what: &str) -> Result<ExitCode> {
    let all = papers::figures();
    let wanted: Vec<&Figure> = all.iter().filter(|f| what == "all" || f.paper == what || f.id == what).collect();
    if wanted.is_empty() {
        let papers = papers::PAPERS.join(", ");
        return Err(usage(format!(
            "there is no paper or figure {what}; give all, why, map, list, {papers}, or a figure that `impresario reproduce list` names"
        )));
    }
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let campaign = campaign::run(&wanted, effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let report = Report::of(&wanted, &campaign, effort)?;
    print(text::terminal(&report).as_bytes())?;
    eprintln!("{} simulations in {}.", campaign.simulations, show_seconds(campaign.took_s));
    write_json(args.json.as_deref(), &report)?;
    if let Some(path) = &args.html {
        std::fs::write(path, page::page(&wanted, &campaign, &report))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let tables = [("claims", text::markdown(&report)), ("measures", text::markdown_measures(&report))];
    write_markdown(&args.markdown, &tables)?;
    Ok(status(&report.complaints))
}

fn run_sweep(args: &Args, effort: &Effort) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let result = sweep::run(effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let table = sweep::markdown(&result);
    print(table.as_bytes())?;
    write_json(args.json.as_deref(), &result)?;
    write_markdown(&args.markdown, &[("sweep", table)])?;
    Ok(status(&result.complaints))
}

fn run_why(args: &Args, effort: &Effort) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let result = why::run(effort, &stop, &mut |s| show(&mut line, s))?;
    line.end();
    let table = why::markdown(&result);
    print(table.as_bytes())?;
    write_json(args.json.as_deref(), &result)?;
    write_markdown(&args.markdown, &[("why", table)])?;
    Ok(status(&result.complaints))
}

fn run_map(args: &Args, effort: &Effort) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut maps = Vec::new();
    for &scale in args.scale.iter().filter(|scale| **scale > 0) {
        let cascade = scale == 1 && !args.one_layer;
        let asked = map::Asked { scale, cascade, extent: map::Extent::at(scale), effort: effort.clone() };
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
    print(table.as_bytes())?;
    if let Some(path) = &args.json {
        // A line for each scale: the file is large, and tracked.
        let lines: Vec<String> = maps.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let text = format!("[\n{}\n]\n", lines.join(",\n"));
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    write_markdown(&args.markdown, &[("map", table)])?;
    Ok(status(&maps.iter().flat_map(|m| m.complaints.clone()).collect::<Vec<_>>()))
}

fn show(line: &mut Progress, step: Step) {
    let left = step
        .left
        .filter(|l| l.as_secs() > 0)
        .map_or(String::new(), |l| format!(", about {} left", show_seconds(l.as_secs_f64())));
    let filled = 20 * step.done / step.of.max(1);
    line.show_now_and_then(&format!("[{:<20}] {}/{} simulations{left}", "#".repeat(filled), step.done, step.of));
}

/// A broken law or a failed operation is not a result.
fn status(complaints: &[String]) -> ExitCode {
    if complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

/// Writes the tables: into their places where the file has them, else as the whole file.
fn write_markdown(files: &[PathBuf], tables: &[(&str, String)]) -> Result<()> {
    for path in files {
        let text = match std::fs::read_to_string(path) {
            Ok(old) => place(&old, tables, path)?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                tables.iter().map(|(_, t)| t.as_str()).collect::<Vec<_>>().join("\n")
            }
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn place(old: &str, tables: &[(&str, String)], path: &Path) -> Result<String> {
    let mut text = old.to_string();
    let mut placed = 0;
    for (name, table) in tables {
        let (begin, end) = (format!("<!-- reproduce: {name} -->"), format!("<!-- reproduce: end of {name} -->"));
        let Some(from) = text.find(&begin).map(|at| at + begin.len()) else { continue };
        let Some(to) = text[from..].find(&end).map(|at| from + at) else {
            bail!("{}: {begin} has no {end} after it; add it", path.display());
        };
        text = format!("{}\n{}\n{}", &text[..from], table.trim_end(), &text[to..]);
        placed += 1;
    }
    if placed == 0 {
        let names: Vec<String> = tables.iter().map(|(name, _)| format!("<!-- reproduce: {name} -->")).collect();
        bail!("{} exists and has none of the places {}; name another file", path.display(), names.join(", "));
    }
    Ok(text)
}

/// The claims of the code, for the test of the document.
#[cfg(test)]
fn claims() -> Vec<String> {
    papers::figures().iter().flat_map(|f| (f.claims)()).map(|c| c.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(name: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../doc").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// Rows of the table of claims in the document: name and verdict.
    fn rows(text: &str) -> Vec<(String, String)> {
        let rows = text.lines().filter(|l| l.starts_with("| `"));
        rows.map(|l| {
            let id = l.split('`').nth(1).unwrap_or_default().to_string();
            let verdict = l.split("**").nth(1).unwrap_or_default().to_string();
            (id, verdict)
        })
        .collect()
    }

    #[test]
    fn the_document_has_the_claims_of_the_code() {
        let documented: Vec<String> = rows(&document("REPRODUCTION.md")).into_iter().map(|r| r.0).collect();
        assert_eq!(documented, claims(), "run `impresario reproduce all --markdown doc/REPRODUCTION.md`");
    }

    #[test]
    fn every_difference_is_explained() {
        let text = document("REPRODUCTION.md");
        let (_, why) = text.split_once("## Why ours differs").expect("a section that explains");
        let explained: Vec<&str> = why.split('`').skip(1).step_by(2).collect();
        for (id, verdict) in rows(&text) {
            if ["agrees", "needs prediction: not yet"].contains(&verdict.as_str()) {
                continue;
            }
            let named = explained.iter().any(|e| *e == id || e.strip_suffix(".*").is_some_and(|p| id.starts_with(p)));
            assert!(named, "{id} is {verdict}, and nothing explains it");
        }
    }

    #[test]
    fn tables_go_into_their_places_and_leave_the_rest() {
        let old = "a\n<!-- reproduce: claims -->\nold\n<!-- reproduce: end of claims -->\nb\n";
        let path = Path::new("x.md");
        let new = place(old, &[("claims", "| new |\n".into()), ("measures", "none".into())], path).unwrap();
        assert_eq!(new, "a\n<!-- reproduce: claims -->\n| new |\n<!-- reproduce: end of claims -->\nb\n");
        assert_eq!(place(&new, &[("claims", "| new |\n".into())], path).unwrap(), new, "twice is once");
        let error = place("text", &[("claims", String::new())], path).unwrap_err().to_string();
        assert!(error.contains("x.md") && error.contains("<!-- reproduce: claims -->"), "{error}");
        assert!(place("<!-- reproduce: claims -->", &[("claims", String::new())], path).is_err());
    }
}
