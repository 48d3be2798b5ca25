//! `impresario trace`: traces of running servers, statistics of traces, conversion from and to other formats, replay.

mod replay;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use impresario_base::replace::replaceable;
use impresario_client::{Access, ClientError, KeyRole, admin};
use impresario_trace::combine::{average, join};
use impresario_trace::convert::{Format, ImportOptions, Imported, export, import};
use impresario_trace::stats::{Collector, Stats};
use impresario_trace::{Ending, FileInfo, Header, Ordered, Origin, Reader, Space, Trace};

use crate::policy::{Which, chosen};
use crate::{load, print, usage};

/// Record request traces on servers, examine and replay them, and convert them from and to other formats
///
/// A trace records reads and writes: by whom, when, and how long each took. Data servers and I/O nodes write traces, and so
/// does `impresario assist record`; the planner of hints and the simulator read them. Darshan's extended tracing (as text), strace, fio's logs and CSV
/// are accepted too. The format: doc/TRACES.md.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Have running servers begin a trace of their requests
    ///
    /// Each writes a new file in the folder that `trace` names in its section of the configuration, until it is told to
    /// stop, ends, or the file has 1 GiB. A full disk ends the trace and not the service.
    #[command(after_long_help = "Example:
  impresario trace start cluster/impresario.toml --all-data")]
    Start(Which),
    /// Have running servers end their traces, and show what is in them
    Stop(Which),
    Load(LoadArgs),
    /// Have running servers forget the earlier runs that they go by
    Unload(Which),
    Info(InfoArgs),
    Stats(StatsArgs),
    Convert(ConvertArgs),
    Merge(MergeArgs),
    Replay(replay::Args),
}

/// Have running servers go by what traces of earlier runs foretell
///
/// Data servers then read ahead what the runs read next, and policies that go by earlier runs (agios, agios-causal, srtf) know
/// which requests are likely to come; `impresario status` tells how many of those that came were foretold. Each server reads
/// its own traces, whole and aside from its requests, and what it knew before is replaced. A trace that another server wrote,
/// that is damaged or not whole, or of whose files the server has none is refused, and nothing changes. All runs together may
/// have 1,048,576 reads and writes; of several runs the mean is taken.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario trace start cluster/impresario.toml --all-data     run the program once, then
  impresario trace stop cluster/impresario.toml --all-data
  impresario trace load cluster/impresario.toml --all-data cluster/traces
  impresario trace load cluster/impresario.toml --server data.0 cluster/traces/data.0-1790000000000.imt")]
pub struct LoadArgs {
    #[command(flatten)]
    which: Which,
    /// Traces, or folders of which each server takes its newest traces (at most 16 runs in all), on the servers' machines
    /// [default: earlier_runs of the server's section]
    runs: Vec<PathBuf>,
}

/// Print a trace's origin, its size, and whether it is complete
#[derive(clap::Args)]
pub struct InfoArgs {
    /// The trace, in any readable format
    file: PathBuf,
    #[command(flatten)]
    from: From,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Print statistics of a trace: sizes, strides, sequentiality, concurrency, bandwidth, offset distance
#[derive(clap::Args)]
#[command(
    after_long_help = "Offset distance is the mean difference of the offsets of every two consecutive requests to a
file, regardless of their origin: the smaller it is, the more contiguous are the requests at the server."
)]
pub struct StatsArgs {
    /// The trace, in any readable format
    file: PathBuf,
    #[command(flatten)]
    from: From,
    /// Number of files to print, those with the longest waiting time first
    #[arg(long, default_value_t = 10, value_name = "N")]
    files: usize,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Convert traces from and to other formats, or combine several into one
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
    /// The output file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The output format: imt, fio2, fio3, csv or chrome [default: from the name of --output, else imt]
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    to: Option<Format>,
    /// Combine several traces: the average of runs of one program, or the join of what several nodes recorded at the
    /// same time
    #[arg(long, value_name = "HOW")]
    combine: Option<Combine>,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
}

/// Make the mean trace of several runs of one program, and tell how much they differ
///
/// The arrival and duration of each request are arithmetic means over the runs that have it; a request that at most half of
/// the runs have is left out. The same as `convert --combine average`.
#[derive(clap::Args)]
#[command(after_long_help = "Example:
  impresario trace merge run1.imt run2.imt run3.imt -o mean.imt")]
pub struct MergeArgs {
    /// The traces of the runs, in any readable format
    #[arg(required = true, num_args = 2..)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// The output file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
}

