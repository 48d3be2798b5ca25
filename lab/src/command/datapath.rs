//! `impresario-lab datapath`: the data path beside a minimal TCP server.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_base::units::show_seconds;
use impresario_base::unpaced;
use impresario_sched::PolicySpec;
use impresario_workload::children::Children;
use impresario_workload::cluster::{self, OwnCluster, Plan};
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use serde_json::json;

use crate::server_bench::until_ready;
use crate::{datapath, impresario, minimal, named, report};

/// Measure the data path beside a minimal TCP server that does plain pread and pwrite
///
/// No device model, folders in memory, one request outstanding per client, one and four data servers, directly
/// and through an I/O node; the same clients, transport and verification for all.
#[derive(clap::Args)]
pub struct Args {
    /// Repetitions of every load and way
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: u32,
    /// Numbers of data servers
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_name = "N")]
    servers: Vec<usize>,
    /// Only loads whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Share of the full data volume
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    scale: f64,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The minimal server of the data path's yardstick
#[derive(clap::Args)]
#[command(hide = true)]
pub struct MinimalServerArgs {
    /// Folder of its files
    #[arg(long)]
    dir: PathBuf,
    /// File that it writes its address to once it listens
    #[arg(long)]
    address_file: PathBuf,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let loads = named(datapath::loads(args.scale), |load| load.name.clone(), args.only.as_slice())?;
    let stop = catch_signals()?;
    let mut measured = Vec::new();
    let mut line = Progress::new();
    for &servers in &args.servers {
        // The same kind of folder and transport for all; servers not being measured are idle.
        let dir = cluster::folder(None)?;
        let (_children, minimal) = minimal_cluster(servers, dir.path(), &stop)?;
        let none = PolicySpec::named("none");
        let plan = Plan {
            data_servers: servers,
            io_nodes: 1,
            data_policy: none.clone(),
            io_policy: none,
            program: Some(impresario()?),
            ..Plan::default()
        };
        let ours = OwnCluster::start(&plan, &stop)?;
        let (direct, through) = (Storage::of(&ours).direct(), Storage::of(&ours));
        let paths = [
            datapath::Path { way: datapath::Way::Minimal, target: &minimal },
            datapath::Path { way: datapath::Way::Direct, target: &direct },
            datapath::Path { way: datapath::Way::IoNode, target: &through },
        ];
        let show = &mut |load: &str, way: datapath::Way, mib_s: f64, left: Duration| {
            let left = match left.is_zero() {
                true => String::new(),
                false => format!(" (about {} left)", show_seconds(left.as_secs_f64())),
            };
            line.show(&format!("{servers} servers, {load}, {way:?}: {mib_s:.0} MiB/s{left}"));
        };
        measured.extend(datapath::measure(&paths, servers, &loads, args.repetitions, &stop, show)?);
    }
    line.end();
    let samples: Vec<_> = measured.iter().flat_map(datapath::Measured::samples).collect();
    report(&datapath::table(&measured), args.json.as_deref(), &json!({ "samples": samples }))
}

/// Minimal servers as separate processes.
pub(crate) fn minimal_cluster(servers: usize, dir: &Path, stop: &Stop) -> Result<(Children, minimal::Minimal)> {
    let this = std::env::current_exe().context("finding this program's own file")?;
    let mut children = Children::default();
    let file = |i: usize, end: &str| dir.join(format!("minimal.{i}.{end}"));
    for i in 0..servers {
        let folder = file(i, "dir");
        std::fs::create_dir(&folder)?;
        let arguments = [
            "minimal-server".into(),
            "--dir".into(),
            folder.display().to_string(),
            "--address-file".into(),
            file(i, "address").display().to_string(),
        ];
        children.start(&format!("minimal.{i}"), &this, &arguments, &file(i, "log"))?;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut addresses = Vec::new();
    for i in 0..servers {
        let ready = || {
            let text = std::fs::read_to_string(file(i, "address")).ok();
            let address: Option<SocketAddr> = text.and_then(|text| text.parse().ok());
            addresses.extend(address);
            address.is_some()
        };
        let complaint = || format!("the minimal server {i} did not start within 20 s");
        until_ready(&mut children, deadline, stop, ready, complaint)?;
    }
    let pids = children.pids().into_iter().map(|(_, pid)| pid).collect();
    Ok((children, minimal::Minimal { servers: addresses, pids }))
}

pub fn minimal_server(args: &MinimalServerArgs) -> Result<ExitCode> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening on 127.0.0.1")?;
    unpaced::unpace(&listener);
    let new = args.address_file.with_extension("new");
    std::fs::write(&new, listener.local_addr()?.to_string())?;
    std::fs::rename(&new, &args.address_file)?;
    minimal::serve(&listener, &args.dir)?;
    Ok(ExitCode::SUCCESS)
}
