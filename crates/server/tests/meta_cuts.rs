//! Truncations in the middle of which the metadata server is killed, while a data server's machine may lose power: every step of
//! the server may be the last, and the power may fail at every moment. In virtual time, in one thread; each case is a number, and
//! the same number is the same case.
//!
//! What must hold: a client whose fsync succeeds has the length that it set, also after another power failure; and whoever appends
//! afterwards does so behind the last byte, leaving no gap.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_server::meta::{self, Fate, MemoryObjects, MetaOptions, MetaService, Objects};
use impresario_wire::message::*;

use crate::meta_support::*;

/// The data servers on one machine that can lose its power: what was not synced is as it was before.
#[derive(Default)]
struct Machine {
    objects: MemoryObjects,
    boots: AtomicU64,
    durable_bytes: Mutex<BTreeMap<u64, (Layout, u64)>>,
}

impl Machine {
    fn lose_power(&self) {
        self.boots.fetch_add(1, Ordering::SeqCst);
        for (file, (layout, len_bytes)) in &*self.durable_bytes.lock() {
            self.objects.truncate(&Who::default(), FileKey(*file), layout, *len_bytes).unwrap();
        }
    }

    fn states(&self, layout: &Layout) -> Vec<LaneState> {
        let incarnation = (1 + self.boots.load(Ordering::SeqCst)) << 32;
        (0..layout.pcount).map(|k| LaneState::new(layout.server_at(k), incarnation, 0)).collect()
    }
}

impl Objects for Machine {
    fn stat(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo> {
        self.objects.stat(file, layout)
    }

    fn truncate(&self, who: &Who, file: FileKey, layout: &Layout, len_bytes: u64) -> io::Result<Vec<LaneState>> {
        self.objects.truncate(who, file, layout, len_bytes)?;
        Ok(self.states(layout))
    }

    fn sync(&self, file: FileKey, layout: &Layout) -> io::Result<Vec<LaneState>> {
        let len_bytes = self.objects.stat(file, layout)?.size;
        self.durable_bytes.lock().insert(file.0, (*layout, len_bytes));
        Ok(self.states(layout))
    }

    fn revoke(&self, who: &Who, file: FileKey, layout: &Layout) -> io::Result<()> {
        self.objects.revoke(who, file, layout)
    }

    fn fence(&self, who: &Who) -> io::Result<()> {
        self.objects.fence(who)
    }

    fn unlink(&self, files: &[(FileKey, Layout)]) -> Vec<io::Result<()>> {
        self.objects.unlink(files)
    }

    fn statfs(&self) -> io::Result<Statfs> {
        self.objects.statfs()
    }
}

const BEFORE_BYTES: u64 = 300_000;

/// What happens to whom.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// The length that the client sets.
    len_bytes: u64,
    /// The file is open for writing meanwhile, and a range was assigned that nobody has written yet.
    appends: bool,
    /// The client asks again after the restart; otherwise it is gone.
    repeats: bool,
    /// When the power fails: 0: not at all; between the server's end and its start; before the client's sync.
    power: u8,
    /// Before which step of the truncation the server is killed; after the last: when it was done and not answered.
    step: usize,
}

impl Case {
    /// Of this number, without the step.
    fn of(number: u64) -> Option<Case> {
        let mut rest = number;
        let mut draw = |count: u64| {
            let drawn = rest % count;
            rest /= count;
            drawn
        };
        let len_bytes = [0, 1, 70_000, BEFORE_BYTES, 500_000][draw(5) as usize];
        let (appends, repeats, power) = (draw(2) == 1, draw(2) == 1, draw(3) as u8);
        (rest == 0).then_some(Case { len_bytes, appends, repeats, power, step: 0 })
    }
}

struct Bed {
    dir: tempfile::TempDir,
    machine: Arc<Machine>,
    steps: Arc<AtomicUsize>,
    last: Arc<AtomicUsize>,
    /// Modes cannot be changed for now.
    is_busy: Arc<AtomicBool>,
}

impl Bed {
    fn new(dir: tempfile::TempDir, machine: Arc<Machine>) -> Bed {
        let last = Arc::new(AtomicUsize::new(usize::MAX));
        Bed { dir, machine, steps: Arc::default(), last, is_busy: Arc::default() }
    }

