//! What an I/O node has forwarded, and which data servers hang: from those nothing has come for a while, though requests
//! wait for them.
//!
//! A server that is slow answers something all the time, and its requests keep their places. Requests that need a
//! server that hangs hold none, so that requests for other servers go on; a bounded number of them is under way at
//! once. A server hangs until it answers.
//!
//! Nor do requests hold one that a server withholds by a limit, so that those go on that are not limited. It says so, and hence
//! does not hang.

use std::sync::Arc;

use impresario_base::slab::{Key, Slab};
use impresario_client::Watch;
use impresario_node::Party;
pub(super) use impresario_node::members::HANGS_AFTER as SILENCE;
use impresario_sched::{Nanos, Request};
use smallvec::SmallVec;

use super::{Answering, Item};

/// A server that has said nothing for so long is worth a word: slow ones hang now and then, until their next answer.
const TOLD_AFTER: Nanos = Nanos(1_000_000_000);

/// The lanes of the data servers that something needs, each once or more.
pub(super) type Lanes = SmallVec<[u16; 4]>;

/// Adds the lanes that a request needs.
pub(super) fn add_lanes(lanes: &mut Lanes, request: &Request, item: &Item, split: bool) {
    let (striping, layout) = (&item.striping, &item.striping.layout);
    // Of a change that was cut each part needs one, of a barrier the last part all.
    if !request.op.is_data() && !matches!(item.answer, Answering::Part(..)) {
        return lanes.extend((0..layout.pcount).map(|k| striping.lane(layout.server_at(k))));
    }
    if split {
        return lanes.push(striping.lane(item.server));
    }
    // Beyond a stripe of each server there is none that was not named.
    let once = u64::from(layout.ssize_bytes) * u64::from(layout.pcount);
    let pieces = layout.pieces(request.extent.lane_offset, request.extent.len.min(once));
    lanes.extend(pieces.map(|piece| striping.lane(piece.server)));
}

/// For whom a request is forwarded, and what is heard of it.
pub(super) struct Whose {
    pub(super) party: Party,
    pub(super) watch: Arc<Watch>,
}

/// A request that was forwarded.
struct UnderWay {
    since: Nanos,
    whose: Whose,
    needs: Lanes,
    /// The lane of each batch of the scheduler that it is made of.
    batches: Lanes,
    is_withheld: bool,
    /// It holds no place: it is withheld, or needs a server that hangs.
    is_stuck: bool,
}

#[derive(Clone, Copy, Default)]
struct Server {
    /// When it last answered.
    answered: Nanos,
    hangs: bool,
    /// That it hangs was told.
    is_told: bool,
}

/// What is under way, and which servers hang.
pub(super) struct Hung {
    under_way: Slab<UnderWay>,
    /// By lane.
    servers: Vec<Server>,
    hanging: usize,
    stuck: usize,
}

impl Hung {
    pub(super) fn new(lanes: u16) -> Hung {
        let servers = vec![Server::default(); lanes.into()];
        Hung { under_way: Slab::default(), servers, hanging: 0, stuck: 0 }
    }

    /// Some server hangs.
    pub(super) fn any(&self) -> bool {
        self.hanging > 0
    }

    /// Requests under way that need a server that hangs, or that are withheld.
    pub(super) fn stuck(&self) -> usize {
        self.stuck
    }

    /// One of these servers hangs.
    pub(super) fn hangs(&self, needs: &Lanes) -> bool {
        self.any() && needs.iter().any(|lane| self.server(*lane).hangs)
    }

    /// Whether a request of these needs is sure to get stuck: one under way is that needs no other servers, or one of the same party
    /// is withheld. Any other may find that the servers that it needs answer.
    pub(super) fn is_hopeless(&self, needs: &Lanes, party: Party) -> bool {
        let hangs = self.hangs(needs);
        let mut under_way = self.under_way.iter().map(|(_, request)| request);
        under_way.any(|u| {
            let is_alike = if u.is_withheld { u.whose.party == party } else { hangs && u.is_stuck };
            is_alike && u.needs.iter().all(|lane| needs.contains(lane))
        })
    }

