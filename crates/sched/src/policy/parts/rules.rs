//! Rules by which policies classify requests: `name: condition {setting=value, …}; …`; the first match applies, or where that
//! goes by a path, the match with the longest one.
//!
//! A condition is `*` or terms joined by `&`: `job=`, `user=`, `client=`, `file=` with keys (`job=17|18`), or `op=` with
//! operations: `read`, `write`, or of calls on names those of [`NameOp`], or `path=` with folders. Example: `big: job=17 & op=read {weight=2}; rest: * {weight=1}`.

use std::collections::BTreeMap;

use impresario_base::folders;

use crate::names::{Does, Who};

/// Maximum rules.
const RULES_MAX: usize = 1024;

/// One rule.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rule {
    pub name: String,
    condition: Vec<Term>,
    /// The settings for matching requests.
    pub settings: BTreeMap<String, String>,
}

/// A term; one of its alternatives must hold.
#[derive(Clone, PartialEq, Debug)]
enum Term {
    Job(Vec<u64>),
    User(Vec<u64>),
    Client(Vec<u64>),
    File(Vec<u64>),
    Op(Vec<Does>),
    Path(Vec<Folder>),
}

/// A folder and all below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Folder {
    /// Components of its path.
    depth: usize,
    number: u32,
}

impl Folder {
    fn parse(text: &str) -> Result<Folder, String> {
        let components: Vec<&[u8]> = folders::components(text.as_bytes()).collect();
        let depth = components.len();
        if !(1..=folders::DEPTH_MAX).contains(&depth) || components.iter().any(|c| [&b"."[..], b".."].contains(c)) {
            let most = folders::DEPTH_MAX;
            return Err(format!("\"{text}\" is not the path of a folder of 1 to {most} components such as /scratch/a"));
        }
        Ok(Folder { depth, number: folders::of(text.as_bytes())[depth - 1] })
    }

    fn holds(&self, who: &Who) -> bool {
        who.naming.folders[self.depth - 1] == self.number
    }
}

impl Term {
    fn parse(text: &str) -> Result<Term, String> {
        let (what, values) = text.split_once('=').ok_or_else(|| format!("\"{text}\" is no term such as job=17"))?;
        let values: Vec<&str> = values.split('|').map(str::trim).collect();
        let keys = || {
            let number =
                |v: &&str| v.parse::<u64>().map_err(|_| format!("\"{v}\" in \"{text}\" is not a whole number"));
            values.iter().map(number).collect::<Result<Vec<u64>, String>>()
        };
        let op = |v: &&str| {
            Does::named(v).ok_or_else(|| {
                let known = Does::ALL.map(|(word, _)| word);
                format!("\"{v}\" in \"{text}\" is none of {}", known.join(", "))
            })
        };
        match what.trim() {
            "job" => keys().map(Term::Job),
            "user" => keys().map(Term::User),
            "client" => keys().map(Term::Client),
            "file" => keys().map(Term::File),
            "op" => values.iter().map(op).collect::<Result<_, _>>().map(Term::Op),
            "path" => values.iter().map(|v| Folder::parse(v)).collect::<Result<_, _>>().map(Term::Path),
            other => Err(format!("\"{other}\" is none of job, user, client, file, op, path")),
        }
    }

