//! `impresario-lab glusterfs`: what the translator gains in GlusterFS bricks on modelled disks below the real kernel.
//!
//! All systems serve the same folders of bricks, each by processes of its own; programs over libgfapi load one after the other.
//! A mount through which nothing is measured makes the files and compares what was written.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_base::units::parse_positive_bytes;
use impresario_device::DeviceParams;
use impresario_workload::access::Observation;
use impresario_workload::children::Children;
use impresario_workload::kernel_disk::{KernelDisk, remove_stale};
use impresario_workload::progress::catch_signals;
use impresario_workload::stop::Stop;

use crate::client_program::LIBGFAPI;
use crate::print;
use crate::server_bench::load::Load;
use crate::server_bench::{
    Bed, Choice, Clients, Comparison, Subject, accepts, observe_disks, own_network, reset_disks, serve_once,
    until_ready,
};

/// Measure what the GlusterFS translator gains on modelled disks below the real kernel
///
/// Applications of several processes read and write a shared file each, 256 KiB at a time one behind the other and 16 KiB in
/// turns, on a volume that is distributed over bricks with a modelled disk each. Systems: GlusterFS as it comes, bricks and clients
/// without what volumes have beside io-threads, the translator without any option (its default), with one request at a time in order of arrival
/// (throttling alone), with policies, with foresight, and with a run of each load that was recorded before. Caches of the whole machine are dropped before each run; a run counts with at least
/// 20 % of the CPU idle and disks that are not late; everything read and written is compared. Everything runs in a network of its own. Needs root, /dev/fuse, cc, the
/// Debian packages glusterfs-server, glusterfs-client and libglusterfs-dev, and the translator, built
/// (make -C integrations/glusterfs).
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab glusterfs
  impresario-lab glusterfs --loads 'contiguous read' --systems 'as it comes,default' --pairs 6
  impresario-lab glusterfs --device bare --pairs 6
  impresario-lab glusterfs --bricks 4 --size 64m --json glusterfs.json")]
pub struct Args {
    /// The translator
    #[arg(long, default_value = "integrations/glusterfs/build/impresario.so", value_name = "FILE")]
    translator: PathBuf,
    /// What the bricks lie on
    #[arg(long, value_enum, default_value = "kernel")]
    device: Device,
    /// Bricks, each with a disk of its own
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8))]
    bricks: u64,
    /// Applications, each with a file and a client of its own
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=16))]
    applications: u64,
    /// Processes of an application
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=16))]
    processes: u64,
    /// The file of an application
    #[arg(long, default_value = "32m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    size: u64,
    #[command(flatten)]
    choice: Choice,
}

/// What the bricks lie on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Device {
    /// A modelled disk below this kernel: ext4, page cache, mq-deadline, read-ahead
    Kernel,
    /// A modelled disk in order of arrival, past page cache, read-ahead and scheduler of the kernel (bricks with o-direct). Nothing keeps
    /// what would be read ahead, so systems with foresight are left out, but for the default
    Bare,
}

/// A way to serve the volume.
struct System {
    name: &'static str,
    /// Options of the translator above io-threads; `None`: it is not there.
    translator: Option<&'static [(&'static str, &'static str)]>,
    /// Bricks and clients have what glusterd gives those of a volume without any option set.
    whole: bool,
}

const fn with(name: &'static str, options: &'static [(&'static str, &'static str)]) -> System {
    System { name, translator: Some(options), whole: true }
}

impl System {
    fn reads_ahead(&self) -> bool {
        self.name.contains("foresight")
    }

    /// It predicts by a run that was recorded before.
    fn is_recorded(&self) -> bool {
        self.name.ends_with("a recorded run")
    }
}

