//! Classes: requests that share an account under a rule, either all that match it or those of each job, user, client or
//! file.
//!
//! A class outlives its requests and is identified by stable key. When there are many, classes whose account is as good
//! as new are dropped; there are never more than [`CLASSES_MAX`] plus one per rule.

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

use super::rules::{self, Rule};
use crate::names::Who;
use crate::policy::Params;

/// Maximum classes by key; further keys share the class of their rule.
const CLASSES_MAX: usize = 16 << 10;

/// New classes between two sweeps for classes to drop.
const SWEEP_EVERY: usize = 1024;

/// How a rule divides its requests into accounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Each {
    /// One account for the whole rule.
    Rule,
    Job,
    User,
    Client,
    File,
}

impl Each {
    fn parse(rule: &Rule) -> Result<Each, String> {
        match rule.settings.get("each").map(String::as_str) {
            None | Some("rule") => Ok(Each::Rule),
            Some("job") => Ok(Each::Job),
            Some("user") => Ok(Each::User),
            Some("client") => Ok(Each::Client),
            Some("file") => Ok(Each::File),
            Some(other) => Err(format!("each={other} in rule {} is none of rule, job, user, client, file", rule.name)),
        }
    }

    fn key(self, who: &Who) -> Option<u64> {
        match self {
            Each::Rule => None,
            Each::Job => Some(who.job),
            Each::User => Some(who.user),
            Each::Client => Some(who.client),
            Each::File => Some(who.file),
        }
    }

    /// In words, after a rule: ` for each job`, or nothing.
    pub fn phrase(self) -> &'static str {
        match self {
            Each::Rule => "",
            Each::Job => " for each job",
            Each::User => " for each user",
            Each::Client => " for each client",
            Each::File => " for each file",
        }
    }
}

/// A class and its account.
#[derive(Clone, Debug)]
pub(in crate::policy) struct Class<A> {
    /// Index of its rule; the number of rules for requests without a match.
    pub rule: usize,
    /// The key, if the rule has one account per key.
    pub key: Option<u64>,
    /// Requests queued or in flight.
    pub held: u32,
    /// Requests queued.
    pub queued: u32,
    /// The account.
    pub account: A,
}

/// The classes of a policy. The first ones, one per rule and one for requests without a match, always exist.
pub(in crate::policy) struct Classes<A> {
    pub rules: Vec<Rule>,
    each: Vec<Each>,
    classes: Rows<Class<A>>,
    by_key: FxHashMap<(usize, u64), u32>,
    since_sweep: usize,
}

impl<A: Default> Classes<A> {
    /// Parses the rules in a parameter; `known` are the settings besides `each`.
    pub fn parse(params: &Params, name: &'static str, known: &[&str]) -> Result<Classes<A>, String> {
        let rules = rules::parse(params.text(name))?;
        let known: Vec<&str> = known.iter().copied().chain(["each"]).collect();
        rules.iter().try_for_each(|r| r.only(&known))?;
        let each = rules.iter().map(Each::parse).collect::<Result<Vec<Each>, String>>()?;
        let whole = |rule| Class { rule, key: None, held: 0, queued: 0, account: A::default() };
        let classes = (0..=rules.len()).map(whole).collect();
        Ok(Classes { rules, each, classes, by_key: FxHashMap::default(), since_sweep: 0 })
    }

    /// How a rule divides its requests.
    pub fn each(&self, rule: usize) -> Each {
        self.each.get(rule).copied().unwrap_or(Each::Rule)
    }

    /// The matching rule, and the key within it.
    fn look_up(&self, who: &Who) -> (usize, Option<u64>) {
        let rule = rules::matching(&self.rules, who).unwrap_or(self.rules.len());
        (rule, self.each(rule).key(who))
    }

    /// The matching rule, and the class of a request if it exists.
    pub fn matching(&self, who: &Who) -> (usize, Option<&Class<A>>) {
        let (rule, key) = self.look_up(who);
        let class = key.map_or(Some(rule as u32), |key| self.by_key.get(&(rule, key)).copied());
        (rule, class.map(|class| self.get(class)))
    }

    /// The class of a request, created if missing. `as_new` says whether an account may be dropped.
    pub fn of(&mut self, who: &Who, as_new: impl Fn(&Class<A>) -> bool) -> u32 {
        match self.look_up(who) {
            (rule, None) => rule as u32,
            (rule, Some(key)) => self.named(rule, key, as_new),
        }
    }

