//! Turns a comparison on the command line into an experiment: systems, baselines, claims and effort.

use impresario_sched::PolicySpec;

use crate::compare::{Bound, Case, Claim, Experiment};
use crate::system::{Layer, System};

/// The extent of an experiment.
#[derive(Clone, Copy, PartialEq, Debug, clap::Args)]
#[command(next_help_heading = "Effort")]
pub struct Effort {
    /// Pairs at least
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub pairs: u32,
    /// Pairs at most, while a claim is unresolved; looked at with --pairs of them, and whenever they have doubled
    #[arg(long = "max-pairs", default_value_t = 12, value_name = "N")]
    pub pairs_max: u32,
    /// No further pair starts after this many minutes
    #[arg(long = "max-minutes", default_value_t = 60.0, value_name = "MINUTES")]
    pub minutes_max: f64,
    /// Seed of the random order
    #[arg(id = "order_seed", long = "order-seed", default_value_t = 1, value_name = "N")]
    pub seed: u64,
}

/// A comparison as given on the command line.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    /// Systems as the user wrote them.
    pub systems: &'a [String],
    /// Baselines by name; none: the first system.
    pub baselines: &'a [String],
    /// Which servers' policies are compared.
    pub on: Layer,
    /// Policy of the other servers.
    pub other: &'a PolicySpec,
    /// Claimed mean gain of every other system over each baseline.
    pub at_least: Option<f64>,
    /// Claimed bound of the loss in every case.
    pub no_worse: Option<f64>,
}

/// The experiment of a comparison on `data_servers` servers, or the user's mistake.
pub fn experiment_of(
    asked: &Comparison<'_>,
    cases: Vec<Case>,
    data_servers: usize,
    effort: &Effort,
) -> Result<Experiment, String> {
    let systems: Vec<System> =
        asked.systems.iter().map(|s| System::parse(s, asked.on, asked.other)).collect::<Result<_, _>>()?;
    if systems.len() < 2 {
        return Err("a comparison needs at least two systems, such as none,mlf".into());
    }
    for (i, system) in systems.iter().enumerate() {
        system.check(data_servers)?;
        if systems[..i].iter().any(|s| s.name == system.name) {
            return Err(format!("{} is named twice", system.name));
        }
    }
    let baselines = match asked.baselines {
        [] => vec![systems[0].name.clone()],
        given => given.to_vec(),
    };
    if let Some(unknown) = baselines.iter().find(|b| systems.iter().all(|s| s.name != **b)) {
        let names: Vec<&str> = systems.iter().map(|s| s.name.as_str()).collect();
        return Err(format!("the baseline {unknown} is none of the systems compared: {}", names.join(", ")));
    }
    let mut e = experiment("comparison".into(), cases, systems, effort);
    for base in &baselines {
        for system in e.systems.iter().filter(|s| !baselines.contains(&s.name)) {
            let claim = |bound| Claim { new: system.name.clone(), base: base.clone(), bound };
            let wanted = asked
                .at_least
                .map(|share| if e.cases.len() > 1 { Bound::AverageAtLeast(share) } else { Bound::EachAtLeast(share) });
            e.claims.extend(wanted.map(claim));
            e.claims.extend(asked.no_worse.map(|share| claim(Bound::NoCaseWorseThan(share))));
        }
    }
    e.baselines = baselines;
    Ok(e)
}

/// An experiment without baselines and claims, with the pairs and time of `effort`.
pub fn experiment(title: String, cases: Vec<Case>, systems: Vec<System>, effort: &Effort) -> Experiment {
    Experiment {
        title,
        cases,
        systems,
        baselines: Vec::new(),
        claims: Vec::new(),
        pairs: effort.pairs.max(1),
        pairs_max: effort.pairs_max.max(effort.pairs),
        time_max_s: effort.minutes_max * 60.0,
        tries: 3,
        shuffle: true,
        seed: effort.seed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::{Pattern, Shape};
    use crate::plan::{Operation, Workload};

    const EFFORT: Effort = Effort { pairs: 3, pairs_max: 9, minutes_max: 1.0, seed: 1 };

    #[test]
    fn a_command_line_becomes_an_experiment_or_says_why_not() {
        let pattern =
            Pattern { shape: Shape::Strided, request_bytes: 16 << 10, process_bytes: 1 << 20, processes: 8, seed: 1 };
        let case = |op: Operation| Case { name: op.to_string(), workload: Workload::uniform(4, pattern, op) };
        let cases = || vec![case(Operation::Write), case(Operation::Read)];
        let fifo = PolicySpec::named("fifo");
        let ask = |systems: &str, baselines: &str, at_least| {
            let split = |t: &str| t.split(',').filter(|w| !w.is_empty()).map(String::from).collect::<Vec<_>>();
            let (systems, baselines) = (split(systems), split(baselines));
            let on = Layer::Data;
            let a = Comparison {
                systems: &systems,
                baselines: &baselines,
                on,
                other: &fifo,
                at_least,
                no_worse: Some(0.03),
            };
            experiment_of(&a, cases(), 4, &EFFORT)
        };
        let e = ask("none,none@elevator,mlf", "none,none@elevator", Some(0.4)).unwrap();
        assert_eq!((e.baselines.len(), e.claims.len()), (2, 4));
        assert_eq!(ask("none,mlf", "", None).unwrap().baselines, ["none"]);
        assert!(ask("none", "", None).unwrap_err().contains("at least two"));
        assert!(ask("none,none", "", None).unwrap_err().contains("twice"));
        assert!(ask("none,mlf", "fifo", None).unwrap_err().contains("none of the systems"));
        assert!(ask("none,twins", "", None).is_err());
    }
}
