//! server-side-scheduling-2002: Opt 1 to 4 of PVFS, Figs. 8 to 11.

use impresario_sim::model::{Pattern, Scenario};

use super::{Series, file};
use crate::reproduce::campaign::{Effort, Run};
use crate::reproduce::claim::{Claim, Ours, Table, average, largest, smallest};
use crate::reproduce::figure::{Cell, Figure, Plot, policy};
use crate::reproduce::verdict::Says;

const PAPER: &str = "server-side-scheduling-2002";
/// Opt 1 to 4, as the paper has them.
const OPTS: [(&str, &str); 4] = [
    ("opt1", "stream turn_bytes=0 guard_batches=0 sieve=off"),
    ("opt2", "scan turn_bytes=0 guard_batches=0 sieve=off"),
    ("opt3", "wscan turn_bytes=0 guard_batches=0 sieve=off window_bytes=56000000"),
    ("opt4", "sstf patience_us=0 guard_batches=0 sieve=off"),
];
/// Total data of an I/O node, MiB: multiples of 14 so that every task's share is a whole number.
const SMALL_MIB: [u64; 8] = [14, 28, 42, 49, 56, 70, 84, 112];
const LARGE_MIB: [u64; 2] = [224, 448];
const CACHES: [&str; 2] = ["uncached", "cached"];

/// The figures.
pub(super) fn figures() -> Vec<Figure> {
    let series = Series { paper: PAPER, repetitions: 8, confidence: 0.95 };
    vec![
        series.figure(
            "server-side-scheduling-2002-fig8",
            "Fig. 8: single block reads",
            file!("server-side-scheduling-2002-fig8.toml"),
            |base, effort| cells(base, effort, &[1]),
            fig8,
            || plots(&[("", "")]),
        ),
        series.figure(
            "server-side-scheduling-2002-fig9",
            "Fig. 9: strided reads, 16 regions",
            file!("server-side-scheduling-2002-fig9.toml"),
            |base, effort| cells(base, effort, &[1]),
            fig9,
            || plots(&[("", "")]),
        ),
        series.figure(
            "server-side-scheduling-2002-fig10",
            "Fig. 10: random block reads, 32 and 16 blocks a task",
            file!("server-side-scheduling-2002-fig10.toml"),
            |base, effort| cells(base, effort, &[32, 16]),
            fig10,
            || plots(&[("32 blocks/", "32 blocks, "), ("16 blocks/", "16 blocks, ")]),
        ),
    ]
}

/// All sizes, with an empty and a warm cache, under each of the four, with so many blocks a task.
fn cells(base: &Scenario, effort: &Effort, blocks: &[u64]) -> Vec<Cell> {
    let mut all = Vec::new();
    for &blocks in blocks {
        let prefix = if blocks > 1 { format!("{blocks} blocks/") } else { String::new() };
        for cache in CACHES {
            for mib in SMALL_MIB.iter().chain(&LARGE_MIB) {
                for (opt, line) in OPTS {
                    let mut s = base.clone();
                    let a = &mut s.application[0];
                    let parts = if a.pattern == Pattern::Random { blocks } else { u64::from(a.regions) };
                    (a.requests, a.request_bytes) = (blocks, (mib << 20) / 7 / parts);
                    s.servers.warm = cache == "cached";
                    s.servers.policy = policy(line);
                    effort.thin(&mut s);
                    all.push(Cell::new(format!("{prefix}{cache}/{mib}/{opt}"), s));
                }
            }
        }
    }
    all
}

fn keys(prefix: &str, cache: &str, mib: u64) -> [String; 4] {
    OPTS.map(|(opt, _)| format!("{prefix}{cache}/{mib}/{opt}"))
}

/// Gain of one over the worst of the four in a metric, where it is largest over the sizes.
fn over_worst(
    t: &Table<'_>,
    prefix: &str,
    cache: &str,
    sizes: &[u64],
    opt: usize,
    metric: fn(&Run) -> f64,
) -> Option<Ours> {
    largest(sizes.iter().map(|&mib| {
        let keys = keys(prefix, cache, mib);
        let worst = t.worst(&keys.each_ref().map(String::as_str), metric);
        let gain = worst.and_then(|w| t.gain(w, &keys[opt], metric));
        (format!("{mib} MiB"), gain.map(|g| g.noted(format!("over {}", worst.map_or("", |w| &w[w.len() - 4..])))))
    }))
}

