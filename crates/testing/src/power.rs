//! Power failures of a real file system: one in an image file, whose journal or log commits and whose pages are written when
//! somebody syncs, and not by themselves before minutes have gone by. What has not reached the image is lost.
//!
//! ext4 keeps the order of changes: a sync makes all durable that came before it. btrfs does not: a sync of a file or directory
//! is one of that alone.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A kind of file system, and how it is made and mounted.
struct Kind {
    name: &'static str,
    bytes: u64,
    make: &'static [&'static str],
    options: &'static str,
}

/// The journal is small, replaced files are not written ahead of their new names, and nothing is committed by time.
const EXT4: Kind = Kind {
    name: "ext4",
    bytes: 48 << 20,
    make: &["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4"],
    options: "loop,commit=900,noauto_da_alloc",
};
const BTRFS: Kind =
    Kind { name: "btrfs", bytes: 128 << 20, make: &["mkfs.btrfs", "-q", "-m", "single"], options: "loop,commit=300" };

/// A file system on a disk of its own; gone when this is dropped.
pub struct Disk {
    dir: TempDir,
    kind: &'static Kind,
}

impl Disk {
    /// An empty one that keeps the order of changes; `None` where none can be had, which is recorded.
    pub fn new() -> Option<Disk> {
        Disk::of(&EXT4)
    }

    /// An empty one that keeps no order, likewise.
    pub fn without_order() -> Option<Disk> {
        Disk::of(&BTRFS)
    }

    fn of(kind: &'static Kind) -> Option<Disk> {
        let (program, arguments) = kind.make.split_first()?;
        if !["root", program, "mount"].into_iter().all(crate::require) {
            return None;
        }
        let disk = Disk { dir: tempfile::tempdir().expect("a temporary folder"), kind };
        let image = std::fs::File::create(disk.image()).expect("an image file");
        image.set_len(kind.bytes).expect("an image file");
        let made = run(Command::new(program).args(arguments).arg(disk.image()));
        disk.mount(made)
    }

    /// Where it is mounted.
    pub fn folder(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// What the next start of the machine finds, if the power fails now. This one goes on.
    pub fn after_power_failure(&self) -> Disk {
        let other = Disk { dir: tempfile::tempdir().expect("a temporary folder"), kind: self.kind };
        let copied = std::fs::copy(self.image(), other.image()).map(drop).map_err(|error| error.to_string());
        other.mount(copied).expect("the copy of an image that could be mounted")
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount(self, prepared: Result<(), String>) -> Option<Disk> {
        std::fs::create_dir(self.folder()).expect("a mount point");
        let Kind { name, options, .. } = self.kind;
        let mount = || run(Command::new("mount").args(["-t", name, "-o", options]).args([self.image(), self.folder()]));
        match prepared.and_then(|()| mount()) {
            Ok(()) => Some(self),
            Err(why) => {
                crate::skip("root", format!("an image cannot be mounted: {why}"));
                None
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let unmounted = run(Command::new("umount").arg(self.folder()));
        if unmounted.is_err() {
            let _ = run(Command::new("umount").arg("-l").arg(self.folder())); // somebody looks at it
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
    }
}

/// The names of steps in the sources of a folder that begin with `sync`: what a test that leaves out each must know.
pub fn sync_steps(sources: &Path) -> std::collections::BTreeSet<String> {
    let mut found = std::collections::BTreeSet::new();
    for file in std::fs::read_dir(sources).expect("the sources").map(|file| file.expect("the sources").path()) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let words = code.match_indices("\"sync").filter_map(|(at, _)| code.get(at + 1..)?.split('"').next());
        found.extend(words.filter(|word| word.bytes().all(|b| b == b'_' || b.is_ascii_lowercase())).map(String::from));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_synced_is_there_and_nothing_else() {
        let Some(disk) = Disk::new() else { return };
        let path = |name: &str| disk.folder().join(name);
        for name in ["synced", "unsynced", "replaced"] {
            std::fs::write(path(name), "first").unwrap();
        }
        std::fs::File::open(path("synced")).unwrap().sync_all().unwrap();
        std::fs::write(path("synced"), "second").unwrap();
        std::fs::remove_file(path("replaced")).unwrap();
        let after = disk.after_power_failure();
        assert_eq!(std::fs::read_to_string(after.folder().join("synced")).unwrap(), "first");
        assert!(std::fs::read_to_string(after.folder().join("unsynced")).is_ok_and(|text| text.is_empty()));
        assert!(after.folder().join("replaced").exists(), "its removal was not committed");
        assert_eq!(std::fs::read_to_string(path("synced")).unwrap(), "second", "the other goes on");
    }

    /// Two files are changed, and the second is synced: whether the change of the first is there.
    fn keeps_order(disk: &Disk) -> bool {
        let path = |name: &str| disk.folder().join(name);
        let sync = |name: &str| std::fs::File::open(path(name)).unwrap().sync_all().unwrap();
        for name in ["first", "second"] {
            std::fs::write(path(name), name).unwrap();
            sync(name);
        }
        sync("");
        let mode = |mode: u32| std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path("first"), mode(0o600)).unwrap();
        std::fs::set_permissions(path("second"), mode(0o600)).unwrap();
        sync("second");
        let after = disk.after_power_failure();
        let is_new = |name: &str| {
            let stat = std::fs::metadata(after.folder().join(name)).unwrap();
            std::os::unix::fs::MetadataExt::mode(&stat) & 0o777 == 0o600
        };
        assert!(is_new("second"));
        is_new("first")
    }

    #[test]
    fn one_keeps_the_order_of_changes_and_the_other_does_not() {
        let (Some(ordered), Some(unordered)) = (Disk::new(), Disk::without_order()) else { return };
        assert!(keeps_order(&ordered) && !keeps_order(&unordered));
    }
}
