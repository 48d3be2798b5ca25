//! Links between processes that fail: what a link carries is held back, delivered late, or cut off.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often it is looked whether what is held back may go on.
const STEP: Duration = Duration::from_millis(1);
const CHUNK_BYTES: usize = 1 << 16;

/// A link to a server: whoever connects to its address is connected to the server.
pub struct Link {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    server: String,
    /// Nothing gets through; connections stay.
    is_held: AtomicBool,
    /// Connections before this number were lost: their senders have them no more.
    lost: AtomicUsize,
    /// What is on lost connections is held back.
    is_stranding: AtomicBool,
    /// New connections are refused.
    is_cut: AtomicBool,
    is_over: AtomicBool,
    /// Connections so far.
    count: AtomicUsize,
    /// Both ends of every connection, by number.
    ends: Mutex<BTreeMap<usize, (TcpStream, TcpStream)>>,
    late_bytes: AtomicUsize,
}

impl Link {
    /// A link to a server's address, `host:port`, which need not listen yet.
    pub fn to(server: &str) -> io::Result<Link> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Shared {
            server: server.into(),
            is_held: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            is_stranding: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            ends: Mutex::default(),
            late_bytes: AtomicUsize::new(0),
        });
        let here = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if here.is_over.load(SeqCst) {
                    return;
                }
                let _ = client.and_then(|client| here.connect(client)); // refused, or the server is not there
            }
        });
        Ok(Link { address, shared })
    }

    /// Where it is reached.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Holds everything back, in both directions, as a network that does not answer.
    pub fn hold(&self) {
        self.shared.is_held.store(true, SeqCst);
    }

    /// Takes the present connections from who made them. What was sent on them and has not arrived does so when the link
    /// heals; the answers are lost. New connections work at once.
    pub fn lose(&self) {
        self.shared.is_stranding.store(true, SeqCst);
        self.shared.lost.store(self.shared.count.load(SeqCst), SeqCst);
        for (client, _) in self.shared.ends().values() {
            let _ = client.shutdown(Shutdown::Both); // it may have ended
        }
    }

    /// Ends all connections at both ends, and refuses new ones.
    pub fn cut(&self) {
        self.shared.is_cut.store(true, SeqCst);
        self.shared.end_all();
    }

    /// Holds nothing back any more but what was lost.
    pub fn go_on(&self) {
        self.shared.is_held.store(false, SeqCst);
    }

    /// All works again, and what was held back or lost arrives.
    pub fn heal(&self) {
        self.shared.is_held.store(false, SeqCst);
        self.shared.is_cut.store(false, SeqCst);
        self.shared.is_stranding.store(false, SeqCst);
    }

    /// Bytes so far that came to the server after their sender had lost the connection.
    pub fn late_bytes(&self) -> usize {
        self.shared.late_bytes.load(SeqCst)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.is_over.store(true, SeqCst);
        self.heal();
        self.shared.end_all();
        let _ = TcpStream::connect(&self.address); // its thread notices
    }
}

impl Shared {
    fn ends(&self) -> MutexGuard<'_, BTreeMap<usize, (TcpStream, TcpStream)>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_all(&self) {
        for (client, server) in self.ends().values() {
            let _ = client.shutdown(Shutdown::Both); // it may have ended
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    fn connect(self: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
        if self.is_cut.load(SeqCst) {
            return Ok(());
        }
        let server = TcpStream::connect(&self.server)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let number = self.count.fetch_add(1, SeqCst);
        self.ends().insert(number, (client.try_clone()?, server.try_clone()?));
        let (there, back) = (self.clone(), self.clone());
        let (from, to) = (client.try_clone()?, server.try_clone()?);
        std::thread::spawn(move || there.carry(number, from, to, true));
        std::thread::spawn(move || {
            back.carry(number, server, client, false);
            back.ends().remove(&number);
        });
        Ok(())
    }

    fn carry(&self, number: usize, mut from: TcpStream, mut to: TcpStream, is_there: bool) {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let got = from.read(&mut buffer).unwrap_or(0);
            let is_lost = || number < self.lost.load(SeqCst);
            while self.is_held.load(SeqCst) || self.is_stranding.load(SeqCst) && is_lost() {
                std::thread::sleep(STEP);
            }
            if is_lost() && is_there {
                self.late_bytes.fetch_add(got, SeqCst);
            }
            let carried = buffer.get(..got).unwrap_or_default();
            // An answer whose asker has gone is read all the same, so that the server goes on to the next call.
            if got == 0 || to.write_all(carried).is_err() && is_there {
                let _ = to.shutdown(if is_there { Shutdown::Write } else { Shutdown::Both });
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that keeps what comes.
    fn listening() -> (String, Arc<Mutex<Vec<u8>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, kept) = (listener.local_addr().unwrap().to_string(), Arc::new(Mutex::new(Vec::new())));
        let here = kept.clone();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let (mut socket, kept) = (socket.unwrap(), here.clone());
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while socket.read(&mut byte).is_ok_and(|got| got == 1) {
                        kept.lock().unwrap().push(byte[0]);
                        if socket.write_all(&byte).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        (address, kept)
    }

    fn say(link: &Link, byte: u8) -> TcpStream {
        let mut socket = TcpStream::connect(link.address()).unwrap();
        socket.write_all(&[byte]).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    }

    fn is_answered(socket: &mut TcpStream) -> bool {
        socket.read(&mut [0]).is_ok_and(|got| got == 1)
    }

    #[test]
    fn what_is_held_comes_late_and_what_is_lost_comes_without_its_sender() {
        let (server, kept) = listening();
        let link = Link::to(&server).unwrap();
        let mut first = say(&link, 1);
        crate::until("it is answered", || is_answered(&mut first));
        link.hold();
        let mut second = say(&link, 2);
        assert!(!is_answered(&mut second));
        link.heal();
        crate::until("it is answered", || is_answered(&mut second));
        link.hold();
        first.write_all(&[3]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        link.lose();
        link.go_on();
        assert!(!is_answered(&mut first) && !is_answered(&mut second));
        let mut fourth = say(&link, 4);
        crate::until("new connections work", || is_answered(&mut fourth));
        assert_eq!(*kept.lock().unwrap(), [1, 2, 4]);
        link.heal();
        crate::until("what was lost arrives", || *kept.lock().unwrap() == [1, 2, 4, 3]);
        assert_eq!(link.late_bytes(), 1);
        link.cut();
        assert!(!is_answered(&mut fourth) && !is_answered(&mut second));
        assert!(TcpStream::connect(link.address()).is_ok_and(|mut socket| {
            let _ = socket.write_all(&[5]); // it may be closed already
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            !is_answered(&mut socket)
        }));
        link.heal();
        let mut sixth = say(&link, 6);
        crate::until("it is answered", || is_answered(&mut sixth));
        assert!(!kept.lock().unwrap().contains(&5));
    }
}
