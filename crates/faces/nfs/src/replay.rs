//! Answers of calls that may not be carried out twice, kept for clients that ask again (Juszczak 1989, "Improving the
//! Performance and Correctness of an NFS Server").
//!
//! A client whose connection broke sends its calls anew, under their old numbers. A call that is under way is not begun
//! again: whoever asked again gets the answer too. Which call it is says the client's address, the call's number, and a
//! checksum of what it asks. The answers kept are bounded in number and age; the oldest go first. Without the age, programs that
//! number their calls alike each time they are started (libnfs with a fixed seed, test suites) would be told of what an earlier run did.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use rustc_hash::FxHashMap;

/// Answers kept at most.
const ANSWERS_MAX: usize = 16384;
/// So long an answer is kept: longer than clients wait until they ask again (a minute by default, Linux doubles it twice).
const AGE_MAX: Duration = Duration::from_secs(300);
/// Repetitions of a call under way that are answered with it; further ones are not answered, as if they were lost.
const REPEATED_MAX: usize = 4;
/// Bytes of a call that its checksum is made of; the length of the rest counts too.
const CHECKED_BYTES: usize = 1024;

/// Which call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    client: IpAddr,
    xid: u32,
    procedure: u32,
    len: u32,
    sum: u32,
}

impl Key {
    /// Of a call as it came, from its head on.
    pub fn of(client: IpAddr, xid: u32, procedure: u32, record: &[u8]) -> Key {
        let sum = crc32fast::hash(&record[..record.len().min(CHECKED_BYTES)]);
        Key { client, xid, procedure, len: record.len() as u32, sum }
    }
}

enum Entry<W> {
    UnderWay(Vec<W>),
    Done(Vec<u8>),
}

/// The answers; `W` is whom one is sent to.
pub struct Replay<W> {
    state: Mutex<State<W>>,
    answers_max: usize,
}

struct State<W> {
    entries: FxHashMap<Key, Entry<W>>,
    /// Of those that are done, oldest first.
    done: VecDeque<(Key, Instant)>,
    replayed: u64,
}

impl<W> State<W> {
    fn forget_oldest(&mut self) {
        if let Some((oldest, _)) = self.done.pop_front() {
            self.entries.remove(&oldest);
        }
    }
}

/// What is to be done with a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen<T, W> {
    /// It is new: carry it out.
    New(T),
    /// It was carried out, with this answer, or is being carried out and its answer will come.
    Before(Option<(W, Vec<u8>)>),
}

impl<W> Default for Replay<W> {
    fn default() -> Replay<W> {
        Replay::new(ANSWERS_MAX)
    }
}

impl<W> Replay<W> {
    fn new(answers_max: usize) -> Replay<W> {
        let state = State { entries: FxHashMap::default(), done: VecDeque::new(), replayed: 0 };
        Replay { state: Mutex::new(state), answers_max }
    }

    /// A call came; `again` makes of it what waits for the answer of an earlier one.
    pub fn see<T>(&self, key: Key, call: T, again: impl FnOnce(T) -> W) -> Seen<T, W> {
        self.see_at(Instant::now(), key, call, again)
    }

    fn see_at<T>(&self, now: Instant, key: Key, call: T, again: impl FnOnce(T) -> W) -> Seen<T, W> {
        // Dropped when nothing is locked. As a repetition: a call that is dropped is answered with a failure.
        let _surplus;
        let mut state = self.state.lock();
        while state.done.front().is_some_and(|(_, at)| now.duration_since(*at) > AGE_MAX) {
            state.forget_oldest();
        }
        let State { entries, replayed, .. } = &mut *state;
        match entries.get_mut(&key) {
            None => {
                entries.insert(key, Entry::UnderWay(Vec::new()));
                Seen::New(call)
            }
            Some(Entry::Done(answer)) => {
                *replayed += 1;
                Seen::Before(Some((again(call), answer.clone())))
            }
            Some(Entry::UnderWay(others)) => {
                *replayed += 1;
                let again = again(call);
                if others.len() < REPEATED_MAX {
                    others.push(again);
                } else {
                    _surplus = again;
                }
                Seen::Before(None)
            }
        }
    }

