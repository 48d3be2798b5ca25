//! `GET /metrics` over HTTP/1.1, for scrapers on a monitoring network. Every wait and every buffer has a bound: a few
//! connections are served at a time, one request each. When all places are taken, a newcomer gets that of the connection that
//! has kept the server waiting longest, so peers that say nothing cannot keep a scraper out.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use serde_json::Value;

use crate::text;

/// Connections that are served at a time, each on a thread of its own.
const CONNECTIONS_MAX: usize = 16;
/// How long a newcomer waits for a place while no other connection keeps the server waiting.
const PLACE_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum bytes of a request's head.
const HEAD_MAX_BYTES: usize = 8 << 10;
/// How long one request may take, from its connection to its last byte.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// Pause after a failed accept, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why an endpoint cannot be opened; one line with the remedy.
#[derive(Debug, thiserror::Error)]
#[error("metrics: cannot listen at {address}: {source}; choose another address and port in `metrics`")]
pub struct OpenError {
    address: SocketAddr,
    source: std::io::Error,
}

/// Serves metrics until it is dropped.
pub struct Endpoint {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    listener: TcpListener,
    server: String,
    status: Box<dyn Fn() -> Value + Send + Sync>,
    stopping: AtomicBool,
    /// The connections that are served, oldest first.
    served: Mutex<Vec<Served>>,
    fewer: Condvar,
}

/// A connection's place among those that are served, until this value is dropped.
struct ConnectionSlot {
    shared: Arc<Shared>,
    stream: Arc<TcpStream>,
}

impl ConnectionSlot {
    fn set_in_hand(&self, is_in_hand: bool) {
        let mut served = self.shared.served.lock();
        let own = served.iter_mut().find(|served| Arc::ptr_eq(&served.stream, &self.stream));
        own.into_iter().for_each(|served| served.is_in_hand = is_in_hand);
        drop(served);
        // A newcomer may want the place.
        self.shared.fewer.notify_all();
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.shared.served.lock().retain(|served| !Arc::ptr_eq(&served.stream, &self.stream));
        self.shared.fewer.notify_all();
    }
}

/// A connection that is served.
struct Served {
    stream: Arc<TcpStream>,
    /// Its request is here, and its answer is being made: it waits for the server, and not the server for it.
    is_in_hand: bool,
}

impl Endpoint {
    /// Listens at `address` (port 0: any free one) and serves the metrics of the server of that name, whose state
    /// `status` returns as the server's status calls do.
    pub fn open(
        address: SocketAddr,
        server: &str,
        status: impl Fn() -> Value + Send + Sync + 'static,
    ) -> Result<Endpoint, OpenError> {
        let failed = |source| OpenError { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            listener,
            server: server.into(),
            status: Box::new(status),
            stopping: AtomicBool::new(false),
            served: Mutex::default(),
            fewer: Condvar::new(),
        });
        let accepting = shared.clone();
        let acceptor = std::thread::Builder::new().name("metrics".into());
        let acceptor = acceptor.spawn(move || accepting.accept()).map_err(failed)?;
        tracing::info!(server, %address, "metrics");
        Ok(Endpoint { shared, address, acceptor: Some(acceptor) })
    }

    /// The address that it answers at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux this ends an accept that waits, and the reads and writes of connections.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        self.shared.fewer.notify_all();
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        let mut served = self.shared.served.lock();
        served.iter().for_each(|served| _ = served.stream.shutdown(Shutdown::Both));
        let until = Instant::now() + ACCEPT_PAUSE * 2;
        while !served.is_empty() && Instant::now() < until {
            served = self.shared.fewer.wait_timeout(served, ACCEPT_PAUSE).0;
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>) {
        while !self.stopping.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if let Some(place) = self.take_place(Arc::new(stream)) {
                        serve_on_a_thread(place, peer);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "accepting a request for metrics");
                    if !self.stopping.load(Ordering::Acquire) {
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
    }

    /// Takes a place, if need be that of the connection that has kept the server waiting longest.
    fn take_place(self: &Arc<Self>, stream: Arc<TcpStream>) -> Option<ConnectionSlot> {
        let until = Instant::now() + PLACE_WAIT_MAX;
        let mut served = self.served.lock();
        while served.len() >= CONNECTIONS_MAX {
            let now = Instant::now();
            if now >= until || self.stopping.load(Ordering::Acquire) {
                return None;
            }
            if let Some(oldest) = served.iter().find(|served| !served.is_in_hand) {
                let _ = oldest.stream.shutdown(Shutdown::Both);
            }
            served = self.fewer.wait_timeout(served, until - now).0;
        }
        served.push(Served { stream: stream.clone(), is_in_hand: false });
        Some(ConnectionSlot { shared: self.clone(), stream })
    }

    /// Status line, further header lines, body.
    fn respond(&self, head: &[u8]) -> (&'static str, &'static str, String) {
        let line = head.split(|b| *b == b'\r' || *b == b'\n').next().unwrap_or_default();
        let words: Vec<&str> = std::str::from_utf8(line).unwrap_or_default().split(' ').collect();
        let &[method, target, version] = &*words else {
            return ("400 Bad Request", "", "this is not HTTP\n".into());
        };
        if !version.starts_with("HTTP/1.") {
            return ("505 HTTP Version Not Supported", "", "this server speaks HTTP/1.1\n".into());
        }
        if method != "GET" {
            return ("405 Method Not Allowed", "Allow: GET\r\n", "only GET is answered\n".into());
        }
        match target.split_once('?').map_or(target, |(path, _)| path) {
            "/metrics" => ("200 OK", "", text(&self.server, &(self.status)())),
            _ => ("404 Not Found", "", "the metrics are at /metrics\n".into()),
        }
    }
}

