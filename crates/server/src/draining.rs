//! Emptying a data server while clients work: the program that copies its files to the others.
//!
//! It walks the names, again and again, page by page. What the metadata server keeps of each file says whether it is striped
//! over the server, which of its bytes or none; the metadata server says where it is to lie instead, the bytes are copied as a
//! client's would be, and the metadata server lets the file lie there. A file that is in use, or changes while it is copied, is
//! left for the next walk. The end is when a walk has met no such file, none can have been missed, and the data server itself
//! has no object any more; the metadata server notes that, and only then may the server be retired. Nothing else is remembered
//! between runs, so a killed one is simply run again; what it had copied but not finished the metadata server removes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::folders::Folders;
use impresario_client::{Client, ClientError, ClientOptions, Link, LinkOptions, Via};
use impresario_config::{Config, DataState, Server};
use impresario_layout::Layout;
use impresario_transport::Access;
use impresario_wire::frame::ANSWER_BODY_MAX_BYTES;
use impresario_wire::relay::{Objects, Relaid, RelayCall};
use impresario_wire::{Answer, Call, Examine, Examined, FileKey, KeyRole, MetaCall, NodeKind, Role, SeekTo};

use crate::pace::Pace;

/// Bytes copied at a time.
const PIECE_BYTES: usize = 8 << 20;
/// Objects counted at a time.
const PAGE_OBJECTS: u32 = 4096;
/// Entries of a directory that are looked at at a time.
const PAGE_ENTRIES: u32 = 500;
/// Between two walks.
const PAUSE: Duration = Duration::from_secs(2);
/// Between two looks whether it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Files in use that are remembered by name.
const NAMED_MAX: usize = 100;
/// Walks one after the other that a server's silence ended.
const FAILURES_MAX: u32 = 3;

/// Why a server was not emptied; one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The configuration is not that of a server to be emptied.
    #[error("{0}")]
    Unsuitable(String),
    /// The configuration file was changed meanwhile.
    #[error(
        "{name} is not draining any more in {file}, so no more of its files are moved; those that were stay with the others, and no file \
         is lost or half moved"
    )]
    TakenBack {
        /// The data server.
        name: String,
        /// The configuration file.
        file: String,
    },
    /// A server does not answer.
    #[error("{0}; no file is lost or half moved: run the command again to go on")]
    Server(#[from] ClientError),
    /// A server is of another version.
    #[error("{0} gave an answer to another question; is it of this version?")]
    Unexpected(String),
    /// The caller wanted it.
    #[error("stopped; no file is lost or half moved: run the command again to go on")]
    Stopped,
}

/// What is to be emptied, and how.
#[derive(Clone, Debug)]
pub struct DrainOptions {
    /// The data server.
    pub name: String,
    /// Bytes copied in a second at most; 0: no limit.
    pub rate_bytes: u64,
    /// How long to wait for files that are in use while no file is copied.
    pub wait: Duration,
}

/// How far it is.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Drained {
    /// Files that were laid out anew, in all walks.
    pub files: u64,
    /// Their bytes that were copied.
    pub bytes: u64,
    /// Files of the last walk that could not be.
    pub remaining: u64,
    /// Some of these, and why.
    pub named: Vec<(String, String)>,
    /// Objects that the server has after the last walk.
    pub objects: u64,
    /// Why the metadata server has not noted the server as empty, though nothing was found.
    pub unsure: Option<String>,
    /// The server holds nothing, is needed by no file, and that is noted.
    pub is_empty: bool,
}

/// Who hears how far it is, and says whether it is to stop.
pub trait DrainWatcher {
    /// A file was laid out anew (false), or a walk has ended (true).
    fn tell(&mut self, so_far: &Drained, has_walked: bool);

    /// It is to stop.
    fn is_stopped(&self) -> bool;
}

