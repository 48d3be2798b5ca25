//! A client of NFS version 3 over TCP, for measuring nfs-ganesha: one connection, no cache but the handles of folders.
//!
//! A request that is longer than the server takes is cut, and its pieces are sent at once. Writes are unstable, as a kernel
//! client's are until it commits. What is read goes straight to its place.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use impresario_nfs::protocol::{
    ATTR_BYTES, HANDLE_MAX_BYTES, MOUNT_PROGRAM, NFS_PROGRAM, Stability, Status, VERSION, procedure, read_attr,
};
use impresario_nfs::rpc::{Acceptance, CallHead, Credential, read_reply};
use impresario_nfs::xdr::{Reader, Writer, filling};
use impresario_workload::access::{Identity, Process, Target};

use super::connection::{Connection, PATIENCE, Refusal};
use super::session::{Session, process};

/// The longest answer without data, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// The longest read or write that is sent, bytes.
const PIECE_BYTES_MAX: u32 = 1 << 20;
/// The head of a reply whose verifier is empty, as every server's is without cryptography.
const REPLY_HEAD_BYTES: usize = 24;
/// Ends the last part of a record.
const LAST: u32 = 1 << 31;
const MOUNT: u32 = 1;

/// The record that is being read: a message in one or several parts.
struct Record<'a> {
    connection: &'a mut Connection,
    left: usize,
    last: bool,
    deadline: Instant,
}

impl<'a> Record<'a> {
    fn begin(connection: &'a mut Connection) -> Record<'a> {
        let deadline = connection.deadline();
        Record { connection, left: 0, last: false, deadline }
    }

    /// Goes on to the next part where one has ended; false at the end of the record.
    fn has_more(&mut self) -> Result<bool> {
        while self.left == 0 && !self.last {
            let mut mark = [0; 4];
            self.connection.fill(&mut mark, self.deadline)?;
            let mark = u32::from_be_bytes(mark);
            (self.left, self.last) = ((mark & !LAST) as usize, mark & LAST != 0);
        }
        Ok(self.left > 0)
    }

    fn take(&mut self, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            ensure!(self.has_more()?, "an answer ends early");
            let (now, rest) = into.split_at_mut(self.left.min(into.len()));
            self.connection.fill(now, self.deadline)?;
            self.left -= now.len();
            into = rest;
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.take(&mut bytes)?;
        Ok(bytes)
    }

    /// The rest of an answer without data.
    fn rest(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while self.has_more()? {
            let from = bytes.len();
            ensure!(self.left <= ANSWER_BYTES_MAX - from, "an answer is too long");
            bytes.resize(from + self.left, 0);
            let part = self.left;
            self.take(&mut bytes[from..from + part])?;
        }
        Ok(bytes)
    }

    /// The number of the call that is answered, which was carried out.
    fn head(&mut self) -> Result<u32> {
        let head = self.array::<REPLY_HEAD_BYTES>()?;
        match read_reply(&mut Reader::new(&head))? {
            (xid, Acceptance::Success) => Ok(xid),
            (_, refused) => bail!("a call was not carried out: {refused:?}"),
        }
    }

    fn end(&mut self) -> Result<()> {
        let left = self.rest()?;
        ensure!(left.is_empty(), "an answer has {} bytes too many", left.len());
        Ok(())
    }
}

/// What follows a good status.
fn good(answer: &[u8]) -> Result<Reader<'_>> {
    let mut reader = Reader::new(answer);
    match Status(reader.u32()?) {
        Status::OK => Ok(reader),
        Status(number) => Err(Refusal { number }.into()),
    }
}

/// Reads over what a file was before and after.
fn skip_change(reader: &mut Reader<'_>) -> Result<()> {
    reader.optional(|reader| reader.array::<24>())?;
    reader.optional(read_attr)?;
    Ok(())
}

/// Arguments that begin with a handle.
fn of(handle: &[u8]) -> Writer {
    let mut arguments = Writer::default();
    arguments.opaque(handle);
    arguments
}

fn name_in(folder: &[u8], name: &str) -> Writer {
    let mut arguments = of(folder);
    arguments.opaque(name.as_bytes());
    arguments
}

/// Attributes to set: the mode, owner and group.
fn mode(arguments: &mut Writer, mode: u32) {
    arguments.u32(1).u32(mode).u32(0).u32(0).u32(0).u32(0).u32(0);
}

struct Client {
    connection: Connection,
    root: Vec<u8>,
    next_xid: u32,
    read_bytes: usize,
    write_bytes: usize,
    folders: HashMap<String, Vec<u8>>,
}

