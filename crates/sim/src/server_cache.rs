//! The page cache of a data server.
//!
//! A read waits for missing pages; after sequential reads the kernel reads ahead. A write ends in the cache; a flusher
//! writes dirty pages in order of file and offset while they exceed half of the limit, and writers wait while they
//! exceed the limit. There is no flushing by age.

use std::ops::Range;

use impresario_device::{CHUNK_BYTES, Op as IoOp, PAGE_BYTES, ReadAheadLimits, State};
use impresario_foresight::is_there;
use impresario_sched::{BatchId, Completion, Nanos, Op};

use crate::server::{Job, Work};
use crate::simulation::Simulation;
use impresario_base::slab::Key;

/// Largest access by the page cache, bytes.
const FETCH_MAX: u64 = 1 << 20;

impl Simulation {
    /// Counts the bytes of a read that are cached.
    pub(crate) fn count_hits(&mut self, server: u16, file: u32, start: u64, end: u64) -> u64 {
        let Some(cache) = &self.servers[usize::from(server)].cache else { return 0 };
        let (mut at, mut hit_bytes) = (start, 0);
        while at < end {
            match cache.look(file, at, end) {
                State::Present(to) => {
                    hit_bytes += to - at;
                    at = to;
                }
                State::Coming(to) | State::Missing(to) => at = to,
            }
        }
        self.totals.hit_bytes += hit_bytes;
        hit_bytes
    }

    /// Continues a read as far as the cache allows; fetches what is missing.
    pub(crate) fn continue_read(&mut self, key: Key) {
        loop {
            let Some(job) = self.jobs.get_mut(key) else { return };
            let (server, application) = (job.server, job.application);
            let Work::Batch { batch, at, end, .. } = &mut job.work else { return };
            let (file, end) = (batch.extent.file.0, *end);
            if *at >= end {
                return self.batch_ended(key);
            }
            let from = *at;
            let Some(cache) = &mut self.servers[usize::from(server)].cache else { return };
            match cache.look(file, from, end) {
                State::Present(to) => {
                    cache.touch(file, from, to);
                    *at = to;
                    let contents = self.servers[usize::from(server)].contents.as_ref();
                    let stale = contents.and_then(|contents| contents.read(file, from..to));
                    stale.into_iter().for_each(|what| self.violated(format!("data server {server}: {what}")));
                }
                State::Coming(_) => return cache.wait(file, from, key),
                State::Missing(_) => {
                    // At most what the cache can hold at once.
                    let end = end.min(from + (cache.capacity_bytes() / 2).max(CHUNK_BYTES));
                    self.fetch(server, application, file, from..end, false, Key::NONE);
                }
            }
        }
    }

    /// Reads the pages of a range that are neither present nor being read; `ahead`: for a speculation, with the batch
    /// that it may be. Returns the number of accesses.
    fn fetch(&mut self, server: u16, application: u32, file: u32, range: Range<u64>, ahead: bool, of: Key) -> u32 {
        let Some(cache) = &mut self.servers[usize::from(server)].cache else { return 0 };
        let mut fetches = 0;
        for claimed in cache.claim(file, range.start, range.end, ahead) {
            let mut at = claimed.start;
            while at < claimed.end {
                let end = claimed.end.min(at + FETCH_MAX);
                self.fetch_claimed(server, application, file, at..end, of);
                fetches += 1;
                at = end;
            }
        }
        fetches
    }

    fn fetch_claimed(&mut self, server: u16, application: u32, file: u32, claimed: Range<u64>, ahead: Key) {
        let incarnation = self.servers[usize::from(server)].station.incarnation;
        let work = Work::Fetch { file, start: claimed.start, end: claimed.end, ahead };
        let key = self.jobs.insert(Job { server, incarnation, application, work, accesses: 0 });
        if let Some(contents) = &mut self.servers[usize::from(server)].contents {
            contents.asked(key, file, claimed.clone());
        }
        self.access(key, file, IoOp::Read, claimed.start, claimed.end);
    }

