//! A whole cluster in this process.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use impresario_config::{Cluster, Config, Data, Io, META_NAME, Meta};
use impresario_testing::free_address;
use impresario_wire::{Answer, Call, Role};

use super::names::FakeNames;
use crate::testing::{FakeGreeting, FakeObjects, FakeServer, Flow, MAX_PAYLOAD_BYTES, Serve};
use crate::{Identity, Link, LinkOptions, Striped};

/// A metadata server, data servers and I/O nodes over memory, in this process.
pub struct FakeCluster {
    /// What the data servers hold.
    pub objects: Vec<Arc<FakeObjects>>,
    /// The name space.
    pub names: Arc<FakeNames>,
    /// The metadata server; can be taken out and killed.
    pub meta: Option<FakeServer>,
    /// The data servers.
    pub data: Vec<FakeServer>,
    /// The I/O nodes.
    pub io: Vec<FakeServer>,
    config: Config,
}

impl FakeCluster {
    /// Starts a cluster whose clients give up after `timeout_ms`.
    pub fn start(data_servers: usize, io_nodes: usize, timeout_ms: u64) -> io::Result<FakeCluster> {
        let objects: Vec<Arc<FakeObjects>> = (0..data_servers).map(|_| Arc::default()).collect();
        let data = objects.iter().enumerate().map(|(i, objects)| {
            let objects = objects.clone();
            FakeServer::start_at(&free_address(), FakeGreeting::of(&format!("data.{i}")), move || objects.serve())
        });
        let data: Vec<FakeServer> = data.collect::<io::Result<_>>()?;
        let names = Arc::new(FakeNames::new(objects.clone()));
        let served = names.clone();
        let meta = FakeServer::start_at(&free_address(), FakeGreeting::of(META_NAME), move || served.serve())?;
        let cluster = Cluster { request_timeout_ms: timeout_ms, max_payload_bytes: 1 << 20, ..Cluster::default() };
        let addresses: Vec<String> = data.iter().map(|server| server.address().to_string()).collect();
        let data_config = addresses.iter().enumerate().map(|(i, a)| Data::new(format!("data.{i}"), a, "unused"));
        let mut config = Config {
            cluster,
            meta: Meta { address: meta.address().into(), dir: "unused".into(), ..Default::default() },
            data: data_config.collect(),
            ..Config::default()
        };
        let mut io = Vec::new();
        for i in 0..io_nodes {
            let name = format!("io.{i}");
            let (names, addresses) = (names.clone(), addresses.clone());
            let forward = Arc::new(striped_over(&addresses, Duration::from_millis(timeout_ms))?);
            io.push(FakeServer::start_at(&free_address(), FakeGreeting::of(&name), move || {
                forward_by(&forward, names.serve())
            })?);
            config.io.extend(io.last().map(|server| Io::new(name, server.address())));
        }
        Ok(FakeCluster { objects, names, meta: Some(meta), data, io, config })
    }

    /// The configuration that its clients use.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Starts the metadata server again, after it was killed.
    pub fn restart_meta(&mut self) -> io::Result<()> {
        let names = self.names.clone();
        self.meta =
            Some(FakeServer::start_at(&self.config.meta.address, FakeGreeting::of(META_NAME), move || names.serve())?);
        Ok(())
    }
}

/// Data access to fake data servers, as an I/O node has it.
fn striped_over(addresses: &[String], timeout: Duration) -> io::Result<Striped> {
    let identity = Arc::new(Identity::draw(0, 0).map_err(io::Error::other)?);
    let links = addresses.iter().enumerate().map(|(i, address)| {
        let options = LinkOptions { timeout, ..LinkOptions::new(Role::Data, MAX_PAYLOAD_BYTES) };
        Link::new(&[(&format!("data.{i}"), address)], identity.clone(), options).map(Arc::new).map_err(io::Error::other)
    });
    Ok(Striped::new(links.collect::<io::Result<_>>()?, timeout))
}

/// What an I/O node does, without a scheduler: one call at a time per connection.
fn forward_by(striped: &Arc<Striped>, mut meta: Serve) -> Serve {
    let striped = striped.clone();
    Box::new(move |connection, call| {
        let mut bytes = Vec::new();
        let done = match &call.call {
            Call::FileRead { who, file, layout, made, offset, len } => {
                bytes.resize(*len as usize, 0);
                striped.read(who, *file, layout, *made, *offset, &mut bytes).map(|got| {
                    bytes.truncate(got);
                    Answer::Data
                })
            }
            Call::FileWrite { who, file, layout, offset } => {
                let whos = std::slice::from_ref(who);
                let written = striped.write_merged(whos, *file, layout, *offset, &call.payload);
                written.map(|lanes| Answer::FileWritten { bytes: call.payload.len() as u32, lanes })
            }
            Call::FileChangeSpace { who, file, layout, change, offset, len } => {
                let changed = striped.change_space(who, *file, layout, *change, (*offset, *len));
                changed.map(|lanes| Answer::FileWritten { bytes: 0, lanes })
            }
            Call::FileSync { who, file, layout } => {
                let synced = striped.sync_lanes(who, *file, layout);
                synced.map(|(lanes, errno)| Answer::FileSynced { lanes, errno })
            }
            Call::FileStat { file, layout } => striped.stat(*file, layout).map(Answer::Object),
            Call::FilePrefetch { who, file, layout, offset, len } => {
                striped.prefetch(who, *file, layout, *offset, *len).map(Answer::Accepted)
            }
            _ => return meta(connection, call),
        };
        let answer = done.unwrap_or_else(|error| Answer::Fault(error.to_fault()));
        let bytes = if answer == Answer::Data { bytes } else { Vec::new() };
        connection.answer(call.id, &answer, &bytes);
        Flow::Continue
    })
}
