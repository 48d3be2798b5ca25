//! Runs that the manager of a node has recorded: each is learnt from by a process with the rights of its user and no others, which
//! nobody waits for.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::manager::Keep;

use super::known::{Place, User};

/// Runs that wait: of one user, and of all. What comes beyond is not learnt from.
const WAITING_MAX: (usize, usize) = (4, 16);
/// Processes that learn at a time, one of each user.
const LEARNING_MAX: usize = 2;
/// A process that has not ended by then waits for a file system, most likely. It is killed, and until it is gone no other one of its user
/// is started, nor any where there are so many.
const LEARNT_WITHIN: Duration = Duration::from_secs(120);
const STUCK_MAX: usize = 8;
/// How often it is looked whether one has ended, and whether one that was killed is gone.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// At its end the daemon waits so long until what was recorded is learnt.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// A recorded run, and where what it teaches is kept.
struct Run {
    trace: File,
    place: Place,
}

enum Message {
    Learn(Run),
    /// Drops this when all is done.
    End(Sender<()>),
}

/// Hands runs over to processes that learn from them.
pub struct Learner {
    runs: SyncSender<Message>,
}

impl Learner {
    pub fn start() -> Result<Learner> {
        let (runs, taken) = mpsc::sync_channel(WAITING_MAX.1);
        let thread = std::thread::Builder::new().name("assist-lessons".into());
        let begun = thread.spawn(move || Pupils::default().serve(&taken));
        begun.context("starting a thread for runs that are learnt from")?;
        Ok(Learner { runs })
    }

    /// Takes runs whose lessons are kept at a place.
    pub fn keep_at(&self, place: &Place) -> Keep {
        let (runs, place) = (self.runs.clone(), place.clone());
        Arc::new(move |trace| runs.try_send(Message::Learn(Run { trace, place: place.clone() })).is_ok())
    }

    /// Lets what was recorded be learnt, within a few seconds.
    pub fn end(&self) {
        let (tell, ended) = mpsc::channel();
        if self.runs.try_send(Message::End(tell)).is_ok() {
            let _ = ended.recv_timeout(LAST_PATIENCE);
        }
    }
}

/// A process that learns.
struct Pupil {
    user: Option<User>,
    process: Child,
    began: Instant,
    is_killed: bool,
}

/// What waits, and what is learnt from now.
#[derive(Default)]
struct Pupils {
    waiting: VecDeque<Run>,
    learning: Vec<Pupil>,
}

impl Pupils {
    fn serve(mut self, taken: &Receiver<Message>) {
        let mut end: Option<(Instant, Sender<()>)> = None;
        loop {
            let is_busy = self.learning.iter().any(|pupil| !pupil.is_killed);
            let is_over = |end: &Instant| !is_busy && self.waiting.is_empty() || Instant::now() >= *end;
            if end.as_ref().is_some_and(|(end, _)| is_over(end)) {
                return;
            }
            let message = match (is_busy, self.learning.is_empty()) {
                (true, _) => taken.recv_timeout(LOOK_EVERY.0),
                (false, false) => taken.recv_timeout(LOOK_EVERY.1),
                (false, true) => taken.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match message {
                Ok(Message::Learn(run)) => self.take(run),
                Ok(Message::End(tell)) => end = Some((Instant::now() + LAST_PATIENCE, tell)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.look(LEARNT_WITHIN);
            self.begin();
        }
    }

    fn take(&mut self, run: Run) {
        let user = run.place.reader();
        let of_user = self.waiting.iter().filter(|other| other.place.reader() == user).count();
        let is_stuck = self.learning.iter().any(|pupil| pupil.user == user && pupil.is_killed);
        if is_stuck || of_user >= WAITING_MAX.0 || self.waiting.len() >= WAITING_MAX.1 {
            return tracing::debug!(?user, is_stuck, "a run is not learnt from");
        }
        self.waiting.push_back(run);
    }

    /// Which have ended; those that take longer than this are killed.
    fn look(&mut self, patience: Duration) {
        self.learning.retain_mut(|pupil| {
            let is_there = matches!(pupil.process.try_wait(), Ok(None));
            if is_there && !pupil.is_killed && pupil.began.elapsed() >= patience {
                tracing::warn!(user = ?pupil.user, "learning from a run takes too long; a file system may not answer");
                pupil.is_killed = pupil.process.kill().is_ok();
            }
            is_there
        });
        // What its user has recorded meanwhile would wait for the same.
        let Pupils { waiting, learning } = self;
        waiting.retain(|run| learning.iter().all(|pupil| pupil.user != run.place.reader() || !pupil.is_killed));
    }

    /// The next ones, as many as may be.
    fn begin(&mut self) {
        while self.learning.len() < STUCK_MAX
            && self.learning.iter().filter(|pupil| !pupil.is_killed).count() < LEARNING_MAX
        {
            let is_free = |run: &Run| self.learning.iter().all(|pupil| pupil.user != run.place.reader());
            let Some(run) = self.waiting.iter().position(is_free).and_then(|at| self.waiting.remove(at)) else {
                return;
            };
            let user = run.place.reader();
            match spawn(run) {
                Ok(process) => {
                    let (began, is_killed) = (Instant::now(), false);
                    self.learning.push(Pupil { user, process, began, is_killed });
                }
                Err(error) => tracing::warn!(?user, "nothing is learnt from a run: {error:#}"),
            }
        }
    }
}

/// A process that has its user's rights and nothing of ours but the trace.
fn spawn(Run { trace, place }: Run) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("impresario")
        .args(["assist", "remember", "--folder"])
        .arg(place.folder())
        .arg("--home")
        .arg(place.home());
    place.bind(&mut command);
    command.stdin(trace).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("starting a process that learns")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pupil(uid: u32, seconds: u32) -> Pupil {
        let process = Command::new("sleep").arg(seconds.to_string()).spawn().unwrap();
        Pupil { user: Some(User { uid, gid: uid }), process, began: Instant::now(), is_killed: false }
    }

    fn run(uid: u32) -> Run {
        let place = Place::of_another("/nowhere".into(), User { uid, gid: uid });
        Run { trace: File::open("/dev/null").unwrap(), place }
    }

    #[test]
    fn one_that_hangs_is_ended_and_its_user_waits_for_nobody_else() {
        let mut pupils = Pupils { learning: vec![pupil(1, 600), pupil(2, 600)], ..Pupils::default() };
        (0..10).for_each(|_| pupils.take(run(1)));
        assert_eq!(pupils.waiting.len(), WAITING_MAX.0);
        (10..100).for_each(|uid| pupils.take(run(uid)));
        assert_eq!(pupils.waiting.len(), WAITING_MAX.1);
        pupils.begin();
        assert_eq!(pupils.learning.len(), LEARNING_MAX, "no more at a time");
        pupils.look(Duration::ZERO);
        assert!(pupils.learning.iter().all(|pupil| pupil.is_killed));
        assert!(pupils.waiting.iter().all(|run| run.place.reader() != Some(User { uid: 1, gid: 1 })));
        pupils.take(run(1));
        assert_eq!(pupils.waiting.len(), WAITING_MAX.1 - WAITING_MAX.0, "what waits for the same is not taken");
        pupils.waiting.clear();
        impresario_testing::until("they are gone", || {
            pupils.look(Duration::from_secs(600));
            pupils.learning.is_empty()
        });
        pupils.take(run(1));
        assert_eq!(pupils.waiting.len(), 1);
    }
}
