//! A client of 9P2000.L over TCP, for measuring diod: what kernel clients send, and nothing held back or answered here.
//!
//! A request that is longer than the server's messages is cut, and its pieces are sent at once. Every answer's length, kind
//! and tag are checked, and each is waited for a limited time ([`PATIENCE`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use impresario_workload::access::{Identity, Process, Target};

use super::connection::{Connection, PATIENCE, Refusal};
use super::session::{Session, process};

/// Kinds of requests; the answer's kind is one more.
mod kind {
    pub const ERROR: u8 = 7;
    pub const LOPEN: u8 = 12;
    pub const LCREATE: u8 = 14;
    pub const GETATTR: u8 = 24;
    pub const FSYNC: u8 = 50;
    pub const MKDIR: u8 = 72;
    pub const VERSION: u8 = 100;
    pub const ATTACH: u8 = 104;
    pub const WALK: u8 = 110;
    pub const READ: u8 = 116;
    pub const WRITE: u8 = 118;
    pub const CLUNK: u8 = 120;
    pub const REMOVE: u8 = 122;
}

/// Length, kind and tag of a message.
const HEAD_BYTES: usize = 7;
/// What a message with data has before them, at most.
const DATA_HEAD_BYTES: u32 = 24;
/// The longest message that is asked for: 1 MiB of data.
const MESSAGE_BYTES_MAX: u32 = (1 << 20) + DATA_HEAD_BYTES;
/// Pieces of data are whole pages.
const PAGE_BYTES: u32 = 4096;
const NO_TAG: u16 = u16::MAX;
const NO_FID: u32 = u32::MAX;
/// The attached folder.
const ROOT: u32 = 0;

