//! The files that have hints, each shared by the programs that have it open.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use impresario_foresight::PREDICTED_MAX;
use rustc_hash::FxHashMap;

use super::pool::{Done, Found, LentFile, Pool, Target, Work};
use super::registration;
use super::users::Users;
use crate::advisor::{Advisor, Read, Reader};
use crate::backend::{FileId, Inside, Progress, cached_pages};
use crate::cache::Action;
use crate::config::{Budget, DeviceCost, Monitored, ReadAhead, StandDown};
use crate::formats::{self, Index};
use crate::regions::RegionMap;
use crate::report::FileReport;

/// How long a program is waited for that is expected to open a file.
const EXPECTED_FOR_NS: u64 = 60_000_000_000;
/// How long one file's maps are looked at, at a time.
const LOOK_MAX: Duration = Duration::from_micros(500);
/// Files whose maps, or quiet reads, are looked at, at most.
const WATCHED_MAX: usize = 64;
/// How long a file that is read by its index is kept when its last program closes it: the readers of some formats open a file
/// again for each read. And how many are kept at once.
const KEPT_FOR_NS: u64 = 2_000_000_000;
const KEPT_MAX: usize = 64;
/// Extents of the indexes of all files, and of those on one user's account, at most: 28 bytes each. As many pieces that kinds predict.
const INDEXED_MAX: (usize, usize) = (1 << 22, 1 << 21);
/// Where others lack room, a file that nobody has read for so long holds nothing.
const IDLE_NS: u64 = 5_000_000_000;
/// Reports of closed files that are kept one by one.
const CLOSED_MAX: usize = 10_000;

struct SharedFile {
    advisor: Advisor,
    /// How often each program has it open, and whose program it is.
    programs: FxHashMap<u64, (u32, u32)>,
    /// No program has it open, but one will.
    expected: Option<Expected>,
    /// The process that mapped it last.
    mapped_by: Option<u32>,
    /// On whose account its bytes are.
    payer: u32,
    /// When a program last opened it, mapped it, or read it.
    heard_of_ns: u64,
    /// For the workers.
    progress: Arc<Progress>,
    report: FileReport,
}

/// A program that will open a file.
struct Expected {
    /// Our own descriptor.
    fd: Arc<LentFile>,
    /// It is waited for until then.
    until_ns: u64,
    /// It had the file open before.
    program: Option<u64>,
}

/// All files that are open somewhere and have hints.
pub(super) struct Files {
    open: FxHashMap<FileId, SharedFile>,
    closed: VecDeque<FileReport>,
    /// The sum of those closed before.
    others: FileReport,
    stand_down: StandDown,
    device: DeviceCost,
    /// Whether the page cache may be looked into here.
    looks: bool,
    /// Files whose maps are looked at.
    watched: FxHashMap<FileId, Arc<LentFile>>,
}

/// What is needed to act on a file: who reads it, by which descriptor, and who does the work.
pub(super) struct Acting<'a> {
    pub(super) id: FileId,
    pub(super) fd: &'a Arc<LentFile>,
    pub(super) uid: u32,
    pub(super) inside: Option<&'a Arc<Inside>>,
    pub(super) pool: &'a Pool,
}

impl Files {
    /// `looks`: whether the kernel says what of a file is in memory, without asking its file system whether we may know.
    pub(super) fn new(stand_down: StandDown, device: DeviceCost, looks: bool) -> Files {
        let (open, watched) = (FxHashMap::default(), FxHashMap::default());
        Files { open, closed: VecDeque::new(), others: FileReport::default(), stand_down, device, looks, watched }
    }

    /// A file, new if no program has it open.
    fn file(
        &mut self,
        acting: &Acting<'_>,
        monitored: &Arc<Monitored>,
        (path, size_bytes): (&Path, u64),
        users: &Users,
    ) -> &mut SharedFile {
        let monitored = match &monitored.learnt {
            Some(_) if !self.open.contains_key(&acting.id) && !self.has_room_for_kind(acting.uid) => {
                tracing::debug!(uid = acting.uid, "no memory for what one more file's kind predicts");
                &Arc::new(Monitored { learnt: None, ..Monitored::clone(monitored) })
            }
            _ => monitored,
        };
        self.open.entry(acting.id).or_insert_with(|| {
            let budget = Budget { per_file: users.per_file_bytes(), ..Budget::default() };
            let report = FileReport {
                path: path.to_string_lossy().into_owned(),
                entry: monitored.key.clone(),
                ..FileReport::default()
            };
            let mut advisor = Advisor::new(monitored.clone(), size_bytes, &budget, self.stand_down, &self.device);
            advisor.may_be(formats::by_name(path));
            let (payer, programs) = (acting.uid, FxHashMap::default());
            let (expected, mapped_by, progress) = (None, None, Arc::default());
            SharedFile { advisor, programs, expected, mapped_by, payer, heard_of_ns: 0, progress, report }
        })
    }

