//! What can go wrong between a client and its servers, each in one line that names the server and the remedy.

use std::io;
use std::time::Duration;

use impresario_wire::{Fault, FileKey};

/// A server's name in the configuration and its address, for messages.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Peer {
    /// Name, e.g. `data.1`.
    pub name: String,
    /// Address as the configuration says it.
    pub address: String,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&named(&self.name, &self.address))
    }
}

/// A server by name and address; by its address alone where the name is not known.
fn named(name: &str, address: &str) -> String {
    if name.is_empty() { address.into() } else { format!("{name} ({address})") }
}

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection, or no answer, until the deadline.
    #[error("{} could not be reached within {:.1} s: {cause}", named(.server, .address), .waited.as_secs_f64())]
    Unreachable {
        /// The server.
        server: String,
        /// Its address.
        address: String,
        /// How long was tried.
        waited: Duration,
        /// What stood in the way last.
        cause: String,
    },
    /// The peer does not speak our protocol, or broke it.
    #[error("{peer}: {what}")]
    Protocol {
        /// The server.
        peer: Peer,
        /// What it did.
        what: String,
    },
    /// The server and this program have no keys that fit.
    #[error("{peer}: {what}")]
    Key {
        /// The server.
        peer: Peer,
        /// What is wrong with the keys, and the remedy.
        what: String,
    },
    /// The server refused the connection, in its own words.
    #[error("{peer} refused the connection: {fault}")]
    Refused {
        /// The server.
        peer: Peer,
        /// Why.
        fault: Fault,
    },
    /// The server failed the call, in its own words.
    #[error("{peer}: {fault}")]
    Fault {
        /// The server.
        peer: Peer,
        /// Why.
        fault: Fault,
    },
    /// The connection was lost after the call was sent, and the call may not be repeated by this program: it may or
    /// may not have been applied.
    #[error(
        "{peer}: the connection was lost before the answer came ({cause}); the call may or may not have been applied"
    )]
    Lost {
        /// The server.
        peer: Peer,
        /// What ended the connection.
        cause: String,
        /// A limit had withheld the call until then, so that its time is not up.
        was_withheld: bool,
    },
    /// The session that the call belongs to has ended; the call was not sent.
    #[error("{peer}: the session has ended and what was open in it is closed")]
    SessionEnded {
        /// The server.
        peer: Peer,
    },
    /// Data acknowledged by a server may be lost: its machine restarted before it made them durable, or a sync failed.
    #[error(
        "{peer}: its machine restarted before a sync, or a sync failed; data written before may be lost, write them again"
    )]
    UnsyncedLost {
        /// The server.
        peer: Peer,
        /// How a sync failed; else EIO.
        errno: i32,
    },
    /// A file has data in an object that its data server does not have.
    #[error(
        "{peer}: its object of the file {:016x} is missing, with what the file has there; bring the server's folder back as it \
         was, or remove the file and copy it anew",
        .file.0
    )]
    ObjectLost {
        /// The server.
        peer: Peer,
        /// The file.
        file: FileKey,
    },
    /// The objects of an open file were removed while this client was cut off.
    #[error(
        "the file {:016x} was moved to other data servers, or removed, while this client was cut off from the metadata server; \
         open it again",
        .file.0
    )]
    Stale {
        /// The file.
        file: FileKey,
    },
    /// Locks of a file that was open went to others, or may have.
    #[error(
        "locks of the file {:016x} were lost, because the metadata server did not hear of this client in time; close the file \
         and open it again",
        .file.0
    )]
    LocksLost {
        /// The file.
        file: FileKey,
    },
    /// What the caller asked for cannot be.
    #[error("{what}")]
    Invalid {
        /// What and why.
        what: String,
    },
    /// This system failed.
    #[error("{what}: {errno}")]
    System {
        /// Doing what.
        what: String,
        /// A Linux errno, as text for people.
        errno: Errno,
    },
}

/// A Linux errno that prints as its text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", io::Error::from_raw_os_error(self.0))
    }
}

impl ClientError {
    /// The Linux errno that a file system call fails with for this reason.
    pub fn errno(&self) -> i32 {
        match self {
            ClientError::Fault { fault, .. } if fault.errno > 0 => fault.errno,
            ClientError::Invalid { .. } => libc::EINVAL,
            ClientError::System { errno, .. } => errno.0,
            ClientError::UnsyncedLost { errno, .. } => *errno,
            ClientError::Key { .. } => libc::EACCES,
            ClientError::Refused { fault, .. } if fault.errno == libc::EACCES => libc::EACCES,
            ClientError::Stale { .. } => libc::ESTALE,
            _ => libc::EIO,
        }
    }

    /// What failures have in common of which one line a minute tells enough: kind, server and errno. No file and no text, of which
    /// there is no end.
    pub fn sort(&self) -> String {
        let (kind, peer) = match self {
            ClientError::Unreachable { server, .. } => ("unreachable", server.as_str()),
            ClientError::Protocol { peer, .. } => ("protocol", &*peer.name),
            ClientError::Key { peer, .. } => ("key", &*peer.name),
            ClientError::Refused { peer, .. } => ("refused", &*peer.name),
            ClientError::Fault { peer, .. } => ("fault", &*peer.name),
            ClientError::Lost { peer, .. } => ("lost", &*peer.name),
            ClientError::SessionEnded { peer } => ("ended", &*peer.name),
            ClientError::UnsyncedLost { peer, .. } => ("unsynced", &*peer.name),
            ClientError::ObjectLost { peer, .. } => ("object", &*peer.name),
            ClientError::Stale { .. } => ("stale", ""),
            ClientError::LocksLost { .. } => ("locks", ""),
            ClientError::Invalid { .. } => ("invalid", ""),
            ClientError::System { .. } => ("system", ""),
        };
        format!("{kind} {peer} {}", self.errno())
    }

    /// What an I/O node answers when it could not do a call for this reason: the fault as the server gave it, or
    /// [`Fault::PATH_LOST`] where only the client may repeat the call.
    pub fn to_fault(&self) -> Fault {
        match self {
            ClientError::Fault { fault, .. } => fault.clone(),
            ClientError::Lost { .. } => Fault { errno: Fault::PATH_LOST, message: self.to_string() },
            other => Fault { errno: other.errno(), message: other.to_string() },
        }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> ClientError {
        ClientError::Invalid { what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One server's failures must not hide another's from the log, nor may each file have a line.
    #[test]
    fn failures_are_of_one_sort_by_kind_server_and_errno() {
        let peer = |name: &str| Peer { name: name.into(), address: "a:1".into() };
        let fault = |name, errno, message: &str| {
            ClientError::Fault { peer: peer(name), fault: Fault { errno, message: message.into() } }.sort()
        };
        let lost = |file| ClientError::ObjectLost { peer: peer("data.1"), file: FileKey(file) }.sort();
        assert_eq!(fault("data.1", libc::EIO, "of one file"), fault("data.1", libc::EIO, "of another"));
        assert_eq!(lost(1), lost(2));
        let sorts = [
            fault("data.1", libc::EIO, ""),
            fault("data.2", libc::EIO, ""),
            fault("data.1", libc::ENOSPC, ""),
            lost(1),
            ClientError::Lost { peer: peer("data.1"), cause: String::new(), was_withheld: false }.sort(),
            ClientError::Stale { file: FileKey(1) }.sort(),
        ];
        for (n, sort) in sorts.iter().enumerate() {
            assert!(!sorts[..n].contains(sort), "{sort}");
        }
    }
}