const AS_IT_COMES: &str = "as it comes";
const SYSTEMS: [System; 13] = [
    System { name: AS_IT_COMES, translator: None, whole: true },
    System { name: "io-threads alone", translator: None, whole: false },
    // What an administrator gets who inserts the translator and sets nothing.
    with("default", &[]),
    with("none", &[("policy", "none")]),
    with("one at a time", &[("policy", "fifo"), ("depth", "1"), ("read-ahead", "0")]),
    with("mlf one at a time", &[("policy", "mlf"), ("depth", "1"), ("merge", "file"), ("read-ahead", "0")]),
    with("mlf", &[("policy", "mlf"), ("depth", "4"), ("merge", "file"), ("read-ahead", "0")]),
    with("aioli", &[("policy", "aioli"), ("depth", "1"), ("merge", "file"), ("read-ahead", "0")]),
    with("auto", &[("policy", "auto"), ("merge", "file"), ("read-ahead", "0")]),
    with("fifo with foresight", &[("policy", "fifo"), ("merge", "file")]),
    with("mlf with foresight", &[("policy", "mlf"), ("depth", "4"), ("merge", "file")]),
    with("default with foresight by a recorded run", &[]),
    with(
        "agios-causal with a recorded run",
        &[("policy", "agios-causal"), ("depth", "1"), ("merge", "file"), ("read-ahead", "0")],
    ),
];
/// What records it.
const RECORDER: System = with("recorder", &[("policy", "fifo"), ("merge", "file"), ("read-ahead", "0")]);

const FIRST_PORT: u16 = 24_100;
const START_PATIENCE: Duration = Duration::from_secs(30);
/// Names that are tried for a file until it falls to its brick.
const NAMES_MAX: u32 = 64;

/// A volume file under construction: each translator stands above the one before it.
#[derive(Default)]
struct Graph {
    text: String,
    top: String,
}

impl Graph {
    fn add(&mut self, name: &str, kind: &str, options: &[(&str, &str)]) {
        let below = std::mem::replace(&mut self.top, name.into());
        self.over(name, kind, options, &below);
    }

    fn over(&mut self, name: &str, kind: &str, options: &[(&str, &str)], below: &str) {
        self.text += &format!("volume {name}\n    type {kind}\n");
        for (key, value) in options {
            self.text += &format!("    option {key} \"{}\"\n", value.replace('\\', "\\\\").replace('"', "\\\""));
        }
        if !below.is_empty() {
            self.text += &format!("    subvolumes {below}\n");
        }
        self.text += "end-volume\n";
        self.top = name.into();
    }
}

/// The volume file of a brick. What glusterd 10 puts into bricks and is not switched off is there, but for what needs glusterd.
fn brick_graph(
    system: &System,
    bed: Device,
    translator: &Translator,
    folder: &str,
    number: usize,
    port: u16,
) -> String {
    let mut graph = Graph::default();
    // A disk that hangs is the model's business.
    let direct = if bed == Device::Bare { "on" } else { "off" };
    let options = [("directory", folder), ("health-check-interval", "0"), ("o-direct", direct)];
    graph.add("posix", "storage/posix", &options);
    if system.whole {
        graph.add("access-control", "features/access-control", &[]);
    }
    graph.add("locks", "features/locks", &[]);
    if system.whole {
        graph.add("leases", "features/leases", &[]);
        graph.add("upcall", "features/upcall", &[("cache-invalidation", "off")]);
    }
    graph.add("io-threads", "performance/io-threads", &[]);
    if let Some(options) = system.translator {
        let more = translator.options.iter().map(|(key, value)| (*key, value.as_str()));
        graph.add("scheduler", &translator.kind, &options.iter().copied().chain(more).collect::<Vec<_>>());
    }
    let name = format!("brick{number}");
    graph.add(&name, "debug/io-stats", &[]);
    let (port, allow) = (port.to_string(), format!("auth.addr.{name}.allow"));
    let options = [
        ("transport-type", "tcp"),
        ("transport.socket.bind-address", "127.0.0.1"),
        ("transport.socket.listen-port", &port),
        (&allow, "127.0.0.1"),
    ];
    graph.add("server", "protocol/server", &options);
    graph.text
}

/// The volume file of a client.
fn client_graph(whole: bool, ports: &[u16]) -> String {
    let mut graph = Graph::default();
    let mut clients = Vec::new();
    for (number, port) in ports.iter().enumerate() {
        let (name, brick, port) = (format!("client{number}"), format!("brick{number}"), port.to_string());
        let options = [
            ("transport-type", "tcp"),
            ("remote-host", "127.0.0.1"),
            ("remote-port", &port),
            ("remote-subvolume", &brick),
        ];
        graph.over(&name, "protocol/client", &options, "");
        clients.push(name);
    }
    graph.over("dht", "cluster/distribute", &[], &clients.join(" "));
    if whole {
        for kind in ["write-behind", "open-behind", "quick-read", "md-cache"] {
            graph.add(kind, &format!("performance/{kind}"), &[]);
        }
    }
    graph.text
}

