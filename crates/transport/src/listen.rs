//! Listening addresses: binding them, with clear errors.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use impresario_base::unpaced;

use crate::Stream;

/// Connections that the kernel keeps until they are accepted: a crowd that comes at once, such as the clients of a large job.
/// The kernel keeps at most `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// Why a server cannot listen; one line with the remedy.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {reason}")]
pub struct BindError {
    /// The address as it was given.
    pub address: String,
    /// The problem, its likely cause, and the remedy.
    pub reason: String,
    /// The system's error, if any.
    #[source]
    pub source: Option<io::Error>,
}

/// A listening socket.
pub struct Listening(Bound);

enum Bound {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        path: PathBuf,
        /// Device and inode of the socket file: only our own is removed at the end.
        identity: Option<(u64, u64)>,
    },
}

impl Listening {
    /// Binds `host:port` (port 0: any free one) or `unix:/path`.
    pub fn bind(address: &str) -> Result<Listening, BindError> {
        let fail = |reason: String, source: Option<io::Error>| BindError { address: address.into(), reason, source };
        if let Some(path) = address.strip_prefix("unix:") {
            return bind_unix(Path::new(path)).map_err(|(reason, source)| fail(reason, source));
        }
        let candidates = match address.to_socket_addrs() {
            Ok(found) => found.collect::<Vec<_>>(),
            Err(error) => {
                let reason = format!("{error}; write host:port with a host of this machine, or unix:/path");
                return Err(fail(reason, Some(error)));
            }
        };
        let listener = TcpListener::bind(candidates.as_slice()).map_err(|error| {
            let port = address.rsplit(':').next().unwrap_or_default();
            let reason = match error.kind() {
                io::ErrorKind::AddrInUse => format!(
                    "the port is in use, perhaps by this server still running from before; stop its holder \
                     (`ss -ltnp 'sport = :{port}'` names it) or change `address` in the configuration"
                ),
                io::ErrorKind::AddrNotAvailable => {
                    "no network interface of this machine has this address; correct `address` in the configuration, \
                     or start this server on the machine that it names"
                        .into()
                }
                io::ErrorKind::PermissionDenied => format!("port {port} needs privileges; use one from 1024 on"),
                _ => error.to_string(),
            };
            fail(reason, Some(error))
        })?;
        unpaced::unpace(&listener);
        prepare(&listener).map_err(|error| fail(error.to_string(), Some(error)))?;
        Ok(Listening(Bound::Tcp(listener)))
    }

    /// The address for clients, with the actual port.
    pub fn address(&self) -> String {
        match &self.0 {
            Bound::Tcp(listener) => listener.local_addr().map(|a| a.to_string()).unwrap_or_default(),
            Bound::Unix { path, .. } => format!("unix:{}", path.display()),
        }
    }

    /// The next connection and the name of its peer; `WouldBlock` if there is none. `tick` bounds a single receive.
    pub fn accept(&self, tick: Duration) -> io::Result<(Stream, String)> {
        match &self.0 {
            Bound::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                unpaced::settle(&stream);
                stream.set_nonblocking(false)?;
                Ok((Stream::from_tcp(stream, tick)?, peer.to_string()))
            }
            Bound::Unix { listener, .. } => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok((Stream::from_unix(stream, tick)?, "unix".into()))
            }
        }
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Bound::Tcp(listener) => listener.as_fd(),
            Bound::Unix { listener, .. } => listener.as_fd(),
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Bound::Unix { path, identity, .. } = &self.0
            && identity_of(path) == *identity
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Has a listening socket accept without waiting, and hold more connections than the library asked for.
fn prepare(listener: &impl AsFd) -> io::Result<()> {
    rustix::io::ioctl_fionbio(listener, true)?;
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

fn bind_unix(path: &Path) -> Result<Listening, (String, Option<io::Error>)> {
    use std::os::unix::fs::FileTypeExt;
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err((
                "there is something else than a socket at this path; move it or change `address`".into(),
                None,
            ));
        }
        match UnixStream::connect(path) {
            // A killed server leaves a socket file without a listener.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)
                    .map_err(|e| (format!("the stale socket cannot be removed: {e}"), Some(e)))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => {
                let reason = "the socket is in use, perhaps by this server still running from before; stop its holder \
                              (`ss -lxp` names it) or change `address` in the configuration";
                return Err((reason.into(), None));
            }
        }
    }
    let listener = UnixListener::bind(path).map_err(|error| {
        let reason = match error.kind() {
            io::ErrorKind::NotFound => "its folder does not exist; make it or change `address`".into(),
            io::ErrorKind::PermissionDenied => "its folder cannot be written; change its rights or `address`".into(),
            io::ErrorKind::AddrInUse => "another server took the socket at the same moment; start only one".into(),
            _ => error.to_string(),
        };
        (reason, Some(error))
    })?;
    prepare(&listener).map_err(|error| (error.to_string(), Some(error)))?;
    Ok(Listening(Bound::Unix { listener, path: path.into(), identity: identity_of(path) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(address: &str) -> String {
        match Listening::bind(address) {
            Ok(_) => panic!("{address} was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_port_in_use_is_named_with_the_remedy() {
        let first = Listening::bind("127.0.0.1:0").unwrap();
        let address = first.address();
        let line = error(&address);
        assert!(line.contains(&address) && line.contains("in use") && line.contains("ss -ltnp"), "{line}");
        assert!(!line.contains('\n'));
        drop(first);
        Listening::bind(&address).expect("free again");
    }

    #[test]
    fn a_crowd_that_comes_at_once_is_kept() {
        // With fewer places the kernel drops what comes, and its sender tries again after a second.
        let kept_max =
            std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse::<usize>().unwrap();
        let listening = Listening::bind("127.0.0.1:0").unwrap();
        let address = listening.address().parse().unwrap();
        let within = Duration::from_millis(900);
        let crowd: Result<Vec<_>, _> =
            (0..500.min(kept_max)).map(|_| std::net::TcpStream::connect_timeout(&address, within)).collect();
        crowd.expect("all have come before one is accepted");
    }

    #[test]
    fn other_bad_addresses_are_explained() {
        assert!(error("nonsense").contains("host:port"));
        assert!(error("192.0.2.1:7000").contains("no network interface"));
        assert!(error("unix:/no/such/folder/s").contains("does not exist"));
    }

    #[test]
    fn only_a_stale_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = format!("unix:{}", path.display());
        let stale = UnixListener::bind(&path).unwrap();
        assert!(error(&address).contains("in use"));
        drop(stale);
        assert!(path.exists());
        let ours = Listening::bind(&address).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(ours);
        assert!(!path.exists(), "a server takes its socket file away");
        std::fs::write(&path, "a file").unwrap();
        assert!(error(&address).contains("something else"));
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    }
}
