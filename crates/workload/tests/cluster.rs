//! A complete small cluster in this process: patterns, verification, injected faults, switching, the demonstration.

use impresario_config::DataState;
use impresario_sched::PolicySpec;
use impresario_workload::access::{Fault, Identity, Target};
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::compare;
use impresario_workload::dataset::DataSet;
use impresario_workload::demonstration;
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Placement, Workload};
use impresario_workload::runner::{RunOptions, run};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use impresario_workload::system::{DiskOrder, Settings, Switch, System};

fn workload(shape: Shape, operation: Operation) -> Workload {
    let pattern = Pattern { shape, request_bytes: 24_000, process_bytes: 200_000, processes: 3, seed: 5 };
    let mut workload = Workload::uniform(2, pattern, operation);
    workload.wire_max_bytes = Some(8192);
    workload.placement = Placement::Cyclic;
    workload
}

fn checked() -> RunOptions {
    RunOptions { verify: true, ..RunOptions::default() }
}

#[test]
fn every_shape_through_io_nodes_and_directly() {
    let cluster = OwnCluster::start_here(&Plan::default()).unwrap();
    let stop = Stop::new();
    for storage in [Storage::of(&cluster), Storage::of(&cluster).direct()] {
        for shape in Shape::ALL {
            for operation in [Operation::Write, Operation::Read] {
                let w = workload(shape, operation);
                let mut set = DataSet::new(&w).unwrap();
                set.prepare(&storage, &stop).unwrap();
                let result = run(&storage, &mut set, &w, &checked(), &stop).unwrap();
                assert!(result.verification.passed(), "{shape} {operation}: {:?}", result.verification);
                assert_eq!(result.leaving_clients.bytes, w.bytes(), "{shape} {operation}");
                assert!(result.leaving_clients.mean_bytes().unwrap() <= 8192.0);
                assert_eq!(result.servers.arriving_at_servers.bytes, w.bytes(), "{shape} {operation}");
                assert_eq!(result.servers.at_disk.bytes, w.bytes());
                let through = if storage.nodes() > 0 { w.bytes() } else { 0 };
                assert_eq!(result.servers.leaving_io_nodes.bytes, through);
                assert!(result.counts() && !result.modelled());
                set.remove(&storage).unwrap();
            }
        }
    }
}

#[test]
fn injected_faults_are_seen_through_the_cluster() {
    let cluster = OwnCluster::start_here(&Plan { io_nodes: 1, ..Plan::default() }).unwrap();
    let (storage, stop) = (Storage::of(&cluster), Stop::new());
    for fault in [Fault::Drop, Fault::Swap, Fault::Stale] {
        let w = workload(Shape::Strided, Operation::Write);
        let mut set = DataSet::new(&w).unwrap();
        set.prepare(&storage, &stop).unwrap();
        let options = RunOptions { fault: Some(fault), ..checked() };
        let result = run(&storage, &mut set, &w, &options, &stop).unwrap();
        assert!(!result.verification.passed(), "{fault:?} was not seen");
    }
}

#[test]
fn systems_switch_on_running_servers() {
    let plan = Plan { device: Some(Default::default()), ..Plan::default() };
    let cluster = OwnCluster::start_here(&plan).unwrap();
    let storage = Storage::of(&cluster);
    let system = System {
        name: "mixed".into(),
        data_policy: Some(PolicySpec::named("none")),
        io_policy: Some(PolicySpec::named("twins").with("window_us", 3000)),
        disk_order: Some(DiskOrder::Elevator),
        recorded: false,
    };
    storage.switch(&system).unwrap();
    assert_eq!(storage.depth().unwrap(), None);
    let seen = storage.observe().unwrap();
    for (name, state) in &seen.status {
        let policy = state.pointer("/engine/policy/name").and_then(|p| p.as_str()).unwrap();
        assert_eq!(policy, if name.starts_with("io") { "twins" } else { "none" });
        if name.starts_with("data") {
            assert_eq!(state.pointer("/device/order").and_then(|p| p.as_str()), Some("elevator"));
        }
    }
    storage.switch(&System { data_policy: Some(PolicySpec::named("fifo")), ..system.clone() }).unwrap();
    assert_eq!(storage.depth().unwrap(), Some(1));
    let bad = System { data_policy: Some(PolicySpec::named("best")), ..system };
    assert!(format!("{:#}", storage.switch(&bad).unwrap_err()).contains("best"));
}

