//! Every error about a scenario file: its position and text; the template has every key and default; sweeps and
//! command-line settings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use impresario_device::{DeviceParams, FlashParams};
use impresario_toml::value_at_mut;

use super::*;
use crate::model::{Application, Collective, Device, Fault, FaultKind, FileAt, IoNodes, Operation, RandomFaults};

const GOOD: &str = r#"title = "t"
seed = 3

[io_nodes]
policy = "fifo"
threads = 4

[servers]
policy = { name = "mlf" }
device = "old"

[device.old]
kind = "disk"
rpm = 5400

[[application]]
name = "a"
pattern = "strided"

[[application]]
name = "b"
op = "write"

[[fault]]
at_s = 1.0
for_s = 0.5
what = "slow-disk"
which = 0
"#;

fn no_traces(name: &str) -> Result<Vec<TracedAccess>, String> {
    Err(format!("{name}: cannot be read"))
}

fn read_with(text: &str, overrides: &Overrides) -> Result<Study, String> {
    Study::read(text, Path::new("s.toml"), overrides, &mut no_traces).map_err(|e| e.to_string())
}

fn read(text: &str) -> Result<Study, String> {
    read_with(text, &Overrides::default())
}

fn complaints(text: &str) -> Vec<String> {
    read(text).map(|study| panic!("accepted: {study:?}")).unwrap_err().lines().map(str::to_string).collect()
}

/// Replaces one line of the valid file and expects exactly one error, at `place`, containing each of `what`.
#[track_caller]
fn one(line: &str, instead: &str, place: &str, what: &[&str]) {
    assert_eq!(GOOD.matches(line).count(), 1, "{line} is not once in the good file");
    let found = complaints(&GOOD.replace(line, instead));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with(&format!("s.toml:{place}: ")), "{found:?} is not at {place}");
    for what in what {
        assert!(found[0].contains(what), "{found:?} does not say {what:?}");
    }
}

#[test]
fn a_valid_file_is_one_point() {
    let study = read(GOOD).unwrap();
    assert_eq!((study.points.len(), study.repetitions, study.runs()), (1, 1, 1));
    let scenario = study.scenario(0, 0);
    assert_eq!((scenario.seed, scenario.servers.policy.name.as_str()), (3, "mlf"));
    assert_eq!(scenario.io_nodes.unwrap().policy.name, "fifo");
    assert_eq!(scenario.application[1].op, Operation::Write);
    assert_eq!(scenario.device.len(), 1);
    assert_eq!(scenario.fault[0].factor, 10.0);
}

#[test]
fn metadata_of_other_programs_is_ignored() {
    let with = format!("{GOOD}\n[metadata]\nclaims = [1]\n[[metadata.plots]]\nwhat = \"x\"\n");
    assert_eq!(read(&with).unwrap().first(), read(GOOD).unwrap().first());
}

#[test]
fn unknown_keys_name_the_nearest() {
    one("threads = 4", "thread = 4", "6:1", &["unknown key thread in io_nodes", "did you mean threads?"]);
    one("name = \"b\"", "  colour = 1", "21:3", &["unknown key colour in application[1]", "known are name, copies"]);
    one("title = \"t\"", "titel = \"t\"", "1:1", &["unknown key titel; did you mean title?"]);
    one("[io_nodes]", "[ionodes]", "4:2", &["unknown section ionodes", "did you mean io_nodes?"]);
    one("rpm = 5400", "rpn = 5400", "14:1", &["unknown key rpn in device.old", "did you mean rpm?"]);
    one("which = 0", "which = 0\nfctor = 2", "29:1", &["unknown key fctor in fault[0]", "did you mean factor?"]);
}

