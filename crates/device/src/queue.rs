//! The order in which a device serves outstanding requests: by arrival or as an elevator.

use std::collections::{BTreeMap, VecDeque};

use crate::params::{DeviceParams, Order};
use crate::{Io, Op};

/// Outstanding requests below the scheduler, each with a `T` of the driver's.
///
/// In arrival order they are served one at a time and never merged. The elevator is C-SCAN over the `elevator_depth`
/// oldest: always the first at or after the head, then from the lowest address; contiguous requests of one operation
/// become one transfer.
///
/// The elevator may pass over a request while newer ones are between the head and it, at most until the head reaches
/// the end of the disk, since the head only moves forward.
#[derive(Clone, Debug)]
pub struct DeviceQueue<T> {
    order: Order,
    depth: usize,
    merge_bytes: u64,
    /// The elevator's candidates, by address and then age; empty in arrival order.
    window: BTreeMap<(u64, u64), Entry<T>>,
    /// The others, oldest first.
    waiting: VecDeque<(u64, Entry<T>)>,
    next_age: u64,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    io: Io,
    item: T,
}

/// One transfer that the device serves next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Taken<T> {
    /// The transfer.
    pub io: Io,
    /// The merged requests, by ascending address; never empty.
    pub parts: Vec<(Io, T)>,
}

impl<T> DeviceQueue<T> {
    /// An empty queue.
    pub fn new(params: &DeviceParams) -> DeviceQueue<T> {
        DeviceQueue {
            order: params.order,
            depth: params.elevator_depth as usize,
            merge_bytes: params.elevator_merge_bytes,
            window: BTreeMap::new(),
            waiting: VecDeque::new(),
            next_age: 0,
        }
    }

    /// Requests outstanding.
    pub fn len(&self) -> usize {
        self.window.len() + self.waiting.len()
    }

    /// True if nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The current order.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Changes the order of outstanding and later requests.
    pub fn set_order(&mut self, order: Order) {
        self.order = order;
        // Return everything to the order of age; the window refills from there.
        let window = std::mem::take(&mut self.window);
        self.waiting.extend(window.into_iter().map(|((_, age), entry)| (age, entry)));
        self.waiting.make_contiguous().sort_unstable_by_key(|(age, _)| *age);
        self.refill();
    }

    /// Adds a request.
    pub fn push(&mut self, io: Io, item: T) {
        let age = self.next_age;
        self.next_age += 1;
        self.waiting.push_back((age, Entry { io, item }));
        self.refill();
    }

    /// Takes the next transfer for a head at `head_address`.
    pub fn pop(&mut self, head_address: u64) -> Option<Taken<T>> {
        match self.order {
            Order::Arrival => {
                let (_, Entry { io, item }) = self.waiting.pop_front()?;
                Some(Taken { io, parts: vec![(io, item)] })
            }
            Order::Elevator => {
                let ahead = self.window.range((head_address, 0)..).next();
                let (&key, _) = ahead.or_else(|| self.window.iter().next())?;
                let taken = self.take_run(key);
                self.refill();
                taken
            }
        }
    }

    /// Takes the request at `key` and the neighbours that follow it.
    fn take_run(&mut self, key: (u64, u64)) -> Option<Taken<T>> {
        let Entry { io: mut whole, item } = self.window.remove(&key)?;
        let mut parts = vec![(whole, item)];
        while let Some(key) = self.neighbour(whole) {
            let Some(Entry { io, item }) = self.window.remove(&key) else { break };
            whole.len += io.len;
            parts.push((io, item));
        }
        Some(Taken { io: whole, parts })
    }

    /// The oldest mergeable request of the same operation that begins where `io` ends.
    fn neighbour(&self, io: Io) -> Option<(u64, u64)> {
        let at_end = self.window.range((io.end(), 0)..=(io.end(), u64::MAX));
        let fits = |next: &Io| next.op == io.op && io.len.saturating_add(next.len) <= self.merge_bytes;
        at_end.filter(|(_, next)| fits(&next.io)).map(|(&key, _)| key).next()
    }

    fn refill(&mut self) {
        while self.order == Order::Elevator && self.window.len() < self.depth {
            let Some((age, entry)) = self.waiting.pop_front() else { return };
            self.window.insert((entry.io.address, age), entry);
        }
    }
}

impl Io {
    /// A read.
    pub const fn read(address: u64, len: u64) -> Io {
        Io { op: Op::Read, address, len }
    }

