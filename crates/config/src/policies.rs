//! Policies as files write them: by their name alone, or with parameters.

use impresario_toml::{KeyPath, Mistakes, shown};
use toml::{Table, Value};

/// Makes `policy = "fifo"` everywhere `policy = { name = "fifo" }`. A policy that is neither is a mistake, as is a
/// parameter that is not a single value.
pub fn policies(values: &mut Table, at: &KeyPath, mistakes: &mut Mistakes) {
    for (key, value) in values.iter_mut() {
        let path = at.key(key);
        match value {
            _ if key == "policy" => *value = Value::Table(policy(value, &path, mistakes)),
            Value::Table(table) => policies(table, &path, mistakes),
            Value::Array(array) => {
                for (i, table) in array.iter_mut().enumerate().filter_map(|(i, v)| Some((i, v.as_table_mut()?))) {
                    policies(table, &path.index(i), mistakes);
                }
            }
            _ => {}
        }
    }
}

fn policy(value: &Value, path: &KeyPath, mistakes: &mut Mistakes) -> Table {
    let named = |name: &str| Table::from_iter([("name".to_string(), Value::String(name.into()))]);
    if let Value::String(name) = value {
        return named(name);
    }
    let Some((table, name)) = value.as_table().and_then(|table| Some((table, table.get("name")?.as_str()?))) else {
        let form = "a name such as \"mlf\", or { name = \"twins\", window_us = 1000 }";
        mistakes.add(path.clone(), format!("policy must be {form}, not {}", shown(value)));
        return named("fifo");
    };
    let mut table = table.clone();
    table.retain(|param, value| {
        let single = !matches!(value, Value::Table(_) | Value::Array(_));
        if !single {
            let what = format!("{param} of policy {name} must be a number, text, true or false, not {}", shown(value));
            mistakes.add(path.key(param), what);
        }
        single
    });
    table
}
