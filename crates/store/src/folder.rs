//! Whose folder it is: the file `format` at its top, how it is written, and what is refused.
//!
//! The file names the version of the format, the cluster and the server that the folder was made for, and carries a random
//! number of its own. A server opens a folder that was made for it and no other: an empty one may be a disk that is not
//! mounted, and zeros in the place of a file are worse than a server that does not start.

use std::io::{self, IoSliceMut};
use std::path::Path;

use crate::checks::{CHECKSUMS, CHECKSUMS_NEW, CHECKSUMS_OFF};
use crate::error::StoreError;
use crate::examine::SET_ASIDE;
use crate::filesystem::FileSystem;
use crate::keys::{KEYS, KEYS_NEW, NUMBER, NUMBER_NEW};
use crate::objects::OBJECTS;
use crate::passage::{ARRIVING, MARKS};
use crate::real::Real;
use crate::removed::{REMOVED, REMOVED_OLD};
use crate::replace::replace_file;

const FORMAT: &str = "impresario objects 2";
/// Without identities: adopted, not served.
const FORMAT_1: &str = "impresario objects 1";
pub(crate) const FORMAT_FILE: &str = "format";
const FORMAT_NEW: &str = "format.new";
/// Names that a data server's directory may hold at its top level.
const KNOWN_NAMES: [&str; 7] = [FORMAT_FILE, FORMAT_NEW, OBJECTS, "lock", "lost+found", ARRIVING, "arriving.new"];
/// Longest file `format`, bytes: names of servers have 64 characters at most.
const FORMAT_MAX_BYTES: usize = 512;

/// Whose a folder is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FolderIdentity {
    /// The cluster; never 0.
    pub cluster: u64,
    /// The folder itself, drawn at random when it was made; never 0.
    pub store: u64,
    /// The server's name in the configuration.
    pub server: String,
}

/// What a folder is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FolderState {
    /// There is none, or it is empty, or its making was interrupted: it holds no objects.
    Blank,
    /// Of a version without identities. Its objects are those of the present version.
    Older,
    /// Made for a server of a cluster.
    Made(FolderIdentity),
}

impl FolderIdentity {
    fn text(&self) -> String {
        let FolderIdentity { cluster, store, server } = self;
        format!("{FORMAT}\ncluster {cluster:016x}\nstore {store:016x}\nserver {server}\n")
    }

    fn parse(text: &str) -> Option<FolderIdentity> {
        let mut lines = text.lines();
        let mut word = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        let number = |digits: &str| u64::from_str_radix(digits, 16).ok().filter(|number| *number != 0);
        word("impresario")?;
        let (cluster, store) = (number(word("cluster")?)?, number(word("store")?)?);
        let server = word("server").filter(|server| !server.is_empty())?.to_string();
        Some(FolderIdentity { cluster, store, server })
    }
}

/// Finds out what a folder is, and changes nothing. An error is a folder of something else.
pub fn examine(dir: &Path) -> Result<FolderState, StoreError> {
    if !dir.exists() {
        return Ok(FolderState::Blank);
    }
    state_of(&Real::look(dir)?, dir)
}

/// Makes an empty or missing folder, or one whose making was interrupted, the folder of a server.
pub fn make(dir: &Path, identity: &FolderIdentity) -> Result<(), StoreError> {
    make_over(&Real::make(dir)?, dir, identity)
}

