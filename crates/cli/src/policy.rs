//! `impresario policy`: lists policies, shows the current ones, and switches them on running servers.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::{Args, Subcommand};
use impresario_base::{at_once, folders};
use impresario_client::{Access, KeyRole};
use impresario_config::{Config, Server};
use impresario_sched::policy::{POLICIES, PolicyInfo};
use impresario_sched::{Does, Naming, Op, PolicySpec, Who, policy};
use impresario_toml::nearest;
use serde_json::{Value, json};

use crate::{load, print, print_json, status, usage};

/// List, show or switch scheduling policies
#[derive(Subcommand)]
pub enum Command {
    /// List the policies with their parameters: unit, default, range, and source paper
    List {
        /// Only this one
        policy: Option<String>,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Show the current policy of every running server
    Show {
        /// The configuration file of the cluster
        config: PathBuf,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Show which rule of a server's policy applies to the requests of an application, user or client
    #[command(after_long_help = "Example:
  impresario policy explain cluster/impresario.toml --server data.0 --job 17 --op write")]
    Explain {
        #[command(flatten)]
        which: Which,
        /// The application (job) by its number
        #[arg(long, default_value_t = 0)]
        job: u64,
        /// The user by number
        #[arg(long, default_value_t = 0)]
        user: u32,
        /// The client by its key
        #[arg(long, default_value_t = 0)]
        client: u64,
        /// The file by its key
        #[arg(long, default_value_t = 0)]
        file: u64,
        /// The operation of the requests, or at the metadata server what they do to names
        #[arg(long, default_value = "read", value_parser = Does::ALL.map(|(word, _)| word))]
        op: String,
        /// The path of their file, from the root of the cluster's files
        #[arg(long, default_value = "")]
        path: PathBuf,
    },
    /// Switch the policy of running servers, without stopping them
    ///
    /// The new policy takes over queued requests; none is lost or repeated. Several servers switch at one instant of the
    /// time that their clocks share. A refused change says why and changes nothing. The configuration file is not
    /// changed: after a restart the server uses the policy in that file.
    #[command(after_long_help = "Examples:
  impresario policy set cluster/impresario.toml --server io.1 twins window_us=1000
  impresario policy set cluster/impresario.toml --all-data fifo
  impresario policy set cluster/impresario.toml --server meta tbf rules='u: op=create|remove {requests_per_s=500, each=user}'")]
    Set {
        #[command(flatten)]
        which: Which,
        /// Name of the policy; `impresario policy list` shows them
        policy: String,
        /// Parameters of the policy; missing ones take their defaults
        #[arg(value_name = "KEY=VALUE")]
        params: Vec<String>,
    },
}

/// How far ahead the instant lies at which several servers switch: ample for asking all of them.
const SWITCH_MARGIN: Duration = Duration::from_millis(300);

/// Servers of a cluster.
#[derive(Args)]
pub struct Which {
    /// The configuration file of the cluster
    pub config: PathBuf,
    /// A server by its name; may be given several times
    #[arg(long, value_name = "NAME")]
    server: Vec<String>,
    /// All data servers
    #[arg(long)]
    all_data: bool,
    /// All I/O nodes
    #[arg(long)]
    all_io: bool,
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { policy, json } => list(policy.as_deref(), json),
        Command::Show { config, json } => show(&load(&config)?, json),
        Command::Explain { which, job, user, client, file, op, path } => {
            let config = load(&which.config)?;
            let servers = chosen(&config, &which, true)?;
            let folders = folders::of(path.as_os_str().as_bytes());
            let (op, call) = Does::named(&op).unwrap_or(Does::Data(Op::Read)).parts();
            let naming = Naming { call, folders };
            explain(&config, &servers, &Who { job, user: u64::from(user), client, file, op, naming })
        }
        Command::Set { which, policy, params } => {
            let config = load(&which.config)?;
            let spec = params.iter().try_fold(PolicySpec::named(&policy), |spec, word| spec.with_word(word));
            let spec = spec.map_err(|e| usage(e.to_string()))?;
            // A decision table is named as a file, and sent as text.
            let spec = impresario_config::read_table(&spec).map_err(usage)?;
            let servers = chosen(&config, &which, true)?;
            set(&config, &servers, &spec)
        }
    }
}

/// Splits `key=value`.
pub fn split_param(text: &str) -> anyhow::Result<(&str, &str)> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.trim(), value.trim())),
        _ => Err(usage(format!("{text:?} is not a parameter: write key=value, such as window_us=1000"))),
    }
}