    /// A write.
    pub const fn write(address: u64, len: u64) -> Io {
        Io { op: Op::Write, address, len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn queue(order: Order) -> DeviceQueue<u32> {
        DeviceQueue::new(&DeviceParams { order, ..DeviceParams::default() })
    }

    fn names(taken: Option<Taken<u32>>) -> Vec<u32> {
        taken.map(|t| t.parts.iter().map(|(_, name)| *name).collect()).unwrap_or_default()
    }

    #[test]
    fn arrival_order_neither_sorts_nor_merges() {
        let mut q = queue(Order::Arrival);
        q.push(Io::read(8192, 4096), 0);
        q.push(Io::read(0, 4096), 1);
        q.push(Io::read(4096, 4096), 2);
        assert_eq!([names(q.pop(0)), names(q.pop(0)), names(q.pop(0))], [vec![0], vec![1], vec![2]]);
        assert_eq!(q.pop(0), None);
    }

    #[test]
    fn the_elevator_ascends_merges_neighbours_and_wraps() {
        let mut q = queue(Order::Elevator);
        q.push(Io::read(1_000, 100), 0);
        q.push(Io::read(9_100, 100), 1);
        q.push(Io::read(9_000, 100), 2);
        q.push(Io::write(9_200, 100), 3);
        q.push(Io::read(9_200, 100), 4);
        let first = q.pop(5_000).unwrap();
        assert_eq!(first.io, Io::read(9_000, 300));
        assert_eq!(first.parts.iter().map(|p| p.1).collect::<Vec<_>>(), [2, 1, 4]);
        assert_eq!(names(q.pop(9_300)), [0], "nothing above: from the lowest again");
        assert_eq!(names(q.pop(1_100)), [3], "a write does not join reads");
        assert!(q.is_empty());
    }

    #[test]
    fn merging_stops_at_its_limit() {
        let mut q = queue(Order::Elevator);
        for i in 0..8 {
            q.push(Io::write(u64::from(i) << 18, 1 << 18), i);
        }
        assert_eq!(names(q.pop(0)), [0, 1, 2, 3], "1 MiB");
        assert_eq!(names(q.pop(1 << 20)), [4, 5, 6, 7]);
    }

    #[test]
    fn the_elevator_sees_only_the_oldest() {
        let mut q = queue(Order::Elevator);
        for i in 0..33 {
            q.push(Io::read(1_000_000 - u64::from(i) * 10_000, 512), i);
        }
        assert_eq!(names(q.pop(0)), [31], "the 33rd would be nearer but is not seen yet");
        assert_eq!(names(q.pop(0)), [32]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_repeated(
            steps in prop::collection::vec((0u8..4, 0u64..64, 1u64..4, any::<bool>()), 1..300),
            depth in 1u32..40,
        ) {
            let params = DeviceParams { elevator_depth: depth, elevator_merge_bytes: 8192, ..DeviceParams::default() };
            let mut q = DeviceQueue::new(&params);
            let (mut pushed, mut popped) = (Vec::new(), Vec::new());
            let drain = |q: &mut DeviceQueue<usize>, popped: &mut Vec<(Io, usize)>, head: u64| {
                if let Some(taken) = q.pop(head) {
                    prop_assert_eq!(taken.io.address, taken.parts[0].0.address);
                    prop_assert_eq!(taken.io.len, taken.parts.iter().map(|p| p.0.len).sum::<u64>());
                    prop_assert!(taken.parts.windows(2).all(|w| w[0].0.end() == w[1].0.address));
                    prop_assert!(taken.parts.iter().all(|p| p.0.op == taken.io.op));
                    prop_assert!(taken.parts.len() == 1 || taken.io.len <= 8192);
                    popped.extend(taken.parts);
                }
                Ok(())
            };
            for (what, place, len, write) in steps {
                let op = if write { Op::Write } else { Op::Read };
                match what {
                    0 => drain(&mut q, &mut popped, place * 1024)?,
                    1 => q.set_order(if write { Order::Elevator } else { Order::Arrival }),
                    _ => {
                        let io = Io { op, address: place * 1024, len: len * 1024 };
                        q.push(io, pushed.len());
                        pushed.push((io, pushed.len()));
                    }
                }
                prop_assert_eq!(q.len(), pushed.len() - popped.len());
            }
            while !q.is_empty() {
                drain(&mut q, &mut popped, 0)?;
            }
            popped.sort_by_key(|p| p.1);
            prop_assert_eq!(pushed, popped);
        }

        #[test]
        fn arrival_order_is_the_order_of_arrival_after_any_switch(places in prop::collection::vec(0u64..1000, 1..80)) {
            let mut q = queue(Order::Arrival);
            for (i, place) in places.iter().enumerate() {
                q.push(Io::read(place * 4096, 4096), i as u32);
                q.set_order(if i % 3 == 0 { Order::Elevator } else { Order::Arrival });
            }
            q.set_order(Order::Arrival);
            let served: Vec<u32> = std::iter::from_fn(|| q.pop(0)).flat_map(|t| names(Some(t))).collect();
            prop_assert_eq!(served, (0..places.len() as u32).collect::<Vec<_>>());
        }
    }
}
