//! The elements of a page's plots: round axis marks, curves of series, the picture of served accesses.

use impresario_sim::outcome::{ApplicationOutcome, Outcome, Served};

use crate::report::{Curve, Marks};
use crate::stats::mean;
use impresario_base::units::{show_bytes, show_seconds};

/// Longest name beside a plot, characters; longer ones are cut.
const NAME_CHARS: usize = 20;

/// Applications with a colour of their own; the others share the next.
const COLOURS: usize = 7;

/// Marks on an axis: parts of it, and their texts.
pub type Axis = Vec<(f64, String)>;

/// Round marks from 0 to `top`, and the end of the axis, which is at least `top`.
pub fn axis(top: f64, show: impl Fn(f64) -> String) -> (f64, Axis) {
    let top = if top.is_finite() && top > 0.0 { top } else { 1.0 };
    let rough = top / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough * 0.999).unwrap_or(top);
    let count = (top / step * 0.999_999).ceil().max(1.0);
    let end = step * count;
    let marks = (0..=count as usize).map(|i| (i as f64 / count, show(step * i as f64)));
    (end, marks.collect())
}

/// An axis of times with a round end.
pub fn time_axis(top_s: f64) -> (f64, Axis) {
    axis(top_s, |t| if t == 0.0 { "0".into() } else { show_seconds(t) })
}

/// A time axis that ends with the last event, with round marks.
pub fn time_line(end_s: f64) -> (f64, Axis) {
    let (round, marks) = time_axis(end_s);
    let end = if end_s.is_finite() && end_s > 0.0 { end_s } else { round };
    (end, marks.into_iter().map(|(part, text)| (part * round / end, text)).filter(|(part, _)| *part <= 1.0).collect())
}

/// An axis of bytes: round in powers of two.
pub fn byte_axis(top: f64, per: &str) -> (f64, Axis) {
    let top = if top.is_finite() && top > 0.0 { top } else { 1.0 };
    // Marks are round in the unit that is shown, a power of 1024.
    let unit = 1024f64.powf((top.log2() / 10.0).floor().max(0.0));
    let (end, marks) =
        axis(top / unit, |n| if n == 0.0 { "0".into() } else { format!("{}{per}", show_bytes(n * unit)) });
    (end * unit, marks)
}

/// A name that fits beside a plot.
pub fn short(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS {
        return name.to_string();
    }
    name.chars().take(NAME_CHARS - 1).chain(['…']).collect()
}

/// The name of an application, with its number among those of the same name; or its number alone.
pub fn name_of(i: usize, all: &[ApplicationOutcome]) -> String {
    let Some(name) = all.get(i).map(|a| a.name.as_str()).filter(|n| !n.is_empty()) else {
        return format!("application {i}");
    };
    let nth = all[..i].iter().filter(|a| a.name == name).count();
    let alone = nth == 0 && all[i + 1..].iter().all(|a| a.name != name);
    if alone { short(name) } else { format!("{} #{}", short(name), nth + 1) }
}

/// A series as a curve: each value stands for its whole interval.
pub fn curve(label: String, values: &[f64], interval_s: f64, ends: (f64, f64)) -> Curve {
    let (x_end, y_end) = ends;
    let x = |i: usize| (i as f64 * interval_s / x_end).min(1.0);
    let steps = values.iter().enumerate().flat_map(|(i, v)| [(x(i), v / y_end), (x(i + 1), v / y_end)]);
    Curve { label, points: steps.collect(), ..Curve::default() }
}

/// Intervals of a curve at most: more are narrower than the line.
const INTERVALS: usize = 128;

/// Intervals that become one in a plot.
pub fn together(intervals: usize) -> usize {
    intervals.div_ceil(INTERVALS).max(1)
}

/// The means of groups of values.
pub fn means(values: &[f64], together: usize) -> Vec<f64> {
    values.chunks(together.max(1)).map(mean).collect()
}

/// Bytes per second of every application over time; the last curve adds up those that have none of their own.
pub fn bandwidth(outcome: &Outcome) -> Vec<(String, Vec<f64>)> {
    let s = &outcome.series;
    let rate = |bytes: &[u64]| bytes.iter().map(|b| *b as f64 / s.interval_s.max(1e-12)).collect::<Vec<f64>>();
    let mut curves: Vec<(String, Vec<f64>)> = Vec::new();
    for (i, bytes) in s.bandwidth.iter().enumerate() {
        let rates = rate(bytes);
        if i < COLOURS {
            curves.push((name_of(i, &outcome.applications), rates));
        } else if i == COLOURS {
            curves.push(("the others".into(), rates));
        } else if let Some((_, sum)) = curves.last_mut() {
            sum.iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate);
        }
    }
    curves
}

/// Addresses on a device, with the unused stretches between used ones left out.
struct Places {
    /// Where each used stretch begins and ends, and how many used bytes lie before it.
    stretches: Vec<(u64, u64, u64)>,
    used: u64,
}

/// A hole that is larger than this part of all that is accessed is left out.
const GAP_PART: u64 = 20;

impl Places {
    fn of(accesses: &[&Served]) -> Option<Places> {
        let mut extents: Vec<(u64, u64)> = accesses.iter().map(|s| (s.address, s.address + s.bytes.max(1))).collect();
        extents.sort_unstable();
        let sum: u64 = extents.iter().map(|(from, to)| to - from).sum();
        let gap = (sum / GAP_PART).max(1);
        let mut stretches: Vec<(u64, u64, u64)> = Vec::new();
        for (from, to) in extents {
            match stretches.last_mut() {
                Some(last) if from <= last.1.saturating_add(gap) => last.1 = last.1.max(to),
                _ => stretches.push((from, to, 0)),
            }
        }
        let mut used = 0;
        for stretch in &mut stretches {
            stretch.2 = used;
            used += stretch.1 - stretch.0;
        }
        (used > 0).then_some(Places { stretches, used })
    }

