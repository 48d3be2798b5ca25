//! The connections of programs, one thread for each, as many as there may be. While there are that many, further ones wait in
//! the socket's queue, and the one that was idle the longest is given up: its program makes another one when it next asks.
//!
//! A connection is given up by ending its direction to the agent. What the program has sent whole before that is done and
//! answered; what it sends later fails at the program, which knows then that it was not done and asks again.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_client::Watch;
use impresario_interpose::served::peer_uid;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long the agent waits for a place, a descriptor or a thread before it looks again.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often it is looked whether programs have ended for which something is withheld.
const WATCH_EVERY: Duration = Duration::from_millis(250);
const STACK_BYTES: usize = 256 << 10;

/// It was made just now, and has not asked anything: it is not given up, so each one is of use once.
const NEW: u64 = 0;
/// It is asking.
const ASKING: u64 = 1;
/// It waits for a lock, and for that alone: it ends with the reply.
const LOCKING: u64 = 2;
/// It is given up.
const ENDING: u64 = 3;
/// From here on: when it became idle.
const IDLE: u64 = 4;

/// One of them.
pub(crate) struct Connection {
    pub(crate) stream: UnixStream,
    state: AtomicU64,
    /// Over what servers are asked for it.
    pub(crate) watch: Arc<Watch>,
}

/// All of them.
pub(crate) struct Connections {
    max: usize,
    /// How long one waits for a thread at most.
    patience: Duration,
    began: Instant,
    open: Mutex<Open>,
    changed: Condvar,
    withheld: Arc<Withheld>,
}

/// Whether a server has said that a limit withholds what it is asked for.
#[derive(Default)]
struct Withheld {
    is_told: Mutex<bool>,
    told: Condvar,
}

#[derive(Default)]
struct Open {
    next: u64,
    connections: FxHashMap<u64, Arc<Connection>>,
    /// Those that wait for locks.
    locking: usize,
}

/// Keeps a connection's place.
struct ConnectionSlot {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
    number: u64,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.open.lock().connections.remove(&self.number);
        self.connections.changed.notify_all();
    }
}

/// A request under way.
pub(crate) struct UnderWay<'a> {
    connections: &'a Connections,
    connection: &'a Connection,
    may_wait: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let now = IDLE + self.connections.began.elapsed().as_millis() as u64;
        let began_as = if self.may_wait { LOCKING } else { ASKING };
        // Not if it was given up meanwhile.
        let _ = self.connection.state.compare_exchange(began_as, now, SeqCst, SeqCst);
        if self.may_wait {
            self.connections.open.lock().locking -= 1;
        }
    }
}

impl Connection {
    /// Its program has closed it, or has ended.
    fn is_closed(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.stream, PollFlags::empty())];
        // Not by `RDHUP`: that is also how it is given up.
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

impl Connections {
    /// At most `max`, of which a quarter is kept for requests that do not wait for locks: those give locks up.
    /// One for which there is no thread within `patience` is given up.
    pub(crate) fn new(max: usize, patience: Duration) -> Connections {
        let (open, changed, withheld) = Default::default();
        Connections { max, patience, began: Instant::now(), open, changed, withheld }
    }

    /// Gives up what a limit withholds of programs that have ended. Never returns.
    pub(crate) fn watch(&self) {
        loop {
            let is_told = self.withheld.is_told.lock();
            *self.withheld.told.wait_while(is_told, |is_told| !*is_told) = false;
            while self.give_up_withheld() {
                std::thread::sleep(WATCH_EVERY);
            }
        }
    }

    /// Whether anything is withheld.
    fn give_up_withheld(&self) -> bool {
        let withheld: Vec<Arc<Connection>> = {
            let open = self.open.lock();
            open.connections.values().filter(|connection| connection.watch.is_withheld()).cloned().collect()
        };
        withheld.iter().filter(|connection| connection.is_closed()).for_each(|connection| connection.watch.give_up());
        !withheld.is_empty()
    }

    /// Those that wait for locks.
    #[cfg(test)]
    pub(crate) fn locking(&self) -> usize {
        self.open.lock().locking
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.lock().connections.is_empty()
    }

    /// A request begins. `None`: it may wait for a lock, and too many do.
    pub(crate) fn begin<'a>(&'a self, connection: &'a Connection, may_wait: bool) -> Option<UnderWay<'a>> {
        if may_wait {
            let mut open = self.open.lock();
            if open.locking >= self.max - self.max.div_ceil(4) {
                return None;
            }
            open.locking += 1;
        }
        let begins_as = if may_wait { LOCKING } else { ASKING };
        let begins = |state| (state != ENDING).then_some(begins_as);
        let _ = connection.state.fetch_update(SeqCst, SeqCst, begins);
        Some(UnderWay { connections: self, connection, may_wait })
    }

