//! Moving a data server to another folder or machine while clients work: the program that copies it.
//!
//! It runs where the new folder is, and asks the running server for everything:
//! 1. All objects, page by page. The server notes meanwhile what changes.
//! 2. What has changed, in rounds, until a round is short.
//! 3. Clients wait. The rest is copied, with what the server must know after a restart. When all of it is durable here, the
//!    server marks its folder as left and ends.
//! 4. The folder here is the server's. Started, it serves under the same identity, and clients repeat there what was not
//!    answered.
//!
//! A mark in the new folder says how far it is ([`Arriving`]), so that a copy that was killed goes on. Until step 3 ends nothing
//! has changed for the old server. When the copier is killed just then, the number of the move in both folders proves that
//! the old one was left for the new one.

mod copy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::machine::random_number;
use impresario_client::{ClientError, Identity, Link, LinkOptions, ServerPosition, Vet};
use impresario_config::{Config, Data, MovesTo, Server};
use impresario_store::{
    Arrived, Arriving, FolderIdentity, FolderState, Note, ObjectStore, StoreError, StoreOptions, abandon_arrival,
    arriving, begin_arrival, departed,
};
use impresario_transport::Access;
use impresario_wire::frame::ANSWER_BODY_MAX_BYTES;
use impresario_wire::{Answer, Call, Fault, FileKey, KeyRole, MoveAnswer, MoveCall, Role, Welcome};

use crate::folders::arrived_of;
use copy::Copier;

/// Objects that are copied between two notes of how far it is.
const PAGE_OBJECTS: u32 = 256;
/// Rounds of changes before clients wait, though the last one was long.
const ROUNDS_MAX: u32 = 12;
/// Rounds that are as slow as they are asked to be: later ones are to catch up.
const SLOW_ROUNDS: u32 = 4;
/// How often clients are let wait.
const HOLDS_MAX: u32 = 3;
/// How often everything is copied anew because the server was restarted, or too much had changed.
const STARTS_MAX: u32 = 3;

/// Why a server was not moved; one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The configuration, or the folders, are not those of a move.
    #[error("{0}")]
    Unsuitable(String),
    /// The new folder cannot be used.
    #[error("{0}")]
    Folder(#[from] StoreError),
    /// The server that is to move does not answer, or refuses.
    #[error("{0}; nothing has changed for the server: run the command again to go on")]
    Server(#[from] ClientError),
    /// Something cannot be written.
    #[error("cannot write in {dir}: {source}; nothing has changed for the server: run the command again to go on", dir = dir.display())]
    Write {
        /// The new folder.
        dir: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Objects that the old server cannot read.
    #[error(
        "{server} cannot read {objects}: restore or remove these files (`impresario scrub` names them), and run the command \
         again; nothing has changed for the server"
    )]
    Unreadable {
        /// The server.
        server: String,
        /// The objects, and why.
        objects: String,
    },
    /// Too much changes.
    #[error(
        "clients change more of {0} than can be copied while they wait; try again when they write less, or raise \
         request_timeout_ms; nothing has changed for the server"
    )]
    Busy(String),
    /// It is not known whether the server has left.
    #[error("{0}")]
    Doubtful(String),
    /// The caller wanted it.
    #[error("stopped; nothing has changed for the server: run the command again to go on")]
    Stopped,
}

/// How far a move is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The copy begins, or goes on with what an earlier run has copied.
    Begun {
        /// It goes on.
        goes_on: bool,
    },
    /// Objects are copied.
    Copying {
        /// Objects so far.
        objects: u64,
        /// Bytes so far.
        bytes: u64,
    },
    /// What had changed was copied.
    CaughtUp {
        /// Number of the round.
        round: u32,
        /// Bytes of it.
        bytes: u64,
    },
    /// The server was restarted, or too much has changed: everything is copied anew.
    Anew,
    /// Clients wait.
    Holding,
    /// Everything is here.
    Complete,
    /// The old server has left.
    Left,
}

