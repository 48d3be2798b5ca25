//! The device behind a running data server, measured with a scratch object and the ordinary protocol.
//!
//! The times are those of one client: network, scheduler and server are included. They are the device's where a device
//! request takes much longer than these, as on a modelled disk; a real server's page cache hides its device. The label
//! of the result says which.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_base::machine::random_number;
use impresario_client::{Access, Identity, KeyRole, Link, LinkOptions, Reply, admin};
use impresario_config::calibration::{Described, Scope};
use impresario_config::{Config, Data};
use impresario_wire::{Answer, Call, FileKey, Role};

use super::folder::Aligned;
use super::{BLOCK_BYTES, Device, Plan, REGION_MIN_REQUESTS, Region, Span, Stream, host, region_of, utc_now};
use crate::stop::Stop;

/// How long a server may take to report its state.
const PATIENCE: Duration = Duration::from_secs(10);
/// Default scratch space.
const REGION_BYTES: u64 = 256 << 20;
/// On a modelled disk random requests go to at most this many places all over it, as those of many files would.
const PLACES_MAX: u64 = 64;
/// With fewer, requests would not cover the disk.
const PLACES_MIN: u64 = 8;

/// A data server whose device is measured. Dropping it removes the scratch object.
pub struct DataServer {
    link: Link,
    identity: Arc<Identity>,
    timeout: Duration,
    file: FileKey,
    what: String,
    modelled: bool,
    in_memory: bool,
    synchronous: bool,
    region: Region,
    notes: Vec<String>,
}

impl DataServer {
    /// Connects to a data server of a running cluster. With `synchronous` each write is followed by a sync.
    pub fn connect(
        config: &Config,
        server: &Data,
        plan: &Plan,
        size_bytes: Option<u64>,
        synchronous: bool,
    ) -> Result<DataServer> {
        let Data { name, address, device, .. } = server;
        let most = u64::from(config.cluster.max_payload_bytes);
        if plan.largest() > most {
            bail!("a request to {name} holds {most} bytes at most (max_payload_bytes): measure smaller --sizes");
        }
        let access = Access::of(config, KeyRole::Admin);
        let state = admin::status(&access, address, PATIENCE)?;
        let state: serde_json::Value =
            serde_json::from_str(&state).with_context(|| format!("{name}: its state is not JSON"))?;
        let told = |pointer: &str| state.pointer(pointer).and_then(serde_json::Value::as_bool).unwrap_or(false);
        let count = |pointer: &str| state.pointer(pointer).and_then(serde_json::Value::as_u64).unwrap_or(0);
        let (modelled, in_memory) = (told("/device/modelled"), told("/store/in_memory"));
        let mut notes = Vec::new();
        if count("/engine/queued") + count("/engine/in_flight_batches") > 0 {
            notes.push("the server had other work at the start: the times hold it too".into());
        }
        let chunk = device.as_ref().and_then(|d| config.device.get(d)).map(|d| d.placement_chunk_bytes);
        let bytes = size_bytes.unwrap_or(REGION_BYTES);
        let region = match chunk.filter(|_| modelled) {
            Some(chunk) => spread_over_disk(bytes, chunk, plan)?,
            None => region_of(bytes, plan)?,
        };
        let identity = Arc::new(Identity::of_program()?);
        let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
        let options = LinkOptions { timeout, access, ..LinkOptions::new(Role::Data, config.cluster.max_payload_bytes) };
        let link = Link::asking((name, address), &identity, options)?;
        let (file, what) = (FileKey(random_number()?), format!("data server {name} at {address}"));
        Ok(DataServer { link, identity, timeout, file, what, modelled, in_memory, synchronous, region, notes })
    }

    /// One call; its answer must be `wanted`.
    fn call(&self, call: Call, payload: &[u8], into: Option<&mut [u8]>) -> Result<Reply> {
        let deadline = Instant::now() + self.timeout;
        let reply = match into {
            Some(into) => self.link.call(call, &[], Some(&mut [IoSliceMut::new(into)]), deadline)?,
            None if payload.is_empty() => self.link.call(call, &[], None, deadline)?,
            None => self.link.call(call, &[IoSlice::new(payload)], None, deadline)?,
        };
        Ok(reply)
    }

    fn done(&self, call: Call) -> Result<()> {
        match self.call(call, &[], None)?.answer {
            Answer::Done => Ok(()),
            other => bail!("{} gave an unexpected answer: {other:?}", self.what),
        }
    }

    fn write(&self, offset: u64, payload: &[u8]) -> Result<()> {
        let call = Call::Write { who: self.identity.who(), file: self.file, lane_offset: offset };
        match self.call(call, payload, None)?.answer {
            Answer::Written(written) if written as usize == payload.len() => {}
            other => bail!("{} did not write all: {other:?}", self.what),
        }
        if self.synchronous { self.flush() } else { Ok(()) }
    }
}