/// Gain of one over the best of the others in a metric, on average over the sizes.
fn over_others(
    t: &Table<'_>,
    prefix: &str,
    cache: &str,
    sizes: &[u64],
    opts: &[usize],
    metric: fn(&Run) -> f64,
) -> Option<Ours> {
    let cases: Option<Vec<Ours>> = sizes
        .iter()
        .map(|&mib| {
            let keys = keys(prefix, cache, mib);
            let (mine, others): (Vec<_>, Vec<_>) = keys.iter().enumerate().partition(|(o, _)| opts.contains(o));
            let names = |k: Vec<(usize, &String)>| k.into_iter().map(|(_, k)| k.clone()).collect::<Vec<_>>();
            let (mine, others) = (names(mine), names(others));
            let refs = |k: &[String]| k.iter().map(String::clone).collect::<Vec<_>>();
            let (mine, others) = (refs(&mine), refs(&others));
            // The worse of mine must beat the better of the others.
            let worst = t.worst(&mine.iter().map(String::as_str).collect::<Vec<_>>(), metric)?;
            let best = t.best(&others.iter().map(String::as_str).collect::<Vec<_>>(), metric)?;
            let gain = t.gain(best, worst, metric)?;
            Some(Ours::of(gain.values.into_iter().map(finite).collect()))
        })
        .collect();
    average(cases?.into_iter().map(Some))
}

/// Variances near nothing give ratios without meaning; a loss beyond tenfold says no more than tenfold.
fn finite(gain: f64) -> f64 {
    if gain.is_finite() { gain.max(-10.0) } else { 0.0 }
}

/// How far the four are apart in a metric, relative to their mean, on average over the sizes.
fn spread(t: &Table<'_>, prefix: &str, cache: &str, sizes: &[u64], metric: fn(&Run) -> f64) -> Option<Ours> {
    let all: Option<Vec<Ours>> = sizes
        .iter()
        .map(|&mib| {
            let of: Vec<Vec<f64>> =
                keys(prefix, cache, mib).iter().map(|k| t.values(k, metric)).collect::<Option<_>>()?;
            let spreads = (0..of[0].len()).map(|r| {
                let here: Vec<f64> = of.iter().map(|o| o[r]).collect();
                let (low, high) = here.iter().fold((f64::INFINITY, 0.0f64), |(l, h), v| (l.min(*v), h.max(*v)));
                (high - low) / crate::stats::mean(&here)
            });
            Some(Ours::of(spreads.collect()))
        })
        .collect();
    average(all?.into_iter().map(Some))
}

/// The size at which a warm cache begins to fail: the middle between the last size whose time per byte is within a half
/// of the smallest's and the next.
fn knee(t: &Table<'_>, prefix: &str) -> Option<Ours> {
    let per_byte: Vec<Vec<f64>> = SMALL_MIB
        .iter()
        .map(|mib| t.values(&format!("{prefix}cached/{mib}/opt1"), |r| r.makespan_s() / *mib as f64))
        .collect::<Option<_>>()?;
    let at = (0..per_byte[0].len()).map(|r| {
        let beyond = (1..SMALL_MIB.len()).find(|&i| per_byte[i][r] > 1.5 * per_byte[0][r]);
        beyond.map_or(f64::NAN, |i| (SMALL_MIB[i - 1] + SMALL_MIB[i]) as f64 / 2.0 * f64::from(1 << 20))
    });
    Some(Ours::of(at.collect()))
}

/// The size with the highest variance for its mean time among the small ones, with a warm cache, on average over the four.
fn variance_peak(t: &Table<'_>, prefix: &str) -> Option<Ours> {
    let repetitions = t.values(&keys(prefix, "cached", SMALL_MIB[0])[0], Run::makespan_s)?.len();
    let mut peaks = Vec::new();
    for r in 0..repetitions {
        let mut best = (0.0, 0);
        for mib in SMALL_MIB {
            let mut sum = 0.0;
            for key in keys(prefix, "cached", mib) {
                let run = t.runs.get(&key)?.get(r)?;
                sum += run.task_variance_s2() / run.task_mean_s().powi(2);
            }
            if sum > best.0 {
                best = (sum, mib);
            }
        }
        peaks.push((best.1 << 20) as f64);
    }
    Some(Ours::of(peaks))
}