impl Client {
    fn connect(server: &Nfs) -> Result<Client> {
        let new = |address| -> Result<Client> {
            let connection = Connection::open(address, PATIENCE)?;
            let (read_bytes, write_bytes, folders) = (0, 0, HashMap::new());
            Ok(Client { connection, root: Vec::new(), next_xid: 1, read_bytes, write_bytes, folders })
        };
        let mut path = Writer::default();
        path.opaque(server.export.as_bytes());
        let answer = new(server.mount)?.call(MOUNT_PROGRAM, MOUNT, path)?;
        let root = good(&answer)?.opaque(HANDLE_MAX_BYTES)?.to_vec();
        let mut client = new(server.address)?;
        let answer = client.call(NFS_PROGRAM, procedure::FSINFO, of(&root))?;
        let mut info = good(&answer)?;
        info.optional(read_attr)?;
        let (read_max, _preferred, _multiple, write_max) = (info.u32()?, info.u32()?, info.u32()?, info.u32()?);
        ensure!(read_max > 0 && write_max > 0, "the server takes no data");
        client.read_bytes = read_max.min(PIECE_BYTES_MAX) as usize;
        client.write_bytes = write_max.min(PIECE_BYTES_MAX) as usize;
        client.root = root;
        Ok(client)
    }

    /// Sends a call of which `payload` is the last argument, if there is any; its number.
    fn send(&mut self, program: u32, procedure: u32, arguments: Writer, payload: &[u8]) -> Result<u32> {
        let xid = self.next_xid;
        self.next_xid = xid.wrapping_add(1);
        let mut out = Writer::with_capacity(128 + arguments.len());
        out.u32(0);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let credential = Credential::Sys { uid, gid, groups: Vec::new() };
        CallHead { xid, rpc_version: 2, program, version: VERSION, procedure, credential }.write(&mut out);
        let mut head = out.into_bytes();
        head.extend(arguments.into_bytes());
        let filling = filling(payload.len());
        let mark = (head.len() - 4 + payload.len() + filling.len()) as u32 | LAST;
        head[..4].copy_from_slice(&mark.to_be_bytes());
        self.connection.send(&head, payload)?;
        if !filling.is_empty() {
            self.connection.send(filling, &[])?;
        }
        Ok(xid)
    }

    /// A call and its answer, from the status on.
    fn call(&mut self, program: u32, procedure: u32, arguments: Writer) -> Result<Vec<u8>> {
        self.connection.check()?;
        let sent = self.send(program, procedure, arguments, &[]);
        let result = sent.and_then(|xid| {
            let mut record = Record::begin(&mut self.connection);
            let answered = record.head()?;
            ensure!(answered == xid, "call {xid} was answered as {answered}");
            record.rest()
        });
        self.connection.settle(result)
    }

    fn nfs(&mut self, procedure: u32, arguments: Writer) -> Result<Vec<u8>> {
        self.call(NFS_PROGRAM, procedure, arguments)
    }

    /// Sends a call for each piece, and takes the answers in any order by `take`.
    fn pieces<'p>(
        &mut self,
        procedure: u32,
        pieces: impl ExactSizeIterator<Item = (Writer, &'p [u8])>,
        mut take: impl FnMut(&mut Record<'_>, usize) -> Result<Option<Refusal>>,
    ) -> Result<()> {
        self.connection.check()?;
        let (first, mut waiting, mut refused) = (self.next_xid, vec![true; pieces.len()], None);
        let result = (|| {
            for (arguments, payload) in pieces {
                self.send(NFS_PROGRAM, procedure, arguments, payload)?;
            }
            for _ in 0..waiting.len() {
                let mut record = Record::begin(&mut self.connection);
                let xid = record.head()?;
                let piece = xid.wrapping_sub(first) as usize;
                let waited = waiting.get_mut(piece).is_some_and(std::mem::take);
                ensure!(waited, "an answer has number {xid}, which no call has");
                refused = take(&mut record, piece)?.or(refused);
                record.end()?;
            }
            refused.map_or(Ok(()), |refusal| Err(refusal.into()))
        })();
        self.connection.settle(result)
    }

    /// The folder of a path, and the name in it.
    fn place<'a>(&mut self, path: &'a str) -> Result<(Vec<u8>, &'a str)> {
        let Some((folder, name)) = path.rsplit_once('/') else { return Ok((self.root.clone(), path)) };
        if let Some(handle) = self.folders.get(folder) {
            return Ok((handle.clone(), name));
        }
        let (handle, _) = self.lookup(folder)?;
        self.folders.insert(folder.into(), handle.clone());
        Ok((handle, name))
    }

    /// The handle of a file, and its size where the server says that with it.
    fn lookup(&mut self, path: &str) -> Result<(Vec<u8>, Option<u64>)> {
        let (folder, name) = self.place(path)?;
        let answer = self.nfs(procedure::LOOKUP, name_in(&folder, name))?;
        let mut found = good(&answer)?;
        let handle = found.opaque(HANDLE_MAX_BYTES)?.to_vec();
        Ok((handle, found.optional(read_attr)?.map(|attributes| attributes.size_bytes)))
    }

