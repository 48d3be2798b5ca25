//! A volume that is open, and its calls as safe functions. Each call says on whose behalf it is made: the library keeps
//! that for each thread, so it is set before every call and never assumed.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use impresario_base::loader::Library;
use impresario_base::lock::{Condvar, Mutex};

use super::api::{self, Api, GFID_BYTES};
use super::graph::Caches;
use crate::rules::New;
use crate::{Caller, Errno, Result};

/// What the library itself says, on the standard error stream: `GF_LOG_ERROR` while the volume is opened, so that the log
/// names what is wrong, then `GF_LOG_CRITICAL`, for of errors that are answered it has much to say.
const LOG_LEVEL_OPENING: c_int = 4;
const LOG_LEVEL: c_int = 3;
/// Larger reads and writes are made as several of this length at once, so that a brick reads one while another is on the
/// network.
const PIECE_BYTES: usize = 1 << 20;
/// The process for which bricks take process 1; any number that no service of GlusterFS has.
const OTHER_PROCESS: libc::pid_t = 2;
/// Longest answer about an extended attribute.
const VALUE_MAX_BYTES: usize = 64 << 10;

/// A permanent name of a node.
pub(super) type Gfid = [u8; GFID_BYTES];

/// Where a volume's description comes from.
#[derive(Debug, Clone)]
pub enum Source {
    /// From a management daemon, `glusterd`, which tells of later changes too.
    Server {
        /// Its host.
        host: String,
        /// Its port; 0: the usual one.
        port: u16,
    },
    /// From a volume file of this machine.
    File(std::path::PathBuf),
}

/// An open volume.
pub(super) struct Volume {
    api: Api,
    fs: NonNull<api::Fs>,
    source: Source,
    /// Who this process is.
    own: Caller,
    /// Where this process has the number 1, as in a container: sets another one. Bricks take process 1 (`NFS_PID`) for
    /// GlusterFS's own NFS server, whose questions for rights they all answer with yes.
    set_process: Option<SetProcess>,
}

// SAFETY: the library's functions on a volume may be called by any thread at once (glfs.h); what is each thread's own is
// set before every call.
unsafe impl Send for Volume {}
// SAFETY: as above.
unsafe impl Sync for Volume {}

/// A node that was found.
pub(super) struct Object {
    volume: Arc<Volume>,
    object: NonNull<api::Object>,
}

// SAFETY: an object is a counted reference that any thread may use and give back.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

/// A file or a directory that is open.
pub(super) struct Descriptor {
    volume: Arc<Volume>,
    fd: NonNull<api::Fd>,
    directory: bool,
}

// SAFETY: a descriptor may be used by any thread; of a directory, whose position is in it, one at a time, which
// `Listing`s are kept under a lock for.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

/// What a listing tells of a name.
pub(super) struct Listed {
    pub(super) name: Vec<u8>,
    pub(super) fileid: u64,
    pub(super) cookie: u64,
}

