//! The procedures of NFS on names and attributes (RFC 1813, 3.3): arguments in, one call of the backend, results out.

use impresario_backend::{Attr, DirEntry, Handle, Kind, Make, SetAttr};

use crate::protocol::{
    Answer, Change, NAME_MAX_BYTES, PATH_MAX_BYTES, Status, procedure::*, read_set, read_time, write_after, write_attr,
    write_change, write_time,
};
use crate::service::{Asker, Node, handle};
use crate::xdr::{Garbage, Reader, Writer};

/// Longest listing in one answer, bytes.
pub const LISTING_MAX_BYTES: u32 = 64 << 10;
/// Entries asked of the backend at once.
const ENTRIES_MAX: usize = 1024;
/// Cookies stay valid, so one verifier serves all directories for ever.
const COOKIE_VERIFIER: [u8; 8] = *b"imprdir1";

/// Writes that a call failed, with no attributes: the shape depends on the procedure.
pub fn fail(out: &mut Writer, procedure: u32, status: Status) {
    out.u32(status.0);
    let absent = match procedure {
        NULL | GETATTR => 0,
        LOOKUP | ACCESS | READLINK | READ | READDIR | READDIRPLUS | FSSTAT | FSINFO | PATHCONF => 1,
        RENAME => 4,
        LINK => 3,
        _ => 2,
    };
    (0..absent).for_each(|_| {
        out.bool(false);
    });
}

/// Serves a call: writes its results, and gives its status.
pub fn serve(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Result<Status, Garbage> {
    let before = out.len();
    let served = match procedure {
        NULL => args.end().map(|()| Ok(())),
        GETATTR => getattr(asker, args, out),
        SETATTR => setattr(asker, args, out),
        LOOKUP => lookup(asker, args, out),
        ACCESS => access(asker, args, out),
        READLINK => readlink(asker, args, out),
        CREATE | MKDIR | SYMLINK | MKNOD => make(asker, procedure, args, out),
        REMOVE | RMDIR => remove(asker, procedure, args, out),
        RENAME => rename(asker, args, out),
        LINK => link(asker, args, out),
        READDIR | READDIRPLUS => readdir(asker, procedure, args, out),
        FSSTAT | FSINFO | PATHCONF => about(asker, procedure, args, out),
        _ => Err(Garbage),
    };
    match served? {
        Ok(()) => Ok(Status::OK),
        Err(Failed::Told(status)) => Ok(status),
        Err(Failed::Untold(status)) => {
            out.truncate(before);
            fail(out, procedure, status);
            Ok(status)
        }
    }
}

/// Why a call failed.
enum Failed {
    /// What is to be answered is written.
    Told(Status),
    /// Nothing is written yet.
    Untold(Status),
}

impl From<Status> for Failed {
    fn from(status: Status) -> Failed {
        Failed::Untold(status)
    }
}

impl From<impresario_backend::Errno> for Failed {
    fn from(error: impresario_backend::Errno) -> Failed {
        Failed::Untold(error.into())
    }
}

/// Garbage, or what became of the call.
type Served = Result<Result<(), Failed>, Garbage>;

/// Does what may fail with a status, in a function that may also find garbage.
macro_rules! attempt {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return Ok(Err(error.into())),
        }
    };
}

fn name<'a>(args: &mut Reader<'a>) -> Result<&'a [u8], Garbage> {
    args.opaque(NAME_MAX_BYTES)
}

impl Node {
    /// Its attributes, where they can be had.
    pub fn attr(&self) -> Option<Attr> {
        self.export.backend.attr(&self.handle).ok()
    }

    /// The same where they can be had without waiting for the file system, as a thread must that serves other exports too.
    pub fn known_attr(&self) -> Option<Attr> {
        self.export.backend.known_attr(&self.handle)
    }

    /// Its handle as clients get it.
    fn seal(&self, asker: &Asker<'_>, node: &Handle) -> Vec<u8> {
        asker.service.key.seal(self.export.number, node)
    }

    fn is_root(&self) -> bool {
        self.handle == self.export.root
    }

