//! The metadata server's interface: sessions, and one answer for each call.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Mutex, RwLock};
use impresario_layout::{Layout, Skipped};
use impresario_transport::Munge;
use impresario_wire::LockCall;
use impresario_wire::frame::ANSWER_BODY_MAX_BYTES;
use impresario_wire::message::{Answer, Examine, MetaCall, Opened, Restriction, Statfs, Target, Who, XATTRS_MAX_BYTES};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::answered::Answered;
use super::background::{self, BackgroundTasks};
use super::changes::{By, Changes};
use super::directory::{MetaDirectory, StartError};
use super::disk::StepHook;
use super::examine::Walks;
use super::fault::{Explain, Outcome, data_fault, fault};
use super::labels::Labels;
use super::listing::{HEAD_BYTES, Listings, slice_bytes_max};
use super::locks::Locking;
use super::objects::Objects;
use super::opens::{Left, OpenFile, Opens, Pin, Room, Session, SessionId, Sessions};
use super::permissions::{User, path_of};
use super::removal::NameLocks;
use super::status::{Operations, SESSION_END, SESSION_START, kind_of};
use super::stores::Stores;
use super::tree::{Absent, check_path};

/// Options of the metadata server.
#[derive(Clone)]
pub struct MetaOptions {
    /// Its directory, on a local file system with user extended attributes. Created if missing.
    pub dir: PathBuf,
    /// Number of data servers in the cluster.
    pub data_servers: u16,
    /// Strip size of files whose directory has no default layout, bytes.
    pub stripe_bytes: u32,
    /// Data servers per file whose directory has no default layout.
    pub stripe_count: u16,
    /// The data servers that new files do not use, at present.
    pub skipped: Arc<dyn Fn() -> Skipped + Send + Sync>,
    /// Which of the data servers have answered; `None`: new files use any.
    pub answered: Option<Arc<Answered>>,
    /// What is noted of the data servers.
    pub stores: Option<Arc<Stores>>,
    /// How long a file without names is kept for a client that lost its connection, or for all clients after a restart
    /// of the server.
    pub grace: Duration,
    /// How long a client keeps its locks without renewing them.
    pub lock_lease: Duration,
    /// Files that clients may have open at once; each holds a descriptor of this process.
    pub files_max: usize,
    /// Users of some sessions act as others.
    pub squashes: bool,
    /// By which users of clients prove themselves.
    pub munge: Munge,
    /// For tests: called before each change of the local file system.
    pub before_step: Option<StepHook>,
}

impl MetaOptions {
    /// 64 KiB strips over all data servers, 30 s of grace, 10 s for locks.
    pub fn new(dir: impl Into<PathBuf>, data_servers: u16) -> MetaOptions {
        MetaOptions {
            dir: dir.into(),
            data_servers,
            stripe_bytes: Layout::SSIZE_DEFAULT_BYTES,
            stripe_count: data_servers,
            skipped: Arc::new(|| Skipped::NONE),
            answered: None,
            stores: None,
            grace: Duration::from_secs(30),
            lock_lease: Duration::from_secs(10),
            files_max: usize::MAX,
            squashes: false,
            munge: Munge::default(),
            before_step: None,
        }
    }
}

