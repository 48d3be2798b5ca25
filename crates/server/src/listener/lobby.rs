//! Connections that have not said anything yet. Each costs a descriptor and a few hundred bytes; a thread is there for one
//! only when its first bytes are, so that a crowd of silent connections costs the others next to nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use impresario_transport::Stream;
use rustc_hash::FxHashMap;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use super::admission::Refusal;
use crate::addresses::{AddressId, Tenancy};

/// What is waited for beside connections.
const NEWCOMERS: u64 = 0;
const WAKE: u64 = 1;
const FIRST_TOKEN: u64 = 2;
/// Things that happened, taken at a time.
const EVENTS: usize = 128;

/// A connection that waits for its first bytes.
pub(super) struct Waiting {
    pub(super) stream: Stream,
    pub(super) peer: String,
    /// Its place among the connections of its address, or why it has none.
    pub(super) admission: Result<Tenancy, Refusal>,
    came: Instant,
}

/// All of them, in the order in which they came.
pub(super) struct Lobby {
    epoll: OwnedFd,
    waiting: BTreeMap<u64, Waiting>,
    /// Those that are not refused, by address.
    by_address: FxHashMap<AddressId, BTreeSet<u64>>,
    silent: usize,
    next_token: u64,
}

/// What has happened.
pub(super) enum Ready {
    /// There are new connections.
    Newcomers,
    /// One speaks.
    Speaks(Waiting),
}

impl Lobby {
    /// For the connections that come through `listening`; `wake` ends a wait.
    pub(super) fn new(listening: &impl AsFd, wake: &impl AsFd) -> io::Result<Lobby> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, listening, EventData::new_u64(NEWCOMERS), EventFlags::IN)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let (waiting, by_address) = Default::default();
        Ok(Lobby { epoll, waiting, by_address, silent: 0, next_token: FIRST_TOKEN })
    }

    /// Takes a connection in.
    pub(super) fn enter(
        &mut self,
        stream: Stream,
        peer: String,
        admission: Result<Tenancy, Refusal>,
    ) -> io::Result<()> {
        let token = self.next_token;
        epoll::add(&self.epoll, &stream, EventData::new_u64(token), EventFlags::IN | EventFlags::RDHUP)?;
        self.next_token += 1;
        if let Ok(tenancy) = &admission {
            self.silent += 1;
            self.by_address.entry(tenancy.address()).or_default().insert(token);
        }
        self.waiting.insert(token, Waiting { stream, peer, admission, came: Instant::now() });
        Ok(())
    }

    /// Waits until something happens, at most `patience`. Connections that their peers have closed are gone then.
    pub(super) fn wait(&mut self, patience: Option<Duration>) -> Vec<Ready> {
        let patience = patience.and_then(|patience| patience.try_into().ok());
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        // Interrupted, nothing has happened.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), patience.as_ref());
        let mut ready = Vec::new();
        for event in &events {
            match event.data.u64() {
                NEWCOMERS => ready.push(Ready::Newcomers),
                WAKE => {}
                token => {
                    let hangs_up = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
                    let flags = event.flags;
                    let speaks = |waiting: &Waiting| !flags.intersects(hangs_up) || waiting.stream.has_bytes();
                    ready.extend(self.remove(token).filter(speaks).map(Ready::Speaks));
                }
            }
        }
        ready
    }

    /// How many there are, without those that are refused.
    pub(super) fn len(&self) -> usize {
        self.silent
    }

    /// How many of them each address has.
    pub(super) fn counts(&self) -> impl Iterator<Item = (AddressId, usize)> {
        self.by_address.iter().map(|(address, tokens)| (*address, tokens.len()))
    }

    /// The one that has waited longest, of all or of an address, and how long.
    pub(super) fn oldest(&self, of: Option<AddressId>) -> Option<(u64, Duration)> {
        let token = match of {
            Some(address) => *self.by_address.get(&address)?.first()?,
            None => *self.waiting.iter().find(|(_, waiting)| waiting.admission.is_ok())?.0,
        };
        Some((token, self.waiting.get(&token)?.came.elapsed()))
    }

    /// Takes one out.
    pub(super) fn remove(&mut self, token: u64) -> Option<Waiting> {
        let waiting = self.waiting.remove(&token)?;
        let _ = epoll::delete(&self.epoll, &waiting.stream);
        if let Ok(tenancy) = &waiting.admission {
            self.silent -= 1;
            let address = tenancy.address();
            if let Some(tokens) = self.by_address.get_mut(&address) {
                tokens.remove(&token);
                if tokens.is_empty() {
                    self.by_address.remove(&address);
                }
            }
        }
        Some(waiting)
    }

    /// Takes out one that has waited for so long.
    pub(super) fn expired(&mut self, patience: Duration) -> Option<Waiting> {
        let (token, _) = self.waiting.first_key_value().filter(|(_, waiting)| waiting.came.elapsed() >= patience)?;
        self.remove(*token)
    }

    /// Until [`Lobby::expired`] has one; `None`: nobody is there.
    pub(super) fn next_expiry(&self, patience: Duration) -> Option<Duration> {
        let (_, first) = self.waiting.first_key_value()?;
        Some(patience.saturating_sub(first.came.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::addresses::Addresses;

    #[test]
    fn the_silent_are_kept_in_the_order_in_which_they_came_and_who_speaks_is_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let mut lobby = Lobby::new(&listener, &wake).unwrap();
        let addresses = Addresses::new(1000);
        let mut knock = |host: &str, is_refused: bool| {
            let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert!(matches!(lobby.wait(None)[..], [Ready::Newcomers]));
            let stream = Stream::from_tcp(listener.accept().unwrap().0, Duration::from_secs(1)).unwrap();
            let tenancy = addresses.enter(host, 10).unwrap();
            let address = tenancy.address();
            let refusal = Refusal { why: "full".into(), place: Default::default() };
            lobby.enter(stream, host.into(), if is_refused { Err(refusal) } else { Ok(tenancy) }).unwrap();
            (peer, address)
        };
        let (refused, _) = knock("r", true);
        let (mut first, a) = knock("a", false);
        let (second, also_a) = knock("a", false);
        let (_third, b) = knock("b", false);
        assert_eq!((a, lobby.len(), lobby.counts().count()), (also_a, 3, 2));
        let oldest = lobby.oldest(None).unwrap().0;
        assert_eq!(Some(oldest), lobby.oldest(Some(a)).map(|(token, _)| token), "a refused one makes no room");
        assert!(lobby.oldest(Some(b)).unwrap().0 > oldest);
        // Who hangs up without a word is gone; who speaks first, and then does, is heard.
        drop(second);
        std::io::Write::write_all(&mut first, b"hello").unwrap();
        drop(first);
        let mut heard = Vec::new();
        while lobby.len() > 1 {
            for ready in lobby.wait(None) {
                let Ready::Speaks(waiting) = ready else { panic!("nobody else came") };
                heard.push(waiting.peer);
            }
        }
        assert_eq!((heard, lobby.len()), (vec!["a".to_owned()], 1));
        // The others' time ends one after the other.
        assert!(lobby.expired(Duration::from_secs(3600)).is_none());
        assert!(lobby.next_expiry(Duration::from_secs(3600)) > Some(Duration::from_secs(3000)));
        let expired: Vec<String> =
            std::iter::from_fn(|| lobby.expired(Duration::ZERO)).map(|waiting| waiting.peer).collect();
        assert_eq!((expired, lobby.len(), lobby.next_expiry(Duration::ZERO)), (vec!["r".into(), "b".into()], 0, None));
        drop(refused);
    }
}
