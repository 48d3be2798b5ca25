//! Changes of `[allocation]` in the text of a file: comments, and all that the change is not about, stay.

use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, value};

use super::AllocationRule;

impl AllocationRule {
    /// The text of a configuration with this rule: in the place of the one for the same jobs and machines, or before all
    /// others.
    pub fn put_into(&self, text: &str) -> Result<String, String> {
        edit(text, |rules| {
            let mut is_put = false;
            let mut all = ArrayOfTables::new();
            for table in rules.iter() {
                let mut table = table.clone();
                if !is_put && self.is_for_same(&table) {
                    is_put = true;
                    table.insert("nodes", list(&self.nodes));
                }
                all.push(table);
            }
            if is_put {
                return all;
            }
            let mut with = ArrayOfTables::new();
            with.push(self.table());
            all.iter().for_each(|table| with.push(table.clone()));
            with
        })
    }

    /// The text without the rule for the same jobs and machines; `None`: there is none.
    pub fn remove_from(&self, text: &str) -> Result<Option<String>, String> {
        let mut is_there = false;
        let text = edit(text, |rules| {
            let mut left = ArrayOfTables::new();
            for table in rules.iter() {
                match self.is_for_same(table) {
                    true => is_there = true,
                    false => left.push(table.clone()),
                }
            }
            left
        })?;
        Ok(is_there.then_some(text))
    }

    fn is_for_same(&self, table: &Table) -> bool {
        let values = |key| table.get(key).and_then(Item::as_array).into_iter().flat_map(Array::iter);
        let jobs: Vec<u64> = values("jobs").filter_map(|job| u64::try_from(job.as_integer()?).ok()).collect();
        let hosts: Vec<&str> = values("hosts").filter_map(|host| host.as_str()).collect();
        jobs == self.jobs && hosts == self.hosts
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.decor_mut().set_prefix("\n");
        if !self.jobs.is_empty() {
            // Larger numbers are refused before: TOML has none.
            let jobs: Array = self.jobs.iter().map(|job| i64::try_from(*job).unwrap_or(i64::MAX)).collect();
            table.insert("jobs", value(jobs));
        }
        if !self.hosts.is_empty() {
            table.insert("hosts", list(&self.hosts));
        }
        table.insert("nodes", list(&self.nodes));
        table
    }
}

fn list(names: &[String]) -> Item {
    value(names.iter().map(String::as_str).collect::<Array>())
}

fn edit(text: &str, change: impl FnOnce(ArrayOfTables) -> ArrayOfTables) -> Result<String, String> {
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| error.to_string())?;
    let section = document.entry("allocation").or_insert_with(|| {
        let mut section = Table::new();
        section.set_implicit(true);
        Item::Table(section)
    });
    let remedy = "write it as sections [allocation] and [[allocation.rule]]";
    let section = section.as_table_mut().ok_or_else(|| format!("allocation is written in braces; {remedy}"))?;
    let rules = match section.remove("rule") {
        None => ArrayOfTables::new(),
        Some(Item::ArrayOfTables(rules)) => rules,
        Some(_) => return Err(format!("allocation.rule is written in brackets; {remedy}")),
    };
    let rules = change(rules);
    if !rules.is_empty() {
        section.insert("rule", Item::ArrayOfTables(rules));
    }
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Allocation, Config, Spread};

    const FILE: &str = r#"# The cluster of the second floor.
[meta]
address = "127.0.0.1:7000"
dir = "meta"

[[data]]
name = "data.0"
address = "127.0.0.1:7100"
dir = "data.0"

[[io]]
name = "io.0" # the old one
address = "127.0.0.1:7200"

[[io]]
name = "io.1"
address = "127.0.0.1:7201"
"#;

    fn rule(jobs: &[u64], hosts: &[&str], nodes: &[&str]) -> AllocationRule {
        let strings = |names: &[&str]| names.iter().map(|name| (*name).to_string()).collect();
        AllocationRule { jobs: jobs.to_vec(), hosts: strings(hosts), nodes: strings(nodes) }
    }

    fn allocation(text: &str) -> Allocation {
        Config::parse(text, Path::new("/c.toml")).unwrap_or_else(|e| panic!("{e}\n{text}")).allocation
    }

    #[test]
    fn rules_come_and_go_and_the_rest_stays() {
        let (first, second) = (rule(&[7], &[], &["io.0"]), rule(&[8, 9], &["n*"], &[]));
        let text = first.put_into(FILE).unwrap();
        assert!(text.starts_with(FILE), "{text}");
        assert_eq!(allocation(&text).rules, std::slice::from_ref(&first));
        let text = second.put_into(&text).unwrap();
        assert_eq!(allocation(&text).rules, [second.clone(), first.clone()], "the newest goes first");
        let changed = rule(&[7], &[], &["io.1", "io.0"]);
        let text = changed.put_into(&text).unwrap();
        assert_eq!(allocation(&text).rules, [second.clone(), changed], "in its place");
        let text = second.remove_from(&text).unwrap().unwrap();
        assert_eq!(second.remove_from(&text).unwrap(), None);
        let text = first.remove_from(&text).unwrap().unwrap();
        assert_eq!(text.trim_end(), FILE.trim_end());
    }

    #[test]
    fn a_section_keeps_its_comments() {
        let section = "\n# Machines of a rack share a node.\n[allocation]\nspread = \"host\" # not by client\n";
        let text = rule(&[7], &[], &["io.0"]).put_into(&format!("{FILE}{section}")).unwrap();
        assert!(text.starts_with(&format!("{FILE}{section}")), "{text}");
        assert_eq!(allocation(&text), Allocation { spread: Spread::Host, rules: vec![rule(&[7], &[], &["io.0"])] });
        let bad = format!("{FILE}\n[allocation]\nrule = [{{ nodes = [] }}]\n");
        assert!(rule(&[7], &[], &["io.0"]).put_into(&bad).unwrap_err().contains("[[allocation.rule]]"));
    }
}
