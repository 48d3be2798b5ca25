//! The manager's thread: waits for everything, decides, and never blocks.

mod messages;

use std::collections::BTreeSet;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use impresario_ring::message::{Mode, ToClient};
use impresario_ring::patterns::Builder;
use impresario_ring::{Access as RingAccess, Op, SMALL_FILE_BYTES, Unseen, flag, now_ns, ring_bytes, waited_ns};
use rustc_hash::FxHashMap;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use super::client::Client;
use super::files::{Acting, Files};
use super::lessons::Lessons;
use super::pool::{Done, Found, LentFile, Pool};
use super::programs::{Answer, PATIENCE_NS, Programs};
use super::registration::{Examined, examine, first_bytes_in_memory, is_removed};
use super::siblings::Siblings;
use super::sink::{RecordedAccess, Recorder};
use super::socket::{self, Peer};
use super::users::Users;
use super::{Access, Command, Control, Options, Record, memory};
use crate::advisor::{Read, Reader};
use crate::backend::sees_all_pages;
use crate::config::{Entry, Lookup, Monitored, Paths};
use crate::jobs::Origin;
use crate::learn::{Facts, Kind, SHORT_BYTES_MAX, find};
use crate::report::Report;

const LISTENER: u64 = 0;
const CONTROL: u64 = 1;
/// A client's socket is at twice its number, its event descriptor one above. Numbers begin here.
const FIRST_CLIENT: u64 = 1;

/// How often rings and sockets of programs that are active are looked at: to be woken by each of their messages would take more time
/// than to take it.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How often limits and time are looked after.
const KEEP_HOUSE_EVERY_NS: u64 = 1_000_000_000;
/// A client must say Hello within this time.
const HELLO_WITHIN_NS: u64 = 5_000_000_000;
/// Accesses taken from one ring before the next one has its turn.
const ACCESSES_A_TURN: u32 = 4096;
/// Messages taken from one client before the next one has its turn.
const MESSAGES_A_TURN: u32 = 256;
/// Turns of messages taken at once when an access names a file whose registration was not taken yet.
const TURNS_FOR_ACCESSES: u32 = 256;
/// Files that a program is expected to read, and that wait for what is known of it; others are brought in without.
const EXPECTED_MAX: usize = 1024;
/// Accepting pauses so long when there is no descriptor left.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;
/// Workers are given so long to end.
const WORKERS_END_WITHIN: Duration = Duration::from_secs(2);

/// Why a client is let go.
type CutOff = String;

/// How far a client's messages were taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Messages {
    /// All of them.
    All,
    /// There may be more.
    More,
    /// All of them, and the client is gone.
    End,
}

/// What is known of the program that is started, for the files that it will read.
enum Started {
    Unasked,
    /// Until this instant its files wait.
    Asked(u64, Vec<OwnedFd>),
    Known(Arc<[Kind]>),
}

/// The manager.
pub(super) struct Service {
    epoll: OwnedFd,
    listener: OwnedFd,
    control: Control,
    pool: Arc<Pool>,
    done: Receiver<Done>,
    advise: bool,
    lookup: Lookup,
    programs: Programs,
    started: Started,
    mode: Mode,
    patterns: (OwnedFd, u32),
    recorder: Recorder,
    /// Runs that something may be learnt from.
    lessons: Lessons,
    clients: FxHashMap<u64, Client>,
    /// Clients whose rings and sockets are looked at without being told.
    active: BTreeSet<u64>,
    users: Users,
    files: Files,
    /// Where programs without a plan are followed from file to file.
    siblings: Option<Siblings>,
    next_client: u64,
    next_number: u64,
    accept_paused_until_ns: Option<u64>,
    house_kept_ns: u64,
    /// When maps are looked at again.
    maps_looked_at_ns: Option<u64>,
    programs_ever: u64,
    cut_off: u64,
    /// Of rings that are gone.
    dropped_accesses: u64,
    unseen: Unseen,
    /// Files of at most so many bytes may be passed over by programs that read them fast, but for those with a plan; 0: none is.
    small_bytes: u32,
    /// There is more to do for some files than to follow them online.
    has_plan: bool,
    /// Of all reads, those passed over by programs that are gone among them, and of all memory maps told of.
    seen_bytes: u64,
    mapped_bytes: u64,
}