    fn remove_by(&mut self, procedure: u32, path: &str) -> Result<()> {
        let (folder, name) = self.place(path)?;
        self.folders.remove(path);
        good(&self.nfs(procedure, name_in(&folder, name))?).map(drop)
    }
}

impl Session for Client {
    /// Its handle.
    type File = Vec<u8>;

    fn make_dir(&mut self, path: &str) -> Result<bool> {
        let (folder, name) = self.place(path)?;
        let mut arguments = name_in(&folder, name);
        mode(&mut arguments, 0o755);
        match good(&self.nfs(procedure::MKDIR, arguments)?) {
            Err(error) if error.downcast_ref() == Some(&Refusal { number: Status::EXIST.0 }) => Ok(false),
            result => result.map(|_| true),
        }
    }

    fn create(&mut self, path: &str) -> Result<Vec<u8>> {
        const UNCHECKED: u32 = 0;
        let (folder, name) = self.place(path)?;
        let mut arguments = name_in(&folder, name);
        arguments.u32(UNCHECKED);
        mode(&mut arguments, 0o644);
        let answer = self.nfs(procedure::CREATE, arguments)?;
        match good(&answer)?.optional(|reader| reader.opaque(HANDLE_MAX_BYTES))? {
            Some(handle) => Ok(handle.to_vec()),
            None => Ok(self.lookup(path)?.0),
        }
    }

    fn open(&mut self, path: &str, _write: bool) -> Result<Vec<u8>> {
        Ok(self.lookup(path)?.0)
    }

    fn read(&mut self, file: &Vec<u8>, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let (piece_bytes, len) = (self.read_bytes, buffer.len());
        let place = |piece: usize| (piece * piece_bytes, piece_bytes.min(len - piece * piece_bytes));
        let mut got = vec![0; len.div_ceil(piece_bytes)];
        let requests = (0..got.len()).map(|piece| {
            let ((from, len), mut arguments) = (place(piece), of(file));
            arguments.u64(offset + from as u64).u32(len as u32);
            (arguments, &[][..])
        });
        self.pieces(procedure::READ, requests, |record, piece| {
            let [status, has_attributes] = [record.array()?, record.array()?].map(u32::from_be_bytes);
            if has_attributes != 0 {
                record.array::<ATTR_BYTES>()?;
            }
            if status != 0 {
                return Ok(Some(Refusal { number: status }));
            }
            let [count, _eof, bytes] = [record.array()?, record.array()?, record.array()?].map(u32::from_be_bytes);
            let ((from, len), count) = (place(piece), count as usize);
            ensure!(count <= len && count == bytes as usize, "a read of {len} bytes gave {count}, and {bytes}");
            got[piece] = count;
            record.take(&mut buffer[from..from + count])?;
            record.take(&mut [0; 3][..filling(count).len()])?;
            Ok(None)
        })?;
        // What lies behind the end of the file does not count.
        let whole = got.iter().enumerate().take_while(|(piece, count)| **count == place(*piece).1).count();
        Ok(got.iter().take(whole + 1).sum())
    }

    fn write(&mut self, file: &Vec<u8>, data: &[u8], offset: u64) -> Result<()> {
        let piece_bytes = self.write_bytes;
        let requests = data.chunks(piece_bytes).enumerate().map(|(piece, bytes)| {
            let mut arguments = of(file);
            arguments.u64(offset + (piece * piece_bytes) as u64).u32(bytes.len() as u32);
            arguments.u32(Stability::Unstable as u32).u32(bytes.len() as u32);
            (arguments, bytes)
        });
        self.pieces(procedure::WRITE, requests, |record, piece| {
            let answer = record.rest()?;
            let mut answer = match good(&answer) {
                Ok(reader) => reader,
                Err(error) => return error.downcast().map(Some),
            };
            skip_change(&mut answer)?;
            let (count, len) = (answer.u32()? as usize, piece_bytes.min(data.len() - piece * piece_bytes));
            ensure!(count == len, "only {count} of {len} bytes were written");
            Ok(None)
        })
    }

    fn sync(&mut self, file: &Vec<u8>) -> Result<()> {
        let mut arguments = of(file);
        arguments.u64(0).u32(0);
        good(&self.nfs(procedure::COMMIT, arguments)?).map(drop)
    }

