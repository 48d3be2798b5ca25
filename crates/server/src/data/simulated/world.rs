//! Runs a plan: the real store, notes of losses and fence on a simulated disk, clients that judge syncs as the real ones do, and
//! what is known of every sector.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use impresario_client::Peer;
use impresario_client::testing::Unsynced;
use impresario_store::testing::Forgetful;
use impresario_store::{FileSystem, FolderIdentity, ObjectStore, StoreOptions};
use impresario_wire::{ClientKey, FileKey, LaneState, SpaceChange, Who};

use super::plan::{CLIENTS, HANDLES, OBJECTS, Plan, SECTOR_BYTES, SECTORS, Span, Step};
use crate::data::disk::Done;
use crate::data::durability;
use crate::data::ledger::Ledger;
use crate::data::losses::Losses;
use crate::data::once::{Once, Origin};
use crate::owed::FirstLoss;

/// What is broken on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sabotage {
    None,
    /// Every third sync is answered and not done.
    SkipsSyncs,
    /// An error of a sync is not told.
    SwallowsErrors,
    /// Only who has synced is told of an error.
    NotesNoLosses,
    /// A restarted server does not know which objects have lost data.
    ForgetsLosses,
    /// Nor in which syncs it was killed.
    ForgetsSyncs,
    /// A client does not take a truncation for something that is to be synced.
    ForgetsCuts,
    /// A machine that was started again says it was not.
    HidesReboots,
    /// A client takes what is written while it waits for the answers to a sync for synced.
    CoversLaterWrites,
    /// A write in parts counts as written under the last loss that a part of it met.
    NamesTheLastLoss,
    /// A client tells only the open file through which it has synced.
    TellsOneFile,
}

/// Why a history is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    /// A read gives what nobody wrote last.
    Read(String),
    /// What was promised to be durable is not.
    Lost(String),
    /// An open file is not told of lost data, or is told again or without a reason.
    Told(String),
    /// The server does not start.
    Start(String),
}

/// A sector: what was written to it, in order.
struct Sector {
    /// The first is what it held at first.
    values: Vec<u64>,
    /// Which of them memory may hold.
    now: BTreeSet<usize>,
    /// What a crash leaves is this one or one that came later.
    floor: usize,
}

impl Sector {
    fn new() -> Sector {
        Sector { values: vec![0], now: BTreeSet::from([0]), floor: 0 }
    }

    /// It was written, or may have been.
    fn write(&mut self, value: u64, is_certain: bool) -> usize {
        self.values.push(value);
        let at = self.values.len() - 1;
        if is_certain {
            self.now.clear();
        }
        self.now.insert(at);
        at
    }

    /// The later ones of what was written with this value.
    fn since(&self, floor: usize, value: u64) -> Vec<usize> {
        (floor..self.values.len()).filter(|at| self.values[*at] == value).collect()
    }
}

#[derive(Clone, Copy, Default)]
struct Handle {
    /// The client's last loss of the file that it was told of.
    told: u64,
    /// Another open file of the client found a loss, of which this one must be told.
    is_owed: bool,
    /// How often it was told.
    times: u64,
}

#[derive(Default)]
struct Client {
    epoch: u32,
    unsynced: Unsynced,
    handles: [[Handle; HANDLES]; OBJECTS],
    /// What it wrote and has not synced.
    pending: [Vec<Pending>; OBJECTS],
    /// The changes of which some is lost, and was not told.
    lost: [Vec<u64>; OBJECTS],
}

/// A sector that a client wrote.
struct Pending {
    /// The change that wrote it, counted over all clients.
    change: u64,
    sector: usize,
    /// Which of the sector's values it is.
    write: usize,
}

/// A sync that a server has answered, and whose client waits for others.
struct Held {
    client: usize,
    object: usize,
    handle: usize,
    state: LaneState,
    errno: i32,
    /// The client's writes, and all changes, when it was sent.
    mark: u64,
    changes: u64,
    /// Steps until it has all answers.
    late: usize,
}

