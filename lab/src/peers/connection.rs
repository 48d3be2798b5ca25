//! A TCP connection of a measuring client, whose waits are bounded.

use std::io::{BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// How long a server may take to answer.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// What is read ahead of an answer's head; longer payloads go straight to their place.
const BUFFER_BYTES: usize = 8 << 10;

/// A connection. Once it has failed, every later use fails at once: what would come is the rest of an earlier answer.
pub struct Connection {
    stream: BufReader<TcpStream>,
    patience: Duration,
    failed: bool,
}

impl Connection {
    /// Connects; no answer may take longer than `patience`.
    pub fn open(address: SocketAddr, patience: Duration) -> Result<Connection> {
        let stream =
            TcpStream::connect_timeout(&address, patience).with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Connection { stream: BufReader::with_capacity(BUFFER_BYTES, stream), patience, failed: false })
    }

    /// Until when an answer that is waited for from now on must be there.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// Refuses to go on where an earlier exchange failed.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.failed, "the connection failed before");
        Ok(())
    }

    /// The result of an exchange. After an error other than a [`Refusal`] the connection is of no more use.
    pub fn settle<T>(&mut self, result: Result<T>) -> Result<T> {
        self.failed |= result.as_ref().is_err_and(|error| !error.is::<Refusal>());
        result
    }

    /// Sends a message that consists of two parts.
    pub fn send(&mut self, head: &[u8], payload: &[u8]) -> Result<()> {
        let deadline = self.deadline();
        let mut parts = [IoSlice::new(head), IoSlice::new(payload)];
        let mut parts = &mut parts[..];
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match self.stream.get_mut().write_vectored(parts) {
                Ok(0) => bail!("the server takes no more"),
                Ok(n) => IoSlice::advance_slices(&mut parts, n),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failure(e)),
            }
            ensure!(parts.is_empty() || Instant::now() < deadline, "the server is too slow in taking a request");
        }
        Ok(())
    }

    /// Reads until the buffer is full. Bytes that come one by one take up to [`PATIENCE`] more than the deadline.
    pub fn fill(&mut self, mut into: &mut [u8], deadline: Instant) -> Result<()> {
        while !into.is_empty() {
            match self.stream.read(into) {
                Ok(0) => bail!("the server closed the connection"),
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failure(e)),
            }
            ensure!(into.is_empty() || Instant::now() < deadline, self.no_answer());
        }
        Ok(())
    }

    fn failure(&self, error: std::io::Error) -> anyhow::Error {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => anyhow::Error::msg(self.no_answer()),
            _ => anyhow::Error::new(error).context("the connection to the server failed"),
        }
    }

    fn no_answer(&self) -> String {
        format!("no answer within {} s", self.patience.as_secs_f64())
    }
}

/// The server answered that it does not do what was asked; the connection is whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The error's number: of Linux, or of the protocol where it has numbers of its own.
    pub number: u32,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the server refused: error {}", self.number)
    }
}

impl std::error::Error for Refusal {}

/// `None` where the server refused for want of such a file (2 in Linux and in NFS).
pub fn unless_missing<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(error) if error.downcast_ref() == Some(&Refusal { number: 2 }) => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair(patience: Duration) -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = Connection::open(listener.local_addr().unwrap(), patience).unwrap();
        (connection, listener.accept().unwrap().0)
    }

    #[test]
    fn what_is_sent_arrives_whole_and_what_comes_in_bits_is_put_together() {
        let (mut connection, mut server) = pair(Duration::from_secs(20));
        let payload: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        let echo = std::thread::spawn(move || {
            let mut all = vec![0; 100_003];
            server.read_exact(&mut all).unwrap();
            all.chunks(33_331).for_each(|bit| server.write_all(bit).unwrap());
        });
        connection.send(b"abc", &payload).unwrap();
        let deadline = connection.deadline();
        let (mut head, mut back) = ([0; 4], vec![0; 99_999]);
        connection.fill(&mut head, deadline).unwrap();
        connection.fill(&mut back, deadline).unwrap();
        assert!(head == [b'a', b'b', b'c', 0] && back == payload[1..]);
        echo.join().unwrap();
        assert!(connection.fill(&mut head, deadline).unwrap_err().to_string().contains("closed"));
    }

    #[test]
    fn a_silent_or_slow_server_ends_the_wait_and_the_connection_is_of_no_more_use() {
        let (mut connection, mut server) = pair(Duration::from_millis(50));
        let wait = |c: &mut Connection| {
            c.check()?;
            let filled = c.fill(&mut [0; 100], c.deadline());
            c.settle(filled)
        };
        let began = Instant::now();
        assert!(wait(&mut connection).unwrap_err().to_string().contains("no answer within 0.05 s"));
        assert!(began.elapsed() < PATIENCE);
        server.write_all(&[0; 100]).unwrap();
        assert!(wait(&mut connection).unwrap_err().to_string().contains("failed before"));

        let (mut connection, mut server) = pair(Duration::from_millis(100));
        let drops = std::thread::spawn(move || {
            // One byte at a time would take seconds.
            while server.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        assert!(wait(&mut connection).unwrap_err().to_string().contains("no answer"));
        drop(connection);
        drops.join().unwrap();
    }

    #[test]
    fn a_refusal_leaves_the_connection_whole() {
        let (mut connection, _server) = pair(Duration::from_secs(20));
        let refused = |number| -> Result<()> { Err(Refusal { number }.into()) };
        assert_eq!(unless_missing(connection.settle(refused(2))).unwrap(), None);
        assert!(unless_missing(connection.settle(refused(13))).unwrap_err().to_string().contains("13"));
        connection.check().unwrap();
        connection.settle::<()>(Err(anyhow::anyhow!("nonsense came"))).unwrap_err();
        connection.check().unwrap_err();
    }
}