    /// A call was carried out. Who else gets the answer.
    pub fn done(&self, key: Key, answer: &[u8]) -> Vec<W> {
        let mut state = self.state.lock();
        let Some(entry @ Entry::UnderWay(_)) = state.entries.get_mut(&key) else { return Vec::new() };
        let Entry::UnderWay(others) = std::mem::replace(entry, Entry::Done(answer.to_vec())) else { return Vec::new() };
        state.done.push_back((key, Instant::now()));
        while state.done.len() > self.answers_max {
            state.forget_oldest();
        }
        others
    }

    /// A call was not carried out: asked again, it is new. Who else hears that.
    pub fn undone(&self, key: Key) -> Vec<W> {
        match self.state.lock().entries.remove(&key) {
            Some(Entry::UnderWay(others)) => others,
            _ => Vec::new(),
        }
    }

    /// Answers kept, and repetitions that were answered or dropped.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.entries.len(), state.replayed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same<T>(whom: T) -> T {
        whom
    }

    fn key(xid: u32, record: &[u8]) -> Key {
        Key::of(IpAddr::from([127, 0, 0, 1]), xid, 8, record)
    }

    #[test]
    fn a_call_is_carried_out_once_and_answered_as_often_as_asked() {
        let replay = Replay::new(2);
        assert_eq!(replay.see(key(1, b"make"), "a", same), Seen::New("a"));
        assert_eq!(replay.see(key(1, b"make"), "b", same), Seen::Before(None));
        assert_eq!(replay.see(key(1, b"other"), "c", same), Seen::New("c"));
        assert_eq!(replay.done(key(1, b"make"), b"made"), ["b"]);
        assert_eq!(replay.see(key(1, b"make"), "d", same), Seen::Before(Some(("d", b"made".to_vec()))));
        // What was not carried out may be tried again.
        assert_eq!(replay.undone(key(1, b"other")), [] as [&str; 0]);
        assert_eq!(replay.see(key(1, b"other"), "e", same), Seen::New("e"));
    }

    /// A program that numbers its calls alike each time it is started asks for a new thing with an old number.
    #[test]
    fn an_old_answer_is_none_to_a_new_call() {
        let replay = Replay::new(9);
        for xid in 1..3 {
            assert_eq!(replay.see(key(xid, b"remove"), "a", same), Seen::New("a"));
            replay.done(key(xid, b"remove"), b"removed");
        }
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        let again = |seconds, xid| replay.see_at(later(seconds), key(xid, b"remove"), "b", same);
        assert_eq!(again(200, 1), Seen::Before(Some(("b", b"removed".to_vec()))));
        assert_eq!(again(400, 1), Seen::New("b"));
        assert_eq!(again(400, 1), Seen::Before(None), "it is under way");
        assert_eq!(replay.counts().0, 1, "the others of that age are gone");
        assert_eq!(replay.done(key(1, b"remove"), b"none"), ["b"]);
        assert_eq!(again(200, 1), Seen::Before(Some(("b", b"none".to_vec()))));
    }

    #[test]
    fn the_oldest_answers_go_and_repetitions_are_bounded() {
        let replay = Replay::new(2);
        for xid in 0..5 {
            assert!(matches!(replay.see(key(xid, b""), xid, same), Seen::New(_)));
            replay.done(key(xid, b""), b"");
        }
        assert_eq!(replay.counts().0, 2);
        assert!(matches!(replay.see(key(4, b""), 9, same), Seen::Before(Some(_))));
        assert!(matches!(replay.see(key(0, b""), 0, same), Seen::New(_)));
        for n in 0..100 {
            assert_eq!(replay.see(key(0, b""), n, same), Seen::Before(None));
        }
        assert_eq!(replay.done(key(0, b""), b"").len(), REPEATED_MAX);
    }
}
