//! Every complaint about a configuration file: its position, its text, and that none hides another.

use std::path::Path;

use impresario_config::Config;

const GOOD: &str = r#"
[cluster]
name = "lab"

[meta]
address = "127.0.0.1:7000"
dir = "meta"

[[data]]
name = "data.0"
address = "127.0.0.1:7100"
dir = "data.0"

[[data]]
name = "data.1"
address = "127.0.0.1:7101"
dir = "/disk/1"
policy = { name = "hbrr" }

[[io]]
name = "io.0"
address = "127.0.0.1:7200"
policy = "fifo"
split = true
"#;

fn complaints(text: &str) -> Vec<String> {
    match Config::parse(text, Path::new("/lab/c.toml")) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(errors) => errors.to_string().lines().map(str::to_string).collect(),
    }
}

/// Replaces one line of a valid file and expects exactly one complaint: at `place`, with each of `what`.
#[track_caller]
fn one(line: &str, instead: &str, place: &str, what: &[&str]) {
    assert_eq!(GOOD.matches(line).count(), 1, "{line} is not once in the good file");
    let found = complaints(&GOOD.replace(line, instead));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with(&format!("/lab/c.toml:{place}: ")), "{found:?} is not at {place}");
    for what in what {
        assert!(found[0].contains(what), "{found:?} does not say {what:?}");
    }
}

#[test]
fn the_good_file_is_read_with_defaults_and_directories_resolved() {
    let config = Config::parse(GOOD, Path::new("/lab/c.toml")).unwrap();
    assert_eq!(config.cluster.name, "lab");
    assert_eq!(config.cluster.stripe_bytes, 65536);
    assert_eq!(config.meta.dir, Path::new("/lab/meta"));
    assert_eq!(config.data[0].dir, Path::new("/lab/data.0"));
    assert_eq!(config.data[0].policy.name, "auto");
    assert_eq!(config.data[1].dir, Path::new("/disk/1"));
    assert_eq!(config.data[1].policy.name, "hbrr");
    assert_eq!(config.data[1].queue_requests, 10_000);
    assert_eq!(config.io[0].policy.name, "fifo");
    assert!(config.io[0].split);
    assert_eq!(config.io[0].in_flight_requests, 16);
    assert_eq!(config.servers().map(|s| s.name()).collect::<Vec<_>>(), ["data.0", "data.1", "meta", "io.0"]);
    assert_eq!(config.server("io.0").unwrap().address(), "127.0.0.1:7200");
    let error = config.server("io0").unwrap_err();
    assert!(error.contains("did you mean io.0?") && error.contains("data.1"), "{error}");
}

#[test]
fn unknown_keys_name_the_nearest() {
    one("name = \"lab\"", "nam = \"lab\"", "3:1", &["unknown key nam in cluster", "did you mean name?"]);
    one("split = true", "  colour = 1", "24:3", &["unknown key colour in io[0]", "known are name, address, policy"]);
    one("[cluster]", "[clutser]", "2:2", &["unknown section clutser", "did you mean cluster?"]);
}

#[test]
fn wrong_types_say_what_to_write() {
    one("name = \"lab\"", "name = 5", "3:8", &["name must be text in quotes, not 5"]);
    one("split = true", "split = \"yes\"", "24:9", &["split must be true or false, not \"yes\""]);
    one("split = true", "queue_requests = \"64k\"", "24:18", &["whole number of requests without quotes", "\"64k\""]);
    one("split = true", "queue_requests = -1", "24:18", &["whole number of requests", "not -1"]);
    one("split = true", "queue_requests = 1e3", "24:18", &["whole number of requests", "not 1000.0"]);
    one("policy = \"fifo\"", "policy = 7", "23:10", &["policy must be a name such as \"mlf\", or { name ="]);
    one("policy = \"fifo\"", "policy = { window_us = 7 }", "23:10", &["policy must be a name"]);
    one("policy = \"fifo\"", "policy = { name = \"fifo\", x = [1] }", "23:31", &["x of policy fifo must be a number"]);
    one("[cluster]\nname = \"lab\"", "cluster = 3", "2:11", &["cluster must be a section [cluster], not 3"]);
}

