//! How a failure becomes the one line that a client sees: the operation, its object, the reason and the remedy.

use std::io;

use impresario_wire::message::Fault;
use rustix::io::Errno;

/// The result of a metadata operation.
pub(super) type Outcome<T> = Result<T, Fault>;

/// A failure with our own message.
pub(super) fn fault(errno: Errno, message: impl Into<String>) -> Fault {
    Fault { errno: errno.raw_os_error(), message: message.into() }
}

/// A path for people: at most 200 bytes, control characters escaped.
pub(crate) fn show(path: &[u8]) -> String {
    const SHOWN_MAX_BYTES: usize = 200;
    if path.is_empty() {
        return "the root directory".into();
    }
    let shown = path.get(..SHOWN_MAX_BYTES).unwrap_or(path);
    let text: String = String::from_utf8_lossy(shown).chars().flat_map(escape).collect();
    if shown.len() < path.len() { format!("{text}… ({} bytes)", path.len()) } else { text }
}

fn escape(c: char) -> impl Iterator<Item = char> {
    let plain = (!c.is_control()).then_some(c);
    plain.into_iter().chain(c.is_control().then(|| c.escape_default()).into_iter().flatten())
}

/// Adds the operation and its object to a bare error number.
pub(super) trait Explain<T> {
    /// `doing` completes "cannot …", for example `remove`.
    fn explain(self, doing: &str, path: &[u8]) -> Outcome<T>;
}

impl<T> Explain<T> for rustix::io::Result<T> {
    fn explain(self, doing: &str, path: &[u8]) -> Outcome<T> {
        self.map_err(|errno| fault(outward(errno), format!("cannot {doing} {}: {}", show(path), reason(errno))))
    }
}

/// Translates a data server's failure for a metadata operation.
pub(super) fn data_fault(error: &io::Error, doing: &str, path: &[u8]) -> Fault {
    let errno = error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
    fault(errno, format!("cannot {doing} {}: data servers: {error}", show(path)))
}

/// Whether the local file system has failed a call with this number, as far as the text says ([`Explain`]).
pub(crate) fn is_local(fault: &Fault) -> bool {
    (1..4096).contains(&fault.errno)
        && fault.message.ends_with(&format!(": {}", reason(Errno::from_raw_os_error(fault.errno))))
}

/// The server running out of descriptors is its own shortage, not the client's.
fn outward(errno: Errno) -> Errno {
    if errno == Errno::MFILE { Errno::NFILE } else { errno }
}

pub(super) fn reason(errno: Errno) -> String {
    let text = match errno {
        Errno::NOENT => "no such file or directory",
        Errno::EXIST => "it already exists",
        Errno::NOTDIR => "a part of the path is not a directory",
        Errno::ISDIR => "it is a directory",
        Errno::NOTEMPTY => "the directory is not empty",
        Errno::LOOP => "a component of the path is a symbolic link; resolve it on the client",
        Errno::NAMETOOLONG => "a name is longer than 255 bytes, or the path is too long",
        Errno::NOSPC => "the metadata server's file system is full; free space or inodes there",
        Errno::DQUOT => "the metadata server's quota is used up",
        Errno::ROFS => "the metadata server's file system is read-only",
        Errno::MFILE | Errno::NFILE => {
            "the metadata server is out of file descriptors; raise its limit (ulimit -n) and restart it"
        }
        Errno::ACCESS | Errno::PERM => "the user that the metadata server runs as lacks permission; run it as root",
        Errno::FBIG => "too large for the metadata server's file system (ext4: 16 TiB) or its limit (ulimit -f)",
        Errno::OPNOTSUPP => "not supported for this kind of node",
        Errno::STALE | Errno::IDRM => "the file is gone",
        _ => "",
    };
    if !text.is_empty() {
        return text.into();
    }
    let full = io::Error::from(errno).to_string();
    full.split(" (os error").next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_operation_path_and_reason() {
        let fault = Err::<(), _>(Errno::NOTEMPTY).explain("remove", b"a/b").unwrap_err();
        assert_eq!((fault.errno, fault.message.as_str()), (39, "cannot remove a/b: the directory is not empty"));
        let fault = Err::<(), _>(Errno::XDEV).explain("rename", b"").unwrap_err();
        assert_eq!(fault.message, "cannot rename the root directory: invalid cross-device link");
        assert_eq!(Err::<(), _>(Errno::MFILE).explain("open", b"f").unwrap_err().errno, 23);
        let local = Err::<(), _>(Errno::IO).explain("open", b"f").unwrap_err();
        let theirs = data_fault(&io::Error::from_raw_os_error(5), "open", b"f");
        assert!(is_local(&local) && !is_local(&theirs), "{local:?} {theirs:?}");
    }

    #[test]
    fn paths_are_shown_on_one_short_line() {
        assert_eq!(show(b"a\nb"), "a\\nb");
        assert!(show(&[b'x'; 5000]).len() < 230);
        assert!(show(&[0xff; 300]).contains("(300 bytes)"));
    }
}