    /// The protocol has no open files.
    fn close(&mut self, _: &Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn size(&mut self, path: &str) -> Result<u64> {
        match self.lookup(path)? {
            (_, Some(size)) => Ok(size),
            (handle, None) => {
                let answer = self.nfs(procedure::GETATTR, of(&handle))?;
                Ok(read_attr(&mut good(&answer)?)?.size_bytes)
            }
        }
    }

    fn remove(&mut self, path: &str) -> Result<()> {
        self.remove_by(procedure::REMOVE, path)
    }

    fn remove_dir(&mut self, path: &str) -> Result<()> {
        self.remove_by(procedure::RMDIR, path)
    }
}

/// A server of NFS version 3.
pub struct Nfs {
    /// Where it serves files.
    pub address: SocketAddr,
    /// Where it tells the handle of an export.
    pub mount: SocketAddr,
    /// Name of the export.
    pub export: String,
    /// Its process.
    pub pids: Vec<u32>,
}

impl Target for Nfs {
    fn connect(&self, _: Identity) -> Result<Box<dyn Process>> {
        Ok(process(Client::connect(self).context("a client of NFS")?))
    }

    fn pids(&self) -> Vec<u32> {
        self.pids.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::tests::every_work_is_verified;
    use crate::peers::works;
    use impresario_nfs::testing::MemoryTree;
    use impresario_nfs::{AccessRules, ExportSettings, Rules, Settings, Squash, start};
    use impresario_workload::access::Identity;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::time::Duration;

    fn identity() -> Identity {
        Identity { job: 0, node: None, wire_max_bytes: None, name: "test".into() }
    }

    #[test]
    fn our_own_server_is_measured_by_it() {
        let access = AccessRules { squash: Squash::None, ..AccessRules::default() };
        let rules = Rules { access, privileged_ports: false, ..Rules::default() };
        let export = ExportSettings {
            name: "/data".into(),
            backend: MemoryTree::new(),
            folder: String::new(),
            rules,
            reopen: None,
        };
        let running = start(Settings::new(vec![export]).unwrap()).unwrap();
        let address = running.addresses()[0];
        let server = Nfs { address, mount: address, export: "/data".into(), pids: Vec::new() };
        every_work_is_verified(&server, works(0.001));
        let client = server.connect(identity()).unwrap();
        assert!(client.make_dir("d").unwrap() && !client.make_dir("d").unwrap());
        let file = client.create("d/f").unwrap();
        // Neither the pieces nor the end are multiples of four.
        let data: Vec<u8> = (0..3_000_001u32).map(|i| (i ^ i >> 8) as u8).collect();
        file.write_at(&data, 0).unwrap();
        let mut back = vec![0; 4_000_000];
        assert_eq!((file.read_at(&mut back, 1).unwrap(), client.size("d/f").unwrap()), (3_000_000, Some(3_000_001)));
        assert_eq!(back[..3_000_000], data[1..]);
        assert!(client.remove_dir("d").is_err() && client.open("d/none", false).is_err());
        assert_eq!(client.size("d/none").unwrap(), None);
        client.remove("d/f").unwrap();
        client.remove_dir("d").unwrap();
    }

    /// A server that answers the first call with these bytes.
    fn answered(answer: Vec<u8>) -> Result<Vec<u8>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut mark = [0; 4];
            stream.read_exact(&mut mark).unwrap();
            stream.read_exact(&mut vec![0; (u32::from_be_bytes(mark) & !LAST) as usize]).unwrap();
            stream.write_all(&answer).unwrap();
            _ = stream.read(&mut [0]);
        });
        let connection = Connection::open(address, Duration::from_millis(200)).unwrap();
        let (root, folders) = (Vec::new(), HashMap::new());
        let mut client = Client { connection, root, next_xid: 1, read_bytes: 4, write_bytes: 4, folders };
        let answer = client.nfs(procedure::NULL, Writer::default());
        assert_eq!(client.connection.check().is_ok(), answer.is_ok());
        answer
    }

    #[test]
    fn answers_come_in_parts_and_nonsense_is_refused() {
        let head = |xid: u8| [&[0, 0, 0, xid, 0, 0, 0, 1][..], &[0; 16]].concat();
        let part = |last: u8, bytes: &[u8]| [&[last, 0, 0, bytes.len() as u8][..], bytes].concat();
        let good = head(1);
        assert_eq!(answered(part(0x80, &[&good[..], b"okay"].concat())).unwrap(), b"okay");
        let parts = [part(0, &good[..5]), part(0, &[]), part(0, &good[5..]), part(0, b"ok"), part(0x80, b"ay")];
        assert_eq!(answered(parts.concat()).unwrap(), b"okay");
        for (answer, why) in [
            (part(0x80, &head(2)), "call 1 was answered as 2"),
            (part(0x80, &good[..20]), "ends early"),
            ([part(0, &good), vec![0x80, 1, 0, 1]].concat(), "too long"),
            (part(0, &good), "no answer within 0.2 s"),
            (part(0x80, &[&good[..20], &[0, 0, 0, 3]].concat()), "NoProcedure"),
        ] {
            let error = answered(answer).unwrap_err().to_string();
            assert!(error.contains(why), "{error} instead of {why}");
        }
    }
}