/// A message that is being written.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u8, tag: u16) -> Message {
        let mut bytes = vec![0, 0, 0, 0, kind];
        bytes.extend(tag.to_le_bytes());
        Message(bytes)
    }

    fn u16(mut self, value: u16) -> Message {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Message {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Message {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A text; none of ours has 64 KiB.
    fn text(self, text: &str) -> Message {
        let mut message = self.u16(text.len() as u16);
        message.0.extend(text.as_bytes());
        message
    }

    /// The bytes, with the length of the message and of so many bytes that follow it.
    fn before(mut self, payload: usize) -> Vec<u8> {
        let len = (self.0.len() + payload) as u32;
        self.0[..4].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

/// Takes a little-endian number off the front of an answer.
fn number<const N: usize>(bytes: &mut &[u8]) -> Result<u64> {
    let (number, rest) = bytes.split_at_checked(N).context("an answer is too short")?;
    *bytes = rest;
    Ok(number.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// The head of an answer: kind, tag, and bytes that follow.
fn head(bytes: &[u8; HEAD_BYTES], longest: u32) -> Result<(u8, u16, usize)> {
    let mut rest = &bytes[..];
    let (len, kind, tag) = (number::<4>(&mut rest)?, number::<1>(&mut rest)?, number::<2>(&mut rest)?);
    ensure!((HEAD_BYTES as u64..=longest.into()).contains(&len), "an answer says that it has {len} bytes");
    Ok((kind as u8, tag as u16, len as usize - HEAD_BYTES))
}

struct Client {
    connection: Connection,
    message_bytes: u32,
    /// Numbers from here on name nothing yet.
    next_fid: u32,
    free_fids: Vec<u32>,
    /// Folders that were walked to, as working directories are.
    folders: HashMap<String, u32>,
}

impl Client {
    fn connect(address: SocketAddr, export: &str, patience: Duration) -> Result<Client> {
        let connection = Connection::open(address, patience)?;
        let (message_bytes, folders) = (MESSAGE_BYTES_MAX, HashMap::new());
        let mut client = Client { connection, message_bytes, next_fid: ROOT + 1, free_fids: Vec::new(), folders };
        let version = Message::new(kind::VERSION, NO_TAG).u32(MESSAGE_BYTES_MAX).text("9P2000.L");
        let answer = client.call(version)?;
        let mut rest = &answer[..];
        let granted = number::<4>(&mut rest)? as u32;
        ensure!(
            (PAGE_BYTES + DATA_HEAD_BYTES..=MESSAGE_BYTES_MAX).contains(&granted) && rest == b"\x08\x009P2000.L",
            "the server speaks another version, or in messages of {granted} bytes"
        );
        client.message_bytes = granted;
        let user = rustix::process::geteuid().as_raw();
        client.call(Message::new(kind::ATTACH, 0).u32(ROOT).u32(NO_FID).text("").text(export).u32(user))?;
        Ok(client)
    }

    /// Waits for the answer to a request of this kind: its tag, and how many bytes follow, or that it was refused.
    fn answer(&mut self, request: u8, deadline: Instant) -> Result<(u16, Result<usize, Refusal>)> {
        let mut bytes = [0; HEAD_BYTES];
        self.connection.fill(&mut bytes, deadline)?;
        let (kind, tag, rest) = head(&bytes, self.message_bytes)?;
        if kind == kind::ERROR {
            ensure!(rest == 4, "an error has {rest} bytes");
            let mut error = [0; 4];
            self.connection.fill(&mut error, deadline)?;
            return Ok((tag, Err(Refusal { number: u32::from_le_bytes(error) })));
        }
        ensure!(kind == request + 1, "a request of kind {request} was answered by one of kind {kind}");
        Ok((tag, Ok(rest)))
    }

    /// A request and the body of its answer.
    fn call(&mut self, request: Message) -> Result<Vec<u8>> {
        self.connection.check()?;
        let result = self.call_once(request);
        self.connection.settle(result)
    }

    fn call_once(&mut self, request: Message) -> Result<Vec<u8>> {
        let (kind, tag) = (request.0[4], u16::from_le_bytes([request.0[5], request.0[6]]));
        self.connection.send(&request.before(0), &[])?;
        let deadline = self.connection.deadline();
        let (answered, rest) = self.answer(kind, deadline)?;
        ensure!(answered == tag, "the request with tag {tag} was answered with tag {answered}");
        let mut body = vec![0; rest?];
        self.connection.fill(&mut body, deadline)?;
        Ok(body)
    }

    /// Sends requests of one kind, one for each piece, and takes their answers in any order by `take`.
    fn pieces(
        &mut self,
        kind: u8,
        pieces: usize,
        send: impl Fn(&mut Connection, u16) -> Result<()>,
        mut take: impl FnMut(&mut Connection, usize, usize, Instant) -> Result<()>,
    ) -> Result<()> {
        ensure!(pieces < usize::from(NO_TAG), "a request is cut into {pieces} pieces");
        self.connection.check()?;
        let result = (|| {
            (0..pieces).try_for_each(|piece| send(&mut self.connection, piece as u16))?;
            let (mut waiting, mut refused) = (vec![true; pieces], None);
            for _ in 0..pieces {
                let deadline = self.connection.deadline();
                let (tag, answer) = self.answer(kind, deadline)?;
                let waited = waiting.get_mut(usize::from(tag)).is_some_and(std::mem::take);
                ensure!(waited, "an answer has tag {tag}, which no request has");
                match answer {
                    Ok(rest) => take(&mut self.connection, usize::from(tag), rest, deadline)?,
                    Err(refusal) => refused = Some(refusal),
                }
            }
            refused.map_or(Ok(()), |refusal| Err(refusal.into()))
        })();
        self.connection.settle(result)
    }

    fn piece_bytes(&self) -> usize {
        ((self.message_bytes - DATA_HEAD_BYTES) / PAGE_BYTES * PAGE_BYTES) as usize
    }

    /// A number that names nothing yet comes to name what `name` does in a folder, or the folder itself.
    fn walk(&mut self, folder: u32, name: Option<&str>) -> Result<u32> {
        let fid = self.free_fids.pop().unwrap_or(self.next_fid);
        self.next_fid = self.next_fid.max(fid + 1);
        let request = Message::new(kind::WALK, 0).u32(folder).u32(fid).u16(name.iter().len() as u16);
        let request = name.iter().fold(request, |request, name| request.text(name));
        let walked = self.call(request).and_then(|answer| {
            ensure!(number::<2>(&mut &answer[..])? == name.iter().len() as u64, "a walk ended early");
            Ok(fid)
        });
        if walked.is_err() {
            self.free_fids.push(fid);
        }
        walked
    }

    /// The folder of a path, and the name in it.
    fn place<'a>(&mut self, path: &'a str) -> Result<(u32, &'a str)> {
        let Some((folder, name)) = path.rsplit_once('/') else { return Ok((ROOT, path)) };
        if let Some(fid) = self.folders.get(folder) {
            return Ok((*fid, name));
        }
        let (above, last) = self.place(folder)?;
        let fid = self.walk(above, Some(last))?;
        self.folders.insert(folder.into(), fid);
        Ok((fid, name))
    }

    /// The number is free again, whatever the server says.
    fn clunk(&mut self, fid: u32) -> Result<()> {
        self.free_fids.push(fid);
        self.call(Message::new(kind::CLUNK, 0).u32(fid)).map(drop)
    }

    /// A call on a number that was walked to; where it is refused, the number is given back.
    fn call_on(&mut self, fid: u32, request: Message) -> Result<Vec<u8>> {
        let result = self.call(request);
        if result.is_err() {
            _ = self.clunk(fid);
        }
        result
    }
}

impl Session for Client {
    /// The number that names it at the server.
    type File = u32;

    fn make_dir(&mut self, path: &str) -> Result<bool> {
        let (folder, name) = self.place(path)?;
        match self.call(Message::new(kind::MKDIR, 0).u32(folder).text(name).u32(0o755).u32(0)) {
            Err(error) if error.downcast_ref() == Some(&Refusal { number: libc::EEXIST as u32 }) => Ok(false),
            result => result.map(|_| true),
        }
    }

    fn create(&mut self, path: &str) -> Result<u32> {
        let (folder, name) = self.place(path)?;
        let fid = self.walk(folder, None)?;
        let flags = (libc::O_RDWR | libc::O_CREAT) as u32;
        let request = Message::new(kind::LCREATE, 0).u32(fid).text(name).u32(flags).u32(0o644).u32(0);
        self.call_on(fid, request)?;
        Ok(fid)
    }

    fn open(&mut self, path: &str, write: bool) -> Result<u32> {
        let (folder, name) = self.place(path)?;
        let fid = self.walk(folder, Some(name))?;
        let flags = if write { libc::O_RDWR } else { libc::O_RDONLY } as u32;
        self.call_on(fid, Message::new(kind::LOPEN, 0).u32(fid).u32(flags))?;
        Ok(fid)
    }

    fn read(&mut self, fid: &u32, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let (piece_bytes, len) = (self.piece_bytes(), buffer.len());
        let of = |piece: usize| (piece * piece_bytes, piece_bytes.min(len - piece * piece_bytes));
        let mut got = vec![0; len.div_ceil(piece_bytes)];
        let send = |connection: &mut Connection, tag: u16| {
            let (from, len) = of(tag.into());
            let request = Message::new(kind::READ, tag).u32(*fid).u64(offset + from as u64).u32(len as u32);
            connection.send(&request.before(0), &[])
        };
        self.pieces(kind::READ, got.len(), send, |connection, piece, rest, deadline| {
            let mut count = [0; 4];
            connection.fill(&mut count, deadline)?;
            let ((from, len), count) = (of(piece), u32::from_le_bytes(count) as usize);
            ensure!(count <= len && rest == 4 + count, "a read of {len} bytes gave {count} in {rest}");
            got[piece] = count;
            connection.fill(&mut buffer[from..from + count], deadline)
        })?;
        // What lies behind the end of the file does not count.
        let whole = got.iter().enumerate().take_while(|(piece, count)| **count == of(*piece).1).count();
        Ok(got.iter().take(whole + 1).sum())
    }

    fn write(&mut self, fid: &u32, data: &[u8], offset: u64) -> Result<()> {
        let piece_bytes = self.piece_bytes();
        let pieces: Vec<&[u8]> = data.chunks(piece_bytes).collect();
        let send = |connection: &mut Connection, tag: u16| {
            let (piece, at) = (pieces[usize::from(tag)], offset + u64::from(tag) * piece_bytes as u64);
            let request = Message::new(kind::WRITE, tag).u32(*fid).u64(at).u32(piece.len() as u32);
            connection.send(&request.before(piece.len()), piece)
        };
        self.pieces(kind::WRITE, pieces.len(), send, |connection, piece, rest, deadline| {
            ensure!(rest == 4, "the answer to a write has {rest} bytes");
            let mut count = [0; 4];
            connection.fill(&mut count, deadline)?;
            let (count, len) = (u32::from_le_bytes(count) as usize, pieces[piece].len());
            ensure!(count == len, "only {count} of {len} bytes were written");
            Ok(())
        })
    }

    fn sync(&mut self, fid: &u32) -> Result<()> {
        self.call(Message::new(kind::FSYNC, 0).u32(*fid)).map(drop)
    }

    fn close(&mut self, fid: &u32) -> Result<()> {
        self.clunk(*fid)
    }

    fn size(&mut self, path: &str) -> Result<u64> {
        const BASIC: u64 = 0x7ff;
        /// Of the size behind validity, qid, mode, owner, group, links and device.
        const SIZE_AT: usize = 8 + 13 + 3 * 4 + 2 * 8;
        let (folder, name) = self.place(path)?;
        let fid = self.walk(folder, Some(name))?;
        let answer = self.call_on(fid, Message::new(kind::GETATTR, 0).u32(fid).u64(BASIC))?;
        self.clunk(fid)?;
        number::<8>(&mut answer.get(SIZE_AT..).context("attributes are too short")?)
    }

    /// By its number, which is free then whatever the server says: diod has no `unlinkat`.
    fn remove(&mut self, path: &str) -> Result<()> {
        let (folder, name) = self.place(path)?;
        let fid = self.walk(folder, Some(name))?;
        self.free_fids.push(fid);
        self.call(Message::new(kind::REMOVE, 0).u32(fid)).map(drop)
    }

    fn remove_dir(&mut self, path: &str) -> Result<()> {
        if let Some(fid) = self.folders.remove(path) {
            self.clunk(fid)?;
        }
        self.remove(path)
    }
}

/// A diod, or another server of this protocol.
pub struct NineP {
    /// Where it listens.
    pub address: SocketAddr,
    /// The folder that it exports.
    pub export: String,
    /// Its process.
    pub pids: Vec<u32>,
}

impl Target for NineP {
    fn connect(&self, _: Identity) -> Result<Box<dyn Process>> {
        let client = Client::connect(self.address, &self.export, PATIENCE).context("a client of 9P2000.L")?;
        Ok(process(client))
    }

    fn pids(&self) -> Vec<u32> {
        self.pids.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::subject::Subject;
    use crate::peers::{names, works};
    use impresario_testing::require;
    use impresario_workload::stop::Stop;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    #[test]
    fn messages_are_what_the_protocol_says() {
        let version = Message::new(kind::VERSION, NO_TAG).u32(0x0010_0018).text("9P2000.L").before(0);
        assert_eq!(version, b"\x15\0\0\0\x64\xff\xff\x18\0\x10\0\x08\x009P2000.L");
        let walk = Message::new(kind::WALK, 3).u32(1).u32(2).u16(1).text("ab").before(0);
        assert_eq!(walk, b"\x15\0\0\0\x6e\x03\0\x01\0\0\0\x02\0\0\0\x01\0\x02\0ab");
        let write = Message::new(kind::WRITE, 0x102).u32(7).u64(0x1_0000_0002).u32(5).before(5);
        assert_eq!(write, b"\x1c\0\0\0\x76\x02\x01\x07\0\0\0\x02\0\0\0\x01\0\0\0\x05\0\0\0");
        assert_eq!(head(b"\x0b\0\0\0\x75\x02\x01", 100).unwrap(), (117, 0x102, 4));
        for bad in [b"\x06\0\0\0\x75\0\0", b"\x65\0\0\0\x75\0\0", b"\xff\xff\xff\xff\x75\0\0"] {
            assert!(head(bad, 100).is_err(), "{bad:?}");
        }
        let mut rest = &b"\x01\x02\x03"[..];
        assert_eq!((number::<2>(&mut rest).unwrap(), rest), (0x201, &b"\x03"[..]));
        assert!(number::<2>(&mut rest).is_err());
    }

    /// A server that grants messages of 8 KiB, lets attach, and then gives these answers, one for each request.
    fn scripted(answers: Vec<Vec<u8>>) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let first = [
                b"\x15\0\0\0\x65\xff\xff\0\x20\0\0\x08\x009P2000.L".to_vec(),
                [&b"\x14\0\0\0\x69\0\0"[..], &[0; 13]].concat(),
            ];
            for answer in first.into_iter().chain(answers) {
                let mut len = [0; 4];
                stream.read_exact(&mut len).unwrap();
                stream.read_exact(&mut vec![0; u32::from_le_bytes(len) as usize - 4]).unwrap();
                stream.write_all(&answer).unwrap();
            }
            // Until the client goes.
            _ = stream.read(&mut [0]);
        });
        Client::connect(address, "/export", Duration::from_millis(200)).unwrap()
    }

    #[test]
    fn pieces_are_put_together_in_any_order() {
        let piece = |tag: u8, bytes: &[u8]| {
            let head = [(11 + bytes.len()) as u32, 0].map(u32::to_le_bytes);
            let mut answer = [&head[0][..], &[117, tag, 0], &(bytes.len() as u32).to_le_bytes(), bytes].concat();
            answer.truncate(11 + bytes.len());
            answer
        };
        // The first answer comes with the second request only.
        let both = [piece(1, &[2; 100]), piece(0, &[1; 4096])].concat();
        let mut client = scripted(vec![Vec::new(), both]);
        let mut buffer = vec![0; 6000];
        assert_eq!(client.read(&9, &mut buffer, 0).unwrap(), 4196);
        assert!(buffer[..4096].iter().all(|b| *b == 1) && buffer[4096..4196].iter().all(|b| *b == 2));
        // A hole before the second piece: the file ends there.
        let mut client = scripted(vec![piece(0, &[1; 10]), piece(1, &[2; 100])]);
        assert_eq!(client.read(&9, &mut buffer, 0).unwrap(), 10);
    }

    #[test]
    fn nonsense_and_silence_are_errors_and_end_the_session_and_refusals_do_not() {
        let clunked = b"\x07\0\0\0\x79\0\0".to_vec();
        for (answer, why) in [
            (b"\x07\0\0\0\x79\x01\0".to_vec(), "tag 1"),
            (b"\x07\0\0\0\x75\0\0".to_vec(), "kind 117"),
            (b"\x02\0\0\0\x79\0\0".to_vec(), "has 2 bytes"),
            (b"\x01\x20\0\0\x79\0\0".to_vec(), "has 8193 bytes"),
            (b"\x0c\0\0\0\x07\0\0\0\0\0\0\0".to_vec(), "an error has 5 bytes"),
            (Vec::new(), "no answer within 0.2 s"),
        ] {
            let mut client = scripted(vec![answer, clunked.clone()]);
            let error = client.clunk(5).unwrap_err().to_string();
            assert!(error.contains(why), "{error} instead of {why}");
            assert!(client.clunk(5).unwrap_err().to_string().contains("failed before"));
        }
        for (answer, why) in [
            (b"\x0f\0\0\0\x75\0\0\x05\0\0\0abcd".to_vec(), "gave 5"),
            (b"\x0f\0\0\0\x75\x09\0\x04\0\0\0abcd".to_vec(), "tag 9"),
        ] {
            let error = scripted(vec![answer]).read(&1, &mut [0; 4], 0).unwrap_err().to_string();
            assert!(error.contains(why), "{error} instead of {why}");
        }
        let mut client = scripted(vec![b"\x0b\0\0\0\x07\0\0\x02\0\0\0".to_vec(), clunked]);
        assert_eq!(client.size("none").unwrap_err().downcast::<Refusal>().unwrap(), Refusal { number: 2 });
        client.clunk(5).unwrap();
    }

    #[test]
    fn diod_is_a_server_of_this_protocol() {
        if !require("diod") {
            return;
        }
        let server = Subject::Diod.start("auto", &Stop::new()).unwrap();
        crate::peers::tests::every_work_is_verified(server.target.as_ref(), works(0.001));
        names::measure(server.target.as_ref(), 3, 7, &Stop::new()).unwrap();
    }
}
