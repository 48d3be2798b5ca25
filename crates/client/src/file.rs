//! An open file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::folders::{self, Folders};
use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_wire::{
    Answer, Attr, Call, Fault, FileKey, MetaCall, Opened, SeekTo, SetAttr, SpaceChange, Target, XattrMode,
};

use crate::caller::{Acting, Caller};
use crate::client::Client;
use crate::error::{ClientError, Errno};
use crate::length::{Length, Since};
use crate::striped::{Written, unasked};
use crate::will_need::Hint;

/// A file that is dropped without being closed, and a client that is dropped, waits at most so long for the metadata server.
pub(crate) const DROP_WAIT_MAX: Duration = Duration::from_secs(1);

/// An open file; many threads may use it at once. [`close`](File::close) tells what went wrong last; dropping does not.
///
/// The metadata server knows it as open. When the connection to that server is lost, or the server restarts, the file
/// is registered anew with the next operation that needs it, and by itself within about a second.
pub struct File {
    inner: Arc<OpenFile>,
}

pub(crate) struct OpenFile {
    client: Arc<Client>,
    number: u64,
    key: FileKey,
    /// Those in which it was opened: servers whose rules go by folders hear them with every request.
    folders: Folders,
    layout: Layout,
    /// Its objects that must be there.
    made: u64,
    write: bool,
    length: Length,
    registration: Mutex<Registration>,
    /// The last loss of data of the file that was told to who has it open.
    told: Mutex<u64>,
    /// How often the client had lost its locks when it was opened.
    losses: u64,
    /// The user for whom it was opened; `None`: the program's own.
    opener: Option<Caller>,
}

/// How the metadata server knows the file.
struct Registration {
    /// The connection that the handle belongs to.
    session: u64,
    handle: u64,
    is_closed: bool,
}

impl File {
    pub(crate) fn new(client: &Arc<Client>, path: Vec<u8>, write: bool, opened: &Opened, session: u64) -> File {
        let registration = Registration { session, handle: opened.handle, is_closed: false };
        let number = client.opens.number();
        let folders = folders::of(&path);
        client.opens.paths.insert(number, path);
        let inner = Arc::new(OpenFile {
            client: client.clone(),
            number,
            key: opened.file,
            folders,
            layout: opened.layout,
            made: opened.made,
            write,
            length: Length::of(opened.attr.size),
            registration: Mutex::new(registration),
            told: Mutex::new(client.unsynced.losses().last(opened.file)),
            losses: client.identity().leases.losses(),
            opener: Caller::now(),
        });
        client.opens.insert(client, inner.number, &inner);
        File { inner }
    }

