//! The service time of a disk request: seek, rotation, transfer, and the effect of the drive's memory.
//!
//! - The platter's angle is a function of absolute time. A request that begins where the previous one ended, and was
//!   waiting by then, is streamed; one that is slightly late waits for nearly a whole turn.
//! - After a read the drive reads ahead until its limit or the next command. A read that begins in what was read, or is
//!   about to be, is served from there: what is in memory at interface speed, the rest as it passes under the head. If
//!   only its beginning is cached, the rest is read from the platter.
//! - Without the write cache a write ends on the platter. With it, it ends in the drive's memory; the drive destages in
//!   C-SCAN order once it has been idle for a moment, without a pause while more than half of the memory is full, and
//!   at the cost of the next write if there is no room. It completes a transfer it has begun: the next request for the
//!   platter waits.
//!
//! The mechanics are simulated lazily: the drive's activity between two requests is computed when the second arrives.

use crate::cache::{ReadCache, Segment, WriteCache};
use crate::geometry::Geometry;
use crate::params::DeviceParams;
use crate::{Io, Op};

/// How a request was served. `seek_ns + rotation_ns + transfer_ns` is at most its total time; the rest is overhead and
/// waiting for the drive's own writes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Served {
    /// When it ended.
    pub end_ns: u64,
    /// Moving the head.
    pub seek_ns: u64,
    /// Waiting for the platter.
    pub rotation_ns: u64,
    /// Passing under the head, skews included, or over the interface.
    pub transfer_ns: u64,
    /// Served from the drive's memory, without waiting for the platter.
    pub cached: bool,
}

/// A linear fit of service times at random addresses: what schedulers assume about a device without measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinearCost {
    /// Time of a request of no bytes.
    pub fixed_ns: u64,
    /// Time per 1024 bytes.
    pub ns_per_kib: u64,
}

impl LinearCost {
    /// Time for `len` bytes.
    pub fn ns(&self, len: u64) -> u64 {
        self.fixed_ns + (u128::from(len) * u128::from(self.ns_per_kib) / 1024) as u64
    }

    /// The fit for a disk: overhead, an average seek and half a turn, then the sustained rate. For writes it is the
    /// time on the platter, with or without a write cache: that is the device time spent.
    pub fn of(params: &DeviceParams, op: Op) -> LinearCost {
        let settle_ms = if op == Op::Write { params.write_settle_ms } else { 0.0 };
        let half_turn_ms = 30_000.0 / f64::from(params.rpm);
        let fixed_ms = f64::from(params.overhead_us) / 1e3 + params.seek_average_ms + settle_ms + half_turn_ms;
        LinearCost {
            fixed_ns: (fixed_ms * 1e6) as u64,
            ns_per_kib: 1_024_000_000_000 / params.sustained_bytes_per_s().max(1),
        }
    }
}

/// The read-ahead in progress: the head follows the path from a known point to the limit.
#[derive(Clone, Copy, Debug)]
struct ReadAhead {
    /// First address in the segment.
    start: u64,
    /// At `since_ns` the head was at `since_path`, and everything before `since` had been read.
    since: u64,
    since_path: u64,
    since_ns: u64,
    /// The head stops here.
    limit: u64,
}

/// The state of a disk. It serves one request at a time, in the order of the calls.
#[derive(Clone, Debug)]
pub struct Disk {
    geometry: Geometry,
    overhead_ns: u64,
    settle_ns: u64,
    interface_ps_per_byte: u64,
    read_ahead_bytes: u64,
    /// Zero without a write cache.
    write_cache_bytes: u64,

    /// End of the last request.
    busy_until_ns: u64,
    /// The address after the last request.
    served_to: u64,
    /// When the arm became free, and where it was.
    free_ns: u64,
    head: u64,
    ahead: Option<ReadAhead>,
    remembered: ReadCache,
    unwritten: WriteCache,
    /// Since when the write cache has been more than half full.
    crowded_since_ns: Option<u64>,
}

/// The drive starts to destage its cache after this idle time, ns.
const IDLE_NS: u64 = 10_000_000;
/// Its largest destaging transfer, bytes, for which a read may have to wait.
const DESTAGE_MAX_BYTES: u64 = 1 << 20;

impl Disk {
    /// A disk with validated parameters; the head is at address 0, the caches are empty.
    pub fn new(params: &DeviceParams) -> Disk {
        let segments =
            if params.read_ahead_bytes == 0 { 0 } else { (params.read_ahead_segments as usize).saturating_sub(1) };
        Disk {
            geometry: Geometry::new(params),
            overhead_ns: u64::from(params.overhead_us) * 1000,
            settle_ns: (params.write_settle_ms * 1e6) as u64,
            interface_ps_per_byte: 1_000_000_000_000 / params.interface_bytes_per_s.max(1),
            read_ahead_bytes: params.read_ahead_bytes,
            write_cache_bytes: if params.write_cache { params.write_cache_bytes } else { 0 },
            busy_until_ns: 0,
            served_to: 0,
            free_ns: 0,
            head: 0,
            ahead: None,
            remembered: ReadCache::new(segments, 2 * params.read_ahead_bytes),
            unwritten: WriteCache::default(),
            crowded_since_ns: None,
        }
    }