#[test]
fn wrong_types_say_what_to_write() {
    one("seed = 3", "seed = \"3\"", "2:8", &["seed must be a whole number without quotes or suffix, not \"3\""]);
    one("seed = 3", "seed = -3", "2:8", &["seed must be a whole number", "not -3"]);
    one("seed = 3", "time_limit_s = \"1h\"", "2:16", &["time_limit_s must be a number of seconds", "not \"1h\""]);
    one("threads = 4", "threads = 1e3", "6:11", &["threads must be a whole number", "not 1000.0"]);
    one("threads = 4", "count = 70000", "6:9", &["count must be a whole number", "at most 65535", "70000"]);
    one("threads = 4", "split = \"yes\"", "6:9", &["split must be true or false, not \"yes\""]);
    one("title = \"t\"", "title = 5", "1:9", &["title must be text in quotes, not 5"]);
    one("name = \"b\"", "request_bytes = \"64k\"", "21:17", &["whole number of bytes", "not \"64k\""]);
    one("title = \"t\"", "assumptions = \"x\"", "1:15", &["assumptions must be a list of sentences"]);
    one("title = \"t\"", "network = 5", "1:11", &["network must be a section [network], not 5"]);
    one("policy = \"fifo\"", "policy = 7", "5:10", &["policy must be a name such as \"mlf\"", "not 7"]);
    one(
        "policy = \"fifo\"",
        "policy = { name = \"fifo\", x = [1] }",
        "5:31",
        &["x of policy fifo must be a number", "not a list"],
    );
    one("rpm = 5400", "rpm = \"fast\"", "14:7", &["rpm must be a whole number", "\"fast\""]);
    one("seed = 3", "seed = 1979-05-27", "2:8", &["whole number", "1979-05-27"]);
}

#[test]
fn words_are_listed() {
    one("pattern = \"strided\"", "pattern = \"striped\"", "18:11", &["\"contiguous\"", "did you mean strided?"]);
    one("what = \"slow-disk\"", "what = \"fire\"", "27:8", &["what is \"fire\"", "\"lost-io-node\""]);
    one("kind = \"disk\"", "kind = \"disc\"", "13:8", &["kind is \"disc\"", "did you mean disk?"]);
    one("kind = \"disk\"", "", "12:1", &["device.old has no kind"]);
    one("at_s = 1.0", "", "24:1", &["fault[0] has no at_s; add it, for example: at_s = 1.5"]);
    one("op = \"write\"", "op = [1]", "22:6", &["op"]);
}

#[test]
fn invalid_values_are_reported_at_their_position() {
    one("policy = \"fifo\"", "policy = \"fido\"", "5:10", &["there is no policy \"fido\"", "did you mean fifo?"]);
    one("{ name = \"mlf\" }", "{ name = \"twins\" }", "9:10", &["twins", "lane"]);
    one("{ name = \"mlf\" }", "{ name = \"mlf\", quantums = 8 }", "9:10", &["no parameter \"quantums\""]);
    one("device = \"old\"", "device = \"olt\"", "10:10", &["there is no device \"olt\"; did you mean \"old\"?"]);
    one("name = \"b\"", "request_bytes = 0", "21:17", &["request_bytes: 0 is not a number from 1"]);
    one("rpm = 5400", "rpm = 1", "14:7", &["rpm is 1; it must be between"]);
    one("which = 0", "which = 9", "28:9", &["which", "9 is not there", "4 data servers"]);
    let found = complaints("seed = 1\n");
    assert!(found.len() == 1 && found[0].starts_with("s.toml:1:1: ") && found[0].contains("application"), "{found:?}");
}

#[test]
fn brackets_and_syntax() {
    let found = complaints("[application]\nname = \"x\"\n");
    assert!(found[0].starts_with("s.toml:1:1: application must be sections [[application]]"), "{found:?}");
    let found = complaints("title = \"t\nseed = 1\n");
    assert!(found.len() == 1 && found[0].starts_with("s.toml:1:"), "{found:?}");
}

#[test]
fn all_errors_are_reported_at_once_in_file_order() {
    let text = GOOD
        .replace("seed = 3", "sed = 3")
        .replace("threads = 4", "threads = \"4\"")
        .replace("\"mlf\"", "\"mfl\"")
        .replace("rpm = 5400", "rpm = 5400\nheads = \"x\"")
        .replace("\"strided\"", "\"stride\"");
    let found = complaints(&text);
    let says = ["sed", "threads", "mfl", "heads", "stride"];
    assert_eq!(found.len(), says.len(), "{found:#?}");
    for (line, what) in found.iter().zip(says) {
        assert!(line.contains(what), "{line} does not say {what}");
    }
}

