//! Mounts a directory and returns the FUSE device: by mount(2) as root, otherwise by the set-user-id program
//! fusermount3.
//!
//! The FUSE crate is not used for this, because it unmounts *by path* a second time when a session has ended; by then
//! something else may be mounted there.

use std::ffi::CString;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::MountFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::MountOptions;

/// The subtype: `mount` and `/proc/mounts` show the file system's type as `fuse.` plus this.
pub(crate) const SUBTYPE: &str = "impresario";

const DEVICE: &str = "/dev/fuse";

/// The helper only calls mount(2); one that takes longer is stuck.
const HELPER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest output of the helper that is kept, bytes.
const HELPER_SAYS_BYTES: u64 = 4096;

/// Opens the device; an error means that FUSE is not available.
pub(crate) fn open() -> io::Result<OwnedFd> {
    Ok(std::fs::OpenOptions::new().read(true).write(true).open(DEVICE)?.into())
}

/// Mounts on `path`; returns the device.
pub(crate) fn mount(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    match by_system_call(path, options) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => by_helper(path, options),
        other => other,
    }
}

fn by_system_call(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let device = open()?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let root_mode = std::fs::metadata(path)?.mode();
    let mut data = format!(
        "fd={},rootmode={root_mode:o},user_id={uid},group_id={gid},default_permissions,subtype={SUBTYPE}",
        device.as_raw_fd()
    );
    if options.allow_other {
        data += ",allow_other";
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount(options.source_name(), path, "fuse", flags, Some(CString::new(data)?.as_c_str()))?;
    Ok(device)
}

/// The helper mounts and sends the device over a socket that it inherits.
fn by_helper(path: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let mut words =
        format!("fsname={},subtype={SUBTYPE},default_permissions,nosuid,nodev,noatime", options.source_name());
    for (wanted, word) in [(options.allow_other, ",allow_other"), (options.read_only, ",ro")] {
        words += if wanted { word } else { "" };
    }
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for helper in ["fusermount3", "fusermount"] {
        let (ours, theirs) = UnixStream::pair()?;
        fcntl_setfd(&theirs, FdFlags::empty())?;
        let mut command = Command::new(helper);
        command.args(["-o", &words, "--"]).arg(path);
        command.env("_FUSE_COMMFD", theirs.as_raw_fd().to_string()).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                last = error;
                continue;
            }
        };
        drop(theirs);
        let received = receive(&ours);
        if received.is_err() {
            // It has ended with an error, or never will.
            let _ = child.kill();
        }
        let mut said = String::new();
        if let Some(stderr) = child.stderr.take() {
            let _ = stderr.take(HELPER_SAYS_BYTES).read_to_string(&mut said);
        }
        let _ = child.wait();
        return received.map_err(|error| match said.trim() {
            "" => error,
            said => io::Error::other(said.to_owned()),
        });
    }
    Err(last)
}

/// Receives the descriptor that the helper sends with one byte.
fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    socket.set_read_timeout(Some(HELPER_TIMEOUT))?;
    let mut byte = [0u8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match recvmsg(socket.as_fd(), &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    if message.bytes == 0 || message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("fusermount3 sent no device"));
    }
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptors.next().ok_or_else(|| io::Error::other("fusermount3 sent no device"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mountpoint::mounted_at;

    #[test]
    fn both_ways_of_mounting_look_the_same() {
        if !impresario_testing::require("fuse") {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let options = MountOptions { source: "a b, c".into(), read_only: true, ..Default::default() };
        for way in [by_system_call, by_helper] {
            let device = match way(&path, &options) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return impresario_testing::skip("fusermount3", error);
                }
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => continue,
                mounted => mounted.unwrap(),
            };
            let line = mounted_at(&path).unwrap();
            assert_eq!(line.kind, "fuse.impresario");
            drop(device);
            let unmounted = Command::new("fusermount3").arg("-u").arg(&path).status().unwrap();
            assert!(unmounted.success() && mounted_at(&path).is_none());
        }
    }

    #[test]
    fn a_helper_that_refuses_is_quoted() {
        let missing = Path::new("/nowhere/at/all");
        let error = by_helper(missing, &MountOptions::default()).unwrap_err();
        assert!(error.kind() == io::ErrorKind::NotFound || error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