    /// Whether there is memory for what the kind of one more file of this user's predicts.
    fn has_room_for_kind(&self, uid: u32) -> bool {
        let of = |files: &mut dyn Iterator<Item = &SharedFile>| -> usize {
            files.map(|file| file.advisor.learnt_pieces()).sum::<usize>() + PREDICTED_MAX
        };
        let of_user = of(&mut self.open.values().filter(|file| file.payer == uid));
        of_user <= INDEXED_MAX.1 && of(&mut self.open.values()) <= INDEXED_MAX.0
    }

    /// A program is about to open a file; its beginning is brought in already. Nothing is done for a file that is open.
    pub(super) fn expected(
        &mut self,
        acting: &Acting<'_>,
        monitored: &Arc<Monitored>,
        about: (&Path, u64),
        users: &mut Users,
        now_ns: u64,
    ) {
        if self.open.contains_key(&acting.id) {
            return;
        }
        let file = self.file(acting, monitored, about, users);
        let until_ns = now_ns.saturating_add(EXPECTED_FOR_NS);
        file.expected = Some(Expected { fd: acting.fd.clone(), until_ns, program: None });
        file.advise(acting, users, |advisor, may| advisor.expect(now_ns, until_ns, may));
    }

    /// Whether a program is waited for.
    pub(super) fn expects(&self) -> bool {
        self.open.values().any(|file| file.expected.is_some())
    }

    /// Files that no program has opened within the time are let go, and idle ones give others their room.
    pub(super) fn keep_house(&mut self, pool: &Pool, users: &mut Users, now_ns: u64) {
        self.expect_no_more(pool, users, |expected| now_ns >= expected.until_ns);
        let short = users.take_short();
        let is_idle = |file: &SharedFile| now_ns.saturating_sub(file.heard_of_ns) >= IDLE_NS && file.expected.is_none();
        for file in self.open.values_mut().filter(|file| short.concerns(file.payer) && is_idle(file)) {
            file.let_go(users);
        }
    }

    /// A program is gone: it opens no file again.
    pub(super) fn left(&mut self, pool: &Pool, program: u64, users: &mut Users) {
        self.expect_no_more(pool, users, |expected| expected.program == Some(program));
    }

    fn expect_no_more(&mut self, pool: &Pool, users: &mut Users, is_vain: impl Fn(&Expected) -> bool) {
        let vain = |(id, file): (&FileId, &mut SharedFile)| Some((*id, file.expected.take_if(|e| is_vain(e))?));
        let vain: Vec<(FileId, Expected)> = self.open.iter_mut().filter_map(vain).collect();
        for (id, Expected { fd, program, .. }) in vain {
            let Some(file) = self.open.get_mut(&id) else { continue };
            let acting = Acting { id, fd: &fd, uid: file.payer, inside: None, pool };
            file.advise(&acting, users, |advisor, _| advisor.unexpect());
            file.depart(&acting, users, program);
            self.release(&acting, users);
        }
    }

    /// A program has opened a file.
    pub(super) fn opened(
        &mut self,
        acting: &Acting<'_>,
        program: u64,
        monitored: &Arc<Monitored>,
        (path, size_bytes): (&Path, u64),
        users: &mut Users,
        now_ns: u64,
    ) {
        let file = self.file(acting, monitored, (path, size_bytes), users);
        if size_bytes != file.advisor.size_bytes() {
            file.set_size(size_bytes, users);
        }
        if let Some(expected) = file.expected.take() {
            file.submit(&Acting { fd: &expected.fd, inside: None, ..*acting }, Work::Close { last: false });
            file.depart(acting, users, expected.program.filter(|before| *before != program));
        }
        file.heard_of_ns = now_ns;
        file.advise(acting, users, |advisor, may| advisor.opened(program, now_ns, may));
        let (times, _) = file.programs.entry(program).or_insert((0, acting.uid));
        file.report.programs += u64::from(*times == 0);
        *times += 1;
        file.advisor.set_programs(file.programs.len() as u64);
        file.advisor.is_heard_of(now_ns, None);
        self.watch(acting);
    }

