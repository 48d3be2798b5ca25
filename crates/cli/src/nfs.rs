//! `impresario nfs`: folders and file systems, offered over NFS version 3 with scheduling.

use std::fs::File;
use std::io::{Read, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use impresario_base::guarded_folder;
use impresario_base::machine::path_of;
use impresario_base::units::{parse_bytes, parse_positive_bytes, show_bytes};
use impresario_config::{Nfs, NfsExport, Squash, Tree, TreeBackend, read_table};
use impresario_metrics::Endpoint;
use impresario_nfs::{ExportSettings, HandleKey, Listening, Reopen, Rules, Running, Settings};
use impresario_sched::PolicySpec;
use impresario_server::file_system::{self, FileSystem};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use serde_json::Value;

use crate::{notify_ready, print, usage};

/// Offer folders and file systems over NFS version 3, with request scheduling
///
/// Any client of NFSv3 mounts it: that of a kernel, or libnfs. Reads and writes of all clients go through one scheduler. The
/// exports come from --export, or from the section [nfs] of a configuration file, which may also name GlusterFS volumes and
/// CephFS; options of the command line go before the file's. Prints one line when it serves, and logs to standard error. SIGTERM or Ctrl-C stops it after it has answered the calls
/// that it has taken. doc/NFS.md has the promises, the limits and how clients mount.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario nfs --export /srv/data --listen 127.0.0.1:2049
  impresario nfs --export /srv/data:/data --allow 10.0.0.0/8 --listen 0.0.0.0:2049
  impresario nfs impresario.toml --status /run/impresario/nfs.sock
  mount -t nfs -o vers=3,tcp,port=2049,mountport=2049,mountproto=tcp,nolock HOST:/data /mnt/x")]
pub struct Args {
    /// A configuration file with a section [nfs]
    config: Option<PathBuf>,
    /// Offer this folder, under a name or its own path; may be repeated
    #[arg(long, value_name = "FOLDER[:NAME]")]
    export: Vec<String>,
    /// Listen here, for NFS and MOUNT alike; may be repeated [default: 127.0.0.1:2049]
    #[arg(long, value_name = "IP:PORT")]
    listen: Vec<String>,
    /// Networks that may use what --export names; may be repeated [default: this machine]
    #[arg(long, value_name = "NETWORK")]
    allow: Vec<String>,
    /// Refuse every change to what --export names
    #[arg(long)]
    read_only: bool,
    /// Which users act as the anonymous one: root, all or none
    #[arg(long, value_name = "WHO", value_parser = parse_squash)]
    squash: Option<Squash>,
    /// Let clients call from any port, not only from those below 1024 that root has
    #[arg(long)]
    any_port: bool,
    /// Answer changes of names and attributes before they are on stable storage: faster, and a power failure may undo them
    #[arg(long)]
    unstable_names: bool,
    /// Scheduling policy, such as "mlf" or "mlf window_us=1000" (see `impresario policy list`) [default: auto]
    #[arg(long)]
    policy: Option<PolicySpec>,
    /// Batches that each file system below the exports has at once at most [default: 16]
    #[arg(long, value_name = "N")]
    in_flight: Option<u32>,
    /// How far to read ahead of the clients; 0: not at all (see read_ahead_bytes in doc/CONFIGURATION.md) [default: 128m]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    read_ahead: Option<u64>,
    /// Bytes of unstable writes to acknowledge before they are done, where files have no page cache (see gather_bytes in
    /// doc/CONFIGURATION.md) [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    gather: Option<u64>,
    /// Also schedule reads that the page cache has; else they are answered at once
    #[arg(long)]
    schedule_cached_reads: bool,
    /// Memory for calls and answers, such as 256m [default: 256m]
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes)]
    memory: Option<u64>,
    /// The file with the secret of handles; made where there is none
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Tell the portmapper of this machine where the server is, for clients that are not told its port
    #[arg(long)]
    register: bool,
    /// Tell the state at this socket: `impresario status SOCKET`
    #[arg(long, value_name = "SOCKET")]
    status: Option<PathBuf>,
    /// Serve metrics for Prometheus at http://IP:PORT/metrics
    #[arg(long, value_name = "IP:PORT")]
    metrics: Option<SocketAddr>,
}

