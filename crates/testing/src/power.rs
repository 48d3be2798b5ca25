//! Power failures of a real file system: an ext4 in an image file, whose journal commits and whose pages are written when
//! somebody syncs, and not by themselves before minutes have gone by. What has not reached the image is lost.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

const IMAGE_BYTES: u64 = 48 << 20;
/// The journal is small, replaced files are not written ahead of their new names, and nothing is committed by time.
const JOURNAL: [&str; 2] = ["-J", "size=4"];
const OPTIONS: &str = "loop,commit=900,noauto_da_alloc";

/// A file system on a disk of its own; gone when this is dropped.
pub struct Disk {
    dir: TempDir,
}

impl Disk {
    /// An empty one; `None` where none can be had, which is recorded.
    pub fn new() -> Option<Disk> {
        if !["root", "mkfs.ext4", "mount"].into_iter().all(crate::require) {
            return None;
        }
        let disk = Disk { dir: tempfile::tempdir().expect("a temporary folder") };
        let image = std::fs::File::create(disk.image()).expect("an image file");
        image.set_len(IMAGE_BYTES).expect("an image file");
        let eager = ["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        let made = run(Command::new("mkfs.ext4").args(eager).args(JOURNAL).arg(disk.image()));
        disk.mount(made)
    }

    /// Where it is mounted.
    pub fn folder(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// What the next start of the machine finds, if the power fails now. This one goes on.
    pub fn after_power_failure(&self) -> Disk {
        let other = Disk { dir: tempfile::tempdir().expect("a temporary folder") };
        let copied = std::fs::copy(self.image(), other.image()).map(drop).map_err(|error| error.to_string());
        other.mount(copied).expect("the copy of an image that could be mounted")
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount(self, prepared: Result<(), String>) -> Option<Disk> {
        std::fs::create_dir(self.folder()).expect("a mount point");
        let mount =
            || run(Command::new("mount").args(["-t", "ext4", "-o", OPTIONS]).args([self.image(), self.folder()]));
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
}
