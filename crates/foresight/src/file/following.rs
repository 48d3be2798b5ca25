//! A file's reads beside those of an earlier run.

use std::ops::Range;
use std::sync::Arc;

use super::{Basis, FileStreams};
use crate::earlier::{Follower, Foretold};
use crate::predictor::{Prediction, Shared};

/// The reads of an earlier run that a file's are compared with.
#[derive(Debug, Default)]
pub(super) struct Following {
    follower: Option<Box<Follower>>,
    /// Of which exchange it is.
    exchange: u32,
    /// Of what it predicts; 0: nothing yet.
    pub(super) stream: u32,
    /// The file's reads are those of the run at present.
    pub(super) agrees: bool,
}

impl FileStreams {
    /// Whether the file's reads are those of an earlier run; `is_again`: this one was read lately.
    pub(super) fn follow(
        &mut self,
        shared: &mut Shared,
        file: u64,
        extent: &Range<u64>,
        (at_ns, is_again): (u64, bool),
    ) -> bool {
        if self.following.exchange != shared.earlier.1 {
            let reads = shared.earlier.0.as_ref().and_then(|earlier| earlier.file(file));
            let follower = reads.map(|reads| Box::new(Follower::new(Arc::clone(reads))));
            self.following = Following { follower, exchange: shared.earlier.1, ..Following::default() };
        }
        let trusted = shared.trusts_followers();
        let Some(follower) = &mut self.following.follower else { return false };
        let agrees = follower.read(extent, (at_ns, is_again), trusted);
        if agrees != self.following.agrees {
            self.following.agrees = agrees;
            shared.followed = if agrees { shared.followed + 1 } else { shared.followed - 1 };
            if !agrees {
                // The rest will not be read either.
                let stream = self.following.stream;
                self.outstanding.of(stream).iter().for_each(|extent| self.waste(shared, stream, extent));
            }
        }
        if agrees && self.following.stream == 0 {
            let stream = self.new_stream();
            self.following.stream = stream;
            if let Some(ledger) = self.ledgers.get_mut(&stream) {
                ledger.window_bytes = shared.limits.stream_bytes;
            }
        }
        if let Some(ledger) = self.ledgers.get_mut(&self.following.stream) {
            ledger.account.demanded(extent.end - extent.start);
            ledger.request(extent.end - extent.start, at_ns);
            if trusted && agrees {
                // The more is known, the less a device has to seek.
                ledger.window_bytes = shared.limits.budget_bytes;
            }
        }
        agrees
    }

    /// Predicts what the earlier run read next.
    pub(super) fn foretell(&mut self, shared: &mut Shared, file: u64, at_ns: u64, predictions: &mut Vec<Prediction>) {
        let stream = self.following.stream;
        let Some(ledger) = self.ledgers.get(&stream).filter(|ledger| ledger.account.pays()) else { return };
        let part = shared.followers_part();
        let room = part.saturating_sub(ledger.outstanding_bytes);
        // What is read along and comes later leaves half of it for what comes next.
        let gaps = (part / 2).saturating_sub(ledger.outstanding_bytes);
        // As for runs: where there is too little room for all, long pieces beat short ones.
        let (window, left) = match ledger.window_bytes {
            wanted if wanted <= part => (wanted, wanted / 2),
            _ => (part, 0),
        };
        let Some(follower) = &mut self.following.follower else { return };
        let since_ns = if follower.repeats() { u64::MAX } else { 0 };
        let next = follower.next((window, left), room, gaps);
        for Foretold { extent, late_ns } in next {
            let end = extent.end;
            let by = Basis { file, stream, since_ns, late_ns: Some(late_ns) };
            let to = self.predict(shared, by, extent, at_ns, predictions);
            if to < end
                && let Some(follower) = &mut self.following.follower
            {
                follower.not_predicted(&(to..end));
            }
        }
    }

    /// What an earlier run foretold is dropped, without a judgement.
    pub(crate) fn forget_earlier(&mut self, shared: &mut Shared) {
        let Following { stream, agrees, .. } = std::mem::take(&mut self.following);
        shared.followed -= usize::from(agrees);
        self.outstanding.of(stream).iter().for_each(|extent| self.drop_predictions(shared, extent));
        self.ledgers.remove(&stream);
    }

    /// Whether an extent that an earlier run foretold is not late after all, since the run is slower than it was at first.
    pub(super) fn is_early(&mut self, stream: u32, extent: &Range<u64>, at_ns: u64) -> bool {
        let follower = self.following.follower.as_ref().filter(|_| stream == self.following.stream);
        let late_ns = follower.map_or(0, |follower| follower.late_again_ns(extent));
        if late_ns <= at_ns {
            return false;
        }
        self.outstanding.postpone(extent.start, late_ns);
        true
    }
}