/// Where the portmapper of a machine is.
const PORTMAPPER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 111);

fn parse_squash(text: &str) -> Result<Squash, String> {
    match text {
        "root" => Ok(Squash::Root),
        "all" => Ok(Squash::All),
        "none" => Ok(Squash::None),
        _ => Err("write root, all or none".into()),
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let nfs = settle(args)?;
    let start = || {
        let (running, opened) = start(&nfs)?;
        let observe = with_file_systems(running.observer(), &opened);
        let socket = nfs.status.as_deref().map(|path| StatusSocket::open(path, observe)).transpose()?;
        let metrics = nfs.metrics.map(|address| Endpoint::open(address, "nfs", running.observer())).transpose()?;
        let addresses: Vec<String> = running.addresses().iter().map(ToString::to_string).collect();
        tracing::info!(addresses = addresses.join(" "), pid = std::process::id(), "serving");
        // The reader of our output may have closed its end; the server keeps running.
        drop(print(format!("nfs serves on {}\n", addresses.join(" "))));
        notify_ready();
        Ok((running, opened, socket, metrics))
    };
    let stop = |(running, opened, socket, metrics): (Running, Vec<Opened>, Option<StatusSocket>, Option<Endpoint>)| {
        drop((socket, metrics));
        drop(running);
        // Last: a file system that is left without a word keeps what this server had of it for a while.
        drop(opened);
    };
    let no_signals = |e| anyhow::Error::new(e).context("handling signals");
    impresario_server::until_signal("nfs", start, no_signals, |_| false, stop)?;
    Ok(ExitCode::SUCCESS)
}

/// What the file and the command line say together.
fn settle(args: Args) -> anyhow::Result<Nfs> {
    let mut nfs = match &args.config {
        Some(file) => Nfs::load(file)?,
        None => Nfs::default(),
    };
    for export in &args.export {
        let (dir, name) = match export.rsplit_once(":/") {
            Some((dir, name)) => (dir.to_string(), format!("/{name}")),
            None => {
                let full = std::path::absolute(export).with_context(|| format!("--export {export}"))?;
                (export.clone(), full.display().to_string())
            }
        };
        let name = if name.len() > 1 { name.trim_end_matches('/').to_string() } else { name };
        let mut export = NfsExport::new(name, std::path::absolute(&dir).with_context(|| format!("--export {dir}"))?);
        if !args.allow.is_empty() {
            export.networks = args.allow.clone();
        }
        (export.read_only, export.privileged_ports) = (args.read_only, !args.any_port);
        export.squash = args.squash.unwrap_or_default();
        export.stable_names = !args.unstable_names;
        nfs.export.push(export);
    }
    let flags = args.read_only || args.any_port || args.unstable_names;
    if args.export.is_empty() && (!args.allow.is_empty() || args.squash.is_some() || flags) {
        return Err(usage(
            "--allow, --read-only, --squash, --any-port and --unstable-names are for what --export names; the file's exports \
             say this themselves",
        ));
    }
    if !args.listen.is_empty() {
        nfs.listen = args.listen;
    }
    nfs.policy = args.policy.unwrap_or(nfs.policy);
    nfs.in_flight_requests = args.in_flight.unwrap_or(nfs.in_flight_requests);
    nfs.read_ahead_bytes = args.read_ahead.unwrap_or(nfs.read_ahead_bytes);
    nfs.gather_bytes = args.gather.unwrap_or(nfs.gather_bytes);
    nfs.schedule_cached_reads |= args.schedule_cached_reads;
    nfs.memory_bytes = args.memory.unwrap_or(nfs.memory_bytes);
    nfs.key_file = args.key_file.or(nfs.key_file);
    nfs.status = args.status.or(nfs.status);
    nfs.metrics = args.metrics.or(nfs.metrics);
    nfs.register |= args.register;
    if nfs.export.is_empty() {
        return Err(usage("there is nothing to export; name a folder with --export, or a file with [[nfs.export]]"));
    }
    match nfs.check().into_iter().next() {
        Some((key, why)) => Err(usage(format!("{key}: {why}"))),
        None => Ok(nfs),
    }
}

/// Serves the folder anew that was made in the place of this one. Never what a symbolic link leads to that was made there since.
fn reopening(tree: Tree) -> Reopen {
    let dir = tree.folder.canonicalize().unwrap_or_else(|_| tree.folder.clone());
    Box::new(move || {
        let failed = |error: &dyn std::fmt::Display| format!("its folder {}: {error}", dir.display());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat2(CWD, &dir, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        let opened = opened.map_err(|error| failed(&error))?;
        let now = Tree { folder: path_of(&opened).into(), ..tree.clone() };
        let now = FileSystem::open(&now, Default::default()).map_err(|error| failed(&error))?;
        Ok(now.backend)
    })
}

/// A file system of which several exports may be, and what `status` says of it.
#[derive(Clone)]
struct Opened {
    tree: Tree,
    system: Arc<FileSystem>,
}

/// Opens the file systems of all exports. Those of one volume share it: its rules of writing hold among those who use the same
/// client of it.
fn open_all(nfs: &Nfs) -> anyhow::Result<Vec<Opened>> {
    let mut all: Vec<Opened> = Vec::new();
    for export in &nfs.export {
        let tree = export.file_system();
        let shared = |other: &&Opened| tree.backend != TreeBackend::Posix && other.tree == tree;
        let known = all.iter().find(shared).cloned();
        if let Some(known) = known {
            all.push(known);
            continue;
        }
        // With port 0 nothing tells this server from another one of the machine.
        let is_known = !nfs.listen.iter().any(|address| address.ends_with(":0"));
        let identity = is_known.then(|| format!("nfs {} {}", nfs.listen.join(" "), export.name));
        let settings = file_system::Settings { patience: None, identity };
        let opened = FileSystem::open(&tree, settings).map_err(|error| anyhow::anyhow!("{error}"));
        let system = opened.with_context(|| format!("the export {}: {tree} cannot be served", export.name))?;
        if (system.describe)()["permanent_handles"] == false {
            tracing::warn!(
                export = export.name,
                "its file system gives no permanent handles, or this process lacks the right to use them: clients see \
                 stale handles when the server restarts"
            );
        }
        all.push(Opened { tree, system: Arc::new(system) });
    }
    Ok(all)
}

/// The state, with what there is to say of file systems that are no folders of this machine.
fn with_file_systems(
    observe: impl Fn() -> Value + Send + 'static,
    opened: &[Opened],
) -> impl Fn() -> Value + Send + 'static {
    let systems: Vec<Option<Weak<FileSystem>>> = opened
        .iter()
        .map(|Opened { tree, system }| (tree.backend != TreeBackend::Posix).then(|| Arc::downgrade(system)))
        .collect();
    move || {
        let mut state = observe();
        let exports = state["exports"].as_array_mut().into_iter().flatten();
        for (export, system) in exports.zip(&systems) {
            if let Some(system) = system.as_ref().and_then(Weak::upgrade) {
                export["file_system"] = (system.describe)();
            }
        }
        state
    }
}

fn start(nfs: &Nfs) -> anyhow::Result<(Running, Vec<Opened>)> {
    let key = handle_key(nfs)?;
    let addresses = nfs.listen.iter().map(|address| address.parse()).collect::<Result<Vec<_>, _>>()?;
    // First: opening a tree of CephFS ends the session of the server that has these addresses.
    let listen = Listening::bind(&addresses).map_err(anyhow::Error::msg)?;
    let opened = open_all(nfs)?;
    let exports = nfs.export.iter().zip(&opened).map(|(export, Opened { tree, system })| {
        Ok(ExportSettings {
            name: export.name.clone(),
            backend: system.backend.clone(),
            folder: export.folder.clone(),
            rules: Rules {
                access: export.rules().map_err(anyhow::Error::msg)?,
                privileged_ports: export.privileged_ports,
                stable_names: export.stable_names,
            },
            // The root of a volume is never another one.
            reopen: (tree.backend == TreeBackend::Posix).then(|| reopening(tree.clone())),
        })
    });
    let settings = Settings {
        listen,
        exports: exports.collect::<anyhow::Result<_>>()?,
        key,
        policy: read_table(&nfs.policy).map_err(anyhow::Error::msg)?,
        in_flight_requests: nfs.in_flight_requests,
        read_ahead_bytes: nfs.read_ahead_bytes,
        gather_bytes: nfs.gather_bytes,
        schedule_cached_reads: nfs.schedule_cached_reads,
        name_threads: nfs.name_threads,
        max_connections: nfs.max_connections,
        memory_bytes: nfs.memory_bytes,
        idle_max: Duration::from_secs(nfs.idle_s),
        portmapper: nfs.register.then_some(PORTMAPPER),
    };
    Ok((impresario_nfs::start(settings).map_err(anyhow::Error::msg)?, opened))
}

/// Where root's key lies unless configured.
const KEY_FILE_OF_ROOT: &str = "/var/lib/impresario-nfs/nfs.key";
/// And where earlier releases kept it: in the folder of the servers' user, who could put something else there.
const KEY_FILE_OF_ROOT_BEFORE: &str = "/var/lib/impresario/nfs.key";

/// The secret of handles. Where root keeps it, no other user may be able to put something else in the place of its file; the folders
/// of other users are their own affair.
fn handle_key(nfs: &Nfs) -> anyhow::Result<HandleKey> {
    let file = nfs.key_file.clone().map_or_else(default_key_file, Ok)?;
    let file = std::path::absolute(&file).with_context(|| format!("the key file {}", file.display()))?;
    let parent = file.parent().context("the key file must lie in a folder")?;
    let folder = match rustix::process::geteuid().is_root() {
        true => guarded_folder::open(parent, true).map_err(anyhow::Error::from),
        false => std::fs::create_dir_all(parent).and_then(|()| File::open(parent)).map(Into::into).map_err(Into::into),
    };
    let folder: OwnedFd = folder.with_context(|| format!("the folder of the key file {}", file.display()))?;
    if file == Path::new(KEY_FILE_OF_ROOT)
        && !file.exists()
        && let Some(key) = HandleKey::take_over(Path::new(KEY_FILE_OF_ROOT_BEFORE), &folder, &file)
    {
        tracing::info!(from = KEY_FILE_OF_ROOT_BEFORE, to = KEY_FILE_OF_ROOT, "the key of handles has moved");
        return Ok(key);
    }
    Ok(HandleKey::load(folder, &file)?)
}

/// Where the secret of handles lies unless configured: in the system's state folder for root, else in the user's.
fn default_key_file() -> anyhow::Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok(KEY_FILE_OF_ROOT.into());
    }
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state"));
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).or_else(home);
    Ok(state.context("HOME is not set; name a file with --key-file")?.join("impresario/nfs.key"))
}