    /// The class of a rule and a key, created if missing.
    pub fn named(&mut self, rule: usize, key: u64, as_new: impl Fn(&Class<A>) -> bool) -> u32 {
        if let Some(&class) = self.by_key.get(&(rule, key)) {
            return class;
        }
        self.since_sweep += 1;
        if self.by_key.len() >= CLASSES_MAX / 2 && self.since_sweep > SWEEP_EVERY {
            self.since_sweep = 0;
            let classes = &mut self.classes;
            self.by_key.retain(|_, c| {
                let class = &classes[*c];
                let keep = class.held > 0 || !as_new(class);
                if !keep {
                    classes.release(*c);
                }
                keep
            });
        }
        if self.by_key.len() >= CLASSES_MAX {
            return rule as u32;
        }
        let fresh = Class { rule, key: Some(key), held: 0, queued: 0, account: A::default() };
        let class = self.classes.insert(fresh);
        self.by_key.insert((rule, key), class);
        class
    }

    /// The class of the rule of that name and a key, if it exists.
    pub fn find(&self, rule: &str, key: Option<u64>) -> Option<u32> {
        let rule = self.rules.iter().position(|r| r.name == rule)?;
        match key {
            None => Some(rule as u32),
            Some(key) => self.by_key.get(&(rule, key)).copied(),
        }
    }

    /// A class.
    pub fn get(&self, class: u32) -> &Class<A> {
        &self.classes[class]
    }

    /// A class, mutable.
    pub fn get_mut(&mut self, class: u32) -> &mut Class<A> {
        &mut self.classes[class]
    }

    /// All classes in use.
    pub fn all(&self) -> impl Iterator<Item = &Class<A>> {
        let whole = self.classes.iter().take(self.rules.len() + 1);
        whole.chain(self.by_key.values().map(|c| &self.classes[*c]))
    }

    /// The class that corresponds to another policy's class: the rule of the same name, the same key.
    pub fn counterpart<B>(&mut self, others: &Classes<B>, other: &Class<B>) -> Option<u32> {
        let name = &others.rules.get(other.rule)?.name;
        let rule = self.rules.iter().position(|r| r.name == *name)?;
        let same = (self.each(rule) == Each::Rule) == other.key.is_none();
        same.then(|| other.key.map_or(rule as u32, |key| self.named(rule, key, |_| false)))
    }

    /// Classes whose rule keeps its name keep their accounts.
    pub fn take_over(&mut self, others: &Classes<A>)
    where
        A: Copy,
    {
        for class in others.all() {
            if let Some(mine) = self.counterpart(others, class) {
                self.get_mut(mine).account = class.account;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Naming;
    use crate::policy::{ParamInfo, params::Range};
    use crate::types::Op;

    const RULES: ParamInfo = ParamInfo { name: "rules", default: "", range: Range::Text("rules"), doc: "" };

    fn classes(text: &str) -> Result<Classes<u32>, String> {
        const INFOS: &[ParamInfo] = &[RULES];
        let given = [("rules".to_string(), text.to_string())].into();
        Classes::parse(&Params::new("test", INFOS, &given).unwrap(), "rules", &["weight"])
    }

    fn who(job: u64, user: u64) -> Who {
        Who { job, user, client: 0, file: 0, op: Op::Read, naming: Naming::default() }
    }

    #[test]
    fn one_account_or_one_each() {
        let mut c = classes("big: job=1 {weight=2}; rest: user=5 {each=job}").unwrap();
        assert_eq!(c.of(&who(1, 5), |_| false), 0);
        assert_eq!(c.of(&who(2, 6), |_| false), 2, "no rule matches");
        assert!(matches!(c.matching(&who(2, 5)), (1, None)));
        let (a, b) = (c.of(&who(2, 5), |_| false), c.of(&who(3, 5), |_| false));
        assert!(a != b && c.matching(&who(3, 5)).1.is_some_and(|class| std::ptr::eq(class, c.get(b))));
        assert_eq!((c.get(b).key, c.get(b).rule, c.all().count()), (Some(3), 1, 5));
        assert!(classes("a: * {each=pid}").err().unwrap().contains("each=pid in rule a is none of rule, job"));
        assert!(classes("a: * {rate=1}").err().unwrap().contains("it has: weight, each"));
    }

    #[test]
    fn keys_are_bounded_and_idle_ones_dropped() {
        let mut c = classes("rest: * {each=job}").unwrap();
        for job in 0..100_000 {
            let class = c.of(&who(job, 0), |_| false);
            assert!(job < CLASSES_MAX as u64 || class == 0, "beyond the limit they share the rule's class");
        }
        assert_eq!(c.all().count(), CLASSES_MAX + 2);
        let class = c.of(&who(1, 0), |_| true);
        c.get_mut(class).held = 1;
        for job in 200_000..202_000 {
            c.of(&who(job, 0), |_| true);
        }
        assert!(
            c.all().count() < 3000 && c.matching(&who(1, 0)).1.is_some_and(|known| std::ptr::eq(known, c.get(class)))
        );
    }
}
