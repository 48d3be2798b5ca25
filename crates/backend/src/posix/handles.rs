//! Handles of nodes: names that the kernel gives, where it gives permanent ones, else numbers in a table.
//!
//! - **Kernel handles** (name_to_handle_at(2)) outlive renames and restarts. The kernel opens any node of the file system
//!   by them, so each carries a code that only this folder's servers can compute ([`siphash`] under a key that is kept in
//!   an extended attribute of the folder which only root can read): a handle that was made up, or belongs to another
//!   folder, is refused. Directories are looked at again when they are opened: one that was moved out of the folder is
//!   refused. A *file* that was moved out behind the server's back stays open to those who hold its handle.
//! - **The table** serves where the kernel gives no handles (FUSE: its numbers mean other nodes after a new mount), or the
//!   server has no right to open them, or the folder keeps no key. A handle is the node's number and time of birth; the
//!   table says in which directory and by which name the node was last seen. It is bounded; what was never looked up
//!   since the server started, or not for long, is `ESTALE`.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use impresario_base::lock::Mutex;
use impresario_base::machine::{path_of, random_bytes};
use rustc_hash::FxHashMap;

use crate::{Errno, HANDLE_MAX_BYTES, Handle, Result};
use impresario_base::siphash::siphash;

/// First byte of a handle: how to read the rest.
const KERNEL: u8 = 1;
const TABLE: u8 = 2;
/// Where the kernel's bytes begin: after the first byte, the code and the type.
const KERNEL_AT: usize = 10;
/// The attribute of the folder that holds the key.
const KEY_NAME: &CStr = c"trusted.impresario.handles";
/// An open that the kernel says it has no memory for is tried again so often.
const OPEN_TRIES: u32 = 1000;
/// Directories above a node at most.
const DEPTH_MAX: usize = 2048;

/// `struct file_handle` of name_to_handle_at(2) with room for `MAX_HANDLE_SZ` bytes.
#[repr(C)]
struct FileHandle {
    len_bytes: u32,
    kind: c_int,
    bytes: [u8; 128],
}

unsafe extern "C" {
    fn name_to_handle_at(
        dir: c_int,
        path: *const c_char,
        handle: *mut FileHandle,
        mount: *mut c_int,
        flags: c_int,
    ) -> c_int;
    fn open_by_handle_at(mount: c_int, handle: *mut FileHandle, flags: c_int) -> c_int;
}

/// How a node is found by its handle.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// By the kernel; its type and bytes.
    ByKernel(u8, &'a [u8]),
    /// By the table.
    ByName,
}

/// A node's number and time of birth (nanoseconds; 0: not known).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Born {
    pub(super) fileid: u64,
    pub(super) at_ns: u64,
}

/// The handle that the table knows a node by.
pub(super) fn table_handle(born: Born) -> Handle {
    let mut bytes = [TABLE; 17];
    bytes[1..9].copy_from_slice(&born.fileid.to_le_bytes());
    bytes[9..].copy_from_slice(&born.at_ns.to_le_bytes());
    Handle::new(&bytes).unwrap_or(Handle { len_bytes: 0, bytes: [0; HANDLE_MAX_BYTES] })
}

/// Reads back what [`table_handle`] wrote.
pub(super) fn born(handle: &Handle) -> Option<Born> {
    let bytes: &[u8; 17] = handle.as_bytes().try_into().ok()?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
    (bytes[0] == TABLE).then(|| Born { fileid: number(1), at_ns: number(9) })
}

/// The key of a folder's handles.
#[derive(Clone)]
pub(super) struct Key([u8; 16]);

