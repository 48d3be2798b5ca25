//! Servers over memory that speak the wire protocol, for tests: of this crate, and with the feature `testing` of others.
//!
//! [`FakeServer`] is a listener with one thread per connection that hands each call to a closure, so that a test can
//! misbehave in every way. [`FakeObjects`] is a well-behaved data server to put behind it.

mod objects;

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_transport::{FrameReader, Stream, TransportError, send_frame};
use impresario_wire::{
    Answer, Call, ClusterId, Fault, Hello, Kind, Limits, PROTOCOL_VERSION, Welcome, decode_body, frame,
};

pub use self::objects::FakeObjects;
pub use crate::unsynced::Unsynced;

/// Longest payload that a fake server takes, bytes.
pub const MAX_PAYLOAD_BYTES: u32 = 8 << 20;

/// How a fake server greets.
#[derive(Clone, Debug)]
pub struct FakeGreeting {
    /// What it calls itself.
    pub name: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// The version it speaks.
    pub version: u32,
    /// The cluster that it says it is of; 0: of any.
    pub cluster: ClusterId,
    /// Its number among the data servers, if it says one.
    pub number: Option<u16>,
    /// Sent instead of a welcome, as it is; nothing is sent when it is empty.
    pub instead: Option<Vec<u8>>,
}

impl FakeGreeting {
    /// The incarnation of a fake server that was not started again.
    pub const INCARNATION: u64 = 1 << 32 | 1;

    /// A proper greeting.
    pub fn of(name: &str) -> FakeGreeting {
        FakeGreeting {
            name: name.into(),
            incarnation: FakeGreeting::INCARNATION,
            version: PROTOCOL_VERSION,
            cluster: ClusterId(0),
            number: None,
            instead: None,
        }
    }
}

/// A call as it arrived.
#[derive(Clone, Debug)]
pub struct FakeCall {
    /// Its number.
    pub id: u64,
    /// The call.
    pub call: Call,
    /// What it carried.
    pub payload: Vec<u8>,
}

/// What becomes of a connection after a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    /// It goes on.
    Continue,
    /// It is closed.
    Close,
}

/// What serves one connection; dropped when that ends.
pub type Serve = Box<dyn FnMut(&FakeConnection, FakeCall) -> Flow + Send>;

/// A connection to a fake server.
pub struct FakeConnection {
    stream: Stream,
    /// Who said hello.
    pub hello: Hello,
    /// Number of the connection, from 0 on.
    pub number: usize,
    is_mute: AtomicBool,
}

impl FakeConnection {
    /// While mute, answers are lost.
    pub fn mute(&self, is_mute: bool) {
        self.is_mute.store(is_mute, Ordering::Release);
    }

    /// Answers a call.
    pub fn answer(&self, id: u64, answer: &Answer, payload: &[u8]) {
        if self.is_mute.load(Ordering::Acquire) {
            return;
        }
        if let Ok(head) = frame::encode(Kind::Answer, id, answer, payload.len() as u32) {
            let payload = [io::IoSlice::new(payload)];
            let _ = send_frame(&self.stream, &head, &payload, Instant::now() + Duration::from_secs(60));
        }
    }

    /// Sends bytes as they are.
    pub fn raw(&self, bytes: &[u8]) {
        let _ = send_frame(&self.stream, bytes, &[], Instant::now() + Duration::from_secs(10));
    }
}

/// A server on a free port of this machine.
pub struct FakeServer {
    address: String,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    accepted: AtomicUsize,
    sockets: Mutex<Vec<TcpStream>>,
}

impl FakeServer {
    /// Starts on a free port. `serve` is called for each connection.
    pub fn start(greeting: FakeGreeting, serve: impl Fn() -> Serve + Send + Sync + 'static) -> io::Result<FakeServer> {
        FakeServer::start_at("127.0.0.1:0", greeting, serve)
    }

    /// Starts on a given address.
    pub fn start_at(
        address: &str,
        greeting: FakeGreeting,
        serve: impl Fn() -> Serve + Send + Sync + 'static,
    ) -> io::Result<FakeServer> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?.to_string();
        let shared =
            Arc::new(Shared { stop: AtomicBool::new(false), accepted: AtomicUsize::new(0), sockets: Mutex::default() });
        let (here, serve) = (shared.clone(), Arc::new(serve));
        let acceptor = std::thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                if here.stop.load(Ordering::Acquire) {
                    return;
                }
                let number = here.accepted.fetch_add(1, Ordering::AcqRel);
                let Ok(copy) = socket.try_clone() else { continue };
                here.sockets.lock().push(copy);
                let (greeting, serve) = (greeting.clone(), serve.clone());
                std::thread::spawn(move || {
                    let _ = converse(socket, number, &greeting, &*serve);
                });
            }
        });
        Ok(FakeServer { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Acquire)
    }

    /// Ends all connections, as a lost network does.
    pub fn drop_connections(&self) {
        for socket in self.shared.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Ends as `kill -9` would: no socket listens, all connections are gone.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Wakes the acceptor.
        let _ = TcpStream::connect(&self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.drop_connections();
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.end();
    }
}

fn converse(
    socket: TcpStream,
    number: usize,
    greeting: &FakeGreeting,
    serve: &(dyn Fn() -> Serve + Send + Sync),
) -> Result<(), TransportError> {
    let closing = socket.try_clone()?;
    let result = (|| {
        let stream = Stream::from_tcp(socket, Duration::from_secs(600))?;
        let forever = || Instant::now() + Duration::from_secs(3600);
        let limits = Limits::of_server(MAX_PAYLOAD_BYTES);
        let mut reader = FrameReader::default();
        let (header, body) = reader.next_frame(&stream, &limits, forever())?;
        let hello: Hello = decode_body(body)?;
        let welcome = Welcome {
            version: greeting.version,
            name: greeting.name.clone(),
            incarnation: greeting.incarnation,
            max_payload_bytes: MAX_PAYLOAD_BYTES,
            cluster: greeting.cluster,
            store: 0,
            number: greeting.number,
            keys: Default::default(),
        };
        let connection = FakeConnection { stream, hello, number, is_mute: AtomicBool::new(false) };
        match &greeting.instead {
            Some(bytes) => connection.raw(bytes),
            None => connection.raw(&frame::encode(Kind::Welcome, header.id, &welcome, 0)?),
        }
        let mut serve = serve();
        loop {
            let (header, body) = reader.next_frame(&connection.stream, &limits, forever())?;
            let call = decode_body(body)?;
            let mut payload = vec![0; header.payload_len as usize];
            reader.read_payload(&connection.stream, &mut payload, forever())?;
            if serve(&connection, FakeCall { id: header.id, call, payload }) == Flow::Close {
                return Ok(());
            }
        }
    })();
    let _ = closing.shutdown(Shutdown::Both);
    result
}

/// The answer of a server that does not know the call.
pub(crate) fn refuse(errno: i32, message: &str) -> Answer {
    Answer::Fault(Fault { errno, message: message.into() })
}