/// Empties a data server. It is needed for nothing when the result says `is_empty`; otherwise nothing more could be moved for
/// as long as was to be waited.
pub fn drain(config: &Config, options: &DrainOptions, watcher: &mut dyn DrainWatcher) -> Result<Drained, DrainError> {
    let number = check(config, &options.name)?;
    let client_options = ClientOptions { via: Via::Direct, role: KeyRole::Admin, ..ClientOptions::default() };
    let client = Client::connect(config, client_options)?;
    let link = link(config, &options.name, &client)?;
    let (so_far, piece) = (Drained::default(), vec![0; PIECE_BYTES]);
    let mut drainer = Drainer { client, link, number, options, watcher, so_far, piece };
    let (mut failures, mut moved, mut moved_at) = (0, (0, 0), Instant::now());
    loop {
        match drainer.walk() {
            Ok(()) => failures = 0,
            Err(DrainError::Server(error)) if failures < FAILURES_MAX => {
                tracing::warn!(%error, "a walk ended early");
                failures += 1;
                drainer.pause()?;
                continue;
            }
            Err(error) => return Err(error),
        }
        let so_far = &drainer.so_far;
        if so_far.is_empty {
            drainer.watcher.tell(so_far, true);
            return Ok(drainer.so_far);
        }
        check_again(config, &options.name)?;
        drainer.watcher.tell(so_far, true);
        if moved != (so_far.files, so_far.objects) {
            (moved, moved_at) = ((so_far.files, so_far.objects), Instant::now());
        }
        if moved_at.elapsed() >= options.wait {
            return Ok(drainer.so_far);
        }
        drainer.pause()?;
    }
}

/// The server's number.
fn check(config: &Config, name: &str) -> Result<u16, DrainError> {
    let unsuitable = |why| Err(DrainError::Unsuitable(why));
    match config.server(name).map_err(DrainError::Unsuitable)? {
        Server::Data(number, data) if data.state == DataState::Draining => Ok(number as u16),
        Server::Data(_, data) if data.state == DataState::Retired => {
            unsuitable(format!("{name} is retired: it holds nothing and does not run"))
        }
        Server::Data(..) => unsuitable(format!(
            "{name} gets new files: first write state = \"draining\" in its section, in the file of every machine"
        )),
        _ => unsuitable(format!("{name} is no data server; only these have files")),
    }
}

/// The state may be taken back at any time; then the metadata server moves nothing more.
fn check_again(config: &Config, name: &str) -> Result<(), DrainError> {
    let file = &config.cluster.file;
    if !file.has_changed() {
        return Ok(());
    }
    match Config::load(file.path()) {
        Ok(now) if check(&now, name).is_err() => {
            Err(DrainError::TakenBack { name: name.into(), file: file.path().display().to_string() })
        }
        // One that cannot be read may be half written.
        _ => Ok(()),
    }
}

fn link(config: &Config, name: &str, client: &Client) -> Result<Link, ClientError> {
    let (user, own) = impresario_client::whoami();
    let identity = Arc::new(impresario_client::Identity::draw(0, user)?);
    let options = LinkOptions {
        who: identity.who(),
        name: own,
        timeout: client.timeout(),
        access: Access::of(config, KeyRole::Admin),
        ..LinkOptions::new(Role::Data, ANSWER_BODY_MAX_BYTES)
    };
    Link::to(config, name, identity, options)
}

struct Drainer<'a> {
    client: Arc<Client>,
    link: Link,
    number: u16,
    options: &'a DrainOptions,
    watcher: &'a mut dyn DrainWatcher,
    so_far: Drained,
    piece: Vec<u8>,
}

/// A directory that a walk is in.
struct DirectoryCursor {
    path: Vec<u8>,
    /// The last name of the page.
    after: Vec<u8>,
    page: std::vec::IntoIter<Examined>,
}

impl DirectoryCursor {
    fn at(path: Vec<u8>) -> DirectoryCursor {
        DirectoryCursor { path, after: Vec::new(), page: Vec::new().into_iter() }
    }
}

