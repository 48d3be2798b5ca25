//! How completions correct a cost model while it is in use.
//!
//! For each operation and size class, a running mean of the ratio of measured to predicted time is kept, in which an
//! observation weighs 1/128 (more at the start). The corrected TTP is the model's TTP times the ratio.
//!
//! - **What is measured** is the time for which a batch had its lane to itself ([`Lane::end`](crate::policy::Lane)): its
//!   end minus its start, or minus the previous end of any batch on the lane if that is later. A batch is thus not charged
//!   for waiting below the scheduler, and on a device that serves many at once the times add up to its busy time: device
//!   time.
//! - **Outliers**: a measurement counts as at most 8 times the current prediction, so at weight 1/128 a single one
//!   moves the ratio by less than 6 %, while a device that has become slower is still followed. (A lower limit would be
//!   wrong for devices that serve many at once: the first completion is charged for all.)
//! - **Bounds**: ratios stay between 1/8 and 8. A model that is further off needs calibration.
//! - Failed or short batches, and drivers that report no times (end not after start), are ignored.
//! - A size class without observations uses its operation's overall ratio.
//! - Policies see a changed model only when a ratio has moved by more than 2 %, and at most every 16th observation: TTP
//!   stays stable while nothing changes, and costs a table look-up.

use crate::cost::{CostCurve, CostModel, OpCost};
use crate::types::{Nanos, Op};

/// Least and greatest ratio.
const RATIO: (f64, f64) = (1.0 / 8.0, 8.0);
/// A measurement counts as at most this multiple of the current prediction.
const CLIP: f64 = 8.0;
/// The weight of an observation never falls below this.
const WEIGHT_MIN: f64 = 1.0 / 128.0;
/// The initial model counts as this many observations.
const PRIOR: f64 = 8.0;
/// Observations between two checks whether to publish a new model.
const PUBLISH_EVERY: u32 = 16;
/// A ratio that moved by more than this is published.
const MOVED: f64 = 0.02;
/// Size classes by factors of four: below 16 KiB, 64 KiB, … 16 MiB, and above.
const CLASSES: usize = 7;

fn class_of(len_bytes: u64) -> usize {
    let log2 = 63 - (len_bytes | 1).leading_zeros() as usize;
    (log2.saturating_sub(12) / 2).min(CLASSES - 1)
}

/// The smallest size of a class, bytes.
fn class_from_bytes(class: usize) -> u64 {
    if class == 0 { 0 } else { 4096 << (2 * class) }
}

/// A running mean of measured/predicted.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Ratio {
    value: f64,
    observed: u64,
}

impl Ratio {
    const NONE: Ratio = Ratio { value: 1.0, observed: 0 };

