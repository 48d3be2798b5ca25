//! How the rooms of this crate behave together, against servers that behave well and badly.

mod client;
mod cluster;
mod faults;
mod link;
mod names;
mod striped;
mod turn;
mod unattended;

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_wire::{Call, FileKey, Role, Who};

use crate::testing::{FakeGreeting, FakeServer, Flow, Serve};
use crate::{ClientError, Identity, Link, LinkOptions};

/// A link to a data server named `data.0`, of a client of its own.
fn link_to(addresses: &[&str], timeout: Duration) -> Link {
    let identity = Arc::new(Identity::draw(7, 1000).unwrap());
    let routes: Vec<_> = addresses.iter().map(|address| ("data.0", *address)).collect();
    let options = LinkOptions { timeout, ..LinkOptions::new(Role::Data, 4 << 20) };
    Link::new(&routes, identity, options).unwrap()
}

/// A server whose every connection is served by a copy of `serve`.
fn server<F>(serve: F) -> FakeServer
where
    F: FnMut(&crate::testing::FakeConnection, crate::testing::FakeCall) -> Flow + Clone + Send + Sync + 'static,
{
    FakeServer::start(FakeGreeting::of("data.0"), move || Box::new(serve.clone()) as Serve).unwrap()
}

fn read_call(link: &Link, lane_offset: u64, len: u32) -> Call {
    Call::Read { who: link.identity().who(), file: FileKey(1), lane_offset, len }
}

fn foreign_write(lane_offset: u64) -> Call {
    let who = Who { client: impresario_wire::ClientKey(99), ..Who::default() };
    Call::Write { who, file: FileKey(1), lane_offset }
}

/// What a test server holds at an offset.
fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

fn in_ms(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Runs `fails`, which must fail no earlier than `ms` milliseconds after its start, and not hang: a busy machine may take
/// seconds to run a thread.
#[track_caller]
fn fails_at<T: std::fmt::Debug>(ms: u64, fails: impl FnOnce(Instant) -> Result<T, ClientError>) -> ClientError {
    let started = Instant::now();
    let error = fails(in_ms(ms)).unwrap_err();
    let took = started.elapsed().as_millis() as u64;
    assert!(took >= ms && took <= ms + 20_000, "{took} ms instead of {ms}: {error}");
    error
}