fn last_error() -> Errno {
    outward(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// A number as callers may hear it: a brick that is away is a failed server, not a broken mount. A descriptor that did not
/// survive that is `EBADF`.
fn outward(errno: i32) -> Errno {
    match errno {
        0 | libc::ENOTCONN | libc::ESHUTDOWN | libc::ECONNRESET => Errno(libc::EIO),
        libc::EBADFD => Errno(libc::EBADF),
        errno => Errno(errno),
    }
}

fn check(answer: c_int) -> Result<()> {
    if answer < 0 { Err(last_error()) } else { Ok(()) }
}

fn c_string(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Errno(libc::EINVAL))
}

fn zeroed_stat() -> libc::stat {
    // SAFETY: a structure of numbers, of which zero is one.
    unsafe { MaybeUninit::<libc::stat>::zeroed().assume_init() }
}

/// `glfs_setfspid`: the process that bricks take this thread's calls for.
type SetProcess = unsafe extern "C" fn(*mut api::Fs, libc::pid_t) -> c_int;

/// Loads it: it is not in the public headers, and in the library since version 6.1.
fn set_process() -> std::result::Result<SetProcess, String> {
    let found = Library::load(api::LIBRARY)?.symbol(c"glfs_setfspid", Some(c"GFAPI_PRIVATE_6.1"))?;
    // SAFETY: the function of that name and version has this signature (`api/src/glfs.c` of GlusterFS).
    Ok(unsafe { std::mem::transmute::<*mut c_void, SetProcess>(found) })
}

impl Volume {
    /// Opens a volume. The error names the input and the remedy.
    pub(super) fn open(
        name: &str,
        source: &Source,
        caches: &Caches,
        own: Caller,
    ) -> std::result::Result<Volume, String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("{text:?} contains a zero byte"));
        let api = Api::load(api::LIBRARY).map_err(|why| {
            format!("{why}; install GlusterFS's client library of version 6 or later (Debian: libgfapi0)")
        })?;
        let set_process = (std::process::id() == 1).then(set_process).transpose();
        let set_process = set_process.map_err(|why| {
            format!(
                "{why}; bricks check no rights for a process with the number 1: run the server below an init \
                 (docker run --init), or install GlusterFS's client library of version 6.1 or later"
            )
        })?;
        let called = text(name)?;
        // SAFETY: a terminated string, as below.
        let fs = NonNull::new(unsafe { (api.new)(called.as_ptr()) }).ok_or_else(|| last_error().to_string())?;
        // From here on the volume is closed whatever fails, but for its start.
        let volume = Volume { api, fs, source: source.clone(), own, set_process };
        let refused = |what: &str| format!("libgfapi refuses {what}: {}", last_error());
        // SAFETY: the volume is not opened yet, which is when its options are set.
        let log = unsafe { (volume.api.set_logging)(fs.as_ptr(), c"-".as_ptr(), LOG_LEVEL_OPENING) };
        check(log).map_err(|_| refused("its log"))?;
        let set = match source {
            Source::Server { host, port } => {
                let called = text(host)?;
                // SAFETY: as above.
                unsafe {
                    (volume.api.set_volfile_server)(fs.as_ptr(), c"tcp".as_ptr(), called.as_ptr(), c_int::from(*port))
                }
            }
            Source::File(file) => {
                let called = path(file)?;
                // SAFETY: as above.
                unsafe { (volume.api.set_volfile)(fs.as_ptr(), called.as_ptr()) }
            }
        };
        check(set).map_err(|_| refused("where the volume is described"))?;
        for (cache, key, value) in caches.off() {
            let (cache, key, value) = (text(&cache)?, text(key)?, text(value)?);
            // SAFETY: as above.
            let set =
                unsafe { (volume.api.set_xlator_option)(fs.as_ptr(), cache.as_ptr(), key.as_ptr(), value.as_ptr()) };
            check(set).map_err(|_| refused("that a cache is switched off"))?;
        }
        // SAFETY: as above.
        if let Err(error) = check(unsafe { (volume.api.init)(fs.as_ptr()) }) {
            // Closing it would free what a thread that the library has just started is about to look at: that ends the process
            // now and then (GlusterFS 10.3). Who cannot open a volume gives up or tries it seldom.
            std::mem::forget(volume);
            return Err(match error {
                // What it says when the graph does not come up.
                Errno(libc::EIO | libc::EAGAIN | libc::EINPROGRESS) => "no brick or management daemon answers".into(),
                error => error.to_string(),
            });
        }
        // SAFETY: as above.
        let log = unsafe { (volume.api.set_logging)(fs.as_ptr(), c"-".as_ptr(), LOG_LEVEL) };
        check(log).map_err(|_| refused("its log"))?;
        Ok(volume)
    }

    /// The text that describes the volume.
    pub(super) fn describe(&self) -> Option<String> {
        if let Source::File(file) = &self.source {
            return std::fs::read_to_string(file).ok();
        }
        // GlusterFS 10 copies as much as the buffer takes, however short the text is: the buffer must be as long as that. An
        // empty one asks for the length.
        let mut text = Vec::<u8>::new();
        loop {
            // SAFETY: the buffer is as long as is said, and never longer than the text was a moment ago.
            let len = unsafe { (self.api.get_volfile)(self.fs.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
            if len >= 0 {
                return String::from_utf8(text).ok().filter(|text| !text.is_empty());
            }
            // A volume of many thousand bricks has a few MiB.
            let longer = text.len().checked_add(len.unsigned_abs()).filter(|all| *all <= 64 << 20)?;
            text.resize(longer, 0);
        }
    }

    /// Who this process is.
    pub(super) fn own(&self) -> &Caller {
        &self.own
    }

    /// The calls of this thread are made on this caller's behalf from now on.
    fn be(&self, caller: &Caller) -> Result<()> {
        // SAFETY: numbers, and as many groups as is said; they change this thread only.
        let set = unsafe {
            [
                (self.api.setfsuid)(caller.uid),
                (self.api.setfsgid)(caller.gid),
                (self.api.setfsgroups)(caller.groups.len(), caller.groups.as_ptr()),
            ]
        };
        // SAFETY: as above.
        let process = self.set_process.map_or(0, |set| unsafe { set(self.fs.as_ptr(), OTHER_PROCESS) });
        // A call that went on as somebody else would give that user's rights.
        if process == 0 && set.iter().all(|answer| *answer == 0) { Ok(()) } else { Err(Errno(libc::EACCES)) }
    }

    fn found(self: &Arc<Self>, object: *mut api::Object, stat: libc::stat) -> Result<(Object, libc::stat)> {
        let object = NonNull::new(object).ok_or_else(last_error)?;
        Ok((Object { volume: self.clone(), object }, stat))
    }

    fn opened(self: &Arc<Self>, fd: *mut api::Fd, directory: bool) -> Result<Descriptor> {
        let fd = NonNull::new(fd).ok_or_else(last_error)?;
        Ok(Descriptor { volume: self.clone(), fd, directory })
    }

    /// The directory that everything is below of.
    pub(super) fn root(self: &Arc<Self>) -> Result<(Object, libc::stat)> {
        self.be(&self.own)?;
        let mut stat = zeroed_stat();
        // SAFETY: a volume that is open, no parent (its root), a terminated path, a place for the attributes.
        let object =
            unsafe { (self.api.h_lookupat)(self.fs.as_ptr(), ptr::null_mut(), c"/".as_ptr(), &raw mut stat, 0) };
        self.found(object, stat)
    }

    /// The node of a permanent name.
    pub(super) fn by_gfid(self: &Arc<Self>, mut gfid: Gfid) -> Result<(Object, libc::stat)> {
        self.be(&self.own)?;
        let mut stat = zeroed_stat();
        // SAFETY: as many bytes as is said, and a place for the attributes.
        let object = unsafe {
            (self.api.h_create_from_handle)(self.fs.as_ptr(), gfid.as_mut_ptr(), GFID_BYTES as c_int, &raw mut stat)
        };
        self.found(object, stat)
    }

    /// The node of a path, by an extended attribute of it.
    pub(super) fn attribute_of_path(&self, path: &str, name: &CStr) -> Result<Vec<u8>> {
        let path = c_string(path.as_bytes())?;
        self.be(&self.own)?;
        let mut value = vec![0u8; VALUE_MAX_BYTES];
        // SAFETY: terminated strings, and a buffer as long as is said.
        let len = unsafe {
            (self.api.lgetxattr)(self.fs.as_ptr(), path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
        };
        value.truncate(usize::try_from(len).map_err(|_| last_error())?);
        Ok(value)
    }
}

fn path(path: &Path) -> std::result::Result<CString, String> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("{} contains a zero byte", path.display()))
}