#[test]
fn numbers_for_which_there_is_no_room_are_named() {
    let range = "a number must be between -9223372036854775808 and 9223372036854775807";
    for number in ["99999999999999999999", "-99999999999999999999", "0xffffffffffffffffffffffffffffffffffffff"] {
        one(
            "split = true",
            &format!("queue_requests = {number}"),
            "24:18",
            &[&format!("queue_requests is {number}; {range}")],
        );
    }
    one(
        "name = \"lab\"",
        &format!("poll_us = {}", "9".repeat(5000)),
        "3:11",
        &[&format!("poll_us is {}…; {range}", "9".repeat(60))],
    );
    one(
        "policy = \"fifo\"",
        "policy = { name = \"fifo\", x = 1e999 }",
        "23:31",
        &["x is 1e999; a number must be between -1.8e308"],
    );
    let two =
        GOOD.replace("dir = \"meta\"", "grace_ms = 9223372036854775808").replace("split = true", "split = 1_0e400");
    let found = complaints(&two);
    assert!(
        found.len() == 2 && found[0].contains("7:12: grace_ms is ") && found[1].contains("24:9: split is "),
        "{found:#?}"
    );
}

#[test]
fn missing_keys_give_an_example() {
    one("address = \"127.0.0.1:7000\"", "", "5:1", &["meta has no address", "address = \"127.0.0.1:7000\""]);
    one("dir = \"data.0\"", "", "9:1", &["data[0] has no dir", "dir = \"data.0\""]);
    one("name = \"io.0\"", "", "20:1", &["io[0] has no name", "name = \"io.0\""]);
    one("[meta]\naddress = \"127.0.0.1:7000\"\ndir = \"meta\"", "", "1:1", &["there is no section [meta]; add one"]);
    assert_eq!(
        complaints("[meta]\naddress = \"h:1\"\ndir = \"m\""),
        ["/lab/c.toml:1:1: there is no section [[data]]; add one for each server"]
    );
}

#[test]
fn one_bracket_where_two_belong() {
    let text = "[meta]\naddress = \"h:1\"\ndir = \"m\"\n[data]\nname = \"d\"\naddress = \"h:2\"\ndir = \"d\"\n";
    let found = complaints(text);
    assert_eq!(
        found,
        ["/lab/c.toml:4:1: data must be sections [[data]], with two brackets, one for each, not a section"]
    );
}

#[test]
fn values_are_judged_with_their_place() {
    one("\"127.0.0.1:7101\"", "\"127.0.0.1\"", "16:11", &["\"127.0.0.1\" is not an address: write host:port"]);
    one("\"127.0.0.1:7101\"", "\"127.0.0.1:7000\"", "6:11", &["is already the address of data[1]"]);
    one("name = \"data.1\"", "name = \"data.0\"", "15:8", &["\"data.0\" is already the name of data[0]"]);
    one("dir = \"/disk/1\"", "dir = \"data.0\"", "17:7", &["data.0 is already the directory of data[0]"]);
    one("split = true", "merge_requests = 0", "24:18", &["merge_requests is 0; it must be between 1 and 1024"]);
    one("split = true", "merge = \"lists\"", "24:9", &["lists", "contiguous", "list"]);
    one("name = \"lab\"", "stripe_count = 3", "3:16", &["between 1 and 2, the number of data servers"]);
    one(
        "dir = \"data.0\"",
        "dir = \"data.0\"\ndevice = \"disk\"",
        "13:10",
        &["no device model \"disk\"", "[device.disk]"],
    );
}