    /// A read that needs the device from `start` on also fetches the range that continues it.
    pub(crate) fn will_read(&mut self, server: u16, file: u32, start: u64, along: Range<u64>) {
        let asked_end = along.start;
        let of = self.ahead(server, file, along, None, true);
        self.fetch_ahead(server, file, start, of);
        if let Some(cache) = &mut self.servers[usize::from(server)].cache {
            cache.touch(file, start, asked_end);
        }
        self.fetch_of_ahead_ended(of, 0..0);
    }

    /// Reads a speculation into the cache; then ends its batch, if it is one.
    pub(crate) fn start_ahead(&mut self, server: u16, file: u32, extent: Range<u64>, batch: Option<BatchId>) {
        let start = extent.start;
        let cache = self.servers[usize::from(server)].cache.as_ref();
        let there = cache.is_none_or(|cache| is_there(&extent, |at| cache.has(file, at)));
        if there {
            if let Some(foresight) = &mut self.servers[usize::from(server)].foresight {
                foresight.was_there(file.into(), extent.clone());
            }
            return batch.into_iter().for_each(|batch| self.ahead_ended(server, batch, self.now, &extent));
        }
        let of = self.ahead(server, file, extent, batch, false);
        self.fetch_ahead(server, file, start, of);
        self.fetch_of_ahead_ended(of, 0..0);
    }

    /// A speculation with one fetch in progress.
    fn ahead(&mut self, server: u16, file: u32, extent: Range<u64>, batch: Option<BatchId>, along: bool) -> Key {
        let work = Work::Ahead { batch, along, started: self.now, fetches: 1, file, extent };
        let incarnation = self.servers[usize::from(server)].station.incarnation;
        let application = self.files[file as usize].application;
        self.jobs.insert(Job { server, incarnation, application, work, accesses: 0 })
    }

    /// Fetches from `start` on, as far as the speculation and the file extend.
    fn fetch_ahead(&mut self, server: u16, file: u32, start: u64, of: Key) {
        let lane_end = self.lane_end(server, file);
        let Some(Job { application, work: Work::Ahead { extent, .. }, .. }) = self.jobs.get(of) else { return };
        let (application, range) = (*application, start..extent.end.min(lane_end));
        let more = self.fetch(server, application, file, range, true, of);
        if let Some(Job { work: Work::Ahead { fetches, .. }, .. }) = self.jobs.get_mut(of) {
            *fetches += more;
        }
    }