#[test]
fn a_sweep_makes_points_and_seeds_count_up() {
    let text = format!(
        "repetitions = 2\n{GOOD}\n[sweep]\nservers.policy = [\"fifo\", {{ name = \"mlf\" }}]\n\
         \"application.0.request_bytes\" = {{ from = 4096, to = 16384, steps = 3, scale = \"log\" }}\n"
    );
    let study = read(&text).unwrap();
    assert_eq!(study.keys, ["servers.policy", "application.0.request_bytes"]);
    assert_eq!((study.points.len(), study.runs()), (6, 12));
    assert_eq!(study.points[4].values, ["mlf", "8192"]);
    let scenario = study.scenario(4, 1);
    assert_eq!((scenario.seed, scenario.application[0].request_bytes), (4, 8192));
    assert_eq!(scenario.application[1].request_bytes, Application::default().request_bytes);

    let zipped = text.replace("[sweep]", "[sweep]\nzip = true").replace("steps = 3", "steps = 2");
    let study = read(&zipped).unwrap();
    assert_eq!(study.points.iter().map(|p| p.values.join(" ")).collect::<Vec<_>>(), ["fifo 4096", "mlf 16384"]);
}

#[test]
fn errors_in_sweeps_name_their_line() {
    let with = |sweep: &str| complaints(&format!("{GOOD}[sweep]\n{sweep}\n")).join("\n");
    assert!(with("servers.polcy = [1]").contains("s.toml:30:"), "{}", with("servers.polcy = [1]"));
    assert!(with("servers.polcy = [1]").contains("did you mean policy?"));
    assert!(with("\"servers.policy\" = [\"mlf\", \"fido\"]").contains("servers.policy = fido of the sweep: "));
    assert!(with("\"application.7.op\" = [\"read\"]").contains("there are 2"));
    assert!(with("zip = 1").contains("zip must be true or false"));
    assert!(with("seed = 5").contains("seed of the sweep: must be a list"));
    let unequal = with("zip = true\nseed = [1, 2]\n\"servers.count\" = [1]");
    assert!(unequal.contains("s.toml:29:") && unequal.contains("one length"), "{unequal}");
    assert!(complaints(&format!("repetitions = 0\n{GOOD}"))[0].contains("between 1 and 10000"));
    assert!(complaints(&format!("sweep = 0\n{GOOD}"))[0].contains("must be a section [sweep]"));
}

#[test]
fn the_command_line_sets_keys_and_is_named_in_errors() {
    let set = |key: &str, value: &str| Overrides {
        set: vec![(key.into(), crate::sweep::value(value))],
        ..Overrides::default()
    };
    let study = read_with(GOOD, &set("application.*.requests", "7")).unwrap();
    assert!(study.scenario(0, 0).application.iter().all(|a| a.requests == 7));
    let study = read_with(GOOD, &set("servers.policy", "fifo")).unwrap();
    assert_eq!(study.first().servers.policy.name, "fifo");
    let said = read_with(GOOD, &set("servers.pol", "fifo")).unwrap_err();
    assert!(said.starts_with("s.toml: --set servers.pol=fifo: unknown key pol in servers; did you mean"), "{said}");
    let said = read_with(GOOD, &set("application.0.request_bytes", "0")).unwrap_err();
    assert!(said.starts_with("s.toml: --set application.0.request_bytes=0: "), "{said}");

    let overrides = Overrides {
        sweep: vec![("servers.count".into(), crate::sweep::values("1,2,4").unwrap())],
        repetitions: Some(3),
        seed: Some(9),
        ..Overrides::default()
    };
    let study = read_with(GOOD, &overrides).unwrap();
    assert_eq!((study.runs(), study.scenario(2, 2).servers.count, study.scenario(2, 2).seed), (9, 4, 11));
    let said = read_with(GOOD, &Overrides { repetitions: Some(0), ..Overrides::default() }).unwrap_err();
    assert!(said.contains("--repetitions is 0"), "{said}");
}

#[test]
fn traces_come_from_the_caller() {
    let text = "[[application]]\npattern = \"trace\"\nprocesses = 1\ntrace_file = \"job.csv\"\n";
    let said = complaints(text);
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0], "s.toml:4:14: trace_file: job.csv: cannot be read");
    let access = TracedAccess { process: 0, file: 0, op: Operation::Read, offset: 0, len: 100, think_ns: 0 };
    let mut asked = 0;
    let mut find = |name: &str| {
        asked += 1;
        assert_eq!(name, "job.csv");
        Ok(vec![access; 3])
    };
    let study = Study::read(text, Path::new("s.toml"), &Overrides::default(), &mut find).unwrap();
    assert_eq!(study.scenario(0, 0).application[0].trace, [access; 3]);
    assert_eq!(asked, 1);
    assert_eq!(study.scenario(0, 0).application[0].processes, 1);
}