    /// Gives one up: the one that was idle the longest, or if all are asking, the next that has its reply.
    fn give_up_one(&self, open: &Open) {
        let states = || open.connections.values().map(|connection| (connection.state.load(SeqCst), connection));
        let idle = states().filter(|(state, _)| *state >= IDLE).min_by_key(|(state, _)| *state);
        let next = || {
            let is_one_ending = states().any(|(state, _)| state == ENDING);
            states().find(|(state, _)| *state == ASKING && !is_one_ending)
        };
        if let Some((state, connection)) = idle.or_else(next)
            && connection.state.compare_exchange(state, ENDING, SeqCst, SeqCst).is_ok()
        {
            let _ = connection.stream.shutdown(Shutdown::Read);
        }
    }

    /// Waits for a moment for one to go.
    fn wait<'a>(&self, open: MutexGuard<'a, Open>) -> MutexGuard<'a, Open> {
        self.changed.wait_timeout(open, LOOK_EVERY).0
    }

    /// Waits while there are as many as there may be.
    fn await_place(&self) {
        let mut open = self.open.lock();
        while open.connections.len() >= self.max {
            self.give_up_one(&open);
            open = self.wait(open);
        }
    }

    fn add(self: &Arc<Self>, stream: UnixStream) -> ConnectionSlot {
        let withheld = self.withheld.clone();
        let told = move || {
            *withheld.is_told.lock() = true;
            withheld.told.notify_one();
        };
        let watch = Arc::new(Watch::telling(Arc::new(told)));
        let connection = Arc::new(Connection { stream, state: AtomicU64::new(NEW), watch });
        let mut open = self.open.lock();
        open.next += 1;
        let number = open.next;
        open.connections.insert(number, connection.clone());
        ConnectionSlot { connections: self.clone(), connection, number }
    }

    /// Accepts programs' connections, and has each served by a thread. Never returns.
    pub(crate) fn accept(
        self: &Arc<Self>,
        listener: &UnixListener,
        serve: &Arc<impl Fn(&Connections, &Connection) + Send + Sync + 'static>,
    ) {
        let me = rustix::process::geteuid().as_raw();
        let mut has_told = false;
        let mut tell = |error: std::io::Error| {
            if !std::mem::replace(&mut has_told, true) {
                tracing::warn!(%error, "a program could not connect, and has to wait");
            }
        };
        loop {
            // None is given up before another one asks for its place.
            let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], None);
            self.await_place();
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tell(error);
                    let open = self.open.lock();
                    self.give_up_one(&open);
                    // Without descriptors it fails at once and again.
                    drop(self.wait(open));
                    continue;
                }
            };
            // A program that became another user must not act as this one, nor one that cannot say who it is.
            if peer_uid(&stream) != Some(me) {
                continue;
            }
            let start = |place: Arc<ConnectionSlot>| {
                let serve = serve.clone();
                let run = move || serve(&place.connections, &place.connection);
                let thread = std::thread::Builder::new().name("program".into()).stack_size(STACK_BYTES);
                thread.spawn(run).map(drop)
            };
            self.start(stream, start, &mut tell);
        }
    }

    /// Has `start` begin to serve a connection. While it cannot, the program waits, for the agent's patience at most: others may
    /// wait behind it whose requests are answered within that time.
    fn start(
        self: &Arc<Self>,
        stream: UnixStream,
        start: impl Fn(Arc<ConnectionSlot>) -> std::io::Result<()>,
        mut tell: impl FnMut(std::io::Error),
    ) {
        let (place, end) = (Arc::new(self.add(stream)), Instant::now() + self.patience);
        while let Err(error) = start(place.clone()) {
            tell(error);
            if Instant::now() >= end {
                break;
            }
            let open = self.open.lock();
            self.give_up_one(&open);
            drop(self.wait(open));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_connection_that_gets_no_thread_is_given_up() {
        let connections = Arc::new(Connections::new(4, Duration::from_millis(50)));
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut refused = 0;
        connections.start(ours, |_| Err(std::io::ErrorKind::WouldBlock.into()), |_| refused += 1);
        assert!(refused > 1, "{refused}");
        assert!(connections.is_empty());
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_connection_is_closed_when_its_program_has_ended_and_not_when_it_is_given_up() {
        let connections = Arc::new(Connections::new(4, Duration::from_millis(50)));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let place = connections.add(ours);
        assert!(!place.connection.is_closed());
        place.connection.stream.shutdown(Shutdown::Read).unwrap();
        assert!(!place.connection.is_closed(), "its answer is waited for");
        drop(theirs);
        assert!(place.connection.is_closed());
        assert!(!connections.give_up_withheld(), "nothing is withheld");
    }
}
