//! Replacing a file as a whole or not at all.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The path at which a file can be replaced or made: where a symbolic link leads. What is there and is no file, such as a device
/// or a pipe, is an error: a file in its place would take it from all programs of the machine.
pub fn replaceable(path: &Path) -> io::Result<PathBuf> {
    match std::fs::metadata(path) {
        Ok(there) if there.is_file() => std::fs::canonicalize(path),
        Ok(_) => Err(io::Error::other("it is there and is no file; name another one")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.into()),
        Err(error) => Err(error),
    }
}

/// Replaces a file, or makes it, by one with this mode that is complete and durable before it has the name. It belongs to whom it
/// belonged before: a program of another user, which reads it, is to be able to go on doing so. See [`replaceable`].
pub fn replace(path: &Path, mode: u32, content: &[u8]) -> io::Result<()> {
    put(path, mode, false, content)
}

/// The same of a file that is there, which keeps its mode, too.
pub fn replace_content(path: &Path, content: &[u8]) -> io::Result<()> {
    put(path, 0o600, true, content)
}

fn put(path: &Path, mode: u32, keeps_mode: bool, content: &[u8]) -> io::Result<()> {
    let path = &*replaceable(path)?;
    let name = path.file_name().ok_or_else(|| io::Error::other("it must name a file"))?;
    let beside = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let put = || {
        // What a run with this number left must not give it its mode.
        let _ = std::fs::remove_file(&beside);
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        if let Ok(before) = std::fs::metadata(path) {
            keep_owner(&file, &before)?;
            if keeps_mode {
                file.set_permissions(before.permissions())?;
            }
        }
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        // After a power failure the old content would be back, which others may not count on any more.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    };
    put().inspect_err(|_| _ = std::fs::remove_file(&beside))
}

fn keep_owner(file: &File, before: &Metadata) -> io::Result<()> {
    let ours = file.metadata()?;
    let uid = Some(before.uid()).filter(|uid| *uid != ours.uid());
    let gid = Some(before.gid()).filter(|gid| *gid != ours.gid());
    if uid.is_none() && gid.is_none() {
        return Ok(());
    }
    std::os::unix::fs::fchown(file, uid, gid).map_err(|error| {
        io::Error::new(error.kind(), format!("its owner cannot be kept ({error}); replace it as its owner or root"))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_or_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        std::fs::write(&file, "before").unwrap();
        replace(&file, 0o600, b"after").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"after");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        assert!(replace(&dir.path().join("folder"), 0o644, b"x").is_err(), "a folder is none");
        assert!(replace(Path::new("/"), 0o644, b"x").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing is left beside them");
    }

    #[test]
    fn what_is_no_file_stays_and_links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        for (link, to) in
            [("to-socket", "socket"), ("to-device", "/dev/null"), ("to-file", "file"), ("to-none", "none")]
        {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        for name in ["socket", "to-socket", "to-device"] {
            let error = replace(&at(name), 0o644, b"x").unwrap_err().to_string();
            assert!(error.contains("is no file"), "{name}: {error}");
            assert!(at(name).symlink_metadata().is_ok_and(|there| !there.is_file()), "{name} is as it was");
        }
        std::fs::write(at("file"), "before").unwrap();
        replace(&at("to-file"), 0o644, b"after").unwrap();
        replace(&at("to-none"), 0o644, b"new").unwrap();
        assert!(at("to-file").is_symlink() && std::fs::read(at("file")).unwrap() == b"after");
        assert_eq!(std::fs::read(at("to-none")).unwrap(), b"new");
    }

    /// A server that runs as another user than who rotates its keys reads them after that, too.
    #[test]
    fn a_file_keeps_its_owner() {
        // Only root can give files away.
        if !impresario_testing::require("root") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.key");
        std::fs::write(&file, "before").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::chown(&file, Some(4711), Some(4712)).unwrap();
        let is = || file.metadata().map(|is| (is.uid(), is.gid(), is.mode() & 0o777)).unwrap();
        replace_content(&file, b"changed").unwrap();
        assert_eq!(is(), (4711, 4712, 0o640));
        replace(&file, 0o600, b"after").unwrap();
        assert_eq!(is(), (4711, 4712, 0o600));
        assert_eq!(std::fs::read(&file).unwrap(), b"after");
    }
}
