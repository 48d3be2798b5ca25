//! I/O nodes and data servers that come and go while `twins` has them take turns: the real machine, in virtual time.

use impresario_sched::PolicySpec;
use impresario_sim::model::*;
use impresario_sim::{Outcome, Scenario, Simulation};

fn lawful(s: &Scenario) -> Outcome {
    let o = Simulation::new(s).unwrap().with_checks(true).finish();
    assert_eq!(o.violations, Vec::<String>::new());
    o
}

/// Windows of 5 ms in front of flash drives, so that only windows limit anything.
fn windows(io_nodes: u16, servers: u16, application: Vec<Application>) -> Scenario {
    Scenario {
        request_timeout_ms: 100_000,
        io_nodes: Some(IoNodes {
            count: io_nodes,
            policy: PolicySpec::named("twins").with("window_us", 5000),
            cpu_us: 1.0,
            ..IoNodes::default()
        }),
        servers: Servers { count: servers, cpu_us: 1.0, device: "flash".into(), ..Servers::default() },
        device: [("flash".to_string(), Device::Flash(impresario_device::FlashParams::default()))].into(),
        application,
        ..Scenario::default()
    }
}

fn both(s: &Scenario) -> [Outcome; 2] {
    [false, true].map(|members| {
        let mut s = s.clone();
        s.io_nodes.as_mut().unwrap().members = members;
        lawful(&s)
    })
}

/// Of four I/O nodes two are lost. The two that are left have ranks of which both begin with the same of two servers, so
/// the other one idles, until they take turns anew.
#[test]
fn nodes_that_are_left_use_all_servers() {
    let application = Application {
        processes: 16,
        pattern: Pattern::FilePerProcess,
        requests: 3000,
        request_bytes: 4096,
        ..Application::default()
    };
    let mut s = windows(4, 2, vec![application]);
    s.servers.stripe_count = 1;
    // A server has time for the batches of one node only.
    s.servers.cpu_us = 300.0;
    let fault = |which| Fault { at_s: 0.2, for_s: 1e6, what: FaultKind::LostIoNode, which, factor: 1.0 };
    let [whole, _] = both(&s);
    s.fault = vec![fault(1), fault(3)];
    let [before, after] = both(&s);
    let times = [whole.makespan_s, before.makespan_s, after.makespan_s];
    assert!(before.makespan_s > 1.5 * whole.makespan_s, "the nodes meet: {times:?}");
    assert!(after.makespan_s < 0.75 * before.makespan_s, "they do not: {times:?}");
}

/// One of three servers is cut off. The others have its windows soon after, and lose them again when it is back.
#[test]
fn a_server_that_hangs_leaves_its_windows_to_the_others() {
    let at = |server| Application {
        processes: 8,
        requests: 3000,
        request_bytes: 4096,
        files: vec![FileAt { key: u64::from(server), server }],
        ..Application::default()
    };
    let mut s = windows(2, 3, (0..3).map(at).collect());
    s.servers.stripe_count = 1;
    s.servers.cpu_us = 400.0;
    s.fault = vec![Fault { at_s: 0.1, for_s: 60.0, what: FaultKind::PartitionedServer, which: 0, factor: 1.0 }];
    let [before, after] = both(&s);
    let time = |o: &Outcome, at: usize| o.applications[at].time_s;
    for server in [1, 2] {
        let (before, after) = (time(&before, server), time(&after, server));
        assert!(after < 0.9 * before, "server {server}: {after} s, {before} s with windows for all");
    }
    assert!(time(&after, 0) < time(&before, 0) * 1.02, "it has windows again");
    assert!(after.applications.iter().all(|a| a.failed == 0));
}
