//! A batch on the modelled device: the model tells when it is done, the store does the work meanwhile; whichever
//! of the two is last answers.
//!
//! The work is done beside the model's time, not after it, so that an answer leaves as soon as the modelled
//! device is done. Nobody can tell: conflicting requests wait until the batch is completed.

use std::io;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_engine::Work;
use impresario_store::Timing;

use super::Item;
use super::disk::Done;

/// A batch with what came of it.
pub(super) type Performed = (Work<Item>, io::Result<Done>);

/// Where the work and the model's time meet.
#[derive(Default)]
pub(super) struct Meeting(Mutex<(Option<Performed>, Option<Timing>)>);

impl Meeting {
    pub(super) fn new() -> Arc<Meeting> {
        Arc::default()
    }

    /// The work is done; both come back if the time was over already.
    pub(super) fn performed(&self, performed: Performed) -> Option<(Performed, Timing)> {
        let mut met = self.0.lock();
        match met.1.take() {
            Some(timing) => Some((performed, timing)),
            None => {
                met.0 = Some(performed);
                None
            }
        }
    }

    /// The modelled time is over; both come back if the work was done already.
    pub(super) fn timed(&self, timing: Timing) -> Option<(Performed, Timing)> {
        let mut met = self.0.lock();
        match met.0.take() {
            Some(performed) => Some((performed, timing)),
            None => {
                met.1 = Some(timing);
                None
            }
        }
    }
}