/// The translator, and options beside those of the system.
#[derive(Clone, Default)]
struct Translator {
    /// The `type` by which GlusterFS loads it.
    kind: String,
    options: Vec<(&'static str, String)>,
}

impl Translator {
    fn with(&self, option: &'static str, value: &Path) -> Translator {
        Translator { kind: self.kind.clone(), options: vec![(option, value.display().to_string())] }
    }
}

/// The bricks of a system, and the volume file of its clients.
struct Volume {
    name: &'static str,
    client: String,
    _children: Children,
}

impl Volume {
    /// Its bricks listen at ports from `first` on, in a network of our own; it returns when they accept connections.
    fn start(
        system: &System,
        translator: &Translator,
        bed: &Bricks,
        folder: &Path,
        first: u16,
        stop: &Stop,
    ) -> Result<Volume> {
        let folder = folder.join(system.name.replace(' ', "-"));
        std::fs::create_dir(&folder)?;
        let (mut children, mut ports) = (Children::default(), Vec::new());
        for number in 0..bed.disks.len() {
            let port = first + number as u16;
            let at = |what: &str| folder.join(format!("brick{number}.{what}")).display().to_string();
            let brick = bed.folder(number).display().to_string();
            std::fs::write(at("vol"), brick_graph(system, bed.device, translator, &brick, number, port))?;
            let arguments = ["-N", "-f", &at("vol"), "-l", &at("log"), "-p", &at("pid")].map(String::from);
            children.start(system.name, Path::new("glusterfsd"), &arguments, Path::new(&at("output")))?;
            ports.push(port);
        }
        let client = folder.join("client.vol");
        std::fs::write(&client, client_graph(system.whole, &ports))?;
        // All have so long together.
        let until = Instant::now() + START_PATIENCE;
        let what = format!("a brick of {}", system.name);
        let left = || until.saturating_duration_since(Instant::now());
        let waited = ports.iter().try_for_each(|port| accepts(&mut children, &what, *port, left(), stop));
        // A brick that is started while another one makes its folders there gives up.
        let waited = waited.and_then(|()| {
            let is_made = |number| bed.folder(number).join(".glusterfs/ff").is_dir();
            let (ready, complaint) =
                (|| (0..bed.disks.len()).all(is_made), || format!("{what} does not make its folders"));
            until_ready(&mut children, until, stop, ready, complaint)
        });
        waited.with_context(|| {
            let logs = (0..bed.disks.len()).map(|number| errors_in(&folder.join(format!("brick{number}.log"))));
            logs.collect::<Vec<_>>().join(" | ")
        })?;
        Ok(Volume { name: system.name, client: client.display().to_string(), _children: children })
    }
}

/// The disks of the bricks, and a mount of the volume.
struct Bricks {
    mount: Option<Mount>,
    device: Device,
    disks: Vec<KernelDisk>,
}

struct Mount {
    path: PathBuf,
    _client: Children,
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.path).output();
    }
}

impl Bricks {
    fn new(device: Device, count: u64, parent: &Path) -> Result<Bricks> {
        let disk = |_| match device {
            Device::Kernel => KernelDisk::new(parent, &DeviceParams::default()),
            Device::Bare => KernelDisk::in_order_of_arrival(parent, &DeviceParams::default()),
        };
        let bricks = Bricks { mount: None, device, disks: (0..count).map(disk).collect::<Result<_>>()? };
        for number in 0..bricks.disks.len() {
            std::fs::create_dir(bricks.folder(number))?;
        }
        Ok(bricks)
    }

    fn folder(&self, number: usize) -> PathBuf {
        self.disks[number].path().join("brick")
    }