/// Who hears how far a move is, and says whether it is to stop.
pub trait Watcher {
    /// A step was reached.
    fn tell(&mut self, step: Step);

    /// It is to stop, where that is possible.
    fn is_stopped(&self) -> bool;
}

/// What is to be moved, and how.
#[derive(Clone, Debug)]
pub struct MoveOptions {
    /// The data server.
    pub name: String,
    /// Bytes copied in a second at most; 0: no limit.
    pub rate_bytes: u64,
    /// The number of the move that the old server's folder names, where that folder is on another machine and the server does
    /// not answer any more.
    pub left: Option<u64>,
}

/// Moves a data server to the place that the configuration names. Returns when the server can be started there; false: it has
/// moved before.
pub fn move_server(config: &Config, options: &MoveOptions, watcher: &mut dyn Watcher) -> Result<bool, MoveError> {
    let (data, to) = places(config, &options.name)?;
    if let Some(server) = arrived_of(to)? {
        if server == data.name {
            return Ok(false);
        }
        let dir = to.dir.display();
        return Err(MoveError::Unsuitable(format!(
            "{server} has moved to the folder {dir}; name another one in moves_to of {}",
            data.name
        )));
    }
    let found = arriving(&to.dir)?;
    if let Some(found) = found.as_ref().filter(|found| found.is_complete)
        && has_left(data, to, found.number, options.left)?
    {
        open(data, to)?.arrive(&found.arrived).map_err(failed_to_write(to))?;
        return Ok(true);
    }
    if let Some(left) = options.left {
        let dir = to.dir.display();
        return Err(MoveError::Unsuitable(format!("the folder {dir} is no complete copy of move {left:016x}")));
    }
    let source = Source::connect(config, data)?;
    let mut going_on = match &found {
        Some(found) => source.goes_on_with(found).map_err(|error| doubtful(error, data, found))?,
        None => false,
    };
    let mover = Mover { config, data, to, source, rate_bytes: options.rate_bytes };
    for start in 0..STARTS_MAX {
        let state = match &found {
            Some(found) if going_on => Arriving { is_complete: false, ..found.clone() },
            _ => mover.begin()?,
        };
        watcher.tell(if start > 0 { Step::Anew } else { Step::Begun { goes_on: going_on } });
        if mover.run(state, watcher)? {
            return Ok(true);
        }
        going_on = false;
    }
    Err(MoveError::Busy(data.name.clone()))
}

/// Gives up a move that has begun: the server notes no changes any more, and the new folder is emptied, so that its copy cannot be
/// taken for a good one later. False: there is no copy.
pub fn give_up(config: &Config, name: &str) -> Result<bool, MoveError> {
    let (data, to) = places(config, name)?;
    abandon_arrival(&to.dir, |found| {
        let ended = Source::connect(config, data)?.step(MoveCall::End { number: found.number });
        match ended {
            // An answer proves that the server has not left for here, and will not.
            Err(error) if found.is_complete => Err(doubtful(error, data, found)),
            // What a server that does not run has noted is lost anyway.
            _ => Ok(()),
        }
    })
}

/// The server, and where it moves to.
fn places<'a>(config: &'a Config, name: &str) -> Result<(&'a Data, &'a MovesTo), MoveError> {
    match config.server(name).map_err(MoveError::Unsuitable)? {
        Server::Data(_, data) => match &data.moves_to {
            Some(to) => Ok((data, to)),
            None => Err(MoveError::Unsuitable(format!(
                "the configuration does not say where {name} moves to: add moves_to = {{ address = \"HOST:PORT\", dir = \"DIR\" }} \
                 to its section, in the file of every machine"
            ))),
        },
        other => Err(MoveError::Unsuitable(format!("{} is no data server; only these are moved", other.name()))),
    }
}