fn serve_on_a_thread(place: ConnectionSlot, peer: SocketAddr) {
    let thread = std::thread::Builder::new().name("metrics-peer".into());
    let spawned = thread.spawn(move || {
        if let Err(error) = serve(&place) {
            tracing::debug!(%peer, %error, "a request for metrics failed");
        }
    });
    if let Err(error) = spawned {
        tracing::debug!(%peer, %error, "no thread for a request for metrics");
    }
}

/// Answers one request.
fn serve(place: &ConnectionSlot) -> std::io::Result<()> {
    let until = Instant::now() + REQUEST_MAX;
    let Some(head) = read_head(&place.stream, until)? else {
        let message = "the request is too long\n";
        return answer(&place.stream, until, "431 Request Header Fields Too Large", "", message);
    };
    place.set_in_hand(true);
    let (status, extra, body) = place.shared.respond(&head);
    place.set_in_hand(false);
    answer(&place.stream, until, status, extra, &body)
}

/// The request up to its empty line; `None` if that is too long.
fn read_head(mut stream: &TcpStream, until: Instant) -> std::io::Result<Option<Vec<u8>>> {
    let mut head = Vec::with_capacity(1024);
    loop {
        if head.windows(4).any(|w| w == b"\r\n\r\n") || head.windows(2).any(|w| w == b"\n\n") {
            return Ok(Some(head));
        }
        let room = HEAD_MAX_BYTES - head.len();
        if room == 0 {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left(until)?))?;
        let mut bytes = [0; 1024];
        let got = stream.read(&mut bytes[..room.min(1024)])?;
        if got == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        head.extend_from_slice(&bytes[..got]);
    }
}

fn answer(mut stream: &TcpStream, until: Instant, status: &str, extra: &str, body: &str) -> std::io::Result<()> {
    let kind = if status.starts_with("200") { "text/plain; version=0.0.4; charset=utf-8" } else { "text/plain" };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\n{extra}Content-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let bytes = [head.as_bytes(), body.as_bytes()].concat();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(rest)? {
            0 => return Err(std::io::ErrorKind::WriteZero.into()),
            written => rest = &rest[written..],
        }
    }
    // What the peer sent beyond its request must not turn the close into a reset that takes the answer along.
    stream.shutdown(Shutdown::Write)?;
    let mut drained = 0;
    let mut bytes = [0; 4096];
    while drained < HEAD_MAX_BYTES {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(&mut bytes)? {
            0 => break,
            got => drained += got,
        }
    }
    Ok(())
}

/// Time left before a deadline.
fn left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}