    /// Mounts the volume that these bricks serve.
    fn mount(&mut self, volume: &Volume, folder: &Path, stop: &Stop) -> Result<()> {
        let path = folder.join("mount");
        std::fs::create_dir(&path)?;
        let mut client = Children::default();
        let log = folder.join("mount.log");
        let at = |path: &Path| path.display().to_string();
        let arguments = ["-N".into(), "-f".into(), volume.client.clone(), "-l".into(), at(&log), at(&path)];
        client.start("the mount", Path::new("glusterfs"), &arguments, &folder.join("mount.output"))?;
        let until = Instant::now() + START_PATIENCE;
        // Names that fall to every brick can be made when all are connected.
        let ready = || {
            let mounted = std::fs::read_to_string("/proc/mounts").is_ok_and(|text| text.contains(&at(&path)));
            let made = |n: u32| {
                let name = path.join(format!(".probe{n}"));
                std::fs::create_dir(&name).and_then(|()| std::fs::remove_dir(&name)).is_ok()
            };
            mounted && (0..16).all(made)
        };
        let complaint = || format!("the volume cannot be mounted: {}", errors_in(&log));
        until_ready(&mut client, until, stop, ready, complaint)?;
        self.mount = Some(Mount { path, _client: client });
        Ok(())
    }

    fn mounted(&self) -> Result<&Path> {
        self.mount.as_ref().map(|mount| mount.path.as_path()).context("the volume is not mounted")
    }
}

impl Bed for Bricks {
    /// Each application's file is on the next brick: names are chosen accordingly, as the volume places files by their names.
    fn prepare(&self, load: &mut Load) -> Result<()> {
        let mount = self.mounted()?;
        for nth in 0..load.applications.len() {
            let wanted = nth % self.disks.len();
            loop {
                let path = mount.join(load.file(nth));
                std::fs::File::create(&path).with_context(|| path.display().to_string())?;
                if self.folder(wanted).join(load.file(nth)).exists() {
                    break;
                }
                std::fs::remove_file(&path)?;
                load.applications[nth].variant += 1;
                if load.applications[nth].variant > NAMES_MAX {
                    bail!("none of {NAMES_MAX} names falls to brick {wanted}");
                }
            }
        }
        load.prepare(mount)
    }

    fn verify(&self, load: &Load, generation: u64) -> Result<()> {
        load.verify(self.mounted()?, generation)
    }

    fn reset(&self) -> Result<()> {
        reset_disks(&self.disks)
    }

    fn observe(&self) -> Result<Observation> {
        observe_disks(&self.disks)
    }
}

/// The first errors in a log of GlusterFS, whose lines are `[time] LEVEL [message-id] [place] where: text`: what comes last there is
/// that it shuts down.
fn errors_in(log: &Path) -> String {
    let said = std::fs::read_to_string(log).unwrap_or_default();
    let errors: Vec<&str> = said.lines().filter(|line| line.contains("] E [")).take(3).collect();
    errors.join(" | ")
}

