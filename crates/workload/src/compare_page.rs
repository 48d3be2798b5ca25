//! The page that shows comparisons: times with their spread, gains with their intervals, verdicts.

use crate::access::Moved;
use crate::compare::{Outcome, show_gain};
use crate::report::{Bar, Page};
use crate::stats::{Interval, mean};

/// A page of several experiments.
pub fn page(title: &str, outcomes: &[Outcome]) -> String {
    let mut page = Page::new(title);
    page.text(
        "Each bar is the mean time until the last process of the last application was done; shorter is better. The \
         line at its end is the 95 % interval of the mean. Baselines are grey.",
    );
    page.note(
        "A gain is 1 − T_new / T_base. The systems of a pair ran one after the other over the same files in random \
         order; gains are taken within pairs, and their intervals are Student's t over the pairs. A claim holds only \
         when the whole interval is on its side; “unresolved” is not a pass.",
    );
    for outcome in outcomes {
        add(&mut page, outcome);
    }
    page.html()
}

fn add(page: &mut Page, outcome: &Outcome) {
    let e = &outcome.experiment;
    page.heading(&e.title);
    let discarded = outcome.trials.iter().filter(|t| !t.result.counts()).count();
    let runs = outcome.trials.len();
    page.note(&if outcome.modelled {
        format!(
            "All times are on the modelled disk. {} pairs, {runs} runs, {discarded} of them do not count.",
            outcome.pairs
        )
    } else {
        format!("{} pairs, {runs} runs, no device model.", outcome.pairs)
    });
    if !outcome.claims.is_empty() {
        page.list(&outcome.claims.iter().map(|c| format!("{} — {}", c.text, c.verdict)).collect::<Vec<_>>());
    }
    for (c, case) in e.cases.iter().enumerate() {
        page.text(&format!("{}: {}", case.name, case.workload.describe()));
        let mut bars = Vec::new();
        let mut rows = Vec::new();
        for (s, system) in e.systems.iter().enumerate() {
            let trials = outcome.counted(c, s);
            let times: Vec<f64> = trials.iter().map(|t| t.result.makespan_s).collect();
            let bandwidth = mean(&trials.iter().map(|t| t.result.bandwidth_mib_s).collect::<Vec<_>>());
            let at_disk: Vec<Moved> = trials.iter().map(|t| t.result.servers.at_disk).collect();
            let interval = Interval::of(&times);
            let text = match times.len() {
                0 => "no run counts".into(),
                _ => format!("{:.2} s, {bandwidth:.1} MiB/s", interval.mean),
            };
            let baseline = e.baselines.contains(&system.name);
            bars.push(Bar { baseline, ..Bar::of(&system.name, &interval, text) });
            let at_disk = Moved::mean(&at_disk).to_string();
            let mut row = vec![system.name.clone(), format!("{:.2} s", interval.mean), at_disk];
            for base in &e.baselines {
                let found = e.systems.iter().position(|b| b.name == *base);
                row.push(match found {
                    Some(b) if b != s => show_gain(&outcome.case_gain(c, s, b)),
                    _ => "–".into(),
                });
            }
            rows.push(row);
        }
        let mut head = vec!["system".to_string(), "time".into(), "requests at the disk".into()];
        head.extend(e.baselines.iter().map(|b| format!("gain over {b}")));
        page.bars(&format!("Mean time, {}", case.name), &bars);
        page.table(&head, &rows);
    }
    if e.cases.len() > 1 {
        let averages = outcome.gains.iter().filter(|g| g.case.is_none());
        let rows: Vec<Vec<String>> =
            averages.map(|g| vec![g.new.clone(), g.base.clone(), show_gain(&g.gain)]).collect();
        page.text("Mean gain over the cases:").table(&["system", "over", "gain"], &rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{compare, tests::experiment};
    use crate::memory::Memory;
    use crate::stop::Stop;

    #[test]
    fn the_page_shows_every_case_system_and_verdict() {
        let outcome = compare(&Memory::default(), &experiment(), &Stop::new(), &mut |_| {}).unwrap();
        let html = page("A test", std::slice::from_ref(&outcome));
        assert_eq!(html.matches("<svg").count(), 2);
        assert!(outcome.claims.iter().all(|c| html.contains(&c.verdict.to_string())));
        assert!(html.contains("strided write") && html.contains("gain over none") && html.contains("no device model"));
        assert!(!html.contains("http"));
    }
}