/// The metadata server without its listener. Dropping it ends its threads. Neither that nor a crash loses anything: the
/// next start resumes unfinished work.
pub struct MetaService {
    pub(super) meta: Arc<Meta>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by all parts of the metadata server.
pub(super) struct Meta {
    pub(super) dir: MetaDirectory,
    pub(super) objects: Arc<dyn Objects>,
    pub(super) options: MetaOptions,
    pub(super) opens: Opens,
    pub(super) sessions: Sessions,
    pub(super) background: BackgroundTasks,
    pub(super) changes: Changes,
    pub(super) labels: Labels,
    pub(super) locks: Locking,
    pub(super) names: NameLocks,
    pub(super) listings: Listings,
    pub(super) walks: Walks,
    pub(super) operations: Operations,
    /// See [`Meta::hold_names`].
    pub(super) moves: RwLock<()>,
    /// Held while an extended attribute is set.
    pub(super) xattrs: Mutex<()>,
    /// Counts created files, to distribute their first strips evenly.
    pub(super) dealt: AtomicU64,
    /// Numbers names in `staging/`.
    pub(super) staged: AtomicU64,
    pub(super) started: Instant,
    /// When a client was lost last that had files open.
    pub(super) vanished: Mutex<Option<Instant>>,
}

impl MetaService {
    /// Starts in a directory and resumes what an earlier run left.
    pub fn open(options: MetaOptions, objects: Arc<dyn Objects>) -> Result<MetaService, StartError> {
        Layout::new(0, options.stripe_count, options.stripe_bytes, options.data_servers)?;
        let dir = MetaDirectory::open(&options.dir, options.before_step.clone())?;
        // A run leaves that file, whatever else it did.
        let is_served_before = rustix::fs::statat(&dir.top, "changes", AtFlags::SYMLINK_NOFOLLOW).is_ok();
        let changes = Changes::open(&dir).map_err(|errno| StartError::Unusable {
            dir: options.dir.clone(),
            what: "its file `changes` cannot be read and rewritten",
            source: errno.into(),
        })?;
        let labels = Labels::open(&dir).map_err(|errno| StartError::Unusable {
            dir: options.dir.clone(),
            what: "its file `labels` cannot be looked at",
            source: errno.into(),
        })?;
        let locks = Locking::open(&dir, &changes, options.lock_lease).map_err(|errno| StartError::Unusable {
            dir: options.dir.clone(),
            what: "its directory `lockers` cannot be made and read",
            source: errno.into(),
        })?;
        let meta = Arc::new(Meta {
            dir,
            changes,
            labels,
            locks,
            objects,
            opens: Opens::new(options.files_max),
            sessions: Sessions::default(),
            background: BackgroundTasks::default(),
            names: NameLocks::default(),
            listings: Listings::default(),
            walks: Walks::default(),
            operations: Operations::default(),
            moves: RwLock::new(()),
            xattrs: Mutex::default(),
            dealt: AtomicU64::new(u64::from(std::process::id())),
            staged: AtomicU64::new(0),
            started: Instant::now(),
            vanished: Mutex::default(),
            options,
        });
        let unusable = |what, source| StartError::Unusable { dir: meta.options.dir.clone(), what, source };
        if is_served_before {
            meta.opens.note_all_lost(meta.options.grace);
        }
        meta.recover()
            .map_err(|errno| unusable("the work that an earlier run left cannot be resumed", errno.into()))?;
        let mut service = MetaService { meta: meta.clone(), threads: Vec::new() };
        for i in 0..background::THREADS {
            let meta = service.meta.clone();
            let thread = std::thread::Builder::new().name(format!("meta-background-{i}")).stack_size(256 << 10);
            let thread = thread
                .spawn(move || meta.run_background_tasks())
                .map_err(|e| unusable("no thread can be started", e))?;
            service.threads.push(thread);
        }
        let meta = service.meta.clone();
        let thread = std::thread::Builder::new().name("meta-locks".into()).stack_size(256 << 10);
        let thread = thread.spawn(move || meta.keep_leases()).map_err(|e| unusable("no thread can be started", e))?;
        service.threads.push(thread);
        Ok(service)
    }

    /// A client has connected.
    pub fn open_session(&self, who: Who) -> Result<SessionId, super::Fault> {
        let began = Instant::now();
        let session = self.meta.sessions.start(who);
        self.meta.operations.note(SESSION_START, began.elapsed(), session.is_err());
        session
    }

    /// Has the users of a session act as others, or prove themselves, from now on.
    pub fn restrict(&self, session: SessionId, restriction: Restriction) -> Result<(), super::Fault> {
        restrict(&*self.meta.sessions.get(session)?, restriction)
    }

