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

use super::{Asked, KindsOf};
use crate::learn::{Kind, program_of_process};

/// A program waits so long for what is known of it.
pub(super) const PATIENCE_NS: u64 = 2_000_000_000;
/// So long it counts as known, and so long that it is nothing; then it is asked for again, since runs are learnt from meanwhile.
const VALID: Duration = Duration::from_secs(10);
const NOTHING_VALID: Duration = Duration::from_secs(1);
/// Users whose programs are asked about at once, and programs of one that wait.
const THREADS_MAX: usize = 32;
const WAITING_MAX: usize = 4096;
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
    load: Option<KindsOf>,
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
    known: FxHashMap<Arc<str>, (Instant, Arc<[Kind]>)>,
}

struct Question {
    client: Option<u64>,
    pid: u32,
}

impl Programs {
    /// Names are needed where accesses are recorded and where something is known of programs. `wake` is written to with each answer.
    pub(super) fn new(started: Option<String>, load: Option<KindsOf>, mode: Mode, wake: Arc<OwnedFd>) -> Programs {
        let is_asked = load.is_some() || mode == Mode::Record;
        let (tell, answers) = mpsc::channel();
        let started = started.unwrap_or_default().into();
        let asker = Asker { started, load, wake, threads: AtomicUsize::new(0), kept: Mutex::default() };
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
            let kinds = self.kinds_of(of, &Asked { uid, pid, program: &name });
            // Nobody waits any more when the manager has ended.
            if tell.send(Answer { client, name, kinds }).is_err() {
                return;
            }
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }

    fn kinds_of(&self, of: &Mutex<OfUser>, asked: &Asked<'_>) -> Arc<[Kind]> {
        let Some(load) = self.load.as_ref().filter(|_| !asked.program.is_empty()) else { return Arc::default() };
        {
            let mut of = of.lock();
            of.known.retain(|_, (since, kinds)| since.elapsed() < if kinds.is_empty() { NOTHING_VALID } else { VALID });
            if let Some((_, known)) = of.known.get(asked.program) {
                return known.clone();
            }
        }
        let kinds: Arc<[Kind]> = load(asked).into();
        if !self.has_room(asked.uid, &kinds) {
            tracing::debug!(
                uid = asked.uid,
                program = asked.program,
                "no memory for what is known of one more program"
            );
            return Arc::default();
        }
        let mut of = of.lock();
        if of.known.len() < NAMES_MAX {
            of.known.insert(asked.program.into(), (Instant::now(), kinds.clone()));
        }
        kinds
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::learn::Files;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn programs(load: impl Fn(&Asked<'_>) -> Vec<Kind> + Send + Sync + 'static) -> Programs {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        Programs::new(Some("started".into()), Some(Arc::new(load)), Mode::Advise, wake)
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
