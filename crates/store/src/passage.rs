//! Marks of a folder that takes part in a move of its server, each a small file at its top.
//!
//! - `arriving`: the folder is being filled with the objects of a server that runs elsewhere. No server opens it. The mark says
//!   how far the copy is, so that it can go on after a crash.
//! - `departed`: the server that had the folder has moved away. No server ever opens it again.
//! - `arrived`: the folder came by a move that is complete. It says for which address, and of which boot of a machine the server
//!   speaks in the place of this machine's: what was written and not synced before the move is durable since, so clients
//!   must not take the move for a restart that lost it.
//!
//! The number of a move is in both folders: it proves that one departed for the other.

use std::io;
use std::path::Path;

use crate::error::StoreError;
use crate::filesystem::FileSystem;
use crate::folder::{self, FORMAT_FILE, FolderIdentity, FolderState};
use crate::keys::{KEYS, KEYS_NEW, NUMBER, NUMBER_NEW};
use crate::objects::{OBJECTS, ObjectStore, StoreOptions};
use crate::real::Real;
use crate::replace::{read_all, replace_file};

pub(crate) const ARRIVING: &str = "arriving";
pub(crate) const ARRIVED: &str = "arrived";
pub(crate) const DEPARTED: &str = "departed";
/// The names of the marks and of their next versions.
pub(crate) const MARKS: [&str; 6] = [ARRIVING, "arriving.new", ARRIVED, "arrived.new", DEPARTED, "departed.new"];
/// What a copy makes beside `format` and `lock`.
const COPIED: [&str; 12] = [
    KEYS,
    KEYS_NEW,
    NUMBER,
    NUMBER_NEW,
    "notes",
    "notes.new",
    crate::removed::REMOVED,
    crate::removed::REMOVED_OLD,
    crate::checks::CHECKSUMS,
    crate::checks::CHECKSUMS_OFF,
    crate::checks::CHECKSUMS_NEW,
    ARRIVED,
];

/// A copy under way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arriving {
    /// Number of the move; never 0.
    pub number: u64,
    /// The next object of the first pass; `None` when the first pass is over.
    pub next: Option<u64>,
    /// Number of the last batch of changes that was copied.
    pub batch: u64,
    /// Everything is copied, and durable here, but it is not known that the server has departed.
    pub is_complete: bool,
    /// What the folder will be when the server has.
    pub arrived: Arrived,
}

/// How a folder came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Arrived {
    /// The address that its server has here.
    pub address: String,
    /// The boot that its server speaks of while this machine's is the first one.
    pub boot: (u32, u32),
}

/// Where the server of a folder has gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Departed {
    /// Number of the move.
    pub number: u64,
    /// Its new address.
    pub address: String,
}

/// Gives the values of lines `NAME VALUE` in turn.
struct Lines<'a>(std::str::Lines<'a>);

impl<'a> Lines<'a> {
    fn word(&mut self, name: &str) -> Option<&'a str> {
        self.0.next()?.strip_prefix(name)?.strip_prefix(' ')
    }

    fn number(&mut self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.word(name)?, 16).ok()
    }
}

impl Arriving {
    fn text(&self) -> String {
        let Arriving { number, next, batch, is_complete, arrived } = self;
        let next = next.map_or_else(|| "-".into(), |next| format!("{next:x}"));
        let complete = u8::from(*is_complete);
        format!("move {number:x}\nnext {next}\nbatch {batch:x}\ncomplete {complete}\n{}", arrived.text())
    }

    fn parse(text: &str) -> Option<Arriving> {
        let mut lines = Lines(text.lines());
        let number = lines.number("move")?;
        let next = match lines.word("next")? {
            "-" => None,
            next => Some(u64::from_str_radix(next, 16).ok()?),
        };
        let (batch, is_complete) = (lines.number("batch")?, lines.number("complete")? == 1);
        Some(Arriving { number, next, batch, is_complete, arrived: Arrived::parse(&mut lines)? })
    }
}

impl Arrived {
    fn text(&self) -> String {
        let Arrived { address, boot: (here, told) } = self;
        format!("address {address}\nboot {here:x}\ntold {told:x}\n")
    }

    fn parse(lines: &mut Lines<'_>) -> Option<Arrived> {
        let address = lines.word("address")?.into();
        let boot = (u32::try_from(lines.number("boot")?).ok()?, u32::try_from(lines.number("told")?).ok()?);
        Some(Arrived { address, boot })
    }
}

impl Departed {
    fn text(&self) -> String {
        format!("move {:x}\naddress {}\n", self.number, self.address)
    }

    fn parse(text: &str) -> Option<Departed> {
        let mut lines = Lines(text.lines());
        Some(Departed { number: lines.number("move")?, address: lines.word("address")?.into() })
    }
}