    fn fits(&self, who: &Who) -> bool {
        match self {
            Term::Job(keys) => keys.contains(&who.job),
            Term::User(keys) => keys.contains(&who.user),
            Term::Client(keys) => keys.contains(&who.client),
            Term::File(keys) => keys.contains(&who.file),
            Term::Op(ops) => ops.contains(&who.does()),
            Term::Path(folders) => folders.iter().any(|folder| folder.holds(who)),
        }
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Rule, String> {
        let form = || format!("\"{text}\" is not of the form \"name: condition {{setting=value}}\"");
        let (name, rest) = text.split_once(':').ok_or_else(form)?;
        let (condition, settings) = rest.split_once('{').ok_or_else(form)?;
        let settings = settings.trim_end().strip_suffix('}').ok_or_else(form)?;
        let condition = match condition.trim() {
            "*" => Vec::new(),
            terms => terms.split('&').map(|t| Term::parse(t.trim())).collect::<Result<_, _>>()?,
        };
        let setting = |s: &str| match s.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_string(), value.trim().to_string())),
            None => Err(format!("\"{}\" in rule {} is not setting=value", s.trim(), name.trim())),
        };
        let given = settings.split(',').filter(|s| !s.trim().is_empty()).map(setting);
        let mut settings = BTreeMap::new();
        for (key, value) in given.collect::<Result<Vec<_>, _>>()? {
            if settings.insert(key.clone(), value).is_some() {
                return Err(format!("rule {} gives {key} twice", name.trim()));
            }
        }
        match name.trim() {
            "" => Err(form()),
            name => Ok(Rule { name: name.to_string(), condition, settings }),
        }
    }

    /// True if every term of its condition holds.
    pub fn fits(&self, who: &Who) -> bool {
        self.condition.iter().all(|t| t.fits(who))
    }

    /// The length of the longest path in its condition that the request is below; 0: it has none.
    fn depth(&self, who: &Who) -> usize {
        let depth = |t: &Term| match t {
            Term::Path(folders) => folders.iter().filter(|folder| folder.holds(who)).map(|folder| folder.depth).max(),
            _ => None,
        };
        self.condition.iter().filter_map(depth).max().unwrap_or(0)
    }

    /// Refuses a condition on anything but the application.
    pub fn by_job_only(&self) -> Result<(), String> {
        let other = self.condition.iter().find_map(|t| match t {
            Term::Job(_) => None,
            Term::User(_) => Some("user"),
            Term::Client(_) => Some("client"),
            Term::File(_) => Some("file"),
            Term::Op(_) => Some("op"),
            Term::Path(_) => Some("path"),
        });
        other.map_or(Ok(()), |what| Err(format!("rule {} goes by {what}; use job= or * only", self.name)))
    }

    /// A setting as a number in a range; `default` if absent.
    pub fn number(&self, setting: &str, default: f64, range: std::ops::RangeInclusive<f64>) -> Result<f64, String> {
        let Some(text) = self.settings.get(setting) else { return Ok(default) };
        text.parse::<f64>().ok().filter(|v| range.contains(v)).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            format!("{setting}={text} in rule {} is not a number from {low} to {high}", self.name)
        })
    }

    /// Refuses unknown settings.
    pub fn only(&self, known: &[&str]) -> Result<(), String> {
        match self.settings.keys().find(|k| !known.contains(&k.as_str())) {
            Some(key) => Err(format!("rule {} has no setting \"{key}\"; it has: {}", self.name, known.join(", "))),
            None => Ok(()),
        }
    }
}

/// The place of the rule that applies to a request: the first that fits, or where that goes by a path, of all that fit the one
/// with the longest path.
pub(crate) fn matching<'a>(rules: impl IntoIterator<Item = &'a Rule>, who: &Who) -> Option<usize> {
    let mut best: Option<(usize, usize)> = None;
    for (at, rule) in rules.into_iter().enumerate().filter(|(_, rule)| rule.fits(who)) {
        match (best, rule.depth(who)) {
            (None, 0) => return Some(at),
            (None, depth) => best = Some((depth, at)),
            (Some((longest, _)), depth) if depth > longest => best = Some((depth, at)),
            (Some(_), _) => {}
        }
    }
    best.map(|(_, at)| at)
}