/// A volume that is being closed.
struct Closing(NonNull<api::Fs>);

// SAFETY: as for volumes.
unsafe impl Send for Closing {}

impl Drop for Volume {
    fn drop(&mut self) {
        let (closing, fini) = (Closing(self.fs), self.api.fini);
        // The library waits up to ten seconds for its own background work. There is nothing to lose, since its caches are
        // off, and nobody to wait: a process that ends meanwhile closes the connections. Without a thread they stay.
        let _ = std::thread::Builder::new().name("volume end".into()).spawn(move || {
            let closing = closing;
            // SAFETY: objects and descriptors keep the volume; there are none any more.
            unsafe { fini(closing.0.as_ptr()) };
        });
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: it is given back once.
        unsafe { (self.volume.api.h_close)(self.object.as_ptr()) };
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let api = &self.volume.api;
        // SAFETY: it is closed once.
        unsafe { if self.directory { (api.closedir)(self.fd.as_ptr()) } else { (api.close)(self.fd.as_ptr()) } };
    }
}

impl Object {
    fn at(&self, caller: &Caller) -> Result<(*mut api::Fs, *mut api::Object, &Api)> {
        self.volume.be(caller)?;
        Ok((self.volume.fs.as_ptr(), self.object.as_ptr(), &self.volume.api))
    }