    /// Serves a request that starts at `start_ns`: when it was submitted, or at the end of the previous one if later.
    /// An earlier start is moved to that end. Addresses beyond the capacity count as its last bytes.
    pub fn serve(&mut self, start_ns: u64, io: &Io) -> Served {
        let start_ns = start_ns.max(self.busy_until_ns);
        let address = io.address.min(self.geometry.capacity_bytes);
        let end = io.end().min(self.geometry.capacity_bytes);
        self.write_out_until(start_ns);
        let served = match io.op {
            _ if end == address => Served { end_ns: start_ns + self.overhead_ns, ..Served::default() },
            Op::Read => self.read(start_ns, address, end),
            Op::Write if self.write_cache_bytes >= WriteCache::need(end - address) => {
                self.write_to_cache(start_ns, address, end)
            }
            Op::Write => self.write(start_ns, address, end),
        };
        self.busy_until_ns = served.end_ns;
        self.served_to = end;
        served
    }

    /// Destages the whole write cache; returns when that is done.
    pub fn flush(&mut self, start_ns: u64) -> u64 {
        let start_ns = start_ns.max(self.busy_until_ns);
        self.write_out_until(start_ns);
        let ready_ns = start_ns + self.overhead_ns;
        while self.write_out_one(ready_ns) {}
        self.busy_until_ns = self.free_ns.max(ready_ns);
        self.busy_until_ns
    }

    /// Clears the read cache and parks the arm at address 0, as after a power cycle, so that measurements are
    /// independent. The read-ahead in progress ends at `now_ns` or when the head is free.
    pub fn forget_reads(&mut self, now_ns: u64) {
        self.stop_reading_ahead(now_ns.max(self.free_ns));
        self.remembered.clear();
        (self.head, self.served_to) = (0, 0);
    }

    /// Where the elevator continues: the address after the last request.
    pub fn head_address(&self) -> u64 {
        self.served_to
    }

    /// When the last request ended.
    pub fn busy_until_ns(&self) -> u64 {
        self.busy_until_ns
    }

    fn read(&mut self, start_ns: u64, address: u64, end: u64) -> Served {
        let ready_ns = start_ns + self.overhead_ns;
        let interface_ns = self.interface_ns(end - address);
        let from_memory =
            Served { end_ns: ready_ns + interface_ns, transfer_ns: interface_ns, cached: true, ..Served::default() };
        if self.unwritten.covers(address, end) {
            return from_memory;
        }
        if let Some(ahead) = self.ahead
            && (ahead.start..=ahead.limit).contains(&address)
            && address <= self.soon(&ahead, ready_ns)
        {
            return self.read_on(ahead, from_memory, ready_ns, end);
        }
        let streamed = self.streams(start_ns, address);
        let at_ns = if streamed { start_ns } else { self.free_ns.max(ready_ns) };
        self.stop_reading_ahead(start_ns);
        if self.remembered.hit(address, end) {
            return from_memory;
        }
        let segment = self.remembered.take(address).unwrap_or(Segment { start: address, end: address });
        let served = self.transfer(at_ns, segment.end.max(address), end, 0);
        if self.read_ahead_bytes > 0 {
            self.ahead = Some(ReadAhead {
                start: segment.start,
                since: end,
                since_path: self.geometry.path_past(end),
                since_ns: served.end_ns,
                limit: self.limit(end),
            });
        }
        served
    }

    /// A read of what the read-ahead has read or is about to read; its limit moves with it.
    fn read_on(&mut self, mut ahead: ReadAhead, from_memory: Served, ready_ns: u64, end: u64) -> Served {
        let cached = end <= self.read_by(&ahead, ready_ns);
        let mut rotation_ns = 0;
        let (limit, limit_path) = (self.limit(end), self.geometry.path_past(ahead.limit));
        let stopped_ns = ahead.since_ns + (limit_path - ahead.since_path);
        if limit > ahead.limit && stopped_ns < ready_ns {
            // The read-ahead had stopped at the old limit and continues when that address comes round again.
            rotation_ns = self.geometry.rotation_ns(ready_ns, limit_path);
            (ahead.since, ahead.since_path) = (ahead.limit, limit_path);
            ahead.since_ns = ready_ns + rotation_ns;
        }
        ahead.limit = limit.max(ahead.limit);
        ahead.start = ahead.start.max(end.saturating_sub(2 * self.read_ahead_bytes));
        self.ahead = Some(ahead);
        if cached {
            return from_memory;
        }
        let passed_ns = ahead.since_ns + self.geometry.path_past(end).saturating_sub(ahead.since_path);
        let end_ns = passed_ns.max(from_memory.end_ns);
        Served { end_ns, seek_ns: 0, rotation_ns, transfer_ns: end_ns - ready_ns - rotation_ns, cached: false }
    }

