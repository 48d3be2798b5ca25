//! What programs of a run will read of the cluster's files, foreseen as guided I/O does it for files of the machine: by what was learnt
//! of their kinds, by their own indexes, and by the pattern of reads. The data servers are asked to have it in their memory.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_assist::advisor::{Advisor, Read, Reader};
use impresario_assist::cache::Action;
use impresario_assist::config::{Budget, DeviceCost, Entry, Monitored, StandDown};
use impresario_assist::formats;
use impresario_assist::learn::{Facts, Kind, MAGIC_BYTES, find, program_of_process};
use impresario_assist::manager::Asked;
use impresario_assist::regions::RegionMap;
use impresario_client::File;
use impresario_run::{Foresees, HasRead, Opened};

use crate::assist::known;

/// Shorter files take few requests.
const FILE_BYTES_MIN: u64 = 64 << 10;
/// What a read from a server's memory takes, mostly the way there: no hint shortens that.
const FROM_SERVER_MEMORY: Duration = Duration::from_micros(500);
/// What is asked for and not read yet, of one file and of all: servers' room is shared with other clients.
const FILE_BYTES_MAX: u64 = 16 << 20;
const ALL_BYTES_MAX: u64 = 64 << 20;
/// Pieces of all files that are known by their kinds and indexes.
const PIECES_MAX: usize = 1 << 20;
/// What was learnt of a program counts as known for so long, since runs are learnt from meanwhile, and of so many programs.
const KNOWN_FOR: Duration = Duration::from_secs(10);
const PROGRAMS_MAX: usize = 64;
/// A trial reads no more at a time.
const TRIAL_PIECE_BYTES: u64 = 1 << 20;

/// Foresees what the programs of a run read.
pub struct Guided {
    began: Instant,
    device: DeviceCost,
    online: Monitored,
    programs: HashMap<String, (Instant, Arc<[Kind]>)>,
    files: HashMap<u64, Followed>,
    /// What is asked for and not read of all of them, bytes.
    held: u64,
}

/// One open file.
struct Followed {
    advisor: Advisor,
    /// What it has of that sum, bytes.
    held: u64,
    /// What was asked for, and when the servers have it, as far as can be told: they say only that they take the hint.
    awaited: VecDeque<(u64, Range<u64>)>,
}

impl Guided {
    pub fn new() -> Guided {
        let entry = Entry { online: true, ..Entry::new("/") };
        let regions = RegionMap::of(&entry);
        let online = Monitored { key: "online".into(), entry, regions, learnt: None };
        let (programs, files) = (HashMap::new(), HashMap::new());
        Guided { began: Instant::now(), device: DeviceCost::default(), online, programs, files, held: 0 }
    }

    fn ns(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_nanos() as u64
    }

    /// What was learnt of the program of a process.
    fn kinds_of(&mut self, pid: u32) -> Arc<[Kind]> {
        let Some(name) = program_of_process(pid) else { return Arc::default() };
        if let Some((since, kinds)) = self.programs.get(&name)
            && since.elapsed() < KNOWN_FOR
        {
            return kinds.clone();
        }
        if self.programs.len() >= PROGRAMS_MAX {
            self.programs.clear();
        }
        let uid = rustix::process::geteuid().as_raw();
        let kinds: Arc<[Kind]> = known::of_own(&Asked { uid, pid, program: &name }).kinds.into();
        self.programs.insert(name, (Instant::now(), kinds.clone()));
        kinds
    }

    /// What is known of a file by its kind.
    fn monitored(&mut self, file: &File, opened: &Opened) -> Monitored {
        let pieces = self.files.values().map(|file| file.advisor.learnt_pieces() + file.advisor.index_extents());
        if pieces.sum::<usize>() >= PIECES_MAX {
            return self.online.clone();
        }
        let kinds = opened.pid.map(|pid| self.kinds_of(pid)).unwrap_or_default();
        let facts = |magic: Option<&[u8]>| Facts::of(&opened.path, opened.size_bytes, magic);
        let mut kind = find(&kinds, &facts(None));
        if kind.is_some_and(|kind| kind.files.magic.is_some()) {
            let mut magic = [0; MAGIC_BYTES];
            let len = file.read_at(&mut magic, 0).unwrap_or(0);
            kind = find(&kinds, &facts(magic.get(..len)));
        }
        match kind {
            Some(kind) => {
                let (key, learnt) = (format!("learnt of {}", kind.files.words()), Some(kind.shape.clone()));
                Monitored { key, learnt, ..self.online.clone() }
            }
            None => self.online.clone(),
        }
    }

