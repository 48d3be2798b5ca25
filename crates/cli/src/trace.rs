//! `impresario trace`: what traces hold and say, and other programs' formats.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use impresario_trace::combine::{average, join};
use impresario_trace::convert::{Format, ImportOptions, Imported, export, import};
use impresario_trace::stats::{Collector, Stats};
use impresario_trace::{Ending, FileInfo, Header, Ordered, Origin, Reader, Space, Trace};

use crate::{print, usage};

/// Look into request traces, and convert them from and to other formats
///
/// A trace tells what was read and written, by whom, when and how long it took. Servers and `impresario assist record`
/// write them; the planner of hints, the simulator and prediction read them. Darshan's extended tracing (as text),
/// strace, fio's logs and CSV can be read instead. The format: doc/TRACES.md.
#[derive(clap::Subcommand)]
pub enum Command {
    Info(InfoArgs),
    Stats(StatsArgs),
    Convert(ConvertArgs),
}

/// Print where a trace comes from, how much is in it, and whether it is whole
#[derive(clap::Args)]
pub struct InfoArgs {
    /// The trace, in any format that can be read
    file: PathBuf,
    #[command(flatten)]
    from: From,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Print figures of a trace: sizes, strides, how sequential, how many at once, bandwidth, offset distance
#[derive(clap::Args)]
#[command(
    after_long_help = "Offset distance is the mean difference of the offsets of every two consecutive requests to a
file, whoever sent them: the smaller, the more contiguous is what the server gets."
)]
pub struct StatsArgs {
    /// The trace, in any format that can be read
    file: PathBuf,
    #[command(flatten)]
    from: From,
    /// Print so many files, those that were waited for longest
    #[arg(long, default_value_t = 10, value_name = "N")]
    files: usize,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Convert traces from and to other formats, or make several one
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  strace -f -ttt -T -y -e trace=desc,file,process -o run.strace python3 analysis.py
  impresario trace convert run.strace -o run.imt
  darshan-dxt-parser job.darshan > job.txt; impresario trace convert job.txt -o job.imt
  impresario trace convert run.imt -o run.iolog --to fio3      then: fio --name=replay --read_iolog=run.iolog
  impresario trace convert run.imt -o run.json --to chrome     for chrome://tracing, Perfetto, speedscope
  impresario trace convert run1.imt run2.imt run3.imt -o mean.imt --combine average")]
pub struct ConvertArgs {
    /// The traces
    #[arg(required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// Write this file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The format to be written: imt, fio2, fio3, csv or chrome [default: by the name of --output, else imt]
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    to: Option<Format>,
    /// Make several traces one: the average of runs of one program, or join what several nodes saw at the same time
    #[arg(long, value_name = "HOW")]
    combine: Option<Combine>,
    /// Replace the file if it is there
    #[arg(long)]
    overwrite: bool,
}

#[derive(clap::Args)]
struct From {
    /// The format of the trace: imt, dxt, strace, fio2, fio3 or csv [default: by what is in it]
    #[arg(long = "from", value_name = "FORMAT", value_parser = format)]
    format: Option<Format>,
    /// Of a Darshan log, take the requests of MPI-IO, not those of POSIX below it
    #[arg(long)]
    mpiio: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Combine {
    /// Mean arrival and duration of each request that most of the traces have
    Average,
    /// All requests, by the wall clocks of the traces
    Join,
}

impl From {
    fn read(&self, path: &Path) -> Result<Imported> {
        let imported = import(path, &ImportOptions { format: self.format, mpiio: self.mpiio })?;
        say(&imported.notes);
        Ok(imported)
    }
}

fn format(name: &str) -> Result<Format, String> {
    Format::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = Format::ALL.iter().map(|f| f.name()).collect();
        format!("there is no format {name}; there are {}", known.join(", "))
    })
}

/// What a reader should know goes beside the output.
fn say(notes: &[String]) {
    notes.iter().for_each(|note| tracing::warn!("{note}"));
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Info(args) => info(&args),
        Command::Stats(args) => stats(&args),
        Command::Convert(args) => convert(&args),
    }
}

/// What is read of a trace in one pass.
struct Seen {
    header: Header,
    files: Vec<FileInfo>,
    origins: Vec<Origin>,
    whole: Stats,
    each: Vec<Stats>,
    ending: Ending,
    format: Format,
    late: u64,
}

/// Our own traces are read in bounded memory, whatever their length.
fn look(path: &Path, from: &From) -> Result<Seen> {
    let own = match from.format {
        Some(format) => format == Format::Imt,
        None => begins_as_ours(path),
    };
    if !own {
        let Imported { trace, format, .. } = from.read(path)?;
        let Trace { header, files, origins, records, ending } = trace;
        let mut collector = Collector::new();
        records.iter().for_each(|r| collector.add(r));
        let (whole, each) = collector.finish(&files);
        return Ok(Seen { header, files, origins, whole, each, ending, format, late: 0 });
    }
    let mut records = Ordered::new(Reader::open(path)?);
    let mut collector = Collector::new();
    for record in records.by_ref() {
        collector.add(&record?);
    }
    let (late, reader) = (records.late(), records.input());
    let (whole, each) = collector.finish(reader.files());
    let (header, files, origins) = (reader.header().clone(), reader.files().to_vec(), reader.origins().to_vec());
    let ending = reader.ending().unwrap_or(Ending::Unclosed);
    Ok(Seen { header, files, origins, whole, each, ending, format: Format::Imt, late })
}

