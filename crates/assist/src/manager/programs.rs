//! Which programs are connected, by name, and what is known of them.
//!
//! For both a process or a file system may have to be waited for that hangs. So a thread beside the manager's finds out, one for
//! each user, and what takes long delays that user's programs alone: after [`PATIENCE_NS`] they go on without.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_ring::message::Mode;
use rustc_hash::FxHashMap;

use super::{Asked, Keep, KnownOf};
use crate::learn::{Kind, program_of_process};

/// A program waits so long for what is known of it.
pub(super) const PATIENCE_NS: u64 = 2_000_000_000;
/// So long it counts as known, and so long that it is nothing; then it is asked for again, since runs are learnt from meanwhile.
const VALID: Duration = Duration::from_secs(10);
const NOTHING_VALID: Duration = Duration::from_secs(1);
/// Users whose programs are asked about at once, and programs of one that wait.
const THREADS_MAX: usize = 32;
const WAITING_MAX: usize = 4096;
/// Ancestors of a process that are looked at.
const ANCESTORS_MAX: u32 = 64;
/// Programs of a user of which what is known is kept.
const NAMES_MAX: usize = 64;
/// Memory for what is known of one user's programs, and of all.
const KINDS_BYTES_MAX: (usize, usize) = (16 << 20, 64 << 20);

/// What is known of a program.
pub(super) struct Answer {
    /// The connection that waits for it; `None` for the program that is started.
    pub(super) client: Option<u64>,
    pub(super) name: Arc<str>,
    pub(super) kinds: Arc<[Kind]>,
    /// What is needed to learn from the process; `None` where nothing can be.
    pub(super) lesson: Option<Taught>,
}

/// What is needed to learn from runs of a program, and which run a process is of.
#[derive(Clone)]
pub(super) struct Taught {
    /// Runs from which was learnt already.
    pub(super) runs: u64,
    pub(super) keep: Keep,
    /// Processes of one run have the same.
    pub(super) together: u32,
}

impl std::fmt::Debug for Taught {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Taught").field("runs", &self.runs).field("together", &self.together).finish_non_exhaustive()
    }
}

/// The names of programs, and who finds out about them.
pub(super) struct Programs {
    asker: Arc<Asker>,
    /// Whether names are needed.
    is_asked: bool,
    users: FxHashMap<u32, Arc<Mutex<OfUser>>>,
    answers: Receiver<Answer>,
    tell: Sender<Answer>,
}

/// What the threads share.
struct Asker {
    /// The name of the program that is started; empty when it is not known.
    started: Arc<str>,
    load: Option<KnownOf>,
    /// When this manager began, in ticks of the clock by which processes begin.
    began_ticks: u64,
    wake: Arc<OwnedFd>,
    threads: AtomicUsize,
    kept: Mutex<Vec<Kept>>,
}

/// What is in use, whose it is and how much memory it takes.
struct Kept {
    uid: u32,
    kinds: Weak<[Kind]>,
    bytes: usize,
}

/// What is asked about one user's programs.
#[derive(Default)]
struct OfUser {
    waiting: VecDeque<Question>,
    /// Since when what is asked now is asked.
    since: Option<Instant>,
    has_thread: bool,
    known: FxHashMap<Arc<str>, (Instant, OfProgram)>,
}

struct Question {
    client: Option<u64>,
    pid: u32,
}

/// What is known of a program, as it is shared.
#[derive(Clone, Default)]
struct OfProgram {
    kinds: Arc<[Kind]>,
    runs: u64,
    keep: Option<Keep>,
}

impl Programs {
    /// Names are needed where accesses are recorded and where something is known of programs. `wake` is written to with each answer.
    pub(super) fn new(started: Option<String>, load: Option<KnownOf>, mode: Mode, wake: Arc<OwnedFd>) -> Programs {
        let is_asked = load.is_some() || mode == Mode::Record;
        let (tell, answers) = mpsc::channel();
        let started = started.unwrap_or_default().into();
        let began_ticks = boot_ticks();
        let asker = Asker { started, load, began_ticks, wake, threads: AtomicUsize::new(0), kept: Mutex::default() };
        Programs { asker: Arc::new(asker), is_asked, users: FxHashMap::default(), answers, tell }
    }

    /// The name of the program that is started; empty when it is not known.
    pub(super) fn started(&self) -> Arc<str> {
        self.asker.started.clone()
    }