    /// Its permanent name.
    pub(super) fn gfid(&self) -> Result<Gfid> {
        let mut gfid = [0; GFID_BYTES];
        // SAFETY: a buffer as long as is said.
        let len =
            unsafe { (self.volume.api.h_extract_handle)(self.object.as_ptr(), gfid.as_mut_ptr(), GFID_BYTES as c_int) };
        if len == GFID_BYTES as isize { Ok(gfid) } else { Err(Errno(libc::EIO)) }
    }

    /// The node of a name in this directory.
    pub(super) fn lookup(&self, caller: &Caller, name: &[u8]) -> Result<(Object, libc::stat)> {
        let (name, mut stat) = (c_string(name)?, zeroed_stat());
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: a terminated name and a place for the attributes, here and in the calls below.
        let found = unsafe { (api.h_lookupat)(fs, object, name.as_ptr(), &raw mut stat, 0) };
        self.volume.found(found, stat)
    }

    /// Makes a node that must not exist.
    pub(super) fn make(&self, caller: &Caller, name: &[u8], what: &New<'_>, mode: u32) -> Result<(Object, libc::stat)> {
        let (name, mut stat) = (c_string(name)?, zeroed_stat());
        let text = if let New::Symlink(text) = what { c_string(text)? } else { CString::default() };
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: as above.
        let made = unsafe {
            let (name, stat) = (name.as_ptr(), &raw mut stat);
            match what {
                New::File => (api.h_creat)(fs, object, name, libc::O_CREAT | libc::O_EXCL | libc::O_RDWR, mode, stat),
                New::Directory => (api.h_mkdir)(fs, object, name, mode, stat),
                New::Symlink(_) => (api.h_symlink)(fs, object, name, text.as_ptr(), stat),
                New::Special(kind, device) => (api.h_mknod)(fs, object, name, kind | mode, *device, stat),
            }
        };
        self.volume.found(made, stat)
    }

    /// Removes a name: of a directory too.
    pub(super) fn unlink(&self, caller: &Caller, name: &[u8]) -> Result<()> {
        let name = c_string(name)?;
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: a terminated name, here and in the calls below.
        check(unsafe { (api.h_unlink)(fs, object, name.as_ptr()) })
    }

    /// A second name of this node.
    pub(super) fn link(&self, caller: &Caller, dir: &Object, name: &[u8]) -> Result<()> {
        let name = c_string(name)?;
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: as above.
        check(unsafe { (api.h_link)(fs, object, dir.object.as_ptr(), name.as_ptr()) })
    }

    /// Moves a name of this directory to another.
    pub(super) fn rename(&self, caller: &Caller, old: &[u8], dir: &Object, new: &[u8]) -> Result<()> {
        let (old, new) = (c_string(old)?, c_string(new)?);
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: as above.
        check(unsafe { (api.h_rename)(fs, object, old.as_ptr(), dir.object.as_ptr(), new.as_ptr()) })
    }

    /// The text of a symbolic link.
    pub(super) fn read_link(&self, caller: &Caller) -> Result<Vec<u8>> {
        let mut text = vec![0u8; libc::PATH_MAX as usize];
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: a buffer as long as is said.
        let len = unsafe { (api.h_readlink)(fs, object, text.as_mut_ptr().cast::<c_char>(), text.len()) };
        text.truncate(usize::try_from(len).map_err(|_| last_error())?);
        Ok(text)
    }

    /// Attributes.
    pub(super) fn stat(&self) -> Result<libc::stat> {
        let mut stat = zeroed_stat();
        let (fs, object, api) = self.at(&self.volume.own)?;
        // SAFETY: a place for the attributes.
        check(unsafe { (api.h_stat)(fs, object, &raw mut stat) })?;
        Ok(stat)
    }