    fn observe(&mut self, ratio: f64) {
        let weight = (1.0 / (self.observed as f64 + PRIOR)).max(WEIGHT_MIN);
        let clipped = ratio.min(CLIP * self.value);
        self.value = (self.value + weight * (clipped - self.value)).clamp(RATIO.0, RATIO.1);
        self.observed += 1;
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct OpRatios {
    all: Ratio,
    classes: [Ratio; CLASSES],
}

impl OpRatios {
    const NONE: OpRatios = OpRatios { all: Ratio::NONE, classes: [Ratio::NONE; CLASSES] };

    fn observe(&mut self, class: usize, ratio: f64) {
        let class = &mut self.classes[class];
        if class.observed == 0 {
            class.value = self.all.value; // other sizes are a better start than the bare model
        }
        class.observe(ratio);
        self.all.observe(ratio);
    }

    fn of(&self, class: usize) -> f64 {
        let class = &self.classes[class];
        if class.observed > 0 { class.value } else { self.all.value }
    }

    fn ratios(&self) -> [f64; CLASSES] {
        std::array::from_fn(|class| self.of(class))
    }
}

/// Corrects a model by measurements; see the module.
#[derive(Clone, Debug)]
pub struct Corrector {
    /// The uncorrected model.
    base: CostModel,
    read: OpRatios,
    write: OpRatios,
    /// The ratios of the published model.
    published: [[f64; CLASSES]; 2],
    since_publish: u32,
}

impl Corrector {
    /// Corrects `base`; does nothing if the model is not to be corrected.
    pub fn new(base: CostModel) -> Corrector {
        let none = OpRatios::NONE;
        Corrector { base, read: none, write: none, published: [none.ratios(); 2], since_publish: 0 }
    }

    /// Records a batch of `len_bytes` that was served in full. Returns the new model if it changed.
    pub fn observe(&mut self, op: Op, len_bytes: u64, device_time: Nanos) -> Option<CostModel> {
        if !self.base.correct || !op.is_data() || len_bytes == 0 {
            return None;
        }
        let ratio = device_time.0 as f64 / self.base.ttp(op, len_bytes).0 as f64;
        let ratios = if op == Op::Read { &mut self.read } else { &mut self.write };
        ratios.observe(class_of(len_bytes), ratio);
        self.since_publish += 1;
        if self.since_publish < PUBLISH_EVERY {
            return None;
        }
        self.since_publish = 0;
        self.publish()
    }

    fn publish(&mut self) -> Option<CostModel> {
        let now = [self.read.ratios(), self.write.ratios()];
        let moved = now.iter().flatten().zip(self.published.iter().flatten()).any(|(n, p)| (n / p - 1.0).abs() > MOVED);
        if !moved {
            return None;
        }
        self.published = now;
        let [read, write] = now;
        Some(CostModel {
            read: scaled(&self.base.read, &read),
            write: scaled(&self.base.write, &write),
            ..self.base.clone()
        })
    }

    /// The model in use and its correction.
    pub fn status(&self) -> CostStatus {
        let op = |base: &OpCost, ratios: &OpRatios, seen: &[f64; CLASSES]| OpCostStatus {
            ttp_ns: [4096, 65_536, 1 << 20]
                .map(|size| (size, (base.ttp(size).0 as f64 * seen[class_of(size)]) as u64))
                .into(),
            ratio: ratios.all.value,
            observed: ratios.all.observed,
            classes: (0..CLASSES)
                .filter(|class| ratios.classes[*class].observed > 0)
                .map(|class| ClassStatus {
                    from_bytes: class_from_bytes(class),
                    ratio: ratios.classes[class].value,
                    observed: ratios.classes[class].observed,
                })
                .collect(),
        };
        CostStatus {
            source: self.base.source.to_string(),
            correct: self.base.correct,
            read: op(&self.base.read, &self.read, &self.published[0]),
            write: op(&self.base.write, &self.write, &self.published[1]),
        }
    }
}

/// The model's curve times the ratios.
fn scaled(base: &OpCost, ratios: &[f64; CLASSES]) -> OpCost {
    let sizes: Vec<u64> = match base {
        OpCost::Curve(curve) => curve.sizes().collect(),
        OpCost::Linear(_) => (12..=25).map(|log2| 1 << log2).collect(),
    };
    let point = |size: u64| {
        let ns = base.ttp(size).0 as f64 * ratios[class_of(size)];
        (size, Nanos((ns as u64).max(1)))
    };
    let points: Vec<_> = sizes.into_iter().map(point).collect();
    // Sizes come from a curve or the list above and no time is zero, so this cannot fail; if it did, the model would
    // stay.
    CostCurve::through(&points).map_or_else(|_| base.clone(), OpCost::Curve)
}

/// The cost model in force, and how far measured times are from it.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct CostStatus {
    /// Where the model comes from.
    pub source: String,
    /// Whether measured times correct it.
    pub correct: bool,
    /// Reads.
    pub read: OpCostStatus,
    /// Writes.
    pub write: OpCostStatus,
}

/// The cost of one operation.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct OpCostStatus {
    /// (size in bytes, TTP in nanoseconds) as policies see it, including the correction.
    pub ttp_ns: Vec<(u64, u64)>,
    /// Measured over predicted, over all sizes (1: as predicted, or no measurement).
    pub ratio: f64,
    /// Batches measured.
    pub observed: u64,
    /// The same for each size class with measurements.
    pub classes: Vec<ClassStatus>,
}