#[test]
fn cost_models_are_judged_with_their_place() {
    one("split = true", "cost = 5", "24:8", &["cost must be text in quotes, not 5"]);
    one("split = true", "cost = \"\"", "24:8", &["cost is empty", "impresario calibrate"]);
    one("split = true", "trace = \"\"", "24:9", &["trace is empty", "remove the key"]);
    one("dir = \"data.0\"", "dir = \"data.0\"\ncorrect_cost = 1", "13:16", &["correct_cost must be true or false"]);
    one("split = true", "costs = \"c.toml\"", "24:1", &["unknown key costs in io[0]", "did you mean cost?"]);
    let text = GOOD.replace("dir = \"data.0\"", "dir = \"data.0\"\ncost = \"c.toml\"\ncorrect_cost = false");
    let config = Config::parse(&text, Path::new("/lab/c.toml")).unwrap();
    assert_eq!(config.data[0].cost.as_deref(), Some(Path::new("/lab/c.toml")));
    assert_eq!((config.data[0].correct_cost, config.data[1].correct_cost), (Some(false), None));
}

/// Relative folders are those of the file, and other machines read it: whatever is in the folder of this process says nothing.
#[test]
fn a_folder_for_traces_is_not_looked_for_where_the_program_runs() {
    let text = GOOD.replace("split = true", "trace = \"Cargo.toml\"");
    assert!(Path::new("Cargo.toml").is_file(), "the folder of the tests");
    let config = Config::parse(&text, Path::new("/lab/c.toml")).unwrap();
    assert_eq!(config.io[0].trace.as_deref(), Some(Path::new("/lab/Cargo.toml")));
}

#[test]
fn no_two_servers_move_to_one_place() {
    let moving = |to: [(&str, &str); 2]| {
        let line =
            |(address, dir): (&str, &str)| format!("\nmoves_to = {{ address = \"{address}\", dir = \"{dir}\" }}");
        GOOD.replace("dir = \"data.0\"", &format!("dir = \"data.0\"{}", line(to[0])))
            .replace("dir = \"/disk/1\"", &format!("dir = \"/disk/1\"{}", line(to[1])))
    };
    let good = moving([("h:1", "/new/0"), ("h:2", "/new/1")]);
    assert!(Config::parse(&good, Path::new("/lab/c.toml")).is_ok());
    for (second, says) in [
        (("h:2", "/new/0"), "/lab/c.toml:19:37: data.0 moves to /new/0 already; name a place of its own for data.1"),
        (("h:1", "/new/1"), "/lab/c.toml:19:24: data.0 moves to h:1 already; name a place of its own for data.1"),
    ] {
        assert_eq!(complaints(&moving([("h:1", "/new/0"), second])), [says]);
    }
}

#[test]
fn calibrations_are_read_only_where_asked_and_complaints_name_both_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    let text = GOOD
        .replace("dir = \"data.0\"", "dir = \"data.0\"\ncost = \"nowhere.toml\"")
        .replace("split = true", "split = true\ncost = \"broken.toml\"");
    std::fs::write(&path, text).unwrap();
    std::fs::write(dir.path().join("broken.toml"), "format = \"impresario-calibration\"\nversion = 77\n").unwrap();
    assert!(Config::load(&path).is_ok(), "a client need not have the servers' calibrations");
    let errors = Config::load_with_calibrations(&path).unwrap_err().to_string();
    let lines: Vec<&str> = errors.lines().collect();
    assert_eq!(lines.len(), 2, "{errors}");
    assert!(lines[0].starts_with(&format!("{}:13:8: cost: ", path.display())), "{errors}");
    assert!(lines[0].contains("nowhere.toml: cannot be read") && lines[0].contains("impresario calibrate"), "{errors}");
    assert!(lines[1].contains(":26:8: cost: ") && lines[1].contains("broken.toml:2:11: version 77"), "{errors}");
}

#[test]
fn policies_are_judged_with_their_place() {
    one("policy = \"fifo\"", "policy = \"fido\"", "23:10", &["fido", "did you mean fifo?"]);
    one("{ name = \"hbrr\" }", "{ name = \"twins\" }", "18:10", &["twins", "lane"]);
    one("{ name = \"hbrr\" }", "{ name = \"hbrr\", quantums = 8 }", "18:10", &["quantums"]);
    one("policy = \"fifo\"", "policy = { name = \"twins\", window_us = -1 }", "23:10", &["window_us"]);
}