impl Service {
    pub(super) fn new(options: Options, listener: OwnedFd, control: Control) -> io::Result<Service> {
        let Options { hints, paths, advise, access, record, workers, backends, program, known } = options;
        let lookup = Lookup::new(&hints, &paths.unwrap_or_else(|| Paths::of(&hints)));
        let (sink, small_bytes, patterns) = match record {
            None => (None, SMALL_FILE_BYTES, lookup.patterns()),
            Some(Record { sink, small_bytes, patterns }) => {
                let mut builder = Builder::new();
                let left_out = patterns.iter().filter(|(kind, pattern)| builder.add(*kind, pattern).is_err()).count();
                (Some(sink), small_bytes, (builder.finish(), left_out))
            }
        };
        if patterns.1 > 0 {
            tracing::warn!(paths = patterns.1, "more paths than programs can be told; these are not watched");
        }
        let mode = if sink.is_some() { Mode::Record } else { Mode::Advise };
        let patterns = (socket::patterns_memory(&patterns.0)?, patterns.0.len() as u32);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &*control.event, EventData::new_u64(CONTROL), EventFlags::IN)?;
        let (send, done) = mpsc::channel();
        let (event, wake_by) = (control.event.clone(), control.event.clone());
        let wake = move || {
            // Full means that a wake-up is waiting already.
            let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
        };
        // Among many users none may have most of the workers.
        let share = if access == Access::Everyone { workers / 2 } else { workers.saturating_sub(1) };
        // Files are opened here with the rights of the manager, which must be those of its programs.
        let follows = advise && access == Access::Owner && hints.directory.iter().any(|entry| entry.online);
        // Of others' files the kernel may ask the file system whether we could write to them, which waits for one that hangs.
        let looks = access == Access::Owner || sees_all_pages();
        let node_bytes = memory::node_budget_bytes();
        let mut entries = hints.file.iter().chain(&hints.directory).chain(&hints.glob);
        let has_plan = entries.any(Entry::is_plan);
        let small_bytes = if advise { small_bytes } else { 0 };
        let siblings = follows.then(|| Siblings::new(node_bytes));
        let pool = Pool::start(workers, share, backends, send, wake)?;
        Ok(Service {
            epoll,
            listener,
            control,
            pool,
            done,
            advise,
            lookup,
            programs: Programs::new(program, known, mode, wake_by),
            started: Started::Unasked,
            mode,
            patterns,
            recorder: Recorder::new(sink),
            lessons: Lessons::new(hints.learn),
            clients: FxHashMap::default(),
            active: BTreeSet::new(),
            users: Users::new(hints.limits, hints.budget, node_bytes),
            files: Files::new(hints.stand_down, hints.device, looks),
            siblings,
            next_client: FIRST_CLIENT,
            next_number: 0,
            accept_paused_until_ns: None,
            house_kept_ns: now_ns(),
            maps_looked_at_ns: None,
            programs_ever: 0,
            cut_off: 0,
            dropped_accesses: 0,
            unseen: Unseen::default(),
            small_bytes,
            has_plan,
            seen_bytes: 0,
            mapped_bytes: 0,
        })
    }

    /// Runs until it is told to stop, or the sender is gone.
    pub(super) fn run(mut self) {
        let answer = loop {
            match self.turn() {
                Ok(None) => {}
                Ok(Some(answer)) => break answer,
                Err(e) => {
                    tracing::error!(error = %e, "the manager cannot wait for anything any more and ends");
                    break None;
                }
            }
        };
        self.await_answers();
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.drain_ended(id);
        }
        let report = self.report();
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.remove(id);
        }
        self.recorder.tell(|sink| sink.finish());
        // Who stops a manager waits for its report and not for what workers still read.
        if let Some(answer) = answer {
            let _ = answer.send(report);
        }
        self.pool.stop(WORKERS_END_WITHIN);
    }

    /// One round: waits, and serves what there is. `Some` when it is to end.
    fn turn(&mut self) -> io::Result<Option<Option<Sender<Report>>>> {
        let timeout = self.patience().map(rustix::event::Timespec::try_from).transpose().map_err(io::Error::other)?;
        let mut events = Vec::with_capacity(256);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // After a long rest, before anything is granted by what was true then.
        let now = now_ns();
        if now.saturating_sub(self.house_kept_ns) >= KEEP_HOUSE_EVERY_NS {
            self.keep_house(now);
        }
        let mut end = None;
        for Event { flags, data } in events {
            match data.u64() {
                LISTENER => self.accept(),
                CONTROL => {
                    let _ = rustix::io::read(&*self.control.event, &mut [0; 8]);
                    end = end.or(self.commands());
                }
                token if token % 2 == 1 => self.activate(token / 2),
                token => self.socket_event(token / 2, flags),
            }
        }
        while let Some(answer) = self.programs.answer() {
            self.answered(answer);
        }
        self.ask_no_longer(now_ns());
        for id in self.active.iter().copied().collect::<Vec<_>>() {
            self.serve(id);
        }
        let now = now_ns();
        while let Ok(done) = self.done.try_recv() {
            match done.found {
                Some(Found::Unmapped(id, files)) => self.unmapped(id, &files, now),
                _ => self.files.done(done, now),
            }
        }
        self.maps_looked_at_ns = self.files.look_at_maps(&self.pool, &mut self.users, now);
        self.pool.begin_closing(self.active.is_empty());
        if self.accept_paused_until_ns.is_some_and(|until| now >= until) {
            self.accept_paused_until_ns = None;
            epoll::add(&self.epoll, &self.listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        }
        Ok(end)
    }

    /// How long to wait for an event; `None`: until there is one, since nothing is to be looked after meanwhile.
    fn patience(&self) -> Option<Duration> {
        let house = self.accept_paused_until_ns.is_some()
            || self.files.expects()
            || self.clients.values().any(|client| client.ring.is_none() || !client.mapped.is_empty())
            || self.pool.has_jobs();
        let usual = match self.active.is_empty() {
            false => Some(LOOK_EVERY),
            true => house.then_some(Duration::from_nanos(KEEP_HOUSE_EVERY_NS)),
        };
        let at = self.maps_looked_at_ns.into_iter().chain(self.asked_until_ns()).min();
        let at = at.map(|at| Duration::from_nanos(at.saturating_sub(now_ns())));
        usual.into_iter().chain(at).min()
    }

    /// When what is known of a program is waited for no longer.
    fn asked_until_ns(&self) -> Option<u64> {
        let started = match self.started {
            Started::Asked(until, _) => Some(until),
            _ => None,
        };
        self.clients.values().filter_map(|client| client.asked_until_ns).chain(started).min()
    }

    /// Asks what is known of a program. Until then what it says waits, so that its first file has the hints of its kind.
    fn ask(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.program = self.programs.started();
        if self.programs.ask(id, client.pid, client.uid) {
            client.asked_until_ns = Some(now_ns() + PATIENCE_NS);
            // Its end, too, would wake the manager again and again.
            let _ = epoll::delete(&self.epoll, &client.socket);
            return;
        }
        self.activate(id);
    }

    fn answered(&mut self, Answer { client, name, kinds, lesson }: Answer) {
        let Some(id) = client else { return self.started_is_known(kinds) };
        if let Some(client) = self.clients.get_mut(&id).filter(|client| client.asked_until_ns.is_some()) {
            (client.program, client.kinds, client.taught) = (name, kinds, lesson);
            self.hear_again(id);
        }
    }

    /// Takes what a program says from now on.
    fn hear_again(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.asked_until_ns = None;
        if let Err(e) = epoll::add(&self.epoll, &client.socket, EventData::new_u64(id * 2), EventFlags::IN) {
            return self.cut(id, &format!("it cannot be waited for: {e}"));
        }
        self.activate(id);
    }

    /// Programs of which no answer has come in time are served without.
    fn ask_no_longer(&mut self, now: u64) {
        if self.asked_until_ns().is_none_or(|until| now < until) {
            return;
        }
        let is_late = |client: &&Client| client.asked_until_ns.is_some_and(|until| now >= until);
        let late: Vec<u64> = self.clients.values().filter(is_late).map(|client| client.id).collect();
        late.into_iter().for_each(|id| self.hear_again(id));
        if matches!(self.started, Started::Asked(until, _) if now >= until) {
            self.started_is_known(Arc::default());
        }
    }

    /// Before the end: what programs have said that are asked about still counts.
    fn await_answers(&mut self) {
        while let Some(until) = self.asked_until_ns() {
            let patience = Duration::from_nanos(until.saturating_sub(now_ns()));
            match self.programs.answer_within(patience) {
                Some(answer) => self.answered(answer),
                None => self.ask_no_longer(until),
            }
        }
    }

    fn started_is_known(&mut self, kinds: Arc<[Kind]>) {
        if let Started::Asked(_, files) = std::mem::replace(&mut self.started, Started::Known(kinds.clone())) {
            files.into_iter().for_each(|fd| self.expect_by(fd, &kinds));
        }
    }

    fn commands(&mut self) -> Option<Option<Sender<Report>>> {
        loop {
            match self.control.commands.try_recv() {
                Ok(Command::Report(answer)) => {
                    let _ = answer.send(self.report());
                }
                Ok(Command::Expect(fd)) => self.expect(fd),
                Ok(Command::Stop(answer)) => return Some(Some(answer)),
                Err(mpsc::TryRecvError::Empty) => return None,
                Err(mpsc::TryRecvError::Disconnected) => return Some(None),
            }
        }
    }

    /// A program is about to read this file.
    fn expect(&mut self, fd: OwnedFd) {
        let uid = rustix::process::geteuid().as_raw();
        if matches!(self.started, Started::Unasked) {
            self.started = match self.programs.ask_of_started(uid) {
                true => Started::Asked(now_ns() + PATIENCE_NS, Vec::new()),
                false => Started::Known(Arc::default()),
            };
        }
        match &mut self.started {
            Started::Asked(_, files) if files.len() < EXPECTED_MAX => files.push(fd),
            Started::Known(kinds) => {
                let kinds = kinds.clone();
                self.expect_by(fd, &kinds);
            }
            _ => self.expect_by(fd, &[]),
        }
    }

    fn expect_by(&mut self, fd: OwnedFd, kinds: &[Kind]) {
        let uid = rustix::process::geteuid().as_raw();
        let examined = examine(fd.as_fd()).filter(|examined| self.advise && examined.cached);
        let found = examined.and_then(|examined| Some((self.monitored(&examined, fd.as_fd(), kinds)?, examined)));
        // What is only followed online is found out when it is read, also by which program.
        let found = found.filter(|(monitored, _)| !monitored.entry.online || monitored.learnt.is_some());
        let Some((monitored, examined)) = found else { return self.pool.let_go(fd, uid) };
        let acting = Acting {
            id: examined.id,
            fd: &Arc::new(LentFile::new(fd, uid, &self.pool)),
            uid,
            inside: None,
            pool: &self.pool,
        };
        let about = (examined.path.as_path(), examined.size_bytes);
        self.files.expected(&acting, &monitored, about, &mut self.users, now_ns());
    }

    /// What is to be done for a file: by the hints, or where they leave that open, by its kind.
    fn monitored(&self, examined: &Examined, fd: BorrowedFd<'_>, kinds: &[Kind]) -> Option<Arc<Monitored>> {
        let found = self.lookup.find(&examined.path)?;
        if kinds.is_empty() || !found.entry.online || examined.size_bytes <= SHORT_BYTES_MAX.into() {
            return Some(found.clone());
        }
        if let Some(open) = self.files.monitored(examined.id) {
            return Some(open.clone());
        }
        let facts = Facts::of(&examined.path, examined.size_bytes, first_bytes_in_memory(fd).as_deref());
        let Some(kind) = find(kinds, &facts) else { return Some(found.clone()) };
        let (key, learnt) = (format!("learnt of {}", kind.files.words()), Some(kind.shape.clone()));
        Some(Arc::new(Monitored { key, learnt, ..Monitored::clone(found) }))
    }

    fn accept(&mut self) {
        for _ in 0..MESSAGES_A_TURN {
            let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => self.connected(socket),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(e) => {
                    tracing::warn!(error = %e, "programs cannot connect now; raise the limit of open files");
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    self.accept_paused_until_ns = Some(now_ns() + ACCEPT_PAUSE_NS);
                    return;
                }
            }
        }
    }

    fn connected(&mut self, socket: OwnedFd) {
        let Ok(Peer { pid, uid }) = socket::peer(socket.as_fd()) else { return };
        if self.pool.is_clogged(uid) || !self.users.connect(uid) {
            tracing::warn!(uid, pid, "a user has as many programs connected, or files to close, as allowed");
            let _ = socket::send(socket.as_fd(), ToClient::Refused { errno: libc::EUSERS as u32 }, None);
            self.cut_off += 1;
            self.pool.hang_up(socket, uid);
            return;
        }
        let id = self.next_client;
        self.next_client += 1;
        if let Err(e) = epoll::add(&self.epoll, &socket, EventData::new_u64(id * 2), EventFlags::IN) {
            tracing::warn!(uid, pid, error = %e, "a program cannot be watched");
            self.users.disconnect(uid);
            self.pool.hang_up(socket, uid);
            return;
        }
        self.clients.insert(id, Client::new(id, socket, uid, pid, now_ns()));
        self.programs_ever += 1;
    }

    fn socket_event(&mut self, id: u64, flags: EventFlags) {
        if !self.clients.contains_key(&id) {
            return;
        }
        // What the program did before it sent this, or died, comes first.
        let served = self.drain(id).and_then(|_| self.messages(id));
        match served {
            Err(why) => self.cut(id, &why),
            Ok(Messages::All | Messages::More) if !flags.intersects(EventFlags::HUP | EventFlags::ERR) => {
                self.activate(id);
            }
            // It hung up, but what it said before counts.
            Ok(Messages::More) => {}
            Ok(Messages::All | Messages::End) => self.ended(id),
        }
    }

    /// Looks at a client's ring and socket from now on without being told, but when it hangs up, or where hints are given at an open.
    fn activate(&mut self, id: u64) {
        // A program that may get hints when it opens a file needs them before its first read.
        let is_known = |client: &Client| !client.kinds.is_empty();
        let is_hinted_at_once = self.has_plan || self.small_bytes == 0 || self.clients.get(&id).is_some_and(is_known);
        if self.active.insert(id) && !is_hinted_at_once {
            self.wait_for_messages(id, EventFlags::empty());
        }
    }

    /// Waits to be told by a client.
    fn rest(&mut self, id: u64) {
        if self.active.remove(&id) {
            self.wait_for_messages(id, EventFlags::IN);
        }
    }

    fn wait_for_messages(&self, id: u64, flags: EventFlags) {
        if let Some(client) = self.clients.get(&id)
            && let Err(e) = epoll::modify(&self.epoll, &client.socket, EventData::new_u64(id * 2), flags)
        {
            tracing::debug!(error = %e, "a program's socket is waited for as before");
        }
    }

    /// Looks at an active client's ring and socket.
    fn serve(&mut self, id: u64) {
        match self.drain(id).and_then(|drained| Ok((drained, self.messages(id)?))) {
            Ok((_, Messages::End)) => self.ended(id),
            Ok((drained, messages)) => {
                let is_busy = drained || messages == Messages::More;
                let stays = |client: &mut Client| client.stays_active(is_busy || !client.leaving.is_empty());
                if !self.clients.get_mut(&id).is_some_and(stays) {
                    self.rest(id);
                }
            }
            Err(why) => self.cut(id, &why),
        }
    }

    /// A client is gone: takes what it left behind, and lets it go.
    fn ended(&mut self, id: u64) {
        self.drain_ended(id);
        self.remove(id);
    }

    /// Takes what is in a client's ring; whether there was anything.
    fn drain(&mut self, id: u64) -> Result<bool, CutOff> {
        let Some(client) = self.clients.get_mut(&id).filter(|client| client.asked_until_ns.is_none()) else {
            return Ok(false);
        };
        let Some((ring, _)) = &mut client.ring else { return Ok(false) };
        if client.inside.is_wanted() {
            ring.want_helper(NonZeroU64::new(id));
        }
        let mut leaving = std::mem::take(&mut client.leaving);
        let mut accesses = Vec::new();
        let drained = ring.drain(ACCESSES_A_TURN, |access| accesses.push(access)).map_err(|e| e.to_string())?;
        self.accesses(id, &accesses)?;
        match drained.more {
            // Everything that was pushed before these files were closed has been taken.
            false => leaving.iter().for_each(|number| self.unregister(id, *number)),
            true => {
                if let Some(client) = self.clients.get_mut(&id) {
                    leaving.append(&mut client.leaving);
                    client.leaving = leaving;
                }
            }
        }
        Ok(drained.more || !accesses.is_empty())
    }

    /// Takes everything that a program that has ended left in its ring.
    fn drain_ended(&mut self, id: u64) {
        let Some((ring, _)) = self.clients.get_mut(&id).and_then(|c| c.ring.as_mut()) else { return };
        let mut accesses = Vec::new();
        if ring.drain_ended(|access| accesses.push(access)).is_ok() {
            // It is let go in any case.
            let _ = self.accesses(id, &accesses);
        }
    }

    fn accesses(&mut self, id: u64, accesses: &[RingAccess]) -> Result<(), CutOff> {
        let now = now_ns();
        // A file's registration is sent before its first access is pushed, but may not have been taken yet. Accesses
        // that name no file even when all messages were taken are of files that were refused.
        let mut turns = TURNS_FOR_ACCESSES;
        for access in accesses {
            while turns > 0 && self.clients.get(&id).is_some_and(|c| !c.files.contains_key(&access.file)) {
                turns = if self.messages(id)? == Messages::More { turns - 1 } else { 0 };
            }
            self.access(id, access, now);
        }
        Ok(())
    }

    fn access(&mut self, id: u64, access: &RingAccess, now: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(open) = client.files.get_mut(&access.file) else { return };
        if self.mode == Mode::Record || client.lesson.is_some() {
            let recorded = RecordedAccess {
                file: open.number,
                pid: client.pid,
                thread: access.thread,
                op: access.op,
                flags: access.flags,
                offset: access.offset,
                len_bytes: access.len_bytes,
                start_ns: access.start_ns,
                duration_ns: access.duration_ns,
            };
            self.recorder.tell(|sink| sink.access(&recorded));
            if let Some(lesson) = client.lesson {
                self.lessons.access(lesson, &recorded);
            }
        }
        match access.op {
            Op::Read => {
                self.seen_bytes = self.seen_bytes.saturating_add(access.len_bytes.into());
                if open.is_small {
                    let len_bytes = u64::from(access.len_bytes);
                    let waited_ns = waited_ns(access.op, access.flags, len_bytes, access.duration_ns.into());
                    client.lull.told_read(waited_ns.unwrap_or(0));
                }
            }
            Op::Mmap => self.mapped_bytes = self.mapped_bytes.saturating_add(access.len_bytes.into()),
            _ => {}
        }
        let len_bytes = match access.op {
            Op::Read => u64::from(access.len_bytes),
            // Where a mapping is touched is not told.
            Op::Mmap => u64::from(access.len_bytes),
            Op::Close => return self.unregister(id, access.file),
            Op::Write | Op::Seek => return,
        };
        let Some(advised) = &mut open.advised else { return };
        let inside = Some(&client.inside);
        let acting = Acting { id: advised.id, fd: &advised.fd, uid: client.uid, inside, pool: &self.pool };
        let end = access.offset + len_bytes;
        if access.op == Op::Mmap {
            advised.is_mapped = true;
            return self.files.mapped(&acting, (id, client.pid), access.offset..end, &mut self.users, now);
        }
        let timed = access.op == Op::Read && access.flags & (flag::ASYNC | flag::IN_KERNEL) == 0;
        let duration_ns = if timed { u64::from(access.duration_ns) } else { 0 };
        let read = Read { bytes: access.offset..end, duration_ns, now_ns: now };
        if let Some(how) = self.files.regions(advised.id).and_then(|regions| advised.mode.read(end, regions)) {
            self.files.read_ahead(&acting, how);
        }
        self.files.read(&acting, Reader { program: id, thread: access.thread }, &read, &mut self.users);
    }

    /// Lets a client go that broke the rules: one line in the log.
    fn cut(&mut self, id: u64, why: &str) {
        if let Some(client) = self.clients.get(&id) {
            tracing::warn!(pid = client.pid, uid = client.uid, why, "a program is cut off");
            self.cut_off += 1;
        }
        self.remove(id);
    }

    /// Releases everything of a client.
    fn remove(&mut self, id: u64) {
        let numbers: Vec<u32> = self.clients.get(&id).map(|c| c.files.keys().copied().collect()).unwrap_or_default();
        numbers.into_iter().for_each(|number| self.unregister(id, number));
        self.let_maps_go(id, |_| true);
        self.files.left(&self.pool, id, &mut self.users);
        self.active.remove(&id);
        let Some(client) = self.clients.remove(&id) else { return };
        let _ = epoll::delete(&self.epoll, &client.socket);
        if let Some(socket) = client.inside.hang_up() {
            self.pool.hang_up(socket, client.uid);
        }
        if let Some(lesson) = client.lesson {
            if client.ring.as_ref().is_some_and(|(ring, _)| ring.dropped() > 0) {
                self.lessons.lost(lesson);
            }
            self.lessons.left(lesson, now_ns());
        }
        if let Some((ring, event)) = &client.ring {
            let _ = epoll::delete(&self.epoll, event);
            self.users.drop_ring(client.uid, ring_bytes(ring.slots()) as u64);
            self.dropped_accesses = self.dropped_accesses.saturating_add(ring.dropped());
            self.unseen = self.unseen.and(ring.unseen());
            self.seen_bytes = self.seen_bytes.saturating_add(ring.passed_over_bytes());
        }
        self.users.disconnect(client.uid);
        self.pool.hang_up(client.socket, client.uid);
    }

    fn keep_house(&mut self, now: u64) {
        self.house_kept_ns = now;
        self.users.set_node_bytes(memory::node_budget_bytes());
        self.pool.relieve();
        self.files.keep_house(&self.pool, &mut self.users, now);
        let late = |c: &&Client| c.ring.is_none() && now.saturating_sub(c.since_ns) > HELLO_WITHIN_NS;
        let late: Vec<u64> = self.clients.values().filter(late).map(|c| c.id).collect();
        late.into_iter().for_each(|id| self.cut(id, "it did not say Hello"));
        let with_maps = self.clients.values().filter(|client| !client.mapped.is_empty()).map(|client| client.id);
        for id in with_maps.collect::<Vec<_>>() {
            self.let_maps_go(id, |mapped| is_removed(mapped.fd.as_fd()));
            self.ask_for_maps(id, now);
        }
    }

    fn report(&self) -> Report {
        let (files, others) = self.files.reports();
        let dropped = |c: &Client| c.ring.as_ref().map_or(0, |(ring, _)| ring.dropped());
        let unseen = |c: &Client| c.ring.as_ref().map_or(Unseen::default(), |(ring, _)| ring.unseen());
        let unseen = self.clients.values().map(unseen).fold(self.unseen, Unseen::and);
        let passed_over = |c: &Client| c.ring.as_ref().map_or(0, |(ring, _)| ring.passed_over_bytes());
        let passed_over = self.clients.values().map(passed_over).fold(0, u64::saturating_add);
        let now: u64 = self.clients.values().map(dropped).fold(0, u64::saturating_add);
        Report {
            origin: Origin::default(),
            programs: self.clients.len() as u64,
            programs_ever: self.programs_ever,
            cut_off: self.cut_off,
            dropped_accesses: self.dropped_accesses.saturating_add(now),
            seen_bytes: self.seen_bytes.saturating_add(passed_over),
            mapped_bytes: self.mapped_bytes,
            unseen_bytes: unseen.bytes,
            unseen_rings: unseen.rings,
            coverage: None,
            lessons: self.lessons.tally(),
            siblings_bytes: self.siblings.as_ref().map_or(0, Siblings::brought_bytes),
            held_bytes: self.users.held_bytes(),
            budget_bytes: self.users.node_bytes(),
            files,
            others,
        }
    }
}