/// The status socket: a program that connects gets the state as JSON.
struct StatusSocket {
    path: PathBuf,
}

/// Longest time for a reader of the state to take it.
const TELL_MAX: Duration = Duration::from_secs(2);
/// Longest state, bytes.
const STATE_MAX_BYTES: u64 = 16 << 20;

impl StatusSocket {
    fn open(path: &Path, observe: impl Fn() -> Value + Send + 'static) -> anyhow::Result<StatusSocket> {
        let context = || format!("the status socket {}", path.display());
        // One that a server left behind; never one of a server that answers, and nothing but a socket.
        if is_socket(path) {
            if UnixStream::connect(path).is_ok() {
                bail!("{}: another server answers there; name another one with --status", context());
            }
            std::fs::remove_file(path).with_context(context)?;
        }
        let listener = UnixListener::bind(path).with_context(context)?;
        let tell = move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else {
                    std::thread::sleep(Duration::from_millis(100)); // out of descriptors, for now
                    continue;
                };
                // A reader that goes away harms itself only.
                let _ = stream.set_write_timeout(Some(TELL_MAX));
                let _ = stream.write_all(format!("{}\n", observe()).as_bytes());
            }
        };
        std::thread::Builder::new().name("nfs-status".into()).spawn(tell).with_context(context)?;
        Ok(StatusSocket { path: path.into() })
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether `impresario status` is to ask an NFS server.
pub fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|state| state.file_type().is_socket())
}

