//! Random calls, and a plain folder that does the same by the kernel as the model: every answer, every error number and
//! in the end every byte must agree.

use std::ffi::CString;
use std::fs::File;
use std::io::{Error, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use impresario_base::random::Random;
use rustc_hash::FxHashMap;

use super::Suite;
use crate::{Errno, Handle, Kind, Make, Result, SetAttr};

/// Names in each folder, few enough that calls meet.
const NAMES: u64 = 5;
/// Folders below one another at most.
const DEPTH: u64 = 3;

/// Makes `steps` random calls below the root of the backend and in `model`, an empty folder of this machine that allows
/// the caller everything.
///
/// # Panics
/// Where both differ, with the step.
pub fn compare(suite: &Suite<'_>, model: &Path, seed: u64, steps: u64) {
    let mut random = Random::new(seed);
    let mut known = FxHashMap::default();
    for step in 0..steps {
        let call = Call::draw(&mut random);
        let (ours, theirs) = (call.on_backend(suite, &mut known), call.on_model(model));
        assert_eq!(ours, theirs, "seed {seed}, step {step}: {call:?}");
    }
    same(suite, &suite.backend.root().expect("a root"), model);
}

type Names = Vec<String>;

#[derive(Debug)]
enum Call {
    File(Names),
    FileIfNone(Names),
    Folder(Names),
    Symlink(Names),
    Link(Names, Names),
    Remove(Names),
    RemoveFolder(Names),
    Rename(Names, Names),
    RenameNew(Names, Names),
    Write(Names, u64, Vec<u8>),
    Read(Names, u64, usize),
    Cut(Names, u64),
    Mode(Names, u32),
    Attr(Names),
    ReadLink(Names),
    List(Names),
}

fn draw_names(random: &mut Random) -> Names {
    let depth = 1 + random.below(DEPTH);
    (0..depth).map(|_| format!("n{}", random.below(NAMES))).collect()
}

impl Call {
    fn draw(random: &mut Random) -> Call {
        let names = draw_names(random);
        match random.below(20) {
            0 | 1 => Call::File(names),
            2 => Call::FileIfNone(names),
            3 | 4 => Call::Folder(names),
            5 => Call::Symlink(names),
            6 => Call::Link(names, draw_names(random)),
            7 => Call::Remove(names),
            8 => Call::RemoveFolder(names),
            9 | 10 => Call::Rename(names, draw_names(random)),
            11 => Call::RenameNew(names, draw_names(random)),
            12 | 13 => {
                let len = random.below(5000);
                let byte = random.below(256) as u8;
                Call::Write(names, random.below(20_000), vec![byte; len as usize])
            }
            14 => Call::Read(names, random.below(20_000), random.below(8000) as usize),
            15 => Call::Cut(names, random.below(20_000)),
            16 => Call::Mode(names, 0o600 | random.below(0o200) as u32),
            17 => Call::Attr(names),
            18 => Call::ReadLink(names),
            _ => Call::List(names),
        }
    }

    fn on_backend(&self, suite: &Suite<'_>, known: &mut FxHashMap<Handle, u64>) -> Result<Vec<u8>> {
        let Suite { backend, caller, .. } = suite;
        let none = SetAttr::default();
        let find = |names: &[String]| -> Result<Handle> {
            let mut at = backend.root()?;
            for name in names {
                at = backend.lookup(caller, &at, name.as_bytes())?.0;
            }
            Ok(at)
        };
        let split = |names: &Names| -> Result<(Handle, Vec<u8>)> {
            let (last, dirs) = names.split_last().expect("a name");
            Ok((find(dirs)?, last.clone().into_bytes()))
        };
        let mut make = |names: &Names, what: Make<'_>| -> Result<Vec<u8>> {
            let (dir, name) = split(names)?;
            let (handle, attr) = backend.make(caller, &dir, &name, what, &none)?;
            // A handle is given once only, unless it is of the same node.
            let before = known.insert(handle, attr.fileid);
            assert!(before.is_none_or(|fileid| fileid == attr.fileid), "{handle:?} names two nodes");
            Ok(vec![])
        };
        match self {
            Call::File(names) => make(names, Make::File),
            Call::FileIfNone(names) => make(names, Make::FileIfNone),
            Call::Folder(names) => make(names, Make::Directory),
            Call::Symlink(names) => make(names, Make::Symlink(b"n0/n1")),
            Call::Link(from, to) => {
                let (node, (dir, name)) = (find(from)?, split(to)?);
                Ok(backend.link(caller, &node, &dir, &name)?.links.to_le_bytes().to_vec())
            }
            Call::Remove(names) => {
                split(names).and_then(|(dir, name)| backend.remove(caller, &dir, &name)).map(|()| vec![])
            }
            Call::RemoveFolder(names) => {
                split(names).and_then(|(dir, name)| backend.remove_dir(caller, &dir, &name)).map(|()| vec![])
            }
            Call::Rename(from, to) | Call::RenameNew(from, to) => {
                let ((from_dir, old), (to_dir, new)) = (split(from)?, split(to)?);
                let (from, to) = ((&from_dir, &old[..]), (&to_dir, &new[..]));
                let renamed = match self {
                    Call::Rename(..) => backend.rename(caller, from, to),
                    _ => backend.rename_new(caller, from, to),
                };
                renamed.map(|()| vec![])
            }
            Call::Write(names, at, bytes) => backend.write(caller, &find(names)?, *at, bytes, false).map(|()| vec![]),
            Call::Read(names, at, len) => {
                let mut bytes = vec![0; *len];
                let got = backend.read(caller, &find(names)?, *at, &mut bytes)?;
                bytes.truncate(got);
                Ok(bytes)
            }
            Call::Cut(names, size) => {
                let set = SetAttr { size_bytes: Some(*size), ..none };
                Ok(told(&backend.set_attr(caller, &find(names)?, &set)?))
            }
            Call::Mode(names, mode) => {
                let node = find(names)?;
                if backend.attr(&node)?.kind == Kind::Symlink {
                    return Ok(vec![]); // the model's call would follow it
                }
                Ok(told(&backend.set_attr(caller, &node, &SetAttr { mode: Some(*mode), ..none })?))
            }
            Call::Attr(names) => Ok(told(&backend.attr(&find(names)?)?)),
            Call::ReadLink(names) => backend.read_link(caller, &find(names)?),
            Call::List(names) => list(suite, &find(names)?),
        }
    }

    fn on_model(&self, root: &Path) -> Result<Vec<u8>> {
        let path = |names: &Names| names.iter().fold(root.to_path_buf(), |path, name| path.join(name));
        // Look-ups one by one, as the contract has them: none follows a link.
        let find = |names: &[String]| -> Result<std::path::PathBuf> {
            let mut at = root.to_path_buf();
            for name in names {
                if !at.symlink_metadata()?.is_dir() {
                    return Err(Errno(libc::ENOTDIR));
                }
                at.push(name);
                at.symlink_metadata()?;
            }
            Ok(at)
        };
        let above = |names: &Names| find(&names[..names.len() - 1]);
        let is_folder = |path: &Path| {
            if path.symlink_metadata()?.is_dir() { Ok(()) } else { Err(Errno(libc::ENOTDIR)) }
        };
        let c = |names: &Names| CString::new(path(names).as_os_str().as_bytes()).expect("a path");
        let done =
            |answer: libc::c_int| if answer == 0 { Ok(vec![]) } else { Err(Errno::from(Error::last_os_error())) };
        let attr = |names: &Names| -> Result<Vec<u8>> {
            let meta = path(names).symlink_metadata()?;
            Ok([u64::from(meta.mode() & 0o7777), meta.nlink(), if meta.is_dir() { 0 } else { meta.size() }]
                .map(u64::to_le_bytes)
                .concat())
        };
        // What a folder or a link says when it is used as a file.
        let as_file = |names: &Names| -> Result<()> {
            let meta = find(names)?.symlink_metadata()?;
            if meta.is_dir() {
                return Err(Errno(libc::EISDIR));
            }
            if meta.is_symlink() { Err(Errno(libc::EINVAL)) } else { Ok(()) }
        };
        match self {
            Call::File(names) | Call::FileIfNone(names) => {
                is_folder(&above(names)?)?;
                let created = File::options().write(true).create_new(true).mode(0o644).open(path(names));
                match (created.map_err(Errno::from), self) {
                    (Err(Errno(libc::EEXIST)), Call::FileIfNone(_)) => {
                        let meta = path(names).symlink_metadata()?;
                        let errno = if meta.is_dir() { libc::EISDIR } else { libc::EEXIST };
                        if meta.is_file() { Ok(vec![]) } else { Err(Errno(errno)) }
                    }
                    (created, _) => {
                        created?.set_permissions(std::fs::Permissions::from_mode(0o644))?;
                        Ok(vec![])
                    }
                }
            }
            Call::Folder(names) => {
                is_folder(&above(names)?)?;
                std::fs::DirBuilder::new().mode(0o755).create(path(names))?;
                std::fs::set_permissions(path(names), std::fs::Permissions::from_mode(0o755))?;
                Ok(vec![])
            }
            Call::Symlink(names) => {
                is_folder(&above(names)?)?;
                std::os::unix::fs::symlink("n0/n1", path(names))?;
                Ok(vec![])
            }
            Call::Link(from, to) => {
                find(from)?;
                is_folder(&above(to)?)?;
                // SAFETY: both are C strings.
                done(unsafe { libc::link(c(from).as_ptr(), c(to).as_ptr()) })?;
                Ok((path(to).symlink_metadata()?.nlink() as u32).to_le_bytes().to_vec())
            }
            Call::Remove(names) => {
                is_folder(&above(names)?)?;
                // SAFETY: a C string.
                done(unsafe { libc::unlink(c(names).as_ptr()) })
            }
            Call::RemoveFolder(names) => {
                is_folder(&above(names)?)?;
                // SAFETY: a C string.
                done(unsafe { libc::rmdir(c(names).as_ptr()) })
            }
            Call::Rename(from, to) | Call::RenameNew(from, to) => {
                let (from_dir, to_dir) = (above(from)?, above(to)?);
                is_folder(&from_dir)?;
                is_folder(&to_dir)?;
                let flags = if matches!(self, Call::Rename(..)) { 0 } else { libc::RENAME_NOREPLACE };
                let at = libc::AT_FDCWD;
                // SAFETY: both are C strings.
                done(unsafe { libc::renameat2(at, c(from).as_ptr(), at, c(to).as_ptr(), flags) })
            }
            Call::Write(names, at, bytes) => {
                as_file(names)?;
                File::options().write(true).open(path(names))?.write_all_at(bytes, *at)?;
                Ok(vec![])
            }
            Call::Read(names, at, len) => {
                as_file(names)?;
                let (mut file, mut bytes) = (File::open(path(names))?, Vec::new());
                file.seek(SeekFrom::Start(*at))?;
                file.take(*len as u64).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
            Call::Cut(names, size) => {
                as_file(names)?;
                let mut file = File::options().write(true).open(path(names))?;
                file.set_len(*size)?;
                file.flush()?;
                attr(names)
            }
            Call::Mode(names, mode) => {
                if find(names)?.symlink_metadata()?.is_symlink() {
                    return Ok(vec![]);
                }
                std::fs::set_permissions(path(names), std::fs::Permissions::from_mode(*mode))?;
                attr(names)
            }
            Call::Attr(names) => {
                find(names)?;
                attr(names)
            }
            Call::ReadLink(names) => Ok(std::fs::read_link(find(names)?)?.as_os_str().as_bytes().to_vec()),
            Call::List(names) => {
                let dir = find(names)?;
                is_folder(&dir)?;
                list_model(&dir)
            }
        }
    }
}

fn told(attr: &crate::Attr) -> Vec<u8> {
    let size = if attr.kind == Kind::Directory { 0 } else { attr.size_bytes };
    [u64::from(attr.mode), u64::from(attr.links), size].map(u64::to_le_bytes).concat()
}

fn list(suite: &Suite<'_>, dir: &Handle) -> Result<Vec<u8>> {
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let (entries, last) = suite.backend.read_dir(&suite.caller, dir, cookie, 3)?;
        cookie = entries.last().map_or(cookie, |entry| entry.cookie);
        names.extend(entries.into_iter().map(|entry| entry.name).filter(|name| name != b"." && name != b".."));
        if last {
            names.sort();
            return Ok(names.join(&b'/'));
        }
    }
}

fn list_model(dir: &Path) -> Result<Vec<u8>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.push(entry?.file_name().as_bytes().to_vec());
    }
    names.sort();
    Ok(names.join(&b'/'))
}

/// Compares what is below both.
fn same(suite: &Suite<'_>, dir: &Handle, model: &Path) {
    let names = list(suite, dir).expect("a listing");
    assert_eq!(names, list_model(model).expect("a listing"), "{}", model.display());
    for name in names.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        let (node, attr) = suite.backend.lookup(&suite.caller, dir, name).expect("a node");
        let model = model.join(std::ffi::OsStr::from_bytes(name));
        match attr.kind {
            Kind::Directory => same(suite, &node, &model),
            Kind::Symlink => {
                let text = suite.backend.read_link(&suite.caller, &node).expect("a link");
                assert_eq!(text, std::fs::read_link(&model).expect("a link").as_os_str().as_bytes());
            }
            _ => assert!(suite.contents(&node) == Ok(std::fs::read(&model).expect("a file")), "{}", model.display()),
        }
    }
}