    /// The node of a name here; nothing above the export is reached.
    fn lookup(&self, name: &[u8]) -> Answer<(Handle, Attr)> {
        if name == b".." && self.is_root() {
            return Ok((self.handle, self.export.backend.attr(&self.handle)?));
        }
        let found = self.export.backend.lookup(&self.caller, &self.handle, name)?;
        // A directory may have been moved by others out of the folder that is exported; the backend sees to its own root.
        if name == b".." && self.export.is_below && !self.export.contains(found.0)? {
            return Err(Status::STALE);
        }
        Ok(found)
    }

    /// Changes it; what it was before is known where no other client can have changed it meanwhile.
    pub fn change<T>(&self, asker: &Asker<'_>, change: impl FnOnce() -> Answer<T>) -> (Answer<T>, Change) {
        let began = asker.service.changes.begin(&self.handle, Some(asker.client()));
        let before = self.attr();
        let done = change();
        let after = self.attr();
        let exact = began.end();
        (done, Change { before: before.filter(|_| exact), after })
    }

    /// Changes names in it, which are stable when this returns.
    fn change_names<T>(&self, asker: &Asker<'_>, change: impl FnOnce() -> Answer<T>) -> (Answer<T>, Change) {
        let (done, told) = self.change(asker, change);
        (done.and_then(|value| self.stabilize().map(|()| value)), told)
    }

    /// Puts its attributes, of a directory also its names, on stable storage, as a change must be before it is answered
    /// (RFC 1813, 4.8). Calls that wait at the same time share what is done.
    fn stabilize(&self) -> Answer<()> {
        if self.export.rules.stable_names {
            self.export.backend.sync(&self.handle)?;
        }
        Ok(())
    }
}

fn getattr(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let sealed = handle(args)?;
    args.end()?;
    let node = attempt!(asker.node(sealed));
    let attr = attempt!(node.export.backend.attr(&node.handle));
    out.u32(0);
    write_attr(out, &attr);
    Ok(Ok(()))
}

/// Without a size: with one it is the scheduler's.
fn setattr(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, set, guard) = (handle(args)?, read_set(args)?, args.optional(read_time)?);
    args.end()?;
    let node = attempt!(asker.node_to_change(sealed));
    let set_settled = || {
        asker.service.gathering.settle(node.key())?;
        set_attr(&node, &set, guard)
    };
    let (done, change) = node.change(asker, set_settled);
    Ok(tell(out, done, |_, _| (), |out| write_change(out, &change)))
}

/// Sets attributes, which are stable then, unless the node was changed since the client looked.
pub fn set_attr(node: &Node, set: &SetAttr, guard: Option<std::time::SystemTime>) -> Answer<()> {
    let backend = &node.export.backend;
    if let Some(guard) = guard {
        let mut there = Writer::default();
        write_time(&mut there, backend.attr(&node.handle)?.ctime);
        if read_time(&mut Reader::new(&there.into_bytes())) != Ok(guard) {
            return Err(Status::NOT_SYNC);
        }
    }
    backend.set_attr(&node.caller, &node.handle, set)?;
    node.stabilize()
}

/// Writes status, results, and what follows both in success and in failure.
fn tell<T>(
    out: &mut Writer,
    done: Answer<T>,
    results: impl FnOnce(&mut Writer, T),
    always: impl FnOnce(&mut Writer),
) -> Result<(), Failed> {
    match done {
        Ok(value) => {
            out.u32(0);
            results(out, value);
            always(out);
            Ok(())
        }
        Err(status) => {
            out.u32(status.0);
            always(out);
            Err(Failed::Told(status))
        }
    }
}

fn lookup(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, name) = (handle(args)?, name(args)?);
    args.end()?;
    let dir = attempt!(asker.node(sealed));
    let found = dir.lookup(name);
    let after = dir.attr();
    let results = |out: &mut Writer, (node, attr): (Handle, Attr)| {
        out.opaque(&dir.seal(asker, &node));
        write_after(out, Some(&attr));
    };
    Ok(tell(out, found, results, |out| write_after(out, after.as_ref())))
}

