//! What will be asked next.
//!
//! Prediction is one part with several users: a policy waits for a predicted neighbour, a data server reads a predicted
//! extent ahead, guided I/O hints it. Everything here is a pure function of its arguments and its own state: no thread,
//! clock, socket or file, and no knowledge of who asks. Instants (`_ns`) are on whatever clock the caller keeps.
//!
//! - [`Predictor`]: the streams of many files, each read by many clients: what a data server sees. Each stream has an
//!   [`Account`] of what its predictions gained, which stops it where it does not pay. Phases of I/O are learnt too: what is
//!   read ahead of a program that pauses is waste only when its next phase has passed.
//! - [`EarlierReads`]: the reads of an earlier run, which a predictor follows while the present ones agree with them.
//! - [`Hints`]: what clients themselves say that they will read.
//! - [`ReadingAhead`]: what a data server makes of its predictions: which it acts on, and when it sleeps.
//! - [`Detector`]: strides of one reader in one file; its [`Forecast`] says which bytes come next.
//! - [`ReadingOrder`]: a file whose extents are read in an order that a recorded run has shown.
//! - [`PredictedQueues`]: the requests of a recorded run as a scheduler will queue them, and their [`Aggregations`];
//!   [`Triggers`] say what each of them followed.
//! - [`Shape`]: how files of one kind are read, whatever their size, learnt from several [`Sample`]s.
//! - [`Tracks`]: a file whose own index tells which extents belong together and in which order.
//! - [`Run`]: a recorded run; [`replay()`] replays it against any model of storage; [`Pattern`] describes how it reads one
//!   file.

mod account;
mod detector;
mod earlier;
mod file;
mod forecast;
mod hints;
mod majority;
mod outstanding;
mod pattern;
mod phases;
mod predicted;
mod predictor;
mod reading_ahead;
mod reading_order;
mod replay;
mod run;
mod shape;
mod stream;
mod tracks;
mod triggers;

pub use account::Account;
pub use detector::{Detector, STREAMS_MAX, Seen};
pub use earlier::EarlierReads;
pub use forecast::Forecast;
pub use hints::{HINT_PIECE_BYTES, HintTotals, Hints};
pub use pattern::{Kind, Part, Pattern, Phase};
pub use predicted::{Aggregations, Group, GroupLimits, PredictedId, PredictedQueues, Recorded, part_key};
pub use predictor::{Limits, Prediction, Predictor, Source, Totals};
pub use reading_ahead::{ALONE_MAX, ReadingAhead, is_there};
pub use reading_order::ReadingOrder;
pub use replay::{Elapsed, ReadEnd, Storage, replay};
pub use run::{Access, Reader, RecordedRead, Run, Thread};
pub use shape::{
    Anchor, PREDICTED_MAX, Repeat, Sample, Score, Series, Shape, ShapePiece, ShapeStep, held_out, of_others,
};
pub use tracks::{EXTENTS_MAX, NextOnTrack, Tracks};
pub use triggers::{Trigger, Triggers};

use std::ops::Range;

/// A page of the page cache, bytes.
pub const PAGE_BYTES: u64 = 4096;

/// The whole pages that a range touches.
pub fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE_BYTES * PAGE_BYTES..range.end.saturating_add(PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES
}
