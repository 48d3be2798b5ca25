//! How the suites start the checker: with the test program itself as its agents.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use impresario_conformance::Options;

/// Tells the process of a test program that it is an agent.
const AGENT: &str = "IMPRESARIO_CONFORMANCE_AGENT";
/// For servers that answer: only a bound, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Not a test by itself: the checker runs it as its agents.
#[test]
#[ignore = "run by other tests as a process"]
fn agent_process() {
    if std::env::var_os(AGENT).is_some() {
        impresario_conformance::serve_agent().unwrap();
    }
}

pub fn options(target: &Path) -> Options {
    let exe = std::env::current_exe().unwrap().into_os_string();
    let mut agent: Vec<OsString> = vec!["env".into(), format!("{AGENT}=1").into(), exe];
    agent.extend(
        ["support::agent_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"].map(OsString::from),
    );
    Options { seed: 7, patience: PATIENCE, ..Options::new(target, agent) }
}
