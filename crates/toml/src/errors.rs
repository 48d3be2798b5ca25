//! The mistakes of a file as its reader tells them.

use std::fmt;
use std::path::{Path, PathBuf};

/// One mistake in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Complaint {
    /// Line and column, from 1; `None` if it concerns the whole file.
    pub at: Option<(usize, usize)>,
    /// The mistake and its remedy.
    pub message: String,
}

/// All mistakes of a file; never empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileErrors {
    /// The file as named by the caller.
    pub file: PathBuf,
    /// In the order of the file.
    pub complaints: Vec<Complaint>,
    /// Reading failed, and may not the next time: nothing is known to be wrong with the file.
    pub is_passing: bool,
}

impl FileErrors {
    /// What is wrong with the file.
    pub fn new(file: &Path, complaints: Vec<Complaint>) -> FileErrors {
        FileErrors { file: file.into(), complaints, is_passing: false }
    }

    /// One complaint about the whole file.
    pub fn whole(file: &Path, message: String) -> FileErrors {
        FileErrors::new(file, vec![Complaint { at: None, message }])
    }
}

impl fmt::Display for FileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, complaint) in self.complaints.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            match complaint.at {
                Some((line, column)) => write!(f, "{newline}{}:{line}:{column}: ", self.file.display())?,
                None => write!(f, "{newline}{}: ", self.file.display())?,
            }
            f.write_str(&complaint.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for FileErrors {}
