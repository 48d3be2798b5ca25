//! Which signals a thread has to act on, and the requests that it waits for meanwhile.
//!
//! The library that reads the kernel's requests does not hand on that one is interrupted, and a process cannot even be killed before its
//! request is answered. So where a limit withholds what a request needs, which may take hours, the thread that waits for it is looked
//! at: if its process is to end, the calls to the servers are given up.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::slab::{Key, Slab};
use impresario_client::{Attending, Watch};

/// How often the threads of requests that are withheld are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A request that a thread waits for.
struct Request {
    thread: u32,
    watch: Arc<Watch>,
}

/// The requests of all mounts of this process.
#[derive(Default)]
struct Requests {
    state: Mutex<State>,
    withheld: Condvar,
}

#[derive(Default)]
struct State {
    requests: Slab<Request>,
    /// A server has said that it withholds one of them.
    is_told: bool,
    has_thread: bool,
}

static REQUESTS: LazyLock<Requests> = LazyLock::new(Requests::default);
/// Called on a thread that receives for others.
static TOLD: LazyLock<Arc<dyn Fn() + Send + Sync>> = LazyLock::new(|| Arc::new(|| REQUESTS.tell()));

/// While it exists, what this thread asks servers for is given up if a limit withholds it and the process of the thread that waits is
/// to end.
pub(crate) struct Interruptible {
    key: Key,
    _attending: Attending,
}

/// Serves a request that this thread of a process waits for; 0: the kernel itself.
pub(crate) fn interruptible(thread: u32) -> Option<Interruptible> {
    if thread == 0 {
        return None;
    }
    let watch = Arc::new(Watch::telling(TOLD.clone()));
    let _attending = watch.enter();
    let key = REQUESTS.state.lock().requests.insert(Request { thread, watch });
    Some(Interruptible { key, _attending })
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        REQUESTS.state.lock().requests.remove(self.key);
    }
}

impl Requests {
    fn tell(&'static self) {
        let mut state = self.state.lock();
        state.is_told = true;
        if !state.has_thread {
            let thread = std::thread::Builder::new().name("signals".into()).stack_size(128 << 10);
            // Without one, the next word of a server tries again.
            state.has_thread = thread.spawn(|| self.run()).is_ok();
        }
        drop(state);
        self.withheld.notify_one();
    }

    fn run(&self) {
        loop {
            let mut state = self.withheld.wait_while(self.state.lock(), |state| !state.is_told);
            state.is_told = false;
            while state.look() {
                state = self.withheld.wait_timeout(state, LOOK_EVERY).0;
            }
        }
    }
}

impl State {
    /// Gives up what is withheld for a process that is to end; whether anything is withheld.
    fn look(&mut self) -> bool {
        let mut is_any = false;
        for (_, Request { thread, watch }) in self.requests.iter().filter(|(_, request)| request.watch.is_withheld()) {
            is_any = true;
            if is_killed(*thread) {
                watch.give_up();
            }
        }
        is_any
    }
}

/// The process of a thread is to end.
fn is_killed(thread: u32) -> bool {
    // Whichever signal ends it, unless with a core file: the kernel then marks each of its threads so.
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    status.is_ok_and(|status| number(&status, "SigPnd:", 16).is_some_and(|pending| pending & KILL != 0))
}

/// What was seen of a thread's signals.
#[derive(Default, Debug)]
pub(crate) struct Signals {
    /// There was one for its process when it was looked at before.
    was_pending: bool,
}

impl Signals {
    /// Whether the thread has a signal to act on.
    pub(crate) fn interrupt(&mut self, thread: u32) -> bool {
        match pending(thread) {
            Pending::Nothing => self.was_pending = false,
            Pending::Own | Pending::Unknown => return true,
            // Another thread of the process may be about to take it.
            Pending::Shared => return std::mem::replace(&mut self.was_pending, true),
        }
        false
    }
}

/// The signals of a thread can be looked at.
pub(crate) fn is_seen(thread: u32) -> bool {
    pending(thread) != Pending::Unknown
}

/// The signals that a thread has to act on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    Nothing,
    /// One that no other thread takes.
    Own,
    /// One for its process.
    Shared,
    /// The thread is gone, or hidden from us.
    Unknown,
}

fn pending(thread: u32) -> Pending {
    let status = |thread: u32| std::fs::read_to_string(format!("/proc/{thread}/status"));
    let Ok(of_thread) = status(thread) else { return Pending::Unknown };
    let main = number(&of_thread, "Tgid:", 10).filter(|main| *main != u64::from(thread));
    let of_main = main.and_then(|main| status(u32::try_from(main).ok()?).ok());
    judge(&of_thread, of_main.as_deref())
}

/// What the status of a thread says, and that of the main thread of its process if that is another. A signal for a process
/// goes to the main thread unless that blocks it.
fn judge(of_thread: &str, of_main: Option<&str>) -> Pending {
    let mask = |status: &str, key: &str| number(status, key, 16).unwrap_or(0);
    let stopped = mask(of_thread, "SigBlk:") | mask(of_thread, "SigIgn:");
    if mask(of_thread, "SigPnd:") & !stopped != 0 {
        return Pending::Own;
    }
    let shared = mask(of_thread, "ShdPnd:") & !stopped;
    match of_main {
        None if shared != 0 => Pending::Own,
        Some(of_main) if shared & mask(of_main, "SigBlk:") != 0 => Pending::Shared,
        _ => Pending::Nothing,
    }
}

fn number(status: &str, key: &str, radix: u32) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    u64::from_str_radix(line.trim(), radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pending: u64, shared: u64, blocked: u64, ignored: u64) -> String {
        format!(
            "Name:\tx\nTgid:\t7\nPid:\t8\nSigQ:\t0/9\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t0000000000000000\n"
        )
    }

    #[test]
    fn only_signals_that_the_thread_acts_on_count() {
        const KILL: u64 = 1 << 8;
        let judge_alone = |status: String| judge(&status, None);
        assert_eq!(judge_alone(status(0, 0, 0, 0)), Pending::Nothing);
        assert_eq!(judge_alone(status(KILL, 0, 0, 0)), Pending::Own);
        assert_eq!(judge_alone(status(2, 0, 2, 0)), Pending::Nothing, "blocked");
        assert_eq!(judge_alone(status(2, 2, 0, 2)), Pending::Nothing, "ignored");
        assert_eq!(judge_alone(status(0, 2, 0, 0)), Pending::Own, "the main thread takes it");
        assert_eq!(judge(&status(0, 2, 0, 0), Some(&status(0, 2, 0, 0))), Pending::Nothing, "the main thread takes it");
        assert_eq!(judge(&status(0, 2, 0, 0), Some(&status(0, 2, 2, 0))), Pending::Shared);
        assert_eq!(judge(&status(4, 2, 0, 0), Some(&status(0, 2, 2, 0))), Pending::Own);
        assert_eq!(number(&status(0, 0, 0, 0), "Tgid:", 10), Some(7));
    }

    #[test]
    fn the_state_of_a_thread_is_found() {
        assert_eq!(pending(std::process::id()), Pending::Nothing);
        assert_eq!(pending(u32::MAX), Pending::Unknown);
    }
}
