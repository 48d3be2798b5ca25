//! `GET /metrics` over HTTP/1.1, for scrapers on a monitoring network. Every wait and every buffer has a bound: a few
//! threads serve one request for each connection.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::text;

/// Threads: a scraper that stalls does not keep others waiting.
const THREADS: usize = 4;
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
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    listener: TcpListener,
    server: String,
    status: Box<dyn Fn() -> Value + Send + Sync>,
    stopping: AtomicBool,
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
        let shared =
            Shared { listener, server: server.into(), status: Box::new(status), stopping: AtomicBool::new(false) };
        let mut endpoint = Endpoint { shared: Arc::new(shared), address, threads: Vec::new() };
        for n in 0..THREADS {
            let shared = endpoint.shared.clone();
            let thread = std::thread::Builder::new().name(format!("metrics-{n}"));
            endpoint.threads.push(thread.spawn(move || shared.accept()).map_err(failed)?);
        }
        tracing::info!(server, %address, "metrics");
        Ok(endpoint)
    }

    /// The address that it answers at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // On Linux this ends the accepts that wait. A thread that serves ends at its next deadline, without a
        // caller waiting for it.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        for thread in self.threads.drain(..) {
            let until = Instant::now() + ACCEPT_PAUSE * 2;
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Shared {
    fn accept(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if let Err(error) = self.serve(stream) {
                        tracing::debug!(%peer, %error, "a request for metrics failed");
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

    /// Answers one request and closes.
    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let until = Instant::now() + REQUEST_MAX;
        let Some(head) = read_head(&mut stream, until)? else {
            return answer(&mut stream, until, "431 Request Header Fields Too Large", "", "the request is too long\n");
        };
        let (status, extra, body) = self.respond(&head);
        answer(&mut stream, until, status, extra, &body)
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

/// The request up to its empty line; `None` if that is too long.
fn read_head(stream: &mut TcpStream, until: Instant) -> std::io::Result<Option<Vec<u8>>> {
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

fn answer(stream: &mut TcpStream, until: Instant, status: &str, extra: &str, body: &str) -> std::io::Result<()> {
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
