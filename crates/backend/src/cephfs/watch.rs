//! Calls that wait for metadata servers: a library that waits for ever takes a bounded number of threads.

use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use rustc_hash::FxHashMap;

use crate::{Errno, Result};

/// How long after the timeout a call that waits for OSDs, too, may still be told of theirs: the library counts it in whole seconds.
const OSD_GRACE: Duration = Duration::from_secs(3);

/// Which calls are under way, and since when.
pub(super) struct Watch {
    calls: Mutex<Calls>,
    timeout: Duration,
    hung_max: usize,
}

#[derive(Default)]
struct Calls {
    since: FxHashMap<u64, Instant>,
    next: u64,
}

impl Calls {
    fn hung(&self, now: Instant, timeout: Duration) -> usize {
        let hangs = |since: &Instant| now.saturating_duration_since(*since) > timeout;
        self.since.values().filter(|since| hangs(since)).count()
    }
}

/// A call that is under way until this is dropped.
#[derive(Debug)]
pub(super) struct Watched<'a> {
    watch: &'a Watch,
    number: u64,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watch({:?}, {})", self.timeout, self.hung_max)
    }
}

impl Watch {
    /// A call hangs when it takes longer than `timeout`; of those there are about `hung_max` at most.
    pub(super) fn new(timeout: Duration, hung_max: usize) -> Watch {
        Watch { calls: Mutex::default(), timeout, hung_max }
    }

    /// As [`Watch::enter`], of a call that waits for OSDs, too: it hangs when it has outlived the time that it has for them.
    pub(super) fn enter_with_osds(&self, now: Instant) -> Result<Watched<'_>> {
        self.enter_since(now, now + OSD_GRACE)
    }

    /// A call begins; `EIO` while too many hang.
    pub(super) fn enter(&self, now: Instant) -> Result<Watched<'_>> {
        self.enter_since(now, now)
    }

    fn enter_since(&self, now: Instant, since: Instant) -> Result<Watched<'_>> {
        let mut calls = self.calls.lock();
        if calls.hung(now, self.timeout) >= self.hung_max {
            return Err(Errno(libc::EIO));
        }
        let number = calls.next;
        calls.next += 1;
        calls.since.insert(number, since);
        Ok(Watched { watch: self, number })
    }

    /// Calls that hang now.
    pub(super) fn hung(&self, now: Instant) -> usize {
        self.calls.lock().hung(now, self.timeout)
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.watch.calls.lock().since.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_too_many_hang_no_more_begin() {
        let (watch, start) = (Watch::new(Duration::from_secs(1), 2), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let hung: Vec<_> = [0, 100].map(|ms| watch.enter(at(ms)).unwrap()).into();
        let quick = watch.enter(at(900)).unwrap();
        assert_eq!(watch.hung(at(1000)), 0);
        assert_eq!(watch.hung(at(1050)), 1);
        drop(watch.enter(at(1050)).unwrap());
        assert_eq!(watch.enter(at(1200)).unwrap_err(), Errno(libc::EIO));
        drop(quick);
        assert!(watch.enter(at(1200)).is_err());
        // The servers are back.
        drop(hung);
        assert_eq!(watch.hung(at(5000)), 0);
        assert!(watch.enter(at(5000)).is_ok());
    }

    #[test]
    fn an_osd_that_is_away_makes_no_call_fail_that_asks_the_metadata_server() {
        let (watch, start) = (Watch::new(Duration::from_secs(1), 2), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let writes: Vec<_> = [0, 10, 20].map(|ms| watch.enter_with_osds(at(ms)).unwrap()).into();
        let look_up = watch.enter(at(30)).unwrap();
        assert_eq!((watch.hung(at(1020)), watch.hung(at(1900)), watch.hung(at(4015))), (0, 1, 3));
        assert!(watch.enter(at(1900)).is_ok(), "the writes are about to fail");
        drop(look_up);
        assert!(watch.enter(at(4015)).is_err(), "they wait for the metadata server");
        drop(writes);
    }
}