/// The `type` by which GlusterFS loads a translator that is not in its own folder.
fn kind_of(translator: &Path) -> Result<String> {
    let path = std::fs::canonicalize(translator).with_context(|| {
        format!("{}: build it (make -C integrations/glusterfs), or name it with --translator", translator.display())
    })?;
    let text = path.to_str().context("the translator's path is not UTF-8 text")?;
    let name = text.strip_suffix(".so").with_context(|| format!("{text} is no .so file"))?;
    // Below /usr/lib/ARCHITECTURE/glusterfs/VERSION/xlator.
    Ok(format!("{}{}", "../".repeat(8), name.trim_start_matches('/')))
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let mut loads = args.choice.loads(Load::contiguous_and_strided(args.applications, args.processes, args.size))?;
    let mut systems = args.choice.systems(&SYSTEMS, |system| system.name)?;
    systems.retain(|system| args.device == Device::Kernel || !system.reads_ahead());
    let parent = impresario_workload::cluster::folder(None)?;
    remove_stale(parent.path())?;
    own_network()?;
    let translator = match systems.iter().any(|system| system.translator.is_some()) {
        true => Translator { kind: kind_of(&args.translator)?, options: Vec::new() },
        false => Translator::default(),
    };
    let clients = Clients::build(parent.path(), &LIBGFAPI)?;
    let mut bed = Bricks::new(args.device, args.bricks, parent.path())?;
    let (mut volumes, mut missing, mut port) = (Vec::new(), Vec::new(), FIRST_PORT);
    let mut start = |system: &System, translator: &Translator, bed: &Bricks| {
        port += args.bricks as u16;
        Volume::start(system, translator, bed, parent.path(), port, &stop)
    };
    let (recorded, others): (Vec<&System>, Vec<&System>) = systems.into_iter().partition(|s| s.is_recorded());
    // The first of these mounts the volume.
    let first = if others.is_empty() { vec![&SYSTEMS[0]] } else { others };
    let keep = |system: &System, started: Result<Volume>, volumes: &mut Vec<Volume>, missing: &mut Vec<String>| {
        match started {
            Ok(volume) => volumes.push(volume),
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => missing.push(format!("{} could not be started: {error:#}", system.name)),
        }
        Ok(())
    };
    for system in first {
        keep(system, start(system, &translator, &bed), &mut volumes, &mut missing)?;
    }
    let Some(first) = volumes.first() else { bail!("no system could be started: {}", missing.join("; ")) };
    bed.mount(first, parent.path(), &stop)?;
    if !recorded.is_empty() {
        let traces = parent.path().join("traces");
        let recorder = start(&RECORDER, &translator.with("trace", &traces), &bed)?;
        serve_once(&bed, &clients, &recorder.client, &mut loads, &stop).context("recording a run")?;
        // Its bricks end their traces.
        drop(recorder);
        for system in recorded {
            keep(system, start(system, &translator.with("prediction", &traces), &bed), &mut volumes, &mut missing)?;
        }
    }
    let mut comparison = Comparison {
        title: match args.device {
            Device::Kernel => "GlusterFS on modelled disks below this kernel, one to a brick",
            Device::Bare => "GlusterFS on modelled disks in order of arrival, one to a brick",
        },
        modelled: true,
        loads,
        subjects: volumes
            .iter()
            .map(|volume| Subject { name: volume.name, address: &volume.client, launcher: &[] })
            .collect(),
        choice: &args.choice,
        baselines: &[AS_IT_COMES],
        missing,
    };
    let text = comparison.run(&bed, &clients, &stop).context("GlusterFS on modelled disks")?;
    // Before the bricks that it is a client of, and these before their disks.
    drop(bed.mount.take());
    drop(volumes);
    print(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_errors_of_a_log_say_why_a_brick_ended() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let line = |level: &str, text: &str| {
            format!("[2026-11-27 09:09:45.1 +0000] {level} [MSGID: 1] [a.c:1:f] 0-x: {text}\n")
        };
        let lines = [
            ("I", "starts"),
            ("E", "libimpresario.so.0: cannot open"),
            ("W", "dict"),
            ("E", "no graph"),
            ("I", "ends"),
        ];
        std::fs::write(&log, lines.map(|(level, text)| line(level, text)).concat()).unwrap();
        let errors = errors_in(&log);
        assert!(
            errors.contains("libimpresario.so.0: cannot open")
                && errors.contains(" | ")
                && errors.ends_with("no graph")
        );
        assert!(!errors.contains("starts") && !errors.contains("dict") && !errors.contains("ends\n"), "{errors}");
        assert_eq!(errors_in(&folder.path().join("none")), "");
    }

    #[test]
    fn graphs_have_the_translator_where_it_belongs() {
        let translator = Translator { kind: "user/impresario".into(), ..Translator::default() };
        let translator = translator.with("prediction", Path::new("/t"));
        let mlf = SYSTEMS.iter().find(|system| system.name == "mlf").unwrap();
        let graph = brick_graph(mlf, Device::Bare, &translator, "/b", 1, 5);
        let order = ["posix", "access-control", "locks", "io-threads", "scheduler", "brick1", "server"];
        let places: Vec<usize> = order.iter().map(|name| graph.find(&format!("volume {name}\n")).unwrap()).collect();
        assert!(places.is_sorted(), "{graph}");
        assert!(graph.contains("option o-direct \"on\"") && graph.contains("option prediction \"/t\""), "{graph}");
        assert!(graph.contains("option policy \"mlf\"") && graph.contains("subvolumes scheduler\n"), "{graph}");
        let default = SYSTEMS.iter().find(|system| system.name == "default").unwrap();
        let graph =
            brick_graph(default, Device::Kernel, &Translator { options: Vec::new(), ..translator.clone() }, "/b", 0, 5);
        assert!(graph.contains("    type user/impresario\n    subvolumes io-threads\n"), "it has no options: {graph}");
        assert!(!brick_graph(&SYSTEMS[1], Device::Kernel, &translator, "/b", 0, 5).contains("scheduler"));
        let client = client_graph(true, &[7, 8]);
        assert!(
            client.contains("subvolumes client0 client1") && client.contains("performance/write-behind"),
            "{client}"
        );
        assert!(!client_graph(false, &[7]).contains("performance"));
    }
}