fn access(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    const READ: u32 = 1;
    const LOOKUP: u32 = 2;
    const MODIFY: u32 = 4;
    const EXTEND: u32 = 8;
    const DELETE: u32 = 16;
    const EXECUTE: u32 = 32;
    let (sealed, wanted) = (handle(args)?, args.u32()?);
    args.end()?;
    let node = attempt!(asker.node(sealed));
    let attr = attempt!(node.export.backend.attr(&node.handle));
    let is_dir = attr.kind == Kind::Directory;
    let rights = [
        (READ, libc::R_OK),
        (MODIFY | EXTEND, libc::W_OK),
        (if is_dir { DELETE } else { 0 }, libc::W_OK),
        (if is_dir { LOOKUP } else { EXECUTE }, libc::X_OK),
    ];
    let asked = rights.iter().filter(|(bits, _)| wanted & bits != 0).fold(0, |all, (_, right)| all | *right as u32);
    let asked = if node.export.rules.access.read_only { asked & !(libc::W_OK as u32) } else { asked };
    let has = if asked == 0 { 0 } else { attempt!(node.export.backend.access(&node.caller, &node.handle, asked)) };
    let granted = rights.iter().filter(|(_, right)| has & *right as u32 != 0).fold(0, |all, (bits, _)| all | bits);
    out.u32(0);
    write_after(out, Some(&attr));
    out.u32(granted & wanted);
    Ok(Ok(()))
}

fn readlink(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let sealed = handle(args)?;
    args.end()?;
    let node = attempt!(asker.node(sealed));
    let text = node.export.backend.read_link(&node.caller, &node.handle).map_err(Status::from);
    let attr = node.attr();
    out.u32(text.as_ref().err().map_or(0, |status| status.0));
    write_after(out, attr.as_ref());
    Ok(match text {
        Ok(text) => {
            out.opaque(&text);
            Ok(())
        }
        Err(status) => Err(Failed::Told(status)),
    })
}

/// What a call of CREATE, MKDIR, SYMLINK or MKNOD asks for.
fn to_make<'a>(procedure: u32, args: &mut Reader<'a>) -> Result<Answer<(Make<'a>, SetAttr)>, Garbage> {
    Ok(match procedure {
        CREATE => match args.u32()? {
            0 => Ok((Make::FileIfNone, read_set(args)?)),
            1 => Ok((Make::File, read_set(args)?)),
            2 => Ok((Make::FileOnce(args.array()?), SetAttr::default())),
            _ => return Err(Garbage),
        },
        MKDIR => Ok((Make::Directory, read_set(args)?)),
        SYMLINK => {
            let set = read_set(args)?;
            Ok((Make::Symlink(args.opaque(PATH_MAX_BYTES)?), set))
        }
        _ => match args.u32()? {
            device @ (3 | 4) => {
                let (set, major, minor) = (read_set(args)?, args.u32()?, args.u32()?);
                Ok((if device == 3 { Make::Block(major, minor) } else { Make::Character(major, minor) }, set))
            }
            6 => Ok((Make::Socket, read_set(args)?)),
            7 => Ok((Make::Fifo, read_set(args)?)),
            1 | 2 | 5 => Err(Status::BADTYPE),
            _ => return Err(Garbage),
        },
    })
}

fn make(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, name) = (handle(args)?, name(args)?);
    let to_make = to_make(procedure, args)?;
    if to_make.is_ok() {
        args.end()?;
    }
    let dir = attempt!(asker.node_to_change(sealed));
    let (done, change) = dir.change_names(asker, || {
        let (what, set) = to_make?;
        let backend = &dir.export.backend;
        let (node, attr) = backend.make(&dir.caller, &dir.handle, name, what, &set)?;
        // A file that was there gets the size all the same.
        let resize = set.size_bytes.filter(|size| what == Make::FileIfNone && *size != attr.size_bytes);
        let made = Node { handle: node, ..dir.clone() };
        let attr = match resize {
            None => attr,
            Some(size) => {
                asker.service.gathering.settle(made.key())?;
                let size = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
                // Whoever writes it at this moment must not take what it was before for what only it has changed.
                made.change(asker, || Ok(backend.set_attr(&dir.caller, &node, &size)?)).0?
            }
        };
        // What was made may have got attributes in further steps. A directory's names do not speak for them.
        let has_steps = matches!(attr.kind, Kind::File | Kind::Directory) || set.uid.is_some() || set.gid.is_some();
        if has_steps || set.atime.is_some() || set.mtime.is_some() {
            made.stabilize()?;
        }
        Ok((node, attr))
    });
    let results = |out: &mut Writer, (node, attr): (Handle, Attr)| {
        out.bool(true).opaque(&dir.seal(asker, &node));
        write_after(out, Some(&attr));
    };
    Ok(tell(out, done, results, |out| write_change(out, &change)))
}

