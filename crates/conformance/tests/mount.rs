//! The checks of a mount: a correct file system passes them, and each defect is found by the check that names it.

use std::path::Path;
use std::time::Duration;

use crate::fake::{Defect, Fake, RESTART};
use crate::support::{PATIENCE, options};
use impresario_conformance::{Error, Options, Outcome, Report, run};
use impresario_fuse::{MountOptions, Mounted, mount_file_system};
use impresario_testing::require;

struct Bed {
    _mounted: Mounted,
    dir: tempfile::TempDir,
}

fn bed(defect: Defect) -> Bed {
    let dir = tempfile::tempdir().unwrap();
    for name in ["mount", "below"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    // Other users pass through to the mount.
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let fake = Fake::new(defect, Some(dir.path().join("below")));
    let options = MountOptions { allow_other: impresario_testing::is_root(), ..MountOptions::default() };
    Bed { _mounted: mount_file_system(fake, &dir.path().join("mount"), options).unwrap(), dir }
}

impl Bed {
    fn check(&self, only: &[&str], patience: Duration) -> Report {
        let mount = self.dir.path().join("mount");
        let restart = format!("mkdir '{}'", mount.join(RESTART).display());
        let options = Options {
            only: only.iter().map(|name| name.to_string()).collect(),
            below: Some(self.dir.path().join("below")),
            restart: Some(restart),
            patience,
            ..options(&mount)
        };
        run(&options, &mut |_| {}).unwrap()
    }
}

#[test]
fn a_correct_file_system_passes_every_check() {
    if !require("fuse") {
        return;
    }
    let bed = bed(Defect::None);
    let report = bed.check(&[], PATIENCE);
    for check in &report.checks {
        let needs_root = check.name == "identity" && !impresario_testing::is_root();
        assert!(check.outcome == Outcome::Pass || needs_root, "{}", report.text());
        assert!(check.requests > 0, "{}", report.text());
    }
    assert!(report.notes.is_empty(), "{}", report.text());
    let left: Vec<_> =
        std::fs::read_dir(bed.dir.path().join("mount")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, [RESTART], "its own folder is gone");
}

/// The file system of this machine passes, too, without what needs a server.
#[test]
fn a_local_folder_passes() {
    let dir = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let report = run(&options(dir.path()), &mut |_| {}).unwrap();
    assert!(report.passed(), "{}", report.text());
    let outcome = |name| &report.checks.iter().find(|check| check.name == name).unwrap().outcome;
    assert!(matches!(outcome("shutdown"), Outcome::Skipped(why) if why.contains("--restart")));
    assert!(matches!(outcome("fsync-below"), Outcome::Skipped(why) if why.contains("--below")));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Each defect with the check that must find it, and a word of the reason.
const DEFECTS: [(Defect, &str, &str); 19] = [
    (Defect::LostWrite, "read-after-write", "expected writer"),
    (Defect::StaleRead, "read-after-write", "expected"),
    (Defect::ReorderedWrites, "overlapping-writes", "expected writer"),
    (Defect::Misattributed, "bytes", "expected"),
    (Defect::FsyncDoesNotWait, "fsync-below", "after fsync had been answered"),
    (Defect::LateTruncate, "truncate", "bytes"),
    (Defect::AppendOverlaps, "append", "writer"),
    (Defect::ByName, "rename", "expected"),
    (Defect::ByName, "unlink", "expected"),
    (Defect::WrongUser, "identity", "belongs to user 0"),
    (Defect::WrongError, "errors", "beside requests that fail, "),
    (Defect::DropAtClose, "cancellation", "expected"),
    (Defect::LoseAtRestart, "shutdown", "after the restart"),
    (Defect::SyncOvertakes, "shutdown", "after the restart"),
    (Defect::HangAtRestart, "shutdown", "no answer within"),
    (Defect::RefuseOne, "shutdown", "No space left"),
    (Defect::LateAfterKill, "cancellation", "expected"),
    (Defect::SwappedReads, "bytes", "found"),
    (Defect::OthersMayOpen, "identity", "found success"),
];

#[test]
fn each_defect_is_found_by_the_check_that_names_it() {
    if !require("fuse") {
        return;
    }
    for (defect, name, word) in DEFECTS {
        if name == "identity" && !require("root") {
            continue;
        }
        let patience = if defect == Defect::HangAtRestart { Duration::from_secs(3) } else { PATIENCE };
        let report = bed(defect).check(&[name], patience);
        let [check] = report.checks.as_slice() else { panic!("{}", report.text()) };
        let Outcome::Fail(reason) = &check.outcome else { panic!("{defect:?}: {}", report.text()) };
        assert!(reason.contains(word), "{defect:?}: {reason}");
        assert!(!report.passed());
    }
}

#[test]
fn a_request_without_an_answer_is_named_and_the_run_goes_on() {
    if !require("fuse") {
        return;
    }
    // Short: it is the time until the verdict, and nothing here is right because it is quick.
    let report = bed(Defect::Hang).check(&["completion"], Duration::from_secs(3));
    let Outcome::Fail(reason) = &report.checks[0].outcome else { panic!("{}", report.text()) };
    assert!(reason.contains("no answer within") || reason.contains("is not answered"), "{reason}");
}

#[test]
fn wrong_targets_and_checks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let refused = |options: &Options| match run(options, &mut |_| {}) {
        Err(Error::Usage(text)) => text,
        other => panic!("{other:?}"),
    };
    assert!(refused(&options(&file)).contains("neither a folder nor a socket"));
    assert!(refused(&options(&dir.path().join("missing"))).contains("missing: no such file"));
    assert!(refused(&options(&file.join("below"))).contains("Not a directory"));
    assert!(refused(&options(Path::new(""))).contains("is empty"));
    let wrong = Options { only: vec!["fsink".into()], ..options(dir.path()) };
    let said = refused(&wrong);
    assert!(said.contains("--only fsink") && said.contains("fsync, fsync-below"), "{said}");
    let wrong = Options { below: Some(file), ..options(dir.path()) };
    assert!(refused(&wrong).contains("is not a folder"));
}