    /// A client's connection has ended: closes what it had open.
    pub fn close_session(&self, session: SessionId) {
        let began = Instant::now();
        let client = self.meta.sessions.get(session).map(|session| session.client()).unwrap_or_default();
        for (handle, file, write) in self.meta.sessions.end(session) {
            if !file.end_relay(handle) {
                self.meta.note_vanished();
            }
            // The background threads settle the size; closing does not wait for it.
            drop(self.meta.leave(file, write, Left::Vanished(client)));
        }
        self.meta.listings.forget(session);
        self.meta.operations.note(SESSION_END, began.elapsed(), false);
    }

    /// Serves one call of a client without a key. Many threads may call at once, also for one session.
    pub fn call(&self, session: SessionId, call: MetaCall) -> Answer {
        self.call_as(session, By::unnoted(&Who::default()), call)
    }

    /// The same in the name of a client.
    pub(super) fn call_as(&self, session: SessionId, by: By<'_>, call: MetaCall) -> Answer {
        let (began, kind) = (Instant::now(), kind_of(&call));
        let answer = self.meta.sessions.get(session).and_then(|session| self.meta.serve(&session, by, call));
        self.meta.operations.note(kind, began.elapsed(), answer.is_err());
        answer.unwrap_or_else(Answer::Fault)
    }

    /// Where a call that makes a file if there is none finds none: then it does not [wait](Self::may_wait), and need not look again
    /// ([`MetaService::call_at`]).
    pub fn absent(&self, who: &Who, call: &MetaCall) -> Option<Absent> {
        match call {
            // Under `squashes` who may do it is looked for first, in the same place.
            MetaCall::Create { path, exclusive: false, .. }
                if who.since == who.epoch && !self.meta.options.squashes && !self.awaits_data_servers() =>
            {
                self.meta.absent(path)
            }
            _ => None,
        }
    }

    /// Whether a call may wait for the disk or the data servers now: on a connection's own thread it would delay the calls
    /// behind it. Other calls take microseconds.
    pub fn may_wait(&self, session: SessionId, who: &Who, call: &MetaCall) -> bool {
        match call {
            // What exists is opened for writing; and so may be what an earlier copy of the call has made.
            MetaCall::Create { path, exclusive, .. } => {
                self.awaits_data_servers()
                    || who.since != who.epoch
                    || !(*exclusive || self.meta.absent(path).is_some())
            }
            MetaCall::Close { handle, wrote } => self.meta.close_may_wait(session, *handle, *wrote),
            MetaCall::Open { write: true, .. }
            | MetaCall::Reopen { write: true, .. }
            | MetaCall::Append { .. }
            | MetaCall::CutBack { .. }
            | MetaCall::Exchange { .. }
            | MetaCall::Fsync { .. }
            | MetaCall::FsyncDir { .. }
            | MetaCall::Statfs
            | MetaCall::Relay(_)
            | MetaCall::Prove { .. }
            | MetaCall::Examine(_) => true,
            // A lease begins.
            MetaCall::Lock(LockCall { lease: 0, .. }) => true,
            MetaCall::SetAttr { set, .. } if set.size.is_some() => true,
            // Data servers are asked only about files that are being written.
            MetaCall::GetAttr { target } | MetaCall::SetAttr { target, .. } => self.meta.is_written(session, target),
            MetaCall::Open { path, .. } | MetaCall::Link { from: path, .. } => self.meta.is_written_at(path),
            MetaCall::Reopen { .. } | MetaCall::Readdir { .. } => self.meta.opens.counts().marked > 0,
            _ => false,
        }
    }

    /// Whether new files may have to wait until data servers have answered.
    fn awaits_data_servers(&self) -> bool {
        let options = &self.meta.options;
        options.answered.as_ref().is_some_and(|answered| answered.may_wait(|| (options.skipped)()))
    }

    /// The number that the keys of its files begin with.
    pub fn key_prefix(&self) -> u64 {
        self.meta.dir.identity
    }

    /// The server's state.
    pub fn status(&self) -> serde_json::Value {
        self.meta.status()
    }

