//! A MUNGE daemon for tests, with a key and a socket of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{require, until};

/// A daemon that runs until it is dropped.
pub struct Munged {
    child: Child,
    socket: PathBuf,
}

impl Munged {
    /// Starts one in a folder. Without root's rights or the program the test is [skipped](crate::skip): others could not make
    /// credentials of several users.
    ///
    /// # Panics
    /// When it does not start.
    #[track_caller]
    pub fn start(folder: &Path, key: &[u8; 32]) -> Option<Munged> {
        if !require("root") || !(Path::new("/usr/sbin/munged").exists() || require("munged")) {
            return None;
        }
        fs::create_dir_all(folder).expect("a folder");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("a folder of ours");
        let file = |name: &str| folder.join(name);
        fs::write(file("key"), key).expect("a key");
        fs::set_permissions(file("key"), fs::Permissions::from_mode(0o600)).expect("a file of ours");
        let socket = file("socket");
        // Of one that was killed: it would be taken for the new one's.
        let _ = fs::remove_file(&socket);
        let with = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let child = Command::new("/usr/sbin/munged")
            .args(["--foreground", "--force", "--num-threads=2"])
            .args([with("socket", &socket), with("key-file", &file("key")), with("pid-file", &file("pid"))])
            .args([with("log-file", &file("log")), with("seed-file", &file("seed"))])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("munged starts");
        let mut munged = Munged { child, socket };
        until("munged listens", || {
            let ended = munged.child.try_wait().expect("a child");
            assert!(ended.is_none(), "munged ended: {}", fs::read_to_string(file("log")).unwrap_or_default());
            munged.socket.exists()
        });
        Some(munged)
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Munged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