    fn start(&self) -> MetaService {
        let (steps, last, is_busy) = (self.steps.clone(), self.last.clone(), self.is_busy.clone());
        let hook = move |step: &str| match steps.fetch_add(1, Ordering::SeqCst).cmp(&last.load(Ordering::SeqCst)) {
            std::cmp::Ordering::Less if step == "set_mode" && is_busy.load(Ordering::SeqCst) => {
                Fate::Fails(libc::EBUSY)
            }
            std::cmp::Ordering::Less => Fate::Done,
            std::cmp::Ordering::Equal => panic!("stopped before {step}"),
            // What unwinds does nothing any more.
            std::cmp::Ordering::Greater => Fate::Fails(libc::EIO),
        };
        // Writers that are away may come back: nothing is settled while the case lasts.
        let grace = Duration::from_secs(3600);
        let options =
            MetaOptions { grace, before_step: Some(Arc::new(hook)), ..MetaOptions::new(self.dir.path(), SERVERS) };
        MetaService::open(options, self.machine.clone()).unwrap()
    }
}

fn who(client: u64, since: u32, epoch: u32, sequence: u64) -> Who {
    Who { client: ClientKey(client), epoch, since, sequence, ..Who::default() }
}

#[track_caller]
fn opened(answer: Answer) -> Opened {
    let Answer::Opened(opened) = answer else { panic!("{answer:?}") };
    opened
}

/// A folder in memory where that keeps extended attributes: a case waits for nothing then.
fn folder() -> tempfile::TempDir {
    let in_memory = tempfile::tempdir_in("/dev/shm").ok();
    let takes = |dir: &tempfile::TempDir| {
        rustix::fs::setxattr(dir.path(), "user.a", b"", rustix::fs::XattrFlags::empty()).is_ok()
    };
    in_memory.filter(takes).unwrap_or_else(|| tempfile::tempdir().expect("a temporary folder"))
}

/// Runs a case. Says whether its step is behind the last one, and what is wrong.
fn run(case: Case) -> (bool, Result<(), String>) {
    let (dir, machine) = (folder(), Arc::new(Machine::default()));
    meta::make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
    let bed = Bed::new(dir, machine);
    let service = bed.start();
    let session = service.open_session(who(1, 1, 1, 0)).unwrap();
    let file = opened(service.call_from(session, who(1, 1, 1, 1), create("f")));
    bed.machine.objects.write(file.file, &file.layout, 0, BEFORE_BYTES);
    bed.machine.sync(file.file, &file.layout).unwrap();
    if case.appends {
        let append = MetaCall::Append { handle: file.handle, len_bytes: 50_000 };
        assert!(matches!(service.call_from(session, who(1, 1, 1, 2), append), Answer::Assigned { .. }));
    } else {
        let close = MetaCall::Close { handle: file.handle, wrote: true };
        assert_eq!(service.call_from(session, who(1, 1, 1, 2), close), Answer::Done);
    }
    assert!(service.wait_idle(Duration::from_secs(20)));

    // The truncation, in the middle of which the server ends.
    let cut = || MetaCall::SetAttr { target: at("f"), set: size(case.len_bytes) };
    bed.last.store(bed.steps.load(Ordering::SeqCst) + case.step, Ordering::SeqCst);
    let first = catch_unwind(AssertUnwindSafe(|| service.call_from(session, who(2, 1, 1, 1), cut())));
    let was_cut = bed.machine.stat(file.file, &file.layout).unwrap().size == case.len_bytes;
    let is_behind = bed.steps.load(Ordering::SeqCst) <= bed.last.load(Ordering::SeqCst);
    // What a server does that ends in order, or in the end, is no part of the case.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(service)));
    drop(first);
    bed.last.store(usize::MAX, Ordering::SeqCst);
    if case.power == 1 {
        bed.machine.lose_power();
    }
    (is_behind, judge(case, &bed, &file, was_cut))
}

/// What the client finds, and who comes after it.
fn judge(case: Case, bed: &Bed, file: &Opened, was_cut: bool) -> Result<(), String> {
    let cut = || MetaCall::SetAttr { target: at("f"), set: size(case.len_bytes) };
    // Its answer was lost with it. The client asks again, and syncs.
    let service = bed.start();
    let session = service.open_session(who(2, 1, 2, 0)).unwrap();
    let mut compared = BTreeMap::new();
    if case.repeats {
        match service.call_from(session, who(2, 1, 2, 1), cut()) {
            Answer::Attr(_) => {}
            Answer::Cut { lanes, .. } => compared.extend(lanes.iter().map(|lane| (lane.server, lane.state))),
            // It may not be told that it was not done; that it is not known is no promise.
            Answer::Fault(fault) if fault.errno == libc::EIO => return Ok(()),
            other => return Err(format!("asked again: {other:?}")),
        }
        if case.power == 2 {
            bed.machine.lose_power();
        }
        let states = bed.machine.sync(file.file, &file.layout).unwrap();
        let is_good = states.iter().all(|lane| compared.get(&lane.server).is_none_or(|state| *state == lane.state));
        let now = bed.machine.stat(file.file, &file.layout).unwrap().size;
        if is_good && now != case.len_bytes {
            return Err(format!("the fsync succeeded, and the file has {now} bytes"));
        }
        if !is_good && case.power == 0 {
            return Err("the fsync failed, and nothing was lost".into());
        }
    }

    // Somebody appends.
    let opened = opened(service.call_from(session, who(2, 2, 2, 2), MetaCall::Open { path: path("f"), write: true }));
    let end = bed.machine.stat(file.file, &file.layout).unwrap().size;
    let append = MetaCall::Append { handle: opened.handle, len_bytes: 10 };
    let assigned = service.call_from(session, who(2, 2, 2, 3), append);
    let Answer::Assigned { offset } = assigned else { return Err(format!("an append: {assigned:?}")) };
    // A range that was assigned is not taken back by a truncation that was not done.
    let is_open = case.appends && !case.repeats && (!was_cut || case.len_bytes == BEFORE_BYTES);
    let kept = if is_open { BEFORE_BYTES + 50_000 } else { end };
    let lost_power = case.power != 0;
    if offset != end && offset != kept && !lost_power {
        return Err(format!("an append goes to {offset}, and the file ends at {end}"));
    }
    Ok(())
}

