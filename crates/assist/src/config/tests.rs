//! What hints files are taken and refused.

use std::path::Path;

use proptest::prelude::*;

use super::*;

/// Listing 2 of the MERCURY paper, character by character but for the spacing.
const LISTING_2: &str = r#"
{
  "File": [
    {
      "Path": "/path/to/target/file",
      "BlockSize": 4194304,
      "CacheSize": 8,
      "ReadAheadSize": 4,
      "WillNeed": [ { "Offset": 0, "Length": 0 } ]
    }
  ],
  "Directory": [
    {
      "Path": "/path/to/target/dir",
      "Random": [ { "Offset": 0, "Length": 0 } ]
    }
  ]
}
"#;

fn parse(text: &str) -> Result<Hints, ConfigError> {
    Hints::parse(text, Path::new("hints.json"))
}

fn warnings(text: &str) -> Vec<Warning> {
    let hints = parse(text).unwrap();
    hints.warnings(&Paths::of(&hints))
}

#[test]
fn listing_2_is_taken_as_it_is() {
    let hints = parse(LISTING_2).unwrap();
    let file = Entry { will_need: vec![Region::WHOLE], ..Entry::new("/path/to/target/file") };
    let directory = Entry { random: vec![Region::WHOLE], ..Entry::new("/path/to/target/dir") };
    assert_eq!(hints, Hints { file: vec![file], directory: vec![directory], ..Hints::default() });
    assert_eq!(hints.file[0].movement_at(u64::MAX - 1), Movement::WillNeed, "length 0 means to the end");
}