impl Key {
    /// The key that the folder keeps; made if it has none. `None` where it cannot keep one.
    pub(super) fn of_folder(folder: BorrowedFd<'_>) -> Option<Key> {
        let (path, fresh) = (path_of(folder), random_bytes::<16>().ok()?);
        // Several servers may start at once: the first key stays.
        match rustix::fs::setxattr(&path, KEY_NAME, &fresh, rustix::fs::XattrFlags::CREATE) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(_) => return None,
        }
        let mut key = [0; 16];
        match rustix::fs::getxattr(&path, KEY_NAME, &mut key[..]) {
            Ok(16) => Some(Key(key)),
            _ => None,
        }
    }

    /// The handle of an open node; `None` where the kernel gives none, or one that is too long.
    pub(super) fn handle_of(&self, node: BorrowedFd<'_>) -> Option<Handle> {
        let mut file = FileHandle { len_bytes: 128, kind: 0, bytes: [0; 128] };
        let mut mount = 0;
        // SAFETY: the path is an empty C string, the handle has room for as many bytes as it says, `mount` is writable.
        let answer = unsafe {
            name_to_handle_at(node.as_raw_fd(), c"".as_ptr(), &raw mut file, &raw mut mount, libc::AT_EMPTY_PATH)
        };
        let kind = u8::try_from(file.kind).ok()?;
        let kernel = file.bytes.get(..file.len_bytes as usize)?;
        if answer != 0 || kernel.len() > HANDLE_MAX_BYTES - KERNEL_AT {
            return None;
        }
        let mut bytes = [0; HANDLE_MAX_BYTES];
        bytes[0] = KERNEL;
        bytes[9] = kind;
        bytes[KERNEL_AT..KERNEL_AT + kernel.len()].copy_from_slice(kernel);
        let len = KERNEL_AT + kernel.len();
        let code = siphash(&self.0, &bytes[9..len]);
        bytes[1..9].copy_from_slice(&code.to_le_bytes());
        Handle::new(&bytes[..len])
    }

    /// What a kernel handle says, if this key made it.
    fn read<'a>(&self, handle: &'a Handle) -> Option<Found<'a>> {
        let bytes = handle.as_bytes();
        let (code, named) = (bytes.get(1..9)?, bytes.get(9..)?);
        let (&kind, kernel) = named.split_first()?;
        // The comparison takes as long for every code: its time tells nothing of the right one.
        let same = siphash(&self.0, named).to_le_bytes().iter().zip(code).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0;
        same.then_some(Found::ByKernel(kind, kernel))
    }
}

/// How this handle's node is found. `ESTALE` when no server of this folder made it.
pub(super) fn read<'a>(key: Option<&Key>, handle: &'a Handle) -> Result<Found<'a>> {
    let found = match handle.as_bytes().first() {
        Some(&KERNEL) => key.and_then(|key| key.read(handle)),
        Some(&TABLE) => born(handle).map(|_| Found::ByName),
        _ => None,
    };
    found.ok_or(Errno(libc::ESTALE))
}

/// Opens a node by the kernel's name of it, without the right to read or write it.
pub(super) fn open(mount: BorrowedFd<'_>, kind: u8, bytes: &[u8]) -> Result<OwnedFd> {
    let mut file = FileHandle { len_bytes: bytes.len() as u32, kind: kind.into(), bytes: [0; 128] };
    file.bytes.get_mut(..bytes.len()).ok_or(Errno(libc::ESTALE))?.copy_from_slice(bytes);
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let mut tries = 0..OPEN_TRIES;
    let fd = loop {
        // SAFETY: the handle holds as many bytes as it says.
        let fd = unsafe { open_by_handle_at(mount.as_raw_fd(), &raw mut file, flags) };
        // Linux says so, too, while another node is being made in this one's place.
        let again = fd < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM);
        if !again || tries.next().is_none() {
            break fd;
        }
        std::thread::yield_now();
    };
    if fd < 0 {
        let errno = Errno::from(std::io::Error::last_os_error());
        // The kernel cannot make sense of it: the node is no more.
        return Err(if errno == Errno(libc::EINVAL) { Errno(libc::ESTALE) } else { errno });
    }
    // SAFETY: the kernel just gave this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// True when the kernel opens nodes of this folder by handles, and these mean the same node after a new mount.
pub(super) fn kernel_opens(folder: BorrowedFd<'_>, key: &Key) -> bool {
    /// `FUSE_SUPER_MAGIC` of Linux, statfs(2).
    const FUSE: u64 = 0x6573_5546;
    let permanent = rustix::fs::fstatfs(folder).is_ok_and(|fs| fs.f_type as u64 & 0xffff_ffff != FUSE);
    let Some(handle) = permanent.then(|| key.handle_of(folder)).flatten() else { return false };
    let Some(Found::ByKernel(kind, bytes)) = key.read(&handle) else { return false };
    let number = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    // The descriptor that names the folder may be `O_PATH`; the call wants one that is open.
    open(folder, kind, bytes).is_ok_and(|opened| number(opened.as_fd()) == number(folder))
}

/// Where nodes were last seen: bounded, the least recently used is forgotten first.
pub(super) struct Table {
    entries: Mutex<Entries>,
    max: usize,
}

#[derive(Default)]
struct Entries {
    by_handle: FxHashMap<Handle, Entry>,
    by_use: BTreeMap<u64, Handle>,
    uses: u64,
}

struct Entry {
    dir: Handle,
    name: Box<[u8]>,
    used: u64,
}

impl Table {
    /// Remembers `max` nodes at most.
    pub(super) fn new(max: usize) -> Table {
        Table { entries: Mutex::default(), max: max.max(1) }
    }

