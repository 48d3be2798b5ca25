//! The summary of the reproduction in `doc/REPRODUCTION.md`: its table of verdicts, and where a run differs from it.

use super::agreement::Agreement;
use super::report::FigureReport;

/// The summary, as it is in the tree.
pub const DOCUMENT: &str = include_str!("../../../doc/REPRODUCTION.md");

/// A paper's row: how many claims have each verdict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// The paper.
    pub paper: String,
    /// Its claims.
    pub claims: usize,
    /// Those with each verdict, in the order of [`Agreement::ALL`].
    pub counts: Vec<usize>,
}

/// The rows of the table of counts in a document; empty if it has no such table with a column for each verdict.
pub fn rows(document: &str) -> Vec<Row> {
    let cells = |line: &str| line.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect::<Vec<_>>();
    let mut lines = document.lines().skip_while(|line| !line.starts_with("| paper | claims |"));
    let is_complete = lines.next().map(cells).is_some_and(|head| head[2..] == Agreement::ALL.map(|v| v.to_string()));
    let row = |cells: Vec<String>| {
        let numbers: Option<Vec<usize>> = cells[1..].iter().map(|cell| cell.parse().ok()).collect();
        numbers.filter(|n| !n.is_empty()).map(|n| Row {
            paper: cells[0].clone(),
            claims: n[0],
            counts: n[1..].to_vec(),
        })
    };
    let rows = lines.skip(1).take_while(|line| line.starts_with('|')).map(cells);
    rows.filter(|_| is_complete).filter_map(row).collect()
}

/// Where the verdicts of a run are not those that a document counts, a line each.
pub fn differences(document: &str, figures: &[FigureReport]) -> Vec<String> {
    let rows = rows(document);
    let mut papers: Vec<&str> = figures.iter().map(|figure| figure.paper.as_str()).collect();
    papers.dedup();
    let mut all = Vec::new();
    for paper in papers {
        let Some(row) = rows.iter().find(|row| row.paper == paper) else {
            all.push(format!("there is no row of verdicts for {paper}"));
            continue;
        };
        let claims = || figures.iter().filter(|figure| figure.paper == paper).flat_map(|figure| &figure.claims);
        for (verdict, told) in Agreement::ALL.into_iter().zip(&row.counts) {
            let found: Vec<&str> = claims().filter(|claim| claim.verdict == verdict).map(|c| c.id.as_str()).collect();
            if found.len() != *told {
                let (count, names) = (found.len(), found.join(", "));
                all.push(format!("{paper}: {told} claims are told to be \"{verdict}\", now {count} ({names})"));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::{Effort, Report, campaign, papers};
    use super::*;
    use impresario_workload::stop::Stop;

    /// The table of the summary: claims of each paper by verdict.
    #[test]
    fn the_summary_counts_the_claims() {
        let (rows, figures) = (rows(DOCUMENT), papers::figures().unwrap());
        assert_eq!(rows.iter().map(|row| row.paper.as_str()).collect::<Vec<_>>(), papers::PAPERS);
        for row in rows {
            let claims =
                figures.iter().filter(|f| f.paper == row.paper).map(|f| f.metadata.claims.len()).sum::<usize>();
            assert_eq!(row.claims, claims, "claims of {}", row.paper);
            assert_eq!(row.counts.iter().sum::<usize>(), row.claims, "every claim of {} has one verdict", row.paper);
        }
    }

    /// Fig. 9 with fewer repetitions is quick: the verdicts that are certain are those of the summary, which has no claims with the
    /// opposite sign of this paper in other figures.
    #[test]
    fn a_quick_figure_has_the_verdicts_of_the_summary() {
        let (all, effort) = (papers::figures().unwrap(), Effort { repetitions: Some(3), ..Effort::default() });
        let wanted: Vec<_> = all.iter().filter(|f| f.id == "server-side-scheduling-2002-fig9").collect();
        let campaign = campaign::run(&wanted, &effort, &Stop::new(), &mut |_| ()).unwrap();
        let mut figures = Report::of(&wanted, &campaign, &effort).figures;
        let said = differences(DOCUMENT, &figures);
        assert!(!said.iter().any(|line| line.contains("opposite sign")), "{said:?}");
        assert!(DOCUMENT.contains("With strided reads Opt 4 is ahead, not Opt 1 (`2002.strided.opt1-first`)"));
        let first = figures[0].claims.iter_mut().find(|claim| claim.id == "2002.strided.opt1-first").unwrap();
        assert_eq!(first.verdict, Agreement::OppositeSign);

        first.verdict = Agreement::Unresolved;
        let said = differences(DOCUMENT, &figures).join("\n");
        assert!(said.contains("3 claims are told to be \"opposite sign\", now 2 (2002."), "{said}");
        assert!(said.contains("0 claims are told to be \"unresolved\", now 1 (2002.strided.opt1-first)"), "{said}");
        assert!(differences("| paper | claims | agrees |\n|---|\n", &figures)[0].contains("no row"));
    }
}