#[test]
fn a_truncation_that_a_restart_interrupted_is_told_of_and_leaves_no_gap() {
    quiet();
    let (mut cases, mut wrong) = (0, Vec::new());
    for case in (0..).map_while(Case::of) {
        for step in 0.. {
            let case = Case { step, ..case };
            let (is_behind, ran) = run(case);
            cases += 1;
            wrong.extend(ran.err().map(|why| format!("{case:?}: {why}")));
            if is_behind {
                break;
            }
            assert!(step < 60, "a truncation of more than 60 steps");
        }
    }
    println!("{cases} cases");
    assert!(wrong.is_empty(), "{} of {cases} cases are wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(12)]);
}

/// A client cuts a file; the server is killed before this step, and another client writes and syncs before the first one asks again,
/// or again, if what else it sets is `refused` the first time. Says whether the objects were cut by then, what was made of the other's
/// bytes, and whether the step is behind the last one.
fn written_after(len_bytes: u64, step: usize, others: &SetAttr, refused: bool) -> (bool, bool, bool) {
    const WRITTEN_BYTES: u64 = 123_456;
    let (dir, machine) = (folder(), Arc::new(Machine::default()));
    meta::make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
    let bed = Bed::new(dir, machine);
    let service = bed.start();
    let session = service.open_session(who(1, 1, 1, 0)).unwrap();
    let file = opened(service.call_from(session, who(1, 1, 1, 1), create("f")));
    bed.machine.objects.write(file.file, &file.layout, 0, BEFORE_BYTES);
    bed.machine.sync(file.file, &file.layout).unwrap();
    let cut = MetaCall::SetAttr { target: at("f"), set: SetAttr { size: Some(len_bytes), ..others.clone() } };
    bed.last.store(bed.steps.load(Ordering::SeqCst) + step, Ordering::SeqCst);
    let first = catch_unwind(AssertUnwindSafe(|| service.call_from(session, who(2, 1, 1, 1), cut.clone())));
    let mut was_cut = bed.machine.stat(file.file, &file.layout).unwrap().size == len_bytes;
    let is_behind = bed.steps.load(Ordering::SeqCst) <= bed.last.load(Ordering::SeqCst);
    let _ = catch_unwind(AssertUnwindSafe(|| drop(service)));
    drop(first);
    bed.last.store(usize::MAX, Ordering::SeqCst);

    let service = bed.start();
    if refused {
        bed.is_busy.store(true, Ordering::SeqCst);
        let session = service.open_session(who(2, 1, 2, 0)).unwrap();
        let answer = service.call_from(session, who(2, 1, 2, 1), cut.clone());
        let is_refused = matches!(&answer, Answer::Fault(fault) if fault.errno == libc::EBUSY);
        // Or all of it was done before, but for its answer.
        assert!(is_refused || matches!(answer, Answer::Attr(_) | Answer::Cut { .. }), "step {step}: {answer:?}");
        bed.is_busy.store(false, Ordering::SeqCst);
        was_cut |= bed.machine.stat(file.file, &file.layout).unwrap().size == len_bytes;
    }
    let session = service.open_session(who(1, 1, 2, 0)).unwrap();
    opened(service.call_from(session, who(1, 2, 2, 2), MetaCall::Open { path: path("f"), write: true }));
    bed.machine.objects.write(file.file, &file.layout, 0, WRITTEN_BYTES);
    bed.machine.sync(file.file, &file.layout).unwrap();
    let session = service.open_session(who(2, 1, 2, 0)).unwrap();
    let answer = service.call_from(session, who(2, 1, 2, 1), cut);
    assert!(matches!(answer, Answer::Attr(_) | Answer::Cut { .. }), "step {step}: {answer:?}");
    if let Some(mode) = others.mode {
        let answer = service.call_from(session, who(2, 2, 2, 2), MetaCall::GetAttr { target: at("f") });
        let Answer::Attr(attr) = answer else { panic!("{answer:?}") };
        assert_eq!(attr.mode & 0o7777, mode, "step {step}: what else it sets");
    }
    let is_there = bed.machine.stat(file.file, &file.layout).unwrap().size == WRITTEN_BYTES.max(len_bytes);
    (was_cut, is_there, is_behind)
}

/// Only a server that is killed right between the cut and its note cuts once more.
#[test]
fn a_truncation_that_a_restart_interrupted_does_not_cut_what_others_wrote_since() {
    quiet();
    let mode = SetAttr { mode: Some(0o604), ..SetAttr::default() };
    for (others, refused) in [(SetAttr::default(), false), (mode.clone(), false), (mode, true)] {
        for len_bytes in [0, 1, 70_000] {
            let mut lost = Vec::new();
            for step in 0..60 {
                let (was_cut, is_there, is_behind) = written_after(len_bytes, step, &others, refused);
                if was_cut {
                    lost.push(!is_there);
                }
                if is_behind {
                    break;
                }
            }
            assert!(lost.len() > 2, "{len_bytes}: {lost:?}");
            // One that is refused meanwhile has cut and noted it again.
            assert!(!lost[usize::from(!refused)..].contains(&true), "{len_bytes}, refused {refused}: {lost:?}");
        }
    }
}

/// A client cuts a file, and what else it sets fails; it asks again when another client has written, of the same server or of one
/// that was started meanwhile.
#[test]
fn a_truncation_that_failed_after_the_cut_does_not_cut_what_others_wrote_since() {
    const WRITTEN_BYTES: u64 = 123_456;
    for (len_bytes, restarts) in [(0, false), (0, true), (70_000, false), (70_000, true)] {
        let (dir, machine) = (folder(), Arc::new(Machine::default()));
        meta::make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let bed = Bed::new(dir, machine);
        let mut service = bed.start();
        let session = service.open_session(who(1, 1, 1, 0)).unwrap();
        let file = opened(service.call_from(session, who(1, 1, 1, 1), create("f")));
        bed.machine.objects.write(file.file, &file.layout, 0, BEFORE_BYTES);
        let set = SetAttr { size: Some(len_bytes), mode: Some(0o604), ..SetAttr::default() };
        let cut = MetaCall::SetAttr { target: at("f"), set };
        let mut sessions = vec![service.open_session(who(2, 1, 1, 0)).unwrap()];
        let answer = |service: &MetaService, session, epoch| {
            let size = || bed.machine.stat(file.file, &file.layout).unwrap().size;
            (service.call_from(session, who(2, 1, epoch, 1), cut.clone()), size())
        };
        bed.is_busy.store(true, Ordering::SeqCst);
        let failed = |answer: &Answer| matches!(answer, Answer::Fault(fault) if fault.errno == libc::EBUSY);
        let (first, left_bytes) = answer(&service, sessions[0], 1);
        assert!(failed(&first) && left_bytes == len_bytes, "{first:?}, {left_bytes} bytes are left");
        bed.machine.objects.write(file.file, &file.layout, 0, WRITTEN_BYTES);
        // It fails again, and again.
        for epoch in [2, 3] {
            if restarts && epoch == 2 {
                drop(service);
                service = bed.start();
            }
            sessions.push(service.open_session(who(2, 1, epoch, 0)).unwrap());
            let (again, left_bytes) = answer(&service, sessions[epoch as usize - 1], epoch);
            assert!(failed(&again) && left_bytes == WRITTEN_BYTES, "{again:?}, {left_bytes} bytes are left");
        }
        bed.is_busy.store(false, Ordering::SeqCst);
        let (last, left_bytes) = answer(&service, sessions[2], 3);
        let (Answer::Attr(attr) | Answer::Cut { attr, .. }) = &last else { panic!("{last:?}") };
        assert_eq!((attr.mode & 0o7777, attr.size, left_bytes), (0o604, WRITTEN_BYTES, WRITTEN_BYTES));
        // What is done is done once.
        assert_eq!(answer(&service, sessions[2], 3).1, WRITTEN_BYTES);
        let chmod = MetaCall::SetAttr { target: at("f"), set: SetAttr { mode: Some(0o640), ..SetAttr::default() } };
        let changed = service.call_from(sessions[2], who(2, 3, 3, 2), chmod);
        assert!(matches!(changed, Answer::Attr(_)), "{changed:?}");
    }
}

/// Panics are the stops; their reports would hide the tests' own.
fn quiet() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map(String::as_str).unwrap_or_default();
        if !text.contains("stopped before") {
            report(info);
        }
    }));
}