    /// A node was seen under this name.
    pub(super) fn note(&self, node: Handle, dir: Handle, name: &[u8]) {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.by_handle.get_mut(&node) {
            if entry.dir != dir || *entry.name != *name {
                (entry.dir, entry.name) = (dir, name.into());
            }
        } else {
            if entries.by_handle.len() >= self.max
                && let Some((_, oldest)) = entries.by_use.pop_first()
            {
                entries.by_handle.remove(&oldest);
            }
            let used = entries.tick(node);
            entries.by_handle.insert(node, Entry { dir, name: name.into(), used });
        }
        entries.touch(node);
    }

    /// The directory and the name under which a node was last seen.
    pub(super) fn find(&self, node: &Handle) -> Result<(Handle, Box<[u8]>)> {
        let mut entries = self.entries.lock();
        entries.touch(*node);
        entries.by_handle.get(node).map(|entry| (entry.dir, entry.name.clone())).ok_or(Errno(libc::ESTALE))
    }

    /// A node is in use although its name is not asked for.
    pub(super) fn touch(&self, node: &Handle) {
        self.entries.lock().touch(*node);
    }
}

impl Entries {
    fn tick(&mut self, node: Handle) -> u64 {
        self.uses += 1;
        self.by_use.insert(self.uses, node);
        self.uses
    }

    /// Makes a node and then the directories above it the most recently used, so that none goes before what is in it.
    fn touch(&mut self, mut node: Handle) {
        for _ in 0..DEPTH_MAX {
            let Some(entry) = self.by_handle.get(&node) else { return };
            let (dir, used) = (entry.dir, entry.used);
            self.by_use.remove(&used);
            let used = self.tick(node);
            if let Some(entry) = self.by_handle.get_mut(&node) {
                entry.used = used;
            }
            node = dir;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_key_that_made_a_handle_reads_it() {
        let (key, other) = (Key([1; 16]), Key([2; 16]));
        let mut bytes = [0; 22];
        (bytes[0], bytes[9]) = (KERNEL, 1);
        let code = siphash(&key.0, &bytes[9..]);
        bytes[1..9].copy_from_slice(&code.to_le_bytes());
        let handle = Handle::new(&bytes).unwrap();
        assert_eq!(read(Some(&key), &handle), Ok(Found::ByKernel(1, &bytes[10..])));
        assert!(read(Some(&other), &handle).is_err() && read(None, &handle).is_err());
        for n in 0..bytes.len() {
            let mut forged = bytes;
            forged[n] ^= 0x10;
            assert!(read(Some(&key), &Handle::new(&forged).unwrap()).is_err(), "byte {n}");
            assert!(read(Some(&key), &Handle::new(&bytes[..n]).unwrap()).is_err(), "{n} bytes");
        }
    }

    #[test]
    fn handles_of_the_table_are_read_back() {
        let seen = Born { fileid: u64::MAX - 5, at_ns: 17 };
        assert_eq!(born(&table_handle(seen)), Some(seen));
        assert_eq!(born(&Handle::new(&[TABLE; 16]).unwrap()), None);
        assert_eq!(born(&Handle::new(&[KERNEL; 17]).unwrap()), None);
    }

    #[test]
    fn the_table_forgets_what_was_unused_longest_and_directories_after_what_is_in_them() {
        let node = |number: u64| table_handle(Born { fileid: number, at_ns: 0 });
        let table = Table::new(3);
        table.note(node(2), node(1), b"dir");
        table.note(node(3), node(2), b"file");
        table.note(node(4), node(1), b"other");
        table.touch(&node(3)); // and the directory, 2
        table.note(node(5), node(1), b"new");
        assert_eq!(table.find(&node(4)), Err(Errno(libc::ESTALE)));
        assert_eq!(table.find(&node(3)), Ok((node(2), b"file".as_slice().into())));
        table.note(node(3), node(1), b"moved");
        assert_eq!(table.find(&node(3)), Ok((node(1), b"moved".as_slice().into())));
        for number in 10..100 {
            table.note(node(number), node(1), b"many");
        }
        let entries = table.entries.lock();
        assert_eq!((entries.by_handle.len(), entries.by_use.len()), (3, 3));
    }

    #[test]
    fn a_cycle_in_the_table_ends() {
        let node = |number: u64| table_handle(Born { fileid: number, at_ns: 0 });
        let table = Table::new(10);
        table.note(node(1), node(2), b"a");
        table.note(node(2), node(1), b"b");
        assert!(table.find(&node(1)).is_ok());
    }
}