    /// Asks the advisor of a file, and does what it says.
    fn advise(
        &mut self,
        number: u64,
        file: &File,
        ask: impl FnOnce(&mut Advisor, &mut dyn FnMut(u64) -> bool) -> Vec<Action>,
    ) {
        let Some(followed) = self.files.get_mut(&number) else { return };
        let mut room = ALL_BYTES_MAX.saturating_sub(self.held);
        let actions = ask(&mut followed.advisor, &mut |bytes| {
            let fits = bytes <= room;
            room -= if fits { bytes } else { 0 };
            fits
        });
        self.held -= std::mem::replace(&mut followed.held, followed.advisor.held_bytes());
        self.held += followed.held;
        for action in actions {
            let began = Instant::now();
            match action {
                Action::Prefetch(range) | Action::Renew(range) | Action::Exactly(range) => {
                    let len = range.end - range.start;
                    let is_taken = file.prefetch(range.start, len).is_ok_and(|accepted| accepted > 0);
                    let now_ns = began.saturating_duration_since(self.began).as_nanos() as u64;
                    match is_taken {
                        true => followed.awaited.push_back((now_ns + there_after_ns(&self.device, len), range)),
                        false => followed.advisor.failed(&range, now_ns),
                    }
                }
                // Read as the program reads: how long that takes is what the trial is for.
                Action::Try(range) => {
                    let is_read = read(file, range.clone());
                    let now_ns = self.began.elapsed().as_nanos() as u64;
                    match is_read {
                        true => followed.advisor.tried(&range, 0, began.elapsed().as_nanos() as u64, now_ns),
                        false => followed.advisor.failed(&range, now_ns),
                    }
                }
                // The servers' memory is theirs to keep.
                Action::Release(_) => {}
            }
        }
    }
}

/// When a device has read so much that was asked for.
fn there_after_ns(device: &DeviceCost, bytes: u64) -> u64 {
    let transfer_us = bytes / device.mib_per_s.max(1);
    device.request_us.saturating_add(transfer_us).saturating_mul(1000)
}

/// Reads some bytes to no avail.
fn read(file: &File, range: Range<u64>) -> bool {
    let mut into = vec![0; (range.end - range.start).min(TRIAL_PIECE_BYTES) as usize];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(TRIAL_PIECE_BYTES) as usize;
        match into.get_mut(..len).map(|into| file.read_at(into, at)) {
            Some(Ok(read)) if read > 0 => at += read as u64,
            _ => return false,
        }
    }
    true
}

impl Foresees for Guided {
    fn opened(&mut self, file: &File, opened: &Opened) {
        if opened.size_bytes < FILE_BYTES_MIN {
            return;
        }
        let monitored = Arc::new(self.monitored(file, opened));
        let budget = Budget { per_file: FILE_BYTES_MAX, ..Budget::default() };
        let mut advisor = Advisor::new(monitored, opened.size_bytes, &budget, StandDown::default(), &self.device);
        advisor.may_be(formats::by_name(&opened.path));
        advisor.set_programs(1);
        self.files.insert(opened.number, Followed { advisor, held: 0, awaited: VecDeque::new() });
        let (program, now_ns) = (u64::from(opened.pid.unwrap_or(0)), self.ns(Instant::now()));
        self.advise(opened.number, file, |advisor, may| advisor.opened(program, now_ns, may));
    }

    fn read(&mut self, file: &File, read: &HasRead) {
        let (now_ns, duration) = (self.ns(read.ended), read.took.saturating_sub(FROM_SERVER_MEMORY));
        let Some(Followed { advisor, awaited, .. }) = self.files.get_mut(&read.number) else { return };
        while awaited.front().is_some_and(|(at_ns, _)| *at_ns <= now_ns)
            && let Some((_, range)) = awaited.pop_front()
        {
            advisor.hinted(range, 0, true, now_ns);
        }
        if read.bytes.end > advisor.size_bytes() {
            advisor.set_size(read.bytes.end);
        }
        // The agent does not know the program's threads; 0 would be a duration that is not known.
        let reader = Reader { program: read.pid.unwrap_or(0).into(), thread: 0 };
        let seen = Read { bytes: read.bytes.clone(), duration_ns: duration.as_nanos().max(1) as u64, now_ns };
        self.advise(read.number, file, |advisor, may| advisor.read(reader, &seen, may));
        let Some(Followed { advisor, .. }) = self.files.get_mut(&read.number) else { return };
        if let Some((formats, _)) = advisor.take_index_wish() {
            let size_bytes = advisor.size_bytes();
            let read_at = |at, into: &mut [u8]| {
                file.read_at(into, at).map_err(|error| std::io::Error::from_raw_os_error(error.errno()))
            };
            let index = formats::read(&formats, size_bytes, &read_at);
            let now_ns = self.began.elapsed().as_nanos() as u64;
            match index {
                Some(index) => advisor.index_is_known(index, now_ns),
                None => advisor.has_no_index(now_ns),
            }
        }
    }

    fn closed(&mut self, number: u64) {
        self.held -= self.files.remove(&number).map_or(0, |followed| followed.held);
    }
}