    /// A program has read.
    pub(super) fn read(&mut self, acting: &Acting<'_>, reader: Reader, read: &Read, users: &mut Users) {
        let Some(file) = self.open.get_mut(&acting.id) else { return };
        file.heard_of_ns = read.now_ns;
        file.report.reads += 1;
        file.report.read_bytes += read.bytes.end - read.bytes.start;
        file.report.read_ns = file.report.read_ns.saturating_add(read.duration_ns);
        if read.bytes.end > file.advisor.size_bytes()
            && let Some(size) = registration::size_bytes(acting.fd.as_fd())
            && size > file.advisor.size_bytes()
        {
            file.set_size(size, users);
        }
        file.progress.passed.store(read.bytes.end, Relaxed);
        file.advise(acting, users, |advisor, may| advisor.read(reader, read, may));
        if let Some((formats, place)) = file.advisor.take_index_wish() {
            // Refused, it is not answered.
            if !file.submit(acting, Work::Index(formats, place)) {
                file.advisor.has_no_index(read.now_ns);
            }
        }
        self.watch(acting);
    }

    /// A program has mapped a part of the file into memory.
    pub(super) fn mapped(
        &mut self,
        acting: &Acting<'_>,
        (program, pid): (u64, u32),
        bytes: Range<u64>,
        users: &mut Users,
        now_ns: u64,
    ) {
        let Some(file) = self.open.get_mut(&acting.id) else { return };
        (file.mapped_by, file.heard_of_ns) = (Some(pid), now_ns);
        file.advise(acting, users, |advisor, may| advisor.mapped(program, bytes, now_ns, may));
        self.watch(acting);
    }

    /// A file is looked at from now on, if its advisor wants that.
    fn watch(&mut self, acting: &Acting<'_>) {
        let wants = self.looks && self.open.get(&acting.id).is_some_and(|file| file.advisor.look_at_map_ns().is_some());
        if wants && self.watched.len() < WATCHED_MAX {
            self.watched.entry(acting.id).or_insert_with(|| acting.fd.clone());
        }
    }

    /// Looks at maps of files without a plan whose time has come; when to look again.
    pub(super) fn look_at_maps(&mut self, pool: &Pool, users: &mut Users, now_ns: u64) -> Option<u64> {
        let mut next: Option<u64> = None;
        self.watched.retain(|id, fd| {
            let Some(file) = self.open.get_mut(id) else { return false };
            if file.advisor.look_at_map_ns().is_some_and(|at| now_ns >= at) {
                let acting = Acting { id: *id, fd, uid: file.payer, inside: None, pool };
                let began = Instant::now();
                let mut cached = |range: Range<u64>| {
                    if began.elapsed() > LOOK_MAX {
                        return None;
                    }
                    let len = range.end.saturating_sub(range.start);
                    cached_pages(fd.as_fd(), range).ok().map(|pages| pages.of_bytes(len))
                };
                file.advise(&acting, users, |advisor, may| advisor.look_at_map(now_ns, &mut cached, may));
                file.look_at_page_table(&acting, now_ns);
            }
            let at = file.advisor.look_at_map_ns();
            next = next.into_iter().chain(at).min();
            at.is_some()
        });
        next
    }

    /// What is done for a file that is open.
    pub(super) fn monitored(&self, id: FileId) -> Option<&Arc<Monitored>> {
        self.open.get(&id).map(|file| file.advisor.monitored())
    }

    /// Whether an open file was read otherwise than others of its kind.
    pub(super) fn has_strayed(&self, id: FileId) -> bool {
        self.open.get(&id).is_some_and(|file| file.advisor.has_strayed())
    }

    /// The regions of an open file.
    pub(super) fn regions(&self, id: FileId) -> Option<&RegionMap> {
        self.open.get(&id).map(|file| &file.advisor.monitored().regions)
    }

    /// The kernel's read-ahead of an open file is to change.
    pub(super) fn read_ahead(&mut self, acting: &Acting<'_>, how: ReadAhead) {
        if let Some(file) = self.open.get_mut(&acting.id) {
            file.report.read_ahead = how;
            file.submit(acting, Work::ReadAhead(how));
        }
    }