    /// Changes the attributes that `valid` (`SET_…`) names.
    pub(super) fn set_stat(&self, caller: &Caller, mut stat: libc::stat, valid: c_int) -> Result<()> {
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: the attributes are read during the call.
        check(unsafe { (api.h_setattrs)(fs, object, &raw mut stat, valid) })
    }

    /// Sets the permissions, 0 to 0o7777.
    pub(super) fn set_mode(&self, caller: &Caller, mode: u32) -> Result<()> {
        let mut stat = zeroed_stat();
        stat.st_mode = mode;
        self.set_stat(caller, stat, super::api::SET_MODE)
    }

    /// Has the brick take set-user-id and set-group-id in one step: a change of the owner that changes none, as chown(2) knows it, has its
    /// kernel do so. A set-group-id without execution by the group stays.
    pub(super) fn take_set_id(&self, caller: &Caller) -> Result<()> {
        let mut stat = zeroed_stat();
        (stat.st_uid, stat.st_gid) = (u32::MAX, u32::MAX);
        self.set_stat(caller, stat, super::api::SET_UID | super::api::SET_GID)
    }

    /// Whether the caller has this right (`R_OK`, `W_OK`, `X_OK`).
    pub(super) fn access(&self, caller: &Caller, right: i32) -> Result<()> {
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: numbers.
        check(unsafe { (api.h_access)(fs, object, right) })
    }

    /// Space of the volume.
    pub(super) fn space(&self) -> Result<libc::statvfs> {
        // SAFETY: a structure of numbers, of which zero is one.
        let mut space = unsafe { MaybeUninit::<libc::statvfs>::zeroed().assume_init() };
        let (fs, object, api) = self.at(&self.volume.own)?;
        // SAFETY: a place for the answer.
        check(unsafe { (api.h_statfs)(fs, object, &raw mut space) })?;
        Ok(space)
    }

