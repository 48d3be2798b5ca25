//! `impresario up`: a whole cluster on this machine, one process per server, in the foreground.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use impresario_base::machine::{ending_signals, survive_file_size_limit};
use impresario_base::replace::replace;
use impresario_base::units::parse_positive_bytes;
use impresario_client::{Access, KeyRole};
use impresario_config::{Cluster, Config, Data, Io, Meta, Security};
use impresario_device::{DeviceParams, Order};
use impresario_sched::{PolicySpec, policy};

use crate::children::Server;
use crate::{key, load, notify_ready, policy::split_param, ports, print, status, stop_at, usage};

/// Name of the configuration in the cluster's directory.
pub const CONFIG_FILE: &str = "impresario.toml";
/// Time limit for all servers to answer after their start.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for stopping servers to finish requests in flight; then they are killed.
const STOP_PATIENCE: Duration = Duration::from_secs(15);

/// Run a whole cluster on this machine, in the foreground
///
/// The first run writes DIR/impresario.toml with free ports of this machine and makes directories inside DIR; later runs use
/// this file unchanged, and refuse to start when a directory is missing. Starts one process for each server, waits until all answer and reports it. Their logs appear on
/// standard error, each line with the server's name in front. Ctrl-C or SIGTERM stops all of them. A server that dies
/// is reported with the end of its log and not restarted: restart it with `impresario serve`.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario up
  impresario up --data-servers 4 --io-nodes 2 --data-policy mlf --io-policy fifo --dir ./cluster
  impresario up --device disk --io-policy twins --policy-param io.window_us=1000 --dir ./disks")]
pub struct Args {
    /// Directory of the cluster: configuration, names and data
    #[arg(long, default_value = "cluster")]
    dir: PathBuf,
    /// Number of data servers (default 4)
    #[arg(long, value_name = "N")]
    data_servers: Option<u16>,
    /// Number of I/O nodes; 0: clients send requests directly to the data servers (default 2)
    #[arg(long, value_name = "M")]
    io_nodes: Option<u16>,
    /// Scheduling policy of the data servers (default auto)
    #[arg(long, value_name = "POLICY")]
    data_policy: Option<String>,
    /// Scheduling policy of the I/O nodes (default auto)
    #[arg(long, value_name = "POLICY")]
    io_policy: Option<String>,
    /// Parameter of a policy; write data.KEY=VALUE or io.KEY=VALUE if both policies have KEY
    #[arg(long, value_name = "KEY=VALUE")]
    policy_param: Vec<String>,
    /// Device model in front of each data server's directory (default none)
    #[arg(long)]
    device: Option<Device>,
    /// Order in which modelled disks serve outstanding requests: arrival or elevator (default arrival)
    #[arg(long, value_name = "ORDER")]
    disk_order: Option<Order>,
    /// Strip size of files, such as 64k (default 64k)
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes)]
    stripe_size: Option<u64>,
    /// Number of data servers per file (default all)
    #[arg(long, value_name = "N")]
    stripe_count: Option<u16>,
    /// Address of this machine to listen on (default 127.0.0.1: only programs on this machine can connect; with another
    /// one keys are made, and only programs that have one can connect)
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<IpAddr>,
}

/// The device behind a data server's directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Device {
    /// A modelled 7200 rpm disk: every request takes the time that it would take there.
    Disk,
    /// No model: the directory's own speed.
    None,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let stop = stop_at(&ending_signals())?;
    survive_file_size_limit();
    let path = args.dir.join(CONFIG_FILE);
    let config = if path.exists() {
        let config = load(&path)?;
        check_flags(&args, &config, &path)?;
        print(format!("using the existing configuration: {}\n", path.display()))?;
        config
    } else {
        write_config(&args, &path)?;
        print(format!("wrote the configuration: {}\n", path.display()))?;
        load(&path)?
    };
    make_keys(&config)?;
    // Of a new cluster only: an empty folder beside others may be a disk that is not mounted.
    impresario_server::folders::make_all(&config)?;
    let mut servers = Vec::new();
    for server in config.servers() {
        servers.push(Server::start(&path, server.name())?);
    }
    let outcome = match wait_until_up(&config, &mut servers, &stop) {
        Ok(true) => announce(&config, &path).and_then(|()| watch(&path, &mut servers, &stop)),
        Ok(false) => Ok(true),
        Err(error) => Err(error),
    };
    let clean = stop_all(&mut servers);
    Ok(ExitCode::from(u8::from(!(outcome? && clean))))
}