const TASK: fn(&Run) -> f64 = Run::task_mean_s;
const SPAN: fn(&Run) -> f64 = Run::makespan_s;
const VARIANCE: fn(&Run) -> f64 = Run::task_variance_s2;

fn all_sizes() -> Vec<u64> {
    SMALL_MIB.iter().chain(&LARGE_MIB).copied().collect()
}

fn fig8() -> Vec<Claim> {
    let claim = |id: &str, text: &str, says, ours: fn(&Table<'_>) -> Option<Ours>| {
        Claim::new(format!("2002.single.{id}"), text, says, ours)
    };
    vec![
        claim(
            "opt4-task",
            "uncached: Opt 4 has the least mean task time, up to 28 % under the worst",
            Says::Gain(0.28),
            |t| over_worst(t, "", "uncached", &all_sizes(), 3, TASK),
        ),
        claim("opt4-first", "uncached: no other has a lower mean task time than Opt 4", Says::Better, |t| {
            over_others(t, "", "uncached", &all_sizes(), &[3], TASK)
        }),
        claim("span-same", "uncached: application times are consistent across all four", Says::Same(0.10), |t| {
            spread(t, "", "uncached", &all_sizes(), SPAN)
        }),
        claim(
            "cached-opt4-task",
            "cached: Opt 4 has the best mean task time, 30 % under the worst",
            Says::Gain(0.30),
            |t| over_worst(t, "", "cached", &SMALL_MIB, 3, TASK),
        ),
        claim(
            "cached-opt4-span",
            "cached: Opt 4 costs a substantially higher application time than the others",
            Says::Worse,
            |t| over_others(t, "", "cached", &SMALL_MIB, &[3], SPAN),
        ),
        claim("cached-opt3-span", "cached: Opt 3 has a better application time than Opt 4", Says::Better, |t| {
            average(SMALL_MIB.map(|m| t.gain(&format!("cached/{m}/opt4"), &format!("cached/{m}/opt3"), SPAN)))
        }),
        claim("knee", "cached: performance changes at about 56 MB, where the cache ends", Says::Bytes(56e6), |t| {
            knee(t, "")
        }),
        claim(
            "variance-12-34",
            "Fig. 11, large: Opt 1 and 2 have lower variance of task times than Opt 3 and 4",
            Says::Better,
            |t| over_others(t, "", "uncached", &LARGE_MIB, &[0, 1], VARIANCE),
        ),
        claim("variance-2-1", "Fig. 11, large: Opt 2 is more predictable than Opt 1", Says::Better, |t| {
            average(LARGE_MIB.map(|m| t.gain(&format!("uncached/{m}/opt1"), &format!("uncached/{m}/opt2"), VARIANCE)))
        }),
        claim("variance-peak", "Fig. 11, cached: spikes of variance at 56 to 64 MB", Says::Bytes(60e6), |t| {
            variance_peak(t, "")
        }),
    ]
}

fn fig9() -> Vec<Claim> {
    let claim = |id: &str, text: &str, says, ours: fn(&Table<'_>) -> Option<Ours>| {
        Claim::new(format!("2002.strided.{id}"), text, says, ours)
    };
    vec![
        claim("opt1-task", "uncached: Opt 1 has the least mean task time, by as much as 14 %", Says::Gain(0.14), |t| {
            over_worst(t, "", "uncached", &all_sizes(), 0, TASK)
        }),
        claim("opt1-first", "uncached: no other has a lower mean task time than Opt 1", Says::Better, |t| {
            over_others(t, "", "uncached", &all_sizes(), &[0], TASK)
        }),
        claim("cached-opt1", "cached: Opt 1 still has the least mean task time", Says::Better, |t| {
            over_others(t, "", "cached", &SMALL_MIB, &[0], TASK)
        }),
        claim("span-same", "application times are about the same for all four", Says::Same(0.10), |t| {
            spread(t, "", "uncached", &all_sizes(), SPAN)
        }),
        claim("knee", "cached: performance changes at about 56 MB", Says::Bytes(56e6), |t| knee(t, "")),
        claim("variance-34-12", "Fig. 11, large: here Opt 3 and 4 are the most predictable", Says::Better, |t| {
            over_others(t, "", "uncached", &LARGE_MIB, &[2, 3], VARIANCE)
        }),
    ]
}

