//! Reads of other ranges than the application requested: data sieving, the client's page cache, read-ahead.

use std::ops::Range;

use impresario_device::{ReadAhead, ReadAheadLimits, State};

use crate::access::Access;
use crate::client::{Kind, Op};
use crate::model::Operation;
use crate::simulation::Simulation;
use impresario_base::slab::Key;

impl Simulation {
    // Data sieving

    /// Starts a sieved request's next range or the writing half of this one, or ends the request.
    pub(crate) fn sieve_next(&mut self, key: Key) {
        let Some(op) = self.ops.get_mut(key) else { return };
        let Kind::Sieve { end, writing } = op.kind else { return };
        let access = op.access;
        if access.op == Operation::Write && end > access.offset && !writing {
            // Writes the range that was read.
            op.kind = Kind::Sieve { end, writing: true };
            let (start, len) = (op.at, end - op.at);
            return self.send_range(key, start, len);
        }
        // From the next wanted byte.
        let nth = end.saturating_sub(access.offset) / access.stride;
        let start_of = |n: u64| access.offset + n * access.stride;
        let start = if end < start_of(nth) + access.len { end } else { start_of(nth + 1) };
        if start >= access.end() {
            let process = (op.process, op.began, access.bytes());
            self.ops.remove(key);
            return self.request_ended(process.0, process.1, process.2);
        }
        let application = self.processes[op.process as usize].application;
        let sieve = self.scenario.application[self.applications[application as usize].index].sieve_bytes;
        let limit = (start + sieve).min(access.end());
        // To the last wanted byte before the limit.
        let last = (limit - 1 - access.offset) / access.stride;
        let end = limit.min(start_of(last) + access.len);
        op.at = start;
        op.kind = Kind::Sieve { end, writing: false };
        if access.op == Operation::Write {
            return self.send_as_read(key, start, end - start);
        }
        self.send_range(key, start, end - start);
    }

    /// The read of a read-modify-write.
    fn send_as_read(&mut self, key: Key, offset: u64, len: u64) {
        if let Some(op) = self.ops.get_mut(key) {
            op.access.op = Operation::Read;
        }
        self.send_range(key, offset, len);
        if let Some(op) = self.ops.get_mut(key) {
            op.access.op = Operation::Write;
        }
    }

    // The client's page cache

    /// Continues a read as far as the cache allows; fetches what is missing.
    pub(crate) fn read_cached(&mut self, key: Key) {
        loop {
            let Some(op) = self.ops.get_mut(key) else { return };
            let (process, file, extent) = (op.process, op.file, u64::from(op.extent));
            let end = op.access.offset + extent * op.access.stride + op.access.len;
            if op.at >= end {
                op.extent += 1;
                op.at = op.access.offset + u64::from(op.extent) * op.access.stride;
                if op.extent < op.access.count {
                    continue;
                }
                let (began, bytes) = (op.began, op.access.bytes());
                self.ops.remove(key);
                return self.request_ended(process, began, bytes);
            }
            let at = op.at;
            let node = self.processes[process as usize].node as usize;
            let Some(cache) = self.client_nodes[node].cache.as_mut() else { return };
            match cache.look(file, at, end) {
                State::Present(to) => {
                    cache.touch(file, at, to);
                    op.at = to;
                }
                State::Coming(_) => return cache.wait(file, at, key),
                State::Missing(_) => self.fetch_missing(process, file, at, end),
            }
        }
    }

    /// A read reaches the client's kernel, which requests missing pages and its read-ahead.
    pub(crate) fn read_ahead(&mut self, process: u32, file: u32, access: &Access) {
        let (window_bytes, longest) = (self.scenario.clients.read_ahead_bytes, self.scenario.clients.request_bytes_max);
        if window_bytes == 0 {
            return;
        }
        let limits = ReadAheadLimits { window_bytes, request_bytes: if longest == 0 { u64::MAX } else { longest } };
        let file_end = self.files[file as usize].len;
        let p = &mut self.processes[process as usize];
        if p.read_ahead.0 != file {
            p.read_ahead = (file, ReadAhead::default());
        }
        let Some(cache) = self.client_nodes[p.node as usize].cache.as_mut() else { return };
        let read = |(offset, len)| p.read_ahead.1.read(cache, file, offset..offset + len, file_end, limits);
        let requests: Vec<Range<u64>> = access.extents().flat_map(read).collect();
        requests.into_iter().for_each(|request| self.fetch_pages(process, file, request));
    }

    /// Fetches the pages of a range that are neither present nor being fetched.
    fn fetch_missing(&mut self, process: u32, file: u32, start: u64, end: u64) {
        let node = self.processes[process as usize].node as usize;
        let end = end.min(self.files[file as usize].len);
        let Some(cache) = self.client_nodes[node].cache.as_mut() else { return };
        for claimed in cache.claim(file, start, end, false) {
            self.fetch_pages(process, file, claimed);
        }
    }

    fn fetch_pages(&mut self, process: u32, file: u32, claimed: Range<u64>) {
        let (start, end) = (claimed.start, claimed.end.min(self.files[file as usize].len));
        let access =
            Access { file: 0, op: Operation::Read, offset: start, len: end - start, stride: end - start, count: 1 };
        let first = self.processes[process as usize].next == 1;
        let op = self.begin(Kind::Fetch { start, end }, process, file, access, first);
        self.send_access(op);
    }

    /// A fetch ended: the reads that wait for it continue, or fail with it.
    pub(crate) fn fetched(&mut self, op: &Op, start: u64, end: u64, errno: i32) {
        let node = self.processes[op.process as usize].node as usize;
        let Some(cache) = self.client_nodes[node].cache.as_mut() else { return };
        let mut woken = Vec::new();
        if errno == 0 {
            cache.arrive(op.file, start, end, &mut woken);
        } else {
            cache.give_up(op.file, start, end, &mut woken);
        }
        for key in woken {
            if errno == 0 {
                self.read_cached(key);
            } else if let Some(op) = self.ops.remove(key) {
                self.request_ended(op.process, op.began, 0);
            }
        }
    }
}