    /// An extended attribute.
    pub(super) fn attribute(&self, name: &CStr) -> Result<Vec<u8>> {
        let mut value = vec![0u8; VALUE_MAX_BYTES];
        let (fs, object, api) = self.at(&self.volume.own)?;
        // SAFETY: a terminated name, and a buffer as long as is said.
        let len = unsafe { (api.h_getxattrs)(fs, object, name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        value.truncate(usize::try_from(len).map_err(|_| last_error())?);
        Ok(value)
    }

    /// Sets an extended attribute.
    pub(super) fn set_attribute(&self, name: &CStr, value: &[u8]) -> Result<()> {
        let (fs, object, api) = self.at(&self.volume.own)?;
        // SAFETY: a terminated name, and a buffer as long as is said.
        check(unsafe { (api.h_setxattrs)(fs, object, name.as_ptr(), value.as_ptr().cast(), value.len(), 0) })
    }

    /// Opens the file.
    pub(super) fn open(&self, caller: &Caller, flags: c_int) -> Result<Descriptor> {
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: numbers.
        self.volume.opened(unsafe { (api.h_open)(fs, object, flags) }, false)
    }

    /// Opens the directory.
    pub(super) fn open_directory(&self, caller: &Caller) -> Result<Descriptor> {
        let (fs, object, api) = self.at(caller)?;
        // SAFETY: a directory of the volume.
        self.volume.opened(unsafe { (api.h_opendir)(fs, object) }, true)
    }
}

/// Calls on a descriptor need no rights: they were checked when it was opened.
impl Descriptor {
    fn at(&self) -> Result<(*mut api::Fd, &Api)> {
        self.volume.be(&self.volume.own)?;
        Ok((self.fd.as_ptr(), &self.volume.api))
    }

    /// Reads into all of `into`, less only at the end of the file.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let (fd, api) = self.at()?;
        let wanted = into.len();
        if wanted <= PIECE_BYTES {
            let mut done = 0;
            while done < wanted {
                let (rest, at) = (&mut into[done..], (offset + done as u64) as i64);
                // SAFETY: a buffer as long as is said; no attributes are asked for.
                let got = unsafe { (api.pread)(fd, rest.as_mut_ptr().cast(), rest.len(), at, 0, ptr::null_mut()) };
                match usize::try_from(got).map_err(|_| last_error())? {
                    0 => break,
                    got => done += got,
                }
            }
            return Ok(done);
        }
        let flights = into.chunks_mut(PIECE_BYTES).zip((offset..).step_by(PIECE_BYTES)).map(|(piece, at)| {
            let begin = |done: api::Done, data| {
                // SAFETY: `Flight::start` sees to it that the buffer outlives the call: see there.
                unsafe { (api.pread_async)(fd, piece.as_mut_ptr().cast(), piece.len(), at as i64, 0, done, data) }
            };
            (Flight::start(begin), piece.len())
        });
        // All of them end before an answer is given: they write to `into`.
        let flights: Vec<_> = flights.collect();
        let (mut done, mut short, mut failed) = (0, false, None);
        for (flight, wanted) in flights {
            match flight.and_then(|flight| flight.end()) {
                Err(error) => failed = failed.or(Some(error)),
                Ok(got) if !short => {
                    done += got;
                    short = got < wanted;
                }
                Ok(_) => {}
            }
        }
        match failed {
            Some(error) => Err(error),
            // The end of the file, unless there is more.
            None if short => Ok(done + self.read_on(offset + done as u64, &mut into[done..])?),
            None => Ok(done),
        }
    }

    /// Reads what follows a short answer, in pieces one after the other.
    fn read_on(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        for piece in into.chunks_mut(PIECE_BYTES) {
            let got = self.read(offset + done as u64, piece)?;
            done += got;
            if got < piece.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Writes all of `bytes`, several pieces at once if they may be.
    pub(super) fn write(&self, offset: u64, bytes: &[u8], at_once: bool) -> Result<()> {
        let (fd, api) = self.at()?;
        if bytes.len() <= PIECE_BYTES || !at_once {
            let mut done = 0;
            while done < bytes.len() {
                let (rest, at) = (&bytes[done..], (offset + done as u64) as i64);
                let none = ptr::null_mut();
                // SAFETY: a buffer as long as is said; no attributes are asked for.
                let put = unsafe { (api.pwrite)(fd, rest.as_ptr().cast(), rest.len(), at, 0, none, none) };
                match usize::try_from(put).map_err(|_| last_error())? {
                    0 => return Err(Errno(libc::EIO)),
                    put => done += put,
                }
            }
            return Ok(());
        }
        let flights = bytes.chunks(PIECE_BYTES).zip((offset..).step_by(PIECE_BYTES)).map(|(piece, at)| {
            let begin = |done: api::Done, data| {
                // SAFETY: as for reads.
                unsafe { (api.pwrite_async)(fd, piece.as_ptr().cast(), piece.len() as c_int, at as i64, 0, done, data) }
            };
            (Flight::start(begin), piece, at)
        });
        let flights: Vec<_> = flights.collect();
        let ended: Vec<_> =
            flights.into_iter().map(|(flight, piece, at)| (flight.and_then(|f| f.end()), piece, at)).collect();
        for (put, piece, at) in ended {
            match put? {
                put if put < piece.len() => self.write(at + put as u64, &piece[put..], false)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Cuts the file, or lengthens it.
    pub(super) fn truncate(&self, size_bytes: i64) -> Result<()> {
        let (fd, api) = self.at()?;
        // SAFETY: no attributes are asked for, here and below.
        check(unsafe { (api.ftruncate)(fd, size_bytes, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Gives a range storage.
    pub(super) fn allocate(&self, keep_size: bool, offset: u64, len_bytes: u64) -> Result<()> {
        let (fd, api) = self.at()?;
        // SAFETY: numbers only, here and below; they fit, as the caller has checked.
        check(unsafe { (api.fallocate)(fd, keep_size.into(), offset as i64, len_bytes as usize) })
    }

    /// Makes a range zeros without storage.
    pub(super) fn discard(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let (fd, api) = self.at()?;
        // SAFETY: as above.
        check(unsafe { (api.discard)(fd, offset as i64, len_bytes as usize) })
    }

    /// Looks for data or a hole, as `lseek` does. It moves the position of the descriptor, which no other call uses.
    pub(super) fn seek_data(&self, from: u64, whence: c_int) -> Result<u64> {
        let (fd, api) = self.at()?;
        // SAFETY: as above.
        u64::try_from(unsafe { (api.lseek)(fd, from as i64, whence) }).map_err(|_| last_error())
    }

    /// Puts what was written on stable storage.
    pub(super) fn sync(&self) -> Result<()> {
        let (fd, api) = self.at()?;
        // SAFETY: as above.
        check(unsafe { (api.fsync)(fd, ptr::null_mut(), ptr::null_mut()) })
    }

    /// Attributes, also of a file without a name.
    pub(super) fn stat(&self) -> Result<libc::stat> {
        let mut stat = zeroed_stat();
        let (fd, api) = self.at()?;
        // SAFETY: a place for the attributes.
        check(unsafe { (api.fstat)(fd, &raw mut stat) })?;
        Ok(stat)
    }

    /// Goes to a place of a listing. Not while another thread uses the descriptor.
    pub(super) fn seek(&self, cookie: u64) -> Result<()> {
        let (fd, api) = self.at()?;
        // SAFETY: a directory that is open.
        unsafe { (api.seekdir)(fd, cookie as libc::c_long) };
        Ok(())
    }

    /// The next name of a directory. Not while another thread uses the descriptor.
    pub(super) fn next(&self) -> Result<Option<Listed>> {
        let (fd, api) = self.at()?;
        let mut stat = zeroed_stat();
        // SAFETY: a structure of numbers, of which zero is one.
        let mut entry = unsafe { MaybeUninit::<libc::dirent>::zeroed().assume_init() };
        let mut found = ptr::null_mut();
        // SAFETY: places for attributes, the entry, and where it is.
        let answer = unsafe { (api.readdirplus_r)(fd, &raw mut stat, &raw mut entry, &raw mut found) };
        if answer != 0 {
            // Some versions give the number, others -1.
            return Err(if answer > 0 { outward(answer) } else { last_error() });
        }
        if found.is_null() {
            return Ok(None);
        }
        // SAFETY: signed and unsigned bytes are alike.
        let name = entry.d_name.map(|byte| byte as u8);
        let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let fileid = if stat.st_ino != 0 { stat.st_ino } else { entry.d_ino };
        Ok(Some(Listed { name: name[..len].to_vec(), fileid, cookie: entry.d_off as u64 }))
    }
}

/// A read or a write that the library does meanwhile.
struct Flight(Arc<Ending>);

#[derive(Default)]
struct Ending {
    answer: Mutex<Option<Result<usize>>>,
    ended: Condvar,
}

impl Ending {
    fn wait(&self) -> Result<usize> {
        let answer = self.ended.wait_while(self.answer.lock(), |answer| answer.is_none());
        answer.unwrap_or(Err(Errno(libc::EIO)))
    }
}

impl Flight {
    /// Starts one. Its buffer must stay until [`Flight::end`], which the caller calls for each one that started.
    fn start(begin: impl FnOnce(api::Done, *mut std::ffi::c_void) -> c_int) -> Result<Flight> {
        let ending = Arc::<Ending>::default();
        let data = Arc::into_raw(ending.clone());
        if begin(ended, data.cast_mut().cast()) < 0 {
            let error = last_error();
            // SAFETY: the library did not take it, and does not call back.
            drop(unsafe { Arc::from_raw(data) });
            return Err(error);
        }
        Ok(Flight(ending))
    }

    /// Waits until it is done. The library ends every request, at the latest when it gives its brick up
    /// (`network.ping-timeout` and `network.frame-timeout` of the volume).
    fn end(&self) -> Result<usize> {
        self.0.wait()
    }
}

/// The buffer of a flight is in use until it has ended, also when its owner panics in between.
impl Drop for Flight {
    fn drop(&mut self) {
        let _ = self.0.wait(); // who wants the answer has it
    }
}

unsafe extern "C" fn ended(
    _: *mut api::Fd,
    answer: libc::ssize_t,
    _: *mut std::ffi::c_void,
    _: *mut std::ffi::c_void,
    data: *mut std::ffi::c_void,
) {
    let answer = usize::try_from(answer).map_err(|_| last_error());
    // SAFETY: what `Flight::start` gave away; called once for each.
    let ending = unsafe { Arc::from_raw(data.cast::<Ending>().cast_const()) };
    *ending.answer.lock() = Some(answer);
    ending.ended.notify_all();
}
