//! Connections that wait for their next calls together.
//!
//! A small read is microseconds of work for the thread that it wakes, and to wake that costs as much again. So connections
//! on which such calls follow one another wait together: the thread of one of them *watches* all, receives for all, and serves
//! the calls that take no time itself, several after one wake-up; what it sends to other servers for them leaves together.
//! Anything else (a write, a part of a frame, the end of a connection) it leaves to the connection's own thread, which it wakes.
//!
//! The thread that watches keeps the others from nothing: before anything that may take a while it makes way
//! ([`before_waiting`]), and another thread watches.

use std::cell::{Cell, RefCell};
use std::io;
use std::num::NonZero;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::Thread;
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_transport::Stream;
use rustc_hash::FxHashMap;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use rustix::io::Errno;

use super::conversation::Conversation;
use super::{Service, Shared};
use crate::outbox;

/// Fewer connections than this gain nothing: their threads seldom find more than one call.
const FIT_MIN: u32 = 4;
/// Connections that are served after one wake-up at most.
const ROUND_MAX: usize = 64;

thread_local! {
    /// What this thread watches.
    static WATCH: RefCell<Option<Rc<dyn MakeWay>>> = const { RefCell::new(None) };
}

/// To be called before a connection's thread waits for anything but its client: neither what its client has not yet been sent
/// nor the connections that it watches must wait for that.
pub fn before_waiting() {
    outbox::hand_over_own_replies();
    let watch = WATCH.with_borrow_mut(Option::take);
    watch.inspect(|watch| watch.make_way());
}

trait MakeWay {
    /// Has another thread watch.
    fn make_way(&self);
}

/// The connections of a server that may wait together.
pub(super) struct Together<S: Service> {
    /// A thread is busy with each at most.
    groups: Vec<Arc<Group<S>>>,
    /// Connections of which the last calls could be served at once.
    fit: AtomicU32,
}

impl<S: Service> Together<S> {
    pub(super) fn new() -> io::Result<Together<S>> {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let groups =
            (0..S::watches(processors).max(1)).map(|_| Group::new().map(Arc::new)).collect::<io::Result<_>>()?;
        Ok(Together { groups, fit: AtomicU32::new(0) })
    }

    /// A connection has become fit to wait together with others, or is no longer.
    pub(super) fn count(&self, was_fit: bool, is_fit: bool) {
        match (was_fit, is_fit) {
            (false, true) => drop(self.fit.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.fit.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
    }

    /// There are enough such connections.
    pub(super) fn pays(&self) -> bool {
        self.fit.load(Ordering::Relaxed) >= FIT_MIN
    }

    /// On a connection's thread: waits for something that this thread is needed for; calls that are not are served meanwhile.
    /// Nothing of a frame may have been received.
    pub(super) fn wait(
        &self,
        shared: &Shared,
        service: &Arc<S>,
        conversation: Conversation<S::Session>,
    ) -> Conversation<S::Session> {
        let number = conversation.connection.id().0 as usize % self.groups.len().max(1);
        match self.groups.get(number) {
            Some(group) => group.wait(shared, service, conversation),
            None => conversation,
        }
    }
}

/// Connections that one thread watches.
struct Group<S: Service> {
    epoll: OwnedFd,
    state: Mutex<State<S::Session>>,
}

struct State<T> {
    members: FxHashMap<u32, Member<T>>,
    is_watched: bool,
}

struct Member<T> {
    /// `None` while the thread that watches serves it.
    conversation: Option<Conversation<T>>,
    /// The connection's own thread, and whether it is to go on.
    thread: Thread,
    is_called: bool,
    /// It waits, for that or to be asked to watch.
    is_parked: bool,
}

impl<T> State<T> {
    /// A thread that is to watch, if none does. Those that do not wait look by themselves before they do.
    fn successor(&self) -> Option<Thread> {
        let mut free = self.members.values().filter(|member| member.is_parked && !member.is_called);
        if self.is_watched { None } else { free.next().map(|member| member.thread.clone()) }
    }
}

impl<S: Service> Group<S> {
    fn new() -> io::Result<Group<S>> {
        let state = Mutex::new(State { members: FxHashMap::default(), is_watched: false });
        Ok(Group { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, state })
    }

    /// From now on the thread that watches hears of what comes on a connection.
    fn listen_to(&self, id: u32, stream: &Stream) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, stream, epoll::EventData::new_u64(id.into()), epoll::EventFlags::IN)
    }