struct Server {
    store: ObjectStore<Forgetful>,
    losses: Arc<Losses>,
    once: Once,
    ledger: Ledger,
}

struct World<'a> {
    plan: &'a Plan,
    sabotage: Sabotage,
    disk: Forgetful,
    server: Option<Server>,
    boot: u64,
    clients: Vec<Client>,
    sectors: Vec<Vec<Sector>>,
    value: u64,
    /// Changes that were answered.
    changes: u64,
    /// In the order in which they were sent.
    held: Vec<Held>,
    syncs: u64,
    /// Crashes and restarts in the middle of something, beside the disk's own troubles.
    troubles: u64,
    kill_after: Option<u64>,
    /// The disk takes no changes until the next crash.
    is_read_only: bool,
}

fn key(object: usize) -> u64 {
    object as u64 + 1
}

/// Runs a plan to its end, or to what is wrong; how many steps were done.
pub(super) fn run(plan: &Plan, sabotage: Sabotage) -> Result<usize, Wrong> {
    let disk = Forgetful::new(plan.capacity_bytes);
    let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
    impresario_store::make_over(&disk, Path::new("disk"), &identity).expect("an empty disk");
    let sectors = (0..OBJECTS).map(|_| (0..SECTORS).map(|_| Sector::new()).collect()).collect();
    let clients = (0..CLIENTS).map(|_| Client::default()).collect();
    let mut world = World {
        plan,
        sabotage,
        disk,
        server: None,
        boot: 1,
        clients,
        sectors,
        value: 0,
        changes: 0,
        held: Vec::new(),
        syncs: 0,
        troubles: 0,
        kill_after: None,
        is_read_only: false,
    };
    world.start()?;
    for step in &plan.steps {
        world.answer(|held| {
            held.late -= 1;
            held.late == 0
        })?;
        world.step(*step)?;
    }
    world.answer(|_| true)?;
    // At the end the machine fails once more, with nothing that is not durable surviving.
    world.crash(None)?;
    Ok(plan.steps.len())
}

impl Server {
    fn known(&self) -> (&Losses, &Once) {
        (&self.losses, &self.once)
    }
}

