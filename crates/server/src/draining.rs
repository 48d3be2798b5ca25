//! Emptying a data server while clients work: the program that copies its files to the others.
//!
//! It walks the names, again and again. The metadata server says of each file whether it has anything on a server that is
//! draining, and where it is to lie instead; the bytes are copied as a client's would be, and the metadata server lets the file
//! lie there. A file that is in use, or changes while it is copied, is left for the next walk. The end is when the data server
//! itself has no object any more. Nothing is remembered between runs, so a killed one is simply run again; what it had copied
//! but not finished the metadata server removes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_client::{Client, ClientError, ClientOptions, Link, LinkOptions, Via};
use impresario_config::{Config, DataState, Server};
use impresario_transport::Access;
use impresario_wire::frame::ANSWER_BODY_MAX_BYTES;
use impresario_wire::relay::{Objects, Relaid, RelayCall};
use impresario_wire::{Answer, Call, FileKey, KeyRole, MetaCall, NodeKind, Role, SeekTo};

/// Bytes copied at a time.
const PIECE_BYTES: usize = 8 << 20;
/// Objects counted at a time.
const PAGE_OBJECTS: u32 = 4096;
/// Between two walks.
const PAUSE: Duration = Duration::from_secs(2);
/// Files in use that are remembered by name.
const NAMED_MAX: usize = 1000;
/// Walks one after the other that a server's silence ended.
const FAILURES_MAX: u32 = 3;
/// Walks that find objects on the server and no file that has them.
const UNEXPLAINED_MAX: u32 = 20;

/// Why a server was not emptied; one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The configuration is not that of a server to be emptied.
    #[error("{0}")]
    Unsuitable(String),
    /// A server does not answer.
    #[error("{0}; no file is lost or half moved: run the command again to go on")]
    Server(#[from] ClientError),
    /// The server has objects of no file.
    #[error(
        "{name} has {objects} objects that belong to no file with a name: removed files that a client has open, or leftovers \
         (`impresario fsck --online` tells); or the metadata server does not read the same configuration, where the state of {name} \
         is \"draining\""
    )]
    Unexplained {
        /// The server.
        name: String,
        /// How many.
        objects: u64,
    },
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
    /// Do not wait for files that are in use.
    pub once: bool,
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
}

/// Who hears how far it is, and says whether it is to stop.
pub trait DrainWatcher {
    /// A file was laid out anew (false), or a walk has ended (true).
    fn tell(&mut self, so_far: &Drained, has_walked: bool);

    /// It is to stop.
    fn is_stopped(&self) -> bool;
}

/// Empties a data server. It is needed for nothing when this returns `objects` and `remaining` 0; otherwise, with `once`, files
/// are in use.
pub fn drain(config: &Config, options: &DrainOptions, watcher: &mut dyn DrainWatcher) -> Result<Drained, DrainError> {
    check(config, &options.name)?;
    let client_options = ClientOptions { via: Via::Direct, role: KeyRole::Admin, ..ClientOptions::default() };
    let client = Client::connect(config, client_options)?;
    let link = link(config, &options.name, &client)?;
    let mut drainer = Drainer { client, options, watcher, so_far: Drained::default(), piece: vec![0; PIECE_BYTES] };
    let (mut failures, mut unexplained) = (0, 0);
    loop {
        let walked = drainer.walk().and_then(|()| {
            drainer.so_far.objects = drainer.count(&link)?;
            Ok(())
        });
        match walked {
            Ok(()) => failures = 0,
            Err(DrainError::Server(error)) if failures < FAILURES_MAX && !options.once => {
                tracing::warn!(%error, "a walk ended early");
                failures += 1;
                drainer.pause()?;
                continue;
            }
            Err(error) => return Err(error),
        }
        drainer.watcher.tell(&drainer.so_far, true);
        let Drained { remaining, objects, .. } = drainer.so_far;
        // A file may be striped over the server and have no object there yet: a write would make one.
        if objects == 0 && remaining == 0 {
            return Ok(drainer.so_far);
        }
        // Old objects, and those of removed files, may still be being removed.
        unexplained = if remaining == 0 { unexplained + 1 } else { 0 };
        if unexplained > UNEXPLAINED_MAX {
            return Err(DrainError::Unexplained { name: options.name.clone(), objects });
        }
        if options.once && remaining > 0 {
            return Ok(drainer.so_far);
        }
        drainer.pause()?;
    }
}