    /// Waits until no background job can run now; false if `patience` expires first.
    pub fn wait_idle(&self, patience: Duration) -> bool {
        self.meta.background.wait_idle(patience)
    }
}

impl Drop for MetaService {
    fn drop(&mut self) {
        self.meta.background.stop();
        self.meta.locks.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a background thread of the metadata server panicked");
            }
        }
    }
}

impl Meta {
    fn serve(&self, session: &Session, by: By<'_>, call: MetaCall) -> Outcome<Answer> {
        let answer = self.serve_as_found(session, by, call);
        let found_nothing = match &answer {
            Ok(Answer::Entries(entries)) => entries.is_empty(),
            // A check would take all objects for those of no file.
            Ok(Answer::Examined { .. }) => true,
            Ok(_) => false,
            Err(fault) => fault.errno == libc::ENOENT,
        };
        // Who believed that there are no names might remove copies of them elsewhere.
        if found_nothing && self.dir.is_removed() {
            let dir = self.dir.dir.display();
            let remedy = "stop the metadata server, and start it with a copy of the folder";
            return Err(fault(
                Errno::IO,
                format!("the metadata folder {dir} was removed while its server ran; {remedy}"),
            ));
        }
        answer
    }

    fn serve_as_found(&self, session: &Session, by: By<'_>, mut call: MetaCall) -> Outcome<Answer> {
        call.paths().try_for_each(|path| check_path(path))?;
        let user = session.user_of(by.who, &call)?;
        let user = user.as_deref();
        let _held = self.hold_names(user, &call);
        let Some(user) = user else { return self.serve_permitted(session, by, None, call) };
        self.permit(session, user, &mut call)?;
        let opens = match &call {
            MetaCall::Open { path, write } | MetaCall::Reopen { path, write, .. } => Some((path.clone(), *write)),
            MetaCall::Create { path, .. } => Some((path.clone(), true)),
            _ => None,
        };
        let answer = self.serve_permitted(session, by, Some(user), call)?;
        if let (Answer::Opened(opened), Some((path, write))) = (&answer, opens)
            && let Err(denied) = self.permit_opened(session, user, opened, write, &path)
        {
            let close = MetaCall::Close { handle: opened.handle, wrote: false };
            self.serve_permitted(session, By::unnoted(by.who), None, close)?;
            return Err(denied);
        }
        Ok(answer)
    }

    /// The same of a call that its session may make.
    fn serve_permitted(&self, session: &Session, by: By<'_>, user: Option<&User>, call: MetaCall) -> Outcome<Answer> {
        if !self.labels.are_any() {
            return self.serve_unlabelled(session, by, user, call);
        }
        // A link is about its new name, which comes last.
        let path = call.paths().last().cloned();
        let handle = match &call {
            MetaCall::GetAttr { target: Target::Handle(handle) }
            | MetaCall::SetAttr { target: Target::Handle(handle), .. } => Some(*handle),
            _ => None,
        };
        let mut answer = self.serve_unlabelled(session, by, user, call)?;
        self.label(session, path.as_deref(), handle, &mut answer);
        Ok(answer)
    }

