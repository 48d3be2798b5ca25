//! The cost of a simulated request: requests per second of one core, bytes of memory per client, growth with size.
//!
//! `impresario-lab sim-cost`
//!
//! A request is one of an application that passes client, network, I/O node, data server and disk. Time is processor
//! time (`/proc/self/schedstat`), so other programs disturb it little; they do through shared caches, hence `--clients`
//! restricts the run to one size, for counters of instructions and cache misses.

use std::process::ExitCode;

use impresario_sched::PolicySpec;
use impresario_sim::Scenario;
use impresario_sim::model::{Application, IoNodes, Network, Operation, Pattern, Servers};

fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
}

/// Bytes of memory in use now, and at most so far.
fn memory() -> (f64, f64) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find(|l| l.starts_with(key)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|kb| kb.parse::<f64>().ok()).unwrap_or(f64::NAN) * 1024.0
    };
    (of("VmRSS:"), of("VmHWM:"))
}

struct Size {
    clients: u32,
    io_nodes: u16,
    servers: u16,
}

fn scenario(size: &Size, io_policy: &str, server_policy: &str, requests_in_all: u64) -> Scenario {
    let requests = (requests_in_all / u64::from(size.clients)).max(2);
    Scenario {
        time_limit_s: 1e8,
        request_timeout_ms: 600_000,
        network: Network {
            client_bytes_per_s: 1.25e9,
            io_node_bytes_per_s: 1.25e10,
            server_bytes_per_s: 1.25e9,
            ..Network::default()
        },
        io_nodes: Some(IoNodes { count: size.io_nodes, policy: PolicySpec::named(io_policy), ..IoNodes::default() }),
        servers: Servers { count: size.servers, policy: PolicySpec::named(server_policy), ..Servers::default() },
        application: vec![Application {
            copies: size.clients.div_ceil(1000),
            processes: size.clients.min(1000),
            op: Operation::Read,
            pattern: Pattern::Contiguous,
            request_bytes: 32 << 10,
            requests,
            ..Application::default()
        }],
        ..Scenario::default()
    }
}

fn measure(size: &Size, io_policy: &str, server_policy: &str, requests: u64) -> f64 {
    let s = scenario(size, io_policy, server_policy, requests);
    let (before, from) = (memory().0, cpu_s());
    let o = match impresario_sim::run(&s) {
        Ok(o) => o,
        Err(refusal) => {
            println!("{refusal}");
            return f64::NAN;
        }
    };
    let seconds = cpu_s() - from;
    let rate = o.operations as f64 / seconds;
    println!(
        "{:>7} clients {:>4} I/O nodes {:>5} servers  {io_policy:>6}/{server_policy:<6}: {:>8.0} requests/s, {:.1} events each, \
         {:.0} ns an event, {:.0} bytes a client, makespan {:.1} s virtual, {} failed{}",
        size.clients,
        size.io_nodes,
        size.servers,
        rate,
        o.events as f64 / o.operations as f64,
        seconds * 1e9 / o.events as f64,
        (memory().1 - before) / f64::from(size.clients),
        o.makespan_s,
        o.failed,
        if o.violations.is_empty() { String::new() } else { format!(", VIOLATIONS: {:?}", o.violations) },
    );
    rate
}

/// Measure what a simulated request costs, by policy and by the size of the system
#[derive(clap::Args)]
pub struct Args {
    /// Requests of each simulation
    #[arg(default_value_t = 1_000_000, value_name = "REQUESTS")]
    requests: u64,
    /// Only the size with this number of clients: 100, 1000, 10000 or 100000
    #[arg(long, value_name = "N")]
    clients: Option<u32>,
    /// With --clients: policies of the I/O nodes and of the data servers
    #[arg(long, default_value = "fifo/fifo", value_name = "IO/DATA")]
    policies: String,
}

/// Prints a line for each simulation, and how the cost grows.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let requests = args.requests;
    let sizes = [(100, 1, 4), (1_000, 4, 16), (10_000, 20, 128), (100_000, 100, 1000)];
    if let Some(only) = args.clients {
        let (io, server) = args.policies.split_once('/').unwrap_or((&args.policies, "fifo"));
        for (clients, io_nodes, servers) in sizes.into_iter().filter(|s| s.0 == only) {
            measure(&Size { clients, io_nodes, servers }, io, server, requests);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let small = Size { clients: 128, io_nodes: 4, servers: 4 };
    for (io, server) in [
        ("fifo", "fifo"),
        ("fifo", "none"),
        ("hbrr", "fifo"),
        ("twins", "fifo"),
        ("fifo", "mlf"),
        ("fifo", "scan"),
        ("fifo", "wfq"),
        ("tbf", "tbf"),
        ("mclock", "mclock"),
        ("set10", "sjf"),
    ] {
        measure(&small, io, server, requests);
    }
    println!();
    let rates: Vec<f64> = sizes
        .iter()
        .map(|&(clients, io_nodes, servers)| measure(&Size { clients, io_nodes, servers }, "fifo", "fifo", requests))
        .collect();
    for (i, rate) in rates.iter().enumerate() {
        let clients = f64::from(sizes[i].0);
        let allowed = clients.log2() / f64::from(sizes[0].0).log2();
        println!(
            "{clients:>7} clients: {:.2} times the cost of the smallest; log n allows {allowed:.2}",
            rates[0] / rate
        );
    }
    println!("memory at most: {:.2} GiB", memory().1 / f64::from(1 << 30));
    Ok(ExitCode::SUCCESS)
}