    /// The lanes of the servers that hang.
    pub(super) fn lanes(&self) -> impl Iterator<Item = u16> {
        (0u16..).zip(&self.servers).filter_map(|(lane, server)| server.hangs.then_some(lane))
    }

    fn server(&self, lane: u16) -> Server {
        self.servers.get(usize::from(lane)).copied().unwrap_or_default()
    }

    /// A request of these batches is forwarded.
    pub(super) fn begin(&mut self, at: Nanos, needs: Lanes, batches: Lanes, whose: Whose) -> Key {
        let is_stuck = self.hangs(&needs);
        self.stuck += usize::from(is_stuck);
        self.under_way.insert(UnderWay { since: at, whose, needs, batches, is_withheld: false, is_stuck })
    }

    /// It is done; `answered`: by the servers, not for want of them. True when requests that waited may go now.
    pub(super) fn end(&mut self, at: Nanos, key: Key, answered: bool) -> bool {
        let Some(ended) = self.under_way.remove(key) else { return false };
        self.stuck -= usize::from(ended.is_stuck);
        let mut healed = false;
        for lane in ended.needs.iter().filter(|_| answered) {
            let Some(server) = self.servers.get_mut(usize::from(*lane)) else { continue };
            (server.answered, server.is_told) = (at, false);
            healed |= std::mem::take(&mut server.hangs);
        }
        if healed {
            self.mark();
        }
        healed || ended.is_stuck
    }

    /// Finds the servers that hang. The lanes of those that have for so long that it is to be told, each once.
    pub(super) fn look(&mut self, at: Nanos) -> Lanes {
        let (mut more, mut told) = (self.look_for_withheld(at), Lanes::new());
        for request in self.under_way.iter().map(|(_, request)| request).filter(|request| !request.is_withheld) {
            for lane in &request.needs {
                let Some(server) = self.servers.get_mut(usize::from(*lane)) else { continue };
                let silent = at.since(request.since.max(server.answered));
                if !server.hangs && silent >= SILENCE {
                    (server.hangs, more) = (true, true);
                }
                if !server.is_told && silent >= TOLD_AFTER {
                    server.is_told = true;
                    told.push(*lane);
                }
            }
        }
        if more {
            self.mark();
        }
        told
    }

    /// Finds the requests that are withheld; whether they, or the servers that hang, are others than before.
    fn look_for_withheld(&mut self, at: Nanos) -> bool {
        let mut more = false;
        for index in 0..self.slots() {
            let Some(request) = self.under_way.at_mut(index) else { continue };
            let is_withheld = request.whose.watch.is_withheld();
            more |= std::mem::replace(&mut request.is_withheld, is_withheld) != is_withheld;
            // Of several servers it is not known which said so.
            if let [lane, others @ ..] = &*request.needs
                && is_withheld
                && others.iter().all(|other| other == lane)
                && let Some(server) = self.servers.get_mut(usize::from(*lane))
            {
                (server.answered, server.is_told) = (at, false);
                more |= std::mem::take(&mut server.hangs);
            }
        }
        more
    }

    /// The places of the table of what is under way.
    fn slots(&self) -> u32 {
        self.under_way.iter().map(|(key, _)| key.index + 1).max().unwrap_or(0)
    }

    /// Which servers hang, or which requests are withheld, has changed.
    fn mark(&mut self) {
        self.hanging = self.servers.iter().filter(|server| server.hangs).count();
        self.stuck = 0;
        for index in 0..self.slots() {
            let is_stuck = |request: &UnderWay| request.is_withheld || self.hangs(&request.needs);
            let is_stuck = self.under_way.at(index).is_some_and(is_stuck);
            if let Some(request) = self.under_way.at_mut(index) {
                request.is_stuck = is_stuck;
                self.stuck += usize::from(is_stuck);
            }
        }
    }

