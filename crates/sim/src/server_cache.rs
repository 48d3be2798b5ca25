//! The page cache of a data server.
//!
//! A read waits for the pages that are missing; after sequential reads the kernel reads on. A write ends in the cache;
//! a flusher writes dirty pages in order of file and offset while there are more than half of the limit, and writers wait
//! while there are more than the limit. There is no flushing by age.

use std::ops::Range;

use impresario_device::{CHUNK_BYTES, Op as IoOp, ReadAheadLimits, State};

use crate::server::{Job, Work};
use crate::simulation::Simulation;
use impresario_base::slab::Key;

/// Largest access that the page cache makes, bytes.
const FETCH_MAX: u64 = 1 << 20;

impl Simulation {
    pub(crate) fn count_hits(&mut self, server: u16, file: u32, start: u64, end: u64) {
        let Some(cache) = &self.servers[usize::from(server)].cache else { return };
        let mut at = start;
        while at < end {
            match cache.look(file, at, end) {
                State::Present(to) => {
                    self.totals.hit_bytes += to - at;
                    at = to;
                }
                State::Coming(to) | State::Missing(to) => at = to,
            }
        }
    }

    /// Goes on with a read as far as the cache reaches; what is missing is read.
    pub(crate) fn read_on(&mut self, key: Key) {
        loop {
            let Some(job) = self.jobs.get_mut(key) else { return };
            let (server, application) = (job.server, job.application);
            let Work::Batch { batch, at, .. } = &mut job.work else { return };
            let (file, end) = (batch.extent.file.0, batch.extent.end());
            if *at >= end {
                return self.batch_ended(key);
            }
            let from = *at;
            let Some(cache) = &mut self.servers[usize::from(server)].cache else { return };
            match cache.look(file, from, end) {
                State::Present(to) => {
                    cache.touch(file, from, to);
                    *at = to;
                }
                State::Coming(_) => return cache.wait(file, from, key),
                State::Missing(_) => {
                    // Not more than the cache can hold at once.
                    let end = end.min(from + (cache.capacity_bytes() / 2).max(CHUNK_BYTES));
                    self.fetch(server, application, file, from, end);
                }
            }
        }
    }

    /// Reads the pages of a range that are neither there nor on their way.
    fn fetch(&mut self, server: u16, application: u32, file: u32, start: u64, end: u64) {
        let Some(cache) = &mut self.servers[usize::from(server)].cache else { return };
        for claimed in cache.claim(file, start, end, false) {
            let mut at = claimed.start;
            while at < claimed.end {
                let end = claimed.end.min(at + FETCH_MAX);
                self.fetch_claimed(server, application, file, at..end);
                at = end;
            }
        }
    }

    fn fetch_claimed(&mut self, server: u16, application: u32, file: u32, claimed: Range<u64>) {
        let incarnation = self.servers[usize::from(server)].station.incarnation;
        let work = Work::Fetch { file, start: claimed.start, end: claimed.end };
        let key = self.jobs.insert(Job { server, incarnation, application, work, accesses: 0 });
        self.access(key, file, IoOp::Read, claimed.start, claimed.end);
    }

    /// A read comes to the kernel: what is missing is read, and what its read-ahead adds.
    pub(crate) fn read_ahead_of(&mut self, server: u16, application: u32, file: u32, start: u64, end: u64) {
        let limits = ReadAheadLimits { window_bytes: self.scenario.servers.read_ahead_bytes, request_bytes: FETCH_MAX };
        let f = &self.files[file as usize];
        let lane_end = f.layout.position_of(server).map_or(0, |k| f.layout.lane_len(k, f.len));
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        // Not more than the cache can hold at once; the rest is read as the reader comes to it.
        let end = end.min(start + (cache.capacity_bytes() / 2).max(CHUNK_BYTES));
        let requests = s.read_ahead.entry(file).or_default().read(cache, file, start..end, lane_end, limits);
        for request in requests {
            self.fetch_claimed(server, application, file, request);
        }
    }

    fn dirty_limit(&self, server: u16) -> u64 {
        let cache = self.servers[usize::from(server)].cache.as_ref();
        cache.map_or(0, |c| (c.capacity_bytes() as f64 * self.scenario.servers.dirty_ratio) as u64)
    }

    /// A write goes into the cache, waits there for room, or goes through to the device.
    pub(crate) fn write_cached(&mut self, key: Key) {
        let Some(job) = self.jobs.get(key) else { return };
        let server = job.server;
        let Work::Batch { batch, .. } = &job.work else { return };
        let (file, start, end) = (batch.extent.file.0, batch.extent.lane_offset, batch.extent.end());
        let limit = self.dirty_limit(server);
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        if limit == 0 {
            cache.write(file, start, end, false);
            return self.access(key, file, IoOp::Write, start, end);
        }
        // One that is larger than the limit goes when nothing is dirty.
        if cache.dirty_bytes() > 0 && cache.dirty_bytes() + (end - start) > limit {
            s.throttled.push_back(key);
            return self.flush(server);
        }
        cache.write(file, start, end, true);
        self.flush(server);
        self.batch_ended(key);
    }

    /// Starts the flusher when there is enough to do.
    pub(crate) fn flush(&mut self, server: u16) {
        let limit = self.dirty_limit(server);
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        if s.flushing || cache.dirty_bytes() <= limit / 2 && s.throttled.is_empty() {
            return;
        }
        let Some((file, start, end, next)) = cache.clean(s.flushed_to, FETCH_MAX) else { return };
        (s.flushed_to, s.flushing) = (next, true);
        let incarnation = s.station.incarnation;
        let job = Job { server, incarnation, application: self.owner_of(file), work: Work::Flush, accesses: 0 };
        let key = self.jobs.insert(job);
        self.access(key, file, IoOp::Write, start, end);
        self.start_disk(server);
    }

    /// The application that a file belongs to.
    fn owner_of(&self, file: u32) -> u32 {
        self.applications.partition_point(|a| a.first_file <= file).saturating_sub(1) as u32
    }
}
