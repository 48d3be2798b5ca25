//! A mount of a file system in this process, its life, and its calls as safe functions. Each call says on whose behalf it is
//! made, and its answer tells when the session with the metadata servers is lost: then the mount is of no use any more.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::api::{self, Api, Statx};
use super::{Options, placement};
use crate::rules::New;
use crate::{Caller, Errno, Result};

/// Longest single read or write: lengths are counted in an `int`.
const CALL_MAX_BYTES: usize = 1 << 30;
/// An orderly end of a session is waited for so long.
const UNMOUNT_MAX: Duration = Duration::from_secs(5);

/// Which file system, and who reaches it.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// Ceph's configuration file; `None`: those that Ceph itself looks for (`/etc/ceph/ceph.conf`).
    pub config: Option<PathBuf>,
    /// The user, `x` of `client.x`; `None`: `admin`. Its key is where the configuration file says.
    pub user: Option<String>,
    /// The file system's name; `None`: the cluster's default one.
    pub filesystem: Option<String>,
    /// The directory of it that is served, from its root on; empty: all of it.
    pub folder: PathBuf,
}

/// A mount.
pub(super) struct Mount {
    api: Api,
    fs: NonNull<api::Fs>,
    /// Who this process is.
    own: Caller,
    /// The name under which snapshots appear in every directory.
    snapshots: Vec<u8>,
    mounted: bool,
    lost: AtomicBool,
}

// SAFETY: the library's functions on a mount may be called by any thread at once (it has a lock of its own).
unsafe impl Send for Mount {}
// SAFETY: as above.
unsafe impl Sync for Mount {}

/// A node that was found.
pub(super) struct Inode {
    mount: Arc<Mount>,
    inode: NonNull<api::Inode>,
}

// SAFETY: a counted reference that any thread may use and give back.
unsafe impl Send for Inode {}
// SAFETY: as above.
unsafe impl Sync for Inode {}

/// A file or a directory that is open.
pub(super) struct Descriptor {
    inode: Arc<Inode>,
    opened: Opened,
}

enum Opened {
    File(NonNull<api::Fh>),
    Directory(NonNull<api::Dir>),
}

// SAFETY: an open file may be used by any thread; a directory, whose position is in it, by one at a time, which is what
// the lock on the position is for.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

/// What a listing tells of a name.
pub(super) struct Listed {
    pub(super) name: Vec<u8>,
    pub(super) fileid: u64,
    pub(super) cookie: u64,
}

/// A caller as the library takes it.
struct Perm<'a> {
    api: &'a Api,
    perm: NonNull<api::UserPerm>,
    /// Used as long as the value lives.
    _groups: Vec<libc::gid_t>,
}

impl Perm<'_> {
    fn as_ptr(&self) -> *const api::UserPerm {
        self.perm.as_ptr()
    }
}

impl Drop for Perm<'_> {
    fn drop(&mut self) {
        // SAFETY: it is given back once.
        unsafe { (self.api.userperm_destroy)(self.perm.as_ptr()) };
    }
}

/// What a session that is lost answers: the client was evicted, or its connections were ended.
pub(super) fn is_lost(error: Errno) -> bool {
    matches!(error.0, libc::ESHUTDOWN | libc::ENOTCONN)
}

fn c_string(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Errno(libc::EINVAL))
}

fn zeroed() -> Statx {
    // SAFETY: a structure of numbers, of which zero is one.
    unsafe { MaybeUninit::<Statx>::zeroed().assume_init() }
}

/// Whole seconds for the library's options, at least one.
fn seconds(timeout: Duration) -> String {
    (timeout.as_millis().div_ceil(1000)).max(1).to_string()
}