    /// A fetch of a speculation has ended.
    pub(crate) fn fetch_of_ahead_ended(&mut self, key: Key, fetched: Range<u64>) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        let Work::Ahead { fetches, file, .. } = &mut job.work else { return };
        if let Some(foresight) = &mut self.servers[usize::from(job.server)].foresight {
            foresight.arrived((*file).into(), &fetched);
        }
        *fetches -= 1;
        if *fetches > 0 {
            return;
        }
        let Some(Job { server, work: Work::Ahead { batch, along, started, file, extent, .. }, .. }) =
            self.jobs.remove(key)
        else {
            return;
        };
        let s = &mut self.servers[usize::from(server)];
        if let Some(foresight) = &mut s.foresight {
            match along {
                true => foresight.arrived(file.into(), &extent),
                false => foresight.fetched(file.into(), &extent, self.now - started),
            }
        }
        if let Some(batch) = batch {
            self.ahead_ended(server, batch, started, &extent);
        }
    }

    fn ahead_ended(&mut self, server: u16, batch: BatchId, started: u64, extent: &Range<u64>) {
        let (started, finished, bytes_done) = (Nanos(started), Nanos(self.now), extent.end - extent.start);
        let completion = Completion { batch, errno: 0, bytes_done, started, finished };
        self.servers[usize::from(server)].station.completed(self.now, completion);
    }

    /// A file is truncated or removed: its pages are dropped, and reads in progress do not fill them.
    pub(crate) fn cut_off(&mut self, server: u16, file: u32, op: Op, offset: u64) {
        let (end, whole) = (if op == Op::Unlink { 0 } else { offset }, self.whole_lane(server, file));
        let s = &mut self.servers[usize::from(server)];
        if op == Op::Sync {
            return;
        }
        s.cut.insert(file, end);
        if end >= whole {
            s.cut.remove(&file);
        }
        let Some(cache) = &mut s.cache else { return };
        cache.truncate(file, end);
        let kept = end.next_multiple_of(PAGE_BYTES);
        if let Some(contents) = &mut s.contents {
            contents.cut(file, end);
        }
        let coming: Vec<Key> = self.jobs.iter().filter(|(_, job)| job.server == server).map(|(key, _)| key).collect();
        for key in coming {
            if let Some(Job { work: Work::Fetch { file: of, start, end, .. }, .. }) = self.jobs.get_mut(key)
                && *of == file
            {
                (*start, *end) = ((*start).min(kept), (*end).min(kept));
            }
        }
    }

    /// A read reaches the kernel, which reads missing pages and its read-ahead.
    pub(crate) fn read_ahead_of(&mut self, server: u16, application: u32, file: u32, start: u64, end: u64) {
        let limits = ReadAheadLimits { window_bytes: self.scenario.servers.read_ahead_bytes, request_bytes: FETCH_MAX };
        let lane_end = self.lane_end(server, file);
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        // At most what the cache can hold at once; the rest is read when the reader gets there.
        let end = end.min(start + (cache.capacity_bytes() / 2).max(CHUNK_BYTES));
        let requests = s.read_ahead.entry(file).or_default().read(cache, file, start..end, lane_end, limits);
        for request in requests {
            self.fetch_claimed(server, application, file, request, Key::NONE);
        }
    }

    fn dirty_limit(&self, server: u16) -> u64 {
        let cache = self.servers[usize::from(server)].cache.as_ref();
        cache.map_or(0, |c| (c.capacity_bytes() as f64 * self.scenario.servers.dirty_ratio) as u64)
    }

    /// A write goes into the cache, waits for room there, or goes through to the device.
    pub(crate) fn write_cached(&mut self, key: Key) {
        let Some(job) = self.jobs.get(key) else { return };
        let server = job.server;
        let Work::Batch { batch, .. } = &job.work else { return };
        let (file, start, end) = (batch.extent.file.0, batch.extent.lane_offset, batch.extent.end());
        let limit = self.dirty_limit(server);
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        // A write larger than the limit waits until nothing is dirty.
        if limit > 0 && cache.dirty_bytes() > 0 && cache.dirty_bytes() + (end - start) > limit {
            s.throttled.push_back(key);
            return self.flush(server);
        }
        if let Some(contents) = &mut s.contents {
            contents.wrote(file, start..end, limit == 0, |at| cache.has(file, at));
        }
        if limit == 0 {
            cache.write(file, start, end, false);
            return self.access(key, file, IoOp::Write, start, end);
        }
        cache.write(file, start, end, true);
        self.flush(server);
        self.batch_ended(key);
    }

    /// Starts the flusher when there is enough to write.
    pub(crate) fn flush(&mut self, server: u16) {
        let limit = self.dirty_limit(server);
        let s = &mut self.servers[usize::from(server)];
        let Some(cache) = &mut s.cache else { return };
        if s.flushing || cache.dirty_bytes() <= limit / 2 && s.throttled.is_empty() {
            return;
        }
        let Some((file, start, end, next)) = cache.clean(s.flushed_to, FETCH_MAX) else { return };
        (s.flushed_to, s.flushing) = (next, true);
        if let Some(contents) = &mut s.contents {
            contents.flushed(file, start..end);
        }
        let incarnation = s.station.incarnation;
        let job = Job { server, incarnation, application: self.owner_of(file), work: Work::Flush, accesses: 0 };
        let key = self.jobs.insert(job);
        self.access(key, file, IoOp::Write, start, end);
        self.start_disk(server);
    }

    /// The application that owns a file.
    fn owner_of(&self, file: u32) -> u32 {
        self.applications.partition_point(|a| a.first_file <= file).saturating_sub(1) as u32
    }
}