fn list(only: Option<&str>, as_json: bool) -> anyhow::Result<ExitCode> {
    let shown: Vec<&PolicyInfo> = POLICIES.iter().filter(|p| only.is_none_or(|name| p.name == name)).collect();
    if let (Some(name), true) = (only, shown.is_empty()) {
        let hint = nearest(name, POLICIES.iter().map(|p| p.name)).map(|n| format!("; did you mean {n}?"));
        return Err(usage(format!("there is no policy {name}{}", hint.unwrap_or_default())));
    }
    if as_json {
        let params = |p: &PolicyInfo| {
            p.params
                .iter()
                .map(|i| json!({"name": i.name, "default": i.default, "range": i.range.to_string(), "doc": i.doc}))
                .collect::<Vec<Value>>()
        };
        let all = shown
            .iter()
            .map(|p| json!({"name": p.name, "summary": p.summary, "source": p.source, "params": params(p)}));
        let all: Vec<Value> = all.collect();
        return print_json(&all);
    }
    let mut out = String::new();
    for policy in shown {
        writeln!(out, "{}\n    {}\n    Source: {}", policy.name, policy.summary, policy.source)?;
        for param in policy.params {
            writeln!(out, "    {} = {}    ({})\n        {}", param.name, param.default, param.range, param.doc)?;
        }
        out.push('\n');
    }
    print(out.trim_end())?;
    print(b"\n")
}

fn show(config: &Config, as_json: bool) -> anyhow::Result<ExitCode> {
    let states = status::ask_all(config);
    // A metadata server that limits nothing says nothing of it.
    let schedulers: Vec<_> = states.iter().filter(|s| s.role != "meta" || s.policy().is_some()).collect();
    if as_json {
        let all = schedulers.iter().map(|s| json!({"name": s.name, "policy": s.policy(), "error": s.error()}));
        let all: Vec<Value> = all.collect();
        print_json(&all)?;
    } else {
        for state in &schedulers {
            print(format!("{:<12} {}\n", state.name, state.error().unwrap_or_else(|| state.policy_text())))?;
        }
    }
    Ok(ExitCode::from(u8::from(schedulers.iter().any(|s| s.error().is_some()))))
}

/// The servers that are named; at least one. The metadata server is among them only where that is said and it is named.
pub fn chosen<'a>(config: &'a Config, which: &Which, may_be_meta: bool) -> anyhow::Result<Vec<Server<'a>>> {
    let mut servers = Vec::new();
    for name in &which.server {
        match config.server(name).map_err(usage)? {
            Server::Meta(_) if !may_be_meta => {
                return Err(usage("the metadata server does not schedule; name a data server or an I/O node"));
            }
            server => servers.push(server),
        }
    }
    servers.extend(config.servers().filter(|s| match s {
        Server::Meta(_) => false,
        Server::Data(..) => which.all_data,
        Server::Io(..) => which.all_io,
    }));
    if servers.is_empty() {
        return Err(usage("no server is named: give --server NAME, --all-data or --all-io"));
    }
    let mut seen = std::collections::BTreeSet::new();
    servers.retain(|server| seen.insert(server.name()));
    Ok(servers)
}

fn explain(config: &Config, servers: &[Server<'_>], who: &Who) -> anyhow::Result<ExitCode> {
    let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
    let access = Access::of(config, KeyRole::Client);
    for server in servers {
        let text = impresario_client::admin::explain(&access, server.address(), who, timeout)
            .with_context(|| format!("{} ({}) does not answer", server.name(), server.address()))?;
        print(format!("{}: {text}\n", server.name()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn set(config: &Config, servers: &[Server<'_>], spec: &PolicySpec) -> anyhow::Result<ExitCode> {
    // Changes nothing anywhere if a refusal by one server is foreseeable.
    for server in servers {
        let lanes = if matches!(server, Server::Io(..)) { config.lanes() } else { 1 };
        let checked = match server {
            Server::Meta(_) => policy::check_for_names(spec),
            _ => policy::check(spec, lanes),
        };
        checked.map_err(|e| usage(format!("{}: {e}", server.name())))?;
    }
    let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
    let access = Access::of(config, KeyRole::Admin);
    let keeps = |server: &Server<'_>| format!("{} ({}) keeps its policy", server.name(), server.address());
    if let [server] = servers {
        impresario_client::admin::set_policy(&access, server.address(), spec, timeout)
            .with_context(|| keeps(server))?;
    } else {
        // Servers that answer within the margin change together, so that their windows are coordinated throughout.
        for server in servers {
            impresario_client::admin::status(&access, server.address(), timeout).with_context(|| keeps(server))?;
        }
        let instant = SystemTime::now() + SWITCH_MARGIN;
        let at_shared_ns = instant.duration_since(UNIX_EPOCH)?.as_nanos() as i64;
        let asked = at_once::each(servers, |server| {
            let answer =
                impresario_client::admin::set_policy_at(&access, server.address(), spec, at_shared_ns, timeout);
            (answer, SystemTime::now())
        });
        for (server, (answer, answered)) in servers.iter().zip(asked) {
            answer.with_context(|| keeps(server))?;
            if answered > instant {
                tell!("impresario: {} answered late and may have switched after the others", server.name());
            }
        }
        // The clock may have been set back meanwhile.
        std::thread::sleep(instant.duration_since(SystemTime::now()).unwrap_or_default().min(SWITCH_MARGIN));
    }
    for server in servers {
        print(format!("{}: {}\n", server.name(), status::short(spec)))?;
    }
    Ok(ExitCode::SUCCESS)
}