/// The correction of one size class.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct ClassStatus {
    /// Its smallest size, bytes; the next class begins at four times that (the first at 16 KiB).
    pub from_bytes: u64,
    /// Measured over predicted.
    pub ratio: f64,
    /// Batches measured.
    pub observed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::LinearCost;

    fn model() -> CostModel {
        let line = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 8_000 };
        CostModel::new(line, line).corrected(true)
    }

    /// Serves batches, each taking `factor` times the model's time; returns the final model.
    fn serve(c: &mut Corrector, model: CostModel, n: u32, (op, len): (Op, u64), factor: f64) -> CostModel {
        let mut current = model.clone();
        for _ in 0..n {
            let device_time = Nanos((c.base.ttp(op, len).0 as f64 * factor) as u64);
            current = c.observe(op, len, device_time).unwrap_or(current);
        }
        current
    }

    #[test]
    fn converges_to_a_device_three_times_slower() {
        let (mut c, m) = (Corrector::new(model()), model());
        let now = serve(&mut c, m.clone(), 800, (Op::Read, 65_536), 3.0);
        for len in [4096, 65_536, 1 << 20, 64 << 20] {
            let factor = now.ttp(Op::Read, len).0 as f64 / m.ttp(Op::Read, len).0 as f64;
            assert!((factor - 3.0).abs() < 0.1, "{len}: {factor}");
        }
        assert_eq!(now.ttp(Op::Write, 65_536).0 / 1000, m.ttp(Op::Write, 65_536).0 / 1000, "writes were not seen");
        assert_eq!(c.status().read.observed, 800);
        assert_eq!(c.status().read.classes.len(), 1);
        assert_eq!(c.status().read.classes[0].from_bytes, 65_536);
    }

    #[test]
    fn size_classes_have_separate_ratios() {
        let (mut c, m) = (Corrector::new(model()), model());
        let mut now = m.clone();
        for _ in 0..800 {
            now = serve(&mut c, now, 1, (Op::Write, 4096), 0.5);
            now = serve(&mut c, now, 1, (Op::Write, 4 << 20), 2.0);
        }
        let factor = |len| now.ttp(Op::Write, len).0 as f64 / m.ttp(Op::Write, len).0 as f64;
        assert!((factor(4096) - 0.5).abs() < 0.05 && (factor(4 << 20) - 2.0).abs() < 0.1);
        // A class without observations uses the overall ratio.
        let all = c.status().write.ratio;
        assert!((factor(65_536) - all).abs() < 0.1 && all > 0.6 && all < 1.9, "{all} {}", factor(65_536));
    }

    #[test]
    fn one_outlier_moves_the_ratio_by_less_than_six_percent() {
        let (mut c, m) = (Corrector::new(model()), model());
        serve(&mut c, m.clone(), 200, (Op::Read, 4096), 1.0);
        let before = c.status().read.ratio;
        serve(&mut c, m.clone(), 1, (Op::Read, 4096), 1e6);
        let after = c.status().read.ratio;
        assert!(after / before < 1.06, "{before} {after}");
        serve(&mut c, m, 1, (Op::Read, 4096), 1e-6);
        assert!(c.status().read.ratio / after > 0.97);
    }

    #[test]
    fn ratios_stay_within_bounds() {
        let (mut c, m) = (Corrector::new(model()), model());
        let slow = serve(&mut c, m.clone(), 2000, (Op::Read, 4096), 1e6);
        assert_eq!(c.status().read.ratio, 8.0);
        assert!(slow.ttp(Op::Read, 4096).0 <= 8 * m.ttp(Op::Read, 4096).0);
        let fast = serve(&mut c, m.clone(), 2000, (Op::Read, 4096), 1e-7);
        assert_eq!(c.status().read.ratio, 1.0 / 8.0);
        assert!(fast.ttp(Op::Read, 4096).0 > m.ttp(Op::Read, 4096).0 / 10);
    }

    #[test]
    fn ignores_what_moves_no_data_and_everything_when_off() {
        let mut c = Corrector::new(model());
        for _ in 0..100 {
            assert_eq!(c.observe(Op::Read, 0, Nanos(1)), None);
            assert_eq!(c.observe(Op::Sync, 4096, Nanos(1)), None);
        }
        assert_eq!(c.status().read.observed, 0);
        let mut off = Corrector::new(model().corrected(false));
        for _ in 0..100 {
            assert_eq!(off.observe(Op::Read, 4096, Nanos::from_millis(500)), None);
        }
        assert_eq!((off.status().read.ratio, off.status().read.observed), (1.0, 0));
    }

    /// `cargo test --release -p impresario-sched -- --ignored observing_costs --nocapture` prints it.
    #[test]
    #[ignore = "a measurement"]
    fn observing_costs_a_few_nanoseconds() {
        for (name, model) in [("on", model()), ("off", model().corrected(false))] {
            let mut c = Corrector::new(model);
            let (start, mut published) = (std::time::Instant::now(), 0);
            for i in 0..20_000_000_u64 {
                let device_time = Nanos(5_000_000 + (i.wrapping_mul(0x9e37_79b9) & 0xff_ffff));
                published += u32::from(c.observe(Op::Read, 4096 << (i & 7), device_time).is_some());
            }
            let ns = start.elapsed().as_secs_f64() * 1e9 / 2e7;
            println!("{name}: {ns:.1} ns, {published} new models");
        }
    }

    #[test]
    fn sizes_fall_into_classes() {
        for (len, class) in
            [(0, 0), (1, 0), (16_383, 0), (16_384, 1), (65_536, 2), (1 << 20, 4), (16 << 20, 6), (u64::MAX, 6)]
        {
            assert_eq!(class_of(len), class, "{len}");
        }
        for class in 1..CLASSES {
            assert_eq!((class_of(class_from_bytes(class)), class_of(class_from_bytes(class) - 1)), (class, class - 1));
        }
    }
}
