//! The map of winners as Markdown.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::agreement::percent;
use super::map::{BASELINE, ScaleMap, Situation};
use super::text::{row, short};

/// The report: one map over all scales, then measures of each scale's situations.
pub fn markdown(maps: &[ScaleMap]) -> String {
    let mut out = String::new();
    for m in maps {
        let what = if m.cascade {
            "every I/O-node policy × every data-server policy"
        } else {
            "one scheduled layer at a time"
        };
        _ = writeln!(
            out,
            "- ×{}: {} situations, {what}, {} repetitions, {} simulations{}.",
            m.scale,
            m.situations.len(),
            m.repetitions,
            m.simulations,
            if m.divide > 1 { format!(", volume of a process divided by {}", m.divide) } else { String::new() }
        );
    }
    _ = write!(
        out,
        "\n### Shortest makespan\n\nWith its gain over `{BASELINE}`; in brackets how many others do not differ from it significantly (7: or more).\n\n"
    );
    map(&mut out, maps, |s| &s.winners.makespan);
    _ = write!(out, "\n### Shortest makespan with one scheduled layer\n\n");
    map(&mut out, maps, |s| &s.winners.one_layer);
    _ = write!(out, "\n### Shortest mean time of a task\n\n");
    map(&mut out, maps, |s| &s.winners.task_mean);
    _ = write!(out, "\n### Largest least throughput of an application\n\n");
    map(&mut out, maps, |s| &s.winners.least_throughput);
    _ = write!(
        out,
        "\n### If one had to serve everywhere\n\nMakespan over that of the best with one scheduled layer in the same \
         situation: mean, and the worst case.\n\n"
    );
    everywhere(&mut out, maps);
    _ = write!(
        out,
        "\n### TWINS over `{FIFO}`\n\nGain in makespan, per cent, of {}, in this order (–: not run; −900: ten times as long).\n\n",
        TWINS.map(|t| format!("`{t}`")).join(", ")
    );
    twins(&mut out, maps);
    for m in maps {
        _ = write!(
            out,
            "\n### Measures at ×{}: the baseline, the best, and the best with one scheduled layer\n\n",
            m.scale
        );
        measures(&mut out, m);
    }
    for complaint in maps.iter().flat_map(|m| &m.complaints) {
        _ = write!(out, "\nNot well: {complaint}\n");
    }
    out
}

fn map(out: &mut String, maps: &[ScaleMap], of: fn(&Situation) -> &Vec<String>) {
    situations(out, maps, |s| {
        let best = of(s).first()?;
        let gain = s
            .systems
            .iter()
            .find(|r| r.system == *best)
            .map_or(String::new(), |r| format!(" {}", percent(r.gain.mean)));
        let others = of(s).len() - 1;
        let others = if others > 0 { format!(" ({others})") } else { String::new() };
        Some(format!("{best}{gain}{others}"))
    });
}

/// The I/O nodes' policy over which TWINS gains or loses, and the variants.
const FIFO: &str = "fifo + none";
const TWINS: [&str; 6] =
    ["twins (paper)", "twins (paper, 8 ms)", "twins one scan", "twins idle", "twins conserving", "twins anticipating"];

fn twins(out: &mut String, maps: &[ScaleMap]) {
    situations(out, maps, |s| {
        let fifo = s.makespans_s.get(FIFO)?;
        let gain = |variant| {
            let span = s.makespans_s.get(&format!("{variant} + none"));
            match span.map(|span| (100.0 * (1.0 - span / fifo)).round()) {
                None => "–".into(),
                Some(0.0) => "0".into(),
                Some(gain) => format!("{gain:+}").replace('-', "−"),
            }
        };
        Some(TWINS.map(gain).join(" / "))
    });
}

