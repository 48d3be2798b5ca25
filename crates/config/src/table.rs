//! The decision table of the policy `auto`, which a configuration and commands name as a file: `table=FILE`. What a
//! scheduler takes is its text.

use std::path::Path;

use impresario_sched::PolicySpec;
use impresario_toml::text_of;

/// The parameter.
const TABLE: &str = "table";

/// The file that a policy names as its decision table; a text has more than one line.
pub fn table_file(policy: &PolicySpec) -> Option<&Path> {
    let named = policy.params.get(TABLE).filter(|_| policy.name == "auto")?;
    (!named.is_empty() && !named.contains('\n')).then(|| Path::new(named))
}

/// The policy without its decision table if that is a file, which may be on another machine.
pub(crate) fn without_table_file(policy: &PolicySpec) -> PolicySpec {
    let mut policy = policy.clone();
    if table_file(&policy).is_some() {
        policy.params.remove(TABLE);
    }
    policy
}

/// Makes the file that a policy names as its decision table relative to a folder.
pub(crate) fn set_base(policy: &mut PolicySpec, base: &Path) {
    if let Some(file) = table_file(policy) {
        let file = base.join(file).display().to_string();
        policy.params.insert(TABLE.into(), file);
    }
}

/// The policy with the text of the decision table that it names as a file; or why that cannot be read, with the file's name.
pub fn read_table(policy: &PolicySpec) -> Result<PolicySpec, String> {
    let Some(file) = table_file(policy) else { return Ok(policy.clone()) };
    let remedy = "`impresario-lab auto train` writes such a file";
    let max_bytes = impresario_sched::policy::params::TEXT_MAX_BYTES as u64;
    let text = text_of(file, max_bytes, "a decision table", remedy).map_err(|e| e.to_string())?;
    // Also of a table in one line.
    Ok(policy.clone().with(TABLE, format!("{text}\n")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    const TEXT: &str = "[cluster]\nname = \"x\"\n[meta]\naddress = \"127.0.0.1:1\"\ndir = \"m\"\n[[data]]\nname = \"data.0\"\n\
                        address = \"127.0.0.1:2\"\ndir = \"d\"\npolicy = { name = \"auto\", table = \"mine.toml\" }\n";

    /// Clients need not have the file; the server reads it beside its configuration.
    #[test]
    fn a_table_is_a_file_beside_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::parse(TEXT, &folder.path().join("impresario.toml")).unwrap();
        let policy = &config.data[0].policy;
        let file = folder.path().join("mine.toml");
        assert_eq!(table_file(policy), Some(&*file));
        let error = read_table(policy).unwrap_err();
        assert!(error.contains("mine.toml") && error.contains("impresario-lab auto train"), "{error}");
        std::fs::write(&file, "version = 1\n[[rule]]\nname = \"all\"\nchoice = [{ policy = \"sjf\" }]").unwrap();
        let read = read_table(policy).unwrap();
        assert_eq!(table_file(&read), None);
        impresario_sched::policy::check(&read, 1).unwrap();
        // Parameters that name no file stay as they are.
        let other = PolicySpec::named("auto").with("objective", "share");
        assert_eq!(read_table(&other).unwrap(), other);
        assert_eq!(table_file(&PolicySpec::named("fifo").with(TABLE, "x")), None);
    }
}