impl Drainer<'_> {
    /// Looks at every file once, and then at what the server has.
    fn walk(&mut self) -> Result<(), DrainError> {
        (self.so_far.remaining, self.so_far.unsure) = (0, None);
        self.so_far.named.clear();
        let (_, number) = self.examine(Examine::BeginWalk)?;
        // As deep as paths are, and a page of each directory.
        let mut places = vec![DirectoryCursor::at(Vec::new())];
        while let Some(place) = places.last_mut() {
            let Some(entry) = place.page.next() else {
                let what =
                    Examine::Directory { path: place.path.clone(), after: place.after.clone(), max: PAGE_ENTRIES };
                let page = match self.examine(what) {
                    Ok((page, _)) => page,
                    // Removed or renamed meanwhile: who renames it tells the walk.
                    Err(DrainError::Server(error)) if is_gone(&error) && !place.path.is_empty() => Vec::new(),
                    Err(error) => return Err(error),
                };
                match page.last() {
                    None => drop(places.pop()),
                    Some(last) => (place.after, place.page) = (last.name.clone(), page.into_iter()),
                }
                continue;
            };
            let mut path = place.path.clone();
            path.extend((!path.is_empty()).then_some(b'/'));
            path.extend(&entry.name);
            match (entry.kind, entry.file) {
                (Some(NodeKind::Dir), _) => places.push(DirectoryCursor::at(path)),
                (_, Some(Ok(record))) if self.is_on_it(&record.layout) => self.file(&path)?,
                (Some(_), Some(Err(why))) => self.leave(&path, why),
                _ => {}
            }
        }
        self.look_at_unnamed()?;
        self.so_far.objects = self.count()?;
        if self.so_far.remaining == 0 && self.so_far.objects == 0 {
            let server = self.options.name.clone();
            match self.relay(RelayCall::Emptied { server, number: self.number, walk: number })? {
                Relaid::InUse { why } => self.so_far.unsure = Some(why),
                _ => self.so_far.is_empty = true,
            }
        }
        Ok(())
    }

    /// Files without a name: removed ones that are open, and those that are being made.
    fn look_at_unnamed(&mut self) -> Result<(), DrainError> {
        for (removed, why) in [(true, "it is removed, and open or was until just now"), (false, "it is being written")]
        {
            let is_met = self.so_far.remaining > 0;
            let mut after = Vec::new();
            loop {
                let (page, _) = self.examine(Examine::Unnamed { removed, after: after.clone(), max: PAGE_ENTRIES })?;
                let Some(last) = page.last() else { break };
                after.clone_from(&last.name);
                for entry in page {
                    let is_on_it = entry.file.is_some_and(|file| file.is_ok_and(|file| self.is_on_it(&file.layout)));
                    // Of those that are written most have a name, and the walk has met them.
                    if is_on_it && (removed || !is_met) {
                        let name = [&b"file "[..], &entry.name].concat();
                        self.leave(&name, why.into());
                    }
                }
            }
        }
        Ok(())
    }

    fn is_on_it(&self, layout: &Layout) -> bool {
        layout.position_of(self.number).is_some()
    }

    /// A file that cannot be laid out anew now.
    fn leave(&mut self, path: &[u8], why: String) {
        self.so_far.remaining += 1;
        if self.so_far.named.len() < NAMED_MAX {
            self.so_far.named.push((String::from_utf8_lossy(path).into_owned(), why));
        }
    }

    fn file(&mut self, path: &[u8]) -> Result<(), DrainError> {
        self.check_stopped()?;
        let files = self.so_far.files;
        match self.lay_out_anew(path) {
            Ok(Relaid::InUse { why }) => self.leave(path, why),
            // Seldom: it was laid out anew, or replaced, since it was looked at.
            Ok(Relaid::Done) if self.so_far.files == files => {
                let why = "the metadata server moves nothing of it: state = \"draining\" may be missing in its configuration file";
                self.leave(path, why.into());
            }
            Ok(_) => {}
            // Removed or renamed meanwhile.
            Err(DrainError::Server(error)) if is_gone(&error) => {}
            // It is this file's: the others may be well.
            Err(DrainError::Server(error @ (ClientError::Fault { .. } | ClientError::ObjectLost { .. }))) => {
                self.leave(path, error.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn lay_out_anew(&mut self, path: &[u8]) -> Result<Relaid, DrainError> {
        let begun = self.relay(RelayCall::Begin { path: path.to_vec() })?;
        let Relaid::Begun { handle, from, made, size, to } = begun else { return Ok(begun) };
        let copied = self.copy(&from, made, size, &to);
        if let Err(error) = copied {
            // Else the copy would be remembered until this program ends.
            let _ = self.client.meta(MetaCall::Close { handle, wrote: false });
            return Err(error);
        }
        let done = self.relay(RelayCall::Commit { handle })?;
        if done == Relaid::Done {
            self.so_far.files += 1;
            self.watcher.tell(&self.so_far, false);
        }
        Ok(done)
    }

    fn copy(&mut self, from: &Objects, made: u64, size: u64, to: &Objects) -> Result<(), DrainError> {
        let pace = Pace::new(self.options.rate_bytes, self.so_far.bytes);
        let mut at = 0;
        while at < size {
            let seek = |at, what| self.client.seek(from.file, &from.layout, made, at, what).map(|sought| sought.at);
            let Some(start) = seek(at, SeekTo::Data)? else { break };
            let end = seek(start, SeekTo::Hole)?.unwrap_or(size).min(size);
            at = start;
            while at < end {
                self.check_stopped()?;
                let len = (end - at).min(PIECE_BYTES as u64) as usize;
                let piece = self.piece.get_mut(..len).unwrap_or_default();
                let got = self.client.read_made(Folders::default(), from.file, &from.layout, made, at, piece)?;
                let piece = piece.get(..got).unwrap_or_default();
                self.client.write(to.file, &to.layout, at, piece)?;
                self.so_far.bytes += got as u64;
                if got < len {
                    // It was cut; that is refused when it is committed.
                    return Ok(());
                }
                at += got as u64;
                self.pause_until(pace.due(self.so_far.bytes))?;
            }
        }
        Ok(self.client.sync_data(to.file, &to.layout)?)
    }

    fn relay(&self, call: RelayCall) -> Result<Relaid, DrainError> {
        match self.client.meta(MetaCall::Relay(call))? {
            Answer::Relaid(answer) => Ok(answer),
            _ => Err(DrainError::Unexpected("meta".into())),
        }
    }

    /// What the metadata server says, and the number of the walk.
    fn examine(&self, what: Examine) -> Result<(Vec<Examined>, u64), DrainError> {
        match self.client.meta(MetaCall::Examine(what))? {
            Answer::Examined { entries, walk, .. } => Ok((entries, walk)),
            _ => Err(DrainError::Unexpected("meta".into())),
        }
    }

    /// The objects that the server has.
    fn count(&self) -> Result<u64, DrainError> {
        let (mut count, mut from) = (0, Some(FileKey(0)));
        while let Some(key) = from {
            let call = Call::ListObjects { from: key, max: PAGE_OBJECTS };
            let deadline = Instant::now() + self.client.timeout();
            let Answer::Objects { objects, next, .. } = self.link.call(call, &[], None, deadline)?.answer else {
                return Err(DrainError::Unexpected(self.options.name.clone()));
            };
            count += objects.len() as u64;
            from = next;
        }
        Ok(count)
    }

    fn check_stopped(&self) -> Result<(), DrainError> {
        if self.watcher.is_stopped() { Err(DrainError::Stopped) } else { Ok(()) }
    }

    fn pause(&self) -> Result<(), DrainError> {
        self.pause_until(Instant::now() + PAUSE)
    }

    fn pause_until(&self, end: Instant) -> Result<(), DrainError> {
        loop {
            self.check_stopped()?;
            match end.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Ok(()),
                left => std::thread::sleep(left.min(LOOK_EVERY)),
            }
        }
    }
}

fn is_gone(error: &ClientError) -> bool {
    [libc::ENOENT, libc::ENOTDIR].contains(&error.errno())
}