    /// A program has closed a file, or is gone. The descriptor is closed by a worker.
    pub(super) fn closed(&mut self, acting: &Acting<'_>, program: u64, users: &mut Users, now_ns: u64) {
        let by_index = self.open.get(&acting.id).is_some_and(|file| file.advisor.goes_by_index());
        let is_kept = by_index && self.open.values().filter(|file| file.expected.is_some()).count() < KEPT_MAX;
        let Some(file) = self.open.get_mut(&acting.id) else { return };
        let Some((times, _)) = file.programs.get_mut(&program) else { return };
        *times -= 1;
        if *times == 0 {
            file.programs.remove(&program);
            file.advisor.set_programs(file.programs.len() as u64);
            if file.programs.is_empty() && is_kept {
                let (fd, until_ns) = (acting.fd.clone(), now_ns.saturating_add(KEPT_FOR_NS));
                file.expected = Some(Expected { fd, until_ns, program: Some(program) });
                return;
            }
            file.depart(acting, users, Some(program));
            file.hand_on(users);
        }
        self.release(acting, users);
    }

    /// A descriptor of a file is not needed any more, and the file is not if no program has it open.
    fn release(&mut self, acting: &Acting<'_>, users: &mut Users) {
        let Some(file) = self.open.get_mut(&acting.id) else { return };
        let last = file.programs.is_empty();
        file.progress.ended.store(last, Relaxed);
        file.submit(acting, Work::Close { last });
        if last && let Some(file) = self.open.remove(&acting.id) {
            users.held(file.payer, file.advisor.held_bytes(), 0);
            // The descriptor is closed by the worker that has the last of it.
            self.watched.remove(&acting.id);
            self.remember(file.report());
        }
    }

    /// A worker is done.
    pub(super) fn done(&mut self, done: Done, now_ns: u64) {
        if let Some(Found::Index(index)) = done.found {
            return self.index_is_read(done.id, index, now_ns);
        }
        let Some(file) = self.open.get_mut(&done.id) else { return };
        if let Some(Found::PageTable(parts)) = done.found {
            return file.advisor.page_table_is_known(parts.as_deref());
        }
        file.report.backend = done.backend.into();
        match done.result {
            Err(e) => {
                if file.report.errors == 0 {
                    tracing::warn!(path = file.report.path, error = %e, "the system refuses hints");
                }
                file.report.errors += 1;
                if !done.range.is_empty() {
                    file.advisor.failed(&done.range, now_ns);
                }
            }
            Ok(brought) => {
                file.report.calls += brought.calls;
                file.report.found_bytes += if done.fresh { brought.found_bytes } else { 0 };
                file.report.missed_bytes += brought.missed_bytes;
                if let Some(took_ns) = done.took_ns {
                    return file.advisor.tried(&done.range, brought.found_bytes, took_ns, now_ns);
                }
                file.advisor.hinted(done.range, brought.found_bytes, done.fresh, now_ns);
            }
        }
    }

    /// A file's index is followed, if there is room for it in memory.
    fn index_is_read(&mut self, id: FileId, index: Option<Index>, now_ns: u64) {
        let Some(payer) = self.open.get(&id).map(|file| file.payer) else { return };
        // What is known of this one is replaced.
        let others = || self.open.iter().filter(|(other, _)| **other != id).map(|(_, file)| file);
        let of_all: usize = others().map(|file| file.advisor.index_extents()).sum();
        let of_user = others().filter(|file| file.payer == payer).map(|file| file.advisor.index_extents());
        let of_user: usize = of_user.sum();
        let fits = |index: &Index| {
            let more = index.tracks.extents();
            let fits = of_all + more <= INDEXED_MAX.0 && of_user + more <= INDEXED_MAX.1;
            if !fits {
                tracing::debug!(of_all, of_user, more, "no memory for one more file's index");
            }
            fits
        };
        let index = index.filter(fits);
        let Some(file) = self.open.get_mut(&id) else { return };
        match index {
            Some(index) => file.advisor.index_is_known(index, now_ns),
            None => file.advisor.has_no_index(now_ns),
        }
    }

    /// Reports of all files, those read most first, and the sum of those closed long ago.
    pub(super) fn reports(&self) -> (Vec<FileReport>, FileReport) {
        let mut files: Vec<FileReport> = self.open.values().map(SharedFile::report).collect();
        files.extend(self.closed.iter().cloned());
        files.sort_by(|a, b| b.read_bytes.cmp(&a.read_bytes).then_with(|| a.path.cmp(&b.path)));
        (files, self.others.clone())
    }