/// Whether the server has left for the folder here, under this number.
fn has_left(data: &Data, to: &MovesTo, number: u64, left: Option<u64>) -> Result<bool, MoveError> {
    if left == Some(number) {
        return Ok(true);
    }
    // On another machine there may be anything.
    let here = if data.dir == to.dir { None } else { departed(&data.dir).ok().flatten() };
    Ok(here.is_some_and(|departed| departed.number == number))
}

/// A complete copy whose server does not answer may be the server's only good folder.
fn doubtful(error: ClientError, data: &Data, found: &Arriving) -> MoveError {
    let has_stayed = matches!(&error, ClientError::Fault { fault, .. } if fault.errno != libc::ESHUTDOWN);
    if !found.is_complete || has_stayed {
        return error.into();
    }
    let Data { name, dir, .. } = data;
    MoveError::Doubtful(format!(
        "{error}; the copy is complete, and {name} may have left for it: where its old folder {dir} is, `impresario store show` \
         tells. If that says that it has moved, run this again with --left and the number there; if not, start {name} there and run \
         this again",
        dir = dir.display()
    ))
}

fn failed_to_write(to: &MovesTo) -> impl Fn(std::io::Error) -> MoveError + '_ {
    |source| MoveError::Write { dir: to.dir.clone(), source }
}

fn open(data: &Data, to: &MovesTo) -> Result<ObjectStore, StoreError> {
    let options = StoreOptions { checksums: Some(data.checksums), ..StoreOptions::default() };
    ObjectStore::open_arriving(&to.dir, &data.name, options)
}

/// The server that moves.
struct Source {
    link: Link,
    welcome: Arc<Mutex<Option<Welcome>>>,
}

impl Source {
    fn connect(config: &Config, data: &Data) -> Result<Source, ClientError> {
        let welcome = Arc::<Mutex<Option<Welcome>>>::default();
        let seen = welcome.clone();
        let vet = Vet(Arc::new(move |welcome: &Welcome| {
            *seen.lock() = Some(welcome.clone());
            Ok(())
        }));
        let options = LinkOptions {
            timeout: Duration::from_millis(config.cluster.request_timeout_ms),
            vet: Some(vet),
            place: ServerPosition::of(config, &data.name),
            access: Access::of(config, KeyRole::Admin),
            ..LinkOptions::new(Role::Data, ANSWER_BODY_MAX_BYTES.max(config.cluster.max_payload_bytes))
        };
        let link = Link::asking((&data.name, &data.address), &Arc::new(Identity::of_program()?), options)?;
        Ok(Source { link, welcome })
    }

    fn timeout(&self) -> Duration {
        self.link.options().timeout
    }

    fn step(&self, step: MoveCall) -> Result<MoveAnswer, ClientError> {
        match self.link.ask(Call::Move(step))? {
            Answer::Move(answer) => Ok(answer),
            _ => Err(self.unexpected()),
        }
    }

    fn unexpected(&self) -> ClientError {
        let what = "it gave an answer to another question; is it of this version?".into();
        ClientError::Protocol { peer: self.link.peer(), what }
    }

    /// Whether the server has noted all changes since this copy; it notes them from now on.
    fn goes_on_with(&self, found: &Arriving) -> Result<bool, ClientError> {
        match self.step(MoveCall::Begin { number: found.number })? {
            MoveAnswer::Begun { batch } => Ok(batch.is_some_and(|last| last == found.batch || last == found.batch + 1)),
            _ => Err(self.unexpected()),
        }
    }

    /// What the server said of itself.
    fn welcome(&self) -> Result<Welcome, ClientError> {
        self.welcome.lock().clone().ok_or_else(|| self.unexpected())
    }
}

struct Mover<'a> {
    config: &'a Config,
    data: &'a Data,
    to: &'a MovesTo,
    source: Source,
    rate_bytes: u64,
}

/// How a round of changes ended.
enum Round {
    Copied {
        bytes: u64,
        took: Duration,
    },
    /// The server does not know all that has changed.
    Lost,
    /// The deadline came first.
    Late,
}