/// Parses rules separated by semicolons. Names must be distinct.
pub(crate) fn parse(text: &str) -> Result<Vec<Rule>, String> {
    let texts = text.split(';').map(str::trim).filter(|t| !t.is_empty());
    let rules = texts.map(Rule::parse).collect::<Result<Vec<Rule>, String>>()?;
    if rules.len() > RULES_MAX {
        return Err(format!("{} rules are more than {RULES_MAX}", rules.len()));
    }
    let mut names: Vec<&str> = rules.iter().map(|r| r.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        Some(twice) => Err(format!("two rules are called \"{}\"", twice[0])),
        None => Ok(rules),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{NameOp, Naming};
    use crate::types::Op;

    const WHO: Who =
        Who { job: 17, user: 1000, client: 3, file: 9, op: Op::Read, naming: Naming { call: None, folders: [0; 4] } };

    #[test]
    fn the_first_that_fits() {
        let rules =
            parse("big: job=17|18 & op=write {weight=2}; me: user=1000 {weight=0.5, burst=3}; rest: * {}").unwrap();
        let found = rules.iter().find(|r| r.fits(&WHO)).unwrap();
        assert_eq!(found.name, "me");
        assert_eq!(found.number("weight", 1.0, 0.0..=10.0), Ok(0.5));
        assert_eq!(found.number("limit", 7.0, 0.0..=10.0), Ok(7.0));
        assert!(rules[0].fits(&Who { op: Op::Write, ..WHO }));
        assert_eq!(rules[2].settings.len(), 0);
        assert!(parse(" ; ").unwrap().is_empty());
    }

    #[test]
    fn calls_on_names_have_operations_of_their_own() {
        let rules = parse("data: op=read|write {}; made: op=create|remove {}; rest: user=1000 {}").unwrap();
        let found = |call| {
            rules.iter().find(|r| r.fits(&Who { naming: Naming { call, ..WHO.naming }, ..WHO })).unwrap().name.as_str()
        };
        assert_eq!(found(None), "data");
        assert_eq!(found(Some(NameOp::Create)), "made");
        assert_eq!(found(Some(NameOp::Remove)), "made");
        assert_eq!(found(Some(NameOp::Stat)), "rest", "what a call on names does to data means nothing");
        for (word, does) in Does::ALL {
            assert_eq!((Does::named(word), does.word()), (Some(does), Some(word)));
        }
    }

    #[test]
    fn the_longest_path_goes_first_among_paths() {
        let rules = "me: user=5 {}; wide: path=/s {}; deep: path=/s/a|/home/x & job=17 {}; rest: * {}";
        let rules = parse(rules).unwrap();
        let found = |path: &str, user, job| {
            let naming = Naming { folders: folders::of(path.as_bytes()), ..Naming::default() };
            rules[matching(&rules, &Who { naming, user, job, ..WHO }).unwrap()].name.as_str()
        };
        assert_eq!(found("s/a/f", 1, 17), "deep");
        assert_eq!(found("s/a/f", 1, 1), "wide", "the rest of its condition does not fit");
        assert_eq!(found("s/b/f", 1, 17), "wide");
        assert_eq!(found("s/ab", 1, 17), "wide", "a name is no part of another");
        assert_eq!(found("home/x/y/z/w/v", 1, 17), "deep");
        assert_eq!(found("home/f", 1, 17), "rest");
        assert_eq!(found("", 1, 17), "rest");
        assert_eq!(found("s/a/f", 5, 17), "me", "the first rule goes by no path");
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (text, says) in [
            ("job=1", "not of the form"),
            ("a: job=x {}", "\"x\" in \"job=x\" is not a whole number"),
            ("a: pid=1 {}", "\"pid\" is none of job"),
            ("a: path=/ {}", "not the path of a folder"),
            ("a: path=/a/b/c/d/e {}", "1 to 4 components"),
            ("a: path=/a/../b {}", "not the path of a folder"),
            ("a: op=sync {}", "none of read, write, stat, open"),
            ("a: * {weight=1, weight=2}", "gives weight twice"),
            (": * {weight=1}", "not of the form"),
            ("a: * {weight}", "\"weight\" in rule a is not setting=value"),
            ("a: * {}; a: * {}", "two rules are called \"a\""),
        ] {
            assert!(parse(text).unwrap_err().contains(says), "{text}");
        }
        let rule = &parse("a: * {weight=-1}").unwrap()[0];
        assert!(rule.number("weight", 1.0, 0.0..=5.0).unwrap_err().contains("not a number from 0 to 5"));
        assert!(rule.only(&["rate"]).unwrap_err().contains("no setting \"weight\"; it has: rate"));
    }
}