    /// The part of the used places that lies before an address.
    fn part(&self, address: u64) -> f64 {
        let i = self.stretches.partition_point(|(from, ..)| *from <= address).saturating_sub(1);
        let (from, to, before) = self.stretches[i];
        (before + address.clamp(from, to) - from) as f64 / self.used as f64
    }

    /// Where the stretches begin, up to a number of them.
    fn marks(&self, most: usize) -> Axis {
        let every = self.stretches.len().div_ceil(most.max(1)).max(1);
        let mark = |(from, _, before): &(u64, u64, u64)| (*before as f64 / self.used as f64, show_bytes(*from as f64));
        let mut marks: Axis = Vec::new();
        for (part, text) in self.stretches.iter().step_by(every).map(mark) {
            // Texts must not lie on each other.
            if marks.last().is_none_or(|(last, _)| part - last > 0.06) {
                marks.push((part, text));
            }
        }
        marks
    }
}

/// The accesses of a data server: time to the right, place upward, a colour for each application. With the marks of
/// the places; unused stretches of the device are left out.
pub fn served(outcome: &Outcome, server: u16, end_s: f64) -> Option<(Vec<Marks>, Axis)> {
    let of: Vec<&Served> = outcome.picture.iter().filter(|s| s.server == server).collect();
    let places = Places::of(&of)?;
    let applications = outcome.applications.len();
    let mut groups: Vec<Marks> = (0..applications.min(COLOURS))
        .map(|i| Marks { label: name_of(i, &outcome.applications), at: Vec::new() })
        .collect();
    if applications > COLOURS {
        groups.push(Marks { label: "the others".into(), at: Vec::new() });
    }
    for s in of {
        let group = (s.application as usize).min(groups.len().checked_sub(1)?);
        groups[group].at.push((s.at_s / end_s, places.part(s.address), s.ms / 1e3 / end_s));
    }
    Some((groups, places.marks(10)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_reach_the_end() {
        for top in [0.001, 0.7, 1.0, 3.0, 9.99, 10.0, 12_345.0] {
            let (end, marks) = axis(top, |x| format!("{x}"));
            assert!(end >= top * 0.999_999 && end <= top * 1.7, "{top}: {end}");
            assert!((3..=8).contains(&marks.len()), "{top}: {marks:?}");
            assert_eq!((marks[0].0, marks[marks.len() - 1].0), (0.0, 1.0));
        }
        assert_eq!(
            axis(10.0, |x| format!("{x}")).1.iter().map(|m| m.1.as_str()).collect::<Vec<_>>(),
            ["0", "2", "4", "6", "8", "10"]
        );
        let (end, marks) = time_line(10.5);
        assert_eq!((end, marks.len()), (10.5, 5), "{marks:?}");
        assert!(marks.iter().all(|(part, _)| *part <= 1.0) && marks[4].1 == "10.00 s", "{marks:?}");
        assert_eq!(axis(0.0, |_| String::new()).0, 1.0);
        assert_eq!(axis(f64::NAN, |_| String::new()).0, 1.0);
        assert_eq!(byte_axis(100.0 * 1024.0, "/s").1.last().unwrap().1, "100 KiB/s");
    }

    #[test]
    fn the_picture_has_a_group_for_each_application() {
        let application = |name: &str| ApplicationOutcome { name: name.into(), ..ApplicationOutcome::default() };
        let mark =
            |server, application, at_s, address| Served { at_s, ms: 100.0, server, application, address, bytes: 10 };
        let outcome = Outcome {
            applications: vec![application("a"), application("")],
            picture: vec![mark(0, 0, 0.0, 100), mark(0, 1, 0.5, 190), mark(1, 0, 0.0, 7)],
            ..Outcome::default()
        };
        let (groups, marks) = served(&outcome, 0, 1.0).unwrap();
        assert_eq!((groups[0].label.as_str(), groups[1].label.as_str()), ("a", "application 1"));
        assert_eq!(groups[0].at, [(0.0, 0.0, 0.1)]);
        // What lies between the two is not used, and left out.
        assert_eq!(groups[1].at, [(0.5, 0.5, 0.1)]);
        assert_eq!(marks, [(0.0, "100 B".to_string()), (0.5, "190 B".to_string())]);
        assert_eq!(served(&outcome, 2, 1.0), None);
    }

    #[test]
    fn names_are_apart() {
        let all: Vec<_> = ["a", "b", "a", ""]
            .map(|name| ApplicationOutcome { name: name.into(), ..ApplicationOutcome::default() })
            .into();
        let names: Vec<String> = (0..5).map(|i| name_of(i, &all)).collect();
        assert_eq!(names, ["a #1", "b", "a #2", "application 3", "application 4"]);
    }

    #[test]
    fn bandwidth_is_bytes_over_time_and_adds_up_those_without_a_colour() {
        let mut outcome = Outcome::default();
        outcome.series.interval_s = 0.5;
        outcome.series.bandwidth = (0..10).map(|i| vec![i, 10]).collect();
        let curves = bandwidth(&outcome);
        assert_eq!(curves.len(), COLOURS + 1);
        assert_eq!(curves[1], ("application 1".into(), vec![2.0, 20.0]));
        assert_eq!((together(128), together(129), together(0)), (1, 2, 1));
        assert_eq!(means(&[1.0, 3.0, 7.0], 2), [2.0, 7.0]);
        assert_eq!(curves[COLOURS], ("the others".into(), vec![(7 + 8 + 9) as f64 * 2.0, 60.0]));
    }
}