    /// Asks about the program of a process that has connected. False where no answer will come.
    pub(super) fn ask(&mut self, client: u64, pid: u32, uid: u32) -> bool {
        self.is_asked && self.put(uid, Question { client: Some(client), pid })
    }

    /// Asks about the program that is started, by this user. False where no answer will come.
    pub(super) fn ask_of_started(&mut self, uid: u32) -> bool {
        let is_named = self.asker.load.is_some() && !self.asker.started.is_empty();
        is_named && self.put(uid, Question { client: None, pid: std::process::id() })
    }

    fn put(&mut self, uid: u32, question: Question) -> bool {
        if self.users.len() >= 2 * THREADS_MAX && !self.users.contains_key(&uid) {
            self.users.retain(|_, of| of.lock().has_thread);
        }
        let of = self.users.entry(uid).or_default();
        let mut user = of.lock();
        let is_stuck = user.since.is_some_and(|since| since.elapsed() >= Duration::from_nanos(PATIENCE_NS));
        if is_stuck || user.waiting.len() >= WAITING_MAX {
            return false;
        }
        user.waiting.push_back(question);
        if user.has_thread {
            return true;
        }
        user.has_thread = self.asker.threads.load(Relaxed) < THREADS_MAX && {
            let (asker, of, tell) = (self.asker.clone(), of.clone(), self.tell.clone());
            asker.threads.fetch_add(1, Relaxed);
            let thread = std::thread::Builder::new().name("assist-known".into());
            let begun = thread.spawn({
                let asker = asker.clone();
                move || {
                    asker.answer(uid, &of, &tell);
                    asker.threads.fetch_sub(1, Relaxed);
                }
            });
            begun.inspect_err(|_| _ = asker.threads.fetch_sub(1, Relaxed)).is_ok()
        };
        if !user.has_thread {
            user.waiting.clear();
        }
        user.has_thread
    }

    /// An answer that has come.
    pub(super) fn answer(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }

    /// The next answer, if it comes in time.
    pub(super) fn answer_within(&self, patience: Duration) -> Option<Answer> {
        self.answers.recv_timeout(patience).ok()
    }
}

impl Asker {
    /// Answers a user's questions until there are none.
    fn answer(&self, uid: u32, of: &Mutex<OfUser>, tell: &Sender<Answer>) {
        loop {
            let question = {
                let mut of = of.lock();
                let question = of.waiting.pop_front();
                of.since = question.is_some().then(Instant::now);
                of.has_thread = question.is_some();
                question
            };
            let Some(Question { client, pid }) = question else { return };
            let own = if client.is_some() { program_of_process(pid) } else { None };
            let name = own.map_or_else(|| self.started.clone(), Arc::from);
            // Before a process or a file system is waited for: a short program has ended by then. One that ran before this manager is in
            // the middle of its run.
            let process = process(pid).filter(|process| process.began_ticks >= self.began_ticks);
            let together = process.map(|process| together(pid, &process, self::process));
            let OfProgram { kinds, runs, keep } = self.known_of(of, &Asked { uid, pid, program: &name });
            let lesson = keep.zip(together).map(|(keep, together)| Taught { runs, keep, together });
            // Nobody waits any more when the manager has ended.
            if tell.send(Answer { client, name, kinds, lesson }).is_err() {
                return;
            }
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }

    fn known_of(&self, of: &Mutex<OfUser>, asked: &Asked<'_>) -> OfProgram {
        let Some(load) = self.load.as_ref().filter(|_| !asked.program.is_empty()) else { return OfProgram::default() };
        {
            let mut of = of.lock();
            let valid = |known: &OfProgram| if known.kinds.is_empty() { NOTHING_VALID } else { VALID };
            of.known.retain(|_, (since, known)| since.elapsed() < valid(known));
            if let Some((_, known)) = of.known.get(asked.program) {
                return known.clone();
            }
        }
        let known = load(asked);
        let known = OfProgram { kinds: known.kinds.into(), runs: known.runs, keep: known.keep };
        if !self.has_room(asked.uid, &known.kinds) {
            tracing::debug!(
                uid = asked.uid,
                program = asked.program,
                "no memory for what is known of one more program"
            );
            return OfProgram::default();
        }
        let mut of = of.lock();
        if of.known.len() < NAMES_MAX {
            of.known.insert(asked.program.into(), (Instant::now(), known.clone()));
        }
        known
    }

    fn has_room(&self, uid: u32, kinds: &Arc<[Kind]>) -> bool {
        let bytes: usize = kinds.iter().map(Kind::bytes).sum();
        let mut kept = self.kept.lock();
        kept.retain(|one| one.kinds.strong_count() > 0);
        let of_user: usize = kept.iter().filter(|one| one.uid == uid).map(|one| one.bytes).sum();
        let of_all: usize = kept.iter().map(|one| one.bytes).sum();
        let has_room = of_user + bytes <= KINDS_BYTES_MAX.0 && of_all + bytes <= KINDS_BYTES_MAX.1;
        if has_room && bytes > 0 {
            kept.push(Kept { uid, kinds: Arc::downgrade(kinds), bytes });
        }
        has_room
    }
}

/// A process as the kernel tells of it.
struct Process {
    /// 0 where it is in another PID namespace.
    parent: u32,
    /// 0 where its leader is in another PID namespace.
    session: u32,
    /// When it began, in ticks since the machine did.
    began_ticks: u64,
}

fn process(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in brackets, which may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Process { parent, session, began_ticks: fields.nth(15)?.parse().ok()? })
}