impl World<'_> {
    /// Starts the server, unless its disk keeps it from that.
    fn start(&mut self) -> Result<(), Wrong> {
        let checksums = Some(self.plan.checksums);
        let options = StoreOptions { open_files: 1, checksums, unsettled_blocks: 4, ..StoreOptions::default() };
        let before = self.disk.troubles();
        let losses = Arc::new(Losses::default());
        if self.sabotage == Sabotage::ForgetsSyncs {
            let _ = self.disk.unlink("syncing"); // there may be none
        }
        let opened = ObjectStore::over(self.disk.clone(), Path::new("disk"), "data.0", options);
        let started = opened.map_err(|error| error.to_string()).and_then(|store| {
            let noted = match self.sabotage {
                Sabotage::ForgetsLosses => Arc::default(),
                _ => losses.clone(),
            };
            let ledger = Ledger::open(&store, noted).map_err(|error| error.to_string())?;
            Ok(Server { store, losses, once: Once::default(), ledger })
        });
        match started {
            Ok(server) => self.server = Some(server),
            // It is tried again before the next step.
            Err(_) if self.disk.troubles() > before || self.is_full() => {}
            Err(why) => return Err(Wrong::Start(why)),
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.plan.capacity_bytes < 1 << 20
    }

    fn incarnation(&self) -> u64 {
        if self.sabotage == Sabotage::HidesReboots { 1 << 32 } else { self.boot << 32 }
    }

    fn all_troubles(&self) -> u64 {
        self.troubles + self.disk.troubles()
    }

    fn step(&mut self, step: Step) -> Result<(), Wrong> {
        match step {
            Step::WriteBack { seed, fails } => self.disk.write_back(seed, fails),
            Step::SyncsFail(fail) => self.disk.fail_syncs(fail),
            Step::Fail { .. } if self.is_read_only => {}
            Step::Fail { after, errno, lasts } => {
                self.disk.fail_after(after, errno, lasts);
                self.is_read_only = lasts;
            }
            Step::KillIn { after } => self.kill_after = Some(after),
            Step::Kill => self.server = None,
            Step::Crash { seed } => self.crash(Some(seed))?,
            Step::NewEpoch { client } => self.clients[client].epoch += 1,
            Step::Reopen { client, object, handle } => {
                // A close comes after what the program waits for.
                self.answer(|held| (held.client, held.object, held.handle) == (client, object, handle))?;
                let client = &mut self.clients[client];
                let told = client.unsynced.losses().last(FileKey(key(object)));
                client.handles[object][handle] = Handle { told, ..Handle::default() };
            }
            Step::Write { .. }
            | Step::Cut { .. }
            | Step::Punch { .. }
            | Step::Sync { .. }
            | Step::Read { .. }
            | Step::Settle => return self.call(step),
        }
        Ok(())
    }

    /// What needs the server.
    fn call(&mut self, step: Step) -> Result<(), Wrong> {
        if self.server.is_none() {
            self.start()?;
        }
        let Some(server) = self.server.take() else { return Ok(()) };
        let killed = self.kill_after.take();
        if let Some(after) = killed.filter(|_| !self.is_read_only) {
            self.disk.stop_after(after);
        }
        let done = match step {
            Step::Write { client, span, between } => self.write(&server, client, span, between, killed.is_none()),
            Step::Cut { client, object, sectors } => self.cut(&server, client, object, sectors, killed.is_none()),
            Step::Punch { client, span } => self.punch(&server, client, span, killed.is_none()),
            Step::Sync { client, object, handle, late } => {
                self.sync(&server, (client, object, handle), late, killed.is_none())
            }
            Step::Read { object } => self.read(&server, object),
            _ => {
                server.store.settle_older(Duration::ZERO, |key, error| {
                    durability::lost(&server.store, &server.losses, key, &error);
                });
                Ok(())
            }
        };
        match killed {
            None => self.server = Some(server),
            Some(_) => {
                self.troubles += 1;
                if !self.is_read_only {
                    self.disk.mend();
                }
            }
        }
        done
    }

    fn admit(&mut self, server: &Server, client: usize) -> bool {
        let who = Who { client: ClientKey(client as u64 + 1), epoch: self.clients[client].epoch, ..Who::default() };
        server.ledger.admit(&server.store, who).is_ok()
    }

    /// Something was written: `outcome` says so, or that a part of it may have been. Without an answer its client does not know.
    fn note(&mut self, client: Option<usize>, span: Span, value: u64, outcome: Outcome, loss: u32) {
        let writes = self.put(span, value, outcome);
        if let (Some(client), Outcome::Done) = (client, outcome) {
            self.acknowledge(client, span.object, value, writes, loss);
        }
    }

    /// Sectors have a new value, or may have; gives which of its values that is of each sector.
    fn put(&mut self, span: Span, value: u64, outcome: Outcome) -> Vec<(usize, usize)> {
        let object = &mut self.sectors[span.object];
        let put = |sector: usize| (sector, object[sector].write(value, outcome == Outcome::Done));
        (span.first..span.first + span.count).map(put).collect()
    }

    /// A client has the answer to a change.
    fn acknowledge(&mut self, client: usize, object: usize, value: u64, writes: Vec<(usize, usize)>, loss: u32) {
        // Nothing but a truncation, or a hole that is punched, writes zeros.
        let is_forgotten = self.sabotage == Sabotage::ForgetsCuts && value == 0;
        let state = LaneState::new(0, self.incarnation(), loss);
        self.changes += 1;
        let change = self.changes;
        let pending = writes.into_iter().map(|(sector, write)| Pending { change, sector, write });
        self.clients[client].pending[object].extend(pending);
        if !is_forgotten {
            self.clients[client].unsynced.note_write(FileKey(key(object)), state);
        }
    }

    fn write(
        &mut self,
        server: &Server,
        client: usize,
        span: Span,
        between: Option<(usize, usize)>,
        is_answered: bool,
    ) -> Result<(), Wrong> {
        if !self.admit(server, client) {
            return Ok(());
        }
        self.value += 1;
        let value = self.value;
        let front = if between.is_some() { span.count / 2 } else { span.count };
        let back = Span { first: span.first + front, count: span.count - front, ..span };
        let (mut loss, mut writes, mut is_done) = (FirstLoss::default(), Vec::new(), is_answered);
        for (part, sync) in [(Span { count: front, ..span }, None), (back, between)] {
            if let Some((client, handle)) = sync {
                let counts =
                    |world: &World| (world.all_troubles(), world.clients[client].handles[span.object][handle].times);
                let before = counts(self);
                self.sync(server, (client, span.object, handle), 0, is_answered)?;
                // Who is told by this sync, also of what was lost before the write, is told once more: the write is answered later,
                // and for all that the server knew at its first part, that part may be lost.
                self.troubles += u64::from(counts(self) > before);
            }
            if part.count == 0 {
                continue;
            }
            let bytes = value.to_le_bytes().repeat(part.count * SECTOR_BYTES as usize / 8);
            // As requests that were merged have it, in several pieces.
            let (front, back) = bytes.split_at(bytes.len() / 2);
            let pieces = [(&Origin::default(), front), (&Origin::default(), back)];
            let at = part.first as u64 * SECTOR_BYTES;
            let done = durability::write(&server.store, server.known(), key(span.object), at, &pieces);
            let Done::Written(written, error, last) = done else {
                return Err(Wrong::Read("no answer to a write".into()));
            };
            if error.is_none() && written != bytes.len() as u64 {
                return Err(Wrong::Read(format!("{written} bytes written of {}", bytes.len())));
            }
            let outcome = if error.is_none() && is_answered { Outcome::Done } else { Outcome::Unknown };
            writes.extend(self.put(part, value, outcome));
            is_done &= outcome == Outcome::Done;
            if self.sabotage == Sabotage::NamesTheLastLoss {
                loss = FirstLoss::default();
            }
            loss.note(last);
        }
        if is_done {
            self.acknowledge(client, span.object, value, writes, loss.number());
        }
        Ok(())
    }

    fn cut(
        &mut self,
        server: &Server,
        client: usize,
        object: usize,
        sectors: usize,
        is_answered: bool,
    ) -> Result<(), Wrong> {
        if !self.admit(server, client) {
            return Ok(());
        }
        let span = Span { object, first: sectors, count: SECTORS - sectors };
        let (known, len_bytes) = (server.known(), sectors as u64 * SECTOR_BYTES);
        let cut = durability::truncate(&server.store, known, key(object), len_bytes, &Origin::default());
        let loss = if let Ok(Done::AfterLoss(loss, _)) = cut { loss } else { 0 };
        match cut {
            Ok(_) if is_answered => self.note(Some(client), span, 0, Outcome::Done, loss),
            _ => self.note(None, span, 0, Outcome::Unknown, 0),
        }
        Ok(())
    }

    fn punch(&mut self, server: &Server, client: usize, span: Span, is_answered: bool) -> Result<(), Wrong> {
        if !self.admit(server, client) {
            return Ok(());
        }
        let range = span.first as u64 * SECTOR_BYTES..(span.first + span.count) as u64 * SECTOR_BYTES;
        let (known, origin) = (server.known(), Origin::default());
        let done = durability::change_space(&server.store, known, key(span.object), SpaceChange::Punch, range, &origin);
        match done {
            Ok(Done::Changed(loss)) if is_answered => self.note(Some(client), span, 0, Outcome::Done, loss),
            _ => self.note(None, span, 0, Outcome::Unknown, 0),
        }
        Ok(())
    }

    fn sync(
        &mut self,
        server: &Server,
        (client, object, handle): (usize, usize, usize),
        late: usize,
        is_answered: bool,
    ) -> Result<(), Wrong> {
        // An open file syncs one after the other.
        self.answer(|held| (held.client, held.object, held.handle) == (client, object, handle))?;
        if !self.admit(server, client) {
            return Ok(());
        }
        let (mark, changes) = (self.clients[client].unsynced.writes(), self.changes);
        self.syncs += 1;
        let skipped = self.sabotage == Sabotage::SkipsSyncs && self.syncs.is_multiple_of(3);
        let done = match self.sabotage {
            _ if skipped => Done::Barrier,
            Sabotage::SwallowsErrors => {
                let _ = server.store.sync(key(object));
                Done::Barrier
            }
            Sabotage::NotesNoLosses => match server.store.sync(key(object)) {
                Ok(()) => Done::Barrier,
                Err(error) => Done::AfterLoss(0, error.raw_os_error().unwrap_or(libc::EIO)),
            },
            _ => durability::sync(&server.store, &server.losses, key(object)),
        };
        if !is_answered {
            return Ok(());
        }
        let (loss, errno) = match done {
            Done::AfterLoss(loss, errno) => (loss, errno),
            _ => (0, 0),
        };
        let state = LaneState::new(0, self.incarnation(), loss);
        let held = Held { client, object, handle, state, errno, mark, changes, late };
        if late == 0 {
            return self.judge(held);
        }
        self.held.push(held);
        Ok(())
    }

    /// The clients have all answers to the syncs that are due.
    fn answer(&mut self, is_due: impl FnMut(&mut Held) -> bool) -> Result<(), Wrong> {
        let due: Vec<Held> = self.held.extract_if(.., is_due).collect();
        due.into_iter().try_for_each(|held| self.judge(held))
    }

    /// What a client makes of the answers to its sync.
    fn judge(&mut self, held: Held) -> Result<(), Wrong> {
        let Held { client, object, handle, state, errno, mark, changes, .. } = held;
        let (file, troubles) = (FileKey(key(object)), self.all_troubles());
        let whose = format!("client {client}, object {object}, open file {handle}");
        let own = &mut self.clients[client];
        let mark = if self.sabotage == Sabotage::CoversLaterWrites { own.unsynced.writes() } else { mark };
        let peer = |_| Ok(Peer { name: "data.0".into(), address: String::new() });
        let judged = own.unsynced.judge(file, mark, &[state], errno, peer);
        let told = own.unsynced.losses();
        if judged.is_err() {
            for (nth, other) in own.handles[object].iter_mut().enumerate() {
                other.is_owed |= nth != handle;
            }
        }
        let news = match self.sabotage {
            Sabotage::TellsOneFile => judged.is_err().then(|| told.last(file)),
            _ => told.news(file, own.handles[object][handle].told).map(|(loss, _)| loss),
        };
        let pending: Vec<Pending> = own.pending[object].extract_if(.., |pending| pending.change <= changes).collect();
        let has_lost = own.lost[object].extract_if(.., |change| *change <= changes).count() > 0;
        let open = &mut own.handles[object][handle];
        if let Some(loss) = news {
            // Of whatever was lost by now.
            own.lost[object].clear();
            *open = Handle { told: loss, is_owed: false, times: open.times + 1 };
            return match open.times > troubles {
                true => Err(Wrong::Told(format!("{whose} is told {} times of {troubles} failures", open.times))),
                false => Ok(()),
            };
        }
        if open.is_owed {
            return Err(Wrong::Told(format!("{whose} is not told of the loss that another open file found")));
        }
        if has_lost {
            return Err(Wrong::Lost(format!("{whose}: a sync succeeds after a power failure lost what was written")));
        }
        for Pending { sector, write, .. } in pending {
            let sector = &mut self.sectors[object][sector];
            sector.floor = sector.floor.max(write);
        }
        let device = self.disk.copied();
        device.crash();
        self.is_durable(&device, object).map_err(|why| Wrong::Lost(format!("{whose}: after its sync {why}")))
    }

    /// Whether a device has what it must have of an object.
    fn is_durable(&self, device: &Forgetful, object: usize) -> Result<(), String> {
        let bytes = contents(device, object);
        for (number, sector) in self.sectors[object].iter().enumerate() {
            let value = value_of(&bytes, number)?;
            if sector.since(sector.floor, value).is_empty() {
                let wanted = &sector.values[sector.floor..];
                return Err(format!("the device has {value} in sector {number}, and not one of {wanted:?}"));
            }
        }
        Ok(())
    }

    fn read(&mut self, server: &Server, object: usize) -> Result<(), Wrong> {
        let mut bytes = vec![0; SECTORS * SECTOR_BYTES as usize];
        let read = server.store.read(key(object), 0, &mut bytes);
        let len = read.map_err(|error| Wrong::Read(format!("object {object} cannot be read: {error}")))?;
        bytes.truncate(len);
        for (number, sector) in self.sectors[object].iter_mut().enumerate() {
            let value = value_of(&bytes, number).map_err(Wrong::Read)?;
            let seen: BTreeSet<usize> = sector.now.iter().copied().filter(|at| sector.values[*at] == value).collect();
            if seen.is_empty() {
                let wanted: Vec<u64> = sector.now.iter().map(|at| sector.values[*at]).collect();
                let why = format!("object {object}, sector {number}: {value} is read, and not one of {wanted:?}");
                return Err(Wrong::Read(why));
            }
            sector.now = seen;
        }
        Ok(())
    }

    /// The machine fails and is started again.
    fn crash(&mut self, seed: Option<u64>) -> Result<(), Wrong> {
        (self.server, self.kill_after, self.is_read_only) = (None, None, false);
        self.boot += 1;
        self.troubles += 1;
        self.disk.fail_syncs(false);
        match seed {
            Some(seed) => self.disk.crash_partly(seed),
            None => self.disk.crash(),
        }
        for object in 0..OBJECTS {
            self.is_durable(&self.disk, object)
                .map_err(|why| Wrong::Lost(format!("object {object}, after a power failure: {why}")))?;
            let bytes = contents(&self.disk, object);
            for number in 0..SECTORS {
                let value = value_of(&bytes, number).map_err(Wrong::Lost)?;
                let sector = &mut self.sectors[object][number];
                let left = sector.since(sector.floor, value);
                let latest = left.last().copied().unwrap_or(0);
                for client in &mut self.clients {
                    let is_lost = |pending: &mut Pending| pending.sector == number && pending.write > latest;
                    let lost = client.pending[object].extract_if(.., is_lost);
                    client.lost[object].extend(lost.map(|pending| pending.change));
                }
                sector.values.push(value);
                sector.floor = sector.values.len() - 1;
                sector.now = BTreeSet::from([sector.floor]);
            }
        }
        self.start()?;
        // Checksums must not take good bytes for damaged ones.
        if let Some(server) = self.server.take() {
            (0..OBJECTS).try_for_each(|object| self.read(&server, object))?;
            self.server = Some(server);
        }
        Ok(())
    }
}

/// What became of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Done,
    /// It may have been done, wholly or in part.
    Unknown,
}

/// The bytes of an object's file.
fn contents(disk: &Forgetful, object: usize) -> Vec<u8> {
    use std::io::IoSliceMut;

    let key = key(object);
    let Ok(file) = disk.open(&format!("objects/{:02x}/{key:016x}", key & 0xff), false) else { return Vec::new() };
    let mut bytes = vec![0; SECTORS * SECTOR_BYTES as usize];
    let len = disk.read(&file, 0, &mut [IoSliceMut::new(&mut bytes)]).unwrap_or(0);
    bytes.truncate(len);
    bytes
}

/// What a sector holds: zeros beyond the end.
fn value_of(bytes: &[u8], sector: usize) -> Result<u64, String> {
    let start = (sector * SECTOR_BYTES as usize).min(bytes.len());
    let end = (start + SECTOR_BYTES as usize).min(bytes.len());
    let held = &bytes[start..end];
    let Some((first, _)) = held.split_first_chunk::<8>() else { return Ok(0) };
    match held.chunks_exact(8).all(|word| word == first) && held.len().is_multiple_of(8) {
        true => Ok(u64::from_le_bytes(*first)),
        false => Err(format!("sector {sector} is torn")),
    }
}
