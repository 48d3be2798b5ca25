//! What every backend must do, as tests that its own tests call.
//!
//! The checks panic with what is wrong, like all tests, and leave nothing behind when they pass.

mod data;
mod identity;
mod listing;
mod names;
pub mod reference;

use crate::{Backend, Caller, Errno, Found, Handle, Make, Result, SetAttr};

/// What the suite needs to know of a backend.
pub struct Suite<'a> {
    /// The backend.
    pub backend: &'a dyn Backend,
    /// Who may do everything in its root.
    pub caller: Caller,
    /// The backend acts as any user: rights are checked too. `caller` must be root.
    pub others: bool,
    /// The time of a file's modification can be set to an earlier one.
    pub earlier_times: bool,
    /// Entries of the largest folder.
    pub entries: usize,
}

/// A check in a folder of its own.
type Check = fn(&Suite<'_>, &Handle);

impl Suite<'_> {
    /// Runs every check.
    pub fn run(&self) {
        let checks: &[(&str, Check)] = &[
            ("made", names::made_and_found),
            ("refused", names::refused),
            ("renamed", names::renamed),
            ("removed", names::removed),
            ("held", names::held),
            ("linked", names::linked),
            ("once", names::made_once),
            ("long", names::long_and_odd),
            ("strange", names::strange_handles),
            ("bytes", data::read_and_written),
            ("holes", data::holes_and_ends),
            ("space", data::space_changed),
            ("stable", data::stable),
            ("concurrent", data::concurrent),
            ("list", listing::listed),
            ("changing", listing::listed_while_it_changes),
        ];
        for (name, check) in checks {
            self.check(name, *check);
        }
        if self.earlier_times {
            self.check("attributes", data::attributes);
        }
        if self.others {
            identity::checks().iter().for_each(|(name, check)| self.check(name, *check));
        }
    }

    /// Runs a check in a folder of its own.
    fn check(&self, name: &str, check: Check) {
        let root = self.backend.root().expect("a root");
        let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
        let (dir, _) = self.backend.make(&self.caller, &root, name.as_bytes(), Make::Directory, &set).expect(name);
        check(self, &dir);
        self.clear(&dir);
        self.backend.remove_dir(&self.caller, &root, name.as_bytes()).expect(name);
    }

    /// Removes what is in a folder.
    fn clear(&self, dir: &Handle) {
        loop {
            let (entries, last) = self.backend.read_dir(&self.caller, dir, 0, 1000).expect("a listing");
            for entry in entries.iter().filter(|entry| entry.name != b"." && entry.name != b"..") {
                match self.backend.remove(&self.caller, dir, &entry.name) {
                    Err(Errno(libc::EISDIR)) => {
                        let (inner, _) = self.backend.lookup(&self.caller, dir, &entry.name).expect("a folder");
                        self.clear(&inner);
                        self.backend.remove_dir(&self.caller, dir, &entry.name).expect("an empty folder");
                    }
                    removed => removed.expect("removed"),
                }
            }
            if last {
                return;
            }
        }
    }

    fn make(&self, dir: &Handle, name: &str, what: Make<'_>) -> Result<Found> {
        self.backend.make(&self.caller, dir, name.as_bytes(), what, &SetAttr::default())
    }

    fn file(&self, dir: &Handle, name: &str, bytes: &[u8]) -> Handle {
        let (file, _) = self.make(dir, name, Make::File).expect(name);
        self.backend.write(&self.caller, &file, 0, bytes, false).expect(name);
        file
    }

    fn folder(&self, dir: &Handle, name: &str) -> Handle {
        self.make(dir, name, Make::Directory).expect(name).0
    }

    fn find(&self, dir: &Handle, name: &str) -> Result<Found> {
        self.backend.lookup(&self.caller, dir, name.as_bytes())
    }

    fn contents(&self, file: &Handle) -> Result<Vec<u8>> {
        let mut bytes = vec![0; 1 << 16];
        let len = self.backend.read(&self.caller, file, 0, &mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }
}

/// Checks that a call failed with this number.
#[track_caller]
fn refuses<T: std::fmt::Debug>(got: Result<T>, errno: i32) {
    match got {
        Err(Errno(number)) if number == errno => {}
        got => panic!("{got:?} instead of {:?}", Errno(errno)),
    }
}