/// What the processes that are started together have in common: their session. Where its leader is not seen, as in a container that was
/// entered, all that is started there would have the same; there it is the oldest ancestor below the container's first process, which
/// starts one thing after the other. Ranks and workers have theirs in common, too, whatever process groups they make.
fn together(pid: u32, of: &Process, process: impl Fn(u32) -> Option<Process>) -> u32 {
    const FIRST: u32 = 1;
    if of.session != 0 {
        return of.session;
    }
    let (mut oldest, mut parent) = (pid, of.parent);
    for _ in 0..ANCESTORS_MAX {
        if parent <= FIRST {
            break;
        }
        let Some(next) = process(parent) else { break };
        (oldest, parent) = (parent, next.parent);
    }
    oldest
}

/// Now, as the kernel tells when processes began: in whole ticks.
fn boot_ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (s, ns) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    let per_second = rustix::param::clock_ticks_per_second();
    s * per_second + ns * per_second / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use rustix::event::{EventfdFlags, eventfd};

    use super::super::Known;
    use super::*;
    use crate::learn::Files;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn programs(kinds: impl Fn(&Asked<'_>) -> Vec<Kind> + Send + Sync + 'static) -> Programs {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let keep: Keep = Arc::new(|_| true);
        let load = move |asked: &Asked<'_>| Known { kinds: kinds(asked), runs: 3, keep: Some(keep.clone()) };
        Programs::new(Some("started".into()), Some(Arc::new(load)), Mode::Advise, wake)
    }

    /// One that ran already is in the middle of its run, of which a part teaches nothing.
    #[test]
    fn processes_that_begin_under_the_manager_can_be_learnt_from() {
        let mut programs = programs(|_| Vec::new());
        // In a session of its own: that of the tests may be unknown where they run, as in a container that was entered.
        let mut child = std::process::Command::new("setsid");
        child.args(["sh", "-c", "echo && exec sleep 600"]).stdout(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        assert!(programs.ask(1, child.id(), 7) && programs.ask(2, 1, 7));
        let answers = [(); 2].map(|()| programs.answer_within(PATIENCE).unwrap());
        let _ = child.kill().and_then(|()| child.wait());
        let told = answers.map(|answer| answer.lesson.map(|lesson| (lesson.together, lesson.runs)));
        assert_eq!(told, [Some((child.id(), 3)), None]);
    }

    /// In a container that was entered, sessions are not seen: two runs of one program there, each of a launcher and two ranks.
    #[test]
    fn runs_whose_session_is_not_seen_are_told_apart_by_their_ancestors() {
        // The first process, a shell, two launchers, and the ranks of each; a program that was started from outside; an orphan.
        let parents = [(1, 0), (5, 1), (10, 1), (11, 10), (12, 10), (20, 1), (21, 20), (22, 21), (30, 0), (40, 1)];
        let process = |pid: u32| {
            let parent = parents.iter().find(|(one, _)| *one == pid)?.1;
            Some(Process { parent, session: 0, began_ticks: 0 })
        };
        let of = |pid: u32| together(pid, &process(pid).unwrap(), process);
        assert_eq!([11, 12, 10].map(of), [10; 3]);
        assert_eq!([21, 22, 20].map(of), [20; 3]);
        assert_eq!([1, 5, 30, 40].map(of), [1, 5, 30, 40]);
        let seen = Process { session: 7, ..process(11).unwrap() };
        assert_eq!(together(11, &seen, process), 7, "a session that is seen counts");
        // What never ends, as the kernel would not tell it.
        let circle = |_| Some(Process { parent: 3, session: 0, began_ticks: 0 });
        assert_eq!(together(2, &circle(2).unwrap(), circle), 3);
        let own = self::process(std::process::id()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(own.session == 0 || own.session == rustix::process::getsid(None).unwrap().as_raw_pid() as u32);
    }

    /// As the kernel tells of a process in a PID namespace beside the manager's: there is no number to ask by.
    #[test]
    fn a_process_that_is_not_seen_goes_without() {
        let mut programs = programs(|asked| vec![kind(asked.program.len())]);
        assert!(programs.ask(1, 0, 7));
        let answer = programs.answer_within(PATIENCE).unwrap();
        assert_eq!((&*answer.name, answer.kinds.len()), ("started", 1), "it is taken for the program that was started");
        assert!(answer.lesson.is_none());
    }

    /// Finding out may take longer than a short program.
    #[test]
    fn a_process_that_ends_meanwhile_can_be_learnt_from() {
        let child: Arc<Mutex<Option<std::process::Child>>> = Arc::default();
        let ends = child.clone();
        let mut programs = programs(move |_| {
            let mut child = ends.lock().take().unwrap();
            child.kill().and_then(|()| child.wait()).unwrap();
            Vec::new()
        });
        // Only a process that begins after the manager can be learnt from.
        let started = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = started.id();
        *child.lock() = Some(started);
        assert!(programs.ask(1, pid, 7));
        assert!(programs.answer_within(PATIENCE).unwrap().lesson.is_some());
    }

    fn kind(steps: usize) -> Kind {
        let step =
            impresario_foresight::Shape::learn(
                &[&impresario_foresight::Sample::of(10, std::iter::once(0..5)).unwrap()],
            );
        let steps = step.steps.into_iter().cycle().take(steps).collect();
        Kind {
            files: Files::default(),
            shape: Arc::new(impresario_foresight::Shape { steps, only_size_bytes: None }),
            learnt_from: 2,
            held_out: None,
        }
    }

    /// The home of user 7 hangs; others' programs are known all the same.
    #[test]
    fn a_user_whose_home_hangs_delays_nobody_else() {
        let hangs = Arc::new(AtomicBool::new(true));
        let mut programs = programs({
            let hangs = hangs.clone();
            move |asked| {
                while asked.uid == 7 && hangs.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                vec![kind(1)]
            }
        });
        let own = std::process::id();
        for client in 0..10 {
            assert!(programs.ask(client, own, 7));
        }
        assert!(programs.ask(10, own, 8));
        let answer = programs.answer_within(PATIENCE).unwrap();
        assert_eq!((answer.client, answer.kinds.len()), (Some(10), 1));
        assert_eq!(Some(&*answer.name), program_of_process(own).as_deref());
        assert!(programs.answer().is_none() && programs.asker.threads.load(Relaxed) <= 2);
        hangs.store(false, Relaxed);
        let rest: Vec<_> = (0..10).map(|_| programs.answer_within(PATIENCE).unwrap().client).collect();
        assert_eq!(rest, (0..10).map(Some).collect::<Vec<_>>());
        assert!(programs.ask_of_started(7));
        let started = programs.answer_within(PATIENCE).unwrap();
        assert_eq!((started.client, &*started.name), (None, "started"));
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let one = kind(1000).bytes();
        let programs = programs(|_| Vec::new());
        let mut kept = Vec::new();
        let fits = |kept: &mut Vec<Arc<[Kind]>>, uid| {
            let kinds: Arc<[Kind]> = vec![kind(1000)].into();
            let fits = programs.asker.has_room(uid, &kinds);
            kept.push(kinds);
            fits
        };
        let of_one = (0..).take_while(|_| fits(&mut kept, 7)).count();
        assert_eq!(of_one, KINDS_BYTES_MAX.0 / one);
        assert!(fits(&mut kept, 8), "another user has room of his own");
        kept.clear();
        assert!(fits(&mut kept, 7), "and what is not used any more takes none");
    }
}