/// Makes keys where servers listen beyond this machine and there are none yet. Certificates are an administrator's to make.
fn make_keys(config: &Config) -> anyhow::Result<()> {
    let security = config.cluster.security;
    let needs = config.servers().any(|server| security.needs_key(server.address()));
    if needs && security != Security::Tls && key::make(&config.cluster.key_dir, false)? {
        print(format!("made keys: {}\n", config.cluster.key_dir.display()))?;
    }
    Ok(())
}

/// A configuration from the flags, with directories relative to the file.
fn configure(args: &Args, ports: &[u16]) -> anyhow::Result<Config> {
    let mut ports = ports.iter().map(|port| std::net::SocketAddr::new(listen(args), *port).to_string());
    let mut address = || ports.next().context("found too few free ports");
    let (data_policy, io_policy) = policies(args)?;
    let device = (args.device == Some(Device::Disk)).then(|| "disk".to_string());
    let mut cluster = Cluster { stripe_count: args.stripe_count, ..Cluster::default() };
    if let Some(size) = args.stripe_size {
        cluster.stripe_bytes = u32::try_from(size).map_err(|_| usage("--stripe-size must be at most 1g"))?;
    }
    let meta = Meta { address: address()?, dir: "meta".into(), ..Meta::default() };
    let data = (0..data_servers(args)).map(|i| {
        let base = Data::new(format!("data.{i}"), address()?, format!("data.{i}"));
        Ok(Data { policy: data_policy.clone(), device: device.clone(), ..base })
    });
    let data = data.collect::<anyhow::Result<_>>()?;
    let io =
        (0..io_nodes(args)).map(|i| Ok(Io { policy: io_policy.clone(), ..Io::new(format!("io.{i}"), address()?) }));
    let io = io.collect::<anyhow::Result<_>>()?;
    if args.disk_order.is_some() && device.is_none() {
        return Err(usage("--disk-order is for modelled disks: add --device disk"));
    }
    let model = DeviceParams { order: args.disk_order.unwrap_or_default(), ..DeviceParams::default() };
    let device = device.map(|name| (name, model)).into_iter().collect();
    Ok(Config { cluster, meta, data, io, device, ..Config::default() })
}

fn data_servers(args: &Args) -> u16 {
    args.data_servers.unwrap_or(4)
}

fn io_nodes(args: &Args) -> u16 {
    args.io_nodes.unwrap_or(2)
}