/// The state of the server behind a socket, for people or as JSON.
pub fn status(path: &Path, json: bool) -> anyhow::Result<String> {
    let context = || format!("no NFS server answers at {}", path.display());
    let stream = UnixStream::connect(path).with_context(context)?;
    stream.set_read_timeout(Some(TELL_MAX)).with_context(context)?;
    let mut text = String::new();
    stream.take(STATE_MAX_BYTES).read_to_string(&mut text).with_context(context)?;
    let state: Value = serde_json::from_str(&text).with_context(context)?;
    if json {
        return Ok(format!("{state:#}\n"));
    }
    Ok(table(&state))
}

fn table(state: &Value) -> String {
    let number = |pointer: &str| state.pointer(pointer).and_then(Value::as_f64).unwrap_or_default();
    let texts = |pointer: &str, key: &str| -> Vec<String> {
        let list = state.pointer(pointer).and_then(Value::as_array).into_iter().flatten();
        list.filter_map(|item| item.get(key).unwrap_or(item).as_str().map(str::to_string)).collect()
    };
    let policy = state.pointer("/engine/policy").and_then(|p| serde_json::from_value(p.clone()).ok());
    let mut out = format!(
        "nfs on {}: {} of {:.0} connections, policy {}, {:.0} queued, {:.0} in flight, memory {} of {}\nexports: {}\n",
        texts("/addresses", "").join(" "),
        number("/connections/open"),
        number("/connections/max"),
        policy.map_or_else(|| "-".into(), |policy| crate::status::differing(&policy)),
        number("/engine/queued"),
        number("/engine/in_flight_batches"),
        show_bytes(number("/memory/used_bytes")),
        show_bytes(number("/memory/max_bytes")),
        texts("/exports", "name").join(" "),
    );
    if let Some(Value::Object(rows)) = state.pointer("/calls/procedures") {
        out += &format!(
            "{:<14}{:>10}{:>8}{:>11}{:>10}{:>10}{:>10}\n",
            "call", "count", "failed", "postponed", "p50 µs", "p99 µs", "max µs"
        );
        for (name, row) in rows {
            let n = |key: &str| row.get(key).and_then(Value::as_f64).unwrap_or_default();
            out += &format!(
                "{name:<14}{:>10}{:>8}{:>11}{:>10.0}{:>10.0}{:>10.0}\n",
                n("calls"),
                n("failed"),
                n("postponed"),
                n("p50_us"),
                n("p99_us"),
                n("max_us")
            );
        }
    }
    for (what, key) in [("client", "/calls/clients"), ("user", "/calls/users")] {
        let list = state.pointer(key).and_then(Value::as_array).into_iter().flatten();
        for load in list.take(5) {
            let n = |key: &str| load.get(key).and_then(Value::as_f64).unwrap_or_default();
            out += &format!(
                "{what} {}: {} calls, {} read, {} written\n",
                load.get(what).and_then(Value::as_str).unwrap_or("?"),
                n("calls"),
                show_bytes(n("read_bytes")),
                show_bytes(n("written_bytes")),
            );
        }
    }
    out
}