/// A row for each situation, a column for each scale.
fn situations(out: &mut String, maps: &[ScaleMap], cell: impl Fn(&Situation) -> Option<String>) {
    row(out, ["situation".to_string()].into_iter().chain(maps.iter().map(|m| format!("×{}", m.scale))));
    row(out, std::iter::repeat_n("---".to_string(), maps.len() + 1));
    let mut names: Vec<&String> = Vec::new();
    for s in maps.iter().flat_map(|m| &m.situations) {
        if !names.contains(&&s.name) {
            names.push(&s.name);
        }
    }
    for name in names {
        let cells = maps.iter().map(|m| {
            let there = m.situations.iter().find(|s| s.name == *name);
            there.and_then(&cell).unwrap_or("–".into())
        });
        row(out, [name.clone()].into_iter().chain(cells));
    }
}

/// Mean and worst ratio of a system to the best, and where it is worst.
type Ratio<'a> = (f64, f64, &'a str);

/// How far a system is from the best over all situations of a scale: mean and worst ratio.
fn everywhere(out: &mut String, maps: &[ScaleMap]) {
    let mut ratios: BTreeMap<&str, Vec<Option<Ratio<'_>>>> = BTreeMap::new();
    for (nth, m) in maps.iter().enumerate() {
        let mut of: BTreeMap<&str, Vec<(f64, &str)>> = BTreeMap::new();
        for s in &m.situations {
            let best = s.makespans_s.values().copied().fold(f64::INFINITY, f64::min);
            for (system, span) in &s.makespans_s {
                of.entry(system).or_default().push((span / best, &s.name));
            }
        }
        for (system, all) in of {
            let mean = all.iter().map(|r| r.0).sum::<f64>() / all.len() as f64;
            let worst = all.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
            let at = ratios.entry(system).or_insert_with(|| vec![None; maps.len()]);
            at[nth] = worst.map(|(worst, name)| (mean, worst, name));
        }
    }
    let mut ratios: Vec<_> = ratios.into_iter().collect();
    let first = |r: &[Option<Ratio<'_>>]| r.iter().flatten().next().map_or(f64::INFINITY, |r| r.0);
    ratios.sort_by(|a, b| first(&a.1).total_cmp(&first(&b.1)));
    row(out, ["system".to_string()].into_iter().chain(maps.iter().map(|m| format!("×{}", m.scale))));
    row(out, std::iter::repeat_n("---".to_string(), maps.len() + 1));
    for (system, at) in ratios {
        let cells = at.iter().map(|r| match r {
            Some((mean, worst, name)) => format!("{mean:.2}, {worst:.1} ({name})"),
            None => "–".into(),
        });
        row(out, [system.to_string()].into_iter().chain(cells));
    }
}

fn measures(out: &mut String, m: &ScaleMap) {
    let head = [
        "situation",
        "system",
        "makespan, s",
        "gain",
        "mean task, s",
        "variance, s²",
        "interference",
        "least MB/s",
        "fairness",
    ];
    row(out, head.map(String::from));
    row(out, head.map(|_| "---".into()));
    for s in &m.situations {
        let mut wanted = vec![BASELINE.to_string()];
        wanted.extend(s.winners.makespan.first().cloned());
        wanted.extend(s.winners.one_layer.first().cloned());
        wanted.dedup();
        for system in wanted {
            let Some(r) = s.systems.iter().find(|r| r.system == system) else { continue };
            row(
                out,
                [
                    s.name.clone(),
                    r.system.clone(),
                    short(r.makespan_s),
                    percent(r.gain.mean),
                    short(r.task_mean_s),
                    short(r.task_variance_s2),
                    r.interference.map_or("–".into(), |f| format!("{f:.2}")),
                    short(r.least_throughput / 1e6),
                    format!("{:.3}", r.fairness),
                ],
            );
        }
    }
    let mut wins: BTreeMap<&str, usize> = BTreeMap::new();
    for best in m.situations.iter().filter_map(|s| s.winners.makespan.first()) {
        *wins.entry(best).or_default() += 1;
    }
    let mut wins: Vec<_> = wins.into_iter().collect();
    wins.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let wins: Vec<String> = wins.into_iter().map(|(name, n)| format!("{name} {n}")).collect();
    _ = write!(out, "\nSituations won at ×{}: {}.\n", m.scale, wins.join(", "));
}