fn listen(args: &Args) -> IpAddr {
    args.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// The policies of data servers and I/O nodes, with the parameters of `--policy-param`.
fn policies(args: &Args) -> anyhow::Result<(PolicySpec, PolicySpec)> {
    let mut data = PolicySpec::named(args.data_policy.as_deref().unwrap_or("auto"));
    let mut io = PolicySpec::named(args.io_policy.as_deref().unwrap_or("auto"));
    for given in &args.policy_param {
        let (key, value) = split_param(given)?;
        if let Some(key) = key.strip_prefix("data.") {
            data = data.with(key, value);
        } else if let Some(key) = key.strip_prefix("io.") {
            io = io.with(key, value);
        } else {
            match (knows(&data, key), knows(&io, key)) {
                (true, false) => data = data.with(key, value),
                (false, true) => io = io.with(key, value),
                (true, true) => {
                    return Err(usage(format!(
                        "--policy-param {given}: both policies know {key}; write data.{given} or io.{given}"
                    )));
                }
                (false, false) => {
                    let (data, io) = (&data.name, &io.name);
                    let none =
                        if data == io { format!("{data} has no") } else { format!("neither {data} nor {io} has a") };
                    return Err(usage(format!(
                        "--policy-param {given}: {none} parameter {key}; see `impresario policy list`"
                    )));
                }
            }
        }
    }
    Ok((data, io))
}

fn knows(spec: &PolicySpec, param: &str) -> bool {
    let info = policy::POLICIES.iter().find(|p| p.name == spec.name);
    info.is_some_and(|p| p.params.iter().any(|i| i.name == param))
}

fn write_config(args: &Args, path: &Path) -> anyhow::Result<()> {
    let count = 1 + usize::from(data_servers(args)) + usize::from(io_nodes(args));
    let config = configure(args, &ports::free(listen(args), count)?)?;
    // The flags are checked before anything is written.
    if let Some((key, why)) = config.check().into_iter().next() {
        return Err(usage(format!("{why} (this would be {key} in the configuration)")));
    }
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("cannot create the directory {}", args.dir.display()))?;
    // As a whole: a later run would take a half-written file for the cluster's.
    replace(path, 0o666, config.to_toml().as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}

/// Refuses flags that contradict the existing file.
fn check_flags(args: &Args, config: &Config, path: &Path) -> anyhow::Result<()> {
    let differs = |flag: &str, wanted: String, has: String| {
        let file = path.display();
        usage(format!(
            "{flag} {wanted} contradicts {file}, which has {has}; leave out the flag, change the file, or use another --dir"
        ))
    };
    let number = |flag: &str, wanted: Option<u64>, has: u64| match wanted {
        Some(wanted) if wanted != has => Err(differs(flag, wanted.to_string(), has.to_string())),
        _ => Ok(()),
    };
    number("--data-servers", args.data_servers.map(u64::from), config.data.len() as u64)?;
    number("--io-nodes", args.io_nodes.map(u64::from), config.io.len() as u64)?;
    number("--stripe-size", args.stripe_size, config.cluster.stripe_bytes.into())?;
    number("--stripe-count", args.stripe_count.map(u64::from), config.stripe_count().into())?;
    if let Some(listen) = args.listen {
        let elsewhere = |address: &str| address.parse::<std::net::SocketAddr>().is_ok_and(|a| a.ip() != listen);
        if let Some(server) = config.servers().find(|s| elsewhere(s.address())) {
            return Err(differs("--listen", listen.to_string(), format!("{} at {}", server.address(), server.name())));
        }
    }
    if let Some(device) = args.device {
        let wanted = device == Device::Disk;
        if let Some(data) = config.data.iter().find(|d| d.device.is_some() != wanted) {
            let has = format!("device {} at {}", data.device.as_deref().unwrap_or("none"), data.name);
            return Err(differs("--device", if wanted { "disk" } else { "none" }.into(), has));
        }
    }
    if let Some(order) = args.disk_order {
        let other =
            |d: &&Data| d.device.as_ref().and_then(|name| config.device.get(name)).map(|m| m.order) != Some(order);
        if let Some(data) = config.data.iter().find(other) {
            return Err(differs("--disk-order", order.to_string(), format!("another at {}", data.name)));
        }
    }
    let (data_policy, io_policy) = policies(args)?;
    let data = config.data.iter().map(|d| (&d.name, &d.policy, &data_policy, &args.data_policy, "--data-policy"));
    let io = config.io.iter().map(|i| (&i.name, &i.policy, &io_policy, &args.io_policy, "--io-policy"));
    for (name, has, wanted, flag, flag_name) in data.chain(io) {
        let other_name = flag.is_some() && has.name != wanted.name;
        if other_name || wanted.params.iter().any(|(key, value)| has.params.get(key) != Some(value)) {
            let flag_name = if other_name { flag_name } else { "--policy-param for" };
            return Err(differs(flag_name, wanted.to_string(), format!("{has} at {name}")));
        }
    }
    Ok(())
}

/// True when all servers answer, false if a stop was requested meanwhile.
fn wait_until_up(config: &Config, servers: &mut [Server], stop: &AtomicBool) -> anyhow::Result<bool> {
    let access = Access::of(config, KeyRole::Client);
    let deadline = Instant::now() + START_PATIENCE;
    let mut next_notice = Instant::now() + Duration::from_secs(2);
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if let Some(died) = servers.iter_mut().find_map(|s| s.ended().is_some().then_some(s)) {
            anyhow::bail!("the cluster did not start: {}", died.obituary());
        }
        // Another one may answer in the place of ours, which is about to end for that reason.
        let ours = config.servers().zip(&*servers);
        let waiting = ours.filter(|(s, ours)| status::answering(&access, s.address()) != Some(ours.pid().into()));
        let waiting: Vec<&str> = waiting.map(|(s, _)| s.name()).collect();
        if waiting.is_empty() {
            return Ok(true);
        }
        let now = Instant::now();
        if now >= deadline {
            let patience = START_PATIENCE.as_secs();
            anyhow::bail!("the cluster did not start: no answer after {patience} s from {}", waiting.join(", "));
        }
        if now >= next_notice {
            print(format!("waiting for {}\n", waiting.join(", ")))?;
            next_notice = now + Duration::from_secs(2);
        }
        std::thread::sleep(Duration::from_millis(25));
    }
}

