//! Prometheus' text format, version 0.0.4.

use std::fmt::Write;

use serde_json::Value;

use crate::families::{FAMILIES, Family, Kind};

/// Maximum bytes of a label's value; longer ones are cut.
const LABEL_MAX_BYTES: usize = 128;
/// Maximum labels of a metric besides the server's name.
const LABELS_MAX: usize = 4;

/// The labels of a value: names and values.
type Labels<'a> = Vec<(&'a str, String)>;

/// All metrics that `status` has values for, each with the label `server`.
pub fn text(server: &str, status: &Value) -> String {
    let mut out = String::with_capacity(16 << 10);
    for family in FAMILIES {
        let mut found = Vec::new();
        for place in family.places {
            let (path, constant) = place.split_once(' ').unwrap_or((place, ""));
            let known = found.len();
            find(status, path, vec![("server", server.to_string())], &mut found);
            if let Some((name, value)) = constant.split_once('=') {
                found[known..].iter_mut().for_each(|(labels, _)| labels.push((name, value.into())));
            }
        }
        // A metric is written with its description once it has a value.
        let mut lines = String::new();
        for (labels, value) in found {
            match family.kind {
                Kind::Histogram => histogram(&mut lines, family, &labels, value),
                Kind::Counter | Kind::Gauge => scalar(&mut lines, family, &labels, value),
            }
        }
        if !lines.is_empty() {
            let (name, kind) = (family.name, family.kind.name());
            // Writing to a string cannot fail.
            let _ = write!(out, "# HELP impresario_{name} {}\n# TYPE impresario_{name} {kind}\n{lines}", family.help);
        }
    }
    out
}

/// Collects the values at a place, with their labels.
fn find<'a>(value: &'a Value, path: &'a str, mut labels: Labels<'a>, found: &mut Vec<(Labels<'a>, &'a Value)>) {
    let (step, rest) = match path.split_once('/') {
        Some((step, rest)) => (step, Some(rest)),
        None => (path, None),
    };
    let mut go_on = |value: &'a Value, labels: Labels<'a>| match rest {
        Some(rest) if labels.len() <= LABELS_MAX => find(value, rest, labels, found),
        Some(_) => {}
        None => found.push((labels, value)),
    };
    let inside = |open, close| step.strip_prefix(open).and_then(|s: &str| s.strip_suffix(close));
    if let Some(label) = inside('[', ']') {
        for (index, element) in value.as_array().into_iter().flatten().enumerate() {
            let told = label.split(',').filter_map(|label| match label.split_once('=') {
                Some((label, member)) => Some((label, plain(element.get(member)?))),
                None => Some((label, index.to_string())),
            });
            let told: Labels<'a> = told.collect();
            if !told.is_empty() {
                go_on(element, labels.iter().cloned().chain(told).collect());
            }
        }
    } else if let Some(label) = inside('{', '}') {
        for (key, member) in value.as_object().into_iter().flatten() {
            let mut labels = labels.clone();
            labels.push((label, key.clone()));
            go_on(member, labels);
        }
    } else if let Some((key, label)) = step.split_once('<') {
        if let Some(told) = value.get(key) {
            labels.push((label.trim_end_matches('>'), plain(told)));
            go_on(&Value::Bool(true), labels);
        }
    } else if let Some(member) = value.get(step) {
        go_on(member, labels);
    }
}

/// A value as text, without quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

fn scalar(out: &mut String, family: &Family, labels: &Labels<'_>, value: &Value) {
    let Some(value) = number(value) else { return };
    line(out, family.name, "", labels, value / family.per);
}

/// A number, or a truth as 1 or 0.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_bool().map(|b| if b { 1.0 } else { 0.0 }))
}

/// A [`Cumulative`](impresario_base::histogram::Cumulative) of the status.
fn histogram(out: &mut String, family: &Family, labels: &Labels<'_>, value: &Value) {
    let (Some(under), Some(count), Some(sum)) =
        (value["under"].as_array(), value["count"].as_u64(), value["sum"].as_f64())
    else {
        return;
    };
    let limits = under.iter().filter_map(|pair| Some((pair[0].as_f64()? / family.per, pair[1].as_u64()?)));
    for (limit, below) in limits.map(|(limit, below)| (limit.to_string(), below)).chain([("+Inf".into(), count)]) {
        let mut labels = labels.clone();
        labels.push(("le", limit));
        line(out, family.name, "_bucket", &labels, below as f64);
    }
    line(out, family.name, "_sum", labels, sum / family.per);
    line(out, family.name, "_count", labels, count as f64);
}

fn line(out: &mut String, name: &str, suffix: &str, labels: &Labels<'_>, value: f64) {
    let _ = write!(out, "impresario_{name}{suffix}{{");
    for (at, (label, text)) in labels.iter().enumerate() {
        let _ = write!(out, "{}{label}=\"", if at == 0 { "" } else { "," });
        let mut bytes = 0;
        for c in text.chars() {
            bytes += c.len_utf8();
            if bytes > LABEL_MAX_BYTES {
                break;
            }
            match c {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                c => out.push(c),
            }
        }
        out.push('"');
    }
    let _ = writeln!(out, "}} {value}");
}