impl Mount {
    /// Mounts. The error names the input and the remedy.
    pub(super) fn open(source: &Source, options: &Options, own: Caller) -> std::result::Result<Mount, String> {
        let text = |bytes: &[u8]| {
            CString::new(bytes).map_err(|_| format!("{:?} contains a zero byte", String::from_utf8_lossy(bytes)))
        };
        let api = Api::load(api::LIBRARY).map_err(|why| {
            format!("{why}; install Ceph's client library of version 16 or later (Debian: libcephfs2)")
        })?;
        let user = text(source.user.as_deref().unwrap_or("admin").as_bytes())?;
        let mut fs = ptr::null_mut();
        // SAFETY: a place for the mount, and a terminated string.
        let created = unsafe { (api.create)(&raw mut fs, user.as_ptr()) };
        let fs = NonNull::new(fs).filter(|_| created == 0);
        let fs = fs.ok_or_else(|| format!("libcephfs cannot start: {}", Errno(created.saturating_neg())))?;
        // From here on the mount is given back whatever fails.
        let mut mount = Mount { api, fs, own, snapshots: Vec::new(), mounted: false, lost: AtomicBool::new(false) };
        let config = source.config.as_ref().map(|path| text(path.as_os_str().as_bytes())).transpose()?;
        // SAFETY: a terminated string, or none: the usual places.
        let read = unsafe {
            (mount.api.conf_read_file)(fs.as_ptr(), config.as_ref().map_or(ptr::null(), |config| config.as_ptr()))
        };
        if read != 0 {
            let file = source.config.as_ref().map_or("/etc/ceph/ceph.conf".into(), |path| path.display().to_string());
            return Err(format!("Ceph's configuration {file} cannot be read: {}", Errno(read.saturating_neg())));
        }
        mount.set_up(options)?;
        // SAFETY: a mount that is configured, as in the calls below.
        let answer = unsafe { (mount.api.init)(fs.as_ptr()) };
        mount.began(answer, "no monitor answers, or none takes the user's key")?;
        if let Some(identity) = &options.identity {
            mount.reclaim(&text(identity.as_bytes())?);
        }
        if let Some(name) = &source.filesystem {
            let name = text(name.as_bytes())?;
            // SAFETY: a terminated string, here and below.
            let answer = unsafe { (mount.api.select_filesystem)(fs.as_ptr(), name.as_ptr()) };
            mount.began(answer, "the file system cannot be chosen")?;
        }
        let mut folder = source.folder.as_os_str().as_bytes().to_vec();
        if !folder.starts_with(b"/") {
            folder.insert(0, b'/');
        }
        let folder = text(&folder)?;
        // SAFETY: as above.
        let answer = unsafe { (mount.api.mount)(fs.as_ptr(), folder.as_ptr()) };
        mount.began(
            answer,
            "the folder or the file system is not there, the user may not use it, or no metadata server answers",
        )?;
        mount.mounted = true;
        Ok(mount)
    }

    fn began(&self, answer: c_int, what: &str) -> std::result::Result<(), String> {
        if answer == 0 { Ok(()) } else { Err(format!("{what} ({})", Errno(answer.saturating_neg()))) }
    }

    /// Settings that what is promised depends on.
    fn set_up(&mut self, options: &Options) -> std::result::Result<(), String> {
        let timeout = seconds(options.timeout);
        let settings = [
            // Bytes that a call has written are with their OSDs when it returns, and are not kept here a second time.
            ("client_oc", "false"),
            // Rights are those of each call's caller, by mode and lists of access control, and the library checks them.
            ("fuse_default_permissions", "false"),
            // The length of a directory changes when its names do, not some time after files below it have.
            ("client_dirsize_rbytes", "false"),
            ("rados_osd_op_timeout", &timeout),
            ("rados_mon_op_timeout", &timeout),
            ("client_mount_timeout", &timeout),
        ];
        for (key, value) in settings {
            let (name, value) = (CString::new(key), CString::new(value));
            let (Ok(name), Ok(value)) = (name, value) else { continue };
            // SAFETY: terminated strings.
            let set = unsafe { (self.api.conf_set)(self.fs.as_ptr(), name.as_ptr(), value.as_ptr()) };
            if set != 0 {
                return Err(format!("libcephfs refuses its option {key}: {}", Errno(set.saturating_neg())));
            }
        }
        self.snapshots = self.setting(c"client_snapdir").unwrap_or_else(|| b".snap".to_vec());
        Ok(())
    }

