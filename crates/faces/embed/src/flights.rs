//! The batches that are with the program, by number, so that a late, foreign or repeated completion is a harmless
//! error.

use std::sync::Arc;

use impresario_base::lock::{Mutex, MutexGuard};
use impresario_base::slab::{Key, Slab};
use impresario_engine::{Outcome, Ticket, Work, now};
use impresario_sched::Nanos;

use crate::foresight::Foresight;
use crate::{Delivery, Identity, Misuse, SPECULATIVE};

/// Bits of a batch number that select its shard, so that threads rarely contend for one lock.
const SHARD_BITS: u32 = 3;
const SHARDS: usize = 1 << SHARD_BITS;

struct Flight {
    ticket: Ticket<Identity>,
    delivery: Arc<Delivery>,
    /// Members not yet completed, if they are completed one by one; empty until the first.
    open: Vec<bool>,
    left: u32,
    bytes: u64,
    /// Bytes of the speculation among them.
    ahead_bytes: Option<u64>,
    /// The first error in order of offset, with its member.
    error: Option<(u32, i32)>,
}

type Shard = Slab<Flight>;

/// All batches that are delivered and not completed.
#[derive(Default)]
pub(crate) struct Flights {
    shards: [Mutex<Shard>; SHARDS],
}

thread_local! {
    /// Each thread delivers through one shard.
    static SHARD: usize = {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS
    };
}

impl Flights {
    /// Registers a batch under a new number.
    pub fn enter(&self, work: Work<Identity>) -> Arc<Delivery> {
        let shard = SHARD.try_with(|s| *s).unwrap_or(0);
        let mut s = self.shards[shard].lock();
        let key = s.insert_with(|key| {
            // One generation more, so that no batch is number 0.
            let generation = u64::from(key.generation.wrapping_add(1));
            let id = generation << 32 | u64::from(key.index) << SHARD_BITS | shard as u64;
            let delivery = Arc::new(Delivery::new(id, &work, work.dispatched));
            let left = delivery.members().len() as u32;
            Flight { ticket: work.ticket, delivery, open: Vec::new(), left, bytes: 0, ahead_bytes: None, error: None }
        });
        Arc::clone(&s[key].delivery)
    }

    fn shard(&self, batch: u64) -> (MutexGuard<'_, Shard>, Key) {
        let shard = &self.shards[batch as usize & (SHARDS - 1)];
        let generation = ((batch >> 32) as u32).wrapping_sub(1);
        (shard.lock(), Key { index: batch as u32 >> SHARD_BITS, generation })
    }

    fn find(shard: &mut Shard, batch: u64, key: Key) -> Result<&mut Flight, Misuse> {
        shard.get_mut(key).ok_or(Misuse::NoBatch { batch })
    }

    fn take(shard: &mut Shard, batch: u64, key: Key) -> Result<Flight, Misuse> {
        shard.remove(key).ok_or(Misuse::NoBatch { batch })
    }

    /// Completes a batch. A zero instant is replaced by the time of delivery or by now.
    pub fn complete(&self, batch: u64, outcome: Outcome, foresight: Option<&Foresight>) -> Result<(), Misuse> {
        let flight = {
            let (mut shard, index) = self.shard(batch);
            let flight = Self::find(&mut shard, batch, index)?;
            if (flight.left as usize) < flight.delivery.members().len() {
                return Err(Misuse::Mixed { batch });
            }
            Self::take(&mut shard, batch, index)?
        };
        flight.finish(outcome, foresight);
        Ok(())
    }

    /// Completes one member; the last one completes the batch.
    pub fn complete_member(
        &self,
        (batch, member): (u64, u32),
        errno: i32,
        bytes: u64,
        foresight: Option<&Foresight>,
    ) -> Result<(), Misuse> {
        let flight = {
            let (mut shard, index) = self.shard(batch);
            let flight = Self::find(&mut shard, batch, index)?;
            let count = flight.delivery.members().len();
            if flight.open.is_empty() {
                flight.open.resize(count, true);
            }
            match flight.open.get_mut(member as usize) {
                None => return Err(Misuse::NoMember { batch, member, count }),
                Some(false) => return Err(Misuse::Twice { batch, member }),
                Some(open) => *open = false,
            }
            flight.left -= 1;
            flight.bytes = flight.bytes.saturating_add(bytes);
            if flight.delivery.members()[member as usize].flags & SPECULATIVE != 0 {
                flight.ahead_bytes = Some(bytes);
            }
            if errno != 0 && flight.error.is_none_or(|(first, _)| member < first) {
                flight.error = Some((member, errno));
            }
            if flight.left > 0 {
                return Ok(());
            }
            Self::take(&mut shard, batch, index)?
        };
        let errno = flight.error.map_or(0, |(_, errno)| errno);
        let bytes_done = flight.bytes;
        let outcome = Outcome { errno, bytes_done, started: Nanos::ZERO, finished: Nanos::ZERO };
        flight.finish(outcome, foresight);
        Ok(())
    }

    /// Abandons all batches: those still with the program end as EIO.
    pub fn abandon(&self) {
        for shard in &self.shards {
            let flights: Vec<Flight> = {
                let mut shard = shard.lock();
                let keys: Vec<Key> = shard.iter().map(|(key, _)| key).collect();
                keys.into_iter().filter_map(|key| shard.remove(key)).collect()
            };
            drop(flights); // outside the lock: their tickets report
        }
    }

    /// Number of batches with the program.
    pub fn count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

impl Flight {
    fn finish(self, mut outcome: Outcome, foresight: Option<&Foresight>) {
        // Overlapping reads share bytes: a batch cannot transfer more than its whole range.
        let hull = self.delivery.batch().len;
        outcome.bytes_done = outcome.bytes_done.min(hull);
        if outcome.started == Nanos::ZERO {
            outcome.started = Nanos(self.delivery.batch().handed_ns);
        }
        if outcome.finished == Nanos::ZERO {
            outcome.finished = now();
        }
        if let (Some(foresight), (asked, Some(ahead))) = (foresight, self.delivery.apart()) {
            let before = ahead.lane_offset - self.delivery.batch().lane_offset;
            let bytes = self.ahead_bytes.unwrap_or(outcome.bytes_done.saturating_sub(before));
            let took_ns = outcome.finished.since(outcome.started).0;
            foresight.ended(ahead, asked.is_empty(), (outcome.errno, bytes), took_ns);
            // The statistics are of what was requested.
            outcome.bytes_done = outcome.bytes_done.min(before);
        }
        self.ticket.complete(outcome);
    }
}