#[test]
fn device_models_are_judged_with_their_place() {
    let with = |disk: &str| {
        format!("{}\n[device.disk]\n{disk}", GOOD.replace("dir = \"data.0\"", "dir = \"data.0\"\ndevice = \"disk\""))
    };
    let config = Config::parse(&with("rpm = 5400\n"), Path::new("/lab/c.toml")).unwrap();
    assert_eq!(config.device["disk"].rpm, 5400);

    let found = complaints(&with("rpm = 1\n"));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with("/lab/c.toml:28:7: rpm is 1; it must be between"), "{found:#?}");

    // Each bad key at its own place, together with mistakes elsewhere, and the device is not called missing.
    let found = complaints(
        &with("rpn = 5400\nheads = \"four\"\norder = \"backwards\"\n").replace("split = true", "splt = true"),
    );
    assert_eq!(found.len(), 4, "{found:#?}");
    for (line, place, what) in
        [(0, "25:1", "splt"), (1, "28:1", "rpn"), (2, "29:9", "\"four\""), (3, "30:9", "backwards")]
    {
        assert!(found[line].starts_with(&format!("/lab/c.toml:{place}: ")) && found[line].contains(what), "{found:#?}");
    }
}

#[test]
fn syntax_is_judged_with_its_place() {
    let found = complaints("[cluster]\nname = \"lab\nx = 1\n");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("/lab/c.toml:2:12: "), "{found:?}");
}

#[test]
fn all_mistakes_come_at_once_in_the_order_of_the_file() {
    let text = GOOD
        .replace("name = \"lab\"", "name = 5\nstripe_byte = 1")
        .replace("dir = \"meta\"", "")
        .replace("\"127.0.0.1:7101\"", "\"nowhere\"")
        .replace("split = true", "splits = true\nmerge_requests = 99999");
    let found = complaints(&text);
    let says = ["name must be text", "stripe_byte", "has no dir", "\"nowhere\" is not an address", "splits", "99999"];
    assert_eq!(found.len(), says.len(), "{found:#?}");
    for what in says {
        assert!(found.iter().any(|line| line.contains(what)), "no complaint says {what}: {found:#?}");
    }
    let lines: Vec<usize> = found.iter().map(|line| line.split(':').nth(1).unwrap().parse().unwrap()).collect();
    assert!(lines.is_sorted(), "{found:#?}");
}

#[test]
fn a_file_that_cannot_be_read_says_so() {
    let error = Config::load(Path::new("/nonexistent/impresario.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/impresario.toml: cannot be read: No such file"), "{error}");
    assert!(error.contains("impresario up"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    let error = Config::load(&binary).unwrap_err().to_string();
    assert!(error.contains("cannot be read") && error.contains("UTF-8"), "{error}");

    let huge = dir.path().join("huge.toml");
    std::fs::File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    let error = Config::load(&huge).unwrap_err().to_string();
    assert!(error.contains("has 1073741824 bytes"), "{error}");

    let error = Config::load(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(error.contains("has no end, or more than"), "{error}");
}

#[test]
fn load_resolves_directories_against_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, GOOD).unwrap();
    let config = Config::load(&path).unwrap();
    assert_eq!(config.meta.dir, dir.path().join("meta"));
}

#[test]
fn random_damage_never_panics() {
    // Every prefix, and every single byte replaced by characters that mean something in the format.
    for cut in 0..GOOD.len() {
        let _ = Config::parse(&GOOD[..cut], Path::new("/lab/c.toml"));
        for damage in ["[", "]", "\"", "=", "{", "\n", "."] {
            let text = format!("{}{damage}{}", &GOOD[..cut], &GOOD[cut + 1..]);
            let _ = Config::parse(&text, Path::new("/lab/c.toml"));
        }
    }
}