/// On a modelled disk a file's chunks are spread over the disk: sequential requests go to the first chunk, random ones
/// to parts of many others. Nothing need be filled: the model takes as long for a hole.
fn spread_over_disk(bytes: u64, chunk: u64, plan: &Plan) -> Result<Region> {
    let largest = plan.largest();
    let least = (REGION_MIN_REQUESTS * largest).max(1 << 20).min(chunk);
    let sequential = (bytes / 4).clamp(least, chunk);
    let places = (bytes.saturating_sub(sequential) / least).min(PLACES_MAX);
    if places < PLACES_MIN || least < REGION_MIN_REQUESTS * largest {
        bail!(
            "{} of scratch space are too little to spread requests of {} over the disk: allow {} with --size, or measure \
             smaller --sizes",
            impresario_base::units::show_bytes(bytes as f64),
            impresario_base::units::show_bytes(largest as f64),
            impresario_base::units::show_bytes((least * (PLACES_MIN + 4)) as f64),
        );
    }
    let random = (1..=places).map(|nth| Span { start: nth * chunk, len: least }).collect();
    Ok(Region { sequential: Span { start: 0, len: sequential }, random, bytes: sequential + places * least })
}

impl Device for DataServer {
    fn described(&self) -> Described {
        Described {
            what: self.what.clone(),
            scope: if self.modelled { Scope::Modelled } else { Scope::Server },
            file_system: None,
            block_device: None,
            model: self.modelled.then(|| "modelled disk: its times are computed, not measured".into()),
            rotational: None,
            host: host(),
            measured_at: utc_now(),
        }
    }

    fn prepare(&mut self, until: Instant, stop: &Stop, share: &mut dyn FnMut(f64)) -> Result<()> {
        let end = self.region.random.iter().map(|span| span.start + span.len).max().unwrap_or(0);
        let who = self.identity.who();
        self.done(Call::Truncate { who, file: self.file, len: end.max(self.region.sequential.len) })?;
        if self.modelled {
            return Ok(());
        }
        let (total, piece) = (self.region.sequential.len, 1 << 20);
        let mut content = Aligned::random(piece as usize, random_number()?);
        let mut filled = 0;
        while filled < total {
            stop.check()?;
            if Instant::now() >= until {
                bail!(
                    "{} took a quarter of the time allowed for {} of {}: give less --size or more --max-seconds",
                    self.what,
                    impresario_base::units::show_bytes(filled as f64),
                    impresario_base::units::show_bytes(total as f64)
                );
            }
            let len = piece.min(total - filled);
            let bytes = content.stamp(filled, len as usize);
            // At most a call's payload, which may be as small as a block.
            for (nth, part) in bytes.chunks(BLOCK_BYTES as usize * 16).enumerate() {
                self.write(filled + nth as u64 * BLOCK_BYTES * 16, part)?;
            }
            filled += len;
            share(filled as f64 / total as f64);
        }
        self.flush()
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn stream(&self, size_max_bytes: u64) -> Result<Box<dyn Stream + '_>> {
        Ok(Box::new(ServerStream { server: self, buffer: Aligned::random(size_max_bytes as usize, random_number()?) }))
    }

    fn flush(&self) -> Result<()> {
        self.done(Call::Sync { who: self.identity.who(), file: self.file })
    }

    fn synchronous(&self) -> bool {
        self.synchronous
    }

    fn flush_tells(&self) -> bool {
        self.modelled
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.notes.clone();
        notes.push("every time includes network, scheduler and server, under the policy in force".into());
        if self.modelled {
            notes.push("MODELLED: random requests were spread over the whole modelled disk".into());
        } else if self.in_memory {
            notes.push("the server keeps its data in memory".into());
        } else {
            notes.push("reads came from the server's page cache; for its device, calibrate its folder there".into());
        }
        notes
    }
}

impl Drop for DataServer {
    fn drop(&mut self) {
        let call = Call::Unlink { who: self.identity.who(), file: self.file };
        if let Err(error) = self.done(call) {
            // No caller is left to get the error; the object stays.
            tracing::warn!("{}: the scratch object {:016x} stays there: {error:#}", self.what, self.file.0);
        }
    }
}

struct ServerStream<'a> {
    server: &'a DataServer,
    buffer: Aligned,
}

impl Stream for ServerStream<'_> {
    fn read(&mut self, offset: u64, len: u64) -> Result<()> {
        let into = self.buffer.bytes_mut().get_mut(..len as usize).context("a request larger than the buffer")?;
        let call = Call::Read {
            who: self.server.identity.who(),
            file: self.server.file,
            lane_offset: offset,
            len: len as u32,
        };
        match self.server.call(call, &[], Some(into))? {
            Reply { answer: Answer::Data, len: got, .. } if got as u64 == len => Ok(()),
            reply => bail!("{} did not give all: {:?}", self.server.what, reply.answer),
        }
    }

    fn write(&mut self, offset: u64, len: u64) -> Result<()> {
        let from = self.buffer.bytes().get(..len as usize).context("a request larger than the buffer")?;
        self.server.write(offset, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_spread_over_the_disk() {
        let plan = Plan { sizes: vec![4096, 1 << 20], ..Plan::default() };
        let region = spread_over_disk(256 << 20, 256 << 20, &plan).unwrap();
        assert_eq!((region.sequential.len, region.random.len()), (64 << 20, 48));
        assert!(region.bytes <= 256 << 20);
        assert!(
            region.random.iter().all(|span| span.start % (256 << 20) == 0 && span.start > 0 && span.len == 4 << 20)
        );
        let why = spread_over_disk(32 << 20, 256 << 20, &plan).unwrap_err().to_string();
        assert!(why.contains("allow 48 MiB with --size"), "{why}");
        assert!(spread_over_disk(48 << 20, 256 << 20, &plan).is_ok());
        // Chunks smaller than the minimum.
        assert!(spread_over_disk(1 << 30, 1 << 20, &plan).is_err());
    }
}
