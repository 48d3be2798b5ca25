//! A client of NFSv3 and MOUNTv3: one connection, calls one after the other or several at once.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use impresario_backend::{Attr, SetAttr};

use crate::protocol::{MOUNT_PROGRAM, NFS_PROGRAM, Stability, Status, VERSION, procedure, read_attr, write_set};
use crate::rpc::{Acceptance, CallHead, Credential, read_reply};
use crate::xdr::{Garbage, Reader, Writer};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The server did not carry the call out.
    #[error("not carried out: {0:?}")]
    Refused(Acceptance),
    /// The call failed.
    #[error("failed with status {}", .0.0)]
    Failed(Status),
    /// What came makes no sense.
    #[error(transparent)]
    Garbage(#[from] Garbage),
}

/// Results of a call, from the status on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply(pub Vec<u8>);

impl Reply {
    /// The status, and what follows it.
    pub fn open(&self) -> Result<(Status, Reader<'_>), ClientError> {
        let mut reader = Reader::new(&self.0);
        Ok((Status(reader.u32()?), reader))
    }

    /// What follows a good status.
    pub fn good(&self) -> Result<Reader<'_>, ClientError> {
        match self.open()? {
            (Status::OK, reader) => Ok(reader),
            (status, _) => Err(ClientError::Failed(status)),
        }
    }
}

/// What a READ gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadBack {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// They reach the file's end.
    pub eof: bool,
}

/// The client.
pub struct Client {
    socket: TcpStream,
    next_xid: u32,
    credential: Credential,
    /// Replies that came before they were waited for.
    early: HashMap<u32, (Acceptance, Vec<u8>)>,
}

impl Client {
    /// Connects, as root unless [`Client::be`] says otherwise. Waits a minute for every answer at most.
    pub fn connect(address: SocketAddr) -> io::Result<Client> {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        socket.set_write_timeout(Some(Duration::from_secs(60)))?;
        let mut client = Client { socket, next_xid: 1, credential: Credential::None, early: HashMap::new() };
        client.be(0, 0, &[]);
        Ok(client)
    }

    /// Calls as this user from now on.
    pub fn be(&mut self, uid: u32, gid: u32, groups: &[u32]) {
        self.credential = Credential::Sys { uid, gid, groups: groups.to_vec() };
    }

    /// Calls with this credential from now on.
    pub fn with(&mut self, credential: Credential) {
        self.credential = credential;
    }

    /// The number of the next call.
    pub fn set_xid(&mut self, xid: u32) {
        self.next_xid = xid;
    }

    /// The connection, to misuse it.
    pub fn socket(&mut self) -> &mut TcpStream {
        &mut self.socket
    }

    /// Sends a call of NFS; gives its number.
    pub fn send(&mut self, number: u32, args: Writer) -> io::Result<u32> {
        self.send_to(NFS_PROGRAM, VERSION, number, args)
    }

    /// Sends a call of any program.
    pub fn send_to(&mut self, program: u32, version: u32, number: u32, args: Writer) -> io::Result<u32> {
        let xid = self.next_xid;
        self.next_xid = self.next_xid.wrapping_add(1);
        let mut out = Writer::with_capacity(args.len() + 128);
        out.u32(0);
        let credential = self.credential.clone();
        CallHead { xid, rpc_version: 2, program, version, procedure: number, credential }.write(&mut out);
        let mut bytes = out.into_bytes();
        bytes.extend(args.into_bytes());
        let mark = (bytes.len() - 4) as u32 | 1 << 31;
        bytes[..4].copy_from_slice(&mark.to_be_bytes());
        self.socket.write_all(&bytes)?;
        Ok(xid)
    }

    /// Waits for the reply to a call.
    pub fn wait(&mut self, xid: u32) -> Result<Reply, ClientError> {
        loop {
            if let Some((acceptance, results)) = self.early.remove(&xid) {
                return match acceptance {
                    Acceptance::Success => Ok(Reply(results)),
                    other => Err(ClientError::Refused(other)),
                };
            }
            let mut mark = [0; 4];
            self.socket.read_exact(&mut mark)?;
            let mut record = vec![0; (u32::from_be_bytes(mark) & 0x7fff_ffff) as usize];
            self.socket.read_exact(&mut record)?;
            let mut reader = Reader::new(&record);
            let (of, acceptance) = read_reply(&mut reader)?;
            let results = reader.rest().to_vec();
            self.early.insert(of, (acceptance, results));
        }
    }

    /// A call of NFS and its reply.
    pub fn call(&mut self, number: u32, args: Writer) -> Result<Reply, ClientError> {
        let xid = self.send(number, args)?;
        self.wait(xid)
    }

    /// The handle of an export's root, or of a directory below.
    pub fn mount(&mut self, path: &str) -> Result<Vec<u8>, ClientError> {
        let mut args = Writer::default();
        args.opaque(path.as_bytes());
        let xid = self.send_to(MOUNT_PROGRAM, VERSION, 1, args)?;
        let reply = self.wait(xid)?;
        Ok(reply.good()?.opaque(64)?.to_vec())
    }

    /// GETATTR.
    pub fn attr(&mut self, file: &[u8]) -> Result<Attr, ClientError> {
        let reply = self.call(procedure::GETATTR, handle(file))?;
        Ok(read_attr(&mut reply.good()?)?)
    }