#[test]
fn what_is_left_out_has_its_default() {
    let hints = parse(r#"{"File":[{"Path":"/f","WillNeed":[{}]}]}"#).unwrap();
    let entry = &hints.file[0];
    assert_eq!((entry.block_size, entry.cache_size, entry.read_ahead_size), (4 << 20, 8, 4));
    assert!(entry.release && !entry.online && entry.backend == BackendChoice::Auto);
    assert_eq!(hints.stand_down, StandDown::default());
    assert_eq!(parse("{}").unwrap(), Hints::default());
}

/// Every refusal names the file, the line and the key, and says what is wanted.
#[test]
fn refusals_name_line_and_key() {
    let cases = [
        (
            "{\"File\":[\n{\"Path\":\"/f\",\n\"Blocksize\":4096}]}",
            "hints.json:3:",
            "File[0].Blocksize",
            "unknown field",
        ),
        ("{\"Files\":[]}", "hints.json:1:", "Files", "expected one of"),
        (
            "{\"File\":[{\"Path\":\"/f\",\n\"BlockSize\":-1}]}",
            "hints.json:2:",
            "File[0].BlockSize",
            "from 4096 to 1073741824",
        ),
        ("{\"File\":[{\"Path\":\"/f\",\"BlockSize\":0}]}", "hints.json:1:", "File[0].BlockSize", "from 4096"),
        ("{\"File\":[{\"Path\":\"/f\",\"CacheSize\":1e30}]}", "hints.json:1:", "File[0].CacheSize", "from 1 to 65536"),
        (
            "{\"File\":[{\"Path\":\"/f\",\"CacheSize\":99999999999999999999}]}",
            "hints.json:1:",
            "File[0].CacheSize",
            "from 1",
        ),
        (
            "{\"File\":[{\"Path\":\"/f\",\"WillNeed\":[{},{\"Offset\":\n9223372036854775808}]}]}",
            "hints.json:2:",
            "File[0].WillNeed[1].Offset",
            "whole number of bytes from 0 to 9223372036854775807",
        ),
        (
            "{\"File\":[{\"Path\":\"/f\",\"WillNeed\":[{\"Length\":\"4k\"}]}]}",
            "hints.json:1:",
            "Length",
            "string \"4k\"",
        ),
        ("{\"File\":[{\"Path\":\"data/f\"}]}", "hints.json:1:", "File", "`data/f` is not an absolute path"),
        ("{\"File\":[{\"BlockSize\":4096}]}", "hints.json:1:", "File[0]", "missing field `Path`"),
        ("{\"File\":[{\"Path\":\"/f\",\"Recursive\":true}]}", "hints.json:1:", "File", "is for entries of `Directory`"),
        ("{\"File\":[{\"Path\":\"/f\",\"Backend\":\"Ext4\"}]}", "hints.json:1:", "File[0].Backend", "`ForcedRead`"),
        ("{\"StandDown\":{\"WastePercent\":101}}", "hints.json:1:", "StandDown.WastePercent", "from 1 to 100"),
        ("{\"Budget\":{\"PerNode\":-5}}", "hints.json:1:", "Budget.PerNode", "integer `-5`"),
        ("{\"File\":[", "hints.json:1:", "", "not JSON"),
        ("{} x", "hints.json:1:", "", "not JSON"),
        ("", "hints.json:1:", "", "not JSON"),
    ];
    for (text, place, key, message) in cases {
        let said = parse(text).expect_err(text).to_string();
        assert!(said.starts_with(place) && said.contains(key) && said.contains(message), "{text}\n{said}");
        assert!(!said.contains('\n'), "one line: {said}");
    }
}

#[test]
fn deep_nesting_is_refused_not_followed() {
    let text = format!("{{\"File\":{}", "[".repeat(100_000));
    assert!(parse(&text).is_err());
}

#[test]
fn a_missing_file_is_one_error_that_names_it() {
    let said = Hints::load(Path::new("/nowhere/h.json")).unwrap_err().to_string();
    assert!(said.starts_with("/nowhere/h.json: cannot be read: No such file"), "{said}");
}

#[test]
fn odd_hints_are_warned_of_by_key() {
    let text = r#"{"File":[{"Path":"/nowhere/f","CacheSize":2,"ReadAheadSize":4,
                             "WillNeed":[{"Length":100},{"Offset":50,"Length":10}],
                             "Random":[{}],"Sequential":[{"Offset":5,"Length":5}]},
                            {"Path":"/nowhere/f"},{"Path":"/"}],
                   "Directory":[{"Path":"/etc/passwd"}]}"#;
    let said: Vec<String> = warnings(text).iter().map(Warning::to_string).collect();
    let expected = [
        ("File[0].Path: ", "No such file"),
        ("File[0].ReadAheadSize: ", "more than CacheSize"),
        ("File[0].Sequential[0]: ", "overlaps Random[0]"),
        ("File[0].WillNeed[1]: ", "overlaps WillNeed[0]"),
        ("File[1].Path: ", "twice"),
        ("File[1].Path: ", "No such file"),
        ("File[2].Path: ", "is not a regular file"),
        ("Directory[0].Path: ", "is not a directory"),
    ];
    assert_eq!(said.len(), expected.len(), "{said:#?}");
    for (said, (key, message)) in said.iter().zip(expected) {
        assert!(said.starts_with(key) && said.contains(message), "{said}");
    }
    assert!(warnings(r#"{"Directory":[{"Path":"/etc","WillNeed":[{}],"Random":[{}]}]}"#).is_empty());
}

#[test]
fn the_shortest_region_wins_within_a_side() {
    let region = |offset, length| Region { offset, length };
    let entry = Entry {
        will_need: vec![region(0, 0), region(20, 5)],
        dont_need: vec![region(10, 20)],
        sequential: vec![region(0, 100)],
        random: vec![region(50, 100), region(0, 10)],
        no_reuse: vec![region(5, 1)],
        ..Entry::new("/f")
    };
    assert_eq!([5, 12, 22, 29, 30].map(|b| entry.movement_at(b)), {
        use Movement::{DontNeed, WillNeed};
        [WillNeed, DontNeed, WillNeed, DontNeed, WillNeed]
    });
    assert_eq!([5, 20, 60, 120, 200].map(|b| entry.read_ahead_at(b)), {
        use ReadAhead::{Normal, Random, Sequential};
        [Random, Sequential, Random, Random, Normal]
    });
    assert_eq!([4, 5, 6].map(|b| entry.once_at(b)), [false, true, false]);
}

#[test]
fn the_gap_worth_reading_follows_the_device() {
    assert_eq!(DeviceCost { request_us: 5000, mib_per_s: 200 }.gap_bytes(), 1 << 20);
    assert_eq!(DeviceCost { request_us: 0, mib_per_s: 1 }.gap_bytes(), 0);
    assert!(DeviceCost { request_us: 10_000_000, mib_per_s: 1 << 20 }.gap_bytes() > 1 << 40);
}

fn regions() -> impl Strategy<Value = Vec<Region>> {
    let bytes = 0..=i64::MAX as u64;
    prop::collection::vec((bytes.clone(), bytes).prop_map(|(offset, length)| Region { offset, length }), 0..3)
}

prop_compose! {
    fn entries()(
        path in "/[a-z *?\\[\\]\"\\\\éß]{0,12}", block_size in BLOCK_SIZE_BYTES_MIN..=BLOCK_SIZE_BYTES_MAX,
        cache_size in 1..=CACHE_BLOCKS_MAX, read_ahead_size in 0..=CACHE_BLOCKS_MAX,
        will_need in regions(), random in regions(), sequence in regions(), no_reuse in regions(),
        online: bool, release: bool, why in prop::option::of(".{0,20}"),
    ) -> Entry {
        Entry { block_size, cache_size, read_ahead_size, will_need, random, sequence, no_reuse, online, release, why,
                backend: if online { BackendChoice::Gpfs } else { BackendChoice::Auto }, ..Entry::new(path) }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        file in prop::collection::vec(entries(), 0..3), directory in prop::collection::vec(entries(), 0..3),
        waste in 1u64..=100, per_file in 0..=i64::MAX as u64,
    ) {
        let stand_down = StandDown { waste_percent: waste, ..StandDown::default() };
        let budget = Budget { per_file, ..Budget::default() };
        let hints = Hints { file, directory, stand_down, budget, ..Hints::default() };
        prop_assert_eq!(hints.check(), Ok(()));
        prop_assert_eq!(parse(&hints.to_json().unwrap()).unwrap(), hints);
    }

    #[test]
    fn no_text_is_a_panic(text in ".{0,200}", at in 0usize..400, byte: u8) {
        let _ = parse(&text);
        let mut bytes = LISTING_2.as_bytes().to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(text) = String::from_utf8(bytes)
            && let Err(e) = parse(&text)
        {
            prop_assert!(!e.to_string().is_empty());
        }
    }
}

/// The schema that is written out is that of the types; `UPDATE_SCHEMA=1` writes it anew.
#[test]
fn the_schema_is_that_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/hints.schema.json");
    let schema = schemars::schema_for!(Hints);
    let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    assert!(written == text, "{} is out of date: UPDATE_SCHEMA=1 cargo test writes it", path.display());
    // What the parser refuses the schema refuses, too: no unknown keys, bounded numbers.
    let schema = schema.to_value();
    let objects = schema["$defs"].as_object().unwrap().values().chain([&schema]).filter(|d| d["type"] == "object");
    assert_eq!(objects.clone().count(), 8);
    assert!(objects.clone().all(|d| d["additionalProperties"] == false));
    let integers =
        objects.flat_map(|d| d["properties"].as_object().unwrap().values()).filter(|p| p["type"] == "integer");
    assert!(integers.clone().count() >= 15 && integers.clone().all(|p| p["minimum"].is_u64()));
    assert_eq!(schema["$defs"]["Entry"]["properties"]["BlockSize"]["minimum"], BLOCK_SIZE_BYTES_MIN);
    assert_eq!(schema["$defs"]["Entry"]["properties"]["BlockSize"]["maximum"], BLOCK_SIZE_BYTES_MAX);
    assert_eq!(schema["$defs"]["Entry"]["properties"]["CacheSize"]["maximum"], CACHE_BLOCKS_MAX);
}
