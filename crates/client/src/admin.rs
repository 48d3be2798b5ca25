//! One question to one server, by its address: for command lines.
//!
//! Unlike a client's calls these do not wait for a server that refuses connections to come back.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_sched::{PolicySpec, Who};
use impresario_transport::Access;
use impresario_wire::{Answer, Call, Role, frame::ANSWER_BODY_MAX_BYTES};

use crate::error::ClientError;
use crate::identity::Identity;
use crate::link::{Link, LinkOptions};
use crate::pending::Reply;
use crate::striped::{expect_done, unexpected};

/// A server's state as JSON.
pub fn status(access: &Access, address: &str, timeout: Duration) -> Result<String, ClientError> {
    let reply = ask(access, address, Call::Status, timeout)?;
    if let Answer::Text(text) = reply.answer { Ok(text) } else { Err(unexpected(&reply)) }
}

/// What a server's policy does with such requests, in words.
pub fn explain(access: &Access, address: &str, who: &Who, timeout: Duration) -> Result<String, ClientError> {
    let Who { job, user, client, file, naming, .. } = *who;
    let op = who.does().word().unwrap_or("read").to_string();
    let reply = ask(
        access,
        address,
        Call::Explain { job, user: user as u32, client, file, op, folders: naming.folders },
        timeout,
    )?;
    if let Answer::Text(text) = reply.answer { Ok(text) } else { Err(unexpected(&reply)) }
}

/// Switches the policy of a server now. A refusal says why and changes nothing.
pub fn set_policy(access: &Access, address: &str, policy: &PolicySpec, timeout: Duration) -> Result<(), ClientError> {
    set_policy_at(access, address, policy, 0, timeout)
}

/// Has a server switch its policy at an instant of shared time, nanoseconds since 1970: servers that are
/// given the same instant change together. Returns when the change is certain.
pub fn set_policy_at(
    access: &Access,
    address: &str,
    policy: &PolicySpec,
    at_shared_ns: i64,
    timeout: Duration,
) -> Result<(), ClientError> {
    let params = policy.params.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    expect_done(&ask(access, address, Call::SetPolicy { name: policy.name.clone(), params, at_shared_ns }, timeout)?)
}

/// Has a data server on a modelled device serve in `arrival` or `elevator` order.
pub fn set_disk_order(access: &Access, address: &str, order: &str, timeout: Duration) -> Result<(), ClientError> {
    expect_done(&ask(access, address, Call::SetDiskOrder { order: order.into() }, timeout)?)
}

/// Has an I/O node or data server begin or end a trace of its requests; says which.
pub fn trace(access: &Access, address: &str, on: bool, timeout: Duration) -> Result<String, ClientError> {
    let reply = ask(access, address, Call::Trace { on }, timeout)?;
    if let Answer::Text(text) = reply.answer { Ok(text) } else { Err(unexpected(&reply)) }
}

/// Has an I/O node or data server go by what earlier runs foretell, of those traces or folders on its machine, or if there are
/// none of those of its configuration; `None`: by no run any more. Says what it loaded.
pub fn earlier_runs(
    access: &Access,
    address: &str,
    runs: Option<&[PathBuf]>,
    timeout: Duration,
) -> Result<String, ClientError> {
    let runs = runs.map(|runs| runs.iter().map(|run| run.as_os_str().as_bytes().to_vec()).collect());
    let reply = ask(access, address, Call::EarlierRuns { runs }, timeout)?;
    if let Answer::Text(text) = reply.answer { Ok(text) } else { Err(unexpected(&reply)) }
}

/// Zeroes a server's statistics.
pub fn reset_statistics(access: &Access, address: &str, timeout: Duration) -> Result<(), ClientError> {
    expect_done(&ask(access, address, Call::ResetStatistics, timeout)?)
}

fn ask(access: &Access, address: &str, call: Call, timeout: Duration) -> Result<Reply, ClientError> {
    let identity = Arc::new(Identity::of_program()?);
    let options = LinkOptions { timeout, access: access.clone(), ..LinkOptions::new(Role::Any, ANSWER_BODY_MAX_BYTES) };
    Link::asking(("", address), &identity, options)?.call(call, &[], None, Instant::now() + timeout)
}