fn remove(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, name) = (handle(args)?, name(args)?);
    args.end()?;
    let dir = attempt!(asker.node_to_change(sealed));
    let (done, change) = dir.change_names(asker, || {
        let backend = &dir.export.backend;
        let removed = match procedure {
            REMOVE => backend.remove(&dir.caller, &dir.handle, name),
            _ => backend.remove_dir(&dir.caller, &dir.handle, name),
        };
        removed.map_err(Status::from)
    });
    Ok(tell(out, done, |_, ()| (), |out| write_change(out, &change)))
}

fn rename(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (old, old_name) = (handle(args)?, name(args)?);
    let (new, new_name) = (handle(args)?, name(args)?);
    args.end()?;
    let (old, new) = (attempt!(asker.node_to_change(old)), attempt!(asker.node_to_change(new)));
    if old.export.number != new.export.number {
        return Ok(Err(Status::XDEV.into()));
    }
    let mut new_change = Change::default();
    let (done, old_change) = old.change_names(asker, || {
        let backend = &old.export.backend;
        let rename = || Ok(backend.rename(&old.caller, (&old.handle, old_name), (&new.handle, new_name))?);
        let is_one = old.handle == new.handle;
        let (done, change) = if is_one { new.change(asker, rename) } else { new.change_names(asker, rename) };
        new_change = change;
        done
    });
    Ok(tell(
        out,
        done,
        |_, ()| (),
        |out| {
            write_change(out, &old_change);
            write_change(out, &new_change);
        },
    ))
}

fn link(asker: &Asker<'_>, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, dir, name) = (handle(args)?, handle(args)?, name(args)?);
    args.end()?;
    let (node, dir) = (attempt!(asker.node_to_change(sealed)), attempt!(asker.node_to_change(dir)));
    if node.export.number != dir.export.number {
        return Ok(Err(Status::XDEV.into()));
    }
    let link = || Ok(dir.export.backend.link(&dir.caller, &node.handle, &dir.handle, name)?);
    let (done, change) = dir.change_names(asker, link);
    let attr = done.as_ref().ok().cloned().or_else(|| node.attr());
    let done = done.map(drop);
    Ok(tell(
        out,
        done,
        |_, ()| (),
        |out| {
            write_after(out, attr.as_ref());
            write_change(out, &change);
        },
    ))
}

/// A listing within its limits.
struct Listing<'a> {
    /// Of the whole answer from the status on, bytes.
    most_bytes: usize,
    /// Of READDIRPLUS: of names and cookies alone.
    names_most_bytes: usize,
    names_bytes: usize,
    from: usize,
    out: &'a mut Writer,
}

/// The end of the list and whether it is the end of the directory.
const LIST_END_BYTES: usize = 8;

impl Listing<'_> {
    /// Adds an entry, with attributes and handle where they are told; false where it does not fit.
    fn add(&mut self, entry: &DirEntry, plus: Option<Option<(Vec<u8>, Attr)>>) -> bool {
        let before = self.out.len();
        self.out.bool(true).u64(entry.fileid).opaque(&entry.name).u64(entry.cookie);
        let names_bytes = self.names_bytes + self.out.len() - before;
        if let Some(plus) = plus {
            let (sealed, attr) = plus.map_or((None, None), |(sealed, attr)| (Some(sealed), Some(attr)));
            write_after(self.out, attr.as_ref());
            self.out.optional(sealed, |out, sealed| {
                out.opaque(&sealed);
            });
        }
        let fits =
            self.out.len() - self.from + LIST_END_BYTES <= self.most_bytes && names_bytes <= self.names_most_bytes;
        if fits {
            self.names_bytes = names_bytes;
        } else {
            self.out.truncate(before);
        }
        fits
    }
}