    /// The same; the attributes in the answer do not say yet which nodes have labels.
    fn serve_unlabelled(&self, session: &Session, by: By<'_>, user: Option<&User>, call: MetaCall) -> Outcome<Answer> {
        let who = by.who;
        Ok(match call {
            MetaCall::GetAttr { target: Target::Path(path) } => {
                Answer::Attr(match self.entry_for(user, &path, "get the attributes of")? {
                    Some(place) => self.attr_at(&place)?,
                    None => self.attr_by(&path, || rustix::fs::fstat(&self.dir.names), |_| None)?,
                })
            }
            MetaCall::GetAttr { target: Target::Handle(handle) } => {
                let pin = self.pin_handle(session, handle)?;
                Answer::Attr(self.attr_of(&pin, &self.opens.path_of(pin.ino))?)
            }
            MetaCall::SetAttr { target, set } if set.takes != 0 && set.mode.is_some() => {
                return Err(Errno::INVAL).explain("take and set permission bits at once of", path_of(&target));
            }
            MetaCall::SetAttr { target: Target::Path(path), set } => self.set_attr_at(by, &path, &set, user)?,
            MetaCall::SetAttr { target: Target::Handle(handle), set } => {
                let pin = self.pin_handle(session, handle)?;
                let path = self.opens.path_of(pin.ino);
                let asker = user.map(|user| (user, Some(session.check_writes(handle).is_ok())));
                self.set_attr_of(by, &pin, &set, &path, asker)?
            }
            MetaCall::Create { path, mode, uid, gid, exclusive, layout } => {
                Answer::Opened(self.create(session, by, user, &path, ([mode, uid, gid], exclusive, layout))?)
            }
            MetaCall::Open { path, write } => {
                let room = session.take_room()?;
                let place = self.entry_for(user, &path, "open")?.ok_or(Errno::ISDIR).explain("open", &path)?;
                self.open_pinned(room, self.pin_at(&place, "open")?, write, &path).map(Answer::Opened)?
            }
            MetaCall::Reopen { path, file, write } => {
                let room = session.take_room()?;
                let pin = self.pin_for_reopen(&path, file)?;
                Answer::Opened(self.open_pinned(room, pin, write, &path)?)
            }
            MetaCall::Close { handle, wrote } => {
                let (file, write) = session.take(handle)?;
                file.end_relay(handle);
                self.end_open(file, write, wrote);
                Answer::Done
            }
            MetaCall::Fsync { handle } => {
                let pin = self.pin_handle(session, handle)?;
                self.sync(&pin)?;
                Answer::Done
            }
            MetaCall::Append { handle, len_bytes } => {
                session.check_writes(handle)?;
                let pin = self.pin_handle(session, handle)?;
                Answer::Assigned { offset: self.assign(who, &pin, len_bytes)? }
            }
            MetaCall::CutBack { handle, len, end } => {
                session.check_writes(handle)?;
                let pin = self.pin_handle(session, handle)?;
                self.cut_back(by, &pin, len, end)?;
                Answer::Done
            }
            MetaCall::FsyncDir { path } => {
                self.changes.sync(&self.dir).and_then(|()| self.sync_directories(&path)).explain("sync", &path)?;
                Answer::Done
            }
            MetaCall::Mkdir { path, mode, uid, gid } => Answer::Attr(self.mkdir(by, &path, [mode, uid, gid])?),
            MetaCall::Rmdir { path } => {
                self.rmdir(by, &path)?;
                Answer::Done
            }
            MetaCall::Unlink { path } => {
                let links = self.unlink(by, &path)?;
                Answer::Removed { links }
            }
            MetaCall::Rename { from, to, no_replace, whiteout } => {
                let replaced = self.rename(by, &from, &to, no_replace, whiteout)?;
                replaced.map_or(Answer::Done, |links| Answer::Removed { links })
            }
            MetaCall::Exchange { from, to } => {
                self.exchange(by, &from, &to)?;
                Answer::Done
            }
            MetaCall::Link { from, to } => Answer::Attr(self.link(by, &from, &to, user)?),
            MetaCall::Symlink { path, target, uid, gid } => Answer::Attr(self.symlink(by, &path, &target, uid, gid)?),
            MetaCall::Mknod { path, kind, mode, uid, gid } => {
                Answer::Attr(self.make_special(by, &path, kind, [mode, uid, gid])?)
            }
            MetaCall::Readlink { path } => {
                let doing = "read the link";
                let place = self.entry_for(user, &path, doing)?.ok_or(Errno::INVAL).explain(doing, &path)?;
                let said = rustix::fs::readlinkat(place.directory(), place.name, Vec::new());
                Answer::Link(said.explain(doing, &path)?.into_bytes())
            }
            MetaCall::Readdir { path, after, max } => {
                Answer::Entries(self.readdir((session.id, user), &path, &after, max)?)
            }
            MetaCall::GetXattr { target, name } => Answer::Xattr(self.get_xattr(session, &target, &name)?),
            MetaCall::ListXattr { target } => Answer::Xattr(self.list_xattr(session, &target)?),
            MetaCall::SetXattr { target, name, value, mode } => {
                self.set_xattr((session, by), &target, &name, value.as_deref(), mode, user)?;
                Answer::Done
            }
            MetaCall::Statfs => Answer::Statfs(self.statfs()?),
            MetaCall::Examine(what) => self.examine(session.id, what)?,
            MetaCall::Lock(call) => self.lock(who, &call)?,
            MetaCall::Relay(call) => Answer::Relaid(self.relay(session, &call)?),
            MetaCall::Restrict(restriction) => {
                restrict(session, restriction)?;
                Answer::Done
            }
            MetaCall::Prove { credential } => {
                self.prove(session, &credential)?;
                Answer::Done
            }
            MetaCall::SyncAll => {
                return Err(fault(
                    Errno::OPNOTSUPP,
                    "data servers have the bytes of files; sync each through its client",
                ));
            }
            MetaCall::SetLayout { path, layout } => {
                self.set_layout(&path, layout, user)?;
                Answer::Done
            }
        })
    }