#[cfg(test)]
mod tests {
    use impresario_base::Histogram;
    use serde_json::json;

    use super::*;

    #[test]
    fn values_come_with_their_labels_in_base_units() {
        let mut times = Histogram::<2>::default();
        [1_000, 3_000, 5_000_000].iter().for_each(|ns| times.record(*ns));
        let status = json!({
            "connections": { "open": 3, "calls": 18 },
            "engine": {
                "policy": { "name": "mlf" },
                "lanes": [{ "in_flight_batches": 2 }, { "in_flight_batches": 0 }],
                "statistics": { "read_bytes": 4096, "write_bytes": 0 },
                "histograms": { "queue_ns": times.cumulative(11, 13) },
            },
            "meta": { "data_servers_answer": true, "operations": { "create": { "faults": 2 } } },
        });
        let expected = r#"
impresario_connections{server="a"} 3
impresario_calls_total{server="a"} 18
impresario_policy_info{server="a",policy="mlf"} 1
impresario_in_flight_batches{server="a",lane="0"} 2
impresario_in_flight_batches{server="a",lane="1"} 0
impresario_bytes_total{server="a",operation="read"} 4096
impresario_bytes_total{server="a",operation="write"} 0
impresario_queue_seconds_bucket{server="a",le="0.000002048"} 1
impresario_queue_seconds_bucket{server="a",le="0.000004096"} 2
impresario_queue_seconds_bucket{server="a",le="0.000008192"} 2
impresario_queue_seconds_bucket{server="a",le="+Inf"} 3
impresario_queue_seconds_sum{server="a"} 0.005004
impresario_queue_seconds_count{server="a"} 3
impresario_meta_data_servers_answer{server="a"} 1
impresario_meta_faults_total{server="a",operation="create"} 2
"#;
        let text = text("a", &status);
        let values: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(values, expected.trim().lines().collect::<Vec<_>>());
        assert!(
            text.contains("# HELP impresario_connections Open connections.\n# TYPE impresario_connections gauge\n")
        );
        assert_eq!(text.matches("# TYPE").count(), 8);
    }

    #[test]
    fn hostile_and_incomplete_statuses_give_valid_lines() {
        let long = "x".repeat(1000);
        let status = json!({
            "connections": "many",
            "engine": { "lanes": { "0": 1 }, "histograms": { "queue_ns": { "under": 7 } }, "policy": null },
            "meta": { "operations": { "a\"b\\c\nd": { "faults": 1 }, long: { "faults": 1 }, "none": {} } },
        });
        let text = text("s\"", &status);
        let values: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let cut = "x".repeat(LABEL_MAX_BYTES);
        assert_eq!(
            values,
            [
                r#"impresario_meta_faults_total{server="s\"",operation="a\"b\\c\nd"} 1"#.to_string(),
                format!(r#"impresario_meta_faults_total{{server="s\"",operation="{cut}"}} 1"#),
            ]
        );
        assert_eq!(super::text("", &Value::Null), "");
    }

    #[test]
    fn elements_are_told_apart_by_a_member() {
        let status = json!({
            "jobs": [{ "job": 7, "calls": 1 }, { "job": "others", "calls": 2 }, { "calls": 3 }],
            "limits": [{ "rule": "a", "key": 17, "waiting": 4 }, { "rule": "a", "waiting": 5 }],
        });
        let mut found = Vec::new();
        find(&status, "jobs/[job=job]/calls", Vec::new(), &mut found);
        let found: Vec<_> = found.into_iter().map(|(labels, value)| (labels[0].1.clone(), value.as_u64())).collect();
        assert_eq!(found, [("7".to_string(), Some(1)), ("others".to_string(), Some(2))]);
        let mut found = Vec::new();
        find(&status, "limits/[rule=rule,key=key]/waiting", Vec::new(), &mut found);
        let found: Vec<_> = found.into_iter().map(|(labels, value)| (labels, value.as_u64())).collect();
        let (rule, key) = (("rule", "a".to_string()), ("key", "17".to_string()));
        assert_eq!(found, [(vec![rule.clone(), key], Some(4)), (vec![rule], Some(5))]);
    }

    #[test]
    fn names_follow_the_conventions() {
        let mut seen = std::collections::BTreeSet::new();
        for family in FAMILIES {
            assert!(seen.insert(family.name), "{} is there twice", family.name);
            assert!(family.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{}", family.name);
            assert_eq!(family.kind == Kind::Counter, family.name.ends_with("_total"), "{}", family.name);
            assert!(family.help.ends_with('.') && !family.help.contains(['\\', '\n']), "{}", family.name);
            if family.per != 1.0 {
                assert!(family.name.contains("_seconds"), "{}", family.name);
            }
        }
    }
}