fn readdir(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let (sealed, mut cookie, verifier) = (handle(args)?, args.u64()?, args.array::<8>()?);
    let names_most = if procedure == READDIRPLUS { args.u32()?.min(LISTING_MAX_BYTES) } else { LISTING_MAX_BYTES };
    let most = args.u32()?.min(LISTING_MAX_BYTES) as usize;
    args.end()?;
    let dir = attempt!(asker.node(sealed));
    if cookie != 0 && verifier != COOKIE_VERIFIER {
        return Ok(Err(Status::BAD_COOKIE.into()));
    }
    let attr = attempt!(dir.export.backend.attr(&dir.handle));
    if attr.kind != Kind::Directory {
        return Ok(Err(Status::NOTDIR.into()));
    }
    let from = out.len();
    out.u32(0);
    write_after(out, Some(&attr));
    out.array(&COOKIE_VERIFIER);
    // A client that names no limit for names means none.
    let names_most_bytes = if names_most == 0 { most } else { names_most as usize };
    let mut listing = Listing { most_bytes: most, names_most_bytes, names_bytes: 0, from, out };
    let entry_bytes = if procedure == READDIRPLUS { 200 } else { 32 };
    let mut count = 0;
    let whole = 'list: loop {
        let room = most.saturating_sub(listing.out.len() - from) / entry_bytes;
        let read = dir.export.backend.read_dir(&dir.caller, &dir.handle, cookie, room.clamp(8, ENTRIES_MAX));
        let (entries, last) = match read {
            Ok(read) => read,
            // What was found so far is told; the error comes with the next call.
            Err(_) if count > 0 => break false,
            Err(error) => return Ok(Err(error.into())),
        };
        let nothing = entries.is_empty();
        for mut entry in entries {
            if entry.name == b".." && dir.is_root() {
                entry.fileid = attr.fileid;
            }
            let plus = (procedure == READDIRPLUS).then(|| {
                // What costs a way up to the export's folder is for who asks for it.
                if entry.name == b".." && dir.export.is_below {
                    return None;
                }
                let (node, attr) = dir.lookup(&entry.name).ok()?;
                Some((dir.seal(asker, &node), attr))
            });
            if !listing.add(&entry, plus) {
                break 'list false;
            }
            (cookie, count) = (entry.cookie, count + 1);
        }
        if last || nothing {
            break true;
        }
    };
    if count == 0 && !whole {
        return Ok(Err(Status::TOOSMALL.into()));
    }
    out.bool(false).bool(whole);
    Ok(Ok(()))
}

/// FSSTAT, FSINFO and PATHCONF: what is true of a file system.
fn about(asker: &Asker<'_>, procedure: u32, args: &mut Reader<'_>, out: &mut Writer) -> Served {
    let sealed = handle(args)?;
    args.end()?;
    let node = attempt!(asker.node(sealed));
    let attr = attempt!(node.export.backend.attr(&node.handle));
    let space = attempt!(node.export.backend.space(&node.handle));
    out.u32(0);
    write_after(out, Some(&attr));
    match procedure {
        FSSTAT => {
            out.u64(space.total_bytes).u64(space.free_bytes).u64(space.available_bytes);
            // Files, free ones, free ones for this user; how long this stays true, in seconds: not at all.
            out.u64(space.total_files).u64(space.free_files).u64(space.free_files).u32(0);
        }
        FSINFO => {
            const LINK: u32 = 1;
            const SYMLINK: u32 = 2;
            const HOMOGENEOUS: u32 = 8;
            const CAN_SET_TIME: u32 = 16;
            let transfer = asker.service.transfer_bytes;
            // Largest, preferred, and what lengths should be multiples of: for reads, then for writes.
            out.u32(transfer).u32(transfer).u32(4096).u32(transfer).u32(transfer).u32(4096);
            out.u32(LISTING_MAX_BYTES).u64(i64::MAX as u64).u32(0).u32(1);
            out.u32(LINK | SYMLINK | HOMOGENEOUS | CAN_SET_TIME);
        }
        _ => {
            // Names that are too long are refused, only root gives files away, case counts and stays.
            out.u32(space.links_max).u32(space.name_max_bytes).bool(true).bool(true).bool(false).bool(true);
        }
    }
    Ok(Ok(()))
}