    /// A setting of Ceph's.
    pub(super) fn setting(&self, name: &CStr) -> Option<Vec<u8>> {
        let mut value = vec![0u8; 4096];
        // SAFETY: a terminated string, and a buffer as long as is said.
        let got =
            unsafe { (self.api.conf_get)(self.fs.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        let len = value.iter().position(|byte| *byte == 0)?;
        value.truncate(len);
        (got == 0).then_some(value)
    }

    /// Ends an earlier session of this name, which a run that was killed, or a mount that was lost, has left: until it
    /// expired others would wait for what it holds. What it still had under way reaches no OSD from then on.
    fn reclaim(&self, identity: &CStr) {
        // SAFETY: an initialised mount that is not mounted yet, and a terminated string.
        let answer = unsafe { (self.api.start_reclaim)(self.fs.as_ptr(), identity.as_ptr(), api::RECLAIM_RESET) };
        if answer != 0 && answer != -libc::ENOENT {
            let error = Errno(answer.saturating_neg());
            tracing::warn!(%error, "an earlier session of this I/O node at the metadata servers cannot be ended: it expires");
        }
        // SAFETY: as above.
        unsafe {
            (self.api.finish_reclaim)(self.fs.as_ptr());
            (self.api.set_uuid)(self.fs.as_ptr(), identity.as_ptr());
        }
    }

    /// Who this process is.
    pub(super) fn own(&self) -> &Caller {
        &self.own
    }

    /// The name under which snapshots appear in every directory.
    pub(super) fn snapshots(&self) -> &[u8] {
        &self.snapshots
    }

    /// The number of the file system in its cluster.
    pub(super) fn filesystem_number(&self) -> i64 {
        // SAFETY: a mount that is mounted.
        unsafe { (self.api.get_fs_cid)(self.fs.as_ptr()) }
    }

    /// The session is lost: every call fails.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// What a call answered.
    fn check(&self, answer: impl Into<i64>) -> Result<usize> {
        let answer = answer.into();
        let Ok(count) = usize::try_from(answer) else {
            let error = Errno(i32::try_from(answer.unsigned_abs()).unwrap_or(libc::EIO));
            if is_lost(error) && !self.lost.swap(true, Ordering::AcqRel) {
                tracing::warn!(%error, "the session with CephFS is lost: it was evicted, or its connections were ended");
            }
            // An OSD or a monitor that is away is a failed server.
            return Err(if error.0 == libc::ETIMEDOUT { Errno(libc::EIO) } else { error });
        };
        Ok(count)
    }

    fn perm(&self, caller: &Caller) -> Result<Perm<'_>> {
        let mut groups = caller.groups.clone();
        let count = c_int::try_from(groups.len()).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: as many groups as is said; they stay where they are while the value lives.
        let perm = unsafe { (self.api.userperm_new)(caller.uid, caller.gid, count, groups.as_mut_ptr()) };
        let perm = NonNull::new(perm).ok_or(Errno(libc::ENOMEM))?;
        Ok(Perm { api: &self.api, perm, _groups: groups })
    }

    fn found(self: &Arc<Self>, answer: c_int, inode: *mut api::Inode) -> Result<Inode> {
        self.check(answer)?;
        let inode = NonNull::new(inode).ok_or(Errno(libc::EIO))?;
        Ok(Inode { mount: self.clone(), inode })
    }

    /// The directory that everything is below of.
    pub(super) fn root(self: &Arc<Self>) -> Result<Inode> {
        let mut inode = ptr::null_mut();
        // SAFETY: a place for the node, here and below.
        let answer = unsafe { (self.api.ll_lookup_root)(self.fs.as_ptr(), &raw mut inode) };
        self.found(answer, inode)
    }

    /// The node of a number.
    pub(super) fn by_number(self: &Arc<Self>, val: u64) -> Result<Inode> {
        let mut inode = ptr::null_mut();
        // SAFETY: as above.
        let answer = unsafe { (self.api.ll_lookup_inode)(self.fs.as_ptr(), api::Ino { val }, &raw mut inode) };
        self.found(answer, inode)
    }

    /// The OSD of each block of a file: those at `offsets`, asked of the file that has this path and number.
    pub(super) fn osds(
        &self,
        path: &[u8],
        number: u64,
        offsets: impl Iterator<Item = u64>,
    ) -> Result<Vec<Option<u32>>> {
        let path = c_string(path)?;
        // SAFETY: a terminated string.
        let fd = unsafe { (self.api.open)(self.fs.as_ptr(), path.as_ptr(), libc::O_RDONLY | libc::O_NOFOLLOW, 0) };
        self.check(fd)?;
        let mut stat = zeroed();
        // SAFETY: an open descriptor and a place for the attributes.
        let seen = unsafe { (self.api.fstatx)(self.fs.as_ptr(), fd, &raw mut stat, api::STATX_WANT, api::DONT_SYNC) };
        let ask = |offset: u64| {
            let (mut len, mut osds) = (0, [-1; 8]);
            // SAFETY: an open descriptor, and places for the length and as many OSDs as is said.
            let count = unsafe {
                (self.api.get_file_extent_osds)(
                    self.fs.as_ptr(),
                    fd,
                    i64::try_from(offset).unwrap_or(i64::MAX),
                    &raw mut len,
                    osds.as_mut_ptr(),
                    osds.len() as c_int,
                )
            };
            // The first is the one that serves it; without any nothing serves it now.
            if count > 0 { u32::try_from(osds[0]).ok() } else { None }
        };
        let answer = match self.check(seen) {
            Err(error) => Err(error),
            // Another file has the path by now.
            Ok(_) if stat.ino != number => Err(Errno(libc::ESTALE)),
            Ok(_) => Ok(offsets.map(ask).collect()),
        };
        // SAFETY: it is closed once.
        unsafe { (self.api.close)(self.fs.as_ptr(), fd) };
        answer
    }
}

/// A mount that is being given back.
struct Closing(NonNull<api::Fs>);

// SAFETY: as for mounts.
unsafe impl Send for Closing {}

impl Drop for Mount {
    fn drop(&mut self) {
        let (closing, mounted, lost) = (Closing(self.fs), self.mounted, self.is_lost());
        let (unmount, abort, release) = (self.api.unmount, self.api.abort_conn, self.api.release);
        let (done, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("ceph end".into()).spawn(move || {
            let closing = closing;
            let fs = closing.0.as_ptr();
            // SAFETY: nodes and descriptors keep the mount; there are none any more. It is released once.
            unsafe {
                if mounted {
                    if lost {
                        abort(fs)
                    } else {
                        unmount(fs)
                    };
                }
                release(fs);
            }
            let _ = done.send(()); // the one who waited may have gone
        });
        // An orderly end gives back what the session holds, for which other clients would wait until it expires. Metadata
        // servers that do not answer are not waited for.
        if thread.is_ok() && mounted && !lost {
            let _ = ended.recv_timeout(UNMOUNT_MAX);
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        // SAFETY: it is given back once.
        unsafe { (self.mount.api.ll_put)(self.mount.fs.as_ptr(), self.inode.as_ptr()) };
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let (_, api, fs, _) = self.inode.at();
        // SAFETY: it is closed once.
        unsafe {
            match self.opened {
                Opened::File(fh) => (api.ll_close)(fs, fh.as_ptr()),
                Opened::Directory(dir) => (api.ll_releasedir)(fs, dir.as_ptr()),
            }
        };
    }
}

impl Inode {
    fn at(&self) -> (&Arc<Mount>, &Api, *mut api::Fs, *mut api::Inode) {
        (&self.mount, &self.mount.api, self.mount.fs.as_ptr(), self.inode.as_ptr())
    }

    /// The mount that it is of.
    pub(super) fn mount(&self) -> &Arc<Mount> {
        &self.mount
    }

    /// The node of a name in this directory.
    pub(super) fn lookup(&self, caller: &Caller, name: &[u8]) -> Result<(Inode, Statx)> {
        let (mount, api, fs, dir) = self.at();
        let (name, perm, mut inode, mut stat) = (c_string(name)?, mount.perm(caller)?, ptr::null_mut(), zeroed());
        // SAFETY: a terminated name, places for the node and the attributes, and a caller; so in the calls below.
        let answer = unsafe {
            (api.ll_lookup)(fs, dir, name.as_ptr(), &raw mut inode, &raw mut stat, api::STATX_WANT, 0, perm.as_ptr())
        };
        Ok((mount.found(answer, inode)?, stat))
    }

    /// Makes a node that must not exist. A file is open then, for reading and writing.
    pub(super) fn make(
        &self,
        caller: &Caller,
        name: &[u8],
        what: &New<'_>,
        mode: u32,
    ) -> Result<(Arc<Inode>, Statx, Option<Descriptor>)> {
        let (mount, api, fs, dir) = self.at();
        let (name, perm) = (c_string(name)?, mount.perm(caller)?);
        let text = if let New::Symlink(text) = what { c_string(text)? } else { CString::default() };
        let (mut inode, mut fh, mut stat) = (ptr::null_mut(), ptr::null_mut(), zeroed());
        // SAFETY: as above; of a file also a place for the descriptor.
        let answer = unsafe {
            let (name, perm, found, seen) = (name.as_ptr(), perm.as_ptr(), &raw mut inode, &raw mut stat);
            let want: c_uint = api::STATX_WANT;
            match what {
                New::File => {
                    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
                    (api.ll_create)(fs, dir, name, mode, flags, found, &raw mut fh, seen, want, 0, perm)
                }
                New::Directory => (api.ll_mkdir)(fs, dir, name, mode, found, seen, want, 0, perm),
                New::Symlink(_) => (api.ll_symlink)(fs, dir, name, text.as_ptr(), found, seen, want, 0, perm),
                New::Special(kind, device) => {
                    (api.ll_mknod)(fs, dir, name, kind | mode, *device, found, seen, want, 0, perm)
                }
            }
        };
        let inode = Arc::new(mount.found(answer, inode)?);
        let open = NonNull::new(fh).map(|fh| Descriptor { inode: inode.clone(), opened: Opened::File(fh) });
        Ok((inode, stat, open))
    }

    /// Removes a name: of a directory, or of what is none.
    pub(super) fn unlink(&self, caller: &Caller, name: &[u8], directory: bool) -> Result<()> {
        let (mount, api, fs, dir) = self.at();
        let (name, perm) = (c_string(name)?, mount.perm(caller)?);
        let unlink = if directory { api.ll_rmdir } else { api.ll_unlink };
        // SAFETY: as above.
        mount.check(unsafe { unlink(fs, dir, name.as_ptr(), perm.as_ptr()) }).map(drop)
    }

    /// A second name of this node.
    pub(super) fn link(&self, caller: &Caller, dir: &Inode, name: &[u8]) -> Result<()> {
        let (mount, api, fs, inode) = self.at();
        let (name, perm) = (c_string(name)?, mount.perm(caller)?);
        // SAFETY: as above; both nodes are of this mount, which `Shared::both` sees to.
        mount.check(unsafe { (api.ll_link)(fs, inode, dir.inode.as_ptr(), name.as_ptr(), perm.as_ptr()) }).map(drop)
    }

    /// Moves a name of this directory to another.
    pub(super) fn rename(&self, caller: &Caller, old: &[u8], dir: &Inode, new: &[u8]) -> Result<()> {
        let (mount, api, fs, from) = self.at();
        let (old, new, perm) = (c_string(old)?, c_string(new)?, mount.perm(caller)?);
        let to = dir.inode.as_ptr();
        // SAFETY: as in `link`.
        mount.check(unsafe { (api.ll_rename)(fs, from, old.as_ptr(), to, new.as_ptr(), perm.as_ptr()) }).map(drop)
    }

    /// The text of a symbolic link.
    pub(super) fn read_link(&self, caller: &Caller) -> Result<Vec<u8>> {
        let (mount, api, fs, inode) = self.at();
        let (perm, mut text) = (mount.perm(caller)?, vec![0u8; libc::PATH_MAX as usize]);
        // SAFETY: a buffer as long as is said.
        let len =
            unsafe { (api.ll_readlink)(fs, inode, text.as_mut_ptr().cast::<c_char>(), text.len(), perm.as_ptr()) };
        text.truncate(mount.check(len)?);
        Ok(text)
    }

    /// Attributes.
    pub(super) fn stat(&self) -> Result<Statx> {
        let (mount, api, fs, inode) = self.at();
        let (perm, mut stat) = (mount.perm(&mount.own)?, zeroed());
        // SAFETY: a place for the attributes.
        mount.check(unsafe { (api.ll_getattr)(fs, inode, &raw mut stat, api::STATX_WANT, 0, perm.as_ptr()) })?;
        Ok(stat)
    }

    /// Changes the attributes that `valid` (`SET_…`) names.
    pub(super) fn set_stat(&self, caller: &Caller, valid: c_int, fill: impl FnOnce(&mut Statx)) -> Result<()> {
        let (mount, api, fs, inode) = self.at();
        let (perm, mut stat) = (mount.perm(caller)?, zeroed());
        fill(&mut stat);
        // SAFETY: the attributes are read during the call.
        mount.check(unsafe { (api.ll_setattr)(fs, inode, &raw mut stat, valid, perm.as_ptr()) }).map(drop)
    }

    /// Sets the permissions, 0 to 0o7777.
    pub(super) fn set_mode(&self, caller: &Caller, mode: u32) -> Result<()> {
        self.set_stat(caller, api::SET_MODE, |stat| stat.mode = mode as u16)
    }

    /// Has the library or the metadata server take set-user-id and set-group-id in one step. Libraries that do not know
    /// the flag do nothing, nor do others to a file that nobody may execute.
    pub(super) fn take_set_id(&self, caller: &Caller) -> Result<()> {
        self.set_stat(caller, api::KILL_SET_ID, |_| ())
    }

    /// Sets an extended attribute, as this process.
    pub(super) fn set_attribute(&self, name: &CStr, value: &[u8]) -> Result<()> {
        let (mount, api, fs, inode) = self.at();
        let perm = mount.perm(&mount.own)?;
        let (value, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: a terminated name, and a buffer as long as is said.
        mount.check(unsafe { (api.ll_setxattr)(fs, inode, name.as_ptr(), value, len, 0, perm.as_ptr()) }).map(drop)
    }

    /// Space of the file system.
    pub(super) fn space(&self) -> Result<libc::statvfs> {
        let (mount, api, fs, inode) = self.at();
        // SAFETY: a structure of numbers, of which zero is one.
        let mut space = unsafe { MaybeUninit::<libc::statvfs>::zeroed().assume_init() };
        // SAFETY: a place for the answer.
        mount.check(unsafe { (api.ll_statfs)(fs, inode, &raw mut space) })?;
        Ok(space)
    }

    /// How the file is striped.
    pub(super) fn layout(&self) -> Result<api::FileLayout> {
        let (mount, api, fs, inode) = self.at();
        let mut layout = api::FileLayout::default();
        // SAFETY: a place for the answer. The number is declared without a sign, and negative all the same.
        mount.check(unsafe { (api.ll_file_layout)(fs, inode, &raw mut layout) }.cast_signed())?;
        Ok(layout)
    }

    /// Puts what was done to the node on stable storage.
    pub(super) fn sync(&self) -> Result<()> {
        let (mount, api, fs, inode) = self.at();
        // SAFETY: a node of the mount.
        mount.check(unsafe { (api.ll_sync_inode)(fs, inode, 0) })?;
        // A session that was evicted meanwhile says that all is well.
        self.stat().map(drop)
    }

    /// Opens the file.
    pub(super) fn open(self: &Arc<Self>, caller: &Caller, flags: c_int) -> Result<Descriptor> {
        let (mount, api, fs, inode) = self.at();
        let (perm, mut fh) = (mount.perm(caller)?, ptr::null_mut());
        // SAFETY: a place for the descriptor.
        mount.check(unsafe { (api.ll_open)(fs, inode, flags, &raw mut fh, perm.as_ptr()) })?;
        let fh = NonNull::new(fh).ok_or(Errno(libc::EIO))?;
        Ok(Descriptor { inode: self.clone(), opened: Opened::File(fh) })
    }

    /// Opens the directory.
    pub(super) fn open_directory(self: &Arc<Self>, caller: &Caller) -> Result<Descriptor> {
        let (mount, api, fs, inode) = self.at();
        let (perm, mut dir) = (mount.perm(caller)?, ptr::null_mut());
        // SAFETY: as above.
        mount.check(unsafe { (api.ll_opendir)(fs, inode, &raw mut dir, perm.as_ptr()) })?;
        let dir = NonNull::new(dir).ok_or(Errno(libc::EIO))?;
        Ok(Descriptor { inode: self.clone(), opened: Opened::Directory(dir) })
    }
}

/// Calls on a descriptor need no rights: they were checked when it was opened.
impl Descriptor {
    fn file(&self) -> Result<(&Mount, &Api, *mut api::Fs, *mut api::Fh)> {
        let (mount, api, fs, _) = self.inode.at();
        match self.opened {
            Opened::File(fh) => Ok((mount, api, fs, fh.as_ptr())),
            Opened::Directory(_) => Err(Errno(libc::EISDIR)),
        }
    }

    fn directory(&self) -> Result<(&Mount, &Api, *mut api::Fs, *mut api::Dir)> {
        let (mount, api, fs, _) = self.inode.at();
        match self.opened {
            Opened::Directory(dir) => Ok((mount, api, fs, dir.as_ptr())),
            Opened::File(_) => Err(Errno(libc::ENOTDIR)),
        }
    }

    /// Reads into all of `into`, less only at the end of the file.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let got = self.read_plainly(offset, into)?;
        if placement::pieces(placement::UNIT_BYTES.into(), offset, got).nth(1).is_none() {
            return Ok(got);
        }
        // Of a read from several objects the library drops the errors, and gives zeros in the place of what could not be read.
        // From a single object it tells them.
        let Some(block) = placement::block_bytes(&self.inode.layout()?) else { return Err(Errno(libc::EIO)) };
        for (at, range) in placement::pieces(block.into(), offset, got) {
            let piece = &mut into[range];
            if piece.len() < got && piece.iter().all(|byte| *byte == 0) {
                self.read_plainly(at, piece)?;
            }
        }
        Ok(got)
    }

    fn read_plainly(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        let (mount, api, fs, fh) = self.file()?;
        let mut done = 0;
        while done < into.len() {
            let (at, rest) = ((offset + done as u64) as i64, &mut into[done..]);
            let len = rest.len().min(CALL_MAX_BYTES);
            // SAFETY: a buffer at least as long as is said.
            let got = unsafe { (api.ll_read)(fs, fh, at, len as u64, rest.as_mut_ptr().cast()) };
            match mount.check(got)? {
                0 => break,
                got => done += got.min(len),
            }
        }
        Ok(done)
    }

    /// Writes all of `bytes`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (mount, api, fs, fh) = self.file()?;
        let mut done = 0;
        while done < bytes.len() {
            let (at, rest) = ((offset + done as u64) as i64, &bytes[done..]);
            let len = rest.len().min(CALL_MAX_BYTES);
            // SAFETY: as above.
            let put = unsafe { (api.ll_write)(fs, fh, at, len as u64, rest.as_ptr().cast()) };
            match mount.check(put)? {
                0 => return Err(Errno(libc::EIO)),
                put => done += put.min(len),
            }
        }
        Ok(())
    }

    /// The length of the file as far as it is known here: no metadata server is asked.
    pub(super) fn known_size(&self) -> Result<u64> {
        let (mount, api, fs, inode) = self.inode.at();
        let (perm, mut stat) = (mount.perm(&mount.own)?, zeroed());
        let (want, how) = (api::STATX_WANT, api::DONT_SYNC);
        // SAFETY: a place for the attributes.
        mount.check(unsafe { (api.ll_getattr)(fs, inode, &raw mut stat, want, how, perm.as_ptr()) })?;
        Ok(stat.size)
    }

    /// Puts what was written on stable storage.
    pub(super) fn sync(&self) -> Result<()> {
        let (mount, api, fs, fh) = self.file()?;
        // What a session that is lost had not given to the metadata servers is lost with it.
        if mount.is_lost() {
            return Err(Errno(libc::ESHUTDOWN));
        }
        // SAFETY: an open file.
        mount.check(unsafe { (api.ll_fsync)(fs, fh, 0) })?;
        // A session that was evicted meanwhile says that all is well.
        self.inode.stat().map(drop)
    }

    /// Goes to a place of a listing. Not while another thread uses the descriptor.
    pub(super) fn seek(&self, cookie: u64) -> Result<()> {
        let (_, api, fs, dir) = self.directory()?;
        // SAFETY: a directory that is open.
        unsafe {
            match i64::try_from(cookie) {
                Ok(0) | Err(_) => (api.rewinddir)(fs, dir),
                Ok(cookie) => (api.seekdir)(fs, dir, cookie),
            }
        };
        Ok(())
    }

    /// The next name of a directory. Not while another thread uses the descriptor.
    pub(super) fn next(&self) -> Result<Option<Listed>> {
        let (mount, api, fs, dir) = self.directory()?;
        let mut stat = zeroed();
        // SAFETY: a structure of numbers, of which zero is one.
        let mut entry = unsafe { MaybeUninit::<libc::dirent>::zeroed().assume_init() };
        // SAFETY: places for the entry and its attributes; a reference to the node is not wanted.
        let answer =
            unsafe { (api.readdirplus_r)(fs, dir, &raw mut entry, &raw mut stat, 0, api::DONT_SYNC, ptr::null_mut()) };
        if mount.check(answer)? == 0 {
            return Ok(None);
        }
        // SAFETY: signed and unsigned bytes are alike.
        let name = entry.d_name.map(|byte| byte as u8);
        let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(Some(Listed { name: name[..len].to_vec(), fileid: entry.d_ino, cookie: entry.d_off as u64 }))
    }
}