    fn write(&mut self, start_ns: u64, address: u64, end: u64) -> Served {
        let ready_ns = start_ns + self.overhead_ns;
        // Only a write larger than the cache finds anything left in it; write that first, to keep the order simple.
        while self.write_out_one(ready_ns) {}
        let streamed = self.streams(start_ns, address);
        let at_ns = if streamed { start_ns } else { self.free_ns.max(ready_ns) };
        self.stop_reading_ahead(start_ns);
        self.remembered.forget(address, end);
        self.transfer(at_ns, address, end, self.settle_ns)
    }

    fn write_to_cache(&mut self, start_ns: u64, address: u64, end: u64) -> Served {
        let mut ready_ns = start_ns + self.overhead_ns;
        while self.unwritten.used_bytes() + WriteCache::need(end - address) > self.write_cache_bytes
            && self.write_out_one(ready_ns)
        {
            ready_ns = self.free_ns.max(ready_ns);
        }
        self.stop_reading_ahead(start_ns.max(self.free_ns));
        self.remembered.forget(address, end);
        self.unwritten.insert(address, end);
        let transfer_ns = self.interface_ns(end - address);
        let end_ns = ready_ns + transfer_ns;
        self.note_crowding(end_ns);
        Served { end_ns, transfer_ns, cached: true, ..Served::default() }
    }

    /// True if a request continues exactly at the head's present position, because the drive had it before the previous
    /// one ended.
    fn streams(&self, start_ns: u64, address: u64) -> bool {
        address == self.head && start_ns == self.free_ns && start_ns == self.busy_until_ns
    }

    /// Moves the head and transfers; the arm is free at the end, where the head stays.
    fn transfer(&mut self, at_ns: u64, address: u64, end: u64, settle_ns: u64) -> Served {
        let on_the_spot = address == self.head && at_ns == self.free_ns;
        let mut seek_ns = if on_the_spot { 0 } else { self.geometry.seek_ns(self.head, address) };
        if seek_ns > 0 {
            seek_ns += settle_ns;
        }
        let path = self.geometry.path_to(address);
        let rotation_ns = self.geometry.rotation_ns(at_ns + seek_ns, path);
        let transfer_ns = self.geometry.path_past(end) - path;
        let end_ns = at_ns + seek_ns + rotation_ns + transfer_ns;
        (self.free_ns, self.head) = (end_ns, end);
        Served { end_ns, seek_ns, rotation_ns, transfer_ns, cached: false }
    }

    /// Another command arrived: the segment read so far is cached, and the head is at its end.
    fn stop_reading_ahead(&mut self, at_ns: u64) {
        let Some(ahead) = self.ahead.take() else { return };
        self.head = self.read_by(&ahead, at_ns);
        self.remembered.keep(Segment { start: ahead.start, end: self.head });
    }

    /// The address that the read-ahead has reached.
    fn read_by(&self, ahead: &ReadAhead, at_ns: u64) -> u64 {
        let path = ahead.since_path + at_ns.saturating_sub(ahead.since_ns);
        // Rounding must not move backwards.
        self.geometry.address_at(path).clamp(ahead.since, ahead.limit)
    }

    /// The last address for which waiting for the read-ahead is best: beyond a track a seek is faster.
    fn soon(&self, ahead: &ReadAhead, now_ns: u64) -> u64 {
        self.read_by(ahead, now_ns) + self.geometry.track_bytes
    }

    /// The read-ahead limit after a read up to `end`.
    fn limit(&self, end: u64) -> u64 {
        (end + self.read_ahead_bytes).min(self.geometry.capacity_bytes)
    }

    /// Simulates the drive's own destaging before `now_ns`.
    fn write_out_until(&mut self, now_ns: u64) {
        while !self.unwritten.is_empty() {
            let begin_ns = match self.crowded_since_ns {
                Some(since_ns) => since_ns.max(self.free_ns),
                None => self.free_ns.max(self.busy_until_ns + IDLE_NS),
            };
            if begin_ns >= now_ns || !self.write_out_one(begin_ns) {
                return;
            }
        }
    }

    /// Destages the next range in elevator order, from `now_ns` or when the arm is free; false if none is left.
    fn write_out_one(&mut self, now_ns: u64) -> bool {
        let Some((address, end)) = self.unwritten.take(self.head, DESTAGE_MAX_BYTES) else { return false };
        let at_ns = now_ns.max(self.free_ns);
        self.stop_reading_ahead(at_ns);
        self.transfer(at_ns, address, end, self.settle_ns);
        self.note_crowding(self.free_ns);
        true
    }

    fn note_crowding(&mut self, now_ns: u64) {
        let crowded = 2 * self.unwritten.used_bytes() > self.write_cache_bytes;
        self.crowded_since_ns = if crowded { self.crowded_since_ns.or(Some(now_ns)) } else { None };
    }

    fn interface_ns(&self, len: u64) -> u64 {
        len * self.interface_ps_per_byte / 1000
    }
}
