//! Which batches are with the program: by number, so that a late, foreign or repeated completion is an error and no harm.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use impresario_engine::{Outcome, Ticket, Work, now};
use impresario_sched::Nanos;

use crate::{Handed, Identity, Misuse};

/// Numbers of batches keep their shard here, so that threads that hand out and complete rarely meet at one lock.
const SHARD_BITS: u32 = 3;
const SHARDS: usize = 1 << SHARD_BITS;

struct Flight {
    ticket: Ticket<Identity>,
    handed: Arc<Handed>,
    /// Members not reported yet, when they are reported one by one; empty until the first.
    open: Vec<bool>,
    left: u32,
    bytes: u64,
    /// The first error in order of offset, with its member.
    error: Option<(u32, i32)>,
}

#[derive(Default)]
struct Place {
    generation: u32,
    flight: Option<Flight>,
}

#[derive(Default)]
struct Shard {
    places: Vec<Place>,
    free: Vec<u32>,
}

/// All batches that were handed out and are not completed.
#[derive(Default)]
pub(crate) struct Flights {
    shards: [Mutex<Shard>; SHARDS],
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // Nothing under this lock can panic half-way.
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// Each thread hands out through one shard.
    static SHARD: usize = {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS
    };
}

impl Flights {
    /// Takes a batch up under a new number.
    pub fn enter(&self, work: Work<Identity>) -> Arc<Handed> {
        let shard = SHARD.try_with(|s| *s).unwrap_or(0);
        let mut s = lock(&self.shards[shard]);
        let index = s.free.pop().unwrap_or_else(|| {
            s.places.push(Place::default());
            s.places.len() as u32 - 1
        });
        let place = &mut s.places[index as usize];
        place.generation = place.generation.wrapping_add(1);
        let id = u64::from(place.generation) << 32 | u64::from(index) << SHARD_BITS | shard as u64;
        let handed = Arc::new(Handed::new(id, &work, work.dispatched));
        let left = handed.members().len() as u32;
        let flight =
            Flight { ticket: work.ticket, handed: Arc::clone(&handed), open: Vec::new(), left, bytes: 0, error: None };
        place.flight = Some(flight);
        handed
    }

    fn shard(&self, batch: u64) -> (MutexGuard<'_, Shard>, usize) {
        let shard = &self.shards[batch as usize & (SHARDS - 1)];
        (lock(shard), (batch as u32 >> SHARD_BITS) as usize)
    }

    fn find(shard: &mut Shard, batch: u64, index: usize) -> Result<&mut Flight, Misuse> {
        let place = shard.places.get_mut(index).filter(|p| u64::from(p.generation) == batch >> 32);
        place.and_then(|p| p.flight.as_mut()).ok_or(Misuse::NoBatch { batch })
    }

    fn take(shard: &mut Shard, batch: u64, index: usize) -> Result<Flight, Misuse> {
        let place = shard.places.get_mut(index).filter(|p| u64::from(p.generation) == batch >> 32);
        let flight = place.and_then(|p| p.flight.take()).ok_or(Misuse::NoBatch { batch })?;
        shard.free.push(index as u32);
        Ok(flight)
    }

    /// Ends a batch. Zero instants are filled in: handed out, and now.
    pub fn complete(&self, batch: u64, outcome: Outcome) -> Result<(), Misuse> {
        let flight = {
            let (mut shard, index) = self.shard(batch);
            let flight = Self::find(&mut shard, batch, index)?;
            if (flight.left as usize) < flight.handed.members().len() {
                return Err(Misuse::Mixed { batch });
            }
            Self::take(&mut shard, batch, index)?
        };
        flight.finish(outcome);
        Ok(())
    }

    /// Ends one member; the last one ends the batch.
    pub fn complete_member(&self, batch: u64, member: u32, errno: i32, bytes: u64) -> Result<(), Misuse> {
        let flight = {
            let (mut shard, index) = self.shard(batch);
            let flight = Self::find(&mut shard, batch, index)?;
            let count = flight.handed.members().len();
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
        flight.finish(Outcome { errno, bytes_done, started: Nanos::ZERO, finished: Nanos::ZERO });
        Ok(())
    }

    /// Forgets all: what is still out there ends as EIO.
    pub fn abandon(&self) {
        for shard in &self.shards {
            let flights: Vec<Flight> = {
                let mut s = lock(shard);
                let Shard { places, free } = &mut *s;
                let taken = places.iter_mut().enumerate().filter_map(|(i, p)| p.flight.take().map(|f| (i as u32, f)));
                taken
                    .map(|(i, flight)| {
                        free.push(i);
                        flight
                    })
                    .collect()
            };
            drop(flights); // outside the lock: their tickets report
        }
    }

    /// Batches with the program.
    pub fn count(&self) -> usize {
        let out = |s: &Mutex<Shard>| {
            let s = lock(s);
            s.places.len() - s.free.len()
        };
        self.shards.iter().map(out).sum()
    }
}

impl Flight {
    fn finish(self, mut outcome: Outcome) {
        // Overlapping reads share bytes: a batch cannot move more than its hull.
        let hull = self.handed.batch().len;
        outcome.bytes_done = outcome.bytes_done.min(hull);
        if outcome.started == Nanos::ZERO {
            outcome.started = Nanos(self.handed.batch().handed_ns);
        }
        if outcome.finished == Nanos::ZERO {
            outcome.finished = now();
        }
        self.ticket.complete(outcome);
    }
}