    fn wait(
        self: &Arc<Self>,
        shared: &Shared,
        service: &Arc<S>,
        conversation: Conversation<S::Session>,
    ) -> Conversation<S::Session> {
        let id = conversation.connection.id().0;
        let mut state = self.state.lock();
        if self.listen_to(id, &conversation.receiver.stream).is_err() {
            return conversation;
        }
        let (thread, conversation) = (std::thread::current(), Some(conversation));
        state.members.insert(id, Member { conversation, thread, is_called: false, is_parked: false });
        loop {
            let watches = !state.is_watched;
            if let Some(member) = state.members.get_mut(&id) {
                member.is_parked = false;
                if let Some(conversation) = member.conversation.take_if(|_| member.is_called) {
                    state.members.remove(&id);
                    let successor = state.successor();
                    drop(state);
                    successor.inspect(Thread::unpark);
                    return conversation;
                }
                member.is_parked = !watches;
            }
            state.is_watched = true;
            drop(state);
            match watches {
                true => self.watch(shared, service, id),
                false => std::thread::park(),
            }
            state = self.state.lock();
        }
    }

    /// Serves what comes on all connections until the own one needs this thread, or it has made way.
    fn watch(self: &Arc<Self>, shared: &Shared, service: &Arc<S>, own: u32) {
        let (present, has_made_way) = (RefCell::new(None), Cell::new(false));
        let watch = Rc::new(Watch { group: self.clone(), service: service.clone(), present, has_made_way });
        WATCH.set(Some(watch.clone()));
        let mut events = Vec::with_capacity(ROUND_MAX);
        let mut is_called = false;
        while !is_called && !watch.has_made_way.get() {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "waiting for connections failed");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            service.begin_round();
            for event in events.drain(..) {
                if watch.has_made_way.get() {
                    break;
                }
                let id = event.data.u64() as u32;
                is_called |= self.serve(shared, service, &watch, id) && id == own;
            }
            service.end_round();
        }
        WATCH.set(None);
        outbox::serve_on_this_thread(None);
        if !watch.has_made_way.get() {
            // A successor is called when the own connection leaves.
            self.state.lock().is_watched = false;
        }
    }

    /// Serves what has come on a connection; true if its own thread was called to go on.
    fn serve(&self, shared: &Shared, service: &Arc<S>, watch: &Watch<S>, id: u32) -> bool {
        let taken = self.state.lock().members.get_mut(&id).and_then(|member| member.conversation.take());
        let Some(mut conversation) = taken else { return false };
        let stream = conversation.receiver.stream.clone();
        outbox::serve_on_this_thread(Some(conversation.connection.outbox.clone()));
        watch.present.replace(Some(stream.clone()));
        let mut is_called = shared.serve_at_once(&**service, &mut conversation);
        watch.present.take();
        let mut state = self.state.lock();
        match (is_called, watch.has_made_way.get()) {
            (true, false) => _ = epoll::delete(&self.epoll, &*stream),
            (false, true) => is_called = self.listen_to(id, &stream).is_err(),
            _ => {}
        }
        let Some(member) = state.members.get_mut(&id) else { return false };
        member.conversation = Some(conversation);
        member.is_called = is_called;
        let thread = is_called.then(|| member.thread.clone());
        drop(state);
        thread.inspect(Thread::unpark);
        is_called
    }
}

/// A thread that watches.
struct Watch<S: Service> {
    group: Arc<Group<S>>,
    service: Arc<S>,
    /// The connection that it is at.
    present: RefCell<Option<Arc<Stream>>>,
    has_made_way: Cell<bool>,
}

impl<S: Service> MakeWay for Watch<S> {
    fn make_way(&self) {
        self.has_made_way.set(true);
        // What comes on it is heard of again when this thread is done with it.
        self.present.borrow().iter().for_each(|stream| _ = epoll::delete(&self.group.epoll, &**stream));
        let mut state = self.group.state.lock();
        state.is_watched = false;
        let successor = state.successor();
        drop(state);
        successor.inspect(Thread::unpark);
        self.service.end_round();
    }
}
