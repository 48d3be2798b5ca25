//! Round robin with quanta: rings of queues that any queue can leave in constant time.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

/// One ring.
#[derive(Clone, Copy)]
struct Ring {
    /// The queue whose turn it is.
    front: u32,
    /// The part of its quantum that it has spent.
    spent: u64,
}

/// Rings over numbered queues; a queue is in at most one ring.
pub(in crate::policy) struct Rings {
    links: Vec<Link>,
    rings: Vec<Ring>,
}

impl Rings {
    /// `rings` empty rings.
    pub fn new(rings: usize) -> Rings {
        Rings { links: Vec::new(), rings: vec![Ring { front: NONE, spent: 0 }; rings] }
    }

    /// The queue whose turn it is.
    pub fn turn(&self, ring: usize) -> Option<u32> {
        self.turn_and_spent(ring).map(|t| t.0)
    }

    /// The queue whose turn it is, and the part of its quantum that it has spent.
    pub fn turn_and_spent(&self, ring: usize) -> Option<(u32, u64)> {
        let r = self.rings[ring];
        (r.front != NONE).then_some((r.front, r.spent))
    }

    /// Adds a queue at the end.
    pub fn join(&mut self, ring: usize, queue: u32) {
        if self.links.len() <= queue as usize {
            self.links.resize(queue as usize + 1, Link { before: NONE, after: NONE });
        }
        let front = self.rings[ring].front;
        if front == NONE {
            self.links[queue as usize] = Link { before: queue, after: queue };
            self.rings[ring] = Ring { front: queue, spent: 0 };
            return;
        }
        let last = self.links[front as usize].before;
        self.links[queue as usize] = Link { before: last, after: front };
        self.links[last as usize].after = queue;
        self.links[front as usize].before = queue;
    }

    /// Removes a queue, which ends its turn.
    pub fn leave(&mut self, ring: usize, queue: u32) {
        let Link { before, after } = self.links[queue as usize];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        let r = &mut self.rings[ring];
        if r.front == queue {
            *r = Ring { front: if after == queue { NONE } else { after }, spent: 0 };
        }
    }

    /// The queue whose turn it is spent `amount`; its turn ends once the quantum is used up.
    pub fn spend(&mut self, ring: usize, amount: u64, quantum: u64) {
        let r = &mut self.rings[ring];
        r.spent = r.spent.saturating_add(amount);
        if r.spent >= quantum && r.front != NONE {
            *r = Ring { front: self.links[r.front as usize].after, spent: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_by_quantum_and_leaving() {
        let mut rings = Rings::new(2);
        for queue in 0..3 {
            rings.join(1, queue);
        }
        assert_eq!(rings.turn(0), None);
        assert_eq!(rings.turn_and_spent(1), Some((0, 0)));
        rings.spend(1, 2, 4);
        assert_eq!(rings.turn_and_spent(1), Some((0, 2)));
        rings.spend(1, 2, 4);
        assert_eq!(rings.turn_and_spent(1), Some((1, 0)));
        rings.leave(1, 2);
        rings.spend(1, 4, 4);
        assert_eq!(rings.turn_and_spent(1), Some((0, 0)));
        rings.spend(1, 1, 4);
        rings.leave(1, 0);
        assert_eq!(rings.turn_and_spent(1), Some((1, 0)), "the next has a whole quantum");
        rings.leave(1, 1);
        assert_eq!(rings.turn(1), None);
    }
}