fn announce(config: &Config, path: &Path) -> anyhow::Result<()> {
    let path = path.display();
    let modelled = config.data.iter().any(|d| d.device.is_some());
    let device = if modelled { " on modelled disks" } else { "" };
    let policy = |spec: Option<&PolicySpec>| spec.map_or_else(String::new, |spec| format!(" ({spec})"));
    let text = format!(
        "ready: {}{}{device}, {}{}\n\
         configuration: {path}\n\
         mount it:      impresario mount {path} /mnt/x\n\
         show status:   impresario status {path}\n\
         stop it:       Ctrl-C\n",
        many(config.data.len(), "data server"),
        policy(config.data.first().map(|d| &d.policy)),
        many(config.io.len(), "I/O node"),
        policy(config.io.first().map(|i| &i.policy)),
    );
    print(&text)?;
    notify_ready();
    Ok(())
}

fn many(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Reports deaths until a stop is requested or no server is left. True if none died.
fn watch(config: &Path, servers: &mut [Server], stop: &AtomicBool) -> anyhow::Result<bool> {
    let mut reported = vec![false; servers.len()];
    while !stop.load(Ordering::Relaxed) {
        for (server, reported) in servers.iter_mut().zip(&mut reported) {
            if !*reported && server.ended().is_some() && !stop.load(Ordering::Relaxed) {
                *reported = true;
                tell!("impresario: {}", server.obituary());
                tell!(
                    "impresario: the other servers keep running; restart it with: impresario serve {} --name {}",
                    config.display(),
                    server.name
                );
            }
        }
        if reported.iter().all(|r| *r) {
            anyhow::bail!("all servers have died");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(reported.iter().all(|r| !*r))
}

/// Stops I/O nodes first, then the metadata server, then the data servers, so that each can finish its requests in
/// flight below it. True if all ended by themselves.
fn stop_all(servers: &mut [Server]) -> bool {
    let deadline = Instant::now() + STOP_PATIENCE;
    let mut clean = true;
    for server in servers.iter_mut().rev() {
        server.ask_to_stop();
        if !server.finish(deadline) {
            clean = false;
            tell!(
                "impresario: server {} did not stop within {} s and was killed",
                server.name,
                STOP_PATIENCE.as_secs()
            );
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: Args,
    }

    fn args(words: &[&str]) -> Args {
        CommandLine::try_parse_from([&["up"], words].concat()).map_err(|e| e.to_string()).unwrap().args
    }

    fn config(words: &[&str]) -> Config {
        let config = configure(&args(words), &(7000..7100).collect::<Vec<_>>()).unwrap();
        assert_eq!(config.check(), []);
        Config::parse(&config.to_toml(), Path::new("/c/impresario.toml")).unwrap()
    }

    #[test]
    fn flags_become_a_configuration() {
        let c = config(&[
            "--data-servers",
            "3",
            "--io-nodes",
            "2",
            "--io-policy",
            "twins",
            "--policy-param",
            "io.window_us=1000",
        ]);
        assert_eq!((c.data.len(), c.io.len()), (3, 2));
        assert_eq!(c.data[2].policy.to_string(), "auto");
        assert_eq!(c.io[1].policy.to_string(), "twins window_us=1000");
        assert_eq!(c.data[2].dir, Path::new("/c/data.2"));
        assert!(c.device.is_empty());
        // What no flag says is as in any configuration.
        let c = config(&["--io-nodes", "1"]);
        assert_eq!(c.io[0].policy, Io::new("", "").policy);
        assert_eq!(c.data[0].policy, Data::new("", "", "").policy);
        let c = config(&["--stripe-size", "16k", "--device", "disk", "--io-nodes", "0"]);
        assert_eq!(c.cluster.stripe_bytes, 16384);
        assert_eq!(c.data[0].device.as_deref(), Some("disk"));
        assert_eq!(c.io, []);
        let c = config(&["--device", "disk", "--disk-order", "elevator"]);
        assert_eq!(c.device["disk"].order, Order::Elevator);
        let lone = configure(&args(&["--disk-order", "elevator"]), &(7000..7100).collect::<Vec<_>>());
        assert!(lone.unwrap_err().to_string().contains("add --device disk"));
    }

    #[test]
    fn the_same_flags_again_agree_and_others_name_the_file() {
        let words =
            ["--data-servers", "2", "--io-policy", "twins", "--policy-param", "io.window_us=1000", "--device", "none"];
        let c = config(&words);
        let file = Path::new("/c/impresario.toml");
        check_flags(&args(&words), &c, file).unwrap();
        check_flags(&args(&[]), &c, file).unwrap();
        for (contradiction, says) in [
            (&["--data-servers", "5"][..], "--data-servers 5 contradicts /c/impresario.toml, which has 2;"),
            (&["--io-nodes", "1"], "--io-nodes 1"),
            (
                &["--data-policy", "fifo"],
                "--data-policy fifo contradicts /c/impresario.toml, which has auto at data.0;",
            ),
            (&["--io-policy", "fifo"], "which has twins window_us=1000 at io.0"),
            (&["--io-policy", "twins", "--policy-param", "io.window_us=5"][..], "twins window_us=5 contradicts"),
            (&["--device", "disk"], "device none at data.0"),
            (&["--disk-order", "elevator"], "which has another at data.0"),
            (&["--stripe-size", "1m"], "--stripe-size 1048576"),
            (&["--stripe-count", "1"], "--stripe-count 1"),
            (&["--listen", "0.0.0.0"], "which has 127.0.0.1:7001 at data.0"),
        ] {
            let error = check_flags(&args(contradiction), &c, file).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("another --dir"), "{error}");
        }
    }

    #[test]
    fn parameters_find_their_policy() {
        let error = |words: &[&str]| policies(&args(words)).unwrap_err().to_string();
        assert!(error(&["--policy-param", "nonsense=1"]).contains(": auto has no parameter nonsense"));
        let unlike = ["--io-policy", "fifo", "--policy-param", "nonsense=1"];
        assert!(error(&unlike).contains("neither auto nor fifo has a parameter nonsense"));
        assert!(error(&["--policy-param", "nonsense"]).contains("write key=value"));
        let both = ["--data-policy", "hbrr", "--io-policy", "hbrr", "--policy-param", "quantum_requests=4"];
        assert!(error(&both).contains("write data.quantum_requests=4 or io.quantum_requests=4"), "{}", error(&both));
    }

    #[test]
    fn flags_are_judged_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new").join(CONFIG_FILE);
        let mut bad = args(&["--data-policy", "nonsense"]);
        bad.dir = dir.path().join("new");
        let error = write_config(&bad, &path).unwrap_err();
        assert!(error.is::<crate::Usage>() && error.to_string().contains("nonsense"), "{error}");
        assert!(!bad.dir.exists());
    }
}