fn begins_as_ours(path: &Path) -> bool {
    use std::io::Read;
    let mut begin = [0; 7];
    std::fs::File::open(path).and_then(|mut f| f.read_exact(&mut begin)).is_ok() && &begin == b"IMTRACE"
}

fn info(args: &InfoArgs) -> Result<ExitCode> {
    let seen = look(&args.file, &args.from)?;
    let bytes = std::fs::metadata(&args.file)?.len();
    let requests: u64 = seen.whole.ops.iter().sum();
    let (ending, lost) = match seen.ending {
        Ending::Closed => ("closed", 0),
        Ending::Unclosed => ("unclosed", 0),
        Ending::Torn { lost_bytes } => ("torn", lost_bytes),
    };
    let hosts = seen.origins.iter().map(|o| o.host.as_str()).collect::<std::collections::BTreeSet<_>>().len();
    let processes = seen.origins.iter().map(|o| (&o.host, o.process)).collect::<std::collections::BTreeSet<_>>().len();
    let Header { clock_unix_ns, host, source, command, space } = &seen.header;
    if args.json {
        let json = serde_json::json!({
            "file": args.file.display().to_string(), "format": seen.format.name(), "bytes": bytes, "ending": ending,
            "lost_bytes": lost, "source": source, "host": host, "command": command, "clock_unix_ns": clock_unix_ns,
            "offsets_in": if *space == Space::Lane { "lane" } else { "file" }, "requests": requests,
            "files": seen.files.len(), "threads": seen.origins.len(), "processes": processes, "hosts": hosts,
            "span_s": seen.whole.span_s(), "out_of_order": seen.late,
        });
        return print(format!("{json:#}\n").as_bytes());
    }
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        if !value.is_empty() {
            _ = writeln!(out, "{name:<12}{value}");
        }
    };
    row("trace", format!("{} ({})", args.file.display(), seen.format.name()));
    row("written by", source.clone());
    row("host", host.clone());
    row("command", command.clone());
    row("offsets in", if *space == Space::Lane { "what each server holds".into() } else { String::new() });
    let each = if requests > 0 { format!(", {:.1} bytes each", bytes as f64 / requests as f64) } else { String::new() };
    row("requests", format!("{requests}{each}"));
    row("files", seen.files.len().to_string());
    row("from", format!("{} threads of {processes} processes on {hosts} hosts", seen.origins.len()));
    row("time", format!("{:.3} s", seen.whole.span_s()));
    row(
        "end",
        match seen.ending {
            Ending::Closed => "whole".into(),
            Ending::Unclosed => {
                "not closed: its writer was killed, or still writes; nothing that was written is missing".into()
            }
            Ending::Torn { lost_bytes } => {
                format!("torn: its writer was killed; {lost_bytes} bytes of its last block are lost")
            }
        },
    );
    print(out.as_bytes())
}

fn stats(args: &StatsArgs) -> Result<ExitCode> {
    let seen = look(&args.file, &args.from)?;
    if args.json {
        let json = serde_json::json!({ "whole": seen.whole, "files": seen.each });
        return print(format!("{json:#}\n").as_bytes());
    }
    let mut out = format!("whole trace, {} files\n{}", seen.each.len(), seen.whole.text());
    for file in seen.each.iter().take(args.files) {
        _ = write!(out, "\n{}\n{}", file.path, file.text());
    }
    let more = seen.each.len().saturating_sub(args.files);
    if more > 0 {
        _ = writeln!(out, "\n{more} more files: --files {}", seen.each.len());
    }
    print(out.as_bytes())
}

fn convert(args: &ConvertArgs) -> Result<ExitCode> {
    let to = args.to.or_else(|| Format::of_name(&args.output)).unwrap_or(Format::Imt);
    let shown = args.output.display();
    if !to.writes() {
        return Err(usage(format!(
            "{} can be read, not written: choose --to imt, fio2, fio3, csv or chrome",
            to.name()
        )));
    }
    if args.output.exists() && !args.overwrite {
        return Err(usage(format!("{shown} is there already: name another file with --output, or add --overwrite")));
    }
    let mut traces = args.files.iter().map(|f| Ok(args.from.read(f)?.trace)).collect::<Result<Vec<Trace>>>()?;
    let trace = match (args.combine, traces.len()) {
        (None, 1) => traces.remove(0),
        (None, n) => {
            let how = "--combine average (runs of one program) or --combine join (several nodes at the same time)";
            return Err(usage(format!("{n} traces become one only in one of two ways: say {how}")));
        }
        (Some(Combine::Join), _) => join(&traces).map_err(|e| anyhow!(e))?,
        (Some(Combine::Average), _) => {
            let mean = average(&traces).map_err(|e| anyhow!(e))?;
            let percent = 100.0 * mean.deviation_median;
            say(&[format!("arrivals differ by {percent:.1} % of their mean (median standard deviation)")]);
            if mean.dropped > 0 {
                say(&[format!("{} requests are left out: at most half of the traces have them", mean.dropped)]);
            }
            mean.trace
        }
    };
    // Beside its place first: a conversion that fails leaves what was there.
    let name = args.output.file_name().ok_or_else(|| usage(format!("{shown}: --output must name a file")))?;
    let beside = args.output.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let put = || -> Result<Vec<String>> {
        let notes = export(&trace, &beside, to)?;
        std::fs::rename(&beside, &args.output).map_err(|e| anyhow!("{shown}: {e}"))?;
        Ok(notes)
    };
    let notes = put().inspect_err(|_| _ = std::fs::remove_file(&beside))?;
    say(&notes);
    print(format!("{} requests written to {shown} ({})\n", trace.records.len(), to.name()).as_bytes())
}