#[test]
fn random_damage_never_panics() {
    let text = format!("{GOOD}[sweep]\n\"servers.policy\" = [\"fifo\", {{ name = \"mlf\" }}]\n");
    for cut in 0..text.len() {
        let _ = read(&text[..cut]);
        for damage in ["[", "]", "\"", "=", "{", "\n", "."] {
            let _ = read(&format!("{}{damage}{}", &text[..cut], &text[cut + 1..]));
        }
    }
}

/// The keys of a tree of values with their values, ignoring positions in lists and names of devices.
fn keys(value: &Value, path: &str, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Table(table) if !path.ends_with("policy") => {
            table.iter().for_each(|(key, value)| keys(value, &format!("{path}.{key}"), into));
        }
        Value::Array(array) if !array.is_empty() => array.iter().for_each(|value| keys(value, path, into)),
        value => drop(into.insert(path.trim_start_matches('.').to_string(), value.clone())),
    }
}

/// A scenario with everything present, at its defaults.
fn everything() -> Scenario {
    Scenario {
        title: "A template".into(),
        io_nodes: Some(IoNodes::default()),
        device: BTreeMap::from([
            ("disk".into(), Device::Disk(DeviceParams::default())),
            ("flash".into(), Device::Flash(FlashParams::default())),
        ]),
        application: vec![Application {
            collective: Some(Collective::default()),
            starts_us: vec![0.0],
            files: vec![FileAt { key: 1, server: 0 }],
            trace_file: Some("job.dxt".into()),
            ..Application::default()
        }],
        fault: vec![Fault { at_s: 1.0, for_s: 0.5, what: FaultKind::SlowDisk, which: 0, factor: 10.0 }],
        random_faults: Some(RandomFaults::default()),
        ..Scenario::default()
    }
}

#[test]
fn the_template_has_every_key_with_its_default() {
    assert_eq!(read(TEMPLATE).unwrap().first().application, [Application::default()]);
    // Lines that begin with # and no space are keys that are absent by default.
    let full = full_template(&[]);
    let mut values = Tree::parse(&full, Path::new("")).unwrap().values;
    assert!(values.remove("sweep").is_some() && values.remove("repetitions") == Some(Value::Integer(1)));
    let (mut found, mut wanted) = (BTreeMap::new(), BTreeMap::new());
    for section in ["io_nodes", "servers"] {
        let name = values[section]["policy"].clone();
        values[section]["policy"] = Value::Table(Table::from_iter([("name".to_string(), name)]));
    }
    keys(&Value::Table(values), "", &mut found);
    keys(&Value::try_from(everything()).unwrap(), "", &mut wanted);
    let names = |m: &BTreeMap<String, Value>| m.keys().cloned().collect::<BTreeSet<String>>();
    let (found_names, wanted_names) = (names(&found), names(&wanted));
    let missing: Vec<_> = wanted_names.difference(&found_names).collect();
    let foreign: Vec<_> = found_names.difference(&wanted_names).collect();
    assert!(missing.is_empty() && foreign.is_empty(), "missing {missing:?}, not keys {foreign:?}");
    for (key, value) in &wanted {
        let number = |v: &Value| v.as_float().or(v.as_integer().map(|n| n as f64));
        let same = found[key] == *value || number(&found[key]).is_some_and(|n| Some(n) == number(value));
        assert!(same, "{key} is {} in the template, by default {value}", found[key]);
    }
}

/// The template with the absent keys enabled, except lines that begin as in `but`.
fn full_template(but: &[&str]) -> String {
    let switched_on = |line: &str| match line.strip_prefix('#') {
        Some(rest) if !rest.starts_with(' ') && but.iter().all(|start| !rest.starts_with(start)) => rest.to_string(),
        _ => line.to_string(),
    };
    TEMPLATE.lines().map(switched_on).collect::<Vec<_>>().join("\n")
}

/// All sections of the values, by path.
fn sections(value: &Value, path: &[String], into: &mut Vec<Vec<String>>) {
    let inner = |key: &str| [path, &[key.to_string()]].concat();
    match value {
        Value::Table(table) if path.last().is_none_or(|key| key != "policy") => {
            into.push(path.to_vec());
            table.iter().for_each(|(key, value)| sections(value, &inner(key), into));
        }
        Value::Array(array) => array.iter().enumerate().for_each(|(i, v)| sections(v, &inner(&i.to_string()), into)),
        _ => {}
    }
}