    /// Reads from `offset` on. Short only at the end of the file; holes are zeros.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize, ClientError> {
        let OpenFile { client, key, folders, layout, made, .. } = &*self.inner;
        self.inner.read(|| client.read_made(*folders, *key, layout, *made, offset, into))
    }

    /// Reads extents (offset, length) into `into`, back to back; `into` is as long as all of them together. They may
    /// overlap and come in any order. Returns the bytes of each that lie before the end of the file; holes are zeros.
    pub fn read_list(&self, extents: &[(u64, usize)], into: &mut [u8]) -> Result<Vec<usize>, ClientError> {
        let OpenFile { client, key, folders, layout, made, .. } = &*self.inner;
        self.inner.read(|| client.read_list_made(*folders, *key, layout, *made, extents, into))
    }

    /// Writes all bytes at `offset`. They are with the data servers when it returns; durable they are after
    /// [`sync`](File::sync). While the metadata server is away, writing fails after the cluster's timeout: it must know
    /// of every writer. When a data server fails the write, some of the bytes may have been written.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize, ClientError> {
        let written = self.write_counted(bytes, offset)?;
        written.error.map_or(Ok(written.bytes), Err)
    }

    /// The same, but when a data server fails the write, and bytes from its start on are with the others, gives the number of
    /// these. The file is then as long as they make it, unless it was longer before or others may have changed it meanwhile;
    /// what was in the rest of the range may have been overwritten.
    pub fn write_some_at(&self, bytes: &[u8], offset: u64) -> Result<usize, ClientError> {
        let written = self.write_counted(bytes, offset)?;
        match written.error {
            Some(error) if written.bytes == 0 => Err(error),
            _ => Ok(written.bytes),
        }
    }

    fn write_counted(&self, bytes: &[u8], offset: u64) -> Result<Written, ClientError> {
        let deadline = self.inner.client.deadline();
        self.inner.check_writable()?;
        let OpenFile { client, key, folders, layout, length, losses, .. } = &*self.inner;
        let _entered = client.identity().leases.enter(*key, *losses, deadline)?;
        let (number, written) = length.change(|number| {
            let written = self.inner.known(|| match client.write_some(*folders, *key, layout, offset, bytes)? {
                Written { bytes: 0, error: Some(error) } if error.errno() == libc::EBADF => Err(error),
                // Whatever the other data servers have taken goes with their objects.
                Written { error: Some(error), .. } if error.errno() == libc::EIDRM => Err(error),
                written => Ok(written),
            });
            let end = |written: &Written| offset.saturating_add(written.bytes as u64);
            written.iter().filter(|written| written.bytes > 0).for_each(|written| length.reaches(end(written)));
            (number, written)
        });
        let written = written?;
        // A server that does not answer would be waited for once more; behind I/O nodes the time tells.
        let is_answered = deadline.saturating_duration_since(Instant::now()) > client.timeout() / 2;
        if let (Some(ClientError::Fault { .. }), true) = (&written.error, is_answered) {
            self.inner.take_back(number, offset.saturating_add(written.bytes as u64), offset + bytes.len() as u64);
        }
        // A limit may have withheld the write for longer than that.
        let deadline = if written.error.is_none() { deadline.max(client.deadline()) } else { deadline };
        self.inner.stay_registered(deadline)?;
        Ok(written)
    }

    /// Writes behind the end of the file, whoever else appends to it; returns where the bytes went, and how many, as
    /// [`write_some_at`](File::write_some_at) does. Appends never overlap. `None`: the server cannot assign ranges (a folder of
    /// another file system), and nothing was written. When the write fails, its range is zeros once something is appended
    /// behind it.
    pub fn append(&self, bytes: &[u8]) -> Result<Option<(u64, usize)>, ClientError> {
        let len_bytes = bytes.len() as u64;
        let offset = match self.inner.ask(|handle| MetaCall::Append { handle, len_bytes }) {
            Ok(Answer::Assigned { offset }) => offset,
            Ok(other) => return Err(self.inner.unexpected(&other)),
            Err(ClientError::Fault { fault: Fault { errno: libc::EOPNOTSUPP, .. }, .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        self.write_some_at(bytes, offset).map(|written| Some((offset, written)))
    }

    /// Changes the space that `len` bytes from `offset` on take: has storage for them, makes a hole of them, or zeros. What a
    /// server refuses for want of space is ENOSPC, and the file is as long as before; what its file system cannot do is
    /// EOPNOTSUPP. Durable it is after [`sync`](File::sync).
    pub fn change_space(&self, change: SpaceChange, offset: u64, len: u64) -> Result<(), ClientError> {
        let deadline = self.inner.client.deadline();
        self.inner.check_writable()?;
        let OpenFile { client, key, layout, length, losses, .. } = &*self.inner;
        let _entered = client.identity().leases.enter(*key, *losses, deadline)?;
        length.unsettle();
        length.change(|_| {
            self.inner.known(|| client.change_space(*key, layout, change, (offset, len)))?;
            if change.extends() {
                length.reaches(offset.saturating_add(len));
            }
            Ok::<_, ClientError>(())
        })?;
        self.inner.stay_registered(deadline)
    }

    /// The first byte from `from` on that is data, or in a hole; behind the last byte there is a hole. `None`: there is
    /// none, or `from` is not before the end. What a hole holds are zeros; zeros may also be data.
    pub fn seek(&self, from: u64, to: SeekTo) -> Result<Option<u64>, ClientError> {
        let OpenFile { client, key, layout, made, .. } = &*self.inner;
        self.inner.read(|| client.seek(*key, layout, *made, from, to)).map(|sought| sought.at)
    }

    /// Says that `len` bytes from `offset` on will be read soon, so that the data servers read them into memory meanwhile;
    /// `u64::MAX` means to the end. Returns at once and promises nothing: data servers read ahead within their
    /// `read_ahead_bytes`, after real requests, and ignore a client whose hints are not followed by reads, its own or
    /// others'. A hint is dropped when many of this client's wait to be passed on. Coherence is not touched: nothing is kept
    /// here.
    pub fn will_need(&self, offset: u64, len: u64) {
        let OpenFile { client, key, folders, layout, .. } = &*self.inner;
        client.hints.push(client, Hint { folders: *folders, file: *key, layout: *layout, offset, len });
    }

    /// As [`will_need`](File::will_need), and waits until the data servers have taken the hint (not until they have read).
    /// Returns how many of the bytes are, or are going to be, in their memory: fewer than asked for at the end of the file
    /// and where they have no more room, 0 where they read nothing ahead.
    pub fn prefetch(&self, offset: u64, len: u64) -> Result<u64, ClientError> {
        let OpenFile { client, key, folders, layout, .. } = &*self.inner;
        client.prefetch(*folders, *key, layout, offset, len)
    }

    /// Makes data, size and attributes durable.
    pub fn sync(&self) -> Result<(), ClientError> {
        self.sync_objects()?;
        let OpenFile { length, write, .. } = &*self.inner;
        let (known, since) = (length.known(), self.since());
        match self.inner.ask(|handle| MetaCall::Fsync { handle })? {
            Answer::Done => {}
            other => return Err(self.inner.unexpected(&other)),
        }
        if let (true, Some(since)) = (write, since.filter(|_| since == self.since())) {
            length.settle(since, known);
        }
        Ok(())
    }

    /// Makes data durable, and what is needed to read them. The metadata server has nothing to do with that while this open only
    /// writes within the length that the file had at its last [`sync`](File::sync), and this client renames nothing: the names are
    /// durable since then, and after a crash that server asks the data servers for the size of a file that was open for writing.
    pub fn sync_data(&self) -> Result<(), ClientError> {
        match self.since() {
            Some(since) if self.inner.length.is_settled(since) => self.sync_objects(),
            _ => self.sync(),
        }
    }

    /// What the metadata server knows of the open file counts since then; `None`: it does not know it at the moment.
    fn since(&self) -> Option<Since> {
        let OpenFile { client, registration, .. } = &*self.inner;
        let session = registration.lock().session;
        let names = client.opens.paths.given();
        (client.meta_link().session_now() == Some(session)).then_some(Since { session, names })
    }

    /// Makes the bytes durable on the data servers.
    fn sync_objects(&self) -> Result<(), ClientError> {
        let OpenFile { client, key, layout, .. } = &*self.inner;
        let synced = self.inner.known(|| client.sync_data(*key, layout));
        // This one's own failure, or what another open of the file found out.
        let mut told = self.inner.told.lock();
        if let Some((loss, error)) = self.inner.client.unsynced.losses().news(self.inner.key, *told) {
            *told = loss;
            return Err(error);
        }
        drop(told);
        synced
    }

    /// Cuts or extends the file.
    pub fn set_len(&self, len: u64) -> Result<Attr, ClientError> {
        self.set_attr(&SetAttr { size: Some(len), ..SetAttr::default() })
    }

    /// Changes attributes.
    pub fn set_attr(&self, set: &SetAttr) -> Result<Attr, ClientError> {
        let ask = || self.inner.attr(|handle| MetaCall::SetAttr { target: Target::Handle(handle), set: set.clone() });
        let Some(len) = set.size else { return ask() };
        let OpenFile { client, key, length, losses, .. } = &*self.inner;
        let _entered = client.identity().leases.enter(*key, *losses, client.deadline())?;
        length.change(|_| ask().inspect(|_| length.is(len)))
    }

    /// Attributes as they are now.
    pub fn attr(&self) -> Result<Attr, ClientError> {
        self.inner.attr(|handle| MetaCall::GetAttr { target: Target::Handle(handle) })
    }

    /// An extended attribute.
    pub fn xattr(&self, name: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.inner.xattr(|handle| MetaCall::GetXattr { target: Target::Handle(handle), name: name.to_vec() })
    }

    /// The names of all extended attributes, each with a NUL byte behind it.
    pub fn list_xattr(&self) -> Result<Vec<u8>, ClientError> {
        self.inner.xattr(|handle| MetaCall::ListXattr { target: Target::Handle(handle) })
    }

    /// Sets an extended attribute; `None` removes it.
    pub fn set_xattr(&self, name: &[u8], value: Option<&[u8]>, mode: XattrMode) -> Result<(), ClientError> {
        let answer = self.inner.ask(|handle| MetaCall::SetXattr {
            target: Target::Handle(handle),
            name: name.to_vec(),
            value: value.map(<[u8]>::to_vec),
            mode,
        })?;
        if answer == Answer::Done { Ok(()) } else { Err(self.inner.unexpected(&answer)) }
    }

    /// Ends the open. Of a file that was written, the metadata server knows the size when this returns. Of one that was not, it learns
    /// of the close before the client's next call, and its answer is not waited for.
    pub fn close(self) -> Result<(), ClientError> {
        self.inner.close(self.inner.client.deadline())
    }

    /// The file's key.
    pub fn key(&self) -> FileKey {
        self.inner.key
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.inner.client
    }

    /// As while the metadata server is asked to register it anew.
    #[cfg(test)]
    pub(crate) fn while_registering<T>(&self, act: impl FnOnce() -> T) -> T {
        let _registration = self.inner.registration.lock();
        act()
    }

    /// How often the client had lost its locks when it was opened.
    pub(crate) fn losses(&self) -> u64 {
        self.inner.losses
    }

    /// Where its data lie.
    pub fn layout(&self) -> Layout {
        self.inner.layout
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let inner = &self.inner;
        let is_closed = inner.registration.lock().is_closed;
        if !is_closed && let Err(error) = inner.close(Instant::now() + DROP_WAIT_MAX.min(inner.client.timeout())) {
            tracing::debug!(%error, "closing a dropped file");
        }
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let OpenFile { key, layout, write, .. } = &*self.inner;
        f.debug_struct("File").field("key", key).field("layout", layout).field("write", write).finish_non_exhaustive()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.client.opens.paths.remove(self.number);
    }
}

impl OpenFile {
    fn check_writable(&self) -> Result<(), ClientError> {
        match self.write {
            true => Ok(()),
            false => Err(ClientError::System {
                what: "writing a file that is open for reading".into(),
                errno: Errno(libc::EBADF),
            }),
        }
    }

    /// Registers the file with the metadata server's present session, if it is not; returns session and handle.
    pub(crate) fn register(&self, deadline: Instant) -> Result<(u64, u64), ClientError> {
        loop {
            match self.register_once(deadline) {
                // A registration goes with its session, so another one does no harm.
                Err(ClientError::SessionEnded { .. } | ClientError::Lost { .. }) if Instant::now() < deadline => {}
                registered => return registered.map_err(|error| self.unless_stale(error)),
            }
        }
    }

    fn register_once(&self, deadline: Instant) -> Result<(u64, u64), ClientError> {
        // Whichever thread finds that it is to be done.
        let _acting = Acting::of(self.opener);
        let link = self.client.meta_link();
        let mut registration = self.registration.lock();
        let session = link.session(deadline)?;
        if registration.session != session && !registration.is_closed {
            let call =
                MetaCall::Reopen { path: self.client.opens.paths.of(self.number), file: self.key, write: self.write };
            let call = Call::Meta { who: self.client.identity().asker(), call };
            match link.call_in(session, call, deadline)?.answer {
                Answer::Opened(opened) if opened.file == self.key => {
                    self.length.reaches(opened.attr.size);
                    tracing::debug!(file = self.key.0, session, "registered an open file anew");
                    (registration.session, registration.handle) = (session, opened.handle);
                }
                other => return Err(self.unexpected(&other)),
            }
        }
        Ok((registration.session, registration.handle))
    }

    /// Registers the file anew when the session it was opened in is over: a server that does not know of a writer
    /// goes by the size that it fetched when the writer's session ended.
    fn stay_registered(&self, deadline: Instant) -> Result<(), ClientError> {
        let session = self.client.meta_link().session_now();
        // Waits for another thread that is registering it just now.
        let is_registered = Some(self.registration.lock().session) == session;
        if is_registered { Ok(()) } else { self.register(deadline).map(drop) }
    }

    /// Change `number` failed with bytes up to `good` written: what it may have added up to `end` is cut off, if this open is
    /// the only one that writes. That it was not is not told: the change has failed anyway.
    fn take_back(&self, number: u64, good: u64, end: u64) {
        self.length.take_back(number, good, |len| {
            if len < end
                && let Err(error) = self.ask(|handle| MetaCall::CutBack { handle, len, end })
            {
                tracing::debug!(file = self.key.0, %error, "what a failed write has added stays");
            }
        });
    }

    /// Reads. What came after the file's locks were lost, or while that is possible, is nobody's: others may be changing it.
    fn read<T>(&self, data: impl FnMut() -> Result<T, ClientError>) -> Result<T, ClientError> {
        let leases = &self.client.identity().leases;
        leases.may_read(self.key, self.losses)?;
        let read = self.known(data)?;
        leases.may_read(self.key, self.losses)?;
        Ok(read)
    }

    /// Reads, writes or syncs. An I/O node in front of a folder knows the files that are open there: one that does not know
    /// this one yet, because the client came to it just now, is told of it, and asked again. A data server that has removed the
    /// file's objects makes the open stale.
    fn known<T>(&self, mut data: impl FnMut() -> Result<T, ClientError>) -> Result<T, ClientError> {
        let done = match data() {
            Err(ClientError::Fault { fault: Fault { errno: libc::EBADF, .. }, .. }) => {
                self.register(self.client.deadline())?;
                data()
            }
            done => done,
        };
        done.map_err(|error| self.unless_stale(error))
    }

    /// The file's objects are removed: the open is stale.
    fn unless_stale(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Fault { fault: Fault { errno: libc::EIDRM, .. }, .. } => ClientError::Stale { file: self.key },
            error => error,
        }
    }

    /// True when the metadata server does not know, as far as we know, that the file is open.
    pub(crate) fn is_unregistered(&self, session: Option<u64>) -> bool {
        // The thread that holds the lock is about to register it.
        self.registration.try_lock().is_some_and(|r| !r.is_closed && Some(r.session) != session)
    }

    /// A call about the open file that may be repeated.
    fn ask(&self, call: impl Fn(u64) -> MetaCall) -> Result<Answer, ClientError> {
        let mut deadline = self.client.deadline();
        // One sequence for all copies: the server does a change once.
        let mut who = self.client.identity().asker();
        let mut has_been_stale = false;
        loop {
            let asked = self.register(deadline).and_then(|(session, handle)| {
                let call = call(handle);
                // A truncation is a write.
                let writes = matches!(&call, MetaCall::SetAttr { set: SetAttr { size: Some(_), .. }, .. });
                let under = writes.then_some(self.key);
                self.client.meta_link().call_under(session, Call::Meta { who, call }, under, deadline)
            });
            match asked {
                Err(ClientError::SessionEnded { .. }) if Instant::now() < deadline => {}
                // Lost with it, the call may have been done; the client has begun an epoch since.
                Err(ClientError::Lost { was_withheld, .. }) if was_withheld || Instant::now() < deadline => {
                    if was_withheld {
                        deadline = self.client.deadline();
                    }
                    who.epoch = self.client.identity().epoch();
                }
                // The server has forgotten the session without ending the connection, as an I/O node between may do.
                Err(ClientError::Fault { fault: Fault { errno: libc::EBADF, .. }, .. }) if !has_been_stale => {
                    has_been_stale = true;
                    self.registration.lock().session = 0;
                }
                asked => return asked.map(|reply| reply.answer).map_err(|error| self.unless_stale(error)),
            }
        }
    }

    fn attr(&self, call: impl Fn(u64) -> MetaCall) -> Result<Attr, ClientError> {
        self.client.attributes(self.ask(call)?, || self.client.meta_link().peer())
    }

    fn xattr(&self, call: impl Fn(u64) -> MetaCall) -> Result<Vec<u8>, ClientError> {
        match self.ask(call)? {
            Answer::Xattr(bytes) => Ok(bytes),
            other => Err(self.unexpected(&other)),
        }
    }

    fn close(&self, deadline: Instant) -> Result<(), ClientError> {
        let _changing = self.client.opens.changing();
        let closed = if self.is_closed_unwritten(deadline) { Ok(()) } else { self.close_and_wait(deadline) };
        self.registration.lock().is_closed = true;
        closed
    }

    /// Closes the file without waiting, if nothing was written and the metadata server has it open.
    fn is_closed_unwritten(&self, deadline: Instant) -> bool {
        let (session, handle) = {
            let registration = self.registration.lock();
            (registration.session, registration.handle)
        };
        let opens = &self.client.opens;
        !self.length.was_changed() && opens.close_unwritten(&self.client, self.number, (session, handle), deadline)
    }

    fn close_and_wait(&self, deadline: Instant) -> Result<(), ClientError> {
        self.client.opens.remove(self.number);
        loop {
            let link = self.client.meta_link();
            let (session, handle, is_current) = {
                let registration = self.registration.lock();
                let is_current = link.session_now() == Some(registration.session);
                (registration.session, registration.handle, is_current)
            };
            // The end of a session closes what was open in it. But of a file that was written, the server is to learn
            // the size now, and not when it gets round to it.
            if !is_current && !self.write {
                break Ok(());
            }
            let registered = if is_current { Ok((session, handle)) } else { self.register(deadline) };
            let asked = registered.and_then(|(session, handle)| {
                let call = MetaCall::Close { handle, wrote: self.length.was_changed() };
                let call = Call::Meta { who: self.client.identity().who(), call };
                self.client.meta_link().call_in(session, call, deadline)
            });
            match asked.map(|reply| reply.answer) {
                Ok(Answer::Done) => break Ok(()),
                Ok(other) => break Err(self.unexpected(&other)),
                Err(ClientError::SessionEnded { .. } | ClientError::Lost { .. }) if Instant::now() < deadline => {}
                Err(error) => break Err(error),
            }
        }
    }

    fn unexpected(&self, answer: &Answer) -> ClientError {
        unasked(self.client.meta_link().peer(), answer)
    }
}