/// The text of a mark; `None` if there is none.
fn read(fs: &impl FileSystem, name: &str) -> io::Result<Option<String>> {
    Ok(read_all(fs, name)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn unreadable(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("its file `{name}` cannot be read"))
}

fn mark<F: FileSystem, T>(fs: &F, name: &str, parse: impl Fn(&str) -> Option<T>) -> io::Result<Option<T>> {
    read(fs, name)?.map(|text| parse(&text).ok_or_else(|| unreadable(name))).transpose()
}

/// A mark of a folder that may be missing, or be none of a store.
fn look<T>(dir: &Path, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, StoreError> {
    if !dir.exists() {
        return Ok(None);
    }
    let failed = |source| StoreError::Io { dir: dir.into(), source };
    mark(&Real::look(dir)?, name, parse).map_err(failed)
}

/// The copy that is under way to a folder, if one is.
pub fn arriving(dir: &Path) -> Result<Option<Arriving>, StoreError> {
    look(dir, ARRIVING, Arriving::parse)
}

/// How a folder came, if it came by a move that is complete.
pub fn arrived(dir: &Path) -> Result<Option<Arrived>, StoreError> {
    match arriving(dir)? {
        Some(_) => Ok(None),
        None => look(dir, ARRIVED, |text| Arrived::parse(&mut Lines(text.lines()))),
    }
}

/// Where the server of a folder has gone, if it has moved away.
pub fn departed(dir: &Path) -> Result<Option<Departed>, StoreError> {
    look(dir, DEPARTED, Departed::parse)
}

/// Refuses folders that no server may open.
pub(crate) fn check<F: FileSystem>(fs: &F, dir: &Path) -> Result<(), StoreError> {
    let failed = |source| StoreError::Io { dir: dir.into(), source };
    if let Some(Departed { number, address }) = mark(fs, DEPARTED, Departed::parse).map_err(failed)? {
        return Err(StoreError::Departed { dir: dir.into(), address, number });
    }
    match mark(fs, ARRIVING, Arriving::parse).map_err(failed)? {
        Some(_) => Err(StoreError::Arriving { dir: dir.into() }),
        None => Ok(()),
    }
}

/// Makes an empty folder one to be filled, or empties one whose filling begins anew.
pub fn begin_arrival(dir: &Path, identity: &FolderIdentity, arriving: &Arriving) -> Result<(), StoreError> {
    let failed = |source| StoreError::Io { dir: dir.into(), source };
    let fs = Real::make(dir)?;
    match folder::state_of(&fs, dir)? {
        FolderState::Made(made) => {
            let is_ours = made == *identity && mark(&fs, ARRIVING, Arriving::parse).map_err(failed)?.is_some();
            if !is_ours {
                return Err(StoreError::Made { dir: dir.into(), whose: folder::whose(&made) });
            }
        }
        FolderState::Blank => {}
        FolderState::Older => return Err(StoreError::Older { dir: dir.into() }),
    }
    // The mark is there before anything that a server would open, and says "from the start" while the folder is emptied.
    write_arriving(&fs, dir, arriving)?;
    empty(dir).map_err(failed)?;
    if folder::state_of(&fs, dir)? == FolderState::Blank {
        folder::make_over(&fs, dir, identity)?;
    }
    Ok(())
}

/// Empties a folder whose filling is given up, if `may_be`, which is asked while nobody else can fill it, does not fail. False: it
/// is not being filled.
pub fn abandon_arrival<E: From<StoreError>>(
    dir: &Path,
    may_be: impl FnOnce(&Arriving) -> Result<(), E>,
) -> Result<bool, E> {
    if arriving(dir)?.is_none() {
        return Ok(false);
    }
    let failed = |source| StoreError::Io { dir: dir.into(), source };
    let fs = Real::open(dir)?;
    let Some(found) = mark(&fs, ARRIVING, Arriving::parse).map_err(failed)? else { return Ok(false) };
    may_be(&found)?;
    empty(dir).map_err(failed)?;
    unmark_over(&fs).map_err(failed)?;
    Ok(true)
}

/// Makes an emptied folder no server's, over any file system. Last goes the mark: neither an interruption nor a power failure
/// leaves a folder that a server would open.
pub fn unmark_over<F: FileSystem>(fs: &F) -> io::Result<()> {
    fs.unlink(FORMAT_FILE)?;
    fs.sync_dir("")?;
    fs.unlink(ARRIVING)
}

/// Removes what a copy has made.
fn empty(dir: &Path) -> io::Result<()> {
    let missing_is_well = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    missing_is_well(std::fs::remove_dir_all(dir.join(OBJECTS)))?;
    COPIED.iter().try_for_each(|name| missing_is_well(std::fs::remove_file(dir.join(name))))
}

fn write_arriving<F: FileSystem>(fs: &F, dir: &Path, arriving: &Arriving) -> Result<(), StoreError> {
    let written = replace_file(fs, ARRIVING, "arriving.new", arriving.text().as_bytes());
    written.map(drop).map_err(|source| StoreError::NotWritable { dir: dir.into(), source })
}

impl ObjectStore<Real> {
    /// Opens a folder that is being filled, for the copy.
    pub fn open_arriving(dir: &Path, server: &str, options: StoreOptions) -> Result<ObjectStore<Real>, StoreError> {
        let fs = Real::open(dir)?;
        let failed = |source| StoreError::Io { dir: dir.into(), source };
        if mark(&fs, ARRIVING, Arriving::parse).map_err(failed)?.is_none() {
            return Err(StoreError::Io { dir: dir.into(), source: unreadable(ARRIVING) });
        }
        ObjectStore::over_any(fs, dir, server, options)
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Notes how far a copy is; what it claims must be durable.
    pub fn note_arriving(&self, arriving: &Arriving) -> io::Result<()> {
        replace_file(&self.fs, ARRIVING, "arriving.new", arriving.text().as_bytes()).map(drop)
    }

    /// The copy is complete and the server has departed: from now on the folder is the server's.
    pub fn arrive(&self, arrived: &Arrived) -> io::Result<()> {
        replace_file(&self.fs, ARRIVED, "arrived.new", arrived.text().as_bytes())?;
        self.fs.unlink(ARRIVING)?;
        self.fs.sync_dir("")
    }

    /// Marks the folder as one that its server has left. On an error it is not known whether it is marked.
    pub fn depart(&self, departed: &Departed) -> io::Result<()> {
        replace_file(&self.fs, DEPARTED, "departed.new", departed.text().as_bytes()).map(drop)
    }

    /// Takes back a mark of which it is not known whether it is there.
    pub fn stay(&self) -> io::Result<()> {
        match self.fs.unlink(DEPARTED) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.fs.sync_dir("")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::make_over;
    use crate::testing::Forgetful;

    fn identity() -> FolderIdentity {
        FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }
    }

    fn under_way(next: Option<u64>) -> Arriving {
        let arrived = Arrived { address: "host:7".into(), boot: (5, u32::MAX) };
        Arriving { number: 9, next, batch: 3, is_complete: next.is_none(), arrived }
    }

    #[test]
    fn marks_are_read_back() {
        for arriving in [under_way(None), under_way(Some(u64::MAX))] {
            assert_eq!(Arriving::parse(&arriving.text()), Some(arriving));
        }
        let departed = Departed { number: u64::MAX, address: "unix:/a b".into() };
        assert_eq!(Departed::parse(&departed.text()), Some(departed));
        for bad in ["", "move x\n", "move 1\nnext 1\n"] {
            assert!(Arriving::parse(bad).is_none() && Departed::parse(bad).is_none());
        }
    }

    #[test]
    fn no_server_opens_a_folder_that_is_being_filled_or_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let options = StoreOptions::default;
        begin_arrival(dir, &identity(), &under_way(Some(0))).unwrap();
        let error = ObjectStore::open(dir, "data.0", options()).err().unwrap().to_string();
        assert!(error.contains("impresario store move"), "{error}");
        let copy = ObjectStore::open_arriving(dir, "data.0", options()).unwrap();
        copy.truncate(5, 100).unwrap();
        drop(copy);
        let refused = abandon_arrival(dir, |_| Err(StoreError::Blank { dir: dir.into() }));
        assert!(refused.is_err() && arriving(dir).unwrap().is_some());
        assert!(abandon_arrival::<StoreError>(dir, |_| Ok(())).unwrap());
        assert!(!abandon_arrival::<StoreError>(dir, |_| Ok(())).unwrap());
        assert_eq!(folder::examine(dir).unwrap(), FolderState::Blank);
        begin_arrival(dir, &identity(), &under_way(None)).unwrap();
        let copy = ObjectStore::open_arriving(dir, "data.0", options()).unwrap();
        assert_eq!(copy.look(5).unwrap(), None, "it began anew");
        assert!(arrived(dir).unwrap().is_none() && arriving(dir).unwrap() == Some(under_way(None)));
        copy.arrive(&under_way(None).arrived).unwrap();
        drop(copy);
        assert_eq!(arrived(dir).unwrap(), Some(under_way(None).arrived));
        let error = begin_arrival(dir, &identity(), &under_way(None)).err().unwrap().to_string();
        assert!(error.contains("is that of data.0"), "{error}");
        let store = ObjectStore::open(dir, "data.0", options()).unwrap();
        assert!(store.foreign_at_top().unwrap().is_empty());
        let left = Departed { number: 9, address: "there:7".into() };
        store.depart(&left).unwrap();
        store.stay().unwrap();
        assert_eq!(departed(dir).unwrap(), None);
        store.depart(&left).unwrap();
        drop(store);
        assert_eq!(departed(dir).unwrap(), Some(left));
        let error = ObjectStore::open(dir, "data.0", options()).err().unwrap().to_string();
        assert!(error.contains("there:7") && error.contains("moved"), "{error}");
    }

    #[test]
    fn a_departure_that_returned_outlasts_a_power_failure() {
        let fs = Forgetful::default();
        let dir = Path::new("forgetful");
        make_over(&fs, dir, &identity()).unwrap();
        let store = ObjectStore::over(fs.clone(), dir, "data.0", StoreOptions::default()).unwrap();
        store.depart(&Departed { number: 9, address: "there:7".into() }).unwrap();
        fs.crash();
        let opened = ObjectStore::over(fs, dir, "data.0", StoreOptions::default());
        assert!(matches!(opened.err().unwrap(), StoreError::Departed { number: 9, .. }));
    }
}