    fn remember(&mut self, report: FileReport) {
        // Opened once more later, a file goes on where it was.
        if let Some(same) =
            self.closed.iter_mut().rev().take(64).find(|c| c.path == report.path && c.entry == report.entry)
        {
            same.add(&report);
            (same.backend, same.read_ahead) = (report.backend, report.read_ahead);
            (same.gain_percent, same.why_stood_down) = (report.gain_percent, report.why_stood_down);
            same.strayed |= report.strayed;
            same.index.clone_from(&report.index);
            return;
        }
        self.closed.push_back(report);
        if self.closed.len() > CLOSED_MAX
            && let Some(oldest) = self.closed.pop_front()
        {
            self.others.add(&oldest);
        }
    }
}

impl SharedFile {
    /// Asks the advisor and does what it says; what is brought in must fit into the payer's budget.
    fn advise(
        &mut self,
        acting: &Acting<'_>,
        users: &mut Users,
        ask: impl FnOnce(&mut Advisor, &mut dyn FnMut(u64) -> bool) -> Vec<Action>,
    ) {
        let held = self.advisor.held_bytes();
        let room = users.room_bytes(self.payer, held);
        let (mut granted, mut refused) = (0, 0);
        let actions = ask(&mut self.advisor, &mut |bytes| {
            let fits = granted + bytes <= room;
            match fits {
                true => granted += bytes,
                false => refused += 1,
            }
            fits
        });
        self.report.refused += refused;
        if refused > 0 {
            users.is_short(self.payer, held);
        }
        users.held(self.payer, held, self.advisor.held_bytes());
        self.perform(actions, acting);
    }

    /// The file's length changed; what was brought in and is forgotten by that is on no account any more.
    fn set_size(&mut self, size_bytes: u64, users: &mut Users) {
        let held = self.advisor.held_bytes();
        self.advisor.set_size(size_bytes);
        users.held(self.payer, held, self.advisor.held_bytes());
    }

    /// When the one who pays has no program any more that reads the file, one who has takes over what it holds.
    fn hand_on(&mut self, users: &mut Users) {
        let readers = || self.programs.values().map(|(_, uid)| *uid);
        if readers().any(|uid| uid == self.payer) {
            return;
        }
        if let Some(uid) = readers().min() {
            let held = self.advisor.held_bytes();
            users.held(self.payer, held, 0);
            users.held(uid, 0, held);
            self.payer = uid;
        }
    }

    /// Nothing is held for its programs until they read on. What was brought in is the kernel's to keep.
    fn let_go(&mut self, users: &mut Users) {
        let held = self.advisor.held_bytes();
        if held > 0 {
            self.programs.keys().for_each(|program| drop(self.advisor.depart(*program)));
            users.held(self.payer, held, self.advisor.held_bytes());
        }
    }

    fn depart(&mut self, acting: &Acting<'_>, users: &mut Users, program: Option<u64>) {
        if let Some(program) = program {
            self.advise(acting, users, |advisor, _| advisor.depart(program));
        }
    }

    /// Asks which parts the program touched without waiting, if its advisor wants to know.
    fn look_at_page_table(&mut self, acting: &Acting<'_>, now_ns: u64) {
        let Some(parts) = self.advisor.take_page_table_wish(now_ns) else { return };
        let Some(pid) = self.mapped_by else { return self.advisor.page_table_is_known(None) };
        if !self.submit(acting, Work::PageTable(pid, parts)) {
            self.advisor.page_table_is_known(Some(&[]));
        }
    }

    fn perform(&mut self, actions: Vec<Action>, acting: &Acting<'_>) {
        for action in actions {
            let asked = action.asked().cloned();
            let work = match action {
                Action::Prefetch(range) => Work::WillNeed { range, fresh: true },
                Action::Renew(range) => Work::WillNeed { range, fresh: false },
                Action::Try(range) => Work::Try(range),
                Action::Exactly(range) => Work::Exactly(range),
                Action::Release(range) => {
                    self.report.released_bytes += range.end - range.start;
                    Work::DontNeed(range)
                }
            };
            self.report.hints += u64::from(matches!(work, Work::WillNeed { .. } | Work::Exactly(_) | Work::Try(_)));
            if !self.submit(acting, work)
                && let Some(asked) = asked
            {
                self.advisor.failed(&asked, 0);
            }
        }
    }