    /// Ends an open that its client closes, and settles the file.
    fn end_open(&self, file: Arc<OpenFile>, write: bool, wrote: bool) {
        let Some(pin) = self.leave(file, write, if wrote { Left::Written } else { Left::Unwritten }) else { return };
        if !write || (self.background.is_paused() && !self.opens.is_unwritten(pin.ino)) {
            return;
        }
        // Where another one has its gate, which may be for long, the background threads settle the file.
        if let Err(failure) = self.settle(&pin) {
            self.background.complaints.counted("close", |files| {
                tracing::warn!(key = pin.key.0, files, ?failure, "the size will be settled later");
            });
        }
    }

    /// Gives a session a handle to a pinned file.
    pub(super) fn open_pinned(&self, room: Room<'_>, pin: Pin<'_>, write: bool, path: &[u8]) -> Outcome<Opened> {
        let fresh = self.admit(&pin, write, path)?;
        self.grant_handle(room, &pin, write, fresh, path)
    }

    /// The same, for an open that is already counted. `local`: the local size is still right.
    pub(super) fn grant_handle(
        &self,
        room: Room<'_>,
        pin: &Pin<'_>,
        write: bool,
        local: bool,
        path: &[u8],
    ) -> Outcome<Opened> {
        let attr = if local { self.local_attr_of(pin, path) } else { self.attr_of(pin, path) };
        let opened = attr.and_then(|attr| {
            let handle = self.sessions.register(room, pin, write)?;
            let made = pin.seen.lock().made;
            Ok(Opened { handle, file: pin.key, layout: pin.layout, made, attr })
        });
        if opened.is_err() {
            self.opens.leave(pin.ino, write);
        }
        opened
    }

    fn statfs(&self) -> Outcome<Statfs> {
        let space = self.objects.statfs().map_err(|error| data_fault(&error, "ask for the free space of", b""))?;
        let nodes = rustix::fs::fstatvfs(&self.dir.names).explain("ask for the free inodes of", b"")?;
        Ok(Statfs { files: nodes.f_files, files_free: nodes.f_favail, ..space })
    }
}

/// The most that the answer to a call may have, bytes; 0 of one that is always short.
pub(crate) fn answer_bytes_max(call: &MetaCall) -> u64 {
    let bytes = match call {
        MetaCall::Readdir { max, .. } => slice_bytes_max(*max),
        MetaCall::Examine(Examine::BeginWalk) => 0,
        MetaCall::Examine(_) => ANSWER_BODY_MAX_BYTES as usize,
        MetaCall::GetXattr { .. } | MetaCall::ListXattr { .. } => XATTRS_MAX_BYTES + HEAD_BYTES,
        MetaCall::Readlink { .. } => libc::PATH_MAX as usize + HEAD_BYTES,
        _ => 0,
    };
    bytes as u64
}

/// Once and for all.
fn restrict(session: &Session, restriction: Restriction) -> Outcome<()> {
    let again = |_| fault(Errno::INVAL, "as whom the users of this client act was said before");
    session.users.set(restriction.into()).map_err(again)
}