fn fig10() -> Vec<Claim> {
    let mut all = Vec::new();
    for prefix in ["32 blocks/", "16 blocks/"] {
        let of = if prefix.starts_with("32") { "2002.random32" } else { "2002.random16" };
        let mut claim = |id: &str, text: &str, says, ours: fn(&Table<'_>, &str) -> Option<Ours>| {
            all.push(Claim::new(
                format!("{of}.{id}"),
                format!("{prefix} {text}").replace("/ ", ": "),
                says,
                move |t| ours(t, prefix),
            ));
        };
        claim(
            "34-span",
            "uncached, large: Opt 3 and 4 have lower application times than Opt 1 and 2",
            Says::Better,
            |t, p| over_others(t, p, "uncached", &LARGE_MIB, &[2, 3], SPAN),
        );
        claim(
            "34-task",
            "uncached, large: Opt 3 and 4 have lower mean task times than Opt 1 and 2",
            Says::Better,
            |t, p| over_others(t, p, "uncached", &LARGE_MIB, &[2, 3], TASK),
        );
        claim(
            "cached-1-4",
            "cached: Opt 1 beats Opt 4 by as much as 10 % in mean task time",
            Says::Gain(0.10),
            |t, p| {
                largest(SMALL_MIB.iter().map(|m| {
                    (format!("{m} MiB"), t.gain(&format!("{p}cached/{m}/opt4"), &format!("{p}cached/{m}/opt1"), TASK))
                }))
            },
        );
        claim(
            "variance-12-34",
            "Fig. 11, large: Opt 1 and 2 have lower variance of task times than Opt 3 and 4",
            Says::Better,
            |t, p| over_others(t, p, "uncached", &LARGE_MIB, &[0, 1], VARIANCE),
        );
        claim(
            "16-32",
            "16 and 32 blocks give similar results: application time of Opt 1, largest difference",
            Says::Same(THIRD_OF),
            |t, _| {
                smallest(LARGE_MIB.iter().map(|m| {
                    (
                        format!("{m} MiB"),
                        t.gain(&format!("32 blocks/uncached/{m}/opt1"), &format!("16 blocks/uncached/{m}/opt1"), SPAN),
                    )
                }))
            },
        );
    }
    // The last is the same for both.
    let mut seen = false;
    all.retain(|c| !c.id.ends_with("16-32") || !std::mem::replace(&mut seen, true));
    all
}

/// "Similar" has no figure; a third, as for all others.
const THIRD_OF: f64 = crate::reproduce::verdict::THIRD;

fn plots(prefixes: &[(&'static str, &'static str)]) -> Vec<Plot> {
    let mut all = Vec::new();
    for (prefix, name) in prefixes {
        for (what, sizes, metric) in [
            ("application service time, s", all_sizes(), SPAN),
            ("mean task service time, s", all_sizes(), TASK),
            ("variance of task service time, s²", all_sizes(), VARIANCE),
        ] {
            for cache in CACHES {
                let sizes: Vec<u64> = if cache == "cached" { SMALL_MIB.to_vec() } else { sizes.clone() };
                let curves = OPTS.iter().map(|(opt, _)| {
                    (opt.to_string(), sizes.iter().map(|m| format!("{prefix}{cache}/{m}/{opt}")).collect())
                });
                all.push(Plot::Lines {
                    what: format!("{name}{cache}: {what}, over MiB per I/O node"),
                    axis: sizes.iter().map(u64::to_string).collect(),
                    curves: curves.collect(),
                    metric,
                    log: false,
                });
            }
        }
    }
    all
}