#[test]
fn a_retired_server_is_not_asked_to_write_its_cache() {
    let device = Some(impresario_device::DeviceParams { write_cache: true, ..Default::default() });
    let cluster = OwnCluster::start_here(&Plan { data_servers: 3, io_nodes: 0, device, ..Plan::default() }).unwrap();
    let mut config = cluster.config.clone();
    config.cluster.request_timeout_ms = 300;
    (config.data[0].state, config.data[0].address) = (DataState::Retired, "127.0.0.1:1".into());
    Storage::new(config).cool().unwrap();
}

#[test]
fn a_server_that_is_away_keeps_no_other_from_its_settings() {
    let plan = Plan { device: Some(Default::default()), data_servers: 3, io_nodes: 1, ..Plan::default() };
    let cluster = OwnCluster::start_here(&plan).unwrap();
    let storage = Storage::of(&cluster);
    let before = storage.settings().unwrap();
    let system = System {
        name: "mixed".into(),
        data_policy: Some(PolicySpec::named("none")),
        io_policy: Some(PolicySpec::named("twins")),
        disk_order: Some(DiskOrder::Elevator),
        recorded: false,
    };
    storage.switch(&system).unwrap();
    let mut away = cluster.config.clone();
    for server in [0, 2] {
        away.data[server].address = "nowhere".into();
    }
    let error = format!("{:#}", Storage::new(away).set_back(&before).unwrap_err());
    assert!(error.contains("server data.0 at ") && error.contains("server data.2 at "), "{error}");
    let now = storage.settings().unwrap();
    for server in ["data.1", "io.0"] {
        let of = |all: &[Settings]| all.iter().find(|settings| settings.server == server).cloned().unwrap();
        assert_eq!(of(&now), of(&before), "{error}");
    }
}

/// Reading the same few bytes again must use the disk again.
#[test]
fn a_drive_remembers_nothing_of_the_run_before() {
    for write_cache in [false, true] {
        let device = Some(impresario_device::DeviceParams { write_cache, ..Default::default() });
        let cluster =
            OwnCluster::start_here(&Plan { data_servers: 1, io_nodes: 0, device, ..Plan::default() }).unwrap();
        let (storage, stop) = (Storage::of(&cluster), Stop::new());
        let pattern =
            Pattern { shape: Shape::Contiguous, request_bytes: 4096, process_bytes: 8192, processes: 1, seed: 1 };
        let w = Workload::uniform(1, pattern, Operation::Read);
        let mut set = DataSet::new(&w).unwrap();
        set.prepare(&storage, &stop).unwrap();
        // A read from the drive's memory takes a seventh of a millisecond; one that waits for the platter takes half
        // a turn of 8 ms on average, but may be lucky once.
        let mut services = Vec::new();
        for _ in 0..8 {
            let result = run(&storage, &mut set, &w, &checked(), &stop).unwrap();
            services.push(result.servers.device.unwrap().mean_service_us);
        }
        let waited = services[1..].iter().filter(|us| **us > 1000.0).count();
        assert!(waited >= 1, "write cache {write_cache}: {services:?}");
    }
}

#[test]
fn a_server_that_is_gone_ends_the_run_with_its_name() {
    let cluster = OwnCluster::start_here(&Plan { data_servers: 1, io_nodes: 0, ..Plan::default() }).unwrap();
    let mut config = cluster.config.clone();
    config.cluster.request_timeout_ms = 300;
    drop(cluster);
    let identity = Identity { job: 1, node: None, wire_max_bytes: None, name: "test".into() };
    let error = match Storage::new(config).connect(identity) {
        Err(error) => error,
        Ok(client) => client.create("x").err().expect("no server listens there"),
    };
    assert!(!format!("{error:#}").is_empty());
}

#[test]
fn the_quick_demonstration_runs_on_modelled_disks() {
    let plan = Plan {
        data_servers: demonstration::DATA_SERVERS,
        io_nodes: demonstration::IO_NODES,
        device: Some(Default::default()),
        read_ahead_bytes: 0,
        ..Plan::default()
    };
    let cluster = OwnCluster::start_here(&plan).unwrap();
    let experiment = demonstration::experiment(true);
    let outcome = compare(&Storage::of(&cluster), &experiment, &Stop::new(), &mut |_| {}).unwrap();
    assert!(outcome.modelled);
    let shown = demonstration::Shown { kernel: None, bare: outcome };
    let told = demonstration::runs(&shown);
    assert_eq!(told.runs.len(), 24);
    assert!(told.runs.iter().all(|r| r.verified && r.mean_batch_bytes > 0.0));
    let depth = |policy: &str| told.runs.iter().find(|r| r.policy == policy).unwrap().depth;
    assert_eq!((depth("none"), depth("mlf")), (None, Some(1)));
    assert!(demonstration::table(&shown).contains("MODELLED"));
}