    /// Adds the batches that are stuck to the number of each lane.
    pub(super) fn count_batches(&self, counts: &mut [u32]) {
        for request in self.under_way.iter().map(|(_, request)| request).filter(|request| request.is_stuck) {
            for lane in &request.batches {
                if let Some(count) = counts.get_mut(usize::from(*lane)) {
                    *count += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    const MS: u64 = 1_000_000;

    fn whose(job: u64) -> Whose {
        Whose { party: (job, 0), watch: Arc::default() }
    }

    #[test]
    fn a_server_hangs_when_it_says_nothing_and_until_it_answers() {
        let mut hung = Hung::new(3);
        let at = |ms: u64| Nanos(ms * MS);
        let slow: Vec<_> = (0..3).map(|_| hung.begin(at(1000), smallvec![0], smallvec![0], whose(0))).collect();
        let silent = hung.begin(at(1000), smallvec![1], smallvec![1], whose(0));
        let both = hung.begin(at(1000), smallvec![0, 1], smallvec![0, 0], whose(0));
        assert!(hung.look(at(1090)).is_empty() && !hung.any());
        assert!(!hung.end(at(1090), slow[0], true));
        assert!(hung.look(at(1110)).is_empty() && hung.any(), "server 1 has said nothing for 110 ms");
        assert_eq!((hung.lanes().collect::<Vec<_>>(), hung.stuck()), (vec![1], 2));
        let mut counts = [0; 3];
        hung.count_batches(&mut counts);
        assert_eq!(counts, [2, 1, 0], "the batches of what is stuck");
        assert!(hung.is_hopeless(&smallvec![1, 2], (0, 0)) && !hung.is_hopeless(&smallvec![0, 2], (0, 0)));
        let later = hung.begin(at(1120), smallvec![1], smallvec![1], whose(0));
        assert_eq!(hung.stuck(), 3);
        assert!(hung.end(at(1130), later, false) && hung.any(), "given up, which is no answer");
        assert!(hung.end(at(1150), silent, true), "it goes on");
        assert_eq!((hung.any(), hung.stuck()), (false, 0));
        assert!(hung.look(at(1180)).is_empty() && !hung.any());
        assert!(hung.look(at(1200)).is_empty() && hung.any(), "server 0 is silent since 1090");
        let either = hung.begin(at(1210), smallvec![0, 2], smallvec![0], whose(0));
        assert!(hung.look(at(1400)).is_empty() && hung.lanes().eq([0, 1, 2]), "for all that is known");
        assert!(!hung.is_hopeless(&smallvec![2], (0, 0)), "it may be server 0 alone");
        for key in [slow[1], slow[2], both, either] {
            hung.end(at(1500), key, true);
        }
        assert!(hung.look(at(9000)).is_empty() && !hung.any(), "where nothing waits nothing hangs");
    }

    #[test]
    fn of_servers_that_hang_those_are_told_that_do_for_long() {
        let mut hung = Hung::new(2);
        let at = |ms: u64| Nanos(ms * MS);
        // One answers every 150 ms, and hangs in between.
        let (mut hangs, mut slow) = (0, hung.begin(at(0), smallvec![0], smallvec![0], whose(0)));
        for ms in (50..=60_000).step_by(50) {
            assert!(hung.look(at(ms)).is_empty(), "{ms}");
            hangs += usize::from(hung.any());
            if ms % 150 == 0 {
                assert!(hung.end(at(ms), slow, true));
                slow = hung.begin(at(ms), smallvec![0], smallvec![0], whose(0));
            }
        }
        assert!(hangs >= 400, "{hangs}");
        assert!(hung.look(at(60_990)).is_empty());
        assert_eq!(hung.look(at(61_010))[..], [0]);
        assert!(hung.look(at(70_000)).is_empty() && hung.any(), "once");
        hung.end(at(70_000), slow, true);
        hung.begin(at(70_000), smallvec![0, 1], smallvec![0], whose(0));
        assert_eq!(hung.look(at(71_000))[..], [0, 1], "and again when it has answered meanwhile");
    }
}