    /// False where it was refused.
    fn submit(&mut self, acting: &Acting<'_>, work: Work) -> bool {
        let target = Target {
            id: acting.id,
            fd: acting.fd.clone(),
            backend: self.advisor.monitored().entry.backend,
            uid: acting.uid,
            progress: self.progress.clone(),
            inside: acting.inside.cloned(),
        };
        let taken = acting.pool.submit(target, work);
        self.report.refused += u64::from(!taken);
        taken
    }

    fn report(&self) -> FileReport {
        let tally = self.advisor.tally();
        FileReport {
            open: self.programs.len() as u64,
            prefetched_bytes: tally.prefetched_bytes,
            used_bytes: tally.used_bytes,
            wasted_bytes: tally.wasted_bytes,
            hits: tally.hits,
            misses: tally.misses,
            gain_percent: self.advisor.gain_percent(),
            stood_down: self.advisor.stood_down(),
            why_stood_down: self.advisor.why_down().map(|why| why.to_string()),
            strayed: self.advisor.has_strayed(),
            index: self.advisor.index_format().unwrap_or_default().into(),
            ..self.report.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::mpsc;

    use impresario_foresight::Tracks;

    use super::*;
    use crate::backend::{Backends, Brought};
    use crate::config::{Entry, Limits, Region};

    const MIB: u64 = 1 << 20;
    const PATH: &str = "/data/a.parquet";

    /// Files, their users, and one file of 8 MiB that is read by its index.
    struct Setting {
        files: Files,
        users: Users,
        pool: Arc<Pool>,
        fd: Arc<LentFile>,
        monitored: Arc<Monitored>,
        uid: u32,
    }

    impl Setting {
        fn new() -> Setting {
            let (send, _) = mpsc::channel();
            let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
            let file = tempfile::tempfile().unwrap();
            file.set_len(8 * MIB).unwrap();
            let entry = Entry { online: true, ..Entry::new(PATH) };
            let regions = RegionMap::of(&entry);
            Setting {
                files: Files::new(StandDown { trial: false, ..StandDown::default() }, DeviceCost::default(), true),
                users: Users::new(Limits::default(), Budget { per_file: 1 << 30, ..Budget::default() }, 1 << 30),
                pool,
                fd: Arc::new(OwnedFd::from(file).into()),
                monitored: Arc::new(Monitored { key: "*".into(), entry, regions, learnt: None }),
                uid: 7,
            }
        }

        fn act(&mut self, ino: u64, act: impl FnOnce(&mut Files, &Acting<'_>, &Arc<Monitored>, &mut Users)) {
            let id = FileId { dev: 1, ino };
            let acting = Acting { id, fd: &self.fd, uid: self.uid, inside: None, pool: &self.pool };
            act(&mut self.files, &acting, &self.monitored, &mut self.users);
        }

        fn open(&mut self, ino: u64, size_bytes: u64) {
            self.act(ino, |files, acting, monitored, users| {
                files.opened(acting, 1, monitored, (Path::new(PATH), size_bytes), users, 0);
            });
        }

        fn read(&mut self, ino: u64, bytes: Range<u64>) {
            // Each user has one program.
            let program = u64::from(self.uid) - 6;
            let (reader, read) = (Reader { program, thread: 1 }, Read { bytes, duration_ns: 0, now_ns: 0 });
            self.act(ino, |files, acting, _, users| files.read(acting, reader, &read, users));
        }

        /// The index comes: so many extents in the reverse order.
        fn index(&mut self, ino: u64, extents: u64) {
            let len = 4 * MIB / extents;
            let extents = (0..extents).rev().map(|i| i * len..(i + 1) * len).collect();
            self.files.done(
                Done {
                    id: FileId { dev: 1, ino },
                    range: 0..0,
                    fresh: false,
                    took_ns: None,
                    found: Some(Found::Index(Some(Index {
                        format: "Parquet",
                        tracks: Tracks::new([extents], 8 * MIB),
                        size_bytes: 8 * MIB,
                        is_partial: false,
                        spent: formats::Spent::default(),
                    }))),
                    backend: "",
                    result: Ok(Brought::default()),
                },
                0,
            );
        }

        fn format(&self, ino: u64) -> Option<&'static str> {
            self.files.open[&FileId { dev: 1, ino }].advisor.index_format()
        }
    }

    impl Drop for Setting {
        fn drop(&mut self) {
            self.pool.stop(Duration::from_secs(20));
        }
    }

    /// Where no more work is taken an index that is wanted never comes.
    #[test]
    fn an_index_that_is_refused_is_not_waited_for() {
        let mut setting = Setting::new();
        setting.open(1, 8 * MIB);
        setting.pool.stop(Duration::from_secs(20));
        setting.read(1, 5 * MIB..5 * MIB + 10);
        let file = &setting.files.open[&FileId { dev: 1, ino: 1 }];
        assert!(file.report.refused > 0 && !file.advisor.goes_by_index());
    }

    #[test]
    fn what_a_change_of_length_forgets_is_on_no_account() {
        let mut setting = Setting::new();
        setting.open(1, 8 * MIB);
        setting.read(1, 5 * MIB..5 * MIB + 10);
        setting.index(1, 64);
        assert_eq!(setting.format(1), Some("Parquet"));
        setting.read(1, 63 * 65_536..64 * 65_536);
        assert_eq!(setting.users.held_bytes(), 65_536);
        setting.open(1, 7 * MIB);
        assert_eq!((setting.users.held_bytes(), setting.format(1)), (0, None));
    }

    #[test]
    fn who_still_reads_a_shared_file_pays_for_it() {
        let mut setting = Setting::new();
        setting.open(1, 8 * MIB);
        setting.read(1, 5 * MIB..5 * MIB + 10);
        setting.index(1, 64);
        setting.read(1, 63 * 65_536..64 * 65_536);
        setting.uid = 8;
        setting.act(1, |files, acting, monitored, users| {
            files.opened(acting, 2, monitored, (Path::new(PATH), 8 * MIB), users, 0);
        });
        setting.read(1, 40 * 65_536..41 * 65_536);
        let per_user = |setting: &Setting| [7, 8].map(|uid| setting.users.room_bytes(uid, 0));
        let before = per_user(&setting);
        assert_eq!((setting.users.held_bytes(), before[1] - before[0]), (2 * 65_536, 2 * 65_536), "the first one pays");
        setting.uid = 7;
        setting.act(1, |files, acting, _, users| files.closed(acting, 1, users, 0));
        let after = per_user(&setting);
        let held = setting.users.held_bytes();
        assert!(held >= 65_536);
        assert_eq!(setting.files.open[&FileId { dev: 1, ino: 1 }].payer, 8);
        assert_eq!(after[0] - after[1], held, "the one who is left pays");
        setting.uid = 8;
        setting.act(1, |files, acting, _, users| files.closed(acting, 2, users, 0));
        setting.act(1, |files, acting, _, users| files.left(acting.pool, 2, users));
        assert_eq!(setting.users.held_bytes(), 0);
    }

    /// A program that keeps many files open. The first ones kept all room, whatever it read later.
    #[test]
    fn a_file_that_nobody_reads_gives_others_its_room() {
        let mut setting = Setting::new();
        let entry = Entry { will_need: vec![Region { offset: 0, length: 0 }], ..Entry::new(PATH) };
        let regions = RegionMap::of(&entry);
        setting.monitored = Arc::new(Monitored { key: PATH.into(), entry, regions, learnt: None });
        setting.users = Users::new(Limits::default(), Budget { per_user: 6 * MIB, ..Budget::default() }, 1 << 40);
        let second_ns = 1_000_000_000;
        let read = |setting: &mut Setting, ino: u64, at: u64, now_ns: u64| {
            let read = Read { bytes: at..at + 10, duration_ns: 0, now_ns };
            let reader = Reader { program: 1, thread: 1 };
            setting.act(ino, |files, acting, _, users| files.read(acting, reader, &read, users));
        };
        let held = |setting: &Setting, ino| setting.files.open[&FileId { dev: 1, ino }].advisor.held_bytes();
        setting.open(1, 8 * MIB);
        setting.open(2, 8 * MIB);
        read(&mut setting, 1, 0, 0);
        assert!(held(&setting, 1) >= 4 * MIB, "{}", held(&setting, 1));
        for second in 0..20 {
            read(&mut setting, 2, second * 1000, second * second_ns);
            setting.act(1, |files, acting, _, users| files.keep_house(acting.pool, users, second * second_ns));
            assert!(setting.users.held_bytes() <= 6 * MIB);
        }
        assert_eq!(held(&setting, 1), 0);
        assert!(held(&setting, 2) >= 4 * MIB, "{}", held(&setting, 2));
        // While nobody lacks room, a file keeps what it has.
        setting.act(1, |files, acting, _, users| files.keep_house(acting.pool, users, 1000 * second_ns));
        assert!(held(&setting, 2) >= 4 * MIB);
        // And the first one is advised again as soon as there is room.
        setting.act(2, |files, acting, _, users| files.closed(acting, 1, users, 0));
        read(&mut setting, 1, 2 * MIB, 1001 * second_ns);
        assert!(held(&setting, 1) >= 4 * MIB);
    }

    /// A program that opens a file for each read of it, as those of Zarr do.
    #[test]
    fn a_file_that_is_opened_for_each_read_keeps_its_index() {
        let mut setting = Setting::new();
        let chunk = |n: u64| n * 65_536..(n + 1) * 65_536;
        let now = |n: u64| n * KEPT_FOR_NS / 2;
        setting.open(1, 8 * MIB);
        setting.read(1, 5 * MIB..5 * MIB + 10);
        // Closed before its index is there.
        setting.act(1, |files, acting, _, users| files.closed(acting, 1, users, 0));
        setting.index(1, 64);
        for n in 1..40 {
            setting.act(1, |files, acting, _, users| files.keep_house(acting.pool, users, now(n)));
            setting.open(1, 8 * MIB);
            setting.read(1, chunk(64 - n));
            setting.act(1, |files, acting, _, users| files.closed(acting, 1, users, now(n)));
        }
        let report = setting.files.reports().0.remove(0);
        assert_eq!((report.open, report.index.as_str()), (0, "Parquet"));
        assert!(report.hits >= 37 && report.wasted_bytes == 0, "{report:?}");
        assert!(setting.users.held_bytes() > 0);
        setting.act(1, |files, acting, _, users| files.keep_house(acting.pool, users, now(50)));
        assert_eq!((setting.users.held_bytes(), setting.files.open.len()), (0, 0), "it does not come back");
        assert!(setting.files.reports().0[0].wasted_bytes > 0);
        // Of another program's file nothing is kept for the one before, and no more than so many are.
        setting.open(1, 8 * MIB);
        setting.read(1, 5 * MIB..5 * MIB + 10);
        setting.index(1, 64);
        setting.act(1, |files, acting, _, users| files.closed(acting, 1, users, 0));
        setting.uid = 8;
        setting.act(1, |files, acting, monitored, users| {
            files.opened(acting, 2, monitored, (Path::new(PATH), 8 * MIB), users, 0);
            files.left(acting.pool, 1, users);
        });
        assert_eq!(setting.files.reports().0.iter().map(|report| report.open).sum::<u64>(), 1);
        setting.uid = 7;
        for ino in 10..10 + 2 * KEPT_MAX as u64 {
            setting.open(ino, 8 * MIB);
            setting.read(ino, 5 * MIB..5 * MIB + 10);
            setting.act(ino, |files, acting, _, users| files.closed(acting, 1, users, 0));
        }
        assert_eq!(setting.files.open.len(), 1 + KEPT_MAX);
    }

    /// A user with many files open of a kind of which much is predicted.
    #[test]
    fn predictions_beyond_the_memory_for_them_are_left_out() {
        use impresario_foresight::{Sample, Shape};
        let mut setting = Setting::new();
        let size_bytes = 1024 * MIB;
        let scattered = |size: u64| Sample::of(size, (0..size / 65_536).map(|i| i * 65_536..i * 65_536 + 100)).unwrap();
        let shape = Arc::new(Shape::learn(&[&scattered(size_bytes), &scattered(2 * size_bytes)]));
        assert_eq!(shape.predict(size_bytes).len(), PREDICTED_MAX);
        setting.monitored = Arc::new(Monitored { learnt: Some(shape), ..Monitored::clone(&setting.monitored) });
        let most = (INDEXED_MAX.1 / PREDICTED_MAX) as u64;
        for ino in 0..most + 1 {
            setting.open(ino, size_bytes);
            let pieces = setting.files.open[&FileId { dev: 1, ino }].advisor.learnt_pieces();
            assert_eq!(pieces > 0, ino < most, "file {ino}");
        }
    }

    #[test]
    fn indexes_beyond_the_memory_for_them_are_dropped() {
        let mut setting = Setting::new();
        let most = (INDEXED_MAX.1 / impresario_foresight::EXTENTS_MAX) as u64;
        for ino in 0..most + 1 {
            setting.open(ino, 8 * MIB);
            setting.read(ino, 5 * MIB..5 * MIB + 10);
            setting.index(ino, impresario_foresight::EXTENTS_MAX as u64);
            assert_eq!(setting.format(ino).is_some(), ino < most, "file {ino}");
        }
    }
}