/// Whether a server has served a folder, or may have.
pub fn is_served(dir: &Path) -> bool {
    !matches!(dir.join(OBJECTS).symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Undoes [`make`] of a folder that no server has served yet: it is an empty one again. Others are left alone.
pub fn unmake(dir: &Path) -> io::Result<()> {
    if is_served(dir) {
        return Err(io::ErrorKind::DirectoryNotEmpty.into());
    }
    std::fs::remove_file(dir.join(FORMAT_FILE))
}

/// The same over any file system; `dir` is its name in messages.
pub fn make_over<F: FileSystem>(fs: &F, dir: &Path, identity: &FolderIdentity) -> Result<(), StoreError> {
    match state_of(fs, dir)? {
        FolderState::Blank => write_format(fs, dir, identity),
        FolderState::Older => Err(StoreError::Older { dir: dir.into() }),
        FolderState::Made(identity) => Err(StoreError::Made { dir: dir.into(), whose: whose(&identity) }),
    }
}

/// Gives a folder with objects, of an older version or of a server that was renamed, to a server. Objects stay as they are.
pub fn adopt(dir: &Path, identity: &FolderIdentity) -> Result<(), StoreError> {
    let fs = Real::open(dir)?;
    match state_of(&fs, dir)? {
        FolderState::Blank => Err(StoreError::Blank { dir: dir.into() }),
        FolderState::Made(made) if (made.cluster, made.store) != (identity.cluster, identity.store) => {
            Err(StoreError::Made { dir: dir.into(), whose: whose(&made) })
        }
        FolderState::Older | FolderState::Made(_) => write_format(&fs, dir, identity),
    }
}

/// The key of one of the objects in a folder, if it has any.
pub fn any_key(dir: &Path) -> Result<Option<u64>, StoreError> {
    let failed = |source: io::Error| StoreError::Io { dir: dir.into(), source };
    let missing_is_empty = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(Vec::new()),
        _ => Err(error),
    };
    let list = |dir: &Path| -> io::Result<Vec<_>> { std::fs::read_dir(dir)?.collect() };
    for folder in list(&dir.join(OBJECTS)).or_else(missing_is_empty).map_err(failed)? {
        for object in list(&folder.path()).or_else(missing_is_empty).map_err(failed)? {
            if let Some(key) = object.file_name().to_str().and_then(|name| u64::from_str_radix(name, 16).ok()) {
                return Ok(Some(key));
            }
        }
    }
    Ok(None)
}

/// The identity of the folder that a server is to serve; refuses all that was not made for it. Makes what is missing of its
/// inside.
pub(crate) fn open<F: FileSystem>(fs: &F, dir: &Path, server: &str) -> Result<FolderIdentity, StoreError> {
    match state_of(fs, dir)? {
        FolderState::Blank => Err(StoreError::Blank { dir: dir.into() }),
        FolderState::Older => Err(StoreError::Older { dir: dir.into() }),
        FolderState::Made(identity) if identity.server != server => {
            let (whose, server) = (whose(&identity), server.into());
            Err(StoreError::Other { dir: dir.into(), whose, server })
        }
        FolderState::Made(identity) => Ok(identity),
    }
}

/// True for names that the top of a store's folder may have.
pub(crate) fn is_known(name: &str) -> bool {
    const MORE: [&str; 13] = [
        KEYS,
        KEYS_NEW,
        NUMBER,
        NUMBER_NEW,
        "notes",
        "notes.new",
        crate::doubts::SYNCING,
        REMOVED,
        REMOVED_OLD,
        SET_ASIDE,
        CHECKSUMS,
        CHECKSUMS_OFF,
        CHECKSUMS_NEW,
    ];
    KNOWN_NAMES.contains(&name) || MORE.contains(&name) || MARKS.contains(&name)
}

pub(crate) fn whose(identity: &FolderIdentity) -> String {
    format!("{} of cluster {:016x}", identity.server, identity.cluster)
}

pub(crate) fn state_of<F: FileSystem>(fs: &F, dir: &Path) -> Result<FolderState, StoreError> {
    let failed = |source: io::Error| StoreError::Io { dir: dir.into(), source };
    let file = match fs.open(FORMAT_FILE, false) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let names = fs.names("").map_err(failed)?;
            // `objects` is made after `format`: without `format` it belongs to something else.
            let ours = |name: &String| KNOWN_NAMES.contains(&name.as_str()) && name != OBJECTS;
            return match names.into_iter().find(|name| !ours(name)) {
                Some(found) => Err(StoreError::Foreign { dir: dir.into(), found }),
                None => Ok(FolderState::Blank),
            };
        }
        Err(e) => return Err(failed(e)),
    };
    let mut bytes = [0; FORMAT_MAX_BYTES];
    let len = fs.read(&file, 0, &mut [IoSliceMut::new(&mut bytes)]).map_err(failed)?;
    let text = String::from_utf8_lossy(bytes.get(..len).unwrap_or_default());
    let first = text.lines().next().unwrap_or_default();
    if first == FORMAT_1 {
        return Ok(FolderState::Older);
    }
    let identity = (first == FORMAT).then(|| FolderIdentity::parse(&text)).flatten();
    identity.map(FolderState::Made).ok_or_else(|| {
        let found = text.trim_end().chars().take(100).collect();
        StoreError::Version { dir: dir.into(), found, known: FORMAT }
    })
}

/// After a power failure the format file is either complete or as it was.
fn write_format<F: FileSystem>(fs: &F, dir: &Path, identity: &FolderIdentity) -> Result<(), StoreError> {
    let written = replace_file(fs, FORMAT_FILE, FORMAT_NEW, identity.text().as_bytes());
    written.map(drop).map_err(|source| StoreError::NotWritable { dir: dir.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_read_back_and_others_are_not() {
        let identity = FolderIdentity { cluster: 7, store: u64::MAX, server: "data.0".into() };
        let text = identity.text();
        assert_eq!(FolderIdentity::parse(&text), Some(identity));
        for bad in [
            FORMAT.into(),
            text.replace("0000000000000007", "0000000000000000"),
            text.replace("data.0", ""),
            text.replace("store", "shop"),
            text.lines().take(3).collect::<Vec<_>>().join("\n"),
        ] {
            assert_eq!(FolderIdentity::parse(&bad), None, "{bad}");
        }
    }
}
