//! A crowd at a server's door: connections that say nothing, and hostile ones that keep what a server gives them. What
//! they take from other clients is tested and measured with it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_base::Random;
use impresario_wire::{Call, ClientKey, FileKey, Hello, Kind, PROTOCOL_VERSION, Role, Who, frame};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};

/// Connections from one address at most.
const PER_ADDRESS: usize = 500;
/// A silent connection that the server closed comes back after this time, which is twice what a server gives a peer for its
/// hello.
const BACK_AFTER: Duration = Duration::from_secs(10);
/// How often silent connections are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// New silent connections in each look: 10,000 a second, more than which no queue of a listening socket takes.
const NEW_EACH_LOOK: usize = 500;
/// How often a hostile peer sends or takes a byte.
const TRICKLE_EVERY: Duration = Duration::from_millis(200);
/// A hostile peer waits this long before it comes back.
const PAUSE: Duration = Duration::from_millis(250);
/// What hostile peers announce or ask for, bytes.
const LARGE_BYTES: u32 = 4 << 20;
/// Reads of a peer that does not take the answers.
const UNREAD: u64 = 8;
/// Stack of a hostile peer, bytes.
const STACK_BYTES: usize = 128 << 10;

/// Ways of being hostile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Malice {
    /// Announces a long write, and sends a byte of it now and then.
    Trickle,
    /// Sends half a hello, and a byte now and then.
    HalfHello,
    /// Sends noise.
    Noise,
    /// Asks for more than a server gives at once.
    Oversized,
    /// Asks for long reads, and takes a byte of them now and then.
    Unread,
}

impl Malice {
    /// All ways.
    pub const ALL: [Malice; 5] = [Malice::Trickle, Malice::HalfHello, Malice::Noise, Malice::Oversized, Malice::Unread];
}

/// What became of a crowd's connections so far.
#[derive(Default, Debug)]
pub struct Fates {
    /// Silent connections that were made, those that came back among them.
    pub silent_made: AtomicU64,
    /// Silent connections that are open at this end.
    pub silent_open: AtomicU64,
    /// Silent connections that the server closed.
    pub silent_closed: AtomicU64,
    /// Hostile connections that were made, in the order of [`Malice::ALL`].
    pub hostile_made: [AtomicU64; Malice::ALL.len()],
    /// Hostile connections that the server closed.
    pub hostile_closed: [AtomicU64; Malice::ALL.len()],
}

/// A crowd, which disperses when it is dropped.
pub struct Crowd {
    fates: Arc<Fates>,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// Gathers at a data server's address: so many silent connections, `greeted` of them after a hello, and so many hostile
    /// ones. They come from addresses 127.1.0.0/16 and 127.2.0.0/16, and those that the server closes come back.
    pub fn gather(address: SocketAddrV4, silent: usize, greeted: usize, hostile: usize) -> Result<Crowd> {
        let mut crowd = Crowd { fates: Arc::default(), is_over: Arc::default(), threads: Vec::new() };
        let (fates, is_over) = (crowd.fates.clone(), crowd.is_over.clone());
        if silent > 0 {
            let work = move || stay_silent(address, silent, greeted, &fates, &is_over);
            let thread = std::thread::Builder::new().name("silent".into()).spawn(work);
            crowd.threads.push(thread.context("no thread for silent connections")?);
        }
        for n in 0..hostile {
            let (fates, is_over) = (crowd.fates.clone(), crowd.is_over.clone());
            let thread = std::thread::Builder::new().name("hostile".into()).stack_size(STACK_BYTES);
            let thread = thread.spawn(move || be_hostile(address, n, &fates, &is_over));
            crowd.threads.push(thread.context("no thread for a hostile connection")?);
        }
        Ok(crowd)
    }