#[derive(clap::Args)]
pub struct From {
    /// The format of the trace: imt, dxt, strace, fio2, fio3 or csv [default: detected from the content]
    #[arg(long = "from", value_name = "FORMAT", value_parser = format)]
    format: Option<Format>,
    /// From a Darshan log, use the requests of MPI-IO instead of those of POSIX below it
    #[arg(long)]
    mpiio: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Combine {
    /// Mean arrival and duration of each request that most of the traces contain
    Average,
    /// All requests, merged by the wall clocks of the traces
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

/// How long a server may take to read traces.
const LOAD_PATIENCE: Duration = Duration::from_secs(60);

/// Notes for the user go to standard error, beside the output.
fn say(notes: &[String]) {
    notes.iter().for_each(|note| tracing::warn!("{note}"));
}

/// Asks running servers for something. All of them are asked, whatever one answers.
fn ask(which: &Which, of: impl Fn(&Access, &str, Duration) -> Result<String, ClientError>) -> Result<ExitCode> {
    let config = load(&which.config)?;
    let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
    let mut failed = false;
    let access = Access::of(&config, KeyRole::Admin);
    for server in chosen(&config, which, false)? {
        match of(&access, server.address(), timeout) {
            Ok(text) => print(format!("{}: {text}\n", server.name())).map(drop)?,
            Err(error) => {
                tell!("impresario: {} ({}): {error}", server.name(), server.address());
                failed = true;
            }
        }
    }
    Ok(ExitCode::from(u8::from(failed)))
}

/// Servers wait for their file systems before they answer.
fn switch(which: &Which, on: bool) -> Result<ExitCode> {
    ask(which, |access, address, timeout| admin::trace(access, address, on, timeout.max(LOAD_PATIENCE)))
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Start(which) => switch(&which, true),
        Command::Stop(which) => switch(&which, false),
        Command::Load(LoadArgs { which, runs }) => {
            let runs = runs.iter().map(std::path::absolute).collect::<std::io::Result<Vec<PathBuf>>>()?;
            ask(&which, |access, address, timeout| {
                admin::earlier_runs(access, address, Some(&runs), timeout.max(LOAD_PATIENCE))
            })
        }
        Command::Unload(which) => {
            ask(&which, |access, address, timeout| admin::earlier_runs(access, address, None, timeout))
        }
        Command::Info(args) => info(&args),
        Command::Stats(args) => stats(&args),
        Command::Convert(args) => convert(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Merge(MergeArgs { files, from, output, overwrite }) => {
            convert(&ConvertArgs { files, from, output, to: None, combine: Some(Combine::Average), overwrite })
        }
    }
}

/// The results of one pass over a trace.
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

/// Native traces are read in bounded memory, whatever their length.
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
        return print(format!("{json:#}\n"));
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
    print(&out)
}

fn stats(args: &StatsArgs) -> Result<ExitCode> {
    let seen = look(&args.file, &args.from)?;
    if args.json {
        let json = serde_json::json!({ "whole": seen.whole, "files": seen.each });
        return print(format!("{json:#}\n"));
    }
    let mut out = format!("whole trace, {} files\n{}", seen.each.len(), seen.whole.text());
    for file in seen.each.iter().take(args.files) {
        _ = write!(out, "\n{}\n{}", file.path, file.text());
    }
    let more = seen.each.len().saturating_sub(args.files);
    if more > 0 {
        _ = writeln!(out, "\n{more} more files: --files {}", seen.each.len());
    }
    print(&out)
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
        return Err(usage(format!("{shown} already exists: name another file with --output, or add --overwrite")));
    }
    let output = replaceable(&args.output).map_err(|error| usage(format!("{shown}: {error}")))?;
    let mut traces = args.files.iter().map(|f| Ok(args.from.read(f)?.trace)).collect::<Result<Vec<Trace>>>()?;
    let trace = match (args.combine, traces.len()) {
        (None, 1) => traces.remove(0),
        (None, n) => {
            let how = "--combine average (runs of one program) or --combine join (several nodes at the same time)";
            return Err(usage(format!("{n} traces can be combined in two ways: give {how}")));
        }
        (Some(Combine::Join), _) => join(&traces).map_err(|e| anyhow!(e))?,
        (Some(Combine::Average), _) => {
            let mean = average(&traces).map_err(|e| anyhow!(e))?;
            let percent = 100.0 * mean.deviation_median;
            say(&[format!("arrivals differ by {percent:.1} % of their mean (median standard deviation)")]);
            if mean.dropped > 0 {
                say(&[format!("{} requests were left out: at most half of the traces contain them", mean.dropped)]);
            }
            mean.trace
        }
    };
    // Written to a temporary file first: a failed conversion leaves the old file untouched.
    let name = output.file_name().ok_or_else(|| usage(format!("{shown}: --output must name a file")))?;
    let beside = output.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let put = || -> Result<Vec<String>> {
        let notes = export(&trace, &beside, to)?;
        std::fs::rename(&beside, &output).map_err(|e| anyhow!("{shown}: {e}"))?;
        Ok(notes)
    };
    let notes = put().inspect_err(|_| _ = std::fs::remove_file(&beside))?;
    say(&notes);
    print(format!("{} requests written to {shown} ({})\n", trace.records.len(), to.name()))
}
