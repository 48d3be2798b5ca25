//! TOML files as people write them: their values with the place of each, and a reader that reports all mistakes at once, each with
//! its place, its key and the remedy.
//!
//! What a file may hold its structures say, by `serde`; [`read`] tells what is wrong with one. Checks of the values add their
//! findings to the same [`Mistakes`].

mod errors;
mod mistake;
mod nearest;
mod place;
mod tree;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

pub use errors::{Complaint, FileErrors};
pub use mistake::{Missing, Mistake, Mistakes, read};
pub use nearest::nearest;
pub use tree::{KeyPath, Tree, shown, value_at, value_at_mut};

/// The text of a file of limited size.
pub fn text_of(path: &Path, max_bytes: u64, what: &str, remedy: &str) -> Result<String, FileErrors> {
    let refuse = |message: String| FileErrors::whole(path, message);
    let unread = |e: std::io::Error, remedy: &str| FileErrors {
        is_passing: passes(&e),
        ..refuse(format!("cannot be read: {e}{remedy}"))
    };
    let meta = std::fs::metadata(path).map_err(|e| unread(e, &format!("; {remedy}")))?;
    if meta.len() > max_bytes {
        return Err(refuse(format!("has {} bytes; the limit of {what} is {max_bytes}", meta.len())));
    }
    let mut bytes = Vec::new();
    // A device tells no length, and has no end.
    let opened = File::open(path).map_err(|e| unread(e, ""))?;
    opened.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|e| unread(e, ""))?;
    if bytes.len() as u64 > max_bytes {
        return Err(refuse(format!("has no end, or more than {max_bytes} bytes, the limit of {what}")));
    }
    String::from_utf8(bytes).map_err(|_| refuse("cannot be read: it is no UTF-8 text".into()))
}

/// The system failed, or a file server; unlike a file that is not there, is of another kind, or may not be read.
fn passes(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{IsADirectory, NotADirectory, NotFound, PermissionDenied};
    !matches!(error.kind(), NotFound | PermissionDenied | IsADirectory | NotADirectory)
}

/// Reads the text of a file that has no keys but those of the structure.
pub fn parse<T: DeserializeOwned>(text: &str, file: &Path) -> Result<T, FileErrors> {
    let (tree, mut mistakes) = (Tree::parse(text, file)?, Mistakes::default());
    let read = read(tree.values.clone(), &KeyPath::default(), |_| None, &mut mistakes);
    mistakes.settle(read, file, &tree)
}

/// Reads a text that belongs to no file; the error is one line with all mistakes, each with its line.
pub fn parse_text<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let one = |complaint: Complaint| match complaint.at {
        Some((line, _)) => format!("line {line}: {}", complaint.message),
        None => complaint.message,
    };
    let wrong = |errors: FileErrors| errors.complaints.into_iter().map(one).collect::<Vec<_>>().join("; ");
    parse(text, Path::new("")).map_err(wrong)
}