    /// What became of its connections so far.
    pub fn fates(&self) -> &Fates {
        &self.fates
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// One of the silent.
#[derive(Default)]
struct Silent {
    connection: Option<TcpStream>,
    /// When it was closed.
    left: Option<Instant>,
}

impl Silent {
    fn leave(&mut self) {
        *self = Silent { connection: None, left: Some(Instant::now()) };
    }

    fn comes(&self) -> bool {
        self.connection.is_none() && self.left.is_none_or(|left| left.elapsed() >= BACK_AFTER)
    }
}

fn stay_silent(address: SocketAddrV4, count: usize, greeted: usize, fates: &Fates, is_over: &AtomicBool) {
    let Ok(epoll) = epoll::create(epoll::CreateFlags::CLOEXEC) else { return };
    let mut all: Vec<Silent> = (0..count).map(|_| Silent::default()).collect();
    while !is_over.load(Relaxed) {
        let mut new = 0;
        for (n, silent) in all.iter_mut().enumerate() {
            if !silent.comes() || new == NEW_EACH_LOOK {
                continue;
            }
            new += 1;
            let source = Ipv4Addr::new(127, 1, (n / PER_ADDRESS) as u8, 1);
            let hangs_up = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
            let made = connect_from(source, address, true).and_then(|stream| {
                epoll::add(&epoll, &stream, EventData::new_u64(n as u64), hangs_up)?;
                Ok(stream)
            });
            let Ok(mut stream) = made else {
                silent.leave();
                continue;
            };
            if n < greeted {
                let _ = stream.write_all(&hello(1 << 40 | n as u64)); // into a connection that is being made: when refused, it ends
            }
            fates.silent_made.fetch_add(1, Relaxed);
            fates.silent_open.fetch_add(1, Relaxed);
            silent.connection = Some(stream);
        }
        look_after(&mut all, &epoll, fates);
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Closes the connections whose server has closed them.
fn look_after(all: &mut [Silent], epoll: &OwnedFd, fates: &Fates) {
    let mut events: Vec<Event> = Vec::with_capacity(all.len());
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(&now));
    for event in &events {
        if let Some(silent) = all.get_mut(event.data.u64() as usize) {
            silent.leave();
            fates.silent_open.fetch_sub(1, Relaxed);
            fates.silent_closed.fetch_add(1, Relaxed);
        }
    }
}

fn be_hostile(address: SocketAddrV4, n: usize, fates: &Fates, is_over: &AtomicBool) {
    let way = n % Malice::ALL.len();
    let source = Ipv4Addr::new(127, 2, 0, 1 + (n / 10) as u8);
    while !is_over.load(Relaxed) {
        if let Ok(mut stream) = connect_from(source, address, false) {
            fates.hostile_made[way].fetch_add(1, Relaxed);
            let ended = attack(&mut stream, Malice::ALL[way], n as u64, is_over);
            if ended.is_err() {
                fates.hostile_closed[way].fetch_add(1, Relaxed);
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// Until the server closes the connection, which is the error, or it is over.
fn attack(stream: &mut TcpStream, way: Malice, n: u64, is_over: &AtomicBool) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TRICKLE_EVERY))?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    let client = 1 << 41 | n;
    let who = Who { client: ClientKey(client), epoch: 1, since: 1, sequence: 1, job: 666, ..Who::default() };
    let file = FileKey(client);
    let call = |id, call: &Call, payload_bytes| frame::encode(Kind::Call, id, call, payload_bytes).unwrap_or_default();
    match way {
        Malice::Trickle => {
            let write = Call::Write { who, file, lane_offset: 0 };
            stream.write_all(&[hello(client), call(1, &write, LARGE_BYTES)].concat())?;
        }
        Malice::HalfHello => stream.write_all(hello(client).get(..20).unwrap_or(&[]))?,
        Malice::Noise => {
            let mut random = Random::new(n);
            let noise: Vec<u8> = (0..4096).map(|_| random.below(256) as u8).collect();
            stream.write_all(&noise)?;
        }
        Malice::Oversized => {
            stream.write_all(&hello(client))?;
            for len in [LARGE_BYTES + 1, u32::MAX] {
                stream.write_all(&call(1, &Call::Read { who, file, lane_offset: 0, len }, 0))?;
            }
        }
        Malice::Unread => {
            let write = Call::Write { who, file, lane_offset: 0 };
            stream.write_all(&[hello(client), call(1, &write, LARGE_BYTES)].concat())?;
            stream.write_all(&vec![1; LARGE_BYTES as usize])?;
            let read = Call::Read { who, file, lane_offset: 0, len: LARGE_BYTES };
            (2..2 + UNREAD).try_for_each(|id| stream.write_all(&call(id, &read, 0)))?;
        }
    }
    let sends = matches!(way, Malice::Trickle | Malice::HalfHello);
    while !is_over.load(Relaxed) {
        if sends {
            stream.write_all(&[1])?;
        }
        if way == Malice::Oversized {
            stream.write_all(&call(2, &Call::Read { who, file, lane_offset: 0, len: u32::MAX }, 0))?;
        }
        // A byte; of other answers all, so that nothing but the malice itself is in the way.
        let mut some = [0; 4096];
        let room = if way == Malice::Unread { 1 } else { some.len() };
        match stream.read(&mut some[..room]) {
            Ok(0) => return Err(ErrorKind::ConnectionReset.into()),
            Ok(_) => std::thread::sleep(TRICKLE_EVERY),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn hello(client: u64) -> Vec<u8> {
    let who = Who { client: ClientKey(client), job: 666, ..Who::default() };
    let (version, role, name) = (PROTOCOL_VERSION, Role::Data, "crowd".into());
    let hello = Hello { version, who, role, name, cluster: Default::default(), credential: vec![] };
    frame::encode(Kind::Hello, 0, &hello, 0).unwrap_or_default()
}

/// Connects from an address of this machine.
fn connect_from(source: Ipv4Addr, to: SocketAddrV4, at_once: bool) -> std::io::Result<TcpStream> {
    let flags = if at_once { SocketFlags::NONBLOCK | SocketFlags::CLOEXEC } else { SocketFlags::CLOEXEC };
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // Its buffers shall not hide what the server has to keep.
    sockopt::set_socket_recv_buffer_size(&socket, 4096)?;
    bind(&socket, &SocketAddrV4::new(source, 0))?;
    match connect(&socket, &to) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(errno) => Err(errno.into()),
    }
}