    /// LOOKUP.
    pub fn lookup(&mut self, dir: &[u8], name: &str) -> Result<Vec<u8>, ClientError> {
        let reply = self.call(procedure::LOOKUP, name_in(dir, name))?;
        Ok(reply.good()?.opaque(64)?.to_vec())
    }

    /// CREATE, whether it is there or not.
    pub fn create(&mut self, dir: &[u8], name: &str, set: &SetAttr) -> Result<Vec<u8>, ClientError> {
        let mut args = name_in(dir, name);
        args.u32(0);
        write_set(&mut args, set);
        let reply = self.call(procedure::CREATE, args)?;
        made(&reply)
    }

    /// MKDIR.
    pub fn make_dir(&mut self, dir: &[u8], name: &str, mode: u32) -> Result<Vec<u8>, ClientError> {
        let mut args = name_in(dir, name);
        write_set(&mut args, &SetAttr { mode: Some(mode), ..SetAttr::default() });
        let reply = self.call(procedure::MKDIR, args)?;
        made(&reply)
    }

    /// REMOVE.
    pub fn remove(&mut self, dir: &[u8], name: &str) -> Result<(), ClientError> {
        self.call(procedure::REMOVE, name_in(dir, name))?.good().map(drop)
    }

    /// Sends a READ.
    pub fn send_read(&mut self, file: &[u8], offset: u64, count: u32) -> io::Result<u32> {
        let mut args = handle(file);
        args.u64(offset).u32(count);
        self.send(procedure::READ, args)
    }

    /// READ.
    pub fn read(&mut self, file: &[u8], offset: u64, count: u32) -> Result<ReadBack, ClientError> {
        let xid = self.send_read(file, offset, count)?;
        let reply = self.wait(xid)?;
        read_back(&reply)
    }

    /// Sends a WRITE.
    pub fn send_write(&mut self, file: &[u8], offset: u64, bytes: &[u8], how: Stability) -> io::Result<u32> {
        let mut args = handle(file);
        args.u64(offset).u32(bytes.len() as u32).u32(how as u32).opaque(bytes);
        self.send(procedure::WRITE, args)
    }

    /// WRITE: how stable it is, and the verifier.
    pub fn write(
        &mut self,
        file: &[u8],
        offset: u64,
        bytes: &[u8],
        how: Stability,
    ) -> Result<(Stability, [u8; 8]), ClientError> {
        let xid = self.send_write(file, offset, bytes, how)?;
        let reply = self.wait(xid)?;
        let mut reader = reply.good()?;
        skip_change(&mut reader)?;
        if reader.u32()? as usize != bytes.len() {
            return Err(Garbage.into());
        }
        Ok((Stability::read(&mut reader)?, reader.array()?))
    }

    /// COMMIT of the whole file: the verifier.
    pub fn commit(&mut self, file: &[u8]) -> Result<[u8; 8], ClientError> {
        let mut args = handle(file);
        args.u64(0).u32(0);
        let reply = self.call(procedure::COMMIT, args)?;
        let mut reader = reply.good()?;
        skip_change(&mut reader)?;
        Ok(reader.array()?)
    }

    /// All names of a directory with READDIR, by answers of at most so many bytes.
    pub fn list(&mut self, dir: &[u8], count: u32) -> Result<Vec<String>, ClientError> {
        let (mut names, mut cookie, mut verifier) = (Vec::new(), 0, [0; 8]);
        loop {
            let mut args = handle(dir);
            args.u64(cookie).array(&verifier).u32(count);
            let reply = self.call(procedure::READDIR, args)?;
            let mut reader = reply.good()?;
            reader.optional(read_attr)?;
            verifier = reader.array()?;
            while reader.bool()? {
                reader.u64()?;
                names.push(String::from_utf8_lossy(reader.opaque(1024)?).into_owned());
                cookie = reader.u64()?;
            }
            if reader.bool()? {
                return Ok(names);
            }
        }
    }
}

fn made(reply: &Reply) -> Result<Vec<u8>, ClientError> {
    let handle = reply.good()?.optional(|reader| reader.opaque(64).map(<[u8]>::to_vec))?;
    Ok(handle.ok_or(Garbage)?)
}

/// The bytes of a reply to READ.
pub fn read_back(reply: &Reply) -> Result<ReadBack, ClientError> {
    let mut reader = reply.good()?;
    reader.optional(read_attr)?;
    let (count, eof) = (reader.u32()?, reader.bool()?);
    let bytes = reader.opaque(count as usize)?.to_vec();
    reader.end()?;
    Ok(ReadBack { bytes, eof })
}

/// Arguments that begin with a handle.
pub fn handle(file: &[u8]) -> Writer {
    let mut args = Writer::default();
    args.opaque(file);
    args
}

/// Arguments that begin with a name in a directory.
pub fn name_in(dir: &[u8], name: &str) -> Writer {
    let mut args = handle(dir);
    args.opaque(name.as_bytes());
    args
}

/// Reads over what a node was before and after.
pub fn skip_change(reader: &mut Reader<'_>) -> Result<(), Garbage> {
    reader.optional(|reader| reader.array::<24>())?;
    reader.optional(read_attr)?;
    Ok(())
}