impl Mover<'_> {
    /// Has the server note changes, and makes the folder an empty one to be filled.
    fn begin(&self) -> Result<Arriving, MoveError> {
        let number = random_number()
            .map_err(|error| MoveError::Unsuitable(format!("no number can be drawn for the move: {error}")))?;
        self.source.step(MoveCall::Begin { number })?;
        let Welcome { cluster, store, incarnation, .. } = self.source.welcome()?;
        let here = crate::process::this_boot()
            .map_err(|error| MoveError::Unsuitable(format!("the boot of this machine cannot be found out: {error}")))?;
        let address = self.to.address.clone();
        let arrived = Arrived { address, boot: (here, (incarnation >> 32) as u32) };
        let arriving = Arriving { number, next: Some(0), batch: 0, is_complete: false, arrived };
        let identity = FolderIdentity { cluster: cluster.0, store, server: self.data.name.clone() };
        begin_arrival(&self.to.dir, &identity, &arriving)?;
        Ok(arriving)
    }

    /// Copies from where the state says; false: it is to begin anew.
    fn run(&self, mut state: Arriving, watcher: &mut dyn Watcher) -> Result<bool, MoveError> {
        self.check_identity()?;
        let here = open(self.data, self.to)?;
        if let Some(number) = self.source.welcome()?.number {
            here.note_number(number).map_err(failed_to_write(self.to))?;
        }
        here.note_arriving(&state).map_err(failed_to_write(self.to))?;
        let (config, source, to) = (self.config, &self.source, self.to);
        let mut copier = Copier::new(source, &here, to, config.cluster.max_payload_bytes, self.rate_bytes);
        while let Some(from) = state.next {
            state.next = copier.page(from, PAGE_OBJECTS, watcher)?;
            // What could not be read is to be read again by a later run.
            if copier.unreadable.is_empty() {
                here.note_arriving(&state).map_err(failed_to_write(to))?;
            }
        }
        self.check_readable(&copier)?;
        // A round that is no longer than this fits while clients wait.
        let short = source.timeout() / 16;
        let (mut rounds, mut holds) = (0, 0);
        loop {
            rounds += 1;
            if rounds > SLOW_ROUNDS {
                copier.set_rate(0);
            }
            let Round::Copied { bytes, took } = self.round(&mut copier, &here, &mut state, None, watcher)? else {
                return Ok(false);
            };
            watcher.tell(Step::CaughtUp { round: rounds, bytes });
            if took > short && rounds < ROUNDS_MAX {
                continue;
            }
            copier.set_rate(0);
            holds += 1;
            match self.switch(&mut copier, &here, &mut state, watcher)? {
                Some(has_left) => return Ok(has_left),
                None if holds >= HOLDS_MAX => return Err(MoveError::Busy(self.data.name.clone())),
                None => rounds = rounds.min(ROUNDS_MAX - 2),
            }
        }
    }

    /// The folder here must be for the very folder of the server.
    fn check_identity(&self) -> Result<(), MoveError> {
        let Welcome { cluster, store, .. } = self.source.welcome()?;
        match impresario_store::examine(&self.to.dir)? {
            FolderState::Made(made) if (made.cluster, made.store) == (cluster.0, store) => Ok(()),
            _ => Err(MoveError::Unsuitable(format!(
                "the folder {} is a copy of another server than that at {}; empty it, or correct the configuration",
                self.to.dir.display(),
                self.data.address
            ))),
        }
    }

    fn check_readable(&self, copier: &Copier<'_>) -> Result<(), MoveError> {
        if copier.unreadable.is_empty() {
            return Ok(());
        }
        let server = self.data.name.clone();
        Err(MoveError::Unreadable { server, objects: copier.unreadable.join("; ") })
    }

    /// Copies the next batch of changes, and makes it durable.
    fn round(
        &self,
        copier: &mut Copier<'_>,
        here: &ObjectStore,
        state: &mut Arriving,
        deadline: Option<Instant>,
        watcher: &mut dyn Watcher,
    ) -> Result<Round, MoveError> {
        let (began, before) = (Instant::now(), copier.bytes);
        let (number, batch) = (state.number, state.batch + 1);
        let mut ranges: Vec<(FileKey, u64, u64)> = Vec::new();
        loop {
            let skip = ranges.len() as u32;
            match self.source.step(MoveCall::Changes { number, batch, skip }) {
                Ok(MoveAnswer::Changed { is_all: true, .. }) => return Ok(Round::Lost),
                Ok(MoveAnswer::Changed { ranges: more, has_more, .. }) => {
                    ranges.extend(more);
                    if !has_more {
                        break;
                    }
                }
                Err(ClientError::Fault { fault: Fault { errno: libc::ESRCH, .. }, .. }) => return Ok(Round::Lost),
                Ok(_) => return Err(self.source.unexpected().into()),
                Err(error) => return Err(error.into()),
            }
        }
        copier.set_deadline(deadline);
        for of_object in ranges.chunk_by(|a, b| a.0 == b.0) {
            let FileKey(key) = of_object.first().map_or(FileKey(0), |range| range.0);
            let parts: Vec<_> = of_object.iter().map(|(_, start, end)| *start..*end).collect();
            match copier.object(key, &parts, watcher) {
                // The same batch is had again.
                Err(MoveError::Busy(_)) => return Ok(Round::Late),
                done => done?,
            }
        }
        self.check_readable(copier)?;
        copier.sync()?;
        state.batch = batch;
        here.note_arriving(state).map_err(failed_to_write(self.to))?;
        Ok(Round::Copied { bytes: copier.bytes - before, took: began.elapsed() })
    }

    /// Lets clients wait, copies the rest, and has the server leave. `None`: there was not enough time, and clients go on.
    /// `Some(false)`: it is to begin anew.
    fn switch(
        &self,
        copier: &mut Copier<'_>,
        here: &ObjectStore,
        state: &mut Arriving,
        watcher: &mut dyn Watcher,
    ) -> Result<Option<bool>, MoveError> {
        let number = state.number;
        let deadline = match self.source.step(MoveCall::Hold { number }) {
            Ok(MoveAnswer::Held { for_ms }) => Instant::now() + Duration::from_millis(for_ms.into()) * 9 / 10,
            Ok(_) => return Err(self.source.unexpected().into()),
            Err(ClientError::Fault { fault: Fault { errno: libc::EBUSY, .. }, .. }) => return Ok(None),
            Err(ClientError::Fault { fault: Fault { errno: libc::ESRCH, .. }, .. }) => return Ok(Some(false)),
            Err(error) => return Err(error.into()),
        };
        let mut held = Held { source: &self.source, number, is_over: false };
        watcher.tell(Step::Holding);
        match self.round(copier, here, state, Some(deadline), watcher)? {
            Round::Copied { .. } => {}
            Round::Late => return Ok(None),
            Round::Lost => return Ok(Some(false)),
        }
        if !self.take_state(here, number)? || Instant::now() >= deadline {
            return Ok(None);
        }
        state.is_complete = true;
        here.note_arriving(state).map_err(failed_to_write(self.to))?;
        watcher.tell(Step::Complete);
        // From here on a lost answer leaves it open whether the server has left.
        match self.source.step(MoveCall::Leave { number, address: self.to.address.clone() }) {
            Ok(_) => {}
            Err(ClientError::Fault { fault: Fault { errno: libc::ETIME, .. }, .. }) => {
                state.is_complete = false;
                here.note_arriving(state).map_err(failed_to_write(self.to))?;
                return Ok(None);
            }
            Err(error @ ClientError::Fault { .. }) => return Err(error.into()),
            Err(error) => {
                held.is_over = true;
                return Err(doubtful(error, self.data, state));
            }
        }
        held.is_over = true;
        watcher.tell(Step::Left);
        here.arrive(&state.arrived).map_err(failed_to_write(self.to))?;
        self.await_its_end();
        Ok(Some(true))
    }

    /// Takes over what the server must know after a restart, durably; false: clients do not wait any more.
    fn take_state(&self, here: &ObjectStore, number: u64) -> Result<bool, MoveError> {
        let (mut notes, mut removed) = (Vec::new(), Vec::new());
        loop {
            let skip = (notes.len() + removed.len()) as u32;
            match self.source.step(MoveCall::State { number, skip }) {
                Ok(MoveAnswer::State { notes: more, removed: keys, has_more }) => {
                    notes.extend(more.into_iter().map(|(kind, key, value)| Note { kind, key, value }));
                    removed.extend(keys);
                    if !has_more {
                        break;
                    }
                }
                Ok(_) => return Err(self.source.unexpected().into()),
                Err(ClientError::Fault { fault: Fault { errno: libc::ETIME, .. }, .. }) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        let taken = here.replace_notes(notes.into_iter()).and_then(|()| here.remember_all_removed(&removed));
        taken.map(|()| true).map_err(failed_to_write(self.to))
    }

    /// Waits a while until the address is free, where the server has it at its new place, too.
    fn await_its_end(&self) {
        let until = Instant::now() + self.source.timeout();
        while self.data.address == self.to.address && Instant::now() < until {
            self.source.link.disconnect();
            if self.source.link.ask(Call::Status).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Clients wait; dropped, they go on.
struct Held<'a> {
    source: &'a Source,
    number: u64,
    is_over: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            // It ends by itself, too.
            let _ = self.source.step(MoveCall::Release { number: self.number });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folders::place_of;

    struct Silent;

    impl Watcher for Silent {
        fn tell(&mut self, _: Step) {}

        fn is_stopped(&self) -> bool {
            false
        }
    }

    /// `data.0` has moved, and its line was removed; by mistake `data.1` is to move to the same place.
    #[test]
    fn a_place_where_another_server_has_arrived_is_not_taken_for_the_own() {
        let dir = tempfile::tempdir().unwrap();
        let to = MovesTo { address: "127.0.0.1:7109".into(), dir: dir.path().join("new") };
        let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
        let arrived = Arrived { address: to.address.clone(), boot: (5, 6) };
        let arriving = Arriving { number: 9, next: None, batch: 0, is_complete: true, arrived: arrived.clone() };
        begin_arrival(&to.dir, &identity, &arriving).unwrap();
        let here = ObjectStore::open_arriving(&to.dir, "data.0", StoreOptions::default()).unwrap();
        here.arrive(&arrived).unwrap();
        drop(here);
        let text = format!(
            "[meta]\naddress = \"127.0.0.1:7000\"\ndir = \"meta\"\n[[data]]\nname = \"data.1\"\n\
             address = \"127.0.0.1:7101\"\ndir = \"data.1\"\nmoves_to = {{ address = \"{}\", dir = \"{}\" }}\n",
            to.address,
            to.dir.display()
        );
        let mut config = Config::parse(&text, &dir.path().join("c.toml")).unwrap();
        assert_eq!(place_of(&config.data[0]).unwrap().address, "127.0.0.1:7101");
        let options = |name: &str| MoveOptions { name: name.into(), rate_bytes: 0, left: None };
        let refused = move_server(&config, &options("data.1"), &mut Silent).unwrap_err().to_string();
        assert!(
            refused.contains("data.0 has moved to the folder") && refused.contains("moves_to of data.1"),
            "{refused}"
        );
        config.data[0].name = "data.0".into();
        assert_eq!(place_of(&config.data[0]).unwrap().address, to.address);
        assert!(!move_server(&config, &options("data.0"), &mut Silent).unwrap(), "it has moved before");
    }
}