fn check(config: &Config, name: &str) -> Result<(), DrainError> {
    let unsuitable = |why| Err(DrainError::Unsuitable(why));
    match config.server(name).map_err(DrainError::Unsuitable)? {
        Server::Data(_, data) if data.state == DataState::Draining => Ok(()),
        Server::Data(_, data) if data.state == DataState::Retired => {
            unsuitable(format!("{name} is retired: it holds nothing and does not run"))
        }
        Server::Data(..) => unsuitable(format!(
            "{name} gets new files: first write state = \"draining\" in its section, in the file of every machine"
        )),
        _ => unsuitable(format!("{name} is no data server; only these have files")),
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
    options: &'a DrainOptions,
    watcher: &'a mut dyn DrainWatcher,
    so_far: Drained,
    piece: Vec<u8>,
}

impl Drainer<'_> {
    /// Looks at every file once.
    fn walk(&mut self) -> Result<(), DrainError> {
        self.so_far.remaining = 0;
        self.so_far.named.clear();
        let mut directories = vec![Vec::new()];
        while let Some(directory) = directories.pop() {
            let entries = match self.client.list(&directory) {
                Ok(entries) => entries,
                // Removed or renamed meanwhile; the next walk meets what is in it.
                Err(ClientError::Fault { .. } | ClientError::System { .. }) if !directory.is_empty() => continue,
                Err(error) => return Err(error.into()),
            };
            for entry in entries {
                let mut path = directory.clone();
                path.extend((!path.is_empty()).then_some(b'/'));
                path.extend(&entry.name);
                match entry.attr.kind {
                    NodeKind::Dir => directories.push(path),
                    NodeKind::File => self.file(&path)?,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &[u8]) -> Result<(), DrainError> {
        self.check_stopped()?;
        let why = match self.lay_out_anew(path) {
            Ok(Relaid::InUse { why }) => why,
            Ok(_) => return Ok(()),
            // Removed or renamed meanwhile.
            Err(DrainError::Server(error)) if [libc::ENOENT, libc::ENOTDIR].contains(&error.errno()) => return Ok(()),
            // It is this file's: the others may be well.
            Err(DrainError::Server(error @ (ClientError::Fault { .. } | ClientError::ObjectLost { .. }))) => {
                error.to_string()
            }
            Err(error) => return Err(error),
        };
        self.so_far.remaining += 1;
        if self.so_far.named.len() < NAMED_MAX {
            self.so_far.named.push((String::from_utf8_lossy(path).into_owned(), why));
        }
        Ok(())
    }

    fn lay_out_anew(&mut self, path: &[u8]) -> Result<Relaid, DrainError> {
        let begun = self.relay(RelayCall::Begin { path: path.to_vec() })?;
        let Relaid::Begun { handle, from, made, size, to } = begun else { return Ok(begun) };
        let copied = self.copy(&from, made, size, &to);
        if let Err(error) = copied {
            // Else the copy would be remembered until this program ends.
            let _ = self.client.meta(MetaCall::Close { handle });
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
        let (began, before) = (Instant::now(), self.so_far.bytes);
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
                let got = self.client.read(from.file, &from.layout, at, piece)?;
                let piece = piece.get(..got).unwrap_or_default();
                self.client.write(to.file, &to.layout, at, piece)?;
                self.so_far.bytes += got as u64;
                if got < len {
                    // It was cut; that is refused when it is committed.
                    return Ok(());
                }
                at += got as u64;
                if self.options.rate_bytes > 0 {
                    let due = (self.so_far.bytes - before) as f64 / self.options.rate_bytes as f64;
                    std::thread::sleep(Duration::from_secs_f64(due).saturating_sub(began.elapsed()));
                }
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

    /// The objects that the server has.
    fn count(&self, link: &Link) -> Result<u64, DrainError> {
        let (mut count, mut from) = (0, Some(FileKey(0)));
        while let Some(key) = from {
            let call = Call::ListObjects { from: key, max: PAGE_OBJECTS };
            let deadline = Instant::now() + self.client.timeout();
            let Answer::Objects { objects, next, .. } = link.call(call, &[], None, deadline)?.answer else {
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
        let began = Instant::now();
        while began.elapsed() < PAUSE {
            self.check_stopped()?;
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
