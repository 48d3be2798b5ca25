//! `impresario fsck`: its exit status, what it says, and what it refuses.

use std::fs;

use crate::support::{Cluster, Ran, client, pattern, run, write_file};

fn fsck(cluster: &Cluster, words: &[&str]) -> Ran {
    run(["fsck", cluster.path.to_str().unwrap()].iter().chain(words))
}

#[test]
fn fsck_tells_repairs_and_exits_as_such_programs_do() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    write_file(&client(&cluster.config, 1), "a", &pattern(1, 1, 0, 300_000));
    let ran = fsck(&cluster, &["--online"]);
    assert!(
        ran.code == 0 && ran.out.contains("1 files in 1 directories, 2 objects") && ran.out.contains("clean"),
        "{ran:?}"
    );
    let ran = fsck(&cluster, &[]);
    assert_eq!(ran.code, 8, "{ran:?}");
    assert!(ran.out.contains("in use by another server") && ran.out.contains("--online"), "{ran:?}");

    let prefix = cluster.state("meta")["key_prefix"].as_str().unwrap().to_string();
    let folder = cluster.config.data[1].dir.clone();
    let orphan = folder.join(format!("objects/07/{prefix}0000001007"));
    fs::write(&orphan, "whose?").unwrap();
    let ran = fsck(&cluster, &["--online", "--repair"]);
    assert!(ran.code == 0 && ran.out.contains("too young"), "it may be of a file that is being made: {ran:?}");
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.kill(name));

    let ran = fsck(&cluster, &["--json", "--progress"]);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, &report["status"]), (4, &4.into()), "{ran:?}");
    let finding = &report["findings"][0];
    assert_eq!((&finding["kind"], &finding["outcome"]), (&"orphan".into(), &"repairable".into()), "{report}");
    assert_eq!(finding["server"], "data.1");
    let ran = fsck(&cluster, &["--repair"]);
    assert!(ran.code == 1 && ran.out.contains("[repaired]") && !orphan.exists(), "{ran:?}");
    assert!(folder.join(format!("set-aside/{prefix}0000001007")).exists());
    assert_eq!(fsck(&cluster, &[]).code, 0);

    assert_eq!(fsck(&cluster, &["--delete-orphans"]).code, 2, "only with --repair");
    fs::write(&cluster.path, "no configuration").unwrap();
    assert_eq!(fsck(&cluster, &[]).code, 16);
}

/// What was written is not lost by a repair of a metadata folder that was copied by a program that leaves the records behind.
#[test]
fn without_records_no_object_is_moved() {
    const RECORD: &str = "user.impresario.file";
    let mut cluster = Cluster::start(2, 0, |_| {});
    write_file(&client(&cluster.config, 1), "a", &pattern(1, 1, 0, 300_000));
    ["data.0", "data.1", "meta"].iter().for_each(|name| cluster.kill(name));
    let file = cluster.config.meta.dir.join("names/a");
    let mut record = [0; 256];
    let len = rustix::fs::getxattr(&file, RECORD, &mut record).unwrap();
    rustix::fs::removexattr(&file, RECORD).unwrap();
    let ran = fsck(&cluster, &["--repair", "--delete-orphans"]);
    assert!(ran.code == 4 && ran.out.contains("copied without extended attributes"), "{ran:?}");
    rustix::fs::setxattr(&file, RECORD, &record[..len], rustix::fs::XattrFlags::empty()).unwrap();
    let ran = fsck(&cluster, &[]);
    assert!(ran.code == 0 && ran.out.contains("2 objects"), "{ran:?}");
}