/// The template shows every key that `serde` accepts, including keys omitted when empty.
#[test]
fn every_section_of_the_template_has_all_keys_that_can_be_read() {
    let mut values = Tree::parse(&full_template(&[]), Path::new("")).unwrap().values;
    values.remove("sweep");
    values.remove("repetitions");
    let mut all = Vec::new();
    sections(&Value::Table(values.clone()), &[], &mut all);
    let mut seen = 0;
    for path in all.iter().filter(|path| path.as_slice() != ["device"]) {
        let mut with_foreign = values.clone();
        let section = match path.as_slice() {
            [] => &mut with_foreign,
            path => value_at_mut(&mut with_foreign, path).and_then(Value::as_table_mut).unwrap(),
        };
        let mut shown: BTreeSet<String> = section.keys().cloned().collect();
        shown.remove("kind");
        section.insert("qqqqqqqqqqqqqqqq".into(), Value::Boolean(true));
        let wrong = judge::scenario(&with_foreign, &Traces::new()).unwrap_err();
        let told = wrong.iter().find(|w| w.unknown).unwrap_or_else(|| panic!("{path:?}: {wrong:?}"));
        let known = told.message.rsplit_once("known are ").unwrap_or_else(|| panic!("{told:?}")).1;
        assert_eq!(known.split(", ").map(str::to_string).collect::<BTreeSet<_>>(), shown, "{path:?}");
        seen += 1;
    }
    assert!(seen >= 12, "{all:?}");
}

#[test]
fn the_full_template_can_be_run() {
    // Keys that need other values of other keys stay disabled.
    let full = full_template(&["zip", "trace_file"]);
    let mut find = no_traces;
    let study = Study::read(&full, Path::new("t.toml"), &Overrides::default(), &mut find).unwrap();
    assert_eq!(study.points.len(), 15);
}

#[test]
fn a_scenario_written_as_text_is_read_back() {
    let mut scenario = everything();
    scenario.application[0].trace_file = None;
    let text = toml::to_string(&scenario).unwrap();
    let study = read(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(study.scenario(0, 0), scenario);
}

#[test]
fn the_command_line_replaces_a_sweep_of_the_file_however_the_key_is_written() {
    let sweep = "[sweep]\n\"application.0.op\" = [\"read\", \"write\"]\nservers.policy = [\"fifo\", \"mlf\"]\n\
                 \"application.*.requests\" = [1, 2]\n";
    let text = format!("{GOOD}{sweep}");
    let set = |key: &str, value: &str| {
        let set = vec![(key.into(), crate::sweep::value(value))];
        read_with(&text, &Overrides { set, ..Overrides::default() }).unwrap()
    };
    // The key itself, one within it, one around it, and in another spelling.
    let study = set("servers.policy", "fifo");
    assert_eq!(
        (&*study.keys, study.points.len()),
        (&["application.0.op", "application.*.requests"].map(String::from)[..], 4)
    );
    assert!(study.points.iter().all(|point| point.scenario.servers.policy.name == "fifo"));
    assert_eq!(set("servers.policy.window_us", "5").points.len(), 4);
    let study = set("application[0].op", "read");
    assert_eq!((study.points.len(), study.first().application[0].op), (4, Operation::Read));
    assert!(set("application.1.requests", "7").points.iter().all(|point| point.scenario.application[1].requests == 7));
    assert_eq!(set("application.*.op", "read").points.len(), 4);
    assert_eq!(set("servers.count", "2").points.len(), 8, "another key");
    assert_eq!(
        set("servers", "{ count = 2, device = \"old\", policy = \"fifo\" }").points.len(),
        8,
        "the sweep is over a part of it"
    );
    let swept = format!("{GOOD}[sweep]\nseed = [1, 2]\n");
    assert_eq!(read_with(&swept, &Overrides { seed: Some(9), ..Overrides::default() }).unwrap().points.len(), 1);

    let sweep = |keys: &[&str]| {
        let sweep = keys.iter().map(|key| (key.to_string(), crate::sweep::values("read,write").unwrap())).collect();
        read_with(&text, &Overrides { sweep, ..Overrides::default() }).unwrap()
    };
    let study = sweep(&["application[0].op"]);
    assert_eq!((study.keys.last().map(String::as_str), study.points.len()), (Some("application.0.op"), 8));
    for point in &study.points {
        let op = ["read", "write"][usize::from(point.scenario.application[0].op == Operation::Write)];
        assert_eq!(point.values.last().map(String::as_str), Some(op));
    }
    assert_eq!(sweep(&["application.0.op", "application[0].op"]).points.len(), 8, "the last one counts");
}
